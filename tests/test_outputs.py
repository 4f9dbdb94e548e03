"""What runs write: checkpoints and logs replace nothing of others, and survive a full disk."""
import contextlib
import errno
import io
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import (
    FAST,
    ROOT,
    SMALL,
    after_each_step,
    before_each_step,
    command,
    complains,
    nanoeuler,
    never,
    ok,
    outcome,
    refused,
    run,
    signalled,
    told,
)

import bpe
import nanoeuler as ne
from nanoeuler_parts.checkpoint.file import open_checkpoint, params_in
from nanoeuler_parts.files import safetensors, texts
from nanoeuler_parts.files.logs import (
    alone, log_identity, log_path, numbered_logs, open_log, read_log,
)
from nanoeuler_parts.files.logs import lock as lock_file
from nanoeuler_parts.files.safetensors import blocks_of, need_finite, write_tensors
from nanoeuler_parts.files.writing import replacing
from nanoeuler_parts.runs import start
from nanoeuler_parts.runs.guards import need_own_best
from nanoeuler_parts.runs.run import Run
from nanoeuler_parts.serve.runs import Runs

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("one_thread")]


# ---- what is there is not replaced
def test_an_existing_checkpoint_is_never_replaced_unasked(copy, text, monkeypatch, capsys):
    monkeypatch.chdir(copy)
    before = (copy / "nanoeuler.bin").read_bytes()
    line = refused(capsys, "train", "--data", text,
                   words=["nanoeuler.bin", "--resume", "--out", "--force"])
    assert line and (copy / "nanoeuler.bin").read_bytes() == before
    run("train", "--data", text, "--steps", 2, "--force", *FAST)
    assert ne.read_checkpoint("nanoeuler.bin").state.step == 2


def test_a_checkpoint_does_not_replace_its_text(text, elsewhere, capsys):
    (elsewhere / "a.txt").write_bytes(text.read_bytes())
    refused(capsys, "train", "--data", "a.txt", "--out", "./a.txt", "--force",
            words=["a.txt", "--out"])
    assert (elsewhere / "a.txt").read_bytes() == text.read_bytes()


def test_what_is_no_checkpoint_is_not_offered_to_go_on(text, elsewhere, capsys):
    (elsewhere / "a.txt").write_bytes(text.read_bytes())
    line = refused(capsys, "train", "--data", "a.txt", "--out", "a.txt",
                   words=["a.txt exists and is not a checkpoint; choose another --out"])
    assert "--force" not in line and "--resume" not in line


def test_the_best_model_replaces_nothing_unasked(copy, text, monkeypatch, capsys):
    monkeypatch.chdir(copy)
    (copy / "nanoeuler_best.bin").write_bytes(b"mine")
    start = ("--steps", 21, "--keep-best")
    refused(capsys, "train", "--resume", *start, words=["nanoeuler_best.bin", "--keep-best"])
    refused(capsys, "train", "--data", "nanoeuler_best.bin", "--force", *start, *FAST,
            words=["nanoeuler_best.bin of --keep-best would replace an input of the run"])
    assert (copy / "nanoeuler_best.bin").read_bytes() == b"mine"
    run("train", "--resume", *start, "--force")
    assert ne.read_checkpoint("nanoeuler_best.bin").state.step == 21
    run("train", "--resume", "--steps", 22)  # now it is the run's own


@pytest.mark.parametrize("data, out", [("a.jsonl", "a.bin"), ("a.b.jsonl", "a.b")])
def test_a_log_replaces_neither_text_nor_checkpoint(data, out, text, elsewhere, capsys):
    (elsewhere / data).write_bytes(text.read_bytes())
    refused(capsys, "train", "--data", data, "--out", out, *FAST[:-1], 1, words=[".jsonl", "--out"])
    assert [p.name for p in elsewhere.iterdir()] == [data]
    assert (elsewhere / data).read_bytes() == text.read_bytes()


@pytest.mark.parametrize("content", [
    b"A line of text.\n", b'{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.4}\n', b"[" * 9999,
    b'["step", "heads", "norm"]\n', b'{"step": Infinity}\n', b"\n", b"\xff\n",
    b'{"instruction": "a", "output": "b"}\n'])
@pytest.mark.parametrize("out", ["mine.bin", "mine"])
def test_a_log_replaces_no_file_of_others(content, out, text, elsewhere, capsys):
    (elsewhere / "mine.jsonl").write_bytes(content)
    start = ["train", "--data", text, "--steps", 1, "--out", out, *SMALL]
    for force in ([], ["--force"]):
        refused(capsys, *start, *force, words=["mine.jsonl is not a training log", "--out"])
    assert [p.name for p in elsewhere.iterdir()] == ["mine.jsonl"]
    assert (elsewhere / "mine.jsonl").read_bytes() == content


@pytest.mark.parametrize("first, second", [("a", "a.bin"), ("a.bin", "a")])
def test_two_outputs_do_not_share_a_log(first, second, text, elsewhere, capsys):
    start = ["train", "--data", text, "--steps", 1, *FAST, "--out"]
    run(*start, first)
    before = (elsewhere / "a.jsonl").read_bytes()
    for force in ([], ["--force"]):
        refused(capsys, *start, second, *force, words=[f"{second} and {first}", "a.jsonl", "--out"])
    assert {p.name for p in elsewhere.iterdir()} == {first, "a.jsonl"}
    assert (elsewhere / "a.jsonl").read_bytes() == before
    run(*start, first, "--force")


def test_logs_of_two_outputs_are_two(text, elsewhere):
    """A dot in a name begins no ending of it."""
    for steps, name in enumerate(("lr0.006", "lr0.003"), 1):
        run("train", "--data", text, "--out", name, *FAST, "--steps", steps)
    assert {p.name for p in elsewhere.iterdir()} == {
        "lr0.006", "lr0.006.jsonl", "lr0.003", "lr0.003.jsonl"}
    for steps, name in enumerate(("lr0.006", "lr0.003"), 1):
        assert ne.read_checkpoint(name).state.step == steps
        assert max(r["step"] for r in read_log(f"{name}.jsonl")) == steps


@pytest.mark.parametrize("record", [
    {"step": 9, "loss": 2.5, "heads": [2.5]}, {"step": 9, "val_bits_per_byte": 2.5, "windows": 64}])
def test_a_log_that_has_lost_its_beginning_is_a_log(record, elsewhere):
    """It may begin with a step or with a validation."""
    (elsewhere / "a.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    assert log_path("a.bin", "text.txt") == "a.jsonl"


@pytest.mark.parametrize("more", [["--resume"], ["--force"]])
def test_two_runs_do_not_write_one_output_at_a_time(more, text, copy, monkeypatch, capsys):
    """The second one is refused while the first is at work, and disturbs nothing."""
    pytest.importorskip("fcntl", reason="locks of POSIX")
    monkeypatch.chdir(copy)
    seen = []

    def start_another(run):
        if not seen:
            log = (copy / "nanoeuler.jsonl").read_bytes()
            seen.append(ne.main(["train", "--steps", "30", "--threads", "1", *more, "--data",
                                 str(text), *(FAST[:-4] if "--force" in more else [])]))
            assert (copy / "nanoeuler.jsonl").read_bytes() == log

    before_each_step(monkeypatch, start_another)
    run("train", "--resume", "--steps", 22)
    assert not (copy / ".nanoeuler.bin.lock").exists()
    said = capsys.readouterr().err.splitlines()
    line, = (line for line in said if not line.startswith("note: "))
    assert seen == [2] and "another run is writing nanoeuler.bin" in line
    log = read_log("nanoeuler.jsonl")
    assert [r["step"] for r in log if "loss" in r] == list(range(1, 23))


@pytest.mark.parametrize("way", ["a link", "a link to its folder", "no log"])
def test_no_way_around_the_lock(way, copy, monkeypatch, capsys):
    """Another name of the same checkpoint, or a log that somebody has deleted."""
    pytest.importorskip("fcntl", reason="locks of POSIX")
    monkeypatch.chdir(copy)
    (copy / "link.bin").symlink_to("nanoeuler.bin")
    (copy / "folder").symlink_to(".")
    out = {"a link": "link.bin", "a link to its folder": "folder/nanoeuler.bin"}.get(
        way, "nanoeuler.bin")
    codes = []

    def start_another(run):
        if not codes:
            if way == "no log":
                (copy / "nanoeuler.jsonl").unlink()
            codes.append(ne.main(["train", "--resume", "--steps", "30", "--threads", "1", "--out",
                                  out]))

    before_each_step(monkeypatch, start_another)
    run("train", "--resume", "--steps", 22)
    said = capsys.readouterr()
    assert codes == [2] and f"another run is writing {out}" in said.err
    assert said.out.count("NanoEuler: ") == 1            # it has printed no banner
    assert ne.read_checkpoint("nanoeuler.bin").state.step == 22


def test_two_runs_do_not_write_one_log_at_a_time(text, elsewhere, monkeypatch, capsys):
    """The checkpoints a and a.bin have the same log, and neither is saved yet."""
    pytest.importorskip("fcntl", reason="locks of POSIX")
    args, said = ("train", "--data", text, "--steps", 1, *FAST), []

    def start_another(run):
        if not said:
            said.append(refused(capsys, *args, "--out", "a.bin"))

    before_each_step(monkeypatch, start_another)
    run(*args, "--out", "a")
    assert "another run is writing a.jsonl; let it end, or choose another --out" in said[0]
    assert len([r for r in read_log("a.jsonl") if "loss" in r]) == 1


def test_a_resumed_run_reads_its_checkpoint_when_nobody_else_writes_it(copy, monkeypatch):
    """Else the run that is about to end writes a newer one, which this one would replace."""
    pytest.importorskip("fcntl", reason="locks of POSIX")
    monkeypatch.chdir(copy)
    resumed, seen = start.resumed, []

    def resumed_alone(run, out, *args):
        with pytest.raises(ne.UserError, match="another run is writing"), alone(out):
            seen.append("two write it")
        seen.append(out)
        return resumed(run, out, *args)

    monkeypatch.setattr("nanoeuler_parts.runs.start.resumed", resumed_alone)
    run("train", "--resume", "--steps", 21)
    assert seen == ["nanoeuler.bin"]
    with alone("nanoeuler.bin"):          # it is free again
        assert (copy / ".nanoeuler.bin.lock").exists()
    assert not (copy / ".nanoeuler.bin.lock").exists()


def test_a_lock_that_its_run_has_just_removed_is_none(elsewhere, monkeypatch):
    """Two wait for the file of a run that ends: the first makes its own, which the second finds."""
    pytest.importorskip("fcntl", reason="locks of POSIX")
    lock, taken = lock_file, []

    def lock_late(f):
        if not taken:
            taken.append(f)
            os.remove(".a.bin.lock")
        return lock(f)

    monkeypatch.setattr("nanoeuler_parts.files.logs.lock", lock_late)
    with alone("a.bin"):
        assert len(taken) == 1 and os.path.exists(".a.bin.lock")
        with pytest.raises(ne.UserError), alone("./a.bin"):
            pass
    assert os.listdir() == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_a_pipe_in_place_of_the_lock_is_not_waited_for(text, elsewhere):
    """In a process of its own, which can be ended if it waits.  A reader makes no difference."""
    os.mkfifo(".a.bin.lock")
    result = nanoeuler("train", "--data", text, "--steps", 1, "--out", "a.bin", cwd=elsewhere)
    words = "cannot write a.bin: ", ".a.bin.lock: expected a regular file"
    for word in words:
        assert word in complains(result)
    reader = os.open(".a.bin.lock", os.O_RDONLY | os.O_NONBLOCK)
    with alone("a.bin") as refusal:
        assert all(word in refusal for word in words)
    os.close(reader)


def test_a_complete_run_goes_on_only_if_it_is_to_be_longer(copy, monkeypatch, capsys):
    monkeypatch.chdir(copy)
    done = ne.read_checkpoint("nanoeuler.bin").state.step
    for steps, goes_on in (done - 1, False), (done + 1, True):
        said = told("train", "--resume", "--steps", steps)
        assert ("the learning rate rises again" in capsys.readouterr().err) == goes_on
        assert "nanoeuler.bin is complete" in said
        assert ne.read_checkpoint("nanoeuler.bin").state.step == done + goes_on


def test_a_run_does_not_replace_what_it_begins_with(copy, monkeypatch, capsys):
    monkeypatch.chdir(copy)
    (copy / "link.bin").symlink_to("nanoeuler.bin")
    before = (copy / "nanoeuler.bin").read_bytes()
    for out in ("nanoeuler.bin", "./nanoeuler.bin", "link.bin"):
        refused(capsys, "sft", "nanoeuler.bin", "--out", out, "--force",
                words=[f"{out} would replace nanoeuler.bin", "--out"])
    assert (copy / "nanoeuler.bin").read_bytes() == before


def test_interchange_replaces_nothing_that_it_reads(copy, monkeypatch, capsys):
    """A checkpoint of the name that weights have in a directory, and a shard among those read."""
    monkeypatch.chdir(copy)
    (copy / "here").mkdir()
    shutil.copy("nanoeuler.bin", "here/model.safetensors")
    run("export", "nanoeuler.bin", "hf")
    read = [*(copy / "here").iterdir(), *(copy / "hf").iterdir()]
    before = {path: path.read_bytes() for path in read}
    refused(capsys, "export", "here/model.safetensors", "here", "--force",
            words=["here/model.safetensors would replace its input here/model.safetensors"])
    for name in "model.safetensors", "config.json":
        refused(capsys, "import", "hf", f"hf/{name}", "--force",
                words=[f"hf/{name} would replace its input hf/{name}"])
    refused(capsys, "export", "nanoeuler.bin", "hf", "--gguf", "hf/config.json", "--force",
            words=["hf/config.json is also an output file in hf", "--gguf"])
    refused(capsys, "export", "nanoeuler.bin", "hf2", "--gguf", "",
            words=["--gguf", "expected a name, found an empty one"])
    assert not (copy / "hf2").exists()
    assert before == {path: path.read_bytes() for path in before}


def test_a_link_to_a_checkpoint_stays_one(text, elsewhere):
    (elsewhere / "disk").mkdir()
    (elsewhere / "link.bin").symlink_to(elsewhere / "disk/real.bin")
    run("train", "--data", text, "--out", "link.bin", *FAST, "--steps", 1)
    assert (elsewhere / "link.bin").is_symlink() and (elsewhere / "disk/real.bin").exists()


# ---- logs
def steps_of(log):
    return [r["step"] for r in read_log(log) if "loss" in r]


def steps_and_times(log):
    return [(r["step"], r["ms"]) for r in read_log(log) if "loss" in r]


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_a_log_without_its_checkpoint_is_kept(force, text, copy, monkeypatch, capsys):
    """Under the first name that is free, and that is not the log of another checkpoint.  An empty
    log is not kept."""
    monkeypatch.chdir(copy)
    before = (copy / "nanoeuler.jsonl").read_bytes()
    (copy / "nanoeuler.bin").unlink()
    (copy / "nanoeuler.1.jsonl").write_text("of the user", encoding="utf-8")
    (copy / "nanoeuler.2.bin").write_text("of the user", encoding="utf-8")
    (copy / "other.jsonl").touch()
    notes = {}
    for out in ("nanoeuler.bin", "other.bin"):
        capsys.readouterr()
        run("train", "--data", text, "--steps", 2, *FAST[:-4], "--out", out, *force)
        notes[out] = [x for x in capsys.readouterr().err.splitlines() if "jsonl" in x]
        assert steps_of(out.replace("bin", "jsonl")) == [1, 2]
    assert notes == {"nanoeuler.bin": ["note: nanoeuler.jsonl is the log of another run; it was "
                                       "renamed to nanoeuler.3.jsonl"], "other.bin": []}
    assert (copy / "nanoeuler.3.jsonl").read_bytes() == before
    assert (copy / "nanoeuler.1.jsonl").read_text("utf-8") == "of the user"


def test_force_replaces_checkpoint_and_log_together(text, copy, monkeypatch, capsys):
    """Until its first save the new run leaves both as they are."""
    monkeypatch.chdir(copy)
    before = [(copy / name).read_bytes() for name in ("nanoeuler.bin", "nanoeuler.jsonl")]
    write, seen = Run.write, []

    def write_and_look(self, **values):
        write(self, **values)
        if self.state.step < 2:
            now = [(copy / name).read_bytes() for name in ("nanoeuler.bin", "nanoeuler.jsonl")]
            seen.append(now == before and steps_of("nanoeuler.1.jsonl") == [1])

    monkeypatch.setattr(Run, "write", write_and_look)
    run("train", "--data", text, "--steps", 3, "--save-every", 2, "--force", *FAST[:-2],
        "--warmup", 1)
    assert seen == [True] and not (copy / "nanoeuler.1.jsonl").exists()
    assert steps_of("nanoeuler.jsonl") == [1, 2, 3]
    assert "note: the log is nanoeuler.1.jsonl; it replaces nanoeuler.jsonl when the first" in (
        capsys.readouterr().err)


def killed_with_force(copy, text, after, step, *more):
    """A run with --force that is killed there; the first checkpoint is that of step 4."""
    start = ["train", "--data", str(text), "--steps", 9, "--save-every", 4, "--force", *FAST, *more]
    result = signalled(signal.SIGKILL, step, *start, cwd=copy, after=after)
    assert result.returncode == -signal.SIGKILL, result.stderr


@pytest.mark.parametrize("after, step", [("start_clock", 0), ("write", 3), ("write_file", 4),
                                         ("checkpoint", 4), ("write", 6)])
def test_a_kill_never_mixes_two_runs(after, step, text, copy, monkeypatch):
    """Whatever --resume goes on with has the log of its own run, from the first step on."""
    monkeypatch.chdir(copy)
    old = steps_and_times("nanoeuler.jsonl")
    killed_with_force(copy, text, after, step)
    saved = ne.read_checkpoint("nanoeuler.bin").state.step
    assert saved == (20 if step < 4 else 4)
    if saved == 20:
        assert steps_and_times("nanoeuler.jsonl") == old
        assert len(numbered_logs("nanoeuler.jsonl")) == 1
    run("train", "--resume", "--steps", saved + 2)
    assert steps_of("nanoeuler.jsonl") == list(range(1, saved + 3))
    now = steps_and_times("nanoeuler.jsonl")
    assert (now[:20] == old) == (saved == 20)
    assert not {*now} & {*old} or saved == 20


def test_a_kill_leaves_no_best_model_beside_the_older_run(text, copy, monkeypatch):
    """The first validation finds a best model at step 2, and the first save would be at step 4."""
    monkeypatch.chdir(copy)
    killed_with_force(copy, text, "compare", 2, "--eval-every", 2, "--keep-best")
    assert ne.read_checkpoint("nanoeuler_best.bin").state.step == 2
    assert ne.read_checkpoint("nanoeuler.bin").state.step == 2
    assert steps_of("nanoeuler.jsonl") == [1, 2]


def test_resume_does_not_go_on_in_the_log_of_another_run(text, copy, monkeypatch, capsys):
    """A checkpoint that was copied here; and its own log, which waits under another name."""
    monkeypatch.chdir(copy)
    run("train", "--data", text, "--steps", 3, "--out", "other.bin", *FAST)
    others = (copy / "other.jsonl").read_bytes()
    shutil.copy("other.jsonl", "nanoeuler.jsonl")
    run("train", "--resume", "--steps", 22)
    assert (copy / "nanoeuler.1.jsonl").read_bytes() == others
    assert "another run; it was renamed to nanoeuler.1.jsonl" in capsys.readouterr().err
    assert steps_of("nanoeuler.jsonl") == [21, 22]
    (copy / "nanoeuler.7.jsonl").write_bytes((copy / "nanoeuler.jsonl").read_bytes())
    shutil.copy("other.jsonl", "nanoeuler.jsonl")
    run("train", "--resume", "--steps", 23)
    assert steps_of("nanoeuler.jsonl") == [21, 22, 23]
    assert not (copy / "nanoeuler.7.jsonl").exists()


@pytest.mark.parametrize("owner", ["nanoeuler.3.bin", "nanoeuler.3", "another run"])
def test_resume_leaves_a_log_to_the_checkpoint_of_its_name(owner, copy, monkeypatch, capsys):
    """A copy of a checkpoint has the same log as the original, whose run may be at work."""
    fcntl = pytest.importorskip("fcntl", reason="locks of POSIX")
    monkeypatch.chdir(copy)
    os.rename("nanoeuler.jsonl", "nanoeuler.3.jsonl")
    log = copy / "nanoeuler.3.jsonl"
    with contextlib.ExitStack() as end:
        if owner == "another run":
            fcntl.flock(end.enter_context(open(log, "ab")), fcntl.LOCK_EX)
        else:
            shutil.copy("nanoeuler.bin", owner)
        before = log.read_bytes()
        run("train", "--resume", "--steps", 22)
        note = f"nanoeuler.3.jsonl is the log of {owner} and keeps its name"
        assert note in capsys.readouterr().err
    assert log.read_bytes() == before
    assert steps_of("nanoeuler.jsonl") == [21, 22]


def test_resume_replaces_no_best_model_of_another_run(text, copy, monkeypatch, capsys):
    """Nor one whose run has begun and not yet saved.  Its own it replaces, with and without its
    log, and any with --force."""
    pytest.importorskip("fcntl", reason="locks of POSIX")
    monkeypatch.chdir(copy)
    often = "--keep-best", "--eval-every", 1, "--save-every", 1
    start = "train", "--data", text, "--out", "k.bin", *often, "--steps", 2
    run(*start, *FAST)
    os.remove("k.jsonl")
    for steps in (3, 4, 5):                  # of the second, the best model names the older log
        run("train", "--resume", "--out", "k.bin", "--steps", steps)
        assert ne.read_checkpoint("k_best.bin").state.step == ne.read_checkpoint(
            "k.bin").state.best_step
    state = ne.replace(ne.read_checkpoint("k.bin").state, log_sha256="")
    need_own_best("k_best.bin", state)    # the log is lost, and the best value is the same
    with pytest.raises(ne.UserError, match="not the best model of this run"):
        need_own_best("k_best.bin", ne.replace(state, best=state.best + 1))
    os.remove("k_best.bin")
    with alone("k_best.bin"):
        refused(capsys, "train", "--resume", "--out", "k.bin", "--steps", 6,
                words=["another run is writing k_best.bin"])
    os.mkdir(".k_best.bin.lock")
    refused(capsys, "train", "--resume", "--out", "k.bin", "--steps", 6,
            words=["cannot write k_best.bin: ", ".lock: Is a directory; choose another --out"])
    os.rmdir(".k_best.bin.lock")
    shutil.copy("nanoeuler.bin", "k_best.bin")
    refused(capsys, "train", "--resume", "--out", "k.bin", "--steps", 6,
            words=["k_best.bin is not the best model of this run", "--keep-best", "--force"])
    assert (copy / "k_best.bin").read_bytes() == (copy / "nanoeuler.bin").read_bytes()
    assert ne.read_checkpoint("k.bin").state.step == 5
    run("train", "--resume", "--out", "k.bin", "--steps", 6, "--force")
    assert os.path.exists("k_best.bin") and not os.path.exists(".k_best.bin.lock")


def test_an_older_checkpoint_goes_on_with_the_log_that_it_finds(copy, monkeypatch):
    """It does not say which log is its own."""
    monkeypatch.chdir(copy)
    c = ne.read_checkpoint("nanoeuler.bin")
    assert c.state.log_sha256 == log_identity("nanoeuler.jsonl") != ""
    c.state.log_sha256 = ""
    ne.write_checkpoint("nanoeuler.bin", *c[:5])
    run("train", "--resume", "--steps", 22)
    assert steps_of("nanoeuler.jsonl") == list(range(1, 23))


def test_a_log_goes_on_after_a_step(tmp_path):
    """What lies before is not written anew: it cannot be lost when the disk is full."""
    path = tmp_path / "a.jsonl"
    lines = [b'{"step": 1}\n', b'{"step": 2, "lo\n', b'{"step": 2}\n', b'{"step": 2, "val": 1}\n',
             b"\xff\n", b'{"step": 3}\n', b'{"step": 4}\n', b'{"step": 4}']
    for step, kept in ((0, 0), (1, 1), (2, 4), (3, 6), (4, 7), (9, 7)):
        path.write_bytes(b"".join(lines))
        with open_log(str(path), step) as f:
            assert path.read_bytes() == b"".join(lines[:kept])
            f.write(b"more\n")
        assert path.read_bytes() == b"".join(lines[:kept]) + b"more\n"


def test_a_damaged_line_of_the_log_stops_no_run(copy, monkeypatch):
    monkeypatch.chdir(copy)
    log = copy / "nanoeuler.jsonl"
    lines = log.read_text("utf-8").splitlines()
    lines[3:5] = ['{"step": null}', lines[3][:9]]
    log.write_text("\n".join(lines) + "\n", "utf-8")
    run("train", "--resume", "--steps", 22)
    assert [r["step"] for r in read_log(str(log))][-1] == 22


def test_a_log_line_left_unfinished_is_skipped(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n{"step": 3, "lo', "utf-8")
    assert [r["step"] for r in read_log(path)] == [1, 2]
    path.write_text("", "utf-8")             # killed before the first step
    assert read_log(path) == []


@pytest.mark.parametrize("content", [
    b"nonsense\n", b"[1]\n", b'{"loss": 1}\n', b"[" * 5000 + b"\n", b"\xff\xfe\x00\n"])
def test_what_is_no_log_is_named(content, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ne.UserError, match="a.jsonl: .*; name a log"):
        read_log(tmp_path / "a.jsonl")


# ---- files that are read in blocks
@pytest.mark.parametrize("n", [1, 7, 8, 9, 16, 17])      # 8 numbers of 2 bytes are a block
def test_every_block_counts(n, tmp_path, monkeypatch):
    """The bytes that are copied, their checksum, and the range of token ids: each number matters,
    of the first block as of the last, which may be shorter."""
    monkeypatch.setattr(safetensors, "BLOCK", 16)
    monkeypatch.setattr(texts, "BLOCK", 8)
    ids = np.arange(1, n + 1, dtype=np.uint16)
    write_tensors(tmp_path / "a", {}, {"ids": ids}, "")
    _, mapped = safetensors.map_tensors(tmp_path / "a", safetensors.TOKEN_KINDS)
    write_tensors(tmp_path / "b", {}, mapped, "")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert texts.checked_ids(mapped["ids"], n + 1).tolist() == ids.tolist()
    for i in range(n):
        raw, wrong = bytearray((tmp_path / "a").read_bytes()), ids.copy()
        raw[-2 * (n - i)] ^= 1
        (tmp_path / "c").write_bytes(raw)
        with pytest.raises(ne.UserError, match="checksum"):
            safetensors.map_tensors(tmp_path / "c", safetensors.TOKEN_KINDS)
        wrong[i] = n + 1
        with pytest.raises(ne.UserError, match=f"from 0 to {n}, found {n + 1}"):
            texts.checked_ids(wrong, n + 1)


# ---- places that cannot be written, or read
def test_resume_without_a_checkpoint(elsewhere, capsys):
    refused(capsys, "train", "--resume", words=[
        "nanoeuler.bin: expected a run to resume", f"in {elsewhere};",
        "no run of train to resume in this folder", "drop --resume"])


def without_moments(path):
    c = ne.read_checkpoint("nanoeuler.bin")
    state = ne.replace(c.state, n_steps=None)
    ne.write_checkpoint(path, c.cfg, c.tokenizer, state, c.flat)


def with_state(path, out, state):
    """Copies a checkpoint, with another text where its state is."""
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    header["__metadata__"]["state"] = state
    made = json.dumps(header).encode()
    out.write_bytes(len(made).to_bytes(8, "little") + made + raw[end:])


CANNOT = {
    "missing": (lambda path: None, "found no file of this name in"),
    "int8": (lambda path: run("quantize", "nanoeuler.bin", path), "int8 matrices"),
    "without moments": (without_moments, "no optimizer moments")}


@pytest.mark.parametrize("why", CANNOT)
def test_what_cannot_be_resumed_names_what_can(why, copy, monkeypatch, capsys):
    """Runs of this verb with their moments, beside the file that was named; the newest three"""
    monkeypatch.chdir(copy)
    make, word = CANNOT[why]
    make("other.bin")
    (copy / "text.bin").write_bytes(b"no checkpoint" * 100)
    with_state(copy / "nanoeuler.bin", copy / "deep.bin", "[" * 100_000)
    asked = "--resume", "--steps", 30, "--out"
    can = "nanoeuler.bin (step 20 of 20)"
    said = refused(capsys, "train", *asked, "other.bin", words=["other.bin", word, f": {can};"])
    assert said.count(".bin") == 2
    far = copy.parent / "far"
    far.mkdir()
    monkeypatch.chdir(far)
    refused(capsys, "train", *asked, copy / "other.bin", words=[word, f": {copy / can};"])
    monkeypatch.chdir(copy)
    if why == "missing":                     # of another verb
        said = refused(capsys, "sft", *asked, "other.bin", words=["no run of sft to resume"])
        assert "nanoeuler.bin" not in said
    for i in range(4):
        shutil.copy("nanoeuler.bin", f"{i}.bin")
        os.utime(f"{i}.bin", (2e9 + i, 2e9 + i))
    said = refused(capsys, "train", *asked, "other.bin", words=["3.bin", "2.bin", "1.bin"])
    assert "and 2 more" in said and " 0.bin" not in said


def test_a_finished_run_needs_no_place_to_write(copy, monkeypatch, capsys):
    """--resume says that it is done, also in a folder of others; what goes on is refused there."""
    def read_only(path, mode="r", *args, **options):
        if {"a", "w", "+"} & {*mode}:
            raise PermissionError(13, "Permission denied", path)
        return open(path, mode, *args, **options)

    monkeypatch.chdir(copy)
    monkeypatch.setattr("nanoeuler_parts.files.logs.open", read_only, raising=False)
    assert "is complete: 20 of 20 steps" in told("train", "--resume")
    refused(capsys, "train", "--resume", "--steps", 40,
            words=["cannot write nanoeuler.bin: Permission denied", "--out"])
    refused(capsys, "train", "--out", "new.bin", words=["cannot write new.bin", "--out"])


def test_resume_without_moments(trained, elsewhere, capsys):
    c = ne.read_checkpoint(str(trained / "nanoeuler.bin"))
    ne.write_checkpoint("a.bin", c.cfg, c.tokenizer, c.state, c.flat)
    refused(capsys, "train", "--resume", "--steps", 30, "--out", "a.bin",
            words=["a.bin", "moments"])


@pytest.mark.parametrize("out", ["none/a.bin", "a.txt/a.bin", "/proc/a.bin", "x" * 300 + ".bin"])
def test_places_that_cannot_be_written(out, text, elsewhere, capsys):
    """Said before the first step, not after three minutes."""
    (elsewhere / "a.txt").write_text("a file", encoding="utf-8")
    refused(capsys, "train", "--data", text, "--steps", 2, *FAST[:-4], "--out", out,
            words=["--out"])
    assert sorted(os.listdir()) == ["a.txt"]


LONG = "x" * 249             # as long as its lock allows, but too long for its temporary file
WRITERS = {                      # their inputs are missing: the output is checked first
    "train": lambda out: ["train", "--out", out],
    "train on text": lambda out: ["train", "--data", "text.txt", "--force", "--out", out],
    "sft": lambda out: ["sft", "model.bin", "--data", "text.txt", "--out", out],
    "dpo": lambda out: ["dpo", "model.bin", "--data", "text.txt", "--out", out],
    "quantize": lambda out: ["quantize", "none.bin", out, "--force"],
    "import": lambda out: ["import", "none.gguf", out],
    "export": lambda out: ["export", "none.bin", "--gguf", out],
    "eval": lambda out: ["eval", "none.bin", "--data", "none.txt", "--json", out],
    "generate": lambda out: ["generate", "--file", "none.jsonl", "none.bin", "--out", out],
    "a folder": lambda out: ["export", "model.bin", out]}


@pytest.mark.parametrize("out", ["loop.bin", "folder.bin", "none/a.bin", "loop/a.bin",
                                 "text.txt/a.bin", "/proc/a.bin", LONG])
@pytest.mark.parametrize("verb", WRITERS)
def test_an_output_is_checked_before_the_work(verb, out, text, trained, elsewhere, monkeypatch,
                                              capsys):
    shutil.copy(text, "text.txt")
    shutil.copy(trained / "nanoeuler.bin", "model.bin")
    os.symlink("loop.bin", "loop.bin")
    os.symlink("loop", "loop")
    os.mkdir("folder.bin")
    if verb == "a folder" and out in ("folder.bin", "none/a.bin"):
        run(*WRITERS[verb](out))             # it accepts these
        assert os.listdir(out)
        return
    monkeypatch.setattr("nanoeuler_parts.machine.kernels.fill_cache", never)
    before = sorted(os.listdir())
    refused(capsys, *WRITERS[verb](out), words=[out])
    assert sorted(os.listdir()) == before


def test_a_log_that_is_a_link_to_itself(text, elsewhere, capsys):
    os.symlink("a.jsonl", "a.jsonl")
    refused(capsys, "train", "--data", text, "--out", "a.bin",
            words=["cannot write a.jsonl: it is a link to itself; choose another --out"])


def test_a_directory_as_out(text, elsewhere, capsys):
    (elsewhere / "a.bin").mkdir()
    for more in [], ["--force"]:
        line = refused(capsys, "train", "--data", text, "--steps", 2, "--out", "a.bin", *more,
                       words=["a.bin exists and is a directory; choose another name"])
        assert "--force" not in line and "--resume" not in line


def test_an_unwritable_directory(copy, monkeypatch, capsys):
    if os.getuid() == 0:
        pytest.skip("root may write everywhere")
    monkeypatch.chdir(copy)
    copy.chmod(0o500)
    try:
        refused(capsys, "train", "--resume", "--steps", 40, words=["nanoeuler", "--out"])
    finally:
        copy.chmod(0o700)


LIMITED = """
import resource, sys
sys.path.insert(0, {root!r})
import nanoeuler as ne
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
sys.exit(ne.main(["train", "--resume", "--steps", "40", "--threads", "1"]))
"""


def test_file_size_limit_keeps_the_old_checkpoint(copy, monkeypatch):
    """The file system gives out in the middle of a checkpoint."""
    pytest.importorskip("resource", reason="limits of POSIX")
    before = (copy / "nanoeuler.bin").read_bytes()
    code = LIMITED.format(root=str(ROOT), limit=len(before) // 2)
    result = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True,
                            encoding="utf-8", timeout=200)
    complains(result, "nanoeuler.bin", "an existing file is unchanged", "--out")
    assert (copy / "nanoeuler.bin").read_bytes() == before
    assert not list(copy.glob("*.tmp"))
    monkeypatch.chdir(copy)
    run("train", "--resume", "--steps", 22)


@pytest.mark.parametrize("share", [0, 0.25])
def test_full_disk(share, copy, tmp_path, capsys):
    """A real one: no room for the log, or room for a quarter of a checkpoint."""
    disk, size = tmp_path / "disk", (copy / "nanoeuler.bin").stat().st_size
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size + (5 << 20)}", "tmpfs", str(disk)]
    if os.name != "posix" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here; RLIMIT_FSIZE stands in for it")
    try:
        shutil.copy(copy / "nanoeuler.bin", disk)
        shutil.copy(copy / "nanoeuler.jsonl", disk)
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - int(share * size)
        with open(disk / "filler", "wb") as f:
            f.write(bytes(free))
        before = (disk / "nanoeuler.bin").read_bytes()
        with contextlib.chdir(disk):
            refused(capsys, "train", "--resume", "--steps", 40, words=["nanoeuler"])
        assert (disk / "nanoeuler.bin").read_bytes() == before
        (disk / "filler").unlink()
        steps = [r["step"] for r in read_log(disk / "nanoeuler.jsonl") if "loss" in r]
        assert steps[:20] == list(range(1, 21))
        assert ne.read_checkpoint(str(disk / "nanoeuler.bin")).state.step == 20
    finally:
        subprocess.run(["umount", str(disk)], check=True)


class Full(io.FileIO):
    """A file on a disk that is full."""
    def write(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def fails(monkeypatch):
    """A list to append to: the next checkpoint that is written, one for each entry, fails."""
    left = []

    def opened(path, mode="r", **options):
        if mode == "wb" and str(path).endswith(".tmp") and left:
            left.pop()
            return Full(path, mode)
        return open(path, mode, **options)

    monkeypatch.setattr("nanoeuler_parts.files.safetensors.open", opened, raising=False)
    return left


SAVED = ("--steps", 8, "--save-every", 2, *FAST[:-4], "--warmup", 2)


def test_a_save_on_the_way_that_fails_is_made_up_for_by_the_next(fails, text, elsewhere, capsys):
    """Twice it fails, and nothing else changes."""
    def states():
        saved = [ne.read_checkpoint(str(p)).state.step for p in elsewhere.glob("kept*.bin")]
        return sorted(saved)

    run("train", "--data", text, *SAVED, "--out", "well.bin")
    assert capsys.readouterr().err == ""
    fails += [1, 1]
    save = Run.save

    def save_and_keep(self):
        save(self)
        if os.path.exists(self.out):
            shutil.copy(self.out, f"kept{self.state.step}.bin")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "save", save_and_keep)
        run("train", "--data", text, *SAVED, "--out", "full.bin")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" is not saved: ")[0] for line in lines] == ["note: step 2", "note: step 4"]
    for line in lines:
        assert "full.bin: No space left" in line and line.endswith("saves again in 2 steps")
    assert states() == [6] and fails == [] and not list(elsewhere.glob("*.tmp"))
    assert outcome(elsewhere, "full") == outcome(elsewhere, "well")


def test_a_last_save_that_fails_is_an_error(fails, text, elsewhere, capsys):
    fails += 4 * [1]                         # three on the way
    refused(capsys, "train", "--data", text, *SAVED,
            words=["cannot write", "nanoeuler.bin: No space left", "free space"])
    assert not fails and not list(elsewhere.glob("*.tmp")) and not list(elsewhere.glob("*.bin"))


def test_a_header_that_is_too_long_ends_no_run_on_the_way(text, elsewhere, monkeypatch, capsys):
    """Nor does a lack of memory for a moment."""
    write, failures = ne.write_checkpoint, []

    def lacks_memory_once(*args):
        if not failures:
            failures.append(1)
            raise MemoryError("9 GiB")
        write(*args)

    monkeypatch.setattr("nanoeuler_parts.checkpoint.file.write_checkpoint", lacks_memory_once)
    monkeypatch.setattr("nanoeuler_parts.files.safetensors.MAX_HEADER", 100)
    assert ne.main(["train", "--data", str(text), *map(str, SAVED), "--threads", "1"]) == 2
    *notes, last = capsys.readouterr().err.splitlines()
    assert [line.split(" is not saved: ")[0] for line in notes] == [
        f"note: step {step}" for step in (2, 4, 6)]
    assert "out of memory (9 GiB)" in notes[0] and "expected a header" in notes[1]
    assert last.startswith("nanoeuler: nanoeuler.bin: expected a header of at most 100 bytes")
    assert max(r["step"] for r in read_log("nanoeuler.jsonl")) == 8


def test_a_run_whose_output_nobody_reads_is_saved(text, tmp_path):
    """By the step that could not print, however late that is: no other save comes before."""
    flags = ("--steps", 100000, "--save-every", 100000, *FAST)
    process = subprocess.Popen(command("train", "--data", text, *flags), cwd=tmp_path,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not process.stdout.readline().startswith(b"step"):
        assert process.poll() is None
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    assert process.wait(timeout=200) == 0     # as `head` expects of what it reads
    assert 5 <= ne.read_checkpoint(str(tmp_path / "nanoeuler.bin")).state.step < 100000


def test_a_terminal_that_knows_ascii_only(text, tmp_path):
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    said = ok(nanoeuler("train", "--data", text, "--steps", 4, "--eval-every", 2, *FAST, env=env,
                        cwd=tmp_path))
    assert "?" in said


# ---- a full disk
class FullLog:
    """Stands in for os.write: for some steps of a run, a log cannot be written"""

    def __init__(self, patch, first, last, partly=0):
        self.is_full, self.write = False, os.write
        patch.setattr(os, "write", self)
        after_each_step(patch, lambda run: setattr(
            self, "is_full", first <= run.state.step <= last))
        self.partly = partly

    def __call__(self, fd, data):
        if not self.is_full or not data.startswith(b'{"step"'):
            return self.write(fd, data)
        if self.partly:
            return self.write(fd, data[:self.partly])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("partly", [0, 7])
@pytest.mark.parametrize("first", [1, 3])
def test_a_log_on_a_full_disk_is_written_later(first, partly, text, elsewhere, monkeypatch, capsys):
    """The run continues, says so once, and its log is as it would have been."""
    start = ["train", "--data", text, "--steps", 8, "--eval-every", 3, *FAST]
    run(*start, "--out", "whole.bin")
    FullLog(monkeypatch, first, 5, partly)
    capsys.readouterr()
    run(*start, "--out", "full.bin")
    said = capsys.readouterr().err
    assert said.count("cannot write full.jsonl: No space left on device; the run continues") == 1
    whole, full = (outcome(elsewhere, name) for name in ("whole", "full"))
    assert whole == full
    state = ne.read_checkpoint("full.bin").state
    assert state.log_sha256 == log_identity("full.jsonl")
    assert "missing" not in said


def test_records_that_are_lost_are_counted(text, elsewhere, monkeypatch, capsys):
    FullLog(monkeypatch, 3, 9)
    run("train", "--data", text, "--steps", 5, *FAST)
    said = capsys.readouterr().err
    lost = len(read_log("nanoeuler.jsonl"))
    assert lost == 2 and "records of the run that are missing in it: 4" in said
    assert ne.read_checkpoint("nanoeuler.bin").state.step == 5


def test_a_run_goes_on_if_its_output_is_on_a_full_disk(text, elsewhere, monkeypatch, capsys):
    """Standard output of `train > file`, which cannot be written from a step on"""
    def fill(run):
        if run.state.step == 2:
            sys.stdout.stream = full

    with open("/dev/full", "w", encoding="utf-8") as full:
        after_each_step(monkeypatch, fill)
        run("train", "--data", text, "--steps", 5, *FAST)
    said = capsys.readouterr().err
    assert said.count("cannot write standard output: No space left on device") == 1
    assert ne.read_checkpoint("nanoeuler.bin").state.step == 5


def test_a_reader_that_has_gone_still_ends_a_run(text, elsewhere, monkeypatch):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    def leave(run):
        if run.state.step == 1:
            sys.stdout.stream = Gone()

    after_each_step(monkeypatch, leave)
    monkeypatch.setattr(os, "dup2", lambda *fds: None)
    assert ne.main(["train", "--data", str(text), "--steps", "9", *FAST]) == 0
    assert ne.read_checkpoint("nanoeuler.bin").state.step == 5       # the first printed one


@pytest.mark.parametrize("verb", ["plot", "generate", "generate on a full disk"])
def test_an_error_of_a_write_names_the_file(verb, copy, monkeypatch, capsys):
    """Of any verb that writes an open file"""
    monkeypatch.chdir(copy)
    (copy / "p.jsonl").write_text('"to be"\n' * 3, encoding="utf-8")
    if verb == "plot":
        pytest.importorskip("matplotlib")
        from matplotlib.figure import Figure
        argv = ["plot", "nanoeuler.jsonl"]

        def fails(figure, path, **options):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(Figure, "savefig", fails)
        name = "loss.png"
    else:
        name = "answers.jsonl"
        argv = ["generate", "--file", "p.jsonl", "--out", name, "--tokens", 2]
        if verb == "generate":
            monkeypatch.setattr(json, "dumps", dumps_then_full)
        else:
            monkeypatch.setattr(os, "write", full_after_some)
    line = refused(capsys, *argv)
    assert name in line and "No space left on device" in line and "a file:" not in line


def dumps_then_full(value, **options):
    if isinstance(value, dict) and value.get("answers"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return json_dumps(value, **options)


def full_after_some(fd, data):
    return os_write(fd, data[:9]) if b'"answers"' in data else os_write(fd, data)


json_dumps, os_write = json.dumps, os.write


def test_a_run_that_was_stopped_says_so_in_its_log(text, elsewhere, monkeypatch):
    """For the training page, until it is resumed"""
    def stop(run):
        if run.state.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        before_each_step(patch, stop)
        run("train", "--data", text, "--steps", 6, *FAST)
    assert read_log("nanoeuler.jsonl")[-1] == {"step": 4, "n_steps": 6, "stopped": True}
    assert Runs(elsewhere).listed()[0]["stopped"] is True
    run("train", "--resume")
    assert not any("stopped" in r for r in read_log("nanoeuler.jsonl"))
    assert "stopped" not in Runs(elsewhere).listed()[0]


def test_an_input_that_is_cut_short_is_not_taken_for_the_output(checkpoint, tmp_path):
    c = open_checkpoint(str(checkpoint))
    os.truncate(checkpoint, 8192)
    with pytest.raises(OSError, match="cut short") as e:
        write_tensors(str(tmp_path / "out.bin"), {}, c.tensors, "free disk space")
    assert e.value.filename == str(checkpoint) and not [*tmp_path.glob("out*")]


# ---- a mapped file that becomes shorter
def test_tokens_that_are_cut_short_end_a_run_with_a_message(text, elsewhere, monkeypatch, capsys):
    """SIGBUS would end it without one.  The last step is saved, and --resume reads the text anew.
    """
    shutil.copy(text, "text.txt")
    monkeypatch.setattr("nanoeuler_parts.files.texts.LARGE", 1000)
    start = ["train", "--data", "text.txt", "--steps", 6, *FAST]
    run(*start, "--out", "whole.bin")        # writes the cache
    cache, = elsewhere.glob("text.txt.*.tokens")

    def cut(run):
        if run.state.step == 3:
            os.truncate(cache, 4096)

    with monkeypatch.context() as patch:
        before_each_step(patch, cut)
        refused(capsys, *start, "--out", "cut.bin", words=[
            cache.name, "expected ", "bytes, found 4,096, as the file was cut short"])
    assert ne.read_checkpoint("cut.bin").state.step in (3, 4)
    run("train", "--resume", "--out", "cut.bin")
    assert outcome(elsewhere, "cut").arrays == outcome(elsewhere, "whole").arrays


def test_a_checkpoint_that_is_cut_short_while_it_is_read(checkpoint):
    c = open_checkpoint(str(checkpoint))
    os.truncate(checkpoint, 8192)
    first, *_ = c.tensors.values()
    for read in (lambda: params_in(c).wte[0], lambda: need_finite("wte", first),
                 lambda: [*blocks_of(first)]):
        with pytest.raises((OSError, ne.UserError), match="cut short"):
            read()


# ---- temporary files
def test_a_leftover_of_a_killed_process_is_removed(tmp_path):
    """It is no longer locked.  One that is in use, a fresh one, and the user's files stay."""
    out, now = tmp_path / "a.bin", time.time()
    names = ["a.bin.1.tmp", "a.bin.2.tmp", "a.bin.3.tmp", "a.bin.mine.tmp", "b.bin.1.tmp"]
    for name in names:
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (now - 100, now - 100))
    os.utime(tmp_path / "a.bin.3.tmp", (now, now))
    with open(tmp_path / "a.bin.2.tmp", "rb+") as f:
        assert lock_file(f)
        with replacing(str(out), "") as temporary, open(temporary, "wb") as written:
            written.write(b"new")
    assert {path.name for path in tmp_path.iterdir()} == {"a.bin", *names[1:]}
    assert out.read_bytes() == b"new"


# ---- modes
def mode_of(path):
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.fixture
def plain_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def by_replacing(path, seen):
    with replacing(str(path), "") as temporary:
        seen()
        with open(temporary, "wb") as f:
            f.write(b"new")
            f.flush()
            seen()


def by_bpe(path, seen):
    tokenizer = bpe.Tokenizer({name: k for k, name in enumerate(bpe.CHAR_OF_ID)}, [])
    to_json = tokenizer.to_json
    tokenizer.to_json = lambda: seen() or to_json()
    tokenizer.save(path)


def by_download(path, seen):
    sys.path.insert(0, str(ROOT / "data"))
    import download
    with download.replacing(path) as f:
        seen()
        f.write(b"new")


def by_log(path, seen):
    pending = path.with_name("a.1.jsonl")    # as `train --force` writes until its first save
    with open_log(str(pending), 0):
        seen()
    os.replace(pending, path)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o664, 0o444, 0o400])
@pytest.mark.parametrize("write", [by_replacing, by_bpe, by_download, by_log])
def test_a_file_that_is_replaced_keeps_its_mode(write, mode, tmp_path, plain_umask, monkeypatch):
    """At no moment is the new file more open: each open and rename is looked at."""
    path, modes = tmp_path / {by_bpe: "a.json", by_log: "a.jsonl"}.get(write, "a.bin"), []
    path.write_bytes(b"old")
    os.chmod(path, mode)

    def seen():
        modes.extend(mode_of(x) for x in tmp_path.iterdir() if x != path)

    def then_look(function):
        def looking(*args, **more):
            result = function(*args, **more)
            seen()
            return result
        return looking

    for name in ("open", "chmod", "chown", "fsync"):
        monkeypatch.setattr(os, name, then_look(getattr(os, name)))
    write(path, seen)
    assert mode_of(path) == (mode | 0o600 if write is by_log else mode)
    assert path.read_bytes() != b"old" and modes
    assert not any(found & ~mode & 0o077 for found in modes), [oct(found) for found in modes]


def test_a_new_file_has_the_mode_of_the_umask(tmp_path, plain_umask):
    for write in (by_replacing, by_bpe, by_download):
        write(tmp_path / f"{write.__name__}.json", lambda: None)
    with open_log(str(tmp_path / "b.1.jsonl"), 0):
        pass
    assert {mode_of(path) for path in tmp_path.iterdir()} == {0o644}


def test_a_private_checkpoint_stays_private(text, elsewhere, plain_umask):
    """Its own run saves it, and a new run replaces it and its log."""
    run("train", "--data", text, "--steps", 2, *FAST)
    for name in ("nanoeuler.bin", "nanoeuler.jsonl"):
        os.chmod(name, 0o600)
    for more in (["--resume", "--steps", 4], ["--data", text, "--force", "--steps", 2, *FAST]):
        run("train", *more)
        assert mode_of("nanoeuler.bin") == mode_of("nanoeuler.jsonl") == 0o600


def test_every_rename_to_an_output_keeps_modes():
    """os.replace gives a file the mode of another one.  Each place that calls it is known here."""
    files = [*ROOT.glob("*.py"), *(ROOT / "nanoeuler_parts").rglob("*.py"), *ROOT.glob("data/*.py")]
    found = {path.relative_to(ROOT).as_posix() for path in files
             if "os.replace(" in path.read_text(encoding="utf-8")}
    assert found == {"bpe.py", "data/download.py", "nanoeuler.py",
                     "nanoeuler_parts/files/writing.py", "nanoeuler_parts/runs/log.py"}


# ---- untrusted names at a terminal
class Tty(io.StringIO):
    def isatty(self):
        return True


def test_no_name_and_no_prompt_controls_a_terminal(text, elsewhere, monkeypatch):
    """ESC in the names of texts, folders and checkpoints, in prompts, and in what is generated"""
    bad = "a\x1b[2J\x9b31m"
    shutil.copy(text, f"{bad}.txt")
    os.mkdir(bad)
    shutil.copy(text, f"{bad}/{bad}")
    monkeypatch.setattr("nanoeuler_parts.files.texts.LARGE", 1000)
    said = Tty(), Tty()
    monkeypatch.setattr(sys, "stdout", said[0])
    monkeypatch.setattr(sys, "stderr", said[1])
    few = ["--steps", "2", *FAST]
    for argv in (["train", "--data", f"{bad}.txt", "--out", f"{bad}.bin", *few],
                 ["train", "--data", bad, "--out", f"{bad}2.bin", *few],
                 ["train", "--data", f"{bad}.txt", "--out", f"{bad}.bin", *few],
                 ["train", "--data", f"{bad}none", *few], ["list"], ["info"],
                 ["generate", f"to {bad}", "--tokens", "5"], ["generate", "a", f"{bad}none"],
                 ["plot", f"{bad}.jsonl", "--out", f"{bad}.png"],
                 ["train", f"--{bad}"], ["train", bad]):
        ne.main([*argv, "--threads", "1"] if "--threads" not in argv else argv)
    text = "".join(x.getvalue() for x in said)
    assert "a\\x1b" in text and not {*text} & {"\x1b", "\x9b"}


def test_no_name_of_a_file_controls_a_terminal_or_begins_a_line(base, elsewhere, monkeypatch):
    """What other verbs write and read, with ESC and a line end in its name"""
    bad = "a\x1b[2J\nzz"
    shutil.copy(base / "nanoeuler.bin", f"{bad}.bin")
    shutil.copy(ROOT / "data/shakespeare.txt", f"{bad}.txt")
    os.truncate(f"{bad}.txt", 9000)
    pairs = [{"instruction": f"say {i}", "chosen": f"{i}", "rejected": f"{i * (i > 1)}"}
             for i in range(1, 40)]
    Path(f"{bad}.json").write_text(json.dumps(pairs), encoding="utf-8")
    said = Tty(), Tty()
    monkeypatch.setattr(sys, "stdout", said[0])
    monkeypatch.setattr(sys, "stderr", said[1])
    for argv in (["quantize", f"{bad}.bin", f"{bad}_8.bin"],
                 ["quantize", f"{bad}_8.bin", f"{bad}_8_8.bin"],
                 ["export", f"{bad}.bin", f"{bad}_e"], ["import", f"{bad}_e", f"{bad}_i.bin"],
                 ["eval", f"{bad}.bin", "--data", f"{bad}.txt", "--json", f"{bad}_r.json"],
                 ["dpo", f"{bad}.bin", "--data", f"{bad}.json", "--out", f"{bad}_d.bin",
                  "--steps", "1", "--batch", "320"]):
        assert ne.main([*argv, "--threads", "1"]) == 0, (argv, said[1].getvalue())
    monkeypatch.setattr(sys, "argv", ["bpe.py", "train", f"{bad}.txt", "--tokenizer",
                                      f"{bad}_t.json", "--vocab-size", "300"])
    bpe.main()
    assert ne.main(["export", f"{bad}.bin", "--gguf", f"{bad}.gguf"]) in (0, 2)      # no gguf
    text = "".join(x.getvalue() for x in said)
    for word in ("_8.bin: ", "already int8", "_e: ", "_i.bin: ", "wrote ", "show no preference",
                 "_t.json: "):
        assert word in text, word
    assert r"a\x1b[2J\nzz" in text and "\x1b" not in text and "\nzz" not in text


def test_the_names_of_a_run_are_a_list_in_messages(text, elsewhere, capsys):
    for name in "one.txt", "two.txt", "three.txt":
        shutil.copy(text, name)
        os.truncate(name, 3000 + len(name))
    told("train", "--data", "one.txt", "two.txt", *FAST, "--steps", 1)
    refused(capsys, "train", "--resume", "--data", "one.txt", "three.txt", words=[
        "nanoeuler.bin trains on one.txt, two.txt, and the contents of one.txt, three.txt differ"])
    os.truncate("two.txt", 2000)
    refused(capsys, "train", "--resume", "--steps", 2, words=["one.txt, two.txt has changed"])


@pytest.mark.parametrize("by_link", [False, True], ids=["itself", "a link to it"])
def test_what_is_no_regular_file_is_never_replaced(by_link, tmp_path):
    """As root, a rename would put a file in the place of a device, for all programs."""
    pipe, path = tmp_path / "pipe", tmp_path / "pipe"
    os.mkfifo(pipe)
    if by_link:
        path = tmp_path / "a.bin"
        path.symlink_to(pipe)
    with pytest.raises(ne.UserError, match="not a regular file; x$"):
        with replacing(path, "x") as temporary:
            Path(temporary).write_bytes(b"x")
    assert stat.S_ISFIFO(os.stat(pipe).st_mode) and len(os.listdir(tmp_path)) == 1 + by_link
