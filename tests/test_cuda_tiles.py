"""Tiles on their way out of a product: the Python of the kernels, with stmatrix in NumPy."""
import ast
import importlib.util
import inspect
import textwrap
import types

import numpy as np
import pytest

if importlib.util.find_spec("numba_cuda") is None:
    pytest.skip("numba-cuda is not installed; it comes with the extra cuda",
                allow_module_level=True)

from dry_gpu import constants

from nanoeuler_parts.tensor_cores import matmul_wgmma, tiles
from nanoeuler_parts.tensor_cores.epilogues import STORE
from nanoeuler_parts.tensor_cores.scheduler import BN, lower_tile_at, tiles_of

KERNEL = matmul_wgmma.wgmma_kernel(0, 0, STORE, True, True, BN, 1)
WRITER = vars(matmul_wgmma.wgmma_writer(False, True, BN))


def plain(function, **names):
    """A device function as Python, in which these names mean something else"""
    code, outer = function.py_func.__code__, function.py_func.__closure__ or ()
    cells = tuple(types.CellType(names.get(name, cell.cell_contents))
                  for name, cell in zip(code.co_freevars, outer, strict=True))
    return types.FunctionType(code, {**function.py_func.__globals__, "u32": int, **names},
                              closure=cells)


swizzled = plain(tiles.swizzled, CHUNKS_PER_ROW=8, CHUNK_BYTES=16, ROW_BYTES=128, PANEL_BYTES=8192)


def staged(function, modifier, sums):
    """Returns the memory, as 16-bit numbers, that a stage function writes for the sums (64, N) of
    a warpgroup."""
    memory = np.full(sums.size, -1)
    for warp in range(4):
        stores = [[] for _ in range(32)]     # of each lane: (address, its pairs of four matrices)
        for lane in range(32):
            # acc[i] of a lane, by the docstring of `wgmma`
            acc = [sums[16 * warp + lane // 4 + 8 * (i // 2 % 2),
                        8 * (i // 4) + 2 * (lane % 4) + i % 2] for i in range(sums.shape[1] // 2)]
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
    """The boxes (64, 64) that the copy engine stores, of memory with its 128-byte swizzle"""
    out = np.zeros((memory.size // 4096, 64, 64), int)
    for j, row, column in np.ndindex(out.shape):
        chunk = column // 8 ^ row % 8        # bits 4 to 6 of an address XOR its bits 7 to 9
        out[j, row, column] = memory[4096 * j + 64 * row + 8 * chunk + column % 8]
    return out


def test_sums_are_staged_as_they_are_or_mirrored():
    """The first is what a GPU has proved, so it tests this file; the second is then the other."""
    sums = np.arange(64 * 256).reshape(64, 256)
    written = constants(WRITER["write_tile"])["stage_sums"]
    mirrored = constants(WRITER["write_mirrored"])["stage_mirrored"]
    found = boxes(staged(written, "stmatrix_rows", sums))
    assert np.array_equal(found, sums.reshape(64, 4, 64).swapaxes(0, 1))
    found = boxes(staged(mirrored, "stmatrix_columns", sums))
    assert np.array_equal(found, sums.T.reshape(4, 64, 64))


@pytest.mark.parametrize("columns", [256, 128, 64])
def test_sums_of_narrow_tiles_are_staged(columns):
    sums = np.arange(64 * columns).reshape(64, columns)
    writer = vars(matmul_wgmma.wgmma_writer(False, True, columns))
    known = constants(writer["write_tile"])
    found = boxes(staged(known["stage_sums"], "stmatrix_rows", sums))
    assert known["BOXES"] == len(found)
    assert np.array_equal(found, sums.reshape(64, -1, 64).swapaxes(0, 1))


@pytest.mark.parametrize("columns", [256, 128, 64])
def test_sums_in_float32_are_staged_in_two_passes(columns):
    """A box of 64 x 32 numbers has rows of 128 bytes, like one of 64 x 64 in bfloat16."""
    sums = np.arange(64 * columns).reshape(64, columns)
    known = constants(vars(matmul_wgmma.wgmma_writer(True, False, columns))["write_tile"])
    assert known["passes"] == 2 and known["box_columns"] == 32
    for half in range(2):
        memory = np.full(64 * columns // 2, -1)
        for warp, lane in np.ndindex(4, 32):
            acc = [sums[16 * warp + lane // 4 + 8 * (i // 2 % 2),
                        8 * (i // 4) + 2 * (lane % 4) + i % 2] for i in range(columns // 2)]

            def store_two(at, first, second):
                assert at % 8 == 0 and (memory[at // 4:at // 4 + 2] == -1).all()
                memory[at // 4:at // 4 + 2] = first, second
            stage = plain(known["stage_sums"], swizzled=swizzled, lane_id=lambda lane=lane: lane,
                          bit=lambda x, i: x >> i & 1, store_two=store_two, EIGHT_ROWS=1024)
            stage(0, acc, 16 * warp, half)
        found = np.zeros((known["BOXES"], 64, 32), int)
        for j, row, column in np.ndindex(found.shape):
            chunk = column // 4 ^ row % 8
            found[j, row, column] = memory[2048 * j + 32 * row + 4 * chunk + column % 4]
        wanted = sums[:, columns // 2 * half:][:, :columns // 2]
        assert np.array_equal(found, wanted.reshape(64, -1, 32).swapaxes(0, 1))


def when_mirrored():
    """The condition under which the kernel calls write_mirrored, as a function of m and n"""
    tree = ast.parse(textwrap.dedent(inspect.getsource(KERNEL.py_func)))
    [test] = [node.test for node in ast.walk(tree) if isinstance(node, ast.If)
              and ast.unparse(node.body[0]).startswith("writer.write_mirrored(")]
    code = compile(ast.Expression(test), "the kernel", "eval")
    return lambda m, n: eval(code, dict(symmetric=True, u32=int, BN=BN, m=m, n=n))


@pytest.mark.parametrize("N", [8, 128, 136, 256, 264, 512, 520, 768, 1000, 2048, 2056])
def test_tiles_and_their_mirror_images_are_a_symmetric_output(N):
    """The kernel's functions store each entry once.  The copy engine cuts off what is outside."""
    i, j = np.indices((N, N))
    wanted, out = np.minimum(i, j) * N + np.maximum(i, j), np.full((N, N), -1)
    at, mirrored = plain(lower_tile_at), when_mirrored()

    def store(name, m, n, staged):
        """Calls write_tile or write_mirrored, of which staged is what it has in staging."""
        def to_out(_, column, row, z, place):
            part = out[row:row + 64, column:column + 64]
            assert z == 3 and place % 8192 == 0 and (part == -1).all()
            part[:] = staged[place // 8192, :part.shape[0], :part.shape[1]]
        nothing = dict.fromkeys(("tma_wait_read", "warpgroup_barrier", "stage_sums", "fence_async",
                                 "stage_mirrored", "tma_commit"), lambda *_: None)
        send_box = plain(constants(WRITER[name])["send_box"], tma_store_3d=to_out)
        call = plain(WRITER[name], send_box=send_box, PANEL_BYTES=8192, warp_id=lambda: 4,
                     leads_warpgroup=lambda: True, global_address=lambda x: x, **nothing)
        arguments = None, 3, m, n, None, 0, 1, None, 0, 1, False
        call(*arguments[:WRITER[name].py_func.__code__.co_argcount])

    for tile in range(tiles_of(N, N, True)):
        m, n = at(tile, N)
        assert m < N and n < N
        for half in (m, m + 64):             # one for each consumer
            sums = np.full((64, 256), -2)
            inside = wanted[half:half + 64, n:n + 256]
            sums[:inside.shape[0], :inside.shape[1]] = inside
            store("write_tile", half, n, sums.reshape(64, 4, 64).swapaxes(0, 1))
            if mirrored(half, n):
                store("write_mirrored", half, n, sums.T.reshape(4, 64, 64))
    assert np.array_equal(out, wanted)
    assert tiles_of(768, 768, True) == 12 and tiles_of(768, 768, False) == 18
    assert tiles_of(768, 768, False, 64) == 72
