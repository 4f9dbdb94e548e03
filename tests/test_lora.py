"""LoRA: its formulas against the merged model, central differences and PEFT; bits; every format."""
import math
import sys
import types
from dataclasses import replace

import numba
import numpy as np
import pytest
from helpers import EVERY_TENSOR, ROOT, TINY, few, hyper, random_flat
from models import TINY_CONFIGS
from oracles import plain_parts

import check
import nanoeuler as ne
from nanoeuler_parts.checkpoint.matrices import in_int8
from nanoeuler_parts.kernels import compile_lora_kernels
from nanoeuler_parts.lora import model as lora_model
from nanoeuler_parts.lora.adapter import (
    adapter_views, init_adapter, Lora, n_entries, n_trained, PROJECTIONS, sites_of, targets_in,
    tensors_of,
)
from nanoeuler_parts.lora.base import Base, base_of_flat, Matrix
from nanoeuler_parts.lora.model import Adapted, LoraModel
from nanoeuler_parts.machine.numbers import to_bf16

pytestmark = pytest.mark.unit
CONFIGS = {name: replace(cfg, n_mtp=1) for name, cfg in TINY_CONFIGS.items()}
CONFIGS["larger than a block"] = replace(
    TINY, n_embd=33, n_head=3, n_kv_head=1, head_dim=34, n_hidden=70, seq_len=131, vocab_size=150,
    n_mtp=1, **EVERY_TENSOR)
LORA = Lora(3, 4.0)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    for dtype in ("f64", "f32", "bf16"):
        compile_lora_kernels(dtype)


def random_adapter(cfg, lora, seed=1, dtype=np.float64, scale=0.2):
    """A and B of the targets at which nothing is zero"""
    flat = ne.aligned((n_entries(cfg, lora.rank),), dtype)
    rng = np.random.default_rng(seed)
    for a, b in tensors_of(cfg, lora, flat).values():
        a[...] = scale * rng.standard_normal(a.shape)
        b[...] = scale * rng.standard_normal(b.shape)
    return flat


def model_of(cfg, flat, lora=LORA, adapter=None, dtype=None):
    adapter = random_adapter(cfg, lora, dtype=flat.dtype) if adapter is None else adapter
    return LoraModel(cfg, Adapted(base_of_flat(cfg, flat), lora, adapter), dtype=dtype)


def merged(cfg, flat, lora, adapter):
    """The flat buffer of W + s B A"""
    found = ne.aligned(flat.shape, flat.dtype)
    found[:] = flat
    p = ne.views(found, ne.param_table(cfg))
    for name, (a, b) in tensors_of(cfg, lora, adapter).items():
        site = sites_of(cfg, lora.rank)[name]
        for layer in range(cfg.n_layer):
            w = getattr(p, site.matrix)[layer, slice(*site.rows)]
            w += lora.alpha / lora.rank * (b[layer] @ a[layer])
    return found


def batch(cfg, B, seed=1):
    rng = np.random.default_rng(seed)
    tokens, targets = check.random_batch(cfg, B, cfg.seq_len, rng)
    return tokens, targets, rng.random(B)


@pytest.mark.parametrize("targets", ["q,k,v,o,gate,up,down", "q,v", "k,o,up", "down"])
@pytest.mark.parametrize("name", CONFIGS)
def test_losses_and_gradients_are_those_of_the_merged_model(name, targets):
    """With W' = W + s B A and its gradient dW':   dA = s B^T dW',   dB = s dW' A^T"""
    cfg, lora = CONFIGS[name], Lora(3, 4.0, targets_in(targets))
    flat = random_flat(cfg, 1)
    adapter = random_adapter(cfg, lora)
    model = model_of(cfg, flat, lora, adapter)
    tokens, targets, weight = batch(cfg, 3)
    ce = model.run(ne.GRADIENT, tokens, targets[0], weight)
    full = ne.Model(cfg, merged(cfg, flat, lora, adapter))
    want = full.run(ne.GRADIENT, tokens, targets, weight[:, None])[:, 0]
    assert np.allclose(ce, want, rtol=1e-12) and ce.any()
    learned, total = tensors_of(cfg, lora, model.g_flat), 0.0
    for name, (da, db) in learned.items():
        a, b = tensors_of(cfg, lora, adapter)[name]
        site = sites_of(cfg, lora.rank)[name]
        dw = lora.scale * getattr(full.g, site.matrix)[:, slice(*site.rows)]
        for got, want in ((da, np.einsum("lnr,lnk->lrk", b, dw)),
                          (db, np.einsum("lnk,lrk->lnr", dw, a))):
            assert np.abs(got - want).max() < 1e-12 * max(1e-3, np.abs(want).max())
            total += np.abs(got).sum()
    # the others learn nothing
    assert math.isclose(np.abs(model.g_flat).sum(), total) and (total or cfg.seq_len == 1)
    assert n_trained(cfg, lora) == sum(x.size for pair in learned.values() for x in pair)


def errors_of(model, tokens, targets, weight, rng):
    """The largest error of each tensor's gradient, measured as in check.py"""
    def f():
        model.pack()
        return model.losses(tokens, targets[0]) @ weight

    model.g_flat[:] = 0
    model.run(ne.GRADIENT, tokens, targets[0], weight)
    grads = adapter_views(model.cfg, model.lora.rank, model.g_flat.copy())
    errors = {}
    views = adapter_views(model.cfg, model.lora.rank, model.flat)
    for name, view, g in zip(views._fields, views, grads):
        worst, rms = 0.0, math.sqrt((g * g).mean())
        for u in check.directions(view.shape, rng):
            before, values = view.copy(), []
            for s in (-2, -1, 1, 2):
                view[...] = before + s * check.STEP * u
                values.append(f())
            view[...] = before
            a, n = (g * u).sum(), (8 * (values[2] - values[1]) - (values[3] - values[0])) / (
                12 * check.STEP)
            worst = np.maximum(worst, abs(a - n) / (abs(a) + abs(n) + rms + 1e-30))
        errors[name] = float(worst)
    model.pack()
    return errors


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_equal_central_differences(name):
    cfg, rng = CONFIGS[name], np.random.default_rng(2)
    model = model_of(cfg, check.random_params(cfg, rng), adapter=random_adapter(cfg, LORA, 3))
    errors = errors_of(model, *batch(cfg, 2), rng)
    assert len(errors) == 8 and max(errors.values()) < check.TOLERANCE, errors


def test_a_weight_for_each_token():
    """Equal weights in a row change no bit, and the gradient is linear in the weights."""
    cfg = CONFIGS[next(iter(CONFIGS))]
    tokens, targets, of_rows = batch(cfg, 3)
    T = cfg.seq_len

    def gradient_of(targets, weight):
        model = model_of(cfg, random_flat(cfg, 1), adapter=random_adapter(cfg, LORA, 3))
        model.gradient(tokens, targets, weight)
        return model.g_flat.copy()

    weight = np.zeros((3, cfg.n_mtp, T))
    weight[:, 0] = of_rows[:, None]
    assert np.array_equal(gradient_of(targets, weight), gradient_of(targets, weight[:, :, 0]))
    first = np.random.default_rng(2).random(targets.shape) < 0.5
    weight[:, 0] = np.where(first[0], 1.5, -0.25)
    ones = np.ones(cfg.n_mtp)
    want = (1.5 * gradient_of(np.where(first, targets, -1), ones)
            - 0.25 * gradient_of(np.where(first, -1, targets), ones))
    found = gradient_of(targets, weight)
    assert np.abs(found - want).max() < 1e-12 * np.abs(want).max() and want.any()


def same(models, cfg, B=3):
    """Do these models have bit-identical losses and gradients?"""
    found = []
    for model in models:
        model.g_flat[:] = 0
        tokens, targets, weight = batch(cfg, B)
        ce = model.run(ne.GRADIENT, tokens, targets[0], weight)
        found.append((ce.tobytes(), model.g_flat.tobytes(), model.losses(tokens, targets[0])))
        assert np.isfinite(ce).all() and model.g_flat.any()
        assert np.array_equal(ce, found[-1][2])          # validation has the same losses
    return all(x[:2] == found[0][:2] for x in found)


WIDE = replace(TINY, n_embd=72, n_hidden=1100, seq_len=70, vocab_size=300, n_head=6, n_kv_head=2,
               head_dim=12, n_layer=3, n_mtp=1)


@pytest.mark.parametrize("dtype", [None, ne.BF16])
def test_bits_do_not_depend_on_threads(dtype):
    flat = random_flat(WIDE, 1, np.float32, scale=0.1)
    adapter = random_adapter(WIDE, LORA, dtype=np.float32)
    found = []
    for threads in (1, 2):
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        model = model_of(WIDE, flat, LORA, adapter, dtype)
        tokens, targets, weight = batch(WIDE, 3)
        ce = model.run(ne.GRADIENT, tokens, targets[0], weight)
        found.append((ce.tobytes(), model.g_flat.tobytes()))
    assert found[0] == found[1]


def made(adapter, dtype=None, rank=3):
    """A model in float64 with an adapter of this dtype"""
    cfg, lora = CONFIGS["grouped queries"], Lora(rank, 4.0)
    return model_of(cfg, random_flat(cfg, 1), lora, random_adapter(cfg, lora, dtype=adapter), dtype)


def passed(tokens, targets):
    made("f8").losses(np.array([tokens], np.int32), np.array([targets], np.int32))


@pytest.mark.parametrize("act, words", [
    (lambda: made("f4"), "float32 products of an adapter in float32 and a model in float64; use"),
    (lambda: made("f8", "f4"), "cannot compute float32 products of an adapter in float64 and a"),
    (lambda: made("f8", rank=1025), "expected a rank up to 1024, found 1025"),
    (lambda: passed([3, -1], [1, 1]), "expected token ids from 0 to 261, found -1 to 3"),
    (lambda: passed([3, 262], [1, 1]), "expected token ids from 0 to 261, found 3 to 262"),
    (lambda: passed([3, 4], [-1, 262]), "expected token ids from 0 to 261, found 0 to 262")])
def test_what_is_rejected(act, words):
    with pytest.raises(ne.UserError, match=words):
        act()


@pytest.mark.parametrize("dtype", [None, ne.BF16])
def test_bits_do_not_depend_on_memory(monkeypatch, dtype):
    """Layers whose activations are computed again, and logits of some rows at a time"""
    flat = random_flat(WIDE, 1, np.float32, scale=0.1)
    adapter = random_adapter(WIDE, LORA, dtype=np.float32)
    models = [model_of(WIDE, flat, LORA, adapter, dtype)]
    assert same(models, WIDE) and models[0].n_kept == 3
    for kept in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(lora_model, "MOST_ROOM", kept * models[0].bytes_of_layer(3, 64))
            patch.setattr(lora_model, "LOGITS", 16 * 300)
            models.append(model_of(WIDE, flat, LORA, adapter, dtype))
            assert same(models[-1:], WIDE) and models[-1].n_kept <= kept
    assert same(models, WIDE)


@pytest.mark.parametrize("dtype", [None, ne.BF16])
def test_bits_do_not_depend_on_kept_panels(monkeypatch, dtype):
    """Of all frozen matrices or of none.  A sum of 1,100 terms has two blocks."""
    flat = random_flat(WIDE, 1, np.float32, scale=0.1)
    adapter = random_adapter(WIDE, LORA, dtype=np.float32)
    models = [model_of(WIDE, flat, LORA, adapter, dtype)]
    monkeypatch.setattr(lora_model, "MOST_KEPT", 1000)
    models.append(model_of(WIDE, flat, LORA, adapter, dtype))
    for model, is_kept in zip(models, (True, False)):
        panels = [*model.kept_head, *(x for kept in model.kept for x in kept)]
        assert {len(x) > 0 for x in panels} == {is_kept}
    assert same(models, WIDE)


def test_float32_and_bfloat16_are_near_float64():
    flat = random_flat(WIDE, 1, np.float64, scale=0.1)
    exact = model_of(WIDE, flat)
    assert same([exact], WIDE)
    low = ne.aligned(flat.shape, np.float32)
    low[:] = flat
    for dtype, most in ((None, 1e-5), (ne.BF16, 0.04)):
        model = model_of(WIDE, low, LORA, random_adapter(WIDE, LORA, dtype=np.float32), dtype)
        assert same([model], WIDE)
        error = np.linalg.norm(model.g_flat - exact.g_flat) / np.linalg.norm(exact.g_flat)
        assert 1e-9 < error < most, error


def stored_as(cfg, flat, stored):
    """(Base that stores matrices as bfloat16 or int8, flat buffer of the same numbers in float32)
    """
    p = ne.views(flat, ne.param_table(cfg))
    rounded = ne.aligned(flat.shape, np.float32)
    rounded[:] = flat
    same = ne.views(rounded, ne.param_table(cfg))

    def rows_of(name, i):
        w, to = (getattr(x, name) if name == "wte" else getattr(x, name)[i] for x in (p, same))
        if stored == "int8":
            q, scale = in_int8(np.ascontiguousarray(w))
            to[...] = q * scale
            return Matrix(q.view(np.uint8), scale[:, 0].copy())
        bits = to_bf16(w)
        to[...] = ne.from_bf16(bits)
        return Matrix(bits.view(np.uint8), np.ones(len(w), np.float32))

    def vector_of(name, layer):
        return getattr(p, name) if layer is None else getattr(p, name)[layer]

    return Base(cfg, rows_of, vector_of, stored), rounded


@pytest.mark.parametrize("dtype", [None, ne.BF16])
@pytest.mark.parametrize("stored", ["bf16", "int8"])
@pytest.mark.parametrize("name", ["grouped queries", "larger than a block"])
def test_stored_matrices_compute_like_the_same_numbers_in_float32(name, stored, dtype):
    cfg = CONFIGS[name]
    base, flat = stored_as(cfg, random_flat(cfg, 1, np.float32), stored)
    adapter = random_adapter(cfg, LORA, dtype=np.float32)
    models = [LoraModel(cfg, Adapted(x, LORA, adapter), dtype=dtype)
              for x in (base, base_of_flat(cfg, flat))]
    assert same(models, cfg)
    assert models[0].base.nbytes < 0.6 * models[1].base.nbytes
    assert np.array_equal(base.matrix("qkv", 1), ne.views(flat, ne.param_table(cfg)).qkv[1])


def test_training_lowers_the_loss_and_leaves_the_model_alone():
    cfg = replace(TINY, n_mtp=1)
    flat = random_flat(cfg, 1, np.float32)
    before = flat.copy()
    model = model_of(cfg, flat, adapter=init_adapter(cfg, LORA, 1))
    tokens, targets, _ = batch(cfg, 1)
    first = model.losses(tokens, targets[0]).sum()
    full = ne.Model(cfg, flat.copy()).losses(tokens, targets[0]).sum()
    assert math.isclose(first, full, rel_tol=1e-5)       # B is zero
    for t in range(1, 200):
        model.gradient(tokens, targets, np.full((1, 1), 0.1))
        ce, norm = model.update(hyper(t, wd=0.0))
        assert math.isfinite(norm) and len(ce) == 1
    assert model.losses(tokens, targets[0]).sum() < 0.6 * first
    assert np.array_equal(flat, before)
    assert not model.g_flat.any()


def test_a_gradient_that_is_not_finite_changes_nothing():
    cfg = replace(TINY, n_mtp=1)
    model = model_of(cfg, random_flat(cfg, 1, np.float32))
    tokens, targets, weight = batch(cfg, 2)
    before = model.flat.copy()
    model.gradient(tokens, targets, np.array([[np.inf], [1.0]]))
    _, norm = model.update(hyper(1))
    assert not math.isfinite(norm) and np.array_equal(model.flat, before)
    assert model.first_bad_tensor().startswith("gradient of parameter ")
    model.gradient(tokens, targets, weight[:, None])
    assert math.isfinite(model.update(hyper(1))[1])


@pytest.mark.parametrize("room", [1, 1 << 22, 1 << 30])
def test_the_size_of_a_micro_batch_does_not_depend_on_threads(room, monkeypatch):
    """Gradients are summed over micro-batches, so another size would give other bits."""
    monkeypatch.setattr(lora_model, "MOST_ROOM", room)
    model, found = model_of(WIDE, random_flat(WIDE, 1, np.float32)), []
    for threads in (1, 2):
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        found.append([model.micro_batch(n, None, T) for n in (1, 100, 9999) for T in (8, 1024)])
    assert found[0] == found[1] and found[0][0] == 1 and model.micro_batch(9, 2) == 2
    assert room > 1 or found[0] == [1, 1, 64, 1, 64, 1]  # 512 rows


@pytest.mark.parametrize("rank", [1, 3, 100])
def test_an_adapter_begins_as_in_peft(rank):
    """A is uniform in (-1 / sqrt(K), 1 / sqrt(K)) and B is zero, and so are those of no target."""
    lora = Lora(rank, 4.0, targets_in("q,v,o,down"))
    flat, sizes = init_adapter(WIDE, lora, 1, np.float64), []
    for name, (a, b) in tensors_of(WIDE, lora, flat).items():
        K = {"q": 72, "v": 72, "o": 72, "down": 1100}[name]
        assert a.shape == (3, rank, K) and not b.any()
        x = a.ravel() * math.sqrt(K)
        assert 1 - 20 / x.size < np.abs(x).max() < 1 and abs(x.mean()) < 4 / math.sqrt(3 * x.size)
        sizes.append(x.size)
    assert np.count_nonzero(flat) == sum(sizes)
    again = init_adapter(WIDE, lora, 1, np.float64)
    assert np.array_equal(flat, again) and not np.array_equal(flat, init_adapter(WIDE, lora, 2))


def test_targets_are_named_in_any_order():
    assert targets_in("v, q") == ("q", "v") and targets_in(",".join(PROJECTIONS)) == (*PROJECTIONS,)
    with pytest.raises(ValueError, match="found 'w, x'"):
        targets_in("q,w,x")


# ---- planted errors
# A mutant is lora/kernels.py with one formula changed, run as plain Python, beside a copy of
# nanoeuler.py that uses tests/oracles/plain_parts.py in place of machine code.
MUTANTS = {
    "s left out of u": ("store(u, total, scale)", "store(u, total, 1)"),
    "s left out of v": ("store(v, total, scale)", "store(v, total, 1)"),
    "u B^T left out": ("part, right = u[:, u0:u0 + rank], bt[i:i + 1]",
                       "part, right = 0 * u[:, u0:u0 + rank], bt[i:i + 1]"),
    "u of another projection": ("u[:, u0:u0 + rank]", "u[:, :rank]"),
    "v A left out": ("tile(columns, columns, v, right, m, 0, 1)",
                     "tile(columns, columns, 0 * v, right, m, 0, 1)"),
    "a panel of other columns": ("right = a[k0 // width:k0 // width + 1]", "right = a[:1]"),
    "a kept panel of other columns": ("right = kept[i:i + 1, first:first + n]",
                                      "right = kept[:1, first:first + n]"),
    "kept rows of another block": ("right = kept[i:i + 1, first:first + n]",
                                   "right = kept[i:i + 1, :n]"),
    "blocks kept over each other": ("pack_of_columns(kept.backward[i:i + 1, first:]",
                                    "pack_of_columns(kept.backward[i:i + 1]"),
    "B of k from the rows of q": ("pack(p.b_k, g.qkv_b[q1:k1])", "pack(p.b_k, g.qkv_b[:k1 - q1])"),
    "terms of a sum left out": ("for n0 in range(0, N, KB):", "for n0 in range(0, N - KB, KB):"),
    "a sum begun anew": ("tile(columns, columns, part, right, m, 0, 1 if n0 else 0)",
                         "tile(columns, columns, part, right, m, 0, 0)"),
    "base left out": ("product(team, x2, a.x1, yes,", "product(team, x2, a.x1, no,"),
    "dA of k from v of q": ("dy[:, q1:k1], p.b_k", "dy[:, :k1 - q1], p.b_k"),
    "v of the values from B of the keys": ("dy[:, k1:QKV], p.b_v", "dy[:, k1:QKV], p.b_k"),
    "gate and up swapped": ("d.dy_gate_up[t0:t1, F:], p.b_up", "d.dy_gate_up[t0:t1, :F], p.b_up"),
    "rope turns on": ("H + G, -one)", "H + G, one)"),
    "residual path dropped": ("rmsnorm_backward(d.dx1[t0:t1], d.dx[t0:t1], d.dnorm",
                              "rmsnorm_backward(d.dx1[t0:t1], 0 * d.dx[t0:t1], d.dnorm"),
    "dB of o from the wrong step": ("add_outer(g.attn_proj_b[n0:n1], d.dy_attn_proj",
                                    "add_outer(g.attn_proj_b[n0:n1], d.dy_down"),
    "dA of down from the wrong input": ("d.v_down, a.swiglu[:, k0:k1], n0",
                                        "d.v_gate_up, a.swiglu[:, k0:k1], n0"),
    "dB of gate and up from the columns of gate": ("d.dy_gate_up, a.u_gate_up[:, k0:k1], n0",
                                                   "d.dy_gate_up, a.u_gate_up[:, :k1 - k0], n0"),
    "dA, rows of another projection": ("d.v_qkv, a.attn_in[:, k0:k1], n0",
                                       "d.v_qkv, a.attn_in[:, k0:k1], 0"),
    "the second sequence attends to the first": ("m0, m1 = b * T, (b + 1) * T\n"
                                                 "        blocked_attention_backward",
                                                 "m0, m1 = 0, T\n"
                                                 "        blocked_attention_backward"),
    "position of the first sequence": ("t = m % T\n            rope(d.dqkv",
                                       "t = 0\n            rope(d.dqkv"),
    "the norm of the head without its gain": ("h.dx[t0:t1], h.dnorm[t0:t1], h.x[t0:t1], gain",
                                              "h.dx[t0:t1], h.dnorm[t0:t1], h.x[t0:t1], 0 * gain"),
    "norms of q and k without a gradient": ("if v.q_norm.size:\n            head_norm_backward",
                                            "if False:\n            head_norm_backward"),
}
SMALL = replace(TINY, n_embd=6, n_hidden=5, head_dim=6, n_head=4, n_kv_head=2, vocab_size=9,
                seq_len=6, n_layer=2, n_mtp=1)
FOLDER = ROOT / "nanoeuler_parts" / "lora"
SMALL_BLOCKS = [("KB = 1024 ", "KB = 4 "), ("A_COLUMNS = 256 ", "A_COLUMNS = 4 "),
                ("LOGITS = 1 << 26 ", "LOGITS = 36 ")]


@pytest.fixture(scope="module")
def plain():
    """{name: module} of nanoeuler.py and of lora/, not compiled, with small blocks."""
    names = "adapter", "base", "kernels", "model"
    modules = {name: types.ModuleType(f"nanoeuler_parts.lora.{name}") for name in names}
    program = types.ModuleType("nanoeuler")
    program.__file__ = str(ROOT / "nanoeuler.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numba.config, "DISABLE_JIT", 1)
        patch.setitem(sys.modules, "nanoeuler_parts", None)          # as if it were not there
        patch.setitem(sys.modules, "nanoeuler", program)
        source = (ROOT / "nanoeuler.py").read_text(encoding="utf-8")
        exec(compile(source, "nanoeuler.py", "exec"), vars(program))
        vars(program).update((name, x) for name, x in vars(plain_parts).items() if name[0] != "_")
        program.most_memory = lambda: 1 << 40
        program.to_bf16 = program.from_bf16 = None
        patch.undo()
        patch.setattr(numba.config, "DISABLE_JIT", 1)
        patch.setitem(sys.modules, "nanoeuler", program)
        for name, module in modules.items():
            patch.setitem(sys.modules, module.__name__, module)
            text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
            for old, new in SMALL_BLOCKS:
                text = text.replace(old, new)
            exec(compile(text, f"{name}.py", "exec"), vars(module))
    return {"nanoeuler": program, **modules}


def worst_error(plain, monkeypatch, *change):
    """The largest error of a gradient, with this change of kernels.py"""
    kernels, model = vars(plain["kernels"]), vars(plain["model"])
    before = dict(kernels), dict(model)
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    monkeypatch.setattr(check, "ENTRIES", 1)
    monkeypatch.setattr(check, "DIRECTIONS", 1)
    try:
        if change:
            text = (FOLDER / "kernels.py").read_text(encoding="utf-8")
            assert change[0] in text, f"kernels.py has no {change[0]!r} any more"
            i = text.rindex(change[0])
            text = text[:i] + change[1] + text[i + len(change[0]):]
            with monkeypatch.context() as patch:
                for module in plain.values():
                    patch.setitem(sys.modules, module.__name__, module)
                for old, new in SMALL_BLOCKS:
                    text = text.replace(old, new)
                exec(compile(text, "kernels.py", "exec"), kernels)
            model.update((name, kernels[name]) for name in (
                "run_forward", "run_backward", "run_head", "run_keeping", "run_packing"))
        worst = 0.0
        for cfg in (SMALL, replace(SMALL, qk_norm=True, qkv_bias=True, n_layer=1)):
            rng = np.random.default_rng(1)
            lora = plain["adapter"].Lora(2, 3.0)
            base = plain["base"].base_of_flat(cfg, check.random_params(cfg, rng))
            adapted = plain["model"].Adapted(base, lora, random_adapter(cfg, LORA._replace(rank=2)))
            found = plain["model"].LoraModel(cfg, adapted)
            worst = max(worst, *errors_of(found, *batch(cfg, 2), rng).values())
        return worst
    finally:
        for values, old in zip((kernels, model), before):
            values.update(old)


def test_the_unchanged_kernels_pass(plain, monkeypatch):
    assert worst_error(plain, monkeypatch) < check.TOLERANCE


@pytest.mark.parametrize("name", few(MUTANTS, 8))
def test_a_planted_error_is_found(name, plain, monkeypatch):
    assert not worst_error(plain, monkeypatch, *MUTANTS[name]) < check.TOLERANCE
