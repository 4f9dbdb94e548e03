"""The forward and backward pass of one layer with LoRA, and of the output head, compiled.

The layer is that of nanoeuler.py, section 15, with three differences:
  - A product with a frozen matrix W reads W as its file stores it.  The threads share the columns
    of the result.  For `width` of them, a thread packs the part of W that it needs into a panel,
    and multiplies the panel with all rows.  So W is converted once per product.  If the panels of
    all matrices fit into a part of the memory, they are packed once and kept (`Kept`), which
    changes no bit.  Otherwise W is never held in memory a second time.
  - To each product the term of A and B is added, as r more rows of the same panel.
  - Only A and B get gradients.  The activations of a layer may be computed again before its
    backward pass, because they are the output of `layer_forward` for the same input.

M = B T rows: the sequences of a micro-batch, one after the other.  In float32 and float64, the
inputs of products (operands) have the same type as all other numbers.  In bfloat16 they are rounded
copies.  One thread computes each number, in one order, whatever the number of threads is.

For y = x W^T + s (x A^T) B^T, with u = s x A^T and v = s dy B, all M rows at once:

    forward     y  = x W^T + u B^T
    backward    dx = dy W + v A,    dA += v^T x,    dB += dy^T u
"""
from collections import namedtuple

import numpy as np
from numba import prange

import bpe
import nanoeuler
from nanoeuler import (
    add_bias, blocked_attention_backward, blocked_attention_forward, cross_entropy, each,
    head_norm_backward, head_norm_forward, MR, pack, rmsnorm_backward, rmsnorm_forward, rope,
    rounded, shared, swiglu_backward, swiglu_forward, Team, tile, tiled_matmul, value,
    weight_gradient,
)
from nanoeuler_parts.machine.compiling import FILES, OPTIONS
from nanoeuler_parts.machine.counters import counters
from nanoeuler_parts.machine.numbers import panel_rows

OUR_FILES = [*FILES, nanoeuler.__file__]
jit = bpe.jit(files=OUR_FILES, **OPTIONS)
jit_parallel = bpe.jit(files=OUR_FILES, parallel=True, **OPTIONS)

KB = 1024            # terms of a sum for which a panel of W is packed at once: it stays in L2
GAP = 16             # entries between the rows of a block, so that they use different sets of L1
PARTS = 4            # parts of a loop for each thread: a thread that is slowed down takes fewer

# Settings of a pass: B sequences of T tokens, the rank r, and s = alpha / r
Sizes = namedtuple("Sizes", "B T rank scale")
# The activations of a layer, M = B T rows.  Names as in Acts of nanoeuler.py, and u_NAME: u of each
# stacked matrix (M, n r).  x1 is the residual stream after attention.
LayerActs = namedtuple("LayerActs", "x attn_in attn_rstd u_qkv qk qk_rstd qkv att lse u_attn_proj "
                                    "x1 mlp_in mlp_rstd u_gate_up gate_up swiglu u_down")
# Gradients of a layer's activations.  dx receives that of the layer's output and becomes that of
# its input.  dy_NAME: operands, the gradient of the output of each stacked matrix; v_NAME: its v
# (M, n r).  y and u are unrounded sums.
LayerGrads = namedtuple("LayerGrads", "dx dx1 dnorm dswiglu datt_sum datt dqkv dy_qkv dy_attn_proj "
                                      "dy_gate_up dy_down v_qkv v_attn_proj v_gate_up v_down y u")
# A and B of a layer in packed panels (nanoeuler.py, section 12).  at_NAME: A^T (K, n r); a_NAME: A
# (n r, K); bt_NAME: B^T (r, N), a panel for each task of `product_tasks`; b_q and so on: B (N, r)
AdapterPanels = namedtuple("AdapterPanels", [
    *(f"{kind}_{m}" for kind in ("at", "a", "bt") for m in ("qkv", "attn_proj", "gate_up", "down")),
    *(f"b_{name}" for name in ("q", "k", "v", "o", "gate", "up", "down"))])
# Gradients of A and B of a layer, as in Adapter without the axis of layers
AdapterGrads = namedtuple("AdapterGrads", "qkv_a qkv_b attn_proj_a attn_proj_b gate_up_a gate_up_b "
                                          "down_a down_b")
# The tasks of each stacked matrix (n, 3): first and end column, and the first column in u
Tasks = namedtuple("Tasks", "qkv attn_proj gate_up down")
# The packed panels of a frozen matrix W (N, K).  forward: of x W^T, for each task (n, K, width);
# backward: of dy W, (ceil(K / width), N, width).  Both are empty, with n = 0, if they are not kept
Kept = namedtuple("Kept", "forward backward")
# Of one layer, both of each stacked matrix
LayerKept = namedtuple("LayerKept", [f"{m}_{x}" for m in ("qkv", "attn_proj", "gate_up", "down")
                                     for x in ("forward", "backward")])
# Working memory of a thread.  block: rows of W in the dtype of the computation; panel: packed from
# them.  The others as in Scratch of nanoeuler.py
LoraScratch = namedtuple("LoraScratch", "block panel scores dscores kt vt dy_panels x_panels")

# ---- frozen matrices
@jit
def read_row(out, row, scale, size, k0):
    """out[j] = W[n, k0 + j]     out (w,), row: the bytes of W[n]; size: bytes of a number; scale[n]
    """
    count, first = out.size, k0 * size
    end = first + count * size
    if size == 1:
        small = row[first:end].view(np.int8)
        for j in range(count):
            out[j] = scale * small[j]
    elif size == 2:
        half = row[first:end].view(np.uint16)
        for j in range(count):
            out[j] = value(half[j])
    elif size == 4:
        single = row[first:end].view(np.float32)
        for j in range(count):
            out[j] = single[j]
    else:
        double = row[first:end].view(np.float64)
        for j in range(count):
            out[j] = double[j]

@jit
def pack_of_rows(panel, block, w, scale, size, n0, n1, k0, k1):
    """Packs W[n0:n1, k0:k1]^T: the panel of columns n0 to n1 of x W^T
    panel (1, rows, width), block (width, KB + GAP)"""
    for n in range(n0, n1):
        read_row(block[n - n0, :k1 - k0], w[n], scale[n], size, k0)
    pack(panel[:, :panel_rows(k1 - k0, panel.dtype)], block[:n1 - n0, :k1 - k0].T)

@jit
def pack_of_columns(panel, block, w, scale, size, n0, n1, k0, k1):
    """Packs W[n0:n1, k0:k1]: the panel of columns k0 to k1 of dy W
    panel (1, rows, width), block (.., KB + GAP), of which KB rows of `width` numbers are used"""
    rows = block.reshape(-1)[:(n1 - n0) * (k1 - k0)].reshape(n1 - n0, k1 - k0)
    for n in range(n0, n1):
        read_row(rows[n - n0], w[n], scale[n], size, k0)
    pack(panel[:, :panel_rows(n1 - n0, panel.dtype)], rows)

@jit
def keep_panels(i, kept, w, scale, tasks, K, block):
    """Packs the panels of task i of the forward product, and panel i of the backward product.
    kept: Kept, w bytes of W (N, K), block as in LoraScratch"""
    size, width = w.shape[1] // K, kept.forward.shape[2]
    if i < len(kept.forward):
        for k0 in range(0, K, KB):
            k1, first = min(K, k0 + KB), panel_rows(k0, kept.forward.dtype)
            pack_of_rows(kept.forward[i:i + 1, first:], block, w, scale, size, tasks[i, 0],
                         tasks[i, 1], k0, k1)
    if i < len(kept.backward):
        for n0 in range(0, len(w), KB):
            n1, first = min(len(w), n0 + KB), panel_rows(n0, kept.backward.dtype)
            pack_of_columns(kept.backward[i:i + 1, first:], block, w, scale, size, n0, n1,
                            i * width, min(K, (i + 1) * width))

@jit
def product(team, out, base, add, x, w, scale, kept, tasks, u, bt, rank, s):
    """out = x W^T + u B^T, + base if add
    out, base (M, N), x (M, K) and u (M, n r) operands, w bytes of W (N, K), kept: Kept.forward of
    it, tasks as in Tasks, bt as in AdapterPanels.  With rank 0 there is no u B^T.  s: LoraScratch
    """
    M, K = x.shape
    size = w.shape[1] // K
    for i in each(team, len(tasks)):
        n0, n1, u0 = tasks[i]
        columns, before = out[:, n0:n1], base[:, n0:n1]
        for k0 in range(0, K, KB):
            k1 = min(K, k0 + KB)
            n, first = panel_rows(k1 - k0, s.panel.dtype), panel_rows(k0, s.panel.dtype)
            part, right = x[:, k0:k1], s.panel[:, :n]
            if len(kept):
                right = kept[i:i + 1, first:first + n]
            else:
                pack_of_rows(s.panel, s.block, w, scale, size, n0, n1, k0, k1)
            if k0 == 0:
                for m in range(0, M, MR):
                    tile(columns, before, part, right, m, 0, add)
            else:
                for m in range(0, M, MR):
                    tile(columns, columns, part, right, m, 0, 1)
        if rank:
            part, right = u[:, u0:u0 + rank], bt[i:i + 1]
            for m in range(0, M, MR):
                tile(columns, columns, part, right, m, 0, 1)

@jit
def product_backward(team, dx, dy, w, scale, kept, v, a, rank, s):
    """dx = dy W + v A     dx (M, K), dy (M, N) and v (M, n r) operands, w bytes of W (N, K), kept:
    Kept.backward of it, a: A in panels.  With rank 0 there is no v A.
    dy may be larger than the cache: of the logits it has M V numbers.  So all panels of a thread's
    part use a block of dy before the next block is read."""
    (M, K), N, width = dx.shape, dy.shape[1], s.panel.shape[2]
    size = w.shape[1] // K
    for k_first, k_end in shared(team, K, width):
        for n0 in range(0, N, KB):
            n1 = min(N, n0 + KB)
            n, first = panel_rows(n1 - n0, s.panel.dtype), panel_rows(n0, s.panel.dtype)
            part, right = dy[:, n0:n1], s.panel[:, :n]
            for k0 in range(k_first, k_end, width):
                k1 = min(k_end, k0 + width)
                columns = dx[:, k0:k1]
                if len(kept):
                    i = k0 // width
                    right = kept[i:i + 1, first:first + n]
                else:
                    pack_of_columns(s.panel, s.block, w, scale, size, n0, n1, k0, k1)
                for m in range(0, M, MR):
                    tile(columns, columns, part, right, m, 0, 1 if n0 else 0)
        if rank:
            for k0 in range(k_first, k_end, width):
                columns = dx[:, k0:min(k_end, k0 + width)]
                right = a[k0 // width:k0 // width + 1]
                for m in range(0, M, MR):
                    tile(columns, columns, v, right, m, 0, 1)

# ---- A and B
@jit
def pack_b(bt, b, tasks):
    """Packs B (N, r): bt[i] = B[n0:n1]^T for the columns n0 to n1 of task i"""
    for i in range(len(tasks)):
        n0, n1, _ = tasks[i]
        pack(bt[i:i + 1], b[n0:n1].T)

@jit_parallel
def run_packing(p, g, tasks, q1, k1, n_hidden):
    """Packs A and B of a layer.     p: AdapterPanels; g: A and B, a namedtuple as AdapterGrads
    q1, k1: the rows of B of qkv at which those of q and of k end"""
    for i in prange(8):
        if i == 0:
            pack(p.at_qkv, g.qkv_a.T)
            pack(p.a_qkv, g.qkv_a)
            pack(p.b_q, g.qkv_b[:q1])
        elif i == 1:
            pack_b(p.bt_qkv, g.qkv_b, tasks.qkv)
            pack(p.b_k, g.qkv_b[q1:k1])
            pack(p.b_v, g.qkv_b[k1:])
        elif i == 2:
            pack(p.at_attn_proj, g.attn_proj_a.T)
            pack(p.a_attn_proj, g.attn_proj_a)
        elif i == 3:
            pack_b(p.bt_attn_proj, g.attn_proj_b, tasks.attn_proj)
            pack(p.b_o, g.attn_proj_b)
        elif i == 4:
            pack(p.at_gate_up, g.gate_up_a.T)
            pack(p.a_gate_up, g.gate_up_a)
            pack(p.b_gate, g.gate_up_b[:n_hidden])
        elif i == 5:
            pack_b(p.bt_gate_up, g.gate_up_b, tasks.gate_up)
            pack(p.b_up, g.gate_up_b[n_hidden:])
        elif i == 6:
            pack(p.at_down, g.down_a.T)
            pack(p.a_down, g.down_a)
        else:
            pack_b(p.bt_down, g.down_b, tasks.down)
            pack(p.b_down, g.down_b)

# ---- rows of A and B
@jit
def store(to, x, factor):
    """to = factor * x, rounded as the operand `to` holds it     to, x (t, n)"""
    for t in range(len(x)):
        row, source = to[t], x[t]
        for j in range(row.size):
            row[j] = rounded(source[j] * factor, to)

@jit
def times_a(u, total, x, at, scale):
    """u = s x A^T     u (t, n r), x (t, K) operands, total (t, n r) scratch, at: A^T in panels"""
    tiled_matmul(total, x, at)
    store(u, total, scale)

@jit
def times_b(v, total, dy, b, scale):
    """v = s dy B     v (t, r), dy (t, N) operands, total (t, r) scratch, b: B in panels"""
    tiled_matmul(total, dy, b)
    store(v, total, scale)

# ---- a layer
@jit
def layer_forward(team, x2, has_output, a, y, total, w, scales, kept, v, p, tasks, c, size, s):
    """x1 = x + attention(rmsnorm(x)),   x2 = x1 + swiglu(rmsnorm(x1))     x2 (M, C)
    has_output: x2 is computed; otherwise a alone
    a: LayerActs, of which x is the input; y (M, QKV), total (M, 3 r) scratch; w LayerWeights,
    scales LayerScales, kept LayerKept, v LayerVectors, p AdapterPanels, c Constants, size: Sizes,
    s: LoraScratch"""
    M, T, H, G, D, r = len(a.x), size.T, c.H, c.G, c.D, size.rank
    one, factor = c.cos.dtype.type(1), c.cos.dtype.type(size.scale)
    no, yes = np.int64(0), np.int64(1)       # a literal would compile `product` again
    for t0, t1 in shared(team, M, MR):
        rmsnorm_forward(a.attn_in[t0:t1], a.attn_rstd[t0:t1], a.x[t0:t1], v.attn_norm, c.eps)
        times_a(a.u_qkv[t0:t1], total[t0:t1, :a.u_qkv.shape[1]], a.attn_in[t0:t1], p.at_qkv, factor)
    product(team, y, y, no, a.attn_in, w.qkv, scales.qkv, kept.qkv_forward, tasks.qkv, a.u_qkv,
            p.bt_qkv, r, s)
    for t0, t1 in shared(team, M, MR):
        rows = y[t0:t1]
        if v.qkv_bias.size:
            add_bias(rows, v.qkv_bias)
        if v.q_norm.size:
            a.qk[t0:t1] = rows[:, :(H + G) * D]
            head_norm_forward(rows, a.qk_rstd[t0:t1], v.q_norm, v.k_norm, H, c.eps)
        for m in range(t0, t1):
            t = m % T
            rope(y[m:m + 1], c.cos[t:t + 1], c.sin[t:t + 1], H + G, one)
        store(a.qkv[t0:t1], rows, one)
    for i in each(team, size.B * G):         # a key head at a time: its query heads share K^T
        b, g = i // G, i % G
        m0, m1 = b * T, (b + 1) * T
        blocked_attention_forward(a.att[m0:m1], a.lse[b], a.qkv[m0:m1], c, g * H // G,
                                  (g + 1) * H // G, s)
    for t0, t1 in shared(team, M, MR):
        times_a(a.u_attn_proj[t0:t1], total[t0:t1, :r], a.att[t0:t1], p.at_attn_proj, factor)
    product(team, a.x1, a.x, yes, a.att, w.attn_proj, scales.attn_proj, kept.attn_proj_forward,
            tasks.attn_proj, a.u_attn_proj, p.bt_attn_proj, r, s)
    for t0, t1 in shared(team, M, MR):
        rmsnorm_forward(a.mlp_in[t0:t1], a.mlp_rstd[t0:t1], a.x1[t0:t1], v.mlp_norm, c.eps)
        times_a(a.u_gate_up[t0:t1], total[t0:t1, :2 * r], a.mlp_in[t0:t1], p.at_gate_up, factor)
    product(team, a.gate_up, a.gate_up, no, a.mlp_in, w.gate_up, scales.gate_up,
            kept.gate_up_forward, tasks.gate_up, a.u_gate_up, p.bt_gate_up, r, s)
    for t0, t1 in shared(team, M, MR):
        swiglu_forward(a.swiglu[t0:t1], a.gate_up[t0:t1])
        times_a(a.u_down[t0:t1], total[t0:t1, :r], a.swiglu[t0:t1], p.at_down, factor)
    if has_output:
        product(team, x2, a.x1, yes, a.swiglu, w.down, scales.down, kept.down_forward,
                tasks.down, a.u_down, p.bt_down, r, s)

@jit
def layer_backward(team, a, d, g, w, scales, kept, v, p, tasks, grad_tasks, is_first, c, size, s):
    """`layer_forward` in reverse: d.dx, the gradient of x2, becomes that of x.  Adds the gradients
    of A and B to g.  a.gate_up is replaced by its gradient.
    is_first: of the first layer, whose input is the embedding and needs no gradient"""
    M, T, H, G, D, r = len(a.x), size.T, c.H, c.G, c.D, size.rank
    QKV, HD, F = a.qkv.shape[1], a.att.shape[1], a.swiglu.shape[1]
    one, factor = c.cos.dtype.type(1), c.cos.dtype.type(size.scale)
    q1, k1 = HD, HD + G * D                  # the queries end at column q1, the keys at k1
    for t0, t1 in shared(team, M, MR):
        store(d.dy_down[t0:t1], d.dx[t0:t1], one)
        times_b(d.v_down[t0:t1], d.u[t0:t1, :r], d.dy_down[t0:t1], p.b_down, factor)
    product_backward(team, d.dswiglu, d.dy_down, w.down, scales.down, kept.down_backward, d.v_down,
                     p.a_down, r, s)
    for t0, t1 in shared(team, M, MR):
        swiglu_backward(a.gate_up[t0:t1], d.dswiglu[t0:t1])
        store(d.dy_gate_up[t0:t1], a.gate_up[t0:t1], one)
        times_b(d.v_gate_up[t0:t1, :r], d.u[t0:t1, :r], d.dy_gate_up[t0:t1, :F], p.b_gate, factor)
        times_b(d.v_gate_up[t0:t1, r:], d.u[t0:t1, :r], d.dy_gate_up[t0:t1, F:], p.b_up, factor)
    product_backward(team, d.dnorm, d.dy_gate_up, w.gate_up, scales.gate_up, kept.gate_up_backward,
                     d.v_gate_up, p.a_gate_up, r, s)
    for t0, t1 in shared(team, M, MR):
        rmsnorm_backward(d.dx1[t0:t1], d.dx[t0:t1], d.dnorm[t0:t1], a.x1[t0:t1], v.mlp_norm,
                         a.mlp_rstd[t0:t1])
        store(d.dy_attn_proj[t0:t1], d.dx1[t0:t1], one)
        times_b(d.v_attn_proj[t0:t1], d.u[t0:t1, :r], d.dy_attn_proj[t0:t1], p.b_o, factor)
    product_backward(team, d.datt_sum, d.dy_attn_proj, w.attn_proj, scales.attn_proj,
                     kept.attn_proj_backward, d.v_attn_proj, p.a_attn_proj, r, s)
    for t0, t1 in shared(team, M, MR):
        store(d.datt[t0:t1], d.datt_sum[t0:t1], one)
    for i in each(team, size.B * G):
        b, head = i // G, i % G
        m0, m1 = b * T, (b + 1) * T
        blocked_attention_backward(d.dqkv[m0:m1], d.datt[m0:m1], a.att[m0:m1], a.lse[b],
                                   a.qkv[m0:m1], c, head, head + 1, s)
    for t0, t1 in shared(team, M, MR):
        for m in range(t0, t1):
            t = m % T
            rope(d.dqkv[m:m + 1], c.cos[t:t + 1], c.sin[t:t + 1], H + G, -one)
        if v.q_norm.size:
            head_norm_backward(d.dqkv[t0:t1], a.qk[t0:t1], a.qk_rstd[t0:t1], v.q_norm, v.k_norm, H)
        store(d.dy_qkv[t0:t1], d.dqkv[t0:t1], one)
        dy, u = d.dy_qkv[t0:t1], d.u[t0:t1, :r]
        times_b(d.v_qkv[t0:t1, :r], u, dy[:, :q1], p.b_q, factor)
        times_b(d.v_qkv[t0:t1, r:2 * r], u, dy[:, q1:k1], p.b_k, factor)
        times_b(d.v_qkv[t0:t1, 2 * r:], u, dy[:, k1:QKV], p.b_v, factor)
    if not is_first:
        product_backward(team, d.dnorm, d.dy_qkv, w.qkv, scales.qkv, kept.qkv_backward, d.v_qkv,
                         p.a_qkv, r, s)
        for t0, t1 in shared(team, M, MR):
            rmsnorm_backward(d.dx[t0:t1], d.dx1[t0:t1], d.dnorm[t0:t1], a.x[t0:t1], v.attn_norm,
                             a.attn_rstd[t0:t1])
    for i in each(team, len(grad_tasks)):
        adapter_gradient(grad_tasks[i], a, d, g, s)

A_QKV, A_ATTN_PROJ, A_GATE_UP, A_DOWN, B_QKV, B_ATTN_PROJ, B_GATE_UP, B_DOWN = range(8)

@jit
def add_outer(dw, dy, x, n0, s):
    """dw += dy[:, n0:n0 + n]^T x     dw (n, K), dy (M, N), x (M, K)"""
    weight_gradient(dw, dy[None], x[None], n0, s.dy_panels, s.x_panels)

@jit
def adapter_gradient(task, a, d, g, s):
    """A block of dA += v^T x or of dB += dy^T u     task: (kind, rows n0 to n1, columns k0 to k1)
    Of dB, the columns are those of its projection in u."""
    kind, n0, n1, k0, k1 = task
    if kind == A_QKV:
        add_outer(g.qkv_a[n0:n1, k0:k1], d.v_qkv, a.attn_in[:, k0:k1], n0, s)
    elif kind == A_ATTN_PROJ:
        add_outer(g.attn_proj_a[n0:n1, k0:k1], d.v_attn_proj, a.att[:, k0:k1], n0, s)
    elif kind == A_GATE_UP:
        add_outer(g.gate_up_a[n0:n1, k0:k1], d.v_gate_up, a.mlp_in[:, k0:k1], n0, s)
    elif kind == A_DOWN:
        add_outer(g.down_a[n0:n1, k0:k1], d.v_down, a.swiglu[:, k0:k1], n0, s)
    elif kind == B_QKV:
        add_outer(g.qkv_b[n0:n1], d.dy_qkv, a.u_qkv[:, k0:k1], n0, s)
    elif kind == B_ATTN_PROJ:
        add_outer(g.attn_proj_b[n0:n1], d.dy_attn_proj, a.u_attn_proj[:, k0:k1], n0, s)
    elif kind == B_GATE_UP:
        add_outer(g.gate_up_b[n0:n1], d.dy_gate_up, a.u_gate_up[:, k0:k1], n0, s)
    else:
        add_outer(g.down_b[n0:n1], d.dy_down, a.u_down[:, k0:k1], n0, s)

# ---- passes over a layer and over the head, by all threads
@jit
def scratch_of(i, s):
    """The scratch memory of thread i"""
    return LoraScratch(s.block[i], s.panel[i], s.scores[i], s.dscores[i], s.kt[i], s.vt[i],
                       s.dy_panels[i], s.x_panels[i])

@jit_parallel
def run_forward(x2, has_output, a, y, total, w, scales, kept, v, p, tasks, c, size, s):
    """`layer_forward` by all threads"""
    threads = len(s.block)
    progress, passed = counters(1), counters(threads)
    for thread in prange(threads):
        i = np.int64(thread)
        team = Team(0, PARTS * threads, progress[0], passed[i])
        layer_forward(team, x2, has_output, a, y, total, w, scales, kept, v, p, tasks, c, size,
                      scratch_of(i, s))

@jit_parallel
def run_backward(a, d, g, w, scales, kept, v, p, tasks, grad_tasks, is_first, c, size, s):
    """`layer_backward` by all threads"""
    threads = len(s.block)
    progress, passed = counters(1), counters(threads)
    for thread in prange(threads):
        i = np.int64(thread)
        team = Team(0, PARTS * threads, progress[0], passed[i])
        layer_backward(team, a, d, g, w, scales, kept, v, p, tasks, grad_tasks, is_first, c, size,
                       scratch_of(i, s))

@jit_parallel
def run_keeping(kept, w, scale, tasks, K, block):
    """`keep_panels` for all panels of a matrix     block (threads, width, KB + GAP)"""
    threads, n = len(block), max(len(kept.forward), len(kept.backward))
    for thread in prange(threads):
        for i in range(np.int64(thread), n, threads):
            keep_panels(i, kept, w, scale, tasks, K, block[np.int64(thread)])

# Rows of the output head: x, dx (n, C) float, final_in (n, C) operand, rstd (n,), logits (n, V)
# float, dlogits (n, V) operand, targets (n,) int32, weight and nll (n,) float64.  dx is 0 at first.
Head = namedtuple("Head", "x dx dnorm final_in rstd logits dlogits targets weight nll")

@jit
def head_pass(team, h, gain, w, scale, kept, tasks, eps, has_loss, has_gradient, s):
    """The logits of some rows, their cross-entropy, and the gradient of x, as in `team_forward`,
    `team_loss` and `team_backward` of nanoeuler.py.     h: Head"""
    n, one = len(h.x), gain.dtype.type(1)
    for t0, t1 in shared(team, n, MR):
        rmsnorm_forward(h.final_in[t0:t1], h.rstd[t0:t1], h.x[t0:t1], gain, eps)
    no = np.int64(0)
    product(team, h.logits, h.logits, no, h.final_in, w, scale, kept.forward, tasks,
            h.final_in, s.panel, no, s)
    if has_loss:
        for t0, t1 in shared(team, n, MR):
            cross_entropy(h.nll[t0:t1], h.logits[t0:t1], h.targets[t0:t1], h.weight[t0:t1])
    if has_gradient:
        for t0, t1 in shared(team, n, MR):
            store(h.dlogits[t0:t1], h.logits[t0:t1], one)
        product_backward(team, h.dnorm, h.dlogits, w, scale, kept.backward, h.dlogits, s.panel, no,
                         s)
        for t0, t1 in shared(team, n, MR):
            rmsnorm_backward(h.dx[t0:t1], h.dx[t0:t1], h.dnorm[t0:t1], h.x[t0:t1], gain,
                             h.rstd[t0:t1])

@jit_parallel
def run_head(h, gain, w, scale, kept, tasks, eps, has_loss, has_gradient, s):
    """`head_pass` by all threads"""
    threads = len(s.block)
    progress, passed = counters(1), counters(threads)
    for thread in prange(threads):
        i = np.int64(thread)
        team = Team(0, PARTS * threads, progress[0], passed[i])
        head_pass(team, h, gain, w, scale, kept, tasks, eps, has_loss, has_gradient,
                  scratch_of(i, s))

@jit
def embed_rows(x, tokens, w, scale):
    """x[m] = W[tokens[m]]     x (M, C), w: bytes of W (V, C)"""
    size = w.shape[1] // x.shape[1]
    for m in range(len(x)):
        read_row(x[m], w[tokens[m]], scale[tokens[m]], size, 0)
