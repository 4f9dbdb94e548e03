"""JSON mode (constrained decoding): replies that are JSON, and fit a JSON schema.

The model computes a logit for every token.  Before sampling, the logits of all tokens that would
break the JSON become -inf, so their probability is 0.  Two parts find these tokens:

1. An automaton reads JSON byte by byte: json_frames.py.  json_schema.py makes it from a schema, and
   json_pattern.py from a regular expression.

2. The model writes tokens, and a token is a string of bytes.  All tokens are in a trie, a tree in
   which tokens with the same beginning share a path.  A walk through the trie reads each beginning
   only once, and skips a whole subtree at the first byte that the automaton cannot read.  The walk
   goes level by level, as arrays: one step reads a byte for all nodes at which the automaton is in
   the same state.  The result, a mask over the vocabulary, is stored for each state.

The work for a token is bounded.  A state reads at most MOST_LIVE alternatives at the same time, and
a walk ends after MOST_STEPS steps.  The tokens that it has not reached by then are left out.  The
reply stays complete and correct without them, because each byte is a token of its own.

Willard and Louf 2023 (arxiv.org/abs/2307.09702) describe masks that are stored by state.  Dong et
al. 2024 (arxiv.org/abs/2411.15100) describe the stack, and masks that depend on its top only."""
import threading
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice

import numpy as np

from bpe import need, read_bytes, reading
from nanoeuler_parts.files.texts import parse_json
from nanoeuler_parts.chat import json_schema
from nanoeuler_parts.chat.json_frames import (
    after_byte, after_bytes, alternatives, any_object, CHARACTER, Either, encoded, is_complete,
    MOST_DEPTH, NO_LIMIT, QUOTE, Text,
)
from nanoeuler_parts.chat.json_schema import LONGEST_SCHEMA

OBJECT = "object"                # the schema of any JSON object, in place of a JSON text
MASK_BYTES = 1 << 23             # memory of the masks of one schema, or of all top frames
MOST_STEPS = 5_000               # of one walk through the vocabulary, some ms
MOST_WALKS = 8                   # for one mask: more alternatives than these share a walk
UNKNOWN, NOWHERE = -2, -1        # instead of the number of a state


def compiled(schema, alive=lambda: None):
    """The frame of the values that fit a schema, a JSON text or OBJECT; the bytes of its names.
    alive: see json_schema.compiled"""
    if schema == OBJECT:
        return any_object(MOST_DEPTH), b""
    need(len(schema) <= LONGEST_SCHEMA, f"the JSON schema has {len(schema):,} characters, expected "
         f"at most {LONGEST_SCHEMA:,}; shorten it")
    with reading("the JSON schema", "correct the schema"):
        root = parse_json(schema)
        text = encoded(root)
        return json_schema.compiled(root, alive), text


def read_schema(name):
    """The JSON schema in a file, as text; OBJECT stays as it is"""
    if name == OBJECT:
        return name
    with reading(name, f"name a file with a JSON schema, or {OBJECT}"):
        text = read_bytes(name).decode("utf-8-sig")
        parse_json(text)
    return text


# ---- tokens
class Masks(dict):
    """{key: make(key)}, made at the first use, with the bits of a mask (V,) in each.  The oldest
    half is dropped when it is full."""

    def __init__(self, make, V):
        super().__init__()
        self.make, self.most = make, max(1, 8 * MASK_BYTES // V)

    def __missing__(self, key):
        if len(self) >= self.most:
            for old in [*islice(self, (self.most + 1) // 2)]:
                del self[old]
        found = self[key] = self.make(key)
        return found


@dataclass(frozen=True)
class Counting:
    """A frame that reads a string of any length and then any bytes.  n: the characters so far
    closed: was there a quote?"""
    n: int = 0
    closed: bool = False
    ends = False

    def read(self, byte):
        if self.closed:
            return self,
        if byte == QUOTE:
            return replace(self, closed=True),
        frames = CHARACTER.read(byte)
        return None if frames is None else (*frames, Counting(self.n + 1))


class Trie:
    """The tokens of a vocabulary as a tree of their bytes.  Special tokens are not in it.
    Node 0 is the root, and the children of node i are first[i] to first[i + 1] - 1.
    byte: the byte that leads to each node     node_of (V,): where each token ends, 0 if nowhere"""

    def __init__(self, vocab, specials):
        self.vocab, self.V = vocab, len(vocab)
        self.longest = max(map(len, vocab))
        self.masks = Masks(self.new_mask, self.V)
        ids = sorted((i for i, text in enumerate(vocab) if i not in specials and text),
                     key=vocab.__getitem__)
        self.build(ids)
        self.count()

    def build(self, ids):
        """Makes the tree level by level.  ids: the tokens in the order of their bytes, so that
        those with the same beginning are neighbours"""
        lengths = np.array([len(self.vocab[i]) for i in ids], np.int64)
        text = np.frombuffer(b"".join(self.vocab[i] for i in ids), np.uint8)
        starts = np.cumsum(lengths) - lengths
        self.node_of = np.zeros(self.V, np.int64)
        rows, ids = np.arange(len(ids)), np.array(ids, np.int64)
        parents, byte, first = np.zeros(len(ids), np.int64), [np.zeros(1, np.uint8)], []
        n, level = 1, range(1)               # nodes so far, and the nodes of the last level
        for depth in range(self.longest):
            here = text[starts[rows] + depth]
            new = np.ones(len(rows), bool)   # does a row begin a node?
            new[1:] = (parents[1:] != parents[:-1]) | (here[1:] != here[:-1])
            nodes = n + np.cumsum(new) - 1
            first.append(n + np.searchsorted(parents[new], level))
            byte.append(here[new])
            ending = lengths[rows] == depth + 1
            self.node_of[ids[rows[ending]]] = nodes[ending]
            level = np.arange(n, n + np.count_nonzero(new))
            rows, parents, n = rows[~ending], nodes[~ending], n + len(level)
        first.append(np.full(len(level) + 1, n))
        self.byte, self.first = np.concatenate(byte), np.concatenate(first)

    def walk(self, nodes, state, most=NO_LIMIT):
        """(the nodes below these that the state can read, the number of the state at each node, the
        list of these states).  The walk reads level by level, so that a state reads a byte only
        once for all nodes at which it is.
        most: after this many steps the walk ends, and longer tokens are left out.  A step reads a
        byte in one alternative.  The first level is always complete."""
        states, number = [state], {state: 0}
        table = np.full((1, 256), UNKNOWN)               # (states, bytes): number of the next state
        nodes, at = np.asarray(nodes), np.zeros(len(nodes), np.int64)
        found, steps = [(nodes[:0], at[:0])], 0
        while len(nodes):
            first = self.first[nodes]
            counts = self.first[nodes + 1] - first
            begins = np.cumsum(counts) - counts
            nodes = np.repeat(first - begins, counts) + np.arange(counts.sum())
            keys = np.repeat(at, counts) * 256 + self.byte[nodes]
            after = table.ravel()[keys]
            new = np.zeros(table.size, bool)
            new[keys[after == UNKNOWN]] = True
            for key in np.flatnonzero(new).tolist():
                before = states[key // 256]
                if steps >= most and len(found) > 1:
                    table.ravel()[key] = NOWHERE
                    continue
                steps += alternatives(before)
                reached = after_byte(before, key % 256)
                if reached is None:
                    table.ravel()[key] = NOWHERE
                    continue
                if reached not in number:
                    number[reached] = len(states)
                    states.append(reached)
                table.ravel()[key] = number[reached]
            if new.any():
                after = table.ravel()[keys]
            more = len(states) - len(table)
            if more:
                table = np.concatenate([table, np.full((more, 256), UNKNOWN)])
            nodes, at = nodes[after != NOWHERE], after[after != NOWHERE]
            found.append((nodes, at))
        nodes, at = (np.concatenate(each) for each in zip(*found))
        return nodes, at, states

    def mask(self, state):
        """(V,) bool: the tokens that a state can read.  Most of the work depends on the top frame
        only, and is stored: a string has one mask, whatever it is in and whatever its limits."""
        if not state:
            return np.zeros(self.V, bool)
        top, rest = state[0], state[1:]
        if isinstance(top, Text) and top != Text():
            return self.mask((Text(), *rest)) & self.fitting([top])
        if not isinstance(top, Either):
            return self.mask_of_one(top, rest)
        texts, others = {}, []
        for each in top.states:
            if each and isinstance(each[0], Text):
                texts.setdefault(each[1:], []).append(each[0])
            else:
                others.append(each)
        found = [self.mask((Text(), *more, *rest)) & self.fitting(limited)
                 for more, limited in texts.items()]
        if len(others) > MOST_WALKS:
            found.append(self.mask_of_one(Either(tuple(others)), rest))
        else:
            found += [self.mask((*each, *rest)) for each in others]
        return np.logical_or.reduce(found)

    def mask_of_one(self, frame, rest):
        """(V,) bool: the tokens that a frame and the frames after it can read, in one walk"""
        inside, complete = self.masks[frame]
        mask = np.unpackbits(inside, count=self.V).view(bool)
        if len(complete) and rest:
            mask |= self.tokens_at(self.walk(complete, rest, MOST_STEPS)[0])
        return mask

    def new_mask(self, frame):
        """(bits of the tokens inside a frame, the nodes at which the frame is complete)"""
        nodes, at, states = self.walk([0], (frame,), MOST_STEPS)
        complete = nodes[np.array([*map(is_complete, states)])[at]]
        if frame.ends:
            complete = np.append(complete, 0)
        return np.packbits(self.tokens_at(nodes)), complete

    def tokens_at(self, nodes):
        """(V,) bool: the tokens that end at these nodes"""
        reached = np.zeros(len(self.byte), bool)
        reached[nodes] = True
        return reached[self.node_of]

    def fitting(self, texts):
        """(V,) bool: the tokens that one of these strings with limits can read, if a string of any
        length can"""
        fits = np.zeros((2, self.longest + 1), bool)     # by `closes` and `chars`
        for text in texts:
            fits[0, :int(min(text.most, self.longest)) + 1] = True
            fits[1, text.least:int(min(text.most, self.longest)) + 1] = True
        return fits.ravel()[self.length]

    def count(self):
        """Sets length (V,), an index of (2, longest + 1): does a token contain the quote that ends
        a string, and how many characters does it begin within the string?"""
        nodes, at, states = self.walk([0], (Counting(),))
        lengths = np.array([state[-1].closed * (self.longest + 1) + state[-1].n
                            for state in states])
        of_nodes = np.zeros(len(self.byte), np.int64)
        of_nodes[nodes] = lengths[at]
        self.length = of_nodes[self.node_of]


class Constraint:
    """The tokens that may come next, for each state of a reply.  It is shared by all replies with
    the same schema.     end: id of the token that ends a reply, or None"""

    def __init__(self, schema, trie, end, alive=lambda: None):
        frame, names = compiled(schema, alive)
        self.start, self.trie, self.end = (frame,), trie, end
        self.masks = Masks(self.new_mask, trie.V)
        # A reply is never stuck if each byte that may be needed is a token of its own.
        alone = {text[0] for text, node in zip(trie.vocab, trie.node_of) if node and len(text) == 1}
        needed = {*range(0x20, 0x7F), *range(0x80, 0xC0), *names}
        need(needed <= alone, f"JSON needs {len(needed - alone)} bytes that are no tokens of this "
             f"model; use another model")

    def mask(self, state):
        """(V,) bool: the tokens that may follow in this state.  A string with a limit has the mask
        of a string without one, less the tokens that are too long or close it too early."""
        top = state[0] if state else None
        if isinstance(top, Text) and top != Text():
            return self.mask((Text(), *state[1:])) & self.trie.fitting([top])
        return np.unpackbits(self.masks[state], count=self.trie.V).view(bool)

    def new_mask(self, state):
        mask = self.trie.mask(state)
        if self.end is not None and is_complete(state):
            mask[self.end] = True
        return np.packbits(mask)

    def after(self, state, token):
        """The state after a token that its mask allows; () if the value is complete and nothing
        can follow"""
        return after_bytes(state, self.trie.vocab[token])


@lru_cache(maxsize=4)
def trie_of(tokenizer):
    return Trie(tokenizer.vocab, set(tokenizer.specials.values()))


class Prepared:
    """The latest constraints, {(schema, tokenizer, end): Constraint}.  Several threads use it."""

    def __init__(self, most):
        self.most, self.found, self.lock = most, {}, threading.Lock()

    def get(self, key):
        """The constraint, or None"""
        return self.found.get(key)

    def keep(self, key, found):
        with self.lock:
            self.found[key] = found
            for old in [*islice(self.found, max(0, len(self.found) - self.most))]:
                del self.found[old]


PREPARED = Prepared(16)


def constraint(schema, tokenizer, end, alive=lambda: None):
    """The Constraint of a schema, a JSON text or OBJECT.  The latest ones are stored.
    alive: function() that is called between pieces of the preparation, each some milliseconds
    long.  An error that it raises ends the preparation, and leaves nothing behind."""
    key = schema, tokenizer, end
    found = PREPARED.get(key)
    if found is None:
        found = Constraint(schema, trie_of(tokenizer), end, alive)
        PREPARED.keep(key, found)
    return found
