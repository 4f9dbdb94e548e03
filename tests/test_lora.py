"""LoRA: its formulas against the merged model, central differences and PEFT; bits; every format."""
import math
from dataclasses import replace

import numba
import numpy as np
import pytest
from helpers import EVERY_TENSOR, TINY, hyper, random_flat
from models import TINY_CONFIGS

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
from nanoeuler_parts.lora.model import Adapted, LoraModel, merged_params
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


def test_merged_params_are_the_sum():
    cfg = CONFIGS["larger than a block"]
    flat = random_flat(cfg, 1, np.float32)
    adapter = random_adapter(cfg, LORA, dtype=np.float32)
    params = merged_params(base_of_flat(cfg, flat), LORA, adapter)
    got = ne.flat_of(cfg, params)
    assert np.allclose(got, merged(cfg, flat, LORA, adapter), rtol=1e-5, atol=1e-6)
    assert not np.array_equal(got, flat)


def test_training_lowers_the_loss_and_leaves_the_model_alone():
    cfg = replace(TINY, n_mtp=1)
    flat = random_flat(cfg, 1, np.float32)
    before = flat.copy()
    model = model_of(cfg, flat, adapter=init_adapter(cfg, LORA, 1))
    tokens, targets, _ = batch(cfg, 4)
    first = model.losses(tokens, targets[0]).sum()
    full = ne.Model(cfg, flat.copy()).losses(tokens, targets[0]).sum()
    assert math.isclose(first, full, rel_tol=1e-5)       # B is zero
    for t in range(1, 200):
        model.gradient(tokens, targets, np.full((4, 1), 0.05))
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


def test_targets_are_named_in_any_order():
    assert targets_in("v, q") == ("q", "v") and targets_in(",".join(PROJECTIONS)) == (*PROJECTIONS,)
    with pytest.raises(ValueError, match="found 'w, x'"):
        targets_in("q,w,x")
