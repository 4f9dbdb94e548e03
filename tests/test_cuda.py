"""The GPU program where there is no GPU: every launch on memory that is only counted, every kernel
compiled and assembled for four architectures, and what a user without a driver is told."""
import argparse
import ast
import contextlib
import functools
import gc
import importlib.util
import inspect
import itertools
import json
import math
import os
import re
import subprocess
import sys
import threading
import weakref
from collections import namedtuple
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, TINY, complains, nanoeuler, needs
from hypothesis import given, settings
from hypothesis import strategies as st

if importlib.util.find_spec("numba_cuda") is None:
    pytest.skip("numba-cuda is not installed; it comes with the extra cuda",
                allow_module_level=True)

from numba import cuda, types
from numba.cuda import compiler

import nanoeuler as ne
import nanoeuler_cuda as nc
from bench import self_tests
from bench.naive_attention import NaiveModel

SMALL, BIG, BASE, LARGE = (ne.PRESETS[name] for name in ("small", "big", "base", "large"))
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
        assert byte == 0 and stream is nc.stream         # or a graph would not record it

    @property
    def device_pointer(self):
        return self.address


def extent(x):
    """(first, one past the last) address of a device array."""
    assert x.size == 0 or min(x.strides) >= 0
    span = sum((n - 1) * s for n, s in zip(x.shape, x.strides)) + x.dtype.itemsize
    return x.gpu_data.address, x.gpu_data.address + (span if x.size else 0)


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
        assert self.smem <= 48 << 10 or nc.allow_shared in self.asked
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
        (Z, H, M, N), K = out.shape, a.shape[3]
        assert a.shape == (Z, a.shape[1], M, K) and b.shape == (Z, b.shape[1], K, N)
        assert H % a.shape[1] == 0 == H % b.shape[1]
        self.runs((tiles(N, 128), tiles(M, 128), Z * H), (16, 16))
        apart(out, a, b)

    def wgmma_kernel_kernel(self, map_a, map_b, map_out, turns, M, N, K, splits):
        f, maps = constants(self.kernel), map_a.gpu_data.device.maps
        single = constants(f["finish"])["single"]
        a, b, out = (maps[x.gpu_data.address] for x in (map_a, map_b, map_out))
        assert a[1:3] == ((K, M) if f["a_mn"] else (M, K)) and a[4] == (64 if f["a_mn"] else 128)
        assert b[1:3] == ((K, N) if f["b_mn"] else (N, K)) and b[4] == (64 if f["b_mn"] else 256)
        assert a[5] == b[5] == 2 and out[1:3] == (M, N) and out[4] == 64
        assert out[5] == (4 if single else 2) and 1 <= splits <= tiles(K, 64)
        assert splits == 1 or single and turns.size >= 2 * tiles(M, 128) * tiles(N, 256)
        first, end = out[0], out[0] + (M - 1) * out[3] + out[5] * N
        for pointer, rows, columns, stride, _, size in (a, b):
            assert end <= pointer or pointer + (rows - 1) * stride + size * columns <= first
        self.runs(min(tiles(M, 128) * tiles(N, 256) * splits, 46), 384, nc.WGMMA_SMEM)

    def mma_kernel_kernel(self, out, a, b, turns, M, N, K, splits):
        a_mn, b_mn = (constants(constants(self.kernel)[f])["mn"] for f in ("fetch_a", "fetch_b"))
        assert a.shape == ((K, M) if a_mn else (M, K))
        assert b.shape == ((K, N) if b_mn else (N, K)) and N % 4 == 0
        assert a.dtype == b.dtype == np.uint16
        assert all(x.strides[0] % 16 == extent(x)[0] % 16 == 0 for x in (a, b, out))
        assert out.shape == (M, N) and 1 <= splits <= tiles(K, 64)
        single = out.dtype == np.float32
        assert splits == 1 or single and turns.size >= tiles(M, 128) * tiles(N, 128)
        apart(out, a, b)
        self.runs(tiles(M, 128) * tiles(N, 128) * splits, 128, nc.MMA_SMEM)

    def embedding_forward_kernel(self, x, tokens, wte):
        assert x.shape[0] <= tokens.size and x.shape[1] == wte.shape[1]
        self.runs(x.shape[0], 128)

    def embedding_backward_kernel_backward(self, dwte, dx, tokens):
        assert dx.shape == (tokens.size, dwte.shape[1])
        W = self.vectors(dx)
        self.runs((len(dwte), tiles(dx.shape[1], 32 * W)), 256)

    def rmsnorm_kernels_forward(self, y, kept, rstd, x, w, eps, add):
        assert y.shape == kept.shape == x.shape and x.dtype == rstd.dtype == w.dtype
        assert rstd.size == x.shape[0] and w.shape == x.shape[1:]
        self.runs(tiles(x.shape[0], 8), (32, 8))
        self.vectors(y, kept, x, w)
        apart(x, y, kept)
        apart(y, kept)

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

    def rope_kernel_turn(self, qkv, cos, sin, T, heads, sign):
        assert cos.shape == sin.shape and T <= len(cos) and qkv.shape[0] % T == 0
        assert heads * 2 * cos.shape[1] < qkv.shape[1]             # v is not turned
        self.runs(qkv.shape[0], self.block)
        self.vectors(qkv, cos, sin)

    def attention(self, qkv, T, HD, *rows):
        """What six kernels share.  rows: one number for each head and row.  Returns B, H, G, D."""
        (BT, QKV), H = qkv.shape, rows[0].shape[0]
        D, G = HD // H, (QKV - HD) // (2 * (HD // H))
        assert BT % T == 0 and HD == H * D and QKV == (H + 2 * G) * D and H % G == 0
        assert all(x.shape == (H, BT) for x in rows)
        return BT // T, H, G, D

    def portable(self, qkv, T, HD, *rows):
        B, H, G, D = self.attention(qkv, T, HD, *rows)
        return B, H, G, nc.portable_attention(D, max(4, qkv.dtype.itemsize), 99 << 10)

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
        hopper = nc.rung() == "wgmma" and D == 64
        assert D in (32, 64, 128) and self.kernel in nc.tensor_attention(D, hopper)
        return B, H, G, D, nc.tensor_attention(D, hopper)

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

    def tensor_attention_forward(self, o, lse, qkv, T, G, scale):
        [qkv] = self.matrices(qkv)
        B, H, groups, D, k = self.tensor_attention(qkv, T, o.shape[1], lse)
        assert o.shape[0] == qkv.shape[0] and G == groups
        self.runs((tiles(T, 128), H, B), 128, k.smem)

    def tensor_attention_dq(self, dqkv, delta, do, o, lse, qkv, cos, sin, T, HD, scale):
        do, o, qkv = self.matrices(do, o, qkv)
        B, H, G, D, k = self.tensor_attention(qkv, T, HD, lse, delta)
        assert tuple(do.shape) == tuple(o.shape) == (qkv.shape[0], HD)
        assert tuple(dqkv.shape) == tuple(qkv.shape)
        assert cos.shape == sin.shape == (len(cos), D // 2) and len(cos) >= T
        self.runs((tiles(T, 64), H if self.kernel is k.dq else G, B), 128, k.back_smem)

    tensor_attention_dkv = tensor_attention_dq

    def softmax_kernel(self, p, scale):
        Z, H, T, T2 = p.shape
        assert T == T2
        self.runs((tiles(T, 8), Z * H), (32, 8))

    def softmax_backward_kernel(self, ds, p, scale):
        assert ds.shape == p.shape
        self.softmax_kernel(p, scale)
        apart(ds, p)

    def swiglu_kernels_forward(self, y, gate_up):
        assert gate_up.shape == (len(y), 2 * y.shape[1])
        self.runs(len(y), 256)
        self.vectors(y, gate_up)

    def swiglu_kernels_backward(self, gate_up, dy):
        self.swiglu_kernels_forward(dy, gate_up)

    def cross_entropy_kernel_fused(self, nll, logits, targets, weight, row0, V, T):
        (P, BT), (R, PV) = nll.shape, logits.shape
        assert PV == P * V and targets.shape == (P, BT) and weight.shape == (-(-BT // T), P)
        assert 0 <= row0 and row0 + R <= BT
        self.runs((R, P), 256)
        assert self.vectors(logits) in (1, math.gcd(V, 8))

    def fill_kernel(self, x, value):
        assert self.block == (256, 1, 1)

    def square_sums_kernel(self, partial, g):
        self.runs(partial.size, 256)

    def adamw_kernel_step(self, p, w, g, m, v, n_decay, hyper, partial, results):
        assert p.shape == w.shape == g.shape == m.shape == v.shape and 0 <= n_decay <= p.size
        assert hyper.shape == (8,) and self.block == (256, 1, 1)
        apart(p, g, m, v)

    def matvec_kernel(self, y, w, x):
        assert y.shape == w.shape[:1] and x.shape == w.shape[1:]
        self.runs(tiles(y.size, 8), (32, 8))
        apart(y, x)

    def rope_cache_kernel(self, qkv, kc, vc, cos, sin, at, H):
        G, T, D = kc.shape
        assert vc.shape == kc.shape and qkv.shape == ((H + 2 * G) * D,) and at.shape == (2,)
        assert cos.shape == sin.shape == (T, D // 2) and 2 * cos.shape[1] == D
        self.runs(H + 2 * G, 32)

    def attention_decode_kernel(self, o, qkv, kc, vc, scores, at, scale):
        (G, T, D), H = kc.shape, len(scores)
        assert vc.shape == kc.shape and scores.shape == (H, T) and o.shape == (H * D,)
        assert qkv.shape == ((H + 2 * G) * D,) and H % G == 0
        self.runs(H, 256)


def is_array(x):
    return isinstance(x, nc.DeviceNDArray)


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
        self.maps, self.kept, self.fill, self.bad = {}, {}, 0.0, ()
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

    def tensor_map(self, *key):
        """cuTensorMapEncodeTiled: what it asks of a matrix"""
        pointer, rows, columns, stride, box_rows, size = key
        assert pointer % 16 == 0 == stride % 16 and size in (2, 4), "copies go in steps of 16 bytes"
        assert 0 < rows < 1 << 32 and 0 < size * columns <= stride < 1 << 40 and 0 < box_rows <= 256
        if key not in self.kept:
            self.kept[key] = x = self.array(16, np.uint64)
            self.maps[x.gpu_data.address] = key
        return self.kept[key]

    def read(self, x):
        host = np.zeros(x.shape, x.dtype)
        if x.dtype == np.uint16 or x.dtype.kind == "f":
            number = lambda v: nc.to_bf16(np.array([v]))[0] if x.dtype == np.uint16 else v
            host[...] = number(self.fill)
            if x.gpu_data.address in self.bad:
                host.reshape(-1)[-1] = number(np.nan)
        return host

    def configure(self, kernel, key):
        """What kernel[grid, block, stream, smem] is: to be called with the arguments."""
        grid, block, _, smem = (*key, 0, 0)[:4]
        pad = lambda x: (*x, 1, 1)[:3] if isinstance(x, tuple) else (x, 1, 1)

        def call(*args):
            kinds = tuple(kernel.typeof_pyval(x) for x in args)
            self.launches.append(Launch(kernel, kinds, pad(grid), pad(block), smem, args,
                                        tuple(call.pre_launch_callbacks)))
            self.launches[-1].check()

        call.pre_launch_callbacks = []
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
                (cuda, "to_device", lambda x, **_: device.array(x.shape, x.dtype)),
                (cuda, "pinned_array", lambda shape, dtype, **_: np.zeros(shape, dtype)),
                (cuda, "current_context", lambda *_: context),
                (cuda, "get_current_device", lambda: device.gpu),
                (nc, "tensor_map", device.tensor_map),
                (sys.modules["numba.cuda.cudadrv.devices"], "get_context", lambda *_: context),
                (nc, "stream", SimpleNamespace(synchronize=lambda: None, handle=0)),
                (nc.Graph, "enabled", False),
                (Dispatcher, "__getitem__", lambda kernel, key: device.configure(kernel, key)),
                (nc.DeviceNDArray, "__getitem__", nc.DeviceNDArray._do_getitem),
                (nc.DeviceNDArray, "copy_to_device", copy_to_device),
                (nc.DeviceNDArray, "copy_to_host", lambda x, ary=None, stream=0: device.read(x))):
            patch.setattr(module, name, value)
        yield device


def copy_to_device(to, x, stream=0):
    assert x.size == to.size and x.dtype == to.dtype


@pytest.fixture
def dry():
    with dry_run() as device:
        yield device


def blank(cfg, dtype="f32", naive=False):
    """A model whose parameters nobody looks at."""
    flat = np.zeros(ne.n_params(cfg), np.float64 if dtype == "f64" else np.float32)
    with pytest.MonkeyPatch.context() as patch:          # it would take a second a 100 M parameters
        patch.setattr(nc, "to_bf16", lambda x: np.zeros(x.shape, np.uint16))
        return (NaiveModel if naive else nc.Model)(cfg, flat, dtype=dtype)


def step(model, B, T):
    P = model.cfg.n_mtp
    model.gradient(np.zeros((B, T), np.int32), np.zeros((P, B, T), np.int32), np.ones(P))
    return model.update(np.ones(8))


def everything(cfg, B, T, dtype="f32", naive=False):
    """All that a model can do, once."""
    model = blank(cfg, dtype, naive)
    losses, norm = step(model, B, T)
    assert losses.shape == (cfg.n_mtp,) and norm == 0
    ids = np.zeros((B + 1, T), np.int32)     # the last micro-batch is not full
    assert not model.losses(ids, ids).any()
    assert model.decoder().decode(0, 0).shape == (cfg.vocab_size,)
    return model


# ---- launches
ONE = replace(SMALL, n_layer=1)
RUNS = {
    "small": (SMALL, 2, 128), "big": (BIG, 1, 256), "base": (BASE, 2, 512),
    "large": (LARGE, 1, 1024), "tied": (replace(SMALL, tie_embeddings=True), 3, 40),
    "tied, odd vocabulary": (replace(ONE, tie_embeddings=True, vocab_size=258), 2, 64),
    "one head": (replace(ONE, n_mtp=1), 2, 50), "one token": (ONE, 1, 1),
    "tied, one head": (replace(ONE, n_mtp=1, tie_embeddings=True), 2, 7),
    "odd": (replace(ONE, n_embd=33, n_head=6, n_kv_head=3, n_hidden=1001, vocab_size=257), 3, 70),
    "chunks of logits": (replace(BASE, n_layer=1), 17, 512),
    "tied, in chunks": (replace(LARGE, n_layer=1, tie_embeddings=True), 3, 1024),
    "many rows, few logits": (replace(BIG, n_layer=1, n_mtp=1), 300, 256),
    **{f"head_dim {D}": (replace(ONE, n_head=4, n_kv_head=1, head_dim=D), 2, 100)
       for D in (2, 10, 34, 64, 128)}}
ways = pytest.mark.parametrize("naive", [False, True], ids=["flash", "naive"])
KINDS = {"f32": ("f32", (8, 9)), "f64": ("f64", (8, 9)), "bf16": ("bf16", (8, 9)),
         "bf16 on Hopper": ("bf16", (9, 0))}


@ways
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RUNS)
def test_every_launch_fits_its_arguments(name, kind, naive, dry):
    dtype, dry.gpu.compute_capability = KINDS[kind]
    everything(*RUNS[name], dtype, naive)
    assert naive == any(x.name == "softmax_kernel" for x in dry.launches)


@pytest.mark.parametrize("name", ["small", "tied", "head_dim 34"])
def test_a_decoder_of_bf16_matrices(name, dry):
    """They are read as they are; the vectors of the norms stay float32."""
    cfg = RUNS[name][0]
    decoder = nc.Decoder(cfg, np.zeros(ne.n_params(cfg), np.float32), "bf16")
    assert decoder.decode(0, 0).shape == (cfg.vocab_size,)
    products = [x.args for x in dry.launches if x.name == "matvec_kernel"]
    assert len(products) == 4 * cfg.n_layer + 1
    assert {w.dtype for _, w, _ in products} == {np.dtype(np.uint16)}
    assert {y.dtype for y, *_ in products} == {np.dtype(np.float32)}
    assert decoder.p.attn_norm.dtype == np.float32
    with pytest.raises(ne.UserError, match="f32 or bf16"):
        nc.Decoder(cfg, np.zeros(ne.n_params(cfg), np.float32), "int8")


@given(st.data(), st.sampled_from(sorted(KINDS)), st.booleans(), st.integers(1, 5))
@settings(max_examples=60)
def test_launches_of_any_shape(data, kind, naive, B):
    draw = lambda low, high: data.draw(st.integers(low, high))
    unit = data.draw(st.sampled_from([1, 8]))            # tensor cores want multiples of 8
    G, T = draw(1, 4), draw(1, 300)
    cfg = ne.Config(n_embd=unit * draw(1, 1100 // unit), n_head=G * draw(1, 4), n_kv_head=G,
                    head_dim=2 * draw(1, 64), n_layer=draw(1, 2), n_hidden=unit * draw(1, 70),
                    seq_len=T + draw(0, 9), vocab_size=draw(1, 5000), n_mtp=draw(1, 4),
                    tie_embeddings=data.draw(st.booleans())).check()
    with dry_run() as device:
        dtype, device.gpu.compute_capability = KINDS[kind]
        everything(cfg, B, T, dtype, naive)


def test_every_kernel_is_launched(dry):
    for naive in (False, True):
        everything(SMALL, 2, 64, naive=naive)
    everything(SMALL, 2, 64, "bf16")
    dry.gpu.compute_capability = (9, 0)
    everything(SMALL, 2, 64, "bf16")
    everything(replace(SMALL, tie_embeddings=True), 2, 64, "bf16")
    assert sorted({x.name for x in dry.launches}) == sorted(
        kernels_of(ROOT / "nanoeuler_cuda.py") + kernels_of(ROOT / "bench/naive_attention.py"))


def kernels_of(path):
    """Names, as by name_of, of all functions of a file that are decorated as kernels."""
    def inside(node, prefix):
        for f in ast.iter_child_nodes(node):
            if isinstance(f, ast.FunctionDef):
                marks = [ast.unparse(d) for d in f.decorator_list]
                if any(m == "kernel" or m.startswith("cuda.jit(") for m in marks):
                    yield prefix + f.name
                yield from inside(f, f"{prefix}{f.name}_")
    return list(inside(ast.parse(path.read_text(encoding="utf-8")), ""))


def test_tensor_cores_multiply_all_matrices_of_the_presets(dry):
    dry.gpu.compute_capability = (9, 0)
    for cfg in (SMALL, BIG, BASE, LARGE):
        step(blank(replace(cfg, n_layer=1), "bf16"), 1, cfg.seq_len)
    names = {x.name for x in dry.launches}
    assert {"wgmma_kernel_kernel", "tensor_attention_dq"} < names
    assert not {"matmul_kernel", "portable_attention_backward_run"} & names


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
def test_blocks_share_a_tile_where_each_has_a_turn(capability, dry):
    dry.gpu.compute_capability = capability
    dw, dy, x = dry.array((768, 2048), np.float32), *(
        dry.array((32_768, n), np.uint16) for n in (768, 2048))
    for turns, shared in ((nc.TURNS, True), (1, False)):
        nc.matmul_dw(dw, dy, x, dry.array(turns, np.uint32))
        assert (dry.launches[-1].args[-1] > 1) == shared


@pytest.mark.parametrize("name", ["small", "chunks of logits", "tied, in chunks"])
def test_chunks_of_logits_are_the_whole_batch(name, dry):
    cfg, B, T = RUNS[name]
    step(blank(cfg), B, T)
    at = [i for i, x in enumerate(dry.launches) if "entropy" in x.name]
    rows = [(x.args[4], x.args[1].shape[0]) for x in (dry.launches[i] for i in at)]
    assert [r for r, _ in rows] == list(np.cumsum([0] + [n for _, n in rows])[:-1])
    assert sum(n for _, n in rows) == B * T and (len(rows) > 1) == ("chunks" in name)
    assert max(n for _, n in rows) * cfg.n_mtp * cfg.vocab_size * 4 <= 384 << 20
    for x in ([dry.launches[i - 1].args[1] for i in at],           # a.y of logits = y w^T,
              [dry.launches[i + 1].args[0] for i in at]):          # d.norm of dx = dy w
        first = [a.gpu_data.address - x[0].gpu_data.address for a in x]
        assert first == [4 * r * cfg.n_embd for r, _ in rows]


def recorded(device, function):
    """What a CUDA graph of function() would remember: kernels, addresses, strides, scalars."""
    device.launches.clear()
    function()
    return [(x.name, x.grid, x.block, x.smem, x.types, *[
        (a.gpu_data.address, a.shape, a.strides) if is_array(a) else a for a in x.args])
        for x in device.launches]


@ways
@pytest.mark.parametrize("kind", KINDS)
def test_what_changes_between_steps_lies_in_device_memory(kind, naive, dry):
    """A replayed graph launches the first step again: scalars and addresses must not change."""
    dtype, dry.gpu.compute_capability = KINDS[kind]
    model, rng = blank(TINY, dtype, naive), np.random.default_rng(1)
    decoder = model.decoder()
    losses = lambda: model.losses(rng.integers(0, 9, (3, 8)), rng.integers(-1, 9, (3, 8)))
    gradient = lambda: model.gradient(rng.integers(0, 9, (3, 8), np.int32),
                                      rng.integers(-1, 9, (2, 3, 8), np.int32), rng.random(2))
    update = lambda: model.update(rng.random(8))
    decode = lambda: decoder.step(int(rng.integers(9)))
    first = [recorded(dry, f) for f in (gradient, losses, update, decode)]
    assert min(map(len, first)) > 1
    assert [recorded(dry, f) for f in (losses, gradient, update, decode)] == [
        first[i] for i in (1, 0, 2, 3)]      # an evaluation may come before or between


def test_a_recording_ends_whatever_happens(monkeypatch):
    """A stream that is left recording refuses all that follows; what the garbage collector finds
    meanwhile may destroy the graph of a dead model, which is not allowed."""
    said = []
    call = lambda name, result=(0, "x"): lambda *_: said.append(name) or result
    names = ("cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiate", "cuGraphLaunch",
             "cuGraphExecDestroy", "cuGraphDestroy")
    monkeypatch.setattr(nc, "driver", SimpleNamespace(
        CUstream=int, CUstreamCaptureMode=SimpleNamespace(
            CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1), **{name: call(name) for name in names}))
    monkeypatch.setattr(nc, "stream", SimpleNamespace(handle=0))
    monkeypatch.setattr(cuda, "defer_cleanup", contextlib.nullcontext)
    outcomes = iter([None, RuntimeError("a kernel"), None])

    def function():
        said.append(f"runs, collecting {gc.isenabled()}")
        if (outcome := next(outcomes)) is not None:
            raise outcome

    graph = nc.Graph()
    graph(function)
    with pytest.raises(RuntimeError, match="a kernel"):
        graph(function)
    assert said[1:] == ["cuStreamBeginCapture", "runs, collecting False", "cuStreamEndCapture"]
    assert gc.isenabled()
    graph(function)
    assert said[4:] == ["cuStreamBeginCapture", "runs, collecting False", "cuStreamEndCapture",
                        "cuGraphInstantiate", "cuGraphLaunch"] and gc.isenabled()
    graph.graph = None                       # it is none


def test_a_full_context_slides(dry):
    decoder, seen = blank(TINY).decoder(), []
    decode, decoder.decode = decoder.decode, lambda token, position: seen.append((token, position))
    for token in range(TINY.seq_len + 1):
        decoder.step(token)
    assert seen[TINY.seq_len:] == [(4, 0), (5, 1), (6, 2), (7, 3), (8, 4)]


def test_both_engines_have_one_interface():
    """What sections 9 and 10 of nanoeuler.py ask of a model."""
    for name in ("__init__", "gradient", "update", "losses", "micro_batch", "buffers", "decoder",
                 "device", "first_bad_tensor"):
        cpu, gpu = (list(inspect.signature(getattr(m.Model, name)).parameters) for m in (ne, nc))
        assert gpu[:len(cpu)] == cpu, name


def test_the_life_of_a_model(dry, text, tmp_path, monkeypatch, capsys):
    """Every verb but `c` to its end, on a GPU that computes zeros."""
    monkeypatch.chdir(tmp_path)
    sample = ne.Run.sample                   # a launch costs as much here as on a GPU
    monkeypatch.setattr(ne.Run, "sample", lambda self, *_, **rest: sample(self, 3, "A", **rest))
    examples = [dict(instruction=f"Add {a} and {b}.", output="?") for a in range(90) for b in "12"]
    (tmp_path / "add.json").write_text(json.dumps(examples), encoding="utf-8")
    dry.gpu.compute_capability = (9, 0)
    start = ["--preset", "small", "--data", str(text), "--vocab-size", "280", "--batch", "640",
             "--dtype", "bf16"]
    run = lambda *args: nc.main([str(x) for x in args]) in (0, None) or capsys.readouterr().err
    assert run("t", *start, "--seq-len", 160, "--steps", 6, "--eval-every", 2) is True
    assert run("tr", "--steps", 8) is True
    assert run("i", "It was", "--tokens", 5) is True
    assert run("s", "--data", "add.json", "--steps", 6, "--eval-every", 3) is True
    for name, kind, step in (("nanoeuler.bin", "base", 8), ("nanoeuler_chat.bin", "chat", 6)):
        state = ne.read_checkpoint(name).state
        assert (state.kind, state.step) == (kind, step)
    for flag, value in (("--dtype", "f16"), ("--matmul", "fast")):
        said = run("t", *start, flag, value, "--force")
        assert value in said and said.startswith("nanoeuler: ") and said.count("\n") == 1


@ways
@pytest.mark.parametrize("dtype", nc.DTYPES)
def test_a_bad_tensor_is_found_and_named(dtype, naive, dry):
    model = blank(TINY, dtype, naive)
    step(model, 2, 8)
    assert model.first_bad_tensor() == "the loss is not finite"
    for group, name, kind in (("a", "qkv", "activation"), ("d", "att", "its gradient"),
                              ("g", "down", "gradient"), ("p", "wte", "parameter")):
        dry.bad = {getattr(getattr(model, group), name).gpu_data.address}
        said = model.first_bad_tensor()
        assert said.startswith(f"{kind} {name}[") and said.endswith("is nan"), said


@pytest.mark.parametrize("dtype", nc.DTYPES)
def test_a_model_names_its_device_and_type(dtype, dry):
    said = blank(TINY, dtype).device()
    assert "dry" in said and {"f32": "32", "f64": "64", "bf16": "b"}[dtype] in said, said
    assert "uint" not in said
    other = ne.replace(TINY, head_dim=80)    # of which tensor cores do no attention
    assert ("heads of 80" in blank(other, dtype).device()) == (dtype == "bf16")


def test_a_gpu_that_computes_nonsense_fails_every_self_test(dry, monkeypatch, capsys):
    cases = self_tests.op_tests(quick=True)
    monkeypatch.setattr(self_tests, "op_tests", lambda *_: cases)
    for fill in (0.0, 1e9, np.nan):
        dry.fill = fill
        assert self_tests.self_tests() == 1, fill
        lines = capsys.readouterr().out.splitlines()[1:-1]
        assert len(lines) == len(cases) and [x for x in lines if "FAILED" not in x] == []


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_attention_keeps_its_inputs_until_the_kernels_are_queued(capability, dry, monkeypatch):
    """Tensor maps hold addresses: a matrix that nobody else has must not die before the launch."""
    dry.gpu.compute_capability, alive = capability, []
    T, H, G, D = 64, 2, 1, 64
    new = lambda *shape, dtype=np.uint16: nc.new(shape, dtype)
    monkeypatch.setattr(nc, "launch", lambda *_, **__: alive.append([ref() for ref in inputs]))
    o, lse, angles = new(T, H * D), new(H, T, dtype=np.float32), new(T, D // 2, dtype=np.float32)
    given = [new(T, (H + 2 * G) * D)]
    inputs = [weakref.ref(x) for x in given]
    nc.attention_forward(o, lse, given.pop(), T, D)
    given = [new(T, H * D), new(T, H * D), new(T, (H + 2 * G) * D)]
    inputs = [weakref.ref(x) for x in given]
    nc.attention_backward(new(T, (H + 2 * G) * D), new(H, T, dtype=np.float32), given.pop(0),
                          given.pop(0), lse, given.pop(0), angles, angles, T, D)
    assert [len(x) for x in alive] == [1, 3, 3] and all(x is not None for y in alive for x in y)


@ways
@pytest.mark.parametrize("dtype", nc.DTYPES)
def test_memory_is_free_as_soon_as_nobody_has_it(dtype, naive, dry):
    """Not when Python next looks for garbage: a training run makes a decoder for each sample."""
    before, ids = dry.used, np.zeros((2, 8), np.int32)
    gc.disable()
    try:
        model = blank(TINY, dtype, naive)
        step(model, 2, 8)
        model.losses(ids, ids)
        dry.launches.clear()                 # they hold their arguments
        alone, decoder = dry.used, model.decoder()
        decoder.decode(0, 0)
        del decoder
        dry.launches.clear()
        assert dry.used == alone
        del model
        assert dry.used == before
    finally:
        gc.enable()


def test_the_host_waits_for_what_it_reads(dry, monkeypatch):
    """A copy between the device and memory that is not pinned may come back before it is done."""
    read, said = nc.DeviceNDArray.copy_to_host, []
    monkeypatch.setattr(nc.stream, "synchronize", lambda: said.append("waits"))
    monkeypatch.setattr(nc.DeviceNDArray, "copy_to_host",
                        lambda x, **rest: said.append("reads") or read(x, **rest))
    model, ids = blank(TINY), np.zeros((2, 8), np.int32)
    for function in (lambda: step(model, 2, 8), lambda: model.losses(ids, ids), model.buffers,
                     model.first_bad_tensor, lambda: model.decoder().decode(0, 0)):
        said.clear()
        function()
        followed = [said[i + 1:i + 2] for i, what in enumerate(said) if what == "reads"]
        assert followed and all(x == ["waits"] for x in followed), said


def test_a_gradient_of_nan_fails_the_check(dry, monkeypatch):
    """Where losses agree, and all gradients of the CPU are zero."""
    zeros = lambda self, until, tokens, *_: np.zeros((len(tokens), self.cfg.n_mtp))
    monkeypatch.setattr(ne.Model, "run", zeros)
    monkeypatch.setitem(ne.PRESETS, "tiny", TINY)
    assert self_tests.gradient_check("tiny", 2) == 0
    spoil = lambda self, *_: dry.bad.add(self.g_flat.gpu_data.address)
    dry.bad = set()
    monkeypatch.setattr(nc.Model, "gradient", spoil)
    assert self_tests.gradient_check("tiny", 2) == 1


@given(st.floats(width=32, allow_nan=False))
def test_bfloat16_is_the_nearest(x):
    """Ties to even: the neighbour whose last bit is 0."""
    x = np.float32(x)
    [bits] = nc.to_bf16(np.array([x]))
    near = lambda b: abs(float(nc.from_bf16(np.array([b], np.uint16))[0]) - float(x))
    if np.isinf(x) or np.isinf(nc.from_bf16(np.array([bits]))[0]):
        return
    for other in (int(bits) + 1, int(bits) - 1):
        assert near(bits) <= near(other & 0xFFFF) or (other & 0x7FFF) >= 0x7F80
        assert near(bits) != near(other & 0xFFFF) or not bits & 1 or x == 0


def test_bfloat16_survives():
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    x = nc.from_bf16(bits)
    number = ~np.isnan(x)
    assert np.array_equal(nc.to_bf16(x[number]), bits[number]) and np.isinf(x).sum() == 2
    assert np.isnan(nc.from_bf16(nc.to_bf16(x[~number]))).all()


# ---- compiling and assembling
# compute capability, and KB of shared memory a block may have
ARCHS = {"sm_80": ((8, 0), 163), "sm_89": ((8, 9), 99), "sm_90a": ((9, 0, "a"), 227),
         "sm_120": ((12, 0), 99)}
# kernels with float64 arguments: why
DOUBLE = {
    "cross_entropy_kernel_fused": "weight of the loss: 1 / count of all targets of a step",
    "adamw_kernel_step": "hyperparameters, once a thread: 1 - beta2 in float32 has three digits",
    "sum_rows_kernel": "sums of losses", "square_sums_kernel": "sums of squares"}
# those of them that may make a float64 of a float32, because they sum
WIDENS = {"sum_rows_kernel", "square_sums_kernel"}

# bytes of stack by head size: attention on mma.sync wants more than 255 registers
SPILLS = {128: 512}
# bytes of arrays that another compiler, that of sm_100 and newer, leaves in memory: what was in the
# output of dW, 32 numbers, once a tile
STACK = {("mma_kernel_kernel", "sm_120"): 128}

Assembled = namedtuple("Assembled", "registers static stack stores loads")


def test_a_kernel_is_found_in_the_cache_by_another_process():
    """Numba's keys of what the makers make, in two processes that hash everything differently."""
    code = ("import nanoeuler_cuda as nc\n"
            "class Codegen: magic_tuple = staticmethod(lambda: ())\n"
            "for make, *args in (\n"
            "        (nc.wgmma_kernel, 0, 0, 0), (nc.wgmma_kernel, 0, 1, 1),\n"
            "        (nc.mma_kernel, 0, 0, 0), (nc.embedding_backward_kernel, 4, 3),\n"
            "        (nc.rmsnorm_kernels, 768, 8), (nc.rope_kernel, 8), (nc.swiglu_kernels, 8),\n"
            "        (nc.portable_attention, 64, 4, 1 << 16), (nc.tensor_attention, 64, True),\n"
            "        (nc.tensor_attention, 64, False), (nc.cross_entropy_kernel, 8),\n"
            "        (nc.adamw_kernel, 4)):\n"
            "    made = make(*args)\n"
            "    for k in made if isinstance(made, tuple) else [made]:\n"
            "        if hasattr(k, 'py_func'):\n"
            "            print(k.py_func.__qualname__, k._cache._index_key((), Codegen))\n")
    runs = [subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True,
                           env={**os.environ, "PYTHONHASHSEED": seed}) for seed in "12"]
    keys = runs[0].stdout.splitlines()
    assert runs[0].stdout == runs[1].stdout and len(keys) == len(set(keys)) == 20, runs[0].stderr


def save_in_turns(files, order):
    """Each of the files saves a kernel of its own; `order` says whose next access comes."""
    go, done = [threading.Semaphore(0) for _ in files], threading.Semaphore(0)

    def process(i, File):
        def in_turn(access):
            def run(*args):
                go[i].acquire()
                out = access(*args)
                done.release()
                return out
            return run
        for name in ("_load_index", "_save_index", "_save_data"):
            setattr(File, name, in_turn(getattr(File, name)))
        File.save(i, f"code of {i}")

    threads = [threading.Thread(target=process, args=x) for x in enumerate(files)]
    for thread in threads:
        thread.start()
    for i in order:
        go[i].release()
        assert done.acquire(timeout=60)
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("module", ["numba.core.caching", "numba.cuda.core.caching"])
def test_two_processes_that_compile_at_once_do_not_swap_their_kernels(module, tmp_path):
    """Numba's own way fails: the index names one file for the kernel that another overwrote."""
    Cache, orders = importlib.import_module(module).IndexDataCacheFile, set(
        itertools.permutations([0, 0, 0, 1, 1, 1]))
    assert len(orders) == 20
    for n, order in enumerate(orders):
        make = lambda: Cache(str(tmp_path), f"kernel{n}", 1.0)
        save_in_turns([make(), make()], order)
        found = [make().load(i) for i in range(2)]
        assert all(code in (None, f"code of {i}") for i, code in enumerate(found)), order
        make().save(2, "code of 2")
        assert [make().load(i) for i in range(3)] == [*found, "code of 2"]


@functools.cache
def library(kernel, kinds):
    """A kernel before its architecture is chosen; 5/6 of cuda.compile_ptx are over by then."""
    o = {k: v for k, v in kernel.targetoptions.items() if k in ("fastmath", "launch_bounds")}
    return compiler._compile_pyfunc_with_fixup(kernel.py_func, types.void(*kinds), device=False,
                                               abi="numba", cc=(8, 0), **o)[0]


def compiled(kernel, kinds, cc):
    """PTX"""
    [ptx] = library(kernel, kinds).get_asm_strs(cc=cc)
    return ptx


def assembled(kernel, kinds, arch):
    """What the assembler says of a kernel, linked as a launch links it: as a whole program.  (As a
    part of one, its tensor core instructions would wait for each other: C7509.)"""
    core = needs("cuda.core")
    code = core.ObjectCode.from_ltoir(library(kernel, kinds).get_ltoir(cc=ARCHS[arch][0]))
    linker = core.Linker(code, options=core.LinkerOptions(
        arch=arch, link_time_optimization=True, ptxas_options=["-v"], verbose=True))
    linker.link("cubin")
    log = linker.get_info_log()
    assert "C75" not in log, log             # wgmma, one by one
    find = lambda pattern: [int(n) for n in re.findall(pattern, log)]
    stack = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill load",
                       log)
    [registers], [spills] = find(r"Used (\d+) registers"), stack
    return Assembled(registers, sum(find(r"(\d+) bytes smem")), *map(int, spills))


def holds(kinds, scalar):
    return any(getattr(t, "dtype", t) == scalar for t in kinds)


def stray_doubles(ptx, name, kinds):
    """Float64 instructions that a kernel of these argument types should not have."""
    if not holds(kinds, types.float64):
        return re.findall(r"^\s+\S*\.f64\b.*$", ptx, re.M)
    if not any(isinstance(t, types.Array) and t.dtype == types.float32 for t in kinds):
        return []                            # float64 throughout
    if name not in DOUBLE:
        return [f"an argument is float64: {kinds}"]
    return [] if name in WIDENS else re.findall(r"^\s+cvt\S*\.f64\.f32\b.*$", ptx, re.M)


def complaints(x, arch):
    """What is wrong with the kernel of a launch on an architecture."""
    cc, limit = ARCHS[arch]
    ptx = compiled(x.kernel, x.types, cc)
    a, threads = assembled(x.kernel, x.types, arch), math.prod(x.block)
    out = [f"{line.strip()} ({n} such)" for lines in [stray_doubles(ptx, x.name, x.types)]
           for line, n in [(line, len(lines)) for line in lines[:1]]]
    D = constants(x.kernel).get("D")
    spills = SPILLS.get(D, 0) if x.name.startswith("tensor_attention") else 0
    stack = max(spills, STACK.get((x.name, arch), 0))
    if not holds(x.types, types.float64) or x.name in DOUBLE:
        out += [f"{a}"] * (a.stack > stack or any(a[3:]) and not spills)
    out += [f"{a.registers} registers for {threads} threads"] * (
        a.registers > 255 or -(-a.registers // 8) * 8 * threads > 65536)
    out += [f"{a.static} + {x.smem} bytes of shared memory, {limit} KB are allowed"] * (
        a.static > 48 << 10 or a.static + x.smem > limit << 10)
    out += ["an atomic operation"] * bool(re.search(r"^\s+(@\S+ )?(atom|red)\.", ptx, re.M))
    return [f"{x.name}: {text}" for text in out]


@functools.cache
def distinct(dtype, capability=(8, 9), layouts=True):
    """One launch of each (kernel, types), that with the largest block and shared memory.  Without
    layouts, one of each (kernel, types of its numbers)."""
    with dry_run() as device:
        device.gpu.compute_capability = capability
        everything(replace(BASE, n_layer=1), 1, 512, dtype)
        everything(ONE, 2, 128, dtype)       # heads of 32
        everything(replace(ONE, tie_embeddings=True), 2, 128, dtype, naive=True)
        if dtype == "bf16":                  # heads of 128 are another kernel
            everything(replace(ONE, head_dim=128), 1, 128, dtype)
    out = {}
    for x in device.launches:
        key = x.kernel, x.types if layouts else tuple(getattr(t, "dtype", t) for t in x.types)
        out[key] = max(out.get(key, x), x, key=lambda y: (math.prod(y.block), y.smem))
    return list(out.values())


@pytest.mark.parametrize("dtype, arch", [
    *((dtype, arch) for dtype in ("f32", "bf16") for arch in ARCHS if (dtype, arch) != (
        "f32", "sm_120")), ("f64", "sm_89")])
def test_kernels_assemble_and_fit(dtype, arch):
    capability = (9, 0) if arch == "sm_90a" else (8, 9)
    launches = distinct(dtype, capability, layouts=(dtype, arch) == ("f32", "sm_80"))
    assert [text for x in launches for text in complaints(x, arch)] == []


@pytest.mark.parametrize("room", [64 << 10, 99 << 10], ids=["sm_75", "sm_86"])
@pytest.mark.parametrize("itemsize", [4, 8])
def test_attention_of_any_head_fits_every_gpu_or_is_refused(itemsize, room):
    for D in range(2, 300, 2):
        try:
            k = nc.portable_attention(D, itemsize, room)
        except nc.UserError as e:
            assert D > (128 if room > 64 << 10 else 64) and str(D) in str(e)
        else:
            assert k.smem <= k.back_smem <= room and k.rows in (16, 32, 64)


# ---- tests that cannot fail prove nothing
@cuda.jit
def bare_literal(out, x):
    s = 0.0
    for i in range(x.size):
        s += x[i]
    out[0] = s


@cuda.jit
def typed_literal(out, x):
    s = x.dtype.type(0)
    for i in range(x.size):
        s += x[i]
    out[0] = s


@cuda.jit
def indexed_registers(out, x):
    acc = cuda.local.array(400, x.dtype)
    for i in range(x.size):
        acc[int(x[i]) % 400] += x[i]
    out[0] = acc[int(x[0]) % 400]


@cuda.jit
def atomic_sum(out, x):
    cuda.atomic.add(out, 0, x[cuda.grid(1)])


@cuda.jit
def huge_tile(out, x):
    tile = cuda.shared.array(11_000, x.dtype)
    tile[cuda.threadIdx.x] = x[cuda.threadIdx.x]
    cuda.syncthreads()
    out[cuda.threadIdx.x] = tile[255 - cuda.threadIdx.x]


@cuda.jit
def fill_kernel(x, number):
    x[cuda.grid(1)] = number


FAULTS = [(typed_literal, 0, None), (bare_literal, 0, "f64"), (indexed_registers, 0, "stack"),
          (atomic_sum, 0, "atomic"), (huge_tile, 0, None), (huge_tile, 60 << 10, "shared")]


@pytest.mark.parametrize("kernel, smem, word", FAULTS)
def test_faulty_kernels_are_caught(kernel, smem, word):
    kinds = (types.float32[::1], types.float32[::1])
    x = Launch(kernel, kinds, (1, 1, 1), (256, 1, 1), smem, (), ())
    said = complaints(x, "sm_89")
    assert (len(said) == 1 and word in said[0]) if word else said == [], said
    if word == "f64":                        # float64 on purpose, but no reason is given
        kinds = (types.float64[::1], types.float32[::1])
        assert "float64" in complaints(x._replace(types=kinds), "sm_89")[0]


def test_many_registers_in_a_large_block_are_caught():
    [x] = [x for x in distinct("f32") if x.name == "portable_attention_backward_run"][:1]
    assert complaints(x, "sm_89") == []
    assert "registers" in complaints(x._replace(block=(32, 32, 1)), "sm_89")[0]


@pytest.mark.parametrize("fault", [
    lambda x, w, out: nc.matmul(x, x, w), lambda x, w, out: nc.matmul(out, w, w),
    lambda x, w, out: nc.matmul(out, x, nc.transposed(w)),
    lambda x, w, out: nc.launch(fill_kernel, (1, 65536), 256, x, np.float32(0)),
    lambda x, w, out: nc.launch(fill_kernel, 0, 256, x, np.float32(0)),
    lambda x, w, out: nc.launch(fill_kernel, 1, (256, 8), x, np.float32(0)),
    lambda x, w, out: nc.launch(fill_kernel, 1, 256, nc.view(x, 1, (5, 7)), np.float32(0)),
    lambda x, w, out: nc.view(x, 36, (1,)),
    lambda x, w, out: nc.swiglu_forward(out, x), lambda x, w, out: nc.matvec(x[0], w, x[0])])
def test_faulty_launches_are_caught(fault, dry):
    x, w, out = (nc.new(shape, np.float32) for shape in ((5, 7), (9, 7), (5, 9)))
    nc.matmul(out, x, w)
    nc.launch(fill_kernel, 1, 256, x, np.float32(0))
    with pytest.raises(AssertionError):
        fault(x, w, out)


# ---- memory
def memory_table(cfg, B, T, dtype, naive):
    Model = NaiveModel if naive else nc.Model
    return nc.memory_table(cfg, B, T, nc.DTYPES[dtype], Model.buffer_table)


def needed(cfg, B, T, dtype="f32", naive=False):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "get_current_device", lambda: Device(0).gpu)
        return sum(size for _, size in memory_table(cfg, B, T, dtype, naive))


@pytest.mark.parametrize("name, B, T", [("small", 16, 128), ("big", 4, 256), ("base", 1, 512),
                                        ("base", 64, 512), ("large", 8, 1024)])
@pytest.mark.parametrize("dtype", nc.DTYPES)
@ways
def test_memory_table_is_what_a_model_takes(name, B, T, dtype, naive, dry):
    cfg = ne.PRESETS[name]
    model = blank(cfg, dtype, naive)
    model.prepare(B, T)
    assert dry.peak == dry.used == pytest.approx(needed(cfg, B, T, dtype, naive), rel=0.005)
    table = dict(memory_table(cfg, B, T, dtype, naive))
    group = lambda buffers: sum(x.size * x.dtype.itemsize for x in buffers)
    assert table["activations"] + table["logits"] == group(model.a)
    assert table["their gradients"] == group(model.d) and table["tokens"] == group([model.ids])
    assert table["AdamW moments"] == group([model.m, model.v]) == 2 * group([model.flat])
    assert table["parameters"] == table["gradients"] == group([model.g_flat])
    assert table["bfloat16 copies"] == (group([model.copies]) if dtype == "bf16" else 0)


def test_another_shape_frees_the_old_memory_first(dry):
    model = blank(SMALL)
    for B, T in ((16, 128), (32, 64), (17, 128)):
        dry.peak = 0
        model.prepare(B, T)
        assert dry.used == pytest.approx(needed(SMALL, B, T), rel=0.005)
        assert dry.peak <= 1.01 * needed(SMALL, max(B, 17), 128)
    model.prepare(2, 128)                    # fewer sequences of that length fit as they are
    assert dry.used == pytest.approx(needed(SMALL, 17, 128), rel=0.005)


@given(st.sampled_from(["small", "big"]), st.integers(0, 1 << 40), st.sampled_from([1, 60, 512]),
       st.sampled_from(sorted(nc.DTYPES)), st.booleans())
@settings(max_examples=30)
def test_what_fits_is_the_most_that_does(name, free, T, dtype, naive):
    cfg = ne.PRESETS[name]
    with dry_run(needed(cfg, 1, 1, dtype, naive) + free + (8 << 20)) as device:
        model = blank(cfg, dtype, naive)
        B, room = model.fitting(T), 0.9 * (device.total - device.used) + model.held
    assert B == 0 or needed(cfg, B, T, dtype, naive) <= room
    assert B < 1 << 16                       # what a grid may have along z
    assert B + 1 == 1 << 16 or needed(cfg, B + 1, T, dtype, naive) > room


@given(st.integers(1, 300), st.integers(60 << 20, 4 << 30))
@settings(max_examples=30)
def test_micro_batches_are_equal_parts_that_fit(B, total):
    with dry_run(total) as device:
        model = blank(BIG) if total > needed(BIG, 1, BIG.seq_len) else blank(SMALL)
        T, cfg = model.cfg.seq_len, model.cfg
        b = model.micro_batch(B)
        if needed(cfg, 1, T) < 0.9 * total:
            model.prepare(b, T)
        parts = math.ceil(B / b)             # the last one lacks one sequence at most a part
        assert 0 <= parts * b - B < parts
        fewer = math.ceil(B / (parts - 1)) if parts > 1 else 0
        assert not fewer or needed(cfg, fewer, T) > 0.89 * total
        assert device.used <= total


def test_what_fits_does_not_depend_on_what_was_there():
    """Preferences begin with a reading of 16 rows at a time, whose memory the first step takes."""
    with dry_run(needed(BIG, 20, 256)):
        model = blank(BIG)
        fits = model.fitting(256)
        assert fits in (17, 18)
        for B in (1, 16):
            model.prepare(B, 256)
            assert model.fitting(256) == fits
        assert model.micro_batch(34) == 17


@pytest.mark.parametrize("B", [40, 200, 5000])
def test_without_room_a_batch_that_fits_is_named(B):
    total = needed(BIG, 32, 256) + (1 << 20)
    with dry_run(total):
        model = blank(BIG)
        with pytest.raises(nc.UserError) as e:
            model.prepare(B, 256)
        said = str(e.value)
        assert str(B) in said and "\n" not in said
        fits = int(re.search(r"--micro-batch (\d+)", said)[1])
        assert 27 <= fits <= 32, said
        model.prepare(fits, 256)             # and the model is none the worse


def test_without_room_for_one_sequence_other_remedies_are_named():
    with dry_run(needed(BIG, 1, 64) + (1 << 20)):
        model = blank(BIG)
        with pytest.raises(nc.UserError, match="--seq-len") as e:
            model.prepare(1, 256)
        assert "--micro-batch" not in str(e.value)


def test_without_room_for_the_weights_a_smaller_preset_is_named():
    size = 4 * 4 * ne.n_params(BIG)          # parameters, gradients, two moments; float32
    for total, room in ((size - 1, False), (size + (1 << 20), True)):
        with dry_run(total), contextlib.nullcontext() if room else pytest.raises(
                nc.UserError, match="--preset"):
            blank(BIG)


def test_what_is_asked_for_is_taken_and_said(dry, capsys):
    model = blank(SMALL)
    assert model.micro_batch(40, 7) == 7 and model.micro_batch(40, 7) == 7
    said = capsys.readouterr().out
    assert said.count("memory of 7 sequences at a time") == 1 and "together" in said
    assert model.micro_batch(4, 9) == 4      # no more than there are


@pytest.mark.parametrize("old", [(7, 5), (8, 0)])
def test_bfloat16_is_left_out_where_there_is_none(old, dry, monkeypatch, capsys):
    dry.gpu.compute_capability, seen = old, set()
    monkeypatch.setattr(self_tests, "op_tests", lambda quick: {"one": [
        ([np.ones(1)], lambda dtype: seen.add(dtype) or [np.ones(1)], tuple(nc.DTYPES))]})
    assert self_tests.self_tests() == 0
    assert seen == {"f32", "f64"} | ({"bf16"} if old == (8, 0) else set())
    zeros = lambda self, until, tokens, *_: np.zeros((len(tokens), self.cfg.n_mtp))
    monkeypatch.setattr(ne.Model, "run", zeros)
    monkeypatch.setitem(ne.PRESETS, "tiny", TINY)
    assert self_tests.gradient_check("tiny", 2) == 0
    assert ("bfloat16" in capsys.readouterr().out.split("tensor")[-1]) == (old == (8, 0))


def test_a_gpu_for_which_nothing_compiles_is_a_problem_with_a_remedy(dry, monkeypatch):
    assert nc.gpu_problem() == ""

    def configure(kernel, key):
        raise OSError("libnvJitLink.so is not here")

    monkeypatch.setattr(Dispatcher, "__getitem__", configure)
    assert "libnvJitLink" in nc.gpu_problem() and nc.PIP in nc.gpu_problem()


@pytest.mark.parametrize("name", ["current_context", "device_array"])
def test_a_gpu_that_another_program_fills_is_not_called_missing(name, dry, monkeypatch):
    def full(*_, **__):
        raise nc.CudaAPIError(2, "Call to a function results in CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(cuda, name, full)
    said = nc.gpu_problem()
    assert "OUT_OF_MEMORY" in said and "nvidia-smi" in said
    assert "driver" not in said and nc.PIP not in said


def test_no_more_sequences_than_a_grid_has_blocks(dry):
    """A hundred thousand short ones would fit into memory."""
    cfg = replace(ONE, n_embd=8, n_hidden=8, n_head=2, n_kv_head=1, head_dim=2, vocab_size=8)
    model = blank(cfg)
    assert model.fitting(2) == 65535
    step(model, 65535, 2)


# ---- a machine without a driver, or without the packages
VERBS = set(re.findall(r"^    python nanoeuler_cuda\.py +(\w*)  ", nc.__doc__, re.M))
nc.add_verbs(lambda name, *args, **kwargs: VERBS.add(name) or argparse.ArgumentParser())
VERBS = sorted(VERBS)
HIDDEN = dict(os.environ, CUDA_VISIBLE_DEVICES="")       # an NVIDIA GPU, if there is one
HIDDEN.pop("PYTHONPATH", None)


def gpu(*args, cwd, env=HIDDEN):
    return nanoeuler(*args, cwd=cwd, program="nanoeuler_cuda.py", env=env, timeout=100)


def test_verbs_are_those_of_the_docstring():
    assert {"", "test", "g", "t", "tr", "i", "s", "c", "doctor"} <= set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_without_a_driver(verb, tmp_path):
    result = gpu(*filter(None, [verb, "It was" if verb == "i" else ""]), cwd=tmp_path)
    if verb != "doctor":
        assert complains(result, "GPU", "driver", "nanoeuler.py").startswith("nanoeuler: ")
        assert os.listdir(tmp_path) == []
        return
    assert result.returncode == 2 and result.stderr == ""
    for word in ("numba-cuda", "numpy", "nvidia-smi", "\nbroken: ", "driver"):
        assert word in result.stdout
    assert "Traceback" not in result.stdout


def test_an_unknown_verb_and_help(tmp_path):
    result = gpu("dance", cwd=tmp_path)
    assert result.returncode == 2 and "'doctor'" in result.stderr
    result = gpu("--help", cwd=tmp_path)
    assert result.returncode == 0 and "doctor" in result.stdout and result.stderr == ""


@pytest.fixture
def without_numba_cuda(tmp_path):
    """The environment of an interpreter, to be started with -S, that lacks numba-cuda."""
    site = tmp_path / "site"
    site.mkdir()
    for folder in (p for p in sys.path if p.endswith("-packages")):
        for name in os.listdir(folder):
            if not name.lstrip("_").replace("-", "_").startswith("numba_cuda"):
                with contextlib.suppress(FileExistsError):
                    (site / name).symlink_to(os.path.join(folder, name))
    return dict(HIDDEN, PYTHONPATH=str(site))


def python(*args, cwd, env):
    return subprocess.run([sys.executable, *args], cwd=cwd, env=env, timeout=100, text=True,
                          capture_output=True)


def names_the_remedy(result, *words):
    text = result.stdout
    assert result.returncode == 2 and "Traceback" not in text + result.stderr, result
    assert "\nbroken: " in text and "pip install" in text and "numba-cuda[cu13]" in text
    assert all(word in text for word in words), text


@pytest.mark.parametrize("verb", ["", "doctor", "t"])
def test_without_numba_cuda(verb, without_numba_cuda, tmp_path):
    args = [str(ROOT / "nanoeuler_cuda.py"), *filter(None, [verb])]
    result = python("-S", *args, cwd=tmp_path, env=without_numba_cuda)
    names_the_remedy(result, "numba-cuda is not installed", "numba-cuda       not installed")


TOO_NEW = {
    "import fails": """
import sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "numba.cuda":
            raise AttributeError("module 'numpy' has no attribute 'row_stack'")
sys.meta_path.insert(0, Finder)""",
    "NumPy 2.5": """
import numpy                                 # of what it dropped, numba-cuda 0.30 uses this
vars(numpy).pop("row_stack", None)"""}


@pytest.mark.parametrize("verb", ["", "doctor", "g"])
@pytest.mark.parametrize("how", TOO_NEW)
def test_numpy_that_is_too_new(how, verb, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(TOO_NEW[how], encoding="utf-8")
    env = dict(HIDDEN, PYTHONPATH=str(tmp_path))
    result = gpu(*filter(None, [verb]), cwd=tmp_path, env=env)
    names_the_remedy(result, "AttributeError", "row_stack", "numpy>=2.1,<2.5")


def test_importing_it_without_numba_cuda(without_numba_cuda, tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import nanoeuler_cuda"
    result = python("-S", "-c", code, cwd=tmp_path, env=without_numba_cuda)
    last = result.stderr.splitlines()[-1]
    assert result.returncode == 1 and last.startswith("ImportError: ") and nc.PIP in last
