"""The CPU time of each test, with that of the processes that it starts.

    make test ARGS="--cpu-times times.tsv"     appends: seconds, test or fixture, phase
    python tests/cpu_times.py times.tsv        the sums of files, and the most expensive tests

Wall time says little on a busy machine.  A process that a fixture has started and that still runs,
such as Chromium or one that waits (warm.py), counts for the test during which it worked.
"""
import os
import sys
from collections import Counter
from pathlib import Path

import pytest


def seconds_of_children(pid):
    """CPU seconds of all living descendants of a process, and of those that they have waited for"""
    total = 0
    try:
        children = [child for task in Path(f"/proc/{pid}/task").iterdir()
                    for child in (task / "children").read_text("utf-8").split()]
        for child in children:
            stat = Path(f"/proc/{child}/stat").read_text(encoding="utf-8", errors="replace")
            fields = stat.rsplit(")", 1)[1].split()          # after the name of its program
            total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
            total += seconds_of_children(child)
    except OSError:                          # one has ended, or there is no /proc
        pass
    return total


def seconds():
    return sum(os.times()[:4]) + seconds_of_children(os.getpid())


class CpuTimes:
    def __init__(self, path):
        self.path, self.before = os.path.abspath(path), seconds()

    def note(self, test, phase):
        now = seconds()
        with open(self.path, "a", encoding="utf-8") as f:
            f.write(f"{now - self.before:.3f}\t{test}\t{phase}\n")
        self.before = now

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.note(item.nodeid, "before")     # collection, fixtures of other files
        return (yield)

    def pytest_runtest_logreport(self, report):
        self.note(report.nodeid, report.when)


def main(path, most=40):
    files, tests = Counter(), Counter()
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        spent, test, _ = line.split("\t")
        files[test.split("::")[0]] += float(spent)
        tests[test.split("[")[0]] += float(spent)
    for counts in files.most_common(), tests.most_common(most):
        for name, spent in counts:
            print(f"{spent:8.1f}  {name}")
        print()
    print(f"{sum(files.values()):8.1f}  together")


if __name__ == "__main__":
    main(*sys.argv[1:])
