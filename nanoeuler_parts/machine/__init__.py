"""How the CPU program is made fast, and how what is compiled is kept.

    compiling.py   the decorators `jit` and `jit_parallel`
    cpu.py         the vectors of this CPU, and the sizes of a tile
    tile.py        the tile of a matrix product, in LLVM
    numbers.py     bfloat16 and int8, rounded and packed
    counters.py    atomic counters for threads
    kernels.py     compiled kernels on disk
    threads.py     how many threads there should be

These modules import bpe.py alone.  Without them nanoeuler.py uses the plain versions that its
sections 3 and 4.1 define: one thread, float32 and float64.
"""
