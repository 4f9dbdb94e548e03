"""The kernels of a decoder's step: some rows through all layers, with matrices in bfloat16.

steps.py launches them.
"""
import math
import operator
from collections import namedtuple

from numba import cuda, types
from numba.cuda.libdevice import fast_fdividef, float_as_int, fmul_rn, rsqrtf

import nanoeuler as ne
from nanoeuler_cuda import ALL, block_max, block_sum, cdiv, filled, quad_sum, WARP
from nanoeuler_parts.gpu.launches import cuda_kernel, inlined, made_once
from nanoeuler_parts.gpu.numbers import exp, exp2, f32, f64, i32, i64, u32, u64, value, vector
from nanoeuler_parts.tensor_cores.ptx import (
    after_previous, at_once, bulk_copy, bulk_prefetch, DeviceFunctions, global_address, lane_id,
    let_next_start, load_four, load_four_shared, load_relaxed, load_relaxed_f64, lower_half,
    mbarrier_expect, mbarrier_fence, mbarrier_init, mbarrier_wait, pack_bf16, shared_address,
    thread_id, upper_half, warp_id,
)
from nanoeuler_parts.tensor_cores.tiles import mma

# A step of up to AT_ONCE rows (token, slot, position) with matrices in bfloat16, in five kernels a
# layer, recorded as a graph.  All numbers but the weights are float32.  A few rows cost what it
# takes to bring the weights from memory; a block reads them once for GROUP rows, or for two or four
# groups where there are more than one, and others, along y, for the next ones, from L2:
#
#     take       x = wte[token]                                     a block a row
#     qkv        RMSNorm, q, k, v, biases, RoPE, k, v to the cache  a block 8 pairs (i, i + D / 2)
#     attend     a part of the context, KEYS keys of a head         a block a part of a row
#     proj       the parts become one, x += W att                   a block 8 columns of x
#     gate_up    RMSNorm, gate and up, SwiGLU                       a block 16 columns
#     down       x += W swiglu                                      a block 8 columns of x
#     logits     of the rows that are wanted: RMSNorm, head         a block 32 tokens
#     choose     the token of a line of logits, if one is drawn     a block a line
#
# Blocks of gate_up and logits have half as much where W's rows are so long that there is no room;
# those of down twice as much for many rows.
#
# Each block of proj merges the parts of all rows.  From MERGED rows on that takes longer than one
# more kernel, merge; the rest of proj is then `down`, of other sizes.
#
# A product is W x, W in tiles of 8 rows, of which a block has one to four; its eight warps take
# slices of 32 of K in turn.  A lane loads 8 neighbours of a row of W, which are 16 bytes, and the
# same 8 of a row of x, and `mma` multiplies them:  x is its A, (16, 16), W its B, (16, 8).  Which
# of a lane's numbers is which k does not matter as long as it is the same in A and B.
#
# x is float32, mma takes bfloat16, of 8 bits.  Two of them hold 17 of the 24 bits of x, rounded:
# hi, the nearest to x, is A's rows 0 to 7, mid, the nearest to x - hi, its rows 8 to 15.  So what
# is multiplied differs from x by at most 2^-18 of it, and sums are those of float32.
#
# Order   A row's sums hang on its position alone: not on the other rows, nor on its place among
#         them.  A text has the same bits alone, in a batch and with drafts.  Where the compiler
#         could round a product and a sum once or twice, fma and fmul_rn say which, since the
#         kernels for a few rows and for many are compiled one by one.
# Places  A kernel takes a few microseconds, in which a warp has time for some hundred instructions.
#         Numba counts places in 64 bits, looks whether they are negative and rounds quotients down;
#         so all are u32 here, which is half of the instructions that there would be.
# Copies  Hopper's copy engine brings a block's rows of W into shared memory, and a kernel asks for
#         them before it waits for the kernel in front of it: they arrive while that one computes.
#         Others load them into registers.
# Ahead   Where tokens are drawn here and texts just go on, the next step is queued before the host
#         has looked at the tokens of this one: `advance` makes its table, and no time is lost.
# Prompts What begins a slot and is longer than a step, mostly a prompt, or the half that a full
#         slot keeps, is read at once, as a sequence is in training: activations between the
#         kernels are bfloat16, as PyTorch has them, keys and values are rounded to it, and the
#         bits hang on the tokens up to a position, not on the length.  So a text has other bits as
#         a prompt than token by token, as far as bfloat16 rounds, but the same ones alone, in a
#         batch, with drafts, and if its prompt comes in pieces (Decoder.read_pieces).
GROUP, AT_ONCE = 8, 64                       # rows of x that `mma` takes; those of a step
BY_ROWS = AT_ONCE                            # longest beginning of a slot that is read by rows
TOKEN, SLOT, POSITION, WANTED, COUNTS = range(5)         # lines of `rows` (5, AT_ONCE), int32
# Places in COUNTS: FIRST_LINE is of `out`; RING, 0 or 1: which half of `draws` and `ids` is its
N_ROWS, N_WANTED, FIRST_LINE, RING = range(4)
SLICE = 32                                   # of K, a warp's in one turn: 8 for each of a quad
MERGED = 4                                   # rows from which on `merge` pays
# Groups of rows that a block may have, and turns whose x is loaded together, of at most two groups
# at a time: of four the sums take the registers
TURNS_AT_ONCE = {1: 8, 2: 4, 4: 1}

def weight_stride(K):
    """Bytes between rows of W in shared memory: the two rows that lanes read at once, 64 bytes of
    each, must lie in different banks."""
    return 2 * K + (64 - 2 * K) % 128

def keys_a_part(D):
    """Keys that a block of `attend` has: eight warps, four for each group of lanes."""
    return 8 * 4 * (32 // lanes_a_key(D))

def lanes_a_key(D):
    """A lane has four numbers of a key."""
    lanes = 1
    while 4 * lanes < D:
        lanes *= 2
    return lanes

@inlined
def own_row():
    """Which row of x, and of each tile of W, a lane reads: a quad of lanes has one."""
    return lane_id() >> u32(2)

@inlined
def entry(rows, line, i):
    """rows[line, i] as it is in L2: what an SM still had of an older table is passed by"""
    at = u32(line * AT_ONCE) + u32(i)
    return types.int32(load_relaxed(global_address(rows) + u64(4) * u64(at)))

@inlined
def told(draws, i):
    """The i-th number of draws as it is in the host's memory"""
    return load_relaxed_f64(global_address(draws) + u64(8) * u64(i))

@inlined
def two_parts(a, j, x, y):
    """Two neighbours of a row of x, as pairs of bfloat16: hi to a[j], mid to a[j + 1]"""
    hi = pack_bf16(x, y)
    a[j], a[j + 1] = hi, pack_bf16(x - lower_half(hi), y - upper_half(hi))

def row_product(K, TILES, GROUPS, normed, hopper):
    """Device functions of a block that multiplies TILES tiles of W (N, K) by GROUPS times GROUP
    rows of x.  Of one tile, it is W's rows from `first` on; of more, one half of them is, the other
    begins at `second`."""
    ROW, STRIDE, COUNT = 2 * K, weight_stride(K), 8 * TILES
    GAIN, FIRST_GAIN = 4 * K if normed else 0, COUNT * STRIDE // 4 if hopper else 0
    SLICES, FIRST_TILES = cdiv(K, SLICE), cdiv(TILES, 2)
    TURNS = cdiv(SLICES, 8)
    BATCH = cdiv(TURNS, cdiv(TURNS, TURNS_AT_ONCE[GROUPS]))       # turns whose loads are under way
    WHOLE = K % (8 * SLICE * BATCH) == 0                 # no warp has a slice behind the last one
    LOADED = min(GROUPS, 2)                              # groups whose x is in registers at once
    XS, B = 8 * BATCH * LOADED, 4 * TILES
    CHAINS = 1 if normed else 2              # sums that a tile has: one for each half of a slice
    SUMS = 4 * CHAINS * TILES * GROUPS
    load_8, _ = vector(8)
    load_weights = load_four_shared if hopper else load_four

    @inlined
    def row_of(i, w, first, second):
        """The row of W that is the block's i-th, or the last one if W has no more"""
        row = first + i if i < 8 * FIRST_TILES else second + i - u32(8 * FIRST_TILES)
        return min(u32(row), u32(w.shape[0]) - u32(1))

    @inlined
    def ask_for(w, first, second, gain):
        """Asks the copy engine for the block's rows, and behind them for the gain, if x is normed.
        Returns the mbarrier to wait for."""
        barrier, t = shared_address(cuda.shared.array(1, u64)), thread_id()
        if hopper and t < WARP:
            smem = shared_address(cuda.shared.array(0, u32, 16))
            if t == 0:
                mbarrier_init(barrier, u32(1))
                mbarrier_fence()
                mbarrier_expect(barrier, u32(COUNT * ROW + GAIN))
                if normed:
                    bulk_copy(smem + u32(COUNT * STRIDE), global_address(gain), u32(GAIN), barrier)
            cuda.syncwarp()                  # it is counting
            if t < COUNT:
                row = row_of(t, w, first, second)
                bulk_copy(smem + u32(t) * u32(STRIDE), global_address(w) + u64(row) * u64(ROW),
                          u32(ROW), barrier)
        return barrier

    @inlined
    def place_in_smem(w, first, second, tile):
        """Where the row of W lies that this lane reads of a tile"""
        smem = shared_address(cuda.shared.array(0, u32, 16))
        return smem + (u32(8 * tile) + own_row()) * u32(STRIDE)

    @inlined
    def place_in_memory(w, first, second, tile):
        row = row_of(u32(8 * tile) + own_row(), w, first, second)
        return global_address(w) + u64(row) * u64(ROW)
    place_of, Offset = (place_in_smem, u32) if hopper else (place_in_memory, u64)

    @inlined
    def add_product(acc, ss, xs, x0, gain_of, a, b, group):
        """acc += a slice's product of W, which is b, and eight numbers of x, of a row of a group"""
        if normed:
            for e in range(8):
                ss[group] = cuda.fma(xs[x0 + e], xs[x0 + e], ss[group])
                xs[x0 + e] = fmul_rn(xs[x0 + e], gain_of[e])
        for pair in range(4):
            two_parts(a, 2 * pair, xs[x0 + 2 * pair], xs[x0 + 2 * pair + 1])
        for tile in range(TILES):
            for half in range(2):
                chain = half % CHAINS
                mma(acc, 4 * (CHAINS * (TILES * group + tile) + chain), a, 4 * half, b,
                    4 * tile + 2 * half)

    @inlined
    def multiply(partial, squares, x, starts, gain, w, first, second, barrier):
        """partial[warp, group, tile, r, n] = this warp's share of sum_k W[n, k] gain[k] x[r, k],
        and squares[warp, GROUP group + r] of sum_k x[r, k]^2, for the rows of x that begin at
        x[starts[group]].  The lane that reads row r of x reads row n = r of each tile, too."""
        q, row, warp = thread_id() & u32(3), own_row(), warp_id()
        first_k = u32(SLICE) * warp + u32(8) * q
        acc, ss = filled(SUMS, f32(0)), filled(GROUPS, f32(0))           # hi's two, mid's two
        xs, a, b = cuda.local.array(XS, f32), filled(8, u32(0)), cuda.local.array(B, u32)
        gains, gain_of = cuda.shared.array(0, f32, 16) if hopper else gain, filled(8, f32(1))
        for turn0 in range(0, TURNS, BATCH):
            for group0 in range(0, GROUPS, LOADED):
                for i in range(BATCH):       # all loads are under way at once
                    k = u32((turn0 + i) * 8 * SLICE) + first_k
                    for group in range(LOADED):
                        eight = load_8(x, starts[group0 + group] + (
                            k if WHOLE else min(u32(k), u32(K - 8))))
                        for e in range(8):
                            x_e = eight[e] if WHOLE or k < K else f32(0)
                            xs[8 * (LOADED * i + group) + e] = x_e
                if hopper and turn0 == 0 and group0 == 0:
                    mbarrier_wait(barrier, u32(0))
                for i in range(BATCH):
                    k = u32((turn0 + i) * 8 * SLICE) + first_k
                    if WHOLE or u32((turn0 + i) * 8) + warp < SLICES:    # true for a whole warp
                        k = k if WHOLE else min(u32(k), u32(K - 8))
                        for tile in range(TILES):
                            place = place_of(w, first, second, tile)
                            load_weights(b, 4 * tile, place + Offset(2 * k))
                        if normed:
                            eight = load_8(gains, FIRST_GAIN + k)
                            for e in range(8):
                                gain_of[e] = eight[e]
                        for group in range(LOADED):
                            add_product(acc, ss, xs, 8 * (LOADED * i + group), gain_of, a, b,
                                        group0 + group)
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
        cuda.syncthreads()                   # all shares are there

    @inlined
    def total(partial, tile, r, n):
        group, row = r >> u32(3), r & u32(GROUP - 1)
        s = partial[0, group, tile, row, n]
        for warp in range(1, 8):
            s += partial[warp, group, tile, row, n]
        return s

    return DeviceFunctions(ask_for=ask_for, multiply=multiply, total=total)

def tiles_a_block(tiles, K, groups):
    """Of W (N, K): twice as many if they are some, or the rows many, so that x is read and split
    half as often, unless there is no room for several blocks on a multiprocessor."""
    room = 2 * tiles * 8 * weight_stride(K) <= 72 << 10
    return 2 * tiles if room and (tiles > 1 or groups > 1) else tiles

def product_smem(K, tiles, normed, hopper):
    """Bytes of dynamic shared memory of a block of a product"""
    return tiles * 8 * weight_stride(K) + 4 * K * normed if hopper else 0

ProductKernels = namedtuple("ProductKernels", "qkv merge proj gate_up down logits")

@made_once
def product_kernels(C, HD, D, F, GROUPS, hopper, biased):
    """ProductKernels for these sizes; biased: q, k and v have biases.  Blocks of 256 threads; the
    first 64 GROUPS have an output of each tile, of row r and the tile's column t % 8.  Along y they
    have the next rows.  Where there are no more of them, the last one is multiplied again, and its
    products left."""
    OF_X, OF_SWIGLU = tiles_a_block(2, C, GROUPS), tiles_a_block(1, F, GROUPS)
    HALF_OF_X, ROWS = OF_X // 2, GROUP * GROUPS
    two_of_x, of_x = (row_product(C, tiles, GROUPS, True, hopper) for tiles in (2, OF_X))
    of_att = row_product(HD, 1, 1, False, hopper)
    of_swiglu = row_product(F, OF_SWIGLU, GROUPS, False, hopper)
    # their shares: warps, groups, tiles, rows and columns
    ALONE, TWO, SHARES, SHARES_OF_SWIGLU = (8, 1, 1, 8, 8), *(
        (8, GROUPS, tiles, 8, 8) for tiles in (2, OF_X, OF_SWIGLU))
    SQUARES, TABLE, HALF, KEYS = (8, ROWS), (5, AT_ONCE), D // 2, keys_a_part(D)
    OF_TABLE = cdiv(5 * AT_ONCE, 256 - WARP)             # numbers that a thread copies
    ATT, ATT_LINE = 8 * weight_stride(HD) // 4 if hopper else 0, HD + 4      # floats of smem
    (load_2, _), (load_4, store_4) = vector(2), vector(4)
    take_turn = after_previous if hopper else at_once
    two_at_once = cuda_kernel(launch_bounds=(256, 2))

    @inlined
    def own_table(rows):
        """`rows` in shared memory.  Its copy to the device had ended before `take` began, which is
        launched without overlap: all that follows may read it before `take_turn`, while the kernel
        in front computes.  Warps 1 and on do, for warp 0 asks for W."""
        table = cuda.shared.array(TABLE, types.int32)
        for turn in range(OF_TABLE):
            i = thread_id() + u32((256 - WARP) * turn) - u32(WARP)
            if thread_id() >= WARP and i < 5 * AT_ONCE:
                table[0, i] = entry(rows, 0, i)          # its lines follow each other
        cuda.syncthreads()                   # it is there, as is the mbarrier
        return table

    @inlined
    def begin():
        """The first row of the block"""
        return u32(ROWS) * u32(cuda.blockIdx.y)

    @inlined
    def starts_of(base, count, K):
        """Where the rows of x (rows, K) begin that this lane reads, one of each group"""
        starts = cuda.local.array(GROUPS, u32)
        for group in range(GROUPS):
            row = min(u32(base + u32(GROUP * group) + own_row()), u32(count - u32(1)))
            starts[group] = row * u32(K)
        return starts

    @inlined
    def rstd_of(squares, r, eps):
        ss = squares[0, r]
        for warp in range(1, 8):
            ss += squares[warp, r]
        return rsqrtf(cuda.fma(ss, f32(1 / C), eps))

    @two_at_once
    def qkv(q, kc, vc, x, gain, w, bias, cos, sin, rows, eps):
        """A block: pairs i0 to i0 + 7 of a head.     grid ((H + 2 G) D / 16, rows / ROWS)
        q (AT_ONCE, HD), kc, vc (slots, G, T, D) of a layer, x (AT_ONCE, C), w (QKV, C) bf16
        bias (QKV,); any array if not `biased`"""
        G, H, block = u32(kc.shape[1]), u32(HD // D), u32(cuda.blockIdx.x)
        head = u32(block // u32(HALF // 8))
        i0 = u32(8) * (block - head * u32(HALF // 8))
        first, second = head * u32(D) + i0, head * u32(D) + i0 + u32(HALF)
        partial, squares = cuda.shared.array(TWO, f32), cuda.shared.array(SQUARES, f32)
        barrier = two_of_x.ask_for(w, first, second, gain)
        table = own_table(rows)
        t, count = thread_id(), u32(table[COUNTS, N_ROWS])
        n, i = t >> u32(3), i0 + (t & u32(7))
        r, starts = begin() + n, starts_of(begin(), count, C)
        mine = n < ROWS and r < count
        of_mine = r if mine else u32(0)
        slot, pos = u32(table[SLOT, of_mine]), u32(table[POSITION, of_mine])
        c, s = cos[pos, i], sin[pos, i]
        take_turn()
        two_of_x.multiply(partial, squares, x, starts, gain, w, first, second, barrier)
        if mine:
            rstd = rstd_of(squares, n, eps)
            u = two_of_x.total(partial, 0, n, t & u32(7))
            v = two_of_x.total(partial, 1, n, t & u32(7))
            if biased:
                u = cuda.fma(u, rstd, bias[first + (t & u32(7))])
                v = cuda.fma(v, rstd, bias[second + (t & u32(7))])
            else:
                u, v = u * rstd, v * rstd
            if head < H + G:
                u, v = cuda.fma(u, c, -fmul_rn(v, s)), cuda.fma(v, c, fmul_rn(u, s))
            if head < H:
                q[r, first + (t & u32(7))], q[r, second + (t & u32(7))] = u, v
            elif head < H + G:
                kc[slot, head - H, pos, i], kc[slot, head - H, pos, i + u32(HALF)] = u, v
            else:
                kv = head - H - G
                vc[slot, kv, pos, i], vc[slot, kv, pos, i + u32(HALF)] = u, v

    @inlined
    def parts_at(position):
        """Of the context of a row at this position"""
        return u32(u32(position) // u32(KEYS)) + u32(1)

    @inlined
    def merged(o, ml, row, parts, k):
        """Columns k to k + 3 of att of a row, of all its parts, in their order"""
        first, head, last = u32(row) * u32(o.shape[1]), u32(k // u32(D)), u32(parts - u32(1))
        top, l, sums = f32(-math.inf), f32(0), filled(4, f32(0))
        m_of, l_of, o_of = filled(8, f32(0)), filled(8, f32(0)), filled(32, f32(0))
        for part0 in range(0, i32(parts), 8):
            before = top
            for j in range(8):               # without a branch: all are under way at once
                part = first + min(u32(part0 + j), last)
                two = load_2(ml, u64(part * u32(HD // D) + head) * u64(2))
                m_of[j], l_of[j] = two[0], two[1]
                four = load_4(o, u64(part) * u64(HD) + u64(k))
                for e in range(4):
                    o_of[4 * j + e] = four[e]
            for j in range(8):
                top = max(top, m_of[j])
            shrink = exp2(before - top)
            l *= shrink
            for e in range(4):
                sums[e] *= shrink
            for j in range(8):
                if u32(part0 + j) <= last:
                    p = exp2(m_of[j] - top)
                    l += p * l_of[j]
                    for e in range(4):
                        sums[e] += p * o_of[4 * j + e]
        scale = fast_fdividef(f32(1), l)
        for e in range(4):
            sums[e] *= scale
        return sums

    @cuda_kernel
    def merge(att, o, ml, rows):
        """att (AT_ONCE, HD) of its parts     grid (ceil(HD / 512), rows), 128 threads"""
        r, k = u32(cuda.blockIdx.y), u32(4) * (u32(cuda.blockIdx.x) * u32(128) + thread_id())
        here = i32(r) < entry(rows, COUNTS, N_ROWS) and k < HD
        parts = parts_at(entry(rows, POSITION, r))
        take_turn()
        if here:
            store_4(att, u64(r) * u64(HD) + u64(k), merged(o, ml, r, parts, k))

    @two_at_once
    def proj(x, o, ml, w, rows):
        """x[r, n] += sum_k W[n, k] att[r, k], att merged from its parts; of one group.
        grid C / 8
        o (AT_ONCE, parts, HD), ml (AT_ONCE, parts, H, 2): see `attend`"""
        t, first = thread_id(), u32(8) * u32(cuda.blockIdx.x)
        partial, squares = cuda.shared.array(ALONE, f32), cuda.shared.array((1, 1), f32)
        att = cuda.shared.array(0, f32, 16)
        barrier = of_att.ask_for(w, first, first, w)
        table = own_table(rows)
        count = u32(table[COUNTS, N_ROWS])
        r, n, old = t >> u32(3), first + (t & u32(7)), f32(0)
        starts = filled(1, u32(ATT) + min(own_row(), u32(count - u32(1))) * u32(ATT_LINE))
        take_turn()
        if r < count:
            old = x[r, n]
        row = u32(0)
        while row < count:
            parts, k = parts_at(table[POSITION, row]), u32(4) * t
            while k < HD:
                store_4(att, u32(ATT) + row * u32(ATT_LINE) + k, merged(o, ml, row, parts, k))
                k += u32(4 * 256)
            row += u32(1)
        cuda.syncthreads()                   # att is whole
        of_att.multiply(partial, squares, att, starts, att, w, first, first, barrier)
        if r < count:
            x[r, n] = old + of_att.total(partial, 0, r, t & u32(7))

    @two_at_once
    def gate_up(y, x, gain, w, rows, eps):
        """y = silu(gate) * up, of rmsnorm(x).     grid (ceil(F / (4 OF_X)), rows / ROWS)
        y (AT_ONCE, F), x (AT_ONCE, C), w (2 F, C) bf16"""
        t, first = thread_id(), u32(8 * HALF_OF_X) * u32(cuda.blockIdx.x)
        partial, squares = cuda.shared.array(SHARES, f32), cuda.shared.array(SQUARES, f32)
        barrier = of_x.ask_for(w, first, first + u32(F), gain)
        table = own_table(rows)
        count, r, column = u32(table[COUNTS, N_ROWS]), t >> u32(3), t & u32(7)
        starts = starts_of(begin(), count, C)
        take_turn()
        of_x.multiply(partial, squares, x, starts, gain, w, first, first + u32(F), barrier)
        if r < ROWS and begin() + r < count:
            rstd = rstd_of(squares, r, eps)
            for tile in range(HALF_OF_X):
                n = first + u32(8 * tile) + column
                gate = of_x.total(partial, tile, r, column) * rstd
                up = of_x.total(partial, HALF_OF_X + tile, r, column) * rstd
                if n < F:
                    y[begin() + r, n] = fast_fdividef(gate * up, f32(1) + exp(-gate))

    @two_at_once
    def down(x, y, w, rows):
        """x[r, n] += sum_k W[n, k] y[r, k]     grid (ceil(C / (8 OF_SWIGLU)), rows / ROWS)"""
        t, first = thread_id(), u32(8 * OF_SWIGLU) * u32(cuda.blockIdx.x)
        partial, squares = cuda.shared.array(SHARES_OF_SWIGLU, f32), cuda.shared.array((1, 1), f32)
        barrier = of_swiglu.ask_for(w, first, first + u32(8), w)
        table = own_table(rows)
        count, r, column = u32(table[COUNTS, N_ROWS]), t >> u32(3), t & u32(7)
        mine = r < ROWS and begin() + r < count
        starts, old = starts_of(begin(), count, F), filled(OF_SWIGLU, f32(0))
        take_turn()
        for tile in range(OF_SWIGLU):
            n = first + u32(8 * tile) + column
            if mine and n < C:
                old[tile] = x[begin() + r, n]
        of_swiglu.multiply(partial, squares, y, starts, y, w, first, first + u32(8), barrier)
        for tile in range(OF_SWIGLU):
            n = first + u32(8 * tile) + column
            if mine and n < C:
                x[begin() + r, n] = old[tile] + of_swiglu.total(partial, tile, r, column)

    @two_at_once
    def logits(out, x, gain, w, rows, eps):
        """Logits of the wanted rows, and behind them these rows of x.
        grid (ceil(V / (8 OF_X)), rows / ROWS)
        out (lines, V + C), from line rows[COUNTS, FIRST_LINE] on; w (V, C) bf16"""
        t, first, V = thread_id(), u32(8 * OF_X) * u32(cuda.blockIdx.x), u32(w.shape[0])
        partial, squares = cuda.shared.array(SHARES, f32), cuda.shared.array(SQUARES, f32)
        barrier = of_x.ask_for(w, first, first + u32(8 * HALF_OF_X), gain)
        table = own_table(rows)
        count, base = u32(table[COUNTS, N_WANTED]), begin()
        starts, r, column = cuda.local.array(GROUPS, u32), t >> u32(3), t & u32(7)
        for group in range(GROUPS):
            wanted = min(u32(base + u32(GROUP * group) + own_row()), u32(count - u32(1)))
            starts[group] = u32(table[WANTED, wanted]) * u32(C)
        take_turn()
        of_x.multiply(partial, squares, x, starts, gain, w, first, first + u32(8 * HALF_OF_X),
                      barrier)
        line = u32(table[COUNTS, FIRST_LINE])
        if r < ROWS and base + r < count:
            rstd = rstd_of(squares, r, eps)
            for tile in range(OF_X):
                n = first + u32(8 * tile) + column
                if n < V:
                    out[line + base + r, n] = of_x.total(partial, tile, r, column) * rstd
        i = base * u32(C) + u32(256) * u32(cuda.blockIdx.x) + t
        while i < u32(min(count, base + u32(ROWS))) * u32(C):
            r = u32(i // u32(C))
            c = i - r * u32(C)
            out[line + r, V + c] = x[u32(table[WANTED, r]), c]
            i += u32(256) * u32(cuda.gridDim.x)

    return ProductKernels(qkv, merge, proj, gate_up, down, logits)

@made_once
def attend_kernel(D, HEADS, BLOCKS, hopper):
    """Of HEADS query heads that share a head of keys, some KEYS keys of the context.  BLOCKS: how
    many such groups of query heads share it."""
    LANES, KEYS, CHUNKS = lanes_a_key(D), keys_a_part(D), D // 4
    EACH = WARP // LANES                     # keys that a warp has at once, four times
    Q = HEADS * 4                            # floats of the queries that a lane has
    SUMS, OF_WARPS = (8, HEADS * D), (8, HEADS)
    load_4, _ = vector(4)
    take_turn = after_previous if hopper else at_once
    steps = LANES.bit_length() - 1

    def butterflies(combine, first, last, count):
        """The device function that combines x[0], .. x[count - 1] over the lanes that differ in
        bits first, .. last - 1 of their numbers: step by step, that none waits for another"""
        @inlined
        def over(x):
            for i in range(first, last):
                for j in range(count):
                    x[j] = combine(x[j], cuda.shfl_xor_sync(ALL, x[j], 1 << i))
        return over
    add_over_key = butterflies(operator.add, 0, steps, Q)
    max_over_keys = butterflies(max, steps, 5, HEADS)
    add_over_keys, add_all_over_keys = (
        butterflies(operator.add, steps, 5, count) for count in (HEADS, Q))

    @cuda_kernel
    def attend(o, ml, q, kc, vc, rows, scale2):
        """o = sum_t 2^(s_t - m) v_t, m = max_t s_t, l = sum_t 2^(s_t - m), s_t = scale2 <q, k_t>
        of a part of the keys.     grid (H / HEADS, parts, rows), 256 threads
        o (AT_ONCE, parts, HD), ml (AT_ONCE, parts, H, 2): m and l     scale2: of 2^x, not e^x

        A group of LANES lanes has a key, a warp EACH * 4, whose loads are all under way at once."""
        t, lane, warp = thread_id(), lane_id(), warp_id()
        block, part, r = u32(cuda.blockIdx.x), u32(cuda.blockIdx.y), u32(cuda.blockIdx.z)
        head = u32(HEADS) * block            # the first of them
        n = entry(rows, POSITION, r) + i32(1) - i32(u32(KEYS) * part)
        keys = u32(entry(rows, SLOT, r)) * u32(kc.shape[1]) + u32(block // u32(BLOCKS))
        plane = (u64(keys) * u64(kc.shape[2]) + u64(u32(KEYS) * part)) * u64(D)
        here = r < entry(rows, COUNTS, N_ROWS) and n > 0      # for a whole block
        if hopper and here and t == 0:       # all but the newest are long in memory
            size = u32(min(n, i32(KEYS))) * u32(4 * D)
            bulk_prefetch(global_address(kc) + u64(4) * plane, size)
            bulk_prefetch(global_address(vc) + u64(4) * plane, size)
        take_turn()
        if here:
            mine = (lane & u32(LANES - 1)) < CHUNKS
            d = u32(4) * u32(min(lane & u32(LANES - 1), u32(CHUNKS - 1)))
            first = warp * u32(4 * EACH) + (lane >> u32(steps))      # of the lane's four keys
            qs, scores, sums = filled(Q, f32(0)), filled(Q, f32(0)), filled(Q, f32(0))
            ks, vs = filled(16, f32(0)), filled(16, f32(0))
            ms, ls = filled(HEADS, f32(0)), filled(HEADS, f32(0))
            for i in range(4):
                key = u32(min(i32(first + u32(i * EACH)), i32(n - i32(1))))
                four = load_4(kc, plane + u64(key * u32(D) + d))
                for e in range(4):
                    ks[4 * i + e] = four[e]
            for i in range(4):
                key = u32(min(i32(first + u32(i * EACH)), i32(n - i32(1))))
                four = load_4(vc, plane + u64(key * u32(D) + d))
                for e in range(4):
                    vs[4 * i + e] = four[e]
            for h in range(HEADS):
                four = load_4(q, u64(r) * u64(q.shape[1]) + u64((head + u32(h)) * u32(D) + d))
                for e in range(4):
                    qs[4 * h + e] = four[e] if mine else f32(0)
            o_smem, m_smem = cuda.shared.array(SUMS, f32, 16), cuda.shared.array(OF_WARPS, f32)
            l_smem = cuda.shared.array(OF_WARPS, f32)
            for h in range(HEADS):
                for i in range(4):
                    for e in range(4):
                        scores[4 * h + i] += qs[4 * h + e] * ks[4 * i + e]
            add_over_key(scores)
            for h in range(HEADS):
                ms[h] = f32(-1e30)           # of a warp without a key: less than any score
                for i in range(4):
                    s = scores[4 * h + i] * scale2
                    scores[4 * h + i] = s if i32(first + u32(i * EACH)) < n else f32(-math.inf)
                    ms[h] = max(ms[h], scores[4 * h + i])
            max_over_keys(ms)
            for h in range(HEADS):
                for i in range(4):
                    p = exp2(scores[4 * h + i] - ms[h])
                    ls[h] += p
                    for e in range(4):
                        sums[4 * h + e] += p * vs[4 * i + e]
            add_over_keys(ls)
            add_all_over_keys(sums)
            for h in range(HEADS):
                if mine and lane < LANES:
                    for e in range(4):
                        o_smem[warp, u32(h * D) + d + u32(e)] = sums[4 * h + e]
                if lane == 0:
                    m_smem[warp, h], l_smem[warp, h] = ms[h], ls[h]
            cuda.syncthreads()               # the warps' sums are there
            i = t
            while i < u32(HEADS * D):
                h = u32(0)
                for later in range(1, HEADS):
                    h = u32(later) if i >= u32(later * D) else h
                m, l, s = m_smem[0, h], f32(0), f32(0)
                for w in range(1, 8):
                    m = max(m, m_smem[w, h])
                for w in range(8):
                    p = exp2(m_smem[w, h] - m)
                    l += p * l_smem[w, h]
                    s += p * o_smem[w, i]
                o[r, part, head * u32(D) + i] = s
                if i == h * u32(D):
                    ml[r, part, head + h, 0], ml[r, part, head + h, 1] = m, l
                i += u32(256)
    return attend

@made_once
def take_kernel(hopper):
    start_next = let_next_start if hopper else at_once

    @cuda_kernel
    def take(x, rows, wte):
        """x[r] = wte[token of r]     a block of 128 threads a row
        x (AT_ONCE, C), rows (5, AT_ONCE), wte (V, C) bf16, or another matrix, whatever its type"""
        r = cuda.blockIdx.x
        start_next()                         # its weights may come; it waits for the rest
        if r < rows[COUNTS, N_ROWS]:
            for c in range(cuda.threadIdx.x, x.shape[1], 128):
                x[r, c] = value(wte[rows[TOKEN, r], c])
    return take

# ---- drawing tokens
# `choose` does what nanoeuler.sample does, a block a line of logits, in float64 and with the random
# number of the host: by one seed both draw the same tokens as long as their logits agree.
DRAW = len(ne.Draw._fields)
TEMPERATURE, TOP_K, TOP_P, MIN_P, UNIFORM = range(DRAW)  # places in a line of draws

@inlined
def sortable(z):
    """A float32 as a u32, in the order of numbers; -0 is 0, NaN more than all numbers."""
    bits = u32(float_as_int(z + f32(0)))
    if z != z:
        return u32(0xFFFFFFFF)
    return u32(bits ^ u32(0xFFFFFFFF)) if bits >> u32(31) else u32(bits | u32(0x80000000))

@inlined
def likeliest_of(z, V):
    """Where the first of the largest z[:V] is."""
    best = i64(0)
    for i in range(cuda.threadIdx.x, V, 4 * 256):
        for j in range(4):                   # all four are under way at once
            at = min(i + 256 * j, V - 1)
            best = max(best, i64(sortable(z[at])) << 31 | i64(0x7FFFFFFF - at))
    return i32(0x7FFFFFFF - (block_max(best) & 0x7FFFFFFF))

@inlined
def least_of_the_largest(z, odds, V, largest, want, counted):
    """Of z in descending order as many are kept as it takes to reach `want`: with the sum of their
    odds, or, if counted, with their number.  Returns the key (`sortable`) of the last one that is
    kept, which is found bit by bit, the highest first, and how many of this key are kept."""
    key, above, of_each = u32(0), f64(0), f64(0)
    for bit in range(33):                    # the last time: what those above it reach
        higher = u32(key | u32(0x80000000) >> u32(bit)) if bit < 32 else u32(key + u32(1))
        reached = f64(0)
        for i in range(cuda.threadIdx.x, V, 4 * 256):
            for j in range(4):               # all four are under way at once
                at = min(i + 256 * j, V - 1)
                found, each = sortable(z[at]), f64(1) if counted else odds[at]
                reached += each if i + 256 * j < V and found >= higher else f64(0)
                of_each = each if found == key else of_each
        reached = block_sum(reached)
        if bit == 32:
            above = reached
        elif reached >= want and higher <= sortable(largest):
            key, of_each = higher, f64(0)
    return key, max(f64(1), math.ceil((want - above) / block_max(of_each)))

@inlined
def sums_up_to(x):
    """The sums of x of all threads up to each of the 256"""
    sums, t = cuda.shared.array(256, f64), cuda.threadIdx.x
    sums[t] = x
    cuda.syncthreads()
    for i in range(8):
        before = sums[t - (1 << i)] if t >= 1 << i else f64(0)
        cuda.syncthreads()
        sums[t] += before
        cuda.syncthreads()
    return sums

@inlined
def draw_one(token, z, odds, V, likeliest, draw):
    """token[0] = the one drawn, by a block"""
    t, largest, total = cuda.threadIdx.x, z[likeliest], f64(0)
    for i in range(t, V, 256):
        odds[i] = math.exp((f64(z[i]) - f64(largest)) / max(draw[TEMPERATURE], 1e-99))
        total += odds[i]
    total = block_sum(total)                 # its barriers: all odds are there
    least, n_least = u32(0), f64(V)          # kept are those above, and the first n of key `least`
    for counted in (True, False):            # by top-k, and by top-p
        want = draw[TOP_K] if counted else draw[TOP_P] * total
        if (0 < want < V) if counted else draw[TOP_P] < 1:
            key, n = least_of_the_largest(z, odds, V, largest, want, counted)
            if key > least or key == least and n < n_least:
                least, n_least = key, n
    each = (V + 255) // 256                  # from here on a thread has neighbours
    first, last = min(t * each, V), min(t * each + each, V)
    mine = f64(0)                            # how many of them have the key `least`
    for i in range(first, last):
        mine += f64(1) if sortable(z[i]) == least else f64(0)
    seen, kept = sums_up_to(mine)[t] - mine, f64(0)      # how many of the threads before
    for i in range(first, last):
        key = sortable(z[i])
        seen += f64(1) if key == least else f64(0)
        if key < least or key == least and seen > n_least or odds[i] < draw[MIN_P]:
            odds[i] = f64(0)
        kept += odds[i]
    sums = sums_up_to(kept)
    target = draw[UNIFORM] * sums[255]
    passed = sums[t] > target or sums[t] == sums[255]    # the latter: where rounding made it all
    first_thread = -block_max(-t if passed else -256)    # of those that passed: one of its tokens
    if t == first_thread:
        s, token[0] = sums[t] - kept, -1
        for i in range(first, last):
            if odds[i] > 0 and (token[0] < 0 or s <= target):
                token[0] = i
            s += odds[i]
        if token[0] < 0:                     # where rounding made nothing more of the thread's
            token[0] = likeliest

@made_once
def choose_kernel(hopper):
    take_turn = after_previous if hopper else at_once

    @cuda_kernel
    def choose(ids, latest, odds, out, draws, rows, V):
        """ids[ring, line] = what nanoeuler.sample draws from out[line, :V] by draws[ring, line], a
        Draw; -1 if the largest of them is not finite.     grid lines, 256 threads
        ids (2, MOST_ROWS) int32, draws (2, MOST_ROWS, 5) float64: in the host's memory
        latest (AT_ONCE,): ids, for `advance`; out (lines, V + C)
        odds (AT_ONCE, V) float64: e^((z - max z) / temperature)"""
        block, line = cuda.blockIdx.x, entry(rows, COUNTS, FIRST_LINE) + cuda.blockIdx.x
        here = block < entry(rows, COUNTS, N_WANTED)     # for the whole block
        ring, t = entry(rows, COUNTS, RING), cuda.threadIdx.x
        token, draw = cuda.shared.array(1, types.int32), cuda.shared.array(DRAW, f64)
        if t < DRAW:
            draw[t] = told(draws, (ring * draws.shape[1] + line) * DRAW + t)
        take_turn()
        cuda.syncthreads()                   # draw is there
        if here:
            z = out[line]
            likeliest = likeliest_of(z, V)
            finite = math.isfinite(z[likeliest])
            if finite and draw[TEMPERATURE] > 0:
                draw_one(token, z, odds[block], V, likeliest, draw)
            elif t == 0:
                token[0] = likeliest if finite else i32(-1)
            cuda.syncthreads()               # the token is there
            if t == 0:
                ids[ring, line], latest[block] = token[0], token[0]
    return choose

@cuda_kernel
def advance_kernel(rows, latest):
    """Makes the table of a step of the one before it, whose rows were all wanted: the tokens that
    were drawn, each behind its row.     AT_ONCE threads"""
    r = cuda.threadIdx.x
    if r < rows[COUNTS, N_ROWS]:
        rows[TOKEN, r] = max(latest[r], 0)
        rows[POSITION, r] += 1
    if r == 0:
        rows[COUNTS, RING] ^= 1
