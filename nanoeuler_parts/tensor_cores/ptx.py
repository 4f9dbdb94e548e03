"""GPU instructions that Numba does not offer, as inline PTX: barriers, asynchronous copies, and
Hopper's copy engine (TMA).
"""
from types import ModuleType

import numpy as np
from cuda.bindings import driver
from llvmlite import ir
from numba import cuda, types
from numba.core import cgutils
from numba.cuda.extending import intrinsic

from nanoeuler_cuda import to_device
from nanoeuler_parts.gpu.launches import inlined, ok
from nanoeuler_parts.gpu.numbers import asm, asm_into, elements, f32, f64, memory, u32, u64

# NVIDIA's manual "PTX ISA" describes each instruction below under its name.  Addresses of device
# memory have 64 bits, addresses of shared memory 32.
#
# Numba takes a Python literal for an int64, and the result of u32 + int64 is an int64.  Kernels
# therefore write u32(..) around literals, and constants have NumPy types.
def ptx(text, *operands, result=types.void):
    """Returns a device function that executes the PTX instruction `text`.

    text        $0 is the result, and $1, $2, .. are the operands; without a result, $0 is the first
                operand
    operands    their types
    result      its type.  An instruction without a result counts as one that reads and writes any
                memory: the compiler moves no memory access across it."""
    letters = {u32: "r", u64: "l", f32: "f", f64: "d"}
    constraints = [letters[t] for t in operands]
    if result == types.void:
        constraints = [*constraints, "~{memory}"]
    else:
        constraints = ["=" + letters[result], *constraints]

    @intrinsic
    def instruction(typing, *args):          # codegen receives the arguments as one tuple
        def codegen(context, builder, sig, args):
            values, void = cgutils.unpack_tuple(builder, args[0]), result == types.void
            result_type = ir.VoidType() if void else context.get_value_type(result)
            out = asm(builder, result_type, text, ",".join(constraints), values)
            return context.get_dummy_value() if void else out
        return result(types.BaseTuple.from_types(operands)), codegen
    return instruction

class DeviceFunctions(ModuleType):
    """A namespace of device functions: with `ops = DeviceFunctions(wait=..)`, a kernel calls
    `ops.wait(..)`.  It is a module because Numba inlines only functions that it finds in modules.
    """

    def __init__(self, **functions):
        super().__init__(type(self).__name__, type(self).__doc__)
        vars(self).update(functions)

# ---- Threads of a one-dimensional block: a warp has 32 lanes, a warpgroup has four warps
@inlined
def thread_id():
    return u32(cuda.threadIdx.x)

@inlined
def lane_id():
    return thread_id() & u32(31)

@inlined
def warp_id():
    return thread_id() >> u32(5)

@inlined
def warpgroup_id():
    return thread_id() >> u32(7)

# The leader is the one thread of a warp, a warpgroup or a block that acts for all of them.
@inlined
def leads_warp():
    return lane_id() == 0

@inlined
def leads_warpgroup():
    return (thread_id() & u32(127)) == 0

@inlined
def leads_block():
    return thread_id() == 0

@inlined
def bit(x, i):
    """Returns bit i of x, 0 or 1."""
    return x >> u32(i) & u32(1)

quotient = ptx("div.u32 $0, $1, $2;", u32, u32, result=u32)      # Numba would divide in 64 bits

# ---- Addresses
@intrinsic
def global_address(typing, array):
    """Returns the address of the array's first element."""
    def codegen(context, builder, sig, args):
        return builder.ptrtoint(memory(context, builder, sig.args, args, 0), ir.IntType(64))
    return u64(array), codegen

def make_load_four(text, address_letter):
    """Returns the device function load(out, j, address): it loads four 32-bit words into out[j:j+4]
    in one access.

    text              the PTX instruction up to its vector suffix
    address_letter    the constraint of its address: "r", 32 bits, or "l", 64 bits"""
    @intrinsic
    def load(typing, out, j, address):
        def codegen(context, builder, sig, args):
            to = elements(context, builder, sig.args, args, 0, 4, args[1])
            asm_into(builder, to, f"{text}.v4.u32 {{$0, $1, $2, $3}}, [$4];",
                     f"=r,=r,=r,=r,{address_letter}", [args[2]])
            return context.get_dummy_value()
        return types.void(out, types.intp, u32 if address_letter == "r" else u64), codegen
    return load

load_four_shared = make_load_four("ld.shared", "r")
# For data that no kernel writes: it may come from a cache that does not see writes.
load_four = make_load_four("ld.global.nc.L1::no_allocate", "l")

# (generic address): the same place as a 32-bit address of shared memory
to_shared = ptx("{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }", u64, result=u32)

@inlined
def shared_address(array):
    """Returns the address of the first element of an array in shared memory."""
    return to_shared(global_address(array))

ALIGNMENT = 1024                             # bytes: the copy engine's swizzle needs tiles there

@inlined
def dynamic_smem():
    """Returns the address of dynamic shared memory, rounded up to a multiple of ALIGNMENT.  Because
    of the rounding, a launch asks for ALIGNMENT bytes more than its kernel uses."""
    return (shared_address(cuda.shared.array(0, types.uint16)) + u32(ALIGNMENT - 1)) & (
        u32(-ALIGNMENT & 0xFFFFFFFF))

# ---- cp.async: asynchronous copies by threads, from device memory to shared memory
# A thread continues while its copies are under way.  `cp_async_commit` makes a group of all copies
# that the thread has started since its last commit.  Groups complete in order.
# Arguments: (to, from); cp_async_or_zero: (to, from, n) reads n bytes, 16 or 0, and writes zeros
# for the others.
cp_async = ptx("cp.async.cg.shared.global.L2::128B [$0], [$1], 16;", u32, u64)      # 16 bytes
cp_async_or_zero = ptx("cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;", u32, u64, u32)
cp_async_4 = ptx("cp.async.ca.shared.global [$0], [$1], 4;", u32, u64)              # 4 bytes
cp_async_commit = ptx("cp.async.commit_group;")
cp_async_wait_all = ptx("cp.async.wait_all;")
cp_async_wait_one = ptx("cp.async.wait_group 1;")        # waits for all groups but the newest

# ---- Pairs of bfloat16
@intrinsic
def lower_half(typing, pair):
    """Returns the first number of a pair of bfloat16, as float32."""
    def codegen(context, builder, sig, args):
        return builder.bitcast(builder.shl(args[0], args[0].type(16)), ir.FloatType())
    return f32(u32), codegen

@intrinsic
def upper_half(typing, pair):
    """Returns the second number of a pair of bfloat16, as float32."""
    def codegen(context, builder, sig, args):
        return builder.bitcast(builder.and_(args[0], args[0].type(0xFFFF0000)), ir.FloatType())
    return f32(u32), codegen

pack_bf16 = ptx("cvt.rn.bf16x2.f32 $0, $2, $1;", f32, f32, result=u32)   # (first, second): a pair

# ---- Stores from registers.  Arguments: the address, then the numbers
store_pair = ptx("st.global.b32 [$0], $1;", u64, u32)    # a pair of bfloat16
store_two = ptx("st.shared.v2.f32 [$0], {$1, $2};", u32, f32, f32)

# ---- Loads that bypass L1, which may hold older values.  load_relaxed_f64 also reads memory of
# the host
load_relaxed = ptx("ld.relaxed.gpu.global.u32 $0, [$1];", u64, result=u32)
load_relaxed_f64 = ptx("ld.relaxed.sys.global.f64 $0, [$1];", u64, result=f64)

# ---- Semaphores
# A semaphore is a 32-bit number in device memory that says which block's turn it is.
#
#     semaphore_acquire(address, turn)    waits until the semaphore is `turn`.  The thread then sees
#                                         everything that was written before the semaphore was set
#     semaphore_release(address, turn)    sets the semaphore
semaphore_release = ptx("st.release.gpu.global.u32 [$0], $1;", u64, u32)
semaphore_acquire = ptx("{ .reg .pred p; .reg .u32 turn; "
                        "AGAIN: ld.acquire.gpu.global.u32 turn, [$0]; "
                        "setp.ne.u32 p, turn, $1; @p bra AGAIN; }", u64, u32)

# Adds 1 to a counter in device memory, and returns its value before that.
atomic_increment = ptx("atom.global.add.u32 $0, [$1], 1;", u64, result=u32)

@inlined
def semaphore_at(semaphores, i):
    """Returns the address of semaphore i."""
    return global_address(semaphores) + u64(4) * u64(i)

@inlined
def next_turn(turn, turns):
    """Returns the turn after `turn`.  After the last one it is 0 again, as before the first."""
    return turn + u32(1) if turn + u32(1) < u32(turns) else u32(0)

# ==== The rest of this file needs Hopper ====
#
# ---- mbarriers: barriers in shared memory that also count the bytes of asynchronous copies
# A phase of an mbarrier completes when the expected number of threads has arrived and all announced
# bytes have landed.  Then the next phase begins.  Phases are numbered from 0, and the parity of a
# phase is the last bit of its number.
#
#     mbarrier_init(barrier, threads)     sets the number of arrivals per phase; phase 0 begins
#     mbarrier_arrive(barrier)            arrives
#     mbarrier_expect(barrier, bytes)     announces bytes, and arrives
#     mbarrier_wait(barrier, parity)      waits until the phase with this parity has completed
#     mbarrier_fence()                    lets the copy engine see initialized barriers
#
#     running phase                 0     1     2     3
#     mbarrier_wait(barrier, 0)    waits  ok   waits  ok
#     mbarrier_wait(barrier, 1)     ok   waits  ok   waits
MBARRIER_BYTES = np.uint32(8)
mbarrier_init = ptx("mbarrier.init.shared::cta.b64 [$0], $1;", u32, u32)
mbarrier_expect = ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", u32, u32)
mbarrier_arrive = ptx("mbarrier.arrive.shared::cta.b64 _, [$0];", u32)
mbarrier_wait = ptx("{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; "
                    "@p bra DONE; bra AGAIN; DONE: }", u32, u32)
mbarrier_fence = ptx("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;")

# ---- Bulk copies: the copy engine moves a contiguous range of bytes
# (from, bytes): reads from device memory into L2
bulk_prefetch = ptx("cp.async.bulk.prefetch.L2.global [$0], $1;", u64, u32)
# (to, from, bytes, barrier): copies from device memory to shared memory
bulk_copy = ptx("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, "
                "[$3];", u32, u64, u32, u32)

# ---- Programmatic dependent launch: see `overlapping` in nanoeuler_parts/gpu/launches.py
wait_for_previous = ptx("griddepcontrol.wait;")          # until the previous kernel has ended
let_next_start = ptx("griddepcontrol.launch_dependents;")

@inlined
def after_previous():
    """Waits for the previous kernel, then allows the next kernel to start."""
    wait_for_previous()
    let_next_start()

@inlined
def at_once():
    """Does nothing.  Kernels call it in place of the functions above if launches do not overlap."""
    pass

# ---- TMA: the copy engine moves boxes of a matrix
# A tensor map describes the matrix and the size of a box; coordinates (column, row) select the box.
#
#     tma_load(to, map, column, row, barrier)      from device memory to shared memory
#     tma_store(map, column, row, from)            from shared memory to device memory
#     tma_add(map, column, row, from)              the same, but adds to device memory (+=)
#     tma_load_3d, tma_store_3d                    for an array of matrices: (.., row, matrix, ..)
#     tma_commit()                                 makes a group of the stores and additions so far
#     tma_wait_read()                              waits until the engine has read the groups, so
#                                                  that their shared memory may be overwritten
#     tma_wait_written()                           waits until they are in device memory
#     map_fence(map)                               lets the copy engine see a new tensor map
map_fence = ptx("fence.proxy.tensormap::generic.acquire.sys [$0], 128;", u64)
tma_load = ptx("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[$0], [$1, {$2, $3}], [$4];", u32, u64, u32, u32, u32)
tma_store = ptx("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [$0, {$1, $2}], [$3];",
                u64, u32, u32, u32)
tma_add = ptx("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group "
              "[$0, {$1, $2}], [$3];", u64, u32, u32, u32)
tma_load_3d = ptx("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                  "[$0], [$1, {$2, $3, $4}], [$5];", u32, u64, u32, u32, u32, u32)
tma_store_3d = ptx("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group "
                   "[$0, {$1, $2, $3}], [$4];", u64, u32, u32, u32, u32)
tma_commit = ptx("cp.async.bulk.commit_group;")
tma_wait_read = ptx("cp.async.bulk.wait_group.read 0;")
tma_wait_written = ptx("cp.async.bulk.wait_group 0;")

# The copy engine does not see the writes of threads by itself.
fence_async = ptx("fence.proxy.async.shared::cta;")      # before it reads writes of threads
fence_async_global = ptx("fence.proxy.async.global;")    # before it adds to the sums of others

# ---- Warpgroups
warpgroup_barrier = ptx("bar.sync $0, 128;", u32)        # (number): for 128 threads of a block
# One warpgroup of three gives registers to the two others: 40 + 2 * 232 = 3 * 168 per thread.
take_registers = ptx("setmaxnreg.inc.sync.aligned.u32 232;")
give_registers = ptx("setmaxnreg.dec.sync.aligned.u32 40;")

def tensor_map(pointer, rows, columns, stride, box_rows, itemsize=2, n=0, matrix_stride=0):
    """Returns the tensor map of a matrix: 128 bytes in device memory.     cuTensorMapEncodeTiled

    stride      bytes from row to row of the matrix
    box_rows    rows of a box; each has 128 bytes and lies swizzled in shared memory.  Beyond the
                edge of the matrix a box has zeros
    itemsize    2: bfloat16, 4: float32
    n           if not 0, the map is of an array of n matrices, matrix_stride bytes apart.  A box
                is in one of them"""
    d, uint64, uint32 = driver, driver.cuuint64_t, driver.cuuint32_t
    formats = d.CUtensorMapDataType
    sizes, strides, box = [columns, rows], [stride], [128 // itemsize, box_rows]
    if n:
        sizes, strides, box = [*sizes, n], [*strides, matrix_stride], [*box, 1]
    encoded = ok(d.cuTensorMapEncodeTiled(
        formats.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if itemsize == 2 else
        formats.CU_TENSOR_MAP_DATA_TYPE_FLOAT32, len(sizes), pointer,
        [uint64(x) for x in sizes], [uint64(x) for x in strides], [uint32(x) for x in box],
        [uint32(1)] * len(sizes), d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        d.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE))
    return to_device(np.array([int(x) for x in encoded.opaque], np.uint64))

def map_of(x, box_rows, maps):
    """Returns the tensor map of x, a matrix or an array of matrices.

    maps: a dict that keeps the maps made so far.  A map holds an address.  It stays valid when
    memory of the same shape reuses this address"""
    *n, rows, columns = x.shape
    *matrix_stride, stride, _ = x.strides
    key = (int(x.gpu_data.device_pointer), rows, columns, stride, box_rows, x.dtype.itemsize, *n,
           *matrix_stride)
    if key not in maps:
        maps[key] = tensor_map(*key)
    return maps[key]
