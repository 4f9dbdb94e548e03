"""The decorator of kernels, their cache on disk, launches, and CUDA graphs.

    @cuda_kernel                            makes a kernel that is cached on disk
    launch(kernel, *args, grid, block)      queues it on the stream
    graph = Graph(); graph(function)        records all launches of function(), and replays them

This module uses private parts of numba-cuda 0.30:

    caching.IndexDataCacheFile              survives damaged files, and prints a note
    kernel._cache._cache_file, ._py_func    cuda_kernel, with_cache_key
    compiled._codelibrary                   allow_shared, need_resident
    dispatcher.LaunchConfig                 overlapping
"""
import contextlib
import functools
import gc
import math
import multiprocessing
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
from nanoeuler_parts.gpu.place import PLACE
from nanoeuler_parts.machine.kernels import save_compiled

# ---- kernels, and their cache on disk
bpe.survive_damage(caching.IndexDataCacheFile)

@functools.cache
def note_compiling():
    """Prints, once per command, that kernels are being compiled.  The processes of self-tests and
    all ranks but the first compile silently."""
    if PLACE.rank == 0 and multiprocessing.parent_process() is None:
        print("note: compiling GPU kernels, once; this takes up to a minute", file=sys.stderr,
              flush=True)

def save_and_note(self, key, data):
    """Saves a compiled kernel to the cache.  Its compilation took about a second, and others will
    probably follow, so this prints the note."""
    note_compiling()
    save_compiled(self, key, data)

caching.IndexDataCacheFile.save = save_and_note

PARTS = pathlib.Path(__file__).parent.parent
# A compiled kernel contains the code of the device functions that it calls, from any of these
# files, and the places of fields in tuples of nanoeuler.py.  So an edit of any of them recompiles
# all kernels.
DEVICE_CODE = [str(path) for path in (
    PARTS.parent / "nanoeuler.py", PARTS.parent / "nanoeuler_cuda.py", PARTS / "gpu_lora.py",
    *(path for folder in ("gpu", "ranks", "tensor_cores", "decode")
      for path in sorted((PARTS / folder).glob("*.py"))))]

def cuda_kernel(function=None, **options):
    """The decorator of kernels: cuda.jit with a cache on disk, which an edit of any file in
    DEVICE_CODE invalidates.     options: those of cuda.jit"""
    if function is None:
        return functools.partial(cuda_kernel, **options)
    made = cuda.jit(cache=bpe.CACHE, **options)(function)
    if bpe.CACHE:
        file = made._cache._cache_file
        file._source_stamp = file._source_stamp, bpe.digest(tuple(DEVICE_CODE))
    return made

inlined = cuda.jit(device=True, inline="always")         # decorator of functions that kernels call

def with_cache_key(made, name, args):
    """Files kernels in the cache under the name and the arguments of the function that made them.
    Returns `made`: a kernel or another object, or a tuple of them.

    Numba's key is a hash of everything that a kernel closes over.  The hash of a device function is
    different in every process, so such a kernel would never be found in the cache."""
    for i, member in enumerate(made if isinstance(made, tuple) else [made]):
        if bpe.CACHE and hasattr(member, "py_func"):
            code = SimpleNamespace(co_code=repr((name, args, i)).encode())
            member._cache._py_func = SimpleNamespace(__code__=code, __closure__=None)
    return made

def made_once(make):
    """Decorator of functions that make kernels.  Equal arguments return the same kernels, which are
    also cached on disk.  In a kernel, these arguments are compile-time constants."""
    @functools.cache
    def maker(*args):
        return with_cache_key(make(*args), make.__name__, args)
    return maker

# ---- launches
# Kernel paths of bfloat16 products, from the lowest to the highest: plain Numba, and the two of
# tensor_cores
PATHS = ("portable", "mma", "wgmma")
HOPPER_TILE = 128, 256                       # rows and columns of a product's tiles on path wgmma

class Context:
    """State that all launches share"""
    stream = None                            # the CUDA stream of all work

gpu = Context()

def launch(kernel, *args, grid, block, smem=0, resident=False):
    """Queues kernel(*args) on the stream.
    grid, block: number of blocks, and of threads per block, or tuples along x, y, z
    smem: bytes of dynamic shared memory per block
    resident: blocks wait for each other, so all must be on the GPU at the same time"""
    config = kernel[grid, block, gpu.stream, smem]
    checks = config.pre_launch_callbacks     # numba-cuda reuses config for equal launches
    for wanted, check in (smem > 0, allow_shared), (resident, need_resident):
        if wanted and check_once(check) not in checks:
            checks.append(check_once(check))
    while True:
        try:
            return config(*args)
        except CheckNeeded as needed:        # raised before the launch: launch again
            needed.check()

def gpus_here():
    """Returns the number of GPUs that are visible to this process."""
    ok(driver.cuInit(0))
    return ok(driver.cuDeviceGetCount())

def allow_shared(compiled, config):
    """Raises the kernel's limit of dynamic shared memory for a launch whose blocks have more than
    48 KB, static arrays included.  Never lowers it: launches with more must stay possible."""
    handle = driver.CUkernel(int(compiled._codelibrary.get_cufunc().handle))
    device, names = driver.CUdevice(cuda.get_current_device().id), driver.CUfunction_attribute
    most = names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    arrays, allowed = (ok(driver.cuKernelGetAttribute(name, handle, device))
                       for name in (names.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, most))
    if arrays + config.sharedmem > 48 << 10:
        ok(driver.cuKernelSetAttribute(most, max(config.sharedmem, allowed), handle, device))

def need_resident(compiled, config):
    """Checks that all blocks of a launch fit on the GPU at the same time, and makes the launch
    cooperative.  Blocks that wait for each other would deadlock if some could not start.  A
    cooperative launch starts all blocks together, whatever else runs on the GPU, or fails.  Later
    launches of this kernel are cooperative, too."""
    handle = driver.CUfunction(int(compiled._codelibrary.get_cufunc().handle))
    each = ok(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
        handle, math.prod(config.blockdim), config.sharedmem))
    most = each * cuda.get_current_device().MULTIPROCESSOR_COUNT
    blocks = math.prod(config.griddim)
    need(blocks <= most, f"a product needs {blocks} blocks on the GPU at the same time, and "
         f"{most} fit; use --matmul mma")
    compiled.cooperative = True

def ok(result):
    """Returns the values of a driver call without its error code.  Raises CudaAPIError if the code
    is not zero.  A UserError would be wrong, because a chat continues after it.  Many CUDA errors
    are sticky: all later calls fail, too."""
    error, *values = result
    if int(error):
        raise CudaAPIError(int(error), driver.cuGetErrorString(error)[1].decode())
    return values[0] if values else None

class CheckNeeded(Exception):
    """Raised by a callback of launches, to ask `launch` to call `check` and to launch again.

    numba-cuda forbids CUDA calls in callbacks, so a callback cannot call `check` by itself."""

    def __init__(self, check):
        super().__init__("a kernel that is launched for the first time like this")
        self.check = check

@functools.cache
def check_once(check):
    """Returns a callback of launches, through which `check` is called once per combination of
    kernel, grid and shared memory."""
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
    """In this block, a kernel may start before the previous kernel has ended (programmatic
    dependent launch).  It starts as soon as each block of the previous kernel has called
    `let_next_start`, or has ended.  A kernel must call `wait_for_previous` before it reads results
    of the previous kernel or overwrites its inputs.

    numba-cuda keeps the configuration of a launch for later equal ones.  So a launch overlaps if
    the first equal launch was inside such a block.  A kernel that is launched here must be correct
    with and without overlap."""
    plain = dispatcher.LaunchConfig
    try:
        dispatcher.LaunchConfig = functools.partial(plain, programmatic_stream_serialization=True)
        yield
    finally:
        dispatcher.LaunchConfig = plain

class Graph:
    """A CUDA graph of the launches of a function.  A replayed launch costs 1 us instead of 20.

    The first call runs the function, which compiles its kernels.  The second call records it, and
    this and later calls replay the graph.  All values that change between calls must be in device
    memory, since a graph stores the values of scalar arguments.

    Lifetime: a graph holds addresses, not arrays.  The owner of the graph must keep the arrays
    alive, and drop the graph before them.  `Model.prepare` drops its graphs before it frees
    activations, and a decoder is freed as a whole.  The graph does not keep the function.
    Otherwise function, model and graph would form a reference cycle, and gigabytes would wait for
    the garbage collector."""
    enabled = True

    def __init__(self):
        self.kernels_loaded = False
        self.graph = self.recorded = None

    def __call__(self, function):
        if not self.kernels_loaded or not Graph.enabled:
            function()
            self.kernels_loaded = True       # only if it did not raise
            return
        if self.graph is None:
            self.handle = driver.CUstream(int(gpu.stream.handle))
            self.record(function, self.handle)
        ok(driver.cuGraphLaunch(self.graph, self.handle))

    def record(self, function, handle):
        """Records the launches of function().  While a stream is recorded, CUDA forbids to free
        memory and to destroy graphs.  So Numba's frees are deferred, and the garbage collector is
        off."""
        self.destroy()                       # what an earlier recording left that did not end well
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        collecting = gc.isenabled()
        gc.disable()
        try:
            ok(driver.cuStreamBeginCapture(handle, mode))
            try:
                with cuda.defer_cleanup():
                    function()
            finally:
                # also what was recorded before an exception, so that `__del__` destroys it
                error, self.recorded = driver.cuStreamEndCapture(handle)
        finally:
            if collecting:
                gc.enable()
        ok((error,))
        self.graph = ok(driver.cuGraphInstantiate(self.recorded, 0))

    def destroy(self):
        """Frees the graph and its executable form, in so far as they exist."""
        if self.graph is not None:
            driver.cuGraphExecDestroy(self.graph)
        if self.recorded:
            driver.cuGraphDestroy(self.recorded)
        self.graph = self.recorded = None

    def __del__(self):
        # at the end of the process, the driver has already freed all graphs
        if not sys.is_finalizing():
            self.destroy()
