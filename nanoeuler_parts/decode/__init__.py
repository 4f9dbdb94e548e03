"""The fast decoder of nanoeuler_cuda.py.  Read tensor_cores/ first, then these modules:

    products.py    the kernels of a step
    steps.py       the steps as graphs, prompts, and the decoder
"""
