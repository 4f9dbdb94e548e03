"""OpenAI's protocol: `Reader` checks requests, `Voice` and `Writer` make the responses for app.py.
responses.py and ollama.py translate their requests into those of /v1/chat/completions.

Unknown parameters are rejected, and the error names them.  Parameters that this server does not
support are rejected too, unless their value asks for the behavior that it has anyway.  Parameters
that cannot change a reply are ignored.  There are four extensions, all of which the chat page uses:
    top_k, min_p     restrict sampling
    return_tokens    returns the ids of the tokens and the draft tokens with the text
    forget           drops the oldest exchanges of a conversation that exceeds the context
"""
import codecs
import itertools
import json
import math
import sys
import time
import uuid
from dataclasses import dataclass, field, replace

import nanoeuler as ne
from bpe import cause_of, reading
from nanoeuler_parts.chat.messages import checked_message
from nanoeuler_parts.chat.sampling import Sampling
from nanoeuler_parts.chat.templates import chat_ids, is_alpaca, is_chatml
from nanoeuler_parts.files.texts import json_beginning, parse_json
from nanoeuler_parts.serve import values
from nanoeuler_parts.serve.engine import Answer, Pieces

MOST_CHOICES = 128           # answers to one request
MOST_LOGPROBS = 20
MOST_STOPS, LONGEST_STOP = 16, 256
LONGEST_SALT = 256           # characters of cache_salt
MOST_MESSAGES = 2048
MOST_SCORES = 1 << 18        # log-probabilities in the response to one request
MOST_NESTED = 64             # levels of objects and arrays in a body; Python has some 1,000
# Work to turn the texts of one request into ids, in characters.  A third-party template is rendered
# several times, and each text of it is compared with others, so its characters count more.
MOST_WORK, THIRD_PARTY = 1 << 22, 32
# A schema that takes at most this many pieces of json_schema.PIECE steps, about 2 ms each, is
# prepared with its request.  Another thread prepares the others, so that no request waits for them.
QUICK_PIECES = 2


class Refusal(Exception):
    """An error that is returned to the client, in OpenAI's format."""

    def __init__(self, status, message, param=None, code=None, headers=None):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers or {}

    def body(self):
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else
                         "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param,
                          "code": self.code}}


def refuse_unless(ok, message, param=None, code=None):
    if not ok:
        raise Refusal(400, message, param, code)


class Gone(Exception):
    """The client has left, so nobody waits for the work that it requested."""


def need_client(gone):
    """Raises Gone if the client has left.  gone: threading.Event"""
    if gone.is_set():
        raise Gone


class Slow(Exception):
    """The preparation of a schema takes more than QUICK_PIECES pieces."""


def quick(gone):
    """An `alive` for json_mode.constraint.  It raises Slow after QUICK_PIECES pieces, and Gone if
    the client has left."""
    pieces = itertools.count(1)

    def alive():
        need_client(gone)
        if next(pieces) >= QUICK_PIECES:
            raise Slow
    return alive


class Work:
    """The work that is left for one request before its answers begin, in characters.
    gone: threading.Event, set when the client leaves"""

    def __init__(self, gone):
        self.gone, self.left = gone, MOST_WORK

    def allows(self, characters):
        need_client(self.gone)
        return characters <= self.left

    def spend(self, characters, name):
        """Raises Gone if the client has left, and a Refusal if this is too much work."""
        refuse_unless(self.allows(characters), f"the {name} of this request takes too much work: "
                      f"expected at most {MOST_WORK:,} characters, counted as in "
                      f"docs/serving-api.md; shorten the {name}", name, "request_too_large")
        self.left -= characters


# ---- JSON
def encoded(body):
    """A body as JSON in UTF-8.  Every body can be encoded: NaN and infinities become null, and a
    lone surrogate becomes its escape.  File names that are not UTF-8 contain lone surrogates."""
    try:
        return on_one_line(json.dumps(body, ensure_ascii=False, allow_nan=False)).encode()
    except ValueError:                       # UnicodeEncodeError is one
        text = json.dumps(finite(body), ensure_ascii=False, allow_nan=False)
        return on_one_line(text).encode(errors="backslashreplace")


def on_one_line(text):
    """JSON with escapes for Unicode's line ends, at which some clients split streams (httpx)"""
    for end in "\x85\u2028\u2029":
        text = text.replace(end, f"\\u{ord(end):04x}")
    return text


def finite(x):
    """The same object with None in place of NaN and infinities"""
    if isinstance(x, dict):
        return {key: finite(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def is_nested(x, most):
    """Whether objects and arrays are nested more than `most` deep"""
    level = [x]
    for _ in range(most):
        level = [child for x in level if isinstance(x, dict | list)
                 for child in (x.values() if isinstance(x, dict) else x)
                 if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def need_encodable(body):
    """Rejects numbers that Python has read as infinities, because a response may repeat them.
    Raises UnicodeEncodeError for a lone surrogate."""
    try:
        text = json.dumps(body, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise Refusal(400, f"the body contains a number that is too large, expected numbers up to "
                      f"{sys.float_info.max:.1e}; correct it") from None
    text.encode()


def parse(raw):
    """The JSON object in a request's body"""
    def no_number(name):
        raise ValueError(f"{name} is not a JSON number")

    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=no_number)
        if is_nested(body, MOST_NESTED):
            raise RecursionError
        need_encodable(body)
    except UnicodeDecodeError as e:
        raise Refusal(400, f"expected a body in UTF-8, found an invalid byte at offset "
                      f"{e.start}") from None
    except UnicodeEncodeError:
        raise Refusal(400, "the body contains half of a surrogate pair; send whole characters"
                      ) from None
    except RecursionError:
        raise Refusal(400, f"the JSON of the body is nested too deeply, expected at most "
                      f"{MOST_NESTED} levels of objects and arrays; flatten it") from None
    except ValueError as e:
        raise Refusal(400, f"the body is not JSON: {cause_of(e)}") from None
    refuse_unless(isinstance(body, dict), "expected a JSON object as the body, found another JSON "
                  "value")
    return body


# ---- parameters: each function is a check(name, value), or returns one
def number(low, high, whole=False):
    def check(name, value):
        if whole and type(value) is float and value.is_integer():    # JSON has one kind of numbers
            value = int(value)
        kinds = (int,) if whole else (int, float)
        refuse_unless(type(value) in kinds and low <= value <= high,
                      f"{name} is {shown(value)}, expected {'an integer' if whole else 'a number'} "
                      f"from {low} to {high}", name)
        return value
    return check


def at_most(high, low):
    """A check for an integer of 64 bits from `low` on.  A larger one than `high` means the same as
    `high`."""
    accepted = number(low, WHOLE, whole=True)
    return lambda name, value: min(high, accepted(name, value))


def seed(name, value):
    """-1 asks for other random numbers each time, as in llama.cpp and Ollama: returns None."""
    value = number(-WHOLE - 1, WHOLE, whole=True)(name, value)
    return None if value == -1 else value % (1 << 64)


def length(low):
    """A check for a number of tokens in an answer.  -1 asks for as many as fit, as in llama.cpp,
    LM Studio and Ollama."""
    def check(name, value):
        if values.same(value, -1):
            return -1
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        refuse_unless(type(value) is int and low <= value <= WHOLE,
                      f"{name} is {shown(value)}, expected a number of tokens from {low} on, or -1 "
                      f"for as many as fit", name)
        return value
    return check


def flag(name, value):
    refuse_unless(type(value) is bool, f"{name} is {shown(value)}, expected true or false", name)
    return value


def text(name, value):
    refuse_unless(isinstance(value, str), f"{name} is {shown(value)}, expected a string", name)
    return value


def stops(name, value):
    value = [value] if isinstance(value, str) else value
    refuse_unless(isinstance(value, list) and len(value) <= MOST_STOPS and
                  all(isinstance(s, str) and 0 < len(s) <= LONGEST_STOP for s in value),
                  f"{name} is {shown(value)}, expected a string or a list of up to {MOST_STOPS}, "
                  f"each of 1 to {LONGEST_STOP} characters", name)
    return value


def stream_options(name, value):
    refuse_unless(isinstance(value, dict), f"{name} is {shown(value)}, expected an object", name)
    for key in value:
        refuse_unless(key in ("include_usage", "include_obfuscation", "continuous_usage_stats"),
                      f"{name}: the key {shown(key)} is not supported; expected include_usage",
                      name)
    return flag(f"{name}.include_usage", value.get("include_usage") or False)


def top_k(name, value):
    """Some clients send -1 for all tokens."""
    return max(0, at_most(MOST_COUNTED, -1)(name, value))


def completion_logprobs(name, value):
    return None if value is False else number(0, MOST_LOGPROBS, whole=True)(name, value)


def response_format(name, value):
    """The `json_schema` of nanoeuler.Sampling for this format"""
    refuse_unless(isinstance(value, dict), f"{name} is {shown(value)}, expected an object", name)
    kind, known = value.get("type"), {"type"}
    if kind == "json_object" and "schema" in value:      # llama.cpp's form
        refuse_unless(value.keys() == {"type", "schema"}, f"{name}: expected type and schema, "
                      f"found {shown(sorted(value))}", name)
        return schema_alone(name, value["schema"], ".schema")
    if kind == "json_schema":
        known |= {kind}
        schema = value.get(kind)
        refuse_unless(isinstance(schema, dict) and isinstance(schema.get("schema"), dict),
                      f"{name}: expected json_schema with a schema, both objects", name)
        strange = schema.keys() - {"name", "description", "schema", "strict"}
        refuse_unless(not strange, f"{name}: json_schema has the unknown keys "
                      f"{shown(sorted(strange))}; remove them", name)
    refuse_unless(kind in ("text", "json_object", "json_schema") and value.keys() <= known,
                  f"{name} is {shown(value)}, expected the type text, json_object or json_schema",
                  name)
    if kind == "json_schema":
        return json.dumps(schema["schema"], ensure_ascii=False)
    return {"text": "", "json_object": "object"}[kind]


def schema_alone(name, value, key=""):
    """The same for a schema, an object or a JSON text.  key: its place in the parameter"""
    refuse_unless(isinstance(value, (dict, str)), f"{name}{key} is {shown(value)}, expected a "
                  f"JSON schema", name)
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    try:                                     # "object" alone has a meaning to `Sampling`, no JSON
        with reading("the JSON schema", "correct the schema"):
            parse_json(value)
    except ne.UserError as e:
        raise Refusal(400, str(e), name) from None
    return value


def structured_outputs(name, value):
    """The same for vLLM's form {"json": schema}"""
    refuse_unless(isinstance(value, dict) and value.keys() == {"json"}, f"{name} is "
                  f"{shown(value)}, expected an object with the key json alone, whose value is a "
                  f"JSON schema", name)
    return schema_alone(name, value["json"], ".json")


# What other servers call a schema: vLLM, its later versions, and llama.cpp
SCHEMAS = {"guided_json": schema_alone, "structured_outputs": structured_outputs,
           "json_schema": schema_alone}


def format_of(said):
    """The `json_schema` of nanoeuler.Sampling from the checked parameters"""
    found = [name for name in ("response_format", *SCHEMAS) if said.get(name)]
    refuse_unless(len(found) <= 1, f"expected one form of the answer, found {' and '.join(found)}; "
                  f"remove all but one", found[-1] if found else "")
    return said[found[0]] if found else ""


def shown(value):
    """The beginning of a value, for an error.  Only this beginning is encoded."""
    said = repr(value[:60]) if isinstance(value, str) else json_beginning(value, 61)
    return said if len(said) <= 60 else f"{said[:57]}..."


def cache_salt(name, value):
    refuse_unless(len(text(name, value)) <= LONGEST_SALT, f"{name} has {len(value):,} characters, "
                  f"expected at most {LONGEST_SALT}; shorten it", name)
    return value


def salt_of(said):
    """The `salt` of engine.Answer from the checked parameters"""
    return said.get("cache_salt", "") if said.get("cache_prompt", True) else None


def thinking(name, value):
    """Checks {"enable_thinking": flag}, and returns the value for State.thinking."""
    refuse_unless(isinstance(value, dict) and {*value} <= {"enable_thinking"},
                  f"{name} is {shown(value)}, expected an object with enable_thinking alone", name)
    found = value.get("enable_thinking")
    return "" if found is None else "on" if flag("enable_thinking", found) else "off"


WHOLE = (1 << 63) - 1        # the protocols have signed integers of 64 bits
MOST_COUNTED = 1 << 40       # largest top_k and repeat_last_n of nanoeuler.Sampling
SAMPLED = {
    "temperature": number(0, 100), "top_p": number(0, 1), "min_p": number(0, 1),
    "top_k": top_k, "presence_penalty": number(-100, 100), "frequency_penalty": number(-100, 100),
    "repeat_penalty": number(0.01, 100), "repeat_last_n": at_most(MOST_COUNTED, -1),
    "repetition_penalty": number(0.01, 100)}
# llama.cpp's and vLLM's names: whether the KV cache of other prompts may be used, and a secret that
# separates it from prompts with another one
CACHE = {"cache_prompt": flag, "cache_salt": cache_salt}
COMMON = {
    **SAMPLED, **CACHE, **values.IGNORED, "model": text, "max_tokens": length(0), "stop": stops,
    "n": number(1, MOST_CHOICES, whole=True), "stream": flag, "seed": seed,
    "stream_options": stream_options, "response_format": response_format, **SCHEMAS,
    "return_tokens": flag}
OF_COMPLETION = {
    **COMMON, "prompt": None, "echo": flag, "logprobs": completion_logprobs,
    "best_of": number(1, MOST_CHOICES, whole=True)}
OF_CHAT = {
    **COMMON, "messages": None, "max_completion_tokens": length(1),
    "logprobs": flag, "top_logprobs": number(0, MOST_LOGPROBS, whole=True), "forget": flag,
    "chat_template_kwargs": thinking, "add_generation_prompt": flag, "continue_final_message": flag}
PLACES = {"messages": "/v1/chat/completions and /api/chat", "input": "/v1/responses",
          "prompt": "/v1/completions and /api/generate"}


def checked(body, known):
    """The checked parameters of a body, without those that ask for nothing.
    known: {name: check, or None}.  A check returns None for a value that asks for nothing.
    `thoughts` is "off" if the request switches off the thoughts of a model."""
    found = {}
    for name, value in body.items():
        own = name if name in known else values.own_name(name, known)
        if own:
            if name not in values.REQUIRED and values.is_empty(value):
                continue
            value = known[own](name, value) if known[own] else value
            refuse_unless(own == name or own not in body and found.get(own, value) == value,
                          f"{name} and {own} are the same; send one of them", name)
            if value is not None:
                found[own] = value
        elif name in values.UNSUPPORTED:
            said = values.instead(name, known) or "remove it from the request"
            refuse_unless(values.asks_for_nothing(value, values.UNSUPPORTED[name]),
                          f"{name} is not supported; {said}", name, "unsupported_parameter")
            if name in values.THOUGHTS and not values.asks_for_nothing(value, ()):
                found["thoughts"] = "off"
        elif value is not None:
            said = (f"it is a parameter of {PLACES[name]}" if name in PLACES else
                    values.instead(name, known) or "correct its name or remove it")
            raise Refusal(400, f"unknown parameter {shown(name)}; {said}", name[:100],
                          "unknown_parameter")
    return found


def sampled(said):
    """The parameters in SAMPLED as fields of nanoeuler.Sampling.  repetition_penalty is the name of
    vLLM and Hugging Face for repeat_penalty, and affects all tokens."""
    found = {"temperature": 1.0} | {name: said[name] for name in SAMPLED if name in said}
    penalty = found.pop("repetition_penalty", None)
    if penalty is not None:
        refuse_unless("repeat_penalty" not in said, "expected repeat_penalty or "
                      "repetition_penalty, found both", "repetition_penalty")
        found = {"repeat_last_n": -1, **found, "repeat_penalty": penalty}
    return found


# ---- a request
@dataclass
class Asked:
    """A request after all checks."""
    chat: bool
    answers: list                            # `Answer`s, n for each prompt
    stream: bool = False
    usage: bool = False                      # report the usage in a stream, too?
    echo: bool = False
    logprobs: int | None = None              # alternatives per token; None: no log-probabilities
    tokens: bool = False                     # return ids and draft tokens?
    forgotten: int = 0                       # number of messages left out
    said: dict = field(default_factory=dict)             # parameters that the response repeats

    def counts(self):
        """The numbers of prompt tokens, of those found in the KV cache, and of generated tokens.
        The n answers to a prompt share its list of ids, so each prompt is counted once.  The
        `cached` of its first answer is what the KV cache held before this request."""
        prompts = {id(a.ids): a for a in reversed(self.answers)}.values()
        return (sum(len(a.ids) for a in prompts), sum(a.cached for a in prompts),
                sum(len(a.reply.tokens) for a in self.answers if a.reply))

    def needs_schema(self):
        """Whether `Reader.prepare_schema` must be called before the answers begin"""
        return any(a.sampling.json_schema and a.constraint is None for a in self.answers)


class Reader:
    """Checks the requests to a model.
    speaker: nanoeuler.Speaker     length: tokens of the context     most: longest answer, tokens
    Slow methods take `gone`, a threading.Event that is set when the client leaves.  They then raise
    Gone."""

    def __init__(self, name, speaker, length, most, seconds, speculate):
        self.chat_models = lambda: []        # names of the server's chat models, see models.py
        self.name, self.speaker, self.length, self.most = name, speaker, length, most
        self.seconds, self.speculate = seconds, speculate
        self.vocab = speaker.tokenizer.vocab
        self.longest = max(map(len, self.vocab))         # bytes of the longest token

    def completion(self, body, gone):
        """Checks the body of a request to /v1/completions, and returns an Asked."""
        return self.continued(checked(body, OF_COMPLETION), gone)

    def continued(self, said, gone):
        """Returns the Asked of one or more prompts.  said: parameters in OF_COMPLETION"""
        refuse_unless("prompt" in said, "the parameter prompt is missing; add it", "prompt")
        prompts = self.prompts(said["prompt"], Work(gone))
        echo, logprobs = said.get("echo", False), said.get("logprobs")
        refuse_unless(said.get("best_of") in (None, said.get("n", 1)), "best_of is not supported; "
                      "remove it from the request", "best_of", "unsupported_parameter")
        most = said.get("max_tokens", 16)
        if most == -1:
            most = min(map(self.room_after, prompts))
        answers = self.answers(prompts, said, most, logprobs, echo and logprobs is not None, gone)
        return Asked(False, answers, echo=echo, logprobs=logprobs, **self.how(said))

    def chat(self, body, gone):
        """Checks the body of a request to /v1/chat/completions, and returns an Asked."""
        return self.conversed(checked(body, OF_CHAT), gone)

    def conversed(self, said, gone, continues="/v1/completions"):
        """Returns the Asked of a conversation.  said: parameters in OF_CHAT
        continues: the address for texts that are to be continued, for an error message"""
        refuse_unless("messages" in said, "the parameter messages is missing; add it", "messages")
        self.need_chat_model(continues)
        messages = [self.message(i, m) for i, m in enumerate(self.list_of(said["messages"]))]
        continues = messages[-1][0] == "assistant"
        for name, wanted in ("continue_final_message", True), ("add_generation_prompt", False):
            refuse_unless(said.get(name) in (None, continues == wanted), f"{name}: expected "
                          f"{shown(continues == wanted)}, because the last message is "
                          f"{'' if continues else 'not '}the assistant's", name)
        state = self.speaker.asked_state
        thoughts = said.get("chat_template_kwargs") or said.get("thoughts", "")
        refuse_unless(thoughts == said.get("thoughts", thoughts), "enable_thinking is true, but "
                      "another parameter switches thoughts off; send one of them",
                      "chat_template_kwargs")
        if "chat_template_kwargs" in said or thoughts:
            state = replace(state, thinking=thoughts)
        ids, forgotten = self.conversation(messages, said.get("forget", False), gone, state)
        most = said.get("max_completion_tokens", said.get("max_tokens"))
        both = {"max_tokens", "max_completion_tokens"} <= {*said}
        refuse_unless(not both or said["max_tokens"] == most,
                      "max_tokens and max_completion_tokens differ; send one of them",
                      "max_tokens")
        refuse_unless(most != 0, "max_tokens is 0, expected 1 or more", "max_tokens")
        if most in (None, -1):
            most = self.room_after(ids)
        top = said.get("top_logprobs") or None
        wanted = said.get("logprobs", False)
        refuse_unless(top is None or wanted, "top_logprobs needs logprobs: true", "top_logprobs")
        logprobs = (top or 0) if wanted else None
        answers = self.answers([ids], said, most, logprobs, False, gone)
        return Asked(True, answers, logprobs=logprobs, forgotten=forgotten, **self.how(said))

    def need_chat_model(self, continues):
        """Rejects a conversation with a base model.  The error names a model that answers."""
        chat = self.chat_models()
        other = f"use the model {chat[0]} for chats" if chat else "start the server with --template"
        refuse_unless(self.speaker.answers, f"the model {self.name} is not a chat model: it "
                      f"continues texts, at {continues}; {other}", "model")

    def room_after(self, ids):
        """The largest number of tokens in an answer to these ids, unless the request names one"""
        return min(self.most, max(1, self.length - len(ids)))

    def how(self, said):
        usage = said.get("stream_options", False)
        refuse_unless(not usage or said.get("stream"),
                      "stream_options needs stream: true", "stream_options")
        return dict(stream=said.get("stream", False), usage=usage,
                    tokens=said.get("return_tokens", False))

    def answers(self, prompts, said, most, logprobs, scored, gone):
        """n answers for each prompt, with the random numbers of `generate --file` for that seed"""
        n = said.get("n", 1)
        refuse_unless(len(prompts) * n <= MOST_CHOICES, f"expected at most {MOST_CHOICES} answers "
                      f"per request, got {len(prompts)} x {n}; send fewer prompts or a smaller n",
                      "n")
        refuse_unless(most <= self.most, f"expected at most {self.most} tokens in an answer, the "
                      f"server's --tokens, got {most}; ask for fewer", "max_tokens")
        if logprobs is not None:
            scores = n * sum(most + scored * len(ids) for ids in prompts) * (1 + logprobs)
            refuse_unless(scores <= MOST_SCORES, f"expected at most {MOST_SCORES:,} log-"
                          f"probabilities per request, got {scores:,}; request fewer tokens or "
                          f"answers, or a smaller logprobs", "logprobs")
        options = Sampling(
            tokens=most, stop=said.get("stop", []), speculate=self.speculate,
            logprobs=0 if logprobs is None else max(1, logprobs),
            json_schema=format_of(said), **sampled(said)).check()
        try:
            constraint = self.constraint(options, quick(gone))
        except Slow:
            constraint = None                # see Asked.needs_schema
        seed = said.get("seed", uuid.uuid4().int >> 64)
        now = time.perf_counter()
        return [Answer(ids, options, ne.rng_of(seed, i, j), self.speaker.ends, self.vocab, scored,
                       now + self.seconds, salt=salt_of(said), index=i * n + j,
                       constraint=constraint)
                for i, ids in enumerate(prompts) for j in range(n)]

    def constraint(self, options, alive):
        """Speaker.constraint, whose errors are returned to the client"""
        try:
            return self.speaker.constraint(options, alive)
        except ne.UserError as e:
            raise Refusal(400, str(e), "response_format") from None

    def prepare_schema(self, asked, turns, gone):
        """Prepares the schema of a request whose `needs_schema` is true.  turns: engine.Turns"""
        with Pieces(turns) as pieces:
            def alive():
                need_client(gone)
                pieces.next()
            constraint = self.constraint(asked.answers[0].sampling, alive)
        for answer in asked.answers:
            answer.constraint = constraint

    # ---- prompts
    def prompts(self, prompt, work):
        """A list of ids for each prompt.  prompt: a text, a list of ids, or a list of either"""
        wrong = "prompt: expected a string, a list of token ids, or a list of either"
        if isinstance(prompt, str) or (prompt and isinstance(prompt, list) and
                                       all(type(x) is int for x in prompt)):
            prompt = [prompt]
        refuse_unless(isinstance(prompt, list), wrong, "prompt")
        refuse_unless(0 < len(prompt) <= MOST_CHOICES,
                      f"expected 1 to {MOST_CHOICES} prompts, got {len(prompt)}", "prompt")
        return [self.ids_of(x, wrong, work) for x in prompt]

    def ids_of(self, prompt, wrong, work):
        work.spend(len(prompt) if isinstance(prompt, str | list) else 0, "prompt")
        if isinstance(prompt, str):
            self.need_room(len(prompt), "prompt")
            ids = self.speaker.tokenizer.encode_whole(prompt).tolist()
        else:
            refuse_unless(isinstance(prompt, list) and all(type(x) is int for x in prompt), wrong,
                          "prompt")
            ids, V = prompt, len(self.vocab)
            refuse_unless(all(0 <= i < V for i in ids),
                          f"prompt: expected token ids from 0 to {V - 1}, got an id outside this "
                          f"range", "prompt")
        return self.fitting(ids, "prompt")

    def need_room(self, characters, name):
        """Rejects a text that is too long even if all its tokens are the longest.  This check comes
        before tokenization."""
        if characters > self.length * self.longest:
            raise self.too_long(f"{characters:,} characters", name)

    def too_long(self, what, name):
        return Refusal(400, f"{what} do not fit into the context of {self.length:,} tokens; "
                       f"shorten the {name}", name, "context_length_exceeded")

    def fitting(self, ids, name):
        refuse_unless(ids, ne.NO_TOKEN, name)
        if len(ids) > self.length:
            raise self.too_long(f"{len(ids):,} tokens", name)
        return ids

    def conversation(self, said, forget, gone, state=None):
        """Returns (ids, number of messages left out) of the messages `said`.  With `forget`, the
        oldest exchanges are left out, as few as possible, so that a quarter of the context remains
        for the answer."""
        asked, work = without_beginning(said), Work(gone)
        refuse_unless(asked and asked[-1][0] == "user", "expected the role user in the last "
                      "message, or in the one before an answer that is to be continued, got "
                      f"{asked[-1][0] if asked else 'no message'}", "messages")
        system = [m for m in said[:1] if m[0] == "system"]
        if forget:
            return self.newest_exchanges(system, said[len(system):], work, state)
        if is_alpaca(self.speaker.template):          # it uses only the last question
            self.need_room(sum(len(content) for _, content in said[len(asked) - 1:]), "messages")
        else:
            self.need_room(sum(len(content) for _, content in said), "messages")
        work.spend(self.work_of(said), "messages")
        with checking(work):
            return self.fitting(self.ids_of_messages(said, state), "messages"), 0

    def work_of(self, messages):
        """The work to turn messages into ids, in characters.  A message costs as much as 64."""
        template = self.speaker.template
        weight = 1 if is_alpaca(template) or is_chatml(template) else THIRD_PARTY
        return weight * sum(64 + len(text) for _, text in messages)

    def newest_exchanges(self, system, rest, work, state=None):
        """`conversation` with `forget`: returns (ids, number of messages left out).

        An exchange begins at each message of the user.  If not all N exchanges fit, the last 1, 2,
        4, ... are tried until they are too long.  Then bisection finds the largest number that
        fits.  About 2 log2(N) texts are rendered, with at most twice as many exchanges as the
        result.  The search assumes that a text with more exchanges is not shorter.  If a template
        breaks this rule, the result still fits, but it may leave out more than necessary."""
        starts = [0, *(i for i in range(1, len(rest)) if rest[i][0] == "user")]
        room, N, found = self.length - self.length // 4, len(starts), {}

        def fits(n):
            """Whether the last n exchanges fit.  Renders them into `found`, unless their characters
            alone are too many, or the rest of the work allows no other text."""
            kept = system + rest[starts[N - n]:]
            cost = self.work_of(kept)
            if (sum(len(content) for _, content in kept) <= room * self.longest and
                    work.allows(cost)):
                work.spend(cost, "messages")
                with checking(work):
                    found[n] = self.ids_of_messages(kept, state)
            return n in found and len(found[n]) <= room

        most, too_many = (N, N + 1) if fits(N) else (0, N)
        n = 1
        while most < n < too_many:
            most, too_many = (n, too_many) if fits(n) else (most, n)
            n *= 2
        while too_many - most > 1:
            n = (most + too_many) // 2
            most, too_many = (n, too_many) if fits(n) else (most, n)
        most = max(1, most)                  # a single exchange may fill the context
        if most not in found:
            found[most] = self.last_exchange(system + rest[starts[N - 1]:], work, state)
        return self.fitting(found[most], "messages"), starts[N - most]

    def last_exchange(self, kept, work, state=None):
        self.need_room(sum(len(content) for _, content in kept), "messages")
        work.spend(self.work_of(kept), "messages")
        with checking(work):
            return self.ids_of_messages(kept, state)

    def list_of(self, messages):
        refuse_unless(isinstance(messages, list) and 0 < len(messages) <= MOST_MESSAGES,
                      f"messages is {shown(messages)}, expected a list of 1 to {MOST_MESSAGES:,} "
                      f"messages", "messages")
        return messages

    def message(self, i, m):
        """(role, text) of messages[i]"""
        place = f"messages[{i}]"
        refuse_unless(isinstance(m, dict), f"{place}: expected an object with role and content",
                      "messages")
        need_known_keys(place, m, "messages")
        role = "system" if m.get("role") == "developer" else m.get("role")
        try:
            return checked_message(role, m.get("content"), place)
        except ne.UserError as e:
            raise Refusal(400, str(e), "messages") from None

    def ids_of_messages(self, messages, state=None):
        """The ids up to where the answer begins, and those of its beginning if the last message is
        the assistant's.  The model has sampled ids for the answer alone, so it is encoded alone.
        state: what the template gets; None: the speaker's"""
        s, asked = self.speaker, without_beginning(messages)
        try:
            ids = [int(i) for i in chat_ids(s.template, asked, state or s.asked_state,
                                             s.tokenizer)]
        except ne.UserError as e:
            raise Refusal(400, str(e), "messages") from None
        for _, beginning in messages[len(asked):]:
            ids += s.tokenizer.encode_after(beginning).tolist()
        return ids


def need_known_keys(place, message, name):
    """Rejects a message with a key that might change the reply."""
    for key, value in message.items():
        neutral = values.NOTHING_IN_MESSAGE.get(key, ())
        refuse_unless(key in values.OF_MESSAGE or values.asks_for_nothing(value, neutral),
                      f"{place}: the key {shown(key)} is not supported; remove it", name,
                      "unsupported_parameter")


def checking(work):
    """A context in which the rendering of a third-party template ends if the client leaves"""
    from nanoeuler_parts.chat import jinja
    return jinja.checking(lambda: need_client(work.gone))


def without_beginning(messages):
    """The messages without the beginning of the next answer, a last message of the assistant"""
    return messages[:-1] if messages[-1][0] == "assistant" else messages


# ---- responses
class Voice:
    """Turns the News of an answer into text of whole characters.  An ending that may begin a stop
    text is held back.  The log-probabilities and ids of a token go with the piece
    of text in which the token begins.  `offsets` has the offset of each token in the text, in
    characters."""

    def __init__(self, answer):
        self.answer = answer
        self.decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.drawn, self.starts, self.length, self.told = 0, [], 0, 0
        self.marks, self.finish = [], ""     # per token: (id, was it a draft?, drafts of its step)
        self.offsets, self.counted = [], Characters()

    def take(self, news):
        """Returns the new text, and the indices of the tokens that begin in it."""
        for i, token in enumerate(news.tokens):
            drafted = news.drafted[i] if i < len(news.drafted) else None
            self.marks.append((token, drafted == token, news.drafted if i == 0 else []))
            self.starts.append(self.length)
            self.length += len(self.answer.vocab[token])
            self.offsets.append(self.counted.before(self.answer.vocab[token]))
        self.finish = news.finish
        text = self.decode(news.said, bool(news.finish))
        self.told += len(news.said)
        places = []
        while self.drawn < len(self.starts) and self.starts[self.drawn] < self.told:
            places.append(self.drawn)
            self.drawn += 1
        return text, places


class Characters:
    """Counts the characters of a text that comes in pieces of UTF-8."""

    def __init__(self):
        self.decode, self.n = codecs.getincrementaldecoder("utf-8")("replace").decode, 0

    def before(self, piece):
        """The offset, in characters, of the piece that follows now.  A piece that begins within a
        character has the offset of this character."""
        n = self.n
        self.n += len(self.decode(piece))
        return n


def token_text(vocab, token):
    return vocab[token].decode("utf-8", "backslashreplace")


def event(body):
    """An event of a stream (server-sent events)"""
    return b"data: " + encoded(body) + b"\n\n"


class Writer:
    """Makes the body of the response to one request.  `begin`, `step`, `end` and `fault` return the
    pieces of a stream, `whole` returns the object of any other response.  model: its name"""
    media = "text/event-stream; charset=utf-8"

    def __init__(self, asked, model):
        self.asked, self.model, self.created = asked, model, int(time.time())
        chat = asked.chat
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.vocab = asked.answers[0].vocab
        self.begun = set()                   # indices of answers
        self.echoes = {}                     # {answer's index: the text of its prompt}

    # ---- the stream
    def begin(self):
        return b""

    def step(self, voice, text, places):
        """As OpenAI does, the role, the text and finish_reason come in chunks of their own.
        places: the indices of the sampled tokens of this text"""
        first = voice.answer.index not in self.begun
        self.begun.add(voice.answer.index)
        pieces = []
        if first and (self.asked.chat or self.asked.echo or self.asked.tokens):
            pieces.append(self.choice(voice, "", [], True, True))
        if text or places:
            pieces.append(self.choice(voice, text, places, False, True))
        if voice.finish:
            pieces.append(self.ended(voice))
        return b"".join(event(self.chunk([piece])) for piece in pieces)

    def end(self):
        usage = self.asked.usage or self.asked.tokens
        return (event(self.chunk([], self.usage())) if usage else b"") + b"data: [DONE]\n\n"

    def fault(self, refusal):
        return event(refusal.body())

    # ---- objects
    def head(self, stream):
        kind = ("chat.completion" + ".chunk" * stream) if self.asked.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def usage(self):
        prompt, cached, written = self.asked.counts()
        return {"prompt_tokens": prompt, "completion_tokens": written,
                "total_tokens": prompt + written,
                "prompt_tokens_details": {"cached_tokens": cached}}

    # ---- log-probabilities
    def pairs(self, answer, places):
        """(token, log-probability, top alternatives) of the sampled tokens at these indices"""
        return [(answer.reply.tokens[i], *answer.reply.logprobs[i]) for i in places]

    def of_prompt(self, answer):
        """The same for the prompt.  Its first token follows nothing, so it has no probability."""
        return [(answer.ids[0], None, None),
                *((token, *score) for token, score in zip(answer.ids[1:], answer.scores))]

    def chat_logprobs(self, pairs):
        def one(token, p):
            raw = self.vocab[token]
            return {"token": token_text(self.vocab, token), "logprob": p, "bytes": [*raw]}

        k = self.asked.logprobs
        return {"content": [{**one(token, p), "top_logprobs": [one(i, q) for i, q in top[:k]]}
                            for token, p, top in pairs], "refusal": None}

    def completion_logprobs(self, pairs, offsets):
        """offsets: of the tokens, in characters of the answer's text"""
        k = self.asked.logprobs
        found = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": offsets}
        for token, p, top in pairs:
            said = token_text(self.vocab, token)
            found["tokens"].append(said)
            found["token_logprobs"].append(p)
            best = {}
            for i, q in (top or [])[:k]:
                best.setdefault(token_text(self.vocab, i), q)
            if top is not None:
                best.setdefault(said, p)     # OpenAI includes the token itself
            found["top_logprobs"].append(best if top is not None else None)
        return found

    # ---- choices
    def echoed(self, answer):
        if answer.index not in self.echoes:
            raw = b"".join(self.vocab[i] for i in answer.ids)
            self.echoes[answer.index] = raw.decode("utf-8", "replace")
        return self.echoes[answer.index]

    def ended(self, voice):
        """The last element of `choices` in a stream"""
        rest = {"delta": {}} if self.asked.chat else {"text": ""}
        tokens = {"tokens": []} if self.asked.tokens else {}
        return {"index": voice.answer.index, **rest, "logprobs": None,
                "finish_reason": voice.finish, **tokens}

    def choice(self, voice, text, places, first, stream):
        """One element of `choices`.  places: the indices of the sampled tokens of this text"""
        asked, answer = self.asked, voice.answer
        body = {"index": answer.index}
        if asked.chat:
            message = {"content": text}
            if first or not stream:
                message = {"role": "assistant", **message}
            if not stream:
                message["refusal"] = None
            body["delta" if stream else "message"] = message
        else:
            if first and asked.echo:
                text = self.echoed(answer) + text
            body["text"] = text
        body["logprobs"] = None
        scored = places or not stream or first and asked.echo
        if asked.logprobs is not None and scored:
            pairs, offsets = self.pairs(answer, places), [voice.offsets[i] for i in places]
            if asked.chat:
                body["logprobs"] = self.chat_logprobs(pairs)
            else:
                if asked.echo:
                    before = len(self.echoed(answer))
                    offsets = [before + n for n in offsets]
                if first and asked.echo:
                    counted = Characters()
                    pairs = [*self.of_prompt(answer), *pairs]
                    offsets = [*(counted.before(self.vocab[i]) for i in answer.ids), *offsets]
                body["logprobs"] = self.completion_logprobs(pairs, offsets)
        body["finish_reason"] = None if stream else voice.finish
        if asked.tokens:
            body["tokens"] = [self.mark(*voice.marks[i]) for i in places]
            if first:
                body["prompt_tokens"] = answer.ids
                body["cached_tokens"] = answer.cached
        return body

    def mark(self, token, accepted, drafts):
        found = {"id": token, "text": token_text(self.vocab, token), "bytes": [*self.vocab[token]],
                 "accepted": accepted}
        if drafts:
            found["drafts"] = [token_text(self.vocab, i) for i in drafts]
        return found

    def chunk(self, choices, usage=None):
        body = {**self.head(True), "choices": choices}
        if self.asked.forgotten and self.asked.tokens:
            body["forgotten"] = self.asked.forgotten
        if usage or self.asked.usage:
            body["usage"] = usage
        return body

    def whole(self, voices, texts):
        """texts: {answer's index: its text}"""
        choices = [self.choice(v, texts[v.answer.index], range(v.drawn), True, False)
                   for v in voices]
        body = {**self.head(False), "choices": choices, "usage": self.usage()}
        if self.asked.forgotten:
            body["forgotten"] = self.asked.forgotten
        return body
