"""What benchmarks share: facts about the machine, and how a worker process speaks."""
import contextlib
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple


BENCH = pathlib.Path(__file__).resolve().parent


def shapes():
    """{name: Config} of the presets, and of the shapes of models that people import.

    qwen3-0.6b, llama-3.2-1b    Qwen3 0.6B, and Llama 3.2 1B without its scaled RoPE
    0.6b, 1b    the same with a vocabulary of 32,768, untied embeddings and no norms of q and k
    speedrun    the model of `make speedrun`"""
    import nanoeuler as ne
    qwen = ne.Config(n_embd=1024, n_hidden=3072, n_layer=28, n_head=16, n_kv_head=8, head_dim=128,
                     vocab_size=32_768, n_mtp=1, seq_len=512, rope_theta=1e6)
    llama = ne.Config(n_embd=2048, n_hidden=8192, n_layer=16, n_head=32, n_kv_head=8, head_dim=64,
                      vocab_size=32_768, n_mtp=1, seq_len=512, rope_theta=5e5)
    return {**ne.PRESETS, "0.6b": qwen, "1b": llama,
            "qwen3-0.6b": ne.replace(qwen, vocab_size=151_936, tie_embeddings=True, qk_norm=True),
            "llama-3.2-1b": ne.replace(llama, vocab_size=128_256, tie_embeddings=True),
            "speedrun": ne.replace(ne.PRESETS["base"], vocab_size=16_384, n_mtp=1)}


def out_folder():
    """Where benchmarks write unless --out says otherwise; git ignores it.  What is to be published
    is copied from there to bench/results/, on purpose."""
    folder = BENCH / "out"
    folder.mkdir(exist_ok=True)
    return folder


class Cpu(NamedTuple):
    name: str                                # as the system names it
    detail: str                              # family, model, stepping
    facts: dict                              # of the first core, from /proc/cpuinfo


def cpu_model():
    facts = {}
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    name = facts.get("model name") or platform.processor() or platform.machine()
    family, model, stepping = (facts.get(k, "?") for k in ("cpu family", "model", "stepping"))
    return Cpu(name, f"family {family} model {model} stepping {stepping}", facts)


def version(package):
    """None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions(*packages):
    return {package: version(package) for package in packages}


def character_start(data, at):
    """The last place of UTF-8 up to `at` where a character starts, or the end."""
    while at < len(data) and data[at] & 0xC0 == 0x80:
        at -= 1
    return at


def watched(*args):
    """Runs nanoeuler.py, and returns (its output, seconds, peak of its own memory in bytes): the
    largest RssAnon of the process (Linux), looked at 50 times per second."""
    began, most = time.perf_counter(), 0
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        process = subprocess.Popen([sys.executable, BENCH.parent / "nanoeuler.py", *map(str, args)],
                                   stdout=out, stderr=out)
        while process.poll() is None:
            try:
                status = pathlib.Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
                most = max(most, 1024 * int(status.split("RssAnon:")[1].split()[0]))
            except (OSError, IndexError):    # it has just ended
                pass
            time.sleep(0.02)
        seconds = time.perf_counter() - began
        out.seek(0)
        said = out.read()
    assert process.returncode == 0, said
    return said, seconds, most


def protocol():
    """say(value), which writes a JSON value a line to stdout.  From now on what anybody else
    prints, libraries included, goes to stderr."""
    stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(value):
        print(json.dumps(value), file=stdout, flush=True)
    return say
