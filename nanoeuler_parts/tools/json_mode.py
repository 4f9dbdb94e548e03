"""JSON mode (constrained decoding): replies that are JSON, and fit a JSON schema.

The model computes a logit for every token.  Before sampling, the logits of all tokens that would
break the JSON become -inf, so their probability is 0.  Two parts find these tokens:

1. An automaton reads JSON byte by byte: json_frames.py.  json_schema.py makes it from a schema, and
   json_pattern.py from a regular expression.

2. The model writes tokens, and a token is a string of bytes.  All tokens are in a trie, a tree in
   which tokens with the same beginning share a path.  A walk through the trie reads each beginning
   only once, and skips a whole subtree at the first byte that the automaton cannot read.  Nodes at
   which the automaton is in the same state walk on together, as arrays: within a string, one step
   reads the next byte of all tokens.  The result, a mask over the vocabulary, is stored for each
   state.

Willard and Louf 2023 (arxiv.org/abs/2307.09702) describe masks that are stored by state.  Dong et
al. 2024 (arxiv.org/abs/2411.15100) describe the stack, and masks that depend on its top only."""
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice

import numpy as np

from bpe import need, read_bytes, reading
from nanoeuler_parts.files.texts import parse_json
from nanoeuler_parts.tools import json_schema
from nanoeuler_parts.tools.json_frames import (
    after_byte, after_bytes, any_object, CHARACTER, Either, encoded, is_complete, MOST_DEPTH,
    NO_LIMIT, QUOTE, Text,
)
from nanoeuler_parts.tools.json_schema import LONGEST_SCHEMA

OBJECT = "object"                # the schema of any JSON object, in place of a JSON text
MASK_BYTES = 1 << 23             # memory of the masks of one schema, or of all top frames


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

    def children(self, nodes):
        first = self.first[nodes]
        counts = self.first[nodes + 1] - first
        begins = np.cumsum(counts) - counts
        return np.repeat(first - begins, counts) + np.arange(counts.sum())

    def walk(self, nodes, state):
        """Yields (nodes, state) for all nodes below these that the state can read"""
        waiting = [(np.asarray(nodes), state)]
        while waiting:
            nodes, state = waiting.pop()
            children = self.children(nodes)
            bytes_of = self.byte[children]
            groups, group_of = {}, np.full(256, -1)      # of the bytes that lead to equal states
            for byte in np.flatnonzero(np.bincount(bytes_of, minlength=256)).tolist():
                after = after_byte(state, byte)
                if after is not None:
                    group_of[byte] = groups.setdefault(after, len(groups))
            group_of = group_of[bytes_of]
            for after, group in groups.items():
                reached = children[group_of == group]
                yield reached, after
                waiting.append((reached, after))

    def mask(self, state):
        """(V,) bool: the tokens that a state can read.  Most of the work depends on the top frame
        only, and is stored: a string has one mask, whatever it is in."""
        if not state:
            return np.zeros(self.V, bool)
        if isinstance(state[0], Either):
            return np.logical_or.reduce([self.mask((*each, *state[1:]))
                                         for each in state[0].states])
        inside, complete = self.masks[state[0]]
        mask = np.unpackbits(inside, count=self.V).view(bool)
        if len(complete) and len(state) > 1:
            mask |= self.tokens_of(nodes for nodes, _ in self.walk(complete, state[1:]))
        return mask

    def new_mask(self, frame):
        """(bits of the tokens inside a frame, the nodes at which the frame is complete)"""
        found = [*self.walk([0], (frame,))]
        complete = [nodes for nodes, state in found if is_complete(state)]
        complete += [np.zeros(1, np.int64)] if frame.ends else []
        return (np.packbits(self.tokens_of(nodes for nodes, _ in found)),
                np.concatenate(complete or [np.zeros(0, np.int64)]))

    def tokens_of(self, groups):
        """(V,) bool: the tokens that end at these nodes"""
        reached = np.zeros(len(self.byte), bool)
        for nodes in groups:
            reached[nodes] = True
        return reached[self.node_of]

    def fitting(self, least, most):
        """(V,) bool: the tokens that a string of `least` to `most` further characters can read, if
        a string of any length can"""
        return (self.chars <= most) & (~self.closes | (self.chars >= least))

    def count(self):
        """Sets chars (V,), the characters that a token begins within a string, and closes (V,):
        does it contain the quote that ends the string?"""
        chars = np.zeros(len(self.byte), np.int16)
        closes = np.zeros(len(self.byte), bool)
        for nodes, state in self.walk([0], (Counting(),)):
            chars[nodes], closes[nodes] = state[-1].n, state[-1].closed
        self.chars, self.closes = chars[self.node_of], closes[self.node_of]


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
        if isinstance(top, Text) and (top.least or top.most < NO_LIMIT):
            return self.mask((Text(), *state[1:])) & self.trie.fitting(top.least, top.most)
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


class Prepared(dict):
    """The latest constraints, {(schema, tokenizer, end): Constraint}"""
    most = 16

    def keep(self, key, found):
        self[key] = found
        for old in [*islice(self, max(0, len(self) - self.most))]:
            self.pop(old, None)


PREPARED = Prepared()


def constraint(schema, tokenizer, end, alive=lambda: None):
    """The Constraint of a schema, a JSON text or OBJECT.  The latest ones are stored.
    alive: function() that is called between pieces of the preparation, each some milliseconds
    long.  An error that it raises ends the preparation, and leaves nothing behind."""
    key = schema, tokenizer, end
    if key not in PREPARED:
        PREPARED.keep(key, Constraint(schema, trie_of(tokenizer), end, alive))
    return PREPARED[key]
