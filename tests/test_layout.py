"""The map in a docstring is the list of sections, lines end by column 100, files are UTF-8."""
import ast
import re

import pytest
from conftest import ROOT

SHIPPED = [ROOT / name for name in ("nanoeuler.py", "nanoeuler_cuda.py", "bpe.py", "check.py")]
SHIPPED += sorted(p for folder in ("bench", "data", "tests") for p in (ROOT / folder).glob("*.py"))
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


@names
def test_lines_end_by_column_100(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [(i, len(s)) for i, s in enumerate(lines, 1) if len(s) > 100] == []
    assert [i for i, s in enumerate(lines, 1) if s != s.rstrip() or "\t" in s] == []


@names
def test_every_open_names_its_encoding(path):
    """Text read or written in the machine's own encoding is other text on another machine."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        given = {k.arg for k in node.keywords}
        if name in ("read_text", "write_text"):
            at = 0 if name == "read_text" else 1
            assert "encoding" in given or len(node.args) > at, f"{path.name}:{node.lineno}"
        if name == "open" and isinstance(node.func, ast.Name):
            mode = node.args[1] if len(node.args) > 1 else None
            binary = isinstance(mode, ast.Constant) and "b" in str(mode.value)
            assert binary or "encoding" in given, f"{path.name}:{node.lineno}"


@pytest.mark.parametrize("name", ["nanoeuler.py", "bpe.py", "check.py", "data/chats.py",
                                  "data/commands.py", "data/kernels.py", "data/tensors.py",
                                  "data/texts.py"])
def test_programs_import_only_what_is_installed_with_them(name):
    """Everything else is an extra: imported where it is used, if it is there."""
    allowed = {"numba", "numpy", "llvmlite", "nanoeuler", "bpe", "data"}
    import sys
    for node in ast.parse((ROOT / name).read_text(encoding="utf-8")).body:
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else (
            [node.module] if isinstance(node, ast.ImportFrom) else [])
        for module in modules:
            assert module.split(".")[0] in allowed | set(sys.stdlib_module_names), module
