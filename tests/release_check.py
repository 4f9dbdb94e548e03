"""What is published is what was measured: README, recorded figures and GPU proofs against the tree.

    make release-check

This is about evidence, and red where a figure has to be taken anew.  Whether the programs are right
is what `make test` says; it does not run this file.
"""
import functools
import json
import re
import subprocess
import sys

import pytest
from helpers import ROOT

import nanoeuler as ne
from nanoeuler_parts.checkpoint.file import Checkpoint
from nanoeuler_parts.runs.run import Run

pytestmark = pytest.mark.unit

RESULTS = ROOT / "bench" / "results"
README = "\n".join(path.read_text(encoding="utf-8")             # and what it leads to
                   for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))])


def measured(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def cells(label):
    """The cells of the one table row of the README that begins with a label."""
    rows = [line for line in README.splitlines() if line.startswith(f"| {label} |")]
    assert len(rows) == 1, (label, rows)
    return [cell.strip().replace("*", "") for cell in rows[0].strip("|").split("|")[1:]]


def test_every_result_has_an_entry_that_says_what_made_it():
    import record
    assert record.complaints() == []


NAMED = {name for names in re.findall(
    r"!\[[^\]]*\]\(([^)#]+)\)|`(bench/results/[\w./-]+)`", README) for name in names if name}
PICTURES = {path.name for path in (ROOT / "docs").iterdir()      # which show no measurement
            if path.suffix in (".png", ".svg")}
DRAWN = {path.name for path in (ROOT / "docs/tour").glob("*.svg")}       # compared below


@pytest.mark.parametrize("name", sorted(NAMED))
def test_what_the_pages_show_is_recorded(name):
    import record
    files = {file for entry in record.entries().values() for file in entry["files"]}
    assert name.rsplit("/", 1)[-1] in files | PICTURES | DRAWN | {""}


def test_the_pictures_are_those_that_their_scripts_draw():
    """Some are computed from the bundled model, others from recorded runs."""
    import make_pictures
    drawn = dict(make_pictures.pictures([]))
    assert {path.name for path in drawn} == DRAWN | {
        path.name for path in (ROOT / "docs").glob("*.svg")}
    for path, text in drawn.items():
        assert path.read_text(encoding="utf-8") == text, path


@pytest.mark.parametrize("name", sorted(p.stem for p in RESULTS.glob("cpu_*.json")))
def test_tables_of_the_cpu_are_those_of_their_json(name):
    import bench_cpu
    table = (RESULTS / f"{name}.md").read_text(encoding="utf-8").rstrip("\n")
    made = bench_cpu.markdown(measured(name)).rstrip("\n")
    assert table.startswith(made)            # a run of its own may follow


@pytest.mark.parametrize("name", ["gpu_h200", "gpu_steps_h200", "gpu_steps_imported_h200",
                                  "gpu_steps_token_weights_h200"])
def test_the_table_of_the_gpu_is_that_of_its_json(name):
    import gpu_report
    table = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    assert table == gpu_report.markdown(measured(name))


@pytest.mark.parametrize("engine, kinds", [
    ("NanoEuler", ("float32", "bfloat16", "int8")),
    ("llama.cpp", ("float32", "BF16", "Q8_0", "Q4_1 as it came"))])
def test_the_table_of_a_llama_is_that_of_its_json(engine, kinds):
    m = measured("llama_2threads")

    def shown(label, task, text):
        values = [text(m[task][f"{engine}, {kind}"]["median_s"]) for kind in kinds]
        assert cells(f"{label}: {engine}")[:len(kinds)] == values

    shown("tokens per second", "rows", lambda s: f"{1 / s:.1f}")
    shown("a prompt of 256 tokens, ms", "prompt", lambda s: f"{1e3 * s:.0f}")
    shown("a batch of eight, tokens per second", "batch", lambda s: f"{8 / s:.0f}")


@pytest.mark.parametrize("label, preset, ours", [
    ("training step, small (16 × 128)", "small", "NanoEuler"),
    ("training step, big (8 × 256)", "big", "NanoEuler")])
def test_steps_of_the_cpu_in_the_readme(label, preset, ours):
    rows = measured("cpu_amd-epyc-znver3")["train"][preset]["rows"]
    mine, theirs = (1e3 * rows[name]["median_s"] for name in (ours, "torch.compile"))
    digits = 1 if mine < 100 else 0
    said = cells(label)
    assert said[0].startswith(f"{mine:.{digits}f} ms")
    assert said[1] == (f"{theirs:.1f} ms" if preset == "small" else f"{theirs:.0f} ms")
    assert said[2] == f"{theirs / mine:.2f}"


@pytest.mark.parametrize("label, row", [
    ("NanoEuler, bfloat16 (what `make train` uses)", "NanoEuler, bfloat16"),
    ("NanoEuler, float32", "NanoEuler"),
    ("torch.compile, float32", "torch.compile"),
    ("torch.compile, float32, on AVX-512", "torch.compile, MKL made to use AVX-512"),
    ("torch.compile, bf16 autocast", "torch.compile, bf16 autocast (other precision)"),
    ("PyTorch eager, float32", "PyTorch eager")])
def test_steps_of_a_zen_4(label, row):
    for preset, said in zip(("small", "big"), cells(label), strict=True):
        rows = measured("cpu_amd-epyc-znver4")["train"][preset]["rows"]
        time = float(said.removesuffix(" ms"))
        assert time == pytest.approx(1e3 * rows[row]["median_s"], rel=0.005)


@pytest.mark.parametrize("label, ours, theirs", [
    ("float32, against the best PyTorch row in float32", "NanoEuler", ["float32"]),
    ("bfloat16, against PyTorch in bfloat16", "NanoEuler, bfloat16", ["bfloat16"]),
    ("bfloat16, against the best PyTorch row of any type", "NanoEuler, bfloat16",
     ["float32", "bfloat16"]),
    ("float32, against the best PyTorch row of any type", "NanoEuler", ["float32", "bfloat16"])])
def test_ratios_of_a_zen_4(label, ours, theirs):
    for preset, said in zip(("small", "big"), cells(label), strict=True):
        rows = measured("cpu_amd-epyc-znver4")["train"][preset]["rows"]
        times = [r["median_s"] for name, r in rows.items() if "orch" in name
                 and ("bfloat16" if "bf16" in name else "float32") in theirs]
        assert float(said) == pytest.approx(min(times) / rows[ours]["median_s"], abs=0.006)


def test_three_minutes_in_the_readme():
    rows = measured("three_minutes_znver3")["rows"]
    ours = [r["bits_per_byte"] for r in rows if r["kind"] == "ours"]
    said = cells(f"`nanoeuler.py train`, mean of three seeds, {min(ours):.3f} to {max(ours):.3f}")
    assert said[2] == f"{sum(ours) / len(ours):.3f}"
    shown = [line for line in README.splitlines() if line.startswith("| ")]
    for kind in ("old", "adamw", "muon", "start", "nanogpt"):
        r = min((r for r in rows if r["kind"] == kind), key=lambda r: r["bits_per_byte"])
        assert any(f"| {r['steps']:,} |" in line and f"| {r['bits_per_byte']:.3f} |" in line
                   for line in shown), r


@pytest.mark.parametrize("label", ["base, 64 × 512", "base, 16 × 1024", "large, 32 × 512"])
def test_steps_of_the_gpu_in_the_readme(label):
    times = measured("gpu_h200")["step"][label.replace("×", "x")]["times"]
    mine = times["NanoEuler"]["ms"]
    best = min(times[name]["ms"] for name in ("compile", "graph", "eager"))
    said = cells(label)
    assert said[0].startswith(f"{mine:.1f} ms") and said[1].startswith(f"{best:.1f} ms")
    assert said[2] == f"{best / mine:.2f}"


@pytest.mark.parametrize("label", ["64 × 512", "16 × 1024", "4 × 4096"])
def test_attention_in_the_readme(label):
    rows = measured("gpu_h200")["attention"][label.replace("×", "x")]
    for said, side in zip(cells(label), ("ours", "flash", "cudnn"), strict=True):
        assert said == f"{sum(rows[way][side]['ms'] for way in ('forward', 'backward')):.2f} ms"


@pytest.fixture
def of_twins(dry):
    import gpu_tests
    return gpu_tests.twins()


def test_the_proof_on_a_gpu_is_of_todays_code(of_twins):
    import gpu_tests
    files = sorted(RESULTS.glob("gpu_tests_*.txt"))
    codes = {part: gpu_tests.fingerprint(part) for part in gpu_tests.NEEDED}
    assert any(gpu_tests.current(p.read_text(encoding="utf-8"), codes, of_twins) for p in files), (
        "the GPU program, or what the CPU's functions compute, changed since it was last proven; "
        "on a machine with a GPU: python bench/gpu_tests.py")


def test_twins_that_compute_something_else_are_seen(of_twins, monkeypatch):
    """Rounding is nothing else; a sign, an entry, another constant is."""
    import gpu_tests
    assert len(of_twins) > 100
    told = "".join(f"{name}: {x!r} {y!r}\n" for name, (x, y) in of_twins.items())
    assert gpu_tests.told_twins(told) == of_twins
    for name, (norm, product) in of_twins.items():
        rounded = {**of_twins, name: (norm * (1 + 1e-15), product * (1 - 1e-15))}
        assert gpu_tests.same_twins(of_twins, rounded)
        little = 1e-9 * norm or 1e-9         # an output may be zero: of no target at all
        for wrong in ((norm + little, product), (norm, product + little)):
            assert not gpu_tests.same_twins(of_twins, {**of_twins, name: wrong})
    assert not gpu_tests.same_twins(of_twins, {**of_twins, "more 0": (1.0, 1.0)})
    rmsnorm = ne.rmsnorm_forward
    monkeypatch.setattr(ne, "rmsnorm_forward", lambda y, rstd, x, gain, eps: rmsnorm(
        y, rstd, x, gain, 2 * eps))
    made = sys.modules["nanoeuler_parts.selftests.run"].group_cases     # with the other function
    made.cache_clear()
    assert not gpu_tests.same_twins(of_twins, gpu_tests.twins())
    made.cache_clear()


def test_a_stale_proof_is_seen(tmp_path):
    import gpu_tests
    codes = functools.partial(dict.fromkeys, gpu_tests.PARTS)
    header, now, before = "Correctness on a GPU.\n\n", "a" * 64, "b" * 64
    text, of_twins = "Correctness on another GPU.\n\n== kernels: x\nold\n", {"rope 0": (2.0, -1e-3)}
    for code in (before, now):
        for part in gpu_tests.PARTS:
            assert not gpu_tests.current(text, codes(now), of_twins)
            said = f"{part}: python x\ncode {code}, commit 12\n\nrope 0: 2.0 -0.001\n== no part\n\n"
            text = gpu_tests.written(text, header, part, said.replace("== ", ""))
            if part == gpu_tests.NEEDED[-1]:
                break
        assert gpu_tests.current(text, codes(code), of_twins) and text.startswith(header)
        assert not gpu_tests.current(text, codes(code), {"rope 0": (2.0, 1e-3)})
    assert list(gpu_tests.parse(text)) == list(gpu_tests.NEEDED)
    assert gpu_tests.parse(text)["gradient"][0] == now
    assert "rope 0" in gpu_tests.parse(text)["tests"][1]


def test_a_part_that_fails_is_not_written(tmp_path, monkeypatch, capsys):
    import gpu_tests
    codes = dict.fromkeys(gpu_tests.PARTS, 0)
    monkeypatch.setattr(gpu_tests, "command", lambda part, jobs: [
        sys.executable, "-c", f"print('== {part} said'); raise SystemExit({codes[part]})"])
    monkeypatch.setattr(gpu_tests, "machine", lambda: ("NVIDIA H100 80GB", "Correctness.\n\n"))
    path = tmp_path / "gpu_tests.txt"

    def main(*only):
        monkeypatch.setattr(sys, "argv", ["gpu_tests.py", "--out", str(path), *only])
        return gpu_tests.main()

    codes["gradient"] = 1
    assert main("--only", "kernels", "gradient", "tests") == 1
    assert "FAILED: gradient" in capsys.readouterr().out
    assert list(gpu_tests.parse(path.read_text("utf-8"))) == ["kernels", "tests"]
    codes["gradient"] = 0
    assert main("--only", "gradient") == 0
    text = path.read_text("utf-8")
    assert list(gpu_tests.parse(text)) == ["kernels", "gradient", "tests"]
    assert all(f"=== {part} said" in said for part, (_, said) in gpu_tests.parse(text).items())
    assert gpu_tests.fingerprint("gradient") == gpu_tests.parse(text)["gradient"][0]


@pytest.mark.parametrize("name, old, new, changes", [
    ("nanoeuler_cuda.py", "ROW_WARPS = 8 ", "ROW_WARPS = 4 ", "kernels gradient tests"),
    ("nanoeuler_cuda.py", "# warps per block, if each warp has a row of its own", "# warps", ""),
    ("nanoeuler_cuda.py", '"""x[bt] = wte[tokens[bt]] ', '"""rows of wte ', ""),
    ("nanoeuler_parts/tensor_cores/scheduler.py", "STORE_TIME = 4 ", "STORE_TIME = 5 ",
     "kernels gradient tests"),
    ("nanoeuler_parts/ranks/engine.py", "PIECE = 1 << 24 ", "PIECE = 1 << 23 ", "kernels"),
    ("nanoeuler_parts/selftests/ops.py", "(70, 13, 10)", "(71, 13, 10)", "twins kernels"),
    ("tests/oracles/naive_attention.py", "add=r > 0", "add=True", "tests"),
    ("tests/test_gpu.py", "def hyper(step, **muon):", "def hyper(step, *_, **muon):", "tests"),
    ("nanoeuler.py", "def rmsnorm_forward(", "def rmsnorm_forward_of(", "")])
def test_the_fingerprint_is_that_of_the_code(name, old, new, changes, tmp_path):
    """Not of comments and docstrings, nor of the CPU's program: of that, what it computes."""
    import gpu_tests
    for source in (*gpu_tests.PROVEN, "nanoeuler.py"):
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / source).read_text(encoding="utf-8")
        if source == name:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / source).write_text(text, encoding="utf-8")
    changed = [part for part in gpu_tests.NEEDED
               if gpu_tests.fingerprint(part, tmp_path) != gpu_tests.fingerprint(part)]
    assert changed == changes.split()


def test_the_defaults_are_those_that_the_readme_shows(monkeypatch, capsys):
    """What `train` says before it begins.  Its first line is a machine's."""
    monkeypatch.chdir(ROOT)
    start = Checkpoint(ne.PRESETS[Run.preset], None, ne.State(), None, ())
    Run("nanoeuler.bin", start, Run.Options().check())
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    _, _, shown = README.partition("\nNanoEuler: 1,053,824 parameters")
    shown = shown.partition("\n...")[0].splitlines()[1:]         # as many as there is room for
    assert len(said) == 9 and shown == said[:len(shown)] and shown


def test_the_chat_in_the_readme_is_that_of_the_bundled_model():
    """With the settings of `make chat`; another processor may round a probability differently."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = page.partition("\n$ make chat\n")[2].partition("\n```")[0].splitlines()
    questions, answers = [x.removeprefix("> ") for x in lines[::2]], lines[1::2]
    assert len(questions) == len(answers) >= 4
    said = subprocess.run([sys.executable, str(ROOT / "nanoeuler.py"), "chat", "bundled"],
                          input="\n".join(questions) + "\n", capture_output=True,
                          encoding="utf-8", check=True).stdout
    assert re.findall(r"(?m)^> (.+)$", said) == answers
