"""Threads that share sequences: the same bits for any number of them, and no step that never ends.

The steps run in a process that has 16 threads, on however few cores: they wait for each other and
are interrupted at any place.
"""
import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT, ok, slow
from models import TINY_CONFIGS
from numba import njit, set_num_threads

import nanoeuler as ne

pytestmark = pytest.mark.unit
THREADS = 1, 2, 3, 5, 8, 16
DTYPES = {"f32": (np.float32, None), "f64": (np.float64, None), "bf16": (np.float32, ne.BF16)}
WIDE = ne.replace(ne.PRESETS["small"], n_layer=1, n_head=5, n_kv_head=5, n_embd=100, seq_len=83,
                  n_hidden=37)
CONFIGS = {**TINY_CONFIGS, "odd lengths, wide": WIDE}


def step(cfg, dtype, B, muon_lr):
    """Losses, gradients and weights of two steps, hashed."""
    number, narrow = DTYPES[dtype]
    rng, bits = np.random.default_rng(B), []
    flat = ne.init_params(cfg, 0, number)
    model = ne.Model(cfg, flat, dtype=narrow)
    for t in (1, 2):
        tokens = rng.integers(0, cfg.vocab_size, (B, cfg.seq_len)).astype(np.int32)
        targets = rng.integers(-1, cfg.vocab_size, (cfg.n_mtp, B, cfg.seq_len)).astype(np.int32)
        losses = model.run(ne.GRADIENT, tokens, targets, ne.loss_weights(targets, 0.3))
        bits += losses.tobytes(), model.g_flat.tobytes()
        model.update(ne.hyper_at(t, 0.01, beta1=0.9, beta2=0.95, weight_decay=0.1, clip=1.0,
                                 muon_lr=muon_lr, momentum=0.95, newton_schulz=3,
                                 embedding_lr=2.0))
        bits += flat.tobytes(), model.losses(tokens, targets[0]).tobytes()
    return hashlib.sha256(b"".join(bits)).hexdigest()


def steps(dtype, configs, batches, threads):
    """Prints {"config, B": hashes by number of threads}; called in a process of its own."""
    found = {}
    for name in configs:
        for B in batches:
            hashes = []
            for n in threads:
                set_num_threads(n)
                hashes.append(step(CONFIGS[name], dtype, B, 0.02 * (B % 2)))
            found[f"{name}, {B}"] = hashes
    print(json.dumps(found))


def hashes(dtype, configs, batches, threads=THREADS, n=16, before="", **env):
    """What `steps` finds where Numba has n threads."""
    code = (f"{before}\nimport sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
            f"import test_cores; test_cores.steps({dtype!r}, {configs}, {batches}, {threads})")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8",
                            timeout=280, env={**os.environ, "NUMBA_NUM_THREADS": str(n), **env})
    return json.loads(ok(result))


@pytest.mark.parametrize("dtype, names, threads", [
    *((dtype, ["odd lengths, wide", "longer than a block"], (1, 3, 16)) for dtype in DTYPES),
    *(slow(dtype, list(CONFIGS), THREADS) for dtype in DTYPES)])
def test_the_bits_do_not_depend_on_the_threads(dtype, names, threads):
    """B = 8 is less than 16 threads, and no multiple of 3 or 5."""
    found = hashes(dtype, names, [1, 3, 8], threads)
    assert len(found) == 3 * len(names)
    assert len({x for each in found.values() for x in each}) == len(found)
    for name, each in found.items():
        assert len(each) == len(threads) and len(set(each)) == 1, name


@pytest.mark.parametrize("before, env", [
    ("import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})", {}),
    ("", dict(OMP_THREAD_LIMIT="2")), ("", dict(OMP_THREAD_LIMIT="1")),
    ("", dict(NUMBA_THREADING_LAYER="workqueue"))],
    ids=["one processor", "two threads for 16 tasks", "one thread", "workqueue"])
def test_whoever_runs_the_threads_the_step_ends(before, env):
    """Of 16 threads that were asked for, all on one processor, or only one is there."""
    if before and not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system keeps no process on a processor")
    names = ["odd lengths, wide", "longer than a block"]
    found = hashes("f32", names, [1, 3], [1, 16], before=before, **env)
    for name, each in found.items():
        assert len(set(each)) == 1, name


@njit
def parts_of(out, team, n, unit):
    k = 0
    for i0, i1 in ne.shared(team, n, unit):
        out[k] = i0, i1
        k += 1
    return k


@pytest.mark.parametrize("n_parts", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("n, unit", [(1, 8), (7, 8), (8, 8), (45, 8), (45, 6), (12, 1), (320, 16)])
def test_parts_are_all_there_is(n_parts, n, unit):
    """Of one thread: it gets all parts, in order, and no part twice; so in the next loop."""
    team = ne.Team(0, n_parts, np.zeros(8, np.int64), np.zeros(1, np.int64))
    for _ in range(2):
        out = np.zeros((100, 2), np.int64)
        parts = out[:parts_of(out, team, n, unit)].tolist()
        assert parts[0][0] == 0 and parts[-1][1] == n and len(parts) <= n_parts
        assert all(i1 == j0 for (_, i1), (j0, _) in zip(parts, parts[1:]))
        assert all(0 < i1 - i0 <= -(-n // n_parts) + unit and i0 % unit == 0 for i0, i1 in parts)


def test_waiting_threads_spin_for_a_moment_and_then_sleep():
    """The import sets both, unless the user has. Without them, a token takes up to 1.5 times as
    long (bench/NOTES.md)."""
    assert {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} <= os.environ.keys()
