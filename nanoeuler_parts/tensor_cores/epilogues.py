"""Epilogues of matrix products: what becomes of A B, while it is still in registers."""
import inspect

import numpy as np
from numba import types

import bpe
from bpe import need
from nanoeuler_parts.gpu.launches import inlined
from nanoeuler_parts.gpu.numbers import f32, u32, vector

class Epilogue:
    """out = A B in bfloat16.  A subclass changes the sums before they are stored, on both kernel
    paths, and for one product or a batch:

        class Times(Epilogue):
            def make_change(self):
                [factor] = map(np.float32, self.parameters)

                @inlined
                def multiply(acc, first, x, row, column):
                    for i in range(32):
                        acc[first + i] *= factor
                return multiply

        TensorOps(path).product(out, a, b, epilogue=Times(2.0))

    parameters    all numbers that are compiled into the kernel: equal ones share a kernel
    adds          out += A B instead, in float32.  Several blocks may share a tile then, and each
                  adds its split when it is its turn.  `change` would see only a part of the sum, so
                  such an epilogue must not have one
    reads_x       whether `change` reads x, so that the caller of `product` must pass it"""
    adds = reads_x = False

    def __init__(self, *parameters):
        """The class must be at the top level of a file: its name there, and the file's contents,
        say which kernels in the cache on disk are this epilogue's."""
        cls, self.parameters = type(self), parameters
        need("<locals>" not in cls.__qualname__ and cls.__module__ != "__main__",
             f"an epilogue must be a class at the top level of a module, {cls.__name__} is not")
        need(not (self.adds and self.changes),
             f"{cls.__name__} adds, so it must not change sums: it would see only parts of them")

    def make_change(self):
        """Makes the device function change(acc, first, x, row, column), which is called for each
        16 x 64 sums of a warp.  A thread has 32 of them, acc[first:first + 32]; the first is in
        this row and column of the output, and acc[first + i] in

            row + 8 * which_row(i), column + column_of(i)

        x    a matrix that the product is given, for example a residual or a gate.  Rows and columns
             may lie beyond the edge of the output: such sums are not stored, but x must not be read
             there"""
        return do_nothing

    @property
    def changes(self):
        return type(self).make_change is not Epilogue.make_change

    def __eq__(self, other):
        return repr(self) == repr(other)

    def __hash__(self):
        return hash(repr(self))

    def __repr__(self):
        """The epilogue's name in the cache of kernels.  It changes with the file of its class."""
        cls = type(self)
        digest = bpe.digest((inspect.getfile(cls),))
        return f"{cls.__module__}.{cls.__qualname__}{self.parameters} {digest}"

@inlined
def do_nothing(acc, first, x, row, column):
    pass

class Add(Epilogue):
    adds = True

STORE, ADD = Epilogue(), Add()

load_2, _ = vector(2)

@inlined
def two_of(x, row, column):
    """Returns x[row, column] and its right neighbour.  Beyond the edge, it reads the last ones:
    without branches, the compiler unrolls the loops around it, and acc stays in registers."""
    rows, columns = types.int32(x.shape[0]), types.int32(x.shape[1])
    return load_2(x, types.intp(min(types.int32(row), rows - types.int32(1))) * types.intp(columns)
                  + types.intp(min(types.int32(column), columns - types.int32(2))))

class Plus(Epilogue):
    """out = A B + X, which may be out itself     X has an even number of columns, and its rows
    follow each other in memory"""
    reads_x = True

    def make_change(self):
        @inlined
        def plus(acc, first, x, row, column):
            for j in range(8):
                for i in range(2):
                    two = two_of(x, row + u32(8 * i), column + u32(8 * j))
                    for e in range(2):
                        acc[first + 4 * j + 2 * i + e] += two[e]
        return plus

class Polynomial(Epilogue):
    """out = a I + b X + c A B, for square matrices of an even size     parameters: a, b, c
    The rows of X follow each other in memory."""
    reads_x = True

    def make_change(self):
        a, b, c = map(np.float32, self.parameters)

        @inlined
        def polynomial(acc, first, x, row, column):
            for j in range(8):
                for i in range(2):
                    at, r, k = first + 4 * j + 2 * i, row + u32(8 * i), column + u32(8 * j)
                    two = two_of(x, r, k)
                    for e in range(2):
                        diagonal = a if r == k + u32(e) else f32(0)
                        acc[at + e] = c * acc[at + e] + b * two[e] + diagonal
        return polynomial
