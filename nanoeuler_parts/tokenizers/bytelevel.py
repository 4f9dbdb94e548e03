"""Byte-level BPE after other patterns than GPT-2's: the tokenizers of Llama 3, Qwen and GPT-4o."""
import json
import re
import unicodedata

import numpy as np

import bpe
from bpe import need, specials_and_symbols
from nanoeuler_parts.tokenizers.words import (
    CASED, CUT, encode_range, names_of, PATTERNS, PLAIN,
)

BYTES = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)

# ==== NFC ====
# Code points of Unicode 10 to 17 that NFC moves or composes.  The package tokenizers has the NFC of
# Unicode 9, to which these are unknown.  Python's is newer, so the text is split before and after
# each of them.
LATER = re.compile(
    "(["
    "\u05C8\u05C9\u07FD\u0897-\u089F\u08CA-\u08D3\u09FE\u0C3C\u0D3B\u0D3C\u0EBA\u1715"
    "\u1ABF-\u1AF0\u1DF6-\u1DFA\uA82C\U000105D2\U000105DA\U00010D24-\U00010D27"
    "\U00010D69-\U00010D6D\U00010EAB\U00010EAC\U00010ECB-\U00010ECF\U00010EF0-\U00010EFB"
    "\U00010EFD-\U00010EFF\U00010F46-\U00010F50\U00010F82-\U00010F85\U00011070\U0001133B"
    "\U00011382\U00011384\U0001138B\U00011390\U000113B8\U000113BB\U000113C2\U000113C5"
    "\U000113C7-\U000113C9\U000113CE-\U000113D0\U0001145E\U00011839\U0001183A\U00011930"
    "\U0001193D\U0001193E\U00011943\U000119E0\U00011A34\U00011A47\U00011A99\U00011D42"
    "\U00011D44\U00011D45\U00011D97\U00011F41\U00011F42\U0001611E-\U00016129\U0001612F"
    "\U00016D67\U00016D68\U00016FF0\U00016FF1\U0001D127\U0001D128\U0001D250-\U0001D252"
    "\U0001D25B\U0001D25C\U0001D25F\U0001D280\U0001D281\U0001E08F\U0001E130-\U0001E136"
    "\U0001E2AE\U0001E2EC-\U0001E2EF\U0001E4EC-\U0001E4EF\U0001E5EE\U0001E5EF\U0001E6E3"
    "\U0001E6E6\U0001E6EE\U0001E6EF\U0001E6F5"
    "])")

def nfc(text):
    """The text, bytes, in Unicode's normalization form C, as the package tokenizers writes it.
    Invalid bytes stay as they are."""
    if text.isascii():
        return text
    string = text.decode("utf-8", "surrogateescape")
    if unicodedata.is_normalized("NFC", string):
        return text
    parts = [unicodedata.normalize("NFC", part) for part in LATER.split(string)]
    return "".join(parts).encode("utf-8", "surrogateescape")

# ==== The tokenizer ====
class WordTokenizer(bpe.Tokenizer):
    """bpe.Tokenizer with one of PATTERNS.     pattern: the regular expression
    normalizes: whether a text is first normalized by NFC
    whole: whether a word that is a token needs no merges (ignore_merges of Llama 3)"""

    def __init__(self, root, pattern):
        """root: a tokenizer.json, without missing ids"""
        model = root["model"]
        specials, symbols = specials_and_symbols(root)
        added = {**specials, **symbols}
        super().__init__({**model["vocab"], **added}, model["merges"], specials,
                         begins=bpe.begins_of(root.get("post_processor")), symbols=symbols)
        need(set(bpe.CHAR_OF_ID) <= set(model["vocab"]), "expected a token for each byte")
        self.pattern = pattern
        self.normalizes = bool(root.get("normalizer"))
        self.whole = bool(model.get("ignore_merges"))
        byte = dict(zip(bpe.CHAR_OF_ID, bpe.BYTE_OF_ID))
        for name in self.specials.keys() - specials:
            need(self.whole and all(c in byte for c in name),
                 f"no merge makes the token {name!r:.40}")
            self.vocab[self.specials.pop(name)] = bytes(byte[c] for c in name)
        self.check_begins()                 # again: these tokens are no longer special
        self._pattern = PATTERNS[pattern]
        self._classes = CASED if self._pattern.cased else PLAIN
        kept = {*added.values()} if self.whole else range(self.vocab_size)
        self._names = names_of(self.vocab, [k for k in range(self.vocab_size) if k not in kept],
                               self._mix)

    def encode_part(self, text):
        """Ids of a text (N,) uint8 without symbols"""
        if self.normalizes:
            text = bpe.as_array(nfc(text.tobytes()))
        ids = np.empty(len(text), np.int32)

        def encode_range_from(start, end):
            return start, encode_range(ids, text, start, end, self._classes, self._pattern,
                                       self._names, self._byte_id, self._table, self._mix,
                                       self._made)

        return bpe.joined(ids, bpe.of_parts(text, encode_range_from, CUT))

    def hash(self):
        """As bpe.Tokenizer.hash, with the settings of this class"""
        return bpe.sha256_of([bpe.sha256_of(self.form()), self.pattern, self.normalizes,
                              self.whole, [*self.symbols.items()]])

    def model(self):
        """The block `model` of a tokenizer.json"""
        return {**super().model(), "ignore_merges": self.whole}

    def to_json(self):
        """Hugging Face's tokenizer.json, compact"""
        root = json.loads(super().to_json())
        split = dict(type="Split", pattern=dict(Regex=self.pattern), behavior="Isolated",
                     invert=False)
        root["pre_tokenizer"] = dict(type="Sequence", pretokenizers=[split, BYTES])
        root["normalizer"] = dict(type="NFC") if self.normalizes else None
        return json.dumps(root, ensure_ascii=False, separators=(",", ":"))

def steps_of(step, key):
    """The steps of a pre_tokenizer or a normalizer: [step], or those of a Sequence, which may
    contain others or be empty.     key: "pretokenizers" or "normalizers" """
    if not step:
        return []
    if step.get("type") != "Sequence":
        return [step]
    return [inner for part in step[key] for inner in steps_of(part, key)]

def told(step):
    """A step of a pre_tokenizer for an error message: its type, and its pattern if it has one"""
    pattern = step.get("pattern")
    pattern = [*pattern.values()][:1] if isinstance(pattern, dict) else []
    return " ".join([str(step.get("type")), *(f"{text!s:.60}" for text in pattern)])

EACH_NUMBER = dict(type="Split", pattern=dict(Regex=r"\p{N}"), behavior="Isolated", invert=False)

def in_old_words(cutting):
    """The pre_tokenizer, with a Split before and after each digit as the step Digits of bpe.py"""
    steps = [bpe.EACH_DIGIT if {"invert": False, **step} == EACH_NUMBER else step
             for step in steps_of(cutting, "pretokenizers")]
    is_gpt2 = len(steps) > 1 and steps[-1].get("type") == "ByteLevel" and (
        steps[-1].get("use_regex", True))
    return dict(type="Sequence", pretokenizers=steps) if is_gpt2 else cutting

def pattern_of(cutting):
    """The regular expression of a pre_tokenizer with a step ByteLevel, if it is one of PATTERNS"""
    steps = steps_of(cutting, "pretokenizers")
    need(len(steps) == 2 and steps[0].get("type") == "Split",
         f"expected the pre_tokenizer to be one Split and then ByteLevel, found "
         f"{', then '.join(map(told, steps)) or 'no step'}")
    split, words = steps
    behavior = split.get("behavior"), split.get("invert", False)
    pattern = split.get("pattern")
    pattern = pattern.get("Regex") if isinstance(pattern, dict) else None
    need(isinstance(pattern, str) and pattern in PATTERNS, f"expected the pattern of GPT-2, Llama "
         f"3, Qwen2 or GPT-4o, found {str(pattern or split.get('pattern')):.60}")
    need(behavior in (("Isolated", False), ("Removed", True))
         and not words.get("use_regex", True) and not words.get("add_prefix_space", True),
         f"expected the pattern Isolated and then ByteLevel without a prefix space and without a "
         f"pattern, found {json.dumps(cutting):.300}")
    return pattern

def word_tokenizer(root):
    """The WordTokenizer of a tokenizer.json"""
    pattern = pattern_of(root["pre_tokenizer"])
    normalizers = steps_of(root.get("normalizer"), "normalizers")
    need([step.get("type") for step in normalizers] in ([], ["NFC"]),
         f"expected the normalizer NFC or none, found {json.dumps(root.get('normalizer')):.100}")
    root = {**root, "normalizer": normalizers[0] if normalizers else None}
    model = {**root["model"], "ignore_merges": False}
    bpe.check_model({**root, "normalizer": None}, model)
    return WordTokenizer(root, pattern)
