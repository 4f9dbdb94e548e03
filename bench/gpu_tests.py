"""The proof that the GPU program computes what the CPU's does, as a file: one GPU needed.

    python bench/gpu_tests.py [--only twins kernels gradient tests memcheck racecheck] [--jobs 1]

Writes bench/out/gpu_tests_<device>.txt: the output of each part, and a fingerprint of the code
that it ran.  Each part has the fingerprint of those folders that it runs.  So after a change in one
of the others, it need not run again.  `make release-check` fails unless a file in bench/results/
has the fingerprints of the current code.  A part that was run before on the same machine stays in
the file.  A part that fails is not written, and the exit code is 1.

The kernels are compared with functions of nanoeuler.py.  These functions may change, as long as
they compute the same.  So the file has two numbers for each of their outputs in float64, under
`twins`.

twins      the norm of each output of the CPU, and its product with a vector of random numbers
kernels    python nanoeuler_cuda.py: every kernel against the CPU, twice, bit-identical
gradient   python nanoeuler_cuda.py g: the gradient of the base preset
tests      pytest tests/test_gpu.py: resume, equal bits, graphs, decoding; in --jobs processes
memcheck   compute-sanitizer --tool memcheck with the smaller self-tests, if it is installed:
           no access beyond the end of an array
racecheck  compute-sanitizer --tool racecheck with the same: no two threads of a block access one
           place of shared memory, at least one of them writing, without a barrier between
"""
import argparse
import ast
import hashlib
import importlib.metadata
import io
import pathlib
import re
import shutil
import subprocess
import sys
import tokenize

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
from common import out_folder

PARTS = ("twins", "kernels", "gradient", "tests", "memcheck", "racecheck")
NEEDED = PARTS[:4]                           # compute-sanitizer comes with the CUDA toolkit only

# The code that is proven: kernels, what launches them, and the tests
PACKAGE = ROOT / "nanoeuler_parts"

def sources(folder):
    """The names of the files of a folder of nanoeuler_parts.  Of gpu/ and ranks/, only those that
    import numba: the others start processes, and have tests of their own."""
    return [str(path.relative_to(ROOT)) for path in sorted((PACKAGE / folder).glob("*.py"))
            if folder not in ("gpu", "ranks")
            or "from numba import" in path.read_text(encoding="utf-8")]

ENGINE = ["nanoeuler_cuda.py", *sources("gpu"), *sources("tensor_cores"), *sources("decode")]
BOUNDS = "nanoeuler_parts/selftests/bounds.py"
# The files whose code a part proves
FILES = {"twins": sources("selftests"),
         "kernels": [*ENGINE, *sources("ranks"), *sources("selftests")],
         "gradient": [*ENGINE, BOUNDS, "nanoeuler_parts/selftests/gradient.py"],
         "tests": [*ENGINE, BOUNDS, "nanoeuler_parts/gpu_lora.py",
                   "tests/oracles/naive_attention.py", "tests/oracles/epilogues.py",
                   "tests/test_gpu.py"]}
FILES |= dict.fromkeys(("memcheck", "racecheck"), FILES["kernels"])
PROVEN = sorted({name for names in FILES.values() for name in names})


def code_of(text):
    """A program's text without comments, docstrings and empty lines: what a computer reads."""
    lines = [*text.splitlines(), ""]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            if ast.get_docstring(node):
                docstring = node.body[0]
                for i in range(docstring.lineno - 1, docstring.end_lineno):
                    lines[i] = ""
    kept = list(lines)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        row, column = token.start
        if token.type == tokenize.COMMENT and lines[row - 1]:
            kept[row - 1] = lines[row - 1][:column]
    return "\n".join(line.rstrip() for line in kept if line.strip())


def fingerprint(part, root=ROOT):
    texts = [(root / name).read_text(encoding="utf-8") for name in FILES[part]]
    return hashlib.sha256("\0".join(map(code_of, texts)).encode()).hexdigest()


def twins():
    """{"kernel i": (norm, product with random numbers)} of the i-th output that a kernel's twin has
    in the smaller self-tests, float64.  Another number in the output changes the product."""
    from nanoeuler_parts.selftests.run import all_cases
    found = {}
    for name, cases in all_cases(quick=True).items():
        if name.endswith(", mma") or name == "one_tile_matmul":      # the same outputs again
            continue
        rng = np.random.default_rng(1)
        for i, y in enumerate(y for case in cases for y in case.expected()):
            y = np.asarray(y, np.float64).ravel()
            found[f"{name} {i}"] = float(np.linalg.norm(y)), float(rng.standard_normal(y.size) @ y)
    return found


def told_twins(said):
    """What `twins` returned, of its part of a file"""
    rows = re.findall(r"^(.+ \d+): (\S+) (\S+)$", said, re.M)
    return {name: (float(norm), float(product)) for name, norm, product in rows}


def same_twins(one, other):
    """Whether two programs' twins compute the same: to 1e-11 of the norm, some 1e5 roundoffs."""
    return one.keys() == other.keys() and all(
        abs(x - y) <= 1e-11 * max(norm, 1e-300)
        for name, (norm, product) in one.items()
        for x, y in zip((norm, product), other[name], strict=True))


def command(part, jobs):
    program = [sys.executable, "nanoeuler_cuda.py"]
    if part == "twins":
        return [sys.executable, "bench/gpu_tests.py", "--only-twins"]
    if part == "kernels":
        return program
    if part == "gradient":
        return [*program, "g"]
    if part == "tests":
        parallel = ["-n", str(jobs)] if jobs > 1 else []
        return [sys.executable, "-m", "pytest", "-q", "tests/test_gpu.py", *parallel]
    # racecheck takes minutes for each kernel: it needs several processes
    jobs_here = "1" if part == "memcheck" else "0"
    return ["compute-sanitizer", "--tool", part, "--target-processes", "all", "--error-exitcode",
            "9", *program, "test", "--quick", "--jobs", jobs_here]


def parse(text):
    """{part: (fingerprint, its text)} of a file as written below; {} of another."""
    block = r"^== (\w+): .*\ncode ([0-9a-f]{64}), commit .*\n(?s:(.*?))(?=^== |\Z)"
    found = re.findall(block, text, re.M)
    return {part: (code, said) for part, code, said in found}


def current(text, codes, of_twins):
    """Whether a file proves the code with these fingerprints {part: fingerprint}, with twins that
    compute this."""
    found = parse(text)
    if any(part not in found or found[part][0] != codes[part] for part in NEEDED):
        return False
    return same_twins(told_twins(found["twins"][1]), of_twins)


def run(part, jobs):
    """(exit code, what it said), which is printed as it comes."""
    said = []
    process = subprocess.Popen(command(part, jobs), cwd=ROOT, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT)
    for line in process.stdout:
        print(line, end="", flush=True)
        said.append(line)
    return process.wait(), "".join(said)


def written(text, header, part, title):
    """The file's text with that part, in the order of PARTS; what another machine said is gone."""
    old = text if text.startswith(header) else ""
    blocks = {block.split(":")[0]: block for block in re.split(r"^== ", old, flags=re.M)[1:]}
    blocks[part] = title
    return header + "".join(f"== {blocks[name]}" for name in PARTS if name in blocks)


def machine():
    """(device, the first line of the file)"""
    smi = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                         capture_output=True, text=True, check=True)
    device, driver = smi.stdout.splitlines()[0].split(", ")
    packages = ("numba", "numba-cuda", "llvmlite", "numpy")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    return device, f"Correctness on {device}, driver {driver}, {versions}.\n\n"


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--only", nargs="+", choices=PARTS, metavar="PART",
                   help=f"of {' '.join(PARTS)} (default: all that can be run)")
    p.add_argument("--jobs", type=int, default=1, help="processes of pytest (default: 1)")
    p.add_argument("--commit", help="of the code, where git does not know")
    p.add_argument("--out", help="file (default: bench/out/gpu_tests_<device>.txt)")
    p.add_argument("--only-twins", action="store_true", help="print what the CPU computes, and end")
    a = p.parse_args()
    if a.only_twins:
        for name, (norm, product) in twins().items():
            print(f"{name}: {norm!r} {product!r}")
        return 0
    git = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True,
                         text=True)
    device, header = machine()
    model = re.sub(r"[^a-z0-9]+", "_", device.lower().replace("nvidia", "")).strip("_")
    path = pathlib.Path(a.out or out_folder() / f"gpu_tests_{model}.txt")
    failed = []
    for part in a.only or (PARTS if shutil.which("compute-sanitizer") else NEEDED):
        result, said = run(part, a.jobs)
        if result:
            failed.append(part)
            continue
        words = ["python" if x == sys.executable else x for x in command(part, a.jobs)]
        commit = a.commit or git.stdout.strip()
        said = re.sub("^== ", "=== ", said.strip(), flags=re.M)      # no title of a part
        title = (f"{part}: {' '.join(words)}\ncode {fingerprint(part)}, commit {commit}\n\n"
                 f"{said}\n\n")
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        path.write_text(written(old, header, part, title), encoding="utf-8")
    print(f"FAILED: {', '.join(failed)}" if failed else f"written to {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

