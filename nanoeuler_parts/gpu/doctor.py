"""Finds which of the packages and drivers that the GPU program needs are installed.

The program imports this module before numba-cuda, so at its top level, this module imports only the
standard library.
"""
import ctypes
import importlib.metadata
import os
import re
import subprocess
import sys
import traceback

# The commands that start the GPU program and the CPU program, in the form that the user typed: the
# commands that pip installs, or the files
INSTALLED = os.path.basename(sys.argv[0]).removesuffix(".exe") == "nanoeuler-cuda"
HERE, ON_CPU = (("nanoeuler-cuda", "nanoeuler") if INSTALLED else
                ("python nanoeuler_cuda.py", "python nanoeuler.py"))

PACKAGES = ("numpy", "numba", "llvmlite", "numba-cuda", "cuda-core", "cuda-bindings",
            "nvidia-nvvm", "nvidia-nvjitlink", "nccl4py")

OWN_MODULES = ("bpe", "nanoeuler", "nanoeuler_cuda", "nanoeuler_parts")

def is_ours(error):
    """Returns whether the exception of an import is a fault of this program: its code raised the
    exception, or one of its modules could not be imported.  A missing package, and a UserError, are
    faults of the installation."""
    if type(error).__name__ == "UserError":  # bpe's, which this module cannot import
        return False
    if isinstance(error, ImportError):
        module = error.name or ""
    else:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        module = frame.f_globals.get("__name__", "")
    return module.split(".")[0] in OWN_MODULES

def report(problem, more=()):
    """Prints the versions of the packages and of the driver, and the problem, if there is one.
    Returns the exit code of `doctor`.  Works without numba.
    more: further rows to print, (name, text)"""
    here = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    rows = [(name, here.get(name, "not installed")) for name in PACKAGES]
    try:
        smi = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,memory.total",
                              "--format=csv,noheader"], capture_output=True, text=True, timeout=60)
        output = smi.stdout.strip() or smi.stderr.strip() or "no answer"
        rows.append(("nvidia-smi", "; ".join(output.splitlines())))
    except (OSError, subprocess.SubprocessError):
        rows.append(("nvidia-smi", "not found: is there an NVIDIA driver?"))
    print(f"{HERE.removeprefix('python ')} found on this machine:")
    for name, found in (*rows, *more):
        print(f"  {name:<16} {found}")
    print(f"\nbroken: {problem}" if problem else "\nall is well: the GPU can be used")
    return 2 if problem else 0

PIP = 'pip install "numba-cuda[cu13]>=0.30,<0.31" "numpy>=2.1,<2.5"'
NEEDS_GPU = ("This program needs an NVIDIA GPU and its driver, version 580 or newer; the CPU "
             f"program has the same verbs: {ON_CPU} --help")
DRIVER = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"

def has_driver():
    """Returns whether NVIDIA's driver is installed: whether its library can be loaded."""
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True

def with_remedy(problem):
    """The message for packages that are missing or do not fit.  Without a driver, packages do not
    help, so a missing driver is reported first."""
    if has_driver():
        return f"{problem}; repair it with: {PIP}"
    return (f"no NVIDIA driver was found. {NEEDS_GPU}. With a driver, one more problem remains: "
            f"{problem}; repair it with: {PIP}")
NCCL = "pip install 'nccl4py>=0.6,<0.7' nvidia-nccl-cu13"

def nccl_found():
    """Returns NCCL's version, or why it cannot be used, with the remedy."""
    try:
        import nccl.core as nccl
        return str(nccl.get_version().libnccl.version)
    except Exception as e:                   # NCCL raises many classes: see nccl_errors
        return f"not usable ({e}); several GPUs need it: {NCCL}"

def links_found():
    """Returns how the GPUs of this machine are connected, with nvidia-smi's abbreviations, or "".
    NV18 is 18 NVLinks.  PIX, PXB, PHB, NODE and SYS are paths over PCIe, from short to long."""
    try:
        topology = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True,
                                  timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    rows = [line.split() for line in re.sub("\x1b\\[[0-9;]*m", "", topology).splitlines()]
    rows = [words for words in rows if words and re.fullmatch(r"GPU\d+", words[0])]
    rows = [words for words in rows if "X" in words]     # without the table's header
    found = {}
    for i, words in enumerate(rows):
        for j in range(i):
            found.setdefault(words[1 + j], []).append(f"{j}-{i}")
    return "; ".join(f"{kind} {' '.join(pairs)}" for kind, pairs in found.items())
