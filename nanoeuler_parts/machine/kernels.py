"""The disk cache of compiled kernels: how they are named, linked and saved.

nanoeuler.py calls `fill_cache` to compile the missing kernels before it starts.
"""
import contextlib
import os
import shlex
import subprocess
import sys
import threading
import time
import zlib
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import bpe
from bpe import UserError
from nanoeuler_parts.machine.cpu import BITS

# Numba caches compiled kernels on disk: for each function an index, {key: name of a file}, and the
# files that it names.  The classes that do this are private.  The changes below are only valid for
# the version of Numba that nanoeuler.py requires.  Further changes are in section 2 of bpe.py:
# `bpe.Cache` is the cache of our functions, and `bpe.Library` links a kernel.
# nanoeuler_cuda.py uses `save_compiled` for its own kernels.
def key_with_width(self, signature, codegen):
    """A key of argument types, processor, bytecode, vector width and optimization level.
    The layout of packed panels depends on the vector width.  The order of sums may depend on the
    optimization level."""
    numbas_key = super(bpe.Cache, self)._index_key(signature, codegen)
    return *numbas_key, BITS, bpe.Compiling.level

@contextlib.contextmanager
def locked(folder):
    """A block that one process at a time may enter.  Folders cannot be locked on Windows and on
    some network drives.  There an index may lose an entry, and its kernel is compiled again."""
    with contextlib.ExitStack() as end:
        with contextlib.suppress(ImportError, OSError):
            import fcntl
            handle = os.open(folder, os.O_RDONLY)
            end.callback(os.close, handle)               # closing unlocks the folder
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield

def save_compiled(self, key, data):
    """Saves a kernel to a file named by its key, then adds the file to the index.
    Numba numbers the files instead.  Two processes that start at once may then write the same file,
    and a third process runs the kernel of another signature.  The lock is needed because one
    process could otherwise overwrite the index entry of another."""
    name = self._data_name(zlib.crc32(repr(key).encode()))
    self._save_data(name, data)
    with locked(self._cache_path):
        self._save_index({**self._load_index(), key: name})

bpe.Cache._index_key = key_with_width
bpe.CacheFile.save = save_compiled

# An entry that the cache must hold: a kernel, compiled for this dtype of an argument or of a field
# of an argument.  The dtype matters because check.py may have cached the kernel for float64.
Compiled = namedtuple("Compiled", "kernel argument dtype")

def dtype_in(kernel, signature, argument):
    """The Numba type of the entries of an argument "a", or of field b of a named tuple, "a.b"."""
    name, *fields_of_it = argument.split(".")
    kind = signature[kernel.py_func.__code__.co_varnames.index(name)]
    for name in fields_of_it:
        kind = kind.types[kind.fields.index(name)]
    return kind.dtype

def in_cache(kernel, argument, dtype):
    """Whether the cache holds the entry Compiled(kernel, argument, dtype) for this processor, with
    an undamaged file."""
    cache, codegen = kernel._cache, kernel.targetctx.codegen()
    file = cache._cache_file
    for key, name in file._load_index().items():
        signature = key[0]
        ours = key == cache._index_key(signature, codegen)
        if ours and dtype_in(kernel, signature, argument) == dtype:
            return bpe.pickle_in(file._data_path(name)) is not None
    return False

def folder_of_program():
    """The folder of the nanoeuler.py that this process imported."""
    return os.path.dirname(os.path.abspath(sys.modules["nanoeuler"].__file__))

def in_another_process(call):
    """Starts a process that calls a function of kernels.py, for example "compile_decoding()".
    Its standard input is empty.  Its stderr is a pipe, to which it writes COMPILED after each
    kernel, and its errors."""
    here = folder_of_program()
    code = (f"import sys; sys.path.insert(0, {here!r}); import nanoeuler; "
            f"from nanoeuler_parts.machine.kernels import report_kernels; report_kernels(); "
            f"from nanoeuler_parts import kernels; kernels.{call}")
    return subprocess.Popen([sys.executable, "-c", code], cwd=here, stdin=subprocess.DEVNULL,
                            stderr=subprocess.PIPE, encoding="utf-8", errors="replace")

COMPILED = "a kernel is compiled\n"

def report_kernels():
    """Makes this process write COMPILED to stderr for each kernel that it compiles, or that it
    loads because another kernel calls it."""
    load, save = bpe.Cache.load_overload, bpe.Cache.save_overload

    def loaded(self, *args):
        found = load(self, *args)
        if found is not None:
            print(COMPILED, end="", file=sys.stderr, flush=True)
        return found

    def saved(self, *args):
        save(self, *args)
        print(COMPILED, end="", file=sys.stderr, flush=True)

    bpe.Cache.load_overload, bpe.Cache.save_overload = loaded, saved

# The number of kernels that a call compiles if none of them is in the cache.  A processor with
# other instructions may need a few more or fewer, so a call that has ended counts as all of its
# kernels, and one that has not ended as no more than these.
KERNELS = {"compile_gradient('f32')": 43, "compile_gradient('bf16')": 55,
           "compile_gradient('f64')": 43, "compile_updates('f32')": 64,
           "compile_updates('bf16')": 70, "compile_decoding()": 56,
           "compile_lora('f32')": 57, "compile_lora('bf16')": 61, "compile_lora('f64')": 57,
           "compile_lora_decoding()": 42}

class Progress:
    """Counts kernels on stderr: "compiling kernels: 12 of 40".  On a terminal, the count overwrites
    itself; elsewhere each quarter of the kernels makes a line.     calls: keys of KERNELS"""

    def __init__(self, calls):
        self.done, self.lock = dict.fromkeys(calls, 0), threading.Lock()
        self.total, self.began = sum(KERNELS[call] for call in calls), time.perf_counter()
        terminal = sys.stderr is not None and sys.stderr.isatty()
        self.in_place = terminal and os.environ.get("TERM") != "dumb"
        self.shown = 0
        self.show()

    def show(self):
        begin, end = ("\r", "") if self.in_place else ("", "\n")
        print(f"{begin}note: compiling kernels: {self.shown} of {self.total}", end=end,
              file=sys.stderr, flush=True)

    def count(self, call, n=1):
        """One more kernel of a call, or n more.  Several threads may call it."""
        with self.lock:
            self.done[call] = min(KERNELS[call], self.done[call] + n)
            done = sum(self.done.values())
            step = 1 if self.in_place else -(-self.total // 4)
            if done >= self.shown + step or done == self.total > self.shown:
                self.shown = done
                self.show()

    def stop(self):
        """Ends the line of a terminal, before other messages."""
        if self.in_place:
            print(file=sys.stderr, flush=True)

    def end(self):
        self.stop()
        print(f"note: compiled in {time.perf_counter() - self.began:.0f} seconds, and kept for "
              f"later starts", file=sys.stderr)

def wait_for(process, counted=lambda: None):
    """Waits for the end of a process, and calls `counted` for each kernel that it compiles.
    Returns the other lines of its stderr, which are warnings.  If the process failed, raises a
    UserError with the last of them."""
    lines = []
    for line in process.stderr:
        if line == COMPILED:
            counted()
        elif line.strip():
            lines.append(line)
    if process.wait() != 0:
        lines = lines or [f"signal {-process.returncode} ended the process"]
        raise UserError(f"the kernels failed to compile: {lines[-1].rstrip()}; to see the full "
                        f"error, run: cd {shlex.quote(folder_of_program())}; "
                        f"{shlex.join(process.args)}")
    return "".join(lines)

def missing_calls(parts):
    """The calls of `parts` whose kernels the cache lacks"""
    return [call for call, kernels in parts.items()
            if not all(in_cache(*kernel) for kernel in kernels)]

def fill_cache(parts):
    """Compiles the kernels that the cache lacks.     parts: DECODING or `training_kernels`
    A process that compiles `run_batch` links its callees differently from a process that loads it,
    which changes the last bits.  A first run must be bit-identical to a second one, so other
    processes compile the kernels."""
    calls = missing_calls(parts) if bpe.JIT["cache"] else []
    if not calls:
        return
    progress, processes = Progress(calls), []

    def follow(call, process):
        said = wait_for(process, partial(progress.count, call))
        progress.count(call, KERNELS[call])
        return said

    with ThreadPoolExecutor(len(calls)) as readers:      # one for the stderr of each process
        try:
            for call in calls:
                processes.append(in_another_process(call))
            waiting = [readers.submit(follow, call, process)
                       for call, process in zip(calls, processes, strict=True)]
            said = [ended.result() for ended in waiting]
        except BaseException as e:           # Ctrl-C, or a process has failed
            progress.stop()
            if isinstance(e, KeyboardInterrupt):
                print("note: stopped while compiling the kernels, before any other work; the next "
                      "start compiles the rest", file=sys.stderr)
            raise
        finally:
            for process in processes:
                process.kill()
                process.wait()
    progress.end()
    print(*said, sep="", end="", file=sys.stderr)         # warnings
