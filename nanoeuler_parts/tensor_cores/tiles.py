"""Tiles in shared memory, and what multiplies them: mma.sync, and wgmma on Hopper.

At the end is a whole kernel that multiplies matrices with wgmma, as short as possible.
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
    ALIGNMENT, asm_into, dynamic_smem, global_address, leads_warpgroup, map_fence, map_of,
    mbarrier_expect, mbarrier_fence, mbarrier_init, mbarrier_wait, ptx, shared_address, tma_load,
)

# A tile lies in shared memory in rows of 128 bytes: 64 numbers of bfloat16, eight chunks of 16
# bytes.  So wide are all 32 banks, too: with chunk c of each row below that of the row before, the
# eight rows of a chunk that ldmatrix reads at once would wait for the same four banks.  So chunk c
# of row r lies at place c XOR (r mod 8).  The chunk that is found at each place:
#
#     place     0  1  2  3  4  5  6  7
#     row 0     0  1  2  3  4  5  6  7
#     row 1     1  0  3  2  5  4  7  6
#     row 2     2  3  0  1  6  7  4  5
#     row 3     3  2  1  0  7  6  5  4        any chunk, in eight rows, is at eight places:
#     row 4     4  5  6  7  0  1  2  3        all banks work
#     row 5     5  4  7  6  1  0  3  2
#     row 6     6  7  4  5  2  3  0  1
#     row 7     7  6  5  4  3  2  1  0
#
# A wider tile is several of these, one behind the other, a column of 64 numbers each.
TILE_ROWS, PER_CHUNK, CHUNKS_A_ROW = 64, 8, np.uint32(8)     # PER_CHUNK: numbers of bfloat16
CHUNK_BYTES, ROW_BYTES = np.uint32(16), np.uint32(128)
COLUMN_BYTES = np.uint32(TILE_ROWS * 128)    # of 64 rows

@inlined
def swizzled(row, chunk):
    """Where columns 8 chunk to 8 chunk + 7 of a row of a tile are, in bytes: the copy engine's
    128-byte swizzle."""
    column, place = chunk // CHUNKS_A_ROW, chunk % CHUNKS_A_ROW ^ row % CHUNKS_A_ROW
    return column * COLUMN_BYTES + row * ROW_BYTES + place * CHUNK_BYTES

# Tensor cores multiply fragments, which the 32 lanes of a warp hold together, two numbers of
# bfloat16 in a register of 32 bits.  ldmatrix fetches them out of shared memory, stmatrix stores
# them: four matrices of 8 x 8, each of whose rows is a chunk.
def ldmatrix(transposed):
    """The device function that loads four 8 x 8 matrices of bfloat16, the rows of the i-th at the
    addresses of lanes 8 i to 8 i + 7, into out[j:j+4] of every lane.     PTX ldmatrix.x4"""
    @intrinsic
    def load(typing, out, j, row):
        def codegen(context, builder, sig, args):
            asm_into(builder, elements(context, builder, sig.args, args, 0, 4, args[1]),
                     f"ldmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 {{$0, $1, $2, $3}}, "
                     f"[$4];", "=r,=r,=r,=r,r,~{memory}", [args[2]])
            return context.get_dummy_value()
        return types.void(out, types.intp, u32), codegen
    return load

ldmatrix_rows, ldmatrix_columns = ldmatrix(""), ldmatrix(".trans")
stmatrix = ptx("stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
               u32, u32, u32, u32, u32)

@intrinsic
def mma(typing, acc, i, a, j, b, k):
    """acc[i:i+4] += A B of a warp: A (16, 16) in a[j:j+4], B (16, 8) in b[k:k+2], bfloat16 pairs.

    What lane l holds, with r = l / 4 and c = 2 (l % 4):
        acc   float32   [r, c]   [r, c + 1]   [r + 8, c]   [r + 8, c + 1]
        A     pairs     [r, c]   [r + 8, c]   [r, c + 8]   [r + 8, c + 8]    and the next column
        B     pairs     [c, r]   [c + 8, r]                                  and the next row

    The lane that holds an entry of acc (16, 8): a quad of neighbours has a row.

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
            """Those of argument n, from the index that follows it on."""
            return elements(context, builder, sig.args, args, n, count, args[n + 1])

        sums = registers(0, 4)
        operands = registers(2, 4) + registers(4, 2) + sums
        asm_into(builder, sums,
                 "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, "
                 "{$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
                 "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [builder.load(p) for p in operands])
        return context.get_dummy_value()
    return types.void(acc, types.intp, a, types.intp, b, types.intp), codegen

# Hopper's wgmma multiplies tiles where they lie: a warpgroup, four warps, gives it the addresses.
SWIZZLE_128 = 1 << 62                        # fields of a descriptor: the swizzle,
BETWEEN_GROUPS = (1024 // 16) << 32          # the stride byte offset,
BETWEEN_COLUMNS = (8192 // 16) << 16         # the leading dimension byte offset

@inlined
def descriptor(tile):
    """What wgmma is told of an operand at this address of shared memory, 64 columns of bfloat16 in
    rows of 128 bytes: 128-byte swizzle, 1,024 bytes between groups of 8 rows; where the rows run
    along M or N, 8,192 bytes between columns of 64.  All in units of 16 bytes.
    PTX ISA, wgmma: matrix descriptor format"""
    return u64(SWIZZLE_128 | BETWEEN_GROUPS | BETWEEN_COLUMNS) | u64(tile // CHUNK_BYTES)

@functools.cache
def wgmma(N, a_in, b_mn, count=1, adds="always"):
    """The device function acc [+]= A B of a warpgroup, A (64, 64), B (64, N), bfloat16.  `count`
    such products are in flight at once.     PTX wgmma.mma_async, sm_90a

    An instruction takes 16 of the 64 along K.  Its operands, and who has them:

        acc   (64, N)    float32, N / 2 registers a thread.  acc[i] of lane l of warp w is in row
                         16 w + l / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (l % 4) + i % 2: as
                         `mma` has it
        A     (64, 16)   "rows": a tile whose rows run along K; the next 16 are 32 bytes further
                         "columns": one whose rows run along M; they are 16 rows further
                         "registers": 4 a thread; a warp has its 16 rows as `mma` has A
        B     (16, N)    a tile whose rows run along K, or, with b_mn, along N

    Arguments: acc, of `count` products one behind the other; of each product the descriptors of A
    and B.  With a_in "registers" instead A, one local array of 16 numbers a product, and then the
    descriptors of B.  adds: "always", "never", or "asked": then a last argument, 0 or not, says
    whether.

    The PTX of wgmma(16, "rows", False), of whose 64 columns of A the first 16 are shown:

        { .reg .u64 a, b; .reg .pred keep; setp.ne.u32 keep, 0, 0;
          wgmma.fence.sync.aligned;
          add.u64 a, $8, 0;                                  16 columns further: 2, 4, 6
          add.u64 b, $9, 0;
          wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16
            {$0,$1,$2,$3,$4,$5,$6,$7}, a, b, 1, 1, 1, 0, 0;  add, signs of A and B, transposed?
          ...
          wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }

    What the numbers stand for:

        $0 ..            acc, of all products; what is in it before comes in the same registers
        $total ..        the descriptors, of A and B in turn, or of B alone
        then             A, if it is in registers: 16 of each product, 4 of each 16 along K
        the last         whether to add, if that is asked"""
    sums_each = N // 2
    total = sums_each * count
    given = a_in == "registers"
    along_k, along_mn = 32 // 16, 16 * 128 // 16         # 16 further along K, in units of 16 bytes
    a_step = along_mn if a_in == "columns" else along_k
    b_step = along_mn if b_mn else along_k

    def registers(first, n):
        return "{" + ",".join(f"${first + j}" for j in range(n)) + "}"

    def text_of(operands):
        """The PTX; `operands` follow acc."""
        keep = f"${total + operands - 1}" if adds == "asked" else "0"
        text = (f"{{ .reg .u64 a, b; .reg .pred keep; setp.ne.u32 keep, {keep}, 0; "
                f"wgmma.fence.sync.aligned; ")
        for i in range(count):
            sums = registers(sums_each * i, sums_each)
            for k in range(4):
                if given:
                    b = total + i
                    a = registers(total + count + 16 * i + 4 * k, 4)
                    a_transposed = ""        # there is no such field
                else:
                    b = total + 2 * i + 1
                    text += f"add.u64 a, ${b - 1}, {a_step * k}; "
                    a = "a"
                    a_transposed = f", {int(a_in == 'columns')}"
                add = "1" if adds == "always" or k else "keep"
                text += (f"add.u64 b, ${b}, {b_step * k}; wgmma.mma_async.sync.aligned."
                         f"m64n{N}k16.f32.bf16.bf16 {sums}, {a}, b, "
                         f"{add}, 1, 1{a_transposed}, {int(b_mn)}; ")
        return text + "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }"

    def codegen(context, builder, sig, args):
        sums = elements(context, builder, sig.args, args, 0, total)
        values = cgutils.unpack_tuple(builder, args[1])
        if given:
            a = elements(context, builder, sig.args[1], values, 0, 16 * count)
            values = [*values[1:], *map(builder.load, a)]
        old = [] if adds == "never" else [builder.load(p) for p in sums]
        kinds = ["l" if v.type == ir.IntType(64) else "r" for v in values]
        constraints = ["=f"] * total + kinds + [str(i) for i in range(len(old))] + ["~{memory}"]
        asm_into(builder, sums, text_of(len(values)), ",".join(constraints), [*values, *old])
        return context.get_dummy_value()

    @intrinsic
    def product(typing, acc, *operands):     # a tuple of them comes to codegen
        kinds = (operands[0], *[u64] * count) if given else [u64] * (2 * count)
        if adds == "asked":
            kinds = [*kinds, u32]
        return types.void(acc, types.BaseTuple.from_types(kinds)), codegen
    return product

# Where the sums of a product stand in its 64 rows, as the table above has them: acc[i] of a thread
# is in row first_row() + 8 which_row(i), column first_column() + column_of(i).
@inlined
def first_row():
    return cuda.threadIdx.x // 32 * 16 + cuda.threadIdx.x % 32 // 4

@inlined
def first_column():
    return cuda.threadIdx.x % 4 * 2

@inlined
def which_row(i):
    return i // 2 % 2

@inlined
def column_of(i):
    return i // 4 * 8 + i % 2

# Hopper's way in one kernel, as short as it goes: the copy engine fetches two tiles, a barrier
# counts their bytes, wgmma multiplies them.  Nothing is copied while it multiplies; the kernel of
# matmul.py adds a ring of buffers, a warpgroup that only fetches, and tiles of 128 x 256.
ONE_TILE_SMEM = 2 * int(COLUMN_BYTES) + ALIGNMENT
multiply_tiles = wgmma(64, "rows", False)

@cuda_kernel
def one_tile_kernel(out, map_a, map_b, K):
    """out = A B^T, a tile of 64 x 64 a block.     grid (N / 64, M / 64), 128 threads
    out (M, N) bfloat16; the tensor maps of A (M, K) and B (N, K), in boxes of 64 rows"""
    a_tile = dynamic_smem()
    b_tile = a_tile + COLUMN_BYTES
    barrier = shared_address(cuda.shared.array(1, u64))
    m0, n0 = TILE_ROWS * cuda.blockIdx.y, TILE_ROWS * cuda.blockIdx.x
    acc = filled(32, f32(0))
    if leads_warpgroup():
        map_fence(global_address(map_a))
        map_fence(global_address(map_b))
        mbarrier_init(barrier, u32(1))       # one thread arrives in each phase: this one
        mbarrier_fence()
    cuda.syncthreads()                       # the barrier exists
    for n in range((K + TILE_ROWS - 1) // TILE_ROWS):
        if leads_warpgroup():                # one thread asks for both tiles
            mbarrier_expect(barrier, u32(2) * COLUMN_BYTES)
            tma_load(a_tile, global_address(map_a), u32(TILE_ROWS * n), u32(m0), barrier)
            tma_load(b_tile, global_address(map_b), u32(TILE_ROWS * n), u32(n0), barrier)
        mbarrier_wait(barrier, u32(n % 2))   # phase n: they are there, zeros beyond the edges
        multiply_tiles(acc, descriptor(a_tile), descriptor(b_tile))
        cuda.syncthreads()                   # nobody reads them any more: the next may come
    for i in range(32):
        row = m0 + first_row() + 8 * which_row(i)
        column = n0 + first_column() + column_of(i)
        if row < out.shape[0] and column < out.shape[1]:
            out[row, column] = stored(out, acc[i])

def one_tile_matmul(out, a, b):
    """out (M, N) = a b^T     a (M, K), b (N, K), whose rows are whole chunks; only on Hopper"""
    M, N = out.shape
    launch(one_tile_kernel, out, map_of(a, TILE_ROWS), map_of(b, TILE_ROWS), a.shape[1],
           grid=(cdiv(N, TILE_ROWS), cdiv(M, TILE_ROWS)), block=128, smem=ONE_TILE_SMEM)
