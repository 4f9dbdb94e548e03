"""Recipes of `train small`, dozens at once: the model in PyTorch with an axis of runs in front.

    python bench/recipe.py one_by_one --out recipes.jsonl    on a GPU: about 1.4 seconds a run
    python bench/recipe.py --table recipes.jsonl             what each recipe reached

A run of `train small` is too small for a GPU, so E of them stand side by side: each tensor has an
axis E in front, each product is a batched one, and a whole step, of forward pass, autograd,
clipping and optimizer, is one CUDA graph.  What differs between the runs of a group (seed, rates,
decay, schedules) are tensors (E,) or (steps, E) that the graph reads; what shapes the graph (batch,
steps, optimizer) is the group's.  Weights and batches begin as those of nanoeuler.py, so that runs
are comparable step by step; products are in bfloat16 as with `--dtype bf16`.

Recipes are chosen on the tenth of the text before its held-out tail, which no run here sees: the
first 81 % are learned, the next 9 measured.  `plans` below are the searches of bench/NOTES.md.
"""
import argparse
import contextlib
import json
import math
import os
import pathlib
import random
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import bpe
import nanoeuler as ne

MATRICES = ne.Params._fields[ne.PACKED]
GAINS = ne.Params._fields[ne.GAINS]
T = 128                                      # tokens of a window


@dataclass(frozen=True)
class Recipe:
    """Settings of a run; those above `seed` are a group's, with one graph."""
    optimizer: str = "muon"
    batch: int = 16                          # sequences
    steps: int = 2400                        # three minutes; 8,000 are ten
    ns_steps: int = 5                        # of Newton-Schulz
    fused: bool = False                      # q, k, v and gate, up orthogonalised as one matrix
    normuon: bool = False                    # rows of an update made equally long (Li et al. 2025)
    muon_heads: bool = False                 # the heads by Muon, too
    vocab: int = 512
    cuts: float = 0.0                        # share of words cut off from their space
    seed: int = 1
    lr: float = 0.02                         # of Muon
    lr_adamw: float = 6e-3                   # and of AdamW; what follows is times this
    lr_wte: float = 1.0
    lr_head: float = 1.0
    lr_gain: float = 1.0
    lr_out: float = 1.0                      # times Muon's, of attn_proj and down
    lr_mlp: float = 1.0                      # of gate_up and down
    weight_decay: float = 0.1                # of Muon's matrices
    decay_adamw: float = 0.1                 # of embedding and heads
    momentum: float = 0.95
    beta1: float = 0.9
    beta2: float = 0.95
    warmup: int = 50                         # steps
    shape: str = "linear"                    # of the decay: linear, or cosine
    decay: float = 0.6                       # the last part of the run, in which rates fall
    floor: float = 0.0                       # to this share
    mtp: float = 0.3                         # weight of the mean loss of heads 1..
    mtp_end: float = -1.0                    # linearly to this; -1: it stays
    mtp_from: float = 0.0                    # parts of the run between which they are trained
    mtp_to: float = 1.0
    mtp_late: float = 1.0                    # and from here on again,
    mtp_every: int = 1                       # and every so many steps,
    mtp_dense: float = 0.0                   # but in this first part at each
    init_wte: float = 1.0                    # times what nanoeuler.py has
    init_trunk: float = 1.0                  # qkv, gate_up
    init_out: float = 1.0                    # attn_proj, down
    init_head: float = 1.0
    theta: float = 1e4                       # of RoPE
    noise: float = 0.0                       # share of input tokens replaced by any other
    dropout: float = 0.0                     # of what a block adds to the residual stream
    ema: float = 0.0                         # memory of the average of the weights that is measured

    def group(self):
        names = [*self.__dataclass_fields__]
        return tuple(getattr(self, name) for name in names[:names.index("seed")])

    def told(self):
        """What is not the default, and the seed."""
        default = asdict(Recipe())
        return {k: v for k, v in asdict(self).items() if k == "seed" or v != default[k]}

    def share(self, step):
        """What the learning rates are multiplied by."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        x = (step - self.warmup) / max(1, self.steps - self.warmup)
        x = max(0.0, (x - (1 - self.decay)) / self.decay)
        y = 1 - x if self.shape == "linear" else 0.5 * (1 + math.cos(math.pi * x))
        return self.floor + (1 - self.floor) * y

    def mtp_at(self, step):
        """The weight of heads 1.. in this step."""
        x = (step + 1) / self.steps
        skipped = (step + 1) % self.mtp_every and x > self.mtp_dense
        trained = self.mtp_from < x <= self.mtp_to or x > self.mtp_late
        if skipped or not trained:
            return 0.0
        end = self.mtp if self.mtp_end < 0 else self.mtp_end
        return self.mtp + (end - self.mtp) * x


@dataclass
class Texts:
    tokens: np.ndarray                       # to learn
    unseen: tuple                            # windows, targets, bytes
    seen: tuple                              # a tenth of what is learned, likewise


def texts(path, vocab, cuts=0.0):
    text, _ = ne.split_text(memoryview(ne.read_text(path)), 0.1)
    train, val = ne.split_text(text, 0.1)
    tokenizer = bpe.train(train, vocab)
    tokens = ne.encode_cut(tokenizer, train, cuts, np.random.default_rng(1))
    tail = tokenizer.encode(val)
    tail = np.append(tokens[-1:], tail)
    unseen = ne.windows(tail, range(0, len(tail) - 1, T), T, P=2)
    seen = ne.windows(tokens, range(0, len(tokens) - T - 1, 10 * T), T, P=2)
    n_bytes = len(train) * (seen[1][0] >= 0).sum() / len(tokens)
    return Texts(tokens, (*unseen, len(val)), (*seen, n_bytes))


def rmsnorm(x, gain, eps):
    """x (E, n, C), gain (E, C)"""
    return F.rms_norm(x, x.shape[-1:], eps=eps) * gain[:, None]


def turn(x, cos, sin):
    """RoPE: x (E, B, heads, T, D), cos and sin (E, 1, 1, T, D / 2)"""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Runs:
    """E runs side by side."""

    def __init__(self, recipes, data, device, low=True):
        self.recipes, self.data, self.device, self.low = recipes, data, device, low
        self.E, self.cfg = len(recipes), replace(ne.PRESETS["small"], vocab_size=recipes[0].vocab)
        table = ne.param_table(self.cfg)
        starts = [self.start(r, table) for r in recipes]
        self.p = {name: self.put(np.stack([getattr(x, name) for x in starts])).requires_grad_()
                  for name, *_ in table}
        self.m, self.v = ({name: torch.zeros_like(x) for name, x in self.p.items()} for _ in "mv")
        self.row_squares = {}                # of normuon
        self.tokens = self.put(data.tokens.astype(np.int64))
        ropes = [ne.rope_table(replace(self.cfg, rope_theta=r.theta), np.float32) for r in recipes]
        self.cos, self.sin = [self.put(np.stack(x))[:, None, None] for x in zip(*ropes)]
        self.at_step = torch.zeros(1, dtype=torch.int64, device=device)
        self.losses = torch.zeros(self.E, device=device)
        self.noisy = any(r.noise for r in recipes)
        self.dropping, self.training = any(r.dropout for r in recipes), True
        self.mean = {name: x.detach().clone() for name, x in self.p.items()}
        self.fixed = {name: self.put(np.array([getattr(r, name) for r in recipes], np.float32))
                      for name in ("weight_decay", "decay_adamw", "momentum", "beta1", "beta2",
                                   "noise", "dropout", "ema")}
        self.planned = {name: self.put(np.stack(rows, 1).astype(np.float32))
                        for name, rows in self.plan().items()}
        self.starts = self.put(np.stack([self.windows(r) for r in recipes], 1))

    def put(self, x):
        return torch.tensor(np.ascontiguousarray(x), device=self.device)

    def start(self, r, table):
        p = ne.views(ne.init_params(self.cfg, r.seed), table)
        for name, factor in (("wte", r.init_wte), ("qkv", r.init_trunk), ("gate_up", r.init_trunk),
                             ("attn_proj", r.init_out), ("down", r.init_out),
                             ("lm_head", r.init_head)):
            getattr(p, name)[...] *= np.float32(factor)
        return p

    def plan(self):
        """What changes from step to step: name -> rows (steps,), one a run."""
        rows = defaultdict(list)
        for r in self.recipes:
            t = np.arange(1, r.steps + 1)
            share = np.array([r.share(step) for step in range(r.steps)])
            rows["lr"].append(r.lr * share)
            rows["lr_attn_proj"].append(r.lr * r.lr_out * share)
            rows["lr_gate_up"].append(r.lr * r.lr_mlp * share)
            rows["lr_down"].append(r.lr * r.lr_out * r.lr_mlp * share)
            rows["lr_adamw"].append(r.lr_adamw * share)
            for name in ("lr_wte", "lr_head", "lr_gain"):
                rows[name].append(r.lr_adamw * getattr(r, name) * share)
            rows["correct1"].append(1 - r.beta1 ** t)
            rows["correct2"].append(1 - r.beta2 ** t)
            rows["mtp"].append(np.array([r.mtp_at(step) for step in range(r.steps)]))
        return rows

    def windows(self, r):
        """Where the windows of each step begin (steps, B), as in a run of nanoeuler.py"""
        batches = ne.Batches(self.data.tokens, T, self.cfg.n_mtp, r.seed)
        entries = [batches.entry(i) for i in range(r.steps * r.batch)]
        starts = [window * T + phase for _, window, phase in entries]
        return np.array(starts).reshape(r.steps, r.batch)

    def now(self, name):
        """(E,) of what is planned"""
        return self.planned[name].index_select(0, self.at_step)[0]

    def rounding(self):
        return torch.autocast(self.device, torch.bfloat16) if self.low else contextlib.nullcontext()

    def dropped(self, x):
        """x (E, n, C) with some of it zero while a run learns, the rest so much larger"""
        if not (self.dropping and self.training):
            return x
        p = self.fixed["dropout"][:, None, None]
        return torch.where(torch.rand(x.shape, device=self.device) < p, 0, x / (1 - p))

    def trunk(self, tokens):
        """tokens (E, B, T) -> (E, B * T, C)"""
        cfg, p, (E, B, T) = self.cfg, self.p, tokens.shape
        H, G, D = cfg.n_head, cfg.n_kv_head, cfg.head_dim
        of_run = cfg.vocab_size * torch.arange(E, device=self.device)[:, None, None]
        x = F.embedding((tokens + of_run).view(E, B * T), p["wte"].view(-1, cfg.n_embd))
        for l in range(cfg.n_layer):
            y = rmsnorm(x, p["attn_norm"][:, l], cfg.norm_eps)
            qkv = torch.bmm(y, p["qkv"][:, l].mT).view(E, B, T, -1, D).transpose(2, 3)
            q, k, v = qkv.split((H, G, G), 2)
            q, k = (turn(z, self.cos, self.sin).to(v.dtype) for z in (q, k))
            q, k, v = (z.reshape(E * B, -1, T, D) for z in (q, k, v))
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            o = o.transpose(1, 2).reshape(E, B * T, H * D)
            x = x + self.dropped(torch.bmm(o, p["attn_proj"][:, l].mT))
            y = rmsnorm(x, p["mlp_norm"][:, l], cfg.norm_eps)
            gate, up = torch.bmm(y, p["gate_up"][:, l].mT).chunk(2, -1)
            x = x + self.dropped(torch.bmm(F.silu(gate) * up, p["down"][:, l].mT))
        return rmsnorm(x, p["final_norm"], cfg.norm_eps)

    def nats(self, x, targets, k):
        """CE of head k (E, B * T)"""
        logits = torch.bmm(x, self.p["lm_head"][:, k].mT).float()
        ce = F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1),
                             ignore_index=-1, reduction="none")
        return ce.view(self.E, -1)

    def step(self):
        P = self.cfg.n_mtp
        starts = self.starts.index_select(0, self.at_step)[0]            # (E, B)
        rows = self.tokens[starts[..., None] + torch.arange(T + P, device=self.device)]
        x = rows[..., :T]
        if self.noisy:
            hit = torch.rand(x.shape, device=self.device) < self.fixed["noise"][:, None, None]
            x = torch.where(hit, torch.randint_like(x, self.cfg.vocab_size), x)
        with self.rounding():
            x = self.trunk(x)
            ce = torch.stack([self.nats(x, rows[..., 1 + k:1 + k + T], k).mean(1)
                              for k in range(P)])
        loss = (ce[0] + self.now("mtp") * ce[1:].mean(0)).sum()          # the runs share nothing
        grads = dict(zip(self.p, torch.autograd.grad(loss, [*self.p.values()]), strict=True))
        self.losses.copy_(ce[0].detach())
        with torch.no_grad():
            self.update(grads)
        self.at_step += 1

    def update(self, grads):
        E, of_muon = self.E, MATRICES if self.recipes[0].optimizer == "muon" else ()
        if of_muon and self.recipes[0].muon_heads:
            of_muon = (*of_muon, "lm_head")
        norm = sum(g.reshape(E, -1).square().sum(1) for g in grads.values()).sqrt()
        scale = (1 / norm).clamp(max=1)
        for name, g in grads.items():
            g = g * scale.view(E, *(1,) * (g.dim() - 1))
            (self.muon if name in of_muon else self.adamw)(name, g)
            keep = self.fixed["ema"].view(E, *(1,) * (g.dim() - 1))
            self.mean[name].lerp_(self.p[name], 1 - keep)

    def adamw(self, name, g):
        p, m, v = self.p[name], self.m[name], self.v[name]

        def wide(x):
            return x.view(self.E, *(1,) * (g.dim() - 1))

        kind = {"wte": "lr_wte", "lm_head": "lr_head"}.get(name, "lr_adamw")
        if name in GAINS:
            kind = "lr_gain"
        lr, beta2 = wide(self.now(kind)), wide(self.fixed["beta2"])
        m.lerp_(g, 1 - wide(self.fixed["beta1"]))
        v.mul_(beta2).add_((1 - beta2) * g * g)
        m_hat, v_hat = m / wide(self.now("correct1")), v / wide(self.now("correct2"))
        if name not in GAINS:
            common = wide(self.now("lr_adamw")) if name == "wte" else lr         # not its own rate
            p.mul_(1 - common * wide(self.fixed["decay_adamw"]))
        p.sub_(lr * m_hat / (v_hat.sqrt() + 1e-8))

    def muon(self, name, g):
        cfg, p, m = self.cfg, self.p[name], self.m[name]

        def wide(x):
            return x.view(self.E, 1, 1, 1)

        HD, GD = cfg.n_head * cfg.head_dim, cfg.n_kv_head * cfg.head_dim
        parts = {"qkv": (HD, GD, GD), "gate_up": (cfg.n_hidden, cfg.n_hidden)}.get(name)
        if parts is None or self.recipes[0].fused:
            parts = (g.shape[2],)
        m.lerp_(g, 1 - wide(self.fixed["momentum"]))
        ahead = g.lerp(m, wide(self.fixed["momentum"]))
        updates = [self.orthogonal(part, (name, i)) for i, part in enumerate(ahead.split(parts, 2))]
        kind = f"lr_{name}"
        lr = wide(self.now(kind if kind in self.planned else "lr"))
        p.mul_(1 - lr * wide(self.fixed["weight_decay"])).sub_(lr * torch.cat(updates, 2))

    def orthogonal(self, x, key):
        rows, columns = x.shape[-2:]
        x = x / (x.square().sum((2, 3), keepdim=True).sqrt() + 1e-7)
        x = x.mT if rows > columns else x
        a, b, c = ne.NEWTON_SCHULZ
        for _ in range(self.recipes[0].ns_steps):
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        x = x.mT if rows > columns else x
        if self.recipes[0].normuon:
            old = self.row_squares.setdefault(key, torch.zeros_like(x[..., :1]))
            size = x.square().sum((2, 3), keepdim=True)
            old.lerp_(x.square().mean(-1, keepdim=True), 0.05)
            x = x / (old.sqrt() + 1e-8)
            x = x * (size / x.square().sum((2, 3), keepdim=True)).sqrt()
        return x * math.sqrt(max(1, rows / columns))

    @torch.no_grad()
    def bits_per_byte(self, windows, targets, n_bytes, k=0):
        """Of head k."""
        self.training = False
        total = torch.zeros(self.E, device=self.device)
        for part, want in zip(self.put(windows).split(128), self.put(targets[k]).split(128),
                              strict=True):
            with self.rounding():
                y = self.trunk(part.long().expand(self.E, *part.shape))
                total += self.nats(y, want.long().expand(self.E, *want.shape), k).sum(1)
        self.training = True
        return (total / math.log(2) / n_bytes).tolist()

    def state(self):
        return [*self.p.values(), *self.m.values(), *self.v.values(), *self.mean.values(),
                self.at_step]

    def go(self):
        """All steps, by one CUDA graph.  Returns bits per byte of what is unseen, of what is
        learned, and of head 1 where it is unseen."""
        steps = self.recipes[0].steps
        if self.device == "cpu":
            for _ in range(steps):
                self.step()
        else:
            before = [x.detach().clone() for x in self.state()]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):           # before a capture, all must have run
                    self.step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.step()
            with torch.no_grad():
                for x, old in zip(self.state(), before, strict=True):
                    x.copy_(old)
                for x in self.row_squares.values():
                    x.zero_()
            for _ in range(steps):
                graph.replay()
        self.p = self.mean
        return [self.bits_per_byte(*self.data.unseen), self.bits_per_byte(*self.data.seen),
                self.bits_per_byte(*self.data.unseen, k=1)]


# ---- the searches
def one_by_one():
    """Two seeds of each change of the default, and AdamW."""
    changes = [{}, *(dict(lr=x) for x in (0.01, 0.015, 0.03, 0.04)),
               *(dict(lr_adamw=x) for x in (3e-3, 1e-2, 1.5e-2)),
               *(dict(lr_wte=x) for x in (1 / 3, 3, 8)), *(dict(lr_head=x) for x in (0.5, 2)),
               *(dict(lr_gain=x) for x in (1 / 6, 3)),
               *(dict(weight_decay=x) for x in (0.0, 0.03, 0.2, 0.3)),
               *(dict(decay_adamw=x) for x in (0.0, 0.3, 1.0)),
               *(dict(decay=x) for x in (0.4, 0.8, 1.0)), dict(decay=1.0, shape="cosine"),
               dict(warmup=1), dict(warmup=150), dict(momentum=0.9), dict(momentum=0.98),
               dict(beta2=0.99), dict(beta1=0.8), dict(beta1=0.95),
               *(dict(mtp=x) for x in (0.0, 0.1, 1.0)), dict(mtp_end=0.0),
               dict(mtp_to=0.3), dict(mtp_to=0.6), dict(mtp_from=0.5), dict(mtp_from=0.8),
               dict(mtp_every=2), dict(mtp_every=4),
               *(dict(init_wte=x) for x in (0.1, 0.4, 3.0, 10.0)),
               dict(init_trunk=0.5), dict(init_trunk=2.0), dict(init_out=0.0), dict(init_out=3.0),
               dict(init_head=0.0), dict(init_head=0.3), dict(theta=100.0), dict(theta=1000.0),
               *(dict(noise=x) for x in (0.02, 0.05, 0.1)),
               *(dict(batch=32, steps=1200, lr=x) for x in (0.02, 0.03, 0.04)),
               *(dict(batch=8, steps=4800, lr=x) for x in (0.01, 0.02)),
               dict(fused=True), dict(ns_steps=3), dict(ns_steps=4), dict(muon_heads=True),
               *(dict(normuon=True, lr=x) for x in (0.01, 0.02, 0.03)),
               *(dict(vocab=v, mtp=x) for v in (1024, 2048) for x in (0.0, 0.3)),
               *(dict(optimizer="adamw", lr_adamw=x, decay_adamw=d, decay=1.0, shape="cosine",
                      floor=0.02) for x in (3e-3, 6e-3, 1e-2) for d in (0.1, 0.3))]
    return [Recipe(**{**x, "seed": seed}) for x in changes for seed in (1, 2)]


def at_random(n=220, steps=2400):
    """All settings drawn at once: a fit of n runs knows each of them as well as n / 4 pairs would
    tell one."""
    draw = random.Random(5).choice

    def one(i):
        mtp, mtp_end = draw([(0.0, -1.0), (0.1, -1.0), (0.3, -1.0), (0.3, 0.0), (0.6, 0.0)])
        return Recipe(
            seed=1 + i % 7, steps=steps, lr=draw([0.01, 0.015, 0.02, 0.03]),
            lr_adamw=draw([4e-3, 6e-3, 1e-2]), lr_wte=draw([1, 3, 8]), lr_head=draw([0.5, 1, 2]),
            init_wte=draw([0.01, 0.03, 0.1, 0.3, 1.0]), init_trunk=draw([0.3, 0.6, 1.0]),
            init_out=draw([0.0, 0.3, 1.0]), init_head=draw([0.0, 0.1, 0.5]),
            weight_decay=draw([0.03, 0.1, 0.2]), decay_adamw=draw([0.0, 0.1, 0.3, 1.0]),
            momentum=draw([0.9, 0.95]), beta1=draw([0.8, 0.9]), beta2=draw([0.95, 0.98]),
            decay=draw([0.6, 0.8, 1.0]), warmup=draw([1, 50, 100]), mtp=mtp, mtp_end=mtp_end)

    return [one(i) for i in range(n)]


def near_the_best():
    """Four seeds each of what the two above recommend, for three minutes and for ten."""
    best = Recipe(lr_wte=3.0, init_wte=0.3, momentum=0.9, decay=1.0, shape="cosine", floor=0.02,
                  warmup=25)
    changes = [{}, dict(lr_wte=1.0), dict(lr_wte=1.0, lr_adamw=4e-3), dict(momentum=0.95),
               dict(init_wte=1.0), dict(init_wte=0.1), dict(init_trunk=0.75), dict(mtp=0.15),
               dict(init_out=0.0, init_head=0.0), dict(shape="linear", floor=0.0),
               dict(optimizer="adamw", init_wte=1.0, lr_wte=1.0, decay_adamw=0.3),
               dict(optimizer="adamw", lr_wte=1.0, decay_adamw=0.3)]
    longer = [{}, dict(lr_wte=1.0), dict(weight_decay=0.2, decay_adamw=0.3)]
    recipes = [replace(best, **x) for x in changes]
    recipes += [replace(best, steps=8000, **x) for x in longer]
    return [replace(r, seed=seed) for r in recipes for seed in (1, 2, 3, 4)]


def cheaper():
    """What saves time a step, and what may help against learning by heart: each beside the best so
    far, four seeds; then all at random."""
    best = Recipe(lr_adamw=4e-3, lr_wte=4.0, weight_decay=0.08, momentum=0.9, decay=1.0, warmup=25,
                  init_wte=0.3, init_trunk=0.75, init_out=0.0, init_head=0.0)
    heads = dict(mtp_to=0.3, mtp_late=0.9)
    changes = [{}, heads, dict(mtp_to=0.3), dict(mtp=0.0), dict(mtp_to=0.5, mtp_late=0.9),
               dict(mtp_to=0.15, mtp_late=0.9), dict(heads, mtp=0.5),
               *(dict(dropout=x) for x in (0.03, 0.1)), *(dict(cuts=x) for x in (0.03, 0.1)),
               *(dict(ema=x, floor=y) for x in (0.99, 0.995) for y in (0.0, 0.1, 0.25)),
               *(dict(lr_out=x) for x in (0.7, 1.4)), *(dict(lr_mlp=x) for x in (0.7, 1.4)),
               dict(ns_steps=3), dict(ns_steps=4),
               *(dict(batch=32, steps=1200, warmup=13, lr=x, lr_adamw=y, momentum=z, beta2=0.9)
                 for x in (0.02, 0.028) for y in (4e-3, 5.6e-3) for z in (0.8, 0.9))]
    longer = [{}, heads, dict(dropout=0.05), dict(dropout=0.1), dict(dropout=0.15),
              dict(cuts=0.1), dict(ema=0.995, floor=0.1)]
    recipes = [replace(best, **x) for x in changes]
    recipes += [replace(best, steps=8000, **x) for x in longer]
    return [replace(r, seed=seed) for r in recipes for seed in (1, 2, 3, 4)]


def at_last():
    """Eight seeds each of what is left to choose, as long as three minutes are when heads rest."""
    best = Recipe(steps=3400, ns_steps=3, lr_adamw=4e-3, lr_wte=4.0, momentum=0.9, decay=1.0,
                  shape="cosine", warmup=25, init_wte=0.3, init_trunk=0.75, init_out=0.0,
                  init_head=0.0, mtp_to=0.3, mtp_late=0.9)
    changes = [{}, dict(shape="linear"), dict(weight_decay=0.08), dict(lr=0.015), dict(lr=0.025),
               dict(lr_adamw=3e-3), dict(momentum=0.92), dict(mtp_to=0.15), dict(ns_steps=5),
               dict(init_trunk=1.0), dict(mtp_to=1.0), dict(steps=9600)]
    return [replace(best, seed=seed, **x) for x in changes for seed in range(1, 9)]


def of_today():
    """What the flags of `train` said before, and what is left to choose of its defaults: eight
    seeds each."""
    before = Recipe(lr_wte=3.0, momentum=0.9, decay=1.0, shape="cosine", warmup=25, init_wte=0.3)
    today = replace(before, ns_steps=3, lr_adamw=4e-3, lr_wte=4.0, init_out=0.0, init_head=0.0,
                    mtp_to=0.3, mtp_late=0.9)
    shorter = dict(init_trunk=0.75)
    both = dict(shorter, shape="linear")
    changes = [{}, shorter, dict(shape="linear"), both, dict(shorter, ns_steps=4),
               dict(both, ns_steps=4), dict(both, ns_steps=5), dict(both, mtp_to=1.0)]
    recipes = [before, *(replace(today, **x) for x in changes)]
    return [replace(x, seed=seed) for x in recipes for seed in range(1, 9)]


def of_peers():
    """The learning rate of AdamW, and of torch.optim.Muon beside AdamW, from GPT-2's start, in as
    many steps as PyTorch takes in three minutes of two Zen 3 cores: three seeds each."""
    start = 0.02 / ne.param_table(ne.PRESETS["small"])[0][2]         # 0.02, over ours
    usual = Recipe(steps=1400, decay=1.0, shape="cosine",
                   **{f"init_{x}": start for x in ("wte", "trunk", "out", "head")})
    adamw = [replace(usual, optimizer="adamw", floor=0.02, lr_adamw=x)
             for x in (2e-3, 4e-3, 6e-3, 1e-2)]
    muon = [replace(usual, fused=True, lr=x, lr_adamw=y) for x in (0.01, 0.02, 0.03, 0.05)
            for y in (3e-3, 6e-3)]
    return [replace(x, seed=seed) for x in (*adamw, *muon) for seed in (1, 2, 3)]


PLANS = {plan.__name__: plan for plan in (one_by_one, at_random, near_the_best, cheaper, at_last,
                                          of_today, of_peers)}


def records(path):
    lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def work(recipes, path, out, most, device):
    """Runs those that `out` does not hold, by group, the most at a time."""
    done = {Recipe(**r["recipe"]) for r in records(out)} if os.path.exists(out) else set()
    groups, data = defaultdict(list), {}
    for r in dict.fromkeys(recipes):
        if r not in done:
            groups[r.group()].append(r)
    for members in groups.values():
        of_text = members[0].vocab, members[0].cuts
        if of_text not in data:
            data[of_text] = texts(path, *of_text)
        for i in range(0, len(members), most):
            began, part = time.perf_counter(), members[i:i + most]
            unseen, seen, second = Runs(part, data[of_text], device).go()
            with open(out, "a", encoding="utf-8") as f:
                for r, x, y, z in zip(part, unseen, seen, second, strict=True):
                    found = dict(recipe=r.told(), unseen=x, seen=y, second=z)
                    f.write(json.dumps(found) + "\n")
            print(f"{len(part)} runs of {members[0].steps} steps, "
                  f"{time.perf_counter() - began:.0f} s: {min(unseen):.4f} to {max(unseen):.4f}",
                  flush=True)


def table(path):
    """Bits per byte of each recipe, named by what is not the default: mean, spread, seeds."""
    rows = defaultdict(list)
    for r in records(path):
        words = [f"{name} {value}" for name, value in r["recipe"].items() if name != "seed"]
        seen = math.nan if r["seen"] is None else r["seen"]
        rows[", ".join(words) or "the default"].append((r["unseen"], seen))
    lines = ["| unseen | spread | seeds | seen | recipe |", "|---:|---:|---:|---:|---|"]
    for name, bits in sorted(rows.items(), key=lambda row: np.mean(row[1], 0)[0]):
        (mean, seen), (spread, _) = np.mean(bits, 0), np.std(bits, 0)
        lines.append(f"| {mean:.4f} | {spread:.4f} | {len(bits)} | {seen:.4f} | {name} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("plan", nargs="?", choices=[*PLANS], help="which search")
    parser.add_argument("--data", default=str(ROOT / "data/shakespeare.txt"), help="a text")
    parser.add_argument("--out", default="recipes.jsonl", help="file to append to")
    parser.add_argument("--most", type=int, default=40, help="runs side by side (default 40)")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu")
    parser.add_argument("--table", metavar="FILE", help="print the table of a file")
    args = parser.parse_args()
    if args.table:
        print(table(args.table))
    elif args.plan:
        work(PLANS[args.plan](), args.data, args.out, args.most, args.device)
    else:
        parser.error("name a plan, or --table FILE")


if __name__ == "__main__":
    main()
