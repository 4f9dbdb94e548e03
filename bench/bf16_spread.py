"""Does bfloat16 cost anything?  Runs of `train small` from starts 1e-7 apart, in both types.

    python bench/bf16_spread.py --runs 12 --steps 1200 --jobs 12

Run k of either type begins at the same weights, each off by a factor of 1 + 1e-7 times a normal
number, and reads the same batches.  Their ends differ by what training makes of rounding: the mean
of one type is compared with that of the other by the spread of both.
"""
import argparse
import json
import multiprocessing
import pathlib
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed

import numpy as np
from numba import set_num_threads

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import nanoeuler as ne
from perturb import perturbed
from nanoeuler_parts.checkpoint.file import Checkpoint
from nanoeuler_parts.kernels import compile_kernels
from nanoeuler_parts.runs.evaluation import evaluate
from nanoeuler_parts.runs.options import TrainOptions
from nanoeuler_parts.runs.run import Run


class Start(Run):
    """A run from weights that are a little off: the `k`-th of such."""
    k = 0

    def initial(self, cfg):
        flat = super().initial(cfg)
        flat[:] = perturbed(flat, np.random.default_rng(self.k))
        return flat

    def print_settings(self):
        pass

    def write(self, **values):               # there is no log
        pass

    def validate(self):
        pass

    def save(self, best=False):
        return True

    def report(self, r, step_time):
        pass


def bits_per_byte(options, k):
    """Of the held-out tail, after a run from start k, by one thread."""
    set_num_threads(1)
    Start.k = k
    start = Checkpoint(ne.PRESETS["small"], None, ne.State(n_steps=options.steps), None, ())
    with tempfile.TemporaryDirectory() as folder:
        run = Start(str(pathlib.Path(folder, "run.bin")), start, options)
    run.start_clock()
    ne.train(run)
    return evaluate(run.model, *run.data.validation)


def ends_of(runs, jobs, **chosen):
    """dtype -> bits per byte of each run; so many at a time"""
    ends = {dtype: [0.0] * runs for dtype in ne.PRECISIONS}
    for dtype in ends:
        compile_kernels(dtype)
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        places = {}
        for k in range(runs):
            for dtype in ends:
                options = TrainOptions(dtype=dtype, **chosen).check()
                places[pool.submit(bits_per_byte, options, k)] = dtype, k
        for done in as_completed(places):
            dtype, k = places[done]
            ends[dtype][k] = done.result()
            print(f"{dtype}, run {k}: {ends[dtype][k]:.4f}", flush=True)
    return ends


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--runs", type=int, default=12, help="of each type (default 12)")
    parser.add_argument("--steps", type=int, default=1200, help="of each run (default 1200)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default 2)")
    parser.add_argument("--out", help="JSON file to write")
    args = parser.parse_args()
    ends = ends_of(args.runs, args.jobs, steps=args.steps, optimizer="muon", warmup=25,
                   data=str(ROOT / TrainOptions.data))
    for dtype, bits in ends.items():
        print(f"{dtype}: mean {statistics.mean(bits):.5f}, spread {statistics.stdev(bits):.5f}, "
              f"{min(bits):.5f} to {max(bits):.5f}")
    if args.out:
        found = dict(steps=args.steps, bits_per_byte=ends)
        pathlib.Path(args.out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
