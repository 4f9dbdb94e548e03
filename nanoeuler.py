"""NanoEuler: a GPT from scratch in Python, compiled by Numba, differentiated by hand.

Block i computes x <- x + f_i(x).  This is one forward-Euler step, of size 1, of dx/dt = f(x, t):
the number of the block plays the part of time t.

How to read this file
    Part I is the whole program: the model, its gradients, training, generation, a checkpoint and a
    command line.  Read it from top to bottom: a function uses only what is defined above it.  Part
    I also runs alone, with bpe.py, which splits text into tokens.
    Part II computes the same sums faster, with tiles, blocks, threads and batches, and adds the
    optimizer Muon.  Most of its sections say which functions of Part I they replace.
    Everything else, such as runs that can be resumed, conversations and the command line, is in the
    folder nanoeuler_parts, which Part III calls.

    python nanoeuler.py train [small|big]      train on data/shakespeare.txt, write nanoeuler.bin
    python nanoeuler.py sft [FILE]             train it to answer, write nanoeuler_chat.bin
    python nanoeuler.py dpo [FILE]             train it on preferences, write nanoeuler_dpo.bin
    python nanoeuler.py rl [FILE]              train it on rewards of its own answers, write
                                               nanoeuler_rl.bin
    python nanoeuler.py chat [FILE]            continue or answer what you type
    python nanoeuler.py generate "ROMEO:"      print one continuation; --file: of many prompts
    python nanoeuler.py lens "To be or not"    show the Euler steps of one prompt
    python nanoeuler.py eval --data TEXT       measure perplexity; --questions: accuracy
    python nanoeuler.py serve [FILE...]        serve browsers and OpenAI's clients
    python nanoeuler.py plot LOG...            plot loss curves
    python nanoeuler.py list [FOLDER...]       list the models in a folder
    python nanoeuler.py info [FILE]            describe a checkpoint
    python nanoeuler.py quantize FILE OUT      write the same model in int8, a quarter of the size
    python nanoeuler.py export FILE DIR        export for Hugging Face; --gguf OUT for llama.cpp
    python nanoeuler.py import FROM OUT        import a Llama: DIR, GGUF, or ORG/NAME of the Hub
    python nanoeuler.py compile                compile all kernels in advance

Contents
    Part I, the program                       Part II, why it is fast
    1    Configuration                        12   Memory: alignment, bfloat16, panels
    2    Parameters and activations           13   Tiled products
    3    Exponentials                         14   Blocked attention
    4.1  Matrix products                      15   Threads
    4.2  Embedding                            16   Muon
    4.3  RMSNorm                              17   Batched decoding: slots and rows
    4.4  RoPE                                 18   Replies: batches, draft tokens
    4.5  Attention
    4.6  SwiGLU                               Part III, the way to nanoeuler_parts
    4.7  Cross-entropy                        19   Command line and Python
    4.8  Biases and norms of q and k
    5    Model: forward, loss, backward
    6    Generation: sampling, KV cache
    7    Optimizer: schedule, AdamW
    8    Batches
    9    Training
    10   Checkpoint
    11   The program alone

    New to language models?  docs/tour explains them, and uses the code of this file.

Shapes  B batch, T tokens, C n_embd, H n_head, G n_kv_head, D head_dim, F n_hidden, V vocab_size,
        L n_layer, P n_mtp; HD = H * D, QKV = (H + 2 G) * D.  An index is mostly the lower-case
        letter: b, t, c, h, f, l.  Output heads are numbered by k, the entries of a head by i.
        n_mtp is the number of output heads.  Head 0 predicts the next token, the auxiliary heads
        predict further tokens, which helps training (multi-token prediction, after Gloeckle et al.
        2024; here each head is one matrix).
Names   In the model: p parameters, g their gradients, a activations, d gradients of activations,
        c constants.  In an op: dx is the gradient of the loss with respect to x.
Types   Functions take their dtype from their arguments: float32, or float64 for gradient checks.
"""
# From here to Part I, the file prepares Python and Numba.  To read the program, go to Part I, which
# takes these names from here, and the modules:
#     jit, jit_parallel             compile a function to machine code, as numba.njit does
#     prange                        a range whose rounds run on all cores
#     overload                      gives a function another body in compiled code
#     value(x), rounded(x, like)    are x, unless numbers are stored in bfloat16 (12)
#     larger(x, y)                  the larger one, or NaN if one of them is NaN
#     need(ok, message)             raises a UserError, which ends the program, unless ok
#     need_setting(ok, name, text)  the same for a setting, whose name begins the message
#     Settings, setting(...)        a dataclass of settings with their ranges, and one such field
#     reading(source, remedy)       turns errors of a `with` block into UserErrors that name both
#     printable(text)               the text without control characters
#     TILE_BYTES                    bytes that products in tiles read past the end of an array
import argparse
import codecs
import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import sys
import time
from collections import namedtuple
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

# As a program, this file imports itself as the module `nanoeuler` and calls its `main`.  Numba's
# cache stores a named tuple with the name of its module, which must therefore always be nanoeuler,
# never __main__.
if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))   # first, even under python -P
    try:
        import nanoeuler
    except ImportError as e:
        venv = os.path.join(os.path.dirname(os.path.abspath(__file__)), ".venv")
        python = os.path.join(venv, "bin", "python")
        remedy = "pip install 'numba==0.68.*'"
        if e.name == "bpe":
            remedy = "put bpe.py into the folder of nanoeuler.py"
        elif os.path.exists(python) and os.path.realpath(sys.prefix) != os.path.realpath(venv):
            remedy = f"run nanoeuler.py with {python}, or {remedy}"
        print(f"nanoeuler: {e} (Python is {sys.executable}); {remedy}", file=sys.stderr)
        sys.exit(2)
    except ValueError as e:          # a UserError, or an error of Numba, about the environment
        print(f"nanoeuler: {e}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(nanoeuler.main())

__version__ = "0.1.0"                        # pip reads the version from this line

# A waiting thread of OpenMP spins for 10,000 rounds before it sleeps, because the next product of
# the same token usually comes sooner.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# bpe.py explains these lines.  They are repeated here because the version of Numba must be checked
# before bpe.py uses Numba's private API.
if "numba" not in sys.modules and "NUMBA_OPT" not in os.environ:
    os.environ["NUMBA_OPT"] = "1"
    import numba
    numba.njit(lambda: None)
    del os.environ["NUMBA_OPT"]
    numba.config.reload_config()

import numba

NUMBA = "0.68"               # machine/kernels.py and bpe.py use this version's private API
if not numba.__version__.startswith(f"{NUMBA}."):        # before an import from it can fail
    raise ValueError(f"expected Numba {NUMBA}, found {numba.__version__}; "
                     f"pip install 'numba=={NUMBA}.*'")

import numpy as np
from numba import float32, int32, prange, types
from numba.extending import overload

import bpe
from bpe import UserError, need, printable, reading

try:
    import nanoeuler_parts
except ModuleNotFoundError as e:
    if e.name != "nanoeuler_parts":
        raise
    nanoeuler_parts = None
if nanoeuler_parts:
    if nanoeuler_parts.__version__ != __version__:
        raise ValueError(f"this program has version {__version__}, but {nanoeuler_parts.__file__} "
                         f"has version {nanoeuler_parts.__version__}; put the folder "
                         f"nanoeuler_parts of this version beside nanoeuler.py")
    from nanoeuler_parts.files.settings import need_setting, setting, Settings
    from nanoeuler_parts.machine.compiling import jit, jit_parallel, OPTIONS
    from nanoeuler_parts.machine.cpu import TILE_BYTES
    from nanoeuler_parts.machine.numbers import rounded, value
    from nanoeuler_parts.machine.tile import larger
else:                                        # simple versions of these, if the folder is missing
    OPTIONS = dict(fastmath={"contract", "reassoc", "arcp", "nsz", "afn"}, error_model="numpy",
                   nogil=True, cache=bpe.CACHE)          # without nnan, ninf: a NaN stays a NaN
    jit = bpe.jit(**OPTIONS)
    jit_parallel = bpe.jit(parallel=True, **OPTIONS)     # runs the rounds of a prange on all cores
    TILE_BYTES = 64

    @jit
    def value(x):
        return x

    @jit
    def rounded(x, like):
        return x

    @jit
    def larger(x, y):
        return x if x > y or x != x else y               # NaN if x or y is NaN

    class Settings:
        """A dataclass of settings.  That of the folder checks types and ranges."""

        def check(self):
            return self

    def setting(default, low, high, text="", several=False):
        """A field with its default.  low, high: the range of its value.  text: what it means"""
        return field(default=default, metadata={"help": text})

    def need_setting(ok, name, text):
        """`need` for a setting.  The folder has another one, which writes its name as a flag."""
        need(ok, f"{name}: {re.sub('[{}]', '', text)}")

# ======== Part I: the program ========

# ==== 1 Configuration ====
# The numbers that shape a model, and five presets, from "small" to "xl".
@dataclass(frozen=True)
class Config(Settings):
    """Everything that shapes the model, and nothing else"""
    n_embd: int = setting(128, 1, 1 << 16, "width of the residual stream (C)")
    n_head: int = setting(4, 1, 1 << 12, "number of query heads (H), a multiple of the key/value "
                          "heads")
    n_kv_head: int = setting(2, 1, 1 << 12, "number of key/value heads (G); each serves H / G "
                             "query heads")
    head_dim: int = setting(32, 2, 1 << 12, "size of each attention head (D), an even number")
    n_layer: int = setting(4, 1, 1 << 12, "number of layers (L); each makes two Euler steps")
    n_hidden: int = setting(344, 1, 1 << 18, "hidden width of the SwiGLU block (F)")
    seq_len: int = setting(128, 1, 1 << 17, "longest context of the model, in tokens")
    vocab_size: int = setting(512, 1, 1 << 20, "largest vocabulary (V), in tokens: 256 bytes, "
                              "merges and special tokens")
    n_mtp: int = setting(4, 1, 16, "number of output heads (P); head k predicts token t + 1 + k; "
                         "1: no auxiliary heads")
    rope_theta: float = setting(10000.0, 1, 1e12)
    norm_eps: float = setting(1e-5, 1e-12, 1)
    tie_embeddings: bool = setting(False, 0, 0, "share the embedding matrix with output head 0")
    # The rest is for imported models: Qwen2, Qwen3, Mistral and Llama 3
    qkv_bias: bool = setting(False, 0, 0, "add a bias to queries, keys and values, as Qwen2 does")
    qk_norm: bool = setting(False, 0, 0, "apply RMSNorm to each head of queries and keys, as Qwen3 "
                            "does")
    window: int | None = setting(None, 0, 1 << 17, "sliding-window attention: number of tokens "
                                 "that a token attends to, itself included; 0: all earlier ones")
    rope_scaling: str = setting("", 0, 0)    # linear, llama3 or yarn; the rest are its parameters
    rope_factor: float = setting(1.0, 1e-3, 1e6)
    rope_original: int | None = setting(None, 0, 1 << 24)
    rope_low: float = setting(1.0, 1e-6, 1e6)
    rope_high: float = setting(4.0, 1e-6, 1e6)
    rope_attention: float = setting(1.0, 1e-6, 1e6)

    def check(self):
        super().check()
        kinds = "", "linear", "llama3", "yarn"
        need(self.rope_scaling in kinds, f"rope_scaling: expected linear, llama3, yarn or none, "
             f"found {self.rope_scaling}")
        if self.rope_scaling in ("llama3", "yarn"):
            need(self.rope_original, f"rope_scaling {self.rope_scaling} needs the original context "
                 f"length, rope_original")
            need(self.rope_low < self.rope_high and self.rope_theta > 1,
                 f"rope_scaling {self.rope_scaling}: expected rope_low < rope_high and rope_theta "
                 f"> 1, found {self.rope_low:g}, {self.rope_high:g}, {self.rope_theta:g}")
        need_setting(self.n_head % self.n_kv_head == 0, "n_head", f"expected a multiple of "
                     f"{{n_kv_head}}, {self.n_kv_head}, found {self.n_head}")
        need_setting(self.head_dim % 2 == 0, "head_dim",
                     f"expected an even number, found {self.head_dim}")
        return self

# The sizes of a model by their letters, with HD = H * D and QKV = (H + 2 G) * D
Dims = namedtuple("Dims", "L C H G D F V P HD QKV")

def dims_of(cfg):
    H, G, D = cfg.n_head, cfg.n_kv_head, cfg.head_dim
    return Dims(L=cfg.n_layer, C=cfg.n_embd, H=H, G=G, D=D, F=cfg.n_hidden, V=cfg.vocab_size,
                P=cfg.n_mtp, HD=H * D, QKV=(H + 2 * G) * D)

PRESETS = {
    "small": Config(),
    "big": Config(n_embd=320, n_head=10, n_kv_head=5, n_layer=8, n_hidden=856, seq_len=256),
    "base": Config(n_embd=768, n_head=12, n_kv_head=4, head_dim=64, n_layer=16, n_hidden=2048,
                   seq_len=512, vocab_size=4096),
    "large": Config(n_embd=1024, n_head=16, n_kv_head=4, head_dim=64, n_layer=20, n_hidden=2816,
                    seq_len=1024, vocab_size=8192),
    "xl": Config(n_embd=1536, n_head=24, n_kv_head=8, head_dim=64, n_layer=48, n_hidden=5120,
                 seq_len=1024, vocab_size=16_384),       # the size of GPT-2 XL, for a GPU
}

# ==== 2 Parameters and activations ====
# The parameters of a model are one flat buffer of numbers, and a table says which tensor lies where
# in it.  Initialization, weight decay and the names in a file are loops over this table.
class Tensor(NamedTuple):
    """A learned tensor: a row of the table"""
    name: str                # field of Params
    shape: tuple             # with the axis of layers or output heads, if `axis` names one
    role: str                # "matrix", "gain" or "bias": how it starts, and whether it decays
    std: float               # initial standard deviation of a matrix; gains start as ones, biases
                             # as zeros
    axis: str                # what the first axis counts: "layer", "head", or "" for neither
    start: int = 0           # index of its first entry in the flat buffer

    @property
    def decays(self):
        """Weight decay applies to matrices, and not to gains and biases."""
        return self.role == "matrix"

    @property
    def end(self):
        return self.start + math.prod(self.shape)

def param_table(cfg):
    """Every Tensor of a model, in buffer order.  Matrices come first, so that weight decay acts on
    one slice.  The matrices of the layers, which Muon (16) updates, are adjacent, too."""
    size = dims_of(cfg)
    L, C, F, V, HD, QKV = size.L, size.C, size.F, size.V, size.HD, size.QKV
    biases = QKV if cfg.qkv_bias else 0      # 0: the tensor is absent
    normed = size.D if cfg.qk_norm else 0
    untied = size.P - 1 if cfg.tie_embeddings else size.P          # tied: wte serves as head 0
    std = 0.02 * math.sqrt(768 / C)          # 0.02 at C = 768, as in GPT-2
    out_std = std / math.sqrt(2 * L)         # the 2L outputs to the residual stream (GPT-2, 2.3)
    table = [
        #       name         shape            role      std      axis
        # a row of wte is the vector of a token; the other matrices are the W of y = x W^T
        Tensor("wte",        (V, C),          "matrix", std,     ""),
        Tensor("qkv",        (L, QKV, C),     "matrix", std,     "layer"),
        Tensor("attn_proj",  (L, C, HD),      "matrix", out_std, "layer"),
        Tensor("gate_up",    (L, 2 * F, C),   "matrix", std,     "layer"),
        Tensor("down",       (L, C, F),       "matrix", out_std, "layer"),
        Tensor("lm_head",    (untied, V, C),  "matrix", std,     "head"),
        # gains of the RMSNorms before attention, before SwiGLU, and before the output heads
        Tensor("attn_norm",  (L, C),          "gain",   0.0,     "layer"),
        Tensor("mlp_norm",   (L, C),          "gain",   0.0,     "layer"),
        Tensor("final_norm", (C,),            "gain",   0.0,     ""),
        # of other models (4.8)
        Tensor("qkv_bias",   (L, biases),     "bias",   0.0,     "layer"),
        Tensor("q_norm",     (L, normed),     "gain",   0.0,     "layer"),
        Tensor("k_norm",     (L, normed),     "gain",   0.0,     "layer")]
    starts = itertools.accumulate((math.prod(x.shape) for x in table), initial=0)
    return [x._replace(start=start) for x, start in zip(table, starts)]

TABLE = param_table(PRESETS["small"])        # names, roles and axes are those of all models
Params = namedtuple("Params", [x.name for x in TABLE])

def slices(flat, shapes):
    """Consecutive views of one flat buffer, with these shapes.  They share its memory."""
    parts, start = [], 0
    for shape in shapes:
        end = start + math.prod(shape)
        parts.append(flat[start:end].reshape(shape))
        start = end
    return parts

def views(flat, table):
    """The tensors of a `param_table`, as views of the flat buffer."""
    return Params(*slices(flat, [x.shape for x in table]))

def n_params(cfg):
    return param_table(cfg)[-1].end

def aligned(shape, dtype):
    """Zeros that start on a 64-byte cache line, followed by TILE_BYTES of padding.  Products in
    tiles (13) read whole vectors at the edge of a matrix, and so read past its end."""
    n = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(64 + n + TILE_BYTES, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start:start + n].view(dtype).reshape(shape)

def init_params(cfg, seed, dtype=np.float32):
    """A fresh flat parameter buffer: normal(0, std) matrices, unit gains, zero biases"""
    rng, table = np.random.default_rng(seed), param_table(cfg)
    flat = aligned((n_params(cfg),), dtype)
    for view, x in zip(views(flat, table), table):
        if x.role == "matrix":
            view[...] = x.std * rng.standard_normal(x.shape, np.float32)
        else:
            view[...] = 1.0 if x.role == "gain" else 0.0
    return flat

# ---- activations
# What the forward pass of one sequence computes is kept, because the backward pass needs it.
Acts = namedtuple("Acts", "x attn_in attn_rstd qk qk_rstd qkv att lse mlp_in mlp_rstd gate_up "
                          "swiglu final_in final_rstd logits")

def act_shapes(cfg, T):
    """Shapes of the activations of a sequence of T tokens.  The residual stream is kept as a
    trajectory: x[i + 1] = x[i] + f_i(x[i]), i < 2L.
    Two arrays are later overwritten with their own gradients: logits by `loss`, and gate_up by
    `backward`."""
    size = dims_of(cfg)
    L, C, H, F = size.L, size.C, size.H, size.F
    heads = (H + size.G) * cfg.qk_norm       # number of heads of q and k that are normalized
    return Acts(x=(2 * L + 1, T, C),
                attn_in=(L, T, C),           # rmsnorm(x), input of qkv
                attn_rstd=(L, T),
                qk=(L, T, heads * size.D),   # q and k before their norms (4.8)
                qk_rstd=(L, T, heads),
                qkv=(L, T, size.QKV),        # q and k are already rotated by RoPE
                att=(L, T, size.HD),         # attention's output, input of attn_proj
                lse=(L, H, T),               # log-sum-exp of each score row
                mlp_in=(L, T, C),
                mlp_rstd=(L, T),
                gate_up=(L, T, 2 * F),
                swiglu=(L, T, F),
                final_in=(T, C),
                final_rstd=(T,),
                logits=(size.P, T, size.V))

# The gradients of activations.  d.x[i] is the gradient of the loss with respect to x[i].  The loss
# depends on x[i] along two paths, directly and through f_i, so two gradients are added:
# d.x[i] = d.x[i + 1] + J_i^T d.x[i + 1], J_i = df_i/dx.  (This is the adjoint equation of the Euler
# steps.)  The other four are scratch, which each layer overwrites.
ActGrads = namedtuple("ActGrads", "x norm qkv att swiglu")

def act_grad_shapes(cfg, T):
    shapes = act_shapes(cfg, T)
    return ActGrads(x=shapes.x,
                    norm=shapes.final_in,    # gradient of an RMSNorm's output
                    qkv=shapes.qkv[1:],      # of queries, keys and values; without the axis L
                    att=shapes.att[1:],      # of attention's output
                    swiglu=shapes.swiglu[1:])            # of SwiGLU's output

def zeros(shapes, dtype):
    """Arrays of these shapes, a named tuple like `shapes`"""
    return type(shapes)(*(np.zeros(shape, dtype) for shape in shapes))

# ==== 3 Exponentials ====
# Softmax, SwiGLU and the loss take exponentials of most of their numbers, so exp has to be fast.
#
# Cephes' expf splits x = n ln 2 + r, |r| <= ln 2 / 2, so that e^x = 2^n e^r.  A polynomial in r
# gives e^r, and the exponent's bits give 2^n.  The relative error is 3e-7 on [-87, 88].  Arguments
# outside are clamped to the nearer end: e^-inf becomes 1e-38, so code that masks an entry sets its
# weight to 0.  The vectorized code takes 0.3 ns per number, a scalar libm call 1.7 ns.
E0, E1, E2, E3, E4, E5 = map(np.float32, (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3,
                                          4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1))
LOG2E, LN2_HI, LN2_LO, EXP_MIN, EXP_MAX, ONE, HALF = map(np.float32, (
    1.4426950408889634, 0.693359375, -2.12194440e-4, -87.3, 88, 1, 0.5))

# The body of exp runs only in plain Python.  For compiled code, Numba calls _exp with the type of x
# and uses the function that it returns.
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

def silu(x):
    """x / (1 + e^-x)"""
    return x / (1 + exp(-x))

@overload(silu, inline="always")
def _silu(x):
    one = np.dtype(str(x)).type(1)
    return lambda x: x / (one + exp(-x))

# ==== 4.1 Matrix products ====
# Tour: docs/tour/05_embedding.md
# A layer y = x W^T turns rows of K numbers into rows of N numbers.  Row n of W holds the K weights
# of output n, so each y[t, n] is the dot product of two rows.  Nearly all of the time is spent
# here; section 13 computes the same sums two to four times as fast on one core.
@jit
def matmul(y, x, w):
    """y = x W^T     y (T, N), x (T, K), w (N, K)"""
    for t in range(len(x)):
        y_row, x_row = y[t], x[t]
        for n in range(len(w)):
            weights, total = w[n], y.dtype.type(0)
            for k in range(x_row.size):
                total += x_row[k] * weights[k]
            y_row[n] = total

@jit
def matmul_add(y, base, x, w):
    """y = base + x W^T: an Euler step, if base is the residual stream     base (T, N)"""
    matmul(y, x, w)
    for t in range(len(y)):
        y_row, base_row = y[t], base[t]
        for n in range(y_row.size):
            y_row[n] += base_row[n]

@jit
def matmul_backward_add(dx, dw, dy, x, w):
    """dx += dy W,   dw += dy^T x     dx, x (T, K), dw, w (N, K), dy (T, N)
    y[t, n] = sum_k x[t, k] w[n, k].  So x[t, k] changes each y[t, n] by w[n, k], and w[n, k]
    changes y[t, n] of every row t by x[t, k].  dw adds up all rows of all sequences."""
    for t in range(len(x)):
        dx_row, x_row = dx[t], x[t]
        for n in range(len(w)):
            slope, weights, dw_row = dy[t, n], w[n], dw[n]
            for k in range(x_row.size):
                dx_row[k] += slope * weights[k]
                dw_row[k] += slope * x_row[k]

@jit
def matmul_backward(dx, dw, dy, x, w):
    """dx = dy W,   dw += dy^T x     for an x that enters no other product"""
    dx[:] = 0
    matmul_backward_add(dx, dw, dy, x, w)

# ==== 4.2 Embedding ====
# Tour: docs/tour/05_embedding.md
# The forward pass copies the row of wte that belongs to a token.  The backward pass adds gradients
# to the same row of dwte.
@jit
def embedding_forward(x, tokens, wte):
    """x[t] = wte[tokens[t]]     x (T, C), tokens (T,) int32, wte (V, C)"""
    for t in range(x.shape[0]):
        row, entry = x[t], wte[tokens[t]]
        for c in range(row.size):
            row[c] = entry[c]

@jit
def embedding_backward(dwte, dx, tokens):
    """dwte[tokens[t]] += dx[t]     dwte (V, C), dx (T, C), tokens (T,) int32"""
    for t in range(len(tokens)):
        row, entry = dx[t], dwte[tokens[t]]
        for c in range(row.size):
            entry[c] += row[c]

# ==== 4.3 RMSNorm ====
# Tour: docs/tour/07_euler.md (forward) and 08_rmsnorm.md
# RMSNorm divides each row by its root mean square and multiplies it by a learned gain.
@jit
def rmsnorm_forward(y, rstd, x, gain, eps):
    """y = gain * x * rstd,   rstd = 1 / sqrt(mean_c(x^2) + eps)      Zhang & Sennrich 2019, eq. 4
    out: y (T, C), rstd (T,) kept for backward     in: x (T, C), gain (C,)"""
    T, C = x.shape
    for t in range(T):
        ss = 0.0             # float64: a long sum.  Each float32 term has a relative error <= 6e-8
        for c in range(C):
            ss += x[t, c] * x[t, c]
        r = x.dtype.type(1.0 / math.sqrt(ss / C + eps))
        rstd[t] = r
        for c in range(C):
            y[t, c] = rounded(gain[c] * x[t, c] * r, y)

@jit
def rmsnorm_backward(dx, dnext, dy, x, gain, rstd):
    """u = x * rstd:   dx = dnext + rstd * (gain*dy - u * mean_c(gain*dy*u))
    dx, dnext, dy, x (T, C), gain (C,), rstd (T,).  x is used twice: this norm is the first op of a
    branch f, and x is added to the branch's output, next = x + f(x).  dnext is the gradient of that
    sum, and so of the second use.  dx may be the same array as dnext."""
    T, C = x.shape
    for t in range(T):
        r, total = rstd[t], x.dtype.type(0)
        for c in range(C):
            total += gain[c] * dy[t, c] * x[t, c]
        mean = x.dtype.type(total * r * r / C)           # mean_c(gain*dy*u) * rstd
        for c in range(C):
            dx[t, c] = dnext[t, c] + r * (gain[c] * dy[t, c] - x[t, c] * mean)

@jit
def add_gain_gradient(dgain, dy, x, rstd):
    """dgain += sum_t dy*u, u = x * rstd     dgain (C,), dy, x (T, C), rstd (T,)"""
    for t in range(len(rstd)):
        r, dy_row, row = rstd[t], dy[t], x[t]
        for c in range(dgain.size):
            dgain[c] += dy_row[c] * row[c] * r

# ==== 4.4 RoPE ====
# Tour: docs/tour/06_attention.md
# RoPE encodes the position of a token: it rotates pairs of entries of q and k by angles that grow
# with the position.  The dot product of a query and a key then depends on their distance.
# `kept_of_frequency` matters only for models that were stretched to a longer context.
def rope_frequency(cfg):
    """theta^(-2i / D), (D / 2,): the angle by which pair i turns from one token to the next"""
    return cfg.rope_theta ** (-np.arange(0, cfg.head_dim, 2) / cfg.head_dim)

def kept_of_frequency(cfg, frequency):
    """RoPE scaling stretches a model that was trained with rope_original tokens to a longer
    context.  A frequency becomes kept * frequency + (1 - kept) * frequency / rope_factor: low ones
    are divided, and high ones, which tell neighbours apart, may be kept.  Returns kept (D / 2,),
    numbers from 0 to 1.  `turns` are the full turns of a pair within rope_original tokens.
        linear      kept is 0 for all pairs                             Chen et al. 2023
        llama3      kept grows linearly with the turns, from 0 at rope_low turns to 1 at rope_high
                    turns                                               Llama Team 2024
        yarn        kept falls linearly with the pair's number i, from 1 at the pair with rope_high
                    turns to 0 at the pair with rope_low turns; cos and sin are multiplied by
                    rope_attention                                      Peng et al. 2023
    """
    D, low, high = cfg.head_dim, cfg.rope_low, cfg.rope_high
    if cfg.rope_scaling == "linear":
        return np.zeros(D // 2)
    if cfg.rope_scaling == "llama3":
        turns = cfg.rope_original * frequency / (2 * math.pi)
        return ((turns - low) / (high - low)).clip(0, 1)

    # yarn
    def pair_with(turns):
        """The i, a real number, where rope_original * theta^(-2i / D) / 2 pi = turns"""
        return D * math.log(cfg.rope_original / (2 * math.pi * turns), cfg.rope_theta) / 2

    first = max(0, math.floor(pair_with(high)))
    last = min(D - 1, math.ceil(pair_with(low)))
    divided = (np.arange(D // 2) - first) / max(0.001, last - first)
    return 1 - divided.clip(0, 1)

def rope_table(cfg, dtype):
    """cos and sin (seq_len, D / 2) of t * theta^(-2i / D)      Su et al. 2021, 3.2.2"""
    frequency = rope_frequency(cfg)
    if cfg.rope_scaling:
        kept = kept_of_frequency(cfg, frequency)
        frequency = kept * frequency + (1 - kept) * frequency / cfg.rope_factor
    angle, scale = np.outer(np.arange(cfg.seq_len), frequency), cfg.rope_attention
    return (scale * np.cos(angle)).astype(dtype), (scale * np.sin(angle)).astype(dtype)

@jit
def rope(qkv, cos, sin, n_heads, sign):
    """Rotates pair (i, i + D/2) of the first n_heads heads of row t by sign * angle[t, i], in place
    qkv (T, QKV), cos, sin (T, D / 2).  With n_heads = H + G, q and k are rotated and v is not.  The
    backward pass rotates their gradients back, with sign = -1."""
    half = cos.shape[1]
    for t in range(qkv.shape[0]):
        row, cos_t, sin_t = qkv[t], cos[t], sin[t]
        for h in range(n_heads):
            lo = row[2 * h * half:(2 * h + 1) * half]
            hi = row[(2 * h + 1) * half:(2 * h + 2) * half]
            for i in range(half):
                x, y, sine = value(lo[i]), value(hi[i]), sign * sin_t[i]
                lo[i] = rounded(x * cos_t[i] - y * sine, lo)
                hi[i] = rounded(y * cos_t[i] + x * sine, hi)

# ==== 4.5 Attention ====
# Tour: docs/tour/06_attention.md (forward) and 09_backward.md
# Each token t asks a question, its query, and every token j up to t offers a key and a value.  The
# score of j is the dot product of query and key.  softmax turns the scores of row t into
# probabilities, and the output is the mean of the values, weighted by them.  There are H query
# heads, and H / G of them share a key/value head (grouped-query attention).
@jit
def columns_of_head(h, H, G, D):
    """The first columns of query head h, and of the key and value that it reads, in a row of qkv"""
    g = h * G // H
    return h * D, (H + g) * D, (H + G + g) * D

@jit
def attention_forward(o, lse, qkv, t0, H, G, D, window):
    """s[j] = q[t] k[j] / sqrt(D),   p = softmax(s),   o[t] = sum_j p[j] v[j],   t - window < j <= t
    of each head, for tokens t from t0 on      Vaswani et al. 2017, eq. 1; Ainslie et al. 2023
    (t0 > 0 if earlier tokens were computed before: section 6)
    out: o (T, HD), lse (H, T): log sum_j e^s[j], kept for backward
    in: qkv (T, QKV): the queries of all heads, then the keys, then the values"""
    T, number = len(qkv), qkv.dtype.type
    scale, p = number(1 / math.sqrt(D)), np.empty(T, qkv.dtype)
    for h in range(H):
        q0, k0, v0 = columns_of_head(h, H, G, D)
        for t in range(t0, T):
            first = max(0, t + 1 - window)
            q, m = qkv[t, q0:q0 + D], number(-np.inf)    # m: the largest score
            for j in range(first, t + 1):    # p holds the scores s at first
                k, s = qkv[j, k0:k0 + D], number(0)
                for i in range(D):
                    s += q[i] * k[i]
                p[j] = s * scale
                m = larger(p[j], m)
            total = number(0)
            for j in range(first, t + 1):    # e^(s - m) does not overflow
                p[j] = exp(p[j] - m)
                total += p[j]
            lse[h, t] = m + number(math.log(total))
            out = o[t, q0:q0 + D]
            out[:] = 0
            for j in range(first, t + 1):
                v, weight = qkv[j, v0:v0 + D], p[j] / total
                for i in range(D):
                    out[i] += weight * v[i]

@jit
def attention_backward(dqkv, do, o, lse, qkv, H, G, D, window):
    """Row t of a head, backwards through the three formulas of `attention_forward`:
        o[t] = sum_j p[j] v[j]        dv[j] += p[j] do[t],   dp[j] = do[t] v[j]
        p = softmax(s)                ds[j] = p[j] (dp[j] - sum_n p[n] dp[n])
        s[j] = q[t] k[j] / sqrt(D)    dq[t] += ds[j] k[j] / sqrt(D),  dk[j] += ds[j] q[t] / sqrt(D)
    The second line holds because the derivative of p[n] by s[j] is p[n] (1 - p[j]) if n = j, else
    -p[n] p[j].  The sum over n is sum_n p[n] (do[t] v[n]) = do[t] o[t].  The probabilities would
    take T x T numbers per head.  They are not stored, but computed again: p[j] = e^(s[j] - lse[t]).
    dk and dv are sums, because all later tokens read the same key and value, and so do all heads of
    a group      Dao et al. 2022
    out: dqkv (T, QKV)     in: do, o (T, HD), lse (H, T), qkv (T, QKV)"""
    T, number = len(qkv), qkv.dtype.type
    scale = number(1 / math.sqrt(D))
    dqkv[:] = 0
    for h in range(H):
        q0, k0, v0 = columns_of_head(h, H, G, D)
        for t in range(T):
            q, dq = qkv[t, q0:q0 + D], dqkv[t, q0:q0 + D]
            do_t, o_t, do_o = do[t, q0:q0 + D], o[t, q0:q0 + D], number(0)
            for i in range(D):
                do_o += do_t[i] * o_t[i]
            for j in range(max(0, t + 1 - window), t + 1):
                k, dk = qkv[j, k0:k0 + D], dqkv[j, k0:k0 + D]
                v, dv = qkv[j, v0:v0 + D], dqkv[j, v0:v0 + D]
                s, dp = number(0), number(0)
                for i in range(D):
                    s += q[i] * k[i]
                    dp += do_t[i] * v[i]
                p = exp(s * scale - lse[h, t])
                ds = p * (dp - do_o) * scale             # with the 1 / sqrt(D) of the third line
                for i in range(D):
                    dq[i] += ds * k[i]
                    dk[i] += ds * q[i]
                    dv[i] += p * do_t[i]

# ==== 4.6 SwiGLU ====
# Tour: docs/tour/07_euler.md (forward) and 09_backward.md
# SwiGLU is the nonlinearity of the second half of a layer, between the products gate_up and down.
@jit
def swiglu_forward(y, gate_up):
    """y = silu(gate) * up,   silu(z) = z / (1 + e^-z)      Shazeer 2020, eq. 6
    out: y (T, F)     in: gate_up (T, 2F), gate first"""
    T, F = y.shape
    for t in range(T):
        row, gate, up = y[t], gate_up[t, :F], gate_up[t, F:]
        for f in range(F):
            row[f] = rounded(silu(value(gate[f])) * value(up[f]), row)

@jit
def swiglu_backward(gate_up, dy):
    """sigma = 1 / (1 + e^-gate):   dgate = dy * up * sigma * (1 + gate * (1 - sigma)),
    dup = dy * gate * sigma
    in place: gate_up (T, 2F) becomes dgate, dup     in: dy (T, F)"""
    (T, F), one = dy.shape, dy.dtype.type(1)
    for t in range(T):
        row, gate, up = dy[t], gate_up[t, :F], gate_up[t, F:]
        for f in range(F):
            z, u = value(gate[f]), value(up[f])
            sigma = one / (one + exp(-z))
            gate[f] = rounded(row[f] * u * sigma * (one + z * (one - sigma)), gate)
            up[f] = rounded(row[f] * z * sigma, up)

# ==== 4.7 Cross-entropy ====
# Tour: docs/tour/04_softmax.md
# One kernel computes the loss of each token and replaces the logits by their gradients.  A target
# of -1 marks a position without a loss.
@jit
def row_max(row):
    """max_j row[j], or NaN if the row contains one"""
    m = row[0]
    for j in range(1, row.size):
        m = larger(m, row[j])
    return m

@jit
def cross_entropy(nll, logits, targets, weight):
    """nll[t] = -log softmax(logits[t])[targets[t]], nats, or 0 where the target is -1
    out: nll (T,) float64
    in: targets (T,) int32, weight (T,) float64
    in place: logits (T, V) become weight[t] * (softmax - onehot), zero rows where the target is -1
    """
    T, V = logits.shape
    for t in range(T):
        row, y, total = logits[t], targets[t], logits.dtype.type(0)
        if y < 0:
            nll[t] = 0
            row[:] = 0
            continue
        m, of_target = row_max(row), row[y]
        for v in range(V):
            row[v] = exp(row[v] - m)
            total += row[v]
        nll[t] = m - of_target + math.log(total)
        scale = logits.dtype.type(weight[t])
        norm = scale / total
        for v in range(V):
            row[v] *= norm
        row[y] -= scale

# ==== 4.8 Biases and norms of q and k ====
# Qwen2 adds biases to q, k and v.  Qwen3 normalizes each head of q and k.  The presets of section 1
# have neither, so this section may wait until such a model is imported.
@jit
def add_bias(qkv, bias):
    """qkv (T, QKV) += bias (QKV,)      Qwen2 (Yang et al. 2024)"""
    for t in range(len(qkv)):
        row = qkv[t]
        for c in range(bias.size):
            row[c] = rounded(value(row[c]) + bias[c], row)

@jit
def add_bias_gradient(dbias, dqkv):
    """dbias += sum_t dqkv     dbias (QKV,), dqkv (T, QKV)"""
    for t in range(len(dqkv)):
        row = dqkv[t]
        for c in range(dbias.size):
            dbias[c] += row[c]

@jit
def head_norm_forward(qkv, rstd, q_gain, k_gain, H, eps):
    """RMSNorm of each head of q and k, before RoPE:      Qwen3 (Yang et al. 2025)
    y = gain * x * rstd,   rstd = 1 / sqrt(mean_i(x^2) + eps), the mean over the D entries of a head
    in place: qkv (T, QKV)     out: rstd (T, H + G) for backward     in: q_gain, k_gain (D,)"""
    D = q_gain.size
    for t in range(len(qkv)):
        for h in range(rstd.shape[1]):
            x, gain, ss = qkv[t, h * D:h * D + D], q_gain if h < H else k_gain, 0.0
            for i in range(D):
                ss += value(x[i]) * value(x[i])
            r = rstd.dtype.type(1.0 / math.sqrt(ss / D + eps))
            rstd[t, h] = r
            for i in range(D):
                x[i] = rounded(gain[i] * value(x[i]) * r, x)

@jit
def head_norm_backward(dqkv, qk, rstd, q_gain, k_gain, H):
    """u = x * rstd:   dx = rstd * (gain*dy - u * mean_i(gain*dy*u)), as in `rmsnorm_backward`
    in place: dqkv (T, QKV), dy becomes dx     in: qk (T, (H + G) D), the heads before their norm
    """
    D = q_gain.size
    for t in range(len(dqkv)):
        for h in range(rstd.shape[1]):
            dy, x = dqkv[t, h * D:h * D + D], qk[t, h * D:h * D + D]
            gain = q_gain if h < H else k_gain
            r, total = rstd[t, h], dqkv.dtype.type(0)
            for i in range(D):
                total += gain[i] * dy[i] * value(x[i])
            mean = dqkv.dtype.type(total * r * r / D)    # mean_i(gain*dy*u) * rstd
            for i in range(D):
                dy[i] = r * (gain[i] * dy[i] - value(x[i]) * mean)

@jit
def add_head_gain_gradients(dq_gain, dk_gain, dqkv, qk, rstd, H):
    """dgain += sum_t sum_h dy*u, u = x * rstd, over the query heads and over the key heads
    dq_gain, dk_gain (D,)     dqkv (T, QKV) holds dy, qk (T, (H + G) D) holds x"""
    D = dq_gain.size
    for t in range(len(dqkv)):
        for h in range(rstd.shape[1]):
            r, dy, x = rstd[t, h], dqkv[t, h * D:h * D + D], qk[t, h * D:h * D + D]
            dgain = dq_gain if h < H else dk_gain
            for i in range(D):
                dgain[i] += dy[i] * value(x[i]) * r

# ==== 5 Model ====
# Tour: docs/tour/07_euler.md (forward) and 09_backward.md
# `forward`, `loss` and `backward` of one sequence, to be called in this order.  They consist of the
# ops of section 4.  `python check.py --plain` compares the gradients with finite differences.
Constants = namedtuple("Constants", "L C P H G D window eps cos sin")    # the same for every pass

def constants_of(cfg, dtype):
    return Constants(cfg.n_layer, cfg.n_embd, cfg.n_mtp, cfg.n_head, cfg.n_kv_head, cfg.head_dim,
                     cfg.window or cfg.seq_len, cfg.norm_eps, *rope_table(cfg, dtype))

@jit
def head_of(k, p, c):
    """The matrix (V, C) of output head k.  If the embedding is tied, wte is head 0 and lm_head
    begins with head 1.     p: the parameters, or their gradients"""
    tied = c.P - len(p.lm_head)              # 1 if the embedding is tied, else 0
    return p.wte if k < tied else p.lm_head[k - tied]

@jit
def forward(tokens, t0, n_outputs, p, a, c):
    """Computes the activations of the tokens from t0 on, up to the logits a.logits (P, T, V) of
    output heads 0 to n_outputs - 1.     tokens (T,) int32, p Params, a Acts, c Constants
    In training, t0 is 0.  If a text grows, only the new tokens are computed, because no token reads
    a later one.  They need only the keys and values of the earlier tokens.  a.qkv still holds
    these: it is the KV cache.

    Each layer is two Euler steps: x += attention(rmsnorm(x)), then x += swiglu(rmsnorm(x))."""
    H, G, D, T = c.H, c.G, c.D, len(tokens)
    new = slice(t0, T)
    embedding_forward(a.x[0, new], tokens[new], p.wte)
    for l in range(c.L):
        x, x1, x2 = a.x[2 * l, new], a.x[2 * l + 1, new], a.x[2 * l + 2, new]

        attn_in, qkv = a.attn_in[l, new], a.qkv[l, new]
        rmsnorm_forward(attn_in, a.attn_rstd[l, new], x, p.attn_norm[l], c.eps)
        matmul(qkv, attn_in, p.qkv[l])
        if p.qkv_bias.size:                  # biases and norms of q and k: 4.8
            add_bias(qkv, p.qkv_bias[l])
        if p.q_norm.size:
            a.qk[l, new] = qkv[:, :(H + G) * D]
            head_norm_forward(qkv, a.qk_rstd[l, new], p.q_norm[l], p.k_norm[l], H, c.eps)
        rope(qkv, c.cos[new], c.sin[new], H + G, c.cos.dtype.type(1))
        # for the queries of the new tokens, with the keys and values of all
        attention_forward(a.att[l, :T], a.lse[l], a.qkv[l, :T], t0, H, G, D, c.window)
        matmul_add(x1, x, a.att[l, new], p.attn_proj[l])

        mlp_in, gate_up, swiglu = a.mlp_in[l, new], a.gate_up[l, new], a.swiglu[l, new]
        rmsnorm_forward(mlp_in, a.mlp_rstd[l, new], x1, p.mlp_norm[l], c.eps)
        matmul(gate_up, mlp_in, p.gate_up[l])
        swiglu_forward(swiglu, gate_up)
        matmul_add(x2, x1, swiglu, p.down[l])
    x, final_in = a.x[2 * c.L, new], a.final_in[new]
    rmsnorm_forward(final_in, a.final_rstd[new], x, p.final_norm, c.eps)
    for k in range(n_outputs):
        matmul(a.logits[k, new], final_in, head_of(k, p, c))

@jit
def loss(nll, targets, weight, a):
    """nll (P, T): the cross-entropy of each head at each position, in nats.  Replaces the logits by
    the gradients of sum_kt weight[k, t] * nll[k, t].     targets, weight (P, T)"""
    for k in range(len(nll)):
        cross_entropy(nll[k], a.logits[k], targets[k], weight[k])

@jit
def backward(tokens, n_outputs, p, g, a, d, c):
    """Adds the gradients of all parameters to g, and writes those of the residual stream, d.x[2L]
    to d.x[0].     g Params, d ActGrads
    It runs through `forward` in reverse: each op turns the gradient of its output into the
    gradients of its inputs.  `loss` has replaced a.logits by their gradients."""
    H, G, D, L, dlogits = c.H, c.G, c.D, c.L, a.logits
    d.norm[:] = 0
    for k in range(n_outputs):               # the output heads share their input
        matmul_backward_add(d.norm, head_of(k, g, c), dlogits[k], a.final_in, head_of(k, p, c))
    add_gain_gradient(g.final_norm, d.norm, a.x[2 * L], a.final_rstd)
    dx = d.x[2 * L]
    dx[:] = 0                                # no direct path goes on from here: dnext is 0
    rmsnorm_backward(dx, dx, d.norm, a.x[2 * L], p.final_norm, a.final_rstd)
    for l in range(L - 1, -1, -1):
        x, x1 = a.x[2 * l], a.x[2 * l + 1]
        dx, dx1, dx2 = d.x[2 * l], d.x[2 * l + 1], d.x[2 * l + 2]

        # x2 = x1 + swiglu(rmsnorm(x1)): dx2 goes through the branch, and directly to dx1
        matmul_backward(d.swiglu, g.down[l], dx2, a.swiglu[l], p.down[l])
        dgate_up = a.gate_up[l]              # `swiglu_backward` writes it in place of gate_up
        swiglu_backward(dgate_up, d.swiglu)
        matmul_backward(d.norm, g.gate_up[l], dgate_up, a.mlp_in[l], p.gate_up[l])
        add_gain_gradient(g.mlp_norm[l], d.norm, x1, a.mlp_rstd[l])
        rmsnorm_backward(dx1, dx2, d.norm, x1, p.mlp_norm[l], a.mlp_rstd[l])

        # x1 = x + attention(rmsnorm(x)): the same for dx1 and dx
        matmul_backward(d.att, g.attn_proj[l], dx1, a.att[l], p.attn_proj[l])
        attention_backward(d.qkv, d.att, a.att[l], a.lse[l], a.qkv[l], H, G, D, c.window)
        rope(d.qkv, c.cos, c.sin, H + G, c.cos.dtype.type(-1))
        if p.q_norm.size:                    # the gains first: the next call overwrites d.qkv
            add_head_gain_gradients(g.q_norm[l], g.k_norm[l], d.qkv, a.qk[l], a.qk_rstd[l], H)
            head_norm_backward(d.qkv, a.qk[l], a.qk_rstd[l], p.q_norm[l], p.k_norm[l], H)
        if p.qkv_bias.size:
            add_bias_gradient(g.qkv_bias[l], d.qkv)
        matmul_backward(d.norm, g.qkv[l], d.qkv, a.attn_in[l], p.qkv[l])
        add_gain_gradient(g.attn_norm[l], d.norm, x, a.attn_rstd[l])
        rmsnorm_backward(dx, dx1, d.norm, x, p.attn_norm[l], a.attn_rstd[l])
    embedding_backward(g.wte, d.x[0], tokens)

def check_shape(targets, n_outputs, tokens):
    """Rejects targets without a row for each head and sequence: kernels check no bounds of arrays.
    """
    expected = n_outputs, *tokens.shape
    need(targets.shape == expected, f"expected targets of the shape {expected}, found "
         f"{targets.shape}")

def check_ids(ids, cfg):
    """Rejects ids that are not in the vocabulary, because kernels check no bounds of arrays."""
    need(0 <= ids.min() and ids.max() < cfg.vocab_size,
         f"expected token ids from 0 to {cfg.vocab_size - 1}, found {ids.min()} to {ids.max()}")

# ==== 6 Generation ====
# Tour: docs/tour/01_talk.md, and 13_answers.md for the KV cache
# The model gives the logits of the token that follows a text.  `sample` picks a token, and
# `generate` appends it to the text, again and again.
def largest_mask(x, n):
    """A mask of the n largest numbers of x; among equal numbers the first ones win."""
    least = np.partition(x, len(x) - n)[len(x) - n]
    chosen = x > least
    chosen[np.flatnonzero(x == least)[:n - np.count_nonzero(chosen)]] = True
    return chosen

# What `sample` may choose: the top_k most probable tokens (0: all), the fewest whose probabilities
# sum to at least top_p, and those with at least min_p times the probability of the best one
Choice = namedtuple("Choice", "temperature top_k top_p min_p", defaults=(0.8, 0, 1.0, 0.0))

def sample(logits, rng, sampling):
    """Samples an id from softmax(logits / temperature), restricted by top-k, top-p and min-p.
    logits (V,); sampling: an object with temperature, top_k, top_p and min_p, such as a `Choice`.
    Each restriction is applied to the probabilities of all tokens, and the strictest one decides.
    """
    best = int(np.argmax(logits))            # argmax finds the first NaN, if there is one
    need(logits[best] != -math.inf, "no token may follow here, because all are excluded; in JSON "
         "mode, use another schema")
    if not math.isfinite(logits[best]):
        raise UserError(f"the logit of token {best} is {logits[best]}, expected a finite number; "
                        f"the model's weights are too large: use another checkpoint")
    if sampling.temperature == 0:
        return best
    z = logits.astype(np.float64)
    # probabilities, relative to that of the most probable token
    odds = np.exp((z - z[best]) / max(sampling.temperature, 1e-99))
    n = min(sampling.top_k or len(odds), len(odds))
    if sampling.top_p < 1:                   # the fewest whose sum reaches top_p of the total
        total = np.sort(odds)[::-1].cumsum()
        n = min(n, 1 + int(np.searchsorted(total, sampling.top_p * total[-1])))
    if n < len(odds):
        odds[~largest_mask(odds, n)] = 0
    odds[odds < sampling.min_p] = 0
    total = odds.cumsum()
    return int(np.searchsorted(total, rng.random() * total[-1], side="right"))

NO_TOKEN = ("the prompt has no tokens: it is empty, or the tokenizer knows none of its bytes; use "
            "another prompt")

def generate(decoder, prompt, n, rng, sampling, end=None):
    """Yields up to n tokens that continue the prompt's ids.  The id `end` ends the text and is not
    yielded.  rng: its method random() returns numbers from [0, 1).  sampling: see `sample`.
    A `Reply` (18) has the same tokens, faster, and adds penalties, stop texts and draft tokens."""
    need(len(prompt), NO_TOKEN)
    ids = prompt
    for _ in range(n):
        logits = decoder.step(*ids)          # of the token that follows all ids so far, (V,)
        token = sample(logits, rng, sampling)
        if token == end:
            return
        yield token
        ids = [token]

class PlainDecoder:
    """Reads a text, some tokens at a time.  Each step computes only its new tokens, because the
    keys and values of earlier ones stay in self.a.qkv (see `forward`)."""

    def __init__(self, cfg, flat):
        """flat (N,): the parameters, in the order of `param_table`"""
        self.cfg, self.p = cfg, views(flat, param_table(cfg))
        self.tokens, self.n = np.zeros(cfg.seq_len, np.int32), 0     # n: tokens so far
        self.a = zeros(act_shapes(replace(cfg, n_mtp=1), cfg.seq_len), flat.dtype)
        self.constants = constants_of(cfg, flat.dtype)

    def step(self, *ids):
        """Appends these tokens, and returns the logits (V,) of the token that follows them."""
        start, end = self.n, self.n + len(ids)
        need(end <= self.cfg.seq_len, f"this model reads up to {self.cfg.seq_len} tokens, and the "
             f"text has more")
        self.tokens[start:end] = ids
        check_ids(self.tokens[:end], self.cfg)
        forward(self.tokens[:end], start, 1, self.p, self.a, self.constants)
        self.n = end
        return self.a.logits[0, end - 1]

# ==== 7 Optimizer ====
# Tour: docs/tour/10_adamw.md
# The schedule of the learning rate, gradient clipping, and AdamW.
def lr_at(step, n_steps, lr, warmup, floor, cooldown=0.0):
    """Linear warm-up over `warmup` steps, then a half cosine from lr to floor * lr at n_steps.
    With a cooldown, the rate is constant after the warm-up and falls linearly at the end.  cooldown
    = 0.2 means during the last fifth of the steps that follow the warm-up.
    An infinite n_steps means that the run is not planned yet: the rate then stays at lr."""
    if step < warmup:
        return lr * (step + 1) / warmup
    x = min(1.0, (step - warmup) / max(1, n_steps - warmup))
    share = min(1.0, (1 - x) / cooldown) if cooldown else 0.5 * (1 + math.cos(math.pi * x))
    return lr * (floor + (1 - floor) * share)

# ---- AdamW
# The last four fields are for runs with Muon (16).  muon_lr = 0 means that AdamW updates all
# tensors; then the other three are unused.
Hyper = namedtuple("Hyper", "lr beta1 beta2 eps weight_decay clip correct1 correct2 muon_lr "
                            "momentum newton_schulz embedding_lr", defaults=(0.0, 0.0, 0.0, 1.0))

MUON_SETTINGS = "muon_lr", "momentum", "newton_schulz", "embedding_lr"

def hyper_at(t, lr, *, beta1, beta2, weight_decay, clip, eps=1e-8, **muon_settings):
    """The settings of step t = 1, 2, ..., all floats.     correct1, correct2 = 1 - beta^t
    m averages the gradients so far, and v their squares.  Both begin at zero, so they are too small
    by the factor 1 - beta^t at first, by which `adamw_update` divides.
    muon_settings: the fields in MUON_SETTINGS; without them AdamW updates all tensors"""
    settings = dict(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, clip=clip,
                    correct1=1 - beta1 ** t, correct2=1 - beta2 ** t, **muon_settings)
    return Hyper(**{name: float(x) for name, x in settings.items()})

@jit_parallel
def gradient_norm(g):
    """|g|     g (N,)"""
    N = g.size
    blocks = 256                             # fixed: sums do not depend on the number of threads
    squares = np.empty(blocks)               # np.zeros would become another parallel loop
    for i in prange(blocks):
        part = g[i * N // blocks:(i + 1) * N // blocks]
        ss = 0.0             # float64: a long sum; float32 terms have a relative error <= 6e-8
        for j in range(part.size):
            ss += part[j] * part[j]
        if math.isinf(ss):                   # the square of a float32 above 2e19 overflows
            ss = 0.0
            for j in range(part.size):
                ss += np.float64(part[j]) * np.float64(part[j])
        squares[i] = ss
    total = 0.0
    for i in range(blocks):                  # Numba would run .sum() in parallel, in another order
        total += squares[i]
    return math.sqrt(total)

def clipping(norm, hyper):
    """The factor that clips a gradient of this norm to hyper.clip."""
    return min(1.0, hyper.clip / (norm + 1e-30))

@jit_parallel
def adamw_update(p, g, m, v, n_decay, hyper, scale):
    """g *= scale,   m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
    p -= lr (m' / (sqrt(v') + eps) + weight_decay p),   m' = m / correct1,   v' = v / correct2
    Loshchilov & Hutter 2019, with lr as the factor of the decay; see docs/tour/10_adamw.md.
    weight_decay acts on the first n_decay entries.  Sets g to zero for the next step.
    p, g, m, v (N,), hyper a Hyper"""
    N = p.size
    blocks = 256
    dtype = p.dtype.type
    scale = dtype(scale)
    rate, eps = dtype(hyper.lr / hyper.correct1), dtype(hyper.eps)
    unbias = dtype(hyper.correct2 ** -0.5)               # sqrt(v') = sqrt(v) * unbias
    old1, new1 = dtype(hyper.beta1), dtype(1 - hyper.beta1)
    old2, new2 = dtype(hyper.beta2), dtype(1 - hyper.beta2)
    for i in prange(blocks):
        start, end = i * N // blocks, (i + 1) * N // blocks
        # The block in which the matrices end has two parts, because gains do not decay
        middle = min(max(n_decay, start), end)
        matrices = start, middle, hyper.lr * hyper.weight_decay
        gains = middle, end, 0.0
        for n0, n1, decay in (matrices, gains):
            ps, gs, ms, vs = p[n0:n1], g[n0:n1], m[n0:n1], v[n0:n1]
            keep = dtype(1 - decay)
            for j in range(ps.size):
                x = gs[j] * scale
                ms[j] = old1 * ms[j] + new1 * x
                vs[j] = old2 * vs[j] + new2 * x * x
                ps[j] = keep * ps[j] - rate * ms[j] / (math.sqrt(vs[j]) * unbias + eps)
                gs[j] = 0

def adamw(p, g, m, v, n_decay, hyper):
    """Clips g to the norm hyper.clip, then runs `adamw_update`.  Returns |g| before clipping.  If
    |g| is not finite, nothing changes."""
    norm = gradient_norm(g)
    if math.isfinite(norm):
        adamw_update(p, g, m, v, n_decay, hyper, clipping(norm, hyper))
    return norm

# ==== 8 Batches ====
# Tour: docs/tour/10_adamw.md
# `Batches` cuts a text into windows of T tokens.  The targets of a window are the same tokens,
# shifted by one for head 0, by two for head 1, and so on.
def targets_of(rows, P):
    """targets (P, B, T) of rows (B, T + P): head k at position t predicts entry t + 1 + k."""
    T = rows.shape[1] - P
    return np.stack([rows[:, 1 + k:1 + k + T] for k in range(P)])

def windows(tokens, starts, T, P):
    """tokens (B, T), targets (P, B, T) of the windows that begin at `starts`, int32
    Past the end of the text, targets are -1 and tokens are 0."""
    rows = np.full((len(starts), T + P), -1, np.int32)
    for row, start in zip(rows, starts, strict=True):
        piece = tokens[start:start + T + P]
        row[:len(piece)] = piece
    return np.maximum(rows[:, :T], 0), targets_of(rows, P)

class Epochs:
    """Endless epochs over range(n).  Each epoch has its own order and its own phase, a number from
    0 to T - 1, both drawn from (seed, epoch).  So a step number tells which entries come next, and
    a run that continues needs to know nothing else."""

    def __init__(self, n, T, seed):
        self.n, self.T, self.seed, self.epoch = n, T, seed, None

    def entry(self, i):
        """(epoch, index < n, phase of the epoch) of entry i of the run"""
        epoch, j = divmod(i, self.n)
        if epoch != self.epoch:              # keep only the order of one epoch
            rng = np.random.default_rng((self.seed, epoch))
            self.phase = rng.integers(self.T)
            self.order = rng.permutation(self.n)
            self.epoch = epoch
        return epoch, self.order[j], self.phase

class Batches(Epochs):
    """Adjacent windows of T tokens.  With phase 2 and T = 4, windows begin at tokens 2, 6, 10, ...:
    each epoch cuts the text at other places."""

    def __init__(self, tokens, T, P, seed):
        super().__init__(len(tokens) // T - 1, T, seed)
        need(self.n > 0, f"expected {2 * T:,} training tokens or more, two windows of {T}, found "
             f"{len(tokens):,}; use a longer text{self.or_else(len(tokens))}")
        self.tokens, self.P = tokens, P

    def or_else(self, n):
        """Another remedy, if a text has only n tokens"""
        return ""

    def take(self, i, B):
        """tokens (B, T), targets (P, B, T): windows i to i + B of the run."""
        entries = [self.entry(j) for j in range(i, i + B)]
        starts = [window * self.T + phase for _, window, phase in entries]
        return windows(self.tokens, starts, self.T, self.P)

# ==== 9 Training ====
# Tour: docs/tour/10_adamw.md
# The loss is a mean over targets, `PlainModel` computes its gradient, and `train` is the loop.
def loss_weights(targets, mtp_weight):
    """The factors of the summed cross-entropies S_k of the output heads in the loss
        loss = S_0 / n_0 + mtp_weight * (mean of S_k / n_k over the other heads k)
    n_k is the number of targets (not -1) of head k in the whole step.     targets (P, ...) -> (P,)
    """
    P = len(targets)
    count = np.maximum(1, (targets.reshape(P, -1) >= 0).sum(1))
    of_heads = [1.0, *[mtp_weight / (P - 1) for _ in range(P - 1)]]
    return np.array(of_heads) / count

def token_weights(weight, shape):
    """The factor of each cross-entropy in the loss, (B, P, T) float64.     shape: (B, P, T)
    weight (B, P, T), or (B, P) or (P,) if it is the same at all tokens of a sequence"""
    weight = np.asarray(weight, np.float64)
    return np.ones(shape) * (weight if weight.ndim == 3 else weight[..., None])

class PlainModel:
    """A model and its gradients, one sequence after another.  It computes in the dtype of its
    parameters: float32 to train, float64 to check gradients."""

    def __init__(self, cfg, flat):
        """flat (N,): the parameters, in the order of `param_table`"""
        table = param_table(cfg)
        self.cfg, self.flat, self.g_flat = cfg, flat, np.zeros_like(flat)
        self.p, self.g = views(flat, table), views(self.g_flat, table)
        self.m, self.v = np.zeros((2, flat.size), flat.dtype)        # AdamW's moments (7)
        self.n_decay = sum(math.prod(x.shape) for x in table if x.decays)
        self.ce = np.zeros(cfg.n_mtp)        # summed cross-entropy of each head since `update`
        self.constants = constants_of(cfg, flat.dtype)

    def run(self, tokens, targets, weight, n_outputs, with_gradient):
        """Cross-entropies S (B, n_outputs) in nats, summed over each sequence's tokens.
        with_gradient: also g += the gradient of sum_bk weight[b, k] S[b, k]
        tokens (B, T), targets (n_outputs, B, T), -1 for none, int32
        weight (B, n_outputs), or another shape that `token_weights` takes"""
        cfg, c, dtype, (B, T) = self.cfg, self.constants, self.flat.dtype, tokens.shape
        need(0 < T <= cfg.seq_len, f"expected 1 to {cfg.seq_len} tokens per sequence, found {T}")
        check_ids(tokens, cfg)
        check_ids(np.maximum(targets, 0), cfg)
        check_shape(targets, n_outputs, tokens)
        a, d = zeros(act_shapes(cfg, T), dtype), zeros(act_grad_shapes(cfg, T), dtype)
        nll = np.zeros((B, n_outputs, T))
        weight = token_weights(weight, nll.shape)
        for b in range(B):
            forward(tokens[b], 0, n_outputs, self.p, a, c)
            loss(nll[b], targets[:, b], weight[b], a)
            if with_gradient:
                backward(tokens[b], n_outputs, self.p, self.g, a, d, c)
        self.nll = nll
        return nll.sum(2)

    def gradient(self, tokens, targets, weight):
        """g += the gradient of one micro-batch"""
        self.ce += self.run(tokens, targets, weight, self.cfg.n_mtp, True).sum(0)

    def losses(self, tokens, targets):
        """Summed cross-entropy of head 0 of every sequence (B,), in nats     targets (B, T)"""
        return self.run(tokens, targets[None], np.ones((len(tokens), 1)), 1, False)[:, 0]

    def token_losses(self, tokens, targets):
        """Cross-entropy of head 0 at every token (B, T), in nats, 0 where there is no target"""
        self.losses(tokens, targets)
        return self.nll[:, 0]

    def update(self, hyper):
        """An AdamW step with the gradients since the last step; sets them to zero.  Returns the
        summed cross-entropies (P,) since the last step, and |g| before clipping.  If |g| is not
        finite, only the cross-entropies are set to zero."""
        norm = adamw(self.flat, self.g_flat, self.m, self.v, self.n_decay, hyper)
        ce, self.ce = self.ce, np.zeros(self.cfg.n_mtp)
        return ce, norm

def train(run, stopped=()):
    """The training loop, until the last step, or until `stopped` holds a signal.
    run: an object with
        model, batches                 the model, and the data that it learns from
        step, n_steps                  the number of steps that are done, and of all steps
        B, micro_batch                 sequences of a step, and of a forward and backward pass; the
                                       batches of `rl` may have fewer than B
        weights(tokens, targets)       the factor of each cross-entropy in the loss, (B, P) or
                                       (B, P, T)
        hyper(step)                    the settings of the optimizer
        updating()                     a context in which parameters and step change together:
                                       after an error within it they may not match, and must not
                                       be saved
        record(losses, norm, hyper, seconds)     writes the log; ends a run whose loss, or the
                                       norm of whose gradient, is not finite
        due(what)                      is it time to "validate" or to "save"?
        validate(), save()"""
    model, batches = run.model, run.batches
    while run.step < run.n_steps and not stopped:
        began = time.perf_counter()
        tokens, targets = batches.take(run.step * run.B, run.B)      # (B, T), (P, B, T)

        # The gradient of the loss: a forward and a backward pass of each micro-batch
        weight = run.weights(tokens, targets)
        for b in range(0, len(tokens), run.micro_batch):
            rows = slice(b, b + run.micro_batch)
            model.gradient(tokens[rows], targets[:, rows], weight[rows])

        # The update: clip the gradient, then take the step
        hyper = run.hyper(run.step)
        with run.updating():
            ce, norm = model.update(hyper)
            run.step += 1
        losses = ce / np.maximum(1, (targets >= 0).sum((1, 2)))      # (P,): means over targets

        run.record(losses, norm, hyper, time.perf_counter() - began)
        if run.due("validate"):
            run.validate()
        if run.due("save"):
            run.save()

# ==== 10 Checkpoint ====
# A model is one file in the format safetensors: 8 bytes with the length of a header, the header in
# JSON, and the numbers.  The names are those of a Llama, so that other programs can read them.  The
# header also holds the configuration, the tokenizer, and a checksum of what follows the length.
# `read_model` does not verify it; nanoeuler_parts/checkpoint does.
# part_of: the name of the Tensor that it is a part of
LlamaTensor = namedtuple("LlamaTensor", "name gguf shape start part_of")

# For each tensor, the matrices that are stacked in one layer or head of it, from top to bottom:
# (number of rows, name in a Llama, name in GGUF, the format of llama.cpp).  If the number of rows
# is "", the tensor is a single matrix with all rows.
FILE_NAMES = {
    "wte":        [("", "model.embed_tokens", "token_embd")],
    "qkv":        [("HD", "self_attn.q_proj", "attn_q"), ("GD", "self_attn.k_proj", "attn_k"),
                   ("GD", "self_attn.v_proj", "attn_v")],
    "attn_proj":  [("", "self_attn.o_proj", "attn_output")],
    "gate_up":    [("F", "mlp.gate_proj", "ffn_gate"), ("F", "mlp.up_proj", "ffn_up")],
    "down":       [("", "mlp.down_proj", "ffn_down")],
    "lm_head":    [("", "", "")],            # each head has a name of its own
    "attn_norm":  [("", "input_layernorm", "attn_norm")],
    "mlp_norm":   [("", "post_attention_layernorm", "ffn_norm")],
    "final_norm": [("", "model.norm", "output_norm")],
    "q_norm":     [("", "self_attn.q_norm", "attn_q_norm")],
    "k_norm":     [("", "self_attn.k_norm", "attn_k_norm")],
}
FILE_NAMES["qkv_bias"] = FILE_NAMES["qkv"]

def llama_tensors(cfg):
    """The tensors of a file in buffer order, with the names and shapes of a LlamaForCausalLM.
    Each tensor of `param_table` is split by layer or head, and each layer into its matrices: qkv
    (L, QKV, C) becomes model.layers.0.self_attn.q_proj.weight (HD, C), k_proj (GD, C), v_proj
    (GD, C), and so on.  gguf: the name in a GGUF file, "" if GGUF has no place for the tensor."""
    size = dims_of(cfg)
    rows_of = {"HD": size.HD, "GD": size.G * size.D, "F": size.F}
    of_heads = [("lm_head", "output"), *((f"mtp.{k}", "") for k in range(1, cfg.n_mtp))]
    prefixes = {"": [("", "")],
                "layer": [(f"model.layers.{l}.", f"blk.{l}.") for l in range(cfg.n_layer)],
                "head": of_heads[1:] if cfg.tie_embeddings else of_heads}
    tensors = []
    for x in param_table(cfg):
        if x.start == x.end:                 # the model has no such tensor
            continue
        start, (all_rows, *columns) = x.start, x.shape[1:] if x.axis else x.shape
        for prefix, gguf_prefix in prefixes[x.axis]:
            for rows, name, gguf in FILE_NAMES[x.name]:
                shape = rows_of.get(rows, all_rows), *columns
                suffix = "bias" if x.role == "bias" else "weight"
                in_gguf = f"{gguf_prefix}{gguf}.{suffix}" if gguf_prefix or gguf else ""
                tensors.append(LlamaTensor(f"{prefix}{name}.{suffix}", in_gguf, shape, start,
                                           x.name))
                start += math.prod(shape)
    return tensors

FILE_TYPES = {"F32": "<f4", "BF16": "<u2", "I8": "i1", "F64": "<f8"}

def read_model(path):
    """(Config, Tokenizer, state, parameters (N,) float32) of a checkpoint"""
    with reading(path, "name a checkpoint"):
        with open(path, "rb") as f:
            length = int.from_bytes(f.read(8), "little")
            need(length < os.path.getsize(path), "expected a NanoEuler checkpoint")
            header, data = json.loads(f.read(length)), f.read()
        meta = header["__metadata__"]
        cfg = Config(**json.loads(meta["config"])).check()
        tokenizer = bpe.Tokenizer.from_json(meta["tokenizer"])

        def numbers(name):
            entry = header[name]
            start, end = entry["data_offsets"]
            x = np.frombuffer(data[start:end], FILE_TYPES[entry["dtype"]]).reshape(entry["shape"])
            if entry["dtype"] == "BF16":     # the upper half of a float32
                x = (x.astype(np.uint32) << 16).view(np.float32)
            if entry["dtype"] == "I8":       # a row is its scale times numbers from -127 to 127
                x = x * numbers(f"{name}_scale")
            return x

        flat = aligned((n_params(cfg),), np.float32)
        for x in llama_tensors(cfg):
            found = numbers(x.name)
            need(found.shape == x.shape, f"{x.name}: expected shape {x.shape}, found {found.shape}")
            flat[x.start:x.start + found.size] = found.ravel()
        return cfg, tokenizer, json.loads(meta["state"]), flat

def write_model(path, cfg, tokenizer, state, flat):
    """Writes a checkpoint: float32 parameters, without the optimizer's moments"""
    no_hash, start = "0" * 64, 0             # zeros stand for the checksum while it is computed
    meta = {"format": "nanoeuler", "config": json.dumps(asdict(cfg)), "state": json.dumps(state),
            "tokenizer": tokenizer.to_json(), "tokenizer_sha256": tokenizer.hash()}
    header = {"__metadata__": {**meta, "sha256": no_hash}}
    for x in llama_tensors(cfg):
        end = start + 4 * math.prod(x.shape)
        header[x.name] = {"dtype": "F32", "shape": x.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)   # the numbers begin on a cache line
    data = flat.astype("<f4").tobytes()
    digest = hashlib.sha256(text + data).hexdigest().encode()
    before, _, after = text.rpartition(no_hash.encode())
    with open(f"{path}.tmp", "wb") as f:     # a file that is only half written has another name
        f.write(len(text).to_bytes(8, "little") + before + digest + after + data)
    os.replace(f"{path}.tmp", path)

# ==== 11 The program alone ====
# What a user types, if this file and bpe.py are alone in a folder.  `main`, at the end of the file,
# then calls `plain_main`.  With the folder nanoeuler_parts, the command line of cli.py is used.
class PlainRun:
    """A run of `train` on one text, with AdamW.  The last tenth of the text is held out."""
    B, micro_batch, warmup, eval_every = 16, 16, 50, 200
    updating = contextlib.nullcontext

    def __init__(self, cfg, text, out, n_steps):
        cut = len(text) * 9 // 10
        while cut and text[cut] & 0xC0 == 0x80:          # in the middle of a character
            cut -= 1
        learned, held_out = text[:cut], text[cut:]
        self.tokenizer = bpe.train(learned, cfg.vocab_size, bpe.SPECIALS)
        self.cfg = replace(cfg, vocab_size=self.tokenizer.vocab_size)
        self.model = PlainModel(self.cfg, init_params(self.cfg, seed=1))
        T, P = self.cfg.seq_len, self.cfg.n_mtp
        ids = self.tokenizer.encode(learned)
        self.batches = Batches(ids, T, P, seed=1)
        # the last token before the held-out text predicts its first one
        tokens = np.append(ids[-1:], self.tokenizer.encode(held_out))
        self.tokens, targets = windows(tokens, range(0, len(tokens) - 1, T), T, P)
        self.targets, self.held_out_bytes = targets[0], len(held_out)
        self.out, self.step, self.n_steps = out, 0, n_steps
        self.lr = 3e-3 * min(1, 128 / cfg.n_embd)        # wider models need a smaller one

    def weights(self, tokens, targets):
        return np.tile(loss_weights(targets, 0.3), (self.B, 1))

    def hyper(self, step):
        lr = lr_at(step, self.n_steps, self.lr, self.warmup, floor=0.1)
        return hyper_at(step + 1, lr, beta1=0.9, beta2=0.95, weight_decay=0.1, clip=1.0)

    def record(self, losses, norm, hyper, seconds):
        need(math.isfinite(norm) and np.isfinite(losses).all(), f"step {self.step}: the loss or "
             f"its gradient is not finite; start again with a lower learning rate")
        if self.step <= 5 or self.step % 20 == 0 or self.step == self.n_steps:
            print(f"step {self.step:>5}/{self.n_steps}  loss {losses[0]:.3f}  lr {hyper.lr:.1e}  "
                  f"|g| {norm:.2f}  {1e3 * seconds:.0f} ms", flush=True)

    def due(self, what):
        """Both are due at the same steps here."""
        return self.step % self.eval_every == 0 or self.step == self.n_steps

    def validate(self):
        """Bits per byte of the held-out text: its loss in bits, per byte that the tokens spell"""
        nats = self.model.losses(self.tokens, self.targets).sum()
        print(f"step {self.step:>5}  validation "
              f"{nats / math.log(2) / self.held_out_bytes:.4f} bits/byte", flush=True)

    def save(self):
        state = {"kind": "base", "eos": "</s>", "step": self.step, "n_steps": self.n_steps}
        write_model(self.out, self.cfg, self.tokenizer, state, self.model.flat)

# Stanford Alpaca's template; the response follows it
PROMPT = ("Below is an instruction that describes a task. Write a response that appropriately "
          "completes the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n")
# ChatML's template, in Jinja, the language in which files store templates
CHATML_TOKENS = bpe.SPECIALS[1:]             # <|im_start|> and <|im_end|>
CHATML = (r"{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
          r"message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
          r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")

def prompt_ids(prompt, state, tokenizer):
    """The ids of a prompt, and the id that ends the reply, or None.  A base model continues the
    prompt as it is.  A chat model expects a template around it, ChatML's or Alpaca's; the names of
    special tokens in the prompt itself stay text."""
    end = tokenizer.specials.get(state.get("eos"))
    if state.get("kind") != "chat":
        return tokenizer.encode_whole(prompt), end
    if not state.get("template"):
        return tokenizer.encode_whole(PROMPT.format(instruction=prompt)), end
    need(state["template"] == CHATML, "this model's chat template needs the folder "
         "nanoeuler_parts; put it beside nanoeuler.py")
    start, stop = (tokenizer.specials[name] for name in CHATML_TOKENS)
    return np.array([start, *tokenizer.encode(f"user\n{prompt}"), stop, *tokenizer.encode("\n"),
                     start, *tokenizer.encode("assistant\n")]), stop

def replace_bad_characters():
    """Makes the standard streams replace what they cannot decode or encode, by U+FFFD or ?."""
    for stream in sys.stdin, sys.stdout, sys.stderr:     # a terminal may support only ASCII
        with contextlib.suppress(AttributeError):        # None, or a notebook's
            stream.reconfigure(errors="replace")

def for_terminal(text):
    """Generated text for standard output.  A model must not control a terminal, so at a terminal
    control characters become U+FFFD, and so do those that change the direction of writing.  Tabs
    and line ends remain.  Carriage returns are dropped, because they could overwrite the line."""
    if not (sys.stdout and sys.stdout.isatty()):
        return text
    return re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", "\ufffd",
                  text.replace("\r", ""))

def write_reply(prompt, model, choice, n):
    """Prints up to n tokens of a reply, as they are sampled.     model: from `read_model`"""
    cfg, tokenizer, state, flat = model
    ids, end = prompt_ids(prompt, state, tokenizer)
    need(len(ids) <= cfg.seq_len, f"the prompt has {len(ids)} tokens, and this model reads up to "
         f"{cfg.seq_len}; shorten it")
    n, rng = min(n, cfg.seq_len + 1 - len(ids)), np.random.default_rng()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")       # a character may be two tokens
    for token in generate(PlainDecoder(cfg, flat), ids, n, rng, choice, end):
        print(for_terminal(decoder.decode(tokenizer.decode([token]))), end="", flush=True)
    print(decoder.decode(b"", final=True))

def read_lines():
    """Each line that the user types after the sign >"""
    print("> ", end="", flush=True)
    for line in sys.stdin:
        if line.strip():
            yield line.rstrip("\n")
        print("> ", end="", flush=True)
    print()

def plain_main(argv=None):
    """The command line without the folder nanoeuler_parts"""
    parser = argparse.ArgumentParser(
        description="Train a GPT from scratch, and talk to it.  Without the folder "
        "nanoeuler_parts, this program computes one sequence after another, and does not resume.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("train", help="learn a text, and write a model")
    verb.add_argument("preset", nargs="?", default="small", choices=PRESETS)
    verb.add_argument("--data", default="data/shakespeare.txt", help="a text file in UTF-8")
    verb.add_argument("--out", default="nanoeuler.bin", help="the file to write")
    verb.add_argument("--steps", type=int, default=1000, help="number of steps, 16 sequences each")
    for name, what in ("generate", "print one reply"), ("chat", "reply to each line"):
        verb = verbs.add_parser(name, help=what)
        if name == "generate":
            verb.add_argument("prompt")
        verb.add_argument("file", nargs="?", default="nanoeuler.bin", help="the model's file")
        verb.add_argument("--tokens", type=int, default=200, help="largest number in a reply")
        verb.add_argument("--temperature", type=float, default=0.8,
                          help="0: always the most probable token")
    replace_bad_characters()
    options = parser.parse_args(argv)
    try:
        if options.verb == "train":
            with reading(options.data, "name a text file with --data"):
                text = bpe.read_bytes(options.data)
            need(options.steps > 0, f"--steps: expected 1 or more, found {options.steps}")
            need(not os.path.exists(options.out), f"{options.out} exists; name another file with "
                 f"--out, or remove it")
            with open(f"{options.out}.tmp", "wb"):       # can it be written?  The first save
                os.remove(f"{options.out}.tmp")          # comes much later
            train(PlainRun(PRESETS[options.preset], text, options.out, options.steps))
            print(f"Talk to it with: python nanoeuler.py chat {printable(options.out)}")
            return 0
        need(0 <= options.temperature < math.inf, f"--temperature: expected 0 or more, found "
             f"{options.temperature}")
        need(options.tokens >= 0, f"--tokens: expected 0 or more, found {options.tokens}")
        model, choice = read_model(options.file), Choice(options.temperature)
        if options.verb == "generate":
            write_reply(options.prompt, model, choice, options.tokens)
            return 0
        for prompt in read_lines():
            try:
                write_reply(prompt, model, choice, options.tokens)
            except UserError as e:           # a long line, for example: the next one may be shorter
                print(f"nanoeuler: {printable(str(e))}", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    except (UserError, OSError, MemoryError) as e:
        print(f"nanoeuler: {printable(str(e)) or 'not enough memory'}", file=sys.stderr)
        return 2
    return 0

# ======== Part II: why it is fast ========
# Part I computes one sequence after the other, on one thread, and reads each weight from memory for
# every token.  This part computes the same sums in another order: rows of tokens together in tiles
# that stay in registers, blocks of attention that stay in the cache, sequences and their parts on
# all threads.  `Model` is the result, and takes the place of `PlainModel`.  A batch of texts is
# decoded together by `Decoder`, which takes the place of `PlainDecoder`.
#
# More names: `scratch` is working memory of a thread.  wt is W^T, for the forward pass y = x W^T,
# and w is W, for the backward pass dx = dy W, both as packed panels (12).  P, S and dS are the
# matrices of the papers about attention.
#
# Each number is written by one thread, in one order.  So a result depends neither on the number of
# threads nor on which thread takes which task.

# What Parts II and III import.  Without the folder nanoeuler_parts, Part II is defined but never
# called.
import importlib
import runpy
from collections import deque
from functools import partial
from typing import Protocol

from numba import get_num_threads

if nanoeuler_parts:
    from nanoeuler_parts.files.printing import counted
    from nanoeuler_parts.machine.counters import counters, fetch_add, next_below, seen, wait_until
    from nanoeuler_parts.machine.cpu import (
        DTYPE, DY_COLUMNS, HAS_BF16, MR, QUADS, ROWS, tile_width,
    )
    from nanoeuler_parts.machine.kernels import Compiled, fill_cache
    from nanoeuler_parts.machine.numbers import (
        from_bf16, narrowed, narrowed_transpose, pack, panel_entry, panel_rows, quantized, to_bf16,
    )
    from nanoeuler_parts.machine.threads import most_memory
    from nanoeuler_parts.machine.tile import rows_tile, tile
else:
    MR, DTYPE, HAS_BF16, QUADS = 8, "f32", False, False
    Compiled = namedtuple("Compiled", "kernel argument dtype")

# ==== 12 Memory ====
# This replaces the arrays of section 2.  There one sequence is in memory, in the dtype of the
# parameters.  The arrays of `Model` hold a batch of sequences, and may store numbers in bfloat16.
# There are two more copies of each matrix, W and W^T, in packed panels.  A step then needs more
# memory, but reads less of it, and in order: bfloat16 halves what a product reads, and a panel lies
# in memory as it is read.
#
# ---- panels
# A product in tiles (13) reads `width` neighbouring numbers of row 0 of b, then of row 1, and so
# on.  In a wide matrix these rows lie far apart.  So `pack` copies the columns into panels, each of
# `width` columns and without gaps.  Example with width = 2; the last panel is filled with zeros:
#
#     b   0  1  2  3  4       panel 0    0  1     panel 1    2  3     panel 2    4  0
#         5  6  7  8  9                  5  6                7  8                9  0
#     in memory: 0 1 5 6, 2 3 7 8, 4 0 9 0

# ---- sizes
BR = 32              # query rows that attention processes at once: their scores stay in L1
KC = 64              # rows of a batch that a weight gradient sums in registers
NB = 128             # rows of dW in one task of a weight gradient: they fit into L2
COLUMNS = 16         # threads share columns in multiples of 16: a cache line of float32
PACK_PARTS = 8       # number of tasks into which the packing of a matrix is divided

# ---- groups of tensors
def fields_where(chosen):
    """The slice of Params' fields whose Tensors `chosen` selects; they must be adjacent."""
    at = [i for i, x in enumerate(TABLE) if chosen(x)]
    assert at == [*range(at[0], at[-1] + 1)], "the tensors are not adjacent in `param_table`"
    return slice(at[0], at[-1] + 1)

MATRICES = fields_where(lambda x: x.role == "matrix")
VECTORS = fields_where(lambda x: x.role != "matrix")     # gains of the norms, and biases
OF_LAYERS = fields_where(lambda x: x.role == "matrix" and x.axis == "layer")

# In a run with Muon (16), the matrices of the layers are its own, and AdamW has the other tensors
def optimizer_of(name):
    """muon, adamw, or adamw_embedding, of the tensor with this name"""
    if name in Params._fields[OF_LAYERS]:
        return "muon"
    return "adamw_embedding" if name == "wte" else "adamw"

def entries_where(cfg, chosen):
    """The slice of the flat buffer with the Tensors that `chosen` selects; they must be adjacent.
    """
    tensors = [x for x in param_table(cfg) if chosen(x)]
    assert all(x.end == y.start for x, y in itertools.pairwise(tensors)), "not adjacent"
    return slice(tensors[0].start, tensors[-1].end)

def entries_of(cfg, optimizer):
    """The slice of the flat buffer that this optimizer updates in a run with Muon"""
    return entries_where(cfg, lambda x: optimizer_of(x.name) == optimizer)

# ---- bfloat16
# The inputs of products may be stored as bfloat16, the upper half of a float32, in a uint16.  This
# halves their memory.  Products are up to twice as fast if the CPU supports bfloat16 products.
# Kernels are written once for all types.  In float32 and float64, the following functions change no
# number:
#
#     name                         float32, float64    bfloat16
#     value(x)                     x                   the number that a stored x stands for
#     rounded(x, a)                x                   x as the array a holds it
#     narrowed(x, b)               x                   a copy of x, rounded for a product with b
#     narrowed_transpose(x, b)     x.T                 a copy of x.T, rounded for a product with b
#     panel_rows(K, dtype)         K                   K / 2: packed panels hold pairs of rows
#
# Of b only the dtype is read.  An x that is already rounded is returned as it is.
# `tiled_matmul` (13) calls `narrowed` for its left operand.  So the forward and backward pass (15)
# do not mention precision: the dtypes of their arrays decide it.
#
# Example: 1 + 2^-8 lies between the bfloat16 numbers 1 and 1 + 2^-7.  It is rounded to the even
# one, 1.  If x = 1 + 2^-8 is multiplied by b = 1 in bfloat16, the product is therefore 1.
#
# A run in bfloat16 stores the activations that enter matrix products in bfloat16, and also copies
# of the matrices.  Gradients that enter products (of logits, x, qkv, P, S) stay float32, and
# `tiled_matmul` rounds them when it reads them.  Parameters, moments, the residual stream, sums and
# losses also stay float32.
BF16 = np.dtype(np.uint16)
PRECISIONS = {"f32": np.dtype(np.float32), "bf16": BF16}
if not nanoeuler_parts:
    del PRECISIONS["bf16"]

# Numba compiles a kernel once for each combination of argument types.  Three idioms keep the types
# as they should be:
#     cos.dtype.type(1)      1 in the dtype of cos; a literal 1.0 would make a float32 sum float64
#     np.int64(0)            the same type as a variable, so that no second version is compiled
#     an empty array         passes a dtype, which cannot be an argument of its own (`operand`, 16)

# ---- arrays of a training step
# Named tuples of arrays:
#     Acts           activations, as in section 2, here with a first axis of length B
#     LayerRows      some rows of one layer's activations (15)
#     KeptGrads      the gradients that are still needed when all sequences are done
#     Scratch        working memory of a thread
#     Panels         the matrices, packed for products
#     MuonScratch    working memory of a thread in Muon (16)
LayerRows = namedtuple("LayerRows", "x x1 x2 attn_in attn_rstd qk qk_rstd qkv att mlp_in mlp_rstd "
                                    "gate_up swiglu")
KeptGrads = namedtuple("KeptGrads", "x qkv attn_norm mlp_norm final_norm qkv_bias q_norm k_norm")
Scratch = namedtuple("Scratch", "dnorm datt dswiglu scores dscores kt vt dy_panels x_panels")
Panels = namedtuple("Panels", [*Params._fields[OF_LAYERS], "lm_head"])
MuonScratch = namedtuple("MuonScratch", "y other gram square operand")

# NARROW names the arrays that a run in bfloat16 stores as bfloat16.  PAIRED names the packed
# panels, whose entries, in int32, are pairs of bfloat16 numbers.
NARROW = {Acts: {"attn_in", "qk", "qkv", "att", "mlp_in", "gate_up", "swiglu", "final_in"},
          Scratch: {"datt"}, MuonScratch: {"operand"}}
PAIRED = {Panels: set(Panels._fields), Scratch: {"kt", "vt", "dy_panels", "x_panels"}}

def of_batch(B, shapes):
    """The shapes of arrays for B sequences: each gets a first axis of length B."""
    return type(shapes)(*((B, *shape) for shape in shapes))

def kept_grad_shapes(cfg, B, T):
    """Shapes of the gradients that outlive one sequence's backward pass: x (the adjoint trajectory,
    as in `ActGrads`) and qkv, which `matrix_gradients` reads, and those of gains and biases, which
    `Model.run` adds up."""
    a = of_batch(B, act_shapes(cfg, T))
    of_vectors = {x.name: (B, *x.shape) for x in param_table(cfg) if not x.decays}
    return KeptGrads(x=a.x, qkv=a.qkv, **of_vectors)     # of gains and biases, per sequence

def scratch_shapes(cfg, n, T, dtype):
    """Shapes of the scratch memory of n threads, for one sequence each.  dnorm, datt and dswiglu
    belong to the sequence: threads that share it use the arrays of the thread that began it."""
    size, width = dims_of(cfg), tile_width(dtype)
    panels, rows_of_D = -(-T // width), panel_rows(size.D, dtype)
    rows_of_KC = panel_rows(KC, dtype)
    longest = max(size.C, size.F, size.HD)   # row length of the widest matrix
    return Scratch(dnorm=(n, T, size.C),     # gradient of an RMSNorm's output
                   datt=(n, T, size.HD),     # gradient of attention's output
                   dswiglu=(n, T, size.F),   # gradient of SwiGLU's output
                   scores=(n, BR, T),        # S, then P, of a block of query rows
                   dscores=(n, BR, T),       # dP, then dS
                   kt=(n, panels, rows_of_D, width),         # K^T and V^T of a head, packed
                   vt=(n, panels, rows_of_D, width),
                   # operands of a weight gradient, packed
                   dy_panels=(n, 1, rows_of_KC, DY_COLUMNS),
                   x_panels=(n, -(-longest // width), rows_of_KC, width))

def panel_shapes(cfg, dtype, transposed):
    """Shapes of packed weights (12): W (N, K) is ceil(K / width) panels (N, width).
    W^T, if transposed, is ceil(N / width) panels (K, width)."""
    width, shapes = tile_width(dtype), {}
    untied = replace(cfg, tie_embeddings=False)      # a tied head has its own panels, too
    for x in param_table(untied):
        if x.name in Panels._fields:
            L, N, K = x.shape
            rows, columns = (K, N) if transposed else (N, K)
            shapes[x.name] = L, -(-columns // width), panel_rows(rows, dtype), width
    return Panels(**shapes)

def room_behind(x):
    """Bytes from the end of x to the end of the array that owns its memory; `tile` may read them"""
    whole = x
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    return np.lib.array_utils.byte_bounds(whole)[1] - np.lib.array_utils.byte_bounds(x)[1]

def parts_of(memory, shapes):
    """Arrays of these shapes, each a view of the beginning of an array of `memory`.
    `shapes` and `memory` are named tuples with the same fields."""
    return type(shapes)(*(x.reshape(-1)[:math.prod(shape)].reshape(shape)
                          for x, shape in zip(memory, shapes)))

# ==== 13 Tiled products ====
# This replaces the matrix products of section 4.1, and is two to four times as fast on one core
# (bench/NOTES.md).  `matmul` reads the whole matrix again for each row of x.  Here a tile of MR
# rows and two vectors of columns is summed in registers, so each number that is read serves many
# multiplications.
#
# Each product consists of calls of one function:
#
#     def tile(out, base, x, b, m, j, add):
#         rows, columns = slice(m, m + MR), slice(j, j + width)
#         out[rows, columns] = x[rows] @ b[:, columns] + add * base[rows, columns]
#
# A tile has MR rows.  A row has `width` numbers, which fill two vectors, or TILE_BYTES bytes.
# The MR x width sums stay in registers, two vectors per row, while k runs through x and b.  Each k
# takes 2 MR multiply-adds, 2 loads and MR broadcasts.
#
# Example: with AVX2, a vector holds 8 float32, width = 16, and MR = 6.  For each k a tile reads 16
# numbers of b and 6 of x, and does 6 * 16 = 96 multiplications: 4 for each number that it reads.
# `matmul` reads two numbers for each multiplication.
#
# Numba's own loops reach 35% of a core's peak here, vectors written as LLVM reach 95%.
# nanoeuler_parts/machine/tile.py builds `tile` in LLVM.
@jit
def tiled_matmul(out, x, b):
    """out = x b     out (M, N), x (M, K) of any strides, b (K, N) or packed; float32 or float64
    x, b and out may also be bfloat16, in the layouts that `tile` accepts.  If b is bfloat16 and x
    is float32, x is rounded to bfloat16."""
    M, N = out.shape
    width = TILE_BYTES // max(4, out.itemsize)
    for i in range(0, M, ROWS):
        rows, left = out[i:i + ROWS], narrowed(x[i:i + ROWS], b)
        for j in range(0, N, width):         # a panel of b stays in L1 while ROWS rows use it
            for m in range(0, len(rows), MR):
                tile(rows, rows, left, b, m, j, 0)

@jit
def tiled_matmul_add(out, base, x, b):
    """out = base + x b     shapes as in `tiled_matmul`, base (M, N)
    It is an Euler step if base is the residual stream, and an accumulation if base is out.  out is
    float32 or float64, because a tile cannot add to bfloat16."""
    M, N = out.shape
    width = TILE_BYTES // out.itemsize
    for i in range(0, M, ROWS):
        rows, added, left = out[i:i + ROWS], base[i:i + ROWS], narrowed(x[i:i + ROWS], b)
        for j in range(0, N, width):
            for m in range(0, len(rows), MR):
                tile(rows, added, left, b, m, j, 1)

@jit
def add_transposed_product(out, x, b):
    """out += x^T b     out (M, N), x (K, M), b (K, N)"""
    tiled_matmul_add(out, out, narrowed_transpose(x, b), b)

@jit
def symmetric_product(out, x, b):
    """out = x b, if that is symmetric, like Y^T Y     out (N, N), x (N, K) of any strides, b (K, N)
    Entries below the diagonal are copied from above it, which saves almost half of the tiles."""
    N, left = len(out), narrowed(x, b)
    width = TILE_BYTES // out.itemsize
    for j in range(0, N, width):
        for m in range(0, min(N, j + width), MR):
            tile(out, out, left, b, m, j, 0)
    for m in range(N):
        row = out[m]
        for j in range(m):
            row[j] = out[j, m]

@jit
def weight_gradient(dw, dy, x, n0, dy_panels, x_panels):
    """dw += sum_b dy[b, :, n0:n1]^T x[b]     dw (n1 - n0, K), dy (B, T, N), x (B, T, K)
    For y = x W^T, these are rows n0 to n1 = n0 + len(dw) of dW, summed in the order of the batch.
    scratch: dy_panels (1, KC, DY_COLUMNS), x_panels (ceil(K / width), KC, width).  In bfloat16 a
    panel row holds a pair of rows, so panels have KC / 2 rows.
    The entries of a column of dy lie on different pages of memory.  Reading a page for one number
    is slow, so DY_COLUMNS neighbouring columns are packed at once."""
    B, T, K = x.shape
    width = TILE_BYTES // dw.itemsize
    for b in range(B):
        for t in range(0, T, KC):
            t_end = min(T, t + KC)
            rows_packed = panel_rows(t_end - t, x_panels.dtype)
            right = x_panels[:(K + width - 1) // width, :rows_packed]
            pack(right, x[b, t:t_end])
            for n in range(0, len(dw), DY_COLUMNS):
                n_end = min(n + DY_COLUMNS, len(dw))
                pack(dy_panels[:, :rows_packed], dy[b, t:t_end, n0 + n:n0 + n_end])
                for m in range(n, n_end, MR):
                    rows = dw[m:m + MR]
                    left = dy_panels[0, :rows_packed, m - n:m - n + MR].T
                    for j in range(0, K, width):
                        tile(rows, rows, left, right, 0, j, 1)

# ==== 14 Blocked attention ====
# This replaces the attention of section 4.5.  There each row reads the keys and values again.  Here
# a block of BR query rows shares them, and its scores are products in tiles, which is several times
# as fast.
#
# A block of BR query rows attends to all keys up to the block's end.  So there is no T x T matrix,
# and little work above the diagonal.  Loops over a row run to the block's end, not to the diagonal,
# because they then work on whole vectors.  K^T and V^T are packed once per key/value head.  Q, K
# and V are read in place.
#
# Example: BR = 32, T = 80.  The blocks are rows 0 to 31, 32 to 63 and 64 to 79.  The second one
# computes 32 x 64 scores.  Row 32 may use the first 33 of its 64 scores, and the other 31 are set
# to zero.  With window = 20, row 32 reads no key before 32 - 19 = 13.  The keys are packed in
# panels, of 16 keys if width = 16, so the block begins with key 0, the first key of that panel.
@jit
def first_key(t0, window, width):
    """The first key that a block of rows from t0 on reads: the oldest one that row t0 attends to,
    t0 - window + 1, rounded down to the beginning of a panel of K^T, a multiple of width."""
    return max(0, t0 + 1 - window) // width * width

@jit
def blocked_attention_forward(o, lse, qkv, c, h0, h1, scratch):
    """o = softmax(Q K^T / sqrt(D)) V, causal, grouped queries      Vaswani 2017; Ainslie 2023
    Token t attends to the tokens t - window + 1 to t.
    For heads h0 to h1.  out: o (T, HD), lse (H, T) log-sum-exp for backward     in: qkv (T, QKV),
    c Constants     scratch: scores (BR, T), kt for packed K^T"""
    scores, kt, H, G, D, window = scratch.scores, scratch.kt, c.H, c.G, c.D, c.window
    T, width, scale = len(o), kt.shape[2], scores.dtype.type(1 / math.sqrt(D))
    for h in range(h0, h1):
        q, k, v = columns_of_head(h, H, G, D)
        if h == h0 or h * G % H == 0:        # the first query head of this key/value head
            pack(kt, qkv[:, k:k + D].T)
        for t0 in range(0, T, BR):
            t1 = min(T, t0 + BR)
            k0 = first_key(t0, window, width)
            n = t1 - k0                      # the block attends to keys k0 to t1
            P = scores[:t1 - t0, :n]         # holds S = Q K^T first, then P
            panels = kt[k0 // width:(t1 + width - 1) // width]
            tiled_matmul(P, qkv[t0:t1, q:q + D], panels)
            for t in range(t0, t1):          # the row maxima, kept in lse for now
                row, own = scores[t - t0, :n], t - k0
                for j in range(own + 1 - window):
                    row[j] = row[own]        # keys before the window must not change the maximum,
                for j in range(own + 1, n):
                    row[j] = row[own]        # nor future keys
                lse[h, t] = row_max(row)
            for t in range(t0, t1):          # separate loop: no waiting for each maximum
                row, m = scores[t - t0, :n], lse[h, t]
                for j in range(n):
                    row[j] = exp((row[j] - m) * scale)
            for t in range(t0, t1):
                row, own, total = scores[t - t0, :n], t - k0, scores.dtype.type(0)
                for j in range(own + 1 - window):
                    row[j] = 0               # keys before the window get weight 0,
                for j in range(own + 1, n):
                    row[j] = 0               # and so do future keys
                for j in range(n):
                    total += row[j]
                lse[h, t] = lse[h, t] * scale + scores.dtype.type(math.log(total))
                norm = scores.dtype.type(1) / total
                for j in range(n):
                    row[j] *= norm
            tiled_matmul(o[t0:t1, q:q + D], P, qkv[k0:t1, v:v + D])

@jit
def blocked_attention_backward(dqkv, do, o, lse, qkv, c, g0, g1, scratch):
    """P = exp(Q K^T / sqrt(D) - lse),   dP = dO V^T,   dS = P * (dP - rowsum(dO * O)) / sqrt(D)
    dQ = dS K,   dK = sum_h dS^T Q,   dV = sum_h P^T dO      Dao 2022, B.4; P is recomputed
    For key/value heads g0 to g1 and the query heads h that share them.
    out: dqkv (T, QKV)     in: do, o (T, HD), lse (H, T), qkv (T, QKV), c Constants
    scratch: scores, dscores (BR, T), kt, vt for packed K^T, V^T"""
    scores, dscores, kt, vt = scratch.scores, scratch.dscores, scratch.kt, scratch.vt
    H, G, D, window, T, width = c.H, c.G, c.D, c.window, len(o), kt.shape[2]
    scale = scores.dtype.type(1 / math.sqrt(D))
    for g in range(g0, g1):
        _, k, v = columns_of_head(g * H // G, H, G, D)
        pack(kt, qkv[:, k:k + D].T)
        pack(vt, qkv[:, v:v + D].T)
        dqkv[:, k:k + D] = 0                 # dK and dV accumulate over query heads and blocks
        dqkv[:, v:v + D] = 0
        for h in range(g * H // G, (g + 1) * H // G):
            q = h * D
            for t0 in range(0, T, BR):
                t1 = min(T, t0 + BR)
                k0 = first_key(t0, window, width)
                n = t1 - k0
                P, dS = scores[:t1 - t0, :n], dscores[:t1 - t0, :n]          # at first S and dP
                p0, p1 = k0 // width, (t1 + width - 1) // width
                tiled_matmul(P, qkv[t0:t1, q:q + D], kt[p0:p1])
                tiled_matmul(dS, do[t0:t1, q:q + D], vt[p0:p1])
                for t in range(t0, t1):
                    P_row, dS_row, dot = scores[t - t0], dscores[t - t0], scores.dtype.type(0)
                    do_row, o_row, lse_row = do[t, q:q + D], o[t, q:q + D], lse[h, t]
                    for i in range(D):
                        dot += value(do_row[i]) * value(o_row[i])
                    for j in range(n):
                        P_row[j] = exp(P_row[j] * scale - lse_row)
                        dS_row[j] = P_row[j] * (dS_row[j] - dot) * scale
                    for j in range(t - k0 + 1 - window):
                        P_row[j] = 0
                        dS_row[j] = 0
                    for j in range(t - k0 + 1, n):
                        P_row[j] = 0
                        dS_row[j] = 0
                dk, dv = dqkv[k0:t1, k:k + D], dqkv[k0:t1, v:v + D]
                tiled_matmul(dqkv[t0:t1, q:q + D], dS, qkv[k0:t1, k:k + D])
                add_transposed_product(dk, dS, qkv[t0:t1, q:q + D])
                add_transposed_product(dv, P, do[t0:t1, q:q + D])

# ==== 15 Threads ====
# This replaces `forward`, `loss` and `backward` of section 5, and `PlainModel` of section 9.  Each
# core computes other sequences of a batch, so that two cores are nearly twice as fast as one.  The
# gradients of the matrices, which belong to all sequences, are summed at the end.
#
# ---- how threads share a sequence
# If a batch has fewer sequences than threads, several threads share a sequence.  Each of them runs
# through `team_forward` and `team_backward`, which consist of loops like this one:
#
#     for t0, t1 in shared(team, T, MR):
#         tiled_matmul(y[t0:t1], x[t0:t1], w)
#
# The T rows are cut into parts.  A free thread takes the next part, and no thread leaves the loop
# before all parts are done.  If a single thread works on the sequence, each loop is one part, with
# all rows.  Products and norms are shared by rows, attention by heads, and sums over rows by
# columns.  Each number is computed by one thread, in the order of a single-threaded run.  A thread
# waits only for parts that other threads have begun, so any number of threads may join, at any
# time.
#
# Example: two threads share a sequence, and each loop has two parts.  The numbers of the parts
# continue from loop to loop, so loop 0 has parts 0 and 1, loop 1 has parts 2 and 3.
#     thread 0    takes part 0
#     thread 1    joins, takes part 1, is faster, and waits until part 0 is done
#     both        enter loop 1
# If thread 1 joins later, when thread 0 has done parts 0 and 1, it finds both taken and done, and
# passes through loop 0.
#
# Threads count the parts that are taken and done in arrays of integers:
#     fetch_add(counter, i)            counter[i]++; returns the old value
#     next_below(counter, i, end)      counter[i]++ if it is below end; returns the old value
#     seen(counter, i)                 returns counter[i]; all that other threads wrote before
#                                      they counted is then visible
#     wait_until(counter, i, least)    waits until counter[i] >= least

# A Team is one thread's view of the sequence b that it works on:
#     n_parts     the number of parts into which a loop is cut; a short loop has fewer
#     progress    counters that all threads of the sequence have in common:
#                     TAKEN, DONE    the number of parts that are taken, and done
#                     BEGUN          1 from the beginning of the sequence on
#                     LEADER         the thread that has begun it
#                     OVER           the number of threads that have finished it
#     passed      passed[0] is the number of parts in all loops that this thread has entered
Team = namedtuple("Team", "b n_parts progress passed")
TAKEN, DONE, BEGUN, LEADER, OVER = range(5)  # indices into `progress`

@bpe.jit(**{**OPTIONS, "cache": False})         # Numba does not find a cached generator again
def each(team, n):
    """Yields the parts that this thread takes, of parts 0 to n - 1, and then waits until all parts
    are done.  The loop must not end early, by break or return: other threads would wait forever
    for the part that it has taken."""
    before = team.passed[0]                  # number of this loop's first part
    end = before + n                         # number of the next loop's first part
    team.passed[0] = end
    part = next_below(team.progress, TAKEN, end)
    while part < end:
        yield part - before
        fetch_add(team.progress, DONE)
        part = next_below(team.progress, TAKEN, end)
    wait_until(team.progress, DONE, end)

@bpe.jit(**{**OPTIONS, "cache": False})
def shared(team, n, unit):
    """Like `each`, but cuts n items into parts, and yields those of this thread as ranges (i0, i1).
    Their lengths are multiples of unit, except for the last part."""
    units = (n + unit - 1) // unit
    size = (units + team.n_parts - 1) // team.n_parts * unit
    for part in each(team, (n + size - 1) // size):
        yield part * size, min(n, (part + 1) * size)

# ---- sums over the rows of a sequence, shared by columns
@jit
def gain_gradient(dgain, dy, x, rstd, c0):
    """dgain = sum_t dy*u, u = x * rstd, for columns c0 to c0 + len(dgain)
    dy, x (T, C), rstd (T,)"""
    dgain[:] = 0
    for t in range(len(rstd)):
        r, dy_row, row = rstd[t], dy[t, c0:c0 + len(dgain)], x[t, c0:c0 + len(dgain)]
        for c in range(dgain.size):
            dgain[c] += dy_row[c] * row[c] * r

@jit
def bias_gradient(dbias, dqkv, c0):
    """dbias = sum_t dqkv, for columns c0 to c0 + len(dbias)     dqkv (T, QKV)"""
    dbias[:] = 0
    for t in range(len(dqkv)):
        row = dqkv[t, c0:c0 + len(dbias)]
        for c in range(dbias.size):
            dbias[c] += row[c]

@jit
def head_gain_gradient(dgain, dqkv, qk, rstd, h0, h1, D, i0):
    """dgain = sum_t sum_h dy*u, u = x * rstd, for heads h0 to h1 and the entries i0 to
    i0 + len(dgain) of each head     dqkv (T, QKV) holds dy, qk (T, (H + G) D) holds x"""
    dgain[:] = 0
    for t in range(len(dqkv)):
        for h in range(h0, h1):
            r, start = rstd[t, h], h * D + i0
            dy, x = dqkv[t, start:start + len(dgain)], qk[t, start:start + len(dgain)]
            for i in range(dgain.size):
                dgain[i] += dy[i] * value(x[i]) * r

@jit
def embedding_gradient(dwte, dx, tokens, c0, c1):
    """dwte[tokens[b, t]] += dx[b, t], for columns c0 to c1
    dwte (V, C), dx (B, T, C), tokens (B, T) int32.  Threads share columns, not rows: two positions
    may hold the same token and so add to the same row of dwte."""
    for b in range(tokens.shape[0]):
        for t in range(tokens.shape[1]):
            row, entry = dx[b, t, c0:c1], dwte[tokens[b, t], c0:c1]
            for c in range(row.size):
                entry[c] += row[c]

# ---- forward, loss, backward
@jit
def layer_rows(a, b, l, t0, t1):
    """Rows t0 to t1 of the activations of layer l in sequence b.  x, x1 and x2 are the residual
    stream before the layer, after its attention and after its SwiGLU."""
    return LayerRows(x=a.x[b, 2 * l, t0:t1], x1=a.x[b, 2 * l + 1, t0:t1],
                     x2=a.x[b, 2 * l + 2, t0:t1], attn_in=a.attn_in[b, l, t0:t1],
                     attn_rstd=a.attn_rstd[b, l, t0:t1], qk=a.qk[b, l, t0:t1],
                     qk_rstd=a.qk_rstd[b, l, t0:t1], qkv=a.qkv[b, l, t0:t1],
                     att=a.att[b, l, t0:t1], mlp_in=a.mlp_in[b, l, t0:t1],
                     mlp_rstd=a.mlp_rstd[b, l, t0:t1], gate_up=a.gate_up[b, l, t0:t1],
                     swiglu=a.swiglu[b, l, t0:t1])

# A micro-batch: tokens (B, T), targets (P, B, T), weight (B, P, T), and nll (B, n_outputs, T),
# which receives the losses; both float64.  n_outputs: heads 0 to n_outputs - 1 are computed.
# until: LOGITS, LOSS or GRADIENT, the last thing that is computed.
Batch = namedtuple("Batch", "tokens targets weight nll n_outputs until")
LOGITS, LOSS, GRADIENT = range(3)
# The network: Params, packed panels of each W and of each W^T, Constants
Net = namedtuple("Net", "p w wt constants")

@jit
def team_forward(team, batch, net, a, scratch):
    """Runs sequence b through the network: writes the trajectory a.x[b, 0..2L], and the logits.
    Each layer is two Euler steps: x += attention(rmsnorm(x)), then x += swiglu(rmsnorm(x))."""
    b, T, p, wt, c = team.b, batch.tokens.shape[1], net.p, net.wt, net.constants
    L, H, G, D, eps, cos, sin = c.L, c.H, c.G, c.D, c.eps, c.cos, c.sin
    for t0, t1 in shared(team, T, MR):
        embedding_forward(a.x[b, 0, t0:t1], batch.tokens[b, t0:t1], p.wte)
    for l in range(L):
        for t0, t1 in shared(team, T, MR):
            r = layer_rows(a, b, l, t0, t1)
            rmsnorm_forward(r.attn_in, r.attn_rstd, r.x, p.attn_norm[l], eps)
            tiled_matmul(r.qkv, r.attn_in, wt.qkv[l])
            if p.qkv_bias.size:              # biases and norms: 4.8
                add_bias(r.qkv, p.qkv_bias[l])
            if p.q_norm.size:
                r.qk[:] = r.qkv[:, :(H + G) * D]
                head_norm_forward(r.qkv, r.qk_rstd, p.q_norm[l], p.k_norm[l], H, eps)
            rope(r.qkv, cos[t0:t1], sin[t0:t1], H + G, cos.dtype.type(1))
        for h0, h1 in shared(team, H, 1):
            blocked_attention_forward(a.att[b, l], a.lse[b, l], a.qkv[b, l], c, h0, h1, scratch)
        for t0, t1 in shared(team, T, MR):
            r = layer_rows(a, b, l, t0, t1)
            tiled_matmul_add(r.x1, r.x, r.att, wt.attn_proj[l])
            rmsnorm_forward(r.mlp_in, r.mlp_rstd, r.x1, p.mlp_norm[l], eps)
            tiled_matmul(r.gate_up, r.mlp_in, wt.gate_up[l])
            swiglu_forward(r.swiglu, r.gate_up)
            tiled_matmul_add(r.x2, r.x1, r.swiglu, wt.down[l])
    for t0, t1 in shared(team, T, MR):
        x, final_in = a.x[b, 2 * L, t0:t1], a.final_in[b, t0:t1]
        rmsnorm_forward(final_in, a.final_rstd[b, t0:t1], x, p.final_norm, eps)
        for k in range(batch.n_outputs):
            tiled_matmul(a.logits[b, k, t0:t1], final_in, wt.lm_head[k])

@jit
def team_loss(team, batch, a):
    """Writes nll[b] of sequence b, and replaces a.logits[b] by the gradients of the logits.
    Validation needs no gradients and runs this function too, so that it sums a loss in the same
    order as training."""
    b, T, nll = team.b, batch.tokens.shape[1], batch.nll
    for t0, t1 in shared(team, T, MR):
        for k in range(batch.n_outputs):
            cross_entropy(nll[b, k, t0:t1], a.logits[b, k, t0:t1], batch.targets[k, b, t0:t1],
                          batch.weight[b, k, t0:t1])

@jit
def team_backward(team, batch, net, a, d, scratch):
    """Runs sequence b back through the network: writes the adjoint trajectory d.x[b, 2L..0].
    As in `backward`, a.logits already hold their gradients, and a.gate_up are replaced by theirs
    here.  dnorm is the gradient of the current norm's output.  The weight gradients are computed
    afterwards, from a and d."""
    b, T, p, w, c = team.b, batch.tokens.shape[1], net.p, net.w, net.constants
    L, C, H, G, D, cos, sin = c.L, c.C, c.H, c.G, c.D, c.cos, c.sin
    dnorm, datt, dswiglu = scratch.dnorm, scratch.datt, scratch.dswiglu
    for t0, t1 in shared(team, T, MR):
        dx, dy = d.x[b, 2 * L, t0:t1], dnorm[t0:t1]
        dx[:] = 0                            # the residual path ends here
        dy[:] = 0
        for k in range(batch.n_outputs):
            tiled_matmul_add(dy, dy, a.logits[b, k, t0:t1], w.lm_head[k])
        rmsnorm_backward(dx, dx, dy, a.x[b, 2 * L, t0:t1], p.final_norm, a.final_rstd[b, t0:t1])
    for c0, c1 in shared(team, C, COLUMNS):
        gain_gradient(d.final_norm[b, c0:c1], dnorm, a.x[b, 2 * L], a.final_rstd[b], c0)
    for l in range(L - 1, -1, -1):
        for t0, t1 in shared(team, T, MR):
            r = layer_rows(a, b, l, t0, t1)
            dx1, dx2 = d.x[b, 2 * l + 1, t0:t1], d.x[b, 2 * l + 2, t0:t1]
            dgate_up = r.gate_up             # `swiglu_backward` writes it in place of gate_up
            tiled_matmul(dswiglu[t0:t1], dx2, w.down[l])
            swiglu_backward(dgate_up, dswiglu[t0:t1])
            tiled_matmul(dnorm[t0:t1], dgate_up, w.gate_up[l])
            rmsnorm_backward(dx1, dx2, dnorm[t0:t1], r.x1, p.mlp_norm[l], r.mlp_rstd)
            tiled_matmul(datt[t0:t1], dx1, w.attn_proj[l])
        for c0, c1 in shared(team, C, COLUMNS):
            gain_gradient(d.mlp_norm[b, l, c0:c1], dnorm, a.x[b, 2 * l + 1], a.mlp_rstd[b, l], c0)
        for g0, g1 in shared(team, G, 1):
            blocked_attention_backward(d.qkv[b, l], datt, a.att[b, l], a.lse[b, l], a.qkv[b, l], c,
                                       g0, g1, scratch)
        for t0, t1 in shared(team, T, MR):
            rope(d.qkv[b, l, t0:t1], cos[t0:t1], sin[t0:t1], H + G, cos.dtype.type(-1))
        if p.q_norm.size:                    # norms and biases: 4.8
            qk, rstd = a.qk[b, l], a.qk_rstd[b, l]
            for i0, i1 in shared(team, D, COLUMNS):
                head_gain_gradient(d.q_norm[b, l, i0:i1], d.qkv[b, l], qk, rstd, 0, H, D, i0)
                head_gain_gradient(d.k_norm[b, l, i0:i1], d.qkv[b, l], qk, rstd, H, H + G, D, i0)
            for t0, t1 in shared(team, T, MR):
                head_norm_backward(d.qkv[b, l, t0:t1], qk[t0:t1], rstd[t0:t1], p.q_norm[l],
                                   p.k_norm[l], H)
        if p.qkv_bias.size:
            for c0, c1 in shared(team, p.qkv_bias.shape[1], COLUMNS):
                bias_gradient(d.qkv_bias[b, l, c0:c1], d.qkv[b, l], c0)
        for t0, t1 in shared(team, T, MR):
            r = layer_rows(a, b, l, t0, t1)
            dx, dx1, dqkv = d.x[b, 2 * l, t0:t1], d.x[b, 2 * l + 1, t0:t1], d.qkv[b, l, t0:t1]
            tiled_matmul(dnorm[t0:t1], dqkv, w.qkv[l])
            rmsnorm_backward(dx, dx1, dnorm[t0:t1], r.x, p.attn_norm[l], r.attn_rstd)
        for c0, c1 in shared(team, C, COLUMNS):
            gain_gradient(d.attn_norm[b, l, c0:c1], dnorm, a.x[b, 2 * l], a.attn_rstd[b, l], c0)

DW_QKV, DW_ATTN_PROJ, DW_GATE_UP, DW_DOWN, DW_LM_HEAD = range(5)        # in the order of Panels
assert Panels._fields == ("qkv", "attn_proj", "gate_up", "down", "lm_head")
PER_LAYER = DW_LM_HEAD       # matrices per layer: the kinds that precede the heads

@jit
def matrix_gradient(kind, l, n0, n1, g, a, d, c, scratch):
    """Rows n0 to n1 of one weight gradient: dW += dY^T X, over all sequences.
    l is the layer, or for DW_LM_HEAD the head.     c Constants"""
    dgate_up, dlogits = a.gate_up, a.logits  # `team_backward` and `team_loss` have replaced them
    left, right = scratch.dy_panels, scratch.x_panels    # for packed dY and X
    if kind == DW_QKV:
        weight_gradient(g.qkv[l, n0:n1], d.qkv[:, l], a.attn_in[:, l], n0, left, right)
    elif kind == DW_ATTN_PROJ:
        weight_gradient(g.attn_proj[l, n0:n1], d.x[:, 2 * l + 1], a.att[:, l], n0, left, right)
    elif kind == DW_GATE_UP:
        weight_gradient(g.gate_up[l, n0:n1], dgate_up[:, l], a.mlp_in[:, l], n0, left, right)
    elif kind == DW_DOWN:
        weight_gradient(g.down[l, n0:n1], d.x[:, 2 * l + 2], a.swiglu[:, l], n0, left, right)
    else:
        weight_gradient(head_of(l, g, c)[n0:n1], dlogits[:, l], a.final_in[:, :], n0, left, right)

@jit
def matrix_gradients(team, batch, tasks, g, a, d, c, scratch):
    """The gradients of all matrices, from what `team_backward` has left in a and d for every
    sequence.     tasks: the blocks of `task_table`, which all threads share"""
    for n in each(team, len(tasks)):
        kind, l, n0, n1 = tasks[n]
        if kind != DW_LM_HEAD or l < batch.n_outputs:
            matrix_gradient(kind, l, n0, n1, g, a, d, c, scratch)
    for c0, c1 in shared(team, g.wte.shape[1], COLUMNS):     # after head 0, which may be wte
        embedding_gradient(g.wte, d.x[:, 0], batch.tokens, c0, c1)

# ---- a batch
@jit
def scratch_of(i, leader, s):
    """The part of s, the scratch memory of all threads, that thread i uses on a sequence that
    thread `leader` has begun.  dnorm, datt and dswiglu belong to the sequence, so all of its
    threads use the leader's."""
    return Scratch(dnorm=s.dnorm[leader], datt=s.datt[leader], dswiglu=s.dswiglu[leader],
                   scores=s.scores[i], dscores=s.dscores[i], kt=s.kt[i], vt=s.vt[i],
                   dy_panels=s.dy_panels[i], x_panels=s.x_panels[i])

@jit
def run_sequence(team, batch, net, a, d, scratch):
    """A thread's part of the passes of sequence team.b"""
    team_forward(team, batch, net, a, scratch)
    if batch.until >= LOSS:
        team_loss(team, batch, a)
    if batch.until >= GRADIENT:
        team_backward(team, batch, net, a, d, scratch)

@jit_parallel
def run_batch(batch, tasks, p, w, wt, constants, g, a, d, scratch):
    """Forward, loss and gradients of one micro-batch: g += d(sum_bkt weight[b, k, t] CE_bkt)/dp.
    tasks: see `task_table`
    Threads take sequences from a common counter, so a thread that is slowed down takes fewer.  If B
    is no multiple of the threads, the idle threads of the last round help with its sequences."""
    B, threads = batch.tokens.shape[0], scratch.dnorm.shape[0]
    sequences, progress, passed = counters(1)[0], counters(B), counters(threads)
    together, passed_together = counters(1)[0], counters(threads)
    # Each thread takes tickets, until there are no more.  Tickets 0 to B - 1 begin a sequence each.
    # The holder of a later ticket is a helper: it joins one of the n_last sequences of the last
    # round, if that sequence is not over.
    #
    # Example: B = 5 sequences, 4 threads.  n_last = 5 % 4 = 1, and there are 1 * 4 helpers.
    #     tickets 0 to 3    begin sequences 0 to 3, each on one thread (n_parts = 1)
    #     ticket 4          the first free thread begins sequence 4, as its leader (n_parts = 4)
    #     helpers 0 to 2    the other threads join sequence 4 when they are free
    #     helper 3          finds sequence 4 over; a thread with a later ticket leaves the loop
    # A thread that joins late passes through the finished loops and takes parts of the others.
    # When all 5 sequences are over, the 4 threads take the blocks of `task_table` one by one, the
    # largest first.  Each block adds up sequences 0, 1, 2, 3, 4 in this order, whichever thread
    # takes it.  The gradient of the embedding comes last.
    # With B = 6, n_last = 2 and n_parts = 2: helpers 0, 1, 2, ... join sequences 5, 4, 5, ...
    n_last = B % threads                     # number of sequences of the last round
    for thread in prange(threads):
        i = np.int64(thread)
        net = Net(p, w, wt, constants)       # made here: prange takes no nested tuple
        ticket = fetch_add(sequences, TAKEN)
        while ticket < B + n_last * threads:
            if ticket < B:
                b = ticket
                progress[b, LEADER] = i
                fetch_add(progress[b], BEGUN)
            else:
                helper = ticket - B
                b = B - 1 - helper % n_last  # the last sequences, in rotation
                wait_until(progress[b], BEGUN, 1)
            if seen(progress[b], OVER) == 0:
                n_parts = 1 if b < B - n_last else (threads + n_last - 1) // n_last
                passed[i, 0] = 0
                run_sequence(Team(b, n_parts, progress[b], passed[i]), batch, net, a, d,
                             scratch_of(i, progress[b, LEADER], scratch))
                if fetch_add(progress[b], OVER) == 0:
                    fetch_add(sequences, DONE)
            ticket = fetch_add(sequences, TAKEN)
        if batch.until >= GRADIENT:
            wait_until(sequences, DONE, B)
            everyone = Team(0, threads, together, passed_together[i])
            matrix_gradients(everyone, batch, tasks, g, a, d, constants, scratch_of(i, i, scratch))

@jit
def pack_part(panels, b, part):
    """Packs one part of the panels of b; part is 0 to PACK_PARTS - 1."""
    I, _, width = panels.shape
    i0, i1 = part * I // PACK_PARTS, (part + 1) * I // PACK_PARTS
    pack(panels[i0:i1], b[:, i0 * width:])

@jit_parallel
def pack_weights(w, wt, matrices, threads):
    """Packs each W (N, K) into w, and W^T into wt.     matrices: in the order of Panels"""
    L, P, counter = len(w.qkv), len(w.lm_head), counters(1)[0]
    for _ in prange(threads):
        task = fetch_add(counter, TAKEN)
        while task < (PER_LAYER * L + P) * PACK_PARTS:   # layers first, kind by kind, then heads
            number, part = task // PACK_PARTS, task % PACK_PARTS
            kind = min(number // L, DW_LM_HEAD)
            l = number - kind * L            # layer or head
            x = matrices[kind][l]
            pack_part(w[kind][l], x, part)
            pack_part(wt[kind][l], x.T, part)
            task = fetch_add(counter, TAKEN)

def task_table(cfg):
    """The blocks of all weight gradients: (kind, layer or head, first row, end), int64 (n, 4).
    A block has at most NB rows.  The largest blocks come first, so the last tasks are small."""
    tasks, untied = [], replace(cfg, tie_embeddings=False)
    packed = [x for x in param_table(untied) if x.name in Panels._fields]
    for kind, x in enumerate(packed):
        L, N, _ = x.shape
        for l in range(L):
            for n in range(0, N, NB):
                tasks.append((kind, l, n, min(n + NB, N)))
    sizes = [(n1 - n0) * packed[kind].shape[2] for kind, _, n0, n1 in tasks]
    return np.array(tasks)[np.argsort(sizes)[::-1]]

def length_used(targets):
    """The number of tokens per sequence to compute: up to the last target, rounded up to a multiple
    of KC, at most T.     targets (P, B, T)
    After the last target of the batch there is only padding, whose gradients are zero."""
    T = targets.shape[2]
    where = np.flatnonzero((targets >= 0).any((0, 1)))
    used = where[-1] + 1 if len(where) else 1
    return min(T, -(-int(used) // KC) * KC)

MOST_AT_ONCE = 1 << 16       # most tokens of a micro-batch by default
MOST_BYTES = 4 << 30         # and most bytes of its activations, if one sequence takes no more

class Model:
    """The parameters, and the memory to train them on micro-batches (B, T).
    It computes in the buffer's dtype, float32 or float64.  With dtype=BF16 and a float32 buffer,
    matrix-product inputs are bfloat16.  Training uses only the methods of `Engine` in
    nanoeuler_parts/runs, so the GPU model can take the place of this one."""
    program = "nanoeuler.py"
    talk = "chat"

    @staticmethod
    def ready(options=None):
        from nanoeuler_parts.kernels import compile_kernels
        compile_kernels(options.dtype if options else DTYPE)

    @staticmethod
    def host(x):
        """The array in a dtype that NumPy supports: bfloat16 becomes float32."""
        return from_bf16(x)

    def __init__(self, cfg, flat, moments=(), options=None, dtype=None):
        if options:
            dtype = PRECISIONS[options.dtype]
        table = param_table(cfg)
        self.cfg, self.flat = cfg, flat
        self.dtype = np.dtype(dtype or flat.dtype)       # of matrix-product inputs
        mixed = self.dtype == BF16 and flat.dtype == np.float32
        need(mixed or self.dtype == flat.dtype,
             f"cannot compute {self.dtype} products of {flat.dtype} parameters; use one dtype for "
             f"both, or bfloat16 products of float32 parameters")
        self.p = views(flat, table)
        self.m, self.v = moments if len(moments) else np.zeros((2, flat.size), flat.dtype)
        self.n_decay = entries_where(cfg, lambda x: x.decays).stop         # decaying tensors first
        self.g_flat = aligned(flat.shape, flat.dtype)
        self.g = views(self.g_flat, table)
        self.ce = np.zeros(cfg.n_mtp)        # summed cross-entropy of each head since `update`
        self.weighted_heads = set()          # heads with a nonzero weight since `update`
        self.has_failed = False              # was the last gradient not finite?
        self.w = self.new(panel_shapes(cfg, self.dtype, transposed=False))
        self.wt = self.new(panel_shapes(cfg, self.dtype, transposed=True))
        self.tasks = task_table(cfg)
        self.constants = constants_of(cfg, flat.dtype)
        self.a = self.d = self.scratch = None    # made by `prepare`, for the first pass
        self.shape = None                    # (B, T, threads) of a, d and scratch
        self.memory = []                     # the arrays that a, d and scratch are views of
        self.matrices = self.muon_scratch = None         # made when Muon is first used
        self.pack()

    def new(self, shapes, held=None):
        """Arrays of these shapes, each in its stored dtype.  New arrays are zero.
        held: {name: array}.  An array of `held` is reused if it is large enough.  Otherwise it is
        freed before its replacement is allocated."""
        kind, arrays, held = type(shapes), [], held or {}
        dtypes = dict.fromkeys(kind._fields, self.flat.dtype)
        if self.dtype == BF16:
            dtypes |= dict.fromkeys(NARROW.get(kind, ()), BF16)
            dtypes |= dict.fromkeys(PAIRED.get(kind, ()), np.dtype(np.int32))
        for name, shape in shapes._asdict().items():
            x = held.pop(name, None)
            if x is None or x.size < math.prod(shape):
                x = None
                x = aligned(shape, dtypes[name])
            arrays.append(x)
        return kind(*arrays)

    def pack(self):
        """Packs every matrix into its panels, once after each update of the parameters."""
        lm_head = self.p.lm_head
        if self.cfg.tie_embeddings:
            lm_head = np.concatenate((self.p.wte[None], lm_head))
        matrices = self.p._replace(lm_head=lm_head)
        packed = tuple(getattr(matrices, name) for name in Panels._fields)
        pack_weights(self.w, self.wt, packed, get_num_threads())

    def prepare(self, B, T):
        """Provides a, d and scratch for B sequences of T tokens.  Each array is a view of memory
        that is as large as the largest of its shapes so far."""
        shape = B, T, get_num_threads()
        if self.shape == shape:
            return
        shapes = (of_batch(B, act_shapes(self.cfg, T)), kept_grad_shapes(self.cfg, B, T),
                  scratch_shapes(self.cfg, get_num_threads(), T, self.dtype))
        held = [x._asdict() for x in self.memory] or [{}, {}, {}]
        self.a = self.d = self.scratch = self.shape = None
        self.memory = []
        self.memory = [self.new(*x) for x in zip(shapes, held)]
        self.a, self.d, self.scratch = map(parts_of, self.memory, shapes)
        for x in (self.g_flat, *self.a, *self.d, *self.scratch):   # `tile` reads past their ends
            need(room_behind(x) >= TILE_BYTES, "an array was not made by `aligned`: `tile` needs "
                 f"{TILE_BYTES} bytes after its end")
        self.shape = shape

    def run(self, until, tokens, targets=None, weight=1.0, n_outputs=None):
        """Calls `run_batch` on tokens (B, T) int32, and returns losses (B, n_outputs), in nats.
        n_outputs: the number of heads, from head 0 on; None means all of them."""
        cfg, (B, T), P = self.cfg, tokens.shape, self.cfg.n_mtp
        need(0 < T <= cfg.seq_len, f"expected 1 to {cfg.seq_len} tokens per sequence, found {T}")
        weight, n_outputs = token_weights(weight, (B, P, T)), n_outputs or P
        check_ids(tokens, cfg)
        if targets is None:
            targets = np.full((P, B, T), -1, np.int32)
        else:
            check_ids(np.maximum(targets, 0), cfg)
            check_shape(targets[:n_outputs], n_outputs, tokens)
            T = length_used(targets)
            tokens, targets, weight = tokens[:, :T], targets[:, :, :T], weight[:, :, :T]
        self.prepare(B, T)
        # another type of integers would compile `run_batch` again, for minutes
        batch = Batch(*(np.ascontiguousarray(x, np.int32) for x in (tokens, targets)),
                      np.ascontiguousarray(weight), np.zeros((B, n_outputs, T)), n_outputs, until)
        run_batch(batch, self.tasks, self.p, self.w, self.wt, self.constants, self.g, self.a,
                  self.d, self.scratch)
        if until == GRADIENT:                # gains and biases: add them in the order of the batch
            for name in Params._fields[VECTORS]:
                gradient = getattr(self.g, name)
                for row in getattr(self.d, name):
                    gradient += row
        self.nll = batch.nll                 # (B, n_outputs, T), for `token_losses`
        return batch.nll.cumsum(-1)[..., -1] # adds token by token; sum() would add in pairs

    def logits(self, tokens):
        """The logits of every head (B, P, T, V): a view, valid until the next `run`."""
        self.run(LOGITS, tokens)
        return self.a.logits

    def gradient(self, tokens, targets, weight):
        """g += d(sum_bk weight[b, k] CE_bk)/dp     weight (B, P), or (P,) for every sequence
        With weight (B, P, T), each token has a weight of its own: sum_bkt weight[b, k, t] CE_bkt.
        Heads after the last one with a nonzero weight are not computed."""
        self.forget_failure()
        n_outputs = self.outputs_with(weight)
        self.ce[:n_outputs] += self.run(GRADIENT, tokens, targets, weight, n_outputs).sum(0)

    def forget_failure(self):
        """Sets the gradients to zero if they are not finite.  `update` has left them as they were,
        for `first_bad_tensor`."""
        if self.has_failed:
            self.g_flat[:] = 0
            self.has_failed = False

    def outputs_with(self, weight):
        """The number of heads up to the last one with a nonzero weight.  Notes the heads that have
        one, for `update`."""
        weight = np.atleast_2d(weight)
        is_weighted = weight.any((0, 2) if weight.ndim == 3 else 0)
        weighted = np.flatnonzero(is_weighted).tolist()
        self.weighted_heads |= {0, *weighted}
        return 1 + max(weighted, default=0)

    def update(self, hyper):
        """AdamW, and Muon unless hyper.muon_lr is 0, on the gradients since the last update.
        Returns the CE (P,), summed since the last update, and |g|.  If |g| is not finite,
        parameters and moments stay, and the next `gradient` begins with zeros.  An auxiliary head
        without a weight since the last update is switched off: it has neither decay nor momentum,
        and stays as it is."""
        ce = self.ce
        self.ce = np.zeros(self.cfg.n_mtp)
        norm = gradient_norm(self.g_flat)
        self.has_failed = not math.isfinite(norm)
        if not self.has_failed:
            scale = clipping(norm, hyper)
            if hyper.muon_lr:
                self.update_by_muon(hyper, scale)
            else:
                self.update_by_adamw(slice(0, self.flat.size), hyper, scale)
        self.weighted_heads = set()
        self.pack()
        return ce, norm

    def update_by_adamw(self, part, hyper, scale):
        """`adamw_update` of a slice of the flat buffers, except the heads that are switched off"""
        for x in self.without_heads_off(part):
            adamw_update(self.flat[x], self.g_flat[x], self.m[x], self.v[x],
                         self.n_decay - x.start, hyper, scale)

    def without_heads_off(self, part):
        """`part`, a slice of the flat buffers, cut into slices without the heads that are switched
        off.  With several GPUs, a part may begin or end inside a head.  If `gradient` was not
        called since the last update, every head counts as on."""
        [heads] = (x for x in param_table(self.cfg) if x.axis == "head")
        size = math.prod(heads.shape[1:])
        parts, start = [], part.start
        for i in range(len(self.p.lm_head)):
            k = i + self.cfg.tie_embeddings              # tied: lm_head begins with head 1
            first = heads.start + i * size
            is_off = self.weighted_heads and k not in self.weighted_heads
            if is_off:
                parts.append(slice(start, min(first, part.stop)))
                start = max(start, first + size)
        parts.append(slice(start, part.stop))
        return [x for x in parts if x.start < x.stop]

    def update_by_muon(self, hyper, scale):
        """Muon on the matrices of the layers, AdamW on the other tensors, as `param_table` says."""
        if not self.muon_scratch:
            self.matrices = muon_matrices(self.cfg)
            self.muon_scratch = self.new(muon_shapes(self.cfg, get_num_threads()))
        for optimizer, settings in (("adamw_embedding", hyper_of_embedding(hyper)),
                                    ("adamw", hyper)):
            part = entries_of(self.cfg, optimizer)
            self.update_by_adamw(part, settings, scale)
        muon(self.flat, self.g_flat, self.m, self.matrices, hyper, scale, self.muon_scratch)

    def losses(self, tokens, targets):
        """Summed CE of head 0 of every sequence (B,), in nats: -sum_t log p(targets[:, t])
        tokens, targets (B, T) int32"""
        return self.run(LOSS, tokens, targets[None], n_outputs=1)[:, 0]

    def token_losses(self, tokens, targets):
        """CE of head 0 at every token, nats, (B, T) float64: -log p(targets[b, t]), or 0 where the
        target is -1     tokens, targets (B, T) int32"""
        self.losses(tokens, targets)
        nll = np.zeros(tokens.shape)
        nll[:, :self.nll.shape[-1]] = self.nll[:, 0]
        return nll

    def micro_batch(self, B, asked=None, T=None):
        """The number of sequences that `gradient` takes at once: `asked`, or up to B as far as
        MOST_AT_ONCE and MOST_BYTES allow, and half of the memory of this machine or container.  A
        larger micro-batch takes more memory and is not faster.  Free memory is not measured."""
        T = T or self.cfg.seq_len
        shapes = (*act_shapes(self.cfg, T), *kept_grad_shapes(self.cfg, 1, T))
        size = self.flat.itemsize * sum(map(math.prod, shapes))      # of one sequence
        room = min(MOST_BYTES, most_memory() / 2)
        return asked or min(B, max(1, min(MOST_AT_ONCE // T, int(room // size))))

    def buffers(self):
        """The arrays that a checkpoint stores: the parameters and AdamW's moments m and v."""
        return self.flat, self.m, self.v

    def decoder(self):
        return Decoder(self.cfg, self.flat)

    def device(self):
        name, remark = "bfloat16" if self.dtype == BF16 else self.dtype.name, ""
        if self.dtype == BF16 and not HAS_BF16:          # emulated by float32 instructions
            remark = " (emulated on this CPU, no faster than --dtype f32)"
        elif self.dtype == np.float32 and DTYPE == "f32":
            remark = " (bfloat16 is no faster on this CPU)"
        return f"{counted(get_num_threads(), 'thread')}, {name}{remark}"

    def first_bad_tensor(self):
        """The first entry that is NaN or infinite, in words.  Parameters are searched first, then
        the values computed from them.  `team_loss` and `team_backward` have replaced the
        activations logits and gate_up by their gradients."""
        for kind, group in (("parameter", self.p), ("activation", self.a),
                            ("gradient of activation", self.d),
                            ("gradient of parameter", self.g)):
            if group is None:                # no pass was computed yet
                continue
            for name, x in zip(group._fields, map(self.host, group)):
                finite = np.isfinite(x)
                if not finite.all():
                    at = tuple(int(i) for i in np.unravel_index(finite.argmin(), x.shape))
                    return f"{kind} {name}{list(at)} is {x[at]}"
        return "the loss is not finite"

# ==== 16 Muon ====
# Tour: docs/tour/11_muon.md
# This replaces AdamW (7) for the matrices of the layers.  A step takes longer, but a run needs
# fewer of them: with equal time the text is predicted better (bench/NOTES.md).
#
# Muon is by Jordan et al. 2024 (kellerjordan.github.io/posts/muon).  A gradient consists mostly of
# a few directions, and a step along it neglects all others.  Muon gives every direction the same
# weight.  Let U S V^T be the singular value decomposition of the averaged gradients.  Muon steps
# along U V^T, the nearest orthogonal matrix, whose singular values are all 1.  Among all steps that
# stretch no input by more than a fixed factor, this one lowers the loss fastest, as far as the
# gradient tells (Bernstein & Newhouse 2024).  Muon has no second moments: v stays zero.
#
# There is no need to compute U and V.  An odd polynomial of the matrix acts on the singular values
# alone:
#     a X + b (X X^T) X + c (X X^T)^2 X  =  U (a S + b S^3 + c S^5) V^T
# Three steps of x <- 3.4445 x - 4.7750 x^3 + 2.0315 x^5 map [0.02, 1] into [0.68, 1.21].  Each step
# multiplies smaller singular values by about 3.4 (Newton-Schulz iteration).  This is precise
# enough, even when computed in bfloat16.  Jordan et al. take five steps, which did not improve the
# model any further (bench/NOTES.md).
#
# Example: the gradient's singular values are 1, 0.1 and 0.02 times the largest one.
#     after step 1    0.70, 0.34, 0.07
#     after step 2    1.11, 0.99, 0.24
#     after step 3    0.72, 0.71, 0.75       nearly equal: every direction has the same weight
#
# One matrix holds q, k and v, and one holds gate and up, so that a single product computes them.
# Each is still a map of its own, so Muon updates each separately, as `llama_tensors` (10) lists
# them.  The embedding, whose rows are read one at a time, the heads and the gains stay with AdamW.
#
# A run with Muon also starts from other parameters (nanoeuler_parts/runs/schedule.py).  The
# embedding starts smaller, so that it does not outweigh what the layers add to it from the first
# step on.  It also learns faster.  The heads and the matrices that write to the residual stream
# start at zero.
# bench/NOTES.md says how much each change gains.
NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315
EMBEDDING_INIT = 0.3         # factor of the initial embedding in a run with Muon

def hyper_of_embedding(hyper):
    """The Hyper of the embedding in a run with Muon.  It has its own rate, and the same
    lr * weight_decay."""
    return hyper._replace(lr=hyper.lr * hyper.embedding_lr,
                          weight_decay=hyper.weight_decay / hyper.embedding_lr)

def muon_matrices(cfg):
    """(first entry in the flat buffer, rows, columns) of Muon's matrices, largest first:
    q, k, v, attn_proj, gate, up, down of each layer     int64 (7 L, 3)"""
    matrices = [(x.start, *x.shape) for x in llama_tensors(cfg)
                if optimizer_of(x.part_of) == "muon"]
    return np.array(sorted(matrices, key=lambda x: -x[1] * x[2]))

def muon_shapes(cfg, n):
    """Shapes of the scratch memory of n threads.  Each thread has room for the largest matrix."""
    _, rows, columns = muon_matrices(cfg).T
    size, side = (rows * columns).max(), np.minimum(rows, columns).max()
    return MuonScratch(y=(n, size),          # the matrix, transposed if it is wide
                       other=(n, size),      # the result of a Newton-Schulz step
                       gram=(n, side * side),
                       square=(n, side * side),
                       operand=(n, 0, 0))    # empty: has the dtype of the products' operands (12)

@jit
def nesterov(y, g, m, scale, momentum):
    """g *= scale,   m = momentum m + (1 - momentum) g,   y = momentum m + (1 - momentum) g
    If g is wide (K > N), y is the transpose.  Sets g to zero for the next step.
    g, m (N, K), y (N, K) or (K, N)"""
    N, K = g.shape
    old, new = y.dtype.type(momentum), y.dtype.type(1 - momentum)
    for i in range(N):
        gs, ms = g[i], m[i]
        for j in range(K):
            x = gs[j] * scale
            ms[j] = old * ms[j] + new * x
            gs[j] = old * ms[j] + new * x
        if N >= K:
            y[i] = gs
        else:
            for j in range(K):
                y[j, i] = gs[j]
        gs[:] = 0

@jit
def normalize(y):
    """y /= max(|y|, 1e-7), |y| the root of the sum of squares.  No singular value of the result is
    above 1."""
    ss = 0.0
    for row in y:
        for j in range(row.size):
            ss += row[j] * row[j]
    factor = y.dtype.type(1 / max(math.sqrt(ss), 1e-7))
    for row in y:
        for j in range(row.size):
            row[j] *= factor

@jit
def orthogonalize(y, other, steps, gram, square, operand):
    """Y <- Y (a I + b G + c G G),   G = Y^T Y,   in each step: Y becomes nearly U V^T
    Y (l, s), l >= s.  Returns the array that holds the result: y or other.
    scratch: gram, square (s, s).  operand: an array with the dtype of the products' operands"""
    a, b, c = NEWTON_SCHULZ
    a, b, c = y.dtype.type(a), y.dtype.type(b), y.dtype.type(c)
    for _ in range(steps):
        low = narrowed(y, operand)
        symmetric_product(gram, narrowed_transpose(y, operand), low)
        low_gram = narrowed(gram, operand)
        symmetric_product(square, low_gram, low_gram)
        for i in range(len(gram)):
            row, of_gram = square[i], gram[i]
            for j in range(row.size):
                row[j] = b * of_gram[j] + c * row[j]
            row[i] += a
        tiled_matmul(other, low, narrowed(square, operand))
        y, other = other, y
    return y

@jit
def muon_matrix(p, g, m, hyper, scale, scratch):
    """p -= muon_lr (sqrt(max(1, N / K)) O + weight_decay p),   O = orthogonalize(nesterov(g))
    p, g, m (N, K), scratch: a MuonScratch of one thread
    If N > K, the entries of O have the size 1 / sqrt(N).  The factor sqrt(N / K) makes it
    1 / sqrt(K), as in a K x K matrix."""
    N, K = p.shape
    long, side = max(N, K), min(N, K)
    y, other = scratch.y[:N * K].reshape(long, side), scratch.other[:N * K].reshape(long, side)
    n = side * side
    gram, square = scratch.gram[:n].reshape(side, side), scratch.square[:n].reshape(side, side)
    nesterov(y, g, m, p.dtype.type(scale), hyper.momentum)
    normalize(y)
    y = orthogonalize(y, other, int(hyper.newton_schulz), gram, square, scratch.operand)
    keep = p.dtype.type(1 - hyper.muon_lr * hyper.weight_decay)
    rate = p.dtype.type(hyper.muon_lr * math.sqrt(max(1.0, N / K)))
    for i in range(N):
        row = p[i]
        if N >= K:
            o = y[i]
            for j in range(K):
                row[j] = keep * row[j] - rate * o[j]
        else:
            for j in range(K):
                row[j] = keep * row[j] - rate * y[j, i]

@jit_parallel
def muon(p, g, m, matrices, hyper, scale, scratch):
    """Runs `muon_matrix` on the matrices listed by `muon_matrices`.     p, g, m (N,): flat buffers
    One thread updates a whole matrix, so the result does not depend on the number of threads."""
    taken = counters(1)
    for i in prange(len(scratch.y)):
        own = MuonScratch(y=scratch.y[i], other=scratch.other[i], gram=scratch.gram[i],
                          square=scratch.square[i], operand=scratch.operand[i])
        n = fetch_add(taken[0], 0)
        while n < len(matrices):
            start, rows, columns = matrices[n]
            end = start + rows * columns
            muon_matrix(p[start:end].reshape(rows, columns), g[start:end].reshape(rows, columns),
                        m[start:end].reshape(rows, columns), hyper, scale, own)
            n = fetch_add(taken[0], 0)

def muon_slice(cfg):
    """The slice of the flat buffer that Muon updates: qkv to down"""
    return entries_of(cfg, "muon")

# ==== 17 Batched decoding ====
# Tour: docs/tour/13_answers.md, for the KV cache and draft tokens
# This replaces `PlainDecoder` of section 6.  A step reads each weight once, for the next token of
# many sequences.  One token needs all the weights of the model, and reading them from memory takes
# most of its time, so the tokens of eight sequences take hardly longer than one.
#
# rows     a row is one token, at one position of one slot; R rows are computed together
# slots    a slot is the KV cache of one sequence; a batch of n sequences needs n slots
# parts    a part is what a caller asks for: the tokens to append to one slot
# blocks   a block is up to Decoder.block consecutive rows of one slot; `attend` takes one at a time
# steps    a step is one `decode_step`, of at most MOST_ROWS rows.  (Section 18 counts the calls of
#          `next_tokens` as steps; with long prompts, such a call takes several of these.)
# pieces   `read` cuts a part into pieces if its slot is full in between; most parts are one piece
#
# Example: slot 0 reads a prompt of 3 tokens, 7 8 9.  Slot 1 holds 5 tokens and decodes token 4.  So
# parts = [Part(0, [7, 8, 9], 1), Part(1, [4], 1)], and one step has 4 rows:
#
#     row         0  1  2  3
#     tokens      7  8  9  4
#     slots       0  0  0  1
#     positions   0  1  2  5
#     blocks      (0, 3), (3, 4)         rows 0 to 2 of slot 0, row 3 of slot 1
#     wanted      2, 3                   the logits of these rows give each slot's next token
#
# A row writes its key and value into its slot, and then attends to the slot up to its own position.
# This one kind of step serves every case:
#
#     a prompt           many rows of one slot
#     a batch            one row of each of many slots
#     drafts to verify   some rows of one slot; from the first wrong draft on they are removed
#     a server           any mixture of these
#
# Each number of a row is summed in one order, independent of the other rows.  A text is therefore
# bit-identical alone and in a batch, with drafts and without.

# R rows: tokens, slots and positions (R,).  blocks (n, 2): first row and end row of each block.
# wanted (m,): the rows whose logits are requested.  All are int32.
Rows = namedtuple("Rows", "tokens slots positions blocks wanted")
# Keys, as K^T in packed panels, and values, of all layers or of one
Cache = namedtuple("Cache", "k v")
# The scale of each row of the matrices: only int8 needs one, other types have 1
Scales = namedtuple("Scales", Params._fields[MATRICES])
# The arrays of a step; q, scores and out hold the AttentionScratch of each thread
Work = namedtuple("Work", "x y rstd qkv qk_rstd att gate_up swiglu q scores out final logits "
                          "guesses")
AttentionScratch = namedtuple("AttentionScratch", "q scores out")
MOST_ROWS = 256              # a step takes up to 256 rows; longer prompts take several steps
SMALL_PRODUCT = 1 << 14      # multiply-adds; a smaller product is computed by one thread, because
                             # two would need longer to synchronize (2 us)

# ---- the step
@jit
def panel_product(y, x, w, scale, n, add):
    """The columns of `product` that belong to panel n.  Each weight is read once for up to MR rows,
    whose sums fit into the registers."""
    R, r = len(y), 0
    while r < R:
        left = R - r
        if left == 1:
            rows_tile(y, x, w, scale, r, n, add, 1)
            r += 1
        elif left == 2:
            rows_tile(y, x, w, scale, r, n, add, 2)
            r += 2
        elif left <= 4:
            rows_tile(y, x, w, scale, r, n, add, 4)
            r += 4
        else:
            rows_tile(y, x, w, scale, r, n, add, MR)
            r += MR

@jit_parallel
def product_parallel(y, x, w, scale, add):
    for n in prange(len(w)):
        panel_product(y, x, w, scale, np.int64(n), add)

@jit
def product(y, x, w, scale, add):
    """y = x W^T, + y if add     y (R, N), x (R, K), w packed panels of W (N, K) by `in_panels`
    Row n of an int8 matrix is scale[n] times its stored numbers; for other types the scale is 1.
    Only products of int8 convert x, to fixed point (`quantized`).
    The threads share the panels, because one core cannot use the whole memory bandwidth.  A panel
    stays in L2 while ROWS rows are multiplied by it."""
    left = quantized(x, w)
    if len(y) * w.size < SMALL_PRODUCT:
        for n in range(len(w)):
            panel_product(y, left, w, scale, n, add)
    else:
        for r in range(0, len(y), ROWS):
            product_parallel(y[r:r + ROWS], left[r:r + ROWS], w, scale, add)

@jit
def embed(x, tokens, w, scale):
    """x[r] = wte[tokens[r]], read from the packed panels of wte, so that tied embeddings need no
    second copy of the matrix"""
    width = w.shape[2]
    for r in range(len(x)):
        token = tokens[r]
        column, row = w[token // width, :, token % width], x[r]
        for c in range(row.size):
            row[c] = panel_entry(column, c, scale) * scale[token]

@jit
def store_kv(kv, rows, qkv, c):
    """Writes the key and value of each row into its slot of a layer's Cache, token t into entry t.
    A slot of a model with a window is a ring of E entries: token t goes into entry t % E.
    k (slots, G, panels, D, width): K^T in packed panels; v (slots, G, E, D), qkv (R, QKV)"""
    (k, v), H, G, D = kv, c.H, c.G, c.D
    width, entries = k.shape[4], v.shape[2]
    for r in range(len(qkv)):
        slot, t = rows.slots[r], rows.positions[r] % entries
        for g in range(G):
            _, k0, v0 = columns_of_head(g * H // G, H, G, D)
            for i in range(D):
                k[slot, g, t // width, i, t % width] = qkv[r, k0 + i]
                v[slot, g, t, i] = qkv[r, v0 + i]

@jit
def softmax(row, scale):
    """row = softmax(scale * row), in place"""
    m, total = row_max(row), row.dtype.type(0)
    for j in range(row.size):
        row[j] = exp((row[j] - m) * scale)
    for j in range(row.size):
        total += row[j]
    norm = row.dtype.type(1) / total
    for j in range(row.size):
        row[j] *= norm

@jit
def exp_sum(row, m, scale):
    """Replaces the row by exp(scale * (row - m)), and returns its sum."""
    total = row.dtype.type(0)
    for j in range(row.size):
        row[j] = exp((row[j] - m) * scale)
        total += row[j]
    return total

@jit
def softmax_in_window(row, t, window, entries, scale):
    """row = softmax(scale * row) over the tokens t - window + 1 to t, and 0 at other entries
    row (n,): the first n of the slot's entries, where token j is in entry j % entries"""
    start, end = max(0, t + 1 - window) % entries, t % entries + 1
    if start < end:
        softmax(row[start:end], scale)
        row[:start] = 0
        row[end:] = 0
        return
    newer, older = row[:end], row[start:]    # the window continues at entry 0
    m = larger(row_max(older), row_max(newer))
    norm = row.dtype.type(1) / (exp_sum(older, m, scale) + exp_sum(newer, m, scale))
    row[end:start] = 0
    for j in range(row.size):
        row[j] *= norm

@jit
def attend(att, qkv, rows, kv, c, scratch, r0, r1, g):
    """`attention` of one block, rows r0 to r1, for the query heads that share key head g.
    scratch: q, out (queries, D), scores (queries, T)"""
    (k, v), D, per_key = kv, c.D, c.H // c.G             # per_key: query heads of a key head
    width, entries = k.shape[4], v.shape[2]
    slot, n = rows.slots[r0], min(entries, rows.positions[r1 - 1] + 1)       # entries in use
    m = (r1 - r0) * per_key                  # query i is head i % per_key of row i // per_key
    for i in range(m):
        start = (g * per_key + i % per_key) * D
        source, to = qkv[r0 + i // per_key, start:start + D], scratch.q[i]
        for j in range(D):
            to[j] = source[j]
    S, out = scratch.scores[:m, :n], scratch.out[:m]
    tiled_matmul(S, scratch.q[:m], k[slot, g, :(n + width - 1) // width])
    for i in range(m):
        softmax_in_window(S[i], rows.positions[r0 + i // per_key], c.window, entries,
                          S.dtype.type(1 / math.sqrt(D)))
    tiled_matmul(out, S, v[slot, g, :n])
    for i in range(m):
        start = (g * per_key + i % per_key) * D
        source, to = out[i], att[r0 + i // per_key, start:start + D]
        for j in range(D):
            to[j] = rounded(source[j], to)

@jit_parallel
def attention_parallel(att, qkv, rows, kv, c, scratch):
    counter, G = counters(1)[0], c.G         # np.zeros would be one more parallel loop
    for i in prange(len(scratch.q)):
        own = AttentionScratch(scratch.q[i], scratch.scores[i], scratch.out[i])
        n = fetch_add(counter, 0)
        while n < len(rows.blocks) * G:
            r0, r1 = rows.blocks[n // G]
            attend(att, qkv, rows, kv, c, own, r0, r1, n % G)
            n = fetch_add(counter, 0)

@jit
def attention(att, qkv, rows, kv, c, scratch):
    """att[r] = softmax(q[r] K^T / sqrt(D)) V over the last `window` tokens of the slot of row r, up
    to its own position
    out: att (R, HD)     in: qkv (R, QKV), kv a layer's Cache, c Constants
    scratch: an AttentionScratch for all threads"""
    multiply_adds = 0                        # at most: a window needs fewer
    for b in range(len(rows.blocks)):
        r0, r1 = rows.blocks[b]
        multiply_adds += (r1 - r0) * rows.positions[r1 - 1] * att.shape[1]
    if multiply_adds < SMALL_PRODUCT:
        first = AttentionScratch(scratch.q[0], scratch.scores[0], scratch.out[0])
        for b in range(len(rows.blocks)):
            r0, r1 = rows.blocks[b]
            for g in range(c.G):
                attend(att, qkv, rows, kv, c, first, r0, r1, g)
    else:
        attention_parallel(att, qkv, rows, kv, c, scratch)

@jit
def decode_step(rows, p, scales, cache, work, c):
    """`forward` for R rows, whose keys and values go into the cache.
    out: work.final, work.logits: the normed x and head 0's logits of the rows in rows.wanted
    in: p: Params with the matrices in packed panels, and lm_head of head 0 alone; its Scales; c
    Constants     in and out: cache.k (L, slots, G, panels, D, width), cache.v (L, slots, G, T, D)
    """
    R, heads, cos, sin, one = len(rows.tokens), c.H + c.G, c.cos, c.sin, c.cos.dtype.type(1)
    x, y, rstd, qkv, att = work.x[:R], work.y[:R], work.rstd[:R], work.qkv[:R], work.att[:R]
    gate_up, swiglu = work.gate_up[:R], work.swiglu[:R]
    no, add = np.int64(0), np.int64(1)       # the last argument of `product`: add to the output?
    embed(x, rows.tokens, p.wte, scales.wte)
    for l in range(c.L):
        rmsnorm_forward(y, rstd, x, p.attn_norm[l], c.eps)
        product(qkv, y, p.qkv[l], scales.qkv[l], no)
        if p.qkv_bias.size:
            add_bias(qkv, p.qkv_bias[l])
        if p.q_norm.size:
            head_norm_forward(qkv, work.qk_rstd[:R], p.q_norm[l], p.k_norm[l], c.H, c.eps)
        for r in range(R):
            t = rows.positions[r]
            rope(qkv[r:r + 1], cos[t:t + 1], sin[t:t + 1], heads, one)
        kv = Cache(cache.k[l], cache.v[l])
        store_kv(kv, rows, qkv, c)
        attention(att, qkv, rows, kv, c, AttentionScratch(work.q, work.scores, work.out))
        product(x, att, p.attn_proj[l], scales.attn_proj[l], add)
        rmsnorm_forward(y, rstd, x, p.mlp_norm[l], c.eps)
        product(gate_up, y, p.gate_up[l], scales.gate_up[l], no)
        swiglu_forward(swiglu, gate_up)
        product(x, swiglu, p.down[l], scales.down[l], add)
    n = len(rows.wanted)
    for i in range(n):
        r = rows.wanted[i]
        rmsnorm_forward(work.final[i:i + 1], rstd[:1], x[r:r + 1], p.final_norm, c.eps)
    product(work.logits[:n], work.final[:n], p.lm_head, scales.lm_head, no)

@jit
def guess_logits(logits, final, w, scale):
    """logits (P - 1, 1, V) of all further heads, for one row of work.final"""
    for k in range(len(w)):
        product(logits[k], final, w[k], scale[k], np.int64(0))

# ---- weights
# Weights are stored as float32, bfloat16 or int8.  Without hardware products of bfloat16 or int8,
# only the weights are rounded, and the products are computed in float32.  With them x is rounded,
# too, in the same way for one row as for many:
#     bfloat16   x in bfloat16, which costs the small model less than 0.0001 bits per byte
#                (bench/NOTES.md)
#     int8       x in 16-bit fixed point, relative to the largest number of its row
LONGEST_QUADS = 1 << 17      # longest row whose sum of products with int8 fits into an int32

def converted(w, weights):
    """(the matrices w (.., N, K) in the format `weights`, a scale (.., N) for each row)
    f32: unchanged.  bf16: half the memory.  int8: a quarter, w = scale * round(w / scale)."""
    need_setting(weights in ("f32", "bf16", "int8"), "weights",
                 f"expected f32, bf16 or int8, found {weights}")
    scale = np.ones(w.shape[:-1], w.dtype)
    if weights == "bf16":
        return to_bf16(w), scale
    if weights == "int8":
        scale = np.maximum(np.maximum(w.max(-1), -w.min(-1)), 1e-30) / 127
        scaled = w / scale[..., None]
        return np.rint(scaled, out=scaled).astype(np.int8), scale
    return w, scale

def pack_fours(panels, w):
    """Byte i of panels[n, k, j] = w[n * width + j, 4 k + i] + 128     w (N, K) int8
    Adding 128 flips the highest bit of a byte."""
    I, quads, width = panels.shape
    padded = np.zeros((I * width, 4 * quads), np.uint8)
    padded[:w.shape[0], :w.shape[1]] = w.view(np.uint8) ^ 128
    panels[...] = padded.view(np.uint32).reshape(I, width, quads).transpose(0, 2, 1)

def in_panels(w, weights, quads=False):
    """(packed panels (L, n, K, width), scales (L, n * width)) of matrices (L, N, K)
    bfloat16: each int32 holds a pair of numbers, panels (L, n, K / 2, width).  int8 with quads:
    each uint32 holds four numbers, with 128 added, panels (L, n, K / 4, width)."""
    L, N, K = w.shape
    width = tile_width(w.dtype)
    dtype, step = {"bf16": (np.int32, 2), "int8": (np.int8, 1)}.get(weights, (w.dtype, 1))
    if quads:
        dtype, step = np.uint32, 4
    n = -(-N // width)
    panels, scales = aligned((L, n, -(-K // step), width), dtype), aligned((L, n * width), w.dtype)
    for l in range(L):
        x, scales[l, :N] = converted(w[l], weights)
        if dtype == np.uint32:
            pack_fours(panels[l], x)
        else:
            pack(panels[l], x.T)
    return panels, scales

class Stack:
    """Matrices (n, N, K) float32 that a function reads from a file, each when it is used.
    readers: a function for each matrix     shape: (N, K)"""
    dtype = np.dtype(np.float32)

    def __init__(self, readers, shape):
        self.readers, self.shape = readers, (len(readers), *shape)

    def __getitem__(self, i):
        """Matrix i, or a Stack of some of them"""
        return Stack(self.readers[i], self.shape[1:]) if isinstance(i, slice) else self.readers[i]()

def params_of(cfg, source):
    """Params of `source`, a flat buffer (N,), or of the Params of an open checkpoint"""
    return source if isinstance(source, Params) else views(source, param_table(cfg))

def flat_of(cfg, source):
    """The flat buffer (N,) of `source`, as in `params_of`"""
    if not isinstance(source, Params):
        return source
    flat = aligned((n_params(cfg),), np.float32)
    for x, to in zip(source, views(flat, param_table(cfg))):
        if isinstance(x, Stack):
            for i, matrix in enumerate(to.reshape(x.shape)):
                matrix[...] = x[i]
        else:
            to[...] = x
    return flat

class Weights:
    """The parameters of a model in the format of a decoder.  They are copies: later changes of the
    source have no effect.  A Stack is packed matrix by matrix, so the whole model need not fit into
    memory in float32.     source: see `params_of`"""

    def __init__(self, cfg, source, weights):
        p = params_of(cfg, source)
        longest = max(cfg.n_embd, cfg.n_hidden, cfg.n_head * cfg.head_dim)
        quads = weights == "int8" and QUADS and longest <= LONGEST_QUADS
        packed = partial(in_panels, weights=weights, quads=quads)
        layers = [packed(x) for x in p[OF_LAYERS]]       # (panels, scales) of each tensor
        wte = packed(p.wte if isinstance(p.wte, Stack) else p.wte[None])
        head_0 = wte if cfg.tie_embeddings else packed(p.lm_head[:1])
        others = p.lm_head[1 - cfg.tie_embeddings:]      # heads 1 and up; if tied, all of lm_head
        self.others = packed(others) if cfg.n_mtp > 1 else None
        # These two are single matrices, without the axis of layers or heads
        wte, head_0 = ((panels[0], scales[0]) for panels, scales in (wte, head_0))
        panels, scales = zip(wte, *layers, head_0)       # in the order of MATRICES
        self.p = Params(*panels, *(x.copy() for x in p[VECTORS]))
        self.scales = Scales(*scales)
        # Where the CPU multiplies bfloat16, x is rounded to bfloat16, too
        self.input_dtype = BF16 if weights == "bf16" and HAS_BF16 else p.wte.dtype

# ---- the interface of a decoder
# Tokens to append to a slot: ids, a list.  The logits of the last `wanted` ones are requested.
Part = namedtuple("Part", "slot ids wanted", defaults=(1,))
# A piece of a Part, as a step computes it.  start: the position of its first token
Piece = namedtuple("Piece", "slot start ids wanted")
# The settings of `sample`, and a random number from [0, 1), for one token
SampleRequest = namedtuple("SampleRequest", "temperature top_k top_p min_p uniform")

class Reader(Protocol):
    """The interface of a decoder: `Decoder` below implements it, and so does nanoeuler_cuda.py."""
    cfg: Config
    length: int                              # the longest context, tokens
    held_ids: list                           # of each slot: the tokens that are in its cache
    kept_as: str                             # f32, bf16 or int8: the format of its weights
    heads: int                               # number of auxiliary heads, for `guesses`
    rows_are_cheap: bool                     # do a few rows take about as long as one?
    samples_itself: bool                     # has it `sample_on_device`?

    @staticmethod
    def ready():
        """Must be called before the first decoder of a process is made."""

    formats: tuple                           # the values that `weights` may have

    def __init__(self, cfg, flat, weights="f32", slots=1, length=0):
        """flat (N,): parameters in the order of param_table, or the Params of an open checkpoint,
        see `params_of`.  weights: their format in memory, see `converted`; empty: the default of
        the device.  length: tokens that a slot can hold, at most cfg.seq_len; 0: cfg.seq_len."""

    def with_slots(self, slots, length=0):
        """Another decoder that shares these weights but has a cache of its own"""

    def read(self, parts):
        """Appends tokens to slots.  parts: at most one Part per slot.  A full slot slides: it drops
        its earlier half.  Returns the requested logits (n, V), on the host, valid until the next
        call."""

    def sample_on_device(self, parts, requests, later=()):
        """Like `read`, but returns a list of ids: for each line of the logits the token that
        `sample` would choose by its SampleRequest.  Returns None if the decoder cannot sample these
        parts: then nothing has been read, and the caller must call `read`.
        later: the SampleRequests of the tokens after these, if the next call reads only the sampled
        tokens.  With `later`, the caller must not call `guesses` afterwards."""

    def guesses(self, row):
        """The logits (heads, V) of heads 1 and up, at the token of row `row` of the last logits"""

    def step(self, *ids):
        """Appends tokens to slot 0, and returns the logits (V,) of the next token, a copy."""

    def truncate(self, n, slot=0):
        """Keeps the first n tokens of a slot, as if those after them had never been read.
        Returns the number of tokens kept: n, or 0 if the slot no longer holds the keys before n,
        because it is a ring (see `store_kv`)."""

    def copy(self, source, slot, n):
        """Copies the first n tokens of slot `source` to `slot`, as if it had read them itself.
        Returns the number of tokens copied, n or 0, as `truncate` does."""

def steps_of(pieces):
    """Yields the pieces of each step, at most MOST_ROWS rows together.  A long piece is cut."""
    step, free = [], MOST_ROWS               # free: rows that the step can still take
    for piece in pieces:
        while len(piece.ids) > free:
            later = len(piece.ids) - free    # tokens of this piece that later steps read
            if free:
                step.append(piece._replace(ids=piece.ids[:free],
                                           wanted=max(0, piece.wanted - later)))
            yield step
            piece = piece._replace(start=piece.start + free, ids=piece.ids[free:],
                                   wanted=min(piece.wanted, later))
            step, free = [], MOST_ROWS
        step.append(piece)
        free -= len(piece.ids)
    yield step

# ---- the decoder
class Decoder:
    """The weights of a model, a KV cache with some slots, and the tokens in each slot."""
    rows_are_cheap, samples_itself, formats = True, False, ("f32", "bf16", "int8")

    @staticmethod
    def ready():
        from nanoeuler_parts.kernels import DECODING
        fill_cache(DECODING)

    def __init__(self, cfg, flat, weights="f32", slots=1, length=0):
        self.begin(cfg, slots, length)
        self.kept_as = weights or "f32"
        self.weights = Weights(cfg, flat, self.kept_as)
        self.allocate()

    def begin(self, cfg, slots, length):
        """Sets the fields that a decoder on any device has.  Its slots are empty."""
        need(slots > 0, f"expected one slot or more, found {slots}")
        self.cfg, self.length = cfg, min(length or cfg.seq_len, cfg.seq_len)
        self.held_ids = [[] for _ in range(slots)]
        self.window = cfg.window or self.length
        self.entries = self.length           # number of keys in a slot's cache
        self.most_held = [0] * slots         # the most tokens of a slot since it was empty
        self.heads = cfg.n_mtp - 1
        self.block = max(1, BR * cfg.n_kv_head // cfg.n_head)    # rows per block, at most

    def allocate(self):
        get_num_threads()                    # starts the threads; a cached decode_step does not
        cfg, T, dtype = self.cfg, self.length, self.weights.p.final_norm.dtype
        size, M, width = dims_of(cfg), MOST_ROWS, tile_width(dtype)
        threads, slots = get_num_threads(), len(self.held_ids)
        line = T + 16                        # rows of 2^n numbers would share few cache sets of L1
        queries = self.block * size.H // size.G

        def new(*shape, dtype=dtype):
            return aligned(shape, dtype)

        def new_input(*shape):               # for the left operands of products
            return new(*shape, dtype=self.weights.input_dtype)

        # A step writes up to M new keys before its first row reads the window before them
        self.entries = min(T, self.window + M)
        self.cache = Cache(new(size.L, slots, size.G, -(-self.entries // width), size.D, width),
                           new(size.L, slots, size.G, self.entries, size.D))
        self.work = Work(x=new(M, size.C), y=new_input(M, size.C), rstd=new(M),
                         qkv=new(M, size.QKV), qk_rstd=new(M, size.H + size.G),
                         att=new_input(M, size.HD),
                         gate_up=new(M, 2 * size.F), swiglu=new_input(M, size.F),
                         q=new(threads, queries, size.D), scores=new(threads, queries, line),
                         out=new(threads, queries, size.D), final=new_input(M, size.C),
                         logits=new(M, size.V),
                         guesses=new(self.heads, 1, size.V))
        self.constants = constants_of(replace(cfg, seq_len=T), dtype)

    def with_slots(self, slots, length=0):
        other = object.__new__(type(self))
        vars(other).update(vars(self))       # its weights, and what it chose when it was made
        other.begin(self.cfg, slots, length)
        other.allocate()
        return other

    @property
    def tokens(self):
        """The tokens in slot 0"""
        return self.held_ids[0]

    def step(self, *ids):
        """Reads these ids, and returns the logits of the token that follows them, (V,)."""
        return self.read([Part(0, [*ids])])[0].copy()    # `read` returns a view, see `Reader`

    def truncate(self, n, slot=0):
        # The keys of the tokens after n may stay: no row attends past its position.  But in a ring,
        # they have replaced the oldest keys, and token n attends to the window before it
        oldest = self.most_held[slot] - self.entries
        if max(0, n - self.window) < oldest:
            n = 0
        del self.held_ids[slot][n:]
        if n == 0:
            self.most_held[slot] = 0
        return n

    def copy(self, source, slot, n):
        is_full = self.most_held[source] > self.entries
        entries = self.entries if is_full else n         # if it is not full, token t is in entry t
        panels = -(-entries // self.cache.k.shape[5])
        self.cache.k[:, slot, :, :panels] = self.cache.k[:, source, :, :panels]
        self.cache.v[:, slot, :, :entries] = self.cache.v[:, source, :, :entries]
        self.held_ids[slot] = self.held_ids[source][:]
        self.most_held[slot] = self.most_held[source]
        return self.truncate(n, slot)

    def read(self, parts):
        """See `Reader`.  A full slot keeps the later half of its tokens.  They are read again, from
        position 0 on, in the same call."""
        parts = [Part(slot, [int(i) for i in ids], wanted) for slot, ids, wanted in parts]
        self.check(parts)
        if all(len(self.held_ids[slot]) + len(ids) <= self.length for slot, ids, _ in parts):
            return self.read_pieces([Piece(slot, len(self.held_ids[slot]), ids, wanted)
                                     for slot, ids, wanted in parts])
        # A slot cannot hold two pieces at once, so round i reads piece i of each part
        pieces_of = [self.pieces(part) for part in parts]
        found, final = [[] for _ in parts], [[] for _ in parts]
        for i in range(max(map(len, pieces_of))):
            here = [n for n, pieces in enumerate(pieces_of) if i < len(pieces)]
            logits, row = self.read_pieces([pieces_of[n][i] for n in here]), 0
            for n in here:
                end = row + pieces_of[n][i].wanted
                found[n] += [*logits[row:end].copy()]
                final[n] += [*self.final[row:end]] if self.heads else []
                row = end
        self.final = np.array([row for rows in final for row in rows])
        return np.array([row for rows in found for row in rows]).reshape(-1, self.cfg.vocab_size)

    def check(self, parts):
        V, slots = self.cfg.vocab_size, [part.slot for part in parts]
        need(parts and len({*slots}) == len(slots), "expected one part or more, one per slot; "
             f"parts: {len(slots)}, slots: {len({*slots})}")
        for slot, ids, wanted in parts:
            need(0 <= slot < len(self.held_ids),
                 f"expected a slot from 0 to {len(self.held_ids) - 1}, found {slot}")
            need(ids and 0 <= wanted <= len(ids), f"slot {slot}: expected one token or more, "
                 f"and 0 to {len(ids)} wanted; tokens: {len(ids)}, wanted: {wanted}")
            for token in min(ids), max(ids):
                need(0 <= token < V, f"expected token ids from 0 to {V - 1}, found {token}")

    def pieces(self, part):
        """The Pieces of a Part: one, unless the slot slides between two requested logits.  In a
        slot of length 8 that holds the tokens 0 to 6,
            7 8 9, the logits of the last   ->  Piece(slot, 0, 4 5 6 7 8 9, 1)
            7 8 9, the logits of all three  ->  Piece(slot, 7, 7, 1), Piece(slot, 0, 4 5 6 7 8 9, 2)
        """
        slot, unread, wanted = part
        ids, pieces = self.held_ids[slot], []
        start = len(ids)                     # the keys of ids[:start] are in the cache
        while unread:
            if len(ids) == self.length:      # full: its later half moves to the beginning
                ids, start = ids[self.length - self.length // 2:], 0
            n = self.length - len(ids)       # the room in the slot
            ids, now, unread = ids + unread[:n], unread[:n], unread[n:]
            # the requested logits of these tokens, if the last `wanted` of all are requested
            wanted_here = min(len(now), max(0, wanted - len(unread)))
            if wanted_here or not unread:
                pieces.append(Piece(slot, start, ids[start:], wanted_here))
        return pieces

    def read_pieces(self, pieces):
        """The logits of all pieces, in order, computed in steps of up to MOST_ROWS rows.  After
        each step `held_ids` has the tokens that are in the cache."""
        for slot, start, *_ in pieces:
            self.truncate(start, slot)
        found, final = [], []
        for step in steps_of(pieces):
            if found:
                found[-1] = found[-1].copy()             # the next step overwrites work.logits
            found.append(self.compute(self.rows(step)))
            if self.heads:                   # `guesses` may be called for any row of these logits
                final.append(self.work.final[:len(found[-1])].copy())
            for slot, _, ids, _ in step:
                self.held_ids[slot] += ids
                self.most_held[slot] = max(self.most_held[slot], len(self.held_ids[slot]))
        if self.heads:
            self.final = final[0] if len(final) == 1 else np.concatenate(final)
        return found[0] if len(found) == 1 else np.concatenate(found)

    def rows(self, pieces):
        """The Rows of one step, for these pieces"""
        tokens, slots, positions, blocks, wanted = [], [], [], [], []
        for slot, start, ids, n in pieces:
            first = len(tokens)
            tokens += ids
            slots += [slot] * len(ids)
            positions += range(start, start + len(ids))
            end = len(tokens)
            blocks += [(r, min(end, r + self.block)) for r in range(first, end, self.block)]
            wanted += range(end - n, end)
        columns = np.array((tokens, slots, positions), np.int32)
        return Rows(*columns, np.array(blocks, np.int32), np.array(wanted, np.int32))

    def compute(self, rows):
        """The logits (n, V) of the rows in rows.wanted"""
        decode_step(rows, self.weights.p, self.weights.scales, self.cache, self.work,
                    self.constants)
        return self.work.logits[:len(rows.wanted)]

    def guesses(self, row):
        self.work.final[0] = self.final[row]     # with memory after it, for products that read on
        guess_logits(self.work.guesses, self.work.final[:1], *self.weights.others)
        return self.work.guesses[:, 0]

# ==== 18 Replies ====
# This replaces `generate` of section 6.  A `Reply` is a text that is being generated.  Many replies
# are generated at once, and draft tokens speed up each one.
#
# Example: the last tokens are "the cat saw the", and the next one, "cat", has just been sampled.
# The tokens "cat saw the" occurred before, so "saw" and "the" are drafts.  One step reads three
# rows, "cat", "saw" and "the".  The logits of the first row give "saw": the draft was right.  Those
# of the second row give "a": the draft "the" was wrong and is removed from the slot.  So the step
# has yielded two tokens, "saw" and "a".

# ---- sampling
def log_softmax(logits):
    z = logits.astype(np.float64)
    z -= z.max()
    return z - math.log(np.exp(z).sum())

# ---- a reply
class Uniforms:
    """The random numbers of a text, one per token.  `ahead` shows the next ones without using them
    up."""

    def __init__(self, rng):
        self.rng, self.drawn = rng, []       # drawn: shown by `ahead`, and not used yet

    def random(self):
        return self.drawn.pop(0) if self.drawn else self.rng.random()

    def ahead(self, n):
        """The next n random numbers, which `random` will return later"""
        while len(self.drawn) < n:
            self.drawn.append(self.rng.random())
        return self.drawn[:n]

def rng_of(seed, prompt=0, answer=0):
    """The random numbers of one answer to one prompt; prompts and answers are numbered from 0.
    They do not depend on what else is generated: a single prompt gets the same random numbers as
    the first prompt of a batch."""
    return Uniforms(np.random.default_rng([seed, prompt, answer] if prompt or answer else seed))

class Reply:
    """A text that is being generated: its unread tokens, the sampled tokens, and why it ended."""

    def __init__(self, ids, sampling, rng, end=None, vocab=None, held=(), constraint=None):
        """ids: the tokens of the prompt that the slot has not read yet.  rng: used by this reply
        alone, or Uniforms whose last Reply has ended.  end: the token that ends the reply, or
        several tokens.  vocab: the bytes of each token, required for stop texts.  held: the tokens
        of the prompt that the slot has read, required for the repeat penalty.
        constraint: the tokens that JSON mode allows, see nanoeuler_parts/chat/json_mode.py"""
        need(len(ids), NO_TOKEN)
        self.sampling, self.vocab = sampling, vocab
        self.ends = frozenset(() if end is None else np.atleast_1d(end).tolist())
        self.rng = rng if isinstance(rng, Uniforms) else Uniforms(rng)
        self.pending = [int(i) for i in ids]             # tokens to read next
        self.tokens, self.logprobs, self.counts = [], [], {}
        n = sampling.repeat_last_n
        self.recent = deque([*held, *self.pending], n if n >= 0 else None)
        self.finish = "" if sampling.tokens else "length"
        self.text = b""                      # the tokens as bytes, if there is a vocabulary
        self.stops = [text.encode() for text in sampling.stop]
        need(vocab or not self.stops, "stop texts need the bytes of each token; pass vocab")
        self.constraint = constraint
        self.state = constraint.start if constraint else None        # of JSON mode
        self.drafts = []                     # draft tokens, to be read after pending
        self.slot = 0
        self.n_returned = 0                  # bytes of text that `news` has returned

    def sample(self, logits):
        """Samples a token from the logits (V,), appends it and returns it.  The token that ends the
        reply is returned but not appended."""
        sampling = self.sampling
        z = self.penalized(logits) if sampling.penalizes else logits
        if self.constraint:                  # all other tokens get probability 0
            z = np.where(self.constraint.mask(self.state), z, -np.inf)
        token = sample(z, self.rng, sampling)
        if sampling.logprobs and token not in self.ends:
            logp = log_softmax(logits)
            top = np.argsort(-logp, kind="stable")[:sampling.logprobs]
            self.logprobs.append((float(logp[token]), [(int(i), float(logp[i])) for i in top]))
        return self.append_token(token)

    def penalized(self, logits):
        """The logits after the penalties.  The repeat penalty p turns the logit z of each recent
        token into z / p if z > 0, otherwise z * p (Keskar et al. 2019, 4.1, as llama.cpp does)."""
        sampling, z, recent = self.sampling, logits.copy(), [*{*self.recent}]
        z[recent] = np.where(z[recent] > 0, z[recent] / sampling.repeat_penalty,
                             z[recent] * sampling.repeat_penalty)
        for token, n in self.counts.items():
            z[token] -= sampling.presence_penalty + n * sampling.frequency_penalty
        return z

    def requests(self, n):
        """A SampleRequest for each of the next n tokens, for a Reader that samples.  The list is
        empty if the host must sample, because penalties or JSON mode change the logits, or logprobs
        reports them."""
        sampling = self.sampling
        if sampling.logprobs or sampling.penalizes or self.constraint:
            return []
        settings = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
        uniforms = self.rng.ahead(n) if sampling.temperature else [0.0] * n
        return [SampleRequest(*settings, uniform) for uniform in uniforms]

    def take_sampled(self, token):
        """Like `sample`, for a token that the Reader has sampled by the first SampleRequest"""
        if self.sampling.temperature:
            self.rng.random()
        return self.append_token(token)

    def append_token(self, token):
        if token in self.ends:
            self.finish = "stop"
            return token
        self.tokens.append(token)
        self.recent.append(token)
        self.counts[token] = self.counts.get(token, 0) + 1
        if len(self.tokens) == self.sampling.tokens:
            self.finish = "length"
        if self.constraint:
            self.state = self.constraint.after(self.state, token)
            if not self.state:               # the JSON value is complete
                self.finish = "stop"
        if self.vocab:
            self.append(self.vocab[token])
        return token

    def append(self, piece):
        """Appends bytes to the text, and cuts it before the first stop text.  A stop text may begin
        in one token and end in another."""
        longest = max(map(len, self.stops), default=0)
        start = max(0, len(self.text) - longest)
        self.text += piece
        places = [place for stop in self.stops if (place := self.text.find(stop, start)) >= 0]
        if places:
            self.text = self.text[:min(places)]
            self.finish = "stop"

    @property
    def answer(self):
        """The reply so far, as text"""
        return self.text.decode("utf-8", "replace")

    def news(self):
        """The bytes added since the last call, except an ending that may begin a stop text."""
        end = len(self.text)
        if not self.finish:
            for stop in self.stops:
                for n in range(min(len(stop), len(self.text)), 0, -1):
                    if self.text.endswith(stop[:n]):
                        end = min(end, len(self.text) - n)
                        break
        end = max(end, self.n_returned)
        piece, self.n_returned = self.text[self.n_returned:end], end
        return piece

# ---- drafts
# Speculative decoding: a step reads the sampled token together with draft tokens, cheap guesses of
# the tokens after it.  Reading a few rows takes hardly longer than reading one, because the weights
# come from memory once for all of them.  Where the model samples the same tokens as the drafts, one
# step yields several tokens; wrong drafts are removed from the slot.  The drafts do not change the
# text: each token is sampled from head 0's logits, with the same random number (Stern et al. 2018
# for greedy; a sample that must equal the draft is the simplest case of Leviathan et al. 2023).
MOST_DRAFTS = 15             # most drafts of a step: the largest value of --speculate
DEFAULT_DRAFTS = 4           # default number of drafts by prompt lookup
LONGEST_MATCH = 3            # prompt lookup compares up to 3 tokens

def prompt_lookup(tokens, k):
    """Finds an earlier occurrence of the last few tokens, and returns up to k tokens that followed
    it.  The longest match wins, and of equally long ones the latest
    (prompt lookup decoding; Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding)."""
    ids = np.array(tokens, np.int32)
    for n in range(min(LONGEST_MATCH, len(ids) - 1), 0, -1):
        matches = np.ones(len(ids) - n, bool)            # windows of n tokens, without the last one
        for i in range(n):
            matches &= ids[i:len(ids) - n + i] == ids[len(ids) - n + i]
        places = np.flatnonzero(matches)
        if len(places):
            start = places[-1] + n
            return tokens[start:start + k]
    return []

def draft(reader, reply, row, k):
    """Up to k draft tokens that may follow the token just sampled from row `row` of the logits.
    They come from the model's other heads, where head i predicts token t + 1 + i, or by lookup."""
    if reader.heads:
        return [int(i) for i in reader.guesses(row)[:k].argmax(1)]
    return prompt_lookup(reader.held_ids[reply.slot] + reply.pending, k)

# ---- many replies at once
TRIAL = 4, 8         # the steps of a trial: first with drafts requested, then without
# After n recent steps with drafts, drafts are given up if a token costs more than
# 1 + CHANCE / sqrt(n) times as much as without them
CHANCE = 0.6

TimedStep = namedtuple("TimedStep", "seconds tokens found")      # found: did it read any drafts?

@dataclass
class Pace:
    """Measures the time of generation, and decides whether drafts pay, from the seconds and tokens
    of recent steps with and without drafts."""
    began: float = field(default_factory=time.perf_counter)
    first: float = 0.0                       # seconds to the first token
    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    offered: list = field(default_factory=lambda: [0] * MOST_DRAFTS)     # drafts read, by position
    accepted: list = field(default_factory=lambda: [0] * MOST_DRAFTS)
    n_drafts: int = 0                        # drafts requested per reply for the next step
    lately: dict = field(default_factory=lambda: {False: deque(maxlen=8), True: deque(maxlen=16)})
    # {were drafts requested?: the TimedSteps of the last steps of that kind}
    pays: bool = True                        # do drafts pay, as far as is known?
    trial: int = 0                           # the step in which the last trial began
    until_trial: int = 64                    # steps from that step to the next trial

    def count(self, tokens, seconds, asked, found, reading):
        """Counts a step.  asked: were drafts requested?  found: were some found?  reading: it also
        read prompts, so its time does not show the cost of a token."""
        self.seconds = time.perf_counter() - self.began
        self.first = self.first or self.seconds
        self.tokens += tokens
        self.steps += 1
        if not reading:
            self.lately[asked].append(TimedStep(seconds, tokens, found))

    def seconds_per_token(self, asked):
        """Seconds per token over recent steps, either with drafts requested (asked) or without.
        Steps that read drafts and steps that found none are two kinds.  Each step counts with the
        median time of its kind, so that a single stall does not matter.  On a GPU, a step stalls if
        it was not queued ahead.  Such are the first two steps after drafting stops, and the steps
        for which no draft was found."""
        steps, total = self.lately[asked], 0.0
        for found in False, True:
            seconds = sorted(step.seconds for step in steps if step.found == found)
            total += len(seconds) * seconds[len(seconds) // 2] if seconds else 0.0
        return total / max(1, sum(step.tokens for step in steps))

    def plan(self, reader, sampling):
        """The number of drafts to request for the next step: sampling.speculate, or if that is -1
        reader.heads or DEFAULT_DRAFTS while drafts pay, otherwise 0.  A reader whose rows are not
        cheap gets 0.
        After a trial, drafts are requested until a token costs more with them than without, by more
        than chance: the mean of n steps has an error of order 1 / sqrt(n).  The next trial begins
        64 steps after the last one.  Each time that drafts do not pay, this distance doubles, up
        to 1024.  The decision depends on the clock, but the text does not: a draft changes when a
        token is sampled, never which one."""
        if not reader.rows_are_cheap:
            return 0
        if sampling.speculate >= 0:
            return sampling.speculate
        most, tried = reader.heads or DEFAULT_DRAFTS, self.steps - self.trial
        if tried < sum(TRIAL):
            return most if tried < TRIAL[0] else 0
        if self.pays and self.lately[True] and self.lately[False]:
            dearer = 1 + CHANCE / math.sqrt(max(1, len(self.lately[True])))
            self.pays = self.seconds_per_token(True) < dearer * self.seconds_per_token(False)
        if tried < self.until_trial:
            return most if self.pays else 0
        self.trial = self.steps
        self.until_trial = 64 if self.pays else min(2 * self.until_trial, 1024)
        self.pays = True
        return most

    def __str__(self):
        rate = self.tokens / self.seconds if self.seconds else 0.0
        text = (f"{counted(self.tokens, 'token')}, {rate:,.1f} per second, the first after "
                f"{self.first:.2f} s")
        if any(self.offered):
            shares = [f"{a / n:.0%}" for a, n in zip(self.accepted, self.offered) if n]
            text += (f"; {self.tokens / self.steps:.2f} per step, draft tokens accepted by "
                     f"position: {', '.join(shares)}")
        return text

# ---- a step: plan, read, accept
def drop_drafts(reader, reply):
    """Drops the drafts for which the reply or its slot has no room: a slot must not slide for
    drafts that may be wrong."""
    held = len(reader.held_ids[reply.slot]) + len(reply.pending)
    room = min(reader.length - held, reply.sampling.tokens - len(reply.tokens) - 1)
    del reply.drafts[max(0, room):]

def read_replies(reader, replies, also, is_followed):
    """Reads the pending tokens and the drafts of each reply, in one step.
    Returns a function (reply, row) that samples a token of the reply.  There is a row for each
    token that may be sampled: one per reply and one per draft.
    also: see `next_tokens`; is_followed: will the next step read only the tokens sampled now?"""
    parts = [Part(reply.slot, reply.pending + reply.drafts, 1 + len(reply.drafts))
             for reply in replies] + [*also]
    if reader.samples_itself:
        requests, later = [reply.requests(1 + len(reply.drafts)) for reply in replies], []
        if all(requests):
            if is_followed:                  # then the reader may queue the next step
                later = [reply.requests(2)[1:] for reply in replies]
            ids = reader.sample_on_device(parts, sum(requests, []), sum(later, []))
            if ids is not None:
                return lambda reply, row: reply.take_sampled(ids[row])
    logits = reader.read(parts)
    return lambda reply, row: reply.sample(logits[row])

def accept(reader, reply, row, sample_row):
    """Samples the next token of a reply, from row `row`.  As long as the token equals the next
    draft, one more is sampled, from the row of that draft.  The other drafts are removed from the
    slot.  Returns the tokens, without one that ends the reply, and the number of drafts that were
    right."""
    tokens, accepted = [], 0
    for guess in (*reply.drafts, None):      # after the last draft any token ends the loop
        token = sample_row(reply, row + accepted)
        if token not in reply.ends:
            tokens.append(token)
        if reply.finish or token != guess:
            break
        accepted += 1
    wrong = len(reply.drafts) - accepted
    reader.truncate(len(reader.held_ids[reply.slot]) - wrong, reply.slot)
    reply.pending = [token]
    return tokens, accepted

def next_tokens(reader, replies, pace, also=()):
    """One step of some replies, each in its own slot: reads the pending tokens and the drafts of
    each reply, and samples its next tokens.
    One Pace decides the number of drafts, so all replies must have the same `speculate`.
    also: Parts of other slots, pieces of long prompts, without logits
    Returns the tokens sampled for each reply."""
    began = time.perf_counter()
    speculate = {reply.sampling.speculate for reply in replies}
    need(len(speculate) == 1, f"expected replies with the same speculate, found {speculate}; "
         f"generate them one after the other")

    # Plan: the drafts of this step were found in the last one; how many should the next step have?
    reading = bool(also) or any(len(reply.pending) > 1 for reply in replies)
    for reply in replies:
        drop_drafts(reader, reply)
    asked, found = pace.n_drafts > 0, any(reply.drafts for reply in replies)
    pace.n_drafts = pace.plan(reader, replies[0].sampling)
    unfinished = all(len(reply.tokens) + 1 < reply.sampling.tokens for reply in replies)
    is_followed = unfinished and not (pace.n_drafts or found or also)

    # Read, then accept
    sample_row = read_replies(reader, replies, also, is_followed)
    row, sampled = 0, []                     # row: where a reply's rows begin
    for reply in replies:
        n = len(reply.drafts)
        tokens, accepted = accept(reader, reply, row, sample_row)
        sampled.append(tokens)
        for i in range(n):
            pace.offered[i] += 1
            pace.accepted[i] += i < accepted
        reply.drafts = []
        if pace.n_drafts and not reply.finish:
            reply.drafts = draft(reader, reply, row + accepted, pace.n_drafts)
        row += 1 + n
    pace.count(sum(map(len, sampled)), time.perf_counter() - began, asked, found, reading)
    return sampled

def generate_many(reader, replies, pace=None):
    """Generates many replies in the reader's slots, and yields (number, Reply) as each one ends.
    replies: an iterable; the next Reply is taken from it when a slot becomes free"""
    waiting, free, active = enumerate(replies), list(range(len(reader.held_ids)))[::-1], {}
    pace = pace or Pace()
    while True:
        while free:
            number, reply = next(waiting, (None, None))
            if reply is None:
                break
            reply.slot = free.pop()
            reader.truncate(0, reply.slot)
            active[number] = reply
        running = [reply for reply in active.values() if not reply.finish]
        if running:
            next_tokens(reader, running, pace)
        elif not active:
            return
        for number in [number for number, reply in active.items() if reply.finish]:
            reply = active.pop(number)
            free.append(reply.slot)
            yield number, reply

# ======== Part III: the way to nanoeuler_parts ========
# Everything else is in the folder nanoeuler_parts, whose __init__.py lists it: the command line in
# cli.py, runs that can be resumed in runs/, conversations in chat/, the whole file of a checkpoint
# in checkpoint/.

# ==== 19 Command line and Python ====
# Names that users take from this module: {name: the module that defines it}
ELSEWHERE = {"load": "chat.speaker", "Speaker": "chat.speaker", "Sampling": "chat.sampling",
             "read_checkpoint": "checkpoint.file", "write_checkpoint": "checkpoint.file",
             "State": "checkpoint.state"}

def __getattr__(name):
    """The names in ELSEWHERE.  They are imported when they are first used, because the modules that
    define them import this one."""
    if name not in ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"nanoeuler_parts.{ELSEWHERE[name]}"), name)

def main(argv=None):
    if not nanoeuler_parts:
        return plain_main(argv)
    from nanoeuler_parts.cli import run_verb, VERBS
    return run_verb(VERBS, "Train, fine-tune and run a GPT from scratch on a CPU", argv)

def main_on_gpu():
    """pip's command nanoeuler-cuda: runs nanoeuler_cuda.py as if the file had been started."""
    return runpy.run_module("nanoeuler_cuda", run_name="__main__")
