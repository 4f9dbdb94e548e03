"""Byte-level BPE: text to token ids and back, learned from text, nothing but Numba and NumPy.

    python bpe.py train data/shakespeare.txt --vocab-size 512 --out tokenizer.json
    echo "To be, or not to be" | python bpe.py encode --tokenizer tokenizer.json
    python bpe.py decode ids.txt --tokenizer tokenizer.json

Tokenizing takes two steps. GPT-2's pattern first cuts the text into words (section 2); then inside
each word, starting from single bytes, the pair of neighbours that was learned first is replaced by
its merged token, again and again (section 5). Training (section 4) finds the pairs: it merges the
most frequent pair of the corpus, counts again, and so on (Sennrich et al. 2016, algorithm 1).

    0  settings            3  tables and a heap    6  the tokenizer and its files
    1  bytes and classes   4  training             7  streaming text
    2  words               5  encoding             8  the Unicode table
                                                   9  command line

Conventions, the same as Hugging Face `tokenizers` and tiktoken: byte ids follow GPT-2's order, ties
go to the smaller pair of ids, a merge whose string exists reuses its id, special tokens come last
and text never produces them. A byte that is no valid UTF-8 is a word of its own: all bytes survive.
Shapes: N bytes of text, V tokens, M merges. A pair is (left id, right id); its rank is its index in
`merges`. Words and pairs are half-open ranges [i, j) of positions.
"""

# ==== 0 Settings ====
import argparse
import codecs
import hashlib
import json
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor

os.environ.setdefault("NUMBA_OPT", "1")     # as fast as 3 here, and less compiling

import numpy as np
from numba import get_num_threads, njit, prange

JIT = dict(error_model="numpy", nogil=True, cache=True)
PARALLEL_FROM = 8 << 20     # bytes; below, one thread needs 0.1 s and the threads are not worth waking
MAX_VOCAB = 1 << 20         # ids fit the 21 bits that the training heap gives them
MAX_FILE = 256 << 20        # bytes; GPT-2's tokenizer.json has 2 MB


class TokenizerError(ValueError):
    """A tokenizer that cannot be built or read: one line with the file, the values, the remedy."""


# ==== 1 Bytes and classes ====
# GPT-2 writes each byte as a printable character, so that vocab.json is text: 188 bytes stand for
# themselves, the other 68 (space, controls, ...) become U+0100 and up. Ids follow that order.
BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES += [b for b in range(256) if b not in BYTES]
CHARS = [chr(b) if k < 188 else chr(256 + k - 188) for k, b in enumerate(BYTES)]
CHAR_OF_BYTE = dict(zip(BYTES, CHARS))
BYTE_OF_CHAR = dict(zip(CHARS, BYTES))
BYTE_ID = np.argsort(BYTES).astype(np.int32)            # byte -> id in a vocabulary trained here

OTHER, LETTER, NUMBER, SPACE, INVALID = 0, 1, 2, 3, 4   # [^\s\p{L}\p{N}], \p{L}, \p{N}, \s, no UTF-8


def class_table():
    """(0x110000,) uint8: the class of every code point. 1.1 MB, of which a text touches a few KB."""
    table = np.zeros(0x110000, np.uint8)
    for kind, ranges in ((LETTER, LETTERS), (NUMBER, NUMBERS), (SPACE, SPACES)):
        for r in ranges.split():
            first, _, last = r.partition("-")
            table[int(first, 16):int(last or first, 16) + 1] = kind
    return table


# ==== 2 Words ====
# GPT-2's pattern: 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
@njit(inline="always", **JIT)
def char_at(text, i, end, classes):
    """(class, length in bytes) of the UTF-8 character at i (RFC 3629, no surrogates, no long forms);
    (INVALID, 1) where there is none."""
    b = np.int64(text[i])
    if b < 0x80:
        return np.int64(classes[b]), 1
    if 0xC2 <= b < 0xE0:
        n, point = 2, b & 0x1F
    elif 0xE0 <= b < 0xF0:
        n, point = 3, b & 0x0F
    elif 0xF0 <= b < 0xF5:
        n, point = 4, b & 0x07
    else:
        return INVALID, 1
    if i + n > end:
        return INVALID, 1
    for k in range(1, n):
        c = np.int64(text[i + k])
        if c & 0xC0 != 0x80:
            return INVALID, 1
        point = point << 6 | c & 0x3F
    if (n == 3 and (point < 0x800 or 0xD800 <= point < 0xE000)
            or n == 4 and not 0x10000 <= point < 0x110000):
        return INVALID, 1
    return np.int64(classes[point]), n


@njit(**JIT)
def word_end(text, i, end, classes):
    """End of the word that starts at i: GPT-2's pattern, plus `an invalid byte` as an alternative."""
    b = text[i]
    if b == 39 and i + 1 < end:                                 # ' and then s t m d, re ve ll
        c = text[i + 1]
        if c == 115 or c == 116 or c == 109 or c == 100:
            return i + 2
        if i + 2 < end:
            d = text[i + 2]
            if d == 101 and (c == 114 or c == 118) or d == 108 and c == 108:
                return i + 3
    kind, n = char_at(text, i, end, classes)
    j = i + n
    if b == 32 and j < end:                                     # one space joins the word after it
        kind_next, n = char_at(text, j, end, classes)
        if kind_next != SPACE and kind_next != INVALID:
            kind = kind_next
            j += n
    if kind == INVALID:
        return j
    last = i                                                    # where the last character begins
    while j < end:
        kind_next, n = char_at(text, j, end, classes)
        if kind_next != kind:
            break
        last = j
        j += n
    if kind == SPACE and j < end and last > i:
        return last                                             # \s+(?!\S) leaves the last space
    return j


# ==== 3 Tables and a heap ====
# A word table is (R, 4) int64, R a power of two: hash, start, end, value; end 0 marks a free row.
@njit(**JIT)
def hash_word(text, i, j):
    """FNV-1a with a 64-bit multiplier, the high half folded in so that a mask may index with it."""
    h = np.int64(j - i)
    for k in range(i, j):
        h = (h ^ text[k]) * 0x2545F4914F6CDD1D
    return h ^ (h >> 32)


@njit(**JIT)
def find_word(table, text, h, i, j):
    """Row of text[i:j], whose hash is h, or the free row where it belongs (linear probing)."""
    mask = len(table) - 1
    r = h & mask
    while table[r, 2] != 0:
        if table[r, 0] == h and table[r, 2] - table[r, 1] == j - i:
            k, d = i, table[r, 1] - i
            while k < j and text[k] == text[k + d]:
                k += 1
            if k == j:
                break
        r = (r + 1) & mask
    return r


@njit(**JIT)
def find_pair(table, left, right):
    """Row of a pair in a pair table: (R, 2) int64, left << 32 | right and rank; rank -1 is free."""
    mask = len(table) - 1
    key = np.int64(left) << 32 | np.int64(right)
    r = (key * 0x2545F4914F6CDD1D >> 36) & mask
    while table[r, 1] >= 0 and table[r, 0] != key:
        r = (r + 1) & mask
    return r


@njit(**JIT)
def fill_pairs(table, merges):
    for rank in range(len(merges)):
        left, right = merges[rank, 0], merges[rank, 1]
        r = find_pair(table, left, right)
        table[r, 0] = left << 32 | right
        table[r, 1] = rank


@njit(**JIT)
def heap_push(heap, size, a, b):
    """Adds (a, b) to a binary min-heap of int64 pairs, (size or more, 2); returns the new size."""
    k = size
    while k > 0:
        up = (k - 1) >> 1
        if heap[up, 0] < a or heap[up, 0] == a and heap[up, 1] <= b:
            break
        heap[k, 0], heap[k, 1] = heap[up, 0], heap[up, 1]
        k = up
    heap[k, 0], heap[k, 1] = a, b
    return size + 1


@njit(**JIT)
def heap_pop(heap, size):
    """Removes heap[0], the smallest; returns the new size."""
    size -= 1
    a, b = heap[size, 0], heap[size, 1]
    k, child = 0, 1
    while child < size:
        if child + 1 < size and (heap[child + 1, 0] < heap[child, 0]
                or heap[child + 1, 0] == heap[child, 0] and heap[child + 1, 1] < heap[child, 1]):
            child += 1
        if a < heap[child, 0] or a == heap[child, 0] and b <= heap[child, 1]:
            break
        heap[k, 0], heap[k, 1] = heap[child, 0], heap[child, 1]
        k, child = child, 2 * child + 1
    heap[k, 0], heap[k, 1] = a, b
    return size


# A cut between a visible ASCII character and a blank is always a word boundary, so what lies on its
# two sides can be tokenized apart.
CUT = re.compile(rb"[!-~](?=[ \n])")


def split_text(text, n):
    """About n + 1 positions, 0 and N among them, between which text can be tokenized on its own."""
    cuts = [0]
    for k in range(1, n):
        m = CUT.search(text, max(cuts[-1], len(text) * k // n))
        if m:
            cuts.append(m.end())
    return np.array(cuts + [len(text)])


def as_array(text):
    """(N,) uint8 view of a str or bytes, read-only: one type means one compilation."""
    if isinstance(text, str):
        text = text.encode("utf-8", "surrogatepass")    # a lone surrogate becomes 3 invalid bytes
    array = np.frombuffer(text, np.uint8)
    array.flags.writeable = False
    return array


# ==== 4 Training ====
@njit(**JIT)
def count_words(table, used, text, i, end, classes):
    """Counts the words of text[i:end] in table (value = count) until it is half full.
    Returns (where it stopped, rows used)."""
    while i < end and 2 * used < len(table):
        j = word_end(text, i, end, classes)
        h = hash_word(text, i, j)
        r = find_word(table, text, h, i, j)
        if table[r, 2] == 0:
            table[r, 0], table[r, 1], table[r, 2] = h, i, j
            used += 1
        table[r, 3] += 1
        i = j
    return i, used


@njit(**JIT)
def add_words(table, other, text):
    """Adds the words and counts of another table; returns how many rows that filled."""
    used = 0
    for o in range(len(other)):
        i, j = other[o, 1], other[o, 2]
        if j != 0:
            r = find_word(table, text, other[o, 0], i, j)
            if table[r, 2] == 0:
                table[r, 0], table[r, 1], table[r, 2] = other[o, 0], i, j
                used += 1
            table[r, 3] += other[o, 3]
    return used


def unique_words(text):
    """(U, 4) int64 rows hash, start, end, count: each word of text once. One thread a stretch."""
    def count(start, end):
        table, used = np.zeros((1 << 15, 4), np.int64), 0
        while True:
            start, used = count_words(table, used, text, start, end, CLASSES)
            if start == end:
                return table
            table, half = np.zeros((2 * len(table), 4), np.int64), table
            add_words(table, half, text)

    cuts = split_text(text, get_num_threads() if len(text) >= PARALLEL_FROM else 1)
    with ThreadPoolExecutor() as pool:                  # count_words runs without the GIL
        tables = list(pool.map(count, cuts[:-1], cuts[1:]))
    if len(tables) == 1:
        table = tables[0]
    else:
        rows = sum(int((t[:, 2] > 0).sum()) for t in tables)
        table = np.zeros((1 << (2 * rows + 1).bit_length(), 4), np.int64)
        for t in tables:
            add_words(table, t, text)
    return table[table[:, 2] > 0]


@njit(**JIT)
def spell_words(ids, weight, words, text, byte_id):
    """Writes the words as byte ids, -1 before, between and after them, and at every position the
    count of its word.     ids (P,) int32, weight (P,) int64"""
    p = 0
    for w in range(len(words)):
        ids[p] = -1
        p += 1
        for k in range(words[w, 1], words[w, 2]):
            ids[p] = byte_id[text[k]]
            weight[p] = words[w, 3]
            p += 1
    ids[p] = -1


# A pair under training is one row of (Q, 5) int64: its two ids, its count, and the first and last of
# its occurrences. Occurrences of one pair are a doubly linked list through the positions themselves:
# at[p] (P, 3) int32 holds the row of the pair that starts at p, and the list's neighbours of p.
LEFT, RIGHT, COUNT, FIRST, LAST = 0, 1, 2, 3, 4
ROW, BACK, NEXT = 0, 1, 2


@njit(**JIT)
def link(pairs, at, p, row, weight):
    """Position p becomes the last occurrence of pair `row`."""
    q = pairs[row, LAST]
    at[p, ROW], at[p, BACK], at[p, NEXT] = row, q, -1
    if q < 0:
        pairs[row, FIRST] = p
    else:
        at[q, NEXT] = p
    pairs[row, LAST] = p
    pairs[row, COUNT] += weight


@njit(**JIT)
def unlink(pairs, at, p, weight):
    """Position p no longer starts a pair."""
    row, q, r = at[p, ROW], at[p, BACK], at[p, NEXT]
    if q < 0:
        pairs[row, FIRST] = r
    else:
        at[q, NEXT] = r
    if r < 0:
        pairs[row, LAST] = q
    else:
        at[r, BACK] = q
    pairs[row, COUNT] -= weight


@njit(**JIT)
def new_row(pairs, used, left, right):
    """A row for a pair not seen before, in a table twice as long if this one is full."""
    if used == len(pairs):
        old = pairs
        pairs = np.empty((2 * used, 5), np.int64)
        for r in range(used):
            for c in range(5):
                pairs[r, c] = old[r, c]
    pairs[used, LEFT], pairs[used, RIGHT], pairs[used, COUNT] = left, right, 0
    pairs[used, FIRST], pairs[used, LAST] = -1, -1
    return pairs


@njit(**JIT)
def learn_merges(merges, ids, weight):
    """Fills merges (M, 2) int32 with the pairs in the order they are merged, and returns how many:
    fewer than M when no pair is left. Token 256 + m is merge m.

    The most frequent pair comes from a heap of (-count, left, right) in two int64. Counts of pairs
    in the heap only fall, so an entry that is out of date is put back with today's count.
    A pair is born in one step, the one that makes the younger of its two tokens; so a step finds the
    rows of its new pairs in two arrays over ids, and no table of pairs is needed."""
    P, V = len(ids), 256 + len(merges)
    prev, next = np.arange(-1, P - 1).astype(np.int32), np.arange(1, P + 1).astype(np.int32)
    at = np.empty((P, 3), np.int32)
    pairs = np.empty((1 << 17, 5), np.int64)
    used = 0
    for row in range(1 << 16):
        pairs = new_row(pairs, used, row >> 8, row & 255)
        used += 1
    for p in range(P - 1):
        if ids[p] >= 0 and ids[p + 1] >= 0:
            link(pairs, at, p, ids[p] << 8 | ids[p + 1], weight[p])
    heap, size = np.empty((len(pairs), 2), np.int64), 0
    born, m = 0, 0                                      # rows from `born` on are not in the heap yet
    before, after = np.full(V, -1), np.full(V, -1)      # rows of (id, token) and of (token, id)
    while True:
        if len(heap) < len(pairs):                      # as many entries as pairs, at most
            old = heap
            heap = np.empty((len(pairs), 2), np.int64)
            for e in range(size):
                heap[e, 0], heap[e, 1] = old[e, 0], old[e, 1]
        for row in range(born, used):
            if pairs[row, COUNT] > 0:
                size = heap_push(heap, size, (-pairs[row, COUNT] << 21) + pairs[row, LEFT],
                                 pairs[row, RIGHT] << 32 | row)
            before[pairs[row, LEFT]] = after[pairs[row, RIGHT]] = -1
        born = used
        if size == 0 or m == len(merges):
            return m
        row = heap[0, 1] & 0xFFFFFFFF
        count = -(heap[0, 0] >> 21)
        size = heap_pop(heap, size)
        if pairs[row, COUNT] != count:
            if pairs[row, COUNT] > 0:
                size = heap_push(heap, size, (-pairs[row, COUNT] << 21) + pairs[row, LEFT],
                                 pairs[row, RIGHT] << 32 | row)
            continue
        token = 256 + m
        merges[m, 0], merges[m, 1] = pairs[row, LEFT], pairs[row, RIGHT]
        m += 1
        while pairs[row, FIRST] >= 0:                   # a [left right] d  becomes  a [token] d
            p = pairs[row, FIRST]                       # leftmost first: aaa is [aa]a
            q = next[p]
            a, d = prev[p], next[q]
            unlink(pairs, at, p, weight[p])
            ids[p], next[p], prev[d] = token, d, p
            if ids[d] >= 0:
                unlink(pairs, at, q, weight[p])
                if after[ids[d]] < 0:
                    pairs = new_row(pairs, used, token, ids[d])
                    after[ids[d]] = used
                    used += 1
                link(pairs, at, p, after[ids[d]], weight[p])
            if ids[a] >= 0:
                unlink(pairs, at, a, weight[p])
                if before[ids[a]] < 0:
                    pairs = new_row(pairs, used, ids[a], token)
                    before[ids[a]] = used
                    used += 1
                link(pairs, at, a, before[ids[a]], weight[p])


def train(text, vocab_size, specials=("</s>",)):
    """Tokenizer of vocab_size tokens: 256 bytes, merges learned from text, specials. When the text
    runs out of pairs the vocabulary is smaller: compare `tokenizer.vocab_size`."""
    specials, text = list(specials), as_array(text)
    n_merges = vocab_size - 256 - len(specials)
    if n_merges < 0 or vocab_size > MAX_VOCAB:
        raise TokenizerError(f"vocab_size {vocab_size}: choose {256 + len(specials)} (256 bytes and "
                             f"{len(specials)} special tokens) to {MAX_VOCAB}")
    words = unique_words(text)
    P = int((words[:, 2] - words[:, 1]).sum()) + len(words) + 1
    if P >= 1 << 31:
        raise TokenizerError(f"unique words of {P} bytes: train on a sample (limit {(1 << 31) - 1})")
    ids, weight = np.empty(P, np.int32), np.empty(P, np.int64)
    spell_words(ids, weight, words, text, BYTE_ID)
    merges = np.empty((n_merges, 2), np.int32)
    m = learn_merges(merges, ids, weight)
    vocab = [bytes([b]) for b in BYTES]
    for left, right in merges[:m].tolist():
        vocab.append(vocab[left] + vocab[right])        # never a string twice: see the tests
    first = len(vocab)
    vocab += [s.encode() for s in specials]
    return Tokenizer(vocab, merges[:m].tolist(), {s: first + k for k, s in enumerate(specials)})


# ==== 5 Encoding ====
NONE = 1 << 30      # rank of a pair that is no merge


@njit(**JIT)
def pair_rank(table, left, right):
    rank = table[find_pair(table, left, right), 1]
    return rank if rank >= 0 else NONE


@njit(**JIT)
def merge_word(ids, n, table, token, heap, rank, prev, next):
    """Merges ids[:n], one word's byte ids, in place: always the pair of lowest rank, of those the
    leftmost. Returns how many are left. O(n log n); rank, prev, next (n,) and heap (3n, 2): scratch."""
    size = 0
    for p in range(n):
        prev[p], next[p], rank[p] = p - 1, p + 1, NONE
        if p + 1 < n:
            rank[p] = pair_rank(table, ids[p], ids[p + 1])
            if rank[p] != NONE:
                size = heap_push(heap, size, rank[p], p)
    while size > 0:
        r, p = heap[0, 0], heap[0, 1]
        size = heap_pop(heap, size)
        if rank[p] != r:                                # p's pair has changed since
            continue
        q = next[p]
        ids[p], next[p], rank[p], rank[q] = token[r], next[q], NONE, NONE
        if next[p] < n:
            prev[next[p]] = p
            rank[p] = pair_rank(table, ids[p], ids[next[p]])
            if rank[p] != NONE:
                size = heap_push(heap, size, rank[p], p)
        a = prev[p]
        if a >= 0:
            rank[a] = pair_rank(table, ids[a], ids[p])
            if rank[a] != NONE:
                size = heap_push(heap, size, rank[a], a)
    m, p = 0, 0
    while p < n:
        ids[m] = ids[p]
        m, p = m + 1, next[p]
    return m


@njit(**JIT)
def encode_range(out, text, start, end, classes, byte_id, table, token):
    """Token ids of text[start:end] into out[start:]; returns how many.
    A word seen before is copied from where it was first written: `seen` is a word table with
    value = first id << 8 | how many, so words of 256 bytes and more stay out of it."""
    rows = 1 << 10
    while rows < 1 << 16 and rows < (end - start) >> 3:
        rows *= 2
    seen, used = np.zeros((rows, 4), np.int64), 0
    room = 256
    heap, rank = np.empty((3 * room, 2), np.int64), np.empty(room, np.int64)
    prev, next = np.empty(room, np.int64), np.empty(room, np.int64)
    i = m = start
    while i < end:
        j = word_end(text, i, end, classes)
        h = hash_word(text, i, j)
        r = find_word(seen, text, h, i, j)
        if seen[r, 2] != 0:
            first, n = seen[r, 3] >> 8, seen[r, 3] & 255
            for k in range(n):
                out[m + k] = out[first + k]
        else:
            n = j - i
            if n > room:
                room = 2 * n
                heap, rank = np.empty((3 * room, 2), np.int64), np.empty(room, np.int64)
                prev, next = np.empty(room, np.int64), np.empty(room, np.int64)
            for k in range(n):
                out[m + k] = byte_id[text[i + k]]
            n = merge_word(out[m:m + n], n, table, token, heap, rank, prev, next)
            if j - i < 256 and 2 * used < rows:
                seen[r, 0], seen[r, 1], seen[r, 2], seen[r, 3] = h, i, j, m << 8 | n
                used += 1
        m += n
        i = j
    return m - start


@njit(parallel=True, **JIT)
def encode_ranges(counts, out, text, cuts, classes, byte_id, table, token):
    """encode_range on each [cuts[c], cuts[c + 1]), spread over the threads."""
    for c in prange(len(cuts) - 1):
        counts[c] = encode_range(out, text, cuts[c], cuts[c + 1], classes, byte_id, table, token)


# ==== 6 The tokenizer and its files ====
def check(ok, message):
    if not ok:
        raise TokenizerError(message)


class Tokenizer:
    """vocab: list of V bytes     merges: list of M (left id, right id), by rank
    specials: dict str -> id     token_bytes (V,) int32: bytes of text a token stands for, 0 if special"""

    def __init__(self, vocab, merges, specials):
        self.vocab = list(vocab)
        self.merges = [(left, right) for left, right in merges]
        self.specials = dict(sorted(specials.items(), key=lambda item: item[1]))
        self.vocab_size = len(self.vocab)
        special_ids = set(self.specials.values())
        id_of = {t: k for k, t in enumerate(self.vocab) if k not in special_ids}
        names = {visible(t) for t in id_of}
        for s in self.specials:
            check(s and s not in names, f"special token {s!r} is also made from text: choose a string "
                                        "such as </s>, which the words of a text never form")
        self.token_bytes = np.array([0 if k in special_ids else len(t)
                                     for k, t in enumerate(self.vocab)], np.int32)
        self._byte_id = np.array([id_of[bytes([b])] for b in range(256)], np.int32)
        self._token = np.array([id_of[self.vocab[left] + self.vocab[right]]
                                for left, right in self.merges], np.int32)
        self._table = np.full((1 << (4 * len(self.merges) + 1).bit_length(), 2), -1, np.int64)
        fill_pairs(self._table, np.array(self.merges, np.int64).reshape(-1, 2))

    def encode(self, text):
        """Ids, int32, of a str or bytes. Ordinary text only: the characters </s> are three tokens or
        so, never the special one."""
        text = as_array(text)
        out = np.empty(len(text), np.int32)     # a token has a byte or more; unused pages cost nothing
        tables = (CLASSES, self._byte_id, self._table, self._token)
        if len(text) < PARALLEL_FROM:
            return out[:encode_range(out, text, 0, len(text), *tables)].copy()
        cuts = split_text(text, get_num_threads())
        counts = np.empty(len(cuts) - 1, np.int64)
        encode_ranges(counts, out, text, cuts, *tables)
        return np.concatenate([out[i:i + n] for i, n in zip(cuts, counts)])

    def decode(self, ids):
        """Bytes of a sequence of ids; a special token becomes its name."""
        ids = np.asarray(ids, np.int64).ravel()
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            bad = ids[(ids < 0) | (ids >= self.vocab_size)][0]
            raise TokenizerError(f"token id {bad}: this tokenizer has ids 0 to {self.vocab_size - 1}")
        return b"".join(map(self.vocab.__getitem__, ids.tolist()))

    def hash(self):
        """SHA-256, hex, of vocabulary, merges and specials: the same through any file format."""
        form = [[t.hex() for t in self.vocab], self.merges, list(self.specials.items())]
        return hashlib.sha256(json.dumps(form, separators=(",", ":")).encode()).hexdigest()

    def _names(self):
        """The vocabulary as files write it: (dict name -> id, list of merges "left right")."""
        names = [visible(t) for t in self.vocab]
        for s, k in self.specials.items():
            names[k] = s
        return ({name: k for k, name in enumerate(names)},
                [f"{names[left]} {names[right]}" for left, right in self.merges])

    def to_json(self):
        """The text of a Hugging Face tokenizer.json, compact."""
        vocab, merges = self._names()
        byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
        flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
        return json.dumps(dict(
            version="1.0", truncation=None, padding=None,
            added_tokens=[dict(id=k, content=s, **flags) for s, k in self.specials.items()],
            normalizer=None, pre_tokenizer=byte_level, post_processor=None, decoder=byte_level,
            model=dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None,
                       end_of_word_suffix=None, fuse_unk=False, byte_fallback=False,
                       ignore_merges=False, vocab=vocab, merges=merges)),
            ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text, source="tokenizer.json"):
        """The tokenizer of a tokenizer.json, if it is byte-level BPE over GPT-2's words."""
        root = parse_json(text, source)
        model, words = root.get("model"), root.get("pre_tokenizer")
        check(isinstance(model, dict) and model.get("type", "BPE") == "BPE",
              f"{source}: no model of type BPE: use the tokenizer.json of a byte-level BPE")
        check(isinstance(words, dict) and words.get("type") == "ByteLevel"
              and words.get("use_regex", True) is True and words.get("add_prefix_space") is False,
              f"{source}: pre_tokenizer is not ByteLevel with use_regex true, add_prefix_space false, "
              "the words of GPT-2: other words need another program")
        for where, keys in ((root, ["normalizer"]), (model, [
                "dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback",
                "ignore_merges"])):
            for key in keys:
                check(not where.get(key), f"{source}: {key} is set to {str(where.get(key))[:40]}, "
                                          "which changes the ids: use a tokenizer without it")
        added = root.get("added_tokens") or []
        check(isinstance(added, list) and all(isinstance(a, dict) for a in added),
              f"{source}: added_tokens is no list of objects: save the tokenizer again")
        return from_names(model.get("vocab"), model.get("merges"),
                          [(a.get("content"), a.get("id")) for a in added], source)

    def save(self, path):
        """Writes a tokenizer.json (path ends in .json) or a directory of vocab.json, merges.txt."""
        if str(path).endswith(".json"):
            write_file(path, self.to_json())
        else:
            vocab, merges = self._names()
            os.makedirs(path, exist_ok=True)
            write_file(os.path.join(path, "vocab.json"),
                       json.dumps(vocab, ensure_ascii=False, separators=(",", ":")))
            write_file(os.path.join(path, "merges.txt"), "\n".join(["#version: 0.2", *merges, ""]))

    @classmethod
    def load(cls, path):
        """Reads what save wrote, or the same files from GPT-2 and Hugging Face."""
        if not os.path.isdir(path):
            return cls.from_json(read_file(path), path)
        source, lines = os.path.join(path, "vocab.json"), os.path.join(path, "merges.txt")
        vocab, merges = parse_json(read_file(source), source), read_file(lines).split("\n")
        if merges[0].startswith("#version"):
            merges = merges[1:]
        return from_names(vocab, [m.rstrip("\r") for m in merges if m.strip()], [], lines)


def visible(token):
    """GPT-2's printable form of a token."""
    return "".join(map(CHAR_OF_BYTE.__getitem__, token))


def from_names(names, merges, added, source):
    """Tokenizer from a dict name -> id, merges "left right" or [left, right], and (name, id) of the
    added tokens. A name that is neither one byte nor a merge is a special token."""
    check(isinstance(names, dict) and isinstance(merges, list),
          f"{source}: vocab is no object or merges is no list: save the tokenizer again")
    for name, k in added:
        check(isinstance(name, str) and names.get(name, k) == k,
              f"{source}: added token {str(name)[:40]!r} has id {str(k)[:20]}, in the vocabulary "
              f"{str(names.get(name) if isinstance(name, str) else None)[:20]}: make them agree")
    names = {**names, **dict(added)}
    V = len(names)
    check(all(type(k) is int for k in names.values()) and sorted(names.values()) == list(range(V))
          and V <= MAX_VOCAB, f"{source}: the ids of its {V} tokens are not 0 to {V - 1}, each once "
                              f"(at most {MAX_VOCAB}): save the tokenizer again")
    pairs = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) if isinstance(m, list) else ()
             for m in merges]
    for k, pair in enumerate(pairs):
        check(len(pair) == 2 and all(isinstance(s, str) for s in pair),
              f"{source}: merge {k} is {str(merges[k])[:40]!r}: write two tokens and one space")
    made = {left + right for left, right in pairs}.union(CHARS)
    for s in CHARS:
        check(s in names, f"{source}: byte {BYTE_OF_CHAR[s]} ({s!r}) has no token: train with the full "
                          "alphabet of 256 bytes")
    for k, (left, right) in enumerate(pairs):
        for s in (left, right, left + right):
            check(s in names and s in made and set(s) <= BYTE_OF_CHAR.keys(),
                  f"{source}: merge {k} needs the token {s[:40]!r}, which the vocabulary lacks: use "
                  "vocabulary and merges of one tokenizer")
    check(len(set(pairs)) == len(pairs), f"{source}: {len(pairs)} merges, {len(set(pairs))} of them "
                                         "different: each may stand once")
    specials = {s: k for s, k in names.items() if s not in made}
    for s in dict(added):
        check(s in specials, f"{source}: added token {s!r} is also made from text: rename it")
    try:
        vocab = [b""] * V
        for s, k in names.items():
            vocab[k] = s.encode() if s in specials else bytes(map(BYTE_OF_CHAR.__getitem__, s))
        return Tokenizer(vocab, [(names[left], names[right]) for left, right in pairs], specials)
    except ValueError as error:
        raise TokenizerError(f"{source}: {error}") from None


def parse_json(text, source):
    try:
        root = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{source}: no JSON ({str(error)[:80]}): save the tokenizer again") from None
    check(isinstance(root, dict), f"{source}: a JSON {type(root).__name__}, not an object: "
                                  "give a tokenizer.json or a directory with vocab.json, merges.txt")
    return root


def read_file(path):
    try:
        size = os.path.getsize(path)
        check(size <= MAX_FILE, f"{path}: {size} bytes, at most {MAX_FILE}: is it a tokenizer?")
        with open(path, encoding="utf-8", newline="") as f:
            return f.read(size)
    except OSError as error:
        raise TokenizerError(f"{path}: {error.strerror}: give a tokenizer.json or a directory with "
                             "vocab.json and merges.txt (`python bpe.py train` makes one)") from None
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path}: byte {error.start} is no UTF-8: save the tokenizer again") from None


def write_file(path, text):
    """Atomically: a reader sees the old file or the new one."""
    part = f"{path}.{os.getpid()}.part"
    try:
        with open(part, "w", encoding="utf-8", newline="\n") as f:
            f.write(text)
        os.replace(part, path)
    finally:
        if os.path.exists(part):
            os.remove(part)


# ==== 7 Streaming text ====
class Utf8Stream:
    """Text from bytes that arrive in pieces: a character appears once its last byte is there, and an
    invalid sequence becomes U+FFFD as in bytes.decode("utf-8", "replace")."""

    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data):
        return self._decoder.decode(data)

    def close(self):
        """What an unfinished character at the end amounts to."""
        return self._decoder.decode(b"", True)


# ==== 8 The Unicode table ====
# General categories L* and N* of Unicode 16.0 and the White_Space property, as tokenizers 0.23 and
# tiktoken 0.14 read \p{L}, \p{N}, \s: 141,028 letters, 1,911 numbers, 25 spaces. Frozen here,
# because str.isalpha changes with the Python version: 3.11 lacks 9,272 of these letters.
SPACES = "9-d 20 85 a0 1680 2000-200a 2028-2029 202f 205f 3000"
NUMBERS = """
30-39 b2-b3 b9 bc-be 660-669 6f0-6f9 7c0-7c9 966-96f 9e6-9ef 9f4-9f9 a66-a6f ae6-aef b66-b6f b72-b77
be6-bf2 c66-c6f c78-c7e ce6-cef d58-d5e d66-d78 de6-def e50-e59 ed0-ed9 f20-f33 1040-1049 1090-1099
1369-137c 16ee-16f0 17e0-17e9 17f0-17f9 1810-1819 1946-194f 19d0-19da 1a80-1a89 1a90-1a99 1b50-1b59
1bb0-1bb9 1c40-1c49 1c50-1c59 2070 2074-2079 2080-2089 2150-2182 2185-2189 2460-249b 24ea-24ff
2776-2793 2cfd 3007 3021-3029 3038-303a 3192-3195 3220-3229 3248-324f 3251-325f 3280-3289 32b1-32bf
a620-a629 a6e6-a6ef a830-a835 a8d0-a8d9 a900-a909 a9d0-a9d9 a9f0-a9f9 aa50-aa59 abf0-abf9 ff10-ff19
10107-10133 10140-10178 1018a-1018b 102e1-102fb 10320-10323 10341 1034a 103d1-103d5 104a0-104a9
10858-1085f 10879-1087f 108a7-108af 108fb-108ff 10916-1091b 109bc-109bd 109c0-109cf 109d2-109ff
10a40-10a48 10a7d-10a7e 10a9d-10a9f 10aeb-10aef 10b58-10b5f 10b78-10b7f 10ba9-10baf 10cfa-10cff
10d30-10d39 10d40-10d49 10e60-10e7e 10f1d-10f26 10f51-10f54 10fc5-10fcb 11052-1106f 110f0-110f9
11136-1113f 111d0-111d9 111e1-111f4 112f0-112f9 11450-11459 114d0-114d9 11650-11659 116c0-116c9
116d0-116e3 11730-1173b 118e0-118f2 11950-11959 11bf0-11bf9 11c50-11c6c 11d50-11d59 11da0-11da9
11f50-11f59 11fc0-11fd4 12400-1246e 16130-16139 16a60-16a69 16ac0-16ac9 16b50-16b59 16b5b-16b61
16d70-16d79 16e80-16e96 1ccf0-1ccf9 1d2c0-1d2d3 1d2e0-1d2f3 1d360-1d378 1d7ce-1d7ff 1e140-1e149
1e2f0-1e2f9 1e4f0-1e4f9 1e5f1-1e5fa 1e8c7-1e8cf 1e950-1e959 1ec71-1ecab 1ecad-1ecaf 1ecb1-1ecb4
1ed01-1ed2d 1ed2f-1ed3d 1f100-1f10c 1fbf0-1fbf9
"""
LETTERS = """
41-5a 61-7a aa b5 ba c0-d6 d8-f6 f8-2c1 2c6-2d1 2e0-2e4 2ec 2ee 370-374 376-377 37a-37d 37f 386
388-38a 38c 38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 559 560-588 5d0-5ea 5ef-5f2 620-64a 66e-66f
671-6d3 6d5 6e5-6e6 6ee-6ef 6fa-6fc 6ff 710 712-72f 74d-7a5 7b1 7ca-7ea 7f4-7f5 7fa 800-815 81a 824
828 840-858 860-86a 870-887 889-88e 8a0-8c9 904-939 93d 950 958-961 971-980 985-98c 98f-990 993-9a8
9aa-9b0 9b2 9b6-9b9 9bd 9ce 9dc-9dd 9df-9e1 9f0-9f1 9fc a05-a0a a0f-a10 a13-a28 a2a-a30 a32-a33
a35-a36 a38-a39 a59-a5c a5e a72-a74 a85-a8d a8f-a91 a93-aa8 aaa-ab0 ab2-ab3 ab5-ab9 abd ad0 ae0-ae1
af9 b05-b0c b0f-b10 b13-b28 b2a-b30 b32-b33 b35-b39 b3d b5c-b5d b5f-b61 b71 b83 b85-b8a b8e-b90
b92-b95 b99-b9a b9c b9e-b9f ba3-ba4 ba8-baa bae-bb9 bd0 c05-c0c c0e-c10 c12-c28 c2a-c39 c3d c58-c5a
c5d c60-c61 c80 c85-c8c c8e-c90 c92-ca8 caa-cb3 cb5-cb9 cbd cdd-cde ce0-ce1 cf1-cf2 d04-d0c d0e-d10
d12-d3a d3d d4e d54-d56 d5f-d61 d7a-d7f d85-d96 d9a-db1 db3-dbb dbd dc0-dc6 e01-e30 e32-e33 e40-e46
e81-e82 e84 e86-e8a e8c-ea3 ea5 ea7-eb0 eb2-eb3 ebd ec0-ec4 ec6 edc-edf f00 f40-f47 f49-f6c f88-f8c
1000-102a 103f 1050-1055 105a-105d 1061 1065-1066 106e-1070 1075-1081 108e 10a0-10c5 10c7 10cd
10d0-10fa 10fc-1248 124a-124d 1250-1256 1258 125a-125d 1260-1288 128a-128d 1290-12b0 12b2-12b5
12b8-12be 12c0 12c2-12c5 12c8-12d6 12d8-1310 1312-1315 1318-135a 1380-138f 13a0-13f5 13f8-13fd
1401-166c 166f-167f 1681-169a 16a0-16ea 16f1-16f8 1700-1711 171f-1731 1740-1751 1760-176c 176e-1770
1780-17b3 17d7 17dc 1820-1878 1880-1884 1887-18a8 18aa 18b0-18f5 1900-191e 1950-196d 1970-1974
1980-19ab 19b0-19c9 1a00-1a16 1a20-1a54 1aa7 1b05-1b33 1b45-1b4c 1b83-1ba0 1bae-1baf 1bba-1be5
1c00-1c23 1c4d-1c4f 1c5a-1c7d 1c80-1c8a 1c90-1cba 1cbd-1cbf 1ce9-1cec 1cee-1cf3 1cf5-1cf6 1cfa
1d00-1dbf 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4
1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2071 207f
2090-209c 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 212a-212d 212f-2139 213c-213f 2145-2149
214e 2183-2184 2c00-2ce4 2ceb-2cee 2cf2-2cf3 2d00-2d25 2d27 2d2d 2d30-2d67 2d6f 2d80-2d96 2da0-2da6
2da8-2dae 2db0-2db6 2db8-2dbe 2dc0-2dc6 2dc8-2dce 2dd0-2dd6 2dd8-2dde 2e2f 3005-3006 3031-3035
303b-303c 3041-3096 309d-309f 30a1-30fa 30fc-30ff 3105-312f 3131-318e 31a0-31bf 31f0-31ff 3400-4dbf
4e00-a48c a4d0-a4fd a500-a60c a610-a61f a62a-a62b a640-a66e a67f-a69d a6a0-a6e5 a717-a71f a722-a788
a78b-a7cd a7d0-a7d1 a7d3 a7d5-a7dc a7f2-a801 a803-a805 a807-a80a a80c-a822 a840-a873 a882-a8b3
a8f2-a8f7 a8fb a8fd-a8fe a90a-a925 a930-a946 a960-a97c a984-a9b2 a9cf a9e0-a9e4 a9e6-a9ef a9fa-a9fe
aa00-aa28 aa40-aa42 aa44-aa4b aa60-aa76 aa7a aa7e-aaaf aab1 aab5-aab6 aab9-aabd aac0 aac2 aadb-aadd
aae0-aaea aaf2-aaf4 ab01-ab06 ab09-ab0e ab11-ab16 ab20-ab26 ab28-ab2e ab30-ab5a ab5c-ab69 ab70-abe2
ac00-d7a3 d7b0-d7c6 d7cb-d7fb f900-fa6d fa70-fad9 fb00-fb06 fb13-fb17 fb1d fb1f-fb28 fb2a-fb36
fb38-fb3c fb3e fb40-fb41 fb43-fb44 fb46-fbb1 fbd3-fd3d fd50-fd8f fd92-fdc7 fdf0-fdfb fe70-fe74
fe76-fefc ff21-ff3a ff41-ff5a ff66-ffbe ffc2-ffc7 ffca-ffcf ffd2-ffd7 ffda-ffdc 10000-1000b
1000d-10026 10028-1003a 1003c-1003d 1003f-1004d 10050-1005d 10080-100fa 10280-1029c 102a0-102d0
10300-1031f 1032d-10340 10342-10349 10350-10375 10380-1039d 103a0-103c3 103c8-103cf 10400-1049d
104b0-104d3 104d8-104fb 10500-10527 10530-10563 10570-1057a 1057c-1058a 1058c-10592 10594-10595
10597-105a1 105a3-105b1 105b3-105b9 105bb-105bc 105c0-105f3 10600-10736 10740-10755 10760-10767
10780-10785 10787-107b0 107b2-107ba 10800-10805 10808 1080a-10835 10837-10838 1083c 1083f-10855
10860-10876 10880-1089e 108e0-108f2 108f4-108f5 10900-10915 10920-10939 10980-109b7 109be-109bf
10a00 10a10-10a13 10a15-10a17 10a19-10a35 10a60-10a7c 10a80-10a9c 10ac0-10ac7 10ac9-10ae4
10b00-10b35 10b40-10b55 10b60-10b72 10b80-10b91 10c00-10c48 10c80-10cb2 10cc0-10cf2 10d00-10d23
10d4a-10d65 10d6f-10d85 10e80-10ea9 10eb0-10eb1 10ec2-10ec4 10f00-10f1c 10f27 10f30-10f45
10f70-10f81 10fb0-10fc4 10fe0-10ff6 11003-11037 11071-11072 11075 11083-110af 110d0-110e8
11103-11126 11144 11147 11150-11172 11176 11183-111b2 111c1-111c4 111da 111dc 11200-11211
11213-1122b 1123f-11240 11280-11286 11288 1128a-1128d 1128f-1129d 1129f-112a8 112b0-112de
11305-1130c 1130f-11310 11313-11328 1132a-11330 11332-11333 11335-11339 1133d 11350 1135d-11361
11380-11389 1138b 1138e 11390-113b5 113b7 113d1 113d3 11400-11434 11447-1144a 1145f-11461
11480-114af 114c4-114c5 114c7 11580-115ae 115d8-115db 11600-1162f 11644 11680-116aa 116b8
11700-1171a 11740-11746 11800-1182b 118a0-118df 118ff-11906 11909 1190c-11913 11915-11916
11918-1192f 1193f 11941 119a0-119a7 119aa-119d0 119e1 119e3 11a00 11a0b-11a32 11a3a 11a50
11a5c-11a89 11a9d 11ab0-11af8 11bc0-11be0 11c00-11c08 11c0a-11c2e 11c40 11c72-11c8f 11d00-11d06
11d08-11d09 11d0b-11d30 11d46 11d60-11d65 11d67-11d68 11d6a-11d89 11d98 11ee0-11ef2 11f02
11f04-11f10 11f12-11f33 11fb0 12000-12399 12480-12543 12f90-12ff0 13000-1342f 13441-13446
13460-143fa 14400-14646 16100-1611d 16800-16a38 16a40-16a5e 16a70-16abe 16ad0-16aed 16b00-16b2f
16b40-16b43 16b63-16b77 16b7d-16b8f 16d40-16d6c 16e40-16e7f 16f00-16f4a 16f50 16f93-16f9f
16fe0-16fe1 16fe3 17000-187f7 18800-18cd5 18cff-18d08 1aff0-1aff3 1aff5-1affb 1affd-1affe
1b000-1b122 1b132 1b150-1b152 1b155 1b164-1b167 1b170-1b2fb 1bc00-1bc6a 1bc70-1bc7c 1bc80-1bc88
1bc90-1bc99 1d400-1d454 1d456-1d49c 1d49e-1d49f 1d4a2 1d4a5-1d4a6 1d4a9-1d4ac 1d4ae-1d4b9 1d4bb
1d4bd-1d4c3 1d4c5-1d505 1d507-1d50a 1d50d-1d514 1d516-1d51c 1d51e-1d539 1d53b-1d53e 1d540-1d544
1d546 1d54a-1d550 1d552-1d6a5 1d6a8-1d6c0 1d6c2-1d6da 1d6dc-1d6fa 1d6fc-1d714 1d716-1d734
1d736-1d74e 1d750-1d76e 1d770-1d788 1d78a-1d7a8 1d7aa-1d7c2 1d7c4-1d7cb 1df00-1df1e 1df25-1df2a
1e030-1e06d 1e100-1e12c 1e137-1e13d 1e14e 1e290-1e2ad 1e2c0-1e2eb 1e4d0-1e4eb 1e5d0-1e5ed 1e5f0
1e7e0-1e7e6 1e7e8-1e7eb 1e7ed-1e7ee 1e7f0-1e7fe 1e800-1e8c4 1e900-1e943 1e94b 1ee00-1ee03
1ee05-1ee1f 1ee21-1ee22 1ee24 1ee27 1ee29-1ee32 1ee34-1ee37 1ee39 1ee3b 1ee42 1ee47 1ee49 1ee4b
1ee4d-1ee4f 1ee51-1ee52 1ee54 1ee57 1ee59 1ee5b 1ee5d 1ee5f 1ee61-1ee62 1ee64 1ee67-1ee6a
1ee6c-1ee72 1ee74-1ee77 1ee79-1ee7c 1ee7e 1ee80-1ee89 1ee8b-1ee9b 1eea1-1eea3 1eea5-1eea9
1eeab-1eebb 20000-2a6df 2a700-2b739 2b740-2b81d 2b820-2cea1 2ceb0-2ebe0 2ebf0-2ee5d 2f800-2fa1d
30000-3134a 31350-323af
"""
CLASSES = class_table()


# ==== 9 Command line ====
def main():
    parser = argparse.ArgumentParser(prog="bpe.py", description="Byte-level BPE tokenizer.")
    verbs = parser.add_subparsers(dest="verb", required=True)

    def verb(name, help, **arguments):
        p = verbs.add_parser(name, help=help, description=help,
                             formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        p.add_argument("file", metavar="FILE", **arguments)
        return p

    p = verb("train", "learn a vocabulary from a text file", help="text to learn from")
    p.add_argument("--vocab-size", type=int, default=4096, help="tokens, 256 bytes and </s> included")
    p.add_argument("--out", default="tokenizer.json", help="tokenizer.json, or a directory for GPT-2's "
                                                           "vocab.json and merges.txt")
    for name, what in (("encode", "text to ids, decimal, one space between"),
                       ("decode", "ids, decimal, to text")):
        p = verb(name, what, nargs="?", default="-", help="input, - for standard input")
        p.add_argument("--tokenizer", default="tokenizer.json", help="the file or directory of a tokenizer")
        p.add_argument("--out", default="-", help="output, - for standard output")
    args = parser.parse_args()
    try:
        with sys.stdin.buffer if args.file == "-" else open(args.file, "rb") as f:
            data = f.read()
        if args.verb == "train":
            start = time.perf_counter()
            tokenizer = train(data, args.vocab_size)
            seconds = time.perf_counter() - start
            tokenizer.save(args.out)
            few = " (the text has no more pairs)" if tokenizer.vocab_size < args.vocab_size else ""
            print(f"{args.out}: {tokenizer.vocab_size} tokens{few} from {len(data)} bytes in {seconds:.1f} s, "
                  f"{len(data) / max(1, len(tokenizer.encode(data))):.2f} bytes per token on them")
            return 0
        tokenizer = Tokenizer.load(args.tokenizer)
        if args.verb == "encode":
            result = (" ".join(map(str, tokenizer.encode(data).tolist())) + "\n").encode()
        else:
            words = data.split()
            bad = next((w for w in words if not re.fullmatch(rb"[0-9]{1,9}", w)), None)
            check(bad is None, f"{args.file}: {bad!r:.40} is no token id: give decimal ids and blanks")
            result = tokenizer.decode(list(map(int, words)))
        with sys.stdout.buffer if args.out == "-" else open(args.out, "wb") as f:
            f.write(result)
        return 0
    except KeyboardInterrupt:
        return 130
    except (OSError, TokenizerError) as error:
        if isinstance(error, BrokenPipeError):      # `| head` has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 0
        print(f"bpe.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
