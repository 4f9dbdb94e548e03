"""Norms of q and k (section 4.8 of nanoeuler_cuda.py) for the rows of a step: `norm_and_rotate`.

RoPE turns pairs of numbers of a head, and comes after the norm, which needs all numbers of the
head.  A block of `qkv` computes 16 of them, so it can do neither.  In a model with such norms, qkv
leaves both to this kernel, which runs between qkv and `attend`.
"""
from numba import cuda
from numba.cuda.libdevice import fmul_rn, rsqrtf

from nanoeuler_cuda import filled, WARP, warp_sum
from nanoeuler_parts.decode.table import COUNTS, N_ROWS, POSITION, SLOT, table_entry
from nanoeuler_parts.gpu.launches import cuda_kernel, inlined, made_once
from nanoeuler_parts.gpu.numbers import f32, u32, u64, vector
from nanoeuler_parts.tensor_cores.ptx import after_previous, at_once, lane_id, warp_id

HEADS_PER_BLOCK = 8                          # heads of q and k per block: a warp has one

@made_once
def norm_and_rotate_kernel(D, hopper):
    """Makes `norm_and_rotate` for heads of D numbers."""
    HALF = D // 2
    PAIRS = -(-HALF // WARP)                 # pairs (i, i + D / 2) per lane, at most
    load_1, store_1 = vector(1)
    take_turn = after_previous if hopper else at_once

    @inlined
    def normalize(x, start, gain, cos, sin, position, eps):
        """x = RoPE(gain * x / sqrt(mean(x^2) + eps)) for the D numbers of x from index `start`"""
        u, v, squares = filled(PAIRS, f32(0)), filled(PAIRS, f32(0)), f32(0)
        for j in range(PAIRS):
            i = lane_id() + u32(WARP * j)
            if i < HALF:
                first, second = load_1(x, start + u64(i)), load_1(x, start + u64(i + u32(HALF)))
                u[j], v[j] = first[0], second[0]
                squares = cuda.fma(u[j], u[j], squares)
                squares = cuda.fma(v[j], v[j], squares)
        rstd = rsqrtf(cuda.fma(warp_sum(squares), f32(1 / D), eps))
        out = filled(1, f32(0))
        for j in range(PAIRS):
            i = lane_id() + u32(WARP * j)
            if i < HALF:
                a = fmul_rn(gain[i], fmul_rn(u[j], rstd))
                b = fmul_rn(gain[i + u32(HALF)], fmul_rn(v[j], rstd))
                c, s = cos[position, i], sin[position, i]
                out[0] = cuda.fma(a, c, -fmul_rn(b, s))
                store_1(x, start + u64(i), out)
                out[0] = cuda.fma(b, c, fmul_rn(a, s))
                store_1(x, start + u64(i + u32(HALF)), out)

    @cuda_kernel
    def norm_and_rotate(q, kc, q_gain, k_gain, cos, sin, rows, eps):
        """RMSNorm and RoPE of the heads of q, and of the new keys in the cache, in place
        One warp per head.     grid (ceil((H + G) / HEADS_PER_BLOCK), rows), 256 threads
        q (AT_ONCE, HD), kc (slots, G, T, D) of a layer, q_gain, k_gain (D,)"""
        head, r = u32(cuda.blockIdx.x) * u32(HEADS_PER_BLOCK) + warp_id(), u32(cuda.blockIdx.y)
        H, G, T = u32(q.shape[1] // D), u32(kc.shape[1]), u64(kc.shape[2])
        here = r < table_entry(rows, COUNTS, N_ROWS) and head < H + G    # the same in a whole warp
        position, slot = u32(table_entry(rows, POSITION, r)), u32(table_entry(rows, SLOT, r))
        take_turn()
        if here and head < H:
            normalize(q, (u64(r) * u64(H) + u64(head)) * u64(D), q_gain, cos, sin, position, eps)
        if here and head >= H:
            plane = u64(slot) * u64(G) + u64(head - H)
            normalize(kc, (plane * T + u64(position)) * u64(D), k_gain, cos, sin, position, eps)
    return norm_and_rotate
