"""Files that an earlier commit (50304cf) wrote: today's program reads them and goes on with them.

tests/golden/ holds a text, the checkpoint and the log of four steps on it, and its tokens.
"""
import hashlib
import shutil

import numpy as np
import pytest
from helpers import ROOT, run

import nanoeuler as ne
from nanoeuler_parts.files.logs import read_log
from nanoeuler_parts.files.texts import read_text, split_text, tokenize

pytestmark = pytest.mark.interop
GOLDEN = ROOT / "tests" / "golden"
CONFIG = ne.Config(n_embd=4, n_head=2, n_kv_head=1, head_dim=2, n_layer=1, n_hidden=6, seq_len=16,
                   vocab_size=280, n_mtp=2)
DIGESTS = ["b2891f5d2ef56b7c", "c426819b8ea4ada6", "c110022ba95880a8"]
TOKENIZER = "59e3bb35d9e49a0fea6a357500482b36e4fa344064ef194c6d0c7cfa7bdc41f7"
# of two more steps, by that commit: bits per byte of the held-out text, sums of |w|, |m|, |v|
BITS, SUMS = 5.7623764, [1057.96, 2.93034, 0.114491]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, path in (("checkpoint", "golden.bin"), ("log", "golden.jsonl"),
                       ("text.txt", "text.txt"), ("tokens", "text.txt.c596ee024529.tokens")):
        shutil.copy(GOLDEN / name, tmp_path / path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_checkpoint_is_read_to_the_bit(folder):
    c = ne.read_checkpoint("golden.bin")
    assert c.cfg == CONFIG and c.tokenizer.hash() == TOKENIZER
    assert (c.state.step, c.state.n_steps, c.state.tokens_seen) == (4, 4, 256)
    assert [hashlib.sha256(x).hexdigest()[:16] for x in (c.flat, *c.moments)] == DIGESTS


def test_a_run_goes_on(folder):
    """To rounding: another processor sums in vectors of another width."""
    run("train", "--resume", "--steps", 6, "--out", "golden.bin")
    c = ne.read_checkpoint("golden.bin")
    assert c.state.step == 6 and c.state.bits_per_byte == pytest.approx(BITS, rel=1e-5)
    sums = [float(np.abs(x).sum()) for x in (c.flat, *c.moments)]
    assert sums == pytest.approx(SUMS, rel=1e-4)
    assert [r["step"] for r in read_log("golden.jsonl") if "loss" in r] == [1, 2, 3, 4, 5, 6]


def test_kept_tokens_are_found(folder, monkeypatch, capsys):
    # bytes; those of a shorter text are not kept
    monkeypatch.setattr("nanoeuler_parts.files.texts.LARGE", 1000)
    text = read_text("text.txt")
    train, val = parts = split_text(text, 0.2)
    tokenizer = ne.read_checkpoint("golden.bin").tokenizer
    found = tokenize("text.txt", parts, tokenizer, hashlib.sha256(text).hexdigest())
    assert "tokenizing" not in capsys.readouterr().out
    for ids, part in zip(found, (train, val), strict=True):
        assert np.array_equal(ids, tokenizer.encode(bytes(part)))
