"""Matrices of a checkpoint in int8 and bfloat16.

`quantize` stores each matrix as int8, with one float32 scale per row in the tensor NAME_scale.
This is the naming of the compressed-tensors format.  Gains stay float32; moments are not stored.
"""
import numpy as np

from bpe import UserError
from nanoeuler import converted
from nanoeuler_parts.checkpoint.tensors import tensor_shapes
from nanoeuler_parts.files.safetensors import DTYPES
from nanoeuler_parts.machine.numbers import to_bf16

# ---- matrices in int8
# `quantize` stores each matrix as int8, with one float32 scale per row in the tensor NAME_scale.
# This is the naming of the compressed-tensors format.  Gains stay float32; moments are not stored.
def in_int8(w):
    """(q (N, K) int8, scale (N, 1) float32) with scale * q ~ w (N, K), rounded as in `converted`
    The scale uses 17 of the 24 significant bits of a float32 and q needs 7, so scale * q is exact.
    A decoder with int8 weights rounds scale * q again, and finds the same q and scale."""
    _, scale = converted(w, "int8")
    scale = (scale.view(np.uint32) & ~np.uint32(127)).view(np.float32)[:, None]
    return np.rint(w / scale).astype(np.int8), scale

def from_int8(name, q, scale):
    """scale * q (N, K) float32, from the tensors `name` and `name`_scale of a file"""
    bad = np.flatnonzero(~(np.isfinite(scale) & (scale > 0)))
    if bad.size:
        raise UserError(f"{name}_scale[{bad[0]}] is {scale.flat[bad[0]]}, expected a positive "
                        f"number")
    with np.errstate(over="ignore"):         # `need_finite` reports an overflow
        return q * scale

def as_int8(tensors):
    """{name: array} with the matrices in int8.  float32 tensors come first, to stay aligned."""
    floats, matrices = {}, {}
    for name, x in tensors.items():
        if x.ndim > 1:
            matrices[name], floats[f"{name}_scale"] = in_int8(x)
        else:
            floats[name] = x
    return floats | matrices

def as_bf16(tensors):
    """{name: array} with the matrices in bfloat16"""
    floats = {name: x for name, x in tensors.items() if x.ndim == 1}
    return floats | {name: to_bf16(x) for name, x in tensors.items() if x.ndim > 1}

def types_of(tensors):
    """{name: (dtype, shape)}"""
    return {name: (x.dtype, x.shape) for name, x in tensors.items()}

def expected_types(cfg, matrices):
    """`types_of` the weights of a checkpoint whose matrices are "f32", "bf16" or "int8".  Like
    `as_int8` and `as_bf16`, it has vectors and scales first."""
    of_matrix = DTYPES[{"f32": "F32", "bf16": "BF16", "int8": "I8"}[matrices]]
    shapes = tensor_shapes(cfg)
    if matrices == "f32":
        return {name: (of_matrix, shape) for name, shape in shapes.items()}
    floats, of_matrices = {}, {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            floats[name] = DTYPES["F32"], shape
        else:
            of_matrices[name] = of_matrix, shape
            if matrices == "int8":
                floats[f"{name}_scale"] = DTYPES["F32"], (shape[0], 1)
    return floats | of_matrices
