"""What a run rejects or warns of before its first step: memory, time, and files."""
import contextlib
import os
import time
from dataclasses import replace

import numpy as np

from bpe import need, note, UserError
from nanoeuler import n_params
from nanoeuler_parts.checkpoint.file import read_checkpoint, sha256_of
from nanoeuler_parts.files.writing import refuse_overwrite
from nanoeuler_parts.machine.threads import most_memory

def need_memory(cfg):
    """Rejects a model that cannot fit: a run needs at least the parameters, the gradient and two
    moments, all in float32.  The vocabulary does not count, as a short text makes it smaller."""
    n, there = n_params(replace(cfg, vocab_size=1)), most_memory()
    need(16 * n <= there, f"training {n:,} parameters needs {16 * n / 2**30:,.1f} GiB of memory, "
         f"this machine or container has {there / 2**30:,.1f} GiB; choose a smaller --n-layer, "
         f"--n-embd or --n-hidden")

SLOW_ON_CPU = 30_000_000     # parameters; larger models get a note

def seconds_of_step(cfg, tokens):
    """Estimated seconds of a training step on this CPU: 6 floating-point operations per parameter
    and token (Kaplan et al. 2020, 2.1), at the measured speed of one float32 matrix product."""
    a, times = np.ones((768, 768), np.float32), []
    for _ in range(3):
        began = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - began)
    return 6 * n_params(cfg) * tokens * min(times) / (2 * a.size * len(a))

def note_slow_run(cfg, options):
    """Warns if the model is so large that a run on a CPU takes too long, and estimates the time."""
    n = n_params(cfg)
    if n < SLOW_ON_CPU:
        return
    seconds = seconds_of_step(cfg, options.batch)
    if options.steps:
        length = f"{options.steps:,} steps take about {options.steps * seconds / 3600:,.1f} hours"
    else:
        steps = 60 * options.minutes / seconds
        length = f"{options.minutes:g} minutes allow about {steps:,.0f} steps"
    note(f"{n:,} parameters are many for a CPU: a step takes about {seconds:,.1f} s, so "
         f"{length}, but a useful model needs thousands of steps; train on a GPU with "
         f"nanoeuler_cuda.py, or choose the preset small or big")

# ---- settings
NEW_RUN = "to start a new run, drop --resume and add --out NAME"

def need_data(path, out):
    """Rejects a path that is not a file, before anything is compiled."""
    remedy = "name the training data with --data"
    if os.path.exists(out):
        remedy = f"name the training data of {out} with --data"
    need(path, f"the name of the data file is empty; {remedy}")
    there = "" if os.path.isabs(path) else f" in {os.getcwd()}"
    need(os.path.exists(path), f"{path}: No such file{there}; check the path, or {remedy}")
    need(os.path.isfile(path), f"{path}: not a regular file; {remedy}")

# ---- a run
def best_path(out):
    """The file of --keep-best: a_best.bin for the checkpoint `a` or `a.bin`"""
    return f"{out.removesuffix('.bin')}_best.bin"

def state_of_model(path):
    """The State in a checkpoint"""
    return read_checkpoint(path, moments=False).state

def need_own_best(path, state, state_in=state_of_model):
    """Rejects a file of --keep-best that is not this run's own best model.  The file contains a
    State: it must name the same log or, if the log was lost, have the same best validation.
    state_in: reads the State of the file"""
    if not os.path.lexists(path):
        return
    refuse_overwrite(path, force=True)
    kept = None
    with contextlib.suppress(UserError):
        kept = state_in(path)
    same_log = kept and kept.log_sha256 and kept.log_sha256 == state.log_sha256
    same_best = kept and state.best and (kept.step, kept.best) == (state.best_step, state.best)
    need(same_log or same_best, f"{path} is not the best model of this run, and --keep-best would "
         f"replace it; rename it, or replace it with --force")

def need_free_best(best, state, reads, resume, force, state_in=state_of_model):
    """Rejects a file of --keep-best if the run reads it.  Without --force, also rejects a file of
    another run."""
    if resume and not force:
        need_own_best(best, state, state_in)
    else:
        refuse_overwrite(best, force, "--keep-best would replace it; choose another --out")
    need(os.path.realpath(best) not in map(os.path.realpath, filter(None, reads)),
         f"{best} of --keep-best would replace an input of the run; choose another --out")

def need_source(file, out, state):
    """Rejects a `file` that is not the checkpoint with which the run `out` began."""
    need(os.path.isfile(file), f"{file}: No such file; to resume {out}, drop this name")
    began_with = state.source_sha256         # "": older versions did not store it
    need(began_with in ("", sha256_of(file)), f"{out} did not start from {file} as it is now; to "
         f"resume {out}, drop {file}; to start anew from it, replace --resume with --force")
