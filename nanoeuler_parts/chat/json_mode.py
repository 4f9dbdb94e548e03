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
reply stays complete and correct without them, because each byte is a token of its own.  A mask
takes at most three walks, and those of strings and of frames that the schema has are stored.

Willard and Louf 2023 (arxiv.org/abs/2307.09702) describe masks that are stored by state.  Dong et
al. 2024 (arxiv.org/abs/2411.15100) describe the stack, and masks that depend on its top only."""
import threading
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice

import numpy as np

from bpe import need, read_bytes, reading
from nanoeuler_parts.files.texts import marked_encoding, parse_json
from nanoeuler_parts.chat import json_schema
from nanoeuler_parts.chat.json_frames import (
    after_byte, after_bytes, alternatives, ANY_CHARACTER, any_object, can_read, CHARACTER, Choice,
    Digits, Either, either, encoded, first_bytes, is_complete, MOST_DEPTH, NO_LIMIT, OtherName,
    QUOTE, Text,
)
from nanoeuler_parts.chat.json_schema import LONGEST_SCHEMA

OBJECT = "object"                # the schema of any JSON object, in place of a JSON text
MASK_BYTES = 1 << 23             # memory of the masks of one schema and of their states, or of all
                                 # top frames
STATE_BYTES = 300                # of a state, and of each of its alternatives, with its top frame
MOST_STEPS = 2_000               # of one walk through the vocabulary, about 2 ms
UNKNOWN, NOWHERE = -2, -1        # instead of the number of a state
NO_MORE = Choice({})             # reads nothing


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
        text = read_bytes(name)
        found = marked_encoding(text)
        need(not found, f"expected UTF-8, found {found}")
        text = text.decode("utf-8-sig")
        parse_json(text)
    return text


# ---- tokens
def size_of(state):
    """Bytes of memory of a state, about.  Each alternative is a tuple, with a frame of its own on
    top; the other frames are those of the schema, or of other states."""
    each = state[0].states if state and isinstance(state[0], Either) else ()
    return 8 * len(state) + sum(map(len, each)) * 8 + STATE_BYTES * (1 + len(each))


def cost(state):
    """Steps of a walk to read a byte: one, or three for each of several alternatives, since the
    states after it are compared"""
    n = alternatives(state)
    return n if n == 1 else 3 * n


class Masks(dict):
    """{key: make(key)}, made at the first use.  The oldest ones are dropped when all together have
    more than MASK_BYTES.     size: function(key, value), in bytes"""

    def __init__(self, make, size):
        super().__init__()
        self.make, self.size, self.bytes = make, size, 0

    def __missing__(self, key):
        found = self.make(key)
        self.bytes += self.size(key, found)
        while self.bytes > MASK_BYTES and self:
            oldest = next(iter(self))
            self.bytes -= self.size(oldest, self.pop(oldest))
        self[key] = found
        return found


def parts_of(state):
    """The state in one or two parts, which are walked on their own: the alternatives that are
    within a string, and the others"""
    top = state[0] if state else None
    if not isinstance(top, Either):
        return [state]
    texts = tuple(each for each in top.states if each and isinstance(each[0], Text))
    if len(texts) in (0, len(top.states)):
        return [state]
    others = tuple(each for each in top.states if not (each and isinstance(each[0], Text)))
    return [(Either(each), *state[1:]) for each in (texts, others)]


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

    def first_bytes(self):
        return range(0x100) if self.closed else ANY_CHARACTER


class Trie:
    """The tokens of a vocabulary as a tree of their bytes.  Special tokens are not in it.
    Node 0 is the root, and the children of node i are first[i] to first[i + 1] - 1.
    byte: the byte that leads to each node     node_of (V,): where each token ends, 0 if nowhere
    below: the number of tokens that end at each node or below it"""

    def __init__(self, vocab, specials):
        self.vocab, self.V = vocab, len(vocab)
        self.longest = max(map(len, vocab))
        self.masks = Masks(self.new_mask, lambda frame, found: STATE_BYTES + sum(
            x.nbytes for x in found))
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
        below = [np.array([len(ids)])]
        n, level = 1, range(1)               # nodes so far, and the nodes of the last level
        for depth in range(self.longest):
            here = text[starts[rows] + depth]
            new = np.ones(len(rows), bool)   # does a row begin a node?
            new[1:] = (parents[1:] != parents[:-1]) | (here[1:] != here[:-1])
            nodes = n + np.cumsum(new) - 1
            first.append(n + np.searchsorted(parents[new], level))
            byte.append(here[new])
            below.append(np.bincount(nodes - n))
            ending = lengths[rows] == depth + 1
            self.node_of[ids[rows[ending]]] = nodes[ending]
            level = np.arange(n, n + np.count_nonzero(new))
            rows, parents, n = rows[~ending], nodes[~ending], n + len(level)
        first.append(np.full(len(level) + 1, n))
        self.byte, self.first = np.concatenate(byte), np.concatenate(first)
        self.below = np.concatenate(below)

    def walk(self, starts, most=NO_LIMIT):
        """(the nodes below these that the states can read, the number of the state at each node,
        the list of these states).  The walk reads level by level, so that a state reads a byte only
        once for all nodes at which it is.
        starts: [(nodes, the state at them)]
        most: the walk ends after this many steps (see `cost`), and longer tokens are left out.
        Bytes with more tokens below them are read first.  Every token of one byte is found."""
        states, number = [(NO_MORE,)], {}
        table, nodes, at = np.full((1, 256), NOWHERE), [], []        # of the number of a state

        def number_of(state):
            if state not in number:
                number[state] = len(states)
                states.append(state)
            return number[state]

        for begin, state in starts:
            nodes.append(np.asarray(begin))
            at.append(np.full(len(begin), number_of(state)))
        nodes, at = np.concatenate(nodes), np.concatenate(at)
        found, steps, first_bytes_of = [(nodes[:0], at[:0])], 0, {}
        while len(nodes):
            table = np.concatenate([table, np.full((len(states) - len(table), 256), UNKNOWN)])
            first = self.first[nodes]
            counts = self.first[nodes + 1] - first
            begins = np.cumsum(counts) - counts
            nodes = np.repeat(first - begins, counts) + np.arange(counts.sum())
            keys = np.repeat(at, counts) * 256 + self.byte[nodes]
            new = table.ravel()[keys] == UNKNOWN
            worth = np.bincount(keys[new], self.below[nodes[new]], minlength=1)
            alone = {*keys[new & (nodes < self.first[1])].tolist()}  # tokens of one byte
            for key in np.argsort(-worth, kind="stable")[:np.count_nonzero(worth)].tolist():
                if steps >= most and key not in alone:
                    if alone:
                        continue
                    break
                n, byte = divmod(key, 256)
                state, reached = states[n], NOWHERE
                if n not in first_bytes_of:
                    first_bytes_of[n] = first_bytes(state)
                    steps += cost(state) - 1
                if byte in first_bytes_of[n]:
                    if steps < most:
                        steps += cost(state)
                        after = after_byte(state, byte)
                        reached = NOWHERE if after is None else number_of(after)
                    elif can_read(state, byte):
                        reached = 0          # NO_MORE
                table.ravel()[key] = reached
            after = table.ravel()[keys]
            nodes, at = nodes[after >= 0], after[after >= 0]
            found.append((nodes, at))
        nodes, at = (np.concatenate(each) for each in zip(*found))
        return nodes, at, states

    def mask(self, state):
        """(V,) bool: the tokens that a state can read"""
        return np.logical_or.reduce([self.mask_of(part) for part in parts_of(state)])

    def mask_of(self, state):
        """The same for one of parts_of(state).  The work within a string, or within another frame
        that the schema has, is stored: it depends on the top frame only."""
        if not state:
            return np.zeros(self.V, bool)
        top, rest = state[0], state[1:]
        if isinstance(top, Text):
            return self.mask_of_texts([(top,)], rest)
        if isinstance(top, Either) and top.states[0] and isinstance(top.states[0][0], Text):
            return self.mask_of_texts(top.states, rest)
        if isinstance(top, Either | Digits | OtherName):     # there are too many of these
            return self.tokens_at(self.walk([([0], state)], MOST_STEPS)[0])
        inside, complete = self.masks[top]
        mask = np.unpackbits(inside, count=self.V).view(bool)
        if len(complete) and rest:
            mask |= self.tokens_at(self.walk([(complete, rest)], MOST_STEPS)[0])
        return mask

    def mask_of_texts(self, states, rest):
        """The same for alternatives that are within a string.  All strings have the tokens of one
        without limits, less those that are too long or close it too early.  Where a token continues
        after the quote, it depends on the number of characters before it which of the alternatives
        have allowed the quote.     states: alternatives, with a Text on top     rest: after them"""
        inside, complete = self.masks[Text()]
        texts = [state[0] for state in states]
        mask = np.unpackbits(inside, count=self.V).view(bool) & self.fitting(texts)
        if any(len(state) > 1 for state in states) or rest:
            n, starts = self.characters[complete], {}
            for chars in np.unique(n).tolist():
                closed = dict.fromkeys(state[1:] for state in states
                                       if state[0].least <= chars <= state[0].most)
                if closed:
                    starts.setdefault(tuple(closed), []).append(complete[n == chars])
            starts = [(np.concatenate(nodes), (*either(closed), *rest))
                      for closed, nodes in starts.items()]
            if starts:
                mask |= self.tokens_at(self.walk(starts, MOST_STEPS)[0])
        return mask

    def new_mask(self, frame):
        """(bits of the tokens inside a frame, the nodes at which the frame is complete)"""
        most = NO_LIMIT if frame == Text() else MOST_STEPS
        nodes, at, states = self.walk([([0], (frame,))], most)
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
        a string, and how many characters does it begin within the string?  And characters: of each
        node, the second of these."""
        nodes, at, states = self.walk([([0], (Counting(),))])
        counts = np.array([(0, 0)] + [(state[-1].closed, state[-1].n) for state in states[1:]])
        of_nodes = np.zeros((len(self.byte), 2), np.int64)
        of_nodes[nodes] = counts[at]
        self.characters = of_nodes[:, 1].copy()
        self.length = (of_nodes @ (self.longest + 1, 1))[self.node_of]


class Constraint:
    """The tokens that may come next, for each state of a reply.  It is shared by all replies with
    the same schema.     end: id of the token that ends a reply, or None"""

    def __init__(self, schema, trie, end, alive=lambda: None):
        frame, names = compiled(schema, alive)
        self.start, self.trie, self.end = (frame,), trie, end
        self.masks = Masks(self.new_mask, lambda state, found: size_of(state) + found.nbytes)
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
        return np.unpackbits(self.masks[self.near(state)], count=self.trie.V).view(bool)

    def near(self, state):
        """A state with the same mask, in which limits of strings and numbers that are too far for
        any token are left out.  So a mask serves as long as no limit is near."""
        def near(state):
            if state and isinstance(state[0], Text | Digits):
                return state[0].near(self.trie.longest), *state[1:]
            return state

        if state and isinstance(state[0], Either):
            return Either(tuple(dict.fromkeys(map(near, state[0].states)))), *state[1:]
        return near(state)

    def new_mask(self, state):
        mask = self.trie.mask(state)
        if self.end is not None and is_complete(state):
            mask[self.end] = True
        return np.packbits(mask)

    def after(self, state, token):
        """The state after a token that its mask allows; () if the value is complete and nothing
        can follow"""
        text = self.trie.vocab[token]
        found = after_bytes(state, text)
        if found is None:            # all alternatives together became more than MOST_LIVE
            found = next(filter(None, (after_bytes(part, text) for part in parts_of(state))))
        return found


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
