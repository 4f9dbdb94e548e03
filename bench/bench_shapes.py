"""Larger Llamas beside llama.cpp, at 8 bits, on random weights.

    python bench/bench_shapes.py [--rounds 5] [--threads 2]

Two shapes: Llama 3.2 1B, and Qwen3 0.6B with its norms of q and k.  `write_gguf` makes the file
that llama.cpp reads, in Q8_0, from the same weights that the decoder packs in int8.  Both engines
are in one process and take turns; each round decodes 16 tokens, then reads a prompt of 256.
Medians, and the smallest and largest round.
"""
import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from bench_llama import LlamaCpp
from common import cpu_model, shapes, versions
from numba import set_num_threads

import bpe
import nanoeuler as ne
from nanoeuler_parts.checkpoint.file import Checkpoint
from nanoeuler_parts.interchange.gguf import write_gguf
from nanoeuler_parts.tokenizers.added import fill

SHAPES = {"Llama 3.2 1B": shapes()["llama-3.2-1b"], "Qwen3 0.6B": shapes()["qwen3-0.6b"]}
TOKENS, PROMPT = 16, 256


class Ours:
    """Decoder with the interface of bench_llama.LlamaCpp"""

    def __init__(self, cfg, flat):
        self.decoder = ne.Decoder(cfg, flat, "int8")

    def forget(self):
        self.decoder.truncate(0)

    def read(self, tokens, wanted=1):
        return self.decoder.read([ne.Part(0, tokens, wanted)])


def round_of(engine, prompt):
    """Seconds per token and per prompt"""
    engine.forget()
    token = int(engine.read(prompt[:4])[-1].argmax())
    began = time.perf_counter()
    for _ in range(TOKENS):
        token = int(engine.read([token])[-1].argmax())
    token_time = (time.perf_counter() - began) / TOKENS
    engine.forget()
    began = time.perf_counter()
    engine.read(prompt)
    return token_time, time.perf_counter() - began


def engines_of(cfg, folder, threads):
    """{name: engine} of a model with random weights"""
    root = json.loads(ne.read_checkpoint(str(HERE.parent / "data/model.bin")).tokenizer.to_json())
    tokenizer = bpe.Tokenizer.from_root(fill(root, cfg.vocab_size))
    flat = ne.init_params(cfg, 1)
    c = Checkpoint(cfg, tokenizer, ne.State(eos="<|unused_3000|>"), flat, ())
    write_gguf(str(folder / "model.gguf"), c, "q8_0")
    ours = Ours(cfg, flat)
    return {"NanoEuler, int8": ours, "llama.cpp, Q8_0": LlamaCpp(folder, "model.gguf", threads)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds of turns (default 5)")
    parser.add_argument("--threads", type=int, default=2, help="of each engine (default 2)")
    args = parser.parse_args()
    set_num_threads(args.threads)
    ne.Decoder.ready()
    packages = versions("numba", "numpy", "llama-cpp-python")
    print(f"{cpu_model().name}, {os.cpu_count()} cores, {args.threads} threads, {packages}")
    for shape, cfg in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            engines = engines_of(cfg.check(), pathlib.Path(folder), args.threads)
            prompt = np.random.default_rng(1).integers(0, 1000, PROMPT).tolist()
            times = {name: [] for name in engines}
            for _ in range(1 + args.rounds):             # the first round warms up
                for name, engine in engines.items():
                    times[name].append(round_of(engine, prompt))
            for name, rounds in times.items():
                token, read = ([1000 * x for x in column] for column in zip(*rounds[1:]))
                print(f"{shape}, {ne.n_params(cfg):,} parameters; {name}: "
                      f"{statistics.median(token):.1f} ms per token ({min(token):.1f} to "
                      f"{max(token):.1f}), {statistics.median(read):.0f} ms per prompt of {PROMPT} "
                      f"({min(read):.0f} to {max(read):.0f})", flush=True)


if __name__ == "__main__":
    main()
