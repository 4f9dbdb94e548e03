"""The verb `quantize`: writes a checkpoint whose matrices are int8."""
import os
import shlex
from dataclasses import replace

import numpy as np

from bpe import need, note, printable
from nanoeuler import aligned, Model, n_params, need_setting
from nanoeuler_parts.checkpoint.file import read_checkpoint, write_checkpoint
from nanoeuler_parts.checkpoint.tensors import named
from nanoeuler_parts.files.logs import replacing_no_run
from nanoeuler_parts.files.printing import counted
from nanoeuler_parts.files.safetensors import note_large
from nanoeuler_parts.files.writing import refuse_overwrite
from nanoeuler_parts.flags import arg, file_name, FORCE, model_name, SHAPE, typed

HEADS = [f for f in SHAPE if f.name == "n_mtp"]          # the only flag of a model's shape

def with_heads(c, n_mtp):
    """The Checkpoint with its first n_mtp heads only, and without moments"""
    need_setting(n_mtp <= c.cfg.n_mtp, "n_mtp", f"expected at most "
                 f"{counted(c.cfg.n_mtp, 'head')}, as the model has, found {n_mtp}")
    cfg = replace(c.cfg, n_mtp=n_mtp).check()
    flat, given = aligned((n_params(cfg),), np.float32), named(c.cfg, c.flat)
    for name, x in named(cfg, flat).items():
        x[...] = given[name]
    return c._replace(cfg=cfg, flat=flat, moments=())

def quantize(file, out, force, n_mtp=None):
    """`quantize`: writes the model in int8, to chat with or to begin a run with."""
    refuse_overwrite(out, force)
    need(os.path.realpath(out) != os.path.realpath(file),
         f"{out} would replace {file}, which is more precise; choose another name")
    with replacing_no_run(out):
        write_quantized(file, out, n_mtp)

def write_quantized(file, out, n_mtp):
    """Reads the model, and writes it in int8."""
    c = read_checkpoint(file, moments=False)
    if c.matrices == "int8":
        note(f"the matrices of {file} are already int8")
    c = with_heads(c, c.cfg.n_mtp if n_mtp is None else n_mtp)
    # no run resumes from this file; without times and folders, equal runs give identical files
    learned = os.path.basename(str(c.state.options.get("data", "")))
    state = replace(c.state, options={"data": learned} if learned else {}, elapsed=0.0,
                    source=os.path.basename(c.state.source), source_sha256="", log_sha256="",
                    micro_batch=None, reference=[], rehearsed_sha256="", own_answers=[],
                    old_right=[], old_known=[])
    note_large(f"rounding to int8 and writing {out}", c.flat.nbytes)
    write_checkpoint(out, c.cfg, c.tokenizer, state, c.flat, matrices="int8")
    print(f"{printable(out)}: {n_params(c.cfg):,} parameters, "
          f"{counted(c.cfg.n_mtp, 'output head')}, int8, {os.path.getsize(out):,} bytes.  Talk to "
          f"it with:\n"
          f"    {typed(Model.program)} chat {printable(shlex.quote(out))}")

def quantize_verb(add):
    add(quantize, arg("file", type=model_name, help="checkpoint to quantize"),
        arg("out", type=file_name, help="checkpoint to write"), FORCE, shape=HEADS)
