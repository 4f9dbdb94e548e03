"""Which conditions that the programs check were false in some test: one that never was may be
wrong, or missing, without a test that notices.

A condition is the first argument of `need`, `need_setting` or `refuse_unless`. It counts by its
operands: those of `and`, those of a negated `or`, and the two comparisons of `low <= x <= high`.
An operand was false in a test if an error was raised where it is the first false one. Processes
that tests fork from a warm one are watched as well (tests/warm.py), others are not.

After a run of all tests (`make test-all`), an operand that was never false ends the run with an
error, unless tests/never_false.txt lists it. That list may only get shorter. The run also names
the listed operands that were false, so that they can be removed. To write the list of a run of all
tests:

    NEVER_FALSE=write make test-all
"""
import ast
import contextlib
import functools
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "never_false.txt"
CHECKS = ("need", "need_setting", "refuse_unless")
SEEN = "NANOEULER_CONDITIONS"    # the file to which processes append the operands that were false
# A machine without a GPU runs few of these files' checks.
ON_GPU = ("nanoeuler_cuda.py", "nanoeuler_parts/gpu/", "nanoeuler_parts/tensor_cores/",
          "nanoeuler_parts/decode/", "nanoeuler_parts/ranks/")


# A careless edit may turn a comparison into one of these weaker ones, which accept more.
WEAKER = {ast.Eq: (ast.LtE, ast.GtE), ast.Lt: (ast.LtE,), ast.Gt: (ast.GtE,)}


class Condition(NamedTuple):
    first: int                   # lines of the call
    last: int
    operands: list               # (key, compiled expression)


def operands(node):
    """The parts of a condition of which each can make it false"""
    match node:
        case ast.BoolOp(op=ast.And(), values=values):
            return [x for value in values for x in operands(value)]
        case ast.UnaryOp(op=ast.Not(), operand=ast.BoolOp(op=ast.Or(), values=values)):
            return [x for value in values for x in operands(ast.UnaryOp(ast.Not(), value))]
        case ast.Compare(ops=[_, _, *_]):
            terms = [node.left, *node.comparators]
            return [ast.Compare(a, [op], [b]) for a, op, b in zip(terms, node.ops, terms[1:])]
    return [node]


def weaker(key):
    """{text: compiled expression} of the operands that are weaker than the one of this key: a == b
    becomes a <= b and a >= b, and a < b becomes a <= b"""
    node = ast.parse(key.partition(": ")[2].partition("  (")[0], mode="eval").body
    if not isinstance(node, ast.Compare) or len(node.ops) > 1:
        return {}
    found = [ast.Compare(node.left, [op()], node.comparators)
             for op in WEAKER.get(type(node.ops[0]), ())]
    return {ast.unparse(x): expression(x) for x in found}


@functools.cache
def conditions(path):
    """The Conditions of a file, the innermost last"""
    found, known = [], Counter()

    def named(key):
        """A text that occurs twice in a function gets a number."""
        known[key] += 1
        return key if known[key] == 1 else f"{key}  ({known[key]})"

    def visit(node, function):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}" if function else node.name
        within = function.rpartition(".")[2]             # a check in a check is its caller's
        if isinstance(node, ast.Call) and node.args and within not in CHECKS and (
                getattr(node.func, "id", getattr(node.func, "attr", "")) in CHECKS):
            found.append(Condition(node.lineno, node.end_lineno, [
                (named(f"{path} {function}: {ast.unparse(part)}"), expression(part))
                for part in operands(node.args[0])]))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse((ROOT / path).read_bytes()), "")
    return found


def expression(node):
    return compile(ast.fix_missing_locations(ast.Expression(node)), "<condition>", "eval")


def all_operands():
    """The keys of all operands of the programs, but those that only a GPU reaches"""
    files = [ROOT / name for name in ("bpe.py", "nanoeuler.py")]
    files += sorted((ROOT / "nanoeuler_parts").rglob("*.py"))
    names = [str(path.relative_to(ROOT)) for path in files]
    return {key for name in names if not name.startswith(ON_GPU)
            for condition in conditions(name) for key, _ in condition.operands}


# ---- in each process
def watch(*errors):
    """From now on, these classes of errors record which operand was false when they are made."""
    known = set()
    for error in errors:
        error.__init__ = recording(error.__init__, known)


def recording(init, known):
    @functools.wraps(init)
    def made(self, *args, **options):
        init(self, *args, **options)
        check = sys._getframe(1)
        while check.f_code.co_name == "__init__":        # of a class derived from this one
            check = check.f_back
        if check.f_code.co_name in CHECKS and SEEN in os.environ:
            with contextlib.suppress(Exception):
                record(check.f_back, known)
    return made


def first_false(frame, line):
    """The first false operand of the check in this line of a frame"""
    path = str(Path(frame.f_code.co_filename).relative_to(ROOT))
    parts = [x.operands for x in conditions(path) if x.first <= line <= x.last][-1]
    names = {**frame.f_globals, **frame.f_locals}
    return next(key for key, code in parts if len(parts) == 1 or not eval(code, names))


def frame_of(error):
    """(frame, line) of the check that raised this error"""
    calls, trace = [], error.__traceback__
    while trace:
        calls.append(trace)
        trace = trace.tb_next
    assert calls[-1].tb_frame.f_code.co_name in CHECKS, error
    return calls[-2].tb_frame, calls[-2].tb_lineno


def of_error(error):
    """`first_false` for an error that was caught"""
    return first_false(*frame_of(error))


def accepting(error):
    """The texts of the `weaker` operands that would have accepted what this error rejects. One that
    cannot be computed, such as <= of two dicts, counts as well, because every call would fail."""
    frame, _ = frame_of(error)
    names, found = {**frame.f_globals, **frame.f_locals}, set()
    for text, code in weaker(of_error(error)).items():
        try:
            found |= {text} if eval(code, names) else set()
        except Exception:
            found.add(text)
    return found


def record(frame, known):
    key = first_false(frame, frame.f_lineno)
    if key not in known:
        known.add(key)
        with open(os.environ[SEEN], "a", encoding="utf-8") as f:
            f.write(key + "\n")


# ---- the plugin of pytest
def pytest_configure(config):
    import bpe
    from nanoeuler_parts.serve.protocol import Refusal
    if not hasattr(config, "workerinput"):
        handle, os.environ[SEEN] = tempfile.mkstemp(suffix=".conditions")
        os.close(handle)
    watch(bpe.UserError, Refusal)


def is_whole(config):
    """Does this run have all tests?"""
    o = config.option
    last = getattr(o, "lf", False)           # of pytest's cache, which may be switched off
    some = o.keyword or o.markexpr or o.maxfail or last or o.collectonly or o.deselect
    return not some and [*config.args] == config.getini("testpaths")


def pytest_sessionfinish(session):
    config = session.config
    if hasattr(config, "workerinput"):
        return
    seen = Path(os.environ.pop(SEEN))
    false = set(seen.read_text(encoding="utf-8").splitlines())
    seen.unlink()
    kept = os.environ.get("KEEP_FALSE")      # a file that collects those of several runs
    if kept:
        with open(kept, "a", encoding="utf-8") as f:
            f.writelines(f"{key}\n" for key in sorted(false))
    if is_whole(config):
        compare(session, false)


def compare(session, false):
    listed, never = set(LIST.read_text(encoding="utf-8").splitlines()), all_operands() - false
    say = session.config.get_terminal_writer().line
    if os.environ.get("NEVER_FALSE") == "write":
        LIST.write_text("".join(f"{key}\n" for key in sorted(never)), encoding="utf-8")
        return
    gone = sorted(listed - never)
    if gone:
        say(f"note: {len(gone)} conditions in tests/never_false.txt were false or are gone; remove "
            f"them: {', '.join(gone[:5])}{', ...' * (len(gone) > 5)}")
    for key in sorted(never - listed):
        say(f"false in no test; write one in which it is: {key}")
    if never - listed and session.exitstatus == 0:
        session.exitstatus = 1
