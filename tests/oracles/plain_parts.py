"""What nanoeuler.py takes from nanoeuler_parts/machine, in plain Python, for tests that run a
changed copy of the program without the compiler.  There is one thread, and there is no bfloat16."""
import math

import numpy as np

MR, TILE_BYTES = 4, 64       # small blocks: a tiny model has edges of blocks
ROWS = DY_COLUMNS = MR


def tile_width(dtype):
    return TILE_BYTES // np.dtype(dtype).itemsize


def tile(out, base, x, b, m, j, add):
    """out[m:m + MR, j:j + width] = x[m:m + MR] @ b[:, j:j + width], + the same block of base if add
    out, base (M, N), x (M, K), b (K, N) or its packed panels (ceil(N / width), K, width)"""
    width = tile_width(out.dtype)
    rows, n = slice(m, min(m + MR, len(out))), min(width, out.shape[1] - j)
    product = x[rows] @ (b[j // width][:, :n] if b.ndim == 3 else b[:x.shape[1], j:j + n])
    out[rows, j:j + n] = base[rows, j:j + n] + product if add else product


def rows_tile(y, x, w, scale, r, i, add, R):
    """y[r:r + R, columns of panel i] = scale * (x[r:r + R] W^T), + y if add
    y (.., N), x (.., K), w: W (N, K) in panels (ceil(N / width), K, width), scale (N,)"""
    width = w.shape[2]
    columns = slice(i * width, min(y.shape[1], (i + 1) * width))
    product = scale[columns] * (x[r:r + R] @ w[i])[:, :columns.stop - columns.start]
    y[r:r + R, columns] = product + add * y[r:r + R, columns]


def pack(panels, b):
    """panels[i, k, j] = b[k, i * width + j], zeros past N
    panels (ceil(N / width), K, width), b (K, N)"""
    I, K, width = panels.shape
    padded = np.zeros((K, max(I * width, b.shape[1])), b.dtype)
    padded[:, :b.shape[1]] = b[:K]
    panels[...] = padded[:, :I * width].reshape(K, I, width).transpose(1, 0, 2)


def panel_rows(n, dtype):
    return n


def narrowed(x, b):
    return x


def narrowed_transpose(x, b):
    return x.T


def counters(n):
    return np.zeros((n, 16), np.int64)


def fetch_add(counter, i):
    counter[i] += 1
    return counter[i] - 1


def next_below(counter, i, end):
    old = counter[i]
    if old < end:
        counter[i] = old + 1
    return old


def seen(counter, i):
    return counter[i]


def wait_until(counter, i, least):
    """Does nothing: the only thread has already done it."""


def most_memory():
    return math.inf


def fill_cache(parts):
    """Does nothing: nothing is compiled."""
