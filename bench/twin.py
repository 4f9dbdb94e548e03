"""The engine and a PyTorch twin, side by side: the same weights, batches, schedule and data.

    python bench/twin.py --stage sft --base nanoeuler.bin [--engine gpu] [--epochs 2 ...]
    python bench/twin.py --stage dpo --base nanoeuler_chat.bin
    python bench/twin.py --stage pretrain --preset big --minutes 9

A stage is run once for each of --sides, by the loops of nanoeuler.py (Run, SftRun, DpoRun):

    ours      nanoeuler.Model, with --engine gpu nanoeuler_cuda.Model
    twin      tests/oracles: autograd, torch's clipping and fused AdamW; float32, or on the
              GPU what --dtype says, bf16 under autocast and compiled
    control   ours from weights * (1 + 1e-7 normal): what training makes of rounding
    lockstep  ours again; every 10th step the twin takes the same step from its weights and moments:
              how far apart one step takes them, all along the way
    cpu       nanoeuler.Model, beside a GPU's ours

All settings of the stage are flags; AdamW, float32 and all heads all along go before the CPU's
defaults, because the twin has no other.  Every step is logged in FOLDER/SIDE.jsonl; its learning
rate is that of ours, whose schedule --minutes plans as it goes.  --half SIDE runs one side, after
Ctrl-C with --resume the rest of it, and --compare compares what is there (any SIDE.jsonl), so that
each call may be short, and sides whose --steps are given, or of sft and dpo, may run at once.
Writes OUT.json, OUT.md.  --compare of several folders, made with a --seed each, adds the means.

loss      of the head that is read, per step; of dpo that of the preferences.
exact     held-out questions of skill answered as the key does.  Replies of all sides come from one
          greedy decoder, PyTorch in float32, all questions at once; those of skill also from our
          own, and it is counted how many are the same.
prefers   held-out pairs with log pi(chosen) > log pi(rejected), by each side's own engine; "before"
          means before training, by ours for all sides.
gap       log pi(chosen) - log pi(rejected), the mean over these pairs, nats.

The file has 30 held-out questions of skill, so that one is more than 3 points: --unseen N makes N
more after their pattern, none of them in the file, all held out by the same hash, each with a wrong
answer for a pair.
"""
import argparse
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
from dataclasses import fields

import numpy as np
import torch
from numba import get_num_threads

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests")]
import nanoeuler as ne
from nanoeuler_parts.files.logs import read_log
from nanoeuler_parts.machine.threads import use_threads
from nanoeuler_parts.tools import on_gpu
from nanoeuler_parts.tuning.dpo import DpoRun
from nanoeuler_parts.tuning.examples import held_out, prompt_of, read_examples
from nanoeuler_parts.tuning.sft import SftRun
from common import cpu_model, out_folder, versions
from pipeline import KINDS, unseen
from oracles.torch_engine import Twin, replies
from oracles.torch_peer import Peer, peer_config
from perturb import perturbed
from twin_report import compare
from nanoeuler_parts.files.settings import type_of
from nanoeuler_parts.flags import SHAPE
from nanoeuler_parts.kernels import compile_kernels
from nanoeuler_parts.runs.run import Run
from nanoeuler_parts.runs.start import launch
from nanoeuler_parts.tuning.rows import Examples

STAGES = {"pretrain": "Run", "sft": "SftRun", "dpo": "DpoRun"}
ON_CPU = {"pretrain": Run, "sft": SftRun, "dpo": DpoRun}
SIDES = ("ours", "twin", "control", "lockstep", "cpu")
EVERY = 10                                   # steps, of lockstep


# ---- sides
def run_class(program, stage):
    """The class of a run, of the CPU's program or of the GPU's"""
    return ON_CPU[stage] if program is ne else getattr(on_gpu, STAGES[stage])


def from_near(Model):
    class FromNear(Model):
        def __init__(self, cfg, flat, moments=(), options=None):
            if not moments:                  # a start, and no --resume
                flat[:] = perturbed(flat, np.random.default_rng(1))
            super().__init__(cfg, flat, moments, options)
    return FromNear


def in_lockstep(Model):
    class Lockstep(Model):
        def __init__(self, cfg, flat, moments=(), options=None):
            super().__init__(cfg, flat, moments, options)
            self.twin = Twin(cfg, flat, (), options)
            self.steps = 0
            self.both = False                # does the twin take this step, too?
            self.apart = {}                  # what came of it; empty for steps of ours alone

        def gradient(self, tokens, targets, weight):
            if self.steps % EVERY == 0 and not self.both:        # the first micro-batch of a step
                self.before, m, v = (x.copy() for x in self.buffers())
                self.twin.load(self.before, [m, v])
                self.both = True
            if self.both:
                self.twin.gradient(tokens, targets, weight)
            super().gradient(tokens, targets, weight)

        def update(self, hyper):
            ce, norm = super().update(hyper)
            self.apart = {}
            if self.both:
                twin_ce, twin_norm = self.twin.update(hyper)
                after = self.buffers()[0]
                theirs = self.twin.weights()
                update = np.linalg.norm(theirs - after) / np.linalg.norm(after - self.before)
                self.apart = dict(loss=abs(twin_ce[0] / ce[0] - 1), norm=abs(twin_norm / norm - 1),
                                  update=float(update))
            self.both = False
            self.steps += 1
            return ce, norm
    return Lockstep


# ---- what a side ends with
def gaps(model, run, examples):
    """[is it skill, log pi(chosen) - log pi(rejected)] of each pair that fits."""
    T = model.cfg.seq_len
    end = np.int32(run.tokenizer.specials["</s>"])
    out = []
    for e in examples:
        prompt = run.tokenizer.encode(prompt_of(e))
        rows = [(prompt, np.append(run.tokenizer.encode(e[key]), end))
                for key in ("chosen", "rejected")]
        if max(len(p) + len(r) for p, r in rows) - 1 <= T:
            tokens, targets = Examples(rows, T, model.cfg.n_mtp, 1, 2).batch([0, 1])
            chosen, rejected = model.losses(tokens, targets[0])
            out.append([e.get("source") == "skill", float(rejected - chosen)])
    return out


def question_of(e, key):
    """What is known of a question before it is asked."""
    skill = e.get("source") == "skill"
    kinds = [kind for kind, words in KINDS.items() if re.match(words, e["instruction"])]
    return dict(kind=kinds[0] if skill and kinds else e.get("source"), skill=skill, key=e[key])


def answers(run, examples, key, own=True):
    """A record of each held-out question that fits: kind, key, reply and whether it ended; of
    skill, if `own`, the reply of our decoder as well."""
    T = run.T
    stop = run.tokenizer.specials["</s>"]
    prompts = []
    records = []
    for e in examples:
        prompt = run.tokenizer.encode(prompt_of(e))
        if held_out(e) and len(prompt) + len(run.tokenizer.encode(e[key])) <= T:
            prompts.append(prompt)
            records.append(question_of(e, key))
    net = Peer(peer_config(run.model.cfg)).load_numpy(
        ne.views(run.model.buffers()[0], ne.param_table(run.model.cfg))._asdict())
    net.to("cuda" if hasattr(run.options, "matmul") else "cpu")
    decoder = run.model.decoder()

    def text(ids):
        return run.tokenizer.decode(ids).decode("utf-8", "replace")

    for prompt, record, ids in zip(prompts, records, replies(net, prompts, stop)):
        record["ended"] = ids[-1] == stop
        record["reply"] = text([i for i in ids if i != stop])
        if record["skill"] and own:
            decoder.truncate(0)
            said = ne.generate(decoder, prompt, T + 1 - len(prompt), None,
                               ne.Sampling(temperature=0.0), stop)
            record["own"] = text(list(said))
    return records


def installed():
    found = versions("numba", "llvmlite", "numpy", "torch", "numba-cuda")
    words = [f"{name} {v}" for name, v in found.items() if v]
    return f"Python {sys.version.split()[0]}, " + ", ".join(words)


def origin(args):
    if args.stage == "pretrain":
        return f"the {args.preset} preset"
    s = ne.read_checkpoint(args.base).state
    return (f"{args.base}: {s.step:,} steps of {s.options['data']}, {s.bits_per_byte:.4f} bits a "
            f"byte held out")


def commit_of(args):
    git = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"],
                         capture_output=True, text=True)
    return args.commit or git.stdout.strip()


def held_out_pairs(run, Model, args):
    """path, or "unseen" -> [is it skill, gap before training, gap after] of each pair that fits."""
    model = run.model
    start = Model(model.cfg, ne.read_checkpoint(args.base).flat, (), run.options)
    pairs, _ = read_examples(run.options.data, *run.answers)
    sets = {run.options.data: [e for e in pairs if held_out(e)], "unseen": unseen(args.unseen)}
    out = {}
    for path, some in sets.items():
        both = zip(gaps(start, run, some), gaps(model, run, some))
        out[path] = [[skill, before, after] for (skill, before), (_, after) in both]
    return out


def held_out_answers(run, args):
    """path, or "unseen" -> records of its questions."""
    data = run.options.data
    out = {}
    for path in dict.fromkeys([data, *args.test]):
        keys = run.answers if path == data else ["output"]
        out[path] = answers(run, read_examples(path, *keys)[0], keys[0], own=path == data)
    more = unseen(args.unseen)
    if more:
        out["unseen"] = answers(run, more, "output", own=False)
    return out


def side_of(side, Run, follow, Model, args):
    """A Run that writes a last record of its own: what the side can do, where and how it ran.

    follow: n_steps of each step, as another side's log has them, or None.  Model: ours."""
    class Side(Run):
        def ce_weights(self, tokens, targets):           # at the beginning of a step
            s = self.state
            if follow:
                s.n_steps = follow[s.step] or None
            return super().ce_weights(tokens, targets)

        def log_entry(self, *step):
            record = super().log_entry(*step)
            if side == "lockstep":
                record["apart"] = self.model.apart
            return record

        def go(self):
            super().go()
            if self.state.n_steps and self.state.n_steps <= self.state.step:
                self.finish()                # else Ctrl-C: --resume goes on

        def finish(self):
            seconds = self.elapsed()         # of training, before what follows
            model = self.model
            end = {}
            if args.stage == "dpo" and side != "lockstep":
                end["pairs"] = held_out_pairs(self, Model, args)
            if args.stage != "pretrain" and side != "lockstep":
                end["answers"] = held_out_answers(self, args)
            record = dict(
                step=self.state.step, end=end, start=origin(args), device=model.device(),
                minutes=seconds / 60, parameters=ne.n_params(model.cfg), B=self.B,
                T=model.cfg.seq_len, lr=self.schedule.lr, data=self.options.data,
                machine=cpu_model().name, cores=os.cpu_count(), versions=installed(),
                commit=commit_of(args), command=" ".join(["python", "bench/twin.py", *args.argv]))
            with open(self.log.path, "a", encoding="utf-8") as f:
                f.write(json.dumps(record) + "\n")
    return Side


def run_side(side, chosen, args):
    use_threads(0)                        # one a core that we may use
    torch.set_num_threads(get_num_threads())
    if args.engine == "gpu":
        import nanoeuler_cuda as program
        program.open_device()
    else:
        program = ne
        compile_kernels()
    engine = {"ours": program.Model, "twin": Twin, "cpu": ne.Model,
              "control": from_near(program.Model), "lockstep": in_lockstep(program.Model)}[side]
    follow = None                            # sft and dpo count their steps before they start
    if side != "ours" and args.stage == "pretrain" and not chosen.get("steps"):
        log = read_log(args.folder[0] / "ours.jsonl")
        follow = [r["n_steps"] for r in log if "n_steps" in r]
    if args.resume:
        chosen = {}                          # the checkpoint knows them
    elif follow is not None:
        chosen = {**chosen, "steps": len(follow)}
    start = {}                               # a resumed one is what it was
    if not args.resume:
        start = dict(preset=args.preset) if args.stage == "pretrain" else dict(file=args.base)
    path = args.folder[0] / side
    run = side_of(side, run_class(program, args.stage), follow, program.Model, args)
    launch(run, engine, **start, resume=args.resume, force=True, out=f"{path}.bin", **chosen)
    c = ne.read_checkpoint(f"{path}.bin")
    complete = c.state.n_steps is not None and c.state.n_steps <= c.state.step
    if complete and "end" not in read_log(f"{path}.jsonl")[-1]:   # it was stopped in `finish`
        run(f"{path}.bin", c, run.Options(**c.state.options), engine).finish()


def start_side(side, argv):
    """A process of its own, for its memory and its threads."""
    command = [sys.executable, __file__, *argv, "--half", side]
    if code := subprocess.run(command).returncode:
        raise SystemExit(code)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False,
                                     epilog="every setting of the stage is a flag too")
    parser.add_argument("--stage", choices=list(STAGES), required=True)
    parser.add_argument("--preset", default="big", choices=list(ne.PRESETS), help="to pretrain")
    parser.add_argument("--base", help="checkpoint that sft and dpo start from")
    parser.add_argument("--engine", default="cpu", choices=["cpu", "gpu"], help="ours")
    parser.add_argument("--sides", nargs="+", default=["ours", "twin"], choices=SIDES)
    parser.add_argument("--half", choices=SIDES, help="run this side only")
    parser.add_argument("--resume", action="store_true", help="go on with --half")
    parser.add_argument("--compare", action="store_true", help="run none, compare what is there")
    parser.add_argument("--test", nargs="*", default=[], metavar="FILE",
                        help="more held-out questions, as JSON")
    parser.add_argument("--unseen", type=int, default=0, metavar="N",
                        help="N more held-out questions of skill, made here")
    parser.add_argument("--folder", type=pathlib.Path, nargs="+",
                        help="of the logs (default twin_STAGE)")
    parser.add_argument("--commit", help="of the code, where git does not know")
    parser.add_argument("--out", help="default bench/out/twin_ENGINE_STAGE")
    args, rest = parser.parse_known_args(argv)
    args.argv = argv
    args.folder = args.folder or [pathlib.Path(f"twin_{args.stage}")]
    args.out = args.out or str(out_folder() / f"twin_{args.engine}_{args.stage}")
    if args.stage != "pretrain" and not args.base and not args.compare:
        parser.error("--base: name the checkpoint to start from")
    if len(args.folder) > 1 and not args.compare:
        parser.error("--folder: one of them, but to --compare")
    program = importlib.import_module("nanoeuler_cuda" if args.engine == "gpu" else "nanoeuler")
    settings = argparse.ArgumentParser(allow_abbrev=False, argument_default=argparse.SUPPRESS)
    options = run_class(program, args.stage).Options
    for f in (*fields(options), *SHAPE):
        settings.add_argument("--" + f.name.replace("_", "-"), type=type_of(f))
    before = {name: x for name, x in options.when_missing.items() if name not in ne.MUON_SETTINGS}
    chosen = before | vars(settings.parse_args(rest))
    args.folder[0].mkdir(parents=True, exist_ok=True)
    try:
        unseen(args.unseen)                  # too many of them: now, not after the training
        if args.half:
            run_side(args.half, chosen, args)
        elif not args.compare:
            for side in args.sides:
                print(f"\n# {side}", flush=True)
                start_side(side, argv)
        if not args.half:
            compare(args)
    except ne.UserError as e:
        raise SystemExit(f"twin: {e}") from None


if __name__ == "__main__":
    main()
