"""64 clients at once for a minute, of whom half leave in the middle of an answer.

    python bench/serve_load.py nanoeuler.bin [--seconds 60] [--clients 64]
                                                 writes bench/out/serve_load.txt

Starts `serve` in a process of its own and asks it, first, for each of some answers alone.  Then all
clients ask for these, as a stream or at once: each text must be the one of that request alone.  In
between they begin long answers and leave.  At the end no slot may be taken, nothing may wait, and
the memory of the server must be what it was after a third of the time, by its means of a fifth of
all samples.  Exits with 1 if any of this does not hold.
"""
import argparse
import contextlib
import http.client
import json
import pathlib
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from common import cpu_model, out_folder

TEXT = HERE.parent / "data" / "shakespeare.txt"
DIFFERENT, LONG = 48, 4000   # requests; tokens of an answer that somebody leaves
MOST_GROWTH = 8 << 20        # bytes: a server that keeps what each request had grows by far more


def request_of(number, text):
    rng = random.Random(number)
    start = rng.randrange(len(text) - 200)
    return {"prompt": text[start:start + rng.randint(5, 90)], "max_tokens": rng.randint(5, 60),
            "seed": number, "temperature": 0.9}


def asked(port, body):
    """(connection, response) of a completion"""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/completions", json.dumps(body),
                       {"content-type": "application/json"})
    return connection, connection.getresponse()


def text_of(port, body):
    connection, response = asked(port, body)
    with contextlib.closing(connection):
        said = response.read().decode()
    if response.status != 200:
        raise OSError(f"{response.status} {said[:200]}")
    if not body.get("stream"):
        return json.loads(said)["choices"][0]["text"]
    events = [json.loads(event[6:]) for event in said.split("\n\n") if event.startswith("data: {")]
    return "".join(event["choices"][0]["text"] for event in events)


def leave(port, body, rng):
    """Is gone in the middle of a long answer."""
    body = {**body, "max_tokens": LONG, "stream": True}
    connection, response = asked(port, body)
    with contextlib.closing(connection):
        if response.status != 200:
            raise OSError(f"{response.status} {response.read(200)}")
        for _ in range(rng.randrange(8)):
            response.readline()


class Clients:
    """What all of them do until the time is over, and what they met."""

    def __init__(self, port, bodies, alone, end):
        self.port, self.bodies, self.alone, self.end = port, bodies, alone, end
        self.lock, self.found, self.faults = threading.Lock(), Counter(), []

    def run(self, number):
        rng = random.Random(number)
        while time.monotonic() < self.end:
            i = rng.randrange(len(self.bodies))
            stream = rng.random() < 0.5
            leaves = rng.random() < 0.5
            try:
                if leaves:
                    leave(self.port, self.bodies[i], rng)
                    self.count("left")
                else:
                    text = text_of(self.port, {**self.bodies[i], "stream": stream})
                    self.count("equal" if text == self.alone[i] else "different")
            except (OSError, ValueError, http.client.HTTPException) as e:
                self.faults.append(repr(e))
                self.count("failed")

    def count(self, what):
        with self.lock:
            self.found[what] += 1


def resident(pid):
    """Bytes of a process that are in memory"""
    pages = pathlib.Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]
    return int(pages) * 4096


def metrics(port):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as c:
        c.request("GET", "/metrics")
        lines = c.getresponse().read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line[0] != "#")
    return {name.split("{model=")[0]: float(value) for name, value in pairs}


@contextlib.contextmanager
def started(args):
    command = [sys.executable, str(HERE.parent / "nanoeuler.py"), "serve", args.file, "--port", "0",
               "--slots", str(args.slots), "--tokens", str(LONG)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as process:
        try:
            process.stdout.readline()
            yield process, int(process.stdout.readline().split(":")[2].split("/")[0])
        finally:
            process.terminate()
            process.wait(60)


def watched(process, clients, seconds):
    """Memory of the server, sampled, while the clients run"""
    samples = []
    with ThreadPoolExecutor(clients[1]) as pool:
        running = [pool.submit(clients[0].run, i) for i in range(clients[1])]
        while not all(future.done() for future in running):
            samples.append(resident(process.pid))
            time.sleep(max(0.05, seconds / 120))
        for future in running:
            future.result()
    return samples


def idle(port):
    """Are all slots free, and does nobody wait, within 10 s?"""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        m = metrics(port)
        if not (m["nanoeuler_requests_running"] or m["nanoeuler_requests_waiting"]):
            return True
        time.sleep(0.05)
    return False


def measured(args):
    text = TEXT.read_text(encoding="utf-8")
    bodies = [request_of(i, text) for i in range(DIFFERENT)]
    with started(args) as (process, port):
        alone = [text_of(port, body) for body in bodies]
        before = metrics(port)
        clients = Clients(port, bodies, alone, time.monotonic() + args.seconds)
        samples = watched(process, (clients, args.clients), args.seconds)
        free = idle(port)
        again = [text_of(port, body) for body in bodies[:4]] == alone[:4]
        after = metrics(port)
    n, third = max(1, len(samples) // 5), len(samples) // 3
    early, late = (statistics.mean(part) for part in (samples[third:third + n], samples[-n:]))
    found = {k: clients.found[k] for k in ("equal", "left", "different", "failed")}
    return {**found, "faults": clients.faults[:5], "free": free, "again": again,
            "tokens": after["nanoeuler_tokens_total"] - before["nanoeuler_tokens_total"],
            "left_counted": after["nanoeuler_left_total"] - before["nanoeuler_left_total"],
            "early": early, "late": late, "largest": max(samples)}


def told(found, args):
    name, detail, _ = cpu_model()
    return f"""\
{args.clients} clients for {args.seconds:g} s, {args.slots} slots; {name}, {detail}

texts equal to those of the request alone  {found['equal']:,}
texts that differ                          {found['different']}
requests that failed                       {found['failed']} {' '.join(found['faults'])}
clients that left in the middle            {found['left']:,}
answers that the server gave up            {found['left_counted']:,.0f}
tokens written                             {found['tokens']:,.0f}
all slots free at the end, nobody waits    {'yes' if found['free'] else 'NO'}
texts afterwards are the same              {'yes' if found['again'] else 'NO'}
memory after a third, at the end, most     {found['early'] / 2**20:.1f}, \
{found['late'] / 2**20:.1f}, {found['largest'] / 2**20:.1f} MiB
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", help="a checkpoint")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--out", type=pathlib.Path, default=out_folder() / "serve_load.txt")
    args = parser.parse_args()
    found = measured(args)
    text = told(found, args)
    args.out.write_text(text, encoding="utf-8")
    print(text)
    well = found["equal"] and found["left"] and found["free"] and found["again"]
    level = found["late"] - found["early"] < MOST_GROWTH
    return int(not (well and level and not found["different"] and not found["failed"]))


if __name__ == "__main__":
    sys.exit(main())
