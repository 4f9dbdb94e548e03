"""JSON schemas as frames of json_frames.py.

A frame accepts a part of the values that a schema allows, never more.  Where JSON Schema leaves
something open, the replies are narrower: names come in the order of `properties`, and a name that
no keyword mentions is written only if `additionalProperties` allows it.  A schema that needs more
than the automaton can hold is rejected; the error names the keyword and its place.

`Compiler.value` reads a schema in two steps:
1. `flat` resolves $ref and allOf.  The result is one plain schema and a list of choices (anyOf,
   oneOf, and what `dependencies` mean).  A choice becomes the union of its alternatives, each
   merged with the plain schema.
2. The plain schema becomes the union of one frame for each type.

`Impossible` is the schema of no value, such as an object beyond the greatest depth.  An alternative
or an optional property that is impossible is left out."""
import re
from fractions import Fraction
from math import ceil, floor
from urllib.parse import unquote

from bpe import UserError
from nanoeuler_parts.files.texts import json_beginning
from nanoeuler_parts.chat.json_frames import (
    accepts, alternatives, any_value, Array, choice, encoded, MOST_DEPTH, MOST_DIGITS,
    MOST_LIVE as MOST_ALTERNATIVES, NO_LIMIT, number_between, opened, other_name, Record, SCALARS,
    STRING, Text, union, words,
)
from nanoeuler_parts.chat.json_pattern import FORMATS, matching

LONGEST_SCHEMA = 1 << 17         # bytes, as compact JSON
MOST_STEPS = 200_000             # of the preparation of one schema, about 1 us each
MOST_PROPERTIES = 256            # of one object
MOST_DECIMALS = 6                # of a number with minimum or maximum
ARRAY_INDEX = re.compile("0|[1-9][0-9]{0,8}")
MOST_NESTED = 20                 # anyOf and oneOf inside each other, within one object or array
PIECE = 2000                     # steps between two calls of `alive`
# Steps of the larger pieces of the work, by their time.  A comparison, or a byte that one
# alternative reads, is one step.
FOR_PART, FOR_MERGE = 20, 70     # a part of a schema; its keywords, in one form
FOR_CONSTANT = 6                 # compared with one part of a schema

TYPES = "array", "object", *SCALARS
# Keywords by the type that they restrict.  Without `type`, they imply it.
KEYWORDS = {
    "object": {"properties", "required", "additionalProperties", "patternProperties",
               "propertyNames", "minProperties", "maxProperties"},
    "array": {"items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"},
    "string": {"minLength", "maxLength", "pattern"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}}
COMBINING = {"$ref", "allOf", "anyOf", "oneOf", "dependencies", "dependentRequired",
             "dependentSchemas"}
# Keywords of all drafts that restrict the values and are not supported.  All others are notes.
UNSUPPORTED = {"not", "if", "contains", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef",
               "$recursiveRef", "extends", "disallow", "divisibleBy"}
READ = {"type", "enum", "const", "format"}.union(COMBINING, UNSUPPORTED, *KEYWORDS.values())


DRAFTS = {"draft-03": 3, "draft-04": 4, "draft-06": 6, "draft-07": 7, "2019-09": 8, "2020-12": 9}
# The draft that introduced a keyword, for those that are not in all drafts
SINCE = {**dict.fromkeys(("allOf", "anyOf", "oneOf", "not", "minProperties", "maxProperties",
                          "multipleOf"), 4),
         **dict.fromkeys(("const", "contains", "propertyNames"), 6), "if": 7,
         **dict.fromkeys(("dependentRequired", "dependentSchemas", "unevaluatedItems",
                          "unevaluatedProperties"), 8), "prefixItems": 9}


def draft_of(schema):
    """The number of the draft that $schema names, the latest without it"""
    said = schema.get("$schema") if isinstance(schema, dict) else None
    return next((n for name, n in DRAFTS.items() if isinstance(said, str) and name in said), 9)


def is_whole(x):
    return (type(x) is int or type(x) is float and x.is_integer()) and x >= 0


def is_number(x):
    return type(x) in (int, float)


def is_schema(x):
    return isinstance(x, (dict, bool))


def is_names(x):
    return isinstance(x, list) and all(isinstance(name, str) for name in x)


def is_types(x):
    kinds = [x] if isinstance(x, str) else x
    return (isinstance(kinds, list) and 1 <= len(kinds) <= len(TYPES) and
            all(kind in TYPES for kind in kinds))


def map_to(is_value):
    return lambda x: isinstance(x, dict) and all(map(is_value, x.values()))


# What a keyword must contain: {keyword: (a description, a function of the value)}
VALUES = {
    "$ref": ("a text", lambda x: isinstance(x, str)),
    "type": (f"{', '.join(TYPES)} or a list of them", is_types),
    "enum": ("a list of values", lambda x: isinstance(x, list)),
    "required": ("a list of names", is_names),
    "uniqueItems": ("true or false", lambda x: isinstance(x, bool)),
    "dependencies": ("an object of lists of names or schemas",
                     map_to(lambda x: is_names(x) or is_schema(x))),
    "dependentRequired": ("an object of lists of names", map_to(is_names)),
    "items": ("a schema or a list of schemas", lambda x: is_schema(x) or isinstance(x, list)),
    **dict.fromkeys(("pattern", "format"), ("a text", lambda x: isinstance(x, str))),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), (
        "a list of schemas", lambda x: isinstance(x, list) and bool(x))),
    **dict.fromkeys(("properties", "patternProperties", "dependentSchemas"), (
        "an object of schemas", map_to(is_schema))),
    **dict.fromkeys(("additionalProperties", "additionalItems", "propertyNames"), (
        "a schema", is_schema)),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), (
        "a number", is_number)),
    **dict.fromkeys((side + name for side in ("min", "max")
                     for name in ("Items", "Length", "Properties")), (
        "a whole number of at least 0", is_whole))}


def need(ok, message):
    """bpe.need, whose message may also be a function that returns it: a message that shows a part
    of the schema takes longer to make than the check, which most parts pass."""
    if not ok:
        raise UserError(message() if callable(message) else message)


def members(value):
    """The number of members of a keyword's value, with those of the lists within an object"""
    if not isinstance(value, list | dict):
        return 0
    lists = value.values() if isinstance(value, dict) else ()
    return len(value) + sum(len(x) for x in lists if isinstance(x, list))


class Impossible(UserError):
    """No value fits, or none that is within the limits."""


class Budget:
    """Counts the steps of a preparation.  alive: called between pieces of the work, may raise"""

    def __init__(self, alive):
        self.alive, self.steps, self.next = alive, 0, PIECE

    def spend(self, n):
        self.steps += n
        if self.steps >= self.next:
            need(self.steps <= MOST_STEPS, f"expected a schema that needs at most {MOST_STEPS:,} "
                 f"steps to prepare, found more; shorten its patterns, or use fewer parts, "
                 f"constants and alternatives")
            self.next = self.steps + PIECE
            self.alive()


def shown(value):
    return json_beginning(value, 60)


def type_of(value):
    """The JSON type of a constant"""
    return {str: "string", bool: "boolean", int: "integer", float: "number", list: "array",
            dict: "object", type(None): "null"}[type(value)]


def same(value):
    """A key that two values share if JSON Schema calls them equal: 1 and 1.0, but not true, and
    objects with their names in any order"""
    if isinstance(value, dict):
        return "object", frozenset((name, same(x)) for name, x in value.items())
    if isinstance(value, list):
        return "array", tuple(map(same, value))
    kind = type_of(value)
    return "number" if kind == "integer" else kind, value


def within(n, schema, name):
    """Is a number within the limits of a schema?     name: "Items", "Length" or "Properties" """
    return schema.get(f"min{name}", 0) <= n <= schema.get(f"max{name}", NO_LIMIT)


def apart(a, b, kind):
    """Do the limits of two plain schemas for a type leave no value in common?"""
    name = {"string": "Length", "array": "Items", "object": "Properties"}.get(kind)
    if name:
        least = max(schema.get(f"min{name}", 0) for schema in (a, b))
        return any(least > schema.get(f"max{name}", NO_LIMIT) for schema in (a, b))
    if kind not in ("integer", "number"):
        return False
    low = max(schema.get(name, -NO_LIMIT) for schema in (a, b)
              for name in ("minimum", "exclusiveMinimum"))
    high = min(schema.get(name, NO_LIMIT) for schema in (a, b)
               for name in ("maximum", "exclusiveMaximum"))
    excluded = any(schema.get("exclusiveMinimum") == low or schema.get("exclusiveMaximum") == high
                   for schema in (a, b))
    return low > high or low == high and excluded


def items_of(schema):
    """(the schemas of the first items of an array, the schema of all others)"""
    items = schema.get("items", {})
    if isinstance(items, list):
        return items, schema.get("additionalItems", {})
    return schema.get("prefixItems", []), items


def kinds_of(schema):
    """The types that a plain schema allows, as a set"""
    kinds = schema.get("type")
    if kinds is None:
        return {kind for kind, names in KEYWORDS.items() if names & schema.keys()}
    return {kinds} if isinstance(kinds, str) else {*kinds}


# ---- merging, for allOf
def both_types(a, b, where):
    a, b = ([x] if isinstance(x, str) else x for x in (a, b))
    found = [x for x in a if x in b or x == "integer" and "number" in b]
    return found + [x for x in b if x == "integer" and "number" in a and x not in found]


def both_schemas(a, b, where):
    return a if a == b else {"allOf": [a, b]}


def both_values(a, b, where):
    others = {*map(same, b)}
    return [value for value in a if same(value) in others]


def equal(a, b, where):
    need(a == b, lambda: f"{where}: two schemas that hold together have the values {shown(a)} and "
         f"{shown(b)} of one keyword, which is not supported")
    return a


def larger(a, b, where):
    return max(a, b)


def smaller(a, b, where):
    return min(a, b)


MERGES = {"type": both_types, "enum": both_values, "items": both_schemas,
          "propertyNames": both_schemas, "additionalProperties": both_schemas,
          "required": lambda a, b, where: [*dict.fromkeys([*a, *b])],
          "format": lambda a, b, where: a,
          **dict.fromkeys(("minItems", "minLength", "minProperties", "minimum", "exclusiveMinimum"),
                          larger),
          **dict.fromkeys(("maxItems", "maxLength", "maxProperties", "maximum", "exclusiveMaximum"),
                          smaller)}


def merged(a, b, where):
    """The plain schema of the values that fit the plain schemas a and b"""
    if not a or not b:
        return a or b
    found = {**a, **b}
    for name in a.keys() & b.keys() - {"properties"}:
        found[name] = MERGES.get(name, equal)(a[name], b[name], where)
    properties = {}
    for mine, other in (a, b), (b, a):
        need(not ("prefixItems" in mine and "items" in other), f"{where}: prefixItems beside a "
             f"schema with items is not supported")
        rest, patterns = other.get("additionalProperties", True), "patternProperties"
        need(rest is True or patterns not in mine and
             not ("properties" in mine and patterns in other), f"{where}: {patterns} beside a "
             f"schema with additionalProperties is not supported")
        for name, schema in mine.get("properties", {}).items():
            theirs = other.get("properties", {}).get(name, rest)
            if name not in properties:
                properties[name] = schema if theirs is True else both_schemas(schema, theirs, where)
    return {**found, "properties": properties} if properties else found


def constants_as_one(name, schemas):
    """The alternatives of anyOf or oneOf, with those that are only constants as one enum"""
    enums, others = [], []
    for schema in schemas:
        said = {} if not isinstance(schema, dict) else {
            key: schema[key] for key in schema.keys() & READ}
        if said.keys() == {"const"}:
            enums.append([said["const"]])
        elif said.keys() == {"enum"} and isinstance(said["enum"], list):
            enums.append(said["enum"])
        else:
            others.append(schema)
    values = [value for enum in enums for value in enum]
    if name == "oneOf" and (others or any(type_of(x) not in SCALARS for x in values) or
                            len({(x, type_of(x) == "boolean") for x in values}) < len(values)):
        return schemas
    return [{"enum": values}, *others] if len(enums) > 1 else schemas


# ---- schemas
class Compiler:
    """Turns a schema into the frame of its values.  where: the place in the schema, for errors"""

    def __init__(self, root, alive):
        self.root, self.spend, self.draft = root, Budget(alive).spend, draft_of(root)
        self.nested = {}                     # {depth: the choices that are open at this depth}
        self.known = {}                      # {($ref, depth): frame or Impossible}
        self.open = set()                    # the ($ref, depth) that are being compiled
        self.following = []                  # the $refs that `flat` is resolving
        self.sizes = {}                      # {id of a list of constants: (the list, steps)}
        self.patterns = {}                   # {(pattern, least, most): frame}

    def value(self, schema, depth, where):
        """depth: the objects and arrays that may still be inside each other"""
        self.spend(FOR_PART)
        if isinstance(schema, dict) and isinstance(schema.get("$ref"), str) and (
                self.draft <= 7 or schema.keys() & READ == {"$ref"}):
            self.need_no_base(schema, where)
            return self.reference(schema["$ref"], depth, where)
        plain, choices = self.flat(schema, where)
        if "enum" in plain:
            return self.enumerated(plain, choices, where)
        if choices:
            return self.chosen(plain, choices, depth, where)
        return self.plain(plain, depth, where)

    def reference(self, name, depth, where):
        """The frame of a definition.  One that contains itself ends at the greatest depth."""
        key = name, depth
        schema = self.at(name, where)
        need(key not in self.open, f"{where}: {name} contains itself without an object or array "
             f"between; expected a schema that ends")
        if key not in self.known:
            self.open.add(key)
            try:
                self.known[key] = self.value(schema, depth, name)
            except Impossible as e:
                self.known[key] = e
            finally:
                self.open.remove(key)
        if isinstance(self.known[key], Impossible):
            raise self.known[key]
        return self.known[key]

    def at(self, name, where):
        """The schema at a $ref"""
        need(name == "#" or name.startswith("#/"), lambda: f"{where}: $ref is {shown(name)}, "
             f"expected a place in this schema, such as #/$defs/name")
        place = self.root
        self.spend(5 + len(name) // 10)
        for key in unquote(name[2:]).split("/") if len(name) > 1 else ():    # RFC 6901, 4 and 6
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(place, list) and ARRAY_INDEX.fullmatch(key) and int(key) < len(place):
                place = place[int(key)]
            else:
                need(isinstance(place, dict) and key in place, f"{where}: $ref is {name}, found no "
                     f"such place in the schema")
                place = place[key]
            self.need_no_base(place, where)
        return place

    def need_schema(self, schema, where):
        need(isinstance(schema, dict), lambda: f"{where}: expected an object, true or false as a "
             f"schema, found {shown(schema)}")
        self.need_no_base(schema, where)

    def need_no_base(self, schema, where):
        """Within a schema that has an address of its own, $ref means other places, and its $schema
        would change the meaning of keywords."""
        if isinstance(schema, dict) and schema is not self.root:
            need(not isinstance(schema.get("$schema"), str) or draft_of(schema) == self.draft,
                 lambda: f"{where}: $schema is {shown(schema.get('$schema'))} in a part of a "
                 f"schema of another draft, which is not supported; remove it")
            for name in "$id", "id":
                base = schema.get(name)
                need(not isinstance(base, str) or base.startswith("#") or not self.has_ref(schema),
                     lambda: f"{where}: {name} is {shown(base)} in a part of the schema that "
                     f"contains a $ref, which is not supported; remove the {name}")

    def has_ref(self, schema):
        waiting = [schema]
        while waiting:
            self.spend(1)
            x = waiting.pop()
            if isinstance(x, dict) and isinstance(x.get("$ref"), str):
                return True
            waiting += x.values() if isinstance(x, dict) else x if isinstance(x, list) else ()
        return False

    def size_of(self, constants):
        """The steps for writing constants as JSON.  The sum is stored for each list."""
        if id(constants) not in self.sizes:
            self.sizes[id(constants)] = constants, sum(
                6 + len(encoded(value)) // 8 for value in constants)
        return self.sizes[id(constants)][1]

    # ---- 1. $ref, allOf and choices
    def flat(self, schema, where):
        """(a plain schema without $ref, allOf, anyOf and oneOf; a list of choices, each the name
        and the list of its alternatives)"""
        self.spend(FOR_MERGE)
        if schema is True:
            return {}, []
        if schema is False:
            raise Impossible(f"{where}: no value fits false")
        self.need_schema(schema, where)
        plain, choices = self.checked(schema, where), []
        parts = []                           # (schema, where), which hold as well
        if "$ref" in plain:
            name = plain.pop("$ref")
            need(name not in self.following, f"{where}: {name} contains itself without an object "
                 f"or array between; expected a schema that ends")
            self.following.append(name)
            parts.append(self.flat(self.at(name, where), name))
            self.following.pop()
        for i, part in enumerate(plain.pop("allOf", ())):
            parts.append(self.flat(part, f"{where}/allOf/{i}"))
        for name in "anyOf", "oneOf":
            if name in plain:
                choices.append((name, plain.pop(name)))
        choices += self.dependencies(plain, where)
        for other, more in parts:
            for one in plain, other:
                self.spend(10 + 2 * len(one.get("properties", ())) + len(one.get("required", ())) +
                           self.size_of(one.get("enum", ())))
            plain = merged(plain, other, where)
            choices += more
        return plain, choices

    def checked(self, schema, where):
        """The keywords of a schema that can change an answer, in one form for all drafts"""
        plain = {name: value for name, value in schema.items() if name in READ}
        if self.draft <= 7 and "$ref" in plain:          # it replaces all keywords beside it
            plain = {"$ref": plain["$ref"]}
        for name in sorted(plain.keys() & UNSUPPORTED):
            raise UserError(f"{where}: the keyword {name} is not supported")
        for name, value in plain.items():
            need(SINCE.get(name, 0) <= self.draft, lambda: f"{where}: the keyword {name} is not in "
                 f"the draft of JSON Schema that $schema names, "
                 f"{shown(self.root.get('$schema'))}")
            if name.startswith("exclusive") and (self.draft <= 4 or "$schema" not in self.root):
                need(isinstance(value, bool) or self.draft > 4 and is_number(value),
                     lambda: f"{where}: {name} is {shown(value)}, expected true or false in draft "
                     f"4, and a number in later ones")
            elif name in VALUES:
                expected, fits = VALUES[name]
                self.spend(members(value) // 4)
                need(fits(value), lambda: f"{where}: {name} is {shown(value)}, expected "
                     f"{expected}")
                if type(value) is float and fits is is_whole:
                    plain[name] = int(value)
        if "const" in plain:
            plain = merged(plain, {"enum": [plain.pop("const")]}, where)
        for side in "Minimum", "Maximum":    # draft 4: true beside minimum
            if isinstance(plain.get(f"exclusive{side}"), bool):
                exclusive, limit = plain.pop(f"exclusive{side}"), plain.pop(side.lower(), None)
                if limit is not None:
                    plain[f"exclusive{side}" if exclusive else side.lower()] = limit
        if not plain.get("uniqueItems"):
            plain.pop("uniqueItems", None)
        return plain

    def limits(self, schema, name, where):
        least, most = schema.get(f"min{name}", 0), schema.get(f"max{name}", NO_LIMIT)
        if least > most:
            raise Impossible(f"{where}: expected whole numbers 0 <= min{name} <= max{name}, found "
                             f"{least} and {most}")
        return least, most

    def dependencies(self, plain, where):
        """Choices: a name is not written, or what depends on it holds"""
        found = []
        for keyword in "dependencies", "dependentRequired", "dependentSchemas":
            for name, then in plain.pop(keyword, {}).items():
                then = {"required": then} if isinstance(then, list) else then
                found.append(("anyOf", [{"properties": {name: False}}, then]))
        return found

    def chosen(self, plain, choices, depth, where):
        """The union of the alternatives of the first choice, each with all that holds besides"""
        (name, schemas), *others = choices
        others = [{kind: alternatives} for kind, alternatives in others]
        level = self.nested[depth] = self.nested.get(depth, 0) + 1
        need(level <= MOST_NESTED, f"{where:.40}: {name}: found more than {MOST_NESTED} anyOf and "
             f"oneOf inside each other, or a schema that contains itself without an object or "
             f"array between; expected a schema that ends")
        try:
            return self.union_of(name, schemas, plain, others, depth, where)
        finally:
            self.nested[depth] -= 1

    def union_of(self, name, schemas, plain, others, depth, where):
        self.spend(3 * len(schemas))
        if self.draft >= 6:                  # const is younger
            schemas = constants_as_one(name, schemas)
        need(len(schemas) <= MOST_ALTERNATIVES, f"{where}: {name}: expected at most "
             f"{MOST_ALTERNATIVES} alternatives, found {len(schemas):,}")
        schemas = [{"allOf": [plain, schema]} for schema in schemas]
        if name == "oneOf":
            schemas = self.exclusive(schemas, where)
        frames, problem = [], None
        for i, schema in enumerate(schemas):
            try:
                frames.append(self.value({"allOf": [schema, *others]}, depth,
                                         f"{where}/{name}/{i}"))
            except Impossible as e:
                problem = problem or e
        if not frames:
            raise problem
        found = union(frames)
        need(alternatives((found,)) <= MOST_ALTERNATIVES, f"{where}: {name}: expected at most "
             f"{MOST_ALTERNATIVES} alternatives, with those inside of alternatives, found "
             f"{alternatives((found,)):,}")
        return found

    # ---- oneOf
    def exclusive(self, schemas, where):
        """The alternatives of oneOf, such that no value fits two of them.  If one requires a name
        that another does not require, then the other does not write it."""
        flats = []
        for i, schema in enumerate(schemas):
            try:
                flats.append((i, schema, *self.flat(schema, where)))
            except Impossible:
                pass
        found = []
        for i, schema, a, choices in flats:
            parts = [schema]
            is_object = kinds_of(a) == {"object"} and ("type" in a or not choices)
            for j, _, b, _ in flats:
                if i == j or self.disjoint(a, b, 0):
                    continue
                mine = a.get("required", ())
                names = [name for name in b.get("required", ()) if name not in mine]
                need(is_object and names, f"{where}: oneOf: the alternatives {min(i, j)} and "
                     f"{max(i, j)} may fit the same value; use anyOf, or a required property that "
                     f"has other constants in each alternative")
                parts.append({"properties": {names[0]: False}})
            found.append({"allOf": parts})
        need(found, f"{where}: oneOf: no alternative is possible")
        return found

    def disjoint(self, a, b, level):
        """Is it certain that no value fits the plain schemas a and b?"""
        self.spend(10)
        if "enum" in a and "enum" in b:
            self.spend(2 * (len(a["enum"]) + len(b["enum"])))
            return not both_values(a["enum"], b["enum"], "")
        for one, other in (a, b), (b, a):
            if "enum" in one:
                return not any(self.fits_checked(value, other, "") for value in one["enum"])
        if "type" not in a or "type" not in b:
            return False
        kinds = {*both_types(a["type"], b["type"], "")}
        if all(apart(a, b, kind) for kind in kinds):
            return True
        if kinds != {"object"} or level > 3:
            return False
        mine, theirs = a.get("properties", {}), b.get("properties", {})
        for name in {*a.get("required", ()), *b.get("required", ())}:
            if name in mine and name in theirs:
                try:
                    x, y = self.flat(mine[name], "")[0], self.flat(theirs[name], "")[0]
                except Impossible:
                    return True
                if self.disjoint(x, y, level + 1):
                    return True
            for one, other in (a, b), (b, a):
                if (name in one.get("required", ()) and name not in other.get("properties", {}) and
                        other.get("additionalProperties") is False and
                        "patternProperties" not in other):
                    return True
        return False

    # ---- 2. plain schemas
    def plain(self, schema, depth, where):
        kinds = kinds_of(schema)
        if "type" not in schema and not kinds:
            return any_value(depth)
        frames, problem = [], Impossible(f"{where}: no type fits")
        for kind in TYPES:                   # integer comes last, and only without number
            if kind in kinds and not (kind == "integer" and "number" in kinds):
                try:
                    frames.append(self.of_type(kind, schema, depth, where))
                except Impossible as e:
                    problem = e
        if not frames:
            raise problem
        return union(frames)

    def enumerated(self, schema, choices, where):
        """The frame of the constants of enum or const that fit the other keywords and choices"""
        self.spend(self.size_of(schema["enum"]))
        others = {name: value for name, value in schema.items() if name != "enum"}
        rules = [others] * bool(others) + [{name: schemas} for name, schemas in choices]
        texts = {encoded(value): 0 for value in schema["enum"]
                 if all(self.fits_checked(value, rule, where) for rule in rules)}
        if not texts:
            raise Impossible(f"{where}: no value of enum or const fits the schema")
        return words(*texts)

    # ---- constants.  `format` says nothing about them, and no keyword implies a type
    def fits(self, value, schema, where):
        """Does a constant fit a schema?"""
        if isinstance(schema, bool):
            return schema
        self.spend(FOR_PART)
        self.need_schema(schema, where)
        return self.fits_checked(value, self.checked(schema, where), where)

    def fits_checked(self, value, plain, where):
        """Does a constant fit a schema with keywords as in `checked`?"""
        self.spend(FOR_CONSTANT)

        def each(name):
            return (self.fits(value, schema, f"{where}/{name}/{i}")
                    for i, schema in enumerate(plain[name]))

        if "$ref" in plain and not self.fits(value, self.at(plain["$ref"], where), plain["$ref"]):
            return False
        if not ("allOf" not in plain or all(each("allOf"))):
            return False
        if not ("anyOf" not in plain or any(each("anyOf"))):
            return False
        if not ("oneOf" not in plain or sum(each("oneOf")) == 1):
            return False
        for name, schemas in self.dependencies({**plain}, where):
            if not self.fits_checked(value, {name: schemas}, where):
                return False
        if "enum" in plain:
            self.spend(self.size_of(plain["enum"]))
            if not both_values([value], plain["enum"], where):
                return False
        return self.has_type(value, plain) and self.fits_limits(value, plain, where)

    def has_type(self, value, plain):
        kinds, kind = kinds_of({"type": plain.get("type", [*TYPES])}), type_of(value)
        whole = kind == "number" and value.is_integer() and self.draft >= 6      # 1.0
        return kind in kinds or kind == "integer" and "number" in kinds or (
            whole and "integer" in kinds)

    def fits_limits(self, value, plain, where):
        """Do the keywords of KEYWORDS for the type of a constant hold?"""
        if isinstance(value, str):
            return within(len(value), plain, "Length") and ("pattern" not in plain or accepts(
                self.matching(plain["pattern"], where), encoded(value), self.spend))
        if is_number(value):
            step = plain.get("multipleOf", 1)
            need(step > 0, lambda: f"{where}: multipleOf is {shown(step)}, expected more than 0")
            return (plain.get("minimum", value) <= value <= plain.get("maximum", value)
                    and plain.get("exclusiveMinimum", -NO_LIMIT) < value
                    and value < plain.get("exclusiveMaximum", NO_LIMIT)
                    and ("multipleOf" not in plain
                         or Fraction(repr(value)) % Fraction(repr(step)) == 0))
        if isinstance(value, list):
            return within(len(value), plain, "Items") and self.fits_items(value, plain, where)
        if isinstance(value, dict):
            return (within(len(value), plain, "Properties")
                    and {*plain.get("required", ())} <= value.keys()
                    and all(self.fits_member(name, x, plain, where) for name, x in value.items()))
        return True

    def fits_items(self, value, plain, where):
        first, rest = items_of(plain)
        return (not plain.get("uniqueItems") or len({*map(same, value)}) == len(value)) and all(
            self.fits(x, first[i] if i < len(first) else rest, f"{where}/items")
            for i, x in enumerate(value))

    def fits_member(self, name, value, plain, where):
        """Does a name of a constant object, with its value, fit?"""
        text = encoded(name)
        parts = [plain["properties"][name]] if name in plain.get("properties", ()) else []
        for pattern, part in plain.get("patternProperties", {}).items():
            if accepts(self.matching(pattern, f"{where}/patternProperties"), text, self.spend):
                parts.append(part)
        if not parts:
            parts.append(plain.get("additionalProperties", True))
        return self.fits(name, plain.get("propertyNames", True), f"{where}/propertyNames") and all(
            self.fits(value, part, f"{where}/properties/{name}") for part in parts)

    def too_deep(self, where):
        return f"{where}: expected at most {MOST_DEPTH} objects and arrays inside each other"

    def of_type(self, kind, schema, depth, where):
        if kind == "string":
            return self.string(schema, where)
        if kind in ("number", "integer"):
            return self.number(kind, schema, where)
        if kind in SCALARS:
            return SCALARS[kind]
        if not depth:
            raise Impossible(self.too_deep(where))
        make = self.array if kind == "array" else self.object
        return opened(make(schema, depth - 1, where))

    def string(self, schema, where):
        least, most = self.limits(schema, "Length", where)
        pattern, limited = schema.get("pattern"), least > 0 or most < NO_LIMIT
        if pattern is None and not limited:
            pattern = FORMATS.get(str(schema.get("format")))
        if pattern is None:
            return choice((b'"', (Text(least, most),))) if limited else STRING
        return self.matching(pattern, where, least, most)

    def matching(self, pattern, where, least=0, most=NO_LIMIT):
        key = pattern, least, most
        if key not in self.patterns:
            self.patterns[key] = matching(pattern, where, self.spend, least, most)
        return self.patterns[key]

    def number(self, kind, schema, where):
        step = schema.get("multipleOf", 1 if kind == "integer" else None)
        need(step is None or kind == "integer" and step == 1, f"{where}: the keyword multipleOf is "
             f"not supported")
        said = {name: schema[name] for name in schema.keys() & KEYWORDS["number"]}
        said.pop("multipleOf", None)
        if not said:
            return SCALARS[kind]
        decimals = 0
        if kind == "number":
            # All numbers with at most 15 digits are different floats, so rounding cannot turn a
            # number within an exclusive limit into the limit.
            digits = max(len(str(abs(int(limit)))) for limit in said.values())
            decimals = max(0, min(MOST_DECIMALS, 15 - digits))
        unit = 10 ** decimals
        most = 10 ** MOST_DIGITS * unit - 1
        low, high = -most, most
        for name, limit in said.items():
            limit = Fraction(repr(limit)) * unit
            exclusive = name.startswith("exclusive")
            if name.lower().endswith("minimum"):
                low = max(low, floor(limit) + 1 if exclusive else ceil(limit))
            else:
                high = min(high, ceil(limit) - 1 if exclusive else floor(limit))
        if low > high:
            raise Impossible(f"{where}: no number of at most {MOST_DIGITS} digits is between "
                             f"minimum and maximum")
        return number_between(low, high, decimals)

    def optional(self, schema, depth, where):
        """The frame of a part that may be left out, or None if it is impossible"""
        try:
            return self.value(schema, depth, where)
        except Impossible:
            return None

    def array(self, schema, depth, where):
        least, most = self.limits(schema, "Items", where)
        first, rest = items_of(schema)
        need(not schema.get("uniqueItems") or most <= 1, f"{where}: the keyword uniqueItems is "
             f"not supported, except for at most one item")
        frames = []
        for i, part in enumerate(first):
            frame = self.optional(part, depth, f"{where}/{i}")
            if frame is None:
                rest = False
                break
            frames.append(frame)
        value = self.optional(rest, depth, f"{where}/items") if most > len(frames) else None
        if value is None and least > len(frames):
            self.value(rest, depth, f"{where}/items")        # raises Impossible
            raise Impossible(f"{where}: expected at most {len(frames)} items, the limit of the "
                             f"schema, found minItems {least}")
        return Array(value, least, most, frames)

    def object(self, schema, depth, where):
        """The Record of an object.  A name that is not in `properties` is written if it is required
        or if additionalProperties or patternProperties ask for it."""
        properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        rest = schema.get("additionalProperties", True)
        asked = "additionalProperties" in schema or not properties
        required = dict.fromkeys(schema.get("required", ()))
        least, most = self.limits(schema, "Properties", where)
        need(len(properties) <= MOST_PROPERTIES and len(required) <= MOST_PROPERTIES,
             f"{where}: properties: expected an object with at most {MOST_PROPERTIES} names")
        patterns = {self.matching(pattern, f"{where}/patternProperties"): part
                    for pattern, part in patterns.items()}
        # The frames of patterns are exact for these names, and a part of what fits for others.
        need(not patterns or all(name.isascii() and name.isprintable()
                                 for name in [*properties, *required]),
             f"{where}: patternProperties beside names that are not ASCII is not supported")
        name_frame = None
        if "propertyNames" in schema:
            name_frame = self.optional({"allOf": [{"type": "string"}, schema["propertyNames"]]},
                                       depth, f"{where}/propertyNames")
        names, values = [], []
        for name in dict.fromkeys([*properties, *required]):
            text = encoded(name)
            parts = [part for frame, part in patterns.items() if accepts(frame, text, self.spend)]
            if name in properties or not parts:
                parts.insert(0, properties.get(name, rest))
            value = self.optional(parts[0] if len(parts) == 1 else {"allOf": parts}, depth,
                                  f"{where}/properties/{name}")
            if "propertyNames" in schema and not (
                    name_frame and accepts(name_frame, text, self.spend)):
                value = None
            if value is None and name in required:
                self.value({"allOf": parts}, depth, f"{where}/properties/{name}")
                raise Impossible(f"{where}: required contains {shown(name)}, which the schema does "
                                 f"not allow")
            if value is not None:
                names.append(text)
                values.append(value)
        required = {*map(encoded, required)}
        required = [text in required for text in names]
        other = None
        if asked and most == NO_LIMIT:
            other = self.other(schema, [*properties, *schema.get("required", ())], patterns,
                               name_frame, depth, where)
        need(names or not asked or most in (0, NO_LIMIT), f"{where}: maxProperties needs "
             f"properties")
        need(len(names) <= most and least <= max(1, sum(required)), f"{where}: expected "
             f"minProperties of at most 1, or the number of required names, and maxProperties of "
             f"at least the number of properties, {len(names)}")
        empty = least > 0 and not any(required)
        if empty and not names and not other:
            raise Impossible(f"{where}: minProperties is {least}, and no name is allowed")
        return Record(names, values, required, other, int(empty))

    def other(self, schema, listed, patterns, name_frame, depth, where):
        """(frame of a name that is not listed, frame of its value), or None"""
        if patterns or "propertyNames" in schema:
            if listed:
                return None
            need(not (patterns and "propertyNames" in schema), f"{where}: the keyword "
                 f"propertyNames beside patternProperties is not supported")
        rest, frame = schema.get("additionalProperties", True), name_frame
        if patterns:
            frames, parts = [*patterns], [*patterns.values()]
            need(all(part == parts[0] for part in parts), f"{where}: patternProperties: expected "
                 f"one schema for all patterns, found several")
            rest, frame = parts[0], union(frames)
        elif "propertyNames" not in schema:
            frame = other_name([*map(encoded, listed)])
        value = frame and self.optional(rest, depth, f"{where}/additionalProperties")
        return value and (frame, value)


def compiled(root, alive):
    """The frame of the values that fit a schema, a value of JSON.
    alive: function() that is called after every PIECE steps.  It may raise an error, which ends
    the work."""
    try:
        return Compiler(root, alive).value(root, MOST_DEPTH, "#")
    except RecursionError:
        raise UserError("too many parts are inside each other, or one contains itself without an "
                        "object or array between; expected a schema that ends") from None
