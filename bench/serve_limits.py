"""How long hostile clients can hold up the server, and how long it takes to end.

    python bench/serve_limits.py nanoeuler_chat.bin      writes bench/out/serve_limits.txt

Each figure is the slowest of --times tries, against a server in a process of its own.  Exits with 1
if one of them is above its limit."""
import argparse
import contextlib
import http.client
import itertools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from common import cpu_model, out_folder

CHAT, TEXT, EXPLAIN = "/v1/chat/completions", "/v1/completions", "/api/explain"
LONG = [{"role": ("assistant", "user")[i % 2], "content": ""} for i in range(2000)]
FORGET = {"messages": LONG, "forget": True, "max_tokens": 1}
SHORT = {"messages": LONG[-1:], "max_tokens": 1}
MIB = 1 << 20


def nested(levels):
    """The body of a request whose metadata is nested, as bytes"""
    return b'{"prompt": "a", "max_tokens": 1, "metadata": ' + b"[" * levels + b"]" * levels + b"}"


# The largest preparations that --body admits, one of each kind: (kind, path, body)
PREPARATIONS = [
    ("128 prompts of text", TEXT, {"prompt": ["word " * 1600] * 128, "max_tokens": 1}),
    ("128 prompts of ids", TEXT, {"prompt": [[5] * 2000] * 128, "max_tokens": 1}),
    ("a prompt of one word", TEXT, {"prompt": "x" * (MIB - 100), "max_tokens": 1}),
    ("2,000 messages", CHAT, {"messages": [{**m, "content": "word " * 80} for m in LONG]}),
    ("2,000 messages with forget", CHAT, {
        "messages": [{**m, "content": "word " * 80} for m in LONG], "forget": True,
        "max_tokens": 1}),
    ("a nested body", TEXT, nested(MIB // 2 - 100)),
    ("a body of many objects", TEXT, {"prompt": "a", "metadata": [[]] * (MIB // 5)}),
    ("an explanation", EXPLAIN, {"tokens": [5] * 4000}),
    ("a trajectory", EXPLAIN, {"tokens": [5] * 4000, "trajectory": True}),
    ("attention weights", EXPLAIN, {"tokens": [5] * 4000, "attention": 1})]
NAMES = [f"{i:04}" + "x" * 226 for i in range(240)]
# Schemas whose preparation takes long: constants, names, parts, and states of a pattern
SCHEMAS = {
    "9,000 constants": {"enum": [*range(9000)]},
    "2,000 alternatives of one constant": {"anyOf": [{"const": f"a{i}"} for i in range(2000)]},
    "240 names of 230 characters": {"properties": dict.fromkeys(NAMES, {"type": "integer"})},
    "256 properties in each of 10 depths": {
        "$ref": "#/$defs/a", "$defs": {"a": {"properties": {
            f"p{i}": {"$ref": "#/$defs/a"} for i in range(256)}}}},
    "a pattern of 250 characters": {"pattern": "^.{0,250}$"},
    "a string with limits": {"type": "string", "minLength": 9, "maxLength": 999}}
REJECTED = 3, 8, 24              # connections that send schemas which are rejected
STREAM = {"prompt": "To be", "max_tokens": 4000, "stream": True}


class Served:
    """A server in a process of its own"""

    def __init__(self, file, *flags, env=None):
        command = [sys.executable, str(HERE.parent / "nanoeuler.py"), "serve", file, "--port", "0",
                   "--tokens", "4000", *flags]
        self.process = subprocess.Popen(command, env={**os.environ, **(env or {})},
                                        encoding="utf-8", stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL)
        self.process.stdout.readline()
        self.port = int(self.process.stdout.readline().split(":")[2].split("/")[0])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()

    def ask(self, path, body=None, client="127.0.0.1", status=200):
        """(seconds until the whole answer was there, the object of its JSON)
        client: its address     status: the one that is expected"""
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
            raw = body and json.dumps(body)
            connection.request("POST" if body else "GET", path, raw, {
                "x-forwarded-for": client, **({"content-type": "application/json"} if raw else {})})
            response = connection.getresponse()
            said = json.loads(response.read())
        assert response.status == status, said
        return time.perf_counter() - began, said

    def send(self, path, body):
        """A connection on which a request was sent, and nothing is read.  body: bytes are sent as
        they are"""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        s = socket.create_connection(("127.0.0.1", self.port))
        s.sendall(b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                  b"content-length: %d\r\n\r\n%s" % (path.encode(), len(raw), raw))
        return s


def forgetting(served):
    """2,000 messages with `forget`, until the answer of one token is there"""
    seconds, said = served.ask(CHAT, FORGET)
    assert said["forgotten"] > 1000
    return seconds


def cancelled(served):
    """16 such requests whose clients leave at once; then a short one"""
    for _ in range(16):
        served.send(CHAT, FORGET).close()
    return served.ask(CHAT, SHORT)[0]


def beside(served, path, body):
    """The slowest short request of another client while four such preparations run"""
    served.ask(CHAT, SHORT)
    with contextlib.ExitStack() as end:
        for _ in range(4):
            end.enter_context(served.send(path, body))
        return max(served.ask(CHAT, SHORT)[0] for _ in range(5))


def beside_schemas(served, schema):
    """Seven requests with a schema, which no other request had; then a short one without"""
    with contextlib.ExitStack() as end:
        for _ in range(7):
            new = {**schema, "title": str(time.perf_counter_ns())}
            body = {**SHORT, "max_tokens": 200,
                    "response_format": {"type": "json_schema", "json_schema": {"schema": new}}}
            end.enter_context(served.send(CHAT, body))
        return served.ask(CHAT, SHORT)[0]


def beside_rejected(served, n):
    """The slowest of five short requests of another client, while n connections send schemas that
    are rejected after 200,000 steps, one after another"""
    rejected, end = itertools.count(), threading.Event()

    def attack():
        while not end.is_set():
            schema = {"pattern": f".*a.{{14}}{time.perf_counter_ns()}"}
            served.ask(CHAT, {**SHORT, "guided_json": schema}, "192.0.2.1", 400)
            next(rejected)

    with ThreadPoolExecutor(n) as pool:
        running = [pool.submit(attack) for _ in range(n)]
        time.sleep(0.5)
        slowest = max(served.ask(CHAT, SHORT)[0] for _ in range(5))
        end.set()
        for attacker in running:
            attacker.result()
    assert next(rejected) >= n
    return slowest


def health(served):
    """600 idle sockets and 64 streams that are read; then /health"""
    with contextlib.ExitStack() as end:
        streams = [end.enter_context(served.send(TEXT, STREAM)) for _ in range(64)]

        def read(s):
            with contextlib.suppress(OSError):
                while s.recv(1 << 16):
                    pass

        readers = [threading.Thread(target=read, args=[s], daemon=True) for s in streams]
        for reader in readers:
            reader.start()
        for _ in range(600):
            end.enter_context(socket.create_connection(("127.0.0.1", served.port)))
        time.sleep(1)
        slowest = max(served.ask("/health")[0] for _ in range(5))
        assert all(reader.is_alive() for reader in readers), "a stream was cut off"
        return slowest


def ending(file, path, body, env=None):
    """SIGTERM while requests of a kind run; the seconds until the process has ended"""
    with Served(file, "--drain", "3", env=env) as served, contextlib.ExitStack() as end:
        for _ in range(16):
            end.enter_context(served.send(path, body))
        time.sleep(0.2)
        began = time.perf_counter()
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(120) == 0
        return time.perf_counter() - began


def rows(args):
    """(what, seconds at most, function) of each figure"""
    prompt = {"prompt": "word " * 60, "max_tokens": 4000, "n": 8}
    explanation = {"tokens": [5] * 60, "trajectory": True}
    with tempfile.TemporaryDirectory() as empty:
        served = Served(args.file)
        with served:
            yield "2,000 messages with forget", 0.5, lambda: forgetting(served)
            yield "a short request after 16 that were cancelled", 1, lambda: cancelled(served)
            with contextlib.suppress(AssertionError):    # compiles the trajectory's kernels
                served.ask(EXPLAIN, {"tokens": [5] * 9, "trajectory": True})
            for kind, path, body in PREPARATIONS:
                yield (f"a short request beside 4 with {kind}", 0.2,
                       lambda path=path, body=body: beside(served, path, body))
            for name, schema in SCHEMAS.items():
                yield (f"beside 7 schemas: {name}", 1,
                       lambda schema=schema: beside_schemas(served, schema))
            for n in REJECTED:
                yield (f"beside {n} connections with rejected schemas", 0.3,
                       lambda n=n: beside_rejected(served, n))
            yield "/health beside 600 idle sockets and 64 streams", 1, lambda: health(served)
        for what, path, body in (("prompts", TEXT, prompt), ("streams", TEXT, STREAM),
                                 ("explanations", EXPLAIN, explanation)):
            yield (f"from SIGTERM to the end, --drain 3, in {what}", 5,
                   lambda path=path, body=body: ending(args.file, path, body))
        for i in range(args.times):          # each with a cache of its own, so it compiles
            folder = os.path.join(empty, str(i))
            os.mkdir(folder)
        caches = iter(range(args.times))
        yield ("from SIGTERM to the end, --drain 3, in a compilation", 5,
               lambda: ending(args.file, EXPLAIN, explanation,
                              {"NUMBA_CACHE_DIR": os.path.join(empty, str(next(caches)))}))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", help="a chat checkpoint")
    parser.add_argument("--times", type=int, default=3, help="tries for each figure")
    parser.add_argument("--out", type=pathlib.Path, default=out_folder() / "serve_limits.txt")
    args = parser.parse_args()
    name, detail, _ = cpu_model()
    lines = [f"{name}, {detail}; the slowest of {args.times} tries", ""]
    well = True
    for what, most, measure in rows(args):
        seconds = max(measure() for _ in range(args.times))
        well &= seconds <= most
        lines.append(f"{what:<60}{seconds:>8.3f} s   limit {most:g} s"
                     f"{'' if seconds <= most else '   ABOVE IT'}")
        print(lines[-1], flush=True)
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(not well)


if __name__ == "__main__":
    sys.exit(main())
