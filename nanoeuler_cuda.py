"""NanoEuler on the GPU: the model of nanoeuler.py again, in CUDA kernels written in Numba.

The numbers of sections 1 to 6 and 9, the order of the ops and their names are those of
nanoeuler.py, which is the specification: the self-tests hold the kernels of every op against the
function of the same name there, or, products, against NumPy's.  AdamW is the only optimizer here:
continue a run with Muon in nanoeuler.py.  Data, training loops, chat and files come from that file.

    python nanoeuler_cuda.py                  self-tests: compare every kernel with the CPU
    python nanoeuler_cuda.py g                compare the gradient of a whole model with the CPU's
    python nanoeuler_cuda.py t                train on a text, write nanoeuler.bin; tr continues
    python nanoeuler_cuda.py i "It was"       print one continuation
    python nanoeuler_cuda.py s                train it to answer, write nanoeuler_chat.bin
    python nanoeuler_cuda.py d                train it on preferences, write nanoeuler_dpo.bin
    python nanoeuler_cuda.py c                chat with nanoeuler_chat.bin
    python nanoeuler_cuda.py eval --data A    measure perplexity; --questions: accuracy
    python nanoeuler_cuda.py serve            serve browsers and OpenAI's clients
    python nanoeuler_cuda.py doctor           print what this machine has of what this needs

The verbs g, t, tr, i, s, d and c also have long names: check, train, resume, generate, sft, dpo and
chat.

A residual block is an Euler step, x[i + 1] = x[i] + f(x[i]).  `residual_rmsnorm_forward` of 4.3
takes it; in 5, `forward` takes two a layer, and `backward` walks back along them.

This file is a complete engine in plain Numba, for any GPU and any type.  To read it, you need to
know CUDA's threads and blocks, and nothing more.  What makes it fast are three folders of
nanoeuler_parts, in this order:

    gpu/           launches, graphs and numbers, which this file uses from its first section on
    tensor_cores/  the same products and the same attention once more, in bfloat16 on tensor cores,
                   and the fast decoder.  `matmul` of 4.1, `attention_of` of 4.5 and `Decoder` of 9
                   use them if the GPU has tensor cores.  Without this folder, this file is slower,
                   and computes the same up to rounding.
    ranks/         several GPUs that train one model

Contents
    1    Device: kernels and launches         4.7  Cross-entropy
    2    Memory: what a run keeps             4.8  Biases and norms of q and k
    3    Building blocks: numbers, sums       5    Model: forward, heads, backward
    4.1  Matmul                               6    Optimizer
    4.2  Embedding                            9    Inference: a decoder, row by row
    4.3  RMSNorm, and the Euler step          10   Self-tests
    4.4  RoPE                                 13   Command line
    4.5  Attention
    4.6  SwiGLU

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
        P, S and dS are the matrices of the papers, p an entry; elsewhere p is parameters.
Order   Each number is summed in one order, by one thread or by blocks that take turns.  Two runs
        on one kind of GPU, with as many sequences at a time, give the same bits.
"""
import bisect
import functools
import gc
import importlib.metadata
import importlib.util
import itertools
import math
import operator
import os
import sys
from collections import namedtuple
from dataclasses import replace
from typing import NamedTuple

from nanoeuler_parts.gpu.doctor import HERE, ON_CPU, PIP, report
from nanoeuler_parts.gpu.place import take_own_gpu

# As a program, this file imports itself as a module, as nanoeuler.py does, and calls its `main`.
if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))   # first, even under python -P
    try:
        import nanoeuler_cuda
    except ImportError as e:                 # of the packages below
        try:
            from nanoeuler_parts.tools.on_gpu import show_help
        except ImportError:                  # not even the CPU's are there
            sys.exit(report(e))
        asks = {"-h", "--help"} & {*sys.argv[1:]}
        sys.exit(show_help(sys.argv[1:], e) if asks else report(e))
    sys.exit(nanoeuler_cuda.main())

# The rest of the file cannot even be compiled without numba-cuda: say so, and not by a traceback.
try:
    import numpy as np

    import nanoeuler as ne
    from nanoeuler import UserError, need
    from nanoeuler_parts.machine.numbers import from_bf16, to_bf16

    need(importlib.util.find_spec("numba_cuda"), "numba-cuda is not installed")
    need(importlib.metadata.version("numba-cuda").startswith("0.30."),
         "this program knows numba-cuda 0.30, whose private parts nanoeuler_parts/gpu uses")
    from numba import cuda, types
    from numba.cuda.np import arrayobj       # what a too new NumPy breaks first
    from numba.cuda.cudadrv.devicearray import DeviceNDArray
    from numba.cuda.cudadrv.driver import CudaAPIError

    from nanoeuler_parts.gpu.launches import (
        at_most, cuda_kernel, gpu, Graph, inlined, launch, made_once, PATHS,
    )
    from nanoeuler_parts.gpu.numbers import ctype, exp, stored, value, vector
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

TensorCores = namedtuple("TensorCores", "matmul attention steps selftests")

@functools.cache
def tensor_cores():
    """The modules of nanoeuler_parts/tensor_cores, the fast path, or None if they are missing."""
    try:
        from nanoeuler_parts.tensor_cores import attention, matmul, selftests, steps
    except ModuleNotFoundError as e:
        if not (e.name or "").startswith("nanoeuler_parts.tensor_cores"):
            raise
        print("note: nanoeuler_parts/tensor_cores is missing, so products and attention are slower",
              file=sys.stderr)
        return None
    return TensorCores(matmul, attention, steps, selftests)

def kernel_path():
    """The highest of PATHS that this GPU has, and that may be used just now."""
    capability = cuda.get_current_device().compute_capability
    top = "portable"
    if not tensor_cores():
        return top
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
    the decoder of tensor_cores works with."""
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
             + (0 if dtype != np.uint16 or rows_refused(cfg) else
                tensor_cores().steps.rows_bytes(cfg)))]

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

SEMAPHORES = 1 << 15                         # of matmul_dw: on tensor cores, blocks take turns

def on_tensor_cores(*matrices):
    """Whether tensor cores take these matrices: bfloat16, rows that are and start at multiples of
    16 bytes."""
    def fits(x):
        whole_chunks = x.shape[1] % 8 == 0 and x.strides[1] == 2
        starts = x.strides[0], int(x.gpu_data.device_pointer)
        return x.dtype == np.uint16 and whole_chunks and all(n % 16 == 0 for n in starts)
    return kernel_path() != "portable" and all(map(fits, matrices))

def matmul(out, x, w):
    """out = x w^T     out (M, N), x (M, K), w (N, K)"""
    if on_tensor_cores(out, x, w):
        return tensor_cores().matmul.tensor_matmul(out, x, w, False, False)
    batched_matmul(out, x, transposed(w))

def matmul_dx(dx, dy, w, add=False):
    """dx = [dx +] dy w     dx (M, K), dy (M, N), w (N, K)"""
    if on_tensor_cores(dx, dy, w) and not add:     # they add to float32 only, dx is bfloat16
        return tensor_cores().matmul.tensor_matmul(dx, dy, w, False, True)
    batched_matmul(dx, dy, w, add)

def matmul_dw(dw, dy, x, semaphores):
    """dw += dy^T x     dw (N, K), dy (M, N), x (M, K)     semaphores: zeros, before and after"""
    if on_tensor_cores(dy, x) and int(dw.gpu_data.device_pointer) % 16 == 0:
        return tensor_cores().matmul.tensor_matmul(dw, dy, x, True, True, semaphores)
    batched_matmul(dw, transposed(dy), x, add=True)

# ==== 4.2 Embedding ====
@cuda_kernel
def embedding_forward_kernel(x, tokens, wte):
    """x[bt] = wte[tokens[bt]]     one block a row, threads stride the columns
    Padding, a token of -1, is read as token 0, and has no gradient."""
    bt = cuda.blockIdx.x
    token = max(tokens[bt], 0)
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
    """The kernels for head size D, and what they read: the matrices or, on Hopper, their tensor
    maps.  Tensor cores take bfloat16 without a window, and some head sizes."""
    if matrices[0].dtype == np.uint16 and not window and kernel_path() != "portable":
        if found := tensor_cores().attention.attention_of(D, matrices):
            return found
    room = min(99 << 10, cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
    return portable_attention(D, computing(matrices[0].dtype).itemsize, room, window), *matrices

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
        self.weighted_heads = set()          # heads with a nonzero weight since `update`
        self.updates = {}                    # heads with a weight -> the graph of an update

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
             f"expected 1 to {self.cfg.seq_len} tokens, got {T}")
        self.gradient_graphs = self.loss_graph = None    # first: they read what is freed now
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
        self.gradient_graphs = [Graph() for _ in range(P + 1)]       # of so many output heads
        self.loss_graph = Graph()
        self.shape = B, T

    def memory(self, B, T):
        return memory_table(self.cfg, B, T, self.dtype, self.buffer_table, self.kept)

    def fitting(self, T):
        """How many sequences fit into 90 % of the memory that is free or held by the present
        activations, with room for a sample now and then; 0 if not even one does.  A grid has at
        most 65,535 blocks along z, where attention has sequences, and along y, where portable
        products have TILE rows each."""
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
        if cfg.head_dim not in tensor_cores().attention.FAST_HEADS:
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
            launch(sum_rows_kernel, self.results[:P], a.nll[:P], grid=P, block=256)

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
            """Computes the inside of a block from y = rmsnorm(x[i]) again, unless it was kept."""
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

    def queue_gradient(self, outputs):
        """What a graph records: all launches of `gradient`, for heads 0 to outputs - 1"""
        self.forward()
        self.output_heads(outputs, training=True)
        self.backward()

    def queue_losses(self):
        self.forward()
        self.output_heads(1, training=False)

    def stage(self, tokens, targets, weight):
        """tokens (b, T), targets (P, b, T), weight (b, P) to the device, the former through pinned
        memory; the sequences from b to B have no targets."""
        (b, _), (B, T) = tokens.shape, self.shape
        V = self.cfg.vocab_size              # kernels do not check: they would access other memory
        for x in (tokens, targets):
            need(x.max() < V, f"expected token ids below {V}, got {x.max()}")
        need(tokens.min() >= 0, f"expected token ids from 0 on, got {tokens.min()}")
        gpu.stream.synchronize()             # an earlier copy may still read what is staged
        staged = self.staged.reshape(-1, B, T)           # tokens, then the targets of each head
        staged[0, :b] = tokens
        staged[0, b:] = -1                   # padding
        staged[1:, :b] = targets
        staged[1:, b:] = -1
        self.ids.copy_to_device(self.staged, stream=gpu.stream)
        self.staged_weight[:b] = weight
        self.staged_weight[b:] = 0
        self.weight.copy_to_device(self.staged_weight, stream=gpu.stream)

    def gradient(self, tokens, targets, weight):
        """Queues g += d(sum_bk weight[b, k] CE_bk)/dp of one micro-batch, and its losses.  Heads
        after the last one with a nonzero weight are not computed.

        tokens (B, T), targets (P, B, T), weight (B, P), or (P,) for every sequence"""
        outputs = self.outputs_with(weight)
        self.prepare(*tokens.shape)
        self.stage(tokens, targets, weight)
        with at_most(self.top, self.maps):
            self.gradient_graphs[outputs](functools.partial(self.queue_gradient, outputs))

    def update(self, hyper):
        """Clips, AdamW, zero gradients; hyper: nanoeuler.Hyper.  Returns (summed CE of each head
        since the last update, |g| before clipping); waits for the device.  Heads without a weight
        since the last update stay as they are."""
        need(not hyper.muon_lr, f"muon_lr is {hyper.muon_lr:g}, and the GPU has AdamW only: train "
             f"with Muon on the CPU: {ON_CPU} train")
        self.staged_hyper[:] = hyper         # it must live until the driver has read it
        self.hyper.copy_to_device(self.staged_hyper, stream=gpu.stream)
        graph = self.updates.setdefault(frozenset(self.weighted_heads), Graph())
        graph(self.queue_update)
        self.weighted_heads = set()
        results = to_host(self.results)
        self.results.copy_to_device(self.zero, stream=gpu.stream)
        return results[:-1], float(results[-1])

    def queue_update(self):
        launch(square_sums_kernel, self.partial, self.g_flat, grid=SUMS, block=256)
        for x in self.without_heads_off(slice(0, self.flat.size)):
            buffers = (view(y, x.start, (x.stop - x.start,)) for y in (
                self.flat, self.copies, self.g_flat, self.m, self.v))
            adamw_update(*buffers, self.n_decay - x.start, self.hyper, self.partial, self.results)

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
    outputs_with, without_heads_off = ne.Model.outputs_with, ne.Model.without_heads_off

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
    adamw_update(p, w, g, m, v, n_decay, hyper, partial, results)

def adamw_update(p, w, g, m, v, n_decay, hyper, partial, results):
    """The same of a part of the parameters; partial: the sums of squares of all gradients.
    n_decay: how many of the first entries decay; may be negative"""
    address, n_decay = int(p.gpu_data.device_pointer), min(max(0, n_decay), p.size)
    kernel = adamw_kernel(4 if p.size % 4 == address % 16 == 0 else 1)
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
    """nanoeuler.Decoder with its cache on the device.  A token is one graph, and a step is computed
    row by row.

    If the matrices are to be bfloat16, and the tensor cores take a model of this shape, `Decoder`
    makes a decoder of tensor_cores/steps.py instead, whose steps are faster."""
    wide = draws = False
    formats, fastest = ("f32", "bf16"), "f32"

    @staticmethod
    def ready():
        """A kernel is compiled when it is first launched."""

    def __new__(cls, cfg, flat=None, weights="f32", slots=1, length=0):
        open_device()
        if weights in ("", "bf16") and not rows_refused(cfg):
            cls = tensor_cores().steps.RowsDecoder
        return object.__new__(cls)

    def __init__(self, cfg, flat, weights="f32", slots=1, length=0):
        """flat: the parameters, on the host, or, if they stay f32, on the device; or the Params of
        an open checkpoint     weights: f32, bf16, or "" for the faster of them"""
        flat = ne.flat_of(cfg, flat)
        need(weights in ("", "f32", "bf16"),
             f"--weights is {weights}, expected f32 or bf16 on the GPU")
        self.begin(cfg, slots, length)
        self.kept_as = weights or self.fastest
        shapes = [shape for _, shape, *_ in ne.param_table(cfg)]
        n = sum(map(math.prod, shapes[ne.MATRICES]))     # they come first
        matrices, gains = flat[:n], flat[n:]
        if self.kept_as == "bf16":
            matrices = to_bf16(matrices)
        if isinstance(flat, np.ndarray):
            matrices, gains = to_device(matrices), to_device(gains)
        self.take(matrices, gains)

    @classmethod
    def of(cls, cfg, matrices, gains):
        """Of parameters that are on the device, in two parts"""
        kept_as = "bf16" if matrices.dtype == np.uint16 else "f32"
        decoder = cls.__new__(cls, cfg, weights=kept_as)
        decoder.begin(cfg, 1, 0)
        decoder.kept_as = kept_as
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

    def allocate(self):
        """The caches, and the activations of one token"""
        if self.weights.wte.dtype == np.uint16:
            print(f"note: generation row by row, which is slower: {rows_refused(self.cfg)}",
                  file=sys.stderr)
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
        for to, of in zip(self.slots[slot][:2], self.slots[source][:2]):
            to.copy_to_device(of, stream=gpu.stream)     # whole: that takes no longer
        self.texts[slot] = self.texts[source][:n]
        return n

    def compute(self, rows):
        """nanoeuler.Decoder's, row by row"""
        wanted, found = {*rows.wanted.tolist()}, []
        for r, (token, slot, position) in enumerate(zip(*map(np.ndarray.tolist, rows[:3]))):
            self.use(slot)
            logits = self.decode(token, position)
            if r in wanted:
                found.append(logits)
        return np.array(found) if found else np.zeros((0, self.cfg.vocab_size), np.float32)

    def guesses(self, row):
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
        at = np.array([token, position], np.int32)
        self.at.copy_to_device(at, stream=gpu.stream)
        self.graph(self.queue)
        return to_host(self.device_logits)

def rows_refused(cfg):
    """Why the tensor cores cannot decode a model of this shape in bfloat16, or "" """
    if kernel_path() == "portable":
        return "the kernel path is portable, or the GPU older than capability 8.0"
    return tensor_cores().steps.refused(cfg)

# ==== 10 Self-tests ====
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
    """The largest allowed errors() of an output of kernel `name` that is stored as `kind`"""
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
    add_rank_tests(ops)
    if kernel_path() != "portable":
        tensor_cores().selftests.add_tests(ops)
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
    windows = itertools.cycle([1, 9, 64, 150])           # one a shape: each compiles its kernels
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
        if (window := next(windows)) < T:
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

def add_rank_tests(ops):
    """The kernel that adds the gradients of several GPUs"""
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

# Both errors() of a tensor's gradient must stay below these bounds.  Measured with the base preset:
# 4.6, 69 and 71 roundoffs of the type.
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
# tools/on_gpu.py declares the verbs and their flags.
def main(argv=None):
    from nanoeuler_parts.tools.on_gpu import LONG, TITLE, VERBS
    take_own_gpu()
    verb, *others = (sys.argv[1:] if argv is None else argv) or ["test"]
    try:
        return ne.run_verb(VERBS, TITLE, [LONG.get(verb, verb), *others])
    except CudaAPIError as e:
        said = " ".join(str(e).split())
        print(f"nanoeuler: the GPU says: {said}; see: {HERE} doctor",
              file=sys.stderr)
        return 2
