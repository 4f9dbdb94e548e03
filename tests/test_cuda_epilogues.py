"""A new epilogue is one class: it compiles for all architectures, and changes each sum once."""
import importlib.util

import numpy as np
import pytest

if importlib.util.find_spec("numba_cuda") is None:
    pytest.skip("numba-cuda is not installed; it comes with the extra cuda",
                allow_module_level=True)

from dry_gpu import dry_run
from test_cuda_kernels import ARCHS, complaints
from test_cuda_partition import as_python

import nanoeuler_cuda as nc
from nanoeuler_parts.gpu.mma import column_of, which_row
from nanoeuler_parts.tensor_cores.epilogues import ADD, Epilogue, Polynomial, STORE
from oracles.epilogues import Gated

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("path, capability, archs", [
    ("mma", (8, 9), [*ARCHS]), ("wgmma", (9, 0), ["sm_90a"])])
def test_a_new_epilogue_compiles_for_all_architectures(path, capability, archs):
    with dry_run() as device:
        device.gpu.compute_capability = capability
        out, a, b, x = (nc.new(shape, np.uint16)
                        for shape in ((136, 72), (136, 64), (72, 64), (136, 72)))
        nc.make_ops(path).product(out, a, b, epilogue=Gated(2.0), x=x)
        [launch] = device.launches
    assert launch.name == f"{path}_kernel_kernel"
    assert [complaints(launch, arch) for arch in archs] == [[]] * len(archs)


def of_any_lane():
    """(its first row, its first column) of each lane, by the table of `mma`"""
    return [(lane // 4, 2 * (lane % 4)) for lane in range(32)]


@pytest.mark.parametrize("epilogue", [Gated(3.0), Polynomial(2.0, 3.0, 5.0)])
@pytest.mark.parametrize("m, n", [(0, 0), (16, 64), (32, 64), (96, 128)])
def test_an_epilogue_changes_each_sum_of_a_warp_once(epilogue, m, n):
    """16 x 64 sums from out[m, n], which may lie beyond the edge of out (40, 40) or (40, 100)"""
    N = 40 if isinstance(epilogue, Polynomial) else 100
    rng = np.random.default_rng(1)
    x, sums, found = rng.standard_normal((40, N)), rng.standard_normal((16, 64)), np.zeros((16, 64))

    def load_2(x, i):
        return x.ravel()[i:i + 2]
    plain = dict.fromkeys(("f32", "i32", "u32", "intp"), float) | dict(
        i32=int, u32=int, value=float, exp=np.exp, load_2=load_2,
        which_row=as_python(which_row), column_of=as_python(column_of))
    names = epilogue.change().py_func
    change = as_python(epilogue.change(), **{
        name: plain[name] for name in plain
        if name in (*names.__code__.co_names, *names.__code__.co_freevars)})
    for row, column in of_any_lane():
        places = [(row + i // 2 % 2 * 8, column + i // 4 * 8 + i % 2) for i in range(32)]
        acc = np.array([sums[place] for place in places])
        change(acc, 0, x, m + row, n + column)
        for place, v in zip(places, acc):
            found[place] += v
    inside = sums[:max(0, 40 - m), :max(0, N - n)]
    given = x[m:m + 16, n:n + 64]
    if isinstance(epilogue, Gated):
        expected = 3 * given / (1 + np.exp(-given)) * inside
    else:
        expected = 2 * np.eye(40)[m:m + 16, n:n + 64] + 3 * given + 5 * inside
    np.testing.assert_allclose(found[:len(inside), :inside.shape[1]], expected, 1e-6)


def test_equal_epilogues_share_a_kernel():
    assert Gated(2.0) == Gated(2.0) != Gated(3.0) and hash(Gated(2.0)) == hash(Gated(2.0))
    assert STORE == Epilogue() != ADD and not STORE.changes and not ADD.changes and ADD.adds
    assert Gated(2.0).changes and Polynomial(1.0, 2.0, 3.0).changes
    assert len({repr(x) for x in (STORE, ADD, Gated(2.0), Gated(3.0), Polynomial(2.0))}) == 5
