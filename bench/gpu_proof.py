"""The GPU engine against the CPU engine, and what its memory and first start cost: one GPU needed.

    python bench/gpu_proof.py [--only parity bf16 attention start]

Writes bench/out/gpu_proof.json and .md; parts measured before, on the same machine, stay there.

parity     The small preset, trained on Shakespeare for 200 steps from one set of weights with the
           same batches on both, learning rate 3e-3, in float64 and float32.  Beside it the control:
           the CPU against itself in float32 with weights changed by 1e-7 of their size, because
           training amplifies any rounding.
bf16       The base preset on Shakespeare for 500 steps of 8 x 512 tokens, in bfloat16 and float32,
           on the same batches, with the warm-up that `t` has; each type again from weights changed
           by 1e-7 of their size, so that what the type does to the loss stands beside what any
           rounding does.
attention  A training step of the base preset in float32 with FlashAttention and with T x T matrices
           in memory, both through the same matmul: milliseconds (median of 5), measured and
           predicted memory.
start      Seconds until the first step of the base preset is done, on an empty and on a full cache.
"""
import argparse
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests")]
import nanoeuler as ne
import nanoeuler_cuda as nc
from nanoeuler_parts.gpu_memory import memory_table, needs_of
from nanoeuler_parts.tools import on_gpu
from nanoeuler_parts.files.texts import read_text, split_text
from oracles.naive_attention import NaiveModel
from common import out_folder, versions
from numba import cuda
from perturb import perturbed

STEPS, LR = 200, 3e-3

def train(model, batches, steps=STEPS, most=LR, B=16, warmup=50):
    """The loss of head 0 at each step."""
    losses = []
    for step in range(steps):
        tokens, targets = batches.take(step * B, B)
        model.gradient(tokens, targets, ne.loss_weights(targets, 0.3))
        lr = ne.lr_at(step, steps, most, warmup, 0.1)
        hyper = ne.hyper_at(step + 1, lr, beta1=0.9, beta2=0.95, weight_decay=0.1, clip=1.0)
        ce, _ = model.update(hyper)
        losses.append(ce[0] / (targets[0] >= 0).sum())
    return np.array(losses)

def parity():
    cfg = ne.PRESETS["small"]
    text, _ = split_text(read_text(str(ROOT / "data/shakespeare.txt")), 0.1)
    tokenizer = ne.bpe.train(bytes(text), cfg.vocab_size)
    tokens = tokenizer.encode(bytes(text))
    flat = ne.init_params(cfg, 1)
    noisy = perturbed(flat, np.random.default_rng(1))

    def aligned(x, dtype):
        out = ne.aligned(x.shape, dtype)
        out[:] = x
        return out

    def run(engine, weights, dtype, **options):
        model = engine(cfg, aligned(weights, dtype), **options)
        return train(model, ne.Batches(tokens, cfg.seq_len, cfg.n_mtp, 1))

    cpu = {name: run(ne.Model, flat, nc.DTYPES[name]) for name in ("f64", "f32")}
    gpu = {name: run(nc.Model, flat, nc.computing(d), dtype=name) for name, d in nc.DTYPES.items()}
    control = run(ne.Model, noisy, np.float32)
    pairs = {"float64": (gpu["f64"], cpu["f64"]),
             "float32": (gpu["f32"], cpu["f32"]),
             "control: the CPU in float32, weights * (1 + 1e-7)": (control, cpu["f32"]),
             "bfloat16 against float32": (gpu["bf16"], cpu["f32"])}
    rows = []
    for name, (x, y) in pairs.items():
        difference = np.abs(x - y)
        rows.append(dict(what=name, first_50=float(difference[:50].max()),
                         all_200=float(difference.max())))
    return dict(rows=rows, last_loss_cpu=float(cpu["f32"][-1]), last_loss_gpu=float(gpu["f32"][-1]))

def bf16():
    """type -> for each run the mean losses of 50 steps each: 12 runs in bfloat16, two in float32.

    The weights of a run are those of the run before, each moved by 1e-7 of its size: a walk, so
    that runs in the same place of both lists start from the same weights."""
    cfg = ne.PRESETS["base"]
    text = read_text(str(ROOT / "data/shakespeare.txt"))
    tokenizer = ne.bpe.train(bytes(text), cfg.vocab_size)
    batches = ne.Batches(tokenizer.encode(bytes(text)), cfg.seq_len, cfg.n_mtp, 1)
    flat = ne.init_params(cfg, 1)
    noise = np.random.default_rng(1)
    out = {"bf16": [], "f32": []}
    for run in range(12):
        for name in ("bf16", "f32") if run < 2 else ("bf16",):
            losses = train(nc.Model(cfg, flat, dtype=name), batches, 500, 6e-4, 8,
                           on_gpu.Run.Options.warmup)
            out[name].append(losses.reshape(-1, 50).mean(1).tolist())
            print(name, run, out[name][-1], flush=True)
            gc.collect()
        flat = perturbed(flat, noise)
    return out

class StepCost(NamedTuple):
    ms: float                                # median
    measured: int                            # bytes that the driver misses
    predicted: int                           # bytes of memory_table, but for samples

def step_time(B, T, Model):
    """StepCost of a float32 step of the base preset."""
    cfg = replace(ne.PRESETS["base"], seq_len=T)
    rng = np.random.default_rng(0)
    nc.open_device()
    before, _ = cuda.current_context().get_memory_info()
    model = Model(cfg, ne.init_params(cfg, 1))
    tokens = rng.integers(0, cfg.vocab_size, (B, T), dtype=np.int32)
    targets = rng.integers(0, cfg.vocab_size, (cfg.n_mtp, B, T), dtype=np.int32)
    hyper = ne.hyper_at(1, 1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1, clip=1)
    times = []
    for _ in range(7):                       # the first compiles, the second records the graph
        began = time.perf_counter()
        model.gradient(tokens, targets, ne.loss_weights(targets, 0.3))
        model.update(hyper)
        times.append(1e3 * (time.perf_counter() - began))
    after, _ = cuda.current_context().get_memory_info()
    del model
    gc.collect()
    cuda.current_context().deallocations.clear()         # else the next one starts with less
    needs = needs_of(memory_table(cfg, B, T, nc.DTYPES["f32"], Model.buffer_table))
    return StepCost(statistics.median(times[2:]), before - after, needs.held + needs.batch)

def attention():
    step_time(1, 64, nc.Model)               # context and modules are not the model's
    step_time(1, 64, NaiveModel)
    rows = []
    for B, T in ((32, 512), (16, 1024), (8, 2048)):
        flash = step_time(B, T, nc.Model)
        naive = step_time(B, T, NaiveModel)
        rows.append(dict(batch=B, T=T, flash_ms=flash.ms, naive_ms=naive.ms,
                         flash_bytes=flash.measured, flash_predicted=flash.predicted,
                         naive_bytes=naive.measured, naive_predicted=naive.predicted))
    return rows

FIRST = """
import time; began = time.perf_counter()
import sys; sys.path.insert(0, {root!r})
import numpy as np, nanoeuler as ne, nanoeuler_cuda as nc
cfg = ne.PRESETS["base"]
m = nc.Model(cfg, ne.init_params(cfg, 1), dtype="bf16")
ready = time.perf_counter()
x = np.zeros((1, 512), np.int32)
m.gradient(x, np.zeros((4, 1, 512), np.int32), np.ones(4)); m.update(ne.Hyper(*np.ones(8)))
print(ready - began, time.perf_counter() - ready)
"""

def start():
    out = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("first", "later"):
            text = subprocess.run([sys.executable, "-c", FIRST.format(root=str(ROOT))], text=True,
                                  capture_output=True, check=True,
                                  env={**os.environ, "NUMBA_CACHE_DIR": cache}).stdout
            out[name] = [float(x) for x in text.split()]
    return out

PARTS = {"parity": parity, "bf16": bf16, "attention": attention, "start": start}

def spread(losses):
    return f"{np.ptp(losses) / losses.mean():.2%}"

def table(r):
    commits = ", ".join(f"{name} at {commit}" for name, commit in r["commits"].items())
    out = [f"## {r['device']}, driver {r['driver']}", "", f"{r['versions']}; {commits}."]
    if "parity" in r:
        out += ["", "### CPU and GPU, the same 200 steps of the small preset", "",
                "| largest difference of the loss | first 50 steps | all 200 |", "|---|---:|---:|"]
        out += [f"| {x['what']} | {x['first_50']:.1e} | {x['all_200']:.1e} |"
                for x in r["parity"]["rows"]]
    if "bf16" in r:
        x, y = (np.array(r["bf16"][name]) for name in ("bf16", "f32"))
        out += ["", "### bfloat16 and float32, the same 500 steps of the base preset", "",
                f"Means of {len(x)} and {len(y)} runs from weights that differ by 1e-7.", "",
                "| steps | bfloat16 | float32 | difference of the means | spread, bfloat16 | "
                "float32 |", "|---|---:|---:|---:|---:|---:|"]
        out += [f"| {50 * i + 1} - {50 * i + 50} | {a.mean():.4f} | {b.mean():.4f} | "
                f"{a.mean() / b.mean() - 1:+.2%} | {spread(a)} | {spread(b)} |"
                for i, (a, b) in enumerate(zip(x.T, y.T))]
    if "attention" in r:
        out += ["", "### Attention in a float32 step of the base preset", "",
                "| batch x T | FlashAttention, ms | T x T in memory, ms | ratio | GiB | "
                "GiB, T x T | predicted / measured - 1 |", "|---|---:|---:|---:|---:|---:|---:|"]
        for x in r["attention"]:
            pairs = [(x[k + "_predicted"], x[k + "_bytes"]) for k in ("flash", "naive")]
            miss = max(abs(predicted / size - 1) for predicted, size in pairs if size)
            out.append(f"| {x['batch']} x {x['T']} | {x['flash_ms']:.0f} | {x['naive_ms']:.0f} | "
                       f"{x['naive_ms'] / x['flash_ms']:.2f} | " + " | ".join(
                           f"{size / 2**30:.1f}" if size else "not read" for _, size in pairs)
                       + f" | {miss:.1%} |")
    if "start" in r:
        out += ["", "### Seconds to compile or load the kernels of a base step in bfloat16", ""]
        out += [f"- {k} start: {v[1]:.1f} s, after {v[0]:.1f} s of imports and initial weights"
                for k, v in r["start"].items()]
    return "\n".join(out) + "\n"

def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--commit", help="of the code, where git does not know")
    parser.add_argument("--out", default=str(out_folder() / "gpu_proof"))
    a = parser.parse_args()
    nc.open_device()
    git = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True,
                         text=True)
    smi = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                         capture_output=True, text=True)
    path = pathlib.Path(a.out + ".json")
    found = versions("numba", "numba-cuda", "llvmlite", "numpy")
    where = dict(device=cuda.get_current_device().name, driver=smi.stdout.strip().split("\n")[0],
                 versions=", ".join(f"{name} {v}" for name, v in found.items()))
    r = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if any(r.get(k) != v for k, v in where.items()):
        r = dict(where, commits={})          # another machine: nothing of that file is kept
    for name in a.only:
        r[name] = PARTS[name]()
        r["commits"][name] = a.commit or git.stdout.strip()
        print(name, json.dumps(r[name]), flush=True)
        # at once: a later part that fails costs itself alone
        path.write_text(json.dumps(r, indent=1) + "\n", "utf-8")
        pathlib.Path(a.out + ".md").write_text(table(r), "utf-8")
    print(table(r))

if __name__ == "__main__":
    main()
