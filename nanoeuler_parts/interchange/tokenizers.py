"""Tokenizers in the files of other programs: the folder of a Hugging Face model, and GGUF."""
import json

import bpe
from bpe import need, read_bytes
from nanoeuler_parts.tokenizers.added import fill
from nanoeuler_parts.tokenizers.bytelevel import BYTES, WordTokenizer
from nanoeuler_parts.tokenizers.families import tokenizer_of_model
from nanoeuler_parts.tokenizers.sentencepiece import (
    CONTROL, NEVER, NORMAL, OF_BYTE, PieceTokenizer, root_of_pieces, UNKNOWN, UNUSED, USER_DEFINED,
)
from nanoeuler_parts.tokenizers.words import PATTERNS

# A model may have a few more embeddings than its tokenizer has tokens, to make their number a
# multiple of 64 or 128.  If more than this fraction is missing, the files belong to two models.
MOST_MISSING = 1 / 16

def tokenizer_of_root(root, vocab_size):
    """The tokenizer of a tokenizer.json for a model with vocab_size embeddings"""
    n = len({*root["model"]["vocab"], *(token["content"] for token in root["added_tokens"] or ())})
    need((1 - MOST_MISSING) * vocab_size <= n, f"its tokenizer has {n} tokens, but its model has "
         f"{vocab_size}")
    return bpe.Tokenizer.from_root(fill(root, vocab_size))

# ==== Hugging Face ====
def tokenizer_of_folder(at, words, vocab_size):
    """The tokenizer of a model's folder, from tokenizer.json, or else from tokenizer.model.
    words: tokenizer_config.json, whose add_bos_token takes precedence over tokenizer.json"""
    need(not words.get("add_eos_token"), "its tokenizer adds a token after every text "
         "(add_eos_token), expected none")
    bos, adds = words.get("bos_token"), words.get("add_bos_token")
    bos = bos["content"] if isinstance(bos, dict) else bos
    if not (at / "tokenizer.json").exists() and (at / "tokenizer.model").exists():
        begins = [bos or "<s>"] if adds in (None, True) else []      # as LlamaTokenizer does
        return tokenizer_of_model(read_bytes(at / "tokenizer.model"), begins, vocab_size)
    with bpe.reading(at / "tokenizer.json", "download it again"):
        root = json.loads(read_bytes(at / "tokenizer.json").decode())
        root.setdefault("added_tokens", [])
        tokenizer = tokenizer_of_root(root, vocab_size)
    if adds is False or (adds and not bos):
        tokenizer.begins = ()
    elif adds:
        need(bos in tokenizer.specials, f"its bos_token {bos!r:.40} is not a special token")
        tokenizer.begins = (tokenizer.specials[bos],)
    return tokenizer

# ==== GGUF ====
SPLIT = {pattern: dict(type="Sequence", pretokenizers=[
    dict(type="Split", pattern=dict(Regex=pattern), behavior="Isolated", invert=False), BYTES])
    for pattern in PATTERNS}
LLAMA3, QWEN2, GPT4O, TEKKEN = SPLIT.values()
DIGITS = dict(type="Sequence", pretokenizers=[bpe.EACH_DIGIT, bpe.GPT2_WORDS])
# tokenizer.ggml.pre, which names the pre-tokenizer for llama.cpp: (pre_tokenizer of a
# tokenizer.json, does a word that is a token need no merges, does <bos> begin a text by default)
PRE = {"gpt-2": (bpe.GPT2_WORDS, False, False), "smollm": (DIGITS, False, False),
       "llama-bpe": (LLAMA3, True, True), "qwen2": (QWEN2, False, False),
       "gpt-4o": (GPT4O, False, False), "tekken": (TEKKEN, True, True)}

def tokenizer_of_gguf(words):
    """The tokenizer of the metadata `tokenizer.ggml.*` of a GGUF file"""
    model, pre, tokens = words.get("model"), words.get("pre"), words.get("tokens")
    pieces = model == "llama"
    need(pieces or (model == "gpt2" and pre in PRE),
         f"expected the tokenizer llama, or gpt2 with the pre-tokenizer {' or '.join(PRE)}; found "
         f"{model}, {pre}")
    need(not words.get("add_eos_token"), "its tokenizer adds a token after every text "
         "(add_eos_token), expected none")
    adds = words.get("add_bos_token", pieces or PRE[pre][2])
    begins = [tokens[words["bos_token_id"]]] if adds else []
    kinds = words.get("token_type") or [NORMAL] * len(tokens)
    if pieces:
        need(not words.get("remove_extra_whitespaces"), "its tokenizer removes blanks "
             "(remove_extra_whitespaces), expected none to be removed")
        listed = list(zip(tokens, words["scores"], kinds, strict=True))
        return bpe.Tokenizer.from_root(root_of_pieces(listed, words.get("add_space_prefix", True),
                                                      begins))
    ids = {token: k for k, token in enumerate(tokens)}
    need(len(ids) == len(tokens), "two tokens have the same name")
    if pre in ("gpt-2", "smollm"):              # any name that no merge makes is special
        tokenizer = bpe.Tokenizer(ids, words.get("merges") or (), digits=pre == "smollm")
        need(all(name in tokenizer.specials for name in begins), "its BOS is an ordinary token")
        tokenizer.begins = tuple(ids[name] for name in begins)
        return tokenizer
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
    return next(name for name, (steps, _, _) in PRE.items() if steps == cutting)

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
