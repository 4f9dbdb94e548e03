"""Attention as its formula says it: T x T matrices in memory, by the engine's portable product.

What nanoeuler_cuda.py's FlashAttention is measured against, and, for small models, tested against.
"""
import math

import nanoeuler_cuda as nc
from nanoeuler_cuda import ROWS, WARP, ctype, cuda, exp, kernel, stored, value, warp_max, warp_sum


@kernel
def softmax_kernel(p, scale):
    """p[z, h, t] = softmax(p[z, h, t, :t + 1] * scale), zeros behind     one warp a row
    grid (T / ROWS, Z * H), block (32, ROWS)     in place: p (Z, H, T, T)"""
    T, H = p.shape[2], p.shape[1]
    lane, t = cuda.threadIdx.x, cuda.blockIdx.x * ROWS + cuda.threadIdx.y
    if t < T:
        row, m = p[cuda.blockIdx.y // H, cuda.blockIdx.y % H, t], -ctype(p).type(math.inf)
        for j in range(lane, t + 1, WARP):
            m = max(m, value(row[j]) * scale)
        m, l = warp_max(m), ctype(p).type(0)
        for j in range(lane, t + 1, WARP):
            p_j = exp(value(row[j]) * scale - m)
            l += p_j
            row[j] = stored(row, p_j)
        l = warp_sum(l)
        for j in range(lane, T, WARP):
            row[j] = stored(row, value(row[j]) / l if j <= t else ctype(p).type(0))


@kernel
def softmax_backward_kernel(ds, p, scale):
    """dS = P * (dP - sum_j P_j dP_j) * scale, in place: ds (Z, H, T, T) holds dP     as forward"""
    T, H = p.shape[2], p.shape[1]
    lane, t = cuda.threadIdx.x, cuda.blockIdx.x * ROWS + cuda.threadIdx.y
    if t < T:
        z, h = cuda.blockIdx.y // H, cuda.blockIdx.y % H
        row, prob, s = ds[z, h, t], p[z, h, t], ctype(p).type(0)
        for j in range(lane, t + 1, WARP):
            s += value(row[j]) * value(prob[j])
        s = warp_sum(s)
        for j in range(lane, T, WARP):
            row[j] = stored(row, value(prob[j]) * (value(row[j]) - s) * scale)


def heads_of(x, T, D):
    """x (BT, heads D) as (B, heads, T, D): a view."""
    BT, width = x.shape
    return nc.view(x, 0, (BT // T, width // D, T, D), (T * width, D, width, 1))


def split_heads(qkv, T, D, H):
    """Q (B, H, T, D), K and V (B, G, T, D): views."""
    heads, G = heads_of(qkv, T, D), (qkv.shape[1] // D - H) // 2
    return heads[:, :H], heads[:, H:-G], heads[:, -G:]


def naive_forward(o, probs, qkv, T, D):
    """P = softmax(Q K^T / sqrt(D)),   O = P V     probs (B, H, T, T)"""
    (B, H, _, _), scale = probs.shape, nc.number(probs, 1 / math.sqrt(D))
    q, k, v = split_heads(qkv, T, D, H)
    nc.batched_matmul(probs, q, nc.transposed(k))
    nc.launch(softmax_kernel, (-(-T // ROWS), B * H), (WARP, ROWS), probs, scale)
    nc.batched_matmul(heads_of(o, T, D), probs, v)


def naive_backward(dqkv, dprobs, do, o, probs, qkv, cos, sin, T, D):
    """dP = dO V^T,   dV = sum P^T dO,   dK = sum dS^T Q,   dQ = dS K: sums over a group's heads.
    The gradient of q and k as they were before RoPE     dprobs (B, H, T, T) is scratch"""
    (B, H, _, _), scale = probs.shape, nc.number(probs, 1 / math.sqrt(D))
    (q, k, v), (dq, dk, dv) = (split_heads(x, T, D, H) for x in (qkv, dqkv))
    do, step = heads_of(do, T, D), H // k.shape[1]       # a group's r-th heads: r, r + step, ...
    nc.batched_matmul(dprobs, do, nc.transposed(v))
    nc.launch(softmax_backward_kernel, (-(-T // ROWS), B * H), (WARP, ROWS), dprobs, probs, scale)
    for r in range(step):
        nc.batched_matmul(dv, nc.transposed(probs[:, r::step]), do[:, r::step], add=r > 0)
        nc.batched_matmul(dk, nc.transposed(dprobs[:, r::step]), q[:, r::step], add=r > 0)
    nc.batched_matmul(dq, dprobs, k)
    nc.rope(dqkv, cos, sin, T, H + k.shape[1], -1)


def naive_buffers(cfg, B, T, dtype):
    """nanoeuler_cuda.buffer_table with P for log-sum-exp, and its gradient for delta."""
    P = B, cfg.n_head, T, T
    shapes = {"lse": (cfg.n_layer, *P), "delta": P}
    return [(group, name, shapes.get(name, shape), dtype if name in shapes else kind)
            for group, name, shape, kind in nc.buffer_table(cfg, B, T, dtype)]


class NaiveModel(nc.Model):
    """nanoeuler_cuda.Model with such attention."""
    buffer_table, attention = staticmethod(naive_buffers), (naive_forward, naive_backward)
