"""GGUF, the one file in which llama.cpp keeps a model, in and out of a checkpoint.

The package gguf, an extra, knows its types of numbers.  Called by export and import.
"""
import json
from dataclasses import fields

import gguf
import numpy as np

import bpe
from bpe import need
from data.chats import ALPACA
from nanoeuler import LLAMA, Config, llama_config, named, tensor_shapes

PRE = ["gpt-2", "smollm"]                    # tokenizer.ggml.pre: many digits a word, or one

def gguf_names(cfg):
    """Our name of a tensor -> its name in GGUF."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, cfg.n_layer)
    return {name: names.get_name(name, (".weight",)) for name in tensor_shapes(cfg)}

def neighbours(w, name, cfg, back=False):
    """RoPE turns rows i and i + D/2 of a head of q or k; in GGUF those are rows 2i and 2i + 1."""
    heads = {"q_proj": cfg.n_head, "k_proj": cfg.n_kv_head}.get(name.split(".")[-2])
    halves = (-1, 2) if back else (2, -1)
    return w.reshape(heads, *halves, w.shape[1]).swapaxes(1, 2).reshape(w.shape) if heads else w

def llama_of_gguf(path):
    """As `llama_of_folder`."""
    class Reader(gguf.GGUFReader):
        def _get(self, offset, dtype, count=1, **order):     # believes no length beyond the end
            need(offset + int(count) <= len(self.data), "it ends too early")
            return super()._get(offset, dtype, count, **order)

    f = Reader(path)
    meta = {key: x.contents() for key, x in f.fields.items()}
    need(sum(t.n_bytes for t in f.tensors) <= len(f.data), "its tensors overlap")
    word = lambda key: meta.get(f"tokenizer.ggml.{key}")
    tokens, pre, scaling = word("tokens"), word("pre"), meta.get("llama.rope.scaling.type")
    need(word("model") == "gpt2" and pre in PRE and not word("add_bos_token"),
         f"its tokenizer is {word('model')} {pre}, expected gpt2 {' or '.join(PRE)}, without a "
         f"token before every text")
    short = lambda x: float(str(np.float32(x))) if isinstance(x, float) else x       # 1e-5 again
    cfg = llama_config({**{hf: short(meta.get(key)) for _, hf, key in LLAMA},
                        "vocab_size": len(tokens), "model_type": meta["general.architecture"],
                        "rope_type": "default" if scaling in (None, "none") else scaling,
                        "tie_word_embeddings": all(t.name != "output.weight" for t in f.tensors)})
    D = meta.get("llama.rope.dimension_count", cfg.head_dim)
    need(D == cfg.head_dim, f"RoPE turns {D} of {cfg.head_dim} numbers of a head")
    ours = {theirs: name for name, theirs in gguf_names(cfg).items()}
    tensors = {ours.get(t.name, t.name): t for t in f.tensors}
    shapes = {name: (*t.shape.tolist()[::-1],) for name, t in tensors.items()}

    def read(name):
        t = tensors[name]
        return neighbours(gguf.dequantize(t.data, t.tensor_type), name, cfg, back=True)

    tokenizer = bpe.Tokenizer({t: k for k, t in enumerate(tokens)}, word("merges") or (),
                              digits=pre == PRE[1])
    ends = ("" if k is None else tokens[k] for k in (word("bos_token_id"), word("eos_token_id")))
    return cfg, tokenizer, shapes, read, (meta.get("tokenizer.chat_template", ""), *ends)

def write_gguf(path, c, matrices):
    """A GGUF file of a Checkpoint; vectors are float32, rows of no whole blocks float16."""
    cfg, s, words = c.cfg, c.state, c.tokenizer.specials
    model = json.loads(c.tokenizer.to_json())["model"]
    types = {f.name: f.type for f in fields(Config)}     # an int is a float where that is expected
    meta = {**{key: types[name](getattr(cfg, name)) for name, _, key in LLAMA if key},
            "general.name": "NanoEuler", "llama.attention.value_length": cfg.head_dim,
            "llama.rope.dimension_count": cfg.head_dim,
            "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": PRE[c.tokenizer.digits],
            "tokenizer.ggml.tokens": list(model["vocab"]),
            "tokenizer.ggml.token_type": [3 if t in words else 1 for t in model["vocab"]],
            "tokenizer.ggml.merges": model["merges"], "tokenizer.ggml.add_bos_token": False,
            "tokenizer.ggml.bos_token_id": words.get(s.bos, words.get(s.eos, 0)),
            "tokenizer.ggml.eos_token_id": words.get(s.eos, 0),
            "tokenizer.chat_template": (s.template or ALPACA) if s.kind == "chat" else ""}
    f, kinds = gguf.GGUFWriter(path, "llama"), gguf.GGMLQuantizationType
    add = {int: f.add_uint32, float: f.add_float32, bool: f.add_bool, str: f.add_string,
           list: f.add_array}
    for key, v in meta.items():
        add[type(v)](key, v)
    names = gguf_names(cfg)
    for name, w in named(cfg, c.flat).items():
        if not name.startswith("mtp."):
            kind = kinds[matrices.upper()] if w.ndim > 1 else kinds.F32
            kind = kinds.F16 if w.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] else kind
            w = gguf.quantize(neighbours(w, name, cfg), kind)
            f.add_tensor(names[name], w, raw_dtype=kind)
    f.write_header_to_file()
    f.write_kv_data_to_file()
    f.write_tensors_to_file()
    f.close()
