"""Each op of sections 3 and 4 against plain NumPy, in float32 and float64, at awkward shapes.

Tolerances are multiples of the unit roundoff u of the type: a sum of K products in any order is off
by at most (K + 2) u sum |products| (Higham 2002, 3.1); the rest gets a small multiple of u.
"""
import math
import os
import subprocess
import sys

import naive
import numpy as np
import pytest
from conftest import ROOT
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numba import njit

import nanoeuler as ne

DTYPES = [np.float32, np.float64]
both = pytest.mark.parametrize("dtype", DTYPES)
W32, W64 = ne.tile_width(np.float32), ne.tile_width(np.float64)
EDGES = sorted({1, 2, 3, 70} | {n + i for n in (ne.MR, W64, W32) for i in (-1, 0, 1)})
sizes = st.one_of(st.sampled_from(EDGES), st.integers(1, 75))


def u(dtype):
    return np.finfo(dtype).eps / 2


def normal(shape, seed, dtype=np.float64):
    """Normal numbers that float32 holds exactly, in aligned memory as the engine keeps them."""
    out = ne.aligned(shape, dtype)
    out[...] = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return out


def close(got, want, dtype, factor):
    """|got - want| <= factor * u * the largest value: the error of a short chain of operations."""
    assert got.dtype == dtype
    limit = factor * u(dtype) * max(1.0, np.abs(want).max())
    assert np.abs(got - want).max() <= limit, (np.abs(got - want).max(), limit)


# ---- 3 exp, aligned
@njit
def exp_all(y, x):
    for i in range(x.size):
        y[i] = ne.exp(x[i])


@both
def test_exp(dtype):
    x = np.linspace(-87, 87.9, 400_001).astype(dtype)
    y = np.empty_like(x)
    exp_all(y, x)
    error = np.abs(y / np.exp(x.astype(np.float64)) - 1).max()
    assert error < (3e-7 if dtype == np.float32 else 1e-15)


@both
def test_exp_at_the_ends(dtype):
    x = np.array([0, -0.0, 1, -1e-30, -100, -1e30, -np.inf, np.nan, -745], dtype)
    y = np.empty_like(x)
    exp_all(y, x)
    assert y[0] == y[1] == 1 and np.isclose(y[2], math.e, rtol=3e-7) and y[3] == 1
    assert np.all((0 <= y[4:7]) & (y[4:7] < 1.3e-38)) and 0 <= y[8] < 1.3e-38
    assert np.isnan(y[7])


@both
def test_aligned_memory(dtype):
    for shape in [(1,), (3, 5), (0, 4), (7, 1, 9)]:
        x = ne.aligned(shape, dtype)
        assert x.shape == shape and x.dtype == dtype and not x.any()
        assert x.ctypes.data % 64 == 0 or x.size == 0


# ---- 4.1 matmul
@njit
def matmul_any(big, base, x, b, M, N, K, add, transposed, packed):
    """The product of corners of x and b into the middle of big."""
    out, right = big[1:1 + M, 2:2 + N], b[:K, 1:1 + N]
    left = x[3:3 + K, 1:1 + M].T if transposed else x[1:1 + M, 3:3 + K]
    w = 2 * ne.BITS // (8 * out.itemsize)
    panels = np.full(((N + w - 1) // w + 1, K, w), np.nan, out.dtype)
    panels = panels[:(N + w - 1) // w]
    ne.pack(panels, right)
    if add:
        if packed:
            ne.matmul_add(out, base[:M, :N], left, panels)
        else:
            ne.matmul_add(out, base[:M, :N], left, right)
    elif packed:
        ne.matmul(out, left, panels)
    else:
        ne.matmul(out, left, right)


@both
@settings(max_examples=150)
@example(M=1, N=1, K=0, add=False, transposed=False, packed=False, seed=0)
@example(M=5, N=7, K=0, add=True, transposed=False, packed=True, seed=0)
@given(M=sizes, N=sizes, K=st.integers(0, 75), add=st.booleans(), transposed=st.booleans(),
       packed=st.booleans(), seed=st.integers(0, 99))
def test_matmul(dtype, M, N, K, add, transposed, packed, seed):
    big, base = normal((M + 2, N + 40), seed, dtype), normal((M + 1, N + 3), seed + 1, dtype)
    x = normal((K + 4, M + 2) if transposed else (M + 2, K + 4), seed + 2, dtype)
    b, before = normal((K + 1, N + 40), seed + 3, dtype), big.copy()
    matmul_any(big, base, x, b, M, N, K, add, transposed, packed)
    left = (x[3:3 + K, 1:1 + M].T if transposed else x[1:1 + M, 3:3 + K]).astype(np.float64)
    right, start = b[:K, 1:1 + N].astype(np.float64), add * base[:M, :N].astype(np.float64)
    bound = (K + 3) * u(dtype) * (np.abs(left) @ np.abs(right) + np.abs(start))
    assert np.all(np.abs(big[1:1 + M, 2:2 + N] - (start + left @ right)) <= bound)
    before[1:1 + M, 2:2 + N] = big[1:1 + M, 2:2 + N]
    assert np.array_equal(big, before), "written outside of the product"


@both
def test_matmul_add_in_place(dtype):
    out, x, b = normal((9, 37), 1, dtype), normal((9, 5), 2, dtype), normal((5, 37), 3, dtype)
    want = out.astype(np.float64) + x.astype(np.float64) @ b
    ne.matmul_add(out, out, x, b)
    close(out, want, dtype, 20)


@both
def test_pack(dtype):
    w, b = ne.tile_width(dtype), normal((5, 2 * ne.tile_width(dtype) + 3), 1, dtype)
    panels = np.full((3, 5, w), np.nan, dtype)
    ne.pack(panels, b)
    assert np.array_equal(panels.transpose(1, 0, 2).reshape(5, -1)[:, :b.shape[1]], b)
    assert not panels[2, :, 3:].any()


@both
@settings(max_examples=25)
@given(B=st.integers(1, 3), T=st.sampled_from([1, 2, ne.KC - 1, ne.KC, ne.KC + 1, 2 * ne.KC + 3]),
       N=st.sampled_from([1, 7, 33, ne.NB]), K=st.sampled_from([1, 5, 34]), seed=st.integers(0, 9))
def test_weight_gradient(dtype, B, T, N, K, seed):
    dy, x = normal((B, T, N), seed, dtype), normal((B, T, K), seed + 1, dtype)
    dw = normal((N, K), 3, dtype)
    n0, want = N // 3, dw.astype(np.float64)
    scratch = ne.aligned((1, ne.KC, ne.PACKED), dtype)
    ne.weight_gradient(dw[n0:], dy, x, n0, scratch)
    want[n0:] += np.einsum("btn,btk->nk", dy.astype(np.float64), x)[n0:]
    assert np.abs(dw - want).max() <= (B * T + 3) * u(dtype) * 5 * math.sqrt(B * T) * 3


# ---- 4.2 embedding
@both
def test_embedding(dtype):
    wte, tokens = normal((9, 5), 1, dtype), np.array([[3, 3, 0], [8, 3, 1]], np.int32)
    x = np.empty((3, 5), dtype)
    ne.embedding_forward(x, tokens[1], wte)
    assert np.array_equal(x, wte[tokens[1]])
    dx, dwte = normal((2, 3, 5), 2, dtype), normal((9, 5), 3, dtype)
    want = dwte.astype(np.float64)
    np.add.at(want, tokens.ravel(), dx.reshape(-1, 5))
    ne.embedding_backward(dwte, dx, tokens)
    close(dwte, want, dtype, 8)


# ---- 4.3 rmsnorm
@both
@settings(max_examples=30)
@example(T=1, C=1, seed=0, scale=1.0)
@given(T=st.integers(1, 9), C=st.sampled_from([1, 2, 7, 16, 33, 128]), seed=st.integers(0, 99),
       scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_rmsnorm(dtype, T, C, seed, scale):
    x, dy = normal((T, C), seed, dtype), normal((T, C), seed + 2, dtype)
    w = normal((C,), seed + 1, dtype)
    x *= dtype(scale)
    y, rstd, eps, exact = np.empty_like(x), np.empty(T, dtype), 1e-5, x.astype(np.float64)
    ne.rmsnorm_forward(y, rstd, x, w, eps)
    close(y, naive.rmsnorm(exact, w.astype(np.float64), eps), dtype, 8)
    close(rstd * dtype(scale), scale / np.sqrt((exact ** 2).mean(1) + eps), dtype, 8)
    dx, dw, dnext = np.empty_like(x), normal((C,), 5, dtype), normal((T, C), 6, dtype)
    want_dx, want_dw = naive.rmsnorm_backward(dy.astype(np.float64), exact, w.astype(np.float64),
                                              eps)
    before = dw.copy()
    ne.rmsnorm_backward(dx, dnext, dw, dy, x, w, rstd)
    close(dx, dnext + want_dx, dtype, 40 + C)
    close(dw, before + want_dw, dtype, 40 + T)


def test_rmsnorm_sums_squares_in_float64():
    x = np.full((1, 4096), 1e-3, np.float32)
    x[0, 0] = 3e3
    y, rstd = np.empty_like(x), np.empty(1, np.float32)
    ne.rmsnorm_forward(y, rstd, x, np.ones(4096, np.float32), 1e-5)
    close(y, naive.rmsnorm(x.astype(np.float64), np.ones(4096), 1e-5), np.float32, 4)


# ---- 4.4 rope
@both
@settings(max_examples=25)
@given(T=st.integers(1, 20), H=st.integers(1, 3), G=st.integers(1, 2),
       half=st.sampled_from([1, 2, 16, 32]),
       theta=st.sampled_from([2.0, 1e4, 5e5]))
def test_rope(dtype, T, H, G, half, theta):
    cfg = ne.Config(n_head=H, n_kv_head=H, head_dim=2 * half, seq_len=T + 3, rope_theta=theta)
    cos, sin = ne.rope_table(cfg, dtype)
    assert cos.shape == sin.shape == (T + 3, half) and cos.dtype == dtype
    qkv = normal((T, (H + 2 * G) * 2 * half), T, dtype)
    rows = qkv.astype(np.float64).reshape(T, -1, 2 * half)
    want = rows.copy()
    want[:, :H + G] = naive.rope(rows[:, :H + G], theta)
    turned = qkv.copy()
    ne.rope(turned, cos[:T], sin[:T], H + G, dtype(1))
    close(turned.reshape(rows.shape), want, dtype, 8)
    ne.rope(turned, cos[:T], sin[:T], H + G, dtype(-1))
    close(turned, qkv.astype(np.float64), dtype, 16)               # there and back


# ---- 4.5 attention
GROUPS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (6, 2), (6, 3), (5, 1), (12, 4)]
LENGTHS = sorted({1, 2, ne.BR - 1, ne.BR, ne.BR + 1, 2 * ne.BR + 5, W32 + 1, W64 - 1, 100})


def attention_case(dtype, T, heads, D, seed, scale=1.0):
    """Op outputs and naive ones, forward and backward."""
    H, G = heads
    qkv, do = normal((T, (H + 2 * G) * D), seed, dtype), normal((T, H * D), seed + 1, dtype)
    qkv *= dtype(scale)
    w, o, lse = ne.tile_width(dtype), np.empty((T, H * D), dtype), np.empty((H, T), dtype)
    scores, dscores = np.full((ne.BR, T), np.nan, dtype), np.full((ne.BR, T), np.nan, dtype)
    kt, vt = (np.full((-(-T // w), D, w), np.nan, dtype) for _ in "kv")
    ne.attention_forward(o, lse, qkv, D, scores, kt)
    dqkv = np.full_like(qkv, np.nan)
    ne.attention_backward(dqkv, do, o, lse, qkv, D, scores, dscores, kt, vt)
    exact = qkv.astype(np.float64)
    want_o, _ = naive.attention(exact, H, G, D)
    return o, want_o, dqkv, naive.attention_backward(do.astype(np.float64), exact, H, G, D), lse


@both
@settings(max_examples=30)
@example(T=1, heads=(4, 2), D=8, seed=0)
@example(T=2 * ne.BR + 5, heads=(6, 2), D=64, seed=1)
@given(T=st.sampled_from(LENGTHS), heads=st.sampled_from(GROUPS),
       D=st.sampled_from([2, 4, 6, 16, 32, 34, 64]),
       seed=st.integers(0, 9))
def test_attention(dtype, T, heads, D, seed):
    o, want_o, dqkv, want_dqkv, _ = attention_case(dtype, T, heads, D, seed)
    close(o, want_o, dtype, 100)
    close(dqkv, want_dqkv, dtype, 400)


@both
def test_attention_with_sharp_scores(dtype):
    """Scores of +-1000: no overflow, no NaN, and the likeliest key takes all."""
    o, want_o, dqkv, _, lse = attention_case(dtype, 40, (2, 1), 4, 3, scale=30.0)
    assert np.isfinite(o).all() and np.isfinite(dqkv).all() and np.isfinite(lse).all()
    close(o, want_o, dtype, 20_000)


@both
def test_attention_is_causal(dtype):
    T, D, H = 70, 8, 2
    qkv = normal((T, 4 * D), 1, dtype)
    w, outs = ne.tile_width(dtype), []
    for change in (0, 7):
        rows = qkv.copy()
        rows[40:] += dtype(change)
        o, lse = np.empty((T, H * D), dtype), np.empty((H, T), dtype)
        ne.attention_forward(o, lse, rows, D, np.zeros((ne.BR, T), dtype),
                             np.zeros((-(-T // w), D, w), dtype))
        outs.append(o)
    assert np.array_equal(outs[0][:40], outs[1][:40])
    assert not np.array_equal(outs[0][40:], outs[1][40:])


@both
def test_attention_passes_nan_on(dtype):
    qkv = normal((40, 4 * 8), 1, dtype)
    qkv[35, 3] = np.nan
    o, lse = np.zeros((40, 16), dtype), np.zeros((2, 40), dtype)
    w = ne.tile_width(dtype)
    ne.attention_forward(o, lse, qkv, 8, np.zeros((ne.BR, 40), dtype),
                         np.zeros((-(-40 // w), 8, w), dtype))
    assert np.isnan(o[35]).any() and not np.isnan(o[:35]).any()


# ---- 4.6 swiglu
@both
@settings(max_examples=25)
@given(T=st.integers(1, 5), F=st.sampled_from([1, 3, 16, 33, 100]), seed=st.integers(0, 99),
       scale=st.sampled_from([1.0, 30.0]))
def test_swiglu(dtype, T, F, seed, scale):
    gate_up, dy = normal((T, 2 * F), seed, dtype) * dtype(scale), normal((T, F), seed + 1, dtype)
    exact, y = gate_up.astype(np.float64), np.empty((T, F), dtype)
    ne.swiglu_forward(y, gate_up)
    close(y, naive.swiglu(exact), dtype, 20)
    ne.swiglu_backward(gate_up, dy)
    close(gate_up, naive.swiglu_backward(dy.astype(np.float64), exact), dtype, 20 * scale)


@both
def test_swiglu_saturates_and_passes_nan_on(dtype):
    gate_up = np.array([[-1e4, 1e4, np.nan, 1, 1, 1]], dtype)
    y = np.empty((1, 3), dtype)
    ne.swiglu_forward(y, gate_up)
    assert abs(y[0, 0]) < 1e-30 and y[0, 1] == 1e4 and np.isnan(y[0, 2])
    ne.swiglu_backward(gate_up, np.ones((1, 3), dtype))
    assert np.abs(gate_up[0, [0, 3]]).max() < 1e-30 and np.allclose(gate_up[0, [1, 4]], [1, 1e4])
    assert np.isnan(gate_up[0, 2])


# ---- 4.7 cross-entropy
@both
@settings(max_examples=30)
@given(T=st.integers(1, 9), V=st.sampled_from([1, 2, 31, 257]), seed=st.integers(0, 99),
       scale=st.sampled_from([1.0, 300.0]), weight=st.sampled_from([1.0, 0.125]))
def test_cross_entropy(dtype, T, V, seed, scale, weight):
    logits = normal((T, V), seed, dtype) * dtype(scale)
    targets = np.random.default_rng(seed).integers(-1, V, T).astype(np.int32)
    exact = logits.astype(np.float64)
    shifted = exact - exact.max(1, keepdims=True)
    want = sum(np.log(np.exp(z).sum()) - z[y] for z, y in zip(shifted, targets) if y >= 0)
    grad = np.where(targets[:, None] >= 0, naive.softmax(exact) - np.eye(V)[targets], 0)
    loss = ne.cross_entropy(logits, targets, weight)
    assert abs(loss - want) <= 8 * u(dtype) * T * max(1, np.abs(exact).max())
    close(logits, weight * grad, dtype, 8 * scale)
    assert not logits[targets < 0].any()


@both
def test_cross_entropy_of_a_nan_is_nan(dtype):
    logits = np.zeros((2, 40), dtype)
    logits[1, 17] = np.nan
    assert math.isnan(ne.cross_entropy(logits, np.array([3, 5], np.int32), 1.0))


@both
def test_cross_entropy_by_hand(dtype):
    logits = np.log(np.array([[1, 2, 5], [4, 4, 2]], dtype))
    loss = ne.cross_entropy(logits, np.array([2, 0], np.int32), 1.0)
    assert math.isclose(loss, -math.log(5 / 8) - math.log(0.4), rel_tol=1e-6)
    assert np.allclose(logits, [[1 / 8, 2 / 8, 5 / 8 - 1], [0.4 - 1, 0.4, 0.2]], atol=1e-6)


# ---- 10 the row times matrix of decoding
@both
@settings(max_examples=25)
@given(N=st.integers(1, 40), K=st.integers(1, 70), seed=st.integers(0, 99))
def test_matvec_add(dtype, N, K, seed):
    y, w = normal((N,), seed, dtype), normal((N, K), seed + 1, dtype)
    x = normal((K,), seed + 2, dtype)
    scale = np.exp(normal((N,), seed + 3, dtype))
    want = y + scale * (w.astype(np.float64) @ x)
    bound = (K + 4) * u(dtype) * (scale * (np.abs(w.astype(np.float64)) @ np.abs(x)) + np.abs(y))
    ne.matvec_add(y, w, scale, x)
    assert np.all(np.abs(y - want) <= bound)


# ---- the same with every vector width of this CPU
def widths():
    features = ne._CPU
    known = {128: True, 256: features.get("avx2"), 512: features.get("avx512f")}
    return [bits for bits, has in known.items() if has and bits != ne.BITS]


def test_the_cache_keeps_the_kernels_of_each_width_apart():
    """Panels of one width, read by the kernels of another, are other numbers."""
    code = ("import nanoeuler as ne; "
            "print(ne.matmul._cache._index_key((), ne.matmul.targetctx.codegen()))")
    keys = {subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                           check=True, env=dict(os.environ, NANOEULER_BITS=bits)).stdout
            for bits in ("128", "256", "512")}
    assert len(keys) == 3


@pytest.mark.skipif("NANOEULER_BITS" in os.environ, reason="this is the run with another width")
@pytest.mark.parametrize("bits", widths())
def test_other_vector_widths(bits):
    env = dict(os.environ, NANOEULER_BITS=str(bits))
    result = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__,
                             "-k", "matmul or pack or weight_gradient or attention"],
                            cwd=ROOT, env=env, capture_output=True, encoding="utf-8", timeout=400)
    assert result.returncode == 0, result.stdout[-3000:]
    assert " passed" in result.stdout
