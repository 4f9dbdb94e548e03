"""Tokenizers in the files of other programs: tokenizer.json of a Hugging Face model, and GGUF."""
import sys
from typing import NamedTuple

import bpe
from bpe import need
from nanoeuler_parts.files.texts import parse_json
from nanoeuler_parts.interchange.forms import need_form
from nanoeuler_parts.tokenizers.added import fill
from nanoeuler_parts.tokenizers.bytelevel import BYTES, steps_of, WordTokenizer
from nanoeuler_parts.tokenizers.sentencepiece import (
    CONTROL, NEVER, NORMAL, OF_BYTE, PieceTokenizer, root_of_pieces, UNKNOWN, UNUSED, USER_DEFINED,
)
from nanoeuler_parts.tokenizers.words import PATTERNS

# ==== Hugging Face ====
# A model may have more embeddings than its tokenizer has tokens, to make their number a multiple of
# 64 or 128.  If more than this fraction is missing, the files may belong to two models.
MANY_MISSING = 1 / 16

STEP = {"type": str}
STEPS = ({"type": str, "pretokenizers?": [STEP], "normalizers?": [STEP], "processors?": [STEP]},
         type(None))
TOKENIZER = {"model": {"type?": str, "vocab": {str: int}, "merges": [(str, [str])]},
             "added_tokens?": ([{"id": int, "content": str}], type(None)),
             "pre_tokenizer?": STEPS, "normalizer?": STEPS, "post_processor?": STEPS}

def tokenizer_of_json(data, vocab_size, named=()):
    """The tokenizer of a tokenizer.json, bytes, for a model with vocab_size embeddings
    named: names or ids of tokens with a meaning for the model, such as the end of an answer.  They
    are special, even if their entry in added_tokens says otherwise."""
    root = parse_json(data)
    need(isinstance(root, dict), "expected an object")
    kind = root["model"].get("type", "BPE") if isinstance(root.get("model"), dict) else "BPE"
    need(kind == "BPE", f"the model type is {kind!s:.40}, expected BPE")     # others lack merges
    need_form(root, TOKENIZER, "")
    for pair in root["model"]["merges"]:
        parts = pair.split(" ") if isinstance(pair, str) else pair
        need(len(parts) == 2, f"model.merges has {pair!r:.40}, expected two tokens")
    root = {"added_tokens": [], "pre_tokenizer": None, **root}
    cutting = steps_of(root["pre_tokenizer"], "pretokenizers")
    if len(cutting) > 1:                     # without Sequences in Sequences
        root["pre_tokenizer"] = dict(type="Sequence", pretokenizers=cutting)
    if not steps_of(root.get("normalizer"), "normalizers"):          # an empty Sequence
        root["normalizer"] = None
    for token in root["added_tokens"] or ():
        if token["content"] in named or token["id"] in named:
            token["special"] = True
    n = len({*root["model"]["vocab"],
             *(token["content"] for token in root["added_tokens"] or ())})
    if n < (1 - MANY_MISSING) * vocab_size:
        print(f"note: the tokenizer has {n:,} tokens, but the model has {vocab_size:,} embeddings; "
              f"the others get the names <|unused_N|>, and text never makes them",
              file=sys.stderr)
    return bpe.Tokenizer.from_root(fill(root, vocab_size))

# ==== GGUF ====
SPLIT = {pattern: dict(type="Sequence", pretokenizers=[
    dict(type="Split", pattern=dict(Regex=pattern), behavior="Isolated", invert=False), BYTES])
    for pattern in PATTERNS}
LLAMA3, QWEN2, GPT4O, TEKKEN = SPLIT.values()
DIGITS = dict(type="Sequence", pretokenizers=[bpe.EACH_DIGIT, bpe.GPT2_WORDS])

class Pre(NamedTuple):
    """A pre-tokenizer of llama.cpp: the pre_tokenizer of a tokenizer.json that splits alike; does a
    word that is a token need no merges; does <bos> begin a text by default"""
    cutting: dict
    whole: bool = False
    begins: bool = False

# {tokenizer.ggml.pre, which names the pre-tokenizer for llama.cpp: Pre}.  The first name of each
# Pre is the one that `export` writes.  Names: llama-vocab.cpp of llama.cpp, where each stands for
# the regular expressions of its line here; the same table is in transformers 5.24,
# integrations/gguf/gguf_tokenizer_mapping.py.
PRE = {name: pre for names, pre in (
    ("gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling",
     Pre(bpe.GPT2_WORDS)),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b", Pre(DIGITS)),
    ("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2", Pre(LLAMA3, True, True)),
    ("dbrx smaug-bpe glm4 chatglm-bpe", Pre(LLAMA3)),
    ("qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan grok-2", Pre(QWEN2)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", Pre(GPT4O)),
    ("tekken", Pre(TEKKEN, True, True))) for name in names.split()}

# The metadata `tokenizer.ggml.*` that is read
OF_GGUF = {"model": str, "pre?": (str, type(None)), "tokens": [str], "merges?": ([str], type(None)),
           "scores?": [float], "token_type?": ([int], type(None)), "bos_token_id?": int,
           "eos_token_id?": int, "add_bos_token?": bool, "add_eos_token?": bool,
           "add_space_prefix?": bool, "remove_extra_whitespaces?": bool, "eot_token_id?": int,
           "eom_token_id?": int}

ENDS = "bos", "eos", "eot", "eom"           # tokens that begin a text or end an answer

def need_words(words):
    """Checks the metadata of a tokenizer in a GGUF file."""
    need_form(words, OF_GGUF, "tokenizer.ggml")
    n = len(words["tokens"])
    for key in "scores", "token_type":
        size = len(words.get(key) or words["tokens"])
        need(size == n, f"tokenizer.ggml.{key} has {size:,} entries, expected {n:,}, one per token")
    for key in ENDS:
        k = words.get(f"{key}_token_id", 0)
        need(0 <= k < n, f"tokenizer.ggml.{key}_token_id is {k}, expected 0 to {n - 1}")

def tokenizer_of_gguf(words):
    """The tokenizer of the metadata `tokenizer.ggml.*` of a GGUF file"""
    need_words(words)
    model, pre, tokens = words["model"], words.get("pre"), words["tokens"]
    pieces = model == "llama"
    need(pieces or (model == "gpt2" and pre in PRE),
         f"expected the tokenizer llama, or gpt2 with the pre-tokenizer {' or '.join(PRE)}; found "
         f"{model}, {pre}")
    need(not words.get("add_eos_token"), "its tokenizer adds a token after every text "
         "(add_eos_token), expected none")
    adds = words.get("add_bos_token", pieces or PRE[pre].begins)
    need(not adds or "bos_token_id" in words, "it begins texts with a token (add_bos_token), but "
         "tokenizer.ggml.bos_token_id is missing")
    begins = [tokens[words["bos_token_id"]]] if adds else []
    kinds = [*(words.get("token_type") or [NORMAL] * len(tokens))]
    for key in ENDS:                             # special for llama.cpp, too, whatever their type
        k = words.get(f"{key}_token_id")
        if k is not None and kinds[k] == USER_DEFINED:
            kinds[k] = CONTROL
    if pieces:
        need(not words.get("remove_extra_whitespaces"), "its tokenizer removes blanks "
             "(remove_extra_whitespaces), expected none to be removed")
        need("scores" in words, "tokenizer.ggml.scores is missing")
        listed = list(zip(tokens, words["scores"], kinds, strict=True))
        return bpe.Tokenizer.from_root(root_of_pieces(listed, words.get("add_space_prefix", True),
                                                      begins))
    ids = {token: k for k, token in enumerate(tokens)}
    need(len(ids) == len(tokens), "two tokens have the same name")
    cutting, whole, _ = PRE[pre]
    kind_of = dict(zip(tokens, kinds, strict=True))
    specials = {name: k for name, k in ids.items() if kind_of[name] in (UNKNOWN, CONTROL, UNUSED)}
    symbols = {name: k for name, k in ids.items() if kind_of[name] == USER_DEFINED}
    return bpe.Tokenizer.from_root(dict(
        pre_tokenizer=cutting, normalizer=dict(type="NFC") if pre == "qwen2" else None,
        added_tokens=bpe.added_tokens(specials) + bpe.added_tokens(symbols, False),
        post_processor=dict(
            type="TemplateProcessing", special_tokens={name: dict(ids=[ids[name]])
                                                       for name in begins},
            single=[*[dict(SpecialToken=dict(id=name)) for name in begins],
                    dict(Sequence=dict(id="A"))]),
        model=dict(type="BPE", vocab=ids, merges=words.get("merges") or [], ignore_merges=whole)))

def pre_of(tokenizer):
    """The name of the pre-tokenizer for llama.cpp"""
    cutting = DIGITS if tokenizer.digits else bpe.GPT2_WORDS
    if isinstance(tokenizer, WordTokenizer):
        cutting = SPLIT[tokenizer.pattern]
    return next(name for name, pre in PRE.items() if pre.cutting == cutting)

def kind_of_token(tokenizer, name, k):
    """The type of a token in GGUF"""
    if name in tokenizer.specials:
        unused = name == f"<|unused_{k}|>"
        unknown = name == getattr(tokenizer, "unknown", None)
        return UNUSED if unused else UNKNOWN if unknown else CONTROL
    if name in getattr(tokenizer, "symbols", ()):
        return USER_DEFINED
    is_byte = isinstance(tokenizer, PieceTokenizer) and tokenizer.is_byte(k)
    return OF_BYTE if is_byte else NORMAL

def gguf_of_tokenizer(tokenizer):
    """The metadata of a GGUF file for a tokenizer.  A merge of two pieces has no rank there; the
    score of the new piece orders the merges."""
    model = tokenizer.model()
    kinds = [kind_of_token(tokenizer, name, k) for name, k in model["vocab"].items()]
    meta = {"tokens": list(model["vocab"]), "token_type": kinds,
            "add_bos_token": bool(tokenizer.begins)}
    if not isinstance(tokenizer, PieceTokenizer):
        meta |= {"model": "gpt2", "pre": pre_of(tokenizer), "merges": model["merges"]}
    else:
        scores = [-1e6 if kind == NORMAL else 0.0 for kind in kinds]
        for rank, (left, right) in reversed([*enumerate(model["merges"])]):
            scores[model["vocab"][left + right]] = float(-rank)
        meta |= {"model": "llama", "pre": "default", "scores": scores,
                 "add_space_prefix": tokenizer.prefix != NEVER}
        if tokenizer.unknown:
            meta["unknown_token_id"] = model["vocab"][tokenizer.unknown]
    return {f"tokenizer.ggml.{key}": value for key, value in meta.items()}
