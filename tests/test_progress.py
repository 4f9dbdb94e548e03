"""Kernels are counted while they compile, and compiled ahead after the first reply of a chat."""
import io
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from helpers import never

from nanoeuler_parts.kernels import (
    DECODING, gradient_kernels, lora_decoding_kernels, lora_kernels, training_kernels,
)
from nanoeuler_parts.machine import kernels
from nanoeuler_parts.machine.cpu import DTYPE
from nanoeuler_parts.machine.kernels import COMPILED, KERNELS, Progress, wait_for
from nanoeuler_parts.chat import ahead
from nanoeuler_parts.chat.terminal import Terminal

pytestmark = pytest.mark.cli


class Stream(io.StringIO):
    """A text stream that is a terminal, or is none."""

    def __init__(self, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal


@pytest.fixture
def calls(monkeypatch):
    monkeypatch.setattr(kernels, "KERNELS", {"a()": 30, "b()": 10})
    return ["a()", "b()"]


def counted(calls, monkeypatch, is_terminal):
    """What is printed while two calls compile; the second one compiles more than was expected."""
    said = Stream(is_terminal)
    monkeypatch.setattr(sys, "stderr", said)
    progress = Progress(calls)
    for _ in range(12):
        progress.count("b()")
    for _ in range(25):
        progress.count("a()")
    progress.count("a()", 30)                # its process has ended
    progress.end()
    return said.getvalue()


def test_a_terminal_has_one_line_that_counts(calls, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    counts, end = counted(calls, monkeypatch, True).strip().split("\n")
    shown = counts.lstrip("\r").split("\r")
    assert shown == [f"note: compiling kernels: {n} of 40" for n in (*range(36), 40)]
    assert end.startswith("note: compiled in ")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_pipe_has_a_few_lines(is_terminal, calls, monkeypatch):
    """And so has a terminal that cannot overwrite."""
    monkeypatch.setenv("TERM", "dumb")
    *counts, end = counted(calls, monkeypatch, is_terminal).splitlines()
    assert counts == [f"note: compiling kernels: {n} of 40" for n in (0, 10, 20, 30, 40)]
    assert end.startswith("note: compiled in ")


def process_that(code):
    return subprocess.Popen([sys.executable, "-c", f"import sys; {code}"], stderr=subprocess.PIPE,
                            text=True)


def test_each_kernel_of_a_process_is_counted(capfd):
    """Its other lines are warnings.  A long one does not stop it, though nobody reads the pipe of
    the second process yet."""
    seen, line = [], f"print({COMPILED!r}, end='', file=sys.stderr)"
    many = process_that("print('x' * 200_000, file=sys.stderr)")
    said = wait_for(process_that(f"{line}; print('a warning', file=sys.stderr); {line}"),
                    lambda: seen.append(1))
    assert said == "a warning\n" and seen == [1, 1]
    assert wait_for(many, never) == "x" * 200_000 + "\n"
    assert capfd.readouterr() == ("", "")


def test_every_call_has_its_number():
    parts = {**training_kernels("f32"), **training_kernels("bf16"), **DECODING,
             **gradient_kernels("f64"), **lora_decoding_kernels()}
    for dtype in ("f32", "bf16", "f64"):
        parts |= lora_kernels(dtype)
    assert parts.keys() == KERNELS.keys() and min(KERNELS.values()) > 20


@pytest.mark.slow
@pytest.mark.parametrize("call", KERNELS)
def test_as_many_kernels_are_compiled_as_expected(call, tmp_path, monkeypatch):
    """On the processor of this test exactly; others may differ by a few."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    seen = []
    assert wait_for(kernels.in_another_process(call), lambda: seen.append(1)) == ""
    assert abs(len(seen) - KERNELS[call]) <= 0.1 * KERNELS[call]


# ---- ahead
at_terminal = ahead.at_terminal


@pytest.fixture
def started(monkeypatch, tmp_path):
    """[file descriptor of the lock], for each process that would be started: someone sits at a
    terminal, and a kernel is missing."""
    found = []
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(ahead, "at_terminal", lambda: True)
    monkeypatch.setattr(ahead, "lock_path", lambda: str(tmp_path / "lock"))
    monkeypatch.setattr(ahead, "missing_calls", list)
    monkeypatch.setattr(ahead, "start_in_background", lambda lock: found.append(os.dup(lock)))
    yield found
    for lock in found:
        os.close(lock)


def test_only_one_process_compiles_ahead(started):
    ahead.compile_ahead()
    ahead.compile_ahead()                    # the first one holds the lock
    assert len(started) == 1
    os.close(started.pop())                  # it has ended
    ahead.compile_ahead()
    assert len(started) == 1


@pytest.mark.parametrize("why", ["CI", "pipe", "cached", "read-only"])
def test_nothing_is_compiled_ahead_unasked(why, started, monkeypatch, capsys):
    """In CI, in a pipe, where nothing is missing or nothing can be kept"""
    if why == "CI":
        monkeypatch.setenv("CI", "true")
    elif why == "pipe":
        monkeypatch.setattr(ahead, "at_terminal", at_terminal)           # here it is none
    elif why == "cached":
        monkeypatch.setattr(ahead, "missing_calls", lambda parts: [])
    else:
        monkeypatch.setattr(ahead, "lock_path", lambda: "/no/such/folder/lock")
    ahead.compile_ahead()
    assert started == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_has_the_lowest_priority_and_a_session_of_its_own(monkeypatch):
    """It ends by itself, here at once: all kernels are in the cache."""
    processes, popen = [], subprocess.Popen

    def recorded(*args, **options):
        processes.append(popen(*args, **options))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", recorded)
    read, write = os.pipe()
    ahead.start_in_background(write)
    os.close(write)
    [process] = processes
    assert os.getsid(process.pid) == process.pid
    nice = set()
    while process.poll() is None:
        with open(f"/proc/{process.pid}/stat", encoding="utf-8") as f:
            nice.add(int(f.read().rsplit(")", 1)[1].split()[16]))
        time.sleep(0.02)
    assert process.returncode == 0 and 19 in nice
    assert os.read(read, 1) == b""           # the lock was its own, and is free again
    os.close(read)


@pytest.mark.parametrize("fails", [False, True])
def test_calls_are_compiled_in_turn_until_one_fails(fails, monkeypatch):
    """For example where the disk is full: nothing is printed."""
    begun = []

    def compiles(call):
        begun.append(call)
        return process_that(f"sys.exit('No space left on device' if {fails} else 0)")

    calls = [*ahead.kernels_ahead()]
    assert calls == [*training_kernels(DTYPE), *{"compile_gradient('f32')"} - {
        *training_kernels(DTYPE)}]
    monkeypatch.setattr(ahead, "missing_calls", lambda parts: [
        call for call in parts if call != calls[-1]])    # a verb has compiled it meanwhile
    monkeypatch.setattr(ahead, "in_another_process", compiles)
    ahead.compile_in_turn()
    assert begun == (calls[:1] if fails else calls[:-1])


def test_a_chat_compiles_ahead_after_its_first_reply(monkeypatch, capsys):
    said, typed = [], iter(["/help", "Hello", "again"])

    def read():
        try:
            return SimpleNamespace(text=next(typed), is_text=False)
        except StopIteration:
            raise EOFError from None

    speaker = SimpleNamespace(ids_to_read=str, reply=said.append)
    monkeypatch.setattr("nanoeuler_parts.chat.terminal.read_typed", read)
    Terminal(speaker, lambda: said.append("ahead")).converse()
    assert said == ["Hello", "ahead", "again"]
