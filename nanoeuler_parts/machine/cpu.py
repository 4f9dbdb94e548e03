"""What this CPU has: the width of its vectors, and the sizes of a tile that follow from it."""
import os

import llvmlite.binding as llvm
import numba
import numpy as np

from bpe import need

def cpu_features(asked):
    """{name: whether it has it} of the CPU that Numba compiles for: this one, or another that
    NUMBA_CPU_NAME=generic or NUMBA_CPU_FEATURES, as +avx2,-fma, ask for."""
    if asked is None:
        return llvm.get_host_cpu_features()
    return {name[1:]: name[0] == "+" for name in asked.split(",") if name}

_CPU = cpu_features(numba.config.CPU_FEATURES)
ARCHITECTURE = llvm.get_process_triple().split("-")[0]   # x86_64, aarch64 or, on a Mac, arm64

def vector_widths(features):
    """Bits of the vectors that a CPU with these features has."""
    known = {128: True, 256: features.get("avx2"), 512: features.get("avx512f")}
    return [bits for bits, has in known.items() if has]

def vector_bits(asked, features):
    """The widest vectors, or those that NANOEULER_BITS asks for."""
    widths = vector_widths(features)
    if not asked:
        return widths[-1]
    need(asked in map(str, widths), f"NANOEULER_BITS is {asked}, expected one of "
         f"{', '.join(map(str, widths))}, the vectors of this CPU")
    return int(asked)

def tile_rows(architecture, bits):
    """32 vector registers hold 8 x 2 sums and what enters them, 16 hold 6 x 2."""
    return 8 if bits == 512 or architecture in ("aarch64", "arm64") else 6

def faster_dtype(cpu, has_bf16):
    """What a run computes in if it is not told.  AMD's cores since Zen 4 start as many `vdpbf16ps`
    a cycle as FMAs of float32, and each does two products a lane.  Intel's start half as many
    (uops.info): there bfloat16 only adds the work of rounding."""
    return "bf16" if has_bf16 and cpu.startswith("znver") else "f32"

BITS = vector_bits(os.environ.get("NANOEULER_BITS", ""), _CPU)
HAS_BF16 = bool(_CPU.get("avx512bf16")) and (BITS == 512 or bool(_CPU.get("avx512vl")))
HAS_VNNI = bool(_CPU.get("avx512vnni")) and (BITS == 512 or bool(_CPU.get("avx512vl")))
QUADS = HAS_VNNI                 # does a decoder multiply int8 in integers?
DTYPE = faster_dtype(llvm.get_host_cpu_name(), HAS_BF16)
MR = tile_rows(ARCHITECTURE, BITS)
TILE_BYTES = 2 * BITS // 8       # a row of a tile is two vectors
ROWS = 8 * MR                    # a product is computed in blocks of so many rows, by panels
DY_COLUMNS = 8 * MR              # a weight gradient packs so many columns of dY side by side

def tile_width(dtype):
    """Columns of a tile: two vectors of its sums, which are float32 for bfloat16."""
    return TILE_BYTES // max(4, np.dtype(dtype).itemsize)
