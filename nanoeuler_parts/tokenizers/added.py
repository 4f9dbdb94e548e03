"""The added_tokens of a tokenizer.json, which the tokenizers of this folder share."""
import re

from bpe import added_tokens, ids_of_added, MAX_VOCAB, need

def fill(root, vocab_size=0):
    """Adds a special token <|unused_N|> to a tokenizer.json for each id N that has no token, below
    its largest id and below vocab_size.  A model may have more embeddings than its tokenizer has
    tokens.  `encode` never makes these tokens."""
    used = {*root["model"]["vocab"].values(), *ids_of_added(root).values()}
    need(used and all(type(k) is int and 0 <= k < MAX_VOCAB for k in used),
         f"expected token ids from 0 to {MAX_VOCAB - 1}")
    most = vocab_size or 2 * len(used) + 1000            # without a model's size, gaps are small
    need(max(used) < most, f"expected token ids below {most:,} "
         f"{'in a model of as many embeddings' if vocab_size else f'for {len(used):,} tokens'}, "
         f"found {max(used):,}")
    missing = sorted({*range(max(vocab_size, max(used) + 1))} - used)
    unused = added_tokens({f"<|unused_{k}|>": k for k in missing})
    return {**root, "added_tokens": [*(root.get("added_tokens") or []), *unused]}

def specials_and_symbols(root):
    """({name: id}, {name: id}) of the added tokens.  Special tokens are never made from text.
    Symbols, such as <think> of Qwen3, are: each is one token wherever it occurs."""
    specials, symbols = {}, {}
    for token in root["added_tokens"]:
        name, special = token["content"], token.get("special")
        odd = [flag for flag in ("single_word", "lstrip", "rstrip") if token.get(flag)]
        if token.get("normalized") and root.get("normalizer") and not special:
            odd.append("normalized")
        need(not odd, f"the added token {name} has the flag {', '.join(odd)}, expected none")
        (specials if special else symbols)[name] = token["id"]
    return specials, symbols

def splitter(symbols):
    """Compiled expression that splits bytes at symbols {name: id}: the longest one at each place;
    None without symbols"""
    names = sorted((name.encode() for name in symbols), key=len, reverse=True)
    return re.compile(b"(" + b"|".join(map(re.escape, names)) + b")") if names else None
