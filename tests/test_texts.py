"""Texts: windows, splits, tokens kept in a file, and texts that nothing can be learned from."""
import json
import os
import tracemalloc
import re
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import FAST, ROOT, TEXT, drawn, refused, run
from hypothesis import given
from hypothesis import strategies as st

import bpe
import nanoeuler as ne
from nanoeuler_parts.files.safetensors import map_tensors, TOKEN_KINDS, write_tensors
from nanoeuler_parts.files.texts import encode_cut, excerpt, read_text, split_text, tokenize
from nanoeuler_parts.kernels import compile_kernels

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]


# ---- 7 data
@drawn(60)
@given(n=st.integers(20, 400), T=st.integers(1, 10), P=st.integers(1, 4), seed=st.integers(0, 5))
def test_batches_take_every_window_once_an_epoch(n, T, P, seed):
    batches = ne.Batches(np.arange(n, dtype=np.int32), T, P, seed)

    def start(i):
        _, window, phase = batches.entry(i)
        return window * T + phase

    for epoch in range(3):
        starts = sorted(start(epoch * batches.n + i) for i in range(batches.n))
        assert np.all(np.diff(starts) == T) and 0 <= starts[0] < T and starts[-1] + T < n
    tokens, targets = batches.take(5, 7)
    assert tokens.shape == (7, T) and targets.shape == (P, 7, T)
    for b in range(7):
        s = start(5 + b)
        assert np.array_equal(tokens[b], np.arange(s, s + T))
        for k in range(P):
            want = np.arange(s + 1 + k, s + 1 + k + T)
            assert np.array_equal(targets[k, b], np.where(want < n, want, -1))


def test_the_cursor_is_one_number():
    """Any window, in any order, from a new object: the same as in sequence."""
    tokens = np.random.default_rng(1).integers(0, 99, 500).astype(np.int32)
    sequence = ne.Batches(tokens, 8, 2, 3)
    rows = [sequence.take(i, 1)[0] for i in range(200)]
    for i in (199, 0, 61, 60, 120, 3):
        assert np.array_equal(ne.Batches(tokens, 8, 2, 3).take(i, 1)[0], rows[i])
    other = ne.Batches(tokens, 8, 2, 4)
    for first in (0, sequence.n):            # no epoch of one seed is one of the next seed
        assert any(not np.array_equal(other.take(i, 1)[0], rows[first + i]) for i in range(5))


def test_loss_weights_by_hand():
    targets = np.array([[1, 2, 3, 4], [1, 2, -1, -1], [5, -1, -1, -1], [-1] * 4])
    assert ne.loss_weights(targets, 0.3) == pytest.approx([1 / 4, 0.1 / 2, 0.1 / 1, 0.1])
    assert ne.loss_weights(targets[:1], 0.3) == pytest.approx([1 / 4])


@given(text=st.binary(min_size=1, max_size=200), holdout=st.floats(0.001, 0.9))
def test_split_text(text, holdout):
    train, val = split_text(text, holdout)
    assert train + val == text


def test_split_text_does_not_cut_a_character():
    text = "\u00e9\u4e2d\U0001f600" * 50
    for holdout in np.linspace(0.01, 0.9, 50):
        train, val = split_text(text.encode(), holdout)
        assert train.decode() + val.decode() == text


@pytest.mark.parametrize("data, words", [
    (b"\xef\xbb\xbfTo be.\n", ["byte order mark"]), (b"To be,\r\nor not.\r\n", ["CR LF"]),
    (b"\xef\xbb\xbfTo be,\r\n", ["byte order mark", "CR LF"]), (b"To be,\nor\rnot.\n", [])])
def test_what_editors_leave_in_a_text_is_said_and_learned(data, words, tmp_path, capsys):
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    assert bytes(read_text(str(path))) == data
    said = capsys.readouterr().err
    assert said.count("\n") == (1 if words else 0) and all(word in said for word in words), said
    assert not words or said.startswith(f"note: {path} ") and "--newlines unix" in said


# ---- tokens of a large text, kept in a file
@pytest.fixture
def large(tmp_path, monkeypatch):
    """A text beyond LARGE, which is made smaller, and what `tokenize` needs."""
    monkeypatch.setattr("nanoeuler_parts.files.texts.LARGE", 10_000)
    path = tmp_path / "large.txt"
    path.write_bytes(TEXT.read_bytes()[:30_000])
    text = read_text(str(path))
    return str(path), split_text(memoryview(text), 0.1), bpe.train(text[:5000], 300), "ab" * 32


def stored(path):
    files = [f for f in os.listdir(os.path.dirname(path)) if f.endswith(".tokens")]
    return [os.path.join(os.path.dirname(path), f) for f in files]


def test_the_token_file_holds_the_tokens(large):
    path, parts, tokenizer, _ = large
    want = [tokenizer.encode(bytes(x)) for x in parts]
    for _ in range(2):                       # written, then read
        for got, x in zip(tokenize(*large), want):
            assert np.array_equal(got, x) and got.dtype == np.uint16
    [file] = stored(path)
    assert os.path.getsize(file) < 2 * sum(map(len, want)) + 1000
    batches = [ne.Batches(x, 16, 2, 1).take(3, 4) for x in (tokenize(*large)[0], want[0])]
    for got, x in zip(*batches):
        assert np.array_equal(got, x) and got.dtype == np.int32


@pytest.mark.parametrize("ids", [[300], [1, -1], [[1, 2]], [1 << 30]])
def test_a_cache_with_odd_ids_is_made_again(ids, large, capsys):
    """Its checksum is right."""
    want = tokenize(*large)
    [file] = stored(large[0])
    meta, tensors = map_tensors(file, TOKEN_KINDS)
    del meta["sha256"]
    odd = {**tensors, "val": np.array(ids, np.int32)}
    write_tensors(file, meta, odd, "")
    capsys.readouterr()
    for got, x in zip(tokenize(*large), want):
        assert np.array_equal(got, x)
    assert f"{file}: expected " in (said := capsys.readouterr().err)
    assert "; the text is tokenized again" in said
    for got, x in zip(tokenize(*large), want):
        assert np.array_equal(got, x)
    assert capsys.readouterr().err == ""


def test_another_split_tokenizer_or_text_has_another_file(large):
    path, parts, tokenizer, digest = large
    text = b"".join(map(bytes, parts))
    for other in (large, (path, split_text(text, 0.2), tokenizer, digest),
                  (path, parts, bpe.train(text, 290), digest), (path, parts, tokenizer, "cd" * 32),
                  (*large, 0.1, 1), (*large, 0.1, 2), (*large, 0.2, 1)):
        tokenize(*other)
    assert len(stored(path)) == 7
    tokenize(*large, 0.0, 2)              # without cuts no seed matters
    assert len(stored(path)) == 7


def test_cuts_are_of_the_training_part_alone(large):
    path, parts, tokenizer, _ = large
    (train, val), (cut, same), (again, _) = (tokenize(*large, cuts, 1) for cuts in (0, 0.1, 0.1))
    assert np.array_equal(val, same) and np.array_equal(cut, again)
    assert len(cut) > len(train) and tokenizer.decode(cut) == bytes(parts[0])


def test_a_text_is_cut_where_no_token_reaches_across(large):
    """Also a text with zero bytes, which stay; `encode_cut` inserts a zero byte at each cut."""
    tokenizer, rng = large[2], np.random.default_rng(1)
    for symbols, size in ((b"ab \0", 200), (b"\0", 50), (b"to be or not ", 300), (b"a", 1)):
        text = rng.choice(np.frombuffer(symbols, np.uint8), size).tobytes()
        whole, inside = [*tokenizer.encode(text)], 0
        for share in (0.01, 0.1, 1.0):
            ids = encode_cut(tokenizer, text, share, rng)
            assert tokenizer.decode(ids) == text and len(ids) >= len(whole)
            inside += len(ids) > len(whole)
        assert inside or size == 1 or symbols == b"\0"


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "renamed", "text", "directory"])
def test_a_damaged_token_file_is_made_again(damage, large, capsys):
    path, parts, tokenizer, digest = large
    want = [x.copy() for x in tokenize(*large)]
    [file] = stored(path)
    raw = open(file, "rb").read()
    if damage == "renamed":                  # whole, but of another text
        tokenize(path, parts, tokenizer, "cd" * 32)
        [other] = set(stored(path)) - {file}
        os.replace(other, file)
    elif damage == "directory":
        os.remove(file)
        os.mkdir(file)
    else:
        raw = {"cut": raw[:-2], "flipped": raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:],
               "empty": b"", "text": b"To be, or not to be, that is"}[damage]
        open(file, "wb").write(raw)
    capsys.readouterr()
    for got, x in zip(tokenize(*large), want):
        assert np.array_equal(got, x)
    said = capsys.readouterr()
    assert "once" in said.out and ("note: cannot write" in said.err) == (damage == "directory")
    tokenize(*large)
    assert ("once" in capsys.readouterr().out) == (damage == "directory")


@pytest.mark.parametrize("V, dtype", [(1 << 16, np.uint16), ((1 << 16) + 1, np.int32)])
def test_a_token_file_has_room_for_the_last_id(V, dtype, large):
    path, parts, _, digest = large
    tokenizer = SimpleNamespace(
        vocab_size=V, begins=(), hash=lambda: "x",
        encode=lambda text: np.full(len(text), V - 1, np.int32))
    for _ in range(2):                       # written, then read
        for ids in tokenize(path, parts, tokenizer, digest):
            assert ids.dtype == dtype and len(ids) and (ids == V - 1).all()


def test_a_text_is_encoded_so_much_at_a_time(large, monkeypatch):
    """To the same tokens, and with cuts to the same text; four bytes a byte of it are not there."""
    path, parts, tokenizer, _ = large
    want = [tokenizer.encode(bytes(x)) for x in parts]
    monkeypatch.setattr("nanoeuler_parts.files.texts.TEXT_AT_ONCE", 700)
    for _ in range(2):                       # written, then read
        for got, ids in zip(tokenize(*large), want):
            assert np.array_equal(got, ids) and got.dtype == np.uint16
    cut, _ = tokenize(*large, 0.1, 1)
    assert len(cut) > len(want[0]) and tokenizer.decode(cut) == bytes(parts[0])
    text = memoryview(TEXT.read_bytes())
    monkeypatch.setattr("nanoeuler_parts.files.texts.TEXT_AT_ONCE", 100_000)
    tracemalloc.start()
    tokenize(path, (text, text[:0]), tokenizer, "ef" * 32)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < len(text)


def test_no_place_for_the_tokens_of_a_text_is_said(large, monkeypatch):
    path, *others = large
    monkeypatch.setattr("nanoeuler_parts.files.texts.TEXT_AT_ONCE", 700)
    with pytest.raises(ne.UserError, match="nowhere.*: No such file or directory; free disk space"):
        tokenize(os.path.join(os.path.dirname(path), "nowhere", "a.txt"), *others)


# ---- large texts
def test_an_excerpt_is_whole_lines_from_everywhere(monkeypatch):
    text = b"".join(b"line %06d\n" % i for i in range(20_000))
    assert excerpt(text) == text
    monkeypatch.setattr("nanoeuler_parts.files.texts.LARGE", 40_000)
    part = excerpt(memoryview(text), pieces=100)
    lines = part.splitlines()
    assert 30_000 < len(part) <= 40_000 and all(len(x) == 11 for x in lines)
    numbers = np.array([int(x[5:]) for x in lines])
    assert np.all(np.diff(numbers) > 0) and np.bincount(numbers // 2000).min() > 250
    assert len(excerpt(b"x" * 100_000, pieces=100)) == 40_000           # no line ends at all


@pytest.mark.parametrize("at", [0, 9_999, 10_000, 25_000])
def test_invalid_utf8_is_found_in_any_piece(at, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("nanoeuler_parts.files.texts.LARGE", 10_000)
    text = ("\u00e9" * 15_000).encode()      # two bytes each: pieces begin inside of characters
    text = b"x" + text[:at - at % 2] + b"\xff" + text[at - at % 2:]
    (tmp_path / "a.txt").write_bytes(text)
    assert read_text(str(tmp_path / "a.txt"))[:] == text
    assert f"not valid UTF-8 at byte {1 + at - at % 2};" in capsys.readouterr().err
    (tmp_path / "a.txt").write_bytes(text.replace(b"\xff", b""))
    read_text(str(tmp_path / "a.txt"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("size", [9_999, 10_000, 20_000])
def test_half_a_character_at_the_end_is_invalid(size, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("nanoeuler_parts.files.texts.LARGE", 10_000)
    (tmp_path / "a.txt").write_bytes(b"x" * (size - 1) + b"\xc3")
    read_text(str(tmp_path / "a.txt"))
    said = capsys.readouterr().err
    assert f"not valid UTF-8 at byte {size - 1};" in said and "iconv -f LATIN1 -t UTF-8" in said


# ---- texts as users have them: `main` in this process
@pytest.mark.parametrize("name, data, words", [
    ("empty.txt", b"", ["empty", "--data"]),
    ("blank.txt", b" \n\n \t", ["only white space", "--data"]),
    ("zero.txt", b"text and\0binary", ["expected text", "zero byte at position 8", "--data"]),
    ("first.txt", b"\0 and text", ["expected text", "zero byte at position 0", "--data"]),
    ("short.txt", b"too short", []),
    ("one.txt", b"x", []),
    ("short2.txt", b"To be, or not to be, that is the question. " * 4, ["--seq-len"]),
])
def test_bad_texts(name, data, words, elsewhere, capsys):
    (elsewhere / name).write_bytes(data)
    line = refused(capsys, "train", "--data", name, "--steps", 2, words=words)
    assert name in line or "tokens" in line
    assert os.listdir() == [name]                        # nothing was written


def test_a_text_shorter_than_the_context_names_one_that_fits(elsewhere, capsys):
    (elsewhere / "a.txt").write_bytes(b"To be, or not to be, that is the question. " * 4)
    line = refused(capsys, "train", "--data", "a.txt", "--steps", 2)
    n = re.search(r"--seq-len (\d+)", line)[1]
    run("train", "--data", "a.txt", "--steps", 2, "--seq-len", n)


def test_missing_text_and_directory(elsewhere, capsys):
    refused(capsys, "train", "--data", "none.txt", words=["none.txt", "--data"])
    refused(capsys, "train", "--data", ".", words=["--data"])
    assert os.listdir() == []


def test_no_default_text_at_all(elsewhere, capsys, monkeypatch):
    monkeypatch.setattr(ne, "__file__", str(elsewhere / "nanoeuler.py"))
    refused(capsys, "train", "--steps", 1, words=["data/shakespeare.txt", "--data"])


def test_the_text_that_ships_is_found_from_anywhere(text, tmp_path, capsys, monkeypatch):
    """Beside the program if the folder has none; what is stored is its name: it can be resumed
    from any folder, and when program and text have moved together."""
    compile_kernels()
    home, moved, here = (tmp_path / name for name in ("home", "moved", "here"))
    (home / "data").mkdir(parents=True)
    here.mkdir()
    (home / "data/shakespeare.txt").write_bytes(text.read_bytes())
    monkeypatch.setattr(ne, "__file__", str(home / "nanoeuler.py"))
    monkeypatch.chdir(here)
    flags = [*FAST[:-4], "--out", here / "a.bin"]
    refused(capsys, "train", "--data", "data/shakespeare.txt", *flags,
            words=["data/shakespeare.txt: No such file", "--data"])
    run("train", "--steps", 2, *flags)
    assert f"  text             {home}/data/shakespeare.txt, 40,000" in capsys.readouterr().out
    assert ne.read_checkpoint(here / "a.bin").state.options["data"] == "data/shakespeare.txt"
    home.rename(moved)
    monkeypatch.setattr(ne, "__file__", str(moved / "nanoeuler.py"))
    for folder, steps, path in ((here, 3, f"{moved}/data/shakespeare.txt"),
                                (moved, 4, "data/shakespeare.txt")):
        monkeypatch.chdir(folder)
        run("train", "--resume", "--steps", steps, "--out", here / "a.bin")
        assert f"  text             {path}, 40,000" in capsys.readouterr().out
    assert ne.read_checkpoint(here / "a.bin").state.step == 4
    (here / "data").mkdir()                  # a text of one's own goes first
    (here / "data/shakespeare.txt").write_bytes(text.read_bytes()[:30_000])
    monkeypatch.chdir(here)
    run("train", "--steps", 1, *flags[:-1], here / "b.bin")
    assert "  text             data/shakespeare.txt, 30,000" in capsys.readouterr().out
    refused(capsys, "train", "--resume", "--steps", 5, "--out", here / "a.bin",
            words=["data/shakespeare.txt has changed", "sha256"])


def test_invalid_utf8_is_named_and_learned(elsewhere, capfd):
    data = TEXT.read_bytes()[:5000] + b"\xff\xfe\xc3" + TEXT.read_bytes()[5000:20_000]
    (elsewhere / "a.txt").write_bytes(data)
    run("train", "--data", "a.txt", "--steps", 2, *FAST)
    note = [s for s in capfd.readouterr().err.splitlines() if s]
    assert len(note) == 1 and "a.txt" in note[0] and "5000" in note[0] and "UTF-8" in note[0]
    c = ne.read_checkpoint("nanoeuler.bin")
    assert c.tokenizer.decode(c.tokenizer.encode(data)) == data


def test_a_text_may_move_but_not_change(text, copy, monkeypatch, capsys):
    monkeypatch.chdir(copy)
    (copy / "moved.txt").write_bytes(text.read_bytes())
    (copy / "other.txt").write_bytes(text.read_bytes()[1:])
    run("train", "--resume", "--steps", 21, "--data", "moved.txt")
    refused(capsys, "train", "--resume", "--steps", 22, "--data", "other.txt",
            words=["nanoeuler.bin trains on moved.txt", "other.txt", "--out"])
    run("train", "--resume", "--steps", 22)              # where it was last


def test_changed_text_on_resume(trained, text, tmp_path, monkeypatch, capsys):
    other, c = tmp_path / "mine.txt", ne.read_checkpoint(str(trained / "nanoeuler.bin"))
    other.write_bytes(text.read_bytes() + b"one line more\n")
    c.state.options["data"] = str(other)
    ne.write_checkpoint(str(tmp_path / "a.bin"), c.cfg, c.tokenizer, c.state, c.flat, c.moments)
    monkeypatch.chdir(tmp_path)
    refused(capsys, "train", "--resume", "--steps", 30, "--out", "a.bin",
            words=[other, "sha256", "--out"])
    other.unlink()
    refused(capsys, "train", "--resume", "--steps", 30, "--out", "a.bin", words=[other, "--data"])


# ---- lines of records
# What str.splitlines cuts at besides \n, and JSON allows inside a string
NO_ENDS = "\x85\u2028\u2029"


def log_records(path):
    from nanoeuler_parts.files.logs import read_log
    return [r["sample"] for r in read_log(path)]


def page_records(path):
    from nanoeuler_parts.serve.runs import Runs, latest_step
    with open(path, "rb") as f:
        assert latest_step(f, path.stat().st_size)["step"] == 2
    return [r["sample"] for r in Runs(path.parent).read(path.name, 0)["records"]]


def example_records(path):
    from nanoeuler_parts.tuning.examples import read_entries
    return [e["sample"] for _, e in read_entries(path, "")[0]]


def prompt_records(path):
    from nanoeuler_parts.chat.prompts import prompts_in
    speaker = SimpleNamespace(ids_of=lambda text: text, shortened=lambda ids, truncate: ids)
    return [record["sample"] for record, _ in prompts_in(path, speaker, False)]


def corpus_records(path):
    from nanoeuler_parts.files.corpora import documents_of_lines
    return [text.decode() for text in documents_of_lines(path, "sample")]


@pytest.mark.parametrize("read", [log_records, page_records, example_records, prompt_records,
                                  corpus_records])
def test_a_record_ends_at_a_line_feed_alone(tmp_path, read):
    """A false record inside the string of a real one stays a string."""
    path = tmp_path / "a.jsonl"
    texts = [f"a{NO_ENDS}b", f'{NO_ENDS[1]}{{"step": 9, "sample": "false", "loss": 1}}{NO_ENDS}']
    path.write_bytes(b"".join(json.dumps(
        {"step": i + 1, "loss": 1.0, "sample": text, "prompt": text}, ensure_ascii=False).encode()
        + end for i, (text, end) in enumerate(zip(texts, (b"\r\n", b"\n"), strict=True))))
    assert read(path) == texts


def test_no_reader_of_records_uses_splitlines():
    """It may cut what people read: the messages of other programs, and a text for TensorBoard."""
    allowed = {"nanoeuler_cuda.py", "machine/kernels.py", "gpu/doctor.py", "files/sinks.py"}
    files = [*ROOT.glob("*.py"), *(ROOT / "nanoeuler_parts").rglob("*.py"),
             *(ROOT / "data").glob("*.py")]
    users = {str(path.relative_to(ROOT)).removeprefix("nanoeuler_parts/") for path in files
             if ".splitlines(" in path.read_text(encoding="utf-8")}
    assert users <= allowed
