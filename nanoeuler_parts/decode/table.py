"""The table of a step: what its rows are, and the kernels that begin a step.

The host writes the table to pinned memory and uploads it, so that one graph serves all steps of the
same size.  `take`, the first kernel of a step, begins the rows of x.  If tokens are sampled on the
GPU and every text continues, the next step is queued before the host has read the tokens of the
current one.  Then `advance_kernel` makes its table on the GPU, so the GPU does not wait for the
host.
"""
from cuda.bindings import driver
from numba import cuda, types

from nanoeuler_parts.gpu.launches import cuda_kernel, gpu, inlined, made_once, ok
from nanoeuler_parts.gpu.numbers import u32, u64, value
from nanoeuler_parts.tensor_cores.ptx import at_once, global_address, let_next_start, load_relaxed

AT_ONCE = 64                                 # most rows per step
# Fields of the table `rows` (5, AT_ONCE) int32.  The first three have an entry per row.  WANTED
# lists the rows whose logits are requested.  COUNTS holds four numbers of the whole step.  They are
# in the table, because then one upload brings everything that changes from step to step.
TOKEN, SLOT, POSITION, WANTED, COUNTS = range(5)
# Entries of COUNTS.  N_ROWS, N_WANTED: how many entries of the other fields are valid.  FIRST_LINE:
# where the lines of these rows begin in `out`.  RING, 0 or 1: which half of `draws` and `ids`
# belongs to this step.
N_ROWS, N_WANTED, FIRST_LINE, RING = range(4)

@inlined
def table_word(rows, i):
    """Returns entry i of the table, counted over all fields, read from L2: the L1 cache of an SM
    may hold an older table."""
    return types.int32(load_relaxed(global_address(rows) + u64(4) * u64(i)))

@inlined
def table_entry(rows, field, i):
    """Returns rows[field, i], read from L2."""
    return table_word(rows, u32(field * AT_ONCE) + u32(i))

@made_once
def take_kernel(hopper):
    """Makes `take`, the first kernel of a step."""
    start_next = let_next_start if hopper else at_once

    @cuda_kernel
    def take(x, rows, wte):
        """x[r] = wte[token of row r]     one block of 128 threads per row
        x (AT_ONCE, C), rows (5, AT_ONCE), wte: (V, C) bf16, or another matrix of any type"""
        r = cuda.blockIdx.x
        start_next()                         # the next kernel may request its weights
        if r < rows[COUNTS, N_ROWS]:
            for c in range(cuda.threadIdx.x, x.shape[1], 128):
                x[r, c] = value(wte[rows[TOKEN, r], c])
    return take

@cuda_kernel
def advance_kernel(rows, latest):
    """Turns the table of a step into that of the next step, in which each text continues with the
    token that was sampled for it.  latest[r] is the next token of row r, so the first step must
    have requested the logits of all its rows.
    AT_ONCE threads     latest (AT_ONCE,): the sampled tokens"""
    r = cuda.threadIdx.x
    if r < rows[COUNTS, N_ROWS]:
        rows[TOKEN, r] = max(latest[r], 0)
        rows[POSITION, r] += 1
    if r == 0:
        rows[COUNTS, RING] ^= 1

# ---- copies between pinned memory and the device
def upload(x, staged):
    """Queues a copy of pinned memory to the beginning of a device array.  Faster than Numba's
    copy_to_device, which checks both arrays first."""
    ok(driver.cuMemcpyHtoDAsync(int(x.gpu_data.device_pointer), staged.ctypes.data, staged.nbytes,
                                int(gpu.stream.handle)))

def download(staged, x):
    """Queues a copy of the beginning of a device array to pinned memory."""
    ok(driver.cuMemcpyDtoHAsync(staged.ctypes.data, int(x.gpu_data.device_pointer), staged.nbytes,
                                int(gpu.stream.handle)))

def copy_row(x, out, start):
    """Queues a copy of x.shape[1] numbers of `out`, from index `start`, to the first row of x."""
    ok(driver.cuMemcpyDtoDAsync(int(x.gpu_data.device_pointer),
                                int(out.gpu_data.device_pointer) + start * out.dtype.itemsize,
                                x.shape[1] * x.dtype.itemsize, int(gpu.stream.handle)))
