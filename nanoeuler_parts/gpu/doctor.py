"""What a machine has of what the GPU program needs.

The program imports this module before numba-cuda, so it uses the standard library alone.
"""
import importlib.metadata
import os
import re
import subprocess
import sys

# What starts this program and the other one, as the user typed it: pip's commands, or the files
INSTALLED = os.path.basename(sys.argv[0]).removesuffix(".exe") == "nanoeuler-cuda"
HERE, ON_CPU = (("nanoeuler-cuda", "nanoeuler") if INSTALLED else
                ("python nanoeuler_cuda.py", "python nanoeuler.py"))

PACKAGES = ("numpy", "numba", "llvmlite", "numba-cuda", "cuda-core", "cuda-bindings",
            "nvidia-nvvm", "nvidia-nvjitlink", "nccl4py")

def report(problem, more=()):
    """Prints the packages and the driver that are here, `more` rows, and the problem, if there is
    one.  Returns the exit code of `doctor`.  Not even numba need be there."""
    here = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    rows = [(name, here.get(name, "not installed")) for name in PACKAGES]
    try:
        smi = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,memory.total",
                              "--format=csv,noheader"], capture_output=True, text=True, timeout=60)
        said = smi.stdout.strip() or smi.stderr.strip() or "no answer"
        rows.append(("nvidia-smi", "; ".join(said.splitlines())))
    except (OSError, subprocess.SubprocessError):
        rows.append(("nvidia-smi", "not found: is there an NVIDIA driver?"))
    print(f"what {HERE.removeprefix('python ')} finds here")
    for name, found in (*rows, *more):
        print(f"  {name:<16} {found}")
    print(f"\nbroken: {problem}" if problem else "\nall is well: the GPU can be used")
    return 2 if problem else 0

PIP = 'pip install "numba-cuda[cu13]>=0.30,<0.31" "numpy>=2.1,<2.5"'
NCCL = "pip install 'nccl4py>=0.6,<0.7' nvidia-nccl-cu13"

def nccl_found():
    try:
        import nccl.core as nccl
        return str(nccl.get_version().libnccl.version)
    except Exception as e:                   # of many kinds: see nccl_errors
        return f"no: {e}; several GPUs need it: {NCCL}"

def links_found():
    """How the GPUs of this machine reach each other, in nvidia-smi's words: NV18 are 18 NVLinks,
    PIX, PXB, PHB, NODE and SYS longer and longer ways over PCIe."""
    try:
        topology = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True,
                                  timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    rows = [line.split() for line in re.sub("\x1b\\[[0-9;]*m", "", topology).splitlines()]
    rows = [words for words in rows if words and re.fullmatch(r"GPU\d+", words[0])]
    rows = [words for words in rows if "X" in words]     # not the line above them
    found = {}
    for i, words in enumerate(rows):
        for j in range(i):
            found.setdefault(words[1 + j], []).append(f"{j}-{i}")
    return "; ".join(f"{kind} {' '.join(pairs)}" for kind, pairs in found.items())
