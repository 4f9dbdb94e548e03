"""The self-tests of the kernels of tensor_cores/, except products and attention.

ops.py covers products and attention: it tests the Ops that make_ops returns.
"""
import numpy as np

from nanoeuler_cuda import kernel_path
from nanoeuler_parts.tensor_cores.one_tile import one_tile_matmul

def add_one_tile_tests(ops):
    if kernel_path() == "wgmma":
        for M, N, K in (128, 128, 16), (304, 264, 104), (17100, 8, 8):
            x, w = ops.normal(M, K), ops.normal(N, K)
            ops.add(one_tile_test, [np.zeros((M, N))], [x, w], [x @ w.T], "one_tile_matmul",
                    ("bf16",), ("wgmma",))

def one_tile_test(ops, out, x, w):
    one_tile_matmul(ops.map_of, out, x, w)

# run.py adds these groups to those of ops.py
GROUPS = {"one_tile": add_one_tile_tests}
