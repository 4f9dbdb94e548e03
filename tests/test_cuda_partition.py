"""Blocks, warps and slices share their work without gaps and overlaps, also for odd sizes. Operands
of `mma` reach the lanes that multiply them. Shared memory adds up. The functions of the kernels run
as Python, with the constants of their modules."""
import ast
import importlib.util
import inspect
import itertools
import textwrap
from collections import Counter
from types import CellType, FunctionType, SimpleNamespace

import numpy as np
import pytest

if importlib.util.find_spec("numba_cuda") is None:
    pytest.skip("numba-cuda is not installed; it comes with the extra cuda",
                allow_module_level=True)

from dry_gpu import constants

import nanoeuler_cuda as nc
from nanoeuler_parts.gpu.mma import column_of, which_row
from nanoeuler_parts.tensor_cores import (
    attention, matmul_mma, matmul_wgmma, one_tile, pipeline, ptx, scheduler, tiles,
)
from nanoeuler_parts.tensor_cores.epilogues import (
    ADD, Epilogue, Plus, Polynomial, STORE, two_of,
)
from oracles.epilogues import Gated

pytestmark = pytest.mark.gpu


def as_python(function, **names):
    """A device function as Python. names: what stands in for instructions of the GPU"""
    code, outer = function.py_func.__code__, function.py_func.__closure__ or ()
    cells = tuple(CellType(names.get(name, cell.cell_contents))
                  for name, cell in zip(code.co_freevars, outer, strict=True))
    plain = {"u32": int, "u64": int, "types": SimpleNamespace(int32=int, intp=int),
             "quotient": lambda a, b: int(a) // int(b), "bit": lambda x, i: x >> i & 1}
    return FunctionType(code, {**function.py_func.__globals__, **plain, **names}, closure=cells)


# ---- loops of kernels
def loop_of(kernel, target):
    """(the assignments before the loop over `target`, its range), compiled"""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.py_func)))
    loop = next(node for node in ast.walk(tree) if isinstance(node, ast.For)
                and getattr(node.target, "id", "") == target and "cuda" in needed(tree, node))
    names = needed(tree, loop)
    before = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)
              and node.lineno < loop.lineno and {*stored(node)} & names]
    before = ast.Module(sorted(before, key=lambda node: node.lineno), [])
    return compile(before, "kernel", "exec"), compile(ast.Expression(loop.iter), "kernel", "eval")


def stored(node):
    """The names that an assignment gives a value"""
    return [x.id for x in ast.walk(node)
            if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)]


def needed(tree, loop):
    """The names on which the range of a loop depends"""
    names = {x.id for x in ast.walk(loop.iter) if isinstance(x, ast.Name)}
    for node in sorted((x for x in ast.walk(tree) if isinstance(x, ast.Assign)),
                       key=lambda node: -node.lineno):
        if node.lineno < loop.lineno and {*stored(node)} & names:
            names |= {x.id for x in ast.walk(node.value) if isinstance(x, ast.Name)}
    return names


class Anything:
    """Stands in for values on which no range depends"""
    def __getattr__(self, name):
        return self

    def __call__(self, *args, **options):
        return self

    def __getitem__(self, key):
        return self


def iterations(kernel, target, grid, block, **names):
    """Counter: how often all threads together run the loop over `target` with each value"""
    before, values = loop_of(kernel, target)
    found, three = Counter(), lambda x: tuple(np.resize([*np.atleast_1d(x), 1, 1][:3], 3))
    (gx, gy, gz), (bx, by, bz) = three(grid), three(block)
    axes = lambda x, y, z: SimpleNamespace(x=x, y=y, z=z)
    outer = {**kernel.py_func.__globals__, **constants(kernel)}
    for x, y, tx, ty in itertools.product(range(gx), range(gy), range(bx), range(by)):
        cuda = SimpleNamespace(blockIdx=axes(x, y, 0), threadIdx=axes(tx, ty, 0),
                               gridDim=axes(gx, gy, gz), blockDim=axes(bx, by, bz),
                               grid=lambda n: x * bx + tx, gridsize=lambda n: gx * bx)
        env = {**outer, "ctype": Anything(), "gradient_norm": lambda p: 1.0, **names, "cuda": cuda}
        exec(before, env)
        found.update(eval(values, env))
    return found


def array(*shape):
    return SimpleNamespace(shape=shape, size=int(np.prod(shape)), dtype=Anything())


SIZES = [1, 31, 529, 1597]


@pytest.mark.parametrize("BT", SIZES)
def test_each_row_is_in_one_partial_sum(BT):
    """GAIN_PARTS blocks share the rows for the gradients of gains and biases."""
    parts, C = nc.GAIN_PARTS, 40
    _, norm = nc.rmsnorm_kernels(C, 4)
    rows = Counter(range(BT))
    assert iterations(norm, "bt", parts, (1, 3), x=array(BT, C)) == rows
    assert iterations(nc.sum_columns_kernel, "t", parts, 1, x=array(BT, C),
                      partial=array(parts, C)) == rows
    _, heads = nc.head_norm_kernels(8)
    assert iterations(heads, "t", parts, (1, nc.ROW_WARPS), rstd=array(BT, 3),
                      dqkv=array(BT, 32), partial=array(parts, 16)) == rows


@pytest.mark.parametrize("n", [4, 36, 1020, 4 * 1597])
def test_each_entry_is_updated_once(n):
    """Of matrices in Muon, and of the output of a norm: n numbers, W at once."""
    W, parts = 4, 2
    entries = Counter(range(0, n, W))
    x = array(1, n // 2, 2)
    known = dict(x=x, starts=[0], hyper=Anything(), p=x, m=x, squares=array(1, parts),
                 partial=array(1))
    for kernel in (nc.nesterov_kernel(W), nc.muon_kernel(W)):
        assert iterations(kernel, "i", parts, 256, **known) == entries
    assert iterations(nc.normalized_kernel(4, W), "i", 3, 64, y=array(n // 4, 4)) == Counter(
        range(n // W))
    N = 1 + int(n ** 0.5)
    assert iterations(nc.polynomial_kernel, "i", parts, 256, x=array(1, N, N)) == Counter(
        range(N * N))


@pytest.mark.parametrize("n", [1, 7, 8, 9, 255, 1000])
@pytest.mark.parametrize("V", [2, 300, 1 << 17])
def test_each_row_is_added_once_to_its_token(V, n):
    """Eight warps share the rows of a token, in ascending order."""
    tokens = np.random.default_rng(n).integers(0, V, n) ** 2 // V        # some are frequent
    runs = nc.runs_of(tokens, V)
    assert sorted(runs.order) == [*range(n)] and (np.diff(runs.tokens) > 0).all()
    for token, (start, end) in zip(runs.tokens, itertools.pairwise(runs.starts), strict=True):
        rows = runs.order[start:end]
        assert rows.size and (np.diff(rows) > 0).all() and (tokens[rows] == token).all()
    assert {x.dtype for x in runs} == {np.dtype(np.int32)}
    found = iterations(nc.embedding_backward_kernel(1), "i", runs.tokens.size, 256,
                       dx=array(n, 32), starts=runs.starts)
    assert found == Counter({i: 32 for i in range(n)})   # by all lanes of a warp


def seen(rows, keys, window):
    """(rows, keys): whether a row attends to a key"""
    distance = np.subtract.outer(rows, keys)
    return (distance >= 0) & (distance < (window or 1 << 30))


@pytest.mark.parametrize("window", [0, 1, 9, 63, 64, 65, 130, 1000])
def test_the_mask_of_a_tile_leaves_what_its_rows_see(window):
    """Of each tile that a warp meets, in the places that a lane holds"""
    names = dict(i32=int, which_row=as_python(which_row), column_of=as_python(column_of))
    mask, _ = (as_python(f, **names) if i == 0 else f
               for i, f in enumerate(attention.softmax_of(window)))
    places = [(8 * names["which_row"](i), names["column_of"](i)) for i in range(32)]
    rows, columns = np.array(places).T
    for row, column in itertools.product((0, 3, 8, 50, 64, 200, 517), range(0, 640, 64)):
        for first_column in 0, 6:
            s = np.zeros(40)
            mask(s, 8, column + first_column - row)
            want = seen(row + rows, column + first_column + columns, window).diagonal()
            assert ((s[8:] == 0) == want).all() and (s[:8] == 0).all()


@pytest.mark.parametrize("window", [0, 1, 9, 63, 64, 65, 130, 1000])
@pytest.mark.parametrize("T", [1, 64, 65, 128, 321, 512])
def test_the_tiles_of_attention_hold_all_that_is_seen(T, window):
    """Each block of tensor_cores/attention.py walks over the tiles from its first to its last:
    each key that one of its rows sees is in one, and each query that sees one of its keys.  No tile
    is without any, except at the end of a block of 128 rows."""
    first_key = as_python(attention.first_key_of(window))

    def assigned(make, name, *more, **values):
        source = inspect.getsource(make(64, False, window, *more).py_func)
        text = source.split(f" {name} = ")[1].split("\n")[0].split("#")[0]
        return eval(text, dict(min=min, T=T, window=window, TILE_ROWS=64, group=1, **values))
    for rows, make, *more in ((128, attention.tensor_attention_forward, 2),
                              (64, attention.tensor_attention_forward, 1),
                              (64, attention.tensor_attention_dq)):
        for t0 in range(0, T, rows):
            k0 = first_key(t0)
            n = assigned(make, "count", *more, t0=t0, k0=k0, BLOCK_ROWS=rows)
            mine = np.arange(t0, min(t0 + rows, T))
            found = seen(mine, np.arange(T), window).any(0)
            assert k0 % 64 == 0 and k0 <= found.argmax() < k0 + 64
            assert not found[:k0].any() and not found[k0 + 64 * n:].any()
            assert found[k0 + 64 * (n - 1):].any()
    for k0 in range(0, T, 64):
        end = assigned(attention.tensor_attention_dkv, "end", k0=k0)
        n = assigned(attention.tensor_attention_dkv, "next_h, next_t, count", k0=k0, end=end,
                     g=0)[2]
        found = seen(np.arange(T), np.arange(k0, min(k0 + 64, T)), window).any(1)
        assert not found[:k0].any() and not found[min(end, k0 + 64 * n):].any()
        assert found[k0 + 64 * (n - 1):].any()


@pytest.mark.parametrize("n, window", [(1, 9), (7, 9), (100, 33), (300, 1000)])
def test_each_key_has_one_score(n, window):
    keys = Counter({t: nc.WARP for t in range(max(0, n - window), n)})   # all lanes of a warp
    assert iterations(nc.attention_decode_kernel, "t", 1, 256, at=(5, n - 1), window=window,
                      kc=array(1, 400, 8), scores=[0]) == keys


# ---- pieces of a product
@pytest.mark.parametrize("rows, columns", [(128, 128), (128, 256)])
@pytest.mark.parametrize("M, N, K, splits", [
    (1, 1, 1, 1), (128, 256, 64, 1), (129, 257, 65, 2), (40 * 128 + 1, 100, 1000, 3),
    (17 * 128, 600, 640, 7), (33 * 128 - 5, 520, 64 * 13 - 1, 13)])
def test_pieces_cover_each_tile_and_each_slice_once(rows, columns, M, N, K, splits):
    tile_at = as_python(scheduler.tile_at)
    down, across, slices = -(-M // rows), -(-N // columns), -(-K // 64)
    found = Counter()
    for piece in range(down * across * splits):
        m, n, first, end = map(int, tile_at(piece, M, N, K, splits, rows, columns, 64))
        assert splits > slices or first < end
        found.update((m, n, k) for k in range(first, end))
    assert found == Counter((m, n, k) for m in range(0, M, rows) for n in range(0, N, columns)
                            for k in range(slices))
    for before, after in zip(range(splits - 1), range(1, splits)):       # the order of the sums
        *_, end = tile_at(before * down * across, M, N, K, splits, rows, columns, 64)
        *_, first, _ = tile_at(after * down * across, M, N, K, splits, rows, columns, 64)
        assert end == first


# ---- operands of mma.sync
def slice_in_memory(operand, source, mn0, k0):
    """Shared memory, as 16-bit numbers, after 128 threads have copied a slice of source"""
    memory, flat, columns = {}, source.ravel(), source.shape[1]

    def copy(to, address, n_bytes):
        assert to % 16 == 0 and address % 2 == 0 and n_bytes in (0, 16)
        for i in range(8):
            assert to + 2 * i not in memory, "two copies to one place"
            memory[to + 2 * i] = flat[address // 2 + i] if n_bytes else 0

    given = SimpleNamespace(shape=source.shape, strides=(2 * columns, 2))
    swizzled = as_python(tiles.swizzled)
    for thread in range(128):
        first = as_python(operand.first_chunk, global_address=lambda x: 0, swizzled=swizzled,
                          thread_id=lambda: thread)(given, mn0, k0, 0)
        as_python(operand.issue_loads, cp_async_or_zero=copy)(first, given, 0)
    assert sorted(memory) == [*range(0, 128 * 64 * 2, 2)]
    return memory


def fragments(operand, memory, mn0, s, transposed):
    """Four registers, pairs of numbers, of each lane for each of four fragments"""
    calls = []
    swizzled = as_python(tiles.swizzled)
    for lane in range(32):
        own = []
        start = as_python(operand.lane_start, lane_id=lambda: lane, swizzled=swizzled)(mn0)
        load = as_python(operand.load_fragment, load=lambda out, j, row: own.append((j, int(row))))
        for i in range(4):
            load(None, int(start), i, s)
        calls.append(own)
    registers = np.zeros((32, 16, 2), int)
    for each in zip(*calls):                 # one ldmatrix of 32 lanes
        for k in range(4):
            matrix = np.array([[memory[each[8 * k + r][1] + 2 * c] for c in range(8)]
                               for r in range(8)])
            matrix = matrix.T if transposed else matrix
            for lane in range(32):
                registers[lane, each[lane][0] + k] = matrix[lane // 4, 2 * (lane % 4):][:2]
    return registers


@pytest.mark.parametrize("mn", [False, True])
@pytest.mark.parametrize("of_a", [False, True])
def test_fragments_are_those_that_mma_multiplies(of_a, mn):
    """Lane l, r = l / 4 and c = 2 (l % 4): A has [r, c], [r + 8, c], [r, c + 8], [r + 8, c + 8], B
    [c, r] and [c + 8, r] of eight columns, then of the next eight (docstring of `mma`)."""
    operand = matmul_mma.mma_operand(of_a, mn)
    numbers = 1 + np.arange(128 * 64).reshape(128, 64)   # [row of A or column of B, k]
    source = np.ascontiguousarray(numbers.T if mn else numbers)
    memory = slice_in_memory(operand, source, 0, 0)
    for s, mn0 in itertools.product(range(4), (0, 64)):
        found = fragments(operand, memory, mn0, s, transposed=mn)
        for lane, i in itertools.product(range(32), range(4)):
            r, c = lane // 4, 2 * (lane % 4)
            at = [(r, c), (r + 8, c), (r, c + 8), (r + 8, c + 8)] if of_a else [
                (r, c), (r, c + 8), (r + 8, c), (r + 8, c + 8)]
            want = [[numbers[mn0 + 16 * i + row, 16 * s + k + j] for j in (0, 1)] for row, k in at]
            assert np.array_equal(found[lane, 4 * i:4 * i + 4], want), (s, mn0, lane, i)


def test_a_slice_beyond_the_edge_is_zeros():
    """A (100, 72): its last rows of the tile, and the last columns of its second slice."""
    operand = matmul_mma.mma_operand(True, False)
    source = 1 + np.arange(100 * 72).reshape(100, 72)
    memory = slice_in_memory(operand, source, 0, 64)
    assert sorted(x for x in memory.values() if x) == sorted(source[:, 64:].ravel())


# ---- epilogues
def of_any_lane():
    """(its first row, its first column) of each lane, by the table of `mma`"""
    return [(lane // 4, 2 * (lane % 4)) for lane in range(32)]


@pytest.mark.parametrize("epilogue", [Gated(3.0), Polynomial(2.0, 3.0, 5.0), Plus()])
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
        which_row=as_python(which_row), column_of=as_python(column_of),
        two_of=as_python(two_of, load_2=load_2))
    names = epilogue.make_change().py_func
    change = as_python(epilogue.make_change(), **{
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
    elif isinstance(epilogue, Plus):
        expected = given + inside
    else:
        expected = 2 * np.eye(40)[m:m + 16, n:n + 64] + 3 * given + 5 * inside
    np.testing.assert_allclose(found[:len(inside), :inside.shape[1]], expected, 1e-6)


class Adding(Gated):
    adds = True


def test_an_epilogue_that_kernels_cannot_have_is_refused(dry):
    with pytest.raises(nc.UserError, match="Adding adds, so it must not change sums"):
        Adding(2.0)

    class Local(Epilogue):                   # another one of this name may be in another function
        pass
    with pytest.raises(nc.UserError, match="top level of a module, Local is not"):
        Local()
    dry.gpu.compute_capability = (9, 0)
    out, a = (dry.array((64, 64), kind) for kind in (np.float32, np.uint16))
    ops = nc.make_ops()
    for asked, word in (({"epilogue": ADD, "symmetric": True}, "not a symmetric one"),
                        ({"epilogue": Gated(1.0)}, "needs x")):
        with pytest.raises(nc.UserError, match=word):
            ops.product(out, a, a, **asked)


def test_equal_epilogues_share_a_kernel():
    assert Gated(2.0) == Gated(2.0) != Gated(3.0) and hash(Gated(2.0)) == hash(Gated(2.0))
    assert STORE == Epilogue() != ADD and not STORE.changes and not ADD.changes and ADD.adds
    assert Gated(2.0).changes and Polynomial(1.0, 2.0, 3.0).changes
    assert len({repr(x) for x in (STORE, ADD, Gated(2.0), Gated(3.0), Polynomial(2.0))}) == 5


# ---- shared memory
def test_a_chunk_is_16_bytes_and_a_row_128():
    """The copy engine's 128-byte swizzle and ldmatrix need these sizes."""
    assert (tiles.CHUNK_BYTES, tiles.ROW_BYTES, tiles.CHUNKS_PER_ROW) == (16, 128, 8)
    assert tiles.PANEL_BYTES == 64 * 128 and ptx.MBARRIER_BYTES == 8 and ptx.ALIGNMENT == 1024
    swizzled = as_python(tiles.swizzled)
    places = {int(swizzled(row, chunk)) for row in range(64) for chunk in range(32)}
    assert places == {*range(0, 64 * 32 * 16, 16)}       # each place once
    assert int(swizzled(5, 2)) == 5 * 128 + (2 ^ 5) * 16


def test_shared_memory_of_products_adds_up():
    a, b, sums = 128 * 64 * 2, 256 * 64 * 2, 64 * 256 * 2
    assert matmul_mma.MMA_SMEM == 3 * (a + a) + 1024
    smem = matmul_wgmma.wgmma_smem
    assert smem(256, 1) == 3 * (a + b) + 2 * sums + 2 * 3 * 8 + 1024
    assert smem(128, 1) == 5 * (a + a) + 2 * a + 2 * 5 * 8 + 1024
    assert smem(64, 2) == 4 * 2 * (a + a // 2) + a + 2 * 4 * 8 + 1024
    assert all(smem(*shape) <= 227 << 10 for shape in matmul_wgmma.STAGES)
    assert one_tile.ONE_TILE_SMEM == 2 * 64 * 64 * 2 + 1024
    assert 4 * 4 * 64 * 64 <= matmul_mma.MMA_SMEM - 1024     # four warps stage 64 x 64 float32 sums


@pytest.mark.parametrize("columns, panels", matmul_wgmma.STAGES)
@pytest.mark.parametrize("epilogue", [STORE, ADD])
def test_the_parts_of_shared_memory_do_not_overlap(epilogue, columns, panels):
    """The kernel for wgmma has some stages, two stagings, and two barriers of 8 bytes per stage.
    Their addresses are computed as in the kernel."""
    kernel, stages = (matmul_wgmma.wgmma_kernel(0, 0, epilogue, False, False, columns, panels),
                      matmul_wgmma.STAGES[columns, panels])
    tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.py_func)))
    env = {**kernel.py_func.__globals__, **constants(kernel), "u32": int, "dynamic_smem": lambda: 0}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and {*stored(node)} <= {"start", "staging", "full",
                                                                "empty"}:
            exec(compile(ast.Module([node], []), "kernel", "exec"), env)
    barrier_of = as_python(pipeline.pipeline_of(stages).barrier)
    parts = [(stage * int(env["STAGE_BYTES"]), panels * (128 * 64 * 2 + columns * 64 * 2))
             for stage in range(stages)]
    parts += [(env["staging"] + half * int(env["STAGING_BYTES"]), 64 * columns * 2)
              for half in (0, 1)]
    parts += [(int(barrier_of(kind, stage)), 8) for kind in (env["full"], env["empty"])
              for stage in range(stages)]
    end = 0
    for start, size in sorted(parts):
        assert start >= end
        end = start + size
    assert end + ptx.ALIGNMENT <= matmul_wgmma.wgmma_smem(columns, panels)


@pytest.mark.parametrize("columns, panels", matmul_wgmma.STAGES)
@pytest.mark.parametrize("a_mn, b_mn", [*itertools.product((0, 1), (0, 1))])
def test_a_barrier_expects_the_bytes_of_its_boxes(a_mn, b_mn, columns, panels):
    """A box has 64 columns of bfloat16, and BK or all rows of the tile."""
    if panels == 2 and (a_mn or b_mn):
        return                               # such slices have one panel
    load, found = matmul_wgmma.slice_loader(a_mn, b_mn, False, columns, panels), []
    known = constants(load)
    a_box, b_box = (64 if mn else rows for mn, rows in ((a_mn, 128), (b_mn, columns)))
    rows = known["a_loads"] * a_box + known["b_loads"] * b_box
    assert rows * 64 * 2 == known["STAGE_BYTES"]
    as_python(load, global_address=lambda x: x, mbarrier_expect=lambda *args: None,
              load_box=lambda *args: found.append(args))(0, "A", "B", 0, 1000, 2000, 300, None)
    at = 0                                   # boxes follow each other in memory
    for to, operand, column, row, *_ in found:
        assert to == at
        at += 2 * 64 * (a_box if operand == "A" else b_box)
        mn, along_mn = (a_mn, 1000) if operand == "A" else (b_mn, 2000)
        assert row == (300 if mn else along_mn) and (column - (along_mn if mn else 300)) % 64 == 0
    assert at == known["STAGE_BYTES"] and len({call[1:4] for call in found}) == len(found)


def test_the_ring_visits_each_stage_in_turn():
    ring = pipeline.pipeline_of(3)
    step, stage, parity, seen = as_python(ring.advance), 0, 0, []
    for _ in range(9):
        seen.append((int(stage), int(parity)))
        stage, parity = step(stage, parity)
    assert seen == [(k % 3, k // 3 % 2) for k in range(9)] == [
        (as_python(ring.stage_of)(k), as_python(ring.parity_of)(k)) for k in range(9)]


@pytest.mark.parametrize("tiles_, slices, blocks", [(96, 512, 132), (1, 7, 132), (5, 1, 46)])
def test_splits_are_some_and_at_most_the_slices(tiles_, slices, blocks):
    n = scheduler.best_splits(tiles_, slices, scheduler.WGMMA_TURN_TIME, blocks)
    assert 1 <= n <= slices
    if (tiles_, slices, blocks) == (96, 512, 132):       # the docstring's example
        assert n == 4


@pytest.mark.parametrize("M, N, K, count, columns", [
    (512, 768, 2048, 1, 64), (512, 1280, 768, 1, 64),    # a prompt of 512 in base
    (512, 4096, 1024, 1, 128), (512, 6144, 1024, 1, 256),        # and in the shape of Qwen3 0.6B
    (32768, 1280, 768, 1, 256), (32768, 4096, 768, 1, 256), (16384, 768, 768, 1, 256)])
def test_a_product_with_few_tiles_has_narrow_ones(M, N, K, count, columns):
    assert scheduler.tile_columns(M, N, K, count, 132) == columns


@pytest.mark.parametrize("columns, panels", matmul_wgmma.STAGES)
@pytest.mark.parametrize("M, N", [(512, 768), (130, 200), (128, 64), (1, 8)])
def test_tiles_of_each_width_cover_the_output_once(M, N, columns, panels):
    product = scheduler.scheduler_of(False, False, columns, 64 * panels)
    tiles_ = int(as_python(product.tiles_in)(M, N))
    locate = as_python(product.locate, tile_at=as_python(scheduler.tile_at))
    seen = np.zeros((M, N), int)
    for piece in range(tiles_):
        _, m, n, first, end = map(int, locate(piece, tiles_, M, N, 72, 1))
        assert m < M and n < N and (first, end) == (0, 3 - panels)
        seen[m:m + 128, n:n + columns] += 1
    assert (seen == 1).all() and tiles_ == scheduler.tiles_of(M, N, False, columns)
