"""Training texts: reading, splitting and tokenizing.  The token ids of a large text are cached."""
import codecs
import contextlib
import hashlib
import json
import mmap
import os
import tempfile

import numpy as np

import bpe
from bpe import need, note, printable, reading, regular, UserError
from nanoeuler_parts.files.safetensors import (
    BLOCK, map_tensors, release_pages, TOKEN_KINDS, write_tensors,
)

LARGE = 32 << 20     # bytes; the tokens of a longer text are cached in a file
TEXT_AT_ONCE = 1 << 28                       # bytes that are encoded at once

def marks_of_editors(text):
    """Describes a byte order mark or CR LF line ends, which editors add; "" if it finds neither.
    The model learns these bytes, too."""
    found = []
    if text[:3] == codecs.BOM_UTF8:
        found.append("begins with a byte order mark")
    if text.find(b"\r\n") >= 0:
        found.append("has Windows line ends (CR LF)")
    return " and ".join(found)

# The end of a note about a text that is not valid UTF-8
AS_BYTES = ("the model reads the bytes as they are; if the text is in another encoding, save it as "
            "UTF-8, for example with iconv -f LATIN1 -t UTF-8 OLD > NEW")

# Byte order marks.  That of UTF-16 in little endian is the beginning of that of UTF-32.
MARKS = {"UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
         "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)}

def marked_encoding(text):
    """The encoding whose byte order mark begins these bytes, "" without one or for UTF-8's"""
    return next((name for name, marks in MARKS.items() if text[:4].startswith(marks)), "")

def read_text(path):
    """A training text, memory-mapped.  Invalid UTF-8 is reported and kept.  Binary is rejected."""
    with reading(path, "name a text file with --data"):
        with open(path, "rb", opener=regular) as f:
            need(os.fstat(f.fileno()).st_size, "the file is empty")  # mmap rejects an empty file
            text = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        found = marked_encoding(text)
        need(not found, f"expected UTF-8, found {found}")
        need(text[:LARGE].strip(), "expected text, found only white space")
        zero = text.find(b"\0")
        need(zero < 0, f"expected text, found a zero byte at position {zero}")
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for i in range(0, len(text), LARGE):
            decoder.decode(piece := text[i:i + LARGE], final=i + LARGE >= len(text))
    except UnicodeDecodeError as e:          # e.object begins with the last piece's remainder
        at = i + len(piece) - len(e.object) + e.start
        note(f"{path} is not valid UTF-8 at byte {at}; {AS_BYTES}")
    if found := marks_of_editors(text):
        note(f"{path} {found}, and the model reads these bytes; to remove them, add "
             f"--newlines unix")
    return text

def split_text(text, holdout):
    """(training part, validation part).  The validation part is the last fraction `holdout` of the
    text, and begins with a whole character."""
    cut = int(len(text) * (1 - holdout))
    while cut > 0 and text[cut] & 0xC0 == 0x80:      # a UTF-8 continuation byte
        cut -= 1
    return text[:cut], text[cut:]

def excerpt(text, pieces=256):
    """At most LARGE bytes of a text: pieces spread evenly over the text, of whole lines."""
    if len(text) <= LARGE:
        return text
    starts, n = [i * len(text) // pieces for i in range(pieces)], LARGE // pieces
    parts = [bytes(text[i:i + n]) for i in starts]
    return b"".join(x[x.find(b"\n") + 1:x.rfind(b"\n") + 1] or x for x in parts)

def encode_cut(tokenizer, text, share, rng, follows=False):
    """Token ids of a text, bytes, with random cuts; a token must begin at each cut.
    A cut separates a word from its space.  `share` is the fraction of words that are cut there;
    before other characters, cuts are a fifth as frequent.  The model thus sees each word in several
    tokenizations, also in that of the beginning of a line (subword regularization; Kudo 2018).
    A zero byte is inserted at each cut, because no merge contains one.  The ids of the inserted
    bytes are then removed; zero bytes of the text itself keep their ids.
    follows: whether the text follows other tokens"""
    encode = tokenizer.encode_after if follows else tokenizer.encode
    if not share:
        return encode(text)
    x = np.frombuffer(text, np.uint8)
    n = rng.binomial(len(x), share)
    if not n:
        return encode(text)
    at = rng.integers(len(x), size=n)                                # each word has one place
    after_blank = x[at - 1] == 32                                    # that is right after a blank
    begins_character = x[at] & 0xC0 != 0x80
    at = at[begins_character & (after_blank | (rng.random(len(at)) < 0.2))]
    if not len(at):
        return encode(text)
    at = np.unique(at)
    cut = np.insert(x, at, 0)
    ids = encode(cut.tobytes())
    is_inserted = ids == tokenizer.byte_token(b"\0")
    if not x.all():                          # the text itself has zero bytes
        of_zeros = np.insert(np.zeros(len(x), bool), at, True)[cut == 0]
        if is_inserted.sum() == len(of_zeros):
            is_inserted[is_inserted] = of_zeros
    if is_inserted.sum() != len(at):         # a third-party merge contains a zero byte: no cuts
        return encode(text)
    return ids[~is_inserted]

def encode_large(tokenizer, text, share, rng, dtype, folder, begins):
    """`begins` and the token ids of a text, by `encode_cut`, memory-mapped from a temporary file
    without a name.  At most about TEXT_AT_ONCE bytes are encoded at once, so neither the whole text
    nor all ids need to fit into memory."""
    with tempfile.TemporaryFile(dir=folder) as f:
        f.write(np.array(begins, dtype))
        start, n = 0, len(begins)
        while start < len(text):
            end = bpe.next_cut(text, min(start + TEXT_AT_ONCE, len(text)))
            ids = encode_cut(tokenizer, text[start:end], share, rng)
            f.write(ids.astype(dtype))
            start, n = end, n + len(ids)
        f.flush()
        return np.memmap(f, dtype, "r", shape=n) if n else np.zeros(0, dtype)

@contextlib.contextmanager
def replacing_cache(path):
    """A block that reads a cache of tokens and returns.  After it, the caller makes the cache anew:
    it is missing, or a note says what is wrong with it."""
    try:
        with reading(path, "the text is tokenized again"):
            yield
    except UserError as e:
        if os.path.lexists(path):
            note(f"{e}")

def checked_ids(ids, vocab_size):
    """The token ids of a cache, which must be those of this tokenizer.  Blocks of them are read one
    after another, as in `blocks_of`."""
    need(ids.ndim == 1, f"expected a list of token ids, found {ids.ndim} dimensions")
    for start in range(0, len(ids), BLOCK):
        block = ids[start:start + BLOCK]
        for found in int(block.min()), int(block.max()):
            need(0 <= found < vocab_size, f"expected token ids from 0 to {vocab_size - 1:,}, found "
                 f"{found:,}")
        release_pages(ids)
    return ids

def tokenize(path, parts, tokenizer, text_sha256, cuts=0.0, seed=0):
    """Token ids of the training part and of the validation part of the text at `path`.
    parts: both parts, bytes.  cuts: the `share` of `encode_cut`, for the training part only.
    The ids of a large text are cached in a file beside the text and memory-mapped.  The name of
    the file depends on the text, the tokenizer, the split and the cuts."""
    train, val = parts
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32
    remedy = "free disk space, or move the text to a disk with more space"

    def encoded():
        rng = np.random.default_rng(seed)
        if len(train) <= TEXT_AT_ONCE:
            ids = encode_cut(tokenizer, train, cuts, rng)
            return np.append(np.array(tokenizer.begins, ids.dtype), ids), tokenizer.encode(val)
        folder = os.path.dirname(os.path.abspath(path))
        with reading(folder, remedy):
            return [encode_large(tokenizer, text, share, rng, dtype, folder, begins)
                    for text, share, begins in ((train, cuts, tokenizer.begins), (val, 0.0, ()))]

    if len(train) + len(val) <= LARGE:
        return encoded()
    meta = {"format": "nanoeuler tokens", "text_sha256": text_sha256,
            "tokenizer_sha256": tokenizer.hash(), "train_bytes": str(len(train)),
            "cuts": str((cuts, seed) if cuts else cuts)}         # the seed matters only with cuts
    cache = f"{path}.{hashlib.sha256(json.dumps(meta).encode()).hexdigest()[:12]}.tokens"
    with replacing_cache(cache):
        kept_meta, tensors = map_tensors(cache, TOKEN_KINDS)
        need(meta.items() <= kept_meta.items(), "it belongs to another text")
        return [checked_ids(tensors[name], tokenizer.vocab_size) for name in ("train", "val")]
    print(printable(f"tokenizing {path} once; the tokens are cached in {cache}"), flush=True)
    train_ids, val_ids = (ids.astype(dtype, copy=False) for ids in encoded())
    try:
        write_tensors(cache, meta, dict(train=train_ids, val=val_ids), remedy)
    except UserError as e:                   # no write permission, or another run fills the disk
        note(f"{e}")
    return train_ids, val_ids

class PlainText:
    """One text file as training text.  The last fraction `holdout` is for validation.
    A Corpus (corpora.py) has the same attributes and methods."""

    def __init__(self, path, holdout):
        if os.path.getsize(path) > LARGE // 2:
            print(printable(f"reading {path}"), flush=True)      # this takes a while
        if path.endswith((".json", ".csv", ".tsv")):
            note(f"{path} is read as plain text; to train on examples, use sft")
        self.path, text = path, read_text(path)
        self.sha256 = hashlib.sha256(text).hexdigest()
        self.parts = split_text(memoryview(text), holdout)
        self.train_bytes, self.tail_bytes = map(len, self.parts)

    def described(self):
        return f"{self.path}, {self.train_bytes + self.tail_bytes:,} bytes"

    def excerpt(self):
        return excerpt(self.parts[0])

    def encode(self, tokenizer, end, cuts, seed):
        """Sets `train` and `tail`, the token ids of both parts.  The tail begins with the last
        training token, from which its first token is predicted."""
        self.train, val = tokenize(self.path, self.parts, tokenizer, self.sha256, cuts, seed)
        self.tail = np.append(self.train[-1:], val)

def record_lines(text):
    """The lines of a file of records (JSON lines), bytes or str.  A record ends at \\n alone.
    `splitlines` of str would also cut at U+0085, U+2028 and U+2029, which JSON allows inside a
    string."""
    lines = text.split(b"\n" if isinstance(text, bytes) else "\n")
    return lines if lines[-1] else lines[:-1]

def json_beginning(value, most):
    """The first `most` characters of a value's JSON text.  A large value takes no longer than a
    small one: nothing after these characters is encoded."""
    def pieces(value):
        if isinstance(value, dict | list):
            opening, closing = "{}" if isinstance(value, dict) else "[]"
            for i, member in enumerate(value):
                yield ", " if i else opening
                if opening == "{":
                    yield from (*pieces(member), ": ")
                    member = value[member]
                yield from pieces(member)
            yield closing if value else opening + closing
        else:
            if isinstance(value, str):
                value = value[:most]         # its quotes make it longer than `most` again
            yield json.dumps(value, ensure_ascii=False)

    text = ""
    for piece in pieces(value):
        text += piece
        if len(text) >= most:
            break
    return text[:most]

def parse_json(text, line=1):
    """The value of a JSON text.  Errors give the place, and name the most common mistakes.
    line: number of the text's first line in its file"""
    try:
        return json.loads(text)
    except UnicodeDecodeError as e:
        raise ValueError(f"it is not valid UTF-8 at byte {e.start}; save it as UTF-8") from None
    except json.JSONDecodeError as e:
        comma = " (after a comma)" if e.doc[:e.pos].rstrip().endswith(",") else ""
        found = repr(e.doc[e.pos:e.pos + 20]) if e.doc[e.pos:].strip() else "the end"
        raise ValueError(f"{e.msg}{comma}: line {e.lineno + line - 1}, column {e.colno}, found "
                         f"{found}") from None
    except ValueError as e:
        raise ValueError(bpe.cause_of(e)) from None
