"""Attention as its formula says it: T x T matrices in memory, by the engine's portable product.

What nanoeuler_cuda.py's FlashAttention is measured against, and, for small models, tested against.
"""
import math

import nanoeuler_cuda as nc
from nanoeuler_cuda import (
    ROW_WARPS, WARP, ctype, cuda, cuda_kernel, exp, stored, value, warp_max, warp_sum,
)


@cuda_kernel
def softmax_kernel(p, window, scale):
    """p[b, h, t] = softmax(p[b, h, t, t + 1 - window:t + 1] * scale), zeros elsewhere
    one warp per row     grid (T / ROW_WARPS, B * H), block (32, ROW_WARPS)
    in place: p (B, H, T, T)"""
    H, T = p.shape[1], p.shape[2]
    lane, t = cuda.threadIdx.x, cuda.blockIdx.x * ROW_WARPS + cuda.threadIdx.y
    if t < T:
        b, h = cuda.blockIdx.y // H, cuda.blockIdx.y % H
        row, first = p[b, h, t], max(0, t + 1 - window)
        m = -ctype(p).type(math.inf)
        for j in range(first + lane, t + 1, WARP):
            m = max(m, value(row[j]) * scale)
        m = warp_max(m)
        l = ctype(p).type(0)
        for j in range(first + lane, t + 1, WARP):
            p_j = exp(value(row[j]) * scale - m)
            l += p_j
            row[j] = stored(row, p_j)
        l = warp_sum(l)
        for j in range(lane, T, WARP):
            row[j] = stored(row, value(row[j]) / l if first <= j <= t else ctype(p).type(0))


@cuda_kernel
def softmax_backward_kernel(ds, p, scale):
    """dS = P * (dP - sum_j P_j dP_j) * scale, in place: ds (B, H, T, T) holds dP     as forward"""
    H, T = p.shape[1], p.shape[2]
    lane, t = cuda.threadIdx.x, cuda.blockIdx.x * ROW_WARPS + cuda.threadIdx.y
    if t < T:
        b, h = cuda.blockIdx.y // H, cuda.blockIdx.y % H
        row = ds[b, h, t]
        prob = p[b, h, t]                    # zeros of keys not seen, so that dS is zero, too
        s = ctype(p).type(0)
        for j in range(lane, t + 1, WARP):
            s += value(row[j]) * value(prob[j])
        s = warp_sum(s)
        for j in range(lane, T, WARP):
            row[j] = stored(row, value(prob[j]) * (value(row[j]) - s) * scale)


# Views are made by nc.view: a slice that is not contiguous lets numba-cuda walk over all its rows.
def heads_of(x, T, D, b, first, step, n):
    """The n heads first, first + step, .. of sequence b of x (BT, heads of D columns): a view
    (n, T, D)"""
    width = x.shape[1]
    return nc.view(x, b * T * width + first * D, (n, T, D), (step * D, width, 1))


def maps_of(p, b, first, step):
    """The same heads of p (B, H, T, T): a view (n, T, T)"""
    _, H, T, _ = p.shape
    return nc.view(p, (b * H + first) * T * T, (H // step, T, T), (step * T * T, T, 1))


def parts(probs, qkv, D):
    """For each sequence b, and each r below the number of query heads of a group: (b, r, that
    number, the r-th query head of every group as a function of an array of heads, K, V)"""
    B, H, T, _ = probs.shape
    G = (qkv.shape[1] // D - H) // 2
    for b in range(B):
        k, v = (heads_of(qkv, T, D, b, first, 1, G) for first in (H, H + G))
        for r in range(H // G):
            yield b, r, H // G, lambda x, b=b, r=r: heads_of(x, T, D, b, r, H // G, G), k, v


def naive_forward(o, probs, qkv, T, D, window=0):
    """P = softmax(Q K^T / sqrt(D)),   O = P V     probs (B, H, T, T)"""
    B, H, _, _ = probs.shape
    scale = nc.number(probs, 1 / math.sqrt(D))
    for b, r, step, heads, k, _ in parts(probs, qkv, D):
        nc.batched_matmul(maps_of(probs, b, r, step), heads(qkv), nc.transposed(k))
    grid = nc.cdiv(T, ROW_WARPS), B * H
    nc.launch(softmax_kernel, probs, window or T, scale, grid=grid, block=(WARP, ROW_WARPS))
    for b, r, step, heads, _, v in parts(probs, qkv, D):
        nc.batched_matmul(heads(o), maps_of(probs, b, r, step), v)


def naive_backward(dqkv, dprobs, do, o, probs, qkv, cos, sin, T, D, window=0):
    """dP = dO V^T,   dV = sum P^T dO,   dK = sum dS^T Q,   dQ = dS K: sums over a group's heads.
    The gradient of q and k as they were before RoPE     dprobs (B, H, T, T) is scratch"""
    B, H, _, _ = probs.shape
    G = (qkv.shape[1] // D - H) // 2
    scale = nc.number(probs, 1 / math.sqrt(D))
    for b, r, step, heads, _, v in parts(probs, qkv, D):
        nc.batched_matmul(maps_of(dprobs, b, r, step), heads(do), nc.transposed(v))
    grid = nc.cdiv(T, ROW_WARPS), B * H
    nc.launch(softmax_backward_kernel, dprobs, probs, scale, grid=grid, block=(WARP, ROW_WARPS))
    for b, r, step, heads, k, _ in parts(probs, qkv, D):
        dk, dv = (heads_of(dqkv, T, D, b, first, 1, G) for first in (H, H + G))
        p, ds = (nc.transposed(maps_of(x, b, r, step)) for x in (probs, dprobs))
        nc.batched_matmul(dv, p, heads(do), add=r > 0)
        nc.batched_matmul(dk, ds, heads(qkv), add=r > 0)
        nc.batched_matmul(heads(dqkv), maps_of(dprobs, b, r, step), k)
    nc.rope(dqkv, cos, sin, T, H + G, -1)


def naive_buffers(cfg, B, T, dtype, kept=None):
    """nanoeuler_cuda.buffer_table with P in place of log-sum-exp, and dP in place of delta, both of
    the type of activations."""
    shapes = {"lse": (kept or cfg.n_layer, B, cfg.n_head, T, T), "delta": (B, cfg.n_head, T, T)}
    table = []
    for group, name, shape, kind in nc.buffer_table(cfg, B, T, dtype, kept):
        if name in shapes:
            shape, kind = shapes[name], dtype
        table.append((group, name, shape, kind))
    return table


class NaiveModel(nc.Model):
    """nanoeuler_cuda.Model with such attention."""
    buffer_table = staticmethod(naive_buffers)

    @staticmethod
    def make_ops(top):
        ops = nc.make_ops(top)
        ops.attention_forward, ops.attention_backward = naive_forward, naive_backward
        return ops
