"""How many threads to use: processors, control groups, hyper-threads."""
import math
import os
import pathlib
import re

import numba
from numba import set_num_threads

from bpe import need, UserError

def cpus():
    """The processors that this process may run on; `taskset` may leave it only some."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))

def quota_of_group(folder):
    """Processors that a control group of Linux may keep busy: quota / period, both in us.
    Version 2 has them in one file, version 1 in two; "max" or -1 means no limit."""
    def words(name):
        return (folder / name).read_text(encoding="ascii").split()

    try:
        if (folder / "cpu.max").exists():
            quota, period = words("cpu.max")
        else:
            [quota], [period] = words("cpu.cfs_quota_us"), words("cpu.cfs_period_us")
        unlimited = quota == "max" or int(quota) < 0
        return math.inf if unlimited else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):     # it says nothing that we understand
        return math.inf

def cpu_quota(root="/"):
    """The least of this process's control groups and those above them, as `docker --cpus` sets it.
    A line of /proc/self/cgroup is number:controllers:group, in version 2 without controllers.  In
    a container its group may be mounted as the root, whatever its name is outside."""
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
            continue                         # it rules over memory, devices, ...
        group = pathlib.PurePosixPath(name)
        for place in places:
            for folder in (group, *group.parents):
                least = min(least, quota_of_group(mounts / place / folder))
    return least

def most_threads(root="/"):
    """One for each processor that we may use, or as many as we may keep busy, or Numba started."""
    return max(1, math.floor(min(len(cpus()), cpu_quota(root), numba.config.NUMBA_NUM_THREADS)))

def physical_cores(root="/"):
    """Of the processors that we may use.  Hyper-threads count once: they share the multipliers."""
    cores = set()
    for cpu in cpus():
        topology = pathlib.Path(root, f"sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            cores.add((topology / "thread_siblings_list").read_text(encoding="ascii"))
        except OSError:                      # nobody says: a core of its own
            cores.add(cpu)
    return len(cores)

def use_threads(asked):
    most = most_threads()
    need(0 <= asked <= most, f"--threads is {asked}, expected 0 to {most}")
    try:
        set_num_threads(asked or min(physical_cores(), most))
    except ValueError as e:                  # the library that starts the threads is not there
        said = " ".join(str(e).split())
        raise UserError(f"NUMBA_THREADING_LAYER is {numba.config.THREADING_LAYER}: {said}; or "
                        f"unset it") from None
