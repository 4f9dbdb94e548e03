"""One engine of several GPUs: each process computes its share, and updates its part.

`DataParallel` needs no GPU: over nanoeuler.Model it is tested on the CPU.
"""
import contextlib

import numpy as np
from numba import cuda
from numba.cuda.cudadrv.devicearray import DeviceNDArray

import nanoeuler as ne
from bpe import need, UserError
from nanoeuler_cuda import (
    adamw_update, cdiv, cuda_kernel, gpu, launch, Model, new, square_sums_kernel, SUMS, to_host,
    view,
)
from nanoeuler_parts.gpu.doctor import NCCL

def share(n, rank, size):
    """Rank's part of n things, as a slice: equal parts, but for the last ones."""
    each = cdiv(n, size)
    return slice(min(n, rank * each), min(n, (rank + 1) * each))

def shard(n, rank, size):
    """The share of n parameters; it begins where a vector of numbers may."""
    x = share(cdiv(n, 8), rank, size)
    return slice(min(n, 8 * x.start), min(n, 8 * x.stop))

class Stopping:
    """Whether a run stops after this step: as true as what signals_caught yields, once all ranks
    know of it."""

    def __init__(self, caught=()):
        self.caught, self.agreed = caught, False

    def here(self):
        return bool(self.caught)

    def __bool__(self):
        return self.agreed

class DataParallel:
    """Over an Engine that one process has: the same of all ranks together.  They are asked for the
    same at the same places; each computes its share.

    ranks: Ranks, of the class.  What an engine of its own brings: `sum_gradients`, `update_part`,
    `share_parameters`, and `buffers` that are whole on the first rank.  Where all ranks meet, in
    the order of a run:

        micro_batch       least room                  losses       each has a share
        update            step, gradients, |g|, parameters, losses, and who wants to stop
        first_bad_tensor  after a step that failed    buffers      all give what they own"""
    ranks = None
    stopping = Stopping()

    def owned(self, n):
        return shard(n, self.ranks.rank, self.ranks.size)

    def shards(self, n):
        return [shard(n, rank, self.ranks.size) for rank in range(self.ranks.size)]

    def mine(self, n):
        return share(n, self.ranks.rank, self.ranks.size)

    def micro_batch(self, B, asked=None, T=None):
        """Of all ranks together, as many sequences of B at once as the one that has least room
        allows; so many are asked for together, too."""
        size = self.ranks.size
        each = super().micro_batch(cdiv(B, size), asked and cdiv(asked, size), T)
        return size * min(self.ranks.all(each, "the micro-batch"))

    def gradient(self, tokens, targets, weight):
        mine = self.mine(len(tokens))
        self.outputs_with(weight)            # of all ranks: they switch off the same heads
        if mine.stop > mine.start:
            weight = weight[mine] if np.ndim(weight) == 2 else weight
            super().gradient(tokens[mine], targets[:, mine], weight)

    def update(self, hyper):
        """Who is gone is missed here, while the GPU works on gradients, and not where all GPUs wait
        for each other.  Who wants to stop after this step is told to all."""
        need(not hyper.muon_lr, "several GPUs have AdamW only")
        self.ranks.all("", "a step")
        self.sum_gradients()
        results = self.update_shard(hyper)
        self.gather_parameters()              # queued, too: the GPU waits for nobody until then
        ce, norm = results()
        said = self.ranks.all([ce.tolist(), self.stopping.here()], "the end of a step")
        self.stopping.agreed = any(wish for _, wish in said)
        return np.sum([ce for ce, _ in said], axis=0), norm

    def losses(self, tokens, targets):
        mine, found = self.mine(len(tokens)), []
        if mine.stop > mine.start:
            found = super().losses(tokens[mine], targets[mine]).tolist()
        return np.concatenate([np.array(x, np.float64) for x in self.ranks.all(found, "losses")])

    def first_bad_tensor(self):
        """That of the first rank which finds one; one that had no sequence has not looked."""
        mine = super().first_bad_tensor() if self.shape else ""
        found = [x for x in self.ranks.all(mine, "a bad tensor") if x]
        return next((x for x in found if "[" in x), found[0])

# ---- on the GPUs
PIECE = 1 << 24                              # of a gradient, numbers that come from a rank at once

@cuda_kernel
def add_in_order_kernel(g, others, rank):
    """g[i] = sum over r of g of rank r, in this order; this rank's is there     others (size, n)"""
    for i in range(cuda.grid(1), g.size, cuda.gridsize(1)):
        s = g[i] if rank == 0 else others[0, i]
        for r in range(1, others.shape[0]):
            s += g[i] if r == rank else others[r, i]
        g[i] = s

def slice_or_none(x, start, stop):
    """x[start:stop] of a flat device array, no copy; None if that is nothing"""
    return view(x, start, (stop - start,)) if stop > start else None

def as_bytes(x):
    """A flat device array, as NCCL takes any."""
    return DeviceNDArray((x.nbytes,), (1,), np.dtype(np.uint8), gpu.stream, x.gpu_data)

class Links:
    """NCCL's communicator: what ranks send to each other from GPU to GPU.  All of it is queued."""

    def __init__(self, ranks):
        self.rank, self.size = ranks.rank, ranks.size
        with nccl_errors(NCCL):
            import nccl.core as nccl
            self.nccl = nccl
            name = bytes(nccl.get_unique_id()).hex() if self.rank == 0 else ""
            unique = nccl.UniqueId.from_bytes(bytes.fromhex(ranks.agree(name, "NCCL's name")))
            self.communicator = nccl.Communicator.init(nranks=self.size, rank=self.rank, unique_id=unique)
        probe = new((self.size, 1), np.float32)          # NCCL connects two when they first meet,
        rows = [probe[r] for r in range(self.size)]      # and takes memory for that: do it now
        self.exchange([rows[self.rank]] * self.size, rows)
        gpu.stream.synchronize()

    def exchange(self, sent, received):
        """Sends sent[r] to each other rank r, and receives received[r] from it: flat arrays, or
        None for nothing."""
        queue = int(gpu.stream.handle)
        with self.together():
            for r in range(self.size):
                if r != self.rank:
                    for x, go in (sent[r], self.communicator.send), (received[r], self.communicator.recv):
                        if x is not None:
                            go(as_bytes(x), r, stream=queue)

    @contextlib.contextmanager
    def together(self):
        """Exchanges at once, as one"""
        with nccl_errors("continue the run with --resume"), self.nccl.group():
            yield

    def close(self):
        self.communicator.destroy()

@contextlib.contextmanager
def nccl_errors(remedy):
    """NCCL's in a line: they are of many kinds, and one of them is Exception itself."""
    try:
        yield
    except UserError:
        raise
    except Exception as e:
        said = " ".join(str(e).split()) or type(e).__name__
        raise UserError(f"several GPUs need NCCL ({said}); {remedy}") from e

# ---- the engine of a GPU
class RankedModel(DataParallel, Model):
    """The GPU engine of one of several ranks"""
    links = None                             # of the class, too

    def __init__(self, cfg, flat, moments=(), *how, **chosen):
        n, size = flat.size, self.ranks.size
        last = self.shards(n)[-1]
        need(last.stop > last.start, f"{n:,} parameters are too few for {size} GPUs; use fewer")
        super().__init__(cfg, flat, moments, *how, **chosen)
        self.received = new((size, self.piece(n)), self.master)      # a row is from one rank
        self.partials = new((size, SUMS), np.float64)
        self.staged_results, self.updated = cuda.pinned_array(cfg.n_mtp + 1, np.float64), cuda.event(False)
        # what is read in float32, whatever products are in: wte, and the gains
        self.float32_slices = [ne.entries_where(cfg, lambda x: x.name == "wte"), slice(self.n_decay, n)]

    def piece(self, n):
        """Of the gradient of a part, how much is on the way at once"""
        return min(PIECE, self.shards(n)[0].stop)

    def pieces(self):
        """[the slice of the buffers that each rank has], a piece of all parts after the other; the
        last ones may be empty."""
        shards = self.shards(self.flat.size)
        for at in range(0, shards[0].stop, PIECE):
            yield [slice(min(x.stop, x.start + at), min(x.stop, x.start + at + PIECE))
                   for x in shards]

    def device(self):
        return f"{self.ranks.size} GPUs like {super().device()}"

    def memory(self, B, T):
        """With an own part of the moments, and room for others' gradients"""
        n, own = ne.n_params(self.cfg), self.owned(ne.n_params(self.cfg))
        table = dict(super().memory(B, T))
        table["AdamW moments"] = 2 * (own.stop - own.start) * self.master.itemsize
        table["others' gradients"] = self.ranks.size * self.piece(n) * self.master.itemsize
        return list(table.items())

    def received_of(self, where):
        """For each rank, where so much of it is received"""
        return [slice_or_none(self.received[r], 0, where.stop - where.start)
                for r in range(self.ranks.size)]

    def sum_gradients(self):
        """The own part of g becomes the sum of all ranks', a piece after the other."""
        rank = self.ranks.rank
        for pieces in self.pieces():
            g = [slice_or_none(self.g_flat, x.start, x.stop) for x in pieces]
            self.links.exchange(g, self.received_of(pieces[rank]))
            if g[rank] is not None:
                launch(add_in_order_kernel, g[rank], self.received, rank, grid=1024, block=256)

    def update_shard(self, hyper):
        """Queues AdamW of the own part, by the norm of the whole.  Returns what waits for it, and
        has (summed CE of each head, of the own sequences, |g|)."""
        rank, n, own = self.ranks.rank, self.flat.size, self.owned(self.flat.size)
        own_g = slice_or_none(self.g_flat, own.start, own.stop)
        self.staged_hyper[:] = hyper         # it must live until the driver has read it
        self.hyper.copy_to_device(self.staged_hyper, stream=gpu.stream)
        partials = [self.partials[r] for r in range(self.ranks.size)]
        launch(square_sums_kernel, partials[rank], own_g, grid=SUMS, block=256)
        self.links.exchange([partials[rank]] * self.ranks.size, partials)
        for x in self.without_heads_off(own):
            buffers = [slice_or_none(y, x.start, x.stop) for y in (self.flat, self.copies, self.g_flat)]
            moments = [slice_or_none(y, x.start - own.start, x.stop - own.start)
                       for y in (self.m, self.v)]
            adamw_update(*buffers, *moments, self.n_decay - x.start, self.hyper,
                         view(self.partials, 0, (self.partials.size,)), self.results)
        self.weighted_heads = set()
        for stale in slice_or_none(self.g_flat, 0, own.start), slice_or_none(self.g_flat, own.stop, n):
            if stale is not None:            # of others' parts: the next step adds to zero
                stale.gpu_data.memset(0, stale.nbytes, stream=gpu.stream)
        self.results.copy_to_host(self.staged_results, stream=gpu.stream)
        self.updated.record(gpu.stream)
        self.results.copy_to_device(self.zero, stream=gpu.stream)

        def results():
            self.updated.synchronize()
            return self.staged_results[:-1].copy(), float(self.staged_results[-1])
        return results

    def gather_parameters(self):
        """What the next step reads: what products do, whole, and some in float32."""
        with self.links.together():
            self.all_gather(self.copies, slice(0, self.flat.size))
            if self.copies is not self.flat:
                for where in self.float32_slices:
                    self.all_gather(self.flat, where)

    def all_gather(self, x, where):
        """A stretch of a parameter buffer, every entry from its owner"""
        pieces = [slice_or_none(x, max(y.start, where.start), min(y.stop, where.stop))
                  for y in self.shards(x.size)]
        self.links.exchange([pieces[self.ranks.rank]] * self.ranks.size, pieces)

    def buffers(self):
        """(parameters, m, v) on the host, float32, of the first rank; nothing on another one"""
        own = self.owned(self.flat.size)
        own_p = slice_or_none(self.flat, own.start, own.stop)
        return [self.gathered(x) for x in (own_p, self.m, self.v)]

    def gathered(self, own):
        """All parts of a buffer, of which each rank has its own, on the host of the first one"""
        rank, size = self.ranks.rank, self.ranks.size
        nothing, whole, start = [None] * size, None, self.owned(self.flat.size).start
        if rank == 0:
            whole = np.empty(self.flat.size, np.float32)
        for pieces in self.pieces():
            mine = slice_or_none(own, pieces[rank].start - start, pieces[rank].stop - start)
            if rank:
                self.links.exchange([mine, *nothing[1:]], nothing)
                continue
            found = [slice_or_none(self.received[r], 0, x.stop - x.start) for r, x in enumerate(pieces)]
            self.links.exchange(nothing, found)
            for where, x in zip(pieces, [mine, *found[1:]]):
                if x is not None:
                    whole[where] = to_host(x)
        return whole
