"""Work that the GPU program gives to several processes."""
import operator
import os

import pytest

import nanoeuler as ne
from nanoeuler_parts.gpu.processes import one_thread_each, processes, THREADS


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_process_has_one_thread(jobs, monkeypatch):
    monkeypatch.setenv(THREADS[0], "2")
    before = dict(os.environ)
    with processes(jobs, os.getpid) as submit:
        assert dict(os.environ) == before    # Numba reads it again when this process compiles
        calls = [submit(operator.mul, i, i) for i in range(5)]
        threads = [submit(os.getenv, name) for name in THREADS]
        pids = [submit(os.getpid) for _ in range(2)]
        assert [x.result() for x in calls] == [0, 1, 4, 9, 16]
        if jobs > 1:
            assert [x.result() for x in threads] == ["1"] * 3
        assert all((x.result() == os.getpid()) == (jobs == 1) for x in pids)
    assert dict(os.environ) == before
    with one_thread_each():
        assert {os.environ[name] for name in THREADS} == {"1"}
    assert dict(os.environ) == before


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_of_a_process_is_raised(jobs):
    with processes(jobs, os.getpid) as submit:
        good, bad = submit(operator.truediv, 1, 1), submit(operator.truediv, 1, 0)
        assert good.result() == 1
        with pytest.raises(ZeroDivisionError):
            bad.result()


def test_a_process_that_dies_is_reported():
    with pytest.raises(ne.UserError, match="--jobs 1"), processes(2, os.getpid) as submit:
        [submit(os._exit, 3) for _ in range(2)][1].result()
