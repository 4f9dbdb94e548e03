"""RowsDecoder: appends tokens to texts by steps of rows and by prompts, and samples their tokens.

Section 6 of nanoeuler_cuda.py makes a RowsDecoder if `refused` returns "".
"""
from types import SimpleNamespace

import numpy as np
from numba import cuda

import nanoeuler as ne
from nanoeuler_cuda import cdiv, Decoder, window_of
from nanoeuler_parts.chat.sampling import Sampling
from nanoeuler_parts.decode.attend import keys_per_split
from nanoeuler_parts.decode.products import whole_smem
from nanoeuler_parts.decode.prompts import BY_ROWS
from nanoeuler_parts.decode.steps import RowSteps
from nanoeuler_parts.decode.table import AT_ONCE

def refused(cfg, hopper):
    """Returns why RowSteps cannot run a model of this shape in bfloat16, or "" if it can.
    hopper: kernels may use Hopper's copy engine"""
    size = ne.dims_of(cfg)
    for name, n, unit in (("n_embd", size.C, 8), ("n_hidden", size.F, 8), ("head_dim", size.D, 16)):
        if n % unit:
            return f"{name} is {n}, not a multiple of {unit}"
    if size.D > 128:
        return f"head_dim is {size.D}, more than 128"
    smem = whole_smem(size, 1, hopper)
    room = cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    if smem > room:
        return f"a block needs {smem:,} bytes of shared memory, and this GPU allows {room:,}"
    return ""

def rows_bytes(cfg):
    """Returns the bytes of RowSteps without its cache, and of Prompts, for slots as long as the
    context."""
    size, T = ne.dims_of(cfg), cfg.seq_len
    splits = cdiv(window_of(cfg) or T, keys_per_split(size.D))
    bytes_per_row = 4 * (2 * size.C + 2 * size.HD + size.F + splits * (
        size.HD + 2 * size.H)) + 12 * size.V
    bytes_per_token = 8 * size.C + 2 * size.QKV + 2 * size.HD + 6 * size.F + 4 * size.H
    if cfg.qk_norm:
        bytes_per_token += (size.H + size.G) * (2 * size.D + 4)
    return AT_ONCE * bytes_per_row + T * bytes_per_token

class RowsDecoder(Decoder):
    """A decoder that runs its steps by RowSteps, with bfloat16 matrices"""
    rows_are_cheap = samples_itself = True
    fastest = "bf16"

    def begin(self, cfg, slots, length):
        super().begin(cfg, slots, length)
        self.heads = cfg.n_mtp - 1
        self.unread = set()                  # slots with texts that are not in the cache yet

    def allocate(self):
        self.steps = RowSteps(self.cfg, self.weights, len(self.held_ids), self.length, self.top)

    def copy(self, source, slot, n):
        if source in self.unread:
            self.unread.add(slot)
        else:
            self.unread.discard(slot)
            self.steps.copy(source, slot, n)
        self.held_ids[slot] = self.held_ids[source][:n]
        return n

    def read(self, parts):
        """See `Reader`.  Nearly all parts append a few tokens to a slot with room for them.  They
        skip the general path, because a step takes the device no longer than a hundred lines of
        Python."""
        parts = [*parts]
        found = self.plain_rows(parts)
        if not found:
            return super().read(parts)
        logits, self.final = self.steps.compute(*found)
        for token, slot in zip(*found[:2]):
            self.held_ids[slot].append(token)
        return logits

    def sample_on_device(self, parts, requests, later=()):
        """See `Reader`.  Returns None unless all parts append to texts in the cache
        (`plain_rows`)."""
        parts = [*parts]
        found = self.plain_rows(parts)
        if not found:
            return None
        sampled = self.steps.draw(*found, requests, later)
        self.final = None                    # it stays on the device
        if min(sampled) < 0:                 # the largest logit is not finite: `sample` raises
            logits, _ = self.steps.compute(*found)
            ne.sample(logits[sampled.index(-1)], None, Sampling(temperature=0))
        for token, slot in zip(*found[:2]):
            self.held_ids[slot].append(token)
        return sampled

    def plain_rows(self, parts):
        """Returns (tokens, slots, positions, wanted) of parts that append to texts in the cache, up
        to MOST_ROWS tokens in all, without overflowing a slot.  Returns None for other or faulty
        parts."""
        tokens, slots, positions, wanted = [], [], [], []
        held, unread, length = self.held_ids, self.unread, self.length
        for slot, ids, n in parts:
            if slot in unread or not 0 <= slot < len(held):
                return None
            start, count = len(held[slot]), len(ids)
            if not (start and 0 < count <= length - start and 0 <= n <= count):
                return None
            if count == n == 1:              # the usual case
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
        """Reads Pieces, and returns the requested logits in their order.

        The beginning of a slot waits until logits of it are requested.  Then it is read as a whole:
        by rows, or as a prompt if it has more than BY_ROWS tokens.  So its bits do not depend on
        how it was cut into pieces."""
        found, rows = {}, []
        for i, (slot, start, ids, wanted) in enumerate(pieces):
            if slot in self.unread:
                start, ids = 0, self.held_ids[slot][:start] + ids
            if start or wanted and len(ids) <= BY_ROWS:
                rows.append((i, ne.Piece(slot, start, ids, wanted)))
                continue
            self.truncate(0, slot)           # if reading fails, the slot is empty
            self.unread.discard(slot)
            if wanted:
                found[i] = self.steps.read_prompt(slot, ids, wanted)
            else:
                self.unread.add(slot)
            self.held_ids[slot] = list(ids)
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
        self.work = SimpleNamespace(final=final)         # rows of x that `guesses` needs
        return logits

    def guesses(self, row):
        if self.heads:
            return self.steps.guesses(row, None if self.final is None else self.final[row])
        return super().guesses(row)

    def decode(self, token, position):
        logits, _ = self.steps.compute([token], [0], [position], [0])
        return logits[0]
