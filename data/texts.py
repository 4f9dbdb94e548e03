"""Texts and their tokens: read, split, encoded, and kept beside a large text.  And logs of runs.

nanoeuler.py learns from these, data/prepare.py makes them beforehand.
"""
import codecs
import contextlib
import hashlib
import json
import mmap
import pathlib
import sys

import numpy as np

from bpe import UserError, need, reading
from data.tensors import map_tensors, write_tensors

LARGE = 32 << 20     # bytes; the tokens of a longer text are kept in a file

def read_text(path):
    """A corpus, memory-mapped.  Invalid UTF-8 is reported and kept, a binary file is refused."""
    with reading(path, "name a text with --data"), open(path, "rb") as f:
        text = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        need(text[:LARGE].strip(), "it is empty")
        zero = text.find(b"\0")
        need(zero < 0, f"it is not text, byte {zero} is zero")
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for i in range(0, len(text), LARGE):
            decoder.decode(piece := text[i:i + LARGE], final=i + LARGE >= len(text))
    except UnicodeDecodeError as e:          # e.object begins with what the last piece left over
        print(f"note: {path} is not UTF-8 at byte {i + len(piece) - len(e.object) + e.start}; its "
              f"bytes are learned as they are", file=sys.stderr)
    return text

def split_text(text, holdout):
    """(training part, validation part): the tail is held out, cut where a character starts."""
    cut = int(len(text) * (1 - holdout))
    while cut > 0 and text[cut] & 0xC0 == 0x80:      # a UTF-8 continuation byte
        cut -= 1
    return text[:cut], text[cut:]

def excerpt(text, pieces=256):
    """At most LARGE bytes of a text, in pieces spread evenly over it, cut where lines end."""
    if len(text) <= LARGE:
        return text
    starts, n = [i * len(text) // pieces for i in range(pieces)], LARGE // pieces
    parts = [bytes(text[i:i + n]) for i in starts]
    return b"".join(x[x.find(b"\n") + 1:x.rfind(b"\n") + 1] or x for x in parts)

def encode_cut(tokenizer, text, share, rng):
    """Ids of a text, bytes, in which this share of the words, and a fifth as many of the characters
    inside of words, must begin a token: so each word is met in many spellings, also in that of the
    beginning of a line (subword regularization; Kudo 2018).  A zero byte cuts: no merge has one."""
    if not share:
        return tokenizer.encode(text)
    x = np.frombuffer(text, np.uint8)
    at = rng.integers(len(x), size=rng.binomial(len(x), share))
    at = at[(x[at] & 0xC0 != 0x80) & ((x[at - 1] == 32) | (rng.random(len(at)) < 0.2))]
    ids = tokenizer.encode(np.insert(x, np.unique(at), 0).tobytes())
    return ids[~np.isin(ids, tokenizer.encode(b"\0"))]

def tokenize(path, parts, tokenizer, text_sha256, cuts=0.0, seed=0):
    """Tokens of the training part of the text at `path`, cut, and of the validation part.
    Those of a large text are kept beside it, for this text, tokenizer and split, to be mapped."""
    rng, shares = np.random.default_rng(seed), (cuts, 0.0)
    encoded = (encode_cut(tokenizer, part, share, rng) for part, share in zip(parts, shares))
    if sum(map(len, parts)) <= LARGE:
        return list(encoded)
    meta = {"format": "nanoeuler tokens", "text_sha256": text_sha256,
            "tokenizer_sha256": tokenizer.hash(), "train_bytes": str(len(parts[0])),
            "cuts": str(cuts and (cuts, seed))}
    cache = f"{path}.{hashlib.sha256(json.dumps(meta).encode()).hexdigest()[:12]}.tokens"
    remedy = "free space, or move the text to where there is some"
    with contextlib.suppress(UserError), reading(cache, remedy):
        found, tensors = map_tensors(cache)
        need({**found, **meta} == found, "it belongs to another text")
        return [tensors["train"], tensors["val"]]
    print(f"tokenizing {path}: once, the tokens are kept in {cache}", flush=True)
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32
    tensors = {name: ids.astype(dtype) for name, ids in zip(("train", "val"), encoded)}
    try:
        write_tensors(cache, meta, tensors, remedy)
    except UserError as e:                   # a folder of others, or another run that fills it
        print(f"note: {e}", file=sys.stderr)
    return list(tensors.values())

def read_log(path):
    """The records of a JSON-lines log.  What a killed run left unfinished is skipped."""
    records = []
    with reading(path, "name a log that train, sft or dpo wrote"):
        lines = pathlib.Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                r = json.loads(line)
                records.append({**r, "step": int(r["step"])})
        need(records or not lines, "no line of it is the record of a step")
    return records
