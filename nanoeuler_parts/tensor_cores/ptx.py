"""Instructions that a GPU has and Numba has no function for, in PTX: barriers, copies, the copy
engine of Hopper.  The first module of this package to read.
"""
from types import ModuleType

import numpy as np
from cuda.bindings import driver
from llvmlite import ir
from numba import cuda, types
from numba.core import cgutils
from numba.cuda.extending import intrinsic

from nanoeuler_cuda import to_device
from nanoeuler_parts.gpu.launches import gpu, inlined, ok
from nanoeuler_parts.gpu.numbers import asm, elements, f32, f64, memory, u32, u64

# What a GPU can do and Numba has no function for, in PTX: NVIDIA's "PTX ISA" describes each of the
# instructions under its name.  Addresses of device memory have 64 bits, those of shared memory 32.
# A literal of Python is an int64 and makes one of all that meets it: hence u32(..), and constants
# of NumPy's types.
def asm_into(builder, pointers, text, constraints, values):
    """asm with as many results as pointers, of their types, which are stored there."""
    kind = ir.LiteralStructType([p.type.pointee for p in pointers])
    results = asm(builder, kind, text, constraints, values)
    for i, pointer in enumerate(pointers):
        builder.store(builder.extract_value(results, i), pointer)

def ptx(text, *operands, result=types.void):
    """The instruction `text` as a device function: $0 is its result if it has one, its operands
    follow.  Without a result it counts as one that reads and writes any memory: the compiler moves
    no access to memory across it."""
    letters = {u32: "r", u64: "l", f32: "f", f64: "d"}
    constraints = [letters[t] for t in operands]
    if result == types.void:
        constraints = [*constraints, "~{memory}"]
    else:
        constraints = ["=" + letters[result], *constraints]

    @intrinsic
    def instruction(typing, *args):          # one tuple of them comes to codegen
        def codegen(context, builder, sig, args):
            values, void = cgutils.unpack_tuple(builder, args[0]), result == types.void
            kind = ir.VoidType() if void else context.get_value_type(result)
            out = asm(builder, kind, text, ",".join(constraints), values)
            return context.get_dummy_value() if void else out
        return result(types.BaseTuple.from_types(operands)), codegen
    return instruction

class DeviceFunctions(ModuleType):
    """Some under one name: a kernel calls `way.wait(..)`.  A module, since Numba inlines only what
    it finds in modules."""

    def __init__(self, **functions):
        super().__init__(type(self).__name__, type(self).__doc__)
        vars(self).update(functions)

# Threads of a block of one dimension: lanes of a warp of 32, warps of a warpgroup of four
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

# Of some that could do a thing, one does it
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
    """Bit i of x, 0 or 1"""
    return x >> u32(i) & u32(1)

quotient = ptx("div.u32 $0, $1, $2;", u32, u32, result=u32)      # Numba would make it 64 bits

# Addresses
@intrinsic
def global_address(typing, array):
    def codegen(context, builder, sig, args):
        return builder.ptrtoint(memory(context, builder, sig.args, args, 0), ir.IntType(64))
    return u64(array), codegen

def load_four_by(text, space):
    """The device function load(out, j, address): out[j:j+4], of 32 bits, in one access."""
    @intrinsic
    def load(typing, out, j, address):
        def codegen(context, builder, sig, args):
            to = elements(context, builder, sig.args, args, 0, 4, args[1])
            asm_into(builder, to, f"{text}.v4.u32 {{$0, $1, $2, $3}}, [$4];",
                     f"=r,=r,=r,=r,{space}", [args[2]])
            return context.get_dummy_value()
        return types.void(out, types.intp, u32 if space == "r" else u64), codegen
    return load

load_four_shared = load_four_by("ld.shared", "r")
load_four = load_four_by("ld.global.nc.L1::no_allocate", "l")        # what no kernel writes

to_shared = ptx("{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }", u64, result=u32)

@inlined
def shared_address(array):
    return to_shared(global_address(array))

ALIGNMENT = 1024                             # of the tiles below, as the copy engine wants it

@inlined
def dynamic_smem():
    """Where dynamic shared memory begins, from a multiple of ALIGNMENT on.  The kernels ask for so
    many bytes more than they use."""
    return (shared_address(cuda.shared.array(0, types.uint16)) + u32(ALIGNMENT - 1)) & (
        u32(-ALIGNMENT & 0xFFFFFFFF))

# Copies by threads, from device to shared memory: they go on while the thread does.  Those that it
# asked for since the last commit are a group; groups arrive in order.
cp_async = ptx("cp.async.cg.shared.global.L2::128B [$0], [$1], 16;", u32, u64)      # 16 bytes
cp_async_or_zero = ptx("cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;", u32, u64, u32)
cp_async_4 = ptx("cp.async.ca.shared.global [$0], [$1], 4;", u32, u64)
cp_async_commit = ptx("cp.async.commit_group;")
cp_async_wait_all = ptx("cp.async.wait_all;")
cp_async_wait_one = ptx("cp.async.wait_group 1;")        # all groups but the youngest are there

@intrinsic
def lower_half(typing, pair):
    """The first of a pair of bfloat16, as float32"""
    def codegen(context, builder, sig, args):
        return builder.bitcast(builder.shl(args[0], args[0].type(16)), ir.FloatType())
    return f32(u32), codegen

@intrinsic
def upper_half(typing, pair):
    """The second one"""
    def codegen(context, builder, sig, args):
        return builder.bitcast(builder.and_(args[0], args[0].type(0xFFFF0000)), ir.FloatType())
    return f32(u32), codegen

# Registers to memory
pack_bf16 = ptx("cvt.rn.bf16x2.f32 $0, $2, $1;", f32, f32, result=u32)       # low, high
store_pair = ptx("st.global.b32 [$0], $1;", u64, u32)    # two neighbours in bfloat16
store_two = ptx("st.shared.v2.f32 [$0], {$1, $2};", u32, f32, f32)

# Memory to a register, past L1
load_relaxed = ptx("ld.relaxed.gpu.global.u32 $0, [$1];", u64, result=u32)
load_relaxed_f64 = ptx("ld.relaxed.sys.global.f64 $0, [$1];", u64, result=f64)

# A semaphore is a number in device memory that blocks take turns by: who waits for it sees what was
# written before it was set.
semaphore_release = ptx("st.release.gpu.global.u32 [$0], $1;", u64, u32)
semaphore_acquire = ptx("{ .reg .pred p; .reg .u32 turn; "
                        "AGAIN: ld.acquire.gpu.global.u32 turn, [$0]; "
                        "setp.ne.u32 p, turn, $1; @p bra AGAIN; }", u64, u32)

count_up = ptx("atom.global.add.u32 $0, [$1], 1;", u64, result=u32)  # what it was before

@inlined
def semaphore_at(semaphores, i):
    return global_address(semaphores) + u64(4) * u64(i)

@inlined
def turn_after(part, splits):
    """Whose turn it is after that part's; the last one leaves the semaphore as it was, at 0."""
    return part + u32(1) if part + u32(1) < u32(splits) else u32(0)

# The rest is Hopper's.  An mbarrier is eight bytes of shared memory that threads wait for.  A phase
# of it is over when as many threads have arrived as mbarrier_init was told, and all bytes that
# mbarrier_expect, which arrives, too, announced are there.  Phases have parities 0, 1, 0, ..:
# waiting for a parity returns when the running phase has the other one.  The first phase is 0, so
# that waiting for 1 returns at once.
MBARRIER = np.uint32(8)
mbarrier_init = ptx("mbarrier.init.shared::cta.b64 [$0], $1;", u32, u32)
mbarrier_expect = ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", u32, u32)
mbarrier_arrive = ptx("mbarrier.arrive.shared::cta.b64 _, [$0];", u32)
mbarrier_wait = ptx("{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; "
                    "@p bra DONE; bra AGAIN; DONE: }", u32, u32)
mbarrier_fence = ptx("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;")

bulk_prefetch = ptx("cp.async.bulk.prefetch.L2.global [$0], $1;", u64, u32)  # bytes, into L2
bulk_copy = ptx("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, "
                "[$3];", u32, u64, u32, u32)             # so many bytes, by the copy engine

# Programmatic dependent launch: see `overlapping`
wait_for_previous = ptx("griddepcontrol.wait;")
let_next_start = ptx("griddepcontrol.launch_dependents;")

@inlined
def after_previous():
    wait_for_previous()
    let_next_start()

@inlined
def at_once():
    pass

# TMA: the copy engine moves a box of a matrix, given by its tensor map and the box's (column, row)
map_fence = ptx("fence.proxy.tensormap::generic.acquire.sys [$0], 128;", u64)     # see a fresh map
tma_load = ptx("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[$0], [$1, {$2, $3}], [$4];", u32, u64, u32, u32, u32)
tma_store = ptx("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [$0, {$1, $2}], [$3];",
                u64, u32, u32, u32)
tma_add = ptx("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group "
              "[$0, {$1, $2}], [$3];", u64, u32, u32, u32)           # the same, +=
tma_commit = ptx("cp.async.bulk.commit_group;")
tma_stored = ptx("cp.async.bulk.wait_group.read 0;")     # shared memory may be written again
tma_written = ptx("cp.async.bulk.wait_group 0;")         # it is in device memory
fence_async = ptx("fence.proxy.async.shared::cta;")      # before the copy engine reads our writes
fence_async_global = ptx("fence.proxy.async.global;")    # before it adds to what others added

# Warpgroups: a barrier of the 128 threads, and registers that one gives to the others
warpgroup_barrier = ptx("bar.sync $0, 128;", u32)
take_registers = ptx("setmaxnreg.inc.sync.aligned.u32 232;")
give_registers = ptx("setmaxnreg.dec.sync.aligned.u32 40;")

def tensor_map(pointer, rows, columns, stride, box_rows, size=2):
    """128 bytes on the device that tell the copy engine about a matrix of bfloat16 or (size 4)
    float32: boxes of box_rows rows of 128 bytes, swizzled in shared memory, zeros beyond the edge.
    stride in bytes     cuTensorMapEncodeTiled"""
    d, long, short = driver, driver.cuuint64_t, driver.cuuint32_t
    kinds = d.CUtensorMapDataType
    encoded = ok(d.cuTensorMapEncodeTiled(
        kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if size == 2 else
        kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, pointer,
        [long(columns), long(rows)], [long(stride)], [short(128 // size), short(box_rows)],
        [short(1), short(1)], d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        d.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE))
    return to_device(np.array([int(x) for x in encoded.opaque], np.uint64))

def map_of(x, box_rows):
    """The tensor map of a matrix, made once for each user of `at_most`.  It holds an address: where
    other memory comes to lie there later, of the same shape, it is right again."""
    key = (int(x.gpu_data.device_pointer), *x.shape, x.strides[0], box_rows, x.dtype.itemsize)
    if key not in gpu.tensor_maps:
        gpu.tensor_maps[key] = tensor_map(*key)
    return gpu.tensor_maps[key]
