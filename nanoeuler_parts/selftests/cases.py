"""A case of the self-tests: a kernel's inputs, its expected outputs, and the run on the GPU."""
import functools
from typing import NamedTuple

import numpy as np

import nanoeuler as ne
from nanoeuler_cuda import computing, DTYPES, kernel_path, to_device, to_host
from nanoeuler_parts.gpu.launches import at_most, gpu
from nanoeuler_parts.machine.numbers import from_bf16, to_bf16
from nanoeuler_parts.selftests.bounds import as_sum, Sum

class Case(NamedTuple):
    """One test of a kernel"""
    expected: object                         # function: returns the expected outputs, in float64.
                                             # It computes them once, however often it is called
    run: object                              # function of a dtype: returns the device's outputs
    dtypes: tuple

def nearest_bf16(x):
    """x rounded to bfloat16, as float64"""
    return from_bf16(to_bf16(x)).astype(np.float64)

def on_device(function, outputs, inputs, top, dtype):
    """Runs function(*outputs, *inputs) on the device, with floating-point arrays in this type and
    `top` as the fastest kernel path.  Returns the outputs."""
    def put(x):
        if not isinstance(x, np.ndarray):
            return x
        if dtype == "bf16" and x.dtype == np.float64 and not isinstance(x, Sum):
            x = to_bf16(x)
        return to_device(x, computing(DTYPES[dtype]) if x.dtype == np.float64 else None)
    arrays = [put(x) for x in (*outputs, *inputs)]
    with at_most(top):
        function(*arrays)                    # it queues kernels, so `arrays` must stay alive
        return [from_bf16(to_host(x)) for x in arrays[:len(outputs)]]

class OpTests:
    """The cases of some kernels: `tests` has a list of Case for each name.  Inputs are exact in
    bfloat16, so that all errors come from the kernels."""

    def __init__(self, quick=False):
        """quick: without the largest shapes"""
        self.rng, self.tests, self.quick = np.random.default_rng(1), {}, quick

    def normal(self, *shape):
        return nearest_bf16(self.rng.standard_normal(shape))

    def add(self, function, outputs, inputs, expected=None, name=None, dtypes=tuple(DTYPES)):
        """Adds a case: function(*outputs, *inputs) must change its outputs as expected.

        expected: the arrays, or a function that changes outputs in the same way, by default the one
        of nanoeuler.py with the same name.  It is called when the outputs are compared.
        On Hopper, matmul and attention are also tested on the path `mma`."""
        name = name or function.__name__

        @functools.cache                     # also for the path `mma`
        def expected_outputs():
            found = expected
            if not isinstance(found, list):
                found = [np.array(x) for x in outputs]
                plain = [np.asarray(x) if isinstance(x, Sum) else x for x in inputs]
                on_cpu = expected or getattr(ne, name)
                on_cpu(*found, *plain)
            return [as_sum(y) if isinstance(x, Sum) else y
                    for x, y in zip(outputs, found, strict=True)]
        runs = [(name, gpu.highest, dtypes)]
        if kernel_path() == "wgmma" and name.startswith(("matmul", "attention")):
            runs.append((name + ", mma", "mma", ("bf16",)))
        for run_name, top, run_dtypes in runs:
            run = functools.partial(on_device, function, outputs, inputs, top)
            self.add_case(run_name, expected_outputs, run, run_dtypes)

    def add_case(self, name, expected, run, dtypes):
        self.tests.setdefault(name, []).append(Case(functools.cache(expected), run, dtypes))
