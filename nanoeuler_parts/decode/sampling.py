"""Sampling on the device: `choose`, the last kernel of a step.

`choose` samples as nanoeuler.sample does, with one block per line of logits, in float64 and with
the host's random number.  So one seed gives the same tokens on the CPU and here, as long as the
logits agree.  The odds of a token are e^((z - max z) / temperature): its probability divided by
that of the most probable token.
"""
import math

from numba import cuda, types
from numba.cuda.libdevice import float_as_int

import nanoeuler as ne
from nanoeuler_cuda import WARP, warp_max, warp_sum
from nanoeuler_parts.decode.table import COUNTS, FIRST_LINE, N_WANTED, RING, table_entry
from nanoeuler_parts.gpu.launches import cuda_kernel, inlined, made_once
from nanoeuler_parts.gpu.numbers import ctype, f32, f64, i32, i64, u32, u64
from nanoeuler_parts.tensor_cores.ptx import (
    after_previous, at_once, global_address, load_relaxed_f64,
)

THREADS = WARP * WARP                        # of the block that samples a token
LOG2_THREADS = THREADS.bit_length() - 1
DRAW_FIELDS = len(ne.SampleRequest._fields)
TEMPERATURE, TOP_K, TOP_P, MIN_P, UNIFORM = map(
    ne.SampleRequest._fields.index, ("temperature", "top_k", "top_p", "min_p", "uniform"))

def over_block(over_warp):
    """Makes the device function that combines x over THREADS threads: within each warp, then over
    the warps, of which there are as many as lanes."""
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
def argmax_of(z, V):
    """Returns the index of the largest of z[:V], the first one if several are equal."""
    best = i64(0)
    for i in range(cuda.threadIdx.x, V, 4 * THREADS):
        for j in range(4):                   # four loads in flight together
            at = min(i + THREADS * j, V - 1)
            best = max(best, i64(sort_key(z[at])) << 31 | i64(0x7FFFFFFF - at))
    return i32(0x7FFFFFFF - (block_max(best) & 0x7FFFFFFF))

@inlined
def cutoff_of(z, odds, V, largest, want, by_count):
    """Finds where top-k or top-p cuts off.  In descending order, the logits z[:V] are kept until
    the sum of their odds reaches `want`, or, if by_count, until their number does.

    Returns the key (`sort_key`) of the last kept logit, and how many logits with this key are kept.
    The key is found by bisection, from its highest bit to its lowest.  largest: max z[:V]"""
    key, above, of_each = u32(0), f64(0), f64(0)
    for bit in range(33):                    # bit 32: what is reached above the key alone
        higher = u32(key | u32(0x80000000) >> u32(bit)) if bit < 32 else u32(key + u32(1))
        reached = f64(0)
        for i in range(cuda.threadIdx.x, V, 4 * THREADS):
            for j in range(4):               # four loads in flight together
                at = min(i + THREADS * j, V - 1)
                found, each = sort_key(z[at]), f64(1) if by_count else odds[at]
                reached += each if i + THREADS * j < V and found >= higher else f64(0)
                of_each = each if found == key else of_each
        reached = block_sum(reached)
        if bit == 32:
            above = reached
        elif reached >= want and higher <= sort_key(largest):
            key, of_each = higher, f64(0)
    return key, max(f64(1), math.ceil((want - above) / block_max(of_each)))

@inlined
def prefix_sums(x):
    """Returns the inclusive prefix sums of the x of the block's threads, in shared memory."""
    sums, t = cuda.shared.array(THREADS, f64), cuda.threadIdx.x
    sums[t] = x
    cuda.syncthreads()
    for i in range(LOG2_THREADS):
        earlier = sums[t - (1 << i)] if t >= 1 << i else f64(0)
        cuda.syncthreads()
        sums[t] += earlier
        cuda.syncthreads()
    return sums

@inlined
def sample_one(token, z, odds, V, top_token, draw):
    """token[0] = a token sampled from the logits z[:V] by a block.
    odds: scratch memory for V numbers; top_token: argmax z; draw: a SampleRequest"""
    t, largest, total = cuda.threadIdx.x, z[top_token], f64(0)
    for i in range(t, V, THREADS):
        odds[i] = math.exp((f64(z[i]) - f64(largest)) / max(draw[TEMPERATURE], 1e-99))
        total += odds[i]
    total = block_sum(total)                 # includes barriers: all odds are written
    # tokens with a key above `least` are kept, and the first n_least with this key
    least, n_least = u32(0), f64(V)
    for by_count in (True, False):           # by top-k, and by top-p
        want = draw[TOP_K] if by_count else draw[TOP_P] * total
        if (0 < want < V) if by_count else draw[TOP_P] < 1:
            key, n = cutoff_of(z, odds, V, largest, want, by_count)
            if key > least or key == least and n < n_least:
                least, n_least = key, n
    each = (V + THREADS - 1) // THREADS      # from here, a thread has a run of neighbours
    first, last = min(t * each, V), min(t * each + each, V)
    mine = f64(0)                            # how many of its tokens have the key `least`
    for i in range(first, last):
        mine += f64(1) if sort_key(z[i]) == least else f64(0)
    seen, kept = prefix_sums(mine)[t] - mine, f64(0)     # with this key in threads before
    for i in range(first, last):
        key = sort_key(z[i])
        seen += f64(1) if key == least else f64(0)
        if key < least or key == least and seen > n_least or odds[i] < draw[MIN_P]:
            odds[i] = f64(0)
        kept += odds[i]
    sums = prefix_sums(kept)
    whole = sums[THREADS - 1]
    target = draw[UNIFORM] * whole
    passed = sums[t] > target or sums[t] == whole    # equal: rounding made target the whole
    first_thread = -block_max(-t if passed else -THREADS)    # the token is one of this thread's
    if t == first_thread:
        s, token[0] = sums[t] - kept, -1
        for i in range(first, last):
            if odds[i] > 0 and (token[0] < 0 or s <= target):
                token[0] = i
            s += odds[i]
        if token[0] < 0:                     # rounding left this thread no token
            token[0] = top_token

@made_once
def choose_kernel(hopper):
    """Makes `choose`, the last kernel of a step that samples."""
    take_turn = after_previous if hopper else at_once

    @cuda_kernel(launch_bounds=(THREADS, 1))
    def choose(ids, latest, odds, out, draws, rows, V):
        """ids[ring, line] = the token that nanoeuler.sample would return for out[line, :V] and the
        SampleRequest draws[ring, line], or -1 if the largest logit is not finite.
        grid lines, THREADS threads
        ids (2, MOST_ROWS) int32, draws (2, MOST_ROWS, DRAW_FIELDS) float64: in the host's memory
        latest (AT_ONCE,) int32: a copy of the ids for `advance_kernel`
        odds (AT_ONCE, V) float64: scratch memory; out (lines, V + C)"""
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
            top_token = argmax_of(z, V)
            finite = math.isfinite(z[top_token])
            if finite and draw[TEMPERATURE] > 0:
                sample_one(token, z, odds[block], V, top_token, draw)
            elif t == 0:
                token[0] = top_token if finite else i32(-1)
            cuda.syncthreads()               # the token is written
            if t == 0:
                ids[ring, line], latest[block] = token[0], token[0]
    return choose
