"""Starting a run: from a preset, from the weights in a file, or from its own checkpoint."""
import argparse
import contextlib
import math
import os
import shlex
from dataclasses import asdict, fields, replace
from functools import partial

from bpe import need, note, printable, reading
from nanoeuler import Model, MUON_SETTINGS, PRESETS
from nanoeuler_parts.checkpoint.bundled import beside_program, BUNDLED, shown_name
from nanoeuler_parts.checkpoint.file import (
    begins_as_checkpoint, Checkpoint, read_checkpoint, sha256_of,
)
from nanoeuler_parts.checkpoint.state import State
from nanoeuler_parts.files.logs import alone
from nanoeuler_parts.files.printing import counted
from nanoeuler_parts.files.settings import digits_of, flag_of
from nanoeuler_parts.files.writing import refuse_overwrite
from nanoeuler_parts.flags import arg, model_name, out, RUN, SHAPE, typed
from nanoeuler_parts.runs.guards import (
    best_path, need_free_best, need_memory, need_source, NEW_RUN, note_slow_run,
)
from nanoeuler_parts.runs.loop import ON
from nanoeuler_parts.runs.options import RunOptions, TrainOptions
from nanoeuler_parts.runs.run import print_done, Run

def print_more(run, out, s, options, chosen, engine):
    """Prints how a run that is complete continues.  chosen: the settings that the user gave"""
    asked = [f"{flag_of(name)} {digits_of(chosen[name])}" for name in sorted(LENGTH & chosen.keys())
             if chosen[name]]
    longer = f"--steps {2 * s.step}"
    if not options.steps:
        longer = f"{run.length_flag} {2 * getattr(options, run.length_flag[2:]):g}"
    if asked:
        print(f"{' and '.join(asked)}: expected more than the run has done, because a length "
              f"counts from its first step.")
    print(f"To train it further, give a longer total, such as\n    "
          f"{typed(engine.program)} {run.verb} --resume --out {printable(shlex.quote(out))} "
          f"{longer}\nTo start anew, replace --resume with --force.")

LENGTH = {"steps", "minutes", "epochs"}
# ENGINE_SETTINGS: settings that only some engines have.
# FREE: settings that --resume may change: length, machine, the path of the data, and what is saved
# and logged besides.
ENGINE_SETTINGS = {"optimizer", *MUON_SETTINGS, "matmul", "gpus", "recompute"}
FREE = {*LENGTH, "data", "micro_batch", "gpus", "recompute", "keep_best", "log_to"}
# A preset named with --resume need not match the run in these fields
PRESET_MAY_DIFFER = {"seq_len", "vocab_size", "n_mtp"}

def as_typed(name, value):
    """A setting as the user types it: --lr 0.1, --no-truncate, or without --template if empty"""
    if isinstance(value, bool):
        return flag_of(name) if value else flag_of(f"no_{name}")
    texts = value if isinstance(value, list) else [digits_of(value)]
    if value in (None, "", []):
        return f"no {flag_of(name)}"
    return " ".join(f"{flag_of(name)} {shlex.quote(text)}" for text in texts)

def resumed(run, out, preset, file, chosen):
    """(Checkpoint, options) of the run `out`, to be resumed
    It must be a run of this class, and agree with the file, the flags and the preset that the user
    names.  Only the settings in FREE may differ."""
    need(os.path.exists(out), f"{out}: expected a run to resume, found no file; to start one, drop "
         f"--resume; to resume another one, name it with --out")
    start = read_checkpoint(out)
    need(start.matrices == "f32", f"{out} has {start.matrices} matrices and no optimizer moments, "
         f"so it cannot be resumed; {NEW_RUN}")
    if file is not None:
        need_source(file, out, start.state)
    stored = RunOptions.when_missing | run.Options.when_missing | start.state.options
    has = {f.name for f in fields(run.Options)}
    optimizer = stored.get("optimizer", "adamw")
    settings = {name: value for name, value in stored.items()
                if name in has or name not in ENGINE_SETTINGS}
    need(start.state.options and settings.keys() <= has,
         f"{out} was not made by {run.verb}; {NEW_RUN}")
    with reading(f"{out} was not made by {run.verb}", NEW_RUN):
        old = run.Options(**settings).check()
    need("optimizer" in has or optimizer == "adamw",
         f"{out} was trained with {optimizer}, which this program lacks; resume with nanoeuler.py")
    if "data" in chosen:
        digest = run.digest_of(chosen["data"], old)
        need(digest == start.state.text_sha256, f"{out} trains on {old.data}, and the contents of "
             f"{chosen['data']} differ; {NEW_RUN}")
    asked = dict(chosen)
    if preset:
        of_preset = {k: v for k, v in asdict(PRESETS[preset]).items()
                     if k not in PRESET_MAY_DIFFER}
        asked = of_preset | chosen
    if "seq_len" in asked and start.cfg.seq_len == stored.get("row_len"):    # sft's rows set it
        asked["seq_len"] = max(asked["seq_len"], start.cfg.seq_len)
    if "seq_len" in asked and asked["seq_len"] == stored.get("row_len"):
        del asked["seq_len"]                 # with --init, it is the length of a row
    for name, value in (asdict(start.cfg) | asdict(old)).items():
        other = as_typed(name, asked.get(name)).removeprefix(f"{flag_of(name)} ")
        need(name in FREE or asked.get(name, value) == value, f"{out} was started with "
             f"{as_typed(name, value)}, not {other}; drop the flag, or {NEW_RUN}")
    new_length = any(name in LENGTH and chosen[name] != getattr(old, name) for name in chosen)
    free = {name: value for name, value in chosen.items() if name in FREE}
    if new_length:
        free = {"steps": None, **free}       # old steps would override new minutes or epochs
    options = old.changed(**free)
    if new_length:
        done = start.state.step
        longer = not options.steps or options.steps > done
        if longer and start.state.n_steps and done >= start.state.n_steps:
            note(f"{out} was complete after {counted(done, 'step')}; the run continues, and "
                 f"the learning rate rises again")
        n_steps = steps_planned(start.state, options) if "minutes" in chosen else None
        start = start._replace(state=replace(start.state, n_steps=n_steps, mtp_phase=ON))
    return start, options

def steps_planned(state, options):
    """Total number of steps in --minutes, at the pace so far; None if no time was measured"""
    if not state.elapsed:
        return None
    at_this_pace = state.step * 60 * options.minutes / state.elapsed
    return max(state.step, int(min(at_this_pace, 1 << 40)))

def fresh(run, preset, file, chosen):
    """(Checkpoint, options) of a new run, from a preset or from the weights in a file"""
    if run.larger_data and os.path.exists(beside_program(run.larger_data)):
        chosen = {"data": run.larger_data, **chosen}
    start = Checkpoint(PRESETS[preset or run.preset], None, State(), None, ())
    if file is not None:
        need(not preset, f"{file} has its own shape; drop {preset}, or drop --init")
        start = from_weights(run, file)
    shape = {k: v for k, v in chosen.items() if hasattr(start.cfg, k)}
    settings = {k: v for k, v in chosen.items() if k not in shape}
    if file is not None:
        fit = fit_row if run.kind else fit_shape
        fit(file, start.cfg, shape, settings)
    options, cfg = run.Options.chosen(**settings), replace(start.cfg, **shape).check()
    if file is not None and not run.kind:
        for name in {"lr", "muon_lr"} & vars(options).keys() - chosen.keys():
            setattr(options, name, INIT_RATE * getattr(options, name))
    need_memory(cfg)
    return start._replace(cfg=cfg), options

def from_weights(run, file):
    """The Checkpoint of a new run that begins with the weights in a file.  `sft` and `dpo` make it
    a chat model, `train --init` keeps its kind."""
    start = read_checkpoint(file, moments=False)
    s = start.state
    if run.needs_chat and s.kind == "base":
        note(f"{file} is a base model; run sft first to teach it to answer, because dpo "
             f"only teaches which of two answers is better")
    need(s.eos in start.tokenizer.specials or not run.kind, f"{file} has no token {s.eos} to end a "
         f"response; start from another model")
    template = s.template
    if s.kind == "chat":                     # a base model's "" names no template
        template = template or "alpaca"
    return start._replace(moments=(), state=State(
        kind=run.kind or s.kind, bos=s.bos, eos=s.eos, stops=s.stops, template=template,
        source=shown_name(file), source_sha256=sha256_of(file)))

def fit_row(file, cfg, shape, settings):
    """For `sft` and `dpo`: --seq-len also sets the length of a row."""
    if "seq_len" in shape:
        settings.setdefault("row_len", shape["seq_len"])

# With --init: tokens of a row, unless --seq-len is given, and the share of a new model's learning
# rates that is the default (bench/NOTES.md)
LONGEST_ROW, INIT_RATE = 1024, 0.1

def fit_shape(file, cfg, shape, settings):
    """For `train --init`: the model keeps its shape.  --seq-len sets the length of a row, and
    extends the context if it is longer."""
    for name in shape.keys() - {"seq_len"}:
        need(shape[name] == getattr(cfg, name), f"{file} has {flag_of(name)} {getattr(cfg, name)}, "
             f"not {shape[name]}; drop the flag, or drop --init")
    settings["row_len"] = shape.get("seq_len", min(cfg.seq_len, LONGEST_ROW))
    shape["seq_len"] = max(cfg.seq_len, settings["row_len"])

def launch(run, engine=Model, preset="", file=None, *, out, resume, force, lock=None, **chosen):
    """Starts a run from a preset or from the weights in a file, or resumes the run `out`.
    Everything that can be rejected is rejected before a kernel is compiled.
    lock: keeps other runs away from a file; yields "" or why it cannot be written (default: alone)
    chosen: settings.  An absent one keeps its default, or on --resume its old value.  With 0 or
    None, steps follow from minutes or epochs, and micro_batch is as large as fits in memory."""
    if {"minutes", "epochs"} & chosen.keys():            # these replace a length in steps
        chosen.setdefault("steps", None)
    chosen = {name: x if x or name not in ("steps", "micro_batch") else None
              for name, x in chosen.items()}             # 0 means None
    if "data" in chosen:                     # a named path must exist as it is
        if not isinstance(chosen["data"], str):
            for name in chosen["data"]:      # a line end separates the names
                need("\n" not in name, f"--data: expected file names without line ends, found "
                     f"{name!r:.80}; rename the file, or name its folder")
            chosen["data"] = "\n".join(chosen["data"])
        run.need_data(chosen["data"], out)
    lock = lock or alone
    with lock(out) as refusal:               # before `out` is read: a run may still write it
        need(resume or not refusal, refusal)
        if resume:
            start, options = resumed(run, out, preset, file, chosen)
            s = start.state
            if s.step >= (options.steps or s.n_steps or math.inf):
                print_done(out, s, engine)
                return print_more(run, out, s, options, chosen, engine)
            need(not refusal, refusal)
            need(start.moments, f"{out} has no optimizer moments, so it cannot be resumed; "
                 f"{NEW_RUN}")
        else:
            need(force or not os.path.isfile(out) or begins_as_checkpoint(out),
                 f"{out} exists and is not a checkpoint; choose another --out")
            refuse_overwrite(out, force, "continue it with --resume, choose another --out")
            own = run.begins_with
            need(file or not own or os.path.exists(own), f"{own}: No such file; make it with "
                 f"{typed(engine.program)} {run.made_by}, or name another checkpoint, such as "
                 f"{BUNDLED}")
            file = file or own
            replaced = file is not None and os.path.realpath(file) == os.path.realpath(out)
            need(not replaced, f"{out} would replace {file}, the model it starts from; choose "
                 f"another --out")
            start, options = fresh(run, preset, file, chosen)
        data = run.data_path(options)
        run.need_data(data, out)
        with contextlib.ExitStack() as end:
            if options.keep_best:
                refusal = end.enter_context(lock(best_path(out)))
                need(not refusal, refusal)
                reads = (*data.split("\n"), file)
                need_free_best(best_path(out), start.state, reads, resume, force)
            if not resume and "data" not in chosen and run.larger_data not in ("", options.data):
                print(f"training on {options.data}; to use {run.larger_data}, run make data\n")
            if engine is Model and run is Run:
                note_slow_run(start.cfg, options)
            run(out, start, options, engine).go()

INIT = arg("--init", dest="file", type=model_name, default=argparse.SUPPRESS,
           help=f"checkpoint whose weights the run starts from, with its shape and its tokenizer; "
                f"{BUNDLED}: the bundled model; the default learning rates are then a tenth of "
                f"those below (default: none)")

def train_verb(add):
    add(partial(launch_training, Run),
        arg("preset", nargs="?", choices=list(PRESETS), help="size of a new model; omitted: small"),
        arg("--preset", dest="named", choices=list(PRESETS), metavar="PRESET",
            help="the same as a flag, as nanoeuler_cuda.py has it"),
        INIT, out("nanoeuler.bin"), *RUN, settings=fields(TrainOptions), shape=SHAPE)

def launch_training(run, preset=None, data=(), named=None, **chosen):
    """`train`.  A preset may follow the names after --data, where argparse takes it for a name.
    named: the preset given by its flag"""
    need(not (preset and named), f"expected one preset, found {preset} and {named}; drop one")
    preset = preset or named
    if data and data[-1] in PRESETS and not preset and not os.path.exists(data[-1]):
        *data, preset = data
    launch(run, preset=preset, **chosen, **({"data": data} if data else {}))
