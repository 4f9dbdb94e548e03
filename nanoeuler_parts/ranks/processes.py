"""The processes of a run on several GPUs: what starts them, and what each of them does."""
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback

from numba.cuda.cudadrv.driver import CudaAPIError

import nanoeuler as ne
from bpe import need, UserError
from nanoeuler_cuda import open_device
from nanoeuler_parts.files.logs import alone
from nanoeuler_parts.gpu.launches import gpus_here
from nanoeuler_parts.gpu.place import PLACE
from nanoeuler_parts.ranks.engine import Links, RankedModel, Stopping
from nanoeuler_parts.ranks.sockets import Ranks

GRACE = 15.0                                 # seconds that others have to end where one has failed

def ranked_run(run, ranks):
    """A class of runs, like `run`, of all ranks together: the first one writes and speaks."""
    first = ranks.rank == 0

    class RankedRun(run):
        def __init__(self, out, start, options, engine):
            super().__init__(out, start, options, engine)
            s, cfg = self.state, ne.asdict(self.model.cfg)
            said = ranks.all([s.text_sha256, s.step, s.n_steps, s.micro_batch, self.B, self.T, cfg],
                             "the start of a run")
            for rank, x in enumerate(said):
                need(x == said[0], f"rank {rank} has other data or settings than rank 0: {x}")
            if first and self.B < ranks.size:
                print(f"note: {ne.counted(self.B, 'sequence')} a step, so only as many of "
                      f"{ranks.size} GPUs work; a larger --batch has some for all", file=sys.stderr)
            if not first:
                self.folder = tempfile.TemporaryDirectory()
                self.log = os.path.join(self.folder.name, "log")         # which stays empty

        def read_data(self, start):
            """What is made of a text, once, the first one makes; the others find it."""
            if not first:
                ranks.agree("", "the data")
            super().read_data(start)

        def load(self, cfg, tokenizer):
            data = super().load(cfg, tokenizer)
            if first:
                ranks.agree("", "the data")
            return data

        def train(self, caught):
            self.model.stopping = Stopping(caught)
            super().train(self.model.stopping)

        def plan(self, step_time):
            super().plan(step_time)
            self.state.n_steps = ranks.agree(self.state.n_steps, "a plan")

        def save(self, best=False):
            """The first one writes; to have what it writes, all give what is theirs.  Where a rank
            has an error of its own, the others are elsewhere, and it says which."""
            if sys.exception():
                return
            ranks.all("", "a save")
            if first:
                super().save(best)
            else:
                self.model.buffers()

        def record(self, **values):
            if first:
                super().record(**values)

        def sample_text(self, n):
            return super().sample_text(n) if first else ""
    return RankedRun

STARTED = "NANOEULER_STARTED_RANKS"           # in the environment of what start_ranks starts

def end_with_starter():
    """Ends this process as soon as the one that started it is gone, even by SIGKILL: what it wrote
    to is then closed.  It would else hold its GPU for ever."""
    def watch():
        os.read(0, 1)                        # nobody writes: this waits for the end
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()

def start_ranks(gpus):
    """This command once for each GPU of this machine.  Returns the exit code of all of them.

    They have sessions of their own, so that what a terminal or a supervisor sends comes to them
    once: from here."""
    there = gpus_here()
    need(gpus <= there, f"--gpus is {gpus}, and there {'is' if there == 1 else 'are'} {there}")
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1] - 1        # what it was given is the one that is ours
    ranks, failed = [], None

    def pass_on(number, frame):
        for x in ranks:
            x.send_signal(number)
    before = [(number, signal.signal(number, pass_on))
              for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    try:
        for rank in range(gpus):
            env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(gpus),
                       MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **{STARTED: "1"})
            ranks.append(subprocess.Popen([sys.executable, *sys.argv], env=env,
                                          start_new_session=True, stdin=subprocess.PIPE))
        while any(x.poll() is None for x in ranks):
            if failed is None and any(x.poll() for x in ranks):
                failed = time.monotonic()
            if failed and time.monotonic() - failed > GRACE:
                pass_on(signal.SIGKILL, None)
            time.sleep(0.1)
        return next((abs(x.returncode) for x in ranks if x.returncode), 0)
    finally:
        for x in ranks:                      # of those that are left, if one could not be started
            x.kill()
        for number, how in before:
            signal.signal(number, how)

class RankErrors:
    """stderr of a rank that is not the first: what goes wrong, with its number, and no notes."""

    def __init__(self, rank, to):
        self.rank, self.to, self.line = rank, to, ""

    def write(self, text):
        *lines, self.line = (self.line + text).split("\n")
        for line in lines:
            if line.strip() and not line.startswith("note:"):
                self.to.write(f"rank {self.rank}: {line}\n")
        return len(text)

    def __getattr__(self, name):
        return getattr(self.to, name)

def launch_ranks(run, flags):
    """ne.launch of a run of all ranks, of which this is one.  One that fails ends at once: its GPU
    may wait for others for ever, and Python's end for the GPU."""
    first = PLACE.rank == 0
    if STARTED in os.environ:
        end_with_starter()
    if not first:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
        sys.stderr = RankErrors(PLACE.rank, sys.stderr)
    code = 1
    try:
        seen = os.environ["CUDA_VISIBLE_DEVICES"]
        need(seen and "," not in seen, f"CUDA_VISIBLE_DEVICES is {seen!r}, which has no GPU for a "
             f"process of local rank {PLACE.local}")
        ranks = RankedModel.ranks = Ranks(PLACE)
        open_device()
        RankedModel.links = Links(ranks)
        lock = alone if first else lambda out: contextlib.nullcontext("")
        ne.launch(ranked_run(run, ranks), RankedModel, lock=lock, **flags)
        ranks.all("", "the end")
        RankedModel.links.close()
        ranks.close()
        return 0
    except KeyboardInterrupt:
        code = 130
    except (UserError, ModuleNotFoundError, MemoryError, OSError, CudaAPIError) as e:
        code = 2
        print(f"nanoeuler: {' '.join(ne.problem(e).split())}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
