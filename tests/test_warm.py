"""A program in a fork of a process that waits is what it is in a process of its own."""
import os
import signal
import subprocess
import sys

import pytest
import warm
from children import until

pytestmark = [pytest.mark.cli, pytest.mark.skipif(sys.platform != "linux", reason="Linux")]
PROGRAM = """
import os, signal, sys, time
import numba
if __name__ == "__main__":
    what, said = sys.argv[1], sys.stdin.read()
    print(__name__, __file__, sys.argv, os.getcwd(), sys.path[0], os.environ["FAULT"], said,
          sys.stdin.encoding, sys.stdout.errors, sys.stdout.line_buffering, sys.stderr.errors)
    print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM),
          signal.getsignal(signal.SIGCHLD), signal.getsignal(signal.SIGPIPE), file=sys.stderr)
    sys.stdout.flush()
    if what == "waits":
        time.sleep(60)
    if what == "fails":
        raise ZeroDivisionError
    if what.isdecimal():
        os.kill(os.getpid(), int(what))
    sys.exit({"ends": None, "code": 7, "text": "a text"}[what])
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("warm") / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return str(path)


def both(program, *args):
    """What starts it cold, and warm"""
    started = warm.command(program, *args, modules=("numba",))
    assert "call" in started
    return [sys.executable, program, *args], started


@pytest.mark.parametrize("what", ["ends", "code", "text", "fails", "6", "9", "15"])
def test_it_says_and_ends_the_same(what, program, tmp_path, monkeypatch):
    monkeypatch.setenv("FAULT", "a fault")
    cold, as_warm = (subprocess.run(started, cwd=tmp_path, input="na\u00efve\n", text=True,
                                    capture_output=True, timeout=60)
                     for started in both(program, what, "b c", "\u00e9"))
    assert as_warm.returncode == cold.returncode and as_warm.stdout == cold.stdout != ""
    assert as_warm.stderr.splitlines()[0] == cold.stderr.splitlines()[0]
    assert as_warm.stderr.splitlines()[-1] == cold.stderr.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_reaches_it(number, program, monkeypatch):
    """Nobody holds its output any more: it has ended, too."""
    monkeypatch.setenv("FAULT", "none")
    for started in both(program, "waits"):
        before = signal.signal(signal.SIGINT, signal.default_int_handler)    # a background job
        process = subprocess.Popen(started, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True)
        signal.signal(signal.SIGINT, before)             # ignores it, and a child inherits that
        assert process.stdout.readline().startswith("__main__")
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
        assert process.returncode == -number
        assert ("KeyboardInterrupt" in said) == (number == signal.SIGINT)


def test_an_environment_that_imports_may_read_is_that_of_a_process(program, monkeypatch):
    both(program, "ends")
    monkeypatch.setenv("NUMBA_NUM_THREADS", "1")
    assert warm.command(program, modules=("numba",)) == [sys.executable, program]


def test_who_waits_ends_with_who_started_it(program):
    code = ("import sys; sys.path.insert(0, sys.argv[1]); import warm\n"
            "warm.command(sys.argv[2], modules=('numba',))\n"
            "[(_, _, process)] = warm.WAITING.values(); print(process.pid)")
    said = subprocess.run([sys.executable, "-c", code, os.path.dirname(warm.__file__), program],
                          capture_output=True, text=True, timeout=60)
    [pid] = map(int, said.stdout.split())
    until(lambda: not os.path.exists(f"/proc/{pid}"))
