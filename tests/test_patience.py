"""The tests themselves: a busy machine fails none, and none leaves a child or a thread behind."""
import ast
import functools
import os
import re
import subprocess
import sys

import children
import conditions
import pytest
from helpers import ROOT

pytestmark = pytest.mark.unit
FILES = sorted((ROOT / "tests").rglob("*.py"))
CLOCKS = ("time", "monotonic", "perf_counter")


@functools.cache
def found_in(path):
    """(the calls that make threads, the assertions and loops) in a file, which is parsed once"""
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    return ([node for node in nodes if isinstance(node, ast.Call) and is_thread(node.func)],
            [node for node in nodes if isinstance(node, ast.Assert | ast.While)])


def is_thread(function):
    """threading.Thread, or Thread"""
    owner = getattr(getattr(function, "value", None), "id", "")
    return getattr(function, "id", "") == "Thread" or (
        getattr(function, "attr", "") == "Thread" and owner == "threading")


def calls(node, module, names):
    """Does the expression call one of these functions of a module?"""
    return any(isinstance(x, ast.Call) and isinstance(x.func, ast.Attribute)
               and getattr(x.func.value, "id", "") == module and x.func.attr in names
               for x in ast.walk(node))


@pytest.mark.parametrize("path", [path for path in FILES if path.name not in (
    "children.py", "mutants.py", "test_gpu.py", "test_gpus.py")], ids=lambda p: p.name)
def test_no_test_measures_with_the_clock_of_the_wall(path):
    """Work is counted, or measured in the processor's time; waiting is `children.until`. Tests on a
    GPU, which has no other user, may look at the clock."""
    for node in found_in(path)[1]:
        assert not calls(node.test, "time", CLOCKS), f"{path.name}:{node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_a_thread_of_a_test_does_not_keep_pytest_from_ending(path):
    for node in found_in(path)[0]:
        assert "daemon" in [word.arg for word in node.keywords], f"{path.name}:{node.lineno}"


FAILS = """
import subprocess, sys
SLEEP = [sys.executable, "-c", "import time; print(flush=True); time.sleep(700)"]

def test_with():
    with subprocess.Popen(SLEEP, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        print("child", child.pid)
        assert False

def test_without():
    child = subprocess.Popen(SLEEP, stdout=subprocess.PIPE)
    child.stdout.readline()
    print("child", child.pid)
    assert False
"""


def test_a_failing_test_leaves_no_child(tmp_path):
    """pytest would wait for the child of a `with`, and leave the other one."""
    (tmp_path / "test_fails.py").write_text(FAILS, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests"),
           "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    said = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "children", "--rootdir",
                           tmp_path, tmp_path / "test_fails.py"], cwd=tmp_path, env=env,
                          capture_output=True, encoding="utf-8", timeout=400).stdout
    pids = re.findall(r"^child (\d+)$", said, re.M)
    assert "2 failed" in said and len(pids) == 2, said
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_a_limit_of_time_is_long_or_the_subject_of_its_test():
    """A child that ends at once does not wait for it; one that hangs has at least PATIENCE."""
    asked = []

    class Recorded(children.Child):
        def _wait(self, timeout):
            asked.append(timeout)
            return super()._wait(None)

    with Recorded([sys.executable, "-S", "-c", ""]) as child:
        child.wait(timeout=20)
    with Recorded([sys.executable, "-S", "-c", ""]) as child:
        child.wait(timeout=0.5)
    assert [x for x in asked if x is not None] == [children.PATIENCE, 0.5]
    assert subprocess.Popen is children.Child


def test_another_copy_of_the_program_is_not_on_the_path(tmp_path):
    (tmp_path / "bpe.py").touch()
    (tmp_path / "other").mkdir()
    path = os.pathsep.join([str(tmp_path), "", str(tmp_path / "other"), str(ROOT)])
    assert children.without_programs(path) == str(tmp_path / "other")


# ---- conditions
@pytest.mark.parametrize("text, parts", [
    ("a", ["a"]), ("a and b and c", ["a", "b", "c"]), ("a and (b and c)", ["a", "b", "c"]),
    ("a or b", ["a or b"]), ("not (a or b)", ["not a", "not b"]), ("not a", ["not a"]),
    ("0 <= x < 9", ["0 <= x", "x < 9"]), ("x and 0 < x <= 9", ["x", "0 < x", "x <= 9"])])
def test_the_operands_of_a_condition(text, parts):
    found = conditions.operands(ast.parse(text, mode="eval").body)
    assert [*map(ast.unparse, found)] == parts


class Error(Exception):
    pass


def need(ok, message=""):
    if not ok:
        raise Error(message)


def test_operands_that_are_false_are_recorded(tmp_path, monkeypatch):
    """Once per process, by the first operand that is false, wherever its variables are"""
    monkeypatch.setenv(conditions.SEEN, str(tmp_path / "seen"))
    conditions.watch(Error)
    for x in (3, 12, -4, "x", 12):
        with pytest.raises(Error):
            need(type(x) is int and -2 <= x < 9 and all(x > 3 + y for y in range(2)),
                 "several lines")
    where = "tests/test_patience.py test_operands_that_are_false_are_recorded: "
    seen = (tmp_path / "seen").read_text(encoding="utf-8").splitlines()
    assert seen == [where + part for part in (
        "all((x > 3 + y for y in range(2)))", "x < 9", "-2 <= x", "type(x) is int")]


def test_the_list_of_conditions_names_conditions_of_the_programs():
    assert len(conditions.all_operands()) > 400
    listed = conditions.LIST.read_text(encoding="utf-8").splitlines()
    assert listed == sorted({*listed}), "sorted, each once"
