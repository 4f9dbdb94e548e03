"""Words of the patterns that Llama 3, Qwen, GPT-4 and GPT-4o use, and the encoding of such words.
It continues section 3 of bpe.py: the text is scanned by hand, character by character."""
import re
from typing import NamedTuple

import numpy as np

import bpe
from bpe import (
    AFTER_APOSTROPHE, APOSTROPHE, BLANK, char_at, INVALID, LETTER, merge_word, NUMBER, OTHER, SPACE,
    TWO_AFTER,
)

# Classes of characters in addition to those of bpe.py.  LETTER means a letter without case (Lm, Lo)
# if the pattern distinguishes upper and lower case, else any letter.
NEWLINE = 6         # CR and LF
UPPER = 7           # Lu, Lt
LOWER = 8           # Ll
MARK = 9            # M

# Run lengths of these classes in Unicode 16, in the notation of bpe.RUNS
RUNS = {UPPER: """
1nA1XxbhHbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbcbbbbbbbbbbbbbbbcbbbbbbbbbbbbbbbbbbb
bbbbbbbbbbbbbbbbbbbbbbbbbbbcbbbbdcbbbcbdcebcbddcbcbbbbbcbbcbbcbdbbbcdbhcbcbcbbbbbbbbbbbbbbbbcbbbbbbb
bbbbbbbbbbccbbbdbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbhcbccbbebbbbbbbb5Dbbbdbibg
bbdbbbcbrbjJbcddbbbbbbbbbbbbbbbbbbbbbbbfbcbbccZWbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbjbbbbbbbbbbbbbbbbbb
bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbcbbbbbbbbbbbbcbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb
bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbcM55DMbbfb13U1I42lbgRcd6ibbbbbbbbbbbbbbbbbbbbbbbbbbbbbb
bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb
bbbbbbbbbbbbbbbbbbbjbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb
bbbbbbbbbbbbbbbbbjiigkiiiiglbbbbbbbiiyiiiiiiflflemflf5bbebddcdcbdfgbbbbbbecekcfb1jb51GWWbbdcbbbbbbeb
bcbidbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb
bbbibbbeb597jbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbtbbbbbbbbbbbbbbbbbbbbbbbbbbb2Fbbbbbbbbbbbb
bdbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbkbbbbcbbbbbbbbebbbcbbbdbbbbbbbbbbbbbb
bbbbbbfbfbbbbbbbbbbbbbbbebbbcdbfbbbbbbbyb429hA23zO2GK3albpbhbc34cZ3bw55oG420WG500qAAAAAAbbccbcccebiA
AAcbecibhBcbebfbbdhBAAAAAAAAAAAEzHzHzHzHzHb84LI""", LOWER: """
1TA1gbPybibbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbcbbbbbbbbbbbbbbbcbbbbbbbbbbbbbbbbbb
bbbbbbbbbbbbbbbbbbbbbbbbbbbbcbbbbdcbbbcbdcebcbddcbcbbbbbcbbcbbcbdbbbcccdgbcbcbbbbbbbbbbbbbbbbcbbbbbb
bbbbbbbbbbbccbbbdbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbhcbccbbebbbbbbbb1rbB3Lbbb
dbddsbBJbcddbbbbbbbbbbbbbbbbbbbbbbbfbbcbccZWbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbjbbbbbbbbbbbbbbbbbbbbb
bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbcbbbbbbbbbbbbcbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb
bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbWP55BRcd14Gg41Ujbb2nS1lnbI1Ybbbbbbbbbbbbbbbbbbbbbbbbbbbbbb
bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb
bbbbbbbbbbbbbbbbbbjbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb
bbbbbbbbbbbbbbbbjigkiiiigkiiiiociiiiiifbcgbddbciecciikdbc5obdcdbBbebebccieeb1bb52BWbbdcbbbbbbebbcbgf
bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbch
bbbebmMbbfb596dbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbtbbbbbbbbbbbbbbbbbbbbbbbbbbb2Fbbbbbbbbbb
bbdbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbibbbbcbbbbbbbbbebbbcbbdbbbbbbbbbbb
bbbbbbbbbfbfbbbbbbbbbbbbbbbebbbcbdbbbbbbbbbbbAbdb15PRfjh1C390ihmf20zA23HO2GK2Zlbpbhbc34BZ2vw55oG420W
G500kAAhbsAAAebbbhblAAAAAAAAAAAAAAAAACCzbgAzbgAzbgAzbgAzbgbb35ykbugg49dI""", MARK: """
14O2i5ph5dTbbbcbcbb1ulWvqb1XhcgccbeJbEB1Nl1gjjbyebjbdbfRd1hjQybH1cdbsbhkcDd1ebbhcccdjbkcAbcd1ebbfecc
ddbEcdbld1ebbibdbducwgbd1ebbhcccdhdkcEb1hfddbejbOf1dbbhbdbehclcDd1ebbhbdbehclcpbme1dcbhbdbejbkcDd1sb
egbbbisc1jbchmi1Ubcjlh1vcBbbbbbecXubcflbKjb1Wuxeedbdchdenmbbke13Bd18keCdDcEc1mGjbTdbb2ncIb2omem4lf1f
kbDcbWFXfVrMjmdEn1eoWu2Wdbvebgbcd3Q1m13SH59cd2Lb1SG10Ig2bc580eebkGc1Cc5mbdbebxfeb1FcYsAsnbMiznSeVoKb
1pombicTdYbbdccfcbbPffc4Cibc389Sb14jqqq18Lb4sb2Tf32gdbcfeOdeb3jc11be1nf6fc1Be1slXe2sd1bpPbcckeTlhb1j
dKoqcSbmdWoiebc1Omgbcb3bmve1dcbhcccdjbkcchdf1pjbbcbbebfbboc1Esxb1Du4BhcjBc1Er2cn1Xp4Wp4Lgbccebbbc2Lh
chdbCkOhbeibjlUq7Pibi1Ewbo2sgdbbcbhbb1ofbcbf6JejcbbWhdfxb102Tbgp220ys48af1hh20ibb1dhe1Dblc377xc90zUc
x10wfdgiichEe2Sd38d1deYibobwfbp26ihbrchbcbf1Wb3eh7lb1je9Oe4Uc14ih2fh15240v4G"""}

PLAIN = bpe.CLASSES.copy()          # of patterns that do not distinguish upper and lower case
PLAIN[[10, 13]] = NEWLINE
CASED = PLAIN.copy()
bpe.set_classes(CASED, RUNS)

# ==== Patterns ====
FIRST = 1           # contractions are words: I|'m
LAST = 2            # contractions end words: I'm

class Pattern(NamedTuple):
    """How a regular expression splits a text into words"""
    cased: bool             # an upper-case letter after a lower-case one begins a word
    contractions: int       # of 's 't 're 've 'm 'll 'd, in upper and lower case: 0, FIRST or LAST
    most_digits: int        # digits per word
    slashes: bool           # do slashes, as line ends, belong to the punctuation before them?

SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
END = r"\s*[\r\n]+|\s+(?!\S)|\s+"

def uncased(digits):
    return (SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits +
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|" + END)

def cased(digits, short):
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (f"{before}{upper}*{lower}+{short}|{before}{upper}+{lower}*{short}|{digits}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + END)

# {regular expression in a tokenizer.json: its settings}.  Other expressions are rejected.
PATTERNS = {
    uncased(r"\p{N}{1,3}"): Pattern(False, FIRST, 3, False),                # Llama 3, GPT-4
    uncased(r"\p{N}"): Pattern(False, FIRST, 1, False),                     # Qwen2, Qwen3
    cased(r"\p{N}{1,3}", SHORT + "?"): Pattern(True, LAST, 3, True),        # GPT-4o
    cased(r"\p{N}", ""): Pattern(True, 0, 1, True),                         # Mistral's Tekken
}

# ==== Words ====
JIT = dict(files=[bpe.__file__], **bpe.JIT)
INLINE = dict(files=[bpe.__file__], **bpe.INLINE)

@bpe.jit(**INLINE)
def after_contraction(text, i, end):
    """The end of a contraction that begins at i, or i if there is none.  U+017F is an s, too."""
    if i + 1 >= end or text[i] != APOSTROPHE:
        return i
    first = np.int64(text[i + 1]) | 32                              # lower case
    if first in AFTER_APOSTROPHE:
        return i + 2
    if i + 2 < end:
        if (first << 8 | text[i + 2] | 32) in TWO_AFTER:
            return i + 3
        if text[i + 1] == 0xC5 and text[i + 2] == 0xBF:
            return i + 3
    return i

@bpe.jit(**INLINE)
def after_letters(text, i, end, classes):
    """(a, b): where the letters and marks that begin at i end.
    a: U*L+, where U is any letter or mark but a lower-case one, and L any but an upper-case one
    b: U+, if a is i.  Where the text does not match, the end is i."""
    j = i
    a = i
    lower = False                           # after the first lower-case letter
    while j < end:
        kind, n = char_at(text, j, end, classes)
        if kind == LOWER:
            lower = True
        elif kind == UPPER:
            if lower:
                break
        elif kind != LETTER and kind != MARK:
            break
        j += n
        if kind != UPPER:
            a = j
    return a, j

@bpe.jit(**INLINE)
def after_spaces(text, i, end, classes):
    r"""The end of \s*[\r\n]+|\s+(?!\S)|\s+ at i, where a space is: after the last line end of a run
    of spaces; else before its last space, if a word follows; else after the run"""
    stop = i
    last = i                                # where the last space begins
    line = i                                # after the last line end
    while stop < end:
        kind, n = char_at(text, stop, end, classes)
        if kind != SPACE and kind != NEWLINE:
            break
        last = stop
        stop += n
        if kind == NEWLINE:
            line = stop
    if line > i:
        return line
    if stop < end and last > i:
        return last
    return stop

@bpe.jit(**INLINE)
def after_punctuation(text, i, end, classes, slashes):
    r"""The end of [^\s\p{L}\p{N}]+[\r\n]* at i, where such a character is"""
    while i < end:
        kind, n = char_at(text, i, end, classes)
        if kind != OTHER and kind != MARK:
            break
        i += n
    while i < end and (text[i] == 10 or text[i] == 13 or (slashes and text[i] == 47)):
        i += 1
    return i

@bpe.jit(**INLINE)
def word_end(text, i, end, classes, pattern):
    """The end of the word at i: an invalid byte, or the first alternative of the pattern that
    matches.     text (N,) uint8     classes (0x140000,) uint8     pattern: a Pattern"""
    _, contractions, most_digits, slashes = pattern
    kind, n = char_at(text, i, end, classes)
    if kind == INVALID:
        return i + 1
    stop = i
    if contractions == FIRST:
        stop = after_contraction(text, i, end)
    if stop > i:
        return stop
    if kind == NUMBER:
        stop = i + n
        for _ in range(most_digits - 1):
            if stop < end:
                kind, n = char_at(text, stop, end, classes)
                if kind == NUMBER:
                    stop += n
        return stop
    # Letters, after an optional character that is no letter, number or line end.  A mark may be
    # this character, or a part of the word.
    is_letter = kind == LETTER or kind == UPPER or kind == LOWER
    upper = i                               # the end of a word without lower-case letters
    if not is_letter and kind != NEWLINE:
        stop, upper = after_letters(text, i + n, end, classes)
        if stop == i + n:
            stop = i
        if upper == i + n:
            upper = i
    if stop == i and (is_letter or kind == MARK):
        stop, upper = after_letters(text, i, end, classes)
    stop = stop if stop > i else upper
    if stop > i:
        return after_contraction(text, stop, end) if contractions == LAST else stop
    if kind == OTHER:
        return after_punctuation(text, i, end, classes, slashes)
    if text[i] == BLANK and i + 1 < end:
        next_kind, _ = char_at(text, i + 1, end, classes)
        if next_kind == OTHER:              # a mark has matched above
            return after_punctuation(text, i + 1, end, classes, slashes)
    return after_spaces(text, i, end, classes)

# A text may be split before a blank after a visible character, as in bpe.next_cut.  Before a line
# end it may not: in these patterns a line end belongs to the punctuation before it.
CUT = re.compile(rb"(?:[!-~]|(?!\xe3\x80\x80)[\xe3-\xec][\x80-\xbf]{2})(?= )")

# ==== Encoding ====
class Names(NamedTuple):
    """The tokens that a whole word can be, in a hash table with linear probing"""
    rows: np.ndarray        # (R,) int32: ids, -1 for a free row; R a power of two
    text: np.ndarray        # uint8: the bytes of all tokens
    starts: np.ndarray      # (V + 1,) int64: token k is text[starts[k]:starts[k + 1]]
    longest: int            # bytes of the longest token

@bpe.jit(**INLINE)
def row_for_name(names, mix, text, i, j):
    """The row of the token text[i:j], or the free row for it"""
    h = j - i
    for k in range(i, j):
        h = (h ^ text[k]) * mix
    row = (h ^ (h >> 32)) & (len(names.rows) - 1)
    while names.rows[row] >= 0:
        start = names.starts[names.rows[row]]
        if names.starts[names.rows[row] + 1] - start == j - i:
            k = 0
            while k < j - i and names.text[start + k] == text[i + k]:
                k += 1
            if k == j - i:
                break
        row = (row + 1) & (len(names.rows) - 1)
    return row

@bpe.jit(**JIT)
def add_names(names, mix, ids):
    """Fills the hash table."""
    for k in ids:
        row = row_for_name(names, mix, names.text, names.starts[k], names.starts[k + 1])
        names.rows[row] = k

def names_of(vocab, ids, mix):
    """Names of the tokens `ids` of a vocabulary, a list of bytes"""
    sizes = [len(name) for name in vocab]
    names = Names(np.full(2 << len(ids).bit_length(), -1, np.int32),
                  np.frombuffer(b"".join(vocab), np.uint8),
                  np.append(0, np.cumsum(sizes, dtype=np.int64)),
                  max((sizes[k] for k in ids), default=0))
    add_names(names, mix, np.array(ids, np.int64))
    return names

@bpe.jit(**JIT)
def encode_range(out, text, start, end, classes, pattern, names, byte_id, table, mix, made):
    """As bpe.encode_range, but the words are those of a pattern, and a word in `names` is one
    token.     pattern: a Pattern     names: Names     others: as in bpe.encode_range"""
    bits = int(np.log2(end - start + 1)) - 1
    seen = np.zeros((1 << min(17, max(9, bits)), 4), np.int64)
    used = 0
    i = start
    m = start
    while i < end:
        j = word_end(text, i, end, classes, pattern)
        row = bpe.row_for_word(seen, mix, text, i, j)
        if seen[row, bpe.END] != 0:
            where = seen[row, bpe.VALUE] >> 8
            n = seen[row, bpe.VALUE] & 255
            for k in range(n):
                out[m + k] = out[where + k]
        else:
            whole = -1
            if j - i <= names.longest:
                whole = names.rows[row_for_name(names, mix, text, i, j)]
            n = 0
            if whole >= 0:
                out[m] = whole
                n = 1
            else:
                for k in range(i, j):
                    token = byte_id[text[k]]
                    if token >= 0:
                        out[m + n] = token
                        n += 1
                n = merge_word(out[m:m + n], table, mix, made)
            if j - i < 256 and 2 * used < len(seen):
                seen[row, bpe.START] = i
                seen[row, bpe.END] = j
                seen[row, bpe.VALUE] = m << 8 | n
                used += 1
        i = j
        m += n
    return m
