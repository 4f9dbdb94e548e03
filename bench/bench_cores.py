"""The training step on 1, 2, 4, ... cores of this machine, beside PyTorch on all of them.

    python bench/bench_cores.py                  within nine minutes on 16 cores; writes bench/out/
    python bench/bench_cores.py small big        some presets
    python bench/bench_cores.py --threads 1 2    other numbers of threads

One worker process an engine, type and number of threads, all warm before anything is timed; then
rounds in which they take turns.  A figure is the median over the rounds of the round's median step;
the spread is the lowest and the highest round.  PyTorch is eager and compiled, in float32 and with
bf16 autocast; a ratio is against the faster of the two in the same type.  The gradients of the
first step, hashed, must be the same for every number of threads.
"""
import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

import bench_cpu
import common
from bench_cpu import ms

HERE = pathlib.Path(__file__).resolve()
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
BATCH = {"small": 16, "big": 8, "base": 8}   # sequences a step
TYPES = "f32", "bf16"
TORCH = "PyTorch", "torch.compile"
NANOEULER = "NanoEuler"


# ---- a worker
def batch_of(preset, cfg):
    """tokens (B, T) and the targets (P, B, T) of all heads, the same for every engine."""
    import numpy as np
    T = cfg.seq_len
    stream = np.random.default_rng(1).integers(0, cfg.vocab_size, (BATCH[preset], T + cfg.n_mtp),
                                               dtype=np.int32)
    targets = np.stack([stream[:, k + 1:k + 1 + T] for k in range(cfg.n_mtp)])
    return np.ascontiguousarray(stream[:, :T]), targets


def nanoeuler_step(preset, dtype, threads):
    """step() -> None, and the hash of the first gradients"""
    from numba import set_num_threads

    import nanoeuler as ne
    set_num_threads(threads)
    cfg = ne.PRESETS[preset]
    tokens, targets = batch_of(preset, cfg)
    weight = ne.loss_weights(targets, 0.3)
    model = ne.Model(cfg, ne.init_params(cfg, 0), dtype=ne.PRECISIONS[dtype])
    hyper = ne.hyper_at(1, 1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1, clip=1.0)

    def step():
        model.gradient(tokens, targets, weight)
        model.update(hyper)

    model.gradient(tokens, targets, weight)
    gradient = hashlib.sha256(model.g_flat).hexdigest()[:16]
    model.update(hyper)
    return step, gradient


def torch_step(preset, dtype, threads, compiled):
    import torch
    from oracles import torch_peer as peer

    import nanoeuler as ne
    torch.set_num_threads(threads)
    cfg = peer.peer_config(ne.PRESETS[preset])
    idx, targets = (torch.from_numpy(x).long() for x in batch_of(preset, cfg))
    step = peer.make_step(peer.Peer(cfg), compiled=compiled, bf16=dtype == "bf16")
    for _ in range(1 + compiled):
        step(idx, targets)
    return lambda: step(idx, targets)


def work(engine, preset, dtype, threads):
    """Says {"gradient": hash or None} when it is warm; for each n read, the seconds of n steps."""
    say = common.protocol()
    gradient = None
    if engine == NANOEULER:
        step, gradient = nanoeuler_step(preset, dtype, threads)
    else:
        step = torch_step(preset, dtype, threads, engine == "torch.compile")
    say({"gradient": gradient})
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        say(seconds)


class Worker(bench_cpu.Worker):
    """An engine in a process of its own, which `ready` waits for: all can start at once."""

    def __init__(self, row):
        self.row, threads = row, str(row["threads"])
        limits = {name: threads for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS",
                                             "NUMBA_NUM_THREADS")}
        command = [sys.executable, str(HERE), "--worker", row["engine"], row["preset"],
                   row["dtype"], threads]
        self.process = subprocess.Popen(command, env={**os.environ, **limits}, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ready(self):
        self.row["gradient"] = self.read()["gradient"]


# ---- what is measured
def rows_of(preset, threads):
    """What is timed: NanoEuler with each number of threads, PyTorch with the most."""
    rows = []
    for dtype in TYPES:
        for engine in (NANOEULER, *TORCH):
            for n in threads if engine == NANOEULER else threads[-1:]:
                rows.append(dict(engine=engine, preset=preset, dtype=dtype, threads=n, rounds=[]))
    return rows


def measure(preset, threads, args):
    """The rows of a preset, with the seconds of their rounds."""
    rows = rows_of(preset, threads)
    with contextlib.ExitStack() as end:
        # those of one number of threads after another: a share of the cores for each
        workers = []
        for row in rows:
            workers.append(Worker(row))
            end.callback(workers[-1].close)
        for worker in workers:
            worker.ready()
            print(f"  ready: {name_of(worker.row)}", file=sys.stderr, flush=True)
        began = time.perf_counter()
        for number in range(args.rounds):
            for worker in workers:
                seconds = worker.ask(1)    # awake, caches warm; of slow ones, all there is
                if seconds[0] < args.slow:
                    n = max(2, min(20, int(args.slow / seconds[0])))
                    seconds = worker.ask(n)
                worker.row["rounds"].append(statistics.median(seconds))
                time.sleep(0.05)             # until its spinning threads sleep
            spent = time.perf_counter() - began
            if number and spent * (number + 2) / (number + 1) > args.seconds:
                break
    return rows


def machine():
    """What `lscpu` says of it, and versions."""
    name, detail, facts = common.cpu_model()
    said = {}
    with contextlib.suppress(OSError):
        text = subprocess.run(["lscpu"], capture_output=True, text=True,
                              env={**os.environ, "LC_ALL": "C"}).stdout
        said = dict(re.findall(r"^\s*([^:]+):\s*(.*)$", text, re.M))
    flags = facts.get("flags", "").split()
    from nanoeuler_parts.machine.cpu import BITS
    from nanoeuler_parts.machine.threads import physical_cores
    return {"cpu": said.get("Model name", name), "detail": detail,
            "lscpu": {key: said.get(key, "?") for key in (
                "CPU(s)", "Thread(s) per core", "Core(s) per socket", "Socket(s)", "NUMA node(s)",
                "L2 cache", "L3 cache", "Hypervisor vendor")},
            "features": [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in flags],
            "cores": physical_cores(), "vector_bits": BITS, "llvm_cpu": llvm_cpu(),
            "load_average": os.getloadavg(), "date": time.strftime("%Y-%m-%d"),
            "python": sys.version.split()[0],
            **common.versions("numpy", "numba", "llvmlite", "torch")}


def llvm_cpu():
    import llvmlite.binding as llvm
    return llvm.get_host_cpu_name()


# ---- the report
def name_of(row):
    return f"{row['engine']}, {row['dtype']}, {row['threads']}"


def same_bits(rows):
    """dtype -> whether the gradients are the same for every number of threads"""
    found = {dtype: {r["gradient"] for r in rows if r["gradient"] and r["dtype"] == dtype}
             for dtype in TYPES}
    return {dtype: len(hashes) == 1 for dtype, hashes in found.items()}


def table(rows):
    """Of one preset: ms a step, spread, speed against one thread (or the fewest) and PyTorch."""
    middle = {name_of(r): statistics.median(r["rounds"]) for r in rows}
    ours = [r for r in rows if r["engine"] == NANOEULER]
    lines = ["| engine | type | threads | ms a step | lowest - highest round | faster than with "
             "the fewest | faster than PyTorch |", "|---|---|---:|---:|---:|---:|---:|"]
    for r in rows:
        seconds, fewest, beside = middle[name_of(r)], "", ""
        if r in ours:
            first = next(x for x in ours if x["dtype"] == r["dtype"])
            fewest = f"{middle[name_of(first)] / seconds:.2f}x"
            peers = [middle[name_of(x)] for x in rows if x["engine"] in TORCH
                     and (x["dtype"], x["threads"]) == (r["dtype"], r["threads"])]
            beside = f"{min(peers) / seconds:.2f}x" if peers else ""
        lines.append(f"| {r['engine']} | {r['dtype']} | {r['threads']} | {ms(seconds)} | "
                     f"{ms(min(r['rounds']))} - {ms(max(r['rounds']))} | {fewest} | {beside} |")
    return lines


def markdown(results):
    m = results["machine"]
    facts = ", ".join(f"{key} {value}" for key, value in m["lscpu"].items())
    lines = [f"## {m['cpu']} ({m['llvm_cpu']})", "", f"lscpu: {facts}; {', '.join(m['features'])}; "
             f"vectors of {m['vector_bits']} bits; {m['date']}; load average at the start "
             f"{m['load_average'][0]:.2f}.",
             f"Python {m['python']}, numba {m['numba']}, llvmlite {m['llvmlite']}, numpy "
             f"{m['numpy']}, torch {m['torch']}.",
             "A training step: forward, backward, clipping, AdamW.  Medians over rounds of the "
             "round's median; processes of their own, in turns."]
    for preset, rows in results["presets"].items():
        lines += ["", f"### {preset}, {BATCH[preset]} sequences", "", *table(rows), ""]
        for dtype, same in same_bits(rows).items():
            n = ", ".join(str(r["threads"]) for r in rows
                          if r["engine"] == NANOEULER and r["dtype"] == dtype)
            lines.append(f"Gradients in {dtype} on {n} threads: "
                         f"{'the same bits' if same else 'DIFFERENT BITS'}.")
    return "\n".join(lines) + "\n"


def powers(most):
    """1, 2, 4, ... and the most"""
    return sorted({most, *(1 << i for i in range(most.bit_length()) if 1 << i <= most)})


def main():
    if sys.argv[1:2] == ["--worker"]:
        engine, preset, dtype, threads = sys.argv[2:]
        return work(engine, preset, dtype, int(threads))
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("presets", nargs="*", metavar="PRESET", help=f"of {', '.join(BATCH)}; "
                        f"without any, all of them")
    parser.add_argument("--threads", type=int, nargs="+", metavar="N",
                        help="numbers of threads (default 1, 2, 4, ... up to all processors; base: "
                             "the last two)")
    parser.add_argument("--rounds", type=int, default=7, help="at most (default 7)")
    parser.add_argument("--seconds", type=float, default=75,
                        help="of rounds for each preset, but for two rounds (default 75)")
    parser.add_argument("--slow", type=float, default=0.6,
                        help="a step this long is a turn (default 0.6 s)")
    parser.add_argument("--out", default=str(common.out_folder()), help="folder (default "
                                                                        "%(default)s)")
    args = parser.parse_args()
    if unknown := set(args.presets) - set(BATCH):
        parser.error(f"no preset {sorted(unknown)}, expected {', '.join(BATCH)}")
    from nanoeuler_parts.kernels import compile_kernels
    from nanoeuler_parts.machine.threads import most_threads
    for dtype in TYPES:
        compile_kernels(dtype)
    results = {"machine": machine(), "presets": {}}
    words = re.sub(r"\(R\)|\(TM\)|CPU|Processor|@.*", " ", results["machine"]["cpu"])
    slug = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
    stem = pathlib.Path(args.out) / f"cores_{slug}"
    pathlib.Path(args.out).mkdir(parents=True, exist_ok=True)
    for preset in args.presets or BATCH:
        threads = sorted(args.threads or powers(most_threads()))
        if preset == "base" and not args.threads:
            threads = threads[-2:]           # with one, a step takes half a minute
        print(f"{preset}, {threads} threads", file=sys.stderr, flush=True)
        results["presets"][preset] = measure(preset, threads, args)
        stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        stem.with_suffix(".md").write_text(markdown(results), encoding="utf-8")
    print(markdown(results))
    print(f"written: {stem}.json and .md", file=sys.stderr)


if __name__ == "__main__":
    main()
