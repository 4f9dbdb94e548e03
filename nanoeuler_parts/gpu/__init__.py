"""The foundation of the GPU program.

    doctor.py     prints which of the required packages and drivers this machine has
    place.py      finds the rank of this process in a run, and its GPU
    launches.py   the decorator of kernels, their cache on disk, launches, CUDA graphs
    numbers.py    bfloat16, vector loads and stores, and exponentials in kernels
    mma.py        the instruction of tensor cores, mma.sync
    processes.py  calls a function in several processes, for the self-tests

launches.py, numbers.py and mma.py need numba-cuda, the others do not.
"""
