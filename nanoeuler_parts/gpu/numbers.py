"""Numbers in kernels: bfloat16, vectors of neighbours, and exponentials, written in LLVM.

Section 3 of nanoeuler_cuda.py explains how kernels use these functions.  Numba compiles each
function once per combination of argument types.
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
    """Emits the PTX instruction `text`.  In `text`, $0 is the result, if there is one, and the
    values follow.     result: LLVM type     constraints: those of LLVM's inline assembly

    volatile=False: the instruction only computes, and the compiler may move or remove it.  True: it
    stays, and is `convergent`: as it may act on a whole warp, the compiler must not move it into or
    out of a branch."""
    fnty = ir.FunctionType(result, [v.type for v in values])
    code = ir.InlineAsm(fnty, text, constraints, side_effect=volatile)
    return builder.call(code, values, attrs=("convergent",) if volatile else ())

def asm_into(builder, pointers, text, constraints, values):
    """Emits `asm` with one result per pointer, and stores each result at its pointer.  A result
    has the type that its pointer points to."""
    result_type = ir.LiteralStructType([p.type.pointee for p in pointers])
    results = asm(builder, result_type, text, constraints, values)
    for i, pointer in enumerate(pointers):
        builder.store(builder.extract_value(results, i), pointer)

def memory(context, builder, kinds, args, n):
    """Returns the pointer to the first element of argument n, an array."""
    return context.make_array(kinds[n])(context, builder, args[n]).data

def elements(context, builder, kinds, args, n, count, first=None):
    """Returns pointers to `count` elements of argument n, a local array, from index `first`.  They
    become registers."""
    start = memory(context, builder, kinds, args, n)
    start = builder.gep(start, [first]) if first else start
    return [builder.gep(start, [ir.IntType(32)(i)]) for i in range(count)]

@intrinsic
def exp2(typing, x):
    """Returns 2^x in the type of x.  float32: PTX ex2.approx, relative error 2^-22; float64:
    libdevice."""
    def codegen(context, builder, sig, args):
        t = args[0].type
        if t == ir.FloatType():
            return asm(builder, t, "ex2.approx.ftz.f32 $0, $1;", "=f,f", args, volatile=False)
        fn = cgutils.get_or_insert_function(builder.module, ir.FunctionType(t, [t]), "__nv_exp2")
        return builder.call(fn, args)
    return x(x), codegen

@inlined
def exp(x):
    """Returns e^x in the type of x.  float32: two instructions, relative error 2^-22 + |x|
    2^-24."""
    return exp2(x * ctype(x).type(LOG2E))

# bfloat16 is stored as uint16, the upper half of a float32, and computed with in float32.
def widened(builder, bits):
    """Emits the conversion of the 16 bits of a bfloat16 to float32."""
    bits = builder.zext(bits, ir.IntType(32))
    return builder.bitcast(builder.shl(bits, bits.type(16)), ir.FloatType())

def rounded(builder, x):
    """Emits the conversion of a float32 to the nearest bfloat16, as 16 bits."""
    return asm(builder, ir.IntType(16), "cvt.rn.bf16.f32 $0, $1;", "=h,f", [x], volatile=False)

@intrinsic
def ctype(typing, x):
    """Returns the type to compute in, at compile time: float32 for bfloat16, otherwise the type of
    the array or number x."""
    kept_as = getattr(x, "dtype", x)
    of = types.float32 if kept_as == types.uint16 else kept_as
    return types.DType(of)(x), lambda context, builder, sig, args: context.get_dummy_value()

@intrinsic
def value(typing, x):
    """Returns the value of a stored number: a uint16, which holds a bfloat16, becomes a float32."""
    if x != types.uint16:
        return x(x), lambda context, builder, sig, args: args[0]
    return types.float32(x), lambda context, builder, sig, args: widened(builder, args[0])

@intrinsic
def stored(typing, array, x):
    """Returns x in the format in which `array` stores it.  bfloat16 rounds to nearest, ties to
    even."""
    if array.dtype != types.uint16:
        return array.dtype(array, array.dtype), lambda context, builder, sig, args: args[1]
    return (types.uint16(array, types.float32),
            lambda context, builder, sig, args: rounded(builder, args[1]))

@functools.cache
def vector(W):
    """Makes device functions for W neighbours of an array x, from element i of its memory:

        load(x, i) -> v     v is a local array of type ctype(x)
        store(x, i, v)

    i must be a multiple of W.  They use as few accesses of 16 bytes as possible."""
    def neighbours(context, builder, kinds, args, n):
        """Returns the pointer to W elements that arguments n and n + 1, array and index, denote,
        and its alignment in bytes."""
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
