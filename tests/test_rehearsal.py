"""Rehearsal: old examples in the steps of sft and dpo, whose questions are asked before and after.
"""
import json
import os
import re
import signal

import numpy as np
import pytest
from examples import ADD, FLAGS, copy_of, write_pairs
from helpers import never, outcome, refused, ROOT, run

import nanoeuler as ne
from nanoeuler_parts.checkpoint.file import sha256_of
from nanoeuler_parts.runs.run import Run
from nanoeuler_parts.tuning import rehearsal
from nanoeuler_parts.tuning.examples import (
    content_of, held_out, is_conversation, question_hash,
)
from nanoeuler_parts.tuning.rehearsal import (
    known_sets, MixedBatches, of_own_answers, old_examples, rows_rehearsed,
)
from nanoeuler_parts.tuning.rows import Examples
from nanoeuler_parts.tuning.sft import SftRun

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]
OLD = [dict(instruction=f"Count to {i}.", input="", output=f"{i}!") for i in range(400)]
NEW = [dict(instruction=f"Name {x}.", output=f"It is {x}.") for x in "abcdefghij"]
TUNE = ("sft", "chat.bin", "--data", "new.json", "--out", "x.bin", "--steps", 6, "--batch", 640,
        "--row-len", 160, *FLAGS[2:])


@pytest.fixture(scope="module")
def chat(base, tmp_path_factory):
    """A folder with chat.bin, which was trained on data/instructions.json, here OLD."""
    folder = copy_of(base, tmp_path_factory.mktemp("chat"))
    (folder / "data").mkdir()
    (folder / "data/instructions.json").write_text(json.dumps(OLD), encoding="utf-8")
    (folder / "new.json").write_text(json.dumps(NEW), encoding="utf-8")
    write_pairs(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run("sft", "--data", "data/instructions.json", "--steps", 2, "--out", "chat.bin",
            "--row-len", 160, *FLAGS)
        run("sft", "--data", "add.json", "--steps", 2, "--out", "other.bin", "--row-len", 160,
            *FLAGS)
    return folder


@pytest.fixture
def here(chat, tmp_path, monkeypatch):
    """A copy of that folder, and the working directory"""
    for path in chat.rglob("*.*"):
        if path.is_file():
            (tmp_path / path.relative_to(chat)).parent.mkdir(exist_ok=True)
            (tmp_path / path.relative_to(chat)).write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- which examples a model knows
def test_the_bundled_model_knows_all_instructions_and_everyday_conversations():
    state = ne.read_checkpoint(str(ROOT / "data/model.bin"), moments=False).state
    assert known_sets([state.text_sha256]) == ["data/instruct_open.json.xz", "data/everyday.py"]
    assert known_sets([]) == known_sets(["0" * 64]) == []
    digest = content_of(ROOT / "data/preferences_sample.jsonl")[1]
    both = known_sets([digest, state.text_sha256])
    assert sorted(both) == ["data/everyday.py", "data/instruct_open.json.xz",
                            "data/instructions.json"]


def test_old_examples_are_asked_or_rehearsed_and_never_held_out():
    new = {question_hash(OLD[0])}
    old = old_examples(["data/instruct_open.json.xz", "data/everyday.py"], new)
    examples = old.shuffled(1)
    asked, rehearsed = ({question_hash(e) for e in x} for x in (old.asked, examples))
    assert len(old.asked) == len(asked) == rehearsal.ASKED and not asked & rehearsed
    assert not any(map(held_out, old.asked + examples)) and len(examples) == old.n > 15_000
    assert sum(map(is_conversation, examples[:1000])) == 500             # each set in turn
    assert examples == old.shuffled(1) != old.shuffled(2)
    again = old_examples(old.sets, new)
    assert again.sha256 == old.sha256 and again.asked == old.asked
    assert old_examples(old.sets, {*new, *list(rehearsed)[:1]}).sha256 != old.sha256
    of_talks = sum(map(is_conversation, old.asked))
    assert of_talks == rehearsal.ASKED // 2


def test_a_checkpoint_names_all_examples_it_was_trained_on(here):
    assert ne.read_checkpoint("chat.bin").state.learned == []            # the base knows none
    first = ne.read_checkpoint("chat.bin").state.text_sha256
    run(*TUNE, "--rehearse", 0)
    assert ne.read_checkpoint("x.bin").state.learned == [first] == [
        sha256_of("data/instructions.json")]
    run("sft", "x.bin", "--data", "add.json", "--out", "y.bin", "--steps", 1, *FLAGS)
    assert ne.read_checkpoint("y.bin").state.learned == [first, sha256_of("new.json")]
    assert ne.read_checkpoint("y.bin").state.options["rehearse"] == 0.5


# ---- batches
def test_a_step_has_its_share_of_old_rows_and_each_epoch_all_new_ones():
    def rows(first, n):
        return [(np.array([first + i], np.int32), np.array([1], np.int32)) for i in range(n)]

    new, old = Examples(rows(10, 6), 4, 2, 5), Examples(rows(50, 9), 4, 2, 5)
    mixed, seen = MixedBatches(new, old, 3), []
    for step in range(6):
        tokens, targets = mixed.take(step * 5, 5)
        assert tokens.shape == (5, 4) and targets.shape == (2, 5, 4)
        assert (tokens[:2, 0] < 50).all() and (tokens[2:, 0] >= 50).all()
        assert (targets[0, :, 0] == 1).all() and mixed.n_read(step * 5, 5) == 10
        seen.append(tokens[:, 0])
    seen = np.array(seen)
    assert sorted(seen[:3, :2].ravel()) == sorted(seen[3:, :2].ravel()) == [*range(10, 16)]
    assert sorted(seen[:3, 2:].ravel()) == [*range(50, 59)]


@pytest.mark.parametrize("share, n_new, n_old", [
    (0.5, 16, 16), (0.75, 16, 48), (0.9, 4, 36), (0.01, 4, 1), (0.25, 9, 3), (0.0, 7, 0)])
def test_old_rows_come_on_top_of_the_new_ones(share, n_new, n_old):
    assert rows_rehearsed(share, n_new) == n_old


# ---- runs
def test_a_run_rehearses_what_its_model_was_trained_on(here, capsys):
    """By default; the length in epochs is that of the new examples."""
    run(*TUNE[:6], "--epochs", 4, *TUNE[8:])
    said, state = capsys.readouterr().out, ne.read_checkpoint("x.bin").state
    assert "rehearses        4 of 8 rows of each step, up to 80 examples of " in said
    assert (state.options["rehearse"], state.step) == (0.5, 10)          # 4 * 10 / 4
    assert state.options["lr"] == pytest.approx(6e-5)
    asked = re.findall(r"^old questions: (\d+) of 200 answered right", said, re.M)
    after = re.findall(r"^old questions: (\d+) of 200 right before the run, (\d+) after it; (\d+) "
                       r"of the (\d+) are still right", said, re.M)
    assert len(asked) == len(after) == 1 and after[0][0] == after[0][3] == asked[0]
    [r] = [r for r in outcome(here, "x").log if "old_right" in r]
    figures = r["old_right_before"], r["old_right"], r["old_kept"]
    assert (r["step"], r["old_asked"], *map(str, figures)) == (10, 200, *after[0][:3])


def test_the_share_is_in_the_batches_and_no_old_row_is_asked_or_validated(here, monkeypatch):
    runs = []
    monkeypatch.setattr(SftRun, "go", lambda self: runs.append(self))
    run(*TUNE, "--rehearse", 0.25)
    run(*TUNE, "--rehearse", 0)
    mixed, plain = runs
    assert (mixed.data.batches.n_old, mixed.B) == (1, 5)
    old = {row[row >= 0].tobytes() for row in mixed.data.batches.old.rows}
    assert len(old) == 12                    # two for each step, from which the best are taken
    rows_of_asked = [mixed.rows_of(e, mixed.tokenizer)[0] for e in mixed.old.asked]
    assert not old & {np.concatenate(row).tobytes() for row in rows_of_asked}
    assert not old & {row[row >= 0].tobytes() for row in mixed.data.responses.rows}
    assert isinstance(plain.data.batches, Examples) and plain.B == 4 and len(plain.old.asked) == 200
    assert plain.options.lr == pytest.approx(2e-3)       # the lower rate is that of rehearsal


def test_only_what_the_model_answers_right_is_rehearsed(here, capsys, monkeypatch):
    """Where this is enough; here it is every second old example."""
    runs = []
    monkeypatch.setattr(SftRun, "right_answers", lambda self, examples: [
        *range(1, len(examples), 2)])
    monkeypatch.setattr(SftRun, "begin", lambda self, own=SftRun.begin: (
        runs.append((self, self.data.batches.old.rows)), own(self)))
    for steps in (6, 1):
        run(*TUNE[:7], steps, *TUNE[8:], "--force")
    (many, rows), (few, _) = runs
    old, known = many.data.batches.old, many.state.old_known
    assert known == [*range(1, 48, 2)] and old.n == 24 and np.array_equal(old.rows, rows[known])
    tokens, _ = many.data.batches.take(0, many.B)
    assert all(x.tobytes() in {row[:160].tobytes() for row in np.maximum(rows[known], 0)}
               for x in tokens[4:])
    assert few.data.batches.old.n == 8 == len(few.state.old_known)       # four are too few
    assert "rehearsing 24 of 48 old examples" in capsys.readouterr().out


def test_held_out_examples_are_new_ones(here, capsys):
    """--holdout, --keep-best and --cuts concern the new examples alone."""
    runs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SftRun, "summarize", lambda self, *args: runs.append(self))
        run("sft", "chat.bin", "--data", "add.json", "--out", "x.bin", "--steps", 6, "--batch", 640,
            "--row-len", 160, "--holdout", 0.2, "--keep-best", "--cuts", 0.3, "--eval-every", 3,
            *FLAGS[2:])
    [x] = runs
    assert 15 < len(x.data.responses.rows) < 45 and x.data.batches.n_old == 4
    old = {row[row >= 0].tobytes() for row in x.data.batches.old.rows}
    assert not old & {row[row >= 0].tobytes() for row in x.data.responses.rows}
    assert ne.read_checkpoint("x_best.bin").state.old_known == x.state.old_known != []


def test_a_resumed_run_has_the_bits_of_a_whole_one(here, capsys):
    run(*TUNE)
    whole, before = outcome(here, "x"), ne.read_checkpoint("x.bin").state
    stop = pytest.MonkeyPatch()
    with stop.context() as patch:            # saves after step 3, as on Ctrl-C
        patch.setattr(Run, "stopping", lambda self, caught: StopAt(self, 3))
        run(*TUNE, "--force")
    assert ne.read_checkpoint("x.bin").state.step == 3
    capsys.readouterr()
    run("sft", "--resume", "--out", "x.bin")
    assert outcome(here, "x").arrays == whole.arrays
    after = ne.read_checkpoint("x.bin").state
    assert (after.old_right, after.rehearsed_sha256) == (before.old_right, before.rehearsed_sha256)
    assert "answered right" not in (said := capsys.readouterr().out) and "still right" in said


@pytest.mark.parametrize("phase", ["to rehearse", "not rehearsed", "again"])
def test_ctrl_c_ends_the_old_questions(phase, here, capsys, monkeypatch):
    """Before step 1, the resumed run has the bits of a whole one, also if the examples that it
    rehearses are stored already.  The model answers the odd numbers right."""
    monkeypatch.setattr("nanoeuler_parts.tuning.sft.is_right",
                        lambda reply, e: e["output"][-2] in "13579")
    run(*TUNE)
    whole, said, known = outcome(here, "x"), capsys.readouterr().out, known_in("x.bin")
    assert 8 <= len(known) < 40
    assert all(f"\nasking {x}" in said for x in ("48 old questions, to rehearse",
                                                 "200 old questions that are not rehearsed",
                                                 "the 200 old questions again"))
    calls = iter(["to rehearse", "not rehearsed", "again"])

    def signalled(*args, own=rehearsal.greedy_answers):
        if next(calls) == phase:
            os.kill(os.getpid(), signal.SIGINT)
        return own(*args)

    with monkeypatch.context() as patch:
        patch.setattr("nanoeuler_parts.tuning.sft.greedy_answers", signalled)
        run(*TUNE, "--force")
    said = capsys.readouterr().out
    if phase == "again":
        assert "not all asked again" in said and "x.bin is complete" in said
    else:
        assert "stopped at step 0 of 6, and saved" in said
        assert bool(known_in("x.bin")) == (phase == "not rehearsed")
        run("sft", "--resume", "--out", "x.bin")
        assert "still right" in capsys.readouterr().out
    assert outcome(here, "x").arrays == whole.arrays
    assert known_in("x.bin") == known


def known_in(file):
    return ne.read_checkpoint(file).state.old_known


class StopAt:
    """A list of signals that has one after this step"""

    def __init__(self, run, step):
        self.run, self.step = run, step

    def __bool__(self):
        return self.run.step == self.step


def test_a_resumed_run_must_find_its_old_examples(here, capsys):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "stopping", lambda self, caught: StopAt(self, 3))
        run(*TUNE)
    path = here / "data/instructions.json"
    path.write_text(json.dumps(OLD[1:]), encoding="utf-8")
    refused(capsys, "sft", "--resume", "--out", "x.bin", words=["rehearses have changed", "data/"])
    refused(capsys, "sft", "--resume", "--out", "x.bin", "--rehearse", 0,
            words=["--rehearse 0.5", "drop the flag"])


def test_other_models_rehearse_their_own_answers_if_asked_to(here, capsys, monkeypatch):
    other = "sft", "other.bin", *TUNE[2:]
    run(*other)
    said = capsys.readouterr().out
    assert "old questions" not in said and "rehearses" not in said
    assert ne.read_checkpoint("x.bin").state.options["rehearse"] == 0
    monkeypatch.setattr("nanoeuler_parts.tuning.sft.answers_by", own_answers)
    run(*other, "--rehearse", 0.5, "--force")
    said, whole = capsys.readouterr().out, outcome(here, "x")
    assert "examples of the model's own answers" in said
    assert re.search(r"^old questions: \d+ of 64 answered right", said, re.M)
    assert len(ne.read_checkpoint("x.bin").state.own_answers) == 90
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "stopping", lambda self, caught: StopAt(self, 3))
        run(*other, "--rehearse", 0.5, "--force")
    monkeypatch.setattr("nanoeuler_parts.tuning.sft.answers_by", never)  # they are stored
    run("sft", "--resume", "--out", "x.bin")
    assert outcome(here, "x").arrays == whole.arrays


def own_answers(decoder, questions, prompts, tokenizer, ends):
    """What a model that had learned to answer would say: a model of two steps never ends."""
    assert isinstance(decoder, ne.Decoder) and len(questions) == len(prompts)
    return [[e["instruction"], e["input"], f"I say {i}."] for i, e in enumerate(questions[:90])]


def test_answers_are_sampled_and_their_cost_is_printed(capsys):
    """By the bundled model, which ends its answers; those that are right are exactly its own."""
    c = ne.read_checkpoint(str(ROOT / "data/model.bin"), moments=False)
    from nanoeuler_parts.chat.templates import chat_ids, ends_of
    questions = [dict(instruction=x, input="") for x in ("hi", "What is the capital of Norway?")]
    prompts = [chat_ids(c.state.template, [("user", e["instruction"])], c.state, c.tokenizer)
               for e in questions]
    decoder, ends = ne.Decoder(c.cfg, c.flat), ends_of(c.state, c.tokenizer)
    found = rehearsal.answers_by(decoder, questions, prompts, c.tokenizer, ends)
    said = capsys.readouterr().out
    assert "answering 2 questions with the model itself" in said
    assert re.search(r"^sampled \d+ tokens in [\d.]+ s; 2 answers", said, re.M)
    speaker = ne.load(str(ROOT / "data/model.bin"), temperature=0.0, weights="f32")
    assert [x[2] for x in found] == [r.answer for r in speaker.generate(["hi", questions[1][
        "instruction"]], tokens=100)]
    old = of_own_answers([*found] * 40)
    assert len(old.asked) == 64 and old.to_rehearse[0][0]["output"] == found[0][2]
    replies = rehearsal.greedy_answers(decoder, prompts, c.tokenizer, ends, 100)
    assert rehearsal.is_right(replies[0], old.asked[0])
    assert not rehearsal.is_right(replies[1], old.asked[0])
    [cut] = rehearsal.greedy_answers(decoder, prompts[:1], c.tokenizer, ends, 1)
    assert not rehearsal.is_right(cut, dict(instruction="hi", input="", output=cut.answer))


def test_what_is_refused(here, capsys):
    refused(capsys, "sft", "nanoeuler.bin", *TUNE[2:], "--rehearse", 0.5,
            words=["expected a chat model", "--rehearse 0"])
    refused(capsys, *TUNE, "--rehearse", 1, words=["--rehearse: expected 0 to 0.9, found 1"])
    refused(capsys, "sft", "chat.bin", "--data", "data/instructions.json", "--out", "x.bin",
            "--rehearse", 0.5, words=["found none", "--rehearse 0"])
    run("sft", "chat.bin", "--data", "data/instructions.json", "--out", "x.bin", "--steps", 1,
        "--row-len", 160, *FLAGS)
    assert ne.read_checkpoint("x.bin").state.options["rehearse"] == 0    # nothing is left


def test_old_examples_that_do_not_fit_or_are_gone(here, capsys):
    long = [dict(instruction=f"{i}?" * 40, input="", output=f"{i} ") for i in range(400)]
    (here / "long.json").write_text(json.dumps(long), encoding="utf-8")
    (here / "data/instructions.json").unlink()
    with pytest.raises(ne.UserError, match="holds examples to rehearse; restore it, or use "
                                           "--rehearse 0"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rehearsal, "beside_program", lambda name: name)
            rehearsal.entries_of("data/instructions.json")
    (here / "data/instructions.json").write_text(json.dumps(long), encoding="utf-8")
    run("sft", "nanoeuler.bin", "--data", "data/instructions.json", "--steps", 1, "--out",
        "y.bin", "--row-len", 400, *FLAGS)
    refused(capsys, "sft", "y.bin", *TUNE[2:], words=[
        "expected old examples of at most 160 tokens, found none", "--row-len", "--rehearse 0"])


# ---- dpo
PREFER = ("dpo", "chat.bin", "--data", "pairs.jsonl", "--out", "y.bin", "--steps", 3, "--batch",
          1280, *FLAGS[2:])


def test_dpo_rehearses_with_the_weight_of_nll(here, monkeypatch, capsys):
    """weights of the pairs are those of a run on them alone; old answers share the mean of nll."""
    from nanoeuler_parts.tuning.dpo import DpoRun
    refused(capsys, *PREFER, "--rehearse", 0.5, words=["expected --nll above 0", "--nll 1"])
    run(*PREFER)
    assert ne.read_checkpoint("y.bin").state.options["rehearse"] == 0
    found = []
    ce_weights = DpoRun.ce_weights

    def recorded(self, tokens, targets):
        weight, measures = ce_weights(self, tokens, targets)
        found.append((self.options, weight.copy(), targets))
        return weight, measures

    monkeypatch.setattr(DpoRun, "ce_weights", recorded)
    run(*PREFER, "--nll", 2, "--force")
    state = ne.read_checkpoint("y.bin").state
    assert (state.options["rehearse"], state.options["lr"]) == (0.5, 3e-5)
    assert "still right" in capsys.readouterr().out
    options, weight, targets = found[0]
    B = len(weight)
    assert B == 16 and len(found) == 3
    n = (targets[0] >= 0).sum(1)
    answers = [0, 2, 4, 6, *range(8, 16)]    # four chosen responses, eight old answers
    want = np.zeros(B)
    want[answers] = options.nll / 12 / n[answers]
    want[:8] += np.array([1, -1] * 4) * options.beta / 2 / 4     # at the reference, over the pairs
    assert np.allclose(weight[:, 0], want, rtol=1e-5) and not weight[:, 1:].any()


def test_a_resumed_dpo_has_the_bits_of_a_whole_one(here):
    prefer = *PREFER, "--nll", 1
    run(*prefer)
    whole = outcome(here, "y")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "stopping", lambda self, caught: StopAt(self, 2))
        run(*prefer, "--force")
    run("dpo", "--resume", "--out", "y.bin")
    assert outcome(here, "y").arrays == whole.arrays
    assert len(whole.reference) == 2 * len(ADD)          # old answers need none
