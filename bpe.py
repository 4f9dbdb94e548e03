r"""Byte-level BPE: text to token ids and back, learned from text, in Python, NumPy and Numba.

    python bpe.py train data/shakespeare.txt --vocab-size 4096 --tokenizer tokenizer.json
    echo "To be, or not to be" | python bpe.py encode | python bpe.py decode

GPT-2's pattern cuts the text into words (section 2). Inside a word, which starts as single bytes,
the pair of neighbours that was learned first becomes one token, and so on (section 4). Training
learns the pairs: merge the most frequent pair of all words, and so on (Sennrich et al. 2016).

    1 bytes and classes    3 training    5 errors                      7 command line
    2 words                4 encoding    6 the tokenizer, its files

Same merges as Hugging Face `tokenizers`, same ids as it and tiktoken: byte ids in GPT-2's order,
ties to the smaller pair of ids, an existing string keeps its id, special tokens last and never made
from text. A byte that is no UTF-8 is a word, so any bytes survive. N bytes, V tokens, M merges.
"""
import argparse, collections, contextlib, hashlib, heapq, json, os, pathlib, re, string, sys
from concurrent.futures import ThreadPoolExecutor

os.environ.setdefault("NUMBA_OPT", "1")     # as fast as 3 here, and compiled sooner
import numpy as np
from numba import get_num_threads, njit

JIT = dict(error_model="numpy", nogil=True, cache=True)
# Small functions are inlined. They allocate nothing, so references to their arrays go uncounted:
# atomic additions at each call, which took a third of the time of encoding.
INLINE = dict(JIT, forceinline=True, _nrt=False)
PARALLEL = 8 << 20          # bytes; one thread needs 0.1 s for a shorter text: two do not pay
MAX_VOCAB, NO_RANK = 1 << 20, 0xFFFFF       # ids and ranks have 20 bits; all of them set: none
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
# Python (3.11 lacks 9,272 letters). Code points outside, then inside, and so on are counted as 52
# times the digits, if any, and a letter, a to z and A to Z: jfsb1Wb is 9, 5, 18, 1, 52 + 48, 1.
OTHER, LETTER, NUMBER, SPACE, INVALID, DIGIT = range(6)     # no UTF-8; a number that is a word
RUNS = {SPACE: "jfsb1WbAb107Jb46NlDcfbVb76Wb", NUMBER: """
Wk2qcfbcd27Lk2Ek3Qk7Wk2okeg2ek2ok2okcg2gn2lkih1Zk2ahht2fk1Sk2ok1su5ik1sk13Ru16Xd4Fkgkwk5Ok2yl3jkgk3A
k1Ik2Ekgk20gbdggk3QZcf13Y1i1Aw12gE26Hb14Xbzjod6Fe2IkEibpGkNp568ak3Gk6ig2YkMk3Qkwk1Ik7Qk409ck9zTm1frc
6DBKeDbib2Ef3Uk18gizhNj1xfwg3eccqcU1mj1acEd1xf2aiyiPh6sgWkgk5sF3ckQe2ih2EE2yk1ik2Okhu4Rk6Ek2ok7kk1Yk
gu1ym8et1Pk12Mk1ID4tk1sk8gk1Yv20B2h299fk45ck1Ik2Ekbh10gk5cx464zk28wumu2ez21rY45Ck8gk9Ik4Nk13Oj2yk15l
1hbdbe1yTbp18An53Fk""", LETTER: """
1nAgAVbkbebfxbFb8Qemofhbbb2zfbccebbgbbdbbbub1Fb2Ji3kbMcbgP1tBeeTRJcb1VbbpchckdcbqbbED1LlbyHjcebfwebj
bdbxzhlfybgrQ1g1cdbsbhkpqeicccwbhbbdedbqbncbdockbigeccwbhbcbcbcFebbtdqjbdbwbhbcbfdbsbpcxblicccwbhbcb
fdbEcbdpbrbbgddbedcbbbcdcdddmwb1aibdbxbqdbAdcbccEbeibdbxbkbfdbFcbcpcrjbdbPcbqbfdidygfsdybjbbch1gWbcm
h1gcbbbfbybbbkbcjbcfbbveGb1libKBf2lRubqgeedbdchdenmbrMbbfbcRb6vbechbbbecPbecHbechbbbecpb1fbec1pLqq1I
cgd11WcrbAf1xgihsntosonbdp1aJbeb1p1LhfcIbbf1skFXEcflSeA1cxj1b1Eb1PVri1cEnckSAKPdkKclfRcdPebgbcdbf3K
1m5scgcMcgcibbbbbbbFc1bbhbbddbhdecgenfdbh2mbnbqn1Xbebckbbdfgbbbbbbeblceffeb1ac51F4vgedcmMbbfbc1ehbqx
jhbhbhbhbhbhbhbh1Cb9bcQffce1Igdb1MbefRb1QrGWq9S126O1m426f1pUc5jdqkcuVqFc1sXjc1Zc1pccbbbivqbdbebxD1ao
Y1kgdbbclCkxzDhVCbqfbkkfbPxdbiuxdbdYbbdccfcbbbydclhdmgcgcgjhbhbRbog2lD214SmxeX162C7cc2cMhmffbbkbnbfb
bbcbcb2eH6Zs1mc1cOm2mfb2FKAgAl1LdgcgcgcdJmbAbtbcbpcoI2t7zDdXVGnubigMkEcKeiW3csKeKeOi1amlbpbhbcblbpbh
bcd1am5ZjwkiygbQbj1rgcbbSbcdbcxkxjF1ntbckwkA1s1egc1mbpebdbDQDdDJibCB1ckwktns2g1v1dZnZnKMCjx4QQgcqd1h
DkbiwQsUvBxm1b1fccbnTGzAKDbcbiJdbmWoevbbbJsbztc1lhbbbebpbkhVMicccwbhbcbfdbsbmfEkbbcbbMbbzbbbS1bseudE
Wucbb3CVPeKWub1hRnb1tBLh3DS2m1mFicbcibcbypbbb1QicNqbbbCbkOhbvblUtbs1v3RHFjbLrbXE2ihbcbMvbzgbcbGob6pt
pbbnbI2ub1B17M4w3O50K1Tp20Grgz76Rf11l131DE33U10XhFr1BrEsWqeFvft8qT4d1m2y1xfb1on1mcbbC118ai23QPk171Re
bhbcb5FpbDdcboei7G44u2dfndjhk115k1Hb1tbccbcccebmbbbhb1nbecibhbCbebfbbdhb6CczbzbFbzbFbzbFbzbFbzbi35yF
gg5b1k2QTkhqb6jEsS9qC4uEcb9Bhbebcbpb3P1h1qhb23iebBbcbbcbbkbebbbbgbebbbbbbdbcbbcbbbbbbbbbbcbbcebhbebe
bbbkbrfdbfbr85a821CG79Ug4oc110Qo143Lp11Y47w10w28Y94Zf80G"""}

def class_table():
    """(0x140000,) uint8: the class of whatever 1 to 4 bytes can spell. A text touches a few KB."""
    table = np.zeros(0x140000, np.uint8)
    table[0xD800:0xE000] = table[0x110000:] = INVALID
    for kind, text in RUNS.items():
        end = 0
        for k, (digits, letter) in enumerate(re.findall("([0-9]*)([A-Za-z])", text)):
            start, end = end, end + 52 * int(digits or 0) + string.ascii_letters.index(letter)
            table[start:end] += np.uint8(kind * (k % 2))
    return table

CLASSES = class_table()
DIGITS = np.where(CLASSES == NUMBER, np.uint8(DIGIT), CLASSES)      # Hugging Face's Digits
DIGITS[0x11DE0:0x11DEA] = DIGITS[0x16FF4:0x16FF7] = DIGIT           # which know Unicode 17's

# ==== 2 Words ====
@njit(**INLINE)
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

@njit(**INLINE)
def word_end(text, i, end, classes):
    r"""End of the word at i: one invalid byte, or the first of GPT-2's alternatives that matches,
    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
    With the classes DIGITS the text is cut around each number first."""
    if text[i] == 39 and i + 1 < end:                           # apostrophe
        if text[i + 1] in (115, 116, 109, 100):                 # s t m d
            return i + 2
        if i + 2 < end and (text[i + 1] << 8 | text[i + 2]) in (0x7265, 0x7665, 0x6C6C):
            return i + 3                                        # re ve ll
    j = i + 1 if text[i] == 32 and i + 1 < end else i
    kind, n = char_at(text, j, end, classes)
    if j > i and kind >= SPACE:                                 # the blank at i joins no word
        j, kind, n = i, SPACE, 1
    last, j, k = j, j + n, kind                                 # last: where the last character is
    while j < end and kind < INVALID:
        k, n = char_at(text, j, end, classes)
        if k != kind:
            break
        last, j = j, j + n
    return last if kind == SPACE and j < end and last > i and k != DIGIT else j     # \s+(?!\S)

@njit(**INLINE)
def find_word(table, text, i, j):
    """The row of text[i:j] in a word table, or the free row it may take, whose key is set.
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
    table[row, 0] = key
    return row

def of_parts(text, work):
    """[work(start, end)] of the parts of a text, each in a thread of its own, one part if N is
    small. A word ends where a visible ASCII character meets a blank: there parts may meet, too."""
    if len(text) < PARALLEL:
        return [work(0, len(text))]
    n, meet = get_num_threads(), re.compile(rb"[!-~](?=[ \n])|\Z")
    cuts = [meet.search(text, len(text) * k // n).end() for k in range(1, n)]
    with ThreadPoolExecutor() as pool:
        return list(pool.map(work, [0, *cuts], [*cuts, len(text)]))

def as_array(text):
    """(N,) uint8. A lone surrogate of a str is three invalid bytes."""
    text = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return np.frombuffer(text, np.uint8)

# ==== 3 Training ====
@njit(**JIT)
def count_words(table, text, i, end, classes):
    """Counts words of text[i:end] in a word table until that is half full; returns where."""
    used = 0
    while i < end and 2 * used < len(table):
        j = word_end(text, i, end, classes)
        row = find_word(table, text, i, j)
        used += table[row, 2] == 0
        table[row, 1], table[row, 2], table[row, 3] = i, j, table[row, 3] + 1
        i = j
    return i

def unique_words(text):
    """Counter of the words of text, bytes -> how often; a thread for each part."""
    array = as_array(text)
    def count(i, end):
        words = collections.Counter()
        while i < end:
            table = np.zeros((1 << 17, 4), np.int64)            # 4 MB, emptied at 65,536 words
            i = count_words(table, array, i, end, CLASSES)      # runs without the GIL
            for start, stop, n in table[table[:, 2] > 0, 1:].tolist():
                words[array[start:stop].tobytes()] += n
        return words
    return sum(of_parts(array, count), collections.Counter())

def learn_merges(ids, weight, M):
    """The first M merges [(left, right)], fewer if the pairs run out; merge m makes token 256 + m.
    ids (P,) int64: the unique words one after another, -1 between words and at both ends
    weight (P,) int64: how often the word of a position occurs
    A pair is born in one step, which makes its younger token, and then its count only falls: the
    next merge is the first in the heap of (-count, pair, positions) whose count still holds."""
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
        while heap and heap[0][0] < 0 and len(merges) < M:
            count, pair, p = heapq.heappop(heap)
            a, b = pair >> 32, pair & 0xFFFFFFFF
            p = p[(ids[p] == a) & (ids[next[p]] == b)]      # some are part of another merge by now
            n = int(weight[p].sum())
            if n == -count:
                break
            heapq.heappush(heap, (-n, pair, p))
        else:
            return merges
        if a == b:                                  # aaa is [aa]a: in a run, every second position
            runs = np.flatnonzero(np.append(True, next[p[:-1]] != p[1:]))
            p = p[(np.arange(len(p)) - np.repeat(runs, np.diff(runs, append=len(p)))) % 2 == 0]
        q = next[p]
        ids[p], ids[q], next[p] = 256 + len(merges), -2, next[q]
        prev[next[p]] = p
        born = np.unique(np.concatenate([prev[p], p]))
        merges.append((a, b))

def train(text, vocab_size, specials=("</s>",)):
    """Tokenizer of vocab_size tokens, or fewer if text has few pairs: bytes, merges, specials."""
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
@njit(**INLINE)
def find_pair(table, left, right):
    """The row of a pair of ids in a pair table, or the free row it may take.
    table (R,) int64, R a power of two: left << 40 | right << 20 | rank of the merge; -1: free."""
    pair = np.int64(left) << 20 | right
    row = pair * MIX >> 40 & len(table) - 1
    while table[row] >= 0 and table[row] >> 20 != pair:
        row = row + 1 & len(table) - 1
    return row

@njit(**JIT)
def merge_word(ids, table, made):
    """Merges the ids (n,) of a word in place, lowest rank first, then leftmost; returns how many
    stay. A pass merges every pair of the lowest rank, until one of a lower rank comes up: about as
    many passes as different merges, so that a megabyte of one letter is no trap."""
    n, rank = len(ids), np.full(len(ids), NO_RANK)      # rank of the merge of a token and the next
    for p in range(n - 1):
        rank[p] = table[find_pair(table, ids[p], ids[p + 1])] & NO_RANK
    while True:
        lowest, m = NO_RANK, 0
        for p in range(n):
            if rank[p] < lowest:
                lowest, m = rank[p], p
        if lowest == NO_RANK:
            return n
        p = m
        while p < n:
            ids[m], rank[m], p = ids[p], rank[p], p + 1
            if rank[m] == lowest:
                ids[m], rank[m], p = made[lowest], NO_RANK, p + 1
                for x, y in ((m, p), (m - 1, m)):       # with the token after, the one before
                    if x >= 0 and y < n:
                        rank[x] = table[find_pair(table, ids[x], ids[y])] & NO_RANK
                        lowest = -1 if rank[x] < lowest else lowest
            m += 1
        n = m

@njit(**JIT)
def encode_range(out, text, start, end, classes, byte_id, pairs, made):
    """Ids of text[start:end] into out[start:]; returns where they end. A word seen before is copied
    from where its ids stand in out: `seen` is a word table, value = where << 8 | how many, for
    words of less than 256 bytes."""
    rows = 1 << min(17, max(9, int(np.log2(end - start + 1)) - 1))
    seen, used = np.zeros((rows, 4), np.int64), 0
    i = m = start
    while i < end:
        j = word_end(text, i, end, classes)
        row = find_word(seen, text, i, j)
        if seen[row, 2] != 0:
            p, n = seen[row, 3] >> 8, seen[row, 3] & 255
            for k in range(n):
                out[m + k] = out[p + k]
        else:
            n = 0
            for k in range(i, j):                               # a byte without an id is left out
                out[m + n] = byte_id[text[k]]
                n += out[m + n] >= 0
            n = merge_word(out[m:m + n], pairs, made)
            if j - i < 256 and 2 * used < rows:
                seen[row, 1], seen[row, 2], seen[row, 3] = i, j, m << 8 | n
                used += 1
        i, m = j, m + n
    return m

# ==== 5 Errors ====
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
        source = getattr(error, "filename", None) or source      # a file of the folder
        raise UserError(f"{source}: {what or type(error).__name__}; {remedy}") from None

# ==== 6 The tokenizer, its files ====
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
        bad = sorted(made.intersection(specials))[:3]
        need(not bad, f"special tokens {bad} are also made from text: choose some like </s>")
        need([ids[s] for s in names] == list(range(len(names))) and len(names) <= MAX_VOCAB,
             f"the ids of {len(names)} tokens are not 0 to {len(names) - 1}, or over {MAX_VOCAB}")
        need(len(set(pairs)) == len(pairs) < MAX_VOCAB and "" not in ids, f"{len(pairs)} merges, "
             f"{len(set(pairs))} of them different, or an empty special token")
        ids, byte = {s: k for k, s in enumerate(names)}, dict(zip(CHARS, BYTES))
        self.vocab = [bytes(byte[c] for c in s) if s in made else s.encode() for s in names]
        self.merges, self.vocab_size = [(ids[a], ids[b]) for a, b in pairs], len(names)
        self.specials = {s: k for s, k in ids.items() if s not in made}
        self.digits, self._ids, self._lines = digits, ids, [f"{a} {b}" for a, b in pairs]
        table = np.full(4 << len(pairs).bit_length(), -1)       # a quarter full at most
        for rank, (left, right) in enumerate(self.merges):
            table[find_pair(table, left, right)] = left << 40 | right << 20 | rank
        self._tables = (DIGITS if digits else CLASSES,
                        np.array([ids.get(c, -1) for c in CHARS], np.int32)[BYTE_ID],
                        table, np.array([ids[a + b] for a, b in pairs], np.int32))

    def encode(self, text):
        """Ids, int32, of str or bytes. Ordinary text only: "</s>" becomes three tokens or so."""
        text, m = as_array(text), 0
        ids = np.empty(len(text), np.int32)             # a byte or more for each id
        encode = lambda i, j: (i, encode_range(ids, text, i, j, *self._tables))
        for start, end in of_parts(text, encode):
            ids[m:m + end - start], m = ids[start:end], m + end - start
        ids.resize(m, refcheck=False)                   # gives back the memory behind
        return ids

    def decode(self, ids):
        """The bytes of ids; a special token gives its name."""
        ids = np.asarray(ids).ravel().tolist()
        bad = [k for k in ids if not 0 <= k < self.vocab_size]
        need(not bad, f"ids {bad[:3]} are not 0 to {self.vocab_size - 1}: decode with what encoded")
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
        root = dict(version="1.0", added_tokens=added, pre_tokenizer=cuts, decoder=words,
                    model=dict(type="BPE", vocab=self._ids, merges=self._lines))
        return json.dumps(root, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text):
        """Of Hugging Face's tokenizer.json. Errors are of any kind: wrap it in `reading`."""
        root = json.loads(text)
        model, words = root["model"], root["pre_tokenizer"]
        *digits, last = words.get("pretokenizers", [words])
        need((last["type"], last.get("use_regex", True), last.get("add_prefix_space"))
             == ("ByteLevel", True, False)
             and digits in ([], [dict(type="Digits", individual_digits=True)]),
             f"pre_tokenizer {words} is not GPT-2's, nor that behind Digits")
        after = (root.get("post_processor") or {}).get("type", "ByteLevel")
        alien = ["normalizer", "dropout", "ignore_merges", "continuing_subword_prefix",
                 "end_of_word_suffix"] + ["unk_token"] * (not set(CHARS) <= set(model["vocab"]))
        found = {key: value for key, value in {**root, **model}.items() if key in alien and value}
        need(not found and after == "ByteLevel", f"{found}, post_processor {after}: other ids")
        added = {a["content"]: a["id"] for a in root.get("added_tokens") or []}
        return cls({**model["vocab"], **added}, model["merges"], added, bool(digits))

    def save(self, path):
        """A tokenizer.json if path ends in .json, else a directory with vocab.json, merges.txt."""
        files = {str(path): self.to_json()}
        if not str(path).endswith(".json"):
            need(not self.digits, f"{path}: each digit is a word, which only a .json file can say")
            os.makedirs(path, exist_ok=True)
            files = {f"{path}/vocab.json": json.dumps(self._ids, ensure_ascii=False),
                     f"{path}/merges.txt": "\n".join(["#version: 0.2", *self._lines, ""])}
        for name, content in files.items():
            pathlib.Path(name + ".part").write_text(content, encoding="utf-8", newline="\n")
            os.replace(name + ".part", name)            # a reader sees the old file or the new one

    @classmethod
    def load(cls, path):
        """Reads what `save` writes, and such files of GPT-2 and of Hugging Face."""
        file = pathlib.Path(path)
        with reading(path, "give a byte-level tokenizer.json, or vocab.json and merges.txt"):
            need(file.stat().st_size < 1 << 28, f"{file.stat().st_size} bytes, over {1 << 28}")
            if not file.is_dir():
                return cls.from_json(file.read_text(encoding="utf-8"))
            lines = (file / "merges.txt").read_text(encoding="utf-8").split("\n")
            return cls(json.loads((file / "vocab.json").read_text(encoding="utf-8")),
                       [s for s in lines if s and not s.startswith("#version")])

# ==== 7 Command line ====
def main():
    parser = argparse.ArgumentParser(description="Byte-level BPE tokenizer.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("verb", choices=["train", "encode", "decode"],
                        help="learn from text, turn text into decimal ids, or ids into text")
    parser.add_argument("file", nargs="?", default="-", help="input, - for standard input")
    parser.add_argument("--vocab-size", type=int, default=4096, help="bytes, merges and </s>")
    parser.add_argument("--tokenizer", default="tokenizer.json", help="written by train, read by "
                        "the others: a .json file, or a directory for vocab.json, merges.txt")
    args = parser.parse_intermixed_args()    # the file may stand behind the flags
    with open(0 if args.file == "-" else args.file, "rb") as f:
        data = f.read()
    if args.verb == "train":
        tokenizer = train(data, args.vocab_size)
        tokenizer.save(args.tokenizer)
        print(f"{args.tokenizer}: {tokenizer.vocab_size} tokens")
    elif args.verb == "encode":
        print(*Tokenizer.load(args.tokenizer).encode(data).tolist())
    else:
        with reading(args.file, "give decimal token ids"):
            ids = [int(s) for s in data.split()]
        sys.stdout.buffer.write(Tokenizer.load(args.tokenizer).decode(ids))

if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:                  # the reader of our output is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except (OSError, UserError) as error:
        print(f"bpe.py: {error}", file=sys.stderr)
        sys.exit(2)
