"""Calls of a function in several processes of one machine."""
import concurrent.futures
import contextlib
import multiprocessing
import os
import signal

from bpe import UserError

THREADS = "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"

def in_processes(function, arguments, jobs, start):
    """Yields function(*x) for each x of a list of arguments, in their order, while `jobs` processes
    compute them, the last ones first.

    Every process calls start() before its first call, and uses one thread.  function and start must
    be functions of a module, which the processes import."""
    context = multiprocessing.get_context("spawn")
    with one_thread_each(), concurrent.futures.ProcessPoolExecutor(
            jobs, context, begin, (start,)) as pool:
        futures = [pool.submit(function, *x) for x in reversed(arguments)]
        try:
            for future in reversed(futures):
                yield future.result()
        except concurrent.futures.process.BrokenProcessPool:
            raise UserError("a process ended before its work; run it with --jobs 1") from None
        finally:
            pool.shutdown(cancel_futures=True)

def begin(start):
    signal.signal(signal.SIGINT, signal.SIG_IGN)         # Ctrl-C ends the process that waits for it
    start()

@contextlib.contextmanager
def one_thread_each():
    """Processes that are started meanwhile use one thread each."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
