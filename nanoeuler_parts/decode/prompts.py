"""Prompts: reads a long beginning of a slot at once, with the kernels of training.

If more than BY_ROWS tokens begin a slot, they are read as one sequence, as in training.  Usually
they are a prompt, or the half of its tokens that a full slot keeps.  Then the activations between
kernels are bfloat16, as in PyTorch, and keys and values are rounded to it, so the results differ
from those of the same tokens read one by one.  The bits of a position depend only on the tokens up
to it.  They are the same alone, in a batch, with drafts, and in pieces (RowsDecoder.read_pieces).
"""
import contextlib
import functools

import numpy as np
from numba import cuda

from nanoeuler_cuda import embedding_forward, LayerBuffers, Layers, new, view, width, window_of
from nanoeuler_parts.decode.table import AT_ONCE, upload
from nanoeuler_parts.gpu.launches import cuda_kernel, Graph, launch, made_once, overlapping
from nanoeuler_parts.gpu.numbers import vector
from nanoeuler_parts.tensor_cores.ptx import after_previous, at_once

BY_ROWS = AT_ONCE                            # longest beginning of a slot that is read by rows

def power_of_two(n):
    """Returns n rounded up to a power of two, or 0 for 0."""
    return 1 << (n - 1).bit_length() if n else 0

def prompt_size(n):
    """Returns the number of tokens to compute for a prompt of n tokens: n rounded up to 2^k or
    3 2^k.  So there are few graphs, and padding is at most a third of the work."""
    whole = power_of_two(n)
    return 3 * whole // 4 if whole >= 4 and n <= 3 * whole // 4 else whole

class Prompts(Layers):
    """Reads the beginning of a slot as `Model.forward` reads a sequence.

    It computes T tokens, one of some sizes: see `prompt_size`.  The tokens after the prompt's
    end are arbitrary, since attention is causal.  Activations have memory for one layer, allocated
    at the first prompt: 8 C + 2 QKV + 2 HD + 6 F bytes per token, 12 MB for 512 tokens of
    `base`.  Norms of q and k add 2 D + 4 bytes per token and head of these."""

    def __init__(self, steps, T, ops):
        """steps: the RowSteps whose cache is filled
        ops: Ops of its own, since its buffers live as long as it does"""
        def buffer(*shape, dtype=np.uint16):
            return new(shape, dtype)

        size, self.cfg, self.w, self.p, self.ops = steps.size, steps.cfg, steps.p, steps.p, ops
        self.size, self.kc, self.vc = size, steps.kc, steps.vc
        self.cos, self.sin, self.most = steps.cos, steps.sin, steps.T
        self.x = buffer(T, size.C, dtype=np.float32)
        # Only a backward pass would read `unused` and lse
        self.unused = buffer(T, size.C), buffer(T, dtype=np.float32)
        self.lse = buffer(size.H * T, dtype=np.float32)
        self.window, heads, qk, qk_rstd = window_of(self.cfg), size.H + size.G, None, None
        if self.cfg.qk_norm:
            qk, qk_rstd = buffer(T, heads * size.D), buffer(T, heads, dtype=np.float32)
        self.whole = LayerBuffers(buffer(T, size.C), buffer(T, size.QKV), qk, qk_rstd,
                                  buffer(T, size.HD), buffer(T, 2 * size.F), buffer(T, size.F))
        self.slot_and_ids = new(2 + T, np.int32)         # slot, number of tokens, the tokens
        self.staged = cuda.pinned_array(2 + T, np.int32)
        self.graphs = {}                     # T -> Graph

    def read(self, slot, ids):
        """Queues the reading of a prompt into the cache.  The device must not be reading
        self.staged."""
        T = min(prompt_size(len(ids)), self.most)
        self.staged[:2] = slot, len(ids)
        self.staged[2:2 + len(ids)] = ids
        self.staged[2 + len(ids):2 + T] = 0
        if T not in self.graphs:
            self.graphs[T] = Graph()
        self.graphs[T](functools.partial(self.queue, T))

    def queue(self, T):
        """Queues T tokens through all layers: fills self.x, and the keys and values of the slot."""
        def rows(x):
            return x if x is None else view(x, 0, (T, *x.shape[1:]))

        self.state, self.part = rows(self.x), LayerBuffers(*map(rows, self.whole))
        upload(self.slot_and_ids, self.staged[:2 + T])
        embedding_forward(self.state, view(self.slot_and_ids, 2, (T,)), self.p.wte)
        self.run_layers()

    def of_layer(self, l):
        return self.part

    def saved(self, i):
        return tuple(view(x, 0, (len(self.state), *x.shape[1:])) for x in self.unused)

    def rotate_and_attend(self, l, b):
        """Keeps k and v of the prompt's tokens in the slot, and attends to those in b.qkv."""
        size, T = self.size, len(b.qkv)
        hopper = self.ops.path == "wgmma"
        with overlapping() if hopper else contextlib.nullcontext():
            launch(rotate_and_keep_kernel(width(size.D // 2), hopper), b.qkv, self.kc[l],
                   self.vc[l], self.cos, self.sin, self.slot_and_ids, grid=T, block=128)
        self.ops.attention_forward(b.att, view(self.lse, 0, (size.H, T)), b.qkv, T, size.D,
                                   self.window)

@made_once
def rotate_and_keep_kernel(W, hopper):
    load, store = vector(W)
    take_turn = after_previous if hopper else at_once

    @cuda_kernel
    def rotate_and_keep(qkv, kc, vc, cos, sin, slot_and_ids):
        """RoPE of q and k, in place.  Copies k and v of a prompt's tokens to their slot, but not
        those of the tokens after them.     math: nanoeuler.rope
        One block per row, W pairs per thread.     grid T, 128 threads
        qkv (T, QKV), kc, vc (slots, G, context, D) of a layer, cos, sin (T, D / 2)
        slot_and_ids: slot, number of tokens, tokens"""
        take_turn()
        t, (_, G, context, D) = cuda.blockIdx.x, kc.shape
        QKV, half = qkv.shape[1], D // 2
        H = QKV // D - 2 * G
        kept, first_plane = t < slot_and_ids[1], slot_and_ids[0] * G     # a plane is (context, D)
        for j in range(cuda.threadIdx.x * W, (H + G) * half, 128 * W):
            head, i = j // half, j % half
            low, angle = t * QKV + head * D + i, t * half + i
            u, v, c, s = load(qkv, low), load(qkv, low + half), load(cos, angle), load(sin, angle)
            for k in range(W):
                x = u[k]
                u[k] = x * c[k] - v[k] * s[k]
                v[k] = v[k] * c[k] + x * s[k]
            store(qkv, low, u)
            store(qkv, low + half, v)
            if kept and head >= H:           # as rounded to bfloat16
                to = ((first_plane + head - H) * context + t) * D + i
                store(kc, to, load(qkv, low))
                store(kc, to + half, load(qkv, low + half))
        for j in range(cuda.threadIdx.x * W, G * D if kept else 0, 128 * W):
            to = ((first_plane + j // D) * context + t) * D + j % D
            store(vc, to, load(qkv, t * QKV + (H + G) * D + j))
    return rotate_and_keep
