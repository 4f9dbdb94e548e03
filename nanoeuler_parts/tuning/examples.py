"""Reads training examples for sft and dpo: questions, conversations and preferences, in JSON or
Parquet."""
import codecs
import hashlib
import math
import os
from functools import partial

from bpe import need, read_bytes, reading
from nanoeuler import messages_in, PROMPT
from nanoeuler_parts.files.texts import parse_json

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

def words_of(messages):
    """The texts of the assistant's messages"""
    return [text for role, text in messages if role == "assistant"]

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

def conversation(asked, answers):
    """The example made of `asked`, the messages before the answer, and answers {key: messages}"""
    for messages in answers.values():
        need(words_of(messages), "expected a message of the assistant, found none")
    questions = [text for role, text in asked if role == "user"]
    return {"instruction": "".join(questions[-1:]), "input": "", "asked": asked, **answers}

def begin_alike(conversations):
    """The messages that all conversations begin with, without the last message of any of them"""
    alike = []
    for messages in zip(*(x[:-1] for x in conversations)):
        if len({*messages}) > 1:
            break
        alike.append(messages[0])
    return alike

def as_conversation(e, answers):
    """The example of an entry that consists of messages.  The entry has one of three forms.
    {"messages"} holds a whole conversation.  {"prompt", *answers} names the question.  If there
    are only answers, the messages that all of them begin with are the question."""
    key = "messages" if "messages" in e else "output"
    if answers == ("output",) and not isinstance(e.get("instruction"), list):
        messages = messages_in(e.get(key), key)
        roles = [role for role, _ in messages] + ["assistant"]
        first = roles.index("assistant")
        return conversation(messages[:first], {"output": messages[first:]})
    said = {key: messages_in(e.get(key), key) for key in answers}
    question = e.get("instruction")          # the file may call it prompt
    if isinstance(question, list):
        return conversation(messages_in(question, "prompt"), said)
    asked = begin_alike(said.values())
    said = {key: messages[len(asked):] for key, messages in said.items()}
    if not asked and isinstance(question, str):
        asked = [("user", question)]
    return conversation(asked, said)

# Other names for the fields of an example -> Alpaca's names
ALSO_CALLED = {"prompt": "instruction", "completion": "output"}

def as_example(entry, answers):
    """An entry under Alpaca's names, {instruction, input, *answers}.  A null field counts as
    missing.  If the entry consists of messages, the example also has `asked`, and its answers are
    lists of messages.  A field `asked` in the file itself is ignored."""
    e = {name: x for name, x in entry.items() if x is not None and name != "asked"}
    for theirs, ours in ALSO_CALLED.items():
        if theirs in e and ours not in e:
            e[ours] = e.pop(theirs)
    e = {"input": "", **e}
    pair = {"chosen", "rejected"} <= e.keys() and answers == ("output",) and not (
        {"output", "messages"} & e.keys())
    need(not pair, "expected the field output, found a preference pair; train on pairs with dpo")
    of_messages = answers == ("output",) and "messages" in e and "output" not in e
    if of_messages or any(isinstance(e.get(key), list) for key in answers):
        return as_conversation(e, answers)
    for key in ("instruction", "input", *answers):
        need(key in e, f"{key} is missing or null; the fields are "
             f"{', '.join(map(str, entry)) or 'none':.80}")
        need(isinstance(e[key], str), f"{key} is {e[key]!r:.40}, expected text")
    return e

def read_entries(path, remedy):
    """[(name for error messages, function that returns the entry)], and the file's SHA-256.
    A line of JSON lines is parsed by its function, so that an error names the line."""
    with reading(path, remedy):
        text = read_bytes(path)
        digest = hashlib.sha256(text).hexdigest()
        if os.fspath(path).endswith(".parquet"):
            import pyarrow.parquet
            rows = pyarrow.parquet.read_table(path).to_pylist()
            return [(f"example {i}", lambda e=e: e) for i, e in enumerate(rows, 1)], digest
        if text.lstrip(codecs.BOM_UTF8 + b" \t\r\n")[:1] == b"[":
            entries = parse_json(text)
            return [(f"example {i}", lambda e=e: e) for i, e in enumerate(entries, 1)], digest
        lines = enumerate(text.splitlines(), 1)
        return [(f"line {i}", partial(parse_json, x)) for i, x in lines if x.strip()], digest

def read_examples(path, *answers):
    """The examples of a JSON list, of JSON lines or of a Parquet file, and the file's SHA-256."""
    fields = f"(instruction, input, {', '.join(answers)})"
    others = " or (prompt, chosen, rejected)"
    if answers == ("output",):
        others = ", (prompt, completion) or (messages)"
    remedy = f"with --data, name a JSON list, JSON lines or Parquet with fields {fields}{others}"
    entries, digest = read_entries(path, remedy)
    examples = []
    for name, entry in entries:
        with reading(f"{path}, {name}", remedy):
            e = entry()
            need(isinstance(e, dict), f"expected an object, found {type(e).__name__}")
            e = as_example(e, answers)
            texts = [e["instruction"], e["input"], *(text for _, text in asked_in(e))]
            texts += [text for key in answers for _, text in answered_in(e, key)]
            for text in texts:
                text.encode()                # fails on a lone surrogate, which is not valid text
            examples.append(e)
    need(examples, f"{path}: expected examples, found none; {remedy}")
    return examples, digest
