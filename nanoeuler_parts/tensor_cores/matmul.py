"""Matrix products on tensor cores: `tensor_matmul`, which 4.1 of nanoeuler_cuda.py calls."""
import functools

import numpy as np
from numba import cuda, types

from nanoeuler_cuda import cdiv, filled, kernel_path
from nanoeuler_parts.gpu.launches import cuda_kernel, inlined, launch, made_once
from nanoeuler_parts.gpu.numbers import f32, u32, u64, vector
from nanoeuler_parts.tensor_cores.ptx import (
    ALIGNMENT, bit, atomic_increment, cp_async_commit, cp_async_or_zero, cp_async_wait_all,
    cp_async_wait_one, DeviceFunctions, dynamic_smem, fence_async, fence_async_global,
    give_registers, global_address, lane_id, leads_block, leads_warp, leads_warpgroup, map_fence,
    map_of, MBARRIER_BYTES, mbarrier_arrive, mbarrier_expect, mbarrier_fence, mbarrier_init,
    mbarrier_wait, pack_bf16, quotient, semaphore_acquire, semaphore_at, semaphore_release,
    shared_address, store_two, take_registers, thread_id, tma_add, tma_commit, tma_load, tma_store,
    tma_wait_read, tma_wait_written, next_turn, warp_id, warpgroup_barrier, warpgroup_id,
)
from nanoeuler_parts.tensor_cores.tiles import (
    PANEL_BYTES, descriptor, ldmatrix_columns, ldmatrix_rows, mma, ROW_BYTES, stmatrix, swizzled,
    wgmma,
)

# Of bfloat16, in three layouts: a_mn means that A is given as A^T (K, M), b_mn that B is given as
# (K, N), and not as B^T (N, K).  Of either, `mn` says that a tile's rows run along M or N.
#
# A piece of work is a tile of the output and a part of K; all tiles with the first part of K come
# first.  Tiles are visited in bands of BAND rows of tiles, down each column of a band, so that what
# neighbours read is still in L2.  With bands of two, three times three tiles in this order:
#
#     0  2  4
#     1  3  5
#     6  7  8
#
# The product of `down` in the base preset, 8 x 512 tokens: y (4096, 768) = x (4096, 2048) w^T, and
# w is (768, 2048), so B is not `mn`.  On `wgmma`, a tile of 128 x 256: 32 x 3 tiles, two bands.
# Piece 0 is y[0:128, 0:256], piece 1 y[128:256, 0:256], piece 16 the next column, y[0:128,
# 256:512].  A tile is the sum of 2048 / 64 = 32 slices, each of A (128, 64) and B (256, 64).
BK, BAND = 64, 16                            # depth of a slice of A and B; rows of tiles in a band

@inlined
def tile_at(i, M, N, K, splits, tile_rows, tile_columns):
    """The i-th piece: (m, n, first, end), the tile whose first entry is out[m, n], of slices first
    to end - 1 of K."""
    down = u32((M + tile_rows - 1) // tile_rows)
    across = u32((N + tile_columns - 1) // tile_columns)
    part = quotient(i, down * across)
    tile = i - part * down * across
    slices = u32((K + BK - 1) // BK)
    band = quotient(tile, u32(BAND) * across)
    in_band = tile - band * u32(BAND) * across
    high = min(down - band * u32(BAND), u32(BAND))       # rows of tiles: the last band has fewer
    column = quotient(in_band, high)
    row = band * u32(BAND) + in_band - column * high
    m = row * u32(tile_rows)
    n = column * u32(tile_columns)
    first = quotient(part * slices, splits)
    end = quotient((part + u32(1)) * slices, splits)
    return m, n, first, end

# Where an output of float32 has few tiles and K is long, several blocks share a tile: each takes a
# part of K and adds its product to the output when it is its turn, which keeps the order of the
# sums.  It waits for the parts before it, which must have begun.  Where a block has one piece, it
# claims the next one from a counter when it begins: CUDA does not promise that blocks begin in the
# order of their numbers.  Where a block takes one piece after another, all blocks are launched
# together (`need_resident`).
# Each tile has one semaphore in `mma` and two in `wgmma`, one for each warpgroup.

@inlined
def claimed(semaphores):
    """The next piece that no block has.  The counter is the last semaphore, which no tile has; the
    block that claims the last piece leaves it as it was, at 0."""
    claim = cuda.shared.array(1, u32)
    if leads_block():
        counter = semaphore_at(semaphores, semaphores.size - 1)
        claim[0] = atomic_increment(counter)
        if claim[0] == u32(cuda.gridDim.x) - u32(1):
            semaphore_release(counter, u32(0))
    cuda.syncthreads()                       # the claim is there
    return claim[0]

# Path `mma`, from sm_80 on: a block of four warps per 128 x 128 of the output, 64 x 64 a warp.
# Copies of 16 bytes (cp.async) fill three buffers in turn; of the slice before, the next 16 k go
# into registers while `mma` works on the last 16.  Some 35 times the speed of the portable tile,
# 0.55 of cuBLAS's.  97 KB of shared memory: an RTX 40 allows a block 99.
MMA_TILE, MMA_STAGES = 128, 3                # rows and columns of the output; buffers
MMA_OPERAND_BYTES = np.uint32(2 * MMA_TILE * BK)         # a slice of A, or of B
MMA_STAGE_BYTES = 2 * MMA_OPERAND_BYTES      # both: a buffer
MMA_SMEM = int(MMA_STAGES * MMA_STAGE_BYTES) + ALIGNMENT
MMA_BLOCKS, RESERVED_SMEM = 2, 1024          # on a multiprocessor at once; what CUDA adds to each

class Operand(DeviceFunctions):
    """How A or B of `mma_kernel` comes from memory to shared memory, and from there to registers:

    first_chunk(source, mn0, k0)             where this thread's part of the first slice begins
    issue_loads(to, source, place, r, c)     asks for its part of a slice
    lane_start(mn0)                          where a lane begins to read a tile
    load_fragment(out, at, i, s)             16 rows or columns of a tile, 16 of its k"""

# Its four matrices of 8 x 8, a row and a chunk further or not, in the order in which `mma` has them
# in registers: which bit of a lane's number says what, when it points ldmatrix to one of their rows
#
#     operand    rows of a tile    next 8 rows    next chunk    ldmatrix
#     A          along K           bit 3          bit 4         as they lie
#     A, mn      along M           bit 4          bit 3         transposed
#     B          along K           bit 4          bit 3         as they lie
#     B, mn      along N           bit 3          bit 4         transposed
@functools.cache
def mma_operand(of_a, mn):
    load = ldmatrix_columns if mn else ldmatrix_rows
    row_bit, chunk_bit = (3, 4) if of_a != mn else (4, 3)
    across, rows = (16, 8) if mn else (8, 16)            # of 128 threads, a chunk each

    @inlined
    def first_chunk(source, mn0, k0):
        """In memory; in a buffer; and its row and column in the matrix."""
        row, chunk = thread_id() // u32(across), thread_id() % u32(across)
        r, c = (k0 + row, mn0 + chunk * u32(8)) if mn else (mn0 + row, k0 + chunk * u32(8))
        return (global_address(source) + u64(r) * u64(source.strides[0]) + u64(2) * u64(c),
                swizzled(row, chunk), types.int32(r), types.int32(c))

    @inlined
    def issue_loads(to, source, place, r, c):
        """128 columns (mn) or rows of 64 k, zeros beyond the edge of the matrix.  Returns where the
        next 64 begin."""
        # none if the chunk is beyond the columns of the matrix.  In 32 bits
        rows_left = types.int32(types.int32(source.shape[0]) - r if
                                c < types.int32(source.shape[1]) else 0)
        row = place
        for i in range(8):
            cp_async_or_zero(to + u32(128 * rows * i), row,
                             u32(16) if rows * i < rows_left else u32(0))
            row += u64(source.strides[0]) * u64(rows)
        if mn:
            return row, r + types.int32(BK), c
        return place + u64(2 * BK), r, c + types.int32(BK)

    @inlined
    def lane_start(mn0):
        """Of rows or columns mn0 and further"""
        row = (lane_id() & u32(7)) + bit(lane_id(), row_bit) * u32(8)
        chunk = bit(lane_id(), chunk_bit)
        if mn:
            return swizzled(row, (mn0 >> u32(3)) + chunk)
        return swizzled(mn0 + row, chunk)

    @inlined
    def load_fragment(out, at, i, s):
        """Rows or columns 16 i to 16 i + 15, k = 16 s to 16 s + 15, into out[4 * i:].  Two chunks
        along a row flip bits of the address, as the swizzle has it; 16 rows add to it."""
        across, down = (i, s) if mn else (s, i)
        load(out, 4 * i, (at ^ u32(2 * 16 * across)) + u32(16 * 128 * down))
    return Operand(first_chunk=first_chunk, issue_loads=issue_loads, lane_start=lane_start,
                   load_fragment=load_fragment)

@made_once
def mma_kernel(a_mn, b_mn, accumulate):
    """accumulate: out += A B in float32; else out = A B in bfloat16."""
    of_a, of_b = mma_operand(True, bool(a_mn)), mma_operand(False, bool(b_mn))

    @inlined
    def load_fragments(a, b, a_at, b_at, s):
        """Rows and columns of the warp, 64 each, at k = 16 s to 16 s + 15, into registers"""
        for i in range(4):
            of_a.load_fragment(a, a_at, i, s)
        for i in range(4):
            of_b.load_fragment(b, b_at, i, s)

    @inlined
    def multiply(acc, a, b):
        """acc (64, 64) of the warp += A B: acc[32 i + 8 j:] are rows 16 i, columns 16 j and on."""
        for j in range(4):
            for i in range(4):
                mma(acc, 32 * i + 8 * j, a, 4 * i, b, 4 * j)
                mma(acc, 32 * i + 8 * j + 4, a, 4 * i, b, 4 * j + 2)

    # The sums go out through shared memory: there lanes put what they have, and take neighbours.
    load4, store4 = vector(4)
    NEIGHBOURS, ROW_STEP = 4, 2              # numbers a lane stores; rows that a warp does at once
    BYTES_LOG2 = 2 if accumulate else 1      # of a number of the output

    @inlined
    def staging_offset(warp, row, chunk):
        """Where a warp's 64 x 64 sums have 4 neighbours: chunks turn by row, in pairs."""
        return warp * u32(64 * 64) + row * u32(64) + (
            (chunk ^ ((row & u32(7)) << u32(1))) * u32(NEIGHBOURS))

    @inlined
    def stage_sums(staging, acc, warp, lane):
        """The warp's sums to shared memory"""
        place = shared_address(staging) + (lane & u32(1)) * u32(8)
        for i in range(8):
            for j in range(8):
                row, chunk = u32(8 * i) + lane // u32(4), u32(2 * j) + lane % u32(4) // u32(2)
                at = staging_offset(warp, row, chunk)
                n = 32 * (i // 2) + 2 * (i % 2) + 4 * j
                store_two(place + u32(4) * at, acc[n], acc[n + 1])
        cuda.syncwarp()

    @inlined
    def store_rows(out, m0, n0, M, N, staging, warp, lane):
        """out = the sums"""
        row, chunk = lane // u32(16), lane % u32(16)
        r, c = types.intp(m0 + row), types.intp(n0 + chunk * u32(NEIGHBOURS))
        pitch, rows_left = out.strides[0] >> BYTES_LOG2, types.int32(M - r if c < N else 0)
        store_at = r * pitch + c
        for g in range(0, 64, 16):
            for i in range(8):
                few = load4(staging, staging_offset(warp, row + u32(g + ROW_STEP * i), chunk))
                if g + ROW_STEP * i < rows_left:
                    store4(out, store_at, few)
                store_at += ROW_STEP * pitch

    @inlined
    def add_rows(out, m0, n0, M, N, staging, warp, lane):
        """out += the sums, 16 rows at a time"""
        old = cuda.local.array(32, f32)
        row, chunk = lane // u32(16), lane % u32(16)
        r, c = types.intp(m0 + row), types.intp(n0 + chunk * u32(NEIGHBOURS))
        pitch, rows_left = out.strides[0] >> BYTES_LOG2, types.int32(M - r if c < N else 0)
        store_at, load_at, last_load = r * pitch + c, r * pitch + c, (M - 1) * pitch + N - 4
        for g in range(0, 64, 16):
            for i in range(8):               # all loads first, and without an `if`: none waits
                few = load4(out, min(load_at, last_load))
                load_at += ROW_STEP * pitch
                for n in range(NEIGHBOURS):
                    old[NEIGHBOURS * i + n] = few[n]
            for i in range(8):
                few = load4(staging, staging_offset(warp, row + u32(g + ROW_STEP * i), chunk))
                for n in range(NEIGHBOURS):
                    few[n] += old[NEIGHBOURS * i + n]
                if g + ROW_STEP * i < rows_left:
                    store4(out, store_at, few)
                store_at += ROW_STEP * pitch

    write_rows = add_rows if accumulate else store_rows

    @cuda_kernel(launch_bounds=(128, MMA_BLOCKS))
    def kernel(out, a, b, semaphores, M, N, K, splits):
        """out (M, N) = A B, or out += A B     one part of a tile a block"""
        smem = dynamic_smem()
        acc, piece = filled(128, f32(0)), u32(cuda.blockIdx.x)
        if accumulate and splits > 1:
            piece = claimed(semaphores)
        m0, n0, begin, end = tile_at(piece, M, N, K, u32(splits), MMA_TILE, MMA_TILE)
        lane, warp = lane_id(), warp_id()
        warp_m, warp_n = u32(64) * bit(warp, 0), u32(64) * (warp >> u32(1))      # in the tile
        a_from, a_to, a_row, a_col = of_a.first_chunk(a, m0, begin * u32(BK))
        b_from, b_to, b_row, b_col = of_b.first_chunk(b, n0, begin * u32(BK))
        a_to, b_to = smem + a_to, smem + MMA_OPERAND_BYTES + b_to
        a_lane = smem + of_a.lane_start(warp_m)
        b_lane = smem + MMA_OPERAND_BYTES + of_b.lane_start(warp_n)
        for s in range(MMA_STAGES - 1):      # the first slices; the last buffer is filled below
            next_buffer = u32(s * MMA_STAGE_BYTES)
            a_from, a_row, a_col = of_a.issue_loads(a_to + next_buffer, a, a_from, a_row, a_col)
            b_from, b_row, b_col = of_b.issue_loads(b_to + next_buffer, b, b_from, b_row, b_col)
            cp_async_commit()
        buffer, next_buffer = u32(0), u32((MMA_STAGES - 1) * MMA_STAGE_BYTES)
        a_now, b_now = cuda.local.array(16, u32), cuda.local.array(16, u32)
        a_next, b_next = cuda.local.array(16, u32), cuda.local.array(16, u32)
        cp_async_wait_one()
        cuda.syncthreads()                   # the first slice is there
        load_fragments(a_now, b_now, a_lane, b_lane, 0)
        for _ in range(types.int32(end - begin)):        # written out: copies and reads of what
            # comes next stand between products, and none of them waits
            load_fragments(a_next, b_next, a_lane + buffer, b_lane + buffer, 1)
            multiply(acc, a_now, b_now)
            a_from, a_row, a_col = of_a.issue_loads(a_to + next_buffer, a, a_from, a_row, a_col)
            load_fragments(a_now, b_now, a_lane + buffer, b_lane + buffer, 2)
            multiply(acc, a_next, b_next)
            b_from, b_row, b_col = of_b.issue_loads(b_to + next_buffer, b, b_from, b_row, b_col)
            cp_async_commit()
            load_fragments(a_next, b_next, a_lane + buffer, b_lane + buffer, 3)
            multiply(acc, a_now, b_now)
            next_buffer = buffer             # the buffer just read is the next to be filled
            last_buffer = u32((MMA_STAGES - 1) * MMA_STAGE_BYTES)
            buffer = buffer + MMA_STAGE_BYTES if buffer < last_buffer else u32(0)
            cp_async_wait_one()              # all but the youngest slice is there
            cuda.syncthreads()               # and nobody reads the one before
            load_fragments(a_now, b_now, a_lane + buffer, b_lane + buffer, 0)
            multiply(acc, a_next, b_next)
        cp_async_wait_all()
        cuda.syncthreads()                   # no copy is under way, and nobody reads any more
        tiles = u32(cuda.gridDim.x) // u32(splits)
        part, semaphore = piece // tiles, semaphore_at(semaphores, piece % tiles)
        if accumulate and splits > 1:
            if leads_block():
                semaphore_acquire(semaphore, part)
            cuda.syncthreads()               # it is our turn
        staging = cuda.shared.array(0, f32)
        stage_sums(staging, acc, warp, lane)
        write_rows(out, m0 + warp_m, n0 + warp_n, M, N, staging, warp, lane)
        if accumulate and splits > 1:
            cuda.threadfence()
            cuda.syncthreads()               # all of it is written
            if leads_block():
                semaphore_release(semaphore, next_turn(part, splits))
    return kernel

# Path `wgmma`, sm_90 only: a block of three warpgroups stays on its multiprocessor and takes one
# 128 x 256 piece after another.  Warpgroup 0, the producer, only asks for copies: slices of A and B
# flow through a ring of three buffers, or stages, `full` and `empty` barriers between it and the
# two others, the consumers, each of which multiplies 64 of the 128 rows.  The copy engine moves
# whole boxes, and `wgmma` reads both operands from shared memory, once a warpgroup.  Slices 0, 1,
# 2, .. over time, downwards:
#
#     buffer 0          buffer 1          buffer 2
#     0 is copied                                           empty[i] is over at first: the producer
#     0 is multiplied   1 is copied                         waits for the parity before the first
#     3 is copied       1 is multiplied   2 is copied
#     3 is multiplied   4 is copied       2 is multiplied
#     6 is copied       4 is multiplied   5 is copied       ...
#
# Below "copied", full[i] is over: the producer has arrived, and all bytes that it announced.  Below
# "multiplied", empty[i] is: the eight warps of the consumers have arrived.  The next slice of a
# buffer is in the next phase, of the other parity.
BM, BN = 128, 256
A_BYTES = np.uint32(2 * BM * BK)             # a slice of A
STAGE_BYTES = np.uint32(2 * (BM + BN) * BK)  # slices of A and B: a buffer
OUT_BYTES = np.uint32(2 * 64 * BN)           # what one warpgroup stores at once
STAGES = 3                                   # buffers of the ring
WGMMA_SMEM = int(STAGES * STAGE_BYTES + 2 * OUT_BYTES + 2 * MBARRIER_BYTES * STAGES) + ALIGNMENT
EIGHT_ROWS = ROW_BYTES * np.uint32(8)
FULL_ARRIVALS = np.uint32(1)                 # the producer's thread, with the bytes it announces
EMPTY_ARRIVALS = np.uint32(8)                # the warps of two consumers, one lane of each

@made_once
def wgmma_kernel(a_mn, b_mn, accumulate):
    """accumulate: out += A B in float32; else out = A B in bfloat16."""
    multiply = wgmma(BN, "columns" if a_mn else "rows", b_mn, adds="asked")
    # loads a slice: one of all rows along K; where they run along M or N, one a column of 64
    a_loads, b_loads = (BM // 64 if a_mn else 1), (BN // 64 if b_mn else 1)
    # a consumer's 64 x 256 sums go out as four boxes of 64 rows of 128 bytes, twice in float32
    if accumulate:
        rounds, box_columns, send = 2, 32, tma_add
    else:
        rounds, box_columns, send = 1, 64, tma_store

    @inlined
    def stage_f32(place, acc, warp_row, half):
        """64 x 128 of float32, four a chunk: lanes 0 and 1 of a quad have one, 2 and 3 the next.
        warp_row: the first of the warp's 16 rows"""
        lane = lane_id()
        for j in range(16):
            at = place + swizzled(warp_row + lane // u32(4), u32(2 * j) + bit(lane, 1)) + (
                bit(lane, 0) * u32(8))
            i = 64 * half + 4 * j
            store_two(at, acc[i], acc[i + 1])
            store_two(at + EIGHT_ROWS, acc[i + 2], acc[i + 3])

    @inlined
    def stage_bf16(place, acc, warp_row, half):
        """64 x 256 of bfloat16: stmatrix takes 16 rows of two chunks as a warp has them."""
        lane = lane_id()
        for j in range(16):
            at = place + swizzled(warp_row + (lane & u32(15)), u32(2 * j) + (lane >> u32(4)))
            i = 8 * j
            stmatrix(at, pack_bf16(acc[i], acc[i + 1]), pack_bf16(acc[i + 2], acc[i + 3]),
                     pack_bf16(acc[i + 4], acc[i + 5]), pack_bf16(acc[i + 6], acc[i + 7]))

    stage_sums = stage_f32 if accumulate else stage_bf16

    @inlined
    def write_tile(map_out, n, m, acc, place, group, semaphore, part, splits):
        """out = acc in bfloat16, 64 x 256 at once; or out += acc in float32, 64 x 128 at a time,
        when it is this part's turn.  One thread of the warpgroup tells the copy engine."""
        warp_row, leads = warp_id() % u32(4) * u32(16), leads_warpgroup()
        for half in range(rounds):
            if leads:
                tma_wait_read()                 # what was staged before has been read
            warpgroup_barrier(group)
            stage_sums(place, acc, warp_row, half)
            fence_async()
            warpgroup_barrier(group)         # all 64 rows are there
            if leads:
                if accumulate and splits > 1 and half == 0:
                    semaphore_acquire(semaphore, part)
                    fence_async_global()
                for j in range(4):
                    send(global_address(map_out), n + u32(128 * half + box_columns * j), m,
                         place + PANEL_BYTES * u32(j))
                tma_commit()
        if accumulate and splits > 1 and leads:
            tma_wait_written()
            semaphore_release(semaphore, next_turn(part, splits))

    @inlined
    def barrier_of(barriers, stage):
        return barriers + MBARRIER_BYTES * stage

    @inlined
    def advance(stage, phase):
        """The next stage of the ring, and the parity of its phase"""
        stage += u32(1)
        if stage == u32(STAGES):
            stage, phase = u32(0), phase ^ u32(1)
        return stage, phase

    @cuda_kernel(launch_bounds=(384, 1))
    def kernel(map_a, map_b, map_out, semaphores, M, N, K, splits):
        """out (M, N) = A B, or out += A B"""
        start = dynamic_smem()
        staging = start + u32(STAGES * STAGE_BYTES)
        full = staging + u32(2 * OUT_BYTES)
        empty = full + u32(MBARRIER_BYTES * STAGES)
        group, stage, phase = warpgroup_id(), u32(0), u32(0)
        if leads_block():
            for i in range(STAGES):
                mbarrier_init(full + u32(MBARRIER_BYTES * i), FULL_ARRIVALS)
                mbarrier_init(empty + u32(MBARRIER_BYTES * i), EMPTY_ARRIVALS)
            mbarrier_fence()
        if leads_warpgroup():
            map_fence(global_address(map_a))
            map_fence(global_address(map_b))
            map_fence(global_address(map_out))
        cuda.syncthreads()                   # the barriers exist
        tiles = u32((M + BM - 1) // BM * ((N + BN - 1) // BN))
        pieces = tiles * u32(splits)
        piece = u32(cuda.blockIdx.x)
        if group == 0:                       # the producer, one thread of it
            give_registers()
            while piece < pieces and leads_block():
                m, n, first, end = tile_at(piece, M, N, K, u32(splits), BM, BN)
                for s in range(first, end):
                    buffer, k = start + stage * STAGE_BYTES, u32(s) * u32(BK)
                    ready = barrier_of(full, stage)
                    mbarrier_wait(barrier_of(empty, stage), phase ^ u32(1))       # at first at once
                    mbarrier_expect(ready, STAGE_BYTES)
                    for j in range(a_loads):
                        column, row = (m + u32(64 * j), k) if a_mn else (k, m)
                        tma_load(buffer + PANEL_BYTES * u32(j), global_address(map_a), column,
                                 row, ready)
                    for j in range(b_loads):
                        column, row = (n + u32(64 * j), k) if b_mn else (k, n)
                        tma_load(buffer + A_BYTES + PANEL_BYTES * u32(j),
                                 global_address(map_b), column, row, ready)
                    stage, phase = advance(stage, phase)
                piece += u32(cuda.gridDim.x)
        else:                                # a consumer: 64 rows of each tile
            take_registers()
            acc = cuda.local.array(128, f32)
            half_of_tile = group - u32(1)
            row0_of_half, place = u32(64) * half_of_tile, staging + half_of_tile * OUT_BYTES
            m, n, first, end = tile_at(piece, M, N, K, u32(splits), BM, BN)
            while piece < pieces:
                m += row0_of_half
                after = m, n, first, end     # for its type: set with the first slice
                for s in range(first, end):
                    buffer = start + stage * STAGE_BYTES
                    mbarrier_wait(barrier_of(full, stage), phase)
                    multiply(acc, descriptor(buffer + row0_of_half * ROW_BYTES),
                             descriptor(buffer + A_BYTES), u32(s) - u32(first))
                    if leads_warp():
                        mbarrier_arrive(barrier_of(empty, stage))
                    stage, phase = advance(stage, phase)
                    if u32(s) == first:      # while the other warpgroup multiplies
                        after = tile_at(piece + u32(cuda.gridDim.x), M, N, K, u32(splits), BM, BN)
                semaphore = semaphore_at(semaphores, u32(2) * (piece % tiles) + half_of_tile)
                write_tile(map_out, n, m, acc, place, group, semaphore, piece // tiles, splits)
                m, n, first, end = after
                piece += u32(cuda.gridDim.x)
            if leads_warpgroup():
                tma_wait_read()                 # before the block and its memory are gone
    return kernel

# Times, measured in those that a block takes to multiply one slice of K: to store a piece, and to
# wait for the turn of each part of a tile on either path
STORE_TIME, MMA_TURN, WGMMA_TURN = 4, 8, 2

def parts_of(tiles, slices, turn, blocks):
    """Into how many parts K is cut where there are few tiles: as many as take the least time, where
    `blocks` pieces, a round, run at once.

    The gradient of gate_up in the base preset, 64 x 512 tokens, on 132 multiprocessors: out is
    4096 x 768, K = 32768, 512 slices.  Its 32 x 3 tiles of 128 x 256 are one round that leaves 36
    multiprocessors idle, 512 + 4 + 2 = 518.  In four parts they are 384 pieces of 128 slices, three
    rounds: 3 (128 + 4) + 4 * 2 = 404.  In eight, six rounds: 6 (64 + 4) + 8 * 2 = 424."""
    def cost(parts):
        rounds = cdiv(tiles * parts, blocks)
        return rounds * (slices / parts + STORE_TIME) + turn * parts
    return min(range(1, 1 + slices), key=cost)

def splits_of(tiles, K, semaphores, turn, blocks):
    """The same for a product: one part if it is not added to an output, or if there are not two
    semaphores for each tile."""
    if semaphores is None or 2 * tiles > semaphores.size:
        return 1
    return parts_of(tiles, cdiv(K, BK), turn, blocks)

def mma_matmul(out, a, b, a_mn, b_mn, semaphores):
    """One part of a tile a block, four warps"""
    (M, N), K = out.shape, a.shape[0] if a_mn else a.shape[1]
    tiles = cdiv(M, MMA_TILE) * cdiv(N, MMA_TILE)
    device = cuda.get_current_device()       # its registers are enough for MMA_BLOCKS at once
    of_a_block = MMA_SMEM + RESERVED_SMEM
    blocks_each = min(MMA_BLOCKS, device.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR // of_a_block)
    blocks = device.MULTIPROCESSOR_COUNT * blocks_each
    splits = splits_of(tiles, K, semaphores, MMA_TURN, blocks)
    accumulate = semaphores is not None
    unused = out                             # the kernel wants an array, which nobody reads
    launch(mma_kernel(a_mn, b_mn, accumulate), out, a, b, semaphores if accumulate else unused,
           M, N, K, splits, grid=tiles * splits, block=128, smem=MMA_SMEM)

def wgmma_matmul(out, a, b, a_mn, b_mn, semaphores):
    """One block a multiprocessor, three warpgroups, which takes one piece after another"""
    (M, N), K = out.shape, a.shape[0] if a_mn else a.shape[1]
    tiles = cdiv(M, BM) * cdiv(N, BN)
    blocks = cuda.get_current_device().MULTIPROCESSOR_COUNT
    splits = splits_of(tiles, K, semaphores, WGMMA_TURN, blocks)
    accumulate = semaphores is not None
    map_a, map_b = map_of(a, BK if a_mn else BM), map_of(b, BK if b_mn else BN)
    unused = map_a
    launch(wgmma_kernel(a_mn, b_mn, accumulate), map_a, map_b, map_of(out, 64),
           semaphores if accumulate else unused, M, N, K, splits,
           grid=min(tiles * splits, blocks), block=384, smem=WGMMA_SMEM, resident=splits > 1)

def tensor_matmul(out, a, b, a_mn, b_mn, semaphores=None):
    """out (M, N) = A B.  With `semaphores`, zeros, out is float32 and added to; where they are
    enough for its tiles, several blocks may share one."""
    product = wgmma_matmul if kernel_path() == "wgmma" else mma_matmul
    product(out, a, b, a_mn, b_mn, semaphores)
