"""Attention on tensor cores: `attention_of`, which 4.5 of nanoeuler_cuda.py calls."""
import functools
import math
from typing import NamedTuple

import numpy as np
from numba import cuda

from nanoeuler_cuda import Attention, filled, kernel_path, quad_max, quad_sum
from nanoeuler_parts.gpu.launches import cuda_kernel, inlined, made_once
from nanoeuler_parts.gpu.numbers import exp2, f32, i32, LOG2E, u16, u32, u64, value, vector
from nanoeuler_parts.tensor_cores.ptx import (
    bit, cp_async, cp_async_4, cp_async_wait_all, DeviceFunctions, dynamic_smem, global_address,
    lane_id, leads_block, map_fence, map_of, MBARRIER_BYTES, mbarrier_expect, mbarrier_fence,
    mbarrier_init, mbarrier_wait, pack_bf16, shared_address, store_pair, thread_id, tma_load,
    warp_id,
)
from nanoeuler_parts.tensor_cores.tiles import (
    CHUNK_BYTES, column_of, descriptor, first_column, first_row, ldmatrix_columns, ldmatrix_rows,
    mma, BF16_PER_CHUNK, swizzled, TILE_ROWS, wgmma, which_row,
)

# FlashAttention as in 4.5 of nanoeuler_cuda.py, in bfloat16, for head sizes 32, 64 and 128.  A
# block is one warpgroup.  Two tiles of 64 rows, the stationary ones, stay with it.  It walks over
# pairs of other tiles, which arrive in a ring of two places: the next pair is on its way while this
# one is multiplied.  In shared memory:
#
#     tile      forward    dq                   dkv
#     0, 1      Q, Q       Q, dO                K, V           stationary
#     2, 3      K, V       K, V (at first O)    Q, dO          pairs 0, 2, 4, ..
#     4, 5      K, V       K, V                 Q, dO          pairs 1, 3, 5, ..
#
# A warp computes 16 rows of S, P or dS at a time, and has them in registers as a left operand, a
# fragment of A, has to be: they go into the next product without shared memory.  On both paths the
# sums of a product, 64 x 64 or 64 x D, stand as tiles.py says: a thread has two rows of a tile.
#
# The kernels know of no way to multiply: they call the eight functions of `Tiles`.  `mma_tiles` has
# them for any tensor core, `wgmma_tiles` for Hopper; who reads the first understands all three
# kernels, and the second is what Hopper changes.
#
# For D = 64, a thread: a tile as fragments of A 16 registers, the sums of S 32, those of O 32.
# Softmax in powers of two: exp(x - m) = 2^(x log2(e) - m log2(e)), one multiply-add an entry.
FAST_HEADS = 32, 64, 128                     # head sizes that tensor cores do attention for
STATIONARY, PLACES = 2, 2                    # tiles that stay; pairs in the ring
BARRIERS = PLACES + 1                        # one a place, the last for what stays
S_SUMS = 32                                  # registers of a thread: its sums of a tile of S or dP
FIRST_ROUND = -1                             # of the loops over pairs: it only asks for pair 0.
                                             # Asked for before the loop, it costs forward more than
                                             # the 168 registers of three blocks: 40 bytes spill
INF32, LOG2E32 = np.float32(math.inf), np.float32(LOG2E)

class Tiles(DeviceFunctions):
    """What the kernels below ask of the way to fetch and to multiply tiles:

    set_up(loads) -> smem, barriers          loads: of stationary tiles
    fence_map(source)                        before the first load from it
    issue_load(barrier, tile, source, row, last, col)    asks for a tile
    wait(barrier, parity)                    what was asked for is there
    load_fragments(a, tiles)                 what products want of both stationary tiles
    multiply_abt(a, tiles, first, second) -> s           two of A B^T
    accumulate_ab(acc, a, tile)              acc += A B
    accumulate_two(acc, a, first, second)    two of them"""

class TileSizes(NamedTuple):
    """Of a tile (64, D)"""
    chunks: int                              # of a row
    sums: int                                # registers of a thread, if it is one of sums
    fragments: int                           # registers of a thread that hold it as A
    bytes: np.uint32

def sizes_of(D):
    return TileSizes(D // BF16_PER_CHUNK, sums=D // 2, fragments=D // 4,
                     bytes=np.uint32(2 * TILE_ROWS * D))

@inlined
def tile_barrier(barriers, place):
    return barriers + u32(place * MBARRIER_BYTES)

def layout_of(D):
    """The device function (row, chunk): where a chunk of a tile is"""
    return swizzled if D > 32 else rows_of_64_bytes

def fragments_of(D):
    """The device function a[i..] = the warp's 16 rows of a tile, as fragments of A."""
    at = layout_of(D)

    @inlined
    def load_a(a, i, tile):
        row = u32(16) * warp_id() + (lane_id() & u32(15))
        for k in range(D // 16):
            ldmatrix_rows(a, i + 4 * k, tile + at(row, u32(2 * k) + bit(lane_id(), 4)))
    return load_a

@inlined
def rows_of_64_bytes(row, chunk):
    """`swizzled` for tiles of 32 columns: two rows, which lie in 128 bytes, turn together."""
    return row * u32(64) + ((chunk ^ ((row >> u32(1)) & u32(3))) * CHUNK_BYTES)

# On mma.sync: all threads copy, chunk by chunk; fragments of both operands are read from shared
# memory, those of A once, those of B by every warp.
@functools.cache
def mma_tiles(D):
    CHUNKS, SUMS, A_REGISTERS, TILE_BYTES = sizes_of(D)
    STEPS = D // 16                          # of K in a product over D
    at, load_a = layout_of(D), fragments_of(D)

    @inlined
    def set_up(loads):
        return dynamic_smem(), u32(0)        # there are no barriers

    @inlined
    def fence_map(source):
        pass                                 # nor tensor maps

    @inlined
    def issue_load(barrier, tile, source, row, last, col):
        """Rows row.. of `source`, columns col to col + D; rows beyond the last are copies of it."""
        width = source.shape[1]
        for i in range(CHUNKS // 2):         # 128 threads, a chunk each, 64 * CHUNKS of them
            r = (thread_id() + u32(128 * i)) // u32(CHUNKS)
            chunk = (thread_id() + u32(128 * i)) % u32(CHUNKS)
            offset = min(row + r, last) * width + col + chunk * BF16_PER_CHUNK
            cp_async(tile + at(r, chunk), global_address(source) + u64(2 * offset))

    @inlined
    def wait(barrier, parity):
        """The tiles are there, and nobody reads what was loaded before them."""
        cp_async_wait_all()
        cuda.syncthreads()

    @inlined
    def load_fragments(a, tiles):
        load_a(a, 0, tiles)
        load_a(a, A_REGISTERS, tiles + TILE_BYTES)

    @inlined
    def mma_16_columns(acc, i, a, j, b):
        mma(acc, i, a, j, b, 0)
        mma(acc, i + 4, a, j, b, 2)

    @inlined
    def multiply_abt(a, tiles, first, second):
        """Two products (64, 64): stationary tile * other tile^T.  If the other is one for both, its
        fragments are loaded once."""
        s, b = filled(64, f32(0)), cuda.local.array(4, u32)
        row = (lane_id() & u32(7)) + u32(8) * bit(lane_id(), 4)          # as B of `mma_operand`
        chunk = bit(lane_id(), 3)
        for k in range(STEPS):
            for n in range(4):
                where = at(row + u32(16 * n), chunk + u32(2 * k))
                ldmatrix_rows(b, 0, first + where)
                mma_16_columns(s, 8 * n, a, 4 * k, b)
                if second != first:
                    ldmatrix_rows(b, 0, second + where)
                mma_16_columns(s, 32 + 8 * n, a, A_REGISTERS + 4 * k, b)
        return s

    @inlined
    def load_b(b, k, n, tile):
        """Rows 16 k to 16 k + 15, columns 16 n to 16 n + 15 of a tile, as fragments of B"""
        row, chunk = lane_id() & u32(15), bit(lane_id(), 4)      # as B, mn
        ldmatrix_columns(b, 0, tile + at(u32(16 * k) + row, u32(2 * n) + chunk))

    @inlined
    def accumulate_ab(acc, a, tile):
        """acc (64, D) += A (64, 64) * tile"""
        b = cuda.local.array(4, u32)
        for k in range(4):
            for n in range(STEPS):
                load_b(b, k, n, tile)
                mma_16_columns(acc, 8 * n, a, 4 * k, b)

    @inlined
    def accumulate_two(acc, a, first, second):
        """The same for two A, one behind the other in a, and their tiles"""
        b = cuda.local.array(4, u32)
        for k in range(4):
            for n in range(STEPS):
                load_b(b, k, n, first)
                mma_16_columns(acc, 8 * n, a, 4 * k, b)
                if second != first:
                    load_b(b, k, n, second)
                mma_16_columns(acc, SUMS + 8 * n, a, 16 + 4 * k, b)

    return Tiles(set_up=set_up, fence_map=fence_map, issue_load=issue_load, wait=wait,
                 load_fragments=load_fragments, multiply_abt=multiply_abt,
                 accumulate_ab=accumulate_ab, accumulate_two=accumulate_two)

# What Hopper changes, for D = 64: one thread asks the copy engine for a whole tile, and a barrier
# counts its bytes; `wgmma` reads B from shared memory once a warpgroup, and in A B^T the stationary
# tiles too, which no registers hold then; two products are in flight at once.
@functools.cache
def wgmma_tiles(D):
    TILE_BYTES = sizes_of(D).bytes
    two_abt = wgmma(64, "rows", False, 2, adds="never")
    one_ab, two_ab = wgmma(D, "registers", True), wgmma(D, "registers", True, 2)

    @inlined
    def set_up(loads):
        """Barriers: one for each place of the ring, one for so many loads of stationary tiles.  A
        load arrives once, with the bytes that it announces."""
        smem, barriers = dynamic_smem(), shared_address(cuda.shared.array(BARRIERS, u64))
        if leads_block():
            loads_of_a_pair = u32(2)
            for place in range(PLACES):
                mbarrier_init(tile_barrier(barriers, place), loads_of_a_pair)
            mbarrier_init(tile_barrier(barriers, PLACES), u32(loads))
            mbarrier_fence()
        cuda.syncthreads()                   # they exist
        return smem, barriers

    @inlined
    def fence_map(source):
        if leads_block():
            map_fence(global_address(source))

    @inlined
    def issue_load(barrier, tile, source, row, last, col):
        """Rows row.. of a tensor map's matrix, columns col to col + D; rows beyond the last are
        whatever comes then."""
        if leads_block():
            mbarrier_expect(barrier, TILE_BYTES)
            tma_load(tile, global_address(source), u32(col), u32(row), barrier)

    @inlined
    def wait(barrier, parity):
        """The tiles are there, and nobody reads what was loaded before them; of what dkv copies by
        itself, lse and delta, as well."""
        cp_async_wait_all()
        mbarrier_wait(barrier, u32(parity))
        cuda.syncthreads()

    @inlined
    def load_fragments(a, tiles):
        pass                                 # they are read where they are

    @inlined
    def multiply_abt(a, tiles, first, second):
        s = filled(64, f32(0))
        two_abt(s, descriptor(tiles), descriptor(first), descriptor(tiles + TILE_BYTES),
                descriptor(second))
        return s

    @inlined
    def accumulate_ab(acc, a, tile):
        one_ab(acc, a, descriptor(tile))

    @inlined
    def accumulate_two(acc, a, first, second):
        two_ab(acc, a, descriptor(first), descriptor(second))

    return Tiles(set_up=set_up, fence_map=fence_map, issue_load=issue_load, wait=wait,
                 load_fragments=load_fragments, multiply_abt=multiply_abt,
                 accumulate_ab=accumulate_ab, accumulate_two=accumulate_two)

def tiles_of(D, hopper):
    return wgmma_tiles(D) if hopper else mma_tiles(D)

class Ring(DeviceFunctions):
    """The places of pairs of tiles, and what tells that a pair is there: the barrier of its place,
    when the phase of this parity is over: 0 for pairs 0 and 1, 1 for 2 and 3, 0 for 4 and 5.

    pair_at(smem, n)                         its first tile; the second lies behind it
    wait_pair(barriers, n)
    issue_pair(smem, barriers, n, one, col1, other, col2, row, last)
                                             asks for rows row.. of two matrices"""

@functools.cache
def ring_of(D, hopper):
    way, TILE_BYTES = tiles_of(D, hopper), sizes_of(D).bytes

    @inlined
    def pair_at(smem, n):
        return smem + u32((STATIONARY + n % PLACES * 2) * TILE_BYTES)

    @inlined
    def wait_pair(barriers, n):
        way.wait(tile_barrier(barriers, n % PLACES), n // PLACES % 2)

    @inlined
    def issue_pair(smem, barriers, n, one, col1, other, col2, row, last):
        tile, barrier = pair_at(smem, n), tile_barrier(barriers, n % PLACES)
        way.issue_load(barrier, tile, one, row, last, col1)
        way.issue_load(barrier, tile + TILE_BYTES, other, row, last, col2)
    return Ring(pair_at=pair_at, wait_pair=wait_pair, issue_pair=issue_pair)

@functools.cache
def advance_pipeline_of(D, hopper):
    """The device function of forward and dq: waits for pair n of K and V, asks for the next.  For
    n = -1, only that."""
    ring = ring_of(D, hopper)

    @inlined
    def advance_pipeline(smem, barriers, n, count, qkv, k_col, v_col, row0, last):
        if n >= 0:
            ring.wait_pair(barriers, n)
        if n + 1 < count:
            ring.issue_pair(smem, barriers, n + 1, qkv, k_col, qkv, v_col, row0 + n * 64 + 64,
                            last)
    return advance_pipeline

@inlined
def mask(s, first, beyond):
    """-inf above the diagonal of the tile s[first:], if it passes through.
    beyond: the thread's first column minus its first row, of all of S"""
    if beyond > -TILE_ROWS:
        for i in range(32):
            if beyond > i32(8 * which_row(i) - column_of(i)):
                s[first + i] = -INF32

@inlined
def online_softmax(s, half, acc, SUMS, m, l, beyond, scale2):
    """One step of the running softmax for one 64-row half of s: S becomes 2^(scale2 (S - m)), with
    scale2 = log2(e) / sqrt(D), and what was summed before shrinks to the new m.

    m, l: of the thread's four rows, two a half; l of its own columns only.  SUMS: registers of half
    of acc"""
    top, shrink, first = cuda.local.array(2, f32), cuda.local.array(2, f32), 32 * half
    mask(s, first, beyond)
    for i in range(2):
        top[i] = m[2 * half + i]
    for i in range(32):
        top[which_row(i)] = max(top[which_row(i)], s[first + i])
    for i in range(2):
        top[i] = quad_max(top[i])            # a quad of lanes has a row
        shrink[i] = exp2((m[2 * half + i] - top[i]) * scale2)
        m[2 * half + i] = top[i]
        top[i] *= scale2
        l[2 * half + i] *= shrink[i]
    for i in range(SUMS):
        acc[half * SUMS + i] *= shrink[which_row(i)]
    for i in range(32):
        s[first + i] = exp2(s[first + i] * scale2 - top[which_row(i)])
        l[2 * half + which_row(i)] += s[first + i]

@inlined
def store_neighbours(out, low, high, row, col):
    """The two that a thread has of columns col to col + 7."""
    col += first_column()
    store_pair(global_address(out) + u64(2 * (row * out.shape[1] + col)), pack_bf16(low, high))

@inlined
def rows_of_block(rows, T):
    """Those of forward and dq, the longest first: the first row of the sequence in the batch, the
    block's first in the sequence, the last of the sequence in the batch"""
    row0 = cuda.blockIdx.z * T
    return row0, (cuda.gridDim.x - 1 - cuda.blockIdx.x) * rows, row0 + T - 1

@functools.cache
def store_rotated_of(D):
    CHUNKS, SUMS = sizes_of(D).chunks, sizes_of(D).sums

    @inlined
    def store_rotated(out, acc, first, row, col, cos, sin, t, scale):
        """A row of acc, times scale, its pairs (c, c + D / 2) rotated back by the angles of t: the
        gradient of q or k before RoPE."""
        c = first_column()
        u, v = cuda.local.array(2, f32), cuda.local.array(2, f32)
        for j in range(CHUNKS // 2):
            for n in range(2):
                x, y = acc[first + 4 * j + n] * scale, acc[first + SUMS // 2 + 4 * j + n] * scale
                cosine, sine = cos[t, 8 * j + c + n], sin[t, 8 * j + c + n]
                u[n], v[n] = x * cosine + y * sine, y * cosine - x * sine
            store_neighbours(out, u[0], u[1], row, col + 8 * j)
            store_neighbours(out, v[0], v[1], row, col + D // 2 + 8 * j)
    return store_rotated

@made_once
def tensor_attention_forward(D, hopper):
    CHUNKS, SUMS, A_REGISTERS, TILE_BYTES = sizes_of(D)
    BOTH_SUMS, FRAGMENTS = 2 * SUMS, 2 * A_REGISTERS     # of two tiles
    way, ring, advance_pipeline = (f(D, hopper) for f in (tiles_of, ring_of, advance_pipeline_of))

    @cuda_kernel(launch_bounds=(128, 3 if hopper else 1))
    def forward(o, lse, qkv, T, G, scale):
        """As the portable kernel, 128 query rows of a head a block.   grid (T / 128, H, B)
        qkv: the matrix, or its tensor map"""
        smem, barriers = way.set_up(STATIONARY)
        way.fence_map(qkv)
        acc, m, l = filled(BOTH_SUMS, f32(0)), filled(4, -INF32), filled(4, f32(0))
        q, p_pairs = cuda.local.array(FRAGMENTS, u32), cuda.local.array(S_SUMS, u32)
        h, H, scale2 = cuda.blockIdx.y, cuda.gridDim.y, scale * LOG2E32
        row0, t0, last = rows_of_block(128, T)
        k_col = o.shape[1] + h * G // H * D
        r, count = t0 + first_row(), (min(t0 + 128, T) + 63) // 64   # its rows: r + 0, 8, 64, 72
        stationary = tile_barrier(barriers, PLACES)
        for i in range(2):
            way.issue_load(stationary, smem + u32(i * TILE_BYTES), qkv, row0 + t0 + 64 * i, last,
                           h * D)
        way.wait(stationary, 0)              # Q is there
        way.load_fragments(q, smem)
        for n in range(FIRST_ROUND, count):  # the n-th pair of tiles
            k_tile = ring.pair_at(smem, n)
            advance_pipeline(smem, barriers, n, count, qkv, k_col, k_col + G * D, row0, last)
            if n < 0:
                continue
            s = way.multiply_abt(q, smem, k_tile, k_tile)            # S = Q K^T, both halves of Q
            beyond = i32(n * 64 + first_column() - r)
            online_softmax(s, 0, acc, SUMS, m, l, beyond, scale2)
            online_softmax(s, 1, acc, SUMS, m, l, i32(beyond - 64), scale2)
            p = s                            # which it has become: P = 2^(scale2 (S - m))
            for i in range(S_SUMS):
                p_pairs[i] = pack_bf16(p[2 * i], p[2 * i + 1])
            v_tile = k_tile + TILE_BYTES
            way.accumulate_two(acc, p_pairs, v_tile, v_tile)         # O += P V
        for i in range(4):
            t, total = r + i // 2 * 64 + i % 2 * 8, quad_sum(l[i])
            if t < T:
                for j in range(CHUNKS):
                    n = i // 2 * SUMS + j * 4 + i % 2 * 2
                    store_neighbours(o, acc[n] / total, acc[n + 1] / total, row0 + t, h * D + 8 * j)
                if first_column() == 0:
                    lse[h, row0 + t] = m[i] * scale2 / LOG2E32 + math.log(total)
    return forward

@made_once
def tensor_attention_dq(D, hopper):
    _, SUMS, A_REGISTERS, TILE_BYTES = sizes_of(D)
    FRAGMENTS = 2 * A_REGISTERS              # of two tiles
    way, ring, advance_pipeline = (f(D, hopper) for f in (tiles_of, ring_of, advance_pipeline_of))
    load_a, store_rotated = fragments_of(D), store_rotated_of(D)

    @cuda_kernel(launch_bounds=(128, 1))
    def dq(dqkv, delta, do, o, lse, qkv, cos, sin, T, HD, scale):
        """dQ = dS K before RoPE, and delta = <dO, O> for dkv.  64 query rows a block, S and dP in
        one array of registers.     grid (T / 64, H, B)     do, o, qkv: matrices, or tensor maps"""
        smem, barriers = way.set_up(STATIONARY + 1)
        way.fence_map(qkv)
        way.fence_map(do)
        way.fence_map(o)
        acc = filled(SUMS, f32(0))
        delta_of_row = filled(2, f32(0))
        lse2 = cuda.local.array(2, f32)      # lse log2(e) of the same two rows
        a, ds_pairs = cuda.local.array(FRAGMENTS, u32), cuda.local.array(16, u32)  # a: Q, dO
        h, H, scale2 = cuda.blockIdx.y, cuda.gridDim.y, scale * LOG2E32
        row0, t0, last = rows_of_block(64, T)
        G = (dqkv.shape[1] - HD) // (2 * D)
        k_col, r = HD + h * G // H * D, t0 + first_row()         # its rows: r + 0, 8
        stationary, count = tile_barrier(barriers, PLACES), (min(t0 + 64, T) + 63) // 64
        do_tile, o_tile = smem + TILE_BYTES, smem + u32(2 * TILE_BYTES)     # O: for a moment
        way.issue_load(stationary, smem, qkv, row0 + t0, last, h * D)
        way.issue_load(stationary, do_tile, do, row0 + t0, last, h * D)
        way.issue_load(stationary, o_tile, o, row0 + t0, last, h * D)
        way.wait(stationary, 0)              # Q, dO and O are there
        load_a(a, 0, o_tile)
        load_a(a, A_REGISTERS, do_tile)
        for i in range(A_REGISTERS):
            u, v = a[i], a[A_REGISTERS + i]  # two neighbours of O, two of dO
            delta_of_row[i % 2] += value(u16(u)) * value(u16(v)) + (
                value(u16(u >> u32(16))) * value(u16(v >> u32(16))))
        for i in range(2):
            delta_of_row[i] = quad_sum(delta_of_row[i])
            t = row0 + min(r + 8 * i, T - 1)
            lse2[i] = lse[h, t] * LOG2E32
            if first_column() == 0 and r + 8 * i < T:
                delta[h, t] = delta_of_row[i]
        way.load_fragments(a, smem)
        cuda.syncthreads()                   # O is read: K may come
        for n in range(FIRST_ROUND, count):  # the n-th pair of tiles
            k_tile = ring.pair_at(smem, n)
            advance_pipeline(smem, barriers, n, count, qkv, k_col, k_col + G * D, row0, last)
            if n < 0:
                continue
            # S = Q K^T, and from S_SUMS on dP = dO V^T
            s_dp = way.multiply_abt(a, smem, k_tile, k_tile + TILE_BYTES)
            mask(s_dp, 0, i32(n * 64 + first_column() - r))
            ds = s_dp                        # over S: P (dP - delta); `scale` comes last
            for i in range(S_SUMS):
                p = exp2(s_dp[i] * scale2 - lse2[which_row(i)])
                ds[i] = p * (s_dp[S_SUMS + i] - delta_of_row[which_row(i)])
            for i in range(S_SUMS // 2):
                ds_pairs[i] = pack_bf16(ds[2 * i], ds[2 * i + 1])
            way.accumulate_ab(acc, ds_pairs, k_tile)                 # dQ += dS K
        for i in range(2):
            if r + 8 * i < T:
                store_rotated(dqkv, acc, 2 * i, row0 + r + 8 * i, h * D, cos, sin, r + 8 * i, scale)
    return dq

@made_once
def tensor_attention_dkv(D, hopper):
    CHUNKS, SUMS, A_REGISTERS, TILE_BYTES = sizes_of(D)
    BOTH_SUMS, FRAGMENTS = 2 * SUMS, 2 * A_REGISTERS     # of two tiles
    way, ring, store_rotated = tiles_of(D, hopper), ring_of(D, hopper), store_rotated_of(D)
    load_two, _ = vector(2)

    @cuda_kernel(launch_bounds=(128, 3 if hopper else 1))
    def dkv(dqkv, delta, do, o, lse, qkv, cos, sin, T, HD, scale):
        """dK = sum_h dS^T Q before RoPE,   dV = sum_h P^T dO.  64 keys a block, S^T and dP^T in its
        registers: a row is a key, a column a query.     grid (T / 64, G, B)"""
        smem, barriers = way.set_up(STATIONARY)
        way.fence_map(qkv)
        way.fence_map(do)
        numbers = cuda.shared.array(256, f32)            # lse and delta of 64 queries, twice
        acc = filled(BOTH_SUMS, f32(0))       # dV, dK
        a, pairs = cuda.local.array(FRAGMENTS, u32), cuda.local.array(S_SUMS, u32)   # a: K, V
        g, row0, k0 = cuda.blockIdx.y, cuda.blockIdx.z * T, cuda.blockIdx.x * 64
        last, G, group = row0 + T - 1, cuda.gridDim.y, HD // D // cuda.gridDim.y
        k_col, v_col, scale2 = HD + g * D, HD + (G + g) * D, scale * LOG2E32
        # each thread copies one number for each pair of tiles: half of them lse, half delta
        my_numbers = global_address(lse) if cuda.threadIdx.x < 64 else global_address(delta)
        stationary = tile_barrier(barriers, PLACES)
        for i in range(2):
            way.issue_load(stationary, smem + u32(i * TILE_BYTES), qkv, row0 + k0, last,
                           k_col + i * G * D)
        way.wait(stationary, 0)              # K and V are there
        way.load_fragments(a, smem)
        next_h, next_t, count = g * group, k0, group * ((T - k0 + 63) // 64)
        for n in range(FIRST_ROUND, count):  # the n-th pair of tiles
            t0 = next_t
            q_tile = ring.pair_at(smem, n)
            do_tile = q_tile + TILE_BYTES
            if n >= 0:
                ring.wait_pair(barriers, n)
                next_t += 64
                if next_t >= T:              # the group's next query head
                    next_h, next_t = next_h + 1, k0
            if n + 1 < count:
                t = row0 + next_t + cuda.threadIdx.x % 64
                flat_index = next_h * lse.shape[1] + min(t, last)
                place = (n + 1) % 2 * 128 + cuda.threadIdx.x
                cp_async_4(shared_address(numbers) + u32(4 * place),
                           my_numbers + u64(4 * flat_index))
                col = next_h * D
                ring.issue_pair(smem, barriers, n + 1, qkv, col, do, col, row0 + next_t, last)
            if n < 0:
                continue
            # S^T = K Q^T, and from S_SUMS on dP^T = V dO^T
            s_dp = way.multiply_abt(a, smem, q_tile, do_tile)
            if t0 == k0 or t0 + 64 > T:      # on the diagonal, or queries that do not exist
                ahead = i32(k0 + first_row() - t0 - first_column())  # the first key - first query
                end = i32(T - t0 - first_column())
                for i in range(S_SUMS):
                    if i32(column_of(i) - 8 * which_row(i)) < ahead or i32(column_of(i)) >= end:
                        s_dp[i] = -INF32
            p_ds = s_dp                      # in their registers: P^T, and from S_SUMS on dS^T
            for j in range(8):
                lses = load_two(numbers, n % 2 * 128 + 8 * j + first_column())
                deltas = load_two(numbers, n % 2 * 128 + 64 + 8 * j + first_column())
                for i in range(4 * j, 4 * j + 4):
                    p_ds[i] = exp2(s_dp[i] * scale2 - lses[i % 2] * LOG2E32)
                    p_ds[S_SUMS + i] = p_ds[i] * (s_dp[S_SUMS + i] - deltas[i % 2])
            for i in range(S_SUMS):
                pairs[i] = pack_bf16(p_ds[2 * i], p_ds[2 * i + 1])
            way.accumulate_two(acc, pairs, do_tile, q_tile)          # dV += P^T dO, dK += dS^T Q
        for i in range(2):
            t = k0 + first_row() + 8 * i
            if t < T:
                for j in range(CHUNKS):
                    n = 4 * j + 2 * i
                    store_neighbours(dqkv, acc[n], acc[n + 1], row0 + t, v_col + 8 * j)
                store_rotated(dqkv, acc, SUMS + 2 * i, row0 + t, k_col, cos, sin, t, scale)
    return dkv

@functools.cache
def tensor_attention(D, hopper):
    kernels = (make(D, hopper) for make in (tensor_attention_forward, tensor_attention_dq,
                                            tensor_attention_dkv))
    smem = (STATIONARY + 2 * PLACES) * 2 * TILE_ROWS * D + 1024      # 1,024: to align
    return Attention(*kernels, rotates=True, block=128, rows=2 * TILE_ROWS, back_rows=TILE_ROWS,
                     smem=smem, back_smem=smem)

def attention_of(D, matrices):
    """The kernels for heads of D, and what they read: the matrices or, on Hopper, their tensor
    maps.  None if tensor cores do not take heads of D."""
    if D not in FAST_HEADS:
        return None
    if kernel_path() == "wgmma" and D == 64:
        return tensor_attention(D, True), *(map_of(x, 64) for x in matrices)
    return tensor_attention(D, False), *matrices
