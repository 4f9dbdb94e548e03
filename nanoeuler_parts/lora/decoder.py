"""Decoding with adapters: `Decoder` of nanoeuler.py, and for each row the terms of its adapter.

The weights stay as they are stored.  So one base in memory serves several adapters, each slot has
its own, and a base in int8 does not round an adapter away, as merging would.
"""
from collections import namedtuple

import numpy as np

from bpe import need
from nanoeuler import (
    add_bias, aligned, AttentionScratch, attention, BF16, Cache, Decoder, embed, HAS_BF16,
    head_norm_forward, LONGEST_QUADS, OF_LAYERS, pack, pack_fours, Params, product, QUADS,
    rmsnorm_forward, rope, rounded, Scales, store_kv, swiglu_forward, tile_width, value,
)
from nanoeuler_parts.lora.adapter import adapter_views, MATRICES, shape_of, sites_of
from nanoeuler_parts.lora.base import LayerVectors
from nanoeuler_parts.lora.kernels import jit

# A and B of n adapters: NAME_a (n, L, m R, K) of m stacked projections, NAME_b (n, L, N, R), with R
# the largest rank; an adapter of a lower rank uses a part.  rank, scale (n,): r and alpha / r.
# NAME_rows: the first row of W of each projection, and the end of the last one
Stacked = namedtuple("Stacked", [f"{m}_{x}" for m in MATRICES for x in ("a", "b", "rows")]
                     + ["rank", "scale"])

@jit
def adapt(y, x, a, b, rows, ranks, scale, which, l):
    """y[r] += s (x[r] A^T) B^T, with A and B of adapter which[r]; of -1 nothing
    y (R, N), x (R, K), a (n, L, m most, K), b (n, L, N, most), rows (m + 1,), ranks, scale (n,),
    l: the layer
    One thread computes each row.  Its sums have r terms, in an order that depends on r alone."""
    most = b.shape[3]
    unused, wide = np.empty(most, a.dtype), np.empty(x.shape[1], a.dtype)
    for r in range(len(y)):
        i = which[r]
        if i < 0:
            continue
        rank, row, source, out = ranks[i], x[r], wide, y[r]
        u = unused[:rank]
        for k in range(source.size):
            source[k] = value(row[k])
        for m in range(len(rows) - 1):
            for j in range(rank):
                weights, total = a[i, l, m * most + j], a.dtype.type(0)
                for k in range(source.size):
                    total += source[k] * weights[k]
                u[j] = total * scale[i]
            for n in range(rows[m], rows[m + 1]):
                weights, total = b[i, l, n], a.dtype.type(0)
                for j in range(u.size):
                    total += u[j] * weights[j]
                out[n] = rounded(value(out[n]) + total, y)

@jit
def lora_decode_step(rows, p, scales, cache, work, c, s, which):
    """`decode_step` of nanoeuler.py, with the adapter which[r] for row r     s: Stacked"""
    R, heads, cos, sin, one = len(rows.tokens), c.H + c.G, c.cos, c.sin, c.cos.dtype.type(1)
    x, y, rstd, qkv, att = work.x[:R], work.y[:R], work.rstd[:R], work.qkv[:R], work.att[:R]
    gate_up, swiglu = work.gate_up[:R], work.swiglu[:R]
    no, add = np.int64(0), np.int64(1)
    embed(x, rows.tokens, p.wte, scales.wte)
    for l in range(c.L):
        rmsnorm_forward(y, rstd, x, p.attn_norm[l], c.eps)
        product(qkv, y, p.qkv[l], scales.qkv[l], no)
        adapt(qkv, y, s.qkv_a, s.qkv_b, s.qkv_rows, s.rank, s.scale, which, l)
        if p.qkv_bias.size:
            add_bias(qkv, p.qkv_bias[l])
        if p.q_norm.size:
            head_norm_forward(qkv, work.qk_rstd[:R], p.q_norm[l], p.k_norm[l], c.H, c.eps)
        for r in range(R):
            t = rows.positions[r]
            rope(qkv[r:r + 1], cos[t:t + 1], sin[t:t + 1], heads, one)
        kv = Cache(cache.k[l], cache.v[l])
        store_kv(kv, rows, qkv, c)
        attention(att, qkv, rows, kv, c, AttentionScratch(work.q, work.scores, work.out))
        product(x, att, p.attn_proj[l], scales.attn_proj[l], add)
        adapt(x, att, s.attn_proj_a, s.attn_proj_b, s.attn_proj_rows, s.rank, s.scale, which, l)
        rmsnorm_forward(y, rstd, x, p.mlp_norm[l], c.eps)
        product(gate_up, y, p.gate_up[l], scales.gate_up[l], no)
        adapt(gate_up, y, s.gate_up_a, s.gate_up_b, s.gate_up_rows, s.rank, s.scale, which, l)
        swiglu_forward(swiglu, gate_up)
        product(x, swiglu, p.down[l], scales.down[l], add)
        adapt(x, swiglu, s.down_a, s.down_b, s.down_rows, s.rank, s.scale, which, l)
    n = len(rows.wanted)
    for i in range(n):
        r = rows.wanted[i]
        rmsnorm_forward(work.final[i:i + 1], rstd[:1], x[r:r + 1], p.final_norm, c.eps)
    product(work.logits[:n], work.final[:n], p.lm_head, scales.lm_head, no)

def stacked(cfg, adapters):
    """The Stacked of some adapters     adapters: [(Lora, flat buffer)]"""
    most, L, n = max(lora.rank for lora, _ in adapters), cfg.n_layer, len(adapters)
    arrays = {"scale": np.array([lora.scale for lora, _ in adapters], np.float32),
              "rank": np.array([lora.rank for lora, _ in adapters])}
    for matrix in MATRICES:
        N, K = shape_of(cfg, matrix)
        sites = [x for x in sites_of(cfg, most).values() if x.matrix == matrix]
        a, b = aligned((n, L, len(sites) * most, K), np.float32), aligned((n, L, N, most),
                                                                          np.float32)
        for i, (lora, flat) in enumerate(adapters):
            views = adapter_views(cfg, lora.rank, flat)
            given, r = getattr(views, f"{matrix}_a"), lora.rank
            for m in range(len(sites)):
                a[i, :, m * most:m * most + r] = given[:, m * r:(m + 1) * r]
            b[i, :, :, :r] = getattr(views, f"{matrix}_b")
        arrays |= {f"{matrix}_a": a, f"{matrix}_b": b, f"{matrix}_rows": np.array(
            [sites[0].rows[0], *(x.rows[1] for x in sites)])}
    return Stacked(**arrays)

# ---- weights of a Base
def in_stored_panels(matrices, stored, quads):
    """Like `in_panels` of nanoeuler.py, from matrices (bytes, scale) as they are stored, without a
    copy in float32"""
    size = {"f32": np.float32, "bf16": np.uint16, "int8": np.int8}[stored]
    N, K = matrices[0][0].view(size).shape
    width = tile_width(np.dtype(np.float32))
    dtype, step = {"bf16": (np.int32, 2), "int8": (np.int8, 1)}.get(stored, (np.float32, 1))
    if quads:
        dtype, step = np.uint32, 4
    L, n = len(matrices), -(-N // width)
    panels, scales = aligned((L, n, -(-K // step), width), dtype), aligned((L, n * width),
                                                                          np.float32)
    for l, (w, scale) in enumerate(matrices):
        scales[l, :N] = scale
        if quads:
            pack_fours(panels[l], w.view(size))
        else:
            pack(panels[l], w.view(size).T)
    return panels, scales

class StoredWeights:
    """The Weights of a decoder, in the format in which a Base stores its matrices"""

    def __init__(self, base):
        cfg, stored = base.cfg, base.stored
        longest = max(cfg.n_embd, cfg.n_hidden, cfg.n_head * cfg.head_dim)
        quads = stored == "int8" and QUADS and longest <= LONGEST_QUADS

        def packed(matrices):
            return in_stored_panels(matrices, stored, quads)

        found = {name: packed([(getattr(w, name), getattr(s, name))
                               for w, s in zip(base.weights, base.scales)])
                 for name in Params._fields[OF_LAYERS]}
        wte = packed([base.wte])
        head = wte if cfg.tie_embeddings else packed([base.head])
        matrices = {"wte": (wte[0][0], wte[1][0]), **found, "lm_head": (head[0][0], head[1][0])}
        vectors = {name: np.array([getattr(v, name) for v in base.vectors])
                   for name in LayerVectors._fields}
        self.p = Params(**{name: x for name, (x, _) in matrices.items()}, **vectors,
                        final_norm=base.final_norm.copy())
        self.scales = Scales(**{name: x for name, (_, x) in matrices.items()})
        self.others = None                   # an adapter has no auxiliary heads
        self.input_dtype = BF16 if stored == "bf16" and HAS_BF16 else np.dtype(np.float32)

class LoraDecoder(Decoder):
    """A Decoder of a Base, with some adapters.  A slot uses one of them, or none."""

    def __init__(self, base, adapters, cfg=None, slots=1, length=0):
        """adapters: [(Lora, flat buffer)], at least one.  cfg: that of the base, perhaps with
        another context.  Each slot begins with the first adapter."""
        need(base.stored != "f64", "expected a model in float32, bfloat16 or int8, found float64")
        cfg = cfg or base.cfg
        self.stack, self.kept_as, self.first = stacked(cfg, adapters), base.stored, 0
        self.weights = StoredWeights(base)
        self.begin(cfg, slots, length)
        self.allocate()

    @classmethod
    def over(cls, decoder, adapters):
        """A LoraDecoder that shares the weights of a Decoder.  Its slots begin without an adapter.
        """
        self = object.__new__(cls)
        self.stack, self.kept_as, self.first = stacked(decoder.cfg, adapters), decoder.kept_as, -1
        self.weights = decoder.weights
        self.begin(decoder.cfg, 1, decoder.length)
        self.allocate()
        return self

    def beginning_with(self, adapter):
        """A decoder with these weights and one slot.  Its slot begins with this adapter, and so do
        those of the decoders that its `with_slots` returns."""
        other = self.with_slots(1, self.length)
        other.first = adapter
        other.use(adapter)
        return other

    @staticmethod
    def ready():
        from nanoeuler_parts.kernels import compile_lora_decoding_kernels
        compile_lora_decoding_kernels()

    def begin(self, cfg, slots, length):
        super().begin(cfg, slots, length)
        if self.weights.others is None:      # a Base keeps head 0 alone
            self.heads = 0
        self.of_slot = np.full(len(self.held_ids), self.first)

    def use(self, adapter, slot=0):
        """Sets the adapter of an empty slot: its number, or -1 for none."""
        need(not self.held_ids[slot], f"slot {slot} holds tokens that were read with another "
             f"adapter; empty it first")
        need(-1 <= adapter < len(self.stack.scale), f"expected an adapter from -1 to "
             f"{len(self.stack.scale) - 1}, found {adapter}")
        self.of_slot[slot] = adapter

    def copy(self, source, slot, n):
        self.of_slot[slot] = self.of_slot[source]        # the keys are those of this adapter
        return super().copy(source, slot, n)

    def compute(self, rows):
        lora_decode_step(rows, self.weights.p, self.weights.scales, self.cache, self.work,
                         self.constants, self.stack, self.of_slot[rows.slots])
        return self.work.logits[:len(rows.wanted)]
