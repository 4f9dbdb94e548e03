"""Decoding on tensor cores: steps of rows, prompts, and the decoder that uses both.

Section 9 of nanoeuler_cuda.py makes a `RowsDecoder` where `refused` says nothing against it.
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
from types import SimpleNamespace

import numpy as np
from cuda.bindings import driver
from numba import cuda

import nanoeuler as ne
from bpe import need
from nanoeuler_cuda import (
    add_bias, attention_forward, cdiv, Decoder, embedding_forward, kernel_path, matmul, new,
    residual_rmsnorm_forward, rmsnorm_forward, rope, swiglu_forward, to_device, view, window_of,
)
from nanoeuler_parts.gpu.launches import at_most, cuda_kernel, gpu, Graph, launch, ok, overlapping
from nanoeuler_parts.gpu.numbers import LOG2E, value
from nanoeuler_parts.tensor_cores.rows import (
    advance_kernel, AT_ONCE, attend_kernel, BY_ROWS, choose_kernel, COUNTS, DRAW, GROUP,
    keys_a_part, MERGED, N_ROWS, N_WANTED, product_kernels, product_smem, take_kernel,
    tiles_a_block, TURNS_AT_ONCE,
)

def heads_a_block(H, G):
    """Of the H / G query heads that share keys: as many as divide this number, at most four, or all
    of five or seven"""
    share = H // G
    return share if share in (5, 7) else max(n for n in range(1, 5) if share % n == 0)

def refused(cfg):
    """Why RowSteps cannot take a model with matrices in bfloat16, or "" """
    size = ne.dims_of(cfg)
    if cfg.qk_norm:
        return "the model has norms of q and k (qk_norm)"
    if window_of(cfg):
        return f"the model has a window of {ne.counted(window_of(cfg), 'token')}"
    for name, n, unit in (("n_embd", size.C, 8), ("n_hidden", size.F, 8), ("head_dim", size.D, 16)):
        if n % unit:
            return f"{name} is {n}, no multiple of {unit}"
    if size.D > 128:
        return f"head_dim is {size.D}, more than 128"
    smem = whole_smem(size, 1)
    room = cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    if smem > room:
        return f"a block would need {smem:,} bytes of shared memory, it may have {room:,}"
    return ""

def whole_smem(size, groups):
    """Bytes of shared memory of the largest block of the kernels for so many groups, or fewer: what
    a launch asks for, and its shares, squares, table and mbarrier"""
    smem, others = rows_smem(size, groups, has_copy_engine()), min(groups, 2)

    def with_shares(asked, groups, tiles):
        return asked + 8 * groups * (tiles * 8 * 8 + 8) * 4 + 5 * AT_ONCE * 4 + 8
    return max(with_shares(smem.qkv, groups, 2), with_shares(smem.proj, 1, 1),
               with_shares(smem.gate_up, groups, tiles_a_block(2, size.C, groups)),
               with_shares(smem.add_att, others, tiles_a_block(1, size.HD, others)),
               with_shares(smem.down, others, tiles_a_block(1, size.F, others)))

def rows_bytes(cfg):
    """What RowSteps has beside its cache, and Prompts, if slots are as long as the context"""
    size, T = ne.dims_of(cfg), cfg.seq_len
    parts = cdiv(T, keys_a_part(size.D))
    a_row = 4 * (2 * size.C + 2 * size.HD + size.F + parts * (size.HD + 2 * size.H)) + 12 * size.V
    a_token = 8 * size.C + 2 * size.QKV + 2 * size.HD + 6 * size.F + 4 * size.H
    return AT_ONCE * a_row + T * a_token

def has_copy_engine():
    """Has the GPU Hopper's copy engine?"""
    return kernel_path() == "wgmma"

# Bytes of dynamic shared memory of a block of each kernel; add_att is `down` of att
RowsSmem = namedtuple("RowsSmem", "qkv proj add_att gate_up down")

def rows_smem(size, groups, hopper):
    """RowsSmem of the kernels for so many groups"""
    def of(tiles, K, normed=False):
        return product_smem(K, tiles, normed, hopper)
    of_x, of_att, of_swiglu = (tiles_a_block(tiles, K, groups) for tiles, K in (
        (2, size.C), (1, size.HD), (1, size.F)))
    return RowsSmem(of(2, size.C, True), of(1, size.HD) + GROUP * 4 * (size.HD + 4),
                    of(of_att, size.HD), of(of_x, size.C, True), of(of_swiglu, size.F))

def upload(x, staged):
    """Queues the copy of pinned memory to the beginning of an array, as copy_to_device would, which
    looks at both first."""
    ok(driver.cuMemcpyHtoDAsync(int(x.gpu_data.device_pointer), staged.ctypes.data, staged.nbytes,
                                int(gpu.stream.handle)))

def download(staged, x):
    """Queues the copy of the beginning of an array to pinned memory."""
    ok(driver.cuMemcpyDtoHAsync(staged.ctypes.data, int(x.gpu_data.device_pointer), staged.nbytes,
                                int(gpu.stream.handle)))

def row_to(x, out, start):
    """Queues the copy of a row's numbers, out's from `start` on, to the first row of x."""
    ok(driver.cuMemcpyDtoDAsync(int(x.gpu_data.device_pointer),
                                int(out.gpu_data.device_pointer) + start * out.dtype.itemsize,
                                x.shape[1] * x.dtype.itemsize, int(gpu.stream.handle)))

# Groups of a block of qkv and gate_up, and of the others.  Kernels for a few rows and for many
# compute the same bits.
Groups = namedtuple("Groups", "normed others")

def groups_a_block(count, most):
    """Of so many rows, at most `most`"""
    groups = min(power_of_two(cdiv(count, GROUP)), most)
    return Groups(groups, min(groups, 2))

def power_of_two(n):
    """n, rounded up to one; of 0 it is 0"""
    return 1 << (n - 1).bit_length() if n else 0

# What a graph of RowSteps is for: up to so many rows, parts of the context, lines of logits; and
# alone    the rows are a whole step: it also brings their table, and the lines to the host
# drawn    tokens are drawn from the lines, which stay on the device
# ahead    the table is made of that of the step before, and of the tokens that this one drew
# Without parts they are rows of a prompt that was read, of which only the logits are left to do.
StepKind = namedtuple("StepKind", "rows parts lines alone drawn ahead", defaults=(False, False))
MOST_GRAPHS = 64
# What a step is asked for, and which half of `draws` and `chosen` is its
Asked = namedtuple("Asked", "tokens slots positions draws ring")

class RowSteps:
    """Steps of rows through the weights of a decoder, with its cache and its activations.

    What goes to the device and comes back lies in pinned memory, of fixed addresses, which a graph
    can know: of a step of a few rows the host writes a table, launches a graph, and waits."""

    def __init__(self, cfg, weights, slots, T):
        size, self.cfg, self.p, self.T = ne.dims_of(cfg), cfg, weights, T
        self.top, self.hopper = gpu.highest, has_copy_engine()       # whatever is capped later
        self.size = size
        room = cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        self.groups = max(groups for groups in TURNS_AT_ONCE if whole_smem(size, groups) <= room)
        self.smem = {groups: rows_smem(size, groups, self.hopper) for groups in TURNS_AT_ONCE}

        def products(F, groups):
            return product_kernels(size.C, size.HD, size.D, F, groups, self.hopper, cfg.qkv_bias)
        self.kernels = {groups: products(size.F, groups) for groups in TURNS_AT_ONCE}
        self.add_att = {groups: products(size.HD, groups).down for groups in (1, 2)}
        self.heads_a_block = heads_a_block(size.H, size.G)
        self.take = take_kernel(self.hopper)
        self.attend = attend_kernel(size.D, self.heads_a_block,
                                    size.H // size.G // self.heads_a_block, self.hopper)
        self.keys = keys_a_part(size.D)
        parts = self.parts_bucket(T)

        def buffer(*shape):
            return new(shape, np.float32)

        self.kc, self.vc = (buffer(size.L, slots, size.G, T, size.D) for _ in range(2))
        self.cos, self.sin = map(to_device, ne.rope_table(replace(cfg, seq_len=T), np.float32))
        self.x, self.q, self.att, self.y = (
            buffer(AT_ONCE, n) for n in (size.C, size.HD, size.HD, size.F))
        self.o, self.ml = buffer(AT_ONCE * parts * size.HD), buffer(AT_ONCE * parts * size.H * 2)
        self.rows = to_device(np.zeros((5, AT_ONCE), np.int32))
        # a table for each AT_ONCE rows of a step
        self.staged = cuda.pinned_array((ne.MOST_ROWS // AT_ONCE, 5, AT_ONCE), np.int32)
        # of drawn tokens, of a step that is under way and of one that was queued behind it
        self.draws = cuda.mapped_array((2, ne.MOST_ROWS, DRAW), np.float64)
        self.chosen = cuda.mapped_array((2, ne.MOST_ROWS), np.int32)
        self.done = [cuda.event(False) for _ in range(2)]
        self.latest, self.odds = new(AT_ONCE, np.int32), new((AT_ONCE, size.V), np.float64)
        self.choose = choose_kernel(self.hopper)
        self.ahead = None                    # what the step that is queued ahead will be asked for
        self.drawn_slots, self.steady = [], 0            # which drew last, how often in a row
        self.under_way = False               # may the device still read what is staged?
        self.graphs, self.prompts = {}, None             # StepKind -> Graph
        self.prepare(AT_ONCE)
        if others := size.P - 1:             # of `guesses`: the first row of x, all further heads
            head = weights.lm_head
            V, first = others * size.V, head.size - others * size.V * size.C
            self.others = view(head, first, (V, size.C))
            self.guessed = buffer(1, V + size.C)
            table = np.zeros((5, AT_ONCE), np.int32)
            table[COUNTS, [N_ROWS, N_WANTED]] = 1
            self.first_row = to_device(table)
            self.staged_x = cuda.pinned_array(size.C, np.float32)
            self.guessed_host = cuda.pinned_array((1, V + size.C), np.float32)
            self.guess_graph = Graph()

    def prepare(self, lines):
        """Memory for so many lines of logits, and behind each the row of x that it was made of"""
        self.graphs.clear()                  # first: they write into what is freed now
        shape = lines, self.size.V + self.size.C
        self.out, self.pinned = new(shape, np.float32), cuda.pinned_array(shape, np.float32)

    def parts_bucket(self, length):
        """Parts of a context of this length, rounded up to a power of two: a graph for each"""
        return min(power_of_two(cdiv(length, self.keys)), cdiv(self.T, self.keys))

    def compute(self, tokens, slots, positions, wanted):
        """(lines of logits, rows of x) of the wanted rows, on the host, valid until the next call
        tokens, slots, positions of each row, lists; wanted: of which rows, ascending"""
        self.wait()
        self.steady = 0
        return self.run(tokens, slots, positions, wanted)

    def draw(self, tokens, slots, positions, wanted, draws, later=()):
        """ids of tokens drawn from these logits, by a Draw each
        later: those of the tokens behind these, if nothing else is likely to be asked for next"""
        asked = Asked(tokens, slots, positions, draws, 0)
        if self.ahead and self.ahead[:4] == asked[:4]:
            asked = self.ahead               # it is under way, or done
        else:
            self.wait()
            self.steady = self.steady + 1 if slots == self.drawn_slots else 0
            self.drawn_slots = slots
            self.tell(asked)
            self.run(tokens, slots, positions, wanted, drawn=True)
            self.done[0].record(gpu.stream)
        ahead = self.queue_ahead(asked, later) if len(later) == len(wanted) == len(tokens) else None
        self.done[asked.ring].synchronize()
        found = self.chosen[asked.ring, :len(wanted)].tolist()
        self.ahead = ahead and ahead._replace(tokens=found)
        return found

    def queue_ahead(self, asked, later):
        """Queues the step after this one, in which each text goes on with the token that is drawn
        in this one: the device works on while the host looks at these.  If something else is asked
        for then, it was in vain, and that waits until it is done.  So it is queued only after the
        same n slots have drawn for n steps in a row: texts that end by chance then waste few.
        Returns what it will be asked for, without the tokens, which nobody knows yet, or None."""
        count, longest = len(later), max(asked.positions) + 2
        if count > min(self.steady, AT_ONCE) or longest > self.T:
            return None
        ahead = Asked([], asked.slots, [p + 1 for p in asked.positions], later, 1 - asked.ring)
        self.tell(ahead)
        rows = power_of_two(count)
        self.launch(StepKind(rows, self.parts_bucket(longest), rows, True, True, True))
        self.done[ahead.ring].record(gpu.stream)
        return ahead

    def read_prompt(self, slot, ids, wanted):
        """The same of the last `wanted` rows of a prompt, which begins the slot."""
        self.wait()
        T = min(power_of_two(len(ids)), self.T)
        if not self.prompts or len(self.prompts.x) < T:
            for kind in [kind for kind in self.graphs if not kind.parts]:
                del self.graphs[kind]        # they read x of the prompts before
            self.prompts = None              # whose memory is freed before there is more
            self.prompts = Prompts(self.size, T)
        self.under_way = True
        self.prompts.read(self, slot, ids)
        found = []
        for first in range(len(ids) - wanted, len(ids), ne.MOST_ROWS):
            rows = [*range(first, min(first + ne.MOST_ROWS, len(ids)))]
            lines = self.run(rows, rows, rows, range(len(rows)), of_prompt=True)
            found.append([x.copy() for x in lines])
        return [np.concatenate(x) for x in zip(*found)]

    def run(self, tokens, slots, positions, wanted, of_prompt=False, drawn=False):
        """`compute`.  of_prompt: tokens are rows of the prompt.  drawn: it only queues the step, in
        which tokens are drawn."""
        if len(wanted) > len(self.out):
            self.prepare(ne.MOST_ROWS)
        self.under_way, lines, alone = True, 0, len(tokens) <= AT_ONCE
        for i, r0 in enumerate(range(0, len(tokens), AT_ONCE)):
            columns = [column[r0:r0 + AT_ONCE] for column in (tokens, slots, positions)]
            n = len(columns[0])
            here = [r - r0 for r in wanted[lines:bisect.bisect_left(wanted, r0 + n)]]
            self.stage(i, *columns, here, lines)
            if not alone:
                upload(self.rows, self.staged[i])
            self.launch(StepKind(power_of_two(n),
                                 0 if of_prompt else self.parts_bucket(1 + max(columns[2])),
                                 power_of_two(len(here)), alone, drawn))
            lines += len(here)
        if lines and not drawn:
            if not alone:
                download(self.pinned[:lines], self.out)
            self.wait()
        return self.pinned[:lines, :self.size.V], self.pinned[:lines, self.size.V:]

    def launch(self, kind):
        """By the graph of this kind.  Of too many graphs, that which was not used for the longest
        time is dropped."""
        graph = self.graphs.pop(kind, None) or Graph()
        while len(self.graphs) >= MOST_GRAPHS:
            self.graphs.pop(next(iter(self.graphs)))
        self.graphs[kind] = graph            # the last one to be dropped
        graph(functools.partial(self.queue, kind))

    def tell(self, asked):
        """Draws, to the device"""
        numbers = itertools.chain.from_iterable(asked.draws)
        struct.pack_into(f"{DRAW * len(asked.draws)}d", self.draws[asked.ring], 0, *numbers)

    def __del__(self):
        if not sys.is_finalizing():
            with contextlib.suppress(Exception):         # a step that was queued ahead writes what
                self.wait()                              # goes now

    def wait(self):
        """Until the device has done all, and what is staged may be written"""
        if self.under_way:
            gpu.stream.synchronize()
        self.under_way, self.ahead = False, None

    def stage(self, i, tokens, slots, positions, wanted, line):
        """The i-th table of `rows`; what is in it behind the columns nobody uses."""
        lines = tokens, slots, positions, wanted, (len(tokens), len(wanted), line, 0)
        for at, column in enumerate(lines, 5 * i):
            struct.pack_into(f"{len(column)}i", self.staged, 4 * AT_ONCE * at, *column)

    def queue(self, kind):
        """A step of rows, or a part of one: see StepKind.  `take` is launched as any kernel: what
        was before it is done when the next one starts, which may read `rows` before it waits."""
        if kind.ahead:
            launch(advance_kernel, self.rows, self.latest, grid=1, block=AT_ONCE)
        elif kind.alone:
            upload(self.rows, self.staged[0])
        source = self.p.wte if kind.parts else self.prompts.x
        launch(self.take, self.x, self.rows, source, grid=kind.rows, block=128)
        with overlapping() if self.hopper else contextlib.nullcontext():
            if kind.parts:
                self.queue_layers(kind.rows, kind.parts)
            if kind.lines:
                head = self.p.wte if self.cfg.tie_embeddings else self.p.lm_head[0]
                self.queue_logits(self.out, head, self.rows, kind.lines)
            if kind.drawn and kind.lines:
                launch(self.choose, self.chosen, self.latest, self.odds, self.out, self.draws,
                       self.rows, self.size.V, grid=kind.lines, block=256)
        if kind.alone and kind.lines and not kind.drawn:
            download(self.pinned[:kind.lines], self.out)

    def queue_layers(self, count, parts):
        size, p, rows, x = self.size, self.p, self.rows, self.x
        groups, others = groups_a_block(count, self.groups)
        k, smem = self.kernels[groups], self.smem[groups]
        eps = np.float32(self.cfg.norm_eps)
        scale2 = np.float32(LOG2E / math.sqrt(size.D))
        o = view(self.o, 0, (AT_ONCE, parts, size.HD))
        ml = view(self.ml, 0, (AT_ONCE, parts, size.H, 2))

        def grid(N, tiles, K, groups):
            """Of a product with N outputs a row"""
            return cdiv(N, 8 * tiles_a_block(tiles, K, groups)), cdiv(count, groups * GROUP)
        for l in range(size.L):
            kc, vc, gain = self.kc[l], self.vc[l], p.attn_norm[l]
            bias = p.qkv_bias[l] if self.cfg.qkv_bias else gain
            launch(k.qkv, self.q, kc, vc, x, gain, p.qkv[l], bias, self.cos, self.sin, rows, eps,
                   grid=(size.QKV // 16, cdiv(count, groups * GROUP)), block=256, smem=smem.qkv)
            launch(self.attend, o, ml, self.q, kc, vc, rows, scale2,
                   grid=(size.H // self.heads_a_block, parts, count), block=256)
            if count < MERGED:
                launch(k.proj, x, o, ml, p.attn_proj[l], rows, grid=size.C // 8,
                       block=256, smem=smem.proj)
            else:
                launch(k.merge, self.att, o, ml, rows, grid=(cdiv(size.HD, 512), count),
                       block=128)
                launch(self.add_att[others], x, self.att, p.attn_proj[l], rows, block=256,
                       grid=grid(size.C, 1, size.HD, others), smem=self.smem[others].add_att)
            launch(k.gate_up, self.y, x, p.mlp_norm[l], p.gate_up[l], rows, eps,
                   grid=grid(2 * size.F, 2, size.C, groups), block=256, smem=smem.gate_up)
            launch(self.kernels[others].down, x, self.y, p.down[l], rows, block=256,
                   grid=grid(size.C, 1, size.F, others), smem=self.smem[others].down)

    def queue_logits(self, out, head, rows, lines=1):
        groups = groups_a_block(lines, self.groups).others
        launch(self.kernels[groups].logits, out, self.x, self.p.final_norm, head, rows,
               np.float32(self.cfg.norm_eps), block=256, smem=self.smem[groups].gate_up,
               grid=(cdiv(len(head), 8 * tiles_a_block(2, self.size.C, groups)),
                     cdiv(lines, groups * GROUP)))

    def guesses(self, line, x=None):
        """(heads, V) for a row of x (C,), or for that of a line of the last logits"""
        need(self.ahead is None, "guesses of a step behind which another one was queued")
        self.wait()
        if x is None:
            row_to(self.x, self.out, line * self.out.shape[1] + self.size.V)
        else:
            self.staged_x[:] = x
            upload(self.x, self.staged_x)
        self.under_way = True
        self.guess_graph(self.queue_guesses)
        self.wait()
        return self.guessed_host[0, :len(self.others)].reshape(-1, self.size.V).copy()

    def queue_guesses(self):
        self.queue_logits(self.guessed, self.others, self.first_row)
        download(self.guessed_host, self.guessed)

    def copy(self, source, slot, n):
        """The first n keys and values of a slot to another"""
        self.ahead = None                    # it may be of another text, though of the same tokens
        for cache in self.kc, self.vc:
            launch(copy_slot_kernel, cache, source, slot, n, grid=(self.size.G, self.size.L),
                   block=256)

class Prompts:
    """Reads what begins a slot as `Model.forward` reads a sequence: with the functions of section 4
    of nanoeuler_cuda.py, and T tokens, a power of two or the slot's length.  The tokens after the
    prompt's are arbitrary, since no token before them sees them.  There is memory for one layer,
    from the first prompt on: 8 C + 2 QKV + 2 HD + 6 F bytes a token, 12 MB for 512 of `base`."""

    def __init__(self, size, T):
        def buffer(*shape, dtype=np.uint16):
            return new(shape, dtype)

        self.x = buffer(T, size.C, dtype=np.float32)
        self.rstd = buffer(T, dtype=np.float32)
        self.lse = buffer(size.H * T, dtype=np.float32)
        self.y, self.saved, self.qkv, self.att, self.gate_up, self.swiglu = (
            buffer(T, n) for n in (size.C, size.C, size.QKV, size.HD, 2 * size.F, size.F))
        self.given = new(2 + T, np.int32)    # slot, number of tokens, and these
        self.staged = cuda.pinned_array(2 + T, np.int32)
        self.graphs, self.maps = {}, {}      # of each T; tensor maps of the buffers

    def read(self, steps, slot, ids):
        """Queues it, for the cache of RowSteps.  What is staged must not be in use."""
        T = min(power_of_two(len(ids)), steps.T)
        self.staged[:2] = slot, len(ids)
        self.staged[2:2 + len(ids)] = ids
        self.staged[2 + len(ids):2 + T] = 0
        if T not in self.graphs:
            self.graphs[T] = Graph()
        with at_most(steps.top, self.maps):
            self.graphs[T](functools.partial(self.queue, steps, T))

    def queue(self, steps, T):
        """x after the last layer, and keys and values of all"""
        cfg, p, size = steps.cfg, steps.p, steps.size
        x, y, saved, qkv, att, gate_up, swiglu = (
            view(buffer, 0, (T, buffer.shape[1])) for buffer in
            (self.x, self.y, self.saved, self.qkv, self.att, self.gate_up, self.swiglu))
        rstd, lse = view(self.rstd, 0, (T,)), view(self.lse, 0, (size.H, T))
        f, unread = y, (saved, rstd)         # y = rmsnorm(x), then f(x): as `forward`
        gains = [*(p.attn_norm[l] for l in range(size.L)), p.final_norm]

        def euler_step(gain):
            """x += f, y = rmsnorm(x)"""
            residual_rmsnorm_forward(f, *unread, x, gain, cfg.norm_eps)

        upload(self.given, self.staged[:2 + T])
        embedding_forward(x, view(self.given, 2, (T,)), p.wte)
        rmsnorm_forward(y, *unread, x, gains[0], cfg.norm_eps)
        for l in range(size.L):
            matmul(qkv, y, p.qkv[l])
            if cfg.qkv_bias:
                add_bias(qkv, p.qkv_bias[l])
            rope(qkv, steps.cos, steps.sin, T, size.H + size.G, 1)
            launch(keep_kernel, steps.kc[l], steps.vc[l], qkv, self.given, grid=(T, size.G),
                   block=size.D)
            attention_forward(att, lse, qkv, T, size.D)
            matmul(f, att, p.attn_proj[l])
            euler_step(p.mlp_norm[l])
            matmul(gate_up, y, p.gate_up[l])
            swiglu_forward(swiglu, gate_up)
            matmul(f, swiglu, p.down[l])
            euler_step(gains[l + 1])

@cuda_kernel
def keep_kernel(kc, vc, qkv, given):
    """The keys and values of a prompt's tokens, and not of those behind them, into their slot.
    kc, vc (slots, G, T, D) of a layer, qkv (T, QKV) after RoPE, given: slot, number of tokens, ..
    grid (T, G), D threads"""
    t, g, i, D = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x, kc.shape[3]
    slot, v = given[0], qkv.shape[1] - (kc.shape[1] - g) * D         # where v begins
    if t < given[1]:
        kc[slot, g, t, i] = value(qkv[t, v - kc.shape[1] * D + i])
        vc[slot, g, t, i] = value(qkv[t, v + i])

@cuda_kernel
def copy_slot_kernel(cache, source, slot, n):
    """cache[l, slot, g, t] = cache[l, source, g, t] of t < n     cache (L, slots, G, T, D)
    grid (G, L)"""
    g, l = cuda.blockIdx.x, cuda.blockIdx.y
    to, of = cache[l, slot, g], cache[l, source, g]
    for i in range(cuda.threadIdx.x, n * cache.shape[4], 256):
        to[0, i] = of[0, i]                  # keys follow each other

class RowsDecoder(Decoder):
    """A decoder whose steps are those of RowSteps"""
    rows_are_cheap = draws = True
    fastest = "bf16"

    def begin(self, cfg, slots, length):
        super().begin(cfg, slots, length)
        self.heads = cfg.n_mtp - 1
        self.unread = set()                  # slots whose texts are not in the cache yet

    def allocate(self):
        self.steps = RowSteps(self.cfg, self.weights, len(self.texts), self.length)

    def copy(self, source, slot, n):
        if source in self.unread:
            self.unread.add(slot)
        else:
            self.unread.discard(slot)
            self.steps.copy(source, slot, n)
        self.texts[slot] = self.texts[source][:n]
        return n

    def read(self, parts):
        """`Reader`'s.  Nearly all parts are a few tokens of a slot that has room for them: they
        take no detour, since the device takes no longer for them than a hundred lines of Python."""
        parts = [*parts]
        found = self.plain_rows(parts)
        if not found:
            return super().read(parts)
        logits, self.final = self.steps.compute(*found)
        for token, slot in zip(*found[:2]):
            self.texts[slot].append(token)
        return logits

    def draw(self, parts, draws, later=()):
        """`Reader`'s, of parts that take no detour"""
        parts = [*parts]
        found = self.plain_rows(parts)
        if not found:
            return None
        drawn = self.steps.draw(*found, draws, later)
        self.final = None                    # it is on the device
        if min(drawn) < 0:                   # the likeliest is not finite: let sample say so
            logits, _ = self.steps.compute(*found)
            ne.sample(logits[drawn.index(-1)], None, ne.Sampling(temperature=0))
        for token, slot in zip(*found[:2]):
            self.texts[slot].append(token)
        return drawn

    def plain_rows(self, parts):
        """(tokens, slots, positions, wanted) of parts that go on with texts, and let none slide,
        at most MOST_ROWS of them.  None if they are others, or faulty."""
        tokens, slots, positions, wanted = [], [], [], []
        texts, unread, length = self.texts, self.unread, self.length
        for slot, ids, n in parts:
            if slot in unread or not 0 <= slot < len(texts):
                return None
            start, count = len(texts[slot]), len(ids)
            if not (start and 0 < count <= length - start and 0 <= n <= count):
                return None
            if count == n == 1:              # as in most steps
                wanted.append(len(tokens))
                tokens.append(int(ids[0]))
                slots.append(slot)
                positions.append(start)
                continue
            tokens += map(int, ids)
            slots += [slot] * count
            positions += range(start, start + count)
            wanted += range(len(tokens) - n, len(tokens))
        known = 0 < len(tokens) <= ne.MOST_ROWS and (
            min(tokens) >= 0 and max(tokens) < self.cfg.vocab_size)
        if known and len({slot for slot, *_ in parts}) == len(parts):
            return tokens, slots, positions, wanted
        return None

    def read_pieces(self, pieces):
        """What begins a slot waits until logits of it are wanted: then it is read as a whole, by
        rows, or as a prompt if it has more than BY_ROWS tokens, however it came."""
        found, rows = {}, []
        for i, (slot, start, ids, wanted) in enumerate(pieces):
            if slot in self.unread:
                start, ids = 0, self.texts[slot][:start] + ids
            if start or wanted and len(ids) <= BY_ROWS:
                rows.append((i, (slot, start, ids, wanted)))
                continue
            self.truncate(0, slot)           # if the next line fails, nothing of it was read
            self.unread.discard(slot)
            if wanted:
                found[i] = self.steps.read_prompt(slot, ids, wanted)
            else:
                self.unread.add(slot)
            self.texts[slot] = list(ids)
        if rows:
            for _, (slot, start, *_) in rows:
                self.truncate(start, slot)
                self.unread.discard(slot)
            logits, at = super().read_pieces([piece for _, piece in rows]), 0
            for i, (*_, wanted) in rows:
                here = slice(at, at + wanted)
                found[i] = logits[here], self.final[here] if self.heads else None
                at += wanted
        if not found:
            return np.zeros((0, self.cfg.vocab_size), np.float32)
        logits, final = zip(*[found[i] for i in sorted(found)])
        if self.heads:
            self.final = np.concatenate(final)
        return np.concatenate(logits)

    def compute(self, rows):
        logits, final = self.steps.compute(*map(np.ndarray.tolist, rows[:3]), rows.wanted.tolist())
        self.work = SimpleNamespace(final=final)         # what `guesses` will be asked for
        return logits

    def guesses(self, row):
        if self.heads:
            return self.steps.guesses(row, None if self.final is None else self.final[row])
        return super().guesses(row)

    def decode(self, token, position):
        logits, _ = self.steps.compute([token], [0], [position], [0])
        return logits[0]
