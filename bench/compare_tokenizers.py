"""Compares the ids of random strings with those of Hugging Face `tokenizers`, or for a file
tokenizer.model with those of sentencepiece; then the speed on two texts.

    python bench/compare_tokenizers.py tokenizer.json ... --strings 1000000

A string mixes scripts, blanks, line ends, digits, contractions, combining marks and names of added
tokens.  `tokenizers` also reads special tokens as text here, as bpe.py always does."""
import argparse
import os
import pathlib
import random
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numba
import numpy as np
import tokenizers

import bpe

RANGES = [(0x20, 0x7F)] * 6 + [
    (0, 0x20), (0x80, 0x180), (0x1C4, 0x1CD), (0x300, 0x370), (0x370, 0x400), (0x400, 0x500),
    (0x590, 0x600), (0x600, 0x700), (0x900, 0x980), (0xE00, 0xE80), (0x1100, 0x1200),
    (0x1E00, 0x1F00), (0x2000, 0x2070), (0x2150, 0x2190), (0x2581, 0x2582), (0x3000, 0x3100),
    (0x4E00, 0x5000), (0xAC00, 0xAD00), (0xFB00, 0xFB07), (0xFF00, 0xFF60), (0x1D400, 0x1D800),
    (0x1F300, 0x1F650), (0, 0xD800), (0xE000, 0x110000)]
PIECES = [" ", " ", "  ", "   ", "\n", "\r\n", "\n\n", "\t", " \n ", "\u00a0", "\u3000", "'s", "'S",
          "'ll", "'RE", "'\u017f", "don't", "I'M", "123", "12345", "3.14", "//", "/\n", "...\n",
          "the", " the", "Hello", " World", "camelCase", "ABC", "_x", "e\u0301", "\u0301", "}\n",
          "\u1100\u1161\u11a8", "\u2581", " \u2581", "def f(x):\n    return x\n"]

def random_string(rnd, names):
    parts = []
    for _ in range(rnd.randint(1, 12)):
        kind = rnd.random()
        if kind < 0.35:
            parts.append(rnd.choice(PIECES))
        elif kind < 0.38 and names:
            parts.append(rnd.choice(names))
        else:
            low, high = rnd.choice(RANGES)
            parts += [chr(rnd.randrange(low, high)) for _ in range(rnd.randint(1, 6))]
    return "".join(parts)

class Peer:
    """The reference for a file: `tokenizers`, or sentencepiece for a .model"""

    def __init__(self, path):
        if path.endswith(".json"):
            self.peer = tokenizers.Tokenizer.from_file(path)
            self.peer.encode_special_tokens = True
            self.name = f"tokenizers {tokenizers.__version__}"
        else:
            import sentencepiece
            self.peer = sentencepiece.SentencePieceProcessor(model_file=path)
            self.name = f"sentencepiece {sentencepiece.__version__}"

    def encode(self, texts):
        if self.name.startswith("sentencepiece"):
            return self.peer.encode(texts)
        return [x.ids for x in self.peer.encode_batch(texts, add_special_tokens=False)]

def tokenizer_of(path):
    if path.endswith(".json"):
        return bpe.Tokenizer.load(path)
    from nanoeuler_parts.tokenizers.families import tokenizer_of_model
    with bpe.reading(path, "name another file"):
        return tokenizer_of_model(bpe.read_bytes(path))

def compare(path, n, seed):
    ours, peer = tokenizer_of(path), Peer(path)
    rnd = random.Random(seed)
    names = [*getattr(ours, "symbols", {}), *[*ours.specials][:8]]
    names = [name for name in names if len(name) > 1]
    different = done = characters = 0
    while done < n:
        texts = [random_string(rnd, names) for _ in range(min(10_000, n - done))]
        done += len(texts)
        characters += sum(map(len, texts))
        for text, ids in zip(texts, peer.encode(texts)):
            mine = ours.encode(text).tolist()
            if mine != ids:
                different += 1
                if different <= 3:
                    print(f"  {text!r}\n    ours   {mine}\n    theirs {ids}", flush=True)
    print(f"{path}: {ours.vocab_size:,} tokens, {n:,} strings of {characters:,} characters, "
          f"{different:,} different from {peer.name}", flush=True)

def mixed_text(size):
    rnd = random.Random(1)
    parts = []
    while size > 0:
        parts.append(random_string(rnd, []))
        size -= len(parts[-1].encode())
    return "".join(parts)

def lines_of(text, size=65536):
    """The text in parts of about `size` characters, of whole lines"""
    parts = [""]
    for line in text.splitlines(keepends=True):
        if len(parts[-1]) > size:
            parts.append("")
        parts[-1] += line
    return parts

def speed(path, name, text, rounds, threads):
    """MB/s of both, medians of alternate rounds after one that compiles.  On one thread, the text
    is one string.  On all threads, it is 16 times as long, and the reference gets parts of it."""
    ours, peer = tokenizer_of(path), Peer(path)
    parts = [text]
    if threads == "all threads":
        text = 16 * text
        parts = lines_of(text)
    seconds = {"ours": [], "peer": []}
    for _ in range(rounds + 1):
        for who in seconds:
            began = time.perf_counter()
            if who == "ours":
                ours.encode(text)
            else:
                peer.encode(parts)
            seconds[who].append(time.perf_counter() - began)
    mine, theirs = (len(text.encode()) / 1e6 / np.median(seconds[who][1:]) for who in seconds)
    print(f"{path}: {name}, {threads}: bpe.py {mine:.1f} MB/s, {peer.name} {theirs:.1f} MB/s, "
          f"ratio {mine / theirs:.2f}", flush=True)

def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--strings", type=int, default=100_000, help="random strings per file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=0, help="rounds of the speed test; 0: none")
    args = parser.parse_args()
    print(f"Python {sys.version.split()[0]}, numba {numba.__version__}, numpy {np.__version__}, "
          f"{os.cpu_count()} cores")
    for path in args.files:
        if args.strings:
            compare(path, args.strings, args.seed)
        if args.rounds:
            english = (ROOT / "data/shakespeare.txt").read_bytes()[:1_000_000].decode()
            for name, text in ("1 MB English", english), ("1 MB mixed", mixed_text(1_000_000)):
                for threads in "one thread", "all threads":
                    speed(path, name, text, args.rounds, threads)

if __name__ == "__main__":
    main()
