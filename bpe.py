r"""Byte-level BPE: text to token ids and back, learned from text, in Python, NumPy and Numba.
nanoeuler.py imports this tokenizer. It is also a program:

    python bpe.py train data/shakespeare.txt --vocab-size 4096 --tokenizer tokenizer.json
    echo "To be, or not to be" | python bpe.py encode | python bpe.py decode

GPT-2's pattern splits the text into words (section 3). A word starts as single bytes. Encoding
repeatedly merges the pair of neighbours that was learned first into one token (section 5). Training
learns the pairs: it repeatedly merges the most frequent pair of all words (section 4, after
Sennrich et al. 2016).

    1 bytes and classes    3 words       5 encoding    7 the tokenizer, its files
    2 compilation          4 training    6 errors      8 command line

Training learns the same merges as Hugging Face `tokenizers`. Encoding gives the same ids as
`tokenizers` and tiktoken:
  - Byte ids are in GPT-2's order.
  - Training puts special tokens last. Encoding never makes them from text. It makes other added
    tokens, such as <think>, wherever their names occur.
  - Among equally frequent pairs, training merges the smaller pair of ids.
  - A string has one id, even if several merges make it.
An invalid UTF-8 byte is a word by itself, so any bytes survive encoding and decoding.
Other patterns and SentencePiece are in nanoeuler_parts/tokenizers. `from_root` uses them.
N bytes, V tokens, M merges.
"""
import argparse
import bisect
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

# A process has one LLVM code generator. Numba creates it at the first decorator, with the
# optimization level in NUMBA_OPT. Our functions run as fast at level 1 as at level 3, and compile
# sooner (see `Compiling`). A program that imported Numba earlier keeps its level. All other
# settings of Numba stay unchanged.
if "numba" not in sys.modules and "NUMBA_OPT" not in os.environ:
    os.environ["NUMBA_OPT"] = "1"
    import numba
    numba.njit(lambda: None)
    del os.environ["NUMBA_OPT"]
    numba.config.reload_config()

import numpy as np
from llvmlite.binding import Linkage
from numba import config, get_num_threads, njit
from numba.core import caching
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

# ==== 1 Bytes and classes ====
# GPT-2 writes a byte as a printable character, so that vocabularies are text: 188 bytes stand for
# themselves. The other 68 (blanks, controls) become U+0100 and up. Byte ids follow the same order.
VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]     # ! to ~, ¡ to ¬, ® to ÿ
HIDDEN = sorted(set(range(256)) - set(VISIBLE))
BYTE_OF_ID = VISIBLE + HIDDEN
CHAR_OF_ID = [chr(b) for b in VISIBLE] + [chr(256 + k) for k in range(len(HIDDEN))]
ID_OF_BYTE = np.argsort(BYTE_OF_ID)     # argsort inverts a permutation
MAX_VOCAB = 1 << 20                 # ids and ranks of merges have 20 bits (section 5)

# The pattern in section 3 distinguishes these classes of characters. Their order matters there: a
# word of the first three may begin with a blank, and a character of the last two is always a word.
OTHER = 0           # punctuation, marks, symbols, controls, unassigned code points
LETTER = 1          # \p{L}
NUMBER = 2          # \p{N}
SPACE = 3           # \s
INVALID = 4         # not a character: a surrogate, above U+10FFFF, or an invalid UTF-8 byte
DIGIT = 5           # a number, if the tokenizer makes each number a word

# LETTER, NUMBER and SPACE of Unicode 16.0, as in tokenizers 0.23 and tiktoken 0.14: 141,028
# letters, 1,911 numbers, 25 spaces. The classes are fixed here, because str.isalpha and str.isspace
# differ from them and change with Python (3.11 lacks 9,272 letters).
# Each string lists run lengths from U+0000 on, alternately outside and inside the class. The spaces
# begin with j f s b 1W b: 9 outside, 5 inside (U+0009 to U+000D), 18 outside, 1 inside (U+0020),
# 100 outside, 1 inside (U+0085). A run length ends with a letter, a to z for 0 to 25, A to Z for 26
# to 51. A number before the letter counts multiples of 52: 1W = 1 * 52 + 48 = 100.
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
    """(0x140000,) uint8: the class of each code point that 4 bytes of UTF-8 can spell. These are
    more than Unicode has. A text usually reads only a few KB of the table."""
    table = np.full(0x140000, OTHER, np.uint8)
    table[0xD800:0xE000] = INVALID                              # surrogates
    table[0x110000:] = INVALID
    set_classes(table, RUNS)
    return table

def set_classes(table, runs):
    """Writes the classes whose run lengths are given: {class: string as in RUNS}."""
    for kind, text in runs.items():
        point = 0
        inside = False
        for digits, letter in re.findall("([0-9]*)([A-Za-z])", text):
            count = 52 * int(digits or 0) + string.ascii_letters.index(letter)
            if inside:
                table[point:point + count] = kind
            point += count
            inside = not inside

CLASSES = class_table()
# The classes if each number is a word, as in Hugging Face's pre-tokenizer Digits. Digits uses
# Unicode 17, in which these 13 code points became numbers.
DIGITS = np.where(CLASSES == NUMBER, np.uint8(DIGIT), CLASSES)
DIGITS[0x11DE0:0x11DEA] = DIGIT
DIGITS[0x16FF4:0x16FF7] = DIGIT

# ==== 2 Compilation ====
def numba_finds_a_folder():
    """Whether Numba can write compiled kernels to NUMBA_CACHE_DIR, to __pycache__ beside this file
    or to the user's cache folder. If it cannot, a decorator with cache=True raises an error."""
    try:
        njit(cache=True)(lambda: None)
    except RuntimeError:
        return False
    return True

def keep_kernels_in(folder):
    """Sets NUMBA_CACHE_DIR, here and in the processes that this one starts."""
    os.environ["NUMBA_CACHE_DIR"] = folder
    config.CACHE_DIR = folder
    # otherwise Numba would reload all settings, and lose any that a program has set in config
    config._env_reloader.old_environ["NUMBA_CACHE_DIR"] = folder

def private_folder():
    """A folder for temporary files that only this user can write, or None. Kernels are programs:
    anyone who can change them can run any code as this user."""
    if not hasattr(os, "geteuid"):
        return None                             # Windows: the user's cache folder is enough
    try:
        folder = os.path.join(tempfile.gettempdir(), f"nanoeuler-cache-{os.geteuid()}")
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        found = os.lstat(folder)                # does not follow a link: rejected below
    except OSError:
        return None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return None
    if found.st_mode & 0o022:                   # others can write it
        return None
    return folder

def settle_cache():
    """Makes sure that Numba has a folder for compiled kernels; False if it can write to none. Call
    it before the first @njit(cache=True), which would otherwise end the program."""
    if config.CACHE_DIR:                        # absolute: a child may start in another folder
        keep_kernels_in(os.path.abspath(config.CACHE_DIR))
    if numba_finds_a_folder():
        return True
    here = os.path.dirname(os.path.abspath(__file__))
    trouble = (f"note: compiled kernels cannot be written to NUMBA_CACHE_DIR "
               f"({config.CACHE_DIR or 'not set'}), {here}/__pycache__ or your cache folder")
    remedy = "set NUMBA_CACHE_DIR to a writable folder"
    folder = private_folder()
    if folder:
        keep_kernels_in(folder)
        if numba_finds_a_folder():
            print(f"{trouble}, so they are kept in the temporary folder {folder}; to keep them for "
                  f"longer, {remedy}", file=sys.stderr)
            return True
    print(f"{trouble}, so every start compiles them again, which takes seconds to minutes; to "
          f"avoid that, {remedy}", file=sys.stderr)
    return False

# Numba's cache files are pickles: one index per function, and one file per kernel. A damaged file
# would end every start of the program until somebody deletes it. The following functions replace
# private methods of Numba 0.68, only in classes of our own. Other libraries keep Numba's methods.
def save_data(self, name, data):
    """Numba's `_save_data`, plus a checksum after the pickle. Readers of a pickle ignore it."""
    pickled = self._dump(data)
    with self._open_for_write(self._data_path(name)) as f:
        f.write(pickled + zlib.crc32(pickled).to_bytes(4, "little"))

def pickle_in(path):
    """The pickle that `save_data` wrote to a file; None if the file is missing or damaged."""
    try:
        data = pathlib.Path(path).read_bytes()
    except FileNotFoundError:
        return None
    pickled, checksum = data[:-4], data[-4:]
    return pickled if zlib.crc32(pickled).to_bytes(4, "little") == checksum else None

def load_data(self, name):
    """Numba's `_load_data`; a damaged file counts as missing, so Numba compiles and rewrites it."""
    pickled = pickle_in(self._data_path(name))
    if pickled is None:
        raise FileNotFoundError(name)
    return pickle.loads(pickled)

def survive_damage(cache_file):
    """Makes a class of cache files, Numba's or numba-cuda's, ignore damaged files."""
    numbas_load_index = cache_file._load_index

    def load_index(self):
        """Numba's, but a damaged index counts as empty. The next kernel rewrites it."""
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
    calls, but Numba notices only edits of the kernel's own file. This cache also recompiles a
    kernel after an edit of one of `files`."""
    def __init__(self, function, files=()):
        super().__init__(function)
        file = self._cache_file
        file.__class__ = CacheFile
        file._source_stamp = file._source_stamp, digest(tuple(files))
        self.files = {function.__code__.co_filename, *files}

class Library(JITCodeLibrary):
    """The machine code of a kernel, which runs its own copies of the functions that it calls.
    Numba lets kernels share the copies: if two loaded kernels contain cross_entropy, both run the
    copy of the first. Each copy was optimized within its kernel and has its own order of sums. The
    last bits of a result would then depend on what the process ran before, and on whether it has
    compiled the kernels or loaded them from the cache. Here the copies are private to their kernel,
    and only `_shared_module`, from which other kernels copy, exports its functions. Functions of
    other libraries are linked as usual."""
    def _finalize_final_module(self):
        if self._shared_module is None:         # else the kernel comes from the cache
            self._shared_module = self._final_module.clone()
            for f in self._shared_module.functions:
                if f.linkage == Linkage.external and not f.is_declaration:
                    f.linkage = "linkonce_odr"  # as Numba's own _get_module_for_linking
            for f in self._final_module.functions:
                if f.linkage == Linkage.linkonce_odr and not f.is_declaration:
                    f.linkage = "internal"
        super()._finalize_final_module()

class Compiling:
    """A block in which Numba compiles functions of this project, each as a Library, at our level of
    optimization: 1, unless NUMBA_OPT is set. Here level 1 gives code as fast as level 3, and
    compiles sooner."""
    level = config.OPT if "NUMBA_OPT" in os.environ else type(config.OPT)(1)
    depth = 0                                   # blocks nest: a kernel compiles those it calls

    def __enter__(self):
        global_compiler_lock.__enter__()        # Numba's lock: all threads share the level
        config.reload_config()                  # else Numba may reload within the block
        self.before, config.OPT = config.OPT, self.level
        self.codegen = cpu_target.target_context.codegen()
        self.library, self.codegen._library_class = self.codegen._library_class, Library
        Compiling.depth += 1

    def __exit__(self, *error):
        Compiling.depth -= 1
        config.OPT = self.before
        self.codegen._library_class = self.library
        global_compiler_lock.__exit__(*error)

def jit(files=(), **options):
    """numba.njit for a function of this project: compiled in Compiling, kept in a Cache.
    files: the paths of other files whose functions it may call"""
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
# For small functions. Their code is inlined into their callers. They allocate nothing, so _nrt (an
# option that Numba 0.68 does not document) switches off reference counting for their arrays.
# Counting is an atomic addition at each call, which took a third of the time of encoding.
INLINE = dict(JIT, forceinline=True, _nrt=False)

# ==== 3 Words ====
APOSTROPHE = ord("'")
BLANK = ord(" ")
AFTER_APOSTROPHE = tuple(b"stmd")                               # 's 't 'm 'd
# 're 've 'll: the two letters as one number
TWO_AFTER = tuple(int.from_bytes(two, "big") for two in (b"re", b"ve", b"ll"))

@jit(**INLINE)
def char_at(text, i, end, classes):
    """(class, length in bytes) of the UTF-8 character at i, or (INVALID, 1).     RFC 3629
    0xxxxxxx | 110xxxxx 10xxxxxx | 1110xxxx 10xxxxxx 10xxxxxx | 11110xxx and three of 10xxxxxx"""
    first = np.int64(text[i])
    if first < 0x80:
        return np.int64(classes[first]), 1
    if first < 0xC2 or first > 0xF4:                # 10xxxxxx, or it begins no valid character
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
    if point < smallest:                            # overlong: fewer bytes are enough
        return INVALID, 1
    kind = np.int64(classes[point])
    if kind == INVALID:
        return INVALID, 1
    return kind, n

@jit(**INLINE)
def word_end(text, i, end, classes):
    r"""End of the word at i: one invalid byte, or the first of GPT-2's alternatives that matches,
    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
    With the classes DIGITS, the text is first split around each number.
    text (N,) uint8, read up to `end`     classes (0x140000,) uint8"""
    if text[i] == APOSTROPHE and i + 1 < end:
        if text[i + 1] in AFTER_APOSTROPHE:
            return i + 2
        if i + 2 < end and (text[i + 1] << 8 | text[i + 2]) in TWO_AFTER:
            return i + 3
    # The other alternatives are an optional blank, then a run of characters of one class.
    last = i                                # where the last character of the run begins
    if text[i] == BLANK and i + 1 < end:
        last = i + 1
    kind, n = char_at(text, last, end, classes)
    # A blank does not join a SPACE, INVALID or DIGIT after it. It begins a run of spaces.
    if last > i and kind >= SPACE:
        last = i
        kind = SPACE
        n = 1
    stop = last + n                         # where the run ends
    next_kind = kind                        # class of the character at stop
    while stop < end and kind < INVALID:    # an INVALID or a DIGIT is a run by itself
        next_kind, n = char_at(text, stop, end, classes)
        if next_kind != kind:
            break
        last = stop
        stop += n
    # \s+(?!\S): before a word, a run of two or more spaces ends one space early. Before a DIGIT it
    # does not: there the text was split first, so (?!\S) sees the end of a text.
    if kind == SPACE and stop < end and next_kind != DIGIT and last > i:
        return last
    return stop

# A word table counts or remembers words: (R, 4) int64, R a power of two, one word per row. The
# bytes of a word stay in the text. Columns:
KEY = 0             # the first 8 bytes
START = 1           # text[START:END] is the word
END = 2             # 0: the row is free
VALUE = 3           # the caller's value
# A word is in the row that its hash names, or in the next free row (linear probing). The hash is
# the upper 20 bits of a 64-bit product with `mix`. A word table has at most 2^20 rows.

def draw_mix():
    """A factor for hashes. It is odd, so that no bit gets lost. It is secret: with a known factor,
    untrusted input could contain many words that all collide, and each lookup would walk past all
    of them. (Only very long words can collide under most factors.) No result depends on it.
    Multiply-shift hashing, Dietzfelbinger et al. 1997"""
    return secrets.randbits(63) | 1

@jit(**INLINE)
def same_bytes(text, i, j, other):
    """Whether text[i:j] equals the bytes that begin at `other`."""
    k = i
    while k < j and text[k] == text[other + k - i]:
        k += 1
    return k >= j

@jit(**INLINE)
def row_for_word(table, mix, text, i, j):
    """The row of text[i:j] in a word table. For a new word it is a free row, in which this function
    writes KEY. The caller writes the other columns."""
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

PARALLEL = 8 << 20          # bytes; a shorter text takes one thread at most 0.1 s: two do not pay

# U+3000, the ideographic space, is excluded
CUT = re.compile(rb"(?:[!-~]|(?!\xe3\x80\x80)[\xe3-\xec][\x80-\xbf]{2})(?=[ \n])")

def next_cut(text, i, cut=CUT):
    """The first position after i where text may be split into parts that are encoded separately. It
    is between a visible character and a blank or newline, because a word always ends there. Only
    ASCII and U+3001 to U+CFFF count as visible here. Without such a position it is the end of the
    text."""
    found = cut.search(text, i)
    return found.end() if found else len(text)

def of_parts(text, work, cut=CUT):
    """[work(start, end)] for the parts of a text (N,) uint8, each part in its own thread. A text
    below PARALLEL bytes is one part.     cut: as in `next_cut`"""
    if len(text) < PARALLEL:
        return [work(0, len(text))]
    n = get_num_threads()
    cuts = [next_cut(text, len(text) * k // n, cut) for k in range(1, n)]
    starts = [0, *cuts]
    ends = [*cuts, len(text)]
    with ThreadPoolExecutor() as pool:
        return list(pool.map(work, starts, ends))

def as_array(text):
    """(N,) uint8 of str or bytes. A lone surrogate in a str becomes three invalid bytes."""
    if isinstance(text, str):
        text = text.encode("utf-8", "surrogatepass")
    return np.frombuffer(text, np.uint8)

# ==== 4 Training ====
@jit(**JIT)
def count_words(table, mix, text, i, end, classes):
    """Counts the words of text[i:end] in a word table until the table is half full; returns the
    position where it stopped.     VALUE: number of occurrences
    START, END: the latest occurrence, because its bytes are probably in the processor's cache"""
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
    """Counter of the words of text, bytes -> number of occurrences; one thread per part."""
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

MERGED = -2         # in place of an id: this token was merged into the token to its left
BORDER = -1         # between two words

def push_pairs(heap, ids, weight, after, p):
    """Pushes (-count, pair, positions) for each pair that begins at one of the ascending positions
    p (K,). A pair is the number left << 32 | right, so pairs sort by left, then by right."""
    p = p[(ids[p] >= 0) & (ids[after[p]] >= 0)]                 # both are tokens of one word
    pairs = ids[p] << 32 | ids[after[p]]
    order = np.argsort(pairs, kind="stable")                    # equal pairs come together
    pairs = pairs[order]
    p = p[order]
    first = np.flatnonzero(np.diff(pairs, prepend=-1))          # of each group of equal pairs
    counts = np.add.reduceat(weight[p], first).tolist()
    groups = np.split(p, first[1:])
    for count, pair, positions in zip(counts, pairs[first].tolist(), groups):
        # A pair is in the heap only once, so comparing two entries never compares their positions.
        heapq.heappush(heap, (-count, pair, positions))

def pop_pair(heap, ids, weight, after):
    """(left, right, positions) of the most frequent pair, or None. The count of an entry was right
    when it was pushed. If later merges took some of its positions, the entry is pushed again with
    its present count."""
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
    """Selects the positions p (K,) of a pair (a, a) that merge: in each run of neighbours the
    first, the third and so on. The pair begins four times in aaaaa, but aaaaa becomes [aa][aa]a."""
    first = np.flatnonzero(np.append(True, after[p[:-1]] != p[1:]))     # where in p a run begins
    length = np.diff(first, append=len(p))
    place = np.arange(len(p)) - np.repeat(first, length)                # in its run, from 0
    return p[place % 2 == 0]

def learn_merges(ids, weight, M):
    """The first M merges [(left, right)], fewer if no pairs are left. Merge m makes token 256 + m.
    ids (P,) int64: the unique words one after another, BORDER between words and at both ends
    weight (P,) int64: how often the word of a position occurs
    All occurrences of a pair appear in the step that makes the newer of its two tokens. Later
    merges can only destroy some, so a count in the heap is never too low. The next merge is the
    first entry of the heap whose count is still right. An entry is (-count, pair, positions)."""
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
        q = after[p]                                # the right tokens, which disappear
        ids[p] = 256 + len(merges)
        ids[q] = MERGED
        after[p] = after[q]
        before[after[p]] = p
        push_pairs(heap, ids, weight, after, np.unique(np.concatenate([before[p], p])))
        merges.append((left, right))
    return merges

def lay_out(words):
    """ids and weight for `learn_merges`, from a Counter of words. For example, with "to" 7 times,
    "be" twice and | for BORDER:    ids    | t o | b e |
                                    weight 0 7 7 7 2 2 2"""
    ids = ID_OF_BYTE[as_array(b" ".join([b"", *words, b""]))]
    sizes = np.array([1] + [len(word) + 1 for word in words])   # first border, then word and border
    ids[np.cumsum(sizes) - 1] = BORDER
    weight = np.repeat([0, *words.values()], sizes)
    return ids, weight

# The end of a text; in ChatML, the beginning and the end of a message
SPECIALS = "</s>", "<|im_start|>", "<|im_end|>"

def train(text, vocab_size, specials=SPECIALS[:1]):
    """Tokenizer of vocab_size tokens: bytes, merges, specials. Fewer if text has too few pairs."""
    fixed = 256 + len(specials)
    need(fixed <= vocab_size <= MAX_VOCAB, f"vocab_size is {vocab_size}, expected {fixed} (256 "
         f"bytes, {len(specials)} special tokens) to {MAX_VOCAB}")
    ids, weight = lay_out(unique_words(text))
    names = CHAR_OF_ID.copy()
    merges = []
    for left, right in learn_merges(ids, weight, vocab_size - fixed):
        # A merge never makes a string that already is a token. Equal bytes between two token
        # boundaries are always merged alike. So the first merge that made the string made it
        # everywhere, and no pair that spells it is left.
        merges.append(f"{names[left]} {names[right]}")
        names.append(names[left] + names[right])
    names.extend(specials)
    return Tokenizer({name: k for k, name in enumerate(names)}, merges, specials)

# ==== 5 Encoding ====
# A pair table contains the merges: (R,) int64, R a power of two. A row is
# left << 40 | right << 20 | rank, or -1 if it is free. A pair is in the row that its hash names, or
# in the next free row. The hash is the upper 24 bits of a 64-bit product with `mix`.
NO_RANK = 0xFFFFF           # higher than any rank; equals the lower 20 bits of -1, a free row

@jit(**INLINE)
def find_pair(table, mix, left, right):
    """The row of a pair of ids in a pair table, or the free row for it."""
    pair = (np.int64(left) << 20) | right
    row = (pair * mix >> 40) & (len(table) - 1)
    while table[row] >= 0 and table[row] >> 20 != pair:
        row = (row + 1) & (len(table) - 1)
    return row

def pair_table(merges, mix):
    """The pair table of merges [(left, right)], at most a quarter full"""
    table = np.full(4 << len(merges).bit_length(), -1)
    for rank, (left, right) in enumerate(merges):
        table[find_pair(table, mix, left, right)] = left << 40 | right << 20 | rank
    return table

@jit(**INLINE)
def rank_of(table, mix, left, right):
    """Rank of the merge of a pair of ids, or NO_RANK: the lower 20 bits of its row, free or not."""
    return table[find_pair(table, mix, left, right)] & NO_RANK

# A tournament tree over n positions finds the next pair to merge: (2n,) int64. The leaf tree[n + p]
# is rank << 40 | p. A node tree[k] is the smaller of tree[2k] and tree[2k + 1]. So tree[1] is the
# pair of the lowest rank, and the leftmost of equal ranks.

@jit(**INLINE)
def set_rank(tree, p, rank):
    """Sets the rank at a position, then updates the nodes above it until one does not change."""
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
    """Gives the same result as `merge_word`, in n log n steps for any merges. A new token keeps the
    position of its left token, as in training.
    rank (n,) int64: of the pair of a token and the next     others: as in `merge_word`"""
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
        set_rank(tree, after[p], NO_RANK)   # the right token disappears
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
    while p < n:                            # the remaining tokens move to the front
        ids[write] = ids[p]
        write += 1
        p = after[p]
    return write

PASSES = 16         # limit per word: nearly all words need fewer, and a tree is faster for the rest

@jit(**JIT)
def merge_word(ids, table, mix, made):
    """Merges the ids (n,) of a word in place, lowest rank first, then leftmost; returns how many
    remain. A pass merges every pair of the lowest rank, until a merge creates a pair of lower rank.
    So there are about as many passes as different merges, and few for a megabyte of one letter. But
    a pass may merge only one pair, and n such passes take n^2 steps. So `merge_by_tree` finishes
    the word after PASSES passes.
    table, mix: pair table     made (M,) int32: the token that the merge of a rank makes"""
    n = len(ids)
    rank = np.full(n, NO_RANK)              # of the pair of a token and the next
    for k in range(n - 1):
        rank[k] = rank_of(table, mix, ids[k], ids[k + 1])
    for _ in range(PASSES):
        lowest = NO_RANK
        first = 0                           # the leftmost position of the lowest rank
        for k in range(n):
            if rank[k] < lowest:
                lowest = rank[k]
                first = k
        if lowest == NO_RANK:
            return n
        read = first
        write = first                       # tokens move from read to write, which lags
        merging = True                      # if not, the pass only moves the other tokens
        while read < n:
            ids[write] = ids[read]
            rank[write] = rank[read]
            read += 1
            if merging and rank[write] == lowest:
                ids[write] = made[lowest]
                read += 1                   # past the right token of the pair
                new_right = NO_RANK         # ranks of the new token and its neighbours
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
    """Writes the ids of text[start:end] to out[start:]; returns where they end. The ids of a word
    seen before are copied from their earlier position in out. `seen` is a word table for words of
    less than 256 bytes, with VALUE = position << 8 | number of ids.
    out (N,) int32     text (N,) uint8     byte_id (256,) int32, -1 for a byte without an id
    classes: as in `word_end`     table, mix, made: as in `merge_word`"""
    bits = int(np.log2(end - start + 1)) - 1        # log2 of rows: one row per two to four bytes,
    rows = 1 << min(17, max(9, bits))               # but 512 to 131,072 rows
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

def joined(ids, parts):
    """ids (N,) without the gaps between the parts [(start, stop)], in place"""
    n = 0
    for start, stop in parts:
        count = stop - start
        ids[n:n + count] = ids[start:stop]          # moves left, to where the part before ends
        n += count
    ids.resize(n, refcheck=False)                   # frees the unused end
    return ids

# ==== 6 Errors ====
class UserError(ValueError):
    """An error that the user can fix. It is printed as one line: expected, found, remedy."""

def need(ok, message):
    if not ok:
        raise UserError(message)

def printable(text):
    """The text as one line that cannot control a terminal: unprintable characters are escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)

def note(text):
    """Prints a note on standard error, as one line that cannot control a terminal."""
    print(f"note: {printable(text)}", file=sys.stderr, flush=True)

def cause_of(error):
    """The text of an error. Python converts integers up to a limit, and advises to change it."""
    most = sys.get_int_max_str_digits()
    if "sys.set_int_max_str_digits()" in str(error):
        return f"expected integers of at most {most:,} digits, found a longer one"
    return str(error)

@contextlib.contextmanager
def reading(source, remedy):
    """Turns an error from reading untrusted input into a UserError with source and remedy."""
    try:
        yield
    except (OSError, ArithmeticError, AttributeError, LookupError, NotImplementedError,
            RecursionError, TypeError, ValueError) as error:
        what = getattr(error, "strerror", None) or cause_of(error)
        if isinstance(error, KeyError):
            what = f"{error} is missing"
        elif isinstance(error, (ArithmeticError, AttributeError, LookupError, TypeError)):
            what = f"an entry has another type or size than expected ({what})"
        what = " ".join(what.split())[:300] or type(error).__name__
        path = getattr(error, "filename", None) or source        # a file of the folder `source`
        raise UserError(f"{path}: {what}; {remedy}") from None

def regular(path, flags, mode=0o666):
    """An `opener` for `open` that rejects all but regular files. `open` would wait for the other
    end of a pipe, and reading a device may never end.     mode: of a new file, without the umask"""
    kind = "a pipe, socket or device"
    try:
        fd = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), mode)       # Windows lacks it
        mode = os.fstat(fd).st_mode
        if stat.S_ISREG(mode):
            return fd
        os.close(fd)
        kind = "a directory" if stat.S_ISDIR(mode) else kind
    except OSError as error:
        if error.errno != errno.ENXIO:       # a pipe that nobody reads
            raise
    raise OSError(errno.EINVAL, f"expected a regular file, found {kind}", str(path))

def private_as(path):
    """An `opener` for `open` of a file that will replace the file `path`: as `regular`, and never
    more open than that file, if it exists. Its owner may write it; `adopt_mode` ends that."""
    def opener(name, flags):
        if not os.path.exists(path):
            return regular(name, flags)
        fd = regular(name, flags, 0o600)
        try:
            adopt_mode(fd, path, 0o600)
        except BaseException:
            os.close(fd)
            raise
        return fd
    return opener

def adopt_mode(file, path, more=0):
    """Gives a file, a name or descriptor, the mode, owner and group of the file `path`, if that
    exists. Where the owner or the group cannot be set, the file is more private than `path`.
    more: bits of the mode that are added"""
    if not hasattr(os, "chown") or not os.path.exists(path):     # Windows: folders decide there
        return
    old = os.stat(path)
    new = os.stat(file)
    mode = stat.S_IMODE(old.st_mode) & 0o777 | more
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        for owner in old.st_uid, -1:            # -1: unchanged
            with contextlib.suppress(OSError):
                os.chown(file, owner, old.st_gid)
                break
        else:
            mode &= ~0o070                      # another group
    has = stat.S_IMODE(new.st_mode)
    if has & ~mode:
        os.chmod(file, mode)
    elif has != mode:
        with contextlib.suppress(OSError):      # some file systems have no modes
            os.chmod(file, mode)

def read_bytes(path):
    """The content of a regular file"""
    with open(path, "rb", opener=regular) as f:
        return f.read()

# ==== 7 The tokenizer, its files ====
# The two steps of pre_tokenizer in a tokenizer.json that this file supports: GPT-2's pattern, and
# an optional step before it.
GPT2_WORDS = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
EACH_DIGIT = dict(type="Digits", individual_digits=True)

def cuts_digits(cutting):
    """Whether the pre_tokenizer of a tokenizer.json has EACH_DIGIT before GPT-2's pattern. Rejects
    all other steps."""
    steps = [cutting]
    if isinstance(cutting, dict):
        steps = cutting.get("pretokenizers", steps)
    words = steps[-1] if steps else None
    gpt2 = (isinstance(words, dict) and words.get("type") == "ByteLevel"
            and words.get("use_regex", True) and words.get("add_prefix_space") is False)
    need(gpt2 and steps[:-1] in ([], [EACH_DIGIT]),
         f"expected GPT-2's pre_tokenizer (ByteLevel without a prefix space), alone or after "
         f"Digits, found {json.dumps(cutting)}")
    return len(steps) == 2

def begins_of(processor):
    """The ids that a post_processor adds before each text, a tuple. ByteLevel moves only offsets.
    TemplateProcessing lists special tokens and the text A. Rejects other changes of the ids."""
    kind = processor.get("type", "ByteLevel") if processor else "ByteLevel"
    if kind == "Sequence":
        return sum(map(begins_of, reversed(processor["processors"])), ())
    *before, text = processor.get("single", [{}]) if kind == "TemplateProcessing" else [{}]
    ends_in_text = text.get("Sequence", {}).get("id") == "A"
    need(ends_in_text if kind == "TemplateProcessing" else kind == "ByteLevel",
         f"the post_processor {kind} would change the token ids; expected special tokens before "
         f"a text at most")
    names = [part["SpecialToken"]["id"] for part in before]
    return tuple(k for name in names for k in processor["special_tokens"][name]["ids"])

def check_model(root, model):
    """Rejects a tokenizer.json with a setting that gives other ids than this file gives."""
    kind = model.get("type", "BPE")                     # older files omit it
    need(kind == "BPE", f"the model type is {kind}, expected BPE")
    settings = ["normalizer", "dropout", "ignore_merges", "continuing_subword_prefix",
                "end_of_word_suffix"]
    if not set(CHAR_OF_ID) <= set(model["vocab"]):
        settings.append("unk_token")                    # for a byte without an id
    both = {**root, **model}
    found = {name: both[name] for name in settings if both.get(name)}
    need(not found, f"{found} would change the token ids; expected none of these settings")

def ids_of_added(root):
    """{name: id} of the added_tokens of a tokenizer.json. `tokenizers` ignores their ids: it takes
    the id in the vocabulary, or else the next free one. An entry with another id is rejected."""
    vocab = root["model"]["vocab"]
    added = {}
    free = len(vocab)
    for token in root.get("added_tokens") or []:
        name = token["content"]
        k = token["id"]
        expected = added.get(name, vocab.get(name, free))
        need(k == expected, f"added_tokens gives {name} the id {k}, but `tokenizers` gives it "
             f"{expected}: its id in the vocabulary, or else the next free one; correct the id")
        added[name] = k
        free = max(free, k + 1)
    return added

def added_tokens(ids, special=True):
    """The added_tokens of a tokenizer.json for {name: id}"""
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=special)
    return [dict(id=k, content=name, **flags) for name, k in ids.items()]

def specials_and_symbols(root):
    """({name: id}, {name: id}) of the added tokens of a tokenizer.json. Special tokens are never
    made from text. Symbols, such as <think> of Qwen3, are: `encode` makes one token of each of
    their names, before it splits the text into words."""
    ids = ids_of_added(root)
    special = set()
    normalized = set()
    for token in root.get("added_tokens") or []:
        name = token["content"]
        if token.get("special"):
            special.add(name)
        if token.get("normalized"):
            normalized.add(name)
        odd = [flag for flag in ("single_word", "lstrip", "rstrip") if token.get(flag)]
        if root.get("normalizer") and name in normalized - special:
            odd.append("normalized")
        need(not odd, f"the added token {name} has the flag {', '.join(odd)}, expected none")
    symbols = {name: k for name, k in ids.items() if name not in special}
    need("" not in symbols, "an added token has an empty name; expected at least one character")
    # `tokenizers` finds the names of special tokens first, even where it leaves them in the text,
    # and normalized names last. This is only the same if these names do not overlap.
    need_apart(special, symbols)
    need_apart(normalized & symbols.keys(), symbols.keys() - normalized)
    return {name: k for name, k in ids.items() if name in special}, symbols

def need_apart(names, others):
    """Rejects names that may overlap one of `others` in a text and begin no later: a name that
    contains the other, or whose end is the beginning of the other."""
    within = splitter(others)
    ordered = sorted(others)

    def begins_one(end):
        k = bisect.bisect(ordered, end)
        return any(other.startswith(end) for other in ordered[k:k + 1])

    for name in names if within else ():
        overlaps = (within.search(name.encode())
                    or any(begins_one(name[k:]) for k in range(1, len(name))))
        need(not overlaps, f"the added token {name} may overlap another one in a text, and only "
             f"one of them is special or normalized; expected names that cannot overlap")

def splitter(names):
    """Compiled expression that splits bytes at names: the longest one at each place; None without
    names"""
    longest_first = sorted((name.encode() for name in names), key=len, reverse=True)
    if not longest_first:
        return None
    return re.compile(b"(" + b"|".join(map(re.escape, longest_first)) + b")")

def sha256_of(form):
    """SHA-256 in hex of a value that JSON can write"""
    return hashlib.sha256(json.dumps(form).encode()).hexdigest()

def is_of_parts(root):
    """Whether a tokenizer.json belongs to a family in nanoeuler_parts/tokenizers: it splits a text
    by another pattern, or it writes a blank as U+2581 as SentencePiece does."""
    cutting = root["pre_tokenizer"] or {}
    normalizer = root.get("normalizer") or {}
    first = [cutting, *cutting.get("pretokenizers", [])[:1], normalizer,
             *normalizer.get("normalizers", [])[:1]]
    return any(step.get("type") in ("Split", "Metaspace", "Prepend", "Replace") for step in first)

class Tokenizer:
    """vocab: list of bytes by id     merges: list of (left id, right id) by rank     vocab_size: V
    specials: dict name -> id     symbols: dict name -> id of tokens that are made wherever their
    names occur     digits: whether each number is a word
    begins: ids that a model expects before each text, for example that of <s>"""

    def __init__(self, ids, merges, specials=(), digits=False, begins=(), symbols=()):
        """ids: dict name -> id, in GPT-2's characters     merges: "left right" or [left, right]
        A name that is neither a byte, a merge nor a symbol is special. `specials` may contain only
        such names. `encode` skips a byte without an id, as Hugging Face does."""
        names = sorted(ids, key=ids.get)
        pairs = [tuple(m.split(" ") if isinstance(m, str) else m) for m in merges]
        ordinary = set(CHAR_OF_ID).union(left + right for left, right in pairs)
        bad = sorted(ordinary.intersection(specials))[:3]
        need(not bad, f"special tokens {bad} are also ordinary tokens; choose names like </s>")
        twice = [name for name, n in collections.Counter([*specials]).items() if n > 1][:3]
        need(not twice, f"special tokens {twice} are listed more than once; list each once")
        unknown = [name for name in specials if name not in ids][:3]
        need(not unknown, f"special tokens {unknown} have no id; give them one or leave them out")
        need("" not in ids, "a special token has an empty name; choose a name like </s>")
        need([ids[name] for name in names] == list(range(len(names))),
             f"expected the ids of {len(names)} tokens to be 0 to {len(names) - 1}, each once")
        need(len(names) <= MAX_VOCAB, f"expected at most {MAX_VOCAB} tokens, found {len(names)}")
        need(len(set(pairs)) == len(pairs),
             f"expected unique merges, found {len(set(pairs))} unique ones among {len(pairs)}")
        need(len(pairs) < MAX_VOCAB, f"expected at most {MAX_VOCAB - 1} merges, found {len(pairs)}")
        id_of = {name: k for k, name in enumerate(names)}       # ints, even if a file says 1.0
        byte = dict(zip(CHAR_OF_ID, BYTE_OF_ID))
        self.vocab = [bytes(byte[c] for c in name) if name in ordinary else name.encode()
                      for name in names]
        self.vocab_size = len(names)
        self.merges = [(id_of[left], id_of[right]) for left, right in pairs]
        self.symbols = {name: id_of[name] for name in symbols}
        self.specials = {name: k for name, k in id_of.items()
                         if name not in ordinary and name not in self.symbols}
        # a name may also be that of an ordinary token, if both mean the same text
        bad = [name for name, k in self.symbols.items() if self.vocab[k] != name.encode()][:3]
        need(not bad, f"the added tokens {bad} are also ordinary tokens of another text; choose "
             f"other names")
        self.digits = digits
        self.begins = begins
        self.check_begins()
        self._split = splitter(self.symbols)
        self._ids = id_of
        self._lines = [f"{left} {right}" for left, right in pairs]
        # arguments of `encode_range`
        self._classes = DIGITS if digits else CLASSES
        in_gpt2_order = np.array([id_of.get(c, -1) for c in CHAR_OF_ID], np.int32)
        self._byte_id = in_gpt2_order[ID_OF_BYTE]       # (256,) by byte
        self._mix = draw_mix()
        self._table = pair_table(self.merges, self._mix)
        self._made = np.array([id_of[left + right] for left, right in pairs], np.int32)

    def check_begins(self):
        bad = [k for k in self.begins if k not in self.specials.values()]
        need(not bad, f"a text begins with the ids {bad[:3]}, expected ids of special tokens")

    def encode(self, text):
        """Ids, int32, of str or bytes. It makes no special tokens: "</s>" gives about three ids."""
        text = as_array(text)
        if not self._split:
            return self.encode_part(text)
        parts = self._split.split(text.tobytes())       # every second part is a symbol
        ids = [self.encode_part(as_array(part)) for part in parts]
        ids[1::2] = [np.array([self.symbols[name.decode()]], np.int32) for name in parts[1::2]]
        return np.concatenate(ids)

    def encode_part(self, text):
        """Ids of a text (N,) uint8 without symbols"""
        ids = np.empty(len(text), np.int32)             # an id is at least one byte

        def encode_part(start, end):
            return start, encode_range(ids, text, start, end, self._classes, self._byte_id,
                                       self._table, self._mix, self._made)

        return joined(ids, of_parts(text, encode_part))

    def encode_whole(self, text):
        """The ids of a text as a model reads it from its beginning: `begins`, then `encode`"""
        return np.concatenate([np.array(self.begins, np.int32), self.encode(text)])

    def encode_after(self, text):
        """The ids of a text that follows other tokens. Here these are the same ids."""
        return self.encode(text)

    def decode(self, ids):
        """The bytes of ids; a special token becomes its name."""
        ids = np.asarray(ids).ravel().tolist()
        bad = [k for k in ids if not 0 <= k < self.vocab_size]
        need(not bad, f"expected token ids from 0 to {self.vocab_size - 1}, got {bad[:3]}; decode "
             f"with the tokenizer that encoded them")
        return b"".join([self.vocab[k] for k in ids])

    def spell(self, ids):
        """The bytes of ids that follow other tokens. Here these are the same bytes."""
        return self.decode(ids)

    def byte_token(self, byte):
        """The id of the token that is this byte, or None"""
        return self.vocab.index(byte) if byte in self.vocab else None

    def hash(self):
        """SHA-256 in hex of the content of a tokenizer. It is the same for all file formats."""
        form = self.form()
        if self.symbols:
            form.append(["symbols", *self.symbols])
        return sha256_of(form)

    def form(self):
        """The content of a tokenizer without its symbols, a list"""
        form = [list(self._ids), self._lines, list(self.specials)]
        if self.digits:
            form.append("digits")
        if self.begins:
            form.append(["begins", *self.begins])
        return form

    def to_json(self):
        """Hugging Face's tokenizer.json, compact."""
        cutting = GPT2_WORDS
        if self.digits:
            cutting = dict(type="Sequence", pretokenizers=[EACH_DIGIT, GPT2_WORDS])
        added = added_tokens(self.specials) + added_tokens(self.symbols, special=False)
        root = dict(version="1.0", added_tokens=added, pre_tokenizer=cutting, decoder=GPT2_WORDS,
                    model=self.model())
        if self.begins:
            root["post_processor"] = self.template()
        return json.dumps(root, ensure_ascii=False, separators=(",", ":"))

    def model(self):
        """The block `model` of a tokenizer.json"""
        return dict(type="BPE", vocab=self._ids, merges=self._lines)

    def template(self):
        """The post_processor of a tokenizer.json that adds `begins` before each text"""
        name_of = {k: name for name, k in self.specials.items()}
        names = [name_of[k] for k in self.begins]

        def parts(text, number):
            tokens = [dict(SpecialToken=dict(id=name, type_id=number)) for name in names]
            return [*tokens, dict(Sequence=dict(id=text, type_id=number))]

        tokens = {name: dict(id=name, ids=[self.specials[name]], tokens=[name]) for name in names}
        return dict(type="TemplateProcessing", single=parts("A", 0),
                    pair=parts("A", 0) + parts("B", 1), special_tokens=tokens)

    @classmethod
    def from_json(cls, text):
        """Tokenizer from a tokenizer.json. Errors may be of any kind: call it in `reading`."""
        return cls.from_root(json.loads(text))

    @classmethod
    def from_root(cls, root):
        """Tokenizer from the content of a tokenizer.json"""
        if is_of_parts(root):
            try:
                from nanoeuler_parts.tokenizers.families import tokenizer_of
            except ModuleNotFoundError:
                need(False, "this tokenizer needs the folder nanoeuler_parts; put it beside bpe.py")
            return tokenizer_of(root)
        digits = cuts_digits(root["pre_tokenizer"])
        model = root["model"]
        check_model(root, model)
        specials, symbols = specials_and_symbols(root)
        return cls({**model["vocab"], **specials, **symbols}, model["merges"], specials, digits,
                   begins_of(root.get("post_processor")), symbols)

    def save(self, path):
        """Writes a tokenizer.json if path ends in .json, else vocab.json and merges.txt in path."""
        files = {str(path): self.to_json()}
        if not str(path).endswith(".json"):
            need(not self.digits, f"{path}: the tokenizer splits numbers into digits, which only a "
                 f".json file can store; choose a name that ends in .json")
            is_plain = type(self) is Tokenizer and not self.begins and not self.symbols
            need(is_plain, f"{path}: the tokenizer has settings that only a .json file can store; "
                 f"choose a name that ends in .json")
            os.makedirs(path, exist_ok=True)
            files = {f"{path}/vocab.json": json.dumps(self._ids, ensure_ascii=False),
                     f"{path}/merges.txt": "\n".join(["#version: 0.2", *self._lines, ""])}
        for name, content in files.items():
            part = f"{name}.{os.getpid()}.part"         # unique to this process
            try:
                with open(part, "w", encoding="utf-8", newline="\n", opener=private_as(name)) as f:
                    f.write(content)
                adopt_mode(part, name)
                os.replace(part, name)                  # a reader sees the old file or the new one
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.remove(part)
                raise UserError(f"cannot write {name}: {error.strerror}; free disk space, or "
                                f"choose another --tokenizer") from None

    @classmethod
    def load(cls, path):
        """Reads the files that `save` writes, and such files by GPT-2 and Hugging Face."""
        file = pathlib.Path(path)
        with reading(path, "give a byte-level tokenizer.json, or a directory with vocab.json and "
                     "merges.txt"):
            need(file.stat().st_size < 1 << 28,
                 f"expected fewer than {1 << 28:,} bytes, found {file.stat().st_size:,}")
            if not file.is_dir():
                return cls.from_json(read_bytes(file).decode())
            # not splitlines, which also splits at U+0085 and others that may be in a merge
            text = read_bytes(file / "merges.txt").decode()
            lines = text.replace("\r\n", "\n").split("\n")
            merges = [line for line in lines if line and not line.startswith("#version")]
            ids = json.loads(read_bytes(file / "vocab.json").decode())
            return cls(ids, merges)

# ==== 8 Command line ====
def need_no_tokenizer(path, text, force):
    """Rejects a path where a tokenizer exists, unless `force`: texts may be encoded with it. The
    training text is never replaced."""
    names = [path] if path.endswith(".json") else [f"{path}/vocab.json", f"{path}/merges.txt"]
    need(os.path.realpath(text) not in map(os.path.realpath, names),
         f"{path} would replace its training text {text}; choose another --tokenizer")
    if force:
        return
    there = [name for name in names if os.path.exists(name)]
    need(not there, f"{', '.join(there)} exists; choose another --tokenizer, or replace it with "
         f"--force")

def parser():
    parser = argparse.ArgumentParser(description="Byte-level BPE tokenizer.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("verb", choices=["train", "encode", "decode"],
                        help="train: learn a tokenizer from text; encode: turn text into decimal "
                        "ids; decode: turn ids into text")
    parser.add_argument("file", nargs="?", default="-", help="input file; -: standard input")
    parser.add_argument("--vocab-size", type=int, default=4096, help="for train: "
                        "largest vocabulary, in tokens: 256 bytes, merges and special tokens")
    parser.add_argument("--tokenizer", default="tokenizer.json", help="file that train "
                        "writes and the other verbs read: a .json file, or a directory with "
                        "vocab.json and merges.txt")
    parser.add_argument("--force", action="store_true", help="for train: replace an "
                        "existing tokenizer")
    return parser

def main():
    args = parser().parse_intermixed_args()  # the file may come after the flags
    if args.verb == "train":
        need_no_tokenizer(args.tokenizer, args.file, args.force)
    if args.file == "-" and sys.stdin and sys.stdin.isatty():
        note("reading standard input; Ctrl-D ends it")
    if args.file == "-":
        with open(0, "rb") as f:             # file descriptor 0: standard input
            data = f.read()
    else:
        with reading(args.file, "name a file, or - for standard input"):
            data = read_bytes(args.file)
    if args.verb == "train":
        tokenizer = train(data, args.vocab_size, SPECIALS)
        tokenizer.save(args.tokenizer)
        fewer = tokenizer.vocab_size < args.vocab_size
        why = f" instead of {args.vocab_size}: the text has no more pairs to merge" if fewer else ""
        print(f"{printable(args.tokenizer)}: {tokenizer.vocab_size} tokens{why}")
    elif args.verb == "encode":
        print(*Tokenizer.load(args.tokenizer).encode(data).tolist())
    else:
        with reading(args.file, "give decimal token ids"):
            ids = [int(s) for s in data.split()]
        sys.stdout.buffer.write(Tokenizer.load(args.tokenizer).decode(ids))

if __name__ == "__main__":
    sys.modules["bpe"] = sys.modules[__name__]   # nanoeuler_parts imports this module, not a copy
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:                  # the reader of our output is gone: discard the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except (OSError, UserError) as error:
        print(f"bpe.py: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)
