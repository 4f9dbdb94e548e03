"""How much memory of the GPU a model needs, and which micro-batches fit into what is free.

A training step needs the buffers of nanoeuler_cuda.buffer_table, and a model holds parameters,
gradients and moments.  `model` is a Model of nanoeuler_cuda.py or of ranks/engine.py.
"""
import bisect
import math
from typing import NamedTuple

import numpy as np

import nanoeuler as ne
import nanoeuler_cuda as nc
from nanoeuler_parts.files.printing import print_table

def memory_table(cfg, B, T, dtype, buffers=nc.buffer_table, kept=None, top=nc.PATHS[-1]):
    """[(name, bytes)] of all that training needs on the device, for micro-batches of B x T tokens.

    samples: a run prints sample texts now and then.  The decoder for them has a copy of the
    parameters, a KV cache, and the buffers of the fast decoder.  The working memory of Muon is not
    here: see Model.memory."""
    bytes_of = {"a": 0, "d": 0, "logits": 0}
    for group, name, shape, kind in buffers(cfg, B, T, dtype, kept):
        if name == "logits":
            group = "logits"
        bytes_of[group] += math.prod(shape) * kind.itemsize
    n, size = ne.n_params(cfg), nc.computing(dtype).itemsize
    return [("parameters", n * size), ("gradients", n * size), ("AdamW moments", 2 * n * size),
            ("bfloat16 copies", 2 * n if dtype == np.uint16 else 0),
            ("activations", bytes_of["a"]), ("their gradients", bytes_of["d"]),
            ("logits", bytes_of["logits"]), ("tokens", 4 * (B * T * (4 + cfg.n_mtp) + 1)),
            ("samples", n * dtype.itemsize + size * (
                2 * cfg.n_layer * cfg.n_kv_head * cfg.seq_len * cfg.head_dim)
             + (0 if dtype != np.uint16 or nc.rows_refused(cfg, top) else
                nc.fast_decoder().rows_bytes(cfg) + bytes_of_lists(cfg.vocab_size)))]

def bytes_of_lists(V):
    """Returns the bytes of the lists in which the fast decoder samples tokens, beyond the 8 V bytes
    per row that its `rows_bytes` counts for them.  An entry and its odds have 16 bytes."""
    from nanoeuler_parts.decode.sampling import room_for_list
    from nanoeuler_parts.decode.table import AT_ONCE
    return AT_ONCE * (16 * room_for_list(V) - 8 * V)

# Rows of the memory table that do not depend on the batch.  The last one is of several GPUs.
HELD = ("parameters", "gradients", "AdamW moments", "bfloat16 copies", "Muon's matrices",
        "others' gradients")

class Needs(NamedTuple):
    """Bytes of a memory table"""
    held: int                                # of the model, independent of the batch
    batch: int                               # of a micro-batch
    samples: int                             # while a sample text is generated

# The largest number of sequences in a micro-batch: attention has one block per sequence along z,
# and a grid has at most 65,535 blocks along y and along z
MOST_SEQUENCES = 65535

def needs_of(table):
    """Returns the Needs of a memory_table."""
    held, sizes = sum(size for name, size in table if name in HELD), dict(table)
    return Needs(held, sum(sizes.values()) - held - sizes["samples"], sizes["samples"])

def fitting(model, T):
    """Returns how many sequences of T tokens, at most MOST_SEQUENCES, fit into 90 % of the memory
    that is free or held by the current buffers, with room for generating a sample."""
    nc.release_garbage()
    free = nc.free_bytes()
    if model.shape:
        free += needs_of(model.memory(*model.shape)).batch

    def bytes_needed(B):
        needs = needs_of(model.memory(B, T))
        return needs.batch + needs.samples
    sizes = range(1, MOST_SEQUENCES + 1)
    return bisect.bisect_right(sizes, 0.9 * free, key=bytes_needed)

def micro_batch(model, B, asked=None, T=None):
    """Returns the number of sequences per micro-batch, when a step has B: as many as asked for
    (--micro-batch), or the largest number that fits and splits B into equal parts.
    T: tokens per sequence; by default the length of the context
    Prints the memory table once for each set of arguments."""
    T = T or model.cfg.seq_len
    if (B, asked, T) not in model.micro:
        fits = model.fitting(T)
        if asked:
            size = min(asked, B, MOST_SEQUENCES)
        else:
            parts = math.ceil(B / max(1, min(fits, B)))
            size = math.ceil(B / parts)
        if not model.micro and (slow := model.without_tensor_cores()):
            print(f"note: {slow}", flush=True)
        print_memory(model, size, T, fits)
        model.micro[B, asked, T] = size
    return model.micro[B, asked, T]

def print_memory(model, B, T, fits):
    """Prints the memory table of B sequences of T tokens, in MiB."""
    rows = model.memory(B, T)
    rows.append(("together", sum(size for _, size in rows)))
    print_table(f"memory for {B} sequences of {T} tokens at a time ({fits} would fit)",
                [(name, f"{size / 2**20:10,.0f} MiB") for name, size in rows])

def shortage(model, B, T, error):
    """Returns what a user reads if there is no memory for micro-batches of B x T tokens.
    error: that of the allocation that failed"""
    total, fits = sum(size for _, size in model.memory(B, T)) / 2**30, model.fitting(T)
    again = "" if model.kept < model.cfg.n_layer else "--recompute, "
    remedy = f"--micro-batch {fits} would fit" if fits else (
        f"not even one fits: use {again}a shorter --seq-len or a smaller --preset")
    return (f"{B} sequences of {T} tokens need {total:.1f} GiB in all, which the GPU does not have "
            f"({error}); {remedy}")
