"""What a newcomer types: make, pip.  And what is installed with the programs."""
import ast
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata

import pytest
from helpers import EXTRAS, FAST, ROOT, complains, copy_parts, needs, ok, with_kernels

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import nanoeuler as ne
from nanoeuler_parts import flags

pytestmark = pytest.mark.cli


@pytest.fixture(scope="module")
def folder(tmp_path_factory, text, compiled):
    """The files that make runs, with their kernels, and a short text."""
    folder = tmp_path_factory.mktemp("make")
    for name in ("Makefile", "nanoeuler.py", "bpe.py", "check.py", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    copy_parts(folder)
    with_kernels(folder, compiled)
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


def test_make_teaches_what_was_made_before(folder):
    """What is there goes on, as that of `make train`; the commands alone, which run elsewhere."""
    for stage, source, out in (("sft", "nanoeuler.bin", "nanoeuler_chat.bin"),
                               ("dpo", "nanoeuler_chat.bin", "nanoeuler_dpo.bin")):
        verb = f"nanoeuler.py {stage} {source}"
        assert f"{verb}  --out {out} --lr 1" in ok(make(folder, "-n", stage, "ARGS=--lr 1"))
        (folder / out).touch()
        assert f"{verb} --resume --out {out}" in ok(make(folder, "-n", stage))
        assert "--resume" not in ok(make(folder, "-n", stage, "ARGS=--force"))
        (folder / out).unlink()


def test_make_serve_has_a_port(folder, monkeypatch):
    """As a variable, besides ARGS; without it, the program's own.  A variable of the environment
    may be for another program."""
    said = ok(make(folder, "-n", "serve", "PORT=9000", "MODEL=bundled", "ARGS=--slots 2"))
    assert "nanoeuler.py serve bundled --port 9000 --slots 2" in said
    assert "--port" not in ok(make(folder, "-n", "serve"))
    monkeypatch.setenv("PORT", "7000")
    assert "--port" not in ok(make(folder, "-n", "serve"))


def test_make_help_names_the_variables_of_its_targets():
    """Each that a user may set, on the line of a target that uses it.  ARGS is for all of them,
    PY and PYTHON choose the interpreter, and OUT, CHAT and DPO rename what a target writes."""
    text = (ROOT / "Makefile").read_text("utf-8")
    rules = re.findall(r"(?m)^[a-z-]+:.*?## (.*)\n((?:\t.*\n)+)", text)
    names = {*re.findall(r"(?m)^([A-Z]+) *\?=", text)}
    names -= {"ARGS", "PY", "PYTHON", "OUT", "CHAT", "DPO"}
    assert names == {"MODEL", "PORT", "GB"}
    for name in names:
        assert any(f"{name}=" in said for said, recipe in rules if f"$({name})" in recipe), name


# ---- the environment that make makes
OLD = """#!/bin/sh
# A Python 3.10, as far as `-c` code can tell.
test "$1" = -c || exit 9
exec {python} -c 'import sys; sys.version_info = (3, 10); exec(sys.argv[1])' "$2"
"""


@pytest.fixture
def old(tmp_path):
    """An interpreter that is too old."""
    if shutil.which("make") is None:
        pytest.skip("there is no make on this machine")
    path = tmp_path / "python3.10"
    path.write_text(OLD.format(python=sys.executable), encoding="utf-8")
    path.chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    return path


def make_alone(folder, *args):
    env = {name: value for name, value in os.environ.items()
           if name != "PY" and not name.startswith("MAKE")}
    return subprocess.run(["make", *args], cwd=folder, timeout=120, env=env, capture_output=True,
                          encoding="utf-8", errors="replace")


def test_an_old_python_is_refused_before_there_is_an_environment(old, tmp_path):
    result = make_alone(tmp_path, f"PYTHON={old}", "train")
    assert result.returncode == 2 and not (tmp_path / ".venv").exists()
    assert f"{old} is Python 3.10, and NanoEuler needs 3.11 or newer" in result.stderr
    assert "Traceback" not in result.stderr and "pip" not in result.stdout + result.stderr


@pytest.mark.parametrize("state", ["old", "gone", "new"])
def test_an_environment_that_cannot_run_is_made_again(state, old, tmp_path):
    folder = tmp_path / ".venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "run").touch()                 # newer than pyproject.toml: make takes it for done
    target = {"old": old, "gone": tmp_path / "nothing", "new": sys.executable}[state]
    (folder / "bin/python").symlink_to(target)
    os.utime(tmp_path / "pyproject.toml", (1, 1))
    said = ok(make_alone(tmp_path, "-n", "train"))
    assert ("-m venv .venv" in said) == ("is made again" in said) == (state != "new")
    assert folder.exists() == (state == "new")
    assert "nanoeuler.py train" in said and ("pip install" in said) == (state != "new")


def test_make_help_lists_every_target(folder):
    said = {line.split()[0] for line in ok(make(folder, "help")).splitlines()}
    rules = (ROOT / "Makefile").read_text("utf-8")
    phony = next(line for line in rules.splitlines() if line.startswith(".PHONY:"))
    assert said == set(phony.split()[1:])


@pytest.mark.parametrize("last, code", [(0, 0), (1, 2)])
def test_make_model_continues_until_it_is_done(last, code, tmp_path):
    """Exit code 3 asks for the same command again.  Without data/books.txt, nothing begins."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("data", "bench"):
        (tmp_path / name).mkdir()
    (tmp_path / "bench/make_model.py").write_text(
        "import sys\n"
        "with open('calls', 'a', encoding='utf-8') as f:\n"
        "    f.write(' '.join(sys.argv[1:]) + '\\n')\n"
        "n = len(open('calls', encoding='utf-8').readlines())\n"
        f"sys.exit(3 if n < 3 else {last})\n", encoding="utf-8")
    result = make(tmp_path, "model")
    assert result.returncode == 2 and not (tmp_path / "calls").exists()
    assert "data/books.txt: No such file; build it with make data-books" in result.stderr
    (tmp_path / "data/books.txt").touch()
    assert make(tmp_path, "model", "ARGS=--seed 2").returncode == code
    calls = (tmp_path / "calls").read_text("utf-8").split("\n")
    assert calls == ["all --gpu --limit 9 --seed 2"] * 3 + [""]


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


# ---- what pip installs
SHIPPED = {"shakespeare.txt", "instructions.json", "instruct_open.json.xz",
           "preferences_sample.jsonl", "prefs_open.jsonl.xz"}
MODEL = {"model.bin", "MODEL.md"}            # which any file stands in for


def pip(*args):
    return ok(subprocess.run([sys.executable, "-m", "pip", *args, "--quiet", "--no-deps",
                              "--no-index"], timeout=120, capture_output=True, text=True))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder of packages into which pip has installed the repository, and the wheel."""
    needs("setuptools")
    folder = tmp_path_factory.mktemp("pip")
    source, place = folder / "source", folder / "site"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "nanoeuler.py", "nanoeuler_cuda.py",
                 "bpe.py", "check.py"):
        shutil.copy(ROOT / name, source)
    for name in ("data", "bench", "tests"):
        (source / name).mkdir()
        (source / name / "module.py").touch()
    for name in SHIPPED:
        shutil.copy(ROOT / "data" / name, source / "data")
    for name in MODEL:
        (source / "data" / name).write_text("a model", encoding="utf-8")
    copy_parts(source)
    shutil.copytree(ROOT / "docs", source / "docs")
    (source / "data/pretrain.txt").write_text("large, and somebody's own", encoding="utf-8")
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(folder), str(source))
    wheel, = folder.glob("*.whl")
    pip("install", "--target", str(place), str(wheel))
    return place, wheel


def installed(site, command, *args, cwd):
    """A command that pip has made, as a user types it."""
    place, _ = site
    env = {**os.environ, "PYTHONPATH": str(place)}
    env.pop("NUMBA_CACHE_DIR", None)
    return subprocess.run([str(place / "bin" / command), *map(str, args)], cwd=cwd, timeout=240,
                          env=env, capture_output=True, encoding="utf-8")


def test_the_wheel_holds_the_programs_and_what_they_learn(site):
    """`data`, `bench` and `check` would be everybody's names."""
    _, wheel = site
    names = [name for name in zipfile.ZipFile(wheel).namelist() if "dist-info" not in name]
    modules = {name for name in names if "/" not in name}
    assert modules == {"bpe.py", "nanoeuler.py", "nanoeuler_cuda.py"}
    parts = {name for name in names if name.startswith("nanoeuler_parts/")}
    tree = {x.relative_to(ROOT).as_posix() for x in (ROOT / "nanoeuler_parts").rglob("*.*")}
    assert parts == {name for name in tree if "__pycache__" not in name}
    shipped = {name for name in names if "/" in name and not name.endswith(".py")}
    pages = [path.name for path in (ROOT / "nanoeuler_parts/serve/pages").iterdir()]
    assert shipped == {*(f"nanoeuler_data/{name}" for name in SHIPPED | MODEL),
                       *(f"nanoeuler_parts/serve/pages/{name}" for name in pages),
                       *(f"nanoeuler_docs/tour/{path.name}"
                         for path in (ROOT / "docs/tour").iterdir()
                         if path.suffix in (".md", ".svg"))}
    assert wheel.name.startswith(f"nanoeuler-{ne.__version__}-")


def test_the_installed_command_learns_what_came_with_it(site, compiled, tmp_path):
    """In an empty folder; and what it says to type next can be typed there."""
    place, _ = site
    with_kernels(place, compiled)
    said = ok(installed(site, "nanoeuler", "train", *FAST, "--steps", 1, "--holdout", 0.001,
                        cwd=tmp_path))       # a tenth of this text takes twelve seconds to measure
    assert f"{place}/nanoeuler_data/shakespeare.txt, " in said
    assert said.endswith("Talk to it with:\n    nanoeuler chat nanoeuler.bin\n")
    assert ok(installed(site, "nanoeuler", "chat", "nanoeuler.bin", "--tokens", 2, cwd=tmp_path))
    complains(installed(site, "nanoeuler", "info", "none.bin", cwd=tmp_path), "none.bin")
    complains(installed(site, "nanoeuler", "dance", cwd=tmp_path), "dance", "see nanoeuler --help")
    version = installed(site, "nanoeuler", "--version", cwd=tmp_path)
    assert ok(version) == f"nanoeuler {ne.__version__}\n"


def test_the_installed_command_of_the_gpu(site, tmp_path, monkeypatch):
    """A line says that a GPU is missing, and names the commands that this user has."""
    needs("numba_cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    said = complains(installed(site, "nanoeuler-cuda", "i", "It was", cwd=tmp_path), "GPU")
    assert "program has the same verbs: nanoeuler --help" in said


@pytest.mark.parametrize("started, typed", [
    ("/usr/bin/nanoeuler", "nanoeuler"), ("nanoeuler.exe", "nanoeuler"),
    ("nanoeuler.py", "python nanoeuler.py"), ("../a/nanoeuler.py", "python ../a/nanoeuler.py"),
    ("/my files/nanoeuler_cuda.py", "python '/my files/nanoeuler.py'"),
    ("nanoeuler-cuda", "python nanoeuler.py"), ("/bin/pytest", "python nanoeuler.py"),
    ("", "python nanoeuler.py")])
def test_advice_is_what_this_user_types(started, typed, monkeypatch):
    monkeypatch.setattr(sys, "argv", [started])
    assert flags.typed("nanoeuler.py") == typed
    on_gpu = typed if typed != "nanoeuler" else "python nanoeuler.py"
    on_gpu = on_gpu.replace("nanoeuler.py", "nanoeuler_cuda.py")
    on_gpu = "nanoeuler-cuda" if started == "nanoeuler-cuda" else on_gpu
    assert flags.typed("nanoeuler_cuda.py") == on_gpu


def test_an_installed_program_runs_in_any_folder(tmp_path):
    """As `python -m nanoeuler`, which a wheel allows; kernels come from the cache."""
    result = subprocess.run([sys.executable, "-m", "nanoeuler", "info", "none.bin"], cwd=tmp_path,
                            env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120,
                            capture_output=True, encoding="utf-8")
    complains(result, "none.bin")


def installed_with(extra):
    """The names of all packages that pip installs with this extra of the project: those that it
    lists, and what they need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ours = {"": project["dependencies"], **project["optional-dependencies"]}
    todo, found = [("nanoeuler", ""), ("nanoeuler", extra)], set()
    while todo:
        name, extra = todo.pop()
        if (name, extra) in found:
            continue
        found.add((name, extra))
        needed = ours[extra] if name == "nanoeuler" else []
        if name != "nanoeuler":
            with contextlib.suppress(metadata.PackageNotFoundError):
                needed = metadata.requires(name) or []
        for one in map(Requirement, needed):
            if not one.marker or one.marker.evaluate({"extra": extra}):
                todo += [(canonicalize_name(one.name), x) for x in ("", *one.extras)]
    return {name for name, _ in found}


def test_a_package_that_tests_need_is_in_the_extra_that_they_name():
    """One that only a developer happens to have is missing elsewhere, and its tests are skipped."""
    owners, extras = metadata.packages_distributions(), {}
    for path in sorted((ROOT / "tests").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "needs"
                    and isinstance(node.args[0], ast.Constant)):
                name = node.args[0].value.partition(".")[0]
                extra = EXTRAS.get(name, "dev")
                if extra not in extras:
                    extras[extra] = installed_with(extra)
                packages = {canonicalize_name(x) for x in owners.get(name, [name])}
                if name == "llama_cpp":
                    packages.add("llama-cpp-python")         # as long as it is not installed
                assert packages & extras[extra], f"{path.name}:{node.lineno}: {name} ({extra})"
