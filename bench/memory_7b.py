"""Memory of a model with the shape of Llama 2 7B: `import --dtype int8`, 20 tokens of `generate`.

    python bench/memory_7b.py [--layers 32] [--folder DIR]

The weights are random, in bfloat16, in eight files (13.5 GB), which are deleted at the end.  Memory
is the peak of a process's own pages (RssAnon of Linux), looked at 50 times per second.  Pages of a
file that is memory-mapped are not counted: the system may drop them at any time.
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
from common import cpu_model, versions, watched

import nanoeuler as ne
from nanoeuler_parts.checkpoint.tensors import tensor_shapes
from nanoeuler_parts.files.safetensors import Computed, write_tensors
from nanoeuler_parts.interchange.llama import entries_of

FILES, AT_ONCE = 8, 1 << 22


def random_rows(shape, pool):
    """A function (start, stop): these rows of a tensor, from a pool of random numbers"""
    columns = int(np.prod(shape[1:]))

    def rows(start, stop):
        at = start * columns * 7919 % (1 << 20)
        return np.resize(pool[at:], (stop - start) * columns).reshape(stop - start, *shape[1:])
    return Computed(np.dtype(np.uint16), shape, rows, max(1, AT_ONCE // columns))


def write_model(folder, layers):
    """A directory of Hugging Face with random weights in bfloat16"""
    tokenizer = bpe.train((ROOT / "data/shakespeare.txt").read_bytes(), 32000, bpe.SPECIALS)
    cfg = ne.Config(n_embd=4096, n_head=32, n_kv_head=32, head_dim=128, n_layer=layers,
                    n_hidden=11008, seq_len=4096, vocab_size=tokenizer.vocab_size, n_mtp=1).check()
    pool = ne.to_bf16(0.02 * np.random.default_rng(1).standard_normal(1 << 24, np.float32))
    shapes = tensor_shapes(cfg)
    names = [*shapes]
    for i in range(FILES):
        part = names[i * len(names) // FILES:(i + 1) * len(names) // FILES]
        write_tensors(f"{folder}/model-{i}.safetensors", {"format": "pt"}, {
            name: random_rows(shapes[name], pool) if len(shapes[name]) > 1 else
            ne.to_bf16(np.ones(shapes[name], np.float32)) for name in part}, "free space", "BF16")
    tokenizer.save(f"{folder}/tokenizer.json")
    for name, content in ("config", entries_of(cfg)), ("tokenizer_config", {}):
        pathlib.Path(folder, f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return ne.n_params(cfg)


def main():
    parser = argparse.ArgumentParser(description="memory of a 7B shape in int8")
    parser.add_argument("--layers", type=int, default=32, help="number of layers")
    parser.add_argument("--folder", help="where the model is written (default: a temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        print(f"{cpu_model().name}, {os.cpu_count()} cores, {versions('numba', 'numpy')}",
              flush=True)
        n = write_model(folder, args.layers)
        size = sum(path.stat().st_size for path in pathlib.Path(folder).glob("*.safetensors"))
        print(f"{n:,} parameters, {size / 1e9:.2f} GB in bfloat16", flush=True)
        out = f"{folder}/int8.bin"
        _, seconds, most = watched("import", folder, out, "--dtype", "int8")
        print(f"import --dtype int8: {os.path.getsize(out) / 1e9:.2f} GB, {seconds:.0f} s, peak "
              f"{most / 1e9:.2f} GB", flush=True)
        _, seconds, most = watched("generate", "To be, or", out, "--tokens", 20, "--temperature", 0)
        print(f"generate, 20 tokens: {seconds:.0f} s, peak {most / 1e9:.2f} GB", flush=True)


if __name__ == "__main__":
    main()
