"""NanoEuler on the GPU: the model of nanoeuler.py again, in CUDA kernels written in Numba.

The numbers of sections 1 to 6 and 9, the order of the ops and their names are those of
nanoeuler.py, which is the specification: the self-tests hold the kernels of every op against the
function of the same name there, or, products, against NumPy's.  AdamW is the only optimizer here;
runs that Muon began go on there.  Data, training loops, chat and files are imported from it.

    python nanoeuler_cuda.py                  self-tests: every op against the CPU
    python nanoeuler_cuda.py g                the gradient of the whole model against the CPU
    python nanoeuler_cuda.py t                pretrain, write nanoeuler.bin;  tr goes on with it
    python nanoeuler_cuda.py i "It was"       one continuation
    python nanoeuler_cuda.py s                fine-tune on instructions, write nanoeuler_chat.bin
    python nanoeuler_cuda.py d                learn preferences, write nanoeuler_dpo.bin
    python nanoeuler_cuda.py c                chat with nanoeuler_chat.bin
    python nanoeuler_cuda.py eval --data A    perplexity of a text;  --questions Q: accuracy
    python nanoeuler_cuda.py serve            for browsers and OpenAI's clients
    python nanoeuler_cuda.py doctor           what this machine has, and what it lacks

A residual block is an Euler step, x[i + 1] = x[i] + f(x[i]).  `residual_rmsnorm_forward` of 4.3
takes it; in 5, `forward` takes two a layer, and `backward` walks back along them.

Sections 1 to 9 are a whole engine in plain Numba, for any GPU and type; who reads them needs no
more than CUDA's threads and blocks.  9.1, which is better read after 12, makes generation fast.
nanoeuler_parts/ranks lets several GPUs train one model.  Section 12 is what makes it fast:
instructions that Numba lacks, and then the same products and the same attention once more, in
bfloat16 on tensor cores, which `matmul` of 4.1 and `attention_of` of 4.5 take where the GPU has
them.

Contents
    1    Device: kernels and launches         6    Optimizer
    2    Memory: what a run keeps             9    Inference
    3    Building blocks: numbers, sums       9.1  Rows on tensor cores: steps of a decoder
    4.1  Matmul                               12.3 Instructions: PTX, barriers, copies
    4.2  Embedding                            12.4 Tiles and tensor cores: mma, wgmma
    4.3  RMSNorm, and the Euler step          12.5 Matmul on tensor cores
    4.4  RoPE                                 12.6 Attention on tensor cores
    4.5  Attention                            12.7 Self-tests
    4.6  SwiGLU                               13   Command line
    4.7  Cross-entropy
    4.8  Biases and norms of q and k
    5    Model: forward, heads, backward

Shapes  As in nanoeuler.py: B batch, T time, C n_embd, H n_head, G n_kv_head, D head_dim,
        F n_hidden, V vocab_size, L n_layer, P n_mtp.  Here the batch is flat: BT = B * T rows,
        row b * T + t.  HD = H D and QKV = (H + 2 G) D are the columns of all heads; R rows of
        logits are in memory at a time; a thread loads W neighbours at once.
Types   Kernels take their dtype from their arguments: bfloat16, float32 or float64.  All of them
        train; float64 is for proofs.  bfloat16 is stored as uint16 and computed with in float32:
        ctype(x) is the type to compute in, value() what a stored number stands for, stored() a
        result rounded to the array's type, vector() loads and stores several at once.  Master
        weights, moments, gradients of weights and norms are float32 then.  A literal is made with
        ctype(x).type(0): a bare 0.0 is a float64 and drags a float32 kernel with it.
Names   Of section 3, a thread has `few` neighbours of a row, `acc` are sums in registers, `_smem`
        is shared memory; `lane` of 32 in a warp, `warp` in a block.  An op's launcher has the name
        of its function in nanoeuler.py, its kernels are made once for each shape they know.  In 4.5
        and 12.6 P, S and dS are the matrices of the papers, p an entry; elsewhere p is parameters.
Order   Each number is summed in one order, by one thread or by blocks that take turns.  Two runs
        on one kind of GPU, with as many sequences at a time, give the same bits.
"""
import argparse
import bisect
import contextlib
import functools
import gc
import importlib.metadata
import importlib.util
import itertools
import json
import math
import operator
import os
import struct
import subprocess
import sys
import time
import traceback
from collections import namedtuple
from dataclasses import dataclass, fields, make_dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

from nanoeuler_parts.gpu.doctor import (
    HERE, links_found, NCCL, nccl_found, ON_CPU, PIP, report,
)
from nanoeuler_parts.gpu.place import PLACE, visible

# As a program, this file imports itself as a module, as nanoeuler.py does, and calls its `main`.
if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))   # first, even under python -P
    try:
        import nanoeuler_cuda
    except ImportError as e:                 # of the packages below
        if not {"-h", "--help"} & {*sys.argv[1:]}:
            sys.exit(report(e))
        print(__doc__.partition("\n\nContents")[0].replace("python nanoeuler_cuda.py", HERE))
        print(f"\nNone of them but doctor can run here: {e}")
        sys.exit(0)
    sys.exit(nanoeuler_cuda.main())

if PLACE.size > 1:                           # before CUDA is asked for the first time
    os.environ["CUDA_VISIBLE_DEVICES"] = visible(PLACE, os.environ)

# The rest of the file cannot even be compiled without numba-cuda: say so, and not by a traceback.
try:
    import numpy as np

    import bpe
    import nanoeuler as ne
    from nanoeuler import MODEL, RUN, UserError, arg, need
    from nanoeuler_parts.machine.numbers import from_bf16, to_bf16
    from nanoeuler_parts.tuning import dpo, sft

    need(importlib.util.find_spec("numba_cuda"), "numba-cuda is not installed")
    need(importlib.metadata.version("numba-cuda").startswith("0.30."),
         "this program knows numba-cuda 0.30, whose private parts nanoeuler_parts/gpu uses")
    from cuda.bindings import driver
    from llvmlite import ir
    from numba import cuda, types
    from numba.core import cgutils
    from numba.cuda.np import arrayobj       # what a too new NumPy breaks first
    from numba.cuda.cudadrv.devicearray import DeviceNDArray
    from numba.cuda.cudadrv.driver import CudaAPIError
    from numba.cuda.extending import intrinsic
    from numba.cuda.libdevice import fast_fdividef, float_as_int, fmul_rn, rsqrtf

    from nanoeuler_parts.gpu.launches import (
        at_most, cuda_kernel, gpu, gpus_here, Graph, inlined, launch, made_once, ok, overlapping,
        PATHS,
    )
    from nanoeuler_parts.gpu.numbers import (
        asm, ctype, elements, exp, exp2, f32, f64, i32, i64, LOG2E, memory, stored, u16, u32, u64,
        value, vector,
    )
except (NameError, SyntaxError):             # a fault of these files, not of what is installed
    raise
except Exception as e:                       # NumPy 2.5 with numba-cuda 0.30: an AttributeError
    kind = "" if type(e).__name__ in ("UserError", "ModuleNotFoundError") else (
        f"{type(e).__name__}: ")
    raise ImportError(f"{kind}{e}; repair it with: {PIP}") from e

# ==== 1 Device ====
# A kernel is a function that each thread of a grid of blocks runs by itself.  To launch one,
#
#     launch(sum_rows_kernel, out, x, grid=C, block=256)
#
# is CUDA's sum_rows_kernel<<<C, 256, 0, stream>>>(out, x): C blocks of 256 threads each.  Numba
# compiles it at the first launch, for the types of these arguments.  Below, in a kernel:
#
#     cuda.blockIdx.x, cuda.threadIdx.x     which block, and which of its threads, this is
#     lane, warp                            threadIdx.x % 32 and // 32; a warp's lanes run in step
#     cuda.local.array(n, dtype)            a thread's own numbers: registers, where all indices are
#                                           known when compiling, as those of `for i in range(8)`
#     cuda.shared.array(n, dtype)           the block's; n = 0: what the launch asks for, by `smem`
#     cuda.syncthreads()                    waits for all threads of the block
def gpu_problem():
    """Why no kernel can run on this machine, with the remedy, or "" if one can."""
    cuda.config.CUDA_LOW_OCCUPANCY_WARNINGS = 0          # small tests launch small grids
    remedy = ("The GPU modes need an NVIDIA GPU and its driver, version 580 or newer; the CPU "
              f"program does the same: {ON_CPU} --help")
    try:
        cuda.current_context()
        remedy = f"There is a GPU, but no kernel can be made for it; repair it with: {PIP}"
        total, numbers = (cuda.to_device(np.zeros(1)) for _ in range(2))
        square_sums_kernel[1, 256](total, numbers)
        total.copy_to_host()                 # a launch returns before its errors show
        return ""
    except Exception as e:                   # the driver's absence has many faces
        if "OUT_OF_MEMORY" in str(e):
            remedy = "Another program has the memory of the GPU; nvidia-smi says which."
        lines = [line.strip() for line in str(e).splitlines() if line.strip()] or [repr(e)]
        return f"{' '.join(lines[:2])} {remedy}"

def open_device():
    if gpu.stream is None:
        if problem := gpu_problem():
            raise UserError(problem)
        gpu.stream = cuda.stream()

def cdiv(n, size):
    """n / size, rounded up: how many blocks of this size cover n"""
    return -(-n // size)

def kernel_path():
    """The highest of PATHS that this GPU has, and that may be used just now."""
    capability = cuda.get_current_device().compute_capability
    top = "portable"
    if capability >= (8, 0):
        top = "mma"
    if capability == (9, 0):                 # newer ones have other instructions instead
        top = "wgmma"
    return min(top, gpu.highest, key=PATHS.index)

def has(dtype):
    """Whether the GPU can round to it: bfloat16 came with capability 8.0."""
    return dtype != "bf16" or cuda.get_current_device().compute_capability >= (8, 0)

# ==== 2 Memory ====
DTYPES = {"bf16": np.dtype(np.uint16), "f32": np.dtype(np.float32), "f64": np.dtype(np.float64)}
NAMES = {DTYPES["bf16"]: "bfloat16", DTYPES["f32"]: "float32", DTYPES["f64"]: "float64"}

def computing(dtype):
    """The type of sums, norms and master weights: float32 for bfloat16."""
    return np.dtype(np.float32) if dtype == np.uint16 else dtype

def rows_a_chunk(cfg, BT, itemsize):
    """Rows of logits in memory at once, all heads together: at most 384 MB of them, and such that
    tiles of 128 x 256 of their product with lm_head, C wide, come in whole rounds."""
    rows = (384 << 20) // (cfg.n_mtp * cfg.vocab_size * itemsize)
    across = -(-cfg.n_embd // 256)           # tiles; a round is one tile a multiprocessor
    rows_a_round = 128 * max(1, cuda.get_current_device().MULTIPROCESSOR_COUNT // across)
    if rows > rows_a_round:
        rows -= rows % rows_a_round
    return min(BT, max(128, rows))

def buffer_table(cfg, B, T, dtype, kept=None):
    """(group, name, shape, dtype) of everything a training step keeps on the device.

    a: activations that the backward pass reads; x is the trajectory x[i + 1] = x[i] + f_i(x[i]),
    which advances in `state`, in the type of sums: a step is small beside x, and would be lost in
    the rounding of bfloat16.
    d: gradients of activations.  Weights get theirs at once, so one layer's worth is enough.
    kept: layers whose insides are there at once; all, or 1 if backward makes them again."""
    C, F, V, L, P = cfg.n_embd, cfg.n_hidden, cfg.vocab_size, cfg.n_layer, cfg.n_mtp
    H, D, BT = cfg.n_head, cfg.head_dim, B * T
    HD, QKV, R = H * D, (H + 2 * cfg.n_kv_head) * D, rows_a_chunk(cfg, BT, dtype.itemsize)
    K, qk_heads = kept or L, cfg.n_head + cfg.n_kv_head
    a = [("x", (2 * L + 1, BT, C)),          # the trajectory, as backward reads it
         ("qkv", (K, BT, QKV)),              # after RoPE
         ("att", (K, BT, HD)),               # the heads' outputs
         ("gate_up", (K, BT, 2 * F)),        # becomes its own gradient
         ("swiglu", (K, BT, F)),
         ("y", (BT, C)),                     # a block's normalized input, then its output
         ("logits", (R, P * V))]             # of R rows; become their own gradient
    d = [("x", (BT, C)),                     # walks back along the trajectory
         ("y", (BT, C)),                     # of a normalized input; then that input, made again
         ("qkv", (BT, QKV)),
         ("att", (BT, HD)),
         ("swiglu", (BT, F))]
    a_sums = [("attn_rstd", (L, BT)), ("mlp_rstd", (L, BT)), ("final_rstd", (BT,)),   # of RMSNorm
              ("state", (BT, C)),            # the trajectory's newest point, not rounded
              ("nll", (P, BT)),              # the losses
              ("lse", (K, H, BT))]           # log of the sum of a softmax row
    d_sums = [("partial", (PARTS, C)),       # sums of a gain's gradient
              ("delta", (H, BT))]            # <dO, O>, in attention
    if cfg.qk_norm:                          # 4.8
        a += [("qk", (K, BT, qk_heads * D))]             # q and k before their norms
        a_sums += [("qk_rstd", (K, BT, qk_heads))]
        d_sums += [("qk_partial", (PARTS * ROWS, 2 * D))]        # as partial
    if cfg.qkv_bias:
        d_sums += [("bias_partial", (PARTS, QKV))]
    sums = computing(dtype)
    groups = (("a", a, dtype), ("a", a_sums, sums), ("d", d, dtype), ("d", d_sums, sums))
    return [(group, name, shape, kind) for group, table, kind in groups for name, shape in table]

def memory_table(cfg, B, T, dtype, buffers=buffer_table, kept=None):
    """(what, bytes) on the device, B sequences of T tokens at a time.  Samples: what `decoder`
    takes as long as a run shows what its model says: a copy of the parameters, a cache, and what
    9.1 works with."""
    bytes_of = {"a": 0, "d": 0, "logits": 0}
    for group, name, shape, kind in buffers(cfg, B, T, dtype, kept):
        if name == "logits":
            group = "logits"
        bytes_of[group] += math.prod(shape) * kind.itemsize
    n, size = ne.n_params(cfg), computing(dtype).itemsize
    return [("parameters", n * size), ("gradients", n * size), ("AdamW moments", 2 * n * size),
            ("bfloat16 copies", 2 * n if dtype == np.uint16 else 0),
            ("activations", bytes_of["a"]), ("their gradients", bytes_of["d"]),
            ("logits", bytes_of["logits"]), ("tokens", 4 * B * T * (1 + cfg.n_mtp)),
            ("samples", n * dtype.itemsize + size * (
                2 * cfg.n_layer * cfg.n_kv_head * cfg.seq_len * cfg.head_dim)
             + (rows_bytes(cfg) if dtype == np.uint16 else 0))]

HELD = ("parameters", "gradients", "AdamW moments", "bfloat16 copies",       # whatever the batch
        "others' gradients")                 # of several GPUs

class Needs(NamedTuple):
    """The bytes of a memory_table"""
    held: int                                # by a model, whatever the batch
    batch: int
    samples: int                             # now and then

def needs_of(table):
    held, sizes = sum(size for name, size in table if name in HELD), dict(table)
    return Needs(held, sum(sizes.values()) - held - sizes["samples"], sizes["samples"])

# ---- arrays on the device
def new(shape, dtype):
    return cuda.device_array(shape, dtype, stream=gpu.stream)

def free_bytes():
    """What the driver has left of the device's memory."""
    free, _ = cuda.current_context().get_memory_info()
    return free

def release_garbage():
    """Gives the driver back what arrays had that nobody has any more."""
    gc.collect()
    cuda.current_context().deallocations.clear()

def to_device(x, dtype=None):
    x = np.ascontiguousarray(x, dtype)
    out = cuda.to_device(x, stream=gpu.stream)
    gpu.stream.synchronize()                 # the driver may still read x until then
    return out

def to_host(x):
    """A copy, whole when this returns: all that was queued before is done."""
    out = x.copy_to_host(stream=gpu.stream)
    gpu.stream.synchronize()
    return out

def view(x, start, shape, strides=None):
    """Elements `start` and on of device array x as (shape); strides in elements.  No copy."""
    size = x.dtype.itemsize
    strides = strides or [math.prod(shape[i + 1:]) for i in range(len(shape))]
    return DeviceNDArray(shape, [s * size for s in strides], x.dtype, gpu.stream,
                         x.gpu_data.view(start * size))

def number(x, v):
    """A scalar argument of a kernel on x, of the type it computes in."""
    return np.float64(v) if x.dtype == np.float64 else np.float32(v)

def transposed(x):
    """(..., M, N) as (..., N, M); no copy."""
    *others, rows, columns = x.shape
    *other_strides, row_stride, column_stride = (s // x.dtype.itemsize for s in x.strides)
    return view(x, 0, (*others, columns, rows), (*other_strides, column_stride, row_stride))

# ==== 3 Building blocks ====
# How a kernel meets numbers, whatever type its arrays have.  nanoeuler_parts/gpu/numbers.py makes
# these functions:
#
#     ctype(x)                   the type to compute in; ctype(x).type(0) is its zero
#     value(x[i])                the number that a stored one stands for
#     stored(x, v)               v as the array x keeps it, rounded
#     load, store = vector(W)    v = load(x, i) are the W neighbours x[i], .., x[i + W - 1] of flat
#                                memory, in one access or a few, and store(x, i, v) writes them
#     exp(v), exp2(v)            e^v, and 2^v, which the hardware has
WARP, ALL = 32, 0xFFFFFFFF                   # lanes; the mask of all of them

def width(*sizes):
    """8 elements at a time where all rows have whole eights, else one."""
    return 8 if all(n % 8 == 0 for n in sizes) else 1

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

# ==== 4.1 Matmul ====
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

TILE, DEPTH = 128, 16                        # rows and columns of a tile of out; k at a time
STRIDE = TILE + 4                            # from k to k: 16 of one row are in 8 banks, not in 1
SMEM = DEPTH * STRIDE
tile8x8 = register_tile(8, 8)

@cuda_kernel
def matmul_kernel(out, a, b, add):
    """out[z, h] = add * out[z, h] + a[z, h'] b[z, h'],  h' = h * H' / H: grouped heads share.

    One block of (16, 16) threads per 128 x 128 of out.   grid (N / 128, M / 128, Z * H)
    out (Z, H, M, N), a (Z, H', M, K), b (Z, H'', K, N) of any strides

    16 k at a time, 128 rows of A and 128 columns of B go through shared memory: each number is read
    from device memory once a block, and not once a row or column.  A thread has 8 x 8 of the sums
    in registers, rows 8 y to 8 y + 7, columns x, x + 16, ..; the next 16 k are on their way into
    registers while it multiplies."""
    a_smem, b_smem = cuda.shared.array(SMEM, ctype(a)), cuda.shared.array(SMEM, ctype(a))
    zero, H = ctype(a).type(0), out.shape[1]
    z, h = cuda.blockIdx.z // H, cuda.blockIdx.z % H
    A, B = a[z, h * a.shape[1] // H], b[z, h * b.shape[1] // H]
    C = out[z, h]
    (M, N), K = C.shape, A.shape[1]
    m0, n0 = cuda.blockIdx.y * TILE, cuda.blockIdx.x * TILE
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    t = 16 * y + x
    # Each thread fetches eight numbers of a tile of 128 rows or columns (m or n) times 16 k: where
    # the first is, (m or n, k), and the steps of both to the next.  Neighbouring threads read
    # neighbours in memory, whether those lie along m or n, or along k.
    along_mn, along_k = (t % 128, t // 128, 0, 2), (t // 16, t % 16, 16, 0)
    am, ak, am_step, ak_step = along_k if A.strides[1] == A.itemsize else along_mn
    bn, bk, bn_step, bk_step = along_k if B.strides[0] == B.itemsize else along_mn
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
    launch(matmul_kernel, out, a, b, add, grid=(cdiv(N, TILE), cdiv(M, TILE), Z * H),
           block=(16, 16))

def wide(x):
    """A matrix as (1, 1, M, N); what has four dimensions as it is."""
    if x.ndim != 2:
        return x
    anything = 1 << 20                       # the stride of a dimension of one
    strides = [s // x.dtype.itemsize for s in x.strides]
    return view(x, 0, (1, 1, *x.shape), (anything, anything, *strides))

def matmul(out, x, w):
    """out = x w^T     out (M, N), x (M, K), w (N, K)"""
    if tensor_cores(out, x, w):
        return tensor_matmul(out, x, w, False, False)
    batched_matmul(out, x, transposed(w))

def matmul_dx(dx, dy, w, add=False):
    """dx = [dx +] dy w     dx (M, K), dy (M, N), w (N, K)"""
    if tensor_cores(dx, dy, w) and not add:              # they add to float32 only, dx is bfloat16
        return tensor_matmul(dx, dy, w, False, True)
    batched_matmul(dx, dy, w, add)

def matmul_dw(dw, dy, x, semaphores):
    """dw += dy^T x     dw (N, K), dy (M, N), x (M, K)     semaphores: zeros, before and after"""
    if tensor_cores(dy, x) and int(dw.gpu_data.device_pointer) % 16 == 0:
        return tensor_matmul(dw, dy, x, True, True, semaphores)
    batched_matmul(dw, transposed(dy), x, add=True)

# ==== 4.2 Embedding ====
@cuda_kernel
def embedding_forward_kernel(x, tokens, wte):
    """x[bt] = wte[tokens[bt]]     one block a row, threads stride the columns"""
    bt = cuda.blockIdx.x
    token = tokens[bt]
    for c in range(cuda.threadIdx.x, x.shape[1], cuda.blockDim.x):
        x[bt, c] = stored(x, value(wte[token, c]))

def embedding_forward(x, tokens, wte):
    launch(embedding_forward_kernel, x, tokens, wte, grid=len(x), block=128)

@made_once
def embedding_backward_kernel(W, N):
    load, _ = vector(W)
    load_ids, _ = vector(N)

    @cuda_kernel
    def backward(dwte, dx, tokens):
        """dwte[v] += sum over bt with tokens[bt] = v of dx[bt], always in the same order

        One block of 8 warps per v and 32 W columns, W a lane.  Each warp looks through an eighth of
        the tokens, N a lane; ballots say where v stands; it adds those rows.  Then the warps' sums
        are added."""
        sums = cuda.shared.array((8, 256), ctype(dx))    # of each warp, [w, 32 i + lane]
        acc = filled(W, ctype(dx).type(0))
        v, groups, C, found = cuda.blockIdx.x, tokens.size // N, dx.shape[1], 0
        lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        c = (32 * cuda.blockIdx.y + lane) * W
        first, last = warp * groups // 8, (warp + 1) * groups // 8
        for i in range(first, last, 32):
            ids = load_ids(tokens, min(i + lane, last - 1) * N)
            here = False                     # whether v is among this lane's tokens
            for n in range(N):
                here |= ids[n] == v
            if cuda.any_sync(ALL, i + lane < last and here):
                for n in range(N):
                    hits = cuda.ballot_sync(ALL, i + lane < last and ids[n] == v) & ALL   # unsigned
                    while hits:              # the lanes whose n-th token is v, the lowest first
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
    launch(backward, dwte, dx, tokens, grid=(V, cdiv(C, 32 * W)), block=256)

# ==== 4.3 RMSNorm ====
ROWS = 8                                     # warps of a block where a warp owns a row
PARTS = 4 * 132                              # blocks, and partial sums, of a gain's gradient: a
                                             # fixed number, since the order of sums hangs on it

@made_once
def rmsnorm_kernels(C, W):
    """residual_forward and backward.  A warp has a row of C in its registers: CHUNKS times W
    neighbours a lane.  Lanes beyond the row's end load its last W, and do not count them.  Of rows
    of more than 1,024 backward keeps some numbers in memory, which takes longer."""
    CHUNKS = -(-C // (WARP * W))
    KEPT = CHUNKS * W
    load, store = vector(W)

    @cuda_kernel
    def residual_forward(y, saved, rstd, x, w, eps, step):
        """The Euler step, where `step`:  x[i + 1] = x[i] + f(x[i]),  with f(x[i]) in y.  Then the
        norm of where it led:  rstd = 1 / sqrt(mean_c(x^2) + eps),  y = x * rstd * w, over f(x[i]).

        x is the trajectory's newest point, in the type of sums; saved is x as backward reads it.
        One warp per row.     grid BT / ROWS, block (32, ROWS)
        y, saved, x (BT, C), rstd (BT,), w (C,)"""
        v, ss, one = cuda.local.array(KEPT, ctype(x)), ctype(x).type(0), ctype(x).type(1)
        lane, bt = cuda.threadIdx.x, cuda.blockIdx.x * ROWS + cuda.threadIdx.y
        if bt < x.shape[0]:                  # for a whole warp or for none: shuffles are legal
            for j in range(CHUNKS):          # neighbours read neighbours: coalesced
                c = (WARP * j + lane) * W
                at = bt * C + min(c, C - W)
                few = load(x, at)            # x[i]
                if step:
                    f = load(y, at)
                    for i in range(W):
                        few[i] += f[i]       # x[i + 1] = x[i] + f(x[i])
                    if c < C:
                        store(x, at, few)
                for i in range(W):
                    v[j * W + i] = few[i]
                    ss += few[i] * few[i] if c < C else ctype(x).type(0)
                if c < C:
                    store(saved, at, few)
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

    @cuda_kernel
    def backward(dx, dy, partial, x, w, rstd):
        """u = x * rstd:   dx += rstd * (w*dy - u * mean_c(w*dy*u)): the adjoint of the Euler step.
        dx holds the gradient of x[i + 1], which passes f by, and gets what comes through f.
        partial[i, c] = sum of dy * u over the rows of block i.
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
                    # into what x and dy were loaded to: the new dx and y
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
    return residual_forward, backward

@made_once
def normalized_kernel(C, W):
    load, store = vector(W)

    @cuda_kernel
    def normalized(y, x, rstd, w):
        """y = x * rstd * w: what residual_forward made, from what it saved     grid 1,024 blocks
        y, x (BT, C), rstd (BT,), w (C,)"""
        for i in range(cuda.grid(1), y.size // W, cuda.gridsize(1)):
            few, gain, r = load(x, i * W), load(w, i * W % C), rstd[i * W // C]
            for j in range(W):
                few[j] = few[j] * gain[j] * r
            store(y, i * W, few)
    return normalized

@cuda_kernel
def sum_rows_kernel(out, x):
    """out[n] += sum_i x[n, i], in the type of out     one block of 256 threads per row"""
    n, s = cuda.blockIdx.x, out.dtype.type(0)
    for i in range(cuda.threadIdx.x, x.shape[1], 256):
        s += x[n, i]
    s = block_sum(s)
    if cuda.threadIdx.x == 0:
        out[n] += s

def rmsnorm_forward(y, saved, rstd, x, w, eps, step=False):
    """y = x * rstd * w, saved = x"""
    residual_forward, _ = rmsnorm_kernels(x.shape[1], width(x.shape[1]))
    launch(residual_forward, y, saved, rstd, x, w, number(x, eps), step,
           grid=cdiv(len(x), ROWS), block=(WARP, ROWS))

def residual_rmsnorm_forward(f, saved, rstd, x, w, eps):
    """The Euler step  x[i + 1] = x[i] + f(x[i]),  in place of x[i], and then, in place of f, the
    norm of where it led, as rmsnorm_forward."""
    rmsnorm_forward(f, saved, rstd, x, w, eps, step=True)

def rmsnorm_again(y, x, w, rstd):
    """y = x * rstd * w, of a norm that was taken before"""
    C = x.shape[1]
    launch(normalized_kernel(C, width(C)), y, x, rstd, w, grid=1024, block=256)

def rmsnorm_backward(dx, dw, dy, partial, x, w, rstd):
    """dx += ..., dw += sum_bt dy * u.  Returns dy, which is no gradient any more, but y.
    partial (PARTS, C) is scratch"""
    C, size = x.shape[1], partial.dtype.itemsize
    warps = max(1, min(4, (48 << 10) // (C * size)))
    _, backward = rmsnorm_kernels(C, width(C))
    launch(backward, dx, dy, partial, x, w, rstd, grid=PARTS, block=(WARP, warps),
           smem=warps * C * size)
    launch(sum_rows_kernel, dw, transposed(partial), grid=C, block=256)
    y = dy
    return y

# ==== 4.4 RoPE ====
@made_once
def rope_kernel(W):
    load, store = vector(W)

    @cuda_kernel
    def rotate(qkv, cos, sin, T, heads, sign):
        """Rotates pair (i, i + D/2) of the first `heads` heads of row bt by sign * angle[bt % T,
        i], in place     one block a row, a thread W pairs     math: nanoeuler.rope"""
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
    return rotate

def rope(qkv, cos, sin, T, heads, sign):
    W = width(cos.shape[1], qkv.shape[1])
    threads = min(256, -(-heads * cos.shape[1] // (32 * W)) * 32)
    launch(rope_kernel(W), qkv, cos, sin, T, heads, number(qkv, sign), grid=len(qkv), block=threads)

# ==== 4.5 Attention ====
# FlashAttention (Dao 2022; the row-wise split over blocks is FlashAttention-2's, Dao 2023): a block
# keeps N query rows and walks over the keys, N at a time, with a running maximum m and sum l of
# each row.  No T x T matrix, and tiles beyond the diagonal are never touched.  128 threads as
# (16, 8): thread (x, y) owns rows y * N/8 + i and columns x + 16 j of every N x N or N x D tile.
# Tiles lie in shared memory in rows of D + 1 or N + 1, so that a column hits 32 banks.

class Attention(NamedTuple):
    """The kernels of one head size, and how they are launched."""
    forward: object
    dq: object
    dkv: object
    rotates: bool                            # whether dq and dkv rotate their results back (RoPE)
    block: object                            # threads, of all three
    rows: int                                # query rows of a block of forward
    back_rows: int                           # query rows of a block of dq, keys of one of dkv
    smem: int                                # bytes of dynamic shared memory of forward
    back_smem: int                           # and of dq and dkv

@made_once
def portable_attention(D, itemsize, room, window=0):
    """The kernels for head size D; N is the largest tile with which backward fits into that many
    bytes of shared memory.  window: token t attends to the tokens t - window + 1 to t; 0: to all
    tokens up to t."""
    D_PAD = -(-D // 16) * 16                 # D filled with zeros to whole tiles
    D_ROW = D_PAD + 1                        # from row to row of Q, K, V, dO in shared memory
    N = 64
    while (4 * N * D_ROW + 2 * N * (N + 1)) * itemsize > room:
        N //= 2
    need(N >= 16, f"head_dim {D} is too large: its tiles do not fit into shared memory")
    P_ROW = N + 1                            # from row to row of P, dS
    ROWS, KEYS, COLS = N // 8, N // 16, D_PAD // 16      # of a thread, in N x N, in N x D tiles
    NKEYS, NCOLS = ROWS * KEYS, ROWS * COLS
    # where tiles begin in shared memory: Q, K, V, P; of backward also dS and dO
    Q_AT, K_AT, V_AT, P_AT = 0, N * D_ROW, 2 * N * D_ROW, 3 * N * D_ROW
    DS_AT, DO_AT = P_AT + N * P_ROW, P_AT + 2 * N * P_ROW
    score_tile, out_tile = register_tile(ROWS, KEYS), register_tile(ROWS, COLS)

    @inlined
    def first_tile(t0):
        """The first key of the first tile that the rows from t0 on see"""
        return max(0, t0 + 1 - window) // N * N if window else 0

    @inlined
    def load_rows(smem, tile, src, row0, t, T, col):
        """smem[tile + r * D_ROW + d] = src[row0 + t + r, col + d], N rows; zeros from t + r = T and
        from column D on."""
        row, n = row0 + t, T - t
        for i in range(16 * cuda.threadIdx.y + cuda.threadIdx.x, N * D_PAD, 128):
            r, d, v = i // D_PAD, i % D_PAD, ctype(src).type(0)
            if r < n and d < D:
                v = value(src[row + r, col + d])
            smem[tile + r * D_ROW + d] = v

    # The three products of attention, of the sums that thread (x, y) has
    @inlined
    def add_abt(s, smem, a, b, x, y):
        """s += A B^T, N x N: of Q, dO with K, V"""
        score_tile(s, smem, a + y * ROWS * D_ROW, D_ROW, 1, smem, b + x * D_ROW, 1, D_ROW, D_PAD)

    @inlined
    def add_ab(acc, smem, a, b, x, y):
        """acc += A B, N x D: of P, dS with V, K"""
        out_tile(acc, smem, a + y * ROWS * P_ROW, P_ROW, 1, smem, b + x, D_ROW, 1, N)

    @inlined
    def add_atb(acc, smem, a, b, x, y):
        """acc += A^T B, N x D: of P, dS with dO, Q"""
        out_tile(acc, smem, a + y * ROWS, 1, P_ROW, smem, b + x, D_ROW, 1, N)

    @cuda_kernel
    def forward(o, lse, qkv, T, G, scale):
        """o = softmax(Q K^T / sqrt(D)) V, causal     math: nanoeuler.attention_forward
        One block per N query rows of a head.     grid (T / N, H, B), block (16, 8)
        out: o (BT, HD), lse (H, BT)     in: qkv (BT, QKV)"""
        smem, zero = cuda.shared.array(0, ctype(qkv)), ctype(qkv).type(0)
        m, l = filled(ROWS, -ctype(qkv).type(math.inf)), filled(ROWS, zero)
        acc = filled(NCOLS, zero)
        x, y, row0 = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockIdx.z * T
        h, H = cuda.blockIdx.y, cuda.gridDim.y
        t0 = (cuda.gridDim.x - 1 - cuda.blockIdx.x) * N              # the longest rows first
        k_col = o.shape[1] + h * G // H * D
        load_rows(smem, Q_AT, qkv, row0, t0, T, h * D)
        for k0 in range(first_tile(t0), t0 + 1, N):
            cuda.syncthreads()               # the last product is done with K, V and P
            load_rows(smem, K_AT, qkv, row0, k0, T, k_col)
            load_rows(smem, V_AT, qkv, row0, k0, T, k_col + G * D)
            cuda.syncthreads()               # Q, K, V are whole
            s = filled(NKEYS, zero)
            add_abt(s, smem, Q_AT, K_AT, x, y)           # S = Q K^T
            for i in range(ROWS):
                r, top = y * ROWS + i, m[i]
                for j in range(KEYS):
                    v = s[i * KEYS + j] * scale
                    if k0 + x + 16 * j > t0 + r:
                        v = -ctype(qkv).type(math.inf)
                    if window and k0 + x + 16 * j <= t0 + r - window:
                        v = -ctype(qkv).type(1e30)       # finite: it may be all that a row has so
                                                         # far, and exp(v - top) must be a number
                    s[i * KEYS + j] = v
                    top = max(top, v)
                top = half_warp_max(top)
                shrink = exp(m[i] - top)
                m[i] = top
                l[i] *= shrink
                for j in range(KEYS):
                    p = exp(s[i * KEYS + j] - top)
                    l[i] += p
                    smem[P_AT + r * P_ROW + x + 16 * j] = p
                for j in range(COLS):
                    acc[i * COLS + j] *= shrink
            cuda.syncthreads()               # P is whole
            add_ab(acc, smem, P_AT, V_AT, x, y)          # O += P V
        for i in range(ROWS):
            t, total = t0 + y * ROWS + i, half_warp_sum(l[i])
            if t < T:
                for j in range(COLS):
                    if x + 16 * j < D:
                        o[row0 + t, h * D + x + 16 * j] = stored(o, acc[i * COLS + j] / total)
                if x == 0:
                    lse[h, row0 + t] = m[i] + math.log(total)

    def backward(keys):
        @cuda_kernel
        def run(dqkv, delta, do, o, lse, qkv, cos, sin, T, HD, scale):
            """P = exp(Q K^T / sqrt(D) - lse),   dS = P * (dO V^T - delta) / sqrt(D)

            dQ = dS K, and delta = <dO, O>     One block per N query rows of a head, as forward.
            Or, `keys`: dK = sum_h dS^T Q,  dV = sum_h P^T dO     One block per N keys of a
            key/value head: it walks over the query heads of its group, their rows from the diagonal
            on.     grid (T / N, H or G, B), block (16, 8)     in: do (BT, HD), lse (H, BT)
            out: the q columns of dqkv (BT, QKV), delta (H, BT), or the columns of k and v"""
            smem, zero = cuda.shared.array(0, ctype(qkv)), ctype(qkv).type(0)
            dqk, dv = filled(NCOLS, zero), filled(NCOLS, zero)       # of dQ or dK, of dV
            x, y, row0 = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockIdx.z * T
            H, G = HD // D, (qkv.shape[1] - HD) // (2 * D)
            if keys:                         # its keys; it walks over the rows that see them
                g = cuda.blockIdx.y
                mine = cuda.blockIdx.x * N
                first_head = g * H // G
                end_head = (g + 1) * H // G
                first_other = mine
                end_other = min(T, mine + N - 1 + window) if window else T
            else:                            # its rows; it walks over the keys that they see
                first_head = cuda.blockIdx.y
                mine = (cuda.gridDim.x - 1 - cuda.blockIdx.x) * N    # the longest rows first
                g = first_head * G // H
                end_head = first_head + 1
                first_other = first_tile(mine)
                end_other = mine + 1
            k_col, v_col = HD + g * D, HD + (G + g) * D
            if keys:
                load_rows(smem, K_AT, qkv, row0, mine, T, k_col)
                load_rows(smem, V_AT, qkv, row0, mine, T, v_col)
            else:
                load_rows(smem, Q_AT, qkv, row0, mine, T, first_head * D)
                load_rows(smem, DO_AT, do, row0, mine, T, first_head * D)
                lane = (16 * y + x) % WARP
                for t in range(mine + (16 * y + x) // WARP, min(mine + N, T), 4):
                    total = zero             # a warp per row
                    for i in range(first_head * D + lane, first_head * D + D, WARP):
                        total += value(do[row0 + t, i]) * value(o[row0 + t, i])
                    total = warp_sum(total)
                    if lane == 0:
                        delta[first_head, row0 + t] = total
            for h in range(first_head, end_head):
                for n in range(first_other, end_other, N):
                    cuda.syncthreads()       # the last products are done with the other tiles
                    if keys:
                        load_rows(smem, Q_AT, qkv, row0, n, T, h * D)
                        load_rows(smem, DO_AT, do, row0, n, T, h * D)
                    else:
                        load_rows(smem, K_AT, qkv, row0, n, T, k_col)
                        load_rows(smem, V_AT, qkv, row0, n, T, v_col)
                    cuda.syncthreads()       # Q, dO, K, V are whole, and delta
                    t0, k0 = (n, mine) if keys else (mine, n)
                    s, dp = filled(NKEYS, zero), filled(NKEYS, zero)
                    add_abt(s, smem, Q_AT, K_AT, x, y)               # S = Q K^T
                    add_abt(dp, smem, DO_AT, V_AT, x, y)             # dP = dO V^T
                    for i in range(ROWS):
                        r = y * ROWS + i
                        t = min(t0 + r, T - 1)
                        row_lse, row_delta = lse[h, row0 + t], delta[h, row0 + t]
                        for j in range(KEYS):
                            key, p = x + 16 * j, zero
                            seen = k0 + key <= t and t0 + r < T
                            if window:
                                seen = seen and k0 + key > t - window
                            if seen:
                                p = exp(s[i * KEYS + j] * scale - row_lse)
                            smem[P_AT + r * P_ROW + key] = p
                            smem[DS_AT + r * P_ROW + key] = (
                                p * (dp[i * KEYS + j] - row_delta) * scale)
                    cuda.syncthreads()       # P and dS are whole
                    if keys:
                        add_atb(dv, smem, P_AT, DO_AT, x, y)         # dV += P^T dO
                        add_atb(dqk, smem, DS_AT, Q_AT, x, y)        # dK += dS^T Q
                    else:
                        add_ab(dqk, smem, DS_AT, K_AT, x, y)         # dQ += dS K
            col = k_col if keys else first_head * D
            for i in range(ROWS):
                t = mine + y * ROWS + i
                for j in range(COLS):
                    if t < T and x + 16 * j < D:
                        dqkv[row0 + t, col + x + 16 * j] = stored(dqkv, dqk[i * COLS + j])
                        if keys:
                            dqkv[row0 + t, v_col + x + 16 * j] = stored(dqkv, dv[i * COLS + j])
        return run

    return Attention(forward, dq=backward(keys=False), dkv=backward(keys=True), rotates=False,
                     block=(16, 8), rows=N, back_rows=N,
                     smem=(3 * N * D_ROW + N * P_ROW) * itemsize,
                     back_smem=(4 * N * D_ROW + 2 * N * P_ROW) * itemsize)

def attention_of(D, window, *matrices):
    """The kernels for head size D, those of section 12.6 where they can, and the matrices, or what
    these want to know of them, their tensor maps.  Section 12.6 has no windows."""
    is_plain = matrices[0].dtype != np.uint16 or kernel_path() == "portable"
    if is_plain or window or D not in FAST_HEADS:
        room = min(99 << 10, cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        return portable_attention(D, computing(matrices[0].dtype).itemsize, room, window), *matrices
    if kernel_path() == "wgmma" and D == 64:
        return tensor_attention(D, True), *(map_of(x, 64) for x in matrices)
    return tensor_attention(D, False), *matrices

def window_of(cfg):
    """The window of a model, or 0 if it holds the whole context"""
    return cfg.window if cfg.window and cfg.window < cfg.seq_len else 0

def attention_forward(o, lse, qkv, T, D, window=0):
    BT, HD = o.shape
    G = (qkv.shape[1] - HD) // (2 * D)
    scale = number(qkv, 1 / math.sqrt(D))
    k, source = attention_of(D, window, qkv)
    launch(k.forward, o, lse, source, T, G, scale, grid=(cdiv(T, k.rows), HD // D, BT // T),
           block=k.block, smem=k.smem)

def attention_backward(dqkv, delta, do, o, lse, qkv, cos, sin, T, D, window=0):
    """The gradient of q, k and v as they were before RoPE     delta (H, BT) is scratch"""
    BT, HD = o.shape
    H, G = len(lse), (qkv.shape[1] - HD) // (2 * D)
    scale = number(qkv, 1 / math.sqrt(D))
    k, do_source, o_source, qkv_source = attention_of(D, window, do, o, qkv)
    given = (dqkv, delta, do_source, o_source, lse, qkv_source, cos, sin, T, HD, scale)
    tiles, B = cdiv(T, k.back_rows), BT // T
    launch(k.dq, *given, grid=(tiles, H, B), block=k.block, smem=k.back_smem)      # delta, too
    launch(k.dkv, *given, grid=(tiles, G, B), block=k.block, smem=k.back_smem)
    if not k.rotates:
        rope(dqkv, cos, sin, T, H + G, -1)

# ==== 4.6 SwiGLU ====
@made_once
def swiglu_kernels(W):
    load, store = vector(W)

    @cuda_kernel
    def forward(y, gate_up):
        """y = silu(gate) * up     one block a row, a thread W elements
        math: nanoeuler.swiglu_forward"""
        bt, F, one = cuda.blockIdx.x, y.shape[1], ctype(y).type(1)
        for f in range(cuda.threadIdx.x * W, F, cuda.blockDim.x * W):
            z, up = load(gate_up, bt * 2 * F + f), load(gate_up, bt * 2 * F + F + f)
            for i in range(W):
                z[i] = z[i] / (one + exp(-z[i])) * up[i]
            store(y, bt * F + f, z)

    @cuda_kernel
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
    launch(forward, y, gate_up, grid=len(y), block=256)

def swiglu_backward(gate_up, dy):
    """Returns gate_up, which is its own gradient now."""
    _, backward = swiglu_kernels(width(dy.shape[1]))
    launch(backward, gate_up, dy, grid=len(dy), block=256)
    dgate_up = gate_up
    return dgate_up

# ==== 4.7 Cross-entropy ====
@made_once
def cross_entropy_kernel(W):
    load, store = vector(W)

    @cuda_kernel
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
    """Rows row0.. of the batch: their losses into nll.  Returns logits, which are their own
    gradients now."""
    R, PV = logits.shape
    launch(cross_entropy_kernel(width(V)), nll, logits, targets, weight, row0, V, T,
           grid=(R, PV // V), block=256)
    dlogits = logits
    return dlogits

# ==== 4.8 Biases and norms of q and k ====
# A first reader may skip this section, as that of nanoeuler.py: most models have neither.
@cuda_kernel
def add_bias_kernel(qkv, bias):
    """qkv[t, c] += bias[c]     one block of 256 threads per row     qkv (BT, QKV), bias (QKV,)"""
    row = qkv[cuda.blockIdx.x]
    for c in range(cuda.threadIdx.x, row.size, 256):
        row[c] = stored(row, value(row[c]) + bias[c])

def add_bias(qkv, bias):
    launch(add_bias_kernel, qkv, bias, grid=len(qkv), block=256)

@cuda_kernel
def sum_columns_kernel(partial, x):
    """partial[i] = sum of the i-th part of the rows of x     one block of 256 threads per part
    partial (PARTS, N), x (BT, N)"""
    BT, i, parts = x.shape[0], cuda.blockIdx.x, partial.shape[0]
    for c in range(cuda.threadIdx.x, x.shape[1], 256):
        s = ctype(partial).type(0)
        for t in range(i * BT // parts, (i + 1) * BT // parts):
            s += value(x[t, c])
        partial[i, c] = s

def bias_gradient(dbias, dqkv, partial):
    """dbias += sum_bt dqkv     partial (PARTS, QKV) is scratch"""
    launch(sum_columns_kernel, partial, dqkv, grid=PARTS, block=256)
    launch(sum_rows_kernel, dbias, transposed(partial), grid=len(dbias), block=256)

@cuda_kernel
def head_norm_kernel(qkv, qk, rstd, q_gain, k_gain, eps):
    """RMSNorm of each head of q and k, in place     math: nanoeuler.head_norm_forward
    One warp per head.     grid (BT, (H + G) / ROWS), block (32, ROWS)
    qkv (BT, QKV), q_gain, k_gain (D,)     out: qk (BT, (H + G) D), the heads as they were, and rstd
    (BT, H + G), for backward"""
    t, heads, D = cuda.blockIdx.x, rstd.shape[1], q_gain.size
    h, lane = cuda.blockIdx.y * ROWS + cuda.threadIdx.y, cuda.threadIdx.x
    H = 2 * heads - qkv.shape[1] // D        # QKV = (H + 2 G) D
    if h < heads:                            # for a whole warp or for none: shuffles are legal
        ss = ctype(qkv).type(0)
        for i in range(lane, D, WARP):
            qk[t, h * D + i] = qkv[t, h * D + i]
            x = value(qkv[t, h * D + i])
            ss += x * x
        r = ctype(qkv).type(1) / math.sqrt(warp_sum(ss) / ctype(qkv).type(D) + eps)
        for i in range(lane, D, WARP):
            gain = q_gain[i] if h < H else k_gain[i]
            qkv[t, h * D + i] = stored(qkv, gain * value(qkv[t, h * D + i]) * r)
        if lane == 0:
            rstd[t, h] = r

@made_once
def head_norm_backward_kernel(D):
    CHUNKS = -(-D // WARP)

    @cuda_kernel
    def backward(dqkv, partial, qk, rstd, q_gain, k_gain):
        """In place: the q and k columns of dqkv become the gradient of qk
        math: nanoeuler.head_norm_backward
        partial[i] = sum of dy * u over the rows of warp i, u = x * rstd: of q's heads, and of k's.
        One warp per row, striding.     grid PARTS, block (32, ROWS)
        dqkv (BT, QKV), partial (PARTS ROWS, 2 D), qk (BT, (H + G) D), rstd (BT, H + G)"""
        zero, lane = ctype(partial).type(0), cuda.threadIdx.x
        of_q, of_k = filled(CHUNKS, zero), filled(CHUNKS, zero)
        warp, warps = cuda.blockIdx.x * ROWS + cuda.threadIdx.y, partial.shape[0]
        BT, heads = rstd.shape
        H = 2 * heads - dqkv.shape[1] // D
        for t in range(warp * BT // warps, (warp + 1) * BT // warps):
            for h in range(heads):
                r, mean = rstd[t, h], zero
                for i in range(lane, D, WARP):
                    gain = q_gain[i] if h < H else k_gain[i]
                    mean += gain * value(dqkv[t, h * D + i]) * value(qk[t, h * D + i])
                mean = warp_sum(mean) * r * r / ctype(partial).type(D)       # of gain*dy*u, * rstd
                for j in range(CHUNKS):
                    i = WARP * j + lane
                    if i < D:
                        dy, x = value(dqkv[t, h * D + i]), value(qk[t, h * D + i])
                        gain = q_gain[i] if h < H else k_gain[i]
                        of_q[j] += dy * x * r if h < H else zero
                        of_k[j] += zero if h < H else dy * x * r
                        dqkv[t, h * D + i] = stored(dqkv, r * (gain * dy - x * mean))
        for j in range(CHUNKS):
            i = WARP * j + lane
            if i < D:
                partial[warp, i], partial[warp, D + i] = of_q[j], of_k[j]
    return backward

def head_norm_forward(qkv, qk, rstd, q_gain, k_gain, eps):
    BT, heads = rstd.shape
    launch(head_norm_kernel, qkv, qk, rstd, q_gain, k_gain, number(qkv, eps),
           grid=(BT, cdiv(heads, ROWS)), block=(WARP, ROWS))

def head_norm_backward(dqkv, dq_gain, dk_gain, partial, qk, rstd, q_gain, k_gain):
    """dq_gain += sum_bt,h dy * u, over q's heads, dk_gain of k's
    partial (PARTS ROWS, 2 D) is scratch"""
    D = q_gain.size
    launch(head_norm_backward_kernel(D), dqkv, partial, qk, rstd, q_gain, k_gain, grid=PARTS,
           block=(WARP, ROWS))
    for dgain, start in (dq_gain, 0), (dk_gain, D):
        columns = view(partial, start, (D, len(partial)), (1, 2 * D))
        launch(sum_rows_kernel, dgain, columns, grid=D, block=256)

# ==== 5 Model ====
# Columns of the logits, the matrix (columns, C) that makes them of y, and its gradient
HeadPart = namedtuple("HeadPart", "columns w dw")
# Of the RMSNorm that reads a point of the trajectory: gain (C,), the gain's gradient, rstd (BT,)
Norm = namedtuple("Norm", "gain dgain rstd")

class Model:
    """Parameters, gradients and moments on the device, and the memory to run micro-batches (B, T).

    The interface is nanoeuler.Engine; work is queued: `update` and `losses` wait for it, a
    micro-batch for the one before it."""

    program, talk, buffer_table = "nanoeuler_cuda.py", "c", staticmethod(buffer_table)
    attention = attention_forward, attention_backward    # tests/oracles/ has another pair

    @staticmethod
    def ready(options=None):
        """A kernel is compiled when it is first launched."""

    def __init__(self, cfg, flat, moments=(), options=None, dtype="f32", recompute=False):
        open_device()
        if options:
            dtype, recompute = options.dtype, options.recompute
            for name, values in (("dtype", DTYPES), ("matmul", PATHS)):
                given = getattr(options, name)
                need(given in values, f"--{name} is {given}, expected {' or '.join(values)}")
        self.top = options.matmul if options else gpu.highest        # kernel path of this model
        need(has(dtype), "bfloat16 needs a GPU of capability 8.0 or newer; use --dtype f32")
        self.cfg, self.table = cfg, ne.param_table(cfg)
        self.kept = 1 if recompute else cfg.n_layer      # layers whose insides are there at once
        self.window = window_of(cfg)
        self.dtype = DTYPES[dtype]
        self.master = computing(self.dtype)  # of parameters, gradients and moments
        self.shape = None                    # (B, T) that there is memory for
        self.held = needs_of(self.memory(1, 1)).held
        if self.held >= free_bytes():        # a model that was dropped may still be there
            release_garbage()
        free = free_bytes()
        need(self.held < free, f"weights, gradients, moments take {self.held / 2**30:.1f} GiB, the "
             f"GPU has {free / 2**30:.1f} left; use a smaller --preset")
        # flat buffers, and views of them by name: parameters p, gradients g, and what products
        # read, w: p itself, or copies rounded to bfloat16
        self.flat, self.g_flat = self.put(flat), self.put(np.zeros(flat.size, self.master))
        self.copies = to_device(to_bf16(flat)) if self.dtype == np.uint16 else self.flat
        self.p, self.g, self.w = (ne.views(x, self.table)
                                  for x in (self.flat, self.g_flat, self.copies))
        self.cos, self.sin = map(self.put, ne.rope_table(cfg, self.master))
        own = self.owned(flat.size)
        moments = [x[own] for x in moments] or np.zeros((2, own.stop - own.start), self.master)
        self.m, self.v = map(self.put, moments)
        self.n_decay = sum(x.size for x in self.p[ne.MATRICES])     # they come first
        # what changes between steps, or comes out of them: graphs read and write it here
        self.results = self.put(np.zeros(cfg.n_mtp + 1), np.float64)    # loss of each head, |g|
        self.staged_hyper = np.zeros(len(ne.Hyper._fields))
        self.hyper = self.put(self.staged_hyper, np.float64)
        self.partial = new(SUMS, np.float64)
        self.semaphores = to_device(np.zeros(SEMAPHORES, np.uint32))
        self.zero = np.zeros(cfg.n_mtp + 1)  # what results are set to
        self.micro = {}                      # (sequences a step, asked for, T) -> at a time
        self.maps = {}                       # tensor maps of the memory below: see `at_most`
        self.step = Graph()

    def put(self, x, dtype=None):
        return to_device(x, dtype or self.master)

    def owned(self, n):
        """Of n parameters those which this process updates, and whose moments it has"""
        return slice(0, n)

    def prepare(self, B, T):
        """Memory for micro-batches of B sequences of T tokens; a smaller one is filled up."""
        if self.shape and self.shape[0] >= B and self.shape[1] == T:
            return
        need(0 < T <= self.cfg.seq_len,
             f"{T} tokens are none or more than the context of {self.cfg.seq_len}")
        self.gradient_graph = self.loss_graph = None     # first: they read what is freed now
        self.a = self.d = self.shape = None
        self.maps.clear()
        P = self.cfg.n_mtp
        buffers = {"a": {}, "d": {}}
        try:
            table = self.buffer_table(self.cfg, B, T, self.dtype, self.kept)
            for group, name, shape, dtype in table:
                buffers[group][name] = new(shape, dtype)
            self.ids = new((P + 1) * B * T, np.int32)    # tokens, then the targets of each head
            self.weight = new((B, P), np.float64)
            self.staged = cuda.pinned_array((P + 1) * B * T, np.int32)
        except CudaAPIError as e:
            buffers.clear()
            self.ids = self.weight = self.staged = None
            if "OUT_OF_MEMORY" not in str(e):
                raise
            total, fits = sum(size for _, size in self.memory(B, T)) / 2**30, self.fitting(T)
            again = "" if self.kept < self.cfg.n_layer else "--recompute, "
            remedy = f"--micro-batch {fits} would fit" if fits else (
                f"not even one fits: use {again}a shorter --seq-len or a smaller --preset")
            raise UserError(f"the GPU has no room for {B} sequences of {T} tokens, {total:.1f} GiB "
                            f"in all ({e}); {remedy}") from None
        self.a, self.d = (namedtuple(group, arrays)(**arrays)
                          for group, arrays in buffers.items())
        self.tokens = view(self.ids, 0, (B * T,))
        self.targets = view(self.ids, B * T, (P, B * T))
        self.staged_weight = np.zeros((B, P))
        self.gradient_graph, self.loss_graph = Graph(), Graph()
        self.shape = B, T

    def memory(self, B, T):
        return memory_table(self.cfg, B, T, self.dtype, self.buffer_table, self.kept)

    def fitting(self, T):
        """Sequences that fit, with a sample now and then, into 90 % of what is free, or taken by
        those before, beside the parameters that are there; 0 if not even one.  A grid has 65,535
        blocks at most along z, where attention has sequences, and along y, where portable products
        have TILE rows each."""
        release_garbage()
        free = free_bytes()
        if self.shape:
            free += needs_of(self.memory(*self.shape)).batch

        def wanted(B):
            needs = needs_of(self.memory(B, T))
            return needs.batch + needs.samples
        most = min(65535, 65535 * TILE // T)
        return bisect.bisect_right(range(1, most + 1), 0.9 * free, key=wanted)

    def micro_batch(self, B, asked=None, T=None):
        """Sequences of T tokens, or of the context's length, in memory at once: as many as asked
        for, or as fit in equal parts of B.  Says what they take, once for each of these."""
        T = T or self.cfg.seq_len
        if (B, asked, T) not in self.micro:
            fits = self.fitting(T)
            if asked:
                size = min(asked, B)
            else:
                parts = math.ceil(B / max(1, min(fits, B)))
                size = math.ceil(B / parts)
            if not self.micro and (slow := self.without_tensor_cores()):
                print(f"note: {slow}", flush=True)
            self.print_memory(size, T, fits)
            self.micro[B, asked, T] = size
        return self.micro[B, asked, T]

    def print_memory(self, B, T, fits):
        """The memory_table of B sequences of T tokens, in MiB."""
        rows = self.memory(B, T)
        rows.append(("together", sum(size for _, size in rows)))
        ne.print_table(f"memory of {B} sequences of {T} tokens at a time, {fits} would fit",
                       [(name, f"{size / 2**20:10,.0f} MiB") for name, size in rows])

    def without_tensor_cores(self):
        """What of this model's shape keeps them from its products or its attention, in words."""
        cfg = self.cfg
        with at_most(self.top):
            if self.dtype != np.uint16 or kernel_path() == "portable":
                return ""                    # they were not asked for, or are not there
        HD, KV = cfg.n_head * cfg.head_dim, cfg.n_kv_head * cfg.head_dim
        sizes = {"n_embd": cfg.n_embd, "n_hidden": cfg.n_hidden, "vocab_size": cfg.vocab_size,
                 "n_head * head_dim": HD, "(n_head + 2 * n_kv_head) * head_dim": HD + 2 * KV}
        said = [f"portable products, since {name} {n} is no multiple of 8, slower"
                for name, n in sizes.items() if n % 8]
        if cfg.head_dim not in FAST_HEADS:
            said.append(f"portable attention for heads of {cfg.head_dim}, slower than for "
                        f"32, 64 or 128")
        if self.window:
            said.append("portable attention in a window, slower")
        if cfg.tie_embeddings and cfg.n_mtp > 1:         # a sum of two products: see matmul_dx
            said.append("a portable product back from the heads, since wte is one of theirs, "
                        "slower")
        return "; ".join(said)

    def device(self):
        note = self.without_tensor_cores()
        name = cuda.get_current_device().name
        return f"{name}, {NAMES[self.dtype]}" + (f", {note}" if note else "")

    def norm_of(self, i):
        """Of the RMSNorm that reads x[i]: that of layer i / 2 before attention (i even) or before
        SwiGLU, or the last one, before the heads."""
        p, g, a, l = self.p, self.g, self.a, i // 2
        if l == self.cfg.n_layer:
            return Norm(p.final_norm, g.final_norm, a.final_rstd)
        if i % 2 == 0:
            return Norm(p.attn_norm[l], g.attn_norm[l], a.attn_rstd[l])
        return Norm(p.mlp_norm[l], g.mlp_norm[l], a.mlp_rstd[l])

    def attend(self, l):
        """att: the heads' outputs of layer l, of y = rmsnorm(x) in a.y"""
        cfg, a, p, T, k = self.cfg, self.a, self.p, self.shape[1], l % self.kept
        attention, _ = self.attention
        matmul(a.qkv[k], a.y, self.w.qkv[l])
        if cfg.qkv_bias:
            add_bias(a.qkv[k], p.qkv_bias[l])
        if cfg.qk_norm:
            head_norm_forward(a.qkv[k], a.qk[k], a.qk_rstd[k], p.q_norm[l], p.k_norm[l],
                              cfg.norm_eps)
        rope(a.qkv[k], self.cos, self.sin, T, cfg.n_head + cfg.n_kv_head, 1)
        attention(a.att[k], a.lse[k], a.qkv[k], T, cfg.head_dim, self.window)

    def gate(self, l):
        """swiglu: the hidden numbers of layer l, of y = rmsnorm(x) in a.y"""
        a, k = self.a, l % self.kept
        matmul(a.gate_up[k], a.y, self.w.gate_up[l])
        swiglu_forward(a.swiglu[k], a.gate_up[k])

    def forward(self):
        """The trajectory a.x[0..2L] of the staged tokens: x[i + 1] = x[i] + f_i(x[i]), two Euler
        steps a layer.  What the heads read, y = rmsnorm(x[2L]), is in a.y then."""
        cfg, w, a = self.cfg, self.w, self.a
        y = f = a.y                          # a block reads y = rmsnorm(x); f(x) takes its place

        def euler_step(i):
            """x[i + 1] = x[i] + f, and y = rmsnorm(x[i + 1])"""
            norm = self.norm_of(i + 1)
            residual_rmsnorm_forward(f, a.x[i + 1], norm.rstd, a.state, norm.gain, cfg.norm_eps)

        embedding_forward(a.state, self.tokens, self.p.wte)          # x[0]
        norm = self.norm_of(0)
        rmsnorm_forward(y, a.x[0], norm.rstd, a.state, norm.gain, cfg.norm_eps)
        for l in range(cfg.n_layer):
            k = l % self.kept
            self.attend(l)
            matmul(f, a.att[k], w.attn_proj[l])
            euler_step(2 * l)                # x + attention(rmsnorm(x))
            self.gate(l)
            matmul(f, a.swiglu[k], w.down[l])
            euler_step(2 * l + 1)            # x + swiglu(rmsnorm(x))

    def head_parts(self, P):
        """The matrices that make the logits of heads 0 to P - 1: lm_head, and wte if it is tied."""
        (V, C), PV = self.p.wte.shape, P * self.cfg.vocab_size
        tied = V if self.cfg.tie_embeddings else 0       # columns of logits that wte makes
        parts = []
        for v0, v1, w, dw in ((0, tied, self.w.wte, self.g.wte),
                              (tied, PV, self.w.lm_head, self.g.lm_head)):
            if v1 > v0:
                shape = v1 - v0, C
                parts.append(HeadPart(slice(v0, v1), view(w, 0, shape), view(dw, 0, shape)))
        return parts

    def output_heads(self, P, training):
        """Logits, losses and, in training, gradients of output heads 0 to P - 1, a chunk of R rows
        at a time: d.y = sum_k dlogits_k W_k.  The B T V logits are never in memory at once."""
        a, V, parts = self.a, self.cfg.vocab_size, self.head_parts(P)
        BT, R = len(a.y), len(a.logits)
        for r0 in range(0, BT, R):
            y, dy = a.y[r0:r0 + R], self.d.y[r0:r0 + R]
            logits = view(a.logits, 0, (len(y), P * V))
            for part in parts:
                matmul(logits[:, part.columns], y, part.w)
            dlogits = cross_entropy(a.nll, logits, self.targets, self.weight, r0, V, self.shape[1])
            if training:
                for part in parts:           # each but the first adds to dy
                    dz = dlogits[:, part.columns]
                    matmul_dx(dy, dz, part.w, add=part.columns.start > 0)
                    matmul_dw(part.dw, dz, y, self.semaphores)
        if training:
            launch(sum_rows_kernel, self.results[:-1], a.nll, grid=P, block=256)

    def backward(self):
        """d.x back along the trajectory, and every weight's gradient on the way: g += ...

        The adjoint of x[i + 1] = x[i] + f(x[i]):  d.x is the gradient of x[i + 1] and of f alike,
        and with what comes back through f it becomes that of x[i]."""
        cfg, p, w, g, a, d = self.cfg, self.p, self.w, self.g, self.a, self.d
        L, T, D = cfg.n_layer, self.shape[1], cfg.head_dim
        _, attend_back = self.attention
        df = d.x

        def step_backward(i):
            """d.x of x[i + 1] becomes that of x[i]; d.y is the gradient of rmsnorm(x[i]).  Returns
            y = rmsnorm(x[i]), made again in its place."""
            norm = self.norm_of(i)
            return rmsnorm_backward(d.x, norm.dgain, d.y, d.partial, a.x[i], norm.gain, norm.rstd)

        def made_again(i, inside):
            """What a block has inside, of y = rmsnorm(x[i]), unless it was kept"""
            if self.kept < L:
                norm = self.norm_of(i)
                rmsnorm_again(a.y, a.x[i], norm.gain, norm.rstd)
                inside(i // 2)

        d.x.gpu_data.memset(0, stream=gpu.stream)        # nothing passes the heads by
        step_backward(2 * L)                 # d.y is of what they read
        for l in range(L - 1, -1, -1):
            k = l % self.kept
            made_again(2 * l + 1, self.gate)
            matmul_dx(d.swiglu, df, w.down[l])
            matmul_dw(g.down[l], df, a.swiglu[k], self.semaphores)
            dgate_up = swiglu_backward(a.gate_up[k], d.swiglu)
            matmul_dx(d.y, dgate_up, w.gate_up[l])
            y = step_backward(2 * l + 1)
            matmul_dw(g.gate_up[l], dgate_up, y, self.semaphores)
            made_again(2 * l, self.attend)
            matmul_dx(d.att, df, w.attn_proj[l])
            matmul_dw(g.attn_proj[l], df, a.att[k], self.semaphores)
            attend_back(d.qkv, d.delta, d.att, a.att[k], a.lse[k], a.qkv[k], self.cos, self.sin, T,
                        D, self.window)
            if cfg.qk_norm:
                head_norm_backward(d.qkv, g.q_norm[l], g.k_norm[l], d.qk_partial, a.qk[k],
                                   a.qk_rstd[k], p.q_norm[l], p.k_norm[l])
            if cfg.qkv_bias:
                bias_gradient(g.qkv_bias[l], d.qkv, d.bias_partial)
            matmul_dx(d.y, d.qkv, w.qkv[l])
            y = step_backward(2 * l)
            matmul_dw(g.qkv[l], d.qkv, y, self.semaphores)
        embedding_backward(g.wte, d.x, self.tokens)      # of x[0]

    def queue_gradient(self):
        """What a graph records: all launches of `gradient`"""
        self.forward()
        self.output_heads(self.cfg.n_mtp, training=True)
        self.backward()

    def queue_losses(self):
        self.forward()
        self.output_heads(1, training=False)

    def stage(self, tokens, targets, weight):
        """tokens (b, T), targets (P, b, T), weight (b, P) to the device, the former through pinned
        memory; the sequences from b to B have no targets."""
        (b, _), (B, T) = tokens.shape, self.shape
        for x in (tokens, targets):          # kernels do not look: they would read and write beyond
            need(x.max() < self.cfg.vocab_size, "a token that the model has not")
        need(tokens.min() >= 0, "a token that is negative")
        gpu.stream.synchronize()             # an earlier copy may still read what is staged
        staged = self.staged.reshape(-1, B, T)           # tokens, then the targets of each head
        staged[0, :b] = tokens
        staged[0, b:] = 0
        staged[1:, :b] = targets
        staged[1:, b:] = -1
        self.ids.copy_to_device(self.staged, stream=gpu.stream)
        self.staged_weight[:b] = weight
        self.staged_weight[b:] = 0
        self.weight.copy_to_device(self.staged_weight, stream=gpu.stream)

    def gradient(self, tokens, targets, weight):
        """Queues g += d(sum_bk weight[b, k] CE_bk)/dp of one micro-batch, and its losses.

        tokens (B, T), targets (P, B, T), weight (B, P), or (P,) for every sequence"""
        self.prepare(*tokens.shape)
        self.stage(tokens, targets, weight)
        with at_most(self.top, self.maps):
            self.gradient_graph(self.queue_gradient)

    def update(self, hyper):
        """Clips, AdamW, zero gradients; hyper: nanoeuler.Hyper.  Returns (summed CE of each head
        since the last update, |g| before clipping); waits for the device."""
        need(not hyper.muon_lr, f"muon_lr is {hyper.muon_lr:g}, and the GPU has AdamW only: train "
             f"with Muon on the CPU: {ON_CPU} train")
        self.staged_hyper[:] = hyper         # it must live until the driver has read it
        self.hyper.copy_to_device(self.staged_hyper, stream=gpu.stream)
        self.step(lambda: adamw(self.flat, self.copies, self.g_flat, self.m, self.v, self.n_decay,
                                self.hyper, self.partial, self.results))
        results = to_host(self.results)
        self.results.copy_to_device(self.zero, stream=gpu.stream)
        return results[:-1], float(results[-1])

    def losses(self, tokens, targets):
        """CE of head 0 of each sequence, nats, float64 (B,).     tokens, targets (B, T)"""
        n, T = tokens.shape
        sums = []
        if self.shape and self.shape[1] == T:
            most = self.shape[0]             # as the memory is that there is
        else:
            most = max(1, self.fitting(T))
        self.prepare(min(n, most), T)
        B, _ = self.shape
        for b in range(0, n, B):
            x = tokens[b:b + B]
            y = np.full((self.cfg.n_mtp, *x.shape), -1, np.int32)    # head 0's only
            y[0] = targets[b:b + B]
            self.stage(x, y, 0)
            with at_most(self.top, self.maps):
                self.loss_graph(self.queue_losses)
            nll = to_host(self.a.nll)[0].reshape(self.shape)
            sums.append(nll[:len(x)].sum(1, dtype=np.float64))
        return np.concatenate(sums)

    def buffers(self):
        """(parameters, m, v) on the host, float32: what a checkpoint holds."""
        return [to_host(x).astype(np.float32, copy=False) for x in (self.flat, self.m, self.v)]

    first_bad_tensor = ne.Model.first_bad_tensor

    @staticmethod
    def host(x):
        return from_bf16(to_host(x))

    def decoder(self):
        """Of a copy: the next update must not change what it says.  Matrices are those that the
        products of training read."""
        n = self.n_decay                     # of all matrices, which come first
        sources = view(self.copies, 0, (n,)), view(self.flat, n, (self.flat.size - n,))
        matrices, gains = (new(x.shape, x.dtype) for x in sources)
        for to, source in zip((matrices, gains), sources):
            to.copy_to_device(source, stream=gpu.stream)
        with at_most(self.top):
            return Decoder.of(self.cfg, matrices, gains)

# ==== 6 Optimizer ====
SUMS = 512                                   # partial sums of |g|^2: fixed, so their order is

@cuda_kernel
def square_sums_kernel(partial, g):
    """partial[i] = sum of squares of what block i strides over; float64     grid SUMS, block 256"""
    s = 0.0
    for i in range(cuda.grid(1), g.size, cuda.gridsize(1)):
        x = types.float64(g[i])              # before it is squared: 2e19 squared is no float32
        s += x * x
    s = block_sum(s)
    if cuda.threadIdx.x == 0:
        partial[cuda.blockIdx.x] = s

@made_once
def adamw_kernel(W):
    load, store = vector(W)

    @cuda_kernel
    def step(p, w, g, m, v, n_decay, hyper, partial, results):
        """As nanoeuler.adamw, W entries a thread, striding; results[-1] = |g|.  All that changes
        from step to step is read from device memory: hyper, float64, the fields of nanoeuler.Hyper
        in their order, of which AdamW has the first eight.  w: p for the matmuls."""
        total, dtype = 0.0, p.dtype.type
        for i in range(cuda.threadIdx.x, partial.size, 256):
            total += partial[i]
        norm = math.sqrt(block_sum(total))         # every block for itself
        if cuda.grid(1) == 0:
            results[results.size - 1] = norm
        if not math.isfinite(norm):
            return
        lr, beta1, beta2, eps = hyper[0], hyper[1], hyper[2], dtype(hyper[3])
        weight_decay, clip, correct1, correct2 = hyper[4], hyper[5], hyper[6], hyper[7]
        scale = dtype(min(1.0, clip / (norm + 1e-30)))
        rate = dtype(lr / correct1)
        old1, old2 = dtype(beta1), dtype(beta2)
        new1, new2 = dtype(1 - beta1), dtype(1 - beta2)
        unbias = dtype(1 / math.sqrt(correct2))
        one = dtype(1)
        keep_of_matrices = dtype(1 - lr * weight_decay)
        for i in range(cuda.grid(1) * W, p.size, cuda.gridsize(1) * W):
            pi, gi, mi, vi = load(p, i), load(g, i), load(m, i), load(v, i)
            for j in range(W):
                x = gi[j] * scale
                keep = keep_of_matrices if i + j < n_decay else one
                # in one statement: in two, the compiler fuses others of these products and sums
                mi[j], vi[j] = old1 * mi[j] + new1 * x, old2 * vi[j] + new2 * x * x
                gi[j] = dtype(0)
                pi[j] = keep * pi[j] - rate * mi[j] / (math.sqrt(vi[j]) * unbias + eps)
            store(p, i, pi)
            store(w, i, pi)
            store(m, i, mi)
            store(v, i, vi)
            store(g, i, gi)
    return step

def adamw(p, w, g, m, v, n_decay, hyper, partial, results):
    """Clips, updates, sets g to zero; |g| goes to results[-1]; not finite, nothing is touched."""
    launch(square_sums_kernel, partial, g, grid=SUMS, block=256)
    kernel = adamw_kernel(4 if p.size % 4 == 0 else 1)
    launch(kernel, p, w, g, m, v, n_decay, hyper, partial, results, grid=1024, block=256)

# ==== 9 Inference ====
@cuda_kernel
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
    launch(matvec_kernel, y, w, x, grid=cdiv(len(w), ROWS), block=(WARP, ROWS))

@cuda_kernel
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

@cuda_kernel
def attention_decode_kernel(o, qkv, kc, vc, scores, at, window, scale):
    """One query row against the last `window` tokens of the cache.     one block of 256 threads per
    head     o (HD,), qkv (QKV,), kc, vc (G, T, D), scores (H, T) scratch
    The cache is no ring, as that of nanoeuler.Decoder is: it keeps the tokens before the window."""
    h, x, n, D = cuda.blockIdx.x, cuda.threadIdx.x, at[1] + 1, kc.shape[2]
    first = max(0, n - window)
    g, row = h * kc.shape[0] // cuda.gridDim.x, scores[h]
    m, l = -ctype(o).type(math.inf), ctype(o).type(0)
    for t in range(first + x // WARP, n, ROWS):      # a warp per key
        s = ctype(o).type(0)
        for i in range(x % WARP, D, WARP):
            s += qkv[h * D + i] * kc[g, t, i]
        s = warp_sum(s) * scale
        if x % WARP == 0:
            row[t] = s
    cuda.syncthreads()                       # all scores are there
    for t in range(first + x, n, 256):
        m = max(m, row[t])
    m = block_max(m)
    for t in range(first + x, n, 256):
        row[t] = exp(row[t] - m)
        l += row[t]
    l = block_sum(l)                   # its barriers: all weights are there
    for i in range(x, D, 256):
        s = ctype(o).type(0)
        for t in range(first, n):
            s += row[t] * vc[g, t, i]
        o[h * D + i] = s / l

class Decoder(ne.Decoder):
    """nanoeuler.Decoder with its cache on the device.  With matrices in bfloat16 a step is one of
    9.1; otherwise, or if these cannot take the model, a row is one graph, and a step row by row."""
    wide = draws = False
    formats = "f32", "bf16"

    @staticmethod
    def ready():
        """A kernel is compiled when it is first launched."""

    def __init__(self, cfg, flat, weights="f32", slots=1, length=0):
        """flat: the parameters, on the host, or, if they stay f32, on the device; or the Params of
        an open checkpoint"""
        flat = ne.flat_of(cfg, flat)
        open_device()
        need(weights in ("", "f32", "bf16"),
             f"--weights is {weights}, expected f32 or bf16 on the GPU")
        if not weights:                      # bf16 where 9.1 takes it, which is faster
            weights = "f32" if rows_refused(cfg) else "bf16"
        self.begin(cfg, slots, length)
        self.kept_as = weights
        shapes = [shape for _, shape, *_ in ne.param_table(cfg)]
        n = sum(map(math.prod, shapes[ne.MATRICES]))     # they come first
        matrices, gains = flat[:n], flat[n:]
        if weights == "bf16":
            matrices = to_bf16(matrices)
        if isinstance(flat, np.ndarray):
            matrices, gains = to_device(matrices), to_device(gains)
        self.take(matrices, gains)

    @classmethod
    def of(cls, cfg, matrices, gains):
        """Of parameters that are on the device, in two parts"""
        decoder = cls.__new__(cls)
        decoder.begin(cfg, 1, 0)
        decoder.kept_as = "bf16" if matrices.dtype == np.uint16 else "f32"
        decoder.take(matrices, gains)
        return decoder

    def take(self, matrices, gains):
        """Both on the device: the parameters in two parts, in the order of param_table"""
        shapes = [shape for _, shape, *_ in ne.param_table(self.cfg)]
        self.weights = ne.Params(*ne.slices(matrices, shapes[ne.MATRICES]),
                                 *ne.slices(gains, shapes[ne.VECTORS]))
        self.allocate()

    def begin(self, cfg, slots, length):
        super().begin(cfg, slots, length)
        self.heads = 0                       # drafts would not be read any faster
        self.unread = set()                  # slots whose texts are not in the cache yet

    def allocate(self):
        """The caches, and the activations of one token, or of some rows."""
        self.steps = None
        if self.weights.wte.dtype == np.uint16:
            if refused := rows_refused(self.cfg):
                print(f"note: generation row by row, which is slower: {refused}", file=sys.stderr)
            else:
                self.p, self.heads, self.wide = self.weights, self.cfg.n_mtp - 1, True
                self.draws = True
                self.steps = RowSteps(self.cfg, self.weights, len(self.texts), self.length)
                return
        cfg, self.p, dtype = self.cfg, self.weights, self.weights.final_norm.dtype
        T, C, H, D, F = self.length, cfg.n_embd, cfg.n_head, cfg.head_dim, cfg.n_hidden
        cache = cfg.n_layer, cfg.n_kv_head, T, D

        def buffer(*shape):
            return new(shape, dtype)

        self.cos, self.sin = map(to_device, ne.rope_table(cfg, dtype))
        self.slots = [(buffer(*cache), buffer(*cache), Graph()) for _ in self.texts]
        self.use(0)
        self.scores = buffer(H, T)
        self.x, self.y = buffer(1, C), buffer(1, C)
        self.saved, self.rstd = buffer(1, C), buffer(1)   # which nobody reads
        self.qk, self.qk_rstd = (buffer(1, (H + cfg.n_kv_head) * n) for n in (D, 1))     # nor these
        self.qkv, self.att = buffer((H + 2 * cfg.n_kv_head) * D), buffer(H * D)
        self.gate_up, self.swiglu = buffer(1, 2 * F), buffer(1, F)
        self.device_logits = buffer(cfg.vocab_size)
        self.at = to_device(np.zeros(2, np.int32))       # token, position

    def use(self, slot):
        self.kc, self.vc, self.graph = self.slots[slot]

    def copy(self, source, slot, n):
        if source in self.unread:
            self.unread.add(slot)
        elif self.steps:
            self.unread.discard(slot)
            self.steps.copy(source, slot, n)
        else:
            for to, of in zip(self.slots[slot][:2], self.slots[source][:2]):
                to.copy_to_device(of, stream=gpu.stream)     # whole: that takes no longer
        self.texts[slot] = self.texts[source][:n]
        return n

    def read(self, parts):
        """`Reader`'s.  Nearly all parts are a few tokens of a slot that has room for them: they
        take no detour, since the device takes no longer for them than a hundred lines of Python."""
        parts = [*parts]
        found = self.plain_rows(parts) if self.steps else None
        if not found:
            return super().read(parts)
        logits, self.final = self.steps.compute(*found)
        for token, slot in zip(*found[:2]):
            self.texts[slot].append(token)
        return logits

    def draw(self, parts, draws, later=()):
        """`Reader`'s, of parts that take no detour"""
        parts = [*parts]
        found = self.plain_rows(parts)
        if not found:
            return None
        drawn = self.steps.draw(*found, draws, later)
        self.final = None                    # it is on the device
        if min(drawn) < 0:                   # the likeliest is not finite: let sample say so
            logits, _ = self.steps.compute(*found)
            ne.sample(logits[drawn.index(-1)], None, ne.Sampling(temperature=0))
        for token, slot in zip(*found[:2]):
            self.texts[slot].append(token)
        return drawn

    def plain_rows(self, parts):
        """(tokens, slots, positions, wanted) of parts that go on with texts, and let none slide,
        at most MOST_ROWS of them.  None if they are others, or faulty."""
        tokens, slots, positions, wanted = [], [], [], []
        texts, unread, length = self.texts, self.unread, self.length
        for slot, ids, n in parts:
            if slot in unread or not 0 <= slot < len(texts):
                return None
            start, count = len(texts[slot]), len(ids)
            if not (start and 0 < count <= length - start and 0 <= n <= count):
                return None
            if count == n == 1:              # as in most steps
                wanted.append(len(tokens))
                tokens.append(int(ids[0]))
                slots.append(slot)
                positions.append(start)
                continue
            tokens += map(int, ids)
            slots += [slot] * count
            positions += range(start, start + count)
            wanted += range(len(tokens) - n, len(tokens))
        known = 0 < len(tokens) <= ne.MOST_ROWS and (
            min(tokens) >= 0 and max(tokens) < self.cfg.vocab_size)
        if known and len({slot for slot, *_ in parts}) == len(parts):
            return tokens, slots, positions, wanted
        return None

    def read_pieces(self, pieces):
        """What begins a slot waits until logits of it are wanted: then it is read as a whole, by
        rows, or as a prompt if it has more than BY_ROWS tokens, however it came."""
        if not self.steps:
            return super().read_pieces(pieces)
        found, rows = {}, []
        for i, (slot, start, ids, wanted) in enumerate(pieces):
            if slot in self.unread:
                start, ids = 0, self.texts[slot][:start] + ids
            if start or wanted and len(ids) <= BY_ROWS:
                rows.append((i, (slot, start, ids, wanted)))
                continue
            self.truncate(0, slot)           # if the next line fails, nothing of it was read
            self.unread.discard(slot)
            if wanted:
                found[i] = self.steps.read_prompt(slot, ids, wanted)
            else:
                self.unread.add(slot)
            self.texts[slot] = list(ids)
        if rows:
            for _, (slot, start, *_) in rows:
                self.truncate(start, slot)
                self.unread.discard(slot)
            logits, at = super().read_pieces([piece for _, piece in rows]), 0
            for i, (*_, wanted) in rows:
                here = slice(at, at + wanted)
                found[i] = logits[here], self.final[here] if self.heads else None
                at += wanted
        if not found:
            return np.zeros((0, self.cfg.vocab_size), np.float32)
        logits, final = zip(*[found[i] for i in sorted(found)])
        if self.heads:
            self.final = np.concatenate(final)
        return np.concatenate(logits)

    def compute(self, rows):
        """nanoeuler.Decoder's, row by row if it has to be"""
        if self.steps:
            logits, final = self.steps.compute(*map(np.ndarray.tolist, rows[:3]),
                                               rows.wanted.tolist())
            self.work = SimpleNamespace(final=final)     # what `guesses` will be asked for
            return logits
        wanted, found = {*rows.wanted.tolist()}, []
        for r, (token, slot, position) in enumerate(zip(*map(np.ndarray.tolist, rows[:3]))):
            self.use(slot)
            logits = self.decode(token, position)
            if r in wanted:
                found.append(logits)
        return np.array(found) if found else np.zeros((0, self.cfg.vocab_size), np.float32)

    def guesses(self, row):
        if self.heads:
            return self.steps.guesses(row, None if self.final is None else self.final[row])
        return np.zeros((0, self.cfg.vocab_size), np.float32)

    def queue(self):
        """One token through the network: nanoeuler.decode_step."""
        cfg, p, at, x, y = self.cfg, self.p, self.at, self.x, self.y

        f, unread = y, (self.saved, self.rstd)           # y = rmsnorm(x), then f(x): as `forward`
        gains = [*(p.attn_norm[l] for l in range(cfg.n_layer)), p.final_norm]

        def flat(t):
            return view(t, 0, (t.size,))

        def euler_step(gain):
            """x += f, y = rmsnorm(x)"""
            residual_rmsnorm_forward(f, *unread, x, gain, cfg.norm_eps)

        embedding_forward(x, at, p.wte)      # (1, C): only the first of at is a token
        rmsnorm_forward(y, *unread, x, gains[0], cfg.norm_eps)
        for l in range(cfg.n_layer):
            matvec(self.qkv, p.qkv[l], flat(y))
            row = view(self.qkv, 0, (1, self.qkv.size))
            if cfg.qkv_bias:
                add_bias(row, p.qkv_bias[l])
            if cfg.qk_norm:
                head_norm_forward(row, self.qk, self.qk_rstd, p.q_norm[l], p.k_norm[l],
                                  cfg.norm_eps)
            launch(rope_cache_kernel, self.qkv, self.kc[l], self.vc[l], self.cos, self.sin, at,
                   cfg.n_head, grid=cfg.n_head + 2 * cfg.n_kv_head, block=WARP)
            launch(attention_decode_kernel, self.att, self.qkv, self.kc[l], self.vc[l],
                   self.scores, at, self.window, number(x, 1 / math.sqrt(cfg.head_dim)),
                   grid=cfg.n_head, block=256)
            matvec(flat(f), p.attn_proj[l], self.att)
            euler_step(p.mlp_norm[l])
            matvec(flat(self.gate_up), p.gate_up[l], flat(y))
            swiglu_forward(self.swiglu, self.gate_up)
            matvec(flat(f), p.down[l], flat(self.swiglu))
            euler_step(gains[l + 1])
        head = p.wte if cfg.tie_embeddings else p.lm_head[0]
        matvec(self.device_logits, head, flat(y))

    def decode(self, token, position):
        if self.steps:
            logits, _ = self.steps.compute([token], [0], [position], [0])
            return logits[0]
        at = np.array([token, position], np.int32)
        self.at.copy_to_device(at, stream=gpu.stream)
        self.graph(self.queue)
        return to_host(self.device_logits)

# ==== 9.1 Rows on tensor cores ====
# A step of up to AT_ONCE rows (token, slot, position) with matrices in bfloat16, in five kernels a
# layer, recorded as a graph.  All numbers but the weights are float32.  A few rows cost what it
# takes to bring the weights from memory; a block reads them once for GROUP rows, or for two or four
# groups where there are more than one, and others, along y, for the next ones, from L2:
#
#     take       x = wte[token]                                     a block a row
#     qkv        RMSNorm, q, k, v, biases, RoPE, k, v to the cache  a block 8 pairs (i, i + D / 2)
#     attend     a part of the context, KEYS keys of a head         a block a part of a row
#     proj       the parts become one, x += W att                   a block 8 columns of x
#     gate_up    RMSNorm, gate and up, SwiGLU                       a block 16 columns
#     down       x += W swiglu                                      a block 8 columns of x
#     logits     of the rows that are wanted: RMSNorm, head         a block 32 tokens
#     choose     the token of a line of logits, if one is drawn     a block a line
#
# Blocks of gate_up and logits have half as much where W's rows are so long that there is no room;
# those of down twice as much for many rows.
#
# Each block of proj merges the parts of all rows.  From MERGED rows on that takes longer than one
# more kernel, merge; the rest of proj is then `down`, of other sizes.
#
# A product is W x, W in tiles of 8 rows, of which a block has one to four; its eight warps take
# slices of 32 of K in turn.  A lane loads 8 neighbours of a row of W, which are 16 bytes, and the
# same 8 of a row of x, and `mma` multiplies them:  x is its A, (16, 16), W its B, (16, 8).  Which
# of a lane's numbers is which k does not matter as long as it is the same in A and B.
#
# x is float32, mma takes bfloat16, of 8 bits.  Two of them hold 17 of the 24 bits of x, rounded:
# hi, the nearest to x, is A's rows 0 to 7, mid, the nearest to x - hi, its rows 8 to 15.  So what
# is multiplied differs from x by at most 2^-18 of it, and sums are those of float32.
#
# Order   A row's sums hang on its position alone: not on the other rows, nor on its place among
#         them.  A text has the same bits alone, in a batch and with drafts.  Where the compiler
#         could round a product and a sum once or twice, fma and fmul_rn say which, since the
#         kernels for a few rows and for many are compiled one by one.
# Places  A kernel takes a few microseconds, in which a warp has time for some hundred instructions.
#         Numba counts places in 64 bits, looks whether they are negative and rounds quotients down;
#         so all are u32 here, which is half of the instructions that there would be.
# Copies  Hopper's copy engine brings a block's rows of W into shared memory, and a kernel asks for
#         them before it waits for the kernel in front of it: they arrive while that one computes.
#         Others load them into registers.
# Ahead   Where tokens are drawn here and texts just go on, the next step is queued before the host
#         has looked at the tokens of this one: `advance` makes its table, and no time is lost.
# Prompts What begins a slot and is longer than a step, mostly a prompt, or the half that a full
#         slot keeps, is read at once, as a sequence is in training: activations between the
#         kernels are bfloat16, as PyTorch has them, keys and values are rounded to it, and the
#         bits hang on the tokens up to a position, not on the length.  So a text has other bits as
#         a prompt than token by token, as far as bfloat16 rounds, but the same ones alone, in a
#         batch, with drafts, and if its prompt comes in pieces (Decoder.read_pieces).
GROUP, AT_ONCE = 8, 64                       # rows of x that `mma` takes; those of a step
BY_ROWS = AT_ONCE                            # longest beginning of a slot that is read by rows
TOKEN, SLOT, POSITION, WANTED, COUNTS = range(5)         # lines of `rows` (5, AT_ONCE), int32
# Places in COUNTS: FIRST_LINE is of `out`; RING, 0 or 1: which half of `draws` and `ids` is its
N_ROWS, N_WANTED, FIRST_LINE, RING = range(4)
SLICE = 32                                   # of K, a warp's in one turn: 8 for each of a quad
MERGED = 4                                   # rows from which on `merge` pays
# Groups of rows that a block may have, and turns whose x is loaded together, of at most two groups
# at a time: of four the sums take the registers
TURNS_AT_ONCE = {1: 8, 2: 4, 4: 1}

def weight_stride(K):
    """Bytes between rows of W in shared memory: the two rows that lanes read at once, 64 bytes of
    each, must lie in different banks."""
    return 2 * K + (64 - 2 * K) % 128

def keys_a_part(D):
    """Keys that a block of `attend` has: eight warps, four for each group of lanes."""
    return 8 * 4 * (32 // lanes_a_key(D))

def lanes_a_key(D):
    """A lane has four numbers of a key."""
    lanes = 1
    while 4 * lanes < D:
        lanes *= 2
    return lanes

@inlined
def own_row():
    """Which row of x, and of each tile of W, a lane reads: a quad of lanes has one."""
    return lane_id() >> u32(2)

@inlined
def entry(rows, line, i):
    """rows[line, i] as it is in L2: what an SM still had of an older table is passed by"""
    at = u32(line * AT_ONCE) + u32(i)
    return types.int32(load_relaxed(global_address(rows) + u64(4) * u64(at)))

@inlined
def told(draws, i):
    """The i-th number of draws as it is in the host's memory"""
    return load_relaxed_f64(global_address(draws) + u64(8) * u64(i))

@inlined
def two_parts(a, j, x, y):
    """Two neighbours of a row of x, as pairs of bfloat16: hi to a[j], mid to a[j + 1]"""
    hi = pack_bf16(x, y)
    a[j], a[j + 1] = hi, pack_bf16(x - lower_half(hi), y - upper_half(hi))

def row_product(K, TILES, GROUPS, normed, hopper):
    """Device functions of a block that multiplies TILES tiles of W (N, K) by GROUPS times GROUP
    rows of x.  Of one tile, it is W's rows from `first` on; of more, one half of them is, the other
    begins at `second`."""
    ROW, STRIDE, COUNT = 2 * K, weight_stride(K), 8 * TILES
    GAIN, FIRST_GAIN = 4 * K if normed else 0, COUNT * STRIDE // 4 if hopper else 0
    SLICES, FIRST_TILES = cdiv(K, SLICE), cdiv(TILES, 2)
    TURNS = cdiv(SLICES, 8)
    BATCH = cdiv(TURNS, cdiv(TURNS, TURNS_AT_ONCE[GROUPS]))       # turns whose loads are under way
    WHOLE = K % (8 * SLICE * BATCH) == 0                 # no warp has a slice behind the last one
    LOADED = min(GROUPS, 2)                              # groups whose x is in registers at once
    XS, B = 8 * BATCH * LOADED, 4 * TILES
    CHAINS = 1 if normed else 2              # sums that a tile has: one for each half of a slice
    SUMS = 4 * CHAINS * TILES * GROUPS
    load_8, _ = vector(8)
    load_weights = load_four_shared if hopper else load_four

    @inlined
    def row_of(i, w, first, second):
        """The row of W that is the block's i-th, or the last one if W has no more"""
        row = first + i if i < 8 * FIRST_TILES else second + i - u32(8 * FIRST_TILES)
        return min(u32(row), u32(w.shape[0]) - u32(1))

    @inlined
    def ask_for(w, first, second, gain):
        """Asks the copy engine for the block's rows, and behind them for the gain, if x is normed.
        Returns the mbarrier to wait for."""
        barrier, t = shared_address(cuda.shared.array(1, u64)), thread_id()
        if hopper and t < WARP:
            smem = shared_address(cuda.shared.array(0, u32, 16))
            if t == 0:
                mbarrier_init(barrier, u32(1))
                mbarrier_fence()
                mbarrier_expect(barrier, u32(COUNT * ROW + GAIN))
                if normed:
                    bulk_copy(smem + u32(COUNT * STRIDE), global_address(gain), u32(GAIN), barrier)
            cuda.syncwarp()                  # it is counting
            if t < COUNT:
                row = row_of(t, w, first, second)
                bulk_copy(smem + u32(t) * u32(STRIDE), global_address(w) + u64(row) * u64(ROW),
                          u32(ROW), barrier)
        return barrier

    @inlined
    def place_in_smem(w, first, second, tile):
        """Where the row of W lies that this lane reads of a tile"""
        smem = shared_address(cuda.shared.array(0, u32, 16))
        return smem + (u32(8 * tile) + own_row()) * u32(STRIDE)

    @inlined
    def place_in_memory(w, first, second, tile):
        row = row_of(u32(8 * tile) + own_row(), w, first, second)
        return global_address(w) + u64(row) * u64(ROW)
    place_of, Offset = (place_in_smem, u32) if hopper else (place_in_memory, u64)

    @inlined
    def add_product(acc, ss, xs, x0, gain_of, a, b, group):
        """acc += a slice's product of W, which is b, and eight numbers of x, of a row of a group"""
        if normed:
            for e in range(8):
                ss[group] = cuda.fma(xs[x0 + e], xs[x0 + e], ss[group])
                xs[x0 + e] = fmul_rn(xs[x0 + e], gain_of[e])
        for pair in range(4):
            two_parts(a, 2 * pair, xs[x0 + 2 * pair], xs[x0 + 2 * pair + 1])
        for tile in range(TILES):
            for half in range(2):
                chain = half % CHAINS
                mma(acc, 4 * (CHAINS * (TILES * group + tile) + chain), a, 4 * half, b,
                    4 * tile + 2 * half)

    @inlined
    def multiply(partial, squares, x, starts, gain, w, first, second, barrier):
        """partial[warp, group, tile, r, n] = this warp's share of sum_k W[n, k] gain[k] x[r, k],
        and squares[warp, GROUP group + r] of sum_k x[r, k]^2, for the rows of x that begin at
        x[starts[group]].  The lane that reads row r of x reads row n = r of each tile, too."""
        q, row, warp = thread_id() & u32(3), own_row(), warp_id()
        first_k = u32(SLICE) * warp + u32(8) * q
        acc, ss = filled(SUMS, f32(0)), filled(GROUPS, f32(0))           # hi's two, mid's two
        xs, a, b = cuda.local.array(XS, f32), filled(8, u32(0)), cuda.local.array(B, u32)
        gains, gain_of = cuda.shared.array(0, f32, 16) if hopper else gain, filled(8, f32(1))
        for turn0 in range(0, TURNS, BATCH):
            for group0 in range(0, GROUPS, LOADED):
                for i in range(BATCH):       # all loads are under way at once
                    k = u32((turn0 + i) * 8 * SLICE) + first_k
                    for group in range(LOADED):
                        eight = load_8(x, starts[group0 + group] + (
                            k if WHOLE else min(u32(k), u32(K - 8))))
                        for e in range(8):
                            x_e = eight[e] if WHOLE or k < K else f32(0)
                            xs[8 * (LOADED * i + group) + e] = x_e
                if hopper and turn0 == 0 and group0 == 0:
                    mbarrier_wait(barrier, u32(0))
                for i in range(BATCH):
                    k = u32((turn0 + i) * 8 * SLICE) + first_k
                    if WHOLE or u32((turn0 + i) * 8) + warp < SLICES:    # true for a whole warp
                        k = k if WHOLE else min(u32(k), u32(K - 8))
                        for tile in range(TILES):
                            place = place_of(w, first, second, tile)
                            load_weights(b, 4 * tile, place + Offset(2 * k))
                        if normed:
                            eight = load_8(gains, FIRST_GAIN + k)
                            for e in range(8):
                                gain_of[e] = eight[e]
                        for group in range(LOADED):
                            add_product(acc, ss, xs, 8 * (LOADED * i + group), gain_of, a, b,
                                        group0 + group)
        for group in range(GROUPS):
            for tile in range(TILES):
                for e in range(2):
                    i = 4 * CHAINS * (TILES * group + tile) + e
                    hi, mid = acc[i], acc[i + 2]
                    if CHAINS == 2:
                        hi, mid = hi + acc[i + 4], mid + acc[i + 6]
                    partial[warp, group, tile, row, u32(2) * q + u32(e)] = hi + mid
            if normed:
                of_row = quad_sum(ss[group])
                if q == 0:
                    squares[warp, u32(GROUP * group) + row] = of_row
        cuda.syncthreads()                   # all shares are there

    @inlined
    def total(partial, tile, r, n):
        group, row = r >> u32(3), r & u32(GROUP - 1)
        s = partial[0, group, tile, row, n]
        for warp in range(1, 8):
            s += partial[warp, group, tile, row, n]
        return s

    return DeviceFunctions(ask_for=ask_for, multiply=multiply, total=total)

def tiles_a_block(tiles, K, groups):
    """Of W (N, K): twice as many if they are some, or the rows many, so that x is read and split
    half as often, unless there is no room for several blocks on a multiprocessor."""
    room = 2 * tiles * 8 * weight_stride(K) <= 72 << 10
    return 2 * tiles if room and (tiles > 1 or groups > 1) else tiles

def product_smem(K, tiles, normed, hopper):
    """Bytes of dynamic shared memory of a block of a product"""
    return tiles * 8 * weight_stride(K) + 4 * K * normed if hopper else 0

ProductKernels = namedtuple("ProductKernels", "qkv merge proj gate_up down logits")

@made_once
def product_kernels(C, HD, D, F, GROUPS, hopper, biased):
    """ProductKernels for these sizes; biased: q, k and v have biases.  Blocks of 256 threads; the
    first 64 GROUPS have an output of each tile, of row r and the tile's column t % 8.  Along y they
    have the next rows.  Where there are no more of them, the last one is multiplied again, and its
    products left."""
    OF_X, OF_SWIGLU = tiles_a_block(2, C, GROUPS), tiles_a_block(1, F, GROUPS)
    HALF_OF_X, ROWS = OF_X // 2, GROUP * GROUPS
    two_of_x, of_x = (row_product(C, tiles, GROUPS, True, hopper) for tiles in (2, OF_X))
    of_att = row_product(HD, 1, 1, False, hopper)
    of_swiglu = row_product(F, OF_SWIGLU, GROUPS, False, hopper)
    # their shares: warps, groups, tiles, rows and columns
    ALONE, TWO, SHARES, SHARES_OF_SWIGLU = (8, 1, 1, 8, 8), *(
        (8, GROUPS, tiles, 8, 8) for tiles in (2, OF_X, OF_SWIGLU))
    SQUARES, TABLE, HALF, KEYS = (8, ROWS), (5, AT_ONCE), D // 2, keys_a_part(D)
    OF_TABLE = cdiv(5 * AT_ONCE, 256 - WARP)             # numbers that a thread copies
    ATT, ATT_LINE = 8 * weight_stride(HD) // 4 if hopper else 0, HD + 4      # floats of smem
    (load_2, _), (load_4, store_4) = vector(2), vector(4)
    take_turn = after_previous if hopper else at_once
    two_at_once = cuda_kernel(launch_bounds=(256, 2))

    @inlined
    def own_table(rows):
        """`rows` in shared memory.  Its copy to the device had ended before `take` began, which is
        launched without overlap: all that follows may read it before `take_turn`, while the kernel
        in front computes.  Warps 1 and on do, for warp 0 asks for W."""
        table = cuda.shared.array(TABLE, types.int32)
        for turn in range(OF_TABLE):
            i = thread_id() + u32((256 - WARP) * turn) - u32(WARP)
            if thread_id() >= WARP and i < 5 * AT_ONCE:
                table[0, i] = entry(rows, 0, i)          # its lines follow each other
        cuda.syncthreads()                   # it is there, as is the mbarrier
        return table

    @inlined
    def begin():
        """The first row of the block"""
        return u32(ROWS) * u32(cuda.blockIdx.y)

    @inlined
    def starts_of(base, count, K):
        """Where the rows of x (rows, K) begin that this lane reads, one of each group"""
        starts = cuda.local.array(GROUPS, u32)
        for group in range(GROUPS):
            row = min(u32(base + u32(GROUP * group) + own_row()), u32(count - u32(1)))
            starts[group] = row * u32(K)
        return starts

    @inlined
    def rstd_of(squares, r, eps):
        ss = squares[0, r]
        for warp in range(1, 8):
            ss += squares[warp, r]
        return rsqrtf(cuda.fma(ss, f32(1 / C), eps))

    @two_at_once
    def qkv(q, kc, vc, x, gain, w, bias, cos, sin, rows, eps):
        """A block: pairs i0 to i0 + 7 of a head.     grid ((H + 2 G) D / 16, rows / ROWS)
        q (AT_ONCE, HD), kc, vc (slots, G, T, D) of a layer, x (AT_ONCE, C), w (QKV, C) bf16
        bias (QKV,); any array if not `biased`"""
        G, H, block = u32(kc.shape[1]), u32(HD // D), u32(cuda.blockIdx.x)
        head = u32(block // u32(HALF // 8))
        i0 = u32(8) * (block - head * u32(HALF // 8))
        first, second = head * u32(D) + i0, head * u32(D) + i0 + u32(HALF)
        partial, squares = cuda.shared.array(TWO, f32), cuda.shared.array(SQUARES, f32)
        barrier = two_of_x.ask_for(w, first, second, gain)
        table = own_table(rows)
        t, count = thread_id(), u32(table[COUNTS, N_ROWS])
        n, i = t >> u32(3), i0 + (t & u32(7))
        r, starts = begin() + n, starts_of(begin(), count, C)
        mine = n < ROWS and r < count
        of_mine = r if mine else u32(0)
        slot, pos = u32(table[SLOT, of_mine]), u32(table[POSITION, of_mine])
        c, s = cos[pos, i], sin[pos, i]
        take_turn()
        two_of_x.multiply(partial, squares, x, starts, gain, w, first, second, barrier)
        if mine:
            rstd = rstd_of(squares, n, eps)
            u = two_of_x.total(partial, 0, n, t & u32(7))
            v = two_of_x.total(partial, 1, n, t & u32(7))
            if biased:
                u = cuda.fma(u, rstd, bias[first + (t & u32(7))])
                v = cuda.fma(v, rstd, bias[second + (t & u32(7))])
            else:
                u, v = u * rstd, v * rstd
            if head < H + G:
                u, v = cuda.fma(u, c, -fmul_rn(v, s)), cuda.fma(v, c, fmul_rn(u, s))
            if head < H:
                q[r, first + (t & u32(7))], q[r, second + (t & u32(7))] = u, v
            elif head < H + G:
                kc[slot, head - H, pos, i], kc[slot, head - H, pos, i + u32(HALF)] = u, v
            else:
                kv = head - H - G
                vc[slot, kv, pos, i], vc[slot, kv, pos, i + u32(HALF)] = u, v

    @inlined
    def parts_at(position):
        """Of the context of a row at this position"""
        return u32(u32(position) // u32(KEYS)) + u32(1)

    @inlined
    def merged(o, ml, row, parts, k):
        """Columns k to k + 3 of att of a row, of all its parts, in their order"""
        first, head, last = u32(row) * u32(o.shape[1]), u32(k // u32(D)), u32(parts - u32(1))
        top, l, sums = f32(-math.inf), f32(0), filled(4, f32(0))
        m_of, l_of, o_of = filled(8, f32(0)), filled(8, f32(0)), filled(32, f32(0))
        for part0 in range(0, i32(parts), 8):
            before = top
            for j in range(8):               # without a branch: all are under way at once
                part = first + min(u32(part0 + j), last)
                two = load_2(ml, u64(part * u32(HD // D) + head) * u64(2))
                m_of[j], l_of[j] = two[0], two[1]
                four = load_4(o, u64(part) * u64(HD) + u64(k))
                for e in range(4):
                    o_of[4 * j + e] = four[e]
            for j in range(8):
                top = max(top, m_of[j])
            shrink = exp2(before - top)
            l *= shrink
            for e in range(4):
                sums[e] *= shrink
            for j in range(8):
                if u32(part0 + j) <= last:
                    p = exp2(m_of[j] - top)
                    l += p * l_of[j]
                    for e in range(4):
                        sums[e] += p * o_of[4 * j + e]
        scale = fast_fdividef(f32(1), l)
        for e in range(4):
            sums[e] *= scale
        return sums

    @cuda_kernel
    def merge(att, o, ml, rows):
        """att (AT_ONCE, HD) of its parts     grid (ceil(HD / 512), rows), 128 threads"""
        r, k = u32(cuda.blockIdx.y), u32(4) * (u32(cuda.blockIdx.x) * u32(128) + thread_id())
        here = i32(r) < entry(rows, COUNTS, N_ROWS) and k < HD
        parts = parts_at(entry(rows, POSITION, r))
        take_turn()
        if here:
            store_4(att, u64(r) * u64(HD) + u64(k), merged(o, ml, r, parts, k))

    @two_at_once
    def proj(x, o, ml, w, rows):
        """x[r, n] += sum_k W[n, k] att[r, k], att merged from its parts; of one group.
        grid C / 8
        o (AT_ONCE, parts, HD), ml (AT_ONCE, parts, H, 2): see `attend`"""
        t, first = thread_id(), u32(8) * u32(cuda.blockIdx.x)
        partial, squares = cuda.shared.array(ALONE, f32), cuda.shared.array((1, 1), f32)
        att = cuda.shared.array(0, f32, 16)
        barrier = of_att.ask_for(w, first, first, w)
        table = own_table(rows)
        count = u32(table[COUNTS, N_ROWS])
        r, n, old = t >> u32(3), first + (t & u32(7)), f32(0)
        starts = filled(1, u32(ATT) + min(own_row(), u32(count - u32(1))) * u32(ATT_LINE))
        take_turn()
        if r < count:
            old = x[r, n]
        row = u32(0)
        while row < count:
            parts, k = parts_at(table[POSITION, row]), u32(4) * t
            while k < HD:
                store_4(att, u32(ATT) + row * u32(ATT_LINE) + k, merged(o, ml, row, parts, k))
                k += u32(4 * 256)
            row += u32(1)
        cuda.syncthreads()                   # att is whole
        of_att.multiply(partial, squares, att, starts, att, w, first, first, barrier)
        if r < count:
            x[r, n] = old + of_att.total(partial, 0, r, t & u32(7))

    @two_at_once
    def gate_up(y, x, gain, w, rows, eps):
        """y = silu(gate) * up, of rmsnorm(x).     grid (ceil(F / (4 OF_X)), rows / ROWS)
        y (AT_ONCE, F), x (AT_ONCE, C), w (2 F, C) bf16"""
        t, first = thread_id(), u32(8 * HALF_OF_X) * u32(cuda.blockIdx.x)
        partial, squares = cuda.shared.array(SHARES, f32), cuda.shared.array(SQUARES, f32)
        barrier = of_x.ask_for(w, first, first + u32(F), gain)
        table = own_table(rows)
        count, r, column = u32(table[COUNTS, N_ROWS]), t >> u32(3), t & u32(7)
        starts = starts_of(begin(), count, C)
        take_turn()
        of_x.multiply(partial, squares, x, starts, gain, w, first, first + u32(F), barrier)
        if r < ROWS and begin() + r < count:
            rstd = rstd_of(squares, r, eps)
            for tile in range(HALF_OF_X):
                n = first + u32(8 * tile) + column
                gate = of_x.total(partial, tile, r, column) * rstd
                up = of_x.total(partial, HALF_OF_X + tile, r, column) * rstd
                if n < F:
                    y[begin() + r, n] = fast_fdividef(gate * up, f32(1) + exp(-gate))

    @two_at_once
    def down(x, y, w, rows):
        """x[r, n] += sum_k W[n, k] y[r, k]     grid (ceil(C / (8 OF_SWIGLU)), rows / ROWS)"""
        t, first = thread_id(), u32(8 * OF_SWIGLU) * u32(cuda.blockIdx.x)
        partial, squares = cuda.shared.array(SHARES_OF_SWIGLU, f32), cuda.shared.array((1, 1), f32)
        barrier = of_swiglu.ask_for(w, first, first + u32(8), w)
        table = own_table(rows)
        count, r, column = u32(table[COUNTS, N_ROWS]), t >> u32(3), t & u32(7)
        mine = r < ROWS and begin() + r < count
        starts, old = starts_of(begin(), count, F), filled(OF_SWIGLU, f32(0))
        take_turn()
        for tile in range(OF_SWIGLU):
            n = first + u32(8 * tile) + column
            if mine and n < C:
                old[tile] = x[begin() + r, n]
        of_swiglu.multiply(partial, squares, y, starts, y, w, first, first + u32(8), barrier)
        for tile in range(OF_SWIGLU):
            n = first + u32(8 * tile) + column
            if mine and n < C:
                x[begin() + r, n] = old[tile] + of_swiglu.total(partial, tile, r, column)

    @two_at_once
    def logits(out, x, gain, w, rows, eps):
        """Logits of the wanted rows, and behind them these rows of x.
        grid (ceil(V / (8 OF_X)), rows / ROWS)
        out (lines, V + C), from line rows[COUNTS, FIRST_LINE] on; w (V, C) bf16"""
        t, first, V = thread_id(), u32(8 * OF_X) * u32(cuda.blockIdx.x), u32(w.shape[0])
        partial, squares = cuda.shared.array(SHARES, f32), cuda.shared.array(SQUARES, f32)
        barrier = of_x.ask_for(w, first, first + u32(8 * HALF_OF_X), gain)
        table = own_table(rows)
        count, base = u32(table[COUNTS, N_WANTED]), begin()
        starts, r, column = cuda.local.array(GROUPS, u32), t >> u32(3), t & u32(7)
        for group in range(GROUPS):
            wanted = min(u32(base + u32(GROUP * group) + own_row()), u32(count - u32(1)))
            starts[group] = u32(table[WANTED, wanted]) * u32(C)
        take_turn()
        of_x.multiply(partial, squares, x, starts, gain, w, first, first + u32(8 * HALF_OF_X),
                      barrier)
        line = u32(table[COUNTS, FIRST_LINE])
        if r < ROWS and base + r < count:
            rstd = rstd_of(squares, r, eps)
            for tile in range(OF_X):
                n = first + u32(8 * tile) + column
                if n < V:
                    out[line + base + r, n] = of_x.total(partial, tile, r, column) * rstd
        i = base * u32(C) + u32(256) * u32(cuda.blockIdx.x) + t
        while i < u32(min(count, base + u32(ROWS))) * u32(C):
            r = u32(i // u32(C))
            c = i - r * u32(C)
            out[line + r, V + c] = x[u32(table[WANTED, r]), c]
            i += u32(256) * u32(cuda.gridDim.x)

    return ProductKernels(qkv, merge, proj, gate_up, down, logits)

@made_once
def attend_kernel(D, HEADS, BLOCKS, hopper):
    """Of HEADS query heads that share a head of keys, some KEYS keys of the context.  BLOCKS: how
    many such groups of query heads share it."""
    LANES, KEYS, CHUNKS = lanes_a_key(D), keys_a_part(D), D // 4
    EACH = WARP // LANES                     # keys that a warp has at once, four times
    Q = HEADS * 4                            # floats of the queries that a lane has
    SUMS, OF_WARPS = (8, HEADS * D), (8, HEADS)
    load_4, _ = vector(4)
    take_turn = after_previous if hopper else at_once
    steps = LANES.bit_length() - 1

    def butterflies(combine, first, last, count):
        """The device function that combines x[0], .. x[count - 1] over the lanes that differ in
        bits first, .. last - 1 of their numbers: step by step, that none waits for another"""
        @inlined
        def over(x):
            for i in range(first, last):
                for j in range(count):
                    x[j] = combine(x[j], cuda.shfl_xor_sync(ALL, x[j], 1 << i))
        return over
    add_over_key = butterflies(operator.add, 0, steps, Q)
    max_over_keys = butterflies(max, steps, 5, HEADS)
    add_over_keys, add_all_over_keys = (
        butterflies(operator.add, steps, 5, count) for count in (HEADS, Q))

    @cuda_kernel
    def attend(o, ml, q, kc, vc, rows, scale2):
        """o = sum_t 2^(s_t - m) v_t, m = max_t s_t, l = sum_t 2^(s_t - m), s_t = scale2 <q, k_t>
        of a part of the keys.     grid (H / HEADS, parts, rows), 256 threads
        o (AT_ONCE, parts, HD), ml (AT_ONCE, parts, H, 2): m and l     scale2: of 2^x, not e^x

        A group of LANES lanes has a key, a warp EACH * 4, whose loads are all under way at once."""
        t, lane, warp = thread_id(), lane_id(), warp_id()
        block, part, r = u32(cuda.blockIdx.x), u32(cuda.blockIdx.y), u32(cuda.blockIdx.z)
        head = u32(HEADS) * block            # the first of them
        n = entry(rows, POSITION, r) + i32(1) - i32(u32(KEYS) * part)
        keys = u32(entry(rows, SLOT, r)) * u32(kc.shape[1]) + u32(block // u32(BLOCKS))
        plane = (u64(keys) * u64(kc.shape[2]) + u64(u32(KEYS) * part)) * u64(D)
        here = r < entry(rows, COUNTS, N_ROWS) and n > 0      # for a whole block
        if hopper and here and t == 0:       # all but the newest are long in memory
            size = u32(min(n, i32(KEYS))) * u32(4 * D)
            bulk_prefetch(global_address(kc) + u64(4) * plane, size)
            bulk_prefetch(global_address(vc) + u64(4) * plane, size)
        take_turn()
        if here:
            mine = (lane & u32(LANES - 1)) < CHUNKS
            d = u32(4) * u32(min(lane & u32(LANES - 1), u32(CHUNKS - 1)))
            first = warp * u32(4 * EACH) + (lane >> u32(steps))      # of the lane's four keys
            qs, scores, sums = filled(Q, f32(0)), filled(Q, f32(0)), filled(Q, f32(0))
            ks, vs = filled(16, f32(0)), filled(16, f32(0))
            ms, ls = filled(HEADS, f32(0)), filled(HEADS, f32(0))
            for i in range(4):
                key = u32(min(i32(first + u32(i * EACH)), i32(n - i32(1))))
                four = load_4(kc, plane + u64(key * u32(D) + d))
                for e in range(4):
                    ks[4 * i + e] = four[e]
            for i in range(4):
                key = u32(min(i32(first + u32(i * EACH)), i32(n - i32(1))))
                four = load_4(vc, plane + u64(key * u32(D) + d))
                for e in range(4):
                    vs[4 * i + e] = four[e]
            for h in range(HEADS):
                four = load_4(q, u64(r) * u64(q.shape[1]) + u64((head + u32(h)) * u32(D) + d))
                for e in range(4):
                    qs[4 * h + e] = four[e] if mine else f32(0)
            o_smem, m_smem = cuda.shared.array(SUMS, f32, 16), cuda.shared.array(OF_WARPS, f32)
            l_smem = cuda.shared.array(OF_WARPS, f32)
            for h in range(HEADS):
                for i in range(4):
                    for e in range(4):
                        scores[4 * h + i] += qs[4 * h + e] * ks[4 * i + e]
            add_over_key(scores)
            for h in range(HEADS):
                ms[h] = f32(-1e30)           # of a warp without a key: less than any score
                for i in range(4):
                    s = scores[4 * h + i] * scale2
                    scores[4 * h + i] = s if i32(first + u32(i * EACH)) < n else f32(-math.inf)
                    ms[h] = max(ms[h], scores[4 * h + i])
            max_over_keys(ms)
            for h in range(HEADS):
                for i in range(4):
                    p = exp2(scores[4 * h + i] - ms[h])
                    ls[h] += p
                    for e in range(4):
                        sums[4 * h + e] += p * vs[4 * i + e]
            add_over_keys(ls)
            add_all_over_keys(sums)
            for h in range(HEADS):
                if mine and lane < LANES:
                    for e in range(4):
                        o_smem[warp, u32(h * D) + d + u32(e)] = sums[4 * h + e]
                if lane == 0:
                    m_smem[warp, h], l_smem[warp, h] = ms[h], ls[h]
            cuda.syncthreads()               # the warps' sums are there
            i = t
            while i < u32(HEADS * D):
                h = u32(0)
                for later in range(1, HEADS):
                    h = u32(later) if i >= u32(later * D) else h
                m, l, s = m_smem[0, h], f32(0), f32(0)
                for w in range(1, 8):
                    m = max(m, m_smem[w, h])
                for w in range(8):
                    p = exp2(m_smem[w, h] - m)
                    l += p * l_smem[w, h]
                    s += p * o_smem[w, i]
                o[r, part, head * u32(D) + i] = s
                if i == h * u32(D):
                    ml[r, part, head + h, 0], ml[r, part, head + h, 1] = m, l
                i += u32(256)
    return attend

@made_once
def take_kernel(hopper):
    start_next = let_next_start if hopper else at_once

    @cuda_kernel
    def take(x, rows, wte):
        """x[r] = wte[token of r]     a block of 128 threads a row
        x (AT_ONCE, C), rows (5, AT_ONCE), wte (V, C) bf16, or another matrix, whatever its type"""
        r = cuda.blockIdx.x
        start_next()                         # its weights may come; it waits for the rest
        if r < rows[COUNTS, N_ROWS]:
            for c in range(cuda.threadIdx.x, x.shape[1], 128):
                x[r, c] = value(wte[rows[TOKEN, r], c])
    return take

# ---- drawing tokens
# `choose` does what nanoeuler.sample does, a block a line of logits, in float64 and with the random
# number of the host: by one seed both draw the same tokens as long as their logits agree.
DRAW = len(ne.Draw._fields)
TEMPERATURE, TOP_K, TOP_P, MIN_P, UNIFORM = range(DRAW)  # places in a line of draws

@inlined
def sortable(z):
    """A float32 as a u32, in the order of numbers; -0 is 0, NaN more than all numbers."""
    bits = u32(float_as_int(z + f32(0)))
    if z != z:
        return u32(0xFFFFFFFF)
    return u32(bits ^ u32(0xFFFFFFFF)) if bits >> u32(31) else u32(bits | u32(0x80000000))

@inlined
def likeliest_of(z, V):
    """Where the first of the largest z[:V] is."""
    best = i64(0)
    for i in range(cuda.threadIdx.x, V, 4 * 256):
        for j in range(4):                   # all four are under way at once
            at = min(i + 256 * j, V - 1)
            best = max(best, i64(sortable(z[at])) << 31 | i64(0x7FFFFFFF - at))
    return i32(0x7FFFFFFF - (block_max(best) & 0x7FFFFFFF))

@inlined
def least_of_the_largest(z, odds, V, largest, want, counted):
    """Of z in descending order as many are kept as it takes to reach `want`: with the sum of their
    odds, or, if counted, with their number.  Returns the key (`sortable`) of the last one that is
    kept, which is found bit by bit, the highest first, and how many of this key are kept."""
    key, above, of_each = u32(0), f64(0), f64(0)
    for bit in range(33):                    # the last time: what those above it reach
        higher = u32(key | u32(0x80000000) >> u32(bit)) if bit < 32 else u32(key + u32(1))
        reached = f64(0)
        for i in range(cuda.threadIdx.x, V, 4 * 256):
            for j in range(4):               # all four are under way at once
                at = min(i + 256 * j, V - 1)
                found, each = sortable(z[at]), f64(1) if counted else odds[at]
                reached += each if i + 256 * j < V and found >= higher else f64(0)
                of_each = each if found == key else of_each
        reached = block_sum(reached)
        if bit == 32:
            above = reached
        elif reached >= want and higher <= sortable(largest):
            key, of_each = higher, f64(0)
    return key, max(f64(1), math.ceil((want - above) / block_max(of_each)))

@inlined
def sums_up_to(x):
    """The sums of x of all threads up to each of the 256"""
    sums, t = cuda.shared.array(256, f64), cuda.threadIdx.x
    sums[t] = x
    cuda.syncthreads()
    for i in range(8):
        before = sums[t - (1 << i)] if t >= 1 << i else f64(0)
        cuda.syncthreads()
        sums[t] += before
        cuda.syncthreads()
    return sums

@inlined
def draw_one(token, z, odds, V, likeliest, draw):
    """token[0] = the one drawn, by a block"""
    t, largest, total = cuda.threadIdx.x, z[likeliest], f64(0)
    for i in range(t, V, 256):
        odds[i] = math.exp((f64(z[i]) - f64(largest)) / max(draw[TEMPERATURE], 1e-99))
        total += odds[i]
    total = block_sum(total)                 # its barriers: all odds are there
    least, n_least = u32(0), f64(V)          # kept are those above, and the first n of key `least`
    for counted in (True, False):            # by top-k, and by top-p
        want = draw[TOP_K] if counted else draw[TOP_P] * total
        if (0 < want < V) if counted else draw[TOP_P] < 1:
            key, n = least_of_the_largest(z, odds, V, largest, want, counted)
            if key > least or key == least and n < n_least:
                least, n_least = key, n
    each = (V + 255) // 256                  # from here on a thread has neighbours
    first, last = min(t * each, V), min(t * each + each, V)
    mine = f64(0)                            # how many of them have the key `least`
    for i in range(first, last):
        mine += f64(1) if sortable(z[i]) == least else f64(0)
    seen, kept = sums_up_to(mine)[t] - mine, f64(0)      # how many of the threads before
    for i in range(first, last):
        key = sortable(z[i])
        seen += f64(1) if key == least else f64(0)
        if key < least or key == least and seen > n_least or odds[i] < draw[MIN_P]:
            odds[i] = f64(0)
        kept += odds[i]
    sums = sums_up_to(kept)
    target = draw[UNIFORM] * sums[255]
    passed = sums[t] > target or sums[t] == sums[255]    # the latter: where rounding made it all
    first_thread = -block_max(-t if passed else -256)    # of those that passed: one of its tokens
    if t == first_thread:
        s, token[0] = sums[t] - kept, -1
        for i in range(first, last):
            if odds[i] > 0 and (token[0] < 0 or s <= target):
                token[0] = i
            s += odds[i]
        if token[0] < 0:                     # where rounding made nothing more of the thread's
            token[0] = likeliest

@made_once
def choose_kernel(hopper):
    take_turn = after_previous if hopper else at_once

    @cuda_kernel
    def choose(ids, latest, odds, out, draws, rows, V):
        """ids[ring, line] = what nanoeuler.sample draws from out[line, :V] by draws[ring, line], a
        Draw; -1 if the largest of them is not finite.     grid lines, 256 threads
        ids (2, MOST_ROWS) int32, draws (2, MOST_ROWS, 5) float64: in the host's memory
        latest (AT_ONCE,): ids, for `advance`; out (lines, V + C)
        odds (AT_ONCE, V) float64: e^((z - max z) / temperature)"""
        block, line = cuda.blockIdx.x, entry(rows, COUNTS, FIRST_LINE) + cuda.blockIdx.x
        here = block < entry(rows, COUNTS, N_WANTED)     # for the whole block
        ring, t = entry(rows, COUNTS, RING), cuda.threadIdx.x
        token, draw = cuda.shared.array(1, types.int32), cuda.shared.array(DRAW, f64)
        if t < DRAW:
            draw[t] = told(draws, (ring * draws.shape[1] + line) * DRAW + t)
        take_turn()
        cuda.syncthreads()                   # draw is there
        if here:
            z = out[line]
            likeliest = likeliest_of(z, V)
            finite = math.isfinite(z[likeliest])
            if finite and draw[TEMPERATURE] > 0:
                draw_one(token, z, odds[block], V, likeliest, draw)
            elif t == 0:
                token[0] = likeliest if finite else i32(-1)
            cuda.syncthreads()               # the token is there
            if t == 0:
                ids[ring, line], latest[block] = token[0], token[0]
    return choose

@cuda_kernel
def advance_kernel(rows, latest):
    """Makes the table of a step of the one before it, whose rows were all wanted: the tokens that
    were drawn, each behind its row.     AT_ONCE threads"""
    r = cuda.threadIdx.x
    if r < rows[COUNTS, N_ROWS]:
        rows[TOKEN, r] = max(latest[r], 0)
        rows[POSITION, r] += 1
    if r == 0:
        rows[COUNTS, RING] ^= 1

def heads_a_block(H, G):
    """Of the H / G that share keys: as many as divide it, at most four"""
    return max(n for n in range(1, 5) if H // G % n == 0)

def rows_refused(cfg):
    """Why this section cannot take a model with matrices in bfloat16, or "" """
    size = ne.dims_of(cfg)
    if kernel_path() == "portable":
        return "the kernel path is portable, or the GPU older than capability 8.0"
    if cfg.qk_norm:
        return "the model has norms of q and k (qk_norm)"
    if window_of(cfg):
        return f"the model has a window of {ne.counted(window_of(cfg), 'token')}"
    for name, n, unit in (("n_embd", size.C, 8), ("n_hidden", size.F, 8), ("head_dim", size.D, 16)):
        if n % unit:
            return f"{name} is {n}, no multiple of {unit}"
    if size.D > 128:
        return f"head_dim is {size.D}, more than 128"
    smem = whole_smem(size, 1)
    room = cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    if smem > room:
        return f"a block would need {smem:,} bytes of shared memory, it may have {room:,}"
    return ""

def whole_smem(size, groups):
    """Bytes of shared memory of the largest block of the kernels for so many groups, or fewer: what
    a launch asks for, and its shares, squares, table and mbarrier"""
    smem, others = rows_smem(size, groups, has_copy_engine()), min(groups, 2)

    def with_shares(asked, groups, tiles):
        return asked + 8 * groups * (tiles * 8 * 8 + 8) * 4 + 5 * AT_ONCE * 4 + 8
    return max(with_shares(smem.qkv, groups, 2), with_shares(smem.proj, 1, 1),
               with_shares(smem.gate_up, groups, tiles_a_block(2, size.C, groups)),
               with_shares(smem.add_att, others, tiles_a_block(1, size.HD, others)),
               with_shares(smem.down, others, tiles_a_block(1, size.F, others)))

def rows_bytes(cfg):
    """What RowSteps has beside its cache, and Prompts, if slots are as long as the context"""
    if rows_refused(cfg):
        return 0
    size, T = ne.dims_of(cfg), cfg.seq_len
    parts = cdiv(T, keys_a_part(size.D))
    a_row = 4 * (2 * size.C + 2 * size.HD + size.F + parts * (size.HD + 2 * size.H)) + 12 * size.V
    a_token = 8 * size.C + 2 * size.QKV + 2 * size.HD + 6 * size.F + 4 * size.H
    return AT_ONCE * a_row + T * a_token

def has_copy_engine():
    """Has the GPU Hopper's copy engine?"""
    return kernel_path() == "wgmma"

# Bytes of dynamic shared memory of a block of each kernel; add_att is `down` of att
RowsSmem = namedtuple("RowsSmem", "qkv proj add_att gate_up down")

def rows_smem(size, groups, hopper):
    """RowsSmem of the kernels for so many groups"""
    def of(tiles, K, normed=False):
        return product_smem(K, tiles, normed, hopper)
    of_x, of_att, of_swiglu = (tiles_a_block(tiles, K, groups) for tiles, K in (
        (2, size.C), (1, size.HD), (1, size.F)))
    return RowsSmem(of(2, size.C, True), of(1, size.HD) + GROUP * 4 * (size.HD + 4),
                    of(of_att, size.HD), of(of_x, size.C, True), of(of_swiglu, size.F))

def upload(x, staged):
    """Queues the copy of pinned memory to the beginning of an array, as copy_to_device would, which
    looks at both first."""
    ok(driver.cuMemcpyHtoDAsync(int(x.gpu_data.device_pointer), staged.ctypes.data, staged.nbytes,
                                int(gpu.stream.handle)))

def download(staged, x):
    """Queues the copy of the beginning of an array to pinned memory."""
    ok(driver.cuMemcpyDtoHAsync(staged.ctypes.data, int(x.gpu_data.device_pointer), staged.nbytes,
                                int(gpu.stream.handle)))

def row_to(x, out, start):
    """Queues the copy of a row's numbers, out's from `start` on, to the first row of x."""
    ok(driver.cuMemcpyDtoDAsync(int(x.gpu_data.device_pointer),
                                int(out.gpu_data.device_pointer) + start * out.dtype.itemsize,
                                x.shape[1] * x.dtype.itemsize, int(gpu.stream.handle)))

# Groups of a block of qkv and gate_up, and of the others.  Kernels for a few rows and for many
# compute the same bits.
Groups = namedtuple("Groups", "normed others")

def groups_a_block(count, most):
    """Of so many rows, at most `most`"""
    groups = min(power_of_two(cdiv(count, GROUP)), most)
    return Groups(groups, min(groups, 2))

def power_of_two(n):
    """n, rounded up to one; of 0 it is 0"""
    return 1 << (n - 1).bit_length() if n else 0

# What a graph of RowSteps is for: up to so many rows, parts of the context, lines of logits; and
# alone    the rows are a whole step: it also brings their table, and the lines to the host
# drawn    tokens are drawn from the lines, which stay on the device
# ahead    the table is made of that of the step before, and of the tokens that this one drew
# Without parts they are rows of a prompt that was read, of which only the logits are left to do.
StepKind = namedtuple("StepKind", "rows parts lines alone drawn ahead", defaults=(False, False))
# What a step is asked for, and which half of `draws` and `chosen` is its
Asked = namedtuple("Asked", "tokens slots positions draws ring")

class RowSteps:
    """Steps of rows through the weights of a decoder, with its cache and its activations.

    What goes to the device and comes back lies in pinned memory, of fixed addresses, which a graph
    can know: of a step of a few rows the host writes a table, launches a graph, and waits."""

    def __init__(self, cfg, weights, slots, T):
        size, self.cfg, self.p, self.T = ne.dims_of(cfg), cfg, weights, T
        self.top, self.hopper = gpu.highest, has_copy_engine()       # whatever is capped later
        self.size = size
        room = cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        self.groups = max(groups for groups in TURNS_AT_ONCE if whole_smem(size, groups) <= room)
        self.smem = {groups: rows_smem(size, groups, self.hopper) for groups in TURNS_AT_ONCE}

        def products(F, groups):
            return product_kernels(size.C, size.HD, size.D, F, groups, self.hopper, cfg.qkv_bias)
        self.kernels = {groups: products(size.F, groups) for groups in TURNS_AT_ONCE}
        self.add_att = {groups: products(size.HD, groups).down for groups in (1, 2)}
        self.heads_a_block = heads_a_block(size.H, size.G)
        self.take = take_kernel(self.hopper)
        self.attend = attend_kernel(size.D, self.heads_a_block,
                                    size.H // size.G // self.heads_a_block, self.hopper)
        self.keys = keys_a_part(size.D)
        parts = self.parts_bucket(T)

        def buffer(*shape):
            return new(shape, np.float32)

        self.kc, self.vc = (buffer(size.L, slots, size.G, T, size.D) for _ in range(2))
        self.cos, self.sin = map(to_device, ne.rope_table(replace(cfg, seq_len=T), np.float32))
        self.x, self.q, self.att, self.y = (
            buffer(AT_ONCE, n) for n in (size.C, size.HD, size.HD, size.F))
        self.o, self.ml = buffer(AT_ONCE * parts * size.HD), buffer(AT_ONCE * parts * size.H * 2)
        self.rows = to_device(np.zeros((5, AT_ONCE), np.int32))
        # a table for each AT_ONCE rows of a step
        self.staged = cuda.pinned_array((ne.MOST_ROWS // AT_ONCE, 5, AT_ONCE), np.int32)
        # of drawn tokens, of a step that is under way and of one that was queued behind it
        self.draws = cuda.mapped_array((2, ne.MOST_ROWS, DRAW), np.float64)
        self.chosen = cuda.mapped_array((2, ne.MOST_ROWS), np.int32)
        self.done = [cuda.event(False) for _ in range(2)]
        self.latest, self.odds = new(AT_ONCE, np.int32), new((AT_ONCE, size.V), np.float64)
        self.choose = choose_kernel(self.hopper)
        self.ahead = None                    # what the step that is queued ahead will be asked for
        self.drawn_slots, self.steady = [], 0            # which drew last, how often in a row
        self.under_way = False               # may the device still read what is staged?
        self.graphs, self.prompts = {}, None             # StepKind -> Graph
        self.prepare(AT_ONCE)
        if others := size.P - 1:             # of `guesses`: the first row of x, all further heads
            head = weights.lm_head
            V, first = others * size.V, head.size - others * size.V * size.C
            self.others = view(head, first, (V, size.C))
            self.guessed = buffer(1, V + size.C)
            table = np.zeros((5, AT_ONCE), np.int32)
            table[COUNTS, [N_ROWS, N_WANTED]] = 1
            self.first_row = to_device(table)
            self.staged_x = cuda.pinned_array(size.C, np.float32)
            self.guessed_host = cuda.pinned_array((1, V + size.C), np.float32)
            self.guess_graph = Graph()

    def prepare(self, lines):
        """Memory for so many lines of logits, and behind each the row of x that it was made of"""
        self.graphs.clear()                  # first: they write into what is freed now
        shape = lines, self.size.V + self.size.C
        self.out, self.pinned = new(shape, np.float32), cuda.pinned_array(shape, np.float32)

    def parts_bucket(self, length):
        """Parts of a context of this length, rounded up to a power of two: a graph for each"""
        return min(power_of_two(cdiv(length, self.keys)), cdiv(self.T, self.keys))

    def compute(self, tokens, slots, positions, wanted):
        """(lines of logits, rows of x) of the wanted rows, on the host, valid until the next call
        tokens, slots, positions of each row, lists; wanted: of which rows, ascending"""
        self.wait()
        self.steady = 0
        return self.run(tokens, slots, positions, wanted)

    def draw(self, tokens, slots, positions, wanted, draws, later=()):
        """ids of tokens drawn from these logits, by a Draw each
        later: those of the tokens behind these, if nothing else is likely to be asked for next"""
        asked = Asked(tokens, slots, positions, draws, 0)
        if self.ahead and self.ahead[:4] == asked[:4]:
            asked = self.ahead               # it is under way, or done
        else:
            self.wait()
            self.steady = self.steady + 1 if slots == self.drawn_slots else 0
            self.drawn_slots = slots
            self.tell(asked)
            self.run(tokens, slots, positions, wanted, drawn=True)
            self.done[0].record(gpu.stream)
        ahead = self.queue_ahead(asked, later) if len(later) == len(wanted) == len(tokens) else None
        self.done[asked.ring].synchronize()
        found = self.chosen[asked.ring, :len(wanted)].tolist()
        self.ahead = ahead and ahead._replace(tokens=found)
        return found

    def queue_ahead(self, asked, later):
        """Queues the step after this one, in which each text goes on with the token that is drawn
        in this one: the device works on while the host looks at these.  If something else is asked
        for then, it was in vain, and that waits until it is done.  So it is queued only after the
        same n slots have drawn for n steps in a row: texts that end by chance then waste few.
        Returns what it will be asked for, without the tokens, which nobody knows yet, or None."""
        count, longest = len(later), max(asked.positions) + 2
        if count > min(self.steady, AT_ONCE) or longest > self.T:
            return None
        ahead = Asked([], asked.slots, [p + 1 for p in asked.positions], later, 1 - asked.ring)
        self.tell(ahead)
        rows = power_of_two(count)
        self.launch(StepKind(rows, self.parts_bucket(longest), rows, True, True, True))
        self.done[ahead.ring].record(gpu.stream)
        return ahead

    def read_prompt(self, slot, ids, wanted):
        """The same of the last `wanted` rows of a prompt, which begins the slot."""
        self.wait()
        T = min(power_of_two(len(ids)), self.T)
        if not self.prompts or len(self.prompts.x) < T:
            for kind in [kind for kind in self.graphs if not kind.parts]:
                del self.graphs[kind]        # they read x of the prompts before
            self.prompts = None              # whose memory is freed before there is more
            self.prompts = Prompts(self.size, T)
        self.under_way = True
        self.prompts.read(self, slot, ids)
        found = []
        for first in range(len(ids) - wanted, len(ids), ne.MOST_ROWS):
            rows = [*range(first, min(first + ne.MOST_ROWS, len(ids)))]
            lines = self.run(rows, rows, rows, range(len(rows)), of_prompt=True)
            found.append([x.copy() for x in lines])
        return [np.concatenate(x) for x in zip(*found)]

    def run(self, tokens, slots, positions, wanted, of_prompt=False, drawn=False):
        """`compute`.  of_prompt: tokens are rows of the prompt.  drawn: it only queues the step, in
        which tokens are drawn."""
        if len(wanted) > len(self.out):
            self.prepare(ne.MOST_ROWS)
        self.under_way, lines, alone = True, 0, len(tokens) <= AT_ONCE
        for i, r0 in enumerate(range(0, len(tokens), AT_ONCE)):
            columns = [column[r0:r0 + AT_ONCE] for column in (tokens, slots, positions)]
            n = len(columns[0])
            here = [r - r0 for r in wanted[lines:bisect.bisect_left(wanted, r0 + n)]]
            self.stage(i, *columns, here, lines)
            if not alone:
                upload(self.rows, self.staged[i])
            self.launch(StepKind(power_of_two(n),
                                 0 if of_prompt else self.parts_bucket(1 + max(columns[2])),
                                 power_of_two(len(here)), alone, drawn))
            lines += len(here)
        if lines and not drawn:
            if not alone:
                download(self.pinned[:lines], self.out)
            self.wait()
        return self.pinned[:lines, :self.size.V], self.pinned[:lines, self.size.V:]

    def launch(self, kind):
        if kind not in self.graphs:
            self.graphs[kind] = Graph()
        self.graphs[kind](functools.partial(self.queue, kind))

    def tell(self, asked):
        """Draws, to the device"""
        numbers = itertools.chain.from_iterable(asked.draws)
        struct.pack_into(f"{DRAW * len(asked.draws)}d", self.draws[asked.ring], 0, *numbers)

    def __del__(self):
        with contextlib.suppress(Exception): # a step that was queued ahead writes what goes now
            self.wait()

    def wait(self):
        """Until the device has done all, and what is staged may be written"""
        if self.under_way:
            gpu.stream.synchronize()
        self.under_way, self.ahead = False, None

    def stage(self, i, tokens, slots, positions, wanted, line):
        """The i-th table of `rows`; what is in it behind the columns nobody uses."""
        lines = tokens, slots, positions, wanted, (len(tokens), len(wanted), line, 0)
        for at, column in enumerate(lines, 5 * i):
            struct.pack_into(f"{len(column)}i", self.staged, 4 * AT_ONCE * at, *column)

    def queue(self, kind):
        """A step of rows, or a part of one: see StepKind.  `take` is launched as any kernel: what
        was before it is done when the next one starts, which may read `rows` before it waits."""
        if kind.ahead:
            launch(advance_kernel, self.rows, self.latest, grid=1, block=AT_ONCE)
        elif kind.alone:
            upload(self.rows, self.staged[0])
        source = self.p.wte if kind.parts else self.prompts.x
        launch(self.take, self.x, self.rows, source, grid=kind.rows, block=128)
        with overlapping() if self.hopper else contextlib.nullcontext():
            if kind.parts:
                self.queue_layers(kind.rows, kind.parts)
            if kind.lines:
                head = self.p.wte if self.cfg.tie_embeddings else self.p.lm_head[0]
                self.queue_logits(self.out, head, self.rows, kind.lines)
            if kind.drawn and kind.lines:
                launch(self.choose, self.chosen, self.latest, self.odds, self.out, self.draws,
                       self.rows, self.size.V, grid=kind.lines, block=256)
        if kind.alone and kind.lines and not kind.drawn:
            download(self.pinned[:kind.lines], self.out)

    def queue_layers(self, count, parts):
        size, p, rows, x = self.size, self.p, self.rows, self.x
        groups, others = groups_a_block(count, self.groups)
        k, smem = self.kernels[groups], self.smem[groups]
        eps = np.float32(self.cfg.norm_eps)
        scale2 = np.float32(LOG2E / math.sqrt(size.D))
        o = view(self.o, 0, (AT_ONCE, parts, size.HD))
        ml = view(self.ml, 0, (AT_ONCE, parts, size.H, 2))

        def grid(N, tiles, K, groups):
            """Of a product with N outputs a row"""
            return cdiv(N, 8 * tiles_a_block(tiles, K, groups)), cdiv(count, groups * GROUP)
        for l in range(size.L):
            kc, vc, gain = self.kc[l], self.vc[l], p.attn_norm[l]
            bias = p.qkv_bias[l] if self.cfg.qkv_bias else gain
            launch(k.qkv, self.q, kc, vc, x, gain, p.qkv[l], bias, self.cos, self.sin, rows, eps,
                   grid=(size.QKV // 16, cdiv(count, groups * GROUP)), block=256, smem=smem.qkv)
            launch(self.attend, o, ml, self.q, kc, vc, rows, scale2,
                   grid=(size.H // self.heads_a_block, parts, count), block=256)
            if count < MERGED:
                launch(k.proj, x, o, ml, p.attn_proj[l], rows, grid=size.C // 8,
                       block=256, smem=smem.proj)
            else:
                launch(k.merge, self.att, o, ml, rows, grid=(cdiv(size.HD, 512), count),
                       block=128)
                launch(self.add_att[others], x, self.att, p.attn_proj[l], rows, block=256,
                       grid=grid(size.C, 1, size.HD, others), smem=self.smem[others].add_att)
            launch(k.gate_up, self.y, x, p.mlp_norm[l], p.gate_up[l], rows, eps,
                   grid=grid(2 * size.F, 2, size.C, groups), block=256, smem=smem.gate_up)
            launch(self.kernels[others].down, x, self.y, p.down[l], rows, block=256,
                   grid=grid(size.C, 1, size.F, others), smem=self.smem[others].down)

    def queue_logits(self, out, head, rows, lines=1):
        groups = groups_a_block(lines, self.groups).others
        launch(self.kernels[groups].logits, out, self.x, self.p.final_norm, head, rows,
               np.float32(self.cfg.norm_eps), block=256, smem=self.smem[groups].gate_up,
               grid=(cdiv(len(head), 8 * tiles_a_block(2, self.size.C, groups)),
                     cdiv(lines, groups * GROUP)))

    def guesses(self, line, x=None):
        """(heads, V) for a row of x (C,), or for that of a line of the last logits"""
        need(self.ahead is None, "guesses of a step behind which another one was queued")
        self.wait()
        if x is None:
            row_to(self.x, self.out, line * self.out.shape[1] + self.size.V)
        else:
            self.staged_x[:] = x
            upload(self.x, self.staged_x)
        self.under_way = True
        self.guess_graph(self.queue_guesses)
        self.wait()
        return self.guessed_host[0, :len(self.others)].reshape(-1, self.size.V).copy()

    def queue_guesses(self):
        self.queue_logits(self.guessed, self.others, self.first_row)
        download(self.guessed_host, self.guessed)

    def copy(self, source, slot, n):
        """The first n keys and values of a slot to another"""
        self.ahead = None                    # it may be of another text, though of the same tokens
        for cache in self.kc, self.vc:
            launch(copy_slot_kernel, cache, source, slot, n, grid=(self.size.G, self.size.L),
                   block=256)

class Prompts:
    """Reads what begins a slot with the functions of section 4, as `Model.forward` reads a sequence
    of T tokens, a power of two, or the slot's length.  Those behind the prompt's are any; none
    before them sees them.  There is memory for one layer, from the first prompt on: 8 C + 2 QKV +
    2 HD + 6 F bytes a token, 12 MB for 512 of `base`."""

    def __init__(self, size, T):
        def buffer(*shape, dtype=np.uint16):
            return new(shape, dtype)

        self.x = buffer(T, size.C, dtype=np.float32)
        self.rstd = buffer(T, dtype=np.float32)
        self.lse = buffer(size.H * T, dtype=np.float32)
        self.y, self.saved, self.qkv, self.att, self.gate_up, self.swiglu = (
            buffer(T, n) for n in (size.C, size.C, size.QKV, size.HD, 2 * size.F, size.F))
        self.given = new(2 + T, np.int32)    # slot, number of tokens, and these
        self.staged = cuda.pinned_array(2 + T, np.int32)
        self.graphs, self.maps = {}, {}      # of each T; tensor maps of the buffers

    def read(self, steps, slot, ids):
        """Queues it, for the cache of RowSteps.  What is staged must not be in use."""
        T = min(power_of_two(len(ids)), steps.T)
        self.staged[:2] = slot, len(ids)
        self.staged[2:2 + len(ids)] = ids
        self.staged[2 + len(ids):2 + T] = 0
        if T not in self.graphs:
            self.graphs[T] = Graph()
        with at_most(steps.top, self.maps):
            self.graphs[T](functools.partial(self.queue, steps, T))

    def queue(self, steps, T):
        """x after the last layer, and keys and values of all"""
        cfg, p, size = steps.cfg, steps.p, steps.size
        x, y, saved, qkv, att, gate_up, swiglu = (
            view(buffer, 0, (T, buffer.shape[1])) for buffer in
            (self.x, self.y, self.saved, self.qkv, self.att, self.gate_up, self.swiglu))
        rstd, lse = view(self.rstd, 0, (T,)), view(self.lse, 0, (size.H, T))
        f, unread = y, (saved, rstd)         # y = rmsnorm(x), then f(x): as `forward`
        gains = [*(p.attn_norm[l] for l in range(size.L)), p.final_norm]

        def euler_step(gain):
            """x += f, y = rmsnorm(x)"""
            residual_rmsnorm_forward(f, *unread, x, gain, cfg.norm_eps)

        upload(self.given, self.staged[:2 + T])
        embedding_forward(x, view(self.given, 2, (T,)), p.wte)
        rmsnorm_forward(y, *unread, x, gains[0], cfg.norm_eps)
        for l in range(size.L):
            matmul(qkv, y, p.qkv[l])
            if cfg.qkv_bias:
                add_bias(qkv, p.qkv_bias[l])
            rope(qkv, steps.cos, steps.sin, T, size.H + size.G, 1)
            launch(keep_kernel, steps.kc[l], steps.vc[l], qkv, self.given, grid=(T, size.G),
                   block=size.D)
            attention_forward(att, lse, qkv, T, size.D)
            matmul(f, att, p.attn_proj[l])
            euler_step(p.mlp_norm[l])
            matmul(gate_up, y, p.gate_up[l])
            swiglu_forward(swiglu, gate_up)
            matmul(f, swiglu, p.down[l])
            euler_step(gains[l + 1])

@cuda_kernel
def keep_kernel(kc, vc, qkv, given):
    """The keys and values of a prompt's tokens, and not of those behind them, into their slot.
    kc, vc (slots, G, T, D) of a layer, qkv (T, QKV) after RoPE, given: slot, number of tokens, ..
    grid (T, G), D threads"""
    t, g, i, D = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x, kc.shape[3]
    slot, v = given[0], qkv.shape[1] - (kc.shape[1] - g) * D         # where v begins
    if t < given[1]:
        kc[slot, g, t, i] = value(qkv[t, v - kc.shape[1] * D + i])
        vc[slot, g, t, i] = value(qkv[t, v + i])

@cuda_kernel
def copy_slot_kernel(cache, source, slot, n):
    """cache[l, slot, g, t] = cache[l, source, g, t] of t < n     cache (L, slots, G, T, D)
    grid (G, L)"""
    g, l = cuda.blockIdx.x, cuda.blockIdx.y
    to, of = cache[l, slot, g], cache[l, source, g]
    for i in range(cuda.threadIdx.x, n * cache.shape[4], 256):
        to[0, i] = of[0, i]                  # keys follow each other

# ==== 12.3 Instructions ====
# What a GPU can do and Numba has no function for, in PTX: NVIDIA's "PTX ISA" describes each of the
# instructions under its name.  Addresses of device memory have 64 bits, those of shared memory 32.
# A literal of Python is an int64 and makes one of all that meets it: hence u32(..), and constants
# of NumPy's types.
def asm_into(builder, pointers, text, constraints, values):
    """asm with as many results as pointers, of their types, which are stored there."""
    kind = ir.LiteralStructType([p.type.pointee for p in pointers])
    results = asm(builder, kind, text, constraints, values)
    for i, pointer in enumerate(pointers):
        builder.store(builder.extract_value(results, i), pointer)

def ptx(text, *operands, result=types.void):
    """The instruction `text` as a device function: $0 is its result if it has one, its operands
    follow.  Without a result it counts as one that reads and writes any memory: the compiler moves
    no access to memory across it."""
    letters = {u32: "r", u64: "l", f32: "f", f64: "d"}
    constraints = [letters[t] for t in operands]
    if result == types.void:
        constraints = [*constraints, "~{memory}"]
    else:
        constraints = ["=" + letters[result], *constraints]

    @intrinsic
    def instruction(typing, *args):          # one tuple of them comes to codegen
        def codegen(context, builder, sig, args):
            values, void = cgutils.unpack_tuple(builder, args[0]), result == types.void
            kind = ir.VoidType() if void else context.get_value_type(result)
            out = asm(builder, kind, text, ",".join(constraints), values)
            return context.get_dummy_value() if void else out
        return result(types.BaseTuple.from_types(operands)), codegen
    return instruction

class DeviceFunctions(ModuleType):
    """Some under one name: a kernel calls `way.wait(..)`.  A module, since Numba inlines only what
    it finds in modules."""

    def __init__(self, **functions):
        super().__init__(type(self).__name__, type(self).__doc__)
        vars(self).update(functions)

# Threads of a block of one dimension: lanes of a warp of 32, warps of a warpgroup of four
@inlined
def thread_id():
    return u32(cuda.threadIdx.x)

@inlined
def lane_id():
    return thread_id() & u32(31)

@inlined
def warp_id():
    return thread_id() >> u32(5)

@inlined
def warpgroup_id():
    return thread_id() >> u32(7)

# Of some that could do a thing, one does it
@inlined
def leads_warp():
    return lane_id() == 0

@inlined
def leads_warpgroup():
    return (thread_id() & u32(127)) == 0

@inlined
def leads_block():
    return thread_id() == 0

@inlined
def bit(x, i):
    """Bit i of x, 0 or 1"""
    return x >> u32(i) & u32(1)

quotient = ptx("div.u32 $0, $1, $2;", u32, u32, result=u32)      # Numba would make it 64 bits

# Addresses
@intrinsic
def global_address(typing, array):
    def codegen(context, builder, sig, args):
        return builder.ptrtoint(memory(context, builder, sig.args, args, 0), ir.IntType(64))
    return u64(array), codegen

def load_four_by(text, space):
    """The device function load(out, j, address): out[j:j+4], of 32 bits, in one access."""
    @intrinsic
    def load(typing, out, j, address):
        def codegen(context, builder, sig, args):
            to = elements(context, builder, sig.args, args, 0, 4, args[1])
            asm_into(builder, to, f"{text}.v4.u32 {{$0, $1, $2, $3}}, [$4];",
                     f"=r,=r,=r,=r,{space}", [args[2]])
            return context.get_dummy_value()
        return types.void(out, types.intp, u32 if space == "r" else u64), codegen
    return load

load_four_shared = load_four_by("ld.shared", "r")
load_four = load_four_by("ld.global.nc.L1::no_allocate", "l")        # what no kernel writes

to_shared = ptx("{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }", u64, result=u32)

@inlined
def shared_address(array):
    return to_shared(global_address(array))

ALIGNMENT = 1024                             # of the tiles below, as the copy engine wants it

@inlined
def dynamic_smem():
    """Where dynamic shared memory begins, from a multiple of ALIGNMENT on.  The kernels ask for so
    many bytes more than they use."""
    return (shared_address(cuda.shared.array(0, types.uint16)) + u32(ALIGNMENT - 1)) & (
        u32(-ALIGNMENT & 0xFFFFFFFF))

# Copies by threads, from device to shared memory: they go on while the thread does.  Those that it
# asked for since the last commit are a group; groups arrive in order.
cp_async = ptx("cp.async.cg.shared.global.L2::128B [$0], [$1], 16;", u32, u64)      # 16 bytes
cp_async_or_zero = ptx("cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;", u32, u64, u32)
cp_async_4 = ptx("cp.async.ca.shared.global [$0], [$1], 4;", u32, u64)
cp_async_commit = ptx("cp.async.commit_group;")
cp_async_wait_all = ptx("cp.async.wait_all;")
cp_async_wait_one = ptx("cp.async.wait_group 1;")        # all groups but the youngest are there

@intrinsic
def lower_half(typing, pair):
    """The first of a pair of bfloat16, as float32"""
    def codegen(context, builder, sig, args):
        return builder.bitcast(builder.shl(args[0], args[0].type(16)), ir.FloatType())
    return f32(u32), codegen

@intrinsic
def upper_half(typing, pair):
    """The second one"""
    def codegen(context, builder, sig, args):
        return builder.bitcast(builder.and_(args[0], args[0].type(0xFFFF0000)), ir.FloatType())
    return f32(u32), codegen

# Registers to memory
pack_bf16 = ptx("cvt.rn.bf16x2.f32 $0, $2, $1;", f32, f32, result=u32)       # low, high
store_pair = ptx("st.global.b32 [$0], $1;", u64, u32)    # two neighbours in bfloat16
store_two = ptx("st.shared.v2.f32 [$0], {$1, $2};", u32, f32, f32)

# Memory to a register, past L1
load_relaxed = ptx("ld.relaxed.gpu.global.u32 $0, [$1];", u64, result=u32)
load_relaxed_f64 = ptx("ld.relaxed.sys.global.f64 $0, [$1];", u64, result=f64)

# A semaphore is a number in device memory that blocks take turns by: who waits for it sees what was
# written before it was set.
semaphore_release = ptx("st.release.gpu.global.u32 [$0], $1;", u64, u32)
semaphore_acquire = ptx("{ .reg .pred p; .reg .u32 turn; "
                        "AGAIN: ld.acquire.gpu.global.u32 turn, [$0]; "
                        "setp.ne.u32 p, turn, $1; @p bra AGAIN; }", u64, u32)

@inlined
def semaphore_at(semaphores, i):
    return global_address(semaphores) + u64(4) * u64(i)

@inlined
def turn_after(part, splits):
    """Whose turn it is after that part's; the last one leaves the semaphore as it was, at 0."""
    return part + u32(1) if part + u32(1) < u32(splits) else u32(0)

# The rest is Hopper's.  An mbarrier is eight bytes of shared memory that threads wait for.  A phase
# of it is over when as many threads have arrived as mbarrier_init was told, and all bytes that
# mbarrier_expect, which arrives, too, announced are there.  Phases have parities 0, 1, 0, ..:
# waiting for a parity returns when the running phase has the other one.  The first phase is 0, so
# that waiting for 1 returns at once.
MBARRIER = np.uint32(8)
mbarrier_init = ptx("mbarrier.init.shared::cta.b64 [$0], $1;", u32, u32)
mbarrier_expect = ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", u32, u32)
mbarrier_arrive = ptx("mbarrier.arrive.shared::cta.b64 _, [$0];", u32)
mbarrier_wait = ptx("{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; "
                    "@p bra DONE; bra AGAIN; DONE: }", u32, u32)
mbarrier_fence = ptx("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;")

bulk_prefetch = ptx("cp.async.bulk.prefetch.L2.global [$0], $1;", u64, u32)  # bytes, into L2
bulk_copy = ptx("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, "
                "[$3];", u32, u64, u32, u32)             # so many bytes, by the copy engine

# Programmatic dependent launch: see `overlapping`
wait_for_previous = ptx("griddepcontrol.wait;")
let_next_start = ptx("griddepcontrol.launch_dependents;")

@inlined
def after_previous():
    wait_for_previous()
    let_next_start()

@inlined
def at_once():
    pass

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
fence_async_global = ptx("fence.proxy.async.global;")    # before it adds to what others added

# Warpgroups: a barrier of the 128 threads, and registers that one gives to the others
warpgroup_barrier = ptx("bar.sync $0, 128;", u32)
take_registers = ptx("setmaxnreg.inc.sync.aligned.u32 232;")
give_registers = ptx("setmaxnreg.dec.sync.aligned.u32 40;")

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
    """The tensor map of a matrix, made once for each user of `at_most`.  It holds an address: where
    other memory comes to lie there later, of the same shape, it is right again."""
    key = (int(x.gpu_data.device_pointer), *x.shape, x.strides[0], box_rows, x.dtype.itemsize)
    if key not in gpu.tensor_maps:
        gpu.tensor_maps[key] = tensor_map(*key)
    return gpu.tensor_maps[key]

# ==== 12.4 Tiles and tensor cores ====
# A tile lies in shared memory in rows of 128 bytes: 64 numbers of bfloat16, eight chunks of 16
# bytes.  So wide are all 32 banks, too: with chunk c of each row below that of the row before, the
# eight rows of a chunk that ldmatrix reads at once would wait for the same four banks.  So chunk c
# of row r lies at place c XOR (r mod 8).  The chunk that is found at each place:
#
#     place     0  1  2  3  4  5  6  7
#     row 0     0  1  2  3  4  5  6  7
#     row 1     1  0  3  2  5  4  7  6
#     row 2     2  3  0  1  6  7  4  5
#     row 3     3  2  1  0  7  6  5  4        any chunk, in eight rows, is at eight places:
#     row 4     4  5  6  7  0  1  2  3        all banks work
#     row 5     5  4  7  6  1  0  3  2
#     row 6     6  7  4  5  2  3  0  1
#     row 7     7  6  5  4  3  2  1  0
#
# A wider tile is several of these, one behind the other, a column of 64 numbers each.
TILE_ROWS, PER_CHUNK, CHUNKS_A_ROW = 64, 8, np.uint32(8)     # PER_CHUNK: numbers of bfloat16
CHUNK_BYTES, ROW_BYTES = np.uint32(16), np.uint32(128)
COLUMN_BYTES = np.uint32(TILE_ROWS * 128)    # of 64 rows

@inlined
def swizzled(row, chunk):
    """Where columns 8 chunk to 8 chunk + 7 of a row of a tile are, in bytes: the copy engine's
    128-byte swizzle."""
    column, place = chunk // CHUNKS_A_ROW, chunk % CHUNKS_A_ROW ^ row % CHUNKS_A_ROW
    return column * COLUMN_BYTES + row * ROW_BYTES + place * CHUNK_BYTES

# Tensor cores multiply fragments, which the 32 lanes of a warp hold together, two numbers of
# bfloat16 in a register of 32 bits.  ldmatrix fetches them out of shared memory, stmatrix stores
# them: four matrices of 8 x 8, each of whose rows is a chunk.
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
stmatrix = ptx("stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
               u32, u32, u32, u32, u32)

@intrinsic
def mma(typing, acc, i, a, j, b, k):
    """acc[i:i+4] += A B of a warp: A (16, 16) in a[j:j+4], B (16, 8) in b[k:k+2], bfloat16 pairs.

    What lane l holds, with r = l / 4 and c = 2 (l % 4):
        acc   float32   [r, c]   [r, c + 1]   [r + 8, c]   [r + 8, c + 1]
        A     pairs     [r, c]   [r + 8, c]   [r, c + 8]   [r + 8, c + 8]    and the next column
        B     pairs     [c, r]   [c + 8, r]                                  and the next row

    The lane that holds an entry of acc (16, 8): a quad of neighbours has a row.

        column     0    1    2    3    4    5    6    7
        row 0      0    0    1    1    2    2    3    3      acc[i] and acc[i + 1], in turn
        row 1      4    4    5    5    6    6    7    7
        ...
        row 7     28   28   29   29   30   30   31   31
        row 8      0    0    1    1    2    2    3    3      acc[i + 2] and acc[i + 3]
        ...
        row 15    28   28   29   29   30   30   31   31"""
    def codegen(context, builder, sig, args):
        def registers(n, count):
            """Those of argument n, from the index that follows it on."""
            return elements(context, builder, sig.args, args, n, count, args[n + 1])

        sums = registers(0, 4)
        operands = registers(2, 4) + registers(4, 2) + sums
        asm_into(builder, sums,
                 "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, "
                 "{$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
                 "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [builder.load(p) for p in operands])
        return context.get_dummy_value()
    return types.void(acc, types.intp, a, types.intp, b, types.intp), codegen

# Hopper's wgmma multiplies tiles where they lie: a warpgroup, four warps, gives it the addresses.
SWIZZLE_128 = 1 << 62                        # fields of a descriptor: the swizzle,
BETWEEN_GROUPS = (1024 // 16) << 32          # the stride byte offset,
BETWEEN_COLUMNS = (8192 // 16) << 16         # the leading dimension byte offset

@inlined
def descriptor(tile):
    """What wgmma is told of an operand at this address of shared memory, 64 columns of bfloat16 in
    rows of 128 bytes: 128-byte swizzle, 1,024 bytes between groups of 8 rows; where the rows run
    along M or N, 8,192 bytes between columns of 64.  All in units of 16 bytes.
    PTX ISA, wgmma: matrix descriptor format"""
    return u64(SWIZZLE_128 | BETWEEN_GROUPS | BETWEEN_COLUMNS) | u64(tile // CHUNK_BYTES)

@functools.cache
def wgmma(N, a_in, b_mn, count=1, adds="always"):
    """The device function acc [+]= A B of a warpgroup, A (64, 64), B (64, N), bfloat16.  `count`
    such products are in flight at once.     PTX wgmma.mma_async, sm_90a

    An instruction takes 16 of the 64 along K.  Its operands, and who has them:

        acc   (64, N)    float32, N / 2 registers a thread.  acc[i] of lane l of warp w is in row
                         16 w + l / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (l % 4) + i % 2: as
                         `mma` has it
        A     (64, 16)   "rows": a tile whose rows run along K; the next 16 are 32 bytes further
                         "columns": one whose rows run along M; they are 16 rows further
                         "registers": 4 a thread; a warp has its 16 rows as `mma` has A
        B     (16, N)    a tile whose rows run along K, or, with b_mn, along N

    Arguments: acc, of `count` products one behind the other; of each product the descriptors of A
    and B.  With a_in "registers" instead A, one local array of 16 numbers a product, and then the
    descriptors of B.  adds: "always", "never", or "asked": then a last argument, 0 or not, says
    whether.

    The PTX of wgmma(16, "rows", False), of whose 64 columns of A the first 16 are shown:

        { .reg .u64 a, b; .reg .pred keep; setp.ne.u32 keep, 0, 0;
          wgmma.fence.sync.aligned;
          add.u64 a, $8, 0;                                  16 columns further: 2, 4, 6
          add.u64 b, $9, 0;
          wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16
            {$0,$1,$2,$3,$4,$5,$6,$7}, a, b, 1, 1, 1, 0, 0;  add, signs of A and B, transposed?
          ...
          wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }

    What the numbers stand for:

        $0 ..            acc, of all products; what is in it before comes in the same registers
        $total ..        the descriptors, of A and B in turn, or of B alone
        then             A, if it is in registers: 16 of each product, 4 of each 16 along K
        the last         whether to add, if that is asked"""
    sums_each = N // 2
    total = sums_each * count
    given = a_in == "registers"
    along_k, along_mn = 32 // 16, 16 * 128 // 16         # 16 further along K, in units of 16 bytes
    a_step = along_mn if a_in == "columns" else along_k
    b_step = along_mn if b_mn else along_k

    def registers(first, n):
        return "{" + ",".join(f"${first + j}" for j in range(n)) + "}"

    def text_of(operands):
        """The PTX; `operands` follow acc."""
        keep = f"${total + operands - 1}" if adds == "asked" else "0"
        text = (f"{{ .reg .u64 a, b; .reg .pred keep; setp.ne.u32 keep, {keep}, 0; "
                f"wgmma.fence.sync.aligned; ")
        for i in range(count):
            sums = registers(sums_each * i, sums_each)
            for k in range(4):
                if given:
                    b = total + i
                    a = registers(total + count + 16 * i + 4 * k, 4)
                    a_transposed = ""        # there is no such field
                else:
                    b = total + 2 * i + 1
                    text += f"add.u64 a, ${b - 1}, {a_step * k}; "
                    a = "a"
                    a_transposed = f", {int(a_in == 'columns')}"
                add = "1" if adds == "always" or k else "keep"
                text += (f"add.u64 b, ${b}, {b_step * k}; wgmma.mma_async.sync.aligned."
                         f"m64n{N}k16.f32.bf16.bf16 {sums}, {a}, b, "
                         f"{add}, 1, 1{a_transposed}, {int(b_mn)}; ")
        return text + "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }"

    def codegen(context, builder, sig, args):
        sums = elements(context, builder, sig.args, args, 0, total)
        values = cgutils.unpack_tuple(builder, args[1])
        if given:
            a = elements(context, builder, sig.args[1], values, 0, 16 * count)
            values = [*values[1:], *map(builder.load, a)]
        old = [] if adds == "never" else [builder.load(p) for p in sums]
        kinds = ["l" if v.type == ir.IntType(64) else "r" for v in values]
        constraints = ["=f"] * total + kinds + [str(i) for i in range(len(old))] + ["~{memory}"]
        asm_into(builder, sums, text_of(len(values)), ",".join(constraints), [*values, *old])
        return context.get_dummy_value()

    @intrinsic
    def product(typing, acc, *operands):     # a tuple of them comes to codegen
        kinds = (operands[0], *[u64] * count) if given else [u64] * (2 * count)
        if adds == "asked":
            kinds = [*kinds, u32]
        return types.void(acc, types.BaseTuple.from_types(kinds)), codegen
    return product

# Where the sums of a product stand in its 64 rows, as the table above has them: acc[i] of a thread
# is in row first_row() + 8 which_row(i), column first_column() + column_of(i).
@inlined
def first_row():
    return cuda.threadIdx.x // 32 * 16 + cuda.threadIdx.x % 32 // 4

@inlined
def first_column():
    return cuda.threadIdx.x % 4 * 2

@inlined
def which_row(i):
    return i // 2 % 2

@inlined
def column_of(i):
    return i // 4 * 8 + i % 2

# Hopper's way in one kernel, as short as it goes: the copy engine fetches two tiles, a barrier
# counts their bytes, wgmma multiplies them.  Nothing is copied while it multiplies; the kernel of
# 12.5 adds a ring of buffers, a warpgroup that only fetches, and tiles of 128 x 256.
ONE_TILE_SMEM = 2 * int(COLUMN_BYTES) + ALIGNMENT
multiply_tiles = wgmma(64, "rows", False)

@cuda_kernel
def one_tile_kernel(out, map_a, map_b, K):
    """out = A B^T, a tile of 64 x 64 a block.     grid (N / 64, M / 64), 128 threads
    out (M, N) bfloat16; the tensor maps of A (M, K) and B (N, K), in boxes of 64 rows"""
    a_tile = dynamic_smem()
    b_tile = a_tile + COLUMN_BYTES
    barrier = shared_address(cuda.shared.array(1, u64))
    m0, n0 = TILE_ROWS * cuda.blockIdx.y, TILE_ROWS * cuda.blockIdx.x
    acc = filled(32, f32(0))
    if leads_warpgroup():
        map_fence(global_address(map_a))
        map_fence(global_address(map_b))
        mbarrier_init(barrier, u32(1))       # one thread arrives in each phase: this one
        mbarrier_fence()
    cuda.syncthreads()                       # the barrier exists
    for n in range((K + TILE_ROWS - 1) // TILE_ROWS):
        if leads_warpgroup():                # one thread asks for both tiles
            mbarrier_expect(barrier, u32(2) * COLUMN_BYTES)
            tma_load(a_tile, global_address(map_a), u32(TILE_ROWS * n), u32(m0), barrier)
            tma_load(b_tile, global_address(map_b), u32(TILE_ROWS * n), u32(n0), barrier)
        mbarrier_wait(barrier, u32(n % 2))   # phase n: they are there, zeros beyond the edges
        multiply_tiles(acc, descriptor(a_tile), descriptor(b_tile))
        cuda.syncthreads()                   # nobody reads them any more: the next may come
    for i in range(32):
        row = m0 + first_row() + 8 * which_row(i)
        column = n0 + first_column() + column_of(i)
        if row < out.shape[0] and column < out.shape[1]:
            out[row, column] = stored(out, acc[i])

def one_tile_matmul(out, a, b):
    """out (M, N) = a b^T     a (M, K), b (N, K), whose rows are whole chunks; only on Hopper"""
    M, N = out.shape
    launch(one_tile_kernel, out, map_of(a, TILE_ROWS), map_of(b, TILE_ROWS), a.shape[1],
           grid=(cdiv(N, TILE_ROWS), cdiv(M, TILE_ROWS)), block=128, smem=ONE_TILE_SMEM)

# ==== 12.5 Matmul on tensor cores ====
# Of bfloat16, in three layouts: a_mn means that A is given as A^T (K, M), b_mn that B is given as
# (K, N), and not as B^T (N, K).  Of either, `mn` says that a tile's rows run along M or N.
#
# A piece of work is a tile of the output and a part of K; all tiles with the first part of K come
# first.  Tiles are visited in bands of BAND rows of tiles, down each column of a band, so that what
# neighbours read is still in L2.  With bands of two, three times three tiles in this order:
#
#     0  2  4
#     1  3  5
#     6  7  8
#
# The product of `down` in the base preset, 8 x 512 tokens: y (4096, 768) = x (4096, 2048) w^T, and
# w is (768, 2048), so B is not `mn`.  On `wgmma`, a tile of 128 x 256: 32 x 3 tiles, two bands.
# Piece 0 is y[0:128, 0:256], piece 1 y[128:256, 0:256], piece 16 the next column, y[0:128,
# 256:512].  A tile is the sum of 2048 / 64 = 32 slices, each of A (128, 64) and B (256, 64).
BK, BAND = 64, 16                            # depth of a slice of A and B; rows of tiles in a band

@inlined
def tile_at(i, M, N, K, splits, tile_rows, tile_columns):
    """The i-th piece: (m, n, first, end), the tile whose first entry is out[m, n], of slices first
    to end - 1 of K."""
    down = u32((M + tile_rows - 1) // tile_rows)
    across = u32((N + tile_columns - 1) // tile_columns)
    part = quotient(i, down * across)
    tile = i - part * down * across
    slices = u32((K + BK - 1) // BK)
    band = quotient(tile, u32(BAND) * across)
    in_band = tile - band * u32(BAND) * across
    high = min(down - band * u32(BAND), u32(BAND))       # rows of tiles: the last band has fewer
    column = quotient(in_band, high)
    row = band * u32(BAND) + in_band - column * high
    m = row * u32(tile_rows)
    n = column * u32(tile_columns)
    first = quotient(part * slices, splits)
    end = quotient((part + u32(1)) * slices, splits)
    return m, n, first, end

# Where an output of float32 has few tiles and K is long, several blocks share a tile: each takes a
# part of K and adds its product to the output when it is its turn, which keeps the order of the
# sums.  It waits for the parts before it.  Where a block has one piece, those have begun: blocks
# begin in the order of their numbers, as on every GPU so far, though CUDA does not promise it.
# Where a block takes one piece after another, that holds only if the whole grid is resident.
SEMAPHORES = 1 << 15                         # one a tile in `mma`, two in `wgmma`: its warpgroups'

# Path `mma`, from sm_80 on: a block of four warps per 128 x 128 of the output, 64 x 64 a warp.
# Copies of 16 bytes (cp.async) fill three buffers in turn; of the slice before, the next 16 k go
# into registers while `mma` works on the last 16.  Some 35 times the speed of the portable tile,
# 0.55 of cuBLAS's.  97 KB of shared memory: an RTX 40 allows a block 99.
MMA_TILE, MMA_STAGES = 128, 3                # rows and columns of the output; buffers
MMA_OPERAND_BYTES = np.uint32(2 * MMA_TILE * BK)         # a slice of A, or of B
MMA_STAGE_BYTES = 2 * MMA_OPERAND_BYTES      # both: a buffer
MMA_SMEM = int(MMA_STAGES * MMA_STAGE_BYTES) + ALIGNMENT
MMA_BLOCKS, RESERVED_SMEM = 2, 1024          # on a multiprocessor at once; what CUDA adds to each

class Operand(DeviceFunctions):
    """How A or B of `mma_kernel` comes from memory to shared memory, and from there to registers:

    first_chunk(source, mn0, k0)             where this thread's part of the first slice begins
    issue_loads(to, source, place, r, c)     asks for its part of a slice
    lane_start(mn0)                          where a lane begins to read a tile
    load_fragment(out, at, i, s)             16 rows or columns of a tile, 16 of its k"""

# Its four matrices of 8 x 8, a row and a chunk further or not, in the order in which `mma` has them
# in registers: which bit of a lane's number says what, when it points ldmatrix to one of their rows
#
#     operand    rows of a tile    next 8 rows    next chunk    ldmatrix
#     A          along K           bit 3          bit 4         as they lie
#     A, mn      along M           bit 4          bit 3         transposed
#     B          along K           bit 4          bit 3         as they lie
#     B, mn      along N           bit 3          bit 4         transposed
@functools.cache
def mma_operand(of_a, mn):
    load = ldmatrix_columns if mn else ldmatrix_rows
    row_bit, chunk_bit = (3, 4) if of_a != mn else (4, 3)
    across, rows = (16, 8) if mn else (8, 16)            # of 128 threads, a chunk each

    @inlined
    def first_chunk(source, mn0, k0):
        """In memory; in a buffer; and its row and column in the matrix."""
        row, chunk = thread_id() // u32(across), thread_id() % u32(across)
        r, c = (k0 + row, mn0 + chunk * u32(8)) if mn else (mn0 + row, k0 + chunk * u32(8))
        return (global_address(source) + u64(r) * u64(source.strides[0]) + u64(2) * u64(c),
                swizzled(row, chunk), types.int32(r), types.int32(c))

    @inlined
    def issue_loads(to, source, place, r, c):
        """128 columns (mn) or rows of 64 k, zeros beyond the edge of the matrix.  Returns where the
        next 64 begin."""
        # none if the chunk is beyond the columns of the matrix.  In 32 bits
        rows_left = types.int32(types.int32(source.shape[0]) - r if
                                c < types.int32(source.shape[1]) else 0)
        row = place
        for i in range(8):
            cp_async_or_zero(to + u32(128 * rows * i), row,
                             u32(16) if rows * i < rows_left else u32(0))
            row += u64(source.strides[0]) * u64(rows)
        if mn:
            return row, r + types.int32(BK), c
        return place + u64(2 * BK), r, c + types.int32(BK)

    @inlined
    def lane_start(mn0):
        """Of rows or columns mn0 and further"""
        row = (lane_id() & u32(7)) + bit(lane_id(), row_bit) * u32(8)
        chunk = bit(lane_id(), chunk_bit)
        if mn:
            return swizzled(row, (mn0 >> u32(3)) + chunk)
        return swizzled(mn0 + row, chunk)

    @inlined
    def load_fragment(out, at, i, s):
        """Rows or columns 16 i to 16 i + 15, k = 16 s to 16 s + 15, into out[4 * i:].  Two chunks
        along a row flip bits of the address, as the swizzle has it; 16 rows add to it."""
        across, down = (i, s) if mn else (s, i)
        load(out, 4 * i, (at ^ u32(2 * 16 * across)) + u32(16 * 128 * down))
    return Operand(first_chunk=first_chunk, issue_loads=issue_loads, lane_start=lane_start,
                   load_fragment=load_fragment)

@made_once
def mma_kernel(a_mn, b_mn, accumulate):
    """accumulate: out += A B in float32; else out = A B in bfloat16."""
    of_a, of_b = mma_operand(True, bool(a_mn)), mma_operand(False, bool(b_mn))

    @inlined
    def load_fragments(a, b, a_at, b_at, s):
        """Rows and columns of the warp, 64 each, at k = 16 s to 16 s + 15, into registers"""
        for i in range(4):
            of_a.load_fragment(a, a_at, i, s)
        for i in range(4):
            of_b.load_fragment(b, b_at, i, s)

    @inlined
    def multiply(acc, a, b):
        """acc (64, 64) of the warp += A B: acc[32 i + 8 j:] are rows 16 i, columns 16 j and on."""
        for j in range(4):
            for i in range(4):
                mma(acc, 32 * i + 8 * j, a, 4 * i, b, 4 * j)
                mma(acc, 32 * i + 8 * j + 4, a, 4 * i, b, 4 * j + 2)

    # The sums go out through shared memory: there lanes put what they have, and take neighbours.
    load4, store4 = vector(4)
    NEIGHBOURS, ROW_STEP = 4, 2              # numbers a lane stores; rows that a warp does at once
    BYTES_LOG2 = 2 if accumulate else 1      # of a number of the output

    @inlined
    def staging_offset(warp, row, chunk):
        """Where a warp's 64 x 64 sums have 4 neighbours: chunks turn by row, in pairs."""
        return warp * u32(64 * 64) + row * u32(64) + (
            (chunk ^ ((row & u32(7)) << u32(1))) * u32(NEIGHBOURS))

    @inlined
    def stage_sums(staging, acc, warp, lane):
        """The warp's sums to shared memory"""
        place = shared_address(staging) + (lane & u32(1)) * u32(8)
        for i in range(8):
            for j in range(8):
                row, chunk = u32(8 * i) + lane // u32(4), u32(2 * j) + lane % u32(4) // u32(2)
                at = staging_offset(warp, row, chunk)
                n = 32 * (i // 2) + 2 * (i % 2) + 4 * j
                store_two(place + u32(4) * at, acc[n], acc[n + 1])
        cuda.syncwarp()

    @inlined
    def store_rows(out, m0, n0, M, N, staging, warp, lane):
        """out = the sums"""
        row, chunk = lane // u32(16), lane % u32(16)
        r, c = types.intp(m0 + row), types.intp(n0 + chunk * u32(NEIGHBOURS))
        pitch, rows_left = out.strides[0] >> BYTES_LOG2, types.int32(M - r if c < N else 0)
        store_at = r * pitch + c
        for g in range(0, 64, 16):
            for i in range(8):
                few = load4(staging, staging_offset(warp, row + u32(g + ROW_STEP * i), chunk))
                if g + ROW_STEP * i < rows_left:
                    store4(out, store_at, few)
                store_at += ROW_STEP * pitch

    @inlined
    def add_rows(out, m0, n0, M, N, staging, warp, lane):
        """out += the sums, 16 rows at a time"""
        old = cuda.local.array(32, f32)
        row, chunk = lane // u32(16), lane % u32(16)
        r, c = types.intp(m0 + row), types.intp(n0 + chunk * u32(NEIGHBOURS))
        pitch, rows_left = out.strides[0] >> BYTES_LOG2, types.int32(M - r if c < N else 0)
        store_at, load_at, last_load = r * pitch + c, r * pitch + c, (M - 1) * pitch + N - 4
        for g in range(0, 64, 16):
            for i in range(8):               # all loads first, and without an `if`: none waits
                few = load4(out, min(load_at, last_load))
                load_at += ROW_STEP * pitch
                for n in range(NEIGHBOURS):
                    old[NEIGHBOURS * i + n] = few[n]
            for i in range(8):
                few = load4(staging, staging_offset(warp, row + u32(g + ROW_STEP * i), chunk))
                for n in range(NEIGHBOURS):
                    few[n] += old[NEIGHBOURS * i + n]
                if g + ROW_STEP * i < rows_left:
                    store4(out, store_at, few)
                store_at += ROW_STEP * pitch

    write_rows = add_rows if accumulate else store_rows

    @cuda_kernel(launch_bounds=(128, MMA_BLOCKS))
    def kernel(out, a, b, semaphores, M, N, K, splits):
        """out (M, N) = A B, or out += A B     one part of a tile a block"""
        smem = dynamic_smem()
        acc, piece = filled(128, f32(0)), u32(cuda.blockIdx.x)
        m0, n0, begin, end = tile_at(piece, M, N, K, u32(splits), MMA_TILE, MMA_TILE)
        lane, warp = lane_id(), warp_id()
        warp_m, warp_n = u32(64) * bit(warp, 0), u32(64) * (warp >> u32(1))      # in the tile
        a_from, a_to, a_row, a_col = of_a.first_chunk(a, m0, begin * u32(BK))
        b_from, b_to, b_row, b_col = of_b.first_chunk(b, n0, begin * u32(BK))
        a_to, b_to = smem + a_to, smem + MMA_OPERAND_BYTES + b_to
        a_lane = smem + of_a.lane_start(warp_m)
        b_lane = smem + MMA_OPERAND_BYTES + of_b.lane_start(warp_n)
        for s in range(MMA_STAGES - 1):      # the first slices; the last buffer is filled below
            next_buffer = u32(s * MMA_STAGE_BYTES)
            a_from, a_row, a_col = of_a.issue_loads(a_to + next_buffer, a, a_from, a_row, a_col)
            b_from, b_row, b_col = of_b.issue_loads(b_to + next_buffer, b, b_from, b_row, b_col)
            cp_async_commit()
        buffer, next_buffer = u32(0), u32((MMA_STAGES - 1) * MMA_STAGE_BYTES)
        a_now, b_now = cuda.local.array(16, u32), cuda.local.array(16, u32)
        a_next, b_next = cuda.local.array(16, u32), cuda.local.array(16, u32)
        cp_async_wait_one()
        cuda.syncthreads()                   # the first slice is there
        load_fragments(a_now, b_now, a_lane, b_lane, 0)
        for _ in range(types.int32(end - begin)):        # written out: copies and reads of what
            # comes next stand between products, and none of them waits
            load_fragments(a_next, b_next, a_lane + buffer, b_lane + buffer, 1)
            multiply(acc, a_now, b_now)
            a_from, a_row, a_col = of_a.issue_loads(a_to + next_buffer, a, a_from, a_row, a_col)
            load_fragments(a_now, b_now, a_lane + buffer, b_lane + buffer, 2)
            multiply(acc, a_next, b_next)
            b_from, b_row, b_col = of_b.issue_loads(b_to + next_buffer, b, b_from, b_row, b_col)
            cp_async_commit()
            load_fragments(a_next, b_next, a_lane + buffer, b_lane + buffer, 3)
            multiply(acc, a_now, b_now)
            next_buffer = buffer             # the buffer just read is the next to be filled
            last_buffer = u32((MMA_STAGES - 1) * MMA_STAGE_BYTES)
            buffer = buffer + MMA_STAGE_BYTES if buffer < last_buffer else u32(0)
            cp_async_wait_one()              # all but the youngest slice is there
            cuda.syncthreads()               # and nobody reads the one before
            load_fragments(a_now, b_now, a_lane + buffer, b_lane + buffer, 0)
            multiply(acc, a_next, b_next)
        cp_async_wait_all()
        cuda.syncthreads()                   # no copy is under way, and nobody reads any more
        tiles = u32(cuda.gridDim.x) // u32(splits)
        part, semaphore = piece // tiles, semaphore_at(semaphores, piece % tiles)
        if accumulate and splits > 1:
            if leads_block():
                semaphore_acquire(semaphore, part)
            cuda.syncthreads()               # it is our turn
        staging = cuda.shared.array(0, f32)
        stage_sums(staging, acc, warp, lane)
        write_rows(out, m0 + warp_m, n0 + warp_n, M, N, staging, warp, lane)
        if accumulate and splits > 1:
            cuda.threadfence()
            cuda.syncthreads()               # all of it is written
            if leads_block():
                semaphore_release(semaphore, turn_after(part, splits))
    return kernel

# Path `wgmma`, sm_90 only: a block of three warpgroups stays on its multiprocessor and takes one
# 128 x 256 piece after another.  Warpgroup 0, the producer, only asks for copies: slices of A and B
# flow through a ring of three buffers, or stages, `full` and `empty` barriers between it and the
# two others, the consumers, each of which multiplies 64 of the 128 rows.  The copy engine moves
# whole boxes, and `wgmma` reads both operands from shared memory, once a warpgroup.  Slices 0, 1,
# 2, .. over time, downwards:
#
#     buffer 0          buffer 1          buffer 2
#     0 is copied                                           empty[i] is over at first: the producer
#     0 is multiplied   1 is copied                         waits for the parity before the first
#     3 is copied       1 is multiplied   2 is copied
#     3 is multiplied   4 is copied       2 is multiplied
#     6 is copied       4 is multiplied   5 is copied       ...
#
# Below "copied", full[i] is over: the producer has arrived, and all bytes that it announced.  Below
# "multiplied", empty[i] is: the eight warps of the consumers have arrived.  The next slice of a
# buffer is in the next phase, of the other parity.
BM, BN = 128, 256
A_BYTES = np.uint32(2 * BM * BK)             # a slice of A
STAGE_BYTES = np.uint32(2 * (BM + BN) * BK)  # slices of A and B: a buffer
OUT_BYTES = np.uint32(2 * 64 * BN)           # what one warpgroup stores at once
STAGES = 3                                   # buffers of the ring
WGMMA_SMEM = int(STAGES * STAGE_BYTES + 2 * OUT_BYTES + 2 * MBARRIER * STAGES) + ALIGNMENT
EIGHT_ROWS = ROW_BYTES * np.uint32(8)
FULL_ARRIVALS = np.uint32(1)                 # the producer's thread, with the bytes it announces
EMPTY_ARRIVALS = np.uint32(8)                # the warps of two consumers, one lane of each

@made_once
def wgmma_kernel(a_mn, b_mn, accumulate):
    """accumulate: out += A B in float32; else out = A B in bfloat16."""
    multiply = wgmma(BN, "columns" if a_mn else "rows", b_mn, adds="asked")
    # loads a slice: one of all rows along K; where they run along M or N, one a column of 64
    a_loads, b_loads = (BM // 64 if a_mn else 1), (BN // 64 if b_mn else 1)
    # a consumer's 64 x 256 sums go out as four boxes of 64 rows of 128 bytes, twice in float32
    if accumulate:
        rounds, box_columns, send = 2, 32, tma_add
    else:
        rounds, box_columns, send = 1, 64, tma_store

    @inlined
    def stage_f32(place, acc, warp_row, half):
        """64 x 128 of float32, four a chunk: lanes 0 and 1 of a quad have one, 2 and 3 the next.
        warp_row: the first of the warp's 16 rows"""
        lane = lane_id()
        for j in range(16):
            at = place + swizzled(warp_row + lane // u32(4), u32(2 * j) + bit(lane, 1)) + (
                bit(lane, 0) * u32(8))
            i = 64 * half + 4 * j
            store_two(at, acc[i], acc[i + 1])
            store_two(at + EIGHT_ROWS, acc[i + 2], acc[i + 3])

    @inlined
    def stage_bf16(place, acc, warp_row, half):
        """64 x 256 of bfloat16: stmatrix takes 16 rows of two chunks as a warp has them."""
        lane = lane_id()
        for j in range(16):
            at = place + swizzled(warp_row + (lane & u32(15)), u32(2 * j) + (lane >> u32(4)))
            i = 8 * j
            stmatrix(at, pack_bf16(acc[i], acc[i + 1]), pack_bf16(acc[i + 2], acc[i + 3]),
                     pack_bf16(acc[i + 4], acc[i + 5]), pack_bf16(acc[i + 6], acc[i + 7]))

    stage_sums = stage_f32 if accumulate else stage_bf16

    @inlined
    def write_tile(map_out, n, m, acc, place, group, semaphore, part, splits):
        """out = acc in bfloat16, 64 x 256 at once; or out += acc in float32, 64 x 128 at a time,
        when it is this part's turn.  One thread of the warpgroup tells the copy engine."""
        warp_row, leads = warp_id() % u32(4) * u32(16), leads_warpgroup()
        for half in range(rounds):
            if leads:
                tma_stored()                 # what was staged before has been read
            warpgroup_barrier(group)
            stage_sums(place, acc, warp_row, half)
            fence_async()
            warpgroup_barrier(group)         # all 64 rows are there
            if leads:
                if accumulate and splits > 1 and half == 0:
                    semaphore_acquire(semaphore, part)
                    fence_async_global()
                for j in range(4):
                    send(global_address(map_out), n + u32(128 * half + box_columns * j), m,
                         place + COLUMN_BYTES * u32(j))
                tma_commit()
        if accumulate and splits > 1 and leads:
            tma_written()
            semaphore_release(semaphore, turn_after(part, splits))

    @inlined
    def barrier_of(barriers, stage):
        return barriers + MBARRIER * stage

    @inlined
    def advance(stage, phase):
        """The next stage of the ring, and the parity of its phase"""
        stage += u32(1)
        if stage == u32(STAGES):
            stage, phase = u32(0), phase ^ u32(1)
        return stage, phase

    @cuda_kernel(launch_bounds=(384, 1))
    def kernel(map_a, map_b, map_out, semaphores, M, N, K, splits):
        """out (M, N) = A B, or out += A B"""
        start = dynamic_smem()
        staging = start + u32(STAGES * STAGE_BYTES)
        full = staging + u32(2 * OUT_BYTES)
        empty = full + u32(MBARRIER * STAGES)
        group, stage, phase = warpgroup_id(), u32(0), u32(0)
        if leads_block():
            for i in range(STAGES):
                mbarrier_init(full + u32(MBARRIER * i), FULL_ARRIVALS)
                mbarrier_init(empty + u32(MBARRIER * i), EMPTY_ARRIVALS)
            mbarrier_fence()
        if leads_warpgroup():
            map_fence(global_address(map_a))
            map_fence(global_address(map_b))
            map_fence(global_address(map_out))
        cuda.syncthreads()                   # the barriers exist
        tiles = u32((M + BM - 1) // BM * ((N + BN - 1) // BN))
        pieces = tiles * u32(splits)
        piece = u32(cuda.blockIdx.x)
        if group == 0:                       # the producer, one thread of it
            give_registers()
            while piece < pieces and leads_block():
                m, n, first, end = tile_at(piece, M, N, K, u32(splits), BM, BN)
                for s in range(first, end):
                    buffer, k = start + stage * STAGE_BYTES, u32(s) * u32(BK)
                    ready = barrier_of(full, stage)
                    mbarrier_wait(barrier_of(empty, stage), phase ^ u32(1))       # at first at once
                    mbarrier_expect(ready, STAGE_BYTES)
                    for j in range(a_loads):
                        column, row = (m + u32(64 * j), k) if a_mn else (k, m)
                        tma_load(buffer + COLUMN_BYTES * u32(j), global_address(map_a), column,
                                 row, ready)
                    for j in range(b_loads):
                        column, row = (n + u32(64 * j), k) if b_mn else (k, n)
                        tma_load(buffer + A_BYTES + COLUMN_BYTES * u32(j),
                                 global_address(map_b), column, row, ready)
                    stage, phase = advance(stage, phase)
                piece += u32(cuda.gridDim.x)
        else:                                # a consumer: 64 rows of each tile
            take_registers()
            acc = cuda.local.array(128, f32)
            half_of_tile = group - u32(1)
            row0_of_half, place = u32(64) * half_of_tile, staging + half_of_tile * OUT_BYTES
            m, n, first, end = tile_at(piece, M, N, K, u32(splits), BM, BN)
            while piece < pieces:
                m += row0_of_half
                after = m, n, first, end     # for its type: set with the first slice
                for s in range(first, end):
                    buffer = start + stage * STAGE_BYTES
                    mbarrier_wait(barrier_of(full, stage), phase)
                    multiply(acc, descriptor(buffer + row0_of_half * ROW_BYTES),
                             descriptor(buffer + A_BYTES), u32(s) - u32(first))
                    if leads_warp():
                        mbarrier_arrive(barrier_of(empty, stage))
                    stage, phase = advance(stage, phase)
                    if u32(s) == first:      # while the other warpgroup multiplies
                        after = tile_at(piece + u32(cuda.gridDim.x), M, N, K, u32(splits), BM, BN)
                semaphore = semaphore_at(semaphores, u32(2) * (piece % tiles) + half_of_tile)
                write_tile(map_out, n, m, acc, place, group, semaphore, piece // tiles, splits)
                m, n, first, end = after
                piece += u32(cuda.gridDim.x)
            if leads_warpgroup():
                tma_stored()                 # before the block and its memory are gone
    return kernel

def tensor_cores(*matrices):
    """Whether they take them: bfloat16, rows that are and start at multiples of 16 bytes."""
    def fits(x):
        whole_chunks = x.shape[1] % 8 == 0 and x.strides[1] == 2
        starts = x.strides[0], int(x.gpu_data.device_pointer)
        return x.dtype == np.uint16 and whole_chunks and all(n % 16 == 0 for n in starts)
    return kernel_path() != "portable" and all(map(fits, matrices))

# Times, measured in those that a block takes to multiply one slice of K: to store a piece, and to
# wait for the turn of each part of a tile on either path
STORE_TIME, MMA_TURN, WGMMA_TURN = 4, 8, 2

def parts_of(tiles, slices, turn, blocks):
    """Into how many parts K is cut where there are few tiles: as many as take the least time, where
    `blocks` pieces, a round, run at once.

    The gradient of gate_up in the base preset, 64 x 512 tokens, on 132 multiprocessors: out is
    4096 x 768, K = 32768, 512 slices.  Its 32 x 3 tiles of 128 x 256 are one round that leaves 36
    multiprocessors idle, 512 + 4 + 2 = 518.  In four parts they are 384 pieces of 128 slices, three
    rounds: 3 (128 + 4) + 4 * 2 = 404.  In eight, six rounds: 6 (64 + 4) + 8 * 2 = 424."""
    def cost(parts):
        rounds = cdiv(tiles * parts, blocks)
        return rounds * (slices / parts + STORE_TIME) + turn * parts
    return min(range(1, 1 + slices), key=cost)

def splits_of(tiles, K, semaphores, turn, blocks):
    """The same for a product: one part if it is not added to an output, or if there are not two
    semaphores for each tile."""
    if semaphores is None or 2 * tiles > semaphores.size:
        return 1
    return parts_of(tiles, cdiv(K, BK), turn, blocks)

def mma_matmul(out, a, b, a_mn, b_mn, semaphores):
    """One part of a tile a block, four warps"""
    (M, N), K = out.shape, a.shape[0] if a_mn else a.shape[1]
    tiles = cdiv(M, MMA_TILE) * cdiv(N, MMA_TILE)
    device = cuda.get_current_device()       # its registers are enough for MMA_BLOCKS at once
    of_a_block = MMA_SMEM + RESERVED_SMEM
    blocks_each = min(MMA_BLOCKS, device.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR // of_a_block)
    blocks = device.MULTIPROCESSOR_COUNT * blocks_each
    splits = splits_of(tiles, K, semaphores, MMA_TURN, blocks)
    accumulate = semaphores is not None
    unused = out                             # the kernel wants an array, which nobody reads
    launch(mma_kernel(a_mn, b_mn, accumulate), out, a, b, semaphores if accumulate else unused,
           M, N, K, splits, grid=tiles * splits, block=128, smem=MMA_SMEM)

def wgmma_matmul(out, a, b, a_mn, b_mn, semaphores):
    """One block a multiprocessor, three warpgroups, which takes one piece after another"""
    (M, N), K = out.shape, a.shape[0] if a_mn else a.shape[1]
    tiles = cdiv(M, BM) * cdiv(N, BN)
    blocks = cuda.get_current_device().MULTIPROCESSOR_COUNT
    splits = splits_of(tiles, K, semaphores, WGMMA_TURN, blocks)
    accumulate = semaphores is not None
    map_a, map_b = map_of(a, BK if a_mn else BM), map_of(b, BK if b_mn else BN)
    unused = map_a
    launch(wgmma_kernel(a_mn, b_mn, accumulate), map_a, map_b, map_of(out, 64),
           semaphores if accumulate else unused, M, N, K, splits,
           grid=min(tiles * splits, blocks), block=384, smem=WGMMA_SMEM, resident=splits > 1)

def tensor_matmul(out, a, b, a_mn, b_mn, semaphores=None):
    """out (M, N) = A B.  With `semaphores`, zeros, out is float32 and added to; where they are
    enough for its tiles, several blocks may share one."""
    product = wgmma_matmul if kernel_path() == "wgmma" else mma_matmul
    product(out, a, b, a_mn, b_mn, semaphores)

# ==== 12.6 Attention on tensor cores ====
# FlashAttention as in 4.5, bfloat16, head sizes 32, 64 and 128.  A block is one warpgroup: two
# tiles of 64 rows, the stationary ones, stay with it, and it walks over pairs of others, which
# arrive in a ring of two places: the next pair is on its way while this one is multiplied.  In
# shared memory:
#
#     tile      forward    dq                   dkv
#     0, 1      Q, Q       Q, dO                K, V           stationary
#     2, 3      K, V       K, V (at first O)    Q, dO          pairs 0, 2, 4, ..
#     4, 5      K, V       K, V                 Q, dO          pairs 1, 3, 5, ..
#
# A warp computes 16 rows of S, P or dS at a time, and has them in registers as a left operand, a
# fragment of A, has to be: they go into the next product without shared memory.  On both paths the
# sums of a product, 64 x 64 or 64 x D, stand as 12.4 says: a thread has two rows of a tile.
#
# The kernels know of no way to multiply: they call the eight functions of `Tiles`.  `mma_tiles` has
# them for any tensor core, `wgmma_tiles` for Hopper; who reads the first understands all three
# kernels, and the second is what Hopper changes.
#
# For D = 64, a thread: a tile as fragments of A 16 registers, the sums of S 32, those of O 32.
# Softmax in powers of two: exp(x - m) = 2^(x log2(e) - m log2(e)), one multiply-add an entry.
FAST_HEADS = 32, 64, 128                     # head sizes that tensor cores do attention for
STATIONARY, PLACES = 2, 2                    # tiles that stay; pairs in the ring
BARRIERS = PLACES + 1                        # one a place, the last for what stays
S_SUMS = 32                                  # registers of a thread: its sums of a tile of S or dP
FIRST_ROUND = -1                             # of the loops over pairs: it only asks for pair 0.
                                             # Asked for before the loop, it costs forward more than
                                             # the 168 registers of three blocks: 40 bytes spill
INF32, LOG2E32 = np.float32(math.inf), np.float32(LOG2E)

class Tiles(DeviceFunctions):
    """What the kernels below ask of the way to fetch and to multiply tiles:

    set_up(loads) -> smem, barriers          loads: of stationary tiles
    fence_map(source)                        before the first load from it
    issue_load(barrier, tile, source, row, last, col)    asks for a tile
    wait(barrier, parity)                    what was asked for is there
    load_fragments(a, tiles)                 what products want of both stationary tiles
    multiply_abt(a, tiles, first, second) -> s           two of A B^T
    accumulate_ab(acc, a, tile)              acc += A B
    accumulate_two(acc, a, first, second)    two of them"""

class TileSizes(NamedTuple):
    """Of a tile (64, D)"""
    chunks: int                              # of a row
    sums: int                                # registers of a thread, if it is one of sums
    fragments: int                           # registers of a thread that hold it as A
    bytes: np.uint32

def sizes_of(D):
    return TileSizes(D // PER_CHUNK, sums=D // 2, fragments=D // 4,
                     bytes=np.uint32(2 * TILE_ROWS * D))

@inlined
def tile_barrier(barriers, place):
    return barriers + u32(place * MBARRIER)

def layout_of(D):
    """The device function (row, chunk): where a chunk of a tile is"""
    return swizzled if D > 32 else rows_of_64_bytes

def fragments_of(D):
    """The device function a[i..] = the warp's 16 rows of a tile, as fragments of A."""
    at = layout_of(D)

    @inlined
    def load_a(a, i, tile):
        row = u32(16) * warp_id() + (lane_id() & u32(15))
        for k in range(D // 16):
            ldmatrix_rows(a, i + 4 * k, tile + at(row, u32(2 * k) + bit(lane_id(), 4)))
    return load_a

@inlined
def rows_of_64_bytes(row, chunk):
    """`swizzled` for tiles of 32 columns: two rows, which lie in 128 bytes, turn together."""
    return row * u32(64) + ((chunk ^ ((row >> u32(1)) & u32(3))) * CHUNK_BYTES)

# On mma.sync: all threads copy, chunk by chunk; fragments of both operands are read from shared
# memory, those of A once, those of B by every warp.
@functools.cache
def mma_tiles(D):
    CHUNKS, SUMS, A_REGISTERS, TILE_BYTES = sizes_of(D)
    STEPS = D // 16                          # of K in a product over D
    at, load_a = layout_of(D), fragments_of(D)

    @inlined
    def set_up(loads):
        return dynamic_smem(), u32(0)        # there are no barriers

    @inlined
    def fence_map(source):
        pass                                 # nor tensor maps

    @inlined
    def issue_load(barrier, tile, source, row, last, col):
        """Rows row.. of `source`, columns col to col + D; rows beyond the last are copies of it."""
        width = source.shape[1]
        for i in range(CHUNKS // 2):         # 128 threads, a chunk each, 64 * CHUNKS of them
            r = (thread_id() + u32(128 * i)) // u32(CHUNKS)
            chunk = (thread_id() + u32(128 * i)) % u32(CHUNKS)
            offset = min(row + r, last) * width + col + chunk * PER_CHUNK
            cp_async(tile + at(r, chunk), global_address(source) + u64(2 * offset))

    @inlined
    def wait(barrier, parity):
        """The tiles are there, and nobody reads what was loaded before them."""
        cp_async_wait_all()
        cuda.syncthreads()

    @inlined
    def load_fragments(a, tiles):
        load_a(a, 0, tiles)
        load_a(a, A_REGISTERS, tiles + TILE_BYTES)

    @inlined
    def mma_16_columns(acc, i, a, j, b):
        mma(acc, i, a, j, b, 0)
        mma(acc, i + 4, a, j, b, 2)

    @inlined
    def multiply_abt(a, tiles, first, second):
        """Two products (64, 64): stationary tile * other tile^T.  If the other is one for both, its
        fragments are loaded once."""
        s, b = filled(64, f32(0)), cuda.local.array(4, u32)
        row = (lane_id() & u32(7)) + u32(8) * bit(lane_id(), 4)          # as B of `mma_operand`
        chunk = bit(lane_id(), 3)
        for k in range(STEPS):
            for n in range(4):
                where = at(row + u32(16 * n), chunk + u32(2 * k))
                ldmatrix_rows(b, 0, first + where)
                mma_16_columns(s, 8 * n, a, 4 * k, b)
                if second != first:
                    ldmatrix_rows(b, 0, second + where)
                mma_16_columns(s, 32 + 8 * n, a, A_REGISTERS + 4 * k, b)
        return s

    @inlined
    def load_b(b, k, n, tile):
        """Rows 16 k to 16 k + 15, columns 16 n to 16 n + 15 of a tile, as fragments of B"""
        row, chunk = lane_id() & u32(15), bit(lane_id(), 4)      # as B, mn
        ldmatrix_columns(b, 0, tile + at(u32(16 * k) + row, u32(2 * n) + chunk))

    @inlined
    def accumulate_ab(acc, a, tile):
        """acc (64, D) += A (64, 64) * tile"""
        b = cuda.local.array(4, u32)
        for k in range(4):
            for n in range(STEPS):
                load_b(b, k, n, tile)
                mma_16_columns(acc, 8 * n, a, 4 * k, b)

    @inlined
    def accumulate_two(acc, a, first, second):
        """The same for two A, one behind the other in a, and their tiles"""
        b = cuda.local.array(4, u32)
        for k in range(4):
            for n in range(STEPS):
                load_b(b, k, n, first)
                mma_16_columns(acc, 8 * n, a, 4 * k, b)
                if second != first:
                    load_b(b, k, n, second)
                mma_16_columns(acc, SUMS + 8 * n, a, 16 + 4 * k, b)

    return Tiles(set_up=set_up, fence_map=fence_map, issue_load=issue_load, wait=wait,
                 load_fragments=load_fragments, multiply_abt=multiply_abt,
                 accumulate_ab=accumulate_ab, accumulate_two=accumulate_two)

# What Hopper changes, for D = 64: one thread asks the copy engine for a whole tile, and a barrier
# counts its bytes; `wgmma` reads B from shared memory once a warpgroup, and in A B^T the stationary
# tiles too, which no registers hold then; two products are in flight at once.
@functools.cache
def wgmma_tiles(D):
    TILE_BYTES = sizes_of(D).bytes
    two_abt = wgmma(64, "rows", False, 2, adds="never")
    one_ab, two_ab = wgmma(D, "registers", True), wgmma(D, "registers", True, 2)

    @inlined
    def set_up(loads):
        """Barriers: one for each place of the ring, one for so many loads of stationary tiles.  A
        load arrives once, with the bytes that it announces."""
        smem, barriers = dynamic_smem(), shared_address(cuda.shared.array(BARRIERS, u64))
        if leads_block():
            loads_of_a_pair = u32(2)
            for place in range(PLACES):
                mbarrier_init(tile_barrier(barriers, place), loads_of_a_pair)
            mbarrier_init(tile_barrier(barriers, PLACES), u32(loads))
            mbarrier_fence()
        cuda.syncthreads()                   # they exist
        return smem, barriers

    @inlined
    def fence_map(source):
        if leads_block():
            map_fence(global_address(source))

    @inlined
    def issue_load(barrier, tile, source, row, last, col):
        """Rows row.. of a tensor map's matrix, columns col to col + D; rows beyond the last are
        whatever comes then."""
        if leads_block():
            mbarrier_expect(barrier, TILE_BYTES)
            tma_load(tile, global_address(source), u32(col), u32(row), barrier)

    @inlined
    def wait(barrier, parity):
        """The tiles are there, and nobody reads what was loaded before them; of what dkv copies by
        itself, lse and delta, as well."""
        cp_async_wait_all()
        mbarrier_wait(barrier, u32(parity))
        cuda.syncthreads()

    @inlined
    def load_fragments(a, tiles):
        pass                                 # they are read where they are

    @inlined
    def multiply_abt(a, tiles, first, second):
        s = filled(64, f32(0))
        two_abt(s, descriptor(tiles), descriptor(first), descriptor(tiles + TILE_BYTES),
                descriptor(second))
        return s

    @inlined
    def accumulate_ab(acc, a, tile):
        one_ab(acc, a, descriptor(tile))

    @inlined
    def accumulate_two(acc, a, first, second):
        two_ab(acc, a, descriptor(first), descriptor(second))

    return Tiles(set_up=set_up, fence_map=fence_map, issue_load=issue_load, wait=wait,
                 load_fragments=load_fragments, multiply_abt=multiply_abt,
                 accumulate_ab=accumulate_ab, accumulate_two=accumulate_two)

def tiles_of(D, hopper):
    return wgmma_tiles(D) if hopper else mma_tiles(D)

class Ring(DeviceFunctions):
    """The places of pairs of tiles, and what tells that a pair is there: the barrier of its place,
    when the phase of this parity is over: 0 for pairs 0 and 1, 1 for 2 and 3, 0 for 4 and 5.

    pair_at(smem, n)                         its first tile; the second lies behind it
    wait_pair(barriers, n)
    issue_pair(smem, barriers, n, one, col1, other, col2, row, last)
                                             asks for rows row.. of two matrices"""

@functools.cache
def ring_of(D, hopper):
    way, TILE_BYTES = tiles_of(D, hopper), sizes_of(D).bytes

    @inlined
    def pair_at(smem, n):
        return smem + u32((STATIONARY + n % PLACES * 2) * TILE_BYTES)

    @inlined
    def wait_pair(barriers, n):
        way.wait(tile_barrier(barriers, n % PLACES), n // PLACES % 2)

    @inlined
    def issue_pair(smem, barriers, n, one, col1, other, col2, row, last):
        tile, barrier = pair_at(smem, n), tile_barrier(barriers, n % PLACES)
        way.issue_load(barrier, tile, one, row, last, col1)
        way.issue_load(barrier, tile + TILE_BYTES, other, row, last, col2)
    return Ring(pair_at=pair_at, wait_pair=wait_pair, issue_pair=issue_pair)

@functools.cache
def advance_pipeline_of(D, hopper):
    """The device function of forward and dq: waits for pair n of K and V, asks for the next.  For
    n = -1, only that."""
    ring = ring_of(D, hopper)

    @inlined
    def advance_pipeline(smem, barriers, n, count, qkv, k_col, v_col, row0, last):
        if n >= 0:
            ring.wait_pair(barriers, n)
        if n + 1 < count:
            ring.issue_pair(smem, barriers, n + 1, qkv, k_col, qkv, v_col, row0 + n * 64 + 64,
                            last)
    return advance_pipeline

@inlined
def mask(s, first, beyond):
    """-inf above the diagonal of the tile s[first:], if it passes through.
    beyond: the thread's first column minus its first row, of all of S"""
    if beyond > -TILE_ROWS:
        for i in range(32):
            if beyond > i32(8 * which_row(i) - column_of(i)):
                s[first + i] = -INF32

@inlined
def online_softmax(s, half, acc, SUMS, m, l, beyond, scale2):
    """One step of the running softmax for one 64-row half of s: S becomes 2^(scale2 (S - m)), with
    scale2 = log2(e) / sqrt(D), and what was summed before shrinks to the new m.

    m, l: of the thread's four rows, two a half; l of its own columns only.  SUMS: registers of half
    of acc"""
    top, shrink, first = cuda.local.array(2, f32), cuda.local.array(2, f32), 32 * half
    mask(s, first, beyond)
    for i in range(2):
        top[i] = m[2 * half + i]
    for i in range(32):
        top[which_row(i)] = max(top[which_row(i)], s[first + i])
    for i in range(2):
        top[i] = quad_max(top[i])            # a quad of lanes has a row
        shrink[i] = exp2((m[2 * half + i] - top[i]) * scale2)
        m[2 * half + i] = top[i]
        top[i] *= scale2
        l[2 * half + i] *= shrink[i]
    for i in range(SUMS):
        acc[half * SUMS + i] *= shrink[which_row(i)]
    for i in range(32):
        s[first + i] = exp2(s[first + i] * scale2 - top[which_row(i)])
        l[2 * half + which_row(i)] += s[first + i]

@inlined
def store_neighbours(out, low, high, row, col):
    """The two that a thread has of columns col to col + 7."""
    col += first_column()
    store_pair(global_address(out) + u64(2 * (row * out.shape[1] + col)), pack_bf16(low, high))

@inlined
def rows_of_block(rows, T):
    """Those of forward and dq, the longest first: the first row of the sequence in the batch, the
    block's first in the sequence, the last of the sequence in the batch"""
    row0 = cuda.blockIdx.z * T
    return row0, (cuda.gridDim.x - 1 - cuda.blockIdx.x) * rows, row0 + T - 1

@functools.cache
def store_rotated_of(D):
    CHUNKS, SUMS = sizes_of(D).chunks, sizes_of(D).sums

    @inlined
    def store_rotated(out, acc, first, row, col, cos, sin, t, scale):
        """A row of acc, times scale, its pairs (c, c + D / 2) rotated back by the angles of t: the
        gradient of q or k before RoPE."""
        c = first_column()
        u, v = cuda.local.array(2, f32), cuda.local.array(2, f32)
        for j in range(CHUNKS // 2):
            for n in range(2):
                x, y = acc[first + 4 * j + n] * scale, acc[first + SUMS // 2 + 4 * j + n] * scale
                cosine, sine = cos[t, 8 * j + c + n], sin[t, 8 * j + c + n]
                u[n], v[n] = x * cosine + y * sine, y * cosine - x * sine
            store_neighbours(out, u[0], u[1], row, col + 8 * j)
            store_neighbours(out, v[0], v[1], row, col + D // 2 + 8 * j)
    return store_rotated

@made_once
def tensor_attention_forward(D, hopper):
    CHUNKS, SUMS, A_REGISTERS, TILE_BYTES = sizes_of(D)
    BOTH_SUMS, FRAGMENTS = 2 * SUMS, 2 * A_REGISTERS     # of two tiles
    way, ring, advance_pipeline = (f(D, hopper) for f in (tiles_of, ring_of, advance_pipeline_of))

    @cuda_kernel(launch_bounds=(128, 3 if hopper else 1))
    def forward(o, lse, qkv, T, G, scale):
        """As the portable kernel, 128 query rows of a head a block.   grid (T / 128, H, B)
        qkv: the matrix, or its tensor map"""
        smem, barriers = way.set_up(STATIONARY)
        way.fence_map(qkv)
        acc, m, l = filled(BOTH_SUMS, f32(0)), filled(4, -INF32), filled(4, f32(0))
        q, p_pairs = cuda.local.array(FRAGMENTS, u32), cuda.local.array(S_SUMS, u32)
        h, H, scale2 = cuda.blockIdx.y, cuda.gridDim.y, scale * LOG2E32
        row0, t0, last = rows_of_block(128, T)
        k_col = o.shape[1] + h * G // H * D
        r, count = t0 + first_row(), (min(t0 + 128, T) + 63) // 64   # its rows: r + 0, 8, 64, 72
        stationary = tile_barrier(barriers, PLACES)
        for i in range(2):
            way.issue_load(stationary, smem + u32(i * TILE_BYTES), qkv, row0 + t0 + 64 * i, last,
                           h * D)
        way.wait(stationary, 0)              # Q is there
        way.load_fragments(q, smem)
        for n in range(FIRST_ROUND, count):  # the n-th pair of tiles
            k_tile = ring.pair_at(smem, n)
            advance_pipeline(smem, barriers, n, count, qkv, k_col, k_col + G * D, row0, last)
            if n < 0:
                continue
            s = way.multiply_abt(q, smem, k_tile, k_tile)            # S = Q K^T, both halves of Q
            beyond = i32(n * 64 + first_column() - r)
            online_softmax(s, 0, acc, SUMS, m, l, beyond, scale2)
            online_softmax(s, 1, acc, SUMS, m, l, i32(beyond - 64), scale2)
            p = s                            # which it has become: P = 2^(scale2 (S - m))
            for i in range(S_SUMS):
                p_pairs[i] = pack_bf16(p[2 * i], p[2 * i + 1])
            v_tile = k_tile + TILE_BYTES
            way.accumulate_two(acc, p_pairs, v_tile, v_tile)         # O += P V
        for i in range(4):
            t, total = r + i // 2 * 64 + i % 2 * 8, quad_sum(l[i])
            if t < T:
                for j in range(CHUNKS):
                    n = i // 2 * SUMS + j * 4 + i % 2 * 2
                    store_neighbours(o, acc[n] / total, acc[n + 1] / total, row0 + t, h * D + 8 * j)
                if first_column() == 0:
                    lse[h, row0 + t] = m[i] * scale2 / LOG2E32 + math.log(total)
    return forward

@made_once
def tensor_attention_dq(D, hopper):
    _, SUMS, A_REGISTERS, TILE_BYTES = sizes_of(D)
    FRAGMENTS = 2 * A_REGISTERS              # of two tiles
    way, ring, advance_pipeline = (f(D, hopper) for f in (tiles_of, ring_of, advance_pipeline_of))
    load_a, store_rotated = fragments_of(D), store_rotated_of(D)

    @cuda_kernel(launch_bounds=(128, 1))
    def dq(dqkv, delta, do, o, lse, qkv, cos, sin, T, HD, scale):
        """dQ = dS K before RoPE, and delta = <dO, O> for dkv.  64 query rows a block, S and dP in
        one array of registers.     grid (T / 64, H, B)     do, o, qkv: matrices, or tensor maps"""
        smem, barriers = way.set_up(STATIONARY + 1)
        way.fence_map(qkv)
        way.fence_map(do)
        way.fence_map(o)
        acc = filled(SUMS, f32(0))
        delta_of_row = filled(2, f32(0))
        lse2 = cuda.local.array(2, f32)      # lse log2(e) of the same two rows
        a, ds_pairs = cuda.local.array(FRAGMENTS, u32), cuda.local.array(16, u32)  # a: Q, dO
        h, H, scale2 = cuda.blockIdx.y, cuda.gridDim.y, scale * LOG2E32
        row0, t0, last = rows_of_block(64, T)
        G = (dqkv.shape[1] - HD) // (2 * D)
        k_col, r = HD + h * G // H * D, t0 + first_row()         # its rows: r + 0, 8
        stationary, count = tile_barrier(barriers, PLACES), (min(t0 + 64, T) + 63) // 64
        do_tile, o_tile = smem + TILE_BYTES, smem + u32(2 * TILE_BYTES)     # O: for a moment
        way.issue_load(stationary, smem, qkv, row0 + t0, last, h * D)
        way.issue_load(stationary, do_tile, do, row0 + t0, last, h * D)
        way.issue_load(stationary, o_tile, o, row0 + t0, last, h * D)
        way.wait(stationary, 0)              # Q, dO and O are there
        load_a(a, 0, o_tile)
        load_a(a, A_REGISTERS, do_tile)
        for i in range(A_REGISTERS):
            u, v = a[i], a[A_REGISTERS + i]  # two neighbours of O, two of dO
            delta_of_row[i % 2] += value(u16(u)) * value(u16(v)) + (
                value(u16(u >> u32(16))) * value(u16(v >> u32(16))))
        for i in range(2):
            delta_of_row[i] = quad_sum(delta_of_row[i])
            t = row0 + min(r + 8 * i, T - 1)
            lse2[i] = lse[h, t] * LOG2E32
            if first_column() == 0 and r + 8 * i < T:
                delta[h, t] = delta_of_row[i]
        way.load_fragments(a, smem)
        cuda.syncthreads()                   # O is read: K may come
        for n in range(FIRST_ROUND, count):  # the n-th pair of tiles
            k_tile = ring.pair_at(smem, n)
            advance_pipeline(smem, barriers, n, count, qkv, k_col, k_col + G * D, row0, last)
            if n < 0:
                continue
            # S = Q K^T, and from S_SUMS on dP = dO V^T
            s_dp = way.multiply_abt(a, smem, k_tile, k_tile + TILE_BYTES)
            mask(s_dp, 0, i32(n * 64 + first_column() - r))
            ds = s_dp                        # over S: P (dP - delta); `scale` comes last
            for i in range(S_SUMS):
                p = exp2(s_dp[i] * scale2 - lse2[which_row(i)])
                ds[i] = p * (s_dp[S_SUMS + i] - delta_of_row[which_row(i)])
            for i in range(S_SUMS // 2):
                ds_pairs[i] = pack_bf16(ds[2 * i], ds[2 * i + 1])
            way.accumulate_ab(acc, ds_pairs, k_tile)                 # dQ += dS K
        for i in range(2):
            if r + 8 * i < T:
                store_rotated(dqkv, acc, 2 * i, row0 + r + 8 * i, h * D, cos, sin, r + 8 * i, scale)
    return dq

@made_once
def tensor_attention_dkv(D, hopper):
    CHUNKS, SUMS, A_REGISTERS, TILE_BYTES = sizes_of(D)
    BOTH_SUMS, FRAGMENTS = 2 * SUMS, 2 * A_REGISTERS     # of two tiles
    way, ring, store_rotated = tiles_of(D, hopper), ring_of(D, hopper), store_rotated_of(D)
    load_two, _ = vector(2)

    @cuda_kernel(launch_bounds=(128, 3 if hopper else 1))
    def dkv(dqkv, delta, do, o, lse, qkv, cos, sin, T, HD, scale):
        """dK = sum_h dS^T Q before RoPE,   dV = sum_h P^T dO.  64 keys a block, S^T and dP^T in its
        registers: a row is a key, a column a query.     grid (T / 64, G, B)"""
        smem, barriers = way.set_up(STATIONARY)
        way.fence_map(qkv)
        way.fence_map(do)
        numbers = cuda.shared.array(256, f32)            # lse and delta of 64 queries, twice
        acc = filled(BOTH_SUMS, f32(0))       # dV, dK
        a, pairs = cuda.local.array(FRAGMENTS, u32), cuda.local.array(S_SUMS, u32)   # a: K, V
        g, row0, k0 = cuda.blockIdx.y, cuda.blockIdx.z * T, cuda.blockIdx.x * 64
        last, G, group = row0 + T - 1, cuda.gridDim.y, HD // D // cuda.gridDim.y
        k_col, v_col, scale2 = HD + g * D, HD + (G + g) * D, scale * LOG2E32
        # each thread copies one number for each pair of tiles: half of them lse, half delta
        my_numbers = global_address(lse) if cuda.threadIdx.x < 64 else global_address(delta)
        stationary = tile_barrier(barriers, PLACES)
        for i in range(2):
            way.issue_load(stationary, smem + u32(i * TILE_BYTES), qkv, row0 + k0, last,
                           k_col + i * G * D)
        way.wait(stationary, 0)              # K and V are there
        way.load_fragments(a, smem)
        next_h, next_t, count = g * group, k0, group * ((T - k0 + 63) // 64)
        for n in range(FIRST_ROUND, count):  # the n-th pair of tiles
            t0 = next_t
            q_tile = ring.pair_at(smem, n)
            do_tile = q_tile + TILE_BYTES
            if n >= 0:
                ring.wait_pair(barriers, n)
                next_t += 64
                if next_t >= T:              # the group's next query head
                    next_h, next_t = next_h + 1, k0
            if n + 1 < count:
                t = row0 + next_t + cuda.threadIdx.x % 64
                flat_index = next_h * lse.shape[1] + min(t, last)
                place = (n + 1) % 2 * 128 + cuda.threadIdx.x
                cp_async_4(shared_address(numbers) + u32(4 * place),
                           my_numbers + u64(4 * flat_index))
                col = next_h * D
                ring.issue_pair(smem, barriers, n + 1, qkv, col, do, col, row0 + next_t, last)
            if n < 0:
                continue
            # S^T = K Q^T, and from S_SUMS on dP^T = V dO^T
            s_dp = way.multiply_abt(a, smem, q_tile, do_tile)
            if t0 == k0 or t0 + 64 > T:      # on the diagonal, or queries that do not exist
                ahead = i32(k0 + first_row() - t0 - first_column())  # the first key - first query
                end = i32(T - t0 - first_column())
                for i in range(S_SUMS):
                    if i32(column_of(i) - 8 * which_row(i)) < ahead or i32(column_of(i)) >= end:
                        s_dp[i] = -INF32
            p_ds = s_dp                      # in their registers: P^T, and from S_SUMS on dS^T
            for j in range(8):
                lses = load_two(numbers, n % 2 * 128 + 8 * j + first_column())
                deltas = load_two(numbers, n % 2 * 128 + 64 + 8 * j + first_column())
                for i in range(4 * j, 4 * j + 4):
                    p_ds[i] = exp2(s_dp[i] * scale2 - lses[i % 2] * LOG2E32)
                    p_ds[S_SUMS + i] = p_ds[i] * (s_dp[S_SUMS + i] - deltas[i % 2])
            for i in range(S_SUMS):
                pairs[i] = pack_bf16(p_ds[2 * i], p_ds[2 * i + 1])
            way.accumulate_two(acc, pairs, do_tile, q_tile)          # dV += P^T dO, dK += dS^T Q
        for i in range(2):
            t = k0 + first_row() + 8 * i
            if t < T:
                for j in range(CHUNKS):
                    n = 4 * j + 2 * i
                    store_neighbours(dqkv, acc[n], acc[n + 1], row0 + t, v_col + 8 * j)
                store_rotated(dqkv, acc, SUMS + 2 * i, row0 + t, k_col, cos, sin, t, scale)
    return dkv

@functools.cache
def tensor_attention(D, hopper):
    kernels = (make(D, hopper) for make in (tensor_attention_forward, tensor_attention_dq,
                                            tensor_attention_dkv))
    smem = (STATIONARY + 2 * PLACES) * 2 * TILE_ROWS * D + 1024      # 1,024: to align
    return Attention(*kernels, rotates=True, block=128, rows=2 * TILE_ROWS, back_rows=TILE_ROWS,
                     smem=smem, back_smem=smem)

# ==== 12.7 Self-tests ====
# The unit roundoff u of a type is the largest relative error of one rounding to the nearest.
ROUNDOFF = {"bf16": 2.0 ** -8, "f32": 2.0 ** -24, "f64": 2.0 ** -53}

# The most that an output may differ from the CPU's in float64, in roundoffs u of the type in which
# it is stored:
# (the error's norm over the output's norm, the largest error over the largest entry).
#
# bf16  The inputs are numbers that bfloat16 holds, sums are float32, and an output is rounded once:
#       no entry is further off than 1 u of itself, so neither number exceeds 1.  Attention rounds
#       P and dS too, and its backward pass is given O rounded; these errors are independent, and a
#       rounding is 0.42 u in the mean (uniform over an interval of 2 u / mantissa, the mantissa
#       log-uniform in [1, 2)): three give sqrt(3) * 0.42 = 0.74 u.
# f32   The error of a sum of n terms of random sign walks at random, to a part of sqrt(n) u
#       (Higham 2002, 2.8 and 4.2); the longest but dW's has n = 2,056, sqrt(n) = 45.  An
#       exponential is off by 2^-22 = 4 u itself.
# f64   The same, of both sides.  Matrix products of these inputs are exact.
# dW    is stored as float32 in a run of bfloat16 too.  17,100 terms, sqrt(n) = 131, and tensor
#       cores cut off where others round.
#
# Measured on an H100 and an H200, the worst of all kernels: bf16 0.7 and 0.8, f32 8 and 49, f64 11
# and 19, dW 50 and 57.  A zeroed row of the product with 17,100 rows is 1.9 and more than 10 of
# bf16, a hole of 8 x 8 in the largest dW is 80,000 of f32 by its norm.
BOUNDS = {"bf16": (1.25, 1.5), "f32": (24, 96), "f64": (32, 64)}
BOUNDS_DW = (128, 192)
BOUNDS_ROWS = (320, 480)                     # x in 17 bits: NumPy, rounding alike, is at 160, 170
BOUNDS_PROMPT = (4, 5)                       # those in bf16: NumPy, rounding alike, is at 2, 2.5

def relative_error(x, y):
    """|x - y| / |y|; the error itself where y is zero."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return float(np.linalg.norm(x - y) / (np.linalg.norm(y) or 1.0))

def largest_error(x, y):
    """max |x - y| / max |y|, which sees what is lost in the norm: a row, a corner, an entry."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return float(np.abs(x - y).max(initial=0) / (np.abs(y).max(initial=0) or 1.0))

def errors(x, y):
    return relative_error(x, y), largest_error(x, y)

def bounds(name, kind):
    """What errors() may be at most for an output of kernel `name` that is stored as `kind`."""
    roundoffs = BOUNDS[kind]
    if name.startswith("matmul_dw") and kind == "f32":
        roundoffs = BOUNDS_DW
    if name.startswith("rows"):
        roundoffs = BOUNDS_ROWS
    if name.startswith("prompt"):
        roundoffs = BOUNDS_PROMPT
    return [ROUNDOFF[kind] * n for n in roundoffs]

def fault(name, dtype, x, y):
    """Why x, of a run in dtype, is not the output y that kernel `name` should make; or ""."""
    kind = "f32" if dtype == "bf16" and isinstance(y, Sum) else dtype
    found, most = errors(x, y), bounds(name, kind)
    if all(error <= bound for error, bound in zip(found, most)):         # false for a NaN
        return ""
    return (f"{NAMES[DTYPES[kind]]} {np.shape(y)}: errors {found[0]:.1e} {found[1]:.1e}, "
            f"at most {most[0]:.1e} {most[1]:.1e}")

def self_tests(quick=False):
    """Every kernel against its twin in nanoeuler.py, over shapes that bite; each run twice, to the
    bit.  One line a kernel: the worst errors of all its shapes.  Returns the exit code."""
    print("|gpu - cpu| / |cpu| of an output, and of its largest entries\n\n"
          f"{'kernel':<24}shapes" + "".join(f"{NAMES[d]:>19}" for d in DTYPES.values()))
    failed = []
    for name, cases in op_tests(quick).items():
        worst, faults = {}, []
        for expected, run, dtypes in cases:
            for dtype in filter(has, dtypes):
                first, second = run(dtype), run(dtype)
                for x, again, y in zip(first, second, expected, strict=True):
                    found = np.maximum(worst.get(dtype, 0), errors(x, y))    # a NaN stays a NaN
                    worst[dtype] = found
                    if not np.array_equal(x, again, equal_nan=True):
                        faults.append("two runs differ")
                    if said := fault(name, dtype, x, y):
                        faults.append(said)
        columns = ["{:11.1e}{:8.1e}".format(*worst[d]) if d in worst else " " * 19 for d in DTYPES]
        print(f"{name:<24}{len(cases):>6}{''.join(columns)}   {'FAILED' if faults else 'ok'}",
              flush=True)
        for said in dict.fromkeys(faults):   # each once
            print(f"    {said}", flush=True)
        if faults:
            failed.append(name)
    print(f">>> {len(failed)} kernels FAILED: {', '.join(failed)}" if failed else
          ">>> kernels OK (every run twice, with equal bits)")
    return 1 if failed else 0

class Sum(np.ndarray):
    """A test's array that is never stored as bfloat16: sums, gains, gradients of weights."""

def as_sum(x):
    return np.asarray(x).view(Sum)

def nearest_bf16(x):
    """The nearest numbers that bfloat16 holds, as float64."""
    return from_bf16(to_bf16(x)).astype(np.float64)

def on_device(function, outputs, inputs, top, dtype):
    """What function(*outputs, *inputs) makes of the outputs on the device, floating arrays in the
    type of the run, `top` the highest kernel path."""
    def put(x):
        if not isinstance(x, np.ndarray):
            return x
        if dtype == "bf16" and x.dtype == np.float64 and not isinstance(x, Sum):
            x = to_bf16(x)
        return to_device(x, computing(DTYPES[dtype]) if x.dtype == np.float64 else None)
    arrays = [put(x) for x in (*outputs, *inputs)]
    with at_most(top):
        function(*arrays)                    # which queues kernels: the arrays must live on
        return [from_bf16(to_host(x)) for x in arrays[:len(outputs)]]

class OpTests:
    """name -> [(expected arrays, float64; function of a dtype that returns the device's arrays; the
    dtypes)]     Inputs are numbers that bfloat16 holds: its errors are those of the kernels."""

    def __init__(self):
        self.rng, self.tests = np.random.default_rng(1), {}

    def normal(self, *shape):
        return nearest_bf16(self.rng.standard_normal(shape))

    def add(self, function, outputs, inputs, twin=None, name=None, dtypes=tuple(DTYPES)):
        """function(*outputs, *inputs) should make of the outputs what its twin does, by default the
        function of its name in nanoeuler.py, or the arrays given.  Where wgmma is, `mma` below it
        as well."""
        name, expected = name or function.__name__, twin
        if not isinstance(twin, list):
            expected = [np.array(x) for x in outputs]
            plain = [np.asarray(x) if isinstance(x, Sum) else x for x in inputs]
            on_cpu = twin or getattr(ne, name)
            on_cpu(*expected, *plain)
        expected = [as_sum(y) if isinstance(x, Sum) else y
                    for x, y in zip(outputs, expected, strict=True)]
        runs = [(name, gpu.highest, dtypes)]
        if kernel_path() == "wgmma" and name.startswith(("matmul", "attention")):
            runs.append((name + ", mma", "mma", ("bf16",)))
        for run_name, top, run_dtypes in runs:
            run = functools.partial(on_device, function, outputs, inputs, top)
            self.tests.setdefault(run_name, []).append((expected, run, run_dtypes))

def op_tests(quick):
    """The tests of all ops, in the order of their sections: see OpTests."""
    ops = OpTests()
    add_matmul_tests(ops, quick)
    add_embedding_tests(ops)
    add_rmsnorm_tests(ops)
    add_rope_and_attention_tests(ops)
    add_swiglu_tests(ops)
    add_cross_entropy_tests(ops)
    add_bias_and_head_norm_tests(ops)
    add_adamw_tests(ops)
    add_decode_tests(ops)
    add_copy_tests(ops)
    add_choose_tests(ops)
    if kernel_path() != "portable":
        add_rows_tests(ops)
    return ops.tests

def add_matmul_tests(ops, quick):
    # the last three for tensor cores: edges; more tiles than blocks, and dW in parts; depth
    for M, N, K in ((1, 1, 1), (5, 7, 3), (128, 128, 16), (129, 130, 17), (300, 257, 100),
                    (304, 264, 104), (17100, 8, 8), (1000, 1288, 2056)):
        if quick and M * N * K > 1 << 24:
            continue
        x, w, dy, dw = ops.normal(M, K), ops.normal(N, K), ops.normal(M, N), ops.normal(N, K)
        ops.add(matmul, [0 * dy], [x, w], [x @ w.T])
        ops.add(matmul_dx, [0 * x], [dy, w], [dy @ w])
        if M * N * K < 1 << 24:
            ops.add(functools.partial(matmul_dx, add=True), [x], [dy, w], [x + dy @ w],
                    "matmul_dx, added")
        semaphores = np.zeros(SEMAPHORES, np.uint32)     # and zeros they must be again
        ops.add(matmul_dw_test, [as_sum(dw), semaphores], [dy, x], [dw + dy.T @ x, semaphores],
                "matmul_dw")
        if kernel_path() == "wgmma" and K % PER_CHUNK == 0:
            ops.add(one_tile_matmul, [0 * dy], [x, w], [x @ w.T], dtypes=("bf16",))

def add_embedding_tests(ops):
    for BT, V, C in ((1, 1, 1), (70, 13, 10), (300, 512, 1030), (33, 5, 128)):
        tokens = ops.rng.integers(0, V, BT, dtype=np.int32)
        dx, dwte = ops.normal(BT, C), ops.normal(V, C)
        ops.add(embedding_forward, [0 * dx], [tokens, ops.normal(V, C)])
        ops.add(embedding_backward, [as_sum(dwte)], [dx, tokens],
                lambda dwte, dx, tokens: ne.embedding_backward(dwte, dx[None], tokens[None], 0, C))

def add_rmsnorm_tests(ops):
    for BT, C in ((1, 5), (3, 10), (37, 320), (130, 768), (9, 2049)):
        x, w, dy = ops.normal(BT, C), ops.normal(C), ops.normal(BT, C)
        dnext, dw = ops.normal(BT, C), ops.normal(C)
        y, rstd, dx, dgain = 0 * x, np.zeros(BT), 0 * x, 0 * dw
        step = nearest_bf16(0.1 * ops.normal(BT, C))
        ne.rmsnorm_forward(y, rstd, x, w, 1e-5)
        ops.add(residual_rmsnorm_forward, [step, 0 * x, as_sum(0 * rstd), as_sum(x - step)],
                [as_sum(w), 1e-5], [y.copy(), x, rstd, x], "rmsnorm_forward")
        ops.add(rmsnorm_again, [0 * x], [x, as_sum(w), as_sum(rstd)], [y])
        ne.rmsnorm_backward(dx, dnext, dy, x, w, rstd)
        ne.gain_gradient(dgain, dy, x, rstd, 0)
        dgain += dw
        ops.add(rmsnorm_backward, [dnext, as_sum(dw), dy],
                [as_sum(np.zeros((PARTS, C))), x, as_sum(w), as_sum(rstd)], [dx, dgain, y])

def add_rope_and_attention_tests(ops):
    for B, T, H, G, D in ((1, 1, 1, 1, 2), (2, 65, 4, 2, 10), (1, 64, 4, 4, 64), (2, 130, 6, 1, 32),
                          (1, 200, 12, 4, 64), (2, 33, 2, 1, 128), (1, 63, 3, 3, 34),
                          (2, 321, 2, 1, 64), (1, 330, 2, 2, 128), (1, 385, 2, 1, 32),
                          (1, 321, 1, 1, 10)):   # the last four: several tiles on every path
        qkv, do = ops.normal(B * T, (H + 2 * G) * D), ops.normal(B * T, H * D)
        o, lse, dqkv, scratch = 0 * do, np.zeros((H, B * T)), 0 * qkv, np.zeros((H, B * T))
        cos, sin = ne.rope_table(replace(ne.PRESETS["small"], head_dim=D, seq_len=T), np.float64)
        angles = [as_sum(cos), as_sum(sin)]
        attention_twin(o, lse, dqkv, do, qkv, T, D)
        turned, every = qkv.copy(), [np.tile(x, (B, 1)) for x in (cos, sin)]
        ne.rope(turned, *every, H + G, 1.0)
        ops.add(rope, [qkv], [*angles, T, H + G, 1], [turned])
        turned_back = nearest_bf16(turned)
        ne.rope(turned_back, *every, H + G, -1.0)
        ops.add(rope, [nearest_bf16(turned)], [*angles, T, H + G, -1], [turned_back],
                "rope, backward")
        ops.add(attention_forward, [0 * o, as_sum(scratch)], [qkv, T, D], [o, lse])
        ne.rope(dqkv, *every, H + G, -1.0)
        ops.add(attention_backward, [0 * dqkv],
                [as_sum(scratch), do, o, as_sum(lse), qkv, *angles, T, D], [dqkv])
        for window in (n for n in (1, 9, 64, 150) if n < T < 350):
            o, lse, dqkv = 0 * do, 0 * scratch, 0 * qkv
            attention_twin(o, lse, dqkv, do, qkv, T, D, window)
            ne.rope(dqkv, *every, H + G, -1.0)
            ops.add(attention_forward, [0 * o, as_sum(scratch)], [qkv, T, D, window], [o, lse],
                    "window, forward")
            ops.add(attention_backward, [0 * dqkv],
                    [as_sum(scratch), do, o, as_sum(lse), qkv, *angles, T, D, window], [dqkv],
                    "window, backward")

def add_swiglu_tests(ops):
    for BT, F in ((1, 1), (7, 9), (65, 344), (3, 2048)):
        gate_up, dy = nearest_bf16(3 * ops.normal(BT, 2 * F)), ops.normal(BT, F)
        ops.add(swiglu_forward, [0 * dy], [gate_up])
        ops.add(swiglu_backward, [gate_up], [dy])

def add_cross_entropy_tests(ops):
    for BT, P, V in ((1, 1, 2), (5, 1, 13), (9, 4, 512), (3, 2, 4099)):
        logits, nll = nearest_bf16(3 * ops.normal(BT, P, V)), np.zeros((P, BT))
        weight = ops.rng.random((-(-BT // 2), P))
        targets, expected = ops.rng.integers(-1, V, (P, BT), dtype=np.int32), logits.copy()
        for k in range(P):
            for t in range(BT):
                ne.cross_entropy(nll[k, t:t + 1], expected[t, k:k + 1], targets[k, t:t + 1],
                                 weight[t // 2, k])
        ops.add(cross_entropy_test, [logits.reshape(BT, P * V), as_sum(0 * nll)],
                [targets, weight.tolist(), V], [expected.reshape(BT, P * V), nll], "cross_entropy")

def add_bias_and_head_norm_tests(ops):
    for BT, H, G, D in ((1, 1, 1, 4), (37, 4, 2, 10), (130, 6, 3, 64), (9, 2, 1, 130)):
        heads, QKV = H + G, (H + 2 * G) * D
        qkv, dqkv, bias, dbias = (ops.normal(*shape) for shape in ((BT, QKV),) * 2 + ((QKV,),) * 2)
        ops.add(add_bias, [qkv], [as_sum(bias)])
        ops.add(bias_gradient, [as_sum(dbias)], [dqkv, as_sum(np.zeros((PARTS, QKV)))],
                [dbias + dqkv.sum(0)])
        q_gain, k_gain, dq_gain, dk_gain, *found = (ops.normal(D) for _ in range(6))
        gains, qk = [as_sum(q_gain), as_sum(k_gain)], qkv[:, :heads * D].copy()
        y, dx, rstd = qkv.copy(), dqkv.copy(), np.zeros((BT, heads))
        ne.head_norm_forward(y, rstd, q_gain, k_gain, 1e-5)
        ops.add(head_norm_forward, [qkv, 0 * qk, as_sum(0 * rstd)], [*gains, 1e-5], [y, qk, rstd])
        ne.head_norm_backward(dx, qk, rstd, q_gain, k_gain)
        for dgain, first, last in zip(found, (0, H), (H, heads)):
            ne.head_gain_gradient(dgain, dqkv, qk, rstd, first, last, 0)
        ops.add(head_norm_backward, [dqkv, as_sum(dq_gain), as_sum(dk_gain)],
                [as_sum(np.zeros((PARTS * ROWS, 2 * D))), qk, as_sum(rstd), *gains],
                [dx, dq_gain + found[0], dk_gain + found[1]])

def add_adamw_tests(ops):
    hyper = [*ne.hyper_at(2, 1e-2, beta1=0.9, beta2=0.95, weight_decay=0.1, clip=1.0)]
    for N, size in ((1, 1), (1000, 1), (100003, 1), (1000, 2.0 ** 70)):  # its square is no float32
        p, m, v = ops.normal(N), ops.normal(N), ops.normal(N) ** 2
        g = size * ops.normal(N)
        expected = [x.copy() for x in (p, g, m, v)]
        norm = ne.adamw(*expected, N // 2, ne.Hyper(*hyper))
        ops.add(adamw_test, [p, g, m, v, np.zeros(1)], [N // 2, hyper], [*expected, [norm]],
                "adamw", ("f32", "f64"))
        ops.add(adamw_copies_test, [0 * p, *map(as_sum, (p, g, m, v))], [N // 2, hyper],
                [expected[0], *expected], "adamw, copies", ("bf16",))
        g = g + np.where(np.arange(N) == N // 2, math.nan, 0)        # then nothing may be touched
        ops.add(adamw_nan_test, [p, m, v], [g, np.zeros(1), N // 2, hyper], [p, m, v], "adamw, NaN",
                ("f32", "f64"))

def add_decode_tests(ops):
    for cfg in (replace(ne.PRESETS["small"], n_layer=2, seq_len=70, vocab_size=61),
                replace(ne.PRESETS["small"], n_layer=1, seq_len=9, tie_embeddings=True, n_mtp=1),
                replace(ne.PRESETS["small"], n_layer=2, seq_len=70, qkv_bias=True, qk_norm=True,
                        window=9, rope_scaling="yarn", rope_factor=4.0, rope_original=20)):
        flat = ne.init_params(cfg, 3, np.float64)
        if cfg.qkv_bias:
            vectors = ne.entries_where(cfg, lambda x: not x.decays)
            flat[vectors] += 0.5 * ops.normal(vectors.stop - vectors.start)
        tokens = ops.rng.integers(0, cfg.vocab_size, cfg.seq_len)
        expected = ne.Model(cfg, flat).logits(tokens[None].astype(np.int32))[0, 0]
        decode = functools.partial(decode_test, cfg, flat, tokens)
        ops.tests.setdefault("decode", []).append(([expected.copy()], decode, ("f32", "f64")))

def add_copy_tests(ops):
    """What moves numbers between slots and GPUs"""
    for L, slots, G, T, D, n in ((1, 2, 1, 1, 2, 1), (2, 3, 4, 70, 64, 69)):
        cache = ops.normal(L, slots, G, T, D)
        copied = cache.copy()
        copied[:, 0, :, :n] = cache[:, 1, :, :n]
        ops.add(copy_slot_test, [cache], [1, 0, n], [copied], "copy_slot", ("f32",))
    from nanoeuler_parts.ranks.engine import add_in_order_kernel

    def add_in_order_test(g, others, rank):
        launch(add_in_order_kernel, g, others, rank, grid=1024, block=256)

    for ranks, n in ((2, 1), (3, 300_001)):
        all_g = ops.normal(ranks, n)
        for rank in range(ranks):
            others = all_g.copy()
            others[rank] = np.nan            # nobody sends it to itself
            ops.add(add_in_order_test, [all_g[rank]], [others, rank], [all_g.sum(0)],
                    "add_in_order", ("f32", "f64"))

def add_rows_tests(ops):
    """Texts in slots, read in pieces of different lengths, so that steps are of any mixture; those
    that are long enough also as prompts."""
    plain = dict(n_layer=2, seq_len=150, vocab_size=61, n_mtp=1)
    for i, sizes in enumerate((
            dict(n_hidden=1536),
            dict(n_embd=328, n_hidden=104, head_dim=64, n_head=6, tie_embeddings=True),
            dict(n_embd=64, n_hidden=2312, head_dim=128, n_head=5, n_kv_head=1),
            dict(n_embd=2568, head_dim=48, n_layer=1),
            dict(n_embd=1280, n_hidden=2816, n_layer=1),           # slices in uneven turns
            dict(n_hidden=1024, qkv_bias=True))):
        cfg = replace(ne.PRESETS["small"], **{**plain, **sizes})
        flat = nearest_bf16(ne.init_params(cfg, 3, np.float64))
        n_gains = sum(math.prod(shape) for _, shape, *_ in ne.param_table(cfg)[ne.VECTORS])
        flat[-n_gains:] += nearest_bf16(0.1 * ops.normal(n_gains))
        texts = [ops.rng.integers(0, cfg.vocab_size, n).tolist() for n in (150, 1, 77, 40)]
        model = ne.Model(cfg, flat)
        expected = [as_sum(model.logits(np.array([text], np.int32))[0, 0].copy())
                    for text in texts]
        long = [i for i, text in enumerate(texts) if len(text) > BY_ROWS]
        paths = [("", gpu.highest)]
        if has_copy_engine() and i % 3 == 1: # compiling takes longest; only where W lies differs
            paths.append((", mma", "mma"))
        for suffix, top in paths:
            read = functools.partial(below, top, rows_test, cfg, flat, texts)
            ops.tests.setdefault("rows" + suffix, []).append((expected, read, ("bf16",)))
            read = functools.partial(below, top, prompt_test, cfg, flat, [texts[i] for i in long])
            ops.tests.setdefault("prompt" + suffix, []).append((
                [np.array(expected[i]) for i in long], read, ("bf16",)))

def add_choose_tests(ops):
    """Draws of all kinds from logits of which many are equal, all, or one is not finite"""
    for V in 1, 61, 4099:
        z, rng = ops.normal(64, V + 8), ops.rng
        z[1] = 0
        z[2, V // 2], z[3, V - 1] = np.nan, np.inf
        draws = [ne.Draw(*map(float, (
            rng.choice([0, 0.5, 1, 30]), rng.choice([0, 1, 7, V]), rng.choice([0, 0.3, 0.9, 1]),
            rng.choice([0, 0, 0.2]), rng.random()))) for _ in z]
        expected = np.array([-1.0 if not np.isfinite(line).all() else ne.sample(
            line.astype(np.float32), SimpleNamespace(random=lambda u=draw.uniform: u),
            draw._replace(top_k=int(draw.top_k))) for line, draw in zip(z[:, :V], draws)])
        ops.add(choose_test, [np.zeros(64, np.int32)], [z, draws, V], [expected], "choose",
                ("f32",))

def below(top, test, *args):
    """test(*args) by kernels up to `top`"""
    with at_most(top):
        return test(*args)

def rows_test(cfg, flat, texts, dtype):
    """[(T, V)] of each text: the logits after each token"""
    decoder = Decoder(cfg, flat.astype(np.float32), "bf16", slots=len(texts))
    found, at, step = [[] for _ in texts], [0] * len(texts), 0
    while any(a < len(text) for a, text in zip(at, texts)):
        parts = []
        for slot, text in enumerate(texts):
            n = (1, 6, 2, 40, 1)[(step + slot) % 5]
            if piece := text[at[slot]:at[slot] + n]:
                parts.append(ne.Part(slot, piece, len(piece)))
        logits, line = decoder.read(parts).copy(), 0
        for slot, _, n in parts:
            found[slot].append(logits[line:line + n])
            at[slot], line = at[slot] + n, line + n
        step += 1
    return [np.concatenate(rows) for rows in found]

def prompt_test(cfg, flat, texts, dtype):
    """The same, of texts that begin their slots."""
    decoder = Decoder(cfg, flat.astype(np.float32), "bf16", slots=len(texts))
    logits = decoder.read([ne.Part(i, text, len(text)) for i, text in enumerate(texts)])
    return np.split(logits, np.cumsum([len(text) for text in texts])[:-1])

def decode_test(cfg, flat, tokens, dtype):
    """[(T, V)]: the logits after each token"""
    decoder = Decoder(cfg, flat.astype(DTYPES[dtype]))
    return [np.array([decoder.step(token) for token in tokens.tolist()])]

def attention_twin(o, lse, dqkv, do, qkv, T, D, window=0):
    """What attention_forward and attention_backward should make, without RoPE: o, lse and dqkv of
    every sequence of T rows, by the functions of nanoeuler.py, which take one."""
    window = window or T
    plain, H = (do, qkv, dqkv), do.shape[1] // D
    G = (qkv.shape[1] // D - H) // 2
    do, qkv, dqkv = (ne.aligned(x.shape, x.dtype) for x in plain)      # read past their ends
    do[:], qkv[:] = plain[:2]
    cfg = ne.Config(n_head=H, n_kv_head=G, head_dim=D)
    shapes = ne.scratch_shapes(cfg, 1, T, np.dtype(np.float64))
    scratch = ne.scratch_of(0, 0, ne.Scratch(*(ne.aligned(x, np.float64) for x in shapes)))
    for b in range(0, len(qkv), T):
        s, one = slice(b, b + T), np.zeros((len(lse), T))
        ne.attention_forward(o[s], one, qkv[s], D, window, 0, H, scratch)
        ne.attention_backward(dqkv[s], do[s], o[s], one, qkv[s], D, window, 0, G, scratch)
        lse[:, s] = one
    plain[2][:] = dqkv

def matmul_dw_test(dw, semaphores, dy, x):
    matmul_dw(dw, dy, x, semaphores)

def choose_test(ids, out, draws, V):
    rows = np.zeros((5, AT_ONCE), np.int32)
    rows[COUNTS, N_WANTED] = len(draws)
    rows[COUNTS, RING] = 1
    chosen, odds = new((2, ne.MOST_ROWS), np.int32), new((AT_ONCE, V), np.float64)
    table = np.full((2, ne.MOST_ROWS, DRAW), np.nan)
    table[1, :len(draws)] = draws
    launch(choose_kernel(has_copy_engine()), chosen, ids, odds, out, to_device(table),
           to_device(rows), V, grid=len(draws), block=256)

def copy_slot_test(cache, source, slot, n):
    launch(copy_slot_kernel, cache, source, slot, n, block=256,
           grid=(cache.shape[2], cache.shape[0]))

def cross_entropy_test(logits, nll, targets, weight, V):
    cross_entropy(nll, logits, targets, to_device(weight, np.float64), 0, V, 2)

def adamw_test(p, g, m, v, norm, n_decay, hyper):
    hyper, results = to_device(hyper, np.float64), to_device([0], np.float64)
    adamw(p, p, g, m, v, n_decay, hyper, new(SUMS, np.float64), results)
    norm.copy_to_device(to_host(results).astype(norm.dtype))

def adamw_copies_test(copies, p, g, m, v, n_decay, hyper):
    hyper, results = to_device(hyper, np.float64), to_device([0], np.float64)
    adamw(p, copies, g, m, v, n_decay, hyper, new(SUMS, np.float64), results)

def adamw_nan_test(p, m, v, g, norm, n_decay, hyper):
    """g is an input here: only p, m and v are compared."""
    adamw_test(p, g, m, v, norm, n_decay, hyper)

# What both errors() of a tensor's gradient must stay below.  Measured with the base preset: 4.6, 69
# and 71 roundoffs of the type.
GRADIENT_BOUNDS = {"bf16": 5e-2, "f32": 5e-6, "f64": 1e-13}

def gradient_check(preset="base", batch=1):
    """The gradient of the whole model, tensor by tensor, against the CPU's in float64."""
    need(batch > 0, f"--batch is {batch}, expected at least 1")
    cfg, B, rng = ne.PRESETS[preset], batch, np.random.default_rng(1)
    T, flat = cfg.seq_len, ne.init_params(cfg, 1, np.float64)
    tokens = rng.integers(0, cfg.vocab_size, (B, T), dtype=np.int32)
    targets = rng.integers(-1, cfg.vocab_size, (cfg.n_mtp, B, T), dtype=np.int32)
    weight = ne.loss_weights(targets, 0.3)
    cpu = ne.Model(cfg, flat)
    expected = cpu.run(ne.GRADIENT, tokens, targets, weight).sum(0)
    dtypes = [dtype for dtype in GRADIENT_BOUNDS if has(dtype)]
    print(f"gradient of {ne.n_params(cfg):,} parameters, {B} x {T} tokens, against the CPU in "
          f"float64:\n|gpu - cpu| / |cpu| of a tensor, and of its largest entries\n\n"
          "tensor      " + "".join(f"{NAMES[DTYPES[d]]:>14}{'':5}" for d in dtypes).rstrip())
    wanted = {**cpu.g._asdict(), "loss": expected}
    rows = {name: [] for name, y in wanted.items() if y.size}        # a tensor that the model has
    for dtype in dtypes:
        model = Model(cfg, flat, dtype=dtype)
        model.gradient(tokens, targets, weight)
        grads = ne.views(to_host(model.g_flat), model.table)._asdict()
        grads["loss"], _ = model.update(ne.Hyper(*np.ones(8)))
        for name, row in rows.items():
            row.append(errors(grads[name], wanted[name]))
        del model                            # before the next takes its memory
    rows["worst"] = np.max([*rows.values()], axis=0)     # a NaN stays a NaN
    for name, row in rows.items():
        print(f"{name:<12}" + "".join(f"   {norm:.1e} {largest:.1e} " for norm, largest in row))
    most = [GRADIENT_BOUNDS[dtype] for dtype in dtypes]
    good = all(error < bound for pair, bound in zip(rows["worst"], most) for error in pair)
    print(f">>> gradient {'OK' if good else 'FAILED'} (< "
          + ", < ".join(f"{bound:.0e}" for bound in most) + ")")
    return 0 if good else 1

# ==== 13 Command line ====
@dataclass
class OnGpu:
    """What the GPU's stages are started with beside the CPU's options, some of which differ."""
    dtypes = "bf16", "f32", "f64"
    unsaid = {}                              # what a checkpoint does not say: nothing is assumed
    save_every: int = ne.setting(5000, 1, 1 << 40, "steps between checkpoints")
    dtype: str = ne.setting("bf16", 0, 0, "bf16, f32 or f64")
    matmul: str = ne.setting("wgmma", 0, 0, "highest kernel path: wgmma, mma, or portable")
    recompute: bool = ne.setting(False, 0, 0, "keep of a layer only what goes in, and make the "
                                 "rest again on the way back: slower, with less memory")
    gpus: int = ne.setting(1, 1, 1024, "of this machine, a process each; a launcher goes first")

class CountsGpus:
    """A run that knows how many GPUs it has"""

    def __init__(self, out, start, options, engine):
        before = start.state.options.get("gpus", 1) if start.state.options else PLACE.size
        if before != PLACE.size:
            start = start._replace(state=replace(start.state, micro_batch=None))
            print(f"note: {out} had {ne.counted(before, 'GPU')}, and goes on with {PLACE.size}: "
                  f"its last bits will differ from those of a run that had as many all along",
                  file=sys.stderr)
        options.gpus = PLACE.size
        super().__init__(out, start, options, engine)

class Run(CountsGpus, ne.Run):
    verb, preset, larger_data = "t", "base", "data/pretrain.txt"

    @dataclass
    class Options(OnGpu, ne.TextOptions):
        data: str = ne.setting(ne.TextOptions.data, 0, 0, f"{ne.TEXT_HELP}; if data/pretrain.txt "
                               "exists, it replaces the default", several=True)
        steps: int | None = ne.setting(10_000, 0, 1 << 40, "length of the run; 0: by --minutes")
        batch: int = ne.setting(32_768, 1, 1 << 40, "tokens a step")
        holdout: float = ne.setting(0.02, 0.0001, 0.9, "tail of the text kept for validation")
        warmup: int = ne.setting(200, 0, 1 << 40, "steps of linear warm-up")
        weight_decay: float = ne.setting(1.0, 0, 10, "of matrices only; a text is reread")

class SftRun(CountsGpus, sft.SftRun):
    verb, Options = "s", make_dataclass("Options", (), bases=(OnGpu, sft.SftOptions))

class DpoRun(CountsGpus, dpo.DpoRun):
    verb, Options = "d", make_dataclass("Options", (), bases=(OnGpu, dpo.DpoOptions))

def on_gpu(verb, **engine):
    """The function of a verb, called if there is a GPU that answers."""
    def run(**flags):
        open_device()
        return verb(**engine, **flags)
    return run

def stage(run):
    """The function of a verb that trains, on one GPU or on several."""
    def start(**flags):
        if PLACE.size > 1:
            from nanoeuler_parts.ranks.processes import launch_ranks
            return launch_ranks(run, flags)
        if flags.get("gpus", 1) > 1:
            from nanoeuler_parts.ranks.processes import start_ranks
            return start_ranks(flags["gpus"])
        open_device()
        return ne.launch(run, Model, **flags)
    return start

# Name, module, help: see `add_verbs` of nanoeuler.py
VERBS = [(name, "nanoeuler_cuda", text) for name, text in (
    ("test", "every op against the CPU"),
    ("g", "the gradient of the whole model against the CPU"),
    ("t", "pretrain; writes a checkpoint and a log"),
    ("tr", "go on with the run of t"),
    ("i", "one continuation, or those of a file"),
    ("s", "fine-tune: learn to answer"),
    ("d", "tune on preferences: learn the better of two answers"),
    ("c", "chat"),
    ("eval", "perplexity and bits per byte of texts, accuracy on questions"),
    ("serve", "answer browsers and OpenAI's clients"),
    ("doctor", "what this machine has, and what it lacks"))]

PRESET = arg("--preset", default=argparse.SUPPRESS, choices=list(ne.PRESETS),
             help="size of the model (default: base)")

def test_verb(add):
    add(on_gpu(self_tests), arg("--quick", action="store_true", help="without the largest shapes"))

def g_verb(add):
    add(on_gpu(gradient_check), PRESET, arg("--batch", type=int, default=1, help="sequences"))

def t_verb(add):
    return add(stage(Run), PRESET, ne.INIT, ne.out("nanoeuler.bin"), *RUN,
               settings=fields(Run.Options), shape=ne.SHAPE)

def tr_verb(add):
    t_verb(add).set_defaults(resume=True)

def i_verb(add):
    add(on_gpu(ne.generate_text, decoder=Decoder), *ne.TO_GENERATE, settings=fields(ne.Sampling))

def s_verb(add):
    add(stage(SftRun), sft.start_argument(SftRun), ne.out("nanoeuler_chat.bin"), *RUN,
        settings=fields(SftRun.Options), shape=sft.CONTEXT)

def d_verb(add):
    add(stage(DpoRun), sft.start_argument(DpoRun), ne.out("nanoeuler_dpo.bin"), *RUN,
        settings=fields(DpoRun.Options), shape=sft.CONTEXT)

def c_verb(add):
    add(on_gpu(ne.chat, decoder=Decoder), MODEL, settings=fields(ne.ChatSampling))

def eval_verb(add):
    from nanoeuler_parts.tools.evaluation import EVAL_ARGUMENTS, EvalOptions, evaluate

    @dataclass
    class Options(EvalOptions):
        batch: int = ne.setting(64, 1, 1 << 16, "largest number of sequences at a time")
        dtype: str = ne.setting("bf16", 0, 0, "of texts and choices: bf16 or f32")
        matmul: str = ne.setting("wgmma", 0, 0)          # these two have no flag
        recompute: bool = ne.setting(True, 0, 0)         # no layer is kept: nothing goes back

    add(on_gpu(evaluate, decoder=Decoder, engine=Model, settings=Options), *EVAL_ARGUMENTS,
        settings=fields(Options))

def serve_verb(add):
    from nanoeuler_parts.serve.verb import serve, SERVED, Serving
    add(on_gpu(serve, decoder=Decoder), SERVED, settings=fields(Serving))

def doctor_verb(add):
    add(doctor)

def doctor():
    """Prints what this machine has of what the program needs; returns the exit code."""
    rows = [("CUDA target", f"numba-cuda, {os.path.dirname(cuda.__file__)}")]
    problem = gpu_problem()
    if not problem:
        free, total = cuda.current_context().get_memory_info()
        found = cuda.get_current_device()    # the first, or what CUDA_VISIBLE_DEVICES says
        rows += [("uses", "{}, sm_{}{}".format(found.name, *found.compute_capability)),
                 ("matmul, attention", kernel_path()),
                 ("memory", f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f}"),
                 ("this process", f"rank {PLACE.rank} of {PLACE.size}, sees "
                                  f"{ne.counted(gpus_here(), 'GPU')}"),
                 ("NCCL", nccl_found()), ("links", links_found() or "nvidia-smi names none")]
    return report(problem, rows)

def main(argv=None):
    try:
        return ne.run_verb(VERBS, "NanoEuler on the GPU.  Without a verb: the self-tests",
                        (sys.argv[1:] if argv is None else argv) or ["test"])
    except CudaAPIError as e:
        said = " ".join(str(e).split())
        print(f"nanoeuler: the GPU says: {said}; see: {HERE} doctor",
              file=sys.stderr)
        return 2
