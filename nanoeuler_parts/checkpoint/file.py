"""A checkpoint is one file: weights, moments, tokenizer and the state of the run.

The format is that of section 10 of nanoeuler.py, safetensors.  This module also stores the
optimizer's moments, bfloat16 and int8, and checks everything that it reads.
"""
import hashlib
import itertools
import json
import os
from collections import namedtuple

import numpy as np

import bpe
from bpe import need, reading
from nanoeuler import aligned, Config, FILE_NAMES, n_params, param_table, Params, Stack
from nanoeuler_parts.checkpoint.matrices import (
    as_bf16, as_int8, expected_types, from_int8, types_of,
)
from nanoeuler_parts.checkpoint.state import State
from nanoeuler_parts.checkpoint.tensors import (
    moment_shapes, named, named_moments, read_moments, tensor_shapes,
)
from nanoeuler_parts.files.safetensors import (
    DTYPES, map_tensors, need_finite, need_whole, note_large, release_pages, write_tensors,
)
from nanoeuler_parts.machine.numbers import from_bf16

# ---- reading and writing
def write_checkpoint(path, cfg, tokenizer, state, flat, moments=(), matrices="f32"):
    """Writes one file: float32 weights and all that a run needs to resume, or bf16 or int8
    matrices."""
    meta = meta_of(cfg, tokenizer, state, matrices)
    flat, *moments = (np.ascontiguousarray(x, "<f4") for x in (flat, *moments))
    tensors = named(cfg, flat)
    if matrices != "f32":
        tensors = {"bf16": as_bf16, "int8": as_int8}[matrices](tensors)
    if moments:
        tensors |= named_moments(cfg, state.options.get("optimizer"), *moments)
    if state.reference:
        tensors[REFERENCE] = np.array(state.reference, DTYPES["F64"])
    write_tensors(path, meta, tensors, "free space or choose another --out", "BF16")

def meta_of(cfg, tokenizer, state, matrices):
    """The metadata of a checkpoint's file"""
    meta = {"format": "nanoeuler", "config": json.dumps(cfg.written()),
            "state": json.dumps(state.written()), "tokenizer": tokenizer.to_json(),
            "tokenizer_sha256": tokenizer.hash()}
    if matrices != "f32":                    # without an entry they are f32, as in older files
        meta["matrices"] = matrices
    return meta

REFERENCE = "dpo.reference"  # name of the tensor (n,) float64 of State.reference

# flat (N,) float32; moments: (m, v) or (); matrices: their type in the file, f32, bf16 or int8
Checkpoint = namedtuple("Checkpoint", "cfg tokenizer state flat moments matrices",
                        defaults=["f32"])
# A checkpoint whose tensors, {name: array}, are memory-mapped.  moment_names: names of its moments
OpenCheckpoint = namedtuple("OpenCheckpoint",
                            "path cfg tokenizer state tensors matrices moment_names")
NOT_OURS = "name a checkpoint written by train, sft, dpo or import"

ADAPTER_CONFIG = "adapter_config.json"       # in the folder of a LoRA adapter
ADAPTER_FILES = "run.bin", "adapter_model.safetensors"

def adapter_at(path):
    """The folder of the LoRA adapter to which this path leads, a folder or a file in it; None if
    there is none"""
    folder = os.path.dirname(path) if os.path.basename(path) in ADAPTER_FILES else path
    folder = folder or os.curdir
    return folder if os.path.isfile(os.path.join(folder, ADAPTER_CONFIG)) else None

def need_no_adapter(path):
    """Rejects a LoRA adapter in place of a model."""
    folder = adapter_at(path)
    need(folder is None, f"{path}: expected a model, found a LoRA adapter; name the model that the "
         f"adapter was made for, and the adapter with --adapter {folder}, or write both into one "
         f"model with export --merge {folder}")

def need_checkpoint(path):
    """Rejects a LoRA adapter, or the folder of a model of other programs, in place of a model."""
    need_no_adapter(path)
    need(not os.path.isfile(os.path.join(path, "config.json")), f"{path}: expected a checkpoint, "
         f"found a model in Hugging Face's format; convert it with import {path} OUT.bin")

def open_checkpoint(path):
    """Opens a checkpoint, and checks its tensors' names, types and shapes.  nanoeuler_parts also
    verifies the checksum of all bytes."""
    need_checkpoint(path)
    with reading(path, NOT_OURS):
        meta, tensors = map_tensors(path)
        need(meta.get("format") == "nanoeuler" and meta.get("sha256"),
             "expected a NanoEuler checkpoint, found a file of another program")
        cfg = Config(**json.loads(meta["config"])).check()
        state = State(**json.loads(meta["state"])).check()
        optimizer = "muon" if "muon.momentum" in tensors else "adamw"
        need(optimizer == "adamw" or state.options.get("optimizer") == "muon",
             "it stores moments of Muon, but its settings name another optimizer")
        matrices = meta.get("matrices", "f32")
        need(matrices in ("f32", "bf16", "int8"),
             f"its matrices are {matrices}, expected f32, bf16 or int8")
        expected, moment_names = expected_types(cfg, matrices), moment_shapes(cfg, optimizer)
        has_moments = "adamw.m" in tensors and matrices == "f32"
        if has_moments:
            expected |= {name: (DTYPES["F32"], shape) for name, shape in moment_names.items()}
        if REFERENCE in tensors:
            expected[REFERENCE] = DTYPES["F64"], (tensors[REFERENCE].size,)
        need(types_of(tensors) == expected, "its tensors do not match its configuration")
        if REFERENCE in tensors:
            need_finite(REFERENCE, tensors[REFERENCE])
            state.reference = tensors[REFERENCE].tolist()
        tokenizer = bpe.Tokenizer.from_json(meta["tokenizer"])
        need(tokenizer.hash() == meta["tokenizer_sha256"],
             "its tokenizer does not match the stored checksum")
        need(tokenizer.vocab_size == cfg.vocab_size,
             f"its tokenizer has {tokenizer.vocab_size} tokens, but its model has {cfg.vocab_size}")
    return OpenCheckpoint(path, cfg, tokenizer, state, tensors, matrices,
                          [*moment_names] if has_moments else [])

def read_tensor(tensors, name):
    """A tensor of an open checkpoint in float32, checked to be finite"""
    x = tensors[name]
    need_whole(x)
    if x.dtype == np.int8:
        found = from_int8(name, x, tensors[f"{name}_scale"])
    else:
        found = np.array(from_bf16(x))       # a copy, as the pages of the file are released
    need_finite(name, found)
    release_pages(x)
    return found

def params_in(c):
    """Params of an open checkpoint: each matrix, or stack of matrices, is a Stack"""
    def reader(names):
        def read():
            with reading(c.path, NOT_OURS):
                found = [read_tensor(c.tensors, name) for name in names]
            return found[0] if len(found) == 1 else np.concatenate(found)
        return read

    names, found = iter(tensor_shapes(c.cfg)), []
    for x in param_table(c.cfg):
        n = x.shape[0] if x.axis else 1
        parts = len(FILE_NAMES[x.name]) if x.start < x.end else 0
        readers = [reader(list(itertools.islice(names, parts))) for _ in range(n)]
        if x.decays:
            found.append(Stack(readers, x.shape[1:] if x.axis else x.shape))
        else:
            rows = [read() for read in readers] if parts else []
            found.append(np.array(rows, np.float32).reshape(x.shape))
    return Params(*found)

def read_checkpoint(path, moments=True):
    """Reads a Checkpoint: `open_checkpoint`, and all values, which must be finite.
    `moments=False` skips the optimizer's moments, which are twice the size of the model."""
    c = open_checkpoint(path)
    with reading(path, NOT_OURS):
        flat, kept = aligned((n_params(c.cfg),), np.float32), ()
        for name, x in named(c.cfg, flat).items():
            x[...] = read_tensor(c.tensors, name)
        if moments and c.moment_names:
            for name in c.moment_names:
                need_finite(name, c.tensors[name])
            kept = read_moments(c.cfg, c.tensors)
    return Checkpoint(c.cfg, c.tokenizer, c.state, flat, kept, c.matrices)

def begins_as_checkpoint(path):
    """Is this file a NanoEuler checkpoint?  Only its first 64 bytes are read."""
    with open(path, "rb") as f:
        return b'{"__metadata__":{"format":"nanoeuler"' in f.read(64)

def sha256_of(path):
    note_large(f"computing the checksum of {path}", os.path.getsize(path))
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
