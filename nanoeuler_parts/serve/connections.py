"""uvicorn's HTTP/1.1 connections, with a time limit for each state and a limit on their number.
server.py makes uvicorn use `Connection`.

    state      limit            what the connection waits for
    idle       HEAD_SECONDS     the line and headers of a first request
               IDLE_SECONDS     the line and headers of a further request
    reading    BODY_SECONDS     the body of a request; app.py has this limit
    answering  WRITE_SECONDS    a client that reads too slowly, or not at all

A client may close its side after a request (a half-close), and read the answer.  A client that
leaves sends the same.  They differ in what their machines do with further bytes: the latter's
answers with a reset.  So the server sends bytes that mean nothing (`probe`), and looks for a reset
every PROBE_SECONDS while the answer is made.

If there are more than `most` connections, the server closes the one that has been idle or reading
for the longest time.  It keeps connections that entered this state less than GRACE_SECONDS ago,
because their requests may be on the way.  So idle sockets cannot keep requests out, and no answer
is cut off.  A flood of new connections can keep requests out while it lasts.

uvicorn has no documented way to do this.  `Connection` uses `cycle`, `conn`, `scope`, `flow`,
`connections`, `app_state`, `send_400_response` and the cycle's `disconnected` of
uvicorn.protocols.http.h11_impl.H11Protocol as uvicorn 0.38 and 0.54 have them.
"""
import socket

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS, IDLE_SECONDS, WRITE_SECONDS, GRACE_SECONDS = 10, 30, 30, 1
PROBE_SECONDS = 0.02
CUT_SHORT = "the connection was closed before the request was complete; send it again"


class Connection(H11Protocol):
    """One client's connection.  Applications find its `abort` in scope["state"]."""

    def __init__(self, most, app_state, **settings):
        super().__init__(app_state={**app_state, "abort": self.abort}, **settings)
        self.most, self.half_closed = most, False
        self.since = 0.0                     # when the current state began, on the loop's clock
        self.head_timer = self.write_timer = self.reset_timer = None

    # ---- the state of the connection
    def is_idle(self):
        return self.cycle is None or self.cycle.response_complete

    def may_be_closed(self):
        """Whether it can be closed without interrupting an answer"""
        return not self.transport.is_closing() and (self.is_idle() or self.cycle.more_body)

    # ---- closing
    def abort(self):
        """Closes the connection at once.  Bytes that have not been sent are dropped."""
        if self.transport is not None:
            self.transport.abort()

    def stop_timers(self):
        for timer in (self.head_timer, self.write_timer, self.reset_timer):
            if timer is not None:
                timer.cancel()

    def connection_lost(self, exc):
        self.stop_timers()
        super().connection_lost(exc)

    # ---- a client that closed its side
    def eof_received(self):
        """Returns whether the connection stays open, for an answer."""
        self.half_closed = True
        return self.is_answering()

    def is_answering(self):
        """Whether the connection stays open after the client has closed its side: for an answer, or
        for an error if half of a request came."""
        if not self.is_idle() and not self.cycle.more_body:
            if self.reset_timer is None:
                self.reset_timer = self.loop.call_later(PROBE_SECONDS, self.probe)
            return True
        if self.is_idle():
            began, started = bool(self.conn.trailing_data[0]), False
        else:
            began, started = True, self.cycle.response_started
        if began and not started:
            self.send_400_response(CUT_SHORT)
        return began and not started

    def send_400_response(self, msg):
        """Sends an error and closes the connection.  The application drops its own answer then.
        uvicorn's method would send a body in answer to HEAD, and a second status after the one of
        an answer that has begun; h11 raises for both."""
        has_body = self.is_idle() or self.scope["method"] != "HEAD"
        if not self.is_idle():
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
        elif has_body:
            super().send_400_response(msg)
        else:
            head = h11.Response(status_code=400, reason=b"Bad Request",
                                headers=[(b"connection", b"close")])
            self.transport.write(self.conn.send(head) + self.conn.send(h11.EndOfMessage()))
            self.transport.close()

    def probe(self):
        """Sends bytes that change nothing.  Before an answer, this is a status 100.  Between two
        chunks it is the first digit of the next one's size, which may have leading zeros (RFC
        9112, 7.1).  HTTP/1.0 has neither, so there the answer is made in any case."""
        if self.is_idle() or self.transport.is_closing():
            return
        if self.scope["http_version"] != "1.0":
            if not self.cycle.response_started:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            elif self.scope["state"].get("streams"):
                self.transport.write(b"0")
        self.look_for_reset()

    def look_for_reset(self):
        if self.transport.is_closing():
            return
        s = self.transport.get_extra_info("socket")
        if s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.abort()
        else:
            self.reset_timer = self.loop.call_later(PROBE_SECONDS, self.look_for_reset)

    # ---- waiting for a request
    def connection_made(self, transport):
        super().connection_made(transport)
        self.wait_for_head(HEAD_SECONDS)
        if len(self.connections) > self.most:
            self.make_room()

    def make_room(self):
        before = self.loop.time() - GRACE_SECONDS
        closable = [c for c in self.connections if c.may_be_closed() and c.since <= before]
        if closable:
            min(closable, key=lambda c: c.since).abort()
        elif len(self.connections) > 1.5 * self.most:
            self.abort()

    def wait_for_head(self, seconds):
        if self.head_timer is not None:
            self.head_timer.cancel()
        self.since = self.loop.time()
        self.head_timer = self.loop.call_later(seconds, self.end_if_idle)

    def end_if_idle(self):
        if self.is_idle():
            self.abort()

    def on_response_complete(self):
        self.wait_for_head(IDLE_SECONDS)     # before uvicorn starts a pipelined request
        super().on_response_complete()
        if self.half_closed and not self.transport.is_closing() and not self.is_answering():
            self.transport.close()           # after the last answer

    # ---- writing: asyncio calls these when its write buffer is full, and when it has drained
    def pause_writing(self):
        super().pause_writing()
        self.write_timer = self.loop.call_later(WRITE_SECONDS, self.abort)

    def resume_writing(self):
        super().resume_writing()
        if self.write_timer is not None:
            self.write_timer.cancel()
