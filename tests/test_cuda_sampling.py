"""A token that is sampled on the GPU is the one that nanoeuler.sample returns.  The kernel's device
functions run as Python, in 16 threads instead of 1,024."""
import importlib.util
import math
from types import SimpleNamespace

import numpy as np
import pytest

import nanoeuler as ne

if importlib.util.find_spec("numba_cuda") is None:
    pytest.skip("numba-cuda is not installed; it comes with the extra cuda",
                allow_module_level=True)

from oracles.threads_of_a_block import Block

from nanoeuler_parts.decode.sampling import AT_A_TIME, largest_of, sample_one
from nanoeuler_parts.gpu.launches import inlined

STALE = (1 << 64) - 1                        # an entry of an earlier step: key and token


@inlined
def sampled(token, z, odds, listed, V, draw):
    top_token, best_key = largest_of(z, V)
    token[0] = top_token
    sample_one(token, z, odds, listed, V, top_token, best_key, draw)


def on_block(z, draw):
    """Returns (the sampled token, the listed candidates in ascending order)."""
    at_once = 4 * AT_A_TIME
    room = -(-len(z) // (4 * at_once)) * 4 * at_once
    token, odds, listed = [-1], [math.nan] * room, [STALE] * room
    Block(4).run(sampled, token, z, odds, listed, len(z), list(map(float, draw)),
                 LISTED_AT_A_TIME=at_once)
    return token[0], sorted(entry & 0xFFFFFFFF for entry in listed if entry not in (0, STALE))


def on_cpu(z, draw):
    return ne.sample(z, SimpleNamespace(random=lambda: draw.uniform),
                     draw._replace(top_k=int(draw.top_k)))


def request(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, uniform=0.5):
    return ne.SampleRequest(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
                            uniform=uniform)


@pytest.mark.parametrize("V", (1, 3, 16, 17, 61, 130))
def test_a_token_is_that_of_the_cpu(V):
    """With all restrictions at once, from logits that are all different, often equal, or all
    equal"""
    rng = np.random.default_rng(V)
    for turn in range(12):
        z = rng.normal(size=V).astype(np.float32) * rng.choice([1, 5])
        z = (z, np.round(z), np.zeros(V, np.float32))[turn % 3]
        if V > 3 and turn % 4 == 3:
            z[rng.integers(0, V, V // 3)] = -np.inf
            z[0] = 0
        draw = request(rng.choice([0.5, 1, 30]), rng.choice([0, 1, 7, V]),
                       rng.choice([0, 0.3, 0.9, 1]), rng.choice([0, 0, 0.2]), rng.random())
        assert on_block(z, draw)[0] == on_cpu(z, draw), (turn, draw)


@pytest.mark.parametrize("uniform", (0.0, 0.5, math.nextafter(1, 0)))
def test_the_first_and_the_last_random_number(uniform):
    z = np.log(np.arange(1, 41, dtype=np.float32))
    for draw in (request(uniform=uniform), request(top_p=0.9, uniform=uniform),
                 request(top_k=9, uniform=uniform)):
        assert on_block(z, draw)[0] == on_cpu(z, draw)


def test_few_tokens_are_candidates():
    """Each restriction alone excludes most tokens before the search for its cutoff begins.  Without
    a restriction, all tokens are candidates."""
    z = np.linspace(0, -40, 200, dtype=np.float32)[np.random.default_rng(1).permutation(200)]
    for draw, most in ((request(), 200), (request(top_k=4), 12), (request(top_p=0.9), 60),
                       (request(min_p=0.1), 20)):
        token, seen = on_block(z, draw)
        assert token == on_cpu(z, draw) and token in seen and len(seen) <= most
        kept = np.flatnonzero(z >= np.sort(z)[-4]) if draw.top_k else [int(z.argmax())]
        assert set(kept) <= set(seen)


def test_each_token_can_be_sampled():
    """Of tokens with equal logits, each is sampled for its share of the random numbers."""
    z, n = np.zeros(37, np.float32), 37
    for i in range(n):
        assert on_block(z, request(uniform=(i + 0.5) / n))[0] == i


@pytest.mark.parametrize("top_p", (0.6, 0.9))
def test_the_stricter_of_two_limits_decides_among_equal_logits(top_p):
    """Top-k keeps three of the five tokens with equal logits, and top-p two or all five."""
    z = np.array([0, 1, 0, 0, 0, 0], np.float32)
    for uniform in (0.5, 0.99):
        draw = request(top_k=4, top_p=top_p, uniform=uniform)
        assert on_block(z, draw)[0] == on_cpu(z, draw)


def test_a_token_exactly_at_min_p_is_kept():
    """With min-p 1, the kept tokens are those as probable as the most probable one."""
    z = np.array([3, 0, 3, 3, 2], np.float32)
    assert [on_block(z, request(min_p=1.0, uniform=u))[0] for u in (0.1, 0.5, 0.9)] == [0, 2, 3]
