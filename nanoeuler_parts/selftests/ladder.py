"""The ladder of matrix products: runs each rung, checks its result, and prints how fast it is."""
import functools
import statistics
import sys
from typing import NamedTuple

import numpy as np
from numba import cuda

from bpe import need
from nanoeuler_cuda import (
    DTYPES, has, make_ops, matmul, naive_matmul, NAMES, new, tensor_core_matmul, tensor_cores,
    to_device, to_host,
)
from nanoeuler_parts.gpu.launches import gpu
from nanoeuler_parts.machine.numbers import from_bf16, to_bf16
from nanoeuler_parts.selftests.bounds import errors, fault

BATCHES, BATCH_SECONDS = 5, 0.02             # a time is the median of these batches of launches
ROWS_COMPARED = 64                           # rows that the CPU computes, spread over all

class Rung(NamedTuple):
    """A kernel of the ladder"""
    kernel: str                              # where it is defined
    capability: tuple                        # the compute capability that it needs
    exactly: bool                            # whether newer GPUs do not support it
    make: object                             # function: returns matmul(out, x, w)

def one_tile_wgmma():
    from nanoeuler_parts.tensor_cores.one_tile import one_tile_matmul
    return functools.partial(one_tile_matmul, make_ops("wgmma").map_of)

RUNGS = {
    "naive": Rung("nanoeuler_cuda.py: naive_matmul_kernel", (0, 0), False, lambda: naive_matmul),
    "tiled": Rung("nanoeuler_cuda.py: matmul_kernel", (0, 0), False, lambda: matmul),
    "one-tile-mma": Rung("nanoeuler_cuda.py: tensor_core_kernel", (8, 0), False,
                         lambda: tensor_core_matmul),
    "one-tile-wgmma": Rung("tensor_cores/one_tile.py: one_tile_kernel", (9, 0), True,
                           one_tile_wgmma),
    "mma": Rung("tensor_cores/matmul_mma.py: mma_kernel", (8, 0), False,
                lambda: make_ops("mma").matmul),
    "wgmma": Rung("tensor_cores/matmul_wgmma.py: wgmma_kernel", (9, 0), True,
                  lambda: make_ops("wgmma").matmul),
}

def reason_against(rung):
    """Returns why this GPU cannot run a rung, or "" if it can."""
    capability = cuda.get_current_device().compute_capability
    if "tensor_cores/" in rung.kernel and not tensor_cores():
        return "nanoeuler_parts/tensor_cores is missing"
    if capability < rung.capability or rung.exactly and capability != rung.capability:
        return (f"needs compute capability {'.'.join(map(str, rung.capability))}"
                f"{'' if rung.exactly else ' or newer'}")
    return ""

def ladder(rung="", size=4096):
    """Multiplies two matrices (size, size) by each rung, or by one.  Prints a line for each: how
    many operations per second, in TFLOP/s, what share that is of cuBLAS's, if PyTorch is
    installed, and the errors() of its result.  Returns the exit code.

    A product of (M, K) and (K, N) has 2 M N K operations: one multiplication and one addition for
    each m, n and k."""
    need(not rung or rung in RUNGS, f"{rung} is no rung; expected one of {', '.join(RUNGS)}")
    need(size > 0 and size % 8 == 0,
         f"--size is {size}, expected a multiple of 8 above 0: tensor cores read 8 numbers at once")
    dtype = "bf16" if has("bf16") else "f32"
    rng = np.random.default_rng(1)
    x, w = (rng.standard_normal((size, size), np.float32) for _ in range(2))
    if dtype == "bf16":
        x, w = to_bf16(x), to_bf16(w)
    on_device, out = (to_device(x), to_device(w)), new((size, size), x.dtype)
    rows = np.unique(np.linspace(0, size - 1, ROWS_COMPARED).astype(int))
    expected = from_bf16(x[rows]).astype(np.float64) @ from_bf16(w).T.astype(np.float64)
    peer, of_peer = cublas(x, w) if dtype == "bf16" else ("", None)
    print(f"out = x w^T, all ({size}, {size}), in {NAMES[DTYPES[dtype]]}, on "
          f"{cuda.get_current_device().name}\n\n{'rung':<16}{'kernel':<47}{'TFLOP/s':>8}"
          f"{'of cuBLAS':>11}{'errors against the CPU':>27}")
    failed = []
    for name, of_rung in RUNGS.items():
        if rung not in ("", name):
            continue
        if reason := reason_against(of_rung):
            print(f"{name:<16}{of_rung.kernel:<47}{reason}")
            continue
        multiply = of_rung.make()
        out.copy_to_device(np.zeros_like(x), stream=gpu.stream)      # no result of another rung
        seconds = seconds_of(functools.partial(multiply, out, *on_device))
        found = from_bf16(to_host(out)[rows])
        line = fault("matmul", dtype, found, expected)
        share = f"{of_peer / seconds:.1%}" if of_peer else ""
        print(f"{name:<16}{of_rung.kernel:<47}{2e-12 * size ** 3 / seconds:8.1f}{share:>11}"
              "{:>13.1e}{:8.1e}".format(*errors(found, expected))
              + ("   FAILED" if line else "   ok"), flush=True)
        if line:
            print(f"    {line}")
            failed.append(name)
    if of_peer:
        print(f"{'cuBLAS':<16}{peer:<47}{2e-12 * size ** 3 / of_peer:8.1f}")
    else:
        print("cuBLAS is not compared: it needs PyTorch with CUDA, and a GPU with bfloat16")
    print(f">>> {len(failed)} FAILED: {', '.join(failed)}" if failed else ">>> ladder OK")
    return 1 if failed else 0

def seconds_of(call):
    """Returns the device's time of one call, which queues kernels on the stream: the median of
    BATCHES batches.  The first calls compile the kernel and warm the device up."""
    def batch(calls):
        begin, end = cuda.event(), cuda.event()
        begin.record(gpu.stream)
        for _ in range(calls):
            call()
        end.record(gpu.stream)
        end.synchronize()
        return begin.elapsed_time(end) / 1000 / calls
    batch(1)
    calls = max(1, round(BATCH_SECONDS / batch(2)))
    return statistics.median(batch(calls) for _ in range(BATCHES))

def cublas(x, w):
    """Returns (PyTorch's version, the time of the same product by cuBLAS, which PyTorch calls), or
    ("", None) if PyTorch cannot use this GPU.     x, w: bfloat16, as uint16"""
    try:
        import torch
    except ImportError:
        return "", None
    if not torch.cuda.is_available():
        print("note: this PyTorch cannot use the GPU", file=sys.stderr)
        return "", None
    x, w = (torch.from_numpy(y.view(np.int16)).cuda().view(torch.bfloat16) for y in (x, w))
    out = torch.empty(len(x), len(w), dtype=torch.bfloat16, device="cuda")

    def batch(calls):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            torch.mm(x, w.T, out=out)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000 / calls
    batch(3)
    calls = max(1, round(BATCH_SECONDS / batch(2)))
    return f"PyTorch {torch.__version__}", statistics.median(batch(calls) for _ in range(BATCHES))
