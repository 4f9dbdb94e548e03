"""Matrix products on path wgmma: compute capability 9.0.

Contents
    what a block is
    the loads of a slice
    the writer
    the kernel: the producer, and the consumers with the main loop
    the function that launches it
"""
import functools

import numpy as np
from numba import cuda

from nanoeuler_parts.gpu.launches import cuda_kernel, inlined, launch, made_once
from nanoeuler_parts.gpu.numbers import f32, u32
from nanoeuler_parts.tensor_cores.pipeline import pipeline_of
from nanoeuler_parts.tensor_cores.ptx import (
    after_previous, ALIGNMENT, bit, DeviceFunctions, dynamic_smem, fence_async, fence_async_global,
    give_registers, global_address, lane_id, leads_block, leads_warp, leads_warpgroup, map_fence,
    mbarrier_arrive, MBARRIER_BYTES, mbarrier_expect, mbarrier_fence, mbarrier_init, mbarrier_wait,
    next_turn, pack_bf16, semaphore_acquire, semaphore_at, semaphore_release, store_two,
    take_registers, tma_add, tma_commit, tma_load, tma_load_3d, tma_store, tma_store_3d,
    tma_wait_read, tma_wait_written, warp_id, warpgroup_barrier, warpgroup_id,
)
from nanoeuler_parts.tensor_cores.scheduler import (
    BK, BM, BN, scheduler_of, splits_for, tile_columns, tiles_of, WGMMA_TURN_TIME,
)
from nanoeuler_parts.tensor_cores.tiles import (
    descriptor, PANEL_BYTES, ROW_BYTES, stmatrix_columns, stmatrix_rows, swizzled, wgmma,
)

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
# A product with few tiles has narrower tiles (`tile_columns`), so that more multiprocessors take
# part.  Their slices of B are smaller, which leaves room for more stages.  If the rows of A and B
# run along K, a slice of a narrow tile has twice as many values of k: it consists of two panels,
# each of which is a slice as above.  The consumers then wait half as often.
#
# Slices of A and B flow through the ring.  Phases of full[stage] end when the producer has arrived
# and the bytes of both slices have landed, phases of empty[stage] when the eight warps of the
# consumers have arrived: see pipeline.py.
A_BYTES = np.uint32(2 * BM * BK)             # a panel of a slice of A
# (columns of a tile, panels of a slice): stages of the ring
STAGES = {(256, 1): 3, (128, 1): 5, (64, 1): 7, (128, 2): 3, (64, 2): 4}

def stage_bytes(columns, panels):
    """The bytes of a stage: slices of A and B"""
    return np.uint32(2 * (BM + columns) * BK * panels)

def staging_bytes(columns):
    """The bytes of the results that one warpgroup stores at once"""
    return np.uint32(2 * 64 * columns)

def wgmma_smem(columns, panels):
    """The bytes of shared memory of a block, for tiles and slices of these sizes"""
    stage = stage_bytes(columns, panels) + np.uint32(2 * MBARRIER_BYTES)
    return int(STAGES[columns, panels] * stage + 2 * staging_bytes(columns)) + ALIGNMENT

EIGHT_ROWS = ROW_BYTES * np.uint32(8)
FULL_ARRIVALS = np.uint32(1)                 # the producer's thread, with the bytes it announces
EMPTY_ARRIVALS = np.uint32(8)                # one lane of each warp of the two consumers

# ---- The loads of a slice
@functools.cache
def slice_loader(a_mn, b_mn, batched, columns, panels):
    """Makes the device function load_slice for two layouts of A and B.
    columns: those of a tile     panels: those of a slice"""
    STAGE_BYTES, B_START = stage_bytes(columns, panels), A_BYTES * np.uint32(panels)
    # One TMA load for each panel: 64 values of k, if the rows run along K, else 64 of m or n
    a_loads, b_loads = (BM // 64 if a_mn else panels), (columns // 64 if b_mn else panels)
    A_PANEL, B_PANEL = (PANEL_BYTES if a_mn else A_BYTES), (
        PANEL_BYTES if b_mn else np.uint32(2 * columns * BK))

    @inlined
    def load_box(to, map, column, row, z, barrier):
        """Loads a box of the matrix z of a batch."""
        if batched:
            tma_load_3d(to, map, column, row, z, barrier)
        else:
            tma_load(to, map, column, row, barrier)

    @inlined
    def load_slice(buffer, map_a, map_b, z, m, n, k, ready):
        """Requests the slices of A and B from k on for the tile at out[m, n] of matrix z.
        buffer: address of the stage     ready: its mbarrier `full`"""
        mbarrier_expect(ready, STAGE_BYTES)
        for j in range(a_loads):
            column, row = (m + u32(64 * j), k) if a_mn else (k + u32(64 * j), m)
            load_box(buffer + A_PANEL * u32(j), global_address(map_a), column, row, z, ready)
        for j in range(b_loads):
            column, row = (n + u32(64 * j), k) if b_mn else (k + u32(64 * j), n)
            load_box(buffer + B_START + B_PANEL * u32(j), global_address(map_b), column, row, z,
                     ready)
    return load_slice

# ---- The writer
class Writer(DeviceFunctions):
    """How a consumer's 64 x COLUMNS sums leave its registers, by way of shared memory, `staging`

    write_tile(map_out, z, m, n, acc, staging, warpgroup, semaphore, split, splits, add)
        stores them to out[m:m + 64, n:n + COLUMNS] of matrix z, or adds them there
    write_mirrored(map_out, z, m, n, acc, staging, warpgroup)
        stores their transpose to out[n:n + 256, m:m + 64], if COLUMNS is 256"""

@functools.cache
def wgmma_writer(adds, batched, COLUMNS):
    """Returns the Writer.     adds: out += the sums in float32, else out = the sums in bfloat16"""
    # A consumer's sums go out in passes of boxes, 64 rows of 128 bytes each: in one pass of
    # bfloat16, or in two of float32.  A pass of 64 x 256 sums has four boxes.
    passes, box_columns = (2, 32) if adds else (1, 64)
    BOXES = COLUMNS // 64

    @inlined
    def send_box(map, column, row, z, staging, add):
        if batched:
            tma_store_3d(map, column, row, z, staging)
        elif adds and add:
            tma_add(map, column, row, staging)
        else:
            tma_store(map, column, row, staging)

    @inlined
    def stage_f32(staging, acc, warp_row, half):
        """Writes sums to staging in float32: 64 rows, and the first or second half of the columns.
        A chunk has four numbers: lanes 0 and 1 of a quad write one, lanes 2 and 3 the next.

        warp_row: the first of the warp's 16 rows"""
        lane = lane_id()
        for j in range(COLUMNS // 16):
            at = staging + swizzled(warp_row + lane // u32(4), u32(2 * j) + bit(lane, 1)) + (
                bit(lane, 0) * u32(8))
            i = COLUMNS // 4 * half + 4 * j
            store_two(at, acc[i], acc[i + 1])
            store_two(at + EIGHT_ROWS, acc[i + 2], acc[i + 3])

    @inlined
    def stage_bf16(staging, acc, warp_row, half):
        """Writes sums to staging in bfloat16, 64 x COLUMNS.  stmatrix stores 16 rows of two chunks
        from the fragments of a warp."""
        lane = lane_id()
        for j in range(COLUMNS // 16):
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

    stage_sums = stage_f32 if adds else stage_bf16

    @inlined
    def write_tile(map_out, z, m, n, acc, staging, warpgroup, semaphore, split, splits, add):
        """Stores a consumer's sums to out[m:m + 64, n:n + COLUMNS].  One thread of the warpgroup
        commands the copy engine.

        adds: out += the sums in float32, in two passes, when it is this split's turn, but the first
        split sets out unless `add`; otherwise out = the sums in bfloat16, in one pass"""
        warp_row, leads = warp_id() % u32(4) * u32(16), leads_warpgroup()
        for half in range(passes):
            if leads:
                tma_wait_read()              # the copy engine has read the pass before
            warpgroup_barrier(warpgroup)
            stage_sums(staging, acc, warp_row, half)
            fence_async()
            warpgroup_barrier(warpgroup)     # all 64 rows are in staging
            if leads:
                if adds and splits > 1 and half == 0:
                    semaphore_acquire(semaphore, split)
                    fence_async_global()
                for j in range(BOXES):
                    send_box(global_address(map_out),
                             n + u32(COLUMNS // 2 * half + box_columns * j), m, z,
                             staging + PANEL_BYTES * u32(j), add or split > 0)
                tma_commit()
        if adds and splits > 1 and leads:
            tma_wait_written()
            semaphore_release(semaphore, next_turn(split, splits))

    @inlined
    def write_mirrored(map_out, z, m, n, acc, staging, warpgroup):
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
                         staging + PANEL_BYTES * u32(j), False)
            tma_commit()
    return Writer(write_tile=write_tile, write_mirrored=write_mirrored)

# ---- The kernel
@made_once
def wgmma_kernel(a_mn, b_mn, epilogue, batched, symmetric, COLUMNS, PANELS):
    """Makes the kernel of path `wgmma` for two layouts of A and B, and an Epilogue.
    batched: the tensor maps are those of arrays of matrices, (n, ..)
    symmetric: all outputs are symmetric; COLUMNS must be 256 then
    COLUMNS: those of a tile, 256, 128 or 64     PANELS: those of a slice, 1 or 2"""
    SLICE_K = BK * PANELS
    scheduler = scheduler_of(batched, symmetric, COLUMNS, SLICE_K)
    load_slice = slice_loader(a_mn, b_mn, batched, COLUMNS, PANELS)
    writer = wgmma_writer(epilogue.adds, batched, COLUMNS)
    changes, change = epilogue.changes, epilogue.make_change()
    multiply = wgmma(COLUMNS, "columns" if a_mn else "rows", b_mn, adds="asked", K=SLICE_K,
                     panels=(A_BYTES, 2 * COLUMNS * BK))
    SUMS, BARRIERS, B_START = COLUMNS // 2, STAGES[COLUMNS, PANELS], A_BYTES * np.uint32(PANELS)
    STAGE_BYTES, STAGING_BYTES = stage_bytes(COLUMNS, PANELS), staging_bytes(COLUMNS)
    pipeline = pipeline_of(BARRIERS)

    @inlined
    def matrix_of(x, z):
        return x[z] if batched else x

    @cuda_kernel(launch_bounds=(384, 1))
    def kernel(map_a, map_b, map_out, semaphores, x, M, N, K, count, splits, add):
        """out (M, N) = A B, or what the epilogue says.  A block of 384 threads takes one piece
        after another.
        map_a, map_b, map_out: tensor maps of the matrices
        x: what the epilogue reads, if it changes the sums
        count: number of matrices in the batch     splits: of K; 1 for a batch
        add: as for TensorOps.product"""
        start = dynamic_smem()
        staging = start + u32(BARRIERS * STAGE_BYTES)
        full = staging + u32(2 * STAGING_BYTES)
        empty = full + u32(MBARRIER_BYTES * BARRIERS)
        warpgroup, stage, parity = warpgroup_id(), u32(0), u32(0)
        if leads_block():
            for i in range(BARRIERS):
                mbarrier_init(pipeline.barrier(full, i), FULL_ARRIVALS)
                mbarrier_init(pipeline.barrier(empty, i), EMPTY_ARRIVALS)
            mbarrier_fence()
        if leads_warpgroup():
            map_fence(global_address(map_a))
            map_fence(global_address(map_b))
            map_fence(global_address(map_out))
        cuda.syncthreads()                   # the barriers are initialized
        after_previous()
        tiles = scheduler.tiles_in(M, N)
        pieces = tiles * u32(count) * u32(splits)
        piece = u32(cuda.blockIdx.x)
        if warpgroup == 0:                   # the producer: only its leader requests copies
            give_registers()
            while piece < pieces and leads_block():
                z, m, n, first, end = scheduler.locate(piece, tiles, M, N, K, splits)
                for s in range(first, end):
                    buffer, k = start + stage * STAGE_BYTES, u32(s) * u32(SLICE_K)
                    ready = pipeline.barrier(full, stage)
                    mbarrier_wait(pipeline.barrier(empty, stage), parity ^ u32(1))
                    load_slice(buffer, map_a, map_b, z, m, n, k, ready)
                    stage, parity = pipeline.advance(stage, parity)
                piece += u32(cuda.gridDim.x)
        else:                                # a consumer: 64 rows of each tile
            take_registers()
            acc = cuda.local.array(SUMS, f32)
            half_of_tile = warpgroup - u32(1)
            row0_of_half, own_staging = (
                u32(64) * half_of_tile, staging + half_of_tile * STAGING_BYTES)
            z, m, n, first, end = scheduler.locate(piece, tiles, M, N, K, splits)
            while piece < pieces:
                m += row0_of_half
                next_tile = z, m, n, first, end  # only for Numba, which needs its type here: the
                                                 # first round of the loop sets it
                for s in range(first, end):  # the main loop
                    buffer = start + stage * STAGE_BYTES
                    mbarrier_wait(pipeline.barrier(full, stage), parity)
                    multiply(acc, descriptor(buffer + row0_of_half * ROW_BYTES),
                             descriptor(buffer + B_START), u32(s) - u32(first))
                    if leads_warp():
                        mbarrier_arrive(pipeline.barrier(empty, stage))
                    stage, parity = pipeline.advance(stage, parity)
                    if u32(s) == first:      # meanwhile, the other consumer multiplies
                        next_tile = scheduler.locate(piece + u32(cuda.gridDim.x), tiles, M, N, K,
                                                     splits)
                semaphore = semaphore_at(semaphores, u32(2) * (piece % tiles) + half_of_tile)
                if changes:                  # a call per 64 columns: its loops are unrolled
                    row = m + warp_id() % u32(4) * u32(16) + lane_id() // u32(4)
                    column = n + lane_id() % u32(4) * u32(2)
                    matrix = matrix_of(x, z)
                    change(acc, 0, matrix, row, column)
                    if COLUMNS > 64:
                        change(acc, 32, matrix, row, column + u32(64))
                    if COLUMNS > 128:
                        change(acc, 64, matrix, row, column + u32(128))
                        change(acc, 96, matrix, row, column + u32(192))
                writer.write_tile(map_out, z, m, n, acc, own_staging, warpgroup, semaphore,
                                  piece // tiles, splits, add)
                if symmetric and m >= n + u32(BN):       # the tile is wholly below the diagonal
                    writer.write_mirrored(map_out, z, m, n, acc, own_staging, warpgroup)
                z, m, n, first, end = next_tile
                piece += u32(cuda.gridDim.x)
            if leads_warpgroup():
                tma_wait_read()              # shared memory must live until the engine has read it
    return kernel

def wgmma_product(map_of, out, a, b, a_mn, b_mn, epilogue, x, semaphores, symmetric,
                  add):
    """The product on path `wgmma`: one block of three warpgroups per multiprocessor.  Arguments as
    TensorOps.product     map_of: function that returns tensor maps, as TensorOps.map_of"""
    *n, M, N = out.shape
    K = a.shape[-2] if a_mn else a.shape[-1]
    blocks, [count] = cuda.get_current_device().MULTIPROCESSOR_COUNT, n or [1]
    columns = BN if symmetric or epilogue.adds else tile_columns(M, N, K, count, blocks)
    panels = 2 if columns < BN and not a_mn and not b_mn else 1
    tiles = tiles_of(M, N, symmetric, columns)
    splits = splits_for(tiles, K, semaphores, WGMMA_TURN_TIME, blocks) if epilogue.adds else 1
    map_a, map_b = map_of(a, BK if a_mn else BM), map_of(b, BK if b_mn else columns)
    unused = map_a
    launch(wgmma_kernel(a_mn, b_mn, epilogue, bool(n), symmetric, columns, panels), map_a, map_b,
           map_of(out, 64), semaphores if epilogue.adds else unused, unused if x is None else x,
           M, N, K, count, splits, add, grid=min(tiles * count * splits, blocks), block=384,
           smem=wgmma_smem(columns, panels), resident=splits > 1)
