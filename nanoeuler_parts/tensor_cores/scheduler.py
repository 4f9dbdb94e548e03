"""The scheduler of matrix products: which block computes which piece of work, and in which order.
"""
import functools

from numba import cuda

from nanoeuler_cuda import cdiv
from nanoeuler_parts.gpu.launches import HOPPER_TILE, inlined
from nanoeuler_parts.gpu.numbers import u32
from nanoeuler_parts.tensor_cores.ptx import (
    atomic_increment, DeviceFunctions, leads_block, quotient, semaphore_at, semaphore_release,
)

# ---- Pieces of work
# A product is out (M, N) = A B, with A and B in bfloat16.  A flag for each operand says how it is
# given:
#
#              False              True               `mn`: rows of its tiles run along
#     a_mn     A (M, K)           A^T (K, M)         K, or M if True
#     b_mn     B^T (N, K)         B (K, N)           K, or N if True
#
# A piece of work is one tile of the output and one split, a range of K.  Most products have only
# one split, all of K.  With several splits, pieces are ordered by split, then by tile.
#
# Within a split, tiles are numbered band by band.  A band has BAND rows of tiles.  Its tiles are
# numbered down the first column, then down the next.  Pieces that run at the same time then share
# rows of A and columns of B, which are still in L2.  With bands of two, nine tiles have this order:
#
#     0  2  4
#     1  3  5
#     6  7  8
#
# Example: `down` in the base preset, with 8 x 512 tokens, is y (4096, 768) = x (4096, 2048) w^T.
# Because w is (768, 2048), b_mn is False.  On `wgmma`, a tile is 128 x 256: there are 32 x 3 tiles
# in two bands.  Piece 0 is y[0:128, 0:256], and piece 1 is y[128:256, 0:256].  Piece 16 begins the
# next column, y[0:128, 256:512].  A tile is the sum of 2048 / 64 = 32 products of slices, of
# A (128, 64) and B^T (256, 64).
# Narrow tiles on `wgmma` have slices of 128 values of k, if the rows of A and B run along K.
BK = 64                                      # values of k in any other slice of A and B
BAND = 16                                    # rows of tiles in a band

@inlined
def tile_at(piece, M, N, K, splits, tile_rows, tile_columns, slice_k):
    """Returns (m, n, first, end) of a piece: the first entry of its tile is out[m, n], and its
    split consists of slices first to end - 1 of K.     slice_k: values of k in a slice"""
    tiles_down = u32((M + tile_rows - 1) // tile_rows)
    tiles_across = u32((N + tile_columns - 1) // tile_columns)
    split = quotient(piece, tiles_down * tiles_across)
    tile = piece - split * tiles_down * tiles_across
    slices = u32((K + slice_k - 1) // slice_k)
    band = quotient(tile, u32(BAND) * tiles_across)
    in_band = tile - band * u32(BAND) * tiles_across
    band_rows = min(tiles_down - band * u32(BAND), u32(BAND))        # the last band may have fewer
    column = quotient(in_band, band_rows)
    row = band * u32(BAND) + in_band - column * band_rows
    m = row * u32(tile_rows)
    n = column * u32(tile_columns)
    first = quotient(split * slices, splits)
    end = quotient((split + u32(1)) * slices, splits)
    return m, n, first, end

# A batch is n products of one shape.  Its pieces are those of the first product, then those of the
# second, and so on.

# Split-K: if a float32 output has few tiles and K is long, several blocks share a tile.  Each
# multiplies one split and adds its product to the output when it is its turn, which keeps the order
# of the sums.  A tile has one semaphore for the turns in `mma`, and two in `wgmma`, one for each
# warpgroup that stores.
#
# A block waits for the earlier splits of its tile.  If the blocks that compute these could only
# start after it has ended, it would wait forever.  CUDA does not promise that blocks start in the
# order of their numbers.
#
#     mma      A block computes one piece.  It does not take the piece of its block number, but the
#              next one of a counter: all earlier pieces then belong to blocks that run.
#     wgmma    A block computes one piece after another.  A cooperative launch starts all blocks
#              together: see `need_resident` in nanoeuler_parts/gpu/launches.py.

@inlined
def claim_piece(semaphores):
    """Returns the next piece that no block has claimed.  The counter is the last semaphore,
    which belongs to no tile.  The block that claims the last piece resets the counter to 0."""
    claim = cuda.shared.array(1, u32)
    if leads_block():
        counter = semaphore_at(semaphores, semaphores.size - 1)
        claim[0] = atomic_increment(counter)
        if claim[0] == u32(cuda.gridDim.x) - u32(1):
            semaphore_release(counter, u32(0))
    cuda.syncthreads()                       # claim[0] is written
    return claim[0]

# ---- Path wgmma: batches, and symmetric outputs
# Rows and columns of a tile on path wgmma.  A product with few tiles has narrower ones, of 128 or
# 64 columns, so that more multiprocessors take part: see `tile_columns`.
BM, BN = HOPPER_TILE

# If the outputs of a batch are symmetric, only the tiles on and below the diagonal are computed.  A
# tile that lies wholly below it is also stored to its mirror image, 256 x 128.  The table shows the
# twelve tiles of an output (768, 768), and mirror images in parentheses:
#
#     columns           0 to 255    256 to 511    512 to 767
#     rows   0 to 127      0          (2 3)         (4 5)
#     rows 128 to 255      1          (2 3)         (4 5)
#     rows 256 to 383      2            6           (8 9)
#     rows 384 to 511      3            7           (8 9)
#     rows 512 to 639      4            8             10
#     rows 640 to 767      5            9             11
@inlined
def lower_tile_at(tile, N):
    """Returns (m, n): the first entry of this tile on or below the diagonal is out[m, n].
    out (N, N).  The first 2 j tiles of column j lie above the diagonal."""
    tiles_down = u32((N + BM - 1) // BM)
    column, row = u32(0), tile
    while row >= tiles_down - u32(2) * column:
        row -= tiles_down - u32(2) * column
        column += u32(1)
    return (row + u32(2) * column) * u32(BM), column * u32(BN)

def tiles_of(M, N, symmetric, columns=BN):
    """The number of tiles of 128 rows and this number of columns that are computed of an output
    (M, N).  Symmetric outputs have tiles of 256 columns."""
    down, across = cdiv(M, BM), cdiv(N, columns)
    return down * across - (across * (across - 1) if symmetric else 0)

class Scheduler(DeviceFunctions):
    """Which pieces the blocks of path `wgmma` compute

    tiles_in(M, N)                                  returns the number of tiles of an output
    locate(piece, tiles, M, N, K, splits)           returns (z, m, n, first, end) of a piece: its
                                                    matrix in the batch, and tile_at"""

@functools.cache
def scheduler_of(batched, symmetric, columns, slice_k):
    """Returns the Scheduler for one product or a batch, and outputs that may be symmetric.
    columns: those of a tile     slice_k: values of k in a slice"""
    @inlined
    def tiles_in(M, N):
        across = (N + columns - 1) // columns
        tiles = u32((M + BM - 1) // BM * across)
        if symmetric:
            tiles -= u32(across * (across - 1))
        return tiles

    @inlined
    def locate(piece, tiles, M, N, K, splits):
        z = piece // tiles if batched else u32(0)
        m, n, first, end = tile_at(piece - z * tiles, M, N, K, u32(splits), BM, columns, slice_k)
        if symmetric:
            m, n = lower_tile_at(piece - z * tiles, N)
        return z, m, n, first, end
    return Scheduler(tiles_in=tiles_in, locate=locate)

# ---- How many splits
# Times in units of the time that a block takes to multiply one slice
STORE_TIME = 4                               # to store the result of a piece
MMA_TURN_TIME, WGMMA_TURN_TIME = 8, 2        # to wait for a split's turn, on either path

@functools.cache
def best_splits(tiles, slices, turn_time, blocks):
    """Returns the number of splits that takes the least time.  A wave is `blocks` pieces that run
    at the same time.

    Example: the gradient of gate_up in the base preset, with 64 x 512 tokens, on 132
    multiprocessors.  Out is 4096 x 768 and K is 32768, which is 512 slices.  The 32 x 3 tiles of
    128 x 256 are one wave, which leaves 36 multiprocessors idle.

        1 split      96 pieces of 512 slices    1 wave      1 (512 + 4) + 1 * 2 = 518
        4 splits    384 pieces of 128 slices    3 waves     3 (128 + 4) + 4 * 2 = 404
        8 splits    768 pieces of 64 slices     6 waves      6 (64 + 4) + 8 * 2 = 424"""
    def cost(splits):
        waves = cdiv(tiles * splits, blocks)
        return waves * (slices / splits + STORE_TIME) + turn_time * splits
    return min(range(1, 1 + slices), key=cost)

# {columns of a tile: time for 64 values of k}, from measurements on an H200.  A narrow tile
# multiplies less for each byte that it loads, so its loads take longer than its products.
SLICE_TIME = {256: 1.0, 128: 0.6, 64: 0.45}

@functools.cache
def tile_columns(M, N, K, count, blocks):
    """Returns the number of columns of the tiles that takes the least time, for `count` products
    (M, N) of K that overwrite their outputs.

    Example: `down` in the base preset, for a prompt of 512 tokens, on 132 multiprocessors.  Out is
    512 x 768, and K is 2048, which is 32 slices.

        256 columns    12 tiles    1 wave    32 * 1.00 + 4 = 36.0
        128 columns    24 tiles    1 wave    32 * 0.60 + 2 = 21.2
         64 columns    48 tiles    1 wave    32 * 0.45 + 1 = 15.4"""
    def cost(columns):
        waves = cdiv(count * tiles_of(M, N, False, columns), blocks)
        return waves * (cdiv(K, BK) * SLICE_TIME[columns] + STORE_TIME * columns / BN)
    return min(SLICE_TIME, key=cost)

def splits_for(tiles, K, semaphores, turn_time, blocks):
    """Returns the number of splits for a product.  It is 1 if the product overwrites its output, or
    if there are fewer than two semaphores per tile."""
    if semaphores is None or 2 * tiles > semaphores.size:
        return 1
    return best_splits(tiles, cdiv(K, BK), turn_time, blocks)
