"""Third-party chat templates: programs in Jinja, which are untrusted input."""
import contextlib
import hashlib
import importlib.util
import inspect
import json
import re
import string
import subprocess
import sys
import time
from functools import cache

import numpy as np

from bpe import need
from nanoeuler import AFTER, BEFORE, OTHER_TEMPLATE, own_pieces, special_names, unmarked

def jinja(template):
    """A template as transformers compiles it.  It is a stranger's program: the sandbox keeps it
    from files and from Python, ImmutableSandboxedEnvironment from changing what it is given."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def to_json(x, indent=None):
        return json.dumps(x, ensure_ascii=False, indent=indent)

    def raise_exception(message):
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = time.strftime
    # a block that marks, for training, what the model says; here it is a block without effect
    written = re.sub(r"({%-?\s*)generation(\s*-?%})", r"\1if true\2", template)
    written = re.sub(r"({%-?\s*)endgeneration(\s*-?%})", r"\1endif\2", written)
    return environment.from_string(written)

def render_lines(seconds, memory, longest):
    """What the process that renders does.  A line of JSON asks [template, variables of each text];
    a line answers [texts, ""] or [[], what went wrong].
    seconds: of CPU for a line     memory: bytes     longest: characters of one text"""
    import functools

    def limit(name, most):
        # Windows has no such module, macOS no limit of memory
        with contextlib.suppress(ImportError, ValueError):
            import resource
            what = getattr(resource, name)
            hard = resource.getrlimit(what)[1]
            if hard == resource.RLIM_INFINITY or most < hard:
                resource.setrlimit(what, (most, hard))

    limit("RLIMIT_CORE", 0)                  # at its limit a process ends with a core dump
    limit("RLIMIT_AS", memory)
    compiled = functools.lru_cache(jinja)
    for line in sys.stdin:
        limit("RLIMIT_CPU", int(time.process_time()) + 1 + seconds)
        try:
            template, each = json.loads(line)
            texts = []
            for variables in each:
                pieces, length = [], 0
                for piece in compiled(template).generate(**variables):
                    pieces.append(piece)
                    length += len(piece)
                    if length > longest:
                        raise OverflowError(f"its text is longer than {longest} characters")
                texts.append("".join(pieces))
            answer = json.dumps([texts, ""])
        except Exception as e:               # a template is a program: it may fail in any way
            answer = json.dumps([[], f"{type(e).__name__}: {e}"])
        print(answer, flush=True)

# A real template takes milliseconds.  A context of a million tokens is some 4 million characters,
# three times as many with marks.
TEMPLATE_SECONDS, TEMPLATE_MEMORY, TEMPLATE_LONGEST = 2, 1 << 29, 1 << 24

@cache
def renderer():
    """Another process, which renders: only the system can set a program's time and memory a limit.
    It is given the source of two functions, and starts in a tenth of a second; to import this file
    would take ten times as long.  It ends when its input does.  Ctrl-C is not meant for it."""
    source = [f"import sys; sys.path[:] = {sys.path!r}",
              "import contextlib, json, re, time",
              inspect.getsource(jinja), inspect.getsource(render_lines),
              f"render_lines({TEMPLATE_SECONDS}, {TEMPLATE_MEMORY}, {TEMPLATE_LONGEST})"]
    return subprocess.Popen([sys.executable, "-I", "-c", "\n".join(source)], encoding="utf-8",
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            stderr=subprocess.DEVNULL, start_new_session=True)

def render_jinja(template, each):
    """The texts of a template that is given each of these variables."""
    need(importlib.util.find_spec("jinja2"),
         f"the model's chat template needs jinja2: pip install jinja2, or {OTHER_TEMPLATE}")
    process, answer = renderer(), ""
    try:
        process.stdin.write(json.dumps([template, each]) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    except BrokenPipeError:                  # it has ended
        pass
    finally:
        if not answer:       # nor after Ctrl-C: a late answer would be taken for the next one's
            process.kill()
            process.wait()
            renderer.cache_clear()
    need(answer, f"the model's chat template takes more than {TEMPLATE_SECONDS} s, or more than "
         f"{TEMPLATE_MEMORY >> 20} MB; {OTHER_TEMPLATE}")
    texts, error = json.loads(answer)
    need(not error, f"the model's chat template: {error}; {OTHER_TEMPLATE}".replace("\n", " "))
    return texts

def render_each(template, conversations, state):
    """The text of each conversation, messages [(role, content)], with what begins the next answer
    """
    pieces = [own_pieces(template, messages) for messages in conversations]
    if all(pieces):
        return ["".join(text for text, _ in of_one) for of_one in pieces]
    return render_jinja(template, [
        dict(messages=[dict(role=role, content=text) for role, text in messages],
             add_generation_prompt=True, bos_token=state.bos, eos_token=state.eos,
             tools=None, documents=None) for messages in conversations])

def render(template, messages, state):
    return render_each(template, [messages], state)[0]

SAID = re.compile(f"(?:{BEFORE}[^{BEFORE}{AFTER}]*{AFTER})+")

def marked(text):
    """The text with a mark on both sides of each character."""
    return "".join(BEFORE + c + AFTER for c in text)

def marked_but(words, text):
    """The same, but for these words, which a template may look for, and for blanks around them and
    at the ends of the text, which it may strip."""
    words = sorted(words, key=len, reverse=True)         # the longest that fits
    pieces = re.split(f"({'|'.join(map(re.escape, words)) or '(?!)'})", text)
    for i in range(0, len(pieces), 2):       # what is between the words
        core = pieces[i].strip()
        pieces[i] = pieces[i].replace(core, marked(core), 1)
    return "".join(pieces)

def with_marks(messages, shown):
    """shown: {role: words that get no marks}"""
    return [(role, marked_but(shown.get(role, ()), said)) for role, said in messages]

def words_looked_for(template, messages, state):
    """{role: words}: those of the template's own words, in quotes, that are said, and of which it
    makes another text if it can see them.  A word of one character it sees between marks, too."""
    code = "".join(re.findall(r"(?s){[{%].*?[%}]}", template))
    quoted = {a or b for a, b in re.findall(r"'([^']*)'|\"([^\"]*)\"", code)}
    words = sorted(word.replace("\\n", "\n") for word in quoted if len(word) > 1)
    said = {}
    for role, text in messages:
        said[role] = said.get(role, "") + BEFORE + text
    tries = [(role, word) for role in said for word in words if word in said[role]]
    shown = [with_marks(messages, {role: [word]}) for role, word in tries]
    hidden, *texts = render_each(template, [with_marks(messages, {}), *shown], state)
    found = {role: [] for role in said}
    for (role, word), text in zip(tries, texts):
        if unmarked(text) != unmarked(hidden):
            found[role].append(word)
    return found

# Letters that stand for what is said: of a private plane of Unicode.  They are the same for every
# text, so a template cannot learn from them what a message says.
PROBES = [chr(0xF0000 + i) for i in range(1 << 14)]

def with_other_letters(messages):
    """Each message says one letter of its own wherever it bears marks."""
    return [(role, re.sub(f"(?s){BEFORE}.{AFTER}", BEFORE + letter + AFTER, said))
            for (role, said), letter in zip(messages, PROBES)]

def with_random_letters(messages):
    """Each marked letter and digit becomes a random one of its kind, so that a template cannot tell
    these messages from those that somebody wrote.  The same messages become the same text."""
    seed = hashlib.sha256(repr(messages).encode(errors="backslashreplace")).digest()
    rng = np.random.default_rng(list(seed))
    kinds = string.ascii_lowercase, string.ascii_uppercase, string.digits

    def another(match):
        kind = next((kind for kind in kinds if match[1] in kind), match[1])
        return BEFORE + kind[rng.integers(len(kind))] + AFTER

    return [(role, re.sub(f"(?s){BEFORE}(.){AFTER}", another, said)) for role, said in messages]

def with_letters_alone(messages):
    """The same without marks: blanks stay, each other character is the message's letter."""
    return [(role, re.sub(r"\S", letter, said)) for (role, said), letter in zip(messages, PROBES)]

def speaker_of(part, roles):
    """The role of a part that is said, from the letters of its messages: "assistant" if all of it
    is the model's, "user" of anything else.     roles: {letter: role}"""
    said_by = {roles.get(letter) for letter in unmarked(part)}
    return "assistant" if said_by == {"assistant"} else "user"

def frame(text, special):
    """What a template wrote around what is said: its special names, and for the parts before,
    between and after them the letters that are said there.
    special: regular expression of the names"""
    parts = re.split(f"({special})", text)
    return parts[1::2], [{*"".join(SAID.findall(part))} for part in parts[::2]]

def strangers_pieces(template, messages, state, tokenizer):
    """The pieces of messages by a template that is a program"""
    text, speakers = conversation_text(template, messages, state, tokenizer)
    parts = re.split(f"({SAID.pattern})", text)          # what was said is every other one
    return [(unmarked(part), speakers[i // 2] if i % 2 else "") for i, part in enumerate(parts)]

def conversation_text(template, messages, state, tokenizer):
    """The rendered text, in which what is said bears marks: <s> of a user is B<ABsAB>A, where B is
    BEFORE and A is AFTER.  Special names are those without marks: the template's own.  And the
    role of each part that bears marks.

    What users and models say must never become a special token, whatever the template does with
    it.  And yet a template must see what is said: it may strip it, quote it, cut it where a thought
    ends.  So it is rendered as it is, and with marks: on all of it; on all but the blanks at its
    ends; or also without those on a few words that the template looks for.  One of these must be
    the same text but for the marks.  It is refused unless
    - the marks come back in pairs;
    - all outside of them is the same where other letters are said, one letter for each message or
      random ones: then it is not made of what is said;
    - its special names are those of the text in which all that is said is marked, and no message
      stands between others of them than there;
    - if something is shown without marks, they are those of a text of as many other letters, too:
      a template may count them; and blanks are shown only where no special name has any."""
    marked_messages = [[(role, marked(said)) for role, said in messages], with_marks(messages, {})]
    plain, *texts = render_each(template, [messages, *marked_messages], state)
    if plain not in map(unmarked, texts):
        words = words_looked_for(template, messages, state)
        marked_messages.append(with_marks(messages, words))
        texts.append(render(template, marked_messages[-1], state))
    refusal = (f"the model's chat template changes what is said, and might make a special token "
               f"of it; say it otherwise, begin anew with /reset, or {OTHER_TEMPLATE}")
    names = "".join(tokenizer.specials)
    most_shown = 1 if any(map(str.isspace, names)) else len(texts)
    same = [i for i, text in enumerate(texts[:most_shown]) if unmarked(text) == plain]
    need(same, refusal)
    text = texts[same[0]]
    outside = SAID.sub("", text)
    need(unmarked(outside) == outside, refusal)
    known = {*names, *"".join(said for _, said in messages)}
    probes = PROBES[:len(messages)]
    need(len(messages) == len(probes) and known.isdisjoint(probes), refusal)
    in_letters, in_random_letters, all_in_letters, without_marks = render_each(template, [
        with_other_letters(marked_messages[same[0]]),
        with_random_letters(marked_messages[same[0]]),
        with_other_letters(marked_messages[0]),
        with_letters_alone(messages)], state)
    need(SAID.sub(BEFORE, in_letters) == SAID.sub(BEFORE, text), refusal)
    need(SAID.sub(BEFORE, in_random_letters) == SAID.sub(BEFORE, text), refusal)
    special = special_names(tokenizer)
    found, said = frame(in_letters, special)
    found_in_marked, said_of_marked = frame(all_in_letters, special)
    need(found == found_in_marked, refusal)
    need(same[0] == 0 or found == frame(without_marks, special)[0], refusal)
    need(all(a <= b for a, b in zip(said, said_of_marked)), refusal)       # less may be said
    roles = {letter: role for (role, _), letter in zip(messages, PROBES)}
    return text, [speaker_of(part, roles) for part in SAID.findall(in_letters)]
