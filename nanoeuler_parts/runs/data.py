"""Data of a training run: windows of a text, and what every data set has."""
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

import bpe
from nanoeuler import Batches, Epochs
from nanoeuler_parts.files.safetensors import need_whole

# `Batches` (8) reads windows of one long text, and `Examples` reads rows of questions and answers.
COUNTED_AT_ONCE = 1 << 20    # tokens

class Windows:
    """All adjacent windows (n, T) of a text, int32, from its entry `first` on.  A window is copied
    from the text when it is indexed, because the text may be larger than memory.
    fill: stands past the end of the text and in place of the token `end`, the end of a document"""

    def __init__(self, text, T, first=0, fill=0, end=-1):
        self.text, self.first, self.fill, self.end = text, first, fill, end
        self.shape = -(-(len(text) - 1) // T), T
        self.size = math.prod(self.shape)
        ends = 0
        if end >= 0:                         # in blocks: the text may be larger than memory
            ends = sum(np.count_nonzero(text[i:i + COUNTED_AT_ONCE] == end)
                       for i in range(first, len(text), COUNTED_AT_ONCE))
        self.n_valid = len(text) - first - ends

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, rows):
        need_whole(self.text)
        n, T = self.shape
        starts = np.arange(n)[rows] * T + self.first
        found = np.full((len(starts), T), self.fill, np.int32)
        for row, start in zip(found, starts, strict=True):
            piece = self.text[start:start + T]
            row[:len(piece)] = piece
        found[found == self.end] = self.fill
        return found

    def __array__(self, dtype=None, copy=None):
        return self[:].astype(dtype or np.int32)

class TextBatches(Batches):
    """`Batches` of a text that may be a memory-mapped file"""

    def or_else(self, n):
        return f" with --data, or --seq-len {n // 2}" if n >= 32 else " with --data"

    def take(self, i, B):
        need_whole(self.tokens)
        return super().take(i, B)

    def n_read(self, i, B):
        """The number of tokens in rows i to i + B of the run.  Windows have no padding."""
        return B * self.T

class Prefetched:
    """Batches of which the next one is made while a GPU still computes the gradient of this one"""

    def __init__(self, batches):
        self.batches, self.rows, self.batch = batches, None, None

    def prepare(self, i, B):
        self.rows, self.batch = (i, B), self.batches.take(i, B)

    def take(self, i, B):
        """tokens (B, T), targets (P, B, T): rows i to i + B of the run."""
        if self.rows != (i, B):
            self.prepare(i, B)
        return self.batch

class Validation(NamedTuple):
    """Held-out data: the arguments of `evaluate` after the model"""
    tokens: np.ndarray         # (n, T) int32, or Windows
    targets: np.ndarray        # (n, T) int32, -1 for none, or Windows
    n_bytes: int               # length of the text that the targets spell

@dataclass
class DataSet:
    """The training and validation data of a run, returned by its `load`."""
    path: str                  # the file that was read, and its digest
    sha256: str
    tokenizer: bpe.Tokenizer
    batches: Epochs            # for training: take(i, B) -> tokens (B, T), targets (P, B, T)
    validation: Validation
    bytes_per_token: float     # of the training data
    steps: int | None          # length of the run; None: `plan` sets it by the clock
    table: list                # printed at the start: (name, value)
