"""Writes and reads GGUF files, the format of llama.cpp, for the verbs `export` and `import`.  The
package gguf implements the format."""
import math
from dataclasses import fields

import numpy as np

from bpe import need
from nanoeuler import ALPACA, Config, llama_tensors, named
from nanoeuler_parts.files.safetensors import cut_short, note_large
from nanoeuler_parts.interchange.llama import Found, LLAMA, llama_config, need_regular
from nanoeuler_parts.interchange.tokenizers import gguf_of_tokenizer, tokenizer_of_gguf

def gguf_names(cfg):
    """{name of a tensor in a checkpoint: its name in GGUF}, without the auxiliary heads, for which
    llama.cpp has no place"""
    return {x.name: x.gguf for x in llama_tensors(cfg) if x.gguf}

def pairs_of_halves(w, name, cfg, back=False):
    """RoPE rotates rows i and i + D/2 of a head of q or k; GGUF stores the two as rows 2i, 2i + 1.
    Reorders w (heads * D, C) for GGUF, or back.  Matrices without RoPE stay as they are."""
    heads = {"q_proj": cfg.n_head, "k_proj": cfg.n_kv_head}.get(name.split(".")[-2])
    if heads is None:
        return w
    split = (heads, -1, 2, w.shape[1]) if back else (heads, 2, -1, w.shape[1])
    return w.reshape(split).swapaxes(1, 2).reshape(w.shape)

def shortest(x):
    """A float32 as the shortest decimal that names it: 1e-5 instead of 9.99999974e-06."""
    return float(str(np.float32(x))) if isinstance(x, float) else x

def llama_of_gguf(path):
    """The model of a GGUF file, as a `Found`."""
    import gguf

    class Reader(gguf.GGUFReader):
        """The reader of gguf 0.19 with a bounds check.  Without it, a damaged file could make the
        reader allocate lists of any length."""

        def _get(self, offset, dtype, count=1, **order):
            end = int(offset) + int(count) * np.dtype(dtype).itemsize
            need(end <= len(self.data), cut_short(len(self.data), end))
            return super()._get(offset, dtype, count, **order)

    need_regular(path)
    with open(path, "rb") as f:
        need(f.read(4) == b"GGUF", "it is not a GGUF file")
    file = Reader(path)
    note_large(f"reading {path}", len(file.data))
    meta = {key: x.contents() for key, x in file.fields.items()}
    words = {key.removeprefix("tokenizer.ggml."): value for key, value in meta.items()}
    need(sum(t.n_bytes for t in file.tensors) <= len(file.data), "its tensors overlap")
    tokens, tokenizer = words.get("tokens"), tokenizer_of_gguf(words)
    scaling = meta.get("llama.rope.scaling.type")
    if scaling in (None, "none"):
        scaling = "default"
    cfg = llama_config({
        **{theirs: shortest(meta.get(key)) for _, theirs, key in LLAMA},
        "vocab_size": len(tokens), "model_type": meta["general.architecture"],
        "rope_type": scaling,
        "tie_word_embeddings": all(t.name != "output.weight" for t in file.tensors)})
    D = meta.get("llama.rope.dimension_count", cfg.head_dim)
    need(D == cfg.head_dim, f"RoPE rotates {D} of {cfg.head_dim} dimensions per head, "
         f"expected all of them")
    ours = {theirs: name for name, theirs in gguf_names(cfg).items()}
    tensors = {ours.get(t.name, t.name): t for t in file.tensors}
    shapes = {name: tuple(t.shape.tolist()[::-1]) for name, t in tensors.items()}

    def read(name):
        t = tensors[name]
        return pairs_of_halves(gguf.dequantize(t.data, t.tensor_type), name, cfg, back=True)

    def special(key):
        return "" if words.get(key) is None else tokens[words[key]]

    return Found(cfg, tokenizer, shapes, read, meta.get("tokenizer.chat_template", ""),
                 special("bos_token_id"), special("eos_token_id"))

def gguf_meta(c):
    """The metadata of a Checkpoint's GGUF file.  A value's Python type decides its GGUF type."""
    cfg, s, specials = c.cfg, c.state, c.tokenizer.specials
    type_of = {f.name: f.type for f in fields(Config)}   # a float field stays a float, even 10000
    end = specials.get(s.eos, 0)
    return {**{key: type_of[name](getattr(cfg, name)) for name, _, key in LLAMA if key},
            "general.name": "NanoEuler", "llama.attention.value_length": cfg.head_dim,
            "llama.rope.dimension_count": cfg.head_dim,
            **gguf_of_tokenizer(c.tokenizer),
            "tokenizer.ggml.bos_token_id": specials.get(s.bos, end),
            "tokenizer.ggml.eos_token_id": end,
            "tokenizer.chat_template": (s.template or ALPACA) if s.kind == "chat" else ""}

# The largest number that a GGUF type holds, for types with a smaller range than float32
GGUF_MOST = {"F16": 65504.0, "Q8_0": 127 * 65504.0}      # a block has one F16 scale

def write_gguf(path, c, matrices):
    """Writes a Checkpoint as a GGUF file.  Vectors are float32.  Matrices get the type
    `matrices`, or float16 if their rows are not whole blocks of that type."""
    import gguf
    file = gguf.GGUFWriter(path, "llama")
    kinds = gguf.GGMLQuantizationType
    add = {int: file.add_uint32, float: file.add_float32, bool: file.add_bool,
           str: file.add_string, list: file.add_array}
    for key, value in gguf_meta(c).items():
        add[type(value)](key, value)
    names = gguf_names(c.cfg)
    for name, w in named(c.cfg, c.flat).items():
        if name not in names:
            continue
        kind = kinds[matrices.upper()] if w.ndim > 1 else kinds.F32
        block, _ = gguf.GGML_QUANT_SIZES[kind]
        if w.shape[-1] % block:
            kind = kinds.F16
        most = GGUF_MOST.get(kind.name, math.inf)
        largest = np.abs(w).max()            # `not >` lets a NaN pass
        need(not largest > most, f"{name} has values up to {largest:g}, but {kind.name} stores at "
             f"most {most:g}; use --matrices f32")
        w = gguf.quantize(pairs_of_halves(w, name, c.cfg), kind)
        file.add_tensor(names[name], w, raw_dtype=kind)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
