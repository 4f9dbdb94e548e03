"""The engine and a PyTorch twin, side by side: the same weights, batches, schedule and data.

    python bench/twin.py --stage sft --base nanoeuler.bin [--engine gpu] [--epochs 2 ...]
    python bench/twin.py --stage dpo --base nanoeuler_chat.bin
    python bench/twin.py --stage pretrain --preset big --minutes 9

A stage is run once for each of --sides, by the loops of nanoeuler.py (Run, SftRun, DpoRun):

    ours      nanoeuler.Model, with --engine gpu nanoeuler_cuda.Model
    twin      bench/torch_peer.py: autograd, torch's clipping and fused AdamW; float32, or on the
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
import functools
import importlib
import json
import math
import os
import pathlib
import re
import subprocess
import sys
from dataclasses import fields

import numpy as np
import torch
import torch.nn.functional as F
from numba import get_num_threads

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
import nanoeuler as ne
from common import cpu_model, out_folder, versions
from pipeline import KINDS, unseen
from torch_peer import Peer, make_optimizer, peer_config

STAGES = {"pretrain": "Run", "sft": "SftRun", "dpo": "DpoRun"}
SIDES = ("ours", "twin", "control", "lockstep", "cpu")
LOSS_BAR = 5e-3                              # nats
POINTS_BAR = 3                               # points
END_BAR = 0.5                                # percent
EVERY = 10                                   # steps, of lockstep


# ---- the twin
def summed_ce(net, tokens, targets):
    """CE summed over each row (B, P), nats.     tokens (B, T), targets (P, B, T), -1: none"""
    (B, T), P = tokens.shape, len(targets)
    ce = F.cross_entropy(net.logits(tokens).flatten(0, 2), targets.permute(1, 2, 0).flatten(),
                         ignore_index=-1, reduction="none")
    return ce.view(B, T, P).sum(1)


class Twin:
    """The peer as a nanoeuler.Engine, so that Run, SftRun and DpoRun train it.

    Options of the GPU program, which have a --matmul, put it on the GPU."""
    program = "bench/twin.py"
    talk = "chat"

    @staticmethod
    def ready(options=None):
        """Nothing: run_side has compiled the decoder's kernels."""

    def __init__(self, cfg, flat, moments=(), options=None):
        if cfg.tie_embeddings:
            raise ne.UserError("the twin has no tied embedding; start with a model without one")
        gpu = hasattr(options, "matmul")
        self.dtype = options.dtype if gpu else {4: "f32", 8: "f64"}[flat.itemsize]
        self.cfg = cfg
        self.place = torch.device("cuda" if gpu else "cpu")
        self.net = Peer(peer_config(cfg), torch.float64 if self.dtype == "f64" else torch.float32)
        self.load(flat, moments)
        self.net.to(self.place)
        self.cast = functools.partial(torch.autocast, self.place.type, torch.bfloat16,
                                      enabled=self.dtype == "bf16")
        self.summed_ce = summed_ce
        if gpu:
            self.summed_ce = torch.compile(summed_ce, fullgraph=True, dynamic=False)
        self.optimizer = make_optimizer(self.net)        # two groups: matrices, vectors
        self.ce = torch.zeros(cfg.n_mtp, dtype=torch.float64, device=self.place)

    def put(self, x, dtype=torch.int64):
        return torch.from_numpy(np.ascontiguousarray(x)).to(self.place, dtype)

    def gradient(self, tokens, targets, weight):
        with self.cast():
            ce = self.summed_ce(self.net, self.put(tokens), self.put(targets))
        (ce * self.put(np.asarray(weight), ce.dtype)).sum().backward()
        self.ce += ce.detach().sum(0, dtype=torch.float64)

    def load(self, flat, moments):
        """The optimizer wants to know the step beside the moments (m, v): they wait for the next
        update, whose hyper tells it."""
        self.net.load_numpy(ne.views(flat, ne.param_table(self.cfg))._asdict())
        self.moments = moments

    def restore(self, beta2, correct2):
        """Hands AdamW's moments to the optimizer, which counts steps t: correct2 = 1 - beta2^t."""
        steps = 1e6                          # so late that beta2^t is lost beside 1
        if correct2 != 1:
            steps = round(math.log(1 - correct2, beta2))
        tables = [ne.views(x, ne.param_table(self.cfg))._asdict() for x in self.moments]
        for name, (weights, _) in self.net.table().items():
            m, v = (self.put(x[name], weights[0].dtype).view(-1, *weights[0].shape)
                    for x in tables)
            for i, w in enumerate(weights):
                self.optimizer.state[w] = dict(
                    step=torch.tensor(steps - 1.0, device=self.place), exp_avg=m[i].clone(),
                    exp_avg_sq=v[i].clone())
        self.moments = ()

    def update(self, hyper):
        if self.moments:
            self.restore(hyper.beta2, hyper.correct2)
        ce = self.ce.cpu().numpy().copy()
        weights = list(self.net.parameters())
        norms = torch.stack([torch.linalg.vector_norm(w.grad, dtype=torch.float64)
                             for w in weights])          # in float32 it is 3e-5 off on the CPU
        norm = norms.norm().item()
        self.ce.zero_()
        if math.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(weights, hyper.clip, norms.norm())
            for group, wd in zip(self.optimizer.param_groups, (hyper.weight_decay, 0.0)):
                group.update(lr=hyper.lr, betas=(hyper.beta1, hyper.beta2), eps=hyper.eps,
                             weight_decay=wd)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return ce, norm

    @torch.no_grad()
    def losses(self, tokens, targets):
        with self.cast():
            logits = F.linear(self.net.trunk(self.put(tokens)),
                              self.net.lm_head.weight[:self.cfg.vocab_size])     # head 0
            ce = F.cross_entropy(logits.flatten(0, 1), self.put(targets).flatten(),
                                 ignore_index=-1, reduction="none")
        return ce.view(tokens.shape).sum(1, dtype=torch.float64).cpu().numpy()

    def micro_batch(self, B, asked=0):
        return asked or B

    def gathered(self, of):
        """(N,) of(weight) of every weight, in the order of the flat buffer."""
        table = self.net.table()
        parts = []
        for name, *_ in ne.param_table(self.cfg):
            weights, _ = table[name]
            parts += [of(w).detach().flatten() for w in weights]
        return torch.cat(parts).cpu().numpy()

    def weights(self):
        return self.gathered(lambda w: w)

    def buffers(self):
        if self.moments:                     # no update has handed them over yet
            return [self.weights(), *self.moments]
        state = self.optimizer.state

        def moment(name):                    # zeros before the first step
            return self.gathered(lambda w: state[w].get(name, torch.zeros_like(w)))

        return [self.weights(), moment("exp_avg"), moment("exp_avg_sq")]

    def decoder(self):
        program = sys.modules["nanoeuler_cuda"] if self.place.type == "cuda" else ne
        return program.Decoder(self.cfg, self.weights())

    def device(self):
        name = f"{torch.get_num_threads()} threads"
        if self.place.type == "cuda":
            name = torch.cuda.get_device_name()
        return f"PyTorch {torch.__version__}, {name}, {self.dtype}"

    def first_bad_tensor(self):
        for name, w in self.net.named_parameters():
            for what, x in (("parameter", w), ("gradient", w.grad)):
                if x is not None and not x.isfinite().all():
                    return f"{what} {name} is not finite"
        return "the loss is not finite"


def perturbed(Model):
    class Perturbed(Model):
        def __init__(self, cfg, flat, moments=(), options=None):
            if not moments:                  # a start, and no --resume
                noise = np.random.default_rng(1).standard_normal(flat.size)
                flat[:] = flat * (1 + 1e-7 * noise)
            super().__init__(cfg, flat, moments, options)
    return Perturbed


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
        prompt = run.tokenizer.encode(ne.prompt_of(e))
        rows = [(prompt, np.append(run.tokenizer.encode(e[key]), end))
                for key in ("chosen", "rejected")]
        if max(len(p) + len(r) for p, r in rows) - 1 <= T:
            tokens, targets = ne.Examples(rows, T, model.cfg.n_mtp, 1, 2).batch([0, 1])
            chosen, rejected = model.losses(tokens, targets[0])
            out.append([e.get("source") == "skill", float(rejected - chosen)])
    return out


@torch.inference_mode()
def replies(net, prompts, stop):
    """The likeliest continuation of each prompt (ids), up to and with `stop`, or to a full context.

    Position t of every row is read at once, a token of the prompt or the row's own: no padding."""
    T = net.cfg.seq_len
    place = net.cos.device
    ids = torch.full((len(prompts), T + 1), -1)          # -1: nothing is there yet
    for row, prompt in zip(ids, prompts):
        row[:len(prompt)] = torch.as_tensor(prompt)
    ids = ids.to(place)
    start = torch.tensor([len(prompt) for prompt in prompts], device=place)
    shape = len(prompts), net.cfg.n_kv_head, T, net.cfg.head_dim
    cache = [[torch.zeros(shape, dtype=net.cos.dtype, device=place) for _ in "kv"]
             for _ in net.blocks]
    for t in range(T):
        x = net.wte(ids[:, t:t + 1])
        for block, (kc, vc) in zip(net.blocks, cache):
            q, k, v = block.attn.qkv_heads(block.attn_norm(x), net.cos[t:t + 1], net.sin[t:t + 1])
            kc[:, :, t], vc[:, :, t] = k[:, :, 0], v[:, :, 0]
            q = q[:, :, 0].unflatten(1, (net.cfg.n_kv_head, -1)) / math.sqrt(net.cfg.head_dim)
            y = (q @ kc[:, :, :t + 1].mT).softmax(-1) @ vc[:, :, :t + 1]         # no copy of k, v
            x = x + block.attn.proj(y.flatten(1)[:, None])
            x = x + block.mlp(block.mlp_norm(x))
        likeliest = F.linear(net.final_norm(x[:, 0]), net.lm_head.weight[:net.cfg.vocab_size])
        own = t + 1 >= start                 # rows that are past their prompt
        ids[own, t + 1] = likeliest.argmax(-1)[own]
        ended = (ids == stop) & (torch.arange(T + 1, device=place) >= start[:, None])
        if ended.any(1).all():
            break
    out = []
    for row, prompt in zip(ids.tolist(), prompts):
        reply = row[len(prompt):]
        if stop in reply:
            out.append(reply[:reply.index(stop) + 1])
        else:
            out.append([i for i in reply if i >= 0])
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
        prompt = run.tokenizer.encode(ne.prompt_of(e))
        if ne.held_out(e) and len(prompt) + len(run.tokenizer.encode(e[key])) <= T:
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
    pairs, _ = ne.read_examples(run.options.data, *run.answers)
    sets = {run.options.data: [e for e in pairs if ne.held_out(e)], "unseen": unseen(args.unseen)}
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
        key = run.answers[0] if path == data else "output"
        out[path] = answers(run, ne.read_examples(path, key)[0], key, own=path == data)
    more = unseen(args.unseen)
    if more:
        out["unseen"] = answers(run, more, "output", own=False)
    return out


def side_of(side, Run, follow, Model, args):
    """A Run that writes a last record of its own: what the side can do, where and how it ran.

    follow: n_steps of each step, as another side's log has them, or None.  Model: ours."""
    class Side(Run):
        def advance(self):
            s = self.state
            if follow:
                s.n_steps = follow[s.step]
            record = {"n_steps": s.n_steps, **super().advance()}
            if side == "lockstep":
                record["apart"] = self.model.apart
            return record

        def go(self):
            super().go()
            if 0 < self.state.n_steps <= self.state.step:
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
                T=model.cfg.seq_len, lr=self.lr, data=self.options.data,
                machine=cpu_model().name, cores=os.cpu_count(), versions=installed(),
                commit=commit_of(args), command=" ".join(["python", "bench/twin.py", *args.argv]))
            with open(self.log, "a", encoding="utf-8") as f:
                f.write(json.dumps(record) + "\n")
    return Side


def run_side(side, chosen, args):
    ne.use_threads(0)                        # one a core that we may use
    torch.set_num_threads(get_num_threads())
    if args.engine == "gpu":
        import nanoeuler_cuda as program
        program.open_device()
    else:
        program = ne
        ne.compile_kernels()
    engine = {"ours": program.Model, "twin": Twin, "cpu": ne.Model,
              "control": perturbed(program.Model), "lockstep": in_lockstep(program.Model)}[side]
    follow = None                            # sft and dpo count their steps before they start
    if side != "ours" and args.stage == "pretrain" and not chosen.get("steps"):
        log = ne.read_log(args.folder[0] / "ours.jsonl")
        follow = [r["n_steps"] for r in log if "n_steps" in r]
    if args.resume:
        chosen = {}                          # the checkpoint knows them
    elif follow is not None:
        chosen = {**chosen, "steps": len(follow)}
    start = {}                               # a resumed one is what it was
    if not args.resume:
        start = dict(preset=args.preset) if args.stage == "pretrain" else dict(file=args.base)
    path = args.folder[0] / side
    run = side_of(side, getattr(program, STAGES[args.stage]), follow, program.Model, args)
    ne.launch(run, engine, **start, resume=args.resume, force=True, out=f"{path}.bin", **chosen)
    c = ne.read_checkpoint(f"{path}.bin")
    complete = 0 < c.state.n_steps <= c.state.step
    if complete and "end" not in ne.read_log(f"{path}.jsonl")[-1]:   # it was stopped in `finish`
        run(f"{path}.bin", c, run.Options(**c.state.options), engine).finish()


# ---- comparison
def difference(ours, theirs):
    """Of two curves: how far apart they are, and where they end (means of the last tenth)."""
    x = np.array([r["loss"] for r in ours])
    y = np.array([r["loss"] for r in theirs])
    d = np.abs(x - y)
    last = max(1, len(x) // 10)
    n = min(50, len(x))
    return dict(first_50=d[:50].max(), largest=d.max(), at_step=int(d.argmax()) + 1,
                mean=d.mean(), above=int((d > LOSS_BAR).sum()),
                smooth=np.abs(np.convolve(y - x, np.ones(n) / n, "valid")).max(),
                tenths=[float(part.max()) for part in np.array_split(d, 10) if len(part)],
                end=y[-last:].mean(), end_percent=100 * (y[-last:].mean() / x[-last:].mean() - 1),
                norm=max(abs(b["norm"] / a["norm"] - 1) for a, b in zip(ours, theirs)))


def pair_measures(name, pairs):
    """Of pairs [is it skill, gap before training, gap after]; none of an empty list."""
    out = {}
    for column, when in ((1, ", before"), (2, "")):
        if pairs:
            gap = [pair[column] for pair in pairs]
            out[f"prefers{name}{when}"] = [sum(x > 0 for x in gap), len(gap)]
            out[f"gap{name}{when}"] = sum(gap) / len(gap)
    return out


def answer_measures(path, records):
    def exact(part):
        return [sum(r["reply"] == r["key"] for r in part), len(part)]

    skill = [r for r in records if r["skill"]]
    out = {f"exact, skill, {path}": exact(skill)}
    for kind in KINDS:
        of_kind = [r for r in skill if r["kind"] == kind]
        if of_kind:
            out[f"exact, {kind}, {path}"] = exact(of_kind)
    out[f"replies that end, {path}"] = [sum(r["ended"] for r in records), len(records)]
    asked_twice = [r for r in skill if "own" in r]
    if asked_twice:
        out[f"our own decoder replies the same, {path}"] = [
            sum(r["own"] == r["reply"] for r in asked_twice), len(asked_twice)]
    return out


def measures(log):
    """name -> a number, or [k, n] for k of n, of what is held out."""
    out = {}
    for record in log:
        for name, value in record.items():
            if name.startswith("val_"):
                out[name] = value            # the last of each stays
    end = log[-1]["end"]
    for path, pairs in end.get("pairs", {}).items():
        if path == "unseen":                 # all of them are of skill
            out |= pair_measures(", unseen", pairs)
        else:
            out |= pair_measures("", pairs)
            out |= pair_measures(", skill", [pair for pair in pairs if pair[0]])
    for path, records in end.get("answers", {}).items():
        out |= answer_measures(path, records)
    return out


def same_replies(a, b):
    """path -> [replies that are the same, all], of what two sides end with"""
    out = {}
    for path, records in a.get("answers", {}).items():
        pairs = list(zip(records, b["answers"][path]))
        out[path] = [sum(x["reply"] == y["reply"] for x, y in pairs), len(pairs)]
    return out


def asked(log):
    """(pairs or answers, path) -> how many there are, of what a side ends with"""
    return {(what, path): len(rows) for what, sets in log[-1]["end"].items()
            for path, rows in sets.items()}


def read_sides(folder):
    """side -> its log, which ends with a record of its own; ours first, then the twin."""
    order = {"ours": 0, "twin": 1}
    sides = {}
    for path in sorted(folder.glob("*.jsonl"), key=lambda p: (order.get(p.stem, 2), p.stem)):
        log = ne.read_log(path)
        ne.need(log and "end" in log[-1],
                f"{path} is not complete; run --half {path.stem} again")
        sides[path.stem] = log
    ne.need("ours" in sides, f"{folder} has no ours.jsonl; run --half ours first")
    for side, log in sides.items():
        if side != "lockstep":               # which is asked nothing
            differ = asked(log).items() ^ asked(sides["ours"]).items()
            names = sorted({f"{path} ({what})" for (what, path), _ in differ})
            ne.need(not names, f"{folder}: {side} and ours were not asked the same of "
                    f"{', '.join(names)}; run --half {side} with ours' --data, --test and --unseen")
    return sides


def percent(counted):
    k, n = counted
    return 100 * k / max(1, n)               # no such question: no point lost


def is_counted(name):
    """Whether a measure is [k, n], of what a side can do after training."""
    return name.startswith(("exact", "prefers")) and "before" not in name


def repeated(folders):
    """name -> [(ours, the twin's) of each folder, in points], of what is counted at the end."""
    out = {}
    for folder in folders:
        sides = read_sides(folder)
        ne.need("twin" in sides, f"{folder} has no twin.jsonl; run --half twin first")
        ours = {name: x for name, x in measures(sides["ours"]).items() if is_counted(name)}
        twin = measures(sides["twin"])
        ne.need(not out or ours.keys() == out.keys(), f"{folder} and {folders[0]} were not asked "
                f"the same; run both with the same --data, --test and --unseen")
        for name, x in ours.items():
            out.setdefault(name, []).append((percent(x), percent(twin[name])))
    return out


def lockstep_figures(ours, steps):
    """Of the steps that the twin took as well: how far apart one step takes them."""
    apart = [record["apart"] for record in steps if record["apart"]]
    return dict(same=[r["loss"] for r in steps] == [r["loss"] for r in ours], checked=len(apart),
                apart={name: dict(largest=max(x[name] for x in apart),
                                  mean=np.mean([x[name] for x in apart]))
                       for name in apart[0]})


def compare(args):
    sides = read_sides(args.folder[0])
    ends = {name: log[-1] for name, log in sides.items()}
    steps = {name: [r for r in log if "loss" in r] for name, log in sides.items()}
    ours = steps["ours"]
    for name, log in steps.items():
        same = [(r["step"], r["lr"]) for r in log] == [(r["step"], r["lr"]) for r in ours]
        ne.need(same, f"{name} has another schedule than ours: {len(log)} and {len(ours)} steps; "
                f"run --half {name} again")
    about = {k: ends["ours"][k] for k in ("parameters", "B", "T", "lr", "data", "start",
                                          "machine", "cores", "versions", "commit")}
    r = dict(stage=args.stage, steps=len(ours), about=about, sides={},
             loss_end=difference(ours, ours)["end"])
    curves = {"ours": [round(x["loss"], 6) for x in ours]}
    for name, end in ends.items():
        side = dict(device=end["device"], minutes=end["minutes"], commit=end["commit"],
                    command=end["command"], held_out=measures(sides[name]))
        if name == "lockstep":
            side |= lockstep_figures(ours, steps[name])
        elif name != "ours":
            side |= difference(ours, steps[name])
            side["same_replies"] = same_replies(ends["ours"]["end"], end["end"])
            curves[f"{name} - ours"] = [float(f"{y['loss'] - x['loss']:.2g}")
                                        for x, y in zip(ours, steps[name])]
        r["sides"][name] = side
    if len(args.folder) > 1:
        r["runs"] = repeated(args.folder)
    r["curves"] = curves
    text = re.sub(r"\n {3,}", " ", json.dumps(r, indent=1))     # deeper levels on one line
    pathlib.Path(f"{args.out}.json").write_text(text + "\n", "utf-8")
    pathlib.Path(f"{args.out}.md").write_text(table(r), "utf-8")
    print(table(r))


def cell(x):
    return f"{x[0]} of {x[1]}" if isinstance(x, list) else f"{x:.5f}"


def table(r):
    a = r["about"]
    sides = {k: v for k, v in r["sides"].items() if k != "lockstep"}
    others = {k: v for k, v in sides.items() if k != "ours"}
    out = [f"## {r['stage']}: the engine beside its PyTorch twin", "",
           f"{a['parameters']:,} parameters, {r['steps']:,} steps of {a['B']} x {a['T']} tokens, "
           f"lr {a['lr']:.2g}, {a['data']}, from {a['start']}.",
           f"{a['machine']}, {a['cores']} cores; {a['versions']}; commit {a['commit']}.", ""]
    out += [f"- {name}: {v['device']}; `{v['command']}`" for name, v in r["sides"].items()]
    out += ["", "| loss, difference from ours | first 50 steps | all | at step | mean | "
            f"steps above {LOSS_BAR:g} | means of 50 steps | gradient norm, relative |",
            "|---|" + "---:|" * 7]
    for name, v in others.items():
        out.append(f"| {name} | {v['first_50']:.1e} | {v['largest']:.1e} | {v['at_step']} | "
                   f"{v['mean']:.1e} | {v['above']} | {v['smooth']:.1e} | {v['norm']:.1e} |")
    out += ["", "Largest difference in each tenth of the steps:", ""]
    out += [f"- {name}: " + ", ".join(f"{x:.0e}" for x in v["tenths"])
            for name, v in others.items()]
    out += ["", f"Loss over the last tenth of the steps: ours {r['loss_end']:.4f}; " + ", ".join(
        f"{name} {v['end']:.4f} ({v['end_percent']:+.3f} %)" for name, v in others.items()) + "."]
    v = r["sides"].get("lockstep")
    if v:
        run = "ours, bit for bit" if v["same"] else "a run that is not ours"
        out += ["", f"One step of the twin from the weights and moments of {run}, {v['checked']} "
                "times; differences relative to ours, largest and mean:", ""]
        out += [f"- {k}: {x['largest']:.1e}, {x['mean']:.1e}" for k, x in v["apart"].items()]
    out += ["", "| held out | " + " | ".join(sides) + " |", "|---|" + "---:|" * len(sides)]
    for name in r["sides"]["ours"]["held_out"]:
        row = [v["held_out"].get(name) for v in sides.values()]
        out.append(f"| {name.removeprefix('val_').replace('_', ' ')} | " + " | ".join(
            "" if x is None else cell(x) for x in row) + " |")
    for name, v in others.items():
        for path, same in v["same_replies"].items():
            out += ["", f"{name} gives the reply that ours gives to {cell(same)} questions of "
                    f"{path}."]
    runs = r.get("runs")
    if runs:
        out += ["", f"{len(next(iter(runs.values())))} runs of each side, the first of them above, "
                "from the same weights; each pair has a seed, which orders the examples, and cuts, "
                "of its own.  Points, means with their standard errors:", "",
                "| held out | ours | twin | difference |", "|---|---:|---:|---:|"]
        for name, pairs in runs.items():
            ours, twin = np.array(pairs).T
            apart = ours - twin
            out.append(f"| {name.replace('_', ' ')} | "
                       f"{ours.mean():.1f} ± {standard_error(ours):.1f} | "
                       f"{twin.mean():.1f} ± {standard_error(twin):.1f} | "
                       f"{apart.mean():+.1f} ± {standard_error(apart):.1f} |")
    return "\n".join(out + [""] + verdicts(r)) + "\n"


def standard_error(x):
    """Of the mean."""
    return np.std(x, ddof=1) / math.sqrt(len(x))


def verdicts(r):
    """The bars of the twin, one a line."""
    twin = r["sides"].get("twin")
    if not twin:
        return []
    bf16 = "bf16" in twin["device"]          # each side rounds in its own way
    bars = []                                # (what, is it held?)
    if not bf16:
        bars.append((f"every step within {LOSS_BAR:g} of the twin's loss", twin["above"] == 0))
    if not bf16 or r["stage"] == "pretrain":
        bars.append((f"the loss of the last tenth within {END_BAR:g} % of the twin's",
                     abs(twin["end_percent"]) <= END_BAR))
    points = {}                              # name -> [(ours, the twin's)] of each run
    of = ""
    if r.get("runs"):
        points = r["runs"]
        of = f", mean of {len(next(iter(points.values())))} runs"
    else:
        for name, x in r["sides"]["ours"]["held_out"].items():
            if is_counted(name) and name.startswith(("prefers", "exact, skill")):
                points[name] = [(percent(x), percent(twin["held_out"][name]))]
    for name, pairs in points.items():
        apart = np.mean([ours - twins for ours, twins in pairs])
        bars.append((f"{name}{of}: within {POINTS_BAR} points, {apart:+.1f}",
                     abs(apart) <= POINTS_BAR))
    return [f"- {'held' if held else 'missed'}: {what}" for what, held in bars]


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
    options = getattr(program, STAGES[args.stage]).Options
    for f in (*fields(options), *ne.SHAPE):
        settings.add_argument("--" + f.name.replace("_", "-"), type=f.type)
    before = {name: x for name, x in options.unsaid.items() if name not in ne.OF_MUON}
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
