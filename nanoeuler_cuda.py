"""NanoEuler on the GPU: the model of nanoeuler.py again, in CUDA kernels written in Numba.

Section numbers, the order of the ops and their names are those of nanoeuler.py, which is the
specification: bench/self_tests.py holds every kernel against the function of the same name there.
Data, checkpoints, training loops, chat (7 to 9, most of 10 and 12) are imported from it.

    python nanoeuler_cuda.py                  self-tests: every kernel against the CPU
    python nanoeuler_cuda.py g                the gradient of the whole model against the CPU
    python nanoeuler_cuda.py t                pretrain, write nanoeuler.bin;  tr goes on with it
    python nanoeuler_cuda.py i "It was"       one continuation
    python nanoeuler_cuda.py s                fine-tune on instructions, write nanoeuler_chat.bin
    python nanoeuler_cuda.py d                learn preferences, write nanoeuler_dpo.bin
    python nanoeuler_cuda.py c                chat with nanoeuler_chat.bin
    python nanoeuler_cuda.py doctor           what this machine has, and what it lacks

Contents
    1    Device: launches, graphs             4.5  Attention
    2    Memory: buffers, what a run needs    4.6  SwiGLU
    3    Building blocks: PTX, sums, tiles    4.7  Cross-entropy
    4.1  Matmul                               5    Model: forward, heads, backward
    4.2  Embedding                            6    Optimizer
    4.3  RMSNorm                              10   Inference
    4.4  RoPE                                 12   Command line

Shapes  As in nanoeuler.py: B batch, T time, C n_embd, H n_head, G n_kv_head, D head_dim,
        F n_hidden, V vocab_size, L n_layer, P n_mtp.  Here the batch is flat: BT = B * T rows,
        row b * T + t.
Types   Kernels take their dtype from their arguments: bfloat16 or float32 trains, float64 proves.
        bfloat16 is stored as uint16 and computed with in float32: ctype(x) is the type to compute
        in, value() what a stored number stands for, stored() a result rounded to the array's type,
        vector() loads and stores several at once.  Master weights, moments, gradients of weights
        and norms are float32 then.  A literal is made with ctype(x).type(0): a bare 0.0 is a
        float64 and drags a float32 kernel with it.
Order   Each number is summed in one order, by one thread or by blocks that take turns.  Two runs
        give the same bits.
"""
import argparse
import bisect
import functools
import gc
import importlib.util
import math
import operator
import sys
from collections import namedtuple
from dataclasses import dataclass, fields, make_dataclass
from types import SimpleNamespace

import numpy as np

import nanoeuler as ne
from data.commands import CHAT, FILE, RUN, TEXT, arg, bench, out, run_verb, setting
from data.kernels import save_compiled
from nanoeuler import UserError, from_bf16, need, to_bf16

PIP = 'pip install "numba-cuda[cu13]>=0.30,<0.31" "numpy>=2.1,<2.5"'

# The rest of the file cannot even be compiled without numba-cuda: say so, and not by a traceback.
try:
    need(importlib.util.find_spec("numba_cuda"), "numba-cuda is not installed")
    from cuda.bindings import driver
    from llvmlite import ir
    from numba import cuda, types
    from numba.core import cgutils
    from numba.cuda.core import caching
    from numba.cuda.np import arrayobj       # what a too new NumPy breaks first
    from numba.cuda.cudadrv.devicearray import DeviceNDArray
    from numba.cuda.cudadrv.driver import CudaAPIError
    from numba.cuda.extending import intrinsic
except Exception as e:                       # NumPy 2.5 with numba-cuda 0.30: an AttributeError
    reason = f"{type(e).__name__}: {e}; repair it with: {PIP}"
    if __name__ == "__main__":
        sys.exit(bench("doctor", "doctor")(problem=reason))
    raise ImportError(reason) from None

caching.IndexDataCacheFile.save = save_compiled
kernel = cuda.jit(cache=True)
inlined = cuda.jit(device=True, inline="always")

def made_once(make):
    """functools.cache for what makes kernels.  On disk Numba files a kernel under a hash of all it
    closes over, and a device function hashes differently in every process: such a kernel would
    never be found.  These are filed under the name and the arguments of what made them."""
    @functools.cache
    def maker(*args):
        made = make(*args)
        for i, k in enumerate(made if isinstance(made, tuple) else [made]):
            if hasattr(k, "py_func"):
                code = SimpleNamespace(co_code=repr((make.__name__, args, i)).encode())
                k._cache._py_func = SimpleNamespace(__code__=code, __closure__=None)
        return made
    return maker

# ==== 1 Device ====
stream = None                                # all work is queued here, in order

def gpu_problem():
    """Why no kernel can run on this machine, with the remedy, or "" if one can."""
    cuda.config.CUDA_LOW_OCCUPANCY_WARNINGS = 0          # small tests launch small grids
    remedy = ("The GPU modes need an NVIDIA GPU and its driver, version 580 or newer; the CPU "
              "program does the same: python nanoeuler.py --help")
    try:
        cuda.current_context()
        remedy = f"There is a GPU, but no kernel can be made for it; repair it with: {PIP}"
        square_sums_kernel[1, 256](*(cuda.device_array(1, np.float64) for _ in range(2)))
        return ""
    except Exception as e:                   # the driver's absence has many faces
        if "OUT_OF_MEMORY" in str(e):
            remedy = "Another program has the memory of the GPU; nvidia-smi says which."
        lines = [line.strip() for line in str(e).splitlines() if line.strip()] or [repr(e)]
        return f"{' '.join(lines[:2])} {remedy}"

def open_device():
    global stream
    if stream is None:
        if problem := gpu_problem():
            raise UserError(problem)
        stream = cuda.stream()

def allow_shared(compiled, config):
    """Before a launch with more than 48 KB of dynamic shared memory: the driver must allow it."""
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    handle = driver.CUkernel(int(compiled._codelibrary.get_cufunc().handle))
    device = driver.CUdevice(cuda.get_current_device().id)
    ok(driver.cuKernelSetAttribute(attribute, config.sharedmem, handle, device))

def ok(result):
    """The values of a driver call, without its error code, which must be zero."""
    error, *values = result
    if int(error):
        raise UserError(f"CUDA: {driver.cuGetErrorString(error)[1].decode()}")
    return values[0] if values else None

def launch(kernel, grid, block, *args, smem=0):
    config = kernel[grid, block, stream, smem]
    if smem > 48 << 10 and not config.pre_launch_callbacks:
        config.pre_launch_callbacks.append(allow_shared)
    config(*args)

class Graph:
    """The launches of a function, recorded once: replayed, a launch costs 1 us, and not 20.

    The first call runs it as it is, which compiles its kernels; the second records it.  All that
    changes between calls must lie in device memory: a graph remembers the values of scalars.  It
    does not keep the function: a model that nobody has frees its memory at once."""
    enabled = True

    def __init__(self):
        self.calls, self.graph = 0, None

    def __call__(self, function):
        self.calls += 1
        if self.calls == 1 or not Graph.enabled:
            return function()
        handle = driver.CUstream(int(stream.handle))
        if self.graph is None:
            mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
            gc.disable()                     # neither freeing memory nor destroying the graph of a
            try:                             # dead model is allowed in between
                ok(driver.cuStreamBeginCapture(handle, mode))
                with cuda.defer_cleanup():
                    function()
            finally:
                recorded = driver.cuStreamEndCapture(handle)
                gc.enable()
            self.recorded = ok(recorded)
            self.graph = ok(driver.cuGraphInstantiate(self.recorded, 0))
        ok(driver.cuGraphLaunch(self.graph, handle))

    def __del__(self):
        if self.graph is not None:
            driver.cuGraphExecDestroy(self.graph)
            driver.cuGraphDestroy(self.recorded)

def has(dtype):
    """bfloat16 came with capability 8.0."""
    return dtype != "bf16" or cuda.get_current_device().compute_capability >= (8, 0)

RUNGS = ("portable", "mma", "wgmma")          # ways to multiply bfloat16, each above the last
highest = "wgmma"                            # --matmul: none above this one

def rung():
    """The highest that this GPU has, and that is allowed."""
    capability = cuda.get_current_device().compute_capability
    top = "wgmma" if capability == (9, 0) else "mma" if capability >= (8, 0) else "portable"
    return min(top, highest, key=RUNGS.index)

# ==== 2 Memory ====
DTYPES = {"bf16": np.dtype(np.uint16), "f32": np.dtype(np.float32), "f64": np.dtype(np.float64)}
NAMES = {DTYPES["bf16"]: "bfloat16", DTYPES["f32"]: "float32", DTYPES["f64"]: "float64"}

def computing(dtype):
    """The type of sums, norms and master weights: float32 for bfloat16."""
    return np.dtype(np.float32) if dtype == np.uint16 else dtype

def new(shape, dtype):
    return cuda.device_array(shape, dtype, stream=stream)

def to_device(x, dtype=None):
    x = np.ascontiguousarray(x, dtype)
    out = cuda.to_device(x, stream=stream)
    stream.synchronize()                     # the driver may still read x until then
    return out

def to_host(x):
    """A copy, whole when this returns: all that was queued before is done."""
    out = x.copy_to_host(stream=stream)
    stream.synchronize()
    return out

def view(x, start, shape, strides=None):
    """Elements `start` and on of device array x as (shape); strides in elements.  No copy."""
    size = x.dtype.itemsize
    strides = strides or [math.prod(shape[i + 1:]) for i in range(len(shape))]
    return DeviceNDArray(shape, [s * size for s in strides], x.dtype, stream,
                         x.gpu_data.view(start * size))

def number(x, v):
    """A scalar argument of a kernel on x, of the type it computes in."""
    return np.float64(v) if x.dtype == np.float64 else np.float32(v)

def transposed(x):
    """(..., M, N) as (..., N, M); no copy."""
    swapped = lambda sizes: (*sizes[:-2], sizes[-1], sizes[-2])
    return view(x, 0, swapped(x.shape), swapped([s // x.dtype.itemsize for s in x.strides]))

def rows_a_chunk(cfg, BT, itemsize):
    """Rows of logits in memory at once, all heads together: at most 384 MB of them, and such that
    tiles of 128 x 256 of their product with lm_head, C wide, come in whole rounds."""
    rows = (384 << 20) // (cfg.n_mtp * cfg.vocab_size * itemsize)
    rounds = 128 * max(1, cuda.get_current_device().MULTIPROCESSOR_COUNT // -(-cfg.n_embd // 256))
    return min(BT, max(128, rows - rows % rounds if rows > rounds else rows))

def buffer_table(cfg, B, T, dtype):
    """(group, name, shape, dtype) of everything a training step keeps on the device.

    a: activations that the backward pass reads; x is the trajectory x[i + 1] = x[i] + f_i(x[i]),
    which advances in `state`, in the type of sums: a step is small beside x, and would be lost in
    the rounding of bfloat16.  y is first a block's normalized input, then its output: the backward
    pass makes the former again.
    d: gradients of activations.  Weights get theirs at once, so one layer's worth is enough."""
    C, F, V, L, P = cfg.n_embd, cfg.n_hidden, cfg.vocab_size, cfg.n_layer, cfg.n_mtp
    H, D, BT = cfg.n_head, cfg.head_dim, B * T
    HD, QKV, R = H * D, (H + 2 * cfg.n_kv_head) * D, rows_a_chunk(cfg, BT, dtype.itemsize)
    a = [("x", (2 * L + 1, BT, C)), ("qkv", (L, BT, QKV)), ("att", (L, BT, HD)),
         ("gate_up", (L, BT, 2 * F)), ("swiglu", (L, BT, F)), ("y", (BT, C)),
         ("logits", (R, P * V))]
    d = [("x", (BT, C)), ("norm", (BT, C)), ("qkv", (BT, QKV)), ("att", (BT, HD)),
         ("swiglu", (BT, F))]
    a32 = [("attn_rstd", (L, BT)), ("mlp_rstd", (L, BT)), ("final_rstd", (BT,)),
           ("state", (BT, C)), ("nll", (P, BT)), ("lse", (L, H, BT))]
    d32 = [("partial", (PARTS, C)), ("delta", (H, BT))]
    sums = computing(dtype)
    groups = (("a", a, dtype), ("a", a32, sums), ("d", d, dtype), ("d", d32, sums))
    return [(group, name, shape, kind) for group, table, kind in groups for name, shape in table]

def memory_table(cfg, B, T, dtype, buffers=buffer_table):
    """(what, bytes) on the device, B sequences of T tokens at a time."""
    n, size, sums = ne.n_params(cfg), computing(dtype).itemsize, {"a": 0, "d": 0, "logits": 0}
    for group, name, shape, kind in buffers(cfg, B, T, dtype):
        sums["logits" if name == "logits" else group] += math.prod(shape) * kind.itemsize
    return [("parameters", n * size), ("gradients", n * size), ("AdamW moments", 2 * n * size),
            ("bfloat16 copies", 2 * n * (dtype == np.uint16)), ("activations", sums["a"]),
            ("their gradients", sums["d"]), ("logits", sums["logits"]),
            ("tokens", 4 * B * T * (1 + cfg.n_mtp))]

# ==== 3 Building blocks ====
WARP, ALL = 32, 0xFFFFFFFF
f32, u16, u32, u64 = types.float32, types.uint16, types.uint32, types.uint64
LOG2E = 1 / math.log(2)

def asm(builder, result, text, constraints, values, volatile=True):
    """The PTX instruction `text`: $0 is its result if it has one, the values follow.  One that is
    not volatile only computes: it may be moved, or left out."""
    fnty = ir.FunctionType(result, [v.type for v in values])
    return builder.call(ir.InlineAsm(fnty, text, constraints, side_effect=volatile), values)

def asm_into(builder, pointers, text, constraints, values):
    """asm with as many results as pointers, of their types, which are stored there."""
    out = ir.LiteralStructType([p.type.pointee for p in pointers])
    out = asm(builder, out, text, constraints, values)
    for i, pointer in enumerate(pointers):
        builder.store(builder.extract_value(out, i), pointer)

@intrinsic
def exp2(typing, x):
    """2^x of the type of x.  float32: PTX ex2.approx, relative error 2^-22; float64: libdevice."""
    def codegen(context, builder, sig, args):
        t = args[0].type
        if t == ir.FloatType():
            return asm(builder, t, "ex2.approx.ftz.f32 $0, $1;", "=f,f", args, volatile=False)
        fn = cgutils.get_or_insert_function(builder.module, ir.FunctionType(t, [t]), "__nv_exp2")
        return builder.call(fn, args)
    return x(x), codegen

@inlined
def exp(x):
    """e^x of the type of x: in float32 two instructions, relative error 2^-22 + |x| 2^-24."""
    return exp2(x * ctype(x).type(LOG2E))

def memory(context, builder, kinds, args, n):
    """Where argument n, an array, begins."""
    return context.make_array(kinds[n])(context, builder, args[n]).data

def elements(context, builder, kinds, args, n, count, first=None):
    """Where `count` elements of argument n are, from the first on: registers of a local array."""
    start = memory(context, builder, kinds, args, n)
    start = builder.gep(start, [first]) if first else start
    return [builder.gep(start, [ir.IntType(32)(i)]) for i in range(count)]

# bfloat16 is stored as uint16, the upper half of a float32, and computed with in float32.
def widened(builder, bits):
    bits = builder.zext(bits, ir.IntType(32))
    return builder.bitcast(builder.shl(bits, bits.type(16)), ir.FloatType())

def rounded(builder, x):
    return asm(builder, ir.IntType(16), "cvt.rn.bf16.f32 $0, $1;", "=h,f", [x], volatile=False)

@intrinsic
def ctype(typing, x):
    """The type to compute in: float32 for bfloat16, else that of the array or number x.  Known when
    compiling."""
    of = getattr(x, "dtype", x)
    of = types.float32 if of == types.uint16 else of
    return types.DType(of)(x), lambda context, builder, sig, args: context.get_dummy_value()

@intrinsic
def value(typing, x):
    """What a stored number stands for."""
    if x != types.uint16:
        return x(x), lambda context, builder, sig, args: args[0]
    return types.float32(x), lambda context, builder, sig, args: widened(builder, args[0])

@intrinsic
def stored(typing, array, x):
    """x as `array` stores it; bfloat16 rounds to the nearest, ties to even."""
    if array.dtype != types.uint16:
        return array.dtype(array, array.dtype), lambda context, builder, sig, args: args[1]
    return (types.uint16(array, types.float32),
            lambda context, builder, sig, args: rounded(builder, args[1]))

@functools.cache
def vector(W):
    """Device functions load(x, i) -> v and store(x, i, v): W neighbours of the array x, from
    element i of its memory on, which start at a multiple of W, in as few accesses of 16 bytes as
    it takes.  v is a local array of type ctype(x)."""
    def neighbours(context, builder, kinds, args, n):
        """The place that arguments n and n + 1 mean, array and index, and its alignment."""
        dtype = kinds[n].dtype
        at = builder.gep(memory(context, builder, kinds, args, n), [args[n + 1]])
        whole = ir.VectorType(context.get_value_type(dtype), W).as_pointer()
        return builder.bitcast(at, whole), min(16, W * dtype.bitwidth // 8)

    @intrinsic
    def load_into(typing, out, x, i):
        def codegen(context, builder, sig, args):
            at, align = neighbours(context, builder, sig.args, args, 1)
            bits = builder.load(at, align=align)
            for j, to in enumerate(elements(context, builder, sig.args, args, 0, W)):
                v = builder.extract_element(bits, ir.IntType(32)(j))
                builder.store(widened(builder, v) if x.dtype == types.uint16 else v, to)
            return context.get_dummy_value()
        return types.void(out, x, types.intp), codegen

    @intrinsic
    def store(typing, x, i, v):
        def codegen(context, builder, sig, args):
            at, align = neighbours(context, builder, sig.args, args, 0)
            bits = ir.Constant(at.type.pointee, ir.Undefined)
            for j, source in enumerate(elements(context, builder, sig.args, args, 2, W)):
                y = builder.load(source)
                y = rounded(builder, y) if x.dtype == types.uint16 else y
                bits = builder.insert_element(bits, y, ir.IntType(32)(j))
            builder.store(bits, at, align=align)
            return context.get_dummy_value()
        return types.void(x, types.intp, v), codegen

    @inlined
    def load(x, i):
        out = cuda.local.array(W, ctype(x))
        load_into(out, x, i)
        return out
    return load, store

def width(*sizes):
    """8 elements at a time where all rows have whole eights, else one."""
    return 8 if all(n % 8 == 0 for n in sizes) else 1

def ptx(text, *operands, result=types.void):
    """The instruction `text` as a device function: $0 is its result if it has one, its operands
    follow.  Without a result, it writes to memory."""
    letters = {u32: "r", u64: "l", f32: "f"}
    constraints = ["=" + letters[result]] if result != types.void else []
    constraints += [letters[t] for t in operands] + ["~{memory}"] * (result == types.void)

    @intrinsic
    def instruction(typing, *args):          # one tuple of them comes to codegen
        def codegen(context, builder, sig, args):
            values, void = cgutils.unpack_tuple(builder, args[0]), result == types.void
            kind = ir.VoidType() if void else context.get_value_type(result)
            out = asm(builder, kind, text, ",".join(constraints), values)
            return context.get_dummy_value() if void else out
        return result(types.BaseTuple.from_types(operands)), codegen
    return instruction

quotient = ptx("div.u32 $0, $1, $2;", u32, u32, result=u32)      # Numba would make it 64 bits
# mbarrier: counts arrivals and bytes of a phase; waiting for a parity returns when it is over
mbarrier_init = ptx("mbarrier.init.shared::cta.b64 [$0], $1;", u32, u32)
mbarrier_expect = ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", u32, u32)
mbarrier_arrive = ptx("mbarrier.arrive.shared::cta.b64 _, [$0];", u32)
mbarrier_wait = ptx("{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; "
                    "@p bra DONE; bra AGAIN; DONE: }", u32, u32)
mbarrier_fence = ptx("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;")
# TMA: the copy engine moves a box of a matrix, given by its tensor map and the box's (column, row)
map_fence = ptx("fence.proxy.tensormap::generic.acquire.sys [$0], 128;", u64)     # see a fresh map
tma_load = ptx("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[$0], [$1, {$2, $3}], [$4];", u32, u64, u32, u32, u32)
tma_store = ptx("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [$0, {$1, $2}], [$3];",
                u64, u32, u32, u32)
tma_add = ptx("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group "
              "[$0, {$1, $2}], [$3];", u64, u32, u32, u32)           # the same, +=
tma_commit = ptx("cp.async.bulk.commit_group;")
tma_stored = ptx("cp.async.bulk.wait_group.read 0;")     # shared memory may be written again
tma_written = ptx("cp.async.bulk.wait_group 0;")         # it is in device memory
fence_async = ptx("fence.proxy.async.shared::cta;")      # before the copy engine reads our writes
fence_turn = ptx("fence.proxy.async.global;")            # before it adds to what others have added
warpgroup_barrier = ptx("bar.sync $0, 128;", u32)
keep_registers = ptx("setmaxnreg.inc.sync.aligned.u32 232;")
give_registers = ptx("setmaxnreg.dec.sync.aligned.u32 40;")
stmatrix = ptx("stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
               u32, u32, u32, u32, u32)

@intrinsic
def global_address(typing, array):
    def codegen(context, builder, sig, args):
        return builder.ptrtoint(memory(context, builder, sig.args, args, 0), ir.IntType(64))
    return u64(array), codegen

to_shared = ptx("{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }", u64, result=u32)

@inlined
def shared_address(array):
    return to_shared(global_address(array))

cp_async = ptx("cp.async.cg.shared.global.L2::128B [$0], [$1], 16;", u32, u64)      # 16 bytes
cp_async_4 = ptx("cp.async.ca.shared.global [$0], [$1], 4;", u32, u64)
cp_async_commit = ptx("cp.async.commit_group;")          # what was ordered so far is one group
cp_async_wait_all = ptx("cp.async.wait_all;")
cp_async_wait_one = ptx("cp.async.wait_group 1;")        # all groups but the youngest are there
cp_async_or_zero = ptx("cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;", u32, u64, u32)
store_pair = ptx("st.global.b32 [$0], $1;", u64, u32)    # two neighbours in bfloat16
pack_bf16 = ptx("cvt.rn.bf16x2.f32 $0, $2, $1;", f32, f32, result=u32)       # low, high
store_two = ptx("st.shared.v2.f32 [$0], {$1, $2};", u32, f32, f32)
# a number in device memory that blocks take turns by: who waits for it sees what was written before
# it was set
turn_set = ptx("st.release.gpu.global.u32 [$0], $1;", u64, u32)
turn_wait = ptx("{ .reg .pred p; .reg .u32 turn; AGAIN: ld.acquire.gpu.global.u32 turn, [$0]; "
                "setp.ne.u32 p, turn, $1; @p bra AGAIN; }", u64, u32)

def ldmatrix(transposed):
    """The device function that loads four 8 x 8 matrices of bfloat16, the rows of the i-th at the
    addresses of lanes 8 i to 8 i + 7, into out[j:j+4] of every lane.     PTX ldmatrix.x4"""
    @intrinsic
    def load(typing, out, j, row):
        def codegen(context, builder, sig, args):
            asm_into(builder, elements(context, builder, sig.args, args, 0, 4, args[1]),
                     f"ldmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 {{$0, $1, $2, $3}}, "
                     f"[$4];", "=r,=r,=r,=r,r,~{memory}", [args[2]])
            return context.get_dummy_value()
        return types.void(out, types.intp, u32), codegen
    return load

ldmatrix_rows, ldmatrix_columns = ldmatrix(""), ldmatrix(".trans")

@intrinsic
def mma(typing, acc, i, a, j, b, k):
    """acc[i:i+4] += A B of a warp: A (16, 16) in a[j:j+4], B (16, 8) in b[k:k+2], bfloat16 pairs.

    Lane l holds, of acc, columns 2 (l % 4), + 1 of row l / 4 and then of row l / 4 + 8; of A the
    same of columns 0-7, then of 8-15; of B rows 2 (l % 4), + 1 of column l / 4, then 8 further."""
    def codegen(context, builder, sig, args):
        at = lambda n, count: elements(context, builder, sig.args, args, n, count, args[n + 1])
        sums = at(0, 4)
        operands = at(2, 4) + at(4, 2) + sums
        asm_into(builder, sums,
                 "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, "
                 "{$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
                 "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [builder.load(p) for p in operands])
        return context.get_dummy_value()
    return types.void(acc, types.intp, a, types.intp, b, types.intp), codegen

@inlined
def swizzled(row, chunk):
    """Where columns 8 chunk to 8 chunk + 7 of a row are in a tile of bfloat16: columns of 64, in
    rows of 128 bytes, whose chunks of 16 turn by row: eight rows of a chunk hit all banks.  64 rows
    a column of 64; the copy engine's 128-byte swizzle."""
    return (chunk >> u32(3)) * u32(8192) + row * u32(128) + (
        (chunk & u32(7) ^ row & u32(7)) << u32(4))

@inlined
def descriptor(tile):
    """What wgmma is told of an operand at this address of shared memory, 64 columns of bfloat16 in
    rows of 128 bytes: 128-byte swizzle, 1,024 bytes between groups of 8 rows; where the rows run
    along M or N, 8,192 bytes between columns of 64.  From bit 62, 32, 16, 0; in units of 16."""
    return u64((1 << 62) | (64 << 32) | (512 << 16)) | u64(tile >> u32(4))

@functools.cache
def wgmma(N, a_kind, b_mn, count=1, adds=True):
    """The device function acc [+]= A B of a warpgroup, A (64, 64), B (64, N), bfloat16; acc: N / 2
    float32 in the registers of each thread.  `count` such products are in flight at once, acc holds
    one result after the other.     PTX wgmma.mma_async, sm_90a

    Arguments: acc, and for each product the descriptors of A and B in shared memory.  A step of 16
    along K is 32 bytes further in a tile whose rows run along K, 16 rows of 128 bytes in one whose
    rows run along M or N (b_mn; a_kind 1).  Where a_kind is "registers", A is one local array of 16
    numbers a product, laid out as `mma` has it, and then come the descriptors of B.  With adds
    "asked", a last argument, 0 or not, says whether to add."""
    n, total, given, strides = N // 2, N // 2 * count, a_kind == "registers", (2, 128)

    def codegen(context, builder, sig, args):
        at = elements(context, builder, sig.args, args, 0, total)
        values = cgutils.unpack_tuple(builder, args[1])
        if given:
            a = elements(context, builder, sig.args[1], values, 0, 16 * count)
            values = [*values[1:], *map(builder.load, a)]
        old = [builder.load(p) for p in at] if adds else []
        keep = f"${total + len(values) - 1}" if adds == "asked" else "0"
        text = (f"{{ .reg .u64 a, b; .reg .pred keep; setp.ne.u32 keep, {keep}, 0; "
                f"wgmma.fence.sync.aligned; ")
        for i in range(count):
            sums = ",".join(f"${n * i + j}" for j in range(n))
            b = total + (i if given else 2 * i + 1)
            for k in range(4):
                first = total + count + 16 * i + 4 * k
                left = "{" + ",".join(f"${first + j}" for j in range(4)) + "}" if given else "a"
                if not given:
                    text += f"add.u64 a, ${b - 1}, {strides[a_kind] * k}; "
                text += (f"add.u64 b, ${b}, {strides[b_mn] * k}; wgmma.mma_async.sync.aligned."
                         f"m64n{N}k16.f32.bf16.bf16 {{{sums}}}, {left}, b, "
                         f"{1 if adds is True or k else 'keep'}, 1, 1"
                         f"{'' if given else f', {a_kind}'}, {int(b_mn)}; ")
        text += "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }"
        kinds = ["l" if v.type == ir.IntType(64) else "r" for v in values]
        constraints = ["=f"] * total + kinds + [str(i) for i in range(len(old))] + ["~{memory}"]
        asm_into(builder, at, text, ",".join(constraints), [*values, *old])
        return context.get_dummy_value()

    @intrinsic
    def product(typing, acc, *operands):     # a tuple of them comes to codegen
        kinds = operands[:given] + (u64,) * (2 * count - given * count) + (u32,) * (adds == "asked")
        return types.void(acc, types.BaseTuple.from_types(kinds)), codegen
    return product

def butterfly(combine, steps):
    """The device function that combines x over 2^steps neighbouring lanes.  Every lane does it in
    the same order, so all have the same bits."""
    @inlined
    def over(x):
        for i in range(steps):
            x = combine(x, cuda.shfl_xor_sync(ALL, x, 1 << (steps - 1 - i)))
        return x
    return over

quad_sum, quad_max = butterfly(operator.add, 2), butterfly(max, 2)   # lanes of a row of `mma`
half_warp_sum, half_warp_max = butterfly(operator.add, 4), butterfly(max, 4)
warp_sum, warp_max = butterfly(operator.add, 5), butterfly(max, 5)

def over_block(combine, over_warp):
    """The same for a block of 256 threads."""
    @inlined
    def over(x):
        x, warps = over_warp(x), cuda.shared.array(8, ctype(x))
        cuda.syncthreads()                   # an earlier result may still be read
        if cuda.threadIdx.x % 32 == 0:
            warps[cuda.threadIdx.x // 32] = x
        cuda.syncthreads()
        return combine(combine(combine(warps[0], warps[1]), combine(warps[2], warps[3])),
                       combine(combine(warps[4], warps[5]), combine(warps[6], warps[7])))
    return over

block_sum, block_max = over_block(operator.add, warp_sum), over_block(max, warp_max)

@inlined
def filled(n, v):
    """n registers, a local array, each of them v."""
    out = cuda.local.array(n, ctype(v))
    for i in range(n):
        out[i] = v
    return out

@functools.cache
def register_tile(ROWS, COLS):
    """The device function acc += A B for the ROWS x COLS sums that a thread keeps in registers.

    A and B lie in shared memory: A[i, k] at a0 + i * a_row + k * a_k, B[k, j] at b0 + k * b_k +
    16 * j * b_col.  Threads x = 0..15 read neighbours of B, and all the same of A: no two lanes
    meet in a bank.  Every matrix product that is not a tensor core's goes through here."""
    @inlined
    def tile(acc, A, a0, a_row, a_k, B, b0, b_k, b_col, K):
        b = cuda.local.array(COLS, acc.dtype)
        for k in range(K):
            for j in range(COLS):
                b[j] = B[b0 + k * b_k + 16 * j * b_col]
            for i in range(ROWS):
                a = A[a0 + i * a_row + k * a_k]
                for j in range(COLS):
                    acc[i * COLS + j] += a * b[j]
    return tile

# ==== 4.1 Matmul ====
TILE, DEPTH, STRIDE = 128, 16, 132           # 132: a column's 16 numbers lie in 8 banks, not 1
SMEM = DEPTH * STRIDE
tile8x8 = register_tile(8, 8)

@kernel
def matmul_kernel(out, a, b, add):
    """out[z, h] = add * out[z, h] + a[z, h'] b[z, h'],  h' = h * H' / H: grouped heads share.

    One block of (16, 16) threads per 128 x 128 of out.   grid (N / 128, M / 128, Z * H)
    out (Z, H, M, N), a (Z, H', M, K), b (Z, H'', K, N) of any strides"""
    a_smem, b_smem = cuda.shared.array(SMEM, ctype(a)), cuda.shared.array(SMEM, ctype(a))
    zero, H = ctype(a).type(0), out.shape[1]
    z, h = cuda.blockIdx.z // H, cuda.blockIdx.z % H
    A, B = a[z, h * a.shape[1] // H], b[z, h * b.shape[1] // H]
    C = out[z, h]
    (M, N), K = C.shape, A.shape[1]
    m0, n0 = cuda.blockIdx.y * TILE, cuda.blockIdx.x * TILE
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    t = 16 * y + x
    # neighbouring threads read neighbours in memory, whichever way the operand lies
    outward, inward = (t % 128, t // 128, 0, 2), (t // 16, t % 16, 16, 0)
    am, ak, am_step, ak_step = inward if A.strides[1] == A.itemsize else outward
    bn, bk, bn_step, bk_step = inward if B.strides[0] == B.itemsize else outward
    a_next, b_next = cuda.local.array(8, ctype(a)), cuda.local.array(8, ctype(a))
    acc = filled(64, zero)
    for k0 in range(-DEPTH, K, DEPTH):       # the round before k0 = 0 only fetches
        if k0 >= 0:
            for i in range(8):
                a_smem[(ak + i * ak_step) * STRIDE + am + i * am_step] = a_next[i]
                b_smem[(bk + i * bk_step) * STRIDE + bn + i * bn_step] = b_next[i]
            cuda.syncthreads()               # the tiles are whole
        for i in range(8):                   # fetch the next ones: they arrive while we multiply
            k = k0 + DEPTH + ak + i * ak_step
            v = value(A[min(m0 + am + i * am_step, M - 1), min(k, K - 1)])
            a_next[i] = v if k < K else zero
            k = k0 + DEPTH + bk + i * bk_step
            v = value(B[min(k, K - 1), min(n0 + bn + i * bn_step, N - 1)])
            b_next[i] = v if k < K else zero
        if k0 >= 0:
            tile8x8(acc, a_smem, 8 * y, 1, STRIDE, b_smem, x, STRIDE, 1, DEPTH)
            cuda.syncthreads()               # nobody reads them any more
    for i in range(8):
        for j in range(8):
            m, n = m0 + 8 * y + i, n0 + x + 16 * j
            if m < M and n < N:
                v = acc[8 * i + j]
                if add:
                    v += value(C[m, n])
                C[m, n] = stored(C, v)

def batched_matmul(out, a, b, add=False):
    """out = [out +] a b for arrays (Z, H, M, N), (Z, H', M, K), (Z, H'', K, N), or matrices."""
    out, a, b = map(wide, (out, a, b))
    Z, H, M, N = out.shape
    launch(matmul_kernel, (-(-N // TILE), -(-M // TILE), Z * H), (16, 16), out, a, b, add)

def wide(x):
    """A matrix as (1, 1, M, N)."""
    strides = [s // x.dtype.itemsize for s in x.strides]
    return view(x, 0, (1, 1, *x.shape), (1 << 20, 1 << 20, *strides)) if x.ndim == 2 else x

# The same on tensor cores, bfloat16, three ways to lay out the operands: a_mn means that A is given
# as A^T (K, M), b_mn that B is given as (K, N), and not as B^T (N, K).  Tiles of the output are
# visited in bands of BAND rows of tiles, so that what neighbours read is still in L2.
BK, BAND = 64, 16                            # depth of a slice of A and B

@inlined
def tile_at(i, M, N, K, splits, BM, BN):
    """(row, column, first slice, last slice) of the i-th piece: all tiles, of the first part of K,
    then of the next."""
    down, across = u32((M + BM - 1) // BM), u32((N + BN - 1) // BN)
    part = quotient(i, down * across)
    t, slices = i - part * down * across, u32((K + BK - 1) // BK)
    band = quotient(t, u32(BAND) * across)
    t, high = t - band * u32(BAND) * across, min(down - band * u32(BAND), u32(BAND))
    column = quotient(t, high)
    return (band * u32(BAND) + t - column * high) * u32(BM), column * u32(BN), quotient(
        part * slices, splits), quotient((part + u32(1)) * slices, splits)

# Where an output of float32 has few tiles and K is long, several blocks share a tile: each takes a
# part of K and adds its product to the output when it is its turn, which keeps the order of the
# sums.  Nobody waits for a part that has not begun: blocks begin in the order of their numbers, as
# on every GPU so far, though CUDA does not promise it.
TURNS = 1 << 15                              # numbers, for tiles and the warpgroups of their blocks

# Rung 1, from sm_80 on: a block of four warps per 128 x 128 of the output, 64 x 64 a warp.  Copies
# of 16 bytes (cp.async) fill three buffers in turn; of the slice before, the next 16 k go into
# registers while `mma` works on the last 16.  Some 35 times the speed of the portable tile, 0.55 of
# cuBLAS's.  97 KB of shared memory: an RTX 40 allows a block 99.
MMA_TILE, MMA_STAGE = 128, 4 * 128 * BK
MMA_SMEM = 3 * MMA_STAGE + 1024

@made_once
def mma_kernel(a_mn, b_mn, single):
    """single: out is float32 and added to, and not bfloat16."""
    def operand(mn, load, row_bit, chunk_bit):
        """How A or B comes from memory to shared memory (begin, fetch), and to registers (first,
        read).  There, steps along the chunks of a row flip bits of the address, as the swizzle has
        it; 16 rows further it adds.  row_bit, chunk_bit: the bits of a lane's number that say
        whether it points ldmatrix to the second eight rows, to the second chunk."""
        across, rows = (16, 8) if mn else (8, 16)        # of 128 threads, a chunk of 8 numbers each

        @inlined
        def begin(source, mn0, k0):
            """Where this thread's part of the first slice begins: in memory, in a buffer."""
            row, chunk = u32(cuda.threadIdx.x) // u32(across), u32(cuda.threadIdx.x) % u32(across)
            r, c = (k0 + row, mn0 + chunk * u32(8)) if mn else (mn0 + row, k0 + chunk * u32(8))
            return (global_address(source) + u64(r) * u64(source.strides[0]) + u64(2) * u64(c),
                    swizzled(row, chunk), types.int32(r), types.int32(c))

        @inlined
        def fetch(to, source, place, r, c):
            """Orders 128 columns (mn) or rows of 64 k, zeros beyond the edge of the matrix.
            Returns where the next 64 begin."""
            left = types.int32(types.int32(source.shape[0]) - r if           # else 64 bits wide
                               c < types.int32(source.shape[1]) else 0)
            row = place
            for i in range(8):
                cp_async_or_zero(to + u32(128 * rows * i), row,
                                 u32(16) if rows * i < left else u32(0))
                row += u64(source.strides[0]) * u64(rows)
            if mn:
                return row, r + types.int32(BK), c
            return place + u64(2 * BK), r, c + types.int32(BK)

        @inlined
        def first(mn0):
            """Where a lane begins to read rows or columns mn0 and further of a tile."""
            lane = u32(cuda.threadIdx.x) & u32(31)
            row = (lane & u32(7)) + (lane >> u32(row_bit) & u32(1)) * u32(8)
            chunk = lane >> u32(chunk_bit) & u32(1)
            if mn:
                return swizzled(row, (mn0 >> u32(3)) + chunk)
            return swizzled(mn0 + row, chunk)

        @inlined
        def read(out, at, i, s):
            """16 of them, 16 i further, at k = 16 s to 16 s + 15, into out[4 * i:]"""
            across, down = (i, s) if mn else (s, i)
            load(out, 4 * i, (at ^ u32(32 * across)) + u32(2048 * down))
        return begin, fetch, first, read

    begin_a, fetch_a, first_a, read_a = operand(
        a_mn, *((ldmatrix_columns, 4, 3) if a_mn else (ldmatrix_rows, 3, 4)))
    begin_b, fetch_b, first_b, read_b = operand(
        b_mn, *((ldmatrix_columns, 3, 4) if b_mn else (ldmatrix_rows, 4, 3)))

    @inlined
    def read(a, b, a_at, b_at, s):
        """Rows and columns of the warp, 64 each, at k = 16 s to 16 s + 15, into registers"""
        for i in range(4):
            read_a(a, a_at, i, s)
        for i in range(4):
            read_b(b, b_at, i, s)

    @inlined
    def multiply(acc, a, b):
        """acc (64, 64) of the warp += A B"""
        for j in range(4):
            for i in range(4):
                mma(acc, 32 * i + 8 * j, a, 4 * i, b, 4 * j)
                mma(acc, 32 * i + 8 * j + 4, a, 4 * i, b, 4 * j + 2)

    (load4, store4), shift = vector(4), 2 if single else 1

    @inlined
    def staged(warp, row, chunk):
        """Where a warp's 64 x 64 sums keep 4 neighbours: chunks turn by row, in pairs."""
        return warp * u32(4096) + row * u32(64) + ((chunk ^ (row & u32(7)) << u32(1)) << u32(2))

    @inlined
    def finish(out, m0, n0, M, N, acc, warp, lane):
        """The warp's sums, through shared memory: neighbouring lanes write neighbours."""
        stage = cuda.shared.array(0, f32)
        place = shared_address(stage) + (lane & u32(1)) * u32(8)
        for i in range(8):
            for j in range(8):
                at = staged(warp, u32(8 * i) + lane // u32(4), u32(2 * j) + lane % u32(4) // u32(2))
                n = 32 * (i // 2) + 2 * (i % 2) + 4 * j
                store_two(place + u32(4) * at, acc[n], acc[n + 1])
        cuda.syncwarp()
        old = cuda.local.array(32, f32)
        row, chunk = lane // u32(16), lane % u32(16)
        r, c = types.intp(m0 + row), types.intp(n0 + chunk * u32(4))
        pitch, left = out.strides[0] >> shift, types.int32(M - r if c < N else 0)
        at, ahead, last = r * pitch + c, r * pitch + c, (M - 1) * pitch + N - 4
        for g in range(0, 64, 16):
            if single:                       # all loads first, and without an `if`: none waits
                for i in range(8):
                    few = load4(out, min(ahead, last))
                    ahead += 2 * pitch
                    for n in range(4):
                        old[4 * i + n] = few[n]
            for i in range(8):
                few = load4(stage, staged(warp, row + u32(g + 2 * i), chunk))
                if single:
                    for n in range(4):
                        few[n] += old[4 * i + n]
                if g + 2 * i < left:
                    store4(out, at, few)
                at += 2 * pitch

    @cuda.jit(cache=True, launch_bounds=(128, 2))
    def kernel(out, a, b, turns, M, N, K, splits):
        """out (M, N) = A B, or out += A B     one part of a tile a block"""
        smem = (shared_address(cuda.shared.array(0, types.uint16)) + u32(1023)) & u32(0xFFFFFC00)
        acc, i = filled(128, f32(0)), u32(cuda.blockIdx.x)
        m0, n0, begin, end = tile_at(i, M, N, K, u32(splits), MMA_TILE, MMA_TILE)
        thread = u32(cuda.threadIdx.x)
        lane, warp = thread & u32(31), thread >> u32(5)
        m, n = (warp & u32(1)) << u32(6), warp >> u32(1) << u32(6)
        a_from, a_to, a_row, a_col = begin_a(a, m0, begin * u32(BK))
        b_from, b_to, b_row, b_col = begin_b(b, n0, begin * u32(BK))
        a_to, b_to = smem + a_to, smem + u32(MMA_STAGE // 2) + b_to
        a_at, b_at = smem + first_a(m), smem + u32(MMA_STAGE // 2) + first_b(n)
        for s in range(2):
            ahead = u32(s * MMA_STAGE)
            a_from, a_row, a_col = fetch_a(a_to + ahead, a, a_from, a_row, a_col)
            b_from, b_row, b_col = fetch_b(b_to + ahead, b, b_from, b_row, b_col)
            cp_async_commit()
        at, ahead = u32(0), u32(2 * MMA_STAGE)
        a_now, b_now = cuda.local.array(16, u32), cuda.local.array(16, u32)
        a_next, b_next = cuda.local.array(16, u32), cuda.local.array(16, u32)
        cp_async_wait_one()
        cuda.syncthreads()                   # the first slice is there
        read(a_now, b_now, a_at, b_at, 0)
        for _ in range(types.int32(end - begin)):        # written out: copies and reads of what
            # comes next stand between products, and none of them waits
            read(a_next, b_next, a_at + at, b_at + at, 1)
            multiply(acc, a_now, b_now)
            a_from, a_row, a_col = fetch_a(a_to + ahead, a, a_from, a_row, a_col)
            read(a_now, b_now, a_at + at, b_at + at, 2)
            multiply(acc, a_next, b_next)
            b_from, b_row, b_col = fetch_b(b_to + ahead, b, b_from, b_row, b_col)
            cp_async_commit()
            read(a_next, b_next, a_at + at, b_at + at, 3)
            multiply(acc, a_now, b_now)
            ahead, at = at, at + u32(MMA_STAGE) if at < u32(2 * MMA_STAGE) else u32(0)
            cp_async_wait_one()              # all but the youngest slice is there
            cuda.syncthreads()               # and nobody reads the one before
            read(a_now, b_now, a_at + at, b_at + at, 0)
            multiply(acc, a_next, b_next)
        cp_async_wait_all()
        cuda.syncthreads()                   # no copy is under way, and nobody reads any more
        tiles = u32(cuda.gridDim.x) // u32(splits)
        part, mine = i // tiles, global_address(turns) + u64(4) * u64(i % tiles)
        if single and splits > 1:
            if thread == u32(0):
                turn_wait(mine, part)
            cuda.syncthreads()               # it is our turn
        finish(out, m0 + m, n0 + n, M, N, acc, warp, lane)
        if single and splits > 1:
            cuda.threadfence()
            cuda.syncthreads()               # all of it is written
            if thread == u32(0):
                turn_set(mine, part + u32(1) if part + u32(1) < u32(splits) else u32(0))
    return kernel

# Rung 2, sm_90 only: a block of three warpgroups stays on its multiprocessor and takes one 128 x
# 256 piece after another.  Warpgroup 0 only orders copies: slices of A and B flow through three
# buffers, `full` and `empty` barriers between it and the two others, each of which multiplies 64 of
# the 128 rows.  The copy engine moves whole boxes, and `wgmma` reads both operands from shared
# memory, once a warpgroup.
BM, BN = 128, 256
A_BYTES, STAGE = 2 * BM * BK, 2 * (BM + BN) * BK
OUT_BYTES = 2 * 64 * BN                      # what one warpgroup stores at once
WGMMA_SMEM = 3 * STAGE + 2 * OUT_BYTES + 16 * 3 + 1024               # 1,024: to align

@made_once
def wgmma_kernel(a_mn, b_mn, single):
    """single: out is float32 and added to, and not bfloat16."""
    multiply = wgmma(BN, int(a_mn), b_mn, adds="asked")
    a_loads, b_loads = (BM // 64 if a_mn else 1), (BN // 64 if b_mn else 1)
    rounds, box, send = (2, 32, tma_add) if single else (1, 64, tma_store)

    @inlined
    def finish(map_out, n, m, acc, place, group, turn, part, splits):
        """out = acc, or out += acc, 64 x 128 at a time, when the turn has come to this part.
        acc[4 j], acc[4 j + 1] are columns 8 j + 2 (lane % 4), + 1 of a thread's row, lane / 4, the
        next two those of row + 8."""
        thread = u32(cuda.threadIdx.x)
        lane, line = thread & u32(31), (thread >> u32(5) & u32(3)) * u32(16)
        leads = thread & u32(127) == u32(0)
        for half in range(rounds):
            if leads:
                tma_stored()                 # what was staged before has been read
            warpgroup_barrier(group)
            for j in range(16):
                if single:
                    at = place + swizzled(line + (lane >> u32(2)), u32(2 * j) + (
                        lane >> u32(1) & u32(1))) + (lane & u32(1)) * u32(8)
                    i = 64 * half + 4 * j
                    store_two(at, acc[i], acc[i + 1])
                    store_two(at + u32(1024), acc[i + 2], acc[i + 3])
                else:
                    at = place + swizzled(line + (lane & u32(15)), u32(2 * j) + (lane >> u32(4)))
                    i = 8 * j
                    stmatrix(at, pack_bf16(acc[i], acc[i + 1]), pack_bf16(acc[i + 2], acc[i + 3]),
                             pack_bf16(acc[i + 4], acc[i + 5]), pack_bf16(acc[i + 6], acc[i + 7]))
            fence_async()
            warpgroup_barrier(group)         # all 64 rows are there
            if leads:
                if single and splits > 1 and half == 0:
                    turn_wait(turn, part)
                    fence_turn()
                for j in range(4):
                    send(global_address(map_out), n + u32(128 * half + box * j), m,
                         place + u32(8192 * j))
                tma_commit()
        if single and splits > 1 and leads:
            tma_written()
            turn_set(turn, part + u32(1) if part + u32(1) < u32(splits) else u32(0))

    @cuda.jit(cache=True, launch_bounds=(384, 1))
    def kernel(map_a, map_b, map_out, turns, M, N, K, splits):
        """out (M, N) = A B, or out += A B"""
        smem = cuda.shared.array(0, types.uint16)
        start = (shared_address(smem) + u32(1023)) & u32(0xFFFFFC00)
        staging, full = start + u32(3 * STAGE), start + u32(3 * STAGE + 2 * OUT_BYTES)
        empty, thread = full + u32(8 * 3), u32(cuda.threadIdx.x)
        group, stage, phase = thread >> u32(7), u32(0), u32(0)
        if thread == u32(0):
            for i in range(3):
                mbarrier_init(full + u32(8 * i), u32(1))             # the producer, and its bytes
                mbarrier_init(empty + u32(8 * i), u32(8))            # each consuming warp
            mbarrier_fence()
        if thread & u32(127) == u32(0):
            map_fence(global_address(map_a))
            map_fence(global_address(map_b))
            map_fence(global_address(map_out))
        cuda.syncthreads()                   # the barriers exist
        tiles = u32((M + BM - 1) // BM * ((N + BN - 1) // BN))
        pieces = tiles * u32(splits)
        i = u32(cuda.blockIdx.x)
        if group == u32(0):
            give_registers()
            while i < pieces and thread == u32(0):
                m, n, first, last = tile_at(i, M, N, K, u32(splits), BM, BN)
                for s in range(first, last):
                    a, k = start + stage * u32(STAGE), u32(s) * u32(BK)
                    ready = full + u32(8) * stage
                    mbarrier_wait(empty + u32(8) * stage, phase ^ u32(1))
                    mbarrier_expect(ready, u32(STAGE))
                    for j in range(a_loads):
                        x, y = (m + u32(64 * j), k) if a_mn else (k, m)
                        tma_load(a + u32(8192 * j), global_address(map_a), x, y, ready)
                    for j in range(b_loads):
                        x, y = (n + u32(64 * j), k) if b_mn else (k, n)
                        tma_load(a + u32(A_BYTES + 8192 * j), global_address(map_b), x, y, ready)
                    stage += u32(1)
                    if stage == u32(3):
                        stage, phase = u32(0), phase ^ u32(1)
                i += u32(cuda.gridDim.x)
        else:
            keep_registers()
            acc = cuda.local.array(128, f32)
            mine = group - u32(1)
            row, place = u32(64) * mine, staging + mine * u32(OUT_BYTES)
            m, n, first, last = tile_at(i, M, N, K, u32(splits), BM, BN)
            while i < pieces:
                m += row
                after = m, n, first, last
                for s in range(first, last):
                    a, done = start + stage * u32(STAGE), empty + u32(8) * stage
                    mbarrier_wait(full + u32(8) * stage, phase)
                    multiply(acc, descriptor(a + row * u32(2 * BK)), descriptor(a + u32(A_BYTES)),
                             u32(s) - u32(first))
                    if thread & u32(31) == u32(0):
                        mbarrier_arrive(done)
                    stage += u32(1)
                    if stage == u32(3):
                        stage, phase = u32(0), phase ^ u32(1)
                    if u32(s) == first:      # while the other warpgroup multiplies
                        after = tile_at(i + u32(cuda.gridDim.x), M, N, K, u32(splits), BM, BN)
                turn = global_address(turns) + u64(4) * u64(u32(2) * (i % tiles) + mine)
                finish(map_out, n, m, acc, place, group, turn, i // tiles, splits)
                m, n, first, last = after
                i += u32(cuda.gridDim.x)
            if thread & u32(127) == u32(0):
                tma_stored()                 # before the block and its memory are gone
    return kernel

@functools.cache
def tensor_map(pointer, rows, columns, stride, box_rows, size=2):
    """128 bytes on the device that tell the copy engine about a matrix of bfloat16 or (size 4)
    float32: boxes of box_rows rows of 128 bytes, swizzled in shared memory, zeros beyond the edge.
    stride in bytes     cuTensorMapEncodeTiled"""
    d, long, short = driver, driver.cuuint64_t, driver.cuuint32_t
    kinds = d.CUtensorMapDataType
    encoded = ok(d.cuTensorMapEncodeTiled(
        kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if size == 2 else
        kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, pointer,
        [long(columns), long(rows)], [long(stride)], [short(128 // size), short(box_rows)],
        [short(1), short(1)], d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        d.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE))
    return to_device(np.array([int(x) for x in encoded.opaque], np.uint64))

def map_of(x, box_rows):
    return tensor_map(int(x.gpu_data.device_pointer), *x.shape, x.strides[0], box_rows,
                      x.dtype.itemsize)

def tensor_cores(*matrices):
    """Whether they take them: bfloat16, rows that are and start at multiples of 16 bytes."""
    return rung() != "portable" and all(
        x.dtype == np.uint16 and x.strides[0] % 16 == x.shape[1] % 8 == 0 and x.strides[1] == 2
        and int(x.gpu_data.device_pointer) % 16 == 0 for x in matrices)

def parts_of(tiles, slices, wait, blocks):
    """Into how many parts K is cut where there are few tiles: rounds of `blocks` pieces, measured
    in slices of K, of which storing takes about 4, and each part waits `wait` for its turn."""
    return min(range(1, 1 + slices), key=lambda s: (
        -(-tiles * s // blocks) * (slices / s + 4) + wait * s))

def tensor_matmul(out, a, b, a_mn, b_mn, turns=None):
    """out (M, N) = A B.  With `turns`, zeros, out is float32 and added to; where they are enough
    for its tiles, several blocks may share one."""
    (M, N), K, wide = out.shape, a.shape[0 if a_mn else 1], rung() == "wgmma"
    single, sizes = turns is not None, (M, N, K)
    rows, columns, wait = (BM, BN, 2) if wide else (MMA_TILE, MMA_TILE, 8)
    chip = cuda.get_current_device()         # rung 1: two blocks where shared memory is enough
    most = 1 if wide else min(2, chip.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR // (MMA_SMEM + 1024))
    blocks = chip.MULTIPROCESSOR_COUNT * most
    tiles = -(-M // rows) * -(-N // columns)
    shares = single and 2 * tiles <= turns.size          # a turn for each warpgroup of a tile
    splits = parts_of(tiles, -(-K // BK), wait, blocks) if shares else 1
    if wide:
        map_a = map_of(a, BK if a_mn else BM)            # and instead of turns that nobody reads
        launch(wgmma_kernel(a_mn, b_mn, single), min(tiles * splits, blocks), 384, map_a,
               map_of(b, BK if b_mn else BN), map_of(out, 64), turns if single else map_a, *sizes,
               splits, smem=WGMMA_SMEM)
    else:
        launch(mma_kernel(a_mn, b_mn, single), tiles * splits, 128, out, a, b,
               turns if single else out, *sizes, splits, smem=MMA_SMEM)

def matmul(out, x, w):
    """out = x w^T     out (M, N), x (M, K), w (N, K)"""
    if tensor_cores(out, x, w):
        return tensor_matmul(out, x, w, False, False)
    batched_matmul(out, x, transposed(w))

def matmul_dx(dx, dy, w, add=False):
    """dx = [dx +] dy w     dx (M, K), dy (M, N), w (N, K)"""
    if tensor_cores(dx, dy, w) and not add:
        return tensor_matmul(dx, dy, w, False, True)
    batched_matmul(dx, dy, w, add)

def matmul_dw(dw, dy, x, turns):
    """dw += dy^T x     dw (N, K), dy (M, N), x (M, K)     turns: zeros, before and after"""
    if tensor_cores(dy, x) and int(dw.gpu_data.device_pointer) % 16 == 0:
        return tensor_matmul(dw, dy, x, True, True, turns)
    batched_matmul(dw, transposed(dy), x, add=True)

# ==== 4.2 Embedding ====
@kernel
def embedding_forward_kernel(x, tokens, wte):
    """x[bt] = wte[tokens[bt]]     one block a row, threads stride the columns"""
    bt = cuda.blockIdx.x
    token = tokens[bt]
    for c in range(cuda.threadIdx.x, x.shape[1], cuda.blockDim.x):
        x[bt, c] = stored(x, value(wte[token, c]))

def embedding_forward(x, tokens, wte):
    launch(embedding_forward_kernel, x.shape[0], 128, x, tokens, wte)

@made_once
def embedding_backward_kernel(W, N):
    load, _ = vector(W)
    load_ids, _ = vector(N)

    @kernel
    def backward(dwte, dx, tokens):
        """dwte[v] += sum over bt with tokens[bt] = v of dx[bt], always in the same order

        One block of 8 warps per v and 32 W columns, W a lane.  Each warp looks through an eighth of
        the tokens, N a lane; ballots say where v stands; it adds those rows.  Then the warps' sums
        are added."""
        sums, acc = cuda.shared.array((8, 256), ctype(dx)), filled(W, ctype(dx).type(0))
        v, groups, C, found = cuda.blockIdx.x, tokens.size // N, dx.shape[1], 0
        lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        c = (32 * cuda.blockIdx.y + lane) * W
        first, last = warp * groups // 8, (warp + 1) * groups // 8
        for i in range(first, last, 32):
            ids = load_ids(tokens, min(i + lane, last - 1) * N)
            here = False
            for n in range(N):
                here |= ids[n] == v
            if cuda.any_sync(ALL, i + lane < last and here):
                for n in range(N):
                    hits = cuda.ballot_sync(ALL, i + lane < last and ids[n] == v) & ALL   # unsigned
                    while hits:
                        bt, found = (i + cuda.ffs(hits) - 1) * N + n, 1
                        hits &= hits - 1
                        row = load(dx, bt * C + min(c, C - W))
                        for j in range(W):
                            acc[j] += row[j]
        if cuda.syncthreads_or(found):
            for i in range(W):
                sums[warp, 32 * i + lane] = acc[i]
            cuda.syncthreads()               # the sums of all warps are there
            if cuda.threadIdx.x < 32 * W:
                x, c = cuda.threadIdx.x, (32 * cuda.blockIdx.y + lane) * W + cuda.threadIdx.x // 32
                s = sums[0, x]
                for i in range(1, 8):
                    s += sums[i, x]
                if c < C:
                    dwte[v, c] += s
    return backward

def embedding_backward(dwte, dx, tokens):
    (V, C) = dwte.shape
    W = width(C)
    backward = embedding_backward_kernel(W, 4 if tokens.size % 4 == 0 else 1)
    launch(backward, (V, -(-C // (32 * W))), 256, dwte, dx, tokens)

# ==== 4.3 RMSNorm ====
ROWS = 8                                     # warps of a block where a warp owns a row
PARTS = 528                                  # blocks, and partial sums, of a gain's gradient

@made_once
def rmsnorm_kernels(C, W):
    """A warp has a row of C in its registers: CHUNKS times W neighbours a lane.  Lanes beyond the
    row's end load its last W, and do not count them."""
    CHUNKS = -(-C // (WARP * W))
    KEPT = CHUNKS * W
    load, store = vector(W)

    @kernel
    def forward(y, kept, rstd, x, w, eps, add):
        """An Euler step, x += y, if asked for, and its norm:  rstd = 1 / sqrt(mean_c(x^2) + eps),
        y = x * rstd * w, in place of the step.  kept = x, as it is stored for backward.

        One warp per row.     grid BT / ROWS, block (32, ROWS)
        y, kept, x (BT, C), x in the type of sums, rstd (BT,), w (C,)"""
        v, ss, one = cuda.local.array(KEPT, ctype(x)), ctype(x).type(0), ctype(x).type(1)
        lane, bt = cuda.threadIdx.x, cuda.blockIdx.x * ROWS + cuda.threadIdx.y
        if bt < x.shape[0]:                  # for a whole warp or for none: shuffles are legal
            for j in range(CHUNKS):          # neighbours read neighbours: coalesced
                c = (WARP * j + lane) * W
                at = bt * C + min(c, C - W)
                few = load(x, at)
                if add:
                    step = load(y, at)
                    for i in range(W):
                        few[i] += step[i]
                    if c < C:
                        store(x, at, few)
                for i in range(W):
                    v[j * W + i] = few[i]
                    ss += few[i] * few[i] if c < C else ctype(x).type(0)
                if c < C:
                    store(kept, at, few)
            r = one / math.sqrt(warp_sum(ss) / ctype(x).type(C) + eps)
            for j in range(CHUNKS):
                c = (WARP * j + lane) * W
                few = load(w, min(c, C - W))
                for i in range(W):
                    few[i] = v[j * W + i] * few[i] * r
                if c < C:
                    store(y, bt * C + c, few)
            if lane == 0:
                rstd[bt] = r

    @kernel
    def backward(dx, dy, partial, x, w, rstd):
        """u = x * rstd:   dx += rstd * (w*dy - u * mean_c(w*dy*u)), in place: dx holds the gradient
        that passes the block by.   partial[i, c] = sum of dy * u over the rows of block i.
        In place as well: dy becomes y = w * u, what forward made.

        One warp per row, striding.     grid PARTS, block (32, warps), shared memory (warps, C)"""
        v, d = cuda.local.array(KEPT, ctype(x)), cuda.local.array(KEPT, ctype(x))
        old, gain = cuda.local.array(KEPT, ctype(x)), cuda.local.array(KEPT, ctype(x))
        zero, lane, warps, BT = ctype(x).type(0), cuda.threadIdx.x, cuda.blockDim.y, x.shape[0]
        sums = filled(KEPT, zero)
        for j in range(CHUNKS):
            c = (WARP * j + lane) * W
            few = load(w, min(c, C - W))
            for i in range(W):
                gain[j * W + i] = few[i] if c < C else zero
        first, last = cuda.blockIdx.x * BT // PARTS, (cuda.blockIdx.x + 1) * BT // PARTS
        for bt in range(first + cuda.threadIdx.y, last, warps):
            r, m = rstd[bt], zero
            for j in range(CHUNKS):
                at = bt * C + min((WARP * j + lane) * W, C - W)
                a, b, few = load(x, at), load(dy, at), load(dx, at)
                for i in range(W):
                    v[j * W + i], d[j * W + i], old[j * W + i] = a[i] * r, b[i], few[i]
                    m += gain[j * W + i] * b[i] * v[j * W + i]
            m = warp_sum(m) / ctype(x).type(C)
            for j in range(CHUNKS):
                for i in range(W):
                    u, g = v[j * W + i], gain[j * W + i]
                    sums[j * W + i] += d[j * W + i] * u
                    a[i], b[i] = old[j * W + i] + r * (g * d[j * W + i] - u * m), g * u
                c = (WARP * j + lane) * W
                if c < C:
                    store(dx, bt * C + c, a)
                    store(dy, bt * C + c, b)
        shared = cuda.shared.array(0, ctype(x))
        for j in range(CHUNKS):
            for i in range(W):
                c = (WARP * j + lane) * W + i
                if c < C:
                    shared[cuda.threadIdx.y * C + c] = sums[j * W + i]
        cuda.syncthreads()                   # the sums of all warps are there
        for c in range(cuda.threadIdx.y * WARP + lane, C, warps * WARP):
            s = shared[c]
            for i in range(1, warps):
                s += shared[i * C + c]
            partial[cuda.blockIdx.x, c] = s
    return forward, backward

@kernel
def sum_rows_kernel(out, x):
    """out[n] += sum_i x[n, i], in the type of out     one block of 256 threads per row"""
    n, s = cuda.blockIdx.x, out.dtype.type(0)
    for i in range(cuda.threadIdx.x, x.shape[1], 256):
        s += x[n, i]
    s = block_sum(s)
    if cuda.threadIdx.x == 0:
        out[n] += s

def rmsnorm_forward(y, kept, rstd, x, w, eps, add=True):
    """x += y if add, then y = x * rstd * w, kept = x"""
    forward, _ = rmsnorm_kernels(x.shape[1], width(x.shape[1]))
    launch(forward, -(-x.shape[0] // ROWS), (WARP, ROWS), y, kept, rstd, x, w, number(x, eps), add)

def rmsnorm_backward(dx, dw, dy, partial, x, w, rstd):
    """dx += ..., dw += sum_bt dy * u, dy becomes y     partial (PARTS, C) is scratch"""
    C, size = x.shape[1], partial.dtype.itemsize
    warps = max(1, min(4, (48 << 10) // (C * size)))
    _, backward = rmsnorm_kernels(C, width(C))
    launch(backward, PARTS, (WARP, warps), dx, dy, partial, x, w, rstd, smem=warps * C * size)
    launch(sum_rows_kernel, C, 256, dw, transposed(partial))

# ==== 4.4 RoPE ====
@made_once
def rope_kernel(W):
    load, store = vector(W)

    @kernel
    def turn(qkv, cos, sin, T, heads, sign):
        """Turns pair (i, i + D/2) of the first `heads` heads of row bt by sign * angle[bt % T, i],
        in place     one block a row, a thread W pairs     math: nanoeuler.rope"""
        bt, half = cuda.blockIdx.x, cos.shape[1]
        for j in range(cuda.threadIdx.x * W, heads * half, cuda.blockDim.x * W):
            low = bt * qkv.shape[1] + j // half * 2 * half + j % half
            angle = bt % T * half + j % half
            u, v, c, s = load(qkv, low), load(qkv, low + half), load(cos, angle), load(sin, angle)
            for i in range(W):
                x = u[i]
                u[i] = x * c[i] - sign * v[i] * s[i]
                v[i] = v[i] * c[i] + sign * x * s[i]
            store(qkv, low, u)
            store(qkv, low + half, v)
    return turn

def rope(qkv, cos, sin, T, heads, sign):
    W = width(cos.shape[1], qkv.shape[1])
    threads = min(256, -(-heads * cos.shape[1] // (32 * W)) * 32)
    launch(rope_kernel(W), qkv.shape[0], threads, qkv, cos, sin, T, heads, number(qkv, sign))

# ==== 4.5 Attention ====
# FlashAttention (Dao 2022; the row-wise split over blocks is FlashAttention-2's, Dao 2023): a block
# keeps N query rows and walks over the keys, N at a time, with a running maximum m and sum l of
# each row.  No T x T matrix, and tiles beyond the diagonal are never touched.  128 threads as
# (16, 8): thread (x, y) owns rows y * N/8 + i and columns x + 16 j of every N x N or N x D tile.
# Tiles lie in shared memory in rows of D + 1 or N + 1, so that a column hits 32 banks.

# Kernels, whether they turn dQ and dK back, and of their blocks, forward and backward: rows, bytes
Attention = namedtuple("Attention", "forward dq dkv turns block rows back_rows smem back_smem")

@made_once
def portable_attention(D, itemsize, room):
    """The kernels for head size D; N is the largest tile with which backward fits into that many
    bytes of shared memory."""
    W = -(-D // 16) * 16                     # D filled with zeros to whole tiles
    S, N = W + 1, 64
    while (4 * N * S + 2 * N * (N + 1)) * itemsize > room:
        N //= 2
    need(N >= 16, f"head_dim {D} is too large: its tiles do not fit into shared memory")
    PS, ROWS, KEYS, COLS = N + 1, N // 8, N // 16, W // 16
    NKEYS, NCOLS = ROWS * KEYS, ROWS * COLS
    Q1, K1, V1, P1 = 0, N * S, 2 * N * S, 3 * N * S      # where tiles start: Q, K, V, P,
    DS1, DO1 = P1 + N * PS, P1 + 2 * N * PS              # and of the backward pass dS, dO
    score_tile, out_tile = register_tile(ROWS, KEYS), register_tile(ROWS, COLS)

    @inlined
    def load_rows(smem, tile, src, row0, t, T, col):
        """smem[tile + r * S + d] = src[row0 + t + r, col + d], N rows; zeros from t + r = T and
        from column D on."""
        row, n = row0 + t, T - t
        for i in range(16 * cuda.threadIdx.y + cuda.threadIdx.x, N * W, 128):
            r, d, v = i // W, i % W, ctype(src).type(0)
            if r < n and d < D:
                v = value(src[row + r, col + d])
            smem[tile + r * S + d] = v

    @kernel
    def forward(o, lse, qkv, T, G, scale):
        """o = softmax(Q K^T / sqrt(D)) V, causal     math: nanoeuler.attention_forward
        One block per N query rows of a head.     grid (T / N, H, B), block (16, 8)
        out: o (BT, HD), lse (H, BT)     in: qkv (BT, QKV)"""
        smem, zero = cuda.shared.array(0, ctype(qkv)), ctype(qkv).type(0)
        m, l = filled(ROWS, -ctype(qkv).type(math.inf)), filled(ROWS, zero)
        acc = filled(NCOLS, zero)
        x, y, h, row0 = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockIdx.y, cuda.blockIdx.z * T
        t0 = (cuda.gridDim.x - 1 - cuda.blockIdx.x) * N              # the longest rows first
        k_col = o.shape[1] + h * G // cuda.gridDim.y * D
        load_rows(smem, Q1, qkv, row0, t0, T, h * D)
        for k0 in range(0, t0 + 1, N):
            cuda.syncthreads()               # the last product is done with K, V and P
            load_rows(smem, K1, qkv, row0, k0, T, k_col)
            load_rows(smem, V1, qkv, row0, k0, T, k_col + G * D)
            cuda.syncthreads()               # Q, K, V are whole
            s = filled(NKEYS, zero)
            score_tile(s, smem, Q1 + y * ROWS * S, S, 1, smem, K1 + x * S, 1, S, W)
            for i in range(ROWS):
                r, top = y * ROWS + i, m[i]
                for j in range(KEYS):
                    v = s[i * KEYS + j] * scale
                    if k0 + x + 16 * j > t0 + r:
                        v = -ctype(qkv).type(math.inf)
                    s[i * KEYS + j] = v
                    top = max(top, v)
                top = half_warp_max(top)
                shrink = exp(m[i] - top)
                m[i] = top
                l[i] *= shrink
                for j in range(KEYS):
                    p = exp(s[i * KEYS + j] - top)
                    l[i] += p
                    smem[P1 + r * PS + x + 16 * j] = p
                for j in range(COLS):
                    acc[i * COLS + j] *= shrink
            cuda.syncthreads()               # P is whole
            out_tile(acc, smem, P1 + y * ROWS * PS, PS, 1, smem, V1 + x, S, 1, N)
        for i in range(ROWS):
            t, total = t0 + y * ROWS + i, half_warp_sum(l[i])
            if t < T:
                for j in range(COLS):
                    if x + 16 * j < D:
                        o[row0 + t, h * D + x + 16 * j] = stored(o, acc[i * COLS + j] / total)
                if x == 0:
                    lse[h, row0 + t] = m[i] + math.log(total)

    def backward(keys):
        @kernel
        def run(dqkv, delta, do, o, lse, qkv, cos, sin, T, HD, scale):
            """P = exp(Q K^T / sqrt(D) - lse),   dS = P * (dO V^T - delta) / sqrt(D)

            dQ = dS K, and delta = <dO, O>     One block per N query rows of a head, as forward.
            Or, `keys`: dK = sum_h dS^T Q,  dV = sum_h P^T dO     One block per N keys of a
            key/value head: it walks over the query heads of its group, their rows from the diagonal
            on.     grid (T / N, H or G, B), block (16, 8)     in: do (BT, HD), lse (H, BT)
            out: the q columns of dqkv (BT, QKV), delta (H, BT), or the columns of k and v"""
            smem, zero = cuda.shared.array(0, ctype(qkv)), ctype(qkv).type(0)
            dqk, dv = filled(NCOLS, zero), filled(NCOLS, zero)
            x, y, row0 = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockIdx.z * T
            H, G = HD // D, (qkv.shape[1] - HD) // (2 * D)
            if keys:                         # its tile and heads, and what it walks over
                g, mine = cuda.blockIdx.y, cuda.blockIdx.x * N
                h0, h1, begin, end = g * H // G, (g + 1) * H // G, mine, T
            else:
                h0, mine = cuda.blockIdx.y, (cuda.gridDim.x - 1 - cuda.blockIdx.x) * N
                g, h1, begin, end = h0 * G // H, h0 + 1, 0, mine + 1
            k_col, v_col = HD + g * D, HD + (G + g) * D
            if keys:
                load_rows(smem, K1, qkv, row0, mine, T, k_col)
                load_rows(smem, V1, qkv, row0, mine, T, v_col)
            else:
                load_rows(smem, Q1, qkv, row0, mine, T, h0 * D)
                load_rows(smem, DO1, do, row0, mine, T, h0 * D)
                lane = (16 * y + x) % WARP
                for t in range(mine + (16 * y + x) // WARP, min(mine + N, T), 4):
                    total = zero             # a warp per row
                    for i in range(h0 * D + lane, h0 * D + D, WARP):
                        total += value(do[row0 + t, i]) * value(o[row0 + t, i])
                    total = warp_sum(total)
                    if lane == 0:
                        delta[h0, row0 + t] = total
            for h in range(h0, h1):
                for n in range(begin, end, N):
                    cuda.syncthreads()       # the last products are done with the other tiles
                    if keys:
                        load_rows(smem, Q1, qkv, row0, n, T, h * D)
                        load_rows(smem, DO1, do, row0, n, T, h * D)
                    else:
                        load_rows(smem, K1, qkv, row0, n, T, k_col)
                        load_rows(smem, V1, qkv, row0, n, T, v_col)
                    cuda.syncthreads()       # Q, dO, K, V are whole, and delta
                    t0, k0 = (n, mine) if keys else (mine, n)
                    s, dp = filled(NKEYS, zero), filled(NKEYS, zero)
                    score_tile(s, smem, Q1 + y * ROWS * S, S, 1, smem, K1 + x * S, 1, S, W)
                    score_tile(dp, smem, DO1 + y * ROWS * S, S, 1, smem, V1 + x * S, 1, S, W)
                    for i in range(ROWS):
                        r = y * ROWS + i
                        t = min(t0 + r, T - 1)
                        row_lse, row_delta = lse[h, row0 + t], delta[h, row0 + t]
                        for j in range(KEYS):
                            key, p = x + 16 * j, zero
                            if k0 + key <= t and t0 + r < T:
                                p = exp(s[i * KEYS + j] * scale - row_lse)
                            smem[P1 + r * PS + key] = p
                            smem[DS1 + r * PS + key] = p * (dp[i * KEYS + j] - row_delta) * scale
                    cuda.syncthreads()       # P and dS are whole
                    if keys:
                        out_tile(dv, smem, P1 + y * ROWS, 1, PS, smem, DO1 + x, S, 1, N)
                        out_tile(dqk, smem, DS1 + y * ROWS, 1, PS, smem, Q1 + x, S, 1, N)
                    else:
                        out_tile(dqk, smem, DS1 + y * ROWS * PS, PS, 1, smem, K1 + x, S, 1, N)
            col = k_col if keys else h0 * D
            for i in range(ROWS):
                t = mine + y * ROWS + i
                for j in range(COLS):
                    if t < T and x + 16 * j < D:
                        dqkv[row0 + t, col + x + 16 * j] = stored(dqkv, dqk[i * COLS + j])
                        if keys:
                            dqkv[row0 + t, v_col + x + 16 * j] = stored(dqkv, dv[i * COLS + j])
        return run

    return Attention(forward, backward(keys=False), backward(keys=True), False, (16, 8), N,
                     N, (3 * N * S + N * PS) * itemsize, (4 * N * S + 2 * N * PS) * itemsize)

# The same on tensor cores, bfloat16, head sizes 32, 64 and 128.  A block is one warpgroup: it keeps
# two tiles of 64 rows, and walks over pairs of others, which arrive in two places by turns.  A warp
# computes 16 rows of S, P or dS at a time, and has them in the registers as a left operand has to
# be: they go into the next product without shared memory.  The products are two rungs: `mma` keeps
# its left operand in registers and reads the right one once a warp; Hopper's `wgmma`, for D = 64,
# once a warpgroup, with a pair of products in flight, and the copy engine brings its tiles.
# Softmax in powers of two: exp(x - m) = 2^(x log2(e) - m log2(e)), one multiply-add an entry.
@made_once
def tensor_attention(D, hopper):
    CHUNKS, STEPS, TILE_BYTES = D // 8, D // 16, 128 * D # chunks of 16 bytes; a tile has 64 rows
    LEFT, OUT, BOTH_LEFT, BOTH_OUT = 4 * STEPS, 4 * CHUNKS, 8 * STEPS, 8 * CHUNKS
    i32, INF, LOG2E = types.int32, np.float32(math.inf), np.float32(1 / math.log(2))
    load_two, _ = vector(2)
    two_rows = wgmma(64, 0, False, 2, adds=False)
    one_column, two_columns = wgmma(D, "registers", True), wgmma(D, "registers", True, 2)

    at = swizzled
    if D == 32:                              # rows of 64 bytes
        @inlined
        def at(row, chunk):
            return row * u32(64) + ((chunk ^ row >> u32(1) & u32(3)) << u32(4))

    @inlined
    def left(a, i, tile):
        """a[i..] = the warp's 16 rows of a tile, as a left operand."""
        lane = u32(cuda.threadIdx.x) & u32(31)
        row = (u32(cuda.threadIdx.x) >> u32(5) << u32(4)) + (lane & u32(15))
        for k in range(STEPS):
            ldmatrix_rows(a, i + 4 * k, tile + at(row, u32(2 * k) + (lane >> u32(4))))

    @inlined
    def begin(kept):
        """Shared memory from a multiple of 1,024 on; for wgmma, barriers for the pairs in two
        places, and for so many kept tiles."""
        smem = (shared_address(cuda.shared.array(0, types.uint16)) + u32(1023)) & u32(0xFFFFFC00)
        barriers = shared_address(cuda.shared.array(3, u64))
        if hopper:
            if cuda.threadIdx.x == 0:
                mbarrier_init(barriers, u32(2))
                mbarrier_init(barriers + u32(8), u32(2))
                mbarrier_init(barriers + u32(16), u32(kept))
                mbarrier_fence()
            cuda.syncthreads()               # they exist
        return smem, barriers

    @inlined
    def see(source):
        if hopper and cuda.threadIdx.x == 0:
            map_fence(global_address(source))

    @inlined
    def fetch(barrier, tile, source, row, last, col):
        """Orders rows row.. of `source`, columns col to col + D, into a tile; rows beyond the last
        are whatever comes then (wgmma), or copies of it."""
        if hopper:
            if cuda.threadIdx.x == 0:
                mbarrier_expect(barrier, u32(TILE_BYTES))
                tma_load(tile, global_address(source), u32(col), u32(row), barrier)
        else:
            thread, width = u32(cuda.threadIdx.x), source.shape[1]
            for i in range(CHUNKS // 2):
                r = (thread + u32(128 * i)) // u32(CHUNKS)
                chunk = (thread + u32(128 * i)) % u32(CHUNKS)
                offset = min(row + r, last) * width + col + chunk * 8
                cp_async(tile + at(r, chunk), global_address(source) + u64(2 * offset))

    @inlined
    def order(smem, barriers, n, one, col1, other, col2, row, last):
        """Orders the n-th pair of tiles, rows row.. of two matrices, into places 2, 3 or 4, 5."""
        tile, barrier = smem + u32((2 + n % 2 * 2) * TILE_BYTES), barriers + u32(n % 2 * 8)
        fetch(barrier, tile, one, row, last, col1)
        fetch(barrier, tile + u32(TILE_BYTES), other, row, last, col2)

    @inlined
    def arrived(barrier, parity):
        """The tiles are there, and nobody reads what was ordered before them."""
        cp_async_wait_all()
        if hopper:
            mbarrier_wait(barrier, u32(parity))
        cuda.syncthreads()

    @inlined
    def next_keys(smem, barriers, n, count, qkv, k_col, v_col, row0, last):
        """Waits for the n-th pair of tiles of K and V, orders the next.  For n = -1, only that."""
        if n >= 0:
            arrived(barriers + u32(n % 2 * 8), n // 2 % 2)
        if n + 1 < count:
            order(smem, barriers, n + 1, qkv, k_col, qkv, v_col, row0 + n * 64 + 64, last)

    @inlined
    def hold(a, kept):
        """What `mma` needs of two kept tiles"""
        if not hopper:
            left(a, 0, kept)
            left(a, LEFT, kept + u32(TILE_BYTES))

    @inlined
    def multiply(acc, i, a, j, b):
        mma(acc, i, a, j, b, 0)
        mma(acc, i + 4, a, j, b, 2)

    @inlined
    def by_rows(a, kept, first, second):
        """Two products (64, 64): kept tile (held in a) * other tile^T.  If that is one for both,
        `mma` reads it once."""
        s = filled(64, f32(0))
        if hopper:
            two_rows(s, descriptor(kept), descriptor(first), descriptor(kept + u32(TILE_BYTES)),
                     descriptor(second))
        else:
            lane, b = u32(cuda.threadIdx.x) & u32(31), cuda.local.array(4, u32)
            row, chunk = (lane & u32(7)) + (lane >> u32(4) << u32(3)), lane >> u32(3) & u32(1)
            for k in range(STEPS):
                for n in range(4):
                    where = at(row + u32(16 * n), chunk + u32(2 * k))
                    ldmatrix_rows(b, 0, first + where)
                    multiply(s, 8 * n, a, 4 * k, b)
                    if second != first:
                        ldmatrix_rows(b, 0, second + where)
                    multiply(s, 32 + 8 * n, a, LEFT + 4 * k, b)
        return s

    @inlined
    def by_columns(acc, a, count, first, second):
        """acc += one or two products (64, D): A (64, 64) held in a * tile"""
        if hopper and count == 2:
            two_columns(acc, a, descriptor(first), descriptor(second))
        elif hopper:
            one_column(acc, a, descriptor(first))
        else:
            lane, b = u32(cuda.threadIdx.x) & u32(31), cuda.local.array(4, u32)
            for k in range(4):
                for n in range(STEPS):
                    where = at(u32(16 * k) + (lane & u32(15)), u32(2 * n) + (lane >> u32(4)))
                    ldmatrix_columns(b, 0, first + where)
                    multiply(acc, 8 * n, a, 4 * k, b)
                    if second != first:
                        ldmatrix_columns(b, 0, second + where)
                    if count == 2:
                        multiply(acc, OUT + 8 * n, a, 16 + 4 * k, b)

    @inlined
    def mask(s, first, beyond):
        """-inf above the diagonal of the tile s[first:], if it passes through.
        beyond: the thread's first column minus its first row."""
        if beyond > -64:
            for i in range(32):
                if beyond > i32(i // 2 % 2 * 8 - i // 4 * 8 - i % 2):
                    s[first + i] = -INF

    @inlined
    def store(out, low, high, row, col):
        """The two neighbours that a thread has of columns col to col + 7."""
        col += cuda.threadIdx.x % 4 * 2
        store_pair(global_address(out) + u64(2 * (row * out.shape[1] + col)), pack_bf16(low, high))

    @inlined
    def store_turned(out, acc, first, row, col, cos, sin, t, scale):
        """A row of acc, times scale, its pairs (c, c + D / 2) turned back by the angles of t: the
        gradient of q or k before RoPE."""
        c = cuda.threadIdx.x % 4 * 2
        u, v = cuda.local.array(2, f32), cuda.local.array(2, f32)
        for j in range(CHUNKS // 2):
            for n in range(2):
                x, y = acc[first + 4 * j + n] * scale, acc[first + OUT // 2 + 4 * j + n] * scale
                cosine, sine = cos[t, 8 * j + c + n], sin[t, 8 * j + c + n]
                u[n], v[n] = x * cosine + y * sine, y * cosine - x * sine
            store(out, u[0], u[1], row, col + 8 * j)
            store(out, v[0], v[1], row, col + D // 2 + 8 * j)

    @inlined
    def soften(s, which, acc, m, l, beyond, scale):
        """One step of the running softmax for a 64-row half of s: S becomes 2^(S - m)."""
        top, shrink, first = cuda.local.array(2, f32), cuda.local.array(2, f32), 32 * which
        mask(s, first, beyond)
        for i in range(2):
            top[i] = m[2 * which + i]
        for i in range(32):
            top[i // 2 % 2] = max(top[i // 2 % 2], s[first + i])
        for i in range(2):
            top[i] = quad_max(top[i])
            shrink[i] = exp2((m[2 * which + i] - top[i]) * scale)
            m[2 * which + i] = top[i]
            top[i] *= scale
            l[2 * which + i] *= shrink[i]
        for i in range(OUT):
            acc[which * OUT + i] *= shrink[i // 2 % 2]
        for i in range(32):
            s[first + i] = exp2(s[first + i] * scale - top[i // 2 % 2])
            l[2 * which + i // 2 % 2] += s[first + i]

    @cuda.jit(cache=True, launch_bounds=(128, 3 if hopper else 1))
    def forward(o, lse, qkv, T, G, scale):
        """As the portable kernel, 128 query rows of a head a block.   grid (T / 128, H, B)
        qkv: the matrix, or its tensor map"""
        smem, barriers = begin(2)
        see(qkv)
        acc, m, l = filled(BOTH_OUT, f32(0)), filled(4, -INF), filled(4, f32(0))
        q, p = cuda.local.array(BOTH_LEFT, u32), cuda.local.array(32, u32)
        lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        h, row0, scale = cuda.blockIdx.y, cuda.blockIdx.z * T, scale * LOG2E
        t0, last = (cuda.gridDim.x - 1 - cuda.blockIdx.x) * 128, row0 + T - 1
        k_col = o.shape[1] + h * G // cuda.gridDim.y * D
        r, count = t0 + warp * 16 + lane // 4, (min(t0 + 128, T) + 63) // 64     # r + 0, 8, 64, 72
        for i in range(2):
            fetch(barriers + u32(16), smem + u32(i * TILE_BYTES), qkv, row0 + t0 + 64 * i, last,
                  h * D)
        arrived(barriers + u32(16), 0)       # Q is there
        hold(q, smem)
        for n in range(-1, count):           # -1 only orders what 0 works on
            tile = smem + u32((2 + n % 2 * 2) * TILE_BYTES)          # K, and V behind it
            next_keys(smem, barriers, n, count, qkv, k_col, k_col + G * D, row0, last)
            if n < 0:
                continue
            s = by_rows(q, smem, tile, tile)
            beyond = i32(n * 64 + lane % 4 * 2 - r)
            soften(s, 0, acc, m, l, beyond, scale)
            soften(s, 1, acc, m, l, i32(beyond - 64), scale)
            for i in range(32):
                p[i] = pack_bf16(s[2 * i], s[2 * i + 1])
            by_columns(acc, p, 2, tile + u32(TILE_BYTES), tile + u32(TILE_BYTES))
        for i in range(4):
            t, total = r + i // 2 * 64 + i % 2 * 8, quad_sum(l[i])
            if t < T:
                for j in range(CHUNKS):
                    n = i // 2 * OUT + j * 4 + i % 2 * 2
                    store(o, acc[n] / total, acc[n + 1] / total, row0 + t, h * D + 8 * j)
                if lane % 4 == 0:
                    lse[h, row0 + t] = m[i] * scale / LOG2E + math.log(total)

    @cuda.jit(cache=True, launch_bounds=(128, 1))
    def dq(dqkv, delta, do, o, lse, qkv, cos, sin, T, HD, scale):
        """dQ = dS K before RoPE, and delta = <dO, O> for dkv.  64 query rows a block, S and dP in
        one array of registers.     grid (T / 64, H, B)     do, o, qkv: matrices, or tensor maps"""
        smem, barriers = begin(3)
        see(qkv)
        see(do)
        see(o)
        acc, mean, log = filled(OUT, f32(0)), filled(2, f32(0)), cuda.local.array(2, f32)
        a, p = cuda.local.array(BOTH_LEFT, u32), cuda.local.array(16, u32)       # a: Q, dO
        lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        h, row0, scale2 = cuda.blockIdx.y, cuda.blockIdx.z * T, scale * LOG2E
        t0, last = (cuda.gridDim.x - 1 - cuda.blockIdx.x) * 64, row0 + T - 1
        G = (dqkv.shape[1] - HD) // (2 * D)
        k_col, r = HD + h * G // cuda.gridDim.y * D, t0 + warp * 16 + lane // 4
        kept, count = barriers + u32(16), (min(t0 + 64, T) + 63) // 64
        fetch(kept, smem, qkv, row0 + t0, last, h * D)
        fetch(kept, smem + u32(TILE_BYTES), do, row0 + t0, last, h * D)
        fetch(kept, smem + u32(2 * TILE_BYTES), o, row0 + t0, last, h * D)       # for a moment
        arrived(kept, 0)                     # Q, dO and O are there
        left(a, 0, smem + u32(2 * TILE_BYTES))
        left(a, LEFT, smem + u32(TILE_BYTES))
        for i in range(LEFT):
            u, v = a[i], a[LEFT + i]         # two neighbours of O, two of dO
            mean[i % 2] += value(u16(u)) * value(u16(v)) + (
                value(u16(u >> u32(16))) * value(u16(v >> u32(16))))
        for i in range(2):
            mean[i], t = quad_sum(mean[i]), row0 + min(r + 8 * i, T - 1)
            log[i] = lse[h, t] * LOG2E
            if lane % 4 == 0 and r + 8 * i < T:
                delta[h, t] = mean[i]
        hold(a, smem)
        cuda.syncthreads()                   # O is read: K may come
        for n in range(-1, count):
            tile = smem + u32((2 + n % 2 * 2) * TILE_BYTES)          # K, and V behind it
            next_keys(smem, barriers, n, count, qkv, k_col, k_col + G * D, row0, last)
            if n < 0:
                continue
            s = by_rows(a, smem, tile, tile + u32(TILE_BYTES))
            mask(s, 0, i32(n * 64 + lane % 4 * 2 - r))
            for i in range(32):
                s[i] = exp2(s[i] * scale2 - log[i // 2 % 2]) * (s[32 + i] - mean[i // 2 % 2])
            for i in range(16):
                p[i] = pack_bf16(s[2 * i], s[2 * i + 1])
            by_columns(acc, p, 1, tile, tile)
        for i in range(2):
            if r + 8 * i < T:
                store_turned(dqkv, acc, 2 * i, row0 + r + 8 * i, h * D, cos, sin, r + 8 * i, scale)

    @cuda.jit(cache=True, launch_bounds=(128, 3 if hopper else 1))
    def dkv(dqkv, delta, do, o, lse, qkv, cos, sin, T, HD, scale):
        """dK = sum_h dS^T Q before RoPE,   dV = sum_h P^T dO.  64 keys a block, S^T and dP^T in its
        registers: a row is a key, a column a query.     grid (T / 64, G, B)"""
        smem, barriers = begin(2)
        see(qkv)
        see(do)
        numbers = cuda.shared.array(256, f32)            # lse and delta of 64 queries, twice
        acc = filled(BOTH_OUT, f32(0))                                           # dV, dK
        a, p = cuda.local.array(BOTH_LEFT, u32), cuda.local.array(32, u32)       # a: K, V
        lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        g, row0, k0 = cuda.blockIdx.y, cuda.blockIdx.z * T, cuda.blockIdx.x * 64
        last, G, group = row0 + T - 1, cuda.gridDim.y, HD // D // cuda.gridDim.y
        k_col, v_col, scale2 = HD + g * D, HD + (G + g) * D, scale * LOG2E
        source = global_address(lse) if warp < 2 else global_address(delta)
        for i in range(2):
            fetch(barriers + u32(16), smem + u32(i * TILE_BYTES), qkv, row0 + k0, last,
                  k_col + i * G * D)
        arrived(barriers + u32(16), 0)       # K and V are there
        hold(a, smem)
        h, t, count = g * group, k0, group * ((T - k0 + 63) // 64)
        for n in range(-1, count):
            t0, tile = t, smem + u32((2 + n % 2 * 2) * TILE_BYTES)   # Q, and dO behind it
            if n >= 0:
                arrived(barriers + u32(n % 2 * 8), n // 2 % 2)
                t += 64
                if t >= T:
                    h, t = h + 1, k0
            if n + 1 < count:
                column = h * lse.shape[1] + min(row0 + t + cuda.threadIdx.x % 64, last)
                place = (n + 1) % 2 * 128 + cuda.threadIdx.x
                cp_async_4(shared_address(numbers) + u32(4 * place), source + u64(4 * column))
                order(smem, barriers, n + 1, qkv, h * D, do, h * D, row0 + t, last)
            if n < 0:
                continue
            s = by_rows(a, smem, tile, tile + u32(TILE_BYTES))
            if t0 == k0 or t0 + 64 > T:      # on the diagonal, or queries that do not exist
                before = i32(k0 + warp * 16 + lane // 4 - t0 - lane % 4 * 2)     # key - query
                end = i32(T - t0 - lane % 4 * 2)
                for i in range(32):
                    if i32(i // 4 * 8 + i % 2 - i // 2 % 2 * 8) < before or (
                            i32(i // 4 * 8 + i % 2) >= end):
                        s[i] = -INF
            for j in range(8):
                log = load_two(numbers, n % 2 * 128 + 8 * j + lane % 4 * 2)
                mean = load_two(numbers, n % 2 * 128 + 64 + 8 * j + lane % 4 * 2)
                for i in range(4):
                    s[4 * j + i] = exp2(s[4 * j + i] * scale2 - log[i % 2] * LOG2E)
                    s[32 + 4 * j + i] = s[4 * j + i] * (s[32 + 4 * j + i] - mean[i % 2])
            for i in range(32):
                p[i] = pack_bf16(s[2 * i], s[2 * i + 1])
            by_columns(acc, p, 2, tile + u32(TILE_BYTES), tile)
        for i in range(2):
            t = k0 + warp * 16 + lane // 4 + 8 * i
            if t < T:
                for j in range(CHUNKS):
                    n = 4 * j + 2 * i
                    store(dqkv, acc[n], acc[n + 1], row0 + t, v_col + 8 * j)
                store_turned(dqkv, acc, OUT + 2 * i, row0 + t, k_col, cos, sin, t, scale)

    return Attention(forward, dq, dkv, True, 128, 128, 64, *[6 * TILE_BYTES + 1024] * 2)

FAST_HEADS = 32, 64, 128                     # head sizes that tensor cores do attention for

def attention_of(D, *matrices):
    """The kernels for head size D, and the matrices, or what they want to know of them."""
    if matrices[0].dtype != np.uint16 or rung() == "portable" or D not in FAST_HEADS:
        room = min(99 << 10, cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        return portable_attention(D, computing(matrices[0].dtype).itemsize, room), *matrices
    if rung() == "wgmma" and D == 64:
        return tensor_attention(D, True), *(map_of(x, 64) for x in matrices)
    return tensor_attention(D, False), *matrices

def attention_forward(o, lse, qkv, T, D):
    (BT, HD), scale = o.shape, number(qkv, 1 / math.sqrt(D))
    G, (k, source) = (qkv.shape[1] - HD) // (2 * D), attention_of(D, qkv)
    launch(k.forward, (-(-T // k.rows), HD // D, BT // T), k.block, o, lse, source, T, G, scale,
           smem=k.smem)

def attention_backward(dqkv, delta, do, o, lse, qkv, cos, sin, T, D):
    """The gradient of q, k and v as they were before RoPE     delta (H, BT) is scratch"""
    (BT, HD), scale, H = o.shape, number(qkv, 1 / math.sqrt(D)), len(lse)
    G = (qkv.shape[1] - HD) // (2 * D)
    k, *sources = attention_of(D, do, o, qkv)
    for function, heads in ((k.dq, H), (k.dkv, G)):
        launch(function, (-(-T // k.back_rows), heads, BT // T), k.block, dqkv, delta, *sources[:2],
               lse, sources[2], cos, sin, T, HD, scale, smem=k.back_smem)
    if not k.turns:
        rope(dqkv, cos, sin, T, H + G, -1)

# ==== 4.6 SwiGLU ====
@made_once
def swiglu_kernels(W):
    load, store = vector(W)

    @kernel
    def forward(y, gate_up):
        """y = silu(gate) * up     one block a row, a thread W elements
        math: nanoeuler.swiglu_forward"""
        bt, F, one = cuda.blockIdx.x, y.shape[1], ctype(y).type(1)
        for f in range(cuda.threadIdx.x * W, F, cuda.blockDim.x * W):
            z, up = load(gate_up, bt * 2 * F + f), load(gate_up, bt * 2 * F + F + f)
            for i in range(W):
                z[i] = z[i] / (one + exp(-z[i])) * up[i]
            store(y, bt * F + f, z)

    @kernel
    def backward(gate_up, dy):
        """In place: gate_up (BT, 2F) becomes its gradient     math: nanoeuler.swiglu_backward"""
        bt, F, one = cuda.blockIdx.x, dy.shape[1], ctype(dy).type(1)
        for f in range(cuda.threadIdx.x * W, F, cuda.blockDim.x * W):
            z, up = load(gate_up, bt * 2 * F + f), load(gate_up, bt * 2 * F + F + f)
            d = load(dy, bt * F + f)
            for i in range(W):
                s = one / (one + exp(-z[i]))
                g = d[i] * up[i] * s * (one + z[i] * (one - s))
                up[i] = d[i] * z[i] * s
                z[i] = g
            store(gate_up, bt * 2 * F + f, z)
            store(gate_up, bt * 2 * F + F + f, up)
    return forward, backward

def swiglu_forward(y, gate_up):
    forward, _ = swiglu_kernels(width(y.shape[1]))
    launch(forward, y.shape[0], 256, y, gate_up)

def swiglu_backward(gate_up, dy):
    _, backward = swiglu_kernels(width(dy.shape[1]))
    launch(backward, dy.shape[0], 256, gate_up, dy)

# ==== 4.7 Cross-entropy ====
@made_once
def cross_entropy_kernel(W):
    load, store = vector(W)

    @kernel
    def fused(nll, logits, targets, weight, row0, V, T):
        """nll[k, row0 + r] = -log softmax(z)[y],   z becomes weight[b, k] (softmax(z) - onehot(y))
        where z = logits[r, k V : (k + 1) V] are one head's logits of one row, y = targets[k, row0 +
        r]; a row without target (-1) becomes 0.     one block of 256 threads per head and row
        nll (P, BT), logits (R, P V), targets (P, BT) int32, weight (B, P) float64   grid (R, P)"""
        r, k, x = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x * W
        start, y = r * logits.shape[1] + k * V, targets[k, row0 + r]
        zero = ctype(logits).type(0)
        if y < 0:
            z = filled(W, zero)
            for v in range(x, V, 256 * W):
                store(logits, start + v, z)
            if x == 0:
                nll[k, row0 + r] = zero
            return
        m, l = -ctype(logits).type(math.inf), zero
        for v in range(x, V, 256 * W):       # a running maximum and sum, as in attention
            z = load(logits, start + v)
            top = m
            for i in range(W):
                top = max(top, z[i])
            l *= exp(m - top)
            m = top
            for i in range(W):
                l += exp(z[i] - m)
        top = block_max(m)
        l = block_sum(l * exp(m - top) if x < V else zero)
        zy, g = value(logits[r, k * V + y]), ctype(logits).type(weight[(row0 + r) // T, k])
        cuda.syncthreads()                   # everybody has read z[y], which is overwritten below
        for v in range(x, V, 256 * W):
            z = load(logits, start + v)
            for i in range(W):
                z[i] = exp(z[i] - top) * (g / l)
                if v + i == y:
                    z[i] -= g
            store(logits, start + v, z)
        if x == 0:
            nll[k, row0 + r] = top - zy + math.log(l)
    return fused

def cross_entropy(nll, logits, targets, weight, row0, V, T):
    """Rows row0.. of the batch: their losses into nll, their logits into gradients, in place."""
    R, PV = logits.shape
    launch(cross_entropy_kernel(width(V)), (R, PV // V), 256, nll, logits, targets, weight, row0, V,
           T)

# ==== 5 Model ====
class Model:
    """Parameters, gradients and moments on the device, and the memory to run micro-batches (B, T).

    The interface is that of nanoeuler.Model; work is queued: `update` and `losses` wait for it, a
    micro-batch for the one before it."""

    program, talk, buffer_table = "nanoeuler_cuda.py", "c", staticmethod(buffer_table)
    attention = attention_forward, attention_backward    # bench/naive_attention.py has others

    def __init__(self, cfg, flat, moments=(), options=None, dtype="f32"):
        open_device()
        if options:
            dtype = options.dtype
            for name, values in (("dtype", DTYPES), ("matmul", RUNGS)):
                given = getattr(options, name)
                need(given in values, f"--{name} is {given}, expected {' or '.join(values)}")
            global highest
            highest = options.matmul
        need(has(dtype), "bfloat16 needs a GPU of capability 8.0 or newer; use --dtype f32")
        self.cfg, self.dtype, self.shape = cfg, DTYPES[dtype], None
        self.table, self.master = ne.param_table(cfg), computing(self.dtype)
        self.held = sum(size for _, size in self.memory(1, 1)[:4])       # whatever the batch
        free, _ = cuda.current_context().get_memory_info()
        need(self.held < free, f"weights, gradients, moments take {self.held / 2**30:.1f} GiB, the "
             f"GPU has {free / 2**30:.1f} left; use a smaller --preset")
        zeros = np.zeros(flat.size, self.master)
        self.flat, self.g_flat = self.put(flat), self.put(zeros)
        self.copies = to_device(to_bf16(flat)) if self.dtype == np.uint16 else self.flat
        self.p, self.g, self.w = (ne.views(x, self.table)
                                  for x in (self.flat, self.g_flat, self.copies))
        self.cos, self.sin = map(self.put, ne.rope_table(cfg, self.master))
        self.m, self.v = [self.put(x) for x in (moments or (zeros, zeros))]
        self.n_decay = sum(x.size for x in self.p[:6])   # the matrices come first
        self.results = self.put(np.zeros(cfg.n_mtp + 1), np.float64)    # loss of each head, |g|
        self.hyper = self.put(np.zeros(8), np.float64)
        self.partial, self.turns = new(SUMS, np.float64), to_device(np.zeros(TURNS, np.uint32))
        self.zero, self.micro = np.zeros(cfg.n_mtp + 1), {}
        self.step = Graph()

    def put(self, x, dtype=None):
        return to_device(x, dtype or self.master)

    def prepare(self, B, T):
        """Memory for micro-batches of B sequences of T tokens; a smaller one is filled up."""
        if self.shape and self.shape[0] >= B and self.shape[1] == T:
            return
        self.a = self.d = self.gradient_graph = self.loss_graph = self.shape = None  # first free
        buffers, P = {"a": {}, "d": {}}, self.cfg.n_mtp
        try:
            for group, name, shape, dtype in self.buffer_table(self.cfg, B, T, self.dtype):
                buffers[group][name] = new(shape, dtype)
            self.ids = new((P + 1) * B * T, np.int32)
        except CudaAPIError as e:
            buffers.clear()
            total, fits = sum(size for _, size in self.memory(B, T)) / 2**30, self.fitting(T)
            remedy = f"--micro-batch {fits} would fit" if fits else (
                "not even one fits: use a shorter --seq-len or a smaller --preset")
            raise UserError(f"the GPU has no room for {B} sequences of {T} tokens, {total:.1f} GiB "
                            f"in all ({e}); {remedy}") from None
        self.a, self.d = [namedtuple(k, buffers[k])(**buffers[k]) for k in "ad"]
        self.tokens, self.targets = view(self.ids, 0, (B * T,)), view(self.ids, B * T, (P, B * T))
        self.weight, self.staged_weight = new((B, P), np.float64), np.zeros((B, P))
        self.staged, self.shape = cuda.pinned_array((P + 1) * B * T, np.int32), (B, T)
        self.gradient_graph, self.loss_graph = Graph(), Graph()

    def memory(self, B, T):
        return memory_table(self.cfg, B, T, self.dtype, self.buffer_table)

    def fitting(self, T):
        """Sequences that fit into 90 % of what is free, or taken by those before, beside the
        parameters that are there; 0 if not even one.  A grid has 65,535 blocks along z at most."""
        gc.collect()
        cuda.current_context().deallocations.clear()
        free, _ = cuda.current_context().get_memory_info()
        free += sum(size for _, size in self.memory(*self.shape)[4:]) if self.shape else 0
        return bisect.bisect_right(range(1, 65536), 0.9 * free + self.held,
                                   key=lambda B: sum(size for _, size in self.memory(B, T)))

    def micro_batch(self, B, asked=0):
        """Sequences in memory at once: as many as asked for, or as fit in equal parts of B.  Says
        what they take."""
        T = self.cfg.seq_len
        if B not in self.micro:
            fits = self.fitting(T)
            parts = math.ceil(B / max(1, min(fits, B)))
            self.micro[B] = min(asked, B) or math.ceil(B / parts)
            rows = self.memory(self.micro[B], T)
            ne.print_table(f"memory of {self.micro[B]} sequences at a time, {fits} would fit",
                           [(name, f"{size / 2**20:10,.0f} MiB") for name, size in
                            (*rows, ("together", sum(size for _, size in rows)))])
        return self.micro[B]

    def device(self):
        D, note = self.cfg.head_dim, ""
        if self.dtype == np.uint16 and rung() != "portable" and D not in FAST_HEADS:
            note = f", portable attention for heads of {D}, slower than for 32, 64 or 128"
        return f"{cuda.get_current_device().name}, {NAMES[self.dtype]}{note}"

    def forward(self):
        """The trajectory a.x[0..2L] of the staged tokens: two Euler steps a layer.  Each is taken
        by the RMSNorm that follows; after the last one, a.y goes into the heads."""
        cfg, p, w, a, T, D = self.cfg, self.p, self.w, self.a, self.shape[1], self.cfg.head_dim
        norm = lambda x, rstd, w, add=True: rmsnorm_forward(a.y, x, rstd, a.state, w, cfg.norm_eps,
                                                            add)
        attend, _ = self.attention
        embedding_forward(a.state, self.tokens, p.wte)
        for l in range(cfg.n_layer):
            norm(a.x[2 * l], a.attn_rstd[l], p.attn_norm[l], add=l > 0)
            matmul(a.qkv[l], a.y, w.qkv[l])
            rope(a.qkv[l], self.cos, self.sin, T, cfg.n_head + cfg.n_kv_head, 1)
            attend(a.att[l], a.lse[l], a.qkv[l], T, D)
            matmul(a.y, a.att[l], w.attn_proj[l])
            norm(a.x[2 * l + 1], a.mlp_rstd[l], p.mlp_norm[l])
            matmul(a.gate_up[l], a.y, w.gate_up[l])
            swiglu_forward(a.swiglu[l], a.gate_up[l])
            matmul(a.y, a.swiglu[l], w.down[l])
        norm(a.x[2 * cfg.n_layer], a.final_rstd, p.final_norm)

    def heads(self, training):
        """Logits, losses and, in training, gradients of the output heads, a chunk of rows at a
        time: d.norm = sum_k dlogits_k W_k.  The B T V logits are never in memory at once."""
        a, V = self.a, self.cfg.vocab_size
        (BT, C), (R, width) = a.y.shape, a.logits.shape
        tied = V if self.cfg.tie_embeddings else 0       # columns of logits that wte makes
        pairs = [(v0, v1, view(w, 0, (v1 - v0, C)), view(dw, 0, (v1 - v0, C))) for v0, v1, w, dw in
                 ((0, tied, self.w.wte, self.g.wte),
                  (tied, width, self.w.lm_head, self.g.lm_head)) if v1 > v0]
        for r0 in range(0, BT, R):
            x, dx = a.y[r0:r0 + R], self.d.norm[r0:r0 + R]
            logits = a.logits[:len(x)]
            for v0, v1, w, _ in pairs:
                matmul(logits[:, v0:v1], x, w)
            cross_entropy(a.nll, logits, self.targets, self.weight, r0, V, self.shape[1])
            if training:
                for v0, v1, w, dw in pairs:
                    matmul_dx(dx, logits[:, v0:v1], w, add=v0 > 0)
                    matmul_dw(dw, logits[:, v0:v1], x, self.turns)
        if training:
            launch(sum_rows_kernel, self.cfg.n_mtp, 256, self.results[:-1], a.nll)

    def backward(self):
        """d.x back along the trajectory, and every weight's gradient on the way: g += ..."""
        cfg, p, w, g, a, d = self.cfg, self.p, self.w, self.g, self.a, self.d
        L, T, D, (_, attend_back) = cfg.n_layer, self.shape[1], cfg.head_dim, self.attention
        d.x.gpu_data.memset(0, stream=stream)
        norm = lambda dw, x, w, rstd: rmsnorm_backward(d.x, dw, d.norm, d.partial, x, w, rstd)
        norm(g.final_norm, a.x[2 * L], p.final_norm, a.final_rstd)
        for l in range(L - 1, -1, -1):
            matmul_dx(d.swiglu, d.x, w.down[l])
            matmul_dw(g.down[l], d.x, a.swiglu[l], self.turns)
            swiglu_backward(a.gate_up[l], d.swiglu)
            matmul_dx(d.norm, a.gate_up[l], w.gate_up[l])
            norm(g.mlp_norm[l], a.x[2 * l + 1], p.mlp_norm[l], a.mlp_rstd[l])
            matmul_dw(g.gate_up[l], a.gate_up[l], d.norm, self.turns)       # now y, computed again
            matmul_dx(d.att, d.x, w.attn_proj[l])
            matmul_dw(g.attn_proj[l], d.x, a.att[l], self.turns)
            attend_back(d.qkv, d.delta, d.att, a.att[l], a.lse[l], a.qkv[l], self.cos, self.sin, T,
                        D)
            matmul_dx(d.norm, d.qkv, w.qkv[l])
            norm(g.attn_norm[l], a.x[2 * l], p.attn_norm[l], a.attn_rstd[l])
            matmul_dw(g.qkv[l], d.qkv, d.norm, self.turns)                  # now y, computed again
        embedding_backward(g.wte, d.x, self.tokens)

    def stage(self, tokens, targets, weight):
        """tokens (b, T), targets (P, b, T), weight (b, P) to the device, the former through pinned
        memory; the sequences from b to B have no targets."""
        (b, _), (B, T) = tokens.shape, self.shape
        stream.synchronize()                 # an earlier copy may still read what is staged
        staged = self.staged.reshape(-1, B, T)
        staged[0], staged[1:] = 0, -1
        staged[0, :b], staged[1:, :b] = tokens, targets
        self.ids.copy_to_device(self.staged, stream=stream)
        self.staged_weight[:b], self.staged_weight[b:] = weight, 0
        self.weight.copy_to_device(self.staged_weight, stream=stream)

    def gradient(self, tokens, targets, weight):
        """Queues g += d(sum_bk weight[b, k] CE_bk)/dp of one micro-batch, and its losses.

        tokens (B, T), targets (P, B, T), weight (B, P), or (P,) for every sequence"""
        self.prepare(*tokens.shape)
        self.stage(tokens, targets, weight)
        self.gradient_graph(lambda: (self.forward(), self.heads(True), self.backward()))

    def update(self, hyper):
        """Clips, AdamW, zero gradients.  Returns (summed CE of each head since the last update, |g|
        before clipping); waits for the device."""
        hyper = np.asarray(hyper, np.float64)
        self.hyper.copy_to_device(hyper, stream=stream)
        self.step(lambda: adamw(self.flat, self.copies, self.g_flat, self.m, self.v, self.n_decay,
                                self.hyper, self.partial, self.results))
        results = to_host(self.results)
        self.results.copy_to_device(self.zero, stream=stream)
        return results[:-1], float(results[-1])

    def losses(self, tokens, targets):
        """CE of head 0 of each sequence, nats, float64 (B,).     tokens, targets (B, T)"""
        (n, T), out = tokens.shape, []
        self.prepare(min(n, self.shape[0] if self.shape else max(1, self.fitting(T))), T)
        for b in range(0, n, self.shape[0]):
            y = np.full((self.cfg.n_mtp, *tokens[b:b + self.shape[0]].shape), -1, np.int32)
            y[0] = targets[b:b + self.shape[0]]
            self.stage(tokens[b:b + self.shape[0]], y, 0)
            self.loss_graph(lambda: (self.forward(), self.heads(False)))
            nll = to_host(self.a.nll)[0].reshape(self.shape)
            out.append(nll[:y.shape[1]].sum(1, dtype=np.float64))
        return np.concatenate(out)

    def buffers(self):
        """(parameters, m, v) on the host, float32: what a checkpoint holds."""
        return [to_host(x).astype(np.float32, copy=False) for x in (self.flat, self.m, self.v)]

    first_bad_tensor = ne.Model.first_bad_tensor
    host = staticmethod(lambda x: from_bf16(to_host(x)))

    def decoder(self):
        return Decoder(self.cfg, self.flat)

# ==== 6 Optimizer ====
SUMS = 512                                   # partial sums of |g|^2: fixed, so their order is

@kernel
def square_sums_kernel(partial, g):
    """partial[i] = sum of squares of what block i strides over; float64     grid SUMS, block 256"""
    s = 0.0
    for i in range(cuda.grid(1), g.size, cuda.gridsize(1)):
        s += g[i] * g[i]
    s = block_sum(s)
    if cuda.threadIdx.x == 0:
        partial[cuda.blockIdx.x] = s

@made_once
def adamw_kernel(W):
    load, store = vector(W)

    @kernel
    def step(p, w, g, m, v, n_decay, hyper, partial, results):
        """As nanoeuler.adamw, W entries a thread, striding; results[-1] = |g|.  All that changes
        from step to step is read from device memory: hyper (8,) float64 are lr, beta1, beta2, eps,
        decay, clip, 1 - beta1^t, 1 - beta2^t.  w: p for the matmuls."""
        total, dtype = 0.0, p.dtype.type
        for i in range(cuda.threadIdx.x, partial.size, 256):
            total += partial[i]
        norm = math.sqrt(block_sum(total))         # every block for itself
        if cuda.grid(1) == 0:
            results[results.size - 1] = norm
        if not math.isfinite(norm):
            return
        lr, beta1, beta2, eps = hyper[0], hyper[1], hyper[2], dtype(hyper[3])
        scale, rate = dtype(min(1.0, hyper[5] / (norm + 1e-30))), dtype(lr / hyper[6])
        b1, b2, c1, c2 = dtype(beta1), dtype(beta2), dtype(1 - beta1), dtype(1 - beta2)
        root, one, keep = dtype(1 / math.sqrt(hyper[7])), dtype(1), dtype(1 - lr * hyper[4])
        for i in range(cuda.grid(1) * W, p.size, cuda.gridsize(1) * W):
            pi, gi, mi, vi = load(p, i), load(g, i), load(m, i), load(v, i)
            for j in range(W):
                x, decay = gi[j] * scale, keep if i + j < n_decay else one
                mi[j], vi[j], gi[j] = b1 * mi[j] + c1 * x, b2 * vi[j] + c2 * x * x, dtype(0)
                pi[j] = decay * pi[j] - rate * mi[j] / (math.sqrt(vi[j]) * root + eps)
            store(p, i, pi)
            store(w, i, pi)
            store(m, i, mi)
            store(v, i, vi)
            store(g, i, gi)
    return step

def adamw(p, w, g, m, v, n_decay, hyper, partial, results):
    """Clips, updates, sets g to zero; |g| goes to results[-1]; not finite, nothing is touched."""
    launch(square_sums_kernel, SUMS, 256, partial, g)
    launch(adamw_kernel(4 if p.size % 4 == 0 else 1), 1024, 256, p, w, g, m, v, n_decay, hyper,
           partial, results)

# ==== 10 Inference ====
@kernel
def matvec_kernel(y, w, x):
    """y[n] = sum_k w[n, k] x[k]     one warp per n     grid N / ROWS"""
    N, K = w.shape
    lane, n, s = cuda.threadIdx.x, cuda.blockIdx.x * ROWS + cuda.threadIdx.y, ctype(x).type(0)
    if n < N:
        for k in range(lane, K, WARP):
            s += value(w[n, k]) * value(x[k])
        s = warp_sum(s)
        if lane == 0:
            y[n] = s

def matvec(y, w, x):
    launch(matvec_kernel, -(-w.shape[0] // ROWS), (WARP, ROWS), y, w, x)

@kernel
def rope_cache_kernel(qkv, kc, vc, cos, sin, at, H):
    """Turns q and k of one row to position at[1], and appends k and v to the cache.
    qkv (QKV,), kc, vc (G, T, D), at = (token, position)     grid H + 2 G, 32 threads"""
    h, half, t, G = cuda.blockIdx.x, cos.shape[1], at[1], kc.shape[0]
    for i in range(cuda.threadIdx.x, half, cuda.blockDim.x):
        u, v = qkv[2 * h * half + i], qkv[(2 * h + 1) * half + i]
        if h < H + G:
            c, s = cos[t, i], sin[t, i]
            u, v = u * c - v * s, v * c + u * s
        if h < H:
            qkv[2 * h * half + i], qkv[(2 * h + 1) * half + i] = u, v
        elif h < H + G:
            kc[h - H, t, i], kc[h - H, t, half + i] = u, v
        else:
            vc[h - H - G, t, i], vc[h - H - G, t, half + i] = u, v

@kernel
def attention_decode_kernel(o, qkv, kc, vc, scores, at, scale):
    """One query row against the cache.     one block of 256 threads per head
    o (HD,), qkv (QKV,), kc, vc (G, T, D), scores (H, T) scratch"""
    h, x, n, D = cuda.blockIdx.x, cuda.threadIdx.x, at[1] + 1, kc.shape[2]
    g, row = h * kc.shape[0] // cuda.gridDim.x, scores[h]
    m, l = -ctype(o).type(math.inf), ctype(o).type(0)
    for t in range(x // WARP, n, ROWS):      # a warp per key
        s = ctype(o).type(0)
        for i in range(x % WARP, D, WARP):
            s += qkv[h * D + i] * kc[g, t, i]
        s = warp_sum(s) * scale
        if x % WARP == 0:
            row[t] = s
    cuda.syncthreads()                       # all scores are there
    for t in range(x, n, 256):
        m = max(m, row[t])
    m = block_max(m)
    for t in range(x, n, 256):
        row[t] = exp(row[t] - m)
        l += row[t]
    l = block_sum(l)                   # its barriers: all weights are there
    for i in range(x, D, 256):
        s = ctype(o).type(0)
        for t in range(n):
            s += row[t] * vc[g, t, i]
        o[h * D + i] = s / l

class Decoder(ne.Decoder):
    """nanoeuler.Decoder with its cache on the device; a token is one graph."""

    def __init__(self, cfg, flat, weights="f32"):
        """flat: the parameters, on the device, or on the host if the matrices are to be bf16"""
        open_device()
        need(weights in ("f32", "bf16"), f"--weights is {weights}, expected f32 or bf16 on the GPU")
        T, C, H, D, F = cfg.seq_len, cfg.n_embd, cfg.n_head, cfg.head_dim, cfg.n_hidden
        QKV, cache = (H + 2 * cfg.n_kv_head) * D, (cfg.n_layer, cfg.n_kv_head, T, D)
        self.cfg, self.tokens, shapes = cfg, [], [shape for _, shape, _ in ne.param_table(cfg)]
        n = sum(map(math.prod, shapes[:6]))  # the matrices come first
        parts = to_bf16(flat[:n]) if weights == "bf16" else flat[:n], flat[n:]
        matrices, gains = (to_device(x) if isinstance(x, np.ndarray) else x for x in parts)
        self.p = ne.Params(*ne.slices(matrices, shapes[:6]), *ne.slices(gains, shapes[6:]))
        self.cos, self.sin = map(to_device, ne.rope_table(cfg, flat.dtype))
        self.kc, self.vc, self.scores, self.x, self.y, self.kept, self.rstd = (
            new(shape, flat.dtype) for shape in (cache, cache, (H, T), (1, C), (1, C), (1, C), 1))
        self.qkv, self.att, self.gate_up, self.swiglu, self.device_logits = (
            new(shape, flat.dtype) for shape in (QKV, H * D, (1, 2 * F), (1, F), cfg.vocab_size))
        self.at, self.graph = to_device(np.zeros(2, np.int32)), Graph()

    def queue(self):
        """One token through the network: nanoeuler.decode_step."""
        cfg, p, at, x, y = self.cfg, self.p, self.at, self.x, self.y
        flat = lambda t: view(t, 0, (t.size,))
        norm = lambda w, add=True: rmsnorm_forward(y, self.kept, self.rstd, x, w, cfg.norm_eps, add)
        embedding_forward(x, at, p.wte)
        for l in range(cfg.n_layer):
            norm(p.attn_norm[l], add=l > 0)
            matvec(self.qkv, p.qkv[l], flat(y))
            launch(rope_cache_kernel, cfg.n_head + 2 * cfg.n_kv_head, 32, self.qkv, self.kc[l],
                   self.vc[l], self.cos, self.sin, at, cfg.n_head)
            launch(attention_decode_kernel, cfg.n_head, 256, self.att, self.qkv, self.kc[l],
                   self.vc[l], self.scores, at, number(x, 1 / math.sqrt(cfg.head_dim)))
            matvec(flat(y), p.attn_proj[l], self.att)
            norm(p.mlp_norm[l])
            matvec(flat(self.gate_up), p.gate_up[l], flat(y))
            swiglu_forward(self.swiglu, self.gate_up)
            matvec(flat(y), p.down[l], flat(self.swiglu))
        norm(p.final_norm)
        head = p.wte if cfg.tie_embeddings else p.lm_head[0]
        matvec(self.device_logits, head, flat(y))

    def decode(self, token, position):
        at = np.array([token, position], np.int32)
        self.at.copy_to_device(at, stream=stream)
        self.graph(self.queue)
        return to_host(self.device_logits)

# ==== 12 Command line ====
@dataclass
class OnGpu:
    """What the GPU's stages are started with beside the CPU's options, some of which differ."""
    save_every: int = setting(5000, 1, 1 << 40, "steps between checkpoints")
    dtype: str = setting("bf16", 0, 0, "bf16, f32 or f64")
    matmul: str = setting("wgmma", 0, 0, "highest rung to use: wgmma, mma, or portable")

class Run(ne.Run):
    verb, preset, full = "t", "base", "data/pretrain.txt"

    @dataclass
    class Options(OnGpu, ne.Options):
        data: str = setting(ne.Options.data, 0, 0, "a text, UTF-8; data/pretrain.txt goes first")
        steps: int = setting(10_000, 0, 1 << 40, "length of the run; 0: by --minutes")
        batch: int = setting(32_768, 1, 1 << 40, "tokens a step")
        holdout: float = setting(0.02, 0.0001, 0.9, "tail of the text kept for validation")
        warmup: int = setting(200, 0, 1 << 40, "steps of linear warm-up")
        weight_decay: float = setting(1.0, 0, 10, "of matrices only; a text is reread")

class SftRun(ne.SftRun):
    verb, Options = "s", make_dataclass("Options", (), bases=(OnGpu, ne.SftOptions))

class DpoRun(ne.DpoRun):
    verb, Options = "d", make_dataclass("Options", (), bases=(OnGpu, ne.DpoOptions))

def on_gpu(verb, **engine):
    """The function of a verb, called if there is a GPU that answers."""
    def run(**flags):
        open_device()
        return verb(**engine, **flags)
    return run

def add_verbs(add):
    preset = arg("--preset", default=argparse.SUPPRESS, choices=list(ne.PRESETS),
                 help="size of the model (default: base)")
    learn = (preset, out("nanoeuler.bin"), *RUN)
    speak, speech = on_gpu(ne.speak, decoder=Decoder), fields(ne.Sampling)
    stage = lambda run: on_gpu(ne.launch, run=run, engine=Model)
    learning = dict(settings=fields(Run.Options), shape=ne.SHAPE)
    add("test", on_gpu(bench("self_tests", "self_tests")), "every kernel against the CPU",
        arg("--quick", action="store_true", help="without the largest shapes"))
    add("g", on_gpu(bench("self_tests", "gradient_check")), "the gradient of the whole model "
        "against the CPU", preset, arg("--batch", type=int, default=1, help="sequences"))
    add("t", stage(Run), "pretrain; writes a checkpoint and a log", *learn, **learning)
    add("tr", stage(Run), "go on with the run of t", *learn,
        **learning).set_defaults(resume=True)
    add("i", speak, "one continuation", TEXT, FILE, settings=speech)
    add("s", stage(SftRun), "fine-tune: learn to answer", FILE, out("nanoeuler_chat.bin"), *RUN,
        settings=fields(SftRun.Options), shape=ne.SHAPE[:1])
    add("d", stage(DpoRun), "tune on preferences: learn the better of two answers", CHAT,
        out("nanoeuler_dpo.bin"), *RUN, settings=fields(DpoRun.Options), shape=ne.SHAPE[:1])
    add("c", speak, "chat", CHAT, settings=speech)
    add("doctor", bench("doctor", "doctor"), "what this machine has, and what it lacks")

def main(argv=None):
    try:
        return run_verb(add_verbs, "NanoEuler on the GPU.  Without a verb: the self-tests",
                        (sys.argv[1:] if argv is None else argv) or ["test"])
    except CudaAPIError as e:
        print(f"nanoeuler: the GPU says: {e}; see: python nanoeuler_cuda.py doctor",
              file=sys.stderr)
        return 2

if __name__ == "__main__":
    import nanoeuler_cuda
    sys.exit(nanoeuler_cuda.main())
