"""Interrupted runs: wherever one is stopped, what goes on ends in the bits of one left alone."""
import json
import signal
from collections import namedtuple

import pytest
from examples import ADD, PAIRS, write_pairs
from helpers import FAST, SMALL, nanoeuler, ok, outcome, refused, signalled, told

import nanoeuler as ne
from nanoeuler_parts.files.logs import read_log
from nanoeuler_parts.machine.threads import most_threads
from nanoeuler_parts.runs.options import TrainOptions
from nanoeuler_parts.runs.schedule import Schedule
from nanoeuler_parts.runs.start import need_same, row_length_of
from nanoeuler_parts.tuning.examples import held_out

pytestmark = pytest.mark.cli


# 30 steps read the text below, and the examples and the pairs, more than twice.
STEPS, SAVE_EVERY = 30, 10
LENGTH = ("--steps", STEPS, "--eval-every", 10, "--save-every", SAVE_EVERY, "--warmup", 2)
STAGES = {
    "nanoeuler": ("train", "--data", "text.txt", *SMALL, "--batch", 64, "--cuts", 0.2, *LENGTH),
    "nanoeuler_chat": ("sft", "--data", "add.json", "--batch", 320, "--cuts", 0.2, "--holdout",
                       0.02, *LENGTH),
    "nanoeuler_dpo": ("dpo", "nanoeuler.bin", "--data", "pairs.jsonl", "--batch", 640, "--lr",
                      0.002, "--nll", 0.5, "--holdout", 0.02, *LENGTH)}
Stage = namedtuple("Stage", "out start resume ended")


def few(examples):
    """24 to learn and 2 that are held out."""
    held = [e for e in examples if held_out(e)]
    return [e for e in examples if not held_out(e)][:24] + held[:2]


@pytest.fixture(scope="module")
def ready(base, text, tmp_path_factory):
    """ready(stage) is a new folder in which that stage can start."""
    def make(stage):
        folder = tmp_path_factory.mktemp(stage)
        (folder / "text.txt").write_bytes(text.read_bytes()[:1200])
        (folder / "add.json").write_text(json.dumps(few(ADD)), encoding="utf-8")
        if stage != "nanoeuler":
            (folder / "nanoeuler.bin").write_bytes((base / "nanoeuler.bin").read_bytes())
        return write_pairs(folder, few(PAIRS))

    return make


@pytest.fixture(scope="module", params=STAGES)
def stage(request, ready):
    """A stage, and how it ends if nobody disturbs it."""
    out, runs, train = request.param, [], ne.train
    start, folder = STAGES[out], ready(out)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("nanoeuler_parts.runs.run.train",
                      lambda run, stopped: (runs.append(run), train(run, stopped)))
        told(*start)
    run, = runs
    epoch = run.data.batches.n * run.R / run.B           # steps
    assert 2 * epoch < STEPS - 2, "the last kill below is in the third epoch"
    return Stage(out, start, (start[0], "--resume", "--out", f"{out}.bin"), outcome(folder, out))


def left_at(folder, out):
    """The last step of the log and that of the checkpoint, 0 if there is none."""
    path = folder / f"{out}.bin"
    saved = ne.read_checkpoint(str(path)).state.step if path.exists() else 0
    return read_log(str(folder / f"{out}.jsonl"))[-1]["step"], saved


def test_killed_at_any_point_of_a_step(stage, ready):
    """SIGKILL before there is a checkpoint, between record and checkpoint, right behind one, and in
    the third epoch.  Then two threads go on."""
    folder, args = ready(stage.out), (*stage.start, "--threads", 1)
    for after, step, logged, saved in (("log_entry", 4, 3, 0), ("record", 10, 10, 0),
                                       ("save", 20, 20, 20), ("log_entry", 28, 27, 20)):
        result = signalled(signal.SIGKILL, step, *args, cwd=folder, after=after)
        assert result.returncode == -signal.SIGKILL, (after, step, result.stderr)
        assert left_at(folder, stage.out) == (logged, saved)
        if saved:
            args = (*stage.resume, "--threads", 1)
    ok(nanoeuler(*stage.resume, "--threads", min(2, most_threads()), cwd=folder))
    assert outcome(folder, stage.out) == stage.ended


def test_asked_to_stop(stage, ready, monkeypatch):
    """Ctrl-C, then SIGTERM: the step ends, is saved, and the run says how to go on."""
    folder, args = ready(stage.out), stage.start
    for number, step in ((signal.SIGINT, 1), (signal.SIGTERM, 26)):
        said = ok(signalled(number, step, *args, "--threads", 1, cwd=folder))
        assert f"stopped at step {step} of {STEPS}" in said
        assert f"python nanoeuler.py {' '.join(stage.resume)}\n" in said
        assert left_at(folder, stage.out) == (step, step)
        args = stage.resume
    monkeypatch.chdir(folder)
    told(*stage.resume, threads=min(2, most_threads()))
    assert outcome(folder, stage.out) == stage.ended
    before = (folder / f"{stage.out}.bin").read_bytes()
    said = told(*stage.resume)
    assert f"complete: {STEPS} of {STEPS} steps" in said and f"chat {stage.out}.bin" in said
    assert (folder / f"{stage.out}.bin").read_bytes() == before


def test_a_run_that_is_stopped_before_its_first_step_continues(text, elsewhere, monkeypatch):
    """The only record of its log says that it was stopped."""
    with monkeypatch.context() as patch:
        patch.setattr("nanoeuler_parts.runs.run.train", lambda run, stopped: None)
        assert "stopped at step 0 of 2" in told("train", "--data", text, *FAST, "--steps", 2)
    assert "complete: 2 of 2 steps" in told("train", "--resume")
    assert [r["step"] for r in read_log("nanoeuler.jsonl") if "lr" in r] == [1, 2]


@pytest.mark.parametrize("mtp_from", [0.9, 1.0])         # the run ends with all heads, or with one
def test_a_longer_run_continues_as_one_of_that_length(mtp_from, text, elsewhere):
    """Its learning rates and its auxiliary heads are those of the new length, from its next step
    on: the shorter run had reached the end of both."""
    first, longer, until = 10, 60, 0.3
    told("train", "--data", text, *FAST, "--steps", first, "--mtp-from", mtp_from)
    told("train", "--resume", "--steps", longer)
    c = ne.read_checkpoint("nanoeuler.bin")
    schedule = Schedule(TrainOptions(**c.state.options), c.cfg.n_embd)
    steps = [r for r in read_log("nanoeuler.jsonl") if "lr" in r]
    assert [r["step"] for r in steps] == [*range(1, longer + 1)]
    heads = {True: c.cfg.n_mtp, False: 1}
    for r in steps:
        n = first if r["step"] <= first else longer
        assert r["lr"] == pytest.approx(schedule.hyper(r["step"] - 1, n).lr), r
        assert len(r["heads"]) == heads[not until < r["step"] / n <= mtp_from], r


@pytest.mark.parametrize("of_run, asked, same", [
    (None, 0, True), (0, None, True), (0, 0, True), (8, 8, True), (None, 8, False), (8, 0, False),
    (8, None, False)])
def test_zero_means_none(of_run, asked, same):
    """A checkpoint of a model without a window has None, and the user types 0."""
    cfg = ne.replace(ne.PRESETS["small"], window=of_run)
    for compare, word in (
            (lambda: need_same("x.bin", {"window": of_run}, {"window": asked}), "was started with"),
            (lambda: row_length_of("x.bin", cfg, {"window": asked}), "has")):
        if same:
            compare()
        else:
            with pytest.raises(ne.UserError, match=f"x.bin {word} .*--window"):
                compare()


def test_a_vocabulary_that_the_text_could_not_fill_may_be_named_again(text, elsewhere, capsys):
    """Only the size that the run was started with, or the one that it has"""
    small = ("train", "--data", text, *SMALL, "--steps", 2, "--save-every", 2)
    (elsewhere / "short.txt").write_bytes(text.read_bytes()[:400])
    at = small.index("--vocab-size") + 1
    short = (*small[:2], "short.txt", *small[3:at], 9999, *small[at + 1:])
    told(*short)
    cfg = ne.read_checkpoint("nanoeuler.bin").cfg
    assert cfg.vocab_size < 9999
    for size in 9999, cfg.vocab_size:
        assert "complete: 2 of 2 steps" in told("train", "--resume", "--vocab-size", size)
    for size in 9998, cfg.vocab_size + 1:
        refused(capsys, "train", "--resume", "--vocab-size", size,
                words=[f"--vocab-size {cfg.vocab_size}, not {size}"])
    told("train", "--resume", "--steps", 3)              # the size is kept
    assert "complete: 3 of 3 steps" in told("train", "--resume", "--vocab-size", 9999)
    told(*small, "--force")                              # a text that fills it
    cfg = ne.read_checkpoint("nanoeuler.bin").cfg
    assert cfg.vocab_size == int(small[at])
    refused(capsys, "train", "--resume", "--vocab-size", 9999, words=["--vocab-size"])
