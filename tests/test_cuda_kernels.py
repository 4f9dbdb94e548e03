"""Every kernel of the GPU program, compiled and assembled for four architectures without a GPU."""
import functools
import hashlib
import importlib.metadata
import itertools
import math
import re
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from dry_gpu import (BASE, BIASED, Launch, LARGE, LLAMA, ONE, constants, dry_run, everything,
                     everything_of_a_rank, everything_of_an_adapter, lowest_rungs, wide_norms)
from helpers import ROOT, needs, slow
from numba import cuda, types
from numba.cuda import compiler

import nanoeuler_cuda as nc
from nanoeuler_parts.decode.attend import heads_per_block, MERGE_FROM
from nanoeuler_parts.decode.products import GROUP, row_product, SLICE, TURNS_AT_ONCE
from nanoeuler_parts.gpu import launches
from oracles.epilogues import Gated


# ---- compiling and assembling
# compute capability, and KB of shared memory a block may have
ARCHS = {"sm_80": ((8, 0), 163), "sm_89": ((8, 9), 99), "sm_90a": ((9, 0, "a"), 227),
         "sm_120": ((12, 0), 99)}
# kernels with float64 arguments: why
DOUBLE = {
    "cross_entropy_kernel_fused": "weight of the loss: 1 / count of all targets of a step",
    "adamw_kernel_update": "hyperparameters, once a thread: 1 - beta2 in float32 has three digits",
    "sum_rows_kernel": "sums of losses", "square_sums_kernel": "sums of squares",
    "nesterov_kernel_nesterov": "hyperparameters, and the sum of squares of a matrix",
    "scale_kernel": "alpha / r of an adapter, which becomes float32 first",
    "normalize_kernel_normalize": "the same sum", "muon_kernel_step": "hyperparameters",
    "choose_kernel_choose": "probabilities, as nanoeuler.sample has them"}
# those of them that may make a float64 of a float32, because they sum
WIDENS = {"sum_rows_kernel", "square_sums_kernel", "nesterov_kernel_nesterov",
          "choose_kernel_choose"}

# bytes of stack by head size: attention on mma.sync wants more than 255 registers
SPILLS = {128: 512}
# the same of the product of many rows, 128 registers a thread, where the addresses of W's rows take
# two each: Hopper's copy engine brings W to shared memory instead
SPILLS_OF_ROWS = {"product_kernels_gate_up": 16, "product_kernels_logits": 24,
                  "add_product_kernel_add_product": 8}
# and on Hopper, where one kernel has up to six numbers too many
SPILLS_ON_HOPPER = {"add_product_kernel_add_product": 24}
# and by the compiler of sm_100 and newer: the choice of a token has 64 registers a thread, because
# its blocks have 1,024 threads
SPILLS_ON_BLACKWELL = {"choose_kernel_choose": 16}
# and of the gradient of the norms of heads, which has 80 registers, so that three of its blocks
# share a multiprocessor: they suffice on Hopper, and elsewhere two numbers stay in memory
SPILLS_OF_NORMS = {"head_norm_kernels_backward": 8}
# and of a product whose epilogue reads a matrix, once a tile: all loads are under way together
SPILLS_OF_EPILOGUE = 192
# bytes of arrays that another compiler, that of sm_100 and newer, leaves in memory: 32 numbers that
# were in the output of dW, once a tile, and 64 sums of a portable product.  A product of rows has
# up to 32 sums there, and what is split
STACK = {("mma_kernel_kernel", "sm_120"): 128, ("matmul_kernel", "sm_120"): 256,
         **{(name, "sm_120"): 320 for name in (
             *(f"product_kernels_{name}" for name in ("qkv", "proj", "gate_up", "logits")),
             "add_product_kernel_add_product", "merge_kernel_merge")}}

# atomic operations of kernels whose blocks claim pieces of work: no number depends on them
CLAIMS = {"mma_kernel_kernel": 1}

# What compiler and assembler say of a kernel: of its PTX, the first line of each kind and how many
Built = namedtuple("Built", "registers static stack stores loads float64 widened atomic")


@functools.cache
def library(kernel, kinds):
    """A kernel before its architecture is chosen; most of the work is done by then."""
    o = {k: v for k, v in kernel.targetoptions.items() if k in ("fastmath", "launch_bounds")}
    return compiler._compile_pyfunc_with_fixup(kernel.py_func, types.void(*kinds), device=False,
                                               abi="numba", cc=(8, 0), **o)[0]


@functools.cache
def ptx(kernel, kinds):
    """Its instructions, to be read: which they are does not depend on the architecture."""
    [text] = library(kernel, kinds).get_asm_strs(cc=(9, 0, "a"))
    return text


def instructions(kernel, kinds, pattern):
    """(the first line of PTX with such an instruction, the number of them)"""
    found = [line.strip() for line in re.findall(pattern, ptx(kernel, kinds), re.M)]
    return [found[0] if found else "", len(found)]


def build(kernel, kinds, arch):
    """Built, linked as a launch links it: as a whole program.  (As a part of one, its tensor core
    instructions would wait for each other: C7509.)"""
    core, (cc, _) = needs("cuda.core"), ARCHS[arch]
    code = core.ObjectCode.from_ltoir(library(kernel, kinds).get_ltoir(cc=cc))
    linker = core.Linker(code, options=core.LinkerOptions(
        arch=arch, link_time_optimization=True, ptxas_options=["-v"], verbose=True))
    linker.link("cubin")
    log = linker.get_info_log()
    assert "C75" not in log, log             # wgmma, one by one
    [registers] = re.findall(r"Used (\d+) registers", log)
    [frame] = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, "
                         r"(\d+) bytes spill load", log)
    static = sum(int(n) for n in re.findall(r"(\d+) bytes smem", log))
    return Built(int(registers), static, *map(int, frame),
                 float64=instructions(kernel, kinds, r"^\s+\S*\.f64\b.*$"),
                 widened=instructions(kernel, kinds, r"^\s+cvt\S*\.f64\.f32\b.*$"),
                 atomic=instructions(kernel, kinds, r"^\s+(?:@\S+ )?(?:atom|red)\..*$"))


def holds(kinds, scalar):
    return any(getattr(t, "dtype", t) == scalar for t in kinds)


def stray_doubles(built, name, kinds):
    """Float64 instructions that a kernel of these argument types should not have: the first of
    them, and their number."""
    if not holds(kinds, types.float64):
        return built.float64
    if not any(isinstance(t, types.Array) and t.dtype == types.float32 for t in kinds):
        return ["", 0]                       # float64 throughout
    if name not in DOUBLE:
        return [f"an argument is float64: {kinds}", 1]
    return ["", 0] if name in WIDENS else built.widened


def complaints(x, arch, built=None):
    """What is wrong with the kernel of a launch on an architecture."""
    built, (_, limit) = built or build(x.kernel, x.types, arch), ARCHS[arch]
    threads, D, out = math.prod(x.block), constants(x.kernel).get("D"), []
    line, n = stray_doubles(built, x.name, x.types)
    if n:
        out.append(f"{line} ({n} such)")
    spills = SPILLS.get(D, 0) if x.name.startswith("tensor_attention") else 0
    if arch != "sm_90a":
        spills = max(spills, SPILLS_OF_ROWS.get(x.name, 0), SPILLS_OF_NORMS.get(x.name, 0))
    else:
        spills = max(spills, SPILLS_ON_HOPPER.get(x.name, 0))
    if arch == "sm_120":
        spills = max(spills, SPILLS_ON_BLACKWELL.get(x.name, 0))
    spills = max(spills, SPILLS_OF_EPILOGUE * constants(x.kernel).get("changes", False))
    stack = max(spills, STACK.get((x.name, arch), 0))
    if not holds(x.types, types.float64) or x.name in DOUBLE:
        if built.stack > stack or (built.stores or built.loads) and not spills:
            out.append(f"{built}")
    if built.registers > 255 or -(-built.registers // 8) * 8 * threads > 65536:
        out.append(f"{built.registers} registers for {threads} threads")
    if built.static > 48 << 10 or built.static + x.smem > limit << 10:
        out.append(f"{built.static} + {x.smem} bytes of shared memory, {limit} KB are allowed")
    if built.atomic[1] > CLAIMS.get(x.name, 0):
        out.append("an atomic operation")
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
        wide_norms(LARGE.n_embd, dtype)      # a row in registers; of xl 104 bytes are not
        everything_of_a_rank(ONE, 2, 128, dtype)
        everything_of_an_adapter(ONE, 2, 128, dtype)
        everything(LLAMA, 2, 128, dtype)
        everything(BIASED, 2, 128, dtype)
        if dtype == "bf16":                  # heads of 128 are another kernel
            everything(replace(ONE, head_dim=128), 1, 128, dtype)
            everything(replace(LLAMA, head_dim=64), 2, 128, dtype)       # a window on wgmma
            for heads in (5, 7):             # that share a head of keys
                everything(replace(ONE, n_head=heads, n_kv_head=1, head_dim=64), 1, 128, dtype)
        lowest_rungs(dtype)
    out = {}
    for x in device.launches:
        key = x.kernel, x.types if layouts else tuple(getattr(t, "dtype", t) for t in x.types)
        out[key] = max(out.get(key, x), x, key=lambda y: (math.prod(y.block), y.smem))
    return list(out.values())


def widest(launches):
    """Of the products of a few rows, which are compiled for each shape, those of the widest model:
    they need the most registers.  Of all other kernels each."""
    found = {}
    for x in launches:
        key, size = (x.kernel, x.types), []
        if x.name.startswith(("product_kernels_", "add_product_kernel_", "merge_kernel_")):
            known = constants(x.kernel)
            size = [known.get(name, 0) for name in ("N", "C", "HD", "K", "F")]
            key = x.name, known.get("X_ROWS")
        found[key] = max(found.get(key, (size, x)), (size, x), key=lambda pair: pair[0])
    return [x for _, x in found.values()]


# All that what is built depends on: the kernels, the launches, the compiler, and this file.
SOURCES = (*(str(Path(file).relative_to(ROOT)) for file in launches.DEVICE_CODE),
           "tests/oracles/naive_attention.py", "tests/dry_gpu.py", "tests/test_cuda_kernels.py")
COMPILERS = ("numba", "numba-cuda", "llvmlite", "cuda-core", "nvidia-nvvm", "nvidia-nvjitlink")


def without_comments(text):
    """Lines of a program, in bytes.  Comments may change, and nothing is built anew."""
    return re.sub(rb"\s+#\s.*$", b"", re.sub(rb"(?m)^ *#.*\n", b"", text), flags=re.M)


def fingerprint(root=ROOT):
    versions = [importlib.metadata.version(name) for name in COMPILERS]
    texts = [without_comments((root / name).read_bytes()) for name in SOURCES]
    return hashlib.sha256(b"\0".join([repr(versions).encode(), *texts])).hexdigest()


def found_before(config, key, make, of):
    """make(), of lists, dicts, texts and numbers; or what it was before, where pytest keeps a cache
    and `of` is the same.  To compile and assemble takes minutes, to judge what came of it nothing.
    """
    cache = getattr(config, "cache", None)   # None with -p no:cacheprovider
    kept = {} if cache is None else cache.get(f"nanoeuler/{key}", {})
    if kept.get("of") != of:
        kept = {"of": of, "found": make()}
        if cache is not None:
            cache.set(f"nanoeuler/{key}", kept)
    return kept["found"]


def built_before(config, key, make, of):
    """The same of a list of Built"""
    return [Built(*built) for built in found_before(config, key, make, of)]


# The types that train, where shared memory is smallest, and on Hopper
PATHS = ("bf16", "sm_89"), ("bf16", "sm_90a"), ("f32", "sm_89")
ALL = [(dtype, arch) for dtype in ("f32", "bf16") for arch in ARCHS
       if (dtype, arch) != ("f32", "sm_120")] + [("f64", "sm_89")]


def launches_of(dtype, arch):
    capability = (9, 0) if arch == "sm_90a" else (8, 9)
    return distinct(dtype, capability, layouts=(dtype, arch) == ("f32", "sm_80"))


def once():
    """[(launch, architecture)] of each kernel once: of several types and shapes the widest, on the
    first of PATHS that has the kernel"""
    found = {}
    for dtype, arch in PATHS:
        named = {}
        for x in widest(launches_of(dtype, arch)):
            named.setdefault(x.name, []).append(x)
        for name, same in named.items():
            size = lambda x: (constants(x.kernel).get("D", 0), math.prod(x.block), x.smem)
            found.setdefault(name, (max(same, key=size), arch))
    return list(found.values())


def complaints_of(launches, config, key):
    """What is wrong with each of [(launch, architecture)]"""
    found = built_before(config, key, lambda: [
        build(x.kernel, x.types, arch) for x, arch in launches], fingerprint())
    return [complaints(x, arch, built) for (x, arch), built in zip(launches, found, strict=True)]


@pytest.mark.timeout(3000)                   # a minute, where the machine does nothing else
def test_each_kernel_assembles_and_fits(request):
    launches = once()
    assert {x.name for x, _ in launches} == {
        x.name for path in PATHS for x in launches_of(*path)}
    assert complaints_of(launches, request.config, "once") == [[]] * len(launches)
    assert len(launches) > 40 and {arch for _, arch in launches} == {arch for _, arch in PATHS}


@pytest.mark.slow
@pytest.mark.timeout(3000)                   # a minute each
@pytest.mark.parametrize("dtype, arch", ALL)
def test_kernels_assemble_and_fit(dtype, arch, request):
    """In all types and shapes, for all architectures"""
    launches = [(x, arch) for x in launches_of(dtype, arch)]
    said = complaints_of(launches, request.config, f"{dtype}-{arch}")
    assert said == [[]] * len(launches) and len(launches) > 20


class Kept(dict):
    """As much of pytest's cache as built_before asks for."""
    cache = property(lambda self: self)
    set = dict.__setitem__


def test_what_was_built_is_kept_as_long_as_nothing_changes(tmp_path):
    config, made = Kept(), []

    def make():
        made.append(1)
        return [Built(40, 0, 0, 0, 0, ["", 0], ["", 0], ["", 0])]

    for of, times in (("one", 1), ("one", 1), ("two", 2), ("one", 3)):
        [built] = built_before(config, "f32-sm_80", make, of)
        assert built.registers == 40 and len(made) == times
    built_before(config, "f32-sm_89", make, "one")
    built_before(SimpleNamespace(), "f32-sm_89", make, "one")        # there is no cache
    assert len(made) == 5
    for name in SOURCES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    assert fingerprint(tmp_path) == fingerprint()
    assert without_comments(b"a = 1    # why\n    # where\nb = '#c'\n") == b"a = 1\nb = '#c'\n"
    for name in SOURCES:
        text = (ROOT / name).read_bytes()
        for more, same in ((b"# a comment\n", True), (b"x = 1", False)):
            (tmp_path / name).write_bytes(text + more)
            assert (fingerprint(tmp_path) == fingerprint()) == same
        (tmp_path / name).write_bytes(text)


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


@pytest.mark.parametrize("path, capability, archs", [
    ("mma", (8, 9), [*ARCHS]), ("wgmma", (9, 0), ["sm_90a"])])
@pytest.mark.timeout(600)
def test_a_new_epilogue_compiles_for_all_architectures(path, capability, archs):
    """One class of a test file, and no other definition of the package changes."""
    with dry_run() as device:
        device.gpu.compute_capability = capability
        out, a, b, x = (nc.new(shape, np.uint16)
                        for shape in ((136, 72), (136, 64), (72, 64), (136, 72)))
        nc.make_ops(path).product(out, a, b, epilogue=Gated(2.0), x=x)
        [x] = device.launches
    assert x.name == f"{path}_kernel_kernel"
    assert [complaints(x, arch) for arch in archs] == [[]] * len(archs)


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


def test_many_registers_in_a_large_block_are_caught(request):
    [x] = [x for x in distinct("f32") if x.name == "portable_attention_backward_run"][:1]
    [built] = built_before(request.config, "registers", lambda: [
        build(x.kernel, x.types, "sm_89")], fingerprint())
    assert complaints(x, "sm_89", built) == []
    assert "registers" in complaints(x._replace(block=(32, 32, 1)), "sm_89", built)[0]


def test_the_driver_is_asked_between_launches(monkeypatch):
    """numba-cuda forbids it within a callback: the launch is left, and made anew, once."""
    asked, launched = [], []

    class Config:
        griddim, sharedmem, within, pre_launch_callbacks = (1, 1, 1), 50 << 10, False, []

        def __call__(self, *args):
            self.within = True
            try:
                for callback in self.pre_launch_callbacks:
                    callback("compiled", self)
                launched.append(args)
            finally:
                self.within = False

    config = Config()
    for name, word in ("allow_shared", "shared"), ("need_resident", "resident"):
        monkeypatch.setattr(launches, name, lambda *of, word=word: asked.append(
            (word, config.within)))
    kernel = {(1, 32, nc.gpu.stream, 50 << 10): config}
    for resident in False, True, True:
        nc.launch(kernel, 7, grid=1, block=32, smem=50 << 10, resident=resident)
    assert launched == [(7,)] * 3 and asked == [("shared", False), ("resident", False)]


# ---- rows
@functools.cache
def rows_launches(preset, *counts):
    """One launch of each kernel of a decoder's steps of so many rows, on Hopper, by name"""
    with dry_run() as device:
        device.gpu.compute_capability = (9, 0)
        cfg = replace(nc.ne.PRESETS[preset], n_layer=1)
        flat = np.zeros(nc.ne.n_params(cfg), np.float32)
        decoder = nc.make_decoder(cfg, flat, "bf16")
        for n in counts:
            decoder.read([nc.ne.Part(0, [0] * n, n)])
    return {x.name: x for x in device.launches}


FEW, MANY, MOST = (MERGE_FROM, 1), (GROUP + 1,), (4 * GROUP,)


def test_parts_are_merged_alike_alone_and_among_many(request):
    """A row's bits are the same whether proj merges them or merge: in PTX, whose fma nothing takes
    apart or makes anew, both do the same with numbers, in one order; the rest of proj has none."""
    def numbers():
        found = rows_launches("base", *FEW)
        return [re.findall(r"^\s+((?:fma|mul|max|div|ex2)\S*f32) ", ptx(x.kernel, x.types), re.M)
                for x in (found["merge_kernel_merge"], found["product_kernels_proj"])]

    merge, proj = found_before(request.config, "merged", numbers, fingerprint())
    assert merge == proj and len(merge) > 50


@pytest.mark.parametrize("groups", [*TURNS_AT_ONCE])
def test_a_product_of_rows_takes_each_slice_once(groups):
    """Also where the turns are no multiple of those whose loads are under way at once, as in F of
    `large` and C of `xl`, and where rows of W come in pieces: what lies behind K is left."""
    uneven, in_pieces = 0, set()
    for K, tiles in itertools.product([8, 40, 264, 8200, *range(256, 16_384, 256)], (1, 2, 4)):
        multiply = row_product(K, tiles, groups, False, True, loops=True).multiply
        found = SimpleNamespace(**constants(multiply))
        taken = [(piece * found.TURNS + turn0 + i) * 8 + warp for piece in range(found.PIECES)
                 for turn0 in range(0, found.TURNS, found.TURNS_LOADED)
                 for i in range(found.TURNS_LOADED) for warp in range(8)]
        if not found.EXACT:
            taken = [at for at in taken if at < found.SLICES]
        assert sorted(taken) == list(range(-(-K // SLICE))), K
        assert found.TURNS_LOADED <= TURNS_AT_ONCE[groups]
        uneven += found.TURNS % found.TURNS_LOADED > 0
        in_pieces.add((found.PIECES > 1, found.PIECES > found.STAGES, found.EXACT))
    assert uneven > 2 or groups == 4         # of which a turn is all that is under way
    assert len(in_pieces) == 6               # one piece, several, more than stages; also uneven


@pytest.mark.parametrize("groups", [*TURNS_AT_ONCE])
def test_each_piece_of_w_is_requested_before_a_block_waits_for_it(groups):
    """Once, into a stage that has been read.  A piece that nobody requests would hang the GPU."""
    kinds = set()
    for K, tiles, normed, loops in itertools.product(
            [8, 2048, 2056, *range(4096, 32_768, 4096)], (1, 2, 4), (False, True), (False, True)):
        found = SimpleNamespace(**constants(row_product(K, tiles, groups, normed, True,
                                                        loops).multiply))
        for jobs in (1, 2, 7) if loops and found.STAGES > 1 else (1,):
            n = jobs * found.PIECES
            requested = [*range(min(found.STAGES, n))]
            for at in range(n):
                assert at in requested, (K, tiles, normed, loops, jobs)
                if found.REFILLS and at + found.STAGES < n:
                    requested.append(at + found.STAGES)
            assert requested == [*range(n)]
        assert found.PIECES == 1 or found.STAGES > 1
        kinds.add((found.PIECES > 1, found.PIECES > found.STAGES, loops))
    assert len(kinds) == 6


Wide = namedtuple("Wide", "shared memory copies ahead", defaults=(0, 0, 0, 0))


PATTERNS = (r"ld\.shared\S*\.v4\.\S+", r"ld\.global\S*\.v4\.\S+", r"cp\.async\.bulk\.shared",
            r"cp\.async\.bulk\.prefetch", r"ld\.local")


@pytest.mark.parametrize("counts", [FEW, slow(MANY), slow(MOST)], ids=["few", "many", "most"])
def test_rows_load_16_bytes_at_once(counts, request):
    """All that a thread loads in a loop: weights, x, gains, keys, values, parts of attention.  And
    what the copy engine is asked for."""
    C, F, HD = (-(-K // 256) for K in (BASE.n_embd, BASE.n_hidden, BASE.n_head * BASE.head_dim))
    heads = heads_per_block(BASE.n_head, BASE.n_kv_head)
    expected = {"qkv": Wide(4 * C, 2 * C, 2), "add_product": Wide(F, 2 * F, 1), "merge": Wide(0, 8),
                "proj": Wide(3 * HD, 8, 1), "attend": Wide(0, 8 + heads, ahead=2)}
    expected["gate_up"] = expected["logits"] = Wide(6 * C, 2 * C, 2)
    if counts != FEW:                        # twice the rows, and of down twice the tiles of W,
                                             # which come in pieces: three stages, and what follows
        turns = TURNS_AT_ONCE[2]     # of F at once
        expected.update(qkv=Wide(4 * C, 4 * C, 2), gate_up=Wide(6 * C, 4 * C, 2),
                        logits=Wide(6 * C, 4 * C, 2), add_product=Wide(2 * turns, 4 * turns, 4))
    if counts == MOST:                       # four times the rows, W once for two, a loop of turns
        expected.update(qkv=Wide(8, 8, 2), gate_up=Wide(12, 8, 2))
    if counts != FEW:
        del expected["proj"]

    def loads():
        launches, found = rows_launches("base", *counts), {}
        for name in expected:
            [x] = [x for made, x in launches.items() if made.endswith(f"kernel_{name}")
                   or made == f"product_kernels_{name}"]
            found[name] = [instructions(x.kernel, x.types, rf"^\s+{pattern}.*$")[1]
                           for pattern in PATTERNS]
        return found

    kind = request.node.callspec.id
    found = found_before(request.config, f"rows-{kind}", loads, fingerprint())
    assert {name: Wide(*of[:-1]) for name, of in found.items()} == expected
    assert not any(local for *_, local in found.values())
