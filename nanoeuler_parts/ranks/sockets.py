"""Messages between the processes of a run, over TCP sockets, and their heartbeats.

Every rank has two connections to rank 0, and none to other ranks:

    values     JSON messages, exchanged by all ranks at the same place of the program
    watched    heartbeats, and the news that a rank has finished or is lost
"""
import contextlib
import json
import os
import re
import select
import socket
import sys
import threading
import time

from bpe import need, printable, UserError

# Messages of the connection `watched`.  LOST is followed by the number of the lost rank and ";".
HEARTBEAT, FINISHED, LOST = b".", b"e", b"g"
HELLO = "a rank of NanoEuler"
LISTENER = "NANOEULER_LISTENER"              # environment variable: the file descriptor of a socket
                                             # that listens for rank 0 already
# A rank sends a heartbeat every 5 seconds, and counts as lost after 40 seconds without one.
HEARTBEAT_SECONDS, SILENCE_SECONDS = 5.0, 40.0

class Ranks:
    """This process's connections to the other ranks of its run.

    A process ends as soon as a rank is lost: when its socket closes, or after SILENCE_SECONDS
    without a heartbeat.  Otherwise its GPU could wait for that rank forever.  A thread, `watch`,
    looks after this.  It alone sets `lost_rank`, and until `close` it alone adds to `finished`."""

    def __init__(self, place, patience=60.0):
        """place: a Place; patience: seconds to wait until all ranks are connected"""
        self.rank, self.size = place.rank, place.size
        self.values, self.watched = {}, {}   # rank -> socket
        self.finished = set()                # ranks that have ended without an error
        self.begun = False                   # have all ranks answered?
        self.incomplete = {}                 # {rank: the beginning of a message from it}
        # the rank that is lost; the event is set as soon as that is known
        self.lost_rank, self.loss_known = None, threading.Event()
        deadline = time.monotonic() + patience
        if self.rank == 0:
            self.await_others(place.address, deadline)
        else:
            self.values[0] = self.join(place.address, "values", deadline)
            self.watched[0] = self.join(place.address, "watched", deadline)
        self.begin(deadline)
        threading.Thread(target=self.watch, daemon=True).start()

    def begin(self, deadline):
        """Waits until all ranks answer.  Heartbeats start after this."""
        for s in self.values.values():
            s.settimeout(max(0.01, deadline - time.monotonic()))
        self.all("", "the start")
        self.begun = True
        for s in self.values.values():
            s.settimeout(None)

    def await_others(self, address, deadline):
        """Accepts connections, on rank 0, until every other rank has connected both of its
        sockets."""
        wanted = {(kind, rank) for kind in ("values", "watched") for rank in range(1, self.size)}
        with self.listener(address) as server:
            while wanted:
                missing = sorted({rank for _, rank in wanted})
                server.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    s, _ = server.accept()
                    s.settimeout(5)
                    hello, kind, rank, size = read_message(s, 1 << 10)
                    if hello != HELLO or not (isinstance(kind, str) and isinstance(rank, int)):
                        continue             # not a rank of NanoEuler
                except (OSError, TypeError, ValueError):
                    need(time.monotonic() < deadline, f"rank {missing[0]} of {self.size} did not "
                         f"connect to {address[0]}:{address[1]}; start all ranks")
                    continue                 # not a rank, or a timeout
                need(size == self.size, f"rank {rank} was started as one of {size} ranks, expected "
                     f"{self.size}; start all ranks with the same number")
                if (kind, rank) in wanted:
                    wanted.remove((kind, rank))
                    s.settimeout(None)
                    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    getattr(self, kind)[rank] = s

    def listener(self, address):
        """Returns the socket on which rank 0 listens: the one that its starter gave it, or a new
        one."""
        if LISTENER in os.environ:
            return socket.socket(fileno=int(os.environ.pop(LISTENER)))
        host = address[0] if address[0] in ("127.0.0.1", "localhost") else ""
        return socket.create_server((host, address[1]), backlog=2 * self.size)

    def join(self, address, kind, deadline):
        """Returns a socket to rank 0, and retries until the deadline, since rank 0 may start later.
        kind: values or watched"""
        while True:
            try:
                s = socket.create_connection(address, timeout=5)
                s.settimeout(None)
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                send_message(s, [HELLO, kind, self.rank, self.size])
                return s
            except OSError as e:
                need(time.monotonic() < deadline, f"rank 0 does not answer at {address[0]}:"
                     f"{address[1]} ({e}); set MASTER_ADDR and MASTER_PORT to its address")
                time.sleep(0.1)

    def all(self, value, where):
        """Exchanges a value with all ranks, and returns the list of all ranks' values, in order.
        value: anything that JSON can hold
        where: the place in the program, which must be the same on all ranks"""
        if self.rank:
            self.send(0, [where, value])
            found = self.receive(0)
        else:
            own = json.loads(json.dumps([where, value]))             # as other ranks see it
            found = [own, *(self.receive(rank) for rank in range(1, self.size))]
            for rank in range(1, self.size):
                self.send(rank, found)
        places = [place for place, _ in found]
        need({*places} == {where}, f"the ranks are at different places, {', '.join(places)}: one "
             f"of them left the run, see its last line; continue the run with --resume")
        return [x for _, x in found]

    def agree(self, value, where):
        """Returns the first rank's value, on all ranks.  Arguments as in `all`."""
        return self.all(value, where)[0]

    def send(self, rank, value):
        """Sends a value to a rank."""
        try:
            send_message(self.values[rank], value)
        except OSError:
            raise self.loss(rank) from None

    def receive(self, rank):
        """Waits for a value from a rank, and returns it."""
        try:
            return read_message(self.values[rank])
        except OSError:
            raise self.loss(rank) from None

    def loss(self, rank):
        """Returns the exception to raise when a rank does not answer.  It names the rank whose loss
        is the cause, which may be another one: rank 0 ends when any rank is lost."""
        if self.rank == 0:
            self.report_loss(rank)
        elif self.loss_known.wait(1.5):
            rank = self.lost_rank
        return UserError(self.loss_message(rank))

    def loss_message(self, rank):
        """Returns the text that says that a rank is lost."""
        if not self.begun:
            return f"rank {rank} of {self.size} does not answer; start all ranks again"
        return f"rank {rank} of {self.size} is gone, so the run ends; continue it with --resume"

    def watch(self):
        """The body of the thread: sends heartbeats, and reads those of other ranks.  If it fails,
        the process ends, since nothing else would notice a lost rank."""
        try:
            seen, given = dict.fromkeys(self.watched, time.monotonic()), 0.0
            while waiting := {self.watched[r]: r for r in self.watched.keys() - self.finished}:
                if time.monotonic() - given >= HEARTBEAT_SECONDS:
                    given = time.monotonic()
                    self.notify(HEARTBEAT, waiting.values())
                for s in select.select(list(waiting), [], [], 1.0)[0]:
                    seen[waiting[s]] = time.monotonic()
                    self.read_heartbeats(waiting[s], s)
                for rank in self.watched.keys() - self.finished:
                    if time.monotonic() - seen[rank] > SILENCE_SECONDS:
                        self.end_without(rank)
        except Exception as e:
            self.end(f"the heartbeats of other ranks cannot be read ({e})")

    def read_heartbeats(self, rank, s):
        """Reads what a rank has sent to the socket s: heartbeats, its end, or a lost rank's number.
        A closed socket means that the rank itself is lost."""
        try:
            received = s.recv(64)
        except OSError:
            received = b""
        if rank in self.finished:            # `close` may have added it meanwhile
            return
        said = self.incomplete.pop(rank, b"") + received
        if report := re.search(LOST + rb"(\d+);", said):
            self.end_without(int(report[1]))
        elif FINISHED in said:
            self.finished.add(rank)
        elif not received:
            self.end_without(rank)
        elif LOST in said:                   # without ";": the rest of the number is to come
            self.incomplete[rank] = said[said.rindex(LOST):]

    def notify(self, what, ranks):
        """Sends the bytes `what` to each of these ranks."""
        for rank in ranks:
            with contextlib.suppress(OSError):           # `watch` will notice that it is lost
                self.watched[rank].sendall(what)

    def report_loss(self, rank):
        """Tells the other ranks, which are connected to rank 0 only, that a rank is lost."""
        self.notify(LOST + b"%d;" % rank, self.watched.keys() - self.finished)

    def end_without(self, rank):
        """Ends this process after two seconds.  In this time, the main thread may end it with a
        more precise error."""
        if self.rank == 0:
            self.report_loss(rank)
        self.lost_rank = rank
        self.loss_known.set()
        time.sleep(2)
        self.end(self.loss_message(rank))

    @staticmethod
    def end(why):
        """Prints the reason and ends this process at once."""
        try:
            print(f"nanoeuler: {printable(why)}", file=sys.stderr, flush=True)
        finally:
            os._exit(1)

    def close(self):
        """Tells all ranks that this one ends without an error.  It tells those, too, that have
        finished already, because they may still be listening."""
        self.finished.update(self.watched)
        self.notify(FINISHED, self.watched)

def send_message(s, value):
    """Sends a value over a socket: 4 bytes of length, big-endian, and JSON."""
    text = json.dumps(value).encode()
    s.sendall(len(text).to_bytes(4, "big") + text)

def read_message(s, most=1 << 32):
    """Returns the value of one send_message.  Raises an OSError if it fails, or if the message has
    more than `most` bytes."""
    n = int.from_bytes(read_exactly(s, 4), "big")
    if n > most:
        raise ConnectionError(f"a message of {n:,} bytes, expected at most {most:,}")
    return json.loads(read_exactly(s, n))

def read_exactly(s, n):
    """Returns the next n bytes of a socket."""
    found = bytearray()
    while len(found) < n:
        more = s.recv(min(n - len(found), 1 << 20))
        if not more:
            raise ConnectionError("the other side closed the connection")
        found += more
    return bytes(found)
