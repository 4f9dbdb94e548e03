"""Which process of a run this is, and which GPU is its own."""
import os
from typing import NamedTuple

class Place(NamedTuple):
    """Of a process among those of a run: torchrun's words."""
    rank: int = 0                            # 0: the first one, which writes the files
    size: int = 1                            # how many they are
    local: int = 0                           # rank among those of its machine
    address: tuple = ("127.0.0.1", 29501)    # where the first one listens

LAUNCHERS = (("RANK", "WORLD_SIZE", "LOCAL_RANK"),                           # torchrun
             ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
             ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"))      # srun

def place_of(env):
    """What a launcher says in the environment.  A port beside its own is ours."""
    for names in LAUNCHERS:
        if all(env.get(name, "").isdecimal() for name in names):
            numbers = [int(env[name]) for name in names]
            port = env.get("MASTER_PORT", "")
            port = 1 + (int(port) if port.isdecimal() else 29500)
            return Place(*numbers, (env.get("MASTER_ADDR", "127.0.0.1"), port))
    return Place()

def visible(place, env):
    """What CUDA_VISIBLE_DEVICES should be: a process sees the one GPU that is its own.  A launcher
    may have seen to that; where there is none for this process, all stays as it is."""
    seen = env.get("CUDA_VISIBLE_DEVICES")
    if seen is None:
        return str(place.local)
    devices = seen.split(",")
    if len(devices) == 1 or place.local >= len(devices):
        return seen
    return devices[place.local]

PLACE = place_of(os.environ)

def take_own_gpu():
    """Lets this process see its own GPU alone, if it is one of several processes.  Programs call
    this before they use CUDA for the first time."""
    if PLACE.size > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible(PLACE, os.environ)
