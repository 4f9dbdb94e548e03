"""Tiles on their way out of a product: the Python of the kernels, with stmatrix in NumPy."""
import importlib.util
import types

import numpy as np
import pytest

if importlib.util.find_spec("numba_cuda") is None:
    pytest.skip("numba-cuda is not installed; it comes with the extra cuda",
                allow_module_level=True)

from dry_gpu import constants

from nanoeuler_parts.tensor_cores import matmul, tiles
from nanoeuler_parts.tensor_cores.matmul import BM, BN, lower_tile_at, STORE, tiles_of

KERNEL = matmul.wgmma_kernel(0, 0, STORE, True, True)


def plain(function, **names):
    """A device function as Python, where these global names mean something else"""
    code = function.py_func
    return types.FunctionType(code.__code__, {**code.__globals__, "u32": int, **names},
                              closure=code.__closure__)


swizzled = plain(tiles.swizzled, CHUNKS_PER_ROW=8, CHUNK_BYTES=16, ROW_BYTES=128, PANEL_BYTES=8192)


def staged(function, modifier, sums):
    """Returns the 32 KB, as 16-bit numbers, that a stage function writes for the sums (64, 256) of
    a warpgroup."""
    memory = np.full(64 * 256, -1)
    for warp in range(4):
        stores = [[] for _ in range(32)]     # of each lane: (address, its pairs of four matrices)
        for lane in range(32):
            # acc[i] of a lane, by the docstring of `wgmma`
            acc = [sums[16 * warp + lane // 4 + 8 * (i // 2 % 2),
                        8 * (i // 4) + 2 * (lane % 4) + i % 2] for i in range(128)]
            calls = plain(function, swizzled=swizzled, lane_id=lambda lane=lane: lane,
                          pack_bf16=lambda *two: two, bit=lambda x, i: x >> i & 1,
                          **{modifier: lambda *call, lane=lane: stores[lane].append(call)})
            arguments = (0, acc, 16 * warp, 0)
            calls(*arguments[:function.py_func.__code__.co_argcount])
        for call in zip(*stores, strict=True):           # the 32 lanes of one stmatrix
            for i in range(4):
                matrix = np.zeros((8, 8), int)
                for lane in range(32):
                    matrix[lane // 4, 2 * (lane % 4):][:2] = call[lane][1 + i]
                for r in range(8):
                    at = call[8 * i + r][0]
                    assert at % 16 == 0
                    row = matrix[r] if modifier == "stmatrix_rows" else matrix[:, r]
                    assert (memory[at // 2:at // 2 + 8] == -1).all()
                    memory[at // 2:at // 2 + 8] = row
    return memory


def boxes(memory):
    """The four boxes (64, 64) that the copy engine stores, of memory with its 128-byte swizzle"""
    out = np.zeros((4, 64, 64), int)
    for j, row, column in np.ndindex(out.shape):
        chunk = column // 8 ^ row % 8        # bits 4 to 6 of an address XOR its bits 7 to 9
        out[j, row, column] = memory[4096 * j + 64 * row + 8 * chunk + column % 8]
    return out


def test_sums_are_staged_as_they_are_or_mirrored():
    """The first is what a GPU has proved, so it tests this file; the second is then the other."""
    sums = np.arange(64 * 256).reshape(64, 256)
    known = constants(KERNEL)
    written = constants(known["write_tile"])["stage_sums"]
    mirrored = constants(known["write_mirrored"])["stage_mirrored"]
    found = boxes(staged(written, "stmatrix_rows", sums))
    assert np.array_equal(found, sums.reshape(64, 4, 64).swapaxes(0, 1))
    found = boxes(staged(mirrored, "stmatrix_columns", sums))
    assert np.array_equal(found, sums.T.reshape(4, 64, 64))


@pytest.mark.parametrize("N", [8, 128, 136, 256, 264, 512, 520, 768, 1000, 2048, 2056])
def test_tiles_and_their_mirror_images_cover_a_symmetric_output_once(N):
    at, written = plain(lower_tile_at), np.zeros((N, N), int)
    for tile in range(tiles_of(N, N, True)):
        m, n = at(tile, N)
        assert m < N and n < N
        written[m:m + BM, n:n + BN] += 1
        for half in (m, m + 64):             # of each consumer, as the kernel has it
            if half >= n + BN:
                written[n:n + BN, half:half + 64] += 1
    assert (written == 1).all()
    assert tiles_of(768, 768, True) == 12 and tiles_of(768, 768, False) == 18
