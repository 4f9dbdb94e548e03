"""The threads and the memory that this process may use, from processors, hyper-threads and control
groups."""
import contextlib
import math
import os
import pathlib
import re

import numba
from numba import get_num_threads, set_num_threads

from bpe import need, UserError

def cpus():
    """The processors that this process may run on; `taskset` can restrict them."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))

def words_in(folder, name):
    """The words in a file of a control group"""
    return (folder / name).read_text(encoding="ascii").split()

def quota_of_group(folder):
    """The number of processors that a Linux control group may use: quota / period, both in us.
    Version 2 stores both in one file, version 1 in two files; "max" or -1 means no limit."""
    if (folder / "cpu.max").exists():
        quota, period = words_in(folder, "cpu.max")
    else:
        [quota], [period] = (words_in(folder, f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    unlimited = quota == "max" or int(quota) < 0
    return math.inf if unlimited else int(quota) / int(period)

def memory_of_group(folder):
    """The bytes of memory that a Linux control group may use.  In version 2, "max" means no limit.
    Version 1 has a number larger than any memory instead."""
    is_second = (folder / "memory.max").exists()
    [limit] = words_in(folder, "memory.max" if is_second else "memory.limit_in_bytes")
    return math.inf if limit == "max" else int(limit)

def least_of_groups(controller, of_group, root="/"):
    """The smallest of_group(folder) over this process's control groups and their parents.
    controller: cpu or memory.  A line of /proc/self/cgroup is number:controllers:group; version 2
    leaves controllers empty.  In a container, the group may be mounted as the root, under another
    name than outside."""
    try:
        text = pathlib.Path(root, "proc/self/cgroup").read_text(encoding="utf-8", errors="replace")
    except OSError:                          # not Linux
        return math.inf
    mounts, least = pathlib.Path(root, "sys/fs/cgroup"), math.inf
    for controllers, name in re.findall("^[0-9]+:([^:]*):/*(.*)$", text, re.M):
        if controllers == "":
            places = "", "unified"
        elif controller in controllers.split(","):
            places = controller, controllers
        else:
            continue                         # it controls devices, processes, ...
        group = pathlib.PurePosixPath(name)
        for place in places:
            for folder in (group, *group.parents):
                # missing files or an unknown format: no known limit
                with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
                    least = min(least, of_group(mounts / place / folder))
    return least

def cpu_quota(root="/"):
    """The number of processors that this process may use (`docker --cpus`)"""
    return least_of_groups("cpu", quota_of_group, root)

def most_memory(root="/"):
    """Bytes: the memory of this machine, or the limit of a container (`docker --memory`).  Infinite
    if neither is known."""
    there = math.inf
    with contextlib.suppress(AttributeError, ValueError, OSError):   # not a POSIX system
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(there, least_of_groups("memory", memory_of_group, root))

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

def fewer_threads():
    """Lowers Numba's number of threads to the physical cores, and to what `most_threads` allows.  A
    smaller number, which the calling program has chosen, remains."""
    fewer = min(get_num_threads(), physical_cores(), most_threads())
    if fewer < get_num_threads():
        set_num_threads(fewer)

def use_threads(asked):
    most = most_threads()
    need(0 <= asked <= most, f"--threads: expected 0 to {most}, found {asked}")
    try:
        set_num_threads(asked or min(physical_cores(), most))
    except ValueError as e:                  # the threading library is not installed
        said = " ".join(str(e).split())
        raise UserError(f"NUMBA_THREADING_LAYER is {numba.config.THREADING_LAYER}: {said}; choose "
                        f"another, or unset it") from None
