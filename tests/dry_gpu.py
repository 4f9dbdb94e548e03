"""A GPU that computes nothing: memory that is only counted, and launches that are recorded, each
checked against what its kernel asks of its arguments.  For the tests of the GPU program where there
is no GPU."""
import ast
import contextlib
import functools
import importlib.util
import inspect
import math
import sys
from collections import namedtuple
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

if importlib.util.find_spec("numba_cuda") is None:
    pytest.skip("numba-cuda is not installed; it comes with the extra cuda",
                allow_module_level=True)

from numba import cuda

import nanoeuler as ne
import nanoeuler_cuda as nc
from nanoeuler_parts.gpu import launches
from nanoeuler_parts.gpu_lora import LoraModel
from nanoeuler_parts.lora.adapter import Lora
from nanoeuler_parts.lora.base import base_of_flat
from nanoeuler_parts.lora.model import Adapted
from nanoeuler_parts.ranks import engine
from nanoeuler_parts.decode import prompts, steps
from nanoeuler_parts.tensor_cores import ptx
from nanoeuler_parts.tensor_cores.attention import tensor_attention
from nanoeuler_parts.decode.attend import keys_per_split
from nanoeuler_parts.decode.products import GROUP, weight_stride
from nanoeuler_parts.decode.prompts import BY_ROWS
from nanoeuler_parts.decode.sampling import room_for_list
from nanoeuler_parts.decode.table import AT_ONCE
from nanoeuler_parts.tensor_cores.matmul_mma import MMA_SMEM
from nanoeuler_parts.tensor_cores.matmul_wgmma import wgmma_smem
from nanoeuler_parts.tensor_cores.one_tile import ONE_TILE_SMEM, one_tile_matmul
from oracles.naive_attention import NaiveModel

SMALL, BIG, BASE, LARGE, XL = (ne.PRESETS[x] for x in ("small", "big", "base", "large", "xl"))
Dispatcher = type(nc.matmul_kernel)


# ---- a device that computes nothing
class Memory:
    """A stretch of device memory: an address and a size, and nothing behind them."""

    def __init__(self, device, address, size, owner=None):
        self.device, self.address, self.size, self.owner = device, address, size, owner
        if owner is None:
            device.used += size
            device.peak = max(device.peak, device.used)

    def __del__(self):
        if self.owner is None:
            self.device.used -= self.size

    def view(self, start, stop=None):
        stop = self.size if stop is None else stop
        assert 0 <= start <= stop <= self.size, f"a view of {start} to {stop} of {self.size} bytes"
        return Memory(self.device, self.address + start, stop - start, self.owner or self)

    def memset(self, byte, count=None, stream=0):
        assert byte == 0 and stream is nc.gpu.stream         # or a graph would not record it
        self.device.cleared.append((self.address, self.size if count is None else count))

    @property
    def device_pointer(self):
        return self.address


def extent(x):
    """(first, one past the last) address of a device array."""
    if x.size == 0:                          # no memory: numba-cuda gives it no address
        return 0, 0
    assert min(x.strides) >= 0
    span = sum((n - 1) * s for n, s in zip(x.shape, x.strides)) + x.dtype.itemsize
    return x.gpu_data.address, x.gpu_data.address + span


def apart(out, *inputs):
    """Threads write out while others read the inputs: they must not share memory."""
    a0, a1 = extent(out)
    for x in inputs:
        b0, b1 = extent(x)
        assert a1 <= b0 or b1 <= a0, "the result lies on its operand"


def tiles(n, size):
    return -(-n // size)


class Launch(namedtuple("Launch", "kernel types grid block smem args asked")):
    """A recorded launch.  For every kernel, a method of its name that knows which shapes of its
    arguments fit together, and the grid and block which its docstring names."""

    def check(self):
        assert len(self.grid) == len(self.block) == 3
        assert all(1 <= n <= most for n, most in zip(self.grid, (2**31 - 1, 65535, 65535))), (
            f"grid {self.grid}")
        assert min(self.block) >= 1 and math.prod(self.block) <= 1024 and self.block[2] <= 64
        assert self.smem == 0 or launches.check_once(launches.allow_shared) in self.asked
        for x in filter(is_array, self.args):
            first, end = extent(x)
            assert end - first <= x.gpu_data.size, "an array beyond the end of its memory"
        getattr(self, self.name)(*self.args)

    @property
    def name(self):
        return name_of(self.kernel)

    def runs(self, grid, block, smem=0):
        pad = lambda x: (*x, 1, 1)[:3] if isinstance(x, tuple) else (x, 1, 1)
        assert (self.grid, self.block, self.smem) == (pad(grid), pad(block), smem)

    def vectors(self, *arrays):
        """The kernel walks over these arrays' memory, W elements at a time.  Returns W."""
        W = constants(self.kernel).get("W", 1)
        for x in arrays:
            assert x.is_c_contiguous() and x.shape[-1] % W == 0
            assert extent(x)[0] % min(16, W * x.dtype.itemsize) == 0
        return W

    def matmul_kernel(self, out, a, b, add):
        (n, M, N), K = out.shape, a.shape[2]
        assert a.shape == (n, M, K) and b.shape == (n, K, N)
        self.runs((tiles(M, 128) * tiles(N, 128), 1, n), (16, 16))
        apart(out, a, b)

    def wgmma_kernel_kernel(self, map_a, map_b, map_out, semaphores, x, M, N, K, n, splits,
                            add):
        f, maps = constants(self.kernel), map_a.gpu_data.device.maps
        writes, loads = constants(f["writer"].write_tile), constants(f["load_slice"])
        adds, batched = writes["adds"], constants(writes["send_box"])["batched"]
        a, b, out = (maps[y.gpu_data.address] for y in (map_a, map_b, map_out))
        assert n == 1 or batched and splits == 1
        assert all(y[6:7] == ((n,) if len(y) > 6 else ()) for y in (a, b, out))
        if f["changes"]:
            assert x.shape == ((n, M, N) if batched else (M, N))
        a_mn, b_mn = loads["a_mn"], loads["b_mn"]
        assert a[1:3] == ((K, M) if a_mn else (M, K)) and a[4] == (64 if a_mn else 128)
        columns = f["COLUMNS"]
        assert columns == 256 or not adds and not f["symmetric"]
        assert columns == 2 * f["SUMS"] == 64 * writes["BOXES"]
        panels = f["SLICE_K"] // 64
        assert panels == (2 if columns < 256 and not (a_mn or b_mn) else 1)
        assert loads["STAGE_BYTES"] == f["STAGE_BYTES"] == panels * 2 * 64 * (128 + columns)
        assert loads["B_START"] == f["B_START"] == panels * 2 * 64 * 128
        assert b[1:3] == ((K, N) if b_mn else (N, K)) and b[4] == (64 if b_mn else columns)
        assert a[5] == b[5] == 2 and out[1:3] == (M, N) and out[4] == 64
        assert out[5] == (4 if adds else 2) and 1 <= splits
        if len(a) == 6:
            assert splits <= tiles(K, 64)
            enough = semaphores.size >= 2 * tiles(M, 128) * tiles(N, 256)
            assert splits == 1 or adds and enough
            assert splits == 1 or launches.check_once(launches.need_resident) in self.asked
        first, end = out[0], out[0] + (M - 1) * out[3] + out[5] * N
        for pointer, rows, row, stride, _, size, *_ in (a, b):
            assert end <= pointer or pointer + (rows - 1) * stride + size * row <= first
        computed = sum(not f["symmetric"] or i >= 2 * j for i in range(tiles(M, 128))
                       for j in range(tiles(N, columns)))
        assert M == N or not f["symmetric"]
        self.runs(min(computed * n * splits, 46), 384, wgmma_smem(columns, panels))

    def naive_matmul_kernel(self, out, x, w):
        assert (len(x), len(w)) == out.shape and x.shape[1] == w.shape[1]
        self.runs((tiles(len(x), 8), tiles(len(w), 32)), (32, 8))
        apart(out, x, w)

    def tensor_core_kernel(self, out, x, w):
        assert (len(x), len(w)) == out.shape and x.shape[1] == w.shape[1]
        assert x.dtype == w.dtype == np.uint32 and out.dtype == np.uint16
        self.runs((tiles(len(x), 64), tiles(len(w), 64)), 128)
        apart(out, x, w)

    def one_tile_kernel(self, out, map_a, map_b, K):
        (M, N), maps = out.shape, map_a.gpu_data.device.maps
        a, b = (maps[x.gpu_data.address] for x in (map_a, map_b))
        assert a[1:3] == (M, K) and b[1:3] == (N, K) and a[4] == b[4] == 64 and a[5] == b[5] == 2
        self.runs((tiles(N, 64), tiles(M, 64)), 128, ONE_TILE_SMEM)

    def mma_kernel_kernel(self, out, a, b, x, semaphores, M, N, K, splits, add):
        loop = constants(constants(self.kernel)["multiply_slices"])
        a_mn, b_mn = (constants(loop[f"of_{x}"].issue_loads)["mn"] for x in "ab")
        assert x is out or constants(self.kernel)["changes"] and x.shape == out.shape
        if out.ndim == 3:
            assert out.shape[0] == a.shape[0] == b.shape[0] and splits == 1
            apart(out, a, b)
            self.runs((tiles(M, 128) * tiles(N, 128), len(out)), 128, MMA_SMEM)
            assert all(x.strides[0] % 16 == 0 for x in (a, b, out))
            out, a, b = out[0], a[0], b[0]
        else:
            self.runs(tiles(M, 128) * tiles(N, 128) * splits, 128, MMA_SMEM)
        assert a.shape == ((K, M) if a_mn else (M, K))
        assert b.shape == ((K, N) if b_mn else (N, K)) and N % 4 == 0
        assert a.dtype == b.dtype == np.uint16
        assert all(x.strides[0] % 16 == extent(x)[0] % 16 == 0 for x in (a, b, out))
        assert out.shape == (M, N) and 1 <= splits <= tiles(K, 64)
        accumulate = out.dtype == np.float32
        assert splits == 1 or accumulate and semaphores.size >= tiles(M, 128) * tiles(N, 128)
        apart(out, a, b)

    def embedding_forward_kernel(self, x, tokens, wte):
        assert x.shape[0] <= tokens.size and x.shape[1] == wte.shape[1]
        self.runs(x.shape[0], 128)

    def embedding_backward_kernel_backward(self, dwte, dx, order, starts, tokens):
        assert dx.shape[1:] == dwte.shape[1:] and order.size <= len(dx)  # the last rows are padding
        assert 0 < tokens.size == starts.size - 1 <= min(len(dwte), order.size)
        assert {x.dtype for x in (order, starts, tokens)} == {np.dtype(np.int32)}
        W = self.vectors(dx)
        self.runs((tokens.size, tiles(dx.shape[1], 32 * W)), 256)

    def rmsnorm_kernels_residual_forward(self, y, kept, rstd, x, w, eps, step):
        assert y.shape == kept.shape == x.shape and x.dtype == rstd.dtype == w.dtype
        assert rstd.size == x.shape[0] and w.shape == x.shape[1:]
        self.runs(tiles(x.shape[0], 8), (32, 8))
        self.vectors(y, kept, x, w)
        apart(x, y, kept)
        apart(y, kept)

    def normalized_kernel_normalized(self, y, x, rstd, w):
        assert y.shape == x.shape and rstd.size == x.shape[0] and w.shape == x.shape[1:]
        self.runs(1024, 256)
        self.vectors(y, x, w)
        apart(y, x)
        assert constants(self.kernel)["C"] == x.shape[1]

    def rmsnorm_kernels_backward(self, dx, dy, partial, x, w, rstd):
        assert dx.shape == dy.shape == x.shape and w.shape == partial.shape[1:] == x.shape[1:]
        assert rstd.size == x.shape[0]
        warps = self.block[1]
        self.runs(len(partial), (32, warps), warps * partial.shape[1] * partial.dtype.itemsize)
        self.vectors(dx, dy, x, w)
        apart(dx, dy, x)
        apart(dy, x)
        assert constants(self.kernel)["C"] == x.shape[1]

    def sum_rows_kernel(self, out, x):
        assert out.shape == x.shape[:1]
        self.runs(len(x), 256)
        apart(out, x)

    def rope_kernel_rotate(self, qkv, cos, sin, T, heads, sign):
        assert cos.shape == sin.shape and T <= len(cos) and qkv.shape[0] % T == 0
        assert heads * 2 * cos.shape[1] < qkv.shape[1]             # v is not turned
        pairs = tiles(heads * cos.shape[1], self.vectors(qkv, cos, sin))
        self.runs(qkv.shape[0], min(256, tiles(pairs, 32) * 32))     # a thread for each W of them

    def attention(self, qkv, T, HD, *rows):
        """What six kernels share.  rows: one number for each head and row.  Returns B, H, G, D."""
        (BT, QKV), H = qkv.shape, rows[0].shape[0]
        D, G = HD // H, (QKV - HD) // (2 * (HD // H))
        assert BT % T == 0 and HD == H * D and QKV == (H + 2 * G) * D and H % G == 0
        assert all(x.shape == (H, BT) for x in rows)
        return BT // T, H, G, D

    def portable(self, qkv, T, HD, *rows):
        B, H, G, D = self.attention(qkv, T, HD, *rows)
        window = constants(self.kernel)["window"]
        return B, H, G, nc.portable_attention(D, max(4, qkv.dtype.itemsize), 99 << 10, window)

    def matrices(self, *sources):
        """What the copy engine is told of, or the matrices themselves."""
        maps = self.args[0].gpu_data.device.maps
        if sources[0].dtype != np.uint64:
            assert all(extent(x)[0] % 16 == 0 == 2 * x.shape[1] % 16 for x in sources)
            return sources
        keys = [maps[x.gpu_data.address] for x in sources]
        assert all(key[4] == 64 and key[3] == 2 * key[2] for key in keys)
        return [SimpleNamespace(shape=key[1:3], first=key[0]) for key in keys]

    def tensor_attention(self, qkv, T, HD, *rows):
        B, H, G, D = self.attention(qkv, T, HD, *rows)
        hopper = self.args[2 if self.name.endswith("forward_forward") else 5].dtype == np.uint64
        assert not hopper or nc.kernel_path() == "wgmma" and D in (64, 128) and (
            T % 64 == 0 or B == 1)
        found = constants(self.kernel)       # dkv has the window itself
        window = found["window"] if "window" in found else constants(found["first_key"])["window"]
        k = tensor_attention(D, hopper, window=window, tiles=found.get("TILES", 1))
        assert D in (32, 64, 128) and self.kernel in k and 0 <= window
        return B, H, G, D, k

    def portable_attention_forward(self, o, lse, qkv, T, G, scale):
        B, H, groups, k = self.portable(qkv, T, o.shape[1], lse)
        assert o.shape[0] == qkv.shape[0] and G == groups
        self.runs((tiles(T, k.rows), H, B), (16, 8), k.smem)
        apart(o, qkv)

    def portable_attention_backward_run(self, dqkv, delta, do, o, lse, qkv, cos, sin, T, HD, scale):
        B, H, G, k = self.portable(qkv, T, HD, lse, delta)
        assert do.shape == o.shape == (qkv.shape[0], HD) and dqkv.shape == qkv.shape
        self.runs((tiles(T, k.back_rows), H if self.kernel is k.dq else G, B), (16, 8), k.back_smem)
        apart(dqkv, qkv, do)

    def tensor_attention_forward_forward(self, o, lse, qkv, T, G, scale):
        [qkv] = self.matrices(qkv)
        B, H, groups, D, k = self.tensor_attention(qkv, T, o.shape[1], lse)
        assert o.shape[0] == qkv.shape[0] and G == groups
        rows = 64 if D == 128 or B * H * T <= 128 * 46 else 128
        assert k.rows == rows
        self.runs((tiles(T, rows), H, B), 128, k.smem)

    def tensor_attention_dq_dq(self, dqkv, delta, do, o, lse, qkv, cos, sin, T, HD, scale):
        do, o, qkv = self.matrices(do, o, qkv)
        B, H, G, D, k = self.tensor_attention(qkv, T, HD, lse, delta)
        assert tuple(do.shape) == tuple(o.shape) == (qkv.shape[0], HD)
        assert tuple(dqkv.shape) == tuple(qkv.shape)
        assert cos.shape == sin.shape == (len(cos), D // 2) and len(cos) >= T
        self.runs((tiles(T, 64), H if self.kernel is k.dq else G, B), 128, k.back_smem)

    tensor_attention_dkv_dkv = tensor_attention_dq_dq

    def softmax_kernel(self, p, window, scale):
        Z, H, T, T2 = p.shape
        assert T == T2 and window > 0
        self.runs((tiles(T, 8), Z * H), (32, 8))

    def softmax_backward_kernel(self, ds, p, scale):
        assert ds.shape == p.shape
        self.softmax_kernel(p, 1, scale)
        apart(ds, p)

    def swiglu_kernels_forward(self, y, gate_up):
        assert gate_up.shape == (len(y), 2 * y.shape[1])
        self.runs(len(y), 256)
        self.vectors(y, gate_up)

    def swiglu_kernels_backward(self, gate_up, dy):
        self.swiglu_kernels_forward(dy, gate_up)

    def cross_entropy_kernel_fused(self, nll, logits, targets, weight, row0, V, T):
        (P, BT), (R, PV) = nll.shape, logits.shape
        heads = PV // V
        assert PV == heads * V and 1 <= heads <= P
        assert targets.shape == (P, BT) and weight.shape == (-(-BT // T), P, T)
        assert 0 <= row0 and row0 + R <= BT
        self.runs((R, heads), 256)
        assert self.vectors(logits) in (1, math.gcd(V, 8))

    def fill_kernel(self, x, value):
        assert self.block == (256, 1, 1)

    def square_sums_kernel(self, partial, g):
        self.runs(partial.size, 256)

    def adamw_kernel_update(self, p, w, g, m, v, n_decay, hyper, partial, results):
        assert p.shape == w.shape == g.shape == m.shape == v.shape and 0 <= n_decay <= p.size
        assert hyper.shape == (len(ne.Hyper._fields),) and self.block == (256, 1, 1)
        self.vectors(p, w, g, m, v)
        apart(p, g, m, v)

    def keep_blocks_kernel(self, g, ends, r):
        assert g.ndim == 2 and ends.ndim == 1 and len(g) % ((ends.size - 1) * r) == 0
        self.runs(len(g), 256)

    def scale_kernel(self, out, x, s):
        assert out.shape == x.shape and out.ndim == 1
        apart(out, x)

    def of_matrices(self, x, starts, *flat):
        """Checks that the kernels of Muon share: matrices (n, N, K), and their places in buffers"""
        n, N, K = x.shape
        assert starts.shape == (n,) and starts.dtype == np.int64
        first = starts.gpu_data.device.read(starts)
        W = constants(self.kernel)["W"] if "W" in constants(self.kernel) else 1
        for y in flat:
            assert y.ndim == 1 and N * K <= y.size and first.max() + N * K <= y.size
            assert extent(y)[0] % (W * y.dtype.itemsize) == 0
        self.runs((nc.MATRIX_PARTS, n), 256)

    def nesterov_kernel_nesterov(self, x, squares, g, m, starts, hyper, partial, results):
        self.of_matrices(x, starts, g, m)
        assert len(squares) >= len(x) and squares.shape[1] == nc.MATRIX_PARTS
        assert hyper.shape == (len(ne.Hyper._fields),)
        apart(x, g, m)

    def normalize_kernel_normalize(self, x, squares):
        assert len(squares) >= len(x) and squares.shape[1] == nc.MATRIX_PARTS
        self.runs((nc.MATRIX_PARTS, len(x)), 256)

    def polynomial_kernel(self, out, x, a, b, c):
        assert out.shape == x.shape and x.shape[1] == x.shape[2]
        self.runs((nc.MATRIX_PARTS, len(x)), 256)
        apart(out, x)

    def muon_kernel_step(self, p, w, x, starts, hyper, partial):
        self.of_matrices(x, starts, p, w)
        assert hyper.shape == (len(ne.Hyper._fields),)
        apart(p, x)

    def add_in_order_kernel(self, g, others, rank):
        assert g.ndim == 1 and g.size <= others.shape[1] and 0 <= rank < len(others)
        assert self.block == (256, 1, 1)
        apart(g, others)

    def matvec_kernel(self, y, w, x):
        assert y.shape == w.shape[:1] and x.shape == w.shape[1:]
        self.runs(tiles(y.size, 8), (32, 8))
        apart(y, x)

    def rope_cache_kernel(self, qkv, kc, vc, cos, sin, at, H):
        G, T, D = kc.shape
        assert vc.shape == kc.shape and qkv.shape == ((H + 2 * G) * D,) and at.shape == (2,)
        assert cos.shape == sin.shape and T <= len(cos) and 2 * cos.shape[1] == D
        self.runs(H + 2 * G, 32)

    def add_bias_kernel(self, qkv, bias):
        assert bias.shape == qkv.shape[1:]
        self.runs(len(qkv), 256)
        apart(qkv, bias)

    def sum_columns_kernel(self, partial, x):
        assert partial.shape == (nc.GAIN_PARTS, x.shape[1])
        self.runs(nc.GAIN_PARTS, 256)
        apart(partial, x)

    def heads(self, qkv, qk, rstd, q_gain, k_gain):
        (BT, QKV), heads, [D] = qkv.shape, rstd.shape[1], q_gain.shape
        assert rstd.shape == (BT, heads) and qk.shape == (BT, heads * D) and heads * D < QKV
        assert k_gain.shape == (D,) and QKV % D == 0 and qk.dtype == qkv.dtype
        return BT, heads, D

    def head_norm_kernels_forward(self, qkv, qk, rstd, q_gain, k_gain, eps):
        BT, heads, D = self.heads(qkv, qk, rstd, q_gain, k_gain)
        self.runs(tiles(BT * heads, 8 * self.heads_per_warp(D)), (32, 8))
        apart(qkv, qk, rstd, q_gain, k_gain)
        apart(qk, rstd)

    def heads_per_warp(self, D):
        f = constants(self.kernel)
        assert f["D"] == D <= f["W"] * f["LANES"] * f["CHUNKS"] and 32 == f["LANES"] * f["HEADS"]
        assert f["LANES"] in (1, 2, 4, 8, 16, 32) and f["PER_LANE"] == f["W"] * f["CHUNKS"]
        return f["HEADS"]

    def head_norm_kernels_backward(self, dqkv, partial, qk, rstd, q_gain, k_gain):
        _, _, D = self.heads(dqkv, qk, rstd, q_gain, k_gain)
        self.heads_per_warp(D)
        assert partial.shape == (nc.GAIN_PARTS, 2 * D)
        self.runs(nc.GAIN_PARTS, (32, 8))
        apart(dqkv, partial, qk, rstd)
        apart(partial, qk, rstd)

    def rows_of(self, rows, *arrays):
        """What the kernels of a step share: rows of whole vectors."""
        assert rows.shape == (5, AT_ONCE) and rows.dtype == np.int32
        assert all(extent(x)[0] % 16 == 0 for x in arrays)

    def product_runs(self, N, tiles, K, product, normed=False, more_smem=0):
        """Of a product with N outputs a row, blocks of so many tiles of W.  Where long rows of W
        arrive in pieces, no more blocks start than two per multiprocessor."""
        of_kernel = constants(self.kernel)
        groups = of_kernel["X_ROWS"] // GROUP if self.grid[1] > 1 else 1
        assert 1 <= self.grid[1] <= AT_ONCE // GROUP // groups
        hopper, blocks = of_kernel["take_turn"] is ptx.after_previous, -(-N // (8 * tiles))
        ring = SimpleNamespace(**constants(of_kernel[product].multiply))
        in_piece = min(K, 256 * ring.TURNS)
        assert 0 < K - (ring.PIECES - 1) * in_piece <= in_piece and 1 <= ring.STAGES <= 4
        smem = ring.STAGES * tiles * 8 * weight_stride(in_piece) + 4 * K * normed if hopper else 0
        if ring.STAGES > 1 and product in ("x_product", "product"):
            blocks = min(blocks, max(1, 2 * nc.cuda.get_current_device().MULTIPROCESSOR_COUNT
                                     // self.grid[1]))
        self.runs((blocks, self.grid[1]), 256, smem + more_smem)

    def product_kernels_qkv(self, q, kc, vc, x, gain, w, bias, cos, sin, rows, eps):
        (_, G, T, D), (R, HD), C = kc.shape, q.shape, x.shape[1]
        assert vc.shape == kc.shape and R == AT_ONCE == len(x) and gain.shape == (C,)
        assert w.shape == (HD + 2 * G * D, C) and cos.shape == sin.shape == (T, D // 2)
        assert bias.shape == w.shape[:1] or not constants(self.kernel)["biased"]
        assert (constants(self.kernel)["HD"], constants(self.kernel)["D"]) == (HD, D)
        self.rows_of(rows, x, gain, w)
        self.product_runs(len(w), 2, C, "pair_product", normed=True)

    def norm_and_rotate_kernel_norm_and_rotate(self, q, kc, q_gain, k_gain, cos, sin, rows, eps):
        (_, G, T, D), (R, HD) = kc.shape, q.shape
        assert R == AT_ONCE and HD % D == 0 and q_gain.shape == k_gain.shape == (D,)
        assert cos.shape == sin.shape == (T, D // 2) and 1 <= self.grid[1] <= AT_ONCE
        self.rows_of(rows, q, kc)
        self.runs((tiles(HD // D + G, 8), self.grid[1]), 256)
        apart(q, kc)

    def attend_kernel_attend(self, o, ml, q, kc, vc, rows, scale2):
        (_, G, T, D), (R, HD), (_, parts, H, _) = kc.shape, q.shape, ml.shape
        heads, blocks, count = constants(self.kernel)["HEADS"], *self.grid[1:]
        assert vc.shape == kc.shape and HD == H * D and H // G % heads == 0
        assert o.shape == (R, parts, HD) and ml.shape == (R, parts, H, 2)
        assert parts <= tiles(T, keys_per_split(D)) and 1 <= count <= R == AT_ONCE
        assert blocks == parts and constants(self.kernel)["BLOCKS"] == H // G // heads
        self.rows_of(rows, q, kc, vc)
        self.runs((H // heads, blocks, count), 256)
        apart(o, ml, q, kc, vc)

    def advance_kernel(self, rows, latest):
        assert latest.shape == (AT_ONCE,)
        self.rows_of(rows)
        self.runs(1, AT_ONCE)

    def choose_kernel_choose(self, ids, latest, odds, listed, out, draws, rows, V):
        assert ids.shape == draws.shape[:2] == (2, ne.MOST_ROWS) and latest.shape == (AT_ONCE,)
        assert draws.shape[2] == len(ne.SampleRequest._fields)
        assert odds.shape == listed.shape and self.grid[0] <= len(odds)
        assert odds.shape[1] == room_for_list(V) and V < out.shape[1]
        self.rows_of(rows)
        self.runs(self.grid[0], 1024)

    def merge_kernel_merge(self, att, o, ml, rows):
        R, parts, HD = o.shape
        assert att.shape == (R, HD) and R == AT_ONCE and ml.shape[:2] == (R, parts)
        self.rows_of(rows, att, o)
        self.runs((tiles(HD, 512), self.grid[1]), 128)
        apart(att, o, ml)

    def product_kernels_proj(self, x, o, ml, w, rows):
        (R, parts, HD), C = o.shape, x.shape[1]
        assert R == AT_ONCE == len(x) and ml.shape[:2] == (R, parts) and w.shape == (C, HD)
        self.rows_of(rows, x, o, w)
        self.product_runs(C, 1, HD, "att_product", more_smem=4 * GROUP * (HD + 4))
        apart(x, o, ml)

    def product_kernels_gate_up(self, y, x, gain, w, rows, eps):
        (R, F), C = y.shape, x.shape[1]
        assert x.shape == (R, C) and gain.shape == (C,) and w.shape == (2 * F, C)
        self.rows_of(rows, x, gain, w)
        self.product_runs(2 * F, 2 * constants(self.kernel)["HALF_X_TILES"], C, "x_product",
                          normed=True)
        apart(y, x)

    def add_product_kernel_add_product(self, x, y, w, rows):
        (R, K), N = y.shape, x.shape[1]
        assert len(x) == R and w.shape == (N, K)
        self.rows_of(rows, x, y, w)
        self.product_runs(N, constants(self.kernel)["TILES"], K, "product")
        apart(x, y)

    def product_kernels_logits(self, out, x, gain, w, rows, eps):
        V, C = w.shape
        assert out.shape[1] == V + C == V + x.shape[1] and gain.shape == (C,)
        self.rows_of(rows, x, gain, w)
        self.product_runs(V, constants(self.kernel)["X_TILES"], C, "x_product", normed=True)
        apart(out, x)

    def take_kernel_take(self, x, rows, wte):
        assert x.shape == (AT_ONCE, wte.shape[1]) and self.grid[0] <= AT_ONCE
        self.rows_of(rows)
        self.runs(self.grid[0], 128)

    def rotate_and_keep_kernel_rotate_and_keep(self, qkv, kc, vc, cos, sin, given):
        (_, G, T, D), (rows, QKV) = kc.shape, qkv.shape
        assert vc.shape == kc.shape and rows <= T and (QKV - 2 * G * D) % D == 0
        assert given.dtype == np.int32 and given.size >= 2
        assert cos.shape == sin.shape == (T, D // 2) and D // 2 % self.vectors(qkv, cos, sin) == 0
        self.runs(rows, 128)
        apart(kc, vc, qkv)

    def copy_slot_kernel(self, cache, source, slot, n):
        L, slots, G, T, D = cache.shape
        assert source < slots > slot and n <= T
        self.runs((G, L), 256)

    def attention_decode_kernel(self, o, qkv, kc, vc, scores, at, window, scale):
        (G, T, D), H = kc.shape, len(scores)
        assert window > 0
        assert vc.shape == kc.shape and scores.shape == (H, T) and o.shape == (H * D,)
        assert qkv.shape == ((H + 2 * G) * D,) and H % G == 0
        self.runs(H, 256)


def is_array(x):
    return isinstance(x, nc.DeviceNDArray)


def functions_of(function, found):
    """All functions of this project that one calls, by its global variables and its closure"""
    function = getattr(function, "py_func", function)
    if not hasattr(function, "__code__") or function in found:
        return found
    names = inspect.getclosurevars(function)
    if function.__module__.split(".")[0] in ("nanoeuler_cuda", "nanoeuler_parts"):
        found.add(function)
        for value in (*names.globals.values(), *names.nonlocals.values()):
            members = vars(value).values() if isinstance(value, ptx.DeviceFunctions) else [
                value]
            for member in members:
                # an intrinsic's Python function is its `_defn`
                functions_of(getattr(member, "_defn", member), found)
    return found


def name_of(kernel):
    """Of one that a function makes: the function's name and its own."""
    return kernel.py_func.__qualname__.replace(".<locals>.", "_")


@functools.cache
def constants(kernel):
    """What the function that makes a kernel leaves to it."""
    return inspect.getclosurevars(kernel.py_func).nonlocals


class Device:
    """Hands out memory, up to `total` bytes, and keeps the launches.  The host reads `fill` from
    all arrays of numbers, and a NaN at the end of those at the addresses in `bad`."""

    def __init__(self, total):
        self.total, self.used, self.peak, self.address, self.launches = total, 0, 0, 1 << 20, []
        self.cleared = []                    # addresses of memory that was set to zero
        self.configs = {}                    # by kernel, grid, block and shared memory
        self.maps, self.fill, self.bad = {}, 0.0, ()
        self.written = set()                 # addresses of arrays that came from the host
        self.gpu = SimpleNamespace(compute_capability=(8, 9), MULTIPROCESSOR_COUNT=46, name="dry",
                                   MAX_SHARED_MEMORY_PER_MULTIPROCESSOR=100 << 10,
                                   MAX_SHARED_MEMORY_PER_BLOCK_OPTIN=99 << 10)

    def array(self, shape, dtype=np.float64, strides=None, order="C", stream=0):
        shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        if self.used + size > self.total:
            raise nc.CudaAPIError(2, "Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY")
        steps = [math.prod(shape[i + 1:]) * dtype.itemsize for i in range(len(shape))]
        memory = Memory(self, self.address, size)
        self.address += tiles(size, 256) * 256
        return nc.DeviceNDArray(shape, steps, dtype, stream, memory)

    def from_host(self, x):
        out = self.array(x.shape, x.dtype)
        self.written.add(out.gpu_data.address)
        return out

    def tensor_map(self, *key):
        """cuTensorMapEncodeTiled: what it asks of a matrix, or of n matrices"""
        pointer, rows, columns, stride, box_rows, size, *batch = key
        assert pointer % 16 == 0 == stride % 16 and size in (2, 4), "copies go in steps of 16 bytes"
        if batch:
            n, matrix_stride = batch
            assert n > 0 and matrix_stride % 16 == 0 and matrix_stride >= rows * stride
        assert 0 < rows < 1 << 32 and 0 < size * columns <= stride < 1 << 40 and 0 < box_rows <= 256
        x = self.array(16, np.uint64)
        self.maps[x.gpu_data.address] = key
        return x

    def read(self, x):
        host = np.zeros(x.shape, x.dtype)
        if x.dtype == np.uint16 or x.dtype.kind == "f":
            number = lambda v: nc.to_bf16(np.array([v]))[0] if x.dtype == np.uint16 else v
            host[...] = number(self.fill)
            if x.size and x.gpu_data.address in self.bad:
                host.reshape(-1)[-1] = number(np.nan)
        return host

    def configure(self, kernel, key):
        """What kernel[grid, block, stream, smem] is: to be called with the arguments.  Equal ones
        are one, as those of numba-cuda."""
        grid, block, _, smem = (*key, 0, 0)[:4]
        name = kernel, grid, block, smem
        if name in self.configs:
            return self.configs[name]
        pad = lambda x: (*x, 1, 1)[:3] if isinstance(x, tuple) else (x, 1, 1)

        def call(*args):
            kinds = tuple(kernel.typeof_pyval(x) for x in args)
            self.launches.append(Launch(kernel, kinds, pad(grid), pad(block), smem, args,
                                        tuple(call.pre_launch_callbacks)))
            self.launches[-1].check()

        call.pre_launch_callbacks = []
        self.configs[name] = call
        return call


@contextlib.contextmanager
def dry_run(total=1 << 50):
    """nanoeuler_cuda on such a device."""
    device = Device(total)
    memory = lambda: (total - device.used, total)
    context = SimpleNamespace(get_memory_info=memory, device=device.gpu,
                              deallocations=SimpleNamespace(clear=lambda: None))
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in (
                (cuda, "device_array", device.array),
                (cuda, "to_device", lambda x, **_: device.from_host(x)),
                (cuda, "pinned_array", lambda shape, dtype, **_: np.zeros(shape, dtype)),
                (cuda, "mapped_array", lambda shape, dtype, **_: np.zeros(shape, dtype)),
                (cuda, "event", lambda timing: SimpleNamespace(
                    record=lambda stream: None, synchronize=lambda: None)),
                (cuda, "current_context", lambda *_: context),
                (cuda, "get_current_device", lambda: device.gpu),
                (ptx, "tensor_map", device.tensor_map),
                (steps, "upload", upload), (prompts, "upload", upload),
                (steps, "download", lambda staged, x: upload(x, staged)),
                (steps, "copy_row", copy_row),
                (sys.modules["numba.cuda.cudadrv.devices"], "get_context", lambda *_: context),
                (nc.gpu, "stream", SimpleNamespace(synchronize=lambda: None, handle=0)),
                (nc.Graph, "enabled", False),
                (Dispatcher, "__getitem__", lambda kernel, key: device.configure(kernel, key)),
                (nc.DeviceNDArray, "__getitem__", nc.DeviceNDArray._do_getitem),
                (nc.DeviceNDArray, "copy_to_device", copy_to_device),
                (nc.DeviceNDArray, "copy_to_host", lambda x, ary=None, stream=0: device.read(x))):
            patch.setattr(module, name, value)
        nc.note_once.cache_clear()
        yield device


def copy_to_device(to, x, stream=0):
    assert x.size == to.size and x.dtype == to.dtype


def upload(x, staged):
    assert staged.dtype == x.dtype and staged.flags.c_contiguous and x.is_c_contiguous()
    assert 0 < staged.nbytes <= x.gpu_data.size


def copy_row(x, out, start):
    assert x.dtype == out.dtype and start + x.shape[1] <= out.size


def blank(cfg, dtype="f32", naive=False, **how):
    """A model whose parameters nobody looks at."""
    flat = np.zeros(ne.n_params(cfg), np.float64 if dtype == "f64" else np.float32)
    with pytest.MonkeyPatch.context() as patch:          # it would take a second a 100 M parameters
        patch.setattr(nc, "to_bf16", lambda x: np.zeros(x.shape, np.uint16))
        return (NaiveModel if naive else nc.Model)(cfg, flat, dtype=dtype, **how)


def step(model, B, T):
    P = model.cfg.n_mtp
    model.gradient(np.zeros((B, T), np.int32), np.zeros((P, B, T), np.int32), np.ones(P))
    return model.update(ne.Hyper(*np.ones(8)))


def lowest_rungs(dtype="bf16"):
    """The products that only the ladder and the self-tests use."""
    def matrices():
        return (nc.new(shape, nc.DTYPES[dtype]) for shape in ((130, 70), (130, 72), (70, 72)))
    nc.naive_matmul(*matrices())
    if dtype == "bf16":
        nc.tensor_core_matmul(*matrices())
        if nc.kernel_path() == "wgmma":
            one_tile_matmul(nc.make_ops("wgmma").map_of, *matrices())


def wide_norms(C, dtype):
    """RMSNorm of rows of C, and its backward pass."""
    matrices, sums = nc.DTYPES[dtype], nc.computing(nc.DTYPES[dtype])
    y, saved, dx = (nc.new((8, C), matrices) for _ in range(3))
    x, partial, rstd, gain = (nc.new(shape, sums) for shape in ((8, C), (nc.GAIN_PARTS, C), 8, C))
    nc.rmsnorm_forward(y, saved, rstd, x, gain, 1e-5)
    nc.rmsnorm_backward(dx, gain, y, partial, saved, gain, rstd)


MUON = ne.Hyper(*np.ones(8), muon_lr=0.02, momentum=0.9, newton_schulz=3, embedding_lr=4.0)


def everything(cfg, B, T, dtype="f32", naive=False):
    """All that a model can do, once."""
    model = blank(cfg, dtype, naive)
    losses, norm = step(model, B, T)
    assert losses.shape == (cfg.n_mtp,) and norm == 0
    model.update(MUON)
    ids = np.zeros((B + 1, T), np.int32)     # the last micro-batch is not full
    assert not model.losses(ids, ids).any()
    everything_of(model.decoder(), cfg.seq_len)
    step(blank(replace(cfg, n_layer=2), dtype, naive, recompute=True), B, T)
    return model


def everything_of_a_rank(cfg, B, T, dtype="f32"):
    """A step of the second of two ranks, and what it gives for a checkpoint"""
    model = rank_of(1, 2, cfg, np.zeros(ne.n_params(cfg), np.float32), dtype=dtype)
    step(model, B, T)
    model.buffers()
    with_muon = rank_of(1, 2, cfg, np.zeros(ne.n_params(cfg), np.float32), dtype=dtype,
                        options=SimpleNamespace(dtype=dtype, matmul="wgmma", recompute=False,
                                                optimizer="muon"))
    with_muon.update(MUON)


def adapted(cfg, dtype="f32", flat=None):
    """A LoraModel of these frozen parameters"""
    if flat is None:
        flat = np.zeros(ne.n_params(cfg), np.float64 if dtype == "f64" else np.float32)
    return LoraModel(cfg, Adapted(base_of_flat(cfg, flat), Lora(8, 16.0), None), dtype=dtype)


def everything_of_an_adapter(cfg, B, T, dtype="f32"):
    """A step of LoRA, losses, a decoder, and what a run stores"""
    model = adapted(replace(cfg, n_mtp=1), dtype)
    step(model, B, T)
    model.losses(*np.zeros((2, B, T), np.int32))
    model.decoder().decode(0, 0)
    model.buffers()


def everything_of(decoder, T):
    """All that a decoder can do, once."""
    V = decoder.cfg.vocab_size
    assert decoder.decode(0, 0).shape == (V,)
    many, n = decoder.with_slots(3), min(T, 11)
    assert many.read([ne.Part(2, [0] * n, n), ne.Part(0, [0], 1)]).shape == (n + 1, V)
    assert many.guesses(n).shape == (many.heads, V)
    if decoder.samples_itself:               # and steps that are queued before they are asked for
        draws = [ne.SampleRequest(1.0, 3, 0.9, 0.0, 0.5)] * 2
        for _ in range(4):
            many.sample_on_device([ne.Part(slot, [0], 1) for slot in (2, 0)], draws, draws)
        many.truncate(n, 2), many.truncate(1, 0)
    many.copy(2, 1, n)
    if many.rows_are_cheap:                  # a prompt, and a step of more rows than a graph has
        many.truncate(0, 1)
        n = min(T, BY_ROWS + 1)
        assert many.read([ne.Part(1, [0] * n, n)]).shape == (n, V)


# ---- one rank of several
class OneOf:
    """What a rank hears if all say what it says"""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def all(self, value, where):
        return [value] * self.size


class Seen:
    """What would go from GPU to GPU: (bytes to each rank, bytes from each)"""

    def __init__(self, rank):
        self.rank, self.sizes, self.together = rank, [], contextlib.nullcontext

    def exchange(self, sent, received):
        self.sizes.append([[0 if x is None or r == self.rank else engine.as_bytes(x).size
                            for r, x in enumerate(xs)] for xs in (sent, received)])


def rank_of(rank, size, *args, **kwargs):
    """The engine of one of so many ranks"""
    ranks = dict(ranks=OneOf(rank, size), links=Seen(rank))
    return type("Engine", (engine.RankedModel,), ranks)(*args, **kwargs)


# ---- what is run on it
ONE = replace(SMALL, n_layer=1)
LLAMA = replace(ONE, qkv_bias=True, qk_norm=True, window=20)
BIASED = replace(ONE, qkv_bias=True)
RUNS = {
    "small": (SMALL, 2, 128), "big": (BIG, 1, 256), "base": (BASE, 2, 512),
    "large": (LARGE, 1, 1024), "tied": (replace(SMALL, tie_embeddings=True), 3, 40),
    "tied, odd vocabulary": (replace(ONE, tie_embeddings=True, vocab_size=258), 2, 64),
    "one head": (replace(ONE, n_mtp=1), 2, 50), "one token": (ONE, 1, 1),
    "tied, one head": (replace(ONE, n_mtp=1, tie_embeddings=True), 2, 7),
    "biases, norms of q and k, a window": (LLAMA, 2, 100),
    "biases": (BIASED, 2, 100),
    "odd": (replace(ONE, n_embd=33, n_head=6, n_kv_head=3, n_hidden=1001, vocab_size=257), 3, 70),
    "chunks of logits": (replace(BASE, n_layer=1), 17, 512),
    "tied, in chunks": (replace(LARGE, n_layer=1, tie_embeddings=True), 3, 1024),
    "many rows, few logits": (replace(BIG, n_layer=1, n_mtp=1), 300, 256),
    **{f"head_dim {D}": (replace(ONE, n_head=4, n_kv_head=1, head_dim=D), 2, 100)
       for D in (2, 10, 34, 64, 128)}}
ways = pytest.mark.parametrize("naive", [False, True], ids=["flash", "naive"])
KINDS = {"f32": ("f32", (8, 9)), "f64": ("f64", (8, 9)), "bf16": ("bf16", (8, 9)),
         "bf16 on Hopper": ("bf16", (9, 0))}


def kernels_of(path):
    """Names, as by name_of, of all functions of a file that are decorated by cuda_kernel, or by
    what a cuda_kernel(..) is called."""
    program = ast.parse(path.read_text(encoding="utf-8"))

    def makes_kernels(text):
        return text.startswith("cuda_kernel(")
    names = {"cuda_kernel", *(
        target.id for node in ast.walk(program) if isinstance(node, ast.Assign)
        and makes_kernels(ast.unparse(node.value)) for target in node.targets)}

    def inside(node, prefix):
        for f in ast.iter_child_nodes(node):
            if isinstance(f, ast.FunctionDef):
                marks = [ast.unparse(d) for d in f.decorator_list]
                if any(mark in names or makes_kernels(mark) for mark in marks):
                    yield prefix + f.name
                yield from inside(f, f"{prefix}{f.name}_")
    return list(inside(program, ""))
