"""The bounds of the self-tests: how far an output may be from the CPU's."""
import numpy as np

from nanoeuler_cuda import DTYPES, NAMES

# The unit roundoff u of a type is the largest relative error of rounding a number to that type.
ROUNDOFF = {"bf16": 2.0 ** -8, "f32": 2.0 ** -24, "f64": 2.0 ** -53}

# The bounds of the self-tests.  An output may differ by this much from the CPU's, which is computed
# in float64.  Both numbers count roundoffs u of the type in which the output is stored:
# (the norm of the error over the norm of the output, the largest error over the largest entry).
#
# bf16  The inputs are exact in bfloat16, sums are in float32, and an output is rounded once.  So
#       the error of an entry is at most 1 u of that entry, and neither number exceeds 1.  Attention
#       also rounds P and dS, and its backward pass reads a rounded O.  These three errors are
#       independent.  The root mean square of one is 0.42 u, since it is uniform over an interval of
#       2 u / mantissa, and mantissas are log-uniform in [1, 2).  Together: sqrt(3) 0.42 = 0.74 u.
# f32   The error of a sum of n terms with random signs grows like a random walk, to a fraction of
#       sqrt(n) u (Higham 2002, 2.8 and 4.2).  The longest product except dW has n = 2,056 terms,
#       sqrt(n) = 45.  An exponential has an error of 2^-22 = 4 u by itself.
# f64   As f32, for both sides.  Matrix products of these inputs are exact.
# dW    is stored in float32, in a run of bfloat16 as well.  It has 17,100 terms, sqrt(n) = 131, and
#       tensor cores truncate where other units round.
#
# The largest errors of all kernels, measured on an H100 and an H200: bf16 0.7 and 0.8, f32 8 and
# 49, f64 11 and 19, dW 50 and 57.  For comparison: a zeroed row of the product with 17,100 rows
# gives 1.9 and over 10 in bf16; an 8 x 8 hole in the largest dW gives a norm of 80,000 in f32.
BOUNDS = {"bf16": (1.25, 1.5), "f32": (24, 96), "f64": (32, 64)}
BOUNDS_DW = (128, 192)
BOUNDS_ROWS = (320, 480)                     # x has 17 bits; NumPy with this rounding: 160, 170
BOUNDS_PROMPT = (4, 5)                       # in bf16: NumPy with the same roundings: 2, 2.5
BOUNDS_MUON = (5, 9)                         # of bf16, with products in bf16.  NumPy with the same
                                             # roundings: 2.1, 3.7

class Sum(np.ndarray):
    """A test's array that is never stored in bfloat16: sums, gains, gradients of weights"""

def as_sum(x):
    return np.asarray(x).view(Sum)

def relative_error(x, y):
    """|x - y| / |y|, or |x - y| if y is zero"""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return float(np.linalg.norm(x - y) / (np.linalg.norm(y) or 1.0))

def largest_error(x, y):
    """max |x - y| / max |y|, which shows a wrong row or entry that hardly changes the norm"""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return float(np.abs(x - y).max(initial=0) / (np.abs(y).max(initial=0) or 1.0))

def errors(x, y):
    return relative_error(x, y), largest_error(x, y)

def bounds(name, kind):
    """The largest errors() that an output of kernel `name` may have when it is stored as `kind`"""
    if name == "muon, bf16":
        return [ROUNDOFF["bf16"] * n for n in BOUNDS_MUON]
    roundoffs = BOUNDS[kind]
    if name.startswith("matmul_dw") and kind == "f32":
        roundoffs = BOUNDS_DW
    if name.startswith("rows"):
        roundoffs = BOUNDS_ROWS
    if name.startswith("prompt"):
        roundoffs = BOUNDS_PROMPT
    return [ROUNDOFF[kind] * n for n in roundoffs]

def fault(name, dtype, x, y):
    """Compares the output x of kernel `name`, in a run of this dtype, with the expected y.  Returns
    "" if it is within its bounds, or a line that says how far off it is."""
    kind = "f32" if dtype == "bf16" and isinstance(y, Sum) else dtype
    found, most = errors(x, y), bounds(name, kind)
    if all(error <= bound for error, bound in zip(found, most)):         # false if one is NaN
        return ""
    return (f"{NAMES[DTYPES[kind]]} {np.shape(y)}: errors {found[0]:.1e} {found[1]:.1e}, "
            f"at most {most[0]:.1e} {most[1]:.1e}")
