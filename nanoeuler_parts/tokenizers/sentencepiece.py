"""BPE as SentencePiece has it: the tokenizers of Llama 2, TinyLlama and Mistral.  A word begins as
characters instead of bytes, and a blank is the character U+2581.  A character without a token
becomes one token per byte (byte fallback), or the unknown token.

`tokenizer_of_model` reads tokenizer.model, a protobuf message (sentencepiece_model.proto)."""
import json
import math
import re
import struct

import numpy as np

import bpe
from bpe import (
    BLANK, char_at, INVALID, merge_word, need, specials_and_symbols, splitter,
)

BAR = "\u2581"                      # a blank in the name of a token
BARS = BAR.encode()
BYTE = re.compile("<0x([0-9A-F]{2})>")                      # the name of a byte's token

# ==== Words ====
# Classes of characters.  A word is a run of blanks, then a run of ordinary characters.
ORDINARY = 0
BLANKS = 1          # the blank and U+2581
ALONE = 2           # no token of several characters contains it, so it is always a word
JOINS = 3           # a token has a blank after it, so no word ends between the two

JIT = dict(files=[bpe.__file__], **bpe.JIT)
INLINE = dict(files=[bpe.__file__], **bpe.INLINE)

@bpe.jit(**INLINE)
def word_end(text, i, end, classes, each_blank):
    """The end of the word at i.  each_blank: whether each blank begins a word"""
    kind, n = char_at(text, i, end, classes)
    i += n
    while i < end and kind != ALONE and kind != INVALID:
        before = kind
        kind, n = char_at(text, i, end, classes)
        if kind == ALONE or kind == INVALID:
            break
        if kind == BLANKS and (before == ORDINARY or each_blank):
            break
        i += n
    return i

@bpe.jit(**INLINE)
def point_at(text, i, n):
    """The code point of the valid UTF-8 character text[i:i + n]"""
    if n == 1:
        return np.int64(text[i])
    point = np.int64(text[i]) & (0x7F >> n)
    for k in range(i + 1, i + n):
        point = (point << 6) | (text[k] & 0x3F)
    return point

@bpe.jit(**INLINE)
def first_ids(out, m, text, i, j, classes, char_id, byte_id, unknown):
    """Writes the ids of the characters of text[i:j] to out[m:]; returns their number."""
    n_ids = 0
    while i < j:
        kind, n = char_at(text, i, j, classes)
        token = -1
        if kind != INVALID:
            token = char_id[point_at(text, i, n)]
        if token >= 0:
            out[m + n_ids] = token
            n_ids += 1
        else:
            has_bytes = True
            for k in range(i, i + n):
                if byte_id[text[k]] < 0:
                    has_bytes = False
            if has_bytes:
                for k in range(i, i + n):
                    out[m + n_ids] = byte_id[text[k]]
                    n_ids += 1
            elif unknown >= 0:
                out[m + n_ids] = unknown
                n_ids += 1
        i += n
    return n_ids

@bpe.jit(**INLINE)
def fused(out, start, end, unknown):
    """Makes each run of unknown tokens in out[start:end] one token; returns where the ids end."""
    m = start
    for k in range(start, end):
        if k == start or out[k] != unknown or out[k - 1] != unknown:
            out[m] = out[k]
            m += 1
    return m

@bpe.jit(**JIT)
def encode_range(out, text, start, end, classes, each_blank, char_id, byte_id, unknown, fuses,
                 table, mix, made):
    """As bpe.encode_range, for words of characters.
    classes (0x140000,) uint8, each_blank: as in word_end
    char_id (0x140000,) int32, byte_id (256,) int32, unknown: ids, -1 for none
    fuses: whether neighbouring unknown characters are one token"""
    bits = int(np.log2(end - start + 1)) - 1
    seen = np.zeros((1 << min(17, max(9, bits)), 4), np.int64)
    used = 0
    i = start
    m = start
    while i < end:
        j = word_end(text, i, end, classes, each_blank)
        row = bpe.row_for_word(seen, mix, text, i, j)
        if seen[row, bpe.END] != 0:
            where = seen[row, bpe.VALUE] >> 8
            n = seen[row, bpe.VALUE] & 255
            for k in range(n):
                out[m + k] = out[where + k]
        else:
            n = first_ids(out, m, text, i, j, classes, char_id, byte_id, unknown)
            n = merge_word(out[m:m + n], table, mix, made)
            if j - i < 256 and 2 * used < len(seen):
                seen[row, bpe.START] = i
                seen[row, bpe.END] = j
                seen[row, bpe.VALUE] = m << 8 | n
                used += 1
        i = j
        m += n
    return fused(out, start, m, unknown) if fuses else m

# ==== The tokenizer ====
# Where a text gets a blank before it
NEVER = "never"
FIRST = "first"             # unless it begins with a blank or follows a token (Metaspace)
MISSING = "always"          # unless it begins with a blank (Metaspace)
ALWAYS = "Prepend"          # before each text and after each symbol (the normalizer Prepend)
ONCE = "once"               # before each text, but not after symbols (sentencepiece)

class PieceTokenizer(bpe.Tokenizer):
    """A tokenizer as bpe.Tokenizer, made of a tokenizer.json.
    symbols: {name: id} of tokens that are made wherever their names occur
    prefix: where a text gets a blank before it     each_blank: whether each blank begins a word"""

    def __init__(self, root, prefix, each_blank):
        """root: a tokenizer.json, without missing ids"""
        model = root["model"]
        self.specials, self.symbols = specials_and_symbols(root)
        self._ids = {**model["vocab"], **self.specials, **self.symbols}
        self._ids = dict(sorted(self._ids.items(), key=lambda item: item[1]))
        names = list(self._ids)
        need([*self._ids.values()] == list(range(len(names))),
             f"expected the ids of {len(names)} tokens to be 0 to {len(names) - 1}, each once")
        need("" not in self._ids, "a token has an empty name")
        self.prefix, self.each_blank, self.digits = prefix, each_blank, False
        self.begins = bpe.begins_of(root.get("post_processor"))
        self.check_begins()
        self.vocab_size = len(names)
        self._pairs = [tuple(m.split(" ") if isinstance(m, str) else m) for m in model["merges"]]
        n = len(self._pairs)
        need(len(set(self._pairs)) == n,
             f"expected unique merges, found {len(set(self._pairs))} unique ones among {n}")
        need(n < bpe.MAX_VOCAB, f"expected at most {bpe.MAX_VOCAB - 1} merges, found {n}")
        id_of = self._ids
        self.merges = [(id_of[left], id_of[right]) for left, right in self._pairs]
        made = [left + right for left, right in self._pairs]
        bad = sorted(self.specials.keys() & {*made})[:3]
        need(not bad, f"special tokens {bad} are also ordinary tokens; choose names like </s>")
        self.unknown = model.get("unk_token")
        self.fuses = bool(model.get("fuse_unk"))
        # ignore_merges: a text that is a token needs no merges
        of_text = {name: k for name, k in model["vocab"].items() if name not in self.specials}
        self.whole = {name.encode(): k for name, k in of_text.items()
                      } if model.get("ignore_merges") else {}
        need(not (self.whole and each_blank), "expected ignore_merges without splits at blanks")
        bytes_of = {name: int(found[1], 16) for name in model["vocab"]
                    if (found := BYTE.fullmatch(name))} if model.get("byte_fallback") else {}
        self.vocab = [bytes([bytes_of[name]]) if name in bytes_of else
                      name.replace(BAR, " ").encode() if name not in self.specials else
                      name.encode() for name in names]
        # arguments of `encode_range`
        self._byte_id = np.full(256, -1, np.int32)
        for name, byte in bytes_of.items():
            self._byte_id[byte] = id_of[name]
        self._char_id = np.full(0x140000, -1, np.int32)
        for name, k in of_text.items():
            if len(name) == 1:
                self._char_id[ord(name)] = k
        self._char_id[BLANK] = self._char_id[ord(BAR)]
        need(self.unknown is not None or (self._byte_id >= 0).all(),
             "expected an unk_token, or byte_fallback with 256 tokens")
        self._unknown = -1 if self.unknown is None else id_of[self.unknown]
        self._classes = np.where(bpe.CLASSES == INVALID, np.uint8(INVALID), np.uint8(ALONE))
        self._classes[[ord(c) for c in {*"".join(made)}]] = ORDINARY
        self._classes[[BLANK, ord(BAR)]] = BLANKS
        joins = {c for name in made for c in re.findall(f"([^{BAR}]){BAR}", name)}
        self._classes[[ord(c) for c in joins]] = JOINS
        # A text may be split into parts before a blank after a visible character of ASCII.
        ends = {*map(chr, range(33, 127))} - joins
        self._cut = re.compile(f"[{re.escape(''.join(sorted(ends)))}](?= )".encode())
        self._split = splitter(self.symbols)
        self._mix = bpe.draw_mix()
        self._table = bpe.pair_table(self.merges, self._mix)
        self._made = np.array([id_of[name] for name in made], np.int32)

    def encode(self, text):
        """Ids, int32, of str or bytes"""
        return self.encode_parts(text, self.prefix != NEVER)

    def encode_after(self, text):
        """The ids of a text that follows other tokens"""
        return self.encode_parts(text, self.prefix in (MISSING, ALWAYS, ONCE))

    def encode_parts(self, text, prefixed):
        """The ids of a text.  prefixed: whether its beginning gets a blank"""
        text = bpe.as_array(text).tobytes()
        if self.prefix == ONCE and text:
            text = b" " + text
            prefixed = False
        parts = self._split.split(text) if self._split else [text]
        ids = []
        for k, part in enumerate(parts):
            if k % 2:
                ids.append(np.array([self.symbols[part.decode()]], np.int32))
                continue
            if k:
                prefixed = self.prefix in (MISSING, ALWAYS)
            begins = part.startswith((b" ", BARS)) and self.prefix != ALWAYS
            ids.append(self.encode_part(b" " + part if part and prefixed and not begins else part))
        return np.concatenate(ids)

    def encode_part(self, text):
        """Ids of bytes without symbols"""
        if self.whole and (k := self.whole.get(text.replace(b" ", BARS))) is not None:
            return np.array([k], np.int32)
        text = bpe.as_array(text)
        ids = np.empty(len(text), np.int32)

        def encode_range_from(start, end):
            return start, encode_range(ids, text, start, end, self._classes, self.each_blank,
                                       self._char_id, self._byte_id, self._unknown, self.fuses,
                                       self._table, self._mix, self._made)

        return bpe.joined(ids, bpe.of_parts(text, encode_range_from, self._cut))

    def decode(self, ids):
        """The bytes of ids, without the blank that `encode` adds"""
        text = super().decode(ids)
        return text.removeprefix(b" ") if self.prefix != NEVER else text

    def spell(self, ids):
        """The bytes of ids that follow other tokens"""
        return super().decode(ids)

    def is_byte(self, k):
        """Whether token k is a byte, for characters without a token"""
        return k in self._byte_id

    def hash(self):
        """SHA-256 in hex of the content of a tokenizer"""
        return bpe.sha256_of([list(self._ids), self._pairs, list(self.specials),
                              list(self.symbols), self.begins, self.prefix, self.each_blank,
                              self.unknown, self.fuses, bool(self.whole),
                              (self._byte_id >= 0).tolist()])

    def model(self):
        """The block `model` of a tokenizer.json"""
        return dict(type="BPE", unk_token=self.unknown, fuse_unk=self.fuses,
                    byte_fallback=bool((self._byte_id >= 0).any()), ignore_merges=bool(self.whole),
                    vocab=self._ids, merges=self._pairs)

    def to_json(self):
        """Hugging Face's tokenizer.json, compact"""
        normalizer = dict(type="Sequence", normalizers=[PREPEND, REPLACE])
        cutting = None
        if self.prefix != ALWAYS:
            normalizer = None
        if self.prefix != ALWAYS or self.each_blank:
            scheme = {ALWAYS: NEVER, ONCE: FIRST}.get(self.prefix, self.prefix)
            cutting = dict(type="Metaspace", replacement=BAR, prepend_scheme=scheme,
                           split=self.each_blank)
        steps = [dict(type="Replace", pattern=dict(String=BAR), content=" "),
                 dict(type="ByteFallback"), dict(type="Fuse")]
        if self.prefix != NEVER:
            steps.append(dict(type="Strip", content=" ", start=1, stop=0))
        root = dict(
            version="1.0", normalizer=normalizer, pre_tokenizer=cutting,
            added_tokens=bpe.added_tokens(self.specials) + bpe.added_tokens(self.symbols, False),
            decoder=dict(type="Sequence", decoders=steps), model=self.model())
        if self.prefix == ONCE:             # tokenizers has no such setting and ignores this entry
            root["prefix"] = ONCE
        if self.begins:
            root["post_processor"] = self.template()
        return json.dumps(root, ensure_ascii=False, separators=(",", ":"))

# ==== Settings of a tokenizer.json ====
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": BAR}
PREPEND = {"type": "Prepend", "prepend": BAR}
# Gemma's pre_tokenizer.  It changes nothing, as no blanks are left.
NO_BLANKS = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
             "invert": False}

def blanks_of(normalizer, cutting):
    """(prefix, each_blank) for the normalizer and the pre_tokenizer of a tokenizer.json"""
    steps = normalizer.get("normalizers", [normalizer]) if normalizer else []
    prefix = NEVER
    if steps[:1] == [PREPEND]:
        prefix, steps = ALWAYS, steps[1:]
    need(steps in ([], [REPLACE]),
         f"expected a normalizer that replaces blanks by U+2581, found "
         f"{json.dumps(normalizer):.300}")
    if cutting in (None, NO_BLANKS):
        need(steps, "expected a normalizer or a pre_tokenizer that replaces blanks by U+2581")
        return prefix, False
    scheme = cutting.get("prepend_scheme", MISSING)
    if cutting.get("add_prefix_space") is False:            # the older name
        scheme = NEVER
    need(cutting["type"] == "Metaspace" and cutting["replacement"] == BAR
         and scheme in (NEVER, FIRST, MISSING) and (prefix == NEVER or scheme == NEVER),
         f"expected the pre_tokenizer Metaspace or none, found {json.dumps(cutting):.300}")
    return (scheme if prefix == NEVER else prefix), bool(cutting.get("split", True))

def piece_tokenizer(root):
    """The PieceTokenizer of a tokenizer.json"""
    prefix, each_blank = blanks_of(root.get("normalizer"), root.get("pre_tokenizer"))
    checked = {**root["model"], "unk_token": None, "ignore_merges": False}
    bpe.check_model({**root, "normalizer": None}, checked)
    return PieceTokenizer(root, ONCE if root.get("prefix") == ONCE else prefix, each_blank)

# ==== tokenizer.model ====
# Types of pieces, here and in GGUF
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, OF_BYTE = range(1, 7)

def merges_of(pieces):
    """The merges [(left, right)] of pieces [(name, score, type)], highest score of the new piece
    first.  Any two neighbours that spell a piece may merge."""
    score_of = {name: score for name, score, kind in pieces if kind in (NORMAL, USER_DEFINED)}
    found = []
    for k, (name, score, kind) in enumerate(pieces):
        for cut in range(1, len(name) if kind == NORMAL else 0):
            left, right = name[:cut], name[cut:]
            if left in score_of and right in score_of:
                found.append((-score, k, left, right))
    return [(left, right) for _, _, left, right in sorted(found)]

def root_of_pieces(pieces, prefix, begins=()):
    """A tokenizer.json for pieces [(name, score, type)].     begins: names"""
    ids = {name: k for k, (name, _, _) in enumerate(pieces)}
    need(len(ids) == len(pieces), "two pieces have the same name")
    need(all(math.isfinite(score) for _, score, _ in pieces), "a score is not finite")
    named = {kind: {name: ids[name] for name, _, k in pieces if k == kind}
             for kind in range(NORMAL, OF_BYTE + 1)}
    specials = {**named[UNKNOWN], **named[CONTROL], **named[UNUSED]}
    has_symbols = bool(named[USER_DEFINED])
    template = [dict(SpecialToken=dict(id=name)) for name in begins]
    return dict(
        prefix=ONCE if prefix and has_symbols else None,
        normalizer=dict(type="Sequence", normalizers=[PREPEND, REPLACE] if prefix else [REPLACE]),
        pre_tokenizer=None,
        added_tokens=bpe.added_tokens(specials) + bpe.added_tokens(named[USER_DEFINED], False),
        post_processor=dict(
            type="TemplateProcessing", single=[*template, dict(Sequence=dict(id="A"))],
            special_tokens={name: dict(ids=[ids[name]]) for name in begins}),
        model=dict(type="BPE", unk_token=next(iter(named[UNKNOWN]), None), fuse_unk=True,
                   byte_fallback=bool(named[OF_BYTE]), vocab=ids, merges=merges_of(pieces)))

def varint(data, i):
    """(number, where it ends) of the varint at i: 7 bits per byte, the last one below 128"""
    value = 0
    for k in range(10):
        need(i + k < len(data), "it ends within a number")
        value |= (data[i + k] & 0x7F) << 7 * k
        if data[i + k] < 0x80:
            return value, i + k + 1
    need(False, "it has a number of more than 10 bytes")

def fields_of(data):
    """Yields (number, value) of the fields of a protobuf message: an int, or bytes."""
    i = 0
    while i < len(data):
        key, i = varint(data, i)
        kind = key & 7
        value, after = varint(data, i) if kind in (0, 2) else (0, i)
        if kind != 0:
            size = {1: 8, 2: value, 5: 4}.get(kind)
            need(size is not None and after + size <= len(data), "it is not a protobuf message, or "
                 "incomplete")
            value, after = data[after:after + size], after + size
        yield key >> 3, value
        i = after

def pieces_of_model(data):
    """(pieces [(name, score, type)], prefix) of a tokenizer.model.  Field numbers are those of
    sentencepiece_model.proto."""
    pieces, trainer, normalizer = [], {}, {}
    for number, value in fields_of(data):
        if number == 1:
            piece = dict(fields_of(value))
            of_score = piece.get(2, bytes(4))
            need(len(of_score) == 4, "a score is not a float")
            score, = struct.unpack("<f", of_score)
            pieces.append((piece[1].decode(), score, piece.get(3, NORMAL)))
        elif number == 2:
            trainer = dict(fields_of(value))
        elif number == 3:
            normalizer = dict(fields_of(value))
    need(pieces, "it has no tokens")
    need(trainer.get(3, 1) == 2, f"its model type is {trainer.get(3, 1)}, expected BPE (2)")
    changes = normalizer.get(2) or normalizer.get(4, 1)     # a character map; extra blanks removed
    need(not changes and normalizer.get(5, 1) and not trainer.get(24, 0),
         "it normalizes the text, or writes blanks after words; expected neither")
    return pieces, bool(normalizer.get(3, 1))
