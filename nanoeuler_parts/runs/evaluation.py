"""Measuring held-out data in bits per byte."""
import math

import numpy as np

from nanoeuler_parts.files.printing import with_progress
from nanoeuler_parts.runs.data import Windows

# ---- validation
def evaluate(model, tokens, targets, n_bytes, rows=None, batch=16):
    """Bits per byte of head 0 = sum CE / ln 2 / bytes, which is independent of the tokenizer.
    tokens, targets (n, T) of a text of n_bytes.  rows: how many of the n rows to measure, spread
    evenly; None: all.  batch: rows per forward pass"""
    pick = np.linspace(0, len(tokens) - 1, min(len(tokens), rows or len(tokens))).astype(int)
    nats = n_valid = 0
    for part in with_progress(np.split(pick, range(batch, len(pick), batch)), "validation"):
        x, y = tokens[part], targets[part]
        nats += model.losses(x, y).sum()
        n_valid += np.count_nonzero(y >= 0)
    share = n_valid / count_targets(targets)             # estimates the share of the bytes
    return float(nats / math.log(2) / (n_bytes * share))

def count_targets(targets):
    """The number of targets that are not -1"""
    return targets.n_valid if isinstance(targets, Windows) else np.count_nonzero(targets >= 0)
