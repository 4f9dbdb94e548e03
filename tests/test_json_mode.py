"""JSON mode: what the automaton accepts, the masks of tokens, replies, schemas that are refused."""
import contextlib
import datetime
import ipaddress
import itertools
import json
import math
import random
import sys
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from helpers import ROOT, TINY, drawn, needs, never, random_flat, refused, run, some, told
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from models import write
from servers import chat_model, post, serving

import nanoeuler as ne
from nanoeuler_parts.chat import json_frames, json_mode, json_schema
from nanoeuler_parts.chat.json_frames import encoded
from nanoeuler_parts.chat.json_mode import after_bytes, compiled, Constraint, is_complete, Trie
from nanoeuler_parts.chat.json_schema import same
from nanoeuler_parts.checkpoint.bundled import SHIPPED
from nanoeuler_parts.files.texts import json_beginning

pytestmark = pytest.mark.unit


def record(required=(), **properties):
    return {"type": "object", "properties": properties, "required": [*required],
            "additionalProperties": False}


WHO = record(["name"], name={"type": "string", "maxLength": 20}, kind={"const": "cat"})
SCHEMAS = {
    "object": "object",
    "person": record(["name", "age"], name={"type": "string"}, age={"type": "integer"},
                     job={"type": "string"}),
    "book": record(["title", "year", "genre", "rating", "tags"],
                   title={"type": "string", "maxLength": 60}, year={"type": ["integer", "null"]},
                   genre={"enum": ["novel", "poem", "no", 1, 12, None]}, rating={"type": "number"},
                   tags={"type": "array", "items": {"type": "string", "maxLength": 20},
                         "maxItems": 4}),
    "nested": {**record(["id", "items"], id={"type": "integer"}, owner={"$ref": "#/$defs/who"},
                        items={"type": "array", "minItems": 1, "maxItems": 3,
                               "items": {"$ref": "#/$defs/who"}},
                        done={"type": "boolean"},
                        note={"anyOf": [{"type": "string", "minLength": 2, "maxLength": 40},
                                        {"type": "null"}]}), "$defs": {"who": WHO}},
    "answer": record(["answer"], answer={"type": "string"})}
each_schema = pytest.mark.parametrize("name", SCHEMAS)


def as_text(schema):
    return schema if isinstance(schema, str) else json.dumps(schema)


STARTS = {name: (compiled(as_text(schema))[0],) for name, schema in SCHEMAS.items()}


def accepts(start, text):
    state = after_bytes(start, text if isinstance(text, bytes) else text.encode())
    return state is not None and is_complete(state)


def fits(value, schema, root=None):
    """Whether a value fits a schema: another implementation, of the keywords that are used here"""
    root = root or schema
    if schema == "object":
        return isinstance(value, dict)
    if "$ref" in schema:
        return fits(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root)
    if "anyOf" in schema:
        return any(fits(value, x, root) for x in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return any(value == x and type(value) is type(x)
                   for x in schema.get("enum", [schema.get("const")]))
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int,
             "number": (int, float), "null": type(None)}
    said = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not any(isinstance(value, kinds[kind]) and (kind == "boolean" or type(value) is not bool)
               for kind in said):
        return False
    if isinstance(value, str):
        return schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf)
    if isinstance(value, list):
        return (schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", math.inf) and
                all(fits(x, schema["items"], root) for x in value))
    if isinstance(value, dict):
        known = schema["properties"]
        return ({*schema["required"]} <= {*value} <= {*known} and
                all(fits(x, known[key], root) for key, x in value.items()))
    return True


def strict(text):
    """The value of a JSON text by RFC 8259.  Python also reads NaN and lone surrogates."""
    def wrong(name):
        raise ValueError(name)

    value = json.loads(text, parse_constant=wrong)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def need_fit(text, schema):
    value = strict(text)
    assert fits(value, schema), text
    if schema != "object":
        needs("jsonschema").validate(value, schema)


# ---- the automaton
@pytest.mark.parametrize("name, text", [
    ("object", "{}"), ("object", "{ }"), ("object", '{"a": 1,"b":[]}'),
    ("object", '{"":{"":[{}]}}'),
    ("object", '{"a":[-0, 1.5e-3, 2E+7, "\\u00e9\\ud83d\\ude00", null, true, false, "é😀\x7f"]}'),
    ("object", json.dumps({"a": [1, {"b": [], "c": ""}]}, indent=4)),
    ("object", '{"a":' + "[" * 9 + "]" * 9 + "}"), ("object", '{"a":1234567890123456}'),
    ("person", '{"name":"","age":0}'), ("person", '{"name":"\\"","age":-7, "job":"x"}'),
    ("person", '{\n\t"name": "a",\n\t"age": 1\n}'),
    ("book", '{"title":"' + "é" * 59 + '\\u00e9","year":null,"genre":12,"rating":1.0,"tags":[]}'),
    ("book", '{"title":"","year":1,"genre":1,"rating":1,"tags":["a","b","c","d"]}'),
    ("nested", '{"id":1,"items":[{"name":"x"}],"note":"\\ud83d\\ude00é"}')])
def test_json_is_accepted(name, text):
    assert accepts(STARTS[name], text)
    need_fit(text, SCHEMAS[name])


@pytest.mark.parametrize("name, text", [
    ("object", ""), ("object", "{"), ("object", "[]"), ("object", '{"a":01}'),
    ("object", '{"a":1,}'),
    ("object", '{"a":"\n"}'), ("object", '{"a":"\\ud800"}'), ("object", '{"a":"\\ud800\\u0041"}'),
    ("object", '{"a":"\\udc00"}'), ("object", '{"a":1.}'), ("object", '{"a":-}'),
    ("object", '{"a":.5}'), ("object", '{"a":1e}'), ("object", '{"a":nul}'),
    ("object", '{"a":NaN}'),
    ("object", '{"a":"\\x"}'), ("object", b'{"a":"\xc0\x80"}'), ("object", b'{"a":"\xed\xa0\x80"}'),
    ("object", b'{"a":"\xc3"}'), ("object", b'{"a":"\xf4\x90\x80\x80"}'), ("object", "{}}"),
    ("object", '{"a":' + "[" * 10 + "]" * 10 + "}"), ("object", '{"a":12345678901234567}'),
    ("object", '{"a":1e999}'), ("object", "{  }"), ("object", '{"a":  1}'), ("object", "{\n\n}"),
    ("object", '{"a" :1}'), ("object", "{\n" + " " * 41 + "}"), ("object", "{} "),
    ("person", "{}"), ("person", '{"name":"a"}'), ("person", '{"age":1,"name":"a"}'),
    ("person", '{"name":"a","age":1.5}'), ("person", '{"name":"a","age":1,"x":1}'),
    ("person", '{"name":"a","age":1,"name":"a"}'), ("person", '{"name":1,"age":1}'),
    ("book", '{"title":"' + "é" * 61 + '","year":1,"genre":1,"rating":1,"tags":[]}'),
    ("book", '{"title":"","year":1,"genre":2,"rating":1,"tags":[]}'),
    ("book", '{"title":"","year":1,"genre":1,"rating":1,"tags":["a","b","c","d","e"]}'),
    ("nested", '{"id":1,"items":[]}'), ("nested", '{"id":1,"items":[{"name":"x"}],"note":"\\n"}'),
    ("nested", '{"id":1,"items":[{"name":"x","kind":"dog"}]}')])
def test_other_texts_are_not_accepted(name, text):
    assert not accepts(STARTS[name], text)


# Numbers as they are written in decimals: a float of 1e20 or 1e-200 has too many digits
NUMBERS = st.integers(-10**15, 10**15) | st.floats(-1e15, 1e15).filter(
    lambda x: x == 0 or abs(x) > 1e-90)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ANY = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda x: st.lists(x, max_size=3) | st.dictionaries(TEXTS, x, max_size=3), max_leaves=6)


def values(schema, root=None):
    """Values that fit a schema, with the names in its order"""
    root = root or schema
    if schema == "object":
        return st.dictionaries(TEXTS, ANY, max_size=3)
    if "$ref" in schema:
        return values(root["$defs"]["who"], root)
    if "anyOf" in schema:
        return st.one_of(*(values(x, root) for x in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    if isinstance(schema["type"], list):
        return st.one_of(*(values({"type": kind}) for kind in schema["type"]))
    if schema["type"] == "array":
        return st.lists(values(schema["items"], root), min_size=schema.get("minItems", 0),
                        max_size=schema.get("maxItems", 3))
    if schema["type"] == "object":
        parts = {key: values(x, root) for key, x in schema["properties"].items()}
        needed = {key: x for key, x in parts.items() if key in schema["required"]}
        others = {key: x for key, x in parts.items() if key not in needed}
        return st.fixed_dictionaries(needed, optional=others).map(
            lambda found: {key: found[key] for key in parts if key in found})
    if schema["type"] == "string":
        return st.text(st.characters(exclude_categories=["Cs"]), max_size=8,
                       min_size=schema.get("minLength", 0))
    return {"integer": st.integers(-10**15, 10**15), "number": NUMBERS, "boolean": st.booleans(),
            "null": st.none()}[schema["type"]]


STYLES = st.sampled_from([{}, {"separators": (",", ":")}, {"indent": 2}, {"indent": 4},
                          {"indent": "\t"}])


@each_schema
@drawn(40)
@given(data=st.data())
def test_values_that_fit_are_accepted_in_any_tokens(name, data, tokenizer):
    """As json.dumps writes them, cut into tokens in any way"""
    value = data.draw(values(SCHEMAS[name]))
    text = json.dumps(value, ensure_ascii=data.draw(st.booleans()), **data.draw(STYLES)).encode()
    need_fit(text, SCHEMAS[name])
    assert accepts(STARTS[name], text)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    constraint = json_mode.constraint(as_text(SCHEMAS[name]), tokenizer, None)
    state, specials = constraint.start, {*tokenizer.specials.values()}
    by_start = {}
    for token, piece in enumerate(tokenizer.vocab):
        if token not in specials:
            by_start.setdefault(piece[0], []).append((token, piece))
    at = 0
    while at < len(text):
        fitting = [(token, piece) for token, piece in by_start[text[at]]
                   if text.startswith(piece, at)]
        token, piece = fitting[rng.integers(len(fitting))]
        assert constraint.mask(state)[token], (text, at, piece)
        state = constraint.after(state, token)
        at += len(piece)
    assert state == ()


def written_at_random(start, rng, most=400):
    """The text of a walk through the automaton: random bytes of those allowed, mostly ones that
    come to an end"""
    state, text = start, b""
    while state and len(text) < most:
        allowed = [byte for byte in range(256) if json_mode.after_byte(state, byte) is not None]
        assert allowed, text
        closing = [byte for byte in allowed if byte in b'"]},:']
        byte = int(rng.choice(closing if closing and rng.random() < 0.3 else allowed))
        state, text = json_mode.after_byte(state, byte), text + bytes([byte])
    return text if state == () else None


@each_schema
@drawn(40)
@given(seed=st.integers(0, 1 << 30))
def test_texts_that_are_accepted_fit(name, seed):
    text = written_at_random(STARTS[name], np.random.default_rng(seed))
    assume(text is not None)
    need_fit(text, SCHEMAS[name])


@each_schema
@drawn(40)
@given(data=st.data())
def test_texts_with_an_error_are_not_accepted(name, data):
    """A few bytes are deleted, inserted or replaced.  What is still accepted must fit."""
    text = bytearray(json.dumps(data.draw(values(SCHEMAS[name])), ensure_ascii=False).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        new = data.draw(st.sampled_from([b"", b'"', b"\\", b"{", b"]", b",", b"0", b" ", b"\xe2",
                                         b"\x80", b"e", b"."]))
        text[at:at + data.draw(st.integers(0, 1))] = new
    if accepts(STARTS[name], bytes(text)):
        need_fit(bytes(text), SCHEMAS[name])


# ---- masks
@each_schema
def test_masks_are_what_the_automaton_reads(name, tokenizer):
    """In the states of a random text; the end token where the value is complete, others never."""
    end, specials = 2, {*tokenizer.specials.values()}
    vocab = [b"" if token in specials else piece for token, piece in enumerate(tokenizer.vocab)]
    constraint = Constraint(as_text(SCHEMAS[name]), Trie(tokenizer.vocab, specials), None)
    rng, state = np.random.default_rng(1), constraint.start
    for _ in range(150):
        want = [piece != b"" and after_bytes(state, piece) is not None for piece in vocab]
        assert constraint.mask(state).tolist() == want
        token = int(rng.choice(np.flatnonzero(want)))
        state = constraint.after(state, token) or constraint.start
    number = Constraint('{"type": "number"}', Trie(tokenizer.vocab, specials), end)
    for text, complete in [("", 0), ("-", 0), ("1", 1), ("1.", 0), ("1.5", 1), ("1e", 0), ("0", 1)]:
        state = after_bytes(number.start, text.encode())
        assert number.mask(state)[end] == complete
        assert not number.mask(state)[[*specials - {end}]].any()


@pytest.mark.parametrize("schema", [
    {"anyOf": [{"const": 1}, {"type": "integer", "minimum": 100}]},
    {"anyOf": [{"type": "string", "maxLength": 3}, {"pattern": "^a*$"}, {"enum": ["é", [1]]}]},
    {"items": {"anyOf": [{"required": ["a"]}, {"properties": {"a": {"maxLength": 2}}}]}}])
def test_masks_of_alternatives_are_what_the_automaton_reads(schema, tokenizer):
    rng, vocab = np.random.default_rng(1), tokenizer.vocab
    constraint = Constraint(as_text(schema), Trie(vocab, set()), None)
    state = constraint.start
    for _ in range(60):
        want = [piece != b"" and after_bytes(state, piece) is not None for piece in vocab]
        assert constraint.mask(state).tolist() == want
        token = int(rng.choice(np.flatnonzero(want)))
        state = constraint.after(state, token) or constraint.start


def test_the_memory_of_the_masks_is_bounded(tokenizer, monkeypatch):
    monkeypatch.setattr(json_mode, "MASK_BYTES", 4 * tokenizer.vocab_size // 8)
    constraint = Constraint("object", Trie(tokenizer.vocab, set()), None)
    for n in range(9):
        state = after_bytes(constraint.start, b'{"":' + b"[" * n)
        assert constraint.mask(state).any()
        assert len(constraint.masks) <= 4 and len(constraint.trie.masks) <= 4


def test_a_vocabulary_without_a_byte_is_refused(tokenizer):
    vocab = [piece for piece in tokenizer.vocab if piece != b"{"]
    with pytest.raises(ne.UserError, match="1 bytes that are no tokens"):
        Constraint("object", Trie(vocab, set()), None)


# ---- schemas
@pytest.mark.parametrize("schema, words", [
    ("[]", "expected an object, true or false"), ("", "Expecting value"), ("{", "line 1"),
    ('{"type": "string", "pattern": "(?=a)"}', "#: pattern: a group with ? that looks ahead"),
    *[(as_text({"pattern": pattern}), f"pattern: {words} is not supported") for pattern, words in (
        ("(a)\\1", '\\1 in "(a)\\\\1"'), ("\\9", '\\9 in "\\\\9"'), ("[\\1]", '\\1 in "[\\\\1]"'),
        ("\\01", '\\0 with a digit after it in "\\\\01"'),
        ("[\\08]", '\\0 with a digit after it in "[\\\\08]"'), ("\\cA", '\\c in "\\\\cA"'),
        ("\\xA", '\\x like this in "\\\\xA"'), ("\\u{41}", '\\u like this in "\\\\u{41}"'),
        ("\\k<a>", '\\k in "\\\\k<a>"'), ("\\p{L}", '\\p in "\\\\p{L}"'),
        ("\\b", '\\b in "\\\\b"'))],
    *[(as_text({"pattern": pattern}), words) for pattern, words in (
        ("a(b", "a ( without )"), ("(a))", "an unbalanced )"), ("a\\", "an unexpected end"),
        ("(" * 51 + ")" * 51, "a group this deep"), ("*a", "* without a part before it"),
        ("a|+", "+ without a part"), ("{,3}", "{ without a part"), ("^*", "a repeated ^ or $"),
        ("a{3", "a repetition like this"), ("a{1,x}", "a repetition like this"),
        ("a{1234567890123}", "a repetition like this"), ("a{3,2}", "a repetition like this"),
        ("[a-\\d]", "a range like this"), ("[z-a]", "a range like this"), ("[]", "an empty set"),
        ("[^\\d\\D]", "an empty set"), ("[[:alpha:]]", "a named set"),
        ("[\\ud800-\\udfff]", "half of a surrogate pair"), ("a^b", "^ within a text"))],
    *[(as_text(schema), words) for schema, words in (
        ({"prefixItems": {}}, "prefixItems is {}, expected a list of schemas"),
        ({"$ref": 5}, "$ref is 5, expected a text"), ({"pattern": 5}, "pattern is 5"),
        ({"oneOf": [False]}, "oneOf: no alternative is possible"),
        ({"oneOf": [{"type": "object", "required": ["a"]}] * 2}, "may fit the same value"),
        ({"enum": [1, 2], "multipleOf": 0}, "multipleOf is 0, expected more than 0"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "contains itself"),
        ({"type": "object", "minProperties": 3, "properties": {"a": {}, "b": {}, "c": {}}},
         "expected minProperties of at most 1"),
        ({"properties": {"a": {}, "b": {}}, "maxProperties": 1}, "at least the number of"),
        ({"properties": {str(i): {} for i in range(257)}}, "at most 256 names"),
        ({"required": [str(i) for i in range(257)]}, "at most 256 names"),
        ({"type": "object", "maxProperties": 2}, "maxProperties needs properties"),
        ({"patternProperties": {"^a": {"type": "string"}, "^b": {"type": "number"}}},
         "one schema for all patterns"),
        ({"patternProperties": {"^a": {}}, "propertyNames": {"maxLength": 3}},
         "propertyNames beside patternProperties"),
        ({"anyOf": [{"type": "string", "minLength": i} for i in range(65)]},
         "at most 64 alternatives, found 65"))],
    ('{"pattern": "^.{0,9}$", "minLength": 12}', "which no match has"),
    ('{"pattern": "(a|b)*a(a|b){16}"}', "steps to prepare"),
    ('{"pattern": "((((a{99}){99}){99}){99})"}', "steps to prepare"),
    ('{"type": "text"}', 'type is "text", expected array, object'),
    ('{"type": []}', "type is"), ('{"type": [["string"]]}', "type is"),
    ('{"type": "string", "maxLength": -1}', "expected a whole number of at least 0"),
    ('{"type": "array", "minItems": 2, "maxItems": 1}', "0 <= minItems <= maxItems"),
    ('{"type": "array", "uniqueItems": true}', "the keyword uniqueItems is not supported"),
    ('{"type": "number", "multipleOf": 2}', "#: the keyword multipleOf"),
    ('{"minimum": 2, "maximum": 1}', "no number"), ('{"minimum": "2"}', "expected a number"),
    ('{"type": "object", "properties": {"a": {"not": {}}}}', "#/properties/a: the keyword not"),
    ('{"properties": {}, "additionalProperties": false, "required": ["b"]}', "no value fits false"),
    ('{"type": "object", "properties": []}', "expected an object of schemas"),
    (as_text({"anyOf": [{"anyOf": [{"type": "string", "minLength": i + j} for j in range(9)]}
                        for i in range(9)]}), "81"),
    ('{"enum": []}', "no value of enum"), ('{"enum": ["a"], "type": "integer"}', "no value of en"),
    ('{"enum": 1}', "a list of values"), ('{"anyOf": []}', "expected a list"),
    ('{"oneOf": [{"type": "string"}, {"enum": ["a"]}]}', "0 and 1 may fit the same value"),
    ('{"oneOf": [{"type": "number"}, {"const": 1}]}', "0 and 1 may fit the same value"),
    ('{"properties": {"é": {}}, "patternProperties": {"^\\\\D": {}}}', "not ASCII"),
    ('{"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [{}]}',
     "the keyword prefixItems is not"),
    ('{"$ref": "#/$defs/a", "const": 1, "$defs": {"a": {"const": 2}}}', "no value of enum"),
    ('{"$ref": "other.json"}', "expected a place in this schema"),
    ('{"$ref": "#/$defs/a"}', "found no such place"),
    ('{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}', "contains itself"),
    ('{"allOf": [{"$ref": "#"}]}', "#/allOf/0: # contains itself without an object or"),
    ('{"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "minItems": 1, '
     '"items": {"$ref": "#/$defs/a"}}}}', "at most 10 objects and arrays"),
    ('{"properties": {"a": {"$id": "x:y", "items": {"$ref": "#"}}}}', "remove the $id"),
    ('{"items": ' * 2000 + "{}" + "}" * 2000, "JSON schema"),
    ('{"type": "array", "minItems": 1, "items": ' * 11 + "{}" + "}" * 11, "at most 10 objects"),
    ('{"enum": ["\\ud800"]}', "surrogates"), ('{"enum": [NaN]}', "JSON compliant"),
    ('{"title": "' + "a" * 140_000 + '"}', "expected at most 131,072"),
    ('{"minimum": ' + "7" * 5000 + "}", "expected integers of at most 4,300 digits")])
def test_a_schema_that_is_not_supported_is_refused(schema, words):
    with pytest.raises(ne.UserError) as error:
        compiled(schema)
    assert words in str(error.value) and str(error.value).startswith("the JSON schema")


@pytest.mark.parametrize("schema, words", [
    # What each keyword must contain
    ({"dependentRequired": [1]}, "dependentRequired is [1], expected an object of lists of names"),
    ({"dependencies": {"a": 1}}, "lists of names or schemas"), ({"pattern": 1}, "expected a text"),
    ({"allOf": {}}, "a list of schemas"), ({"items": 1}, "a schema or a list of schemas"),
    ({"additionalProperties": 1}, "expected a schema"), ({"propertyNames": []}, "expected a sch"),
    ({"$ref": 1}, "expected a text"), ({"uniqueItems": 1}, "expected true or false"),
    # Places, by RFC 6901
    ({"properties": {"a": {"$ref": "#/anyOf/00"}}, "anyOf": [{}]}, "found no such place"),
    ({"properties": {"a": {"$ref": "#/anyOf/\u0660"}}, "anyOf": [{}]}, "found no such place"),
    ({"pattern": "^x{2}{3}$"}, "a repeated repetition"), ({"pattern": "^x+*$"}, "a repeated rep"),
    # Schemas that contain themselves
    ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "a schema that contains itself"),
    ({"anyOf": [{"type": "null"}, {"$ref": "#"}]}, "a schema that contains itself"),
    ({"dependencies": {"a": {"$ref": "#"}}}, "a schema that contains itself"),
    # Drafts
    ({"$schema": "draft-07", "oneOf": [{"$ref": "#/definitions/a", "type": "integer"},
                                       {"$ref": "#/definitions/a", "type": "string"}],
      "definitions": {"a": {}}}, "0 and 1 may fit the same value"),
    ({"$schema": "draft-04", "oneOf": [{"const": 1}, {"const": 2}]}, "the keyword const is not"),
    ({"$schema": "draft-04", "propertyNames": {}}, "the keyword propertyNames is not"),
    ({"$schema": "draft-07", "dependentRequired": {}}, "the keyword dependentRequired is not"),
    ({"$schema": "draft-04", "exclusiveMinimum": 1}, "expected true or false in draft 4"),
    ({"$schema": "draft-07", "exclusiveMinimum": True}, "expected a number"),
    ({"properties": {"a": {"$id": "x:y", "$schema": "draft-07"}}}, "of another draft")])
def test_an_ill_formed_schema_is_refused(schema, words):
    with pytest.raises(ne.UserError) as error:
        compiled(as_text(schema))
    assert words in str(error.value) and "recursion" not in str(error.value)


@pytest.mark.parametrize("place, places", [
    ("a%2Fb", {"a": {"b": {"const": 1}}}), ("%61", {"a": {"const": 1}}),
    ("%24x", {"$x": {"const": 1}}), ("%2525", {"%25": {"const": 1}, "%": {"const": 2}}),
    ("a~1b~01", {"a/b~1": {"const": 1}}), ("0", [{"const": 1}])])
def test_the_place_of_a_ref_is_decoded_once(place, places):
    start = compiled(as_text({"$ref": f"#/$defs/{place}", "$defs": places}))[0],
    assert accepts(start, "1") and not accepts(start, "2")


@pytest.mark.parametrize("schema, good, bad", [
    ('{}', ["1", '"a"', "[{}]", "null"], ["", "x"]), ("true", ["[]"], [""]),
    ('{"type": "object"}', ['{"a": [1]}'], ["[]"]),
    ('{"type": "object", "additionalProperties": false}', ["{}"], ['{"a":1}']),
    ('{"type": "object", "additionalProperties": {"type": "integer"}}', ['{"a":1, "b":2}'],
     ['{"a":"b"}']),
    ('{"type": "array"}', ['[1, "a"]'], ["{}"]),
    ('{"type": "array", "maxItems": 0}', ["[]"], ["[1]"]),
    ('{"type": ["integer", "number"]}', ["1", "1.5"], ['"a"']),
    ('{"enum": [1, 2, "a", true], "type": "number"}', ["1", "2"], ['"a"', "true"]),
    ('{"const": null, "description": "none"}', ["null"], ["0"]),
    (json.dumps({"enum": ["a" * 5000]}), [json.dumps("a" * 5000)], ['"a"']),
    ('{"enum": ["é", "\\n"]}', ['"é"', '"\\n"'], ['"\\u00e9"']),
    ('{"type": "array", "minItems": 2, "items": {"const": 0}}', ["[0,0]", "[0,0,0]"], ["[0]"]),
    ('{"anyOf": [{"$ref": "#/$defs/a~1b"}, {"type": "null"}], "$defs": {"a/b": {"const": 1}}}',
     ["1", "null"], ["2"]),
    ('{"type": "object", "properties": {"a": {}, "ab": {}, "b": {}}, "required": ["ab"]}',
     ['{"ab":1}', '{"a":1,"ab":2,"b":3}'], ['{"a":1}', '{"b":1}', '{"ab":1,"a":1}']),
    # Notes and misspelled keywords change nothing, nor do keywords of other types
    ('{"$id": "a:b", "id": "x", "readonly": true, "x-y": 1, "maxlength": 0, "type": "string"}',
     ['"ab"'], ["1"]),
    ('{"type": "integer", "maxLength": 0}', ["12"], ['""']), ('{"maxLength": 1}', ['"a"'], ["1"]),
    ('{"properties": {"a": {"type": "string", "format": "date"}}}', ['{"a": "2024-01-31"}', "{}"],
     ["1", '{"a": "2024-02-30"}', '{"b": 1}']),
    ('{"properties": {"a": {"const": 1}}, "additionalProperties": {"type": "null"}}',
     ['{"a":1,"b":null}', '{"ab":null}', '{"":null}'],
     ['{"a":null}', '{"\\u0061":null}', '{"b":null,"a":1}', '{"a":1,"a":null}']),
    ('{"patternProperties": {"^x-": {"type": "integer"}}, "additionalProperties": false}',
     ['{"x-a":1}', "{}"], ['{"a":1}', '{"x-a":""}']),
    ('{"required": ["b"], "properties": {"a": {"const": 1}}}', ['{"a":1,"b":[]}'], ['{"a":1}']),
    ('{"minimum": -1.5, "exclusiveMaximum": 12}', ["-1.5", "0", "11.999999", "3.25"],
     ["-1.6", "12", "12.0", "100", "01", "1."]),
    ('{"type": "integer", "minimum": 8, "maximum": 1030}', ["8", "9", "10", "999", "1030"],
     ["7", "-8", "1031", "8.0"]),
    ('{"type": "number", "minimum": 0, "exclusiveMinimum": true}', ["0.5", "7"], ["0", "-1"]),
    ('{"pattern": "^(a|bc)+$", "maxLength": 3}', ['"a"', '"bca"', '"aaa"'], ['"bcbc"', '""']),
    ('{"pattern": "\\\\d"}', ['"a1é"', '"1"'], ['"a"', '"\u0661"']),
    ('{"pattern": "^[^a]$"}', ['"\\""', '"\\n"', '"😀"'], ['"a"', '"\\u0062"', '"bb"']),
    ('{"allOf": [{"properties": {"a": {"minimum": 1}}}, {"properties": {"a": {"maximum": 2}}, '
     '"required": ["a"]}], "type": "object"}', ['{"a":1}', '{"a":2}'], ["{}", '{"a":3}']),
    ('{"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": '
     '{"a": {"const": 1}, "b": {"const": 2}}}', ['{"a":1}', '{"b":2}', '{"a":1,"b":2}'], ["{}"]),
    ('{"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": '
     '{"a": {"const": 1}, "b": {"const": 2}}}', ['{"a":1}', '{"b":2}'], ["{}", '{"a":1,"b":2}']),
    ('{"dependencies": {"a": ["b"]}, "properties": {"a": {}, "b": {}}}',
     ["{}", '{"b":1}', '{"a":1,"b":1}'], ['{"a":1}']),
    ('{"enum": [[1], {"a": null}, 2]}', ["[1]", '{"a": null}', "2"], ["[2]"]),
    ('{"items": [{"const": 1}, {"const": 2}], "additionalItems": false}', ["[]", "[1]", "[1, 2]"],
     ["[2]", "[1,2,3]"]),
    ('{"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"a": {"$ref": "#/$defs/a"}}}}}',
     ["{}", '{"a":{"a":{}}}', '{"a":' * 9 + "{}" + "}" * 9],
     ["1", '{"a":' * 10 + "{}" + "}" * 10])])
def test_what_other_schemas_accept(schema, good, bad):
    start = compiled(schema)[0],
    assert all(accepts(start, text) for text in good)
    assert not any(accepts(start, text) for text in bad)


# ---- constants and limits that no value fits
CONSTANTS = [
    0, 1, 1.0, -1, 2.5, 3, 10, 1.5e-7, 1e20, 10 ** 18 + 1, 123456789012345678, True, False, None,
    "", "a", "ab", "abcd", "é😀", "1", [], [1], [1.0, True], ["a", "a"], [[1], 2], {}, {"a": 1},
    {"b": 1, "a": 2}, {"a": 2, "b": 1.0}, {"a": "x", "c": [1]}, {"é": None, "b": {"a": 1}}]


def some_schema(rnd, depth=2):
    """A random schema of supported keywords.  Its constants and limits often contradict others."""
    if rnd.random() < 0.1:
        return rnd.random() < 0.7
    n = lambda: rnd.choice([0, 1, 1, 2, 2.0, 3, 5])
    part = lambda: some_schema(rnd, depth - 1)
    parts = lambda: [part() for _ in range(rnd.randint(1, 3))]
    kinds = ["integer", "number", "string", "null", "boolean", "array", "object"]
    make = {
        "type": lambda: rnd.choice([rnd.choice(kinds), rnd.sample(kinds, 3)]),
        "enum": lambda: rnd.sample(CONSTANTS, rnd.randint(1, 8)),
        "const": lambda: rnd.choice(CONSTANTS), "minimum": n, "maximum": n, "exclusiveMinimum": n,
        "exclusiveMaximum": n, "minLength": n, "maxLength": n, "minItems": n, "maxItems": n,
        "minProperties": n, "maxProperties": n,
        "pattern": lambda: rnd.choice(["^a", "b$", "^[a-c]*$", "1"]),
        "required": lambda: rnd.sample("abc", rnd.randint(0, 2))}
    if depth:
        make |= {"properties": lambda: {name: part() for name in rnd.sample("abc", 2)},
                 "additionalProperties": part, "propertyNames": part, "items": part,
                 "patternProperties": lambda: {"^a": part()}, "prefixItems": parts, "allOf": parts,
                 "anyOf": parts, "oneOf": parts,
                 "dependentRequired": lambda: {"a": ["b"]}}
    return {name: make[name]() for name in rnd.sample(sorted(make), rnd.randint(1, 4))}


def test_constants_that_fit_are_those_of_jsonschema():
    """An enum beside any keywords: jsonschema says which of its constants may be written, all of
    them, and that a schema is refused only if it has none."""
    jsonschema = needs("jsonschema")
    rnd, counts = random.Random(5), {"some": 0, "none": 0}
    for _ in range(1200):
        values = rnd.sample(CONSTANTS, rnd.randint(1, 12))
        schema = some_schema(rnd)
        schema = rnd.choice([
            lambda: {"allOf": [schema, {"enum": values}]},
            lambda: {"enum": values, **(schema if isinstance(schema, dict) else {})}])()
        validator = jsonschema.Draft202012Validator(schema)
        fitting = [x for x in CONSTANTS if validator.is_valid(x)]
        try:
            frame, _ = compiled(as_text(schema))
        except ne.UserError as e:
            assert "not supported" in str(e) or not fitting, (schema, fitting, e)
            counts["none"] += 1
            continue
        written = [x for x in CONSTANTS if accepts((frame,), encoded(x))]
        assert {*map(same, written)} == {*map(same, fitting)}, (schema, written, fitting)
        counts["some"] += 1
    assert min(counts.values()) > 100, counts


def test_what_no_value_fits_is_left_out():
    """In an alternative, an optional property or one of several types: random schemas without
    constants.  All texts that a frame accepts fit."""
    jsonschema = needs("jsonschema")
    rnd, n = random.Random(6), 0
    for _ in range(300):
        low, high = rnd.choice([("minLength", "maxLength"), ("minItems", "maxItems"),
                                ("minimum", "maximum"), ("minProperties", "maxProperties")])
        alternatives = [{"type": "null"}, {low: 5, high: 2, "type": ["string", "array", "integer",
                                                                     "object"][rnd.randrange(4)]}]
        rnd.shuffle(alternatives)
        schema = rnd.choice([
            lambda: {"anyOf": alternatives},
            lambda: {"oneOf": alternatives},
            lambda: {"type": ["null", "string", "array", "integer", "object"], low: 5, high: 2},
            lambda: {"type": "array", "items": {"anyOf": alternatives}},
            lambda: {"properties": {"a": alternatives[0], "b": alternatives[1]}}])()
        frame, _ = compiled(as_text(schema))
        for value in (None, "", "abcdef", [], [None], {}, {"a": None}, {"b": None}, 3, 7):
            if accepts((frame,), encoded(value)):
                assert jsonschema.Draft202012Validator(schema).is_valid(value), (schema, value)
                n += 1
    assert n > 300


def test_one_of_some_objects_is_only_one():
    """Random alternatives, whose names are required, forbidden or allowed by a pattern: each object
    that a frame accepts fits exactly one of them."""
    jsonschema = needs("jsonschema")
    rnd, n = random.Random(7), Counter()
    values = [{name: x for name, x in zip("abx", chosen) if x} for chosen in itertools.product(
        (0, 1, 2), repeat=3)]

    def some_object():
        names = [name for name in "abx" if rnd.random() < 0.5]
        required = {"required": [name for name in "abx" if rnd.random() < 0.3]}
        return {"type": "object", "properties": {name: rnd.choice(
            [{}, {"const": 1}, {"enum": [1, 2]}]) for name in names}, **rnd.choice([{}, required]),
            **rnd.choice([{}, {"additionalProperties": False}, {"additionalProperties": {}}]),
            **rnd.choice([{}, {"patternProperties": {"^x": rnd.choice([{}, {"const": 2}])}}])}

    for _ in range(some(4500)):
        schema = {"oneOf": [some_object() for _ in range(rnd.randint(2, 3))]}
        try:
            frame, _ = compiled(as_text(schema))
        except ne.UserError:
            n["refused"] += 1
            continue
        validator = jsonschema.Draft202012Validator(schema)
        for value in values:
            if accepts((frame,), encoded(value)):
                assert validator.is_valid(value), (schema, value)
                n["patterns" if "patternProperties" in str(schema) else "others"] += 1
    assert min(n.values()) > 50 and len(n) == 3, n


LIMITED = {                  # {type: (names of its limits, values)}
    "number": (("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
               [x / 2 for x in range(-2, 13)]),
    "integer": (("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), [*range(-1, 7)]),
    "string": (("minLength", "maxLength"), ["a" * n for n in range(7)]),
    "array": (("minItems", "maxItems"), [[0] * n for n in range(7)])}


@pytest.mark.parametrize("kind", LIMITED)
def test_one_of_some_ranges_is_only_one(kind):
    """Random ranges, which overlap, touch or lie apart: each value that a frame accepts fits one of
    them alone.  Ranges of numbers are rejected only if a number fits both."""
    jsonschema = needs("jsonschema")
    rnd, n, (names, values) = random.Random(8), Counter(), LIMITED[kind]
    for _ in range(some(900)):
        parts = [{"type": kind, **{name: rnd.randint(0, 5) for name in names if rnd.random() < 0.5}}
                 for _ in range(2)]
        fits = [[x for x in values if jsonschema.Draft202012Validator(part).is_valid(x)]
                for part in parts]
        both = [x for x in fits[0] if x in fits[1]]
        try:
            frame, _ = compiled(as_text({"oneOf": parts}))
        except ne.UserError as e:
            assert both or kind != "number" or "may fit" not in str(e), parts
            n["rejected"] += 1
            continue
        for value in values:
            if accepts((frame,), encoded(value)):
                assert value in fits[0] + fits[1] and value not in both, (parts, value)
        n["apart"] += 1
    assert min(n.values()) > 50 and len(n) == 2, n


PLAIN = [None, False, True, -1, 0, 1, 2, 2.5, 3, "", "a", "ab", "abc", [], [0], [0, 0],
         [0, "a"], {}]


def test_schemas_that_hold_together_accept_what_fits_each():
    """Random ones, each with types in any order, and with limits, constants and items: of these
    values, exactly those that fit all of them.  They are rejected only if no value fits."""
    jsonschema = needs("jsonschema")
    rnd, n = random.Random(9), Counter()
    limits = [name for names, _ in LIMITED.values() for name in names]

    def some_plain_schema():
        kinds = rnd.sample([*json_schema.TYPES], rnd.randint(1, len(json_schema.TYPES)))
        return {"type": rnd.choice([kinds, kinds, kinds[0]]),
                **{name: rnd.randint(0, 3) for name in limits if rnd.random() < 0.15},
                **rnd.choice(4 * [{}] + [{"enum": rnd.sample(PLAIN, rnd.randint(1, 9))}]),
                **rnd.choice(4 * [{}] + [{"items": {"type": rnd.choice(["integer", "string"])}}])}

    for _ in range(some(900)):
        schema = {"allOf": [some_plain_schema() for _ in range(rnd.randint(2, 3))]}
        validator = jsonschema.Draft202012Validator(schema)
        fitting = [encoded(x) for x in PLAIN if validator.is_valid(x)]
        try:
            frame, _ = compiled(as_text(schema))
        except ne.UserError as e:
            assert not fitting, (schema, fitting, e)
            n["rejected"] += 1
            continue
        assert [x for x in map(encoded, PLAIN) if accepts((frame,), x)] == fitting, schema
        n["accepted"] += 1
    assert min(n.values()) > 50 and len(n) == 2, n


@pytest.mark.parametrize("schema, good, bad", [
    ({"type": "string", "maxLength": 3, "anyOf": [{"minLength": 5}, {"maxLength": 2}]},
     ["ab"], ["abc"]),
    ({"type": "array", "maxItems": 1, "anyOf": [{"minItems": 2}, {"items": {"type": "null"}}]},
     [[None], []], [[1]]),
    ({"type": "integer", "enum": [123456789012345678, 1]}, [123456789012345678, 1], [12]),
    ({"type": "integer", "const": 1.0}, [1.0], [2]),
    ({"enum": [1e20, 5], "minimum": 0}, [1e20, 5], [1]),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "enum": [{"b": 1, "a": 2}]},
     [{"b": 1, "a": 2}], [{"a": 2}]),
    ({"maxLength": 3, "enum": ["abcd", "abc", 5]}, ["abc", 5], ["abcd"]),
    ({"allOf": [{"enum": [1, 2]}, {"enum": [1.0, 3]}]}, [1], [2, 3]),
    ({"oneOf": [{"maximum": 3, "type": "integer"}, {"minimum": 5, "type": "integer"}]}, [3, 5],
     [4]),
    ({"oneOf": [{"const": "a"}, {"const": "b"}, {"type": "string", "minLength": 3}]},
     ["a", "xyz"], ["xy"]),
    ({"type": "string", "maxLength": 2.0}, ["ab"], ["abc"]),
    ({"$schema": "draft-04", "type": "integer", "enum": [1.0, 2]}, [2], [1.0])])
def test_a_schema_with_values_is_not_refused(schema, good, bad):
    start = compiled(as_text(schema))[0],
    assert all(accepts(start, encoded(value)) for value in good)
    assert not any(accepts(start, encoded(value)) for value in bad)


@pytest.mark.parametrize("schema", [
    '{"type": "integer", "maximum": 120}', '{"type": "number", "minimum": 0.5, "maximum": 20}',
    '{"minimum": -1e300}', '{"exclusiveMinimum": 0, "maximum": 1e-5}', '{"enum": [1, 12, 123]}',
    '{"anyOf": [{"const": 1}, {"type": "integer", "minimum": 100}]}'])
def test_a_number_ends_by_itself_where_no_digit_can_follow(schema):
    """Otherwise a model without an end token could not go on."""
    rng = np.random.default_rng(1)
    for _ in range(40):
        state, text = (compiled(schema)[0],), b""
        while state:
            allowed = [x for x in b"-.0123456789" if json_mode.after_byte(state, x) is not None]
            byte = int(rng.choice(allowed))
            state, text = json_mode.after_byte(state, byte), text + bytes([byte])
        assert accepts((compiled(schema)[0],), text)


def work(schema):
    """The calls that `alive` gets, and the bytes of the names and constants that are compared, for
    the preparation and the masks of one reply"""
    calls = []
    frame, _ = compiled(as_text(schema), lambda: calls.append(0))
    return len(calls), frame


@pytest.mark.parametrize("make", [
    lambda n: {"enum": [*range(n)]}, lambda n: {"enum": [f"{i}" * 5 for i in range(n)]},
    lambda n: {"anyOf": [{"const": i} for i in range(n)]},
    lambda n: {"properties": {f"{i:04}" + "x" * 226: {} for i in range(n // 50)}}])
def test_the_work_is_linear_in_the_size_of_a_schema(make, monkeypatch):
    """Comparisons of bytes while a schema is prepared and its first byte is read.  They were
    quadratic: 41 s for 8,000 constants."""
    read = json_frames.Word.narrowed
    counts = []
    for n in 1000, 4000:
        seen = []
        monkeypatch.setattr(json_frames.Word, "narrowed",
                            lambda word, byte, seen=seen: seen.append(0) or read(word, byte))
        calls, frame = work(make(n))
        for byte in range(256):
            json_mode.after_byte((frame,), byte)
        counts.append(calls + len(seen))
    assert counts[1] <= 4 * counts[0] + 10 and counts[1] < 2000


def chained(n):
    places = {f"d{i}": {"allOf": 2 * [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(n)}
    return {"$ref": "#/$defs/d0", "$defs": {**places, f"d{n}": {}}}


@pytest.mark.parametrize("schema", [
    {"enum": [*range(1000, 2200)], "allOf": [
        {"anyOf": [{"minimum": -2 * i}, {"minimum": -2 * i - 1}]} for i in range(8)]},
    {"enum": ["x" * 2000 + f"{i}" for i in range(50)],
     "anyOf": [{"pattern": f"^x*{i}?y$"} for i in range(60)]},
    {"oneOf": [{"type": "object", "required": ["k"], "properties": {"k": {
        "enum": [f"{i}_{j}" for j in range(40)]}}} for i in range(60)]},
    {"pattern": "^[" + "".join(chr(0x4E00 + 2 * i) for i in range(2500)) + "]{1,60}$"},
    {"pattern": "^" + "".join(f"[^{chr(0x100 + i)}]" for i in range(900)) + "$"},
    {"pattern": "^[^a]*$", "minLength": 3000}, {"pattern": "^" + "a?" * 1500 + "$"},
    {"allOf": [{"minimum": i} for i in range(5000)]}, chained(59),
    {"$defs": {"a": {"dependentRequired": {"x": ["a"] * 2000}}},
     "allOf": [{"$ref": "#/$defs/a"}] * 2000}])
def test_the_work_of_a_preparation_is_bounded(schema):
    """Calls of functions, whatever the work consists of: 200,000 steps and some for the parsing.
    `alive` is called all the time."""
    n, since, gaps = [0], [0], [0]

    def seen(frame, event, what):
        n[0] += event in ("call", "c_call")

    def alive():
        gaps.append(n[0] - since[0])
        since[0] = n[0]

    sys.setprofile(seen)
    try:
        with pytest.raises(ne.UserError, match="at most 200,000 steps"):
            compiled(as_text(schema), alive)
    finally:
        sys.setprofile(None)
    assert n[0] < 1_500_000 and max(gaps) < 100_000 and len(gaps) > 20, (n, max(gaps))


KEYWORDS = {
    "type": ["object", "array"], "properties": {"a": {"$ref": "#/$defs/a"}}, "required": [],
    "additionalProperties": True, "format": "a", "minItems": 0, "maxItems": 9, "minLength": 0,
    "pattern": "", "minimum": 0, "exclusiveMaximum": 9, "anyOf": [{}, {"maxLength": 5}]}


def test_messages_are_made_for_errors_alone(monkeypatch):
    """A message shows a part of the schema.  It was made at every check, from all of the part: a
    schema of 7 KB took 1.9 s of CPU time, and one of 130 KB took 17 s."""
    shown = []
    monkeypatch.setattr(json_schema, "shown", lambda value: shown.append(value) or "")
    for draft in [[]], "https://json-schema.org/draft/2020-12/schema":
        compiled(as_text({"$schema": draft, "$ref": "#/$defs/a", "id": [[]], "$defs": {
            "id": [[]], "a": {**KEYWORDS, "id": [[]]}}}))
    assert not shown
    with pytest.raises(ne.UserError, match="maxItems is , expected a whole number"):
        compiled(as_text({"$defs": {"a": {**KEYWORDS, "maxItems": []}}, "$ref": "#/$defs/a"}))
    assert shown == [[]]


SHORT = st.text('ab"\\\n\xe9', max_size=70)
NESTED = st.recursive(st.none() | st.booleans() | st.integers() | SHORT, lambda x: st.lists(
    x, max_size=3) | st.dictionaries(SHORT, x, max_size=3), max_leaves=5)


@settings(max_examples=50)
@given(value=NESTED, most=st.integers(1, 60))
def test_the_beginning_of_a_value_is_that_of_its_json(value, most):
    assert json_beginning(value, most) == json.dumps(value, ensure_ascii=False)[:most]


def test_the_beginning_of_a_value_takes_little_work(monkeypatch):
    """Characters that are encoded, whatever the size of the value"""
    n, dumps = [], json.dumps
    monkeypatch.setattr(json, "dumps", lambda *x, **y: n.append(dumps(*x, **y)) or n[-1])
    for value in ("a" * 10**6, [[]] * 10**5, {"a" * 10**6: 1}, [["a" * 10**6]] * 99,
                  {str(i): i for i in range(10**5)}):
        assert len(json_beginning(value, 60)) == 60
        assert sum(map(len, n)) < 500 and len(n) < 100
        n.clear()


@pytest.mark.parametrize("schema", [
    {"enum": [*range(1000, 10_000)]}, {"anyOf": [{"const": f"c{i}"} for i in range(2000)]},
    {"properties": {f"{i:03}" + "x" * 227: {"type": "string"} for i in range(240)}},
    {"pattern": "^[^/]+$", "maxLength": 200}])
def test_large_schemas_of_simple_parts_are_accepted(schema):
    compiled(as_text(schema))


def test_a_preparation_ends_when_its_client_has_left():
    """`alive` is called between pieces of the work, and its error ends the work."""
    calls = []

    class Left(Exception):
        pass

    def alive():
        calls.append(0)
        if len(calls) == 3:
            raise Left

    with pytest.raises(Left):
        compiled('{"pattern": "^[ab]{0,3000}$"}', alive)
    assert len(calls) == 3


def test_two_threads_prepare_constraints_at_the_same_time(tokenizer, monkeypatch):
    """Each gets the constraint of its schema, while the other one drops the oldest."""
    made = lambda schema, trie, end, alive: f"of {schema}"
    monkeypatch.setattr(json_mode, "Constraint", made)
    before = sys.getswitchinterval()

    def prepare(first):
        for i in range(first, first + 20_000):
            assert json_mode.constraint(i % (17 + first), tokenizer, 0) == f"of {i % (17 + first)}"

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            for work in [pool.submit(prepare, first) for first in range(2)]:
                work.result()
    finally:
        sys.setswitchinterval(before)


def test_limits_of_strings_make_no_masks_of_their_own(tokenizer):
    """One mask serves all lengths: the tokens that are too long are taken out of it."""
    constraint = Constraint('{"type": "string", "minLength": 50, "maxLength": 90}',
                            Trie(tokenizer.vocab, set()), None)
    state, n = after_bytes(constraint.start, b'"'), 0
    for n in range(90):
        vocab = tokenizer.vocab
        if n % 9 == 0 or n > 85:
            want = [text != b"" and after_bytes(state, text) is not None for text in vocab]
            assert constraint.mask(state).tolist() == want
        constraint.mask(state)
        state = after_bytes(state, b"a")
    assert len(constraint.masks) == 1
    assert not constraint.mask(state)[vocab.index(b"a")]


def arrays_of_strings(n, least):
    return {"anyOf": [{"type": "array", "maxItems": 50 + i, "items": {
        "type": "string", "minLength": least + i, "maxLength": 900 + i}} for i in range(n)]}


@pytest.mark.parametrize("schema, text, more", [
    (arrays_of_strings(9, 99), b'["', b"a"), ({"type": "number", "minimum": 3}, b"4", b"5"),
    ({"anyOf": [{"type": "array", "items": {"type": "number", "minimum": i / 7}}
                for i in range(9)]}, b"[1.", b"0")])
def test_limits_that_are_far_make_no_masks(schema, text, more, tokenizer, monkeypatch):
    """Of many alternatives at once: a mask serves until a limit is near."""
    vocab = [piece for piece in tokenizer.vocab if len(piece) < 3]
    constraint = Constraint(as_text(schema), Trie(vocab, set()), None)
    state, made = after_bytes(constraint.start, text), []
    for _ in range(20 if b'"' in text else 2):
        want = [after_bytes(state, piece) is not None if piece else False for piece in vocab]
        assert constraint.mask(state).tolist() == want
        made.append(len(constraint.masks))
        state = after_bytes(state, more)
    assert made[-1] <= 2


def test_tokens_that_only_some_alternatives_allow_can_be_read(monkeypatch):
    """Alternatives within strings are walked apart from the others.  Read together, they can become
    more than MOST_LIVE, and those that read the token are not among the first."""
    monkeypatch.setattr(json_frames, "MOST_LIVE", 3)
    strings = [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 5}]
    patterns = [{"type": "string", "pattern": pattern} for pattern in ("^a?$", "^a?b?$")]
    schema = {"anyOf": [{"type": "array", "items": {"anyOf": items}}
                        for items in (strings, patterns)]}
    vocab = [bytes([x]) for x in range(256)] + [b'","abc']
    constraint = Constraint(as_text(schema), Trie(vocab, set()), None)
    state = after_bytes(constraint.start, b'["a')
    assert after_bytes(state, b'","abc') is None and constraint.mask(state)[256]
    rng = np.random.default_rng(1)
    for token in [256, *[None] * 60]:
        if token is None:
            token = int(rng.choice(np.flatnonzero(constraint.mask(state))))
        state = constraint.after(state, token)
        assert state is not None
        state = state or constraint.start


def test_the_memory_of_the_states_is_bounded(tokenizer, monkeypatch):
    """Not only that of their masks: 64 alternatives kept 40 KB for each token."""
    most = 1 << 16
    monkeypatch.setattr(json_mode, "MASK_BYTES", most)
    schema = {"anyOf": [{"type": "array", "items": {"type": "integer", "minimum": i}}
                        for i in range(64)]}
    constraint = Constraint(as_text(schema), Trie(tokenizer.vocab, set()), None)
    numbers = iter(range(1, 999))

    def use(n):
        for i in itertools.islice(numbers, n):
            constraint.mask(after_bytes(constraint.start, b"[%d" % i))

    use(20)
    tracemalloc.start()
    try:
        use(40)
        assert tracemalloc.get_traced_memory()[0] < 2 * most
    finally:
        tracemalloc.stop()
    assert 1 < len(constraint.masks) < 20


@settings(max_examples=200)
@given(low=st.integers(-200, 2000), size=st.integers(0, 3000), text=st.text("-.0123456789",
                                                                            max_size=5),
       more=st.text("-.0123456789", min_size=1, max_size=4))
def test_numbers_with_far_limits_read_the_same_bytes(low, size, text, more):
    frame = json_frames.number_between(10 * low, 10 * low + size, 1)
    state = after_bytes((frame,), text.encode())
    for each in state[0].states if state and isinstance(state[0], json_frames.Either) else [state]:
        if each and isinstance(each[0], json_frames.Digits):
            near = each[0].near(4),
            after = [after_bytes(x, more.encode()) for x in (each, near)]
            assert [x is None for x in after] in ([True] * 2, [False] * 2)
            if after[0] is not None:
                assert is_complete(after[0]) == is_complete(after[1])


def nested_arrays(width, depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"anyOf": [{"type": "array", "items": schema, "minItems": 1, "maxItems": 100 + i}
                            for i in range(width)]}
    return schema


@pytest.mark.parametrize("schema, text", [
    (nested_arrays(3, 4), '[[[["a"]],[["'),
    ({"anyOf": [{"type": "string", "minLength": 3 * i, "maxLength": 3 * i + 1}
                for i in range(64)]}, '"' + "abc\u00e9" * 9),
    ({"anyOf": [{"pattern": f"^.*x{{{i}}}$"} for i in range(1, 9)]}, '"' + "ax" * 9),
    (arrays_of_strings(64, 4), '["' + "a" * 6 + '","'),
    ({"anyOf": [{"type": "object", "required": ["a", f"b{i}"], "properties": {
        "a": {"type": "string", "maxLength": 900 + i}, f"b{i}": {}}} for i in range(64)]},
     '{"a":"abc","b1'),
    ({"anyOf": [{"type": "object", "additionalProperties": {"type": "array", "maxItems": i}}
                for i in range(2, 66)]}, '{"a":[1,{"b":[true,"c"]}]')])
def test_the_work_for_a_token_is_bounded(schema, text, tokenizer, monkeypatch):
    """Alternatives inside of alternatives do not multiply, and a mask takes a bounded number of
    steps, however many alternatives there are; each byte that is allowed stays a token."""
    constraint = Constraint(as_text(schema), Trie(tokenizer.vocab, set()), None)
    steps, alone = [], {token for token in tokenizer.vocab if len(token) == 1}
    read = json_mode.after_byte
    constraint.trie.mask((json_frames.Text(),))          # that of all strings, made once
    monkeypatch.setitem(vars(json_mode), "after_byte", lambda state, byte: steps.append(
        json_frames.alternatives(state)) or read(state, byte))       # not in json_frames
    state = constraint.start
    for i, byte in enumerate(text.encode()):
        steps.clear()
        mask = constraint.mask(state)
        assert 3 * sum(n for n in steps if n > 1) + steps.count(1) <= 3 * (
            json_mode.MOST_STEPS + 3 * 64)
        found = {tokenizer.vocab[i] for i in np.flatnonzero(mask)}
        assert found & alone == {x for x in alone if after_bytes(state, x) is not None}
        assert i % 4 or all(after_bytes(state, token) is not None for token in found)
        state = read(state, byte)
        assert json_frames.alternatives(state) <= 64


def test_strings_whose_limits_overlap_are_one_alternative():
    def start(*limits):
        return after_bytes((compiled(as_text({"anyOf": [
            {"type": "string", "minLength": a, "maxLength": b} for a, b in limits]}))[0],), b'"')

    assert start((2, 5), (4, 9), (10, 12)) == (json_frames.Text(2, 12),)
    assert json_frames.alternatives(start((2, 5), (7, 9))) == 2
    for n in range(12):
        state = after_bytes(start((2, 5), (7, 9)), b"a" * n)
        fits = state is not None and json_mode.after_byte(state, ord('"')) == ()
        assert fits == (2 <= n <= 5 or 7 <= n <= 9)


# ---- replies
CFG = replace(TINY, vocab_size=512, seq_len=300, n_mtp=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer):
    """A base model of random weights, whose texts are random bytes"""
    file = write(tmp_path_factory.mktemp("json") / "base.bin", CFG, tokenizer,
                 random_flat(CFG, 3, np.float32))
    return ne.load(str(file), temperature=1.0, tokens=120)


@each_schema
def test_replies_of_a_random_model_fit(name, model):
    replies = model.generate(["To be"], json_schema=as_text(SCHEMAS[name]), n=40)[0]
    done = [reply for reply in replies if reply.finish == "stop"]
    assert done and all(len(reply.tokens) == 120 for reply in replies if reply not in done)
    for reply in done:
        need_fit(reply.answer, SCHEMAS[name])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_reply_does_not_depend_on_the_batch_or_on_drafts(temperature, model):
    """Alone, in a batch with other ones, with draft tokens, as a stream"""
    o = dict(json_schema=as_text(SCHEMAS["book"]), temperature=temperature, n=6)
    want = [reply.answer for reply in model.generate(["To be"], speculate=0, **o)[0]]
    for more in {"batch": 1}, {"speculate": 3}, {"speculate": 1, "batch": 4}:
        assert [reply.answer for reply in model.generate(["To be"], **more, **o)[0]] == want
    assert "".join(model.stream("To be", **{**o, "n": 1})) == want[0]


def test_settings_of_sampling_restrict_what_json_mode_leaves(model):
    """top-k of the allowed tokens; log-probabilities of the model; the last token is the limit"""
    o = dict(json_schema=as_text(SCHEMAS["person"]), seed=4)
    [greedy] = model.generate(["To be"], temperature=0.0, **o)
    [top] = model.generate(["To be"], top_k=1, logprobs=2, **o)
    assert top.tokens == greedy.tokens
    logits = model.decoder.with_slots(1).step(*model.ids_of("To be"))
    assert top.logprobs[0][0] == ne.log_softmax(logits)[top.tokens[0]]
    assert top.logprobs[0][1][0][1] > top.logprobs[0][0]             # a token that is not allowed
    [reply] = [r for r in model.generate(["To be"], n=20, **o)[0] if r.finish == "stop"][:1]
    n = len(reply.tokens)
    same = model.generate(["To be"], n=20, tokens=n, **o)[0]
    assert [r.finish for r in same if r.answer == reply.answer] == ["stop"]
    less = model.generate(["To be"], n=20, tokens=n - 1, **o)[0]
    assert [r.finish for r in less if reply.answer.startswith(r.answer)] == ["length"]


def test_the_host_samples_in_json_mode(model):
    """A decoder that samples on the device is asked for the logits."""
    options, ids = replace(model.options, json_schema="object"), model.ids_of("To be")
    reader = model.decoder.with_slots(1)
    reader.samples_itself, reader.sample_on_device = True, never
    reply = model.new_reply(ids, options, ne.rng_of(1))
    assert [*ne.generate_many(reader, [reply])] == [(0, reply)]
    assert reply.answer == model.generate(["To be"], json_schema="object")[0].answer
    assert model.new_reply(ids, model.options, ne.rng_of(1)).requests(1)


def test_a_number_ends_with_the_end_token(model):
    """The only case in which it is sampled: objects end by themselves."""
    end = 2
    constraint = Constraint('{"type": "integer"}', Trie(model.tokenizer.vocab, set()), end)
    reply = ne.Reply([5], model.options, ne.rng_of(1), end, model.tokenizer.vocab,
                     constraint=constraint)
    digit, logits = model.tokenizer.vocab.index(b"7"), np.zeros(512, np.float32)
    logits[[digit, end]] = 50, 60
    reply.sample(logits)
    assert (reply.answer, reply.finish) == ("7", "")
    reply.sample(logits)
    assert (reply.answer, reply.finish) == ("7", "stop")


def replies_from_random_logits(tokenizer, name, n, tokens=256):
    rng, sampling = np.random.default_rng(1), ne.Sampling(temperature=1.0, tokens=tokens)
    constraint = json_mode.constraint(as_text(SCHEMAS[name]), tokenizer, None)
    for seed in range(n):
        reply = ne.Reply([0], sampling, ne.rng_of(seed), None, tokenizer.vocab,
                         constraint=constraint)
        while not reply.finish:
            reply.sample(3 * rng.standard_normal(tokenizer.vocab_size, np.float32))
        yield reply


@each_schema
@pytest.mark.parametrize("n", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_replies_from_random_logits_fit(name, n, tokenizer):
    done = 0
    for reply in replies_from_random_logits(tokenizer, name, n):
        if reply.finish == "stop":
            need_fit(reply.answer, SCHEMAS[name])
            done += 1
    assert done > 0


ASKED = ["Who are you?", "Tell me of a cat.", "Describe a person with name and age, as JSON.",
         "What is the capital of Norway?", "Write about the sea."]


@pytest.mark.parametrize("n", [1, pytest.param(40, marks=pytest.mark.slow)])
def test_replies_of_the_bundled_model_fit(n):
    """For five prompts and five schemas, n replies each; few reach the limit."""
    bundled = ne.load(str(ROOT / SHIPPED), weights="int8", temperature=1.0, tokens=256)
    ends = []
    for schema in SCHEMAS.values():
        found = bundled.generate(ASKED, json_schema=as_text(schema), n=n, batch=32)
        for reply in np.ravel(found).tolist():
            ends.append(reply.finish)
            if reply.finish == "stop":
                need_fit(reply.answer, schema)
    assert ends.count("length") <= 0.1 * len(ends)


# ---- the command line
def test_generate_takes_a_schema_or_object(tmp_path, checkpoint, tokenizer, capsys, monkeypatch):
    """A reply from a model without an end token; no note about an end"""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "m.bin", CFG, tokenizer, random_flat(CFG, 3, np.float32))
    (tmp_path / "s.json").write_text("\ufeff" + json.dumps(SCHEMAS["nested"]), encoding="utf-8")
    text = told("generate", "To be", "m.bin", "--json-schema", "s.json", "--tokens", 900)
    need_fit(text.removeprefix("To be"), SCHEMAS["nested"])
    assert capsys.readouterr().err.count("note:") == 0
    text = told("generate", "To be", "m.bin", "--json-schema", "object", "--tokens", 99)
    said = text.removeprefix("To be").removesuffix("\n")
    assert after_bytes(STARTS["object"], said.encode()) is not None
    (tmp_path / "p.jsonl").write_text('"a"\n"b"\n', encoding="utf-8")
    many = ("generate", "m.bin", "--file", "p.jsonl", "--out", "o.jsonl", "--json-schema", "s.json")
    run(*many)
    first = (tmp_path / "o.jsonl").read_bytes()
    run(*many)                               # continues
    assert (tmp_path / "o.jsonl").read_bytes() == first
    for line in first.splitlines():
        [answer] = json.loads(line)["answers"]
        if answer["finish"] == "stop":
            need_fit(answer["text"], SCHEMAS["nested"])
    (tmp_path / "s.json").write_text(json.dumps(SCHEMAS["answer"]), encoding="utf-8")
    refused(capsys, *many, words=["o.jsonl", "with these settings"])


@pytest.mark.parametrize("content, words", [
    (None, ["s.json", "No such file", "or object"]), ("", ["s.json", "Expecting value"]),
    ("{", ["s.json", "line 1"]), ('{"type": "string", "not": {}}', ["keyword not"])])
def test_generate_refuses_a_wrong_schema(content, words, checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "s.json").write_text(content, encoding="utf-8")
    refused(capsys, "generate", "to", checkpoint, "--json-schema", "s.json", words=words)
    assert not capsys.readouterr().out
    (tmp_path / "p.jsonl").write_text('"to"', encoding="utf-8")
    refused(capsys, "generate", checkpoint, "--file", "p.jsonl", "--out", "o.jsonl",
            "--json-schema", "s.json", words=words)
    assert not (tmp_path / "o.jsonl").exists()


# ---- the server
@pytest.fixture(scope="module")
def at(tmp_path_factory, tokenizer):
    needs("starlette")
    needs("uvicorn")
    file = chat_model(tmp_path_factory.mktemp("served") / "little.bin", tokenizer)
    with serving(file, context=0) as (address, _):
        yield address


def chat(at, **body):
    return post(at, "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "Hi"}], "temperature": 1, **body})


def format_of(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **more}}


def test_the_server_answers_in_json(at):
    """Several answers at once, beside one without JSON mode; as a stream, too"""
    for seed in range(3):
        body = dict(response_format=format_of(SCHEMAS["book"], strict=True), seed=seed, n=3,
                    max_tokens=300)
        status, _, said = chat(at, **body)
        assert status == 200
        for choice in said["choices"]:
            if choice["finish_reason"] == "stop":
                need_fit(choice["message"]["content"], SCHEMAS["book"])
        assert any(choice["finish_reason"] == "stop" for choice in said["choices"])
    stream = chat(at, stream=True, **body)[2]
    lines = stream.split("\n")               # a blank of Unicode does not end a line
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks
                   if c["choices"][0]["index"] == 0)
    assert text == said["choices"][0]["message"]["content"]
    body = {"prompt": "Hi", "max_tokens": 300, "seed": 1,
            "response_format": {"type": "json_object"}}
    [choice] = post(at, "/v1/completions", body)[2]["choices"]
    assert after_bytes(STARTS["object"], choice["text"].encode()) is not None
    plain = [chat(at, seed=1, max_tokens=9, **more)[2]["choices"][0]["message"]["content"]
             for more in ({}, {"response_format": {"type": "text"}})]
    assert plain[0] == plain[1]


def test_the_client_of_openai_gets_an_object_of_a_class(at):
    """The client makes the schema of a pydantic class, and the object of the answer."""
    openai, pydantic = needs("openai"), needs("pydantic")

    class Toy(pydantic.BaseModel):
        big: bool

    class Cat(pydantic.BaseModel):
        age: int
        color: Literal["black", "white"]
        name: Literal["Tom"] | None
        weight: float = pydantic.Field(description="kilograms")
        toy: Toy | None

    with openai.OpenAI(base_url=f"{at}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.parse(
            model="little", messages=[{"role": "user", "content": "A cat"}], max_tokens=400,
            response_format=Cat, seed=1)
    assert isinstance(answer.choices[0].message.parsed, Cat)


def is_date(text):
    """29 February is left out, as it depends on the year."""
    with contextlib.suppress(ValueError):
        datetime.date.fromisoformat(text)
        return not text.endswith("02-29")
    return False


def is_address(text):
    with contextlib.suppress(ValueError):
        return ipaddress.IPv4Address(text) is not None
    return False


def is_time(text):
    clock, zone = text[:8], text[8:]
    with contextlib.suppress(ValueError):
        datetime.time.fromisoformat(clock)
        if zone != "Z":
            datetime.time.fromisoformat(zone[1:] + ":00")
        return zone[0] in "Z+-"
    return False


DAYS = [f"{month:02}-{day:02}" for month in range(20) for day in range(40)]
CLOCKS = [f"{n:02}" for n in range(100)]
OF_FORMATS = {               # {format: (an independent check, texts)}
    "date": (is_date, [f"{year}-{day}" for year in (1600, 1999, 2023, 9999) for day in DAYS]),
    "time": (is_time, [text for n in CLOCKS for text in (
        f"{n}:00:00Z", f"00:{n}:00Z", f"00:00:{n}Z", f"00:00:00+{n}:00", f"00:00:00-00:{n}")]),
    "date-time": (lambda text: is_date(text[:10]) and is_time(text[11:]), [
        *(f"2023-{day}T00:00:00Z" for day in DAYS), *(f"2023-01-01T{n}:00:00Z" for n in CLOCKS)]),
    "ipv4": (is_address, [text for n in [*map(str, range(1000)), "", "00", "01", "012"]
                          for text in (f"{n}.0.0.0", f"1.{n}.22.255", f"1.2.3.{n}")])}


@pytest.mark.parametrize("name", OF_FORMATS)
def test_formats_are_those_of_an_independent_check(name):
    check, texts = OF_FORMATS[name]
    start = compiled(json.dumps({"type": "string", "format": name}))[0]
    wrong = [text for text in texts if accepts((start,), json.dumps(text)) != check(text)]
    assert not wrong and 0 < sum(map(check, texts)) < len(texts)


@pytest.mark.parametrize("value, words", [
    ("json", "expected an object"),
    ({"x": 1}, "expected the type text, json_object or json_schema"),
    ({"type": "xml"}, "json_object or json_schema"), ({"type": ["text"]}, "json_object"),
    ({"type": "json_object", "schema": 1}, "expected a JSON schema"),
    ({"type": "json_object", "schema": {}, "x": 1}, "expected type and schema"),
    ({"type": "json_schema"}, "expected json_schema with a schema"),
    ({"type": "json_schema", "json_schema": {"name": "a"}}, "with a schema"),
    (format_of({}, more=1), 'unknown keys ["more"]'),
    (format_of({"type": "string", "not": {}}), "the keyword not is not supported")])
def test_the_server_refuses_other_formats(value, words, at):
    status, _, said = chat(at, response_format=value)
    assert status == 400 and words in said["error"]["message"], said
    assert said["error"]["param"] == "response_format"


@pytest.mark.parametrize("text", ["object", "array", " object", "{"])
@pytest.mark.parametrize("name, make", [
    ("guided_json", lambda x: x), ("json_schema", lambda x: x),
    ("structured_outputs", lambda x: {"json": x}),
    ("response_format", lambda x: {"type": "json_object", "schema": x})])
def test_a_schema_that_is_no_json_is_refused(name, make, text, at):
    """`object` is the name of nanoeuler.Sampling for any object.  It is no schema of a client."""
    status, _, said = chat(at, **{name: make(text)})
    assert status == 400 and said["error"]["param"] == name
    assert said["error"]["message"].startswith("the JSON schema: Expecting")


@pytest.mark.parametrize("form", [
    {"response_format": {"type": "json_object", "schema": SCHEMAS["answer"]}},
    {"json_schema": SCHEMAS["answer"]}, {"guided_json": SCHEMAS["answer"]},
    {"guided_json": json.dumps(SCHEMAS["answer"])},
    {"structured_outputs": {"json": SCHEMAS["answer"]}}])
def test_the_server_takes_the_forms_of_other_servers(form, at):
    same = dict(seed=1, max_tokens=60)
    [want] = chat(at, response_format=format_of(SCHEMAS["answer"]), **same)[2]["choices"]
    status, _, said = chat(at, **form, **same)
    assert status == 200 and said["choices"] == [want]
    two = {"json_schema": {"type": "object"}, "guided_json": {"type": "object"}, **form}
    status, _, said = chat(at, **two)
    assert status == 400 and "expected one form of the answer" in said["error"]["message"]
