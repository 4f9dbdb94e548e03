"""Counts of runs of tokens, mixed by the modified rule of Kneser and Ney: what page 3 quotes.

    python bench/tour/kneser_ney.py        bits per byte of the held-out tenth of Shakespeare

A run's probability is its count, less a discount, plus the discounts of all runs with the same
beginning times the probability of the shorter run.  Shorter runs are counted by the number of
different tokens before them (Chen and Goodman 1999, 3.2).
"""
import pathlib
import sys

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
import bpe  # noqa: E402

LONGEST = 5


def runs_of(x, n, V):
    """All runs of n ids, each as one number"""
    found = np.zeros(len(x) - n + 1, np.int64)
    for j in range(n):
        found = found * V + x[j:len(found) + j]
    return found


def looked_up(runs, values, wanted):
    """The values of these runs, 0 for a run that is not there.  runs: sorted"""
    i = np.searchsorted(runs, wanted).clip(max=len(runs) - 1)
    return np.where(runs[i] == wanted, values[i], 0)


def discounts(counts):
    """What is taken from a count of 0, 1, 2, and 3 or more"""
    n1, n2, n3, n4 = ((counts == k).sum() for k in (1, 2, 3, 4))
    y = n1 / (n1 + 2 * n2)
    return np.array([0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])


def probabilities(counted, held, longest, V):
    """Of each held-out id, given up to longest - 1 ids before it"""
    p = None
    for n in range(1, longest + 1):
        runs, counts = counted[n]
        if n < longest:
            runs, counts = np.unique(counted[n + 1][0] % V ** n, return_counts=True)
        wanted = runs_of(held, n, V)
        if n == 1:
            p = (looked_up(runs, counts, wanted) + 0.1) / (counts.sum() + 0.1 * V)
            continue
        taken = discounts(counts)
        starts, first = np.unique(runs // V, return_index=True)
        total = looked_up(starts, np.add.reduceat(counts, first), wanted // V)
        spare = looked_up(starts, np.add.reduceat(taken[counts.clip(max=3)], first), wanted // V)
        count = looked_up(runs, counts, wanted)
        left = (count - taken[count.clip(max=3)]).clip(0)
        p = np.where(total > 0, (left + spare * p[1:]) / total.clip(1), p[1:])
    return p


def main():
    text = (ROOT / "data/shakespeare.txt").read_bytes()
    seen, held_out = text[:len(text) * 9 // 10], text[len(text) * 9 // 10:]
    tokenizer = bpe.train(seen, 512)
    ids, held = (tokenizer.encode(x).astype(np.int64) for x in (seen, held_out))
    V = tokenizer.vocab_size
    counted = {n: np.unique(runs_of(ids, n, V), return_counts=True) for n in range(1, LONGEST + 1)}
    for n in range(2, LONGEST + 1):
        bits = -np.log2(probabilities(counted, held, n, V)).sum() / len(held_out)
        print(f"runs of up to {n} tokens: {bits:.3f} bits per byte")


if __name__ == "__main__":
    main()
