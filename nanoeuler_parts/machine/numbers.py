"""bfloat16 and int8: conversion, rounding, and packing into panels.

Section 12 of nanoeuler.py lists these functions, and its kernels call them.
"""
import math

import numpy as np
from numba import float32, int32, types
from numba.extending import overload

import bpe
from nanoeuler_parts.machine.compiling import FILES, jit, OPTIONS
from nanoeuler_parts.machine.tile import larger, pack_vectors

BF16 = np.dtype(np.uint16)   # bfloat16 is stored as the upper half of a float32
ONE, HALF = np.float32(1), np.float32(0.5)

@jit
def pack(panels, b):
    """panels[i, k, j] = b[k, i * width + j], zeros past N     panels (ceil(N / width), K, width),
    b (K, N).  A tile reads panels in memory order.  To pack W^T, pass the view W.T as b.
    A row of a bfloat16 panel holds a pair of rows of b (see `pack_row`)."""
    I, n_rows, width = panels.shape
    N = b.shape[1]
    for i in range(I):
        columns = b[:, i * width:min(N, (i + 1) * width)]
        for k in range(n_rows):
            pack_row(panels[i, k], columns, k)

def to_bf16(x):
    """The bfloat16 bits, uint16, of float32 x: rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)

def from_bf16(x):
    """float32 from bfloat16 bits, uint16.  Other types are returned unchanged."""
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x

def value(x):
    """The number that a stored x stands for.  A uint16 is the upper half of a float32."""
    return from_bf16(np.asarray(x))[()]

@overload(value, inline="always")            # compiled code calls a function that _value returns
def _value(x):
    if x == types.uint16:
        return lambda x: np.int32(int32(x) << int32(16)).view(np.float32)
    if x == types.int8:
        return lambda x: float32(x)
    return lambda x: x

def bf16_bits(x):
    """The bfloat16 bits of x, as an int32.  A float32 is rounded to the nearest, ties to even; a
    uint16 already holds bfloat16 bits.  The NaNs that arithmetic produces stay NaNs.  A NaN with
    other low bits may become inf or zero."""
    return int(x if isinstance(x, np.uint16) else to_bf16(x)[0])

@overload(bf16_bits, inline="always")
def _bf16_bits(x):
    if x == types.uint16:
        return lambda x: int32(x)

    def nearest(x):
        bits = np.float32(x).view(np.int32)
        even = (bits >> int32(16)) & int32(1)
        return ((bits + int32(0x7FFF) + even) >> int32(16)) & int32(0xFFFF)
    return nearest

def rounded(x, like):
    """x as the array `like` would store it: bfloat16 bits if `like` is uint16, else unchanged."""
    return np.uint16(bf16_bits(x)) if like.dtype == BF16 else x

@overload(rounded, inline="always")
def _rounded(x, like):
    if like.dtype == types.uint16:
        return lambda x, like: np.uint16(bf16_bits(x))
    return lambda x, like: x

def panel_rows(n, dtype):
    """The number of panel rows that n matrix rows fill.  A bfloat16 panel holds two matrix rows
    per panel row, in an int32.  An int8 panel for integer products holds four, in a uint32."""
    return -(-n // NUMBERS_IN.get(np.dtype(dtype), 1))

NUMBERS_IN = {BF16: 2, np.dtype(np.int32): 2, np.dtype(np.uint32): 4}

@overload(panel_rows, inline="always")
def _panel_rows(n, dtype):
    each = NUMBERS_IN.get(np.dtype(str(dtype.dtype)), 1)
    return lambda n, dtype: (n + each - 1) // each

def pair_of(even, odd, mask, like):
    """The panel entry of two matrix rows.  An int32 holds both; mask 0 clears the odd number.
    Other types hold only the even number."""
    return bf16_bits(even) | (bf16_bits(odd) & mask) << 16 if like.dtype == np.int32 else even

@overload(pair_of, inline="always")
def _pair_of(even, odd, mask, like):
    if like.dtype != types.int32:
        return lambda even, odd, mask, like: even

    def both(even, odd, mask, like):
        return bf16_bits(even) | ((bf16_bits(odd) & mask) << int32(16))
    return both

@bpe.jit(files=FILES, inline="always", **OPTIONS)
def pack_row(row, columns, k):
    """Packs row k of a panel.     row (width,), columns (K, n) of a matrix; zeros past n
    In bfloat16, an entry is an int32: columns[2k, j] in its lower half, columns[2k + 1, j] in its
    upper half, or zero there if 2k + 1 is past K."""
    K, n = columns.shape
    step = numbers_in(row)
    last = step * (k + 1) - 1                # last matrix row in row k: 2k + 1 for pairs, else k
    mask = int32(-1) if last < K else int32(0)
    first, second = columns[step * k], columns[min(last, K - 1)]
    whole = pack_vectors(row, first, second, mask)       # every column, for W^T and K^T
    for j in range(whole, n):
        row[j] = pair_of(first[j], second[j], mask, row)
    for j in range(n, row.size):
        row[j] = 0

def numbers_in(panel):
    """How many numbers of a matrix an entry of this panel holds: 1, 2 or 4."""
    return NUMBERS_IN.get(panel.dtype, 1)

@overload(numbers_in, inline="always")
def _numbers_in(panel):
    n = NUMBERS_IN.get(np.dtype(str(panel.dtype)), 1)
    return lambda panel: n

def panel_entry(column, k, scale):
    """Entry k of a matrix column, as float32 or float64, read from its panel column.
    Numbers of int8 are not scaled: `scale` only supplies the dtype."""
    n = numbers_in(column)
    x, nth = column[k // n], k % n
    if n == 4:
        return int(x >> 8 * nth & 255) - 128
    return from_bf16(np.array([x >> 16 * nth & 0xFFFF], np.uint16))[0] if n == 2 else x

@overload(panel_entry, inline="always")
def _panel_entry(column, k, scale):
    if column.dtype == types.int32:
        def half(column, k, scale):
            x = column[k // 2]
            bits = x if k % 2 else x << int32(16)
            return np.int32(bits & int32(-65536)).view(np.float32)
        return half
    if column.dtype == types.uint32:
        return lambda column, k, scale: float32(
            int32((column[k // 4] >> (8 * (k % 4))) & 255) - int32(128))
    dtype = np.dtype(str(scale.dtype)).type
    return lambda column, k, scale: dtype(column[k])

def narrowed(x, b):
    """x (M, K) as the left operand of a product with b, a matrix or its packed panels.
    If b is bfloat16 and x is float32, the result is a copy of x, rounded to bfloat16.  Otherwise,
    x is returned unchanged."""
    return in_bf16(x) if x.dtype == np.float32 and b.dtype in (BF16, np.int32) else x

@overload(narrowed, inline="always")
def _narrowed(x, b):
    if x.dtype == types.float32 and b.dtype in (types.uint16, types.int32):
        return lambda x, b: in_bf16(x)
    return lambda x, b: x

@jit
def in_bf16(x):
    """x (M, K) rounded to bfloat16.  A zero follows each row of odd length, because `tile` reads
    the entries of a row in pairs."""
    M, K = x.shape
    copy = np.empty((M, K + 1), np.uint16)
    for m in range(M):
        row, source = copy[m, :K], x[m]
        for k in range(K):
            row[k] = rounded(source[k], copy)
        if K % 2:
            copy[m, K] = 0
    return copy[:, :K]

def quantized(x, w):
    """x (R, K) as the left operand of a product with W, given by its packed panels w.
    If w holds int8 numbers for integer products, a float32 x is converted to 16-bit fixed point.
    Otherwise, x is returned unchanged."""
    return in_fixed_point(x) if x.dtype == np.float32 and w.dtype == np.uint32 else x

@overload(quantized, inline="always")
def _quantized(x, w):
    if x.dtype == types.float32 and w.dtype == types.uint32:
        return lambda x, w: in_fixed_point(x)
    return lambda x, w: x

@jit
def in_fixed_point(x):
    """x (M, K) in 16-bit fixed point: x = scale * (256 upper + lower), with one scale per row.
    Returns int32 (M, 2 n + 3), n = ceil(K / 4).  Columns of a row:
        0 to n, n to 2 n    the upper and the lower bytes, int8, four in each int32
        2 n, 2 n + 1        -128 times the sum of the upper and of the lower bytes
        2 n + 2             the bits of the scale, float32
    `in_panels` adds 128 to each weight; the two sums cancel these 128 in a product."""
    M, K = x.shape
    n = (K + 3) // 4
    copy = np.empty((M, 2 * n + 3), np.int32)
    for m in range(M):
        source, row, largest = x[m], copy[m], float32(1e-30)
        for k in range(K):
            largest = larger(largest, larger(source[k], -source[k]))
        scale = largest / float32(127 * 256)
        per_unit = ONE / scale
        upper, lower = row[:n].view(np.int8), row[n:2 * n].view(np.int8)
        of_upper = of_lower = int32(0)
        for k in range(K):
            unit = int32(math.floor(source[k] * per_unit + HALF))
            byte = int32((unit + int32(128)) >> int32(8))        # -127 to 127
            rest = int32(unit - (byte << int32(8)))              # -128 to 127
            upper[k], lower[k] = byte, rest
            of_upper, of_lower = int32(of_upper + byte), int32(of_lower + rest)
        for k in range(K, 4 * n):
            upper[k] = lower[k] = 0
        row[2 * n], row[2 * n + 1] = -128 * of_upper, -128 * of_lower
        row[2 * n + 2] = np.float32(scale).view(np.int32)
    return copy

def narrowed_transpose(x, b):
    """x^T (M, K), for x (K, M), as the left operand of a product with b.
    If b is bfloat16, the result is a rounded copy, packed in pairs like a panel.  Otherwise, it is
    the view x.T."""
    return in_pairs(x) if b.dtype in (BF16, np.int32) else x.T

@overload(narrowed_transpose, inline="always")
def _narrowed_transpose(x, b):
    if b.dtype in (types.uint16, types.int32):
        return lambda x, b: in_pairs(x)
    return lambda x, b: x.T

@jit
def in_pairs(x):
    K, M = x.shape
    pairs = np.empty((1, (K + 1) // 2, M), np.int32)
    pack(pairs, x)
    return pairs[0].T
