"""What nanoGPT's CPU demo reaches in the same minutes, on the same text, measured the same way.

    python bench/nanogpt_demo.py --minutes 3 --data data/shakespeare.txt

nanoGPT's README offers for a computer without a GPU: characters as tokens, 4 layers, 4 heads,
n_embd 128, block_size 64, batch_size 12, 2,000 iterations, dropout 0, torch.compile off; the rest
comes from its config for this text (learning rate 1e-3 to 1e-4, 100 iterations of warm-up, beta2
0.99) and its defaults (weight decay 0.1 on matrices, clip 1.0, float32 on a CPU).  Here is that
model and that recipe, written anew.  Rows: as the README says; the same with the schedule
stretched so that it ends with the minutes; `nanoeuler.py train small` with the same minutes.

Held out: the last 10 % of the bytes, evaluated whole, in disjoint windows, as bits per byte.  The
clock starts before the text is read and ends after that evaluation.  In nanoGPT's favour, its
evaluations on the way (every 250 iterations) are left out and AdamW runs fused.
"""
import argparse
import json
import math
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

from bench_cpu import cpu_ticks, foreign_share
from common import character_start, cpu_model

ROOT = pathlib.Path(__file__).resolve().parent.parent
LAYERS, HEADS, WIDTH, BLOCK, BATCH = 4, 4, 128, 64, 12
ITERATIONS, WARMUP, LR, MIN_LR = 2000, 100, 1e-3, 1e-4


# ---- the model: GPT-2's, without biases
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH, bias=False), Attention()
        self.norm2 = nn.LayerNorm(WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.proj = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.proj(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, WIDTH)        # the output matrix too
        self.positions = nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * LAYERS) if "proj" in name else 0.02)

    def loss(self, idx, targets, reduction="mean"):
        x = self.tokens(idx) + self.positions.weight[:idx.shape[1]]
        logits = F.linear(self.norm(self.blocks(x)), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


# ---- the run
def held_out_split(data, share=0.1):
    """(training text, held-out text): the last bytes, cut where a character starts."""
    cut = character_start(data, int(len(data) * (1 - share)))
    return data[:cut].decode(), data[cut:].decode()


@torch.no_grad()
def tail_nats(model, ids, windows=None):
    """Summed CE of every token of ids after the first, in disjoint windows of BLOCK; with
    `windows`, of so many windows only."""
    whole = (len(ids) - 1) // BLOCK
    inputs = ids[:whole * BLOCK].view(-1, BLOCK)[:windows]
    targets = ids[1:whole * BLOCK + 1].view(-1, BLOCK)[:windows]
    total = 0.0
    for x, y in zip(inputs.split(256), targets.split(256)):
        total += model.loss(x, y, "sum").item()
    if windows is None and whole * BLOCK < len(ids) - 1:
        rest = ids[None, whole * BLOCK:]
        total += model.loss(rest[:, :-1], rest[:, 1:], "sum").item()
    return total


def learning_rate(iteration, progress):
    """Linear warm-up by iterations, then a half cosine over progress in [0, 1]."""
    if iteration < WARMUP:
        return LR * (iteration + 1) / (WARMUP + 1)
    return MIN_LR + 0.5 * (1 + math.cos(math.pi * min(1.0, progress))) * (LR - MIN_LR)


def evaluation_seconds(model, ids):
    """What tail_nats(model, ids) takes, and a tenth for the rest, from a tenth of its windows."""
    windows = len(ids) // BLOCK // 10
    tail_nats(model, ids, windows)           # warms up
    began = time.perf_counter()
    tail_nats(model, ids, windows)
    return 11 * (time.perf_counter() - began)


def progress_of(iteration, now, warm, limit):
    """Share of the schedule after warm-up that is done: by iterations, or with a limit by seconds.
    now: seconds since the start     warm: when warm-up was over, None before that"""
    if not limit:
        return (iteration - WARMUP) / (ITERATIONS - WARMUP)
    return 0.0 if warm is None else (now - warm) / (limit - warm)


def train(path, minutes, seed):
    """minutes None: the README's 2,000 iterations, else as many as fit, evaluation included."""
    start = time.perf_counter()
    torch.manual_seed(seed)
    text, tail = held_out_split(pathlib.Path(path).read_bytes())
    code = {c: i for i, c in enumerate(sorted(set(text + tail)))}
    ids = torch.tensor([code[c] for c in text])
    tail_ids = torch.tensor([code[c] for c in text[-1] + tail])
    model = GPT(len(code))
    groups = [dict(params=[p for p in model.parameters() if p.dim() >= 2], weight_decay=0.1),
              dict(params=[p for p in model.parameters() if p.dim() < 2], weight_decay=0.0)]
    opt = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.99), fused=True)
    limit = None                             # seconds from the start, of training
    if minutes:
        last = evaluation_seconds(model, tail_ids)
        limit = minutes * 60 - last
        if limit <= time.perf_counter() - start:
            raise SystemExit(f"--minutes {minutes:g}: no time is left to train, as the evaluation "
                             f"takes {last:.1f} s; give more")
    offsets = torch.arange(BLOCK)
    warm = None
    iteration = 0
    while True:
        now = time.perf_counter() - start
        if iteration == WARMUP:
            warm = now
        # nanoGPT's own loop ends after iteration number 2,000, which is its 2,001st
        done = now >= limit if limit else iteration > ITERATIONS
        if done:
            break
        for group in opt.param_groups:
            group["lr"] = learning_rate(iteration, progress_of(iteration, now, warm, limit))
        at = torch.randint(len(ids) - BLOCK, (BATCH, 1)) + offsets
        loss = model.loss(ids[at], ids[at + 1])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        iteration += 1
        if iteration % 1000 == 0:
            print(f"  iteration {iteration}, loss {loss.item():.3f}, {now:.0f} s", file=sys.stderr)
    nats = tail_nats(model, tail_ids)
    return {"parameters": sum(p.numel() for p in model.parameters()), "iterations": iteration,
            "tokens_seen": iteration * BATCH * BLOCK, "vocabulary": len(code),
            "val_nats_per_token": nats / (len(tail_ids) - 1),
            "val_bits_per_byte": nats / math.log(2) / len(tail.encode()),
            "minutes": (time.perf_counter() - start) / 60}


def nanoeuler(path, minutes, threads):
    """The same minutes of `nanoeuler.py train small`; the kernels are compiled before the clock."""
    env = {**os.environ, "NUMBA_NUM_THREADS": str(threads)}
    program = [sys.executable, str(ROOT / "nanoeuler.py")]
    subprocess.run([*program, "compile"], env=env, check=True, stdout=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "demo.bin")
        began = time.perf_counter()
        subprocess.run([*program, "train", "small", "--data", path, "--minutes", str(minutes),
                        "--out", str(out)], env=env, check=True, stdout=sys.stderr)
        seconds = time.perf_counter() - began
        text = out.with_suffix(".jsonl").read_text(encoding="utf-8")
        log = [json.loads(line) for line in text.splitlines()]
    sys.path.insert(0, str(ROOT))
    from nanoeuler import n_params, PRESETS
    from nanoeuler_parts.runs.options import TrainOptions
    cfg = PRESETS["small"]
    return {"parameters": n_params(cfg), "iterations": log[-1]["step"],
            "tokens_seen": log[-1]["step"] * TrainOptions().batch,
            "vocabulary": cfg.vocab_size, "val_bits_per_byte": log[-1]["val_bits_per_byte"],
            "minutes": seconds / 60}


def run_rows(args):
    """{name: result}; others_share says how much of the CPU other processes took meanwhile, None
    if that cannot be measured here."""
    todo = {"readme": ("nanoGPT's CPU demo, 2,000 iterations as its README says",
                       lambda: train(args.data, None, args.seed)),
            "stretched": (f"the same, schedule stretched to {args.minutes:g} minutes",
                          lambda: train(args.data, args.minutes, args.seed)),
            "nanoeuler": (f"nanoeuler.py train small, {args.minutes:g} minutes",
                          lambda: nanoeuler(args.data, args.minutes, args.threads))}
    rows = {}
    for key in args.rows:
        name, run = todo[key]
        print(name, file=sys.stderr, flush=True)
        before = cpu_ticks([os.getpid()])
        rows[name] = run()
        rows[name]["others_share"] = foreign_share(before, cpu_ticks([os.getpid()]))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=3.0, help="default 3")
    parser.add_argument("--data", default=str(ROOT / "data" / "shakespeare.txt"))
    parser.add_argument("--threads", type=int, default=2, help="default 2")
    parser.add_argument("--seed", type=int, default=1337, help="nanoGPT's default, 1337")
    parser.add_argument("--rows", nargs="+", default=["readme", "stretched", "nanoeuler"],
                        choices=["readme", "stretched", "nanoeuler"], help="default: all three")
    parser.add_argument("--out", help="write the results to this JSON file too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = run_rows(args)
    print(f"{cpu_model().name}, {args.threads} threads, torch {torch.__version__}\n")
    print("| run | parameters | steps | tokens seen | minutes | CPU taken by others | "
          "held-out bits per byte |\n|---|---:|---:|---:|---:|---:|---:|")
    for name, r in rows.items():
        others = "not measured"
        if r["others_share"] is not None:
            others = f"{100 * r['others_share']:.0f} %"
        print(f"| {name} | {r['parameters']:,} | {r['iterations']:,} | {r['tokens_seen']:,} | "
              f"{r['minutes']:.2f} | {others} | "
              f"{r['val_bits_per_byte']:.3f} |")
    if args.out:
        machine = {"cpu": cpu_model().name, "threads": args.threads, "torch": torch.__version__,
                   "python": platform.python_version(), "load_average": os.getloadavg()}
        pathlib.Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(args.out).write_text(
            json.dumps({"machine": machine, "data": os.path.basename(args.data), "rows": rows},
                       indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
