"""Fine-tuning: the template, the masks, rows that know of no other, the run and its errors."""
import hashlib
import itertools
import json
import math
import os
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from examples import ADD, FLAGS, copy_of
from helpers import (SMALL, STARTED, TINY, drawn, nanoeuler, ok, outcome, random_flat, refused, run,
                     told)
from hypothesis import given
from hypothesis import strategies as st

import bpe
import nanoeuler as ne
from nanoeuler_parts.chat.templates import chat_ids
from nanoeuler_parts.checkpoint.file import sha256_of
from nanoeuler_parts.files.texts import encode_cut
from nanoeuler_parts.kernels import compile_kernels
from nanoeuler_parts.machine.cpu import DTYPE
from nanoeuler_parts.runs.run import ESTIMATE, FEWEST, Run
from nanoeuler_parts.runs.start import launch
from nanoeuler_parts.tuning.examples import held_out as is_held_out
from nanoeuler_parts.tuning.examples import PROMPT_INPUT, prompt_of, read_examples
from nanoeuler_parts.tuning.rows import Examples
from nanoeuler_parts.tuning.sft import MOST_A_ROW, SftOptions, SftRun

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]


# ---- 7 examples
def test_the_templates_are_stanfords():
    """Word for word as in the repository of Stanford Alpaca; the response is on its own line."""
    assert prompt_of(dict(instruction="Sing {x}.", input="")) == (
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\nSing {x}.\n\n### Response:\n")
    assert prompt_of(dict(instruction="Sort.", input="b {a} {input}")) == (
        "Below is an instruction that describes a task, paired with an input that provides further "
        "context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nSort.\n\n### Input:\nb {a} {input}\n\n### Response:\n")


ids = st.lists(st.integers(0, 20), min_size=1, max_size=6)


@drawn(60)
@given(pairs=st.lists(st.tuples(ids, ids), min_size=1, max_size=5), P=st.integers(1, 4))
def test_masks_by_hand(pairs, P):
    """Head k at position t has token t + 1 + k as its target if the response holds that token."""
    T = 12
    arrays = [tuple(np.array(x, np.int32) for x in pair) for pair in pairs]
    tokens, targets = Examples(arrays, T, P, 1).batch(slice(None))
    assert tokens.shape == (len(pairs), T) and targets.shape == (P, len(pairs), T)
    assert tokens.dtype == targets.dtype == np.int32
    for b, (prompt, response) in enumerate(pairs):
        row = prompt + response
        assert tokens[b].tolist() == (row + [0] * T)[:T]
        for k in range(P):
            for t in range(T):
                i = t + 1 + k
                want = row[i] if len(prompt) <= i < len(row) else -1
                assert targets[k, b, t] == want, (b, k, t)
    count = sum(len(response) for _, response in pairs)
    assert (targets[0] >= 0).sum() == count          # every token of a response exactly once


words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=30)


@drawn(40)
@given(st.lists(st.tuples(words, st.one_of(st.just(""), words), words), min_size=1, max_size=8))
def test_the_text_of_a_row(checkpoint_tokenizer, examples):
    """Decoded, a row is prompt, response, </s>, and its targets are the response and </s>."""
    tokenizer, T = checkpoint_tokenizer, 700
    for instruction, given_input, output in examples:
        e = dict(instruction=instruction, input=given_input, output=output)
        prompt, response = tokenizer.encode(prompt_of(e)), tokenizer.encode(output)
        pair = prompt, np.append(response, tokenizer.specials["</s>"])
        tokens, targets = Examples([pair], T, 2, 1).batch([0])
        n = sum(map(len, pair))
        assert tokenizer.decode(tokens[0, :n]) == (prompt_of(e) + output + "</s>").encode()
        for k in range(2):
            learned = targets[k, 0][targets[k, 0] >= 0]
            assert tokenizer.decode(learned) == (output + "</s>").encode()


@pytest.fixture(scope="module")
def checkpoint_tokenizer():
    return bpe.train((ne.PROMPT + PROMPT_INPUT).encode(), 300)


def test_a_row_knows_of_no_other_and_of_no_padding():
    """Loss and gradient of a padded batch are those of the bare examples, one at a time."""
    rng, P = np.random.default_rng(3), TINY.n_mtp
    pairs = [tuple(rng.integers(0, TINY.vocab_size, n).astype(np.int32) for n in lengths)
             for lengths in ((3, 2), (1, 1), (5, 4), (2, 7))]          # the third and last are full
    tokens, targets = Examples(pairs, TINY.seq_len, P, 1).batch(slice(None))
    model, weight = ne.Model(TINY, random_flat(TINY, 4)), np.array([0.1, 0.05])
    losses = model.run(ne.GRADIENT, tokens, targets, weight)
    whole, alone = model.g_flat.copy(), np.zeros_like(losses)
    model.g_flat[:] = 0
    for b, (prompt, response) in enumerate(pairs):
        row = np.concatenate((prompt, response))
        n = len(row) - 1
        bare = np.full((P, 1, n), -1, np.int32)
        for k in range(P):
            for t in range(n):
                if len(prompt) <= t + 1 + k < len(row):
                    bare[k, 0, t] = row[t + 1 + k]
        alone[b] = model.run(ne.GRADIENT, row[None, :n].copy(), bare, weight)[0]
    assert np.allclose(losses, alone, rtol=1e-12) and (losses[:, 0] > 0).all()
    assert np.allclose(model.g_flat, whole, rtol=1e-9, atol=1e-12)


def test_examples_come_in_shuffled_epochs():
    pairs = [(np.array([i], np.int32), np.array([1], np.int32)) for i in range(17)]
    examples = Examples(pairs, 4, 2, 5)
    taken = examples.take(0, 51)[0][:, 0].reshape(3, 17)
    assert (np.sort(taken) == np.arange(17)).all()
    assert not np.array_equal(taken[0], taken[1])
    again = Examples(pairs, 4, 2, 5)
    assert np.array_equal(again.take(20, 6)[0], examples.take(20, 6)[0])   # the cursor is the step


@drawn(60)
@given(text=st.text(st.characters(codec="utf-8") | st.just("\0"), max_size=60),
       share=st.floats(0, 0.5))
def test_cut_tokens_spell_the_same_text(checkpoint_tokenizer, text, share):
    """A zero byte of the text's own, too: JSON may have one."""
    ids = encode_cut(checkpoint_tokenizer, text.encode(), share, np.random.default_rng(1))
    assert checkpoint_tokenizer.decode(ids) == text.encode()
    if not share:
        assert np.array_equal(ids, checkpoint_tokenizer.encode(text))


def test_a_share_of_the_words_is_cut_off_from_its_space():
    """The text an encoder gets holds a zero byte where a token must begin."""
    seen = []
    pieces = SimpleNamespace(encode=lambda text: seen.append(text) or np.frombuffer(text, np.uint8),
                             byte_token=lambda byte: byte[0])
    text, share, n = " ångström".encode() * 20_000, 0.1, 20_000
    for seed in (1, 2):
        ids = encode_cut(pieces, text, share, np.random.default_rng(seed))
        assert bytes(ids) == text
    cut = seen[0]
    assert cut != seen[1] and cut.replace(b"\0", b"") == text and b"\0\0" not in cut
    assert cut.decode().count("\0") == cut.count(b"\0")          # no character is cut in two
    # some are drawn twice, which is once: 1 - e^-0.1.  Standard deviations: 0.2 and 0.15 %
    assert cut.count(b" \0") / n == pytest.approx(1 - np.exp(-share), abs=0.01)
    inside = (cut.count(b"\0") - cut.count(b" \0")) / n
    assert inside == pytest.approx(8 * (1 - np.exp(-share / 5)), abs=0.01)   # 7 letters, a space


def test_each_epoch_is_cut_elsewhere(base, tmp_path):
    start = ne.read_checkpoint(str(base / "nanoeuler.bin"))
    start = start._replace(moments=(), state=ne.State(kind="chat", eos="</s>"))
    batches = []
    for cuts in (0.0, 0.4):
        options = SftOptions(data=str(base / "add.json"), epochs=1.5, cuts=cuts).check()
        run = SftRun(str(tmp_path / "x.bin"), start, options)
        batches.append((run.data.batches.rows, run.data.responses.rows, run.state.n_steps))
    (plain, test, steps), (cut, cut_test, cut_steps) = batches
    assert np.array_equal(test, cut_test) and steps == cut_steps         # asked as users ask
    assert len(cut) == 2 * len(plain)
    first, second = cut[:len(plain)], cut[len(plain):]
    read = lambda rows: [start.tokenizer.decode(row[row >= 0]) for row in rows]
    assert read(first) == read(second) == read(plain)
    apart = lambda a, b: (a != b).any(1).mean()
    assert apart(first, plain) > 0.9 and apart(second, plain) > 0.9 and apart(first, second) > 0.9


def test_an_epoch_reads_a_copy_of_its_own():
    """Each example once an epoch, epoch e from copy e, in the order of examples without copies."""
    n, row = 11, lambda i: (np.array([i], np.int32), np.array([1], np.int32))
    plain = Examples([row(i) for i in range(n)], 4, 2, 5)
    for copies in (2, 3):
        cut = Examples([row(i) for i in range(copies * n)], 4, 2, 5, 1, copies)
        picked = np.array(cut.pick(0, 5 * n))
        assert np.array_equal(picked % n, plain.pick(0, 5 * n))
        assert (picked.reshape(5, n) // n == np.arange(5)[:, None] % copies).all()
        assert cut.pick(n - 3, 7) == picked[n - 3:n + 4].tolist()        # across two epochs
    pairs = Examples([row(i) for i in range(2 * 2 * n)], 4, 2, 5, 2, 2)
    picked = np.array(pairs.pick(0, 4 * n)).reshape(2, n, 2)
    assert (picked[:, :, 1] == picked[:, :, 0] + 1).all() and (picked[:, :, 0] % 2 == 0).all()
    assert (np.sort(picked[:, :, 0]) == 2 * np.arange(2 * n).reshape(2, n)).all()


def test_held_out_by_hand():
    e = dict(instruction="Name a colour.", input="not \u00e9")
    digest = hashlib.sha256("Name a colour.\0not \u00e9".encode()).hexdigest()
    assert is_held_out(e) == (int(digest[:8], 16) % 50 == 0)
    share = np.mean([is_held_out(dict(instruction=str(i), input="")) for i in range(20_000)])
    assert 0.015 < share < 0.025
    assert is_held_out({**e, "output": "x"}) == is_held_out({**e, "output": "y"})


@pytest.mark.parametrize("share", [0.01, 0.02, 0.1, 0.3, 0.4, 0.5])
def test_the_share_that_is_held_out_is_the_one_asked_for(share):
    n = 20_000
    held = sum(is_held_out(dict(instruction=str(i), input=""), share) for i in range(n))
    assert abs(held / n - share) < 4 * math.sqrt(share * (1 - share) / n)


# ---- the files
def test_a_mark_of_the_byte_order_and_lines_of_a_text_are_no_lines_of_the_file(tmp_path):
    """Within a JSON text U+2028 and U+0085 are characters like others; a BOM is none."""
    e, path = dict(instruction="One\u2028two", input="", output="a\x85b"), tmp_path / "a.json"
    for text in (json.dumps([e], ensure_ascii=False), json.dumps(e, ensure_ascii=False)):
        for mark in ("", "\ufeff"):
            path.write_text(mark + text, encoding="utf-8")
            assert read_examples(str(path), "output")[0] == [e]


def begin(base, tmp_path, examples, seq_len=160, **chosen):
    """The SftRun of these examples before its first step."""
    (tmp_path / "some.json").write_text(json.dumps(examples), encoding="utf-8")
    start = ne.read_checkpoint(str(base / "nanoeuler.bin"))
    start = start._replace(cfg=ne.replace(start.cfg, seq_len=seq_len), moments=(),
                           state=ne.State(kind="chat"))
    options = SftOptions.chosen(data=str(tmp_path / "some.json"), batch=320,
                                **{"row_len": seq_len} | chosen)
    return SftRun(str(tmp_path / "x.bin"), start, options)


def test_which_examples_are_left_out(base, tmp_path, capsys):
    """Prompt and response fill the context, </s> is the last target; no question, no example."""
    tokenizer = ne.read_checkpoint(str(base / "nanoeuler.bin")).tokenizer
    sizes = [len(tokenizer.encode(prompt_of(e))) + len(tokenizer.encode(e["output"]))
             for e in ADD]
    T, odd = max(sizes), dict(instruction="", input="", output="?")
    run = begin(base, tmp_path, [*ADD, odd], T, epochs=1.1)
    assert "left out         0 examples" in (said := capsys.readouterr().out) and "1 empty" in said
    n = sum(not is_held_out(e) for e in ADD)
    assert (len(run.data.batches.rows), run.state.n_steps) == (n, math.ceil(1.1 * n / run.B))
    tokens, (targets, *_) = run.data.batches.batch(slice(None))
    assert tokens.shape[1] == T and (targets[:, -1] >= 0).any()
    for row in targets:                      # each ends with </s>, also the longest
        assert row[row >= 0][-1] == tokenizer.specials["</s>"]
    cut = begin(base, tmp_path, ADD, T, epochs=20, cuts=0.5)   # what gets too long stays uncut
    assert cut.data.batches.copies == 16 and len(cut.data.batches.rows) == 16 * n
    assert not np.array_equal(cut.data.batches.rows[:n], run.data.batches.rows)
    begin(base, tmp_path, ADD, T - 1)
    assert f"left out         {sizes.count(T)} examples" in capsys.readouterr().out


def test_rows_are_as_long_as_the_examples_need(base, tmp_path, capsys):
    """Rounded up to 32; the context grows with them, and does not shrink."""
    tokenizer = ne.read_checkpoint(str(base / "nanoeuler.bin")).tokenizer
    need = max(len(tokenizer.encode(prompt_of(e))) + len(tokenizer.encode(e["output"]))
               for e in ADD)
    for context in (16, 1000):
        run = begin(base, tmp_path, ADD, context, row_len=0)
        assert need <= run.T < need + 32 and run.T % 32 == 0
        assert run.model.cfg.seq_len == max(context, run.T)
        assert run.options.row_len == run.state.options["row_len"] == run.T
        assert "left out         0 examples" in capsys.readouterr().out
    long = {**ADD[0], "output": "x" * 3 * MOST_A_ROW}
    T = begin(base, tmp_path, ADD, row_len=0).T
    assert begin(base, tmp_path, [*ADD, long], row_len=0).T == T
    assert f"1 example longer than a row of {T} tokens" in capsys.readouterr().out


def test_a_run_begun_before_keeps_the_rows_it_had(base, tmp_path, monkeypatch):
    """Those of the context's length: its checkpoint says nothing of rows."""
    monkeypatch.chdir(copy_of(base, tmp_path))
    run("sft", "--data", "add.json", "--seq-len", 192, "--steps", 2, *FLAGS[:4])
    c = ne.read_checkpoint("nanoeuler_chat.bin")
    assert c.state.options.pop("row_len") == 192 and c.state.options.pop("holdout") == 0.02
    ne.write_checkpoint("nanoeuler_chat.bin", *c)
    rows = []
    monkeypatch.setattr(SftRun, "go", lambda self: rows.append(self.T))
    run("sft", "--resume", "--steps", 3)
    assert rows == [192]


def test_an_end_that_is_no_token_is_refused(base, tmp_path, monkeypatch, capsys):
    """Of a checkpoint that is whole: its checksum fits."""
    monkeypatch.chdir(copy_of(base, tmp_path))
    run("sft", "--data", "add.json", "--steps", 1, *FLAGS[:4])
    c = ne.read_checkpoint("nanoeuler_chat.bin")
    c.state.eos = "<end>"
    ne.write_checkpoint("nanoeuler_chat.bin", *c)
    refused(capsys, "sft", "--resume", "--steps", 2, words=["has no token '<end>'"])


FEW = [dict(instruction=f"Say {i}.", output=f"{i}!") for i in range(30)]


@pytest.mark.parametrize("n, chosen, holds_out", [
    (1, {}, False), (10, {}, False), (29, {}, False), (30, {}, True), (10, {"holdout": 0.0}, False),
    (2, {"holdout": 0.02}, True), (10, {"holdout": 0.5}, True), (1, {"holdout": 0.02}, False)])
def test_of_a_few_questions_all_are_learned(n, chosen, holds_out, base, tmp_path, capsys):
    """Unless the user gives --holdout.  The run then measures other answers, and says so."""
    run = begin(base, tmp_path, FEW[:n], row_len=200, **chosen)
    rows, tested = len(run.data.batches.rows), len(run.data.responses.rows)
    said = capsys.readouterr().out
    assert ("none held out" in said) == (not holds_out) == run.validates_first
    assert ("as there are fewer than 30" in said) == (not holds_out and not chosen)
    if holds_out:
        assert (rows + tested, run.data.held) == (n, "a held-out") and tested
        return
    assert (rows, run.data.held, run.state.options["holdout"]) == (n, "a training", chosen.get(
        "holdout", 0.0))
    assert FEWEST <= tested <= ESTIMATE
    assert f"validation       {tested} other examples of " in said
    assert run.scope.startswith(f"{tested} other examples") and len(run.data.questions) == n
    learned = {row[row >= 0].tobytes() for row in run.data.batches.rows}
    assert not learned & {row[row >= 0].tobytes() for row in run.data.responses.rows}


@pytest.mark.parametrize("name, value", [("FEWEST", 999), ("beside_program", lambda path: "no")])
def test_other_examples_that_are_missing_or_too_few_are_not_measured(name, value, base, tmp_path,
                                                                     monkeypatch, capsys):
    monkeypatch.setattr(f"nanoeuler_parts.tuning.sft.{name}", value)
    run = begin(base, tmp_path, FEW[:5], row_len=200)
    assert np.array_equal(run.data.responses.rows, run.data.batches.rows)
    said = capsys.readouterr().out
    assert "validation       the 5 training examples, which says nothing about others" in said
    assert not run.validates_first


def test_the_best_of_nothing_held_out_is_refused(base, tmp_path):
    with pytest.raises(ne.UserError, match="--keep-best: expected held-out examples.*--holdout"):
        begin(base, tmp_path, FEW[:10], keep_best=True)
    begin(base, tmp_path, FEW[:10], keep_best=True, holdout=0.2)


def test_tokens_read_are_all_but_the_padding():
    """Also those with the id 0, on both sides of an answer's beginning"""
    rows = [[np.array([0, 5], np.int32), np.array([0, 7], np.int32)],
            [np.array([1], np.int32), np.array([0], np.int32)]]
    examples = Examples(rows, 6, 2, 1)
    read = [sum(map(len, rows[k])) for k in examples.pick(0, 2)]
    assert [examples.n_read(i, 1) for i in range(2)] == read and examples.n_read(0, 2) == sum(read)


def test_a_short_run_validates_after_each_quarter(base, tmp_path):
    for steps, every in ((3, 5), (60, 15), (4000, 250)):
        assert begin(base, tmp_path, ADD, steps=steps).options.eval_every == every
    assert begin(base, tmp_path, ADD, steps=60, eval_every=100).options.eval_every == 100


@pytest.mark.parametrize("holds_out, n, loss, estimate, words", [
    (False, 64, 0.01, 3.26, "memorized"), (False, 64, 0.01, 1.61, "memorized"),
    (False, 64, 0.01, 1.53, ""), (False, 64, 0.5, 3.26, "not learned"),
    (False, 64, 0.5, 1.51, "not learned"), (False, 2, 0.5, 1.4, "not learned"),
    (True, 64, 0.01, 1.61, "memorized"),
    (True, 64, 0.01, 1.53, "overfits"), (True, 64, 0.5, 3.26, "overfits"),
    (True, 64, 0.01, 1.51, ""), (True, 2, 0.01, 3.26, "memorized"), (True, 2, 0.01, 1.7, ""),
    (True, 2, 0.5, 3.26, "")])
def test_a_run_that_ruins_its_model_says_so(holds_out, n, loss, estimate, words, base, tmp_path):
    """Also where a few rows are held out: then only if the loss of these rises much."""
    chosen = {"holdout": 0.5} if holds_out else {}
    run = begin(base, tmp_path, FEW[:10], row_len=200, **chosen)
    run.state.best, run.state.best_step, run.last_loss = 1.5, 0, loss
    note = run.note_of_end(n, estimate)
    assert words in note and bool(words) == bool(note)
    if words == "memorized":
        assert "loss 0.010" in note and "from 1.50 bits/byte at step 0 to" in note
        assert f"on {run.scope}" in note
        assert "use a lower --lr, such as 0.0002, fewer --epochs or more examples" in note
    if words == "not learned":
        assert "its loss is 0.50, and should be below 0.1; use --epochs 6" in note, note
        run.options.steps = 9
        assert note.replace("--epochs 6", "--steps 18") == run.note_of_end(n, estimate)
    assert ("--keep-best" in run.where_best_is()) == holds_out           # else it is rejected
    run.options.steps = 9                    # then --epochs has no effect
    assert "--epochs" not in run.note_of_end(n, estimate)


def test_a_ruined_model_is_the_end_of_a_run(base, tmp_path, monkeypatch, capsys):
    """From the first line to the last; and the numbers of a run of three steps are printed."""
    found = iter([1.5, 3.26])
    monkeypatch.setattr("nanoeuler_parts.runs.evaluation.evaluate", lambda *args: next(found))
    monkeypatch.setattr("nanoeuler_parts.tuning.sft.MEMORIZED", 99.0)
    monkeypatch.chdir(copy_of(base, tmp_path))
    (tmp_path / "few.json").write_text(json.dumps(FEW[:10]), encoding="utf-8")
    run("sft", "--data", "few.json", "--steps", 3, "--row-len", 200, *FLAGS)
    said, log = capsys.readouterr(), outcome(tmp_path, "nanoeuler_chat").log
    assert "few.json, 10 for training, none held out, as there are fewer than 30" in said.out
    assert re.search(r"^step +0  validation 1.5000 bits/byte", said.out, re.M)
    assert re.search(r"^step +3/3  loss \d", said.out, re.M)
    assert re.search(r"^validation 3.2600 bits/byte on \d+ other examples of ", said.out, re.M)
    assert "note: the model has memorized the training examples" in said.err
    assert "keep-best" not in said.err
    assert [(r["step"], r["val_bits_per_byte"]) for r in log if "val_bits_per_byte" in r] == [
        (0, 1.5), (3, 3.26)]


def test_names_that_others_give_to_the_fields(tmp_path):
    path, want = tmp_path / "a.jsonl", dict(instruction="Hi?", input="", output="Ho.")
    for e in (dict(prompt="Hi?", completion="Ho."), dict(prompt="Hi?", output="Ho."),
              dict(instruction="Hi?", input=None, output="Ho.")):
        path.write_text(json.dumps(e), encoding="utf-8")
        [got], _ = read_examples(str(path), "output")
        assert {key: got[key] for key in want} == want
    pair = dict(prompt="Hi?", chosen="Ho.", rejected="No.")
    path.write_text(json.dumps(pair), encoding="utf-8")
    [got], _ = read_examples(str(path), "chosen", "rejected")
    assert got == dict(instruction="Hi?", input="", chosen="Ho.", rejected="No.")


def test_other_data_than_a_run_learns_are_refused(base, tmp_path, monkeypatch, capsys):
    """Also where it is complete: nothing that is asked for is passed over in silence."""
    monkeypatch.chdir(copy_of(base, tmp_path))
    (tmp_path / "mine.json").write_text(json.dumps(ADD[:30]), encoding="utf-8")
    shutil.copy("add.json", "moved.json")
    run("sft", "--data", "add.json", "--steps", 1, *FLAGS[:4])
    refused(capsys, "sft", "--resume", "--data", tmp_path / "mine.json",
            words=["nanoeuler_chat.bin trains on add.json", "mine.json", "--out NAME"])
    assert "is complete" in told("sft", "--resume", "--data", "moved.json")


def test_responses_are_measured_in_bytes(base, tmp_path):
    many = [{**e, "output": e["output"].replace("plus", "\u00e9\u4e2d")} for e in ADD]
    run = begin(base, tmp_path, many)
    learned, held = ([e for e in many if is_held_out(e) == held] for held in (False, True))
    assert run.data.validation[2] == sum(len(e["output"].encode()) for e in held)
    count = sum(len(run.tokenizer.encode(e["output"])) + 1 for e in learned)
    assert run.data.bytes_per_token * count == pytest.approx(
        sum(len(e["output"].encode()) for e in learned))


def test_the_speed_is_of_tokens_that_are_read(base, tmp_path):
    """Padding is none: rows are as long as the longest example, and most are shorter."""
    many = [*ADD, {**ADD[0], "output": "x" * 300}]
    run = begin(base, tmp_path, many, row_len=0)
    rows = run.data.batches.rows[run.data.batches.pick(0, run.B), :run.T]
    records = []
    run.write = lambda **r: records.append(r)
    run.start_clock()
    ne.train(run, stopped=records)           # ends after its first step
    [r] = records
    n = r["tokens_per_s"] * r["ms"] / 1e3
    assert n == pytest.approx((rows >= 0).sum()) and n < 0.7 * rows.size


def test_the_final_validation_is_on_all_responses(base, tmp_path, monkeypatch):
    """The limit of long texts does not apply to them."""
    monkeypatch.setattr(Run, "most_final", 160)       # one row
    run = begin(base, tmp_path, ADD)
    rows, measured = len(run.data.validation.tokens), []
    monkeypatch.setattr(run, "measure", lambda rows=None: (measured.append(rows), "0.5")[1])
    assert rows > 1 and run.plan.final_rows(run.n_steps) == rows
    assert run.final_validation() == "0.5 on all held-out responses" and measured == [None]


def test_the_sample_is_the_likeliest_answer_up_to_its_end(base, tmp_path, monkeypatch):
    run, asked = begin(base, tmp_path, ADD), []
    monkeypatch.setattr(ne, "generate", lambda decoder, ids, n, rng, sampling, stop: (
        asked.append((n, sampling.temperature, stop)), ids)[1])
    e, = [e for e in ADD if is_held_out(e)][:1]
    assert run.sample_text(20) == ("a held-out question:\n"
                                   f"> {e['instruction']} \nthe model's answer:\n{prompt_of(e)}\n"
                                   f"the expected answer:\n{e['output']}")
    assert asked == [(20, 0.0, run.tokenizer.specials["</s>"])]


def test_a_run_takes_over_weights_and_ends_of_text_and_nothing_else(base, tmp_path, monkeypatch):
    runs, c = [], ne.read_checkpoint(str(base / "nanoeuler.bin"))
    monkeypatch.setattr(SftRun, "go", lambda self: runs.append(self))
    state = ne.replace(c.state, kind="chat", bos="<s>", template="x", reference=[1.0])
    ne.write_checkpoint(str(tmp_path / "a.bin"), c.cfg, c.tokenizer, state, c.flat, c.moments)
    launch(SftRun, file=str(tmp_path / "a.bin"), out=str(tmp_path / "b.bin"), resume=False,
              force=False, data=str(base / "add.json"))
    run, = runs
    assert c.moments[0].any() and np.array_equal(run.model.flat, c.flat)
    assert not run.model.m.any() and not run.model.v.any()
    assert run.state == ne.State(kind="chat", bos="<s>", n_steps=run.state.n_steps,
                                 text_sha256=run.state.text_sha256, options=run.state.options,
                                 micro_batch=run.state.micro_batch, source=str(tmp_path / "a.bin"),
                                 source_sha256=sha256_of(tmp_path / "a.bin"),
                                 learned=[c.state.text_sha256])


# ---- the run
RUN = ("sft", "--data", "add.json", "--steps", 60, "--eval-every", 20, "--save-every", 30, *FLAGS)


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    """A directory with nanoeuler_chat.bin, its log, and what the run printed."""
    folder = copy_of(base, tmp_path_factory.mktemp("tuned"))
    said = ok(nanoeuler(*RUN, cwd=folder, cold=True))
    (folder / "stdout.txt").write_text(said, encoding="utf-8")
    return folder


def test_what_a_run_prints_and_writes(tuned):
    out = (tuned / "stdout.txt").read_text("utf-8")
    held_out = [e for e in ADD if is_held_out(e)]
    asked = [e for e in held_out if f"> {e['instruction']}" in out.split("ETA 0:00")[-1]]
    assert len(asked) == 1 and len(held_out) >= 1
    assert f"add.json, {len(ADD) - len(held_out)} for training, {len(held_out)} held out" in out
    assert re.search(r"left out +0 examples", out)
    assert f"{STARTED} chat nanoeuler_chat.bin" in out
    o = outcome(tuned, "nanoeuler_chat")
    losses = [r["loss"] for r in o.log if "loss" in r]
    assert o.kind == "chat" and o.step == 60
    assert np.mean(losses[-5:]) < losses[0] / 2                            # it learns
    assert [r["step"] for r in o.log if "val_bits_per_byte" in r] == [20, 40, 60]
    assert o.log[-1]["val_bits_per_byte"] == o.bits_per_byte
    base = ne.read_checkpoint(str(tuned / "nanoeuler.bin"))
    assert base.state.kind == "base" and base.state.step == 3              # untouched


def test_validation_is_bits_per_byte_of_the_responses(tuned):
    """The same sum from each held-out example alone, without padding."""
    c, nats, size = ne.read_checkpoint(str(tuned / "nanoeuler_chat.bin")), 0.0, 0
    model = ne.Model(c.cfg, c.flat, dtype=ne.PRECISIONS[DTYPE])
    for e in filter(is_held_out, ADD):
        prompt = c.tokenizer.encode(prompt_of(e))
        row = [*prompt, *c.tokenizer.encode(e["output"]), c.tokenizer.specials["</s>"]]
        z = model.logits(np.array([row[:-1]], np.int32))[0, 0].astype(float)
        z -= np.log(np.exp(z).sum(1, keepdims=True))
        nats -= sum(z[t, row[t + 1]] for t in range(len(prompt) - 1, len(row) - 1))
        size += len(e["output"])
    assert c.state.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-5)


def test_micro_batches_train_the_same_weights(base, tuned, tmp_path, monkeypatch):
    monkeypatch.chdir(copy_of(base, tmp_path))
    run(*RUN, "--micro-batch", 1)
    assert outcome(tmp_path, "nanoeuler_chat").arrays == outcome(tuned, "nanoeuler_chat").arrays


def test_epochs_and_a_longer_context(base, tmp_path, monkeypatch):
    monkeypatch.chdir(copy_of(base, tmp_path))
    run("sft", "--data", "add.json", "--epochs", 0.5, "--seq-len", 192, *FLAGS)
    c = ne.read_checkpoint("nanoeuler_chat.bin")
    n = sum(not is_held_out(e) for e in ADD)
    assert c.cfg.seq_len == 192 and c.state.step == math.ceil(n / 2)       # one row a step
    run("sft", "--resume", "--epochs", 0.6)
    done = math.ceil(0.6 * n)
    assert ne.read_checkpoint("nanoeuler_chat.bin").state.step == done
    assert f"complete: {done} of {done} steps" in told("sft", "--resume", "--epochs", 0.1)


LENGTHS = {                  # {verb: lengths, of which the last is the default}
    "train": [("--steps", 2), ("--minutes", 1.0), ("--minutes", 3.0)],
    "sft": [("--steps", 2), ("--steps", 9), ("--epochs", 0.1), ("--epochs", 3.0)]}


@pytest.mark.parametrize("verb, first, longer", [
    (verb, *both) for verb in LENGTHS for both in itertools.product(LENGTHS[verb], repeat=2)])
def test_a_new_length_replaces_the_old_one(verb, first, longer, base, text, tmp_path, monkeypatch):
    """Whichever flags give the two lengths, also if the new value is the default or the old one:
    the run gets the length of a new run with the same flag."""
    monkeypatch.chdir(copy_of(base, tmp_path))
    monkeypatch.setattr("nanoeuler_parts.runs.run.train", lambda run, stopping: None)
    start = ["sft", "--data", "add.json"] if verb == "sft" else ["train", "--data", text, *SMALL]

    def length(*args):
        """The steps that are asked for and planned, and the other length if it counts.  The run is
        saved before its first step."""
        run(*args, "--out", "a.bin")
        s = ne.read_checkpoint("a.bin").state
        other = s.options["minutes" if verb == "train" else "epochs"]
        return s.options["steps"], s.n_steps or None, None if s.options["steps"] else other

    start += ["--batch", 2048, "--threads", 1, "--force"]
    want, before = length(*start, *longer), length(*start, *first)
    assert (want == before) == (first == longer)
    assert length(verb, "--resume", *longer) == want


def test_a_run_whose_rows_are_longer_goes_on_by_its_own_command(base, tmp_path, monkeypatch,
                                                                capsys):
    """The context has grown with the rows, and the command names the one before."""
    monkeypatch.chdir(copy_of(base, tmp_path))
    same = ("--data", "add.json", "--seq-len", 128, "--row-len", 192, *FLAGS)
    run("sft", "--steps", 1, *same)
    assert ne.read_checkpoint("nanoeuler_chat.bin").cfg.seq_len == 192
    run("sft", "--steps", 2, *same, "--resume")
    assert ne.read_checkpoint("nanoeuler_chat.bin").state.step == 2
    refused(capsys, "sft", "--steps", 3, *same[:2], "--seq-len", 256, *FLAGS, "--resume",
            words=["started with --seq-len 192, not 256"])


def test_a_tuned_model_answers(tuned):
    said = ok(nanoeuler("chat", "nanoeuler_chat.bin", "--temperature", 0, "--threads", 1, cwd=tuned,
                        stdin="Add 3 and 4.\n/quit\n"))
    c = ne.read_checkpoint(str(tuned / "nanoeuler_chat.bin"))
    prompt = c.tokenizer.encode(ne.PROMPT.format(instruction="Add 3 and 4."))
    ids = ne.generate(ne.Decoder(c.cfg, c.flat), prompt, 200, None, ne.Sampling(temperature=0.0),
                      c.tokenizer.specials["</s>"])
    want = c.tokenizer.decode(list(ids)).decode()
    assert said.split("\n> ")[1] == want + "\n" and "answers what you type" in said


def test_default_data(base, tmp_path, monkeypatch, capsys):
    """Here or beside the program, which has none here; what `make data` fetches goes first."""
    monkeypatch.chdir(copy_of(base, tmp_path))
    program = tmp_path / "program"
    (program / "data").mkdir(parents=True)
    compile_kernels()
    monkeypatch.setattr(ne, "__file__", str(program / "nanoeuler.py"))
    start = ("sft", "--steps", 1, "--force", *FLAGS[:4])
    refused(capsys, *start, words=["data/instructions.json", "--data"])
    for name in ("data/instructions.json", "data/alpaca.json"):
        for folder in (program, tmp_path):
            (folder / "data").mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(ADD), encoding="utf-8")
            run(*start)
            said = capsys.readouterr().out
            shown = name if folder == tmp_path else program / name
            assert f"  examples         {shown}, " in said
            note = "to use data/alpaca.json, run make data"
            assert (note in said) == (name == "data/instructions.json")
    run(*start, "--data", "add.json")
    assert "  examples         add.json, " in capsys.readouterr().out


def test_a_short_run_warms_up_for_a_tenth_of_it(base, tmp_path, monkeypatch, capsys):
    """Unless it is told how long."""
    monkeypatch.chdir(copy_of(base, tmp_path))
    for flags, warmup in (((), 3), (("--warmup", 40), 40)):
        run("sft", "--data", "add.json", "--steps", 30, "--batch", 256, *flags, "--force")
        state = ne.read_checkpoint("nanoeuler_chat.bin").state
        assert state.options["warmup"] == warmup
        assert ("within its warm-up" in capsys.readouterr().err) == (warmup == 40)


def test_it_is_said_that_a_template_is_left(base, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(copy_of(base, tmp_path))
    c = ne.read_checkpoint("nanoeuler.bin")
    for name, template in ("theirs.bin", "{{ messages[0].content }}"), ("chat.bin", ne.CHATML):
        state = ne.replace(c.state, template=template)
        ne.write_checkpoint(name, c.cfg, c.tokenizer, state, c.flat)
    for name, said in (("theirs.bin", True), ("chat.bin", False), ("nanoeuler.bin", False)):
        capsys.readouterr()
        run("sft", name, "--data", "add.json", "--steps", 1, "--force", *FLAGS)
        assert ("the model's own chat template" in capsys.readouterr().err) == said


SPELLED = ne.CHATML.replace("{{ '", "{{'")   # ChatML with other blanks: a model's own


@pytest.mark.parametrize("chosen, own, learned", [
    (None, "", ""), ("alpaca", ne.CHATML, ""), ("chatml", "", ne.CHATML),
    ("chatml", SPELLED, SPELLED)])
def test_the_template_that_is_chosen_is_learned(chosen, own, learned, base, tmp_path, monkeypatch,
                                                capsys):
    """Single questions in ChatML, too; and the model is asked by it."""
    monkeypatch.chdir(copy_of(base, tmp_path))
    c = ne.read_checkpoint("nanoeuler.bin")
    ne.write_checkpoint("own.bin", c.cfg, c.tokenizer, ne.replace(c.state, template=own), c.flat)
    flags = ("--template", chosen) if chosen else ()
    rows, begin = [], SftRun.read_data
    monkeypatch.setattr(SftRun, "read_data", lambda run, start: (begin(run, start), rows.append(
        run.encoded[0][1][0]))[0])
    run("sft", "own.bin", "--data", "add.json", "--steps", 1, *flags, *FLAGS)
    said = capsys.readouterr()
    assert f"template         {'ChatML' if learned else 'Alpaca'}" in said.out
    assert "the model's own chat template" not in said.err
    state = ne.read_checkpoint("nanoeuler_chat.bin").state
    assert state.template == learned
    asked = chat_ids(state.template, [("user", ADD[0]["instruction"])], state, c.tokenizer)
    assert rows[0][0].tolist() == asked
    run("sft", "--resume", "--steps", 2)
    assert ne.read_checkpoint("nanoeuler_chat.bin").state.template == learned


def test_a_template_that_cannot_be_learned_is_refused(base, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(copy_of(base, tmp_path))
    start = ("sft", "--data", "add.json", "--template")
    refused(capsys, *start, "llama", words=["--template: expected alpaca or chatml, found llama"])
    c = ne.read_checkpoint("nanoeuler.bin")
    plain = bpe.train(b"to be or not to be" * 9, 257)
    flat = ne.init_params(cfg := ne.replace(c.cfg, vocab_size=257), 1)
    ne.write_checkpoint("plain.bin", cfg, plain, ne.State(), flat)
    refused(capsys, "sft", "plain.bin", *start[1:], "chatml", words=["<|im_start|>", "--template"])
    talk = [{"messages": [dict(role=r, content=t) for r, t in (
        ("user", "Hi?"), ("assistant", "Ho."), ("user", "And?"), ("assistant", "No."))]}]
    (tmp_path / "talk.json").write_text(json.dumps(talk), encoding="utf-8")
    refused(capsys, *start, "alpaca", "--data", "talk.json", words=["one question and one answer"])


# ---- what can go wrong: in this process
GOOD = dict(instruction="Sing.", input="", output="La.")


@pytest.mark.parametrize("content, words", [
    ("nonsense", ["expected a JSON list", "'nonsense'"]), ("", ["found none", "write JSON"]),
    ("{}", ["line 1", "instruction is missing or null", "add the field instruction"]),
    ('[{"instruction": "a",}]', ["after a comma", "line 1, column 22"]),
    ("[7,\n]", ["Expecting value (after a comma): line 2, column 1"]),
    ("7", ["line 1", "expected an object with the fields (instruction", "found int"]),
    ("[]", ["expected examples, found none"]), ("[[]]", ["example 1", "found list"]),
    ('{"a": "\udcff"}', ["line 1", "not valid UTF-8 at byte 7"]),
    ("[" * 100_000, ["recursion"]), ([GOOD, {**GOOD, "output": 5}], ["example 2", "output is 5"]),
    ([GOOD, dict(instruction="Sing.")], ["example 2", "output is missing or null"]),
    ([dict(question="a", output="b")], ["example 1", "the fields are question, output",
                                        "(prompt, completion), (messages) or",
                                        "--field instruction=question"]),
    ([GOOD, dict(prompt="a", chosen="b", rejected="c")], ["example 2", "found a preference pair",
                                                          "train on pairs with dpo"]),
    ([{**GOOD, "output": "\ud800"}], ["surrogates"]),
    ([{**GOOD, "instruction": f"{i}" * 9000} for i in range(100)],
     ["none of 100 examples can be used: 100 are longer than 2048 tokens; ", "--row-len"]),
    ([{**GOOD, "output": ""}], ["none of 1 example can be used: 1 is empty; give each example a"]),
    ([{**GOOD, "output": ""}] * 2 + [{**GOOD, "output": "a" * 9999}],
     ["2 are empty, 1 is longer than ", " tokens; give each", ", and shorten"]),
])
def test_bad_examples(content, words, base, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(copy_of(base, tmp_path))
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "bad.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    refused(capsys, "sft", "--data", "bad.json", words=["bad.json", *words, "; "])
    assert sorted(os.listdir()) == ["add.json", "bad.json", "nanoeuler.bin"]


def test_many_examples_are_encoded_after_a_line(base, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(copy_of(base, tmp_path))
    for most, said in (len(ADD) - 1, 1), (len(ADD), 0):
        monkeypatch.setattr("nanoeuler_parts.tuning.sft.MANY_EXAMPLES", most)
        run("sft", "--data", "add.json", "--steps", 1, "--force", *FLAGS)
        assert capsys.readouterr().out.count(f"encoding {len(ADD)} examples\n") == said


def test_what_sft_refuses(base, tuned, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(copy_of(base, tmp_path))
    data = ("--data", "add.json")
    refused(capsys, "sft", "none.bin", *data, words=["none.bin", "No such file", "train"])
    refused(capsys, "sft", "--data", "none.json", words=["none.json", "--data"])
    refused(capsys, "sft", "--data", ".", words=["--data"])
    refused(capsys, "sft", *data, "--out", "nanoeuler.bin", words=["exists", "--force"])
    refused(capsys, "sft", "--resume", words=["nanoeuler_chat.bin: expected a run"])
    refused(capsys, "sft", "--resume", "--out", "nanoeuler.bin", words=["not made by sft", "--out"])
    for flag, value in (("epochs", 0), ("epochs", "nan"), ("seq-len", 0), ("lr", -1)):
        refused(capsys, "sft", *data, f"--{flag}", value, words=[f"--{flag}: expected", value])
    (tmp_path / "chat.bin").write_bytes((tuned / "nanoeuler_chat.bin").read_bytes())
    refused(capsys, "train", "--resume", "--out", "chat.bin", words=["not made by train", "--out"])
    refused(capsys, "sft", "--resume", "--out", "chat.bin", "--lr", 0.5, "--steps", 70,
            words=["lr", "0.5", "0.002"])
    (tmp_path / "add.json").write_text(json.dumps(ADD[1:]), encoding="utf-8")
    refused(capsys, "sft", "--resume", "--out", "chat.bin", "--steps", 70,
            words=["add.json", "sha256", "--out"])
    c = ne.read_checkpoint("nanoeuler.bin")
    plain = bpe.train(b"to be or not to be" * 9, 256, specials=())
    flat = ne.init_params(cfg := ne.replace(c.cfg, vocab_size=256), 1)
    ne.write_checkpoint("plain.bin", cfg, plain, ne.State(), flat)
    refused(capsys, "sft", "plain.bin", *data, words=["plain.bin", "</s>"])


def test_a_run_goes_on_with_the_model_that_it_began_with(base, tuned, tmp_path,
                                                            monkeypatch, capsys):
    """Another one that is named is refused, also where the run is complete."""
    monkeypatch.chdir(copy_of(base, tmp_path))
    shutil.copy(tuned / "nanoeuler_chat.bin", tmp_path)
    assert "is complete" in told("sft", "nanoeuler.bin", "--resume")
    assert "is complete" in told("sft", "--resume")
    shutil.copy("nanoeuler.bin", "same.bin")             # by another name
    assert "is complete" in told("sft", "same.bin", "--resume")
    for name, words in (("nanoeuler_chat.bin", "did not start from nanoeuler_chat.bin"),
                        ("gone.bin", "gone.bin: No such file")):
        refused(capsys, "sft", name, "--resume", "--steps", 61,
                words=[words, "nanoeuler_chat.bin"])
    os.remove("nanoeuler.bin")               # it is not needed any more
    assert "is complete" in told("sft", "--resume")
    c = ne.read_checkpoint("nanoeuler_chat.bin")         # of a time when nobody wrote it down
    old = ne.replace(c.state, source_sha256="")
    ne.write_checkpoint("nanoeuler_chat.bin", c.cfg, c.tokenizer, old, c.flat, c.moments)
    assert "is complete" in told("sft", "same.bin", "--resume")


@pytest.mark.parametrize("holdout, rows", [(0.02, 2), (0.2, 28)])
def test_examples_learned_by_heart_are_told_of(holdout, rows, base, tmp_path, monkeypatch, capsys):
    """Where there are enough to say so"""
    found = iter([1.5, 1.7, 1.7])
    monkeypatch.setattr("nanoeuler_parts.runs.evaluation.evaluate", lambda *args: next(found))
    monkeypatch.chdir(copy_of(base, tmp_path))
    run("sft", "--data", "add.json", "--steps", 3, "--eval-every", 2, "--holdout", holdout)
    said = capsys.readouterr().err
    note = "the model overfits; use fewer --steps or more examples"
    assert (note in said) == (rows >= FEWEST)


def test_a_chat_model_can_be_tuned_further(tuned, tmp_path, monkeypatch):
    """A second helping of examples: the run starts anew from the weights of the first."""
    monkeypatch.chdir(tmp_path)
    run("sft", tuned / "nanoeuler_chat.bin", "--data", tuned / "add.json", "--steps", 2, *FLAGS)
    o = outcome(tmp_path, "nanoeuler_chat")
    assert (o.kind, o.step) == ("chat", 2)
