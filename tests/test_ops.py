"""Each op of sections 3 and 4 against plain NumPy, in float32 and float64, at awkward shapes.

Tolerances are multiples of the unit roundoff u of the type: a sum of K products in any order is off
by at most (K + 2) u sum |products| (Higham 2002, 3.1); the rest gets a small multiple of u.
"""
import math
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from helpers import ROOT, TINY, complains, constants, drawn, kept, ok
from hypothesis import example, given
from hypothesis import strategies as st
from numba import njit
from oracles import naive, plain_parts

import nanoeuler as ne
from nanoeuler_parts.machine.cpu import (
    _CPU, ARCHITECTURE, BITS, DY_COLUMNS, MR, TILE_BYTES, tile_rows, tile_width, vector_bits,
    vector_widths,
)
from nanoeuler_parts.machine.numbers import pack
from nanoeuler_parts.machine.tile import emit_tile, tile

pytestmark = pytest.mark.unit
DTYPES = [np.float32, np.float64]
both = pytest.mark.parametrize("dtype", DTYPES)
W32, W64 = tile_width(np.float32), tile_width(np.float64)
EDGES = sorted({1, 2, 3, 70} | {n + i for n in (MR, W64, W32) for i in (-1, 0, 1)})
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
    # float32: r is off by 0.5 u, the two last sums by 0.5 u and u, of a result of 0.7 or more
    # before 2^n; the polynomial is within 0.3 u.  float64: libm and NumPy are within 2 u each
    assert error < 4 * u(dtype)


@both
def test_exp_at_the_ends(dtype):
    x = np.array([0, -0.0, 1, -1e-30, -100, -1e30, -np.inf, np.nan, -745], dtype)
    y = np.empty_like(x)
    exp_all(y, x)
    assert y[0] == y[1] == 1 and np.isclose(y[2], math.e, rtol=3e-7) and y[3] == 1
    assert np.all((0 <= y[4:7]) & (y[4:7] < 1.3e-38)) and 0 <= y[8] < 1.3e-38
    assert np.isnan(y[7])


# ---- 3 larger
@both
@pytest.mark.parametrize("n", [1, 2, 7, 16, 33, 128, 515])
def test_the_largest_of_a_row_is_a_nan_if_there_is_one(dtype, n):
    """Wherever it is, whatever lane of a vector it falls into: section 8 looks for it."""
    row = normal((n,), n, dtype)
    assert ne.row_max(row) == row.max()
    assert ne.row_max(np.full(n, -np.inf, dtype)) == -np.inf
    for i in range(n):
        bad = row.copy()
        bad[i] = np.nan
        assert math.isnan(ne.row_max(bad)), i


def test_no_instruction_may_assume_that_there_is_no_nan():
    """With `nnan` a NaN is LLVM's poison: anything at all may come out."""
    fresh = njit(**{**ne.OPTIONS, "cache": False})(ne.row_max.py_func)
    fresh(np.ones(3, np.float32))
    text, = fresh.inspect_llvm().values()
    assert "llvm.maximum" in text and "nnan" not in text and " fast " not in text


@both
def test_aligned_memory(dtype):
    for shape in [(1,), (3, 5), (0, 4), (7, 1, 9)]:
        x = ne.aligned(shape, dtype)
        assert x.shape == shape and x.dtype == dtype and not x.any()
        assert x.ctypes.data % 64 == 0 or x.size == 0
        assert ne.room_behind(x) >= TILE_BYTES


def test_a_model_refuses_arrays_without_room(monkeypatch):
    model = ne.Model(TINY, ne.init_params(TINY, 1))
    monkeypatch.setattr(ne, "aligned", np.zeros)
    with pytest.raises(ne.UserError, match="not made by `aligned`"):
        model.prepare(1, 8)


def test_room_behind_is_counted_to_the_end_of_the_memory():
    whole = np.zeros(100, np.float32)
    assert [ne.room_behind(x) for x in (whole, whole[:90], whole[5:85].reshape(8, 10)[:7, :9])] == [
        0, 40, 104]


@both
@pytest.mark.parametrize("M, N, K", [(1, 1, 1), (MR + 1, 37, 5), (3, 64, 2), (2 * MR, 16, 40)])
def test_tiles_compute_what_the_plain_loops_do(M, N, K, dtype):
    """Each side rounds a sum of K products and of base:  |error| <= (K + 1) u (|base| + |x| |b|)"""
    width = tile_width(dtype)
    x, b, base = normal((M, K), 1, dtype), normal((K, N), 2, dtype), normal((M, N), 3, dtype)
    bound = 2 * (K + 1) * u(dtype) * (np.abs(base) + np.abs(x) @ np.abs(b))
    panels, again = (ne.aligned((-(-N // width), K, width), dtype) for _ in range(2))
    pack(panels, b)
    plain_parts.pack(again, b)
    assert np.array_equal(panels, again)
    fast, plain = ne.aligned((M, N), dtype), ne.aligned((M, N), dtype)
    for right in b, panels:
        for add in 0, 1:
            if add:
                ne.tiled_matmul_add(fast, base, x, right)
                ne.matmul_add.py_func(plain, base, x, b.T)
            else:
                ne.tiled_matmul(fast, x, right)
                ne.matmul.py_func(plain, x, b.T)
            assert np.all(np.abs(plain - fast) <= bound)
    scale = np.ones(len(panels) * width, dtype)
    for add in 0, 1:
        fast[:] = plain[:] = base
        ne.product(fast, x, panels, scale, add)
        for n in range(len(panels)):
            plain_parts.rows_tile(plain, x, panels, scale, 0, n, add, M)
        assert np.all(np.abs(plain - fast) <= bound)


# Programs that may read `room` bytes past the end of an array, and then the page ends.
GUARDED = """
import ctypes, math, mmap, sys
import numpy as np
import nanoeuler as ne
room = {room}

def at_the_end(shape, dtype):
    n = math.prod(shape) * np.dtype(dtype).itemsize
    page = mmap.PAGESIZE
    end = -(-(n + room) // page) * page
    memory = mmap.mmap(-1, end + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + end), page, 0) == 0
    return np.frombuffer(memory, np.uint8)[end - room - n:end - room].view(dtype).reshape(shape)

ne.aligned, width = at_the_end, ne.tile_width(np.float32)
{code}
"""
MATMULS = """
for M, N, K in ((1, 1, 1), (ne.MR + 1, width + 1, 3), (3, 2 * width - 1, 2), (2, width, 4)):
    out, x, b = (at_the_end(shape, np.float32) for shape in ((M, N), (M, K), (K, N)))
    ne.tiled_matmul(out, x, b)
    ne.tiled_matmul_add(out, out, x, b)
"""
MODEL = """
cfg = ne.Config(n_embd=10, n_head=4, n_kv_head=2, head_dim=6, n_layer=2, n_hidden=9, seq_len=37,
                vocab_size=13, n_mtp=2)
for cfg in (cfg, ne.replace(cfg, tie_embeddings=True, head_dim=34)):
    model = ne.Model(cfg, ne.init_params(cfg, 1))
    for T in (1, 35):
        model.gradient(np.zeros((2, T), np.int32), np.zeros((2, 2, T), np.int32), np.ones(2))
    decoder = model.decoder()
    for _ in range(40):
        assert np.isfinite(decoder.step(3)).all()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="pages are guarded by mprotect")
@pytest.mark.parametrize("name", ["MATMULS", "MODEL"])
def test_no_more_is_read_past_the_end_than_aligned_leaves(name):
    """A guard page right behind it.  Without any room, the same program dies there."""
    enough, nothing = (subprocess.run(
        [sys.executable, "-c", GUARDED.format(room=room, code=globals()[name])], cwd=ROOT,
        capture_output=True, encoding="utf-8", timeout=400) for room in (TILE_BYTES, 0))
    ok(enough)
    assert nothing.returncode in (-signal.SIGSEGV, -signal.SIGBUS), nothing.stderr


# ---- 4.1 matmul
@kept
def matmul_any(big, base, x, b, M, N, K, add, transposed, packed):
    """The product of corners of x and b into the middle of big."""
    out, right = big[1:1 + M, 2:2 + N], b[:K, 1:1 + N]
    left = x[3:3 + K, 1:1 + M].T if transposed else x[1:1 + M, 3:3 + K]
    w = TILE_BYTES // out.itemsize
    panels = np.full(((N + w - 1) // w + 1, K, w), np.nan, out.dtype)
    panels = panels[:(N + w - 1) // w]
    pack(panels, right)
    if add:
        if packed:
            ne.tiled_matmul_add(out, base[:M, :N], left, panels)
        else:
            ne.tiled_matmul_add(out, base[:M, :N], left, right)
    elif packed:
        ne.tiled_matmul(out, left, panels)
    else:
        ne.tiled_matmul(out, left, right)


@kept
def first_tile(out, base, x, b, add):
    tile(out, base, x, b, 0, 0, add)


@both
@drawn(150)
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


@drawn(50)
@given(rows=st.integers(1, 2 * MR), cols=st.integers(1, 2 * W32 + 3), K=st.integers(0, 9),
       add=st.booleans(), transposed=st.booleans(), seed=st.integers(0, 99))
def test_the_tile_is_what_its_docstring_says(rows, cols, K, add, transposed, seed):
    """The NumPy lines of emit_tile, run: the first tile of a product, and nothing else."""
    text = emit_tile.__doc__
    lines = text[text.index("        sums ="):text.index("    width = 2 * lanes")]
    out, base = normal((rows, cols + 2), seed, np.float32), normal((rows, cols), seed, np.float32)
    x = normal((K + 1, rows) if transposed else (rows, K + 1), seed + 1, np.float32)
    b, A = normal((K + 1, cols), seed + 2, np.float32), x.ravel()
    a_row, a_column = (1, rows) if transposed else (K + 1, 1)
    want = out.astype(np.float64)
    exec(textwrap.dedent(lines), dict(
        np=np, MR=MR, width=W32, K=K, rows=rows, cols=cols, add=add,
        A=A, a_row=a_row, a_column=a_column, B=np.append(b, np.zeros(W32)), b_row=cols,
        base=np.append(base, np.zeros(W32)), base_row=cols, C=(flat := want.ravel()),
        c_row=cols + 2))
    left = x[:K].T if transposed else x[:, :K]
    first_tile(out[:, :cols], base, left, b[:K], int(add))
    assert np.allclose(out, flat.reshape(out.shape), rtol=0, atol=1e-5)


@both
def test_matmul_add_in_place(dtype):
    out, x, b = normal((9, 37), 1, dtype), normal((9, 5), 2, dtype), normal((5, 37), 3, dtype)
    want = out.astype(np.float64) + x.astype(np.float64) @ b
    ne.tiled_matmul_add(out, out, x, b)
    close(out, want, dtype, 20)


@both
def test_pack(dtype):
    w, b = tile_width(dtype), normal((5, 2 * tile_width(dtype) + 3), 1, dtype)
    panels = np.full((3, 5, w), np.nan, dtype)
    pack(panels, b)
    assert np.array_equal(panels.transpose(1, 0, 2).reshape(5, -1)[:, :b.shape[1]], b)
    assert not panels[2, :, 3:].any()


@both
@drawn(25)
@given(B=st.integers(1, 3), T=st.sampled_from([1, 2, ne.KC - 1, ne.KC, ne.KC + 1, 2 * ne.KC + 3]),
       N=st.sampled_from([1, 7, 33, ne.NB]), K=st.sampled_from([1, 5, 34]), seed=st.integers(0, 9))
def test_weight_gradient(dtype, B, T, N, K, seed):
    dy, x = normal((B, T, N), seed, dtype), normal((B, T, K), seed + 1, dtype)
    dw = normal((N, K), 3, dtype)
    n0, before = N // 3, dw.astype(np.float64)
    width = tile_width(dtype)
    columns = ne.aligned((1, ne.KC, DY_COLUMNS), dtype)
    panels = ne.aligned((-(-K // width), ne.KC, width), dtype)
    ne.weight_gradient(dw[n0:], dy, x, n0, columns, panels)
    assert np.array_equal(dw[:n0], before[:n0])
    product, size = (np.einsum("btn,btk->nk", f(dy.astype(np.float64)), f(x))[n0:]
                     for f in (np.asarray, np.abs))
    bound = (B * T + 3) * u(dtype) * (size + np.abs(before[n0:]))
    assert np.all(np.abs(dw[n0:] - (before[n0:] + product)) <= bound)


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
    for columns in ((0, 2), (2, 5)):
        ne.embedding_gradient(dwte, dx, tokens, *columns)
    close(dwte, want, dtype, 8)


# ---- 4.3 rmsnorm
@both
@drawn(30)
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
    dx, dw, dnext = np.empty_like(x), np.full(C, np.nan, dtype), normal((T, C), 6, dtype)
    want_dx, want_dw = naive.rmsnorm_backward(dy.astype(np.float64), exact, w.astype(np.float64),
                                              eps)
    ne.rmsnorm_backward(dx, dnext, dy, x, w, rstd)
    for part in (slice(0, C // 3), slice(C // 3, C)):
        ne.gain_gradient(dw[part], dy, x, rstd, part.start)
    close(dx, dnext + want_dx, dtype, 40 + C)
    close(dw, want_dw, dtype, 40 + T)


def test_rmsnorm_sums_squares_in_float64():
    x = np.full((1, 4096), 1e-3, np.float32)
    x[0, 0] = 3e3
    y, rstd = np.empty_like(x), np.empty(1, np.float32)
    ne.rmsnorm_forward(y, rstd, x, np.ones(4096, np.float32), 1e-5)
    close(y, naive.rmsnorm(x.astype(np.float64), np.ones(4096), 1e-5), np.float32, 4)


# ---- 4.4 rope
@both
@drawn(25)
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


def scratch(**arrays):
    """What attention needs of a thread's."""
    return ne.Scratch(**{**dict.fromkeys(ne.Scratch._fields), **arrays})


def cut(n, seed):
    """n heads in two parts, as threads may share them"""
    return [(0, seed % (n + 1)), (seed % (n + 1), n)]


def attention_case(dtype, T, heads, D, seed, scale=1.0, window=1 << 20):
    """Op outputs and naive ones, forward and backward."""
    H, G = heads
    qkv, do = normal((T, (H + 2 * G) * D), seed, dtype), normal((T, H * D), seed + 1, dtype)
    qkv *= dtype(scale)
    w, o, lse = tile_width(dtype), np.empty((T, H * D), dtype), np.empty((H, T), dtype)
    scores, dscores = np.full((ne.BR, T), np.nan, dtype), np.full((ne.BR, T), np.nan, dtype)
    kt, vt = (np.full((-(-T // w), D, w), np.nan, dtype) for _ in "kv")
    s, c = scratch(scores=scores, dscores=dscores, kt=kt, vt=vt), constants(dtype, H, G, D, window)
    for heads in cut(H, seed):
        ne.blocked_attention_forward(o, lse, qkv, c, *heads, s)
    dqkv = ne.aligned(qkv.shape, dtype)      # a base of `tile`, as qkv and do are its operands
    dqkv[:] = np.nan
    for heads in cut(G, seed):
        ne.blocked_attention_backward(dqkv, do, o, lse, qkv, c, *heads, s)
    exact, do = qkv.astype(np.float64), do.astype(np.float64)
    want = naive.attention_backward(do, exact, H, G, D, window)
    limits = attention_limits(do, exact, H, G, D, u(dtype), window)
    return (o, naive.attention(exact, H, G, D, window)[0], dqkv, want, lse, *limits)


def attention_limits(do, qkv, H, G, D, u, window):
    """How far o and dqkv may be off, entry by entry, if all is rounded with u and the naive ones
    with as much: what each step adds, and what it makes of the errors before it.

    A score is off by (D + 3) u sum |q k|, so a weight exp(score - max) by that of itself, and 4 u
    of the exponent, 6 u in exp, and 2e-38 where exp stops.  What all weights of a row have in
    common cancels: o' - o = sum p e (v - o) / sum p (1 + e).  In backward it does not:
    p = exp(score - lse)."""
    (q, k, v), T, n = naive.split_heads(qkv, H, G, D), len(qkv), len(qkv) * H // G + 8
    o, probs = naive.attention(qkv, H, G, D, window)
    o, do = o.reshape(T, H, D), do.reshape(T, H, D)
    limit_o, limits = np.zeros((T, H, D)), [np.zeros_like(x) for x in (q, k, v)]

    def causal(x):
        return np.tril(x) - np.tril(x, -window)

    for h in range(H):
        g, p = h // (H // G), probs[h]
        kg, vg, of_h = k[:, g], v[:, g], do[:, h]
        score = causal(q[:, h] @ kg.T) / math.sqrt(D)
        size = (D + 3) * u * causal(np.abs(q[:, h]) @ np.abs(kg).T) / math.sqrt(D)
        most = np.where(causal(np.ones((T, T))), score, -np.inf).max(1, keepdims=True)
        e = np.expm1(size + 4 * u * np.abs(score - most) + 6 * u)
        off = np.abs(vg[None] - o[:, h, None])           # |v_j - o_t|, (T, T, D)
        e = p * e + 2e-38
        limit_o[:, h] = (np.einsum("tj,tjd->td", e, off) / (1 - e.sum(1, keepdims=True))
                         + 2 * n * u * (p @ np.abs(vg)))
        lse = most + np.log(np.exp(np.where(p > 0, score - most, -np.inf)).sum(1, keepdims=True))
        off_lse = size.max(1, keepdims=True) + e.sum(1, keepdims=True) + n * u
        off_p = p * np.expm1(size + off_lse + 3 * u * (np.abs(score) + np.abs(lse)) + 6 * u) + 2e-38
        dp, dot = of_h @ vg.T, (of_h * o[:, h]).sum(1, keepdims=True)
        off_dp = (D + 2) * u * (np.abs(of_h) @ np.abs(vg).T)
        off_dot = (np.abs(of_h) * (limit_o[:, h] + (D + 2) * u * np.abs(o[:, h]))).sum(1)[:, None]
        ds = p * (dp - dot) / math.sqrt(D)
        off_ds = (off_p * np.abs(dp - dot) + (p + off_p) * (off_dp + off_dot)) / math.sqrt(D)
        off_ds += n * u * np.abs(ds)         # and the sums below
        limits[0][:, h] = off_ds @ np.abs(kg)
        limits[1][:, g] += off_ds.T @ np.abs(q[:, h])
        limits[2][:, g] += (off_p + n * u * p).T @ np.abs(of_h)
    return 2 * limit_o.reshape(T, -1), 2 * np.concatenate(limits, 1).reshape(T, -1)


def within(got, want, limit):
    """Each entry is within its limit; zeros in a row of the usual size would not be."""
    assert np.all(np.abs(got - want) <= limit)
    size, allowed = np.linalg.norm(want, axis=1), np.linalg.norm(limit, axis=1)
    usual = size > size.max() / 10
    assert np.all(allowed[usual] < size[usual] / 2)


@both
@drawn(30)
@example(T=1, heads=(4, 2), D=8, seed=0)
@example(T=2 * ne.BR + 5, heads=(6, 2), D=64, seed=1)
@given(T=st.sampled_from(LENGTHS), heads=st.sampled_from(GROUPS),
       D=st.sampled_from([2, 4, 6, 16, 32, 34, 64]),
       seed=st.integers(0, 9))
def test_attention(dtype, T, heads, D, seed):
    o, want_o, dqkv, want_dqkv, _, limit_o, limit_dqkv = attention_case(dtype, T, heads, D, seed)
    within(o, want_o, limit_o)
    within(dqkv, want_dqkv, limit_dqkv)


@both
@drawn(30)
@example(T=2 * ne.BR + 5, heads=(4, 2), window=1, seed=0)
@example(T=2 * ne.BR + 5, heads=(4, 2), window=ne.BR, seed=0)
@given(T=st.sampled_from(LENGTHS), heads=st.sampled_from(GROUPS), seed=st.integers(0, 9),
       window=st.sampled_from([1, 2, 3, W32, ne.BR - 1, ne.BR, ne.BR + 1, 100, 101]))
def test_attention_in_a_window(dtype, T, heads, window, seed):
    o, want_o, dqkv, want_dqkv, _, limit_o, limit_dqkv = attention_case(
        dtype, T, heads, 6, seed, window=window)
    within(o, want_o, limit_o)
    within(dqkv, want_dqkv, limit_dqkv)


@both
def test_attention_with_sharp_scores(dtype):
    """Scores of +-1000: no overflow, no NaN, and the likeliest key takes all."""
    o, want_o, dqkv, want_dqkv, lse, limit_o, limit_dqkv = attention_case(dtype, 40, (2, 1), 4, 3,
                                                                          scale=30.0)
    assert np.isfinite(lse).all() and np.abs(lse).max() > 1000
    within(o, want_o, limit_o)
    within(dqkv, want_dqkv, limit_dqkv)


@both
def test_attention_is_causal(dtype):
    T, D, H = 70, 8, 2
    qkv = normal((T, 4 * D), 1, dtype)
    w, outs = tile_width(dtype), []
    for change in (0, 7):
        rows = qkv.copy()
        rows[40:] += dtype(change)
        o, lse = np.empty((T, H * D), dtype), np.empty((H, T), dtype)
        ne.blocked_attention_forward(o, lse, rows, constants(dtype, H, 1, D, T), 0, H, scratch(
            scores=np.zeros((ne.BR, T), dtype), kt=np.zeros((-(-T // w), D, w), dtype)))
        outs.append(o)
    assert np.array_equal(outs[0][:40], outs[1][:40])
    assert not np.array_equal(outs[0][40:], outs[1][40:])


@both
def test_attention_passes_nan_on(dtype):
    qkv = normal((40, 4 * 8), 1, dtype)
    qkv[35, 3] = np.nan
    o, lse = np.zeros((40, 16), dtype), np.zeros((2, 40), dtype)
    w = tile_width(dtype)
    ne.blocked_attention_forward(o, lse, qkv, constants(dtype, 2, 1, 8, 40), 0, 2, scratch(
        scores=np.zeros((ne.BR, 40), dtype), kt=np.zeros((-(-40 // w), 8, w), dtype)))
    assert np.isnan(o[35]).any() and not np.isnan(o[:35]).any()


# ---- 4.6 swiglu
@both
@drawn(25)
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
@drawn(30)
@given(T=st.integers(1, 9), V=st.sampled_from([1, 2, 31, 257]), seed=st.integers(0, 99),
       scale=st.sampled_from([1.0, 300.0]))
def test_cross_entropy(dtype, T, V, seed, scale):
    weight = np.random.default_rng(seed + 1).choice([1.0, 0.125, -0.5, 0.0], T)
    logits = normal((T, V), seed, dtype) * dtype(scale)
    targets = np.random.default_rng(seed).integers(-1, V, T).astype(np.int32)
    exact = logits.astype(np.float64)
    shifted = exact - exact.max(1, keepdims=True)
    want = np.array([np.log(np.exp(z).sum()) - z[y] if y >= 0 else 0
                     for z, y in zip(shifted, targets)])
    grad = np.where(targets[:, None] >= 0, naive.softmax(exact) - np.eye(V)[targets], 0)
    nll = np.full(T, np.nan)
    ne.cross_entropy(nll, logits, targets, weight)
    assert np.all(np.abs(nll - want) <= 8 * u(dtype) * max(1, np.abs(exact).max()))
    close(logits, weight[:, None] * grad, dtype, 8 * scale)
    assert not logits[targets < 0].any()


@both
@pytest.mark.parametrize("at", [0, 17, 39])
def test_cross_entropy_of_a_nan_is_nan(dtype, at):
    logits = np.zeros((2, 40), dtype)
    logits[1, at] = np.nan
    nll = np.zeros(2)
    ne.cross_entropy(nll, logits, np.array([3, 5], np.int32), np.ones(2))
    assert math.isnan(nll[1]) and math.isfinite(nll[0])
    assert np.isnan(logits[1]).all() and np.isfinite(logits[0]).all()


@both
def test_cross_entropy_by_hand(dtype):
    logits = np.log(np.array([[1, 2, 5], [4, 4, 2]], dtype))
    nll = np.zeros(2)
    ne.cross_entropy(nll, logits, np.array([2, 0], np.int32), np.ones(2))
    assert np.allclose(nll, [-math.log(5 / 8), -math.log(0.4)], rtol=1e-6)
    assert np.allclose(logits, [[1 / 8, 2 / 8, 5 / 8 - 1], [0.4 - 1, 0.4, 0.2]], atol=1e-6)


# ---- 10 the rows times matrix of decoding
@pytest.mark.parametrize("dtype, weights", [(np.float32, "f32"), (np.float64, "f32"),
                                            (np.float32, "int8")])
@drawn(25)
@given(R=st.integers(1, 19), N=st.integers(1, 90), K=st.integers(1, 70), add=st.integers(0, 1),
       seed=st.integers(0, 99))
def test_product_of_rows(dtype, weights, R, N, K, add, seed):
    """Of the decoder: any number of rows, panels at the edge, the scales of int8."""
    w, start = normal((N, K), seed, dtype), normal((R, N), seed + 1, dtype)
    x, y = ne.aligned((R, K), dtype), ne.aligned((R, N), dtype)
    x[:], y[:] = normal((R, K), seed + 2, dtype), start
    [panels], [scales] = ne.in_panels(w[None], weights)
    exact, scale = (part.astype(np.float64) for part in ne.converted(w, weights))
    exact *= scale[:, None]
    want = add * start + x @ exact.T
    size = add * np.abs(start) + np.abs(x) @ np.abs(exact).T
    ne.product(y, x, panels, scales, add)
    assert np.all(np.abs(y - want) <= (K + 4) * u(dtype) * size)


# ---- the same with every vector width of this CPU
WIDTHS = vector_widths(_CPU)


def with_bits(bits, *args):
    """A Python process with this NANOEULER_BITS."""
    return subprocess.run([sys.executable, *args], cwd=ROOT, capture_output=True, timeout=400,
                          encoding="utf-8", env=dict(os.environ, NANOEULER_BITS=str(bits)))


def test_the_cache_keeps_the_kernels_of_each_width_apart():
    """Panels of one width, read by the kernels of another, are other numbers."""
    code = ("import nanoeuler as ne; "
            "print(ne.tiled_matmul._cache._index_key((), ne.tiled_matmul.targetctx.codegen()))")
    assert len({ok(with_bits(bits, "-c", code)) for bits in WIDTHS}) == len(WIDTHS)


STEP = """
import sys, numpy as np, nanoeuler as ne
if "first" in sys.argv:              # kernels that a training step holds copies of
    logits = np.zeros((1, 512), np.float32)
    ne.cross_entropy(np.zeros(1), logits, np.zeros(1, np.int32), np.ones(1))
    ne.row_max(logits[0])
cfg = ne.Config(vocab_size=512)
tokens = np.random.default_rng(0).integers(512, size=(2, 128)).astype(np.int32)
model = ne.Model(cfg, ne.init_params(cfg, 0))
losses = model.run(ne.GRADIENT, tokens, np.stack([tokens] * cfg.n_mtp), 1 / tokens.size)
print(losses.tobytes().hex(), model.ce.tobytes().hex(), model.g_flat.tobytes().hex())
"""


def test_a_kernel_does_not_run_another_ones_copies():
    """Of two kernels that are loaded, both hold a copy of cross_entropy, optimized differently."""
    alone, second = (ok(subprocess.run([sys.executable, "-c", STEP, *first], cwd=ROOT,
                                       capture_output=True, encoding="utf-8"))
                     for first in ([], ["first"]))
    assert alone == second


@pytest.mark.parametrize("asked, features, want", [
    ("", {}, 128), ("", dict(avx=True), 128), ("", dict(avx2=True), 256),
    ("", dict(avx2=True, avx512f=True), 512), ("256", dict(avx2=True, avx512f=True), 256),
    ("128", dict(avx2=True), 128), ("512", dict(avx2=True), None), ("256", dict(avx=True), None),
    ("512", dict(avx2=True, avx512f=False), None), ("avx", dict(avx2=True), None),
    ("64", {}, None), ("-1", {}, None), ("0", {}, None)])
def test_vectors_are_as_wide_as_asked_or_as_there_are(asked, features, want):
    if want:
        assert vector_bits(asked, features) == want
    else:
        with pytest.raises(ne.UserError, match=f"NANOEULER_BITS is {asked}, expected one of 128"):
            vector_bits(asked, features)


@pytest.mark.parametrize("program", ["nanoeuler.py", "check.py"])
@pytest.mark.parametrize("bits", ["avx", "1024"])
def test_a_width_there_is_not_is_refused_in_a_line(program, bits):
    complains(with_bits(bits, program, "--help"), "NANOEULER_BITS", bits, "expected one of 128")


def test_who_imports_gets_an_exception():
    said = with_bits("avx", "-c", "import nanoeuler").stderr.splitlines()
    assert said[-1].startswith("bpe.UserError: NANOEULER_BITS is avx, expected one of 128")


def test_the_tile_fills_the_registers():
    """2 MR sums, 2 vectors of B and at least one broadcast: of 32 registers, or of 16."""
    for architecture, bits, registers in (("x86_64", 512, 32), ("x86_64", 256, 16),
                                          ("x86_64", 128, 16), ("aarch64", 128, 32),
                                          ("arm64", 128, 32)):
        rows = tile_rows(architecture, bits)
        assert registers // 2 < 2 * rows + 3 <= registers
    assert MR == tile_rows(ARCHITECTURE, BITS)


@pytest.mark.slow
@pytest.mark.skipif("NANOEULER_BITS" in os.environ, reason="this is the run with another width")
@pytest.mark.parametrize("bits", [bits for bits in WIDTHS if bits != BITS])
def test_other_vector_widths(bits):
    result = with_bits(bits, "-m", "pytest", "-p", "no:cacheprovider", __file__, "-k",
                       "matmul or pack or weight_gradient or attention or largest or MATMULS")
    assert " passed" in ok(result)
