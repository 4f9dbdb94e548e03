"""Numba's cache of compiled kernels: its files, and the first start, which fills it."""
import os
import subprocess
import sys
import time
import zlib

import numpy as np
from numba.core import caching

import bpe
from bpe import need

def save_compiled(self, key, data):
    """A file of Numba's cache, named by what it holds.  Numba numbers them: two processes that
    start at once may write the same one, and a third then runs the kernel of another signature."""
    name = self._data_name(zlib.crc32(repr(key).encode()))
    self._save_data(name, data)
    self._save_index({**self._load_index(), key: name})

caching.IndexDataCacheFile.save = save_compiled

def compile_part(part):
    """Compiles half of the kernels, on a tiny model."""
    import nanoeuler as ne                   # which imports this file
    cfg = ne.Config(n_embd=8, n_head=2, n_kv_head=1, head_dim=4, n_layer=1, n_hidden=8,
                    vocab_size=16)
    model = ne.Model(cfg, ne.init_params(cfg, 0))
    if part == 1:
        return model.run(ne.GRADIENT, np.zeros((1, 8), np.int32))
    model.update(np.ones(8))
    model.decoder().step(0)
    bpe.train(b"a b a b", 258).encode(b"a b")

def compile_kernels():
    """Nothing if Numba's cache is warm; else compiles in two other processes, and says so.
    In others, because a process that compiled `run` links its callees differently from one that
    loads it, which changes last bits: a first run must compute the same as a second."""
    import nanoeuler as ne
    run, began = ne.run, time.perf_counter()
    key, codegen = run._cache._index_key, run.targetctx.codegen()
    if any("float32" in str(sig) and key(sig, codegen) == (sig, *rest)
           for sig, *rest in run._cache._cache_file._load_index()):
        return                               # check.py leaves float64 kernels there
    print("compiling the kernels: once, about 20 seconds", flush=True)
    code = "import nanoeuler, data.kernels; data.kernels.compile_part"
    parts = [subprocess.Popen([sys.executable, "-c", f"{code}({i})"], start_new_session=True,
                              cwd=os.path.dirname(ne.__file__))
             for i in (1, 2)]                # in sessions of their own: Ctrl-C is for us
    need(not any([p.wait() for p in parts]), "the kernels do not compile; see above, or report it")
    print(f"compiled in {time.perf_counter() - began:.0f} seconds\n", flush=True)
