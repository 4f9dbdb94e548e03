"""Third-party chat templates.  They are programs in Jinja, and untrusted input.  Section 11 of
nanoeuler.py calls `third_party_pieces` for any template but the two built-in ones."""
import contextlib
import contextvars
import hashlib
import importlib.util
import inspect
import json
import queue
import re
import string
import subprocess
import sys
import threading

import numpy as np

from bpe import need
from nanoeuler_parts.chat.templates import (
    AFTER, BEFORE, OTHER_TEMPLATE, own_pieces, special_names, unmarked,
)

# ==== Limits ====
# All but the last two are counted in bytes and steps, so that a template and a conversation that
# are rejected on one machine are rejected on every machine.  docs/llamas.md lists them.
TEMPLATE_BYTES = 1 << 18     # of a template in UTF-8; the longest public ones have some 30,000
TEMPLATE_STEPS = 300_000     # rounds of loops and calls of macros, in all renderings together
TEMPLATE_ADDS = 1 << 20      # characters of one text, in addition to 4 times those of its messages
TEMPLATE_STRINGS = 1_000     # different strings in a template that looks into messages
TEMPLATE_WORDS = 256         # of these strings, those that occur in the messages
# A single operation, such as 9 ** 9 ** 9, takes one step.  The operating system limits the CPU time
# and the memory of the rendering process.
TEMPLATE_SECONDS, TEMPLATE_MEMORY = 2, 1 << 29

def need_short(template, remedy="shorten or remove it"):
    """Rejects a template that is longer than TEMPLATE_BYTES."""
    size = len(template.encode("utf-8", "surrogatepass"))
    need(size <= TEMPLATE_BYTES, f"the model's chat template has {size:,} bytes, expected at most "
         f"{TEMPLATE_BYTES:,}; {remedy}")

# ==== Rendering ====
def jinja(template, step):
    """(the template, compiled as transformers does it; the strings in its code).  A template is an
    untrusted program.  The immutable sandbox gives it no access to files or Python, and protects
    its arguments.     step: function that is called in each round of a loop and in each macro"""
    from datetime import datetime

    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks the model's words for training.  Here it is a scope."""
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def to_json(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)

    def raise_exception(message):
        raise TemplateError(message)

    def strftime_now(format):
        return datetime.now().strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.step = step

    def counted():
        return nodes.Call(nodes.EnvironmentAttribute("step"), [], [], None, None)

    tree = environment.parse(template)
    words = sorted({node.value for node in tree.find_all(nodes.Const)
                    if isinstance(node.value, str)})
    for node in [*tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))]:
        node.body.insert(0, nodes.ExprStmt(counted(), lineno=node.lineno))
        if getattr(node, "test", None):      # of `for x in y if test`; counted() is true
            node.test = nodes.And(counted(), node.test)
    return environment.from_string(tree.set_environment(environment)), words

def render_lines(memory):
    """The main loop of the rendering process.  It reads lines of JSON, [template, variables of each
    text, longest text of each, steps, seconds], and answers each with a line, [texts, error, limit,
    steps, seconds].  The error is what the template did wrong, the limit what it needed more of;
    the rest is what is left of steps and seconds.  If the variables are null, the texts are the
    strings of the template.     memory: bytes"""
    import functools
    import math
    import time

    class Limit(Exception):
        """A limit that the template has exceeded"""

    left = 0

    def step():
        nonlocal left
        left -= 1
        if left < 0:
            raise Limit("steps")
        return True

    def limit(name, most):
        # Windows lacks this module; macOS cannot limit memory
        with contextlib.suppress(ImportError, ValueError):
            import resource
            what = getattr(resource, name)
            hard = resource.getrlimit(what)[1]
            if hard == resource.RLIM_INFINITY or most < hard:
                resource.setrlimit(what, (most, hard))

    def text_of(template, variables, longest):
        pieces, length = [], 0
        for piece in template.generate(**variables):
            pieces.append(piece)
            length += len(piece)
            if length > longest:
                raise Limit(f"{longest:,} characters")
        return "".join(pieces)

    limit("RLIMIT_CORE", 0)                  # the CPU limit ends a process with a core dump
    limit("RLIMIT_AS", memory)
    compiled = functools.lru_cache(8)(lambda template: jinja(template, step))
    for line in sys.stdin:
        template, each, lengths, left, seconds = json.loads(line)
        began = time.process_time()
        limit("RLIMIT_CPU", math.ceil(began + seconds) + 1)
        texts, error, used_up = [], "", ""
        try:
            program, words = compiled(template)
            texts = words if each is None else [
                text_of(program, variables, longest) for variables, longest in zip(each, lengths)]
        except Limit as e:
            used_up = str(e)
        except MemoryError:
            used_up = f"{memory >> 20} MB of memory"
        except Exception as e:               # a program may raise any exception
            error = f"{type(e).__name__}: {e}"
        seconds -= time.process_time() - began
        print(json.dumps([[] if error or used_up else texts, error, used_up, left, seconds]),
              flush=True)

class Work:
    """Steps and seconds that are left for the renderings of one conversation"""
    def __init__(self):
        self.steps, self.seconds = TEMPLATE_STEPS, TEMPLATE_SECONDS

class Renderer:
    """A rendering process.  Only the operating system can limit the time and memory of a program,
    so a template runs in its own process.  This process gets the source of two functions and starts
    in 0.1 s; importing this file would take ten times as long.  It ends when its input ends.  It
    has a session of its own, so Ctrl-C does not reach it."""

    def __init__(self):
        source = [f"import sys; sys.path[:] = {sys.path!r}", "import contextlib, json",
                  inspect.getsource(jinja), inspect.getsource(render_lines),
                  f"render_lines({TEMPLATE_MEMORY})"]
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", "\n".join(source)], encoding="utf-8",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True)
        self.answers = queue.SimpleQueue()   # a queue can be waited for on all systems
        threading.Thread(target=self.listen, args=(self.process.stdout, self.answers),
                         daemon=True).start()

    @staticmethod
    def listen(output, answers):
        for line in output:
            answers.put(line)
        answers.put("")                      # the process has ended

    def ask(self, line, check):
        """The answer to a line; "" if the process ended.  Calls `check` every 50 ms meanwhile."""
        with contextlib.suppress(BrokenPipeError):       # the process has ended
            self.process.stdin.write(line)
            self.process.stdin.flush()
        while True:
            check()
            with contextlib.suppress(queue.Empty):
                return self.answers.get(timeout=0.05)

    def end(self):
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):
            self.process.stdin.close()

# Each thread has a rendering process, so that a slow template of one delays no other.
of_thread = threading.local()
CHECK = contextvars.ContextVar("check", default=lambda: None)

@contextlib.contextmanager
def checking(check):
    """Within this context, rendering calls `check` every 50 ms.  If `check` raises an exception,
    for example because the client has left, rendering ends at once with this exception."""
    token = CHECK.set(check)
    try:
        yield
    finally:
        CHECK.reset(token)

def renderer():
    """The Renderer of this thread, started by the first call.  If its process has ended since the
    last call, for example because the system was short of memory, it is started again."""
    found = getattr(of_thread, "renderer", None)
    if found is not None and found.process.poll() is not None:
        found.end()
        found = None
    of_thread.renderer = found or Renderer()
    return of_thread.renderer

def texts_of(template, each, lengths, work):
    """The texts that the rendering process answers.     arguments: as in `render_lines`"""
    need(importlib.util.find_spec("jinja2"),
         f"the model's chat template needs jinja2: pip install jinja2, or {OTHER_TEMPLATE}")
    need_short(template, OTHER_TEMPLATE)
    runs, answer = renderer(), ""
    try:
        line = json.dumps([template, each, lengths, work.steps, max(0, work.seconds)])
        answer = runs.ask(line + "\n", CHECK.get())
    finally:
        if not answer:       # also after Ctrl-C, or the next call would read this answer
            runs.end()
            of_thread.renderer = None
    need(answer, f"the model's chat template used more than {TEMPLATE_SECONDS} s of CPU time or "
         f"{TEMPLATE_MEMORY >> 20} MB of memory; {OTHER_TEMPLATE}")
    texts, error, used_up, work.steps, work.seconds = json.loads(answer)
    used_up = used_up.replace("steps", f"{TEMPLATE_STEPS:,} steps")
    need(not used_up, f"the model's chat template needs more than {used_up}; {OTHER_TEMPLATE}")
    need(not error,
         f"the model's chat template failed: {error}; {OTHER_TEMPLATE}".replace("\n", " "))
    return texts

def render_jinja(template, each, work=None):
    """Renders the template once for each dict of variables in `each`, and returns the texts."""
    lengths = [TEMPLATE_ADDS + 4 * sum(len(message["content"]) for message in variables["messages"])
               for variables in each]
    return texts_of(template, each, lengths, work or Work())

def render_each(template, conversations, state, work=None):
    """The text of each conversation, messages [(role, content)], up to where the next answer begins
    """
    pieces = [own_pieces(template, messages) for messages in conversations]
    if all(pieces):
        return ["".join(text for text, _ in of_one) for of_one in pieces]
    options = {} if not state.thinking else {"enable_thinking": state.thinking == "on"}
    return render_jinja(template, [
        dict(messages=[dict(role=role, content=text) for role, text in messages],
             add_generation_prompt=True, bos_token=state.bos, eos_token=state.eos,
             tools=None, documents=None, **options) for messages in conversations], work)

def render(template, messages, state):
    return render_each(template, [messages], state)[0]

# Marks: the text of messages is rendered with BEFORE and AFTER around each character.  The marks
# distinguish it from the template's own text.  Both are lone surrogates, never part of valid text.
# Characters without marks are "shown" to the template.  SAID matches marked characters.
SAID = re.compile(f"(?:{BEFORE}[^{BEFORE}{AFTER}]*{AFTER})+")

def marked(text):
    """The text with BEFORE and AFTER around each character."""
    return BEFORE + (AFTER + BEFORE).join(text) + AFTER if text else ""

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

def words_looked_for(template, messages, state, work, plain):
    """{role: words} that the template looks for in messages.  Candidates are the strings of the
    template that occur in messages of the role.  The words found are a smallest set that makes the
    text, marks aside, equal to `plain` once its words are shown: without any one of them it would
    differ.  A template may look for several words together, as in `'<a>' in c and '</a>' in c`.
    {} if not even all candidates are enough.  Single characters need no such test: marks do not
    hide them.     plain: the text of the messages without marks"""
    strings = [word for word in texts_of(template, None, [], work) if len(word) > 1]
    need(len(strings) <= TEMPLATE_STRINGS, f"the model's chat template looks into messages and has "
         f"{len(strings):,} different strings, expected at most {TEMPLATE_STRINGS:,}; "
         f"{OTHER_TEMPLATE}")
    said = {}
    for role, text in messages:
        said.setdefault(role, []).append(text)
    said = {role: BEFORE.join(texts) for role, texts in said.items()}
    candidates = [(role, word) for role in said for word in strings if word in said[role]]
    need(len(candidates) <= TEMPLATE_WORDS, f"the messages contain {len(candidates):,} strings of "
         f"the model's chat template, expected at most {TEMPLATE_WORDS}; {OTHER_TEMPLATE}")

    def shown(tries):
        found = {}
        for role, word in tries:
            found.setdefault(role, []).append(word)
        return found

    def enough(tries):
        marked_messages = with_marks(messages, shown(tries))
        return unmarked(render_each(template, [marked_messages], state, work)[0]) == plain

    def needed(given, tries):
        """The smallest part of `tries` that is enough together with `given`; all of them are.
        Junker 2004, QuickXplain: about k log2(n / k) renderings for k of n words"""
        if not tries or enough(given):
            return []
        if len(tries) == 1:
            return tries
        half = len(tries) // 2
        second = needed(given + tries[:half], tries[half:])
        return needed(given + second, tries[:half]) + second

    return shown(needed([], candidates)) if enough(candidates) else {}

# Letters from a private plane of Unicode that replace the text of messages.  They do not depend on
# the text, so a template cannot infer from them what a message says.
PROBES = [chr(0xF0000 + i) for i in range(1 << 14)]

def with_other_letters(messages):
    """Replaces each marked character with the letter of its message."""
    return [(role, re.sub(f"(?s){BEFORE}.{AFTER}", BEFORE + letter + AFTER, said))
            for (role, said), letter in zip(messages, PROBES)]

KINDS = {c: kind for kind in (string.ascii_lowercase, string.ascii_uppercase, string.digits)
         for c in kind}

def with_random_letters(messages):
    """Replaces each marked letter or digit with a random one of its kind, so that a template cannot
    tell these messages from real ones.  The same messages always become the same text."""
    seed = hashlib.sha256(repr(messages).encode(errors="backslashreplace")).digest()
    most = sum(len(said) for _, said in messages)
    draws = iter(np.random.default_rng(list(seed)).integers(26 * 10, size=most).tolist())

    def another(match):
        kind = KINDS.get(match[1], match[1])
        return BEFORE + kind[next(draws) % len(kind)] + AFTER

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
    work = Work()
    marked_messages = [[(role, marked(said)) for role, said in messages], with_marks(messages, {})]
    plain, *texts = render_each(template, [messages, *marked_messages], state, work)
    if plain not in map(unmarked, texts):
        words = words_looked_for(template, messages, state, work, plain)
        marked_messages.append(with_marks(messages, words))
        texts += render_each(template, marked_messages[-1:], state, work)
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
        with_letters_alone(messages)], state, work)
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
