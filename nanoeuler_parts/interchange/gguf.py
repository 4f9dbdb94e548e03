"""Writes and reads GGUF files, the format of llama.cpp, for the verbs `export` and `import`.  The
package gguf implements the format."""
import json
import math
import os
import re
from dataclasses import fields, replace

import numpy as np

from bpe import need, note, UserError
from nanoeuler import Config, kept_of_frequency, llama_tensors, rope_frequency
from nanoeuler_parts.chat.templates import ALPACA, ends_of
from nanoeuler_parts.checkpoint.tensors import named
from nanoeuler_parts.files.safetensors import AGAIN, cut_short, note_large, release_pages
from nanoeuler_parts.interchange.forms import reading_form
from nanoeuler_parts.interchange.llama import (
    FAMILIES, Found, growth, kind_of, LLAMA, llama_config, need_llama, need_regular, number_in,
)
from nanoeuler_parts.interchange.tokenizers import gguf_of_tokenizer, tokenizer_of_gguf

def gguf_names(cfg):
    """{name of a tensor in a checkpoint: its name in GGUF}, without the auxiliary heads, for which
    llama.cpp has no place"""
    return {x.name: x.gguf for x in llama_tensors(cfg) if x.gguf}

def pairs_of_halves(w, name, cfg, back=False):
    """RoPE rotates rows i and i + D/2 of a head of q or k.  For the architecture llama, GGUF stores
    the two as rows 2i, 2i + 1.  Reorders w (heads * D, C) for GGUF, or back.  Other tensors and
    those of other architectures stay as they are."""
    heads = {"q_proj": cfg.n_head, "k_proj": cfg.n_kv_head}.get(name.split(".")[-2])
    if heads is None or FAMILIES[kind_of(cfg)].gguf != "llama":
        return w
    split = (heads, -1, 2, w.shape[1]) if back else (heads, 2, -1, w.shape[1])
    return w.reshape(split).swapaxes(1, 2).reshape(w.shape)

def shortest(x):
    """A float32 as the shortest decimal that names it: 1e-5 instead of 9.99999974e-06."""
    return float(str(np.float32(x))) if isinstance(x, float) else x

ENDS = "eos", "eot", "eom"                   # metadata for the tokens that end an answer

# ==== Split files ====
PART = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.gguf")        # as gguf-split of llama.cpp names parts

def parts_of(path, count):
    """The paths of all parts of a split GGUF file of `count` parts, of which `path` is one"""
    name = PART.fullmatch(os.path.basename(path))
    need(name and int(name[3]) == count, f"it is a part of a split GGUF file, so its name must "
         f"end in -00001-of-{count:05}.gguf; rename it, or join the {count} parts with gguf-split "
         f"of llama.cpp")
    paths = [os.path.join(os.path.dirname(path), f"{name[1]}{k:05}-of-{count:05}.gguf")
             for k in range(1, count + 1)]
    missing = [part for part in paths if not os.path.exists(part)]
    need(not missing, f"it is a part of a split GGUF file; expected {count} parts in one directory,"
         f" {os.path.basename(missing[0]) if missing else ''} is missing")
    return paths

def read_gguf(path):
    """({key: value}, {name: tensor}) of a GGUF file, or of all parts of a split one"""
    import gguf

    class Reader(gguf.GGUFReader):
        """The reader of gguf 0.19 with a bounds check.  Without it, a damaged file could make the
        reader allocate lists of any length."""

        def _get(self, offset, dtype, count=1, **order):
            end = int(offset) + int(count) * np.dtype(dtype).itemsize
            need(end <= len(self.data), cut_short(len(self.data), end))
            return super()._get(offset, dtype, count, **order)

    def read(path):
        with reading_form(path, AGAIN):
            need_regular(path)
            with open(path, "rb") as f:
                need(f.read(4) == b"GGUF", "it is not a GGUF file")
            file = Reader(path)
            note_large(f"reading {path}", len(file.data))
            need(sum(t.n_bytes for t in file.tensors) <= len(file.data), "its tensors overlap")
            return {key: x.contents() for key, x in file.fields.items()}, file.tensors

    meta, listed = read(path)
    count = meta.get("split.count", 1)
    need(type(count) is int and 0 <= count < 1 << 16, f"split.count is {count!r:.40}")
    if count > 1:
        parts = [read(part) for part in parts_of(path, count)]
        for k, (of_part, _) in enumerate(parts):
            need(of_part.get("split.count") == count and of_part.get("split.no") == k,
                 f"part {k + 1} of {count} belongs to another split file: it has split.no "
                 f"{of_part.get('split.no')} and split.count {of_part.get('split.count')}")
        meta, listed = parts[0][0], [t for _, tensors in parts for t in tensors]
        total = meta.get("split.tensors.count", len(listed))
        need(total == len(listed), f"expected {total} tensors in all parts, found {len(listed)}")
    stored = {}
    for t in listed:
        need(t.name not in stored, f"two parts have the tensor {t.name}, expected it once")
        stored[t.name] = t
    return meta, stored

def numbers(t, rows):
    """These rows of a tensor's data as floating-point numbers.     t: a ReaderTensor"""
    import gguf
    try:
        return np.array(gguf.dequantize(rows, t.tensor_type))
    except NotImplementedError:
        raise UserError(f"{t.name} has the type {t.tensor_type.name}, expected one that the "
                        f"package gguf converts to numbers, such as F16 or Q4_0") from None

def llama_of_gguf(path):
    """The model of a GGUF file, as a `Found`.     path: the file, or any part of a split file"""
    meta, stored = read_gguf(path)
    words = {key.removeprefix("tokenizer.ggml."): value for key, value in meta.items()
             if key.startswith("tokenizer.ggml.")}
    tokenizer = tokenizer_of_gguf(words)
    tokens = words["tokens"]
    architecture = meta["general.architecture"]
    of_model = {key.removeprefix(f"{architecture}."): shortest(value)
                for key, value in meta.items()}
    template = meta.get("tokenizer.chat_template", "")
    need(isinstance(template, str), f"tokenizer.chat_template is {template!r:.40}, expected a text")
    factors = stored.pop(ROPE_FREQS, None)
    cfg = llama_config({
        **entries_in(architecture, of_model), "vocab_size": len(tokens),
        "tie_word_embeddings": "output.weight" not in stored})
    D = of_model.get("rope.dimension_count", cfg.head_dim)
    need(D == cfg.head_dim, f"RoPE rotates {D} of {cfg.head_dim} dimensions per head, "
         f"expected all of them")
    if factors is not None:
        need(not cfg.rope_scaling, f"expected {ROPE_FREQS} or rope.scaling.type, found both")
        cfg = scaled_by(cfg, numbers(factors, factors.data))
    ours = {theirs: name for name, theirs in gguf_names(cfg).items()}
    tensors = {ours.get(name, name): t for name, t in stored.items()}
    shapes = {name: tuple(t.shape.tolist()[::-1]) for name, t in tensors.items()}

    def read(name, start, stop):
        t = tensors[name]
        is_whole = name.split(".")[-2] in ("q_proj", "k_proj")       # whose rows are reordered
        rows = t.data if is_whole else t.data[start:stop]
        found = pairs_of_halves(numbers(t, rows), name, cfg, back=True)
        release_pages(t.data)
        return found[start:stop] if is_whole else found

    def special(key):
        k = words.get(f"{key}_token_id")
        return "" if k is None else tokens[k]

    eos, *stops = map(special, ENDS)
    return Found(cfg, tokenizer, shapes, read, template, special("bos"), eos,
                 [name for name in dict.fromkeys(stops) if name not in ("", eos)])

def different_ends(c):
    """The ids of the tokens that end an answer of a Checkpoint, each once"""
    return [*dict.fromkeys(ends_of(c.state, c.tokenizer))]

def gguf_meta(c):
    """The metadata of a Checkpoint's GGUF file.  A value's Python type decides its GGUF type."""
    cfg, s, specials = c.cfg, c.state, c.tokenizer.specials
    type_of = {f.name: f.type for f in fields(Config)}   # a float field stays a float, even 10000
    ends = [(f"{key}_token_id", k) for key, k in zip(ENDS, different_ends(c))]
    own = specials.get(s.bos)                # bos_token of a template
    first = next(iter(c.tokenizer.begins), own)          # llama.cpp has one token for both
    begins = [] if first is None else [("bos_token_id", first)]
    template = (s.template or ALPACA) if s.kind == "chat" else ""
    if "bos_token" in template and (own is None or own != first):
        template = f"{{% set bos_token = {json.dumps(s.bos)} %}}{template}"
    of_model = {**{key: type_of[name](getattr(cfg, name)) for name, _, key in LLAMA if key},
                "attention.value_length": cfg.head_dim, "rope.dimension_count": cfg.head_dim,
                **scaling_keys(cfg)}
    if cfg.window:
        of_model["attention.sliding_window"] = cfg.window
    architecture = FAMILIES[kind_of(cfg)].gguf
    return {**{f"{architecture}.{key}": value for key, value in of_model.items()},
            "general.name": "NanoEuler", **gguf_of_tokenizer(c.tokenizer),
            **{f"tokenizer.ggml.{key}": k for key, k in begins + ends},
            "tokenizer.chat_template": template}

# ==== Families and scaled RoPE ====
ROPE_FREQS = "rope_freqs.weight"             # llama3's scaling: a divisor of each frequency
SCALING = "rope.scaling."

# Metadata that llama.cpp needs, too: it has no defaults for them.
NEEDED = ("context_length", "embedding_length", "block_count", "attention.head_count",
          "attention.layer_norm_rms_epsilon")
ROPE = {"dimension_count", "freq_base", "scale_linear", "scaling.type", "scaling.factor",
        "scaling.original_context_length", "scaling.attn_factor", "scaling.yarn_beta_fast",
        "scaling.yarn_beta_slow", "scaling.finetuned"}               # finetuned has no effect

def entries_in(architecture, of_model):
    """The entries of a config.json for the metadata of a GGUF file.
    of_model: without the name of the architecture"""
    kinds = [kind for kind, family in FAMILIES.items() if family.gguf == architecture]
    window = of_model.get("attention.sliding_window")
    kind = kinds[-1 if window else 0] if kinds else architecture         # Mistral is llama, too
    need_llama({"model_type": kind})         # others may lack the metadata below
    for key in NEEDED:
        need(of_model.get(key) is not None, f"its metadata {architecture}.{key} is missing")
    found = {theirs: of_model.get(key) for _, theirs, key in LLAMA if key}
    if found["head_dim"] is None:            # transformers has a default, llama.cpp divides
        found["head_dim"] = found["hidden_size"] // found["num_attention_heads"]
    return {**found, "model_type": kind, "rope_scaling": scaling_in(of_model),
            "sliding_window": window, "use_sliding_window": bool(window), "max_window_layers": 0}

def scaling_in(of_model):
    """The entry rope_scaling of a config.json for the metadata of a GGUF file, with the defaults of
    llama.cpp (load_hparams in llama-model.cpp): without a type, a factor means linear;
    rope.scale_linear is an older name of the factor.     of_model: as in `entries_in`"""
    rope = {key.removeprefix("rope."): value for key, value in of_model.items()
            if key.startswith("rope.")}
    unknown = sorted(rope.keys() - ROPE)[:1]
    need(not unknown, f"its metadata rope.{''.join(unknown)} is not supported; expected RoPE "
         f"without it")
    factor = rope.get("scaling.factor", rope.get("scale_linear"))
    kind = rope.get("scaling.type") or ("none" if factor in (None, 0, 1) else "linear")
    need(kind == "none" or factor is not None, f"its rope.scaling.type is {kind!s:.40}, but "
         f"rope.scaling.factor is missing")
    found = dict(rope_type=kind, factor=factor,
                 original_max_position_embeddings=rope.get("scaling.original_context_length"),
                 beta_fast=rope.get("scaling.yarn_beta_fast"),
                 beta_slow=rope.get("scaling.yarn_beta_slow"))
    attention = rope.get("scaling.attn_factor", 1.0)
    need(kind == "yarn" or attention == 1, f"its rope.scaling.attn_factor is {attention!s:.40} "
         f"without rope.scaling.type yarn, expected 1")
    if kind == "yarn":                       # llama.cpp multiplies the two
        found["attention_factor"] = attention * growth(number_in(found, "factor"))
    return found

def scaling_keys(cfg):
    """The metadata of scaled RoPE, without the name of the architecture"""
    if cfg.rope_scaling in ("", "llama3"):   # llama3: the tensor ROPE_FREQS
        return {}
    found = {"type": cfg.rope_scaling, "factor": cfg.rope_factor}
    if cfg.rope_scaling == "yarn":
        found |= {"original_context_length": cfg.rope_original,
                  "attn_factor": cfg.rope_attention / growth(cfg.rope_factor),
                  "yarn_beta_fast": cfg.rope_high, "yarn_beta_slow": cfg.rope_low}
    return {f"{SCALING}{key}": value for key, value in found.items()}

def rope_factors(cfg):
    """By what llama3's scaling divides each frequency, float32 (D / 2,)"""
    kept = kept_of_frequency(cfg, rope_frequency(cfg))
    return (1 / (kept + (1 - kept) / cfg.rope_factor)).astype(np.float32)

def scaled_by(cfg, factors):
    """The Config whose `rope_factors` are these.  A GGUF file does not have the settings of the
    scaling.  With Llama 3's low and high of 1 and 4, one frequency between them shows the original
    length."""
    wrong = f"expected {ROPE_FREQS} to be the scaling llama3 with frequencies between 1 and 4"
    need(factors.shape == (cfg.head_dim // 2,) and np.isfinite(factors).all()
         and factors.min() >= 1, f"{wrong}; found other numbers")
    factor = float(factors.max())
    if factor == 1:
        return cfg
    kept = (1 / factors - 1 / factor) / (1 - 1 / factor)
    turns, length = 1 + 3 * kept, rope_frequency(cfg) / (2 * math.pi)    # turns = original * length
    between, same = np.flatnonzero((kept > 0.01) & (kept < 0.99)), np.flatnonzero(kept >= 0.99)
    if between.size:
        original = round(float(turns[between[0]] / length[between[0]]))
    else:                                    # the least that keeps all of these
        original = math.ceil(4 / length[same[-1]]) if same.size else 1
    found = replace(cfg, rope_scaling="llama3", rope_factor=factor, rope_low=1.0, rope_high=4.0,
                    rope_original=max(1, original)).check()
    need(np.allclose(rope_factors(found), factors, rtol=1e-4, atol=0), wrong)
    return found

# The largest number that a GGUF type holds, for types with a smaller range than float32
GGUF_MOST = {"F16": 65504.0, "Q8_0": 127 * 65504.0}      # a block has one F16 scale

def write_gguf(path, c, matrices):
    """Writes a Checkpoint as a GGUF file.  Vectors are float32.  Matrices get the type
    `matrices`, or float16 if their rows are not whole blocks of that type."""
    import gguf
    ends = different_ends(c)
    if not 0 < len(ends) <= len(ENDS):
        note(f"GGUF has places for 1 to {len(ENDS)} tokens that end an answer, and this model has "
             f"{len(ends)}; llama.cpp may end answers elsewhere")
    if (n := len(c.tokenizer.begins)) > 1:
        note(f"GGUF has a place for 1 token that begins a text, and this tokenizer has {n}; "
             f"llama.cpp adds the first one alone")
    if c.cfg.n_mtp > 1:
        note(f"GGUF has no place for auxiliary output heads, so {c.cfg.n_mtp - 1} of this model "
             f"are left out; llama.cpp does not need them")
    file = gguf.GGUFWriter(path, FAMILIES[kind_of(c.cfg)].gguf)
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
    if c.cfg.rope_scaling == "llama3":
        file.add_tensor(ROPE_FREQS, rope_factors(c.cfg))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
