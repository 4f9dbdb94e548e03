"""Atomic writes: a file is replaced as a whole or not at all.  Checkpoints are saved this way."""
import contextlib
import glob
import os
import sys
import time

from bpe import adopt_mode, need, note, private_as, UserError

# Seconds after which a temporary file was left by a process that died: if the file is locked, or
# where files cannot be locked, and if it is not
FORGOTTEN, UNLOCKED = 3600, 60

class WriteError(UserError):
    """A file cannot be written.  A later attempt may succeed."""

@contextlib.contextmanager
def replacing(path, remedy):
    """Yields the name of a temporary file for the caller to write.  At the end of the block, the
    file is flushed to disk and renamed to `path`.  The name contains the id of this process,
    because another process may write the same path at the same time.  A file that is replaced keeps
    its mode, and the temporary file is never more open than that file."""
    path, temporary = target_of(path, remedy)
    remove_leftovers(path)
    try:
        with open(temporary, "ab", opener=private_as(path)) as f:
            locked(f)                        # until the block ends: the file is in use
            yield temporary
        with open(temporary, "rb+") as f:
            os.fsync(f.fileno())
        adopt_mode(temporary, path)
        os.replace(temporary, path)
        with contextlib.suppress(OSError):   # flush the folder, too, if the system can
            folder = os.open(os.path.dirname(path), os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except BaseException as e:               # Ctrl-C as well
        with contextlib.suppress(OSError):
            os.remove(temporary)
        if isinstance(e, OSError) and e.filename in (None, path, temporary):
            reason = e.strerror or f"only part of it was written ({e})"          # NumPy's tofile
            raise WriteError(f"cannot write {path}: {reason}; an existing file is unchanged; "
                             f"{remedy}") from None
        raise

def target_of(path, remedy):
    """(the file that is replaced, the temporary file beside it).  A link is kept: its target is
    replaced, unless it is a device, a pipe or a socket."""
    target = os.path.realpath(path)
    if os.path.islink(target):               # realpath ends there if the links form a circle
        raise WriteError(f"cannot write {path}: it is a link to itself; {remedy}")
    if os.path.exists(target) and not (os.path.isfile(target) or os.path.isdir(target)):
        raise WriteError(f"cannot write {path}: not a regular file; {remedy}")
    return target, f"{target}.{os.getpid()}.tmp"

def need_writable(path, remedy="choose another name"):
    """Rejects a path that `replacing` could not write, before the work begins.  The temporary file
    is made and removed again, because permissions do not tell what a file system accepts."""
    target, temporary = target_of(path, remedy)
    folder, reason = os.path.dirname(target), ""
    if not os.path.isdir(folder):
        reason = f"{folder}: No such folder"
    elif os.path.isdir(target):
        reason = "it is a directory"
    else:
        try:
            with open(temporary, "ab"):
                pass
            os.remove(temporary)
        except OSError as e:
            reason = e.strerror or str(e)
    if reason:
        raise WriteError(f"cannot write {path}: {reason}; {remedy}")

@contextlib.contextmanager
def naming(path):
    """A block that writes an open file: its errors name the file.  Python's own errors name only
    a file that cannot be opened."""
    try:
        yield
    except OSError as e:
        raise OSError(e.errno, e.strerror or str(e), e.filename or path) from None

def remove_leftovers(path):
    """Removes the temporary files of `replacing(path, ...)` in processes that died: killed by a
    signal, for example."""
    for old in glob.glob(f"{glob.escape(path)}.*.tmp"):
        if not old[len(path) + 1:-len(".tmp")].isdigit():
            continue                         # a file of the user
        with contextlib.suppress(OSError):
            age = time.time() - os.path.getmtime(old)
            if age > UNLOCKED:
                with open(old, "rb+") as f:
                    is_free = locked(f) is True
                if is_free or age > FORGOTTEN:
                    os.remove(old)

def locked(f):
    """Locks an open file until it is closed.  True if it is locked now, False if another process
    holds the lock, and None if the system does not support locks: Windows, some network drives."""
    try:
        import fcntl
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True

class Tolerant:
    """A text stream whose writes may fail, for example because the disk is full: a note says so
    once, on the other stream.  If the reader of a pipe has gone, the error remains."""

    def __init__(self, stream, name, other):
        self.stream, self.name, self.other, self.is_told = stream, name, other, False

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def attempt(self, act, *args):
        try:
            return act(*args)
        except BrokenPipeError:
            raise
        except OSError as e:
            if not self.is_told:
                self.is_told = True
                with contextlib.suppress(OSError), contextlib.redirect_stderr(self.other):
                    note(f"cannot write {self.name}: {e.strerror or e}; the run continues")

    def write(self, text):
        self.attempt(self.stream.write, text)
        return len(text)

    def flush(self):
        self.attempt(self.stream.flush)

@contextlib.contextmanager
def output_may_fail():
    """A block that continues if standard output or standard error is a file on a full disk."""
    out, err = sys.stdout, sys.stderr
    streams = [x and Tolerant(x, name, other) for x, name, other in (
        (out, "standard output", err), (err, "standard error", out))]
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        yield
    for tolerant in filter(None, streams):
        if tolerant.is_told:                 # else Python fails when it flushes the stream at exit
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), tolerant.fileno())

def need_another(path, source):
    """Rejects an output path that is also the input, even with --force."""
    need(os.path.realpath(path) != os.path.realpath(source),
         f"{path} would replace its input {source}; choose another name")

def refuse_overwrite(path, force, remedy="choose another name"):
    """Rejects a path that exists.  With --force, it accepts a regular file, but nothing else.
    A path that cannot be written is rejected, too, before the work begins."""
    if os.path.exists(path):
        what = "a directory" if os.path.isdir(path) else "not a regular file"
        need(os.path.isfile(path), f"{path} exists and is {what}; choose another name")
        need(force, f"{path} exists; {remedy}, or replace it with --force")
    need_writable(path)
