"""Reads the tokenizers that bpe.py does not implement."""
import bpe
from nanoeuler_parts.tokenizers.added import fill
from nanoeuler_parts.tokenizers.bytelevel import in_old_words, steps_of, word_tokenizer
from nanoeuler_parts.tokenizers.sentencepiece import (
    piece_tokenizer, pieces_of_model, root_of_pieces,
)

def tokenizer_of(root, vocab_size=0):
    """The tokenizer of a tokenizer.json, with names for missing ids below vocab_size.  Errors may
    be of any kind: call it in `reading`."""
    root = fill(root, vocab_size)
    cutting = root.get("pre_tokenizer")
    if (old := in_old_words(cutting)) != cutting:
        return bpe.Tokenizer.from_root({**root, "pre_tokenizer": old})
    by_bytes = any(step.get("type") == "ByteLevel" for step in steps_of(cutting, "pretokenizers"))
    return word_tokenizer(root) if by_bytes else piece_tokenizer(root)

def tokenizer_of_model(data, begins=(), vocab_size=0):
    """The tokenizer of a tokenizer.model, bytes.     begins: names of special tokens"""
    pieces, prefix = pieces_of_model(data)
    return tokenizer_of(root_of_pieces(pieces, prefix, begins), vocab_size)
