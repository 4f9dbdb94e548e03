"""The vector width of this CPU, and the tile sizes that follow from it."""
import os

import llvmlite.binding as llvm
import numba
import numpy as np

from bpe import need

def cpu_features(asked):
    """{feature: whether the CPU supports it} for the CPU that Numba compiles for.
    It is this CPU, unless NUMBA_CPU_NAME=generic or NUMBA_CPU_FEATURES (like +avx2,-fma) is set."""
    if asked is None:
        return llvm.get_host_cpu_features()
    return {name[1:]: name[0] == "+" for name in asked.split(",") if name}

_CPU = cpu_features(numba.config.CPU_FEATURES)
ARCHITECTURE = llvm.get_process_triple().split("-")[0]   # x86_64, aarch64 or, on a Mac, arm64

def vector_widths(features):
    """The vector widths, in bits, that a CPU with these features supports."""
    known = {128: True, 256: features.get("avx2"), 512: features.get("avx512f")}
    return [bits for bits, has in known.items() if has]

def vector_bits(asked, features):
    """The vector width to use, in bits: NANOEULER_BITS if set, otherwise the widest."""
    widths = vector_widths(features)
    if not asked:
        return widths[-1]
    need(asked in map(str, widths), f"NANOEULER_BITS is {asked}, expected one of "
         f"{', '.join(map(str, widths))}, the vector widths of this CPU")
    return int(asked)

def tile_rows(architecture, bits):
    """Rows of a tile.  A row has two vectors of sums.  32 vector registers hold 8 x 2 sums and
    their inputs, 16 registers hold 6 x 2."""
    return 8 if bits == 512 or architecture in ("aarch64", "arm64") else 6

def faster_dtype(cpu, has_bf16):
    """The default of --dtype.  Since Zen 4, AMD's cores start as many `vdpbf16ps` per cycle as
    float32 FMAs, and each computes two products per lane.  Intel's cores start half as many
    (uops.info), so bfloat16 gains nothing there and adds the work of rounding."""
    return "bf16" if has_bf16 and cpu.startswith("znver") else "f32"

BITS = vector_bits(os.environ.get("NANOEULER_BITS", ""), _CPU)
HAS_BF16 = bool(_CPU.get("avx512bf16")) and (BITS == 512 or bool(_CPU.get("avx512vl")))
HAS_VNNI = bool(_CPU.get("avx512vnni")) and (BITS == 512 or bool(_CPU.get("avx512vl")))
QUADS = HAS_VNNI                 # whether a decoder multiplies int8 in integers
DTYPE = faster_dtype(llvm.get_host_cpu_name(), HAS_BF16)
MR = tile_rows(ARCHITECTURE, BITS)
TILE_BYTES = 2 * BITS // 8       # bytes of a tile's row: two vectors
ROWS = 8 * MR                    # rows per block of a product; they share each panel
DY_COLUMNS = 8 * MR              # columns of dY that a weight gradient packs side by side

def tile_width(dtype):
    """Columns of a tile: two vectors of sums.  The sums are float32 if dtype is bfloat16."""
    return TILE_BYTES // max(4, np.dtype(dtype).itemsize)
