"""Paths, tiny configurations, subprocesses, and one small trained checkpoint for all tests."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests")]
TEXT = ROOT / "data" / "shakespeare.txt"

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")

import nanoeuler as ne

TINY = ne.Config(n_embd=8, n_head=2, n_kv_head=1, head_dim=4, n_layer=2, n_hidden=12, seq_len=8,
                 vocab_size=262, n_mtp=2)
# the flags of a run that takes a second: a short context, few bytes, one thread
FAST = ("--seq-len", "16", "--vocab-size", "280", "--batch", "64", "--threads", "1", "--warmup",
        "2")


def command(*args, program="nanoeuler.py"):
    return [sys.executable, str(ROOT / program), *map(str, args)]


def nanoeuler(*args, cwd, stdin="", timeout=240, program="nanoeuler.py", **options):
    """Runs the program as a user does; stdout and stderr as text."""
    return subprocess.run(command(*args, program=program), cwd=cwd, input=stdin, timeout=timeout,
                          capture_output=True, encoding="utf-8", errors="replace", **options)


def complains(result, *words):
    """Exit code 2, one line on stderr that holds all the words, no traceback."""
    lines = [s for s in result.stderr.splitlines() if not s.startswith("note:")]
    assert result.returncode == 2, (result.returncode, result.stdout, result.stderr)
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    for word in words:
        assert str(word) in lines[0], lines[0]
    return lines[0]


def needs(name):
    """A package that the programs do not need, only a test that compares with it."""
    extra = name if name == "torch" else "llama-cpp" if name == "llama_cpp" else "dev"
    return pytest.importorskip(name, reason=f"{name} comes with pip install -e .[{extra}]")


def random_flat(cfg, seed, dtype=np.float64, scale=0.3):
    """Parameters at which nothing is nearly linear."""
    flat = ne.aligned((ne.n_params(cfg),), dtype)
    flat[:] = scale * np.random.default_rng(seed).standard_normal(flat.size)
    p = ne.views(flat, ne.param_table(cfg))
    for gain in (p.attn_norm, p.mlp_norm, p.final_norm):
        gain += 1
    return flat


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """40 kB of Shakespeare."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(TEXT.read_bytes()[:40_000])
    return path


@pytest.fixture(scope="session")
def trained(tmp_path_factory, text):
    """A directory with nanoeuler.bin and .jsonl of 20 steps.  Tests copy it to change it."""
    folder = tmp_path_factory.mktemp("trained")
    result = nanoeuler("train", "--data", text, "--steps", "20", "--eval-every", "10",
                       "--save-every", "10", *FAST, cwd=folder)
    assert result.returncode == 0, result.stderr
    (folder / "stdout.txt").write_text(result.stdout, encoding="utf-8")
    return folder


@pytest.fixture
def copy(trained, tmp_path):
    """A private copy of the trained directory."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def checkpoint(tmp_path):
    """path of a tiny checkpoint, 40 kB, with moments."""
    import bpe
    path, flat = tmp_path / "tiny.bin", random_flat(TINY, 1, np.float32)
    tokenizer = bpe.train(b"to be or not to be, that is the question", TINY.vocab_size)
    assert tokenizer.vocab_size == TINY.vocab_size
    state = ne.State(step=3, n_steps=9, options=ne.asdict(ne.Options()))
    ne.write_checkpoint(str(path), TINY, tokenizer, state, flat,
                        (flat * 0.5, flat * flat))
    return path
