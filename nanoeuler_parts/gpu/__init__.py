"""The foundation of the GPU program.

    doctor.py     prints which of the required packages and drivers this machine has
    place.py      finds the rank of this process in a run, and its GPU
    launches.py   the decorator of kernels, their cache on disk, launches, CUDA graphs
    numbers.py    bfloat16, vector loads and stores, and exponentials in kernels
    processes.py  calls a function in several processes, for the self-tests

launches.py and numbers.py need numba-cuda, the others do not.
"""
