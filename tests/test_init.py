"""`train --init`: a checkpoint continues on another text."""
import os
import signal

import numpy as np
import pytest
from helpers import before_each_step, FAST, refused, run, TEXT

import nanoeuler as ne
from nanoeuler_parts.checkpoint.bundled import model_path
from nanoeuler_parts.files.logs import read_log
from nanoeuler_parts.runs.evaluation import evaluate
from nanoeuler_parts.runs.run import ESTIMATE
from nanoeuler_parts.runs.options import TrainOptions
from nanoeuler_parts.runs.run import Run

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("one_thread")]
SHORT = "--batch", "64", "--warmup", "2", "--eval-every", "3"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with the checkpoint of a short run, and another text"""
    folder = tmp_path_factory.mktemp("init")
    text = TEXT.read_bytes()
    (folder / "one.txt").write_bytes(text[:30_000])
    (folder / "two.txt").write_bytes(text[500_000:530_000])
    run("train", "--data", folder / "one.txt", *FAST, "--steps", 6, "--out", folder / "base.bin")
    return folder


@pytest.fixture
def here(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in base.iterdir():
        os.link(path, tmp_path / path.name)
    return tmp_path


def test_moments_that_are_not_needed_are_not_read(here, capsys):
    """The moments of the other run are damaged; its parameters are whole."""
    c = ne.read_checkpoint("base.bin")
    ne.write_checkpoint("nan.bin", c.cfg, c.tokenizer, c.state, c.flat,
                        [x * np.nan for x in c.moments])
    refused(capsys, "train", "--resume", "--out", "nan.bin", words=["muon.momentum", "nan"])
    run("train", "--init", "nan.bin", "--data", "two.txt", *SHORT, "--steps", 1, "--out", "x.bin")
    assert ne.read_checkpoint("x.bin").state.step == 1


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_validation_before_step_1_is_that_of_the_checkpoint(dtype, here, capsys):
    """Bit for bit, on the held-out part of the new text.  The tokenizer and the shape stay, the
    moments and the schedule are those of a fresh run."""
    run("train", "--init", "base.bin", "--data", "two.txt", *SHORT, "--steps", 3, "--dtype", dtype,
        "--out", "new.bin")
    said = capsys.readouterr().out
    old, new = ne.read_checkpoint("base.bin"), ne.read_checkpoint("new.bin")
    assert new.cfg == old.cfg and new.tokenizer.hash() == old.tokenizer.hash()
    assert new.state.kind == "base" and new.state.step == new.state.n_steps == 3
    log = read_log("new.jsonl")
    assert log[0]["step"] == 0 and log[0]["val_bits_per_byte"] and "sample" in log[1]
    options = TrainOptions(data="two.txt", dtype=dtype, steps=3).check()
    fresh = Run("x.bin", old._replace(moments=(), state=ne.State()), options)
    model = ne.Model(old.cfg, old.flat, dtype=ne.PRECISIONS[dtype])
    want = evaluate(model, *fresh.data.validation, ESTIMATE, new.state.micro_batch)
    assert log[0]["val_bits_per_byte"] == want
    assert f"step     0  validation {want:.4f} bits/byte (estimate)" in said
    rates = [r["lr"] for r in log if "loss" in r]        # a tenth of a new model's, and warmed up
    assert max(rates) <= 0.1 * 0.004 * 128 / old.cfg.n_embd and rates[0] < rates[1]
    assert new.state.options["muon_lr"] == pytest.approx(0.002)
    trained = [r["val_bits_per_byte"] for r in log if "val_bits_per_byte" in r]
    assert trained[-1] < trained[0]
    assert not np.array_equal(old.flat, new.flat)


def test_a_resumed_run_is_that_of_one_piece(here, monkeypatch):
    """Stopped by Ctrl-C after two steps of four; the flags of the start may be repeated."""
    given = "--init", "base.bin", "--data", "two.txt", *SHORT, "--steps", 4, "--seq-len", 8
    run("train", *given, "--out", "a.bin")
    with monkeypatch.context() as patch:
        before_each_step(patch, lambda r: r.state.step == 1 and signal.raise_signal(signal.SIGINT))
        run("train", *given, "--out", "b.bin")
    assert ne.read_checkpoint("b.bin").state.step == 2
    run("train", "--resume", *given, "--out", "b.bin")
    a, b = (ne.read_checkpoint(x) for x in ("a.bin", "b.bin"))
    assert np.array_equal(a.flat, b.flat) and a.state.step == b.state.step == 4
    assert a.state.options["row_len"] == 8 and a.cfg.seq_len == 16
    assert [r["step"] for r in read_log("b.jsonl")].count(0) == 2


def test_a_row_may_be_shorter_or_longer_than_the_context(here):
    for T, context in ((8, 16), (16, 16), (24, 24)):
        run("train", "--init", "base.bin", "--data", "two.txt", *SHORT, "--steps", 1, "--seq-len",
            T, "--out", "new.bin", "--force")
        new = ne.read_checkpoint("new.bin")
        assert new.cfg.seq_len == context and new.state.tokens_seen == round(64 / T) * T
    run("train", "--resume", "--steps", 2, "--seq-len", 24, "--out", "new.bin")


def test_a_chat_model_stays_one(here):
    c = ne.read_checkpoint("base.bin")
    ne.write_checkpoint("chat.bin", c.cfg, c.tokenizer, ne.State(kind="chat", template=ne.CHATML),
                        c.flat)
    run("train", "--init", "chat.bin", "--data", "two.txt", *SHORT, "--steps", 1, "--out",
        "new.bin")
    new = ne.read_checkpoint("new.bin").state
    assert (new.kind, new.template, new.eos) == ("chat", ne.CHATML, "</s>")


def test_the_bundled_model_continues(here, capsys):
    run("train", "--init", "bundled", "--data", "two.txt", "--batch", 128, "--steps", 1,
        "--seq-len", 64, "--out", "new.bin")
    log = read_log("new.jsonl")
    assert 1 < log[0]["val_bits_per_byte"] < 4
    assert ne.read_checkpoint("new.bin").cfg == ne.read_checkpoint(model_path("bundled")).cfg


def test_what_init_refuses(here, capsys):
    data = "--data", "two.txt", "--out", "new.bin", "--steps", 1
    for args, words in ((("--init", "none.bin"), ["none.bin"]),
                        (("--init", "base.bin", "--n-layer", 7), ["--n-layer 2, not 7", "--init"]),
                        (("big", "--init", "base.bin"), ["own shape", "big"]),
                        (("--init", "new.bin"), ["new.bin"]), (("--init", "two.txt"), ["two.txt"])):
        refused(capsys, "train", *args, *data, words=words)
    refused(capsys, "train", "--init", "base.bin", "--data", "two.txt", "--out", "base.bin",
            "--force", words=["would replace base.bin"])
    run("train", "--init", "base.bin", *data, *SHORT)
    refused(capsys, "train", "--resume", "--init", "bundled", *data, words=["did not start from"])
    run("train", "--init", "base.bin", "--n-layer", 2, "--lr", 1e-3, "--optimizer", "adamw", *data,
        *SHORT, "--force")                   # its own shape
    assert ne.read_checkpoint("new.bin").state.options["lr"] == 1e-3
