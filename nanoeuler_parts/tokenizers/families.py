"""Reads the tokenizers that bpe.py does not implement."""
from nanoeuler_parts.tokenizers.added import fill
from nanoeuler_parts.tokenizers.bytelevel import word_tokenizer

def tokenizer_of(root):
    """The tokenizer of a tokenizer.json.  Errors may be of any kind: call it in `reading`."""
    return word_tokenizer(fill(root))
