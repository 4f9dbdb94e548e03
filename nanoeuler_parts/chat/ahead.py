"""`compile_ahead`: a process in the background compiles kernels before a verb needs them.

After the first reply of a chat, most readers of README train, serve, fine-tune or evaluate next.
Each of these verbs would compile for a minute at its first start.
"""
import contextlib
import os
import subprocess
import sys

import bpe
import nanoeuler as ne
from nanoeuler_parts.kernels import gradient_kernels, training_kernels
from nanoeuler_parts.machine.kernels import (
    folder_of_program, in_another_process, missing_calls, wait_for,
)

def kernels_ahead():
    """The kernels of `train`, `sft`, `dpo` and `serve`, and those of `lens`, `eval` and the
    trajectory of the server's page, which compute in float32"""
    return {**training_kernels(ne.DTYPE), **gradient_kernels("f32")}

def compile_ahead():
    """Starts a process that calls `compile_in_turn`, with the lowest priority.  It survives this
    process.  Nothing is started if the cache has all kernels, if another such process runs, or
    outside of a terminal and in CI, where the verb `compile` does the same."""
    if not at_terminal() or "CI" in os.environ or not bpe.JIT["cache"]:
        return
    # OSError: the folder is read-only, or the lock is taken.  ImportError: fcntl is of POSIX.
    with contextlib.suppress(OSError, ImportError), open(lock_path(), "ab") as lock:
        import fcntl
        if missing_calls(kernels_ahead()):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)     # until the process has ended
            start_in_background(lock.fileno())

def at_terminal():
    return sys.stdin.isatty() and sys.stdout.isatty()

def lock_path():
    """A file beside the compiled kernels.  The process that compiles ahead holds its lock."""
    return os.path.join(ne.run_batch._cache.cache_path, "nanoeuler.ahead.lock")

def start_in_background(lock):
    """Starts the process.  It keeps `lock`, a file descriptor, open.  A session of its own keeps
    Ctrl-C and the end of the terminal from it."""
    here = folder_of_program()
    code = (f"import os, sys; os.setpriority(os.PRIO_PROCESS, 0, 19); "
            f"sys.path.insert(0, {here!r}); "
            f"from nanoeuler_parts.chat import ahead; ahead.compile_in_turn()")
    subprocess.Popen([sys.executable, "-c", code], cwd=here, stdin=subprocess.DEVNULL,
                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=[lock],
                     start_new_session=True)

def compile_in_turn():
    """Compiles what the cache lacks, one process at a time.  Ends at the first error, for example
    if the disk is full: the verb that needs the kernel then reports it."""
    with contextlib.suppress(ne.UserError, OSError):
        for call, kernels in kernels_ahead().items():
            if missing_calls({call: kernels}):           # a verb may have compiled it meanwhile
                wait_for(in_another_process(call))
