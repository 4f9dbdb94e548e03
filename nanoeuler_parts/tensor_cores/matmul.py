"""Matrix products on tensor cores: one product, or those of a batch, for Muon.

Contents
    the order of the work, split-K, and epilogues, on both paths
    the kernel of path mma
    the kernel of path wgmma
    the number of splits
    the functions that launch the kernels
"""
import functools

import numpy as np
from numba import cuda, types

from nanoeuler_cuda import cdiv, filled, HOPPER_TILE, transposed
from nanoeuler_parts.gpu.launches import cuda_kernel, inlined, launch, made_once
from nanoeuler_parts.gpu.mma import mma
from nanoeuler_parts.gpu.numbers import f32, u32, u64, vector
from nanoeuler_parts.tensor_cores.ptx import (
    ALIGNMENT, atomic_increment, bit, cp_async_commit, cp_async_or_zero, cp_async_wait_all,
    cp_async_wait_one, DeviceFunctions, dynamic_smem, fence_async, fence_async_global,
    give_registers, global_address, lane_id, leads_block, leads_warp, leads_warpgroup, map_fence,
    mbarrier_arrive, MBARRIER_BYTES, mbarrier_expect, mbarrier_fence, mbarrier_init,
    mbarrier_wait, next_turn, pack_bf16, quotient, semaphore_acquire, semaphore_at,
    semaphore_release, shared_address, store_two, take_registers, thread_id, tma_add, tma_commit,
    tma_load, tma_load_3d, tma_store, tma_store_3d, tma_wait_read, tma_wait_written, warp_id,
    warpgroup_barrier, warpgroup_id,
)
from nanoeuler_parts.tensor_cores.tiles import (
    descriptor, ldmatrix_columns, ldmatrix_rows, PANEL_BYTES, ROW_BYTES, stmatrix_columns,
    stmatrix_rows, swizzled, wgmma,
)

# ---- The order of the work
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
# Because w is (768, 2048), B is not `mn`.  On `wgmma`, a tile is 128 x 256: there are 32 x 3 tiles
# in two bands.  Piece 0 is y[0:128, 0:256], and piece 1 is y[128:256, 0:256].  Piece 16 begins the
# next column, y[0:128, 256:512].  A tile is the sum of 2048 / 64 = 32 products of slices, of
# A (128, 64) and B^T (256, 64).
BK = 64                                      # values of k in a slice of A and B
BAND = 16                                    # rows of tiles in a band

@inlined
def tile_at(piece, M, N, K, splits, tile_rows, tile_columns):
    """Returns (m, n, first, end) of a piece: the first entry of its tile is out[m, n], and its
    split consists of slices first to end - 1 of K."""
    tiles_down = u32((M + tile_rows - 1) // tile_rows)
    tiles_across = u32((N + tile_columns - 1) // tile_columns)
    split = quotient(piece, tiles_down * tiles_across)
    tile = piece - split * tiles_down * tiles_across
    slices = u32((K + BK - 1) // BK)
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

# The epilogue of a kernel says what becomes of the product A B:
#
#     STORE        out = A B                       in bfloat16
#     ADD          out += A B                      in float32
#     (a, b, c)    out = a I + b A + c A B         in bfloat16, for square matrices: three numbers
STORE, ADD = "store", "add"

@functools.cache
def polynomial_for(epilogue):
    """Makes the device function polynomial(acc, i, x, row, column).  It replaces acc[i] and
    acc[i + 1], which are A B at (row, column) and (row, column + 1), by a I + b A + c A B there.
    x: the matrix A, (N, N), N even.  If the epilogue is STORE or ADD, the function does nothing."""
    if epilogue in (STORE, ADD):
        @inlined
        def polynomial(acc, i, x, row, column):
            pass
        return polynomial
    a, b, c = map(np.float32, epilogue)
    load_2, _ = vector(2)

    @inlined
    def polynomial(acc, i, x, row, column):
        # Beyond the edge, this reads the last numbers, and the results are not stored.  Without
        # branches, the compiler unrolls the loops around, and acc stays in registers
        N = types.int32(x.shape[0])
        r, k = types.int32(row), types.int32(column)
        two = load_2(x, types.intp(min(r, N - types.int32(1))) * types.intp(N)
                     + types.intp(min(k, N - types.int32(2))))
        for j in range(2):
            diagonal = a if r == k + types.int32(j) else f32(0)
            acc[i + j] = c * acc[i + j] + b * two[j] + diagonal
    return polynomial

# A batch is n products of one shape.  Its pieces are those of the first product, then those of the
# second, and so on.

# Split-K: if a float32 output has few tiles and K is long, several blocks share a tile.  Each
# multiplies one split and adds its product to the output when it is its turn, which keeps the order
# of the sums.  A tile has one semaphore for the turns in `mma`, and two in `wgmma`, one for each
# warpgroup that stores.
#
# A block waits for the earlier splits of its tile.  The blocks of these must already run, or it
# would wait for ever.  CUDA does not promise that blocks begin in the order of their numbers.
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

# ---- Path mma: compute capability 8.0 and newer
# A block of four warps computes a tile of 128 x 128, and each warp 64 x 64 of it.  cp.async copies
# slices into a ring of three stages.  In shared memory:
#
#     stage 0     slice of A, 16 KB     slice of B, 16 KB
#     stage 1     slice of A            slice of B
#     stage 2     slice of A            slice of B
#     at the end, over the stages: the sums of the four warps, 16 KB each, on their way out
#
# While `mma` multiplies 16 values of k, ldmatrix already loads the next 16 into other registers,
# and cp.async copies slices that follow.  The loop of the kernel takes four steps for slice s:
#
#     mma multiplies          ldmatrix loads                    cp.async requests
#     k =  0 to 15            k = 16 to 31                      A of slice s + 2
#     k = 16 to 31            k = 32 to 47                      B of slice s + 2
#     k = 32 to 47            k = 48 to 63
#     k = 48 to 63            k =  0 to 15 of slice s + 1
#
# This is about 35 times as fast as the portable kernel, and 0.55 times as fast as cuBLAS.  A block
# uses 97 KB of shared memory; an RTX 40 allows 99.
MMA_TILE = 128                               # rows and columns of a tile of the output
MMA_STAGES = 3
MMA_OPERAND_BYTES = np.uint32(2 * MMA_TILE * BK)         # a slice of A, or of B
MMA_STAGE_BYTES = 2 * MMA_OPERAND_BYTES      # both
MMA_SMEM = int(MMA_STAGES * MMA_STAGE_BYTES) + ALIGNMENT
MMA_BLOCKS = 2                               # blocks that share a multiprocessor
RESERVED_SMEM = 1024                         # bytes that CUDA adds to a block's shared memory

class Operand(DeviceFunctions):
    """How operand A or B of `mma_kernel` moves from device memory to shared memory, and from there
    to registers.  In a copy of a slice, each thread copies eight chunks.

    first_chunk(source, mn0, k0)             returns where the thread's chunks begin
    issue_loads(to, source, address, r, c)   requests the thread's chunks of a slice
    lane_start(mn0)                          returns where a lane begins to read a tile
    load_fragment(out, at, i, s)             loads a fragment: 16 rows of A or 16 columns of B, and
                                             16 values of k"""

# ldmatrix loads a fragment of 16 x 16 as four matrices of 8 x 8.  Lane l gives the address of row
# l % 8 of matrix l / 8, so bits 3 and 4 of the lane's number say which matrix it is.  One of the
# bits means the next 8 rows of the tile, the other one the next chunk.  `mma` wants the matrices
# in a certain order of registers, and this order decides the meaning of each bit:
#
#     operand    rows of a tile    next 8 rows    next chunk    ldmatrix
#     A          along K           bit 3          bit 4         as they lie
#     A, mn      along M           bit 4          bit 3         transposed
#     B          along K           bit 4          bit 3         as they lie
#     B, mn      along N           bit 3          bit 4         transposed
@functools.cache
def mma_operand(of_a, mn):
    """Returns the Operand A (of_a) or B.  mn: a_mn or b_mn of the product"""
    load = ldmatrix_columns if mn else ldmatrix_rows
    row_bit, chunk_bit = (3, 4) if of_a != mn else (4, 3)
    # The 128 threads copy a chunk each at a time: 8 rows of 16 chunks if mn, else 16 rows of 8.
    chunks, rows = (16, 8) if mn else (8, 16)

    @inlined
    def first_chunk(source, mn0, k0):
        """Returns the place of this thread's first chunk of a slice: its address in device memory,
        its offset in a stage, and its row and column in the matrix.

        mn0, k0: first row (of A) or column (of B) of the tile, and first k of the slice"""
        row, chunk = thread_id() // u32(chunks), thread_id() % u32(chunks)
        r, c = (k0 + row, mn0 + chunk * u32(8)) if mn else (mn0 + row, k0 + chunk * u32(8))
        return (global_address(source) + u64(r) * u64(source.strides[0]) + u64(2) * u64(c),
                swizzled(row, chunk), types.int32(r), types.int32(c))

    @inlined
    def issue_loads(to, source, address, r, c):
        """Requests the thread's eight chunks of a slice, with zeros beyond the edge of the matrix.
        Returns the place of its first chunk of the next slice.

        to: address in shared memory     address, r, c: the place, as first_chunk returns it"""
        # rows of the matrix from r on, counted in 32 bits; 0 if the chunk is beyond the last column
        rows_left = types.int32(types.int32(source.shape[0]) - r if
                                c < types.int32(source.shape[1]) else 0)
        row_address = address
        for i in range(8):
            cp_async_or_zero(to + u32(128 * rows * i), row_address,
                             u32(16) if rows * i < rows_left else u32(0))
            row_address += u64(source.strides[0]) * u64(rows)
        if mn:
            return row_address, r + types.int32(BK), c
        return address + u64(2 * BK), r, c + types.int32(BK)

    @inlined
    def lane_start(mn0):
        """Returns the offset in a tile of the chunk whose address this lane gives to ldmatrix, for
        the fragment with i = s = 0.  mn0: first row (of A) or column (of B) of the warp"""
        row = (lane_id() & u32(7)) + bit(lane_id(), row_bit) * u32(8)
        chunk = bit(lane_id(), chunk_bit)
        if mn:
            return swizzled(row, (mn0 >> u32(3)) + chunk)
        return swizzled(mn0 + row, chunk)

    @inlined
    def load_fragment(out, at, i, s):
        """Loads a fragment into out[4 * i:]: rows of A or columns of B 16 i to 16 i + 15, and
        k = 16 s to 16 s + 15.     at: the address of lane_start

        Because of the swizzle, a step of 16 numbers along a row (two chunks) flips bits of the
        address.  A step of 16 rows adds to it."""
        across, down = (i, s) if mn else (s, i)
        load(out, 4 * i, (at ^ u32(2 * 16 * across)) + u32(16 * 128 * down))
    return Operand(first_chunk=first_chunk, issue_loads=issue_loads, lane_start=lane_start,
                   load_fragment=load_fragment)

@made_once
def mma_kernel(a_mn, b_mn, epilogue, batched):
    """Makes the kernel of path `mma` for two layouts of A and B.
    batched: a, b and out are arrays of matrices, (n, ..)"""
    of_a, of_b = mma_operand(True, bool(a_mn)), mma_operand(False, bool(b_mn))
    accumulate, polynomial = epilogue == ADD, polynomial_for(epilogue)
    is_polynomial = epilogue not in (STORE, ADD)

    @inlined
    def matrix_of(x):
        """Returns the matrix of this block: block y of the grid has matrix y."""
        return x[cuda.blockIdx.y] if batched else x

    @inlined
    def load_fragments(a, b, a_at, b_at, s):
        """Loads the warp's 64 rows of A and 64 columns of B for k = 16 s to 16 s + 15."""
        for i in range(4):
            of_a.load_fragment(a, a_at, i, s)
        for i in range(4):
            of_b.load_fragment(b, b_at, i, s)

    @inlined
    def multiply(acc, a, b):
        """acc += A B for the 64 x 64 sums of the warp and 16 values of k.  acc[32 i + 8 j:] are the
        sums of rows 16 i to 16 i + 15, columns 16 j to 16 j + 15."""
        for j in range(4):
            for i in range(4):
                mma(acc, 32 * i + 8 * j, a, 4 * i, b, 4 * j)
                mma(acc, 32 * i + 8 * j + 4, a, 4 * i, b, 4 * j + 2)

    # The sums go to the output by way of shared memory, `staging`.  A lane writes its own sums
    # there, and reads neighbours of a row, which it stores to the output in one access.
    load4, store4 = vector(4)
    NEIGHBOURS = 4                           # numbers that a lane stores at once
    ROW_STEP = 2                             # rows that a warp stores at once, of 64 numbers each
    BYTES_LOG2 = 2 if accumulate else 1      # log2 of the bytes of a number of the output

    @inlined
    def staging_offset(warp, row, chunk):
        """Returns the index in staging of a chunk, four neighbours, of a row of the warp's 64 x 64
        sums.  Like `swizzled`, it mixes row and chunk: here, pairs of chunks change places."""
        return warp * u32(64 * 64) + row * u32(64) + (
            (chunk ^ ((row & u32(7)) << u32(1))) * u32(NEIGHBOURS))

    @inlined
    def add_polynomial(acc, x, m0, n0, lane):
        """Makes a I + b x + c A B of the warp's sums A B, whose first one is out[m0, n0]."""
        row, column = m0 + lane // u32(4), n0 + lane % u32(4) * u32(2)
        if is_polynomial:                    # short loops, which the compiler unrolls
            add_to_rows(acc, 0, x, row, column)
            add_to_rows(acc, 1, x, row, column)
            add_to_rows(acc, 2, x, row, column)
            add_to_rows(acc, 3, x, row, column)

    @inlined
    def add_to_rows(acc, group, x, row, column):
        """The same for rows 16 group to 16 group + 15 of the warp"""
        for i in range(2):
            for j in range(8):
                polynomial(acc, 32 * group + 2 * i + 4 * j, x, row + u32(16 * group + 8 * i),
                           column + u32(8 * j))

    @inlined
    def stage_sums(staging, acc, warp, lane):
        """Writes the warp's sums to staging."""
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
        """out = the warp's sums, from row m0 and column n0"""
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
        """out += the warp's sums, 16 rows at a time"""
        old = cuda.local.array(32, f32)
        row, chunk = lane // u32(16), lane % u32(16)
        r, c = types.intp(m0 + row), types.intp(n0 + chunk * u32(NEIGHBOURS))
        pitch, rows_left = out.strides[0] >> BYTES_LOG2, types.int32(M - r if c < N else 0)
        store_at, load_at, last_load = r * pitch + c, r * pitch + c, (M - 1) * pitch + N - 4
        for g in range(0, 64, 16):
            # All loads come first, so that their latencies overlap.  There is no `if` for the same
            # reason: a load beyond the edge reads the last numbers of the matrix instead.
            for i in range(8):
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
    def kernel(all_out, all_a, all_b, semaphores, M, N, K, splits):
        """out (M, N) = A B, or what the epilogue says.  A block of 128 threads computes one piece.
        grid (pieces of one product, n)"""
        out, a, b = matrix_of(all_out), matrix_of(all_a), matrix_of(all_b)
        smem = dynamic_smem()
        acc, piece = filled(128, f32(0)), u32(cuda.blockIdx.x)
        if accumulate and splits > 1:
            piece = claim_piece(semaphores)
        m0, n0, first, end = tile_at(piece, M, N, K, u32(splits), MMA_TILE, MMA_TILE)
        lane, warp = lane_id(), warp_id()
        warp_m, warp_n = u32(64) * bit(warp, 0), u32(64) * (warp >> u32(1))      # in the tile
        a_from, a_to, a_row, a_col = of_a.first_chunk(a, m0, first * u32(BK))
        b_from, b_to, b_row, b_col = of_b.first_chunk(b, n0, first * u32(BK))
        a_to, b_to = smem + a_to, smem + MMA_OPERAND_BYTES + b_to
        a_lane = smem + of_a.lane_start(warp_m)
        b_lane = smem + MMA_OPERAND_BYTES + of_b.lane_start(warp_n)
        for s in range(MMA_STAGES - 1):      # request slices for all stages but the last
            next_buffer = u32(s * MMA_STAGE_BYTES)
            a_from, a_row, a_col = of_a.issue_loads(a_to + next_buffer, a, a_from, a_row, a_col)
            b_from, b_row, b_col = of_b.issue_loads(b_to + next_buffer, b, b_from, b_row, b_col)
            cp_async_commit()
        # offsets of the stage that is read, and of the stage that is filled
        buffer, next_buffer = u32(0), u32((MMA_STAGES - 1) * MMA_STAGE_BYTES)
        a_now, b_now = cuda.local.array(16, u32), cuda.local.array(16, u32)
        a_next, b_next = cuda.local.array(16, u32), cuda.local.array(16, u32)
        cp_async_wait_one()
        cuda.syncthreads()                   # the first slice has arrived
        # The steps of the table above are written out, so that loads stand between the products
        # that hide their latency.  The last two rounds request slices that are never multiplied.
        load_fragments(a_now, b_now, a_lane, b_lane, 0)
        for _ in range(types.int32(end - first)):
            load_fragments(a_next, b_next, a_lane + buffer, b_lane + buffer, 1)
            multiply(acc, a_now, b_now)
            a_from, a_row, a_col = of_a.issue_loads(a_to + next_buffer, a, a_from, a_row, a_col)
            load_fragments(a_now, b_now, a_lane + buffer, b_lane + buffer, 2)
            multiply(acc, a_next, b_next)
            b_from, b_row, b_col = of_b.issue_loads(b_to + next_buffer, b, b_from, b_row, b_col)
            cp_async_commit()
            load_fragments(a_next, b_next, a_lane + buffer, b_lane + buffer, 3)
            multiply(acc, a_now, b_now)
            next_buffer = buffer             # this stage has just been read: fill it next
            last_buffer = u32((MMA_STAGES - 1) * MMA_STAGE_BYTES)
            buffer = buffer + MMA_STAGE_BYTES if buffer < last_buffer else u32(0)
            cp_async_wait_one()              # slice s + 1 has arrived,
            cuda.syncthreads()               # for all threads, and no warp still reads slice s
            load_fragments(a_now, b_now, a_lane + buffer, b_lane + buffer, 0)
            multiply(acc, a_next, b_next)
        cp_async_wait_all()
        cuda.syncthreads()                   # staging may overwrite the stages
        tiles = u32(cuda.gridDim.x) // u32(splits)
        split, semaphore = piece // tiles, semaphore_at(semaphores, piece % tiles)
        if accumulate and splits > 1:
            if leads_block():
                semaphore_acquire(semaphore, split)
            cuda.syncthreads()               # it is our turn
        staging = cuda.shared.array(0, f32)
        add_polynomial(acc, a, m0 + warp_m, n0 + warp_n, lane)
        stage_sums(staging, acc, warp, lane)
        write_rows(out, m0 + warp_m, n0 + warp_n, M, N, staging, warp, lane)
        if accumulate and splits > 1:
            cuda.threadfence()
            cuda.syncthreads()               # all threads have written their sums
            if leads_block():
                semaphore_release(semaphore, next_turn(split, splits))
    return kernel

# ---- Path wgmma: compute capability 9.0
# A block has three warpgroups.  It stays on its multiprocessor and computes one piece of 128 x 256
# after another.  Warpgroup 0 is the producer: it only requests copies.  The two others are the
# consumers: each multiplies 64 of the 128 rows.  The copy engine moves whole boxes, and `wgmma`
# reads both operands from shared memory, once per warpgroup.  In shared memory:
#
#     stage 0      slice of A, 16 KB     slice of B, 32 KB
#     stage 1      slice of A            slice of B
#     stage 2      slice of A            slice of B
#     staging      results of consumer 1, 32 KB; results of consumer 2, 32 KB
#     full[3]      mbarriers: the slices of a stage have landed
#     empty[3]     mbarriers: both consumers have read the stage
#
# Slices 0, 1, 2, .. flow through the ring of three stages.  Time runs downwards:
#
#     stage 0           stage 1           stage 2
#     0 is copied
#     0 is multiplied   1 is copied
#     3 is copied       1 is multiplied   2 is copied
#     3 is multiplied   4 is copied       2 is multiplied
#     6 is copied       4 is multiplied   5 is copied       ...
#
# At the end of "is copied", a phase of full[stage] completes: the producer has arrived, and all
# bytes that it announced have landed.  At the end of "is multiplied", a phase of empty[stage]
# completes: the eight warps of the consumers have arrived.  The next slice of a stage belongs to
# the next phase, which has the other parity.  At first, all stages are empty: the producer waits
# for the parity before phase 0, and this wait returns at once.
BM, BN = HOPPER_TILE                         # rows and columns of a tile of the output
A_BYTES = np.uint32(2 * BM * BK)             # a slice of A
STAGE_BYTES = np.uint32(2 * (BM + BN) * BK)  # slices of A and B
STAGING_BYTES = np.uint32(2 * 64 * BN)       # results that one warpgroup stores at once
STAGES = 3
WGMMA_SMEM = int(STAGES * STAGE_BYTES + 2 * STAGING_BYTES + 2 * MBARRIER_BYTES * STAGES) + ALIGNMENT
EIGHT_ROWS = ROW_BYTES * np.uint32(8)
FULL_ARRIVALS = np.uint32(1)                 # the producer's thread, with the bytes it announces
EMPTY_ARRIVALS = np.uint32(8)                # one lane of each warp of the two consumers

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

def tiles_of(M, N, symmetric):
    """The number of tiles of 128 x 256 that are computed of an output (M, N)"""
    down, across = cdiv(M, BM), cdiv(N, BN)
    return down * across - (across * (across - 1) if symmetric else 0)

@made_once
def wgmma_kernel(a_mn, b_mn, epilogue, batched, symmetric):
    """Makes the kernel of path `wgmma` for two layouts of A and B.
    batched: the tensor maps are those of arrays of matrices, (n, ..)
    symmetric: all outputs are symmetric"""
    accumulate, polynomial = epilogue == ADD, polynomial_for(epilogue)
    is_polynomial = epilogue not in (STORE, ADD)
    multiply = wgmma(BN, "columns" if a_mn else "rows", b_mn, adds="asked")
    # TMA loads per slice: one, if its rows run along K; otherwise one for each panel of 64 columns
    a_loads, b_loads = (BM // 64 if a_mn else 1), (BN // 64 if b_mn else 1)
    # A consumer's 64 x 256 sums go out in passes of four boxes, 64 rows of 128 bytes each: in one
    # pass of bfloat16, or in two of float32.
    passes, box_columns = (2, 32) if accumulate else (1, 64)

    # The copy engine's loads and stores for the matrix z of a batch
    @inlined
    def load_box(to, map, column, row, z, barrier):
        if batched:
            tma_load_3d(to, map, column, row, z, barrier)
        else:
            tma_load(to, map, column, row, barrier)

    @inlined
    def send_box(map, column, row, z, staging):
        if batched:
            tma_store_3d(map, column, row, z, staging)
        elif accumulate:
            tma_add(map, column, row, staging)
        else:
            tma_store(map, column, row, staging)

    @inlined
    def locate(piece, tiles, M, N, K, splits):
        """Returns (z, m, n, first, end) of a piece: its matrix in the batch, and tile_at."""
        z = piece // tiles if batched else u32(0)
        m, n, first, end = tile_at(piece - z * tiles, M, N, K, u32(1) if batched else u32(splits),
                                   BM, BN)
        if symmetric:
            m, n = lower_tile_at(piece - z * tiles, N)
        return z, m, n, first, end

    @inlined
    def stage_f32(staging, acc, warp_row, half):
        """Writes sums to staging in float32: 64 rows, and the first or second half of 256 columns.
        A chunk has four numbers: lanes 0 and 1 of a quad write one, lanes 2 and 3 the next.

        warp_row: the first of the warp's 16 rows"""
        lane = lane_id()
        for j in range(16):
            at = staging + swizzled(warp_row + lane // u32(4), u32(2 * j) + bit(lane, 1)) + (
                bit(lane, 0) * u32(8))
            i = 64 * half + 4 * j
            store_two(at, acc[i], acc[i + 1])
            store_two(at + EIGHT_ROWS, acc[i + 2], acc[i + 3])

    @inlined
    def stage_bf16(staging, acc, warp_row, half):
        """Writes sums to staging in bfloat16, 64 x 256.  stmatrix stores 16 rows of two chunks from
        the fragments of a warp."""
        lane = lane_id()
        for j in range(16):
            at = staging + swizzled(warp_row + (lane & u32(15)), u32(2 * j) + (lane >> u32(4)))
            i = 8 * j
            stmatrix_rows(at, pack_bf16(acc[i], acc[i + 1]), pack_bf16(acc[i + 2], acc[i + 3]),
                          pack_bf16(acc[i + 4], acc[i + 5]), pack_bf16(acc[i + 6], acc[i + 7]))

    @inlined
    def stage_mirrored(staging, acc, warp_row):
        """Writes the transpose of the sums to staging in bfloat16, 256 x 64: four panels of 64
        rows.  The warp's 16 rows become two chunks of each row."""
        lane = lane_id()
        for j in range(16):
            row = u32(16 * (j % 4)) + bit(lane, 4) * u32(8) + lane % u32(8)
            chunk = u32(8 * (j // 4)) + warp_row // u32(8) + bit(lane, 3)
            i = 8 * j
            stmatrix_columns(staging + swizzled(row, chunk),
                             pack_bf16(acc[i], acc[i + 1]), pack_bf16(acc[i + 2], acc[i + 3]),
                             pack_bf16(acc[i + 4], acc[i + 5]), pack_bf16(acc[i + 6], acc[i + 7]))

    stage_sums = stage_f32 if accumulate else stage_bf16

    @inlined
    def add_polynomial(acc, x, z, m, n):
        """Makes a I + b x[z] + c A B of a consumer's sums A B, whose first one is out[m, n]."""
        if is_polynomial:
            lane = lane_id()
            row = m + warp_id() % u32(4) * u32(16) + lane // u32(4)
            column = n + lane % u32(4) * u32(2)
            matrix = x[z]
            add_to_columns(acc, 0, matrix, row, column)  # short loops, which the compiler unrolls
            add_to_columns(acc, 1, matrix, row, column)
            add_to_columns(acc, 2, matrix, row, column)
            add_to_columns(acc, 3, matrix, row, column)

    @inlined
    def add_to_columns(acc, group, x, row, column):
        """The same for columns 64 group to 64 group + 63 of the tile"""
        for j in range(8):
            for i in range(2):
                polynomial(acc, 32 * group + 4 * j + 2 * i, x, row + u32(8 * i),
                           column + u32(64 * group + 8 * j))

    @inlined
    def write_tile(map_out, n, m, z, acc, staging, warpgroup, semaphore, split, splits):
        """Stores a consumer's sums to out[m:m + 64, n:n + 256].  One thread of the warpgroup
        commands the copy engine.

        accumulate: out += the sums in float32, in two passes of 64 x 128, when it is this split's
        turn; otherwise out = the sums in bfloat16, in one pass"""
        warp_row, leads = warp_id() % u32(4) * u32(16), leads_warpgroup()
        for half in range(passes):
            if leads:
                tma_wait_read()              # the copy engine has read the pass before
            warpgroup_barrier(warpgroup)
            stage_sums(staging, acc, warp_row, half)
            fence_async()
            warpgroup_barrier(warpgroup)     # all 64 rows are in staging
            if leads:
                if accumulate and splits > 1 and half == 0:
                    semaphore_acquire(semaphore, split)
                    fence_async_global()
                for j in range(4):
                    send_box(global_address(map_out), n + u32(128 * half + box_columns * j), m, z,
                             staging + PANEL_BYTES * u32(j))
                tma_commit()
        if accumulate and splits > 1 and leads:
            tma_wait_written()
            semaphore_release(semaphore, next_turn(split, splits))

    @inlined
    def write_mirrored(map_out, n, m, z, acc, staging, warpgroup):
        """Stores the transpose of a consumer's sums to out[n:n + 256, m:m + 64]."""
        leads = leads_warpgroup()
        if leads:
            tma_wait_read()
        warpgroup_barrier(warpgroup)
        stage_mirrored(staging, acc, warp_id() % u32(4) * u32(16))
        fence_async()
        warpgroup_barrier(warpgroup)
        if leads:
            for j in range(4):
                send_box(global_address(map_out), m, n + u32(64 * j), z,
                         staging + PANEL_BYTES * u32(j))
            tma_commit()

    @inlined
    def barrier_of(barriers, stage):
        return barriers + MBARRIER_BYTES * stage

    @inlined
    def advance(stage, phase):
        """Returns the next stage of the ring, and the parity of its next phase."""
        stage += u32(1)
        if stage == u32(STAGES):
            stage, phase = u32(0), phase ^ u32(1)
        return stage, phase

    @cuda_kernel(launch_bounds=(384, 1))
    def kernel(map_a, map_b, map_out, semaphores, x, M, N, K, splits):
        """out (M, N) = A B, or what the epilogue says.  A block of 384 threads takes one piece
        after another.
        map_a, map_b, map_out: tensor maps of the matrices     x: A itself, for a polynomial
        splits: how often each tile is worked on, once per split or, batched, once per matrix"""
        start = dynamic_smem()
        staging = start + u32(STAGES * STAGE_BYTES)
        full = staging + u32(2 * STAGING_BYTES)
        empty = full + u32(MBARRIER_BYTES * STAGES)
        warpgroup, stage, phase = warpgroup_id(), u32(0), u32(0)
        if leads_block():
            for i in range(STAGES):
                mbarrier_init(full + u32(MBARRIER_BYTES * i), FULL_ARRIVALS)
                mbarrier_init(empty + u32(MBARRIER_BYTES * i), EMPTY_ARRIVALS)
            mbarrier_fence()
        if leads_warpgroup():
            map_fence(global_address(map_a))
            map_fence(global_address(map_b))
            map_fence(global_address(map_out))
        cuda.syncthreads()                   # the barriers are initialized
        tiles = u32((M + BM - 1) // BM * ((N + BN - 1) // BN))
        if symmetric:
            tiles -= u32((N + BN - 1) // BN * ((N + BN - 1) // BN - 1))
        pieces = tiles * u32(splits)
        piece = u32(cuda.blockIdx.x)
        if warpgroup == 0:                   # the producer: only its leader requests copies
            give_registers()
            while piece < pieces and leads_block():
                z, m, n, first, end = locate(piece, tiles, M, N, K, splits)
                for s in range(first, end):
                    buffer, k = start + stage * STAGE_BYTES, u32(s) * u32(BK)
                    ready = barrier_of(full, stage)
                    mbarrier_wait(barrier_of(empty, stage), phase ^ u32(1))
                    mbarrier_expect(ready, STAGE_BYTES)
                    for j in range(a_loads):
                        column, row = (m + u32(64 * j), k) if a_mn else (k, m)
                        load_box(buffer + PANEL_BYTES * u32(j), global_address(map_a), column,
                                 row, z, ready)
                    for j in range(b_loads):
                        column, row = (n + u32(64 * j), k) if b_mn else (k, n)
                        load_box(buffer + A_BYTES + PANEL_BYTES * u32(j),
                                 global_address(map_b), column, row, z, ready)
                    stage, phase = advance(stage, phase)
                piece += u32(cuda.gridDim.x)
        else:                                # a consumer: 64 rows of each tile
            take_registers()
            acc = cuda.local.array(128, f32)
            half_of_tile = warpgroup - u32(1)
            row0_of_half, own_staging = (
                u32(64) * half_of_tile, staging + half_of_tile * STAGING_BYTES)
            z, m, n, first, end = locate(piece, tiles, M, N, K, splits)
            while piece < pieces:
                m += row0_of_half
                next_tile = z, m, n, first, end  # gives it its type; it is set below
                for s in range(first, end):
                    buffer = start + stage * STAGE_BYTES
                    mbarrier_wait(barrier_of(full, stage), phase)
                    multiply(acc, descriptor(buffer + row0_of_half * ROW_BYTES),
                             descriptor(buffer + A_BYTES), u32(s) - u32(first))
                    if leads_warp():
                        mbarrier_arrive(barrier_of(empty, stage))
                    stage, phase = advance(stage, phase)
                    if u32(s) == first:      # meanwhile, the other consumer multiplies
                        next_tile = locate(piece + u32(cuda.gridDim.x), tiles, M, N, K, splits)
                semaphore = semaphore_at(semaphores, u32(2) * (piece % tiles) + half_of_tile)
                add_polynomial(acc, x, z, m, n)
                write_tile(map_out, n, m, z, acc, own_staging, warpgroup, semaphore,
                           piece // tiles, splits)
                if symmetric and m >= n + u32(BN):       # the tile is wholly below the diagonal
                    write_mirrored(map_out, n, m, z, acc, own_staging, warpgroup)
                z, m, n, first, end = next_tile
                piece += u32(cuda.gridDim.x)
            if leads_warpgroup():
                tma_wait_read()              # shared memory must live until the engine has read it
    return kernel

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

def splits_for(tiles, K, semaphores, turn_time, blocks):
    """Returns the number of splits for a product.  It is 1 if the product overwrites its output, or
    if there are fewer than two semaphores per tile."""
    if semaphores is None or 2 * tiles > semaphores.size:
        return 1
    return best_splits(tiles, cdiv(K, BK), turn_time, blocks)

# ---- Launches
def mma_matmul(out, a, b, a_mn, b_mn, semaphores):
    """The product on path `mma`: one block of four warps per piece.  Arguments as TensorOps.product
    """
    (M, N), K = out.shape, a.shape[0] if a_mn else a.shape[1]
    tiles = cdiv(M, MMA_TILE) * cdiv(N, MMA_TILE)
    device = cuda.get_current_device()       # its registers allow MMA_BLOCKS
    smem_per_block = MMA_SMEM + RESERVED_SMEM
    per_processor = min(MMA_BLOCKS, device.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR // smem_per_block)
    blocks = device.MULTIPROCESSOR_COUNT * per_processor
    splits = splits_for(tiles, K, semaphores, MMA_TURN_TIME, blocks)
    accumulate = semaphores is not None
    unused = out                             # the kernel needs an array here, and does not read it
    launch(mma_kernel(a_mn, b_mn, ADD if accumulate else STORE, False), out, a, b,
           semaphores if accumulate else unused, M, N, K, splits, grid=tiles * splits, block=128,
           smem=MMA_SMEM)

def wgmma_matmul(map_of, out, a, b, a_mn, b_mn, semaphores):
    """The product on path `wgmma`: one block of three warpgroups per multiprocessor.  Arguments as
    TensorOps.product     map_of: function that returns tensor maps, as TensorOps.map_of"""
    (M, N), K = out.shape, a.shape[0] if a_mn else a.shape[1]
    tiles = cdiv(M, BM) * cdiv(N, BN)
    blocks = cuda.get_current_device().MULTIPROCESSOR_COUNT
    splits = splits_for(tiles, K, semaphores, WGMMA_TURN_TIME, blocks)
    accumulate = semaphores is not None
    map_a, map_b = map_of(a, BK if a_mn else BM), map_of(b, BK if b_mn else BN)
    unused = map_a
    launch(wgmma_kernel(a_mn, b_mn, ADD if accumulate else STORE, False, False), map_a, map_b,
           map_of(out, 64), semaphores if accumulate else unused, unused, M, N, K, splits,
           grid=min(tiles * splits, blocks), block=384, smem=WGMMA_SMEM, resident=splits > 1)

def by_rows(x):
    """Returns (the array whose rows are contiguous, whether it is the transpose of x).
    x (n, M, N)"""
    return (x, False) if x.strides[2] == x.dtype.itemsize else (transposed(x), True)

def mma_products(out, a, b, polynomial):
    """Products of batches on path `mma`.  Arguments as TensorOps.products"""
    (n, M, N), K = out.shape, a.shape[2]
    (a, a_mn), (b, b_transposed) = by_rows(a), by_rows(b)
    unused = out
    launch(mma_kernel(a_mn, not b_transposed, polynomial or STORE, True), out, a, b, unused, M, N,
           K, 1, block=128, smem=MMA_SMEM, grid=(cdiv(M, MMA_TILE) * cdiv(N, MMA_TILE), n))

def wgmma_products(map_of, out, a, b, polynomial, symmetric):
    """The same on path `wgmma`"""
    (n, M, N), K = out.shape, a.shape[2]
    (a, a_mn), (b, b_transposed) = by_rows(a), by_rows(b)
    map_a, map_b = map_of(a, BK if a_mn else BM), map_of(b, BN if b_transposed else BK)
    unused, tiles = map_a, tiles_of(M, N, symmetric) * n
    launch(wgmma_kernel(a_mn, not b_transposed, polynomial or STORE, True, symmetric), map_a, map_b,
           map_of(out, 64), unused, a, M, N, K, n, block=384, smem=WGMMA_SMEM,
           grid=min(tiles, cuda.get_current_device().MULTIPROCESSOR_COUNT))
