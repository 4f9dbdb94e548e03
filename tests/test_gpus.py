"""On several GPUs: equal bits, the numbers of one GPU, and an end for all when one is gone.

Skipped with fewer than two.  What needs no GPU is in test_ranks.py."""
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from helpers import ROOT, command, needs

if importlib.util.find_spec("numba_cuda") is None:
    pytest.skip("numba-cuda is not installed; it comes with the extra cuda",
                allow_module_level=True)

import nanoeuler as ne
import nanoeuler_cuda as nc
from nanoeuler_parts.gpu import launches
from nanoeuler_parts.files.logs import read_log
from nanoeuler_parts.ranks.engine import shard

if problem := nc.gpu_problem():
    pytest.skip(problem, allow_module_level=True)
if launches.gpus_here() < 2:
    pytest.skip("there is one GPU, and these need two", allow_module_level=True)

ALL = launches.gpus_here()
sizes = pytest.mark.parametrize("size", sorted({2, ALL}))
TEXT = ("--data", ROOT / "data/shakespeare.txt")
SMALL = ("--preset", "small", "--batch", 4096, *TEXT)
MANY = ("--steps", 1_000_000, "--eval-every", 1000, "--save-every", 20)


def start(verb, *args, gpus=None, words=(), **options):
    flags = () if gpus is None else ("--gpus", gpus)
    command_ = [*words, *command(verb, *args, *flags, program="nanoeuler_cuda.py")[bool(words):]]
    return subprocess.Popen(command_, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, start_new_session=True, **options)


def end(run, timeout=400):
    """(exit code, stdout, stderr), and nothing is left running"""
    try:
        out, err = run.communicate(timeout=timeout)
        return run.returncode, out, err
    finally:
        for pid in ranks_of(run):
            os.kill(pid, signal.SIGKILL)
        run.kill()


def train(path, *args, verb="t", **options):
    code, out, err = end(start(verb, *args, "--out", path, **options))
    assert code == 0, out + err
    return out + err


def losses_of(path):
    log = read_log(str(path.with_suffix(".jsonl")))
    return np.array([r["loss"] for r in log if "loss" in r])


def state(path):
    c = ne.read_checkpoint(str(path))
    return c.state.step, c.flat.tobytes(), [x.tobytes() for x in c.moments]


def ranks_of(run):
    """The processes that a run with --gpus started, in the order of their ranks"""
    try:
        with open(f"/proc/{run.pid}/task/{run.pid}/children", encoding="ascii") as f:
            return [int(pid) for pid in f.read().split()]
    except OSError:
        return []


def come_to(step, path, run):
    """Waits until the log of a run has come that far."""
    log, began, seen = path.with_suffix(".jsonl"), time.monotonic(), 0
    while seen < step:
        assert run.poll() is None and time.monotonic() - began < 300, end(run)
        if log.exists():
            whole = log.read_text("utf-8").rpartition("\n")[0].splitlines()
            seen = max([json.loads(line).get("step", 0) for line in whole], default=0)
        time.sleep(0.01)


@sizes
@pytest.mark.timeout(900)
def test_in_float64_they_train_like_one(size, tmp_path):
    """The losses of each step, to 1e-12, and the same bytes twice."""
    how = ("--preset", "small", *TEXT, "--n-layer", 2, "--batch", 2048, "--seq-len", 128,
           "--dtype", "f64", "--steps", 12, "--optimizer", "adamw")
    names = {"one": 1, "several": size, "again": size}
    for name, gpus in names.items():
        train(tmp_path / f"{name}.bin", *how, gpus=gpus)
    one, several = (losses_of(tmp_path / f"{name}.bin") for name in ("one", "several"))
    assert len(one) == len(several) == 12
    assert np.abs(several / one - 1).max() < 1e-12
    assert state(tmp_path / "several.bin") == state(tmp_path / "again.bin")


@sizes
@pytest.mark.timeout(900)
def test_a_head_that_two_gpus_share_is_switched_off_like_on_one(size, tmp_path):
    """A GPU owns a part of a head.  It gets no gradient of that head in the second half of the run,
    and decays and updates its part as one GPU does."""
    cfg = replace(ne.PRESETS["small"], n_layer=1, n_mtp=8)
    heads = next(x for x in ne.param_table(cfg) if x.name == "lm_head")
    first, each = heads.start, (heads.end - heads.start) // cfg.n_mtp
    n = ne.n_params(cfg)
    cuts = [shard(n, rank, size).start for rank in range(1, size)]
    assert any(first + each < cut < heads.end and (cut - first) % each for cut in cuts)
    how = ("--preset", "small", *TEXT, "--n-layer", 1, "--n-mtp", 8, "--batch", 2048,
           "--dtype", "f64", "--steps", 12, "--optimizer", "adamw", "--mtp-until", 0.5)
    for name, gpus in ("one", 1), ("several", size):
        train(tmp_path / f"{name}.bin", *how, gpus=gpus)
    one, several = (losses_of(tmp_path / f"{name}.bin") for name in ("one", "several"))
    assert len(one) == 12 and np.abs(several / one - 1).max() < 1e-12
    a, b = (ne.read_checkpoint(str(tmp_path / f"{name}.bin")) for name in ("one", "several"))
    for x, y in zip((a.flat, *a.moments), (b.flat, *b.moments)):
        assert np.abs(x - y).max() <= 2.0 ** -23 * np.abs(x).max()


@sizes
@pytest.mark.timeout(900)
def test_each_stage_is_the_same_bytes_twice_in_bf16(size, tmp_path):
    pairs = (ROOT / "data/preferences_sample.jsonl").read_text(encoding="utf-8").splitlines()[:600]
    (tmp_path / "pairs.jsonl").write_text("\n".join(pairs), encoding="utf-8")
    for verb, source, data in (
            ("t", SMALL[:4], ROOT / "data/shakespeare.txt"),
            ("s", [tmp_path / "t.bin"], ROOT / "data/instructions.json"),
            ("d", [tmp_path / "s.bin"], tmp_path / "pairs.jsonl")):
        for name in verb, verb + "2":
            train(tmp_path / f"{name}.bin", *source, "--data", data, "--steps", 40, gpus=size,
                  verb=verb)
        assert state(tmp_path / f"{verb}.bin") == state(tmp_path / f"{verb}2.bin")
        assert state(tmp_path / f"{verb}.bin")[0] == 40


@pytest.mark.timeout(900)
@pytest.mark.parametrize("who, how", [(0, "SIGKILL"), (-1, "SIGKILL"), (-1, "SIGSTOP")])
def test_one_that_is_gone_ends_all_and_the_run_goes_on(who, how, tmp_path):
    """Killed, or standing still, in the middle of steps; then on with half as many, down to one"""
    path = tmp_path / "a.bin"
    run = start("t", *SMALL, *MANY, "--out", path, gpus=ALL)
    come_to(30, path, run)
    victim = ranks_of(run)[who]
    began = time.monotonic()
    os.kill(victim, getattr(signal, how))
    code, _, err = end(run, timeout=90)
    assert time.monotonic() - began < 60 and code != 0
    assert f"rank {who % ALL} of {ALL} is gone" in err and "Traceback" not in err, err
    step = ne.read_checkpoint(str(path)).state.step
    assert step >= 20 and step % 20 == 0
    for gpus in sorted({ALL // 2, 1}, reverse=True):
        step += 20
        said = train(path, "--resume", "--steps", step, gpus=gpus)
        assert f"continues on {gpus}" in said, said
        assert state(path)[0] == step and len(losses_of(path)) >= step


@pytest.mark.timeout(600)
def test_a_signal_ends_all_after_the_same_step(tmp_path):
    path = tmp_path / "a.bin"
    run = start("t", *SMALL, *MANY, "--out", path, gpus=ALL)
    come_to(30, path, run)
    run.send_signal(signal.SIGINT)
    code, out, err = end(run, timeout=90)
    step = state(path)[0]
    assert code == 0 and f"stopped at step {step} of" in out, out + err
    assert len(losses_of(path)) == step


@pytest.mark.timeout(600)
def test_no_room_for_a_checkpoint_ends_all(tmp_path):
    """As on a full disk: the first rank cannot write the last one."""
    path = tmp_path / "a.bin"
    limit = 2 * ne.n_params(ne.PRESETS["small"])         # half of what the parameters take
    run = start("t", *SMALL, "--steps", 30, "--out", path, gpus=ALL, preexec_fn=lambda: (
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))))
    code, _, err = end(run, timeout=300)
    assert code == 2 and "File too large" in err and "Traceback" not in err, err
    assert not path.exists()


@pytest.mark.timeout(600)
def test_torchrun_starts_them_too(tmp_path):
    needs("torch")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone",
             f"--nproc_per_node={ALL}"]
    path = tmp_path / "a.bin"
    said = train(path, *SMALL, "--steps", 30, words=words)
    assert state(path)[0] == 30 and said.count("step ") > 0
    other = tmp_path / "b.bin"
    train(other, *SMALL, "--steps", 30, gpus=ALL)
    assert state(path) == state(other)
