"""The numbers of kernels: bfloat16, vectors of neighbours, and exponentials, in LLVM.

Section 3 of nanoeuler_cuda.py says how kernels use these functions.  Numba compiles each of them
once for each type of its arguments.
"""
import functools
import math

from llvmlite import ir
from numba import cuda, types
from numba.core import cgutils
from numba.cuda.extending import intrinsic

from nanoeuler_parts.gpu.launches import inlined

f32, f64, u16, u32, u64 = types.float32, types.float64, types.uint16, types.uint32, types.uint64
i32, i64 = types.int32, types.int64
LOG2E = 1 / math.log(2)

def asm(builder, result, text, constraints, values, volatile=True):
    """The PTX instruction `text`: $0 is its result if it has one, the values follow.  One that is
    not volatile only computes: it may be moved, or left out.  Others may be of a whole warp: they
    are `convergent`, not to be moved into or out of a branch."""
    fnty = ir.FunctionType(result, [v.type for v in values])
    code = ir.InlineAsm(fnty, text, constraints, side_effect=volatile)
    return builder.call(code, values, attrs=("convergent",) if volatile else ())

def memory(context, builder, kinds, args, n):
    """Where argument n, an array, begins."""
    return context.make_array(kinds[n])(context, builder, args[n]).data

def elements(context, builder, kinds, args, n, count, first=None):
    """Where `count` elements of argument n are, from the first on: registers of a local array."""
    start = memory(context, builder, kinds, args, n)
    start = builder.gep(start, [first]) if first else start
    return [builder.gep(start, [ir.IntType(32)(i)]) for i in range(count)]

@intrinsic
def exp2(typing, x):
    """2^x of the type of x.  float32: PTX ex2.approx, relative error 2^-22; float64: libdevice."""
    def codegen(context, builder, sig, args):
        t = args[0].type
        if t == ir.FloatType():
            return asm(builder, t, "ex2.approx.ftz.f32 $0, $1;", "=f,f", args, volatile=False)
        fn = cgutils.get_or_insert_function(builder.module, ir.FunctionType(t, [t]), "__nv_exp2")
        return builder.call(fn, args)
    return x(x), codegen

@inlined
def exp(x):
    """e^x of the type of x: in float32 two instructions, relative error 2^-22 + |x| 2^-24."""
    return exp2(x * ctype(x).type(LOG2E))

# bfloat16 is stored as uint16, the upper half of a float32, and computed with in float32.
def widened(builder, bits):
    bits = builder.zext(bits, ir.IntType(32))
    return builder.bitcast(builder.shl(bits, bits.type(16)), ir.FloatType())

def rounded(builder, x):
    return asm(builder, ir.IntType(16), "cvt.rn.bf16.f32 $0, $1;", "=h,f", [x], volatile=False)

@intrinsic
def ctype(typing, x):
    """The type to compute in: float32 for bfloat16, else that of the array or number x.  Known when
    compiling."""
    kept_as = getattr(x, "dtype", x)
    of = types.float32 if kept_as == types.uint16 else kept_as
    return types.DType(of)(x), lambda context, builder, sig, args: context.get_dummy_value()

@intrinsic
def value(typing, x):
    """What a stored number stands for."""
    if x != types.uint16:
        return x(x), lambda context, builder, sig, args: args[0]
    return types.float32(x), lambda context, builder, sig, args: widened(builder, args[0])

@intrinsic
def stored(typing, array, x):
    """x as `array` stores it; bfloat16 rounds to the nearest, ties to even."""
    if array.dtype != types.uint16:
        return array.dtype(array, array.dtype), lambda context, builder, sig, args: args[1]
    return (types.uint16(array, types.float32),
            lambda context, builder, sig, args: rounded(builder, args[1]))

@functools.cache
def vector(W):
    """Device functions load(x, i) -> v and store(x, i, v): W neighbours of the array x, from
    element i of its memory on, which start at a multiple of W, in as few accesses of 16 bytes as
    it takes.  v is a local array of type ctype(x)."""
    def neighbours(context, builder, kinds, args, n):
        """The place that arguments n and n + 1 mean, array and index, and its alignment."""
        dtype = kinds[n].dtype
        at = builder.gep(memory(context, builder, kinds, args, n), [args[n + 1]])
        whole = ir.VectorType(context.get_value_type(dtype), W).as_pointer()
        return builder.bitcast(at, whole), min(16, W * dtype.bitwidth // 8)

    @intrinsic
    def load_into(typing, out, x, i):
        def codegen(context, builder, sig, args):
            at, align = neighbours(context, builder, sig.args, args, 1)
            bits = builder.load(at, align=align)
            for j, to in enumerate(elements(context, builder, sig.args, args, 0, W)):
                v = builder.extract_element(bits, ir.IntType(32)(j))
                builder.store(widened(builder, v) if x.dtype == types.uint16 else v, to)
            return context.get_dummy_value()
        return types.void(out, x, types.intp), codegen

    @intrinsic
    def store(typing, x, i, v):
        def codegen(context, builder, sig, args):
            at, align = neighbours(context, builder, sig.args, args, 0)
            bits = ir.Constant(at.type.pointee, ir.Undefined)
            for j, source in enumerate(elements(context, builder, sig.args, args, 2, W)):
                y = builder.load(source)
                y = rounded(builder, y) if x.dtype == types.uint16 else y
                bits = builder.insert_element(bits, y, ir.IntType(32)(j))
            builder.store(bits, at, align=align)
            return context.get_dummy_value()
        return types.void(x, types.intp, v), codegen

    @inlined
    def load(x, i):
        out = cuda.local.array(W, ctype(x))
        load_into(out, x, i)
        return out
    return load, store
