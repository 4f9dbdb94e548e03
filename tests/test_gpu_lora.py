"""LoRA on a GPU, as far as a CPU can tell: the layout of an adapter, and its products."""
import importlib.util
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest
from helpers import EVERY_TENSOR, TINY

if importlib.util.find_spec("numba_cuda") is None:
    pytest.skip("numba-cuda is not installed; it comes with the extra cuda",
                allow_module_level=True)

import nanoeuler as ne
from nanoeuler_parts import gpu_lora
from nanoeuler_parts.lora.adapter import (
    Adapter, adapter_shapes, adapter_views, MATRICES, n_entries, shape_of, sites_of,
)

pytestmark = pytest.mark.unit
CFG, RANK, SCALE = ne.replace(TINY, **EVERY_TENSOR), 3, 0.7


class OnHost:
    """The products of Ops, computed by NumPy"""
    path = "portable"

    def matmul(self, out, x, w):
        out[...] = x @ w.T

    def matmul_dx(self, dx, dy, w, add=False):
        dx[...] = dy @ w + (dx if add else 0)

    def matmul_dw(self, dw, dy, x, add=True):
        dw[...] = dy.T @ x + (dw if add else 0)

    def slow_parts(self, cfg):
        return []


@pytest.fixture
def on_host(monkeypatch):
    """LoraOps whose arrays are NumPy's"""
    def view(x, start, shape):
        return x.ravel()[start:start + np.prod(shape)].reshape(shape)

    monkeypatch.setattr(gpu_lora.nc, "view", view)
    ops = gpu_lora.LoraOps(OnHost(), RANK)
    ops.u, ops.v = np.full((2, 5, 3 * RANK), np.nan)
    return ops


def test_an_adapter_returns_from_the_layout_of_the_device():
    flat = np.random.default_rng(1).standard_normal(n_entries(CFG, RANK))
    there = gpu_lora.for_device(CFG, RANK, flat)
    assert there.size == gpu_lora.n_entries_on_device(CFG, RANK) > flat.size
    assert np.count_nonzero(there) == flat.size
    assert np.array_equal(gpu_lora.for_host(CFG, RANK, there), flat)


@pytest.mark.parametrize("name", MATRICES)
def test_products_are_those_of_the_merged_matrix(name, on_host):
    """y, dx, and the gradients of A and B of each projection, set and then added to"""
    rng, (N, K) = np.random.default_rng(2), shape_of(CFG, name)
    flat = rng.standard_normal(n_entries(CFG, RANK))
    host, l = adapter_views(CFG, RANK, flat), CFG.n_layer - 1
    device = Adapter(*ne.slices(gpu_lora.for_device(CFG, RANK, flat),
                                gpu_lora.lora_shapes(CFG, RANK)))
    a, b = (getattr(device, f"{name}_{x}")[l] for x in "ab")
    w, x, dy = (rng.standard_normal(shape) for shape in ((N, K), (5, K), (5, N)))
    matrix = gpu_lora.Adapted(w, a, SCALE * a, b, SCALE * b)
    sites = [s for s in sites_of(CFG, RANK).values() if s.matrix == name]
    A, B = (getattr(host, f"{name}_{x}")[l] for x in "ab")
    whole = w.copy()
    for s in sites:
        whole[slice(*s.rows)] += SCALE * B[slice(*s.rows)] @ A[slice(*s.columns)]
    y, dx = np.empty((5, N)), np.empty((5, K))
    on_host.matmul(y, x, matrix)
    on_host.matmul_dx(dx, dy, matrix)
    assert np.allclose(y, x @ whole.T) and np.allclose(dx, dy @ whole)
    g = gpu_lora.AdaptedGradient(matrix, np.full(a.shape, np.nan), np.full(b.shape, np.nan))
    for times, add in ((1, False), (2, True)):
        on_host.matmul_dw(g, dy, x, add)
        for s in sites:
            rows, columns = slice(*s.rows), slice(*s.columns)
            dw = dy[:, rows].T @ x               # the gradient of the projection's W + s B A
            assert np.allclose(g.a[columns], times * SCALE * B[rows].T @ dw)
            assert np.allclose(g.b[columns, rows], times * SCALE * (dw @ A[columns].T).T)


def test_other_matrices_have_no_adapter(on_host):
    rng = np.random.default_rng(3)
    w, x, y = rng.standard_normal((4, 6)), rng.standard_normal((5, 6)), np.empty((5, 4))
    on_host.matmul(y, x, w)
    assert np.array_equal(y, x @ w.T)
    dx = np.ones((5, 6))
    on_host.matmul_dx(dx, y, w, add=True)
    assert np.array_equal(dx, y @ w + 1)
    on_host.matmul_dw(None, y, x)            # frozen: no gradient, and no error


def test_the_table_of_an_adapter_has_no_gaps():
    shapes = gpu_lora.lora_shapes(CFG, RANK)
    for name, host in adapter_shapes(CFG, RANK)._asdict().items():
        L, rows, _ = getattr(shapes, name)
        assert L == CFG.n_layer and rows % RANK == 0 and (name[-1] == "b" or host[1] == rows)


class OneByOne:
    """Runs a kernel as Python, its blocks and threads one after another"""

    def __init__(self, kernel, grid, block):
        self.kernel, self.grid, self.block_size = kernel, grid, block

    def __call__(self, *args):
        for block in range(self.grid):
            for thread in range(self.block_size):
                place = SimpleNamespace(
                    blockIdx=SimpleNamespace(x=block), threadIdx=SimpleNamespace(x=thread),
                    blockDim=SimpleNamespace(x=self.block_size),
                    grid=lambda n: block * self.block_size + thread,     # noqa: B023
                    gridsize=lambda n: self.grid * self.block_size)
                names = {"cuda": place, "ctype": lambda x: x.dtype, "value": lambda x: x,
                         "stored": lambda out, x: x}
                FunctionType(self.kernel.py_func.__code__,
                             {**self.kernel.py_func.__globals__, **names})(*args)


def test_only_the_blocks_of_a_gradient_are_kept():
    """Of B^T of q, k and v, and of gate and up: the entries that have a place on the host"""
    rank, cfg = 3, ne.replace(CFG, n_layer=2)
    everywhere = np.arange(1.0, 1 + gpu_lora.n_entries_on_device(cfg, rank))
    want = gpu_lora.for_device(cfg, rank, gpu_lora.for_host(cfg, rank, everywhere))
    device, wanted = (Adapter(*ne.slices(x, gpu_lora.lora_shapes(cfg, rank)))
                      for x in (everywhere, want))
    for name in MATRICES:
        g, ends = getattr(device, f"{name}_b"), [0, *(
            site.rows[1] for site in sites_of(cfg, rank).values() if site.matrix == name)]
        rows = g.reshape(-1, g.shape[2])
        OneByOne(gpu_lora.keep_blocks_kernel, len(rows), 4)(rows, np.array(ends, np.int32), rank)
        assert np.array_equal(g, getattr(wanted, f"{name}_b")), name
    assert np.array_equal(everywhere, want)


@pytest.mark.parametrize("n", [1, 7, 40])
def test_each_entry_is_scaled(n):
    x, out = np.random.default_rng(1).standard_normal(n), np.full(n, np.nan)
    OneByOne(gpu_lora.scale_kernel, 2, 4)(out, x, 0.7)
    assert np.array_equal(out, 0.7 * x)
