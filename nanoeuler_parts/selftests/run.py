"""Runs the self-tests, in several processes."""
import functools
import itertools
import os

import numpy as np

from bpe import need
from nanoeuler_cuda import (
    DTYPES, fast_decoder, free_bytes, has, kernel_path, NAMES, open_device,
)
from nanoeuler_parts.gpu.processes import processes
from nanoeuler_parts.selftests.bounds import errors, fault
from nanoeuler_parts.selftests.cases import OpTests
from nanoeuler_parts.selftests.ops import (
    add_adamw_tests, add_bias_and_head_norm_tests, add_cross_entropy_tests, add_decode_tests,
    add_embedding_tests, add_matmul_tests, add_muon_tests, add_rank_tests, add_rmsnorm_tests,
    add_rope_and_attention_tests, add_swiglu_tests,
)

def self_tests(quick=False, jobs=1, only=()):
    """Compares every kernel with its function in nanoeuler.py, for shapes at and beyond the edges
    of tiles.  Each case runs twice and must give the same bits.  Prints one line per kernel, with
    the largest errors of all its shapes.  Returns the exit code.

    only: names of groups, the keys of case_groups; all groups by default
    jobs: number of processes that run cases; 0: one per CPU core, at most 16, as far as the GPU's
    memory allows.  Most of the time is spent compiling kernels, and every process compiles those of
    its cases."""
    groups = case_groups(quick)
    for name in only:
        need(name in groups, f"--only: {name} is no group of self-tests; expected some of "
             f"{', '.join(groups)}")
    chosen = only or [*groups]
    jobs = jobs or min(16, os.cpu_count() or 1, 1 + free_bytes() // (2 << 30))
    print("|gpu - cpu| / |cpu| of an output, and of its largest entries\n\n"
          f"{'kernel':<24}shapes" + "".join(f"{NAMES[d]:>19}" for d in DTYPES.values()))
    failed, path = [], kernel_path()
    tests = {group: group_cases(quick, group, path) for group in chosen}
    with processes(jobs, open_device) as submit:
        # Each type of a case is a job of its own.  The last groups are those of decode/, which take
        # longest: they start first
        runs = {(group, name, i, dtype): submit(run_case, quick, group, name, i, dtype)
                for group in reversed(tests)
                for name, cases in tests[group].items()
                for i, case in enumerate(cases) for dtype in filter(has, case.dtypes)}
        if jobs > 1:                         # this process computes while the others compile
            for kernels in tests.values():
                for case in itertools.chain(*kernels.values()):
                    case.expected()
        for group in tests:
            for name, cases in tests[group].items():
                worst, faults = {}, []
                for i, case in enumerate(cases):
                    for dtype in filter(has, case.dtypes):
                        outputs = runs[group, name, i, dtype].result()
                        compare(name, dtype, outputs, case.expected(), worst, faults)
                columns = ["{:11.1e}{:8.1e}".format(*worst[d]) if d in worst else " " * 19
                           for d in DTYPES]
                print(f"{name:<24}{len(cases):>6}{''.join(columns)}   "
                      f"{'FAILED' if faults else 'ok'}", flush=True)
                for line in dict.fromkeys(faults):       # each once
                    print(f"    {line}", flush=True)
                if faults:
                    failed.append(name)
    print(f">>> {len(failed)} kernels FAILED: {', '.join(failed)}" if failed else
          ">>> kernels OK (every case twice, bit-identical)")
    return 1 if failed else 0

def run_case(quick, group, name, i, dtype):
    """Runs case i of kernel `name` twice in this type.
    Returns [(output, whether both runs agree to the bit)]."""
    case = group_cases(quick, group, kernel_path())[name][i]
    first, second = case.run(dtype), case.run(dtype)
    return [(x, np.array_equal(x, again, equal_nan=True))
            for x, again in zip(first, second, strict=True)]

def compare(name, dtype, outputs, expected, worst, faults):
    """Compares the outputs of a run_case with the expected ones: updates worst, {dtype: the largest
    errors()}, and appends to faults what is wrong."""
    for (x, is_same), y in zip(outputs, expected, strict=True):
        worst[dtype] = np.maximum(worst.get(dtype, 0), errors(x, y))         # a NaN stays a NaN
        if not is_same:
            faults.append("two runs differ")
        if line := fault(name, dtype, x, y):
            faults.append(line)

def case_groups(quick):
    """{name: function that adds cases to an OpTests}, in the order of the sections"""
    groups = {"matmul": add_matmul_tests, "embedding": add_embedding_tests,
              "rmsnorm": add_rmsnorm_tests, "attention": add_rope_and_attention_tests,
              "swiglu": add_swiglu_tests, "cross_entropy": add_cross_entropy_tests,
              "bias_head_norm": add_bias_and_head_norm_tests, "adamw": add_adamw_tests,
              "muon": add_muon_tests,
              "decode": add_decode_tests, "ranks": add_rank_tests}
    if kernel_path() != "portable":
        from nanoeuler_parts.selftests import fast   # tensor_cores/ is there
        groups |= fast.GROUPS
        if fast_decoder():
            from nanoeuler_parts.selftests import decoding
            groups |= decoding.GROUPS
    return groups

@functools.cache
def group_cases(quick, group, path):
    """{kernel: cases} of a group, when kernel_path() is `path`.  Each group has its own random
    numbers, so a process can run some groups without the others."""
    ops = OpTests(quick)
    case_groups(quick)[group](ops)
    return ops.tests

def all_cases(quick):
    """{kernel: cases} of all groups"""
    return {name: cases for group in case_groups(quick)
            for name, cases in group_cases(quick, group, kernel_path()).items()}
