"""Files of tensors, by hand, and files that are replaced as a whole.

A safetensors file is 8 bytes of header length, a JSON header, raw little-endian numbers.  Ours hold
a checksum, "sha256", of all, with itself zeroed.
"""
import contextlib
import hashlib
import json
import os

import numpy as np

from bpe import UserError, need

NO_HASH = "0" * 64
DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"),
          "U16": np.dtype("<u2"), "I32": np.dtype("<i4")}
CODES = {dtype: code for code, dtype in DTYPES.items()}         # a uint16 of ours is no BF16

@contextlib.contextmanager
def replacing(path, remedy):
    """All or nothing: what is written under the name it yields is flushed, then takes the path."""
    path = os.path.realpath(path)            # a link stays one
    temporary = f"{path}.tmp"
    try:
        yield temporary
        with open(temporary, "rb+") as f:
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError as e:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise UserError(f"cannot write {path}: {e.strerror}; an older file there is untouched; "
                        f"{remedy}") from None

def write_tensors(path, meta, tensors, remedy):
    """A safetensors file of {name: array}."""
    entries, end = {"__metadata__": {**meta, "sha256": NO_HASH}}, 0
    for name, x in tensors.items():
        start, end = end, end + x.nbytes
        entries[name] = {"dtype": CODES[x.dtype], "shape": [*x.shape], "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % 64)           # the data starts on a cache line
    digest = hashlib.sha256(header)
    for x in tensors.values():
        digest.update(x)
    start, _, rest = header.rpartition(NO_HASH.encode())
    with replacing(path, remedy) as temporary, open(temporary, "wb") as f:
        f.write(len(header).to_bytes(8, "little") + start + digest.hexdigest().encode() + rest)
        for x in tensors.values():
            f.write(x)

def map_tensors(path):
    """(metadata, {name: array}) of a safetensors file, ours or another's; maps it into memory.
    No size in the header is believed until the file is known to be that long."""
    with open(path, "rb") as f:
        size, length = os.fstat(f.fileno()).st_size, int.from_bytes(f.read(8), "little")
        need(length <= min(size - 8, 100_000_000), f"{length} bytes of header, {size} in all")
        header, tensors = f.read(length), {}
        data = np.memmap(f, np.uint8, "r", offset=f.tell())
    entries = json.loads(header)
    meta = entries.pop("__metadata__", {})
    for name, t in entries.items():
        need(t["dtype"] in DTYPES, f"{name} is of type {t['dtype']}, expected F32, F16 or BF16")
        x = data[slice(*t["data_offsets"])].view(DTYPES[t["dtype"]])
        tensors[name] = x.reshape(t["shape"])
    end = sum(x.nbytes for x in tensors.values())
    need(end == data.size, f"{data.size} bytes of data, expected {end}")
    if "sha256" in meta:
        digest = hashlib.sha256(header.replace(meta["sha256"].encode(), NO_HASH.encode(), 1))
        digest.update(data)
        need(digest.hexdigest() == meta["sha256"], "its checksum does not match, it is damaged")
    return meta, tensors
