"""bench/bench_gpu.py where there is no GPU: every call into the engine on a device that computes
nothing, PyTorch's side on the CPU with tiny shapes, the report, and workers that die."""
import contextlib
import inspect
import json
import subprocess
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
from helpers import needs

torch = needs("torch")
needs("numba_cuda")

import bench_gpu as bench
import gpu_kernels
import gpu_report
import nanoeuler as ne
import nanoeuler_cuda as nc
from dry_gpu import constants, dry_run

pytestmark = pytest.mark.gpu
CFG = replace(ne.PRESETS["small"], n_layer=2, n_head=4, n_kv_head=2)
SHAPES = dict(STEP=(2, 64), ATTENTION=((2, 64),), STEPS=(("base", 2, 64), ("large", 1, 64)),
              LONGER=((1, 128),))


@pytest.fixture
def device(monkeypatch):
    """A dry Hopper beside PyTorch on the CPU; each thing to be timed runs once."""
    with dry_run() as dry:
        dry.gpu.compute_capability = (9, 0)
        kind = lambda t: np.dtype(bench.KINDS[t.dtype])
        for name, value in dict(
                SHAPES, DEVICE="cpu", shared=lambda t: dry.array(tuple(t.shape), kind(t)),
                theirs=lambda f: (f(0), bench.Side(bench.calls(f), None))[1],
                milliseconds=lambda side: (side.run(), 1.0)[1], our_stream=lambda: None, CALLS=2,
                clean=lambda: None, reset_peak=lambda: None, l2_bytes=lambda: 1 << 20,
                memory=lambda: (1 << 40, 0, 0), pace=pace).items():
            monkeypatch.setattr(bench, name, value)
        for name in ("base", "large"):
            monkeypatch.setitem(ne.PRESETS, name, CFG)
        bench.initial.cache_clear()
        yield dry
        bench.initial.cache_clear()


def pace(steps, rounds=5, seconds=0.4):
    return {name: [1e3 * bench.host_seconds(step, 1)] for name, step in steps.items()}


# How often a kernel moves each argument, read or written 1, both 2, over its base step's B T rows.
# What does not grow with those rows (gains, angles, partial sums) is left out, as in the benchmark.
MOVES = {
    "rmsnorm_kernels_residual_forward": dict(y=2, saved=1, rstd=1, x=2),
    "rmsnorm_kernels_backward": dict(dx=2, dy=2, x=1, rstd=1),
    "rope_kernel_rotate": dict(qkv=2),
    "swiglu_kernels_forward": dict(y=1, gate_up=1),
    "swiglu_kernels_backward": dict(gate_up=2, dy=1),
    "cross_entropy_kernel_fused": dict(logits=2),
    "embedding_forward_kernel": dict(x=1, tokens=1, wte=1),
    "embedding_backward_kernel_backward": dict(dwte=2, dx=1, order=1),
    "square_sums_kernel": dict(g=1),
    "adamw_kernel_update": dict(p=2, w=1, g=2, m=2, v=2)}


def bytes_moved(launch):
    """By the sizes of a launch's arguments, and MOVES; RoPE does not touch v."""
    names = inspect.signature(launch.kernel.py_func).parameters
    args = dict(zip(names, launch.args, strict=True))
    sizes = {name: x.size * x.dtype.itemsize for name, x in args.items() if hasattr(x, "dtype")}
    if launch.name == "rope_kernel_rotate":
        turned = args["heads"] * 2 * args["cos"].shape[1]
        sizes["qkv"] = sizes["qkv"] * turned // args["qkv"].shape[1]
    return sum(times * sizes[name] for name, times in MOVES.get(launch.name, {}).items())


def measured(group, modes=("eager",)):
    """The rows as a worker would write them, a failure being one."""
    rows = {}
    for name, measure in bench.ROWS[group]({"modes": modes}).items():
        try:
            rows[name] = measure()
        except bench.Skip as e:
            rows[name] = {"skipped": str(e)}
    return json.loads(json.dumps(rows))


def test_every_product_of_a_step_is_measured(device):
    rows = measured("matmul")
    assert len(rows) == 5 * 3
    B, T = SHAPES["STEP"]
    forward = sum(r["count"] * r["flop"] for r in rows.values() if r["kind"] == "forward")
    assert 3 * forward + 6 * B * T * T * CFG.n_head * CFG.head_dim * CFG.n_layer == (
        bench.flops(CFG, B, T))
    for r in rows.values():
        assert {"ours", "cuBLAS", "mma"} <= set(r["times"])

    def launched(f):                         # output and M, N, K, matrices, splits
        device.launches.clear()
        f()
        return {(a[3].shape, *a[5:10]) for a in (x.args for x in device.launches
                                                if x.name == "wgmma_kernel_kernel")}

    alone = launched(lambda: measured("matmul"))
    step = bench.our_step(CFG, bench.initial("base"), B, T)
    assert 10 < len(launched(step)) and launched(step) <= alone


def test_attention_against_what_sdpa_offers(device):
    [r] = measured("attention").values()
    assert set(r["forward"]) == set(r["backward"]) == {"ours", "flash"}
    assert "cudnn" in r["notes"] and "not expanded" in r["notes"]["flash"]


def test_every_kernel_of_a_step_is_measured(device):
    rows = measured("kernels")
    assert all(r["bytes"] > 0 and r["ms"] > 0 for r in rows.values())
    names = {x.name for x in device.launches}
    measured("matmul"), measured("attention")
    names |= {x.name for x in device.launches}
    device.launches.clear()
    bench.our_step(CFG, bench.initial("base"), *SHAPES["STEP"])()
    assert {x.name for x in device.launches} <= names


def test_bytes_that_a_kernel_must_move(device):
    """The formulas of the benchmark against the sizes of what the kernels are given."""
    cfg, cases = replace(CFG, seq_len=64), set()
    for name, (size, make) in bench.kernel_cases(cfg, 2, 64).items():
        call = make(1)
        call, _ = call if isinstance(call, tuple) else (call, None)
        device.launches.clear()
        call(0)
        cases |= {x.name for x in device.launches}
        moved = sum(map(bytes_moved, device.launches))
        if name == "fill":                   # no kernel, but a call of the driver
            assert not device.launches and size == 2 * 64 * cfg.n_embd * 2
        else:
            assert size == pytest.approx(moved, rel=0.003), name
    assert cases == set(MOVES) | {"sum_rows_kernel"}


def test_steps_and_ablations(device):
    rows = measured("step")
    assert list(rows) == ["base, 2 x 64", "large, 1 x 64"]
    for r in rows.values():
        assert set(r["times"]) == {"NanoEuler", "eager"} and not r["notes"]
        assert r["facts"]["eager"]["losses"][2] < r["facts"]["eager"]["losses"][0]
    rows = measured("ablation")
    assert len(gpu_report.good(rows)) == len(rows)


@pytest.mark.parametrize("rung, kernel", [("portable", "matmul_kernel"),
                                          ("mma", "mma_kernel_kernel")])
def test_a_lower_rung_is_what_its_row_runs(device, rung, kernel):
    bench.ablation_row(2, 64, matmul=rung)
    names = {x.name for x in device.launches}
    assert kernel in names and "wgmma_kernel_kernel" not in names


def test_a_rung_that_the_gpu_lacks_is_skipped(device):
    device.gpu.compute_capability = (8, 9)
    with pytest.raises(bench.Skip, match="no wgmma"):
        bench.ops_of("wgmma")


def test_decoding(device, monkeypatch):
    monkeypatch.setitem(ne.PRESETS, "base", replace(CFG, seq_len=3))
    [(name, times)] = bench.our_decode()["times"].items()
    assert "float32" in name and times["ms"] > 0


def test_a_mode_that_fails_costs_itself_only(device, monkeypatch):
    monkeypatch.setitem(bench.MODES, "compile", dict(mode="no such mode"))
    row = bench.step_row("base", 2, 64, ["compile", "eager"])
    assert "compile" in row["notes"] and set(row["times"]) == {"NanoEuler", "eager"}


def test_without_room_for_all_they_run_one_by_one(device, monkeypatch):
    alive, make = [0], bench.peer_step

    def greedy(*args, **options):
        alive[0] += 1
        if alive[0] == 2:                    # the second beside the first
            raise torch.OutOfMemoryError("no room")
        return make(*args, **options)

    monkeypatch.setattr(bench, "peer_step", greedy)
    monkeypatch.setitem(bench.MODES, "cudnn", dict(compiled=False))
    row = bench.step_row("base", 2, 64, ["eager", "cudnn"])
    assert "together" in row["notes"] and set(row["times"]) == {"NanoEuler", "eager", "cudnn"}


def test_the_peer_starts_from_the_same_weights(device):
    """Its loss is that of the CPU's engine, up to bfloat16."""
    flat, (tokens, targets) = bench.initial("base"), bench.batch(CFG, 2, 64)
    step = bench.peer_step(CFG, flat, 2, 64, compiled=False)
    cpu, weight = ne.Model(CFG, flat), ne.loss_weights(targets, bench.MTP)
    cpu.gradient(tokens, targets, weight)
    ce, _ = cpu.update(ne.Hyper(*np.ones(8)))
    assert float(step()) == pytest.approx(float(ce @ weight), rel=2e-3)


# ---- report and processes
def timed(value):
    return {"ms": value, "low": 0.9 * value, "high": 1.1 * value}


RESULTS = {
    "machine": {"device": "NVIDIA H200", "driver": "1.2", "versions": {"torch": "2"},
                "commit": "abc", "date": "2000-01-01", "peak_flops": 989e12},
    "ceiling": {"copy": {"bytes": 4e9, **timed(1.0)}, "matmul": {"flop": 1e12, **timed(1.25)}},
    "matmul": {
        "qkv forward": dict(kind="forward", count=16, shape=[8, 4, 2], flop=2e9, difference=1e-3,
                            notes={}, times={"ours": timed(2.0), "cuBLAS": timed(1.0)}),
        "qkv dW": dict(kind="dW", count=16, shape=[8, 4, 2], flop=2e9, difference=1e-3,
                       notes={"cuBLAS": "no CUDA graph"},
                       times={"ours": timed(2.0), "cuBLAS": timed(1.0),
                              "cuBLAS, float32 +=": timed(4.0), "cuBLAS, then +=": timed(3.0)}),
        "down dX": {"failed": "OSError: broken"}},
    "kernels": {"rope": {"bytes": 1e9, **timed(0.5)}},
    "step": {"base, 64 x 512": dict(
        tokens=32768, flop=23e12, parameters=1, buffers=2**33, notes={}, facts={
            name: dict(first_s=2.0, losses=[11.0, 10, 9], driver=2**33, allocated=2**34,
                       reserved=2**34) for name in ("NanoEuler", "compile")},
        times={"NanoEuler": timed(50.0), "compile": timed(60.0)}), "large": {"failed": "no"}},
    "ablation": {"as it is": dict(tokens=32768, flop=1, buffers=2**30, driver=2**30, **timed(50.0)),
                 "all on mma.sync": {"skipped": "there is none"}}}


def test_the_report_says_what_the_numbers_say():
    text = gpu_report.markdown(RESULTS)
    for words in ("4,000 GB/s", "800 TFLOP/s", "at 0.500 of cuBLAS", "at 1.000 where",
                  "without down dX", "down dX: failed: OSError: broken", "| 50% |", "**1.20**",
                  "0.50 of its memory", "| 1.20 |", "46.5%", "there is none", "no CUDA graph"):
        assert words in text, words
    assert gpu_report.markdown({"machine": RESULTS["machine"]}).startswith("## NVIDIA H200")
    device = dict(RESULTS["machine"], peak_flops=None)   # one whose data sheet nobody entered
    assert "MFU is" not in gpu_report.markdown({**RESULTS, "machine": device})


WORKER = """
import json, os, pathlib, sys, time
path = pathlib.Path(sys.argv[1])
r = json.loads(path.read_text(encoding="utf-8"))
for name in "abcd":
    if name not in r["matmul"]:
        r["running"] = ["matmul", name]
        path.write_text(json.dumps(r), encoding="utf-8")
        if name == "b": os._exit(11)
        if name == "c":                      # as if it had been at it since 1970
            os.utime(path, (0, 0))
            time.sleep(200)
        r["matmul"][name] = {"ms": 1}
        del r["running"]
        path.write_text(json.dumps(r), encoding="utf-8")
        if name == "a": sys.exit(3)
"""


def test_a_worker_that_dies_or_hangs_costs_one_row(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"matmul": {}}), encoding="utf-8")
    command = [sys.executable, "-c", WORKER, str(path)]
    assert bench.supervise(command, path, patience=1e6) == 0
    rows = bench.load(path)["matmul"]
    assert rows["a"] == rows["d"] == {"ms": 1}
    assert "code 11" in rows["b"]["failed"] and "1e+06 s" in rows["c"]["failed"]
    assert bench.supervise([sys.executable, "-c", "raise SystemExit(5)"], path, 9) == 5


def test_rows_fail_alone(device, tmp_path, monkeypatch):
    def broken():
        raise ValueError("broken\nand more")

    rows = {"first": lambda: {"ms": 1}, "bad": broken, "last": lambda: {"ms": 2}}
    monkeypatch.setitem(bench.ROWS, "ceiling", lambda options: rows)
    monkeypatch.setattr(bench, "machine", lambda commit: {"commit": commit})
    monkeypatch.setattr(nc, "open_device", lambda: None)
    monkeypatch.setattr(nc, "gpu_problem", lambda: "")
    path = tmp_path / "r.json"
    bench.save(path, {"kernels": {"saved": 1}, "ceiling": {"first": {"ms": 3}}})
    monkeypatch.setitem(bench.ROWS, "step", lambda options: broken())
    with contextlib.redirect_stderr(None):
        bench.work(path, ["ceiling", "step"], {"match": "none of these"}, "abc")
    found = bench.load(path)
    assert found["kernels"] == {"saved": 1} and "running" not in found
    assert found["ceiling"]["first"] == {"ms": 3} and found["ceiling"]["last"]["ms"] == 2
    assert found["ceiling"]["bad"]["failed"] == "ValueError: broken"
    assert found["step"]["all rows"]["failed"] == "ValueError: broken"


def test_earlier_results_stay_if_they_are_of_the_same_code(tmp_path):
    path = tmp_path / "r.json"
    bench.save(path, RESULTS)
    same = bench.kept(path, "abc", "NVIDIA H200", ["ceiling", "matmul"])
    assert set(same) == set(RESULTS) and not same["ceiling"] and not same["matmul"]
    same = bench.kept(path, "abc", "NVIDIA H200", ["ceiling", "matmul"], match="dW")
    assert set(same["matmul"]) == {"qkv forward", "down dX"} and not same["ceiling"]
    assert bench.kept(path, "abd", "NVIDIA H200", []) == {}
    assert bench.kept(tmp_path / "none", "abc", "NVIDIA H200", []) == {}


def test_a_part_of_the_proof_that_fails_costs_itself_alone(device, tmp_path, monkeypatch):
    """Parts are minutes of a GPU: each is written when it is done."""
    import gpu_proof
    out = tmp_path / "proof"
    monkeypatch.setattr(gpu_proof.nc, "open_device", lambda: None)
    monkeypatch.setattr(gpu_proof.cuda, "get_current_device", lambda: types.SimpleNamespace(
        name="a GPU"))
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **options: run(
        ["true"], capture_output=True, text=True) if command[0] == "nvidia-smi" else run(
            command, **options))
    monkeypatch.setitem(gpu_proof.PARTS, "start", lambda: {"first": [1.0, 2.0]})
    monkeypatch.setitem(gpu_proof.PARTS, "parity", lambda: 1 / 0)
    monkeypatch.setattr(sys, "argv", ["gpu_proof.py", "--out", str(out), "--only", "start",
                                      "parity"])
    with pytest.raises(ZeroDivisionError):
        gpu_proof.main()
    assert json.loads(out.with_suffix(".json").read_text("utf-8"))["start"] == {"first": [1.0, 2.0]}
    assert "first start: 2.0 s" in out.with_suffix(".md").read_text("utf-8")
    monkeypatch.setattr(sys, "argv", ["gpu_proof.py", "--only", "table"])
    with pytest.raises(SystemExit) as stopped:
        gpu_proof.main()
    assert stopped.value.code == 2


def test_the_kernels_of_a_prompt_and_of_a_step_are_listed(device, monkeypatch, capsys):
    """A profile that is made by hand: the longest kernel first, and what a round takes of each."""
    called = []
    names = ("nanoeuler_cuda::rmsnorm_kernels::_3clocals_3e::backward[abi:v1][abi:c]",
             "nanoeuler_parts::decode::table::take_kernel::_3clocals_3e::take[abi:v2]",
             "Memcpy HtoD (Pinned -> Device)")

    def profiled(call):
        device.launches.clear()
        call()
        called.append(len(device.launches))
        return [(names[0], 2.0)] * 6 + [(names[1], 30.0), (names[2], 3.0)]
    monkeypatch.setattr(gpu_kernels, "profiled", profiled)
    monkeypatch.setattr(gpu_kernels, "shapes", lambda: {"base": replace(CFG, seq_len=128)})
    for what in "prompt", "step":
        gpu_kernels.main([what, "--tokens", "100", "--batch", "2"])
        said = capsys.readouterr().out
        assert said.splitlines()[-3:] == [
            "       10.0       0.3     30.00  table.take_kernel.take",
            "        4.0       2.0      2.00  nanoeuler_cuda.rmsnorm_kernels.backward",
            "        1.0       0.3      3.00  Memcpy HtoD (Pinned -> Device)"]
        assert "kernels: 0.015 ms" in said and " ms\n" in said.splitlines(True)[1]
    assert all(n > 30 for n in called)


def test_products_of_each_width_are_timed(device, monkeypatch, capsys):
    monkeypatch.setattr(gpu_kernels, "shapes", lambda: {"base": CFG})
    gpu_kernels.main(["widths", "--tokens", "64"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [len(row) for row in rows] == [7] * 4 and {row[-1] for row in rows} == {"64"}
    widths = {constants(x.kernel)["COLUMNS"] for x in device.launches}
    assert widths == {256, 128, 64} and gpu_kernels.matmul_wgmma.tile_columns is (
        gpu_kernels.tile_columns)
