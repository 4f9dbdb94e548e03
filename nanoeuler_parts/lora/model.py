"""LoraModel: a frozen model and its adapter, in place of `Model` of nanoeuler.py in a run."""
import math
from typing import NamedTuple

import numpy as np
from numba import get_num_threads

from bpe import need
from nanoeuler import (
    adamw_update, aligned, BF16, BR, check_ids, check_shape, clipping, constants_of, dims_of,
    DY_COLUMNS, GRADIENT, gradient_norm, KC, length_used, LOSS, Model, most_memory, MR, NB,
    panel_rows, PRECISIONS, tile_width, token_weights,
)
from nanoeuler_parts.lora.adapter import (
    adapter_views, first_bad_entry, init_adapter, Lora, MATRICES, n_trained, shape_of, sites_of,
)
from nanoeuler_parts.lora.base import Base
from nanoeuler_parts.lora.decoder import LoraDecoder
from nanoeuler_parts.lora.kernels import (
    A_QKV, AdapterGrads, AdapterPanels, B_QKV, embed_rows, GAP, Head, KB, Kept, LayerActs,
    LayerGrads, LayerKept, LoraScratch, run_backward, run_forward, run_head, run_keeping,
    run_packing, Sizes, Tasks,
)

A_COLUMNS = 256      # columns of dA in one task
FEWEST_ROWS = 512    # rows of a micro-batch, if there are so many: each packs all of W anew
MOST_ROOM = 3 << 28  # bytes of activations that are kept; those of further layers are recomputed
LOGITS = 1 << 26     # numbers of logits that are held at once
MOST_KEPT = 3 << 29  # bytes of the packed panels of all frozen matrices, if they are kept

# The arrays of LayerActs, LayerGrads, LoraScratch and Head that hold operands of products
OPERANDS = {LayerActs: {"attn_in", "qkv", "att", "mlp_in", "swiglu", "u_qkv", "u_attn_proj",
                        "u_gate_up", "u_down"},
            LayerGrads: {"datt", "dy_qkv", "dy_attn_proj", "dy_gate_up", "dy_down", "v_qkv",
                         "v_attn_proj", "v_gate_up", "v_down"},
            Head: {"final_in", "dlogits"}}
PANELS = {LoraScratch: {"panel", "kt", "vt", "dy_panels", "x_panels"},
          AdapterPanels: {*AdapterPanels._fields}}

class Adapted(NamedTuple):
    """A frozen model and an adapter, from which a LoraModel is made.     flat: the adapter's buffer
    """
    base: Base
    lora: Lora
    flat: np.ndarray

# ---- shapes
def act_shapes(cfg, B, T, rank):
    """LayerActs of M = B T rows"""
    size, M, r = dims_of(cfg), B * T, rank
    heads = (size.H + size.G) * cfg.qk_norm
    return LayerActs(x=(M, size.C), attn_in=(M, size.C), attn_rstd=(M,), u_qkv=(M, 3 * r),
                     qk=(M, heads * size.D), qk_rstd=(M, heads), qkv=(M, size.QKV),
                     att=(M, size.HD), lse=(B, size.H, T), u_attn_proj=(M, r), x1=(M, size.C),
                     mlp_in=(M, size.C), mlp_rstd=(M,), u_gate_up=(M, 2 * r),
                     gate_up=(M, 2 * size.F), swiglu=(M, size.F), u_down=(M, r))

def grad_shapes(cfg, M, rank):
    size, r = dims_of(cfg), rank
    return LayerGrads(dx=(M, size.C), dx1=(M, size.C), dnorm=(M, size.C), dswiglu=(M, size.F),
                      datt_sum=(M, size.HD), datt=(M, size.HD), dqkv=(M, size.QKV),
                      dy_qkv=(M, size.QKV), dy_attn_proj=(M, size.C), dy_gate_up=(M, 2 * size.F),
                      dy_down=(M, size.C), v_qkv=(M, 3 * r), v_attn_proj=(M, r),
                      v_gate_up=(M, 2 * r), v_down=(M, r), y=(M, size.QKV), u=(M, 3 * r))

def scratch_shapes(cfg, threads, T, dtype):
    """LoraScratch of all threads"""
    size, width, n = dims_of(cfg), tile_width(dtype), threads
    columns = -(-T // width)
    return LoraScratch(block=(n, width, KB + GAP), panel=(n, 1, panel_rows(KB, dtype), width),
                       scores=(n, BR, T), dscores=(n, BR, T),
                       kt=(n, columns, panel_rows(size.D, dtype), width),
                       vt=(n, columns, panel_rows(size.D, dtype), width),
                       dy_panels=(n, 1, panel_rows(KC, dtype), DY_COLUMNS),
                       x_panels=(n, -(-max(A_COLUMNS, MOST_COLUMNS) // width),
                                 panel_rows(KC, dtype), width))

MOST_COLUMNS = 1024          # of dB: the largest rank

def product_tasks(cfg, rank, width):
    """Tasks: `width` columns of a product at a time, which belong to one projection"""
    found = {name: [] for name in MATRICES}
    for site in sites_of(cfg, rank).values():
        first, end = site.rows
        for n in range(first, end, width):
            found[site.matrix].append((n, min(n + width, end), site.columns[0]))
    return Tasks(**{name: np.array(rows, np.int64) for name, rows in found.items()})

def gradient_tasks(cfg, lora):
    """The blocks of dA and dB of the targets (n, 5): kind, rows n0 to n1, columns k0 to k1"""
    tasks = []
    for name, site in sites_of(cfg, lora.rank).items():
        if name not in lora.targets:
            continue
        kind, (_, K) = MATRICES.index(site.matrix), shape_of(cfg, site.matrix)
        tasks += [(A_QKV + kind, *site.columns, k, min(k + A_COLUMNS, K))
                  for k in range(0, K, A_COLUMNS)]
        tasks += [(B_QKV + kind, n, min(n + NB, site.rows[1]), *site.columns)
                  for n in range(*site.rows, NB)]
    return np.array(tasks, np.int64)

# ---- the model
class LoraModel:
    """A frozen model with an adapter, and the memory to train the adapter.  It has the methods of
    `Engine` in nanoeuler_parts/runs.  Only output head 0 is trained and computed."""
    program, talk = Model.program, Model.talk

    @staticmethod
    def ready(options=None):
        from nanoeuler_parts.kernels import compile_lora_kernels
        compile_lora_kernels(options.dtype if options else "f32", decoding=True)

    host = staticmethod(Model.host)

    def __init__(self, cfg, adapted, moments=(), options=None, dtype=None):
        """adapted: an Adapted, with the Config cfg except for its context"""
        self.cfg, self.base, self.lora, flat = cfg, *adapted
        if flat is None:
            flat = init_adapter(cfg, self.lora, options.seed if options else 1, self.base.dtype)
        if options:
            dtype = PRECISIONS[options.dtype]
        self.flat, self.dtype = flat, np.dtype(dtype or flat.dtype)  # dtype: of operands
        need(self.dtype in (flat.dtype, BF16) and flat.dtype == self.base.dtype,
             f"cannot compute {self.dtype} products of an adapter in {flat.dtype} and a model in "
             f"{self.base.dtype}; use one dtype for all")
        need(self.lora.rank <= MOST_COLUMNS, f"expected a rank up to {MOST_COLUMNS}, found "
             f"{self.lora.rank}")
        self.m, self.v = moments if len(moments) else np.zeros((2, flat.size), flat.dtype)
        self.g_flat = aligned(flat.shape, flat.dtype)
        self.width = tile_width(self.dtype)
        self.tasks = product_tasks(cfg, self.lora.rank, self.width)
        self.grad_tasks = gradient_tasks(cfg, self.lora)
        rows = [(n, min(n + self.width, cfg.vocab_size), 0)
                for n in range(0, cfg.vocab_size, self.width)]
        self.head_tasks = np.array(rows, np.int64)
        self.constants = constants_of(cfg, flat.dtype)
        self.keep_frozen()
        self.panels = [self.new(self.panel_shapes()) for _ in range(cfg.n_layer)]
        whole = adapter_views(cfg, self.lora.rank, self.g_flat)
        self.g = [AdapterGrads(*(x[l] for x in whole)) for l in range(cfg.n_layer)]
        self.ce = np.zeros(cfg.n_mtp)
        self.has_failed = False
        self.shape = None
        self.pack()

    def new(self, shapes):
        """Arrays of these shapes, zero, each in its type"""
        kind, arrays = type(shapes), []
        for name, shape in shapes._asdict().items():
            dtype = self.flat.dtype
            if name in OPERANDS.get(kind, ()):
                dtype = self.dtype
            if name in PANELS.get(kind, ()) and self.dtype == BF16:
                dtype = np.dtype(np.int32)
            arrays.append(aligned(shape, dtype))
        return kind(*arrays)

    # ---- frozen matrices in panels
    def keep_frozen(self):
        """Packs all frozen matrices once, if their panels take at most `most_kept` bytes."""
        base, width = self.base, self.width
        block = aligned((get_num_threads(), width, KB + GAP), self.flat.dtype)
        dtype = np.dtype(np.int32) if self.dtype == BF16 else self.dtype

        def shapes(N, K, tasks):
            return [(len(tasks), panel_rows(K, dtype), width),
                    (-(-K // width), panel_rows(N, dtype), width)]

        matrices = [(base.weights[l], base.scales[l]) for l in range(self.cfg.n_layer)]
        total = sum(math.prod(shape) for m in MATRICES for shape in shapes(
            *shape_of(self.cfg, m), getattr(self.tasks, m))) * self.cfg.n_layer
        V, C = self.cfg.vocab_size, self.cfg.n_embd
        total += sum(math.prod(shape) for shape in shapes(V, C, self.head_tasks))
        is_kept = total * dtype.itemsize <= self.most_kept()

        def kept(w, scale, N, K, tasks):
            found = Kept(*(aligned(shape if is_kept else (0, *shape[1:]), dtype)
                           for shape in shapes(N, K, tasks)))
            run_keeping(found, w, scale, tasks, K, block)
            return found

        self.kept = [LayerKept(*(x for m, w, scale in zip(MATRICES, weights, scales) for x in kept(
            w, scale, *shape_of(self.cfg, m), getattr(self.tasks, m))))
            for weights, scales in matrices]
        self.kept_head = kept(*base.head, V, C, self.head_tasks)

    def most_kept(self):
        return min(MOST_KEPT, most_memory() / 4)

    # ---- A and B in panels
    def panel_shapes(self):
        """Shapes of AdapterPanels"""
        r, width, shapes = self.lora.rank, self.width, {}

        def panels(K, N):                    # of a right operand (K, N)
            return -(-N // width), panel_rows(K, self.dtype), width

        for m in MATRICES:
            _, K = shape_of(self.cfg, m)
            R = getattr(adapter_shapes_of(self.cfg, r), m)
            shapes[f"at_{m}"], shapes[f"a_{m}"] = panels(K, R), panels(R, K)
            shapes[f"bt_{m}"] = len(getattr(self.tasks, m)), panel_rows(r, self.dtype), width
        for name, site in sites_of(self.cfg, r).items():
            shapes[f"b_{name}"] = panels(site.rows[1] - site.rows[0], r)
        return AdapterPanels(**shapes)

    def pack(self):
        """Packs A and B of all layers, once after each update."""
        whole = adapter_views(self.cfg, self.lora.rank, self.flat)
        sites = sites_of(self.cfg, self.lora.rank)
        q1, k1, n_hidden = (sites[name].rows[1] for name in ("q", "k", "gate"))
        for l, p in enumerate(self.panels):
            run_packing(p, AdapterGrads(*(x[l] for x in whole)), self.tasks, q1, k1, n_hidden)

    # ---- memory of a micro-batch
    def prepare(self, B, T):
        """Provides the arrays for B sequences of T tokens."""
        shape = B, T, get_num_threads()
        if self.shape == shape:
            return
        cfg, r, M, L = self.cfg, self.lora.rank, B * T, self.cfg.n_layer
        self.acts = self.d = self.scratch = self.shape = None
        self.x = aligned((L + 1, M, cfg.n_embd), self.flat.dtype)
        self.n_kept = self.layers_kept(B, T)
        spare, self.acts = None, []
        for l in range(L):
            is_kept = l >= L - self.n_kept
            a = self.new(act_shapes(cfg, B, T, r)._replace(x=(0, 0))) if is_kept else spare
            if a is None:
                a = spare = self.new(act_shapes(cfg, B, T, r)._replace(x=(0, 0)))
            self.acts.append(a._replace(x=self.x[l]))
        self.d = self.new(grad_shapes(cfg, M, r))
        self.scratch = self.new(scratch_shapes(cfg, get_num_threads(), T, self.dtype))
        self.size = Sizes(B, T, r, float(self.lora.scale))
        self.shape = shape

    def bytes_of_layer(self, B, T):
        """Bytes of a layer's activations"""
        shapes = act_shapes(self.cfg, B, T, self.lora.rank)._replace(x=(0,))
        of = OPERANDS[LayerActs]
        return sum(math.prod(shape) * (self.dtype if name in of else self.flat.dtype).itemsize
                   for name, shape in shapes._asdict().items())

    def room(self):
        return min(MOST_ROOM, most_memory() / 4)

    def layers_kept(self, B, T):
        """The number of layers, from the last one down, whose activations are kept"""
        return min(self.cfg.n_layer, max(1, int(self.room() // self.bytes_of_layer(B, T))))

    def micro_batch(self, B, asked=None, T=None):
        """The number of sequences that `gradient` takes at once: `asked`, or as many as keep the
        activations of all layers, but FEWEST_ROWS rows or more"""
        T = T or self.cfg.seq_len
        fits = int(self.room() // (self.cfg.n_layer * self.bytes_of_layer(1, T)))
        return asked or min(B, max(1, fits, -(-FEWEST_ROWS // T)))

    # ---- passes
    def run(self, until, tokens, targets, weight=None):
        """Cross-entropies (B,) of head 0, in nats.  With until = GRADIENT, also adds the gradient
        of sum_bt weight[b, t] CE_bt to g.     tokens, targets (B, T) int32, -1 for none
        weight (B, T), or (B,) if it is the same at all tokens of a sequence"""
        cfg = self.cfg
        need(0 < tokens.shape[1] <= cfg.seq_len,
             f"expected 1 to {cfg.seq_len} tokens per sequence, found {tokens.shape[1]}")
        check_ids(tokens, cfg)
        check_ids(np.maximum(targets, 0), cfg)
        check_shape(targets[None], 1, tokens)
        B, T = len(tokens), length_used(targets[None])
        tokens, targets = (np.ascontiguousarray(x[:, :T], np.int32) for x in (tokens, targets))
        self.prepare(B, T)
        embed_rows(self.x[0], tokens.reshape(-1), *self.base.wte)
        for l in range(cfg.n_layer):
            self.forward(l, True)
        weight = np.ones(B) if weight is None else weight
        if weight.ndim == 1:
            weight = np.repeat(weight[:, None], T, 1)
        self.nll = self.head(targets.reshape(-1), weight[:, :T].reshape(-1), until).reshape(B, 1, T)
        if until == GRADIENT:
            in_spare = cfg.n_layer - self.n_kept - 1     # the layer whose activations are there
            for l in range(cfg.n_layer - 1, -1, -1):
                if l < in_spare:
                    self.forward(l, False)
                self.backward(l)
        return self.nll[:, 0].cumsum(-1)[:, -1]

    def of_layer(self, l):
        """The frozen weights of a layer, and its adapter in panels"""
        base = self.base
        return (base.weights[l], base.scales[l], self.kept[l], base.vectors[l], self.panels[l])

    def forward(self, l, has_output):
        d = self.d
        run_forward(self.x[l + 1], has_output, self.acts[l], d.y, d.u, *self.of_layer(l),
                    self.tasks, self.constants, self.size, self.scratch)

    def backward(self, l):
        run_backward(self.acts[l], self.d, self.g[l], *self.of_layer(l), self.tasks,
                     self.grad_tasks, l == 0, self.constants, self.size, self.scratch)

    def head(self, targets, weight, until):
        """Cross-entropies (M,).  With until = GRADIENT, d.dx becomes the gradient of x.  Only rows
        with a target are computed, some at a time, because the logits of a large vocabulary take
        more memory than the model."""
        nll, dx, rows = np.zeros(len(targets)), self.d.dx, np.flatnonzero(targets >= 0)
        dx[:] = 0
        V, C = self.cfg.vocab_size, self.cfg.n_embd
        most = max(MR, LOGITS // V // MR * MR)
        n = min(most, len(rows))
        made = self.new(Head(x=(n, C), dx=(n, C), dnorm=(n, C), final_in=(n, C), rstd=(n,),
                             logits=(n, V), dlogits=(n, V) if until == GRADIENT else (0, 0),
                             targets=(0,), weight=(0,), nll=(0,)))
        for start in range(0, len(rows), most):
            part = rows[start:start + most]
            k = len(part)
            h = made._replace(**{name: getattr(made, name)[:k] for name in (
                "x", "dx", "dnorm", "final_in", "rstd", "logits")})
            h = h._replace(dlogits=made.dlogits[:k], targets=targets[part], weight=weight[part],
                           nll=np.zeros(k))
            h.x[...] = self.x[-1][part]
            h.dx[...] = 0
            run_head(h, self.base.final_norm, *self.base.head, self.kept_head,
                     self.head_tasks, self.constants.eps, until >= LOSS, until >= GRADIENT,
                     self.scratch)
            nll[part] = h.nll
            if until == GRADIENT:
                dx[part] = h.dx
        return nll

    # ---- the interface of an Engine
    def gradient(self, tokens, targets, weight):
        """g += the gradient of sum_bt weight[b, 0, t] CE_bt
        targets (P, B, T), weight as in `Model.gradient`"""
        if self.has_failed:
            self.g_flat[:] = 0
            self.has_failed = False
        B, T = tokens.shape
        weight = token_weights(weight, (B, self.cfg.n_mtp, T))[:, 0]
        self.ce[0] += self.run(GRADIENT, tokens, targets[0], weight).sum()

    def update(self, hyper):
        """An AdamW step of A and B, see `Model.update`"""
        ce, self.ce = self.ce, np.zeros(self.cfg.n_mtp)
        norm = gradient_norm(self.g_flat)
        self.has_failed = not math.isfinite(norm)
        if not self.has_failed:
            adamw_update(self.flat, self.g_flat, self.m, self.v, self.flat.size, hyper,
                         clipping(norm, hyper))
        self.pack()
        return ce, norm

    def losses(self, tokens, targets):
        """Summed CE of head 0 of every sequence (B,), in nats     tokens, targets (B, T) int32"""
        return self.run(LOSS, tokens, targets)

    token_losses = Model.token_losses

    def buffers(self):
        """The arrays that a run stores: the adapter and AdamW's moments"""
        return self.flat, self.m, self.v

    def decoder(self):
        """A Decoder of the model with its adapter, whose weights have the format of the base.  It
        may take as much memory as the activations, which are freed."""
        self.x = self.acts = self.d = self.scratch = self.shape = None
        return LoraDecoder(self.base, [(self.lora, self.flat)], self.cfg)

    def device(self):
        device = Model.device(self)
        of = {"f32": "float32", "bf16": "bfloat16", "int8": "int8"}.get(self.base.stored)
        return f"{device}; LoRA trains {n_trained(self.cfg, self.lora):,}, the rest is {of}"

    def first_bad_tensor(self):
        return first_bad_entry(self.cfg, self.lora.rank, self.flat, self.g_flat)

def adapter_shapes_of(cfg, rank):
    """{matrix: n r}, the number of rows of its stacked A"""
    found = dict.fromkeys(MATRICES, 0)
    for site in sites_of(cfg, rank).values():
        found[site.matrix] += rank
    return Tasks(**found)

