"""Where the time goes on one NVIDIA GPU: the kernels of a prompt, of a training step, or the
products of a prompt for each width of their tiles.

    python bench/gpu_kernels.py prompt [--shape base] [--tokens 512]
    python bench/gpu_kernels.py step [--shape base] [--batch 64] [--tokens 512] [--qk-norm]
    python bench/gpu_kernels.py widths [--shape base] [--tokens 512]

Weights are random, in bfloat16.  The times of kernels are those of PyTorch's profiler, which sees
all kernels of the process.  It slows launches, so the time of a whole prompt or step is measured
before it starts.  A kernel that starts early, while the kernel before it still runs, counts the
time that it waits.
"""
import argparse
import collections
import pathlib
import sys
from typing import NamedTuple

import numpy as np
import torch
from torch.profiler import profile, ProfilerActivity

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
import bench_gpu
import bench_gpu_decode
import nanoeuler as ne
import nanoeuler_cuda as nc
from common import shapes
from nanoeuler_parts.gpu.launches import Graph
from nanoeuler_parts.tensor_cores import matmul_wgmma
from nanoeuler_parts.tensor_cores.scheduler import SLICE_TIME, tile_columns

ROUNDS = 3                                   # prompts or steps in a profile
LAUNCHES = 40                                # of one product, in a graph


class Kernel(NamedTuple):
    name: str
    count: float                             # launches per round
    us: float                                # per launch


def short(name):
    """The function of this project in the profiler's name of a kernel, with what made it"""
    parts = [part.split("[")[0] for part in name.replace("_3clocals_3e::", "").split("::")]
    return ".".join(parts[-3:])


def kernels_of(events, rounds):
    """[Kernel], the longest first.     events: [(name, us)] of all launches in `rounds` rounds"""
    times = collections.defaultdict(list)
    for name, us in events:
        times[name].append(us)
    found = [Kernel(short(name), len(x) / rounds, sum(x) / len(x)) for name, x in times.items()]
    return sorted(found, key=lambda k: -k.count * k.us)


def profiled(call):
    """[(name, us)] of the kernels of call()"""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    return [(e.name, e.device_time) for e in found.events()
            if e.device_type == torch.autograd.DeviceType.CUDA]


def print_kernels(call):
    def rounds():
        for _ in range(ROUNDS):
            call()
    found = kernels_of(profiled(rounds), ROUNDS)
    print(f"  kernels: {sum(k.count * k.us for k in found) / 1e3:.3f} ms\n"
          f"  {'us':>9} {'launches':>9} {'us each':>9}")
    for k in found:
        print(f"  {k.count * k.us:9,.1f} {k.count:9.1f} {k.us:9.2f}  {k.name}")


def prompt(cfg, a):
    decoder = nc.make_decoder(cfg, ne.init_params(cfg, 1), "bf16", slots=1)
    ids = np.random.default_rng(1).integers(0, cfg.vocab_size, a.tokens).tolist()
    host = bench_gpu_decode.prompt_ms(decoder, a.tokens)
    print(f"  a prompt of {a.tokens} tokens, until the host has its logits: {host:.3f} ms")

    def read():
        decoder.truncate(0)
        decoder.read([ne.Part(0, ids)])
    print_kernels(read)


def step(cfg, a):
    run = bench_gpu.our_step(cfg, ne.init_params(cfg, 1), a.batch, a.tokens)
    run()                                    # compiles, and the second one records the graphs
    ms = bench_gpu_decode.median_ms(run, n=9)
    print(f"  a step of {a.batch} x {a.tokens} tokens: {ms:.2f} ms")
    print_kernels(run)


def widths(cfg, a):
    """Prints us per launch of the products of a layer, one after another in a graph."""
    nc.open_device()
    multiprocessors = nc.cuda.get_current_device().MULTIPROCESSOR_COUNT
    HD, KV = cfg.n_head * cfg.head_dim, cfg.n_kv_head * cfg.head_dim
    C, F, ops = cfg.n_embd, cfg.n_hidden, nc.make_ops("wgmma")
    print(f"  {'T':>6} {'N':>6} {'K':>6}" + "".join(f" {w:>8}" for w in SLICE_TIME) + "  chosen")
    for N, K in (HD + 2 * KV, C), (C, HD), (2 * F, C), (C, F):
        rng, times = np.random.default_rng(1), {}
        out, x, w = (nc.to_device(nc.to_bf16(rng.standard_normal(shape, np.float32)))
                     for shape in ((a.tokens, N), (a.tokens, K), (N, K)))
        for columns in SLICE_TIME:
            matmul_wgmma.tile_columns = lambda *args, columns=columns: columns
            graph = Graph()

            def launches():
                for _ in range(LAUNCHES):
                    ops.matmul(out, x, w)

            def replay():
                graph(launches)
                nc.gpu.stream.synchronize()
            replay()
            times[columns] = 1e3 * bench_gpu_decode.median_ms(replay, n=9) / LAUNCHES
        matmul_wgmma.tile_columns = tile_columns
        chosen = tile_columns(a.tokens, N, K, 1, multiprocessors)
        print(f"  {a.tokens:6,} {N:6,} {K:6,}" + "".join(f" {t:8.2f}" for t in times.values())
              + f"  {chosen}", flush=True)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["prompt", "step", "widths"])
    p.add_argument("--shape", default="base", choices=shapes())
    p.add_argument("--tokens", type=int, default=512, help="of a prompt or a sequence")
    p.add_argument("--batch", type=int, default=64, help="sequences in a step")
    p.add_argument("--qk-norm", action="store_true", help="with norms of q and k")
    a = p.parse_args(argv)
    cfg = ne.replace(shapes()[a.shape], seq_len=max(a.tokens, shapes()[a.shape].seq_len))
    cfg = ne.replace(cfg, qk_norm=cfg.qk_norm or a.qk_norm)
    nc.open_device()
    print(f"{nc.cuda.get_current_device().name}, {a.shape}", flush=True)
    {"prompt": prompt, "step": step, "widths": widths}[a.what](cfg, a)


if __name__ == "__main__":
    main()
