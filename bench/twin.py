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

All settings of the stage are flags.  Every step is logged in FOLDER/SIDE.jsonl; its learning rate
is that of ours, whose schedule --minutes plans as it goes.  --half SIDE runs one side, after Ctrl-C
with --resume the rest of it, and --compare compares what is there (any SIDE.jsonl), so that each
call may be short, and sides whose --steps are given, or of sft and dpo, may run at once.  Writes
OUT.json, OUT.md.  --compare of several folders, made with a --seed each, adds the means.

loss      of the head that is read, per step; of dpo that of the preferences.
exact     held-out questions of skill answered as the key does.  Replies of all sides come from one
          greedy decoder, PyTorch in float32, all questions at once; those of skill also from our
          own, and it is counted how many are the same.
prefers   held-out pairs with log pi(chosen) > log pi(rejected), by each side's own engine.
gap       log pi(chosen) - log pi(rejected), the mean over these pairs, nats.

The file has 30 held-out questions of skill, so that one is more than 3 points: --unseen N makes N
more after their pattern, none of them in the file, all held out by the same hash, each with a wrong
answer for a pair.
"""
import argparse
import functools
import importlib
import importlib.metadata
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
from numba import get_num_threads, set_num_threads

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
import nanoeuler as ne
from bench_cpu import cpu_model
from data.commands import physical_cores
from pipeline import KINDS, unseen
from torch_peer import Peer, make_optimizer, peer_config

STAGES = {"pretrain": "Run", "sft": "SftRun", "dpo": "DpoRun"}
SIDES = ("ours", "twin", "control", "lockstep", "cpu")
LOSS_BAR, POINTS_BAR, END_BAR = 5e-3, 3, 0.5             # nats, points, percent
EVERY = 10                                   # steps, of lockstep


# ---- the twin
def summed_ce(net, tokens, targets):
    """CE summed over each row (B, P), nats.     tokens (B, T), targets (P, B, T), -1: none"""
    (B, T), P = tokens.shape, len(targets)
    ce = F.cross_entropy(net.logits(tokens).flatten(0, 2), targets.permute(1, 2, 0).flatten(),
                         ignore_index=-1, reduction="none")
    return ce.view(B, T, P).sum(1)


class Twin:
    """The peer behind the interface of nanoeuler.Model, so that Run, SftRun and DpoRun train it.

    Options of the GPU program, which have a dtype, put it on the GPU."""
    program, talk = "bench/twin.py", "chat"

    def __init__(self, cfg, flat, moments=(), options=None):
        if cfg.tie_embeddings:
            raise ne.UserError("the twin has no tied embedding; start with a model without one")
        gpu = hasattr(options, "dtype")
        self.dtype = options.dtype if gpu else {4: "f32", 8: "f64"}[flat.itemsize]
        self.cfg, self.place = cfg, torch.device("cuda" if gpu else "cpu")
        self.net = Peer(peer_config(cfg), torch.float64 if self.dtype == "f64" else torch.float32)
        self.load(flat, moments)
        self.net.to(self.place)
        self.cast = functools.partial(torch.autocast, self.place.type, torch.bfloat16,
                                      enabled=self.dtype == "bf16")
        self.summed_ce = torch.compile(summed_ce, fullgraph=True, dynamic=False) if gpu else (
            summed_ce)
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
        """moments (m, v) wait for the next update, which knows the step."""
        self.net.load_numpy(ne.views(flat, ne.param_table(self.cfg))._asdict())
        self.moments = moments

    def restore(self, beta2, correct2):
        """Hands AdamW's moments to the optimizer, which counts steps t: correct2 = 1 - beta2^t."""
        steps = 1e6 if correct2 == 1 else round(math.log(1 - correct2, beta2))
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
        lr, beta1, beta2, eps, decay, clip, _, correct2 = map(float, hyper)
        if self.moments:
            self.restore(beta2, correct2)
        ce, weights = self.ce.cpu().numpy().copy(), list(self.net.parameters())
        norms = torch.stack([torch.linalg.vector_norm(w.grad, dtype=torch.float64)
                             for w in weights])          # in float32 it is 3e-5 off on the CPU
        norm = norms.norm().item()
        self.ce.zero_()
        if math.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(weights, clip, norms.norm())
            for group, wd in zip(self.optimizer.param_groups, (decay, 0.0)):
                group.update(lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=wd)
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

    def flat(self, of):
        """of(weight) of every weight, in the order of the flat buffer."""
        table = self.net.table()
        return torch.cat([of(w).detach().flatten() for name, *_ in ne.param_table(self.cfg)
                          for w in table[name][0]]).cpu().numpy()

    def buffers(self):
        state = self.optimizer.state
        return [self.flat(lambda w: w)] + [
            self.flat(lambda w: state[w].get(k, torch.zeros_like(w)))
            for k in ("exp_avg", "exp_avg_sq")]

    def decoder(self):
        program = sys.modules["nanoeuler_cuda"] if self.place.type == "cuda" else ne
        return program.Decoder(self.cfg, self.flat(lambda w: w))

    def device(self):
        name = torch.cuda.get_device_name() if self.place.type == "cuda" else (
            f"{torch.get_num_threads()} threads")
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
            self.steps, self.both, self.apart = 0, False, {}

        def gradient(self, tokens, targets, weight):
            if self.steps % EVERY == 0 and not self.both:
                self.both, (self.before, *moments) = True, [x.copy() for x in self.buffers()]
                self.twin.load(self.before, moments)
            if self.both:
                self.twin.gradient(tokens, targets, weight)
            super().gradient(tokens, targets, weight)

        def update(self, hyper):
            ce, norm = super().update(hyper)
            if self.both:
                twin_ce, twin_norm = self.twin.update(hyper)
                after, theirs = self.buffers()[0], self.twin.flat(lambda w: w)
                update = np.linalg.norm(theirs - after) / np.linalg.norm(after - self.before)
                self.apart = dict(loss=abs(twin_ce[0] / ce[0] - 1), norm=abs(twin_norm / norm - 1),
                                  update=float(update))
            else:
                self.apart = {}
            self.both, self.steps = False, self.steps + 1
            return ce, norm
    return Lockstep


# ---- what a side ends with
def gaps(model, run, examples):
    """[is it skill, log pi(chosen) - log pi(rejected)] of each pair that fits."""
    T, end = model.cfg.seq_len, np.int32(run.tokenizer.specials["</s>"])
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
    T, place = net.cfg.seq_len, net.cos.device
    ids = np.full((len(prompts), T + 1), -1)
    for row, prompt in zip(ids, prompts):
        row[:len(prompt)] = prompt
    ids, start = torch.from_numpy(ids).to(place), torch.tensor([*map(len, prompts)]).to(place)
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
        mine = t + 1 >= start
        ids[mine, t + 1] = likeliest.argmax(-1)[mine]
        said = (ids == stop) & (torch.arange(T + 1, device=place) >= start[:, None])
        if said.any(1).all():
            break
    out = [row[n:].tolist() for row, n in zip(ids.cpu(), map(len, prompts))]
    return [r[:r.index(stop) + 1] if stop in r else [i for i in r if i >= 0] for r in out]


def answers(run, examples, key, own=True):
    """A record of each held-out question that fits: source, kind, key and reply."""
    encode, stop, T = run.tokenizer.encode, run.tokenizer.specials["</s>"], run.model.cfg.seq_len
    asked = []
    for e in examples:
        if ne.held_out(e) and len(encode(ne.prompt_of(e))) + len(encode(e[key])) <= T:
            kinds = [k for k, words in KINDS.items() if re.match(words, e["instruction"])]
            asked.append((encode(ne.prompt_of(e)), dict(
                kind=kinds[0] if e.get("source") == "skill" and kinds else e.get("source"),
                skill=e.get("source") == "skill", key=e[key])))
    net = Peer(peer_config(run.model.cfg)).load_numpy(
        ne.views(run.model.buffers()[0], ne.param_table(run.model.cfg))._asdict())
    net.to("cuda" if hasattr(run.options, "dtype") else "cpu")
    decoder = run.model.decoder()
    for (prompt, r), ids in zip(asked, replies(net, [p for p, _ in asked], stop)):
        text = lambda ids: run.tokenizer.decode(ids).decode("utf-8", "replace")
        r.update(ended=ids[-1] == stop, reply=text([i for i in ids if i != stop]))
        if r["skill"] and own:
            decoder.tokens = []
            r["own"] = text(list(ne.generate(decoder, prompt, T + 1 - len(prompt), None,
                                             ne.Sampling(temperature=0.0), stop)))
    return [r for _, r in asked]


def versions():
    names = ("numba", "llvmlite", "numpy", "torch", "numba-cuda")
    found = [d.metadata["Name"] for d in importlib.metadata.distributions()]
    return f"Python {sys.version.split()[0]}, " + ", ".join(
        f"{n} {importlib.metadata.version(n)}" for n in names if n in found)


def origin(args):
    if args.stage == "pretrain":
        return f"the {args.preset} preset"
    s = ne.read_checkpoint(args.base).state
    return (f"{args.base}: {s.step:,} steps of {s.options['data']}, {s.bits_per_byte:.4f} bits a "
            f"byte held out")


def side_of(side, Run, follow, Model, args):
    """A Run that takes the schedule of another one's log, and ends with a record of its own."""
    class Side(Run):
        def advance(self):
            s = self.state
            if follow:
                s.n_steps = follow[s.step]
            r = {"n_steps": s.n_steps, **super().advance()}
            return {**r, "apart": self.model.apart} if side == "lockstep" else r

        def go(self):
            super().go()
            if 0 < self.state.n_steps <= self.state.step:
                self.finish()                # else Ctrl-C: --resume goes on

        def finish(self):
            seconds, model, end = self.elapsed(), self.model, {}
            more = unseen(args.unseen)
            if args.stage == "dpo" and side != "lockstep":
                start = ne.read_checkpoint(args.base)
                start = Model(model.cfg, start.flat, (), self.options)
                pairs = ne.read_examples(self.options.data, *self.answers)[0]
                end["pairs"] = {}
                for path, some in ((self.options.data, list(filter(ne.held_out, pairs))),
                                   ("unseen", more)):
                    end["pairs"][path] = [[skill, before, after] for (skill, before), (_, after) in
                                          zip(gaps(start, self, some), gaps(model, self, some))]
            if args.stage != "pretrain" and side != "lockstep":
                end["answers"] = {}
                for path in dict.fromkeys([self.options.data, *args.test]):
                    key = self.answers[0] if path == self.options.data else "output"
                    end["answers"][path] = answers(self, ne.read_examples(path, key)[0], key,
                                                   own=path == self.options.data)
                if more:
                    end["answers"]["unseen"] = answers(self, more, "output", own=False)
            git = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"],
                                 capture_output=True, text=True)
            with open(self.log, "a", encoding="utf-8") as f:
                f.write(json.dumps(dict(
                    step=self.state.step, end=end, start=origin(args), device=model.device(),
                    minutes=seconds / 60, parameters=ne.n_params(model.cfg), B=self.B,
                    T=model.cfg.seq_len, lr=self.lr, data=self.options.data,
                    machine=cpu_model()[0], cores=os.cpu_count(), versions=versions(),
                    commit=args.commit or git.stdout.strip(),
                    command=" ".join(["python", "bench/twin.py", *args.argv]))) + "\n")
    return Side


def run_side(side, chosen, args):
    set_num_threads(min(physical_cores(), get_num_threads()))
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
    start = {} if args.resume else dict(preset=args.preset) if args.stage == "pretrain" else (
        dict(file=args.base))                # a resumed one is what it was
    path, run = args.folder[0] / side, side_of(side, getattr(program, STAGES[args.stage]), follow,
                                            program.Model, args)
    ne.launch(run, engine, **start, resume=args.resume, force=True, out=f"{path}.bin", **chosen)
    c = ne.read_checkpoint(f"{path}.bin")
    if 0 < c.state.n_steps <= c.state.step and "end" not in ne.read_log(f"{path}.jsonl")[-1]:
        engine = program.Model if side == "control" else engine          # stopped in `finish`
        run(f"{path}.bin", c, run.Options(**c.state.options), engine).finish()


# ---- comparison
def difference(ours, theirs):
    """Of two curves: how far apart they are, and where they end (means of the last tenth)."""
    x, y = (np.array([r["loss"] for r in log]) for log in (ours, theirs))
    d, last, n = np.abs(x - y), max(1, len(x) // 10), min(50, len(x))
    return dict(first_50=d[:50].max(), largest=d.max(), at_step=int(d.argmax()) + 1,
                mean=d.mean(), above=int((d > LOSS_BAR).sum()),
                smooth=np.abs(np.convolve(y - x, np.ones(n) / n, "valid")).max(),
                tenths=[float(part.max()) for part in np.array_split(d, 10) if len(part)],
                end=y[-last:].mean(), end_percent=100 * (y[-last:].mean() / x[-last:].mean() - 1),
                norm=max(abs(b["norm"] / a["norm"] - 1) for a, b in zip(ours, theirs)))


def measures(log, end):
    """name -> a number, or [k, n] for k of n."""
    out = {k: v for r in log for k, v in r.items() if k.startswith("val_")}      # the last ones
    for path, pairs in end.get("pairs", {}).items():
        for name, part in ((", unseen", pairs),) if path == "unseen" else (
                ("", pairs), (", skill", [p for p in pairs if p[0]])):
            for k, when in (1, ", before"), (2, ""):
                if part:
                    out[f"prefers{name}{when}"] = [sum(p[k] > 0 for p in part), len(part)]
                    out[f"gap{name}{when}"] = sum(p[k] for p in part) / len(part)
    for path, rows in end.get("answers", {}).items():
        skill = [r for r in rows if r["skill"]]
        exact = lambda part: [sum(r["reply"] == r["key"] for r in part), len(part)]
        out[f"exact, skill, {path}"] = exact(skill)
        for kind in KINDS:
            if part := [r for r in skill if r["kind"] == kind]:
                out[f"exact, {kind}, {path}"] = exact(part)
        out[f"replies that end, {path}"] = [sum(r["ended"] for r in rows), len(rows)]
        if own := [r for r in skill if "own" in r]:
            out[f"our own decoder replies the same, {path}"] = [
                sum(r["own"] == r["reply"] for r in own), len(own)]
    return out


def same_replies(a, b):
    """path -> [replies that are the same, all]"""
    return {path: [sum(x["reply"] == y["reply"] for x, y in zip(rows, b["answers"][path])),
                   len(rows)] for path, rows in a.get("answers", {}).items()}


def read_sides(folder):
    """side -> its log, which ends with a record of its own."""
    sides = {}
    for path in sorted(folder.glob("*.jsonl"), key=lambda p: (p.stem != "ours", p.stem != "twin",
                                                              p.stem)):
        log = ne.read_log(path)
        if not log or "end" not in log[-1]:
            raise SystemExit(f"{path} is not complete; run --half {path.stem} again")
        sides[path.stem] = log
    if "ours" not in sides:
        raise SystemExit(f"{folder} has no ours.jsonl; run --half ours first")
    return sides


def repeated(folders):
    """name -> [(ours, the twin's) of each folder, in points], of what is counted at the end."""
    out = {}
    for sides in map(read_sides, folders):
        ours, twin = (measures(log, log[-1]["end"]) for log in (sides["ours"], sides["twin"]))
        for name, x in ours.items():
            if name.startswith(("exact", "prefers")) and "before" not in name:
                (k, n), (k2, n2) = x, twin[name]
                out.setdefault(name, []).append((100 * k / n, 100 * k2 / n2))
    return out


def compare(args):
    sides = read_sides(args.folder[0])
    ends = {name: log[-1] for name, log in sides.items()}
    steps = {name: [r for r in log if "loss" in r] for name, log in sides.items()}
    ours = steps["ours"]
    for name, log in steps.items():
        if [(r["step"], r["lr"]) for r in log] != [(r["step"], r["lr"]) for r in ours]:
            raise SystemExit(f"{name} has another schedule than ours: {len(log)} and {len(ours)} "
                             f"steps; run --half {name} again")
    r = dict(stage=args.stage, steps=len(ours),
             about={k: ends["ours"][k] for k in ("parameters", "B", "T", "lr", "data", "start",
                                                 "machine", "cores", "versions", "commit")},
             sides={name: dict(device=e["device"], minutes=e["minutes"], commit=e["commit"],
                               command=e["command"], held_out=measures(sides[name], e["end"]))
                    for name, e in ends.items()}, loss_end=difference(ours, ours)["end"])
    for name in sides:
        if name == "lockstep":
            apart = [x["apart"] for x in steps[name] if x["apart"]]
            r["sides"][name].update(same=[x["loss"] for x in steps[name]] == [
                x["loss"] for x in ours], checked=len(apart), apart={k: dict(
                    largest=max(x[k] for x in apart), mean=np.mean([x[k] for x in apart]))
                    for k in apart[0]})
        elif name != "ours":
            r["sides"][name].update(difference(ours, steps[name]), same_replies=same_replies(
                ends["ours"]["end"], ends[name]["end"]))
    if len(args.folder) > 1:
        r["runs"] = repeated(args.folder)
    r["curves"] = {"ours": [round(x["loss"], 6) for x in ours], **{
        f"{name} - ours": [float(f"{y['loss'] - x['loss']:.2g}") for x, y in zip(ours, log)]
        for name, log in steps.items() if name not in ("ours", "lockstep")}}
    write = lambda suffix, text: pathlib.Path(f"{args.out}{suffix}").write_text(text, "utf-8")
    write(".json", re.sub(r"\n {3,}", " ", json.dumps(r, indent=1)) + "\n")
    write(".md", table(r))
    print(table(r))


def table(r):
    a, sides = r["about"], {k: v for k, v in r["sides"].items() if k != "lockstep"}
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
    cell = lambda x: f"{x[0]} of {x[1]}" if isinstance(x, list) else f"{x:.5f}"
    if v := r["sides"].get("lockstep"):
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
    if runs := r.get("runs"):
        out += ["", f"{len(next(iter(runs.values())))} runs of each side, the first of them above, "
                "from the same weights; each pair has a seed, which orders the examples, and cuts, "
                "of its own.  Points, means with their standard errors:", "",
                "| held out | ours | twin | difference |", "|---|---:|---:|---:|"]
        for name, pairs in runs.items():
            ours, twin = np.array(pairs).T
            out.append(f"| {name.replace('_', ' ')} | " + " | ".join(
                f"{x.mean():.1f} ± {error(x):.1f}" for x in (ours, twin)) +
                f" | {(ours - twin).mean():+.1f} ± {error(ours - twin):.1f} |")
    return "\n".join(out + [""] + verdicts(r)) + "\n"


def error(x):
    """The standard error of the mean."""
    return np.std(x, ddof=1) / math.sqrt(len(x))


def verdicts(r):
    """The bars of the twin, one a line."""
    if not (twin := r["sides"].get("twin")):
        return []
    rows, rounds = [], "bf16" in twin["device"]          # each side in its own way
    if not rounds:
        rows = [(f"every step within {LOSS_BAR:g} of the twin's loss", twin["above"] == 0)]
    if not rounds or r["stage"] == "pretrain":
        rows += [(f"the loss of the last tenth within {END_BAR:g} % of the twin's",
                  abs(twin["end_percent"]) <= END_BAR)]
    counted = {name: ([(100 * x[0] / max(1, x[1]), 100 * y[0] / max(1, y[1]))], "")
               for name, x in r["sides"]["ours"]["held_out"].items()
               if name.startswith(("prefers", "exact, skill")) and "before" not in name
               for y in [twin["held_out"][name]]}
    if runs := r.get("runs"):
        counted = {name: (pairs, f", mean of {len(pairs)} runs") for name, pairs in runs.items()}
    for name, (pairs, of) in counted.items():
        points = np.mean([ours - twins for ours, twins in pairs])
        rows.append((f"{name}{of}: within {POINTS_BAR} points, {points:+.1f}",
                     abs(points) <= POINTS_BAR))
    return [f"- {'held' if held else 'missed'}: {text}" for text, held in rows]


def main():
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
    parser.add_argument("--out", help="default bench/results/twin_ENGINE_STAGE")
    args, rest = parser.parse_known_args()
    args.argv, args.folder = sys.argv[1:], args.folder or [pathlib.Path(f"twin_{args.stage}")]
    args.out = args.out or str(ROOT / f"bench/results/twin_{args.engine}_{args.stage}")
    if args.stage != "pretrain" and not args.base and not args.compare:
        parser.error("--base: name the checkpoint to start from")
    if len(args.folder) > 1 and not args.compare:
        parser.error("--folder: one of them, but to --compare")
    program = importlib.import_module("nanoeuler_cuda" if args.engine == "gpu" else "nanoeuler")
    settings = argparse.ArgumentParser(allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for f in (*fields(getattr(program, STAGES[args.stage]).Options), *ne.SHAPE):
        settings.add_argument("--" + f.name.replace("_", "-"), type=f.type)
    chosen = vars(settings.parse_args(rest))
    args.folder[0].mkdir(parents=True, exist_ok=True)
    try:
        if args.half:
            run_side(args.half, chosen, args)
        elif not args.compare:
            for side in args.sides:          # a process each: memory, and threads of their own
                print(f"\n# {side}", flush=True)
                if code := subprocess.run([sys.executable, __file__, *sys.argv[1:], "--half",
                                           side]).returncode:
                    raise SystemExit(code)
    except ne.UserError as e:
        raise SystemExit(f"twin: {e}") from None
    if not args.half:
        compare(args)


if __name__ == "__main__":
    main()
