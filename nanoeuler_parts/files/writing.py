"""Files that are replaced as a whole or not at all."""
import contextlib
import glob
import os
import time

from bpe import UserError

FORGOTTEN = 3600             # seconds after which a temporary file belongs to a process that died

class WriteError(UserError):
    """A file cannot be written, perhaps only now."""

@contextlib.contextmanager
def replacing(path, remedy):
    """All or nothing: what is written under the name it yields is flushed, then takes the path.
    The name is this process's own: another one may write the same path at the same time."""
    path = os.path.realpath(path)            # a link stays one
    temporary = f"{path}.{os.getpid()}.tmp"
    for old in glob.glob(f"{glob.escape(path)}.*.tmp"):
        if not old[len(path) + 1:-len(".tmp")].isdigit():
            continue                         # it is somebody's own
        with contextlib.suppress(OSError):
            if time.time() - os.path.getmtime(old) > FORGOTTEN:
                os.remove(old)
    try:
        yield temporary
        with open(temporary, "rb+") as f:
            os.fsync(f.fileno())
        os.replace(temporary, path)
        with contextlib.suppress(OSError):   # the folder knows it too, where one can tell it to
            folder = os.open(os.path.dirname(path), os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except BaseException as e:               # Ctrl-C as well
        with contextlib.suppress(OSError):
            os.remove(temporary)
        if isinstance(e, OSError):
            reason = e.strerror or f"only a part of it was written ({e})"        # NumPy's tofile
            raise WriteError(f"cannot write {path}: {reason}; an older file there is untouched; "
                             f"{remedy}") from None
        raise
