"""What benchmarks share: facts about the machine, and how a worker process speaks."""
import contextlib
import importlib.metadata
import json
import os
import pathlib
import platform
from typing import NamedTuple


BENCH = pathlib.Path(__file__).resolve().parent


def out_folder():
    """Where benchmarks write unless --out says otherwise; git ignores it.  What is to be published
    is copied from there to bench/results/, on purpose."""
    folder = BENCH / "out"
    folder.mkdir(exist_ok=True)
    return folder


class Cpu(NamedTuple):
    name: str                                # as the system names it
    detail: str                              # family, model, stepping
    facts: dict                              # of the first core, from /proc/cpuinfo


def cpu_model():
    facts = {}
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    name = facts.get("model name") or platform.processor() or platform.machine()
    family, model, stepping = (facts.get(k, "?") for k in ("cpu family", "model", "stepping"))
    return Cpu(name, f"family {family} model {model} stepping {stepping}", facts)


def version(package):
    """None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions(*packages):
    return {package: version(package) for package in packages}


def character_start(data, at):
    """The last place of UTF-8 up to `at` where a character starts, or the end."""
    while at < len(data) and data[at] & 0xC0 == 0x80:
        at -= 1
    return at


def protocol():
    """say(value), which writes a JSON value a line to stdout.  From now on what anybody else
    prints, libraries included, goes to stderr."""
    stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(value):
        print(json.dumps(value), file=stdout, flush=True)
    return say
