"""Speed on this machine's CPU: NanoEuler beside the same model in PyTorch, in one run.

    python bench/bench_cpu.py                    everything, about 15 minutes; writes bench/out/
    python bench/bench_cpu.py --only train small     one part, printed only

One worker process an engine, all warm before anything is timed; then rounds in which the engines
take turns, so that a change of the machine's clock or load reaches all of them.  A figure is the
median over the rounds of the round's median; the spread is the lowest and highest round.  A round
in which other processes used more than 3 % of the CPU is repeated, whatever its times were.
"""
import argparse
import contextlib
import fcntl
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from common import cpu_model, out_folder

HERE = pathlib.Path(__file__).resolve().parent
WORKERS = HERE / "workers.py"
PRESETS = {"small": dict(tokens=16 * 128, steps=8, contexts=4, label="small, 16 x 128"),
           "big": dict(tokens=8 * 256, steps=3, contexts=1, label="big, 8 x 256")}
PARTS = ("train", "decode", "stolen", "kernel")
MAX_FOREIGN = 0.03                           # share of the CPU in a round
MAX_REPEATS = 20
BASE = "torch.compile"                       # every ratio is against this row


# ---- processes
class Worker:
    """An engine in its own process; ask(n) returns the seconds of n steps (or of n contexts)."""

    def __init__(self, command, threads, env=None):
        limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS",
                                                  "NUMBA_NUM_THREADS")}
        self.process = subprocess.Popen(command, env={**os.environ, **limits, **(env or {})},
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready = self.read()
        self.first = self.ready["first_s"]

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"worker stopped: {' '.join(map(str, self.process.args))}")
        return json.loads(line)

    def ask(self, n):
        self.process.stdin.write(f"{n}\n")
        self.process.stdin.flush()
        return self.read()

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def one_answer(task, preset, args, env=None):
    """A task that needs no turns: run it, return its single answer."""
    out = subprocess.run([sys.executable, str(WORKERS), "-", task, preset, str(args.threads)],
                         env={**os.environ, **(env or {})}, stdout=subprocess.PIPE, check=True)
    return json.loads(out.stdout)


class Ticks(NamedTuple):
    """CPU time since the machine started, in ticks of 10 ms or so, summed over its cores."""
    all: int
    busy: int                                # not idle; what the host has stolen is not idle
    own: int                                 # of the processes that were asked about


def cpu_ticks(pids):
    """Ticks, or None where there is no /proc.     proc(5)"""
    try:
        stat = pathlib.Path("/proc/stat").read_text(encoding="utf-8")
        fields = stat.splitlines()[0].split()[1:9]       # "cpu", then times of all cores
        user, nice, system, idle, iowait, irq, softirq, steal = map(int, fields)
        own = 0
        for pid in pids:
            text = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
            fields = text.rpartition(")")[2].split()     # after the name, which may hold blanks
            utime, stime, cutime, cstime = map(int, fields[11:15])
            own += utime + stime + cutime + cstime       # c...: its children that have ended
    except OSError:
        return None
    busy = user + nice + system + irq + softirq + steal
    return Ticks(busy + idle + iowait, busy, own)


def foreign_share(before, after):
    """The share of the machine's CPU time that went to others (stolen by the host included), None
    where it could not be measured."""
    if not before or not after or after.all == before.all:
        return None
    others = (after.busy - before.busy) - (after.own - before.own)
    return others / (after.all - before.all)


@contextlib.contextmanager
def busy_process(wanted):
    """A process that computes without pause, where one is wanted."""
    if not wanted:
        yield None
        return
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.2)
        yield process.pid
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def locked(path, kind=fcntl.LOCK_EX):
    """A lock on a file, for machines where other jobs agree to wait for it."""
    if not path:
        yield
        return
    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, kind)
        yield


class Turns(NamedTuple):
    rounds: dict                             # name -> median seconds of each round
    repeats: int                             # rounds that were repeated
    shares: list                             # of the CPU, that others took in each round


def take_turns(workers, n, args, stolen=False):
    rounds = {name: [] for name in workers}
    repeats = 0
    shares = []
    pids = [w.process.pid for w in workers.values()] + [os.getpid()]
    while len(shares) < args.rounds:
        with locked(args.lock), busy_process(stolen) as busy:
            mine = pids + [busy] if busy else pids
            before = cpu_ticks(mine)
            medians = {}
            for name, worker in workers.items():
                medians[name] = statistics.median(worker.ask(n))
                time.sleep(0.05)             # let the last engine's spinning threads go to sleep
            share = foreign_share(before, cpu_ticks(mine))
        if share is not None and share > MAX_FOREIGN and repeats < MAX_REPEATS:
            repeats += 1
            time.sleep(2)
            continue
        shares.append(share if share is None else round(share, 4))
        for name, seconds in medians.items():
            rounds[name].append(seconds)
    return Turns(rounds, repeats, shares)


def summary(turns, workers):
    """One row an engine: median, spread, ratio to torch.compile, every round for the record."""
    middle = {name: statistics.median(r) for name, r in turns.rounds.items()}
    return {"repeated_rounds": turns.repeats, "others_share": turns.shares,
            "rows": {name: {"median_s": middle[name], "min_s": min(r), "max_s": max(r),
                            "ratio": middle[BASE] / middle[name],
                            "first_call_s": workers[name].first, "rounds_s": r}
                     for name, r in turns.rounds.items()}}


# ---- what is measured
def engines(task, features, stub):
    """Row name -> (engine of workers.py, environment).  PyTorch emulates bfloat16 on a CPU that
    does not multiply it: a step of big takes minutes."""
    rows = {"NanoEuler": ("nanoeuler", {}), BASE: ("torch", {}),
            "PyTorch eager": ("torch-eager", {})}
    if task == "decode":
        rows["torch.compile, tuned (freezing, max-autotune, C++ wrapper)"] = ("torch-tuned", {})
        return rows
    if "avx512f" in features:
        rows["NanoEuler, 256-bit vectors"] = ("nanoeuler", {"NANOEULER_BITS": "256"})
    if stub:
        rows["torch.compile, MKL made to use AVX-512"] = ("torch", {"LD_PRELOAD": stub})
    if "avx512_bf16" in features:
        rows["NanoEuler, bfloat16"] = ("nanoeuler-bf16", {})
        rows["torch.compile, bf16 autocast (other precision)"] = ("torch-bf16", {})
    return rows


@contextlib.contextmanager
def started(rows, task, preset, args):
    """{name: worker}, started one after another, all warm before anything is timed."""
    workers = {}
    try:
        for name, (engine, env) in rows.items():
            print(f"  starting {name}", file=sys.stderr, flush=True)
            with locked(args.lock, fcntl.LOCK_SH):
                command = [sys.executable, str(WORKERS), engine, task, preset, str(args.threads)]
                workers[name] = Worker(command, args.threads, env)
        yield workers
    finally:
        for worker in workers.values():
            worker.close()


def run_task(task, preset, args, rows):
    """The training step, or decoding."""
    with started(rows, task, preset, args) as workers:
        n = PRESETS[preset]["steps" if task == "train" else "contexts"]
        return summary(take_turns(workers, n, args), workers)


def run_stolen(preset, args, rows):
    """The training step alone, and again while another process computes without pause."""
    rows = {name: rows[name] for name in ("NanoEuler", BASE, "PyTorch eager")}
    with started(rows, "train", preset, args) as workers:
        n = PRESETS[preset]["steps"]
        alone = summary(take_turns(workers, n, args), workers)
        stolen = summary(take_turns(workers, n, args, stolen=True), workers)
    for name, row in stolen["rows"].items():
        row["speed_left"] = alone["rows"][name]["median_s"] / row["median_s"]
    return {"alone": alone, "stolen": stolen}


def run_kernel(preset, args):
    """matmul on the forward's shapes as a share of this core's FMA peak, one core."""
    with locked(args.lock):                    # compiles too: some 20 s a preset
        raw = one_answer("kernel", preset, args, {"NUMBA_NUM_THREADS": "1"})
    out = {}
    for dtype, r in raw.items():
        peaks = {bits: statistics.median(rates) for bits, rates in r["peak"].items()}
        bits = max(peaks, key=peaks.get)
        out[dtype] = {"peak_flops": peaks[bits], "peak_bits": int(bits), "peaks_flops": peaks}
        for mode in ("hot", "step"):
            shapes = {name: statistics.median(rates) for name, rates in r[mode].items()}
            seconds = sum(r["flop"][name] / rate for name, rate in shapes.items())
            share = sum(r["flop"].values()) / seconds / peaks[bits]
            out[dtype][mode] = {"shapes_flops": shapes, "share": share}
    return out


# ---- the machine
def gemm_code(env):
    """What torch's float32 GEMM runs: the hottest MKL function if perf is here, else what
    MKL_VERBOSE says (which names no instruction set on other vendors' CPUs)."""
    code = "import torch\na = torch.ones(1024, 1024)\nfor _ in range(50): a @ a"
    run = [sys.executable, "-c", code]
    env = {**os.environ, **env, "OMP_NUM_THREADS": "1"}
    if shutil.which("perf"):
        with tempfile.TemporaryDirectory() as folder:
            data = str(pathlib.Path(folder, "perf.data"))
            subprocess.run(["perf", "record", "-e", "cpu-clock", "-o", data, *run], env=env,
                           capture_output=True)
            report = subprocess.run(["perf", "report", "-i", data, "--stdio"],
                                    capture_output=True, text=True).stdout
        names = re.findall(r"\bmkl_blas_\w*gemm\w*", report)
        if names:
            zen = ", its AVX2 code for AMD" if names[0].endswith("_zen") else ""
            return f"{names[0]}{zen}"
    env["MKL_VERBOSE"] = "1"
    out = subprocess.run(run, env=env, capture_output=True, text=True).stdout
    found = re.search(r"for Intel\(R\) 64 architecture (.*?), Lnx", out)
    return found.group(1) if found else "not reported"


def build_stub(folder, facts):
    """The library that makes MKL treat any CPU as Intel's; None where it would change nothing.

    MKL picks AVX2 code on other vendors' CPUs even where they have AVX-512: this stands for what
    the peer would do with its widest GEMM."""
    gcc = shutil.which("gcc")
    other_vendor = facts.get("vendor_id") != "GenuineIntel"
    if not (gcc and other_vendor and "avx512f" in facts.get("flags", "")):
        return None
    source, library = pathlib.Path(folder, "stub.c"), pathlib.Path(folder, "stub.so")
    source.write_text("int mkl_serv_intel_cpu_true(void) { return 1; }\n", encoding="utf-8")
    subprocess.run([gcc, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return str(library)


def machine(args, stub):
    name, detail, facts = cpu_model()
    v = one_answer("versions", "small", args)
    wanted = ("avx2", "fma", "avx512f", "avx512bw", "avx512_bf16", "amx_tile", "asimd", "sve")
    flags = facts.get("flags", facts.get("Features", "")).split()
    words = re.sub(r"\(R\)|\(TM\)|CPU|Processor|@.*", " ", name)
    slug = re.sub(r"[^a-z0-9]+", "-", f"{words} {v['llvm_cpu']}".lower()).strip("-")
    return {"cpu": name, "cpu_detail": detail, "slug": slug, "cores": os.cpu_count(),
            "hypervisor": "hypervisor" in flags, "features": [f for f in wanted if f in flags],
            "threads": args.threads, "load_average": os.getloadavg(),
            "torch_gemm": gemm_code({}),
            "torch_gemm_stub": gemm_code({"LD_PRELOAD": stub}) if stub else None,
            "date": time.strftime("%Y-%m-%d"), "versions": v}


# ---- the report
def ms(seconds):
    return f"{seconds * 1e3:.1f}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def quiet_note(result):
    """How undisturbed the rounds behind a table were."""
    if None in result["others_share"]:
        return ["", f"{len(result['others_share'])} rounds; what other processes took of the CPU "
                    f"was not measured."]
    return ["", f"{len(result['others_share'])} rounds; other processes took at most "
                f"{100 * max(result['others_share']):.1f} % of the CPU in one; "
                f"{result['repeated_rounds']} repeated for more than {100 * MAX_FOREIGN:.0f} %."]


def train_table(result, tokens):
    lines = ["| engine | ms a step | lowest - highest round | tokens/s | against torch.compile |",
             "|---|---:|---:|---:|---:|"]
    for name, r in result["rows"].items():
        lines.append(f"| {name} | {ms(r['median_s'])} | {ms(r['min_s'])} - {ms(r['max_s'])} | "
                     f"{tokens / r['median_s']:,.0f} | {r['ratio']:.2f}x |")
    return lines + quiet_note(result)


def decode_table(result):
    lines = ["| engine | us a token | lowest - highest round | tokens/s | against torch.compile |",
             "|---|---:|---:|---:|---:|"]

    def us(seconds):
        return f"{seconds * 1e6:,.0f}"

    for name, r in result["rows"].items():
        lines.append(f"| {name} | {us(r['median_s'])} | {us(r['min_s'])} - {us(r['max_s'])} | "
                     f"{1 / r['median_s']:,.0f} | {r['ratio']:.2f}x |")
    return lines + quiet_note(result)


def stolen_table(result):
    lines = ["| engine | alone, ms | one core stolen, ms | speed left |", "|---|---:|---:|---:|"]
    for name, r in result["stolen"]["rows"].items():
        lines.append(f"| {name} | {ms(result['alone']['rows'][name]['median_s'])} | "
                     f"{ms(r['median_s'])} | {100 * r['speed_left']:.0f} % |")
    return lines + quiet_note(result["stolen"])


def kernel_table(results):
    lines = ["| preset, type | FMA peak of one core | operands | share of the peak | by shape |",
             "|---|---:|---|---:|---|"]
    for preset, by_type in results.items():
        for dtype, r in by_type.items():
            for mode, where in (("hot", "in the cache"), ("step", "as in a step")):
                shapes = ", ".join(f"{n} {100 * f / r['peak_flops']:.0f}"
                                   for n, f in r[mode]["shapes_flops"].items())
                lines.append(f"| {preset}, {dtype} | {r['peak_flops'] / 1e9:.1f} Gflop/s "
                             f"({r['peak_bits']}-bit) | {where} | {100 * r[mode]['share']:.1f} % | "
                             f"{shapes} |")
    return lines


def markdown(results):
    m = results["machine"]
    v = m["versions"]
    lines = [f"## {m['cpu']} ({m['cpu_detail']}, {v['llvm_cpu']}), {m['threads']} threads", "",
             f"{m['cores']} cores{', virtual machine' if m['hypervisor'] else ''}; "
             f"{', '.join(m['features'])}; load average at the start "
             f"{' '.join(f'{x:.2f}' for x in m['load_average'])}; {m['date']}.",
             f"Python {v['python']}, numba {v['numba']}, llvmlite {v['llvmlite']}, numpy "
             f"{v['numpy']}, torch {v['torch']} ({'; '.join(v['torch_build'])}).",
             f"torch's float32 GEMM runs {m['torch_gemm']}."]
    if m["torch_gemm_stub"]:
        lines.append(f"In the row made to use AVX-512 (a preloaded stub answers MKL's question "
                     f"for the vendor) it runs {m['torch_gemm_stub']}.")
    lines += ["Medians over rounds of the round's median, engines interleaved, float32 unless "
              "said otherwise."]
    for preset, r in results.get("train", {}).items():
        lines += ["", f"### Training step, {PRESETS[preset]['label']}", "",
                  *train_table(r, PRESETS[preset]["tokens"])]
    for preset, r in results.get("decode", {}).items():
        lines += ["", f"### Decoding, batch 1, whole contexts, {preset}", "", *decode_table(r)]
    for preset, r in results.get("stolen", {}).items():
        lines += ["", f"### Training step with one core stolen, {preset}", "", *stolen_table(r)]
    if results.get("kernel"):
        lines += ["", "### matmul against the core's FMA peak (one core, W packed)", "",
                  *kernel_table(results["kernel"])]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD",
                        help="parts (train decode stolen kernel) and presets (small big) to run; "
                             "prints, writes no file")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of turns (default 9)")
    parser.add_argument("--threads", type=int, default=2, help="threads of each engine (default 2)")
    parser.add_argument("--lock", metavar="FILE",
                        help="lock FILE in each timed round (shared: while workers start)")
    parser.add_argument("--out", default=str(out_folder()), help="folder (default %(default)s)")
    args = parser.parse_args()
    parts = [p for p in PARTS if p in args.only] or PARTS
    presets = [p for p in PRESETS if p in args.only] or list(PRESETS)
    unknown = set(args.only) - {*PARTS, *PRESETS}
    if unknown:
        parser.error(f"--only knows {' '.join([*PARTS, *PRESETS])}, not {sorted(unknown)}")
    with tempfile.TemporaryDirectory() as folder:
        stub = build_stub(folder, cpu_model().facts)
        with locked(args.lock, fcntl.LOCK_SH):
            results = {"machine": machine(args, stub)}
        for part in parts:
            for preset in presets:
                print(f"{part} {preset}", file=sys.stderr, flush=True)
                rows = engines(part, results["machine"]["features"], stub)
                if part in ("train", "decode"):
                    r = run_task(part, preset, args, rows)
                elif part == "stolen":
                    r = run_stolen(preset, args, rows)
                else:
                    r = run_kernel(preset, args)
                results.setdefault(part, {})[preset] = r
    text = markdown(results)
    print(text)
    if not args.only:
        folder = pathlib.Path(args.out)
        folder.mkdir(parents=True, exist_ok=True)
        stem = folder / f"cpu_{results['machine']['slug']}"
        stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        stem.with_suffix(".md").write_text(text, encoding="utf-8")
        print(f"written: {stem}.json and .md", file=sys.stderr)


if __name__ == "__main__":
    main()
