"""The self-tests of decode/: its shorter kernels, and whole steps and prompts."""
import functools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

import nanoeuler as ne
from nanoeuler_cuda import kernel_path, make_decoder, new, PATHS, to_device
from nanoeuler_parts.decode.prompts import BY_ROWS
from nanoeuler_parts.decode.sampling import choose_kernel, DRAW_FIELDS, room_for_list, THREADS
from nanoeuler_parts.decode.steps import copy_slot_kernel
from nanoeuler_parts.decode.table import AT_ONCE, COUNTS, N_WANTED, RING
from nanoeuler_parts.gpu.launches import launch
from nanoeuler_parts.selftests.bounds import as_sum
from nanoeuler_parts.selftests.cases import nearest_bf16
from nanoeuler_parts.selftests.ops import expected_logits

def add_copy_slot_tests(ops):
    for L, slots, G, T, D, n in ((1, 2, 1, 1, 2, 1), (2, 3, 4, 70, 64, 69)):
        cache = ops.normal(L, slots, G, T, D)
        copied = cache.copy()
        copied[:, 0, :, :n] = cache[:, 1, :, :n]
        ops.add(copy_slot_test, [cache], [1, 0, n], [copied], "copy_slot", ("f32",))

def add_choose_tests(ops):
    """Samples with all kinds of SampleRequests from logits with many equal values, with only equal
    values, and with one value that is not finite."""
    for V in 1, 61, 4099:
        z, rng = ops.normal(64, V + 8), ops.rng
        z[1] = 0
        z[2, V // 2], z[3, V - 1] = np.nan, np.inf
        draws = [ne.SampleRequest(*map(float, (
            rng.choice([0, 0.5, 1, 30]), rng.choice([0, 1, 7, V]), rng.choice([0, 0.3, 0.9, 1]),
            rng.choice([0, 0, 0.2]), rng.random()))) for _ in z]
        expected = np.array([-1.0 if not np.isfinite(line).all() else ne.sample(
            line.astype(np.float32), SimpleNamespace(random=lambda u=draw.uniform: u),
            draw._replace(top_k=int(draw.top_k))) for line, draw in zip(z[:, :V], draws)])
        ops.add(choose_test, [np.zeros(64, np.int32)], [z, draws, V], [expected], "choose",
                ("f32",))

def models(ops):
    """Yields (cfg, parameters, texts, [(suffix of the test's name, fastest kernel path)])."""
    plain = dict(n_layer=2, seq_len=150, vocab_size=61, n_mtp=1)
    for i, sizes in enumerate((
            dict(n_hidden=1536),
            dict(n_embd=328, n_hidden=104, head_dim=64, n_head=6, tie_embeddings=True),
            dict(n_embd=64, n_hidden=2312, head_dim=128, n_head=5, n_kv_head=1),
            dict(n_embd=2568, head_dim=48, n_layer=1),
            dict(n_embd=1280, n_hidden=2816, n_layer=1),           # slices in uneven turns
            dict(n_embd=2048, n_hidden=2312, n_layer=1),           # several jobs per block
            dict(n_embd=72, n_hidden=8200, n_layer=1),             # more pieces than stages
            dict(n_hidden=1024, qkv_bias=True), dict(n_hidden=1024, qk_norm=True),
            dict(n_hidden=1024, head_dim=128, n_head=4, n_kv_head=2, qkv_bias=True, qk_norm=True,
                 window=70))):
        cfg = replace(ne.PRESETS["small"], **{**plain, **sizes})
        flat = nearest_bf16(ne.init_params(cfg, 3, np.float64))
        n_gains = sum(math.prod(shape) for _, shape, *_ in ne.param_table(cfg)[ne.VECTORS])
        flat[-n_gains:] += nearest_bf16(0.1 * ops.normal(n_gains))
        texts = [ops.rng.integers(0, cfg.vocab_size, n).tolist() for n in (150, 1, 77, 40)]
        paths = [("", PATHS[-1])]
        # Compiling dominates the time, and on "mma" only W's place differs: two shapes are enough.
        if kernel_path() == "wgmma" and i % 3 == 1:
            paths.append((", mma", "mma"))
        yield cfg, flat, texts, paths

def add_rows_tests(ops):
    """Reads texts into slots, in pieces of different lengths, so that steps mix them in many
    ways."""
    for cfg, flat, texts, paths in models(ops):
        expected = functools.cache(functools.partial(expected_sums, cfg, flat, *texts))
        for suffix, top in paths:
            read = functools.partial(rows_test, cfg, flat, texts, top)
            ops.add_case("rows" + suffix, expected, read, ("bf16",))

def add_prompt_tests(ops):
    """Reads texts of more than BY_ROWS tokens as prompts."""
    for cfg, flat, texts, paths in models(ops):
        texts = [text for text in texts if len(text) > BY_ROWS]
        expected = functools.cache(functools.partial(expected_logits, cfg, flat, *texts))
        for suffix, top in paths:
            read = functools.partial(prompt_test, cfg, flat, texts, top)
            ops.add_case("prompt" + suffix, expected, read, ("bf16",))

# run.py adds these groups to those of ops.py
GROUPS = {"copy_slot": add_copy_slot_tests, "choose": add_choose_tests,
          "prompt": add_prompt_tests, "rows": add_rows_tests}

def expected_sums(*args):
    """The same logits, as sums: they are not rounded to bfloat16."""
    return [as_sum(x) for x in expected_logits(*args)]

def rows_test(cfg, flat, texts, top, dtype):
    """Returns the logits after each token of each text, [(T, V)], read in pieces."""
    decoder = make_decoder(cfg, flat.astype(np.float32), "bf16", slots=len(texts), top=top)
    found, at, step = [[] for _ in texts], [0] * len(texts), 0
    while any(a < len(text) for a, text in zip(at, texts)):
        parts = []
        for slot, text in enumerate(texts):
            n = (1, 6, 2, 40, 1)[(step + slot) % 5]
            if piece := text[at[slot]:at[slot] + n]:
                parts.append(ne.Part(slot, piece, len(piece)))
        logits, line = decoder.read(parts).copy(), 0
        for slot, _, n in parts:
            found[slot].append(logits[line:line + n])
            at[slot], line = at[slot] + n, line + n
        step += 1
    return [np.concatenate(rows) for rows in found]

def prompt_test(cfg, flat, texts, top, dtype):
    """Returns the same, where each text is read as a prompt."""
    decoder = make_decoder(cfg, flat.astype(np.float32), "bf16", slots=len(texts), top=top)
    logits = decoder.read([ne.Part(i, text, len(text)) for i, text in enumerate(texts)])
    return np.split(logits, np.cumsum([len(text) for text in texts])[:-1])

def choose_test(ids, out, draws, V):
    """Samples a token from each line of `out` to ids, by the second half of the ring."""
    rows = np.zeros((5, AT_ONCE), np.int32)
    rows[COUNTS, N_WANTED] = len(draws)
    rows[COUNTS, RING] = 1
    chosen, scratch = new((2, ne.MOST_ROWS), np.int32), (len(draws), room_for_list(V))
    odds, listed = new(scratch, np.float64), new(scratch, np.uint64)
    table = np.full((2, ne.MOST_ROWS, DRAW_FIELDS), np.nan)
    table[1, :len(draws)] = draws
    launch(choose_kernel(kernel_path() == "wgmma"), chosen, ids, odds, listed, out,
           to_device(table), to_device(rows), V, grid=len(draws), block=THREADS)

def copy_slot_test(cache, source, slot, n):
    """Copies the first n keys of one slot to another."""
    launch(copy_slot_kernel, cache, source, slot, n, block=256,
           grid=(cache.shape[2], cache.shape[0]))
