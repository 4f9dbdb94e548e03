"""Training by several processes, with the CPU engine in float64 and sockets for what NCCL does: it
is what the tests of the ranks run, one process each.

    python tests/oracles/cpu_ranks.py RANK SIZE PORT VERB FLAGS...
    mpirun -np 2 python tests/oracles/cpu_ranks.py launched VERB FLAGS...

The second form takes its rank, and the address of rank 0, from torchrun, mpirun or srun.

The sums of gradients are in the order of ranks, and everyone updates a part, as on GPUs."""
import contextlib
import errno
import math
import os
import signal
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT)]
import nanoeuler as ne
from nanoeuler_parts.cli import parse, VERBS
from nanoeuler_parts.files.errors import problem
from nanoeuler_parts.files.logs import alone
from nanoeuler_parts.gpu import place
from nanoeuler_parts.machine.threads import use_threads
from nanoeuler_parts.ranks import engine, processes, sockets
from nanoeuler_parts.runs.run import Run
from nanoeuler_parts.runs.start import launch
from nanoeuler_parts.tuning.dpo import DpoRun
from nanoeuler_parts.tuning.sft import SftRun

RUNS = {run.verb: run for run in (Run, SftRun, DpoRun)}


class Wide(ne.Model):
    """The CPU engine in float64, of a run whose options say float32"""

    def __init__(self, cfg, flat, moments=(), options=None):
        moments = np.array(moments, np.float64) if len(moments) else ()
        super().__init__(cfg, flat.astype(np.float64), tuple(moments))

    @staticmethod
    def ready(options=None):
        pass

    def buffers(self):
        return [x.astype(np.float32) for x in (self.flat, self.m, self.v)]


class CpuRanked(engine.DataParallel, Wide):
    """Where others are, moments are not numbers: who reads them is found out."""

    def __init__(self, cfg, flat, moments=(), options=None):
        super().__init__(cfg, flat, moments, options)
        for x in self.m, self.v:
            x[:self.own.start] = x[self.own.stop:] = math.nan

    @property
    def own(self):
        return self.owned(self.flat.size)

    def sum_gradients(self):
        """As nanoeuler_cuda's kernel: in the order of the ranks"""
        for rank, where in enumerate(self.shards(self.flat.size)):
            said = self.ranks.all(self.g_flat[where].tolist(), f"the gradient of {rank}")
            if rank == self.ranks.rank:
                total = np.array(said[0])
                for g in said[1:]:
                    total = total + np.array(g)
                self.g_flat[where] = total
            else:
                self.g_flat[where] = 0

    def update_shard(self, hyper):
        g = self.g_flat[self.own]
        squares = self.ranks.all(float((g * g).sum()), "the norm")
        norm = math.sqrt(math.fsum(squares))
        ce, self.ce = self.ce, np.zeros(self.cfg.n_mtp)
        self.has_failed = not math.isfinite(norm)
        if not self.has_failed:
            self.update_by_adamw(self.own, hyper, ne.clipping(norm, hyper))
        self.weighted_heads = set()
        return lambda: (ce, norm)

    def whole(self, x):
        return np.concatenate(self.ranks.all(x[self.own].tolist(), "a buffer"))

    def gather_parameters(self):
        self.flat[:] = self.whole(self.flat)
        self.pack()

    def buffers(self):
        return [self.whole(x).astype(np.float32) for x in (self.flat, self.m, self.v)]


def dies_at(run, step, rank, how):
    """A run in which a rank is killed, or stands still, before its step, or has no room to write"""
    class Dying(run):
        def ce_weights(self, tokens, targets):           # at the beginning of a step
            if self.state.step == step and self.model.ranks.rank == rank:
                if how == "ENOSPC":
                    raise OSError(errno.ENOSPC, "No space left on device", "the log")
                os.kill(os.getpid(), getattr(signal, how))
            return super().ce_weights(tokens, targets)
    return Dying


def main(rank, *args):
    if rank == "launched":
        verb, *flags = args
        here = place.PLACE
    else:
        size, port, verb, *flags = args
        here = place.Place(int(rank), int(size), int(rank), ("127.0.0.1", int(port)))
    run, lock = RUNS[verb], alone
    if fault := os.environ.get("FAULT"):
        step, who, how = fault.split()
        run = dies_at(run, int(step), int(who), how)
        # only a rank that stands still is found by its silence; others leave a closed socket
        sockets.HEARTBEAT_SECONDS = 1.0
        sockets.SILENCE_SECONDS = 6.0 if how == "SIGSTOP" else 3600.0
    ranks = sockets.Ranks(here)
    CpuRanked.ranks = ranks
    if ranks.rank:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
        sys.stderr = processes.RankErrors(ranks.rank, sys.stderr)
        lock = lambda out: contextlib.nullcontext("")
    chosen = parse(VERBS, "", [verb, *flags])
    chosen.pop("call")
    chosen.pop("named", None)                # `train --preset`
    use_threads(chosen.pop("threads"))
    try:
        launch(processes.ranked_run(run, ranks), CpuRanked, lock=lock, **chosen)
        ranks.all("", "the end")
    except (ne.UserError, OSError) as e:
        print(f"nanoeuler: {problem(e)}", file=sys.stderr, flush=True)
        os._exit(2)
    ranks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
