"""Calls of functions in several processes of one machine."""
import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
from types import SimpleNamespace

from bpe import UserError

THREADS = "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"

@contextlib.contextmanager
def processes(jobs, start):
    """Yields submit(function, *args): one of `jobs` processes calls function(*args), and
    submit(..).result() waits for the result.  With one job, this process calls it in `result`.

    Every process calls start() first, and uses one thread.  The functions must be functions of a
    module, since the processes import them."""
    if jobs == 1:
        yield lambda function, *args: SimpleNamespace(result=lambda: function(*args))
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, context, begin, (start,)) as pool:
        with one_thread_each():
            for _ in range(jobs):            # each call starts a process
                pool.submit(os.getpid)
        try:
            yield pool.submit
        except concurrent.futures.process.BrokenProcessPool:
            raise UserError("a process ended before its work was done; use --jobs 1") from None
        finally:
            pool.shutdown(cancel_futures=True)

def begin(start):
    signal.signal(signal.SIGINT, signal.SIG_IGN)         # on Ctrl-C, their parent ends them
    start()

@contextlib.contextmanager
def one_thread_each():
    """Processes that are started in this block use one thread each.  This process must not compile
    in it, since Numba then reads these variables again."""
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
