"""Names for ids without a token, which the tokenizers of this folder share."""
from bpe import added_tokens, ids_of_added, MAX_VOCAB, need

def fill(root, vocab_size=0):
    """Adds a special token <|unused_N|> to a tokenizer.json for each id N that has no token, below
    its largest id and below vocab_size.  A model may have more embeddings than its tokenizer has
    tokens.  `encode` never makes these tokens."""
    vocab = {**root["model"]["vocab"], **ids_of_added(root)}
    used = {*vocab.values()}
    need(used and all(type(k) is int and 0 <= k < MAX_VOCAB for k in used),
         f"expected token ids from 0 to {MAX_VOCAB - 1}")
    most = vocab_size or 2 * len(used) + 1000            # without a model's size, gaps are small
    need(max(used) < most, f"expected token ids below {most:,} "
         f"{'in a model of as many embeddings' if vocab_size else f'for {len(used):,} tokens'}, "
         f"found {max(used):,}")
    missing = sorted({*range(max(vocab_size, max(used) + 1))} - used)
    unused = {f"<|unused_{k}|>": k for k in missing}
    return {**root, "model": {**root["model"], "vocab": {**vocab, **unused}},
            "added_tokens": [*(root.get("added_tokens") or []), *added_tokens(unused)]}
