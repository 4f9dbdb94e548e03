"""The logs of training runs, for the training page: the logs in a folder, and the named ones.

The files in the folder are untrusted input.  `Runs` opens only regular files, reads a bounded part
of each, and returns only records of the form that a training run writes.  A record contains the
planned number of steps, so no checkpoint has to be read."""
import contextlib
import heapq
import os
import pathlib
import stat
import time

from bpe import regular
from nanoeuler_parts.files.logs import parse_record, STOPPED
from nanoeuler_parts.files.texts import record_lines

MOST_LOGS = 500              # maximum number of listed logs; the newest are kept
SEARCH_EVERY = 1.0           # seconds between two searches of a folder with more files than that
MOST_BYTES = 1 << 20         # per read of a log
LATEST_BYTES = 1 << 17       # at the end of a log, which are searched for its latest step
LONGEST_TEXT, MOST_HEADS = 1 << 16, 64       # characters of a sample; losses in a record


def opened(path):
    """Opens a regular file to read its bytes.  Raises OSError for anything else."""
    return open(path, "rb", opener=regular)


def readable(path):
    """A path as text.  Bytes that are not UTF-8 become escapes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def valid(value):
    """Whether a training run may write such a value into its log"""
    if isinstance(value, str):
        return len(value) <= LONGEST_TEXT
    if isinstance(value, list):
        return len(value) <= MOST_HEADS and all(isinstance(x, int | float | None) for x in value)
    return isinstance(value, int | float | None)


def record_in(line):
    """The record of a step in a line of a log, without values that no run writes; None if the line
    is not a record."""
    record = parse_record(line)
    if record is None or not 0 <= record["step"] < 1 << 53:
        return None
    return {name: value for name, value in record.items() if len(name) <= 64 and valid(value)}


# Fields of a log's first record: of a step, or of a validation before it
OF_FIRST = {"loss", "val_bits_per_byte", "val_reward"}


def is_log(f):
    """Whether the first line is the record of a step or of a validation.  Files of prompts end in
    .jsonl, too."""
    record = record_in(f.readline(1 << 16).decode("utf-8", "replace"))
    return bool(OF_FIRST & {*(record or ())})


def latest_step(f, size):
    """The latest step in a log: {step, n_steps, ms}, and stopped if the run was stopped after it;
    {} if there is none at the end of the log.  The record that ends the log of a run by minutes
    tells its final number of steps."""
    f.seek(max(0, size - LATEST_BYTES))
    end = {}
    for line in reversed(record_lines(f.read(LATEST_BYTES))):
        record = record_in(line.decode("utf-8", "replace"))
        if record and STOPPED in record:
            end = record
        elif record and "loss" in record:
            n_steps = end.get("n_steps") or record.get("n_steps")
            return {"step": record["step"], "n_steps": n_steps, "ms": record.get("ms")} | (
                {STOPPED: True} if end.get(STOPPED) else {})
    return {}


class Runs:
    """The logs that may be read.  A name that is not among them opens no file."""

    def __init__(self, folder, named=()):
        self.folder = pathlib.Path(folder)
        self.folder_name = readable(self.folder.resolve().name)
        self.named = [pathlib.Path(path) for path in named]
        self.known = {}                      # {path: (state of the file, its latest step)}
        self.logs = {}                       # {name: path}, the newest first: the latest list
        self.again = 0.0                     # when a large folder may be searched again

    def files(self):
        """[(time of the last write, name, path)] of the regular files that may be logs"""
        found = {}
        for path in self.named:
            here = path.resolve().parent == self.folder.resolve()
            found[readable(path.name if here else path)] = path
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith(".jsonl"):
                    found[readable(entry.name)] = entry
        dated = []
        for name, file in found.items():
            with contextlib.suppress(OSError):           # it was deleted
                s = file.stat()
                if stat.S_ISREG(s.st_mode):
                    dated.append((s.st_mtime, name, pathlib.Path(file)))
        return dated

    def paths(self):
        """{name: path} of the logs, the newest first.  Many pages may ask, each every two seconds:
        a folder with more files than are listed is searched at most once per second."""
        if time.monotonic() < self.again:
            return self.logs
        dated = self.files()
        self.again = time.monotonic() + SEARCH_EVERY if len(dated) > MOST_LOGS else 0.0
        newest = {name: path for _, name, path in heapq.nlargest(MOST_LOGS, dated)}
        files = {*newest.values()}
        self.known = {path: value for path, value in self.known.items() if path in files}
        self.logs = {name: path for name, path in newest.items() if self.latest(path) is not None}
        return self.logs

    def latest(self, path):
        """The latest step of a log; None if the file is not a log.  A file is opened again only
        after it has changed."""
        try:
            s = path.stat()
            state = s.st_ino, s.st_size, s.st_mtime_ns
            if self.known.get(path, (None, None))[0] != state:
                with opened(path) as f:
                    step = latest_step(f, s.st_size) if is_log(f) else None
                self.known[path] = state, step
            return self.known[path][1]
        except OSError:
            return None

    def listed(self, gone=None):
        """Name, size, time and age in seconds of the last write, and latest step of each log"""
        found = []
        for name, path in self.paths().items():
            try:
                s = path.stat()
            except OSError:
                continue
            found.append({"name": name, "bytes": s.st_size, "changed": s.st_mtime,
                          "age": time.time() - s.st_mtime, **(self.latest(path) or {})})
        return found

    def read(self, name, start, gone=None):
        """The records from byte `start` on, and the byte at which to read next; None if there is no
        such log.  A log that is shorter than `start` was started anew, and is read from byte 0."""
        path = self.logs.get(name) or self.paths().get(name)
        if path is None or self.latest(path) is None:
            return None
        try:
            with opened(path) as f:
                size = os.fstat(f.fileno()).st_size
                anew = start > size
                start = 0 if anew else start
                f.seek(start)
                raw = f.read(MOST_BYTES)
        except OSError:                      # it was just deleted
            return None
        whole = raw[:raw.rfind(b"\n") + 1]   # the last line may be incomplete
        if not whole and len(raw) == MOST_BYTES:         # skip a line longer than any record
            whole = raw
        end = start + len(whole)
        records = map(record_in, record_lines(whole.decode("utf-8", "replace")))
        return {"records": [r for r in records if r], "next": end, "anew": anew,
                "more": end < size and bool(whole)}
