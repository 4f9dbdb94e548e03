"""The GPU program as a user meets it: its verbs on a GPU that computes zeros, and what is said
where there is no driver, no numba-cuda, or one that does not fit."""
import contextlib
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from dry_gpu import Dispatcher, blank, step
from helpers import (FAST, MAY_BE_SKIPPED, ROOT, TINY, command, complains, run, slow,
                     warm_command)
from numba import cuda
from servers import post, serving

import nanoeuler as ne
import nanoeuler_cuda as nc
from nanoeuler_parts import cli
from nanoeuler_parts.gpu import doctor, launches
from nanoeuler_parts.lora.files import read_run
from nanoeuler_parts.runs.run import Run
from nanoeuler_parts.runs.start import resumed
from nanoeuler_parts.tools import on_gpu
from nanoeuler_parts.tuning.sft import SftRun

pytestmark = pytest.mark.usefixtures("old_objects_are_no_garbage")


def verb(*args):
    """The exit code of a verb in this process."""
    return nc.main([str(x) for x in args])


@pytest.fixture
def life(dry, text, tmp_path, monkeypatch):
    """The arguments of a short pretraining, in an empty folder, on a Hopper that computes zeros."""
    monkeypatch.chdir(tmp_path)
    for run in (Run, SftRun):          # a launch costs as much here as on a GPU
        monkeypatch.setattr(run, "sample_text",
                            lambda self, n, method=run.sample_text: method(self, 3))
    dry.gpu.compute_capability = (9, 0)
    return ["--preset", "small", "--data", text, "--vocab-size", "280", "--batch", "640",
            "--dtype", "bf16", "--seq-len", 160]


def test_the_life_of_a_model(life, text, tmp_path, monkeypatch, capsys):
    """Every verb that makes or uses a model, to its end."""
    sums = [dict(instruction=f"Add {a} and {b}.", output="?") for a in range(90) for b in "12"]
    (tmp_path / "add.json").write_text(json.dumps(sums), encoding="utf-8")
    pairs = [dict(instruction=f"Is {a} odd?", chosen="yes", rejected="no") for a in range(180)]
    (tmp_path / "odd.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    for args in (("t", *life, "--steps", 6, "--eval-every", 2, "--keep-best"), ("tr", "--steps", 8),
                 ("i", "It was", "--tokens", 5),
                 ("s", "--data", "add.json", "--steps", 6, "--eval-every", 3),
                 ("d", "--data", "odd.jsonl", "--steps", 4, "--eval-every", 2),
                 ("r", "--data", "add.json", "--reward", "length", "--steps", 2, "--batch", 16,
                  "--tokens", 4, "--eval-every", 2)):
        assert verb(*args) == 0, capsys.readouterr().err
    for name, kind, step in (("nanoeuler.bin", "base", 8), ("nanoeuler_chat.bin", "chat", 6),
                             ("nanoeuler_dpo.bin", "chat", 4), ("nanoeuler_rl.bin", "chat", 2)):
        state = ne.read_checkpoint(name).state
        assert (state.kind, state.step) == (kind, step)
    assert ne.read_checkpoint("nanoeuler_best.bin").moments == ()
    asked = [dict(prompt="Is", choices=["a", "b"], answer=0), dict(prompt="Is", answer="b")]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, asked)), encoding="utf-8")
    assert verb("eval", "nanoeuler_chat.bin", "--data", text, "--questions", "q.jsonl", "--tokens",
                3, "--json", "out.json") == 0
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert found["texts"]["total"]["perplexity"] == 1            # every loss is a zero
    assert "dry" in found["texts"]["device"] and found["questions"]["total"]["n"] == 2
    capsys.readouterr()
    for args in ((), ("nanoeuler_dpo.bin",)):
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n/reset\nAgain\n/quit\n"))
        assert verb("c", *args, "--tokens", 5) == 0
        said = capsys.readouterr().out
        assert "answers what you type" in said and said.count("\n> ") == 4


def test_rehearsal(life, text, tmp_path, capsys):
    """The old examples of a model that learned data/instructions.json, and a model's own answers:
    here it never ends one, so that there is nothing to rehearse."""
    def write(name, n):
        entries = [dict(instruction=f"Add {i} and {n}.", output="?") for i in range(n)]
        (tmp_path / name).write_text(json.dumps(entries), encoding="utf-8")

    (tmp_path / "data").mkdir()
    write("data/instructions.json", 240)
    write("new.json", 60)
    tune = "--steps", 2, "--row-len", 160, "--batch", 640
    for args in (("t", *life, "--steps", 2), ("s", "--data", "data/instructions.json", *tune),
                 ("s", "nanoeuler_chat.bin", "--data", "new.json", "--out", "x.bin", *tune)):
        assert verb(*args) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "4 of 8 rows of each step, up to 16 examples of data/instructions.json" in said
    assert "old questions: 0 of 200 right before the run, 0 after it" in said
    assert verb("s", "--data", "new.json", "--out", "y.bin", *tune) == 0
    assert verb("s", "y.bin", "--data", "new.json", "--out", "z.bin", "--rehearse", 0.5, *tune) == 2
    said = capsys.readouterr()
    assert "sampled 24,000 tokens" in said.out and "found none" in said.err


def test_the_life_of_an_adapter(life, text, tmp_path, capsys):
    """Every verb that trains one, a resumed run, and the verbs that use one"""
    sums = [dict(instruction=f"Add {a} and {b}.", output="?") for a in range(90) for b in "12"]
    (tmp_path / "add.json").write_text(json.dumps(sums), encoding="utf-8")
    pairs = [dict(instruction=f"Is {a} odd?", chosen="yes", rejected="no") for a in range(180)]
    (tmp_path / "odd.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    chat = "nanoeuler_chat.bin"
    for args in (("t", *life, "--steps", 2), ("s", "--data", "add.json", "--steps", 2),
                 ("t", "--init", "nanoeuler.bin", "--data", text, "--steps", 2, "--lora", 8,
                  "--batch", 640, "--out", "of_t", "--dtype", "f32"),
                 ("s", "--data", "add.json", "--steps", 4, "--eval-every", 2, "--lora", 16,
                  "--lora-targets", "q,v,down", "--keep-best"),
                 ("s", "--out", "nanoeuler_lora", "--resume", "--steps", 6),
                 ("d", chat, "--data", "odd.jsonl", "--steps", 4, "--lora", 4, "--out", "of_d",
                  "--recompute"),
                 ("r", chat, "--data", "add.json", "--reward", "length", "--steps", 2, "--batch",
                  16, "--tokens", 4, "--eval-every", 2, "--lora", 8, "--kl", 0.1, "--out", "of_r")):
        assert verb(*args) == 0, (args, capsys.readouterr().err)
    for name, file, step, targets in (
            ("of_t", "nanoeuler.bin", 2, 7), ("nanoeuler_lora", "nanoeuler.bin", 6, 3),
            ("of_d", chat, 4, 7), ("of_r", chat, 2, 7)):
        found = read_run(str(tmp_path / name / "run.bin"))
        assert found.state.step == step and len(found.lora.targets) == targets
        assert verb("i", "Is", file, "--adapter", name, "--tokens", 3) == 0
    assert "rank 4 is no multiple of 8" in capsys.readouterr().out


def test_an_adapter_is_trained_on_one_gpu(life, capsys):
    assert verb("t", *life, "--steps", 2, "--lora", 8, "--gpus", 2, "--init", "bundled") == 2
    assert "--lora runs on one GPU" in capsys.readouterr().err


def test_the_server_of_this_decoder(dry, checkpoint, monkeypatch):
    """The verb hands it over; and answers come from its slots, one after another, as from one."""
    got = {}
    monkeypatch.setattr("nanoeuler_parts.serve.verb.serve",
                        lambda files, **more: got.update(more, files=files))
    assert verb("serve", checkpoint, "--slots", 3, "--weights", "bf16") == 0
    assert (got["files"], got["decoder"]) == ([str(checkpoint)], nc.make_decoder)
    assert (got["slots"], got["weights"]) == (3, "bf16")
    pytest.importorskip("starlette", reason="it comes with the extra serve")
    bodies = [{"prompt": "to be "[:i + 1], "max_tokens": 4 + i, "temperature": 0}
              for i in range(6)]
    with serving(checkpoint, decoder=nc.make_decoder, slots=3) as (at, server):
        with ThreadPoolExecutor(6) as pool:
            found = [*pool.map(partial(post, at, "/v1/completions"), bodies)]
        assert [status for status, *_ in found] == [200] * 6
        assert [said["usage"]["completion_tokens"] for *_, said in found] == [4, 5, 6, 7, 8, 9]
        reader = server.default.engine.reader
        assert type(reader) is nc.Decoder and len(reader.slots) == 3
        status, _, said = post(at, "/api/explain", {"tokens": [1, 2], "chosen": 3})
        assert status == 200 and len(said["rivals"]) == 10 and said["guesses"] == []


def test_two_models_on_this_device(dry, checkpoint, tmp_path):
    """The second one is made by the loader's thread, and both take steps."""
    pytest.importorskip("starlette", reason="it comes with the extra serve")
    other = shutil.copy(checkpoint, tmp_path / "other.bin")
    bodies = [{"model": pathlib.Path((checkpoint, other)[i % 2]).stem, "prompt": "to be",
               "max_tokens": 4 + i, "temperature": 0} for i in range(6)]
    with serving(checkpoint, other, decoder=nc.make_decoder, slots=2) as (at, server):
        with ThreadPoolExecutor(6) as pool:
            found = [*pool.map(partial(post, at, "/v1/completions"), bodies)]
        assert [said["usage"]["completion_tokens"] for *_, said in found] == [4, 5, 6, 7, 8, 9]
        assert [said["model"] for *_, said in found] == [body["model"] for body in bodies]
        assert {type(model.engine.reader) for model in server.models} == {nc.Decoder}


def test_a_run_of_the_cpu_goes_on_here_and_there_again(life, text, capsys):
    """With settings that only one of the engines has."""
    start = ("train", "--data", text, *FAST, "--steps", 2, "--dtype", "f32", "--out")
    run(*start, "adamw.bin", "--optimizer", "adamw")
    run(*start, "muon.bin", "--momentum", 0.8)
    for name in ("adamw", "muon"):
        assert verb("tr", "--out", f"{name}.bin", "--steps", 4) == 0, capsys.readouterr().err
        assert ne.read_checkpoint(f"{name}.bin").state.step == 4
        run("train", "--resume", "--out", f"{name}.bin", "--steps", 6)
        o = ne.read_checkpoint(f"{name}.bin").state.options
        assert o["optimizer"] == name and o["dtype"] == "f32"
    assert o["momentum"] == 0.8 and o["muon_lr"] == 0.02 and o["mtp_until"] == 0.3


def test_a_setting_that_is_none_is_refused_in_a_line(life, capsys):
    for flag, value in (("--dtype", "f16"), ("--matmul", "fast")):
        assert verb("t", *life, flag, value) == 2
        said = capsys.readouterr().err
        assert value in said and said.startswith("nanoeuler: ") and said.count("\n") == 1


@pytest.mark.parametrize("fill", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_logits_that_are_not_finite_are_refused(fill, temperature, dry, checkpoint, capsys):
    dry.fill = fill
    assert nc.main(["i", "to be", str(checkpoint), "--temperature", temperature, "--threads",
                    "1"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "logit of token" in said


def test_what_the_driver_says_is_one_line_and_a_remedy(life, monkeypatch, capsys):
    """An error in the middle of a run: a kernel that another program's fault has stopped."""
    def broken(self, *_):
        raise nc.CudaAPIError(700, "Call to cuStreamSynchronize results in\nILLEGAL_ADDRESS")

    monkeypatch.setattr(nc.Model, "gradient", broken)
    assert verb("t", *life, "--steps", 2, "--warmup", 1) == 2
    said = capsys.readouterr().err
    assert said.startswith("nanoeuler: error of the GPU: ") and said.count("\n") == 1
    assert "700" in said and "ILLEGAL_ADDRESS" in said and "doctor" in said


def test_the_doctor_of_a_gpu_that_answers(dry, monkeypatch, capsys):
    dry.gpu.compute_capability = (9, 0)
    monkeypatch.setattr(launches, "gpus_here", lambda: 2)
    assert verb("doctor") == 0
    said = capsys.readouterr().out
    assert "dry, sm_90" in said and "wgmma" in said and "all is well" in said
    assert "rank 0 of 1, sees 2 GPUs" in said and "NCCL" in said


@pytest.mark.parametrize("said, found", [
    ("\t\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\x1b[0m\nGPU0\t X \tNV18\tSYS\t0-15\n"
     "GPU1\tNV18\t X \tPHB\t0-15\nGPU2\tSYS\tPHB\t X \t0-15\n\nLegend:\n\n  X    = Self\n",
     "NV18 0-1; SYS 0-2; PHB 1-2"),
    ("\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n", ""), ("", ""), ("No devices were found\n", "")])
def test_links_are_read_from_nvidia_smi(said, found, monkeypatch):
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=said))
    assert doctor.links_found() == found


@pytest.mark.parametrize("dtype", nc.DTYPES)
def test_a_model_names_its_device_and_type(dtype, dry):
    said = blank(TINY, dtype).device()
    assert "dry" in said and {"f32": "32", "f64": "64", "bf16": "b"}[dtype] in said, said
    assert "uint" not in said
    other = ne.replace(TINY, head_dim=80)    # of which tensor cores do no attention
    assert ("head_dim is 80" in blank(other, dtype).device()) == (dtype == "bf16")


@pytest.mark.parametrize("name", ["vocab_size", "n_embd", "n_hidden"])
def test_what_tensor_cores_cannot_multiply_is_said_at_the_start(name, dry, capsys):
    eights = ne.replace(TINY, n_embd=64, head_dim=32, n_hidden=128, vocab_size=264)
    for cfg, slow in ((eights, False), (ne.replace(eights, **{name: 257}), True)):
        model = blank(cfg, "bf16")
        model.micro_batch(8)
        model.micro_batch(4)
        said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
        assert len(said) == slow and all(f"{name} is 257" in line for line in said), said
        assert (f"{name} is 257" in model.device()) == slow


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
def test_what_imported_models_have_takes_tensor_cores(capability, dry, capsys):
    """Windows, norms of q and k, biases, and several heads of which one is tied"""
    dry.gpu.compute_capability = capability
    cfg = ne.replace(TINY, n_embd=64, head_dim=32, n_hidden=128, vocab_size=264, n_mtp=2,
                     tie_embeddings=True, qkv_bias=True, qk_norm=True, window=20)
    model = blank(cfg, "bf16")
    model.micro_batch(8)
    step(model, 2, cfg.seq_len)
    assert not model.without_tensor_cores() and "slower" not in capsys.readouterr().out
    names = {x.name for x in dry.launches}
    assert not names & {"matmul_kernel", "portable_attention_forward", "rope_kernel"}
    assert {"tensor_attention_forward_forward", "tensor_attention_dq_dq"} <= names


def test_options_of_llamas_are_not_said_to_be_slower(life, capsys):
    options = "--qkv-bias", "--qk-norm", "--window", 20
    assert verb("t", *life, *options, "--steps", 2) == 0
    assert verb("i", "It was", "--tokens", 5, "--weights", "bf16") == 0
    said = capsys.readouterr()
    assert "slower" not in said.out + said.err


def test_a_run_by_muon(life, capsys):
    """Its settings, its memory, and a resumed run"""
    assert verb("t", *life, "--momentum", 0.8, "--steps", 2) == 0
    said = capsys.readouterr().out
    assert "Muon             lr 0.008, momentum 0.8" in said and "Muon's matrices" in said
    assert verb("tr", "--steps", 3) == 0
    assert ne.read_checkpoint("nanoeuler.bin").state.options["newton_schulz"] == 5
    adamw = "--force", "--optimizer", "adamw"
    assert verb("t", *life, *adamw, "--momentum", 0.8, "--steps", 2) == 2
    assert "--momentum: this is a setting of Muon" in capsys.readouterr().err


def test_a_run_of_before_muon_is_resumed_by_adamw(life, monkeypatch):
    """Its checkpoint names no optimizer."""
    assert verb("t", *life, "--optimizer", "adamw", "--steps", 2) == 0
    c = ne.read_checkpoint("nanoeuler.bin")
    older = {name: x for name, x in c.state.options.items()
             if name not in {"optimizer", *ne.MUON_SETTINGS}}
    assert older.keys() < c.state.options.keys()
    older = c._replace(state=ne.replace(c.state, options=older))
    monkeypatch.setattr("nanoeuler_parts.checkpoint.file.read_checkpoint", lambda path: older)
    _, options = resumed(on_gpu.Run, "nanoeuler.bin", None, None, {"steps": 3})
    assert (options.optimizer, options.lr, options.weight_decay) == ("adamw", 6e-3, 1.0)


def test_the_program_takes_the_recipe_of_the_speedrun(life, monkeypatch):
    """Its flags; those of `life` come later, so the model is small."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from speedrun import RECIPE
    assert verb("t", *RECIPE, *life, "--steps", 2) == 0
    c = ne.read_checkpoint("nanoeuler.bin")
    assert c.cfg.n_mtp == 1 and c.state.options["optimizer"] == "muon"


def test_without_a_driver_the_tests_on_a_gpu_may_be_skipped(dry, monkeypatch):
    def missing():
        raise nc.CudaAPIError(999, "CUDA driver library cannot be found")

    monkeypatch.setattr(cuda, "current_context", missing)
    assert any(reason in nc.gpu_problem() for reason in MAY_BE_SKIPPED)


def test_a_gpu_for_which_nothing_compiles_is_a_problem_with_a_remedy(dry, monkeypatch):
    assert nc.gpu_problem() == ""

    def configure(kernel, key):
        raise OSError("libnvJitLink.so is not here")

    monkeypatch.setattr(Dispatcher, "__getitem__", configure)
    assert "libnvJitLink" in nc.gpu_problem() and nc.PIP in nc.gpu_problem()


def test_the_doctor_reads_nothing_that_nobody_wrote(dry, monkeypatch):
    """And waits: a kernel that fails says so when somebody waits for it."""
    read = nc.DeviceNDArray.copy_to_host
    waited = []
    monkeypatch.setattr(nc.DeviceNDArray, "copy_to_host",
                        lambda x, *rest, **kw: waited.append(x) or read(x, *rest, **kw))
    assert nc.gpu_problem() == ""
    [trial] = dry.launches
    assert {x.gpu_data.address for x in trial.args} <= dry.written
    assert waited == [trial.args[0]]


@pytest.mark.parametrize("name", ["current_context", "to_device"])
def test_a_gpu_that_another_program_fills_is_not_called_missing(name, dry, monkeypatch):
    def full(*_, **__):
        raise nc.CudaAPIError(2, "Call to a function results in CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(cuda, name, full)
    said = nc.gpu_problem()
    assert "OUT_OF_MEMORY" in said and "nvidia-smi" in said
    assert "driver" not in said and nc.PIP not in said


# ---- a machine without a driver, or without the packages
VERBS = [name for name, *_ in on_gpu.VERBS]
HIDDEN = dict(os.environ, CUDA_VISIBLE_DEVICES="")       # an NVIDIA GPU, if there is one
HIDDEN.pop("PYTHONPATH", None)


def gpu(*args, cwd, env=None):
    """In this environment from the first import on, or warm in HIDDEN."""
    program = "nanoeuler_cuda.py"
    started = command(*args, program=program) if env else warm_command(
        *args, program=program, modules=("nanoeuler_cuda",), env=HIDDEN)
    return subprocess.run(started, cwd=cwd, env=env or HIDDEN, timeout=100, text=True,
                          capture_output=True)


def test_verbs_are_those_of_the_docstring():
    """Each on a line that says what it does; without a verb, `test`."""
    line = r"^    python nanoeuler_cuda\.py( \w+)?(?: \S.*?)?  +\S.*$"
    lines, also = (re.findall(x, nc.__doc__, re.M) for x in (line, r"; (\w+) continues$"))
    said = [line.strip() or "test" for line in lines]
    assert len(said) == len(set(said)) and {*said, *also} == set(VERBS) and also == ["tr"]
    assert len(VERBS) == len(set(VERBS)) == 13


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_without_a_driver(verb, tmp_path):
    result = gpu(*filter(None, [verb, "It was" if verb == "i" else ""]), cwd=tmp_path)
    if verb != "doctor":
        assert complains(result, "GPU", "driver", "nanoeuler.py").startswith("nanoeuler: ")
        assert os.listdir(tmp_path) == []
        return
    assert result.returncode == 2 and result.stderr == ""
    for word in ("numba-cuda", "numpy", "nvidia-smi", "\nbroken: ", "driver"):
        assert word in result.stdout
    assert "Traceback" not in result.stdout


def test_an_unknown_verb_and_help(tmp_path):
    result = gpu("dance", cwd=tmp_path, env=HIDDEN)
    assert result.returncode == 2 and "'doctor'" in result.stderr
    result = gpu("lens", "x", cwd=tmp_path, env=HIDDEN)
    assert result.returncode == 2 and "lens is a verb of nanoeuler.py" in result.stderr
    result = gpu("--help", cwd=tmp_path)
    assert result.returncode == 0 and "doctor" in result.stdout and result.stderr == ""


@pytest.fixture
def without_numba_cuda(tmp_path):
    return lacking("numba_cuda", tmp_path)


@pytest.fixture
def without_numba(tmp_path):
    return lacking("numba", tmp_path)


def lacking(package, tmp_path):
    """The environment of an interpreter, to be started with -S, that lacks packages so called."""
    site = tmp_path / "site"
    site.mkdir()
    for folder in (p for p in sys.path if p.endswith("-packages")):
        for name in os.listdir(folder):
            if not name.lstrip("_").replace("-", "_").startswith(package):
                with contextlib.suppress(FileExistsError):
                    (site / name).symlink_to(os.path.join(folder, name))
    return dict(HIDDEN, PYTHONPATH=str(site))


def python(*args, cwd, env):
    return subprocess.run([sys.executable, *args], cwd=cwd, env=env, timeout=100, text=True,
                          capture_output=True)


def names_the_remedy(result, *words):
    """Without a driver, no package helps: that comes first."""
    text = result.stdout
    assert result.returncode == 2 and "Traceback" not in text + result.stderr, result
    assert "\nbroken: " in text and "pip install" in text and "numba-cuda[cu13]" in text
    assert all(word in text for word in words), text
    assert ("broken: no NVIDIA driver was found" in text) != doctor.has_driver(), text


@pytest.mark.parametrize("is_there", [True, False])
def test_a_missing_driver_is_reported_before_packages(is_there, monkeypatch):
    def load(name):
        if not is_there:
            raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(doctor.ctypes, "CDLL", load)
    said = doctor.with_remedy("numba-cuda is not installed")
    assert said.startswith("numba-cuda is not" if is_there else "no NVIDIA driver was found. ")
    assert said.endswith(f"numba-cuda is not installed; repair it with: {nc.PIP}")
    if not is_there:
        assert said.index("driver") < said.index("python nanoeuler.py") < said.index("pip")


@pytest.mark.parametrize("verb", ["doctor", slow(""), slow("t")])
def test_without_numba_cuda(verb, without_numba_cuda, tmp_path):
    args = [str(ROOT / "nanoeuler_cuda.py"), *filter(None, [verb])]
    result = python("-S", *args, cwd=tmp_path, env=without_numba_cuda)
    names_the_remedy(result, "numba-cuda is not installed", "numba-cuda       not installed")


def test_help_needs_no_numba_cuda(without_numba_cuda, tmp_path):
    """Of the program, where it says what is missing, and of a verb by both of its names."""
    program = str(ROOT / "nanoeuler_cuda.py")
    for words, said in ((["--help"], "numba-cuda is not installed"), (["t", "--help"], "--gpus"),
                        (["train", "--help"], "--gpus"), (["eval", "-h"], "--questions")):
        result = python("-S", program, *words, cwd=tmp_path, env=without_numba_cuda)
        assert result.returncode == 0 and said in result.stdout, (words, result)


@pytest.mark.parametrize("verb", ["doctor", slow(""), slow("t")])
def test_without_numba(verb, without_numba, tmp_path):
    """Which nanoeuler.py and bpe.py need as well."""
    args = [str(ROOT / "nanoeuler_cuda.py"), *filter(None, [verb])]
    result = python("-S", *args, cwd=tmp_path, env=without_numba)
    names_the_remedy(result, "No module named 'numba", "numba            not installed")


@pytest.fixture
def command_of_pip(tmp_path):
    """The command nanoeuler-cuda, as pip would make it."""
    path = tmp_path / "nanoeuler-cuda"
    path.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
                    "import nanoeuler; sys.exit(nanoeuler.main_on_gpu())", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("verb", ["t", slow("doctor")])
def test_the_installed_command_without_numba_cuda(verb, without_numba_cuda, command_of_pip,
                                                  tmp_path):
    result = python("-S", command_of_pip, verb, cwd=tmp_path, env=without_numba_cuda)
    names_the_remedy(result, ": numba-cuda is not", "numba-cuda       not installed")
    assert "UserError" not in result.stdout and "nanoeuler_cuda.py" not in result.stdout


TOO_NEW = {
    "import fails": """
import sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "numba.cuda":
            raise AttributeError("module 'numpy' has no attribute 'row_stack'")
sys.meta_path.insert(0, Finder)""",
    "NumPy 2.5": """
import numpy                                 # of what it dropped, numba-cuda 0.30 uses this
vars(numpy).pop("row_stack", None)"""}


@pytest.mark.parametrize("verb", ["doctor", slow(""), slow("g")])
@pytest.mark.parametrize("how", TOO_NEW)
def test_numpy_that_is_too_new(how, verb, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(TOO_NEW[how], encoding="utf-8")
    env = dict(HIDDEN, PYTHONPATH=str(tmp_path))
    result = gpu(*filter(None, [verb]), cwd=tmp_path, env=env)
    names_the_remedy(result, "AttributeError", "row_stack", "numpy>=2.1,<2.5")


def test_a_numba_cuda_whose_private_parts_nobody_knows(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("""
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: "0.31.0" if name == "numba-cuda" else version(name)
""", encoding="utf-8")
    result = gpu("doctor", cwd=tmp_path, env=dict(HIDDEN, PYTHONPATH=str(tmp_path)))
    names_the_remedy(result, "numba-cuda 0.30", "private parts")


def fault(function, *args):
    try:
        function(*args)
    except Exception as e:
        return e


@pytest.mark.parametrize("is_ours, found", [
    (True, lambda: fault(nc.view, None, 0, (1,))),       # an AttributeError, in this program's code
    (True, lambda: fault(__import__, "nanoeuler_parts.gpu.none")),
    (False, lambda: fault(np.ones(2).reshape, 3)),       # in this test
    (False, lambda: fault(json.loads, 5)),               # a TypeError, in the code of a package
    (False, lambda: fault(__import__, "numba_cuda_none")),
    (False, lambda: fault(ne.need, False, "a package is too old"))])
def test_whose_fault_it_is(is_ours, found):
    assert doctor.is_ours(found()) == is_ours


def test_a_fault_of_the_program_is_not_blamed_on_packages(tmp_path):
    """As after an edit: a name that another file still imports"""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, types; name = 'nanoeuler_parts.gpu.numbers'\n"
        "sys.modules[name] = types.ModuleType(name)\n", encoding="utf-8")
    result = gpu("doctor", cwd=tmp_path, env=dict(HIDDEN, PYTHONPATH=str(tmp_path)))
    assert result.returncode == 1 and "Traceback" in result.stderr
    assert "ImportError: cannot import name" in result.stderr
    assert "pip install" not in result.stderr


def test_importing_it_without_numba_cuda(without_numba_cuda, tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import nanoeuler_cuda"
    result = python("-S", "-c", code, cwd=tmp_path, env=without_numba_cuda)
    last = result.stderr.splitlines()[-1]
    assert result.returncode == 1 and last.startswith("ImportError: ") and nc.PIP in last


def test_verbs_have_long_names(capsys):
    """Those of nanoeuler.py, and two of its own"""
    names = {name for name, *_ in on_gpu.VERBS}
    assert {*on_gpu.LONG.values()} <= names and not names & {*on_gpu.LONG}
    assert {*on_gpu.LONG} - {name for name, *_ in cli.VERBS} == {"check", "resume"}
    for long, short in on_gpu.LONG.items():
        said = []
        for name in long, short:
            with pytest.raises(SystemExit):
                nc.main([name, "--help"])
            said.append(capsys.readouterr().out)
        assert said[0] == said[1] and f"also: {long}" in " ".join(said[0].split())
