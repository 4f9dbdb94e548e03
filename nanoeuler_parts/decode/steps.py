"""RowSteps: runs the steps of a decoder as CUDA graphs, and owns its KV cache and activations.

The data of one step:

    host                    pinned host memory            device
    tokens, positions  -->  staged                 -->    rows, the table of the step
    SampleRequests     -->  draws (mapped)         -->    choose reads them itself
                                                          take, qkv, .., logits, choose
    sampled tokens     <--  chosen (mapped)        <--    choose writes them itself
    logits, rows of x  <--  pinned                 <--    out, only if no tokens are sampled
"""
import bisect
import contextlib
import functools
import itertools
import math
import struct
import sys
from collections import namedtuple
from dataclasses import replace

import numpy as np
from numba import cuda

import nanoeuler as ne
from bpe import need
from nanoeuler_cuda import cdiv, make_ops, new, to_device, view, window_of
from nanoeuler_parts.decode.attend import (
    attend_kernel, heads_per_block, keys_per_split, MERGE_FROM, merge_kernel,
)
from nanoeuler_parts.decode.norms import HEADS_PER_BLOCK, norm_and_rotate_kernel
from nanoeuler_parts.decode.products import (
    add_product_kernel, blocks_of, GROUP, product_kernels, rows_smem, tiles_per_block,
    TURNS_AT_ONCE, whole_smem,
)
from nanoeuler_parts.decode.prompts import power_of_two, prompt_size, Prompts
from nanoeuler_parts.decode.sampling import choose_kernel, DRAW_FIELDS, room_for_list, THREADS
from nanoeuler_parts.decode.table import (
    advance_kernel, AT_ONCE, copy_row, COUNTS, download, N_ROWS, N_WANTED, take_kernel, upload,
)
from nanoeuler_parts.gpu.launches import cuda_kernel, gpu, Graph, launch, overlapping
from nanoeuler_parts.gpu.numbers import LOG2E

# Groups of rows per block.  qkv_gate_up: of these two kernels; others: of add_product and
# logits.  The number of groups does not change the bits of the results.
Groups = namedtuple("Groups", "qkv_gate_up others")

def groups_per_block(count, most):
    """Returns Groups for a step of `count` rows; most: upper bound of both"""
    groups = min(power_of_two(cdiv(count, GROUP)), most)
    return Groups(groups, min(groups, 2))

# The kind of a graph of RowSteps, and its key in `RowSteps.graphs`:
# rows          upper bound of the number of rows
# splits        upper bound of the splits of their contexts; 0 if from_prompt, since nothing attends
# lines         upper bound of the number of rows whose logits are requested
# whole_step    the rows are a whole step: the graph also uploads their table, and downloads the
#               lines
# from_prompt   Prompts has already run the layers of these rows, and only their logits remain
# sampled       tokens are sampled from the lines, and the lines stay on the device
# ahead         the table is made on the device, from that of the step before and its sampled tokens
StepKind = namedtuple("StepKind", "rows splits lines whole_step from_prompt sampled ahead",
                      defaults=(False, False, False))
MOST_GRAPHS = 128                            # graphs that RowSteps keeps
# The arguments of `RowSteps.draw`, and the half of `draws` and `chosen` that the step uses
StepRequest = namedtuple("StepRequest", "tokens slots positions draws ring")

class RowSteps:
    """Runs steps of rows for a decoder, and owns its cache and activations.

    All data between host and device goes through pinned memory at fixed addresses, which a graph
    can record.  For a step of a few rows, the host writes a table, launches one graph, and
    waits."""

    def __init__(self, cfg, weights, slots, T, top):
        """weights: Params on the device, with matrices in bfloat16
        slots: number of slots of the cache; T: tokens per slot
        top: the fastest kernel path that it may use"""
        size, self.cfg, self.p, self.T = ne.dims_of(cfg), cfg, weights, T
        self.top, self.hopper = top, make_ops(top).path == "wgmma"
        self.size, window = size, window_of(cfg)
        device = cuda.get_current_device()
        room, self.multiprocessors = (device.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
                                      device.MULTIPROCESSOR_COUNT)
        self.groups = max(groups for groups in TURNS_AT_ONCE
                          if whole_smem(size, groups, self.hopper) <= room)
        self.smem = {groups: rows_smem(size, groups, self.hopper) for groups in TURNS_AT_ONCE}
        self.kernels = {groups: product_kernels(size.C, size.HD, size.D, size.F, groups, window,
                                                self.hopper, cfg.qkv_bias, cfg.qk_norm)
                        for groups in TURNS_AT_ONCE}
        self.norm_and_rotate = norm_and_rotate_kernel(size.D, self.hopper)
        self.add_product = {(groups, K): add_product_kernel(size.C, K, groups, self.hopper)
                            for groups in (1, 2) for K in (size.HD, size.F)}
        self.merge = merge_kernel(size.HD, size.D, window, self.hopper)
        self.heads_per_block = heads_per_block(size.H, size.G)
        self.take = take_kernel(self.hopper)
        self.attend = attend_kernel(size.D, self.heads_per_block,
                                    size.H // size.G // self.heads_per_block, window,
                                    self.hopper)
        self.split_keys, self.most_keys = keys_per_split(size.D), window or T
        splits = self.splits_bucket(T)

        def buffer(*shape):
            return new(shape, np.float32)

        self.kc, self.vc = (buffer(size.L, slots, size.G, T, size.D) for _ in range(2))
        self.cos, self.sin = map(to_device, ne.rope_table(replace(cfg, seq_len=T), np.float32))
        self.x, self.q, self.att, self.y = (
            buffer(AT_ONCE, n) for n in (size.C, size.HD, size.HD, size.F))
        self.o, self.ml = buffer(AT_ONCE * splits * size.HD), buffer(AT_ONCE * splits * size.H * 2)
        self.rows = to_device(np.zeros((5, AT_ONCE), np.int32))
        # one table per AT_ONCE rows of a step
        self.staged = cuda.pinned_array((ne.MOST_ROWS // AT_ONCE, 5, AT_ONCE), np.int32)
        # SampleRequests and sampled tokens, for two steps: the running one, and one queued after it
        self.draws = cuda.mapped_array((2, ne.MOST_ROWS, DRAW_FIELDS), np.float64)
        self.chosen = cuda.mapped_array((2, ne.MOST_ROWS), np.int32)
        self.done = [cuda.event(False) for _ in range(2)]
        self.latest, scratch = new(AT_ONCE, np.int32), (AT_ONCE, room_for_list(size.V))
        self.odds, self.listed = new(scratch, np.float64), new(scratch, np.uint64)
        self.choose = choose_kernel(self.hopper)
        self.ahead = None                    # StepRequest that the step queued ahead will answer
        # the slots of the last sampled step, and how many steps before it had the same slots
        self.drawn_slots, self.steady_steps = [], 0
        self.in_flight = False               # may the device still read staged memory?
        self.graphs, self.prompts = {}, None             # StepKind -> Graph
        self.prepare(AT_ONCE)
        if n_more := size.P - 1:             # heads of `guesses`: all but the first
            head = weights.lm_head
            V, first = n_more * size.V, head.size - n_more * size.V * size.C
            self.more_heads = view(head, first, (V, size.C))
            self.guessed = buffer(1, V + size.C)
            table = np.zeros((5, AT_ONCE), np.int32)
            table[COUNTS, [N_ROWS, N_WANTED]] = 1
            self.first_row = to_device(table)
            self.staged_x = cuda.pinned_array(size.C, np.float32)
            self.guessed_host = cuda.pinned_array((1, V + size.C), np.float32)
            self.guess_graph = Graph()

    def prepare(self, lines):
        """Allocates memory for `lines` lines: logits, each followed by the row of x that gave
        them."""
        self.graphs.clear()                  # graphs write to memory that is freed here
        shape = lines, self.size.V + self.size.C
        self.out, self.pinned = new(shape, np.float32), cuda.pinned_array(shape, np.float32)

    def splits_bucket(self, length):
        """Returns the number of splits of a context of this length, rounded up to a power of two,
        so that few graphs are enough.  At most that of a whole slot, or of the window."""
        most = min(self.most_keys, self.T)
        splits = power_of_two(cdiv(min(length, most), self.split_keys))
        return min(splits, cdiv(most, self.split_keys))

    def compute(self, tokens, slots, positions, wanted):
        """Runs a step and returns (logits, rows of x) of the rows whose logits are requested, on
        the host.  They are valid until the next call.
        tokens, slots, positions: lists with an entry per row
        wanted: indices of the rows whose logits are requested, ascending"""
        self.wait()
        self.steady_steps = 0
        return self.run(tokens, slots, positions, wanted)

    def draw(self, tokens, slots, positions, wanted, draws, later=()):
        """Runs a step and returns token ids, sampled from the logits of the `wanted` rows.
        draws: one SampleRequest per wanted row
        later: the SampleRequests of the tokens after these, if the next call will probably continue
        all of these texts; otherwise empty"""
        request = StepRequest(tokens, slots, positions, draws, 0)
        if self.ahead and self.ahead[:4] == request[:4]:
            request = self.ahead             # its step is running, or done
        else:
            self.wait()
            self.steady_steps = self.steady_steps + 1 if slots == self.drawn_slots else 0
            self.drawn_slots = slots
            self.stage_draws(request)
            self.run(tokens, slots, positions, wanted, sampled=True)
            self.done[0].record(gpu.stream)
        ahead = (self.queue_ahead(request, later) if len(later) == len(wanted) == len(tokens)
                 else None)
        self.done[request.ring].synchronize()
        found = self.chosen[request.ring, :len(wanted)].tolist()
        self.ahead = ahead and ahead._replace(tokens=found)
        return found

    def queue_ahead(self, request, later):
        """Queues the step after this one, in which each text continues with the token that this
        step samples.  So the device keeps working while the host reads the tokens.

        If the next request is another one, because a text has ended or has begun, the queued step
        is wasted, and the request waits for it.  The more texts there are, the more often one of
        them ends.  So a step of n texts is queued ahead only after n steps of the same slots.

        Returns the StepRequest that the queued step answers, or None if no step was queued.  Its
        tokens are empty, since they are not known yet."""
        count, longest = len(later), max(request.positions) + 2
        if count > min(self.steady_steps, AT_ONCE) or longest > self.T:
            return None
        ahead = StepRequest([], request.slots, [p + 1 for p in request.positions], later,
                            1 - request.ring)
        self.stage_draws(ahead)
        rows = power_of_two(count)
        self.launch(StepKind(rows, self.splits_bucket(longest), rows, whole_step=True,
                             sampled=True, ahead=True))
        self.done[ahead.ring].record(gpu.stream)
        return ahead

    def read_prompt(self, slot, ids, wanted):
        """Reads a prompt, which begins the slot, at once.  Returns (logits, rows of x) of its last
        `wanted` tokens, on the host."""
        self.wait()
        T = min(prompt_size(len(ids)), self.T)
        if not self.prompts or len(self.prompts.x) < T:
            for kind in [kind for kind in self.graphs if kind.from_prompt]:
                del self.graphs[kind]        # these graphs read x of the old Prompts
            self.prompts = None              # frees its memory before more is allocated
            self.prompts = Prompts(self, T, make_ops(self.top, overlaps=True))
        self.in_flight = True
        self.prompts.read(slot, ids)
        found = []
        for first in range(len(ids) - wanted, len(ids), ne.MOST_ROWS):
            rows = [*range(first, min(first + ne.MOST_ROWS, len(ids)))]
            none = [0] * len(rows)           # their slots and positions are not read any more
            lines = self.run(rows, none, none, range(len(rows)), from_prompt=True)
            found.append([x.copy() for x in lines])
        return [np.concatenate(x) for x in zip(*found)]

    def run(self, tokens, slots, positions, wanted, from_prompt=False, sampled=False):
        """Runs a step as `compute` does, in pieces of AT_ONCE rows.
        from_prompt: `tokens` are rows of Prompts.x, whose layers have already run
        sampled: queues the step, in which tokens are sampled, and does not wait"""
        if len(wanted) > len(self.out):
            self.prepare(ne.MOST_ROWS)
        self.in_flight, lines, whole_step = True, 0, len(tokens) <= AT_ONCE
        for i, r0 in enumerate(range(0, len(tokens), AT_ONCE)):
            columns = [column[r0:r0 + AT_ONCE] for column in (tokens, slots, positions)]
            n = len(columns[0])
            here = [r - r0 for r in wanted[lines:bisect.bisect_left(wanted, r0 + n)]]
            self.stage_table(i, *columns, here, lines)
            if not whole_step:
                upload(self.rows, self.staged[i])
            splits = 0 if from_prompt else self.splits_bucket(1 + max(columns[2]))
            self.launch(StepKind(power_of_two(n), splits, power_of_two(len(here)), whole_step,
                                 from_prompt, sampled))
            lines += len(here)
        if lines and not sampled:
            if not whole_step:
                download(self.pinned[:lines], self.out)
            self.wait()
        return self.pinned[:lines, :self.size.V], self.pinned[:lines, self.size.V:]

    def launch(self, kind):
        """Launches the graph of this kind.  Keeps at most MOST_GRAPHS graphs and drops the least
        recently used one."""
        graph = self.graphs.pop(kind, None) or Graph()
        while len(self.graphs) >= MOST_GRAPHS:
            self.graphs.pop(next(iter(self.graphs)))
        self.graphs[kind] = graph            # dropped last
        graph(functools.partial(self.queue, kind))

    def stage_draws(self, request):
        """Writes the SampleRequests of the step to mapped memory, where `choose` reads them."""
        numbers = itertools.chain.from_iterable(request.draws)
        struct.pack_into(f"{DRAW_FIELDS * len(request.draws)}d", self.draws[request.ring], 0,
                         *numbers)

    def __del__(self):
        if not sys.is_finalizing():
            with contextlib.suppress(Exception):
                self.wait()                  # a step queued ahead writes memory that is freed next

    def wait(self):
        """Waits until the device is idle, so that staged memory may be overwritten.  Forgets the
        step queued ahead."""
        if self.in_flight:
            gpu.stream.synchronize()
        self.in_flight, self.ahead = False, None

    def stage_table(self, i, tokens, slots, positions, wanted, line):
        """Writes the i-th staged table: fields TOKEN to COUNTS of `rows`.  Entries past the end of
        a column keep old values, which no kernel uses.
        line: the line of `out` where these rows begin"""
        fields = tokens, slots, positions, wanted, (len(tokens), len(wanted), line, 0)
        for at, column in enumerate(fields, 5 * i):
            struct.pack_into(f"{len(column)}i", self.staged, 4 * AT_ONCE * at, *column)

    def queue(self, kind):
        """Queues a step of rows, or AT_ONCE rows of a larger one: see StepKind.

        `take` is launched without overlap, so the upload of `rows` is complete before `take`
        starts.  So later kernels may read `rows` before they wait for the previous kernel."""
        if kind.ahead:
            launch(advance_kernel, self.rows, self.latest, grid=1, block=AT_ONCE)
        elif kind.whole_step:
            upload(self.rows, self.staged[0])
        source = self.prompts.x if kind.from_prompt else self.p.wte
        launch(self.take, self.x, self.rows, source, grid=kind.rows, block=128)
        with overlapping() if self.hopper else contextlib.nullcontext():
            if not kind.from_prompt:
                self.queue_layers(kind.rows, kind.splits)
            if kind.lines:
                head = self.p.wte if self.cfg.tie_embeddings else self.p.lm_head[0]
                self.queue_logits(self.out, head, self.rows, kind.lines)
            if kind.sampled and kind.lines:
                launch(self.choose, self.chosen, self.latest, self.odds, self.listed, self.out,
                       self.draws, self.rows, self.size.V, grid=kind.lines, block=THREADS)
        if kind.whole_step and kind.lines and not kind.sampled:
            download(self.pinned[:kind.lines], self.out)

    def product_grid(self, N, K, tiles, count, groups, normed):
        """Returns the grid of gate_up, add_product or logits: of N columns for `count` rows."""
        of_rows, tiles = cdiv(count, groups * GROUP), tiles_per_block(tiles, K, groups)
        most = max(1, 2 * self.multiprocessors // of_rows)
        return blocks_of(N, K, tiles, groups, normed, self.hopper, most), of_rows

    def queue_layers(self, count, splits):
        """Queues all layers for `count` rows, whose contexts have up to `splits` splits."""
        size, p, rows, x = self.size, self.p, self.rows, self.x
        groups, others = groups_per_block(count, self.groups)
        k, smem = self.kernels[groups], self.smem[groups]
        eps = np.float32(self.cfg.norm_eps)
        scale2 = np.float32(LOG2E / math.sqrt(size.D))
        o = view(self.o, 0, (AT_ONCE, splits, size.HD))
        ml = view(self.ml, 0, (AT_ONCE, splits, size.H, 2))

        def grid(N, tiles, K, groups, normed=False):
            """Returns the grid of a product with N outputs per row."""
            return self.product_grid(N, K, tiles, count, groups, normed)
        for l in range(size.L):
            kc, vc, gain = self.kc[l], self.vc[l], p.attn_norm[l]
            bias = p.qkv_bias[l] if self.cfg.qkv_bias else gain
            launch(k.qkv, self.q, kc, vc, x, gain, p.qkv[l], bias, self.cos, self.sin, rows, eps,
                   grid=(size.QKV // 16, cdiv(count, groups * GROUP)), block=256, smem=smem.qkv)
            if self.cfg.qk_norm:
                launch(self.norm_and_rotate, self.q, kc, p.q_norm[l], p.k_norm[l], self.cos,
                       self.sin, rows, eps, grid=(cdiv(size.H + size.G, HEADS_PER_BLOCK), count),
                       block=256)
            launch(self.attend, o, ml, self.q, kc, vc, rows, scale2,
                   grid=(size.H // self.heads_per_block, splits, count), block=256)
            if count < MERGE_FROM:
                launch(k.proj, x, o, ml, p.attn_proj[l], rows, grid=size.C // 8,
                       block=256, smem=smem.proj)
            else:
                launch(self.merge, self.att, o, ml, rows, grid=(cdiv(size.HD, 512), count),
                       block=128)
                launch(self.add_product[others, size.HD], x, self.att, p.attn_proj[l], rows,
                       grid=grid(size.C, 1, size.HD, others), block=256,
                       smem=self.smem[others].add_att)
            launch(k.gate_up, self.y, x, p.mlp_norm[l], p.gate_up[l], rows, eps,
                   grid=grid(2 * size.F, 2, size.C, groups, True), block=256, smem=smem.gate_up)
            launch(self.add_product[others, size.F], x, self.y, p.down[l], rows, block=256,
                   grid=grid(size.C, 1, size.F, others), smem=self.smem[others].add_swiglu)

    def queue_logits(self, out, head, rows, lines=1):
        """Queues the logits of up to `lines` rows of x.
        head (V, C); rows: a table on the device"""
        groups = groups_per_block(lines, self.groups).others
        launch(self.kernels[groups].logits, out, self.x, self.p.final_norm, head, rows,
               np.float32(self.cfg.norm_eps), block=256, smem=self.smem[groups].gate_up,
               grid=self.product_grid(len(head), self.size.C, 2, lines, groups, True))

    def guesses(self, line, x=None):
        """Returns the logits of all heads but the first, (heads, V), for one row of x.
        line: use the row of x in this line of the last step
        x: use this row (C,) instead, unless it is None"""
        need(self.ahead is None, "guesses need the last step, but another one was queued after it")
        self.wait()
        if x is None:
            copy_row(self.x, self.out, line * self.out.shape[1] + self.size.V)
        else:
            self.staged_x[:] = x
            upload(self.x, self.staged_x)
        self.in_flight = True
        self.guess_graph(self.queue_guesses)
        self.wait()
        return self.guessed_host[0, :len(self.more_heads)].reshape(-1, self.size.V).copy()

    def queue_guesses(self):
        """Queues the logits of all heads but the first for the first row of x."""
        self.queue_logits(self.guessed, self.more_heads, self.first_row)
        download(self.guessed_host, self.guessed)

    def copy(self, source, slot, n):
        """Copies the first n keys and values of slot `source` to another slot."""
        self.ahead = None                    # its slots may hold other texts with the same tokens
        for cache in self.kc, self.vc:
            launch(copy_slot_kernel, cache, source, slot, n, grid=(self.size.G, self.size.L),
                   block=256)

@cuda_kernel
def copy_slot_kernel(cache, source, slot, n):
    """cache[l, slot, g, t] = cache[l, source, g, t] for t < n     cache (L, slots, G, T, D)
    grid (G, L), 256 threads"""
    g, l = cuda.blockIdx.x, cuda.blockIdx.y
    dst, src = cache[l, slot, g], cache[l, source, g]
    for i in range(cuda.threadIdx.x, n * cache.shape[4], 256):
        dst[0, i] = src[0, i]                # the keys of a slot are contiguous

