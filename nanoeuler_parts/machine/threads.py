"""The number of threads to use, from processors, control groups and hyper-threads."""
import math
import os
import pathlib
import re

import numba
from numba import set_num_threads

from bpe import need, UserError

def cpus():
    """The processors that this process may run on; `taskset` can restrict them."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))

def quota_of_group(folder):
    """The number of processors that a Linux control group may use: quota / period, both in us.
    Version 2 stores both in one file, version 1 in two files; "max" or -1 means no limit."""
    def words(name):
        return (folder / name).read_text(encoding="ascii").split()

    try:
        if (folder / "cpu.max").exists():
            quota, period = words("cpu.max")
        else:
            [quota], [period] = words("cpu.cfs_quota_us"), words("cpu.cfs_period_us")
        unlimited = quota == "max" or int(quota) < 0
        return math.inf if unlimited else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):     # missing or unknown format: no known limit
        return math.inf

def cpu_quota(root="/"):
    """The smallest quota of this process's control groups and their parents (`docker --cpus`).
    A line of /proc/self/cgroup is number:controllers:group; version 2 leaves controllers empty.
    In a container, the group may be mounted as the root, under another name than outside."""
    try:
        text = pathlib.Path(root, "proc/self/cgroup").read_text(encoding="utf-8", errors="replace")
    except OSError:                          # not Linux
        return math.inf
    mounts, least = pathlib.Path(root, "sys/fs/cgroup"), math.inf
    for controllers, name in re.findall("^[0-9]+:([^:]*):/*(.*)$", text, re.M):
        if controllers == "":
            places = "", "unified"
        elif "cpu" in controllers.split(","):
            places = "cpu", controllers
        else:
            continue                         # it controls memory, devices, ...
        group = pathlib.PurePosixPath(name)
        for place in places:
            for folder in (group, *group.parents):
                least = min(least, quota_of_group(mounts / place / folder))
    return least

def most_threads(root="/"):
    """The maximum: the least of the allowed processors, the quota and Numba's threads."""
    return max(1, math.floor(min(len(cpus()), cpu_quota(root), numba.config.NUMBA_NUM_THREADS)))

def physical_cores(root="/"):
    """The number of cores of the allowed processors.  The hyper-threads of a core count once,
    because they share its multipliers."""
    cores = set()
    for cpu in cpus():
        topology = pathlib.Path(root, f"sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            cores.add((topology / "thread_siblings_list").read_text(encoding="ascii"))
        except OSError:                      # unknown: count it as a core
            cores.add(cpu)
    return len(cores)

def use_threads(asked):
    most = most_threads()
    need(0 <= asked <= most, f"--threads is {asked}, expected 0 to {most}")
    try:
        set_num_threads(asked or min(physical_cores(), most))
    except ValueError as e:                  # the threading library is not installed
        said = " ".join(str(e).split())
        raise UserError(f"NUMBA_THREADING_LAYER is {numba.config.THREADING_LAYER}: {said}; choose "
                        f"another, or unset it") from None
