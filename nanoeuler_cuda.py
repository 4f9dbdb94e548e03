"""NanoEuler on the GPU: the model of nanoeuler.py again, in CUDA kernels written in Numba.

Part I of nanoeuler.py is the specification.  Sections 4.1 to 7 have the same numbers here, and
every op has the same name.  The self-tests, in nanoeuler_parts/selftests/, compare the kernels of
each op with the function of that name, and matrix products with NumPy's.  Data, training loops,
chat and files come from nanoeuler.py.

    python nanoeuler_cuda.py                  self-tests: compare every kernel with the CPU
    python nanoeuler_cuda.py g                compare the gradient of a whole model with the CPU's
    python nanoeuler_cuda.py ladder           compare matrix products, naive to fast
    python nanoeuler_cuda.py t                train on a text, write nanoeuler.bin; tr continues
    python nanoeuler_cuda.py i "It was"       continue a text
    python nanoeuler_cuda.py s                fine-tune it to answer, write nanoeuler_chat.bin
    python nanoeuler_cuda.py d                train it on preferences, write nanoeuler_dpo.bin
    python nanoeuler_cuda.py r                train it on rewards of its own answers
    python nanoeuler_cuda.py c                chat with nanoeuler_chat.bin
    python nanoeuler_cuda.py eval --data A    measure perplexity; --questions: accuracy
    python nanoeuler_cuda.py serve            serve web pages and an OpenAI-compatible API
    python nanoeuler_cuda.py doctor           check this machine: GPU, driver, packages

The verbs g, t, tr, i, s, d, r and c also have long names: check, train, resume, generate, sft, dpo,
rl and chat.

A residual block is an Euler step, x[i + 1] = x[i] + f(x[i]).  `residual_rmsnorm_forward` in 4.3
computes one.  In 5, `run_layers` takes two Euler steps per layer, and `backward` walks back along
them.

This file is a complete engine in plain Numba, in float32, in float64, and in bfloat16 on GPUs that
support it (Ampere and newer).  To read it, you need to know CUDA's threads and blocks; section 3
explains how the 32 threads of a warp exchange numbers.  Four folders of nanoeuler_parts belong to
it.  Read them in this order:

    gpu/           launches, graphs and number types; this file uses them from section 1 on
    tensor_cores/  the same matrix products and the same attention, in bfloat16 on tensor cores.
                   `make_ops` in 5 chooses them if the GPU has tensor cores.  Without this folder,
                   this file is slower and computes the same up to rounding.
    decode/        a faster decoder on tensor cores, which `make_decoder` in 6 chooses.  Without
                   this folder, generation is slower.
    ranks/         data-parallel training on several GPUs

Contents
    1    Device: kernels and launches         4.7  Cross-entropy
    2    Memory: buffers of a training step   4.8  Biases and norms of q and k
    3    Building blocks: numbers, sums       5    Model: forward, heads, backward
    4.1  Matmul                               6    Generation: a decoder, row by row
    4.2  Embedding                            7    Optimizer: AdamW, Muon
    4.3  RMSNorm, and the Euler step          11   Command line
    4.4  RoPE
    4.5  Attention
    4.6  SwiGLU

Shapes  As in nanoeuler.py: B batch, T time, C n_embd, H n_head, G n_kv_head, D head_dim,
        F n_hidden, V vocab_size, L n_layer, P n_mtp.  Here the batch is flat: BT = B * T rows,
        row b * T + t.  HD = H D and QKV = (H + 2 G) D are the columns of all heads.  R rows of
        logits are in memory at a time.  W is the number of neighbours that a thread loads at once.
Types   A kernel takes its type from its arguments: bfloat16, float32 or float64.  All three can
        train a model; float64 is for proofs.  bfloat16 is stored as uint16, and kernels compute
        with it in float32.  Master weights, optimizer moments, gradients of weights and RMSNorm's
        factors are float32 then.  Section 3 has the functions for this: ctype, value, stored,
        vector.  A literal is written ctype(x).type(0): a bare 0.0 is a float64, and the kernel
        would compute in float64 from there on.
Names   acc    sums in registers              lane   0 to 31, the thread's place in its warp
        vec    W neighbours in registers      warp   the warp's place in its block
        _smem  an array in shared memory      p      parameters; in 4.5, an entry of the matrix P
        The host function that launches an op's kernels has the name of the op in nanoeuler.py.
Order   Each sum is accumulated in a fixed order, by one thread or by blocks in a fixed sequence.
        Two runs on GPUs of the same type, with the same size of micro-batches, give the same bits.
"""
import functools
import gc
import importlib.metadata
import importlib.util
import math
import operator
import os
import sys
from collections import namedtuple
from typing import NamedTuple

from nanoeuler_parts.gpu.doctor import HERE, is_ours, NEEDS_GPU, PIP, report, with_remedy
from nanoeuler_parts.gpu.place import take_own_gpu

# Run as a program, this file imports itself as the module nanoeuler_cuda and calls its `main`.
# Otherwise it would be loaded twice, as __main__ and by tensor_cores as nanoeuler_cuda, each time
# with kernels of its own.
if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))   # first, even under python -P
    try:
        import nanoeuler_cuda
    except ImportError as e:                 # a package that is imported below is missing
        if is_ours(e):
            raise
        try:
            from nanoeuler_parts.tools.on_gpu import show_help
        except ImportError:                  # not even the CPU program's packages are installed
            sys.exit(report(e))
        asks = {"-h", "--help"} & {*sys.argv[1:]}
        sys.exit(show_help(sys.argv[1:], e) if asks else report(e))
    sys.exit(nanoeuler_cuda.main())

# Without numba-cuda, the rest of this file cannot be defined: report it in one line, no traceback.
try:
    import numpy as np

    import nanoeuler as ne
    from nanoeuler import UserError, need
    from nanoeuler_parts.machine.numbers import from_bf16, to_bf16

    need(importlib.util.find_spec("numba_cuda"), "numba-cuda is not installed")
    need(importlib.metadata.version("numba-cuda").startswith("0.30."),
         "this program knows numba-cuda 0.30, whose private parts nanoeuler_parts/gpu uses")
    from numba import cuda, types
    from numba.cuda.np import arrayobj       # the first import that fails if NumPy is too new
    from numba.cuda.cudadrv.devicearray import DeviceNDArray
    from numba.cuda.cudadrv.driver import CudaAPIError

    from nanoeuler_parts.gpu.launches import (
        cuda_kernel, gpu, Graph, HOPPER_TILE, inlined, launch, made_once, PATHS,
    )
    from nanoeuler_parts.gpu.mma import column_of, first_column, first_row, mma, which_row
    from nanoeuler_parts.gpu.numbers import ctype, exp, stored, value, vector
except Exception as e:                       # NumPy 2.5 with numba-cuda 0.30: an AttributeError
    if is_ours(e):                           # a fault in these files, not in the installation
        raise
    kind = "" if type(e).__name__ in ("UserError", "ModuleNotFoundError") else (
        f"{type(e).__name__}: ")
    raise ImportError(with_remedy(f"{kind}{e}")) from e

# ==== 1 Device ====
# A kernel is a function that every thread of a grid of blocks runs.  The launch
#
#     launch(sum_rows_kernel, out, x, grid=C, block=256)
#
# is CUDA's sum_rows_kernel<<<C, 256, 0, stream>>>(out, x): C blocks of 256 threads each.  Numba
# compiles the kernel at the first launch, for the types of these arguments.  Inside a kernel:
#
#     cuda.blockIdx.x, cuda.threadIdx.x     the number of this block, and of this thread in it
#     lane, warp                            threadIdx.x % 32 and // 32; a warp's lanes run in step
#     cuda.local.array(n, dtype)            numbers of this thread.  They are in registers if the
#                                           compiler knows all indices, as in `for i in range(8)`
#     cuda.shared.array(n, dtype)           numbers that the block shares.  If n is 0, the launch
#                                           says how many bytes, by `smem`
#     cuda.syncthreads()                    waits until all threads of the block have arrived
#
# Three decorators of nanoeuler_parts/gpu/launches.py mark what runs on the GPU:
#
#     @cuda_kernel    a kernel; it is compiled once, and kept on disk
#     @inlined        a device function, which is compiled into the kernels that call it
#     @made_once      a function that makes kernels, as a template does in C++.  Its arguments, and
#                     everything else that a kernel finds outside of itself, are compile-time
#                     constants in the kernel.  Equal arguments return the same kernels
def gpu_problem():
    """Returns why kernels cannot run on this machine, and a remedy, or "" if they can."""
    cuda.config.CUDA_LOW_OCCUPANCY_WARNINGS = 0          # small tests launch small grids
    remedy = NEEDS_GPU
    try:
        cuda.current_context()
        remedy = f"There is a GPU, but compiling a kernel for it fails; reinstall with: {PIP}"
        total, numbers = (cuda.to_device(np.zeros(1)) for _ in range(2))
        square_sums_kernel[1, 256](total, numbers)       # `launch` needs the stream of open_device
        total.copy_to_host()                 # waits for the kernel, and raises its error
        return ""
    except Exception as e:                   # a missing driver raises errors of many types
        if "OUT_OF_MEMORY" in str(e):
            remedy = "Another program uses the GPU's memory; nvidia-smi shows which one."
        lines = [line.strip() for line in str(e).splitlines() if line.strip()] or [repr(e)]
        return f"{' '.join(lines[:2])} {remedy}"

def open_device():
    """Creates the stream of all launches and copies.  Raises UserError without a usable GPU."""
    if gpu.stream is None:
        if problem := gpu_problem():
            raise UserError(problem)
        gpu.stream = cuda.stream()

def cdiv(n, size):
    """n / size, rounded up: the number of blocks of this size that cover n"""
    return -(-n // size)

@functools.cache
def note_once(text):
    """Prints a note to stderr, unless this process has printed it before."""
    print(f"note: {text}", file=sys.stderr)

@functools.cache
def tensor_cores():
    """Returns the module nanoeuler_parts/tensor_cores/ops.py, or None if the folder is missing."""
    try:
        from nanoeuler_parts.tensor_cores import ops
    except ModuleNotFoundError as e:
        if not (e.name or "").startswith("nanoeuler_parts.tensor_cores"):
            raise
        note_once("nanoeuler_parts/tensor_cores is missing, so products and attention are slower")
        return None
    return ops

def kernel_path(top=PATHS[-1]):
    """Returns the fastest of PATHS (portable, mma, wgmma) that this GPU supports, up to `top`."""
    capability = cuda.get_current_device().compute_capability
    found = "portable"
    if not tensor_cores():
        return found
    if capability >= (8, 0):
        found = "mma"
    if capability == (9, 0):                 # Hopper only: newer GPUs have other instructions
        found = "wgmma"
    return min(found, top, key=PATHS.index)

def has(dtype):
    """Whether the GPU supports this type: bfloat16 needs compute capability 8.0."""
    return dtype != "bf16" or cuda.get_current_device().compute_capability >= (8, 0)

# ==== 2 Memory ====
# How much of it a model needs, and which micro-batches fit, is in nanoeuler_parts/gpu_memory.py.
def load_gpu_memory():
    """Returns this module.  It imports this file, so this file cannot import it at the top."""
    from nanoeuler_parts import gpu_memory
    return gpu_memory

DTYPES = {"bf16": np.dtype(np.uint16), "f32": np.dtype(np.float32), "f64": np.dtype(np.float64)}
NAMES = {DTYPES["bf16"]: "bfloat16", DTYPES["f32"]: "float32", DTYPES["f64"]: "float64"}

def computing(dtype):
    """The type of sums, norms and master weights: float32 for bfloat16."""
    return np.dtype(np.float32) if dtype == np.uint16 else dtype

def rows_per_chunk(cfg, BT, itemsize):
    """R: the number of rows whose logits are in memory at the same time.

    It is chosen so that the logits of all heads take about 384 MB at most.  The gradient of the
    heads' input, (R, C), is then computed in tiles; on an H100, they have the size HOPPER_TILE.  A
    wave is one tile per multiprocessor.  A large R is rounded down to whole waves, so that no
    multiprocessor idles."""
    rows = (384 << 20) // (cfg.n_mtp * cfg.vocab_size * itemsize)
    tile_rows, tile_columns = HOPPER_TILE
    across = cdiv(cfg.n_embd, tile_columns)  # tiles side by side
    rows_per_wave = tile_rows * max(1, cuda.get_current_device().MULTIPROCESSOR_COUNT // across)
    if rows > rows_per_wave:
        rows -= rows % rows_per_wave
    return min(BT, max(128, rows))

def buffer_table(cfg, B, T, dtype, kept=None):
    """(group, name, shape, dtype) of every buffer that a training step of B x T tokens needs.

    Group a: activations that the backward pass reads.  x is the trajectory
    x[i + 1] = x[i] + f_i(x[i]).  `state` holds its newest point in the type of sums, because in
    bfloat16, rounding would lose the small steps.
    Group d: gradients of activations, for one layer.  `backward` adds the weight gradients of a
    layer to g before the layer below overwrites these buffers.  Unlike `state`, x is rounded after
    each step: bench/adjoint.py measures how much error that adds.
    kept: number of layers whose activations are kept; all by default.  With 1, the backward pass
    computes them again (--recompute)."""
    C, F, V, L, P = cfg.n_embd, cfg.n_hidden, cfg.vocab_size, cfg.n_layer, cfg.n_mtp
    H, D, BT = cfg.n_head, cfg.head_dim, B * T
    HD, QKV, R = H * D, (H + 2 * cfg.n_kv_head) * D, rows_per_chunk(cfg, BT, dtype.itemsize)
    kept, qk_heads = kept or L, cfg.n_head + cfg.n_kv_head
    a = [("x", (2 * L + 1, BT, C)),          # the trajectory, rounded, for the backward pass
         ("qkv", (kept, BT, QKV)),           # after RoPE
         ("att", (kept, BT, HD)),            # the heads' outputs
         ("gate_up", (kept, BT, 2 * F)),     # the backward pass overwrites it with its gradient
         ("swiglu", (kept, BT, F)),
         ("y", (BT, C)),                     # a block's normalized input, then its output f
         ("logits", (R, P * V))]             # overwritten with their gradient
    d = [("x", (BT, C)),                     # gradient of x[i], as i goes from 2 L to 0
         ("y", (BT, C)),                     # gradient of y = rmsnorm(x), then y itself again,
                                             # which the gradient of the weights needs
         ("qkv", (BT, QKV)),
         ("att", (BT, HD)),
         ("swiglu", (BT, F))]
    # buffers in the type of sums
    a_sums = [("attn_rstd", (L, BT)), ("mlp_rstd", (L, BT)), ("final_rstd", (BT,)),   # of RMSNorm
              ("state", (BT, C)),            # the trajectory's newest point, not rounded
              ("nll", (P, BT)),              # losses: negative log-likelihoods
              ("lse", (kept, H, BT))]        # attention: log of the sum of exponentials of a row
    d_sums = [("partial", (GAIN_PARTS, C)),  # partial sums of the gradient of RMSNorm's gain
              ("delta", (H, BT))]            # attention: <dO, O>
    if cfg.qk_norm:                          # 4.8
        a += [("qk", (kept, BT, qk_heads * D))]          # q and k before their norms
        a_sums += [("qk_rstd", (kept, BT, qk_heads))]
        d_sums += [("qk_partial", (GAIN_PARTS, 2 * D))]
    if cfg.qkv_bias:
        d_sums += [("bias_partial", (GAIN_PARTS, QKV))]
    sums = computing(dtype)
    groups = (("a", a, dtype), ("a", a_sums, sums), ("d", d, dtype), ("d", d_sums, sums))
    return [(group, name, shape, kind) for group, table, kind in groups for name, shape in table]

# ---- arrays on the device
def new(shape, dtype):
    """An array on the device; its contents are undefined."""
    return cuda.device_array(shape, dtype, stream=gpu.stream)

def free_bytes():
    """Bytes of the device's memory that the driver can still allocate"""
    free, _ = cuda.current_context().get_memory_info()
    return free

def release_garbage():
    """Returns the memory of arrays without references to the driver."""
    gc.collect()
    cuda.current_context().deallocations.clear()

def to_device(x, dtype=None):
    """A copy of x on the device, in this type or that of x"""
    x = np.ascontiguousarray(x, dtype)
    out = cuda.to_device(x, stream=gpu.stream)
    gpu.stream.synchronize()                 # until then, the driver may still read x
    return out

def to_host(x):
    """A copy of x on the host.  Waits for all work that was queued before."""
    out = x.copy_to_host(stream=gpu.stream)
    gpu.stream.synchronize()
    return out

def view(x, start, shape, strides=None):
    """The elements of device array x from `start`, as an array of this shape.  No copy.  Strides
    count elements; the default is row-major order."""
    size = x.dtype.itemsize
    strides = strides or [math.prod(shape[i + 1:]) for i in range(len(shape))]
    return DeviceNDArray(shape, [s * size for s in strides], x.dtype, gpu.stream,
                         x.gpu_data.view(start * size))

def number(x, v):
    """v as a scalar argument of a kernel on x, in the type in which that kernel computes"""
    return np.float64(v) if x.dtype == np.float64 else np.float32(v)

def transposed(x):
    """(..., M, N) as (..., N, M).  No copy."""
    *others, rows, columns = x.shape
    *other_strides, row_stride, column_stride = (s // x.dtype.itemsize for s in x.strides)
    return view(x, 0, (*others, columns, rows), (*other_strides, column_stride, row_stride))

# ==== 3 Building blocks ====
# Kernels read and write arrays of all three types with these functions of
# nanoeuler_parts/gpu/numbers.py:
#
#     ctype(x)                   the type to compute in; ctype(x).type(0) is its zero
#     value(x[i])                the element as a number: bfloat16 becomes float32
#     stored(x, v)               v rounded to the type of array x
#     load, store = vector(W)    load(x, i) returns x[i], .., x[i + W - 1] of flat memory as a local
#                                array, in as few accesses as possible; store(x, i, v) writes them
#     exp(v), exp2(v)            e^v, and 2^v, which is a hardware instruction
WARP, ALL = 32, 0xFFFFFFFF                   # the lanes of a warp, and the mask of all of them

def width(*sizes):
    """W, the number of elements to load at once: 8 if it divides all these row lengths, else 1"""
    return 8 if all(n % 8 == 0 for n in sizes) else 1

def butterfly(combine, log2_lanes):
    """Makes the device function that combines x over 2^log2_lanes neighbouring lanes of a warp.

    In each round, a lane reads the x of the lane whose number differs in one bit (a shuffle).  All
    lanes combine in the same order, so all of them get the same bits."""
    @inlined
    def over(x):
        for i in range(log2_lanes):
            x = combine(x, cuda.shfl_xor_sync(ALL, x, 1 << (log2_lanes - 1 - i)))
        return x
    return over

quad_sum, quad_max = butterfly(operator.add, 2), butterfly(max, 2)   # for tensor_cores
half_warp_sum, half_warp_max = butterfly(operator.add, 4), butterfly(max, 4)
warp_sum, warp_max = butterfly(operator.add, 5), butterfly(max, 5)

def over_block(combine, over_warp):
    """Makes the same for a block of 256 threads: first within each warp, then over the 8 warps.
    All threads of the block must call it, since it waits for them."""
    @inlined
    def over(x):
        x, warps_smem = over_warp(x), cuda.shared.array(8, ctype(x))     # a result per warp
        cuda.syncthreads()                   # all have read the result of an earlier call
        if cuda.threadIdx.x % 32 == 0:
            warps_smem[cuda.threadIdx.x // 32] = x
        cuda.syncthreads()
        return combine(
            combine(combine(warps_smem[0], warps_smem[1]), combine(warps_smem[2], warps_smem[3])),
            combine(combine(warps_smem[4], warps_smem[5]), combine(warps_smem[6], warps_smem[7])))
    return over

block_sum, block_max = over_block(operator.add, warp_sum), over_block(max, warp_max)

@inlined
def filled(n, v):
    """A local array of n elements, each of them v: registers"""
    out = cuda.local.array(n, ctype(v))
    for i in range(n):
        out[i] = v
    return out

# ==== 4.1 Matmul ====
# Products of matrices take most of the time of training.  This section climbs a ladder of three
# kernels for the same product.  The speeds are those of an H200, for 4096 x 4096 in bfloat16:
#
#     naive_matmul          0.5 TFLOP/s    one thread per number of the output, which reads all of
#                                          its operands itself
#     matmul               14.5 TFLOP/s    a block shares tiles of both operands, and its threads
#                                          keep the sums in registers
#     tensor_core_matmul   48.0 TFLOP/s    tensor cores multiply the tiles; bfloat16 only
#
# nanoeuler_parts/tensor_cores/ climbs on, to 778 TFLOP/s.  This command runs every rung on this
# machine, compares its result with the CPU's, and prints how fast it is:
#
#     python nanoeuler_cuda.py ladder
#
# docs/tour/14_gpu.md explains why each rung is faster than the one before.  A Model uses `matmul`,
# which takes any type and layout, or the kernels of tensor_cores/.
@cuda_kernel
def naive_matmul_kernel(out, x, w):
    """out[m, n] = sum_k x[m, k] w[n, k]     one thread per number of out
    grid (M / 8, N / 32), block (32, 8)     out (M, N), x (M, K), w (N, K)

    For each product, a thread reads two numbers, and waits for both.  The 32 threads of a warp read
    the same x[m, k], and 32 numbers of w that are a row apart."""
    (M, N), K = out.shape, x.shape[1]
    m, n = 8 * cuda.blockIdx.x + cuda.threadIdx.y, 32 * cuda.blockIdx.y + cuda.threadIdx.x
    if m < M and n < N:
        s = ctype(x).type(0)
        for k in range(K):
            s += value(x[m, k]) * value(w[n, k])
        out[m, n] = stored(out, s)

def naive_matmul(out, x, w):
    """out = x w^T     out (M, N), x (M, K), w (N, K)"""
    M, N = out.shape
    launch(naive_matmul_kernel, out, x, w, grid=(cdiv(M, 8), cdiv(N, 32)), block=(32, 8))

# ---- tiles
@functools.cache
def register_tile(ROWS, COLS):
    """Makes the device function acc += A B for the ROWS x COLS sums that a thread has in registers.
    The thread's rows are neighbours, and its columns are 16 apart.

    A and B are in shared memory.  Each place has the index of the thread's first element, and two
    strides: from a row or column of the product to the next one, and from k to k + 1.

        a_place = (a0, a_m, a_k)    the thread's A[i, k] is at a0 + i * a_m + k * a_k
        b_place = (b0, b_n, b_k)    the thread's B[k, j] is at b0 + 16 * j * b_n + k * b_k

    Sixteen neighbouring threads read the same element of A, which is a broadcast, and neighbouring
    elements of B, so no two lanes read from the same bank.  All portable matrix products use this
    function, and so does attention in 4.5."""
    @inlined
    def tile(acc, A, a_place, B, b_place, K):
        (a0, a_m, a_k), (b0, b_n, b_k) = a_place, b_place
        b = cuda.local.array(COLS, acc.dtype)
        for k in range(K):
            for j in range(COLS):
                b[j] = B[b0 + k * b_k + 16 * j * b_n]
            for i in range(ROWS):
                a = A[a0 + i * a_m + k * a_k]
                for j in range(COLS):
                    acc[i * COLS + j] += a * b[j]
    return tile

TILE, DEPTH = 128, 16                        # rows and columns of a tile of out; k per round
STRIDE = TILE + 4                            # distance from k to k + 1 in shared memory.  The 4 are
                                             # padding: 16 threads that store the 16 k of one row
                                             # write to 8 banks, and not all to the same one
SMEM = DEPTH * STRIDE
tile8x8 = register_tile(8, 8)

@cuda_kernel
def matmul_kernel(out, a, b, add):
    """out[z] = add * out[z] + a[z] b[z]
    One block of (16, 16) threads per 128 x 128 tile of out[z], row by row.
    grid ((M / 128) (N / 128), 1, n)
    out (n, M, N), a (n, M, K), b (n, K, N), all with any strides

    Each round copies 16 k of 128 rows of A and of 128 columns of B to shared memory.  So a block
    reads each number from device memory once, and not once per row or column of out.  A thread has
    8 x 8 sums in registers: rows 8 y to 8 y + 7 and columns x, x + 16, ..  While it multiplies, the
    next 16 k are being loaded into registers."""
    a_smem, b_smem = cuda.shared.array(SMEM, ctype(a)), cuda.shared.array(SMEM, ctype(a))
    zero, z = ctype(a).type(0), cuda.blockIdx.z
    A, B, C = a[z], b[z], out[z]
    (M, N), K = C.shape, A.shape[1]
    tiles_across = (N + TILE - 1) // TILE
    m0 = cuda.blockIdx.x // tiles_across * TILE
    n0 = cuda.blockIdx.x % tiles_across * TILE
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    t = 16 * y + x
    # A tile of A has 128 rows m and 16 k, a tile of B has 16 k and 128 columns n.  A thread fetches
    # eight numbers of each.  Neighbouring threads should read neighbours in memory, which are along
    # k in some layouts, and along m or n in others.  A tuple (m or n, k, step of m or n, step of k)
    # has the place of the thread's first number, and the steps from one number to the next.
    along_mn, along_k = (t % 128, t // 128, 0, 2), (t // 16, t % 16, 16, 0)
    am, ak, am_step, ak_step = along_k if A.strides[1] == A.itemsize else along_mn
    bn, bk, bn_step, bk_step = along_k if B.strides[0] == B.itemsize else along_mn
    a_next, b_next = cuda.local.array(8, ctype(a)), cuda.local.array(8, ctype(a))
    acc = filled(64, zero)
    for k0 in range(-DEPTH, K, DEPTH):       # the first round, k0 < 0, only fetches
        if k0 >= 0:
            for i in range(8):
                a_smem[(ak + i * ak_step) * STRIDE + am + i * am_step] = a_next[i]
                b_smem[(bk + i * bk_step) * STRIDE + bn + i * bn_step] = b_next[i]
            cuda.syncthreads()               # the tiles are complete
        # Fetch the next tiles, which arrive during the product.  Beyond the edge of a matrix, a
        # thread reads its last row or column, since a clamped index needs no branch
        for i in range(8):
            k = k0 + DEPTH + ak + i * ak_step
            v = value(A[min(m0 + am + i * am_step, M - 1), min(k, K - 1)])
            a_next[i] = v if k < K else zero
            k = k0 + DEPTH + bk + i * bk_step
            v = value(B[min(k, K - 1), min(n0 + bn + i * bn_step, N - 1)])
            b_next[i] = v if k < K else zero
        if k0 >= 0:
            tile8x8(acc, a_smem, (8 * y, 1, STRIDE), b_smem, (x, 1, STRIDE), DEPTH)
            cuda.syncthreads()               # all threads have read the tiles
    for i in range(8):
        for j in range(8):
            m, n = m0 + 8 * y + i, n0 + x + 16 * j
            if m < M and n < N:
                v = acc[8 * i + j]
                if add:
                    v += value(C[m, n])
                C[m, n] = stored(C, v)

def batched_matmul(out, a, b, add=False):
    """out[z] = [out[z] +] a[z] b[z] for arrays (n, M, N), (n, M, K), (n, K, N), or one product of
    matrices"""
    out, a, b = map(as_batch, (out, a, b))
    n, M, N = out.shape
    # All tiles along x, where a grid may have two billion blocks: along y, 65,535 are the limit
    launch(matmul_kernel, out, a, b, add, grid=(cdiv(M, TILE) * cdiv(N, TILE), 1, n),
           block=(16, 16))

def as_batch(x):
    """A matrix as an array of one matrix, (1, M, N).  No copy."""
    if x.ndim == 3:
        return x
    (M, N), (row, column) = x.shape, (s // x.dtype.itemsize for s in x.strides)
    # The stride from one matrix to the next, which no kernel uses here.  Numba has separate types
    # for contiguous arrays.  With M * row or 0, it would compile a second kernel for some shapes
    unused = 1 << 20
    return view(x, 0, (1, M, N), (unused, row, column))

def matmul(out, x, w):
    """out = x w^T     out (M, N), x (M, K), w (N, K)"""
    batched_matmul(out, x, transposed(w))

def matmul_dx(dx, dy, w, add=False):
    """dx = [dx +] dy w     dx (M, K), dy (M, N), w (N, K)"""
    batched_matmul(dx, dy, w, add)

def matmul_dw(dw, dy, x, add=True):
    """dw = [dw +] dy^T x     dw (N, K), dy (M, N), x (M, K)"""
    batched_matmul(dw, transposed(dy), x, add)

# ---- tensor cores
# A tensor core multiplies two small matrices of bfloat16 by one instruction, `mma`, which a warp
# calls together: (16, 16) by (16, 8), 2,048 products.  Its docstring in nanoeuler_parts/gpu/mma.py
# shows which numbers each lane holds.
PAIRS = 32                                   # in a row of a tile: 64 numbers of k
PAIRS_STRIDE = PAIRS + 4                     # with the 4, the eight rows and four columns that the
                                             # lanes of a warp read at once are in 32 banks

@cuda_kernel
def tensor_core_kernel(out, x, w):
    """out = x w^T     one block of four warps per 64 x 64 tile of out
    grid (M / 64, N / 64), 128 threads
    out (M, N) bfloat16; x (M, K / 2), w (N, K / 2) uint32: pairs of bfloat16, the first in the low
    half

    Each round copies 64 k of 64 rows of x and of w to shared memory.  A warp multiplies its 16 rows
    of x by all 64 rows of w, 16 k at a time.  Copies and products take turns here.
    tensor_cores/matmul_mma.py overlaps them."""
    x_smem = cuda.shared.array((64, PAIRS_STRIDE), types.uint32)
    w_smem = cuda.shared.array((64, PAIRS_STRIDE), types.uint32)
    m0, n0 = 64 * cuda.blockIdx.x, 64 * cuda.blockIdx.y
    lane, warp = cuda.threadIdx.x % WARP, cuda.threadIdx.x // WARP
    acc = filled(32, types.float32(0))
    a, b = cuda.local.array(4, types.uint32), cuda.local.array(2, types.uint32)
    # the lane's row and pair of a fragment: the c of `mma`, which counts numbers, is twice this one
    r, c, zero = lane // 4, lane % 4, types.uint32(0)
    for k0 in range(0, x.shape[1], PAIRS):   # k counts pairs
        own = k0 + lane                      # the pair of a row that this lane copies
        for i in range(warp, 64, 4):         # a warp copies a row: 128 bytes that are neighbours
            m, n = m0 + i, n0 + i
            x_smem[i, lane] = x[m, own] if m < x.shape[0] and own < x.shape[1] else zero
            w_smem[i, lane] = w[n, own] if n < w.shape[0] and own < w.shape[1] else zero
        cuda.syncthreads()                   # the tiles are complete
        for pair in range(c, PAIRS, 8):      # the next 16 k: the lane needs `pair` and `pair` + 4
            for i in range(2):
                a[i] = x_smem[16 * warp + r + 8 * i, pair]
                a[i + 2] = x_smem[16 * warp + r + 8 * i, pair + 4]
            for j in range(8):
                b[0], b[1] = w_smem[8 * j + r, pair], w_smem[8 * j + r, pair + 4]
                mma(acc, 4 * j, a, 0, b, 0)
        cuda.syncthreads()                   # all warps have read the tiles
    for i in range(32):
        m, n = m0 + first_row() + 8 * which_row(i), n0 + first_column() + column_of(i)
        if m < out.shape[0] and n < out.shape[1]:
            out[m, n] = stored(out, acc[i])

def tensor_core_matmul(out, x, w):
    """out = x w^T in bfloat16     out (M, N), x (M, K), w (N, K), K even
    Needs compute capability 8.0."""
    (M, N), K = out.shape, x.shape[1]
    need(K % 2 == 0, f"expected an even K, got {K}: tensor cores read pairs of numbers")
    launch(tensor_core_kernel, out, pairs_of(x), pairs_of(w), grid=(cdiv(M, 64), cdiv(N, 64)),
           block=128)

def pairs_of(x):
    """x (M, K) in bfloat16 as (M, K / 2) uint32: two neighbours of a row in one number.  No copy.
    The numbers of a row must follow each other in memory, and rows begin at multiples of 4 bytes.
    """
    (M, K), (row_bytes, _) = x.shape, x.strides
    return DeviceNDArray((M, K // 2), (row_bytes, 4), np.uint32, gpu.stream, x.gpu_data)

# ==== 4.2 Embedding ====
@cuda_kernel
def embedding_forward_kernel(x, tokens, wte):
    """x[bt] = wte[tokens[bt]]     one block per row, whose threads stride over the columns
    Padding is a token of -1.  It is read as token 0, and contributes nothing to the gradient."""
    bt = cuda.blockIdx.x
    token = max(tokens[bt], 0)
    for c in range(cuda.threadIdx.x, x.shape[1], cuda.blockDim.x):
        x[bt, c] = stored(x, value(wte[token, c]))

def embedding_forward(x, tokens, wte):
    launch(embedding_forward_kernel, x, tokens, wte, grid=len(x), block=128)

# Runs of equal tokens in a sorted batch.  order: the indices of the batch's tokens, sorted by token
# and then ascending.  The i-th distinct token is tokens[i], at order[starts[i]:starts[i + 1]]
Runs = namedtuple("Runs", "order starts tokens")

def runs_of(tokens, V):
    """Returns the Runs of token ids below V, (BT,), as arrays int32 on the host."""
    small = tokens.astype(np.uint16) if V <= 1 << 16 else tokens     # NumPy sorts 16 bits faster
    order = np.argsort(small, kind="stable")
    tokens = tokens[order]
    is_first = np.append(True, tokens[1:] != tokens[:-1])
    starts = np.append(np.flatnonzero(is_first), tokens.size)
    return Runs(*(x.astype(np.int32) for x in (order, starts, tokens[is_first])))

@made_once
def embedding_backward_kernel(W):
    load, _ = vector(W)

    @cuda_kernel
    def backward(dwte, dx, order, starts, tokens):
        """dwte[v] += the sum of dx[bt] over all bt whose token is v, always in the same order
        order, starts, tokens: Runs

        One block of 8 warps per distinct token v and 32 W columns, W per lane.  Each warp adds an
        eighth of the rows.  Then the block adds the sums of its warps."""
        # column W lane + i of warp w is in sums_smem[w, 32 i + lane]
        sums_smem = cuda.shared.array((8, 256), ctype(dx))
        acc = filled(W, ctype(dx).type(0))
        C, start, end = dx.shape[1], starts[cuda.blockIdx.x], starts[cuda.blockIdx.x + 1]
        lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        c = (32 * cuda.blockIdx.y + lane) * W
        for i in range(start + warp * (end - start) // 8, start + (warp + 1) * (end - start) // 8):
            row = load(dx, order[i] * C + min(c, C - W))
            for j in range(W):
                acc[j] += row[j]
        for i in range(W):
            sums_smem[warp, 32 * i + lane] = acc[i]
        cuda.syncthreads()                   # all warps have stored their sums
        if cuda.threadIdx.x < 32 * W:
            x, c = cuda.threadIdx.x, (32 * cuda.blockIdx.y + lane) * W + cuda.threadIdx.x // 32
            s = sums_smem[0, x]
            for i in range(1, 8):
                s += sums_smem[i, x]
            if c < C:
                dwte[tokens[cuda.blockIdx.x], c] += s
    return backward

def embedding_backward(dwte, dx, runs):
    """dwte[v] += the sum of the rows of dx (BT, C) whose token is v     runs: Runs on the device"""
    C = dx.shape[1]
    W = width(C)
    launch(embedding_backward_kernel(W), dwte, dx, *runs, grid=(runs.tokens.size, cdiv(C, 32 * W)),
           block=256)

# ==== 4.3 RMSNorm ====
ROW_WARPS = 8                                # warps per block, if each warp has a row of its own
# Blocks, and so partial sums, of the gradient of a gain or a bias: four per multiprocessor of an
# H100.  The number is the same on all GPUs, because the order of the sums depends on it.
GAIN_PARTS = 4 * 132

@made_once
def rmsnorm_kernels(C, W):
    """Makes the kernels residual_forward and backward for rows of C.

    A warp has a row in its registers.  A chunk is 32 W elements, W neighbours per lane, so that a
    lane keeps CHUNKS times W elements.  A lane beyond the row's end loads the last W elements and
    ignores them.  If a row has more than 1,024 elements, backward does not have enough registers
    and keeps some numbers in memory, which is slower."""
    CHUNKS = -(-C // (WARP * W))
    PER_LANE = CHUNKS * W                    # elements in the registers of a lane
    load, store = vector(W)

    @cuda_kernel
    def residual_forward(y, saved, rstd, x, w, eps, step):
        """The Euler step, if `step`:  x[i + 1] = x[i] + f(x[i]),  with f(x[i]) in y.  Then the norm
        of the new x:  rstd = 1 / sqrt(mean_c(x^2) + eps),  y = x * rstd * w.  It overwrites
        f(x[i]).

        x is the newest point of the trajectory, in the type of sums; saved is its copy for
        backward.
        One warp per row.     grid BT / ROW_WARPS, block (32, ROW_WARPS)
        y, saved, x (BT, C), rstd (BT,), w (C,)"""
        row, ss, one = cuda.local.array(PER_LANE, ctype(x)), ctype(x).type(0), ctype(x).type(1)
        lane, bt = cuda.threadIdx.x, cuda.blockIdx.x * ROW_WARPS + cuda.threadIdx.y
        if bt < x.shape[0]:                  # true for all lanes of a warp or for none, as
                                             # warp_sum needs
            for j in range(CHUNKS):          # neighbours read neighbours: coalesced
                c = (WARP * j + lane) * W
                at = bt * C + min(c, C - W)
                vec = load(x, at)            # x[i]
                if step:
                    f = load(y, at)
                    for i in range(W):
                        vec[i] += f[i]       # x[i + 1] = x[i] + f(x[i])
                for i in range(W):
                    row[j * W + i] = vec[i]
                    ss += vec[i] * vec[i] if c < C else ctype(x).type(0)
            r = one / math.sqrt(warp_sum(ss) / ctype(x).type(C) + eps)
            for j in range(CHUNKS):          # stores wait until here: all loads are under way first
                c = (WARP * j + lane) * W
                gain = load(w, min(c, C - W))
                new_x, new_y = vec, gain     # the same registers
                for i in range(W):
                    new_x[i] = row[j * W + i]
                    new_y[i] = row[j * W + i] * gain[i] * r
                if c < C:
                    if step:
                        store(x, bt * C + c, new_x)
                    store(saved, bt * C + c, new_x)
                    store(y, bt * C + c, new_y)
            if lane == 0:
                rstd[bt] = r

    @cuda_kernel
    def backward(dx, dy, partial, x, w, rstd):
        """dx += rstd * (w*dy - u * mean_c(w*dy*u)),  u = x * rstd: the adjoint of the Euler step.
        On entry, dx is the gradient of x[i + 1] = x[i] + f(x[i]).  The summand x[i] passes it on
        unchanged.  This kernel adds the part that comes back through f.
        partial[i, c] = sum of dy * u over the rows of block i: the gradient of the gain w.
        dy is overwritten with y = w * u, the output of forward.

        Each warp processes one row after another.
        grid GAIN_PARTS, block (32, warps), shared memory (warps, C)"""
        # The lane's elements of a row.  The gain is 0 beyond the row's end, so that these elements
        # add nothing to m
        u_row, dy_row = cuda.local.array(PER_LANE, ctype(x)), cuda.local.array(PER_LANE, ctype(x))
        dx_row, gain = cuda.local.array(PER_LANE, ctype(x)), cuda.local.array(PER_LANE, ctype(x))
        zero, lane, warps, BT = ctype(x).type(0), cuda.threadIdx.x, cuda.blockDim.y, x.shape[0]
        sums = filled(PER_LANE, zero)
        for j in range(CHUNKS):
            c = (WARP * j + lane) * W
            vec = load(w, min(c, C - W))
            for i in range(W):
                gain[j * W + i] = vec[i] if c < C else zero
        start = cuda.blockIdx.x * BT // GAIN_PARTS
        end = (cuda.blockIdx.x + 1) * BT // GAIN_PARTS
        for bt in range(start + cuda.threadIdx.y, end, warps):
            r, m = rstd[bt], zero
            for j in range(CHUNKS):
                at = bt * C + min((WARP * j + lane) * W, C - W)
                a, b, vec = load(x, at), load(dy, at), load(dx, at)
                for i in range(W):
                    u_row[j * W + i], dy_row[j * W + i], dx_row[j * W + i] = a[i] * r, b[i], vec[i]
                    m += gain[j * W + i] * b[i] * u_row[j * W + i]
            m = warp_sum(m) / ctype(x).type(C)
            new_dx, y = a, b                 # the same registers
            for j in range(CHUNKS):
                for i in range(W):
                    u, g = u_row[j * W + i], gain[j * W + i]
                    sums[j * W + i] += dy_row[j * W + i] * u
                    new_dx[i], y[i] = dx_row[j * W + i] + r * (g * dy_row[j * W + i] - u * m), g * u
                c = (WARP * j + lane) * W
                if c < C:
                    store(dx, bt * C + c, new_dx)
                    store(dy, bt * C + c, y)
        sums_smem = cuda.shared.array(0, ctype(x))
        for j in range(CHUNKS):
            for i in range(W):
                c = (WARP * j + lane) * W + i
                if c < C:
                    sums_smem[cuda.threadIdx.y * C + c] = sums[j * W + i]
        cuda.syncthreads()                   # all warps have stored their sums
        for c in range(cuda.threadIdx.y * WARP + lane, C, warps * WARP):
            s = sums_smem[c]
            for i in range(1, warps):
                s += sums_smem[i * C + c]
            partial[cuda.blockIdx.x, c] = s
    return residual_forward, backward

@made_once
def normalized_kernel(C, W):
    load, store = vector(W)

    @cuda_kernel
    def normalized(y, x, rstd, w):
        """y = x * rstd * w: the output of residual_forward again, from the x that it saved
        grid 1,024 blocks     y, x (BT, C), rstd (BT,), w (C,)"""
        for i in range(cuda.grid(1), y.size // W, cuda.gridsize(1)):
            vec, gain, r = load(x, i * W), load(w, i * W % C), rstd[i * W // C]
            for j in range(W):
                vec[j] = vec[j] * gain[j] * r
            store(y, i * W, vec)
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

def launch_residual_forward(y, saved, rstd, x, w, eps, step):
    residual_forward, _ = rmsnorm_kernels(x.shape[1], width(x.shape[1]))
    launch(residual_forward, y, saved, rstd, x, w, number(x, eps), step,
           grid=cdiv(len(x), ROW_WARPS), block=(WARP, ROW_WARPS))

def rmsnorm_forward(y, saved, rstd, x, w, eps):
    """y = x * rstd * w, saved = x"""
    launch_residual_forward(y, saved, rstd, x, w, eps, step=False)

def residual_rmsnorm_forward(f, saved, rstd, x, w, eps):
    """The Euler step  x[i + 1] = x[i] + f(x[i]),  which overwrites x[i], and then the norm of
    x[i + 1], as rmsnorm_forward, which overwrites f."""
    launch_residual_forward(f, saved, rstd, x, w, eps, step=True)

def rmsnorm_again(y, x, w, rstd):
    """y = x * rstd * w, with the rstd that rmsnorm_forward has computed"""
    C = x.shape[1]
    launch(normalized_kernel(C, width(C)), y, x, rstd, w, grid=1024, block=256)

def rmsnorm_backward(dx, dw, dy_becomes_y, partial, x, w, rstd):
    """dx += rstd * (w*dy - u * mean_c(w*dy*u)),  dw += sum_bt dy * u,  u = x * rstd
    Overwrites dy with y = w * u, and returns it.     partial (GAIN_PARTS, C) is scratch"""
    C, size = x.shape[1], partial.dtype.itemsize
    warps = max(1, min(4, (48 << 10) // (C * size)))
    _, backward = rmsnorm_kernels(C, width(C))
    launch(backward, dx, dy_becomes_y, partial, x, w, rstd, grid=GAIN_PARTS, block=(WARP, warps),
           smem=warps * C * size)
    launch(sum_rows_kernel, dw, transposed(partial), grid=C, block=256)
    return dy_becomes_y

# ==== 4.4 RoPE ====
@made_once
def rope_kernel(W):
    load, store = vector(W)

    @cuda_kernel
    def rotate(qkv, cos, sin, T, heads, sign):
        """Rotates, in place, pair (i, i + D/2) of the first `heads` heads of row bt by
        sign * angle[bt % T, i].     math: nanoeuler.rope
        One block per row, W pairs per thread."""
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
    """Rotates the first `heads` heads, those of q and k, in place: forward with sign 1, backward
    with sign -1.     qkv (BT, QKV), cos, sin (T, D / 2)"""
    W = width(cos.shape[1], qkv.shape[1])
    threads = min(256, -(-heads * cos.shape[1] // (32 * W)) * 32)
    launch(rope_kernel(W), qkv, cos, sin, T, heads, number(qkv, sign), grid=len(qkv), block=threads)

# ==== 4.5 Attention ====
# FlashAttention (Dao et al. 2022), split over blocks by rows as in FlashAttention-2 (Dao 2023).  A
# block has N query rows and walks over the keys, N at a time, with a running maximum m and a
# running sum l of each row.  The T x T matrix of scores is never in memory, and tiles beyond the
# diagonal are skipped.  A block has 128 threads, (16, 8): thread (x, y) owns rows y * N/8 + i and
# columns x + 16 j of each N x N or N x D tile.  The 16 threads that share a row are half a warp.
# In shared memory, the rows of tiles are N + 1 or D + 1 apart, so the elements of a column are in
# 32 different banks.

class Attention(NamedTuple):
    """The attention kernels of one head size, and how they are launched"""
    forward: object
    dq: object
    dkv: object
    operand: object                          # function: a matrix -> the argument of the kernels,
                                             # here the matrix itself, in tensor_cores also its map
    rotates: bool                            # do dq and dkv rotate their results back (RoPE)?
    block: object                            # threads per block, of all three kernels
    rows: int                                # query rows per block of forward
    back_rows: int                           # query rows per block of dq, keys per block of dkv
    smem: int                                # bytes of dynamic shared memory of forward
    back_smem: int                           # the same of dq and dkv

def unchanged(x):
    return x

@made_once
def portable_attention(D, itemsize, smem_bytes, window=0):
    """Makes the kernels for head size D and numbers of `itemsize` bytes.  N is the largest tile
    with which backward fits into `smem_bytes` of shared memory.
    window: token t attends to the tokens t - window + 1 to t; 0: to all tokens up to t"""
    D_PAD = -(-D // 16) * 16                 # D, padded with zeros to a multiple of 16
    D_ROW = D_PAD + 1                        # distance between rows of Q, K, V, dO in shared memory
    N = 64
    while (4 * N * D_ROW + 2 * N * (N + 1)) * itemsize > smem_bytes:
        N //= 2
    need(N >= 16, f"head_dim {D} is too large: its tiles do not fit into shared memory")
    P_ROW = N + 1                            # distance between rows of P, dS
    # Per thread: rows, and columns in N x N and in N x D tiles
    ROWS, KEYS, COLS = N // 8, N // 16, D_PAD // 16
    NKEYS, NCOLS = ROWS * KEYS, ROWS * COLS
    # Offsets of the tiles in shared memory: Q, K, V, P, and in backward also dS and dO
    Q_AT, K_AT, V_AT, P_AT = 0, N * D_ROW, 2 * N * D_ROW, 3 * N * D_ROW
    DS_AT, DO_AT = P_AT + N * P_ROW, P_AT + 2 * N * P_ROW
    score_tile, out_tile = register_tile(ROWS, KEYS), register_tile(ROWS, COLS)

    @inlined
    def first_key(t0):
        """The first key of the first tile that any row from t0 on attends to"""
        return max(0, t0 + 1 - window) // N * N if window else 0

    @inlined
    def load_rows(smem, tile, src, row0, t, T, col):
        """smem[tile + r * D_ROW + d] = src[row0 + t + r, col + d] for N rows r and all d < D; zeros
        for rows t + r >= T, and for d >= D"""
        row, n = row0 + t, T - t
        for i in range(16 * cuda.threadIdx.y + cuda.threadIdx.x, N * D_PAD, 128):
            r, d, v = i // D_PAD, i % D_PAD, ctype(src).type(0)
            if r < n and d < D:
                v = value(src[row + r, col + d])
            smem[tile + r * D_ROW + d] = v

    # The three matrix products of attention; thread (x, y) computes its own rows and columns
    @inlined
    def add_abt(s, smem, a, b, x, y):
        """s += A B^T, N x N: A is Q or dO, B is K or V"""
        score_tile(s, smem, (a + y * ROWS * D_ROW, D_ROW, 1), smem, (b + x * D_ROW, D_ROW, 1),
                   D_PAD)

    @inlined
    def add_ab(acc, smem, a, b, x, y):
        """acc += A B, N x D: A is P or dS, B is V or K"""
        out_tile(acc, smem, (a + y * ROWS * P_ROW, P_ROW, 1), smem, (b + x, 1, D_ROW), N)

    @inlined
    def add_atb(acc, smem, a, b, x, y):
        """acc += A^T B, N x D: A is P or dS, B is dO or Q"""
        out_tile(acc, smem, (a + y * ROWS, 1, P_ROW), smem, (b + x, 1, D_ROW), N)

    @cuda_kernel
    def forward(o, lse, qkv, T, G, scale):
        """o = softmax(Q K^T / sqrt(D)) V, causal     math: nanoeuler.attention_forward
        One block per N query rows of a head.     grid (T / N, H, B), block (16, 8)
        out: o (BT, HD), lse (H, BT), the log of the sum of exponentials     in: qkv (BT, QKV)"""
        smem, zero = cuda.shared.array(0, ctype(qkv)), ctype(qkv).type(0)
        # m is the maximum of the whole row; l is the sum of this thread's columns until the end
        m, l = filled(ROWS, -ctype(qkv).type(math.inf)), filled(ROWS, zero)
        acc = filled(NCOLS, zero)
        x, y, row0 = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockIdx.z * T
        h, H = cuda.blockIdx.y, cuda.gridDim.y
        t0 = (cuda.gridDim.x - 1 - cuda.blockIdx.x) * N              # the longest rows first
        k_col = o.shape[1] + h * G // H * D
        load_rows(smem, Q_AT, qkv, row0, t0, T, h * D)
        for k0 in range(first_key(t0), t0 + 1, N):
            cuda.syncthreads()               # the last product has read K, V and P
            load_rows(smem, K_AT, qkv, row0, k0, T, k_col)
            load_rows(smem, V_AT, qkv, row0, k0, T, k_col + G * D)
            cuda.syncthreads()               # Q, K, V are complete
            s = filled(NKEYS, zero)
            add_abt(s, smem, Q_AT, K_AT, x, y)           # S = Q K^T
            for i in range(ROWS):
                r, top = y * ROWS + i, m[i]
                for j in range(KEYS):
                    v = s[i * KEYS + j] * scale
                    if k0 + x + 16 * j > t0 + r:
                        v = -ctype(qkv).type(math.inf)
                    if window and k0 + x + 16 * j <= t0 + r - window:
                        # Not -inf: the first tile may lie wholly before a row's window.  Then
                        # top = v, and exp(v - top) is 1 and not NaN.  The first key inside the
                        # window multiplies these sums by exp(v - new top) = 0
                        v = -ctype(qkv).type(1e30)
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
            cuda.syncthreads()               # P is complete
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

            Kernel dq:   dQ = dS K,  and before it delta = <dO, O>
                         One block per N query rows of a head, as forward.
                         out: the q columns of dqkv (BT, QKV), and delta (H, BT)
            Kernel dkv:  dK = sum_h dS^T Q,  dV = sum_h P^T dO
                         One block per N keys of a key/value head.  It walks over the query heads h
                         of its group, and over their rows from the diagonal on.
                         out: the k and v columns of dqkv     in: delta, of dq

            grid (T / N, H or G, B), block (16, 8)     in: do (BT, HD), lse (H, BT)"""
            smem, zero = cuda.shared.array(0, ctype(qkv)), ctype(qkv).type(0)
            dqk, dv = filled(NCOLS, zero), filled(NCOLS, zero)       # dQ or dK, and dV
            x, y, row0 = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockIdx.z * T
            H, G = HD // D, (qkv.shape[1] - HD) // (2 * D)
            if keys:                         # N own keys, and the rows that attend to them
                g = cuda.blockIdx.y
                first_own = cuda.blockIdx.x * N
                first_head = g * H // G
                end_head = (g + 1) * H // G
                first_other = first_own
                end_other = min(T, first_own + N - 1 + window) if window else T
            else:                            # N own rows, and the keys that they attend to
                first_head = cuda.blockIdx.y
                first_own = (cuda.gridDim.x - 1 - cuda.blockIdx.x) * N   # the longest rows first
                g = first_head * G // H
                end_head = first_head + 1
                first_other = first_key(first_own)
                end_other = first_own + 1
            k_col, v_col = HD + g * D, HD + (G + g) * D
            if keys:
                load_rows(smem, K_AT, qkv, row0, first_own, T, k_col)
                load_rows(smem, V_AT, qkv, row0, first_own, T, v_col)
            else:
                load_rows(smem, Q_AT, qkv, row0, first_own, T, first_head * D)
                load_rows(smem, DO_AT, do, row0, first_own, T, first_head * D)
                lane = (16 * y + x) % WARP
                for t in range(first_own + (16 * y + x) // WARP, min(first_own + N, T), 4):
                    total = zero             # one warp per row
                    for i in range(first_head * D + lane, first_head * D + D, WARP):
                        total += value(do[row0 + t, i]) * value(o[row0 + t, i])
                    total = warp_sum(total)
                    if lane == 0:
                        delta[first_head, row0 + t] = total
            for h in range(first_head, end_head):
                for n in range(first_other, end_other, N):
                    cuda.syncthreads()       # the last products have read the other tiles
                    if keys:
                        load_rows(smem, Q_AT, qkv, row0, n, T, h * D)
                        load_rows(smem, DO_AT, do, row0, n, T, h * D)
                    else:
                        load_rows(smem, K_AT, qkv, row0, n, T, k_col)
                        load_rows(smem, V_AT, qkv, row0, n, T, v_col)
                    cuda.syncthreads()       # Q, dO, K, V and delta are complete
                    t0, k0 = (n, first_own) if keys else (first_own, n)
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
                    cuda.syncthreads()       # P and dS are complete
                    if keys:
                        add_atb(dv, smem, P_AT, DO_AT, x, y)         # dV += P^T dO
                        add_atb(dqk, smem, DS_AT, Q_AT, x, y)        # dK += dS^T Q
                    else:
                        add_ab(dqk, smem, DS_AT, K_AT, x, y)         # dQ += dS K
            col = k_col if keys else first_head * D
            for i in range(ROWS):
                t = first_own + y * ROWS + i
                for j in range(COLS):
                    if t < T and x + 16 * j < D:
                        dqkv[row0 + t, col + x + 16 * j] = stored(dqkv, dqk[i * COLS + j])
                        if keys:
                            dqkv[row0 + t, v_col + x + 16 * j] = stored(dqkv, dv[i * COLS + j])
        return run

    return Attention(forward, dq=backward(keys=False), dkv=backward(keys=True), operand=unchanged,
                     rotates=False, block=(16, 8), rows=N, back_rows=N,
                     smem=(3 * N * D_ROW + N * P_ROW) * itemsize,
                     back_smem=(4 * N * D_ROW + 2 * N * P_ROW) * itemsize)

def attention_kernels(D, dtype, window):
    """The Attention for head size D.  A block on an RTX 30, 40 or 50 may have 99 KB of shared
    memory."""
    smem_bytes = min(99 << 10, cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
    return portable_attention(D, computing(dtype).itemsize, smem_bytes, window)

def window_of(cfg):
    """The attention window of a model, or 0 if it covers the whole context"""
    return cfg.window if cfg.window and cfg.window < cfg.seq_len else 0

def attention_forward(o, lse, qkv, T, D, window=0, kernels=None):
    """o (BT, HD) = softmax(Q K^T / sqrt(D)) V, causal, for sequences of T rows
    lse (H, BT) is for the backward pass     qkv (BT, QKV), after RoPE
    kernels: an Attention; those of this section by default"""
    BT, HD = o.shape
    G = (qkv.shape[1] - HD) // (2 * D)
    scale = number(qkv, 1 / math.sqrt(D))
    k = kernels or attention_kernels(D, qkv.dtype, window)
    launch(k.forward, o, lse, k.operand(qkv), T, G, scale,
           grid=(cdiv(T, k.rows), HD // D, BT // T), block=k.block, smem=k.smem)

def attention_backward(dqkv, delta, do, o, lse, qkv, cos, sin, T, D, window=0, kernels=None):
    """dqkv (BT, QKV): the gradients of q, k and v before RoPE, from do (BT, HD), the gradient of o
    delta (H, BT) is scratch     kernels: as for attention_forward"""
    BT, HD = o.shape
    H, G = len(lse), (qkv.shape[1] - HD) // (2 * D)
    scale = number(qkv, 1 / math.sqrt(D))
    k = kernels or attention_kernels(D, qkv.dtype, window)
    given = (dqkv, delta, k.operand(do), k.operand(o), lse, k.operand(qkv), cos, sin, T, HD, scale)
    tiles, B = cdiv(T, k.back_rows), BT // T
    launch(k.dq, *given, grid=(tiles, H, B), block=k.block, smem=k.back_smem)      # and delta
    launch(k.dkv, *given, grid=(tiles, G, B), block=k.block, smem=k.back_smem)
    if not k.rotates:
        rope(dqkv, cos, sin, T, H + G, -1)

# ==== 4.6 SwiGLU ====
@made_once
def swiglu_kernels(W):
    load, store = vector(W)

    @cuda_kernel
    def forward(y, gate_up):
        """y = silu(gate) * up     one block per row, W elements per thread
        math: nanoeuler.swiglu_forward"""
        bt, F, one = cuda.blockIdx.x, y.shape[1], ctype(y).type(1)
        for f in range(cuda.threadIdx.x * W, F, cuda.blockDim.x * W):
            z, up = load(gate_up, bt * 2 * F + f), load(gate_up, bt * 2 * F + F + f)
            for i in range(W):
                z[i] = z[i] / (one + exp(-z[i])) * up[i]
            store(y, bt * F + f, z)

    @cuda_kernel
    def backward(gate_up, dy):
        """Overwrites gate_up (BT, 2F) with its gradient     math: nanoeuler.swiglu_backward"""
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
    """y = silu(gate) * up     y (BT, F), gate_up (BT, 2F)"""
    forward, _ = swiglu_kernels(width(y.shape[1]))
    launch(forward, y, gate_up, grid=len(y), block=256)

def swiglu_backward(gate_up, dy):
    """Overwrites gate_up (BT, 2F) with its gradient, and returns it.     dy (BT, F)"""
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
        """nll[k, row0 + r] = -log softmax(z)[y]
        z becomes weight[b, k, t] (softmax(z) - onehot(y))

        z = logits[r, k V : (k + 1) V] are the logits of head k for one row, and
        y = targets[k, row0 + r] is its target.  Without a target (-1), loss and gradient are 0.
        One block of 256 threads per row and head.     grid (R, P)
        nll (P, BT), logits (R, P V), targets (P, BT) int32, weight (B, P, T) float64"""
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
        b, t = (row0 + r) // T, (row0 + r) % T
        zy, g = value(logits[r, k * V + y]), ctype(logits).type(weight[b, k, t])
        cuda.syncthreads()                   # all threads have read z[y] before it changes
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
    """Stores the losses of the R rows from row0 in nll.  Overwrites logits with their gradient, and
    returns it."""
    R, PV = logits.shape
    launch(cross_entropy_kernel(width(V)), nll, logits, targets, weight, row0, V, T,
           grid=(R, PV // V), block=256)
    dlogits = logits
    return dlogits

# ==== 4.8 Biases and norms of q and k ====
# You may skip this section at first, as in nanoeuler.py: most models have neither.
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
    """partial[i] = sum over the i-th part of the rows of x     one block of 256 threads per part
    partial (GAIN_PARTS, N), x (BT, N)"""
    BT, i, parts = x.shape[0], cuda.blockIdx.x, partial.shape[0]
    for c in range(cuda.threadIdx.x, x.shape[1], 256):
        s = ctype(partial).type(0)
        for t in range(i * BT // parts, (i + 1) * BT // parts):
            s += value(x[t, c])
        partial[i, c] = s

def bias_gradient(dbias, dqkv, partial):
    """dbias += sum_bt dqkv     partial (GAIN_PARTS, QKV) is scratch"""
    launch(sum_columns_kernel, partial, dqkv, grid=GAIN_PARTS, block=256)
    launch(sum_rows_kernel, dbias, transposed(partial), grid=len(dbias), block=256)

def lanes_per_head(D):
    """The lanes that share a head of D numbers: a power of two, so that sums are butterflies"""
    return min(WARP, 1 << (cdiv(D, width(D)) - 1).bit_length())

@made_once
def head_norm_kernels(D):
    """Makes the kernels forward and backward for heads of D numbers.

    LANES neighbouring lanes have a head in their registers: CHUNKS times W neighbours per lane.  So
    a warp has HEADS heads at once.  A lane beyond the head's end loads its last W numbers and
    ignores them."""
    W, LANES = width(D), lanes_per_head(D)
    HEADS, CHUNKS = WARP // LANES, cdiv(D, W * LANES)
    PER_LANE = CHUNKS * W                    # numbers in the registers of a lane
    SUMS_SHAPE = ROW_WARPS * HEADS, 2 * D
    load, store = vector(W)
    head_sum = butterfly(operator.add, LANES.bit_length() - 1)

    @cuda_kernel
    def forward(qkv, qk, rstd, q_gain, k_gain, eps):
        """RMSNorm of each head of q and k, in place     math: nanoeuler.head_norm_forward
        LANES lanes per head.     grid BT (H + G) LANES / 256, block (32, ROW_WARPS)
        qkv (BT, QKV), q_gain, k_gain (D,)     out, for backward: qk (BT, (H + G) D), the heads
        before the norm, and rstd (BT, H + G)"""
        lane, heads, QKV = cuda.threadIdx.x % LANES, rstd.shape[1], qkv.shape[1]
        H = 2 * heads - QKV // D             # QKV = (H + 2 G) D
        head = (cuda.blockIdx.x * ROW_WARPS + cuda.threadIdx.y) * HEADS + cuda.threadIdx.x // LANES
        exists = head < rstd.size            # all lanes take part in head_sum, also without a head
        head = min(head, rstd.size - 1)
        t, h = head // heads, head % heads
        gain = q_gain if h < H else k_gain
        x, zero = cuda.local.array(PER_LANE, ctype(qkv)), ctype(qkv).type(0)
        ss = zero
        for j in range(CHUNKS):
            i = (LANES * j + lane) * W
            vec = load(qkv, t * QKV + h * D + min(i, D - W))
            for c in range(W):
                x[W * j + c] = vec[c]
                ss += vec[c] * vec[c] if i < D else zero
            if exists and i < D:
                store(qk, head * D + i, vec)
        r = ctype(qkv).type(1) / math.sqrt(head_sum(ss) / ctype(qkv).type(D) + eps)
        for j in range(CHUNKS):
            i = (LANES * j + lane) * W
            vec = load(gain, min(i, D - W))
            for c in range(W):
                vec[c] = vec[c] * x[W * j + c] * r
            if exists and i < D:
                store(qkv, t * QKV + h * D + i, vec)
        if exists and lane == 0:
            rstd[t, h] = r

    @cuda_kernel(launch_bounds=(256, 3))
    def backward(dqkv, partial, qk, rstd, q_gain, k_gain):
        """Overwrites the q and k columns of dqkv, gradients after the norm, with those before it.
        math: nanoeuler.head_norm_backward
        partial[i] = sum of dy * u, u = x * rstd, over the rows of block i: for q_gain, for k_gain
        Each warp has a stretch of rows, and takes HEADS heads of a row at once.
        grid GAIN_PARTS, block (32, ROW_WARPS)
        dqkv (BT, QKV), partial (GAIN_PARTS, 2 D), qk (BT, (H + G) D), rstd (BT, H + G)"""
        zero, lane = ctype(partial).type(0), cuda.threadIdx.x % LANES
        of_q, of_k = filled(PER_LANE, zero), filled(PER_LANE, zero)
        x = cuda.local.array(PER_LANE, ctype(partial))
        dy = cuda.local.array(PER_LANE, ctype(partial))
        group = cuda.threadIdx.y * HEADS + cuda.threadIdx.x // LANES
        warp, warps = cuda.blockIdx.x * ROW_WARPS + cuda.threadIdx.y, GAIN_PARTS * ROW_WARPS
        (BT, heads), QKV = rstd.shape, dqkv.shape[1]
        H = 2 * heads - QKV // D
        for t in range(warp * BT // warps, (warp + 1) * BT // warps):
            for first in range(0, heads, HEADS):
                h = first + cuda.threadIdx.x // LANES
                exists = h < heads
                h = min(h, heads - 1)
                r, mean, of_head_q = rstd[t, h], zero, h < H
                gain = q_gain if of_head_q else k_gain
                for j in range(CHUNKS):
                    i = (LANES * j + lane) * W
                    at = min(i, D - W)
                    a, b = load(qk, (t * heads + h) * D + at), load(dqkv, t * QKV + h * D + at)
                    g = load(gain, at)
                    for c in range(W):
                        x[W * j + c], dy[W * j + c] = a[c], b[c]
                        mean += g[c] * b[c] * a[c] if i < D else zero
                # rstd * mean_c(gain*dy*u); r is squared, because u = x * rstd
                mean = head_sum(mean) * r * r / ctype(partial).type(D)
                for j in range(CHUNKS):
                    i = (LANES * j + lane) * W
                    at = min(i, D - W)
                    g = load(gain, at)
                    dx = a                   # the same registers
                    for c in range(W):
                        k = W * j + c
                        du = dy[k] * x[k] * r if exists else zero
                        of_q[k] += du if of_head_q else zero
                        of_k[k] += zero if of_head_q else du
                        dx[c] = r * (g[c] * dy[k] - x[k] * mean)
                    if exists and i < D:
                        store(dqkv, t * QKV + h * D + i, dx)
        sums_smem = cuda.shared.array(SUMS_SHAPE, ctype(partial))
        for j in range(CHUNKS):
            for c in range(W):
                i = (LANES * j + lane) * W + c
                if i < D:
                    sums_smem[group, i] = of_q[W * j + c]
                    sums_smem[group, D + i] = of_k[W * j + c]
        cuda.syncthreads()                   # all warps have stored their sums
        for i in range(cuda.threadIdx.y * WARP + cuda.threadIdx.x, 2 * D, WARP * ROW_WARPS):
            s = sums_smem[0, i]
            for k in range(1, ROW_WARPS * HEADS):
                s += sums_smem[k, i]
            partial[cuda.blockIdx.x, i] = s
    return forward, backward

def head_norm_forward(qkv, qk, rstd, q_gain, k_gain, eps):
    """RMSNorm of each head of q and k, in place; qk and rstd are for head_norm_backward."""
    D = q_gain.size
    forward, _ = head_norm_kernels(D)
    launch(forward, qkv, qk, rstd, q_gain, k_gain, number(qkv, eps),
           grid=cdiv(rstd.size * lanes_per_head(D), WARP * ROW_WARPS), block=(WARP, ROW_WARPS))

def head_norm_backward(dqkv, dq_gain, dk_gain, partial, qk, rstd, q_gain, k_gain):
    """Overwrites the q and k columns of dqkv with the gradients before the norm.  Adds the sum of
    dy * u over all rows and the heads of q to dq_gain, and over the heads of k to dk_gain.
    partial (GAIN_PARTS, 2 D) is scratch"""
    D = q_gain.size
    _, backward = head_norm_kernels(D)
    launch(backward, dqkv, partial, qk, rstd, q_gain, k_gain, grid=GAIN_PARTS,
           block=(WARP, ROW_WARPS))
    for dgain, start in (dq_gain, 0), (dk_gain, D):
        columns = view(partial, start, (D, len(partial)), (1, 2 * D))
        launch(sum_rows_kernel, dgain, columns, grid=D, block=256)

# ==== 5 Model ====
class Ops:
    """The matrix products and the attention that a model calls, here the functions of this file.
    TensorOps of tensor_cores/ops.py computes them on tensor cores.  Everything else that a model
    calls has only one form."""
    path = "portable"                        # of PATHS
    matmul = staticmethod(matmul)
    matmul_dx = staticmethod(matmul_dx)
    matmul_dw = staticmethod(matmul_dw)
    attention_forward = staticmethod(attention_forward)
    attention_backward = staticmethod(attention_backward)

    def product_of_each(self, out, a, b, symmetric=False):
        """For Muon, as polynomial_of_each     symmetric: all outputs are symmetric"""
        product_of_each(out, a, b)

    def polynomial_of_each(self, out, x, a, b, c):
        polynomial_of_each(out, x, a, b, c)

    def forget_buffers(self):
        """Must be called when buffers are freed that these ops have read or written."""

    def slow_parts(self, cfg):
        """Why tensor cores cannot compute some parts of a model of this shape: a list"""
        return []

def make_ops(top=PATHS[-1], overlaps=False):
    """Returns the Ops of the fastest path that this GPU supports, up to `top`.
    overlaps: see TensorOps"""
    path = kernel_path(top)
    return Ops() if path == "portable" else tensor_cores().TensorOps(path, overlaps)

# columns: a slice of the columns of the logits.  w (columns, C): the matrix that computes them from
# y.  dw: the gradient of w
HeadPart = namedtuple("HeadPart", "columns w dw")

def gain_of(p, i):
    """The gain of the RMSNorm that reads x[i].  In layer i / 2, it is before attention (i even) or
    before SwiGLU (i odd).  The last one, i = 2 L, is before the output heads."""
    l = i // 2
    if l == len(p.attn_norm):
        return p.final_norm
    return p.mlp_norm[l] if i % 2 else p.attn_norm[l]

# The buffers that the forward pass of a layer writes, each with BT rows.  y (BT, C) holds the
# normalized input, and then the output f.  Only a model with norms of q and k (4.8) has qk and
# qk_rstd; they may be None in others
LayerBuffers = namedtuple("LayerBuffers", "y qkv qk qk_rstd att gate_up swiglu")

class Layers:
    """The layers of a forward pass, two Euler steps per layer.  The trajectory is x[0], .., x[2 L]:

        x[i + 1] = x[i] + f(y),  y = rmsnorm(x[i])     f is attention if i is even, else SwiGLU

    Model trains with these layers.  Decoder (6) and Prompts of decode/prompts.py generate with
    them.  The three define what differs:

    cfg, ops     the Config and the Ops
    w, p         Params: the operands of products, and the gains and biases
    state        x, the newest point of the trajectory, in the type of sums
    and the next three methods"""

    def of_layer(self, l):
        """Returns the LayerBuffers of layer l."""
        raise NotImplementedError

    def saved(self, i):
        """Returns (buffer for a copy of x[i], buffer for its rstd), for a backward pass."""
        raise NotImplementedError

    def rotate_and_attend(self, l, b):
        """Rotates q and k in b.qkv (RoPE), stores keys and values where they are needed later, and
        sets b.att."""
        raise NotImplementedError

    def run_layers(self):
        """Takes x from x[0] to x[2 L], and sets y = rmsnorm(x[2 L])."""
        y = self.of_layer(0).y               # all layers have the same one
        self.step_and_norm(0, y)
        for l in range(self.cfg.n_layer):
            b = self.of_layer(l)
            self.attend(l, b)
            self.ops.matmul(y, b.att, self.w.attn_proj[l])
            self.step_and_norm(2 * l + 1, y)
            self.gate(l, b)
            self.ops.matmul(y, b.swiglu, self.w.down[l])
            self.step_and_norm(2 * l + 2, y)

    def step_and_norm(self, i, y):
        """If i > 0, x[i] = x[i - 1] + f, with f in y.  Then y = rmsnorm(x[i])."""
        op, (saved, rstd) = residual_rmsnorm_forward if i else rmsnorm_forward, self.saved(i)
        op(y, saved, rstd, self.state, gain_of(self.p, i), self.cfg.norm_eps)

    def attend(self, l, b):
        """Computes b.att, the outputs of layer l's attention heads, from y = rmsnorm(x) in b.y."""
        cfg, p = self.cfg, self.p
        self.ops.matmul(b.qkv, b.y, self.w.qkv[l])
        if cfg.qkv_bias:
            add_bias(b.qkv, p.qkv_bias[l])
        if cfg.qk_norm:
            head_norm_forward(b.qkv, b.qk, b.qk_rstd, p.q_norm[l], p.k_norm[l], cfg.norm_eps)
        self.rotate_and_attend(l, b)

    def gate(self, l, b):
        """Computes b.swiglu, the hidden numbers of layer l, from y = rmsnorm(x) in b.y."""
        self.ops.matmul(b.gate_up, b.y, self.w.gate_up[l])
        swiglu_forward(b.swiglu, b.gate_up)

class WeightArrays:
    """The weights of a micro-batch on the device, float64, and those of the next one on the host"""

    def __init__(self, shape):
        self.device, self.staged = new(shape, np.float64), np.zeros(shape)

class Model(Layers):
    """Parameters, gradients and moments on the device, and buffers for micro-batches (B, T).

    The interface is Engine (runs/engine.py).  `update` and `losses` return results and wait for the
    device.  `gradient` queues its work and returns.  It waits only until the tokens of the call
    before have been copied, so the host is at most one micro-batch ahead."""

    program, talk, buffer_table = "nanoeuler_cuda.py", "c", staticmethod(buffer_table)
    make_ops = staticmethod(make_ops)        # tests/oracles/ has another one

    @staticmethod
    def ready(options=None):
        """Nothing to do: kernels are compiled when they are first launched."""

    def __init__(self, cfg, flat, moments=(), options=None, dtype="f32", recompute=False,
                 top=PATHS[-1]):
        """top: the fastest kernel path that it may use
        options: those of a run.  They say dtype, recompute and top (--matmul)"""
        open_device()
        if options:
            dtype, recompute, top = options.dtype, options.recompute, options.matmul
            for name, values in (("dtype", DTYPES), ("matmul", PATHS)):
                given = getattr(options, name)
                need(given in values, f"--{name} is {given}, expected {' or '.join(values)}")
        self.top, self.ops = top, self.make_ops(top)
        self.optimizer = getattr(options, "optimizer", "adamw")
        need(has(dtype), "bfloat16 needs a GPU of capability 8.0 or newer; use --dtype f32")
        self.cfg, self.table = cfg, ne.param_table(cfg)
        self.kept = 1 if recompute else cfg.n_layer      # layers whose activations are kept
        self.window = window_of(cfg)
        self.dtype = DTYPES[dtype]
        self.master = computing(self.dtype)  # of parameters, gradients and moments
        self.shape = None                    # (B, T) that there is memory for
        self.held = load_gpu_memory().needs_of(self.memory(1, 1)).held
        if self.held >= free_bytes():        # an unused model may still occupy memory
            release_garbage()
        free = free_bytes()
        need(self.held < free, f"weights, gradients and moments need {self.held / 2**30:.1f} GiB, "
             f"the GPU has {free / 2**30:.1f} GiB free; use a smaller --preset")
        self.hold(flat)
        self.cos, self.sin = map(self.put, ne.rope_table(cfg, self.master))
        own = self.owned(self.flat.size)
        moments = [x[own] for x in moments] or np.zeros((2, own.stop - own.start), self.master)
        self.m, self.v = map(self.put, moments)
        # A graph always reads and writes the same memory: values that change from step to step, and
        # results, have buffers of their own
        self.results = self.put(np.zeros(cfg.n_mtp + 1), np.float64)    # loss of each head, |g|
        # Two Hypers: the second one is for the embedding, in a run with Muon
        self.staged_hyper = np.zeros((2, len(ne.Hyper._fields)))
        # Events after the last copies from `staged` and from `pinned_runs`: the host waits for
        # them before it overwrites these arrays
        self.staged_read, self.runs_read = cuda.event(False), cuda.event(False)
        self.hyper = self.put(self.staged_hyper, np.float64)
        self.partial = new(NORM_PARTS, np.float64)
        self.zero = np.zeros(cfg.n_mtp + 1)
        self.micro = {}                      # arguments of `micro_batch` -> its result
        self.add = False                     # does the next `gradient` add to g, or set it?
        self.weighted_heads = set()          # heads with a nonzero weight since the last `update`
        self.updates = {}                    # weighted heads, Newton-Schulz steps -> graph
        self.muon = None
        if self.optimizer == "muon":         # now, before micro-batches take the remaining memory
            self.muon = Muon(cfg, self.dtype, own, self.make_ops(top))

    def hold(self, flat):
        """Puts parameters on the device: flat buffers, and views of them by name.  p: parameters;
        g: gradients; w: the operands of products, p itself or its copy rounded to bfloat16"""
        self.flat, self.g_flat = self.put(flat), self.put(np.zeros(flat.size, self.master))
        self.copies = to_device(to_bf16(flat)) if self.dtype == np.uint16 else self.flat
        self.p, self.g, self.w = (ne.views(x, self.table)
                                  for x in (self.flat, self.g_flat, self.copies))
        self.n_decay = sum(x.size for x in self.p[ne.MATRICES])     # matrices come first

    def put(self, x, dtype=None):
        """A copy of x on the device, by default in the type of master weights"""
        return to_device(x, dtype or self.master)

    def owned(self, n):
        """The slice of n parameters that this process updates, and whose moments it keeps"""
        return slice(0, n)

    def prepare(self, B, T):
        """Allocates buffers for micro-batches of B sequences of T tokens, unless those that exist
        have as many tokens per sequence and at least as many sequences.  A smaller micro-batch is
        padded."""
        if self.shape and self.shape[0] >= B and self.shape[1] == T:
            return
        need(0 < T <= self.cfg.seq_len,
             f"expected 1 to {self.cfg.seq_len} tokens, got {T}")
        self.gradient_graphs = self.loss_graph = None    # they use the buffers that are freed now
        self.a = self.d = self.shape = None
        self.ops.forget_buffers()
        P = self.cfg.n_mtp
        buffers = {"a": {}, "d": {}}
        try:
            table = self.buffer_table(self.cfg, B, T, self.dtype, self.kept)
            for group, name, shape, dtype in table:
                buffers[group][name] = new(shape, dtype)
            self.ids = new((P + 1) * B * T, np.int32)    # tokens, then targets of each head
            # number of dimensions of the weights, 2 or 3 -> their arrays: see stage_weight
            self.weights = {2: WeightArrays((B, P))}
            self.staged = cuda.pinned_array((P + 1) * B * T, np.int32)
            self.runs = new(3 * B * T + 1, np.int32)
            self.pinned_runs = cuda.pinned_array(3 * B * T + 1, np.int32)
        except CudaAPIError as e:
            buffers.clear()
            self.ids = self.weights = self.staged = self.runs = self.pinned_runs = None
            if "OUT_OF_MEMORY" not in str(e):
                raise
            raise UserError(load_gpu_memory().shortage(self, B, T, e)) from None
        self.a, self.d = (namedtuple(group, arrays)(**arrays)
                          for group, arrays in buffers.items())
        self.tokens = view(self.ids, 0, (B * T,))
        self.targets = view(self.ids, B * T, (P, B * T))
        self.gradient_graphs = {}            # number of output heads, self.add, whether each
                                             # token has a weight of its own -> Graph
        self.loss_graph = Graph()
        self.shape = B, T

    def memory(self, B, T):
        """[(name, bytes)] of all that this model needs for micro-batches of B x T tokens"""
        table = load_gpu_memory().memory_table(self.cfg, B, T, self.dtype, self.buffer_table,
                                               self.kept, self.top)
        if self.optimizer == "muon":
            own = self.owned(ne.n_params(self.cfg))
            table.append(("Muon's matrices", muon_bytes(self.cfg, self.dtype, own)))
        return table

    def fitting(self, T):
        """How many sequences of T tokens fit into the memory that is free"""
        return load_gpu_memory().fitting(self, T)

    def micro_batch(self, B, asked=None, T=None):
        """The number of sequences per micro-batch, when a step has B: see gpu_memory.py"""
        return load_gpu_memory().micro_batch(self, B, asked, T)

    def without_tensor_cores(self):
        """Explains which parts of this model cannot use tensor cores because of its shape; returns
        "" if all can, or if there are no tensor cores, or the user does not want them."""
        slow = self.ops.slow_parts(self.cfg) if self.dtype == np.uint16 else []
        return f"not on tensor cores, so slower: {'; '.join(slow)}" if slow else ""

    def device(self):
        """The device and the type, for the first line of a log"""
        note = self.without_tensor_cores()
        name = cuda.get_current_device().name
        return f"{name}, {NAMES[self.dtype]}" + (f", {note}" if note else "")

    @property
    def state(self):
        return self.a.state

    def of_layer(self, l):
        """The buffers of layer l.  With --recompute, all layers have the same ones."""
        a, k, normed = self.a, l % self.kept, self.cfg.qk_norm
        return LayerBuffers(a.y, a.qkv[k], a.qk[k] if normed else None,
                            a.qk_rstd[k] if normed else None, a.att[k], a.gate_up[k], a.swiglu[k])

    def saved(self, i):
        a, l = self.a, i // 2
        if l == self.cfg.n_layer:
            return a.x[i], a.final_rstd
        return a.x[i], a.mlp_rstd[l] if i % 2 else a.attn_rstd[l]

    def rotate_and_attend(self, l, b):
        cfg, T = self.cfg, self.shape[1]
        rope(b.qkv, self.cos, self.sin, T, cfg.n_head + cfg.n_kv_head, 1)
        self.ops.attention_forward(b.att, self.a.lse[l % self.kept], b.qkv, T, cfg.head_dim,
                                   self.window)

    def forward(self):
        """Computes the trajectory a.x[0..2L] of the staged tokens, and the input of the output
        heads, rmsnorm(x[2L]), in a.y."""
        embedding_forward(self.state, self.tokens, self.p.wte)       # x[0]
        self.run_layers()

    def head_parts(self, P):
        """The matrices that compute the logits of heads 0 to P - 1: lm_head, and before it wte, if
        head 0 is tied to it"""
        (V, C), PV = self.p.wte.shape, P * self.cfg.vocab_size
        tied = V if self.cfg.tie_embeddings else 0       # columns of logits from wte
        parts = []
        for v0, v1, w, dw in ((0, tied, self.w.wte, self.g.wte),
                              (tied, PV, self.w.lm_head, self.g.lm_head)):
            if v1 > v0:
                shape = v1 - v0, C
                parts.append(HeadPart(slice(v0, v1), view(w, 0, shape), view(dw, 0, shape)))
        return parts

    def output_heads(self, P, training, add=True):
        """Computes logits and losses of output heads 0 to P - 1, and in training also the gradients
        of their weights and d.y = sum_k dlogits_k W_k.  It takes R rows at a time, since the logits
        of all rows would need too much memory.  add: see `gradient`"""
        a, V, parts, ops = self.a, self.cfg.vocab_size, self.head_parts(P), self.ops
        BT, R = len(a.y), len(a.logits)
        for r0 in range(0, BT, R):
            y, dy = a.y[r0:r0 + R], self.d.y[r0:r0 + R]
            logits = view(a.logits, 0, (len(y), P * V))
            for part in parts:
                ops.matmul(logits[:, part.columns], y, part.w)
            dlogits = cross_entropy(a.nll, logits, self.targets, self.weight, r0, V, self.shape[1])
            if training:
                for part in parts:           # the first one sets dy, the second one adds to it
                    dz = dlogits[:, part.columns]
                    ops.matmul_dx(dy, dz, part.w, add=part.columns.start > 0)
                    ops.matmul_dw(part.dw, dz, y, add or r0 > 0)
        if training:
            launch(sum_rows_kernel, self.results[:P], a.nll[:P], grid=P, block=256)

    def backward(self, add):
        """Walks back along the trajectory, from x[2L] to x[0], and adds the gradients of all
        weights to g, or sets those of matrices unless `add`.

        dx is the gradient of the point that the walk has reached.  At x[i + 1] = x[i] + f(x[i]), it
        is also the gradient of f, so the layer's products read it.  Adding to it what comes back
        through f makes it the gradient of x[i].  At the end, d.x is the gradient of x[0]."""
        cfg, p, w, g, a, d = self.cfg, self.p, self.w, self.g, self.a, self.d
        L, T, D, ops = cfg.n_layer, self.shape[1], cfg.head_dim, self.ops
        dx = d.x

        def step_backward(i):
            """dx, the gradient of x[i + 1], becomes that of x[i]; d.y is the gradient of
            rmsnorm(x[i]).  Returns y = rmsnorm(x[i]), which overwrites d.y."""
            x, rstd = self.saved(i)
            return rmsnorm_backward(dx, gain_of(g, i), d.y, d.partial, x, gain_of(p, i), rstd)

        def recompute(i, inside):
            """With --recompute, computes the activations inside a block again."""
            if self.kept < L:
                x, rstd = self.saved(i)
                rmsnorm_again(a.y, x, gain_of(p, i), rstd)
                inside(i // 2, self.of_layer(i // 2))

        dx.gpu_data.memset(0, stream=gpu.stream)        # x[2L] is read by the final norm only
        step_backward(2 * L)                 # here d.y is the gradient of the output heads' input
        for l in range(L - 1, -1, -1):
            k = l % self.kept
            recompute(2 * l + 1, self.gate)
            ops.matmul_dx(d.swiglu, dx, w.down[l])
            ops.matmul_dw(g.down[l], dx, a.swiglu[k], add)
            dgate_up = swiglu_backward(a.gate_up[k], d.swiglu)
            ops.matmul_dx(d.y, dgate_up, w.gate_up[l])
            y = step_backward(2 * l + 1)
            ops.matmul_dw(g.gate_up[l], dgate_up, y, add)
            recompute(2 * l, self.attend)
            ops.matmul_dx(d.att, dx, w.attn_proj[l])
            ops.matmul_dw(g.attn_proj[l], dx, a.att[k], add)
            ops.attention_backward(d.qkv, d.delta, d.att, a.att[k], a.lse[k], a.qkv[k], self.cos,
                                   self.sin, T, D, self.window)
            if cfg.qk_norm:
                head_norm_backward(d.qkv, g.q_norm[l], g.k_norm[l], d.qk_partial, a.qk[k],
                                   a.qk_rstd[k], p.q_norm[l], p.k_norm[l])
            if cfg.qkv_bias:
                bias_gradient(g.qkv_bias[l], d.qkv, d.bias_partial)
            ops.matmul_dx(d.y, d.qkv, w.qkv[l])
            y = step_backward(2 * l)
            ops.matmul_dw(g.qkv[l], d.qkv, y, add)

    def queue_gradient(self, outputs, add):
        """Queues all launches of `gradient` for heads 0 to outputs - 1, except for the gradient of
        the embedding; a graph records them.     add: do they add to g, or set it?"""
        if not add:
            self.clear_others(outputs)
        self.forward()
        self.output_heads(outputs, True, add)
        self.backward(add)

    def clear_others(self, outputs):
        """Queues g = 0 for the tensors whose gradients no matrix product sets: the embedding,
        unless it is tied to head 0; the heads from `outputs` on; gains and biases."""
        (V, C), tied = self.p.wte.shape, self.cfg.tie_embeddings
        heads = self.table[ne.Params._fields.index("lm_head")].start
        self.clear(heads + (outputs - tied) * V * C, self.flat.size)
        if not tied:
            self.clear(0, V * C)

    def clear(self, start, stop):
        """Queues g_flat[start:stop] = 0."""
        bytes_of = self.g_flat.dtype.itemsize
        view(self.g_flat, start, (stop - start,)).gpu_data.memset(
            0, bytes_of * (stop - start), stream=gpu.stream)

    def queue_losses(self):
        """Queues all launches of `losses`."""
        self.forward()
        self.output_heads(1, training=False)

    def stage(self, tokens, targets, weight):
        """Copies tokens (b, T), targets (P, b, T) and weight to the device, and pads them to B
        sequences.     weight: as for `stage_weight`"""
        (b, _), (B, T) = tokens.shape, self.shape
        V = self.cfg.vocab_size              # kernels do not check ids, and would read elsewhere
        for x in (tokens, targets):
            need(x.max() < V, f"expected token ids below {V}, got {x.max()}")
        need(tokens.min() >= 0, f"expected token ids from 0 on, got {tokens.min()}")
        self.staged_read.synchronize()       # the copy of an earlier call may still read `staged`
        staged = self.staged.reshape(-1, B, T)           # tokens, then targets of each head
        staged[0, :b] = tokens
        staged[0, b:] = -1                   # padding
        staged[1:, :b] = targets
        staged[1:, b:] = -1
        self.ids.copy_to_device(self.staged, stream=gpu.stream)
        self.stage_weight(weight, b)
        self.staged_read.record(gpu.stream)

    def stage_weight(self, weight, b):
        """Copies the weights of b sequences to self.weight (B, P, T), on the device, with zeros for
        the other sequences.

        weight: (b, P, T), or (b, P) or (P,) if all tokens of a sequence have the same weight.  Then
        B P weights are copied, and self.weight repeats each of them T times, by a stride of 0"""
        (B, T), P = self.shape, self.cfg.n_mtp
        if np.ndim(weight) == 3:
            x = self.weights.get(3) or self.weights.setdefault(3, WeightArrays((B, P, T)))
            self.weight = x.device
        else:
            x = self.weights[2]
            self.weight = view(x.device, 0, (B, P, T), (P, 1, 0))
        x.staged[:b], x.staged[b:] = weight, 0
        x.device.copy_to_device(x.staged, stream=gpu.stream)

    def gradient(self, tokens, targets, weight):
        """Queues g += d(sum_bk weight[b, k] CE_bk)/dp of one micro-batch, and its losses.  The
        first micro-batch after an update sets g instead, since a product takes less time to write
        its sums than to add them.  Output heads after the last one with a nonzero weight are not
        computed.

        tokens (B, T), targets (P, B, T), weight (B, P), or (P,) for every sequence, or (B, P, T)
        with a factor of its own for each token"""
        outputs = self.outputs_with(weight)
        self.prepare(*tokens.shape)
        self.stage(tokens, targets, weight)
        kind = outputs, self.add, np.ndim(weight) == 3
        graph = self.gradient_graphs.setdefault(kind, Graph())
        graph(functools.partial(self.queue_gradient, outputs, self.add))
        self.add = True
        self.embedding_gradient(tokens)

    def embedding_gradient(self, tokens):
        """Queues the gradient of the embedding, whose rows are x[0].  The host sorts the tokens
        while the device computes the rest of the gradient."""
        embedding_backward(self.g.wte, self.d.x, self.staged_runs(tokens))

    def staged_runs(self, tokens):
        """Queues the copy of the Runs of tokens (b, T) to the device, and returns them there."""
        runs = runs_of(tokens.reshape(-1), self.cfg.vocab_size)
        self.runs_read.synchronize()         # an earlier copy may still read pinned_runs
        found, end = [], 0
        for x in runs:
            self.pinned_runs[end:end + x.size] = x
            found.append(view(self.runs, end, x.shape))
            end += x.size
        self.runs.copy_to_device(self.pinned_runs, stream=gpu.stream)
        self.runs_read.record(gpu.stream)
        return Runs(*found)

    def begin_update(self):
        """Queues g = 0 if no `gradient` has set it since the last update.  The next `gradient` sets
        g, and does not add to it."""
        if not self.add:
            self.clear(0, self.flat.size)
        self.add = False

    def update(self, hyper):
        """Clips the gradients and updates the parameters.  The next `gradient` begins with zeros.
        Muon updates the matrices of the layers, unless hyper.muon_lr is 0, and AdamW all others.
        Output heads whose weights were all zero since the last update are not updated.  If |g| is
        not finite, nothing changes.

        hyper: nanoeuler.Hyper     Waits for the device, and returns (cross-entropy of each head,
        summed since the last update, and |g| before clipping)."""
        self.begin_update()
        steps = self.stage_hyper(hyper)
        graph = self.updates.setdefault((frozenset(self.weighted_heads), steps), Graph())
        graph(functools.partial(self.queue_update, steps))
        self.weighted_heads = set()
        results = to_host(self.results)
        self.results.copy_to_device(self.zero, stream=gpu.stream)
        return results[:-1], float(results[-1])

    def stage_hyper(self, hyper):
        """Copies hyper to the device.  Returns the number of Newton-Schulz steps; 0: no Muon."""
        if hyper.muon_lr and not self.muon:  # a caller without options
            self.muon = Muon(self.cfg, self.dtype, self.owned(self.flat.size),
                             self.make_ops(self.top))
        self.staged_hyper[0] = hyper         # the copy below may still read it after returning
        if hyper.muon_lr:
            self.staged_hyper[1] = ne.hyper_of_embedding(hyper)
        self.hyper.copy_to_device(self.staged_hyper, stream=gpu.stream)
        return int(hyper.newton_schulz) if hyper.muon_lr else 0

    def queue_update(self, steps):
        """Queues all launches of `update`.     steps: as stage_hyper returns it"""
        square_sums(self.partial, self.g_flat)
        self.queue_optimizers(steps, self.partial)

    def queue_optimizers(self, steps, partial):
        """Queues the update of all parameters that this process owns.  partial: square_sums of all
        gradients"""
        own = self.owned(self.flat.size)
        hyper, of_embedding = (view(self.hyper, i * len(row), row.shape)
                               for i, row in enumerate(self.staged_hyper))
        by_adamw = [(slice(0, self.flat.size), hyper)]
        if steps:
            by_adamw = [(ne.entries_of(self.cfg, name), settings)
                        for name, settings in (("adamw_embedding", of_embedding), ("adamw", hyper))]
            self.muon.update(self.entries(own), hyper, steps, partial, self.results)
        for part, settings in by_adamw:
            part = slice(max(part.start, own.start), min(part.stop, own.stop))
            for x in self.without_heads_off(part):
                adamw(self.entries(x), self.n_decay - x.start, settings, partial, self.results)

    def entries(self, x):
        """The Entries of slice x, which this process owns; it has moments of what it owns only"""
        n, start = x.stop - x.start, self.owned(self.flat.size).start
        return Entries(*(view(y, x.start, (n,)) for y in (self.flat, self.copies, self.g_flat)),
                       *(view(y, x.start - start, (n,)) for y in (self.m, self.v)))

    def losses(self, tokens, targets):
        """The cross-entropy of head 0, in nats, summed over the tokens of each sequence: (B,)
        float64     tokens, targets (B, T)"""
        return self.token_losses(tokens, targets).sum(1)

    def token_losses(self, tokens, targets):
        """The cross-entropy of head 0 at each token, in nats, 0 where the target is -1: (B, T)
        float64     tokens, targets (B, T)"""
        n, T = tokens.shape
        found = []
        if self.shape and self.shape[1] == T:
            most = self.shape[0]             # the buffers that exist
        else:
            most = max(1, self.fitting(T))
        self.prepare(min(n, most), T)
        B, _ = self.shape
        for b in range(0, n, B):
            x = tokens[b:b + B]
            y = np.full((self.cfg.n_mtp, *x.shape), -1, np.int32)    # targets for head 0 only
            y[0] = targets[b:b + B]
            self.stage(x, y, 0)
            self.loss_graph(self.queue_losses)
            found.append(to_host(self.a.nll)[0].reshape(self.shape)[:len(x)].astype(np.float64))
        return np.concatenate(found)

    def buffers(self):
        """(parameters, m, v) on the host, float32, as a checkpoint stores them"""
        return [to_host(x).astype(np.float32, copy=False) for x in (self.flat, self.m, self.v)]

    first_bad_tensor = ne.Model.first_bad_tensor
    outputs_with, without_heads_off = ne.Model.outputs_with, ne.Model.without_heads_off

    @staticmethod
    def host(x):
        """A copy of x on the host; bfloat16 becomes float32"""
        return from_bf16(to_host(x))

    def decoder(self):
        """A decoder with a copy of the parameters, so that the next update does not change them.
        Its matrices have the type of training: bfloat16, if that is the model's."""
        n = self.n_decay                     # size of all matrices, which come first
        sources = view(self.copies, 0, (n,)), view(self.flat, n, (self.flat.size - n,))
        matrices, gains = (new(x.shape, x.dtype) for x in sources)
        for to, source in zip((matrices, gains), sources):
            to.copy_to_device(source, stream=gpu.stream)
        weights = "bf16" if matrices.dtype == np.uint16 else "f32"
        return decoder_class(self.cfg, weights, self.top).of(self.cfg, matrices, gains, self.top)

# ==== 6 Generation ====
@cuda_kernel
def matvec_kernel(y, w, x):
    """y[n] = sum_k w[n, k] x[k]     one warp per n     grid N / ROW_WARPS, block (32, ROW_WARPS)"""
    N, K = w.shape
    lane, n = cuda.threadIdx.x, cuda.blockIdx.x * ROW_WARPS + cuda.threadIdx.y
    s = ctype(x).type(0)
    if n < N:
        for k in range(lane, K, WARP):
            s += value(w[n, k]) * value(x[k])
        s = warp_sum(s)
        if lane == 0:
            y[n] = s

def matvec(y, w, x):
    """y = w x     y (N,), w (N, K), x (K,)"""
    launch(matvec_kernel, y, w, x, grid=cdiv(len(w), ROW_WARPS), block=(WARP, ROW_WARPS))

@cuda_kernel
def rope_cache_kernel(qkv, kc, vc, cos, sin, at, H):
    """RoPE of q and k of one token at position at[1]; appends its k and v to the KV cache.
    qkv (QKV,), kc, vc (G, T, D), at = (token, position)     grid H + 2 G, one warp each"""
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
    """Attention of one token to the last `window` tokens in the KV cache, itself included.
    o (HD,), qkv (QKV,), kc, vc (G, T, D), scores (H, T) scratch, at = (token, position)
    One block of 256 threads per head.
    Unlike the ring of nanoeuler.Decoder, this cache also keeps the tokens before the window."""
    h, x, n, D = cuda.blockIdx.x, cuda.threadIdx.x, at[1] + 1, kc.shape[2]
    first = max(0, n - window)
    g, row = h * kc.shape[0] // cuda.gridDim.x, scores[h]
    m, l = -ctype(o).type(math.inf), ctype(o).type(0)
    for t in range(first + x // WARP, n, 8):         # one of the 8 warps per key
        s = ctype(o).type(0)
        for i in range(x % WARP, D, WARP):
            s += qkv[h * D + i] * kc[g, t, i]
        s = warp_sum(s) * scale
        if x % WARP == 0:
            row[t] = s
    cuda.syncthreads()                       # all scores are stored
    for t in range(first + x, n, 256):
        m = max(m, row[t])
    m = block_max(m)
    for t in range(first + x, n, 256):
        row[t] = exp(row[t] - m)
        l += row[t]
    l = block_sum(l)                         # it has barriers: all weights are stored
    for i in range(x, D, 256):
        s = ctype(o).type(0)
        for t in range(first, n):
            s += row[t] * vc[g, t, i]
        o[h * D + i] = s / l

class RowOps(Ops):
    """Ops of a decoder, whose matrices out and x have one row"""
    def matmul(self, out, x, w):
        matvec(as_vector(out), w, as_vector(x))

def as_vector(x):
    """The numbers of x as a vector.  No copy."""
    return view(x, 0, (x.size,))

class Decoder(Layers, ne.Decoder):
    """nanoeuler.Decoder with its KV cache on the device.  It computes the rows of a step one by
    one, with one graph launch per token.  `make_decoder` chooses between it and a faster one."""
    rows_are_cheap = samples_itself = False
    formats, fastest = ("f32", "bf16"), "f32"

    @staticmethod
    def ready():
        """Nothing to do: kernels are compiled when they are first launched."""

    def __init__(self, cfg, flat, weights="f32", slots=1, length=0, top=PATHS[-1]):
        """flat: the parameters, as an array on the host, as Params of an open checkpoint, or, with
        f32 weights, as an array on the device
        weights: f32, bf16, or "" for the one that this class computes faster
        top: the fastest kernel path that it may use"""
        open_device()
        flat = ne.flat_of(cfg, flat)
        need(weights in ("", "f32", "bf16"),
             f"--weights is {weights}; on the GPU, expected f32 or bf16")
        self.begin(cfg, slots, length)
        self.top, self.kept_as = top, weights or self.fastest
        shapes = [shape for _, shape, *_ in ne.param_table(cfg)]
        n = sum(map(math.prod, shapes[ne.MATRICES]))     # matrices come first
        matrices, gains = flat[:n], flat[n:]
        if self.kept_as == "bf16":
            matrices = to_bf16(matrices)
        if isinstance(flat, np.ndarray):
            matrices, gains = to_device(matrices), to_device(gains)
        self.take(matrices, gains)

    @classmethod
    def of(cls, cfg, matrices, gains, top):
        """A decoder whose parameters are on the device already, in two flat arrays"""
        decoder = object.__new__(cls)
        decoder.begin(cfg, 1, 0)
        decoder.top, decoder.kept_as = top, "bf16" if matrices.dtype == np.uint16 else "f32"
        decoder.take(matrices, gains)
        return decoder

    def take(self, matrices, gains):
        """Uses these parameters, two flat arrays on the device in the order of param_table."""
        shapes = [shape for _, shape, *_ in ne.param_table(self.cfg)]
        self.weights = ne.Params(*ne.slices(matrices, shapes[ne.MATRICES]),
                                 *ne.slices(gains, shapes[ne.VECTORS]))
        self.allocate()

    def begin(self, cfg, slots, length):
        super().begin(cfg, slots, length)
        self.heads = 0                       # no drafts: rows are read one by one anyway

    def allocate(self):
        """Allocates the KV caches, and the activations of one token."""
        cfg, self.p, dtype = self.cfg, self.weights, self.weights.final_norm.dtype
        T, C, H, D, F = self.length, cfg.n_embd, cfg.n_head, cfg.head_dim, cfg.n_hidden
        cache = cfg.n_layer, cfg.n_kv_head, T, D

        def buffer(*shape):
            return new(shape, dtype)

        self.cos, self.sin = map(to_device, ne.rope_table(cfg, dtype))
        self.slots = [(buffer(*cache), buffer(*cache), Graph()) for _ in self.held_ids]
        self.use(0)
        self.scores = buffer(H, T)
        self.w, self.ops, self.state = self.p, RowOps(), buffer(1, C)
        y = buffer(1, C)
        self.unused = buffer(1, C), buffer(1)            # saved, for a backward pass
        qk, qk_rstd = (buffer(1, (H + cfg.n_kv_head) * n) for n in (D, 1))
        self.row = LayerBuffers(y, buffer(1, (H + 2 * cfg.n_kv_head) * D), qk, qk_rstd,
                                buffer(1, H * D), buffer(1, 2 * F), buffer(1, F))
        self.device_logits = buffer(cfg.vocab_size)
        self.at = to_device(np.zeros(2, np.int32))       # token, position

    def use(self, slot):
        self.kc, self.vc, self.graph = self.slots[slot]

    def copy(self, source, slot, n):
        for to, of in zip(self.slots[slot][:2], self.slots[source][:2]):
            to.copy_to_device(of, stream=gpu.stream)     # all of it, which is as fast
        self.held_ids[slot] = self.held_ids[source][:n]
        return n

    def compute(self, rows):
        """Computes a step row by row; returns the logits of the rows that request them."""
        wanted, found = {*rows.wanted.tolist()}, []
        for r, (token, slot, position) in enumerate(zip(*map(np.ndarray.tolist, rows[:3]))):
            self.use(slot)
            logits = self.decode(token, position)
            if r in wanted:
                found.append(logits)
        return np.array(found) if found else np.zeros((0, self.cfg.vocab_size), np.float32)

    def guesses(self, row):
        return np.zeros((0, self.cfg.vocab_size), np.float32)

    def of_layer(self, l):
        return self.row

    def saved(self, i):
        return self.unused

    def rotate_and_attend(self, l, b):
        """Appends k and v to the KV cache, and attends to it."""
        cfg, qkv, at = self.cfg, as_vector(b.qkv), self.at
        launch(rope_cache_kernel, qkv, self.kc[l], self.vc[l], self.cos, self.sin, at, cfg.n_head,
               grid=cfg.n_head + 2 * cfg.n_kv_head, block=WARP)
        scale = number(qkv, 1 / math.sqrt(cfg.head_dim))
        launch(attention_decode_kernel, as_vector(b.att), qkv, self.kc[l], self.vc[l], self.scores,
               at, self.window, scale, grid=cfg.n_head, block=256)

    def queue(self):
        """Queues one token through the network, as nanoeuler.decode_step."""
        p = self.p
        embedding_forward(self.state, view(self.at, 0, (1,)), p.wte)
        self.run_layers()
        head = p.wte if self.cfg.tie_embeddings else p.lm_head[0]
        matvec(self.device_logits, head, as_vector(self.row.y))

    def decode(self, token, position):
        """Returns the logits (V,) after this token of the slot in use."""
        at = np.array([token, position], np.int32)
        self.at.copy_to_device(at, stream=gpu.stream)
        self.graph(self.queue)
        return to_host(self.device_logits)

@functools.cache
def fast_decoder():
    """Returns the module nanoeuler_parts/decode/decoder.py, or None if the folder is missing.  It
    needs tensor_cores."""
    try:
        from nanoeuler_parts.decode import decoder
    except ModuleNotFoundError as e:
        if not (e.name or "").startswith("nanoeuler_parts.decode"):
            raise
        note_once("nanoeuler_parts/decode is missing, so generation is slower")
        return None
    return decoder

def rows_refused(cfg, top=PATHS[-1]):
    """Returns why tensor cores cannot decode a model of this shape in bfloat16, or "" """
    if not tensor_cores():
        return "nanoeuler_parts/tensor_cores is missing"
    if not fast_decoder():
        return "nanoeuler_parts/decode is missing"
    if kernel_path(top) == "portable":
        return "--matmul is portable, or the GPU is older than capability 8.0"
    return fast_decoder().refused(cfg, kernel_path(top) == "wgmma")

def decoder_class(cfg, weights, top):
    """Returns the class of the fastest decoder of a model of this shape.  If the matrices may be
    bfloat16 and tensor cores can decode them, it is RowsDecoder of decode/decoder.py, otherwise
    Decoder.     weights, top: see Decoder"""
    if weights not in ("", "bf16"):
        return Decoder
    if reason := rows_refused(cfg, top):
        if weights:
            note_once(f"without tensor cores, generation is slower: {reason}")
        return Decoder
    return fast_decoder().RowsDecoder

class DecoderMaker:
    """Makes decoders.  It stands for their class where a function takes one, as `nanoeuler.load`
    does."""
    ready, formats = staticmethod(Decoder.ready), Decoder.formats

    def __call__(self, cfg, flat, weights="f32", slots=1, length=0, top=PATHS[-1]):
        """Returns the fastest decoder of this model: see `decoder_class`.  The arguments are those
        of Decoder.  If `weights` is "", the matrices are bfloat16 where tensor cores can decode
        them, otherwise float32."""
        open_device()
        return decoder_class(cfg, weights, top)(cfg, flat, weights, slots, length, top)

make_decoder = DecoderMaker()

# ==== 7 Optimizer ====
NORM_PARTS = 512                             # partial sums of |g|^2; fixed, as GAIN_PARTS

@cuda_kernel
def square_sums_kernel(partial, g):
    """partial[i] = the sum of the squares that block i reads, in float64.  Blocks stride over g.
    grid NORM_PARTS, block 256"""
    s = 0.0
    for i in range(cuda.grid(1), g.size, cuda.gridsize(1)):
        x = types.float64(g[i])              # first, since 2e19 squared overflows float32
        s += x * x
    s = block_sum(s)
    if cuda.threadIdx.x == 0:
        partial[cuda.blockIdx.x] = s

@inlined
def gradient_norm(partial):
    """|g|, from the sums of squares of square_sums_kernel, for a block of 256 threads.  Each block
    of an update computes it again, so no further kernel is needed between them."""
    total = 0.0
    for i in range(cuda.threadIdx.x, partial.size, 256):
        total += partial[i]
    return math.sqrt(block_sum(total))

# Kernels read hyperparameters from device memory, since a graph cannot change arguments: hyper[LR]
# is the field `lr` of nanoeuler.Hyper, in float64
LR, BETA1, BETA2, EPS, WEIGHT_DECAY, CLIP, CORRECT1, CORRECT2 = map(ne.Hyper._fields.index, (
    "lr", "beta1", "beta2", "eps", "weight_decay", "clip", "correct1", "correct2"))
MUON_LR, MOMENTUM = map(ne.Hyper._fields.index, ("muon_lr", "momentum"))

@made_once
def adamw_kernel(W):
    load, store = vector(W)

    @cuda_kernel
    def update(p, w, g, m, v, n_decay, hyper, partial, results):
        """nanoeuler.adamw, W entries per thread, striding.  Also w = p, rounded to the type of w,
        and results[-1] = |g|, from its partial sums of squares."""
        dtype, norm = p.dtype.type, gradient_norm(partial)
        if cuda.grid(1) == 0:
            results[results.size - 1] = norm
        if not math.isfinite(norm):
            return
        scale = dtype(min(1.0, hyper[CLIP] / (norm + 1e-30)))
        rate, eps = dtype(hyper[LR] / hyper[CORRECT1]), dtype(hyper[EPS])
        old1, old2 = dtype(hyper[BETA1]), dtype(hyper[BETA2])
        new1, new2 = dtype(1 - hyper[BETA1]), dtype(1 - hyper[BETA2])
        unbias = dtype(1 / math.sqrt(hyper[CORRECT2]))
        one = dtype(1)
        keep_of_matrices = dtype(1 - hyper[LR] * hyper[WEIGHT_DECAY])
        for i in range(cuda.grid(1) * W, p.size, cuda.gridsize(1) * W):
            pi, gi, mi, vi = load(p, i), load(g, i), load(m, i), load(v, i)
            for j in range(W):
                x = gi[j] * scale
                keep = keep_of_matrices if i + j < n_decay else one
                # Keep this one statement: two would change which operations become fused
                # multiply-adds, and so the bits
                mi[j], vi[j] = old1 * mi[j] + new1 * x, old2 * vi[j] + new2 * x * x
                pi[j] = keep * pi[j] - rate * mi[j] / (math.sqrt(vi[j]) * unbias + eps)
            store(p, i, pi)
            store(w, i, pi)
            store(m, i, mi)
            store(v, i, vi)
    return update

# The buffers of a slice of the parameters: master weights p, operands of products w, gradients g,
# moments m and v
Entries = namedtuple("Entries", "p w g m v")

def square_sums(partial, g):
    """partial (NORM_PARTS,) = sums of squares of parts of g, which add up to |g|^2"""
    launch(square_sums_kernel, partial, g, grid=NORM_PARTS, block=256)

def adamw(entries, n_decay, hyper, partial, results):
    """Clips the gradients, takes a step of AdamW, and stores |g| in results[-1].  If |g| is not
    finite, nothing else changes.

    entries: Entries, flat     n_decay: the first n_decay of them decay; none if it is negative
    partial: square_sums of all gradients, also of those that are not in entries"""
    p = entries.p
    # m and v begin where this process's part begins, so they may be aligned differently from p
    is_aligned = p.size % 4 == 0 and all(
        int(x.gpu_data.device_pointer) % min(16, 4 * x.dtype.itemsize) == 0 for x in entries)
    update, n_decay = adamw_kernel(4 if is_aligned else 1), min(max(0, n_decay), p.size)
    launch(update, *entries, n_decay, hyper, partial, results, grid=1024, block=256)

# ---- Muon: nanoeuler.py explains it.  All matrices of one shape (N, K) are updated together:
#
#     g, m --nesterov--> x (n, N, K) --normalize--> x --Newton-Schulz--> x --step--> p, w
#
# starts (n,): where each matrix begins in the buffers of Entries.  x, and the matrices of the
# Newton-Schulz iteration, have the type of matrix products.
MATRIX_PARTS = 32                            # blocks per matrix, and partial sums of its squares

@made_once
def nesterov_kernel(W):
    load, store = vector(W)

    @cuda_kernel
    def nesterov(x, squares, g, m, starts, hyper, partial, results):
        """For each matrix z, with g' = g times the factor of clipping:
        m = momentum m + (1 - momentum) g',  x[z] = momentum m + (1 - momentum) g'
        Also results[-1] = |g|, and squares[z, i] = the sum of the squares of x[z] in block i

        grid (MATRIX_PARTS, n), block 256     x (n, N, K), squares (n, MATRIX_PARTS) float64"""
        dtype, norm, z = m.dtype.type, gradient_norm(partial), cuda.blockIdx.y
        if cuda.grid(1) == 0 and z == 0:
            results[results.size - 1] = norm
        if not math.isfinite(norm):
            return
        scale = dtype(min(1.0, hyper[CLIP] / (norm + 1e-30)))
        old, new = dtype(hyper[MOMENTUM]), dtype(1 - hyper[MOMENTUM])
        size, start, ss = x.shape[1] * x.shape[2], starts[z], 0.0
        for i in range((256 * cuda.blockIdx.x + cuda.threadIdx.x) * W, size,
                       256 * cuda.gridDim.x * W):
            gi, mi = load(g, start + i), load(m, start + i)
            for j in range(W):
                v = gi[j] * scale
                mi[j] = old * mi[j] + new * v
                v = old * mi[j] + new * v
                ss += types.float64(v) * types.float64(v)
                gi[j] = v
            store(m, start + i, mi)
            store(x, z * size + i, gi)
        ss = block_sum(ss)
        if cuda.threadIdx.x == 0:
            squares[z, cuda.blockIdx.x] = ss
    return nesterov

@made_once
def normalize_kernel(W):
    load, store = vector(W)

    @cuda_kernel
    def normalize(x, squares):
        """x[z] /= max(|x[z]|, 1e-7), so that no singular value is above 1
        grid (MATRIX_PARTS, n), block 256     x (n, N, K), squares as above"""
        z, total = cuda.blockIdx.y, 0.0
        for i in range(squares.shape[1]):
            total += squares[z, i]
        factor = ctype(x).type(1 / max(math.sqrt(total), 1e-7))
        size = x.shape[1] * x.shape[2]
        for i in range((256 * cuda.blockIdx.x + cuda.threadIdx.x) * W, size,
                       256 * cuda.gridDim.x * W):
            vec = load(x, z * size + i)
            for j in range(W):
                vec[j] *= factor
            store(x, z * size + i, vec)
    return normalize

@cuda_kernel
def polynomial_kernel(out, x, a, b, c):
    """out[z] = a I + b x[z] + c out[z]     grid (MATRIX_PARTS, n), block 256     (n, N, N) both"""
    z, N = cuda.blockIdx.y, x.shape[1]
    for i in range(256 * cuda.blockIdx.x + cuda.threadIdx.x, N * N, 256 * cuda.gridDim.x):
        row, column = i // N, i % N
        v = c * value(out[z, row, column]) + b * value(x[z, row, column])
        if row == column:
            v += a
        out[z, row, column] = stored(out, v)

@made_once
def muon_kernel(W):
    load, store = vector(W)

    @cuda_kernel
    def step(p, w, x, starts, hyper, partial):
        """p -= muon_lr (sqrt(max(1, N / K)) x[z] + weight_decay p),   w = p, for each matrix z
        grid (MATRIX_PARTS, n), block 256     x (n, N, K)"""
        dtype, norm, z = p.dtype.type, gradient_norm(partial), cuda.blockIdx.y
        if not math.isfinite(norm):
            return
        N, K = x.shape[1], x.shape[2]
        keep = dtype(1 - hyper[MUON_LR] * hyper[WEIGHT_DECAY])
        rate = dtype(hyper[MUON_LR] * math.sqrt(max(1.0, N / K)))
        for i in range((256 * cuda.blockIdx.x + cuda.threadIdx.x) * W, N * K,
                       256 * cuda.gridDim.x * W):
            pi, xi = load(p, starts[z] + i), load(x, z * N * K + i)
            for j in range(W):
                pi[j] = keep * pi[j] - rate * xi[j]
            store(p, starts[z] + i, pi)
            store(w, starts[z] + i, pi)
    return step

def product_of_each(out, a, b):
    """out[z] = a[z] b[z]     out (n, M, N), a (n, M, K), b (n, K, N), any of them transposed"""
    batched_matmul(out, a, b)

def polynomial_of_each(out, x, a, b, c):
    """out[z] = a I + b x[z] + c x[z] x[z]     out, x (n, N, N), symmetric"""
    product_of_each(out, x, x)
    launch(polynomial_kernel, out, x, *(number(x, v) for v in (a, b, c)),
           grid=(MATRIX_PARTS, len(x)), block=256)

def orthogonalize(ops, x, other, gram, square, steps):
    """In each step, for each matrix X of x:  X <- a X + b G X + c G G X,  G = X X^T, or the same
    with G on the other side, G = X^T X, if that is smaller.  X becomes nearly U V^T.
    Returns the array that holds the result: x or other.
    x, other (n, N, K), gram, square (n, s, s), s = min(N, K)"""
    tall = x.shape[1] > x.shape[2]
    for _ in range(steps):
        ops.product_of_each(gram, *((transposed(x), x) if tall else (x, transposed(x))),
                            symmetric=True)
        ops.polynomial_of_each(square, gram, *ne.NEWTON_SCHULZ)
        ops.product_of_each(other, *((x, square) if tall else (square, x)))
        x, other = other, x
    return x

MUON_BYTES = 256 << 20                       # of the matrices that are updated together, at most

def muon_groups(cfg, dtype, part):
    """[((N, K), starts)]: Muon's matrices in `part`, a slice of the flat buffers that cuts none of
    them.  The matrices of a group have one shape.  starts: where each begins, counted from
    part.start"""
    starts, groups = {}, []
    for start, *shape in ne.muon_matrices(cfg).tolist():
        if part.start <= start < part.stop:
            starts.setdefault(tuple(shape), []).append(start - part.start)
    for shape, found in starts.items():
        n = max(1, MUON_BYTES // (math.prod(shape) * dtype.itemsize))
        groups += [(shape, sorted(found)[i:i + n]) for i in range(0, len(found), n)]
    return groups

def muon_sizes(groups):
    """(numbers in x, numbers in gram, matrices) of the largest groups"""
    return [max((f(len(starts), *shape) for shape, starts in groups), default=0) for f in (
        lambda n, N, K: n * N * K, lambda n, N, K: n * min(N, K) ** 2, lambda n, N, K: n)]

def muon_bytes(cfg, dtype, part):
    """The bytes of Muon's working memory"""
    size, square, n = muon_sizes(muon_groups(cfg, dtype, part))
    return 2 * (size + square) * dtype.itemsize + 8 * n * MATRIX_PARTS

class Muon:
    """Updates those matrices of a slice of the parameters that Muon updates."""

    def __init__(self, cfg, dtype, part, ops):
        """part: slice of the flat buffers; it cuts no matrix     dtype: of matrix products
        ops: Ops of its own, since its buffers live as long as it does"""
        self.ops = ops
        groups = muon_groups(cfg, dtype, part)
        size, square, n = muon_sizes(groups)
        self.groups = [(shape, to_device(starts, np.int64)) for shape, starts in groups]
        # neighbours loaded at once: all matrices must begin and end at a multiple of them
        cuts = [part.start, *(x for (N, K), starts in groups for x in (*starts, N * K))]
        self.W = 4 if all(x % 4 == 0 for x in cuts) else 1
        self.x, self.other = new(size, dtype), new(size, dtype)
        self.gram, self.square = new(square, dtype), new(square, dtype)
        self.squares = new((n, MATRIX_PARTS), np.float64)

    def update(self, entries, hyper, steps, partial, results):
        """Queues Muon on its matrices: clips, updates, and stores |g| in results[-1].  If |g| is
        not finite, nothing else changes.
        entries: Entries of its part; v is not used     steps: Newton-Schulz iterations
        hyper, partial, results: as in adamw"""
        for (N, K), starts in self.groups:
            n, s = starts.size, min(N, K)
            x, other = (view(buffer, 0, (n, N, K)) for buffer in (self.x, self.other))
            gram, square = (view(buffer, 0, (n, s, s)) for buffer in (self.gram, self.square))
            grid = MATRIX_PARTS, n
            launch(nesterov_kernel(self.W), x, self.squares, entries.g, entries.m, starts, hyper,
                   partial, results, grid=grid, block=256)
            launch(normalize_kernel(self.W), x, self.squares, grid=grid, block=256)
            x = orthogonalize(self.ops, x, other, gram, square, steps)
            launch(muon_kernel(self.W), entries.p, entries.w, x, starts, hyper, partial,
                   grid=grid, block=256)

# ==== 11 Command line ====
# nanoeuler_parts/tools/on_gpu.py declares the verbs and their flags.
def main(argv=None):
    from nanoeuler_parts.cli import run_verb
    from nanoeuler_parts.tools.on_gpu import LONG, TITLE, VERBS
    take_own_gpu()
    verb, *others = (sys.argv[1:] if argv is None else argv) or ["test"]
    try:
        return run_verb(VERBS, TITLE, [LONG.get(verb, verb), *others])
    except CudaAPIError as e:
        print(f"nanoeuler: error of the GPU: {' '.join(str(e).split())}; to check the machine: "
              f"{HERE} doctor", file=sys.stderr)
        return 2
