"""Kernels on disk: found by other processes, and not lost or swapped where two compile at once."""
import contextlib
import functools
import importlib
import itertools
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers import ROOT, needs, ok

needs("numba_cuda")

import bpe
from numba.cuda.core import caching

from dry_gpu import (
    SMALL, dry_run, everything, everything_of_a_rank, functions_of, lowest_rungs,
)

import nanoeuler_cuda as nc
from nanoeuler_parts.gpu import launches
from nanoeuler_parts.gpu.place import Place


def test_a_kernel_is_found_in_the_cache_by_another_process():
    """Numba's keys of what the makers make, in two processes that hash everything differently."""
    code = ("import nanoeuler_cuda as nc\n"
            "from nanoeuler_parts.tensor_cores import attention, matmul_mma, matmul_wgmma\n"
            "from nanoeuler_parts.tensor_cores.epilogues import ADD, Polynomial, STORE\n"
            "class Codegen: magic_tuple = staticmethod(lambda: ())\n"
            "for make, *args in (\n"
            "        (matmul_wgmma.wgmma_kernel, 0, 0, STORE, False, False, 128, 2),\n"
            "        (matmul_wgmma.wgmma_kernel, 0, 1, ADD, False, False, 256, 1),\n"
            "        (matmul_mma.mma_kernel, 0, 0, Polynomial(1.0, 2.0, 3.0), True),\n"
            "        (nc.embedding_backward_kernel, 4),\n"
            "        (nc.rmsnorm_kernels, 768, 8), (nc.rope_kernel, 8), (nc.swiglu_kernels, 8),\n"
            "        (nc.portable_attention, 64, 4, 1 << 16), (nc.cross_entropy_kernel, 8),\n"
            "        *((make, 64, hopper, window, *tiles) for hopper, window in (\n"
            "            (True, 0), (False, 0), (False, 9)) for make, *tiles in (\n"
            "            (attention.tensor_attention_forward, 2),\n"
            "            (attention.tensor_attention_dq,), (attention.tensor_attention_dkv,))),\n"
            "        (nc.adamw_kernel, 4)):\n"
            "    made = make(*args)\n"
            "    for k in made if isinstance(made, tuple) else [made]:\n"
            "        if hasattr(k, 'py_func'):\n"
            "            print(k.py_func.__qualname__, k._cache._index_key((), Codegen))\n")
    runs = [subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True,
                           env={**os.environ, "PYTHONHASHSEED": seed}) for seed in "12"]
    keys = runs[0].stdout.splitlines()
    assert runs[0].stdout == runs[1].stdout and len(keys) == len(set(keys)) == 23, runs[0].stderr


@pytest.mark.parametrize("kept", [True, False])
def test_kernels_are_kept_only_where_there_is_a_place_for_them(kept, tmp_path):
    """bpe.CACHE says so; with cache=True Numba would end the program at the first decorator."""
    code = (f"import bpe; bpe.CACHE = {kept}\n"
            "import nanoeuler_cuda as nc\n"
            "from nanoeuler_parts.tensor_cores import attention, matmul_mma, matmul_wgmma\n"
            "from nanoeuler_parts.tensor_cores.epilogues import STORE\n"
            "kernels = [nc.matmul_kernel, *nc.rmsnorm_kernels(64, 8),\n"
            "           matmul_mma.mma_kernel(0, 0, STORE, False),\n"
            "           matmul_wgmma.wgmma_kernel(0, 0, STORE, False, False, 256, 1),\n"
            "           attention.tensor_attention(64, False).forward]\n"
            "print(*{type(k._cache).__name__ for k in kernels})\n")
    env = dict(os.environ, NUMBA_CACHE_DIR=str(tmp_path))
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, env=env,
                            capture_output=True, timeout=100)
    assert ok(result).split() == ["CUDACache" if kept else "NullCache"]


def save_in_turns(files, order):
    """Each of the files saves a kernel of its own; `order` says whose next access comes."""
    go, done = [threading.Semaphore(0) for _ in files], threading.Semaphore(0)

    def process(i, File):
        def in_turn(access):
            def run(*args):
                go[i].acquire()
                out = access(*args)
                done.release()
                return out
            return run
        for name in ("_load_index", "_save_index", "_save_data"):
            setattr(File, name, in_turn(getattr(File, name)))
        File.save(i, f"code of {i}")

    threads = [threading.Thread(target=process, args=x, daemon=True) for x in enumerate(files)]
    for thread in threads:
        thread.start()
    for i in order:
        go[i].release()
        assert done.acquire(timeout=60)
    for thread in threads:
        thread.join()


@functools.cache
def launched():
    """[(launch, the functions that its kernel calls)] of all that the GPU program does on Hopper"""
    with dry_run() as device:
        device.gpu.compute_capability = (9, 0)
        everything(SMALL, 2, 64, "bf16")
        everything_of_a_rank(SMALL, 2, 64)
        lowest_rungs()
    called = {kernel: functions_of(kernel, set()) for kernel in {x.kernel for x in device.launches}}
    assert len(called) > 30
    return [(x, called[x.kernel]) for x in device.launches]


def test_each_file_that_a_kernel_is_made_of_is_in_its_stamp():
    """An edit of another file would else leave a stale kernel on disk, which computes wrong numbers
    and says nothing."""
    files = {function.__code__.co_filename for _, called in launched() for function in called}
    assert {Path(file).name for file in files} >= {
        "numbers.py", "ptx.py", "tiles.py", "products.py", "steps.py"}
    assert files <= {*launches.DEVICE_CODE}
    for x, _ in launched():
        _, stamp = x.kernel._cache._cache_file._source_stamp
        assert stamp == bpe.digest(tuple(launches.DEVICE_CODE))


def test_a_kernel_that_sums_over_a_block_of_256_threads_has_so_many():
    over_block = {nc.block_sum.py_func, nc.block_max.py_func}
    blocks = [math.prod(x.block) for x, called in launched() if called & over_block]
    assert len(blocks) > 10 and {*blocks} == {256}


def test_the_first_kernel_that_is_compiled_is_noted(tmp_path, capsys):
    launches.note_compiling.cache_clear()
    file = caching.IndexDataCacheFile(str(tmp_path), "kernel", 1.0)
    for i in range(2):
        file.save(i, "code")
    assert capsys.readouterr().err.count("note: compiling GPU kernels") == 1


@pytest.mark.parametrize("rank, is_child, notes", [(0, False, 1), (1, False, 0), (0, True, 0)])
def test_one_process_of_a_command_notes_it(rank, is_child, notes, monkeypatch, capsys):
    """Not the other ranks, and not the processes of self-tests."""
    monkeypatch.setattr(launches, "PLACE", Place(rank, 2))
    monkeypatch.setattr(launches.multiprocessing, "parent_process", lambda: is_child or None)
    launches.note_compiling.__wrapped__()
    assert capsys.readouterr().err.count("note: compiling GPU kernels") == notes


CACHES = pytest.mark.parametrize("module, name", [("bpe", "CacheFile"),
                         ("numba.cuda.core.caching", "IndexDataCacheFile")])


@CACHES
def test_two_processes_that_compile_at_once_do_not_swap_their_kernels(module, name,
                                                                      tmp_path, monkeypatch):
    """Numba's own way fails: the index names one file for the kernel that another overwrote.
    Where nothing can be locked, in each order of what two processes do."""
    Cache, orders = getattr(importlib.import_module(module), name), set(
        itertools.permutations([0, 0, 0, 1, 1, 1]))
    assert len(orders) == 20
    monkeypatch.setattr("nanoeuler_parts.machine.kernels.locked",
                        lambda folder: contextlib.nullcontext())
    for n, order in enumerate(orders):
        make = lambda: Cache(str(tmp_path), f"kernel{n}", 1.0)
        save_in_turns([make(), make()], order)
        found = [make().load(i) for i in range(2)]
        assert all(code in (None, f"code of {i}") for i, code in enumerate(found)), order
        make().save(2, "code of 2")
        assert [make().load(i) for i in range(3)] == [*found, "code of 2"]


@CACHES
def test_two_processes_that_compile_at_once_lose_no_kernel(module, name, tmp_path):
    """One saves while the other has read the index and not yet written it."""
    Cache = getattr(importlib.import_module(module), name)
    first, second = (Cache(str(tmp_path), "kernel", 1.0) for _ in range(2))
    other = threading.Thread(target=second.save, args=(1, "code of 1"), daemon=True)
    save_index = first._save_index

    def late(index):
        other.start()
        other.join(timeout=0.5)              # done if it may; else it waits for us
        save_index(index)

    first._save_index = late
    first.save(0, "code of 0")
    other.join()
    assert [Cache(str(tmp_path), "kernel", 1.0).load(i) for i in range(2)] == ["code of 0",
                                                                               "code of 1"]


@CACHES
@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("junk", [b"", b"\x93junk" * 99])
def test_a_damaged_file_is_none(junk, suffix, module, name, tmp_path):
    make = getattr(importlib.import_module(module), name)
    make(str(tmp_path), "kernel", 1.0).save(0, "code")
    [path] = tmp_path.glob(f"*.{suffix}")
    path.write_bytes(junk)
    file = make(str(tmp_path), "kernel", 1.0)
    assert file.load(0) is None
    file.save(0, "code")
    assert make(str(tmp_path), "kernel", 1.0).load(0) == "code"


@pytest.mark.parametrize("error", [ImportError, OSError])
def test_where_folders_cannot_be_locked_kernels_are_saved(error, tmp_path, monkeypatch):
    class fcntl:
        LOCK_EX = 2

        @staticmethod
        def flock(handle, how):
            raise error

    monkeypatch.setitem(sys.modules, "fcntl", None if error is ImportError else fcntl)
    file = bpe.CacheFile(str(tmp_path), "k", 1.0)
    file.save(0, "code")
    assert file.load(0) == "code"
