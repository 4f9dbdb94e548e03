"""The fast path of nanoeuler_cuda.py.  Read that file first, then these modules in this order:

    one_tile.py    a complete product for Hopper, as short as possible
    ptx.py         PTX instructions that Numba does not offer
    tiles.py       tiles in shared memory, and products of tiles
    pipeline.py    a ring of buffers that are filled while others are read
    scheduler.py   which block computes which part of a product
    epilogues.py   what becomes of the sums
    matmul_mma.py, matmul_wgmma.py   matrix products on the two kernel paths
    attention.py   FlashAttention
    ops.py         TensorOps: which of these kernels a model's products and attention take

All products multiply bfloat16 and add in float32.  There are two kernel paths:

    mma      mma.sync, from compute capability 8.0 (Ampere): a warp multiplies small fragments that
             its lanes hold in registers
    wgmma    wgmma and TMA, only on compute capability 9.0 (Hopper): a warpgroup, which is four
             warps, multiplies tiles that lie in shared memory

Words of these modules, from small to large:

    number         an entry of a matrix; two bytes, if it is bfloat16
    pair           two neighbouring bfloat16 numbers in a 32-bit register, the first in its low half
    chunk          16 bytes of a row, which are 8 bfloat16 numbers
    fragment       the numbers of a small matrix that the lanes of a warp hold for `mma`
    panel          64 rows of 128 bytes in shared memory
    tile           a block of a matrix: the operand or the result of a product
    slice          the part of a tile's operands with the same 64 values of k, or 128 for narrow
                   tiles: a tile of A, or of B, or both
    stage          a buffer of a ring in shared memory, filled while another one is read
    sums, acc      the float32 accumulators of a product, in registers
"""
