"""The comparison of optimizers on a GPU: its rows, its table, and the peer's Muon."""
import json
import pathlib
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import FAST, ROOT, TEXT, needs
from helpers import run as program

import nanoeuler as ne

sys.path.insert(0, str(ROOT / "bench"))
import gpu_minutes
from nanoeuler_parts.files.corpora import open_text
from nanoeuler_parts.runs.evaluation import evaluate

pytestmark = pytest.mark.unit
ONE = dict(steps=1, ms=1.0, seconds=1.0, bits_per_byte=1.0)      # what a worker returns


def test_rows_and_their_table():
    a = SimpleNamespace(rows=["ours-adamw", "peer-muon"], seeds=[1, 2], muon_lr=[0.004, 0.01],
                        lr=None, heads=1, vocab=0, flags="--mtp-weight 0", preset="base",
                        schedule=None, embedding=4.0)
    rows = gpu_minutes.rows_of(a)
    assert [r.get("flags") for r in rows] == 2 * ["--mtp-weight 0"] + 4 * [None]
    assert [r.get("embedding") for r in rows] == 2 * [None] + 4 * [4.0]
    assert [(r["kind"], r["muon_lr"], r["seed"]) for r in rows] == [
        ("ours-adamw", 0, 1), ("ours-adamw", 0, 2), ("peer-muon", 0.004, 1),
        ("peer-muon", 0.004, 2), ("peer-muon", 0.01, 1), ("peer-muon", 0.01, 2)]
    done = [{**r, "steps": 10, "ms": 50.0, "seconds": 0.5, "bits_per_byte": 1 + i / 10}
            for i, r in enumerate(rows)]
    said = gpu_minutes.markdown(dict(minutes=3, steps=0, preset="base", device="GPU", versions="",
                                     commit="", rows=done))
    assert ("| ours-adamw, AdamW 0.001, 1 output head, vocabulary of 4,096 --mtp-weight 0, seed 2 "
            "| 10 | 50.0 | 0.5 | 1.1000 |" in said)
    assert ("peer-muon, linear, Muon 0.01, AdamW 0.002, embedding x 4, 1 output head, vocabulary "
            "of 4,096: mean 1.4500, from 1.4000 to 1.5000." in said)
    a.rows, a.schedule = ["peer-adamw", "peer-muon"], "cosine"
    assert {(r["schedule"], r["embedding"]) for r in gpu_minutes.rows_of(a)} == {
        ("cosine", 1.0), ("cosine", 4.0)}


def test_rows_that_are_done_are_not_run_again(tmp_path, monkeypatch, capsys):
    asked, values = [], iter(range(1, 100))

    def run(command, **_):
        if command[0] == sys.executable:
            asked.append(json.loads(command[command.index("--worker") + 1]))
            if len(asked) == 2:              # the machine is taken away
                raise KeyboardInterrupt
        return SimpleNamespace(stdout=json.dumps(ONE | dict(bits_per_byte=next(values))))

    monkeypatch.setattr(gpu_minutes.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["gpu_minutes.py", "--data", "x", "--device", "cpu", "--seeds",
                                      "1", "--out", str(tmp_path / "out")])
    with pytest.raises(KeyboardInterrupt):
        gpu_minutes.main()
    gpu_minutes.main()
    assert [row["kind"] for row in asked] == ["ours-adamw", "ours-muon", "ours-muon", "peer-adamw",
                                              "peer-muon"]
    assert "peer-muon" in capsys.readouterr().out


def test_rows_that_run_at_once_have_a_gpu_each(tmp_path, monkeypatch):
    used, both = [], threading.Barrier(2, timeout=30)

    def run(command, env=None, **_):
        if command[0] == sys.executable:
            used.append(env["CUDA_VISIBLE_DEVICES"])
            both.wait()                      # in vain, unless two rows run at the same time
        return SimpleNamespace(stdout=json.dumps(ONE))

    monkeypatch.setattr(gpu_minutes.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["gpu_minutes.py", "--data", "x", "--device", "cpu", "--seeds",
                                      "1", "2", "--steps", "7", "--at-once", "2", "--out",
                                      str(tmp_path / "out")])
    gpu_minutes.main()
    assert sorted(used) == 4 * ["0"] + 4 * ["1"]
    assert "# 7 steps of the preset base" in (tmp_path / "out.md").read_text("utf-8")


def test_ours_takes_as_many_steps_as_fit_at_its_pace(monkeypatch):
    commands = []

    def run(command, **_):
        """A program whose first half of the steps is slow"""
        flags = dict(zip(command[3::2], command[4::2]))
        commands.append(flags)
        n = int(flags["--steps"])
        log = [dict(step=i + 1, ms=900.0 if i < n // 2 else 50.0) for i in range(n)]
        log.append(dict(step=n, val_bits_per_byte=1.25))
        path = pathlib.Path(flags["--out"]).with_suffix(".jsonl")
        path.write_text("\n".join(map(json.dumps, log)), "utf-8")

    monkeypatch.setattr(gpu_minutes.subprocess, "run", run)
    a = SimpleNamespace(preset="base", data="text", batch=64, minutes=0.5, steps=0)
    row = dict(kind="ours-muon", lr=1e-3, muon_lr=0.004, seed=3, heads=1, vocab=8192,
               flags="--momentum 0.95")
    found = gpu_minutes.ours(row, a)
    first, flags = commands
    assert (first["--steps"], flags["--steps"]) == (str(gpu_minutes.PACE), "600")
    assert found == dict(steps=600, bits_per_byte=1.25, ms=475.0, seconds=285.0)
    assert float(flags["--lr"]) * 128 / 768 == pytest.approx(1e-3)
    assert [flags[f"--{x}"] for x in (
        "muon-lr", "momentum", "n-mtp", "vocab-size", "seed", "batch")] == [
            "0.004", "0.95", "1", "8192", "3", "32768"]
    a.steps = 7
    assert gpu_minutes.ours(row, a)["steps"] == 7


def test_the_peer_trains_on_the_tokens_of_ours(tmp_path, monkeypatch):
    """Its batches, its held-out windows and their bytes are those of a run of `train`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_bytes(TEXT.read_bytes()[:60_000])
    program("train", "--data", "text.txt", *FAST, "--holdout", gpu_minutes.HOLDOUT, "--dtype",
            "f32", "--steps", 2)
    c = ne.read_checkpoint("nanoeuler.bin")
    batches, x, targets, n_bytes = gpu_minutes.text(SimpleNamespace(data="text.txt"), c.cfg, 1)
    text = open_text("text.txt", "text", "", gpu_minutes.HOLDOUT)
    text.encode(c.tokenizer, -1, 0.0, 1)
    assert np.array_equal(batches.tokens, text.train)
    model = ne.Model(c.cfg, c.flat)
    assert evaluate(model, x, targets, n_bytes) == pytest.approx(c.state.bits_per_byte, rel=1e-6)


def test_rates():
    for schedule in ("cosine", "linear"):
        rates = [gpu_minutes.rate_at(i / 100, schedule) for i in range(101)]
        assert rates[0] == 1 and rates[-1] == pytest.approx(0) and rates == sorted(rates)[::-1]
    assert rates[50] == 1 and rates[75] == pytest.approx(0.5)


def test_the_muon_of_the_peer_is_that_of_pytorch():
    """A tall, a wide and two equal matrices, up to the rounding of products in bfloat16"""
    torch = needs("torch")
    torch.manual_seed(1)
    shapes = (48, 16), (16, 40), (16, 16), (16, 16)
    ours, theirs = ([torch.nn.Parameter(x.clone()) for x in start] for start in [
        [torch.randn(shape) for shape in shapes]] * 2)
    one = gpu_minutes.BatchedMuon([(p, 0, len(p)) for p in ours], lr=0.02, compiled=False)
    other = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95)
    before = [p.detach().clone() for p in ours]
    for _ in range(3):
        for p, q in zip(ours, theirs):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        one.step()
        other.step()
    for p, q, start in zip(ours, theirs, before):
        assert (p - q).norm() < 0.05 * (q - start).norm()
