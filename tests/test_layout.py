"""The map in a docstring is the list of sections; the linter; imports; what is installed."""
import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib

import pytest
from helpers import ROOT

import nanoeuler as ne
from nanoeuler_parts.tuning.dpo import DpoRun
from nanoeuler_parts.tuning.sft import SftRun

pytestmark = pytest.mark.unit
SHIPPED = [ROOT / name for name in ("nanoeuler.py", "nanoeuler_cuda.py", "bpe.py", "check.py")]
SHIPPED += sorted(p for folder in ("bench", "data", "serve", "tests")
            for p in (ROOT / folder).rglob("*.py"))
names = pytest.mark.parametrize("path", SHIPPED, ids=lambda p: str(p.relative_to(ROOT)))
RULE = re.compile(r"^# ==== (\S+) +(.+?) ====$", re.M)


def docstring(path):
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")), clean=False)


def entries(text):
    """number -> title of a map: lines of `    4.1  Title`, one or several a line."""
    lines = [s for s in text.splitlines() if re.match(r"^ {4}\d", s)]
    found = re.findall(r"(?:^|\s{2,})(\d+(?:\.\d+)?) +(\S.*?)(?=\s{2,}\d|$)", "\n".join(lines),
                       re.M)
    return {number: title.strip() for number, title in found}


@pytest.mark.parametrize("name", ["nanoeuler.py", "nanoeuler_cuda.py", "bpe.py"])
def test_sections_are_those_of_the_map(name):
    path = ROOT / name
    rules, listed = RULE.findall(path.read_text(encoding="utf-8")), entries(docstring(path))
    assert len(rules) >= 7
    assert [n for n, _ in rules] == sorted((n for n, _ in rules),
                                           key=lambda n: [int(k) for k in n.split(".")])
    assert [n for n, _ in rules] == sorted(listed, key=lambda n: [int(k) for k in n.split(".")])
    for number, title in rules:              # the map may say more: "Memory: tables of ..."
        words = [re.sub(r"\W", "", w).lower() for w in (title, listed[number])]
        assert words[1].startswith(words[0]) or words[0].endswith(words[1]), (title, listed[number])


def test_the_linter_finds_nothing():
    """Its rules are in pyproject.toml: lines end by column 100, every open() says its encoding."""
    ruff = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise"]
    said = subprocess.run([*ruff, *map(str, SHIPPED)], cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout + said.stderr


def imported(path, everywhere=True):
    """The modules, up to the first dot, that a file imports, anywhere or at its top level."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]


# Imports run one way: bpe <- nanoeuler <- nanoeuler_cuda, check, serve <- bench, tests.  A program
# starts itself by its own name, because Numba's cache knows named tuples by their module's name.
# One verb imports the server when it is called.
BELOW = {"bpe.py": {"bpe"}, "nanoeuler.py": {"bpe", "nanoeuler", "serve", "nanoeuler_serve"},
         "nanoeuler_cuda.py": {"bpe", "nanoeuler", "nanoeuler_cuda"},
         "check.py": {"nanoeuler"}}


@pytest.mark.parametrize("name", BELOW)
def test_programs_import_only_what_is_installed_with_them(name):
    """Everything else is an extra: imported where it is used, if it is there; so is the GPU program
    by the CPU's.  (import-linter reads packages, and refuses programs of one file.)"""
    allowed = {"numba", "numpy", "llvmlite", *BELOW[name], *sys.stdlib_module_names}
    allowed -= {"serve", "nanoeuler_serve"}
    if name == "nanoeuler_cuda.py":
        allowed.add("numba_cuda")
    assert set(imported(ROOT / name, everywhere=False)) <= allowed


OURS = {"bpe", "nanoeuler", "nanoeuler_cuda", "check", "serve", "nanoeuler_serve", "bench", "data",
        "tests", "oracles"}
OURS |= {p.stem for folder in ("bench", "data", "tests") for p in (ROOT / folder).glob("*.py")}


@names
def test_imports_run_one_way(path):
    found = set(imported(path)) & OURS
    folder = path.parent.name
    if path.parent == ROOT:
        assert found <= BELOW[path.name]
    elif folder == "serve":                  # the CPU's program alone; its own files as .name
        assert found - {p.stem for p in path.parent.glob("*.py")} <= {"nanoeuler"}
    elif folder == "data":                   # the scripts share a module of their own
        assert found <= {p.stem for p in path.parent.glob("*.py")}
    elif folder == "bench":                  # of the tests, their oracles alone
        assert not found & {"tests", "data", *(p.stem for p in (ROOT / "tests").glob("*.py"))}
    elif folder == "oracles":
        assert found <= {"nanoeuler", "nanoeuler_cuda"}
    else:                                    # what tests share is in files that are none
        assert folder == "tests" and not [name for name in found if name.startswith("test_")]


KINDS = {"unit", "cli", "interop", "gpu"}


def test_a_test_has_one_kind(request):
    """Those of this session: all, in a run of all."""
    for item in request.session.items:
        kinds = KINDS.intersection(mark.name for mark in item.iter_markers())
        assert len(kinds) == 1, (item.nodeid, kinds)


def test_nothing_is_installed_by_a_name_that_is_everybodys():
    """`data`, `bench` and `check` are names of the repository; bpe.py is a part of the programs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    setuptools = project["tool"]["setuptools"]
    assert sorted(setuptools["py-modules"]) == ["bpe", "nanoeuler", "nanoeuler_cuda"]
    assert setuptools["packages"] == ["nanoeuler_data", "nanoeuler_serve"]
    shipped = setuptools["package-data"]["nanoeuler_data"]
    for run in (ne.Run, SftRun, DpoRun):           # what they learn if they are not told
        assert os.path.basename(run.Options.data) in shipped
    model = os.path.basename(ne.SHIPPED), "MODEL.md"     # and what they talk to: both, or neither
    assert {*model} <= {*shipped}
    there = [(ROOT / "data" / name).exists() for name in model]
    assert there[0] == there[1]
    assert all((ROOT / "data" / name).exists() for name in shipped if name not in model)


MODULES = {"ne": "nanoeuler", "nc": "nanoeuler_cuda", "bpe": "bpe", "check": "check"}


@pytest.mark.parametrize("path", [p for p in SHIPPED if p.parent.name in ("bench", "oracles")],
                         ids=lambda p: p.name)
def test_what_benchmarks_use_of_the_programs_is_there(path):
    """They run for minutes, some on a GPU only: a name that went away must show before."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if name := MODULES.get(node.value.id):
                if name == "nanoeuler_cuda":
                    pytest.importorskip("numba_cuda", reason="numba-cuda comes with the extra cuda")
                module = importlib.import_module(name)
                assert hasattr(module, node.attr), f"{path.name}:{node.lineno}: {name}.{node.attr}"


@names
def test_the_oldest_python_understands_it(path):
    ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 11))
