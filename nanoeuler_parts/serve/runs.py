"""The logs of training runs, for the training page: those of a folder, and those that are named.

Whatever is in the folder is untrusted.  Only regular files are opened, a bounded part of them is
read, and only records of the form that a run writes are passed on.  A record says how many steps
are planned, so no checkpoint is read."""
import os
import pathlib

from bpe import regular
from nanoeuler_parts.files.logs import parse_record

MOST_LOGS = 500              # the newest ones
MOST_BYTES = 1 << 20         # of a log, at a time
LONGEST_TEXT, MOST_HEADS = 1 << 16, 64       # characters of a sample; losses in a record


def opened(path):
    """A regular file, opened to read its bytes; OSError if it is anything else."""
    return open(path, "rb", opener=regular)


def valid(value):
    """Whether a run writes such a value into its log"""
    if isinstance(value, str):
        return len(value) <= LONGEST_TEXT
    if isinstance(value, list):
        return len(value) <= MOST_HEADS and all(isinstance(x, int | float | None) for x in value)
    return isinstance(value, int | float | None)


def record_in(line):
    """The record of a step in a line of a log, without anything that no run writes; None if the
    line holds no record."""
    record = parse_record(line)
    if record is None or not 0 <= record["step"] < 1 << 53:
        return None
    return {name: value for name, value in record.items() if len(name) <= 64 and valid(value)}


class Runs:
    """The logs that may be read: a name that is not in the list opens no file."""

    def __init__(self, folder, named=()):
        self.folder = pathlib.Path(folder)
        self.named = [pathlib.Path(path) for path in named]
        self.known = {}                      # of a file as it is now: is it a log?

    def paths(self):
        """{name: path}, the newest first"""
        dated = {}
        for path in (*self.named, *self.folder.glob("*.jsonl")):
            try:
                dated[self.name_of(path)] = path.stat().st_mtime, path
            except OSError:                  # it went away
                continue
        newest = sorted(dated.items(), key=lambda item: -item[1][0])[:MOST_LOGS]
        files = {path for _, (_, path) in newest}
        self.known = {key: value for key, value in self.known.items() if key[0] in files}
        return {name: path for name, (_, path) in newest if self.is_log(path)}

    def name_of(self, path):
        """What the page calls it: text, also where the name of a file is none"""
        here = path.resolve().parent == self.folder.resolve()
        return os.fsencode(path.name if here else path).decode("utf-8", "backslashreplace")

    def is_log(self, path):
        """Whether its first line is the record of a step.  A file of prompts has the same ending.
        It is read once, until the file changes: the page asks every two seconds."""
        try:
            with opened(path) as f:
                s = os.fstat(f.fileno())
                key = path, s.st_ino, s.st_size, s.st_mtime_ns
                if key not in self.known:
                    record = record_in(f.readline(1 << 16).decode("utf-8", "replace"))
                    self.known[key] = bool({"loss", "val_bits_per_byte"} & {*(record or ())})
                return self.known[key]
        except OSError:
            return False

    def listed(self, gone=None):
        found = []
        for name, path in self.paths().items():
            try:
                s = path.stat()
            except OSError:
                continue
            found.append({"name": name, "bytes": s.st_size, "changed": s.st_mtime})
        return found

    def read(self, name, start, gone=None):
        """Records from a byte on, and where the next begin; None: there is no such log.  A log that
        has become shorter was begun anew, and is read from its start."""
        path = self.paths().get(name)
        if path is None:
            return None
        try:
            with opened(path) as f:
                size = os.fstat(f.fileno()).st_size
                anew = start > size
                start = 0 if anew else start
                f.seek(start)
                raw = f.read(MOST_BYTES)
        except OSError:                      # it went away just now
            return None
        whole = raw[:raw.rfind(b"\n") + 1]   # the last line may be half written
        if not whole and len(raw) == MOST_BYTES:         # no run writes such a line: it is skipped
            whole = raw
        end = start + len(whole)
        records = map(record_in, whole.decode("utf-8", "replace").splitlines())
        return {"records": [r for r in records if r], "next": end, "anew": anew,
                "more": end < size and bool(whole)}
