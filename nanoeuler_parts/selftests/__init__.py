"""The self-tests of the GPU program: every kernel, and a whole gradient, against nanoeuler.py.

    bounds.py      how far an output may be from the CPU's, and why
    cases.py       one case: inputs, the expected outputs, and a function that runs it on the GPU
    ops.py         the cases of nanoeuler_cuda.py and of ranks/, op by op
    fast.py        the case of the shortest kernel of tensor_cores/
    decoding.py    the cases of decode/
    run.py         runs all cases, in several processes
    gradient.py    the gradient of a whole model
"""
