"""Work that the GPU program gives to several processes."""
import operator
import os
import time

import pytest

import nanoeuler as ne
from nanoeuler_parts.gpu.processes import in_processes, one_thread_each, THREADS


def test_results_come_in_order_and_every_process_has_one_thread(monkeypatch):
    monkeypatch.setenv(THREADS[0], "2")
    before = dict(os.environ)
    cases = [(1, 2), (3, 4), (5, 6), (7, 8), (9, 10)]
    assert list(in_processes(operator.mul, cases, 2, os.getpid)) == [x * y for x, y in cases]
    assert list(in_processes(os.getenv, [(name,) for name in THREADS], 1, os.getpid)) == ["1"] * 3
    assert dict(os.environ) == before
    with one_thread_each():
        assert {os.environ[name] for name in THREADS} == {"1"}


def test_an_error_of_a_process_is_raised_and_one_that_dies_is_reported():
    with pytest.raises(ZeroDivisionError):
        list(in_processes(operator.truediv, [(1, 1), (1, 0), (2, 1)], 2, os.getpid))
    start = time.monotonic()
    with pytest.raises(ne.UserError, match="--jobs 1"):
        list(in_processes(os._exit, [(3,), (3,)], 2, os.getpid))
    assert time.monotonic() - start < 60
