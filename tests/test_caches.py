"""A compiled kernel on disk is used only while every file whose code it contains is unchanged."""
import inspect
import os
import shutil
import subprocess
import sys

import numba
import numpy as np
import pytest
from helpers import ROOT, copy_parts, ok
from numba.core.registry import CPUDispatcher, cpu_target
from numba.extending import _Intrinsic

import bpe
import nanoeuler as ne

pytestmark = pytest.mark.unit

CALLER = """
import sys
sys.path.insert(0, {root!r})
import bpe, callee

@bpe.jit(cache=True, files={files})
def f(x):
    return callee.g(x) * 10

print(f(1), sum(f.stats.cache_hits.values()))
"""


def test_a_changed_environment_leaves_the_level_of_a_compilation(monkeypatch):
    """Numba reads its variables again when one has changed, also while it compiles."""
    monkeypatch.delenv("NUMBA_OPT", raising=False)
    monkeypatch.setenv("NUMBA_FULL_TRACEBACKS", "0")
    before = numba.config.OPT
    with bpe.Compiling():
        numba.config.reload_config()
        assert numba.config.OPT == bpe.Compiling.level
    assert numba.config.OPT == before


def test_a_kernel_calls_its_own_copies_of_other_kernels(monkeypatch):
    """A weak copy would be replaced by the code of the same function that the process has compiled
    by itself, whose sums can be rounded differently. Callers get weak copies, to link them once."""
    seen, finalize = [], bpe.Library._finalize_specific

    def recorded(library):
        seen.append({f.name: f.linkage.name for f in library._final_module.functions
                     if not f.is_declaration})
        finalize(library)

    monkeypatch.setattr(bpe.Library, "_finalize_specific", recorded)

    @bpe.jit()
    def largest_sum(x):
        most = 0.0
        for n in range(x.size):
            total = 0.0
            for i in range(n):
                total += x[i] * x[n - i]
            most = max(most, total)
        return most

    @bpe.jit()
    def both(x, y):
        return largest_sum(x) + largest_sum(y) + largest_sum(x - y)

    x = np.arange(5.0)
    assert both(x, 2 * x) == 50 + largest_sum(x)
    [caller] = both.overloads.values()
    [callee] = largest_sum.overloads.values()
    name = callee.fndesc.mangled_name
    in_caller = [kinds for kinds in seen if caller.fndesc.mangled_name in kinds]
    assert [kinds[name] for kinds in in_caller] == ["internal"]
    assert not any("linkonce_odr" in kinds.values() for kinds in seen)
    shared = caller.library._get_module_for_linking()
    assert shared.get_function(name).linkage.name == "linkonce_odr"


@pytest.mark.parametrize("is_stamped", [True, False])
def test_an_edited_callee_is_compiled_again(is_stamped, tmp_path):
    """Numba alone runs the stale kernel: without `files` the test fails, as it must."""
    files = "[callee.__file__]" if is_stamped else "[]"
    caller = tmp_path / "caller.py"
    caller.write_text(CALLER.format(root=str(ROOT), files=files), encoding="utf-8")
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kept"), "PYTHONDONTWRITEBYTECODE": "1"}
    env.pop("NE_STAMP", None)
    said = []
    for factor in (2, 2, 3):
        (tmp_path / "callee.py").write_text(
            f"from numba import njit\n@njit\ndef g(x):\n    return {factor} * x\n",
            encoding="utf-8")
        done = subprocess.run([sys.executable, caller], env=env, capture_output=True, text=True)
        said.append(ok(done).split())
    last = ["30", "0"] if is_stamped else ["20", "1"]
    assert said == [["20", "0"], ["20", "1"], last]
    kept = [path.suffix for path in (tmp_path / "kept").rglob("caller.*.nb?")]
    assert sorted(kept) == [".nbc", ".nbi"]              # an edit leaves no stale file behind


MATMUL = """
import sys
sys.path.insert(0, {folder!r})
import numpy as np, nanoeuler as ne
assert ne.__file__.startswith({folder!r})
out, x, b = (np.ones(shape, np.float32) for shape in ((9, 20), (9, 5), (5, 20)))
ne.tiled_matmul(out, x, b)
print(sum(ne.tiled_matmul.stats.cache_hits.values()))
"""


def test_an_edit_of_the_tile_compiles_the_kernels_that_contain_it(tmp_path):
    """Edits of the parts that are not compiled into kernels compile nothing."""
    for name in "bpe.py", "nanoeuler.py":
        shutil.copy2(ROOT / name, tmp_path)
    copy_parts(tmp_path)
    env = {**os.environ, "NUMBA_OPT": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    for name in "NUMBA_CACHE_DIR", "NE_STAMP":
        env.pop(name, None)

    def hits():
        code = MATMUL.format(folder=str(tmp_path))
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        return int(ok(done))

    def edit(*folders):
        for folder in folders:
            for path in (tmp_path / "nanoeuler_parts" / folder).glob("*.py"):
                path.write_text(path.read_text(encoding="utf-8") + "# edited\n", encoding="utf-8")

    parts = {x.name for x in (tmp_path / "nanoeuler_parts").iterdir() if x.is_dir()}
    assert hits() == 0
    edit(*parts - {"machine"})
    assert hits() == 1
    edit("machine")
    assert hits() == 0


def names_in(code):
    """The global names that a function, or a function inside it, may read"""
    found = set(code.co_names)
    for constant in code.co_consts:
        if inspect.iscode(constant):
            found |= names_in(constant)
    return found


def overloads(function):
    """The functions that tell Numba what to compile in place of this one (numba.extending)"""
    cpu_target.typing_context.refresh()
    known = cpu_target.typing_context._functions.get(function)
    return [x._overload_func for x in known.templates] if known else []


def callees(function):
    """The functions that compiled code may call from this one"""
    for name in names_in(function.__code__):
        found = function.__globals__.get(name)
        if isinstance(found, CPUDispatcher):
            yield found.py_func
        elif isinstance(found, _Intrinsic):
            yield found._defn
        elif inspect.isfunction(found):
            yield from overloads(found)


def files_of(function, seen):
    """The files of this project whose code is compiled into a function"""
    if function not in seen:
        seen.add(function)
        for callee in callees(function):
            files_of(callee, seen)
    files = {f.__code__.co_filename for f in seen}
    return {file for file in files if file.startswith(str(ROOT))}


def kernels():
    """{name: dispatcher} of all modules of this project that are loaded"""
    found = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith(str(ROOT)) and os.sep + "tests" + os.sep not in file:
            for x in vars(module).values():
                if isinstance(x, CPUDispatcher) and isinstance(x._cache, bpe.Cache):
                    found[f"{x.__module__}.{x.__name__}"] = x
    return found


def test_the_stamp_of_a_kernel_has_the_file_of_every_callee():
    found = kernels()
    assert {"nanoeuler.run_batch", "nanoeuler.decode_step", "bpe.encode_range"} <= found.keys()
    assert ne.run_batch.py_func.__code__.co_filename in files_of(ne.run_batch.py_func, set())
    for name, kernel in found.items():
        assert files_of(kernel.py_func, set()) <= kernel._cache.files, name


def test_numbas_own_cache_is_left_alone():
    """Functions of other libraries in the same process keep the class of Numba."""
    function = numba.njit(cache=True)(lambda x: x)
    assert type(function._cache) is numba.core.caching.FunctionCache
    assert type(function._cache._cache_file) is numba.core.caching.IndexDataCacheFile
