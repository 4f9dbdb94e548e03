"""Sampling on the device: `choose`, the last kernel of a step.

`choose` samples as nanoeuler.sample does, with one block per line of logits, in float64 and with
the host's random number.  So one seed gives the same tokens on the CPU and here, as long as the
logits agree.  The odds of a token are e^((z - max z) / temperature): its probability divided by
that of the most probable token.
"""
import math

from numba import cuda, types
from numba.cuda.libdevice import float_as_int, int_as_float

import nanoeuler as ne
from nanoeuler_cuda import ALL, cdiv, WARP, warp_max, warp_sum
from nanoeuler_parts.decode.table import COUNTS, FIRST_LINE, N_WANTED, RING, table_entry
from nanoeuler_parts.gpu.launches import cuda_kernel, inlined, made_once
from nanoeuler_parts.gpu.numbers import ctype, f32, f64, i32, i64, u32, u64
from nanoeuler_parts.tensor_cores.ptx import (
    after_previous, at_once, global_address, load_relaxed_f64,
)

THREADS = WARP * WARP                        # of the block that samples a token
LOG2_WARP = WARP.bit_length() - 1
AT_A_TIME = 4                                # loads that a thread has in flight together
LISTED_AT_A_TIME = AT_A_TIME * WARP          # loads of a warp
DRAW_FIELDS = len(ne.SampleRequest._fields)
TEMPERATURE, TOP_K, TOP_P, MIN_P, UNIFORM = map(
    ne.SampleRequest._fields.index, ("temperature", "top_k", "top_p", "min_p", "uniform"))

def over_block(over_warp):
    """Makes the device function that combines x over THREADS threads: within each warp, then over
    the results of the warps.  There are as many warps as lanes in a warp."""
    @inlined
    def over(x):
        x, warps, t = over_warp(x), cuda.shared.array(WARP, ctype(x)), cuda.threadIdx.x
        cuda.syncthreads()                   # all have read the result of an earlier call
        if t % WARP == 0:
            warps[t // WARP] = x
        cuda.syncthreads()
        return over_warp(warps[t % WARP])
    return over

block_sum, block_max = over_block(warp_sum), over_block(warp_max)

@inlined
def draw_field(draws, i):
    """Returns the i-th number of draws, read from the host's memory, past the caches."""
    return load_relaxed_f64(global_address(draws) + u64(8) * u64(i))

@inlined
def sort_key(z):
    """Returns a u32 key of a float32 whose order is that of the numbers.  -0 equals 0.  NaN is
    above all numbers."""
    bits = u32(float_as_int(z + f32(0)))
    if z != z:
        return u32(0xFFFFFFFF)
    return u32(bits ^ u32(0xFFFFFFFF)) if bits >> u32(31) else u32(bits | u32(0x80000000))

@inlined
def logit_of(key):
    """Returns the float32 whose `sort_key` this is."""
    return int_as_float(i32(key ^ u32(0x80000000) if key >> u32(31) else key ^ u32(0xFFFFFFFF)))

@inlined
def largest_of(z, V):
    """Returns (the index of the largest of z[:V], the first one if several are equal; the key of
    the largest that this thread has read).  Thread t reads z[t], z[t + THREADS], .."""
    best_key, best, keys = u32(0), i32(0), cuda.local.array(AT_A_TIME, types.uint32)
    for i in range(cuda.threadIdx.x, V, AT_A_TIME * THREADS):
        for j in range(AT_A_TIME):
            keys[j] = sort_key(z[min(i + THREADS * j, V - 1)])
        for j in range(AT_A_TIME):
            if keys[j] > best_key and i + THREADS * j < V:
                best_key, best = keys[j], i32(i + THREADS * j)
    entry = block_max(i64(best_key) << 31 | i64(0x7FFFFFFF - best))
    return i32(0x7FFFFFFF - (entry & 0x7FFFFFFF)), best_key

@inlined
def sum_of_odds(z, V, largest, temperature):
    """Returns the sum of the odds of z[:V]."""
    total, read = f64(0), cuda.local.array(AT_A_TIME, types.float32)
    for i in range(cuda.threadIdx.x, V, AT_A_TIME * THREADS):
        for j in range(AT_A_TIME):
            read[j] = z[min(i + THREADS * j, V - 1)]
        for j in range(AT_A_TIME):
            if i + THREADS * j < V:
                total += math.exp((f64(read[j]) - largest) / temperature)
    return block_sum(total)

@inlined
def kth_largest(key, k):
    """Returns the k-th largest of the keys of the block's threads, or 0 if there are fewer.
    It is found by bisection, from its highest bit to its lowest."""
    found = u32(0)
    for bit in range(32):
        higher = u32(found | u32(0x80000000) >> u32(bit))
        if cuda.syncthreads_count(i32(key >= higher)) >= k:
            found = higher
    return found

# With limits, most tokens are too improbable to be kept.  The block lists the others, the
# candidates, and then reads only this list.  Without limits, all tokens are candidates.  Each warp
# has a run of neighboring tokens, and writes its candidates from the index where its run begins.
# An entry has the key of a logit in its upper half, and the token in its lower half.  Zeros follow
# the candidates, up to a multiple of LISTED_AT_A_TIME, so that loops need no check for the end of
# the list.  A zero is no candidate, because no logit has the key 0.
def room_for_list(V):
    """Returns the length of the array that holds the lists of all warps: room for V tokens and for
    the zeros."""
    return cdiv(V, WARP * LISTED_AT_A_TIME) * WARP * LISTED_AT_A_TIME

@inlined
def rank_among(lanes):
    """Returns the rank of this lane among those whose bits are set in a u32, 1 for the first."""
    return cuda.popc(lanes & u32((2 << cuda.threadIdx.x % WARP) - 1))

@inlined
def key_of(entry):
    """Returns the key of an entry of `listed`: its upper half."""
    return u32(entry >> u64(32))

@inlined
def list_candidates(listed, odds, z, V, run, lowest, largest, temperature):
    """Lists the candidates of this warp, those with a key of at least `lowest`, in ascending order:
    entries in `listed`, and their odds in `odds`.  Returns the length of this list, with its zeros.
    run: the number of tokens of a warp"""
    lane, first, n = cuda.threadIdx.x % WARP, cuda.threadIdx.x // WARP * run, i32(0)
    keys = cuda.local.array(AT_A_TIME, types.uint32)
    entries = cuda.local.array(AT_A_TIME, types.uint64)
    for i in range(first, min(first + run, V), LISTED_AT_A_TIME):
        for j in range(AT_A_TIME):
            keys[j] = sort_key(z[min(i + WARP * j + lane, V - 1)])
        for j in range(AT_A_TIME):
            token = i + WARP * j + lane
            chosen = token < V and keys[j] >= lowest
            lanes = u32(cuda.ballot_sync(ALL, chosen))       # bit i: lane i lists its token
            if chosen:
                listed[first + n + rank_among(lanes) - 1] = u64(keys[j]) << u64(32) | u64(token)
            n += i32(cuda.popc(lanes))
    padded = i32((n + LISTED_AT_A_TIME - 1) // LISTED_AT_A_TIME * LISTED_AT_A_TIME)
    for i in range(n + lane, padded, WARP):
        listed[first + i] = u64(0)
    cuda.syncwarp()                          # other lanes read what a lane has written
    for i in range(first + lane, first + padded, LISTED_AT_A_TIME):
        for j in range(AT_A_TIME):
            entries[j] = listed[i + WARP * j]
        for j in range(AT_A_TIME):
            each = math.exp((f64(logit_of(key_of(entries[j]))) - largest) / temperature)
            odds[i + WARP * j] = each if entries[j] > 0 else f64(0)
    return padded

@inlined
def cutoff_of(listed, odds, first, last, want, by_count):
    """Finds where top-k or top-p cuts off.  In descending order, the candidates of all warps are
    kept until the sum of their odds reaches want > 0, or, if by_count, until their number does.
    first, last: this lane's entries are listed[first:last:WARP]

    Returns the key of the last kept logit, and how many logits with this key are kept.  If all
    candidates together do not reach `want`, the key is 0, and all are kept.
    The key is found by bisection, from its highest bit to its lowest."""
    key, above, of_each = u32(0), f64(0), f64(0)
    keys, each = cuda.local.array(AT_A_TIME, types.uint32), cuda.local.array(AT_A_TIME, f64)
    for bit in range(33):                    # bit 32: the sum above the key alone
        higher = u32(key | u32(0x80000000) >> u32(bit)) if bit < 32 else u32(key + u32(1))
        reached = f64(0)
        for i in range(first, last, i32(LISTED_AT_A_TIME)):
            for j in range(AT_A_TIME):
                keys[j] = key_of(listed[i + WARP * j])
                each[j] = odds[i + WARP * j]
            for j in range(AT_A_TIME):
                weight = f64(1) if by_count else each[j]
                reached += weight if keys[j] >= higher else f64(0)
                of_each = weight if keys[j] == key else of_each
        reached = block_sum(reached)
        if bit == 32:
            above = reached
        elif reached >= want:
            key, of_each = higher, f64(0)
    of_each = block_max(of_each)             # the odds of a logit with this key, or 1
    return key, max(f64(1), math.ceil((want - above) / of_each)) if key > 0 else f64(0)

@inlined
def sum_over_warps(x):
    """Returns (the sum of x over the warps before this one, the sum over all warps), where all
    lanes of a warp have the same x.  It adds in the order of the warps, as a cumulative sum."""
    sums, warp = cuda.shared.array(WARP, f64), cuda.threadIdx.x // WARP
    cuda.syncthreads()                       # all have read the sums of an earlier call
    sums[warp] = x
    cuda.syncthreads()
    before, total = f64(0), f64(0)
    for w in range(WARP):
        before = total if w == warp else before
        total += sums[w]
    return before, total

@inlined
def prefix_sum(x):
    """Returns the sum of x over the lanes of this warp up to this one."""
    for i in range(LOG2_WARP):
        earlier = cuda.shfl_up_sync(ALL, x, 1 << i)
        x += earlier if cuda.threadIdx.x % WARP >= 1 << i else f64(0)
    return x

@inlined
def sample_one(token, z, odds, listed, V, top_token, best_key, draw):
    """token[0] = a token sampled from the logits z[:V] by a block.
    odds, listed: scratch memory, of `room_for_list(V)` numbers each
    top_token, best_key: the results of `largest_of`; draw: a SampleRequest"""
    largest, temperature = f64(z[top_token]), max(draw[TEMPERATURE], 1e-99)
    lowest, lowest_odds, total = u32(0), draw[MIN_P], f64(0)
    if draw[TOP_P] < 1:
        total = sum_of_odds(z, V, largest, temperature)
        # all tokens with odds below this limit, at most V, have less than 1 - top_p of the total
        # together, so that top-p needs none of them
        lowest_odds = max(lowest_odds, (1 - draw[TOP_P]) * total / V)
    if lowest_odds > 0:                      # half of it, so that rounding excludes no token
        lowest = sort_key(f32(largest + temperature * math.log(0.5 * lowest_odds)))
    if 0 < draw[TOP_K] <= THREADS:           # top_k threads have each read a logit of this key or
                                             # a larger one, so the cutoff is not below it
        lowest = max(lowest, kth_largest(best_key, draw[TOP_K]))
    run = len(listed) // WARP
    n = list_candidates(listed, odds, z, V, run, lowest, largest, temperature)
    # This lane has the entries listed[first:last:WARP], as many as the other lanes.  Loops of
    # int32 need fewer registers.
    first = i32(cuda.threadIdx.x // WARP * run + cuda.threadIdx.x % WARP)
    last = i32(first + n)
    # candidates with a key above `least` are kept, and the first n_least with this key
    least, n_least = u32(0), f64(0)
    for by_count in (True, False):           # by top-k, and by top-p
        want = draw[TOP_K] if by_count else max(draw[TOP_P] * total, 1e-99)
        if (0 < want < V) if by_count else draw[TOP_P] < 1:
            key, most = cutoff_of(listed, odds, first, last, want, by_count)
            if key > least or key == least and most < n_least:
                least, n_least = key, most
    ties, kept = f64(0), f64(0)              # ties: candidates with the key `least`
    for i in range(first, last, WARP):
        ties += f64(cuda.popc(u32(cuda.ballot_sync(ALL, key_of(listed[i]) == least))))
    seen, _ = sum_over_warps(ties)           # the ties of the warps before
    for i in range(first, last, WARP):
        key, mine = key_of(listed[i]), odds[i]
        lanes = u32(cuda.ballot_sync(ALL, key == least))
        if key < least or key == least and seen + rank_among(lanes) > n_least or mine < draw[MIN_P]:
            odds[i], mine = f64(0), f64(0)
        kept += mine
        seen += f64(cuda.popc(lanes))
    kept = warp_sum(kept)
    start, whole = sum_over_warps(kept)
    target = draw[UNIFORM] * whole
    if start <= target < start + kept:       # the token is one of this warp's
        at, begins = first, start
        for i in range(first, last, WARP):
            group = warp_sum(odds[i])
            if group > 0 and start <= target:
                at, begins = i32(i), start   # the last 32 entries whose sums begin up to target
            start += group
        mine = odds[at]
        begins += prefix_sum(mine) - mine    # the sum of all odds before this entry
        found = warp_max(at if mine > 0 and begins <= target else i32(-1))
        token[0] = i32(u32(listed[found]))

@made_once
def choose_kernel(hopper):
    """Makes `choose`, the last kernel of a step that samples."""
    take_turn = after_previous if hopper else at_once

    @cuda_kernel(launch_bounds=(THREADS, 1))
    def choose(ids, latest, odds, listed, out, draws, rows, V):
        """ids[ring, line] = the token that nanoeuler.sample would return for out[line, :V] and the
        SampleRequest draws[ring, line], or -1 if the largest logit is not finite.
        grid lines, THREADS threads
        ids (2, MOST_ROWS) int32, draws (2, MOST_ROWS, DRAW_FIELDS) float64: in the host's memory
        latest (AT_ONCE,) int32: a copy of the ids for `advance_kernel`
        odds float64, listed uint64: scratch memory, (at least lines, room_for_list(V)) each
        out (lines, V + C)"""
        block, line = cuda.blockIdx.x, table_entry(rows, COUNTS, FIRST_LINE) + cuda.blockIdx.x
        here = block < table_entry(rows, COUNTS, N_WANTED)           # the same in the whole block
        ring, t = table_entry(rows, COUNTS, RING), cuda.threadIdx.x
        token, draw = cuda.shared.array(1, types.int32), cuda.shared.array(DRAW_FIELDS, f64)
        if t < DRAW_FIELDS:
            draw[t] = draw_field(draws, (ring * draws.shape[1] + line) * DRAW_FIELDS + t)
        take_turn()
        cuda.syncthreads()                   # all of draw is loaded
        if here:
            z = out[line]
            top_token, best_key = largest_of(z, V)
            finite = math.isfinite(z[top_token])
            if t == 0:
                token[0] = top_token if finite else i32(-1)
            if finite and draw[TEMPERATURE] > 0:
                sample_one(token, z, odds[block], listed[block], V, top_token, best_key, draw)
            cuda.syncthreads()               # the token is written
            if t == 0:
                ids[ring, line], latest[block] = token[0], token[0]
    return choose
