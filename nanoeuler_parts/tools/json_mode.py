"""JSON mode (constrained decoding): replies that are JSON, and fit a JSON schema.

The model computes a logit for every token.  Before sampling, the logits of all tokens that would
break the JSON become -inf, so their probability is 0.  Two parts find these tokens:

1. An automaton reads JSON byte by byte.  Its state is a stack of frames, a tuple with the top
   first.  A frame stands for a piece of JSON that must still come.  Reading a byte replaces the top
   frame by the frames of what must follow.  Example for {"type": "object", "properties": {"ok":
   {"type": "boolean"}}}, with the names of the frames below:

       read             state
                        (object,)
       {                (BLANK, Next(first))       a blank, then a name or }
       {"ok             (Name('"ok'),)             the rest of a name
       {"ok"            (":", SPACE, boolean, Next)
       {"ok":t          (Word("rue"), Next)
       {"ok":true}      ()                         the value is complete

   A byte never has two meanings, so there is no search.  The stack remembers the open brackets.
   An automaton without a stack could not do that: JSON is not a regular language.

2. The model writes tokens, and a token is a string of bytes.  All tokens are in a trie, a tree in
   which tokens with the same beginning share a path.  A walk through the trie reads each beginning
   only once, and skips a whole subtree at the first byte that the automaton cannot read.  The
   result, a mask over the vocabulary, is stored for each state.

Replies are bounded wherever the grammar would allow endless output: blanks, digits and depth have
limits (below).  Strings and arrays end when the model ends them, or at maxLength and maxItems.
Willard and Louf 2023 (arxiv.org/abs/2307.09702) describe masks that are stored by state.  Dong et
al. 2024 (arxiv.org/abs/2411.15100) describe the stack, and masks that depend on its top only."""
import json
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np

from bpe import need, read_bytes, reading, UserError
from nanoeuler_parts.files.texts import parse_json

OBJECT = "object"                # the schema of any JSON object, in place of a JSON text
MOST_DEPTH = 10                  # objects and arrays inside each other
MOST_INDENT = 4 * MOST_DEPTH     # blanks after a line end
MOST_DIGITS = 16                 # of an integer, and before the point
MOST_DECIMALS = 20               # after the point
MOST_EXPONENT = 2                # digits: larger numbers would become infinite
LONGEST_SCHEMA = 1 << 16         # characters
MOST_PROPERTIES = 256            # of one object
NO_LIMIT = float("inf")
MASK_BYTES = 1 << 23             # memory of the masks of one schema, or of all top frames


# ---- frames: `read` returns the frames that follow a byte, or None if the byte is not allowed
# `ends`: may the frame be left out here, because what it stands for is complete or optional?
class Choice:
    """A frame that reads one byte.  table: {byte: frames that follow it}"""

    def __init__(self, table, ends=False):
        self.table, self.ends = table, ends

    def read(self, byte):
        return self.table.get(byte)


def choice(*rows, ends=False):
    """A Choice from rows (bytes, frames that follow each of them)"""
    return Choice({byte: frames for each, frames in rows for byte in each}, ends)


def up_to(n, allowed):
    """The frames of at most n bytes from `allowed`"""
    frames = ()
    for _ in range(n):
        frames = choice((allowed, frames), ends=True),
    return frames


@dataclass(frozen=True)
class Word:
    """The rest of one of several constants.  rests: the bytes that remain of each one"""
    rests: tuple

    @property
    def ends(self):
        return b"" in self.rests             # 1, if the constants are 1 and 12

    def read(self, byte):
        rests = tuple(rest[1:] for rest in self.rests if rest[:1] == bytes([byte]))
        return (() if rests == (b"",) else (Word(rests),)) if rests else None


def words(*texts):
    """The Choice that begins one of several constants"""
    word = Word(texts)
    return Choice({text[0]: word.read(text[0]) for text in texts})


def sequence(text):
    return tuple(choice(([byte], ())) for byte in text)


# Blanks as json.dumps writes them, with or without indentation
INDENT = up_to(MOST_INDENT, b" \t")
SPACE = choice((b" ", ()), ends=True)
BLANK = choice((b" ", ()), (b"\n", INDENT), ends=True)

# Strings.  Only valid UTF-8 (RFC 3629), and \u escapes of surrogates only in pairs (RFC 8259, 7)
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
        if byte == ord('"'):
            return None if self.least else ()
        frames = CHARACTER.read(byte)
        if frames is None or not self.most:
            return None
        if self.least or self.most < NO_LIMIT:
            return *frames, Text(max(0, self.least - 1), self.most - 1)
        return *frames, self


# Numbers
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


SCALARS = {"string": choice((b'"', (Text(),))), "number": number(*FRACTION), "integer": number(),
           "boolean": words(b"true", b"false"), "null": words(b"null")}


# ---- objects and arrays
class Array:
    close = ord("]")

    def __init__(self, value, least=0, most=NO_LIMIT):
        self.value, self.least, self.most = value, least, most

    def may_close(self, i):
        return i >= self.least

    def may_continue(self, i):
        return i < self.most

    def item(self, i):
        """The frames of item i and of all that follows"""
        i = min(i + 1, self.least) if self.most == NO_LIMIT else i + 1           # few states
        return self.value, Next(self, i, b",")


class Map:
    """An object with any names, whose values all have one form"""
    close = ord("}")

    def __init__(self, value):
        self.value = value

    def may_close(self, i):
        return True

    def may_continue(self, i):
        return True

    def item(self, i):
        return SCALARS["string"], COLON, SPACE, self.value, Next(self, 0, b",")


COLON = choice((b":", ()))
CLOSING = {byte: choice(([byte], ())) for byte in b"]}"}


class Record:
    """An object with these names, in this order; those that are not required may be skipped.
    names: with their quotes, as bytes     values: their frames     required: list of bool"""
    close = ord("}")

    def __init__(self, names, values, required):
        self.names, self.values, self.required = names, values, required

    def may_close(self, i):
        return not any(self.required[i:])

    def may_continue(self, i):
        return i < len(self.names)

    def item(self, i):
        return Name(self, i),

    def open_to(self, i):
        """The numbers of the names that may follow if those before i are written or skipped"""
        while i < len(self.names):
            yield i
            if self.required[i]:
                return
            i += 1


@dataclass(frozen=True)
class Name:
    """The rest of a name of a Record, from number `first` on.  said: its bytes so far"""
    record: Record
    first: int
    said: bytes = b""
    ends = False

    def read(self, byte):
        said = self.said + bytes([byte])
        for i in self.record.open_to(self.first):
            name = self.record.names[i]
            if name == said:
                return COLON, SPACE, self.record.values[i], Next(self.record, i + 1, b",")
            if name.startswith(said):        # another name cannot end here: each ends with a quote
                return Name(self.record, self.first, said),
        return None


@dataclass(frozen=True)
class Next:
    """Item i of an object or array, or its end.  comma: "," or, for the first item, nothing"""
    container: Array | Map | Record
    i: int
    comma: bytes = b""
    ends = False

    def read(self, byte):
        container, i = self.container, self.i
        if container.may_close(i):
            if byte == container.close:
                return ()
            if self.comma and byte in b" \n":            # otherwise a BLANK came before
                return *BLANK.read(byte), CLOSING[container.close]
        if not container.may_continue(i):
            return None
        if self.comma:
            return (BLANK, *container.item(i)) if byte == ord(",") else None
        first, *later = container.item(i)
        frames = first.read(byte)
        return None if frames is None else (*frames, *later)


def opened(container):
    """The Choice that begins an object or array"""
    begins = b"[" if container.close == ord("]") else b"{"
    return choice((begins, (BLANK, Next(container, 0))))


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


# ---- schemas
def union(frames, where):
    """The frame of a value that has one of several forms.  The first byte must decide which."""
    table = {}
    for frame in frames:
        need(not table.keys() & frame.table.keys(), f"{where}: two of the alternatives begin with "
             f"the same character; expected alternatives of different types")
        table.update(frame.table)
    return Choice(table)


@cache
def any_value(depth):
    """The frame of any value, with at most `depth` objects and arrays inside each other"""
    frames = [frame for kind, frame in SCALARS.items() if kind != "integer"]
    if depth:
        value = any_value(depth - 1)
        frames += opened(Map(value)), opened(Array(value))
    return union(frames, "any value")


def json_type(value):
    """The JSON type of a constant, or None for an object or array"""
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    return kinds.get(type(value))


ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
               "$schema", "$comment", "$defs", "definitions"}
KEYWORDS = {"object": {"properties", "required", "additionalProperties"},
            "array": {"items", "minItems", "maxItems"},
            "string": {"minLength", "maxLength"}}
TYPES = "array", "object", *SCALARS


def encoded(value):
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


class Compiler:
    """Turns a schema into the frame of its values.  where: the place in the schema, for errors"""

    def __init__(self, root):
        self.root = root
        self.known = {}                      # {($ref, depth): frame}
        self.open = set()                    # the $refs that are being compiled

    def value(self, schema, depth, where):
        """depth: the objects and arrays that may still be inside each other"""
        if schema is True:
            schema = {}
        need(isinstance(schema, dict), f"{where}: expected an object or true as a schema, found "
             f"{json.dumps(schema):.40}")
        said = schema.keys() - ANNOTATIONS
        for alone, compiled in ("$ref", self.reference), ("anyOf", self.any_of):
            if alone in said:
                need(said == {alone}, f"{where}: expected no keyword beside {alone}, found "
                     f"{', '.join(sorted(said - {alone}))}")
                return compiled(schema[alone], depth, where)
        kinds = self.kinds(schema, where)
        if said & {"enum", "const"}:
            return self.constants(schema, kinds, said, where)
        known = {"type"}.union(*(KEYWORDS.get(kind, ()) for kind in kinds))
        self.need_keywords(said - known, kinds, where)
        if not kinds:
            return any_value(depth)
        return union([self.of_type(kind, schema, depth, where) for kind in kinds], where)

    def kinds(self, schema, where):
        """The names in `type`"""
        kinds = schema.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        need(isinstance(kinds, list) and all(kind in TYPES for kind in kinds) and
             (kinds or "type" not in schema), f"{where}: type is "
             f"{json.dumps(schema.get('type')):.60}, expected {', '.join(TYPES)} or a list "
             f"of them")
        return [kind for kind in dict.fromkeys(kinds) if kind != "integer" or "number" not in kinds]

    def need_keywords(self, others, kinds, where):
        for name in sorted(others):
            types = [kind for kind, names in KEYWORDS.items() if name in names]
            need(not types or kinds, f"{where}: the keyword {name} needs "
                 f"\"type\": \"{''.join(types)}\"")
            raise UserError(f"{where}: the keyword {name} is not supported"
                            f"{' for this type' if types else ''}")

    def reference(self, name, depth, where):
        """The frame of a definition.  It must not contain itself, so every schema is finite."""
        need(isinstance(name, str) and name.startswith("#/"), f"{where}: $ref is "
             f"{json.dumps(name):.60}, expected a place in this schema, such as #/$defs/name")
        need(name not in self.open, f"{where}: {name} contains itself; expected a schema without "
             f"recursion")
        if (name, depth) not in self.known:
            place = self.root
            for key in name[2:].split("/"):
                key = key.replace("~1", "/").replace("~0", "~")
                need(isinstance(place, dict) and key in place, f"{where}: $ref is {name}, found no "
                     f"such place in the schema")
                place = place[key]
            self.open.add(name)
            self.known[name, depth] = self.value(place, depth, name)
            self.open.remove(name)
        return self.known[name, depth]

    def any_of(self, schemas, depth, where):
        need(isinstance(schemas, list) and schemas, f"{where}: anyOf: expected a list of schemas")
        return union([self.value(schema, depth, f"{where}/anyOf/{i}")
                      for i, schema in enumerate(schemas)], f"{where}/anyOf")

    def constants(self, schema, kinds, said, where):
        self.need_keywords(said - {"type", "enum", "const"}, kinds, where)
        values = schema.get("enum", [schema.get("const")])
        need(isinstance(values, list), f"{where}: enum: expected a list of values")
        if "const" in said:
            values = [value for value in values if encoded(value) == encoded(schema["const"])]
        need(all(map(json_type, values)), f"{where}: enum and const: expected strings, numbers, "
             f"true, false or null, found an object or array")
        allowed = {*(kinds or TYPES)} | ({"integer"} if "number" in kinds else set())
        values = [value for value in values if json_type(value) in allowed]
        need(values, f"{where}: no value of enum or const fits the schema")
        return words(*{encoded(value): 0 for value in values})

    def of_type(self, kind, schema, depth, where):
        if kind == "string":
            return choice((b'"', (Text(*self.limits(schema, "Length", where)),)))
        if kind in SCALARS:
            return SCALARS[kind]
        need(depth, f"{where}: expected at most {MOST_DEPTH} objects and arrays inside each other")
        if kind == "array":
            value = self.value(schema.get("items", {}), depth - 1, f"{where}/items")
            return opened(Array(value, *self.limits(schema, "Items", where)))
        return opened(self.object(schema, depth - 1, where))

    def limits(self, schema, name, where):
        least, most = schema.get(f"min{name}", 0), schema.get(f"max{name}", NO_LIMIT)
        need(type(least) is int and (type(most) is int or most == NO_LIMIT) and
             0 <= least <= most, f"{where}: expected whole numbers 0 <= min{name} <= max{name}, "
             f"found {least} and {most}")
        return least, most

    def object(self, schema, depth, where):
        others = schema.get("additionalProperties", "properties" not in schema)
        required = schema.get("required", [])
        need(isinstance(required, list), f"{where}: required: expected a list of names")
        if "properties" not in schema and others is not False:
            need(not required, f"{where}: required needs properties")
            return Map(self.value(others, depth, f"{where}/additionalProperties"))
        properties = schema.get("properties", {})
        need(others is False, f"{where}: additionalProperties beside properties: expected false, "
             f"found {json.dumps(others):.40}")
        need(isinstance(properties, dict) and len(properties) <= MOST_PROPERTIES,
             f"{where}: properties: expected an object with at most {MOST_PROPERTIES} names")
        unknown = [name for name in required if name not in properties]
        need(not unknown, f"{where}: required contains {json.dumps(unknown[:1])[1:-1]}, which is "
             f"not in properties")
        values = [self.value(value, depth, f"{where}/properties/{name}")
                  for name, value in properties.items()]
        return Record([*map(encoded, properties)], values,
                      [name in required for name in properties])


def compiled(schema):
    """The frame of the values that fit a schema, a JSON text or OBJECT; the bytes of its names"""
    if schema == OBJECT:
        return opened(Map(any_value(MOST_DEPTH - 1))), b""
    need(len(schema) <= LONGEST_SCHEMA, f"the JSON schema has {len(schema):,} characters, expected "
         f"at most {LONGEST_SCHEMA:,}; shorten it")
    with reading("the JSON schema", "correct the schema"):
        root = parse_json(schema)
        return Compiler(root).value(root, MOST_DEPTH, "#"), encoded(root)


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
    """{key: make(key)}, made at the first use, with a mask (V,) in each.  It is emptied when it is
    full."""

    def __init__(self, make, V):
        super().__init__()
        self.make, self.most = make, max(1, MASK_BYTES // V)

    def __missing__(self, key):
        if len(self) >= self.most:
            self.clear()
        found = self[key] = self.make(key)
        return found


class Trie:
    """The tokens of a vocabulary as a tree of their bytes.  Special tokens are not in it.
    children: of each node {byte: node}     ids: of each node the token that ends there, or -1"""

    def __init__(self, vocab, specials):
        self.children, self.ids, self.vocab = [{}], [-1], vocab
        self.longest = max(map(len, vocab))
        self.masks = Masks(self.new_mask, len(vocab))
        for token, text in enumerate(vocab):
            if token not in specials and text:
                self.add(token, text)

    def add(self, token, text):
        node = 0
        for byte in text:
            if byte not in self.children[node]:
                self.children[node][byte] = len(self.ids)
                self.children.append({})
                self.ids.append(-1)
            node = self.children[node][byte]
        self.ids[node] = token

    def walk(self, node, state, mask):
        """Sets mask (V,) at each token below a node whose remaining bytes the state reads.
        Returns the nodes at which the state is complete, so that a frame below it is next."""
        complete, waiting = [], [(node, state)]
        while waiting:
            node, state = waiting.pop()
            if is_complete(state):
                complete.append(node)
            for byte, child in self.children[node].items():
                after = after_byte(state, byte)
                if after is not None:
                    if self.ids[child] >= 0:
                        mask[self.ids[child]] = True
                    waiting.append((child, after))
        return complete

    def mask(self, state):
        """(V,) bool: the tokens that a state can read.  Most of the work depends on the top frame
        only, and is stored: a string has one mask, whatever it is in."""
        inside, complete = self.masks[state[0]]
        mask = inside.copy()
        for node in complete:
            self.walk(node, state[1:], mask)
        return mask

    def new_mask(self, frame):
        """(mask of the tokens inside a frame, the nodes at which the frame is complete)"""
        mask = np.zeros(len(self.vocab), bool)
        return mask, self.walk(0, (frame,), mask)


class Constraint:
    """The tokens that may come next, for each state of a reply.  It is shared by all replies with
    the same schema.     end: id of the token that ends a reply, or None"""

    def __init__(self, schema, trie, end):
        frame, names = compiled(schema)
        self.start, self.trie, self.end = (frame,), trie, end
        self.masks = Masks(self.new_mask, len(trie.vocab))
        # A reply is never stuck if each byte that may be needed is a token of its own.
        alone = {byte for byte, node in trie.children[0].items() if trie.ids[node] >= 0}
        needed = {*range(0x20, 0x7F), *range(0x80, 0xC0), *names}
        need(needed <= alone, f"JSON needs {len(needed - alone)} bytes that are no tokens of this "
             f"model; use another model")

    def mask(self, state):
        """(V,) bool: the tokens that may follow in this state"""
        return self.masks[self.nearest(state)]

    def new_mask(self, state):
        mask = self.trie.mask(state)
        if self.end is not None and is_complete(state):
            mask[self.end] = True
        return mask

    def nearest(self, state):
        """A state with the same mask: no token reaches a limit of a string that is far away."""
        top = state[0]
        if not isinstance(top, Text) or not (top.least or top.most < NO_LIMIT):
            return state
        longest = self.trie.longest
        most = min(top.most, longest) if top.most < NO_LIMIT else NO_LIMIT
        return Text(min(top.least, longest), most), *state[1:]

    def after(self, state, token):
        """The state after a token that its mask allows; () if the value is complete and nothing
        can follow"""
        return after_bytes(state, self.trie.vocab[token])


@lru_cache(maxsize=4)
def trie_of(tokenizer):
    return Trie(tokenizer.vocab, set(tokenizer.specials.values()))


@lru_cache(maxsize=16)
def constraint(schema, tokenizer, end):
    return Constraint(schema, trie_of(tokenizer), end)
