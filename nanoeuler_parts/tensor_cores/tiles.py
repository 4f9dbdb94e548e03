"""Tiles in shared memory, and the two ways to multiply them: mma.sync, and wgmma on Hopper.

Contents
    the layout of a tile
    mma, and the instructions that load and store its fragments
    wgmma
    one_tile_kernel, the shortest complete kernel that multiplies matrices with TMA and wgmma
"""
import functools

import numpy as np
from llvmlite import ir
from numba import cuda, types
from numba.core import cgutils
from numba.cuda.extending import intrinsic

from nanoeuler_cuda import cdiv, filled
from nanoeuler_parts.gpu.launches import cuda_kernel, inlined, launch
from nanoeuler_parts.gpu.numbers import elements, f32, stored, u32, u64
from nanoeuler_parts.tensor_cores.ptx import (
    ALIGNMENT, asm_into, dynamic_smem, global_address, leads_warpgroup, map_fence,
    mbarrier_expect, mbarrier_fence, mbarrier_init, mbarrier_wait, ptx, shared_address, tma_load,
)

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

# ---- Fragments, and mma.sync
# The operands and the sums of `mma` are fragments: the 32 lanes of a warp together hold a small
# matrix, as pairs of bfloat16 or as float32 sums.  ldmatrix loads fragments from shared memory,
# and stmatrix stores them.  Both move four matrices of 8 x 8, and each row of these is a chunk.
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

@intrinsic
def mma(typing, acc, i, a, j, b, k):
    """acc[i:i+4] += A B of a warp.  A (16, 16) is in a[j:j+4], B (16, 8) in b[k:k+2], as pairs of
    bfloat16.     PTX mma.m16n8k16

    Lane l holds these entries, with r = l / 4 and c = 2 (l % 4):
        acc   float32   [r, c]   [r, c + 1]   [r + 8, c]   [r + 8, c + 1]
        A     pairs     [r, c]   [r + 8, c]   [r, c + 8]   [r + 8, c + 8]    and the next column
        B     pairs     [c, r]   [c + 8, r]                                  and the next row

    The table shows which lane holds an entry of acc (16, 8).  A quad, four neighbouring lanes,
    shares a row:

        column     0    1    2    3    4    5    6    7
        row 0      0    0    1    1    2    2    3    3      acc[i] and acc[i + 1], in turn
        row 1      4    4    5    5    6    6    7    7
        ...
        row 7     28   28   29   29   30   30   31   31
        row 8      0    0    1    1    2    2    3    3      acc[i + 2] and acc[i + 3]
        ...
        row 15    28   28   29   29   30   30   31   31"""
    def codegen(context, builder, sig, args):
        def registers(n, count):
            """Returns pointers to `count` registers of argument n, a local array.  The first index
            is argument n + 1."""
            return elements(context, builder, sig.args, args, n, count, args[n + 1])

        sums = registers(0, 4)
        operands = registers(2, 4) + registers(4, 2) + sums
        asm_into(builder, sums,
                 "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, "
                 "{$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
                 "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [builder.load(p) for p in operands])
        return context.get_dummy_value()
    return types.void(acc, types.intp, a, types.intp, b, types.intp), codegen

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
def wgmma(N, a_in, b_mn, count=1, adds="always"):
    """Returns the device function acc [+]= A B of a warpgroup.  A is (64, 64) and B (64, N), both
    bfloat16; acc is (64, N), float32.     PTX wgmma.mma_async, sm_90a

    a_in     where A is: "rows" or "columns", tiles in shared memory, or "registers"; see below
    b_mn     whether the rows of B's tile run along N, and not along K
    count    how many such products are in flight at once
    adds     whether a product adds to acc: "always", "never", or "asked", by the last argument

    One PTX instruction multiplies 16 of the 64 values of k.  Its operands are:

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

    def registers(first, n):
        return "{" + ",".join(f"${first + j}" for j in range(n)) + "}"

    def text_of(operands):
        """Returns the PTX.  operands: how many follow acc"""
        keep = f"${acc_total + operands - 1}" if adds == "asked" else "0"
        text = (f"{{ .reg .u64 a, b; .reg .pred keep; setp.ne.u32 keep, {keep}, 0; "
                f"wgmma.fence.sync.aligned; ")
        for i in range(count):
            sums = registers(acc_each * i, acc_each)
            for k in range(4):
                if a_in_registers:
                    b = acc_total + i
                    a = registers(acc_total + count + 16 * i + 4 * k, 4)
                    a_transposed = ""        # the instruction lacks this field then
                else:
                    b = acc_total + 2 * i + 1
                    text += f"add.u64 a, ${b - 1}, {a_step * k}; "
                    a = "a"
                    a_transposed = f", {int(a_in == 'columns')}"
                add = "1" if adds == "always" or k else "keep"
                text += (f"add.u64 b, ${b}, {b_step * k}; wgmma.mma_async.sync.aligned."
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

# Which entry of a product a thread's acc[i] is, by the table in `wgmma`: its row is first_row() +
# 8 * which_row(i), its column first_column() + column_of(i).  A thread thus has two rows of the 64.
@inlined
def first_row():
    """Returns the first of the thread's two rows in the tile of its warpgroup; the second is 8 rows
    below."""
    return cuda.threadIdx.x % 128 // 32 * 16 + cuda.threadIdx.x % 32 // 4

@inlined
def first_column():
    """Returns the thread's first column."""
    return cuda.threadIdx.x % 4 * 2

@inlined
def which_row(i):
    """Returns which of the thread's two rows acc[i] is in, 0 or 1."""
    return i // 2 % 2

@inlined
def column_of(i):
    """Returns how far the column of acc[i] is from the thread's first one."""
    return i // 4 * 8 + i % 2

# ---- A complete kernel for Hopper, as short as possible
# The copy engine fetches two tiles, an mbarrier counts their bytes, and wgmma multiplies them.
# Copies and products do not overlap here.  The kernel of matmul.py overlaps them with a ring of
# buffers and a warpgroup that only fetches, and has tiles of 128 x 256.
ONE_TILE_SMEM = 2 * int(PANEL_BYTES) + ALIGNMENT
multiply_tiles = wgmma(64, "rows", False)

@cuda_kernel
def one_tile_kernel(out, map_a, map_b, K):
    """out = A B^T.  A block computes a tile of 64 x 64.     grid (N / 64, M / 64), 128 threads
    out (M, N) bfloat16; map_a, map_b: tensor maps of A (M, K) and B (N, K), with boxes of 64 rows
    """
    a_tile = dynamic_smem()
    b_tile = a_tile + PANEL_BYTES
    barrier = shared_address(cuda.shared.array(1, u64))
    m0, n0 = TILE_ROWS * cuda.blockIdx.y, TILE_ROWS * cuda.blockIdx.x
    acc = filled(32, f32(0))
    if leads_warpgroup():
        map_fence(global_address(map_a))
        map_fence(global_address(map_b))
        mbarrier_init(barrier, u32(1))       # one thread arrives in each phase: this one
        mbarrier_fence()
    cuda.syncthreads()                       # the barrier is initialized
    for n in range((K + TILE_ROWS - 1) // TILE_ROWS):
        if leads_warpgroup():                # one thread requests both tiles
            mbarrier_expect(barrier, u32(2) * PANEL_BYTES)
            tma_load(a_tile, global_address(map_a), u32(TILE_ROWS * n), u32(m0), barrier)
            tma_load(b_tile, global_address(map_b), u32(TILE_ROWS * n), u32(n0), barrier)
        mbarrier_wait(barrier, u32(n % 2))   # phase n is complete: the tiles have landed, with
                                             # zeros beyond the edges of A and B
        multiply_tiles(acc, descriptor(a_tile), descriptor(b_tile))
        cuda.syncthreads()                   # every warp is done with them: load the next ones
    for i in range(32):
        row = m0 + first_row() + 8 * which_row(i)
        column = n0 + first_column() + column_of(i)
        if row < out.shape[0] and column < out.shape[1]:
            out[row, column] = stored(out, acc[i])

def one_tile_matmul(map_of, out, a, b):
    """out = a b^T, only on Hopper.     out (M, N), a (M, K), b (N, K)
    The rows of a and b must be whole chunks: K is a multiple of 8.
    map_of: function that returns tensor maps, as TensorOps.map_of"""
    M, N = out.shape
    launch(one_tile_kernel, out, map_of(a, TILE_ROWS), map_of(b, TILE_ROWS), a.shape[1],
           grid=(cdiv(N, TILE_ROWS), cdiv(M, TILE_ROWS)), block=128, smem=ONE_TILE_SMEM)
