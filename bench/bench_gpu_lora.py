"""ms per step of LoRA on a GPU, beside a step of all weights, and the memory of both.

    python bench/bench_gpu_lora.py [--shapes llama-3.2-1b qwen3-0.6b] [--batch 8] [--tokens 512]
                                   [--rank 16]

The shapes are those of Llama 3.2 1B with V = 128,256 and Qwen3 0.6B with V = 151,936, in bfloat16,
with random weights.  A step is forward, backward, clipping and AdamW.  A figure is the median of 15
steps after 4 others, with the shortest and the longest one.  Memory is what the driver says, after
the steps less before the model was made.  Each model has a process of its own.
"""
import argparse
import pathlib
import statistics
import subprocess
import sys
import time

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent)]
SHAPES = {"llama-3.2-1b": 128_256, "qwen3-0.6b": 151_936}


def used_mib():
    from cuda.bindings import driver
    _, free, total = driver.cuMemGetInfo()
    return (total - free) >> 20


def measure(name, batch, tokens, rank):
    """Prints the figures of one model.     rank: 0 trains all weights"""
    import numpy as np
    from common import shapes

    import nanoeuler as ne
    import nanoeuler_cuda as nc
    from nanoeuler_parts.gpu_lora import LoraModel
    from nanoeuler_parts.lora.adapter import Lora
    from nanoeuler_parts.lora.base import base_of_flat
    from nanoeuler_parts.lora.model import Adapted
    nc.open_device()
    cfg = ne.replace(shapes()[name], seq_len=tokens, n_mtp=1, vocab_size=SHAPES[name])
    flat, before = ne.init_params(cfg, 1), used_mib()
    if rank:
        adapted = Adapted(base_of_flat(cfg, flat), Lora(rank, 2.0 * rank), None)
        model = LoraModel(cfg, adapted, dtype="bf16")
    else:
        model = nc.Model(cfg, flat, dtype="bf16")
    rng = np.random.default_rng(1)
    x = rng.integers(0, cfg.vocab_size, (batch, tokens), np.int32)
    y = rng.integers(0, cfg.vocab_size, (1, batch, tokens), np.int32)
    weight = np.full((batch, 1), 1 / (batch * tokens), np.float32)
    hyper = ne.hyper_at(1, 1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1, clip=1.0)
    times = []
    for _ in range(19):
        began = time.perf_counter()
        model.gradient(x, y, weight)
        model.update(hyper)
        times.append(1e3 * (time.perf_counter() - began))
    times = times[4:]
    print(f"{name}, {batch} x {tokens}, {f'LoRA of rank {rank}' if rank else 'all weights'}: "
          f"{statistics.median(times):.2f} ms ({min(times):.2f} to {max(times):.2f}), "
          f"{used_mib() - before:,} MiB", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES], choices=[*SHAPES])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--one", action="store_true", help="measure in this process")
    args = parser.parse_args()
    for name in args.shapes:
        if args.one:
            return measure(name, args.batch, args.tokens, args.rank)
        for rank in 0, args.rank:
            subprocess.run([sys.executable, __file__, "--one", "--shapes", name,
                            "--batch", str(args.batch), "--tokens", str(args.tokens),
                            "--rank", str(rank)], check=True)


if __name__ == "__main__":
    main()
