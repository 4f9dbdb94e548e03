"""The server's log."""
import contextlib
import sys
import traceback


def log(text, stream=None):
    """Prints a line on standard error, or on another stream.  A log that cannot be written, because
    its disk is full or the reader of its pipe has gone, must not harm an answer."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=stream or sys.stderr, flush=True)


def log_fault():
    """Prints the traceback of the exception that is being handled."""
    log(traceback.format_exc().rstrip())
