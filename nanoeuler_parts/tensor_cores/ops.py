"""The products and the attention of a model on tensor cores: TensorOps, which `make_ops` of
nanoeuler_cuda.py returns if the GPU has tensor cores."""
import contextlib
import functools

import numpy as np
from numba import cuda

from bpe import need
from nanoeuler_cuda import (
    attention_backward, attention_forward, Ops, to_device, transposed, unchanged, view,
)
from nanoeuler_parts.gpu.launches import overlapping
from nanoeuler_parts.tensor_cores.attention import (
    FAST_HEADS, q_tiles, tensor_attention, WGMMA_HEADS,
)
from nanoeuler_parts.tensor_cores.epilogues import ADD, Plus, Polynomial, STORE
from nanoeuler_parts.tensor_cores.matmul_mma import mma_product
from nanoeuler_parts.tensor_cores.matmul_wgmma import wgmma_product
from nanoeuler_parts.tensor_cores.ptx import map_of
from nanoeuler_parts.tensor_cores.tiles import TILE_ROWS

# Semaphores put the blocks that add to one tile of dW in a fixed order.  A tile needs two.
SEMAPHORES = 1 << 15

def fits(*matrices):
    """Returns whether tensor cores can multiply these matrices: they are bfloat16, and all rows
    start at a multiple of 16 bytes and have a multiple of 8 elements."""
    def fits_one(x):
        whole_chunks = x.shape[1] % 8 == 0 and x.strides[1] == 2
        starts = x.strides[0], int(x.gpu_data.device_pointer)
        return x.dtype == np.uint16 and whole_chunks and all(n % 16 == 0 for n in starts)
    return all(map(fits_one, matrices))

def by_rows(x):
    """Returns (the array whose rows are contiguous, whether it is the transpose of x).
    x (n, M, N)"""
    return (x, False) if x.strides[2] == x.dtype.itemsize else (transposed(x), True)

def each_fits(*batches):
    """Returns `fits` for batches of matrices (n, M, N), any of them transposed."""
    def first(x):
        x, _ = by_rows(x)
        return view(x, 0, x.shape[1:], (x.strides[1] // x.dtype.itemsize, 1))
    return fits(*map(first, batches)) and all(x.strides[0] % 16 == 0 for x in batches)

class TensorOps(Ops):
    """Ops on path `mma` or `wgmma`.  They call the functions of nanoeuler_cuda.py for matrices that
    tensor cores cannot multiply.

    overlaps    kernels of path `wgmma` may start before the kernel before them has ended.  For the
                short kernels of a prompt, the time between two of them counts"""

    def __init__(self, path, overlaps=False):
        self.path, self.overlaps = path, overlaps
        self.maps = {}                       # tensor maps of the matrices that it has been given

    @functools.cached_property
    def semaphores(self):
        """SEMAPHORES zeros.  A product that has used them leaves zeros."""
        return to_device(np.zeros(SEMAPHORES, np.uint32))

    def forget_buffers(self):
        self.maps.clear()

    def map_of(self, x, box_rows):
        """Returns the tensor map of x, which lives as long as kernels and graphs may read it: until
        `forget_buffers`."""
        return map_of(x, box_rows, self.maps)

    def product(self, out, a, b, a_mn=False, b_mn=False, epilogue=STORE, x=None, symmetric=False,
                add=True):
        """out (M, N) = A B, or what the epilogue makes of it.  All matrices may also be batches of
        n matrices, (n, ..), except with an epilogue that adds.

        out          (M, N), bfloat16, or float32 with an epilogue that adds
        a            A (M, K), or A^T (K, M) if a_mn
        b            B^T (N, K), or B (K, N) if b_mn
        epilogue     an Epilogue
        x            the matrix that the epilogue reads, (M, N)
        symmetric    all outputs are symmetric.  Path `wgmma` then computes only the tiles that have
                     an entry on or below the diagonal, 12 of 18 for N = 768
        add          for an epilogue that adds.  False: out has no sums yet, and is set"""
        need(not epilogue.adds or out.ndim == 2 and not symmetric,
             "an epilogue that adds is for one product, and not a symmetric one")
        need(x is not None or not epilogue.reads_x, f"{epilogue} needs x")
        semaphores = self.semaphores if epilogue.adds else None
        if self.path == "wgmma":
            with self.launches_of_wgmma():
                wgmma_product(self.map_of, out, a, b, a_mn, b_mn, epilogue, x, semaphores,
                              symmetric, add)
        else:
            mma_product(out, a, b, a_mn, b_mn, epilogue, x, semaphores, add)

    def launches_of_wgmma(self):
        """A context for launches of kernels that call `wait_for_previous`"""
        return overlapping() if self.overlaps else contextlib.nullcontext()

    def matmul(self, out, x, w):
        if fits(out, x, w):
            self.product(out, x, w)
        else:
            super().matmul(out, x, w)

    def matmul_dx(self, dx, dy, w, add=False):
        if fits(dx, dy, w):
            epilogue, x = (Plus(), dx) if add else (STORE, None)
            self.product(dx, dy, w, b_mn=True, epilogue=epilogue, x=x)
        else:
            super().matmul_dx(dx, dy, w, add)

    def matmul_dw(self, dw, dy, x, add=True):
        if fits(dy, x) and int(dw.gpu_data.device_pointer) % 16 == 0:
            self.product(dw, dy, x, a_mn=True, b_mn=True, epilogue=ADD, add=add)
        else:
            super().matmul_dw(dw, dy, x, add)

    def attention_kernels(self, qkv, o, T, D, window):
        """Returns the Attention for these sequences of T rows, or None for the portable one.

        The copy engine fetches whole tiles.  If T is no multiple of TILE_ROWS, the last tile of a
        sequence also has rows of the next one.  Their weights are 0, but 0 times an infinite number
        would be NaN.  So several such sequences are left to path mma, which does not read them."""
        if qkv.dtype != np.uint16 or D not in FAST_HEADS:
            return None
        whole_tiles = T % TILE_ROWS == 0 or T == len(qkv)
        tiles = q_tiles(D, o.size // D, cuda.get_current_device().MULTIPROCESSOR_COUNT)
        if self.path == "wgmma" and D in WGMMA_HEADS and whole_tiles:
            boxes = functools.partial(self.map_of, box_rows=TILE_ROWS)
            return tensor_attention(D, True, boxes, window, tiles)
        return tensor_attention(D, False, window=window, tiles=tiles)

    def attention_forward(self, o, lse, qkv, T, D, window=0):
        kernels = self.attention_kernels(qkv, o, T, D, window)
        # only the kernels of path wgmma take tensor maps, and only they call `wait_for_previous`
        on_wgmma = kernels and kernels.operand is not unchanged
        with self.launches_of_wgmma() if on_wgmma else contextlib.nullcontext():
            attention_forward(o, lse, qkv, T, D, window, kernels)

    def attention_backward(self, dqkv, delta, do, o, lse, qkv, cos, sin, T, D, window=0):
        kernels = self.attention_kernels(qkv, o, T, D, window)
        attention_backward(dqkv, delta, do, o, lse, qkv, cos, sin, T, D, window, kernels)

    def product_of_each(self, out, a, b, symmetric=False):
        if each_fits(out, a, b):
            self.products(out, a, b, symmetric=symmetric)
        else:
            super().product_of_each(out, a, b)

    def polynomial_of_each(self, out, x, a, b, c):
        if each_fits(out, x):
            self.products(out, x, x, Polynomial(a, b, c), x, symmetric=True)
        else:
            super().polynomial_of_each(out, x, a, b, c)

    def products(self, out, a, b, epilogue=STORE, x=None, symmetric=False):
        """out[z] = a[z] b[z], or what the epilogue makes of it
        out (n, M, N), a (n, M, K), b (n, K, N) in bfloat16; a and b may be `transposed` arrays"""
        (a, a_mn), (b, b_is_transposed) = by_rows(a), by_rows(b)
        self.product(out, a, b, a_mn, not b_is_transposed, epilogue, x, symmetric)

    def slow_parts(self, cfg):
        HD, KV = cfg.n_head * cfg.head_dim, cfg.n_kv_head * cfg.head_dim
        sizes = {"n_embd": cfg.n_embd, "n_hidden": cfg.n_hidden, "vocab_size": cfg.vocab_size,
                 "n_head * head_dim": HD, "(n_head + 2 * n_kv_head) * head_dim": HD + 2 * KV}
        slow = [f"products, since {name} is {n}, not a multiple of 8"
                for name, n in sizes.items() if n % 8]
        if cfg.head_dim not in FAST_HEADS:
            slow.append(f"attention, since head_dim is {cfg.head_dim}, not 32, 64 or 128")
        if self.path == "wgmma" and cfg.head_dim in WGMMA_HEADS and cfg.seq_len % TILE_ROWS:
            slow.append(f"attention of several sequences, since seq_len is {cfg.seq_len}, not a "
                        f"multiple of {TILE_ROWS}: it takes mma instead of wgmma")
        return slow
