"""Tiles in shared memory, and what multiplies them: fragments for mma.sync, and wgmma on Hopper.

Contents
    the layout of a tile
    the instructions that load and store the fragments of `mma` (nanoeuler_parts/gpu/mma.py)
    wgmma
"""
import functools

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.cuda.extending import intrinsic

from bpe import need
from nanoeuler_parts.gpu.launches import inlined
from nanoeuler_parts.gpu.numbers import asm_into, elements, u32, u64
from nanoeuler_parts.tensor_cores.ptx import ptx

# ---- The layout of a tile in shared memory
# A row of a tile takes 128 bytes: 64 bfloat16 numbers, which are eight chunks of 16 bytes.  The 32
# banks of shared memory are also 128 bytes wide.  ldmatrix reads the same chunk of eight rows at
# once.  If chunk c of every row lay at place c, these eight chunks would be in the same four banks,
# and the reads would wait for each other.  Chunk c of row r therefore lies at place c XOR (r mod
# 8).  This swizzle is the copy engine's, too.  The table shows which chunk lies at which place:
#
#     place     0  1  2  3  4  5  6  7
#     row 0     0  1  2  3  4  5  6  7
#     row 1     1  0  3  2  5  4  7  6
#     row 2     2  3  0  1  6  7  4  5
#     row 3     3  2  1  0  7  6  5  4        The same chunk of eight rows is at eight different
#     row 4     4  5  6  7  0  1  2  3        places, so all banks work.
#     row 5     5  4  7  6  1  0  3  2
#     row 6     6  7  4  5  2  3  0  1
#     row 7     7  6  5  4  3  2  1  0
#
# A tile of 64 rows that are longer than 128 bytes consists of panels, one after another in memory.
# Panel p holds chunks 8 p to 8 p + 7 of all 64 rows:
#
#     a tile of 64 x 128 bfloat16 numbers      panel 0                  panel 1
#                                              columns 0 to 63          columns 64 to 127
#     bytes from the start of the tile         0 to 8191                8192 to 16383
TILE_ROWS, BF16_PER_CHUNK = 64, 8
CHUNKS_PER_ROW = np.uint32(8)                # of a row of a panel, like ROW_BYTES
CHUNK_BYTES, ROW_BYTES = np.uint32(16), np.uint32(128)
PANEL_BYTES = np.uint32(TILE_ROWS * 128)

@inlined
def swizzled(row, chunk):
    """Returns the offset of a chunk of a tile, in bytes.  The chunk holds columns 8 chunk to
    8 chunk + 7 of the row, if they are bfloat16.     The copy engine's 128-byte swizzle"""
    panel, place = chunk // CHUNKS_PER_ROW, chunk % CHUNKS_PER_ROW ^ row % CHUNKS_PER_ROW
    return panel * PANEL_BYTES + row * ROW_BYTES + place * CHUNK_BYTES

# ---- The fragments of mma.sync
# ldmatrix loads fragments of `mma` from shared memory, and stmatrix stores them.  Both move four
# matrices of 8 x 8, and each row of these is a chunk.
def ldmatrix(modifier):
    """Returns the device function load(out, j, row): it loads four 8 x 8 matrices of bfloat16 into
    out[j:j+4] of every lane.     PTX ldmatrix.x4

    row         a lane's argument, the address of a chunk.  Lanes 8 i to 8 i + 7 give the addresses
                of the eight rows of matrix i
    modifier    "", or ".trans" for transposed matrices"""
    @intrinsic
    def load(typing, out, j, row):
        def codegen(context, builder, sig, args):
            asm_into(builder, elements(context, builder, sig.args, args, 0, 4, args[1]),
                     f"ldmatrix.sync.aligned.m8n8.x4{modifier}.shared.b16 {{$0, $1, $2, $3}}, "
                     f"[$4];", "=r,=r,=r,=r,r,~{memory}", [args[2]])
            return context.get_dummy_value()
        return types.void(out, types.intp, u32), codegen
    return load

ldmatrix_rows, ldmatrix_columns = ldmatrix(""), ldmatrix(".trans")

def stmatrix(modifier):
    """Returns the device function store(row, pair, pair, pair, pair): it stores four 8 x 8 matrices
    of bfloat16.  Each lane gives its pairs of them, in the layout of ldmatrix.
    PTX stmatrix.x4     row, modifier: as for ldmatrix"""
    return ptx(f"stmatrix.sync.aligned.m8n8.x4{modifier}.shared.b16 [$0], {{$1, $2, $3, $4}};",
               u32, u32, u32, u32, u32)

stmatrix_rows, stmatrix_columns = stmatrix(""), stmatrix(".trans")

# ---- wgmma: a warpgroup (four warps) multiplies tiles that stay in shared memory
# A descriptor says where an operand lies, and how.  Its fields, in units of 16 bytes:
SWIZZLE_128 = 1 << 62                        # the 128-byte swizzle
GROUP_STRIDE = (1024 // 16) << 32            # "stride byte offset": from 8 rows to the next 8
PANEL_STRIDE = (8192 // 16) << 16            # "leading dimension byte offset": from panel to panel

@inlined
def descriptor(tile):
    """Returns wgmma's descriptor of the operand at the address `tile`: rows of 128 bytes in the
    layout of `swizzled`.  If the rows run along M or N, the operand may have several panels.
    PTX ISA, wgmma: matrix descriptor format"""
    return u64(SWIZZLE_128 | GROUP_STRIDE | PANEL_STRIDE) | u64(tile // CHUNK_BYTES)

@functools.cache
def wgmma(N, a_in, b_mn, count=1, adds="always", K=64, panels=(PANEL_BYTES, PANEL_BYTES)):
    """Returns the device function acc [+]= A B of a warpgroup.  A is (64, K) and B (K, N), both
    bfloat16; acc is (64, N), float32.     PTX wgmma.mma_async, sm_90a

    a_in     where A is: "rows" or "columns", tiles in shared memory, or "registers"; see below
    b_mn     whether the rows of B's tile run along N, and not along K
    count    how many such products are in flight at once
    adds     whether a product adds to acc: "always", "never", or "asked", by the last argument
    K        64; or 128, if the rows of both tiles run along K.  They have two panels then
    panels   of A and of B: bytes from the first panel to the second one

    One PTX instruction multiplies 16 of the K values of k.  Its operands are:

        acc   (64, N)    float32, N / 2 registers per thread.  acc[i] of lane l of warp w is in row
                         16 w + l / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (l % 4) + i % 2: the
                         layout of `mma`
        A     (64, 16)   "rows": a tile whose rows run along K; the next 16 are 32 bytes further
                         "columns": a tile whose rows run along M; they are 16 rows further
                         "registers": 4 per thread; a warp holds its 16 rows like A of `mma`
        B     (16, N)    a tile whose rows run along K, or, with b_mn, along N

    Arguments of the device function, in this order:

        acc              the sums of all `count` products, one after another
        a                only with a_in "registers": a local array, 16 pairs for each product
        descriptors      of A and B for each product; only of B with a_in "registers"
        add              only with adds "asked": 0 or not 0

    This is the PTX of wgmma(16, "rows", False).  Only the first 16 of the 64 values of k are shown:

        { .reg .u64 a, b; .reg .pred keep; setp.ne.u32 keep, 0, 0;
          wgmma.fence.sync.aligned;
          add.u64 a, $8, 0;                                  0 here; then 2, 4, 6 for the next k
          add.u64 b, $9, 0;
          wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16
            {$0,$1,$2,$3,$4,$5,$6,$7}, a, b, 1, 1, 1, 0, 0;  add, signs of A and B, transposed?
          ...
          wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }

    Meaning of the numbered operands:

        $0 ..            acc of all products; its old values arrive in the same registers
        $acc_total ..    the descriptors: A and B in turn, or only B
        then             A, if it is in registers: 16 for each product, 4 for each instruction
        the last         with adds "asked": whether to add"""
    acc_each = N // 2
    acc_total = acc_each * count
    a_in_registers = a_in == "registers"
    along_k, along_mn = 32 // 16, 16 * 128 // 16         # to the next 16 of k, in units of 16 bytes
    a_step = along_mn if a_in == "columns" else along_k
    b_step = along_mn if b_mn else along_k
    need(K == 64 or a_in == "rows" and not b_mn, "only rows along K may have several panels")

    def offset(step, panel, k):
        """Returns where 16 values of k begin in an operand, in units of 16 bytes."""
        return step * (k % 4) + int(panel) // 16 * (k // 4)

    def registers(first, n):
        return "{" + ",".join(f"${first + j}" for j in range(n)) + "}"

    def text_of(operands):
        """Returns the PTX.  operands: how many follow acc"""
        keep = f"${acc_total + operands - 1}" if adds == "asked" else "0"
        text = (f"{{ .reg .u64 a, b; .reg .pred keep; setp.ne.u32 keep, {keep}, 0; "
                f"wgmma.fence.sync.aligned; ")
        for i in range(count):
            sums = registers(acc_each * i, acc_each)
            for k in range(K // 16):
                if a_in_registers:
                    b = acc_total + i
                    a = registers(acc_total + count + 16 * i + 4 * k, 4)
                    a_transposed = ""        # the instruction lacks this field then
                else:
                    b = acc_total + 2 * i + 1
                    text += f"add.u64 a, ${b - 1}, {offset(a_step, panels[0], k)}; "
                    a = "a"
                    a_transposed = f", {int(a_in == 'columns')}"
                add = "1" if adds == "always" or k else "keep"
                text += (f"add.u64 b, ${b}, {offset(b_step, panels[1], k)}; "
                         "wgmma.mma_async.sync.aligned."
                         f"m64n{N}k16.f32.bf16.bf16 {sums}, {a}, b, "
                         f"{add}, 1, 1{a_transposed}, {int(b_mn)}; ")
        return text + "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }"

    def codegen(context, builder, sig, args):
        sums = elements(context, builder, sig.args, args, 0, acc_total)
        values = cgutils.unpack_tuple(builder, args[1])
        if a_in_registers:
            a = elements(context, builder, sig.args[1], values, 0, 16 * count)
            values = [*values[1:], *map(builder.load, a)]
        old_sums = [] if adds == "never" else [builder.load(p) for p in sums]
        letters = ["l" if v.type == ir.IntType(64) else "r" for v in values]
        constraints = (["=f"] * acc_total + letters + [str(i) for i in range(len(old_sums))]
                       + ["~{memory}"])
        asm_into(builder, sums, text_of(len(values)), ",".join(constraints), [*values, *old_sums])
        return context.get_dummy_value()

    @intrinsic
    def product(typing, acc, *operands):     # codegen receives the operands as one tuple
        operand_types = (operands[0], *[u64] * count) if a_in_registers else [u64] * (2 * count)
        if adds == "asked":
            operand_types = [*operand_types, u32]
        return types.void(acc, types.BaseTuple.from_types(operand_types)), codegen
    return product
