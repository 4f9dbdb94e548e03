"""Third-party chat templates.  They are programs in Jinja, and untrusted input.  Section 11 of
nanoeuler.py calls `third_party_pieces` for any template but the two built-in ones."""
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
    """The template, compiled as transformers does it.  A template is an untrusted program.  The
    immutable sandbox gives it no access to files or Python, and protects its arguments."""
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
    # `generation` blocks mark the model's words for training; here they have no effect
    written = re.sub(r"({%-?\s*)generation(\s*-?%})", r"\1if true\2", template)
    written = re.sub(r"({%-?\s*)endgeneration(\s*-?%})", r"\1endif\2", written)
    return environment.from_string(written)

def render_lines(seconds, memory, longest):
    """The main loop of the rendering process.  It reads lines of JSON, [template, variables of each
    text], and answers each with a line, [texts, ""] or [[], error message].
    seconds: of CPU time per line     memory: bytes     longest: characters of one text"""
    import functools

    def limit(name, most):
        # Windows lacks this module; macOS cannot limit memory
        with contextlib.suppress(ImportError, ValueError):
            import resource
            what = getattr(resource, name)
            hard = resource.getrlimit(what)[1]
            if hard == resource.RLIM_INFINITY or most < hard:
                resource.setrlimit(what, (most, hard))

    limit("RLIMIT_CORE", 0)                  # the CPU limit ends a process with a core dump
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
                        raise OverflowError(f"its output is longer than {longest} characters")
                texts.append("".join(pieces))
            answer = json.dumps([texts, ""])
        except Exception as e:               # a program may raise any exception
            answer = json.dumps([[], f"{type(e).__name__}: {e}"])
        print(answer, flush=True)

# A real template takes milliseconds.  A context of a million tokens has about 4 million characters,
# and three times as many with marks, which stay below TEMPLATE_LONGEST.
TEMPLATE_SECONDS, TEMPLATE_MEMORY, TEMPLATE_LONGEST = 2, 1 << 29, 1 << 24

@cache
def renderer():
    """The rendering process, started by the first call.  Only the operating system can limit the
    time and memory of a program, so a template runs in its own process.  This process gets the
    source of two functions and starts in 0.1 s; importing this file would take ten times as long.
    It ends when its input ends.  It has a session of its own, so Ctrl-C does not reach it."""
    source = [f"import sys; sys.path[:] = {sys.path!r}",
              "import contextlib, json, re, time",
              inspect.getsource(jinja), inspect.getsource(render_lines),
              f"render_lines({TEMPLATE_SECONDS}, {TEMPLATE_MEMORY}, {TEMPLATE_LONGEST})"]
    return subprocess.Popen([sys.executable, "-I", "-c", "\n".join(source)], encoding="utf-8",
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            stderr=subprocess.DEVNULL, start_new_session=True)

def render_jinja(template, each):
    """Renders the template once for each dict of variables in `each`, and returns the texts."""
    need(importlib.util.find_spec("jinja2"),
         f"the model's chat template needs jinja2: pip install jinja2, or {OTHER_TEMPLATE}")
    process, answer = renderer(), ""
    try:
        process.stdin.write(json.dumps([template, each]) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    except BrokenPipeError:                  # the process has ended
        pass
    finally:
        if not answer:       # also after Ctrl-C, or the next call would read this answer
            process.kill()
            process.wait()
            renderer.cache_clear()
    need(answer, f"the model's chat template used more than {TEMPLATE_SECONDS} s of CPU time or "
         f"{TEMPLATE_MEMORY >> 20} MB of memory; {OTHER_TEMPLATE}")
    texts, error = json.loads(answer)
    need(not error,
         f"the model's chat template failed: {error}; {OTHER_TEMPLATE}".replace("\n", " "))
    return texts

def render_each(template, conversations, state):
    """The text of each conversation, messages [(role, content)], up to where the next answer begins
    """
    pieces = [own_pieces(template, messages) for messages in conversations]
    if all(pieces):
        return ["".join(text for text, _ in of_one) for of_one in pieces]
    options = {} if not state.thinking else {"enable_thinking": state.thinking == "on"}
    return render_jinja(template, [
        dict(messages=[dict(role=role, content=text) for role, text in messages],
             add_generation_prompt=True, bos_token=state.bos, eos_token=state.eos,
             tools=None, documents=None, **options) for messages in conversations])

def render(template, messages, state):
    return render_each(template, [messages], state)[0]

# Marks: the text of messages is rendered with BEFORE and AFTER around each character.  The marks
# distinguish it from the template's own text.  Both are lone surrogates, never part of valid text.
# Characters without marks are "shown" to the template.  SAID matches marked characters.
SAID = re.compile(f"(?:{BEFORE}[^{BEFORE}{AFTER}]*{AFTER})+")

def marked(text):
    """The text with BEFORE and AFTER around each character."""
    return "".join(BEFORE + c + AFTER for c in text)

def marked_but(words, text):
    """The same, but without marks on these words, because a template may look for them.  Blanks
    around the words and at the ends of the text get no marks either: a template may strip them."""
    words = sorted(words, key=len, reverse=True)         # prefer longer words
    pieces = re.split(f"({'|'.join(map(re.escape, words)) or '(?!)'})", text)
    for i in range(0, len(pieces), 2):       # the pieces between the words
        core = pieces[i].strip()
        pieces[i] = pieces[i].replace(core, marked(core), 1)
    return "".join(pieces)

def with_marks(messages, shown):
    """The messages with marks.  shown: {role: words that get no marks}"""
    return [(role, marked_but(shown.get(role, ()), said)) for role, said in messages]

def words_looked_for(template, messages, state):
    """{role: words} that the template looks for in messages.  Candidates are quoted strings of the
    template that occur in messages of the role.  A word counts if the text changes, marks aside,
    once the word is shown.  Single characters need no such test: marks do not hide them."""
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

# Letters from a private plane of Unicode that replace the text of messages.  They do not depend on
# the text, so a template cannot infer from them what a message says.
PROBES = [chr(0xF0000 + i) for i in range(1 << 14)]

def with_other_letters(messages):
    """Replaces each marked character with the letter of its message."""
    return [(role, re.sub(f"(?s){BEFORE}.{AFTER}", BEFORE + letter + AFTER, said))
            for (role, said), letter in zip(messages, PROBES)]

def with_random_letters(messages):
    """Replaces each marked letter or digit with a random one of its kind, so that a template cannot
    tell these messages from real ones.  The same messages always become the same text."""
    seed = hashlib.sha256(repr(messages).encode(errors="backslashreplace")).digest()
    rng = np.random.default_rng(list(seed))
    kinds = string.ascii_lowercase, string.ascii_uppercase, string.digits

    def another(match):
        kind = next((kind for kind in kinds if match[1] in kind), match[1])
        return BEFORE + kind[rng.integers(len(kind))] + AFTER

    return [(role, re.sub(f"(?s){BEFORE}(.){AFTER}", another, said)) for role, said in messages]

def with_letters_alone(messages):
    """The messages without marks, each character but blanks replaced by its message's letter."""
    return [(role, re.sub(r"\S", letter, said)) for (role, said), letter in zip(messages, PROBES)]

def speaker_of(part, roles):
    """The role of a marked part, from the letters of its messages: "assistant" if the model wrote
    all of it, else "user".     roles: {letter: role}"""
    said_by = {roles.get(letter) for letter in unmarked(part)}
    return "assistant" if said_by == {"assistant"} else "user"

def frame(text, special):
    """The special names in a rendered text, and the sets of marked letters in the parts before,
    between and after them.
    special: regular expression of the names"""
    parts = re.split(f"({special})", text)
    return parts[1::2], [{*"".join(SAID.findall(part))} for part in parts[::2]]

def third_party_pieces(template, messages, state, tokenizer):
    """[(text, role)], the pieces of messages in a third-party template.  The role is "" for the
    template's own text."""
    text, speakers = conversation_text(template, messages, state, tokenizer)
    parts = re.split(f"({SAID.pattern})", text)          # odd parts are marked
    return [(unmarked(part), speakers[i // 2] if i % 2 else "") for i, part in enumerate(parts)]

def conversation_text(template, messages, state, tokenizer):
    """The rendered text with marks around the text of messages, and the role of each marked part.
    A user's <s> is B<ABsAB>A, where B is BEFORE and A is AFTER.  A special name becomes a special
    token only where it is unmarked, that is, where the template wrote it.

    The text of a message must never become a special token, whatever the template does with it.
    Yet a template must be able to read messages: it may strip or quote them, or cut them where a
    thought ends.  So the conversation is rendered plain, and with marks in up to three ways:
    1. marks on every character of the messages;
    2. the same, but no marks on blanks at the ends of a message;
    3. if neither fits, also no marks on the words of `words_looked_for`.
    The first that equals the plain text, marks aside, is used.  If none does, the conversation is
    rejected.  It is also rejected unless
    - all marks come back in pairs;
    - the text outside the marks stays the same if the messages have other letters: one letter per
      message, or random letters.  Then this text is not made of messages;
    - its special names are the same as in way 1.  Each part around them contains only messages
      that the same part contains in way 1;
    - in ways 2 and 3, its special names are also the same for unmarked messages of equally many
      other letters, because a template may count letters.
    Ways 2 and 3 are not allowed if a special name contains a blank, because they show blanks."""
    marked_messages = [[(role, marked(said)) for role, said in messages], with_marks(messages, {})]
    plain, *texts = render_each(template, [messages, *marked_messages], state)
    if plain not in map(unmarked, texts):
        words = words_looked_for(template, messages, state)
        marked_messages.append(with_marks(messages, words))
        texts.append(render(template, marked_messages[-1], state))
    refusal = (f"the model's chat template changes the messages and might turn them into special "
               f"tokens; rephrase them, start over with /reset, or {OTHER_TEMPLATE}")
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
    need(all(a <= b for a, b in zip(said, said_of_marked)), refusal)       # fewer is fine
    roles = {letter: role for (role, _), letter in zip(messages, PROBES)}
    return text, [speaker_of(part, roles) for part in SAID.findall(in_letters)]
