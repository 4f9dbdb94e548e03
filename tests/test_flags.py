"""The command line: flags, verbs, and how they end."""
import os
import re
import shutil

import pytest
from helpers import nanoeuler, ok, refused, run, told
from numba import config, get_num_threads, set_num_threads

import nanoeuler as ne

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- flags
ABSURD = {
    "steps": ["-1"], "batch": ["0", "-3", "9999999999"], "micro-batch": ["-1"],
    "lr": ["nan", "0", "-1", "inf", "1e300"], "warmup": ["-1"], "floor": ["2"], "beta1": ["1"],
    "beta2": ["nan"], "clip": ["0", "-1"], "mtp-weight": ["-1"], "weight-decay": ["nan"],
    "holdout": ["0", "1", "nan"], "eval-every": ["0"], "save-every": ["0"],
    "minutes": ["0", "nan", "-1"],
    "seed": ["-1"], "seq-len": ["0", "-5", "999999999"], "vocab-size": ["0", "100", "99999999"],
    "n-mtp": ["0", "17"], "threads": ["-1", "9999"]}


@pytest.mark.parametrize("flags", [[f"--{k}", v] for k in ABSURD for v in ABSURD[k]], ids="=".join)
def test_absurd_flags(flags, text, elsewhere, capsys):
    name = flags[0][2:].replace("-", "_")
    code = ne.main(["train", "--data", str(text), "--steps", "1", *flags])
    lines = capsys.readouterr().err.splitlines()
    assert code == 2 and len(lines) == 1, (code, lines)
    assert name in lines[0] or flags[0] in lines[0], lines
    assert os.listdir() == []


@pytest.mark.parametrize("flags", [["--steps", "x"], ["--steps", "1e3"], ["--lr", "fast"],
                                   ["--nonsense"], ["huge"]])
def test_flags_that_are_no_numbers(flags, elsewhere, capsys):
    refused(capsys, "train", *flags)


@pytest.mark.parametrize("flags, words", [
    (["--lr", "0.5"], ["lr", "0.5"]), (["--batch", "128"], ["batch", "128", "64"]),
    (["--seq-len", "32"], ["seq_len", "32", "16"]), (["--n-mtp", "1"], ["n_mtp"]),
    (["--vocab-size", "300"], ["vocab_size"]), (["--seed", "7"], ["seed", "7"])])
def test_changed_flags_on_resume(flags, words, copy, monkeypatch, capsys):
    monkeypatch.chdir(copy)
    before = (copy / "nanoeuler.bin").read_bytes()
    refused(capsys, "train", "--resume", "--steps", 30, *flags, words=[*words, "--out"])
    assert (copy / "nanoeuler.bin").read_bytes() == before


def test_same_flags_on_resume_are_fine(copy, monkeypatch):
    monkeypatch.chdir(copy)
    run("train", "small", "--resume", "--steps", 21, "--batch", 64)
    assert ne.read_checkpoint("nanoeuler.bin").state.step == 21


def test_what_no_flag_changes_or_replaces(trained, text, elsewhere, capsys):
    shutil.copy(trained / "nanoeuler.bin", elsewhere)
    (elsewhere / "folder").mkdir()
    refused(capsys, "train", "big", "--resume", words=["n_embd", "320", "--out"])
    refused(capsys, "train", "--data", text, "--out", "folder", "--force", words=["folder exists"])


def test_files_may_stand_behind_flags(copy, monkeypatch, capsys):
    monkeypatch.chdir(copy)
    (copy / "nanoeuler.bin").rename(copy / "mine.bin")
    flags = ("--tokens", 3, "--threads", 1)
    said = {told("generate", *args) for args in (
        ("To", *flags, "mine.bin"), (*flags, "To", "mine.bin"), ("To", "mine.bin", *flags))}
    assert len(said) == 1
    refused(capsys, "generate", "To", *flags, words=["nanoeuler.bin"])
    (copy / "text.txt").write_bytes(b"a b a b")
    for args in (("train", "--vocab-size", 258, "text.txt"), ("encode", "--tokenizer",
                                                              "tokenizer.json", "text.txt")):
        assert ok(nanoeuler(*args, cwd=copy, program="bpe.py"))


def test_a_prompt_may_look_like_a_flag(copy, monkeypatch, capsys):
    monkeypatch.chdir(copy)
    args = ["generate", "--tokens", "0", "--threads", "1", "--", "--help", "nanoeuler.bin"]
    assert ne.main(args) == 0 and capsys.readouterr().out == "--help\n"


# ---- verbs
@pytest.mark.parametrize("error, code, line", [
    (KeyboardInterrupt(), 130, ""), (MemoryError("9 GiB"), 2, "out of memory (9 GiB); use a small"),
    (OSError(5, "Input/output error", "a.bin"), 2, "a.bin: Input/output error; see --out")])
def test_how_a_verb_ends(error, code, line, monkeypatch, capsys):
    def fail(*args, **flags):
        raise error

    monkeypatch.setattr(ne, "chat", fail)
    assert ne.main(["chat", "--threads", "1"]) == code
    said = capsys.readouterr().err
    assert line in said and len(said.splitlines()) == bool(line)


def test_threads_are_as_many_as_asked_for(capsys, monkeypatch):
    most, counts = config.NUMBA_NUM_THREADS, []
    monkeypatch.setattr(ne, "compile_kernels", lambda *dtype: counts.append(get_num_threads()))
    monkeypatch.setattr(ne, "physical_cores", lambda: most)
    for flags in (["--threads", "1"], []):
        set_num_threads(most)
        assert ne.main(["compile", *flags]) == 0
    assert counts == [1, most]
    assert ne.main(["compile", "--threads", f"{most + 1}"]) == 2 and len(counts) == 2
    assert f"--threads is {most + 1}, expected 0 to {most}" in capsys.readouterr().err


def test_every_verb_has_help(capsys):
    def text(*args):
        with pytest.raises(SystemExit) as e:
            ne.main([*args, "--help"])
        assert e.value.code == 0
        return " ".join(capsys.readouterr().out.split())

    verbs = ("train", "sft", "dpo", "chat", "generate", "lens", "plot", "info", "compile")
    assert all(f" {verb} " in text() and "--threads" in text(verb) for verb in verbs)
    for verb, settings in (("train", ne.TrainOptions), ("sft", ne.SftOptions),
                           ("dpo", ne.DpoOptions), ("chat", ne.Sampling),
                           ("generate", ne.Sampling)):
        parts = dict(re.findall(r" (--\S+) [A-Z_0-9]+ (.*?)(?= --\S+ [A-Z_0-9]+ |$)", text(verb)))
        for name, f in settings.__dataclass_fields__.items():
            assert f"(default: {f.default})" in parts["--" + name.replace("_", "-")], (verb, name)


def test_no_more_threads_than_may_be_kept_busy(monkeypatch):
    """A control group's quota counts for what nobody asked for, too."""
    monkeypatch.setattr(ne, "most_threads", lambda: 1)
    monkeypatch.setattr(ne, "physical_cores", lambda: 2)
    ne.use_threads(0)
    assert get_num_threads() == 1
