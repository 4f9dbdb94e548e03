"""`chat` at the terminal: the loop that reads what the user types, and the commands, such as /help.

A text of several lines begins and ends with three double quotes, or each of its lines but the last
ends with a backslash.  A line that begins with // is a text that begins with /."""
import contextlib
import difflib
import glob
import importlib
import json
import os
import re
from dataclasses import fields, replace
from typing import NamedTuple

from bpe import need, note, printable, read_bytes, reading, UserError
from nanoeuler import for_terminal, rng_of
from nanoeuler_parts.chat.sampling import ChatSampling
from nanoeuler_parts.chat.templates import chat_ids
from nanoeuler_parts.files.errors import problem
from nanoeuler_parts.files.printing import counted
from nanoeuler_parts.files.settings import digits_of, KINDS, limits_of, SettingError, type_of
from nanoeuler_parts.files.texts import parse_json
from nanoeuler_parts.files.writing import refuse_overwrite, replacing

# Settings that a chat cannot change: the first two when it runs, the others at all
AT_START = "weights", "template"
SETTINGS = {f.name: f for f in fields(ChatSampling) if f.name not in (*AT_START, "n", "logprobs")}
CONVERSATION = ("name a file with one conversation, such as {\"messages\": [{\"role\": \"user\", "
                "\"content\": \"Hello\"}, ...]}")
TRIPLE = '"""'
BLOCK = re.compile(rf"\s*(/system\s+)?{TRIPLE}")     # the beginning of a text of several lines

class Typed(NamedTuple):
    text: str
    is_text: bool                            # not a command, even if it begins with a slash

class Terminal:
    """speaker: nanoeuler.Speaker     saved: paths that this chat may replace     open: not /quit
    after_reply: called once, after the first reply"""

    def __init__(self, speaker, after_reply=None):
        self.speaker, self.saved, self.open = speaker, set(), True
        self.after_reply = after_reply

    def converse(self):
        """Replies to what is typed until standard input ends.  At the prompt, the first Ctrl-C
        clears the typed text and the second one leaves."""
        print("/help lists the commands, /quit or Ctrl-D leaves, Ctrl-C stops a reply.")
        use_readline()
        cleared = False
        while self.open:
            try:
                typed = read_typed()
            except EOFError:
                break
            except KeyboardInterrupt:
                if cleared:
                    break
                cleared = True
                print("\nto leave: Ctrl-C again, Ctrl-D, or /quit")
                continue
            cleared = False
            with contextlib.suppress(KeyboardInterrupt):
                self.obey(typed)
        print()

    def obey(self, typed):
        """Runs a command, or replies to a text.  An error is one line."""
        found = re.fullmatch(r"\s*/([a-z]+|\?)(?:\s+(.*))?", typed.text, re.DOTALL)
        try:
            if found and not typed.is_text:
                self.run(found[1], (found[2] or "").strip())
            elif typed.text.strip():
                self.speaker.reply(self.speaker.ids_to_read(typed.text))
                if self.after_reply:
                    self.after_reply()
                    self.after_reply = None
        except (UserError, ModuleNotFoundError, OSError) as e:
            note(problem(e))

    def run(self, name, argument):
        command = NAMES.get(name)
        if not command:
            near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.5)
            near = "".join(f" (did you mean /{x}?)" for x in near)
            raise UserError(f"unknown command /{name}{near}; /help lists the commands, //{name} "
                            f"sends it as text")
        need(command.arguments or not argument, f"/{name}: expected nothing after it, found "
             f"{argument!r:.40}")
        command.call(self, argument)

    # ---- commands
    def help(self, _):
        for c in COMMANDS:
            others = f"; also /{', /'.join(c.names[1:])}" if c.names[1:] else ""
            print(f"{f'/{c.names[0]} {c.arguments}':<18} {c.text}{others}")
        for keys, text in KEYS:
            print(f"{keys:<18} {text}")

    def quit(self, _):
        self.open = False

    def reset(self, _):
        self.speaker.forget()

    def regenerate(self, _):
        self.speaker.reply(self.speaker.ids_to_regenerate())

    def undo(self, _):
        said = self.said_in_chat()
        questions = [i for i, (role, _) in enumerate(said) if role == "user"]
        need(questions, "expected a question to drop, found none; ask a question first")
        print(f"dropped: {for_terminal(said[questions[-1]][1])}")
        del said[questions[-1]:]

    def history(self, _):
        self.said_in_chat()
        messages = self.speaker.messages
        need(messages, "expected a conversation, found no messages; ask a question first")
        for role, text in messages:
            print(f"{role}: {for_terminal(text)}")
        if n := len(self.speaker.dropped):
            note(f"the context is full; the model no longer reads the oldest "
                 f"{counted(n, 'message')}")

    def system(self, text):
        if text:
            self.speaker.system = "" if text == '""' else text
        self.said_in_chat()
        print(f"system message: {for_terminal(self.speaker.system) or 'none'}")

    def set(self, words):
        """Prints all settings, prints one, or sets one"""
        name, value = [*words.split(None, 1), "", ""][:2]
        name = name.replace("-", "_")
        need(name not in AT_START, f"/set {name}: it is fixed when the chat starts; leave, and "
             f"start it with --{name}")
        near = difflib.get_close_matches(name, SETTINGS, n=1)
        need(not name or name in SETTINGS, f"/set: expected the name of a setting, found "
             f"{name!r:.40}" + "".join(f" (did you mean {typed_name(x)}?)" for x in near) +
             "; /set lists all")
        if value:
            self.speaker.options = self.changed(name, value)
            if name == "seed":
                self.speaker.rng = rng_of(self.speaker.options.seed)
        for name in [name] if name else SETTINGS:
            print(f"{typed_name(name)} {shown(getattr(self.speaker.options, name))}")

    def changed(self, name, value):
        """The settings with a new value of one, which is checked"""
        try:
            options = replace(self.speaker.options, **{name: value_of(name, value)}).check()
            self.speaker.constraint(options)             # reports an error in a JSON schema
        except SettingError as e:
            raise UserError(e.message(lambda name: f"/set {typed_name(name)}")) from None
        except UserError as e:
            raise UserError(f"/set {typed_name(name)}: {e}") from None
        return options

    def temperature(self, value):
        self.set(f"temperature {value}")

    def save(self, argument):
        """Writes the conversation as one JSON line, which `sft --data` and `generate --file` read.
        A file that this chat has not written or loaded is replaced only with --force."""
        force, name = re.fullmatch(r"(--force(?:\s+|$))?(.*)", argument, re.DOTALL).groups()
        path = path_of(name, "/save")
        self.said_in_chat()
        need(self.speaker.said, "/save: expected a conversation, found no messages; ask a question "
             "first")
        refuse_overwrite(path, force=True)   # a directory, for example
        need(force or not os.path.exists(path) or os.path.realpath(path) in self.saved,
             f"{path} exists; choose another name, or type /save --force {name}")
        messages = [{"role": role, "content": text} for role, text in self.speaker.messages]
        line = json.dumps({"messages": messages}, ensure_ascii=False) + "\n"
        with replacing(path, "choose another name") as temporary:
            with open(temporary, "wb") as f:
                f.write(line.encode(errors="replace"))
        self.saved.add(os.path.realpath(path))
        print(f"{counted(len(messages), 'message')} in {printable(path)}")

    def load(self, name):
        """Replaces the conversation by that of a file, if the model's template accepts it"""
        path, speaker = path_of(name, "/load"), self.speaker
        self.said_in_chat()
        messages, ours = conversation_in(path)
        question = [] if messages[-1][0] == "user" else [("user", "Hello")]
        chat_ids(speaker.template, [*messages, *question], speaker.asked_state, speaker.tokenizer)
        first = messages[0][0] == "system"
        speaker.system = messages[0][1] if first else ""     # first, as it may be rejected
        speaker.forget()
        speaker.said = messages[first:]
        if ours:
            self.saved.add(os.path.realpath(path))
        print(f"{counted(len(messages), 'message')} from {printable(path)}")
        if not question:
            print("the last message has no answer; /regenerate answers it")

    def said_in_chat(self):
        need(self.speaker.answers, "expected a chat model: a base model continues a text, and has "
             "no messages; use a chat model")
        return self.speaker.said

class Command(NamedTuple):
    names: tuple                             # the first one, and its aliases
    arguments: str
    text: str                                # for /help
    call: object                             # with the terminal and the argument as text

COMMANDS = [
    Command(("help", "?"), "", "list the commands", Terminal.help),
    Command(("system",), "TEXT", 'set the system message; "": none; without a text, print it',
            Terminal.system),
    Command(("regenerate", "retry"), "", "drop the last answer and sample another one",
            Terminal.regenerate),
    Command(("undo",), "", "drop the last question and its answer", Terminal.undo),
    Command(("history",), "", "print the conversation", Terminal.history),
    Command(("reset", "clear", "new"), "", "forget the conversation, but not the system message",
            Terminal.reset),
    Command(("save",), "FILE", "save the conversation as JSON; --force FILE: replace a file",
            Terminal.save),
    Command(("load",), "FILE", "replace the conversation by that of a file", Terminal.load),
    Command(("set",), "NAME VALUE", "change a setting; without a value, print it; /set lists all",
            Terminal.set),
    Command(("temperature",), "0.5", "short for /set temperature 0.5; 0: always the most probable "
            "token", Terminal.temperature),
    Command(("quit", "exit", "bye"), "", "leave the chat, as Ctrl-D does", Terminal.quit)]
KEYS = [("Ctrl-C", "stop the reply, or clear the typed text"),
        (TRIPLE, "begin or end a text of several lines"),
        ("\\", "at the end of a line: continue the text in the next line"),
        ("//", "begin a text with one slash")]
NAMES = {name: command for command in COMMANDS for name in command.names}

# ---- what is typed
def read_typed():
    """The next text or command.  Ctrl-D ends a text of several lines as its end would."""
    text = input("\n> ")
    begun = BLOCK.match(text)
    lines = [text[begun.end():] if begun else text]
    try:
        while begun and not lines[-1].rstrip().endswith(TRIPLE):
            lines.append(input(". "))
        while not begun and lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(input(". "))
    except EOFError:
        print()
    text = "\n".join(lines)
    if begun:
        text = text.rstrip().removesuffix(TRIPLE).strip("\n")
        return Typed((begun[1] or "") + text, is_text=not begun[1])
    is_text = text.startswith("//")
    return Typed(text[is_text:], is_text)

def use_readline():
    """Gives the prompt arrow keys, a history and Tab, if Python has the module readline.  A text of
    several lines that is pasted is then one text."""
    with contextlib.suppress(ImportError):
        readline = importlib.import_module("readline")
        readline.set_completer_delims(" ")
        readline.set_completer(lambda text, i: dict(enumerate(completions(
            readline.get_line_buffer(), text))).get(i))
        for line in "tab: complete", "set enable-bracketed-paste on":
            readline.parse_and_bind(line)

def completions(line, word):
    """The words that Tab offers for the last word of a line"""
    command, _, argument = line.lstrip().partition(" ")
    if command == line.lstrip():
        words = [f"/{name}" for name in NAMES]
    elif command in ("/save", "/load"):
        words = glob.glob(f"{glob.escape(word)}*")
    else:
        words = map(typed_name, SETTINGS) if command == "/set" and " " not in argument else ()
    return [x for x in words if x.startswith(word)]

# ---- settings and files
def value_of(name, text):
    """The value of a setting, from the text that the user typed"""
    kind = type_of(SETTINGS[name])
    if kind is list:
        if text.startswith("["):
            with reading("the list of texts", 'write it as JSON, such as ["Q:", "\\n"]'):
                return parse_json(text)
        return [] if text == '""' else [text]
    if name == "json_schema":
        from nanoeuler_parts.chat.json_mode import read_schema
        return "" if text == '""' else read_schema(text)
    try:
        return kind(text)
    except ValueError:
        raise UserError(f"expected {KINDS[kind]}, {limits_of(SETTINGS[name])}, found {text!r:.40}"
                        ) from None

def shown(value):
    """A setting's value, as the user would type it"""
    if isinstance(value, float):
        return digits_of(value)
    return printable(json.dumps(value, ensure_ascii=False) if isinstance(value, list) else
                     str(value) or '""')

def path_of(name, command):
    """The path that a user typed, perhaps in quotes; ~ is the home directory"""
    if name[:1] == name[-1:] and name[:1] in ("'", '"') and len(name) > 1:
        name = name[1:-1]
    need(name, f"{command}: expected the name of a file, found none; type {command} FILE")
    need("\0" not in name, f"{command}: expected a name without the character NUL")
    return os.path.expanduser(name)

def typed_name(name):
    """The name of a setting as a user types it: top-p, like the flag --top-p"""
    return name.replace("_", "-")

def conversation_in(path):
    """([(role, text)], does the file hold nothing else?) of a file with one conversation: in a form
    that `sft --data` reads, in JSON over several lines, or a JSON list of messages"""
    from nanoeuler_parts.tuning.examples import answered_in, asked_in, read_entries
    from nanoeuler_parts.tuning.formats import as_example, NOT_TRAINED
    try:
        found = parse_json(read_bytes(path))
    except (OSError, ValueError, RecursionError):        # reported below, or JSON lines, or a table
        found = [entry for _, entry in read_entries(path, CONVERSATION)[0]]
    is_message = isinstance(found, list) and found and isinstance(found[0], dict) and (
        {"role", "from"} & found[0].keys())
    entries = found if isinstance(found, list) and not is_message else [found]
    with reading(path, CONVERSATION):
        need(len(entries) == 1, f"expected one conversation, found {len(entries):,}")
        entry = {"messages": entries[0]} if is_message else entries[0]
        need(isinstance(entry, dict), f"expected an object, found {type(entry).__name__}")
        e = as_example(entry, ("output",), NOT_TRAINED)
        messages = [*asked_in(e), *answered_in(e, "output")]
        "".join(text for _, text in messages).encode()   # fails on a lone surrogate
    return messages, not is_message and {*entry} == {"messages"}
