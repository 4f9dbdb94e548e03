"""Finds the rank of this process in a run on several GPUs, and the GPU that it uses."""
import os
from typing import NamedTuple

class Place(NamedTuple):
    """The place of a process among the processes of a run, in torchrun's terms"""
    rank: int = 0                            # number of the process; rank 0 writes the files
    size: int = 1                            # number of processes
    local: int = 0                           # number of the process on its machine
    address: tuple = ("127.0.0.1", 29501)    # host and port where rank 0 listens

# The environment variables in which a launcher passes rank, size and local rank
LAUNCHERS = (("RANK", "WORLD_SIZE", "LOCAL_RANK"),                           # torchrun
             # mpirun of Open MPI
             ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
             ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"))      # srun

def place_of(env):
    """Returns the Place that a launcher passes in the environment, or Place() without a launcher.
    Rank 0 listens on MASTER_PORT + 1, since the launcher uses MASTER_PORT itself."""
    for names in LAUNCHERS:
        if all(env.get(name, "").isdecimal() for name in names):
            numbers = [int(env[name]) for name in names]
            port = env.get("MASTER_PORT", "")
            port = 1 + (int(port) if port.isdecimal() else 29500)
            return Place(*numbers, (env.get("MASTER_ADDR", "127.0.0.1"), port))
    return Place()

def visible(place, env):
    """Returns the value of CUDA_VISIBLE_DEVICES with which this process sees only its own GPU.
    Returns the present value if a launcher has already set it to one GPU, or if it has no GPU for
    this process."""
    seen = env.get("CUDA_VISIBLE_DEVICES")
    if seen is None:
        return str(place.local)
    devices = seen.split(",")
    if len(devices) == 1 or place.local >= len(devices):
        return seen
    return devices[place.local]

PLACE = place_of(os.environ)

def take_own_gpu():
    """Hides all GPUs but its own from this process, if it is one of several processes.  Programs
    call this before they first use CUDA."""
    if PLACE.size > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible(PLACE, os.environ)
