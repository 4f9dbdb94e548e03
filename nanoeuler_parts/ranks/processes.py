"""Starts the processes of a run on several GPUs, and runs one of them.

    start_ranks     --gpus N: starts this command N times, with the environment of rank 0 to N - 1
    launch_ranks    runs one rank, started by start_ranks or by a launcher such as torchrun
    ranked_run      the class of a run that works together with the other ranks
"""
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
from bpe import need, printable, UserError
from nanoeuler_cuda import open_device
from nanoeuler_parts.files.errors import problem
from nanoeuler_parts.files.logs import alone
from nanoeuler_parts.files.printing import counted
from nanoeuler_parts.gpu.launches import gpus_here
from nanoeuler_parts.gpu.place import PLACE
from nanoeuler_parts.ranks.engine import Links, RankedModel, Stopping
from nanoeuler_parts.ranks.sockets import LISTENER, Ranks
from nanoeuler_parts.runs.signals import saving_signals
from nanoeuler_parts.runs.start import launch

GRACE = 15.0                                 # seconds that other ranks have to end after a failure

def need_whole_vectors(options, cfg):
    """Rejects a model whose matrices do not begin at multiples of 8 numbers, if they are dealt out
    for Muon.  Shards begin at such multiples, so that kernels may load vectors."""
    if options.optimizer == "muon":
        need(all(start % 8 == 0 for start in ne.muon_matrices(cfg)[:, 0].tolist()),
             "Muon on several GPUs needs matrices whose sizes are multiples of 8; change n_embd, "
             "n_hidden or head_dim, or use --optimizer adamw, or one GPU")

def ranked_run(run, ranks):
    """Makes a subclass of `run` that works together with the other ranks.  Only the first rank
    writes files and prints."""
    first = ranks.rank == 0

    class RankedRun(run):
        def __init__(self, out, start, options, engine):
            super().__init__(out, start, options, engine)
            need_whole_vectors(options, self.model.cfg)
            s, cfg = self.state, ne.asdict(self.model.cfg)
            settings = ranks.all(
                [s.text_sha256, s.step, s.n_steps, s.micro_batch, self.B, self.T, cfg],
                "the start of a run")
            for rank, x in enumerate(settings):
                need(x == settings[0], f"rank {rank} has other data or settings than rank 0: "
                     f"expected {settings[0]}, got {x}")
            if first and self.B < ranks.size:
                print(f"note: a step has {counted(self.B, 'sequence')}, fewer than the "
                      f"{ranks.size} GPUs, so some are idle; use a larger --batch", file=sys.stderr)
            if not first:
                self.folder = tempfile.TemporaryDirectory()
                self.log.path = os.path.join(self.folder.name, "log")    # it stays empty

        def read_data(self, start):
            """Lets the first rank prepare the data, e.g. tokenize a text, before other ranks read
            it."""
            if not first:
                ranks.agree("", "the data")
            super().read_data(start)

        def load(self, cfg, tokenizer):
            """Loads the data.  On the first rank, this lets the others, which wait in read_data,
            continue."""
            data = super().load(cfg, tokenizer)
            if first:
                ranks.agree("", "the data")
            return data

        def right_answers(self, examples):
            """Asks on the first rank."""
            return ranks.agree(super().right_answers(examples) if first else [], "right answers")

        def sample_answers(self, start, source, excluded):
            need(ranks.size == 1, "--rehearse: the training examples of this model are unknown, "
                 "and several GPUs cannot sample its own answers; use one GPU, or --rehearse 0")
            return super().sample_answers(start, source, excluded)

        def stopping(self, caught):
            self.model.stopping = Stopping(caught)
            return self.model.stopping

        def planned(self):
            """Plans the length of the run by the first rank's clock."""
            return ranks.agree(super().planned(), "a plan")

        def checkpoint(self, best=False):
            """Saves on the first rank.  All ranks take part, because each has a shard of the
            moments.  A rank that ends with an error does not save: the others are at another place
            of the program and would not answer.  It only prints its error."""
            if sys.exception():
                return
            ranks.all("", "a save")
            if first:
                super().checkpoint(best)
            else:
                self.model.buffers()

        def write(self, **values):
            if first:
                super().write(**values)

        def sample_text(self, n):
            return super().sample_text(n) if first else ""
    return RankedRun

STARTED = "NANOEULER_STARTED_RANKS"          # environment variable of ranks that start_ranks starts

def end_with_starter():
    """Ends this process as soon as the process that started it ends, even by SIGKILL.  Otherwise it
    could hold its GPU forever.  A thread reads standard input, a pipe that the starter never writes
    to, and that closes when the starter ends."""
    def watch():
        os.read(0, 1)                        # returns only when the pipe is closed
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()

def start_ranks(gpus):
    """Runs this command once per GPU, as ranks 0 to gpus - 1.  Returns the exit code of a rank that
    failed, or 0.

    The ranks run in sessions of their own.  So a signal from a terminal or a supervisor reaches
    them once, passed on by this process."""
    there = gpus_here()
    need(gpus <= there, f"--gpus is {gpus}, but this machine has {counted(there, 'GPU')}")
    # Rank 0 inherits this socket, so that no other program can take its port meanwhile
    listener = socket.create_server(("127.0.0.1", 0), backlog=2 * gpus)
    port = listener.getsockname()[1] - 1     # the others connect to MASTER_PORT + 1, see place.py
    ranks, failed = [], None

    def pass_on(number, frame):
        for x in ranks:
            x.send_signal(number)
    before = [(number, signal.signal(number, pass_on)) for number in saving_signals()]
    try:
        for rank in range(gpus):
            env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(gpus),
                       MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **{STARTED: "1"})
            inherited = () if rank else (listener.fileno(),)
            if inherited:
                env[LISTENER] = str(listener.fileno())
            ranks.append(subprocess.Popen([sys.executable, *sys.argv], env=env, pass_fds=inherited,
                                          start_new_session=True, stdin=subprocess.PIPE))
        listener.close()
        while any(x.poll() is None for x in ranks):
            if failed is None and any(x.poll() for x in ranks):
                failed = time.monotonic()
            if failed and time.monotonic() - failed > GRACE:
                pass_on(signal.SIGKILL, None)
            time.sleep(0.1)
        return next((abs(x.returncode) for x in ranks if x.returncode), 0)
    finally:
        listener.close()
        for x in ranks:                      # ranks that still run, if another could not be started
            x.kill()
        for number, how in before:
            signal.signal(number, how)

class RankErrors:
    """stderr of a rank other than the first: puts the rank's number before each line, and drops
    notes, which the first rank prints."""

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
    """Runs `launch` on this rank of a run, and returns its exit code.  A rank that fails ends by
    os._exit: a normal end of Python would wait for the GPU, which may wait for other ranks
    forever."""
    first = PLACE.rank == 0
    if STARTED in os.environ:
        end_with_starter()
    if not first:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
        sys.stderr = RankErrors(PLACE.rank, sys.stderr)
    code = 1
    try:
        seen = os.environ["CUDA_VISIBLE_DEVICES"]
        need(seen and "," not in seen, f"CUDA_VISIBLE_DEVICES is {seen!r}, which has no GPU for "
             f"local rank {PLACE.local}; name one GPU per rank of this machine")
        ranks = RankedModel.ranks = Ranks(PLACE)
        open_device()
        RankedModel.links = Links(ranks)
        lock = alone if first else lambda out: contextlib.nullcontext("")
        launch(ranked_run(run, ranks), RankedModel, lock=lock, **flags)
        ranks.all("", "the end")
        RankedModel.links.close()
        ranks.close()
        return 0
    except KeyboardInterrupt:
        code = 130
    except (UserError, ModuleNotFoundError, MemoryError, OSError, CudaAPIError) as e:
        code = 2
        print(f"nanoeuler: {printable(' '.join(problem(e).split()))}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
