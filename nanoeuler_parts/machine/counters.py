"""Atomic counters.  Threads use them to share the work on a sequence (nanoeuler.py, section 15)."""
import os

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nanoeuler_parts.machine.compiling import jit
from nanoeuler_parts.machine.cpu import ARCHITECTURE
from nanoeuler_parts.machine.tile import i32, i64

@intrinsic
def fetch_add(typing, counter, i):
    """counter[i]++ as one atomic operation; returns the old value.  counter: int64 array.
    Earlier writes of this thread are visible to any thread that reads the counter with `seen`."""
    def codegen(context, bd, sig, args):
        data = context.make_array(sig.args[0])(context, bd, args[0]).data
        return bd.atomic_rmw("add", bd.gep(data, [args[1]]), i64(1), "acq_rel")
    return types.int64(counter, types.intp), codegen

@intrinsic
def next_below(typing, counter, i, end):
    """counter[i]++ as one atomic operation if counter[i] < end; returns the old value."""
    def codegen(context, bd, sig, args):
        data = context.make_array(sig.args[0])(context, bd, args[0]).data
        place = bd.gep(data, [args[1]])
        look, add, leave = map(bd.append_basic_block, ("look", "add", "leave"))
        bd.branch(look)
        bd.position_at_end(look)
        old = bd.load_atomic(place, "monotonic", 8)
        bd.cbranch(bd.icmp_signed("<", old, args[2]), add, leave)
        bd.position_at_end(add)              # fails if another thread was faster
        swapped = bd.cmpxchg(place, old, bd.add(old, i64(1)), "monotonic", "monotonic")
        bd.cbranch(bd.extract_value(swapped, 1), leave, look)
        bd.position_at_end(leave)
        return old
    return types.int64(counter, types.intp, types.intp), codegen

@intrinsic
def seen(typing, counter, i):
    """counter[i].  All that other threads wrote before they counted is then visible."""
    def codegen(context, bd, sig, args):
        data = context.make_array(sig.args[0])(context, bd, args[0]).data
        return bd.load_atomic(bd.gep(data, [args[1]]), "acquire", 8)
    return types.int64(counter, types.intp), codegen

YIELD = "SwitchToThread" if os.name == "nt" else "sched_yield"     # C functions

@intrinsic
def rest(typing, long):
    """A pause between two reads of a counter: a few cycles.  If long, the operating system first
    runs other threads that wait for this core."""
    def codegen(context, bd, sig, args):
        def call(name, kind):
            bd.call(cgutils.get_or_insert_function(bd.module, ir.FunctionType(kind, []), name), [])

        with bd.if_else(args[0]) as (then, otherwise):
            with then:
                call(YIELD, i32)
            with otherwise:
                if ARCHITECTURE == "x86_64":
                    call("llvm.x86.sse2.pause", ir.VoidType())
        return context.get_dummy_value()
    return types.void(types.boolean), codegen

SPINS = 2000         # reads of a counter, about 40 us, before a waiting thread yields its core

@jit
def counters(n):
    """n rows of zeroed counters, int64 (n, 16): each row has cache lines of its own.
    This is a function because np.zeros in a parallel function would be another parallel loop."""
    return np.zeros((n, 16), np.int64)

@jit
def wait_until(counter, i, least):
    """Waits until other threads have raised counter[i] to `least` or more."""
    looks = 0
    while seen(counter, i) < least:
        looks += 1
        rest(looks > SPINS)                  # the awaited thread may need this core
