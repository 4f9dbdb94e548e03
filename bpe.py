r"""Byte-level BPE: text to token ids and back, learned from text, in Python, NumPy and Numba.

    python bpe.py train data/shakespeare.txt --vocab-size 4096 --out tokenizer.json
    echo "To be, or not to be" | python bpe.py encode
    python bpe.py decode ids.txt

GPT-2's pattern cuts the text into words (section 2). Inside a word, which starts as single bytes,
the pair of neighbours that was learned first becomes one token, and so on (section 4). Training
learns the pairs: merge the most frequent pair of all words, and so on (Sennrich et al. 2016).

    1 bytes and classes    3 training    5 the tokenizer, its files    7 command line
    2 words                4 encoding    6 streaming text

Same merges as Hugging Face `tokenizers`, same ids as it and tiktoken: byte ids in GPT-2's order,
ties to the smaller pair of ids, a merge whose string exists reuses its id, special tokens last and
never made from text. A byte that is no UTF-8 is a word of its own, so any bytes survive.
Shapes: N bytes, V tokens, M merges; the rank of a merge is its index; a word is text[i:j].
"""
import argparse, codecs, collections, contextlib, hashlib, heapq, json, os, re, sys
from concurrent.futures import ThreadPoolExecutor

os.environ.setdefault("NUMBA_OPT", "1")     # as fast as 3 here, and compiled sooner
import numpy as np
from numba import get_num_threads, njit

JIT = dict(error_model="numpy", nogil=True, cache=True)
PARALLEL = 8 << 20          # bytes; one thread needs 0.1 s for a shorter text: two do not pay
MAX_VOCAB = 1 << 20
MIX = 0x2545F4914F6CDD1D    # odd, half its bits set: high bits of a product depend on all of a key

# ==== 1 Bytes and classes ====
# GPT-2 writes a byte as a printable character, so that vocabularies are text: 188 bytes stand for
# themselves, the other 68 (blanks, controls) become U+0100 and up. Byte ids follow the same order.
BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES += sorted(set(range(256)) - set(BYTES))
CHARS = [chr(b if k < 188 else 256 + k - 188) for k, b in enumerate(BYTES)]
BYTE_ID = np.argsort(BYTES)

# \s, \p{N} and \p{L} of Unicode 16.0 as tokenizers 0.23 and tiktoken 0.14 know them: 25 spaces,
# 1,911 numbers, 141,028 letters. Frozen, because str.isalpha and str.isspace differ and change with
# Python (3.11 lacks 9,272 letters). How many code points are outside, then how many inside, and so
# on, in base 26: digits a to z, the last of a number a capital. JFSBdW: 9, 5, 18, 1, 3 * 26 + 22.
OTHER, LETTER, NUMBER, SPACE = range(4)
INVALID, DIGIT = 4, 5       # not a character of UTF-8; a number that is a word of its own
RUNS = {SPACE: """
JFSBdWBbABihJBdpNLbDCFBbVBfxWB""", NUMBER: """
bWKeQCFBCDcdLKfEKhQKpWKeOKEGeEKeOKeOKCGeGNeLKIHdZKeAHHTeFKdSKeOKcSUkIKcSKbbRUbhXDjFKGKWKlOKeYLgJKGKh
AKdIKfEKGKboGBDGGKhQbZCFbbYcIdAWyGbEcbHBbdXBZJODnFEfIKbEIBPbGKbNPbrsAKhGKmIGfYKbMKhQKWKdIKpQKbfmCKsZ
bTMcFRCnDbBbKEbDBIBfEFhUKbkGIZHbNJcXFWGgECCQCbUcMJcACbEDcXFeAIYIbPHmSGbWKGKkSbFgCKbQEeIHfEbEeYKcIKfO
KHUjRKnEKeOKoKKdYKGUcYMqETdPKzMKdIbDiTKcSKqGKdYVbpBeHxaFKdmCKdIKfEKBHuGKkCXbjsZKceWUMUeEZbqRbYdnCKqG
KtIKjNKbbOJeYKbeLcHBDBEcYbTBPblANedFK""", LETTER: """
cNbAGbAbVBKBEBFXBbFBrQEMOFHBBBeZFBCCEBBGBBDBBBUBdFBfJIgKBbMCBGbPcTbBEEbTbRbJCBdVBBPCHCKDCBQBBbEbDdLL
BYbHJCEBFWEBJBDBXZHLFYBGRbQcGcCDBSBHKPQEICCCWBHBBDEDBQBNCBDOCKBIGECCWBHBCBCBCbFEBBTDQJBDBWBHBCBFDBSB
PCXBLICCCWBHBCBFDBbECBDPBRBBGDDBEDCBBBCDCDDDMWBcAIBDBXBQDBbADCBCCbEBEIBDBXBKBFDBbFCBCPCRJBDBbPCBQBFD
IDYGFSDYBJBBCHcGbWBCMHcGCBBBFBYBBBKBCJBCFBBVEbGBcLIBbKbBFeLbRUBQGEEDBDCHDENMBRbMBBFBCbRBmVBECHBBBECb
PBECbHBECHBBBECPBcFBECcPbLQQdICGDxWCRBbAFcXGIHSNTOSONBDPcAbJBEBcPdLHFCbIBBFcSKbFbXbECFLbSEbAcCXJcBdE
BdPbVRIcCbENCKbSbAbKbPDKbKCLFbRCDbPEBGBCDBFhKcMkSCGCbMCGCIBBBBBBBbFCcBBHBBDDBHDECGENFDBHeMBNBQNdXBEB
CKBBDFGBBBBBBEBLCEFFEBcACdzFiVGEDCMbMBBFBCcEHBQXJHBHBHBHBHBHBHBHdCBsBCbQFFCEdIGDBdMBEFbRBdQRbGbWQtSj
tOcMbguFcPbUCkJDQKCUbVQbFCcSbXJCdZCcPCCBBBIVQBDBEBXbDcAObYcKGDBBCLbCKXZbDHbVbCBQFBKKFBbPXDBIUXDBDbYB
BDCCFCBBBYDCLHDMGCGCGJHBHBbRBOGeLbDqnSMXEbXmnCoCCeCbMHMFFBBKBNBFBBBCBCBeEbHnZScMCcCbOMeMFBfFbKbAGbAL
dLDGCGCGCDbJMBbABTBCBPCObIeToZbDDbXbVbGNUBIGbMKbECbKEIbWgCSbKEbKEbOIcAMLBPBHBCBLBPBHBCDcAMlZJWKIYGBb
QBJcRGCBBbSBCDBCXKXJbFcNTBCKWKbAcScEGCcMBPEBDBbDbQbDDbDbJIBbCbBcCKWKTNSeGcVcDbZNbZNbKbMbCJXjQbQGCQDc
HbDKBIWbQSbUVbBXMcBcFCCBNbTbGZbAbKbDBCBIbJDBMbWOEVBBBbJSBZTCcLHBBBEBPBKHbVbMICCCWBHBCBFDBSBMFbEKBBCB
BbMBBZBBBbScBSEUDbEbWUCBBhCbVbPEbKbWUBcHbRNBcTbBbLHhDbSeMcMbFICBCIBCBYPBBBdQICbNQBBBbCBKbOHBVBLbUTBS
cVhRbHbFJBbLRBbXbEeIHBCBbMVBZGBCBbGOBmPTPBBNBbIeUBdBbjMiWhOdxKdTPbpGRGZfxRFwLkdDbEcpUvXHbFRdBRbESbWQ
EbFVFTqQbTiDcMeYcXFBcONcMCBBbCjcAIbvQbPKnfREBHBCBlFPBbDDCBOEIpGdkUeDFNDJHKiwKdHBcTBCCBCCCEBMBBBHBcNB
ECIBHBbCBEBFBBDHBnCCZBZBbFBZBbFBZBbFBZBbFBZBIcsYbFGGkBcKfQbTKHQBmJbESbSsQbCiUbECBtBHBEBCBPBhPcHcQHBb
uIEBbBBCBBCBBKBEBBBBGBEBBBBBBDBCBBCBBBBBBBBBBCBBCEBHBEBEBBBKBRFDBFBRgoAclfCbGgdUGiOCinQOlbLPxYdqWuWc
fYhhZFgfG"""}

def class_table():
    """(0x140000,) uint8: the class of whatever 1 to 4 bytes can spell. A text touches a few KB."""
    table = np.zeros(0x140000, np.uint8)
    table[0xD800:0xE000] = table[0x110000:] = INVALID
    for kind, text in RUNS.items():
        end = n = inside = 0
        for digit in "".join(text.split()):
            n = 26 * n + ord(digit.lower()) - ord("a")
            if digit.isupper():
                table[end:end + n] += np.uint8(kind * inside)
                end, n, inside = end + n, 0, 1 - inside
    return table

CLASSES = class_table()
DIGITS = np.where(CLASSES == NUMBER, np.uint8(DIGIT), CLASSES)      # Hugging Face's Digits
DIGITS[0x11DE0:0x11DEA] = DIGITS[0x16FF4:0x16FF7] = DIGIT           # which know Unicode 17's

# ==== 2 Words ====
@njit(**JIT)
def char_at(text, i, end, classes):
    """(class, length in bytes) of the UTF-8 character at i, or (INVALID, 1).     RFC 3629"""
    b = np.int64(text[i])
    if b < 0x80:
        return np.int64(classes[b]), 1
    n = 2 + (b >= 0xE0) + (b >= 0xF0)
    if b < 0xC2 or b > 0xF4 or i + n > end:
        return INVALID, 1
    point = b & (0x7F >> n)
    for k in range(i + 1, i + n):
        if text[k] & 0xC0 != 0x80:
            return INVALID, 1
        point = point << 6 | text[k] & 0x3F
    if point < 1 << (5 * n - 4) or classes[point] == INVALID:   # fewer bytes would do; a surrogate
        return INVALID, 1
    return np.int64(classes[point]), n

@njit(**JIT)
def word_end(text, i, end, classes):
    r"""End of the word at i: one invalid byte, or the first of GPT-2's alternatives that matches,
    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
    With the classes DIGITS the text is cut around each number first."""
    if text[i] == 39 and i + 1 < end:                           # apostrophe
        c, d = text[i + 1], text[min(i + 2, end - 1)]
        if c == 115 or c == 116 or c == 109 or c == 100:        # s t m d
            return i + 2
        if i + 2 < end and (d == 101 and (c == 114 or c == 118) or d == 108 and c == 108):
            return i + 3                                        # re ve ll
    j = i + 1 if text[i] == 32 and i + 1 < end else i
    kind, n = char_at(text, j, end, classes)
    if j > i and kind >= SPACE:                                 # the blank at i joins no word
        j, kind, n = i, SPACE, 1
    last, j, k = j, j + n, kind                                 # last: where the last character is
    while j < end and kind < INVALID:
        if text[j] < 0x80 and classes[text[j]] == kind:         # ASCII is spared the call
            last, j = j, j + 1
            continue
        k, n = char_at(text, j, end, classes)
        if k != kind:
            break
        last, j = j, j + n
    spare = kind == SPACE and j < end and last > i and k != DIGIT
    return last if spare else j                                 # \s+(?!\S) spares a blank

@njit(**JIT)
def find_word(table, text, i, j):
    """(row, key): where text[i:j] is in a word table, or the free row it may take.
    table (R, 4) int64, R a power of two: key (the first 8 bytes), i, j, value; j = 0: free."""
    key = 0
    for k in range(i, min(i + 8, j)):
        key = key << 8 | text[k]
    h = key ^ (j - i)
    for k in range(i + 8, j):
        h = h * MIX ^ text[k]
    row = (h * MIX >> 44) & (len(table) - 1)
    while table[row, 2] != 0:
        if table[row, 0] == key and table[row, 2] - table[row, 1] == j - i:
            k, d = i + 8, table[row, 1] - i
            while k < j and text[k] == text[k + d]:
                k += 1
            if k >= j:
                break
        row = (row + 1) & (len(table) - 1)
    return row, key

def split_text(text):
    """Cuts, 0 and N among them, one part a thread if N is large. A word ends wherever a visible
    ASCII character meets a blank: text between such cuts can be tokenized by itself."""
    cuts, n = [0], get_num_threads() if len(text) >= PARALLEL else 1
    for k in range(1, n):
        cut = re.compile(rb"[!-~](?=[ \n])").search(text, max(cuts[-1], len(text) * k // n))
        cuts += [cut.end()] if cut else []
    return cuts + [len(text)]

def of_parts(text, work):
    """[work(start, end)] of the parts of a text, each in a thread of its own."""
    cuts = split_text(text)
    if len(cuts) == 2:
        return [work(*cuts)]
    with ThreadPoolExecutor() as pool:
        return list(pool.map(work, cuts[:-1], cuts[1:]))

def as_array(text):
    """(N,) uint8, read-only so that kernels see one type. A lone surrogate is 3 invalid bytes."""
    text = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    array = np.frombuffer(text, np.uint8)
    array.flags.writeable = False
    return array

# ==== 3 Training ====
@njit(**JIT)
def count_words(table, text, i, end, classes):
    """Adds the words of text[i:end] to a word table, value = count, until that is half full;
    returns where it stopped."""
    used = 0
    while i < end and 2 * used < len(table):
        j = word_end(text, i, end, classes)
        row, key = find_word(table, text, i, j)
        used += table[row, 2] == 0
        table[row, 0], table[row, 1], table[row, 2] = key, i, j
        table[row, 3] += 1
        i = j
    return i

def unique_words(text):
    """Counter of the words of text, bytes -> how often; a thread for each part."""
    def count(i, end):
        words = collections.Counter()
        while i < end:
            table = np.zeros((1 << 17, 4), np.int64)            # 4 MB, emptied at 65,536 words
            i = count_words(table, array, i, end, CLASSES)      # runs without the GIL
            for start, stop, n in table[table[:, 2] > 0, 1:].tolist():
                words[array[start:stop].tobytes()] += n
        return words

    array = as_array(text)
    return sum(of_parts(array, count), collections.Counter())

def learn_merges(ids, weight, M):
    """The first M merges [(left, right)], fewer if the pairs run out; merge m makes token 256 + m.
    ids (P,) int64: the unique words one after another, -1 between words and at both ends
    weight (P,) int64: how often the word of a position occurs

    A pair is born in one step, the one that makes its younger token, and afterwards its count only
    falls: an entry of the heap, (-count, pair, positions), may be too high, never too low. So the
    first whose count still holds is the next merge."""
    prev, next = np.arange(-1, len(ids) - 1), np.arange(1, len(ids) + 1)
    heap, merges, born = [], [], np.arange(len(ids) - 1)
    while True:
        born = born[(ids[born] >= 0) & (ids[next[born]] >= 0)]
        pairs = ids[born] << 32 | ids[next[born]]   # ordered as ties are: by left, then right
        order = np.argsort(pairs, kind="stable")
        pairs, born = pairs[order], born[order]
        start = np.flatnonzero(np.diff(pairs, prepend=-1))
        count = np.add.reduceat(-weight[born], start).tolist()
        for entry in zip(count, pairs[start].tolist(), np.split(born, start[1:])):
            heapq.heappush(heap, entry)
        while heap and len(merges) < M:
            count, pair, p = heapq.heappop(heap)
            a, b = pair >> 32, pair & 0xFFFFFFFF
            p = p[(ids[p] == a) & (ids[next[p]] == b)]      # some are part of another merge by now
            n = int(weight[p].sum())
            if n == -count:
                break
            if n > 0:
                heapq.heappush(heap, (-n, pair, p))
        else:
            return merges
        if a == b:                                  # aaa is [aa]a: in a run, every second position
            k = np.arange(len(p))
            first = np.append(True, next[p[:-1]] != p[1:])
            p = p[(k - np.maximum.accumulate(k * first)) % 2 == 0]
        q = next[p]
        ids[p], ids[q], next[p] = 256 + len(merges), -2, next[q]
        prev[next[p]] = p
        born = np.unique(np.concatenate([prev[p], p]))
        merges.append((a, b))

def train(text, vocab_size, specials=("</s>",)):
    """Tokenizer of vocab_size tokens: 256 bytes, merges learned from text, special tokens. If text
    has too few pairs they are fewer, which `tokenizer.vocab_size` tells."""
    fixed = 256 + len(specials)
    need(fixed <= vocab_size <= MAX_VOCAB, f"vocab_size {vocab_size} is not between {fixed} (256 "
         f"bytes, {len(specials)} special tokens) and {MAX_VOCAB}: choose such a size")
    words = unique_words(text)
    ids = BYTE_ID[np.frombuffer(b" ".join([b"", *words, b""]), np.uint8)]
    ends = np.cumsum([0] + [1 + len(w) for w in words])
    ids[ends] = -1
    weight = np.repeat(np.array([0, *words.values()]), np.diff(ends, prepend=-1))
    names, merges = CHARS.copy(), []
    for a, b in learn_merges(ids, weight, vocab_size - fixed):
        merges.append(f"{names[a]} {names[b]}")     # a new string each time: between two ends of
        names.append(names[a] + names[b])           # tokens, training spells it in one way only
    return Tokenizer({s: k for k, s in enumerate([*names, *specials])}, merges, specials)

# ==== 4 Encoding ====
NO_MERGE = 1 << 62

def pair_table(pairs):
    """(2 R,) int64 from merges (M, 2): left << 40 | right << 20 | rank, or -1 where free. A pair
    stands at its hash, below R, or in the first free row after: a running maximum over the sorted
    hashes. R is a power of two over 4 M."""
    R, k = 1 << (4 * len(pairs) + 1).bit_length(), np.arange(len(pairs))
    key = pairs[:, 0] << 20 | pairs[:, 1]
    home = key * MIX >> 40 & R - 1
    rank = np.argsort(home, kind="stable")
    table = np.full(2 * R, -1)
    table[np.maximum.accumulate(home[rank] - k) + k] = key[rank] << 20 | rank
    return table

@njit(**JIT)
def candidate(ids, p, q, ranks):
    """rank << 32 | p if the tokens at p and q merge: the smallest is the next merge of the word."""
    if q >= len(ids):
        return NO_MERGE
    key = np.int64(ids[p]) << 20 | ids[q]
    row = key * MIX >> 40 & (len(ranks) >> 1) - 1
    while ranks[row] >= 0 and ranks[row] >> 20 != key:
        row += 1
    return (ranks[row] & 0xFFFFF) << 32 | p if ranks[row] >= 0 else NO_MERGE

@njit(**JIT)
def merge_word(ids, ranks, made, tree, prev, next):
    """Merges the ids (n,) of a word in place, lowest rank first, then leftmost; returns how many
    stay. The candidates are the leaves of a tournament, tree[k] = min(tree[2k], tree[2k+1]), and a
    merge replays three of them: O(n log n), a megabyte of one letter is no trap."""
    n, leaves = len(ids), 1
    while leaves < n:
        leaves *= 2
    if n > len(next):
        tree, prev, next = np.empty(2 * leaves, np.int64), np.arange(n), np.arange(n)
    for p in range(leaves):
        tree[leaves + p] = candidate(ids, p, p + 1, ranks)
        if p < n:
            prev[p], next[p] = p - 1, p + 1
    for k in range(leaves - 1, 0, -1):
        tree[k] = min(tree[2 * k], tree[2 * k + 1])
    while n > 1 and tree[1] != NO_MERGE:
        p = tree[1] & 0xFFFFFFFF
        q = next[p]
        ids[p], next[p] = made[tree[1] >> 32], next[q]
        if next[p] < n:
            prev[next[p]] = p
        for x in (q, p, prev[p]):
            if x >= 0:
                k = leaves + x
                tree[k] = candidate(ids, x, next[x], ranks) if x != q else NO_MERGE
                while k > 1:
                    k >>= 1
                    tree[k] = min(tree[2 * k], tree[2 * k + 1])
    m = p = 0
    while p < n:
        ids[m], m, p = ids[p], m + 1, next[p]
    return m

@njit(**JIT)
def encode_range(out, text, start, end, classes, byte_id, ranks, made):
    """Ids of text[start:end] into out[start:]; returns where they end. A word seen before is copied
    from where its ids stand in out: `seen` is a word table, value = where << 8 | how many, for
    words of less than 256 bytes."""
    rows = 1 << 9
    while rows < 1 << 17 and rows < (end - start) >> 2:
        rows *= 2
    seen, used = np.zeros((rows, 4), np.int64), 0
    tree, prev, next = np.empty(512, np.int64), np.empty(256, np.int64), np.empty(256, np.int64)
    i = m = start
    while i < end:
        j = word_end(text, i, end, classes)
        row, key = find_word(seen, text, i, j)
        if seen[row, 2] != 0:
            p, n = seen[row, 3] >> 8, seen[row, 3] & 255
            for k in range(n):
                out[m + k] = out[p + k]
        else:
            n = 0
            for k in range(i, j):                               # a byte without an id is left out
                out[m + n] = byte_id[text[k]]
                n += out[m + n] >= 0
            n = merge_word(out[m:m + n], ranks, made, tree, prev, next)
            if j - i < 256 and 2 * used < rows:
                seen[row, 0], seen[row, 1], seen[row, 2], seen[row, 3] = key, i, j, m << 8 | n
                used += 1
        i, m = j, m + n
    return m

# ==== 5 The tokenizer, its files ====
FILES = "give the tokenizer.json of a byte-level BPE, or a directory of vocab.json, merges.txt"

class UserError(ValueError):
    """Something the user can mend. Printed as one line: what is wrong, both values, the remedy."""

def need(ok, message):
    if not ok:
        raise UserError(message)

@contextlib.contextmanager
def reading(source, remedy):
    """Whatever is wrong with a file that others made becomes one line that names it."""
    try:
        yield
    except (OSError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError,
            ValueError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        what = " ".join((getattr(error, "strerror", None) or what).split())[:300]
        raise UserError(f"{source}: {what or type(error).__name__}; {remedy}") from None

class Tokenizer:
    """vocab: list of bytes by id     merges: list of (left id, right id) by rank     vocab_size: V
    specials: dict name -> id     digits: each number is a word of its own"""

    def __init__(self, ids, merges, specials=(), digits=False):
        """ids: dict name -> id, in GPT-2's characters     merges: "left right" or [left, right]
        A name that is neither a byte nor a merge is special, and `specials` must be such names.
        A byte may lack an id; `encode` leaves it out, as Hugging Face does."""
        names = sorted(ids, key=ids.get)
        pairs = [tuple(m.split(" ") if isinstance(m, str) else m) for m in merges]
        made = set(CHARS).union(a + b for a, b in pairs)
        bad = [s for s in specials if s in made or not s]
        need(not bad, f"special tokens {bad[:3]} are also made from text: choose some like </s>")
        need([ids[s] for s in names] == list(range(len(names))),
             f"the ids of {len(names)} tokens are not 0 to {len(names) - 1}")
        need(max(len(names), len(merges)) <= MAX_VOCAB,
             f"{len(names)} tokens and {len(merges)} merges, more than {MAX_VOCAB}")
        need(len(set(pairs)) == len(pairs) and "" not in ids,
             f"{len(pairs)} merges, {len(set(pairs))} of them different, or an empty token")
        text_id, byte = {s: k for k, s in enumerate(names) if s in made}, dict(zip(CHARS, BYTES))
        self.vocab = [bytes(byte[c] for c in s) if s in made else s.encode() for s in names]
        self.merges, self.vocab_size = [(text_id[a], text_id[b]) for a, b in pairs], len(names)
        self.specials = {s: k for k, s in enumerate(names) if s not in made}
        self._ids, self._lines = {s: k for k, s in enumerate(names)}, [f"{a} {b}" for a, b in pairs]
        self._byte_id = np.array([text_id.get(c, -1) for c in CHARS], np.int32)[BYTE_ID]
        self.digits, self._classes = digits, DIGITS if digits else CLASSES
        self._made = np.array([text_id[a + b] for a, b in pairs], np.int32)
        self._ranks = pair_table(np.array(self.merges, np.int64).reshape(-1, 2))

    def encode(self, text):
        """Ids, int32, of str or bytes. Ordinary text only: "</s>" becomes three tokens or so."""
        text, tables = as_array(text), (self._classes, self._byte_id, self._ranks, self._made)
        out = np.empty(len(text), np.int32)             # a byte or more for each id
        return np.concatenate(of_parts(text, lambda start, end: out[start:encode_range(
            out, text, start, end, *tables)]))

    def decode(self, ids):
        """The bytes of ids; a special token gives its name."""
        ids = np.asarray(ids).ravel().tolist()
        bad = [k for k in ids if not 0 <= k < self.vocab_size]
        need(not bad, f"token ids {bad[:3]}: this tokenizer has 0 to {self.vocab_size - 1}; "
                      "decode with the tokenizer that encoded")
        return b"".join([self.vocab[k] for k in ids])

    def hash(self):
        """SHA-256 in hex of what makes a tokenizer: the same through any file."""
        form = [list(self._ids), self._lines, list(self.specials)] + ["digits"] * self.digits
        return hashlib.sha256(json.dumps(form).encode()).hexdigest()

    def to_json(self):
        """Hugging Face's tokenizer.json, compact."""
        words = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
        steps = [dict(type="Digits", individual_digits=True), words]
        cuts = dict(type="Sequence", pretokenizers=steps) if self.digits else words
        flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
        added = [dict(id=k, content=s, **flags) for s, k in self.specials.items()]
        model = dict(type="BPE", vocab=self._ids, merges=self._lines)
        root = dict(version="1.0", added_tokens=added, pre_tokenizer=cuts, decoder=words,
                    model=model)
        return json.dumps(root, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text, source="tokenizer.json"):
        with reading(source, FILES):
            root = json.loads(text)
            model, words = root["model"], root["pre_tokenizer"]
            *digits, last = words.get("pretokenizers", [words])
            need((last["type"], last.get("use_regex", True), last.get("add_prefix_space"))
                 == ("ByteLevel", True, False)
                 and digits in ([], [dict(type="Digits", individual_digits=True)]),
                 f"pre_tokenizer {words} is not GPT-2's, nor that behind Digits")
            off = [root.get("normalizer")] + [model.get(key) for key in (
                "dropout", "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")]
            off.append(None if set(CHARS) <= set(model["vocab"]) else model.get("unk_token"))
            after = (root.get("post_processor") or {}).get("type", "ByteLevel")
            need(not any(off) and after == "ByteLevel", "normalizer, dropout, ignore_merges, "
                 "prefix, suffix, stand-in for a byte without an id, post_processor are "
                 f"{off + [after]}")
            added = {a["content"]: a["id"] for a in root.get("added_tokens") or []}
            return cls({**model["vocab"], **added}, model["merges"], added, bool(digits))

    def save(self, path):
        """A tokenizer.json if path ends in .json, else a directory with vocab.json, merges.txt."""
        files = {str(path): self.to_json()}
        if not str(path).endswith(".json"):
            need(not self.digits, f"{path}: two files cannot say that each digit is a word; name "
                 "one that ends in .json")
            os.makedirs(path, exist_ok=True)
            lines = "\n".join(["#version: 0.2", *self._lines, ""])
            files = {os.path.join(path, "vocab.json"): json.dumps(self._ids, ensure_ascii=False),
                     os.path.join(path, "merges.txt"): lines}
        for name, content in files.items():
            with open(name + ".part", "w", encoding="utf-8", newline="\n") as f:
                f.write(content)
            os.replace(name + ".part", name)            # a reader sees the old file or the new one

    @classmethod
    def load(cls, path):
        """Reads what `save` writes, and such files of GPT-2 and of Hugging Face."""
        def read(file):
            need(os.path.getsize(file) < 1 << 28, f"{os.path.getsize(file)} bytes, over {1 << 28}")
            with open(file, encoding="utf-8") as f:
                return f.read()

        with reading(path, FILES):
            if os.path.isdir(path):
                lines = read(os.path.join(path, "merges.txt")).split("\n")
                return cls(json.loads(read(os.path.join(path, "vocab.json"))),
                           [s for s in lines if s and not s.startswith("#version")])
            text = read(path)
        return cls.from_json(text, path)

# ==== 6 Streaming text ====
def utf8_stream():
    """Its decode(bytes) gives the characters that end there, decode(b"", True) what is left over;
    what is no UTF-8 becomes U+FFFD, as in bytes.decode("utf-8", "replace")."""
    return codecs.getincrementaldecoder("utf-8")("replace")

# ==== 7 Command line ====
def main():
    parser = argparse.ArgumentParser(prog="bpe.py", description="Byte-level BPE tokenizer.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("verb", choices=["train", "encode", "decode"], help="learn a vocabulary "
                        "from text, turn text into decimal ids, or ids into text")
    parser.add_argument("file", nargs="?", default="-", help="input, - for standard input")
    parser.add_argument("--vocab-size", type=int, default=4096, help="bytes, merges and </s>")
    parser.add_argument("--tokenizer", default="tokenizer.json", help="to encode or decode with")
    parser.add_argument("--out", default="-", help="file to write, - for standard output, or for "
                        "tokenizer.json if training; a directory is fine for a tokenizer, too")
    args = parser.parse_args()
    tokenizer = None if args.verb == "train" else Tokenizer.load(args.tokenizer)
    with open(0 if args.file == "-" else args.file, "rb") as f:
        data = f.read()
    if args.verb == "train":
        tokenizer = train(data, args.vocab_size)
        out = "tokenizer.json" if args.out == "-" else args.out
        tokenizer.save(out)
        return print(f"{out}: {tokenizer.vocab_size} tokens, one for every "
                     f"{len(data) / max(1, len(tokenizer.encode(data))):.2f} bytes of {args.file}")
    if args.verb == "encode":
        data = " ".join(map(str, tokenizer.encode(data).tolist())).encode() + b"\n"
    else:
        bad = re.search(rb"[^0-9\s]\S*|[0-9]{10,}", data)
        need(not bad, f"{args.file}: {bad and bad[0][:40]} is no token id; give decimal ids")
        data = tokenizer.decode([int(s) for s in data.split()])
    with open(1 if args.out == "-" else args.out, "wb") as f:
        f.write(data)

if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:                             # `| head` has seen enough
        sys.exit(0)
    except (OSError, UserError) as error:
        print(f"bpe.py: {error}", file=sys.stderr)
        sys.exit(2)
