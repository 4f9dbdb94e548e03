"""The inner loops of matrix products, written in LLVM as intrinsics of Numba.

`tile` serves training.  `rows_tile` serves inference with few rows.  `larger` is the maximum, and
`pack_vectors` fills packed panels.
Numba's own loops reach 35 % of a core's peak here, vectors written as LLVM reach 95 %.
"""
import itertools

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nanoeuler_parts.machine.cpu import BITS, HAS_BF16, HAS_VNNI, MR

i16, i32, i64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)     # types: i64(5) is a constant
i8 = ir.IntType(8)

# ---- the tile, as LLVM
def emit_tile(module, scalar, lanes, size, of_pairs, narrow):
    """The LLVM function of a tile, C = add * base + A B.  In NumPy, with flat arrays:

        sums = np.zeros((MR, width))
        for k in range(K):
            b = B[k * b_row:][:width]
            for r in range(MR):                      # rows past the edge read the last row again
                sums[r] += A[min(r, rows - 1) * a_row + k * a_column] * b
        for r in range(min(rows, MR)):
            old = base[r * base_row:][:width] if add else 0
            C[r * c_row:][:min(cols, width)] = (sums[r] + old)[:cols]

    width = 2 * lanes.  rows and cols count the rows and columns of C from the tile's corner on;
    they may exceed a tile.  c_row, base_row, a_row and b_row are strides from one row to the next,
    a_column from one column to the next, in entries.  With these strides a transposed A costs
    nothing.  The function is not inlined, because copies would cost seconds of JIT compilation.

    of_pairs: A and B are bfloat16, and k counts pairs of rows of B.  One instruction adds
    A[r, 2k] B[2k, j] + A[r, 2k + 1] B[2k + 1, j].  The two numbers of A are neighbours in memory;
    a_row and a_column count single numbers.
        "panels"    the two numbers of B are neighbours, too, packed as one int32
        "rows"      B is a matrix of b_count rows, and this function interleaves two of them; if
                    b_count is odd, the last row is used twice, and A must have a zero there
        ""          A and B are not bfloat16
    narrow: C is bfloat16; add and base are ignored."""
    vec, name = ir.VectorType(scalar, lanes), f"nanoeuler_tile_{scalar}"
    words = ir.VectorType(i32, lanes)        # bfloat16 pairs, or the bits of float32
    a_type = b_type = c_type = scalar
    if of_pairs:
        a_type, name = i16, f"{name}_{of_pairs}"
        b_type = i32 if of_pairs == "panels" else i16
    if narrow:
        c_type, name = i16, f"{name}_narrow"
    matrices = [kind.as_pointer() for kind in (c_type, scalar, a_type, b_type)]
    fn = cgutils.get_or_insert_function(
        module, ir.FunctionType(ir.VoidType(), [*matrices, *[i64] * 10]), name)
    if not fn.is_declaration:
        return fn
    fn.linkage = "linkonce_odr"
    fn.attributes.add("noinline")
    fn.attributes.add("optsize")             # unrolling would spill pointers: 112 -> 76 GF/s
    C, base, A, B, c_row, base_row, a_row, a_column, b_row, b_count, K, rows, cols, add = fn.args
    bd = ir.IRBuilder(fn.append_basic_block())
    width, halves = i64(2 * lanes), (i64(0), i64(lanes))
    fma = cgutils.get_or_insert_function(
        module, ir.FunctionType(vec, [vec] * 3), f"llvm.fmuladd.v{lanes}f{8 * size}")

    def vector_at(matrix, offset, kind=vec):
        return bd.bitcast(bd.gep(matrix, [offset]), kind.as_pointer())

    def load(matrix, offset):                # of any alignment
        return bd.load(vector_at(matrix, offset), align=size)

    def broadcast(x):
        kind = ir.VectorType(x.type, lanes)
        undef, lane0 = kind(ir.Undefined), ir.VectorType(i32, lanes)([0] * lanes)
        return bd.shuffle_vector(bd.insert_element(undef, x, i32(0)), undef, lane0)

    def load_a(row, k):
        start = bd.mul(k, a_column)
        if not of_pairs:
            return broadcast(bd.load(bd.gep(row, [start])))
        pair = bd.bitcast(bd.gep(row, [start]), i32.as_pointer())
        return broadcast(bd.load(pair, align=2))

    def load_b(k):
        start = bd.mul(k, b_row)
        if not of_pairs:
            return [load(B, bd.add(start, half)) for half in halves]
        if of_pairs == "panels":
            return [bd.load(vector_at(B, bd.add(start, half), words), align=4) for half in halves]
        two_vectors = ir.VectorType(i16, 2 * lanes)
        first_row = bd.add(k, k)
        has_second = bd.icmp_signed("<", bd.add(first_row, i64(1)), b_count)
        start = bd.mul(first_row, b_row)
        first = bd.load(vector_at(B, start, two_vectors), align=2)
        start = bd.add(start, bd.select(has_second, b_row, i64(0)))
        second = bd.load(vector_at(B, start, two_vectors), align=2)
        pairs = []
        for half in (0, lanes):              # first[0], second[0], first[1], second[1], ...
            order = [i for lane in range(half, half + lanes) for i in (lane, 2 * lanes + lane)]
            mask = ir.VectorType(i32, 2 * lanes)(order)
            pairs.append(bd.bitcast(bd.shuffle_vector(first, second, mask), words))
        return pairs

    def multiply(a, b, total):
        if not of_pairs:
            return bd.call(fma, [a, b, total])
        if HAS_BF16:
            dot = cgutils.get_or_insert_function(
                module, ir.FunctionType(vec, [vec, words, words]),
                f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}")
            return bd.call(dot, [total, a, b])
        # without that instruction: bfloat16 bits and 16 zero bits make a float32; first multiply
        # the even numbers, which are the lower halves, then the odd ones
        upper, bits = words([0xFFFF0000] * lanes), words([16] * lanes)
        low = [bd.bitcast(bd.shl(x, bits), vec) for x in (a, b)]
        high = [bd.bitcast(bd.and_(x, upper), vec) for x in (a, b)]
        return bd.call(fma, [*high, bd.call(fma, [*low, total])])

    a_rows = [A]
    for r in range(1, MR):
        last = a_rows[-1]
        a_rows.append(bd.select(bd.icmp_signed("<", i64(r), rows), bd.gep(last, [a_row]), last))
    zero = vec([0.0] * lanes)
    sums = [[cgutils.alloca_once_value(bd, zero) for _ in halves] for _ in range(MR)]
    with cgutils.for_range(bd, K) as k:
        b = load_b(k.index)
        for r in range(MR):
            a = load_a(a_rows[r], k.index)
            for b_half, total in zip(b, sums[r]):
                bd.store(multiply(a, b_half, bd.load(total)), total)

    def stored(total):
        """A vector of sums as C stores it: if narrow, rounded to bfloat16, ties to even."""
        if not narrow:
            return bd.load(total)
        bits = bd.bitcast(bd.load(total), words)
        odd = bd.and_(bd.lshr(bits, words([16] * lanes)), words([1] * lanes))
        nearest = bd.add(bits, bd.add(odd, words([0x7FFF] * lanes)))
        return bd.trunc(bd.lshr(nearest, words([16] * lanes)), ir.VectorType(i16, lanes))

    edge = bd.icmp_signed("<", cols, width)  # C ends within this tile: a whole vector would write
    spare = cgutils.alloca_once(bd, c_type, size=2 * lanes * MR)   # past it, so write a spare tile
    out, out_row = bd.select(edge, spare, C), bd.select(edge, width, c_row)     # and copy its part
    for r in range(MR):
        with bd.if_then(bd.icmp_signed("<", i64(r), rows)):
            base_start, out_start = bd.mul(base_row, i64(r)), bd.mul(out_row, i64(r))
            if not narrow:
                with bd.if_then(bd.icmp_signed("!=", add, i64(0))):
                    for half, total in zip(halves, sums[r]):
                        old = load(base, bd.add(base_start, half))
                        bd.store(bd.fadd(bd.load(total), old), total)
            for half, total in zip(halves, sums[r]):
                x = stored(total)
                bd.store(x, vector_at(out, bd.add(out_start, half), x.type),
                         align=2 if narrow else size)
    with bd.if_then(edge):
        count = bd.select(bd.icmp_signed("<", rows, i64(MR)), rows, i64(MR))
        with cgutils.for_range(bd, count) as r, cgutils.for_range(bd, cols) as c:
            source = bd.add(bd.mul(r.index, width), c.index)
            target = bd.add(bd.mul(r.index, c_row), c.index)
            bd.store(bd.load(bd.gep(spare, [source])), bd.gep(C, [target]))
    bd.ret_void()
    return fn

@intrinsic
def tile(typing, out, base, x, b, m, j, add):
    """out[m:m+MR, j:j+w] = add * base[m:m+MR, j:j+w] + x[m:m+MR, :] @ b[:, j:j+w],  w = tile_width
    b is a matrix (K, N) with contiguous rows, or packed panels (N / w, K, w).  All edges are
    handled.  Whole vectors of base and b are read, also past the end (`aligned` in nanoeuler.py).
    For bfloat16, x (M, K) is uint16 with contiguous rows, or int32 (M, K / 2), which holds pairs.
    Then b is uint16 or panels of pairs, and out is float32, or uint16 if nothing is added."""
    def codegen(context, bd, sig, args):     # args: the seven arguments, as LLVM values
        narrow = sig.args[0].dtype == types.uint16
        low = sig.args[2].dtype in (types.uint16, types.int32)
        dtype = types.float32 if low else sig.args[2].dtype
        scalar, size = context.get_value_type(dtype), dtype.bitwidth // 8
        lanes = BITS // (8 * size)

        def unpacked(i, entry):
            """Pointer, shape and strides (in entries) of the array that is argument i."""
            array = context.make_array(sig.args[i])(context, bd, args[i])
            strides = cgutils.unpack_tuple(bd, array.strides)
            return (array.data, cgutils.unpack_tuple(bd, array.shape),
                    [bd.sdiv(n_bytes, i64(entry)) for n_bytes in strides])

        out_data, out_shape, out_strides = unpacked(0, 2 if narrow else size)
        base_data, _, base_strides = unpacked(1, size)
        x_data, x_shape, x_strides = unpacked(2, 2 if low else size)
        b_size = sig.args[3].dtype.bitwidth // 8
        b_data, b_shape, b_strides = unpacked(3, b_size)
        at_m, at_j, add_flag = args[4:]
        first = at_j                         # offset in b, in entries
        if len(b_strides) == 3:              # start of the panel of column j
            first = bd.mul(bd.sdiv(at_j, i64(2 * lanes)), b_strides[0])
        of_pairs, K = "", x_shape[1]
        if low:
            of_pairs = "panels" if len(b_strides) == 3 else "rows"
            x_data = bd.bitcast(x_data, i16.as_pointer())
            if sig.args[2].dtype == types.uint16:        # (K + 1) / 2 adjacent pairs.  For odd K,
                # the last pair includes the finite number after the row; a 0 in a panel cancels it
                K = bd.ashr(bd.add(K, i64(1)), i64(1))
                x_strides = [x_strides[0], i64(2)]
        base_row = bd.gep(base_data, [bd.add(bd.mul(at_m, base_strides[0]), at_j)])
        bd.call(emit_tile(bd.module, scalar, lanes, size, of_pairs, narrow), [
            bd.gep(out_data, [bd.add(bd.mul(at_m, out_strides[0]), at_j)]),
            bd.bitcast(base_row, scalar.as_pointer()),
            bd.gep(x_data, [bd.mul(at_m, x_strides[0])]),
            bd.gep(b_data, [first]),
            out_strides[0], base_strides[0], *x_strides,
            b_strides[-2],                   # from k to k + 1, in a matrix and in a panel
            b_shape[-2], K, bd.sub(out_shape[0], at_m), bd.sub(out_shape[1], at_j), add_flag])
        return context.get_dummy_value()
    return types.void(out, base, x, b, types.intp, types.intp, types.intp), codegen

# ---- the tile of a few rows, as LLVM
def emit_rows_tile(module, kind, R, dots):
    """The LLVM function of R rows of x times a panel of weights.  In NumPy, with flat arrays:

        sums = np.zeros((R, width))
        for k in range(K):
            for r in range(R):                       # rows past the edge read the last row again
                sums[r] += x[min(r, rows - 1) * x_row + k] * panel[k]
        y[:rows, :cols] = scale * sums + (y if add else 0)

    kind is the dtype of the panels:
        float32, float64    plain numbers
        int8                numbers that are multiplied by `scale`, one scale per column
        int32               pairs of bfloat16, for k = 2i and 2i + 1
        uint32              four int8 numbers, each plus 128, with `scale` as for int8
    dots: x is uint16 or int32, and one instruction adds several products.  If x is uint16,
    bfloat16, it adds the two products of a pair.  If x is int32, made by `in_fixed_point`,
    it adds four integer products of int8.
    k runs in order, and each sum is one chain of multiply-adds, as in `emit_tile`.  A row of y is
    therefore bit-identical whatever the other rows are.
    steps is the number of rows of the panel: K, K / 2 or K / 4, rounded up."""
    double, pairs, quads = (kind == t for t in (types.float64, types.int32, types.uint32))
    scalar, size = (ir.DoubleType(), 8) if double else (ir.FloatType(), 4)
    lanes = BITS // (8 * size)
    vec, words = ir.VectorType(scalar, lanes), ir.VectorType(i32, lanes)
    entry = {types.int8: i8, types.int32: i32, types.uint32: i32}.get(kind, scalar)
    x_type = i32 if quads else i16 if dots else scalar
    name = f"nanoeuler_rows_{kind}_{R}_{dots}"
    pointers = [t.as_pointer() for t in (scalar, x_type, entry, scalar)]
    fn = cgutils.get_or_insert_function(
        module, ir.FunctionType(ir.VoidType(), [*pointers, *[i64] * 7]), name)
    if not fn.is_declaration:
        return fn
    fn.linkage = "linkonce_odr"
    fn.attributes.add("noinline")
    y, x, w, scale, y_row, x_row, K, steps, rows, cols, add = fn.args
    bd = ir.IRBuilder(fn.append_basic_block())
    width, halves = 2 * lanes, (0, lanes)
    fma = cgutils.get_or_insert_function(
        module, ir.FunctionType(vec, [vec] * 3), f"llvm.fmuladd.v{lanes}f{8 * size}")

    def load(pointer, offset, of=scalar):    # a vector, of any alignment
        place = bd.bitcast(bd.gep(pointer, [offset]), ir.VectorType(of, lanes).as_pointer())
        return bd.load(place, align=max(1, of.width // 8) if of in (i8, i32) else size)

    def broadcast(x):
        vector = ir.VectorType(x.type, lanes)
        empty, lane0 = vector(ir.Undefined), words([0] * lanes)
        return bd.shuffle_vector(bd.insert_element(empty, x, i32(0)), empty, lane0)

    def both(x):
        """The two float32 vectors in a vector of bfloat16 pairs: even numbers, odd numbers."""
        lower = bd.shl(x, words([16] * lanes))
        return [bd.bitcast(bits, vec) for bits in (lower, bd.and_(x, words([-65536] * lanes)))]

    def weights(offset):
        """The weights at this offset: one vector, or two, one for each part of `numbers`."""
        raw = load(w, offset, entry)
        if quads:
            return [raw, raw]                # for the upper and the lower bytes of x
        if pairs:
            return [raw] if dots and HAS_BF16 else both(raw)
        return [bd.sitofp(bd.sext(raw, words), vec)] if entry == i8 else [raw]

    def numbers(row, k):
        """The numbers of a row of x for step k, broadcast, one vector for each of `weights`."""
        if quads:
            return [broadcast(bd.load(bd.gep(row, [i]))) for i in (k, bd.add(k, steps))]
        if not pairs:
            return [broadcast(bd.load(bd.gep(row, [k])))]
        first = bd.add(k, k)
        if dots:
            pair = broadcast(bd.load(bd.bitcast(bd.gep(row, [first]), i32.as_pointer()), align=2))
            return [pair] if HAS_BF16 else both(pair)
        second = bd.add(first, i64(1))       # for odd K, the last weight is 0
        second = bd.select(bd.icmp_signed("<", second, K), second, first)
        return [broadcast(bd.load(bd.gep(row, [i]))) for i in (first, second)]

    def multiply(a, b, total):
        if quads and HAS_VNNI:
            dot = cgutils.get_or_insert_function(
                module, ir.FunctionType(words, [words] * 3),
                f"llvm.x86.avx512.vpdpbusd.{32 * lanes}")
            return bd.call(dot, [total, b, a])
        if quads:                            # without that instruction: the same integers
            for byte in range(4):
                x = bd.ashr(bd.shl(a, words([24 - 8 * byte] * lanes)), words([24] * lanes))
                weight = bd.and_(bd.lshr(b, words([8 * byte] * lanes)), words([255] * lanes))
                total = bd.add(total, bd.mul(x, weight))
            return total
        if dots and HAS_BF16:
            dot = cgutils.get_or_insert_function(
                module, ir.FunctionType(vec, [vec, words, words]),
                f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}")
            return bd.call(dot, [total, a, b])
        return bd.call(fma, [a, b, total])

    x_rows = [x]
    for r in range(1, R):
        last = x_rows[-1]
        x_rows.append(bd.select(bd.icmp_signed("<", i64(r), rows), bd.gep(last, [x_row]), last))
    def behind(row, n):                      # entry n after the bytes of `in_fixed_point`
        return bd.load(bd.gep(row, [bd.add(bd.add(steps, steps), i64(n))]))

    zeros = [[vec([0.0] * lanes)]] * R
    if quads:
        zeros = [[broadcast(behind(row, n)) for n in range(2)] for row in x_rows]
    sums = [[[cgutils.alloca_once_value(bd, x) for x in zero] for _ in halves] for zero in zeros]
    with cgutils.for_range(bd, steps) as loop:
        k = loop.index
        start = bd.mul(k, i64(width))
        of_weights = [weights(bd.add(start, i64(half))) for half in halves]
        of_x = [numbers(row, k) for row in x_rows]
        for part in range(len(of_x[0])):     # all even k first, so fewer vectors are live
            for r, h in itertools.product(range(R), range(2)):
                place = sums[r][h][part if quads else 0]
                bd.store(multiply(of_x[r][part], of_weights[h][part], bd.load(place)), place)

    spare = cgutils.alloca_once(bd, scalar, size=width)  # written instead of y at the edge
    edge = bd.icmp_signed("<", cols, i64(width))
    count = bd.select(edge, cols, i64(width))
    for r in range(R):
        with bd.if_then(bd.icmp_signed("<", i64(r), rows)):
            at = bd.gep(y, [bd.mul(y_row, i64(r))])
            with bd.if_then(edge), cgutils.for_range(bd, count) as c:
                bd.store(bd.load(bd.gep(at, [c.index])), bd.gep(spare, [c.index]))
            to = bd.select(edge, spare, at)
            for h, half in enumerate(halves):
                total, *lower = map(bd.load, sums[r][h])
                if quads:
                    total, lower = (bd.sitofp(x, vec) for x in (total, *lower))
                    total = bd.call(fma, [total, vec([256.0] * lanes), lower])
                    total = bd.fmul(total, broadcast(bd.bitcast(behind(x_rows[r], 2), scalar)))
                if kind in (types.int8, types.uint32):
                    total = bd.fmul(total, load(scale, i64(half)))
                old = load(to, i64(half))
                plus = bd.select(bd.icmp_signed("!=", add, i64(0)), bd.fadd(total, old), total)
                place = bd.bitcast(bd.gep(to, [i64(half)]), vec.as_pointer())
                bd.store(plus, place, align=size)
            with bd.if_then(edge), cgutils.for_range(bd, count) as c:
                bd.store(bd.load(bd.gep(spare, [c.index])), bd.gep(at, [c.index]))
    bd.ret_void()
    return fn

@intrinsic(prefer_literal=True)
def rows_tile(typing, y, x, w, scale, r, i, add, R):
    """y[r:r+R, columns of panel i] = scale * (x[r:r+R] W^T), + y if add     R: a literal number
    y (.., N), x (.., K) with contiguous rows, w packed panels (panels, K, width).  Panels of pairs
    are (panels, ceil(K / 2), width), of fours (panels, ceil(K / 4), width).  scale: one number for
    each column of the panels."""
    def codegen(context, bd, sig, args):
        kind, dots = sig.args[2].dtype, sig.args[1].dtype in (types.uint16, types.int32)
        lanes = BITS // max(32, sig.args[0].dtype.bitwidth)
        of_y, of_x, of_w, of_scale = (context.make_array(t)(context, bd, a)
                                      for t, a in zip(sig.args[:4], args))
        y_shape, x_shape, w_shape = (cgutils.unpack_tuple(bd, a.shape) for a in (of_y, of_x, of_w))
        y_row, x_row, panel = (
            bd.sdiv(cgutils.unpack_tuple(bd, a.strides)[0], i64(t.dtype.bitwidth // 8))
            for a, t in zip((of_y, of_x, of_w), sig.args))
        at_r, at_i, add_flag = args[4:7]
        column = bd.mul(at_i, i64(2 * lanes))
        bd.call(emit_rows_tile(bd.module, kind, R.literal_value, dots), [
            bd.gep(of_y.data, [bd.add(bd.mul(at_r, y_row), column)]),
            bd.gep(of_x.data, [bd.mul(at_r, x_row)]),
            bd.gep(of_w.data, [bd.mul(at_i, panel)]),
            bd.gep(of_scale.data, [column]),
            y_row, x_row, x_shape[1], w_shape[1],
            bd.sub(y_shape[0], at_r), bd.sub(y_shape[1], column), add_flag])
        return context.get_dummy_value()
    return types.void(y, x, w, scale, types.intp, types.intp, types.intp, R), codegen

@intrinsic
def larger(typing, x, y):
    """The larger of two floats, or a NaN if one of them is a NaN.
    LLVM does not vectorize `max`, which takes ten times as long.  Under fastmath's `nnan`, it may
    also turn a NaN into any number."""
    def codegen(context, bd, sig, args):
        t = args[0].type
        fn = cgutils.get_or_insert_function(bd.module, ir.FunctionType(t, [t, t]),
                                            f"llvm.maximum.f{sig.args[0].bitwidth}")
        return bd.call(fn, args, fastmath=("nsz",))
    return x(x, x), codegen

@intrinsic
def pack_vectors(typing, row, first, second, mask):
    """row[j] = pair_of(first[j], second[j], mask, row) for j < n, in whole vectors; returns n.
    n is 0 if the entries of `first` are not adjacent in memory.  `pack_row` does the other j.
    A vectorized loop of LLVM has a long setup before its first vector; the rows are too short for
    it."""
    def codegen(context, bd, sig, args):
        to, of = (array.dtype for array in sig.args[:2])
        entry, bits = context.get_value_type(to), to.bitwidth
        lanes = BITS // bits
        vec, words = ir.VectorType(entry, lanes), ir.VectorType(i32, lanes)
        arrays = [context.make_array(kind)(context, bd, x) for kind, x in zip(sig.args, args[:3])]
        pointers = [x.data for x in arrays]
        [stride], [n] = (cgutils.unpack_tuple(bd, x) for x in (arrays[1].strides, arrays[1].shape))
        near = bd.icmp_signed("==", stride, i64(of.bitwidth // 8))
        whole = bd.select(near, bd.sub(n, bd.srem(n, i64(lanes))), i64(0))

        def each(x):
            return words([x] * lanes)

        def loaded(pointer, kind):
            place = bd.bitcast(pointer, ir.VectorType(kind, lanes).as_pointer())
            return bd.load(place, align=kind.width // 8 if kind in (i16, i32) else bits // 8)

        def upper_half(pointer):             # from here on as in `bf16_bits`
            if of == types.uint16:
                return bd.zext(loaded(pointer, i16), words)
            x = loaded(pointer, i32)
            odd = bd.and_(bd.lshr(x, each(16)), each(1))
            return bd.lshr(bd.add(x, bd.add(odd, each(0x7FFF))), each(16))

        empty = words(ir.Undefined)
        masks = bd.shuffle_vector(bd.insert_element(empty, args[3], i32(0)), empty, each(0))
        with cgutils.for_range(bd, bd.sdiv(whole, i64(lanes))) as loop:
            to_row, *sources = (bd.gep(x, [bd.mul(loop.index, i64(lanes))]) for x in pointers)
            if to == types.int32:
                even, odd = map(upper_half, sources)
                x = bd.or_(even, bd.shl(bd.and_(odd, masks), each(16)))
            else:
                x = loaded(sources[0], entry)
            bd.store(x, bd.bitcast(to_row, vec.as_pointer()), align=bits // 8)
        return whole
    return types.intp(row, first, second, mask), codegen
