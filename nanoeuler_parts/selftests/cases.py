"""A case of the self-tests: a kernel's inputs, its expected outputs, and the run on the GPU."""
import functools
from typing import NamedTuple

import numpy as np

import nanoeuler as ne
from nanoeuler_cuda import computing, DTYPES, kernel_path, make_ops, PATHS, to_device, to_host
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
    """Runs function(*outputs, *inputs) on the device, with floating-point arrays in this type.
    Returns the outputs.
    top: None, or the fastest kernel path of the Ops that the function gets as first argument"""
    def put(x):
        if not isinstance(x, np.ndarray):
            return x
        if dtype == "bf16" and x.dtype == np.float64 and not isinstance(x, Sum):
            x = to_bf16(x)
        return to_device(x, computing(DTYPES[dtype]) if x.dtype == np.float64 else None)
    arrays = [put(x) for x in (*outputs, *inputs)]
    ops = [make_ops(top)] if top else []
    function(*ops, *arrays)                  # it queues kernels, so all of these must stay alive
    return [from_bf16(to_host(x)) for x in arrays[:len(outputs)]]

class OpTests:
    """The cases of some kernels: `tests` has a list of Case for each name.  Inputs are exact in
    bfloat16, so that all errors come from the kernels."""

    def __init__(self, quick=False):
        """quick: without the largest shapes"""
        self.rng, self.tests, self.quick = np.random.default_rng(1), {}, quick

    def normal(self, *shape):
        return nearest_bf16(self.rng.standard_normal(shape))

    def add(self, function, outputs, inputs, expected=None, name=None, dtypes=tuple(DTYPES),
            tops=(None,)):
        """Adds a case: function(*outputs, *inputs) must change its outputs as expected.

        expected: the arrays, or a function that changes outputs in the same way, by default the one
        of nanoeuler.py with the same name.  It is called when the outputs are compared.
        tops: see add_for_ops"""
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
        for i, top in enumerate(tops):       # lower paths than the first are for bfloat16
            run = functools.partial(on_device, function, outputs, inputs, top)
            self.add_case(f"{name}, {top}" if i else name, expected_outputs, run,
                          ("bf16",) if i else dtypes)

    def add_for_ops(self, function, *args, **kwargs):
        """Adds the same for function(ops, *outputs, *inputs), with the Ops of this GPU's fastest
        kernel path.  On Hopper, it is also tested on the path `mma`."""
        tops = (PATHS[-1], "mma") if kernel_path() == "wgmma" else (PATHS[-1],)
        self.add(function, *args, tops=tops, **kwargs)

    def add_case(self, name, expected, run, dtypes):
        self.tests.setdefault(name, []).append(Case(functools.cache(expected), run, dtypes))
