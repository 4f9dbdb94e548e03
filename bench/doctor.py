"""What this machine has for the GPU, and what it lacks: python nanoeuler_cuda.py doctor."""
import importlib.metadata
import os
import subprocess

import nanoeuler as ne

PACKAGES = ("numpy", "numba", "llvmlite", "numba-cuda", "cuda-core", "cuda-bindings",
            "nvidia-nvvm", "nvidia-nvjitlink")


def doctor(problem=None):
    """Prints it; returns the exit code.  `problem` is why nanoeuler_cuda cannot be imported."""
    here = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    rows = [(name, here.get(name, "not installed")) for name in PACKAGES]
    try:
        smi = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,memory.total",
                              "--format=csv,noheader"], capture_output=True, text=True, timeout=60)
        said = smi.stdout.strip() or smi.stderr.strip() or "no answer"
        rows.append(("nvidia-smi", "; ".join(said.splitlines())))
    except (OSError, subprocess.SubprocessError):
        rows.append(("nvidia-smi", "not found: is there an NVIDIA driver?"))
    if not problem:
        import nanoeuler_cuda as nc
        rows.append(("CUDA target", f"numba-cuda, {os.path.dirname(nc.cuda.__file__)}"))
        problem = nc.gpu_problem()
    if not problem:
        free, total = nc.cuda.current_context().get_memory_info()
        gpu = nc.cuda.get_current_device()   # the first, or what CUDA_VISIBLE_DEVICES says
        rows += [("uses", "{}, sm_{}{}".format(gpu.name, *gpu.compute_capability)),
                 ("matmul, attention", nc.rung()),
                 ("memory", f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f}")]
    ne.print_table("what nanoeuler_cuda.py finds here", rows)
    print(f"broken: {problem}" if problem else "all is well: the GPU can be used")
    return 2 if problem else 0
