"""Training: optimizer, schedule, data, evaluation, the loop, and all that can go wrong."""
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import naive
import numpy as np
import pytest
from conftest import FAST, ROOT, TEXT, TINY, command, complains, nanoeuler, needs, random_flat
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import get_num_threads, set_num_threads
from test_checkpoint import outcome, wait_for_step

import bpe
import nanoeuler as ne
from data import commands, texts


@pytest.fixture(autouse=True)
def threads():
    before = get_num_threads()
    yield
    set_num_threads(before)


# ---- 6 optimizer
def hyper(t, lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, wd=0.1, clip=1e9):
    return np.array([lr, beta1, beta2, eps, wd, clip, 1 - beta1 ** t, 1 - beta2 ** t])


def test_adamw_equals_pytorch():
    torch = needs("torch")
    rng, N, n_decay = np.random.default_rng(1), 5000, 3111
    p, m, v = rng.standard_normal(N), np.zeros(N), np.zeros(N)
    parts = [torch.nn.Parameter(torch.tensor(x)) for x in (p[:n_decay].copy(), p[n_decay:].copy())]
    opt = torch.optim.AdamW([dict(params=[parts[0]], weight_decay=0.1),
                             dict(params=[parts[1]], weight_decay=0.0)],
                            lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for t in range(1, 21):
        g = rng.standard_normal(N) * 10.0 ** rng.integers(-6, 3)
        for part, piece in zip(parts, (g[:n_decay], g[n_decay:])):
            part.grad = torch.tensor(piece.copy())
        norm = torch.nn.utils.clip_grad_norm_(parts, 2.0).item()
        opt.step()
        got = ne.adamw(p, grad := g.copy(), m, v, n_decay, hyper(t, clip=2.0))
        assert math.isclose(got, norm, rel_tol=1e-12) and not grad.any()
        want = np.concatenate([x.detach().numpy() for x in parts])
        assert np.abs(p - want).max() < 1e-7     # torch adds 1e-6 to the norm it clips by


@settings(max_examples=40)
@given(N=st.integers(1, 700), share=st.floats(0, 1), t=st.integers(1, 50), seed=st.integers(0, 99))
def test_adamw_equals_numpy(N, share, t, seed):
    rng, n_decay = np.random.default_rng(seed), int(share * N)
    p, g, m, v = rng.standard_normal((4, N))
    v = v * v
    decay = np.arange(N) < n_decay
    want = naive.adamw(p, g, m, v, decay, 1e-2, 0.9, 0.95, 1e-8, 0.1, t)
    norm = ne.adamw(p, g, m, v, n_decay, hyper(t))
    assert norm > 0 and not g.any()
    for got, x in zip((p, m, v), want):
        assert np.allclose(got, x, rtol=1e-12, atol=1e-14)


def test_adamw_in_float32_clips_and_zeroes():
    rng = np.random.default_rng(2)
    p, g = rng.standard_normal((2, 4000)).astype(np.float32)
    m, v, want = np.zeros_like(p), np.zeros_like(p), p.astype(float)
    norm = math.sqrt((g.astype(float) ** 2).sum())
    want = naive.adamw(want, g.astype(float) / norm, 0 * want, 0 * want, np.arange(4000) < 9, 1e-2,
                       0.9, 0.95, 1e-8, 0.1, 1)[0]
    assert math.isclose(ne.adamw(p, g, m, v, 9, hyper(1, clip=1.0)), norm, rel_tol=1e-7)
    assert np.abs(p - want).max() < 1e-6 and not g.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 1234, 3999])
def test_adamw_touches_nothing_if_the_norm_is_not_finite(bad, at):
    rng = np.random.default_rng(3)
    p, g, m, v = rng.standard_normal((4, 4000)).astype(np.float32)
    g[at] = bad
    before = [x.copy() for x in (p, g, m, v)]
    assert not math.isfinite(ne.adamw(p, g, m, v, 9, hyper(1)))
    assert all(np.array_equal(x, y, equal_nan=True) for x, y in zip((p, g, m, v), before))


def test_norm_does_not_depend_on_the_threads():
    if get_num_threads() < 2:
        pytest.skip("one core")
    for seed in range(60):
        g, norms = np.random.default_rng(seed).standard_normal(5000), []
        for n in (1, 2):
            set_num_threads(n)
            p = np.ones(5000)
            norms.append(ne.adamw(p, g.copy(), 0 * p, 0 * p, 10, hyper(1)))
        assert norms[0] == norms[1], seed


def test_lr_at():
    lr = lambda step: ne.lr_at(step, 100, 1.0, 10, 0.1)
    assert [lr(s) for s in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert [lr(s) for s in (10, 55, 100)] == pytest.approx([1, 0.55, 0.1])
    assert lr(1000) == pytest.approx(0.1)                    # never below the floor
    rates = [lr(s) for s in range(10, 101)]
    assert rates == sorted(rates, reverse=True)
    assert ne.lr_at(0, 1, 1.0, 0, 0.1) == 1 and ne.lr_at(3, 3, 1.0, 3, 0.5) <= 1
    assert ne.lr_at(0, 10, 1.0, 0, 0.0) == 1                 # no warm-up


# ---- 7 data
@settings(max_examples=60)
@given(n=st.integers(20, 400), T=st.integers(1, 10), P=st.integers(1, 4), seed=st.integers(0, 5))
def test_batches_take_every_window_once_an_epoch(n, T, P, seed):
    batches = ne.Batches(np.arange(n, dtype=np.int32), T, P, seed)
    for epoch in range(3):
        starts = sorted(batches.shuffled(epoch * batches.n + i) * T + batches.phase
                        for i in range(batches.n))
        assert np.all(np.diff(starts) == T) and 0 <= starts[0] < T and starts[-1] + T < n
    tokens, targets = batches.take(5, 7)
    assert tokens.shape == (7, T) and targets.shape == (P, 7, T)
    for b in range(7):
        s = batches.shuffled(5 + b) * T + batches.phase
        assert np.array_equal(tokens[b], np.arange(s, s + T))
        for k in range(P):
            want = np.arange(s + 1 + k, s + 1 + k + T)
            assert np.array_equal(targets[k, b], np.where(want < n, want, -1))


def test_the_cursor_is_one_number():
    """Any window, in any order, from a new object: the same as in sequence."""
    tokens = np.random.default_rng(1).integers(0, 99, 500).astype(np.int32)
    sequence = ne.Batches(tokens, 8, 2, 3)
    rows = [sequence.take(i, 1)[0] for i in range(200)]
    for i in (199, 0, 61, 60, 120, 3):
        assert np.array_equal(ne.Batches(tokens, 8, 2, 3).take(i, 1)[0], rows[i])
    other = ne.Batches(tokens, 8, 2, 4)
    for first in (0, sequence.n):            # no epoch of one seed is one of the next seed
        assert any(not np.array_equal(other.take(i, 1)[0], rows[first + i]) for i in range(5))


def test_loss_weights_by_hand():
    targets = np.array([[1, 2, 3, 4], [1, 2, -1, -1], [5, -1, -1, -1], [-1] * 4])
    assert ne.loss_weights(targets, 0.3) == pytest.approx([1 / 4, 0.1 / 2, 0.1 / 1, 0.1])
    assert ne.loss_weights(targets[:1], 0.3) == pytest.approx([1 / 4])


@given(text=st.binary(min_size=1, max_size=200), holdout=st.floats(0.001, 0.9))
def test_split_text(text, holdout):
    train, val = ne.split_text(text, holdout)
    assert train + val == text


def test_split_text_does_not_cut_a_character():
    text = "\u00e9\u4e2d\U0001f600" * 50
    for holdout in np.linspace(0.01, 0.9, 50):
        train, val = ne.split_text(text.encode(), holdout)
        assert train.decode() + val.decode() == text


# ---- tokens of a large text, kept in a file
@pytest.fixture
def large(tmp_path, monkeypatch):
    """A text beyond LARGE, which is made smaller, and what `tokenize` needs."""
    monkeypatch.setattr(texts, "LARGE", 10_000)
    path = tmp_path / "large.txt"
    path.write_bytes(TEXT.read_bytes()[:30_000])
    text = ne.read_text(str(path))
    return str(path), ne.split_text(memoryview(text), 0.1), bpe.train(text[:5000], 300), "ab" * 32


def stored(path):
    files = [f for f in os.listdir(os.path.dirname(path)) if f.endswith(".tokens")]
    return [os.path.join(os.path.dirname(path), f) for f in files]


def test_the_token_file_holds_the_tokens(large):
    path, parts, tokenizer, _ = large
    want = [tokenizer.encode(bytes(x)) for x in parts]
    for _ in range(2):                       # written, then read
        for got, x in zip(ne.tokenize(*large), want):
            assert np.array_equal(got, x) and got.dtype == np.uint16
    [file] = stored(path)
    assert os.path.getsize(file) < 2 * sum(map(len, want)) + 1000
    batches = [ne.Batches(x, 16, 2, 1).take(3, 4) for x in (ne.tokenize(*large)[0], want[0])]
    for got, x in zip(*batches):
        assert np.array_equal(got, x) and got.dtype == np.int32


def test_another_split_tokenizer_or_text_has_another_file(large):
    path, parts, tokenizer, digest = large
    text = b"".join(map(bytes, parts))
    for other in (large, (path, ne.split_text(text, 0.2), tokenizer, digest),
                  (path, parts, bpe.train(text, 290), digest), (path, parts, tokenizer, "cd" * 32),
                  (*large, 0.1, 1), (*large, 0.1, 2), (*large, 0.2, 1)):
        ne.tokenize(*other)
    assert len(stored(path)) == 7
    ne.tokenize(*large, 0.0, 2)              # without cuts no seed matters
    assert len(stored(path)) == 7


def test_cuts_are_of_the_training_part_alone(large):
    path, parts, tokenizer, _ = large
    (train, val), (cut, same), (again, _) = (ne.tokenize(*large, cuts, 1) for cuts in (0, 0.1, 0.1))
    assert np.array_equal(val, same) and np.array_equal(cut, again)
    assert len(cut) > len(train) and tokenizer.decode(cut) == bytes(parts[0])


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "renamed", "text", "directory"])
def test_a_damaged_token_file_is_made_again(damage, large, capsys):
    path, parts, tokenizer, digest = large
    want = [x.copy() for x in ne.tokenize(*large)]
    [file] = stored(path)
    raw = open(file, "rb").read()
    if damage == "renamed":                  # whole, but of another text
        ne.tokenize(path, parts, tokenizer, "cd" * 32)
        [other] = set(stored(path)) - {file}
        os.replace(other, file)
    elif damage == "directory":
        os.remove(file)
        os.mkdir(file)
    else:
        raw = {"cut": raw[:-2], "flipped": raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:],
               "empty": b"", "text": b"To be, or not to be, that is"}[damage]
        open(file, "wb").write(raw)
    capsys.readouterr()
    for got, x in zip(ne.tokenize(*large), want):
        assert np.array_equal(got, x)
    said = capsys.readouterr()
    assert "once" in said.out and ("note: cannot write" in said.err) == (damage == "directory")
    ne.tokenize(*large)
    assert ("once" in capsys.readouterr().out) == (damage == "directory")


def test_an_excerpt_is_whole_lines_from_everywhere(monkeypatch):
    text = b"".join(b"line %06d\n" % i for i in range(20_000))
    assert ne.excerpt(text) == text
    monkeypatch.setattr(texts, "LARGE", 40_000)
    part = ne.excerpt(memoryview(text), pieces=100)
    lines = part.splitlines()
    assert 30_000 < len(part) <= 40_000 and all(len(x) == 11 for x in lines)
    numbers = np.array([int(x[5:]) for x in lines])
    assert np.all(np.diff(numbers) > 0) and np.bincount(numbers // 2000).min() > 250
    assert len(ne.excerpt(b"x" * 100_000, pieces=100)) == 40_000           # no line ends at all


@pytest.mark.parametrize("at", [0, 9_999, 10_000, 25_000])
def test_invalid_utf8_is_found_in_any_piece(at, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(texts, "LARGE", 10_000)
    text = ("\u00e9" * 15_000).encode()      # two bytes each: pieces begin inside of characters
    text = b"x" + text[:at - at % 2] + b"\xff" + text[at - at % 2:]
    (tmp_path / "a.txt").write_bytes(text)
    assert ne.read_text(str(tmp_path / "a.txt"))[:] == text
    assert f"not UTF-8 at byte {1 + at - at % 2};" in capsys.readouterr().err
    (tmp_path / "a.txt").write_bytes(text.replace(b"\xff", b""))
    ne.read_text(str(tmp_path / "a.txt"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("size", [9_999, 10_000, 20_000])
def test_half_a_character_at_the_end_is_invalid(size, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(texts, "LARGE", 10_000)
    (tmp_path / "a.txt").write_bytes(b"x" * (size - 1) + b"\xc3")
    ne.read_text(str(tmp_path / "a.txt"))
    assert f"not UTF-8 at byte {size - 1};" in capsys.readouterr().err


@pytest.mark.parametrize("V, dtype", [(1 << 16, np.uint16), ((1 << 16) + 1, np.int32)])
def test_a_token_file_has_room_for_the_last_id(V, dtype, large):
    path, parts, _, digest = large
    tokenizer = SimpleNamespace(vocab_size=V, hash=lambda: "x", encode=lambda text: np.full(
        len(text), V - 1, np.int32))
    for _ in range(2):                       # written, then read
        for ids in ne.tokenize(path, parts, tokenizer, digest):
            assert ids.dtype == dtype and len(ids) and (ids == V - 1).all()


# ---- 9 evaluation
def disjoint(tokens, T):
    """tokens, targets (n, T) of the windows that a run is validated on."""
    x, (y,) = ne.windows(tokens, range(0, len(tokens) - 1, T), T, 1)
    return x, y


@pytest.mark.parametrize("count", [2, 8, 9, 10, 17, 150])
def test_bits_per_byte_by_hand(count):
    """Every token after the first once, in windows of seq_len that do not overlap."""
    model, T = ne.Model(TINY, random_flat(TINY, 5)), TINY.seq_len
    tokens = np.random.default_rng(6).integers(0, TINY.vocab_size, count).astype(np.int32)
    nats = 0.0
    for s in range(0, count - 1, T):
        _, logits = naive.forward(TINY, model.p, tokens[s:min(s + T, count - 1)])
        nats += naive.cross_entropy(logits[0], tokens[s + 1:s + 1 + T])[0]
    bits = ne.evaluate(model, *disjoint(tokens, T), 321)
    assert math.isclose(bits, nats / math.log(2) / 321, rel_tol=1e-12)


def test_evaluation_on_some_windows_is_an_estimate_of_all():
    model = ne.Model(TINY, random_flat(TINY, 5))
    tokens = np.random.default_rng(6).integers(0, TINY.vocab_size, 1601).astype(np.int32)
    rows = disjoint(tokens, TINY.seq_len)
    whole = ne.evaluate(model, *rows, 3000)
    assert ne.evaluate(model, *rows, 3000, 200) == pytest.approx(whole, rel=1e-12)
    assert ne.evaluate(model, *rows, 3000, 100) == pytest.approx(whole, rel=0.2)


# ---- the loop
def test_what_a_run_prints_and_logs(trained, text):
    out = (trained / "stdout.txt").read_text("utf-8")
    assert re.search(r"step +20/20  loss \d+\.\d+  \d+\.\d+ bits/byte .* tok/s  ETA 0:00", out), out
    assert "python nanoeuler.py chat nanoeuler.bin" in out and str(text) in out
    log = ne.read_log(str(trained / "nanoeuler.jsonl"))
    steps = [r for r in log if "loss" in r]
    assert [r["step"] for r in steps] == list(range(1, 21))
    assert np.mean([r["loss"] for r in steps[-3:]]) < steps[0]["loss"] - 0.3          # it learns
    for r in steps:
        assert len(r["heads"]) == 4 and r["heads"][0] == r["loss"]
        assert r["norm"] > 0 and r["tokens_per_s"] > 0
    val = [(r["step"], r["val_bits_per_byte"]) for r in log if "val_bits_per_byte" in r]
    assert [s for s, _ in val] == [10, 20]
    c = ne.read_checkpoint(str(trained / "nanoeuler.bin"))
    assert c.state.step == 20 and c.state.tokens_seen == 20 * 4 * 16
    assert c.state.bits_per_byte == val[-1][1]
    assert not (trained / "nanoeuler.bin.tmp").exists()
    tokens_per_byte = steps[0]["bits_per_byte"] / steps[0]["loss"] * math.log(2)
    train = ne.split_text(text.read_bytes(), 0.1)[0]
    assert tokens_per_byte == pytest.approx(len(c.tokenizer.encode(train)) / len(train))


def test_validation_of_the_log_is_bits_per_byte_of_the_tail(trained, text):
    c = ne.read_checkpoint(str(trained / "nanoeuler.bin"))
    train, val = ne.split_text(text.read_bytes(), 0.1)
    tokens = np.append(c.tokenizer.encode(train)[-1:], c.tokenizer.encode(val))
    model = ne.Model(c.cfg, c.flat)
    bits = ne.evaluate(model, *disjoint(tokens, c.cfg.seq_len), len(val))
    assert bits == pytest.approx(c.state.bits_per_byte, rel=1e-6)


def test_what_a_run_makes_of_its_settings(text, elsewhere):
    """The rate is that of width 128, the batch whole sequences, cuts are of what is learned."""
    cfg = replace(TINY, n_embd=256, seq_len=16, vocab_size=280)
    make = lambda **chosen: ne.Run("x.bin", ne.Checkpoint(cfg, None, ne.State(), None, ()),
                                   ne.Options(data=str(text), **chosen).check())
    plain, cut = make(batch=75, lr=0.004), make(batch=7, cuts=0.3)
    assert plain.lr == pytest.approx(0.002) and (plain.B, cut.B) == (5, 1)
    train, _ = ne.split_text(text.read_bytes(), 0.1)
    tokens = plain.tokenizer.encode(train)
    assert plain.tokenizer.hash() == bpe.train(train, 280).hash() == cut.tokenizer.hash()
    assert np.array_equal(plain.batches.tokens, tokens)
    assert len(cut.batches.tokens) > len(tokens)
    assert cut.tokenizer.decode(cut.batches.tokens) == train
    for x, y in zip(plain.val, cut.val):
        assert np.array_equal(x, y)
    other = make(batch=75, seed=2, mtp_weight=0.0)
    assert not np.array_equal(plain.model.flat, other.model.flat)
    assert not np.array_equal(plain.next[0], other.next[0])
    assert [run.weights(*run.next, 5)[0, 1] > 0 for run in (plain, other)] == [True, False]
    again, other = make(cuts=0.3), make(cuts=0.3, seed=2)
    assert np.array_equal(again.batches.tokens, cut.batches.tokens)
    assert not np.array_equal(other.batches.tokens, cut.batches.tokens)


def test_a_preset_and_what_is_changed_of_it(elsewhere):
    class Run(ne.Run):
        shapes = []

        def __init__(self, out, start, options, engine):
            self.shapes.append(start.cfg)

        def go(self):
            """The model is not needed."""

    for more in (dict(preset="big", seq_len=16), dict(vocab_size=300)):
        ne.launch(Run, out="x.bin", resume=False, force=False, **more)
    assert Run.shapes == [replace(ne.PRESETS["big"], seq_len=16),
                          replace(ne.PRESETS["small"], vocab_size=300)]


def test_micro_batches_train_the_same_weights(trained, text, tmp_path):
    result = nanoeuler("train", "--data", text, "--steps", 20, "--eval-every", 10, *FAST,
                       "--micro-batch", 3, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert outcome(tmp_path)[3] == outcome(trained)[3]
    assert ne.read_checkpoint(str(tmp_path / "nanoeuler.bin")).state.micro_batch == 3


def test_a_run_needs_no_more_of_an_engine(text, elsewhere):
    """An engine with these members and no others trains to the same bytes."""
    class Other:
        program, talk = "other.py", "chat"

        def __init__(self, cfg, flat, moments, options):
            model, self.cfg = ne.Model(cfg, flat, moments), cfg
            for name in ("gradient", "update", "losses", "buffers", "first_bad_tensor", "decoder",
                         "device"):
                setattr(self, name, getattr(model, name))

        def micro_batch(self, B, asked=0):
            return 3

    set_num_threads(1)
    for name, engine in (("one", ne.Model), ("other", Other)):
        ne.launch(ne.Run, engine, "small", out=f"{name}.bin", resume=False, force=False, steps=6,
                  data=str(text), seq_len=16, vocab_size=280, batch=64, eval_every=2)
    one, other = (ne.read_checkpoint(f"{name}.bin") for name in ("one", "other"))
    for x, y in zip((one.flat, *one.moments), (other.flat, *other.moments)):
        assert np.array_equal(x, y)
    assert one.state.bits_per_byte == other.state.bits_per_byte


def test_a_resumed_run_keeps_its_micro_batch(text, elsewhere):
    """On a GPU the order of sums depends on it, and the memory that is free on the day."""
    class Other(ne.Model):
        free, asked = 3, []

        def micro_batch(self, B, asked=0):
            self.asked.append(asked)
            return asked or self.free

    go = lambda **more: ne.launch(ne.Run, Other, "small", out="x.bin", force=False, data=str(text),
                                  seq_len=16, vocab_size=280, batch=64, **more)
    go(resume=False, steps=2)
    assert ne.read_checkpoint("x.bin").state.micro_batch == 3 and Other.asked == [0, 3]
    Other.free, Other.asked[:] = 1, []
    go(resume=True, steps=4)
    assert Other.asked == [3, 3]
    go(resume=True, steps=6, micro_batch=2)  # less memory today
    assert Other.asked == [3, 3, 2, 2] and ne.read_checkpoint("x.bin").state.micro_batch == 2


def test_minutes_end_a_run(text, tmp_path):
    began = time.monotonic()
    result = nanoeuler("train", "--data", text, "--minutes", 0.03, *FAST, cwd=tmp_path)
    assert result.returncode == 0 and "complete" in result.stdout, result.stderr
    state = ne.read_checkpoint(str(tmp_path / "nanoeuler.bin")).state
    assert state.step == state.n_steps > 0 and time.monotonic() - began < 60


def test_a_finished_run_can_be_made_longer(copy):
    result = nanoeuler("train", "--resume", "--steps", 25, "--threads", 1, cwd=copy)
    assert result.returncode == 0, result.stderr
    assert ne.read_checkpoint(str(copy / "nanoeuler.bin")).state.step == 25


def test_a_second_ctrl_c_kills_and_later_ones_are_not_ours(copy, monkeypatch):
    """The first is remembered until the step is done; what heard them before, hears them again."""
    monkeypatch.chdir(copy)
    advance, during = ne.Run.advance, []

    def interrupted(self):
        signal.raise_signal(signal.SIGINT)
        during.append(signal.getsignal(signal.SIGINT))
        return advance(self)

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(ne.Run, "advance", interrupted)
    assert ne.main(["train", "--resume", "--steps", "25", "--threads", "1"]) in (0, None)
    assert during == [signal.SIG_DFL]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert ne.read_checkpoint("nanoeuler.bin").state.step == 21


def test_the_time_of_all_sittings_is_added_up(copy, monkeypatch):
    monkeypatch.chdir(copy)
    c = ne.read_checkpoint("nanoeuler.bin")
    c.state.elapsed = 5000.0
    ne.write_checkpoint("nanoeuler.bin", c.cfg, c.tokenizer, c.state, c.flat, c.moments)
    assert ne.main(["train", "--resume", "--steps", "21", "--threads", "1"]) in (0, None)
    assert ne.read_checkpoint("nanoeuler.bin").state.elapsed > 5000


def test_ctrl_c_at_once_leaves_something_to_resume(text, tmp_path):
    process = subprocess.Popen(command("train", "--data", text, "--steps", 100_000, *FAST),
                               cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for_step(tmp_path / "nanoeuler.jsonl", 1, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and b"Traceback" not in err
    step = ne.read_checkpoint(str(tmp_path / "nanoeuler.bin")).state.step
    assert f"stopped at step {step} of 100000" in out.decode()
    assert "python nanoeuler.py train --resume --out nanoeuler.bin" in out.decode()


def test_a_cold_start_computes_the_same(text, tmp_path):
    """The run that compiles the kernels, says so, and gets the bits that the next run gets.

    The float64 kernels of check.py are compiled before: they are others."""
    for name in ("nanoeuler.py", "bpe.py", "check.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    env = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_CACHE")}
    check = [sys.executable, str(tmp_path / "check.py"), "--quick"]
    assert subprocess.run(check, env=env, capture_output=True, timeout=400).returncode == 0
    results, said = [], []
    for name in ("cold", "warm"):
        (tmp_path / name).mkdir()
        args = command("train", "--data", text, "--steps", 5, *FAST)
        args[1] = str(tmp_path / "nanoeuler.py")
        result = subprocess.run(args, cwd=tmp_path / name, env=env, capture_output=True,
                                encoding="utf-8", timeout=400)
        assert result.returncode == 0, result.stderr
        results.append(outcome(tmp_path / name))
        said.append("compil" in result.stdout)
    assert said == [True, False]
    assert results[0] == results[1]


# ---- what can go wrong: in this process, as `main` is the whole program
def refused(capsys, *args, words=()):
    """main returns 2 after one line on stderr."""
    capsys.readouterr()
    code = ne.main([*map(str, args), "--threads", "1"])
    lines = [s for s in capsys.readouterr().err.splitlines() if not s.startswith("note:")]
    assert code == 2 and len(lines) == 1, (code, lines)
    for word in words:
        assert str(word) in lines[0], lines[0]
    return lines[0]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name, data, words", [
    ("empty.txt", b"", ["empty", "--data"]),
    ("blank.txt", b" \n\n \t", ["empty", "--data"]),
    ("zero.txt", b"text and\0binary", ["not text", "8", "--data"]),
    ("first.txt", b"\0 and text", ["not text", "byte 0 is", "--data"]),
    ("short.txt", b"too short", []),
    ("one.txt", b"x", []),
    ("short2.txt", b"To be, or not to be, that is the question. " * 4, ["--seq-len"]),
])
def test_bad_texts(name, data, words, elsewhere, capsys):
    (elsewhere / name).write_bytes(data)
    line = refused(capsys, "train", "--data", name, "--steps", 2, words=words)
    assert name in line or "tokens" in line
    assert os.listdir() == [name]                        # nothing was written


def test_a_text_shorter_than_the_context_names_one_that_fits(elsewhere, capsys):
    (elsewhere / "a.txt").write_bytes(b"To be, or not to be, that is the question. " * 4)
    line = refused(capsys, "train", "--data", "a.txt", "--steps", 2)
    n = re.search(r"--seq-len (\d+)", line)[1]
    args = ["train", "--data", "a.txt", "--steps", "2", "--seq-len", n, "--threads", "1"]
    assert ne.main(args) in (0, None)


def test_missing_text_and_directory(elsewhere, capsys):
    refused(capsys, "train", "--data", "none.txt", words=["none.txt", "--data"])
    refused(capsys, "train", "--data", ".", words=["--data"])
    assert os.listdir() == []


def test_no_default_text_here(elsewhere, capsys):
    refused(capsys, "train", "--steps", 1, words=["data/shakespeare.txt", "--data"])


def test_invalid_utf8_is_named_and_learned(elsewhere, capfd):
    data = TEXT.read_bytes()[:5000] + b"\xff\xfe\xc3" + TEXT.read_bytes()[5000:20_000]
    (elsewhere / "a.txt").write_bytes(data)
    assert ne.main(["train", "--data", "a.txt", "--steps", "2", *FAST]) in (0, None)
    note = [s for s in capfd.readouterr().err.splitlines() if s]
    assert len(note) == 1 and "a.txt" in note[0] and "5000" in note[0] and "UTF-8" in note[0]
    c = ne.read_checkpoint("nanoeuler.bin")
    assert c.tokenizer.decode(c.tokenizer.encode(data)) == data


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
    with pytest.raises(SystemExit) as e:
        ne.main(["train", *flags])
    assert e.value.code == 2 and "Traceback" not in capsys.readouterr().err


def test_an_existing_checkpoint_is_never_replaced_unasked(copy, text, monkeypatch, capsys):
    monkeypatch.chdir(copy)
    before = (copy / "nanoeuler.bin").read_bytes()
    line = refused(capsys, "train", "--data", text,
                   words=["nanoeuler.bin", "--resume", "--out", "--force"])
    assert line and (copy / "nanoeuler.bin").read_bytes() == before
    assert ne.main(["train", "--data", str(text), "--steps", "2", "--force", *FAST]) in (0, None)
    assert ne.read_checkpoint("nanoeuler.bin").state.step == 2


@pytest.mark.parametrize("flags, words", [
    (["--lr", "0.5"], ["lr", "0.5"]), (["--batch", "128"], ["batch", "128", "64"]),
    (["--seq-len", "32"], ["seq_len", "32", "16"]), (["--n-mtp", "1"], ["n_mtp"]),
    (["--vocab-size", "300"], ["vocab_size"]), (["--seed", "7"], ["seed", "7"])])
def test_changed_flags_on_resume(flags, words, copy, monkeypatch, capsys):
    monkeypatch.chdir(copy)
    before = (copy / "nanoeuler.bin").read_bytes()
    refused(capsys, "train", "--resume", "--steps", 30, *flags, words=[*words, "--out"])
    assert (copy / "nanoeuler.bin").read_bytes() == before


def test_a_text_may_move_but_not_change(text, copy, monkeypatch, capsys):
    monkeypatch.chdir(copy)
    (copy / "moved.txt").write_bytes(text.read_bytes())
    (copy / "other.txt").write_bytes(text.read_bytes()[1:])
    again = ["train", "--resume", "--threads", "1", "--steps"]
    assert ne.main([*again, "21", "--data", "moved.txt"]) in (0, None)
    refused(capsys, *again[:2], "--steps", 22, "--data", "other.txt", words=["other.txt", "sha256"])
    assert ne.main([*again, "22"]) in (0, None)          # where it was last


@pytest.mark.parametrize("data, out", [("a.jsonl", "a.bin"), ("a.b.jsonl", "a.b")])
def test_a_log_replaces_neither_text_nor_checkpoint(data, out, text, elsewhere, capsys):
    (elsewhere / data).write_bytes(text.read_bytes())
    refused(capsys, "train", "--data", data, "--out", out, *FAST[:-1], 1, words=[".jsonl", "--out"])
    assert [p.name for p in elsewhere.iterdir()] == [data]
    assert (elsewhere / data).read_bytes() == text.read_bytes()


def test_more_minutes_go_on_where_the_schedule_is(text, elsewhere, capsys):
    run = ["--out", "m.bin", *FAST[:-4], "--threads", "1", "--warmup", "2"]
    assert ne.main(["train", "--data", str(text), "--minutes", "0.03", *run]) in (0, None)
    before, _ = ne.read_checkpoint("m.bin").state, capsys.readouterr()
    assert ne.main(["train", "--resume", "--out", "m.bin", "--minutes", "0.01"]) in (0, None)
    assert f"is complete: {before.step:,} of {before.step:,} steps" in capsys.readouterr().out
    minutes = 2 * before.elapsed / 60
    assert ne.main(["train", "--resume", "--out", "m.bin", "--minutes", f"{minutes}"]) in (0, None)
    rates = [r["lr"] for r in ne.read_log("m.jsonl") if "lr" in r][before.step:]
    assert len(rates) > 5 and max(rates) < 0.8 * 6e-3    # half of the cosine, not its top


def test_the_same_length_again_is_no_other_length(text, elsewhere, capsys):
    """`make train ARGS="--minutes 10"` twice, and the first ended some seconds early."""
    start = ["train", "--data", str(text), "--minutes", "0.03", *FAST]
    assert ne.main(start) in (0, None)
    c = ne.read_checkpoint("nanoeuler.bin")
    early = ne.replace(c.state, elapsed=c.state.elapsed / 2)
    ne.write_checkpoint("nanoeuler.bin", c.cfg, c.tokenizer, early, c.flat, c.moments)
    for again in (start, [*start[:3], "--steps", "0"]):
        capsys.readouterr()
        assert ne.main([*again, "--resume"]) in (0, None)
        assert capsys.readouterr().out.startswith("nanoeuler.bin is complete")


def test_a_run_that_stops_before_it_has_a_plan(text, elsewhere, capsys, monkeypatch):
    """--minutes is made steps after the fifth; the checkpoint of an earlier stop knows of none."""
    advance = ne.Run.advance
    monkeypatch.setattr(ne.Run, "advance", lambda self: (
        advance(self), self.state.step == 2 and signal.raise_signal(signal.SIGINT))[0])
    start = ["train", "--data", str(text), "--minutes", "0.03", *FAST]
    assert ne.main([*start, "--save-every", "1"]) in (0, None)
    state = ne.read_checkpoint("nanoeuler.bin").state
    assert (state.step, state.n_steps) == (2, 0) and "step 2 of ?" in capsys.readouterr().out
    assert ne.main(["train", "--resume"]) in (0, None)
    state = ne.read_checkpoint("nanoeuler.bin").state
    assert 2 < state.step == state.n_steps < 10_000


def test_a_run_whose_output_nobody_reads_is_saved(text, tmp_path):
    process = subprocess.Popen(command("train", "--data", text, "--steps", 100000, *FAST),
                               cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not process.stdout.readline().startswith(b"step"):
        assert process.poll() is None
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.wait(timeout=60)
    assert 5 <= ne.read_checkpoint(str(tmp_path / "nanoeuler.bin")).state.step < 250


def test_a_terminal_that_knows_ascii_only(text, tmp_path):
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = nanoeuler("train", "--data", text, "--steps", 4, "--eval-every", 2, *FAST, env=env,
                       cwd=tmp_path)
    assert result.returncode == 0 and "?" in result.stdout, result.stderr


def test_a_damaged_line_of_the_log_stops_no_run(copy):
    log = copy / "nanoeuler.jsonl"
    lines = log.read_text("utf-8").splitlines()
    lines[3:5] = ['{"step": null}', lines[3][:9]]
    log.write_text("\n".join(lines) + "\n", "utf-8")
    result = nanoeuler("train", "--resume", "--steps", 22, "--threads", 1, cwd=copy)
    assert result.returncode == 0, result.stderr
    assert [r["step"] for r in ne.read_log(str(log))][-1] == 22


def test_same_flags_on_resume_are_fine(copy, monkeypatch, capsys):
    monkeypatch.chdir(copy)
    args = ["train", "small", "--resume", "--steps", "21", "--batch", "64", "--threads", "1"]
    assert ne.main(args) in (0, None)


def test_changed_text_on_resume(trained, text, tmp_path, monkeypatch, capsys):
    other, c = tmp_path / "mine.txt", ne.read_checkpoint(str(trained / "nanoeuler.bin"))
    other.write_bytes(text.read_bytes() + b"one line more\n")
    c.state.options["data"] = str(other)
    ne.write_checkpoint(str(tmp_path / "a.bin"), c.cfg, c.tokenizer, c.state, c.flat, c.moments)
    monkeypatch.chdir(tmp_path)
    refused(capsys, "train", "--resume", "--steps", 30, "--out", "a.bin",
            words=[other, "sha256", "--out"])
    other.unlink()
    refused(capsys, "train", "--resume", "--steps", 30, "--out", "a.bin", words=[other, "--data"])


def test_resume_without_a_checkpoint(elsewhere, capsys):
    refused(capsys, "train", "--resume", words=["nanoeuler.bin", "No such file"])


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


def test_a_directory_as_out(text, elsewhere, capsys):
    (elsewhere / "a.bin").mkdir()
    refused(capsys, "train", "--data", text, "--out", "a.bin", words=["a.bin"])
    refused(capsys, "train", "--data", text, "--steps", 2, "--out", "a.bin", "--force",
            words=["a.bin"])


def test_an_unwritable_directory(copy):
    if os.getuid() == 0:
        pytest.skip("root may write everywhere")
    copy.chmod(0o500)
    try:
        complains(nanoeuler("train", "--resume", "--steps", 40, cwd=copy), "nanoeuler", "--out")
    finally:
        copy.chmod(0o700)


def test_file_size_limit_keeps_the_old_checkpoint(copy):
    """The file system gives out in the middle of a checkpoint."""
    resource = pytest.importorskip("resource", reason="limits of POSIX")
    before = (copy / "nanoeuler.bin").read_bytes()
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2,) * 2)
    result = nanoeuler("train", "--resume", "--steps", 40, "--threads", 1, cwd=copy,
                       preexec_fn=limit)
    complains(result, "nanoeuler.bin", "untouched", "--out")
    assert (copy / "nanoeuler.bin").read_bytes() == before
    assert not (copy / "nanoeuler.bin.tmp").exists()
    again = nanoeuler("train", "--resume", "--steps", 22, "--threads", 1, cwd=copy)
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize("spare", [0, 3 << 20])
def test_full_disk(spare, copy, tmp_path):
    """A real one: no room for the log, or room for a quarter of a checkpoint."""
    disk, size = tmp_path / "disk", (copy / "nanoeuler.bin").stat().st_size
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size + (5 << 20)}", "tmpfs", str(disk)]
    if os.name != "posix" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here; RLIMIT_FSIZE stands in for it")
    try:
        shutil.copy(copy / "nanoeuler.bin", disk)
        shutil.copy(copy / "nanoeuler.jsonl", disk)
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - spare
        with open(disk / "filler", "wb") as f:
            f.write(bytes(free))
        before = (disk / "nanoeuler.bin").read_bytes()
        complains(nanoeuler("train", "--resume", "--steps", 40, "--threads", 1, cwd=disk),
                  "nanoeuler")
        assert (disk / "nanoeuler.bin").read_bytes() == before
        (disk / "filler").unlink()
        assert ne.read_checkpoint(str(disk / "nanoeuler.bin")).state.step == 20
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# ---- not a number
@pytest.mark.parametrize("name", ne.Params._fields)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_parameter_is_found_and_named(name, bad):
    model = ne.Model(TINY, random_flat(TINY, 8, np.float32))
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


@pytest.mark.parametrize("name", ["qkv", "down", "final_norm"])
def test_an_injected_nan_stops_training(name, trained, tmp_path):
    """The step and the tensor are named, the last good checkpoint stays as it is."""
    c = ne.read_checkpoint(str(trained / "nanoeuler.bin"))
    x = getattr(ne.views(c.flat, ne.param_table(c.cfg)), name)
    x.ravel()[17] = np.nan
    ne.write_checkpoint(str(tmp_path / "nanoeuler.bin"), c.cfg, c.tokenizer, c.state, c.flat,
                        c.moments)
    before = (tmp_path / "nanoeuler.bin").read_bytes()
    result = nanoeuler("train", "--resume", "--steps", 30, "--threads", 1, cwd=tmp_path)
    complains(result, "step 21", name, "nan", "nanoeuler.bin", "--lr")
    assert (tmp_path / "nanoeuler.bin").read_bytes() == before


def test_a_bad_moment_is_not_saved(trained, tmp_path):
    """A NaN that arises in the update itself: nothing written afterwards may hold it."""
    c = ne.read_checkpoint(str(trained / "nanoeuler.bin"))
    c.moments[0][99] = np.nan
    ne.write_checkpoint(str(tmp_path / "nanoeuler.bin"), c.cfg, c.tokenizer, c.state, c.flat,
                        c.moments)
    before = (tmp_path / "nanoeuler.bin").read_bytes()
    result = nanoeuler("train", "--resume", "--steps", 30, "--threads", 1, cwd=tmp_path)
    complains(result, "step 2", "nan")
    assert (tmp_path / "nanoeuler.bin").read_bytes() == before


def test_a_log_line_left_unfinished_is_skipped(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n{"step": 3, "lo', "utf-8")
    assert [r["step"] for r in ne.read_log(path)] == [1, 2]
    path.write_text("", "utf-8")             # killed before the first step
    assert ne.read_log(path) == []


@pytest.mark.parametrize("content", [
    b"nonsense\n", b"[1]\n", b'{"loss": 1}\n', b"[" * 5000 + b"\n", b"\xff\xfe\x00\n"])
def test_what_is_no_log_is_named(content, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ne.UserError, match="a.jsonl: .*; name a log"):
        ne.read_log(tmp_path / "a.jsonl")


def test_files_may_stand_behind_flags(copy):
    (copy / "nanoeuler.bin").rename(copy / "mine.bin")
    flags = ("--tokens", 3, "--threads", 1)
    said = [nanoeuler("generate", *args, cwd=copy) for args in (
        ("To", *flags, "mine.bin"), (*flags, "To", "mine.bin"), ("To", "mine.bin", *flags))]
    assert [x.returncode for x in said] == [0, 0, 0] and len({x.stdout for x in said}) == 1
    complains(nanoeuler("generate", "To", *flags, cwd=copy), "nanoeuler.bin")
    (copy / "text.txt").write_bytes(b"a b a b")
    for args in (("train", "--vocab-size", 258, "text.txt"), ("encode", "--tokenizer",
                                                              "tokenizer.json", "text.txt")):
        result = nanoeuler(*args, cwd=copy, program="bpe.py")
        assert result.returncode == 0 and result.stdout, result.stderr


def test_a_prompt_may_look_like_a_flag(copy):
    flags = ("--tokens", 0, "--threads", 1)
    result = nanoeuler("generate", *flags, "--", "--help", "nanoeuler.bin", cwd=copy)
    assert result.returncode == 0 and result.stdout == "--help\n", result.stderr


@pytest.mark.parametrize("error, code, line", [
    (KeyboardInterrupt(), 130, ""), (MemoryError("9 GiB"), 2, "out of memory (9 GiB); use a small"),
    (OSError(5, "Input/output error", "a.bin"), 2, "a.bin: Input/output error; see --out")])
def test_how_a_verb_ends(error, code, line, monkeypatch, capsys):
    def fail(*args, **flags):
        raise error

    monkeypatch.setattr(ne, "speak", fail)
    assert ne.main(["chat", "--threads", "1"]) == code
    said = capsys.readouterr().err
    assert line in said and len(said.splitlines()) == bool(line)


def test_threads_are_as_many_as_asked_for(capsys, monkeypatch):
    most, counts = get_num_threads(), []
    monkeypatch.setattr(ne, "compile_kernels", lambda: counts.append(get_num_threads()))
    monkeypatch.setattr(commands, "physical_cores", lambda: most)
    for flags in (["--threads", "1"], []):
        set_num_threads(most)
        assert ne.main(["compile", *flags]) in (0, None)
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
    for verb, settings in (("train", ne.Options), ("sft", ne.SftOptions), ("dpo", ne.DpoOptions),
                           ("chat", ne.Sampling), ("generate", ne.Sampling)):
        parts = dict(re.findall(r" (--\S+) [A-Z_0-9]+ (.*?)(?= --\S+ [A-Z_0-9]+ |$)", text(verb)))
        for name, f in settings.__dataclass_fields__.items():
            assert f"(default: {f.default})" in parts["--" + name.replace("_", "-")], (verb, name)


def test_logs_of_two_outputs_are_two(text, elsewhere):
    for name in ("lr0.006", "lr0.003"):
        assert ne.main(["train", "--data", str(text), "--out", name, *map(str, FAST), "--steps",
                        "1", "--threads", "1"]) in (0, None)
    assert {p.name for p in elsewhere.iterdir()} >= {"lr0.006.jsonl", "lr0.003.jsonl"}


def test_a_link_to_a_checkpoint_stays_one(text, elsewhere):
    (elsewhere / "disk").mkdir()
    (elsewhere / "link.bin").symlink_to(elsewhere / "disk/real.bin")
    assert ne.main(["train", "--data", str(text), "--out", "link.bin", *map(str, FAST), "--steps",
                    "1", "--threads", "1"]) in (0, None)
    assert (elsewhere / "link.bin").is_symlink() and (elsewhere / "disk/real.bin").exists()


def test_what_no_flag_changes_or_replaces(trained, text, elsewhere, capsys):
    shutil.copy(trained / "nanoeuler.bin", elsewhere)
    (elsewhere / "folder").mkdir()
    refused(capsys, "train", "big", "--resume", words=["n_embd", "320", "--out"])
    refused(capsys, "train", "--data", text, "--out", "folder", "--force", words=["folder exists"])
