"""The commands of `chat`, and the texts that are typed there."""
import json
import os
import re
import sys
import types
from dataclasses import replace

import pytest
from helpers import needs, run
from models import CHATML, SMALL, SPECIALS, dicts, write
from templates import LLAMA_2, ZEPHYR
from texts import TORTURE

import bpe
import nanoeuler as ne
from nanoeuler_parts.chat import terminal, verbs
from nanoeuler_parts.chat.sampling import ChatSampling
from nanoeuler_parts.chat.templates import chat_ids
from nanoeuler_parts.chat.terminal import completions, NAMES, SETTINGS, Terminal
from nanoeuler_parts.tuning.examples import read_examples
from dataclasses import fields

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]
TOKENIZER = bpe.train(TORTURE.encode(), 512, SPECIALS)
DEAF = CHATML.replace("{{ '<|im_start|>'", "{% if message['role'] != 'system' %}"
                      "{{ '<|im_start|>'").replace("'\\n' }}{% endfor", "'\\n' }}{% endif %}"
                                                   "{% endfor")
TEMPLATES = {"chatml": CHATML, "alpaca": "alpaca", "zephyr": ZEPHYR, "llama_2": LLAMA_2,
             "deaf": DEAF, "base": ""}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, template in TEMPLATES.items():
        kind = dict(kind="base") if name == "base" else dict(kind="chat", template=template)
        write(folder / name, replace(SMALL, n_layer=2, n_mtp=1, seq_len=400), TOKENIZER,
              eos="<|im_end|>", **kind)
    return folder


class Chat:
    """A chat in which a test types.  `said` and `notes` are what the last lines printed, `answers`
    are the texts of all replies."""

    def __init__(self, path, monkeypatch, capsys, **options):
        options = {"temperature": 0.0, "tokens": 6, **options}
        self.path, self.options, self.capsys = str(path), ChatSampling(**options), capsys
        self.speaker, self.lines = self.new_speaker(), []
        self.terminal, self.answers, reply = Terminal(self.speaker), [], self.speaker.reply
        self.speaker.reply = lambda ids: (reply(ids), self.answers.append(self.speaker.last.answer))
        monkeypatch.setattr("builtins.input", self.type_next)

    def new_speaker(self):
        return ne.Speaker(self.path, ne.Decoder, replace(self.options))

    def type_next(self, prompt):
        line = self.lines.pop(0)
        if not isinstance(line, str):
            raise line
        return line

    def type(self, *lines):
        """Types lines, then Ctrl-D"""
        self.lines, self.terminal.open = [*lines, EOFError], True
        self.capsys.readouterr()
        self.terminal.converse()
        said, self.notes = self.capsys.readouterr()
        self.said = said.split("\n", 1)[1]   # without the line about /help
        return self.said

    def continues_as_if_new(self, question="And then?"):
        """The KV cache holds what a new chat with this conversation would read, and both answer the
        next question alike."""
        s, new = self.speaker, self.new_speaker()
        system = [("system", s.system)] if s.system else []
        new.system, new.said, new.sampled = s.system, [*s.said], dict(s.sampled)
        want = chat_ids(s.template, [*system, *s.said, ("user", question)], s.state, TOKENIZER,
                           s.sampled)
        ids = s.ids_to_read(question)
        assert [*s.decoder.tokens, *ids] == want == new.ids_to_read(question)
        assert "".join(s.answer_pieces(ids)) == "".join(new.answer_pieces(want))


@pytest.fixture
def chat(models, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda name="chatml", **options: Chat(models / name, monkeypatch, capsys, **options)


def stopped_at(patch, n):
    """Ctrl-C during the n-th sampled token"""
    sample, calls = ne.Reply.sample, []

    def stopping(self, logits):
        calls.append(logits)
        if len(calls) == n:
            raise KeyboardInterrupt
        return sample(self, logits)

    patch.setattr(ne.Reply, "sample", stopping)


# ---- the loop
def test_help_lists_all(chat):
    said = chat().type(" /help")
    named = re.findall(r"/([a-z]+|\?)(?=[ ,\n])", "\n".join(
        f"{line[:18]} {line.partition('; also')[2]} " for line in said.splitlines()))
    assert {*named} == {*NAMES} and len(named) == len(NAMES)
    assert all(f"\n{keys} " in said for keys in ("Ctrl-C", '"""', "\\", "//"))


def test_the_first_lines_name_help(chat, capsys):
    c = chat()
    c.lines = ["/quit"]
    run("chat", c.path)
    assert "answers what you type.\n/help lists the commands, " in capsys.readouterr().out


@pytest.mark.parametrize("line", ["/quit", "/exit ", " /bye"])
def test_leaving(line, chat):
    c = chat()
    c.type(line, "never read")
    assert c.lines[0] == "never read" and not c.speaker.said


@pytest.mark.parametrize("line, words", [
    ("/rest", "unknown command /rest (did you mean /reset?); /help lists the commands, //rest"),
    ("/sing 0", "unknown command /sing; /help"), ("/sing\nit", "unknown command /sing; /help"),
    ("/history", "expected a conversation, found no messages; ask a question first"),
    ("/reset now", "/reset: expected nothing after it, found 'now'")])
def test_commands_with_errors(line, words, chat):
    c = chat()
    assert not c.type(line).strip() and words in c.notes and c.notes.count("\n") == 1
    assert not c.speaker.said


@pytest.mark.parametrize("line, text", [
    ("//help", "/help"), ("/tmp/x is a file", "/tmp/x is a file"), ("a /help", "a /help")])
def test_texts_with_slashes(line, text, chat):
    c = chat()
    c.type(line)
    assert c.speaker.said[0] == ("user", text) and c.notes == ""


@pytest.mark.parametrize("lines, text", [
    (['"""', "a", "", " b ", '"""'], "a\n\n b "), (['"""a', 'b"""'], "a\nb"),
    (['"""a"""'], "a"), (['"""/help', '"""  '], "/help"), (['"""a\nb"""'], "a\nb"),
    (['"""a', "b", EOFError], "a\nb"), (["a\\", "b\\", "c"], "a\nb\nc"),
    (["a\\", EOFError], "a"), (["pasted\nlines"], "pasted\nlines"),
    (['"""a', KeyboardInterrupt, "b"], "b"), (["a\\", KeyboardInterrupt, "b"], "b")])
def test_texts_of_several_lines(lines, text, chat):
    c = chat()
    c.type(*lines)
    assert [x for role, x in c.speaker.said if role == "user"] == [text] and c.notes == ""


def test_what_tab_offers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.json").touch()
    assert completions("/re", "/re") == ["/regenerate", "/retry", "/reset"]
    assert completions("/set te", "te") == ["temperature"]
    assert completions("/load c", "c") == ["c.json"]
    assert completions("/set tokens t", "t") == completions("hello w", "w") == []


def test_a_terminal_gets_tab_and_pasted_blocks(monkeypatch):
    bound = []
    readline = types.SimpleNamespace(
        set_completer_delims=bound.append, parse_and_bind=bound.append,
        set_completer=bound.append, get_line_buffer=lambda: "/hi")
    monkeypatch.setattr(terminal.importlib, "import_module", lambda name: readline)
    terminal.use_readline()
    delimiters, complete, *lines = bound
    assert (complete("/hi", 0), complete("/hi", 1)) == ("/history", None) and delimiters == " "
    assert lines == ["tab: complete", "set enable-bracketed-paste on"]


# ---- the conversation
@pytest.mark.parametrize("name", ["chatml", "alpaca", "zephyr"])
def test_a_system_message(name, chat):
    needs("jinja2")
    c = chat(name)
    c.type("Hello", "/system Be brief.")
    assert "system message: Be brief." in c.said
    c.continues_as_if_new()
    assert b"Be brief." in TOKENIZER.decode(c.speaker.prompt)
    assert "system message: Be brief." in c.type("/reset", "/system")
    c.type('/system """', "Be kind.", 'Be good."""')
    c.continues_as_if_new("Well?")
    assert b"Be kind.\nBe good." in TOKENIZER.decode(c.speaker.prompt)
    assert "system message: none" in c.type('/system ""') and c.speaker.system == ""
    c.continues_as_if_new("Well?")
    assert b"Be kind." not in TOKENIZER.decode(c.speaker.prompt)


@pytest.mark.parametrize("tokens", [0, 1, 199, 200, 201, 399, 400, 401, 10_000])
@pytest.mark.parametrize("name", ["chatml", "zephyr"])
def test_as_many_exchanges_as_fit_are_kept(tokens, name, chat):
    """The answer has room for --tokens, but for at most half of the context of 400."""
    s = chat(name, tokens=tokens).speaker
    said = [(role, f"{i} {role} to be") for i in range(40) for role in ("user", "assistant")]

    def ids_of(n):
        """The prompt with the last n exchanges"""
        asked = [*said[len(said) - 2 * n:], ("user", "Well?")]
        return chat_ids(s.template, asked, s.state, TOKENIZER)

    n = max(n for n in range(41) if len(ids_of(n)) <= 400 - min(tokens, 200))
    assert 1 < n < 40
    s.said = [*said]
    assert [*s.decoder.tokens, *s.ids_to_read("Well?")] == ids_of(n)
    assert len(s.said) == 2 * n + 2 and s.dropped == said[:len(said) - 2 * n]


def test_a_system_message_survives_a_full_context(chat, tmp_path):
    c = chat()
    c.type("/system Be brief.", *(f"{i} {'to be or not ' * 8}" for i in range(9)))
    assert "the oldest messages are dropped" in c.notes and len(c.speaker.said) < 18
    text = TOKENIZER.decode(c.speaker.prompt).decode("utf-8", "replace")
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert "user\n0 " not in text and "user\n8 " in text
    c.continues_as_if_new()
    c.type("/history")
    assert [f"user: {i} " in c.said for i in range(9)] == [True] * 9
    assert f"the oldest {len(c.speaker.dropped)} messages" in c.notes
    c.type("/save all.json")
    saved = json.loads((tmp_path / "all.json").read_text("utf-8"))["messages"]
    assert saved == dicts(c.speaker.messages) and len(saved) == 21
    c.type("/load all.json")
    assert saved == dicts(c.speaker.messages) and not c.speaker.dropped


@pytest.mark.parametrize("line", ["/regenerate", "/retry"])
@pytest.mark.parametrize("name", ["chatml", "alpaca", "zephyr"])
def test_regenerate(line, name, chat):
    needs("jinja2")
    c = chat(name)
    c.type("Hello", "Why?", line)
    assert c.answers[1] == c.answers[2]      # at temperature 0
    assert [role for role, _ in c.speaker.said] == ["user", "assistant"] * 2
    c.continues_as_if_new()
    c = chat(name, temperature=1.0, tokens=12)
    c.type("Hello", line, line)
    assert len({*c.answers}) == 3 and c.speaker.said == [
        ("user", "Hello"), ("assistant", c.answers[2])]
    c.speaker.options.temperature = c.options.temperature = 0.0
    c.continues_as_if_new()


def test_regenerate_continues_a_base_model_again(chat):
    c = chat("base", temperature=1.0, tokens=12)
    c.type("/regenerate")
    assert "expected a text to continue, found none" in c.notes
    c.type("To be", "or not")
    held = [*c.speaker.prompt]
    first = c.speaker.last.tokens
    c.type("/regenerate")
    assert c.speaker.prompt == held and c.speaker.last.tokens != first
    read = [*c.speaker.decoder.tokens, *c.speaker.last.pending]
    assert read == [*held, *c.speaker.last.tokens]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", ["chatml", "base"])
def test_regenerate_after_ctrl_c(n, name, chat, monkeypatch):
    c = chat(name, speculate=0)
    whole = c.type("Hello")
    c.type("/reset")
    with monkeypatch.context() as patch:
        stopped_at(patch, n)
        assert c.type("Hello") != whole
    assert c.type("/regenerate") == whole
    if name == "chatml":
        assert len(c.speaker.said) == 2
        c.continues_as_if_new()


def test_regenerate_after_another_system_message(chat):
    c = chat()
    c.type("Hello", "/system Be brief.", "/regenerate")
    assert b"Be brief." in TOKENIZER.decode(c.speaker.prompt) and len(c.speaker.said) == 2
    c.continues_as_if_new()


def test_undo(chat):
    c = chat()
    c.type("Hello", "Why?", "/undo")
    assert "dropped: Why?" in c.said and c.speaker.said[0] == ("user", "Hello")
    assert len(c.speaker.said) == 2
    c.continues_as_if_new()
    c.type("/undo", "/undo", "/undo")
    assert not c.speaker.said and "expected a question to drop, found none" in c.notes


@pytest.mark.parametrize("line", ["/reset", "/clear", "/new"])
def test_reset(line, chat):
    c = chat()
    first = c.type("Hello")
    c.type("Why?", line)
    assert c.speaker.messages == [] and c.type("Hello") == first


@pytest.mark.parametrize("line", ["/system Be brief.", "/system", "/undo", "/history",
                                  "/save a.json", "/load a.json"])
def test_a_base_model_has_no_messages(line, chat):
    c = chat("base")
    assert not c.type("To be", line).splitlines()[1:-1:2][1:] and c.notes.count("\n") == 1
    assert "expected a chat model: a base model continues a text" in c.notes


def test_a_template_without_system_messages(chat):
    needs("jinja2")
    c = chat("deaf")
    c.type("/system Be brief.")
    assert "leaves out system messages" in c.notes and c.speaker.system == ""


# ---- settings
def test_set_prints(chat):
    c = chat(tokens=7)
    said = c.type("/set").split("\n")
    assert [line.split()[0].replace("-", "_") for line in said if line] == [*SETTINGS]
    assert {"tokens 7", "top-p 1", "stop []", 'json-schema ""'} <= {*said}
    assert {*SETTINGS} == {f.name for f in fields(ChatSampling)} - {
        "n", "logprobs", "weights", "template"}
    assert c.type("/set min-p").strip() == "min-p 0"


@pytest.mark.parametrize("line, name, value, shown", [
    ("temperature 0.7", "temperature", 0.7, "temperature 0.7"), ("top-k 5", "top_k", 5, "top-k 5"),
    ("tokens 3", "tokens", 3, "tokens 3"), ("repeat_penalty 1.1", "repeat_penalty", 1.1,
                                            "repeat-penalty 1.1"),
    ("stop a b", "stop", ["a b"], 'stop ["a b"]'), ('stop ""', "stop", [], "stop []"),
    ('stop ["\\n", "b"]', "stop", ["\n", "b"], 'stop ["\\n", "b"]'),
    ("json_schema object", "json_schema", "object", "json-schema object"),
    ('json_schema ""', "json_schema", "", 'json-schema ""')])
def test_set(line, name, value, shown, chat):
    c = chat()
    assert c.type(f"/set {line}").strip() == shown
    assert getattr(c.speaker.options, name) == value and c.notes == ""


@pytest.mark.parametrize("line, words", [
    ("temperature hot", "temperature: expected a number, 0 to 100, found 'hot'"),
    ("temperature 101", "/set temperature: expected 0 to 100, found 101"),
    ("temperature nan", "expected 0 to 100"),
    ("top_p 2", "/set top-p: expected 0 to 1, found 2\n"),
    ("top_k 1.5", "/set top-k: expected a whole number, 0 or more, found '1.5'"),
    ("speculate 16", "expected -1 to 15"),
    ("stop [1]", "/set stop: expected non-empty texts, found [1]"),
    ("stop [1", "write it as JSON"), ("json_schema none.json", "none.json: No such file"),
    ("weights int8", "fixed when the chat starts; leave, and start it with --weights"),
    ("template chatml", "start it with --template"), ("n 2", "expected the name of a setting"),
    ("tempratur 1", "found 'tempratur' (did you mean temperature?); /set lists all")])
def test_set_rejects(line, words, chat):
    c = chat()
    before = replace(c.speaker.options)
    assert not c.type(f"/set {line}").strip()
    assert words in c.notes and c.notes.count("\n") == 1 and c.speaker.options == before


def test_a_schema_of_a_chat(chat, tmp_path):
    (tmp_path / "s.json").write_text('{"type": "boolean"}', encoding="utf-8")
    assert chat().type("/set json_schema s.json", "Well?").splitlines()[-2] in ("true", "false")
    c = chat()
    (tmp_path / "s.json").write_text('{"type": "word"}', encoding="utf-8")
    c.type("/set json_schema s.json")
    assert "/set json-schema: " in c.notes and c.speaker.options.json_schema == ""


def test_a_seed_starts_the_random_numbers_again(chat):
    c = chat(temperature=1.0, tokens=12)
    c.type(*["/set seed 3", "Hello", "/reset"] * 2, "Hello")
    first, second, third = c.answers
    assert first == second != third


def test_the_temperature_of_a_chat(chat, monkeypatch):
    """Replies after it are sampled at it."""
    c, drawn, sample = chat(temperature=0.3), [], ne.sample
    monkeypatch.setattr(ne, "sample", lambda z, rng, o: (
        drawn.append(o.temperature), sample(z, rng, o))[1])
    said = c.type("/temperature", "/temperature 0", "Well?", "/temperature 0.7", "Well?")
    assert [s for s in said.splitlines() if s.startswith("temperature ")] == [
        "temperature 0.3", "temperature 0", "temperature 0.7"]
    assert {*drawn} == {0, 0.7}


# ---- files
@pytest.mark.parametrize("system", [["/system Be\u2028 \"brief\"."], []])
def test_save_and_load(system, chat, tmp_path):
    c = chat()
    c.type(*system, "Hello \u00e9\U0001f600", '"""', "Why?", "Or not?", '"""', "/save my chat.json")
    messages = c.speaker.messages
    assert c.said.endswith(f"{len(messages)} messages in my chat.json\n\n")
    assert os.listdir() == ["my chat.json"]
    [e], _ = read_examples("my chat.json", "output")             # as sft reads it
    assert [*e["asked"], *e["output"]] == messages
    other = chat()
    other.type("No.", "/system No.", '/load "my chat.json"')
    assert other.said.endswith(f"{len(messages)} messages from my chat.json\n\n")
    assert other.speaker.messages == messages
    other.continues_as_if_new()
    other.type("/save my chat.json")         # loaded here, so it may be replaced
    assert other.notes == "" and "And then?" in (tmp_path / "my chat.json").read_text("utf-8")


def test_generate_reads_a_saved_conversation(chat, tmp_path):
    c = chat()
    c.type("Hello", "/save a.jsonl")
    run("generate", c.path, "--file", "a.jsonl", "--out", "b.jsonl", "--tokens", 3)
    assert json.loads((tmp_path / "b.jsonl").read_text("utf-8"))["messages"] == dicts(
        c.speaker.said)


def test_save_replaces_only_its_own(chat, tmp_path):
    c = chat()
    c.type("Hello", "/save a.json", "Why?", "/save a.json")
    assert c.notes == "" and len(json.loads((tmp_path / "a.json").read_text("utf-8"))[
        "messages"]) == 4
    for name in "b.json", "c d.json":
        (tmp_path / name).write_text("mine", encoding="utf-8")
    c.type("/save b.json")
    assert "b.json exists; choose another name, or type /save --force b.json" in c.notes
    assert (tmp_path / "b.json").read_text("utf-8") == "mine"
    c.type("/save --force b.json", "/save --force 'c d.json'")
    assert c.notes == "" and all((tmp_path / name).read_text("utf-8") == (
        tmp_path / "a.json").read_text("utf-8") for name in ("b.json", "c d.json"))


@pytest.mark.parametrize("line, words", [
    ("/save", "expected the name of a file, found none; type /save FILE"),
    ("/save .", "is a directory"), ("/save --force .", "is a directory"),
    ("/save no/a.json", "No such folder"), ("/save a\0b", "without the character NUL"),
    (f"/save {'a' * 300}", "name too long")])
def test_save_rejects(line, words, chat):
    c = chat()
    c.type("Hello", line)
    assert words in c.notes and c.notes.count("\n") == 1 and not os.listdir()
    c = chat()
    c.type("/save a.json")
    assert "found no messages; ask a question first" in c.notes and not os.listdir()


HI, HO = dict(role="user", content="Hi?"), dict(role="assistant", content="Ho.")
SHAREGPT = [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Ho."}]


@pytest.mark.parametrize("text", [
    json.dumps({"messages": [HI, HO]}), json.dumps({"messages": [HI, HO]}, indent=1),
    json.dumps([{"messages": [HI, HO]}]), json.dumps([HI, HO]), json.dumps(SHAREGPT),
    json.dumps({"id": 7, "conversations": SHAREGPT}), "\ufeff" + json.dumps([HI, HO]),
    json.dumps({"prompt": [HI], "completion": [HO]}) + "\n\n",
    json.dumps({"instruction": "Hi?", "output": "Ho."})])
def test_load_reads_what_sft_reads(text, chat, tmp_path):
    c = chat()
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    c.type("/load a.json")
    assert c.speaker.said == [("user", "Hi?"), ("assistant", "Ho.")] and c.notes == ""
    c.type("/save a.json")                   # only what `save` would write may be replaced
    assert ("a.json exists" in c.notes) == ('"messages"' not in text or text[0] == "\ufeff")
    c.continues_as_if_new()


def test_load_without_a_last_answer(chat, tmp_path):
    c = chat()
    messages = [HI, HO, dict(role="user", content="Why?")]
    (tmp_path / "a.json").write_text(json.dumps({"messages": messages}), encoding="utf-8")
    assert "3 messages from a.json\nthe last message has no answer; /regenerate" in c.type(
        "/load a.json")
    c.type("/regenerate")
    assert c.speaker.said[:3] == [(x["role"], x["content"]) for x in messages]
    assert len(c.speaker.said) == 4 and c.answers == [c.speaker.said[3][1]]
    c.continues_as_if_new()


@pytest.mark.parametrize("text, words", [
    (None, "No such file"), ("", "expected one conversation, found 0"), ("\0", "a JSON list"),
    ("hello", "found 'hello'"), ("7", "expected an object, found int"), ("[]", "found 0"),
    (json.dumps({"messages": []}), "expected a list of messages"),
    (json.dumps({"messages": [HI]}), "expected a message of the assistant, found none"),
    (json.dumps([HI, dict(role="boss", content="x")]), "found 'boss'"),
    (json.dumps({"a": 1}), "missing"), ("[" * 9999, "recursion"),
    (json.dumps({"messages": [HI, HO]}) + "\n" + json.dumps({"messages": [HI, HO]}), "found 2"),
    (json.dumps([HI, dict(role="assistant", content="\ud800")]), "surrogates")])
def test_load_rejects(text, words, chat, tmp_path):
    c = chat()
    if text is not None:
        (tmp_path / "a.json").write_text(text, encoding="utf-8")
    c.type("/system Be brief.", "Hello")
    before, held = c.speaker.messages, [*c.speaker.decoder.tokens]
    c.type("/load a.json")
    assert "a.json" in c.notes and words in c.notes and c.notes.count("\n") == 1
    assert (c.speaker.messages, c.speaker.decoder.tokens) == (before, held)
    c.type("/load", "/load .")
    assert "type /load FILE" in c.notes and "found a directory" in c.notes


def test_load_rejects_what_the_template_cannot_show(chat, tmp_path):
    needs("jinja2")
    c = chat("deaf")
    c.type("Hello")
    before = c.speaker.messages
    text = json.dumps([dict(role="system", content="Be brief."), HI, HO])
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    c.type("/load a.json")
    assert "leaves out system messages" in c.notes and c.speaker.messages == before


def test_load_rejects_roles_that_do_not_alternate(chat, tmp_path):
    """if the model's template does"""
    needs("jinja2")
    c = chat("llama_2")
    c.type("Hello")
    before = c.speaker.messages
    (tmp_path / "a.json").write_text(json.dumps([HI, HI, HO]), encoding="utf-8")
    c.type("/load a.json")
    assert "take turns" in c.notes and c.notes.count("\n") == 1 and c.speaker.messages == before


# ---- from Python
def test_the_api(models):
    model = ne.load(str(models / "chatml"), temperature=1.0, tokens=12)
    model.system = "Be brief."
    first = model.say("Hello")
    again = model.regenerate()
    assert first != again
    assert model.messages == [("system", "Be brief."), ("user", "Hello"), ("assistant", again)]
    model.forget()
    assert model.messages == [("system", "Be brief.")]
    with pytest.raises(ne.UserError, match="expected a question to answer again, found none"):
        model.regenerate()
    with pytest.raises(ne.UserError, match="expected a chat model"):
        ne.load(str(models / "base")).system = "Be brief."


@pytest.mark.parametrize("typed", ["/save", '/save ""', "/save ''", "/save --force",
                                   '/save --force ""', '/load ""'])
def test_a_file_needs_a_name(typed, chat, elsewhere):
    c = chat()
    c.type("Hello", typed)
    assert "expected the name of a file, found none" in c.notes and not [*elsewhere.iterdir()]


def test_a_link_to_itself_is_not_replaced(chat, elsewhere):
    (elsewhere / "a").symlink_to("a")
    c = chat()
    c.type("Hello", "/save a", "/save --force a")
    assert c.notes.count("it is a link to itself") == 2 and os.readlink("a") == "a"


def test_a_closed_input_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ne.UserError, match="chat reads standard input, but it is closed"):
        verbs.chat()
    with pytest.raises(ne.UserError, match="prompt on standard input, but it is closed; give"):
        verbs.prompt_text("-")
