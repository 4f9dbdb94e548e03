"""Rows of a decoder: against the full forward pass, and the same bits beside any others."""
import ast
import inspect
from dataclasses import replace

import numpy as np
import pytest
from helpers import TINY, random_flat
from models import TINY_CONFIGS, tokens_of

import nanoeuler as ne
from nanoeuler_parts.machine.cpu import HAS_BF16, HAS_VNNI
from nanoeuler_parts.machine.numbers import in_fixed_point, quantized

pytestmark = pytest.mark.unit

KINDS = ["f32", "bf16", "int8", "bf16 rounded", "int8 rounded"]
# long enough for blocks of rows, wide enough for panels at the edge and for shared products
LONG = replace(TINY, n_embd=40, n_head=6, n_kv_head=2, head_dim=10, n_hidden=77, seq_len=400,
               n_mtp=3)
# its longest row is that of all heads, 60 numbers; in LONG it is that of the FFN
WIDE_HEADS = replace(LONG, n_hidden=44, seq_len=100)


def all_logits(decoder, ids, sizes, slot=0):
    """(T, V): the logits of every position, read so many rows at a time."""
    found, at = [], 0
    for n in sizes:
        part = ids[at:at + n]
        found.append(decoder.read([ne.Part(slot, part, len(part))]).copy())
        at += len(part)
    return np.concatenate(found)


# ---- against the full forward pass
@pytest.mark.parametrize("name", TINY_CONFIGS)
@pytest.mark.parametrize("dtype, limit", [(np.float64, 1e-12), (np.float32, 1e-4)])
def test_a_prompt_in_one_step_is_the_forward_pass(name, dtype, limit):
    cfg = TINY_CONFIGS[name]
    model, ids = ne.Model(cfg, random_flat(cfg, 2, dtype)), tokens_of(cfg, cfg.seq_len)
    want = model.logits(ids[None])[0, 0]
    got = all_logits(ne.Decoder(cfg, model.flat), ids, [cfg.seq_len])
    assert np.abs(got - want).max() <= limit * max(1, np.abs(want).max())


def test_other_heads_are_those_of_the_forward_pass():
    model, ids = ne.Model(LONG, random_flat(LONG, 2, np.float32, 0.1)), tokens_of(LONG, 50)
    want = model.logits(ids[None])[0]
    decoder = ne.Decoder(LONG, model.flat)
    decoder.read([ne.Part(0, ids, 2)])
    for row, t in enumerate((48, 49)):
        got = decoder.guesses(row)
        assert got.shape == (2, LONG.vocab_size)
        assert np.abs(got - want[1:, t]).max() <= 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("slots, n", [(64, 10), (300, 1), (3, 200)])
def test_guesses_of_any_row_of_a_step(slots, n):
    """Also of a step with more rows than are computed at once, or in which a slot slides."""
    flat = random_flat(LONG, 2, np.float32, 0.1)
    many, alone = ne.Decoder(LONG, flat, slots=slots), ne.Decoder(LONG, flat)
    texts = [tokens_of(LONG, n, seed=i).tolist() for i in range(slots)]
    many.read([ne.Part(i, text, 1) for i, text in enumerate(texts)])
    for i in (0, slots // 2, slots - 1):
        alone.truncate(0)
        alone.read([ne.Part(0, texts[i], 1)])
        assert np.array_equal(many.guesses(i), alone.guesses(0))


def test_slots_of_mixed_lengths():
    """Several texts in one step, each against its own forward pass; some logits are wanted."""
    model = ne.Model(LONG, random_flat(LONG, 2, np.float64, 0.1))
    decoder = ne.Decoder(LONG, model.flat, slots=4)
    texts = [tokens_of(LONG, n, seed=n).tolist() for n in (3, 130, 61, 1)]
    cuts = [1, 100, 60, 0]                   # so much is read in a first step
    decoder.read([ne.Part(i, text[:cut], 0) for i, (text, cut) in enumerate(zip(texts, cuts))
                  if cut])
    order, wanted = [2, 0, 3, 1], [1, 2, 0, 5]
    got = decoder.read([ne.Part(i, texts[i][cuts[i]:], n) for i, n in zip(order, wanted)])
    assert decoder.held_ids == texts
    want = [model.logits(np.array([texts[i]], np.int32))[0, 0, len(texts[i]) - n:].copy()
            for i, n in zip(order, wanted)]
    assert np.abs(got - np.concatenate(want)).max() <= 1e-11


@pytest.mark.parametrize("T", [1, 2, 7, 8])
@pytest.mark.parametrize("sizes", [(3, 5, 1, 6), (20, 1), (1, 25), (8, 8, 9)])
def test_a_slot_that_slides_in_the_middle_of_a_part(T, sizes):
    """As many tokens at once as one by one: the same logits to the bit, also in a second slot."""
    cfg = replace(TINY, seq_len=T)
    flat, ids = random_flat(cfg, 2, np.float32), tokens_of(cfg, sum(sizes)).tolist()
    alone, many = ne.Decoder(cfg, flat), ne.Decoder(cfg, flat, slots=2)
    want = np.array([alone.step(i).copy() for i in ids])
    assert np.array_equal(all_logits(many, ids, sizes, slot=1), want)
    assert many.held_ids == [[], alone.tokens]
    last = ne.Decoder(cfg, flat).read([ne.Part(0, ids, 1)])
    assert np.array_equal(last[0], want[-1])


# ---- the same bits
def decoder_of(weights, flat, monkeypatch, slots=1, cfg=LONG):
    """rounded: x, too, as where the processor multiplies bfloat16 or int8 itself, which other
    instructions stand in for elsewhere."""
    kind, *rounded = weights.split()
    monkeypatch.setattr(ne, "QUADS", bool(rounded))
    decoder = ne.Decoder(cfg, flat, kind, slots)
    if kind == "bf16":
        decoder.weights.input_dtype = np.dtype(np.uint16 if rounded else np.float32)
        decoder.allocate()
    w = decoder.weights.p.qkv[0]
    kinds = {"bf16 rounded": (np.uint16, np.uint16), "int8 rounded": (np.float32, np.int32)}
    stored, read = kinds.get(weights, (np.float32, np.float32))          # as `product` reads it
    assert decoder.work.y.dtype == stored and quantized(decoder.work.y[:1], w).dtype == read
    return decoder


@pytest.mark.parametrize("weights", KINDS)
def test_bits_do_not_depend_on_the_number_of_rows(weights, monkeypatch):
    """One by one, all in one step, and by twos, threes and so on."""
    flat, ids = random_flat(LONG, 2, np.float32, 0.1), tokens_of(LONG, 300).tolist()
    alone = decoder_of(weights, flat, monkeypatch)
    want = np.array([alone.step(i).copy() for i in ids])
    assert np.isfinite(want).all() and want.std() > 0.1
    for sizes in ([300], [2] * 150, [3] * 100, [4, 5, 6, 7, 8, 9, 12, 13, 31, 32, 33, 64, 76]):
        got = all_logits(decoder_of(weights, flat, monkeypatch), ids, sizes)
        assert np.array_equal(got, want), (sizes[0], np.abs(got - want).max())


@pytest.mark.parametrize("cfg", [LONG, WIDE_HEADS], ids=["wide FFN", "wide heads"])
@pytest.mark.parametrize("weights, least, most", [("bf16", 1e-4, 0.05), ("int8", 1e-6, 1e-3)])
def test_where_the_processor_multiplies_such_numbers_x_is_rounded(weights, least, most,
                                                                  cfg, monkeypatch):
    flat, ids = random_flat(cfg, 2, np.float32, 0.1), tokens_of(cfg, 60).tolist()
    exact, rounded = (all_logits(decoder_of(kind, flat, monkeypatch, cfg=cfg), ids, [60])
                      for kind in (weights, f"{weights} rounded"))
    assert least < np.abs(exact - rounded).max() / np.abs(exact).max() < most
    monkeypatch.undo()
    used = ne.Decoder(cfg, flat, weights).weights
    if weights == "bf16":
        assert (used.input_dtype == np.uint16) == HAS_BF16
    else:
        assert (used.p.qkv.dtype == np.uint32) == HAS_VNNI


def units_of(x):
    """(whole numbers (R, K), scale (R, 1)) of x in 16-bit fixed point"""
    fixed, K, quads = in_fixed_point(x), x.shape[1], -(-x.shape[1] // 4)
    upper, lower = (np.ascontiguousarray(part).view(np.int8)[:, :K].astype(np.int64)
                    for part in (fixed[:, :quads], fixed[:, quads:2 * quads]))
    return 256 * upper + lower, np.ascontiguousarray(fixed[:, -1]).view(np.float32)[:, None]


@pytest.mark.parametrize("R", [1, 2, 3, 4, 7, 8, 19])
@pytest.mark.parametrize("K", [1, 6, 64, 77])
def test_products_in_integers(R, K):
    """x of 16 bits in two bytes, sums of integers: what is left are the roundings of the sum, of
    the two scales and of what it is added to, 2**-24 each.  The x of a product are whole units
    times a power of two: at half a unit, two compilations of the same code round either way."""
    rng, N = np.random.default_rng(1), 70
    any_x = (rng.standard_normal((R, K)) * 10.0 ** rng.integers(-3, 4, (R, 1))).astype(np.float32)
    units, row_scale = units_of(any_x)
    assert np.all(np.abs(units).max(1) == 127 * 256)
    assert np.all(np.abs(units * row_scale - any_x) <= 0.51 * row_scale)     # 1 / scale

    x = (units * 2.0 ** rng.integers(-20, 1, (R, 1))).astype(np.float32)
    same, row_scale = units_of(x)
    assert np.array_equal(same, units) and np.array_equal(units * row_scale, x)
    w = rng.standard_normal((N, K)).astype(np.float32)
    panels, scales = ne.in_panels(w[None], "int8", quads=True)
    q, scale = ne.converted(w, "int8")
    want = (units @ q.T.astype(np.int64)) * np.float64(row_scale) * scale
    for base in (0.0, 1.0):
        y = np.full((R, N), base, np.float32)
        ne.product(y, x, panels[0], scales[0], int(base))
        limit = 4 * 2.0 ** -24 * (np.abs(want) + base)
        assert np.all(np.abs(y - (want + base)) <= limit)


@pytest.mark.parametrize("weights", KINDS)
def test_bits_do_not_depend_on_the_neighbours(weights, monkeypatch):
    """Thirteen texts, of which each step reads some: each text as it is alone."""
    flat = random_flat(LONG, 2, np.float32, 0.1)
    texts = [tokens_of(LONG, 40, seed=i).tolist() for i in range(13)]
    want = [all_logits(decoder_of(weights, flat, monkeypatch), text, [40]) for text in texts]
    batch, rng = decoder_of(weights, flat, monkeypatch, slots=13), np.random.default_rng(1)
    while unfinished := [i for i in range(13) if len(batch.held_ids[i]) < 40]:
        parts, expected = [], []
        for i in rng.permutation(unfinished)[:rng.integers(1, 14)]:
            t, n = len(batch.held_ids[i]), int(rng.choice([1, 1, 1, 4, 11]))
            ids = texts[i][t:t + n]
            parts.append(ne.Part(int(i), ids, len(ids)))
            expected.append(want[i][t:t + n])
        assert np.array_equal(batch.read(parts), np.concatenate(expected))


def test_taken_back_rows_leave_no_trace():
    """Drafts that were wrong: what is read then has the bits of a text without them."""
    flat, ids = random_flat(LONG, 2, np.float32, 0.1), tokens_of(LONG, 100).tolist()
    clean, used = (ne.Decoder(LONG, flat, slots=2) for _ in range(2))
    want = all_logits(clean, ids, [100], slot=1)
    used.read([ne.Part(1, ids[:50], 0)])
    for t in range(50, 100, 5):
        used.read([ne.Part(1, [7, 8, 9][:t % 4], 0)] if t % 4 else [ne.Part(0, [1], 0)])
        used.truncate(t, 1)
        got = used.read([ne.Part(1, ids[t:t + 5], 5)])
        assert np.array_equal(got, want[t:t + 5])


def test_slots_of_the_same_weights():
    flat = random_flat(LONG, 2, np.float32, 0.1)
    one = ne.Decoder(LONG, flat, "int8")
    many = one.with_slots(3, 50)
    assert many.weights is one.weights and many.length == 50 and len(many.held_ids) == 3
    assert np.array_equal(one.step(5).copy(), many.read([ne.Part(2, [5])])[0])


# ---- parallel functions
def test_a_parallel_function_has_one_parallel_region():
    """Numba makes a region of its own of each array that is filled: threads start twice, which
    takes as long as the attention of a token.  np.empty fills nothing."""
    functions = [x for x in ast.parse(inspect.getsource(ne)).body if isinstance(x, ast.FunctionDef)
                 and "jit_parallel" in map(ast.unparse, x.decorator_list)]
    assert {"attention_parallel", "run_batch", "adamw_update"} <= {x.name for x in functions}
    for function in functions:
        called = {ast.unparse(x.func) for x in ast.walk(function) if isinstance(x, ast.Call)}
        filled = {name for name in called if name.startswith("np.")}
        assert filled <= {"np.empty", "np.int64", "np.float64"}, function.name
        assert not any(name.endswith((".sum", ".fill")) for name in called), function.name


# ---- what is refused
@pytest.mark.parametrize("parts, words", [
    ([], "parts: 0, slots: 0"), ([(0, [1], 1), (0, [2], 1)], "one per slot; parts: 2, slots: 1"),
    ([(2, [1], 1)], "slot from 0 to 1, found 2"), ([(-1, [1], 1)], "slot from 0 to 1, found -1"),
    ([(0, [], 0)], "one token or more, .*tokens: 0, wanted: 0"),
    ([(0, [1], 2)], "0 to 1 wanted; .*wanted: 2"), ([(0, [1], -1)], "0 to 1 wanted; .*wanted: -1"),
    ([(0, [1, 262], 1)], "token ids from 0 to .*, found 262"),
    ([(0, [-1], 1)], "token ids from 0 to .*, found -1")])
def test_rows_that_there_cannot_be(parts, words):
    decoder = ne.Decoder(TINY, random_flat(TINY, 2, np.float32), slots=2)
    with pytest.raises(ne.UserError, match=words):
        decoder.read([ne.Part(*part) for part in parts])
    assert decoder.held_ids == [[], []]
