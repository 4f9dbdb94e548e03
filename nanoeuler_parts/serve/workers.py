"""Threads for work that would block the event loop for too long.  app.py has one `Worker` for each
kind of work."""
import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from nanoeuler_parts.serve.engine import Busy
from nanoeuler_parts.serve.protocol import Gone

MOST_WAITING = 64            # maximum number of requests of one worker


class Worker:
    """One thread, and the requests that wait for it."""

    def __init__(self, name):
        self.name, self.waiting = name, 0
        self.busy = False                    # is the thread working?
        self.pool = ThreadPoolExecutor(1, name)

    async def call(self, request, function, *args):
        """Returns function(*args, gone), computed by the thread.  gone: a threading.Event
        Raises Busy if too many requests are waiting, and Gone as soon as the client leaves.  Then
        work that has not begun is dropped, and `gone` is set for work that has begun."""
        if self.waiting >= MOST_WAITING:
            raise Busy(f"{self.waiting} requests are waiting for the {self.name} already; try "
                       f"again later")
        gone, self.waiting = threading.Event(), self.waiting + 1
        try:
            return await until_gone(request, self.pool.submit(self.work, function, *args, gone))
        except Gone:
            gone.set()
            raise
        finally:
            self.waiting -= 1

    def begin(self, function):
        """Runs function() in the thread.  Its result and its errors are dropped."""
        self.pool.submit(self.work, function)

    def work(self, function, *args):
        self.busy = True
        try:
            return function(*args)
        finally:
            self.busy = False

    def close(self):
        """Drops the work that has not begun, and returns at once."""
        self.pool.shutdown(wait=False, cancel_futures=True)


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
