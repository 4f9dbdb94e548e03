"""On a GPU: the program's own tests, equal bits, the CPU's numbers.  Skipped without one."""
import functools
import gzip
import importlib.util
import json
import subprocess
import sys
import time

import numpy as np
import pytest
from helpers import ROOT, TINY, command, nanoeuler, random_flat, sampled

if importlib.util.find_spec("numba_cuda") is None:
    pytest.skip("numba-cuda is not installed; it comes with the extra cuda",
                allow_module_level=True)

import nanoeuler as ne
import nanoeuler_cuda as nc
from nanoeuler_parts.tools import on_gpu
from nanoeuler_parts.selftests.bounds import errors, relative_error
from nanoeuler_parts.decode.prompts import BY_ROWS
from nanoeuler_parts.files.logs import read_log
from nanoeuler_parts.machine.numbers import from_bf16, to_bf16
from oracles import naive
from oracles.epilogues import Gated
from oracles.naive_attention import NaiveModel
from nanoeuler_parts.checkpoint.tensors import named
from nanoeuler_parts.gpu_lora import for_device, for_host, LoraModel as GpuLora
from nanoeuler_parts.kernels import compile_lora_kernels
from nanoeuler_parts.lora.adapter import Lora, n_entries, tensors_of
from nanoeuler_parts.lora.base import base_of_flat
from nanoeuler_parts.lora.files import read_run
from nanoeuler_parts.lora.model import Adapted as LoraStart, LoraModel as CpuLora
from nanoeuler_parts.runs.evaluation import evaluate
from nanoeuler_parts.runs.run import ESTIMATE

if problem := nc.gpu_problem():
    pytest.skip(problem, allow_module_level=True)

CFGS = {"tiny": TINY, "tied": ne.replace(TINY, tie_embeddings=True, n_mtp=3),
        "odd": ne.replace(TINY, n_embd=33, n_head=6, n_kv_head=2, head_dim=10, n_mtp=1, seq_len=70),
        "eights": ne.replace(TINY, n_embd=64, head_dim=32, n_hidden=128, vocab_size=264,
                             seq_len=200)}               # all that tensor cores ask for
CFGS["options"] = ne.replace(CFGS["eights"], n_head=4, n_kv_head=2, qkv_bias=True, qk_norm=True,
                             window=70, rope_scaling="yarn", rope_factor=4.0, rope_original=50,
                             rope_attention=1.2)
SIZE = {"bf16": np.float32, "f32": np.float32, "f64": np.float64}
configs = pytest.mark.parametrize("cfg", CFGS.values(), ids=CFGS)
ways = pytest.mark.parametrize("naive", [False, True], ids=["flash", "naive"])


def hyper(step, **muon):
    return ne.hyper_at(step, 1e-2, beta1=0.9, beta2=0.95, weight_decay=0.1, clip=1.0, **muon)


MUON = dict(muon_lr=0.02, momentum=0.9, newton_schulz=3, embedding_lr=4.0)


def batch(cfg, B, seed, T=None):
    """tokens (B, T), targets (P, B, T), some of them -1."""
    rng, T = np.random.default_rng(seed), T or cfg.seq_len
    return (rng.integers(0, cfg.vocab_size, (B, T), np.int32),
            rng.integers(-1, cfg.vocab_size, (cfg.n_mtp, B, T), np.int32))


def train(model, steps=3, **muon):
    """What a few steps of two micro-batches leave behind, as bytes."""
    out = []
    for step in range(1, steps + 1):
        for seed in range(2):
            tokens, targets = batch(model.cfg, 3, 10 * step + seed)
            model.gradient(tokens, targets, ne.loss_weights(targets, 0.3))
        ce, norm = model.update(hyper(step, **muon))
        assert np.isfinite(ce).all() and 0 < norm < np.inf
        out += [ce.tobytes(), np.float64(norm).tobytes()]
    return out + [x.tobytes() for x in model.buffers()]


def engine(cfg, dtype="f32", naive=False):
    return (NaiveModel if naive else nc.Model)(cfg, random_flat(cfg, 1, SIZE[dtype]), dtype=dtype)


def test_self_tests_pass(tmp_path):
    result = nanoeuler(cwd=tmp_path, program="nanoeuler_cuda.py", timeout=900)
    assert result.returncode == 0 and ">>> kernels OK" in result.stdout, (
        result.stdout + result.stderr)


def test_the_doctor_finds_the_gpu(tmp_path):
    result = nanoeuler("doctor", cwd=tmp_path, program="nanoeuler_cuda.py")
    assert result.returncode == 0 and "all is well" in result.stdout, result.stdout + result.stderr


def cli(*args):
    result = nanoeuler(*args, cwd=ROOT, program="nanoeuler_cuda.py", timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr


def kill_at(step, log, *args):
    """Starts the program and kills it, as a power cut would, when its log has come that far."""
    run = subprocess.Popen(command(*args, program="nanoeuler_cuda.py"), cwd=ROOT,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    began, seen = time.time(), 0
    while run.poll() is None and seen < step and time.time() - began < 300:
        if log.exists():
            whole = log.read_text("utf-8").rpartition("\n")[0].splitlines()
            seen = max([json.loads(line).get("step", 0) for line in whole], default=0)
        time.sleep(0.002)
    run.kill()
    assert run.wait() == -9 and step <= seen < 60, (run.returncode, seen)


@pytest.mark.timeout(900)
def test_a_killed_stage_ends_in_the_same_bytes(tmp_path):
    """Pretraining by Muon, fine-tuning and preferences, killed at step 20 of 60, and resumed."""
    def state(name):
        c = ne.read_checkpoint(str(tmp_path / name))
        return c.state.step, c.flat.tobytes(), [x.tobytes() for x in c.moments]

    often = ("--steps", 60, "--save-every", 5)
    # fewer than there are: each of the two runs that begin reads all of them first, four at a time
    pairs = (ROOT / "data/preferences_sample.jsonl").read_text(encoding="utf-8").splitlines()[:600]
    (tmp_path / "pairs.jsonl").write_text("\n".join(pairs), encoding="utf-8")
    for verb, again, source, data in (
            ("t", ["tr"], ["--preset", "small", "--batch", 4096],
             ROOT / "data/shakespeare.txt"),
            ("s", ["s", "--resume"], [tmp_path / "t.bin"], ROOT / "data/instructions.json"),
            ("d", ["d", "--resume"], [tmp_path / "s.bin"], tmp_path / "pairs.jsonl")):
        args = (verb, *source, "--data", data, *often)
        cli(*args, "--out", tmp_path / f"{verb}.bin")
        kill_at(20, tmp_path / f"{verb}2.jsonl", *args, "--out", tmp_path / f"{verb}2.bin")
        cli(*again, "--out", tmp_path / f"{verb}2.bin")
        assert state(f"{verb}2.bin") == state(f"{verb}.bin") and state(f"{verb}.bin")[0] == 60


def test_both_programs_take_the_same_steps(tmp_path):
    """The float32 losses of 50 steps; gpu_proof.py has 200, float64 and a control beside it."""
    args = ("--data", ROOT / "data/shakespeare.txt", "--steps", 50, "--batch", 2048, "--lr", 3e-3,
            "--warmup", 50, "--holdout", 0.1, "--weight-decay", 0.3)
    the_same = "--optimizer", "adamw", "--dtype", "f32", *args
    cli("t", "--preset", "small", *the_same, "--out", tmp_path / "gpu.bin")
    result = nanoeuler("train", "small", *the_same, "--mtp-until", 1, "--out",
                       tmp_path / "cpu.bin", cwd=ROOT)
    assert result.returncode == 0, result.stderr
    gpu, cpu = ([r["loss"] for r in read_log(str(tmp_path / name)) if "loss" in r]
                for name in ("gpu.jsonl", "cpu.jsonl"))
    assert len(gpu) == len(cpu) == 50 and cpu[-1] < cpu[0] - 1
    assert np.abs(np.subtract(gpu, cpu)).max() < 5e-5


@pytest.mark.parametrize("cfg", [CFGS["odd"], CFGS["eights"]], ids=["odd", "eights"])
@pytest.mark.parametrize("dtype, bound", [("f64", 1e-10), ("f32", 1e-3), ("bf16", 0.1)])
def test_muon_is_that_of_the_cpu(cfg, dtype, bound):
    """Three steps with the same gradients, of a few strong directions as real ones are.  The bound
    is on the error of what each tensor has moved: three Newton-Schulz steps multiply an error by up
    to 3.4 each."""
    flat = random_flat(cfg, 1, np.float64)
    cpu, gpu = ne.Model(cfg, flat.copy()), nc.Model(cfg, flat.astype(SIZE[dtype]), dtype=dtype)
    rng, before = np.random.default_rng(2), named(cfg, gpu.buffers()[0].astype(np.float64))
    for step in range(1, 4):
        g = rng.standard_normal(flat.size)
        for x in named(cfg, g).values():
            if x.ndim == 2:
                x += 9 * np.outer(rng.standard_normal(len(x)), rng.standard_normal(x.shape[1]))
        cpu.g_flat[:] = g
        gpu.g_flat.copy_to_device(g.astype(gpu.master))
        gpu.add = True                       # as after `gradient`
        _, expected = cpu.update(hyper(step, **MUON))
        _, norm = gpu.update(hyper(step, **MUON))
        assert norm == pytest.approx(expected, rel=1e-6) and not gpu.add
    ends = nc.to_host(gpu.flat).astype(np.float64)
    for name, x in named(cfg, ends).items():
        y = named(cfg, cpu.flat)[name]
        assert relative_error(x, y) < bound * relative_error(y, before[name]), name


def test_a_run_by_muon_goes_on_in_the_other_program(tmp_path):
    """Both programs resume a checkpoint of either, with its moments and settings."""
    args = ("--data", ROOT / "data/shakespeare.txt", "--batch", 2048, "--muon-lr", 0.02, "--steps",
            8, "--dtype", "f32")
    cli("t", "--preset", "small", *args, "--out", tmp_path / "gpu.bin")
    cpu = nanoeuler("train", "small", *args, "--out", tmp_path / "cpu.bin", cwd=ROOT)
    assert cpu.returncode == 0, cpu.stderr
    cli("tr", "--steps", 12, "--out", tmp_path / "cpu.bin")
    said = nanoeuler("train", "--resume", "--steps", 12, "--out", tmp_path / "gpu.bin", cwd=ROOT)
    assert said.returncode == 0, said.stderr
    for name in ("cpu", "gpu"):
        c = ne.read_checkpoint(str(tmp_path / f"{name}.bin"))
        m, v = (ne.views(x, ne.param_table(c.cfg)) for x in c.moments)
        assert c.state.step == 12 and m.qkv.any() and not v.qkv.any() and v.wte.any()
        log = [r["loss"] for r in read_log(str(tmp_path / f"{name}.jsonl")) if "loss" in r]
        assert len(log) == 12 and max(log[8:]) < log[0]


def test_eval_is_that_of_the_cpu_and_init_begins_there(tmp_path):
    """Train on a folder of two formats, measure a text and questions, continue on that text.  The
    validation before step 1 is that of the checkpoint, bit for bit."""
    text = (ROOT / "data/shakespeare.txt").read_text(encoding="utf-8")
    (tmp_path / "books").mkdir()
    (tmp_path / "books/a.txt.gz").write_bytes(gzip.compress(text[:300_000].encode()))
    (tmp_path / "books/b.jsonl").write_text(json.dumps({"text": text[300_000:400_000]}), "utf-8")
    (tmp_path / "new.txt").write_text(text[500_000:540_000], "utf-8")
    (tmp_path / "q.jsonl").write_text(json.dumps({"prompt": "To be, or", "answer": 0, "choices": [
        "not to be", "a tree"]}) + "\n" + json.dumps({"prompt": "ROMEO", "answer": ":"}), "utf-8")
    small = "--preset", "small", "--batch", 2048, "--dtype", "f32"
    cli("t", *small, "--data", tmp_path / "books", "--steps", 30, "--out", tmp_path / "a.bin")
    measured = "eval", tmp_path / "a.bin", "--data", tmp_path / "new.txt", "--questions", (
        tmp_path / "q.jsonl"), "--dtype", "f32", "--tokens", 8
    cli(*measured, "--json", tmp_path / "gpu.json")
    result = nanoeuler(*measured, "--json", tmp_path / "cpu.json", cwd=ROOT)
    assert result.returncode == 0, result.stderr
    gpu, cpu = (json.loads((tmp_path / name).read_text("utf-8")) for name in (
        "gpu.json", "cpu.json"))
    assert gpu["texts"]["total"] == pytest.approx(cpu["texts"]["total"], rel=1e-5)
    for one, other in zip(gpu["questions"]["results"], cpu["questions"]["results"], strict=True):
        assert one["reply"] == other["reply"] and one["correct"] == other["correct"]
        assert one.get("log_likelihoods", []) == pytest.approx(
            other.get("log_likelihoods", []), rel=1e-4)
    cli("t", "--init", tmp_path / "a.bin", "--data", tmp_path / "new.txt", "--batch", 2048,
        "--steps", 2, "--out", tmp_path / "b.bin")
    a, b = (ne.read_checkpoint(str(tmp_path / name)) for name in ("a.bin", "b.bin"))
    assert b.cfg == a.cfg and b.state.step == 2
    options = on_gpu.Run.Options(data=str(tmp_path / "new.txt"), steps=2, batch=2048).check()
    data = on_gpu.Run(str(tmp_path / "x.bin"), a._replace(moments=(), state=ne.State()), options,
                  nc.Model).data
    model = nc.Model(a.cfg, a.flat, options=options)
    want = evaluate(model, *data.validation, ESTIMATE, b.state.micro_batch)
    assert read_log(str(tmp_path / "b.jsonl"))[0]["val_bits_per_byte"] == want


@pytest.mark.parametrize("dtype, bound", [("f64", 1e-12), ("f32", 1e-5), ("bf16", 0.1)])
def test_each_token_may_have_a_weight_of_its_own(dtype, bound):
    """As `rl` needs it: negative ones and zeros, in steps that alternate with weights of rows.
    Weights that are the same along a row give the bits of a weight of the row."""
    cfg, rng = CFGS["odd"], np.random.default_rng(1)
    flat, (tokens, targets) = random_flat(cfg, 1, scale=0.1), batch(CFGS["odd"], 3, 2)
    shape = len(tokens), cfg.n_mtp, tokens.shape[1]
    weight = rng.standard_normal(shape) * (rng.random(shape) < 0.7)
    cpu = ne.Model(cfg, flat)
    gpu = nc.Model(cfg, flat.astype(SIZE[dtype]), dtype=dtype)
    of_rows = ne.loss_weights(targets, 0.3)
    for model in (cpu, gpu):
        model.gradient(tokens, targets, weight)
        model.gradient(tokens, targets, of_rows)
        model.gradient(tokens, targets, weight)
    assert relative_error(nc.to_host(gpu.g_flat), cpu.g_flat) < bound
    assert relative_error(gpu.token_losses(tokens, targets[0]),
                          cpu.token_losses(tokens, targets[0])) < bound
    fresh = [nc.Model(cfg, flat.astype(SIZE[dtype]), dtype=dtype) for _ in range(2)]
    for model, given in zip(fresh, (np.ones(shape) * np.reshape(of_rows, (-1, cfg.n_mtp, 1)),
                                    of_rows)):
        model.gradient(tokens, targets, given)
    assert np.array_equal(*(nc.to_host(model.g_flat) for model in fresh))


def test_rewards_are_learned_and_a_killed_run_ends_in_the_same_bytes(tmp_path):
    """The bundled model, rewarded for long answers"""
    asked = [dict(instruction=f"Name {n} colors.", output="") for n in range(2, 60)]
    (tmp_path / "q.json").write_text(json.dumps(asked), encoding="utf-8")
    args = ("bundled", "--data", tmp_path / "q.json", "--reward", "length", "--steps", 8,
            "--batch", 32, "--tokens", 24, "--lr", 1e-4, "--save-every", 2)
    cli("r", *args, "--out", tmp_path / "a.bin")
    kill_at(4, tmp_path / "b.jsonl", "r", *args, "--out", tmp_path / "b.bin")
    cli("r", "--resume", "--out", tmp_path / "b.bin")
    a, b = (ne.read_checkpoint(str(tmp_path / name)) for name in ("a.bin", "b.bin"))
    assert a.state.step == b.state.step == 8 and a.flat.tobytes() == b.flat.tobytes()
    rewards = [r["reward"] for r in read_log(str(tmp_path / "a.jsonl")) if "reward" in r]
    assert len(rewards) == 8 and np.ptp(rewards) > 0


@configs
@pytest.mark.parametrize("dtype, bound", [("f64", 1e-12), ("f32", 3e-5), ("bf16", 0.1)])
def test_an_adapter_learns_as_on_the_cpu(cfg, dtype, bound):
    """The gradient, losses and three updates of LoraModel.  Ranks that tensor cores take and do not
    take; all targets and some.  B^T stays zero outside of its blocks."""
    cfg, flat = ne.replace(cfg, n_mtp=1), random_flat(ne.replace(cfg, n_mtp=1), 1, scale=0.1)
    for lora in Lora(8, 4.0), Lora(3, 6.0, ("q", "v", "up")):
        compile_lora_kernels("f64")
        rng, adapter = np.random.default_rng(2), np.zeros(n_entries(cfg, lora.rank))
        for a, b in tensors_of(cfg, lora, adapter).values():
            a[...], b[...] = (0.2 * rng.standard_normal(x.shape) for x in (a, b))
        cpu = CpuLora(cfg, LoraStart(base_of_flat(cfg, flat), lora, adapter.copy()))
        gpu = GpuLora(cfg, LoraStart(base_of_flat(cfg, flat.astype(SIZE[dtype])), lora,
                                     adapter.astype(SIZE[dtype])), dtype=dtype)
        for step in range(1, 4):
            for seed in range(2):
                tokens, targets = batch(cfg, 3, 10 * step + seed)
                for model in (cpu, gpu):
                    model.gradient(tokens, targets, ne.loss_weights(targets, 0.3))
            if step == 1:
                g = for_host(cfg, lora.rank, nc.to_host(gpu.g_flat))
                assert relative_error(g, cpu.g_flat) < bound
                assert relative_error(gpu.token_losses(tokens, targets[0]),
                                      cpu.token_losses(tokens, targets[0])) < bound
            (ce, norm), (want, norm_of_cpu) = gpu.update(hyper(step)), cpu.update(hyper(step))
            assert relative_error(ce, want) < bound and abs(norm / norm_of_cpu - 1) < bound
        found = nc.to_host(gpu.flat)
        assert np.array_equal(found, for_device(cfg, lora.rank, for_host(cfg, lora.rank, found)))
        if dtype != "bf16":                  # AdamW divides a gradient by its size, so that the
                                             # errors of small ones grow
            assert relative_error(gpu.buffers()[0], cpu.flat) < 20 * bound
        single = [x.astype(np.float32) for x in (flat, cpu.flat)]    # decoders have no float64
        after = CpuLora(cfg, LoraStart(base_of_flat(cfg, single[0]), lora, single[1]))
        got, want = (model.decoder().read([ne.Part(0, [1, 2, 3], 1)]) for model in (gpu, after))
        assert relative_error(np.asarray(got), np.asarray(want)) < max(bound, 1e-4)


def test_a_killed_run_with_an_adapter_ends_in_the_same_bytes(tmp_path):
    sums = [dict(instruction=f"Add {a} and {b}.", output="?") for a in range(90) for b in "12"]
    (tmp_path / "add.json").write_text(json.dumps(sums), encoding="utf-8")
    args = ("s", "bundled", "--data", tmp_path / "add.json", "--lora", 16, "--steps", 40,
            "--save-every", 5, "--rehearse", 0)
    cli(*args, "--out", tmp_path / "a")
    kill_at(20, tmp_path / "b" / "run.jsonl", *args, "--out", tmp_path / "b")
    cli("s", "--resume", "--out", tmp_path / "b")
    a, b = (read_run(str(tmp_path / name / "run.bin")) for name in "ab")
    assert a.state.step == b.state.step == 40 and a.flat.tobytes() == b.flat.tobytes()
    losses = [r["loss"] for r in read_log(str(tmp_path / "a" / "run.jsonl")) if "loss" in r]
    assert losses[-1] < losses[0]


def gradient_errors(cfg, dtype, naive):
    """nc.errors of each tensor and of the losses, where no gradient is all cancellation."""
    flat, (tokens, targets) = random_flat(cfg, 1, scale=0.1), batch(cfg, 3, 2)
    cpu, weight = ne.Model(cfg, flat), ne.loss_weights(targets, 0.3)
    gpu = (NaiveModel if naive else nc.Model)(cfg, flat.astype(SIZE[dtype]), dtype=dtype)
    for model in (cpu, gpu):
        model.gradient(tokens, targets, weight)
    host = nc.to_host(gpu.g_flat)
    out = {name: errors(x, y)
           for name, x, y in zip(cpu.g._fields, ne.views(host, gpu.table), cpu.g, strict=True)}
    out["losses"] = errors(gpu.update(hyper(1))[0], cpu.update(hyper(1))[0])
    return out


@pytest.mark.parametrize("chunk", [None, 7], ids=["whole", "chunks"])
@configs
@ways
def test_gradient_of_the_whole_model(cfg, naive, chunk, monkeypatch):
    """A chunk of logits holds 384 MB: no small model needs a second one unless it is told to."""
    if chunk:
        monkeypatch.setattr(nc, "rows_per_chunk", lambda cfg, BT, itemsize: min(BT, chunk))
    # bf16: PyTorch's autocast on a CPU is off by 0.024 at most, 6 roundoffs, for such weights
    for dtype, most in (("f64", 1e-10), ("f32", 1e-4), ("bf16", 0.1)):
        errors = gradient_errors(cfg, dtype, naive)
        assert all(error < most for pair in errors.values() for error in pair), errors
        assert dtype != "bf16" or errors["losses"][0] < 0.02, errors


@configs
@ways
def test_what_is_made_again_is_what_was_made(cfg, naive):
    """The same bits, but where the trajectory that is kept is one of bfloat16: then as close as
    any gradient of bfloat16 is."""
    Model, made = NaiveModel if naive else nc.Model, {}
    for dtype in SIZE:
        flat = random_flat(cfg, 1, SIZE[dtype], scale=0.1)
        for recompute in False, True:
            model = Model(cfg, flat, dtype=dtype, recompute=recompute)
            assert model.kept == (1 if recompute else cfg.n_layer)
            if dtype == "bf16":
                tokens, targets = batch(cfg, 3, 2)
                model.gradient(tokens, targets, ne.loss_weights(targets, 0.3))
                made[recompute] = ne.views(nc.to_host(model.g_flat), model.table)
            else:
                made[recompute] = train(model)
        if dtype != "bf16":
            assert made[True] == made[False]
            continue
        for x, y in zip(made[True], made[False], strict=True):
            assert all(error < 0.1 for error in errors(x, y))


@ways
@pytest.mark.parametrize("dtype", SIZE)
@pytest.mark.parametrize("name", ["tiny", "eights"])
def test_a_replayed_graph_computes_the_same_bits(name, dtype, naive, monkeypatch):
    monkeypatch.setattr(nc.Graph, "enabled", False)
    plain = train(engine(CFGS[name], dtype, naive))
    monkeypatch.setattr(nc.Graph, "enabled", True)
    model = engine(CFGS[name], dtype, naive)
    assert train(model) == plain
    graphs = [*model.gradient_graphs.values(), *model.updates.values()]
    assert sum(graph.graph is not None for graph in graphs) == 3     # g is set, added to, used


@pytest.mark.parametrize("dtype", SIZE)
@pytest.mark.parametrize("name", ["odd", "eights"])
def test_muon_computes_the_same_bits_twice_and_in_a_graph(name, dtype, monkeypatch):
    monkeypatch.setattr(nc.Graph, "enabled", False)
    plain = train(engine(CFGS[name], dtype), **MUON)
    monkeypatch.setattr(nc.Graph, "enabled", True)
    for _ in range(2):
        model = engine(CFGS[name], dtype)
        assert train(model, **MUON) == plain
        assert [graph.graph is not None for graph in model.updates.values()] == [True]


@configs
@ways
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_two_runs_compute_the_same_bits(cfg, dtype, naive):
    assert train(engine(cfg, dtype, naive)) == train(engine(cfg, dtype, naive))


@pytest.mark.parametrize("path", ["mma", "wgmma"])
def test_a_new_epilogue_computes_what_it_says(path):
    """out = 2 silu(x) A B, in bfloat16, at and beyond the edges of tiles"""
    if nc.kernel_path(path) != path:
        pytest.skip(f"this GPU has no {path}")
    nc.open_device()
    rng = np.random.default_rng(1)
    for M, N, K in (8, 8, 8), (128, 256, 64), (304, 264, 104):
        a, b, x = (to_bf16(rng.standard_normal(shape)) for shape in ((M, K), (N, K), (M, N)))
        out = nc.new((M, N), np.uint16)
        arrays = [nc.to_device(y) for y in (a, b, x)]
        nc.make_ops(path).product(out, *arrays[:2], epilogue=Gated(2.0), x=arrays[2])
        a, b, x = (from_bf16(y).astype(np.float64) for y in (a, b, x))
        # one rounding to bfloat16, and an exponential with an error of 2^-22
        norm, largest = errors(from_bf16(nc.to_host(out)), 2 * x / (1 + np.exp(-x)) * (a @ b.T))
        assert norm < 1.25 * 2.0 ** -8 and largest < 1.5 * 2.0 ** -8


def bf16_on_device(rng, *shape):
    return nc.to_device(to_bf16(rng.standard_normal(shape, np.float32)))


@pytest.mark.parametrize("a_mn, b_mn", [(False, False), (False, True), (True, True)])
def test_tiles_of_each_width_have_the_same_bits(a_mn, b_mn, monkeypatch):
    """A prompt must not depend on how wide the tiles of its products are."""
    if nc.kernel_path() != "wgmma":
        pytest.skip("narrow tiles are of path wgmma")
    from nanoeuler_parts.tensor_cores import matmul_wgmma
    nc.open_device()
    rng, found = np.random.default_rng(1), []
    M, N, K = 200, 328, 712
    a = bf16_on_device(rng, *((K, M) if a_mn else (M, K)))
    b = bf16_on_device(rng, *((K, N) if b_mn else (N, K)))
    for columns in 256, 128, 64:
        monkeypatch.setattr(matmul_wgmma, "tile_columns", lambda *args, columns=columns: columns)
        out = bf16_on_device(rng, M, N)
        nc.make_ops("wgmma").product(out, a, b, a_mn, b_mn)
        found.append(nc.to_host(out))
    assert all(np.array_equal(found[0], x) for x in found[1:])
    a, b = (from_bf16(nc.to_host(x)).astype(np.float64) for x in (a, b))
    want = (a.T if a_mn else a) @ (b if b_mn else b.T)
    assert relative_error(from_bf16(found[0]), want) < 4e-3


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("D, path", [(32, "mma"), (64, "mma"), (64, "wgmma")])
def test_blocks_of_one_and_of_two_tiles_have_the_same_bits(D, path, window):
    """Attention of a short sequence has one tile of Q per block, that of training has two."""
    if path == "wgmma" != nc.kernel_path():
        pytest.skip("this GPU does not have path wgmma")
    from nanoeuler_parts.tensor_cores import attention
    nc.open_device()
    rng, (B, T, H, G), found = np.random.default_rng(1), (2, 320, 4, 2), []
    qkv = bf16_on_device(rng, B * T, (H + 2 * G) * D)
    ops, hopper = nc.make_ops(path), path == "wgmma"
    operand = functools.partial(ops.map_of, box_rows=64) if hopper else nc.unchanged
    for tiles in 1, 2:
        o, lse = nc.new((B * T, H * D), np.uint16), nc.new((H, B * T), np.float32)
        kernels = attention.tensor_attention(D, hopper, operand, window, tiles)
        nc.attention_forward(o, lse, qkv, T, D, window, kernels)
        found.append([nc.to_host(o), nc.to_host(lse)])
    assert all(np.array_equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize("muon", [{}, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_gradient_leaves_everything_as_it_was(bad, muon):
    model = engine(TINY)
    train(model, **muon)
    model.gradient(*batch(TINY, 3, 5), np.ones(TINY.n_mtp))
    before = [x.copy() for x in model.buffers()]
    g = nc.to_host(model.g_flat)
    g[g.size // 2] = bad
    model.g_flat.copy_to_device(g, stream=nc.gpu.stream)
    _, norm = model.update(hyper(4, **muon))
    assert not np.isfinite(norm)
    for x, y in zip(model.buffers(), before):
        assert np.array_equal(x, y)
    assert "gradient" in model.first_bad_tensor() and str(bad) in model.first_bad_tensor()


@configs
@pytest.mark.parametrize("dtype, tolerance", [("f32", 1e-5), ("f64", 1e-12)])
def test_losses_are_those_of_the_cpu(cfg, dtype, tolerance):
    tokens, targets = batch(cfg, 7, 3)
    cpu = ne.Model(cfg, random_flat(cfg, 1))
    expected = cpu.losses(tokens, targets[0])
    model = nc.Model(cfg, random_flat(cfg, 1).astype(SIZE[dtype]), dtype=dtype)
    assert model.losses(tokens, targets[0]) == pytest.approx(expected, rel=tolerance)
    model.gradient(tokens[:3], targets[:, :3], np.ones(cfg.n_mtp))     # filled up
    for _ in range(2):                       # now from the graph
        assert model.losses(tokens, targets[0]) == pytest.approx(expected, rel=tolerance)
    assert model.loss_graph.graph is not None
    ce, _ = model.update(hyper(1))           # the evaluation did not add to the step's loss
    cpu.gradient(tokens[:3], targets[:, :3], np.ones(cfg.n_mtp))
    assert ce == pytest.approx(cpu.update(hyper(1))[0], rel=tolerance)


def forward_logits(model, tokens):
    """(T, V) of head 0 of one sequence, by the forward pass of training."""
    cfg, T = model.cfg, len(tokens)
    model.prepare(1, T)
    model.stage(tokens[None], np.full((cfg.n_mtp, 1, T), -1, np.int32), np.ones(cfg.n_mtp))
    model.forward()
    head = model.p.wte if cfg.tie_embeddings else model.p.lm_head[0]
    out = nc.new((T, cfg.vocab_size), model.dtype)
    model.ops.matmul(out, model.a.y, head)
    return nc.to_host(out)


@configs
@pytest.mark.parametrize("dtype, tolerance", [("f32", 1e-5), ("f64", 1e-12)])
def test_a_decoder_computes_the_logits_of_the_forward_pass(cfg, dtype, tolerance):
    model, (tokens, _) = engine(cfg, dtype), batch(cfg, 1, 4)
    decoder = model.decoder()
    logits = np.array([decoder.step(int(t)).copy() for t in tokens[0]])
    assert np.ptp(logits) > 0.1              # they say something
    assert relative_error(logits, forward_logits(model, tokens[0])) < tolerance


def test_a_full_context_slides_as_on_the_cpu():
    flat, (tokens, _) = random_flat(TINY, 1), batch(TINY, 1, 6, T=3 * TINY.seq_len)
    cpu, gpu = ne.Decoder(TINY, flat), nc.Decoder(TINY, flat)
    for t in tokens[0]:
        expected = cpu.step(int(t)).copy()
        assert relative_error(gpu.step(int(t)), expected) < 1e-12
    assert gpu.tokens == cpu.tokens


@pytest.mark.parametrize("weights, tolerance", [("f32", 1e-5), ("bf16", 3e-5)])
def test_a_llama_of_other_settings_decodes_as_on_the_cpu(weights, tolerance):
    """Other theta, eps and head size, tied; bf16 matrices are the CPU's bf16 matrices."""
    cfg = ne.replace(TINY, tie_embeddings=True, rope_theta=123456.0, norm_eps=1e-3, head_dim=10,
                     seq_len=40, n_mtp=1)
    flat, (tokens, _) = random_flat(cfg, 1, np.float32), batch(cfg, 1, 6, T=30)
    gpu = nc.make_decoder(cfg, flat, weights)
    if weights == "bf16":                    # a CPU that multiplies bfloat16 rounds its rows, too
        matrices = flat[:sum(w.size for w in ne.views(flat, ne.param_table(cfg))[ne.MATRICES])]
        matrices[:] = from_bf16(to_bf16(matrices))
    cpu = ne.Decoder(cfg, flat)
    for t in tokens[0]:
        expected = cpu.step(int(t)).copy()
        assert relative_error(gpu.step(int(t)), expected) < tolerance


# ---- options of other Llamas: contexts longer than the window, and than RoPE was trained for
LLAMA = ne.replace(TINY, n_embd=64, n_head=4, n_kv_head=2, head_dim=32, n_hidden=128, seq_len=96,
                   vocab_size=264, n_mtp=1)
OPTIONS = {
    "biases": {"qkv_bias": True}, "norms of q and k": {"qk_norm": True}, "window": {"window": 9},
    "linear": {"rope_scaling": "linear", "rope_factor": 4.0},
    "llama3": {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original": 24},
    "yarn": {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original": 24,
             "rope_attention": 1.2}}
OPTIONS["all"] = {k: v for name in ("biases", "norms of q and k", "window", "yarn")
                  for k, v in OPTIONS[name].items()}
options = pytest.mark.parametrize("chosen", OPTIONS.values(), ids=OPTIONS)
ACCURACY = 1e-4                              # of a logit in float32; the logits are about 2


def llama(chosen):
    """A model with these options, and its parameters"""
    cfg = ne.replace(LLAMA, **chosen).check()
    return cfg, random_flat(cfg, 2, np.float32, 0.2)


def without(cfg, flat, name):
    """The same without one option, which is also none of RoPE's parameters"""
    other = ne.replace(cfg, **{name: ne.Config.__dataclass_fields__[name].default})
    left = ne.aligned((ne.n_params(other),), np.float32)
    for to, x in zip(ne.views(left, ne.param_table(other)), ne.views(flat, ne.param_table(cfg)),
                     strict=True):
        if to.size:
            to[:] = x
    return other, left


def logits_of(decoder, tokens):
    return np.array([decoder.step(token).copy() for token in tokens])


@options
def test_other_llamas_decode_as_on_the_cpu(chosen):
    """Each option matters: without it the logits are others."""
    (cfg, flat), tokens = llama(chosen), batch(LLAMA, 1, 6)[0][0].tolist()
    want, got = (logits_of(x.Decoder(cfg, flat), tokens) for x in (ne, nc))
    assert np.abs(got - want).max() < ACCURACY < np.abs(want).mean() / 1000
    for name in {"qkv_bias", "qk_norm", "window", "rope_scaling"} & set(chosen):
        left = logits_of(nc.Decoder(*without(cfg, flat, name)), tokens)
        assert np.abs(left - want).max() > 100 * ACCURACY


@options
@pytest.mark.parametrize("weights", ["f32", "bf16"])
def test_other_llamas_say_what_the_cpu_says(weights, chosen):
    """bf16 matrices are the CPU's float32 matrices, rounded.  The two most probable tokens are
    never closer than 0.001."""
    cfg, flat = llama(chosen)
    gpu = nc.make_decoder(cfg, flat, weights)
    if weights == "bf16":
        assert gpu.rows_are_cheap
        matrices = flat[:sum(w.size for w in ne.views(flat, ne.param_table(cfg))[ne.MATRICES])]
        matrices[:] = from_bf16(to_bf16(matrices))
    want, got = (sampled(x, [1, 2, 3], 90, None, ne.Sampling(temperature=0.0))
                 for x in (ne.Decoder(cfg, flat), gpu))
    assert got == want


@options
def test_slots_of_other_llamas(chosen):
    """Several slots, taken back, copied and filled until they slide, token by token and in pieces.
    The CPU's slots are rings; these have all tokens."""
    (cfg, flat), ids = llama(chosen), batch(LLAMA, 1, 7, T=150)[0][0].tolist()
    cpu, gpu = ne.Decoder(cfg, flat, slots=3), nc.Decoder(cfg, flat, slots=3)
    for decoder in cpu, gpu:
        decoder.read([ne.Part(0, ids[:60]), ne.Part(2, ids[30:70])])
        assert decoder.copy(0, 1, 40) == 40 and decoder.truncate(50) == 50
        assert decoder.copy(2, 2, 40) == 40
    for step in ([(0, 50, 52), (1, 40, 43)], [(1, 43, 90), (2, 70, 71), (0, 52, 53)],
                 [(0, 53, 120), (1, 90, 91)]):
        parts = [ne.Part(slot, ids[i:j], j - i) for slot, i, j in step]
        want, got = (decoder.read(parts).copy() for decoder in (cpu, gpu))
        assert np.abs(got - want).max() < ACCURACY and gpu.held_ids == cpu.held_ids


# ---- rows on tensor cores
ROWS = ne.replace(TINY, n_embd=72, n_head=6, n_kv_head=2, head_dim=32, n_hidden=136, seq_len=300,
                  vocab_size=101, n_mtp=3)


def rows_decoder(slots=1, cfg=ROWS):
    return nc.make_decoder(cfg, random_flat(cfg, 2, np.float32, 0.1), "bf16", slots=slots)


def rounded_flat(cfg):
    """Parameters whose matrices bfloat16 has as they are"""
    flat = random_flat(cfg, 2, np.float32, 0.1)
    matrices = sum(x.size for x in ne.views(flat, ne.param_table(cfg))[ne.MATRICES])
    flat[:matrices] = from_bf16(to_bf16(flat[:matrices]))
    return flat


def row_error(x, y):
    """The largest |x - y| / |y| of a row"""
    return max(relative_error(a, b) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("first", [1, BY_ROWS, 100], ids=["token", "rows", "prompt"])
def test_rows_have_the_same_bits_beside_any_others(first):
    """Behind what begins the slot: token by token, many, in pieces, and in a slot beside others."""
    ids = [batch(ROWS, 1, seed)[0][0].tolist() for seed in range(11)]
    alone = rows_decoder()
    want = [*alone.read([ne.Part(0, ids[0][:first], first)]).copy()]
    want = np.array([*want, *(alone.step(token).copy() for token in ids[0][first:])])
    alone.truncate(first)
    rest = ids[0][first:]
    assert np.array_equal(alone.read([ne.Part(0, rest, len(rest))]), want[first:])
    many, at = rows_decoder(slots=11), 0
    for n in (first, 7, 25, 1, 150, 116 - first, 1):
        n = min(n, 300 - at) or 1
        order = [*range(1, 11)]
        order.insert(at % 11, 0)
        parts = [ne.Part(slot, ids[slot][at:at + n], n) for slot in order]
        got = many.read(parts).reshape(11, n, -1)[order.index(0)]
        assert np.array_equal(got, want[at:at + n])
        at += n
    assert at == 300


def test_a_step_of_more_texts_than_a_graph_has_rows():
    ids, many, alone = batch(ROWS, 70, 3, T=6)[0], rows_decoder(slots=70), rows_decoder()
    got = np.array([many.read([ne.Part(slot, [token]) for slot, token in enumerate(column)]).copy()
                    for column in ids.T.tolist()])
    for slot in (0, 7, 8, 63, 64, 69):
        alone.truncate(0)
        want = [alone.step(token).copy() for token in ids[slot].tolist()]
        assert np.array_equal(got[:, slot], want)


PROMPTS = {"heads of 32": ROWS, "heads of 64": ne.replace(ROWS, head_dim=64, tie_embeddings=True),
           "heads of 48": ne.replace(ROWS, head_dim=48, n_mtp=1), "one layer, one head": ne.replace(
               ROWS, n_layer=1, n_head=1, n_kv_head=1, head_dim=128, seq_len=1000)}


@pytest.mark.parametrize("cfg", PROMPTS.values(), ids=PROMPTS)
def test_a_prompt_is_the_forward_pass_in_bfloat16(cfg):
    """At every position.  Ten numbers a layer are rounded to bfloat16 before the logits, by at most
    2^-9 each: NumPy, which rounds the same ones, says what that does to these logits, 0.7 % of
    most, 1.4 % of the worst row.  Probabilities in attention are rounded besides."""
    flat, (tokens, _) = rounded_flat(cfg), batch(cfg, 1, 4)
    p, ids = ne.views(flat.astype(np.float64), ne.param_table(cfg)), tokens[0].tolist()

    def stored(x):
        return from_bf16(to_bf16(x.astype(np.float32))).astype(np.float64)
    want, rounded = (naive.forward(cfg, p, tokens[0], *way)[1][0] for way in ((), (stored,)))
    most = 2 * row_error(rounded, want)
    assert 0.002 < most < 0.05
    decoder, T = nc.make_decoder(cfg, flat, "bf16"), cfg.seq_len
    first = decoder.read([ne.Part(0, ids, T)]).copy()
    assert row_error(first, want) < most and relative_error(first, want) > 1e-4
    for _ in range(3):                       # and from the graph
        decoder.truncate(0)
        assert np.array_equal(decoder.read([ne.Part(0, ids, T)]), first)
    for n in (65, 128, 129, 200, 257):         # of another length, and then rows
        decoder.truncate(0)
        assert np.array_equal(decoder.read([ne.Part(0, ids[:n], n)]), first[:n])
        assert row_error(decoder.read([ne.Part(0, ids[n:n + 9], 9)]), want[n:n + 9]) < most


def test_a_prompt_has_the_same_bits_beside_any_others_and_in_pieces():
    ids = [batch(ROWS, 1, seed)[0][0].tolist() for seed in range(5)]
    alone, many = rows_decoder(), rows_decoder(slots=5)
    want = []
    for n in 2, 30, 70:
        alone.truncate(0)
        want.append(alone.read([ne.Part(0, ids[0][:n], 1)])[0].copy())
    later = np.array([alone.step(token).copy() for token in ids[0][70:80]])
    many.read([ne.Part(3, ids[0][:8], 0), ne.Part(1, ids[1][:200], 1)])
    many.read([ne.Part(1, ids[1][200:210], 3), ne.Part(3, ids[0][8:60], 0)])
    got = many.read([ne.Part(0, ids[2][:50], 2), ne.Part(2, ids[0][:2], 1),
                     ne.Part(4, ids[0][:30], 1), ne.Part(3, ids[0][60:70], 1)])
    assert np.array_equal(got[2:], want)
    assert all(many.guesses(i).shape == (2, ROWS.vocab_size) for i in range(5))
    for i, token in enumerate(ids[0][70:80]):
        got = many.read([ne.Part(1, [5], 1), ne.Part(3, [token], 1)])
        assert np.array_equal(got[1], later[i])


@pytest.mark.parametrize("o", [{"temperature": 0.0}, {"temperature": 0.8}, {
    "temperature": 1.2, "top_k": 20}, {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01}], ids=str)
@pytest.mark.parametrize("speculate", [0, 2])
def test_the_device_draws_what_the_host_would(o, speculate):
    """Seventy texts of one seed, in 66 slots, from prompts of any length; some end early.  With
    drafts, whose random numbers are seen before it is known which are needed, too."""
    rng, cfg = np.random.default_rng(4), ne.replace(ROWS, seq_len=90)
    decoder = nc.make_decoder(cfg, rounded_flat(cfg), "bf16", slots=66)
    assert decoder.samples_itself
    prompts = [rng.integers(0, cfg.vocab_size, rng.integers(1, 80)).tolist() for _ in range(70)]
    sampling, drawn = ne.Sampling(tokens=25, speculate=speculate, **o), []

    def texts():
        replies = [ne.Reply(ids, sampling, ne.rng_of(3, i), 5) for i, ids in enumerate(prompts)]
        ended = [*ne.generate_many(decoder, replies[:-1])]
        ended += ne.generate_many(decoder, replies[-1:])             # alone: steps are queued ahead
        return [(i, reply.tokens, reply.finish) for i, reply in ended]
    draw = decoder.sample_on_device
    decoder.sample_on_device = lambda *args: drawn.append(draw(*args)) or drawn[-1]
    got = texts()
    assert sum(ids is not None for ids in drawn) > 10
    assert any(kind.ahead for kind in decoder.steps.graphs) == (not speculate)
    decoder.samples_itself = False
    assert texts() == got


def test_a_step_that_was_queued_ahead_is_forgotten_if_another_is_asked_for():
    """Of tokens, slots, positions, random numbers; logits, and copies, after which the same tokens
    at the same places have another text before them."""
    flat, later = rounded_flat(ROWS), [ne.SampleRequest(1.0, 0, 1.0, 0.0, 0.7)] * 2
    plain, ahead = (nc.make_decoder(ROWS, flat, "bf16", slots=3) for _ in range(2))

    def steps(decoder, later):
        found, tokens = [], [1, 2]
        decoder.read([ne.Part(0, [3, 4, 5]), ne.Part(1, [6]), ne.Part(2, [7])])
        for step in range(40):
            slots = (2, 1) if step % 12 == 9 else (0, 1)
            if step % 13 == 6:
                tokens = [8, 9]
            if step % 11 == 5:
                decoder.truncate(len(decoder.held_ids[0]) - 2, 0)
            if step % 7 == 5:
                decoder.copy(0, 2, len(decoder.held_ids[0]) - 1)
                decoder.copy(2, 1, min(map(len, decoder.held_ids[1:])))
            draws = [ne.SampleRequest(1.0, 0, 1.0, 0.0, 0.3 if step % 10 == 8 else 0.7)] * 2
            parts = [ne.Part(slot, [token]) for slot, token in zip(slots, tokens)]
            tokens = decoder.sample_on_device(parts, draws, later)
            found.append(tokens)
            if not later and step % 9 == 7:
                decoder.guesses(1)
            if step % 15 == 12:
                found.append(decoder.read([ne.Part(0, [5, 6], 2)]).tolist())
        return found, decoder.held_ids
    assert steps(ahead, later) == steps(plain, [])
    assert any(kind.ahead for kind in ahead.steps.graphs)
    assert not any(kind.ahead for kind in plain.steps.graphs)


def test_a_token_without_a_likeliest_successor_is_an_error():
    """The embedding of one is NaN: when it is read, a step behind it is queued already."""
    flat, draw = rounded_flat(ROWS), [ne.SampleRequest(1.0, 0, 1.0, 0.0, 0.37)]
    decoder = nc.make_decoder(ROWS, flat, "bf16")

    def tokens(n):
        decoder.read([ne.Part(0, [1])])
        found = [2]
        for _ in range(n):
            found += decoder.sample_on_device([ne.Part(0, found[-1:], 1)], draw, draw)
        return found
    found = tokens(20)
    i = next(i for i in range(5, 20) if found[i] not in [1, *found[:i]])
    ne.views(flat, ne.param_table(ROWS)).wte[found[i]] = np.nan
    decoder = nc.make_decoder(ROWS, flat, "bf16")
    with pytest.raises(ne.UserError, match="the logit of token"):
        tokens(20)
    assert decoder.tokens == [1, *found[:i]]


def test_rows_after_a_truncation_a_copy_and_a_slide():
    ids = batch(ROWS, 1, 1, T=400)[0][0].tolist()
    many, want = rows_decoder(slots=3), []
    for begins in (150, 130):
        alone = rows_decoder()
        alone.read([ne.Part(0, ids[:begins], 1)])
        want.append(alone.read([ne.Part(0, ids[begins:200], 1)])[0].copy())
    many.read([ne.Part(2, ids[:150] + [5] * 40, 1)])
    many.truncate(150, 2)
    many.copy(2, 1, 130)
    assert np.array_equal(many.read([ne.Part(2, ids[150:200], 1)])[0], want[0])
    assert np.array_equal(many.read([ne.Part(1, ids[130:200], 1)])[0], want[1])
    many, cpu = nc.make_decoder(ROWS, rounded_flat(ROWS), "bf16"), ne.Decoder(
        ROWS, rounded_flat(ROWS).astype(np.float64))
    for begins, most in ((30, 3e-5), (400, 0.03)):       # rows, x in 17 bits; a prompt: see above
        for decoder in many, cpu:
            decoder.truncate(0)
            decoder.read([ne.Part(0, ids[:begins], 1)])
        got, want = (x.read([ne.Part(0, ids[:3], 3)]).copy() for x in (many, cpu))
        assert row_error(got, want) < most and many.tokens == cpu.tokens
        assert all(relative_error(many.guesses(i), cpu.guesses(i)) < most for i in range(3))


@pytest.mark.parametrize("prompt, n", [(3, 100), (40, 100), (200, 250)])
def test_drafts_change_no_text_of_rows(prompt, n):
    """Also where the slot slides"""
    def text(speculate):
        o = ne.Sampling(temperature=0.0, tokens=n, speculate=speculate)
        return sampled(rows_decoder(), [i % 101 for i in range(prompt)], n, None, o)
    assert text(0) == text(2) == text(7)


def test_samples_of_a_run_in_bfloat16_are_of_rows():
    model = engine(CFGS["eights"], "bf16")
    decoder = model.decoder()
    logits = decoder.step(3).copy()
    train(model, 1)
    decoder.truncate(0)
    assert decoder.rows_are_cheap and np.array_equal(decoder.step(3), logits)


@pytest.mark.parametrize("muon", [{}, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("dtype", nc.DTYPES)
def test_a_step_after_a_failed_one_is_like_the_first(dtype, muon):
    """A skipped step leaves nothing behind in the gradients."""
    cfg = CFGS["eights"]
    failed, fresh = engine(cfg, dtype), engine(cfg, dtype)
    failed.gradient(*batch(cfg, 2, 1), np.full(cfg.n_mtp, np.inf))
    _, norm = failed.update(hyper(1, **muon))
    assert not np.isfinite(norm) and not np.isfinite(nc.to_host(failed.g_flat)).all()
    assert failed.first_bad_tensor() != "the loss is not finite"
    assert train(failed, 1, **muon) == train(fresh, 1, **muon)


@pytest.mark.parametrize("T", [70, 128])
@pytest.mark.parametrize("top", nc.PATHS)
def test_an_infinite_number_of_a_sequence_stays_in_it(top, T):
    """T rows end inside a tile of 64 rows, which then also has rows of the next sequence."""
    D, H, G, B = 64, 2, 1, 3
    rng = np.random.default_rng(0)
    widths = dict(qkv=(H + 2 * G) * D, do=H * D)
    clean = {name: rng.normal(size=(B * T, n)).astype(np.float32) for name, n in widths.items()}
    bad = {name: x.copy() for name, x in clean.items()}
    for x in bad.values():
        x[T:2 * T] = np.inf
    found = []
    for given in clean, bad:
        qkv, do = (nc.to_device(to_bf16(given[name])) for name in widths)
        o, dqkv = nc.new((B * T, H * D), np.uint16), nc.new(qkv.shape, np.uint16)
        lse, delta = (nc.new((H, B * T), np.float32) for _ in range(2))
        cos, sin = (nc.to_device(np.ones((T, D // 2), np.float32)) for _ in range(2))
        ops = nc.make_ops(top)
        ops.attention_forward(o, lse, qkv, T, D)
        ops.attention_backward(dqkv, delta, do, o, lse, qkv, cos, sin, T, D)
        found.append([nc.Model.host(x).reshape(B, T, -1)[[0, 2]] for x in (o, dqkv)])
    assert all(np.array_equal(x, y) and np.isfinite(x).all() for x, y in zip(*found))


@pytest.mark.parametrize("weight", [(1, 0, 0, 0), (1, 0, 0.5, 0)])
@pytest.mark.parametrize("tied", [False, True])
def test_heads_that_are_off_stay_as_they_are(weight, tied):
    """As on the CPU: without decay, and without momentum."""
    cfg = ne.replace(TINY, n_mtp=4, tie_embeddings=tied)
    flat = random_flat(cfg, 1, np.float64)
    models = [ne.Model(cfg, flat.copy()), nc.Model(cfg, flat, dtype="f64")]
    for step, weights in enumerate(((1, 1, 1, 1), weight, weight), 1):
        tokens, targets = batch(cfg, 2, step)
        said = []
        for model in models:
            model.gradient(tokens, targets, np.array(weights) / 40)
            said.append(model.update(hyper(step)))
        for x, y in zip(*said):
            assert np.allclose(x, y, rtol=1e-11, atol=0)
        if step == 1:
            heads = [ne.views(model.buffers()[0].astype(np.float64), ne.param_table(cfg)).lm_head
                     for model in models]
    after = [ne.views(model.buffers()[0].astype(np.float64), ne.param_table(cfg)).lm_head
             for model in models]
    for i in range(4 - tied):
        same = [np.array_equal(x[i], y[i]) for x, y in zip(heads, after)]
        assert same == [weight[i + tied] == 0] * 2
    x, y = (model.buffers()[0] for model in models)
    assert relative_error(y, x) < 1e-6    # both as float32


WITHOUT = """
import json, sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
import test_gpu
if {hidden}:
    sys.modules["nanoeuler_parts.tensor_cores"] = None
    test_gpu.nc.tensor_cores.cache_clear()
from types import SimpleNamespace
options = SimpleNamespace(dtype="bf16", matmul="portable", recompute=False)
cfg = test_gpu.CFGS["eights"]
flat = test_gpu.random_flat(cfg, 1, test_gpu.np.float32)
model = test_gpu.nc.Model(cfg, flat, **(dict(dtype="bf16") if {hidden} else dict(options=options)))
found = [x.hex() for x in test_gpu.train(model, 2)]
found.append(model.decoder().step(3).tobytes().hex())
print(json.dumps(found))
"""


def test_without_tensor_cores_the_bits_are_those_of_the_portable_path():
    programs = [WITHOUT.format(root=str(ROOT), hidden=hidden) for hidden in (True, False)]
    found = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                            timeout=500) for program in programs]
    assert "tensor_cores is missing" in found[0].stderr
    hidden, portable = (x.stdout.splitlines()[-1] for x in found)
    assert hidden == portable
