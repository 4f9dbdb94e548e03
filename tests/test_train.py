"""Training: evaluation, the loop, its clock, and numbers that are none."""
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import (FAST, ROOT, STARTED, TINY, after_each_step, before_each_step, command, hyper,
                     never, ok, outcome, random_flat, refused, run, told)
from oracles import naive

import bpe
import nanoeuler as ne
from nanoeuler_parts.checkpoint.file import Checkpoint
from nanoeuler_parts.files.logs import read_log
from nanoeuler_parts.files.printing import with_progress
from nanoeuler_parts.files.safetensors import write_tensors
from nanoeuler_parts.files.texts import split_text
from nanoeuler_parts.files.writing import WriteError
from nanoeuler_parts.machine.cpu import DTYPE
from nanoeuler_parts.runs.evaluation import evaluate
from nanoeuler_parts.runs.guards import note_slow_run, seconds_of_step
from nanoeuler_parts.runs.run import ESTIMATE, FEWEST
from nanoeuler_parts.runs.options import TrainOptions
from nanoeuler_parts.runs.run import Run as TextRun
from nanoeuler_parts.runs.schedule import Schedule
from nanoeuler_parts.runs.signals import saving_signals, signals_caught
from nanoeuler_parts.runs.plan import steps_planned
from nanoeuler_parts.runs.start import launch
from nanoeuler_parts.serve.runs import Runs

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("feature, tensor", [("qk_norm", "q_norm"), ("qk_norm", "k_norm"),
                                             ("qkv_bias", "qkv_bias")])
def test_the_gradient_of_a_part_that_comes_alone(feature, tensor):
    """Along a random direction of the tensor, against a central difference of the loss, in float32.
    A model with both parts would hide a mistake of one for the other."""
    cfg, rng, h = replace(TINY, **{feature: True}), np.random.default_rng(1), 1e-2
    flat = random_flat(cfg, 1, np.float32)
    tokens = rng.integers(0, cfg.vocab_size, (2, 8)).astype(np.int32)
    targets = rng.integers(0, cfg.vocab_size, (2, 2, 8)).astype(np.int32)
    weight = np.array([1.0, 0.5])

    def loss(model):
        return float((model.run(ne.LOSS, tokens, targets) * weight).sum())

    model = ne.Model(cfg, flat.copy())
    model.gradient(tokens, targets, weight)
    gradient = getattr(model.g, tensor).copy()
    direction = rng.standard_normal(gradient.shape).astype(np.float32)
    sides = []
    for sign in (1, -1):
        moved = ne.Model(cfg, flat.copy())
        getattr(moved.p, tensor)[...] += np.float32(sign * h) * direction
        moved.pack()
        sides.append(loss(moved))
    slope = float((gradient * direction).sum())
    assert abs(slope) > 0.1 and abs((sides[0] - sides[1]) / (2 * h) / slope - 1) < 0.05


def test_every_tensor_has_its_initial_values():
    """In a model with every optional part, matrices have the standard deviation of their row of the
    table, gains are ones and biases are zeros."""
    cfg = replace(ne.PRESETS["small"], qkv_bias=True, qk_norm=True)
    flat = ne.init_params(cfg, 1)
    for x in ne.param_table(cfg):
        values = flat[x.start:x.end]
        assert values.size, f"{x.name} is empty: this configuration lacks a part"
        if x.decays:
            assert abs(values.std() / x.std - 1) < 0.05, x.name
        else:
            assert np.all(values == (0 if x.role == "bias" else 1)), x.name


@pytest.mark.parametrize("change", [
    dict(rope_scaling=""), dict(rope_scaling="linear"), dict(rope_low=0.5), dict(rope_theta=1.5)])
@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_scalings_of_rope_accept_what_fits(kind, change):
    replace(TINY, **{"rope_scaling": kind, "rope_original": 4, **change}).check()


@pytest.mark.parametrize("change", [
    dict(rope_original=0), dict(rope_low=4.0), dict(rope_low=5.0), dict(rope_theta=1.0)])
@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_scalings_of_rope_reject_what_does_not(kind, change):
    with pytest.raises(ne.UserError, match=kind):
        replace(TINY, **{"rope_scaling": kind, "rope_original": 4, **change}).check()


def test_tokens_of_another_type_compile_nothing():
    model = ne.Model(TINY, random_flat(TINY, 1, np.float32))
    tokens = np.arange(16).reshape(2, 8)
    want = model.run(ne.LOSS, tokens.astype(np.int32), np.stack([tokens.astype(np.int32)] * 2))
    known = len(ne.run_batch.signatures)
    for kind in np.int64, np.uint16:
        found = model.run(ne.LOSS, tokens.astype(kind), np.stack([tokens.astype(kind)] * 2))
        assert np.array_equal(found, want) and len(ne.run_batch.signatures) == known


def test_a_step_of_a_decoder_stays_as_it_is():
    decoder = ne.Decoder(TINY, random_flat(TINY, 1, np.float32))
    first = decoder.step(1, 2)
    kept = first.copy()
    decoder.step(3)
    assert np.array_equal(first, kept)


def test_a_run_in_a_thread_catches_no_signal():
    """Python allows only the main thread to set handlers."""
    import threading
    found = []

    def catch():
        with signals_caught() as caught:
            found.append((caught, [signal.getsignal(x) for x in saving_signals()]))

    before = [signal.getsignal(x) for x in saving_signals()]
    thread = threading.Thread(target=catch, daemon=True)
    thread.start()
    thread.join()
    assert found == [([], before)]


def test_a_step_that_fails_half_done_is_not_saved(tmp_path, monkeypatch, capsys):
    """Else the parameters of a step would go on as those of the one before."""
    text = tmp_path / "a.txt"
    text.write_bytes((ROOT / "data/shakespeare.txt").read_bytes()[:20_000])
    out, pack, packed = tmp_path / "a.bin", ne.Model.pack, []

    def packs(model):
        packed.append(model)
        if len(packed) == 4:                 # at the start, and after each step
            raise MemoryError("2 GiB")
        pack(model)

    monkeypatch.setattr(ne.Model, "pack", packs)
    refused(capsys, "train", "--data", text, *FAST, "--steps", 6, "--save-every", 2, "--out", out,
            words=["2 GiB"])
    saved = ne.read_checkpoint(str(out))
    monkeypatch.setattr(ne.Model, "pack", pack)
    run("train", "--data", text, *FAST, "--steps", 6, "--out", tmp_path / "b.bin")
    run("train", "--resume", "--out", out)
    whole, resumed = (ne.read_checkpoint(str(x)) for x in (tmp_path / "b.bin", out))
    assert saved.state.step == 2 and np.array_equal(whole.flat, resumed.flat)


# ---- 9 evaluation
def disjoint(tokens, T):
    """tokens, targets (n, T) of the windows that a run is validated on."""
    x, (y,) = ne.windows(tokens, range(0, len(tokens) - 1, T), T, 1)
    return x, y


@pytest.mark.parametrize("count", [2, 8, 9, 10, 17, 150])
def test_bits_per_byte_by_hand(count):
    """Every token after the first once, in windows of seq_len that do not overlap.  In float32,
    whose kernels are compiled already; those of float64 take half a minute."""
    flat, T = random_flat(TINY, 5, np.float32), TINY.seq_len
    model, p = ne.Model(TINY, flat), ne.views(flat.astype(np.float64), ne.param_table(TINY))
    tokens = np.random.default_rng(6).integers(0, TINY.vocab_size, count).astype(np.int32)
    nats = 0.0
    for s in range(0, count - 1, T):
        _, logits = naive.forward(TINY, p, tokens[s:min(s + T, count - 1)])
        nats += naive.cross_entropy(logits[0], tokens[s + 1:s + 1 + T])[0]
    bits = evaluate(model, *disjoint(tokens, T), 321)
    assert math.isclose(bits, nats / math.log(2) / 321, rel_tol=1e-6)


@pytest.mark.parametrize("rows", [100, 7, 1])
def test_evaluation_on_some_windows(rows):
    """So many, spread evenly from the first to the last, over their share of the bytes."""
    model, n = ne.Model(TINY, random_flat(TINY, 5, np.float32)), 200
    tokens = np.random.default_rng(6).integers(0, TINY.vocab_size, n * TINY.seq_len - 2)
    x, y = disjoint(tokens.astype(np.int32), TINY.seq_len)
    assert (y[-1] >= 0).sum() == TINY.seq_len - 3        # the last window is not full
    whole = evaluate(model, x, y, 3000)
    assert evaluate(model, x, y, 3000, n) == evaluate(model, x, y, 3000, n + 1) == whole
    pick = [i * (n - 1) // max(1, rows - 1) for i in range(rows)]
    nats = sum(model.losses(x[i:i + 1], y[i:i + 1])[0] for i in pick)
    size = 3000 * (y[pick] >= 0).sum() / (len(tokens) - 1)
    want = nats / math.log(2) / size
    assert evaluate(model, x, y, 3000, rows) == pytest.approx(want, rel=1e-6)
    assert abs(want / whole - 1) > 1e-4      # another number than that of all


# ---- the loop
def test_what_a_run_prints_and_logs(trained, text):
    out = (trained / "stdout.txt").read_text("utf-8")
    assert re.search(r"step +20/20  loss \d+\.\d+  \d+\.\d+ bits/byte .* tok/s  ETA 0:00", out), out
    assert f"{STARTED} chat nanoeuler.bin" in out and str(text) in out
    log = read_log(str(trained / "nanoeuler.jsonl"))
    steps = [r for r in log if "loss" in r]
    assert [r["step"] for r in steps] == list(range(1, 21))
    assert np.mean([r["loss"] for r in steps[-3:]]) < steps[0]["loss"] - 0.3          # it learns
    for r in steps:
        resting = 6 < r["step"] <= 18        # from 0.3 to 0.9 of the run
        assert len(r["heads"]) == (1 if resting else 4) and r["heads"][0] == r["loss"]
        assert r["norm"] > 0 and r["tokens_per_s"] > 0 and r["n_steps"] == 20
    val = [(r["step"], r["val_bits_per_byte"]) for r in log if "val_bits_per_byte" in r]
    assert [s for s, _ in val] == [10, 20]
    c = ne.read_checkpoint(str(trained / "nanoeuler.bin"))
    assert c.state.step == 20 and c.state.tokens_seen == 20 * 4 * 16
    assert c.state.bits_per_byte == val[-1][1]
    assert not (trained / "nanoeuler.bin.tmp").exists()
    tokens_per_byte = steps[0]["bits_per_byte"] / steps[0]["loss"] * math.log(2)
    train = split_text(text.read_bytes(), 0.1)[0]
    assert tokens_per_byte == pytest.approx(len(c.tokenizer.encode(train)) / len(train))


def test_validation_of_the_log_is_bits_per_byte_of_the_tail(trained, text):
    c = ne.read_checkpoint(str(trained / "nanoeuler.bin"))
    train, val = split_text(text.read_bytes(), 0.1)
    tokens = np.append(c.tokenizer.encode(train)[-1:], c.tokenizer.encode(val))
    model = ne.Model(c.cfg, c.flat, dtype=ne.PRECISIONS[DTYPE])
    bits = evaluate(model, *disjoint(tokens, c.cfg.seq_len), len(val))
    assert bits == pytest.approx(c.state.bits_per_byte, rel=1e-6)


def test_what_a_run_makes_of_its_settings(text, elsewhere):
    """The rate is that of width 128, the batch whole sequences, cuts are of what is learned."""
    cfg = replace(TINY, n_embd=256, seq_len=16, vocab_size=280)
    make = lambda **chosen: TextRun("x.bin", Checkpoint(cfg, None, ne.State(), None, ()),
                                   TrainOptions.chosen(
                                       optimizer="adamw", data=str(text), **chosen))
    plain, cut = make(batch=75, lr=0.004), make(batch=7, cuts=0.3)
    assert plain.schedule.lr == pytest.approx(0.002) and (plain.B, cut.B) == (5, 1)
    train, _ = split_text(text.read_bytes(), 0.1)
    tokens = plain.tokenizer.encode(train)
    made = bpe.train(train, 280, bpe.SPECIALS)
    assert plain.tokenizer.hash() == made.hash() == cut.tokenizer.hash()
    assert np.array_equal(plain.data.batches.tokens, tokens)
    assert len(cut.data.batches.tokens) > len(tokens)
    assert cut.tokenizer.decode(cut.data.batches.tokens) == train
    for x, y in zip(plain.data.validation, cut.data.validation):
        assert np.array_equal(x, y)
    other = make(batch=75, seed=2, mtp_weight=0.0)
    assert not np.array_equal(plain.model.flat, other.model.flat)
    [first, begun] = [run.batches.take(0, run.B) for run in (plain, other)]
    assert not np.array_equal(first[0], begun[0])
    for run, learns in ((plain, True), (other, False)):
        weight, measures = run.ce_weights(*run.batches.take(0, run.B))
        assert (weight[0, 1] > 0) == learns and measures == {}
    again, other = make(cuts=0.3), make(cuts=0.3, seed=2)
    assert np.array_equal(again.data.batches.tokens, cut.data.batches.tokens)
    assert not np.array_equal(other.data.batches.tokens, cut.data.batches.tokens)


def test_a_preset_and_what_is_changed_of_it(elsewhere):
    class Run(TextRun):
        shapes = []

        def __init__(self, out, start, options, engine):
            self.shapes.append(start.cfg)

        def go(self):
            """The model is not needed."""

    for more in (dict(preset="big", seq_len=16), dict(vocab_size=300)):
        launch(Run, out="x.bin", resume=False, force=False, **more)
    assert Run.shapes == [replace(ne.PRESETS["big"], seq_len=16),
                          replace(ne.PRESETS["small"], vocab_size=300)]


def test_micro_batches_train_the_same_weights(trained, text, elsewhere):
    run("train", "--data", text, "--steps", 20, "--eval-every", 10, *FAST, "--micro-batch", 3)
    assert outcome(elsewhere).arrays == outcome(trained).arrays
    assert ne.read_checkpoint("nanoeuler.bin").state.micro_batch == 3


def test_a_run_needs_no_more_of_an_engine(text, elsewhere):
    """An engine with these members and no others trains to the same bytes."""
    class Other:
        program, talk, ready = "other.py", "chat", staticmethod(lambda options: None)

        def __init__(self, cfg, flat, moments, options):
            model, self.cfg = ne.Model(cfg, flat, moments, options), cfg
            for name in ("gradient", "update", "losses", "buffers", "first_bad_tensor", "decoder",
                         "device"):
                setattr(self, name, getattr(model, name))

        def micro_batch(self, B, asked=None, T=None):
            return 3

    for name, engine in (("one", ne.Model), ("other", Other)):
        launch(TextRun, engine, "small", out=f"{name}.bin", resume=False, force=False, steps=6,
                  data=str(text), seq_len=16, vocab_size=280, batch=64, eval_every=2)
    one, other = (ne.read_checkpoint(f"{name}.bin") for name in ("one", "other"))
    for x, y in zip((one.flat, *one.moments), (other.flat, *other.moments)):
        assert np.array_equal(x, y)
    assert one.state.bits_per_byte == other.state.bits_per_byte


def test_a_pace_beyond_all_measure(copy):
    """As of a checkpoint that was made up: a run is never longer than a flag may say."""
    state = ne.State(step=7, elapsed=5e-324)
    assert steps_planned(state, TrainOptions(minutes=1e6)) == 1 << 40


def test_a_tail_without_a_token_is_refused(elsewhere, capsys):
    """A tokenizer of others may know none of its bytes."""
    tokenizer = bpe.Tokenizer({c: k for k, c in enumerate(set(bpe.CHAR_OF_ID) - {"z"})}, [])
    cfg = replace(TINY, vocab_size=255)
    ne.write_checkpoint("x.bin", cfg, tokenizer, ne.State(), random_flat(cfg, 1, np.float32))
    (elsewhere / "text.txt").write_bytes(b"a" * 900 + b"z" * 100)
    start = ne.read_checkpoint("x.bin")
    with pytest.raises(ne.UserError, match="held-out last 10% has no token to predict"):
        TextRun("y.bin", start, TrainOptions(data="text.txt").check())


def test_memory_does_not_grow_with_a_batch(monkeypatch):
    """Micro-batches train the same weights: see above."""
    model = ne.Model(TINY, random_flat(TINY, 1, np.float32))
    assert model.micro_batch(100) == 100 and model.micro_batch(100, 7) == 7
    assert model.micro_batch(1 << 24) == ne.MOST_AT_ONCE // TINY.seq_len
    assert model.micro_batch(1 << 24, T=2) == ne.MOST_AT_ONCE // 2
    shapes = *ne.act_shapes(TINY, TINY.seq_len), *ne.kept_grad_shapes(TINY, 1, TINY.seq_len)
    size = 4 * sum(map(math.prod, shapes))
    for most, sequences in ((10 * size, 10), (10 * size - 1, 9), (size, 1), (1, 1)):
        monkeypatch.setattr(ne, "MOST_BYTES", most)
        assert model.micro_batch(100) == sequences and model.micro_batch(100, 50) == 50


def test_a_resumed_run_keeps_its_micro_batch(text, elsewhere):
    """On a GPU the order of sums depends on it, and the memory that is free on the day."""
    class Other(ne.Model):
        free, asked = 3, []

        def micro_batch(self, B, asked=None, T=None):
            self.asked.append(asked)
            return asked or self.free

    go = lambda **more: launch(TextRun, Other, "small", out="x.bin", force=False, data=str(text),
                                  seq_len=16, vocab_size=280, batch=64, **more)
    go(resume=False, steps=2)
    assert ne.read_checkpoint("x.bin").state.micro_batch == 3 and Other.asked == [None]
    Other.free, Other.asked[:] = 1, []
    go(resume=True, steps=4)
    assert Other.asked == [3]
    go(resume=True, steps=6, micro_batch=2)  # less memory today
    assert Other.asked == [3, 2] and ne.read_checkpoint("x.bin").state.micro_batch == 2


def test_a_finished_run_can_be_made_longer(copy, monkeypatch):
    monkeypatch.chdir(copy)
    run("train", "--resume", "--steps", 25)
    assert ne.read_checkpoint("nanoeuler.bin").state.step == 25


@pytest.mark.parametrize("ignored, steps", [(False, 21), (True, 25)])
def test_a_terminal_that_closes_saves_the_run(ignored, steps, copy, monkeypatch):
    """Under nohup, which ignores the signal, the run continues."""
    monkeypatch.chdir(copy)
    handler = signal.SIG_IGN if ignored else signal.SIG_DFL
    before = signal.signal(signal.SIGHUP, handler)
    try:
        before_each_step(monkeypatch, lambda run: (
            run.state.step == 20 and signal.raise_signal(signal.SIGHUP)))
        run("train", "--resume", "--steps", 25)
        assert signal.getsignal(signal.SIGHUP) == handler
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ne.read_checkpoint("nanoeuler.bin").state.step == steps


def test_a_second_ctrl_c_kills_and_later_ones_are_not_ours(copy, monkeypatch):
    """The first is remembered until the step is done; what heard them before, hears them again."""
    monkeypatch.chdir(copy)
    during = []

    def interrupt(run):
        signal.raise_signal(signal.SIGINT)
        during.append(signal.getsignal(signal.SIGINT))

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    before_each_step(monkeypatch, interrupt)
    run("train", "--resume", "--steps", 25)
    assert during == [signal.SIG_DFL]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert ne.read_checkpoint("nanoeuler.bin").state.step == 21


def test_the_time_of_all_sittings_is_added_up(copy, monkeypatch):
    monkeypatch.chdir(copy)
    c = ne.read_checkpoint("nanoeuler.bin")
    c.state.elapsed = 5000.0
    ne.write_checkpoint("nanoeuler.bin", c.cfg, c.tokenizer, c.state, c.flat, c.moments)
    run("train", "--resume", "--steps", 21)
    assert ne.read_checkpoint("nanoeuler.bin").state.elapsed > 5000


@pytest.mark.slow
def test_a_cold_start_computes_the_same(text, tmp_path):
    """The run that compiles the kernels, says so, and gets the bits that the next run gets.

    The decoder and the tokenizer, which training bits do not depend on, are there already; so is
    the optimizer of float64, as check.py may leave it: it is another one."""
    (tmp_path / "__pycache__").mkdir()
    for name in ("nanoeuler.py", "bpe.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "nanoeuler_parts", tmp_path / "nanoeuler_parts",
                    ignore=shutil.ignore_patterns("__pycache__"))
    for folder in {kernel.stats.cache_path for kernel in (ne.decode_step, bpe.encode_range)}:
        for path in Path(folder).glob("*.nb[ic]"):
            if path.name.startswith(("bpe.", "nanoeuler.decode_step-", "nanoeuler.attention_par",
                                     "nanoeuler.product_par")):
                shutil.copy(path, tmp_path / "__pycache__")
    env = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_CACHE")}
    code = ("import numpy as np, nanoeuler as ne; x = np.ones((4, 9)); "
            "ne.adamw(*x, 4, ne.Hyper(*np.ones(8)))")
    ok(subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True,
                      timeout=200))
    results, said = [], []
    for name in ("cold", "warm"):
        (tmp_path / name).mkdir()
        args = command("train", "--data", text, "--steps", 5, *FAST)
        args[1] = str(tmp_path / "nanoeuler.py")
        result = subprocess.run(args, cwd=tmp_path / name, env=env, capture_output=True,
                                encoding="utf-8", timeout=400)
        ok(result)
        results.append(outcome(tmp_path / name))
        said.append("compil" in result.stderr)
    assert said == [True, False]
    assert results[0] == results[1]


# ---- the best model of a run
VALIDATED = ("--steps", 6, "--eval-every", 2, *FAST)     # after steps 2, 4 and 6


@pytest.fixture
def measured(monkeypatch):
    """What validations of some rows find, in turn; those of all rows find 9."""
    values = []
    monkeypatch.setattr("nanoeuler_parts.runs.evaluation.evaluate",
                        lambda model, tokens, targets, n_bytes, rows=None, batch=16:
                        values.pop(0) if rows else 9.0)
    return values


@pytest.mark.parametrize("found, best", [([2.0, 1.5, 1.6], 4), ([1.5, 1.4, 1.3], None),
                                         ([1.5, 2.0, 1.51], None), ([1.5, 2.0, 1.52], 2)])
def test_a_text_learned_by_heart_is_told_of(found, best, measured, text, elsewhere, capsys):
    """By the same rows at the end as before, not by all of them; a hundredth is no sign."""
    measured[:] = found
    run("train", "--data", text, *VALIDATED)
    said, state = capsys.readouterr().err, ne.read_checkpoint("nanoeuler.bin").state
    assert measured == [] and (state.best, state.bits_per_byte) == (min(found), 9.0)
    assert ("the model overfits" in said) == (best is not None)
    if best:
        assert f"was {min(found):.4f} bits/byte, at step {best}; the same rows now" in said
        assert f"rows now have {found[-1]:.4f}: the" in said and state.best_step == best
        assert "--minutes" in said and "--keep-best keeps the model of that step" in said


@pytest.mark.parametrize("holdout, rows", [(0.003, 6), (0.02, 33)])
def test_a_few_held_out_rows_say_little(holdout, rows, measured, text, elsewhere, capsys):
    measured[:] = [1.5, 1.5]
    run("train", "--data", text, *VALIDATED, "--holdout", holdout)
    assert ("the model overfits" in capsys.readouterr().err) == (rows >= FEWEST)


def test_the_best_validation_is_known_after_a_break(measured, text, elsewhere, monkeypatch, capsys):
    """Without the log, too."""
    after_each_step(monkeypatch, lambda run: (
        run.state.step == 3 and signal.raise_signal(signal.SIGINT)))
    measured[:] = [1.5, 1.7, 1.8]
    run("train", "--data", text, *VALIDATED)
    os.remove("nanoeuler.jsonl")
    run("train", "--resume", "--keep-best")
    said = capsys.readouterr().err
    assert "was 1.5000 bits/byte, at step 2; the same rows now have 1.8000" in said
    assert "--keep-best keeps the model" in said         # which came too late for it
    assert not os.path.exists("nanoeuler_best.bin")


@pytest.mark.parametrize("found, best", [([1.6, 1.5, 1.7], 4), ([1.6, 1.5, 1.4], 6)])
def test_the_best_model_is_kept(found, best, measured, text, elsewhere, monkeypatch, capsys):
    """Beside the checkpoint, which is as without it; --resume goes on to keep it."""
    measure, seen = TextRun.measure, {}

    def measure_and_copy(self, rows=None):
        seen[self.state.step] = self.model.flat.copy()
        return measure(self, rows)

    start = ("train", "--data", text, *VALIDATED)
    measured[:] = found
    run(*start, "--out", "plain.bin")
    assert not os.path.exists("plain_best.bin")
    monkeypatch.setattr(TextRun, "measure", measure_and_copy)
    measured[:] = found
    capsys.readouterr()
    said = told(*start, "--keep-best")
    noted = "note: " in (err := capsys.readouterr().err)
    assert noted == ("nanoeuler_best.bin is the model of that step" in err) == (best < 6)
    kept = ne.read_checkpoint("nanoeuler_best.bin")
    assert np.array_equal(kept.flat, seen[best]) and kept.moments == ()
    assert (kept.state.step, kept.state.best) == (best, min(found)) and "nanoeuler_best.bin" in said
    assert outcome(elsewhere).arrays == outcome(elsewhere, "plain").arrays
    measured[:] = [1.3, 1.2]
    run("train", "--resume", "--steps", 9)
    kept = ne.read_checkpoint("nanoeuler_best.bin")
    assert np.array_equal(kept.flat, seen[9]) and kept.state.best == 1.2


def test_a_best_model_that_cannot_be_written_ends_no_run(measured, text, elsewhere, monkeypatch,
                                                         capsys):
    write = write_tensors

    def refuses(path, *args):
        if "best" in path:
            raise WriteError(f"cannot write {path}: No space left on device")
        return write(path, *args)

    monkeypatch.setattr("nanoeuler_parts.files.safetensors.write_tensors", refuses)
    measured[:] = [1.6, 1.5, 1.7]
    run("train", "--data", text, *VALIDATED, "--keep-best")
    assert "note: step 4 is not saved: cannot write nanoeuler_best.bin" in capsys.readouterr().err
    assert ne.read_checkpoint("nanoeuler.bin").state.step == 6


# ---- progress lines
class FakeClock:
    """A clock that stands still until `advance` or a training step moves it."""

    def __init__(self, monkeypatch):
        self.now, self.a_step = 1000.0, 0.0
        update = ne.Model.update

        def update_slowly(model, hyper):
            self.advance(self.a_step)
            return update(model, hyper)

        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(ne.Model, "update", update_slowly)

    def advance(self, seconds):
        self.now += seconds


@pytest.fixture
def fake_clock(monkeypatch):
    return FakeClock(monkeypatch)


@pytest.mark.parametrize("a_step, due", [
    (0.1, [5, 20, 40]), (3, [4, 5, 9, 13, 17, 20, 24, 28, 32, 36, 40]),
    (11, [*range(1, 41)])])
def test_steps_are_reported_when_ten_seconds_have_passed(a_step, due, fake_clock, text, elsewhere):
    """And at step 5, to say how long the run takes, and every 20 steps."""
    fake_clock.a_step = a_step
    said = told("train", "--data", text, "--steps", 40, "--eval-every", 100, *FAST)
    assert [int(n) for n in re.findall(r"(?m)^step +(\d+)/", said)] == due, said


def test_the_time_left_is_that_of_the_steps_left(fake_clock, text, elsewhere):
    fake_clock.a_step = 3
    said = told("train", "--data", text, "--steps", 40, "--mtp-until", 1, *FAST)
    left = dict(re.findall(r"(?m)^step +(\d+)/40 .*ETA (\d+:\d\d)$", said))
    assert (left["4"], left["5"], left["20"], left["40"]) == ("1:48", "1:45", "1:00", "0:00"), said


@pytest.mark.parametrize("a_part, due", [
    (1, []), (6, [2, 4, 6, 8]), (10, [2, 4, 6, 8]), (11, [*range(1, 10)])])
def test_parts_are_reported_when_ten_seconds_have_passed(a_part, due, fake_clock, capsys):
    for _ in with_progress(range(10), "validation"):
        fake_clock.advance(a_part)
    assert capsys.readouterr().out == "".join(f"validation: {i} of 10 parts\n" for i in due)


def test_a_record_is_in_the_log_at_once(text, elsewhere, monkeypatch):
    """So an interrupted run, and a page that watches one, has all steps up to the last."""
    write, seen = TextRun.write, []

    def write_and_look(run, **values):
        write(run, **values)
        seen.append((len(read_log("nanoeuler.jsonl")), values["step"]))

    monkeypatch.setattr(TextRun, "write", write_and_look)
    run("train", "--data", text, "--steps", 4, *FAST)
    assert seen == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 4)]          # the last is a validation


@pytest.mark.parametrize("width, said", [
    (128, "lr 0.004, "), (320, "lr 0.0016 (--lr 0.004 x 128 / width 320), ")])
def test_the_settings_show_the_rate_as_typed_and_as_used(width, said):
    rows = dict(Schedule(TrainOptions(lr=0.004), width).rows())
    assert rows["AdamW"].startswith(said) and rows["Muon"].startswith("lr 0.02, ")


@pytest.mark.parametrize("sample, shown", [
    ("", []), ("\nHe said:\n'No.'\n", ["    He said:", "    'No.'"])])
def test_a_sample_is_printed_as_the_text_that_it_is(sample, shown, monkeypatch, capsys):
    run = object.__new__(TextRun)
    run.state, run.progress = ne.State(step=7), SimpleNamespace(count_validation=lambda s: None)
    run.data = SimpleNamespace(validation=SimpleNamespace(tokens=range(ESTIMATE + 1)))
    for name, value in dict(elapsed=0.0, measure="1.5 bits/byte", sample_text=sample, write=None,
                            compare=None).items():
        monkeypatch.setattr(TextRun, name, lambda self, *a, value=value, **named: value)
    run.validate()
    assert capsys.readouterr().out.splitlines() == [
        "step     7  validation 1.5 bits/byte (estimate)", *shown]


# ---- a length by minutes
ALIKE = (*FAST, "--mtp-until", 1)            # one step is as long as another


@pytest.fixture
def clock(monkeypatch):
    """A run takes 0.1 s a step; after its tenth step, as long as clock.append(seconds) says."""
    slow = [0.1]
    monkeypatch.setattr(TextRun, "elapsed", lambda run: (
        0.1 * min(10, run.state.step) + slow[-1] * max(0, run.state.step - 10)))
    return slow


def test_the_time_left_has_no_validation_that_compiles(text, elsewhere, monkeypatch):
    """A run of 40 steps, 0.1 s each, and of 1,000 s in its first validation, after step 10."""
    measure, validated = TextRun.measure, []
    monkeypatch.setattr(TextRun, "measure", lambda *a: (measure(*a), validated.append(1))[0])
    monkeypatch.setattr(TextRun, "elapsed",
                        lambda run: 0.1 * run.state.step + 1000 * bool(validated))
    said = told("train", "--data", text, *ALIKE, "--steps", 40, "--eval-every", 10)
    [line] = [line for line in said.splitlines() if line.startswith("step    20/")]
    assert line.endswith(("ETA 0:01", "ETA 0:02")), said


@pytest.mark.parametrize("seconds, late", [(0.1, 0), (0.2, 1.2)])
def test_minutes_end_a_run(seconds, late, clock, text, elsewhere):
    """6 seconds with the validation at the end, a third of a step a token.  A plan by the first
    steps alone would take 10 where the others take twice as long."""
    clock.append(seconds)
    said = told("train", "--data", text, "--minutes", 0.1, *ALIKE, "--holdout", 0.05)
    c = ne.read_checkpoint("nanoeuler.bin")
    s, (_, tail) = c.state, split_text(text.read_bytes(), 0.05)
    windows = math.ceil(len(c.tokenizer.encode(tail)) / 16)
    check = seconds * windows * 16 / (3 * 64)
    assert "complete" in said and s.step == s.n_steps
    planned = [r["n_steps"] for r in read_log("nanoeuler.jsonl") if "loss" in r]
    assert planned[0] is None and planned[-1] == s.step  # the training page has the time left
    assert 6 - 2 * seconds < s.elapsed + check < 6.001 + late


@pytest.mark.parametrize("a_step, steps", [(2.9, 3), (7, 1), (1.1, 5)])
def test_minutes_end_a_run_of_slow_steps(a_step, steps, fake_clock, text, elsewhere):
    """Six seconds: the run ends with the step in which they are over, also before its fifth step.
    At 1.1 s, five steps leave no time for another and the validation."""
    fake_clock.a_step = a_step
    told("train", "--data", text, "--minutes", 0.1, *ALIKE)
    s = ne.read_checkpoint("nanoeuler.bin").state
    assert (s.step, s.n_steps) == (steps, steps) and s.bits_per_byte
    [listed] = Runs(elsewhere).listed()      # no step's record may have had the number of steps
    assert (listed["step"], listed["n_steps"], "stopped" in listed) == (steps, steps, False)


def test_a_long_tail_is_measured_in_part(clock, text, elsewhere, monkeypatch, capsys):
    """By rows that are spread over the tail, which then leave time for training."""
    whole, part = [], []
    for found, most in ((whole, TextRun.most_final), (part, 320)):
        monkeypatch.setattr(TextRun, "most_final", most)
        said = told("train", "--data", text, "--minutes", 0.2, *ALIKE, "--force")
        c, log = ne.read_checkpoint("nanoeuler.bin"), read_log("nanoeuler.jsonl")
        found += [said, c.state, [r for r in log if "val_bits_per_byte" in r][-1]]
    _, tail = split_text(text.read_bytes(), 0.1)
    n = math.ceil(len(c.tokenizer.encode(tail)) / 16) * 16
    assert n > 3 * 320 and "on the whole held-out tail" in whole[0] and whole[2]["windows"] is None
    assert f"on 20 of {n // 16:,} held-out windows" in part[0] and part[2]["windows"] == 20
    assert part[1].step > whole[1].step      # the time that the shorter validation leaves
    model, run = ne.Model(c.cfg, c.flat), TextRun("y.bin", c._replace(state=ne.State()),
                                                 TrainOptions(data=str(text)).check())
    measured = evaluate(model, *run.data.validation, 20)
    assert part[1].bits_per_byte == pytest.approx(measured, 1e-3)


@pytest.mark.parametrize("a_step", [0.1, 1, 2.6, 7])
def test_the_last_validation_takes_a_quarter_of_the_minutes(a_step, fake_clock, text, elsewhere):
    """At most, counted in rows: a row takes a third of its time in a step.  All minutes are used,
    except for less than a step, or the five steps by which a run is planned take longer."""
    fake_clock.a_step = a_step
    said = told("train", "--data", text, "--minutes", 0.25, *ALIKE, "--holdout", 0.8)
    s = ne.read_checkpoint("nanoeuler.bin").state
    rows = [r for r in read_log("nanoeuler.jsonl") if "val_bits_per_byte" in r][-1]["windows"]
    training, check = a_step * s.step, a_step * rows / (3 * 4)       # 4 rows of 16 tokens a step
    assert rows == 4 * s.step and 3 * check <= training * 1.001
    assert f" on {rows} of " in said and "held-out windows of 16 tokens" in said
    assert training + check > 15 - 1.4 * a_step
    assert training + check < 15.001 or s.step <= 5


def test_a_complete_run_says_how_it_continues(clock, text, elsewhere):
    """And the command that it prints does so"""
    told("train", "--data", text, "--minutes", 0.02, *ALIKE)
    assert re.search("--resume --out nanoeuler.bin --minutes 0.04\n.*--force",
                     told("train", "--resume"))
    done = ne.read_checkpoint("nanoeuler.bin").state.step
    said = told("train", "--resume", "--steps", done - 1)
    assert f"--steps {done - 1}: expected more than the run has done" in said
    command = re.search("nanoeuler.py (train --resume .*)", said)[1]
    assert f"--steps {2 * done}" in command
    told(*command.split())
    assert ne.read_checkpoint("nanoeuler.bin").state.step == 2 * done


def test_more_minutes_go_on_where_the_schedule_is(clock, text, elsewhere):
    start = ("--out", "m.bin", "--minutes")
    told("train", "--data", text, *start, 0.05, *ALIKE)
    before = ne.read_checkpoint("m.bin").state
    done = f"is complete: {before.step:,} of {before.step:,} steps"
    assert done in told("train", "--resume", *start, 0.01)
    told("train", "--resume", *start, 2 * before.elapsed / 60)
    rates = [r["lr"] for r in read_log("m.jsonl") if "lr" in r][before.step:]
    assert len(rates) >= 5 and max(rates) < 0.8 * 16e-3   # half of the cosine, not its top


def test_the_same_length_again_is_no_other_length(clock, text, elsewhere):
    """`make train ARGS="--minutes 10"` twice, and the first ended some seconds early."""
    start = ("train", "--data", text, "--minutes", 0.05, *FAST)
    told(*start)
    c = ne.read_checkpoint("nanoeuler.bin")
    early = ne.replace(c.state, elapsed=c.state.elapsed / 2)
    ne.write_checkpoint("nanoeuler.bin", c.cfg, c.tokenizer, early, c.flat, c.moments)
    for again in (start, (*start[:3], "--steps", 0)):
        assert told(*again, "--resume").startswith("nanoeuler.bin is complete")


def test_a_run_that_stops_before_it_has_a_plan(clock, text, elsewhere, monkeypatch):
    """--minutes is made steps after the fifth; the checkpoint of an earlier stop knows of none."""
    after_each_step(monkeypatch, lambda run: (
        run.state.step == 2 and signal.raise_signal(signal.SIGINT)))
    said = told("train", "--data", text, "--minutes", 0.05, *FAST, "--save-every", 1)
    state = ne.read_checkpoint("nanoeuler.bin").state
    assert (state.step, state.n_steps) == (2, None) and "step 2 of ?" in said
    told("train", "--resume")
    state = ne.read_checkpoint("nanoeuler.bin").state
    assert 2 < state.step == state.n_steps < 30


# ---- not a number
@pytest.mark.parametrize("name", ne.Params._fields)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_parameter_is_found_and_named(name, bad):
    cfg = replace(TINY, qkv_bias=True, qk_norm=True)
    model = ne.Model(cfg, random_flat(cfg, 8, np.float32))
    x = getattr(model.p, name)
    where = tuple(n // 2 for n in x.shape)
    x[where] = bad
    model.pack()
    tokens = np.full((2, 8), TINY.vocab_size // 2, np.int32)
    model.gradient(tokens, np.zeros((2, 2, 8), np.int32), np.ones(2))
    before = model.flat.copy()
    losses, norm = model.update(hyper(1))
    assert not (math.isfinite(norm) and np.isfinite(losses).all())
    assert np.array_equal(model.flat, before, equal_nan=True)
    said = model.first_bad_tensor()
    assert name in said and str(list(where)) in said and str(bad) in said, said


@pytest.mark.parametrize("muon_lr", [0.0, 0.02])
def test_a_caller_may_skip_a_step_that_is_not_finite(muon_lr):
    """The next step has the bits of a model that never saw the bad one."""
    tokens = np.random.default_rng(3).integers(0, TINY.vocab_size, (2, 8)).astype(np.int32)
    targets = np.stack([np.roll(tokens, -1 - k, 1) for k in range(2)])
    settings = hyper(1)._replace(muon_lr=muon_lr, momentum=0.9, newton_schulz=3.0)
    steps = []
    for bad in False, True:
        model = ne.Model(TINY, random_flat(TINY, 8, np.float32))
        before = model.flat.copy()
        if bad:
            model.gradient(tokens, targets, np.full(2, np.nan))
            _, norm = model.update(settings)
            assert not math.isfinite(norm) and "is nan" in model.first_bad_tensor()
            assert np.array_equal(model.flat, before)
        model.gradient(tokens, targets, np.ones(2) / 16)
        ce, norm = model.update(settings)
        assert math.isfinite(norm) and not np.array_equal(model.flat, before)
        steps.append([x.tobytes() for x in (ce, *model.buffers())] + [norm])
    assert steps[0] == steps[1]


@pytest.fixture
def read_unseen(monkeypatch):
    """Readers let pass what is not finite, as if it had arisen during the run."""
    monkeypatch.setattr("nanoeuler_parts.files.safetensors.need_finite", lambda name, x: None)


@pytest.mark.parametrize("name", ["qkv", "down", "final_norm"])
def test_an_injected_nan_stops_training(name, trained, tmp_path, read_unseen, monkeypatch, capsys):
    """The step and the tensor are named, the last good checkpoint stays as it is."""
    c = ne.read_checkpoint(str(trained / "nanoeuler.bin"))
    x = getattr(ne.views(c.flat, ne.param_table(c.cfg)), name)
    x.ravel()[17] = np.nan
    ne.write_checkpoint(str(tmp_path / "nanoeuler.bin"), c.cfg, c.tokenizer, c.state, c.flat,
                        c.moments)
    before = (tmp_path / "nanoeuler.bin").read_bytes()
    monkeypatch.chdir(tmp_path)
    refused(capsys, "train", "--resume", "--steps", 30,
            words=("step 21", name, "nan", "nanoeuler.bin", "--lr"))
    assert (tmp_path / "nanoeuler.bin").read_bytes() == before


def test_a_step_that_was_not_made_is_not_counted(copy, monkeypatch):
    """Memory that ends within an update: what is saved is the step before, whole."""
    monkeypatch.chdir(copy)
    before = ne.read_checkpoint("nanoeuler.bin")

    def fails(self, hyper):
        raise MemoryError("9 GiB")

    monkeypatch.setattr(ne.Model, "update", fails)
    assert ne.main(["train", "--resume", "--steps", "30", "--threads", "1"]) == 2
    after = ne.read_checkpoint("nanoeuler.bin")
    assert after.state.step == before.state.step == 20
    assert np.array_equal(after.flat, before.flat)


@pytest.mark.parametrize("moments, is_read", [(0, True), (0, False), (1, False)])
def test_a_bad_moment_is_not_saved(moments, is_read, text, trained, tmp_path, read_unseen,
                                   monkeypatch, capsys):
    """A NaN that arises in the update itself: nothing written afterwards may hold it, also if it is
    in the embedding of a token that no loss depends on."""
    c = ne.read_checkpoint(str(trained / "nanoeuler.bin"))
    ids = set(c.tokenizer.encode(text.read_bytes()))
    token = next(t for t in range(c.cfg.vocab_size) if (t in ids) == is_read)
    c.moments[moments][c.cfg.n_embd * token + 5] = np.nan
    ne.write_checkpoint(str(tmp_path / "nanoeuler.bin"), c.cfg, c.tokenizer, c.state, c.flat,
                        c.moments)
    before = (tmp_path / "nanoeuler.bin").read_bytes()
    monkeypatch.chdir(tmp_path)
    words = ("step 2", "nan") if is_read else ("a number of wte", "is nan")
    refused(capsys, "train", "--resume", "--steps", 30, words=words)
    assert (tmp_path / "nanoeuler.bin").read_bytes() == before


def test_a_validation_that_is_no_number_is_not_saved(copy, monkeypatch, capsys):
    """Such a checkpoint would be refused when it is read."""
    monkeypatch.chdir(copy)
    before = (copy / "nanoeuler.bin").read_bytes()
    monkeypatch.setattr("nanoeuler_parts.runs.evaluation.evaluate", lambda *args: float("nan"))
    refused(capsys, "train", "--resume", "--steps", 25, words=("validation loss is nan bits/byte",))
    assert (copy / "nanoeuler.bin").read_bytes() == before


def test_minutes_do_not_count_the_compilation(text, elsewhere, monkeypatch):
    """A first run has as many minutes to learn as a second."""
    later, began, clock = [0.0], [], time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + later[0])
    monkeypatch.setattr(ne.Model, "ready", staticmethod(lambda options=None: later.insert(0, 1e6)))
    monkeypatch.setattr(ne, "train", lambda run, stopped: began.append(run.elapsed()))
    run("train", "--data", text, "--steps", 1, *FAST)
    assert 0 < began[0] < 1e5


def test_minutes_do_not_count_the_reading_of_data(copy, monkeypatch):
    """In a resumed run, which also reads its checkpoint, and once more in the next one"""
    later, began, clock, train = [0.0], [], time.perf_counter, ne.train

    def loads(run, *args, load=TextRun.load):
        later[0] += 1e6
        return load(run, *args)

    def trains(run, stopped):
        began.append((run.state.elapsed, run.elapsed()))
        train(run, stopped)

    monkeypatch.chdir(copy)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + later[0])
    monkeypatch.setattr(TextRun, "load", loads)
    monkeypatch.setattr(ne, "train", trains)
    run("train", "--resume", "--steps", 22)
    run("train", "--resume", "--steps", 23)
    assert all(0 <= now - before < 1e5 for before, now in began) and len(began) == 2
    assert 0 < ne.read_checkpoint("nanoeuler.bin").state.elapsed < 1e5


@pytest.mark.parametrize("length, is_told", [(["--minutes", 0.01], True), (["--steps", 3], False)])
def test_a_run_of_few_steps_says_so(length, is_told, text, elsewhere, monkeypatch, capsys):
    seconds, clock = [0.0], time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + seconds[0])

    def slow(run):
        seconds[0] += 9

    before_each_step(monkeypatch, slow)
    run("train", "--data", text, *FAST, *length)
    said = capsys.readouterr()
    assert ("of training cannot teach a model much; use more --minutes" in said.err) == is_told
    assert re.search("^step .*loss", said.out, re.M)     # the last step is always printed


@pytest.mark.parametrize("length, words", [
    (dict(minutes=3.0), "so 3 minutes allow about 15 steps"),
    (dict(steps=3600), "so 3,600 steps take about 12.0 hours")])
def test_a_model_for_a_gpu_is_said_to_be_slow_on_a_cpu(length, words, monkeypatch, capsys):
    monkeypatch.setattr("nanoeuler_parts.runs.guards.seconds_of_step", lambda cfg, tokens: 12.0)
    options = TrainOptions.chosen(**length)
    for preset in "small", "big":
        note_slow_run(ne.PRESETS[preset], options)
    assert capsys.readouterr().err == ""
    note_slow_run(ne.PRESETS["base"], options)
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and "a step takes about 12.0 s" in said


def test_the_time_of_a_step_grows_with_the_work():
    """It is of matrix products: seconds on a CPU of today for the preset base."""
    assert 0.05 < seconds_of_step(ne.PRESETS["base"], 2048) < 1000


def test_train_says_that_a_model_is_slow_before_it_begins(text, tmp_path, monkeypatch):
    noted = []
    monkeypatch.setattr("nanoeuler_parts.runs.guards.note_slow_run",
                        lambda cfg, options: noted.append(cfg.n_embd))
    monkeypatch.setattr(TextRun, "go", lambda run: None)
    run("train", "--data", text, "--steps", 1, *FAST, "--out", tmp_path / "a.bin")
    assert noted == [32]


def test_train_says_that_it_reads_a_large_text(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(TextRun, "go", lambda run: None)
    size = os.path.getsize(text)
    for large, said in (size, True), (2 * size, False):
        monkeypatch.setattr("nanoeuler_parts.files.texts.LARGE", large)
        run("train", "--data", text, "--steps", 1, *FAST, "--out", tmp_path / "a.bin")
        assert (f"reading {text}\n" in capsys.readouterr().out) == said


@pytest.mark.parametrize("losses, norm", [([1.0, math.inf], 1.0), ([1.0, 1.0], math.nan)])
def test_a_run_names_what_is_not_finite(losses, norm):
    model = SimpleNamespace(first_bad_tensor=lambda: "parameter wte[0, 1] is nan")
    run = SimpleNamespace(step=3, model=model, out="a.bin")
    with pytest.raises(ne.UserError, match=r"step 3: parameter wte\[0, 1\] is nan; .* a.bin is"):
        TextRun.need_finite(run, np.array(losses), norm)


def test_a_step_whose_numbers_are_finite_searches_no_tensor(text, tmp_path, monkeypatch):
    """The search copies all activations of a GPU to the host: 2.4 GB, which took 5 s a step."""
    monkeypatch.setattr(ne.Model, "first_bad_tensor", never)
    run("train", "--data", text, "--steps", 3, *FAST, "--out", tmp_path / "a.bin")
