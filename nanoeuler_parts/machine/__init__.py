"""Fast kernels for the CPU, and the disk cache that keeps them.

    compiling.py   the decorators `jit` and `jit_parallel`
    cpu.py         the vector width of this CPU, and the tile sizes
    tile.py        the tile of a matrix product, in LLVM
    numbers.py     bfloat16 and int8: rounding and packing
    counters.py    atomic counters for threads
    kernels.py     the disk cache of compiled kernels
    threads.py     the number of threads to use

These modules import only bpe.py and each other.  Part I of nanoeuler.py also runs without them, on
one thread, in float32 and float64.
"""
