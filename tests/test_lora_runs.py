"""Runs of sft and dpo with --lora: resumed bit for bit, on stored matrices, and those rejected."""
import hashlib
import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from examples import PAIRS, copy_of, write_pairs
from helpers import TEXT, nanoeuler, ok, refused, run, signalled, told

import nanoeuler as ne
from nanoeuler_parts.files.logs import read_log
from nanoeuler_parts.files.safetensors import map_tensors
from nanoeuler_parts.kernels import compile_lora_kernels
from nanoeuler_parts.lora.files import CONFIG, read_adapter, read_run, WEIGHTS
from nanoeuler_parts.machine.cpu import DTYPE
from nanoeuler_parts.machine.threads import most_threads

pytestmark = pytest.mark.cli
STEPS = 12
LENGTH = ("--steps", STEPS, "--eval-every", 4, "--save-every", 4, "--warmup", 2, "--holdout", 0.05)
SFT = ("sft", "nanoeuler.bin", "--data", "add.json", "--batch", 640, "--lora", 4, "--out", "ad",
       *LENGTH)
TRAIN = ("train", "--init", "nanoeuler.bin", "--data", "text.txt", "--batch", 640, "--lora", 4,
         "--out", "ad", *LENGTH)
DPO = ("dpo", "nanoeuler.bin", "--data", "pairs.jsonl", "--batch", 640, "--lora", 4,
       "--lora-alpha", 4, "--lora-targets", "q,v,down", "--out", "ad", *LENGTH)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    for dtype in {"f32", DTYPE}:
        compile_lora_kernels(dtype)


def left(folder):
    """All of a run in this folder that must not depend on interruptions"""
    found = read_run(str(folder / "run.bin"))
    log = [{key: x for key, x in r.items() if key not in ("ms", "tokens_per_s")}
           for r in read_log(str(folder / "run.jsonl"))]
    digests = [hashlib.sha256(x).hexdigest() for x in (found.flat, *found.moments)]
    cfg = found.cfg
    assert np.array_equal(read_adapter(str(folder), cfg).flat, found.flat)
    return found.state.step, found.state.reference, digests, log


@pytest.fixture
def folder(base, tmp_path, monkeypatch):
    monkeypatch.chdir(write_pairs(copy_of(base, tmp_path), PAIRS))
    Path("text.txt").write_bytes(TEXT.read_bytes()[:20_000])
    return tmp_path


@pytest.mark.parametrize("verb", [SFT, DPO, TRAIN], ids=["sft", "dpo", "train"])
def test_a_killed_run_resumes_bit_for_bit(verb, folder):
    """On one thread and then on two; the model stays as it is."""
    before = (folder / "nanoeuler.bin").read_bytes()
    said = told(*verb)
    assert "LoRA" in said and "chat nanoeuler.bin --adapter ad" in said
    want = left(folder / "ad")
    assert want[0] == STEPS and bool(want[1]) == (verb is DPO)
    losses = [r["loss"] for r in want[3] if "lr" in r]
    assert losses[-1] < losses[0]
    shutil.rmtree("ad")
    result = signalled(signal.SIGKILL, 6, *verb, "--threads", 1, cwd=folder, after="record")
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert read_run("ad/run.bin").state.step == 4
    resume = verb[0], "--resume", "--out", "ad"
    said = ok(signalled(signal.SIGINT, 9, *resume, "--threads", 1, cwd=folder))
    assert "stopped at step 9 of 12" in said and f"{verb[0]} --resume --out ad\n" in said
    ok(nanoeuler(*resume, "--threads", min(2, most_threads()), cwd=folder))
    assert left(folder / "ad") == want
    said = told(*resume)
    assert "ad is complete: 12 of 12 steps" in said and "--resume --out ad --steps 24" in said
    assert "To start anew, repeat the command that began it, with --force.\n" in said
    assert (folder / "nanoeuler.bin").read_bytes() == before


def test_the_folder_without_out(folder, capsys):
    start = "sft", "nanoeuler.bin", "--data", "add.json", "--lora", 2, "--rehearse", 0
    run(*start, "--steps", 2)
    assert read_run("nanoeuler_lora/run.bin").state.step == 2
    run("sft", "--resume", "--lora", 2, "--steps", 3)
    run("sft", "--resume", "--out", "nanoeuler_lora", "--steps", 4)
    assert read_run("nanoeuler_lora/run.bin").state.step == 4
    os.remove("nanoeuler_lora/run.bin")
    refused(capsys, "sft", "--resume", "--out", "nanoeuler_lora", words=[
        "nanoeuler_lora: expected a run to resume, found a folder without a run.bin; name the"])
    os.mkdir("empty")
    refused(capsys, "dpo", "--resume", "--out", "empty", words=["without a run.bin", "dpo --lora"])


def test_dpo_begins_with_the_reference(folder):
    """B is zero: the loss of the first step is ln 2."""
    run(*DPO[:-len(LENGTH)], "--steps", 1, "--dtype", "f32")
    first = next(r for r in read_log("ad/run.jsonl") if "lr" in r)
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6) and first["margin"] == 0


RL = ("rl", "nanoeuler.bin", "--data", "add.json", "--reward", "length", "--batch", 4, "--group",
      2, "--tokens", 4, "--lora", 4, "--out", "ad", "--steps", 1)


@pytest.mark.parametrize("verb, lr", [
    (SFT, 2e-3), ((*SFT[:-len(LENGTH)], "--rehearse", 0, "--steps", 1), 2e-3), (TRAIN, 2e-3),
    (DPO, 1e-4), (RL, 3e-4)], ids=["sft", "sft without old questions", "train", "dpo", "rl"])
def test_the_defaults_of_a_run_with_lora(verb, lr, folder):
    """docs/lora.md names them: the learning rate, and alpha = 2 r.  Given values stay."""
    without = [x for i, x in enumerate(verb)
               if "--lora-alpha" not in verb[max(0, i - 1):i + 1]]
    run(*without, "--steps", 1)
    found = read_run("ad/run.bin")
    assert found.state.options["lr"] == lr and found.lora.alpha == 8 and found.lora.scale == 2
    run(*without, "--steps", 1, "--lr", 7e-4, "--lora-alpha", 3, "--force")
    found = read_run("ad/run.bin")
    assert found.state.options["lr"] == 7e-4 and found.lora.scale == 0.75


def test_a_run_with_lora_does_not_resume_on_several_gpus(folder, monkeypatch):
    """Also if --lora is not named again, by --gpus or by a launcher"""
    from nanoeuler_parts.tools import on_gpu
    run(*SFT[:-len(LENGTH)], "--steps", 1)
    start, message = on_gpu.training_verb(on_gpu.SftRun, "x.bin"), "--lora runs on one GPU"
    monkeypatch.setattr(on_gpu, "on_one_gpu", lambda *args: "one")
    monkeypatch.setattr("nanoeuler_parts.ranks.processes.start_ranks", lambda n: "several")
    for out in "ad", "ad/run.bin":
        assert start(gpus=1, out=out, resume=True) == "one"
        with pytest.raises(ne.UserError, match=message):
            start(gpus=2, out=out, resume=True)
    assert start(gpus=2, out="new.bin", lora=0) == "several"
    with pytest.raises(ne.UserError, match=message):
        start(gpus=2, out="new", lora=4)
    monkeypatch.setattr(on_gpu, "PLACE", SimpleNamespace(size=2))
    for out, lora in ("ad", 0), ("new", 4):
        with pytest.raises(ne.UserError, match=message):
            start(out=out, lora=lora)
    with pytest.raises(ne.UserError, match="r runs on one GPU"):
        on_gpu.reinforcement(out="new.bin")


@pytest.mark.parametrize("stored", ["int8", "f32"])
def test_a_model_is_used_with_its_adapter(stored, folder, capsys):
    """generate, chat, eval, export --merge and Python; the base may be int8."""
    file = "nanoeuler.bin"
    if stored == "int8":
        run("quantize", "nanoeuler.bin", "small.bin")
        file = "small.bin"
    out = told("sft", file, "--data", "add.json", "--lora", 8, "--steps", 30, "--batch", 1280,
               "--lr", 2e-2, "--out", "ad")
    assert f"the rest is {dict(f32='float32', int8='int8')[stored]}" in out
    asked = [dict(instruction="Add 3 and 5.", output="3 plus 5 is 8.")]
    Path("q.json").write_text(json.dumps(asked), encoding="utf-8")
    prompt = "Add 3 and 5."
    greedy = ("--temperature", 0, "--tokens", 12)
    answers = [told("generate", prompt, file, *more, *greedy)
               for more in ((), ("--adapter", "ad"), ("--adapter", "ad", "--weights", "f32"))]
    assert answers[1] == answers[2] != answers[0]
    model = ne.load(file, adapter="ad", temperature=0.0, tokens=12)
    assert model.say(prompt) == answers[1].removesuffix("\n") and model.answers
    assert "with ad" in told("eval", file, "--adapter", "ad", "--questions", "q.json")
    said = told("export", file, "hf", "--merge", "ad")
    assert said.endswith(f"merged the adapter ad into {file}\n")
    run("import", "hf", "merged.bin")
    merged, own = (ne.read_checkpoint(x) for x in ("merged.bin", file))
    assert not np.array_equal(merged.flat[:ne.n_params(merged.cfg)], own.flat)
    assert told("generate", prompt, "merged.bin", *greedy) == answers[1]
    Path("p.jsonl").write_text(json.dumps("Add 1 and 2.") + "\n", encoding="utf-8")
    many = ("generate", file, "--file", "p.jsonl", "--out", "o.jsonl", *greedy)
    run(*many, "--adapter", "ad")
    refused(capsys, *many, words=["o.jsonl, line 1 is not this model's answer"])
    run(*many, "--adapter", "ad")


def test_the_adapter_knows_its_base(folder, capsys):
    run(*SFT[:-len(LENGTH)], "--steps", 2)
    meta, _ = map_tensors("ad/adapter_model.safetensors")
    assert meta["base_sha256"] == map_tensors("nanoeuler.bin")[0]["sha256"]
    capsys.readouterr()
    run("generate", "a", "nanoeuler.bin", "--adapter", "ad", "--tokens", 1)
    assert "trained on another file" not in capsys.readouterr().err
    run("quantize", "nanoeuler.bin", "small.bin")
    run("generate", "a", "small.bin", "--adapter", "ad", "--tokens", 1)
    said = capsys.readouterr().err
    assert "ad was trained on another file than small.bin" in said and "senseless" in said
    refused(capsys, "generate", "a", "bundled", "--adapter", "ad",
            words=["layers", "use the model that the adapter was made for"])
    os.rename("nanoeuler.bin", "other.bin")
    more = "sft", "--resume", "--out", "ad", "--steps", 3
    refused(capsys, *more, words=["nanoeuler.bin: No such file; ad/run.bin adapts this model"])
    refused(capsys, "sft", "small.bin", *more[1:],
            words=["small.bin is not the model that ad/run.bin adapts"])
    run("sft", "other.bin", *more[1:])
    assert read_run("ad/run.bin").state.step == 3


def test_what_is_refused(folder, capsys):
    def check(*args, words):
        refused(capsys, "sft", "nanoeuler.bin", "--data", "add.json", *args, words=words)
        assert not os.path.exists("ad")

    check("--lora-alpha", 3, words=["--lora-alpha: expected --lora beside it"])
    check("--lora-targets", "q", words=["--lora-targets: expected --lora beside it, found none"])
    for targets, found in (("q,x", "'x'"), (" ", "''")):
        check("--lora", 4, "--out", "ad", "--lora-targets", targets,
              words=[f"--lora-targets: expected projections among q, k, v, o, gate, up, down, with "
                     f"commas between them, found {found}"])
    check("--lora", 4, "--out", "ad", "--keep-best", "--holdout", 0,
          words=["--keep-best: expected held-out examples"])
    check("--lora", 2000, "--out", "ad", words=["--lora: expected 0 to 1024, found 2000"])
    check("--lora", 4, "--out", "ad", "--row-len", 1, words=["add.json: none of 144 examples"])
    check("--lora", 4, "--out", "add.json", words=["add.json is a file, but --lora writes a"])
    run(*SFT[:-len(LENGTH)], "--steps", 1)
    refused(capsys, *SFT, words=["ad/run.bin exists; continue it with --resume"])
    resume = "sft", "--resume", "--out", "ad", "--steps", 3
    refused(capsys, *resume, "--lora", 5, words=["--lora 4, not 5"])
    refused(capsys, *resume, "--lora-alpha", 5, words=["not 5"])
    refused(capsys, "train", "--data", "text.txt", "--lora", 4, "--out", "other",
            words=["--lora: expected a model to adapt, found none; name it with --init"])
    refused(capsys, *TRAIN, "--out", "other", "--optimizer", "muon",
            words=["--optimizer: LoRA learns with AdamW"])
    assert not os.path.exists("other")
    os.remove("ad/run.bin")
    refused(capsys, *SFT, words=["ad/adapter_config.json exists; choose another --out"])
    refused(capsys, *resume, "--lora", 4, words=["ad/run.bin: expected a run to resume"])
    run(*SFT[:-len(LENGTH)], "--steps", 1, "--force")


def test_the_best_adapter_is_kept(folder, capsys):
    """As an adapter of its own, in the folder of the run, also by a run that is resumed."""
    start = (*SFT, "--lr", 0.1, "--warmup", 0, "--eval-every", 1, "--steps", 6)
    said = told(*start, "--keep-best")
    assert "--adapter ad/best\n" in said
    state, best = read_run("ad/run.bin").state, read_adapter("ad/best", read_run("ad/run.bin").cfg)
    assert best.state.step == state.best_step < 6 and {*os.listdir("ad/best")} == {CONFIG, WEIGHTS}
    assert f"ad/best is the adapter of the best validation, at step {state.best_step}; ad " in said
    run(*start, "--out", "other")
    assert "best" not in os.listdir("other")
    assert np.array_equal(read_run("other/run.bin").flat, read_run("ad/run.bin").flat)
    run("sft", "--resume", "--out", "ad", "--steps", 7)
    run("generate", "a", "nanoeuler.bin", "--adapter", "ad/best", "--tokens", 1)
    more = "sft", "--resume", "--out", "ad", "--steps", 8
    shutil.copy(f"other/{WEIGHTS}", f"ad/best/{WEIGHTS}")
    refused(capsys, *more, words=[f"ad/best/{WEIGHTS} is not the best model of this run"])
    shutil.rmtree("ad/best")
    Path("elsewhere").mkdir()
    Path("ad/best").symlink_to(Path("elsewhere").absolute())
    refused(capsys, *more, words=["ad/best is a link, so nothing is written there"])
    assert not os.listdir("elsewhere")
    os.remove("ad/best")
    run(*more)                               # no validation is better, so there is none to keep
    assert not os.path.exists("ad/best")


def test_hints_work_when_they_are_followed(folder, capsys):
    run(*SFT[:-len(LENGTH)], "--steps", 1)
    resume = "sft", "--resume", "--out", "ad"
    assert "To start anew, repeat the command that began it, with --force.\n" in told(*resume)
    run(*SFT[:-len(LENGTH)], "--steps", 1, "--force")
    for lora in (), ("--lora", 4):
        refused(capsys, *resume[:3], "nothere", *lora,
                words=["--out names a run to resume: ad (step 1 of 1); "])
    said = refused(capsys, *SFT, "--data", "none.json", "--out", "new", words=[
        "none.json: No such", "check the path, or name the training data with --data"])
    assert "run.bin" not in said


def test_an_adapter_is_described(folder):
    run(*SFT[:-len(LENGTH)], "--steps", 2, "--lora-targets", "q,down")
    said = told("info", "ad")
    cfg = read_run("ad/run.bin").cfg
    n = cfg.n_layer * 4 * (cfg.n_embd + cfg.n_head * cfg.head_dim + cfg.n_hidden + cfg.n_embd)
    for words in ("ad, a LoRA adapter", "nanoeuler.bin, checksum", "q, down", f"{n:,}", "2 of 2",
                  "add.json", "chat", "matches"):
        assert words in said, said
    assert told("info", "ad/run.bin") == said == told("info", f"ad/{WEIGHTS}")


def test_a_model_and_an_adapter_are_told_apart(folder, capsys):
    run(*SFT[:-len(LENGTH)], "--steps", 1)
    found = "expected a model, found a LoRA adapter"
    for name in "ad", "ad/run.bin", f"ad/{WEIGHTS}":
        for verb in (("generate", "a", name), ("quantize", name, "q.bin"), ("serve", name),
                     ("sft", name, "--data", "add.json", "--out", "o.bin"), ("lens", "a", name),
                     ("sft", name, "--data", "add.json", "--lora", 4, "--out", "new")):
            refused(capsys, *verb, words=[name, found, "--adapter ad"])
    assert not os.path.exists("new")
    os.chdir("ad")
    refused(capsys, "generate", "a", "run.bin", words=["run.bin", found, "--adapter ."])
    os.chdir("..")
    run("export", "nanoeuler.bin", "hf")
    for verb in ("generate", "a", "hf"), ("serve", "hf"), ("info", "hf"), ("sft", "hf"):
        refused(capsys, *verb, words=["hf: expected a checkpoint, found a model in Hugging Face's "
                                      "format; convert it with import hf OUT.bin"])
    for name, words in (("nanoeuler.bin", "found a model;"), ("add.json", "found none;"),
                        ("hf", "found a model in Hugging Face's format;"),
                        ("ad/run.bin", "found a file in it; name ad"),
                        (f"ad/{WEIGHTS}", "found a file in it; name ad")):
        refused(capsys, "generate", "a", "nanoeuler.bin", "--adapter", name,
                words=[f"{name}: expected a folder with {CONFIG}", words])
    refused(capsys, "import", "ad", "new.bin", words=["ad", "found a LoRA adapter"])


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, "run.bin", "run.jsonl"])
def test_nothing_is_written_where_a_link_leads(name, folder, capsys):
    """The folder may come from elsewhere: a file of the user would be replaced."""
    run(*SFT[:-len(LENGTH)], "--steps", 1)
    own = Path("own")
    shutil.copy(f"ad/{name}", own)
    os.remove(f"ad/{name}")
    before = own.read_bytes()
    for target in own.absolute(), Path("ad/nowhere").absolute():
        Path(f"ad/{name}").symlink_to(target)
        for args in (("sft", "--resume", "--out", "ad", "--steps", 3), (*SFT, "--force")):
            said = refused(capsys, *args, words=["ad"])
            # a folder without a run is none of a run with LoRA
            assert f"ad/{name} is a link, or not a regular file" in said or name == "run.bin"
        os.remove(f"ad/{name}")
    assert own.read_bytes() == before and not os.path.exists("ad/nowhere")


def test_a_damaged_run_is_refused(folder, capsys):
    run(*SFT[:-len(LENGTH)], "--steps", 1)
    data = Path("ad/run.bin").read_bytes()
    Path("ad/run.bin").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    refused(capsys, "sft", "--resume", "--out", "ad", "--steps", 3,
            words=["ad/run.bin: the checksum does not match"])
    assert {*os.listdir("ad")} == {"run.bin", "run.jsonl", CONFIG, WEIGHTS}
