"""Speed on one NVIDIA GPU: NanoEuler beside cuBLAS, PyTorch's attention and torch.compile.

    python bench/bench_gpu.py [--only matmul attention kernels step ablation decode]

Writes bench/out/gpu_<device>.json and .md.  Without --only everything but decode, some
eleven minutes on an H200, most of them naive attention's and torch.compile's.  Groups that were
measured before, on the same device with the same commit, stay in the file.

ceiling    What the card gives: a kernel that reads and writes memory, and cuBLAS on 8192^3.  Always
           measured.
matmul     Every product of a training step of the base preset, 64 x 512, against cuBLAS.
attention  Forward and backward against SDPA's FlashAttention-2 and cuDNN.
kernels    All the others, by the bytes they must move: each input read once, each output written
           once, over the time, as a share of the copy's.
step       The whole training step, also of the shapes of imported models, against the same model
           in PyTorch: oracles/torch_peer.py in tests.  Both have the same weights and the same
           batch.  PyTorch runs eagerly, with torch.compile, and with torch.compile in one CUDA
           graph; --modes adds others.  The best of them is the one to beat.
ablation   The engine without one of its parts, and FlashAttention against T x T matrices.
decode     Greedy, batch 1, whole contexts.

How: kernels are timed 20 calls at a time, recorded as one CUDA graph on either side, between two
events; a replay before the first event hides the time to issue the second.  Both sides read the
same numbers, and walk over as many copies of them as add up to four times the L2 cache.  Sides take
turns, nine rounds; a figure is the median, beside it the lowest and the highest.  Steps are timed
with the host's clock, some 0.4 s a turn, five rounds, staging of the batch included for NanoEuler
only: the peer finds it on the device.  Rows fail alone: what a broken kernel leaves behind ends
with its process, and the rest goes on in another.
"""
import argparse
import contextlib
import functools
import gc
import importlib
import importlib.metadata
import itertools
import json
import math
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections import namedtuple
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests")]
import nanoeuler as ne
import nanoeuler_cuda as nc
from nanoeuler_parts.gpu_memory import memory_table, needs_of
from oracles import torch_peer
from oracles.naive_attention import NaiveModel
from common import out_folder, shapes
from gpu_report import markdown
from numba import cuda

DEVICE, BF16 = "cuda", torch.bfloat16
CALLS, ROUNDS = 20, 9
PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bfloat16 by data sheet, flop/s
LR, MTP = 1e-4, 0.3
STEP = 64, 512                               # batch x T of the kernels, the products, the ablation
ATTENTION = (64, 512), (16, 1024), (4, 4096)
STEPS = (("base", 64, 512), ("base", 16, 1024), ("large", 32, 512), ("0.6b", 16, 512),
         ("1b", 16, 512), ("qwen3-0.6b", 8, 512), ("llama-3.2-1b", 8, 512), ("speedrun", 32, 512))
LONGER = (32, 1024), (16, 2048)              # where FlashAttention meets T x T matrices again
AGAIN = 3                                    # exit code of a worker that wants a fresh context

# How the peer may run.  The first three by default; each further one is compiled anew.
MODES = {"eager": dict(compiled=False), "compile": {}, "graph": {},
         "cudnn": dict(attention="cudnn"), "bf16-residual": dict(residual=BF16),
         "reduce-overhead": dict(mode="reduce-overhead"),
         "max-autotune": dict(mode="max-autotune-no-cudagraphs")}


class Skip(Exception):
    """A row that there is no way to run here."""


# ---- memory that both sides see
KINDS = {BF16: np.uint16, torch.float32: np.float32, torch.float64: np.float64,
         torch.int32: np.int32}

def shared(t):
    """The engine's array in the memory of a tensor."""
    x = cuda.as_cuda_array(t.view(torch.int16) if t.dtype == BF16 else t)
    return nc.DeviceNDArray(x.shape, x.strides, np.dtype(KINDS[t.dtype]), nc.gpu.stream, x.gpu_data)

def many(n, *shape, dtype=BF16, scale=1.0):
    """n tensors of normal numbers."""
    return [torch.randn(shape, device=DEVICE, dtype=dtype).mul_(scale) for _ in range(n)]

def arrays(n, *shape, dtype=BF16, scale=1.0):
    """The same, for the engine."""
    return [shared(t) for t in many(n, *shape, dtype=dtype, scale=scale)]

def one(*shape, dtype=torch.float32):
    return arrays(1, *shape, dtype=dtype)[0]

def copies(size):
    """How many operands of so many bytes add up to four times the L2 cache."""
    return max(1, min(16, math.ceil(4 * l2_bytes() / size)))

def l2_bytes():
    return getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 64 << 20)

def difference(x, y):
    """|x - y| / |y| of two lists of tensors"""
    x, y = (torch.cat([t.detach().float().flatten() for t in ts]) for ts in (x, y))
    return float((x - y).norm() / y.norm())

def clean():
    """Gives back what nobody holds."""
    gc.collect()
    cuda.current_context().deallocations.clear()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


# ---- time
Side = namedtuple("Side", "run stream note", defaults=("",))

def calls(f):
    def run():
        for i in range(CALLS):
            f(i)
    return run

def ours(f):
    """f(0), f(1), ... of the engine as one CUDA graph"""
    synchronize()                            # the operands are there
    graph, run = nc.Graph(), calls(f)
    for _ in range(2):                       # the first compiles, the second records
        graph(run)
    return Side(lambda: graph(run), our_stream())

def our_stream():
    return torch.cuda.ExternalStream(int(nc.gpu.stream.handle))

@functools.cache
def side_stream():
    return torch.cuda.Stream()

def theirs(f):
    """The same of PyTorch; where it cannot be recorded, as it is."""
    f(0)
    try:
        with cuda.defer_cleanup():           # the engine may not free memory meanwhile
            return Side(torch_peer.captured(calls(f), side_stream()), torch.cuda.current_stream())
    except RuntimeError as e:
        torch.cuda.synchronize()
        return Side(calls(f), torch.cuda.current_stream(), f"no CUDA graph: {first_line(e)}")

def milliseconds(side):
    """Device time of one call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    side.run()
    begin.record(side.stream)
    side.run()
    end.record(side.stream)
    end.synchronize()
    return begin.elapsed_time(end) / CALLS

def spread(values):
    return {"ms": statistics.median(values), "low": min(values), "high": max(values)}

def turns(sides, fresh=None):
    """{name: spread of ms a call}, the sides taking turns; fresh() comes before each."""
    out = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, side in sides.items():
            if fresh:
                fresh()
            out[name].append(milliseconds(side))
    return {name: spread(v) for name, v in out.items()}

def host_seconds(step, n):
    """Of one of n steps."""
    synchronize()
    began = time.perf_counter()
    for _ in range(n):
        step()
    synchronize()
    return (time.perf_counter() - began) / n

def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()             # all streams of the context, the engine's too

def pace(steps, rounds=5, seconds=0.4):
    """{name: ms a step, one for each round}, in turns of some 0.4 s"""
    n = {name: max(1, round(seconds / min(host_seconds(step, 1) for _ in range(2))))
         for name, step in steps.items()}    # the first gets its memory back
    out = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            out[name].append(1e3 * host_seconds(step, n[name]))
    return out

def first_line(e):
    return f"{type(e).__name__}: {e}".strip().splitlines()[0][:300]


# ---- ceilings
def copy_row():
    """2 GiB read, 2 GiB written"""
    x, y = (torch.zeros(1 << 30, device=DEVICE, dtype=BF16).normal_() for _ in range(2))
    side = theirs(lambda i: torch.neg(x, out=y))         # a kernel; copy_ would be a slower node
    return {"bytes": 2 * x.nbytes, **turns({"copy": side})["copy"]}

def square_row(n=8192):
    """n^3 of cuBLAS"""
    a, b, c = many(3, n, n)
    side = theirs(lambda i: torch.matmul(a, b, out=c))
    return {"flop": 2 * n ** 3, **turns({"cuBLAS": side})["cuBLAS"]}

def ceiling_rows(options):
    return {"copy": copy_row, "matmul": square_row}


# ---- matmul
def ops_of(rung):
    """The Ops that multiply that way: wgmma, mma or portable"""
    if nc.kernel_path(rung) != rung:
        raise Skip(f"this GPU has no {rung}")
    return nc.make_ops(rung)

def launched(f):
    """The kernels that f launches."""
    kernels, launch, modules = [], nc.launch, (nc, *(
        importlib.import_module(f"nanoeuler_parts.tensor_cores.{name}")
        for name in ("matmul_mma", "matmul_wgmma")))
    for module in modules:
        module.launch = lambda kernel, *rest, **kw: (
            kernels.append(kernel), launch(kernel, *rest, **kw))
    try:
        f()
    finally:
        for module in modules:
            module.launch = launch
    return kernels

def products(cfg, B, T):
    """(weights, how often a step, rows M, N, K) of the products out (M, N) = x (M, K) w (N, K)^T.
    The heads multiply as many rows at a time as their logits may take memory."""
    C, F_, HD, BT = cfg.n_embd, cfg.n_hidden, cfg.n_head * cfg.head_dim, B * T
    QKV, R = HD + 2 * cfg.n_kv_head * cfg.head_dim, nc.rows_per_chunk(cfg, BT, 2)
    return [("qkv", cfg.n_layer, BT, QKV, C), ("attn_proj", cfg.n_layer, BT, C, HD),
            ("gate_up", cfg.n_layer, BT, 2 * F_, C), ("down", cfg.n_layer, BT, C, F_),
            ("lm_head", BT / R, R, cfg.n_mtp * cfg.vocab_size, C)]

def matmul_rows(options):
    cfg, (B, T) = ne.PRESETS["base"], STEP
    rows = {}
    for name, count, *shape in products(cfg, B, T):
        for kind in ("forward", "dX", "dW"):
            rows[f"{name} {kind}"] = functools.partial(matmul_row, kind, count, *shape)
    return rows

def matmul_row(kind, count, M, N, K):
    """One product, ours and cuBLAS's.  dW is summed into float32, as training wants it: beside the
    product alone, in bfloat16, the peer gets two ways to do that."""
    n = copies(2 * (M * N + N * K + M * K))
    shape = {"dX": (M, K), "dW": (N, K)}.get(kind, (M, N))
    x, w, dy = (many(n, *s) if need else [None] * n for s, need in (
        ((M, K), kind != "dX"), ((N, K), kind != "dW"), ((M, N), kind != "forward")))
    zeros = lambda dtype: [torch.zeros(shape, device=DEVICE, dtype=dtype) for _ in range(n)]
    mine, out = zeros(torch.float32 if kind == "dW" else BF16), zeros(BF16)
    ops = nc.make_ops()
    X, W, DY, OUT = ([t if t is None else shared(t) for t in ts] for ts in (x, w, dy, mine))
    if kind == "dW":
        total = zeros(torch.float32)
        product = lambda i, ops=ops: ops.matmul_dw(OUT[i % n], DY[i % n], X[i % n])
        peer = lambda i: torch.matmul(dy[i % n].T, x[i % n], out=out[i % n])
        others = {"cuBLAS, float32 +=": lambda i: torch.addmm(
                      total[i % n], dy[i % n].T, x[i % n], out_dtype=torch.float32,
                      out=total[i % n]),
                  "cuBLAS, then +=": lambda i: total[i % n].add_(peer(i))}
    elif kind == "dX":
        product, others = lambda i, ops=ops: ops.matmul_dx(OUT[i % n], DY[i % n], W[i % n]), {}
        peer = lambda i: torch.matmul(dy[i % n], w[i % n], out=out[i % n])
    else:
        product, others = lambda i, ops=ops: ops.matmul(OUT[i % n], X[i % n], W[i % n]), {}
        peer = lambda i: torch.matmul(x[i % n], w[i % n].T, out=out[i % n])
    synchronize()
    usual = launched(lambda: product(0))
    synchronize()
    peer(0)
    off, notes = difference(mine[:1], out[:1]), {}
    sides = {"ours": ours(product), "cuBLAS": theirs(peer)}
    for name, f in others.items():
        try:
            sides[name] = theirs(f)
        except (RuntimeError, TypeError) as e:
            notes[name] = first_line(e)
    try:
        by_mma = functools.partial(product, ops=ops_of("mma"))
        if launched(lambda: by_mma(0)) == usual:
            raise Skip("asked for mma, the engine launches what it launches without")
        sides["mma"] = ours(by_mma)
    except (Skip, ne.UserError) as e:
        notes["mma.sync"] = str(e)
    notes.update({name: side.note for name, side in sides.items() if side.note})
    return {"kind": kind, "count": count, "shape": [M, N, K], "flop": 2 * M * N * K,
            "difference": off, "notes": notes, "times": turns(sides)}


# ---- attention
def attention_rows(options):
    return {f"{B} x {T}": functools.partial(attention_row, ne.PRESETS["base"], B, T)
            for B, T in ATTENTION}

def attention_row(cfg, B, T):
    """Ours on one (BT, QKV) buffer; SDPA's on contiguous q, k, v of the same numbers, K and V not
    expanded unless a backend refuses that."""
    H, G, D = cfg.n_head, cfg.n_kv_head, cfg.head_dim
    HD, QKV, BT = H * D, (H + 2 * G) * D, B * T
    n = copies(2 * BT * (QKV + HD))
    qkv, do, o, dqkv = (many(n, BT, width) for width in (QKV, HD, HD, QKV))
    lse, delta = arrays(n, H, BT, dtype=torch.float32), one(H, BT)
    QKVS, DO, O, DQKV = ([shared(t) for t in ts] for ts in (qkv, do, o, dqkv))
    ops = nc.make_ops()
    forward = lambda i: ops.attention_forward(O[i % n], lse[i % n], QKVS[i % n], T, D)
    still = [nc.to_device(x) for x in (np.ones((T, D // 2), np.float32),     # turns by nothing
                                       np.zeros((T, D // 2), np.float32))]
    backward = lambda i: ops.attention_backward(DQKV[i % n], delta, DO[i % n], O[i % n],
                                                lse[i % n], QKVS[i % n], *still, T, D)
    forwards, backwards, notes = {"ours": ours(forward)}, {"ours": ours(backward)}, {}
    synchronize()
    heads = lambda t: t.view(B, T, -1, D).transpose(1, 2)
    rows = lambda t: t.transpose(1, 2).reshape(BT, -1)
    for name in torch_peer.ATTENTION:
        try:
            off, forwards[name], backwards[name], note = peer_attention(
                name, [heads(t).split((H, G, G), 1) for t in qkv], [heads(t) for t in do],
                lambda y, grads: (difference(o[:1], [rows(y)]), difference(
                    dqkv[:1], [torch.cat([rows(g) for g in grads], 1)])))
            notes[name] = ", ".join(filter(None, [note, forwards[name].note, backwards[name].note,
                                                  "difference {:.1e}, {:.1e}".format(*off)]))
        except RuntimeError as e:
            notes[name] = first_line(e)
            forwards.pop(name, None)
    return {"shape": [B, T, H, G, D], "flop": 2 * B * H * T * T * D, "notes": notes,
            "forward": turns(forwards), "backward": turns(backwards)}

def peer_attention(name, inputs, do, compare):
    """(difference, forward, backward, note) of a backend of SDPA"""
    n, on = len(inputs), contextlib.nullcontext()
    leaves = [[t.contiguous().requires_grad_() for t in qkv] for qkv in inputs]
    do, note = [t.contiguous() for t in do], "K and V not expanded"
    if DEVICE == "cuda":                     # a backward pass runs where its forward pass did
        side_stream().wait_stream(torch.cuda.current_stream())
        on = torch.cuda.stream(side_stream())

    def forward(i):
        with sdpa_kernel(torch_peer.ATTENTION[name]):
            return F.scaled_dot_product_attention(*leaves[i % n], is_causal=True, enable_gqa=True)

    with on:
        try:
            y = [forward(i) for i in range(n)]
        except RuntimeError:
            group, note = leaves[0][0].shape[1] // leaves[0][1].shape[1], "K and V expanded"
            leaves = [[q, *(t.detach().repeat_interleave(group, 1).requires_grad_() for t in kv)]
                      for q, *kv in leaves]
            y = [forward(i) for i in range(n)]
        backward = lambda i: torch.autograd.grad(y[i % n], leaves[i % n], do[i % n],
                                                 retain_graph=True)
        grads = backward(0)
    synchronize()
    off = compare(y[0], grads) if note == "K and V not expanded" else (math.nan, math.nan)
    return off, theirs(forward), theirs(backward), note


# ---- every other kernel
def kernel_rows(options):
    return {name: functools.partial(kernel_row, size, make) for name, (size, make) in
            kernel_cases(replace(ne.PRESETS["base"], seq_len=STEP[1]), *STEP).items()}

def kernel_row(size, make):
    f, fresh = make(copies(size)), None
    if isinstance(f, tuple):
        f, fresh = f
    return {"bytes": size, **turns({"ours": ours(f)}, fresh)["ours"]}

def kernel_cases(cfg, B, T):
    """name -> (bytes that a call must move, function of n that makes the call f(i) on the i-th of n
    operands, or that and how to restore what f overwrites)"""
    C, F_, V, P, D, BT = cfg.n_embd, cfg.n_hidden, cfg.vocab_size, cfg.n_mtp, cfg.head_dim, B * T
    HEADS = cfg.n_head + cfg.n_kv_head
    QKV, R, f32 = (HEADS + cfg.n_kv_head) * D, nc.rows_per_chunk(cfg, BT, 2), torch.float32
    n_params = ne.n_params(cfg)
    rng = np.random.default_rng(1)
    tokens = lambda *shape: nc.to_device(rng.integers(0, V, shape, dtype=np.int32))

    def rmsnorm_forward(n):
        y, kept, w, rstd = arrays(n, BT, C), arrays(n, BT, C), one(C), one(BT)
        x = arrays(n, BT, C, dtype=f32)
        return lambda i: nc.residual_rmsnorm_forward(y[i % n], kept[i % n], rstd, x[i % n], w,
                                                     cfg.norm_eps)

    def rmsnorm_backward(n):
        dx, dy, x = (arrays(n, BT, C) for _ in range(3))
        w, dw, rstd, partial = one(C), one(C), one(BT), one(nc.GAIN_PARTS, C)
        return lambda i: nc.rmsnorm_backward(dx[i % n], dw, dy[i % n], partial, x[i % n], w, rstd)

    def rope(n):
        qkv, (cos, sin) = arrays(n, BT, QKV), map(nc.to_device, ne.rope_table(cfg, np.float32))
        return lambda i: nc.rope(qkv[i % n], cos, sin, T, HEADS, 1)

    def swiglu_forward(n):
        y, gate_up = arrays(n, BT, F_), arrays(n, BT, 2 * F_)
        return lambda i: nc.swiglu_forward(y[i % n], gate_up[i % n])

    def swiglu_backward(n):
        [source], tensors, dy = many(1, BT, 2 * F_), many(n, BT, 2 * F_), arrays(n, BT, F_)
        gate_up = [shared(t) for t in tensors]
        return (lambda i: nc.swiglu_backward(gate_up[i % n], dy[i % n]),
                lambda: [t.copy_(source) for t in tensors])

    def cross_entropy(n):
        [source], tensors, nll = many(1, R, P * V), many(n, R, P * V), one(P, BT)
        logits, targets = [shared(t) for t in tensors], tokens(P, BT)
        weight = one(B, P, T, dtype=torch.float64)
        return (lambda i: nc.cross_entropy(nll, logits[i % n], targets, weight, 0, V, T),
                lambda: [t.copy_(source) for t in tensors])

    def embedding_forward(n):
        x, wte, ids = arrays(n, BT, C, dtype=f32), one(V, C), tokens(BT)
        return lambda i: nc.embedding_forward(x[i % n], ids, wte)

    def embedding_backward(n):
        dx, dwte = arrays(n, BT, C), one(V, C)
        runs = nc.Runs(*map(nc.to_device, nc.runs_of(rng.integers(0, V, BT), V)))
        return lambda i: nc.embedding_backward(dwte, dx[i % n], runs)

    def square_sums(n):
        g, partial = one(n_params), one(nc.NORM_PARTS, dtype=torch.float64)
        return lambda i: nc.launch(nc.square_sums_kernel, partial, g, grid=nc.NORM_PARTS, block=256)

    def adamw(n):
        p, g, m, v = (one(n_params) for _ in range(4))
        w, partial = one(n_params, dtype=BF16), one(nc.NORM_PARTS, dtype=torch.float64)
        hyper = nc.to_device(np.array(ne.hyper_at(1, 1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1,
                                                  clip=1)))
        results = one(P + 1, dtype=torch.float64)
        entries = nc.Entries(p, w, g, m, v)

        def norm_and_update(i):
            nc.square_sums(partial, g)
            nc.adamw(entries, n_params, hyper, partial, results)
        return norm_and_update

    def fill(n):
        x = arrays(n, BT, C)
        return lambda i: x[i % n].gpu_data.memset(0, BT * C * 2, nc.gpu.stream)

    table = 4 * V * C
    return {"rmsnorm_forward": (BT * C * (3 * 2 + 2 * 4) + 4 * BT, rmsnorm_forward),
            "rmsnorm_backward": (5 * BT * C * 2 + 4 * BT, rmsnorm_backward),
            "rope": (2 * BT * HEADS * D * 2, rope),
            "swiglu_forward": (3 * BT * F_ * 2, swiglu_forward),
            "swiglu_backward": (5 * BT * F_ * 2, swiglu_backward),
            "cross_entropy": (2 * R * P * V * 2, cross_entropy),
            "embedding_forward": (BT * C * 4 + 4 * BT + table, embedding_forward),
            "embedding_backward": (BT * C * 2 + 4 * BT + 2 * table, embedding_backward),
            "square_sums": (4 * n_params, square_sums),
            "adamw and norm": ((4 + 16 + 16 + 2) * n_params, adamw),
            "fill": (BT * C * 2, fill)}


# ---- the whole step
@functools.cache
def initial(preset):
    """No parameter depends on the length of the context."""
    return ne.init_params(shapes()[preset], 1)

def batch(cfg, B, T):
    """tokens (B, T) and the targets (P, B, T) of all heads, the same for both sides"""
    ids = np.random.default_rng(1).integers(0, cfg.vocab_size, (B, T + cfg.n_mtp), dtype=np.int32)
    targets = np.stack([ids[:, k + 1:k + 1 + T] for k in range(cfg.n_mtp)])
    return np.ascontiguousarray(ids[:, :T]), targets

def our_step(cfg, flat, B, T, Model=nc.Model, **how):
    """A function that does one step as the training loop does, and returns its loss."""
    model, (tokens, targets) = Model(cfg, flat, dtype="bf16", **how), batch(cfg, B, T)
    count = itertools.count(1)

    def step():
        t, weight = next(count), ne.loss_weights(targets, MTP)
        model.gradient(tokens, targets, weight)
        ce, _ = model.update(ne.hyper_at(t, LR, beta1=0.9, beta2=0.95, weight_decay=0.1, clip=1.0))
        return float(ce @ weight)

    return step

def peer_step(cfg, flat, B, T, residual=None, attention="flash", **options):
    """The same of PyTorch; the loss stays on the device."""
    with torch.device(DEVICE):
        model = torch_peer.Peer(torch_peer.peer_config(cfg), residual=residual)
    model.load_numpy(ne.views(flat, ne.param_table(cfg))._asdict())
    step = torch_peer.make_step(model, bf16=True, lr=LR, attention=attention, **options)
    idx, targets = (torch.from_numpy(x).long().to(DEVICE) for x in batch(cfg, B, T))
    return lambda: step(idx, targets)

def flops(cfg, B, T):
    """Of the model, a step: 6 for each weight of a matrix product and token, and 6 B H T^2 D a
    layer for causal attention, whose score matrices are half empty; recomputing counts nothing."""
    multiplied = [x for x in ne.param_table(cfg)
                  if x.decays and (x.name != "wte" or cfg.tie_embeddings)]
    weights = sum(math.prod(x.shape) for x in multiplied)
    return 6 * B * T * weights + 6 * B * cfg.n_head * T * T * cfg.head_dim * cfg.n_layer

def sizes(cfg, B, T, Model=nc.Model):
    needs = needs_of(memory_table(cfg, B, T, nc.DTYPES["bf16"], Model.buffer_table))
    return {"tokens": B * T, "flop": flops(cfg, B, T), "buffers": needs.held + needs.batch}

def memory():
    """(free by the driver, allocated by torch, reserved by torch) in bytes"""
    clean()
    free, _ = cuda.current_context().get_memory_info()
    return free, torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

def built(make):
    """(step, facts): seconds until its first step is done, losses of the first three, and memory:
    what the driver misses since, the most that torch allocated and reserved meanwhile."""
    free, allocated, reserved = memory()
    reset_peak()
    began = time.perf_counter()
    step = make()
    losses = [float(step())]
    first = time.perf_counter() - began
    losses += [float(step()) for _ in range(2)]
    most = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return step, {"first_s": first, "losses": losses, "driver": free - memory()[0],
                  "allocated": most[0] - allocated, "reserved": most[1] - reserved}

def reset_peak():
    torch.cuda.reset_peak_memory_stats()

def step_rows(options):
    return {f"{preset}, {B} x {T}": functools.partial(step_row, preset, B, T, options["modes"])
            for preset, B, T in STEPS}

def step_row(preset, B, T, modes):
    cfg, flat = replace(shapes()[preset], seq_len=T), initial(preset)
    alive, facts, notes, size = {}, {}, {}, sizes(cfg, B, T)

    def peer(mode):
        def make():
            if mode == "graph":
                plain = alive.get("compile") or peer("compile")()
                with cuda.defer_cleanup():
                    return torch_peer.captured(plain, side_stream())
            return peer_step(cfg, flat, B, T, **MODES[mode])
        return make

    makers = {"NanoEuler": lambda: our_step(cfg, flat, B, T), **{m: peer(m) for m in modes}}
    torch._dynamo.reset()
    try:
        for name, make in makers.items():
            try:
                alive[name], facts[name] = built(make)
            except (torch.OutOfMemoryError, ne.UserError):
                raise
            except Exception as e:
                if name == "NanoEuler":
                    raise
                traceback.print_exc()        # one way to run the peer, not the row
                notes[name] = first_line(e)
        times = pace(alive)
    except (torch.OutOfMemoryError, ne.UserError):
        notes["together"] = "not all in memory at once: one after another, twice"
        times = one_by_one(makers, alive, facts, notes)
    return {**size, "facts": facts, "notes": notes,
            "times": {name: spread(v) for name, v in times.items()}}

def one_by_one(makers, alive, facts, notes):
    """What pace returns, never two of them in memory."""
    alive.clear()
    times = {}
    for name, make in 2 * list(makers.items()):
        torch._dynamo.reset()
        try:
            step, facts[name] = built(make)
            times.setdefault(name, []).extend(pace({name: step}, rounds=3)[name])
        except Exception as e:
            traceback.print_exc()
            notes[name] = first_line(e)
        step = None
    return times


# ---- what each part is worth
def ablation_rows(options):
    rows = {"as it is": {}, "without CUDA graph": dict(graph=False), "naive attention":
            dict(Model=NaiveModel), "all on mma.sync": dict(matmul="mma"), "all portable":
            dict(matmul="portable"), "as it is, again": {}}
    out = {name: functools.partial(ablation_row, *STEP, **how) for name, how in rows.items()}
    for B, T in LONGER:
        for name, Model in (("FlashAttention", nc.Model), ("naive attention", NaiveModel)):
            out[f"{name}, {B} x {T}"] = functools.partial(ablation_row, B, T, Model)
    return out

def ablation_row(B, T, Model=nc.Model, graph=True, matmul=None):
    cfg, flat = replace(ne.PRESETS["base"], seq_len=T), initial("base")
    size = sizes(cfg, B, T, Model)
    how = {}
    if matmul:
        how["top"] = ops_of(matmul).path
    enabled, nc.Graph.enabled = nc.Graph.enabled, graph and nc.Graph.enabled
    try:
        step, facts = built(lambda: our_step(cfg, flat, B, T, Model, **how))
        times = pace({"": step}, rounds=3, seconds=0.3)[""]
    except ne.UserError as e:
        raise Skip(str(e)) from None
    finally:
        nc.Graph.enabled = enabled
    return {**size, **facts, **spread(times)}


# ---- decoding
def decode_rows(options):
    return {"NanoEuler": our_decode, "torch.compile": peer_decode}

def contexts(token, T, done=lambda: None, n=3):
    """Spread of ms a token over n contexts of T tokens: token(t) makes one, done() waits."""
    out = []
    for _ in range(n + 1):
        began = time.perf_counter()
        for t in range(T):
            token(t)
        done()
        out.append(1e3 * (time.perf_counter() - began) / T)
    return spread(out[1:])                   # the first compiled, or woke the card

def our_decode(preset="base"):
    cfg, state = ne.PRESETS[preset], {}
    decoder = nc.Decoder(cfg, initial(preset))

    def token(t):
        if t == 0:
            decoder.truncate(0)
        state["token"] = int(decoder.step(state["token"] if t else 0).argmax())

    kind = nc.NAMES[np.dtype(decoder.state.dtype)]
    return {"times": {f"NanoEuler, {kind} weights": contexts(token, cfg.seq_len)}}

def peer_decode(preset="base"):
    cfg = ne.PRESETS[preset]
    with torch.device(DEVICE):
        model = torch_peer.Peer(torch_peer.peer_config(cfg), dtype=BF16)
    model.load_numpy(ne.views(initial(preset), ne.param_table(cfg))._asdict())
    model.eval().requires_grad_(False)
    decode = torch_peer.make_decoder(model)
    with torch.inference_mode():
        idx = torch.zeros(1, 1, dtype=torch.long, device=DEVICE)
        at = torch.zeros(1, dtype=torch.long, device=DEVICE)

        def advance():
            idx.copy_(decode(idx, at))
            at.add_(1)

        replay = torch_peer.captured(advance, side_stream())

        def token(t, read):
            if t == 0:
                idx.zero_()
                at.zero_()
            replay()
            if read:
                idx.item()

        name = "torch.compile, static cache, one CUDA graph, bfloat16 weights"
        return {"times": {
            f"{name}, the host reads each token": contexts(
                lambda t: token(t, True), cfg.seq_len),
            f"{name}, the host waits at the end": contexts(
                lambda t: token(t, False), cfg.seq_len, synchronize)}}


ROWS = dict(ceiling=ceiling_rows, matmul=matmul_rows, attention=attention_rows, kernels=kernel_rows,
            step=step_rows, ablation=ablation_rows, decode=decode_rows)


# ---- processes
def save(path, results):
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    os.replace(new, path)

def load(path):
    return json.loads(path.read_text(encoding="utf-8"))

def machine(commit):
    versions = {"python": platform.python_version(), "torch": torch.__version__,
                "cuDNN": str(torch.backends.cudnn.version())}
    for name in ("triton", "numba", "numba-cuda", "llvmlite", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    device = cuda.get_current_device()
    name = device.name.decode() if isinstance(device.name, bytes) else device.name
    return {"device": name, "driver": smi("driver_version"), "versions": versions,
            "commit": commit, "date": time.strftime("%Y-%m-%d"), "l2_bytes": l2_bytes(),
            "peak_flops": next((v for k, v in PEAK.items() if k in name), None),
            "memory": cuda.current_context().get_memory_info()[1]}

def smi(field):
    try:
        out = subprocess.run(["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"],
                             capture_output=True, text=True, timeout=60)
        return out.stdout.strip().splitlines()[0] if out.stdout.strip() else "unknown"
    except (OSError, subprocess.SubprocessError):
        return "unknown"

def work(path, groups, options, commit):
    """All rows of the groups that are not in the file yet, one after another, into the file."""
    if problem := nc.gpu_problem():
        sys.exit(f"bench_gpu.py: {problem}")
    nc.open_device()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    results = {"machine": machine(commit), **{k: v for k, v in load(path).items() if k in ROWS}}
    for group in groups:
        done = results.setdefault(group, {})
        try:
            rows = ROWS[group](options)
        except Exception as e:
            traceback.print_exc()
            rows, done["all rows"] = {}, {"failed": first_line(e)}
            save(path, results)
        for name, measure in rows.items():
            if name in done or group != "ceiling" and options["match"] not in name:
                continue
            results["running"] = [group, name]
            save(path, results)
            began = time.perf_counter()
            try:
                row = measure()
            except Skip as e:
                row = {"skipped": str(e)}
            except Exception as e:
                traceback.print_exc()
                row = {"failed": first_line(e)}
            done[name] = {**row, "seconds": round(time.perf_counter() - began, 1)}
            del results["running"]
            save(path, results)
            print(f"{group}: {name}: {json.dumps(done[name])}", flush=True)
            try:
                clean()
            except Exception as e:           # the context is lost: the next row needs another
                print(f"starting afresh: {first_line(e)}", flush=True)
                os._exit(AGAIN)              # without the libraries' farewell, which needs it too

def supervise(command, path, patience):
    """Runs workers until all rows are done.  A worker that dies, or finishes no row for `patience`
    seconds, costs that row.  Returns the exit code."""
    while True:
        worker = subprocess.Popen(command)
        try:
            late = False
            while worker.poll() is None and not late:
                time.sleep(0.5)
                late = time.time() - path.stat().st_mtime > patience
        finally:
            if worker.poll() is None:
                worker.kill()
            code = worker.wait()
        if code == 0:
            return 0
        results = load(path)
        group, name = results.pop("running", (None, None))
        if group:
            results[group][name] = {"failed": f"no result within {patience:g} s" if late else
                                    f"the process ended with code {code}"}
            save(path, results)
            print(f"{group}: {name}: {results[group][name]['failed']}", flush=True)
        elif code != AGAIN:
            return code

def kept(path, commit, device, groups, match=""):
    """What an earlier run of this commit on this device measured, without what now is measured."""
    try:
        old = load(path)
        if (old["machine"]["commit"], old["machine"]["device"]) != (commit, device):
            return {}
    except (OSError, ValueError, KeyError):
        return {}
    old.pop("running", None)
    for group in groups:
        old[group] = {name: r for name, r in old.get(group, {}).items()
                      if group != "ceiling" and match not in name}
    return old

def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS)[:-1],
                   metavar="GROUP", help=f"of {' '.join(ROWS)} (default: all but decode)")
    p.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES)[:3],
                   metavar="MODE", help=f"ways to run the peer's step: {' '.join(MODES)} (default: "
                                        f"the first three)")
    p.add_argument("--match", default="", help="only rows whose names hold this text")
    p.add_argument("--commit", help="of the code, where git does not know")
    p.add_argument("--out", help="path of the results without .json, or a folder "
                                 "(default bench/out/gpu_<device>)")
    p.add_argument("--patience", type=float, default=300, help="seconds a row may take")
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    a = p.parse_args()
    git = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True,
                         text=True)
    commit, device = a.commit or git.stdout.strip(), smi("name")
    groups = [g for g in ROWS if g in ("ceiling", *a.only)]
    if a.worker:
        return work(pathlib.Path(a.out), groups,
                    {"modes": a.modes, "match": a.match}, commit)
    stem = pathlib.Path(a.out or out_folder())
    if stem.is_dir():
        name = re.sub(r"[^a-z0-9]+", "_", device.lower().replace("nvidia", "")).strip("_")
        stem = stem / f"gpu_{name}"
    path = stem.with_name(stem.name + ".json")
    save(path, kept(path, commit, device, groups, a.match))
    code = supervise([sys.executable, __file__, "--worker", "--out", str(path), "--commit", commit,
                      "--match", a.match, "--only", *groups, "--modes", *a.modes],
                     path, a.patience)
    if "machine" in (results := load(path)):
        text = markdown(results)
        stem.with_name(stem.name + ".md").write_text(text, encoding="utf-8")
        print(text)
    return code

if __name__ == "__main__":
    sys.exit(main())
