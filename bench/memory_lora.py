"""Peak memory and seconds of `sft --lora` on a model of a common shape, in int8.

    python bench/memory_lora.py [--shape qwen3-0.6b] [--layers N] [--vocab N] [--rank 16]
                                [--steps 3] [--tokens 512] [--threads 2] [--dtype bf16]
                                [--folder DIR]

--shape is qwen3-0.6b or llama-3.2-1b, see `shapes` in common.py.  The weights are random.  Each
step trains one row of --tokens tokens, of which all but the question are targets.  Memory is the
largest RssAnon of the process (Linux), looked at 50 times per second: its own pages, without those
of files that are memory-mapped, which the system may drop.
"""
import argparse
import json
import os
import pathlib
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
import bpe
import numpy as np
from common import cpu_model, shapes, versions, watched

import nanoeuler as ne
from nanoeuler_parts.checkpoint.file import meta_of
from nanoeuler_parts.checkpoint.matrices import expected_types
from nanoeuler_parts.files.safetensors import Computed, write_tensors

AT_ONCE = 1 << 22
WORDS = (ROOT / "data/shakespeare.txt").read_text(encoding="utf-8").split()


def random_tensor(name, dtype, shape, pool):
    """A tensor of the file: int8 from -127 to 127, scales that give weights of 0.02, unit gains"""
    if dtype == np.float32:
        return np.full(shape, 0.02 / 73 if name.endswith("_scale") else 1.0, np.float32)
    columns = shape[1]

    def rows(start, stop):
        at = start * columns * 7919 % (1 << 20)
        return np.resize(pool[at:], (stop - start) * columns).reshape(stop - start, columns)
    return Computed(np.dtype(np.int8), shape, rows, max(1, AT_ONCE // columns))


def write_model(path, cfg):
    """A checkpoint of this shape with int8 matrices, and of the tokens that no merge needs"""
    vocab = cfg.vocab_size
    merges = min(2000, vocab - 300)
    names = [*bpe.SPECIALS, *(f"<|unused_{k}|>" for k in range(vocab - 256 - merges - 3))]
    text = (ROOT / "data/shakespeare.txt").read_bytes()
    tokenizer = bpe.train(text, vocab, names)
    cfg = ne.replace(cfg, vocab_size=tokenizer.vocab_size, seq_len=4096).check()
    pool = np.random.default_rng(1).integers(-127, 128, 1 << 24, np.int8)
    tensors = {name: random_tensor(name, dtype, shape, pool)
               for name, (dtype, shape) in expected_types(cfg, "int8").items()}
    write_tensors(path, meta_of(cfg, tokenizer, ne.State(), "int8"), tensors, "free space")
    return cfg, tokenizer


def write_rows(path, tokenizer, n, tokens):
    """n examples whose rows have nearly that many tokens"""
    rng, examples = np.random.default_rng(2), []
    for i in range(n):
        words = []
        while True:
            more = [*words, *(WORDS[k] for k in rng.integers(0, len(WORDS), 4))]
            row = ne.PROMPT.format(instruction=f"Tell me {i}.") + " ".join(more)
            if len(tokenizer.encode(row)) > tokens - 1:
                break
            words = more
        examples.append({"instruction": f"Tell me {i}.", "output": " ".join(words)})
    path.write_text(json.dumps(examples), encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description="memory of sft --lora on a model in int8")
    parser.add_argument("--shape", default="qwen3-0.6b", help="qwen3-0.6b or llama-3.2-1b")
    parser.add_argument("--layers", type=int, help="number of layers (default: of the shape)")
    parser.add_argument("--vocab", type=int, help="size of the vocabulary (default: of the shape)")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapter")
    parser.add_argument("--steps", type=int, default=3, help="number of training steps")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a row")
    parser.add_argument("--threads", type=int, default=2, help="number of threads")
    parser.add_argument("--dtype", default="bf16", help="precision: f32 or bf16")
    parser.add_argument("--folder", help="where files are written (default: a temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = pathlib.Path(name)
        print(f"{cpu_model().name}, {os.cpu_count()} cores, {versions('numba', 'numpy')}",
              flush=True)
        shape = shapes()[args.shape]
        cfg, tokenizer = write_model(folder / "model.bin", ne.replace(
            shape, n_layer=args.layers or shape.n_layer,
            vocab_size=args.vocab or shape.vocab_size))
        write_rows(folder / "rows.json", tokenizer, 4, args.tokens)
        print(f"{ne.n_params(cfg):,} parameters, {(folder / 'model.bin').stat().st_size / 1e9:.2f} "
              f"GB in int8", flush=True)
        said, _, most = watched(
            "sft", folder / "model.bin", "--data", folder / "rows.json", "--lora", args.rank,
            "--steps", args.steps, "--batch", args.tokens, "--row-len", args.tokens, "--template",
            "alpaca", "--dtype", args.dtype, "--threads", args.threads, "--out", folder / "adapter")
        log = [json.loads(line) for line in
               (folder / "adapter/run.jsonl").read_text(encoding="utf-8").splitlines()]
        seconds = [r["ms"] / 1e3 for r in log if "ms" in r]
        print(said)
        print(f"rank {args.rank}, {args.dtype}, {args.threads} threads, rows of {args.tokens} "
              f"tokens: {min(seconds):.2f} s per step at best, peak {most / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
