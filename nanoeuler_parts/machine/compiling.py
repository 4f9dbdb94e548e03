"""`jit` and `jit_parallel`: the decorators of every compiled function of the CPU program.

A kernel contains the code of the functions that it calls.  For that reason, a kernel is compiled
again after an edit of its own file or of any file in this folder (`bpe.Cache`).
"""
import pathlib

import bpe

FILES = sorted(map(str, pathlib.Path(__file__).parent.glob("*.py")))

# fastmath without nnan and ninf: training must still detect a NaN (`train` in nanoeuler.py)
FAST = {"contract", "reassoc", "arcp", "nsz", "afn"}
OPTIONS = dict(fastmath=FAST, error_model="numpy", nogil=True, cache=bpe.CACHE)
jit = bpe.jit(files=FILES, **OPTIONS)
jit_parallel = bpe.jit(files=FILES, parallel=True, **OPTIONS)
