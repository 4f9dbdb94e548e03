"""The safetensors container: 8 bytes with the length of the header, a JSON header, raw numbers.

All numbers are little-endian.  A header is untrusted input and is checked before use.  Files that
this program wrote have a checksum of header and data.  Checkpoints, token files and models of other
programs are read and written here.
"""
import errno
import hashlib
import json
import math
import mmap
import os
import sys
from typing import NamedTuple

import numpy as np

from bpe import need, printable, regular, UserError
from nanoeuler_parts.files.writing import replacing, WriteError

# A checkpoint is a safetensors file.  Its tensors are slices of the flat buffer and have the names
# of a LlamaForCausalLM.  The data of the file is therefore the flat buffer itself.  Heads 1 and up,
# the moments and the reference of dpo have names of their own.
DTYPES = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"),
          "BF16": np.dtype("<u2"), "U16": np.dtype("<u2"), "I32": np.dtype("<i4"),
          "I8": np.dtype("i1")}
OF_WEIGHTS = "F32", "F16", "BF16", "I8"
OF_CHECKPOINTS = *OF_WEIGHTS, "F64"         # F64: the reference of dpo
TOKEN_KINDS = "U16", "I32"   # dtypes of a token file
CODES = {dtype: code for code, dtype in DTYPES.items()}         # uint16: U16, the later entry
NO_HASH = "0" * 64           # stands in for the checksum while the checksum is computed
MAX_HEADER = 100_000_000     # bytes

AGAIN = "copy or download it again"

def cut_short(size, end):
    return f"the file is incomplete or damaged (found {size:,} of {end:,} bytes); {AGAIN}"

MUCH = 100_000_000           # bytes; reading them takes a second or more

def note_large(doing, n_bytes):
    """Prints a line before a long wait, so that the program does not seem to hang."""
    if n_bytes >= MUCH:
        print(f"{printable(doing)}: {n_bytes / 1e6:,.0f} MB", file=sys.stderr, flush=True)

BLOCK = 1 << 24              # bytes that are read, hashed or written at once

class Computed(NamedTuple):
    """A tensor that is computed while it is written, a few rows at a time"""
    dtype: np.dtype
    shape: tuple
    rows: object             # function (start, stop): these rows, as an array
    at_once: int             # number of rows

    @property
    def nbytes(self):
        return math.prod(self.shape) * self.dtype.itemsize

def release_pages(x):
    """Removes the pages of a memory-mapped file from memory.  The next access reads them again."""
    mapped = getattr(x, "_mmap", None)       # of an np.memmap that was not computed
    if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):        # not on Windows
        mapped.madvise(mmap.MADV_DONTNEED)

def need_whole(x):
    """Raises OSError if x is memory-mapped from a file that has become shorter since then.  Reading
    past the end of the file would end the process with a signal (SIGBUS).  One call of fstat."""
    mapped = getattr(x, "_mmap", None)
    if mapped is None:
        return
    needed = x.offset - x.offset % mmap.ALLOCATIONGRANULARITY + len(mapped)
    found = mapped.size()
    if found < needed:
        raise OSError(errno.EIO, f"expected {needed:,} bytes, found {found:,}, as the file was cut "
                      f"short while it was in use", x.filename or "a temporary file")

def blocks_of(x):
    """Yields the bytes of an array, or of a Computed tensor, in blocks.  The pages of a file that
    is memory-mapped are released after each block, so a file that is larger than memory does not
    push everything else out of it."""
    if isinstance(x, Computed):
        for start in range(0, x.shape[0], x.at_once):
            stop = min(start + x.at_once, x.shape[0])
            yield np.ascontiguousarray(x.rows(start, stop), x.dtype)
        return
    if getattr(x, "_mmap", None) is None:
        yield x
        return
    data = x.reshape(-1).view(np.uint8)
    for start in range(0, data.size, BLOCK):
        need_whole(x)
        yield data[start:start + BLOCK]
        release_pages(x)

def write_tensors(path, meta, tensors, remedy, of_uint16="U16"):
    """Writes a safetensors file: tensors {name: array or Computed}, metadata {name: text}, and a
    checksum, which is known at the end and overwrites NO_HASH in the header.
    of_uint16: the type of arrays of uint16 in the file; "BF16": their bits are bfloat16"""
    entries = {"__metadata__": {**meta, "sha256": NO_HASH}}
    start = 0
    for name, x in tensors.items():
        end = start + x.nbytes
        code = of_uint16 if x.dtype == np.uint16 else CODES[x.dtype]
        entries[name] = {"dtype": code, "shape": [*x.shape], "data_offsets": [start, end]}
        start = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % 64)           # the data starts on a cache line
    if len(header) > MAX_HEADER:
        raise WriteError(f"{path}: expected a header of at most {MAX_HEADER:,} bytes, found "
                         f"{len(header):,}; {remedy}")
    digest = hashlib.sha256(header)
    with replacing(path, remedy) as temporary, open(temporary, "wb") as f:
        f.write(len(header).to_bytes(8, "little") + header)
        for x in tensors.values():
            for block in blocks_of(x):
                digest.update(block)
                f.write(block)
        f.seek(8 + header.rindex(NO_HASH.encode()))
        f.write(digest.hexdigest().encode())

def is_entry(t):
    """Is it the entry of a tensor in a header?"""
    return isinstance(t, dict) and isinstance(t.get("dtype"), str) and all(
        isinstance(t.get(key), list) and all(type(n) is int and n >= 0 for n in t[key])
        for key in ("shape", "data_offsets")) and len(t["data_offsets"]) == 2

def read_header(f, whole=True):
    """(header, metadata, {name: dtype, shape and data_offsets}, bytes of data) of an open file.
    The file may come from any program, so each size in its header is checked against the file.
    whole: whether its data must be complete"""
    size, first = os.fstat(f.fileno()).st_size, f.read(8)
    need(first[:4] != b"GGUF", "it is a GGUF file; convert it to a checkpoint with `import`")
    length = int.from_bytes(first, "little")
    need(length <= min(size - 8, MAX_HEADER), "expected a checkpoint or another safetensors "
         "file, found another format or an incomplete file")
    header = f.read(length)
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError):
        raise UserError("expected a checkpoint or another safetensors file, found a header that is "
                        "no JSON object") from None
    need(isinstance(entries, dict), f"expected a header with an object of tensors, found "
         f"{entries!r:.40}")
    meta = entries.pop("__metadata__", {})
    need(isinstance(meta, dict) and all(isinstance(x, str) for x in meta.values()),
         f"expected texts in the header's __metadata__, found {meta!r:.40}")
    for name, t in entries.items():
        need(is_entry(t), f"expected a dtype, a shape and two data_offsets for the tensor "
             f"{name:.40}, found {t!r:.80}")
    end = 8 + length + max((t["data_offsets"][1] for t in entries.values()), default=0)
    need(size >= end or not whole, cut_short(size, end))
    return header, meta, entries, size - 8 - length

def need_adjacent(entries, n_bytes):
    """Tensors must fill the n_bytes of data, without gaps."""
    end = 0
    for start, stop in sorted(t["data_offsets"] for t in entries.values()):
        need(start == end <= stop, f"expected a tensor from byte {end} on, found {start} to {stop}")
        end = stop
    need(end == n_bytes, f"expected {end:,} bytes of data, found {n_bytes:,}")

def read_meta(path, whole=True):
    """The metadata of a safetensors file.  The data is not read, so only its size is checked.
    whole: whether the data must be complete"""
    with open(path, "rb", opener=regular) as f:
        _, meta, entries, n_bytes = read_header(f, whole)
    if whole:
        need_adjacent(entries, n_bytes)
    return meta

def map_tensors(path, kinds=OF_CHECKPOINTS):
    """(metadata, {name: array}) of a safetensors file, memory-mapped.
    kinds: the types that its tensors may have"""
    with open(path, "rb", opener=regular) as f:
        header, meta, entries, n_bytes = read_header(f)
        data = np.memmap(f, np.uint8, "r", offset=f.tell()) if n_bytes else (
            np.zeros(0, np.uint8))           # mmap rejects an empty range
    tensors = {}
    for name, t in entries.items():
        need(t["dtype"] in kinds, f"{name} has type {t['dtype']}, expected {', '.join(kinds)}")
        (start, end), dtype = t["data_offsets"], DTYPES[t["dtype"]]
        n_bytes = math.prod(t["shape"]) * dtype.itemsize
        need(start + n_bytes == end, f"expected {n_bytes:,} bytes for {name} of shape "
             f"{t['shape']!s:.40}, found bytes {start} to {end}")
        tensors[name] = data[start:end].view(dtype).reshape(t["shape"])
    need_adjacent(entries, data.size)
    note_large(f"reading {path}", data.size)
    if "sha256" in meta:
        digest = hashlib.sha256(header.replace(meta["sha256"].encode(), NO_HASH.encode(), 1))
        for block in blocks_of(data):
            digest.update(block)
        need(digest.hexdigest() == meta["sha256"],
             f"the checksum does not match, so the file is damaged; {AGAIN}")
    return meta, tensors

def need_finite(name, x, first=0):
    """Raises a UserError that names the first NaN or infinity of a tensor, if there is one.
    first: the row with which x begins
    A finite sum is a quick proof that all entries are finite.  Otherwise each entry is checked."""
    need_whole(x)
    with np.errstate(over="ignore", invalid="ignore"):
        total = x.sum()
    if not np.isfinite(total):
        bad = np.argwhere(~np.isfinite(x)).tolist()
        if bad:                              # otherwise, only the sum overflowed
            at = [bad[0][0] + first, *bad[0][1:]]
            raise UserError(f"{name}{at} is {x[tuple(bad[0])]}, expected a finite number")
