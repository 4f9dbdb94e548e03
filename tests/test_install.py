"""What a newcomer types: make, pip.  And what is installed with the programs."""
import os
import shutil
import subprocess
import sys
import zipfile

import pytest
from helpers import FAST, ROOT, complains, needs, ok

import nanoeuler as ne


@pytest.fixture(scope="module")
def folder(tmp_path_factory, text):
    """The files that make runs, and a short text; kernels come from the cache of the repository."""
    folder = tmp_path_factory.mktemp("make")
    for name in ("Makefile", "nanoeuler.py", "bpe.py", "check.py", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "text.txt").write_bytes(text.read_bytes())
    return folder


def make(folder, *args):
    """make with this interpreter, which installs nothing.  `make test` may have started us: its
    variables would make this one a part of it, which says what folder it enters."""
    if shutil.which("make") is None:
        pytest.skip("there is no make on this machine")
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(["make", f"PY={sys.executable}", *args], cwd=folder, timeout=120, env=env,
                          capture_output=True, encoding="utf-8", errors="replace")


def learn(steps, *more):
    return "ARGS=" + " ".join(("--data", "text.txt", "--steps", str(steps), *FAST, *more))


def step_of(path):
    return ne.read_checkpoint(str(path)).state.step


def test_a_second_make_train_goes_on_or_says_that_it_is_done(folder):
    assert "is complete: 3 of 3 steps" in ok(make(folder, "train", learn(3)))
    first = (folder / "nanoeuler.bin").read_bytes()
    assert "is complete: 3 of 3 steps" in ok(make(folder, "train", learn(3)))
    assert (folder / "nanoeuler.bin").read_bytes() == first
    ok(make(folder, "train", learn(5)))
    assert step_of(folder / "nanoeuler.bin") == 5


def test_make_train_begins_anew_with_force_and_elsewhere_with_out(folder):
    ok(make(folder, "train", "OUT=other.bin", learn(3)))
    ok(make(folder, "train", "OUT=other.bin", learn(2, "--force")))
    assert step_of(folder / "other.bin") == 2
    assert (folder / "other.jsonl").exists()


def test_make_names_what_went_wrong(folder):
    result = make(folder, "train", "OUT=no/where.bin", learn(1))
    assert result.returncode == 2 and "nanoeuler: " in result.stderr
    assert "Traceback" not in result.stderr


def test_make_help_lists_every_target(folder):
    said = {line.split()[0] for line in ok(make(folder, "help")).splitlines()}
    rules = (ROOT / "Makefile").read_text("utf-8")
    phony = next(line for line in rules.splitlines() if line.startswith(".PHONY:"))
    assert said == set(phony.split()[1:])


def test_make_clean_keeps_checkpoints(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    kept = tmp_path / "nanoeuler.bin", tmp_path / ".venv" / "run", tmp_path / "nanoeuler.py"
    gone = [tmp_path / name for name in ("__pycache__", "tests/__pycache__", ".pytest_cache",
                                         ".hypothesis")]
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    for path in gone:
        path.mkdir(parents=True)
    ok(make(tmp_path, "clean"))
    assert all(path.exists() for path in kept) and not any(path.exists() for path in gone)


def test_the_wheel_holds_the_programs_and_nothing_else(tmp_path):
    """`data` and `bench` would be packages of everybody's."""
    needs("setuptools")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "nanoeuler.py", "nanoeuler_cuda.py",
                 "bpe.py", "check.py"):
        shutil.copy(ROOT / name, source)
    for name in ("data", "bench", "tests"):
        (source / name).mkdir()
        (source / name / "module.py").touch()
    ok(subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index",
                       "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)],
                      timeout=120, capture_output=True, text=True))
    wheel, = tmp_path.glob("*.whl")
    modules = [name for name in zipfile.ZipFile(wheel).namelist() if "dist-info" not in name]
    assert sorted(modules) == ["bpe.py", "check.py", "nanoeuler.py", "nanoeuler_cuda.py"]
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    result = subprocess.run([sys.executable, "-m", "nanoeuler", "info", "none.bin"], cwd=tmp_path,
                            env={**os.environ, "PYTHONPATH": str(tmp_path / "site")}, timeout=120,
                            capture_output=True, encoding="utf-8")
    complains(result, "none.bin")


def test_an_installed_program_runs_in_any_folder(tmp_path):
    """As `python -m nanoeuler`, which a wheel allows; kernels come from the cache."""
    result = subprocess.run([sys.executable, "-m", "nanoeuler", "info", "none.bin"], cwd=tmp_path,
                            env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120,
                            capture_output=True, encoding="utf-8")
    complains(result, "none.bin")
