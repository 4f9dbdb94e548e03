"""Attention on tensor cores: its kernels replace section 4.5 of nanoeuler_cuda.py.

Contents
    shared memory, and the products of each kernel
    the operations on tiles that the kernels call, on path mma and on path wgmma
    the ring of tiles
    the softmax and the stores
    the three kernels: forward, dq and dkv
"""
import functools
import math
from typing import NamedTuple

import numpy as np
from numba import cuda

from nanoeuler_cuda import Attention, filled, quad_max, quad_sum, unchanged
from nanoeuler_parts.gpu.launches import cuda_kernel, inlined, made_once
from nanoeuler_parts.gpu.mma import column_of, first_column, first_row, mma, which_row
from nanoeuler_parts.gpu.numbers import exp2, f32, i32, LOG2E, u16, u32, u64, value, vector
from nanoeuler_parts.tensor_cores.pipeline import pipeline_of
from nanoeuler_parts.tensor_cores.ptx import (
    after_previous, ALIGNMENT, bit, cp_async, cp_async_4, cp_async_wait_all, DeviceFunctions,
    dynamic_smem, global_address, lane_id, leads_block, map_fence, mbarrier_expect, mbarrier_fence,
    mbarrier_init, mbarrier_wait, pack_bf16, shared_address, store_pair, thread_id, tma_load,
    warp_id,
)
from nanoeuler_parts.tensor_cores.tiles import (
    BF16_PER_CHUNK, CHUNK_BYTES, descriptor, ldmatrix_columns, ldmatrix_rows, PANEL_BYTES, swizzled,
    TILE_ROWS, wgmma,
)

# This is the FlashAttention of 4.5 of nanoeuler_cuda.py in bfloat16, for head sizes 32, 64 and 128.
# A block is one warpgroup.  A tile has 64 rows of one head, of Q, K, V, O or dO.  Two tiles, the
# stationary ones, stay with the block until it ends.  Pairs of other tiles flow through a ring of
# two stages: a pair is copied while the pair before it is multiplied.  Shared memory, from its
# start (for D = 64, a tile has 8 KB):
#
#     tile             forward      dq                      dkv
#     0, 1             Q, Q         Q, dO                   K, V         stationary
#     2, 3  stage 0    K, V         K, V (tile 2 first: O)  Q, dO        pairs 0, 2, 4, ..
#     4, 5  stage 1    K, V         K, V                    Q, dO        pairs 1, 3, 5, ..
#
# With each pair of tiles, a block computes:
#
#     forward    S = Q K^T                                  O += P V             each tile of Q
#     dq         S = Q K^T,      dP = dO V^T                dQ += dS K
#     dkv        S^T = K Q^T,    dP^T = V dO^T              dV += P^T dO,  dK += dS^T Q
#
# A warp computes 16 rows of S, P or dS.  The registers that hold them have the layout of a left
# operand (a fragment of A), so the next product reads them there, and not from shared memory.  The
# sums of a product, 64 x 64 or 64 x D, have the layout of gpu/mma.py: a thread has two rows of a
# tile.  For D = 64, a thread holds a tile as fragments of A in 16 registers, the sums of a tile of
# S in 32, and the sums of a tile of O in 32.  For D = 128, two tiles of Q would need more registers
# than a thread has, so a block of forward has one.  A short sequence has one tile of Q per block,
# too, because its few blocks would leave most multiprocessors idle: see `q_tiles`.
#
# The three kernels are independent of how tiles are copied and multiplied: they call the nine
# functions of `TileOps`.  `mma_tile_ops` has these functions for any tensor core, `wgmma_tile_ops`
# for Hopper, D = 64 and D = 128.  The first one is enough to understand the kernels.  The second
# one shows the changes for Hopper.
#
# The softmax uses powers of two: exp(x - m) = 2^(x log2(e) - m log2(e)) is one multiply-add and one
# exp2 per entry.
FAST_HEADS = 32, 64, 128                     # head sizes that these kernels support
WGMMA_HEADS = 64, 128                        # those of path wgmma
STATIONARY = 2                               # stationary tiles
STAGES = 2                                   # of the ring; each holds a pair of tiles
STATIONARY_BARRIER = STAGES                  # barriers 0 to STAGES - 1 are those of the stages
N_BARRIERS = STAGES + 1
pipeline = pipeline_of(STAGES)
S_REGS = 32                                  # a thread's registers for a tile of S or dP
# The loops over pairs begin with this round, which only requests pair 0.  It computes an address of
# pair -1, and does not use it.  It replaces a request before the loop: with one, forward would need
# more than the 168 registers that three blocks leave to a thread, and would spill 40 bytes.
PROLOGUE = -1
INF32, LOG2E32 = np.float32(math.inf), np.float32(LOG2E)
LOWEST = np.float32(-1e30)                   # below any score, but not infinite

class TileOps(DeviceFunctions):
    """The operations that the kernels below need, to copy and to multiply tiles.

    set_up(loads) -> smem, barriers
        Initializes the barriers, and waits for the previous kernel if launches overlap.  Returns
        the addresses of dynamic shared memory and of the barriers.  loads: number of tiles that
        will be requested with the barrier of the stationary tiles
    fence_map(source)
        Must be called before the first load from `source`, a matrix or its tensor map.
    issue_load(barrier, tile, source, row, last, col)
        Requests the 64 rows from `row` and D columns from `col` of the source, whose rows follow
        each other in memory.  tile: the address that they are copied to; last: the last row of the
        sequence
    wait(barrier, parity)
        Waits until the tiles requested with this barrier have arrived, and until no thread reads
        the tiles of the round before.
    load_fragments(a, stationary, count)
        Loads one or two stationary tiles, which begin at address `stationary`, into registers, if
        products need that.
    multiply_one(a, stationary, other) -> s
        Returns A B^T.  A: the first stationary tile, as for multiply_two; B: the tile at address
        `other`
    multiply_two(a, stationary, first, second) -> s
        Returns two products A B^T.  A: the stationary tiles, in registers `a` (mma) or at address
        `stationary` (wgmma); B: the tiles at addresses `first` and `second`
    accumulate_one(acc, a, tile)
        acc += A B.  A (64, 64): fragments in `a`; B (64, D): the tile at address `tile`
    accumulate_two(acc, a, first, second)
        The same for two products: both halves of `acc`, both halves of `a`, and two tiles"""

class TileSizes(NamedTuple):
    """Sizes of a tile of D columns"""
    chunks: int                              # chunks per row
    acc_regs: int                            # a thread's registers for sums of 64 x D
    a_regs: int                              # a thread's registers for the tile as fragments of A
    bytes: np.uint32

def sizes_of(D):
    """Returns the TileSizes for head size D."""
    return TileSizes(D // BF16_PER_CHUNK, acc_regs=D // 2, a_regs=D // 4,
                     bytes=np.uint32(2 * TILE_ROWS * D))

@inlined
def rows_of_64_bytes(row, chunk):
    """Returns the offset of a chunk of a tile of 32 columns.  It is like `swizzled`, but 128 bytes
    hold two rows, which share one order of chunks."""
    return row * u32(64) + ((chunk ^ ((row >> u32(1)) & u32(3))) * CHUNK_BYTES)

def layout_of(D):
    """Returns the device function (row, chunk) -> offset of a chunk in a tile, in bytes."""
    return swizzled if D > 32 else rows_of_64_bytes

def fragments_of(D):
    """Returns the device function load_a(a, i, tile): it loads the warp's 16 rows of a tile into
    a[i:] as fragments of A."""
    chunk_offset = layout_of(D)

    @inlined
    def load_a(a, i, tile):
        row = u32(16) * warp_id() + (lane_id() & u32(15))
        for k in range(D // 16):
            ldmatrix_rows(a, i + 4 * k, tile + chunk_offset(row, u32(2 * k) + bit(lane_id(), 4)))
    return load_a

# ---- Operations on tiles, path mma
# All threads copy tiles, chunk by chunk.  Fragments of both operands are loaded from shared memory:
# fragments of A once, fragments of B by every warp.
@functools.cache
def mma_tile_ops(D):
    CHUNKS, ACC_REGS, A_REGS, TILE_BYTES = sizes_of(D)
    D_STEPS = D // 16                        # steps of 16 along D
    chunk_offset, load_a = layout_of(D), fragments_of(D)

    @inlined
    def set_up(loads):
        return dynamic_smem(), u32(0)        # there are no barriers

    @inlined
    def fence_map(source):
        pass                                 # there are no tensor maps

    @inlined
    def issue_load(barrier, tile, source, row, last, col):
        """Copies of the last row of the sequence take the place of rows beyond it."""
        width = source.shape[1]
        for i in range(CHUNKS // 2):         # 64 * CHUNKS chunks: one per thread at a time
            r = (thread_id() + u32(128 * i)) // u32(CHUNKS)
            chunk = (thread_id() + u32(128 * i)) % u32(CHUNKS)
            offset = min(row + r, last) * width + col + chunk * BF16_PER_CHUNK
            cp_async(tile + chunk_offset(r, chunk), global_address(source) + u64(2 * offset))

    @inlined
    def wait(barrier, parity):
        """Waits for all copies of this thread, and then for all threads."""
        cp_async_wait_all()
        cuda.syncthreads()

    @inlined
    def load_fragments(a, stationary, count):
        load_a(a, 0, stationary)
        if count == 2:
            load_a(a, A_REGS, stationary + TILE_BYTES)

    @inlined
    def mma_16_columns(acc, i, a, j, b):
        mma(acc, i, a, j, b, 0)
        mma(acc, i + 4, a, j, b, 2)

    @inlined
    def place_of_b(k, n):
        """Returns the offset of the chunk that this lane gives to ldmatrix, for 16 columns of B and
        16 values of k.  Columns of B are rows of the other tile, here 16 n to 16 n + 15.  The lanes
        take their chunks as in the table of `mma_operand`."""
        row = (lane_id() & u32(7)) + u32(8) * bit(lane_id(), 4)
        return chunk_offset(row + u32(16 * n), bit(lane_id(), 3) + u32(2 * k))

    @inlined
    def multiply_one(a, stationary, other):
        s, b = filled(32, f32(0)), cuda.local.array(4, u32)
        for k in range(D_STEPS):
            for n in range(4):
                ldmatrix_rows(b, 0, other + place_of_b(k, n))
                mma_16_columns(s, 8 * n, a, 4 * k, b)
        return s

    @inlined
    def multiply_two(a, stationary, first, second):
        """s[:32] and s[32:] = two products (64, 64): a stationary tile * the other tile^T.  If both
        have the same other tile, its fragments are loaded once."""
        s, b = filled(64, f32(0)), cuda.local.array(4, u32)
        for k in range(D_STEPS):
            for n in range(4):
                where = place_of_b(k, n)
                ldmatrix_rows(b, 0, first + where)
                mma_16_columns(s, 8 * n, a, 4 * k, b)
                if second != first:
                    ldmatrix_rows(b, 0, second + where)
                mma_16_columns(s, 32 + 8 * n, a, A_REGS + 4 * k, b)
        return s

    @inlined
    def load_b(b, k, n, tile):
        """Loads rows 16 k to 16 k + 15, columns 16 n to 16 n + 15 of a tile as fragments of B."""
        row, chunk = lane_id() & u32(15), bit(lane_id(), 4)      # `B, mn` in that table
        ldmatrix_columns(b, 0, tile + chunk_offset(u32(16 * k) + row, u32(2 * n) + chunk))

    @inlined
    def accumulate_one(acc, a, tile):
        """acc (64, D) += A (64, 64) B.  a: A as fragments; tile: B (64, D)"""
        b = cuda.local.array(4, u32)
        for k in range(4):
            for n in range(D_STEPS):
                load_b(b, k, n, tile)
                mma_16_columns(acc, 8 * n, a, 4 * k, b)

    @inlined
    def accumulate_two(acc, a, first, second):
        """acc[:ACC_REGS] += A B and acc[ACC_REGS:] += A' B'.  a: A and then A' as fragments; first
        and second: B and B'.  If B and B' are the same tile, its fragments are loaded once."""
        b = cuda.local.array(4, u32)
        for k in range(4):
            for n in range(D_STEPS):
                load_b(b, k, n, first)
                mma_16_columns(acc, 8 * n, a, 4 * k, b)
                if second != first:
                    load_b(b, k, n, second)
                mma_16_columns(acc, ACC_REGS + 8 * n, a, 16 + 4 * k, b)

    return TileOps(set_up=set_up, fence_map=fence_map, issue_load=issue_load, wait=wait,
                   load_fragments=load_fragments, multiply_one=multiply_one,
                   multiply_two=multiply_two, accumulate_one=accumulate_one,
                   accumulate_two=accumulate_two)

# ---- Operations on tiles, path wgmma, for D = 64 and D = 128
# One thread requests a whole tile from the copy engine, panel by panel, and an mbarrier counts its
# bytes.  `wgmma` reads B from shared memory once per warpgroup.  In A B^T, it reads the stationary
# tiles there, too, so they take no registers.  Two products are in flight at once.
@functools.cache
def wgmma_tile_ops(D):
    TILE_BYTES, PANELS = sizes_of(D).bytes, D // 64
    one_abt = wgmma(64, "rows", b_mn=False, adds="never", K=D)
    two_abt = wgmma(64, "rows", b_mn=False, count=2, adds="never", K=D)
    one_ab = wgmma(D, "registers", b_mn=True)
    two_ab = wgmma(D, "registers", b_mn=True, count=2)

    @inlined
    def set_up(loads):
        """There is one barrier for each stage of the ring, and one for the stationary tiles.  Each
        load arrives once at its barrier, and announces its bytes."""
        smem, barriers = dynamic_smem(), shared_address(cuda.shared.array(N_BARRIERS, u64))
        if leads_block():
            loads_of_a_pair = u32(2)
            for stage in range(STAGES):
                mbarrier_init(pipeline.barrier(barriers, stage), loads_of_a_pair)
            mbarrier_init(pipeline.barrier(barriers, STATIONARY_BARRIER), u32(loads))
            mbarrier_fence()
        cuda.syncthreads()                   # the barriers are initialized
        after_previous()
        return smem, barriers

    @inlined
    def fence_map(source):
        if leads_block():
            map_fence(global_address(source))

    @inlined
    def issue_load(barrier, tile, source, row, last, col):
        """source: a tensor map.  Rows beyond the matrix are zeros, and the kernels mask them or do
        not store their results.  `TensorOps.attention_kernels` chooses this path only if no rows
        of another sequence are requested."""
        if leads_block():
            mbarrier_expect(barrier, TILE_BYTES)
            for p in range(PANELS):
                tma_load(tile + PANEL_BYTES * u32(p), global_address(source), u32(col + 64 * p),
                         u32(row), barrier)

    @inlined
    def wait(barrier, parity):
        """Waits for the tiles, and for copies by cp.async: dkv copies lse and delta itself."""
        cp_async_wait_all()
        mbarrier_wait(barrier, u32(parity))
        cuda.syncthreads()

    @inlined
    def load_fragments(a, stationary, count):
        pass                                 # the products read them from shared memory

    @inlined
    def multiply_one(a, stationary, other):
        s = filled(32, f32(0))
        one_abt(s, descriptor(stationary), descriptor(other))
        return s

    @inlined
    def multiply_two(a, stationary, first, second):
        s = filled(64, f32(0))
        two_abt(s, descriptor(stationary), descriptor(first), descriptor(stationary + TILE_BYTES),
                descriptor(second))
        return s

    @inlined
    def accumulate_one(acc, a, tile):
        one_ab(acc, a, descriptor(tile))

    @inlined
    def accumulate_two(acc, a, first, second):
        two_ab(acc, a, descriptor(first), descriptor(second))

    return TileOps(set_up=set_up, fence_map=fence_map, issue_load=issue_load, wait=wait,
                   load_fragments=load_fragments, multiply_one=multiply_one,
                   multiply_two=multiply_two, accumulate_one=accumulate_one,
                   accumulate_two=accumulate_two)

def tile_ops(D, hopper):
    """Returns the TileOps for head size D on path `wgmma` (hopper) or `mma`."""
    return wgmma_tile_ops(D) if hopper else mma_tile_ops(D)

# ---- The ring
class Ring(DeviceFunctions):
    """The pairs of tiles that flow through the pipeline.  A stage holds a pair, and the stages need
    no mbarrier `empty`, because all threads request copies and multiply.

    pair_at(smem, n)              returns the address of the first tile; the second one follows it
    wait_pair(barriers, n)        waits until the pair has arrived
    issue_pair(smem, barriers, n, one, col1, other, col2, row, last)
                                  requests the 64 rows from `row` of two matrices, for the first
                                  tile from column col1 of `one`, for the second from col2 of
                                  `other`.  last: the last row of the sequence"""

@functools.cache
def ring_of(D, hopper):
    """Returns the Ring for head size D on one of the two paths."""
    ops, TILE_BYTES = tile_ops(D, hopper), sizes_of(D).bytes

    @inlined
    def pair_at(smem, n):
        return smem + u32((STATIONARY + pipeline.stage_of(n) * 2) * TILE_BYTES)

    @inlined
    def wait_pair(barriers, n):
        ops.wait(pipeline.barrier(barriers, pipeline.stage_of(n)), pipeline.parity_of(n))

    @inlined
    def issue_pair(smem, barriers, n, one, col1, other, col2, row, last):
        tile, barrier = pair_at(smem, n), pipeline.barrier(barriers, pipeline.stage_of(n))
        ops.issue_load(barrier, tile, one, row, last, col1)
        ops.issue_load(barrier, tile + TILE_BYTES, other, row, last, col2)
    return Ring(pair_at=pair_at, wait_pair=wait_pair, issue_pair=issue_pair)

@functools.cache
def advance_pipeline_of(D, hopper):
    """Returns a device function for forward and dq: it waits for pair n of K and V, and requests
    pair n + 1.  In the round PROLOGUE, it only requests pair 0.
    key0: the row of the matrix where the keys of pair 0 begin"""
    ring = ring_of(D, hopper)

    @inlined
    def advance_pipeline(smem, barriers, n, count, qkv, k_col, v_col, key0, last):
        if n >= 0:
            ring.wait_pair(barriers, n)
        if n + 1 < count:
            ring.issue_pair(smem, barriers, n + 1, qkv, k_col, qkv, v_col, key0 + n * 64 + 64,
                            last)
    return advance_pipeline

def first_key_of(window):
    """Returns the device function first_key(t): the first key of the first tile that a row from t
    on attends to."""
    @inlined
    def first_key(t):
        return max(0, t + 1 - window) // TILE_ROWS * TILE_ROWS if window else 0
    return first_key

# ---- Softmax and stores
@functools.cache
def softmax_of(window):
    """Returns the device functions (mask, online_softmax) for a window: see `portable_attention`.
    """
    @inlined
    def mask(s, first, col_minus_row):
        """Sets the entries of a tile of S that are above the diagonal, or before the window, to
        -inf.  The thread's entries of the tile are s[first:first + 32].

        col_minus_row: the thread's first column minus its first row, both counted in the sequence
        """
        if col_minus_row > -TILE_ROWS:
            for i in range(S_REGS):
                if col_minus_row > i32(8 * which_row(i) - column_of(i)):
                    s[first + i] = -INF32
        if window and col_minus_row <= 8 - window:
            for i in range(S_REGS):
                if col_minus_row <= i32(8 * which_row(i) - column_of(i) - window):
                    s[first + i] = -INF32

    @inlined
    def online_softmax(s, index, acc, ACC_REGS, m, l, col_minus_row, scale2):
        """One step of the running softmax for one tile of S, s[32 * index:].  S becomes
        2^(scale2 (S - m)), with scale2 = log2(e) / sqrt(D).  The sums in l and acc shrink to the
        new m.

        index            number of the tile, 0 or 1
        acc              the sums of O for both tiles; each has ACC_REGS registers
        m, l             maximum and sum of each of the thread's four rows, two per tile.  m is of
                         the whole row.  l only sums the thread's own columns, and forward adds up
                         those of the quad at the end
        col_minus_row    as for `mask`, for this tile"""
        top, shrink, first = cuda.local.array(2, f32), cuda.local.array(2, f32), 32 * index
        mask(s, first, col_minus_row)
        for i in range(2):
            top[i] = m[2 * index + i]
        for i in range(S_REGS):
            top[which_row(i)] = max(top[which_row(i)], s[first + i])
        for i in range(2):
            top[i] = quad_max(top[i])        # a quad of lanes shares a row
            shrink[i] = exp2((m[2 * index + i] - top[i]) * scale2)
            m[2 * index + i] = top[i]
            top[i] *= scale2
            l[2 * index + i] *= shrink[i]
        for i in range(ACC_REGS):
            acc[index * ACC_REGS + i] *= shrink[which_row(i)]
        for i in range(S_REGS):
            s[first + i] = exp2(s[first + i] * scale2 - top[which_row(i)])
            l[2 * index + which_row(i)] += s[first + i]
    return mask, online_softmax

@inlined
def store_neighbours(out, low, high, row, col):
    """Stores the two neighbours that this thread has of columns col to col + 7 of a row.  The rows
    of `out` follow each other in memory."""
    col += first_column()
    store_pair(global_address(out) + u64(2 * (row * out.shape[1] + col)), pack_bf16(low, high))

@inlined
def rows_of_block(rows, T):
    """Returns (row0, t0, last) for a block of forward or dq that computes `rows` rows.

    row0    the row of the matrix where the sequence begins
    t0      the block's first row, counted in the sequence.  The first blocks get the last rows,
            because these take longest
    last    the row of the matrix where the sequence ends"""
    row0 = cuda.blockIdx.z * T
    return row0, (cuda.gridDim.x - 1 - cuda.blockIdx.x) * rows, row0 + T - 1

@functools.cache
def store_rotated_of(D):
    """Returns the device function store_rotated for head size D."""
    CHUNKS, ACC_REGS = sizes_of(D).chunks, sizes_of(D).acc_regs

    @inlined
    def store_rotated(out, acc, first, row, col, cos, sin, t, scale):
        """Stores a row of a gradient of q or k as it was before RoPE.  The row of acc, times scale,
        is rotated back: each pair (c, c + D / 2) by its angle at position t.

        first: index in acc of the row's first number     row, col: where the row begins in out"""
        c = first_column()
        u, v = cuda.local.array(2, f32), cuda.local.array(2, f32)
        for j in range(CHUNKS // 2):
            for n in range(2):
                x, y = (acc[first + 4 * j + n] * scale,
                        acc[first + ACC_REGS // 2 + 4 * j + n] * scale)
                cosine, sine = cos[t, 8 * j + c + n], sin[t, 8 * j + c + n]
                u[n], v[n] = x * cosine + y * sine, y * cosine - x * sine
            store_neighbours(out, u[0], u[1], row, col + 8 * j)
            store_neighbours(out, v[0], v[1], row, col + D // 2 + 8 * j)
    return store_rotated

# ---- The kernels.  hopper: path `wgmma`
def q_tiles(D, rows, multiprocessors):
    """Returns how many tiles of Q a block of forward has, 1 or 2.
    rows: how many rows of queries all heads of all sequences have"""
    return 1 if D == 128 or rows <= 2 * TILE_ROWS * multiprocessors else 2

@made_once
def tensor_attention_forward(D, hopper, window, TILES):
    CHUNKS, ACC_REGS, A_REGS, TILE_BYTES = sizes_of(D)
    # A thread's registers for O, Q and P, and its rows, of all tiles of Q
    ALL_ACC_REGS, ALL_A_REGS, ALL_P_REGS = TILES * ACC_REGS, TILES * A_REGS, TILES * S_REGS // 2
    THREAD_ROWS, BLOCK_ROWS = 2 * TILES, TILES * TILE_ROWS
    ops, ring, advance_pipeline = (f(D, hopper) for f in (tile_ops, ring_of, advance_pipeline_of))
    first_key, (_, online_softmax) = first_key_of(window), softmax_of(window)
    # A row may have no key of its window in the block's first tile.  Its maximum is then LOWEST
    # and not -inf, because -inf - -inf is NaN
    NO_MAXIMUM = LOWEST if window else -INF32

    @inlined
    def multiply_both(q, stationary, k_tile):
        return ops.multiply_two(q, stationary, k_tile, k_tile)

    multiply = multiply_both if TILES == 2 else ops.multiply_one

    @cuda_kernel(launch_bounds=(128, 3 if hopper else 1))
    def forward(o, lse, qkv, T, G, scale):
        """o = softmax(Q K^T / sqrt(D)) V, causal, and lse, like the portable kernel.
        A block computes one or two tiles of 64 query rows of a head.
        grid (T / (64 TILES), H, B), 128 threads     qkv: the matrix, or its tensor map"""
        smem, barriers = ops.set_up(TILES)
        ops.fence_map(qkv)
        acc, m = filled(ALL_ACC_REGS, f32(0)), filled(THREAD_ROWS, NO_MAXIMUM)
        l = filled(THREAD_ROWS, f32(0))
        q, p_pairs = cuda.local.array(ALL_A_REGS, u32), cuda.local.array(ALL_P_REGS, u32)
        h, H, scale2 = cuda.blockIdx.y, cuda.gridDim.y, scale * LOG2E32
        row0, t0, last = rows_of_block(BLOCK_ROWS, T)
        k_col = o.shape[1] + h * G // H * D
        # the thread's rows are r and r + 8, and r + 64 and r + 72; count: pairs of tiles
        r, k0 = t0 + first_row(), first_key(t0)
        count = (min(t0 + BLOCK_ROWS, T) - k0 + 63) // 64
        barrier = pipeline.barrier(barriers, STATIONARY_BARRIER)
        for i in range(TILES):
            ops.issue_load(barrier, smem + u32(i * TILE_BYTES), qkv, row0 + t0 + 64 * i, last,
                           h * D)
        ops.wait(barrier, 0)                 # Q has arrived
        ops.load_fragments(q, smem, TILES)
        for n in range(PROLOGUE, count):     # n: number of the pair of tiles
            k_tile = ring.pair_at(smem, n)
            advance_pipeline(smem, barriers, n, count, qkv, k_col, k_col + G * D, row0 + k0, last)
            if n < 0:
                continue
            v_tile, col_minus_row = k_tile + TILE_BYTES, i32(k0 + n * 64 + first_column() - r)
            s = multiply(q, smem, k_tile)    # S = Q K^T, for each tile of Q
            online_softmax(s, 0, acc, ACC_REGS, m, l, col_minus_row, scale2)
            if TILES == 2:
                online_softmax(s, 1, acc, ACC_REGS, m, l, i32(col_minus_row - 64), scale2)
            p = s                            # the same registers: P = 2^(scale2 (S - m))
            for i in range(ALL_P_REGS):
                p_pairs[i] = pack_bf16(p[2 * i], p[2 * i + 1])
            if TILES == 2:
                ops.accumulate_two(acc, p_pairs, v_tile, v_tile)     # O += P V
            else:
                ops.accumulate_one(acc, p_pairs, v_tile)
        for i in range(THREAD_ROWS):
            t, total = r + i // 2 * 64 + i % 2 * 8, quad_sum(l[i])
            if t < T:
                for j in range(CHUNKS):      # acc[n] and acc[n + 1]: tile i // 2, row i % 2
                    n = i // 2 * ACC_REGS + j * 4 + i % 2 * 2
                    store_neighbours(o, acc[n] / total, acc[n + 1] / total, row0 + t, h * D + 8 * j)
                if first_column() == 0:
                    lse[h, row0 + t] = m[i] * scale2 / LOG2E32 + math.log(total)
    return forward

@made_once
def tensor_attention_dq(D, hopper, window):
    _, ACC_REGS, A_REGS, TILE_BYTES = sizes_of(D)
    BOTH_A_REGS = 2 * A_REGS                 # of two tiles
    ops, ring, advance_pipeline = (f(D, hopper) for f in (tile_ops, ring_of, advance_pipeline_of))
    load_a, store_rotated = fragments_of(D), store_rotated_of(D)
    first_key, (mask, _) = first_key_of(window), softmax_of(window)

    @cuda_kernel(launch_bounds=(128, 1))
    def dq(dqkv, delta, do, o, lse, qkv, cos, sin, T, HD, scale):
        """dQ = dS K as it was before RoPE, and delta = <dO, O> for dkv.  A block computes 64 query
        rows of a head.     grid (T / 64, H, B), 128 threads
        do, o, qkv: matrices, or their tensor maps"""
        smem, barriers = ops.set_up(STATIONARY + 1)
        ops.fence_map(qkv)
        ops.fence_map(do)
        ops.fence_map(o)
        acc = filled(ACC_REGS, f32(0))
        delta_of_row = filled(2, f32(0))
        lse2 = cuda.local.array(2, f32)      # lse * log2(e) of the same two rows
        a, ds_pairs = cuda.local.array(BOTH_A_REGS, u32), cuda.local.array(16, u32)  # a: Q and dO
        h, H, scale2 = cuda.blockIdx.y, cuda.gridDim.y, scale * LOG2E32
        row0, t0, last = rows_of_block(64, T)
        G = (dqkv.shape[1] - HD) // (2 * D)
        k_col, r = HD + h * G // H * D, t0 + first_row()         # the thread's rows: r and r + 8
        barrier, k0 = pipeline.barrier(barriers, STATIONARY_BARRIER), first_key(t0)
        count = (min(t0 + 64, T) - k0 + 63) // 64
        # O lies where the first tile of K comes later
        do_tile, o_tile = smem + TILE_BYTES, smem + u32(2 * TILE_BYTES)
        ops.issue_load(barrier, smem, qkv, row0 + t0, last, h * D)
        ops.issue_load(barrier, do_tile, do, row0 + t0, last, h * D)
        ops.issue_load(barrier, o_tile, o, row0 + t0, last, h * D)
        ops.wait(barrier, 0)                 # Q, dO and O have arrived
        load_a(a, 0, o_tile)
        load_a(a, A_REGS, do_tile)
        for i in range(A_REGS):              # even registers of A have row r, odd ones row r + 8
            u, v = a[i], a[A_REGS + i]       # a pair of O, and a pair of dO
            delta_of_row[i % 2] += value(u16(u)) * value(u16(v)) + (
                value(u16(u >> u32(16))) * value(u16(v >> u32(16))))
        for i in range(2):
            delta_of_row[i] = quad_sum(delta_of_row[i])
            t = row0 + min(r + 8 * i, T - 1)
            lse2[i] = lse[h, t] * LOG2E32
            if first_column() == 0 and r + 8 * i < T:
                delta[h, t] = delta_of_row[i]
        ops.load_fragments(a, smem, 2)
        cuda.syncthreads()                   # all threads have read O: K may overwrite it
        for n in range(PROLOGUE, count):     # n: number of the pair of tiles
            k_tile = ring.pair_at(smem, n)
            advance_pipeline(smem, barriers, n, count, qkv, k_col, k_col + G * D, row0 + k0, last)
            if n < 0:
                continue
            # S = Q K^T in the first S_REGS registers, dP = dO V^T in the others
            s_dp = ops.multiply_two(a, smem, k_tile, k_tile + TILE_BYTES)
            mask(s_dp, 0, i32(k0 + n * 64 + first_column() - r))
            ds = s_dp                        # in the registers of S: P (dP - delta).  store_rotated
                                             # multiplies by `scale`
            for i in range(S_REGS):
                p = exp2(s_dp[i] * scale2 - lse2[which_row(i)])
                ds[i] = p * (s_dp[S_REGS + i] - delta_of_row[which_row(i)])
            for i in range(S_REGS // 2):
                ds_pairs[i] = pack_bf16(ds[2 * i], ds[2 * i + 1])
            ops.accumulate_one(acc, ds_pairs, k_tile)                # dQ += dS K
        for i in range(2):
            if r + 8 * i < T:
                store_rotated(dqkv, acc, 2 * i, row0 + r + 8 * i, h * D, cos, sin, r + 8 * i, scale)
    return dq

@made_once
def tensor_attention_dkv(D, hopper, window):
    CHUNKS, ACC_REGS, A_REGS, TILE_BYTES = sizes_of(D)
    BOTH_ACC_REGS, BOTH_A_REGS = 2 * ACC_REGS, 2 * A_REGS    # of two tiles
    ops, ring, store_rotated = tile_ops(D, hopper), ring_of(D, hopper), store_rotated_of(D)
    load_two, _ = vector(2)

    # For D = 128, a thread needs all registers that it may have
    @cuda_kernel(launch_bounds=(128, 3 if hopper and D < 128 else 1))
    def dkv(dqkv, delta, do, o, lse, qkv, cos, sin, T, HD, scale):
        """dK = sum_h dS^T Q as it was before RoPE, and dV = sum_h P^T dO.  The sums run over the
        query heads h that share this head of keys.  A block computes 64 keys.  Rows of S^T and dP^T
        are keys, and columns are queries.     grid (T / 64, G, B), 128 threads
        do, qkv: matrices, or their tensor maps; o is not used"""
        smem, barriers = ops.set_up(STATIONARY)
        ops.fence_map(qkv)
        ops.fence_map(do)
        # for each of the two stages, 128 numbers: lse of 64 queries, then delta of the same queries
        lse_delta = cuda.shared.array(256, f32)
        acc = filled(BOTH_ACC_REGS, f32(0))  # dV, then dK
        a, pairs = cuda.local.array(BOTH_A_REGS, u32), cuda.local.array(S_REGS, u32)   # a: K, V
        g, row0, k0 = cuda.blockIdx.y, cuda.blockIdx.z * T, cuda.blockIdx.x * 64
        last, G, group = row0 + T - 1, cuda.gridDim.y, HD // D // cuda.gridDim.y
        k_col, v_col, scale2 = HD + g * D, HD + (G + g) * D, scale * LOG2E32
        # for each pair of tiles, half of the threads copy a number of lse, the others one of delta
        my_source = global_address(lse) if cuda.threadIdx.x < 64 else global_address(delta)
        barrier = pipeline.barrier(barriers, STATIONARY_BARRIER)
        for i in range(2):
            ops.issue_load(barrier, smem + u32(i * TILE_BYTES), qkv, row0 + k0, last,
                           k_col + i * G * D)
        ops.wait(barrier, 0)                 # K and V have arrived
        ops.load_fragments(a, smem, 2)
        # queries k0 to end - 1 attend to keys of this block
        end = min(T, k0 + TILE_ROWS - 1 + window) if window else T
        next_h, next_t, count = g * group, k0, group * ((end - k0 + 63) // 64)
        for n in range(PROLOGUE, count):     # n: number of the pair of tiles
            t0 = next_t
            q_tile = ring.pair_at(smem, n)
            do_tile = q_tile + TILE_BYTES
            if n >= 0:
                ring.wait_pair(barriers, n)
                next_t += 64
                if next_t >= end:            # continue with the group's next query head
                    next_h, next_t = next_h + 1, k0
            if n + 1 < count:
                t = row0 + next_t + cuda.threadIdx.x % 64
                flat_index = next_h * lse.shape[1] + min(t, last)
                index = (n + 1) % 2 * 128 + cuda.threadIdx.x
                cp_async_4(shared_address(lse_delta) + u32(4 * index),
                           my_source + u64(4 * flat_index))
                col = next_h * D
                ring.issue_pair(smem, barriers, n + 1, qkv, col, do, col, row0 + next_t, last)
            if n < 0:
                continue
            # S^T = K Q^T in the first S_REGS registers, dP^T = V dO^T in the others
            s_dp = ops.multiply_two(a, smem, q_tile, do_tile)
            if t0 == k0 or t0 + 64 > T:      # the tile is on the diagonal, or has rows beyond T
                # the thread's first key - its first query; queries from this one to T
                key_minus_query = i32(k0 + first_row() - t0 - first_column())
                queries_left = i32(T - t0 - first_column())
                for i in range(S_REGS):
                    if i32(column_of(i) - 8 * which_row(i)) < key_minus_query or (
                            i32(column_of(i)) >= queries_left):
                        s_dp[i] = -INF32
            if window and t0 + TILE_ROWS - k0 > window:  # some queries are beyond their window
                key_minus_query = i32(k0 + first_row() - t0 - first_column())
                for i in range(S_REGS):
                    if i32(column_of(i) - 8 * which_row(i)) >= i32(key_minus_query + window):
                        s_dp[i] = -INF32
            p_ds = s_dp                      # the same registers: P^T, then dS^T
            for j in range(8):
                lses = load_two(lse_delta, n % 2 * 128 + 8 * j + first_column())
                deltas = load_two(lse_delta, n % 2 * 128 + 64 + 8 * j + first_column())
                for i in range(4 * j, 4 * j + 4):
                    p_ds[i] = exp2(s_dp[i] * scale2 - lses[i % 2] * LOG2E32)
                    p_ds[S_REGS + i] = p_ds[i] * (s_dp[S_REGS + i] - deltas[i % 2])
            for i in range(S_REGS):
                pairs[i] = pack_bf16(p_ds[2 * i], p_ds[2 * i + 1])
            ops.accumulate_two(acc, pairs, do_tile, q_tile)          # dV += P^T dO, dK += dS^T Q
        for i in range(2):
            t = k0 + first_row() + 8 * i
            if t < T:
                for j in range(CHUNKS):
                    n = 4 * j + 2 * i
                    store_neighbours(dqkv, acc[n], acc[n + 1], row0 + t, v_col + 8 * j)
                store_rotated(dqkv, acc, ACC_REGS + 2 * i, row0 + t, k_col, cos, sin, t, scale)
    return dkv

def tensor_attention(D, hopper, operand=unchanged, window=0, tiles=1):
    """Returns the Attention for head size D, one of FAST_HEADS, and for a window: see
    `portable_attention`.
    hopper: use the copy engine and `wgmma`.  The function `operand` must then return tensor maps
    of matrices, with boxes of TILE_ROWS rows
    tiles: number of tiles of Q per block of forward, as `q_tiles` returns it"""
    kernels = (tensor_attention_forward(D, hopper, window, tiles),
               *(make(D, hopper, window) for make in (tensor_attention_dq, tensor_attention_dkv)))
    smem = (STATIONARY + 2 * STAGES) * 2 * TILE_ROWS * D + ALIGNMENT
    return Attention(*kernels, operand=operand, rotates=True, block=128, rows=tiles * TILE_ROWS,
                     back_rows=TILE_ROWS, smem=smem, back_smem=smem)
