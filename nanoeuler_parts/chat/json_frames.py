"""The automaton of JSON mode: which bytes may follow, after a beginning of a JSON text.

The state is a stack of frames, a tuple with the top first.  A frame stands for a piece of JSON that
must still come.  Reading a byte replaces the top frame by the frames of what must follow.  Example
for {"type": "object", "properties": {"ok": {"type": "boolean"}}}, with the names of the frames
below:

    read             state
                     (object,)
    {                (BLANK, Next(first))       a blank, then a name or }
    {"ok             (Word('"ok"'),)            the rest of a name
    {"ok"            (":", SPACE, boolean, Next)
    {"ok":t          (Word('true'), Next)
    {"ok":true}      ()                         the value is complete

The stack remembers the open brackets.  An automaton without a stack could not do that: JSON is not
a regular language.  Where two alternatives begin alike, `Either` reads both at the same time until
one of them fails, so there is no search and no going back.  Alternatives inside of alternatives
could multiply without end.  `either` therefore merges those that are equal, and keeps the first
MOST_LIVE of the others: a reply then fits one of these.

Every state can be completed.  A byte that leads to a dead end is never allowed.

Replies are bounded wherever the grammar would allow endless output: blanks, digits and depth have
limits (below).  Strings and arrays end when the model ends them, or at maxLength and maxItems."""
import json
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import islice

MOST_DEPTH = 10                  # objects and arrays inside each other
MOST_INDENT = 4 * MOST_DEPTH     # blanks after a line end
MOST_DIGITS = 16                 # of an integer, and before the point
MOST_DECIMALS = 20               # after the point
MOST_EXPONENT = 2                # digits: larger numbers would become infinite
MOST_LIVE = 64                   # alternatives that are read at the same time
NO_LIMIT = float("inf")
QUOTE, BACKSLASH = b'"\\'


# ---- the automaton
def after_byte(state, byte):
    """The state after a byte, or None if the byte is not allowed"""
    while state:
        frames = state[0].read(byte)
        if frames is not None:
            return *frames, *state[1:]
        if not state[0].ends:
            return None
        state = state[1:]
    return None


def after_bytes(state, text):
    for byte in text:
        state = after_byte(state, byte)
        if state is None:
            return None
    return state


def is_complete(state):
    return all(frame.ends for frame in state)


def alternatives(state):
    """How many alternatives a state reads at the same time"""
    return len(state[0].states) if state and isinstance(state[0], Either) else 1


def first_bytes(state):
    """The bytes that a state may read, and perhaps others.  Finding them takes less work than
    reading them."""
    if state and not state[0].ends:
        return state[0].first_bytes()
    found = set()
    for frame in state:
        found.update(frame.first_bytes())
        if not frame.ends:
            break
    return found


def can_read(state, byte):
    """Is a byte allowed?  One alternative that reads it is enough."""
    if state and isinstance(state[0], Either):
        return any(after_byte((*each, *state[1:]), byte) is not None for each in state[0].states)
    return after_byte(state, byte) is not None


def accepts(frame, text, spend=lambda steps: None):
    """Is this text a whole value of a frame?  spend: called with the steps of the work"""
    state = frame,
    for byte in text:
        spend(alternatives(state))
        state = after_byte(state, byte)
        if state is None:
            return False
    return is_complete(state)


# ---- frames: `read` returns the frames that follow a byte, or None if the byte is not allowed
# `ends`: may the frame be left out here, because what it stands for is complete or optional?
# `first_bytes`: see the function of this name
ANY_CHARACTER = range(0x20, 0x100)           # the bytes with which a character of a string begins


class Choice:
    """A frame that reads one byte.  table: {byte: frames that follow it}"""

    def __init__(self, table, ends=False):
        self.table, self.ends = table, ends

    def read(self, byte):
        return self.table.get(byte)

    def first_bytes(self):
        return self.table


def choice(*rows, ends=False):
    """A Choice from rows (bytes, frames that follow each of them)"""
    return Choice({byte: frames for each, frames in rows for byte in each}, ends)


def up_to(n, allowed):
    """The frames of at most n bytes from `allowed`"""
    frames = ()
    for _ in range(n):
        frames = choice((allowed, frames), ends=True),
    return frames


def sequence(text):
    return tuple(choice(([byte], ())) for byte in text)


@dataclass(frozen=True)
class Either:
    """Several alternatives that are read at the same time.  states: tuple of states
    known: {byte: frames that follow} in a frame of the schema, since many alternatives can contain
    it.  None in a frame that was made while a text is read: there is no end of these."""
    states: tuple
    known: dict | None = field(default=None, compare=False, repr=False)

    @cached_property
    def ends(self):
        return any(map(is_complete, self.states))

    def read(self, byte):
        if self.known is not None and byte in self.known:
            return self.known[byte]
        after = dict.fromkeys(after_byte(state, byte) for state in self.states)
        after.pop(None, None)
        found = either(tuple(after)) if after else None
        if self.known is not None:
            self.known[byte] = found
        return found

    def first_bytes(self):
        return set().union(*map(first_bytes, self.states))


def flattened(states):
    """Yields the alternatives, also those of an alternative that begins with several"""
    for state in states:
        if state and isinstance(state[0], Either):
            yield from flattened((*each, *state[1:]) for each in state[0].states)
        else:
            yield state


def either(states):
    """The frames of the alternatives, at most MOST_LIVE.  Strings that differ only in their limits
    are merged where the limits overlap."""
    found, texts = {}, {}                # texts: {the rest of a state: its strings}
    for state in flattened(states):
        if state and isinstance(state[0], Text):
            texts.setdefault(state[1:], []).append(state[0])
        else:
            found[state] = None
    for rest, limited in texts.items():
        found.update(dict.fromkeys((text, *rest) for text in joined(limited)))
    states = tuple(islice(found, MOST_LIVE))
    return states[0] if len(states) == 1 else (Either(states),)


def union(frames):
    """The frame of a value that has one of several forms"""
    if len(frames) == 1:
        return frames[0]
    states = tuple(dict.fromkeys(flattened((frame,) for frame in frames)))
    return states[0][0] if len(states) == len(states[0]) == 1 else Either(states, {})


class Texts:
    """Constants in the order of their bytes, so that those with the same beginning are neighbours.
    follow: {text: frames that follow it}"""

    def __init__(self, follow):
        self.follow, self.sorted = follow, sorted(follow)


@dataclass(frozen=True)
class Word:
    """The rest of one of several constants: those from number `low` to `high` (exclusive), which
    have their first `at` bytes in common.  Finding the next byte takes a binary search."""
    texts: Texts
    low: int
    high: int
    at: int = 0

    @property
    def whole(self):
        """The constant that ends here, or None.  A shorter text sorts before a longer one."""
        first = self.texts.sorted[self.low]
        return first if len(first) == self.at else None

    @property
    def ends(self):                          # true for 1, if the constants are 1 and 12
        return self.whole is not None and not self.texts.follow[self.whole]

    def narrowed(self, byte):
        """The Word after a byte, or None"""
        at = self.at

        def next_byte(text):
            return text[at] if at < len(text) else -1

        low = bisect_left(self.texts.sorted, byte, self.low, self.high, key=next_byte)
        high = bisect_left(self.texts.sorted, byte + 1, low, self.high, key=next_byte)
        return Word(self.texts, low, high, at + 1) if low < high else None

    def read(self, byte):
        word = self.narrowed(byte)
        if word and word.high - word.low == 1 and word.whole is not None:
            return word.texts.follow[word.whole]
        return word and (word,)

    def first_bytes(self):
        at, low, found = self.at, self.low, set()
        while low < self.high:
            text = self.texts.sorted[low]
            if at < len(text):
                found.add(text[at])
                low = bisect_left(self.texts.sorted, text[at] + 1, low, self.high,
                                  key=lambda text: text[at] if at < len(text) else -1)
            else:
                low += 1
        return found


def word_of(follow):
    """The frame of one of several constants.  follow: {text: frames that follow it}"""
    texts = Texts(follow)
    return Word(texts, 0, len(texts.sorted))


def words(*texts):
    return word_of(dict.fromkeys(texts, ()))


def encoded(value):
    """The JSON text of a value, in the form in which constants and names are written"""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


# Blanks as json.dumps writes them, with or without indentation
INDENT = up_to(MOST_INDENT, b" \t")
SPACE = choice((b" ", ()), ends=True)
BLANK = choice((b" ", ()), (b"\n", INDENT), ends=True)

# ---- strings.  Only valid UTF-8 (RFC 3629), and surrogates only as pairs of escapes (RFC 8259, 7)
NEXT_BYTE = choice((range(0x80, 0xC0), ()))
HEX = choice((b"0123456789abcdefABCDEF", ()))
LOW_SURROGATE = *sequence(b"\\u"), choice((b"dD", (choice((b"cdefCDEF", (HEX, HEX))),)))
HIGH_SURROGATE = choice((b"01234567", (HEX, HEX)), (b"89abAB", (HEX, HEX, *LOW_SURROGATE)))
CODE = choice((b"0123456789abcefABCEF", (HEX, HEX, HEX)), (b"dD", (HIGH_SURROGATE,)))
ESCAPE = choice((b'"\\/bfnrt', ()), (b"u", (CODE,)))
CHARACTER = choice(
    ([byte for byte in range(0x20, 0x80) if byte not in b'"\\'], ()),
    (b"\\", (ESCAPE,)),
    (range(0xC2, 0xE0), (NEXT_BYTE,)),
    ([0xE0], (choice((range(0xA0, 0xC0), ())), NEXT_BYTE)),
    ([*range(0xE1, 0xED), 0xEE, 0xEF], (NEXT_BYTE, NEXT_BYTE)),
    ([0xED], (choice((range(0x80, 0xA0), ())), NEXT_BYTE)),
    ([0xF0], (choice((range(0x90, 0xC0), ())), NEXT_BYTE, NEXT_BYTE)),
    (range(0xF1, 0xF4), (NEXT_BYTE, NEXT_BYTE, NEXT_BYTE)),
    ([0xF4], (choice((range(0x80, 0x90), ())), NEXT_BYTE, NEXT_BYTE)))


@dataclass(frozen=True)
class Text:
    """The rest of a string and its quote: at least `least` characters, at most `most`"""
    least: int = 0
    most: float = NO_LIMIT
    ends = False

    def read(self, byte):
        if byte == QUOTE:
            return None if self.least else ()
        frames = CHARACTER.read(byte)
        if frames is None or not self.most:
            return None
        if self.least or self.most < NO_LIMIT:
            return *frames, Text(max(0, self.least - 1), self.most - 1)
        return *frames, self

    def first_bytes(self):
        return ANY_CHARACTER

    def near(self, longest):
        """A frame that reads the same tokens of up to `longest` bytes, without limits that are too
        far for them"""
        return Text(min(self.least, longest + 1), self.most if self.most <= longest else NO_LIMIT)


def joined(texts):
    """The strings of `texts`, with those whose limits overlap as one"""
    found = []
    for text in sorted(texts, key=lambda text: text.least):
        if found and text.least <= found[-1].most + 1:
            found[-1] = Text(found[-1].least, max(found[-1].most, text.most))
        else:
            found.append(text)
    return found


@dataclass(frozen=True)
class OtherName:
    """The rest of a name that is none of several, and its quote.
    word: the names that begin as this one does     text: what the rest of any string may be"""
    word: Word
    text: tuple
    ends = False

    def read(self, byte):
        text, word = after_byte(self.text, byte), self.word.narrowed(byte)
        if text is None:
            return None
        if word is None:
            # An escape could spell a character of one of the names in another way.  Inside of a
            # character, bytes below 0x80 belong to an escape, the others to UTF-8.
            in_escape = byte == BACKSLASH or len(self.text) > 1 and byte < 0x80
            return None if in_escape else text
        return (OtherName(word, text),) if text else None        # here one of the names ends

    def first_bytes(self):
        return ANY_CHARACTER


def other_name(names):
    """The frame of a name that is not in `names`, a list of texts with quotes"""
    if not names:
        return STRING
    start = after_byte((words(*names),), QUOTE)[0]
    return choice((b'"', (OtherName(start, (Text(),)),)))


STRING = choice((b'"', (Text(),)))


# ---- numbers
DIGIT = b"0123456789"
EXPONENT = choice((DIGIT, up_to(MOST_EXPONENT - 1, DIGIT)),
                  (b"+-", (choice((DIGIT, up_to(MOST_EXPONENT - 1, DIGIT))),)))
FRACTION = (choice((b".", (choice((DIGIT, up_to(MOST_DECIMALS - 1, DIGIT))),)), ends=True),
            choice((b"eE", (EXPONENT,)), ends=True))


def number(*fraction):
    """The frame of a number.  fraction: the frames after its integer part"""
    positive = {ord("0"): fraction,          # no zero leads other digits
                **dict.fromkeys(b"123456789", (*up_to(MOST_DIGITS - 1, DIGIT), *fraction))}
    return Choice({ord("-"): (Choice(positive),), **positive})


@dataclass(frozen=True)
class Digits:
    """The rest of a decimal number in [low, high], without sign and exponent.
    low, high: in units of 10^-decimals, as all numbers here     n: the digits so far as a number
    length: of the integer part so far     places: digits after the point, or None before it

    A digit is allowed if some continuation is in range.  With k further digits before the point,
    the continuations of n are the numbers from n 10^k to (n + 1) 10^k - 1, and the like behind it.
    """
    low: int
    high: int
    decimals: int
    n: int = 0
    length: int = 0
    places: int | None = None

    @property
    def ends(self):
        unit = 10 ** (self.decimals - (self.places or 0))
        return self.length > 0 and self.places != 0 and self.low <= self.n * unit <= self.high

    def room(self, n, length, places):
        """(digits that may still come before the point, the unit of n)"""
        if places is None:                   # no digit follows a zero at the beginning
            return 0 if length and not n else MOST_DIGITS - length, 10 ** self.decimals
        return 0, 10 ** (self.decimals - places)

    def may_come(self, n, length, places):
        """Is a continuation in range?"""
        more, unit = self.room(n, length, places)
        for _ in range(more + 1):
            if n * unit > self.high:
                return False
            if (n + 1) * unit > self.low:
                return True
            unit *= 10
        return False

    def near(self, longest):
        """See Text.near.  If all continuations are in range, which ones there are depends on the
        number of digits only."""
        more, unit = self.room(self.n, self.length, self.places)
        if not self.length or self.n * unit < self.low or (
                (self.n + 1) * unit * 10 ** more > self.high + 1):
            return self
        n = 10 ** (self.length - 1) if self.n and self.places is None else 0
        length = self.length if self.places is None else 1
        return Digits(0, 10 ** (MOST_DIGITS + self.decimals), self.decimals, n, length, self.places)

    def after(self, byte):
        """(n, length, places) after a byte, or None"""
        if byte == ord("."):
            fits = self.length and self.places is None and self.decimals
            n, length, places = self.n, self.length, 0
        else:
            n = 10 * self.n + byte - ord("0")
            if self.places is None:
                fits = self.length < MOST_DIGITS and (self.n or not self.length)
                length, places = self.length + 1, None
            else:
                fits = self.places < self.decimals
                length, places = self.length, self.places + 1
        if not fits or byte not in b".0123456789":
            return None
        return (n, length, places) if self.may_come(n, length, places) else None

    def read(self, byte):
        after = self.after(byte)
        if after is None:
            return None
        found = Digits(self.low, self.high, self.decimals, *after)
        return (found,) if any(map(found.after, b".0123456789")) else ()     # () ends a reply

    def first_bytes(self):
        return b".0123456789"


def number_between(low, high, decimals):
    """The frame of a number in [low, high], whole numbers in units of 10^-decimals"""
    most = 10 ** (MOST_DIGITS + decimals) - 1
    frames = []
    if high >= 0:
        frames.append(Digits(max(low, 0), min(high, most), decimals))
    if low < 0:
        frames.append(choice((b"-", (Digits(max(-high, 0), min(-low, most), decimals),))))
    return union(frames)


SCALARS = {"string": STRING, "number": number(*FRACTION), "integer": number(),
           "boolean": words(b"true", b"false"), "null": words(b"null")}


# ---- objects and arrays
class Container:
    def __init__(self):
        self.places = {}

    def next(self, i, comma=b""):
        """The Next of a place, always the same one, so that equal states are found at once"""
        if (i, comma) not in self.places:
            self.places[i, comma] = Next(self, i, comma)
        return self.places[i, comma]


class Array(Container):
    """first: the frames of the first items     value: the frame of all others, None if there are
    none     least, most: the number of items"""
    close = ord("]")

    def __init__(self, value, least=0, most=NO_LIMIT, first=()):
        super().__init__()
        self.value, self.first, self.least = value, first, least
        self.most = min(most, len(first)) if value is None else most
        self.counted = max(least, len(first)) if self.most == NO_LIMIT else self.most

    def may_close(self, i, empty):
        return i >= self.least

    def may_continue(self, i):
        return i < self.most

    def item(self, i):
        """The frames of item i and of all that follows"""
        value = self.first[i] if i < len(self.first) else self.value
        return value, self.next(min(i + 1, self.counted), b",")     # few states


COLON = choice((b":", ()))
CLOSING = {byte: choice(([byte], ())) for byte in b"]}"}


class Record(Container):
    """An object with these names, in this order; those that are not required may be skipped.  Then
    any number of others.
    names: with their quotes, as bytes     values: their frames     required: list of bool
    other: (frame of a further name, frame of its value), or None     least: 0, or 1 for an object
    that is not empty"""
    close = ord("}")

    def __init__(self, names, values, required, other=None, least=0):
        super().__init__()
        self.names, self.values, self.other, self.least = names, values, other, least
        self.stop = [len(names)] * (len(names) + 1)      # the next required name, from i on
        for i in reversed(range(len(names))):
            self.stop[i] = i if required[i] else self.stop[i + 1]
        self.frames = {}                     # {i: the frame of the names that may follow}

    def may_close(self, i, empty):
        return self.stop[i] == len(self.names) and not (empty and self.least)

    def may_continue(self, i):
        return i < len(self.names) or self.other is not None

    def item(self, i):
        """The frame of the names that may follow if those before i are written or skipped"""
        if i not in self.frames:
            self.frames[i] = self.frame(i)
        return self.frames[i],

    def frame(self, i):
        stop, n, found = self.stop[i], len(self.names), []
        if i < n:
            found.append((word_of({
                self.names[k]: (COLON, SPACE, self.values[k], self.next(k + 1, b","))
                for k in range(i, min(stop + 1, n))}),))
        if stop == n and self.other:
            name, value = self.other
            found.append((name, COLON, SPACE, value, self.next(n, b",")))
        return found[0][0] if len(found) == len(found[0]) == 1 else Either(tuple(found), {})


def map_of(value, name=STRING, least=0):
    """An object with any names, whose values all have one form"""
    return Record([], [], [], (name, value), least)


@dataclass(frozen=True, eq=False)            # a container makes one for each place
class Next:
    """Item i of an object or array, or its end.  comma: "," or, for the first item, nothing"""
    container: Array | Record
    i: int
    comma: bytes = b""
    ends = False

    def read(self, byte):
        container, i = self.container, self.i
        if container.may_close(i, not self.comma):
            if byte == container.close:
                return ()
            if self.comma and byte in b" \n":            # otherwise a BLANK came before
                return *BLANK.read(byte), CLOSING[container.close]
        if not container.may_continue(i):
            return None
        if self.comma:
            return (BLANK, *container.item(i)) if byte == ord(",") else None
        return after_byte(container.item(i), byte)

    def first_bytes(self):
        container, i, found = self.container, self.i, {self.container.close}
        if self.comma:
            return found.union(b", \n")
        return found.union(first_bytes(container.item(i))) if container.may_continue(i) else found


def opened(container):
    """The Choice that begins an object or array"""
    begins = b"[" if container.close == ord("]") else b"{"
    return choice((begins, (BLANK, container.next(0))))


@cache
def any_value(depth):
    """The frame of any value, with at most `depth` objects and arrays inside each other"""
    frames = [frame for kind, frame in SCALARS.items() if kind != "integer"]
    if depth:
        value = any_value(depth - 1)
        frames += opened(map_of(value)), opened(Array(value))
    return union(frames)


def any_object(depth):
    """The frame of any object, with at most `depth` objects and arrays inside each other"""
    return opened(map_of(any_value(depth - 1)))
