"""Attention of the rows of a step to their contexts, in splits: `attend` and `merge`.

A context is cut into splits of keys_per_split(D) keys, so that a long one has many blocks.  A block
has one split of one row, and a group of query heads that share a head of keys.  Afterwards, the
splits of a row are merged: by each block of `proj` (products.py), or from MERGE_FROM rows by
`merge`.
"""
import math
import operator

from numba import cuda
from numba.cuda.libdevice import fast_fdividef

from nanoeuler_cuda import ALL, filled, WARP
from nanoeuler_parts.decode.table import COUNTS, N_ROWS, POSITION, SLOT, table_entry
from nanoeuler_parts.gpu.launches import cuda_kernel, inlined, made_once
from nanoeuler_parts.gpu.numbers import exp2, f32, i32, u32, u64, vector
from nanoeuler_parts.tensor_cores.ptx import (
    after_previous, at_once, bulk_prefetch, global_address, lane_id, thread_id, warp_id,
)

def keys_per_split(D):
    """Returns the number of keys of a split, the share of the context that one block of `attend`
    takes: eight warps, and four keys per group of lanes."""
    return 8 * 4 * (32 // lanes_per_key(D))

def lanes_per_key(D):
    """Returns the number of lanes that share a key, a power of two: a lane has four numbers of
    it."""
    lanes = 1
    while 4 * lanes < D:
        lanes *= 2
    return lanes

def heads_per_block(H, G):
    """Returns how many of the H / G query heads that share keys one block takes: all of five or
    seven, otherwise the largest divisor of H / G up to four."""
    share = H // G
    return share if share in (5, 7) else max(n for n in range(1, 5) if share % n == 0)

def first_key_of(window):
    """Returns the device function first_key(position): the first key that a row at this position
    attends to.     window: most keys, or 0 for all"""
    @inlined
    def first_key(position):
        return i32(max(i32(0), i32(position) + i32(1) - i32(window))) if window else i32(0)
    return first_key

@made_once
def attend_kernel(D, HEADS, BLOCKS, window, hopper):
    """Makes `attend` for heads of D numbers.  A block has HEADS query heads that share a head of
    keys, and BLOCKS such blocks share it: HEADS BLOCKS = H / G."""
    first_key = first_key_of(window)
    LANES, KEYS, CHUNKS = lanes_per_key(D), keys_per_split(D), D // 4
    KEY_GROUPS = WARP // LANES               # groups of lanes in a warp; each has four keys
    Q_REGS = HEADS * 4                       # floats of the queries that a lane has
    O_SHAPE, ML_SHAPE = (8, HEADS * D), (8, HEADS)       # of the sums of the eight warps
    load_4, _ = vector(4)
    take_turn = after_previous if hopper else at_once
    log2_lanes = LANES.bit_length() - 1

    def butterflies(combine, first, last, count):
        """Makes a device function that combines each of x[0], .., x[count - 1] over the lanes whose
        numbers differ in bits first, .., last - 1.  All x take a bit before the next bit is taken,
        so that the shuffles of different x are independent."""
        @inlined
        def over(x):
            for i in range(first, last):
                for j in range(count):
                    x[j] = combine(x[j], cuda.shfl_xor_sync(ALL, x[j], 1 << i))
        return over
    add_over_key = butterflies(operator.add, 0, log2_lanes, Q_REGS)
    max_over_keys = butterflies(max, log2_lanes, 5, HEADS)
    add_over_keys, add_all_over_keys = (
        butterflies(operator.add, log2_lanes, 5, count) for count in (HEADS, Q_REGS))

    @cuda_kernel
    def attend(o, ml, q, kc, vc, rows, scale2):
        """For each row, query head and split of its keys, with s_t = scale2 <q, k_t>:
            o = sum_t 2^(s_t - m) v_t,   m = max_t s_t,   l = sum_t 2^(s_t - m)
        grid (H / HEADS, splits, rows), 256 threads
        o (AT_ONCE, splits, HD), ml (AT_ONCE, splits, H, 2): m and l
        scale2: log2(e) / sqrt(D), since exponentials are powers of two

        A group of LANES lanes takes four keys, so a warp takes 4 KEY_GROUPS.  All their loads are
        in flight together."""
        t, lane, warp = thread_id(), lane_id(), warp_id()
        block, split, r = u32(cuda.blockIdx.x), u32(cuda.blockIdx.y), u32(cuda.blockIdx.z)
        head = u32(HEADS) * block            # the block's first query head
        # start: the split's first key.  n: keys from it to the row's own.  plane: its index in kc
        position = table_entry(rows, POSITION, r)
        start = u32(u32(first_key(position)) + u32(KEYS) * split)
        n = position + i32(1) - i32(start)
        kv_head = u32(table_entry(rows, SLOT, r)) * u32(kc.shape[1]) + u32(block // u32(BLOCKS))
        plane = (u64(kv_head) * u64(kc.shape[2]) + u64(start)) * u64(D)
        here = r < table_entry(rows, COUNTS, N_ROWS) and n > 0       # the same in the whole block
        if hopper and here and t == 0:       # all keys but the newest are already in memory
            size = u32(min(n, i32(KEYS))) * u32(4 * D)
            bulk_prefetch(global_address(kc) + u64(4) * plane, size)
            bulk_prefetch(global_address(vc) + u64(4) * plane, size)
        take_turn()
        if here:
            # a key has CHUNKS chunks of four numbers; lanes beyond these have none of it
            mine = (lane & u32(LANES - 1)) < CHUNKS
            d = u32(4) * u32(min(lane & u32(LANES - 1), u32(CHUNKS - 1)))
            first = warp * u32(4 * KEY_GROUPS) + (lane >> u32(log2_lanes))  # lane's first key
            qs, scores, sums = (
                filled(Q_REGS, f32(0)), filled(Q_REGS, f32(0)), filled(Q_REGS, f32(0)))
            ks, vs = filled(16, f32(0)), filled(16, f32(0))
            ms, ls = filled(HEADS, f32(0)), filled(HEADS, f32(0))
            for i in range(4):
                key = u32(min(i32(first + u32(i * KEY_GROUPS)), i32(n - i32(1))))
                four = load_4(kc, plane + u64(key * u32(D) + d))
                for e in range(4):
                    ks[4 * i + e] = four[e]
            for i in range(4):
                key = u32(min(i32(first + u32(i * KEY_GROUPS)), i32(n - i32(1))))
                four = load_4(vc, plane + u64(key * u32(D) + d))
                for e in range(4):
                    vs[4 * i + e] = four[e]
            for h in range(HEADS):
                four = load_4(q, u64(r) * u64(q.shape[1]) + u64((head + u32(h)) * u32(D) + d))
                for e in range(4):
                    qs[4 * h + e] = four[e] if mine else f32(0)
            o_smem, m_smem = cuda.shared.array(O_SHAPE, f32, 16), cuda.shared.array(ML_SHAPE, f32)
            l_smem = cuda.shared.array(ML_SHAPE, f32)
            for h in range(HEADS):
                for i in range(4):
                    for e in range(4):
                        scores[4 * h + i] += qs[4 * h + e] * ks[4 * i + e]
            add_over_key(scores)
            for h in range(HEADS):
                ms[h] = f32(-1e30)           # for a warp without a key: below any score
                for i in range(4):
                    s = scores[4 * h + i] * scale2
                    scores[4 * h + i] = (
                        s if i32(first + u32(i * KEY_GROUPS)) < n else f32(-math.inf))
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
            cuda.syncthreads()               # all warps have written their sums
            i = t
            while i < u32(HEADS * D):
                h = u32(0)                   # i // D, without a division
                for later in range(1, HEADS):
                    h = u32(later) if i >= u32(later * D) else h
                m, l, s = m_smem[0, h], f32(0), f32(0)
                for w in range(1, 8):
                    m = max(m, m_smem[w, h])
                for w in range(8):
                    p = exp2(m_smem[w, h] - m)
                    l += p * l_smem[w, h]
                    s += p * o_smem[w, i]
                o[r, split, head * u32(D) + i] = s
                if i == h * u32(D):
                    ml[r, split, head + h, 0], ml[r, split, head + h, 1] = m, l
                i += u32(256)
    return attend

MERGE_FROM = 4                               # number of rows from which `merge` pays

def split_merger(HD, D, window):
    """Makes the device functions that merge what `attend` wrote for the splits of a row:
    (splits_at, merge_splits)."""
    KEYS, (load_2, _), (load_4, _) = keys_per_split(D), vector(2), vector(4)
    first_key = first_key_of(window)

    @inlined
    def splits_at(position):
        """Returns the number of splits of the context of a row at this position."""
        return u32(u32(position - first_key(position)) // u32(KEYS)) + u32(1)

    @inlined
    def merge_splits(o, ml, row, splits, k):
        """Returns columns k to k + 3 of att of a row, merged from all its splits in order:
            att = sum_s 2^(m_s - M) o_s / sum_s 2^(m_s - M) l_s,   M = max_s m_s
        A running M rescales the sums after every eight splits."""
        first, head, last = u32(row) * u32(o.shape[1]), u32(k // u32(D)), u32(splits - u32(1))
        top, l, sums = f32(-math.inf), f32(0), filled(4, f32(0))
        m_of, l_of, o_of = filled(8, f32(0)), filled(8, f32(0)), filled(32, f32(0))
        for split0 in range(0, i32(splits), 8):
            before = top
            for j in range(8):               # no branch, so that all loads are in flight together
                split = first + min(u32(split0 + j), last)
                two = load_2(ml, u64(split * u32(HD // D) + head) * u64(2))
                m_of[j], l_of[j] = two[0], two[1]
                four = load_4(o, u64(split) * u64(HD) + u64(k))
                for e in range(4):
                    o_of[4 * j + e] = four[e]
            for j in range(8):
                top = max(top, m_of[j])
            shrink = exp2(before - top)
            l *= shrink
            for e in range(4):
                sums[e] *= shrink
            for j in range(8):
                if u32(split0 + j) <= last:
                    p = exp2(m_of[j] - top)
                    l += p * l_of[j]
                    for e in range(4):
                        sums[e] += p * o_of[4 * j + e]
        scale = fast_fdividef(f32(1), l)
        for e in range(4):
            sums[e] *= scale
        return sums
    return splits_at, merge_splits

@made_once
def merge_kernel(HD, D, window, hopper):
    """Makes `merge`, which merges the splits of all rows once.  For a few rows, each block of
    `proj` merges them instead."""
    (splits_at, merge_splits), (_, store_4) = split_merger(HD, D, window), vector(4)
    take_turn = after_previous if hopper else at_once

    @cuda_kernel
    def merge(att, o, ml, rows):
        """att[r] = the merged splits of row r     att (AT_ONCE, HD)     o, ml: see `attend`
        grid (ceil(HD / 512), rows), 128 threads"""
        r, k = u32(cuda.blockIdx.y), u32(4) * (u32(cuda.blockIdx.x) * u32(128) + thread_id())
        here = i32(r) < table_entry(rows, COUNTS, N_ROWS) and k < HD
        splits = splits_at(table_entry(rows, POSITION, r))
        take_turn()
        if here:
            store_4(att, u64(r) * u64(HD) + u64(k), merge_splits(o, ml, r, splits, k))
    return merge
