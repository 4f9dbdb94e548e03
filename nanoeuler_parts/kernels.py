"""Compiling in advance: the kernels of training and of chat, in Numba's cache before a run begins.

`Model.ready` and `Decoder.ready` call this.  Each kernel is compiled by calling it once, with the
tiny model SPECK, in a process of its own.  machine/kernels.py starts these processes.
"""
import numpy as np
from numba import types

import bpe
from bpe import need
from nanoeuler import (
    adamw_update, aligned, Config, decode_step, Decoder, GRADIENT, hyper_at, init_params, Model,
    muon, PRECISIONS, run_batch,
)
from nanoeuler_parts.flags import arg
from nanoeuler_parts.machine.cpu import DTYPE, QUADS
from nanoeuler_parts.machine.kernels import Compiled, fill_cache

SPECK = Config(n_embd=8, n_head=2, n_kv_head=1, head_dim=4, n_layer=1, n_hidden=8, vocab_size=16)

def compile_gradient(dtype="f32"):
    """Compiles the forward and backward pass; `run_batch` takes nearly all of the time.
    dtype: a key of PRECISIONS, or f64, in which check.py computes"""
    flat = init_params(SPECK, 0)
    if dtype == "f64":
        flat = aligned(flat.shape, np.float64)
        flat[:] = 0
    model = Model(SPECK, flat, dtype=PRECISIONS.get(dtype))
    model.run(GRADIENT, np.zeros((1, 8), np.int32))

def compile_decoding():
    """Compiles the decoder for each type of weights, and the tokenizer."""
    for weights in ("f32", "bf16", "int8"):
        decoder = Decoder(SPECK, init_params(SPECK, 0), weights)
        decoder.step(0)
        decoder.guesses(0)
    bpe.train(b"a b a b", 258).encode(b"a b")

def compile_updates(dtype="f32"):
    """Compiles the optimizers, the decoder and the tokenizer: about as long as `run_batch`."""
    model = Model(SPECK, init_params(SPECK, 0), dtype=PRECISIONS[dtype])
    for muon_lr in (0.0, 1.0):
        model.update(hyper_at(1, 1.0, beta1=0.9, beta2=0.95, weight_decay=0.0, clip=1.0,
                              muon_lr=muon_lr))
    compile_decoding()

INT8 = types.uint32 if QUADS else types.int8             # Numba's type of packed int8

# {the call of a separate process: the kernels in it that take long to compile}, here for chat.
# A compiled kernel includes the functions that it calls.
DECODING = {"compile_decoding()": [Compiled(decode_step, "p.wte", types.float32),
                               Compiled(decode_step, "p.wte", types.int32),
                               Compiled(decode_step, "p.wte", INT8),
                               Compiled(bpe.encode_range, "byte_id", types.int32)]}

# Numba's type of packed matrices
PANELS = {"f32": types.float32, "bf16": types.int32, "f64": types.float64}
PRODUCTS = {"f32": types.float32, "bf16": types.uint16}  # and of the operands of products

def gradient_kernels(dtype):
    """The kernels of the forward and backward pass in this dtype, a key of PANELS"""
    return {f"compile_gradient({dtype!r})": [Compiled(run_batch, "w.qkv", PANELS[dtype])]}

def compile_passes(dtype):
    """Compiles the forward and backward pass in this dtype, unless the cache has them."""
    fill_cache(gradient_kernels(dtype))

def compile_lora(dtype="f32"):
    """Compiles the passes over a layer and over the head of a model with LoRA.
    dtype: a key of PRECISIONS, or f64, in which tests compute"""
    from nanoeuler_parts.lora.adapter import Lora
    from nanoeuler_parts.lora.base import base_of_flat
    from nanoeuler_parts.lora.model import Adapted, LoraModel
    flat = init_params(SPECK, 0)
    if dtype == "f64":
        flat = aligned(flat.shape, np.float64)
    adapted = Adapted(base_of_flat(SPECK, flat), Lora(1, 1.0), None)
    tokens = np.zeros((1, 8), np.int32)
    LoraModel(SPECK, adapted, dtype=PRECISIONS.get(dtype)).run(GRADIENT, tokens, tokens)

def compile_lora_decoding():
    """Compiles the decoder with adapters for each type of weights."""
    from nanoeuler_parts.lora.adapter import init_adapter, Lora
    from nanoeuler_parts.lora.base import random_base
    from nanoeuler_parts.lora.decoder import LoraDecoder
    lora = Lora(1, 1.0)
    for stored in ("f32", "bf16", "int8"):
        LoraDecoder(random_base(SPECK, stored), [(lora, init_adapter(SPECK, lora, 0))]).step(0)

def lora_decoding_kernels():
    from nanoeuler_parts.lora.decoder import lora_decode_step
    kinds = types.float32, types.int32, INT8
    return {"compile_lora_decoding()": [Compiled(lora_decode_step, "p.wte", x) for x in kinds]}

def compile_lora_decoding_kernels():
    """Compiles the decoder with adapters, unless the cache has it."""
    fill_cache(lora_decoding_kernels())

def lora_kernels(dtype):
    """The kernels of the passes of a model with LoRA in this dtype"""
    from nanoeuler_parts.lora.kernels import (
        run_backward, run_forward, run_head, run_keeping, run_packing,
    )
    found = [Compiled(kernel, "s.panel", PANELS[dtype])
             for kernel in (run_forward, run_backward, run_head)]
    found += [Compiled(run_keeping, "kept.forward", PANELS[dtype]),
              Compiled(run_packing, "p.at_qkv", PANELS[dtype])]
    return {f"compile_lora({dtype!r})": found}

def compile_lora_kernels(dtype=DTYPE, decoding=False):
    """Compiles the passes of a model with LoRA in this dtype, unless the cache has them.
    decoding: also what a run needs besides, the decoders and AdamW"""
    parts = lora_kernels(dtype)
    if decoding:
        updates = f"compile_updates({dtype!r})"
        parts |= {updates: training_kernels(dtype)[updates], **lora_decoding_kernels()}
    fill_cache(parts)

def training_kernels(dtype):
    """The kernels of a run in this dtype, and of a chat with its model"""
    return {**gradient_kernels(dtype),
            f"compile_updates({dtype!r})": [Compiled(adamw_update, "p", types.float32),
                                         Compiled(muon, "scratch.operand", PRODUCTS[dtype]),
                                         *DECODING["compile_decoding()"]]}

def compile_kernels(dtype=DTYPE):
    """`compile`: compiles the kernels for training in this dtype and for chat."""
    need(dtype in PRECISIONS, f"--dtype: expected {' or '.join(PRECISIONS)}, found {dtype}")
    fill_cache(training_kernels(dtype))

def compile_verb(add):
    add(compile_kernels, arg("--dtype", default=DTYPE,
                             help="precision of training to compile for: f32 or bf16"))
