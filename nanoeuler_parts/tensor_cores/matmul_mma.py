"""Matrix products on path mma: compute capability 8.0 and newer.

Contents
    operands: from device memory to shared memory to registers
    the main loop
    the writer
    the kernel, and the function that launches it
"""
import functools
from collections import namedtuple

import numpy as np
from numba import cuda, types

from nanoeuler_cuda import cdiv, filled
from nanoeuler_parts.gpu.launches import cuda_kernel, inlined, launch, made_once
from nanoeuler_parts.gpu.mma import mma
from nanoeuler_parts.gpu.numbers import f32, u32, u64, vector
from nanoeuler_parts.tensor_cores.ptx import (
    ALIGNMENT, bit, cp_async_commit, cp_async_or_zero, cp_async_wait_all, cp_async_wait_one,
    DeviceFunctions, dynamic_smem, global_address, lane_id, leads_block, next_turn,
    semaphore_acquire, semaphore_at, semaphore_release, shared_address, store_two, thread_id,
    warp_id,
)
from nanoeuler_parts.tensor_cores.scheduler import (
    BK, claim_piece, MMA_TURN_TIME, splits_for, tile_at,
)
from nanoeuler_parts.tensor_cores.tiles import ldmatrix_columns, ldmatrix_rows, swizzled

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
# For products of 4096 x 4096 on an H200, this is 32 times as fast as the portable kernel, and 0.64
# times as fast as cuBLAS.  A block uses 97 KB of shared memory; an RTX 40 allows 99.
MMA_TILE = 128                               # rows and columns of a tile of the output
MMA_STAGES = 3
MMA_OPERAND_BYTES = np.uint32(2 * MMA_TILE * BK)         # a slice of A, or of B
MMA_STAGE_BYTES = 2 * MMA_OPERAND_BYTES      # both
MMA_SMEM = int(MMA_STAGES * MMA_STAGE_BYTES) + ALIGNMENT
MMA_BLOCKS = 2                               # blocks that share a multiprocessor
RESERVED_SMEM = 1024                         # bytes that CUDA adds to a block's shared memory

# ---- Operands
class Operand(DeviceFunctions):
    """How operand A or B of `mma_kernel` moves from device memory to shared memory, and from there
    to registers.  In a copy of a slice, each thread copies eight chunks.

    first_chunk(source, mn0, k0, tile)     returns the Cursor of the thread's chunks
    issue_loads(chunks, source, stage)     requests the thread's chunks of a slice
    lane_start(mn0)                        returns where a lane begins to read a tile
    load_fragment(out, at, i, s)           loads a fragment: 16 rows of A or 16 columns of B, and
                                           16 values of k"""

# A thread's first chunk of a slice: its address in device memory, where it goes in stage 0, which
# is an address in shared memory, and its row and column in the matrix
Cursor = namedtuple("Cursor", "address to row column")

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
    def first_chunk(source, mn0, k0, tile):
        """Returns the Cursor of this thread's chunks of a slice.

        mn0, k0: first row (of A) or column (of B) of the tile, and first k of the slice
        tile: address of this operand's slice in stage 0"""
        row, chunk = thread_id() // u32(chunks), thread_id() % u32(chunks)
        r, c = (k0 + row, mn0 + chunk * u32(8)) if mn else (mn0 + row, k0 + chunk * u32(8))
        return Cursor(global_address(source) + u64(r) * u64(source.strides[0]) + u64(2) * u64(c),
                      tile + swizzled(row, chunk), types.int32(r), types.int32(c))

    @inlined
    def issue_loads(first, source, stage):
        """Requests the thread's eight chunks of a slice, with zeros beyond the edge of the matrix.
        Returns the Cursor of the next slice.

        first: the Cursor of this slice     stage: the offset of the stage that it goes to"""
        # number of rows from this one to the end of the matrix; 0 if the chunk is beyond the last
        # column
        rows_left = types.int32(types.int32(source.shape[0]) - first.row if
                                first.column < types.int32(source.shape[1]) else 0)
        row_address = first.address
        for i in range(8):
            cp_async_or_zero(first.to + stage + u32(128 * rows * i), row_address,
                             u32(16) if rows * i < rows_left else u32(0))
            row_address += u64(source.strides[0]) * u64(rows)
        if mn:
            return Cursor(row_address, first.to, types.int32(first.row + BK), first.column)
        return Cursor(first.address + u64(2 * BK), first.to, first.row,
                      types.int32(first.column + BK))

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

# ---- The main loop
@functools.cache
def mma_main_loop(a_mn, b_mn):
    """Makes the device function multiply_slices for two layouts of A and B."""
    of_a, of_b = mma_operand(True, a_mn), mma_operand(False, b_mn)

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

    @inlined
    def multiply_slices(acc, smem, a, b, m0, n0, first, end, warp_m, warp_n):
        """acc += A B of slices first to end - 1, for the tile that begins at out[m0, n0], and in it
        for the warp's 64 x 64 sums that begin at (warp_m, warp_n).
        smem: address of the stages.  When it returns, all copies and reads of them are over."""
        a_chunks = of_a.first_chunk(a, m0, first * u32(BK), smem)
        b_chunks = of_b.first_chunk(b, n0, first * u32(BK), smem + MMA_OPERAND_BYTES)
        a_lane = smem + of_a.lane_start(warp_m)
        b_lane = smem + MMA_OPERAND_BYTES + of_b.lane_start(warp_n)
        for s in range(MMA_STAGES - 1):      # request slices for all stages but the last
            a_chunks = of_a.issue_loads(a_chunks, a, u32(s * MMA_STAGE_BYTES))
            b_chunks = of_b.issue_loads(b_chunks, b, u32(s * MMA_STAGE_BYTES))
            cp_async_commit()
        # offsets of the stage that is read, and of the stage that is filled
        stage, next_stage = u32(0), u32((MMA_STAGES - 1) * MMA_STAGE_BYTES)
        a_now, b_now = cuda.local.array(16, u32), cuda.local.array(16, u32)
        a_next, b_next = cuda.local.array(16, u32), cuda.local.array(16, u32)
        cp_async_wait_one()
        cuda.syncthreads()                   # the first slice has arrived
        # The steps of the table above are written out, so that loads stand between the products
        # that hide their latency.  The last two rounds request slices that are never multiplied.
        load_fragments(a_now, b_now, a_lane, b_lane, 0)
        for _ in range(types.int32(end - first)):
            load_fragments(a_next, b_next, a_lane + stage, b_lane + stage, 1)
            multiply(acc, a_now, b_now)
            a_chunks = of_a.issue_loads(a_chunks, a, next_stage)
            load_fragments(a_now, b_now, a_lane + stage, b_lane + stage, 2)
            multiply(acc, a_next, b_next)
            b_chunks = of_b.issue_loads(b_chunks, b, next_stage)
            cp_async_commit()
            load_fragments(a_next, b_next, a_lane + stage, b_lane + stage, 3)
            multiply(acc, a_now, b_now)
            next_stage = stage               # this stage has just been read: fill it next
            last_stage = u32((MMA_STAGES - 1) * MMA_STAGE_BYTES)
            stage = stage + MMA_STAGE_BYTES if stage < last_stage else u32(0)
            cp_async_wait_one()              # slice s + 1 has arrived,
            cuda.syncthreads()               # for all threads, and no warp still reads slice s
            load_fragments(a_now, b_now, a_lane + stage, b_lane + stage, 0)
            multiply(acc, a_next, b_next)
        cp_async_wait_all()
        cuda.syncthreads()
    return multiply_slices

# ---- The writer
@functools.cache
def mma_writer(adds):
    """Makes the device function write.     adds: out += the sums in float32, else out = the sums in
    bfloat16"""
    # The sums go to the output by way of shared memory, `staging`.  A lane writes its own sums
    # there, and reads neighbours of a row, which it stores to the output in one access.
    load4, store4 = vector(4)
    NEIGHBOURS = 4                           # numbers that a lane stores at once
    ROW_STEP = 2                             # rows that a warp stores at once, of 64 numbers each
    BYTES_LOG2 = 2 if adds else 1           # log2 of the bytes of a number of the output

    @inlined
    def staging_offset(warp, row, chunk):
        """Returns the index in staging of a chunk, four neighbours, of a row of the warp's 64 x 64
        sums.  Like `swizzled`, it mixes row and chunk: here, pairs of chunks change places."""
        return warp * u32(64 * 64) + row * u32(64) + (
            (chunk ^ ((row & u32(7)) << u32(1))) * u32(NEIGHBOURS))

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
    def store_rows(out, m0, n0, M, N, staging, warp, lane, add):
        """out = the warp's sums, from row m0 and column n0     add: not used; as for add_rows"""
        row, chunk = lane // u32(16), lane % u32(16)
        r, c = types.intp(m0 + row), types.intp(n0 + chunk * u32(NEIGHBOURS))
        pitch, rows_left = out.strides[0] >> BYTES_LOG2, types.int32(M - r if c < N else 0)
        store_at = r * pitch + c
        for g in range(0, 64, 16):
            for i in range(8):
                vec = load4(staging, staging_offset(warp, row + u32(g + ROW_STEP * i), chunk))
                if g + ROW_STEP * i < rows_left:
                    store4(out, store_at, vec)
                store_at += ROW_STEP * pitch

    @inlined
    def add_rows(out, m0, n0, M, N, staging, warp, lane, add):
        """out = [out +] the warp's sums, 16 rows at a time"""
        old = cuda.local.array(32, f32)
        row, chunk = lane // u32(16), lane % u32(16)
        r, c = types.intp(m0 + row), types.intp(n0 + chunk * u32(NEIGHBOURS))
        pitch, rows_left = out.strides[0] >> BYTES_LOG2, types.int32(M - r if c < N else 0)
        store_at, load_at, last_load = r * pitch + c, r * pitch + c, (M - 1) * pitch + N - 4
        for g in range(0, 64, 16):
            # All loads come first, so that their latencies overlap.  There is no `if` for the same
            # reason: a load beyond the edge reads the last numbers of the matrix instead.
            for i in range(8):
                vec = load4(out, min(load_at, last_load))
                load_at += ROW_STEP * pitch
                for n in range(NEIGHBOURS):
                    old[NEIGHBOURS * i + n] = vec[n]
            for i in range(8):
                vec = load4(staging, staging_offset(warp, row + u32(g + ROW_STEP * i), chunk))
                for n in range(NEIGHBOURS):
                    vec[n] += old[NEIGHBOURS * i + n] if add else f32(0)
                if g + ROW_STEP * i < rows_left:
                    store4(out, store_at, vec)
                store_at += ROW_STEP * pitch

    write_rows = add_rows if adds else store_rows

    @inlined
    def write(out, acc, m0, n0, M, N, lane, warp, add):
        """Stores the warp's 64 x 64 sums from out[m0, n0] on, or adds them there if `add`.  The
        stages become `staging`."""
        staging = cuda.shared.array(0, f32)
        stage_sums(staging, acc, warp, lane)
        write_rows(out, m0, n0, M, N, staging, warp, lane, add)
    return write

# ---- The kernel
@made_once
def mma_kernel(a_mn, b_mn, epilogue, batched):
    """Makes the kernel of path `mma` for two layouts of A and B, and an Epilogue.
    batched: a, b, x and out are arrays of matrices, (n, ..)"""
    multiply_slices, write = mma_main_loop(bool(a_mn), bool(b_mn)), mma_writer(epilogue.adds)
    adds, changes, change = epilogue.adds, epilogue.changes, epilogue.make_change()

    @inlined
    def matrix_of(x):
        """Returns the matrix of this block: block y of the grid has matrix y."""
        return x[cuda.blockIdx.y] if batched else x

    @cuda_kernel(launch_bounds=(128, MMA_BLOCKS))
    def kernel(all_out, all_a, all_b, all_x, semaphores, M, N, K, splits, add):
        """out (M, N) = A B, or what the epilogue says.  A block of 128 threads computes one piece.
        grid (pieces of one product, n)     all_x: what the epilogue reads, if it changes the sums
        add: as for TensorOps.product"""
        out, a, b = matrix_of(all_out), matrix_of(all_a), matrix_of(all_b)
        smem = dynamic_smem()
        acc, piece = filled(128, f32(0)), u32(cuda.blockIdx.x)
        if adds and splits > 1:
            piece = claim_piece(semaphores)
        m0, n0, first, end = tile_at(piece, M, N, K, u32(splits), MMA_TILE, MMA_TILE, BK)
        lane, warp = lane_id(), warp_id()
        warp_m, warp_n = u32(64) * bit(warp, 0), u32(64) * (warp >> u32(1))      # in the tile
        multiply_slices(acc, smem, a, b, m0, n0, first, end, warp_m, warp_n)
        tiles = u32(cuda.gridDim.x) // u32(splits)
        split, semaphore = piece // tiles, semaphore_at(semaphores, piece % tiles)
        if adds and splits > 1:
            if leads_block():
                semaphore_acquire(semaphore, split)
            cuda.syncthreads()               # it is our turn
        m0 += warp_m
        n0 += warp_n
        if changes:                          # four calls: the compiler unrolls the loops in each
            x = matrix_of(all_x)
            row, column = m0 + lane // u32(4), n0 + lane % u32(4) * u32(2)
            change(acc, 0, x, row, column)
            change(acc, 32, x, row + u32(16), column)
            change(acc, 64, x, row + u32(32), column)
            change(acc, 96, x, row + u32(48), column)
        write(out, acc, m0, n0, M, N, lane, warp, add or split > 0)
        if adds and splits > 1:
            cuda.threadfence()
            cuda.syncthreads()               # all threads have written their sums
            if leads_block():
                semaphore_release(semaphore, next_turn(split, splits))
    return kernel

def mma_product(out, a, b, a_mn, b_mn, epilogue, x, semaphores, add):
    """The product on path `mma`: one block of four warps per piece.  Arguments as TensorOps.product
    """
    *n, M, N = out.shape
    K = a.shape[-2] if a_mn else a.shape[-1]
    tiles = cdiv(M, MMA_TILE) * cdiv(N, MMA_TILE)
    device = cuda.get_current_device()       # its registers allow MMA_BLOCKS
    smem_per_block = MMA_SMEM + RESERVED_SMEM
    per_processor = min(MMA_BLOCKS, device.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR // smem_per_block)
    blocks = device.MULTIPROCESSOR_COUNT * per_processor
    splits = splits_for(tiles, K, semaphores, MMA_TURN_TIME, blocks) if epilogue.adds else 1
    unused = out                             # the kernel needs arrays here, and does not read them
    launch(mma_kernel(a_mn, b_mn, epilogue, bool(n)), out, a, b, unused if x is None else x,
           semaphores if epilogue.adds else unused, M, N, K, splits, add,
           grid=(tiles * splits, *n), block=128, smem=MMA_SMEM)
