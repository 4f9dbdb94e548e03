"""The log of a training run, its name, and the locks that keep two runs apart.

A log has one JSON record per line: the losses of a step, or a validation.  nanoeuler.py writes logs
(runs/log.py), and `plot` reads them.
"""
import contextlib
import errno
import fnmatch
import glob
import hashlib
import itertools
import json
import os
import re
from collections import deque

from bpe import need, note, private_as, read_bytes, reading, regular
from nanoeuler_parts.files.texts import record_lines
from nanoeuler_parts.files.writing import naming, need_writable

LONGEST_RECORD = 1 << 20     # limit on the first line of a log, in bytes

def parse_record(line):
    """The record in a line of a log, or None if the line is incomplete or has no step.  An
    interrupted run may leave an incomplete line."""
    try:
        r = json.loads(line)
        return {**r, "step": int(r["step"])}             # a TypeError unless r is a dict
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None

def read_log(path):
    """The records of a JSON-lines log."""
    with reading(path, "name a log that train, sft, dpo or rl wrote"):
        lines = record_lines(read_bytes(path).decode(errors="replace"))
        records = [r for r in map(parse_record, lines) if r]
        need(records or not lines, "expected a log of training steps, found none")
    return records

def log_path(out, data):
    """The name of the log of a checkpoint: the log of `a` and of `a.bin` is a.jsonl.
    An existing file of that name must be a log, even with --force."""
    name = out.removesuffix(".bin")
    log = f"{name}.jsonl"
    other = f"{name}.bin" if out == name else name       # a checkpoint with the same log
    need(os.path.realpath(out) != os.path.realpath(data),
         f"{out} would replace {data}; choose another --out")
    pattern = os.path.realpath(data)         # the log would be part of the text
    need(not fnmatch.fnmatchcase(os.path.realpath(log), pattern) or os.path.exists(data),
         f"the log of {out} would match {data}, the training text; choose another --out")
    folder, file = os.path.realpath(data), os.path.realpath(out)
    need(not os.path.isdir(data) or os.path.commonpath((folder, file)) != folder,
         f"{out} would lie in {data}, the folder of the training text; choose another --out")
    need(os.path.realpath(log) not in map(os.path.realpath, (out, data)),
         f"the log of {out} would replace {log}; choose another --out")
    need(not os.path.isfile(other), f"{out} and {other} would share the log {log}; choose another "
         f"--out, or rename one of them")
    if os.path.exists(log):
        need(os.path.isfile(log), f"{log}, the log of {out}, is not a regular file; choose another "
             f"--out")
        with open(log, "rb") as f:
            first = f.readline(LONGEST_RECORD)
        r = parse_record(first) or {}        # of a step, a validation, or the end before step 1
        need(not first or {"heads", "val_bits_per_byte", "val_reward", STOPPED} & r.keys(),
             f"{log} is not a training log, and the log of {out} would replace it; choose another "
             f"--out")
    else:
        need_writable(log, "choose another --out")
    return log

@contextlib.contextmanager
def alone(out, other="another --out"):
    """A block in which no other run writes the checkpoint `out`.     other: what errors propose
    The lock is on a hidden file beside the checkpoint, not on the checkpoint, because each save
    replaces the checkpoint by a new file.  Links in `out` are resolved first, so another link to
    the checkpoint leads to the same lock.  Yields "", or the reason why the lock file cannot be
    written; the caller can still read the checkpoint."""
    folder, name = os.path.split(os.path.realpath(out))
    path = os.path.join(folder, f".{name}.lock")
    with contextlib.ExitStack() as end:
        while True:
            try:
                f = end.enter_context(open(path, "ab", opener=regular))
            except OSError as e:
                lock_there = f"{path}: " if os.path.lexists(path) else ""
                yield f"cannot write {out}: {lock_there}{e.strerror or e}; choose {other}"
                return
            need(lock(f), f"another run is writing {out}; let it end, or choose {other}")
            with contextlib.suppress(FileNotFoundError):     # removed by another run: try again
                if os.path.samestat(os.fstat(f.fileno()), os.stat(path)):
                    break
        try:
            yield ""
        finally:
            with contextlib.suppress(OSError):
                os.remove(path)              # still locked: the next run makes its own file

@contextlib.contextmanager
def replacing_no_run(out):
    """A block that writes a model to `out`.  If a run saves there, it would replace the model, or
    the model the run, so this is an error."""
    with alone(out, "another name") as refusal:
        need(not refusal, refusal)
        yield

# A log and a checkpoint are two files, and no file system replaces two files at once.  So the
# checkpoint holds the SHA-256 of the first line of its log.  That line holds the time of the first
# step, so it differs between runs.  --resume finds the log of its run by this line, and never
# appends to the log of another run.
def log_identity(log):
    """SHA-256 of the first line of a log, or "" if the log is missing or the line incomplete."""
    if not os.path.isfile(log):
        return ""
    with open(log, "rb") as f:
        line = f.readline(LONGEST_RECORD)
    return hashlib.sha256(line).hexdigest() if line.endswith(b"\n") else ""

def checkpoints_of(log):
    """The names of the checkpoints that have this log by `log_path`."""
    name = log.removesuffix(".jsonl")
    return [f"{name}.bin", name]

def numbered_logs(log):
    """The existing files NAME.1.jsonl, NAME.2.jsonl, ... beside the log NAME.jsonl."""
    name = log.removesuffix(".jsonl")
    return [path for path in sorted(glob.glob(f"{glob.escape(name)}.*.jsonl"))
            if path[len(name) + 1:-len(".jsonl")].isdigit()]

def free_log(log):
    """The first of NAME.1.jsonl, NAME.2.jsonl, ... that neither exists nor belongs to a checkpoint
    NAME.1.bin, NAME.2.bin, ..."""
    name = log.removesuffix(".jsonl")
    for i in itertools.count(1):
        numbered = f"{name}.{i}.jsonl"
        if not any(map(os.path.lexists, [numbered, *checkpoints_of(numbered)])):
            return numbered

def keep_aside(log):
    """Renames the log of another run to a free name, unless it is empty or missing."""
    if not os.path.exists(log) or not os.path.getsize(log):
        return
    with open(log, "rb+") as f:
        need_unlocked(f, log)
    kept = free_log(log)
    os.rename(log, kept)
    note(f"{log} is the log of another run; it was renamed to {kept}")

def restore_log(log, identity):
    """Gives the log of a run that is resumed the name `log`.     identity: its `log_identity`
    The log is searched among the numbered logs, and another log of the name `log` is kept aside.
    If the identity is "", as in older checkpoints, nothing is renamed.  A copy of the checkpoint
    has the same log.  For that reason, a log that is in use or beside a checkpoint of its
    name is not renamed."""
    if identity in ("", log_identity(log)):
        return
    own = [path for path in numbered_logs(log) if log_identity(path) == identity]
    keep_aside(log)
    for path in own:
        used_by = next(filter(os.path.lexists, checkpoints_of(path)), "")
        with open(path, "rb+", opener=regular) as f:
            is_free = not used_by and lock(f)
        if is_free:                          # f is closed: some systems cannot rename an open file
            os.rename(path, log)
            return
        note(f"{path} is the log of {used_by or 'another run'} and keeps its name; {log} "
             f"starts empty")

# A run that was stopped, or that trained for minutes, ends its log with a record for the training
# page.  Its fields are the step, the number of steps, and STOPPED: whether the run was stopped.
STOPPED = "stopped"

class Log:
    """A log that is open for appending.  A record that cannot be written, for example because the
    disk is full, is kept in memory and written before the next one.  A note says so once.
    f: the open file     kept: records, as lines of bytes"""

    def __init__(self, f, path, kept=()):
        self.file, self.path, self.kept, self.is_told = f, path, deque(kept), bool(kept)

    def write(self, line):
        self.kept.append(line)
        self.write_kept()

    def write_kept(self):
        try:
            while self.kept:
                append_whole(self.file.fileno(), self.kept[0])
                self.kept.popleft()
        except OSError as e:
            if not self.is_told:
                note(f"cannot write {self.path}: {e.strerror or e}; the run continues, and its "
                     f"records are written as soon as that is possible")
            self.is_told = True

    def end(self):
        """Tries to write what is kept, and reports what is lost."""
        self.write_kept()
        if self.kept:
            note(f"{self.path} could not be written; records of the run that are missing in it: "
                 f"{len(self.kept):,}")

def append_whole(fd, line):
    """Appends a line to an open file.  If it raises OSError, the file is as it was before."""
    end = os.fstat(fd).st_size
    if os.write(fd, line) < len(line):
        os.ftruncate(fd, end)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

@contextlib.contextmanager
def open_log(path, step, kept=()):
    """Yields the Log of a run, open for appending after this step.
    Records of later steps are cut off: an interrupted run logged them but did not save them.  So is
    the record that says how the run ended.  Step 0 empties the log.  If another run has the
    log open, because its checkpoint has the same log, this is an error.
    A new log with a number may replace the log without it, so it is as private as that one.
    kept: records that an earlier Log could not write"""
    opener = None
    if not os.path.exists(path):
        opener = private_as(re.sub(r"\.\d+\.jsonl$", ".jsonl", path))
    with open(path, "ab+", opener=opener) as f:
        need_unlocked(f, path)
        with naming(path):
            f.seek(0)
            end = size = 0
            for line in f:
                size += len(line)
                r = parse_record(line)
                if r and r["step"] <= step and STOPPED not in r and line.endswith(b"\n"):
                    end = size
            f.truncate(end)
        yield Log(f, path, kept)

def need_unlocked(f, path):
    """Locks an open file, or reports the run that holds it."""
    need(lock(f), f"another run is writing {path}; let it end, or choose another --out")

def lock(f):
    """Locks an open file until it is closed.  Returns False if another process holds the lock, and
    True otherwise, also if the system does not support locks."""
    try:
        import fcntl
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):           # Windows; a network file system
        return True
    return True
