"""What the GPU program stands on.

    doctor.py     what a machine has of what the GPU program needs
    place.py      which process of a run this is, and which GPU is its own
    launches.py   kernels and their place on disk, launches, graphs
    numbers.py    bfloat16, vectors and exponentials in kernels

All but the first two need numba-cuda.
"""
