"""Names and settings of this model as a Llama, in config.json and in GGUF.  `export` and `import`
use them."""
import os
from collections import namedtuple

from bpe import need, read_bytes, reading
from nanoeuler import Config
from nanoeuler_parts.files.safetensors import AGAIN
from nanoeuler_parts.files.texts import parse_json

def need_regular(path):
    """Rejects pipes and devices: reading one might never end."""
    need(os.path.isfile(path) or not os.path.exists(path), "it is not a regular file")

# Hugging Face stores a model in a directory, llama.cpp in one file (GGUF).  In both, the model of
# nanoeuler.py is a Llama.  Each field of Config has a name in config.json and a name in GGUF.
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
# COMPUTED: the values of config.json that nanoeuler.py implements.  DEFAULTS: what transformers
# assumes for missing entries.
COMPUTED = {"model_type": "llama", "rope_type": "default", "hidden_act": "silu",
            "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1}
DEFAULTS = {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048,
            "tie_word_embeddings": False}
REMEDY = "free space or choose another path"

# A model to import.  shapes: {name: shape} of its tensors.  read(name) returns one of them.
Found = namedtuple("Found", "cfg tokenizer shapes read template bos eos")

def need_llama(config):
    """Rejects other kinds of models first, since they may lack entries that a Llama has."""
    kind = config.get("model_type")
    found = config.get("architectures") or kind
    if isinstance(found, list):
        found = ", ".join(map(str, found))
    need(kind, "its model_type is missing")
    need(kind == "llama", f"expected a Llama, found {found!s:.80}")

def llama_config(entries, n_mtp=1):
    """The Config for the entries of a config.json.  Rejects values that nanoeuler.py does not
    implement.  Missing entries get the defaults of transformers.  The entries of RoPE may be in a
    block of their own."""
    need_llama(entries)
    rope = entries.get("rope_parameters") or entries.get("rope_scaling") or {}
    n_head = entries["num_attention_heads"]
    c = {**COMPUTED, **DEFAULTS, "num_key_value_heads": n_head,
         "head_dim": entries["hidden_size"] // n_head}
    c["rope_type"] = rope.get("type", "default")         # the older name of rope_type
    c.update(rope)
    c.update((key, value) for key, value in entries.items() if value is not None)
    for key, expected in COMPUTED.items():
        need(c[key] == expected, f"its {key} is {c[key]}, expected {expected}")
    need(not c.get("quantization_config"),
         "expected unquantized weights, found a quantization_config")
    kinds, window = set(c.get("layer_types", ())), c.get("sliding_window")
    need(kinds <= {"full_attention"}, f"its layer_types are {', '.join(map(str, kinds))}, expected "
         f"full_attention")
    need(window is None or window >= c["max_position_embeddings"], f"its sliding_window is "
         f"{window}, less than its context of {c['max_position_embeddings']}")
    return Config(n_mtp=n_mtp, **{ours: c[theirs] for ours, theirs, _ in LLAMA}).check()

def json_of(path):
    with reading(path, AGAIN):
        return parse_json(read_bytes(path))
