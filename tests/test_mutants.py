"""The bugs that mutants.py plants, and the kernels that it keeps."""
import ast
from collections import Counter

import mutants
import pytest

pytestmark = pytest.mark.unit
PLOT = "nanoeuler_parts/tools/plot.py"
KINDS = {"compare", "arithmetic", "constant", "logic", "statement", "call", "slice", "return"}


@pytest.fixture(scope="module")
def names():
    return mutants.Names()


def test_a_seed_draws_the_same_bugs_and_each_is_another_program():
    drawn = mutants.draw([PLOT], 12, 3)
    assert drawn == mutants.draw([PLOT], 12, 3) != mutants.draw([PLOT], 12, 4)
    assert len({change.line for change in drawn}) == len(drawn) == 12
    source = mutants.Source(PLOT)
    for change in drawn:
        new = source.changed(change)
        assert ast.dump(ast.parse(new)) != ast.dump(source.tree)
        assert new.count(b"\n") == source.text.count(b"\n")
        assert mutants.difference(change)


def test_bugs_of_every_kind_and_none_in_a_text():
    source = mutants.Source("nanoeuler_parts/serve/protocol.py")
    found = [change for changes in source.changes().values() for change in changes]
    assert {*Counter(change.kind for change in found)} == KINDS
    texts = [(source.begin(node), source.end(node)) for node in ast.walk(source.tree)
             if mutants.is_text(node) and isinstance(node, ast.Expr | ast.JoinedStr)]
    assert not [change for change in found for first, last in texts
                if first < change.start and change.stop < last]


def test_lines_may_be_chosen():
    lines = sorted(mutants.Source(PLOT).changes())
    for span, first, last in ((f":{lines[3]}-{lines[6]}", 3, 6), (f":{lines[5]}", 5, 5)):
        drawn = mutants.draw([PLOT + span], 100, 1)
        assert {change.line for change in drawn} == {*lines[first:last + 1]}


def test_the_programs_are_divided_by_the_gpu():
    cpu, gpu = mutants.product(False), mutants.product(True)
    assert not {*cpu} & {*gpu} and {"bpe.py", "nanoeuler.py", PLOT} <= {*cpu}
    assert "nanoeuler_cuda.py" in gpu and "nanoeuler_parts/tensor_cores/scheduler.py" in gpu


def test_kernels_are_those_that_contain_a_function(names):
    """A change of a kernel's callee reaches it; a change of a class or of the host reaches none."""
    first = {name: span[0] for span in names.spans["nanoeuler.py"] for name in [span[2]]}
    reached = names.kernels("nanoeuler.py", first["rmsnorm_backward"])
    assert {"rmsnorm_backward", "backward", "run_batch"} <= {*reached}
    assert "attend" not in reached and not names.kernels("nanoeuler.py", first["PlainRun"] + 1)


def test_a_kernel_contains_functions_of_other_files_but_not_their_namesakes(names):
    """`launch` of the command line is not the `launch` of the GPU's kernels, and a variable that is
    named like a function does not use it."""
    first = {(path, name): line for path, spans in names.spans.items()
             for line, _, name, _ in spans}
    for path, name in ("nanoeuler_parts/runs/start.py", "launch"), (
            "nanoeuler_parts/tuning/sft.py", "shown"):
        assert not {"adamw", "decode_step", "run_batch"} & names.kernels(path, first[path, name])
    tile = "nanoeuler_parts/machine/tile.py"
    assert {"run_batch", "decode_step", "muon"} <= names.kernels(tile, first[tile, "tile"])


def test_the_most_likely_tests_come_first(names):
    change = mutants.draw([PLOT], 1, 1)[0]
    assert mutants.ordered(change, names)[0].name == "test_plot.py"


@pytest.mark.parametrize("path, function, first", [
    ("serve/app.py", "described", "test_serve"), ("tools/evaluation.py", "choose", "test_eval"),
    ("chat/json_schema.py", "disjoint", "test_json_mode")])
def test_tests_that_are_named_after_a_file_or_its_folder_are_likely(path, function, first, names):
    """Although other files contain the name of the function by chance"""
    path = f"nanoeuler_parts/{path}"
    line = next(start for start, _, name, _ in names.spans[path] if name == function)
    change = mutants.Change(path, line + 1, "return", 0, 0, b"")
    assert any(file.stem.startswith(first) for file in mutants.ordered(change, names)[:2])
