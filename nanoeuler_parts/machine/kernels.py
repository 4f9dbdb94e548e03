"""Compiled kernels on disk: which there must be, and how they are named, linked and kept."""
import contextlib
import os
import shlex
import subprocess
import sys
import time
import zlib
from collections import namedtuple

import llvmlite.binding as llvm
from numba.core.codegen import CPUCodeLibrary

import bpe
from bpe import UserError
from nanoeuler_parts.machine.cpu import BITS

# Numba keeps compiled kernels on disk: for each function an index, {key: name of a file}, and these
# files.  The classes that do so are private, and so is the one that links a kernel.  What we change
# in them and read of them holds for the version that nanoeuler.py asks for.  It stands
# here (nanoeuler_cuda.py takes `save_compiled` for its own kernels) and in section 2 of bpe.py,
# which has the cache of our functions, `bpe.Cache`.
def key_with_width(self, signature, codegen):
    """A key by argument types, processor and bytecode, and by the width of our vectors: the panels
    of one width, read by the kernels of another, are other numbers.  Another level of optimization
    may have another order of sums."""
    numbas_key = super(bpe.Cache, self)._index_key(signature, codegen)
    return *numbas_key, BITS, bpe.Compiling.level

@contextlib.contextmanager
def locked(folder):
    """One process at a time.  Where folders cannot be locked (Windows, some networks), all at once:
    then an index may lose an entry, and its kernel is compiled again."""
    with contextlib.ExitStack() as end:
        with contextlib.suppress(ImportError, OSError):
            import fcntl
            handle = os.open(folder, os.O_RDONLY)
            end.callback(os.close, handle)               # which unlocks it
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield

def save_compiled(self, key, data):
    """A kernel in a file named by its key, then in the index.  Numba numbers the files: two
    processes that start at once may write the same one, and a third then runs the kernel of
    another signature; and each may write an index that lacks what the other added."""
    name = self._data_name(zlib.crc32(repr(key).encode()))
    self._save_data(name, data)
    with locked(self._cache_path):
        self._save_index({**self._load_index(), key: name})

def finalize_alone(self):
    """A kernel holds copies of the kernels that it calls.  Numba leaves them open to be shared:
    where two that are loaded hold cross_entropy, both run the copy of the first.  Each was
    optimized within its kernel, with an order of sums of its own, so that last bits would depend on
    what a process has run before.  Here a kernel runs its own copies; only what other kernels copy
    stays open.  Functions of others are linked as Numba does it."""
    loaded = self._shared_module is not None             # from the cache
    if bpe.Compiling.depth and not loaded:
        self._shared_module = self._final_module.clone()
        for f in self._shared_module.functions:
            if f.linkage == llvm.Linkage.external and not f.is_declaration:
                f.linkage = "linkonce_odr"               # as Numba's own _get_module_for_linking
        for f in self._final_module.functions:
            if f.linkage == llvm.Linkage.linkonce_odr and not f.is_declaration:
                f.linkage = "internal"
    numbas_finalize(self)

# Numba's own, also where this file is loaded a second time
numbas_finalize = getattr(CPUCodeLibrary._finalize_final_module, "numbas",
                          CPUCodeLibrary._finalize_final_module)
finalize_alone.numbas = numbas_finalize

bpe.Cache._index_key = key_with_width
bpe.CacheFile.save = save_compiled
CPUCodeLibrary._finalize_final_module = finalize_alone

# What the cache must hold: a kernel, compiled for an argument, or a field of it, of this dtype.
# check.py may have left those of float64.
Compiled = namedtuple("Compiled", "kernel argument dtype")

def dtype_in(kernel, signature, argument):
    """Of "a", or of "a.b", field b of the named tuple a: the Numba type of its entries"""
    name, *fields_of_it = argument.split(".")
    kind = signature[kernel.py_func.__code__.co_varnames.index(name)]
    for name in fields_of_it:
        kind = kind.types[kind.fields.index(name)]
    return kind.dtype

def in_cache(kernel, argument, dtype):
    """Whether the cache holds what `Compiled` says, for this processor, and whole."""
    cache, codegen = kernel._cache, kernel.targetctx.codegen()
    file = cache._cache_file
    for key, name in file._load_index().items():
        signature = key[0]
        ours = key == cache._index_key(signature, codegen)
        if ours and dtype_in(kernel, signature, argument) == dtype:
            return bpe.pickle_in(file._data_path(name)) is not None
    return False

def folder_of_program():
    """The folder of nanoeuler.py, from which this process imported it"""
    return os.path.dirname(os.path.abspath(sys.modules["nanoeuler"].__file__))

def in_another_process(call):
    """Starts it there.  It reads nothing; what it says on stderr is kept."""
    here = folder_of_program()
    code = f"import sys; sys.path.insert(0, {here!r}); import nanoeuler; nanoeuler.{call}"
    return subprocess.Popen([sys.executable, "-c", code], cwd=here, stdin=subprocess.DEVNULL,
                            stderr=subprocess.PIPE, encoding="utf-8", errors="replace")

def wait_for(process):
    """Until it has ended.  If that was not well, its last line says why."""
    _, said = process.communicate()
    if process.returncode != 0:
        lines = [line for line in said.splitlines() if line.strip()]
        lines = lines or [f"signal {-process.returncode} ended it"]
        raise UserError(f"the kernels do not compile: {lines[-1]}; the whole story: "
                        f"cd {shlex.quote(folder_of_program())}; {shlex.join(process.args)}")
    print(said, end="", file=sys.stderr)

def fill_cache(parts):
    """Compiles those of SPEECH or `training_kernels` that Numba's cache lacks, and says so.
    In other processes, because a process that compiled `run_batch` links its callees differently
    from one that loads it, which changes last bits: a first run must compute the same as a second.
    """
    if not bpe.JIT["cache"]:
        return
    calls = [call for call, kernels in parts.items()
             if not all(in_cache(*kernel) for kernel in kernels)]
    if not calls:
        return
    began, processes = time.perf_counter(), []
    print("note: compiling the kernels: once, half a minute to a minute", file=sys.stderr,
          flush=True)
    try:
        for call in calls:
            processes.append(in_another_process(call))
        for process in processes:
            wait_for(process)
    except KeyboardInterrupt:
        print("note: stopped while the kernels were compiled: nothing else was begun, and the next "
              "start compiles them", file=sys.stderr)
        raise
    finally:                                 # after Ctrl-C, or if one has failed
        for process in processes:
            process.kill()
            process.wait()
    print(f"note: compiled in {time.perf_counter() - began:.0f} seconds", file=sys.stderr)
