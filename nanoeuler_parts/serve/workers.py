"""Threads for work that would block the event loop for too long.  app.py has one `Worker` for each
kind of work."""
import asyncio
import threading
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor

from nanoeuler_parts.serve.engine import Busy
from nanoeuler_parts.serve.protocol import Gone

MOST_WAITING, MOST_IN_ALL = 64, 256          # requests of one worker: of a client, and of all


class Worker:
    """One thread, and the requests that wait for it.  The clients, by their addresses, have their
    requests done in turns: a request waits for at most one request of each other client, and for
    the earlier ones of its own client."""

    def __init__(self, name):
        self.name, self.waiting, self.of_client = name, 0, Counter()
        self.busy = False                    # is the thread working?
        self.pool = ThreadPoolExecutor(1, name)
        self.jobs, self.lock = {}, threading.Lock()      # {client: its jobs}, the next client first

    async def call(self, request, function, *args):
        """Returns function(*args, gone), computed by the thread.  gone: a threading.Event
        Raises Busy if too many requests are waiting, and Gone as soon as the client leaves.  Then
        work that has not begun is dropped, and `gone` is set for work that has begun."""
        client = address_of(request)
        n = self.of_client[client]
        if n >= MOST_WAITING or self.waiting >= MOST_IN_ALL:
            raise Busy(f"{max(n, self.waiting)} requests are waiting for the {self.name} already; "
                       f"try again later")
        gone = threading.Event()
        self.waiting += 1
        self.of_client[client] += 1
        try:
            return await until_gone(request, self.add(client, function, *args, gone))
        except Gone:
            gone.set()
            raise
        finally:
            self.waiting -= 1
            self.of_client[client] -= 1
            if not self.of_client[client]:
                del self.of_client[client]

    def begin(self, function):
        """Runs function() in the thread.  Its result and its errors are dropped."""
        self.add(None, function)

    def add(self, client, function, *args):
        """The Future of function(*args), which the thread computes when the client's turn comes"""
        future = Future()
        with self.lock:
            self.jobs.setdefault(client, deque()).append((future, function, args))
        self.pool.submit(self.work)
        return future

    def work(self):
        """Does the first job of the client whose turn it is.  Afterwards this client is the last,
        so that a client whose request comes meanwhile is before it."""
        with self.lock:
            client, waiting = next(iter(self.jobs.items()))
            future, function, args = waiting.popleft()
        if future.set_running_or_notify_cancel():
            self.busy = True
            try:
                future.set_result(function(*args))
            except BaseException as e:
                future.set_exception(e)
            finally:
                self.busy = False
        with self.lock:
            del self.jobs[client]
            if waiting:
                self.jobs[client] = waiting

    def close(self):
        """Drops the work that has not begun, and returns at once."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        with self.lock:
            for future, *_ in [job for jobs in self.jobs.values() for job in jobs]:
                future.cancel()


def address_of(request):
    """The address of a client.  If the connection comes from this machine, it may be a proxy's, and
    the address is the last one in X-Forwarded-For, if there is this header (uvicorn's default)."""
    return request.client.host if request.client else ""


async def until_gone(request, future):
    """Waits for the result of a concurrent Future.  If the client leaves first, cancels the Future
    and raises Gone."""
    answer, left = asyncio.wrap_future(future), asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait((answer, left), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise Gone
        return answer.result()
    finally:
        answer.cancel()
        left.cancel()


async def disconnected(receive):
    """Returns when the client has left.  receive: the callable of ASGI"""
    while (await receive())["type"] != "http.disconnect":
        pass
