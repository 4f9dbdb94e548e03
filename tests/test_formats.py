"""The forms of fine-tuning data that other programs write, read as the same conversations."""
import bz2
import codecs
import contextlib
import csv
import gzip
import json
import lzma
import re

import numpy as np
import pytest
from examples import FLAGS, copy_of
from helpers import ROOT, drawn, needs, refused, run, told
from hypothesis import example, given, settings
from hypothesis import strategies as st

import nanoeuler as ne
from nanoeuler_parts.chat.json_mode import read_schema
from nanoeuler_parts.checkpoint.file import sha256_of
from nanoeuler_parts.files.texts import read_text
from nanoeuler_parts.tuning.dpo import DpoOptions, DpoRun
from nanoeuler_parts.tuning.examples import (
    answered_in, asked_in, cut_versions, read_examples, read_file,
)
from nanoeuler_parts.tools.evaluation import EvalOptions, question_in, read_questions
from nanoeuler_parts.tuning.formats import (
    as_example, HARMLESS, names_of, PARTS, plain_name, TRAINED,
)
from nanoeuler_parts.tuning.sft import SftOptions, SftRun

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]
PAIR = ["chosen", "rejected"]


# ---- ten conversations, in every form
def of_openai(messages):
    return [dict(role=role, content=text) for role, text in messages]


def in_parts(messages):
    return [dict(role=role, content=[dict(type="text", text=text[:3]),
                                     dict(type="text", text=text[3:])]) for role, text in messages]


def of_sharegpt(messages):
    names = dict(user="human", assistant="gpt", system="system")
    return [{"from": names[role], "value": text} for role, text in messages]


def parts_of_sharegpt(messages):
    return [{"from": role, "value": [dict(type="text", text=text)]} for role, text in messages]


def of_alpaca(messages):
    """{system, history, instruction} of the messages before an answer"""
    *before, (_, question) = messages
    system = [before.pop(0)[1]] if before and before[0][0] == "system" else [""]
    texts = [text for _, text in before]
    return dict(system=system[0], instruction=question,
                history=[[*pair] for pair in zip(texts[::2], texts[1::2])])


def apart(messages):
    """The system message and the others"""
    if messages[0][0] == "system":
        return messages[0][1], messages[1:]
    return "", messages


def of_anthropic(messages):
    names = dict(user="Human", assistant="Assistant")
    return "".join(f"\n\n{names[role]}: {text}" for role, text in messages)


TURNS = [[("system", f"Be number {i}.")] * (i % 2)
         + [(role, f"{word} {i} of {turn}?") for turn in range(1 + i % 3)
            for role, word in (("user", "What is"), ("assistant", "It is"))] for i in range(10)]
SINGLE = [[("user", f"What is {i}?"), ("assistant", f"It is {i}.")] for i in range(10)]


def conversation_forms(x):
    """The forms of a whole conversation"""
    system, others = apart(x)
    *before, (_, answer) = x
    asked, told = of_alpaca(others[:-1]), [*x[:len(x) - len(others)], x[-1]]
    return {
        "messages": dict(messages=of_openai(x)),
        "parts": dict(messages=in_parts(x)),
        "ShareGPT": dict(conversations=of_sharegpt(x)),
        "parts of ShareGPT": dict(conversations=parts_of_sharegpt(x)),
        "conversations of OpenAI": dict(conversations=of_openai(x)),
        "Alpaca": dict(**of_alpaca(before), output=answer),
        "system beside messages": dict(system=system, messages=of_openai(others)),
        "system beside ShareGPT": dict(system=system, conversations=of_sharegpt(others)),
        "completion": dict(completion=of_openai(x)),
        "a question that is there twice": dict(prompt=others[0][1], messages=of_openai(x)),
        **{f"the system message in {name}": {**asked, name: messages} for name, messages in (
            ("completion", of_openai(told)), ("messages", of_openai(told)),
            ("conversations", of_sharegpt(told)))},
        "nulls": dict(id=7, output=None, tools=[], messages=[
            {**m, "tool_calls": None, "weight": 1} for m in of_openai(x)])}


def single_forms(x):
    """The forms that hold one question and one answer"""
    (_, question), (_, answer) = x
    return {
        "messages": dict(messages=of_openai(x)),
        "Alpaca": dict(instruction=question, input="", output=answer),
        "texts": dict(prompt=question, completion=answer),
        "TRL": dict(prompt=of_openai(x[:1]), completion=of_openai(x[1:])),
        "a text and messages": dict(prompt=question, completion=of_openai(x[1:]))}


def pair_forms(x):
    """The forms of a pair of answers; the one in `x` is chosen"""
    *asked, last = x
    system, others = apart(asked)
    worse = ("assistant", "No idea.")
    chosen, rejected = dict(chosen=of_openai([last])), dict(rejected=of_openai([worse]))
    texts = dict(chosen=last[1], rejected=worse[1])
    whole = {key: of_openai([*asked, y]) for key, y in (("chosen", last), ("rejected", worse))}
    of_text = {key: of_anthropic([*others, y]) for key, y in (("chosen", last),
                                                            ("rejected", worse))}
    told = {key: of_openai([*asked[:len(asked) - len(others)], y])
            for key, y in (("chosen", last), ("rejected", worse))}
    objects = {key: of_sharegpt([y])[0] for key, y in (("chosen", last), ("rejected", worse))}
    return {
        "TRL": dict(prompt=of_openai(asked), **chosen, **rejected),
        "ShareGPT": dict(conversations=of_sharegpt(asked), **objects),
        "messages": dict(messages=of_openai(asked), chosen=of_openai([last])[0],
                         rejected=in_parts([worse])[0]),
        "Alpaca": dict(**of_alpaca(asked), **texts),
        "Alpaca and messages": dict(**of_alpaca(asked), **chosen, **rejected),
        "the system message in both answers": dict(**of_alpaca(others), **told),
        "without a question": whole,
        "UltraFeedback": dict(prompt=others[0][1], **whole, messages=whole["chosen"]),
        "a question in all three": dict(prompt=of_openai(asked), **whole),
        "hh-rlhf": dict(system=system, **of_text)}


def write(path, entries):
    path.write_text("".join(json.dumps(e) + "\n" for e in entries), encoding="utf-8")
    return path


def begin(base, folder, path, Options, run_of, **chosen):
    """A run of these data before its first step"""
    start = ne.read_checkpoint(str(base / "nanoeuler.bin"))
    start = start._replace(moments=(), state=ne.State(kind="chat", template=ne.CHATML))
    options = Options.chosen(**{"data": str(path), "batch": 320, "row_len": 160, "dtype": "f32",
                                **chosen})
    return run_of(str(folder / "x.bin"), start, options)


def rows(of_run):
    """Ids and targets of all rows, of the training and the held-out examples"""
    data = of_run.data
    return [x for part in (data.batches, data.responses) for x in part.batch(slice(None))]


def all_rows(base, folder, forms, *kind, **chosen):
    """{form: rows of the run that trains on it}"""
    return {form: rows(begin(base, folder, write(folder / "data.jsonl", entries), *kind, **chosen))
            for form, entries in forms.items()}


def by_form(forms_of, conversations):
    forms = [forms_of(x) for x in conversations]
    return {form: [x[form] for x in forms] for form in forms[0]}


@pytest.mark.parametrize("forms_of, conversations, Options, run_of, first", [
    (conversation_forms, TURNS, SftOptions, SftRun, "messages"),
    (single_forms, SINGLE, SftOptions, SftRun, "messages"),
    (pair_forms, TURNS, DpoOptions, DpoRun, "TRL")], ids=["turns", "single", "pairs"])
def test_every_form_makes_the_same_rows(forms_of, conversations, Options, run_of, first, base,
                                        tmp_path):
    forms = by_form(forms_of, conversations)
    made = all_rows(base, tmp_path, forms, Options, run_of, holdout=0.2)
    assert (made[first][1] >= 0).any() and len(made[first][0]) >= 8
    for form, arrays in made.items():
        for got, want in zip(arrays, made[first], strict=True):
            assert np.array_equal(got, want), form


COLUMNS = [["instruction", "question"], ["output", "answer"], ["system", "persona"]]
ASK = [{"persona": f"Be {i}, \"so\".", "question": f"What,\nis {i}?", "answer": f"It is\r\n{i}.",
        "id": str(i)} for i in range(10)]


def write_table(path, entries):
    if path.suffix == ".parquet":
        needs("pyarrow")
        import pyarrow.parquet
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(entries), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(entries), encoding="utf-8")
    elif path.suffix == ".jsonl":
        write(path, entries)
    else:
        with open(path, "w", encoding="utf-8-sig", newline="") as f:
            table = csv.DictWriter(f, list(entries[0]),
                                   delimiter="\t" if path.suffix == ".tsv" else ",")
            table.writeheader()
            table.writerows(entries)
    return path


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet", "json", "jsonl"])
def test_columns_of_a_table_make_the_same_rows(ending, base, tmp_path):
    path = write_table(tmp_path / f"table.{ending}", ASK)
    messages = [dict(messages=of_openai([("system", e["persona"]), ("user", e["question"]),
                                         ("assistant", e["answer"])])) for e in ASK]
    [want] = all_rows(base, tmp_path, {"messages": messages}, SftOptions, SftRun).values()
    run_of = begin(base, tmp_path, path, SftOptions, SftRun, field=["=".join(x) for x in COLUMNS])
    assert all(map(np.array_equal, rows(run_of), want))
    assert run_of.ignored == ["id"] and len(want[0]) == 10


PACK = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}


@pytest.mark.parametrize("ending", ["csv", "TSV", "parquet", "json", "jsonl"])
def test_a_compressed_file_has_the_examples_and_the_digest_of_the_file(ending, tmp_path):
    path = write_table(tmp_path / f"table.{ending.lower()}", ASK)
    want = read_file(path, ["output"], ["=".join(x) for x in COLUMNS])
    for suffix, pack in PACK.items():
        packed = tmp_path / f"packed.{ending}{suffix}"
        packed.write_bytes(pack(path.read_bytes()))
        assert read_file(packed, ["output"], ["=".join(x) for x in COLUMNS]) == want
        assert SftRun.digest_of(str(packed), None) == want.digest == sha256_of(path)


@pytest.mark.parametrize("suffix", list(PACK))
def test_a_damaged_compressed_file(suffix, tmp_path):
    packed = PACK[suffix](json.dumps(ASK).encode() * 9)
    for content in (packed[:-5], b"no archive", b""):
        (tmp_path / f"a.json{suffix}").write_bytes(content)
        with pytest.raises(ne.UserError, match=f"a.json{suffix}"):
            read_examples(tmp_path / f"a.json{suffix}", "output")


@pytest.mark.parametrize("settings, words", [
    (["output"], ["'output'", "expected NAME=COLUMN"]), (["output="], ["expected NAME=COLUMN"]),
    (["answer=output"], ["one of the names instruction, prompt, input, system, history, output"]),
    (["chosen=answer"], ["found 'chosen'"]),
    (["output=answer", "output=id"], ["--field output is given twice"]),
    (["output=reply"], ["--field output=reply", "one of the fields of", "persona, question, answer",
                        "found none of this name"])])
def test_wrong_columns(settings, words, base, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(copy_of(base, tmp_path))
    write_table(tmp_path / "data.csv", ASK)
    flags = [x for text in settings for x in ("--field", text)]
    refused(capsys, "sft", "--data", "data.csv", *flags, words=words)


def test_columns_are_checked_with_the_other_settings():
    """Before any file is read; each verb has its own names."""
    for Options, text in ((SftOptions, "chosen=a"), (DpoOptions, "output=a"), (SftOptions, "a")):
        with pytest.raises(ne.UserError, match="--field"):
            Options.chosen(field=[text])
    assert DpoOptions.chosen(field=["chosen=a"]).field == ["chosen=a"]


def test_columns_may_change_their_names(tmp_path):
    """The field that has the name already is not read."""
    path = write(tmp_path / "data.jsonl", [dict(prompt="A", output="B", note="C"),
                                           dict(prompt="A", output="B")])
    with pytest.raises(ne.UserError, match="line 2.*output is missing.*; add the field output"):
        read_file(path, ["output"], ["output=note"])
    [e, _], _, ignored = read_file(path, ["output"], ["prompt=output", "output=prompt"])
    assert (e["instruction"], e["output"], ignored) == ("B", "A", ["note"])


@pytest.mark.parametrize("text, words", [
    (b"", ["expected examples, found none"]), (b"prompt,completion\n", ["found none"]),
    (b"prompt,completion\na,b\nc\n", ["line 3", "expected 2 cells", "found 1"]),
    (b"prompt,completion\n\"a\n\nb\",c\nd,e,f\n", ["line 5", "found 3"]),
    (b"prompt,prompt\na,b\n", ["different names", "prompt"]),
    (b"prompt,completion\n\"a,b\n", ["line 2", "unexpected end of data"]),
    (b"prompt,completion\n\"a\"x,b\n", ["line 2", "expected after"]),
    (b"prompt,completion\n\xff,b\n", ["not valid UTF-8 at byte 18", "save it as UTF-8"]),
    (b"prompt;completion\na;b\n", ["line 1", "separated by commas", "prompt;completion"])])
def test_bad_tables(text, words, tmp_path):
    (tmp_path / "data.csv").write_bytes(text)
    with pytest.raises(ne.UserError) as e:
        read_examples(tmp_path / "data.csv", "output")
    for word in ["data.csv", *words]:
        assert word in str(e.value), e.value


def test_long_cells_and_blank_lines(tmp_path):
    long = "x" * 200_000
    (tmp_path / "data.CSV").write_bytes(f"\n,prompt,completion\r\n\r\n0,{long},b\n".encode())
    [e], _, ignored = read_file(tmp_path / "data.CSV", ["output"])
    assert (e["instruction"], e["output"], ignored) == (long, "b", [""])


# ---- by property
text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
words = st.text("ab\u00e9 :\"',\n", min_size=1, max_size=12).map(str.strip).filter(bool)


@st.composite
def conversations(draw, texts=text):
    """A system message or none, then exchanges"""
    system = [("system", draw(texts))] if draw(st.booleans()) else []
    return system + [message for _ in range(draw(st.integers(1, 4)))
                     for message in (("user", draw(texts)), ("assistant", draw(texts)))]


def as_messages(example, key):
    return asked_in(example), answered_in(example, key)


@drawn(60)
@given(conversations())
def test_every_form_of_a_conversation_is_the_same(x):
    first = 1 + (x[0][0] == "system")
    for form, entry in conversation_forms(x).items():
        assert as_messages(as_example(entry, ["output"]), "output") == (x[:first], x[first:]), form
    if first == 1 and len(x) == 2:
        for form, entry in single_forms(x).items():
            assert as_messages(as_example(entry, ["output"]), "output") == (x[:1], x[1:]), form


@drawn(60)
@given(conversations(words))
def test_every_form_of_a_pair_is_the_same(x):
    for form, entry in pair_forms(x).items():
        e = as_example(entry, PAIR)
        assert as_messages(e, "chosen") == (x[:-1], x[-1:]), form
        assert as_messages(e, "rejected") == (x[:-1], [("assistant", "No idea.")]), form


def test_the_guide_shows_forms_that_are_read(tmp_path):
    guide = (ROOT / "docs" / "fine-tune.md").read_text(encoding="utf-8")
    of_sft, of_dpo = re.findall("(?s)```json\n(.*?)```", guide)
    for text, keys, last in (of_sft, ["output"], "Good morning."), (of_dpo, PAIR, "What?"):
        (tmp_path / "data.jsonl").write_text(text, encoding="utf-8")
        examples, _, ignored = read_file(tmp_path / "data.jsonl", keys)
        assert ignored == [] and len(examples) == text.count("\n")
        assert answered_in(examples[-1], keys[-1]) == [("assistant", last)]


def test_whole_texts_by_hand():
    """A mark counts at the beginning of a paragraph; the first turn that differs is an answer's."""
    begun = "Human: Hi, Human: you?\n\nAssistant: Ho.\n\nHuman:  \n\nAssistant:"
    e = as_example(dict(chosen=begun + " Ha.", rejected="\n\n" + begun + " No.\n"), PAIR)
    assert e["asked"] == [("user", "Hi, Human: you?"), ("assistant", "Ho."), ("user", "")]
    assert (e["chosen"], e["rejected"]) == ([("assistant", "Ha.")], [("assistant", "No.")])


def test_an_empty_question_is_left_out_in_every_form(base, tmp_path, capsys):
    empty = [dict(instruction="", output="Ho."), dict(instruction="", output="Ho.", system="Be."),
             dict(messages=[*TOLD[:1], dict(role="user", content=""), *SAYS[1:]])]
    path = write(tmp_path / "data.jsonl", [with_message(), with_message(), *empty])
    assert len(begin(base, tmp_path, path, SftOptions, SftRun).encoded) == 5
    assert "left out         0 examples longer than a row of 160 tokens, 3 empty" in (
        capsys.readouterr().out)


# ---- what is rejected, and what is not read
SAYS = [dict(role="user", content="Hi?"), dict(role="assistant", content="Ho.")]
TOLD = [dict(role="system", content="Be."), *SAYS]
TEXTS = dict(instruction="Hi?", output="Ho.")


def with_message(**fields):
    return dict(messages=[SAYS[0], {**SAYS[1], **fields}])


@pytest.mark.parametrize("entry, words", [
    (dict(conversations=[{"from": "human", "value": "Hi?"}, {"from": "function_call",
                                                             "value": "f()"}]),
     ["conversations[1]", "roles human, user, gpt", "found 'function_call'"]),
    (dict(conversations=[{"from": "human", "value": "Hi?", "content": "Hi?"}]),
     ["conversations[0]", "found from, value, content"]),
    (dict(conversations=[{"from": ["gpt"], "value": "Hi?"}]), ["found ['gpt']"]),
    (dict(conversations=[{"from": "human", "value": 7}]), ["expected a text", "found 7"]),
    (dict(conversations=[{"from": "human", "value": [dict(type="image", url="x" * 99)]}]),
     ["conversations[0]", "part of type 'image'"]),
    (dict(messages=SAYS, output="Ho."), ["output and messages", "found both"]),
    (dict(messages=SAYS, conversations=SAYS), ["messages and conversations", "found both"]),
    (dict(**TEXTS, prompt="Ha?"), ["instruction and prompt", "found both"]),
    (dict(**TEXTS, completion="Ha."), ["output and completion", "found both"]),
    (dict(messages=SAYS, prompt="Ha?"), ["expected one question", "remove one"]),
    (dict(messages=SAYS, input="Ha?"), ["expected one question", "remove one"]),
    (dict(messages=SAYS, history=[["a", "b"]]), ["expected one question", "remove one"]),
    (dict(prompt=SAYS[:1], completion=SAYS[1:], history=[["a", "b"]]), ["no history beside"]),
    (dict(messages=TOLD, system="Be."), ["one system message", "remove one"]),
    (dict(**TEXTS, system=["Be."]), ["system is ['Be.'], expected text"]),
    (dict(**TEXTS, history="Ha?"), ["history is 'Ha?', expected a list of pairs"]),
    (dict(**TEXTS, history=[["a", "b", "c"]]), ["history is", "expected a list of pairs"]),
    (dict(**TEXTS, history=[["a", None]]), ["history is", "expected a list of pairs"]),
    (dict(**TEXTS, images=["a.png"]), ["the field images, ['a.png']", "remove the field or"]),
    (dict(**TEXTS, label=False), ["the field label, False", "--ignore label"]),
    (dict(**TEXTS, asked="Ha?"), ["the field asked, 'Ha?'"]),
    (dict(**TEXTS, weight=0), ["the field weight, 0", "remove the field or the example"]),
    (with_message(content=None, tool_calls=[{}]), ["messages[1]", "the field tool_calls"]),
    (with_message(weight=0), ["messages[1]", "the field weight, 0", "into prompt"]),
    (with_message(weight=0.5), ["messages[1]", "the field weight, 0.5", "into prompt"]),
    (with_message(train=False), ["messages[1]", "train, False", "every answer", "into prompt"]),
    (with_message(masked=True), ["messages[1]", "masked, True", "every answer", "into prompt"]),
    (dict(messages=[{**SAYS[0], "train": True}, SAYS[1]]), ["messages[0]", "train, True", "only"]),
    (dict(prompt=[SAYS[0], {**SAYS[1], "train": True}, SAYS[0]], completion=SAYS[1:]),
     ["prompt[1]", "train, True", "only the answers"]),
])
def test_fields_that_matter_are_rejected(entry, words, tmp_path):
    path = write(tmp_path / "data.jsonl", [TEXTS, entry])
    with pytest.raises(ne.UserError) as e:
        read_examples(path, "output")
    for word in ["data.jsonl, line 2: ", *words]:
        assert word in str(e.value), e.value
    assert str(e.value).count("; ") == 1, e.value        # one remedy, that of this fault


@pytest.mark.parametrize("verb, chosen", [
    ("sft", dict(epochs=16.0, cuts=0.1)), ("sft", dict(epochs=2.5, cuts=0.5, holdout=0.3)),
    ("sft", dict(steps=7, cuts=0.2, truncate=True)), ("sft", dict(holdout=0.0)),
    ("sft", dict(truncate=True, holdout=0.3)), ("dpo", dict(epochs=5.0)),
    ("dpo", dict(truncate=True, holdout=0.3))])
def test_each_measure_is_that_of_the_rows(verb, chosen, base, tmp_path):
    """Bytes and steps, recomputed from the rows themselves, whatever has changed the rows"""
    long = [y for i in range(30) for y in exchange(i)]
    forms = conversation_forms if verb == "sft" else pair_forms
    entries = [forms(x)["messages" if verb == "sft" else "TRL"] for x in (*TURNS, long)]
    kind = (SftOptions, SftRun) if verb == "sft" else (DpoOptions, DpoRun)
    of_run = begin(base, tmp_path, write(tmp_path / "data.jsonl", entries), *kind, **chosen)
    data, end = of_run.data, of_run.tokenizer.specials[of_run.state.eos]
    learned, copies = data.batches.answers, data.batches.copies

    def n_bytes(rows):
        return sum(len(of_run.tokenizer.decode(x[(x >= 0) & (x != end)])) for x in rows)

    assert data.bytes_per_token * (learned >= 0).sum() == pytest.approx(n_bytes(learned))
    assert data.validation.n_bytes == n_bytes(data.validation.targets)
    n = len(learned) / copies
    assert (copies > 1) == ("cuts" in chosen and chosen.get("epochs") != 1)
    epochs = of_run.options.epochs
    assert data.steps == chosen.get("steps", -(-epochs * n // of_run.B))
    held = 0 if of_run.data.held == "a training" else len(data.responses.rows)
    used = (n + held) / of_run.R
    assert used == len(TURNS) + chosen.get("truncate", False)


# ---- one rule for all fields that are not read
UNREAD = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=12)
VALUES = st.sampled_from([0, 1, False, True, 0.5, "x", [1], {"a": None}])


def placed(name, value):
    """{place: an example whose field of this name is in this place}"""
    part = dict(type="text", text="Ho.", **{name: value})
    return {"example": {**TEXTS, name: value}, "message": with_message(**{name: value}),
            "question": dict(messages=[{**SAYS[0], name: value}, SAYS[1]]),
            "prompt": dict(prompt=[{**SAYS[0], name: value}], completion=SAYS[1:]),
            "part": with_message(content=[part]),
            "ShareGPT": dict(conversations=[{"from": "human", "value": "Hi?"},
                                            {"from": "gpt", "value": "Ho.", name: value}])}


def reads(entry, *args):
    try:
        as_example(entry, ["output"], *args)
    except ne.UserError as e:
        return str(e)


@settings(max_examples=80)
@given(UNREAD, VALUES)
@example("masked", True)
@example("weight", 0.5)
@example("reasoning", "Hm.")
@example("Created-At", "now")
def test_a_field_of_any_name_is_harmless_by_the_list_or_rejected(name, value):
    """Wherever it is; unless it is empty, or the user declares it harmless."""
    known = {*names_of(["output"]), "role", "content", "from", "value", "type", "text"}
    if name in known:
        return
    for place, entry in placed(name, value).items():
        said = reads(entry)
        if plain_name(name) in HARMLESS:
            assert said is None, (place, said)
        elif plain_name(name) not in TRAINED:
            assert f"found the field {name}, {value!r}" in said and f"--ignore {name}" in said
        assert reads(entry, [name]) is None, place
    for empty in ("", [], {}, None):
        assert all(reads(entry) is None for entry in placed(name, empty).values())


def test_the_list_of_harmless_names_is_itself_harmless():
    """No name on it is one that is read, or says what is trained, or is part of what is said."""
    assert not HARMLESS & ({*names_of(["output"]), *names_of(PAIR), *TRAINED} | PARTS)
    assert all(plain_name(name) == name for name in HARMLESS | PARTS | TRAINED.keys())


@pytest.mark.parametrize("name, trained", TRAINED.items())
def test_a_message_that_says_whether_it_is_trained_is_taken_at_its_word(name, trained):
    """A field that agrees with what is trained is accepted, and one that does not is rejected."""
    entries, other = placed(name, trained), placed(name, type(trained)(not trained))
    assert {place: reads(x) is None for place, x in entries.items()} == {
        "example": True, "message": True, "part": True, "ShareGPT": True,
        "question": name == "weight", "prompt": name == "weight"}
    assert {place: reads(x) is None for place, x in other.items()} == {
        "example": False, "message": False, "part": False, "ShareGPT": False,
        "question": True, "prompt": True}


BAD_FILES = {
    "text": (b"What is the sea?\n", ["expected a JSON list", "found 'What is", "name a file"]),
    "UTF-16": ("{}".encode("utf-16"), ["found UTF-16", "save the file as UTF-8"]),
    "empty": (b"", ["found none", "write JSON with the fields"]),
    "several lines": (b'{\n"instruction": "a",\n"output": "b"}\n',
                      ["line 1, column 2, found the end", "each line is one whole JSON object"]),
    "comma": (b'[{"instruction": "a", "output": "b"},\n]', ["after a comma", "line 2, column 1",
                                                            "correct the JSON there"]),
    "third line": (b'{"instruction": "a", "output": "b"}\n\n{"a": b}',
                   ["line 3", "line 3, column 7, found 'b}'"]),
    "value": (b'{"instruction": "a", "output": 5}', ["output is 5", "correct this example"]),
    "missing": (b'{"instruction": "a"}', ["output is missing", "add the field output"]),
    "renamed": (b'{"question": "a", "answer": "b"}', ["--field instruction=question"]),
    "unread": (b'{"instruction": "a", "output": "b", "x": 1}', ["the field x, 1", "--ignore x"])}


def test_each_fault_of_a_file_ends_with_its_own_remedy(tmp_path):
    remedies = {}
    for name, (content, words) in BAD_FILES.items():
        (tmp_path / "data.json").write_bytes(content)
        with pytest.raises(ne.UserError) as e:
            read_examples(tmp_path / "data.json", "output")
        for word in ["data.json", *words]:
            assert word in str(e.value), (name, e.value)
        remedies[name] = str(e.value).rsplit("; ", 1)[1]
        assert len(remedies[name].split()) < 25
    several, third = remedies.pop("several lines"), remedies.pop("third line")
    assert several == third and len({*remedies.values(), third}) == len(remedies) + 1


@pytest.mark.parametrize("mark, codec, name", [
    (codecs.BOM_UTF16_LE, "utf-16-le", "UTF-16"), (codecs.BOM_UTF16_BE, "utf-16-be", "UTF-16"),
    (codecs.BOM_UTF32_LE, "utf-32-le", "UTF-32"), (codecs.BOM_UTF32_BE, "utf-32-be", "UTF-32")])
def test_another_encoding_is_named(mark, codec, name, tmp_path):
    """By its byte order mark, wherever a text is read"""
    words = f"expected UTF-8, found {name};"
    for end, read in ((".json", lambda path: read_examples(path, "output")), (".txt", read_text),
                      (".csv", lambda path: read_examples(path, "output")),
                      (".schema", read_schema)):
        path = tmp_path / f"data{end}"
        path.write_bytes(mark + '{"enum": [1]}'.encode(codec))
        with pytest.raises(ne.UserError) as e:
            read(str(path))
        assert words in str(e.value), e.value
        path.write_bytes(codecs.BOM_UTF8 + b'{"enum": [1]}\n')
        with contextlib.suppress(ne.UserError):
            read(str(path))


@pytest.mark.parametrize("content", ['[{"instruction": "a", "output": %s}]',
                                     '{"instruction": "a", "output": %s}'])
def test_an_integer_that_python_does_not_convert_is_a_fault_of_the_file(content, tmp_path):
    path = tmp_path / "data.json"
    path.write_text(content % ("7" * 5000), encoding="utf-8")
    with pytest.raises(ne.UserError, match="expected integers of at most 4,300 digits, found a "
                                           "longer one; correct"):
        read_examples(path, "output")


# ---- the same forms, as questions of eval
@settings(max_examples=60)
@given(conversations())
def test_eval_asks_each_form_alike(x):
    """For the last answer, after all that was said before it"""
    for form, entry in conversation_forms(x).items():
        q = question_in("here", entry)
        prompt = [("user", q.prompt)] if isinstance(q.prompt, str) else q.prompt
        assert (prompt, q.answers, q.choices, q.match) == (x[:-1], [x[-1][1]], [], "exact"), form
    *asked, (_, answer) = x
    for entry in (dict(messages=of_openai(asked)), dict(conversations=of_sharegpt(asked)),
                  of_alpaca(asked)):
        for key in ([answer, "or"], answer):
            q = question_in("here", {**entry, "answer": key, "match": "contains", "note": "x"})
            prompt = [("user", q.prompt)] if isinstance(q.prompt, str) else q.prompt
            assert (prompt, q.match) == (asked, "contains")
            assert q.answers == (key if isinstance(key, list) else [key])


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet", "json", "jsonl"])
def test_eval_reads_each_kind_of_file_as_sft_does(ending, tmp_path):
    path = write_table(tmp_path / f"table.{ending}", ASK)
    columns = EvalOptions(field=["body"] + ["=".join(x) for x in COLUMNS]).check().columns()
    questions, _ = read_questions(str(path), columns)
    assert [(q.prompt, q.answers) for q in questions] == [
        ([("system", e["persona"]), ("user", e["question"])], [e["answer"]]) for e in ASK]
    assert [q.record for q in questions] == ASK          # for the report, as they are in the file


def test_readmes_files_suit_readmes_commands(tmp_path):
    """Each is read by every verb that README gives it to."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("## Your own text, your own questions")[1].split("\n## ")[0]
    blocks, path = re.findall("(?s)```json\n(.*?)```", section), tmp_path / "data.jsonl"
    *questions, pairs = blocks
    for block in questions:
        path.write_text(block, encoding="utf-8")
        assert read_file(path, ["output"]).ignored == [] and read_questions(str(path))
    path.write_text(pairs, encoding="utf-8")
    assert read_file(path, PAIR).ignored == []
    asked = re.findall(r"--questions (\S+)", section)
    taught = re.findall(r"sft .*--data (\S+)", section)
    assert asked == taught == ["questions.jsonl"]


@pytest.mark.parametrize("entry, words", [
    (dict(chosen="Hi? Ho.", rejected="Hi? No."), ["chosen: expected a question in the field prompt",
                                                  "begins with '\\n\\nHuman:'"]),
    (dict(chosen="\n\nHuman: Hi?\n\nAssistant: Ho.", rejected="No."), ["rejected: expected"]),
    (dict(chosen="Hm.\n\nHuman: Hi?\n\nAssistant: Ho.", rejected="No."), ["chosen: expected"]),
    (dict(chosen="\n\nHuman: Hi?", rejected="\n\nHuman: Hi?"), ["message of the assistant"]),
    (dict(conversations=SAYS[:1], chosen="Ho.", rejected="No."),
     ["chosen: expected a list of messages, found 'Ho.'"]),
    (dict(prompt="Hi?", messages=SAYS, chosen=SAYS[1:], rejected=SAYS[1:]),
     ["prompt and messages", "found both"]),
    (dict(chosen=SAYS, rejected="No."), ["rejected: expected a list of messages"]),
])
def test_pairs_that_are_rejected(entry, words, tmp_path):
    path = write(tmp_path / "data.jsonl", [entry])
    with pytest.raises(ne.UserError) as e:
        read_examples(path, *PAIR)
    for word in ["data.jsonl, line 1: ", *words]:
        assert word in str(e.value), e.value


def test_other_fields_are_named(base, tmp_path, monkeypatch):
    """Those that are empty are not, and of many only some."""
    monkeypatch.chdir(copy_of(base, tmp_path))
    names = ["time", "Split", "doc-id", "url", "x0", "x1", "x2", "x3"]
    write(tmp_path / "data.jsonl", [
        dict(**TEXTS, id=7, source="", system=None, history=[]), with_message(model="m", weight=1),
        dict(**TEXTS, **dict.fromkeys(names, 1))])
    ignore = [word for name in names[4:] for word in ("--ignore", name)]
    said = told("sft", "--data", "data.jsonl", *FLAGS, "--steps", 1, *ignore)
    [row] = re.findall("  ignored fields   (.*)\n", said)
    assert {*row.split(", ")[:3]} == {"id", "messages.weight", "messages.model"}
    assert row.endswith(", time, Split, doc-id, url, x0 and 3 more")
    assert ne.read_checkpoint("nanoeuler_chat.bin").state.options["ignore"] == names[4:]
    write(tmp_path / "data.jsonl", [TEXTS])
    said = told("sft", "--data", "data.jsonl", *FLAGS, "--steps", 1, "--force")
    assert "ignored" not in said


# ---- --truncate
def exchange(i, words=5):
    return [("user", f"{i} {'be ' * words}"), ("assistant", f"{i} {'or ' * words}")]


def test_cut_versions_by_hand():
    told_first, a, b, c = [("system", "Be.")], exchange(1), exchange(2), exchange(3)
    tool = [*b, ("tool", "7"), ("assistant", "It is 7.")]

    def versions(entry, keys):
        return [as_messages(f(), keys[0]) for f in cut_versions(as_example(entry, keys), keys)]

    e = dict(messages=of_openai(told_first + a + tool + c))
    assert versions(e, ["output"]) == [(told_first + tool[:1], tool[1:] + c),
                                       (told_first + c[:1], c[1:])]
    assert versions(dict(messages=of_openai(a + b[:1])), ["output"]) == []
    assert versions(TEXTS, ["output"]) == []
    e = dict(prompt=of_openai(a + b[:1]), completion=of_openai(b[1:] + c))
    assert versions(e, ["output"]) == [(b[:1], b[1:] + c), (c[:1], c[1:])]
    e = dict(prompt=of_openai(told_first + a + b + c[:1]), chosen=of_openai(c[1:] + a),
             rejected=of_openai(c[1:]))
    assert versions(e, PAIR) == [(told_first + b + c[:1], c[1:] + a),
                                 (told_first + c[:1], c[1:] + a)]


@drawn(60)
@given(conversations(), st.booleans())
def test_what_is_cut_is_the_beginning(x, pairs):
    keys = PAIR if pairs else ["output"]
    e = as_example(pair_forms(x)["TRL"] if pairs else conversation_forms(x)["messages"], keys)
    system = x[:1] if x[0][0] == "system" else []
    found = [[y for part in as_messages(f(), keys[0]) for y in part] for f in cut_versions(e, keys)]
    assert found == [system + x[i:] for i in range(len(system) + 2, len(x), 2)]


@pytest.mark.parametrize("verb", ["sft", "dpo"])
def test_long_conversations_are_cut_to_the_row(verb, base, tmp_path, monkeypatch, capsys):
    """The newest exchanges that fit are the rows of a file that holds nothing else."""
    long = [("system", "Be.")] + [y for i in range(12) for y in exchange(i)]
    short, single = exchange(7) + exchange(9), exchange(8, 200)      # the short one stays whole
    kind = (DpoOptions, DpoRun) if verb == "dpo" else (SftOptions, SftRun)

    def entries(*conversations):
        return [pair_forms(x)["TRL"] if verb == "dpo" else conversation_forms(x)["messages"]
                for x in conversations]

    def made(*conversations, **chosen):
        path = write(tmp_path / "data.jsonl", entries(*conversations))
        return begin(base, tmp_path, path, *kind, holdout=0.0, **chosen)

    whole = made(long, short, single)
    assert len(whole.data.batches.rows) == (2 if verb == "dpo" else 1)
    assert "2 examples longer than a row of 160 tokens (--truncate cuts them)" in (
        capsys.readouterr().out)
    cut = made(long, short, single, truncate=True)
    said = capsys.readouterr().out
    assert "  cut              1 conversation, to fit a row of 160 tokens\n" in said
    assert "left out         1 example longer than a row of 160 tokens, 0 empty" in said
    fitting = [n for n in range(2, 24, 2)
               if len(made(long[:1] + long[-n:], short).data.batches.rows) == len(
                   cut.data.batches.rows)]
    n = fitting[-1]
    assert 2 < n < 22 and fitting == [*range(2, n + 2, 2)]
    for got, want in zip(rows(cut), rows(made(long[:1] + long[-n:], short))):
        assert np.array_equal(got, want)


def test_rows_are_no_longer_than_what_is_cut(base, tmp_path, monkeypatch):
    """Without --row-len, up to 2,048 tokens; a run that is resumed cuts the same."""
    monkeypatch.setattr("nanoeuler_parts.tuning.sft.MOST_A_ROW", 150)
    monkeypatch.chdir(copy_of(base, tmp_path))
    write(tmp_path / "data.jsonl", [
        dict(conversations=of_sharegpt([y for i in range(n) for y in exchange(i)]))
        for n in (1, 9, 30)])
    start = "sft", "--data", "data.jsonl", "--truncate", *FLAGS
    said = told(*start, "--steps", 1)
    state = ne.read_checkpoint("nanoeuler_chat.bin").state
    T = state.options["row_len"]
    assert 96 <= T <= 160 and state.options["truncate"] is True
    row = f"  cut              2 conversations, to fit a row of {T} tokens\n"
    assert row in said and row in told(*start, "--resume", "--steps", 2)


# ---- runs
def test_settings_are_kept_for_resume(base, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(copy_of(base, tmp_path))
    write_table(tmp_path / "data.csv", ASK)
    start = "sft", "--data", "data.csv", *FLAGS
    fields = [x for pair in COLUMNS for x in ("--field", "=".join(pair))]
    run(*start, *fields, "--steps", 1)
    state = ne.read_checkpoint("nanoeuler_chat.bin").state
    assert state.options["field"] == fields[1::2] and state.options["truncate"] is False
    run("sft", "--resume", "--steps", 2)
    run("sft", "--resume", *fields, "--steps", 3)
    refused(capsys, "sft", "--resume", *fields[:4], "--steps", 4, words=["started with --field"])
    refused(capsys, "sft", "--resume", "--truncate", "--steps", 4,
            words=["started with --no-truncate, not --truncate"])


@pytest.mark.parametrize("verb", ["sft", "dpo"])
def test_a_run_on_each_form_answers(verb, base, tmp_path, monkeypatch):
    """And ends in the same weights, whatever the form."""
    monkeypatch.chdir(copy_of(base, tmp_path))
    forms = by_form(pair_forms if verb == "dpo" else conversation_forms, TURNS)
    weights, model = {}, "nanoeuler.bin"
    if verb == "dpo":                        # it keeps the template of its model
        write(tmp_path / "data.jsonl", by_form(conversation_forms, TURNS)["messages"])
        run("sft", "--data", "data.jsonl", *FLAGS, "--steps", 1, "--out", model := "chat.bin")
    for form in ("TRL", "hh-rlhf") if verb == "dpo" else ("messages", "ShareGPT", "Alpaca"):
        write(tmp_path / "data.jsonl", forms[form])
        run(verb, model, "--data", "data.jsonl", *FLAGS, "--steps", 3, "--out", "x.bin",
            "--force")
        weights[form] = ne.read_checkpoint("x.bin").flat
        assert told("generate", "What is 3?", "x.bin", "--tokens", 4, "--temperature", 0)
    first, *others = weights.values()
    assert all(np.array_equal(first, x) for x in others)
