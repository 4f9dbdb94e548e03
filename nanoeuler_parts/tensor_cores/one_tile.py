"""The shortest complete kernel for Hopper: it shows the instructions that the next modules use.

The copy engine fetches two tiles, an mbarrier counts their bytes, and wgmma multiplies them.  Read
it beside `tensor_core_kernel` of nanoeuler_cuda.py, which has the same tiles.  What is new:

    dynamic_smem, tma_load, mbarrier_..     ptx.py
    descriptor, wgmma                       tiles.py

Copies and products do not overlap here.  The kernel of matmul_wgmma.py overlaps them with a ring of
buffers and a warpgroup that only fetches, and has tiles of 128 x 256.
"""
from numba import cuda

from nanoeuler_cuda import cdiv, filled
from nanoeuler_parts.gpu.launches import cuda_kernel, launch
from nanoeuler_parts.gpu.mma import column_of, first_column, first_row, which_row
from nanoeuler_parts.gpu.numbers import f32, stored, u32, u64
from nanoeuler_parts.tensor_cores.ptx import (
    ALIGNMENT, dynamic_smem, global_address, leads_warpgroup, map_fence, mbarrier_expect,
    mbarrier_fence, mbarrier_init, mbarrier_wait, shared_address, tma_load,
)
from nanoeuler_parts.tensor_cores.tiles import descriptor, PANEL_BYTES, TILE_ROWS, wgmma

ONE_TILE_SMEM = 2 * int(PANEL_BYTES) + ALIGNMENT
multiply_tiles = wgmma(64, "rows", False)

@cuda_kernel
def one_tile_kernel(out, map_a, map_b, K):
    """out = A B^T.  A block computes a tile of 64 x 64.     grid (N / 64, M / 64), 128 threads
    out (M, N) bfloat16; map_a, map_b: tensor maps of A (M, K) and B (N, K), with boxes of 64 rows
    """
    a_tile = dynamic_smem()
    b_tile = a_tile + PANEL_BYTES
    barrier = shared_address(cuda.shared.array(1, u64))
    m0, n0 = TILE_ROWS * cuda.blockIdx.y, TILE_ROWS * cuda.blockIdx.x
    acc = filled(32, f32(0))
    if leads_warpgroup():
        map_fence(global_address(map_a))
        map_fence(global_address(map_b))
        mbarrier_init(barrier, u32(1))       # one thread arrives in each phase: this one
        mbarrier_fence()
    cuda.syncthreads()                       # the barrier is initialized
    for n in range((K + TILE_ROWS - 1) // TILE_ROWS):
        if leads_warpgroup():                # one thread requests both tiles
            mbarrier_expect(barrier, u32(2) * PANEL_BYTES)
            tma_load(a_tile, global_address(map_a), u32(TILE_ROWS * n), u32(m0), barrier)
            tma_load(b_tile, global_address(map_b), u32(TILE_ROWS * n), u32(n0), barrier)
        mbarrier_wait(barrier, u32(n % 2))   # phase n is complete: the tiles have landed, with
                                             # zeros beyond the edges of A and B
        multiply_tiles(acc, descriptor(a_tile), descriptor(b_tile))
        cuda.syncthreads()                   # every warp is done with them: load the next ones
    for i in range(32):
        row = m0 + first_row() + 8 * which_row(i)
        column = n0 + first_column() + column_of(i)
        if row < out.shape[0] and column < out.shape[1]:
            out[row, column] = stored(out, acc[i])

def one_tile_matmul(map_of, out, a, b):
    """out = a b^T, only on Hopper.     out (M, N), a (M, K), b (N, K)
    The rows of a and b must be whole chunks: K is a multiple of 8.
    map_of: function that returns tensor maps, as TensorOps.map_of"""
    M, N = out.shape
    launch(one_tile_kernel, out, map_of(a, TILE_ROWS), map_of(b, TILE_ROWS), a.shape[1],
           grid=(cdiv(N, TILE_ROWS), cdiv(M, TILE_ROWS)), block=128, smem=ONE_TILE_SMEM)
