"""Regular expressions of JSON schemas (`pattern`) as frames of json_frames.py.

Three steps, as in Thompson 1968 (Regular expression search algorithm, CACM 11):
1. `Parser` reads the pattern, and makes a graph.  A node reads one character of a set, or splits
   the path in two, or accepts.
2. A state is the set of nodes at which the text so far can be.  `Automaton.start` makes all states,
   up to a limit, because a pattern of n characters can have 2^n of them.
3. `spelled` writes the characters that a state reads as bytes of a JSON string.

Every node leads to the end, so no state is a dead end.

The frames accept a part of the strings that fit: `.` and the sets with ^, \\D, \\S and \\W allow no
line ends (the first) or ASCII only (the others), because implementations differ in the rest.  Only
characters that need an escape are escaped.

Supported: alternatives, groups, sets, \\d \\s \\w \\D \\S \\W, escaped characters, \\xHH, \\uHHHH,
* + ? {m} {m,} {m,n}, also lazy, and ^ and $ where a text can begin and end."""
import json
import re
from collections import Counter
from functools import lru_cache

from bpe import UserError
from nanoeuler_parts.chat.json_frames import Choice, NO_LIMIT, QUOTE

LAST = 0x10FFFF
DIGITS, WORDS = [(48, 57)], [(48, 57), (65, 90), (95, 95), (97, 122)]
SPACES = [(9, 13), (32, 32)]
CLASSES = {"d": DIGITS, "w": WORDS, "s": SPACES}
LINE_ENDS = [(10, 10), (13, 13), (0x2028, 0x2029)]
CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}


UNICODE, ASCII = (0, LAST), (32, 126)


def without(ranges, among=UNICODE):
    """The characters among (first, last) that are in none of the ranges"""
    found, (at, last) = [], among
    for low, high in sorted(ranges):
        if at < low:
            found.append((at, min(low - 1, last)))
        at = max(at, high + 1)
    found.append((at, last))
    return [(low, high) for low, high in found if low <= high]


ANY, DOT = [UNICODE], without(LINE_ENDS)


# ---- 1. patterns
# A syntax tree of tuples: ("set", ranges), ("all", parts), ("one", alternatives),
# ("repeat", part, least, most or None), ("^",), ("$",)
class Parser:
    """Reads a regular expression of ECMA-262.  where: the place in the schema, for errors"""

    def __init__(self, text, where, spend):
        self.text, self.at, self.where, self.spend = text, 0, where, spend

    def need(self, condition, what):
        if not condition:                    # the message is as long as the pattern
            raise UserError(f"{self.where}: pattern: {what} in {json.dumps(self.text):.60} is not "
                            f"supported")

    def peek(self):
        return self.text[self.at:self.at + 1]

    def take(self):
        self.need(self.at < len(self.text), "an unexpected end")
        self.at += 1
        self.spend(3)
        return self.text[self.at - 1]

    def takes(self, text):
        found = self.text.startswith(text, self.at)
        self.at += len(text) * found
        return found

    def tree(self):
        found = self.alternatives(0)
        self.need(self.at == len(self.text), "an unbalanced )")
        return found

    def alternatives(self, depth):
        self.need(depth < 50, "a group this deep")
        found = [self.sequence(depth)]
        while self.takes("|"):
            found.append(self.sequence(depth))
        return found[0] if len(found) == 1 else ("one", found)

    def sequence(self, depth):
        parts = []
        while self.peek() and self.peek() not in "|)":
            parts.append(self.repeated(self.part(depth)))
        return parts[0] if len(parts) == 1 else ("all", parts)

    def part(self, depth):
        char = self.take()
        if char in "^$":
            return (char,)
        if char == ".":
            return "set", DOT
        if char == "[":
            return "set", self.set()
        if char == "\\":
            return "set", self.escape()[0]
        if char == "(":
            if self.takes("?"):
                named = self.takes("<") or self.takes("P<")
                self.need(self.peek() not in "=!" if named else self.takes(":"),
                          "a group with ? that looks ahead or behind")
                while named and self.take() != ">":
                    pass
            found = self.alternatives(depth + 1)
            self.need(self.takes(")"), "a ( without )")
            return "all", [found]
        self.need(char not in "*+?" and not (char == "{" and self.peek() == ","),
                  f"{char} without a part before it")
        return "set", [(ord(char), ord(char))]

    def repeated(self, part):
        """The part with the * + ? or {} that follows it"""
        least, most = 0, None
        if self.takes("+"):
            least = 1
        elif self.takes("?"):
            most = 1
        elif self.peek() == "{" and self.text[self.at + 1:self.at + 2].isdigit():
            said, end, _ = self.text[self.at + 1:].partition("}")
            low, comma, high = said.partition(",")
            self.need(end and len(said) < 12 and
                      all(x.isascii() and x.isdigit() for x in (low, high or low)),
                      "a repetition like this")
            self.at += len(said) + 2
            least, most = int(low), int(high or low) if high or not comma else None
            self.need(most is None or least <= most, "a repetition like this")
        elif not self.takes("*"):
            return part
        self.takes("?")                      # lazy: the same texts
        self.need(not self.peek() or self.peek() not in "*+?" and
                  not re.match(r"\{[0-9]", self.text[self.at:]), "a repeated repetition")
        self.need(part[0] not in "^$", "a repeated ^ or $")
        return "repeat", part, least, most

    def escape(self):
        """(the ranges of an escape, is it a class such as \\d?)"""
        char = self.take()
        if char.lower() in CLASSES:
            found = CLASSES[char.lower()]
            return (found if char.islower() else without(found, ASCII)), True
        if char in CONTROLS:
            self.need(char != "0" or not self.peek().isdigit(), "\\0 with a digit after it")
            code = CONTROLS[char]
        elif char in "xu":
            digits = self.text[self.at:self.at + (2 if char == "x" else 4)]
            self.need(len(digits) == (2 if char == "x" else 4) and
                      not digits.lower().strip("0123456789abcdef"), f"\\{char} like this")
            self.at += len(digits)
            code = int(digits, 16)
        else:
            self.need(not char.isalnum(), f"\\{char}")
            code = ord(char)
        return [(code, code)], False

    def set(self):
        negative, found, classes = self.takes("^"), [], False
        while not self.takes("]"):
            low, is_class = self.in_set()
            if not is_class and self.peek() == "-" and self.text[self.at + 1:self.at + 2] != "]":
                self.at += 1
                high, is_class = self.in_set()
                self.need(not is_class and low[0][0] <= high[0][0], "a range like this")
                low = [(low[0][0], high[0][0])]
            found += low
            classes |= is_class
        self.need(found, "an empty set")
        if negative:
            found = without(found, ASCII if classes else UNICODE)
            self.need(found, "an empty set")
        return found

    def in_set(self):
        char = self.take()
        if char == "\\":
            if self.takes("b"):
                return [(8, 8)], False
            return self.escape()
        self.need(not (char == "[" and self.peek() in (":", ".", "=")), "a named set")
        return [(ord(char), ord(char))], False


def anchored(tree, begin, end):
    """The tree without ^ and $, which then reads the whole text: what may precede and follow the
    match is part of it.  begin, end: does the tree begin and end the text?"""
    kind = tree[0]
    if kind == "one":
        return "one", [anchored(part, begin, end) for part in tree[1]]
    parts = [*tree[1]] if kind == "all" else [tree]
    if len(parts) == 1 and parts[0][0] in ("all", "one"):
        return anchored(parts[0], begin, end)
    anything = "repeat", ("set", ANY), 0, None
    if begin:
        if parts and parts[0][0] in ("all", "one"):
            parts[0] = anchored(parts[0], True, False)
        elif parts and parts[0] == ("^",):
            del parts[0]
        else:
            parts.insert(0, anything)
    if end:
        if parts and parts[-1][0] in ("all", "one"):
            parts[-1] = anchored(parts[-1], False, True)
        elif parts and parts[-1] == ("$",):
            del parts[-1]
        else:
            parts.append(anything)
    return "all", parts


# ---- 2. the automaton
class Automaton:
    """The graph of a pattern.  sets: of each node the ranges that it reads, None for a node that
    reads nothing     after: of each node those that follow     spend: see `matching`"""

    def __init__(self, parser, spend):
        self.parser, self.spend = parser, spend
        self.sets, self.after = [None], [()]             # node 0 accepts
        self.readers = {}                                # {ranges: see `reader`}

    def node(self, ranges, *after):
        self.spend(4)
        self.sets.append(ranges)
        self.after.append(after)
        return len(self.sets) - 1

    def add(self, tree, then):
        """The node that begins a tree.  then: the node that follows it"""
        self.spend(2)
        kind = tree[0]
        if kind == "set":
            self.parser.need(any(low < 0xD800 or high > 0xDFFF for low, high in tree[1]),
                             "half of a surrogate pair")
            return self.node(tree[1], then)
        if kind == "all":
            for part in reversed(tree[1]):
                then = self.add(part, then)
            return then
        if kind == "one":
            return self.node(None, *[self.add(part, then) for part in tree[1]])
        self.parser.need(kind == "repeat", f"{kind} within a text")
        _, part, least, most = tree
        if most is None:
            loop = self.node(None)
            self.after[loop] = self.add(part, loop), then
            then = loop
        else:
            end = then
            for _ in range(most - least):
                then = self.node(None, self.add(part, then), end)
        for _ in range(least):
            begin = self.add(part, then)
            if begin == then:                # the part is empty, and so are its repetitions
                break
            then = begin
        return then

    def closure(self, nodes):
        """The nodes that read a character, or accept, and that these lead to"""
        found, waiting = set(), [*nodes]
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                if self.sets[node] is None:
                    waiting += self.after[node]
        self.spend(4 + len(found))
        return frozenset(node for node in found if self.sets[node] is not None or not node)

    def possible(self, least, most):
        """The nodes from which a text of the right length can still come, a set for each number of
        characters so far.  From the last number on, the number no longer matters."""
        last = most if most < NO_LIMIT else least
        every = {*range(len(self.sets))}
        below = {node: self.closure(self.after[node]) for node in every if self.sets[node]}
        found = [every if most == NO_LIMIT else {0}]
        for n in reversed(range(last)):
            self.spend(len(every) / 3)
            nodes = {node for node, after in below.items() if after & found[-1]}
            found.append(nodes | {0} if n >= least else nodes)
        return found[::-1]

    def start(self, first, least, most):
        """The first state.  All others that it leads to are made, too."""
        possible, known, waiting = self.possible(least, most), {}, []

        def state(nodes, n):
            n = min(n, len(possible) - 1)
            key = self.closure(nodes) & possible[n], n
            if key not in known:
                known[key] = Matching({})
                waiting.append(key)
            return known[key], key

        start, (nodes, _) = state([first], 0)
        self.parser.need(nodes, f"a length of {least} to {most} characters, which no match has,")
        while waiting:
            self.spend(20)
            key = nodes, n = waiting.pop()
            targets = {}                     # {frame: the characters that lead to it}
            for low, high, follow in self.edges(nodes):
                frame, (reached, _) = state(follow, n + 1)
                if reached:
                    targets.setdefault(frame, []).append((low, high))
            table = self.table([(self.reader(tuple(ranges)), frame)
                                for frame, ranges in targets.items()])
            if 0 in nodes and n >= least:
                table[QUOTE] = ()
            known[key].table.update(table)
        return start

    def reader(self, ranges):
        """{byte: frames} that read one character of these ranges.  It is made once for each set,
        however many states read the set."""
        if ranges not in self.readers:
            table = {}
            for low, high in ranges:
                sequences = spelled(low, high)
                self.spend(5 + 20 * len(sequences))
                for sequence in sequences:
                    insert(table, sequence, ())
            known = {}
            self.readers[ranges] = {byte: frames_of(x, known) for byte, x in table.items()}
        return self.readers[ranges]

    def table(self, parts):
        """The table of a state.  parts: [(a table that reads a character, the frame after it)], for
        different characters.  Where they begin with the same byte, the next byte decides."""
        if len(parts) == 1:
            [(table, frame)] = parts
            self.spend(10 + len(table) // 2)
            return {byte: (*frames, frame) for byte, frames in table.items()}
        found = {}
        for table, frame in parts:
            self.spend(10 + len(table))
            for byte, frames in table.items():
                found.setdefault(byte, []).append((frames, frame))
        return {byte: (*each[0][0], each[0][1]) if len(each) == 1 else
                (Choice(self.table([(frames[0].table, frame) for frames, frame in each])),)
                for byte, each in found.items()}

    def edges(self, nodes):
        """Yields (low, high, the nodes that follow one of `nodes` at these characters)"""
        begin, end = {}, {}                  # {character: the nodes whose sets begin or end here}
        for node in nodes:
            self.spend(len(self.sets[node] or ()))
            for low, high in self.sets[node] or ():
                begin.setdefault(low, []).append(node)
                end.setdefault(high + 1, []).append(node)
        reading, places = Counter(), sorted({*begin, *end, 0xD800, 0xE000})
        for low, stop in zip(places, places[1:]):
            reading.update(begin.get(low, ()))
            reading.subtract(end.get(low, ()))
            reading = +reading
            self.spend(2 + len(reading) / 4)
            if reading and low != 0xD800:    # surrogates are no characters
                yield low, stop - 1, {self.after[node][0] for node in reading}


class Matching:
    """The rest of a string that fits a pattern, and its quote.  table: {byte: frames after it}"""
    ends = False

    def __init__(self, table):
        self.table = table

    def read(self, byte):
        return self.table.get(byte)

    def first_bytes(self):
        return self.table


# ---- 3. bytes
@lru_cache(maxsize=1024)
def spelled(low, high):
    """The characters from low to high as they are written in a JSON string: a list of sequences of
    ranges of bytes [(first, last)]"""
    found = []
    for code in range(low, min(high, 0x7F) + 1):
        if code < 0x20 or chr(code) in '"\\':
            found.append([(byte, byte) for byte in json.dumps(chr(code))[1:-1].encode()])
    for first, last in (0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7F), (0x80, 0x7FF), (
            0x800, 0xFFFF), (0x10000, LAST):
        a, b = max(low, first), min(high, last)
        if a <= b:
            found += between(chr(a).encode(), chr(b).encode())
    return found


def between(a, b):
    """The texts of UTF-8 from a to b, which are equally long, as sequences of ranges of bytes"""
    if len(a) == 1:
        yield [(a[0], b[0])]
    elif a[0] == b[0]:
        for rest in between(a[1:], b[1:]):
            yield [(a[0], a[0]), *rest]
    else:
        n, first, last = len(a) - 1, a[0], b[0]
        if a[1:] != b"\x80" * n:
            yield from between(a, bytes([first]) + b"\xbf" * n)
            first += 1
        if b[1:] != b"\xbf" * n:
            yield from between(bytes([last]) + b"\x80" * n, b)
            last -= 1
        if first <= last:
            yield [(first, last)] + [(0x80, 0xBF)] * n


def insert(table, sequence, frames):
    """Adds a sequence to a table {byte: table, or at the end frames}.  Sequences that begin with
    the same byte are merged; those that begin with several bytes share one table."""
    (low, high), *rest = sequence
    if not rest:
        table.update(dict.fromkeys(range(low, high + 1), frames))
        return
    below = table.setdefault(low, {})
    insert(below, rest, frames)
    table.update(dict.fromkeys(range(low, high + 1), below))


def frames_of(x, known):
    """The frames for an entry of such a table.  known: {id of a table: its frames}, so that a table
    that several bytes share is read once"""
    if isinstance(x, tuple):
        return x
    if id(x) not in known:
        known[id(x)] = Choice({byte: frames_of(below, known) for byte, below in x.items()}),
    return known[id(x)]


def matching(pattern, where, spend, least=0, most=NO_LIMIT):
    """The frame of the strings of `least` to `most` characters in which a regular expression is
    found.  spend: function(n) that is called with the number of steps of the work, and may
    raise"""
    parser = Parser(pattern, where, spend)
    automaton = Automaton(parser, spend)
    first = automaton.add(anchored(parser.tree(), True, True), 0)
    return Choice({QUOTE: (automaton.start(first, least, most),)})


# ---- formats, as patterns.  29 February is left out, because it depends on the year.
DATE = (r"(?:(?:1[6-9]|[2-9]\d)\d\d-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1\d|2[0-8])|"
        r"(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31))")
TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
FORMATS = {"date": f"^{DATE}$", "time": f"^{TIME}$", "date-time": f"^{DATE}T{TIME}$",
           "uuid": r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
           "ipv4": rf"^{BYTE}(?:\.{BYTE}){{3}}$"}
