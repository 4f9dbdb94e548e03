"""LoRA on a GPU: LoraModel, a frozen model and its adapter, in place of `Model` of
nanoeuler_cuda.py in a run.  nanoeuler_parts/lora explains LoRA.

The forward and backward pass are those of nanoeuler_cuda.py.  Where they multiply by a matrix of a
layer, the operand here is an Adapted matrix, and LoraOps adds the products of its adapter.

A matrix W (N, K) of a layer may stack n projections: q, k and v, or gate and up.  So do its A and
B:

    A (n r, K)      the A of one projection below that of the other
    B^T (n r, N)    each projection has r rows, which are zero outside of its own columns

Therefore one thin product serves all projections.  The gradient of B^T also has entries outside of
these blocks, and `keep_blocks` sets them to zero.
"""
import functools
import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numba import cuda

import nanoeuler as ne
import nanoeuler_cuda as nc
from nanoeuler_parts.gpu.launches import cuda_kernel, launch
from nanoeuler_parts.gpu.numbers import ctype, stored, value
from nanoeuler_parts.lora.adapter import (
    Adapter, adapter_shapes, adapter_views, first_bad_entry, init_adapter, MATRICES, n_entries,
    n_trained, sites_of,
)
from nanoeuler_parts.machine.numbers import to_bf16

class Adapted(NamedTuple):
    """A matrix of a layer with its adapter, on the device, in the type of products.  s = alpha / r
    w (N, K)     a, a_scaled (n r, K): A and s A     b, b_scaled (n r, N): B^T and s B^T"""
    w: object
    a: object
    a_scaled: object
    b: object
    b_scaled: object

class AdaptedGradient(NamedTuple):
    """The gradients of A and B^T of an Adapted matrix"""
    matrix: Adapted
    a: object
    b: object

class LoraOps:
    """Ops whose products also take an Adapted matrix:

        y = x W^T + u B^T,     u = s x A^T
        dx = dy W + v A,       v = s dy B
        dA += v^T x,           dB^T += u^T dy

    u, v (BT, >= n r)    memory for them, which the model provides.  Every product overwrites u, and
                         every `matmul_dx` v, so the `matmul_dw` of a matrix must follow its
                         `matmul_dx`"""

    def __init__(self, ops, rank):
        self.ops, self.rank = ops, rank
        self.u = self.v = None

    def __getattr__(self, name):             # attention, and all that knows no matrix of a layer
        return getattr(self.ops, name)

    def matmul(self, y, x, w):
        if not isinstance(w, Adapted):
            return self.ops.matmul(y, x, w)
        self.ops.matmul(y, x, w.w)
        self.ops.matmul_dx(y, self.thin(self.u, x, w.a_scaled), w.b, add=True)

    def matmul_dx(self, dx, dy, w, add=False):
        if not isinstance(w, Adapted):
            return self.ops.matmul_dx(dx, dy, w, add)
        self.ops.matmul_dx(dx, dy, w.w, add)
        self.ops.matmul_dx(dx, self.thin(self.v, dy, w.b_scaled), w.a, add=True)

    def matmul_dw(self, g, dy, x, add=True):
        if g is None:                        # a frozen matrix
            return
        u = self.thin(self.u, x, g.matrix.a_scaled)
        v = nc.view(self.v, 0, u.shape)
        self.ops.matmul_dw(g.b, u, dy, add)
        self.ops.matmul_dw(g.a, v, x, add)

    def slow_parts(self, cfg):
        slow = self.ops.slow_parts(cfg)
        if self.rank % 8 and self.path != "portable":
            slow.append(f"the adapter, as its rank {self.rank} is no multiple of 8")
        return slow

    def thin(self, memory, x, w):
        """x w^T, in this memory"""
        out = nc.view(memory, 0, (len(x), len(w)))
        self.ops.matmul(out, x, w)
        return out

# ---- kernels of an update
@cuda_kernel
def keep_blocks_kernel(g, ends, r):
    """g[i, c] = 0 unless column c is one of the projection that row i is of: projection k of a
    layer has the columns from ends[k] up to ends[k + 1], and r rows
    g (L n r, N), ends (n + 1,) int32     grid L n r, block 256"""
    i = cuda.blockIdx.x
    k = i // r % (ends.size - 1)
    for c in range(cuda.threadIdx.x, g.shape[1], cuda.blockDim.x):
        if c < ends[k] or c >= ends[k + 1]:
            g[i, c] = 0

@cuda_kernel
def scale_kernel(out, x, s):
    """out[i] = s x[i]     out, x (n,)     grid x block: any"""
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        out[i] = stored(out, ctype(out).type(s) * ctype(out).type(value(x[i])))

def keep_blocks(g, ends, r):
    rows, N = g.shape[0] * g.shape[1], g.shape[2]
    launch(keep_blocks_kernel, nc.view(g, 0, (rows, N)), ends, r, grid=rows, block=256)

# ---- buffers
def lora_shapes(cfg, rank):
    """Adapter of the shapes on the device: A (L, n r, K) and B^T (L, n r, N) of each matrix"""
    host = adapter_shapes(cfg, rank)._asdict()
    shapes = {}
    for name in MATRICES:
        L, rows, K = host[f"{name}_a"]
        shapes[f"{name}_a"], shapes[f"{name}_b"] = (L, rows, K), (L, rows, host[f"{name}_b"][1])
    return Adapter(**shapes)

def n_entries_on_device(cfg, rank):
    return sum(map(math.prod, lora_shapes(cfg, rank)))

def same_entries(cfg, rank, flat, found):
    """Pairs of views of the same numbers of an adapter
    flat: its buffer in the layout of the host     found: in that of the device"""
    host = adapter_views(cfg, rank, flat)
    device = Adapter(*ne.slices(found, lora_shapes(cfg, rank)))
    for name in MATRICES:
        yield getattr(host, f"{name}_a"), getattr(device, f"{name}_a")
    for site in sites_of(cfg, rank).values():
        b, bt = (getattr(x, f"{site.matrix}_b") for x in (host, device))
        yield (b[:, slice(*site.rows)].transpose(0, 2, 1),
               bt[:, slice(*site.columns), slice(*site.rows)])

def for_device(cfg, rank, flat):
    """The flat buffer of an adapter, in the layout of the device     flat: as for adapter_views"""
    found = np.zeros(n_entries_on_device(cfg, rank), flat.dtype)
    for here, there in same_entries(cfg, rank, flat, found):
        there[...] = here
    return found

def for_host(cfg, rank, found):
    """The inverse of `for_device`"""
    flat = np.zeros(n_entries(cfg, rank), found.dtype)
    for here, there in same_entries(cfg, rank, flat, found):
        here[...] = there
    return flat

def buffers_with_adapter(rank, cfg, B, T, dtype, kept=None):
    """The buffer table of a LoraModel: that of `Model`, and u and v of LoraOps"""
    thin = B * T, 3 * rank
    return [*nc.buffer_table(cfg, B, T, dtype, kept), *(("d", x, thin, dtype) for x in "uv")]

# ---- the model
class LoraModel(nc.Model):
    """A frozen model with an adapter on the device.  Only output head 0 is trained and computed.

    lora       the Lora
    flat       A and B^T of all layers, in the layout of the device
    scaled     s A and s B^T, in the type of products"""

    def __init__(self, cfg, adapted, moments=(), options=None, dtype="f32", recompute=False,
                 top=nc.PATHS[-1]):
        """adapted: an Adapted of lora/model.py, with the Config cfg except for its context
        others: as for Model"""
        self.base, self.lora, flat = adapted
        rank = self.lora.rank
        if flat is None:
            flat = init_adapter(cfg, self.lora, options.seed if options else 1, self.base.dtype)
        self.shape_held = replace(cfg, n_mtp=1)          # of the frozen parameters: one head
        self.buffer_table = functools.partial(buffers_with_adapter, rank)
        moments = [for_device(cfg, rank, x) for x in moments]
        super().__init__(cfg, for_device(cfg, rank, flat), moments, options, dtype, recompute, top)

    def make_ops(self, top):
        return LoraOps(nc.make_ops(top), self.lora.rank)

    def hold(self, flat):
        """Puts the frozen model and the adapter, a flat buffer in the layout of the device, there.
        """
        cfg, master, rank = self.shape_held, self.master, self.lora.rank
        table = ne.param_table(cfg)
        shapes = [x.shape for x in table]
        sizes = [x.end - x.start for x in table]
        n = sum(sizes[ne.MATRICES])
        self.matrices, self.gains = (nc.new((k,), dtype) for k, dtype in (
            (n, self.dtype), (sum(sizes) - n, master)))
        frozen = ne.Params(*ne.slices(self.matrices, shapes[ne.MATRICES]),
                           *ne.slices(self.gains, shapes[ne.VECTORS]))
        self.fill(frozen)
        # Gains and biases are frozen.  The backward pass adds their gradients here, unused
        unused = ne.slices(self.put(np.zeros(self.gains.size)), shapes[ne.VECTORS])
        self.flat, self.g_flat = self.put(flat), self.put(np.zeros(flat.size))
        self.copies = nc.to_device(to_bf16(flat)) if self.dtype == np.uint16 else self.flat
        self.scaled = nc.new(flat.size, self.dtype)
        self.n_decay = flat.size
        of = lora_shapes(cfg, rank)
        a, scaled, g = (Adapter(*ne.slices(x, of)) for x in (self.copies, self.scaled, self.g_flat))
        w, gradients = {}, {}
        for name in MATRICES:
            w[name] = [Adapted(getattr(frozen, name)[l],
                               *(getattr(x, f"{name}_{part}")[l] for part in "ab"
                                 for x in (a, scaled))) for l in range(cfg.n_layer)]
            gradients[name] = [AdaptedGradient(x, *(getattr(g, f"{name}_{part}")[l]
                                                    for part in "ab"))
                               for l, x in enumerate(w[name])]
        self.p, self.w = frozen, frozen._replace(**w)
        self.g = frozen._replace(**gradients, **dict(zip(ne.Params._fields[ne.VECTORS], unused)))
        # B^T of the matrices that stack projections: (its gradient, the ends of its blocks)
        self.stacked = []
        for name in MATRICES:
            ends = [0, *(site.rows[1] for site in sites_of(cfg, rank).values()
                         if site.matrix == name)]
            if len(ends) > 2:
                self.stacked.append((getattr(g, f"{name}_b"), nc.to_device(ends, np.int32)))
        self.set_scaled()

    def fill(self, frozen):
        """Copies the base to the device, one matrix at a time.     frozen: Params there"""
        def copy(to, x):
            x = np.ascontiguousarray(x, self.master)
            to.copy_to_device(to_bf16(x) if to.dtype == np.uint16 else x, stream=nc.gpu.stream)
            nc.gpu.stream.synchronize()

        base = self.base
        copy(frozen.wte, base.matrix("wte"))
        if not self.shape_held.tie_embeddings:
            copy(frozen.lm_head[0], base.matrix("lm_head"))
        for l in range(self.shape_held.n_layer):
            for name in MATRICES:
                copy(getattr(frozen, name)[l], base.matrix(name, l))
            for name, x in base.vectors[l]._asdict().items():
                if x.size:
                    copy(getattr(frozen, name)[l], x)
        copy(frozen.final_norm, base.final_norm)

    def set_scaled(self):
        """Queues scaled = s flat."""
        launch(scale_kernel, self.scaled, self.flat, self.lora.scale, grid=1024, block=256)

    def memory(self, B, T):
        cfg, size = self.shape_held, self.master.itemsize
        n, own = ne.n_params(cfg), n_entries_on_device(cfg, self.lora.rank)
        table = dict(super().memory(B, T))
        narrow = self.dtype.itemsize
        table.update({"parameters": n * narrow + own * (size + narrow), "gradients": own * size,
                      "AdamW moments": 2 * own * size,
                      "bfloat16 copies": 2 * own if self.dtype == np.uint16 else 0})
        return [*table.items()]

    def prepare(self, B, T):
        self.ops.u = self.ops.v = None       # or they would not be freed
        super().prepare(B, T)
        self.ops.u, self.ops.v = self.d.u, self.d.v

    def head_parts(self, P):
        """Head 0, which is frozen"""
        V, C = self.p.wte.shape
        w = self.w.wte if self.cfg.tie_embeddings else nc.view(self.w.lm_head, 0, (V, C))
        return [nc.HeadPart(slice(0, V), w, None)]

    def outputs_with(self, weight):
        return 1

    def clear_others(self, outputs):
        """Nothing to do: products set all gradients."""

    def embedding_gradient(self, tokens):
        """Nothing to do: the embedding is frozen."""

    def queue_update(self, steps):
        for g, ends in self.stacked:
            keep_blocks(g, ends, self.lora.rank)
        super().queue_update(steps)
        self.set_scaled()

    def queue_optimizers(self, steps, partial):
        hyper = nc.view(self.hyper, 0, self.staged_hyper[0].shape)
        nc.adamw(self.entries(slice(0, self.flat.size)), self.n_decay, hyper, partial, self.results)

    def buffers(self):
        """The arrays that a run stores, on the host: the adapter and AdamW's moments"""
        return [for_host(self.cfg, self.lora.rank, nc.to_host(x))
                for x in (self.flat, self.m, self.v)]

    def decoder(self):
        """A decoder of W + s B A, in the type of training.  In bfloat16 it rounds the sum, which
        training does not."""
        cfg, shapes = self.shape_held, [x.shape for x in ne.param_table(self.shape_held)]
        matrices, gains = (nc.new(x.shape, x.dtype) for x in (self.matrices, self.gains))
        for to, source in (matrices, self.matrices), (gains, self.gains):
            to.copy_to_device(source, stream=nc.gpu.stream)
        merged = dict(zip(ne.Params._fields[ne.MATRICES],
                          ne.slices(matrices, shapes[ne.MATRICES])))
        for name in MATRICES:
            for l, x in enumerate(getattr(self.w, name)):
                nc.batched_matmul(merged[name][l], nc.transposed(x.b_scaled), x.a, add=True)
        weights = "bf16" if matrices.dtype == np.uint16 else "f32"
        return nc.decoder_class(cfg, weights, self.top).of(cfg, matrices, gains, self.top)

    def device(self):
        return (f"{super().device()}; LoRA trains {n_trained(self.cfg, self.lora):,}, "
                f"the rest is {nc.NAMES[self.dtype]}")

    def first_bad_tensor(self):
        cfg, rank = self.cfg, self.lora.rank
        return first_bad_entry(cfg, rank, *(for_host(cfg, rank, nc.to_host(x))
                                            for x in (self.flat, self.g_flat)))
