"""The engine of one rank: it computes the gradient of its share of a batch, and updates its shard.

    DataParallel   makes a data-parallel engine of any engine.  It needs no GPU, so the tests use it
                   with nanoeuler.Model.
    Links          NCCL's communicator
    RankedModel    DataParallel over the GPU engine
"""
import contextlib

import numpy as np
from numba import cuda
from numba.cuda.cudadrv.devicearray import DeviceNDArray

import nanoeuler as ne
from bpe import need, UserError
from nanoeuler_cuda import (
    cdiv, cuda_kernel, gpu, launch, Model, new, NORM_PARTS, square_sums, to_host, view,
)
from nanoeuler_parts.gpu.doctor import NCCL

def share(n, rank, size):
    """Returns the rank's share of n things, as a slice.  Shares are equal, except the last ones,
    which may be smaller or empty."""
    each = cdiv(n, size)
    return slice(min(n, rank * each), min(n, (rank + 1) * each))

def shard(n, rank, size):
    """Returns the rank's shard of n parameters, as a slice.  It begins at a multiple of 8, so that
    kernels may load vectors of 8."""
    x = share(cdiv(n, 8), rank, size)
    return slice(min(n, 8 * x.start), min(n, 8 * x.stop))

def uncut(x, starts):
    """Returns x, a boundary of shards.  If x lies inside one of Muon's matrices, it is moved to the
    nearest start in `starts`.
    starts: where adjacent matrices begin, and the end of the last one, ascending"""
    if not starts or not starts[0] < x < starts[-1]:
        return x
    return min(starts, key=lambda start: abs(start - x))

class Stopping:
    """The request to stop a run, for all ranks.  It is true once all ranks know that one of them
    caught a signal, so that all stop after the same step.
    caught: the list of signals that `signals_caught` yields"""

    def __init__(self, caught=()):
        self.caught, self.agreed = caught, False

    def here(self):
        """Returns whether this rank has caught a signal."""
        return bool(self.caught)

    def __bool__(self):
        return self.agreed

class DataParallel:
    """Makes one engine of all ranks from an Engine of one process, by inheritance.  All ranks call
    the same methods with the same arguments at the same time.  Each computes its share.

    ranks: Ranks, an attribute of the class.  A subclass defines `sum_gradients`, `update_shard`,
    `gather_parameters`, and a `buffers` that is complete on the first rank.  Besides Engine's
    methods, the engine has `outputs_with` and `forget_failure` of nanoeuler.Model.

    The ranks exchange data in these methods, in the order of a run:

        micro_batch        the smallest number of sequences that fits
        losses             the losses of each rank's share
        update             gradients, |g|, parameters, losses, and requests to stop
        first_bad_tensor   the name of the tensor, after a step that failed
        buffers            the shards of parameters and moments"""
    ranks = None
    stopping = Stopping()
    muon_starts = ()                         # with Muon: where its matrices start, and their end

    def owned(self, n):
        """Returns the shard of n parameters that this rank owns, as a slice."""
        return self.shards(n)[self.ranks.rank]

    def shards(self, n):
        """Returns the shards of all ranks, in order.  They cut no matrix that Muon updates."""
        shards = [shard(n, rank, self.ranks.size) for rank in range(self.ranks.size)]
        return [slice(uncut(x.start, self.muon_starts), uncut(x.stop, self.muon_starts))
                for x in shards]

    def mine(self, n):
        """Returns this rank's share of n sequences, as a slice."""
        return share(n, self.ranks.rank, self.ranks.size)

    def micro_batch(self, B, asked=None, T=None):
        """Returns how many of B sequences all ranks together compute at a time.  The rank with the
        least free memory decides.
        asked: the requested number, also for all ranks together; None: as many as fit"""
        size = self.ranks.size
        each = super().micro_batch(cdiv(B, size), asked and cdiv(asked, size), T)
        return size * min(self.ranks.all(each, "the micro-batch"))

    def gradient(self, tokens, targets, weight):
        mine = self.mine(len(tokens))
        self.forget_failure()                # also on a rank without sequences
        # From the weights of all sequences, so that all ranks switch off the same heads
        self.outputs_with(weight)
        if mine.stop > mine.start:
            weight = weight[mine] if np.ndim(weight) > 1 else weight
            super().gradient(tokens[mine], targets[:, mine], weight)

    def update(self, hyper):
        """Runs the three parts of a step: see the docstring of this package.  Returns (summed CE of
        each head, |g|), and agrees on whether the run stops after this step.

        The first `ranks.all` notices a lost rank while the GPU still computes gradients.  Later,
        all GPUs would wait for each other."""
        self.ranks.all("", "a step")
        self.sum_gradients()
        results = self.update_shard(hyper)
        self.gather_parameters()             # the host only queues all this, and waits in `results`
        ce, norm = results()
        reports = self.ranks.all([ce.tolist(), self.stopping.here()], "the end of a step")
        self.stopping.agreed = any(wish for _, wish in reports)
        return np.sum([ce for ce, _ in reports], axis=0), norm

    def losses(self, tokens, targets):
        """Returns the losses of all sequences: each rank computes those of its share."""
        mine, found = self.mine(len(tokens)), []
        if mine.stop > mine.start:
            found = super().losses(tokens[mine], targets[mine]).tolist()
        return np.concatenate([np.array(x, np.float64) for x in self.ranks.all(found, "losses")])

    def first_bad_tensor(self):
        """Returns the message of the first rank that finds a bad tensor.  A message with an index,
        as in "qkv[3]", takes precedence over a general one.  A rank without sequences finds none.
        """
        mine = super().first_bad_tensor() if self.shape else ""
        found = [x for x in self.ranks.all(mine, "a bad tensor") if x]
        return next((x for x in [*found, ""] if "[" in x), [*found, ""][0])

# ---- on the GPUs
PIECE = 1 << 24                              # numbers of a gradient per transfer from one rank

@cuda_kernel
def add_in_order_kernel(g, others, rank):
    """g[i] = g[i] of rank 0 + g[i] of rank 1 + .., added in this order.
    g: this rank's own gradient; others (size, n): those of the other ranks, row r from rank r;
    row `rank` is not read"""
    for i in range(cuda.grid(1), g.size, cuda.gridsize(1)):
        s = g[i] if rank == 0 else others[0, i]
        for r in range(1, others.shape[0]):
            s += g[i] if r == rank else others[r, i]
        g[i] = s

def span(x, start, stop):
    """Returns x[start:stop] of a flat device array, without a copy, or None if it is empty."""
    return view(x, start, (stop - start,)) if stop > start else None

def as_bytes(x):
    """Returns a view of a flat device array as bytes, so that NCCL takes every dtype."""
    return DeviceNDArray((x.nbytes,), (1,), np.dtype(np.uint8), gpu.stream, x.gpu_data)

class Links:
    """NCCL's communicator, which transfers data from GPU to GPU.  All transfers are queued on the
    stream."""

    def __init__(self, ranks):
        self.rank, self.size = ranks.rank, ranks.size
        with nccl_errors(NCCL):
            import nccl.core as nccl
            self.nccl = nccl
            name = bytes(nccl.get_unique_id()).hex() if self.rank == 0 else ""
            unique = nccl.UniqueId.from_bytes(bytes.fromhex(ranks.agree(name, "NCCL's name")))
            self.comm = nccl.Communicator.init(nranks=self.size, rank=self.rank, unique_id=unique)
        # NCCL connects two ranks at their first transfer, which takes memory: transfer once here
        probe = new((self.size, 1), np.float32)
        rows = [probe[r] for r in range(self.size)]
        self.exchange([rows[self.rank]] * self.size, rows)
        gpu.stream.synchronize()

    def exchange(self, sent, received):
        """Sends sent[r] to every other rank r, and receives received[r] from it.  Both are lists of
        flat arrays, or of None for nothing."""
        queue = int(gpu.stream.handle)
        with self.together():
            for r in range(self.size):
                if r != self.rank:
                    for x, go in (sent[r], self.comm.send), (received[r], self.comm.recv):
                        if x is not None:
                            go(as_bytes(x), r, stream=queue)

    @contextlib.contextmanager
    def together(self):
        """Runs all exchanges in this block as one group of NCCL."""
        with nccl_errors("continue the run with --resume"), self.nccl.group():
            yield

    def close(self):
        self.comm.destroy()

@contextlib.contextmanager
def nccl_errors(remedy):
    """Turns errors of NCCL into a UserError of one line.  They have many classes, and one of them
    is Exception itself."""
    try:
        yield
    except UserError:
        raise
    except Exception as e:
        said = " ".join(str(e).split()) or type(e).__name__
        raise UserError(f"several GPUs need NCCL ({said}); {remedy}") from e

# ---- the engine of one GPU
class RankedModel(DataParallel, Model):
    """The GPU engine of one rank"""
    links = None                             # Links, an attribute of the class like `ranks`

    def __init__(self, cfg, flat, moments=(), *how, **chosen):
        n, size = flat.size, self.ranks.size
        options = how[0] if how else chosen.get("options")
        if getattr(options, "optimizer", "") == "muon":
            starts = sorted(ne.muon_matrices(cfg)[:, 0].tolist())
            self.muon_starts = [*starts, ne.muon_slice(cfg).stop]
        need(all(x.stop > x.start for x in self.shards(n)),
             f"{n:,} parameters are too few for {size} GPUs; use fewer")
        super().__init__(cfg, flat, moments, *how, **chosen)
        self.received = new((size, self.piece(n)), self.master)      # row r is from rank r
        self.partials = new((size, NORM_PARTS), np.float64)
        self.results_host, self.updated = (
            cuda.pinned_array(cfg.n_mtp + 1, np.float64), cuda.event(False))
        # parameters that are read in float32, even if products are in bfloat16: wte and the gains
        self.float32_slices = [
            ne.entries_where(cfg, lambda x: x.name == "wte"), slice(self.n_decay, n)]

    def piece(self, n):
        """Returns how many numbers of a shard's gradient one transfer has."""
        return min(PIECE, max(x.stop - x.start for x in self.shards(n)))

    def pieces(self):
        """Yields lists of one slice of the flat buffers per rank: the next piece of each shard.
        Slices of the last lists may be empty."""
        shards = self.shards(self.flat.size)
        for at in range(0, max(x.stop - x.start for x in shards), PIECE):
            yield [slice(min(x.stop, x.start + at), min(x.stop, x.start + at + PIECE))
                   for x in shards]

    def device(self):
        return f"{self.ranks.size} GPUs like {super().device()}"

    def forget_failure(self):
        """Does nothing, since the first `gradient` of a step sets the gradients."""

    def stage_hyper(self, hyper):
        need(self.muon or not hyper.muon_lr, "the shards of several GPUs may cut Muon's matrices, "
             "because the model was made without the option --optimizer muon")
        return super().stage_hyper(hyper)

    def memory(self, B, T):
        """Returns the memory table with the moments of this rank's shard only, and with the buffers
        for other ranks' gradients."""
        n, own = ne.n_params(self.cfg), self.owned(ne.n_params(self.cfg))
        table = dict(super().memory(B, T))
        table["AdamW moments"] = 2 * (own.stop - own.start) * self.master.itemsize
        table["others' gradients"] = self.ranks.size * self.piece(n) * self.master.itemsize
        return list(table.items())

    def received_of(self, where):
        """Returns a list of buffers that receive a piece, as long as `where`, from each rank."""
        return [span(self.received[r], 0, where.stop - where.start)
                for r in range(self.ranks.size)]

    def sum_gradients(self):
        """Queues the sum of all ranks' gradients over this rank's shard, piece by piece, into
        g_flat.  A rank without sequences has only zeros."""
        self.begin_update()
        rank = self.ranks.rank
        for pieces in self.pieces():
            g = [span(self.g_flat, x.start, x.stop) for x in pieces]
            self.links.exchange(g, self.received_of(pieces[rank]))
            if g[rank] is not None:
                launch(add_in_order_kernel, g[rank], self.received, rank, grid=1024, block=256)

    def update_shard(self, hyper):
        """Queues the update of this rank's shard, clipped by the norm of the whole gradient.
        Returns a function that waits for it and returns (summed CE of each head over this rank's
        sequences, |g|)."""
        rank, own = self.ranks.rank, self.owned(self.flat.size)
        own_g = span(self.g_flat, own.start, own.stop)
        steps = self.stage_hyper(hyper)
        partials = [self.partials[r] for r in range(self.ranks.size)]
        square_sums(partials[rank], own_g)
        self.links.exchange([partials[rank]] * self.ranks.size, partials)
        self.queue_optimizers(steps, view(self.partials, 0, (self.partials.size,)))
        self.weighted_heads = set()
        self.results.copy_to_host(self.results_host, stream=gpu.stream)
        self.updated.record(gpu.stream)
        self.results.copy_to_device(self.zero, stream=gpu.stream)

        def results():
            self.updated.synchronize()
            return self.results_host[:-1].copy(), float(self.results_host[-1])
        return results

    def gather_parameters(self):
        """Queues the transfer of new parameters to all ranks: the copies that products read, and
        the few parameters that are read in float32."""
        with self.links.together():
            self.all_gather(self.copies, slice(0, self.flat.size))
            if self.copies is not self.flat:
                for where in self.float32_slices:
                    self.all_gather(self.flat, where)

    def all_gather(self, x, where):
        """Queues an all-gather: fills the slice `where` of the parameter buffer x on every rank,
        each entry from the rank that owns it."""
        pieces = [span(x, max(y.start, where.start), min(y.stop, where.stop))
                  for y in self.shards(x.size)]
        self.links.exchange([pieces[self.ranks.rank]] * self.ranks.size, pieces)

    def buffers(self):
        """Returns (parameters, m, v) in float32 on the host of the first rank, and three times None
        on other ranks."""
        own = self.owned(self.flat.size)
        own_p = span(self.flat, own.start, own.stop)
        return [self.gathered(x) for x in (own_p, self.m, self.v)]

    def gathered(self, own):
        """Returns a buffer made of all ranks' shards, on the host of the first rank, or None on
        other ranks.     own: this rank's shard, on the device"""
        rank, size = self.ranks.rank, self.ranks.size
        nothing, whole, start = [None] * size, None, self.owned(self.flat.size).start
        if rank == 0:
            whole = np.empty(self.flat.size, np.float32)
        for pieces in self.pieces():
            mine = span(own, pieces[rank].start - start, pieces[rank].stop - start)
            if rank:
                self.links.exchange([mine, *nothing[1:]], nothing)
                continue
            found = [span(self.received[r], 0, x.stop - x.start) for r, x in enumerate(pieces)]
            self.links.exchange(nothing, found)
            for where, x in zip(pieces, [mine, *found[1:]]):
                if x is not None:
                    whole[where] = to_host(x)
        return whole
