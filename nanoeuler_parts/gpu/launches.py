"""Launching kernels: the decorator that makes them, their place on disk, launches and graphs.

Private parts of numba-cuda 0.30 that are changed or read here: IndexDataCacheFile, a kernel's
_cache._py_func and _cache._cache_file (filed, cuda_kernel) and _codelibrary (allow_shared,
need_resident), and the class LaunchConfig (overlapping).
"""
import contextlib
import functools
import gc
import math
import pathlib
import sys
from types import SimpleNamespace

from cuda.bindings import driver
from numba import cuda
from numba.cuda import dispatcher
from numba.cuda.core import caching
from numba.cuda.cudadrv.driver import CudaAPIError

import bpe
from bpe import need
from nanoeuler_parts.machine.kernels import save_compiled

# ---- kernels, and their place on disk
bpe.survive_damage(caching.IndexDataCacheFile)

@functools.cache
def note_compiling():
    print("note: compiling GPU kernels, once; this takes up to a minute", file=sys.stderr,
          flush=True)

def save_and_note(self, key, data):
    """Saves a kernel.  The first one that the disk lacked has just been compiled, in about a
    second, and others will follow."""
    note_compiling()
    save_compiled(self, key, data)

caching.IndexDataCacheFile.save = save_and_note

PARTS = pathlib.Path(__file__).parent.parent
# A kernel contains the code of the functions that it calls, wherever these are: it is compiled
# again after an edit of any of these files
DEVICE_CODE = [str(path) for path in (
    PARTS.parent / "nanoeuler_cuda.py", *sorted(PARTS.glob("gpu/*.py")),
    *sorted(PARTS.glob("ranks/*.py")), *sorted(PARTS.glob("tensor_cores/*.py")))]

def cuda_kernel(function=None, **options):
    """The decorator of kernels: cuda.jit with a place on disk.     options: of cuda.jit"""
    if function is None:
        return functools.partial(cuda_kernel, **options)
    made = cuda.jit(cache=bpe.CACHE, **options)(function)
    if bpe.CACHE:
        file = made._cache._cache_file
        file._source_stamp = file._source_stamp, bpe.digest(tuple(DEVICE_CODE))
    return made

inlined = cuda.jit(device=True, inline="always")         # a function that kernels call

def with_cache_key(made, name, args):
    """What a maker of this name made of these arguments, one or a tuple, of which kernels are kept
    on disk under just these.  Numba would file a kernel under a hash of all it closes over, and a
    device function hashes differently in every process: it would never be found."""
    for i, member in enumerate(made if isinstance(made, tuple) else [made]):
        if bpe.CACHE and hasattr(member, "py_func"):
            code = SimpleNamespace(co_code=repr((name, args, i)).encode())
            member._cache._py_func = SimpleNamespace(__code__=code, __closure__=None)
    return made

def made_once(make):
    """Of a function that makes kernels: made once for equal arguments, which a kernel knows as
    constants, and kept on disk."""
    @functools.cache
    def maker(*args):
        return with_cache_key(make(*args), make.__name__, args)
    return maker

# ---- launches
# Ways to multiply bfloat16, each above the last: plain Numba, and those of tensor_cores
PATHS = ("portable", "mma", "wgmma")

class Context:
    """What launches have in common"""
    stream = None                            # all work is queued here, in order
    highest = "wgmma"                        # of PATHS that may be used just now: see `at_most`

    def __init__(self):
        self.tensor_maps = {}                # those of calls outside of `at_most`: see `map_of`

gpu = Context()

def launch(kernel, *args, grid, block, smem=0, resident=False):
    """Queues kernel(*args).  grid, block: numbers of blocks and of their threads, or tuples of them
    along x, y, z; smem: bytes of dynamic shared memory a block; resident: the blocks wait for each
    other, so all must be on the GPU at once."""
    config = kernel[grid, block, gpu.stream, smem]
    checks = config.pre_launch_callbacks     # kept by numba-cuda, as the config of equal launches
    for wanted, check in (smem > 0, allow_shared), (resident, need_resident):
        if wanted and check_once(check) not in checks:
            checks.append(check_once(check))
    while True:
        try:
            return config(*args)
        except CheckNeeded as first:         # nothing was launched yet
            first.check()

def gpus_here():
    """How many this process may see"""
    ok(driver.cuInit(0))
    return ok(driver.cuDeviceGetCount())

def allow_shared(compiled, config):
    """Before a launch whose blocks have more than 48 KB of shared memory, that of their arrays and
    what the launch asks for: the driver must allow it, and what it allowed before stays allowed."""
    handle = driver.CUkernel(int(compiled._codelibrary.get_cufunc().handle))
    device, names = driver.CUdevice(cuda.get_current_device().id), driver.CUfunction_attribute
    most = names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    arrays, allowed = (ok(driver.cuKernelGetAttribute(name, handle, device))
                       for name in (names.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, most))
    if arrays + config.sharedmem > 48 << 10:
        ok(driver.cuKernelSetAttribute(most, max(config.sharedmem, allowed), handle, device))

def need_resident(compiled, config):
    """Before a launch whose blocks take one piece after another and wait for each other: if not all
    were on the GPU at once, those that are there would wait for ever.  A cooperative launch starts
    all of them together, whatever else runs on the GPU, or fails."""
    handle = driver.CUfunction(int(compiled._codelibrary.get_cufunc().handle))
    each = ok(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
        handle, math.prod(config.blockdim), config.sharedmem))
    most = each * cuda.get_current_device().MULTIPROCESSOR_COUNT
    blocks = math.prod(config.griddim)
    need(blocks <= most, f"a product wants {blocks} blocks on the GPU at once, which takes {most}; "
         f"use --matmul mma")
    compiled.cooperative = True

def ok(result):
    """The values of a driver call, without its error code, which must be zero.  Many an error
    sticks, every later call has it, too: no UserError, after which a chat would go on."""
    error, *values = result
    if int(error):
        raise CudaAPIError(int(error), driver.cuGetErrorString(error)[1].decode())
    return values[0] if values else None

class CheckNeeded(Exception):
    """What a callback of launches says, which may ask the driver nothing by itself: whoever wants
    the launch calls `check` and begins anew."""

    def __init__(self, check):
        super().__init__("a kernel that is launched for the first time like this")
        self.check = check

@functools.cache
def check_once(check):
    """A callback of launches by which `check` is called once for each kernel, grid and shared
    memory."""
    done = set()

    def callback(compiled, config):
        key = compiled, config.griddim, config.sharedmem

        def checked():
            check(compiled, config)
            done.add(key)
        if key not in done:
            raise CheckNeeded(checked)
    return callback

# ---- graphs
@contextlib.contextmanager
def overlapping():
    """Kernels that are launched or recorded meanwhile may start before the one in front of them has
    ended (programmatic dependent launch): as soon as each of its blocks has said `let_next_start`,
    or is done.  Whoever reads what it wrote, or writes what it reads, calls `wait_for_previous`
    first."""
    plain = dispatcher.LaunchConfig
    try:
        dispatcher.LaunchConfig = functools.partial(plain, programmatic_stream_serialization=True)
        yield
    finally:
        dispatcher.LaunchConfig = plain

class Graph:
    """The launches of a function, recorded once: replayed, a launch costs 1 us, and not 20.

    The first call runs it as it is, which compiles its kernels; the second records it.  All that
    changes between calls must lie in device memory: a graph remembers the values of scalars.

    Lifetime: a recorded graph holds addresses, not arrays.  It does not keep the function, which
    would keep its model, and that the graph: a circle that frees gigabytes only when Python looks
    for garbage.  So whoever has the graph keeps the arrays, and drops it before them: `Model` in
    `prepare`, before it frees its activations, a decoder by dying as a whole."""
    enabled = True

    def __init__(self):
        self.kernels_loaded = False
        self.graph = None

    def __call__(self, function):
        if not self.kernels_loaded or not Graph.enabled:
            function()
            self.kernels_loaded = True       # not if it raised
            return
        if self.graph is None:
            self.handle = driver.CUstream(int(gpu.stream.handle))
            self.record(function, self.handle)
        ok(driver.cuGraphLaunch(self.graph, self.handle))

    def record(self, function, handle):
        """Meanwhile neither memory may be freed nor the graph of a dead model be destroyed."""
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        collecting = gc.isenabled()
        gc.disable()
        try:
            ok(driver.cuStreamBeginCapture(handle, mode))
            with cuda.defer_cleanup():
                function()
        finally:
            recorded = driver.cuStreamEndCapture(handle)
            if collecting:
                gc.enable()
        self.recorded = ok(recorded)
        self.graph = ok(driver.cuGraphInstantiate(self.recorded, 0))

    def __del__(self):
        # at the end of the process, the driver has freed all of it already
        if self.graph is not None and not sys.is_finalizing():
            driver.cuGraphExecDestroy(self.graph)
            driver.cuGraphDestroy(self.recorded)

@contextlib.contextmanager
def at_most(top, maps=None):
    """Meanwhile no kernel path above this one is used.  `maps` keeps the tensor maps that are made:
    kernels and recorded graphs read them as long as they run; None: they go with this block."""
    before = gpu.highest, gpu.tensor_maps
    gpu.highest, gpu.tensor_maps = top, {} if maps is None else maps
    try:
        yield
    finally:
        gpu.highest, gpu.tensor_maps = before
