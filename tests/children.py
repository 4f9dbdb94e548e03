"""A pytest plugin for the programs that tests start. A limit of time is there to end what hangs,
and a busy machine takes long: no child has less than PATIENCE. A child that a test has started ends
with it, also if the test fails while the child runs. No child finds another copy of the program by
PYTHONPATH."""
import contextlib
import os
import subprocess
import time
from pathlib import Path

import pytest

PATIENCE = 800               # seconds; pytest ends the test itself after 900
SHORTEST = 20                # seconds: a shorter limit is the subject of its test
WIDE = []                    # scopes of the fixtures under way that outlive a test
STARTED = []                 # the children of the test that runs


def patient(method):
    def waiting(self, *args, **options):
        if (options.get("timeout") or 0) >= SHORTEST:
            options["timeout"] = max(options["timeout"], PATIENCE)
        return method(self, *args, **options)
    return waiting


class Child(subprocess.Popen):
    """Replaces subprocess.Popen during the tests."""
    communicate = patient(subprocess.Popen.communicate)
    wait = patient(subprocess.Popen.wait)

    def __init__(self, args, *more, **options):
        super().__init__(args, *more, **options)
        words = args if isinstance(args, list | tuple) else [args]
        waits_for_all = any(str(word).endswith("warm.py") for word in words) and "wait" in words
        if not WIDE and not waits_for_all:
            STARTED.append(self)

    def __exit__(self, kind, *error):
        if kind is not None:                 # Popen would wait for the end of the child
            end(self)
        return super().__exit__(kind, *error)


def end(child):
    with contextlib.suppress(OSError):
        child.kill()


def until(holds, seconds=PATIENCE, pause=0.002):
    """Waits for what must happen."""
    last = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < last, "it did not happen"
        time.sleep(pause)


def without_programs(path):
    """The folders of PYTHONPATH, but those with a copy of the program"""
    folders = [x for x in path.split(os.pathsep) if x and not Path(x, "bpe.py").exists()]
    return os.pathsep.join(folders)


def pytest_configure():
    subprocess.Popen = Child
    if "PYTHONPATH" in os.environ:
        os.environ["PYTHONPATH"] = without_programs(os.environ["PYTHONPATH"])
        if not os.environ["PYTHONPATH"]:
            del os.environ["PYTHONPATH"]


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    if fixturedef.scope == "function":
        return (yield)
    WIDE.append(fixturedef.scope)
    try:
        return (yield)
    finally:
        WIDE.pop()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown():
    try:
        return (yield)
    finally:
        while STARTED:
            child = STARTED.pop()
            if child.poll() is None:
                end(child)
                child.wait()
