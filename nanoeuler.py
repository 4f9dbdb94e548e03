"""NanoEuler: a GPT from scratch in Python, compiled by Numba, differentiated by hand.

A residual block x <- x + f(x) is one forward-Euler step, of step size 1, of dx/dt = f(x): depth is
integration time.  This file is the whole engine for the CPU, meant to be read top to bottom; bpe.py
is its tokenizer, and data/ has what reads texts, chats, files of tensors and the command line.

    python nanoeuler.py train [small|big]      learn data/shakespeare.txt, write nanoeuler.bin
    python nanoeuler.py sft [FILE]             teach it to answer, write nanoeuler_chat.bin
    python nanoeuler.py dpo [FILE]             teach it to prefer, write nanoeuler_dpo.bin
    python nanoeuler.py chat [FILE]            continue or answer what you type
    python nanoeuler.py generate "ROMEO:"      one continuation
    python nanoeuler.py lens "To be or not"    the Euler steps of one prompt, made visible
    python nanoeuler.py plot LOG...            loss curves
    python nanoeuler.py info FILE              what is in a checkpoint
    python nanoeuler.py export FILE DIR        for Hugging Face; --gguf OUT for llama.cpp
    python nanoeuler.py import DIR|GGUF OUT    a Llama from there

Contents
    1    Configuration                        4.7  Cross-entropy
    2    Memory: flat buffers and views       5    Model: forward, backward, the parallel driver
    3    Building blocks: the register tile   6    Optimizer
    4.1  Matmul                               7    Data: batches, examples, their losses
    4.2  Embedding                            8    Checkpoint
    4.3  RMSNorm                              9    Training: from a text, and from examples
    4.4  RoPE                                 10   Inference
    4.5  Attention                            11   Import and export
    4.6  SwiGLU                               12   Command line

Shapes  B batch, T time, C n_embd, H n_head, G n_kv_head, D head_dim, F n_hidden, V vocab_size,
        L n_layer, P n_mtp; HD = H * D, QKV = (H + 2 G) * D.  An index is the lower-case letter.
        In 4.5 P, S and dS are the matrices of the papers.
Names   p parameters, g their gradients, a activations, d gradients of activations, s scratch;
        w and wt: W and W^T packed for the matmul; in 4.1 w is a tile's width, in 4.3 the gains.
        Forward is y = x W^T, backward dx = dy W.
Threads One sequence is one task of the forward and backward pass, a block of rows of a matrix one
        task of its gradient.  Each number is written by one task, in one order: the result does not
        depend on how many threads there are or which of them takes which task.
"""
import codecs
import contextlib
import hashlib
import importlib
import itertools
import json
import math
import os
import pathlib
import shlex
import signal
import sys
import time
from collections import namedtuple
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial

os.environ.setdefault("NUMBA_OPT", "1")      # as fast as 3 for this file, 25 % less compile time
os.environ.setdefault("OMP_WAIT_POLICY", "passive")    # a waiting thread leaves its core,
os.environ.setdefault("GOMP_SPINCOUNT", "10000")       # but not between two matrices of a token

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import float32, get_num_threads, int32, njit, prange, types
from numba.core import caching, cgutils
from numba.extending import intrinsic, overload

import bpe
from bpe import UserError, need, reading
from data.chats import ALPACA, chat_ids, held_out, prompt_of, read_examples
from data.commands import CHAT, FILE, FORCE, RUN, TEXT, Settings, arg, bench, out, run_verb, setting
from data.kernels import compile_kernels
from data.tensors import map_tensors, replacing, write_tensors
from data.texts import encode_cut, excerpt, read_log, read_text, split_text, tokenize

# fastmath without nnan and ninf: an injected NaN must still be found (section 9)
FAST = {"contract", "reassoc", "arcp", "nsz", "afn"}
OPTIONS = dict(fastmath=FAST, error_model="numpy", nogil=True, cache=True)
jit = njit(**OPTIONS)
jit_parallel = njit(parallel=True, **OPTIONS)

# ==== 1 Configuration ====
@dataclass(frozen=True)
class Config(Settings):
    """Everything that shapes the model.  A checkpoint stores these fields and no others."""
    n_embd: int = setting(128, 1, 1 << 16, "C, width of the residual stream")
    n_head: int = setting(4, 1, 1 << 12, "H, query heads")
    n_kv_head: int = setting(2, 1, 1 << 12, "G, key/value heads, each for H / G queries")
    head_dim: int = setting(32, 2, 1 << 12, "D")
    n_layer: int = setting(4, 1, 1 << 12, "L, each layer is two Euler steps")
    n_hidden: int = setting(344, 1, 1 << 18, "F, width of the SwiGLU")
    seq_len: int = setting(128, 1, 1 << 17, "longest context, tokens")
    vocab_size: int = setting(512, 1, 1 << 20, "V, with 256 bytes and special tokens")
    n_mtp: int = setting(4, 1, 16, "P, head k predicts token t + 1 + k")
    rope_theta: float = setting(10000.0, 1, 1e12)
    norm_eps: float = setting(1e-5, 1e-12, 1)
    tie_embeddings: bool = False                       # head 0 shares the matrix of the embedding

    def check(self):
        super().check()
        need(self.n_head % self.n_kv_head == 0,
             f"n_head {self.n_head} is no multiple of n_kv_head {self.n_kv_head}")
        need(self.head_dim % 2 == 0, f"head_dim is {self.head_dim}, expected an even number")
        return self

PRESETS = {
    "small": Config(),
    "big": Config(n_embd=320, n_head=10, n_kv_head=5, n_layer=8, n_hidden=856, seq_len=256),
    "base": Config(n_embd=768, n_head=12, n_kv_head=4, head_dim=64, n_layer=16, n_hidden=2048,
                   seq_len=512, vocab_size=4096),
    "large": Config(n_embd=1024, n_head=16, n_kv_head=4, head_dim=64, n_layer=20, n_hidden=2816,
                    seq_len=1024, vocab_size=8192),
}

# ==== 2 Memory ====
def param_table(cfg):
    """(name, shape, init std) of every learned tensor, in buffer order; std None means ones."""
    C, F, L, V, P = cfg.n_embd, cfg.n_hidden, cfg.n_layer, cfg.vocab_size, cfg.n_mtp
    QKV, HD = (cfg.n_head + 2 * cfg.n_kv_head) * cfg.head_dim, cfg.n_head * cfg.head_dim
    std = 0.02 * math.sqrt(768 / C)          # GPT-2's 0.02 at its width; rows keep their length
    out_std = std / math.sqrt(2 * L)         # the 2L writers into the residual stream (GPT-2, 2.3)
    return [("wte",        (V, C),        std),     # matrices first: weight decay is a prefix of
            ("qkv",        (L, QKV, C),   std),     # the buffer, not a list of names
            ("attn_proj",  (L, C, HD),    out_std),
            ("gate_up",    (L, 2 * F, C), std),
            ("down",       (L, C, F),     out_std),
            ("lm_head",    (P - cfg.tie_embeddings, V, C), std),
            ("attn_norm",  (L, C),        None),
            ("mlp_norm",   (L, C),        None),
            ("final_norm", (C,),          None)]

Params = namedtuple("Params", [name for name, *_ in param_table(PRESETS["small"])])
Acts = namedtuple("Acts", "x attn_in attn_rstd qkv att lse mlp_in mlp_rstd gate_up swiglu final_in "
                          "final_rstd logits")
Dacts = namedtuple("Dacts", "x qkv attn_norm mlp_norm final_norm")
Scratch = namedtuple("Scratch", "norm att swiglu scores dscores kt vt dy")
Panels = namedtuple("Panels", "qkv attn_proj gate_up down lm_head")

def act_shapes(cfg, B, T):
    """Shapes of the activations that backward reads.  The residual stream is kept as a
    trajectory: x[b, i + 1] = x[b, i] + f_i(x[b, i]), i < 2L."""
    C, F, L, V, P = cfg.n_embd, cfg.n_hidden, cfg.n_layer, cfg.vocab_size, cfg.n_mtp
    H, D = cfg.n_head, cfg.head_dim
    return Acts(x=(B, 2 * L + 1, T, C),
                attn_in=(B, L, T, C),        # rmsnorm(x), input of qkv
                attn_rstd=(B, L, T),
                qkv=(B, L, T, (H + 2 * cfg.n_kv_head) * D),      # q and k already turned by RoPE
                att=(B, L, T, H * D),        # attention's output, input of attn_proj
                lse=(B, L, H, T),            # log-sum-exp of each score row
                mlp_in=(B, L, T, C),
                mlp_rstd=(B, L, T),
                gate_up=(B, L, T, 2 * F),    # backward turns it into its gradient, in place
                swiglu=(B, L, T, F),
                final_in=(B, T, C),
                final_rstd=(B, T),
                logits=(B, P, T, V))         # cross-entropy makes them gradients, in place

def dact_shapes(cfg, B, T):
    """Shapes of the gradients that outlive one sequence's backward pass.  x is the adjoint
    trajectory: d.x[b, i] = d.x[b, i + 1] + J_i^T d.x[b, i + 1], J_i = df_i/dx."""
    a, per_layer = act_shapes(cfg, B, T), (B, cfg.n_layer, cfg.n_embd)
    return Dacts(a.x, a.qkv, per_layer, per_layer, (B, cfg.n_embd))

def scratch_shapes(cfg, n, T, dtype):
    """Shapes of what each of n threads needs while it works on one sequence."""
    D, W = cfg.head_dim, tile_width(dtype)
    return Scratch((n, T, cfg.n_embd), (n, T, cfg.n_head * D), (n, T, cfg.n_hidden), (n, BR, T),
                   (n, BR, T), (n, -(-T // W), D, W), (n, -(-T // W), D, W),
                   (n, 1, KC, PACKED))

def panel_shapes(cfg, dtype, transposed):
    """Shapes of packed weights (4.1): W (N, K) as ceil(K / w) panels (N, w), W^T likewise."""
    w, untied = tile_width(dtype), replace(cfg, tie_embeddings=False)    # tied, it has panels too
    return Panels(*((L, -(-N // w), K, w) if transposed else (L, -(-K // w), N, w)
                    for _, (L, N, K), _ in param_table(untied)[1:6]))

def aligned(shape, dtype):
    """Zeros that start on a 64-byte cache line, and one vector tile to spare behind them."""
    n = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(n + 64 + 2 * BITS // 8, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start:start + n].view(dtype).reshape(shape)

def slices(flat, shapes):
    """Consecutive views of these shapes of one flat buffer: they share its memory."""
    ends = itertools.accumulate(map(math.prod, shapes))
    return [flat[end - math.prod(shape):end].reshape(shape) for shape, end in zip(shapes, ends)]

def views(flat, table):
    """The tensors of param_table."""
    return Params(*slices(flat, [shape for _, shape, *_ in table]))

def n_params(cfg):
    return sum(math.prod(shape) for _, shape, _ in param_table(cfg))

def init_params(cfg, seed, dtype=np.float32):
    """A fresh flat parameter buffer: normal(0, std) matrices, unit gains (GPT-2, 2.3)."""
    rng, flat = np.random.default_rng(seed), aligned((n_params(cfg),), dtype)
    for view, (_, shape, std) in zip(views(flat, param_table(cfg)), param_table(cfg)):
        view[...] = 1.0 if std is None else std * rng.standard_normal(shape, np.float32)
    return flat

# ==== 3 Building blocks ====
# The tile: MR rows x 2 vectors of the output stay in registers while k runs: 2 * MR fused
# multiply-adds for 2 loads and MR broadcasts.  Numba's own loops reach 35 % of a Zen 4 core's
# peak here, these explicit LLVM vectors 95 %, in float32 and float64.
_CPU = llvm.get_host_cpu_features()
BITS = int(os.environ.get("NANOEULER_BITS") or 0) or (
    512 if _CPU.get("avx512f") else 256 if _CPU.get("avx2") else 128)
caching.Cache._index_key = lambda self, *known, key=caching.Cache._index_key: (
    *key(self, *known)[:3], BITS)    # another width, other kernels; [:3]: __main__ sets it, too
MR = 8 if BITS == 512 else 6     # 32 vector registers hold 8 x 2 sums, 16 hold 6 x 2
ROWS = 8 * MR                    # of a product at a time: what it writes lies together
BR = 32                          # attention: query rows a block; small's scores stay in L1
KC = 64                          # weight gradients: rows of the batch summed in registers at a time
NB, PACKED = 128, 2 * MR         # rows of dW a task, they stay in L2; columns of dY side by side
i32, i64 = ir.IntType(32), ir.IntType(64)                # i64(5) is a constant of that type

def tile_width(dtype):
    """Columns of a tile: two vectors."""
    return 2 * BITS // (8 * np.dtype(dtype).itemsize)

def emit_tile(module, scalar, lanes, size):
    """The LLVM function C = add * base + A B for a tile of MR x 2 lanes, or the rows x cols left.
    Strides are in elements: rows of C and base are ldc and ldb apart, A[r, k] is at r * rs + k * cs
    (a transposed A costs nothing), B[k] at k * ks.  Not inlined: copies cost seconds of JIT."""
    vec, ptr = ir.VectorType(scalar, lanes), scalar.as_pointer()
    fn = cgutils.get_or_insert_function(
        module, ir.FunctionType(ir.VoidType(), [ptr] * 4 + [i64] * 9), f"nanoeuler_tile_{scalar}")
    if not fn.is_declaration:
        return fn
    fn.linkage = "linkonce_odr"
    fn.attributes.add("noinline")
    fn.attributes.add("optsize")             # unrolled, it spills pointers: 112 -> 76 GF/s
    C, base, A, B, ldc, ldb, rs, cs, ks, K, rows, cols, add = fn.args
    bd = ir.IRBuilder(fn.append_basic_block())
    at = lambda p, i: bd.bitcast(bd.gep(p, [i]), vec.as_pointer())
    load = lambda p, i: bd.load(at(p, i), align=size)
    undef, lane0 = vec(ir.Undefined), ir.VectorType(i32, lanes)([0] * lanes)
    fma = cgutils.get_or_insert_function(
        module, ir.FunctionType(vec, [vec] * 3), f"llvm.fmuladd.v{lanes}f{8 * size}")

    row = [A]                                # rows past the edge read the last row again
    for r in range(1, MR):
        row.append(bd.select(bd.icmp_signed("<", i64(r), rows), bd.gep(row[-1], [rs]), row[-1]))
    acc = [[cgutils.alloca_once_value(bd, vec([0.0] * lanes)) for v in range(2)] for r in range(MR)]
    with cgutils.for_range(bd, K) as loop:
        b0, ka = bd.mul(loop.index, ks), bd.mul(loop.index, cs)
        b = [load(B, bd.add(b0, i64(v * lanes))) for v in range(2)]
        for r in range(MR):
            a = bd.insert_element(undef, bd.load(bd.gep(row[r], [ka])), i32(0))
            a = bd.shuffle_vector(a, undef, lane0)
            for v in range(2):
                bd.store(bd.call(fma, [a, b[v], bd.load(acc[r][v])]), acc[r][v])

    edge, lds = bd.icmp_signed("<", cols, i64(2 * lanes)), i64(2 * lanes)
    spare = cgutils.alloca_once(bd, scalar, size=2 * lanes * MR)
    out, ldo = bd.select(edge, spare, C), bd.select(edge, lds, ldc)
    for r in range(MR):
        with bd.if_then(bd.icmp_signed("<", i64(r), rows)):
            where = lambda ld, v: bd.add(bd.mul(ld, i64(r)), i64(v * lanes))
            with bd.if_then(bd.icmp_signed("!=", add, i64(0))):
                for v in range(2):
                    old = load(base, where(ldb, v))
                    bd.store(bd.fadd(bd.load(acc[r][v]), old), acc[r][v])
            for v in range(2):
                bd.store(bd.load(acc[r][v]), at(out, where(ldo, v)), align=size)
    with bd.if_then(edge):                   # what lies in C beyond the edge is not ours
        least = bd.select(bd.icmp_signed("<", rows, i64(MR)), rows, i64(MR))
        with cgutils.for_range(bd, least) as i, cgutils.for_range(bd, cols) as j:
            place = lambda p, ld: bd.gep(p, [bd.add(bd.mul(i.index, ld), j.index)])
            bd.store(bd.load(place(spare, lds)), place(C, ldc))
    bd.ret_void()
    return fn

@intrinsic
def tile(typing, out, base, x, b, m, j, add):
    """out[m:m+MR, j:j+w] = add * base[m:m+MR, j:j+w] + x[m:m+MR, :] @ b[:, j:j+w],  w = tile_width
    b is a matrix (K, N) with contiguous rows, or panels (N / w, K, w).  All edges are handled; of
    base and b whole vectors are read, also past the end (see `aligned`)."""
    def codegen(context, bd, sig, args):
        scalar, size = context.get_value_type(sig.args[0].dtype), sig.args[0].dtype.bitwidth // 8
        arrays = [context.make_array(t)(context, bd, v) for t, v in zip(sig.args, args[:4])]
        shape = [cgutils.unpack_tuple(bd, a.shape) for a in arrays]
        stride = [[bd.sdiv(s, i64(size)) for s in cgutils.unpack_tuple(bd, a.strides)]
                  for a in arrays]
        (so, sb, sx, sw), (m, j, add), lanes = stride, args[4:], BITS // (8 * size)
        panel = bd.mul(bd.sdiv(j, i64(2 * lanes)), sw[0]) if len(sw) == 3 else j
        start = [bd.add(bd.mul(m, so[0]), j), bd.add(bd.mul(m, sb[0]), j), bd.mul(m, sx[0]), panel]
        rows, cols = bd.sub(shape[0][0], m), bd.sub(shape[0][1], j)
        bd.call(emit_tile(bd.module, scalar, lanes, size),
                [bd.gep(a.data, [i]) for a, i in zip(arrays, start)] +
                [so[0], sb[0], sx[0], sx[1], sw[-2], shape[2][1], rows, cols, add])
        return context.get_dummy_value()
    return types.void(out, base, x, b, types.intp, types.intp, types.intp), codegen

@intrinsic
def next_task(typing, counter, i):
    """counter[i]++ as one atomic operation; returns the old value.  int64 array, index."""
    def codegen(context, bd, sig, args):
        data = context.make_array(sig.args[0])(context, bd, args[0]).data
        return bd.atomic_rmw("add", bd.gep(data, [args[1]]), i64(1), "monotonic")
    return types.int64(counter, types.intp), codegen

@intrinsic
def larger(typing, x, y):
    """The larger of two floats, neither a NaN.  LLVM does not vectorise `max`: 10 times slower."""
    def codegen(context, bd, sig, args):
        t = args[0].type
        fn = cgutils.get_or_insert_function(bd.module, ir.FunctionType(t, [t, t]),
                                            f"llvm.maxnum.f{sig.args[0].bitwidth}")
        return bd.call(fn, args, fastmath=("nnan", "nsz"))
    return x(x, x), codegen

def value(x):
    """The number that a stored one stands for: uint16 holds the upper half of a float32."""

@overload(value, inline="always")
def _value(x):
    if x == types.uint16:
        return lambda x: np.int32(int32(x) << int32(16)).view(np.float32)
    return (lambda x: float32(x)) if x == types.int8 else (lambda x: x)

def to_bf16(x):
    """float32 as the bits of bfloat16, to the nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)

def from_bf16(x):
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x

# Cephes' expf: x = n ln 2 + r, |r| <= ln 2 / 2; a polynomial in r; 2^n by the exponent's bits.
# Vectorised, it takes 0.3 ns where a scalar libm call takes 1.7.  Relative error 3e-7 on [-87, 88].
E0, E1, E2, E3, E4, E5 = map(np.float32, (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3,
                                          4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1))
LOG2E, LN2_HI, LN2_LO, EXP_MIN, EXP_MAX, ONE, HALF = map(np.float32, (
    1.4426950408889634, 0.693359375, -2.12194440e-4, -87.3, 88, 1, 0.5))

def exp(x):
    """e^x: the polynomial for float32, libm for float64."""
    return math.exp(x)

@overload(exp, inline="always")
def _exp(x):
    if x == types.float32:
        def impl(x):
            x = max(min(x, EXP_MAX), EXP_MIN)     # in this order a NaN stays a NaN
            n = float32(math.floor(x * LOG2E + HALF))
            r = x - n * LN2_HI - n * LN2_LO
            y = ((((E0 * r + E1) * r + E2) * r + E3) * r + E4) * r + E5
            power = np.int32((int32(n) + int32(127)) << int32(23)).view(np.float32)
            return (y * r * r + r + ONE) * power
        return impl
    return lambda x: math.exp(x)

# ==== 4.1 Matmul ====
@jit
def pack(panels, b):
    """panels[i, k, j] = b[k, i * w + j], zeros past N.     panels (ceil(N / w), K, w), b (K, N)
    A tile reads panels in the order in which they lie in memory.  W^T is packed through a view."""
    (I, K, w), N = panels.shape, b.shape[1]
    for i in range(I):
        n = min(w, N - i * w)
        for k in range(K):
            row, src = panels[i, k], b[k, i * w:i * w + n]
            for j in range(n):
                row[j] = src[j]
            for j in range(n, w):
                row[j] = 0

@jit
def matmul(out, x, b):
    """out = x b     out (M, N), x (M, K) of any strides, b (K, N) or packed; float32 or float64"""
    w = 2 * BITS // (8 * out.itemsize)
    for i in range(0, out.shape[0], ROWS):
        for j in range(0, out.shape[1], w):  # one panel of b stays in L1 while the rows pass by
            for m in range(i, min(i + ROWS, out.shape[0]), MR):
                tile(out, out, x, b, m, j, 0)

@jit
def matmul_add(out, base, x, b):
    """out = base + x b: an Euler step if base is the residual stream, a sum if it is out itself."""
    w = 2 * BITS // (8 * out.itemsize)
    for i in range(0, out.shape[0], ROWS):
        for j in range(0, out.shape[1], w):
            for m in range(i, min(i + ROWS, out.shape[0]), MR):
                tile(out, base, x, b, m, j, 1)

@jit
def weight_gradient(dw, dy, x, n0, scratch):
    """dw += sum_b dy[b, :, n0:n1]^T x[b]     dw (n1 - n0, K), dy (B, T, N), x (B, T, K)
    For y = x W^T: rows n0 to n1 of dW, from the whole batch, summed in the order of the batch."""
    (N, K), (B, T, _), w = dw.shape, x.shape, 2 * BITS // (8 * dw.itemsize)
    for b in range(B):
        for t in range(0, T, KC):
            e = min(T, t + KC)
            for n in range(0, N, PACKED):
                end = min(n + PACKED, N)     # rows of dy lie pages apart, and are read line by line
                pack(scratch[:, :e - t], dy[b, t:e, n0 + n:n0 + end])
                for m in range(n, end, MR):
                    rows, columns = dw[m:m + MR], scratch[0, :e - t, m - n:m - n + MR]
                    for j in range(0, K, w):
                        tile(rows, rows, columns.T, x[b, t:e], 0, j, 1)

# ==== 4.2 Embedding ====
@jit
def embedding_forward(x, tokens, wte):
    """x[t] = wte[tokens[t]]     x (T, C), tokens (T,) int32, wte (V, C)"""
    for t in range(x.shape[0]):
        row, e = x[t], wte[tokens[t]]
        for c in range(row.size):
            row[c] = e[c]

@jit
def embedding_backward(dwte, dx, tokens):
    """dwte[tokens[b, t]] += dx[b, t]     serial: two positions may hold the same token"""
    for b in range(tokens.shape[0]):
        for t in range(tokens.shape[1]):
            row, e = dx[b, t], dwte[tokens[b, t]]
            for c in range(row.size):
                e[c] += row[c]

# ==== 4.3 RMSNorm ====
@jit
def rmsnorm_forward(y, rstd, x, w, eps):
    """y = w * x * rstd,   rstd = 1 / sqrt(mean_c(x^2) + eps)      Zhang & Sennrich 2019, eq. 4
    out: y (T, C), rstd (T,) kept for backward     in: x (T, C), w (C,)"""
    T, C = x.shape
    for t in range(T):
        ss = 0.0                             # float64 on purpose: a long sum of squares
        for c in range(C):
            ss += x[t, c] * x[t, c]
        r = x.dtype.type(1.0 / math.sqrt(ss / C + eps))
        rstd[t] = r
        for c in range(C):
            y[t, c] = w[c] * x[t, c] * r

@jit
def rmsnorm_backward(dx, dnext, dw, dy, x, w, rstd):
    """u = x * rstd:   dx = dnext + rstd * (w*dy - u * mean_c(w*dy*u)),   dw += sum_t dy * u
    dnext is the gradient along the residual path: the adjoint of x + f(x) is dnext + J^T dnext."""
    T, C = x.shape
    for t in range(T):
        r, m = rstd[t], x.dtype.type(0)
        for c in range(C):
            m += w[c] * dy[t, c] * x[t, c]
        m = x.dtype.type(m * r * r / C)
        for c in range(C):
            dx[t, c] = dnext[t, c] + r * (w[c] * dy[t, c] - x[t, c] * m)
            dw[c] += dy[t, c] * x[t, c] * r

# ==== 4.4 RoPE ====
def rope_table(cfg, dtype):
    """cos and sin (seq_len, D / 2) of t * theta^(-2i / D)      Su et al. 2021, 3.2.2"""
    D = cfg.head_dim
    angle = np.outer(np.arange(cfg.seq_len), cfg.rope_theta ** (-np.arange(0, D, 2) / D))
    return np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)

@jit
def rope(qkv, cos, sin, heads, sign):
    """Turns pair (i, i + D/2) of the first `heads` heads of row t by sign * angle[t, i], in place
    qkv (T, QKV): q and k are turned, v is not.  The backward pass turns their gradients back."""
    half = cos.shape[1]
    for t in range(qkv.shape[0]):
        row, cs, sn = qkv[t], cos[t], sin[t]
        for h in range(heads):
            lo = row[2 * h * half:(2 * h + 1) * half]
            hi = row[(2 * h + 1) * half:(2 * h + 2) * half]
            for i in range(half):
                u, v, s = lo[i], hi[i], sign * sn[i]
                lo[i] = u * cs[i] - v * s
                hi[i] = v * cs[i] + u * s

# ==== 4.5 Attention ====
# Blocks of BR query rows against all keys up to the block's end: no T x T matrix, and little work
# above the diagonal.  K^T and V^T are packed once a head; Q, K, V are read in place.
@jit
def row_max(row):
    """max_j row[j]"""
    m = row[0]
    for j in range(1, row.size):
        m = larger(m, row[j])
    return m

@jit
def attention_forward(o, lse, qkv, D, scores, kt):
    """o = softmax(Q K^T / sqrt(D)) V, causal, grouped queries      Vaswani 2017; Ainslie 2023
    out: o (T, HD), lse (H, T) log-sum-exp for backward     in: qkv (T, QKV)
    scratch: scores (BR, T), kt panels of K^T"""
    T, HD = o.shape
    H, G, w = HD // D, (qkv.shape[1] - HD) // (2 * D), kt.shape[2]
    scale = o.dtype.type(1 / math.sqrt(D))
    for g in range(G):
        k, v = HD + g * D, HD + (G + g) * D
        pack(kt, qkv[:, k:k + D].T)
        for h in range(g * H // G, (g + 1) * H // G):
            for t0 in range(0, T, BR):
                t1 = min(T, t0 + BR)
                P = scores[:t1 - t0, :t1]
                matmul(P, qkv[t0:t1, h * D:h * D + D], kt[:(t1 + w - 1) // w])
                for t in range(t0, t1):      # rows up to t1, not t: whole vectors
                    row = scores[t - t0, :t1]
                    for j in range(t + 1, t1):
                        row[j] = row[0]      # the future does not change the maximum
                    lse[h, t] = row_max(row)
                for t in range(t0, t1):      # row by row the core would wait for each maximum
                    row, m = scores[t - t0, :t1], lse[h, t]
                    for j in range(t1):
                        row[j] = exp((row[j] - m) * scale)
                for t in range(t0, t1):
                    row, l = scores[t - t0, :t1], o.dtype.type(0)
                    for j in range(t + 1, t1):
                        row[j] = 0           # and has no weight
                    for j in range(t1):
                        l += row[j]
                    lse[h, t] = lse[h, t] * scale + o.dtype.type(math.log(l))
                    norm = o.dtype.type(1) / l
                    for j in range(t1):
                        row[j] *= norm
                matmul(o[t0:t1, h * D:h * D + D], P, qkv[:t1, v:v + D])

@jit
def attention_backward(dqkv, do, o, lse, qkv, D, scores, dscores, kt, vt):
    """P = exp(Q K^T / sqrt(D) - lse),   dP = dO V^T,   dS = P * (dP - rowsum(dO * O)) / sqrt(D)
    dQ = dS K,   dK = sum_h dS^T Q,   dV = sum_h P^T dO      Dao 2022, B.4; P is computed again
    out: dqkv (T, QKV)     in: do, o (T, HD), lse (H, T), qkv (T, QKV)"""
    T, HD = o.shape
    H, G, w = HD // D, (qkv.shape[1] - HD) // (2 * D), kt.shape[2]
    scale = o.dtype.type(1 / math.sqrt(D))
    dqkv[:, HD:] = 0                         # dK and dV are sums over heads and blocks
    for g in range(G):
        k, v = HD + g * D, HD + (G + g) * D
        pack(kt, qkv[:, k:k + D].T)
        pack(vt, qkv[:, v:v + D].T)
        for h in range(g * H // G, (g + 1) * H // G):
            q = h * D
            for t0 in range(0, T, BR):
                t1 = min(T, t0 + BR)
                P, dS, panels = scores[:t1 - t0, :t1], dscores[:t1 - t0, :t1], (t1 + w - 1) // w
                matmul(P, qkv[t0:t1, q:q + D], kt[:panels])
                matmul(dS, do[t0:t1, q:q + D], vt[:panels])
                for t in range(t0, t1):
                    p, ds, dot = scores[t - t0], dscores[t - t0], o.dtype.type(0)
                    doh, oh, l = do[t, q:q + D], o[t, q:q + D], lse[h, t]
                    for i in range(D):
                        dot += doh[i] * oh[i]
                    for j in range(t1):
                        p[j] = exp(p[j] * scale - l)
                        ds[j] = p[j] * (ds[j] - dot) * scale
                    for j in range(t + 1, t1):
                        p[j] = 0
                        ds[j] = 0
                matmul(dqkv[t0:t1, q:q + D], dS, qkv[:t1, k:k + D])
                matmul_add(dqkv[:t1, k:k + D], dqkv[:t1, k:k + D], dS.T, qkv[t0:t1, q:q + D])
                matmul_add(dqkv[:t1, v:v + D], dqkv[:t1, v:v + D], P.T, do[t0:t1, q:q + D])

# ==== 4.6 SwiGLU ====
@jit
def swiglu_forward(y, gate_up):
    """y = silu(gate) * up,   silu(z) = z / (1 + e^-z)      Shazeer 2020, eq. 6
    out: y (T, F)     in: gate_up (T, 2F), gate first"""
    (T, F), one = y.shape, y.dtype.type(1)
    for t in range(T):
        row, gate, up = y[t], gate_up[t, :F], gate_up[t, F:]
        for f in range(F):
            row[f] = gate[f] / (one + exp(-gate[f])) * up[f]

@jit
def swiglu_backward(gate_up, dy):
    """s = 1 / (1 + e^-gate):   dgate = dy * up * s * (1 + gate * (1 - s)),   dup = dy * gate * s
    in place: gate_up (T, 2F) becomes its gradient     in: dy (T, F)"""
    (T, F), one = dy.shape, dy.dtype.type(1)
    for t in range(T):
        row, gate, up = dy[t], gate_up[t, :F], gate_up[t, F:]
        for f in range(F):
            s = one / (one + exp(-gate[f]))
            z, u = gate[f], up[f]
            gate[f] = row[f] * u * s * (one + z * (one - s))
            up[f] = row[f] * z * s

# ==== 4.7 Cross-entropy ====
@jit
def cross_entropy(logits, targets, weight):
    """Returns sum_t -log softmax(logits[t])[targets[t]], nats, over targets >= 0.
    in place: logits (T, V) become weight * (softmax - onehot), zero rows where the target is -1"""
    (T, V), loss, scale = logits.shape, 0.0, logits.dtype.type(weight)
    for t in range(T):
        row, y, l = logits[t], targets[t], logits.dtype.type(0)
        if y < 0:
            row[:] = 0
            continue
        m, zy = row_max(row), row[y]
        for v in range(V):
            row[v] = exp(row[v] - m)
            l += row[v]
        loss += m - zy + math.log(l)
        norm = scale / l
        for v in range(V):
            row[v] *= norm
        row[y] -= scale
    return loss

# ==== 5 Model ====
@jit
def forward(b, heads, tokens, p, wt, a, s, cos, sin, eps):
    """Sequence b through the network: the trajectory a.x[b, 0..2L] and logits of some heads.
    Each layer is two Euler steps: x += attention(rmsnorm(x)), then x += swiglu(rmsnorm(x))."""
    L, D = p.qkv.shape[0], 2 * cos.shape[1]
    qk_heads = (p.qkv.shape[1] + p.attn_proj.shape[2]) // (2 * D)           # H + G
    embedding_forward(a.x[b, 0], tokens[b], p.wte)
    for l in range(L):
        x, x1, x2 = a.x[b, 2 * l], a.x[b, 2 * l + 1], a.x[b, 2 * l + 2]
        rmsnorm_forward(a.attn_in[b, l], a.attn_rstd[b, l], x, p.attn_norm[l], eps)
        matmul(a.qkv[b, l], a.attn_in[b, l], wt.qkv[l])
        rope(a.qkv[b, l], cos, sin, qk_heads, cos.dtype.type(1))
        attention_forward(a.att[b, l], a.lse[b, l], a.qkv[b, l], D, s.scores, s.kt)
        matmul_add(x1, x, a.att[b, l], wt.attn_proj[l])
        rmsnorm_forward(a.mlp_in[b, l], a.mlp_rstd[b, l], x1, p.mlp_norm[l], eps)
        matmul(a.gate_up[b, l], a.mlp_in[b, l], wt.gate_up[l])
        swiglu_forward(a.swiglu[b, l], a.gate_up[b, l])
        matmul_add(x2, x1, a.swiglu[b, l], wt.down[l])
    rmsnorm_forward(a.final_in[b], a.final_rstd[b], a.x[b, 2 * L], p.final_norm, eps)
    for k in range(heads):
        matmul(a.logits[b, k], a.final_in[b], wt.lm_head[k])

@jit
def backward(b, p, w, a, d, s, cos, sin):
    """Sequence b back through the network: the adjoint trajectory d.x[b, 2L..0].
    a.logits hold their own gradients.  Leaves in a and d what the gradients of the weights need."""
    L, P, D = p.qkv.shape[0], a.logits.shape[1], 2 * cos.shape[1]
    qk_heads = (p.qkv.shape[1] + p.attn_proj.shape[2]) // (2 * D)
    d.attn_norm[b] = 0
    d.mlp_norm[b] = 0
    d.final_norm[b] = 0
    d.x[b, 2 * L] = 0
    s.norm[:] = 0
    for k in range(P):
        matmul_add(s.norm, s.norm, a.logits[b, k], w.lm_head[k])
    rmsnorm_backward(d.x[b, 2 * L], d.x[b, 2 * L], d.final_norm[b], s.norm,
                     a.x[b, 2 * L], p.final_norm, a.final_rstd[b])
    for l in range(L - 1, -1, -1):
        dx, dx1, dx2 = d.x[b, 2 * l], d.x[b, 2 * l + 1], d.x[b, 2 * l + 2]
        matmul(s.swiglu, dx2, w.down[l])
        swiglu_backward(a.gate_up[b, l], s.swiglu)
        matmul(s.norm, a.gate_up[b, l], w.gate_up[l])
        rmsnorm_backward(dx1, dx2, d.mlp_norm[b, l], s.norm,
                         a.x[b, 2 * l + 1], p.mlp_norm[l], a.mlp_rstd[b, l])
        matmul(s.att, dx1, w.attn_proj[l])
        attention_backward(d.qkv[b, l], s.att, a.att[b, l], a.lse[b, l], a.qkv[b, l], D,
                           s.scores, s.dscores, s.kt, s.vt)
        rope(d.qkv[b, l], cos, sin, qk_heads, cos.dtype.type(-1))
        matmul(s.norm, d.qkv[b, l], w.qkv[l])
        rmsnorm_backward(dx, dx1, d.attn_norm[b, l], s.norm,
                         a.x[b, 2 * l], p.attn_norm[l], a.attn_rstd[b, l])

QKV, ATTN_PROJ, GATE_UP, DOWN, LM_HEAD = range(5)      # a matrix in the task tables, as in Panels
LOGITS, LOSS, GRADIENT = range(3)                      # how far `run` goes

@jit
def matrix_gradient(kind, l, n0, n1, g, a, d, scratch):
    """Rows n0 to n1 of one weight gradient, dW = dY^T X; l is a layer, or a head for LM_HEAD."""
    if kind == QKV:
        weight_gradient(g.qkv[l, n0:n1], d.qkv[:, l], a.attn_in[:, l], n0, scratch)
    elif kind == ATTN_PROJ:
        weight_gradient(g.attn_proj[l, n0:n1], d.x[:, 2 * l + 1], a.att[:, l], n0, scratch)
    elif kind == GATE_UP:
        weight_gradient(g.gate_up[l, n0:n1], a.gate_up[:, l], a.mlp_in[:, l], n0, scratch)
    elif kind == DOWN:
        weight_gradient(g.down[l, n0:n1], d.x[:, 2 * l + 2], a.swiglu[:, l], n0, scratch)
    else:
        tied = a.logits.shape[1] - g.lm_head.shape[0]      # 1: head 0 is the embedding
        head = g.wte if l < tied else g.lm_head[l - tied]
        weight_gradient(head[n0:n1], a.logits[:, l], a.final_in[:, :], n0, scratch)

@jit_parallel
def run(until, losses, tokens, targets, weight, p, w, wt, g, a, d, scratch, tasks, cos, sin, eps):
    """Forward, loss and gradients of one micro-batch: g += d(sum_bk weight[b, k] CE_bk)/dp.
    out: losses (B, heads) summed CE in nats     in: tokens (B, T), targets (P, B, T), weight (B, P)
    Threads take tasks from a common counter: one that is slowed down takes fewer."""
    B, heads, threads = tokens.shape[0], losses.shape[1], scratch.norm.shape[0]
    counter = np.zeros(16, np.int64)         # two counters, 64 bytes apart
    for i in prange(threads):
        s = Scratch(scratch.norm[i], scratch.att[i], scratch.swiglu[i], scratch.scores[i],
                    scratch.dscores[i], scratch.kt[i], scratch.vt[i], scratch.dy[i])
        b = next_task(counter, 0)
        while b < B:
            forward(b, heads, tokens, p, wt, a, s, cos, sin, eps)
            if until >= LOSS:
                for k in range(heads):
                    losses[b, k] = cross_entropy(a.logits[b, k], targets[k, b], weight[b, k])
            if until >= GRADIENT:
                backward(b, p, w, a, d, s, cos, sin)
            b = next_task(counter, 0)
    if until >= GRADIENT:
        for i in prange(threads):
            n = next_task(counter, 8)
            while n < tasks.shape[0]:
                kind, l, n0, n1 = tasks[n]
                matrix_gradient(kind, l, n0, n1, g, a, d, scratch.dy[i])
                n = next_task(counter, 8)
        embedding_backward(g.wte, d.x[:, 0], tokens)

@jit_parallel
def pack_weights(w, wt, p):
    """Each W (N, K) of p, and W^T, into its panels."""
    for i in prange(len(p)):
        pack(w[i], p[i])
        pack(wt[i], p[i].T)

class Model:
    """A parameter buffer and the memory to train it on micro-batches (B, T); float32 or float64.
    Sections 9 and 10 see the methods after `logits` only, so that another engine can stand here."""
    program, talk, host = "nanoeuler.py", "chat", staticmethod(np.asarray)

    def __init__(self, cfg, flat, moments=(), options=None):
        self.cfg, self.flat, self.p = cfg, flat, views(flat, param_table(cfg))
        self.m, self.v = moments or np.zeros((2, flat.size), flat.dtype)
        self.n_decay = sum(x.size for x in self.p[:6])             # the matrices come first
        self.ce = np.zeros(cfg.n_mtp)        # summed cross-entropy of each head since `update`
        self.w, self.wt = (self.new(panel_shapes(cfg, flat.dtype, transposed))
                           for transposed in (False, True))
        self.g_flat = aligned(flat.shape, flat.dtype)
        self.g, self.shape = views(self.g_flat, param_table(cfg)), None
        self.cos, self.sin = rope_table(cfg, flat.dtype)
        self.tasks = np.array([(kind, l, n, min(n + NB, N))
                               for kind, (L, _, N, _) in enumerate(w.shape for w in self.w)
                               for l in range(L) for n in range(0, N, NB)])
        self.pack()

    def new(self, shapes):
        return type(shapes)(*(aligned(shape, self.flat.dtype) for shape in shapes))

    def pack(self):
        """Every matrix into its panels; once after each update of the parameters."""
        p = self.p
        heads = np.concatenate((p.wte[None], p.lm_head)) if self.cfg.tie_embeddings else p.lm_head
        for w, wt, x in zip(self.w, self.wt, (*p[1:5], heads)):
            pack_weights(w, wt, x)

    def run(self, until, tokens, targets=None, weight=1.0, heads=None):
        """tokens (B, T) int32 -> losses (B, heads), as `run`.  Keeps its memory for the next."""
        (B, T), P = tokens.shape, self.cfg.n_mtp
        if self.shape != (B, T):
            self.a = self.d = self.s = None                        # free the old before the new
            self.a = self.new(act_shapes(self.cfg, B, T))
            self.d = self.new(dact_shapes(self.cfg, B, T))
            self.s = self.new(scratch_shapes(self.cfg, get_num_threads(), T, self.flat.dtype))
            self.shape = B, T
        targets = np.full((P, B, T), -1, np.int32) if targets is None else targets
        losses, weight = np.zeros((B, heads or P)), np.ones((B, P)) * weight
        run(until, losses, np.ascontiguousarray(tokens), np.ascontiguousarray(targets), weight,
            self.p, self.w, self.wt, self.g, self.a, self.d, self.s, self.tasks, self.cos[:T],
            self.sin[:T], self.cfg.norm_eps)
        if until == GRADIENT:                # the gains, in the order of the batch
            for gain, rows in zip(self.g[6:], self.d[2:]):
                for row in rows:
                    gain += row
        return losses

    def logits(self, tokens):
        """(B, P, T, V) of every head: a view, valid until the next run."""
        self.run(LOGITS, tokens)
        return self.a.logits

    def gradient(self, tokens, targets, weight):
        """g += ..., as `run`; weight may be (P,), for every sequence."""
        self.ce += self.run(GRADIENT, tokens, targets, weight).sum(0)

    def update(self, hyper):
        """AdamW on the gradients since the last update.  Returns their CE (P,), summed, and |g|; if
        that is not finite, nothing is touched."""
        ce, self.ce = self.ce, np.zeros(self.cfg.n_mtp)
        norm = adamw(self.flat, self.g_flat, self.m, self.v, self.n_decay, hyper)
        self.pack()
        return ce, norm

    def losses(self, tokens, targets):
        """CE of head 0 of every sequence (B,), nats: -log p(targets).     tokens, targets (B, T)"""
        return self.run(LOSS, tokens, targets[None], heads=1)[:, 0]

    def micro_batch(self, B, asked=0):
        """How many of B sequences to take at once: memory grows with them, speed does not."""
        return asked or B

    def buffers(self):
        """What a checkpoint holds: parameters and AdamW's moments."""
        return self.flat, self.m, self.v

    def decoder(self):
        return Decoder(self.cfg, self.flat)

    def device(self):
        return f"{get_num_threads()} threads, {self.flat.dtype}"

    def first_bad_tensor(self):
        """The first entry, in the order of the computation, that is a NaN or an infinity."""
        for kind, group in (("parameter", self.p), ("activation", self.a),
                            ("its gradient", self.d), ("gradient", self.g)):
            for name, x in zip(group._fields, map(self.host, group)):
                if not np.isfinite(x).all():
                    at = tuple(int(i) for i in np.argwhere(~np.isfinite(x))[0])
                    return f"{kind} {name}{list(at)} is {x[at]}"
        return "the loss is not finite"

# ==== 6 Optimizer ====
def lr_at(step, n_steps, lr, warmup, floor):
    """Linear warm-up over `warmup` steps, then a half cosine from lr to floor * lr at n_steps."""
    if step < warmup:
        return lr * (step + 1) / warmup
    x = min(1.0, (step - warmup) / max(1, n_steps - warmup))
    return lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * x)))

@jit_parallel
def adamw(p, g, m, v, n_decay, hyper):
    """g *= min(1, clip / |g|);  m, v means of g, g^2;  p -= lr (m' / (sqrt(v') + eps) + wd p)
    Loshchilov & Hutter 2019, algorithm 2.  m', v': m, v without their bias towards zero; wd acts on
    the first n_decay entries.  Sets g to zero for the next step.  Returns |g| before clipping; if
    it is not finite, nothing is touched.     p, g, m, v (N,), hyper (8,) float64"""
    BLOCKS = 256                             # fixed, so that sums do not depend on the threads
    N, squares = p.size, np.zeros(BLOCKS)
    for i in prange(BLOCKS):
        gs, ss = g[i * N // BLOCKS:(i + 1) * N // BLOCKS], 0.0
        for j in range(gs.size):
            ss += gs[j] * gs[j]
        squares[i] = ss
    total = 0.0
    for i in range(BLOCKS):                  # .sum() would be made parallel, in an order of its own
        total += squares[i]
    norm = math.sqrt(total)
    if not math.isfinite(norm):
        return norm
    lr, beta1, beta2, eps, wd, clip, correct1, correct2 = hyper
    dtype = p.dtype.type
    scale, rate = dtype(min(1.0, clip / (norm + 1e-30))), dtype(lr / correct1)
    b1, b2, c1, c2 = dtype(beta1), dtype(beta2), dtype(1 - beta1), dtype(1 - beta2)
    root, e = dtype(correct2 ** -0.5), dtype(eps)
    for i in prange(BLOCKS):
        n0, n2 = i * N // BLOCKS, (i + 1) * N // BLOCKS
        n1 = min(max(n_decay, n0), n2)
        for start, end, decay in ((n0, n1, lr * wd), (n1, n2, 0.0)):
            ps, gs, ms, vs = p[start:end], g[start:end], m[start:end], v[start:end]
            keep = dtype(1 - decay)
            for j in range(ps.size):
                x = gs[j] * scale
                ms[j] = b1 * ms[j] + c1 * x
                vs[j] = b2 * vs[j] + c2 * x * x
                ps[j] = keep * ps[j] - rate * ms[j] / (math.sqrt(vs[j]) * root + e)
                gs[j] = 0
    return norm

# ==== 7 Data ====
# data/texts.py makes tokens of a text, data/chats.py reads examples; from here on they are arrays.
def later(rows, T):
    """targets (P, B, T) of rows (B, T + P): head k at position t predicts entry t + 1 + k."""
    return np.stack([rows[:, k + 1:k + 1 + T] for k in range(rows.shape[1] - T)])

def windows(tokens, starts, T, P):
    """tokens (B, T), targets (P, B, T) of the windows that begin there, -1 past the end; int32"""
    rows = np.full((len(starts), T + P), -1, np.int32)
    for row, start in zip(rows, starts):
        piece = tokens[start:start + T + P]
        row[:len(piece)] = piece
    return np.maximum(rows[:, :T], 0), later(rows, T)

class Batches:
    """Windows of T tokens in shuffled epochs.
    Window i of a run depends on (seed, i) alone: it is in epoch i // n, whose phase and permutation
    come from (seed, epoch).  So the data cursor of a checkpoint is one number, the step."""
    copies = 1

    def __init__(self, tokens, T, n_mtp, seed):
        self.tokens, self.T, self.P, self.seed = tokens, T, n_mtp, seed
        self.n, self.epoch = len(tokens) // T - 1, None
        need(self.n > 0, f"{len(tokens)} tokens to learn are less than two windows of {T}; use a "
             f"longer text with --data, or --seq-len {max(1, len(tokens) // 2)}")

    def shuffled(self, i):
        """Entry i of endless epochs over range(n), or its copies: epoch e reads copy e % copies."""
        epoch, j = divmod(i, self.n)
        if epoch != self.epoch:
            rng = np.random.default_rng((self.seed, epoch))
            self.epoch, self.phase = epoch, rng.integers(self.T)
            self.order = rng.permutation(self.n)
        return epoch % self.copies * self.n + self.order[j]

    def take(self, i, B):
        """Windows i to i + B of the run."""
        starts = [self.shuffled(j) * self.T + self.phase for j in range(i, i + B)]
        return windows(self.tokens, starts, self.T, self.P)

def loss_weights(targets, mtp_weight):
    """d loss / d (summed CE of head k)     loss = CE_0 + mtp_weight * mean_k>0 CE_k
    CE_k is a mean over the valid targets of the whole step, however many micro-batches it takes.
    targets (P, ...) -> (P,)"""
    P = len(targets)
    count = np.maximum(1, (targets.reshape(P, -1) >= 0).sum(1))
    return np.array([1.0] + [mtp_weight / (P - 1) for _ in range(P - 1)]) / count

def dpo_loss(ce, reference, beta):
    """loss = -log sigmoid(m),   m = beta (log pi(y)/ref(y) - log pi(y')/ref(y'))
    d loss / d CE(y) = beta sigmoid(-m) = -d loss / d CE(y')      Rafailov et al. 2023, eq. 7
    pi is the policy, ref the model it was;  CE(y) = -log pi(y), all tokens
    ce, reference (2n,): y chosen, y' rejected in turn -> means over the pairs, d loss / d CE (2n,)
    accuracy: m > 0, a tie is a half.  kl: log ref(y)/pi(y), nats a response, would be KL(ref || pi)
    if y were ref's own; it costs no sampling, and may be negative."""
    ratio = (reference - ce).reshape(-1, 2)
    margin = beta * (ratio[:, 0] - ratio[:, 1])
    slope = beta * np.exp(-np.logaddexp(0, margin)) / len(margin)
    return (dict(loss=np.logaddexp(0, -margin).mean(), accuracy=(np.sign(margin) + 1).mean() / 2,
                 margin=margin.mean(), kl=-ratio[:, 0].mean()),
            np.stack((slope, -slope), 1).ravel())

class Examples(Batches):
    """One response a row, in shuffled epochs: prompt, response with </s>, then padding.
    Targets are the tokens of the response alone, for every head; rows do not see each other.  The R
    responses to one prompt stay together; if there are copies of all pairs, they follow them."""

    def __init__(self, pairs, T, n_mtp, seed, R=1, copies=1):
        """pairs: (prompt, response) as arrays of ids, T + 1 at most together"""
        self.T, self.P, self.R, self.seed, self.epoch = T, n_mtp, R, seed, None
        self.n, self.copies = len(pairs) // R // copies, copies
        self.rows = np.full((len(pairs), T + n_mtp), -1, np.int32)
        self.answers = self.rows.copy()
        for row, answer, (prompt, response) in zip(self.rows, self.answers, pairs):
            row[:len(prompt) + len(response)] = np.concatenate((prompt, response))
            answer[len(prompt):] = row[len(prompt):]

    def batch(self, rows):
        """tokens (B, T), targets (P, B, T), -1 outside of the response; int32"""
        return np.maximum(self.rows[rows, :self.T], 0), later(self.answers[rows], self.T)

    def pick(self, i, B):
        """Which rows are i to i + B of the run."""
        return [self.R * self.shuffled(j // self.R) + j % self.R for j in range(i, i + B)]

    def take(self, i, B):
        return self.batch(self.pick(i, B))

# ==== 8 Checkpoint ====
# A safetensors file (data/tensors.py).  Weights have the names of a LlamaForCausalLM and are slices
# of the flat buffer: the buffer is the file.  Heads 1.. and the moments have names of their own.
@dataclass
class State(Settings):
    """What a checkpoint knows besides the weights."""
    kind: str = "base"         # "chat" after fine-tuning
    template: str = ""         # Jinja text of a chat; empty: Alpaca's
    bos: str = ""              # names of the tokens that begin and end what the model reads
    eos: str = "</s>"
    step: int = 0
    n_steps: int = 0
    tokens_seen: int = 0
    micro_batch: int = 0       # sequences at a time: where they are summed apart, bits depend on it
    elapsed: float = 0.0       # seconds of training
    bits_per_byte: float = 0.0         # the latest validation, 0: none yet
    text_sha256: str = ""
    options: dict = field(default_factory=dict)
    reference: list = field(default_factory=list)      # of dpo: -log ref of every response

def tensor_shapes(cfg, moments=False):
    """name -> shape of the tensors of a checkpoint, in buffer order."""
    C, F, D, V = cfg.n_embd, cfg.n_hidden, cfg.head_dim, cfg.vocab_size
    HD, GD = cfg.n_head * D, cfg.n_kv_head * D
    each = lambda *parts: [(f"model.layers.{l}.{name}", shape)
                           for l in range(cfg.n_layer) for name, shape in parts]
    heads = [(f"mtp.{k}" if k else "lm_head", (V, C)) for k in range(cfg.n_mtp)]
    table = [("model.embed_tokens", (V, C)),
             *each(("self_attn.q_proj", (HD, C)), ("self_attn.k_proj", (GD, C)),
                   ("self_attn.v_proj", (GD, C))),
             *each(("self_attn.o_proj", (C, HD))),
             *each(("mlp.gate_proj", (F, C)), ("mlp.up_proj", (F, C))),
             *each(("mlp.down_proj", (C, F))), *heads[cfg.tie_embeddings:],
             *each(("input_layernorm", (C,))), *each(("post_attention_layernorm", (C,))),
             ("model.norm", (C,))]
    return {**{f"{name}.weight": shape for name, shape in table},
            **{f"adamw.{x}": (n_params(cfg),) for x in "mv" if moments}}

def named(cfg, flat, *moments):
    """name -> view of the flat buffer, and the moments."""
    names, shapes = zip(*tensor_shapes(cfg).items())
    return dict(zip((*names, "adamw.m", "adamw.v"), (*slices(flat, shapes), *moments)))

def write_checkpoint(path, cfg, tokenizer, state, flat, moments=()):
    meta = {"format": "nanoeuler", "config": json.dumps(asdict(cfg)),
            "state": json.dumps(asdict(state)), "tokenizer": tokenizer.to_json(),
            "tokenizer_sha256": tokenizer.hash()}
    buffers = (np.ascontiguousarray(x, "<f4") for x in (flat, *moments))
    write_tensors(path, meta, named(cfg, *buffers), "free space or choose another --out")

Checkpoint = namedtuple("Checkpoint", "cfg tokenizer state flat moments")

def read_checkpoint(path):
    with reading(path, "name a checkpoint that train, sft, dpo or import wrote"):
        meta, tensors = map_tensors(path)
        need(meta["format"] == "nanoeuler" and meta["sha256"], "another program wrote it")
        cfg = Config(**json.loads(meta["config"])).check()
        state = State(**json.loads(meta["state"])).check()
        moments = "adamw.m" in tensors
        found = {name: x.shape for name, x in tensors.items() if x.dtype == np.float32}
        need(found == tensor_shapes(cfg, moments), "its tensors are not those of its configuration")
        flat, *moments = (aligned((n_params(cfg),), np.float32) for _ in range(1 + 2 * moments))
        for name, x in named(cfg, flat, *moments).items():
            x[...] = tensors[name]
        tokenizer = bpe.Tokenizer.from_json(meta["tokenizer"])
        need(tokenizer.hash() == meta["tokenizer_sha256"], "its tokenizer is another model's")
        need(tokenizer.vocab_size == cfg.vocab_size,
             f"its tokenizer has {tokenizer.vocab_size} tokens, its model {cfg.vocab_size}")
    return Checkpoint(cfg, tokenizer, state, flat, moments)

def keep(path, force, remedy="another name keeps it"):
    """Refuses to replace a file without --force."""
    need(not os.path.exists(path) or force and os.path.isfile(path),
         f"{path} exists; {remedy}, --force replaces a file")

def print_table(title, rows):
    print(title)
    for name, value in rows:
        print(f"  {name:<16} {value}")
    print(flush=True)

# ==== 9 Training ====
@dataclass
class Optimization(Settings):
    """Settings of every run; its own follow below.  A checkpoint stores them for --resume."""
    steps: int = setting(0, 0, 1 << 40, "length of the run; 0: by minutes or epochs")
    batch: int = setting(2048, 1, 1 << 30, "tokens a step, rounded to whole sequences")
    micro_batch: int = setting(0, 0, 65_535, "sequences in memory at once; 0: as fits")
    lr: float = setting(6e-3, 1e-9, 1, "learning rate, times 128 / n_embd")
    floor: float = setting(0.02, 0, 1, "the cosine ends at this share of lr")
    warmup: int = setting(50, 0, 1 << 40, "steps of linear warm-up")
    weight_decay: float = setting(0.1, 0, 10, "of matrices only")
    beta1: float = setting(0.9, 0, 0.9999, "memory of the gradient")
    beta2: float = setting(0.95, 0, 0.9999, "memory of its square")
    clip: float = setting(1.0, 1e-9, 1e9, "largest global gradient norm")
    eval_every: int = setting(250, 1, 1 << 40, "steps between validations")
    save_every: int = setting(250, 1, 1 << 40, "steps between checkpoints")
    seed: int = setting(1, 0, 1 << 60, "of weights and batches")

@dataclass
class Options(Optimization):
    data: str = setting("data/shakespeare.txt", 0, 0, "a text, UTF-8")
    minutes: float = setting(3.0, 0.01, 1e6, "length of the run, all told")
    holdout: float = setting(0.1, 0.0001, 0.9, "tail of the text kept for validation")
    mtp_weight: float = setting(0.3, 0, 10, "of the mean loss of the other heads")
    weight_decay: float = setting(0.3, 0, 10, "of matrices only")
    cuts: float = setting(0.0, 0, 0.5, "share of words cut off from their space, for spelling")

@dataclass
class SftOptions(Optimization):
    data: str = setting("data/instructions.json", 0, 0, "JSON; data/alpaca.json goes first")
    epochs: float = setting(3.0, 0.001, 1e6, "length of the run")
    lr: float = setting(2e-3, 1e-9, 1, "learning rate, times 128 / n_embd")
    mtp_weight: float = setting(0.3, 0, 10, "of the mean loss of the other heads")
    cuts: float = setting(0.0, 0, 0.5, "share of words cut off from their space, anew in 16 epochs")

@dataclass
class DpoOptions(Optimization):
    data: str = setting("data/preferences_sample.jsonl", 0, 0, "data/preferences.jsonl goes first")
    epochs: float = setting(1.0, 0.001, 1e6, "length of the run")
    lr: float = setting(3e-5, 1e-9, 1, "learning rate, times 128 / n_embd")
    beta: float = setting(0.1, 1e-9, 1e9, "how closely the policy keeps to the reference")
    nll: float = setting(0.0, 0, 1e3, "weight of -log pi(chosen) a token, beside the loss shown")

def evaluate(model, tokens, targets, n_bytes, rows=None, some=16):
    """Bits per byte = sum CE / ln 2 / bytes, which does not depend on the tokenizer.
    Head 0 on tokens, targets (n, T) of n_bytes, or on so many `rows` of them, spread evenly."""
    pick = np.linspace(0, len(tokens) - 1, min(len(tokens), rows or len(tokens))).astype(int)
    parts = np.split(pick, range(some, len(pick), some))
    nats = sum(model.losses(tokens[part], targets[part]).sum() for part in parts)
    share = (targets[pick] >= 0).sum() / (targets >= 0).sum()
    return float(nats / math.log(2) / (n_bytes * share))

class Run:
    """One training run: model, data, clock and log, fresh or from a checkpoint."""
    verb, Options, full, scope = "train", Options, "", "the whole held-out tail"
    line, measures = "loss {loss:.3f}  {bits_per_byte:.3f} bits/byte", {}
    preset, R = "small", 1

    def __init__(self, out, start, options, engine=Model):
        self.out, self.log, self.options = out, out.removesuffix(".bin") + ".jsonl", options
        need(os.path.realpath(self.log) not in map(os.path.realpath, (out, options.data)),
             f"the log of {out} would replace {self.log}; choose another --out")
        self.state, self.tokenizer = replace(start.state, options=asdict(options)), start.tokenizer
        o, s, cfg, T, R = options, self.state, start.cfg, start.cfg.seq_len, self.R
        self.began, self.B = time.perf_counter() - s.elapsed, R * max(1, round(o.batch / T / R))
        rows, self.lr = self.load(cfg), o.lr * 128 / cfg.n_embd
        s.n_steps = max(s.step, o.steps) if o.steps else s.n_steps
        cfg = replace(cfg, vocab_size=self.tokenizer.vocab_size)     # a short text has fewer merges
        flat = init_params(cfg, o.seed) if start.flat is None else start.flat
        self.model = engine(cfg, flat, start.moments, o)
        self.next = self.batches.take(s.step * self.B, self.B)
        print_table(f"NanoEuler: {n_params(cfg):,} parameters, {self.model.device()}", [
            ("model", f"{cfg.n_layer} layers, width {cfg.n_embd}, {cfg.n_head}/{cfg.n_kv_head} "
                      f"heads, SwiGLU {cfg.n_hidden}, {cfg.n_mtp} output heads"),
            *rows, ("batch", f"{self.B} x {T} = {self.B * T:,} tokens"),
            ("AdamW", f"lr {self.lr:.2g}, warm-up {o.warmup} steps, cosine to {o.floor:g} of it, "
                      f"decay {o.weight_decay:g}, clip {o.clip:g}, seed {o.seed}"),
            ("length", f"{o.steps:,} steps" if o.steps else f"{o.minutes:g} minutes"),
            ("writes", f"{out} and {self.log}; Ctrl-C saves and stops")])

    def load(self, cfg):
        """Reads tokenizer, batches, validation.  Returns rows for the table."""
        o, text = self.options, read_text(self.options.data)
        self.same_data(hashlib.sha256(text).hexdigest())
        train, val = parts = split_text(memoryview(text), o.holdout)
        self.tokenizer = self.tokenizer or bpe.train(excerpt(train), cfg.vocab_size)
        tokens, tail = tokenize(o.data, parts, self.tokenizer, self.state.text_sha256, o.cuts,
                                o.seed)
        self.batches = Batches(tokens, cfg.seq_len, cfg.n_mtp, o.seed)
        tail = np.append(tokens[-1:], tail)
        x, (y,) = windows(tail, range(0, len(tail) - 1, cfg.seq_len), cfg.seq_len, 1)
        self.val = x, y, len(val)
        self.bytes_per_token = len(train) / len(tokens)
        return (("text", f"{o.data}, {len(text):,} bytes, the last {o.holdout:.0%} held out"),
                ("tokenizer", f"{self.tokenizer.vocab_size} tokens, {self.bytes_per_token:.2f} "
                              f"bytes a token"))

    def same_data(self, digest):
        """A resumed run must find the data it was started with."""
        old = self.state.text_sha256 or digest
        need(digest == old, f"{self.options.data} has changed, its sha256 is {digest[:12]}, not "
             f"{old[:12]}; restore it, or start with --out NAME")
        self.state.text_sha256 = digest

    def elapsed(self):
        return time.perf_counter() - self.began

    def weights(self, tokens, targets, micro):
        """d loss / d (summed CE of a head of a sequence), (B, P)."""
        return np.tile(loss_weights(targets, self.options.mtp_weight), (self.B, 1))

    def advance(self):
        """One step: gradient, clip, AdamW.  Returns its log record."""
        began, o, s, model = time.perf_counter(), self.options, self.state, self.model
        micro = s.micro_batch = model.micro_batch(self.B, o.micro_batch or s.micro_batch)
        tokens, targets = self.next
        lr = lr_at(s.step, s.n_steps or math.inf, self.lr, o.warmup, o.floor)     # inf: no plan yet
        weight = self.weights(tokens, targets, micro)
        for b in range(0, self.B, micro):
            part = slice(b, b + micro)
            model.gradient(tokens[part], targets[:, part], weight[part])
        s.step = t = s.step + 1
        self.next = self.batches.take(t * self.B, self.B)      # while a GPU still works
        losses, norm = model.update(np.array([lr, o.beta1, o.beta2, 1e-8, o.weight_decay, o.clip,
                                              1 - o.beta1 ** t, 1 - o.beta2 ** t]))
        ce = losses / np.maximum(1, (targets >= 0).sum((1, 2)))
        if not (math.isfinite(norm) and np.isfinite(ce).all()):
            raise UserError(f"step {t}: {model.first_bad_tensor()}; stopped before the update, "
                            f"{self.out} is as it was; start with a lower --lr and another --out")
        s.tokens_seen, seconds = t * tokens.size, time.perf_counter() - began
        return {"step": t, "loss": ce[0], "heads": ce.tolist(), "lr": lr, "norm": norm,
                "bits_per_byte": ce[0] / math.log(2) / self.bytes_per_token,
                "ms": 1e3 * seconds, "tokens_per_s": tokens.size / seconds, **self.measures}

    def validate(self, rows=None):
        """Measures held-out text, or some rows of it; returns the result in words."""
        bits = self.state.bits_per_byte = evaluate(self.model, *self.val, rows,
                                                   self.state.micro_batch or 16)
        self.record(step=self.state.step, val_bits_per_byte=bits, windows=rows)
        return f"{bits:.4f} bits/byte"

    def save(self):
        self.state.elapsed, (flat, *moments) = self.elapsed(), self.model.buffers()
        write_checkpoint(self.out, self.model.cfg, self.tokenizer, self.state, flat, moments)

    def sample(self, n, prompt="\n", **sampling):
        """What the model says next, up to </s>."""
        rng, ids = np.random.default_rng(self.state.step), self.tokenizer.encode(prompt)
        stop = self.tokenizer.specials.get(self.state.eos)
        ids = generate(self.model.decoder(), ids, n, rng, Sampling(**sampling), stop)
        return self.tokenizer.decode(list(ids)).decode("utf-8", "replace")

    def record(self, **values):
        print(json.dumps(values), file=self.log_file, flush=True)

    def go(self):
        """The training loop.  With --minutes it plans as many steps as the time left allows,
        anew until the last tenth.  Ctrl-C or SIGTERM ends it after a step; a second one kills."""
        o, s, first, asked = self.options, self.state, self.state.step, []
        log = read_log(self.log) if s.step and os.path.exists(self.log) else []
        ask = lambda number, frame: asked.append(signal.signal(number, signal.SIG_DFL))
        save_if = lambda kind, *_: kind and issubclass(kind, OSError) and self.save()
        with open(self.log, "w", encoding="utf-8") as self.log_file, contextlib.ExitStack() as end:
            end.push(save_if)                # as __exit__: a closed pipe or a full disk saves, too
            for number in (signal.SIGINT, signal.SIGTERM):
                end.callback(signal.signal, number, signal.signal(number, ask))
            for r in log:                    # a killed run may have logged steps it did not save
                if r["step"] <= s.step:
                    self.record(**r)
            while s.step < (s.n_steps or math.inf) and not asked:
                r, done = self.advance(), s.step - first
                self.record(**r)
                if done == 1:
                    began = self.elapsed()   # the first step compiles what no cache has
                if done == 5 or done > 5 and s.step % 20 == 0:
                    pace = (self.elapsed() - began) / (done - 1)     # with validations and samples
                    if not o.steps and not s.step > 0.9 * s.n_steps > 0:
                        check = pace * self.val[0].size / (3 * self.next[0].size)
                        left = 60 * o.minutes - self.elapsed() - check       # check: at the end
                        s.n_steps = s.step + max(1, int(left / pace))
                    left = int((s.n_steps - s.step) * pace)
                    print(f"step {s.step:>5}/{s.n_steps}  {self.line.format(**r)}  lr {r['lr']:.1e}"
                          f"  |g| {r['norm']:.2f}  {r['ms']:.0f} ms  "
                          f"{r['tokens_per_s'] / 1e3:.1f}k tok/s  ETA {left // 60}:{left % 60:02d}",
                          flush=True)
                if s.step % o.eval_every == 0 and s.step != s.n_steps:
                    print(f"step {s.step:>5}  validation {self.validate(rows=64)} (estimate)  "
                          f"{self.sample(40)!r}", flush=True)
                if s.step % o.save_every == 0 and s.step != s.n_steps:
                    self.save()
            final = 0 < s.n_steps <= s.step and self.validate()
            self.save()
        if not final:
            return print(f"\nstopped at step {s.step} of {s.n_steps or '?'}, and saved; go on with:"
                         f"\n    python {self.model.program} {self.verb} --resume --out "
                         f"{shlex.quote(self.out)}")
        print(f"\n{self.sample(160)}\n\nvalidation {final} on {self.scope}, after "
              f"{self.elapsed() / 60:.1f} minutes")
        print_done(self.out, s, self.model)

class SftRun(Run):
    """Supervised fine-tuning: the loop of `Run` on examples, the loss that of their responses."""
    verb, Options, full, scope = "sft", SftOptions, "data/alpaca.json", "all held-out responses"
    answers = ["output"]

    def load(self, cfg):
        o, T, R, rng = self.options, cfg.seq_len, self.R, np.random.default_rng(self.options.seed)
        examples, digest = read_examples(o.data, *self.answers)
        self.same_data(digest)
        end = np.int32(self.tokenizer.specials[self.state.eos])

        def rows_of(e, share=0.0):
            """[(prompt, response)] of an example, None if it is too long; </s> is a target only"""
            texts = prompt_of(e), *(e[key] for key in self.answers)
            prompt, *answers = (encode_cut(self.tokenizer, x.encode(), share, rng) for x in texts)
            fits = len(prompt) + max(map(len, answers)) <= T
            return [(prompt, np.append(answer, end)) for answer in answers] if fits else None

        train, val, long = parts = [], [], []
        for e in examples:
            rows = rows_of(e)
            if not rows:
                long.append(e)
            elif e["instruction"] and all(e[key] for key in self.answers):
                parts[held_out(e)].append((e, rows))
        need(train and val, f"{o.data}: {len(train)} examples to learn, {len(val)} held out, "
             f"{len(long)} longer than {T} tokens; use more, or a longer --seq-len")
        n, empty, copies = len(train), len(examples) - sum(map(len, parts)), 1
        o.steps = o.steps or math.ceil(o.epochs * R * n / self.B)
        if share := vars(o).get("cuts"):         # up to 16 epochs, each cut elsewhere
            copies = min(16, math.ceil(o.steps * self.B / R / n))
            train = [(e, rows_of(e, share) or rows) for _ in range(copies) for e, rows in train]
        size = lambda part, keys: sum(len(e[key].encode()) for e, _ in part for key in keys)
        self.batches, self.test = (
            Examples([row for _, rows in part for row in rows], T, cfg.n_mtp, o.seed, R, k)
            for part, k in ((train, copies), (val, 1)))
        tokens, targets = self.test.batch(slice(None))
        self.val = tokens[::R], targets[0, ::R], size(val, self.answers[:1])
        self.questions = [e for e, _ in val]
        self.bytes_per_token = size(train, self.answers) / (self.batches.answers >= 0).sum()
        return (("examples", f"{o.data}, {n:,} and {len(val):,} held out"),
                ("left out", f"{len(long):,} examples longer than --seq-len {T}, {empty:,} empty"))

    def sample(self, n):
        """The likeliest answer to a held-out instruction."""
        e = self.questions[self.state.step % len(self.questions)]
        return (f"> {e['instruction']} {e['input']}\n"
                f"{super().sample(n, prompt_of(e), temperature=0.0)}")

class DpoRun(SftRun):
    """Direct preference optimization: the loop of `SftRun` on pairs of responses, `dpo_loss`.
    The reference is the model at step 0.  It never changes, so its cross-entropies are computed
    then, once, and kept in the checkpoint: there is no second model."""
    verb, Options, full = "dpo", DpoOptions, "data/preferences.jsonl"
    scope, answers, R = "all held-out pairs", ["chosen", "rejected"], 2
    line = "loss {loss:.3f}  accuracy {accuracy:.0%}  margin {margin:.3f}  KL {kl:.2f}"

    def __init__(self, *args):
        super().__init__(*args)
        if not self.state.reference:
            print("the reference reads every pair once\n", flush=True)
            self.state.reference = [ce for examples in (self.batches, self.test)
                                    for ce in self.losses(examples, range(len(examples.rows)))]
        self.learned, self.tested = np.split(self.state.reference, [len(self.batches.rows)])

    def losses(self, examples, rows, some=16):
        """-log pi of the responses in these rows, (B,), `some` of them at a time."""
        batches = (examples.batch(rows[b:b + some]) for b in range(0, len(rows), some))
        return np.concatenate([self.model.losses(tokens, y) for tokens, (y, *_) in batches])

    def weights(self, tokens, targets, micro):
        """A forward pass of its own: the weight of a row depends on both responses of its pair."""
        rows = self.batches.pick(self.state.step * self.B, self.B)
        ce, weight = self.losses(self.batches, rows, micro), np.zeros((self.B, len(targets)))
        self.measures, weight[:, 0] = dpo_loss(ce, self.learned[rows], self.options.beta)
        weight[::2, 0] += 2 * self.options.nll / self.B / (targets[0, ::2] >= 0).sum(1)
        return weight

    def validate(self, rows=None):
        text, ce = super().validate(rows), self.losses(self.test, range(len(self.test.rows)))
        r, _ = dpo_loss(ce, self.tested, self.options.beta)
        self.record(step=self.state.step, **{f"val_{k}": v for k, v in r.items()})
        return f"{self.line.format(**r)}  {text} of the chosen"

def print_done(out, s, engine):
    print(f"{out} is complete: {s.step:,} of {s.n_steps or s.step:,} steps.  Talk to it with:\n"
          f"    python {engine.program} {engine.talk} {shlex.quote(out)}")

def launch(run, engine=Model, preset="", file="", *, out, resume, force, **chosen):
    """A run from a preset or from the weights in a file.  Or `out` goes on, with the settings it
    was started with: flags may make it longer and change nothing else."""
    if {"minutes", "epochs"} & chosen.keys():
        chosen.setdefault("steps", 0)
    if resume:
        start, size = read_checkpoint(out), asdict(PRESETS[preset]) if preset else {}
        given = {**{k: v for k, v in size.items() if k not in {f.name for f in SHAPE}}, **chosen}
        s, length = start.state, {"steps", "minutes", "epochs"}
        free = {*length, "data", "micro_batch"}          # of another machine
        with reading(f"{out} was not made by {run.verb}", "start with --out NAME"):
            options = run.Options(**s.options).check()
        for name, old in {**asdict(start.cfg), **asdict(options)}.items():
            need(name in free or given.get(name, old) == old, f"{out} was started with {name} "
                 f"{old}, not {given.get(name)}; drop the flag, or start with --out NAME")
        longer = length & dict(chosen.items() - vars(options).items()).keys()
        if longer:
            s.n_steps, options.steps = 0, 0
        options = replace(options, **{k: v for k, v in chosen.items() if k in free}).check()
        if longer and "minutes" in chosen and s.elapsed:           # at the pace there was
            s.n_steps = max(s.step, int(s.step * 60 * options.minutes / s.elapsed))
        if s.step >= (options.steps or s.n_steps or s.step + 1):
            return print_done(out, s, engine)
        need(start.moments, f"{out} has no AdamW moments to go on with; start with --out NAME")
    else:
        keep(out, force, "--resume goes on with it, --out NAME keeps it")
        if os.path.exists(run.full):
            chosen.setdefault("data", run.full)
        elif run.full and "data" not in chosen:
            print(f"learning {run.Options.data}; {run.full}, of make data, would go first\n")
        start = Checkpoint(PRESETS[preset or run.preset], None, State(), None, ())
        if file:
            start = read_checkpoint(file)
            bos, eos = start.state.bos, start.state.eos
            need(eos in start.tokenizer.specials, f"{file} has no token {eos} to end a response")
            start = start._replace(moments=(), state=State(kind="chat", bos=bos, eos=eos))
        shape = {k: chosen.pop(k) for k in list(chosen) if k in asdict(start.cfg)}
        options = run.Options(**chosen).check()
        start = start._replace(cfg=replace(start.cfg, **shape).check())
    if engine is Model:
        compile_kernels()
    run(out, start, options, engine).go()

# ==== 10 Inference ====
SHARED = 1 << 16     # bytes of a matrix; two threads that are awake need 2 us to start and to meet

@jit
def dot_rows(y, w, scale, x):
    for n in range(len(y)):
        row, s = w[n], y.dtype.type(0)
        for k in range(len(x)):
            s += value(row[k]) * x[k]
        y[n] += s * scale[n]

@jit_parallel
def dot_rows_parallel(y, w, scale, x):
    for i in prange((len(y) + 15) // 16):
        n0, n1 = 16 * i, min(len(y), 16 * i + 16)
        dot_rows(y[n0:n1], w[n0:n1], scale[n0:n1], x)

@jit
def matvec_add(y, w, scale, x):
    """y += scale * (w x)     y, scale (N,), w (N, K) of any stored type, x (K,)
    The threads share what is too large for a cache: one core does not use up the memory's speed."""
    if w.size * w.itemsize < SHARED:
        dot_rows(y, w, scale, x)
    else:
        dot_rows_parallel(y, w, scale, x)

@jit
def attention_of_key(g, o, q, kc, vc, n, scores):
    """One query row a head against the first n of the cache, the heads of key g together.
    o, q (H, D), kc (G, D, T), vc (G, T, D)     scratch: scores (H, T)"""
    H, G, scale = len(q), len(kc), o.dtype.type(1 / math.sqrt(o.shape[1]))
    h0, h1 = g * H // G, (g + 1) * H // G
    matmul(scores[h0:h1, :n], q[h0:h1], kc[g, :, :n])
    for h in range(h0, h1):
        row, l = scores[h, :n], o.dtype.type(0)
        m = row_max(row)
        for t in range(n):
            row[t] = exp((row[t] - m) * scale)
        for t in range(n):
            l += row[t]
        norm = o.dtype.type(1) / l
        for t in range(n):
            row[t] *= norm
    matmul(o[h0:h1], scores[h0:h1, :n], vc[g, :n])

@jit_parallel
def attention_parallel(o, q, kc, vc, n, scores):
    for g in prange(len(kc)):
        attention_of_key(g, o, q, kc, vc, n, scores)

@jit
def decode_step(token, pos, p, s, kc, vc, x, y, qkv, att, gate_up, swiglu, scores, logits, cos, sin,
                eps):
    """One token at position pos through the network: `forward` for one row, keys and values cached.
    out: logits (V,)     in: p matrices, lm_head of head 0, and s scales of their rows, by `stored`
    in and out: kc (L, G, D, T), vc (L, G, T, D)"""
    (L, G, D, _), H = kc.shape, att.shape[0]
    rstd = np.empty(1, x.dtype)
    for c in range(x.size):
        x[0, c] = value(p.wte[token, c]) * s.wte[token]
    for l in range(L):
        rmsnorm_forward(y, rstd, x, p.attn_norm[l], eps)
        qkv[:] = 0
        matvec_add(qkv[0], p.qkv[l], s.qkv[l], y[0])
        rope(qkv, cos[pos:pos + 1], sin[pos:pos + 1], H + G, cos.dtype.type(1))
        heads = qkv.reshape(H + 2 * G, D)
        for g in range(G):
            for i in range(D):
                kc[l, g, i, pos] = heads[H + g, i]
                vc[l, g, pos, i] = heads[H + G + g, i]
        if G * D * pos * kc.itemsize < SHARED:
            for g in range(G):
                attention_of_key(g, att, heads[:H], kc[l], vc[l], pos + 1, scores)
        else:
            attention_parallel(att, heads[:H], kc[l], vc[l], pos + 1, scores)
        matvec_add(x[0], p.attn_proj[l], s.attn_proj[l], att.reshape(H * D))
        rmsnorm_forward(y, rstd, x, p.mlp_norm[l], eps)
        gate_up[:] = 0
        matvec_add(gate_up[0], p.gate_up[l], s.gate_up[l], y[0])
        swiglu_forward(swiglu, gate_up)
        matvec_add(x[0], p.down[l], s.down[l], swiglu[0])
    rmsnorm_forward(y, rstd, x, p.final_norm, eps)
    logits[:] = 0
    matvec_add(logits, p.lm_head, s.lm_head, y[0])

Scales = namedtuple("Scales", Params._fields[:6])        # of the rows of the matrices

def stored(w, weights):
    """float32 matrices (.., N, K) as the decoder reads them, and a scale (.., N) for each row
    f32: as they are.  bf16: half the memory.  int8: a quarter, w = scale * round(w / scale)."""
    scale = np.ones(w.shape[:-1], w.dtype)
    if weights == "int8":
        scale = np.maximum(np.abs(w).max(-1), 1e-30) / 127
        w = np.rint(w / scale[..., None]).astype(np.int8)
    need(weights in ("f32", "bf16", "int8"), f"--weights is {weights}, expected f32, bf16 or int8")
    return to_bf16(w) if weights == "bf16" else w, scale

class Decoder:
    """The state of one conversation: a KV cache and the tokens in it."""

    def __init__(self, cfg, flat, weights="f32"):
        get_num_threads()                    # starts them: from a cache, decode_step does not
        C, F, H, D, L, G, T = (cfg.n_embd, cfg.n_hidden, cfg.n_head, cfg.head_dim, cfg.n_layer,
                               cfg.n_kv_head, cfg.seq_len)
        p, new = views(flat, param_table(cfg)), lambda *shape: aligned(shape, flat.dtype)
        rows = [stored(w, weights) for w in p[:5]]
        rows.append(rows[0] if cfg.tie_embeddings else stored(p.lm_head[0], weights))
        matrices, scales = zip(*rows)
        self.cfg, self.tokens, self.logits = cfg, [], new(cfg.vocab_size)
        self.buffers = (Params(*matrices, *map(np.copy, p[6:])), Scales(*scales),      # not `flat`
                        new(L, G, D, T), new(L, G, T, D), new(1, C), new(1, C),
                        new(1, (H + 2 * G) * D), new(H, D), new(1, 2 * F), new(1, F),
                        new(H, T), self.logits, *rope_table(cfg, flat.dtype))

    def step(self, token):
        """Appends a token; returns the logits (V,) of the next, a view valid until the next call.
        A full context slides: its later half is read again, from position 0."""
        if len(self.tokens) == self.cfg.seq_len:
            later, self.tokens = self.tokens[self.cfg.seq_len - self.cfg.seq_len // 2:], []
            for t in later:
                self.step(t)
        logits = self.decode(token, len(self.tokens))
        self.tokens.append(token)
        return logits

    def decode(self, token, pos):
        """The logits after `token` at position pos, whose keys and values are kept."""
        decode_step(token, pos, *self.buffers, self.cfg.norm_eps)
        return self.logits

@dataclass
class Sampling(Settings):
    """What `chat` and `generate` are started with."""
    temperature: float = setting(0.8, 0, 100, "0: always the likeliest token")
    top_k: int = setting(0, 0, 1 << 40, "only the k likeliest; 0: all")
    top_p: float = setting(1.0, 0, 1, "the fewest that have probability p")
    min_p: float = setting(0.0, 0, 1, "only those this likely, beside the likeliest")
    tokens: int = setting(200, 0, 1 << 40, "longest reply")
    seed: int = setting(1, 0, 1 << 60, "of the sampling")
    weights: str = setting("f32", 0, 0, "in memory: f32, bf16, or on the CPU int8")
    template: str = setting("", 0, 0, "of a chat: alpaca or chatml; empty: the model's own")

def sample(logits, rng, o):
    """Draws an id from softmax(logits / temperature), restricted by top-k, top-p and min-p."""
    if o.temperature == 0:
        return int(np.argmax(logits))
    order = np.argsort(-logits, kind="stable")
    z = logits[order].astype(np.float64)
    p = np.exp((z - z[0]) / max(o.temperature, 1e-99))       # the likeliest has 1
    keep = p >= o.min_p
    keep[o.top_k or len(p):] = False
    keep &= np.cumsum(p) - p < o.top_p * p.sum()       # those before it do not reach top_p yet
    keep[0] = True
    total = np.where(keep, p, 0).cumsum()
    return int(order[np.searchsorted(total, rng.random() * total[-1], side="right")])

def generate(decoder, prompt, n, rng, sampling, stop=None):
    """Reads the prompt's ids, then yields up to n sampled ones; `stop` ends it, not yielded."""
    need(len(prompt), "the prompt has no token: it is empty, or of unknown bytes; use other words")
    for token in prompt:
        logits = decoder.step(int(token))
    for _ in range(n):
        token = sample(logits, rng, sampling)
        logits = decoder.step(token)
        if token == stop:
            return
        yield token

def speak(file, prompt=None, decoder=Decoder, **chosen):
    """`chat`, or `generate` if there is a prompt.  A chat model answers, another one continues."""
    o = Sampling(**chosen).check()
    need(o.template in ("", "alpaca", "chatml"), f"--template {o.template} is not alpaca or chatml")
    c, rng, said = read_checkpoint(file), np.random.default_rng(o.seed), []
    answers, talker = c.state.kind == "chat" or o.template, decoder(c.cfg, c.flat, o.weights)
    stop = c.tokenizer.specials.get(c.state.eos)
    c = c._replace(flat=None)                # the talker has the weights it needs

    def reply(text):
        """Prints the reply as it comes, whole characters only."""
        said.extend([("user", text), ("assistant", "")])
        ids = c.tokenizer.encode(text)
        if answers:                          # what the cache holds of the conversation, stays there
            ids = chat_ids(o.template or c.state.template, said[:-1], c.state, c.tokenizer)
            same = [a == b for a, b in zip(talker.tokens, ids[:-1])] + [False]
            talker.tokens, ids = talker.tokens[:same.index(False)], ids[same.index(False):]
        words = (c.tokenizer.vocab[k] for k in generate(talker, ids, o.tokens, rng, o, stop))
        for piece in codecs.iterdecode(words, "utf-8", "replace"):
            said[-1] = "assistant", said[-1][1] + piece
            print(piece, end="", flush=True)
        print()

    need(sys.stdin or prompt is not None, "standard input is closed; see generate")
    if prompt is not None:
        print("" if answers else prompt, end="")
        return reply(prompt)
    print(f"{file}: {n_params(c.cfg):,} parameters, context {c.cfg.seq_len} tokens, "
          f"{'answers' if answers else 'continues'} what you type.\n"
          f"/reset forgets what was said, /quit or Ctrl-D leaves, Ctrl-C stops a reply.")
    with contextlib.suppress(ImportError):   # arrow keys
        importlib.import_module("readline")
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while (text := input("\n> ")).strip() != "/quit":
            if text.strip() == "/reset":
                talker.tokens = said[:] = []
            elif text.strip():
                with contextlib.suppress(KeyboardInterrupt):
                    reply(text)
    print()

# ==== 11 Import and export ====
# Hugging Face keeps a model in a directory, llama.cpp in one file (GGUF: bench/gguf_file.py).
LLAMA = [("n_embd", "hidden_size", "llama.embedding_length"),      # Config, config.json, GGUF
         ("n_hidden", "intermediate_size", "llama.feed_forward_length"),
         ("n_layer", "num_hidden_layers", "llama.block_count"),
         ("n_head", "num_attention_heads", "llama.attention.head_count"),
         ("n_kv_head", "num_key_value_heads", "llama.attention.head_count_kv"),
         ("head_dim", "head_dim", "llama.attention.key_length"),
         ("seq_len", "max_position_embeddings", "llama.context_length"),
         ("vocab_size", "vocab_size", "llama.vocab_size"),
         ("rope_theta", "rope_theta", "llama.rope.freq_base"),
         ("norm_eps", "rms_norm_eps", "llama.attention.layer_norm_rms_epsilon"),
         ("tie_embeddings", "tie_word_embeddings", "")]
def llama_config(c, n_mtp=1):
    """Config of a config.json; what this engine does not compute is refused."""
    rope, H = c.get("rope_parameters") or c.get("rope_scaling") or {}, c["num_attention_heads"]
    expected = {"model_type": "llama", "rope_type": "default", "hidden_act": "silu",
                "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1}
    c = {**expected, "model_type": None, "num_key_value_heads": H, "rope_theta": 10000.0,
         "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "tie_word_embeddings": False,
         "head_dim": c["hidden_size"] // H, "rope_type": rope.get("type", "default"), **rope,
         **{key: v for key, v in c.items() if v is not None}}
    for key, v in expected.items():
        need(c[key] == v, f"its {key} is {c[key]}, expected {v}")
    return Config(n_mtp=n_mtp, **{ours: c[theirs] for ours, theirs, _ in LLAMA}).check()

def llama_of_folder(folder):
    """Config, Tokenizer, {name: shape}, name -> tensor, (chat template, bos, eos)"""
    at, tensors = pathlib.Path(folder), {}
    for shard in at.glob("*.safetensors"):   # and heads 1.. of `export`
        tensors |= map_tensors(shard)[1]
    config, words = (json.loads((at / name).read_text(encoding="utf-8"))
                     for name in ("config.json", "tokenizer_config.json"))
    need(not words.get("add_bos_token"), "its tokenizer puts a token before every text")
    cfg = llama_config(config, 1 + sum(name.startswith("mtp.") for name in tensors))
    shapes, read = {key: x.shape for key, x in tensors.items()}, lambda key: from_bf16(tensors[key])
    template, own = words.get("chat_template") or "", at / "chat_template.jinja"
    ends = (token["content"] if isinstance(token, dict) else token or ""
            for token in (words.get("bos_token"), words.get("eos_token")))
    return cfg, bpe.Tokenizer.load(at / "tokenizer.json"), shapes, read, (
        own.read_text(encoding="utf-8") if own.exists() else template, *ends)

def import_llama(source, out, force):
    """`import`: a Llama in a directory or a GGUF file becomes a checkpoint."""
    keep(out, force)
    with reading(source, "give a Llama with a byte-level BPE: a GGUF file, or a directory of "
                         "config.json, safetensors, tokenizer.json and tokenizer_config.json"):
        load = llama_of_folder if os.path.isdir(source) else bench("gguf_file", "llama_of_gguf")
        cfg, tokenizer, found, read, (template, bos, eos) = load(source)
        state = State(kind="chat" if template else "base", template=template, bos=bos, eos=eos,
                      options={"data": source}).check()
        need(tokenizer.vocab_size == cfg.vocab_size,
             f"its tokenizer has {tokenizer.vocab_size} tokens, its model {cfg.vocab_size}")
        shapes = tensor_shapes(cfg)
        for name in found.keys() - {*shapes, "lm_head.weight"}:
            need(name.endswith("inv_freq"), f"a Llama has no tensor {name}")
        for name, shape in shapes.items():
            need(found.get(name) == shape, f"{name} is {found.get(name, 'missing')}, not {shape}")
        flat = aligned((n_params(cfg),), np.float32)
        for name, x in named(cfg, flat).items():
            x[...] = read(name)
    write_checkpoint(out, cfg, tokenizer, state, flat)
    print(f"{out}: {flat.size:,} parameters, context {cfg.seq_len} tokens.  Talk to it with:\n"
          f"    python nanoeuler.py chat {shlex.quote(out)}")

def export(file, folder, gguf, matrices, force):
    """`export`: a checkpoint becomes a Hugging Face directory, a GGUF file, or both."""
    need((folder or gguf) and matrices in ("f32", "f16", "q8_0"),
         "name a directory or --gguf FILE, and --matrices f32, f16 or q8_0")
    c, remedy, at = read_checkpoint(file), "free space or name another place", os.path.join
    for path in (gguf, *(folder and at(folder, x) for x in ("config.json", "model.safetensors"))):
        keep(path or "", force)
    if gguf:
        with replacing(gguf, remedy) as temporary:
            bench("gguf_file", "write_gguf")(temporary, c, matrices)
        print(f"{gguf}: for llama.cpp, {matrices}")
    if not folder:
        return
    os.makedirs(folder, exist_ok=True)
    s, words, weights = c.state, c.tokenizer.specials, named(c.cfg, c.flat)
    ends = {f"{end}_token": x for end, x in (("bos", s.bos), ("eos", s.eos)) if x in words}
    ids = {f"{end}_id": words[x] for end, x in ends.items()}
    chat = {"chat_template": s.template or ALPACA} if s.kind == "chat" else {}
    heads = {name: weights.pop(name) for name in list(weights) if name.startswith("mtp.")}
    for name, tensors in (("mtp.safetensors", heads), ("model.safetensors", weights)):
        if tensors:
            write_tensors(at(folder, name), {"format": "pt"}, tensors, remedy)
        elif os.path.exists(at(folder, name)):           # of another model
            os.remove(at(folder, name))
    for name, content in (
            ("config.json", {"architectures": ["LlamaForCausalLM"], "model_type": "llama",
                             **{theirs: getattr(c.cfg, ours) for ours, theirs, _ in LLAMA},
                             "hidden_act": "silu", "torch_dtype": "float32", **ids}),
            ("generation_config.json", {"do_sample": True, **ids, **{
                k: getattr(Sampling, k) for k in ("temperature", "top_k", "top_p", "min_p")}}),
            ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **ends, **chat,
                                       "clean_up_tokenization_spaces": False,
                                       "model_max_length": c.cfg.seq_len}),
            ("tokenizer.json", json.loads(c.tokenizer.to_json()))):
        with replacing(at(folder, name), remedy) as temporary:
            pathlib.Path(temporary).write_text(json.dumps(content, indent=1), encoding="utf-8")
    print(f"{folder}: a LlamaForCausalLM" + f", and its heads 1 to {len(heads)}" * bool(heads))

# ==== 12 Command line ====
SHAPE = [f for f in fields(Config) if f.name in ("seq_len", "vocab_size", "n_mtp")]

def add_verbs(add):
    add("train", partial(launch, Run), "learn a text; writes a checkpoint and a log",
        arg("preset", nargs="?", choices=list(PRESETS), help="its size; if none, small"),
        out("nanoeuler.bin"), *RUN, settings=fields(Options), shape=SHAPE)
    add("sft", partial(launch, SftRun), "fine-tune a checkpoint: learn to answer", FILE,
        out("nanoeuler_chat.bin"), *RUN, settings=fields(SftOptions), shape=SHAPE[:1])
    add("dpo", partial(launch, DpoRun), "tune a chat checkpoint: learn to prefer", CHAT,
        out("nanoeuler_dpo.bin"), *RUN, settings=fields(DpoOptions), shape=SHAPE[:1])
    add("chat", speak, "continue or answer what you type", FILE, settings=fields(Sampling))
    add("generate", speak, "one continuation or answer", TEXT, FILE, settings=fields(Sampling))
    add("lens", bench("lens", "lens"), "the Euler steps of one prompt", TEXT, FILE)
    add("plot", bench("plot", "plot"), "loss curves of logs",
        arg("logs", nargs="*", default=["nanoeuler.jsonl"]), out("loss.png"))
    add("info", bench("info", "info"), "what is in a checkpoint", FILE)
    add("export", export, "a Hugging Face directory, or a GGUF file for llama.cpp", FILE,
        arg("folder", nargs="?", help="directory to write"), FORCE,
        arg("--gguf", default="", help="GGUF file to write"),
        arg("--matrices", default="f32", help="of the GGUF file: f32, f16 or q8_0"))
    add("import", import_llama, "a Hugging Face directory or a GGUF file becomes a checkpoint",
        arg("source", help="directory or .gguf"), arg("out", help="file to write"), FORCE)
    add("compile", compile_kernels, "compile the kernels into Numba's cache")

main = partial(run_verb, add_verbs, "A GPT from scratch")

if __name__ == "__main__":
    # As `nanoeuler`, not `__main__`: Numba's cache knows the named tuples by their module's name.
    import nanoeuler
    sys.exit(nanoeuler.main())
