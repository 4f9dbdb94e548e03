"""Atomic writes: a file is replaced as a whole or not at all.  Checkpoints are saved this way."""
import contextlib
import glob
import os
import time

from bpe import need, UserError

FORGOTTEN = 3600             # seconds; an older temporary file was left by a process that died

class WriteError(UserError):
    """A file cannot be written.  A later attempt may succeed."""

@contextlib.contextmanager
def replacing(path, remedy):
    """Yields the name of a temporary file for the caller to write.  At the end of the block, the
    file is flushed to disk and renamed to `path`.  The name contains the id of this process,
    because another process may write the same path at the same time."""
    path = os.path.realpath(path)            # a link is kept; its target is replaced
    temporary = f"{path}.{os.getpid()}.tmp"
    for old in glob.glob(f"{glob.escape(path)}.*.tmp"):
        if not old[len(path) + 1:-len(".tmp")].isdigit():
            continue                         # a file of the user
        with contextlib.suppress(OSError):
            if time.time() - os.path.getmtime(old) > FORGOTTEN:
                os.remove(old)
    try:
        yield temporary
        with open(temporary, "rb+") as f:
            os.fsync(f.fileno())
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
        if isinstance(e, OSError):
            reason = e.strerror or f"only part of it was written ({e})"          # NumPy's tofile
            raise WriteError(f"cannot write {path}: {reason}; an existing file is unchanged; "
                             f"{remedy}") from None
        raise

def need_another(path, source):
    """Rejects an output path that is also the input, even with --force."""
    need(os.path.realpath(path) != os.path.realpath(source),
         f"{path} would replace its input {source}; choose another name")
