"""Rows of questions and answers, from which fine-tuning learns.

A row is an example, and only the tokens of its answers are targets.  chat/templates.py defines how
a conversation becomes text.
"""
import itertools

import numpy as np

from nanoeuler import CHATML_TOKENS, Epochs, targets_of

class Examples(Epochs):
    """One example per row: question, answer, question, answer, and so on, then padding.  An answer
    includes the token that ends it.  Attention never crosses rows.  Only tokens of answers are
    targets, for every head.  The R rows of one question stay together.  `rows` may hold several
    copies of all rows, one after the other: epoch e reads copy e % copies."""

    def __init__(self, rows, T, P, seed, R=1, copies=1):
        """rows: each (asked, answered, asked, answered, ...), arrays of at most T + 1 ids in all"""
        super().__init__(len(rows) // R // copies, T, seed)          # n questions
        self.P, self.R, self.copies = P, R, copies
        self.rows = np.full((len(rows), T + P), -1, np.int32)
        self.answers = self.rows.copy()
        for i, parts in enumerate(rows):
            start = 0
            for part, learned in zip(parts, itertools.cycle((False, True))):
                end = start + len(part)
                self.rows[i, start:end] = part
                if learned:
                    self.answers[i, start:end] = part
                start = end

    def keep(self, rows):
        """Drops all other rows.  They must be of one copy, with R = 1."""
        self.n, self.rows, self.answers = len(rows), self.rows[rows], self.answers[rows]
        self.epoch = None

    def batch(self, rows):
        """tokens (B, T), targets (P, B, T) of these rows, int32; -1 outside of the answers"""
        return np.maximum(self.rows[rows, :self.T], 0), targets_of(self.answers[rows], self.P)

    def row(self, i):
        """The index in self.rows of row i of the run."""
        epoch, prompt, _ = self.entry(i // self.R)
        copy = epoch % self.copies
        return self.R * (copy * self.n + prompt) + i % self.R

    def pick(self, i, B):
        """The indices in self.rows of rows i to i + B of the run."""
        return [self.row(j) for j in range(i, i + B)]

    def take(self, i, B):
        """tokens (B, T), targets (P, B, T): rows i to i + B of the run."""
        return self.batch(self.pick(i, B))

    def n_read(self, i, B):
        return int((self.rows[self.pick(i, B), :self.T] >= 0).sum())

def chatml_row(messages, learned_from, tokenizer, encode):
    """These messages in ChatML, as `chat_ids` encodes them: [asked, answered, asked, ...], ids
    Assistant messages from index learned_from on are answers, each with the token that ends it.
    All other messages count as asked."""
    start, end = (tokenizer.specials[name] for name in CHATML_TOKENS)
    row, asked = [], []
    for i, (role, text) in enumerate(messages):
        if role == "assistant" and i >= learned_from:
            asked += [start, *encode("assistant\n")]
            row += [asked, [*encode(text), end]]
            asked = [*encode("\n")]
        else:
            asked += [start, *encode(f"{role}\n{text}"), end, *encode("\n")]
    return [np.array(part, np.int32) for part in row]    # an unanswered end is left out
