"""What the processes of a run tell each other on the host, over sockets."""
import contextlib
import json
import os
import re
import select
import socket
import sys
import threading
import time

from bpe import need, UserError

HEARTBEAT, FINISHED, LOST = b".", b"e", b"g"          # of life; of a good end; one is gone: which, follows
HELLO = "a rank of NanoEuler"
HEARTBEAT_SECONDS, SILENCE_SECONDS = 5.0, 40.0                    # seconds between signs, and without any

class Ranks:
    """The processes of a run.  Each has two sockets to the first one, which has two to each: for
    values, which all give at the same place of the program, and for signs of life.

    Nobody waits for the dead: without a sign for SILENT seconds, or when its socket closes, the
    process ends, since what it waits for on a GPU would never come.  A thread looks after that:
    it alone sets `gone`, and adds to `ended` until `close`."""

    def __init__(self, place, patience=60.0):
        self.rank, self.size = place.rank, place.size
        self.values, self.watched = {}, {}   # rank -> socket
        self.finished = set()                   # ranks that are done
        self.begun = False                   # has every rank answered?
        self.lost_rank, self.loss_known = None, threading.Event()  # the rank that is, once that is known
        deadline = time.monotonic() + patience
        if self.rank == 0:
            self.await_others(place.address, deadline)
        else:
            self.values[0] = self.join(place.address, "values", deadline)
            self.watched[0] = self.join(place.address, "watched", deadline)
        self.begin(deadline)
        threading.Thread(target=self.watch, daemon=True).start()

    def begin(self, deadline):
        """All are there, and answer: from now on there are signs of life."""
        for s in self.values.values():
            s.settimeout(max(0.01, deadline - time.monotonic()))
        self.all("", "the start")
        self.begun = True
        for s in self.values.values():
            s.settimeout(None)

    def await_others(self, address, deadline):
        """Until each other rank has come with both of its sockets"""
        host = address[0] if address[0] in ("127.0.0.1", "localhost") else ""
        wanted = {(kind, rank) for kind in ("values", "watched") for rank in range(1, self.size)}
        with socket.create_server((host, address[1]), backlog=2 * self.size) as server:
            while wanted:
                missing = sorted({rank for _, rank in wanted})
                server.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    s, _ = server.accept()
                    s.settimeout(5)
                    hello, kind, rank, size = read_message(s, 1 << 10)
                    if hello != HELLO or not (isinstance(kind, str) and isinstance(rank, int)):
                        continue             # somebody else knocked
                except (OSError, TypeError, ValueError):
                    need(time.monotonic() < deadline, f"rank {missing[0]} of {self.size} did not "
                         f"come to {address[0]}:{address[1]}; start all of them")
                    continue                 # so did somebody else, or nobody
                need(size == self.size, f"rank {rank} is one of {size}, not of {self.size}")
                if (kind, rank) in wanted:
                    wanted.remove((kind, rank))
                    s.settimeout(None)
                    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    getattr(self, kind)[rank] = s

    def join(self, address, kind, deadline):
        """A socket to the first rank, which may have to start first"""
        while True:
            try:
                s = socket.create_connection(address, timeout=5)
                s.settimeout(None)
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                send_message(s, [HELLO, kind, self.rank, self.size])
                return s
            except OSError as e:
                need(time.monotonic() < deadline, f"rank 0 does not answer at {address[0]}:"
                     f"{address[1]} ({e}); say where it is by MASTER_ADDR and MASTER_PORT")
                time.sleep(0.1)

    def all(self, value, where):
        """[the value of each rank], in their order.  A value is what JSON can say; `where` of the
        program all ranks must be."""
        if self.rank:
            self.send(0, [where, value])
            found = self.receive(0)
        else:
            own = json.loads(json.dumps([where, value]))             # as the others see it
            found = [own, *(self.receive(rank) for rank in range(1, self.size))]
            for rank in range(1, self.size):
                self.send(rank, found)
        places = [place for place, _ in found]
        need({*places} == {where}, f"the ranks are not at one place, but at {', '.join(places)}: "
             f"one had to leave the run, see its last line; continue the run with --resume")
        return [x for _, x in found]

    def agree(self, value, where):
        """What the first rank says"""
        return self.all(value, where)[0]

    def send(self, rank, value):
        try:
            send_message(self.values[rank], value)
        except OSError:
            raise self.loss(rank) from None

    def receive(self, rank):
        try:
            return read_message(self.values[rank])
        except OSError:
            raise self.loss(rank) from None

    def loss(self, rank):
        """What to raise when a rank does not answer: another one may be why."""
        if self.rank == 0:
            self.report_loss(rank)
        elif self.loss_known.wait(1.5):
            rank = self.lost_rank
        return UserError(self.loss_message(rank))

    def loss_message(self, rank):
        if not self.begun:
            return f"rank {rank} of {self.size} does not answer; start all of them again"
        return f"rank {rank} of {self.size} is gone, so the run ends; continue it with --resume"

    def watch(self):
        """The thread: gives signs of life, and looks for those of others.  If it cannot, nobody
        would: then the process ends, too."""
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
            self.end(f"signs of life cannot be looked for ({e})")

    def read_heartbeats(self, rank, s):
        try:
            said = s.recv(64)
        except OSError:
            said = b""
        if rank in self.finished:               # since `close`
            return
        if report := re.search(LOST + rb"(\d+);", said):
            self.end_without(int(report[1]))
        elif FINISHED in said:
            self.finished.add(rank)
        elif not said:
            self.end_without(rank)

    def notify(self, what, ranks):
        for rank in ranks:
            with contextlib.suppress(OSError):           # its end will be seen
                self.watched[rank].sendall(what)

    def report_loss(self, rank):
        """The others, who hear from the first one alone, who is gone"""
        self.notify(LOST + b"%d;" % rank, self.watched.keys() - self.finished)

    def end_without(self, rank):
        """The end of this process, a moment later: it may find a reason of its own meanwhile."""
        if self.rank == 0:
            self.report_loss(rank)
        self.lost_rank = rank
        self.loss_known.set()
        time.sleep(2)
        self.end(self.loss_message(rank))

    @staticmethod
    def end(why):
        try:
            print(f"nanoeuler: {why}", file=sys.stderr, flush=True)
        finally:
            os._exit(1)

    def close(self):
        """The run is over, and well.  Who has ended before is told, too: it may still listen."""
        self.finished.update(self.watched)
        self.notify(FINISHED, self.watched)

def send_message(s, value):
    text = json.dumps(value).encode()
    s.sendall(len(text).to_bytes(4, "big") + text)

def read_message(s, most=1 << 32):
    """What send_message said, in so many bytes at most, or an OSError"""
    n = int.from_bytes(read_exactly(s, 4), "big")
    if n > most:
        raise ConnectionError(f"a message of {n:,} bytes")
    return json.loads(read_exactly(s, n))

def read_exactly(s, n):
    found = bytearray()
    while len(found) < n:
        more = s.recv(min(n - len(found), 1 << 20))
        if not more:
            raise ConnectionError("the other side is gone")
        found += more
    return bytes(found)
