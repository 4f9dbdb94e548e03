"""How much text a model needs: the first bytes of data/shakespeare.txt, at several sizes.

    nice python bench/text_sizes.py              all rows, about 15 minutes on two idle cores

Each row trains a new model with `nanoeuler.py train`, for a fixed number of steps, and validates on
the last 10% of its own text.  The machine may be shared with other programs, so the time of a row
is the CPU time of its process, divided by the number of threads.  Writes text_sizes.json and
text_sizes.md to bench/out.
"""
import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
from typing import NamedTuple

from common import BENCH, cpu_model, out_folder

ROOT = BENCH.parent
THREADS = 2


class Row(NamedTuple):
    size: int                                # bytes of text; 0: the whole file
    preset: str
    steps: int
    every: int                               # steps between two validations


ROWS = [Row(100_000, "small", 500, 50), Row(300_000, "small", 1_100, 100),
        Row(1_000_000, "small", 3_200, 200), Row(0, "small", 3_200, 400),
        Row(0, "big", 1_300, 200)]


def cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(row, folder):
    """dict: what the run printed and logged"""
    text = (ROOT / "data/shakespeare.txt").read_bytes()
    path = folder / "text.txt"
    path.write_bytes(text[:row.size] if row.size else text)
    command = [sys.executable, str(ROOT / "nanoeuler.py"), "train", row.preset, "--data", str(path),
               "--steps", str(row.steps), "--eval-every", str(row.every), "--keep-best", "--force",
               "--out", str(folder / "model.bin")]
    before = cpu_seconds()
    subprocess.run(command, check=True, stdout=sys.stderr,
                   env={**os.environ, "NUMBA_NUM_THREADS": str(THREADS)})
    seconds = cpu_seconds() - before
    log = [json.loads(line) for line in
           (folder / "model.jsonl").read_text(encoding="utf-8").splitlines()]
    held_out = [(x["step"], x["val_bits_per_byte"]) for x in log if "val_bits_per_byte" in x]
    return dict(bytes=path.stat().st_size, preset=row.preset, steps=row.steps,
                tokens=row.steps * 2048, cpu_minutes=seconds / 60, held_out=held_out)


def markdown(found):
    lines = [f"# Text size and what a model learns\n\n{found['machine']}, {THREADS} threads.  The "
             "minutes are CPU time divided by the threads, with compilation and validation.\n",
             "| bytes of text | preset | steps | minutes | best step | best held-out bits per byte "
             "| at the end |", "|---:|---|---:|---:|---:|---:|---:|"]
    for x in found["rows"]:
        step, best = min(x["held_out"], key=lambda at: at[1])
        lines.append(f"| {x['bytes']:,} | {x['preset']} | {x['steps']:,} "
                     f"| {x['cpu_minutes'] / THREADS:.1f} | {step:,} | {best:.3f} "
                     f"| {x['held_out'][-1][1]:.3f} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=None, help="folder of the results")
    args = parser.parse_args()
    folder = args.out or out_folder()
    found = dict(machine=f"{cpu_model().name}, {cpu_model().detail}", rows=[])
    for row in ROWS:
        with tempfile.TemporaryDirectory() as work:
            found["rows"].append(measure(row, pathlib.Path(work)))
        (folder / "text_sizes.json").write_text(json.dumps(found, indent=1) + "\n",
                                                encoding="utf-8")
        (folder / "text_sizes.md").write_text(markdown(found), encoding="utf-8")


if __name__ == "__main__":
    main()
