"""Time that JSON mode needs per token, with the vocabulary of another model.

    npm pack js-tiktoken@1.0.21
    tar xzf js-tiktoken-1.0.21.tgz
    python bench/bench_json_tokens.py package/dist/ranks/o200k_base.js [--schema SCHEMA]
        [--tokens 200] [--seed 1]

The file contains ranks in the form of the package js-tiktoken: base64 texts after the number of
the first one.  A reply is written with random tokens of those that its masks allow.  Prints the
times of the preparation, and then of the masks in milliseconds of CPU time."""
import argparse
import base64
import pathlib
import random
import re
import statistics
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
import numpy as np

from nanoeuler_parts.chat.json_mode import Constraint, Trie

SCHEMA = '{"type": "string", "minLength": 20}'


def read_ranks(path):
    """The tokens of a vocabulary as bytes, in their order"""
    text = path.read_text(encoding="utf-8")
    found = {}
    for row in re.search(r'bpe_ranks"?:\s*"((?:[^"\\]|\\.)*)"', text)[1].split("\\n"):
        _, first, *tokens = row.split(" ")
        for rank, token in enumerate(tokens, int(first)):
            found[rank] = base64.b64decode(token)
    return [found.get(rank, b"") for rank in range(max(found) + 1)]


def timed(what):
    """(result, milliseconds of CPU time)"""
    begin = time.process_time()
    found = what()
    return found, 1000 * (time.process_time() - begin)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=pathlib.Path, help="ranks, such as o200k_base.js")
    parser.add_argument("--schema", default=SCHEMA, help=f"JSON schema; default: {SCHEMA}")
    parser.add_argument("--tokens", type=int, default=200, help="masks to measure")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random tokens")
    args = parser.parse_args()
    vocab = read_ranks(args.file)
    trie, once = timed(lambda: Trie(vocab, set()))
    print(f"{len(vocab):,} tokens, {len(trie.byte):,} nodes")
    print(f"tree of the vocabulary: {once:,.0f} ms")
    constraint, once = timed(lambda: Constraint(args.schema, trie, None))
    print(f"preparation of the schema: {once:.1f} ms")
    rng, state, times = random.Random(args.seed), constraint.start, []
    for _ in range(args.tokens):
        mask, spent = timed(lambda: constraint.mask(state))
        times.append(spent)
        state = constraint.after(state, rng.choice(np.flatnonzero(mask).tolist()))
        state = state or constraint.start
    first, steady = times[:args.tokens // 4], times[args.tokens // 4:]
    for name, each in ("first", first), ("other", steady):
        print(f"{name} {len(each)} masks: median {statistics.median(each):.2f} ms, "
              f"largest {max(each):.2f} ms")


if __name__ == "__main__":
    main()
