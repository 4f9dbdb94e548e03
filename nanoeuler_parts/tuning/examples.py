"""Reads training examples for sft, dpo and rl: questions, conversations and preferences, in JSON,
CSV or Parquet.  Each of these files may be compressed."""
import codecs
import contextlib
import csv
import hashlib
import io
import math
import os
from functools import partial
from typing import NamedTuple

from bpe import need, reading, UserError
from nanoeuler import PROMPT
from nanoeuler_parts.files.corpora import kind_of, unpacked, unpacking
from nanoeuler_parts.files.texts import marked_encoding, parse_json, record_lines
from nanoeuler_parts.tuning.formats import (
    Advised, as_example, conversation, forms, has_answer, is_blank, leading_systems, names_of,
    need_advised, up_to_answer,
)

PROMPT_INPUT = ("Below is an instruction that describes a task, paired with an input that provides "
                "further context. Write a response that appropriately completes the request.\n\n"
                "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n")

def prompt_of(example):
    return (PROMPT_INPUT if example["input"] else PROMPT).format(**example)

def is_conversation(example):
    """Does it consist of messages, (role, text)?  Other examples have one question, and each of
    their answers is a text."""
    return "asked" in example

def asked_in(example):
    """The messages before the answer"""
    question = "\n\n".join(filter(None, (example["instruction"], example["input"])))
    return example.get("asked", [("user", question)])

def answered_in(example, key):
    """The messages of an answer.  In a whole conversation, some of them are the user's."""
    answer = example[key]
    return [("assistant", answer)] if isinstance(answer, str) else answer

def question_hash(example):
    asked = [example["instruction"]]
    if is_conversation(example):
        asked = [text for _, text in example["asked"]]
    question = "\0".join((*asked, example["input"])).encode()
    return int.from_bytes(hashlib.sha256(question).digest()[:4], "big")

def held_out(example, share=0.02):
    """Is the example held out for validation?  About this share of all examples is, by default one
    in 50.  A 32-bit hash of the question decides, so a question is always on the same side."""
    one_in = round(1 / share) if share else 0
    if one_in and math.isclose(one_in * share, 1):
        return question_hash(example) % one_in == 0
    return question_hash(example) < share * (1 << 32)

# ---- --truncate
def turns(messages):
    """The indices at which an exchange begins, without the first: a message that is not the
    assistant's or a tool's, after one that is"""
    answers = [role in ("assistant", "tool") for role, _ in messages]
    return [i for i in range(1, len(messages)) if answers[i - 1] and not answers[i]]

def cut_versions(example, keys):
    """Functions that return the conversation without its oldest exchange, without the oldest two,
    and so on.  System messages at its beginning stay.  Of a pair, only the question is cut."""
    if not is_conversation(example):
        return []
    asked, first = example["asked"], leading_systems(example["asked"])
    whole, last = asked, len(asked) - 1
    if len(keys) == 1:
        whole = asked + example[keys[0]]
        last = max(i for i, (role, _) in enumerate(whole) if role == "assistant")

    def without(i):
        """The conversation without messages first to i - 1"""
        kept = whole[i:]
        n = max(len(asked) - i, len(up_to_answer(kept)))         # the messages that are not trained
        said = {key: kept[n:] if len(keys) == 1 else example[key] for key in keys}
        return {**example, **conversation(whole[:first] + kept[:n], said)}

    starts = (first + i for i in turns(whole[first:]))
    return [partial(without, i) for i in starts if i <= last]

# ---- files
def columns_of(settings, answers, own=()):
    """{NAME: COLUMN} of the settings --field NAME=COLUMN.  own: further names"""
    names, columns = [*own, *names_of(answers)], {}
    for x in settings:
        name, _, column = x.partition("=") if isinstance(x, str) else ("", "", "")
        need(column, f"--field is {x!r:.40}, expected NAME=COLUMN")
        need(name in names, f"--field {x:.40}: expected one of the names {', '.join(names)}, found "
             f"{name!r:.40}")
        need(name not in columns, f"--field {name} is given twice, expected one column for it")
        columns[name] = column
    return columns

def renamed(entry, columns):
    """The entry with its columns under the names that --field chooses"""
    chosen = {name: entry[column] for name, column in columns.items() if column in entry}
    replaced = {*columns, *columns.values()}
    return {name: x for name, x in entry.items() if name not in replaced} | chosen

CORRECT = "correct this example, or remove it"

@contextlib.contextmanager
def at(place, remedy=CORRECT):
    """Adds the place of an example to an error, and the remedy if the error has none of its own."""
    advised = None
    with reading(place, remedy):
        try:
            yield
        except Advised as e:
            advised = e
    if advised:
        raise UserError(f"{place}: {advised}")

def need_utf8(text):
    found = marked_encoding(text)
    need_advised(not found, f"expected UTF-8, found {found}; save the file as UTF-8")

def rows_of_csv(text, delimiter):
    """[(name for error messages, entry)] of a table whose first line names the columns"""
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))     # characters of a cell
    header, entries, start = None, [], 1
    need_utf8(text)
    try:
        lines = io.StringIO(text.decode("utf-8-sig"), newline="")
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        for row in reader:
            place, start = f"line {start}", reader.line_num + 1  # a cell may hold line ends
            if header is None and row:
                header = row
                need(len(row) > 1 or not {";", "\t"} & {*row[0]}, f"{place}: expected cells "
                     f"separated by commas (tabs in .tsv), found {row[0]!r:.60}")
                twice = [name for name in header if name and header.count(name) > 1]
                need(not twice, f"expected different names of columns, found {twice[:2]}")
            elif row:                        # not a blank line
                need(len(row) == len(header), f"{place}: expected {len(header)} cells as in the "
                     f"first line, found {len(row)}")
                entries.append((place, dict(zip(header, row))))
    except UnicodeDecodeError as e:
        raise ValueError(f"it is not valid UTF-8 at byte {e.start}; save it as UTF-8") from None
    except csv.Error as e:
        raise ValueError(f"line {start}: {e}") from None
    return entries

EXAMPLES = ("name a file with examples such as {\"instruction\": ..., \"output\": ...}: JSON, JSON "
            "lines, or a table in .csv, .tsv or .parquet")
CORRECT_LINE = "correct this line: each line is one whole JSON object, unless the file is a list"

def need_json(text):
    """Rejects a file that is not JSON at all, by its first character."""
    need_utf8(text)
    first = text[:30].decode("utf-8", "replace")
    need(not text or text[:1] in b"[{" or text[:1].isdigit(),
         f"expected a JSON list, or a JSON object on each line, found {first!r}")

def content_of(path, remedy=EXAMPLES):
    """The bytes of a file without its compression, and their SHA-256.  So a file keeps its digest
    when it is compressed.     remedy: for a file that cannot be read"""
    with at(path, remedy), unpacking(), unpacked(os.fspath(path)) as f:
        content = f.read()
    return content, hashlib.sha256(content).hexdigest()

def read_entries(path, remedy=EXAMPLES):
    """[(name for error messages, entry)] and the SHA-256 of `content_of`.  An entry is any JSON
    value.     remedy: for a file that cannot be read, or is of another kind"""
    (text, digest), (kind, _) = content_of(path, remedy), kind_of(os.fspath(path))
    if kind in (".csv", ".tsv"):
        with at(path, "correct the table there"):
            return rows_of_csv(text, "\t" if kind == ".tsv" else ","), digest
    if kind == ".parquet":
        import pyarrow.parquet
        with at(path, "write it again as Parquet, or name another file"):
            rows = pyarrow.parquet.read_table(io.BytesIO(text)).to_pylist()
            return [(f"example {i}", e) for i, e in enumerate(rows, 1)], digest
    plain = text.removeprefix(codecs.BOM_UTF8).lstrip()
    with at(path, remedy):
        need_json(plain)
    with at(path, "correct the JSON there"):
        if plain[:1] == b"[":
            return [(f"example {i}", e) for i, e in enumerate(parse_json(text), 1)], digest
    entries = []
    for i, line in enumerate(record_lines(text), 1):
        if line.strip():
            with at(f"{path}, line {i}", CORRECT_LINE):
                entries.append((f"line {i}", parse_json(line, i)))
    return entries, digest

class ExampleFile(NamedTuple):
    examples: list
    digest: str                              # SHA-256
    ignored: list                            # names of fields without effect

def read_file(path, answers, settings=(), ignore=(), optional=False, check=None):
    """The ExampleFile of a JSON list, of JSON lines, of CSV or of Parquet.
    settings: --field NAME=COLUMN; ignore: --ignore NAME; optional: may an example lack answers?
    check: called with each example, raises an error if it is wrong"""
    entries, digest = read_entries(path)
    expected = forms([] if optional else answers)
    names, columns = {}, columns_of(settings, answers)
    for place, e in entries:
        with at(f"{path}, {place}"):
            need(isinstance(e, dict), f"expected an object with the fields {expected}, found "
                 f"{type(e).__name__}")
            names |= dict.fromkeys(e)
    need(entries, f"{path}: expected examples, found none; write JSON with the fields "
         f"{expected} into it")
    for name, column in columns.items():
        need(column in names, f"--field {name}={column}: expected one of the fields of {path}, "
             f"{', '.join(map(str, names)):.200}; found none of this name")
    examples, ignored = [], {}
    for place, e in entries:
        with at(f"{path}, {place}"):
            e = renamed(e, columns)
            keys = answers if not optional or has_answer(e) else []
            e = as_example(e, keys, ignore)
            texts = [e["instruction"], e["input"], *(text for _, text in asked_in(e))]
            texts += [text for key in keys for _, text in answered_in(e, key)]
            for text in texts:
                text.encode()                # fails on a lone surrogate, which is not valid text
            if check:
                check(e)
        examples.append(e)
        own = {"instruction", "input", "asked", *answers}
        ignored |= {name: None for name, x in e.items() if name not in own and not is_blank(x)}
    return ExampleFile(examples, digest, list(ignored))

def read_examples(path, *answers):
    """The examples of a file, and its SHA-256"""
    return read_file(path, answers)[:2]
