"""Names and settings of this model as a Llama, Mistral, Qwen2 or Qwen3, in config.json and in GGUF.
`export` and `import` use them."""
import math
import os
from collections import namedtuple
from dataclasses import replace
from typing import NamedTuple

from bpe import need, read_bytes
from nanoeuler import Config
from nanoeuler_parts.files.safetensors import AGAIN
from nanoeuler_parts.files.texts import parse_json
from nanoeuler_parts.interchange.forms import need_form, reading_form

def need_regular(path):
    """Rejects pipes and devices: reading one might never end."""
    need(os.path.isfile(path) or not os.path.exists(path), "it is not a regular file")

# Hugging Face stores a model in a directory, llama.cpp in one file (GGUF).  Each field of Config
# has a name in config.json and a name in GGUF, where the name of the architecture precedes it.
LLAMA = [("n_embd", "hidden_size", "embedding_length"),            # Config, config.json, GGUF
         ("n_hidden", "intermediate_size", "feed_forward_length"),
         ("n_layer", "num_hidden_layers", "block_count"),
         ("n_head", "num_attention_heads", "attention.head_count"),
         ("n_kv_head", "num_key_value_heads", "attention.head_count_kv"),
         ("head_dim", "head_dim", "attention.key_length"),
         ("seq_len", "max_position_embeddings", "context_length"),
         ("vocab_size", "vocab_size", "vocab_size"),
         ("rope_theta", "rope_theta", "rope.freq_base"),
         ("norm_eps", "rms_norm_eps", "attention.layer_norm_rms_epsilon"),
         ("tie_embeddings", "tie_word_embeddings", "")]

class Family(NamedTuple):
    """A kind of model that nanoeuler.py computes"""
    name: str
    architecture: str        # its class in transformers
    gguf: str                # general.architecture in GGUF
    defaults: dict           # what transformers assumes for missing entries of config.json

QWEN = dict(max_position_embeddings=32768, num_key_value_heads=32, use_sliding_window=False,
            sliding_window=4096, max_window_layers=28)
FAMILIES = {                 # model_type in config.json
    "llama": Family("Llama", "LlamaForCausalLM", "llama", dict(max_position_embeddings=2048)),
    "mistral": Family("Mistral", "MistralForCausalLM", "llama", dict(
        max_position_embeddings=131072, num_key_value_heads=8, sliding_window=4096)),
    "qwen2": Family("Qwen2", "Qwen2ForCausalLM", "qwen2", QWEN),
    "qwen3": Family("Qwen3", "Qwen3ForCausalLM", "qwen3", {**QWEN, "head_dim": 128})}
# COMPUTED: the values of config.json that nanoeuler.py implements.  DEFAULTS: as Family.defaults,
# for all of them.
COMPUTED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
            "partial_rotary_factor": 1}
DEFAULTS = {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
REMEDY = "free space or choose another path"

# The form of a config.json.  Config.check examines the values of the shape.
MAY_BE_NULL = {"head_dim?": (int, type(None)), "sliding_window?": (int, type(None)),
               "num_key_value_heads?": (int, type(None)), "rope_theta?": (float, type(None)),
               "rope_scaling?": (dict, type(None)), "rope_parameters?": (dict, type(None)),
               "max_window_layers?": (int, type(None)), "layer_types?": ([str], type(None)),
               "original_max_position_embeddings?": (int, type(None)),
               "tie_word_embeddings?": (bool, type(None)),
               "use_sliding_window?": (bool, type(None))}
ENTRIES = {"hidden_size": int, "num_attention_heads": int, "num_hidden_layers": int, **MAY_BE_NULL}
# Entries that transformers reads from rope_parameters first, and else from config.json
OF_ROPE = "rope_theta", "partial_rotary_factor"

# A model to import.  shapes: {name: shape} of its tensors.  read(name, start, stop): these rows of
# one of them, in float32.  eos, stops: names of the tokens that end an answer
Found = namedtuple("Found", "cfg tokenizer shapes read template bos eos stops", defaults=[()])

def kind_of(cfg):
    """The model_type of a Config"""
    need(not (cfg.qkv_bias and cfg.qk_norm), "no architecture of transformers has both biases of "
         "q, k, v (Qwen2) and norms of q and k (Qwen3); expected one of them")
    return ("qwen3" if cfg.qk_norm else "qwen2" if cfg.qkv_bias else
            "mistral" if cfg.window else "llama")

def need_llama(config):
    """Rejects other kinds of models first, since they may lack entries that a Llama has."""
    kind = config.get("model_type")
    found = config.get("architectures") or kind
    if isinstance(found, list):
        found = ", ".join(map(str, found))
    need(kind, "its model_type is missing")
    names = ", ".join(family.name for family in FAMILIES.values())
    is_known = isinstance(kind, str) and kind in FAMILIES
    need(is_known, f"expected one of {names}, found {found!s:.80}")

def llama_config(entries, n_mtp=1):
    """The Config for the entries of a config.json.  Rejects values that nanoeuler.py does not
    implement.  Missing entries get the defaults of transformers."""
    need_llama(entries)
    need_form(entries, ENTRIES, "")
    kind, n_head = entries["model_type"], entries["num_attention_heads"]
    rope = rope_entries(entries)
    c = {**COMPUTED, **DEFAULTS, "num_key_value_heads": n_head,
         "head_dim": entries["hidden_size"] // max(1, n_head), "sliding_window": None,
         **FAMILIES[kind].defaults}
    c.update((key, value) for key, value in entries.items() if value is not None)
    c.update((key, rope[key]) for key in OF_ROPE if rope.get(key) is not None)
    for key in "sliding_window", "num_key_value_heads":  # null is not the default
        if key in entries:
            c[key] = entries[key] or {"num_key_value_heads": n_head}.get(key)
    for key, expected in COMPUTED.items():
        need(c[key] == expected, f"its {key} is {c[key]}, expected {expected}")
    need(not c.get("quantization_config"),
         "expected unquantized weights, found a quantization_config")
    cfg = Config(n_mtp=n_mtp, qkv_bias=kind == "qwen2", qk_norm=kind == "qwen3",
                 **scaling_of(c, rope), **{ours: c[theirs] for ours, theirs, _ in LLAMA}).check()
    return replace(cfg, window=window_of(c)).check()     # now the number of layers is a real one

# ==== Sliding windows ====
FULL, SLIDING = "full_attention", "sliding_attention"

def window_of(c):
    """The sliding window of all layers; None if they attend to all earlier tokens.
    c: the entries of a config.json, with defaults"""
    kind, n_layer, window = c["model_type"], c["num_hidden_layers"], c["sliding_window"]
    if kind.startswith("qwen") and not c["use_sliding_window"]:
        window = None
    need(window is None or type(window) is int and window > 0,
         f"its sliding_window is {window!r}, expected a positive number of tokens or null")
    has_effect = window is None or window < c["max_position_embeddings"]
    window = window if has_effect else None
    need(kind != "llama" or window is None, f"its sliding_window is {window}, less than its "
         f"context of {c['max_position_embeddings']}, but a Llama has none")
    first = c["max_window_layers"] if kind.startswith("qwen") else 0     # layer with a window
    types = c.get("layer_types") or [SLIDING if window and i >= first else FULL
                                     for i in range(n_layer)]
    need(len(types) == n_layer, f"its layer_types has {len(types)} entries, expected {n_layer}")
    found = {*map(str, types)}
    need(found in ({FULL}, {SLIDING}) or found == {FULL, SLIDING} and not has_effect,
         f"its layer_types are {', '.join(sorted(found))}, expected {FULL} or {SLIDING} for all "
         f"layers")
    return window if types[0] == SLIDING else None

# ==== Scaled RoPE ====
def rope_entries(entries):
    """The entries of RoPE in a config.json, {} if there are none: rope_scaling of older files, or
    else rope_parameters, as in transformers 5.  There may be one block per type of layer."""
    rope = entries.get("rope_scaling") or entries.get("rope_parameters") or {}
    blocks = [rope[kind] for kind in (FULL, SLIDING) if rope.get(kind)]
    need(blocks == blocks[:1] * len(blocks), "its layers have different RoPE parameters, expected "
         "the same for all")
    found = blocks[0] if blocks else rope
    need(isinstance(found, dict), f"its RoPE parameters are {found!r:.40}, expected an object")
    return found

def number_in(rope, name, default=None):
    value = default if rope.get(name) is None else rope[name]
    need(type(value) in (int, float) and math.isfinite(value), f"rope_scaling: {name} is "
         f"{value!r}, expected a number")
    return float(value)

def scaling_of(c, rope):
    """The fields of Config for scaled RoPE, {} if RoPE is not scaled.  See `kept_of_frequency` in
    nanoeuler.py.    rope: from `rope_entries`"""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind in ("default", "none"):
        return {}
    need(kind in ("linear", "llama3", "yarn"),
         f"its rope_type is {kind!s:.40}, expected default, linear, llama3 or yarn")
    # Here config.json itself takes precedence (standardize_rope_params of transformers 5.24)
    name = "original_max_position_embeddings"
    original = int(number_in(c if c.get(name) else rope, name, c["max_position_embeddings"]))
    factor = None
    if kind == "yarn" and "factor" in rope and original > 0:         # null: growth of the context
        factor = c["max_position_embeddings"] / original
    found = dict(rope_scaling=kind, rope_factor=number_in(rope, "factor", factor))
    if kind == "linear":
        return found
    found["rope_original"] = original
    if kind == "llama3":
        return {**found, "rope_low": number_in(rope, "low_freq_factor"),
                "rope_high": number_in(rope, "high_freq_factor")}
    need(rope.get("truncate", True) is True, "rope_scaling: truncate is false, expected true")
    return {**found, "rope_low": number_in(rope, "beta_slow", 1) or 1.0,
            "rope_high": number_in(rope, "beta_fast", 32) or 32.0,
            "rope_attention": yarn_attention(rope, found["rope_factor"])}

def growth(factor, mscale=1.0):
    """By how much yarn multiplies cos and sin (Peng et al. 2023, 3.4)"""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

def yarn_attention(rope, factor):
    if rope.get("attention_factor") is not None:
        return number_in(rope, "attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        scales = (number_in(rope, name) for name in ("mscale", "mscale_all_dim"))
        above, below = (growth(factor, scale) for scale in scales)
        return above / below
    return growth(factor)

def rope_scaling(cfg):
    """The entry rope_scaling of a config.json; None if RoPE is not scaled"""
    if not cfg.rope_scaling:
        return None
    found = dict(rope_type=cfg.rope_scaling, factor=cfg.rope_factor)
    if cfg.rope_scaling == "linear":
        return found
    found["original_max_position_embeddings"] = cfg.rope_original
    if cfg.rope_scaling == "llama3":
        return {**found, "low_freq_factor": cfg.rope_low, "high_freq_factor": cfg.rope_high}
    return {**found, "beta_slow": cfg.rope_low, "beta_fast": cfg.rope_high,
            "attention_factor": cfg.rope_attention}

def entries_of(cfg):
    """The entries of a config.json for a Config"""
    kind, n_layer = kind_of(cfg), cfg.n_layer
    family = FAMILIES[kind]
    found = {"architectures": [family.architecture], "model_type": kind,
             **{theirs: getattr(cfg, ours) for ours, theirs, _ in LLAMA},
             "rope_scaling": rope_scaling(cfg), "hidden_act": "silu"}
    if kind == "mistral":
        found["sliding_window"] = cfg.window
    if kind.startswith("qwen"):
        found |= {"use_sliding_window": bool(cfg.window), "sliding_window": cfg.window,
                  "max_window_layers": 0 if cfg.window else n_layer}
    return found

def json_of(path):
    with reading_form(path, AGAIN):
        return parse_json(read_bytes(path))
