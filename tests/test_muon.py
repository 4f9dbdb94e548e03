"""Muon against torch.optim.Muon and against singular values; equal bits for any threads; runs."""
import json
import math
import os
import signal

import numba
import numpy as np
import pytest
from helpers import (EVERY_TENSOR, FAST, before_each_step, full_table, needs, outcome, present,
                     refused, run, told)
from hypothesis import given
from hypothesis import strategies as st

import nanoeuler as ne
from nanoeuler_parts.checkpoint.tensors import named, named_moments
from nanoeuler_parts.files.safetensors import map_tensors, write_tensors
from nanoeuler_parts.runs.options import TrainOptions
from nanoeuler_parts.runs.schedule import initial_params, OFF, ON, Schedule
from nanoeuler_parts.runs.start import options_in
from nanoeuler_parts.tuning.sft import SftRun

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]
# Square, tall and wide matrices, of even and odd sides, past the edge of a tile
CFG = ne.Config(n_embd=37, n_head=3, n_kv_head=1, head_dim=14, n_layer=2, n_hidden=75, seq_len=8,
                vocab_size=260, n_mtp=2)
SETTINGS = dict(beta1=0.9, beta2=0.95, weight_decay=0.1)


STEPS, EMBEDDING_LR = TrainOptions.newton_schulz, TrainOptions.embedding_lr


def hyper(t, clip=1.0, muon_lr=0.02, momentum=0.95):
    return ne.hyper_at(t, 4e-3, clip=clip, muon_lr=muon_lr, momentum=momentum, newton_schulz=STEPS,
                       embedding_lr=EMBEDDING_LR, **SETTINGS)


def model_of(dtype=None, seed=1, cfg=CFG):
    flat = ne.aligned((ne.n_params(cfg),), np.float32 if dtype == ne.BF16 else dtype or np.float64)
    flat[:] = ne.init_params(cfg, seed)
    return ne.Model(cfg, flat, dtype=dtype)


def is_of_muon(name, shape):
    return name.startswith("model.layers.") and len(shape) == 2


def gradients(cfg, steps, seed=0):
    """Of steps, some clipped and some not, of a few strong directions as real ones are"""
    rng = np.random.default_rng(seed)
    for t in range(1, steps + 1):
        g = np.empty(ne.n_params(cfg))
        for x in named(cfg, g).values():
            x[...] = rng.standard_normal(x.shape)
            if x.ndim == 2:
                x += 9 * np.outer(rng.standard_normal(len(x)), rng.standard_normal(x.shape[1]))
        yield t, g * 10.0 ** -(t % 4)


def test_a_run_of_another_verb_by_muon_is_rejected():
    settings = SftRun.Options().written() | {"optimizer": "muon"}
    with pytest.raises(ne.UserError, match="a.bin was trained with muon, but sft learns with Ad"):
        options_in(SftRun, "a.bin", ne.State(options=settings))


# ---- the update
def test_it_equals_pytorch(monkeypatch):
    """Five steps in float64: PyTorch's Muon, whose only bfloat16 is one cast, and its AdamW."""
    torch = needs("torch")
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone())
    model = model_of()
    params = {name: torch.nn.Parameter(torch.tensor(x.copy()))
              for name, x in named(CFG, model.flat).items()}
    groups = {kind: [] for kind in ("embedding", "muon", "head", "gain")}
    for name, p in params.items():
        if name == "model.embed_tokens.weight":
            kind = "embedding"
        elif is_of_muon(name, p.shape):
            kind = "muon"
        else:
            kind = "head" if p.dim() == 2 else "gain"
        groups[kind].append(p)
    assert len(groups["muon"]) == 7 * CFG.n_layer and len(groups["gain"]) == 2 * CFG.n_layer + 1
    muon = torch.optim.Muon(groups["muon"], lr=0.02, weight_decay=0.1, momentum=0.95,
                            ns_steps=STEPS)
    adamw = torch.optim.AdamW([dict(params=groups["embedding"], weight_decay=0.1 / EMBEDDING_LR,
                                    lr=EMBEDDING_LR * 4e-3),
                               dict(params=groups["head"], weight_decay=0.1),
                               dict(params=groups["gain"], weight_decay=0.0)],
                              lr=4e-3, betas=(0.9, 0.95), eps=1e-8)
    for t, g in gradients(CFG, 5):
        model.g_flat[:] = g
        _, norm = model.update(hyper(t))
        assert math.isclose(norm, np.linalg.norm(g), rel_tol=1e-12) and not model.g_flat.any()
        for name, x in named(CFG, g).items():
            params[name].grad = torch.tensor(x * min(1, 1 / norm))
        muon.step()
        adamw.step()
        for name, x in named(CFG, model.flat).items():
            assert np.allclose(x, params[name].detach().numpy(), rtol=1e-10, atol=1e-12), (t, name)
    momenta = named(CFG, model.m)
    for p in groups["muon"]:
        name = next(name for name, x in params.items() if x is p)
        assert np.allclose(momenta[name], muon.state[p]["momentum_buffer"], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("dtype, bound", [(np.float32, 1e-4), (ne.BF16, 0.1)])
def test_lower_precision_is_near(dtype, bound):
    """The share of an update that differs from float64's.  Each of 9 products in bfloat16 is off
    by 2^-8 of its result, and the polynomial's slope of up to 3.4 makes more of it."""
    exact, low = model_of(), model_of(dtype)
    before = low.flat.copy()
    for t, g in gradients(CFG, 3):
        for model in (exact, low):
            model.g_flat[:] = g
            model.update(hyper(t))
    moved = {name: x - y for (name, x), y in zip(
        named(CFG, exact.flat).items(), named(CFG, before).values(), strict=True)}
    for name, x in named(CFG, low.flat).items():
        if is_of_muon(name, x.shape):
            off = np.linalg.norm(x - named(CFG, exact.flat)[name])
            assert off < bound * np.linalg.norm(moved[name]), name


def test_all_directions_count():
    """The singular values of the first update are those of its gradient, over their norm, each
    brought nearer to 1 by the polynomial."""
    model = model_of()
    before = model.flat.copy()
    _, g = next(gradients(CFG, 1))
    model.g_flat[:] = g
    model.update(hyper(1, muon_lr=1.0)._replace(weight_decay=0.0))
    a, b, c = ne.NEWTON_SCHULZ
    moved, gradient = named(CFG, before - model.flat), named(CFG, g)
    for name, x in moved.items():
        if is_of_muon(name, x.shape):
            s = np.linalg.svd(gradient[name], compute_uv=False)
            start = s = s / np.linalg.norm(s)
            for _ in range(STEPS):
                s = a * s + b * s**3 + c * s**5
            N, K = x.shape
            got = np.linalg.svd(x, compute_uv=False) / math.sqrt(max(1, N / K))
            assert np.allclose(got, np.sort(s)[::-1], rtol=1e-9), name
            assert np.median(got) > 20 * np.median(start) and got.max() < 1.3, name


@given(l=st.integers(1, 90), share=st.floats(0.01, 1), seed=st.integers(0, 99))
def test_orthogonalize(l, share, seed):
    """U p(S) V^T, with the polynomial applied to the singular values one by one"""
    side, rng = max(1, int(share * l)), np.random.default_rng(seed)
    U, _ = np.linalg.qr(rng.standard_normal((l, side)))
    V, _ = np.linalg.qr(rng.standard_normal((side, side)))
    s = rng.random(side)
    y, other = (ne.aligned((l, side), np.float64) for _ in range(2))
    gram, square = (ne.aligned((side, side), np.float64) for _ in range(2))
    y[...] = U * s @ V.T
    got = ne.orthogonalize(y, other, STEPS, gram, square, np.empty((0, 0)))
    a, b, c = ne.NEWTON_SCHULZ
    for _ in range(STEPS):
        s = a * s + b * s ** 3 + c * s ** 5
    assert np.allclose(got, U * s @ V.T, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("N, K", [(1, 1), (7, 3), (8, 40), (31, 8), (33, 5), (64, 130), (97, 96)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_symmetric_product(N, K, dtype):
    x, out = ne.aligned((K, N), dtype), ne.aligned((N, N), dtype)
    x[...] = np.random.default_rng(N).standard_normal((K, N))
    out[...] = np.nan
    ne.symmetric_product(out, x.T, x)
    want = x.T.astype(np.float64) @ x
    assert np.array_equal(out, out.T)
    assert np.abs(out - want).max() < 4 * K * np.finfo(dtype).eps * np.abs(want).max()


def test_matrices():
    """They are those of the layers, each once, without the embedding, heads and gains."""
    for cfg in (ne.replace(CFG, **EVERY_TENSOR), ne.replace(CFG, tie_embeddings=True),
                ne.PRESETS["big"]):
        found, part = np.zeros(ne.n_params(cfg), int), ne.muon_matrices(cfg)
        for start, rows, columns in part:
            found[start:start + rows * columns] += 1
        p = ne.views(found, ne.param_table(cfg))
        assert all((x == 1).all() for x in p[ne.OF_LAYERS])
        assert not p.wte.any() and not p.lm_head.any() and not any(x.any() for x in p[ne.VECTORS])
        sizes = part[:, 1] * part[:, 2]
        assert (np.diff(sizes) <= 0).all() and len(part) == 7 * cfg.n_layer


@pytest.mark.parametrize("dtype", [np.float32, ne.BF16])
def test_threads_change_no_bit(dtype):
    if numba.config.NUMBA_NUM_THREADS < 2:
        pytest.skip("one core")
    ends = []
    for threads in (1, 2):
        numba.set_num_threads(threads)
        model = model_of(dtype)
        for t, g in gradients(CFG, 2):
            model.g_flat[:] = g
            model.update(hyper(t))
        ends.append(model)
    one, two = ends
    for name in ("flat", "m", "v"):
        assert np.array_equal(getattr(one, name), getattr(two, name)), name


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_it_touches_nothing_if_the_norm_is_not_finite(bad):
    model = model_of(np.float32)
    for t, g in gradients(CFG, 2):
        model.g_flat[:] = g
        if t == 2:
            model.g_flat[ne.n_params(CFG) // 2] = bad
            before = [x.copy() for x in model.buffers()]
        _, norm = model.update(hyper(t))
    assert not math.isfinite(norm)
    assert all(np.array_equal(x, y) for x, y in zip(before, model.buffers()))


def test_a_gradient_of_zeros_only_decays():
    """Nothing is divided by its norm."""
    model = model_of()
    before = model.flat.copy()
    model.update(hyper(1))
    for name, x in named(CFG, model.flat).items():
        if is_of_muon(name, x.shape):
            assert np.allclose(x, (1 - 0.02 * 0.1) * named(CFG, before)[name], rtol=1e-14)


# ---- runs
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_run_goes_on_to_the_same_bits(dtype, elsewhere, text, tmp_path, capsys, monkeypatch):
    flags = ("--data", text, "--steps", 12, "--dtype", dtype, *FAST)
    said = told("train", "--out", "whole.bin", "--optimizer", "muon", *flags)
    assert "Muon             lr 0.02, momentum 0.9" in said

    def interrupt(run):
        if run.state.step == 5:
            os.kill(os.getpid(), signal.SIGINT)          # this step is the last

    with monkeypatch.context() as patch:
        before_each_step(patch, interrupt)
        run("train", "--out", "parts.bin", "--optimizer", "muon", *flags)
    assert ne.read_checkpoint("parts.bin").state.step == 6
    refused(capsys, "train", "--resume", "--out", "parts.bin", "--muon-lr", 0.1,
            words=["parts.bin was started with --muon-lr 0.02, not 0.1"])
    run("train", "--resume", "--out", "parts.bin")
    whole, parts = (outcome(tmp_path, name) for name in ("whole", "parts"))
    assert whole.step == 12 and whole == parts
    run("train", "--out", "adamw.bin", "--optimizer", "adamw", *flags)
    assert outcome(tmp_path, "adamw").arrays != whole.arrays


def test_the_schedule_holds_for_both_rates():
    options = TrainOptions(optimizer="muon", warmup=4, floor=0.5, muon_lr=0.1, lr=0.01)
    for step in (0, 3, 4, 7, 10):
        h = Schedule(options, n_embd=128).hyper(step, 10)
        assert math.isclose(h.muon_lr, 10 * h.lr) and h.momentum == 0.9
    assert math.isclose(h.lr, 0.005)
    assert Schedule(TrainOptions(optimizer="adamw"), 128).hyper(10, 10).muon_lr == 0


def test_the_embedding_starts_shorter_and_what_writes_at_zero():
    cfg = ne.replace(ne.PRESETS["small"], **EVERY_TENSOR)

    table = full_table(cfg)
    plain, short = (
        ne.views(initial_params(cfg, TrainOptions(optimizer=x, seed=4)), table)
        for x in ("adamw", "muon"))
    assert np.array_equal(short.wte, np.float32(0.3) * plain.wte)
    zero = {"attn_proj", "down", "lm_head"}
    for name in present(short).keys() - {"wte"}:
        x, y = getattr(plain, name), getattr(short, name)
        assert x.any() == (name != "qkv_bias"), name
        assert (not y.any() if name in zero else np.array_equal(x, y)), name


def test_each_optimizer_has_its_defaults(elsewhere, text, capsys):
    o = TrainOptions.chosen(optimizer="adamw", lr=1e-3)
    assert (o.lr, o.floor, o.warmup, o.weight_decay, o.mtp_until) == (1e-3, 0.02, 50, 0.3, 1)
    o = TrainOptions.chosen(seed=3)
    assert (o.optimizer, o.lr, o.floor, o.warmup, o.weight_decay) == ("muon", 4e-3, 0, 25, 0.1)
    refused(capsys, "train", "--data", text, "--optimizer", "adamw", "--momentum", 0.9, *FAST,
            words=["--momentum: this is a setting of Muon; drop it, or use --optimizer muon"])


def test_when_the_auxiliary_heads_are_off():
    """From 0.3 to 0.9 of the run; not before it has a length."""
    schedule = Schedule(TrainOptions(), 128)
    assert schedule.phase(0, math.inf, ON) == ON
    off = [schedule.phase(step, 10, ON) == OFF for step in range(10)]
    assert off == [False] * 3 + [True] * 6 + [False]


def test_a_phase_of_the_auxiliary_heads_does_not_return():
    """A run by the clock is planned again and again.  A longer plan switches nothing back."""
    schedule, s, found = Schedule(TrainOptions(), 128), ne.State(), []
    for step, n_steps in ((2, 10), (3, 10), (4, 20), (5, 1000), (8, 10), (9, 10), (10, 30),
                          (11, math.inf)):
        s.mtp_phase = schedule.phase(step, n_steps, s.mtp_phase)
        found.append(s.mtp_phase == OFF)
    assert found == [False, True, True, True, True, False, False, False]
    again = ne.State(**json.loads(json.dumps(s.written())))          # as --resume reads it
    assert schedule.phase(12, 30, again.mtp_phase) != OFF


@pytest.mark.parametrize("weight", [[1.0, 0.0], [0.0, 0.0], [0.5, 0.25]])
def test_heads_without_weight_take_no_part(weight):
    """The gradient is what it is with their weight of zero, and their loss is not measured."""
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, CFG.vocab_size, (2, 6)).astype(np.int32)
    targets = rng.integers(0, CFG.vocab_size, (CFG.n_mtp, 2, 6)).astype(np.int32)
    weight = np.array([*weight, *[0.0] * (CFG.n_mtp - 2)])
    model, all_heads = model_of(), model_of()
    model.gradient(tokens, targets, weight)
    ce = all_heads.run(ne.GRADIENT, tokens, targets, weight).sum(0)
    assert np.allclose(model.g_flat, all_heads.g_flat, rtol=1e-12, atol=1e-14)
    trained = 1 + max(0, *np.flatnonzero(weight), 0)
    assert np.allclose(model.ce[:trained], ce[:trained]) and not model.ce[trained:].any()


def test_an_optimizer_there_is_not_is_refused(elsewhere, text, capsys):
    refused(capsys, "train", "--data", text, "--optimizer", "sgd", *FAST,
            words=["--optimizer: expected adamw or muon, found sgd"])


# ---- checkpoints
def test_a_checkpoint_has_momentum_under_its_own_name(elsewhere, text):
    """Of the layers' matrices there is no second moment, and none is stored."""
    run("train", "--data", text, "--steps", 3, "--optimizer", "muon", *FAST)
    c = ne.read_checkpoint("nanoeuler.bin")
    _, tensors = map_tensors("nanoeuler.bin")
    N, n = ne.n_params(c.cfg), sum(rows * columns for _, rows, columns in ne.muon_matrices(c.cfg))
    assert {name: x.size for name, x in tensors.items() if "model" not in name and "adam" in name
            or "muon" in name} == {"muon.momentum": n, "adamw.m": N - n, "adamw.v": N - n}
    m, v = (ne.views(x, ne.param_table(c.cfg)) for x in c.moments)
    assert all(x.any() for x in (m.qkv, m.down, v.wte, v.lm_head[0], v.final_norm))
    assert not any(x.any() for x in v[ne.OF_LAYERS])


def test_moments_of_another_optimizer_are_refused(elsewhere, text, capsys):
    run("train", "--data", text, "--steps", 2, "--optimizer", "muon", *FAST)
    c = ne.read_checkpoint("nanoeuler.bin")
    tensors = named(c.cfg, c.flat) | named_moments(c.cfg, "muon", *c.moments)
    meta, _ = map_tensors("nanoeuler.bin")
    c.state.options["optimizer"] = "adamw"
    write_tensors("nanoeuler.bin", meta | {"state": ne.json.dumps(ne.asdict(c.state))}, tensors,
                     "")
    refused(capsys, "train", "--resume", "--steps", 4,
            words=["stores moments of Muon, but its settings name another optimizer"])


def test_a_run_begun_before_goes_on_as_it_was(elsewhere, text):
    """With its five steps to an orthogonal matrix, three times the rate for the embedding, heads
    that never rest, and moments in the two buffers of AdamW."""
    run("train", "--data", text, "--steps", 4, "--optimizer", "muon", "--dtype", "f32", *FAST)
    c = ne.read_checkpoint("nanoeuler.bin")
    meta, _ = map_tensors("nanoeuler.bin")
    for name in ("newton_schulz", "embedding_lr", "mtp_until", "mtp_from", "dtype"):
        del c.state.options[name]
    tensors = named(c.cfg, c.flat) | named_moments(c.cfg, "adamw", *c.moments)
    write_tensors("nanoeuler.bin", meta | {"state": ne.json.dumps(ne.asdict(c.state))}, tensors,
                     "")
    run("train", "--resume", "--steps", 6)
    o = ne.read_checkpoint("nanoeuler.bin").state.options
    assert (o["newton_schulz"], o["embedding_lr"], o["mtp_until"], o["dtype"]) == (5, 3.0, 1, "f32")


def test_settings_of_muon_reach_the_update():
    """More steps bring singular values nearer to 1; the embedding's rate is its own."""
    ends = {}
    for steps, embedding_lr in ((1, 1.0), (5, 1.0), (5, 2.0)):
        model = model_of()
        before = model.flat.copy()
        _, model.g_flat[:] = next(gradients(CFG, 1))
        model.update(hyper(1)._replace(weight_decay=0.0, newton_schulz=steps,
                                       embedding_lr=embedding_lr))
        ends[steps, embedding_lr] = ne.views(model.flat - before, ne.param_table(CFG))
    q = [np.linalg.svd(x.attn_proj[0], compute_uv=False) / 0.02 for x in ends.values()]
    assert np.median(abs(q[1] - 1)) < 0.3 < np.median(abs(q[0] - 1))
    assert np.array_equal(q[1], q[2])
    assert np.allclose(ends[5, 2.0].wte, 2 * ends[5, 1.0].wte, rtol=1e-9, atol=1e-12)
