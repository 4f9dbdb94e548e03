"""Products of a few rows with matrices: qkv, proj, gate_up, add_product and logits.

A block reads its rows of W once for 1, 2 or 4 groups of GROUP rows of x.  Further groups belong to
other blocks, along y of the grid, which find W in L2.  Blocks of gate_up and logits take half as
many columns as decode/__init__.py says if W's rows are too long for shared memory.  Blocks of
add_product take twice as many for many rows.

Product   A block multiplies x by one to four tiles of 8 rows of W.  K is cut into slices of SLICE
          numbers.  In turn t, warp w of the eight takes slice 8 t + w.  A lane loads 8 neighbours
          (16 bytes) of a row of W, and the same 8 of a row of x.  `mma` multiplies them:  x is
          its A, (16, 16), and W its B, (16, 8).  The k of a product may be in any order, as long
          as it is the same in A and B.
Rounding  x is float32, but mma takes bfloat16, which has 8 bits.  So x is split into two bfloat16
          numbers, which hold 17 of its 24 bits.  hi is the nearest to x, and fills rows 0 to 7
          of A.  mid is the nearest to x - hi, and fills rows 8 to 15.  The multiplied number
          differs from x by at most 2^-17 of x.  Sums are float32.
Copies    On Hopper, the copy engine (TMA) brings a block's rows of W into shared memory.  A kernel
          requests them before it waits for the previous kernel, so they arrive while that one
          computes.  On other GPUs, kernels load W into registers.
Ring      Long rows of W arrive in pieces.  Shared memory has room for a few pieces, and these
          stages are used in turn: when all warps have read a piece, the copy engine overwrites it
          with the next one that has not been requested.  A block of gate_up, add_product or logits
          then goes on with other tiles of W, so that copies never stop.
Splits    Each block of proj merges the splits of `attend` for all rows.  From MERGE_FROM rows, two
          kernels are faster: `merge` merges the splits once, and `add_product` multiplies.

Shared memory of a block.  On Hopper, the first two are dynamic, and the copy engine fills W and
gain.  Elsewhere, only att is dynamic, and W and gain are read from memory:

    W          the stages of the ring: a piece of 8 rows per tile, weight_stride(numbers of a row
               in a piece) bytes apart
    gain       K float32, the gain of the RMSNorm, if x is normed; in proj, att of up to GROUP
               rows lies here instead, ATT_STRIDE floats apart
    partial    (8, groups, tiles, 8, 8): each warp's share of each output; `total` adds them
    squares    (8, rows): each warp's share of the sum of squares of each row, for RMSNorm
    table      a copy of `rows`
    barriers   for each stage, the mbarrier that counts the bytes of its copies
"""
from collections import namedtuple

from numba import cuda, types
from numba.cuda.libdevice import fast_fdividef, fmul_rn, rsqrtf

from nanoeuler_cuda import cdiv, filled, quad_sum, WARP
from nanoeuler_parts.decode.attend import split_merger
from nanoeuler_parts.decode.table import (
    AT_ONCE, COUNTS, FIRST_LINE, N_ROWS, N_WANTED, POSITION, SLOT, table_word, WANTED,
)
from nanoeuler_parts.gpu.launches import cuda_kernel, inlined, made_once
from nanoeuler_parts.gpu.mma import mma
from nanoeuler_parts.gpu.numbers import exp, f32, u32, u64, vector
from nanoeuler_parts.tensor_cores.ptx import (
    after_previous, at_once, bulk_copy, DeviceFunctions, global_address, lane_id, load_four,
    load_four_shared, lower_half, mbarrier_expect, mbarrier_fence, mbarrier_init, mbarrier_wait,
    pack_bf16, quotient, shared_address, thread_id, upper_half, warp_id,
)

GROUP = 8                                    # rows per `mma`
SLICE = 32                                   # numbers of K per warp and turn: 8 per lane of a quad
# Groups of rows per block -> turns whose x is loaded together.  With four groups, the sums need the
# registers: the groups are loaded two at a time, one turn at a time.
TURNS_AT_ONCE = {1: 8, 2: 4, 4: 1}

def weight_stride(K):
    """Returns the bytes from one row of W to the next in shared memory.  The lanes read 64 bytes of
    two rows at a time, which must lie in different banks."""
    return 2 * K + (64 - 2 * K) % 128

# How rows of W arrive: the number of pieces, the turns of K in each piece (the last one may have
# fewer), and the stages of the ring
Ring = namedtuple("Ring", "pieces turns stages")
WHOLE = 56 << 10                             # bytes: a job of at most so many has one piece
PIECE = 36 << 10                             # most bytes of a piece of a larger job
BLOCK_SMEM = (228 << 10) // 2 - 1024         # bytes of shared memory for each of two blocks
MOST_STAGES = 4

def ring_of(K, tiles, groups, normed, hopper, loops):
    """Returns the Ring of a product.
    loops: a block may have several jobs, one after the other
    Several pieces have two stages or more, so that one is copied while another one is read."""
    turns, at_once = cdiv(K, 8 * SLICE), TURNS_AT_ONCE[groups]

    def size(turns):                         # bytes of so many turns of a job's rows
        return 8 * tiles * weight_stride(min(K, 8 * SLICE * turns))
    if not hopper or size(turns) <= WHOLE:
        return Ring(1, turns, 1)
    room = BLOCK_SMEM - static_smem(groups, tiles) - 4 * K * normed
    fits = max((n for n in range(1, turns) if size(n) <= min(PIECE, room // 2)), default=1)
    per_piece = cdiv(turns, cdiv(turns, fits))
    if per_piece > at_once:                  # loads of this many turns are in flight together
        per_piece -= per_piece % at_once
    pieces = cdiv(turns, per_piece)
    most = MOST_STAGES if loops else min(MOST_STAGES, pieces)
    return Ring(pieces, per_piece, max(2, min(most, room // size(per_piece))))

@inlined
def own_row():
    """Returns the row of x, and of each tile of W, that this lane reads.  A quad of lanes shares
    one."""
    return lane_id() >> u32(2)

@inlined
def hi_and_mid(a, j, x, y):
    """Splits two neighbours x, y of a row into pairs of bfloat16: hi to a[j], mid to a[j + 1]."""
    hi = pack_bf16(x, y)
    a[j], a[j + 1] = hi, pack_bf16(x - lower_half(hi), y - upper_half(hi))

def row_product(K, TILES, GROUPS, normed, hopper, loops=False):
    """Makes the device functions of a block that multiplies GROUPS times GROUP rows of x by TILES
    tiles of W (N, K).  One tile: rows of W from `first`.  More: half of the tiles from `first`,
    half from `second`.  In its job j, a block takes the rows that lie j * step further down.
    normed: x is multiplied by `gain`, and its squares are summed
    hopper: the copy engine loads W     loops: a block may have several jobs

    A kernel calls request_weights, waits for the previous kernel, and in each job calls multiply
    and reads the results by total."""
    ring = ring_of(K, TILES, GROUPS, normed, hopper, loops)
    PIECES, TURNS, STAGES = ring         # TURNS: of a piece
    ROW_BYTES, W_ROWS, PIECE_K = 2 * K, 8 * TILES, min(K, 8 * SLICE * TURNS)
    STRIDE, PIECE_BYTES = weight_stride(PIECE_K), 2 * PIECE_K
    STAGE_BYTES, LAST_BYTES = W_ROWS * STRIDE, ROW_BYTES - (PIECES - 1) * PIECE_BYTES
    REFILLS = PIECES > STAGES or loops and STAGES > 1    # does a stage hold more than one piece?
    GAIN_BYTES, GAIN_START = 4 * K if normed else 0, STAGES * STAGE_BYTES // 4 if hopper else 0
    SLICES, TILES_FROM_FIRST = cdiv(K, SLICE), cdiv(TILES, 2)
    TURNS_LOADED = cdiv(TURNS, cdiv(TURNS, TURNS_AT_ONCE[GROUPS]))   # turns in flight
    # no warp has a slice past the end of K
    EXACT = TURNS % TURNS_LOADED == 0 and K == PIECES * 8 * SLICE * TURNS
    GROUPS_LOADED = min(GROUPS, 2)           # groups whose x is in registers at the same time
    X_REGS, B_REGS = 8 * TURNS_LOADED * GROUPS_LOADED, 4 * TILES
    CHAINS = 1 if normed else 2              # sums per tile; 2: one for each half of a slice
    ACC_REGS = 4 * CHAINS * TILES * GROUPS
    load_8, _ = vector(8)
    load_weights = load_four_shared if hopper else load_four

    @inlined
    def row_of(i, w, first, second, below):
        """Returns the index in W of the i-th row of a job, at most that of W's last row.
        below: how much further down than in the block's first job"""
        row = first + i if i < 8 * TILES_FROM_FIRST else second + i - u32(8 * TILES_FROM_FIRST)
        return min(u32(row + below), u32(w.shape[0]) - u32(1))

    @inlined
    def request_piece(i, w, first, second, step, barriers):
        """Requests the i-th piece that the block needs, by warp 0."""
        t, job = thread_id(), u32(i // u32(PIECES))
        piece, stage = i - job * u32(PIECES), u32(i % u32(STAGES))
        size = u32(PIECE_BYTES) if piece + u32(1) < u32(PIECES) else u32(LAST_BYTES)
        barrier, smem = barriers + u32(8) * stage, shared_address(cuda.shared.array(0, u32, 16))
        if t == 0:
            of_gain = u32(GAIN_BYTES) if i == 0 else u32(0)
            mbarrier_expect(barrier, u32(W_ROWS) * size + of_gain)
        cuda.syncwarp()                      # the mbarrier expects the bytes
        if t < W_ROWS:
            row, below = row_of(t, w, first, second, job * step), u64(piece) * u64(PIECE_BYTES)
            bulk_copy(smem + stage * u32(STAGE_BYTES) + u32(t) * u32(STRIDE),
                      global_address(w) + u64(row) * u64(ROW_BYTES) + below, size, barrier)

    @inlined
    def request_weights(w, first, second, step, jobs, gain):
        """Requests the block's first pieces of W from the copy engine, and the gain, which follows
        the ring in shared memory, if x is normed.  Otherwise, gain is None.  Returns the address
        of the ring's mbarriers.  Without a copy engine, requests nothing."""
        barriers, t = shared_address(cuda.shared.array(STAGES, u64)), thread_id()
        if hopper and t < WARP:
            if t == 0:
                for stage in range(STAGES):
                    mbarrier_init(barriers + u32(8 * stage), u32(1))
                mbarrier_fence()
                if normed:
                    smem = shared_address(cuda.shared.array(0, u32, 16))
                    bulk_copy(smem + u32(STAGES * STAGE_BYTES), global_address(gain),
                              u32(GAIN_BYTES), barriers)
            cuda.syncwarp()                  # the mbarriers are initialized
            for i in range(STAGES):
                if u32(i) < jobs * u32(PIECES):
                    request_piece(u32(i), w, first, second, step, barriers)
        return barriers

    @inlined
    def address_in_smem(stage, w, first, second, below, tile):
        """Returns the shared address of the row of W that this lane reads in a tile."""
        smem = shared_address(cuda.shared.array(0, u32, 16))
        return smem + stage * u32(STAGE_BYTES) + (u32(8 * tile) + own_row()) * u32(STRIDE)

    @inlined
    def address_in_memory(stage, w, first, second, below, tile):
        """Returns the global address of this row."""
        row = row_of(u32(8 * tile) + own_row(), w, first, second, below)
        return global_address(w) + u64(row) * u64(ROW_BYTES)
    address_of, Offset = (address_in_smem, u32) if hopper else (address_in_memory, u64)

    @inlined
    def add_slice(acc, ss, xs, x0, gain_of, a, b, group):
        """acc += products of one slice of W and of x, for one group of rows.  If normed, multiplies
        x by the gain, and adds the squares of x to ss[group].
        b: this lane's numbers of W, 8 per tile; xs[x0], .., xs[x0 + 7]: its numbers of x
        gain_of: the gain of these 8; a: registers that take x as the A of mma"""
        if normed:
            for e in range(8):
                ss[group] = cuda.fma(xs[x0 + e], xs[x0 + e], ss[group])
                xs[x0 + e] = fmul_rn(xs[x0 + e], gain_of[e])
        for pair in range(4):
            hi_and_mid(a, 2 * pair, xs[x0 + 2 * pair], xs[x0 + 2 * pair + 1])
        for tile in range(TILES):
            for half in range(2):
                chain = half % CHAINS
                mma(acc, 4 * (CHAINS * (TILES * group + tile) + chain), a, 4 * half, b,
                    4 * tile + 2 * half)

    @inlined
    def multiply(partial, squares, x, starts, gain, w, first, second, step, jobs, job, barriers):
        """Writes each warp's share of the products of a job:
            partial[warp, group, tile, r, n]   of sum_k W[n, k] gain[k] x[r, k]
            squares[warp, GROUP group + r]     of sum_k x[r, k]^2, if normed
        The row of x that this lane reads begins at x[starts[group]].  A lane that reads row r of x
        also reads row n = r of each tile."""
        q, row, warp = thread_id() & u32(3), own_row(), warp_id()
        first_k = u32(SLICE) * warp + u32(8) * q
        acc, ss = filled(ACC_REGS, f32(0)), filled(GROUPS, f32(0))   # 2 of hi, 2 of mid
        xs, a, b = cuda.local.array(X_REGS, f32), filled(8, u32(0)), cuda.local.array(B_REGS, u32)
        gains, gain_of = cuda.shared.array(0, f32, 16) if hopper else gain, filled(8, f32(1))
        for piece in range(PIECES):
            at = job * u32(PIECES) + u32(piece)
            stage, first_turn = u32(at % u32(STAGES)), u32(TURNS) * u32(piece)
            for turn0 in range(0, TURNS, TURNS_LOADED):
                for group0 in range(0, GROUPS, GROUPS_LOADED):
                    for i in range(TURNS_LOADED):            # all loads are in flight together
                        k = (first_turn + u32(turn0 + i)) * u32(8 * SLICE) + first_k
                        for group in range(GROUPS_LOADED):
                            eight = load_8(x, starts[group0 + group] + (
                                k if EXACT else min(u32(k), u32(K - 8))))
                            for e in range(8):
                                x_e = eight[e] if EXACT or k < K else f32(0)
                                xs[8 * (GROUPS_LOADED * i + group) + e] = x_e
                    if hopper and turn0 == 0 and group0 == 0:
                        mbarrier_wait(barriers + u32(8) * stage, u32(at // u32(STAGES)) & u32(1))
                    for i in range(TURNS_LOADED):
                        turn = first_turn + u32(turn0 + i)
                        k = turn * u32(8 * SLICE) + first_k
                        if EXACT or u32(8) * turn + warp < SLICES:     # the same in a warp
                            k = k if EXACT else min(u32(k), u32(K - 8))
                            for tile in range(TILES):
                                address = address_of(stage, w, first, second, job * step, tile)
                                load_weights(b, 4 * tile, address + Offset(2) * Offset(
                                    k - first_turn * u32(8 * SLICE) if hopper else k))
                            if normed:
                                eight = load_8(gains, GAIN_START + k)
                                for e in range(8):
                                    gain_of[e] = eight[e]
                            for group in range(GROUPS_LOADED):
                                add_slice(acc, ss, xs, 8 * (GROUPS_LOADED * i + group), gain_of, a,
                                          b, group0 + group)
            if REFILLS:
                if at + u32(STAGES) < jobs * u32(PIECES):
                    cuda.syncthreads()       # all warps have read this piece
                    if thread_id() < WARP:
                        request_piece(at + u32(STAGES), w, first, second, step, barriers)
        for group in range(GROUPS):
            for tile in range(TILES):
                for e in range(2):
                    i = 4 * CHAINS * (TILES * group + tile) + e
                    hi, mid = acc[i], acc[i + 2]
                    if CHAINS == 2:
                        hi, mid = hi + acc[i + 4], mid + acc[i + 6]
                    partial[warp, group, tile, row, u32(2) * q + u32(e)] = hi + mid
            if normed:
                of_row = quad_sum(ss[group])
                if q == 0:
                    squares[warp, u32(GROUP * group) + row] = of_row
        cuda.syncthreads()                   # all warps have written their shares

    @inlined
    def total(partial, tile, r, n):
        """Returns the sum of the warps' shares, for row r of the block and row n of the tile."""
        group, row = r >> u32(3), r & u32(GROUP - 1)
        s = partial[0, group, tile, row, n]
        for warp in range(1, 8):
            s += partial[warp, group, tile, row, n]
        return s

    return DeviceFunctions(request_weights=request_weights, multiply=multiply, total=total)

def tiles_per_block(tiles, K, groups):
    """Returns the tiles of W (N, K) per block: `tiles`, or twice as many.  Doubling halves how
    often x is read and split.  It needs several tiles or several groups of rows, and enough shared
    memory for more than one block per multiprocessor."""
    room = 2 * tiles * 8 * weight_stride(K) <= 72 << 10
    return 2 * tiles if room and (tiles > 1 or groups > 1) else tiles

def static_smem(groups, tiles):
    """Returns the bytes of a block's static arrays: the warps' shares, the squares, the table and
    the mbarriers."""
    return 8 * groups * (tiles * 8 * 8 + 8) * 4 + 5 * AT_ONCE * 4 + 8 * MOST_STAGES

def product_smem(K, tiles, groups, normed, hopper, loops):
    """Returns the bytes of dynamic shared memory that a product needs per block."""
    if not hopper:
        return 0
    ring = ring_of(K, tiles, groups, normed, hopper, loops)
    stage = 8 * tiles * weight_stride(min(K, 8 * SLICE * ring.turns))
    return ring.stages * stage + 4 * K * normed

def blocks_of(N, K, tiles, groups, normed, hopper, most):
    """Returns the number of blocks of a product of N columns whose blocks may have several jobs:
    one for each job, or at most `most`, if a ring keeps the copies going between jobs."""
    jobs = cdiv(N, 8 * tiles)
    return min(jobs, most) if ring_of(K, tiles, groups, normed, hopper, True).stages > 1 else jobs

@inlined
def copied_entry(table, field, i):
    """Returns the i-th entry of a field, as `table_entry` does, of a copied table."""
    return table[u64(AT_ONCE * field) + u64(i)]

@inlined
def first_and_step(columns):
    """Returns the first column of a block whose jobs have so many columns, and from one job of it
    to the next."""
    return u32(columns) * u32(cuda.blockIdx.x), u32(columns) * u32(cuda.gridDim.x)

@inlined
def jobs_of(N, columns):
    """Returns how many jobs of so many columns this block has, of N columns."""
    first, step = first_and_step(columns)
    return quotient(u32(N) - first + step - u32(1), step)

@inlined
def after_job(job, jobs):
    """Returns the number of the next job, for which the warps' shares may be overwritten."""
    if job + u32(1) < jobs:
        cuda.syncthreads()                   # all threads have read the shares
    return job + u32(1)

def block_rows(GROUPS):
    """Makes the device functions that tell a block of 256 threads its rows, which are GROUPS groups
    of the step's rows: (copied_table, first_row_of_block, starts_of)."""
    X_ROWS, ENTRIES = GROUP * GROUPS, 5 * AT_ONCE
    ENTRIES_PER_THREAD = cdiv(ENTRIES, 256 - WARP)       # of the table, which 7 warps copy

    @inlined
    def copied_table(rows):
        """Copies `rows` to shared memory and returns the copy, which `copied_entry` reads.  Warps 1
        to 7 copy, since warp 0 requests W.

        Kernels may read `rows` before `take_turn`, while the previous kernel computes.  The upload
        of `rows` was complete before `take` started, because `take` is launched without overlap."""
        table = cuda.shared.array(ENTRIES, types.int32)
        for turn in range(ENTRIES_PER_THREAD):
            i = thread_id() + u32((256 - WARP) * turn) - u32(WARP)
            if thread_id() >= WARP and i < ENTRIES:
                table[i] = table_word(rows, i)
        cuda.syncthreads()                   # the table and the mbarrier are ready
        return table

    @inlined
    def first_row_of_block():
        """Returns the index of the block's first row in the step."""
        return u32(X_ROWS) * u32(cuda.blockIdx.y)

    @inlined
    def starts_of(base, count, K):
        """Returns the start in x (rows, K) of the row that this lane reads, for each group.
        count: number of rows of the step; base: first row of the block"""
        starts = cuda.local.array(GROUPS, u32)
        for group in range(GROUPS):
            row = min(u32(base + u32(GROUP * group) + own_row()), u32(count - u32(1)))
            starts[group] = row * u32(K)
        return starts
    return copied_table, first_row_of_block, starts_of

two_blocks_per_sm = cuda_kernel(launch_bounds=(256, 2))      # decorator of the kernels below
ProductKernels = namedtuple("ProductKernels", "qkv proj gate_up logits")

@made_once
def product_kernels(C, HD, D, F, GROUPS, window, hopper, biased, normed):
    """Makes ProductKernels for these sizes.
    window: most keys of a row, or 0     biased: q, k and v have biases     normed: q and k have
    norms, so norm_and_rotate comes after qkv

    Blocks have 256 threads.  Each of the first 64 GROUPS threads writes one output per tile: thread
    t has row t // 8 of the block and column t % 8 of the tile.  Block y of the grid begins at row
    X_ROWS y.  Past the last row, a block recomputes the last row and discards the result."""
    X_TILES, X_ROWS = tiles_per_block(2, C, GROUPS), GROUP * GROUPS
    HALF_X_TILES = X_TILES // 2
    pair_product, x_product = (row_product(C, tiles, GROUPS, True, hopper, loops)
                               for tiles, loops in ((2, False), (X_TILES, True)))
    att_product = row_product(HD, 1, 1, False, hopper)
    copied_table, first_row_of_block, starts_of = block_rows(GROUPS)
    splits_at, merge_splits = split_merger(HD, D, window)
    # shapes of `partial`: warps, groups, tiles, rows, columns
    PROJ_SHARES, QKV_SHARES, X_SHARES = (8, 1, 1, 8, 8), *(
        (8, GROUPS, tiles, 8, 8) for tiles in (2, X_TILES))
    SQUARES, HALF = (8, X_ROWS), D // 2
    # in floats of shared memory: where att begins in proj, and from one row of it to the next
    ATT_START, ATT_STRIDE = product_smem(HD, 1, 1, False, hopper, False) // 4, HD + 4
    _, store_4 = vector(4)
    take_turn = after_previous if hopper else at_once

    @inlined
    def rstd_of(squares, r, eps):
        """Returns 1 / sqrt(mean_k x[r, k]^2 + eps) of row r of the block."""
        ss = squares[0, r]
        for warp in range(1, 8):
            ss += squares[warp, r]
        return rsqrtf(cuda.fma(ss, f32(1 / C), eps))

    @two_blocks_per_sm
    def qkv(q, kc, vc, x, gain, w, bias, cos, sin, rows, eps):
        """q, k, v = RMSNorm(x) W^T + bias, with RoPE for q and k unless `normed`; writes k and v to
        the cache.
        A block has the pairs (i, i + D / 2) of a head, for i = i0 to i0 + 7.
        grid ((H + 2 G) D / 16, rows / X_ROWS)
        q (AT_ONCE, HD), kc, vc (slots, G, T, D) of a layer, x (AT_ONCE, C), w (QKV, C) bf16
        bias (QKV,), or any array if not `biased`"""
        G, H, block = u32(kc.shape[1]), u32(HD // D), u32(cuda.blockIdx.x)
        head = u32(block // u32(HALF // 8))
        i0 = u32(8) * (block - head * u32(HALF // 8))
        first, second = head * u32(D) + i0, head * u32(D) + i0 + u32(HALF)
        partial, squares = cuda.shared.array(QKV_SHARES, f32), cuda.shared.array(SQUARES, f32)
        barriers = pair_product.request_weights(w, first, second, u32(0), u32(1), gain)
        table = copied_table(rows)
        t, count = thread_id(), u32(copied_entry(table, COUNTS, N_ROWS))
        n, i = t >> u32(3), i0 + (t & u32(7))
        r, starts = first_row_of_block() + n, starts_of(first_row_of_block(), count, C)
        mine = n < X_ROWS and r < count
        my_row = r if mine else u32(0)
        slot = u32(copied_entry(table, SLOT, my_row))
        pos = u32(copied_entry(table, POSITION, my_row))
        c, s = cos[pos, i], sin[pos, i]
        take_turn()
        pair_product.multiply(partial, squares, x, starts, gain, w, first, second, u32(0), u32(1),
                              u32(0), barriers)
        if mine:
            rstd = rstd_of(squares, n, eps)
            u = pair_product.total(partial, 0, n, t & u32(7))
            v = pair_product.total(partial, 1, n, t & u32(7))
            if biased:
                u = cuda.fma(u, rstd, bias[first + (t & u32(7))])
                v = cuda.fma(v, rstd, bias[second + (t & u32(7))])
            else:
                u, v = u * rstd, v * rstd
            if not normed and head < H + G:
                u, v = cuda.fma(u, c, -fmul_rn(v, s)), cuda.fma(v, c, fmul_rn(u, s))
            if head < H:
                q[r, first + (t & u32(7))], q[r, second + (t & u32(7))] = u, v
            elif head < H + G:
                kc[slot, head - H, pos, i], kc[slot, head - H, pos, i + u32(HALF)] = u, v
            else:
                kv = head - H - G
                vc[slot, kv, pos, i], vc[slot, kv, pos, i + u32(HALF)] = u, v

    @two_blocks_per_sm
    def proj(x, o, ml, w, rows):
        """x[r, n] += sum_k W[n, k] att[r, k], where each block merges att from its splits.
        For one group of rows.     grid C / 8
        o (AT_ONCE, splits, HD), ml (AT_ONCE, splits, H, 2): see `attend`; w (C, HD) bf16"""
        t, first = thread_id(), u32(8) * u32(cuda.blockIdx.x)
        partial, squares = cuda.shared.array(PROJ_SHARES, f32), cuda.shared.array((1, 1), f32)
        att = cuda.shared.array(0, f32, 16)
        barriers = att_product.request_weights(w, first, first, u32(0), u32(1), None)
        table = copied_table(rows)
        count = u32(copied_entry(table, COUNTS, N_ROWS))
        r, n, old = t >> u32(3), first + (t & u32(7)), f32(0)
        starts = filled(1, u32(ATT_START) + min(own_row(), u32(count - u32(1))) * u32(ATT_STRIDE))
        take_turn()
        if r < count:
            old = x[r, n]
        row = u32(0)
        while row < count:
            splits, k = splits_at(copied_entry(table, POSITION, row)), u32(4) * t
            while k < HD:
                store_4(att, u32(ATT_START) + row * u32(ATT_STRIDE) + k,
                        merge_splits(o, ml, row, splits, k))
                k += u32(4 * 256)
            row += u32(1)
        cuda.syncthreads()                   # att is complete
        att_product.multiply(partial, squares, att, starts, None, w, first, first, u32(0), u32(1),
                             u32(0), barriers)
        if r < count:
            x[r, n] = old + att_product.total(partial, 0, r, t & u32(7))

    @two_blocks_per_sm
    def gate_up(y, x, gain, w, rows, eps):
        """y = silu(gate) * up, where gate and up are the halves of RMSNorm(x) W^T.
        grid (at most ceil(F / (4 X_TILES)), rows / X_ROWS)
        y (AT_ONCE, F), x (AT_ONCE, C), w (2 F, C) bf16"""
        t, first, step = thread_id(), *first_and_step(8 * HALF_X_TILES)
        jobs = jobs_of(F, 8 * HALF_X_TILES)
        partial, squares = cuda.shared.array(X_SHARES, f32), cuda.shared.array(SQUARES, f32)
        barriers = x_product.request_weights(w, first, first + u32(F), step, jobs, gain)
        table = copied_table(rows)
        count = u32(copied_entry(table, COUNTS, N_ROWS))
        r, column = t >> u32(3), t & u32(7)
        starts, job = starts_of(first_row_of_block(), count, C), u32(0)
        take_turn()
        while job < jobs:
            x_product.multiply(partial, squares, x, starts, gain, w, first, first + u32(F), step,
                               jobs, job, barriers)
            if r < X_ROWS and first_row_of_block() + r < count:
                rstd = rstd_of(squares, r, eps)
                for tile in range(HALF_X_TILES):
                    n = first + job * step + u32(8 * tile) + column
                    gate = x_product.total(partial, tile, r, column) * rstd
                    up = x_product.total(partial, HALF_X_TILES + tile, r, column) * rstd
                    if n < F:
                        y[first_row_of_block() + r, n] = fast_fdividef(gate * up,
                                                                       f32(1) + exp(-gate))
            job = after_job(job, jobs)

    @two_blocks_per_sm
    def logits(out, x, gain, w, rows, eps):
        """Writes one line per row whose logits are requested: its logits, followed by its row of x.
        grid (at most ceil(V / (8 X_TILES)), lines / X_ROWS)
        out (lines, V + C): writes from line rows[COUNTS, FIRST_LINE]; w (V, C) bf16"""
        t, first, step = thread_id(), *first_and_step(8 * X_TILES)
        V, jobs = u32(w.shape[0]), jobs_of(w.shape[0], 8 * X_TILES)
        second, job = first + u32(8 * HALF_X_TILES), u32(0)
        partial, squares = cuda.shared.array(X_SHARES, f32), cuda.shared.array(SQUARES, f32)
        barriers = x_product.request_weights(w, first, second, step, jobs, gain)
        table = copied_table(rows)
        count, base = u32(copied_entry(table, COUNTS, N_WANTED)), first_row_of_block()
        starts, r, column = cuda.local.array(GROUPS, u32), t >> u32(3), t & u32(7)
        for group in range(GROUPS):
            wanted = min(u32(base + u32(GROUP * group) + own_row()), u32(count - u32(1)))
            starts[group] = u32(copied_entry(table, WANTED, wanted)) * u32(C)
        take_turn()
        line = u32(copied_entry(table, COUNTS, FIRST_LINE))
        while job < jobs:
            x_product.multiply(partial, squares, x, starts, gain, w, first, second, step, jobs, job,
                               barriers)
            if r < X_ROWS and base + r < count:
                rstd = rstd_of(squares, r, eps)
                for tile in range(X_TILES):
                    n = first + job * step + u32(8 * tile) + column
                    if n < V:
                        out[line + base + r, n] = x_product.total(partial, tile, r, column) * rstd
            job = after_job(job, jobs)
        i = base * u32(C) + u32(256) * u32(cuda.blockIdx.x) + t
        while i < u32(min(count, base + u32(X_ROWS))) * u32(C):
            r = u32(i // u32(C))
            c = i - r * u32(C)
            out[line + r, V + c] = x[u32(copied_entry(table, WANTED, r)), c]
            i += u32(256) * u32(cuda.gridDim.x)

    return ProductKernels(qkv, proj, gate_up, logits)

@made_once
def add_product_kernel(N, K, GROUPS, hopper):
    """Makes `add_product` for W (N, K): the product of att from MERGE_FROM rows, and of SwiGLU.
    Its threads write outputs as the threads of `product_kernels` do."""
    TILES, X_ROWS = tiles_per_block(1, K, GROUPS), GROUP * GROUPS
    product = row_product(K, TILES, GROUPS, False, hopper, True)
    SHARES = (8, GROUPS, TILES, 8, 8)
    copied_table, first_row_of_block, starts_of = block_rows(GROUPS)
    take_turn = after_previous if hopper else at_once

    @two_blocks_per_sm
    def add_product(x, y, w, rows):
        """x[r, n] += sum_k W[n, k] y[r, k]
        grid (at most ceil(N / (8 TILES)), rows / X_ROWS)
        x (AT_ONCE, N), y (AT_ONCE, K), w (N, K) bf16"""
        t, first, step = thread_id(), *first_and_step(8 * TILES)
        jobs, job = jobs_of(N, 8 * TILES), u32(0)
        partial, squares = cuda.shared.array(SHARES, f32), cuda.shared.array((1, 1), f32)
        barriers = product.request_weights(w, first, first + u32(8), step, jobs, None)
        table = copied_table(rows)
        count = u32(copied_entry(table, COUNTS, N_ROWS))
        r, column = t >> u32(3), t & u32(7)
        mine = r < X_ROWS and first_row_of_block() + r < count
        starts, old = starts_of(first_row_of_block(), count, K), filled(TILES, f32(0))
        take_turn()
        while job < jobs:
            for tile in range(TILES):
                n = first + job * step + u32(8 * tile) + column
                if mine and n < N:
                    old[tile] = x[first_row_of_block() + r, n]
            product.multiply(partial, squares, y, starts, None, w, first, first + u32(8), step,
                             jobs, job, barriers)
            for tile in range(TILES):
                n = first + job * step + u32(8 * tile) + column
                if mine and n < N:
                    x[first_row_of_block() + r, n] = (
                        old[tile] + product.total(partial, tile, r, column))
            job = after_job(job, jobs)
    return add_product

# Bytes of dynamic shared memory per block of each kernel.  add_att and add_swiglu: of `add_product`
RowsSmem = namedtuple("RowsSmem", "qkv proj add_att gate_up add_swiglu")

def rows_smem(size, groups, hopper):
    """Returns RowsSmem of the kernels whose blocks take `groups` groups of rows."""
    def of(tiles, K, normed=False, loops=False, groups=groups):
        return product_smem(K, tiles, groups, normed, hopper, loops)
    of_x, of_att, of_swiglu = (tiles_per_block(tiles, K, groups) for tiles, K in (
        (2, size.C), (1, size.HD), (1, size.F)))
    return RowsSmem(of(2, size.C, True), of(1, size.HD, groups=1) + GROUP * 4 * (size.HD + 4),
                    of(of_att, size.HD, loops=True), of(of_x, size.C, True, True),
                    of(of_swiglu, size.F, loops=True))

def whole_smem(size, groups, hopper):
    """Returns the bytes of shared memory that the largest block of any kernel needs, for blocks of
    up to `groups` groups of rows: the dynamic part and the static arrays."""
    smem, others = rows_smem(size, groups, hopper), min(groups, 2)
    return max(smem.qkv + static_smem(groups, 2), smem.proj + static_smem(1, 1),
               smem.gate_up + static_smem(groups, tiles_per_block(2, size.C, groups)),
               smem.add_att + static_smem(others, tiles_per_block(1, size.HD, others)),
               smem.add_swiglu + static_smem(others, tiles_per_block(1, size.F, others)))
