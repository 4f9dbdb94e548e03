"""The frozen weights of a model that LoRA adapts, in memory as their file stores them.

A matrix W (N, K) is an array of bytes (N, n K), of n = 1 (int8), 2 (bfloat16), 4 (float32) or 8
(float64) bytes per number.  Kernels find n from the shape, so one kernel serves all types.  There
is one copy of W, not transposed: kernels pack the part that they need (`pack_of_rows`,
`pack_of_columns`).
"""
from collections import namedtuple

import numpy as np

from bpe import UserError
from nanoeuler import aligned, FILE_NAMES, param_table, views
from nanoeuler_parts.checkpoint.tensors import tensor_shapes
from nanoeuler_parts.files.safetensors import need_finite, need_whole, release_pages
from nanoeuler_parts.lora.adapter import MATRICES
from nanoeuler_parts.machine.numbers import from_bf16, to_bf16

# Of one layer: the bytes of each matrix (N, n K), and a scale (N,) for each of its rows
LayerWeights = namedtuple("LayerWeights", MATRICES)
LayerScales = namedtuple("LayerScales", MATRICES)
# Of one layer: gains (C,), biases of q, k, v (QKV,), gains of q and k (D,); an absent one is empty
LayerVectors = namedtuple("LayerVectors", "attn_norm mlp_norm qkv_bias q_norm k_norm")
# Bytes and scales of the embedding and of output head 0 (V, n C)
Matrix = namedtuple("Matrix", "bytes scale")

class Base:
    """The weights of a model.  weights, scales and vectors: lists, one entry per layer.  wte and
    head: Matrix; both are the same one if the embedding is tied.  stored: f32, bf16, int8 or f64.
    path, sha256: its file, and the checksum in the file's header"""

    def __init__(self, cfg, rows_of, vector_of, stored, dtype=np.float32, path="", sha256=""):
        """rows_of(name, index, i0, i1): (bytes, scales) of the matrix `name` of Params in layer or
        head `index`; vector_of(name, layer): a vector of Params, (n,)"""
        self.cfg, self.stored, self.path, self.sha256 = cfg, stored, path, sha256
        self.dtype = np.dtype(dtype)         # of scales and vectors, and of the computation
        self.weights, self.scales, self.vectors = [], [], []
        for l in range(cfg.n_layer):
            found = [rows_of(name, l) for name in MATRICES]
            self.weights.append(LayerWeights(*(x.bytes for x in found)))
            self.scales.append(LayerScales(*(x.scale for x in found)))
            self.vectors.append(LayerVectors(*(vector_of(x, l) for x in LayerVectors._fields)))
        self.wte = rows_of("wte", 0)
        self.head = self.wte if cfg.tie_embeddings else rows_of("lm_head", 0)
        self.final_norm = vector_of("final_norm", None)

    def matrix(self, name, i=0):
        """A matrix of layer i, or wte or lm_head, as numbers (N, K) in self.dtype"""
        if name in MATRICES:
            w, scale = getattr(self.weights[i], name), getattr(self.scales[i], name)
        else:
            w, scale = self.wte if name == "wte" else self.head
        kind = {"f32": np.float32, "f64": np.float64, "bf16": np.uint16, "int8": np.int8}
        x = from_bf16(w.view(kind[self.stored]))
        return x * scale[:, None] if self.stored == "int8" else x.astype(self.dtype, copy=False)

    @property
    def nbytes(self):
        matrices = [x for weights in self.weights for x in weights] + [self.wte.bytes]
        matrices += [] if self.cfg.tie_embeddings else [self.head.bytes]
        return sum(x.nbytes for x in matrices)

def random_base(cfg, stored, seed=0):
    """A Base of random weights in this format: f32, bf16 or int8"""
    rng = np.random.default_rng(seed)
    shapes = {x.name: x.shape for x in param_table(cfg)}
    dtype = {"f32": np.float32, "bf16": np.uint16, "int8": np.int8}[stored]

    def rows_of(name, i=0):
        N, K = shapes[name][-2:]
        w = aligned((N, K), dtype)
        if stored == "int8":
            w[...] = rng.integers(-127, 128, (N, K), np.int8)
            return Matrix(w.view(np.uint8), np.full(N, 0.02 / 64, np.float32))
        x = np.float32(0.02) * rng.standard_normal((N, K), np.float32)
        w[...] = to_bf16(x) if stored == "bf16" else x
        return Matrix(w.view(np.uint8), np.ones(N, np.float32))

    def vector_of(name, l):
        n = shapes[name][-1]
        return np.zeros(n, np.float32) if name == "qkv_bias" else np.ones(n, np.float32)

    return Base(cfg, rows_of, vector_of, stored)

def base_of_flat(cfg, flat):
    """The Base of a flat buffer of parameters (N,), float32 or float64.  It shares the memory."""
    p = views(flat, param_table(cfg))

    def rows_of(name, i):
        w = getattr(p, name) if name == "wte" else getattr(p, name)[i]
        return Matrix(w.view(np.uint8), np.ones(len(w), flat.dtype))

    def vector_of(name, l):
        return getattr(p, name) if l is None else getattr(p, name)[l]

    return Base(cfg, rows_of, vector_of, {4: "f32", 8: "f64"}[flat.itemsize], flat.dtype)

def base_of_file(c, sha256=""):
    """The Base of an open checkpoint.  Matrices are copied in the type of the file, one tensor at a
    time.     sha256: the checksum in its header"""
    spans, names = {}, iter(tensor_shapes(c.cfg))
    for x in param_table(c.cfg):             # {(name, layer or head): names of its tensors}
        for i in range(x.shape[0] if x.axis else 1):
            if x.start < x.end:
                spans[x.name, i] = [next(names) for _ in FILE_NAMES[x.name]]

    def rows_of(name, i):
        parts = [c.tensors[x] for x in spans[name, i]]
        n, row_bytes = sum(map(len, parts)), parts[0].nbytes // len(parts[0])
        found, scale, start = aligned((n, row_bytes), np.uint8), np.ones(n, np.float32), 0
        for x, part in zip(spans[name, i], parts):
            need_whole(part)
            rows = slice(start, start + len(part))
            found[rows] = np.ascontiguousarray(part).view(np.uint8)
            if part.dtype == np.int8:
                scale[rows] = scale_in(c, x)
            else:
                need_finite_rows(x, found[rows], part.dtype)
            release_pages(part)
            start = rows.stop
        return Matrix(found, scale)

    def vector_of(name, l):
        parts = [c.tensors[x] for x in spans.get((name, l or 0), [])]
        for x, part in zip(spans.get((name, l or 0), []), parts):
            need_finite(x, part)
        return np.concatenate([np.zeros(0, np.float32), *parts]).astype(np.float32)

    return Base(c.cfg, rows_of, vector_of, c.matrices, np.float32, c.path, sha256)

def scale_in(c, name):
    """The scales (N,) of an int8 matrix of an open checkpoint, checked as `from_int8` checks them
    """
    from nanoeuler_parts.checkpoint.matrices import from_int8
    scale = c.tensors[f"{name}_scale"]
    from_int8(name, np.ones((len(scale), 1), np.int8), scale)
    return scale[:, 0]

def need_finite_rows(name, rows, dtype):
    """Rejects NaN and infinity in the bytes of rows of float32 or bfloat16.  Of bfloat16, the
    exponent is tested, without a copy in float32."""
    if dtype != np.uint16:
        need_finite(name, rows.view(dtype))
    elif bad := np.argwhere((rows.view(np.uint16) & 0x7F80) == 0x7F80).tolist():
        raise UserError(f"{name}{bad[0]} is not finite, expected a finite number")
