"""Starting a run: from a preset, from the weights in a file, or from its own checkpoint."""
import argparse
import contextlib
import glob
import json
import math
import os
import shlex
from dataclasses import asdict, fields, replace
from functools import partial

from bpe import need, note, printable, reading, UserError
from nanoeuler import Model, MUON_SETTINGS, need_setting, PRESETS
from nanoeuler_parts.chat.models import models_in, MOST_MODELS
from nanoeuler_parts.checkpoint.bundled import beside_program, BUNDLED, shown_name
from nanoeuler_parts.checkpoint.file import (
    ADAPTER_FILES, begins_as_checkpoint, Checkpoint, sha256_of,
)
from nanoeuler_parts.checkpoint.state import State
from nanoeuler_parts.files.logs import alone
from nanoeuler_parts.files.printing import counted, names_in
from nanoeuler_parts.files.safetensors import read_header
from nanoeuler_parts.files.settings import digits_of, flag_of
from nanoeuler_parts.files.writing import refuse_overwrite
from nanoeuler_parts.flags import arg, model_name, out, RUN, SHAPE, typed
from nanoeuler_parts.runs.guards import need_free_best, need_source, NEW_RUN, note_slow_run
from nanoeuler_parts.runs.options import TrainOptions
from nanoeuler_parts.runs.plan import steps_planned
from nanoeuler_parts.runs.run import Run
from nanoeuler_parts.runs.schedule import ON

LENGTH = {"steps", "minutes", "epochs"}
# ENGINE_SETTINGS: settings that only some engines have.
# FREE: settings that --resume may change: length, machine, the path of the data, and what is saved
# and logged besides.
ENGINE_SETTINGS = {"optimizer", *MUON_SETTINGS, "matmul", "gpus", "recompute", "lora", "lora_alpha",
                   "lora_targets"}
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
    if not os.path.exists(out):
        folder = os.path.dirname(os.path.abspath(out))
        raise UserError(f"{out}: expected a run to resume, found no file of this name in {folder}; "
                        f"{runs_to_resume(run, out)}; to start a run, drop --resume")
    start = run.read_own(out, file)
    need_moments(start.matrices == "f32", run, out, f"{start.matrices} matrices and ")
    if file is not None:
        need_source(file, out, start.state)
    old = options_in(run, out, start.state)
    if "data" in chosen:
        digest = run.digest_of(chosen["data"], old)
        need(digest == start.state.text_sha256, f"{out} trains on {names_in(old.data)}, and the "
             f"contents of {names_in(chosen['data'])} differ; {NEW_RUN}")
    need_same(out, asdict(start.cfg) | asdict(old), asked_for(chosen, preset, start, old))
    options = old.changed(**free_settings(chosen, old))
    if has_new_length(chosen, old):
        start = start._replace(state=lengthened(out, start.state, options, chosen))
    return start, options

def need_moments(there, run, out, also=""):
    """Rejects a checkpoint without the optimizer's moments.     also: another reason, for `out`"""
    if not there:
        raise UserError(f"{out} has {also}no optimizer moments, so it cannot be resumed; "
                        f"{runs_to_resume(run, out)}; {NEW_RUN}")

MOST_RUNS = 3                # names in a message

def runs_to_resume(run, out):
    """The checkpoints in the folder of `out` that --resume of this verb can continue, as text for
    a message.  Only headers are read."""
    folder, found = os.path.dirname(out), []
    if os.path.basename(out) == ADAPTER_FILES[0]:        # a run with LoRA is a folder
        folder = os.path.dirname(folder)
    for path, shown in candidates(folder):
        with contextlib.suppress(OSError, UserError, KeyError, TypeError, ValueError,
                                 RecursionError):
            with open(path, "rb") as f:
                _, meta, tensors, _ = read_header(f)
            state = State(**json.loads(meta["state"])).check()
            options_in(run, path, state)
            if "adamw.m" in tensors:
                of = f" of {state.n_steps:,}" if state.n_steps else ""
                found.append(f"{shown} (step {state.step:,}{of})")
    more = f" and {len(found) - MOST_RUNS:,} more" if len(found) > MOST_RUNS else ""
    if not found:
        return f"there is no run of {run.verb} to resume in this folder"
    return f"--out names a run to resume: {', '.join(found[:MOST_RUNS])}{more}"

def candidates(folder):
    """[(path, name as the user types it)] of the files in a folder that may be runs: checkpoints,
    the newest first, and the run.bin of its adapters"""
    paths = [os.path.join(folder, name)
             for _, name in sorted(models_in(folder or os.curdir), reverse=True)[:MOST_MODELS]]
    adapters = glob.glob(os.path.join(glob.escape(folder), "*", ADAPTER_FILES[0]))
    return [*((path, path) for path in paths),
            *((path, os.path.dirname(path)) for path in sorted(adapters)[:MOST_MODELS])]

def options_in(run, out, state):
    """The options that the checkpoint of a run stores"""
    has = {f.name for f in fields(run.Options)}
    stored = run.Options.when_missing | state.options
    settings = {name: value for name, value in stored.items()
                if name in has or name not in ENGINE_SETTINGS}
    need(state.options and settings.keys() <= has, f"{out} was not made by {run.verb}; {NEW_RUN}")
    with reading(f"{out} was not made by {run.verb}", NEW_RUN):
        options = run.Options(**settings).check()
    optimizer = stored.get("optimizer", "adamw")
    need("optimizer" in has or optimizer == "adamw",
         f"{out} was trained with {optimizer}, but {run.verb} learns with AdamW; {NEW_RUN}")
    return options

def asked_for(chosen, preset, start, old):
    """{name: value} of the shape and the settings that the user asks for: those of a preset, and
    the flags.  start, old: the Checkpoint and the options of the run, whose rows may be shorter
    than its context, and whose vocabulary may be smaller than what was asked for"""
    cfg, asked = start.cfg, dict(chosen)
    if preset:
        of_preset = {name: value for name, value in asdict(PRESETS[preset]).items()
                     if name not in PRESET_MAY_DIFFER}
        asked = of_preset | chosen
    if "seq_len" in asked and old.row_len:
        if cfg.seq_len == old.row_len:       # sft's rows set it
            asked["seq_len"] = max(asked["seq_len"], cfg.seq_len)
        if asked["seq_len"] == old.row_len:  # with --init, it is the length of a row
            del asked["seq_len"]
    if start.state.vocab_size and asked.get("vocab_size") == start.state.vocab_size:
        del asked["vocab_size"]
    return asked

def are_same(x, y):
    """Whether two values of a setting mean the same.  A model without a window has None, for which
    the user types --window 0."""
    return x == y or not x and not y

def need_same(out, of_run, asked):
    """Rejects a setting that differs from that of the run and is not in FREE."""
    for name, value in of_run.items():
        other = asked.get(name, value)
        typed = as_typed(name, other).removeprefix(f"{flag_of(name)} ")
        need(name in FREE or are_same(other, value),
             f"{out} was started with {as_typed(name, value)}, not {typed}; drop the flag, or "
             f"{NEW_RUN}")

def has_new_length(chosen, old):
    return any(name in LENGTH and chosen[name] != getattr(old, name) for name in chosen)

def free_settings(chosen, old):
    """The settings in FREE that the user changes.  Old steps would override new minutes or epochs.
    """
    free = {name: value for name, value in chosen.items() if name in FREE}
    return {"steps": None, **free} if has_new_length(chosen, old) else free

def lengthened(out, state, options, chosen):
    """The State of a run that gets a new length, in steps, minutes or epochs"""
    longer = not options.steps or options.steps > state.step
    if longer and state.n_steps and state.step >= state.n_steps:
        note(f"{out} was complete after {counted(state.step, 'step')}; the run continues, and "
             f"the learning rate rises again")
    n_steps = steps_planned(state, options) if "minutes" in chosen else None
    return replace(state, n_steps=n_steps, mtp_phase=ON)

def fresh(run, preset, file, chosen):
    """(Checkpoint, options) of a new run, from a preset or from the weights in a file"""
    if run.larger_data and os.path.exists(beside_program(run.larger_data)):
        chosen = {"data": run.larger_data, **chosen}
    start = Checkpoint(PRESETS[preset or run.preset], None, State(), None, ())
    if file is not None:
        need(not preset, f"{file} has its own shape; drop {preset}, or drop --init")
        start = from_weights(run, file)
    shape = {name: value for name, value in chosen.items() if hasattr(start.cfg, name)}
    settings = {name: value for name, value in chosen.items() if name not in shape}
    if file is not None and run.kind:        # sft and dpo: --seq-len also sets the length of a row
        settings = {"row_len": shape["seq_len"], **settings} if "seq_len" in shape else settings
    elif file is not None:
        row_len = row_length_of(file, start.cfg, shape)
        shape = {**shape, "seq_len": max(start.cfg.seq_len, row_len)}
        settings = {**settings, "row_len": row_len}
    options = run.Options.chosen(**settings)
    if file is not None and not run.kind:
        options = with_lower_rates(options)
    cfg = replace(start.cfg, **shape).check()
    run.need_memory(cfg)
    return start._replace(cfg=cfg), options

def from_weights(run, file):
    """The Checkpoint of a new run that begins with the weights in a file.  `sft` and `dpo` make it
    a chat model, `train --init` keeps its kind."""
    start = run.read_source(file)
    s = start.state
    if run.needs_chat and s.kind == "base":
        note(f"{file} is a base model; run sft first to teach it to answer, because "
             f"{run.only_teaches}")
    need(s.eos in start.tokenizer.specials or not run.kind, f"{file} has no token {s.eos} to end a "
         f"response; start from another model")
    template = s.template
    if s.kind == "chat":                     # a base model's "" names no template
        template = template or "alpaca"
    return start._replace(moments=(), state=State(
        kind=run.kind or s.kind, bos=s.bos, eos=s.eos, stops=s.stops, template=template,
        thinking=s.thinking if run.keeps_template else "",
        source=shown_name(file), source_sha256=sha256_of(file),
        learned=s.learned + ([s.text_sha256] if s.kind == "chat" and s.text_sha256 else [])))

# With --init: tokens of a row, unless --seq-len is given, and the share of a new model's learning
# rates that is the default (bench/NOTES.md)
LONGEST_ROW, INIT_RATE = 1024, 0.1

def row_length_of(file, cfg, shape):
    """Tokens of a row for `train --init`.  The model keeps its shape; --seq-len sets the length of
    a row, and extends the context if it is longer."""
    for name in shape.keys() - {"seq_len"}:
        value = getattr(cfg, name)
        need(are_same(shape[name], value), f"{file} has {as_typed(name, value)}, "
             f"not {shape[name]}; drop the flag, or drop --init")
    return shape.get("seq_len", min(cfg.seq_len, LONGEST_ROW))

def with_lower_rates(options):
    """The options of `train --init`, whose learning rates are lower unless the user sets them"""
    rates = {name: INIT_RATE * getattr(options, name) for name in ("lr", "muon_lr")
             if hasattr(options, name) and name not in options.given}
    return options.derived(**rates)

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
          f"{typed(engine.program)} {run.verb} --resume --out "
          f"{printable(shlex.quote(run.shown(out)))} {longer}\n"
          "To start anew, repeat the command that began it, with --force.")

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
                run.print_done(out, s, engine)
                return print_more(run, out, s, options, chosen, engine)
            need(not refusal, refusal)
            need_moments(start.moments, run, out)
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
                best = run.best_path(out)
                run.prepare_best(best)
                refusal = end.enter_context(lock(best))
                need(not refusal, refusal)
                reads = (*data.split("\n"), file)
                need_free_best(best, start.state, reads, resume, force, run.state_of_best)
            if not resume and "data" not in chosen and run.larger_data not in ("", options.data):
                print(printable(f"training on {names_in(options.data)}; to use {run.larger_data}, "
                                f"run make data"), end="\n\n")
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
            help="size of a new model, given as a flag instead; omitted: small"),
        INIT, out("nanoeuler.bin"), *RUN, settings=fields(TrainOptions), shape=SHAPE)

def launch_training(run, preset=None, data=(), named=None, **chosen):
    """`train`.  A preset may follow the names after --data, where argparse takes it for a name.
    named: the preset given by its flag"""
    need(not (preset and named), f"expected one preset, found {preset} and {named}; drop one")
    preset = preset or named
    if data and data[-1] in PRESETS and not preset and not os.path.exists(data[-1]):
        *data, preset = data
    launch_any(run, "nanoeuler.bin", preset=preset, **chosen, **({"data": data} if data else {}))

def launch_any(run, default, engine=Model, lora_engine=None, *, out, resume, lora=0, **chosen):
    """Starts or resumes a run, with LoRA if --lora is given or the run to resume has it.
    default: of --out     engine, lora_engine: without LoRA and with it; by default on the CPU"""
    if lora or resume:
        from nanoeuler_parts.tuning.lora import is_run_with_lora, launch_with_lora
        if lora:
            chosen["lora"] = lora
        if lora or is_run_with_lora(out):
            return launch_with_lora(run, default, lora_engine, out=out, resume=resume, **chosen)
        need(not os.path.isdir(out), f"{out}: expected a run to resume, found a folder without a "
             f"run.bin; name the folder that `{run.verb} --lora` wrote")
    for name in ("lora_alpha", "lora_targets"):
        need_setting(name not in chosen, name, "expected {lora} beside it, found none; add {lora} "
                     "16, or drop it")
    return launch(run, engine, out=out, resume=resume, **chosen)
