"""Training texts of many documents: folders, several files, compressed files, JSON lines, Parquet.

A corpus may be larger than memory, so it is read as a stream of bytes.  Each document is followed
by the byte 0xFF, which no valid UTF-8 text contains.  For the tokenizer that byte is a word of its
own.  Its token becomes the end token.  The last part of the stream is held out.

The stream is read twice: once to measure it and to take an excerpt for the tokenizer, and once to
tokenize it.  Tokens are appended to a file, and a second file counts the finished chunks.  An
interrupted run continues after the last finished chunk.
"""
import bz2
import codecs
import contextlib
import glob
import gzip
import hashlib
import io
import json
import lzma
import os
import time
import zlib

import numpy as np

import bpe
from bpe import need, note, reading, regular, UserError
from nanoeuler_parts.files.logs import lock
from nanoeuler_parts.files.safetensors import map_tensors, TOKEN_KINDS, write_tensors
from nanoeuler_parts.files.texts import (
    AS_BYTES, checked_ids, encode_cut, LARGE, parse_json, PlainText, replacing_cache,
)
from nanoeuler_parts.files.writing import replacing

END = b"\xff"                # follows each document
NO_CHARACTER = "\ufffd".encode()             # replaces a byte 0xFF of an invalid text
PIECE = 1 << 20              # bytes that are read at once
CHUNK = 32 << 20             # bytes that are encoded at once
LONGEST_LINE = 256 << 20     # bytes of a line of JSON
BLOCKS = 512                 # the largest number of blocks of an excerpt
MOST_SILENT = 10             # seconds between lines about the progress

PACKED = ".gz", ".xz", ".bz2", ".zst"
RECORDS = ".jsonl", ".ndjson", ".parquet"    # files of records; a field of each is the document

def kind_of(path):
    """(suffix of the file's format, suffix of its compression); "" for none"""
    stem, packed = os.path.splitext(path)
    if packed.lower() not in PACKED:
        stem, packed = path, ""
    return os.path.splitext(stem)[1].lower(), packed.lower()

def is_corpus(names):
    """Do these names stand for more than one plain text file?"""
    kind, packed = kind_of(names[0])
    return len(names) > 1 or not os.path.isfile(names[0]) or packed != "" or kind in RECORDS

def files_in(name):
    """[(path, name for the order)] of a file, of a folder with its subfolders, or of a pattern.
    Hidden files are left out, and so are links to folders inside a folder.  A pattern finds each
    file once, although ** follows links, also in circles.  The files of a folder or a pattern are
    sorted by a hash of their names.  In this pseudo-random order, the part held out at the end is a
    fair sample."""
    if os.path.isfile(name):
        return [(name, os.path.basename(name))]
    found = []
    if os.path.isdir(name):
        for folder, folders, files in os.walk(name):
            folders[:] = [x for x in folders if not x.startswith(".")]
            paths = [os.path.join(folder, x) for x in files if not x.startswith(".")]
            found += [(path, os.path.relpath(path, name)) for path in paths]
    else:
        there = "" if os.path.isabs(name) else f" in {os.getcwd()}"
        need(os.path.exists(name) or glob.has_magic(name), f"{name}: No such file{there}; check "
             f"the path, or name other data with --data")
        paths = sorted(glob.glob(name, recursive=True), reverse=True)
        found = [*{os.path.realpath(path): (path, path) for path in paths}.values()]
    found = [(path, shown) for path, shown in found if os.path.isfile(path)]
    need(found, f"{name}: expected files, found none; name others with --data")
    return sorted(found, key=lambda x: hashlib.sha256(os.fsencode(x[1])).digest())

def unpacked(path):
    """The file, opened for reading bytes, without its compression"""
    packed = kind_of(path)[1]
    if packed == ".zst":
        import pyarrow
        return io.BufferedReader(pyarrow.input_stream(path, compression="zstd"), PIECE)
    f = open(path, "rb", opener=regular)
    opening = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}.get(packed)
    return opening(f) if opening else f

@contextlib.contextmanager
def unpacking():
    """Turns the errors of damaged compressed files into a ValueError."""
    try:
        yield
    except (EOFError, lzma.LZMAError, zlib.error) as e:
        raise ValueError(f"the compressed file is damaged or incomplete ({e})") from None

@contextlib.contextmanager
def reading_corpus(path):
    with reading(path, "correct this file, or name others with --data"), unpacking():
        yield

def document_in(record, field):
    """The document in a record of JSON: the record itself if it is a text, else its field"""
    if isinstance(record, str):
        return record
    need(isinstance(record, dict), f"expected an object or a text, found {type(record).__name__}")
    name = name_among(field, record)
    text = record[name]
    need(text is None or isinstance(text, str), f"{name} is {text!r:.40}, expected a text")
    return text or ""

OF_EXAMPLES = {"instruction", "prompt", "messages", "conversations", "chosen"}

def name_among(field, names):
    """The first of the names in `field`, separated by commas, that is among these names"""
    found = [name for name in field.split(",") if name in names]
    examples = ", or learn from these examples with sft or dpo" if OF_EXAMPLES & {*names} else ""
    need(found, f"expected the field {' or '.join(field.split(','))}, found "
         f"{', '.join(map(str, names)) or 'none':.80}; choose one of these with --field{examples}")
    return found[0]

def documents_of_lines(path, field):
    with unpacked(path) as f:
        number = 0
        while line := f.readline(LONGEST_LINE):
            number += 1
            need(len(line) < LONGEST_LINE, f"line {number} is longer than {LONGEST_LINE:,} bytes")
            if line.strip():
                try:
                    text = document_in(parse_json(line), field)
                    yield text.encode()
                except ValueError as e:      # a UserError, or a lone surrogate
                    raise UserError(f"line {number}: {e}") from None

def documents_of_parquet(path, field):
    import pyarrow.parquet
    with pyarrow.parquet.ParquetFile(path) as f:
        field = name_among(field, f.schema_arrow.names)
        for batch in f.iter_batches(batch_size=1000, columns=[field]):
            for text in batch.column(0).to_pylist():
                yield document_in({field: text}, field).encode()

def pieces_of_text(path, in_folder):
    """The bytes of a text file, in pieces.  A binary file has a zero byte: if the file was found in
    a folder, it counts as empty, else it is rejected."""
    with unpacked(path) as f:
        start = 0
        while piece := f.read(PIECE):
            zero = piece.find(b"\0")
            if zero >= 0 and start == 0 and in_folder:
                return
            need(zero < 0, f"expected text, found a zero byte at position {start + zero}")
            yield piece.removeprefix(codecs.BOM_UTF8) if start == 0 else piece
            start += len(piece)

def unix_newlines(pieces):
    """The pieces with CR LF replaced by LF, also where a piece ends between the two"""
    held = b""
    for piece in pieces:
        piece = held + piece
        held = b"\r" if piece.endswith(b"\r") else b""
        yield piece.removesuffix(held).replace(b"\r\n", b"\n")
    yield held

def stream_of(path, in_folder, field, newlines):
    """The part of the stream that a file makes.  Empty documents are left out."""
    kind = kind_of(path)[0]
    with reading_corpus(path):
        documents = [pieces_of_text(path, in_folder)]    # each an iterable of pieces
        if kind in RECORDS:
            read = documents_of_parquet if kind == ".parquet" else documents_of_lines
            documents = ([document] for document in read(path, field))
        for pieces in documents:
            is_empty = True
            for piece in unix_newlines(pieces) if newlines == "unix" else pieces:
                if piece:
                    is_empty = False
                    yield piece.replace(END, NO_CHARACTER)
            if not is_empty:
                yield END

def divided(stream, cut):
    """Yields (piece, whether it is held out).  The held-out part begins with the first character at
    or after the position `cut`."""
    start, held = 0, False
    for piece in stream:
        end = start + len(piece)
        if not held and end > cut:
            at = max(0, cut - start)
            while at < len(piece) and piece[at] & 0xC0 == 0x80:  # a UTF-8 continuation byte
                at += 1
            if at:
                yield piece[:at], False
            held, piece = at < len(piece), piece[at:]
        if piece:
            yield piece, held
        start = end

def last_cut(text):
    """The last position where `text` may be split into parts that are encoded separately: after a
    document, or where `bpe.next_cut` splits.  0 if text has no such position."""
    for start in (max(0, len(text) - (1 << 16)), 0):
        cuts = [found.end() for found in bpe.CUT.finditer(text, start)]
        if at := max(text.rfind(END, start) + 1, *cuts[-1:], 0):
            return at
    return 0

def chunks_of(stream, cut):
    """Yields (chunk, whether it is held out): the stream in chunks of about CHUNK bytes, which can
    be encoded separately.  A text without blanks is cut anyway, before it fills the memory."""
    buffer, part, enough = bytearray(), False, CHUNK
    for piece, held in divided(stream, cut):
        if held != part and buffer:
            yield bytes(buffer), part
            buffer.clear()
        part = held
        buffer += piece
        if len(buffer) >= enough:
            at = last_cut(buffer)
            if at or enough >= 4 * CHUNK:
                yield bytes(buffer[:at or None]), part
                del buffer[:at or None]
                enough = CHUNK
            else:
                enough *= 2                  # a search takes long, so not one for each piece
    if buffer:
        yield bytes(buffer), part

class Progress:
    """Prints how much of a long job is done, about every MOST_SILENT seconds."""

    def __init__(self, doing, total):
        self.doing, self.total, self.done = doing, total, 0
        self.printed = time.perf_counter()

    def add(self, n):
        self.done += n
        if time.perf_counter() - self.printed > MOST_SILENT:
            self.printed = time.perf_counter()
            of = f" of {self.total / 1e6:,.0f}" if self.total else ""
            print(f"{bpe.printable(self.doing)}: {self.done / 1e6:,.0f}{of} MB", flush=True)

class Excerpt:
    """Blocks of a stream whose length is unknown, spread evenly: the first of every `stride`
    blocks.  The stride doubles when there are more than BLOCKS of them."""

    def __init__(self):
        self.blocks, self.stride, self.n = [], 1, 0      # n: bytes so far
        self.size = LARGE // BLOCKS

    def add(self, piece):
        piece = memoryview(piece)            # a slice of it is no copy
        while piece:
            number, at = divmod(self.n, self.size)
            part, piece = piece[:self.size - at], piece[self.size - at:]
            self.n += len(part)
            if number % self.stride:
                continue
            if at == 0:
                if len(self.blocks) == BLOCKS:
                    self.blocks, self.stride = self.blocks[::2], 2 * self.stride
                    if number % self.stride:
                        continue
                self.blocks.append(bytearray())
            self.blocks[-1] += part

    def text(self, cut):
        """The excerpt of the first `cut` bytes.  Where blocks are missing, lines are whole."""
        if self.stride == 1:
            return b"".join(self.blocks)[:cut]
        whole = self.blocks[:max(1, cut // (self.size * self.stride))]
        return b"".join(x[x.find(b"\n") + 1:x.rfind(b"\n") + 1] or x for x in whole)

def marker_of(tokenizer, end):
    """The id of the byte END, which becomes `end`, the id of the end token"""
    need(end >= 0, "the model's tokenizer has no end token to separate documents; name a single "
         "text with --data")
    token = tokenizer.byte_token(END)
    need(token is not None, "the model's tokenizer has no token for the byte 0xFF, which separates "
         "documents here; name a single text with --data")
    return token

def with_begins(ids, end, begins, first):
    """The ids with `begins` before each document: after each `end`, and at the beginning of the
    first chunk"""
    at = np.flatnonzero(ids == end) + 1
    at = np.insert(at, 0, 0) if first else at
    return np.insert(ids, np.repeat(at, len(begins)), np.tile(begins, len(at)))

class Corpus:
    """The documents of these names: files, folders and patterns.  field: of the documents in JSON
    and Parquet; newlines: "unix" converts CR LF to LF; holdout: the fraction held out at the end"""

    def __init__(self, names, field, newlines, holdout):
        self.names, self.field, self.newlines, self.holdout = names, field, newlines, holdout
        self.files, self.listing = [], []    # (path, is it from a folder); what identifies a file
        for name in names:
            for path, shown in files_in(name):
                info = os.stat(path)
                self.files.append((path, os.path.isdir(name)))
                self.listing.append([shown, info.st_size, info.st_mtime_ns])
        self.measure()

    def stream(self):
        """Reads the stream again.  Raises a UserError if it is not the one that was measured."""
        digest = hashlib.sha256()
        for path, in_folder in self.files:
            for piece in stream_of(path, in_folder, self.field, self.newlines):
                digest.update(piece)
                yield piece
        need(digest.hexdigest() == self.sha256, f"{', '.join(self.names)}: expected the same text "
             f"twice, found another one the second time; start again when nothing writes it")

    def chunks(self):
        return chunks_of(self.stream(), self.cut)

    def measure(self):
        """Reads the stream once: its digest, its length, an excerpt, and whether it is UTF-8."""
        digest, self.sample, self.n_documents = hashlib.sha256(), Excerpt(), 0
        left_out, invalid = [], ""
        on_disk = sum(size for _, size, _ in self.listing)
        size = f"{on_disk / 1e6:,.1f} MB" if on_disk >= 1e5 else f"{on_disk:,} bytes"
        print(bpe.printable(f"reading {', '.join(self.names)}: {size}"), flush=True)
        progress = Progress("read", None)
        for path, in_folder in self.files:
            decoder, start = codecs.getincrementaldecoder("utf-8")(), self.sample.n
            for piece in stream_of(path, in_folder, self.field, self.newlines):
                digest.update(piece)
                self.sample.add(piece)
                progress.add(len(piece))
                if piece == END:
                    self.n_documents += 1
                elif not invalid:
                    try:
                        decoder.decode(piece)
                    except UnicodeDecodeError:
                        invalid = path
            if self.sample.n == start:
                left_out.append(path)
        self.sha256, self.n, self.n_files = digest.hexdigest(), self.sample.n, (
            len(self.files) - len(left_out))
        need(self.n, f"{', '.join(self.names)}: expected text, found none; name other files with "
             f"--data")
        self.cut = int(self.n * (1 - self.holdout))      # the held-out part begins here
        if left_out:
            note(f"{len(left_out):,} of {len(self.files):,} files are empty or binary and "
                 f"are left out, for example {left_out[0]}")
        if invalid:
            note(f"{invalid} is not valid UTF-8; {AS_BYTES}")

    def described(self):
        return (f"{', '.join(self.names)} (files: {self.n_files:,}, documents: "
                f"{self.n_documents:,}), {self.n - self.n_documents:,} bytes")

    def excerpt(self):
        """At most LARGE bytes of the part for training"""
        return self.sample.text(self.cut)

    def encode(self, tokenizer, end, cuts, seed):
        """Sets `train` and `tail`, the token ids of both parts, and `train_bytes` and `tail_bytes`,
        without the bytes END.  The tail begins with the last training token, from which its first
        token is predicted.  The tokens of a large corpus are cached and memory-mapped.
        end: the id that ends a document; cuts: the share of `encode_cut`, for training only"""
        marker = marker_of(tokenizer, end)

        def encode_chunk(i, chunk, held):
            rng = np.random.default_rng([seed, i])
            ids = encode_cut(tokenizer, chunk, 0 if held else cuts, rng)
            ids[ids == marker] = end
            return with_begins(ids, end, tokenizer.begins, i == 0)

        if self.n <= LARGE:
            ids, count = [], dict.fromkeys(COUNTS, 0)
            for i, (chunk, held) in enumerate(self.chunks()):
                ids.append(encode_chunk(i, chunk, held))
                add_chunk(count, ids[-1], chunk, held)
            return self.use(np.concatenate(ids), count)
        key = json.dumps([self.sha256, self.listing, self.field, self.newlines, self.holdout,
                          tokenizer.hash(), end, (cuts, seed) if cuts else 0])   # else no seed
        key = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
        meta = {"format": "nanoeuler tokens", "text_sha256": self.sha256, "key": key}
        cache = f"{self.place()}.{key[:12]}.tokens"
        with replacing_cache(cache):
            return self.use_cache(cache, meta, tokenizer.vocab_size)
        print(bpe.printable(f"tokenizing {self.n / 1e6:,.0f} MB once; the tokens are cached in "
                            f"{cache}"), flush=True)
        remedy = "free disk space, or move the text to a disk with more space"
        dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32)
        part, journal = f"{cache}.part", f"{cache}.part.json"
        try:
            with open(part, "ab", opener=bpe.private_as(cache)) as f:
                need(lock(f), "another run writes these tokens; wait until it has ended")
                count = self.append_tokens(f, journal, key, encode_chunk, dtype)
                tokens = np.memmap(part, dtype, "r", shape=count["tokens"])
                counts = {name: str(count[name]) for name in COUNTS}
                write_tensors(cache, meta | counts, {"tokens": tokens}, remedy)
                for path in part, journal:
                    os.remove(path)
        except OSError as e:                 # errors of the text are UserErrors
            raise UserError(f"cannot write {part}: {e.strerror or e}; {remedy}") from None
        with reading(cache, "start again"):
            self.use_cache(cache, meta, tokenizer.vocab_size)

    def append_tokens(self, f, journal, key, encode_chunk, dtype):
        """Appends the tokens of all chunks to the file f.  The journal counts what is finished, so
        a second call continues after the last finished chunk.  Returns the counts."""
        count = {"key": key, "chunks": 0, **dict.fromkeys(COUNTS, 0)}
        with contextlib.suppress(UserError), reading(journal, "start again"):
            kept, size = json.loads(bpe.read_bytes(journal)), os.fstat(f.fileno()).st_size
            numbers = [kept[name] for name in ("chunks", *COUNTS)]
            need(kept["key"] == key and all(type(n) is int and n >= 0 for n in numbers) and
                 size >= kept["tokens"] * dtype.itemsize, "it belongs to another file")
            count = kept
        f.truncate(count["tokens"] * dtype.itemsize)
        progress = Progress("tokenized", self.n)
        for i, (chunk, held) in enumerate(self.chunks()):
            progress.add(len(chunk))
            if i < count["chunks"]:          # finished before an interruption
                continue
            ids = encode_chunk(i, chunk, held)
            f.write(ids.astype(dtype))
            f.flush()
            os.fsync(f.fileno())
            count["chunks"] = i + 1
            add_chunk(count, ids, chunk, held)
            with replacing(journal, "free disk space") as name, open(name, "w", encoding="utf-8"
                                                                     ) as written:
                json.dump(count, written)
        return count

    def use_cache(self, cache, meta, vocab_size):
        """Takes the tokens in a cache.  Raises an error if there is no cache with this `meta`"""
        kept, tensors = map_tensors(cache, TOKEN_KINDS)
        need(meta.items() <= kept.items(), "it belongs to another corpus")
        ids = checked_ids(tensors["tokens"], vocab_size)
        count = {name: int(kept[name]) for name in COUNTS}
        need(0 <= count["train_tokens"] <= count["tokens"] == len(ids) and
             min(count.values()) >= 0, f"expected the counts of {len(ids):,} tokens, found "
             f"{', '.join(map(str, count.values()))}")
        self.use(ids, count)

    def use(self, tokens, count):
        n = count["train_tokens"]
        self.train, self.tail = tokens[:n], tokens[max(0, n - 1):]
        self.train_bytes, self.tail_bytes = count["train_bytes"], count["tail_bytes"]

    def place(self):
        """The beginning of the name of the cache: beside the first name if that folder is
        writable, else in this folder"""
        path = os.path.abspath(self.names[0])
        while glob.has_magic(path) and not os.path.exists(path):     # a pattern: beside the folder
            path = os.path.dirname(path)                             # that it searches
        folder, name = os.path.split(path)
        return path if os.access(folder, os.W_OK) else name

# Counts of tokens and of bytes, without the bytes END
COUNTS = "tokens", "train_tokens", "train_bytes", "tail_bytes"

def add_chunk(count, ids, chunk, held):
    """Adds a chunk to the COUNTS."""
    count["tokens"] += len(ids)
    count["train_tokens"] += 0 if held else len(ids)
    count["tail_bytes" if held else "train_bytes"] += len(chunk) - chunk.count(END)

def open_text(names, field, newlines, holdout):
    """The training text of these names: a PlainText, or a Corpus of documents.  The last fraction
    `holdout` is for validation."""
    names = names.split("\n")
    if is_corpus(names) or newlines:
        return Corpus(names, field, newlines, holdout)
    return PlainText(names[0], holdout)
