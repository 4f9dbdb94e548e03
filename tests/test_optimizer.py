"""The optimizer against PyTorch and NumPy, and the learning rate."""
import math

import numpy as np
import pytest
from helpers import EVERY_TENSOR, TINY, drawn, full_table, hyper, needs, random_flat
from hypothesis import given
from hypothesis import strategies as st
from numba import config, set_num_threads
from oracles import naive

import nanoeuler as ne

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]


def test_adamw_equals_pytorch():
    torch = needs("torch")
    rng, N, n_decay = np.random.default_rng(1), 5000, 3111
    p, m, v = rng.standard_normal(N), np.zeros(N), np.zeros(N)
    parts = [torch.nn.Parameter(torch.tensor(x)) for x in (p[:n_decay].copy(), p[n_decay:].copy())]
    opt = torch.optim.AdamW([dict(params=[parts[0]], weight_decay=0.1),
                             dict(params=[parts[1]], weight_decay=0.0)],
                            lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for t in range(1, 21):
        g = rng.standard_normal(N) * 10.0 ** rng.integers(-6, 3)
        for part, piece in zip(parts, (g[:n_decay], g[n_decay:])):
            part.grad = torch.tensor(piece.copy())
        norm = torch.nn.utils.clip_grad_norm_(parts, 2.0).item()
        opt.step()
        got = ne.adamw(p, grad := g.copy(), m, v, n_decay, hyper(t, clip=2.0))
        assert math.isclose(got, norm, rel_tol=1e-12) and not grad.any()
        want = np.concatenate([x.detach().numpy() for x in parts])
        assert np.abs(p - want).max() < 1e-7     # torch adds 1e-6 to the norm it clips by


def test_the_norm_of_entries_whose_squares_are_no_float32():
    """From 2e19 on, and below 1e-23, where what is lost is nothing beside the others."""
    for g in (np.float32([3e20, 4e20]), np.float32([2e19, 1e-30, 3]), np.float32([3e38] * 700)):
        assert math.isclose(ne.gradient_norm(g), np.linalg.norm(g.astype(float)), rel_tol=1e-6)
    for bad in np.inf, -np.inf, np.nan:
        assert not math.isfinite(ne.gradient_norm(np.float32([1, bad, 2])))


@drawn(40)
@given(N=st.integers(1, 700), share=st.floats(0, 1), t=st.integers(1, 50), seed=st.integers(0, 99))
def test_adamw_equals_numpy(N, share, t, seed):
    rng, n_decay = np.random.default_rng(seed), int(share * N)
    p, g, m, v = rng.standard_normal((4, N))
    v = v * v
    decay = np.arange(N) < n_decay
    want = naive.adamw(p, g, m, v, decay, 1e-2, 0.9, 0.95, 1e-8, 0.1, t)
    norm = ne.adamw(p, g, m, v, n_decay, hyper(t))
    assert norm > 0 and not g.any()
    for got, x in zip((p, m, v), want):
        assert np.allclose(got, x, rtol=1e-12, atol=1e-14)


def test_adamw_in_float32_clips_and_zeroes():
    rng = np.random.default_rng(2)
    p, g = rng.standard_normal((2, 4000)).astype(np.float32)
    m, v, want = np.zeros_like(p), np.zeros_like(p), p.astype(float)
    norm = math.sqrt((g.astype(float) ** 2).sum())
    want = naive.adamw(want, g.astype(float) / norm, 0 * want, 0 * want, np.arange(4000) < 9, 1e-2,
                       0.9, 0.95, 1e-8, 0.1, 1)[0]
    assert math.isclose(ne.adamw(p, g, m, v, 9, hyper(1, clip=1.0)), norm, rel_tol=1e-7)
    assert np.abs(p - want).max() < 1e-6 and not g.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 1234, 3999])
def test_adamw_touches_nothing_if_the_norm_is_not_finite(bad, at):
    rng = np.random.default_rng(3)
    p, g, m, v = rng.standard_normal((4, 4000)).astype(np.float32)
    g[at] = bad
    before = [x.copy() for x in (p, g, m, v)]
    assert not math.isfinite(ne.adamw(p, g, m, v, 9, hyper(1)))
    assert all(np.array_equal(x, y, equal_nan=True) for x, y in zip((p, g, m, v), before))


def test_norm_does_not_depend_on_the_threads():
    if config.NUMBA_NUM_THREADS < 2:
        pytest.skip("one core")
    for seed in range(60):
        g, norms = np.random.default_rng(seed).standard_normal(5000), []
        for n in (1, 2):
            set_num_threads(n)
            p = np.ones(5000)
            norms.append(ne.adamw(p, g.copy(), 0 * p, 0 * p, 10, hyper(1)))
        assert norms[0] == norms[1], seed


# ---- heads that are switched off
HEADS = ne.replace(TINY, n_mtp=4, **EVERY_TENSOR)


def of_heads(model):
    """{head: its parameters and moments as bytes}, of the auxiliary heads"""
    n_tied = int(model.cfg.tie_embeddings)
    table = ne.param_table(model.cfg)
    stacks = [ne.views(x, table).lm_head for x in model.buffers()]
    return {k: b"".join(x[k - n_tied].tobytes() for x in stacks) for k in range(1, 4)}


def learn(model, t, weight, muon_lr):
    tokens = np.random.default_rng(t).integers(0, 262, (3, 8)).astype(np.int32)
    targets = np.stack([np.roll(tokens, -1 - k, 1) for k in range(4)])
    for part in (slice(0, 2), slice(2, 3)):  # of two micro-batches
        share = weight[part] if np.ndim(weight) == 2 else weight
        model.gradient(tokens[part], targets[:, part], share)
    model.update(hyper(t, lr=0.1, wd=1.0)._replace(muon_lr=muon_lr, momentum=0.9,
                                                   newton_schulz=3.0))


@pytest.mark.parametrize("muon_lr", [0.0, 0.02])
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_without_weight_does_not_change(tied, muon_lr):
    """Neither by decay nor by momentum; with a weight in one micro-batch, all of it learns.
    Head 0 and the layers learn in each step."""
    cfg = ne.replace(HEADS, tie_embeddings=tied)
    model = ne.Model(cfg, random_flat(cfg, 4, np.float32))
    learn(model, 1, np.ones(4), muon_lr)     # now there are moments
    rows = np.zeros((3, 4))
    rows[:, 0] = rows[2, 2] = 1              # head 2 in the last micro-batch alone
    for t, (weight, changed) in enumerate([(np.array([1.0, 1, 0, 0]), {1}), (rows, {2}),
                                           (np.array([1.0, 0, 0, 0]), set()),
                                           (np.array([0.0, 0, 0, 1]), {3}),
                                           (np.ones(4), {1, 2, 3})], 2):
        before, flat, moments = of_heads(model), model.flat.copy(), model.m.copy()
        learn(model, t, weight, muon_lr)
        after = of_heads(model)
        assert {k for k in after if after[k] != before[k]} == changed, t
        now, then = (ne.views(x, full_table(cfg)) for x in (model.flat, flat))
        for name in now._fields:
            changes = not np.array_equal(getattr(now, name), getattr(then, name))
            assert changes or name == "lm_head", name
        assert not np.array_equal(model.m, moments) and not model.g_flat.any()


@pytest.mark.parametrize("tied", [False, True])
def test_a_part_that_begins_or_ends_inside_a_head(tied):
    """The parts of several GPUs: entry by entry, what is left is the part without heads that are
    off, in order and once."""
    cfg = ne.replace(HEADS, tie_embeddings=tied)
    model, rng = ne.Model(cfg, random_flat(cfg, 4, np.float32)), np.random.default_rng(1)
    numbers = np.full(model.flat.size, -1)   # of the head that an entry belongs to
    for k, head in enumerate(ne.views(numbers, ne.param_table(cfg)).lm_head, int(tied)):
        head[:] = k
    for on in ({0}, {0, 2}, {0, 1, 3}, {3}, {0, 1, 2, 3}, set()):
        model.weighted_heads = on
        stays = np.isin(numbers, [-1, *on]) | (not on)
        for _ in range(50):
            first, last = sorted(rng.integers(0, model.flat.size + 1, 2))
            found = [i for x in model.without_heads_off(slice(first, last))
                     for i in range(x.start, x.stop)]
            assert found == (first + np.flatnonzero(stays[first:last])).tolist(), (on, first, last)


def test_a_step_of_all_heads_is_one_update_of_the_buffer(monkeypatch):
    """As it was before heads could be left out: the same bits.  And one for each part otherwise."""
    parts, update = [], ne.adamw_update
    monkeypatch.setattr(ne, "adamw_update", lambda p, *more: (parts.append(p.size),
                                                              update(p, *more)))
    model = ne.Model(HEADS, random_flat(HEADS, 4, np.float32))
    learn(model, 1, np.ones(4), 0.0)
    assert parts == [model.flat.size]
    learn(model, 2, np.array([1.0, 0, 0, 0]), 0.0)
    each = HEADS.vocab_size * HEADS.n_embd
    assert len(parts) == 3 and sum(parts[1:]) == model.flat.size - 3 * each


def test_lr_at():
    lr = lambda step: ne.lr_at(step, 100, 1.0, 10, 0.1)
    assert [lr(s) for s in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert [lr(s) for s in (10, 55, 100)] == pytest.approx([1, 0.55, 0.1])
    assert lr(1000) == pytest.approx(0.1)                    # never below the floor
    rates = [lr(s) for s in range(10, 101)]
    assert rates == sorted(rates, reverse=True)
    assert ne.lr_at(0, 1, 1.0, 0, 0.1) == 1 and ne.lr_at(3, 3, 1.0, 3, 0.5) <= 1
    assert ne.lr_at(0, 10, 1.0, 0, 0.0) == 1                 # no warm-up
    late = [ne.lr_at(s, 100, 1.0, 10, 0.1, cooldown=0.2) for s in (4, 10, 82, 91, 100, 101)]
    assert late == pytest.approx([0.5, 1, 1, 0.55, 0.1, 0.1])
    assert ne.lr_at(10**6, math.inf, 1.0, 10, 0.0, cooldown=0.5) == 1
