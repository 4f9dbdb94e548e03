"""The map in a docstring is the list of sections; the linter; imports; what is installed."""
import ast
import builtins
import functools
import graphlib
import importlib
import json
import os
import re
import subprocess
import symtable
import sys
import tomllib
from typing import NamedTuple

import pytest
from helpers import ROOT

from nanoeuler_parts.checkpoint import bundled
from nanoeuler_parts.runs.run import Run
from nanoeuler_parts.tuning.dpo import DpoRun
from nanoeuler_parts.tuning.rl import RlRun
from nanoeuler_parts.tuning.sft import SftRun

pytestmark = pytest.mark.unit


def python_files(folder):
    """Those of the repository, without what git ignores: an environment has thousands of folders"""
    for path in folder.iterdir():
        if path.is_dir() and path.name[0] != "." and path.name not in ("build", "dist", "out"):
            yield from python_files(path)
        elif path.suffix == ".py":
            yield path


SHIPPED = sorted(python_files(ROOT))
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


IMPORT, DEFINITION = (ast.Import, ast.ImportFrom), (ast.FunctionDef, ast.ClassDef)
OLDEST = 3, 11               # the oldest Python that must understand the files


class Top(NamedTuple):
    """A statement at the top level of a file"""
    kind: type
    name: str                                # of a function or class, else empty
    imports: list                            # the import statements in it


def imports_in(node):
    """The import statements in a statement.  No expression has one, so that few nodes are visited.
    """
    if isinstance(node, IMPORT):
        yield node
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, part, ()):
            yield from imports_in(inner)


@functools.cache
def tops(path):
    """Each file is parsed once for all tests of its imports, by the rules of the oldest Python."""
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=OLDEST)
    return [Top(type(node), getattr(node, "name", ""), [*imports_in(node)]) for node in tree.body]


def imported(path, everywhere=True):
    """The modules, up to the first dot, that a file imports, anywhere or at its top level."""
    for top in tops(path):
        for node in top.imports if everywhere or issubclass(top.kind, IMPORT) else ():
            if isinstance(node, ast.Import):
                yield from (alias.name.split(".")[0] for alias in node.names)
            else:
                yield (node.module or "").split(".")[0]


# Imports run one way: a module imports those of lower levels and of its own folder.
LEVELS = [
    {"bpe"},
    {"machine", "files", "tokenizers", "gpu"},
    {"nanoeuler"},
    {"checkpoint"},
    {"flags"},
    {"kernels"},
    {"lora"},
    {"chat"},
    {"runs"},
    {"tuning", "interchange", "tools"},
    {"serve", "cli"},
    {"tools.on_gpu"},
    {"nanoeuler_cuda"},
    {"gpu_memory"},
    {"gpu_lora"},
    {"tensor_cores", "ranks"},
    {"decode"},
    {"selftests"},
]
# Folders of one level that may import each other
SIBLINGS = {("machine", "files"), ("files", "machine"), ("gpu", "machine"), ("gpu", "files"),
            ("tools", "tuning")}
# Functions and classes that import from a higher level when they are called
UPWARD = {
    ("bpe", "Tokenizer", "tokenizers"),
    ("nanoeuler", "Model", "kernels"), ("nanoeuler", "Decoder", "kernels"),
    ("nanoeuler", "main", "cli"),
    *(("kernels", name, "lora") for name in (
        "compile_lora", "compile_lora_decoding", "lora_decoding_kernels", "lora_kernels")),
    ("runs.start", "launch_any", "tuning"),              # a run with LoRA
    ("chat.terminal", "conversation_in", "tuning"),      # /load reads the files of `sft`
    *(("tools.on_gpu", name, "nanoeuler_cuda")           # when its verb runs
      for name in ("device_verb", "self_tests", "gradient_check", "ladder", "on_one_gpu",
                   "doctor")),
    ("tools.on_gpu", "on_one_gpu", "gpu_lora"),
    ("gpu_memory", "bytes_of_lists", "decode"),          # if the folder is there
    *(("tools.on_gpu", name, "selftests") for name in ("self_tests", "gradient_check", "ladder")),
    ("tools.on_gpu", "training_verb", "ranks"),
    ("nanoeuler_cuda", "tensor_cores", "tensor_cores"),
    ("nanoeuler_cuda", "fast_decoder", "decode"),
    ("nanoeuler_cuda", "load_gpu_memory", "gpu_memory"),
}
PARTS = sorted((ROOT / "nanoeuler_parts").rglob("*.py"))
PROGRAMS = ("bpe.py", "nanoeuler.py", "nanoeuler_cuda.py", "check.py")
ON_CUDA = "tensor_cores", "decode", "ranks", "selftests"
BELOW = {"bpe.py": {"bpe"}, "nanoeuler.py": {"bpe", "nanoeuler", "nanoeuler_parts"},
         "nanoeuler_cuda.py": {"bpe", "nanoeuler", "nanoeuler_cuda", "nanoeuler_parts"},
         "check.py": {"nanoeuler", "nanoeuler_parts"}}


def unit_of(module):
    """The entry of LEVELS for a module: `chat` for nanoeuler_parts.chat.speaker"""
    name = module.removeprefix("nanoeuler_parts.")
    return name if name == "tools.on_gpu" else name.split(".")[0]


def level_of(unit):
    [level] = [i for i, units in enumerate(LEVELS) if unit in units]
    return level


def module_of(path):
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES_OF_PARTS = {module_of(path) for path in PARTS}


def modules_imported(node):
    """The full names of the modules that an import statement names"""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    submodules = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in submodules if name in MODULES_OF_PARTS] or [node.module]


@pytest.mark.parametrize("path", [*(ROOT / name for name in PROGRAMS), *PARTS],
                         ids=lambda path: module_of(path))
def test_a_section_that_is_named_exists(path):
    """`(13)` and `section 13` mean the own file's section, if no other program is named with it."""
    text = re.sub(r"\n *#? *", " ", path.read_text(encoding="utf-8"))
    own = path.name if path.name in PROGRAMS else ""
    named = [(m[2] or m[3], m[1] or m[4] or own) for m in re.finditer(
        r"(?:(nanoeuler|nanoeuler_cuda|bpe)\.py, )?"
        r"(?:[sS]ection (\d+(?:\.\d)?)|(?<=[a-zA-Z`] )\((\d+(?:\.\d)?)\))"
        r"(?: of (nanoeuler|nanoeuler_cuda|bpe)\.py)?", text)]
    for number, program in named:
        if program or path in PARTS:
            program = program or "nanoeuler"             # whose functions have their section behind
            program = f"{program.removesuffix('.py')}.py"
            sections = {n for n, _ in RULE.findall((ROOT / program).read_text(encoding="utf-8"))}
            assert number in sections or f"{number}.1" in sections, (number, program)


# ---- Part I of nanoeuler.py
PART_ONE, PART_TWO = "# ======== Part I: the program ========", "# ======== Part II"
# What Part I uses of nanoeuler_parts; where the folder is missing, the head of the file defines it
OF_THE_FOLDER = {"jit", "jit_parallel", "value", "rounded", "larger", "Settings", "setting",
                 "need_setting", "TILE_BYTES"}


def globals_of(table):
    """The names that a block of code, and the functions in it, read from the module"""
    inner = {name for child in table.get_children() for name in globals_of(child)}
    if table.get_type() == "module":
        return inner | {x.get_name() for x in table.get_symbols() if x.is_referenced()}
    return inner | {x.get_name() for x in table.get_symbols() if x.is_global()}


def test_part_one_uses_no_later_name_and_nothing_of_the_folder():
    """It is read from top to bottom, and runs alone."""
    source = (ROOT / "nanoeuler.py").read_text(encoding="utf-8")
    head, part_one = source[:source.index(PART_TWO)].split(PART_ONE)
    tree = ast.parse(head)
    of_folder = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
                 and (node.module or "").startswith("nanoeuler_parts") for alias in node.names}
    assert of_folder == OF_THE_FOLDER | {"OPTIONS"}      # these are for Part II
    known = {*dir(builtins), *OF_THE_FOLDER, "__name__"} | {
        name for node in tree.body if not isinstance(node, (ast.If, ast.Try))
        for name in bound_by(node)}
    missing = tree.body[-1].orelse           # of `if nanoeuler_parts:`
    assert of_folder == {name for node in missing for name in bound_by(node)}
    used = set()
    for node in ast.parse(part_one).body:
        of_node = globals_of(symtable.symtable(ast.unparse(node), "nanoeuler.py", "exec"))
        new = bound_by(node)
        assert of_node <= known | new, f"{of_node - known - new}, used above their definition"
        known |= new
        used |= of_node
    assert OF_THE_FOLDER <= used             # the list names nothing else


def test_part_two_says_what_it_replaces_and_gives_an_example():
    """The first before its first definition, the example at the place that it explains"""
    source = (ROOT / "nanoeuler.py").read_text(encoding="utf-8")
    part_one, part_two = source.split(PART_TWO)[:2]
    part_two = part_two.split("# ======== Part III")[0]
    sections = re.split(r"^# ==== (\d+) .* ====\n", part_two, flags=re.M)[1:]
    assert len(sections) >= 2 * 7
    in_part_one = {n for n, _ in RULE.findall(part_one)}
    for number, text in zip(sections[::2], sections[1::2]):
        head = re.match(r"(# .*\n|#\n)*", text).group()
        replaced = re.search(r"This replaces (.*?\.)\s", head.replace("\n# ", " "))
        assert replaced, f"section {number}: begin with the piece of Part I that it replaces"
        numbers = re.findall(r"(?<![\d.])\d+(?:\.\d+)?", replaced[1])
        assert numbers and {*numbers} <= in_part_one, (number, replaced[1])
        assert "# Example" in text, f"section {number} has no example"


def test_in_part_two_only_model_uses_later_names():
    """It updates by Muon, and makes decoders: the next two sections."""
    source = (ROOT / "nanoeuler.py").read_text(encoding="utf-8")
    begin, end = source.index(PART_TWO), source.index("# ======== Part III")
    known = {*dir(builtins), "__name__"}
    for node in ast.walk(ast.parse(source[:begin])):
        known |= bound_by(node)
    part, later = ast.parse(source[begin:end]).body, {}
    bound = {name for node in part for name in bound_by(node)}
    for node in part:
        if isinstance(node, ast.If):         # `if nanoeuler_parts:` imports
            known |= {name for inner in ast.walk(node) for name in bound_by(inner)}
        of_node = globals_of(symtable.symtable(ast.unparse(node), "nanoeuler.py", "exec"))
        known |= bound_by(node)
        if unknown := (of_node - known) & bound:
            later[node.name] = unknown
    assert later == {"Model": {"Decoder", "hyper_of_embedding", "muon", "muon_matrices",
                               "muon_shapes"}}


def bound_by(node):
    """The names that a statement at the top level defines"""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(
        x.ctx, ast.Store)}


@pytest.mark.parametrize("name", BELOW)
def test_programs_import_only_what_is_installed_with_them(name):
    """Everything else is an extra: imported where it is used, if it is there; so is the GPU program
    by the CPU's.  (import-linter reads packages, and refuses programs of one file.)"""
    allowed = {"numba", "numpy", "llvmlite", *BELOW[name], *sys.stdlib_module_names}
    if name == "nanoeuler_cuda.py":
        allowed.add("numba_cuda")
    assert set(imported(ROOT / name, everywhere=False)) <= allowed


TOP = {".ci", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md",
       "bench", "bpe.py", "check.py", "data", "docs", "nanoeuler.py", "nanoeuler_cuda.py",
       "nanoeuler_parts", "pyproject.toml", "tests"}


def test_nothing_else_is_at_the_top_level():
    """A mistyped command can leave a file behind, which `git add -A` then takes."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a clone: git knows no files of it")
    assert {name.split("/")[0] for name in tracked.stdout.split("\0") if name} == TOP


IMPORTING = [*PARTS, *(ROOT / name for name in PROGRAMS[:3])]


def units_imported(top, unit):
    """The units of LEVELS from which the import statements in this code take something"""
    names = {name for node in top.imports for name in modules_imported(node)}
    names = {name for name in names if name.split(".")[0] in OURS and name != "nanoeuler_parts"}
    return {unit_of(name) for name in names} - {unit}


@pytest.mark.parametrize("path", [path for path in IMPORTING
                                  if module_of(path) != "nanoeuler_parts"], ids=module_of)
def test_imports_run_from_higher_levels_to_lower_ones(path):
    """At the top of a module.  A function may import from above when it is called, if it is in
    UPWARD."""
    unit = unit_of(module_of(path))
    for top in tops(path):
        inner = issubclass(top.kind, DEFINITION)
        for other in units_imported(top, unit):
            if level_of(other) < level_of(unit) or (unit, other) in SIBLINGS:
                continue
            where = module_of(path).removeprefix("nanoeuler_parts.")
            assert inner and (where, top.name, other) in UPWARD, (
                f"{where} may not import {other}, which is not below it")


def test_the_list_of_imports_from_above_has_no_other_entry():
    for where, name, other in UPWARD:
        path = next(path for path in IMPORTING
                    if module_of(path).removeprefix("nanoeuler_parts.") == where)
        [top] = [top for top in tops(path) if top.name == name]
        assert other in units_imported(top, unit_of(module_of(path)))


def test_no_module_imports_itself_through_others():
    """At their tops: what a function imports when it is called makes no cycle."""
    graph = {}
    for path in [*PARTS, *(ROOT / name for name in PROGRAMS)]:
        name = module_of(path)
        graph[name] = {x for top in tops(path) if not issubclass(top.kind, DEFINITION)
                       for node in top.imports for x in modules_imported(node)
                       if x.split(".")[0] in OURS and x != name}
    graphlib.TopologicalSorter(graph).prepare()          # raises CycleError


LOADED = """
import json, sys
sys.path.insert(0, {root!r})
import nanoeuler as ne
from nanoeuler_parts import cli
higher, before, found = {higher!r}, set(sys.modules), {{}}
for name, *_ in cli.VERBS:
    try:
        cli.parse(cli.VERBS, "", [name, "--help"])
    except SystemExit:
        pass
    new = [x for x in sys.modules if x.startswith(higher) and x.count(".") > 1]
    found[name] = sorted(x.removeprefix("nanoeuler_parts.") for x in new)
    for x in new:
        del sys.modules[x]
print("\\n" + json.dumps(found))
"""


def test_a_verb_loads_no_module_of_another():
    higher = tuple(f"nanoeuler_parts.{x.name}" for x in (ROOT / "nanoeuler_parts").iterdir()
                   if (x / "__init__.py").exists() and level_of(x.name) > level_of("nanoeuler"))
    code = LOADED.format(root=str(ROOT), higher=higher)
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = json.loads(said.stdout.splitlines()[-1])
    files, talk = {"checkpoint"}, {"checkpoint", "chat"}
    speak = {*talk, "lora"}
    assert {verb: {name.split(".")[0] for name in names} for verb, names in found.items()} == {
        "train": {*talk, "runs"}, "sft": {*talk, "runs", "tuning"},
        "dpo": {*talk, "runs", "tuning"}, "rl": {*talk, "runs", "tuning"},
        "chat": speak, "generate": speak,
        "lens": {*speak, "tools"}, "eval": {*speak, "tuning", "tools"}, "serve": {*talk, "serve"},
        "plot": {"tools"}, "info": {*talk, "tools"}, "list": {*talk, "tools"},
        "quantize": {*files, "interchange"}, "export": {*speak, "interchange"},
        "import": {*talk, "interchange"}, "compile": set()}
    shared = ["interchange.forms", "interchange.gguf", "interchange.huggingface",
              "interchange.llama", "interchange.tokenizers"]
    tuning = ["tuning.examples", "tuning.formats"]
    learns = ["tuning.rehearsal", "tuning.rows"]
    several = {"sft": [*tuning, *learns, "tuning.sft"],
               "dpo": ["tuning.dpo", *tuning, *learns, "tuning.sft"],
               "rl": [*tuning, "tuning.grpo", "tuning.rehearsal", "tuning.rewards", "tuning.rl",
                      "tuning.rows", "tuning.sft"],
               "eval": ["tools.evaluation", *tuning, "tuning.rewards"],
               "export": ["interchange.exporting", *shared],
               "import": sorted(["interchange.importing", *shared])}
    for verb, names in found.items():        # in folders with the modules of several verbs
        own = [name for name in names if name.split(".")[0] in ("tuning", "interchange", "tools")]
        assert own == several[verb] if verb in several else len(own) <= 1, verb


OURS = {"bpe", "nanoeuler", "nanoeuler_cuda", "nanoeuler_parts", "check", "bench", "data", "tests",
        "oracles"}
OURS |= {p.stem for folder in ("bench", "data", "tests") for p in (ROOT / folder).glob("*.py")}


@names
def test_imports_run_one_way(path):
    found = set(imported(path)) & OURS
    folder = path.relative_to(ROOT).parts[0]
    if path.parent == ROOT:
        of_method = {"nanoeuler_parts"} if path.name == "bpe.py" else set()
        assert found <= BELOW[path.name] | of_method
    elif folder == "nanoeuler_parts":
        is_above = path.parent.name in ON_CUDA or path.name in ("on_gpu.py", "gpu_lora.py",
                                                                "gpu_memory.py")
        of_cuda = {"nanoeuler_cuda"} if is_above else set()
        assert found <= {"bpe", "nanoeuler", "nanoeuler_parts"} | of_cuda
    elif folder == "data":                   # the scripts share a module of their own
        assert found <= {p.stem for p in path.parent.glob("*.py")}
    elif folder == "bench":                  # of the tests, their oracles alone
        assert not found & {"tests", "data", *(p.stem for p in (ROOT / "tests").glob("*.py"))}
    elif path.parent.name == "oracles":
        assert found <= {"nanoeuler", "nanoeuler_cuda", "nanoeuler_parts"}
    elif folder == "docs":                   # the reader's own model of the tour: NumPy only
        assert not found and set(imported(path)) == {"re", "numpy"}
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
    packages = sorted({module_of(path.parent / "__init__.py") for path in PARTS})
    assert setuptools["packages"] == ["nanoeuler_data", "nanoeuler_docs", *packages]
    assert all((ROOT / name.replace(".", "/") / "__init__.py").exists() for name in packages)
    shipped = setuptools["package-data"]["nanoeuler_data"]
    for run in (Run, SftRun, DpoRun, RlRun):    # what they learn if they are not told
        assert os.path.basename(run.Options.data) in shipped
    model = os.path.basename(bundled.SHIPPED), "MODEL.md"  # and what they talk to: both, or neither
    assert {*model} <= {*shipped}
    there = [(ROOT / "data" / name).exists() for name in model]
    assert there[0] == there[1]
    assert all((ROOT / "data" / name).exists() for name in shipped if name not in model)


MODULES = {"ne": "nanoeuler", "nc": "nanoeuler_cuda", "bpe": "bpe", "check": "check"}


SELDOM_RUN = [*(p for p in SHIPPED if p.parent.name in ("bench", "oracles")),
              ROOT / "tests/test_gpu.py", ROOT / "tests/test_gpus.py"]


@pytest.mark.parametrize("path", SELDOM_RUN, ids=lambda p: p.name)
def test_what_benchmarks_and_gpu_tests_use_of_the_programs_is_there(path):
    """They run for minutes, some on a GPU only: a name that went away must show before."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("nanoeuler_parts"):
            if re.match("nanoeuler_parts.(gpu|tensor_cores|decode|ranks|selftests|tools.on_gpu)",
                        node.module):
                pytest.importorskip("numba_cuda", reason="numba-cuda comes with the extra cuda")
            module = importlib.import_module(node.module)
            for name in (alias.name for alias in node.names):
                assert hasattr(module, name) or importlib.util.find_spec(f"{node.module}.{name}"), (
                    f"{path.name}:{node.lineno}: {node.module}.{name}")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if name := MODULES.get(node.value.id):
                if name == "nanoeuler_cuda":
                    pytest.importorskip("numba_cuda", reason="numba-cuda comes with the extra cuda")
                module = importlib.import_module(name)
                assert hasattr(module, node.attr), f"{path.name}:{node.lineno}: {name}.{node.attr}"


@names
def test_the_oldest_python_understands_it(path):
    assert tops(path) or path.read_text(encoding="utf-8").strip() == ""


def test_one_function_prints_notes():
    """bpe.note, which escapes what would control a terminal.  A second one did not."""
    found = [path.name for path in IMPORTING
             if re.search(r"^ *def note\(", path.read_text(encoding="utf-8"), re.M)]
    assert found == ["bpe.py"]


# Functions that words for an error may call, although there may be no error: they take microseconds
CHEAP = {"len", "map", "filter", "sorted", "set", "max", "min", "str", "type", "join", "get",
         "split", "replace", "values", "counted", "shown", "shown_name", "typed", "typed_name",
         "as_typed", "printable", "quote", "dumps", "basename", "sub", "forms", "missing",
         "or_else", "cut_short", "limits_of", "digits_of", "alternatives", "data_file", "stat",
         "count_nonzero", "keys", "names_in"}


def words_for_errors(path):
    """(line, function) of each call in the words of a `need`"""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("need", "need_setting"):
            for inner in (x for words in node.args[1:] for x in ast.walk(words)):
                if isinstance(inner, ast.Call):
                    name = getattr(inner.func, "attr", getattr(inner.func, "id", "?"))
                    yield inner.lineno, name


@names
def test_words_for_an_error_that_does_not_occur_cost_nothing(path):
    """`need(ok, words)` computes the words first.  What takes time belongs after `if not ok`."""
    if "nanoeuler_parts" not in path.parts and path.parent != ROOT:
        return
    slow = [(line, name) for line, name in words_for_errors(path) if name not in CHEAP]
    assert not slow, slow
