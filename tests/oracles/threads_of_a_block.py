"""Runs device functions as Python, in one Python thread for each thread of a small block."""
import math
import struct
import threading
from types import CellType, FunctionType, SimpleNamespace

import numpy as np


def as_python(function, names, made=None):
    """Returns a device function as a Python function, with all device functions that it calls.
    names: {name: value} that replaces globals and variables of closures in all of them
    made: the functions that were converted already"""
    made = {} if made is None else made
    if function not in made:
        code, globals_ = function.py_func.__code__, dict(function.py_func.__globals__)
        cells = [CellType() for _ in code.co_freevars]
        made[function] = FunctionType(code, globals_, closure=tuple(cells))

        def stand_in(name, value):
            if name in names:
                return names[name]
            return as_python(value, names, made) if hasattr(value, "py_func") else value

        for name, cell, outer in zip(code.co_freevars, cells, function.py_func.__closure__ or ()):
            cell.cell_contents = stand_in(name, outer.cell_contents)
        globals_.update({name: stand_in(name, globals_[name])
                         for name in code.co_names if name in globals_})
    return made[function]


class Block:
    """A block of `warps` warps, each with as many lanes as there are warps.  `cuda` has its shared
    memory, barriers and exchanges between lanes, under the names that kernels use."""

    def __init__(self, warps):
        self.lanes = self.warps = warps
        self.whole = threading.Barrier(warps * warps, timeout=60)
        self.of_warp = [threading.Barrier(warps, timeout=60) for _ in range(warps)]
        self.slots, self.arrays, self.mine = [0] * warps * warps, {}, threading.local()
        self.lock = threading.Lock()
        self.cuda = SimpleNamespace(
            syncthreads=self.whole.wait, syncwarp=lambda: self.of_warp[self.warp].wait(),
            syncthreads_count=lambda x: sum(map(bool, self.exchange(x, self.whole))),
            ballot_sync=lambda mask, x: sum(bool(y) << i for i, y in enumerate(self.in_warp(x))),
            shfl_xor_sync=lambda mask, x, i: self.in_warp(x)[self.lane ^ i],
            shfl_up_sync=lambda mask, x, i: self.in_warp(x)[max(self.lane - i, 0)],
            popc=int.bit_count, local=SimpleNamespace(array=lambda n, dtype: [0] * n),
            shared=SimpleNamespace(array=self.shared))

    @property
    def lane(self):
        return self.mine.thread % self.lanes

    @property
    def warp(self):
        return self.mine.thread // self.lanes

    def exchange(self, x, barrier):
        """Returns a list with the x of each thread.  Only the entries of threads that wait at this
        barrier are valid."""
        self.slots[self.mine.thread] = x
        barrier.wait()
        seen = list(self.slots)
        barrier.wait()
        return seen

    def in_warp(self, x):
        first = self.warp * self.lanes
        return self.exchange(x, self.of_warp[self.warp])[first:first + self.lanes]

    def shared(self, n, dtype):
        """Returns the array that all threads share which make their n-th call, as this one does."""
        self.mine.asked += 1
        with self.lock:
            return self.arrays.setdefault(self.mine.asked, [math.nan] * n)

    def run(self, function, *args, **names):
        """Runs the device function in all threads.     names: further ones to replace in it"""
        lanes = self.lanes
        self.arrays.clear()
        places = {thread: SimpleNamespace(x=thread) for thread in range(lanes * lanes)}

        class Cuda(SimpleNamespace):
            threadIdx = property(lambda _: places[self.mine.thread])

        names = {"cuda": Cuda(**vars(self.cuda)), "WARP": lanes, "THREADS": lanes * lanes,
                 "LOG2_WARP": lanes.bit_length() - 1, "log2_lanes": lanes.bit_length() - 1,
                 "u32": lambda x: int(x) & 0xFFFFFFFF, "u64": int, "i32": int, "i64": int,
                 "f32": np.float32, "f64": float, "ctype": type,
                 "types": SimpleNamespace(uint32=int, uint64=int, float32=np.float32),
                 "float_as_int": lambda x: struct.unpack("I", struct.pack("f", x))[0],
                 "int_as_float": lambda x: struct.unpack("f", struct.pack("I", x))[0], **names}
        call, failures = as_python(function, names), []

        def thread(i):
            self.mine.thread, self.mine.asked = i, 0
            try:
                call(*args)
            except Exception as e:           # the others would wait for this thread
                failures.append(e)
                for barrier in self.whole, *self.of_warp:
                    barrier.abort()
        threads = [threading.Thread(target=thread, args=(i,), daemon=True) for i in places]
        for x in threads:
            x.start()
        for x in threads:
            x.join()
        if failures:
            raise failures[0]
