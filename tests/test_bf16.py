"""The CPU program in bfloat16: rounding, pairs, products, ops and the whole model against float64;
equal bits for any threads and micro-batches; runs that stop and go on."""
import importlib
import subprocess
import sys
from dataclasses import replace

import numba
import numpy as np
import pytest
from helpers import FAST, ROOT, SMALL, TINY, constants, ok, outcome, refused, run, told
from hypothesis import given
from hypothesis import strategies as st

import nanoeuler as ne
from nanoeuler_parts.machine.cpu import BITS, DY_COLUMNS, faster_dtype, HAS_BF16, tile_width
from nanoeuler_parts.machine.numbers import from_bf16, narrowed, narrowed_transpose, pack, to_bf16
from nanoeuler_parts.machine.numbers import rounded as rounded_like
from nanoeuler_parts.runs.options import TrainOptions

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]
U = 2.0 ** -8            # the largest relative error of one rounding to bfloat16


def place(x):
    """A copy with room behind it, as products ask for."""
    y = ne.aligned(x.shape, x.dtype)
    y[...] = x
    return y


def normal(*shape, seed=0):
    return place(np.random.default_rng(seed).standard_normal(shape, np.float32))


def near(x):
    """float64 of the nearest bfloat16"""
    return from_bf16(to_bf16(x)).astype(np.float64)


def narrow(x):
    return place(to_bf16(x))


def pairs_of(b):
    """Panels of a matrix (K, N), by NumPy."""
    K, N = b.shape
    width = tile_width(ne.BF16)
    whole = np.zeros((-(-K // 2) * 2, -(-N // width) * width), np.uint32)
    whole[:K, :N] = to_bf16(b)
    pairs = whole[0::2] | whole[1::2] << 16
    panels = pairs.reshape(len(pairs), -1, width).transpose(1, 0, 2)
    return place(np.ascontiguousarray(panels).view(np.int32))


# ---- rounding and pairs
@numba.njit
def rounded(x, out):
    for i in range(x.size):
        out[i] = rounded_like(x[i], out)


def test_rounding_is_to_the_nearest_ties_to_even():
    rng = np.random.default_rng(0)
    bits = np.append(rng.integers(0, 1 << 32, 100_000, dtype=np.uint32),
                     np.array([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0xFF800000, 0,
                               1 << 31, 0x7F7FFFFF, 0x7FC00000, 0xFFC00000], np.uint32))
    x = bits.view(np.float32)
    out = np.empty(x.size, np.uint16)
    rounded(x, out)
    finite = np.isfinite(x)
    assert np.array_equal(out[finite], to_bf16(x[finite]))
    assert np.isinf(from_bf16(out[np.isinf(x)])).all()
    assert np.isnan(from_bf16(out[-2:])).all()        # the NaNs that arithmetic makes


@given(K=st.integers(1, 40), N=st.integers(1, 80), low=st.booleans(), turned=st.booleans())
def test_pack_puts_two_rows_side_by_side(K, N, low, turned):
    b = normal(K, N, seed=K + N)
    want = pairs_of(b)
    given_b = narrow(b) if low else b
    if turned:
        given_b = np.ascontiguousarray(given_b.T).T
    panels = np.full_like(want, -1)
    pack(panels, given_b)
    assert np.array_equal(panels, want)


# ---- products
def within(x, y, a, b):
    """A sum of K products of bfloat16 in float32, each addition rounded: |error| <= K u |a| |b|."""
    bound = (a.shape[1] + 4) * 2.0 ** -23 * (np.abs(a) @ np.abs(b)) + 1e-30
    return np.all(np.abs(x - y) <= bound)


@pytest.mark.parametrize("M, N, K", [(1, 1, 1), (1, 5, 2), (7, 33, 3), (8, 32, 64), (65, 70, 31),
                                     (20, 129, 128), (130, 31, 65)])
def test_matmul(M, N, K):
    x, b = normal(M, K), normal(K, N, seed=1)
    want, lower = near(x) @ near(b), narrow(x)
    transposed = narrowed_transpose(np.ascontiguousarray(x.T), lower)
    assert transposed.dtype == np.int32
    for left in (lower, x, narrowed(x, lower), transposed):
        for right in (pairs_of(b), narrow(b)):
            if left is lower and K % 2 and right.ndim == 2:
                continue                     # nothing makes its last pair whole
            out = place(np.full((M, N), np.nan, np.float32))
            ne.tiled_matmul(out, left, right)
            assert within(out, want, near(x), near(b))
            low = place(np.zeros((M, N), np.uint16))
            ne.tiled_matmul(low, left, right)
            assert np.array_equal(low, to_bf16(out))
            base = normal(M, N, seed=2)
            ne.tiled_matmul_add(out, base, left, right)
            assert np.all(np.abs(out - base - want) <= 2.0 ** -22 * (np.abs(base) + K * 20))


@pytest.mark.parametrize("B, T, N, K", [(1, 1, 8, 8), (2, 33, 40, 50), (3, 128, 20, 64),
                                        (2, 70, 9, 3)])
def test_weight_gradient(B, T, N, K):
    dy, x, dw = normal(B, T, N), normal(B, T, K, seed=1), normal(N, K, seed=2)
    want = dw + np.einsum("btn,btk->nk", near(dy), near(x))
    width = tile_width(ne.BF16)
    columns = place(np.zeros((1, ne.KC // 2, DY_COLUMNS), np.int32))
    panels = place(np.zeros((-(-K // width), ne.KC // 2, width), np.int32))
    for given_dy in (dy, narrow(dy)):
        got = place(dw.copy())
        ne.weight_gradient(got, given_dy, narrow(x), 0, columns, panels)
        flat = lambda v: np.abs(near(v)).reshape(B * T, -1)
        bound = (B * T + 4) * 2.0 ** -23 * (flat(dy).T @ flat(x) + np.abs(dw))
        assert np.all(np.abs(got - want) <= bound)


EMULATED = """
import sys
sys.path[:0] = [{tests!r}]
import helpers, nanoeuler as ne
from nanoeuler_parts.machine import tile
tile.HAS_BF16 = ne.HAS_BF16 = False
import pytest
code = pytest.main(["-p", "no:cacheprovider", {file!r}, "-k",
                    "test_matmul or test_weight"])
asm = "".join(ne.tiled_matmul.inspect_asm().values())
assert "vdpbf16ps" not in asm
sys.exit(code)
"""


@pytest.mark.slow
def test_without_the_instruction_float32_multiplies(tmp_path, monkeypatch):
    """As on a CPU that has none: the same tests, with kernels of their own."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("NANOEULER_BITS", str(BITS))   # no kernels are compiled before
    code = EMULATED.format(tests=str(ROOT / "tests"), file=__file__)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                            timeout=400)
    assert " passed" in ok(result)


def test_the_instruction_is_used_where_it_is():
    kinds = numba.typeof(normal(8, 32)), numba.typeof(narrow(normal(8, 4))), numba.typeof(
        pairs_of(normal(4, 32)))
    kernel = numba.njit(ne.tiled_matmul.py_func)         # not from the cache, which has no text
    kernel.compile(kinds)
    text = kernel.inspect_llvm(kernel.signatures[0])
    assert ("avx512bf16.dpbf16ps" in text) == HAS_BF16


# ---- ops: the arrays that feed products hold bfloat16, all else is float32
def errors(x, y):
    """|x - y| / |y|, and of their largest entries"""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if not x.size:                           # the heads of a tied model that has one
        return 0.0, 0.0
    return np.linalg.norm(x - y) / np.linalg.norm(y), np.abs(x - y).max() / np.abs(y).max()


def close(x, y, roundings=1):
    """Rounded so often to bfloat16, independently."""
    found = errors(x, y)
    return found[0] <= U * roundings ** 0.5 and found[1] <= 1.5 * U * roundings ** 0.5


def test_rmsnorm_and_swiglu():
    x, gain = normal(33, 50), normal(50, seed=1)
    low, rstd = place(np.zeros((33, 50), np.uint16)), np.zeros(33, np.float32)
    ne.rmsnorm_forward(low, rstd, x, gain, 1e-5)
    y, rstd64 = np.zeros((33, 50)), np.zeros(33)
    ne.rmsnorm_forward(y, rstd64, x.astype(float), gain.astype(float), 1e-5)
    assert close(from_bf16(low), y) and np.allclose(rstd, rstd64, rtol=1e-6)

    gate_up, dy = narrow(3 * normal(33, 2 * 41)), normal(33, 41, seed=3)
    exact = from_bf16(gate_up).astype(np.float64)
    low, y = place(np.zeros((33, 41), np.uint16)), np.zeros((33, 41))
    ne.swiglu_forward(low, gate_up)
    ne.swiglu_forward(y, exact)
    assert close(from_bf16(low), y)
    ne.swiglu_backward(gate_up, dy)
    ne.swiglu_backward(exact, dy.astype(np.float64))
    assert close(from_bf16(gate_up), exact)


def test_rope_turns_there_and_back():
    cfg = ne.replace(ne.PRESETS["small"], head_dim=10, seq_len=40)
    x = near(normal(40, 30))
    low = narrow(x.astype(np.float32))
    for sign in (1, -1):
        ne.rope(low, *ne.rope_table(cfg, np.float32), 3, np.float32(sign))
        ne.rope(x, *ne.rope_table(cfg, np.float64), 3, float(sign))
        assert close(from_bf16(low), x, roundings=2)


@pytest.mark.parametrize("T", [1, 2, 31, 33, 100])
@pytest.mark.parametrize("H, G, D", [(1, 1, 2), (4, 2, 10), (2, 1, 64)])
def test_attention(T, H, G, D):
    """P and dS are rounded, too, and O before it is backward's: three times."""
    W, cols = tile_width(np.float64), (H + 2 * G) * D
    qkv, do = near(normal(T, cols)), near(normal(T, H * D, seed=1))
    o, lse, dqkv = np.zeros((T, H * D)), np.zeros((H, T)), np.zeros((T, cols))
    scores, dscores = place(np.zeros((ne.BR, T))), place(np.zeros((ne.BR, T)))
    kt, vt = (place(np.zeros((-(-T // W), D, W))) for _ in "kv")
    none = dict.fromkeys(ne.Scratch._fields)
    s = ne.Scratch(**{**none, "scores": scores, "dscores": dscores, "kt": kt, "vt": vt})
    c = constants(np.float64, H, G, D, T)
    ne.blocked_attention_forward(o, lse, place(qkv), c, 0, H, s)
    ne.blocked_attention_backward(dqkv, place(do), o, lse, place(qkv), c, 0, G, s)

    W = tile_width(ne.BF16)
    low = narrow(qkv)
    o16, lse32 = place(np.zeros((T, H * D), np.uint16)), np.zeros((H, T), np.float32)
    dqkv32 = place(np.zeros((T, cols), np.float32))
    scores, dscores = (place(np.full((ne.BR, T), np.nan, np.float32)) for _ in "pd")
    kt, vt = (place(np.zeros((-(-T // W), D // 2, W), np.int32)) for _ in "kv")
    s = ne.Scratch(**{**none, "scores": scores, "dscores": dscores, "kt": kt, "vt": vt})
    c = constants(np.float32, H, G, D, T)
    ne.blocked_attention_forward(o16, lse32, low, c, 0, H, s)
    assert close(from_bf16(o16), o, roundings=2)
    assert np.allclose(lse32, lse, rtol=1e-5, atol=1e-5)
    ne.blocked_attention_backward(dqkv32, narrow(do), o16, lse32, low, c, 0, G, s)
    if T > 1:                                # one key: dq and dk are zero, and rounding remains
        assert close(dqkv32, dqkv, roundings=3)


# ---- the whole model
CFGS = {"tiny": TINY, "tied": ne.replace(TINY, tie_embeddings=True, n_mtp=1),
        "odd": ne.replace(TINY, n_embd=33, n_head=6, n_kv_head=2, head_dim=10, n_hidden=51,
                          seq_len=37, vocab_size=263)}


def batch(cfg, B, seed=1):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, cfg.vocab_size, (B, cfg.seq_len), dtype=np.int32)
    targets = rng.integers(-1, cfg.vocab_size, (cfg.n_mtp, B, cfg.seq_len), dtype=np.int32)
    return tokens, targets, ne.loss_weights(targets, 0.3)


def gradient(cfg, batch, flat, dtype=None, micro=None):
    """The model after its gradient, by micro-batches, and the losses"""
    model, (tokens, targets, weight) = ne.Model(cfg, flat, dtype=dtype), batch
    for b in range(0, len(tokens), micro or len(tokens)):
        part = slice(b, b + (micro or len(tokens)))
        model.gradient(tokens[part], targets[:, part], weight)
    return model


@pytest.mark.parametrize("cfg", CFGS.values(), ids=CFGS)
def test_the_gradient_is_that_of_float64(cfg):
    """Tensor by tensor; the bound is that of the GPU in bfloat16."""
    data, flat = batch(cfg, 3), ne.init_params(cfg, 3)
    exact = ne.aligned(flat.shape, np.float64)
    exact[:] = flat
    low, full = gradient(cfg, data, flat, ne.BF16), gradient(cfg, data, exact)
    assert low.a.qkv.dtype == ne.BF16 and low.w.qkv.dtype == np.int32
    assert low.g_flat.dtype == low.a.x.dtype == low.a.logits.dtype == np.float32
    assert np.allclose(low.ce, full.ce, rtol=1e-3)
    for name, x, y in zip(full.g._fields, low.g, full.g, strict=True):
        assert max(errors(x, y)) < 5e-2, name


def test_threads_and_micro_batches_change_no_bit():
    cfg, flat = CFGS["odd"], ne.init_params(CFGS["odd"], 3)
    data = batch(cfg, 6)
    want = gradient(cfg, data, flat, ne.BF16)
    for threads, micro in ((1, 1), (1, 4), (numba.config.NUMBA_NUM_THREADS, 6)):
        numba.set_num_threads(threads)
        got = gradient(cfg, data, flat, ne.BF16, micro)
        assert np.array_equal(got.g_flat, want.g_flat) and np.array_equal(got.d.x[-1], want.d.x[-1])


def test_what_is_not_finite_is_named():
    cfg, flat = TINY, ne.init_params(TINY, 1)
    ne.views(flat, ne.param_table(cfg)).down[1, 2, 3] = np.nan
    model = gradient(cfg, batch(cfg, 2), flat, ne.BF16)
    assert model.first_bad_tensor() == "parameter down[1, 2, 3] is nan"
    ne.views(flat, ne.param_table(cfg)).down[1, 2, 3] = 0
    model.a.att[0, 1, 2, 3] = 0x7FC0
    said = model.first_bad_tensor()
    assert said.startswith("activation ") and "is nan" in said


# ---- runs
def test_a_run_in_bfloat16_goes_on_to_the_same_bits(elsewhere, text, tmp_path, capsys):
    flags = ("--data", text, "--dtype", "bf16", "--mtp-until", 1, *FAST)
    said = told("train", "--steps", 12, "--out", "whole.bin", *flags)
    assert "bfloat16" in said.splitlines()[0]
    told("train", "--steps", 5, "--out", "parts.bin", *flags)
    first = ne.read_checkpoint("parts.bin")
    assert first.state.options["dtype"] == "bf16" and first.flat.dtype == np.float32
    refused(capsys, "train", "--resume", "--steps", 12, "--out", "parts.bin", "--dtype", "f32",
            words=["parts.bin was started with --dtype bf16, not f32"])
    run("train", "--resume", "--steps", 12, "--out", "parts.bin")
    plain = told("train", "--steps", 12, "--out", "plain.bin", "--data", text, "--dtype", "f32",
                 "--mtp-until", 1, *FAST)
    assert "float32" in plain.splitlines()[0]
    whole, parts, f32 = (outcome(tmp_path, name) for name in ("whole", "parts", "plain"))
    assert whole.step == parts.step == 12 and whole.arrays != f32.arrays
    assert whole.bits_per_byte == pytest.approx(f32.bits_per_byte, rel=0.02)
    run("sft", "whole.bin", "--data", ROOT / "data/instructions.json", "--steps", 2, "--seq-len",
        160, "--dtype", "bf16", *FAST[len(SMALL):])


def test_a_type_there_is_not_is_refused(elsewhere, text, capsys):
    refused(capsys, "train", "--data", text, "--dtype", "f16", *FAST,
            words=["--dtype: expected f32 or bf16, found f16"])


def test_runs_of_the_spread_begin_apart(text, monkeypatch):
    """bench/bf16_spread.py: a run depends on its number alone, and each begins elsewhere."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    spread = importlib.import_module("bf16_spread")
    monkeypatch.setitem(ne.PRESETS, "small", replace(TINY, vocab_size=280, seq_len=16))
    ends = []
    for k in (1, 1, 2):
        options = TrainOptions(steps=3, batch=64, dtype="f32", data=str(text))
        ends.append(spread.bits_per_byte(options, k))
    assert ends[0] == ends[1] != ends[2] and abs(ends[0] - ends[2]) < 1e-4


@pytest.mark.parametrize("cpu, has_bf16, expected", [
    ("znver5", True, "bf16"), ("znver4", True, "bf16"), ("znver4", False, "f32"),
    ("znver3", False, "f32"), ("sapphirerapids", True, "f32"), ("cooperlake", True, "f32"),
    ("apple-m1", False, "f32")])
def test_what_a_run_computes_in_where_it_is_not_told(cpu, has_bf16, expected):
    assert faster_dtype(cpu, has_bf16) == expected
