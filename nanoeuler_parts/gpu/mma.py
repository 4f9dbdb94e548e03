"""mma.sync, the instruction of tensor cores: a warp multiplies two small matrices of bfloat16."""
from numba import cuda, types
from numba.cuda.extending import intrinsic

from nanoeuler_parts.gpu.launches import inlined
from nanoeuler_parts.gpu.numbers import asm_into, elements

# The operands and the sums of `mma` are fragments: the 32 lanes of a warp together hold a small
# matrix, as pairs of bfloat16 or as float32 sums.
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

# Four warps multiply A (64, 16) by B (16, N) as follows: warp w has rows 16 w to 16 w + 15, and
# acc[4 j:4 j + 4] are its sums of columns 8 j to 8 j + 7.  By the table above, acc[i] is then in
# row first_row() + 8 * which_row(i), column first_column() + column_of(i).  A thread has two rows.
@inlined
def first_row():
    """Returns the first of the thread's two rows; the second is 8 rows below."""
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
