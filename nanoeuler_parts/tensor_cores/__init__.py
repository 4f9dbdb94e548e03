"""The fast path of nanoeuler_cuda.py, to be read after that file, in this order:

    ptx.py         instructions that Numba has no function for
    tiles.py       tiles in shared memory, and the products of tiles
    matmul.py      matrix products
    attention.py   FlashAttention
    rows.py        the kernels of a decoder's step
    steps.py       the steps as graphs, prompts, and the decoder
    selftests.py   the self-tests of the kernels above

All of it multiplies bfloat16 and adds in float32.  There are two ways to multiply: mma.sync, on
GPUs of capability 8.0 and newer, and wgmma, on those of capability 9.0 (Hopper).
"""
