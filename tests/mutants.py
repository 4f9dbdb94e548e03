r"""Plants bugs in the code, one at a time, and lists those that the tests do not find.

    python tests/mutants.py [FILE[:FIRST-LAST] ...] [--n 40] [--seed 1] [--gpu] [--list]

A bug is drawn over the lines of code: first a line, then one of the changes that it allows. These
are the kinds:

    compare    == != < <= > >= is in: the opposite, or the neighbor that differs for equal values
    arithmetic + - * / // % << >> & | and their assignments
    constant   a number one larger or one smaller; True and False; a float doubled
    logic      and, or; one operand of them dropped; a dropped `not`; a dropped sign
    statement  a call, an assignment to a field or an element, raise, break or continue dropped
    call       two neighboring arguments swapped; a named argument dropped
    slice      an end moved by one, or dropped
    return     None instead of the value

Each bug is applied to a copy of the tree in a temporary folder, with the compiled kernels of this
tree. Kernels that the change can reach are compiled again, all others are kept. Then the quick
tests run, which are all that are not marked `slow`. Test files that name the changed function, its
callers or its file come first, because they are likely to find the bug. A rare name counts more
than a frequent one. The first failing test ends the run. It counts only if it passes without the
bug, so that a busy machine makes no bug look found. A bug that exceeds its limit of time counts as
found, too.

A survivor is printed with its file, line and difference. Whether it is an equivalent program, which
no test can tell apart, is for the reader to decide. `--files` limits the number of test files per
bug, for a quick look; such a survivor may still be found by the remaining files.
"""
import argparse
import ast
import contextlib
import difflib
import hashlib
import json
import math
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ("bpe.py", "nanoeuler.py", "nanoeuler_cuda.py", "check.py")
OF_GPU = ("nanoeuler_cuda.py", "nanoeuler_parts/gpu/", "nanoeuler_parts/tensor_cores/",
          "nanoeuler_parts/decode/", "nanoeuler_parts/ranks/")
MACHINE = "nanoeuler_parts/machine/"

# ---- drawing
COMPARE = {"==": ["!=", "<="], "!=": ["=="], "<": ["<=", ">"], "<=": ["<", ">="], ">": [">=", "<"],
           ">=": [">", "<="], "is not": ["is"], "is": ["is not"], "not in": ["in"],
           "in": ["not in"]}
OPERATORS = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
             ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.Add: "+",
             ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
             ast.LShift: "<<", ast.RShift: ">>", ast.BitAnd: "&", ast.BitOr: "|", ast.And: "and",
             ast.Or: "or"}
ARITHMETIC = {"+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "//", "<<": ">>", ">>": "<<",
              "&": "|", "|": "&"}
LOGIC = {"and": "or", "or": "and"}


class Change(NamedTuple):
    """One bug: the bytes from `start` to `stop` of a file are replaced."""
    path: str
    line: int
    kind: str
    start: int
    stop: int
    new: bytes


class Source:
    """A file and the changes that it allows. Positions are in bytes, as in ast."""

    def __init__(self, path):
        self.path = path
        self.text = (ROOT / path).read_bytes()
        self.tree = ast.parse(self.text)
        self.starts = [0]
        for line in self.text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def begin(self, node):
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node):
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def of(self, node):
        return self.text[self.begin(node):self.end(node)]

    def changes(self):
        """{line: its changes}"""
        found = {}
        for change in self.candidates(self.tree):
            found.setdefault(change.line, []).append(change)
        return found

    def allows(self, change):
        """Is the result another program, with as many lines?"""
        new = self.changed(change)
        try:
            tree = ast.parse(new)
        except (SyntaxError, ValueError):
            return False
        return (ast.dump(tree) != ast.dump(self.tree)
                and new.count(b"\n") == self.text.count(b"\n"))

    def changed(self, change):
        return self.text[:change.start] + change.new + self.text[change.stop:]

    def candidates(self, node):
        """All changes of a node and of those in it. Texts for readers are left alone."""
        if is_text(node):
            return
        for kind, start, stop, new in self.own(node):
            lost = self.text[start:stop].count(b"\n") - new.count(b"\n")
            new += b"\n" * lost              # line numbers stay, which Numba's cache knows
            line = self.text.count(b"\n", 0, start) + 1
            yield Change(self.path, line, kind, start, stop, new)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases", "op", "ops", "ctx"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self.candidates(child)

    def own(self, node):
        """(kind, start, stop, new bytes) of one node"""
        match node:
            case ast.Compare():
                for a, op, b in zip([node.left, *node.comparators], node.ops, node.comparators):
                    yield from self.swapped("compare", a, op, b, COMPARE)
            case ast.BinOp() if not any(map(holds_text, (node.left, node.right))):
                yield from self.swapped("arithmetic", node.left, node.op, node.right, ARITHMETIC)
            case ast.AugAssign():
                yield from self.swapped("arithmetic", node.target, node.op, node.value, ARITHMETIC)
                yield "statement", self.begin(node), self.end(node), b"pass"
            case ast.BoolOp():
                for a, b in zip(node.values, node.values[1:]):
                    yield from self.swapped("logic", a, node.op, b, LOGIC)
                    yield "logic", self.begin(a), self.begin(b), b""
                a, b = node.values[-2:]
                yield "logic", self.end(a), self.end(b), b""
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                yield "logic", self.begin(node), self.begin(node.operand), b""
            case ast.Constant(value=bool(value)):
                yield "constant", self.begin(node), self.end(node), str(not value).encode()
            case ast.Constant(value=int(value)):
                for other in (value + 1, value - 1):
                    yield "constant", self.begin(node), self.end(node), str(other).encode()
            case ast.Constant(value=float(value)):
                new = f"(2 * {value!r})" if value else "1.0"
                yield "constant", self.begin(node), self.end(node), new.encode()
            case ast.Raise() | ast.Break() | ast.Continue() | ast.Expr(value=ast.Call()):
                yield "statement", self.begin(node), self.end(node), b"pass"
            case ast.Assign() if not any(isinstance(t, ast.Name | ast.Tuple) for t in node.targets):
                yield "statement", self.begin(node), self.end(node), b"pass"
            case ast.Return(value=ast.AST() as value) if not is_none(value):
                yield "return", self.begin(node), self.end(node), b"return None"
            case ast.Call():
                yield from self.arguments(node)
            case ast.Slice():
                yield from self.ends(node)

    def swapped(self, kind, a, op, b, table):
        old = OPERATORS.get(type(op), "")
        gap = self.text[self.end(a):self.begin(b)]
        found = re.search(rb"\s+".join(map(re.escape, old.encode().split())), gap)
        for new in table.get(old, []) if kind == "compare" else filter(None, [table.get(old)]):
            if found:
                at = self.end(a)
                yield kind, at + found.start(), at + found.end(), new.encode()

    def arguments(self, node):
        for a, b in zip(node.args, node.args[1:]):
            if self.of(a) != self.of(b) and not any(isinstance(x, ast.Starred | ast.GeneratorExp)
                                                    or is_text(x) for x in (a, b)):
                between = self.text[self.end(a):self.begin(b)]
                yield "call", self.begin(a), self.end(b), self.of(b) + between + self.of(a)
        before = node.args
        for word in node.keywords:
            if word.arg not in (None, "help", "metavar", "file") and before:
                yield "call", self.end(before[-1]), self.end(word), b""
            before = [word]

    def ends(self, node):
        for end in (node.lower, node.upper):
            if end is None:
                continue
            yield "slice", self.begin(end), self.end(end), b"(" + self.of(end) + b") + 1"
            yield "slice", self.begin(end), self.end(end), b"(" + self.of(end) + b") - 1"
            yield "slice", self.begin(end), self.end(end), b""


def is_none(node):
    return isinstance(node, ast.Constant) and node.value is None


def is_text(node):
    """Is this a docstring or a message? Python 3.11 gives f-strings no positions."""
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)) or (
        isinstance(node, ast.Expr) and is_text(node.value))


def holds_text(node):
    return any(map(is_text, ast.walk(node)))


def product(gpu):
    """The files of the programs: those of the GPU, or all the others"""
    files = [*PROGRAMS, *(str(p.relative_to(ROOT))
                          for p in sorted((ROOT / "nanoeuler_parts").rglob("*.py")))]
    return [name for name in files if name.startswith(OF_GPU) == gpu]


def draw(names, n, seed):
    """Returns n changes. names: files, or FILE:FIRST-LAST for some of their lines"""
    lines, sources = [], {}
    for name in names:
        path, _, span = name.partition(":")
        path = str((ROOT / path).resolve().relative_to(ROOT))
        first, _, last = span.partition("-")
        first, last = int(first or 1), int(last or first or sys.maxsize)
        sources[path] = Source(path)
        lines += [found for line, found in sorted(sources[path].changes().items())
                  if first <= line <= last]
    chance, drawn = random.Random(seed), []
    chance.shuffle(lines)
    for found in lines:
        allowed = next((x for x in chance.sample(found, len(found)) if sources[x.path].allows(x)),
                       None)
        drawn += [allowed] if allowed and len(drawn) < n else []
        if len(drawn) == n:
            break
    return drawn


# ---- what a change can reach
def locals_of(tree):
    """The names in functions that mean an argument or a variable of the function, as nodes"""
    found = set()
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        inside = [node for part in function.body for node in ast.walk(part)]
        names = [node for node in inside if isinstance(node, ast.Name)]
        outer = {name for node in inside if isinstance(node, ast.Global | ast.Nonlocal)
                 for name in node.names}
        own = {x.arg for x in ast.walk(function.args) if isinstance(x, ast.arg)}
        own |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
        found |= {node for node in names if node.id in own - outer}
    return found


def imported_in(tree):
    """{name: (the file from which it is imported, its name there)}"""
    return {alias.asname or alias.name: (node.module.replace(".", "/") + ".py", alias.name)
            for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names}


class Names:
    """Which functions, classes and constants of the programs use which, by their names. That is
    more than really happens, as two methods may share a name. For kernels the
    answer is more exact. A name counts with the file that defines it. A variable of a function does
    not count, as it may be named like a function elsewhere."""

    def __init__(self):
        self.users = {}                      # name -> names of its users
        self.compiled = {}                   # (file, name) -> those of its users, for kernels
        self.spans = {}                      # path -> [(first line, last line, name, is a class?)]
        trees = {path: ast.parse((ROOT / path).read_bytes())
                 for path in [*product(True), *product(False)]}
        self.imported = {path: imported_in(tree) for path, tree in trees.items()}
        for path, tree in trees.items():
            spans = self.spans[path] = []
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                    is_class = isinstance(node, ast.ClassDef)
                    spans.append((first, node.end_lineno, node.name, is_class))
            for node in tree.body:
                if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                    for x in ast.walk(node):
                        if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store):
                            spans.append((node.lineno, node.end_lineno, x.id, False))
            own = locals_of(tree)
            for node in ast.walk(tree):
                used = node.id if isinstance(node, ast.Name) else getattr(node, "attr", None)
                for name in self.around(path, node.lineno) if used else ():
                    self.users.setdefault(used, set()).add(name)
                    if (isinstance(node, ast.Name) and node not in own and
                            not self.in_class(path, node.lineno)):
                        self.compiled.setdefault(self.defined(path, used), set()).add((path, name))

    def defined(self, path, name):
        """(file, name) where the name that this file uses is defined, which may be another file"""
        while name in self.imported.get(path, ()):
            path, name = self.imported[path][name]
        return path, name

    def in_class(self, path, line):
        """Is the line in a class? No kernel contains code of a class."""
        return any(is_class for first, last, _, is_class in self.spans[path]
                   if first <= line <= last)

    def kernels(self, path, line):
        """The names that a kernel may have if it contains this line, or was made by it"""
        if self.in_class(path, line):
            return set()
        changed = [(path, name) for name in self.around(path, line)]
        return {name for _, name in self.reached(changed, users=self.compiled)}

    def around(self, path, line):
        """The functions, classes and constants that contain a line, the innermost first"""
        inside = [(last - first, name) for first, last, name, _ in self.spans[path]
                  if first <= line <= last]
        return [name for _, name in sorted(inside)]

    def reached(self, names, depth=math.inf, users=None):
        """{name: number of uses between it and these names}"""
        users = self.users if users is None else users
        found, new, far = {}, set(names), 0
        while new and far <= depth:
            found |= {name: far for name in new}
            new = {user for name in new for user in users.get(name, ())} - set(found)
            far += 1
        return found


# ---- the copy
def copy_tree(folder):
    """A copy of the tree as it is now, a repository too, with bytecode and compiled kernels."""
    subprocess.run(["git", "clone", "--quiet", "--shared", "--no-checkout", ROOT, folder],
                   check=True)
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                            cwd=ROOT, check=True, capture_output=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    subprocess.run(["git", "reset", "--quiet"], cwd=folder, check=True)
    for cache in [ROOT / "__pycache__", *(ROOT / "nanoeuler_parts").rglob("__pycache__"),
                  *(ROOT / "tests").rglob("__pycache__")]:
        target = folder / cache.relative_to(ROOT)
        if target.parent.exists():
            shutil.copytree(cache, target, dirs_exist_ok=True)


def digest(files):
    return hashlib.sha256(b"".join(Path(f).read_bytes() for f in files)).hexdigest()


def stamps(folder):
    """{stamp of dependencies, as in bpe.Cache: its files}"""
    machine = sorted(str(p) for p in (folder / MACHINE).glob("*.py"))
    return [machine, [str(folder / "bpe.py")]]


def keep_kernels(folder, changed, before, reached):
    """Kernels that the change cannot reach stay valid: their indices get the new stamps.
    before: the digests of `stamps` without the change"""
    after = dict(zip(before, map(digest, stamps(folder))))
    for index in folder.rglob("*.nbi"):
        module, _, rest = index.name.partition(".")
        function = rest.rsplit("-", 1)[0].split(".")[-1]
        with open(index, "rb") as f:
            version = pickle.load(f)
            stamp, overloads = pickle.load(f)
        if not isinstance(stamp, tuple) or not isinstance(stamp[0], bytes):
            continue                         # a kernel of the GPU has another kind of stamp
        own = index.parent.parent / f"{module}.py" == folder / changed
        if not own and after.get(stamp[1], stamp[1]) == stamp[1] and function not in reached:
            continue
        if function in reached:
            index.unlink()
            continue
        source = hashlib.sha256((folder / changed).read_bytes()).digest() if own else stamp[0]
        stamp = source, after.get(stamp[1], stamp[1])
        index.write_bytes(pickle.dumps(version) + pickle.dumps((stamp, overloads)))


# ---- tests
def words_of(path):
    return set(re.findall(r"\w+", path.read_text(encoding="utf-8")))


def ordered(change, names):
    """The test files, the most likely to find the change first. A name that few files contain
    counts more, and a name that is farther from the change counts less. The file and its folder
    count where a test file is named after them: test_eval.py after evaluation.py."""
    files = sorted((ROOT / "tests").glob("test_*.py"))
    words = {file: words_of(file) for file in files}
    stem, folder = Path(change.path).stem, Path(change.path).parent.name
    near = names.reached(names.around(change.path, change.line)[:2], 4)
    score = {}
    for file in files:
        _, *parts = file.stem.split("_")
        named = any(stem == part or len(part) > 3 and stem.startswith(part) for part in parts)
        score[file] = 0.5 * (stem in words[file]) + 2 * named + (folder in parts)
        for name, far in near.items():
            if name in words[file]:
                holders = sum(name in others for others in words.values())
                score[file] += 3.0 ** -far / holders ** 0.5
    return sorted(files, key=lambda file: -score[file])


def pytest_of(folder, args, limit):
    """(exit code, output) of pytest in the copy; None as code if it exceeds the limit"""
    env = {k: v for k, v in os.environ.items() if k not in ("CI", "PYTHONPATH")}
    env |= {"OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=line", "-p",
               "no:cacheprovider", *args]
    with tempfile.TemporaryFile() as out:
        child = subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=out,
                                 stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            code = child.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        with contextlib.suppress(ProcessLookupError):    # and the servers that it left
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        out.seek(0)
        return code, out.read().decode(errors="replace")


def chunks(files):
    """One file, one, two, four, eight ...: each start of pytest costs some seconds."""
    size, at = 1, 0
    while at < len(files):
        yield files[at:at + size]
        at, size = at + size, size if at == 0 else 2 * size


class Verdict(NamedTuple):
    change: Change
    found_by: str                            # a test, "the limit of time" or ""
    ran: list
    seconds: float


class Trial:
    """The copy without a change, and how long to wait for the copies with one"""

    def __init__(self, folder, limit, n_files, workers):
        self.clean, self.limit, self.n_files = folder / "clean", limit, n_files
        self.mutant = folder / "mutant"
        self.workers = ["-n", str(workers), "--dist", "loadfile"] if workers > 1 else []
        self.names, self.known = Names(), {}
        copy_tree(self.clean)

    def passes(self, test):
        """Does a test pass without the change?"""
        if test not in self.known:
            code, _ = pytest_of(self.clean, [test], self.limit)
            self.known[test] = code == 0
        return self.known[test]

    def plant(self, change, source):
        shutil.rmtree(self.mutant, ignore_errors=True)
        shutil.copytree(self.clean, self.mutant, symlinks=True)
        before = [*map(digest, stamps(self.mutant))]
        (self.mutant / change.path).write_bytes(source.changed(change))
        reached = self.names.kernels(change.path, change.line)
        keep_kernels(self.mutant, change.path, before, reached)

    def judge(self, change):
        began = time.monotonic()
        self.plant(change, Source(change.path))
        files = ordered(change, self.names)[:self.n_files or None]
        ran, flaky = [], []
        for some in chunks(files):
            while True:
                left = self.limit - (time.monotonic() - began)
                args = ["-m", "not slow", *(f"--deselect={test}" for test in flaky),
                        *(self.workers if len(some) > 1 else ()),
                        *(str(f.relative_to(ROOT)) for f in some)]
                code, said = pytest_of(self.mutant, args, max(left, 1))
                failed = re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", said, re.M)
                new = code and failed and failed[0] not in flaky
                if new and not self.passes(failed[0]):   # it fails without the change, too
                    flaky.append(failed[0])
                    continue
                break
            ran += [f.name for f in some]
            seconds = time.monotonic() - began
            if code is None:
                return Verdict(change, "the limit of time", ran, seconds)
            if code not in (0, 5):           # 5: no test was selected
                last = said.strip().splitlines()[-1:] or [""]
                return Verdict(change, failed[0] if failed else last[0], ran, seconds)
        return Verdict(change, "", ran, time.monotonic() - began)


def difference(change):
    source = Source(change.path)
    old, new = (x.decode().splitlines() for x in (source.text, source.changed(change)))
    lines = list(difflib.unified_diff(old, new, lineterm="", n=0))[3:]
    return "\n".join(f"    {line}" for line in lines if line.strip(" +-"))


def describe(verdict):
    change = verdict.change
    state = f"found by {verdict.found_by}" if verdict.found_by else "SURVIVED"
    return (f"{change.path}:{change.line} ({change.kind}) {state}, {len(verdict.ran)} test files, "
            f"{verdict.seconds:.0f} s\n{difference(change)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="FILE[:FIRST-LAST]",
                        help="draw from these files or lines (default: the programs and their "
                        "package, without the files of the GPU)")
    parser.add_argument("--n", type=int, default=40, help="number of bugs")
    parser.add_argument("--seed", type=int, default=1, help="the same seed draws the same bugs")
    parser.add_argument("--gpu", action="store_true", help="draw from the files of the GPU")
    parser.add_argument("--files", type=int, default=0,
                        help="number of test files per bug, the most likely first; 0: all")
    parser.add_argument("--limit", type=float, default=60, help="minutes per bug")
    parser.add_argument("--workers", type=int, default=1, help="processes of pytest")
    parser.add_argument("--list", action="store_true", help="print the bugs, and run nothing")
    parser.add_argument("--out", help="also write all verdicts to this file, as JSON lines")
    args = parser.parse_args()
    drawn = draw(args.names or product(args.gpu), args.n, args.seed)
    if args.list:
        for change in drawn:
            print(f"{change.path}:{change.line} ({change.kind})\n{difference(change)}")
        return
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(Path(folder), 60 * args.limit, args.files, args.workers)
        for k, change in enumerate(drawn, 1):
            verdict = trial.judge(change)
            print(f"{k}/{len(drawn)}  {describe(verdict)}", flush=True)
            if not verdict.found_by:
                survivors.append(verdict)
            if args.out:
                with open(args.out, "a", encoding="utf-8") as f:
                    f.write(json.dumps(verdict._asdict() | {
                        "change": {**change._asdict(), "new": change.new.decode()}}) + "\n")
    print(f"\n{len(drawn) - len(survivors)} of {len(drawn)} found")
    for verdict in survivors:
        print(f"\n{describe(verdict)}\n    after {', '.join(verdict.ran)}")


if __name__ == "__main__":
    main()
