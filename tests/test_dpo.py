"""Preferences: the loss by hand and by PyTorch, pairs in rows, the run and its errors."""
import io
import json
import math
import os
import re
from types import SimpleNamespace

import numpy as np
import pytest
from examples import FLAGS, PAIRS, copy_of, write_pairs
from helpers import (STARTED, TINY, nanoeuler, needs, ok, outcome, put_together, random_flat,
                     refused, run, take_apart, told)

import nanoeuler as ne
from nanoeuler_parts.kernels import compile_kernels
from nanoeuler_parts.runs.start import launch
from nanoeuler_parts.tuning.dpo import dpo_loss, DpoOptions, DpoRun
from nanoeuler_parts.tuning.examples import held_out, prompt_of
from nanoeuler_parts.tuning.rows import Examples

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]
RUN = ("dpo", "nanoeuler.bin", "--data", "pairs.jsonl", "--steps", 30, "--eval-every", 10,
       "--save-every", 15, "--lr", 0.002, "--batch", 640, *FLAGS[2:])


# ---- the loss
def test_the_loss_by_hand():
    ce, reference = np.array([3.0, 5.0, 4.0, 2.0]), np.array([4.0, 4.0, 4.0, 4.0])
    measures, weight = dpo_loss(ce, reference, 0.5)      # log pi - log ref: 1, -1; 0, 2
    margins = np.array([0.5 * (1 + 1), 0.5 * (0 - 2)])
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    assert measures == pytest.approx(dict(loss=-np.log(sigmoid(margins)).mean(), accuracy=0.5,
                                          margin=0.0, chosen=0.5))
    slope = 0.5 * sigmoid(-margins) / 2
    assert weight == pytest.approx([slope[0], -slope[0], slope[1], -slope[1]])


def test_a_policy_that_is_its_reference():
    """ln 2, chance, and half of beta each way."""
    ce = np.random.default_rng(1).random(8)
    measures, weight = dpo_loss(ce, ce, 0.3)
    assert measures == dict(loss=pytest.approx(math.log(2)), accuracy=0.5, margin=0.0, chosen=0.0)
    assert weight * 4 == pytest.approx([0.15, -0.15] * 4)


@pytest.mark.parametrize("far", [-1e5, 1e5])
def test_far_margins_do_not_overflow(far):
    with np.errstate(over="raise", invalid="raise"):
        measures, weight = dpo_loss(np.array([far, 0.0]), np.zeros(2), 1.0)
    assert measures["loss"] == max(0, far) and weight.tolist() == ([1, -1] if far > 0 else [0, 0])


def batch_of(P):
    rng = np.random.default_rng(3)
    pairs = [tuple(rng.integers(0, TINY.vocab_size, n).astype(np.int32) for n in lengths)
             for lengths in ((3, 2), (3, 5), (1, 1), (1, 7), (5, 4), (5, 1))]
    return Examples(pairs, TINY.seq_len, P, 1, 2).batch(slice(None))


def test_gradient_at_the_reference():
    """d loss = -beta / 2 * mean of (grad log pi(chosen) - grad log pi(rejected))."""
    tokens, targets = batch_of(TINY.n_mtp)
    model, P = ne.Model(TINY, random_flat(TINY, 4)), TINY.n_mtp
    grad_ce = []
    for b in range(len(tokens)):
        model.g_flat[:] = 0
        model.gradient(tokens[b:b + 1], targets[:, b:b + 1], np.eye(P)[0])
        grad_ce.append(model.g_flat.copy())
    want = 0.1 / 2 * np.mean([c - r for c, r in zip(grad_ce[::2], grad_ce[1::2])], 0)
    ce, weight = model.losses(tokens, targets[0]), np.zeros((len(tokens), P))
    weight[:, 0] = dpo_loss(ce, ce, 0.1)[1]
    model.g_flat[:] = 0
    model.gradient(tokens, targets, weight)
    assert np.allclose(model.g_flat, want, rtol=1e-9, atol=1e-14)
    assert not model.g.lm_head[1:].any()


@pytest.mark.parametrize("nll", [0.0, 1.5])
def test_gradient_equals_pytorchs(nll):
    """autograd through -logsigmoid and the chosen's mean loss, from the logits back; float64."""
    torch = needs("torch")
    tokens, targets = batch_of(TINY.n_mtp)
    model = ne.Model(TINY, random_flat(TINY, 4))
    logits = torch.tensor(model.logits(tokens)[:, 0].copy(), requires_grad=True)
    y = torch.tensor(targets[0].astype(np.int64))
    picked = logits.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0]
    log_pi = (picked * (y >= 0)).sum(1)
    reference = np.random.default_rng(5).normal(log_pi.detach().numpy(), 3)
    ratio = log_pi - torch.tensor(reference)
    loss = -torch.nn.functional.logsigmoid(0.7 * (ratio[::2] - ratio[1::2])).mean()
    (loss - nll * (log_pi / (y >= 0).sum(1))[::2].mean()).backward()
    ce = model.losses(tokens, targets[0])
    assert ce == pytest.approx(-log_pi.detach().numpy(), rel=1e-12)
    batches = SimpleNamespace(pick=lambda i, n: np.arange(i, i + n),
                              batch=lambda rows: (tokens[rows], targets[:, rows]))
    run = SimpleNamespace(
        learned_reference=-reference, B=len(tokens), step=0, state=SimpleNamespace(micro_batch=2),
        model=model,
        data=SimpleNamespace(batches=batches), new_examples=batches,
        losses=lambda *args: DpoRun.losses(run, *args),
        options=DpoOptions(beta=0.7, nll=nll, rehearse=0.0))
    weight, measures = DpoRun.ce_weights(run, tokens, targets)
    assert measures["loss"] == pytest.approx(loss.item(), rel=1e-12)
    model.gradient(tokens, targets, weight)              # leaves d loss / d logits in their place
    assert np.allclose(model.a.logits[:, 0], logits.grad.numpy(), rtol=1e-10, atol=1e-15)
    assert not weight[:, 1:].any()           # the other heads learn nothing


def test_no_pass_takes_more_than_a_micro_batch(tuned, tmp_path, monkeypatch):
    """A GPU keeps the memory of the largest pass, fills up smaller ones, and the order of sums
    depends on it: a resumed run, which reads no reference, would have other bits."""
    sizes = []

    class Other(ne.Model):
        def losses(self, tokens, targets):
            sizes.append(len(tokens))
            return super().losses(tokens, targets)

        def gradient(self, tokens, targets, weight):
            sizes.append(len(tokens))
            return super().gradient(tokens, targets, weight)

    monkeypatch.chdir(tmp_path)
    launch(DpoRun, Other, file=str(tuned / "nanoeuler.bin"), out="x.bin", resume=False,
              force=False, data=str(tuned / "pairs.jsonl"), steps=3, batch=320, eval_every=2)
    assert max(sizes) == ne.read_checkpoint("x.bin").state.micro_batch == 2


# ---- rows
def test_pairs_stay_together_and_come_in_shuffled_epochs():
    rows = [(np.array([i], np.int32), np.array([1], np.int32)) for i in range(14)]
    examples = Examples(rows, 4, 2, 5, 2)
    taken = examples.take(0, 28)[0][:, 0].reshape(2, 7, 2)
    assert (taken[:, :, 1] == taken[:, :, 0] + 1).all() and (taken[:, :, 0] % 2 == 0).all()
    assert (np.sort(taken[:, :, 0]) == np.arange(0, 14, 2)).all()
    assert np.array_equal(examples.take(10, 6)[0][:, 0], taken.ravel()[10:16])


# ---- the run
@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    folder = write_pairs(copy_of(base, tmp_path_factory.mktemp("tuned")))
    said = ok(nanoeuler(*RUN, cwd=folder, cold=True))
    (folder / "stdout.txt").write_text(said, encoding="utf-8")
    return folder


def test_what_a_run_prints_and_writes(tuned):
    out, ended = (tuned / "stdout.txt").read_text("utf-8"), outcome(tuned, "nanoeuler_dpo")
    assert (ended.kind, ended.step) == ("chat", 30) and len(ended.reference) == 2 * len(PAIRS)
    assert f"{STARTED} chat nanoeuler_dpo.bin" in out and "left out" in out
    assert re.search(r"^step +20/30  loss \S+  accuracy \d+%  margin \S+  chosen [+-]\S+  lr", out,
                     re.M)
    assert re.search(r"^validation loss .* accuracy 100%.* bits/byte of the chosen answers "
                     r"on all held-out pairs", out, re.M)
    steps = [r for r in ended.log if "loss" in r]
    held = [r for r in ended.log if "val_loss" in r]
    assert [r["step"] for r in held] == [10, 20, 30]
    first, last = steps[0], held[-1]
    assert first["loss"] == pytest.approx(math.log(2)) and first["margin"] == first["chosen"] == 0
    assert first["accuracy"] == 0.5 and last["val_accuracy"] == 1 and last["val_loss"] < 0.6


def test_the_reference_is_the_first_model_on_each_response_alone(tuned):
    c, base_model = (ne.read_checkpoint(str(tuned / f"{name}.bin"))
                     for name in ("nanoeuler_dpo", "nanoeuler"))
    model, encode = ne.Model(base_model.cfg, base_model.flat), c.tokenizer.encode
    ordered = [e for held in (False, True) for e in PAIRS if held_out(e) == held]
    for i in (0, 50, len(PAIRS) - 1):
        for j, key in enumerate(("chosen", "rejected")):
            prompt = encode(prompt_of(ordered[i]))
            row = [*prompt, *encode(ordered[i][key]), c.tokenizer.specials["</s>"]]
            z = model.logits(np.array([row[:-1]], np.int32))[0, 0].astype(float)
            z -= np.log(np.exp(z).sum(1, keepdims=True))
            log_ref = sum(z[t, row[t + 1]] for t in range(len(prompt) - 1, len(row) - 1))
            assert c.state.reference[2 * i + j] == pytest.approx(-log_ref, rel=1e-5)


def test_micro_batches_train_the_same_weights(base, tuned, tmp_path, monkeypatch):
    monkeypatch.chdir(write_pairs(copy_of(base, tmp_path)))
    run(*RUN, "--micro-batch", 3)
    assert outcome(tmp_path, "nanoeuler_dpo").arrays == outcome(tuned, "nanoeuler_dpo").arrays


# ---- what can go wrong: in this process
GOOD = dict(instruction="Sing.", input="", chosen="La.", rejected="No.")


@pytest.mark.parametrize("lines, words", [
    ([json.dumps(GOOD), "", '{"instruction": "a", '], ["line 3: Expecting"]),
    ([json.dumps(GOOD), "7"], ["line 2", "int", "object"]),
    (["{}"], ["line 1", "instruction is missing or null"]),
    ([json.dumps({**GOOD, "chosen": None})], ["line 1", "chosen is missing or null"]),
    ([json.dumps(dict(instruction="a", output="b"))], ["line 1", "chosen is missing", "rejected"]),
    ([json.dumps([GOOD, {"instruction": "a", "chosen": "b"}])],
     ["example 2", "rejected is missing"]),
    (["", " "], ["expected examples, found none"]),
    ([json.dumps({**GOOD, "rejected": ""})] * 200, ["none of 200 examples"]),
    ([json.dumps({**GOOD, "instruction": f"{i}" * 9000}) for i in range(100)],
     ["none of 100 examples", "2048 tokens", "--row-len"]),
])
def test_bad_pairs(lines, words, base, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(copy_of(base, tmp_path))
    (tmp_path / "bad.jsonl").write_text("\n".join(lines), encoding="utf-8")
    refused(capsys, "dpo", "nanoeuler.bin", "--data", "bad.jsonl",
            words=["bad.jsonl", *words, "; "])
    assert sorted(os.listdir()) == ["add.json", "bad.jsonl", "nanoeuler.bin"]


def test_pairs_without_an_answer_and_long_ones_are_counted(base, tmp_path,
                                                           monkeypatch):
    bad = [{**GOOD, "chosen": ""}, {**GOOD, "rejected": "x" * 900}, {**GOOD, "rejected": "y" * 900}]
    monkeypatch.chdir(write_pairs(copy_of(base, tmp_path), [*bad, *PAIRS]))
    said = told(*RUN, "--steps", 1, "--seq-len", 160)
    assert re.search(r"left out +2 examples longer than a row of 160 tokens, 1 empty", said)


def test_pairs_with_one_answer_twice_are_named(base, tmp_path, monkeypatch, capsys):
    """They are accepted: of one there may be some in any file."""
    monkeypatch.chdir(write_pairs(copy_of(base, tmp_path), PAIRS))
    twice = [{**e, "rejected": e["chosen"]} if i in (3, 5) else e for i, e in enumerate(PAIRS)]
    for pairs, said in ((PAIRS, False), (twice, True)):
        write_pairs(tmp_path, pairs)
        run(*RUN, "--steps", 1, "--force")
        notes = [x for x in capsys.readouterr().err.splitlines() if "are the same" in x]
        assert len(notes) == said
    assert "2 of 144 pairs, the first is pair 4" in notes[0]
    write_pairs(tmp_path, [{**e, "rejected": e["chosen"]} for e in PAIRS])
    refused(capsys, *RUN, "--force", words=["pairs.jsonl", "144 of 144 pairs", "--data"])


def test_a_model_that_nobody_taught_to_answer_is_named(base, tuned, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(write_pairs(copy_of(base, tmp_path)))
    (tmp_path / "chat.bin").write_bytes((tuned / "nanoeuler_dpo.bin").read_bytes())
    for name, said in (("nanoeuler.bin", True), ("chat.bin", False)):
        run("dpo", name, *RUN[2:], "--steps", 1, "--force")
        note = f"note: {name} is a base model; run sft first"
        assert (note in capsys.readouterr().err) == said


def test_what_it_unlearns_is_no_sign_of_learning_by_heart(base, tmp_path, monkeypatch, capsys):
    found = iter([1.5, 1.7, 1.7])
    monkeypatch.setattr("nanoeuler_parts.runs.evaluation.evaluate", lambda *args: next(found))
    monkeypatch.chdir(write_pairs(copy_of(base, tmp_path)))
    run(*RUN, "--steps", 3, "--eval-every", 2, "--holdout", 0.2)
    assert "overfit" not in capsys.readouterr().err


@pytest.mark.parametrize("options, advice", [
    ({}, "fewer --epochs, more pairs, or --nll 1"),
    ({"steps": 9}, "fewer --steps, more pairs, or --nll 1"),
    ({"nll": 1.0}, "fewer --epochs, more pairs, or a larger --nll than 1")])
def test_a_note_advises_what_the_user_has_not_given(options, advice):
    run = object.__new__(DpoRun)
    run.options, run.last_loss, run.scope = DpoOptions(**options), 0.01, "all held-out pairs"
    run.state, run.holds_out = SimpleNamespace(best=1.5, best_step=0), True
    note = run.note_of_end(64, 3.26)
    assert note.endswith(f", {advice}") and "memorized" not in note
    assert "has learned the preferences of the training pairs (loss 0.010) and forgets" in note


def test_a_json_list_is_fine_too(base, tuned, tmp_path, monkeypatch):
    monkeypatch.chdir(copy_of(base, tmp_path))
    (tmp_path / "pairs.json").write_text(json.dumps(PAIRS, indent=1), "utf-8")
    run(*RUN, "--data", "pairs.json")
    assert outcome(tmp_path, "nanoeuler_dpo").arrays == outcome(tuned, "nanoeuler_dpo").arrays


def test_default_data(base, tmp_path, monkeypatch, capsys):
    """Here or beside the program, which has none here; what `make data` fetches goes first."""
    monkeypatch.chdir(copy_of(base, tmp_path))
    program = tmp_path / "program"
    (program / "data").mkdir(parents=True)
    compile_kernels()
    monkeypatch.setattr(ne, "__file__", str(program / "nanoeuler.py"))
    start = ("dpo", "nanoeuler.bin", "--steps", 1, "--force", *RUN[-4:-2])
    refused(capsys, *start, words=["data/preferences_sample.jsonl", "--data"])
    for name in ("data/preferences_sample.jsonl", "data/preferences.jsonl"):
        for folder in (program, tmp_path):
            (folder / "data").mkdir(exist_ok=True)
            write_pairs(folder, name=name)
            run(*start)
            said = capsys.readouterr().out
            shown = name if folder == tmp_path else program / name
            assert f"  examples         {shown}, " in said
            assert ("to use data/preferences.jsonl, run make data" in said) == ("sample" in name)


def test_what_dpo_refuses(base, tuned, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(write_pairs(copy_of(base, tmp_path)))
    refused(capsys, "dpo", words=["nanoeuler_chat.bin: No such file", "make it with"])
    refused(capsys, "dpo", "--resume", "--out", "nanoeuler.bin", words=["dpo", "--out"])
    for flag, value in (("beta", 0), ("beta", "nan"), ("epochs", 0)):
        refused(capsys, *RUN, f"--{flag}", value, words=[flag, value])
    (tmp_path / "dpo.bin").write_bytes((tuned / "nanoeuler_dpo.bin").read_bytes())
    for verb in ("train", "sft"):
        refused(capsys, verb, "--resume", "--out", "dpo.bin", words=[f"not made by {verb}"])
    refused(capsys, "dpo", "--resume", "--out", "dpo.bin", "--beta", 0.2, words=["beta", "0.1"])
    write_pairs(tmp_path, PAIRS[1:])
    refused(capsys, "dpo", "--resume", "--out", "dpo.bin", "--steps", 40, words=["sha256", "--out"])


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_a_log_does_not_empty_the_pairs_of_others(force, base, tmp_path, monkeypatch,
                                                  capsys):
    monkeypatch.chdir(write_pairs(copy_of(base, tmp_path)))
    write_pairs(tmp_path, PAIRS[:9], "mine.jsonl")
    before = (tmp_path / "mine.jsonl").read_bytes()
    refused(capsys, *RUN, "--out", "mine", *force,
            words=["mine.jsonl is not a training log", "--out"])
    assert (tmp_path / "mine.jsonl").read_bytes() == before


def test_help_names_no_setting_that_dpo_does_not_use(capsys):
    with pytest.raises(SystemExit) as ended:
        ne.main(["dpo", "--help-all"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and "--beta" in said and "--mtp-weight" not in said
    assert "--seq-len" in said


def test_an_epoch_is_every_pair_and_validation_the_chosen(base, tmp_path):
    pairs = [{**e, "chosen": e["chosen"].replace("plus", "\u00e9")} for e in PAIRS]
    held = [e["chosen"] for e in pairs if held_out(e)]
    start = ne.read_checkpoint(str(base / "nanoeuler.bin"))
    start = start._replace(moments=(), state=ne.State(
        kind="chat", reference=[60.0 + i % 7 for i in range(2 * len(PAIRS))]))
    path = write_pairs(tmp_path, pairs) / "pairs.jsonl"
    options = DpoOptions(data=str(path), batch=640, beta=0.3)
    run = DpoRun(str(tmp_path / "x.bin"), start, options.check())
    assert run.B == 4 and run.state.n_steps == math.ceil(2 * (len(PAIRS) - len(held)) / 4)
    tokens, targets, size = run.data.validation
    assert [run.tokenizer.decode(y[y >= 0]).decode() for y in targets] == [x + "</s>" for x in held]
    assert len(tokens) == len(held) and size == sum(len(x.encode()) for x in held)
    count = (run.data.batches.answers >= 0).sum()
    assert run.data.bytes_per_token * count == sum(
        len((e["chosen"] + e["rejected"]).encode()) for e in pairs if not held_out(e))
    run.log.file = io.BytesIO()
    run.measure()
    ce = run.losses(run.data.responses, range(len(run.data.responses.rows)))
    want, _ = dpo_loss(ce, np.array(run.state.reference[-len(ce):]), 0.3)
    got = json.loads(run.log.file.getvalue().splitlines()[-1])
    assert got == pytest.approx({"step": 0, **{f"val_{k}": v for k, v in want.items()}})


def test_a_reference_of_other_responses_is_refused(base, tmp_path, monkeypatch,
                                                   capsys):
    monkeypatch.chdir(write_pairs(copy_of(base, tmp_path)))
    run(*RUN[:4], "--steps", 1, *RUN[-4:])
    c = ne.read_checkpoint("nanoeuler_dpo.bin")
    whole, path = c.state.reference, tmp_path / "nanoeuler_dpo.bin"
    ne.write_checkpoint(str(path), *c[:2], ne.replace(c.state, reference=whole[:-1]), *c[3:])
    refused(capsys, "dpo", "--resume", "--steps", 2,
            words=["expected the reference of", "pairs.jsonl", "drop --resume"])
    for wrong in (whole[:-1], [str(x) for x in whole]):
        as_older_versions_wrote_it(path, c, wrong)
        refused(capsys, "dpo", "--resume", "--steps", 2,
                words=["expected the reference of", "pairs.jsonl", "drop --resume"])


def as_older_versions_wrote_it(path, c, reference):
    """Writes a Checkpoint whose reference is in the header."""
    ne.write_checkpoint(str(path), *c[:2], ne.replace(c.state, reference=[]), *c[3:])
    header, data = take_apart(path)
    state = json.loads(header["__metadata__"]["state"])
    header["__metadata__"]["state"] = json.dumps({**state, "reference": reference})
    put_together(path, header, data)


def test_a_reference_in_the_header_is_read(base, tmp_path, monkeypatch):
    """An older checkpoint goes on to the bits of a newer one, without reading the pairs again."""
    monkeypatch.chdir(write_pairs(copy_of(base, tmp_path)))
    run(*RUN[:4], "--steps", 2, *RUN[-4:])
    path, ended = tmp_path / "nanoeuler_dpo.bin", []
    c = ne.read_checkpoint(str(path))
    before = path.read_bytes()
    as_older_versions_wrote_it(path, c, c.state.reference)
    assert path.read_bytes() != before and ne.read_checkpoint(str(path)).state == c.state
    for begun in (path.read_bytes(), before):
        path.write_bytes(begun)
        assert "log-probabilities of all pairs" not in told("dpo", "--resume", "--steps", 4)
        ended.append(outcome(tmp_path, "nanoeuler_dpo"))
    assert ended[0] == ended[1] and ended[0].reference == c.state.reference
