r"""Byte-level BPE: text to token ids and back, learned from text, in Python, NumPy and Numba.

    python bpe.py train data/shakespeare.txt --vocab-size 4096 --tokenizer tokenizer.json
    echo "To be, or not to be" | python bpe.py encode | python bpe.py decode

GPT-2's pattern cuts the text into words (section 3). Inside a word, which starts as single bytes,
the pair of neighbours that was learned first becomes one token, and so on (section 5). Training
learns the pairs: merge the most frequent pair of all words, and so on (Sennrich et al. 2016).

    1 bytes and classes    3 words       5 encoding    7 the tokenizer, its files
    2 compilation          4 training    6 errors      8 command line

Same merges as Hugging Face `tokenizers`, same ids as it and tiktoken: byte ids in GPT-2's order,
ties to the smaller pair of ids, an existing string keeps its id, special tokens last and never made
from text. A byte that is no UTF-8 is a word, so any bytes survive. N bytes, V tokens, M merges.
"""
import argparse
import collections
import contextlib
import errno
import functools
import hashlib
import heapq
import json
import os
import pathlib
import pickle
import re
import secrets
import stat
import string
import sys
import tempfile
import zlib
from concurrent.futures import ThreadPoolExecutor

# A process has one LLVM code generator. Numba makes it at the first decorator, at the level of
# NUMBA_OPT. Our functions need level 1 (section 2). A program that imported Numba earlier keeps the
# level that it has. Nothing else of its Numba changes.
if "numba" not in sys.modules and "NUMBA_OPT" not in os.environ:
    os.environ["NUMBA_OPT"] = "1"
    import numba
    numba.njit(lambda: None)
    del os.environ["NUMBA_OPT"]
    numba.config.reload_config()

import numpy as np
from numba import config, get_num_threads, njit
from numba.core import caching
from numba.core.compiler_lock import global_compiler_lock

# ==== 1 Bytes and classes ====
# GPT-2 writes a byte as a printable character, so that vocabularies are text: 188 bytes stand for
# themselves, the other 68 (blanks, controls) become U+0100 and up. Byte ids follow the same order.
VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]     # ! to ~, ¡ to ¬, ® to ÿ
HIDDEN = sorted(set(range(256)) - set(VISIBLE))
BYTE_OF_ID = VISIBLE + HIDDEN
CHAR_OF_ID = [chr(b) for b in VISIBLE] + [chr(256 + k) for k in range(len(HIDDEN))]
ID_OF_BYTE = np.argsort(BYTE_OF_ID)     # what sorts a permutation is its inverse
MAX_VOCAB = 1 << 20                 # ids and ranks of merges have 20 bits (section 5)

# The class of a character, as the pattern in section 3 tells them apart. The order matters there:
# a blank may join the first three, and whatever comes after SPACE is a word by itself.
OTHER = 0           # punctuation, marks, symbols, controls, unassigned code points
LETTER = 1          # \p{L}
NUMBER = 2          # \p{N}
SPACE = 3           # \s
INVALID = 4         # no character: a surrogate, a number above U+10FFFF, a byte that is no UTF-8
DIGIT = 5           # a number, where each number shall be a word

# LETTER, NUMBER and SPACE of Unicode 16.0 as tokenizers 0.23 and tiktoken 0.14 know them: 141,028
# letters, 1,911 numbers, 25 spaces. Frozen, because str.isalpha and str.isspace differ and change
# with Python (3.11 lacks 9,272 letters).
# A text is a list of counts: from U+0000 on, so many code points are outside the class, so many
# inside, so many outside, and so on. The spaces begin with j f s b 1W b: 9 outside, 5 inside
# (U+0009 to U+000D), 18 outside, 1 inside (U+0020), 100 outside, 1 inside (U+0085). A count ends
# with a letter, a to z for 0 to 25, A to Z for 26 to 51; a number before it counts 52s:
# 1W = 1 * 52 + 48 = 100.
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
    """(0x140000,) uint8: the class of each code point that 4 bytes of UTF-8 can spell, which are
    more than Unicode has. A text touches a few KB of it."""
    table = np.full(0x140000, OTHER, np.uint8)
    table[0xD800:0xE000] = INVALID                              # surrogates
    table[0x110000:] = INVALID
    for kind, text in RUNS.items():
        point = 0
        inside = False
        for digits, letter in re.findall("([0-9]*)([A-Za-z])", text):
            count = 52 * int(digits or 0) + string.ascii_letters.index(letter)
            if inside:
                table[point:point + count] = kind
            point += count
            inside = not inside
    return table

CLASSES = class_table()
# The classes if each number is a word of its own, as Hugging Face's step Digits has it. That step
# knows Unicode 17, where these 13 code points became numbers.
DIGITS = np.where(CLASSES == NUMBER, np.uint8(DIGIT), CLASSES)
DIGITS[0x11DE0:0x11DEA] = DIGIT
DIGITS[0x16FF4:0x16FF7] = DIGIT

# ==== 2 Compilation ====
def numba_finds_a_folder():
    """Whether Numba can write compiled kernels to NUMBA_CACHE_DIR, to __pycache__ beside this file
    or to the user's cache folder. Where it cannot, a decorator with cache=True raises."""
    try:
        njit(cache=True)(lambda: None)
    except RuntimeError:
        return False
    return True

def keep_kernels_in(folder):
    """Sets NUMBA_CACHE_DIR, here and in the processes that this one starts."""
    os.environ["NUMBA_CACHE_DIR"] = folder
    config.CACHE_DIR = folder
    # else Numba would read all settings anew, and forget those that a program has set in config
    config._env_reloader.old_environ["NUMBA_CACHE_DIR"] = folder

def private_folder():
    """A folder for temporary files that nobody but this user can write, or None. Kernels are
    programs: who can change them can run anything in this user's name."""
    if not hasattr(os, "geteuid"):
        return None                             # Windows: there the user's cache folder will do
    try:
        folder = os.path.join(tempfile.gettempdir(), f"nanoeuler-cache-{os.geteuid()}")
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        found = os.lstat(folder)                # a link is not followed, and refused below
    except OSError:
        return None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return None
    if found.st_mode & 0o022:                   # others can write it
        return None
    return folder

def settle_cache():
    """Sees to it that Numba has a folder for compiled kernels; False if none can be written. To be
    called before the first @njit(cache=True), which would end the program there."""
    if config.CACHE_DIR:                        # absolute, as a child may start somewhere else
        keep_kernels_in(os.path.abspath(config.CACHE_DIR))
    if numba_finds_a_folder():
        return True
    here = os.path.dirname(os.path.abspath(__file__))
    trouble = (f"note: compiled kernels cannot be written to NUMBA_CACHE_DIR "
               f"({config.CACHE_DIR or 'not set'}), {here}/__pycache__ or your cache folder")
    remedy = "set NUMBA_CACHE_DIR to a folder that can be written"
    folder = private_folder()
    if folder:
        keep_kernels_in(folder)
        if numba_finds_a_folder():
            print(f"{trouble}: they go to {folder}; {remedy} and lasts", file=sys.stderr)
            return True
    print(f"{trouble}: they are compiled anew at each start, which takes seconds to minutes; "
          f"{remedy}", file=sys.stderr)
    return False

# Numba's files are pickles: an index of each function, and one for each kernel. A damaged one would
# end every start until somebody deletes it. These stand in for private methods of Numba 0.68, in
# classes of our own: the functions of other libraries keep Numba's.
def save_data(self, name, data):
    """Numba's, with a checksum behind the pickle, whose readers do not look there."""
    pickled = self._dump(data)
    with self._open_for_write(self._data_path(name)) as f:
        f.write(pickled + zlib.crc32(pickled).to_bytes(4, "little"))

def pickle_in(path):
    """The bytes that `save_data` pickled into a file; None if it is not there, or not whole."""
    try:
        data = pathlib.Path(path).read_bytes()
    except FileNotFoundError:
        return None
    pickled, checksum = data[:-4], data[-4:]
    return pickled if zlib.crc32(pickled).to_bytes(4, "little") == checksum else None

def load_data(self, name):
    """Numba's; where a file is damaged, as where there is none, Numba compiles and writes it."""
    pickled = pickle_in(self._data_path(name))
    if pickled is None:
        raise FileNotFoundError(name)
    return pickle.loads(pickled)

def survive_damage(cache_file):
    """Makes a class of Numba's cache files, or of numba-cuda's, drop what is damaged."""
    numbas_load_index = cache_file._load_index

    def load_index(self):
        """Numba's; a damaged index is an empty one, and is written anew with the next kernel."""
        try:
            return dict(numbas_load_index(self))
        except OSError:
            raise
        except Exception:                       # a pickle may raise anything
            return {}

    cache_file._load_index = load_index
    cache_file._save_data = save_data
    cache_file._load_data = load_data

class CacheFile(caching.IndexDataCacheFile):
    """The index and the kernels of a function of this project"""

survive_damage(CacheFile)

@functools.cache
def digest(files):
    """SHA-256 of the contents of files"""
    h = hashlib.sha256()
    for file in files:
        h.update(pathlib.Path(file).read_bytes())
    return h.hexdigest()

class Cache(caching.FunctionCache):
    """The cache of a function of this project. A kernel contains the code of the functions that it
    calls, but Numba only notices when the file of the kernel itself is edited. Here, a kernel is
    also compiled again after an edit of one of `files`."""
    def __init__(self, function, files=()):
        super().__init__(function)
        file = self._cache_file
        file.__class__ = CacheFile
        file._source_stamp = file._source_stamp, digest(tuple(files))
        self.files = {function.__code__.co_filename, *files}

class Compiling:
    """A block in which Numba compiles functions of this project, at our level of optimization: 1,
    which is as fast as 3 here and compiled sooner, unless NUMBA_OPT is set."""
    level = config.OPT if "NUMBA_OPT" in os.environ else type(config.OPT)(1)
    depth = 0                                   # a kernel compiles the kernels that it calls

    def __enter__(self):
        global_compiler_lock.__enter__()        # Numba's: other threads wait for the level
        config.reload_config()                  # now, as Numba may do it within the block
        self.before, config.OPT = config.OPT, self.level
        Compiling.depth += 1

    def __exit__(self, *error):
        Compiling.depth -= 1
        config.OPT = self.before
        global_compiler_lock.__exit__(*error)

def jit(files=(), **options):
    """numba.njit, for a function of this project: compiled in Compiling, kept in a Cache. files:
    the paths of other files whose functions it may call"""
    def decorate(function):
        dispatcher = njit(**options)(function)
        if config.DISABLE_JIT:
            return dispatcher
        compiler = dispatcher._compiler
        numbas_compile = compiler.compile

        def compile_ours(args, return_type):
            with Compiling():
                return numbas_compile(args, return_type)

        compiler.compile = compile_ours
        if options.get("cache"):
            dispatcher._cache = Cache(function, files)
        return dispatcher
    return decorate

CACHE = settle_cache()          # for jit(cache=CACHE): whether compiled kernels are kept

JIT = dict(error_model="numpy", nogil=True, cache=CACHE)        # nogil: threads run side by side
# For small functions: their code is copied to where they are called, and as they allocate nothing,
# references to their arrays go uncounted (_nrt, an option that Numba 0.68 does not document).
# Counting is an atomic addition at each call, which took a third of the time of encoding.
INLINE = dict(JIT, forceinline=True, _nrt=False)

# ==== 3 Words ====
APOSTROPHE = ord("'")
BLANK = ord(" ")
AFTER_APOSTROPHE = tuple(b"stmd")                               # 's 't 'm 'd
# 're 've 'll, two bytes as one number
TWO_AFTER = tuple(int.from_bytes(two, "big") for two in (b"re", b"ve", b"ll"))

@jit(**INLINE)
def char_at(text, i, end, classes):
    """(class, length in bytes) of the UTF-8 character at i, or (INVALID, 1).     RFC 3629
    0xxxxxxx | 110xxxxx 10xxxxxx | 1110xxxx 10xxxxxx 10xxxxxx | 11110xxx and three of 10xxxxxx"""
    first = np.int64(text[i])
    if first < 0x80:
        return np.int64(classes[first]), 1
    if first < 0xC2 or first > 0xF4:                # 10xxxxxx, or all it begins is out of range
        return INVALID, 1
    if first < 0xE0:
        n, smallest = 2, 0x80
    elif first < 0xF0:
        n, smallest = 3, 0x800
    else:
        n, smallest = 4, 0x10000
    if i + n > end:
        return INVALID, 1
    point = first & (0x7F >> n)                     # the bits x of the first byte
    for k in range(i + 1, i + n):
        if text[k] & 0xC0 != 0x80:                  # not 10xxxxxx
            return INVALID, 1
        point = (point << 6) | (text[k] & 0x3F)
    if point < smallest:                            # fewer bytes would do
        return INVALID, 1
    kind = np.int64(classes[point])
    if kind == INVALID:
        return INVALID, 1
    return kind, n

@jit(**INLINE)
def word_end(text, i, end, classes):
    r"""End of the word at i: one invalid byte, or the first of GPT-2's alternatives that matches,
    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
    With the classes DIGITS the text is cut around each number first.
    text (N,) uint8, of which text[:end] counts     classes (0x140000,) uint8"""
    if text[i] == APOSTROPHE and i + 1 < end:
        if text[i + 1] in AFTER_APOSTROPHE:
            return i + 2
        if i + 2 < end and (text[i + 1] << 8 | text[i + 2]) in TWO_AFTER:
            return i + 3
    # The others are a blank or none, then a run of characters of one class.
    last = i                                # where the last character of the run begins
    if text[i] == BLANK and i + 1 < end:
        last = i + 1
    kind, n = char_at(text, last, end, classes)
    # SPACE, INVALID and DIGIT join no blank before them: that begins a run of spaces.
    if last > i and kind >= SPACE:
        last = i
        kind = SPACE
        n = 1
    stop = last + n                         # where the run ends
    next_kind = kind                        # class of the character at stop
    while stop < end and kind < INVALID:    # INVALID, DIGIT: each is a run by itself
        next_kind, n = char_at(text, stop, end, classes)
        if next_kind != kind:
            break
        last = stop
        stop += n
    # \s+(?!\S): before a word, spaces leave the last one to it. Not before a DIGIT: there the text
    # was cut first, so that (?!\S) sees the end of a text.
    if kind == SPACE and stop < end and next_kind != DIGIT and last > i:
        return last
    return stop

# A word table counts or remembers words: (R, 4) int64, R a power of two, one word a row, its bytes
# staying in the text. Columns:
KEY = 0             # the first 8 bytes
START = 1           # text[START:END] is the word
END = 2             # 0: the row is free
VALUE = 3           # what the caller keeps
# A word stands in the row that its hash names, or in the next that was free. The hash is 20 upper
# bits of a product with `mix` (no table has more rows).

def draw_mix():
    """A factor for hashes, odd, so that no bit gets lost, and secret: who knew it could write words
    that all meet in one row, each walking past those before it. No result depends on it.
    Multiply-shift hashing, Dietzfelbinger et al. 1997"""
    return secrets.randbits(63) | 1

@jit(**INLINE)
def same_bytes(text, i, j, other):
    """Whether text[i:j] is also what begins at `other`."""
    k = i
    while k < j and text[k] == text[other + k - i]:
        k += 1
    return k >= j

@jit(**INLINE)
def row_for_word(table, mix, text, i, j):
    """The row of text[i:j] in a word table; for a new word a free row, in which KEY is written and
    the other columns are left to the caller."""
    key = 0
    for k in range(i, min(i + 8, j)):
        key = (key << 8) | text[k]
    h = key ^ (j - i)
    for k in range(i + 8, j):               # few words are that long
        h = (h * mix) ^ text[k]
    row = (h * mix >> 44) & (len(table) - 1)
    while table[row, END] != 0:
        start = table[row, START]
        if table[row, KEY] == key and table[row, END] - start == j - i:     # then the first 8 agree
            if same_bytes(text, i + 8, j, start + 8):
                break
        row = (row + 1) & (len(table) - 1)
    table[row, KEY] = key
    return row

PARALLEL = 8 << 20          # bytes; one thread needs 0.1 s for a shorter text: two do not pay

def next_cut(text, i):
    """Where text may be cut, at or behind i, and each part encoded by itself: a word ends where a
    visible ASCII character meets a blank or a line's end. The text's end if there is no such place.
    """
    found = CUT.search(text, i)
    return found.end() if found else len(text)

CUT = re.compile(rb"[!-~](?=[ \n])")

def of_parts(text, work):
    """[work(start, end)] of the parts of a text (N,) uint8, each in a thread of its own, one part
    if N is small."""
    if len(text) < PARALLEL:
        return [work(0, len(text))]
    n = get_num_threads()
    cuts = [next_cut(text, len(text) * k // n) for k in range(1, n)]
    starts = [0, *cuts]
    ends = [*cuts, len(text)]
    with ThreadPoolExecutor() as pool:
        return list(pool.map(work, starts, ends))

def as_array(text):
    """(N,) uint8 of str or bytes. A lone surrogate of a str is three invalid bytes."""
    if isinstance(text, str):
        text = text.encode("utf-8", "surrogatepass")
    return np.frombuffer(text, np.uint8)

# ==== 4 Training ====
@jit(**JIT)
def count_words(table, mix, text, i, end, classes):
    """Counts words of text[i:end] in a word table until that is half full; returns the position
    it stopped at.
    VALUE: how often     START, END: the latest, whose bytes are likely in the processor's cache"""
    used = 0
    while i < end and 2 * used < len(table):
        j = word_end(text, i, end, classes)
        row = row_for_word(table, mix, text, i, j)
        if table[row, END] == 0:
            used += 1
        table[row, START] = i
        table[row, END] = j
        table[row, VALUE] += 1
        i = j
    return i

def unique_words(text):
    """Counter of the words of text, bytes -> how often; a thread for each part."""
    text = as_array(text)
    mix = draw_mix()

    def count(i, end):
        words = collections.Counter()
        while i < end:
            table = np.zeros((1 << 17, 4), np.int64)            # 4 MB, emptied at 65,536 words
            i = count_words(table, mix, text, i, end, CLASSES)  # runs without the GIL
            taken = table[table[:, END] > 0]
            for start, stop, n in taken[:, [START, END, VALUE]].tolist():
                words[text[start:stop].tobytes()] += n
        return words

    return sum(of_parts(text, count), collections.Counter())

MERGED = -2         # in place of an id: the token to the left has taken this one in
BORDER = -1         # between two words

def push_pairs(heap, ids, weight, after, p):
    """Pushes (-count, pair, positions) of each pair that begins at one of the positions p (K,),
    ascending. A pair is the number left << 32 | right: in order, that is by left, then right."""
    p = p[(ids[p] >= 0) & (ids[after[p]] >= 0)]                 # two tokens of one word
    pairs = ids[p] << 32 | ids[after[p]]
    order = np.argsort(pairs, kind="stable")                    # equal pairs come together
    pairs = pairs[order]
    p = p[order]
    first = np.flatnonzero(np.diff(pairs, prepend=-1))          # of each group of equal pairs
    counts = np.add.reduceat(weight[p], first).tolist()
    groups = np.split(p, first[1:])
    for count, pair, positions in zip(counts, pairs[first].tolist(), groups):
        # a pair is in the heap once, so that two entries never differ in their positions alone
        heapq.heappush(heap, (-count, pair, positions))

def pop_pair(heap, ids, weight, after):
    """(left, right, positions) of the most frequent pair, or None. The count of an entry was right
    when it was pushed; if other merges took some of its positions since, it goes back with the
    count that is right now."""
    while heap:
        minus_count, pair, p = heapq.heappop(heap)
        left = pair >> 32
        right = pair & 0xFFFFFFFF
        p = p[(ids[p] == left) & (ids[after[p]] == right)]
        count = int(weight[p].sum())
        if count == -minus_count:
            return left, right, p
        if count > 0:
            heapq.heappush(heap, (-count, pair, p))
    return None

def every_second(p, after):
    """Of the positions p (K,) of a pair (a, a) those that merge: it begins four times in aaaaa, but
    that becomes [aa][aa]a. So in each run of neighbours the first, the third and so on."""
    first = np.flatnonzero(np.append(True, after[p[:-1]] != p[1:]))     # where in p a run begins
    length = np.diff(first, append=len(p))
    place = np.arange(len(p)) - np.repeat(first, length)                # in its run, from 0
    return p[place % 2 == 0]

def learn_merges(ids, weight, M):
    """The first M merges [(left, right)], fewer if the pairs run out; merge m makes token 256 + m.
    ids (P,) int64: the unique words one after another, BORDER between words and at both ends
    weight (P,) int64: how often the word of a position occurs
    A pair is born in one step, which makes its younger token, and then its count only falls: the
    next merge is the first in the heap of (-count, pair, positions) whose count still holds."""
    before = np.arange(-1, len(ids) - 1)            # (P,) position of the token to the left
    after = np.arange(1, len(ids) + 1)              # (P,) position of the token to the right
    heap = []
    push_pairs(heap, ids, weight, after, np.arange(len(ids) - 1))
    merges = []
    while len(merges) < M:
        found = pop_pair(heap, ids, weight, after)
        if found is None:
            break
        left, right, p = found
        if left == right:
            p = every_second(p, after)
        q = after[p]                                # the right tokens, which go
        ids[p] = 256 + len(merges)
        ids[q] = MERGED
        after[p] = after[q]
        before[after[p]] = p
        push_pairs(heap, ids, weight, after, np.unique(np.concatenate([before[p], p])))
        merges.append((left, right))
    return merges

def lay_out(words):
    """ids and weight, as `learn_merges` takes them, of a Counter of words. Of "to" 7 times and
    "be" twice, | being BORDER:    ids    | t o | b e |
                                   weight 0 7 7 7 2 2 2"""
    ids = ID_OF_BYTE[as_array(b" ".join([b"", *words, b""]))]
    sizes = np.array([1] + [len(word) + 1 for word in words])   # the first border; word and border
    ids[np.cumsum(sizes) - 1] = BORDER
    weight = np.repeat([0, *words.values()], sizes)
    return ids, weight

# What ends a text; in ChatML, what begins a message of a conversation, and what ends it
SPECIALS = "</s>", "<|im_start|>", "<|im_end|>"

def train(text, vocab_size, specials=SPECIALS[:1]):
    """Tokenizer of vocab_size tokens, or fewer if text has few pairs: bytes, merges, specials."""
    fixed = 256 + len(specials)
    need(fixed <= vocab_size <= MAX_VOCAB, f"vocab_size {vocab_size} is not between {fixed} (256 "
         f"bytes, {len(specials)} special tokens) and {MAX_VOCAB}: choose such a size")
    ids, weight = lay_out(unique_words(text))
    names = CHAR_OF_ID.copy()
    merges = []
    for left, right in learn_merges(ids, weight, vocab_size - fixed):
        # No merge makes a string that is there already. Equal bytes with ends of tokens on both
        # sides have always been merged alike, so the first merge that made the string of them made
        # it wherever they stood, and no pair that spells it is left.
        merges.append(f"{names[left]} {names[right]}")
        names.append(names[left] + names[right])
    names.extend(specials)
    return Tokenizer({name: k for k, name in enumerate(names)}, merges, specials)

# ==== 5 Encoding ====
# A pair table holds merges: (R,) int64, R a power of two, left << 40 | right << 20 | rank in a row,
# -1 if that is free. A pair stands in the row that its hash of 24 bits names, a product with `mix`
# like a word's, or in the next that was free.
NO_RANK = 0xFFFFF           # higher than any rank; all of its 20 bits are set, as those of -1 are

@jit(**INLINE)
def find_pair(table, mix, left, right):
    """The row of a pair of ids in a pair table, or the free row it may take."""
    pair = (np.int64(left) << 20) | right
    row = (pair * mix >> 40) & (len(table) - 1)
    while table[row] >= 0 and table[row] >> 20 != pair:
        row = (row + 1) & (len(table) - 1)
    return row

@jit(**INLINE)
def rank_of(table, mix, left, right):
    """Rank of the merge of a pair of ids, or NO_RANK: the lower 20 bits of its row, free or not."""
    return table[find_pair(table, mix, left, right)] & NO_RANK

# A tournament of the pairs at n positions: (2n,) int64. tree[n + p] is rank << 40 | p, and tree[k]
# the smaller of tree[2k] and tree[2k + 1], so that tree[1] is the lowest rank, then the leftmost.

@jit(**INLINE)
def set_rank(tree, p, rank):
    """Sets the rank at a position, and the nodes above it as far as they change."""
    k = len(tree) // 2 + p
    tree[k] = rank << 40 | p
    while k > 1:
        k >>= 1
        smaller = min(tree[2 * k], tree[2 * k + 1])
        if tree[k] == smaller:
            break
        tree[k] = smaller

@jit(**JIT)
def merge_by_tree(ids, rank, table, mix, made):
    """What `merge_word` does, in n log n steps whatever the merges are. A token made keeps the
    position of its left one, as in training.
    rank (n,) int64: of the pair of a token and the next     others: as `merge_word` has them"""
    n = len(ids)
    before = np.empty(n, np.int64)          # position of the token to the left
    after = np.empty(n, np.int64)           # position of the token to the right
    tree = np.empty(2 * n, np.int64)
    for p in range(n):
        before[p] = p - 1
        after[p] = p + 1
        tree[n + p] = rank[p] << 40 | p
    for k in range(n - 1, 0, -1):
        tree[k] = min(tree[2 * k], tree[2 * k + 1])
    while tree[1] >> 40 != NO_RANK:
        p = tree[1] & ((1 << 40) - 1)
        ids[p] = made[tree[1] >> 40]
        set_rank(tree, after[p], NO_RANK)   # the right token goes
        after[p] = after[after[p]]
        new_right = NO_RANK
        if after[p] < n:
            before[after[p]] = p
            new_right = rank_of(table, mix, ids[p], ids[after[p]])
        set_rank(tree, p, new_right)
        if p > 0:
            new_left = rank_of(table, mix, ids[before[p]], ids[p])
            set_rank(tree, before[p], new_left)
    p = 0
    write = 0
    while p < n:                            # the tokens that stay move to the front
        ids[write] = ids[p]
        write += 1
        p = after[p]
    return write

PASSES = 16         # over one word: nearly all need fewer, and those that do not are faster so

@jit(**JIT)
def merge_word(ids, table, mix, made):
    """Merges the ids (n,) of a word in place, lowest rank first, then leftmost; returns how many
    stay. A pass merges every pair of the lowest rank, until one of a lower rank comes up: about as
    many passes as different merges, and few for a megabyte of one letter. What is left after PASSES
    goes to a tree, as a pass may also merge a single pair, and n of them take n^2 steps.
    table, mix: pair table     made (M,) int32: the token that the merge of a rank makes"""
    n = len(ids)
    rank = np.full(n, NO_RANK)              # of the pair of a token and the next
    for k in range(n - 1):
        rank[k] = rank_of(table, mix, ids[k], ids[k + 1])
    for _ in range(PASSES):
        lowest = NO_RANK
        first = 0                           # where the lowest rank stands first
        for k in range(n):
            if rank[k] < lowest:
                lowest = rank[k]
                first = k
        if lowest == NO_RANK:
            return n
        read = first
        write = first                       # tokens move from read to write, which falls behind
        merging = True                      # else this pass only moves the rest
        while read < n:
            ids[write] = ids[read]
            rank[write] = rank[read]
            read += 1
            if merging and rank[write] == lowest:
                ids[write] = made[lowest]
                read += 1                   # past the right token of the pair
                new_right = NO_RANK         # ranks of the token made and its neighbours
                new_left = NO_RANK
                if read < n:
                    new_right = rank_of(table, mix, ids[write], ids[read])
                rank[write] = new_right
                if write > 0:
                    new_left = rank_of(table, mix, ids[write - 1], ids[write])
                    rank[write - 1] = new_left
                merging = min(new_left, new_right) >= lowest
            write += 1
        n = write
    return merge_by_tree(ids[:n], rank[:n], table, mix, made)

@jit(**JIT)
def encode_range(out, text, start, end, classes, byte_id, table, mix, made):
    """Ids of text[start:end] into out[start:]; returns where they end. A word seen before is copied
    from where its ids stand in out: `seen` is a word table, VALUE = where << 8 | how many, for
    words of less than 256 bytes.
    out (N,) int32     text (N,) uint8     byte_id (256,) int32, -1 for a byte without an id
    classes: as `word_end` has it     table, mix, made: as `merge_word` has them"""
    bits = int(np.log2(end - start + 1)) - 1        # of rows: one for each two to four bytes,
    rows = 1 << min(17, max(9, bits))               # but 512 to 131,072
    seen = np.zeros((rows, 4), np.int64)
    used = 0
    i = start                               # where the next word begins in text
    m = start                               # where its ids begin in out: no later than i
    while i < end:
        j = word_end(text, i, end, classes)
        row = row_for_word(seen, mix, text, i, j)
        if seen[row, END] != 0:
            where = seen[row, VALUE] >> 8
            n = seen[row, VALUE] & 255
            for k in range(n):
                out[m + k] = out[where + k]
        else:
            n = 0
            for k in range(i, j):
                token = byte_id[text[k]]
                if token >= 0:              # a byte without an id is left out
                    out[m + n] = token
                    n += 1
            n = merge_word(out[m:m + n], table, mix, made)
            if j - i < 256 and 2 * used < rows:
                seen[row, START] = i
                seen[row, END] = j
                seen[row, VALUE] = m << 8 | n
                used += 1
        i = j
        m += n
    return m

# ==== 6 Errors ====
class UserError(ValueError):
    """Something the user can mend. Printed as one line: what is wrong, both values, the remedy."""

def need(ok, message):
    if not ok:
        raise UserError(message)

def printable(text):
    """A text in one line that commands no terminal: what is not printed is shown by its code."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)

@contextlib.contextmanager
def reading(source, remedy):
    """Whatever is wrong with a file that others made becomes one line that names it."""
    try:
        yield
    except (OSError, ArithmeticError, AttributeError, LookupError, NotImplementedError,
            RecursionError, TypeError, ValueError) as error:
        what = getattr(error, "strerror", None) or str(error)
        if isinstance(error, KeyError):
            what = f"{error} is missing"
        what = " ".join(what.split())[:300] or type(error).__name__
        path = getattr(error, "filename", None) or source        # a file of the folder `source`
        raise UserError(f"{path}: {what}; {remedy}") from None

def regular(path, flags):
    """The `opener` of `open` that rejects all but regular files.  A pipe would be waited for, and a
    device read without an end."""
    kind = "no regular file"
    try:
        fd = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)      # Windows has no pipes
        mode = os.fstat(fd).st_mode
        if stat.S_ISREG(mode):
            return fd
        os.close(fd)
        kind = "a directory" if stat.S_ISDIR(mode) else kind
    except OSError as error:
        if error.errno != errno.ENXIO:       # of a pipe that nobody reads
            raise
    raise OSError(errno.EINVAL, f"it is {kind}", str(path))

def read_bytes(path):
    """The content of a regular file"""
    with open(path, "rb", opener=regular) as f:
        return f.read()

# ==== 7 The tokenizer, its files ====
# The two parts of pre_tokenizer in a tokenizer.json that this file knows: GPT-2's pattern, and what
# may stand before it.
GPT2_WORDS = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
EACH_DIGIT = dict(type="Digits", individual_digits=True)

def cuts_digits(cutting):
    """Whether the pre_tokenizer of a tokenizer.json has EACH_DIGIT before GPT-2's pattern. Any but
    these two are refused."""
    steps = [cutting]
    if isinstance(cutting, dict):
        steps = cutting.get("pretokenizers", steps)
    words = steps[-1] if steps else None
    gpt2 = (isinstance(words, dict) and words.get("type") == "ByteLevel"
            and words.get("use_regex", True) and words.get("add_prefix_space") is False)
    need(gpt2 and steps[:-1] in ([], [EACH_DIGIT]),
         f"pre_tokenizer {json.dumps(cutting)} is not GPT-2's, nor that behind Digits")
    return len(steps) == 2

def adds_nothing(processor):
    """Whether a post_processor leaves the ids of a text as they are: ByteLevel moves offsets only,
    and save_pretrained of transformers writes a TemplateProcessing of the text A alone."""
    kind = processor.get("type", "ByteLevel")
    if kind == "Sequence":
        return all(map(adds_nothing, processor["processors"]))
    if kind == "TemplateProcessing":
        parts = processor.get("single", ())
        return [part.get("Sequence", {}).get("id") for part in parts] == ["A"]
    return kind == "ByteLevel"

def check_model(root, model):
    """Refuses a tokenizer.json with a setting that would make other ids than this file does."""
    kind = model.get("type", "BPE")                     # older files leave it out
    need(kind == "BPE", f"model type {kind}, expected BPE")
    settings = ["normalizer", "dropout", "ignore_merges", "continuing_subword_prefix",
                "end_of_word_suffix"]
    if not set(CHAR_OF_ID) <= set(model["vocab"]):
        settings.append("unk_token")                    # of a byte without an id
    both = {**root, **model}
    found = {name: both[name] for name in settings if both.get(name)}
    after = root.get("post_processor")
    if after and not adds_nothing(after):
        found["post_processor"] = after["type"]
    need(not found, f"{found} would make other ids: only files without can be read")

class Tokenizer:
    """vocab: list of bytes by id     merges: list of (left id, right id) by rank     vocab_size: V
    specials: dict name -> id     digits: each number is a word of its own"""

    def __init__(self, ids, merges, specials=(), digits=False):
        """ids: dict name -> id, in GPT-2's characters     merges: "left right" or [left, right]
        A name that is neither a byte nor a merge is special, and `specials` must be such names.
        A byte may lack an id; `encode` leaves it out, as Hugging Face does."""
        names = sorted(ids, key=ids.get)
        pairs = [tuple(m.split(" ") if isinstance(m, str) else m) for m in merges]
        ordinary = set(CHAR_OF_ID).union(left + right for left, right in pairs)
        bad = sorted(ordinary.intersection(specials))[:3]
        need(not bad, f"special tokens {bad} are also made from text: choose some like </s>")
        twice = [name for name, n in collections.Counter([*specials]).items() if n > 1][:3]
        need(not twice, f"special tokens {twice} are named twice: name each once")
        unknown = [name for name in specials if name not in ids][:3]
        need(not unknown, f"special tokens {unknown} have no id: give them one, or leave them out")
        need("" not in ids, "an empty special token: choose some like </s>")
        need([ids[name] for name in names] == list(range(len(names))),
             f"the ids of {len(names)} tokens are not 0 to {len(names) - 1}")
        need(len(names) <= MAX_VOCAB, f"{len(names)} tokens, over {MAX_VOCAB}")
        need(len(set(pairs)) == len(pairs),
             f"{len(pairs)} merges, {len(set(pairs))} of them different")
        need(len(pairs) < MAX_VOCAB, f"{len(pairs)} merges, not below {MAX_VOCAB}")
        id_of = {name: k for k, name in enumerate(names)}       # ints, even if a file says 1.0
        byte = dict(zip(CHAR_OF_ID, BYTE_OF_ID))
        self.vocab = [bytes(byte[c] for c in name) if name in ordinary else name.encode()
                      for name in names]
        self.vocab_size = len(names)
        self.merges = [(id_of[left], id_of[right]) for left, right in pairs]
        self.specials = {name: k for name, k in id_of.items() if name not in ordinary}
        self.digits = digits
        self._ids = id_of
        self._lines = [f"{left} {right}" for left, right in pairs]
        # what `encode_range` takes
        self._classes = DIGITS if digits else CLASSES
        in_gpt2_order = np.array([id_of.get(c, -1) for c in CHAR_OF_ID], np.int32)
        self._byte_id = in_gpt2_order[ID_OF_BYTE]       # (256,) by byte
        self._mix = draw_mix()
        self._table = np.full(4 << len(pairs).bit_length(), -1)         # a quarter full at most
        for rank, (left, right) in enumerate(self.merges):
            row = find_pair(self._table, self._mix, left, right)
            self._table[row] = left << 40 | right << 20 | rank
        self._made = np.array([id_of[left + right] for left, right in pairs], np.int32)

    def encode(self, text):
        """Ids, int32, of str or bytes. Ordinary text only: "</s>" becomes three tokens or so."""
        text = as_array(text)
        ids = np.empty(len(text), np.int32)             # a byte or more for each id

        def encode_part(start, end):
            return start, encode_range(ids, text, start, end, self._classes, self._byte_id,
                                       self._table, self._mix, self._made)

        n = 0
        for start, stop in of_parts(text, encode_part):
            count = stop - start
            ids[n:n + count] = ids[start:stop]          # moves to the left, behind the part before
            n += count
        ids.resize(n, refcheck=False)                   # gives back the memory behind
        return ids

    def decode(self, ids):
        """The bytes of ids; a special token gives its name."""
        ids = np.asarray(ids).ravel().tolist()
        bad = [k for k in ids if not 0 <= k < self.vocab_size]
        need(not bad, f"ids {bad[:3]} are not 0 to {self.vocab_size - 1}: decode with what encoded")
        return b"".join([self.vocab[k] for k in ids])

    def hash(self):
        """SHA-256 in hex of what makes a tokenizer: the same through any file."""
        form = [list(self._ids), self._lines, list(self.specials)]
        if self.digits:
            form.append("digits")
        return hashlib.sha256(json.dumps(form).encode()).hexdigest()

    def to_json(self):
        """Hugging Face's tokenizer.json, compact."""
        cutting = GPT2_WORDS
        if self.digits:
            cutting = dict(type="Sequence", pretokenizers=[EACH_DIGIT, GPT2_WORDS])
        flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
        added = [dict(id=k, content=name, **flags) for name, k in self.specials.items()]
        model = dict(type="BPE", vocab=self._ids, merges=self._lines)
        root = dict(version="1.0", added_tokens=added, pre_tokenizer=cutting, decoder=GPT2_WORDS,
                    model=model)
        return json.dumps(root, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text):
        """Of Hugging Face's tokenizer.json. Errors are of any kind: wrap it in `reading`."""
        root = json.loads(text)
        digits = cuts_digits(root["pre_tokenizer"])
        model = root["model"]
        check_model(root, model)
        added = {}
        for token in root.get("added_tokens") or []:
            name = token["content"]
            need(added.get(name, token["id"]) == token["id"],
                 f"added_tokens gives {name} the ids {added.get(name)} and {token['id']}")
            added[name] = token["id"]
        return cls({**model["vocab"], **added}, model["merges"], added, digits)

    def save(self, path):
        """A tokenizer.json if path ends in .json, else a directory with vocab.json, merges.txt."""
        files = {str(path): self.to_json()}
        if not str(path).endswith(".json"):
            need(not self.digits, f"{path}: each digit is a word, which only a .json file can say")
            os.makedirs(path, exist_ok=True)
            files = {f"{path}/vocab.json": json.dumps(self._ids, ensure_ascii=False),
                     f"{path}/merges.txt": "\n".join(["#version: 0.2", *self._lines, ""])}
        for name, content in files.items():
            part = f"{name}.{os.getpid()}.part"         # of this process alone
            pathlib.Path(part).write_text(content, encoding="utf-8", newline="\n")
            os.replace(part, name)                      # a reader sees the old file or the new one

    @classmethod
    def load(cls, path):
        """Reads what `save` writes, and such files of GPT-2 and of Hugging Face."""
        file = pathlib.Path(path)
        with reading(path, "give a byte-level tokenizer.json, or vocab.json and merges.txt"):
            need(file.stat().st_size < 1 << 28, f"{file.stat().st_size} bytes, over {1 << 28}")
            if not file.is_dir():
                return cls.from_json(read_bytes(file).decode())
            # not splitlines: U+0085 and others that it takes for a line's end may be in a merge
            text = read_bytes(file / "merges.txt").decode()
            lines = text.replace("\r\n", "\n").split("\n")
            merges = [line for line in lines if line and not line.startswith("#version")]
            ids = json.loads(read_bytes(file / "vocab.json").decode())
            return cls(ids, merges)

# ==== 8 Command line ====
def need_no_tokenizer(path, text, force):
    """Texts are encoded with the one that is there: it is not replaced unasked.  The text that is
    learned is never replaced."""
    names = [path] if path.endswith(".json") else [f"{path}/vocab.json", f"{path}/merges.txt"]
    need(os.path.realpath(text) not in map(os.path.realpath, names),
         f"{path} would replace {text}, from which it is learned; choose another --tokenizer")
    if force:
        return
    there = [name for name in names if os.path.exists(name)]
    need(not there, f"{', '.join(there)} exists; --tokenizer NAME keeps it, --force replaces it")

def parser():
    parser = argparse.ArgumentParser(description="Byte-level BPE tokenizer.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("verb", choices=["train", "encode", "decode"],
                        help="learn from text, turn text into decimal ids, or ids into text")
    parser.add_argument("file", nargs="?", default="-", help="input, - for standard input")
    parser.add_argument("--vocab-size", type=int, default=4096, help="bytes, merges, specials")
    parser.add_argument("--tokenizer", default="tokenizer.json", help="written by train, read by "
                        "the others: a .json file, or a directory for vocab.json, merges.txt")
    parser.add_argument("--force", action="store_true", help="train replaces a tokenizer")
    return parser

def main():
    args = parser().parse_intermixed_args()  # the file may stand behind the flags
    if args.verb == "train":
        need_no_tokenizer(args.tokenizer, args.file, args.force)
    if args.file == "-" and sys.stdin and sys.stdin.isatty():
        print("note: reading standard input; Ctrl-D ends it", file=sys.stderr)
    if args.file == "-":
        with open(0, "rb") as f:             # the number of standard input
            data = f.read()
    else:
        with reading(args.file, "name a file, or - for standard input"):
            data = read_bytes(args.file)
    if args.verb == "train":
        tokenizer = train(data, args.vocab_size, SPECIALS)
        tokenizer.save(args.tokenizer)
        fewer = tokenizer.vocab_size < args.vocab_size
        why = f" of {args.vocab_size}: the text has no more pairs to merge" if fewer else ""
        print(f"{args.tokenizer}: {tokenizer.vocab_size} tokens{why}")
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
    except BrokenPipeError:                  # the reader of our output is gone: discard the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except (OSError, UserError) as error:
        print(f"bpe.py: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)
