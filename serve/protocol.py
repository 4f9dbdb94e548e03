"""OpenAI's protocol: what a request may say, and how it is answered.

A parameter that is not known here is refused by its name, as is one that is known and not
supported, unless it says what would be done anyway.  Beyond OpenAI's there are `top_k`, `min_p`,
`return_tokens` (with the text, ids and what the drafts were) and `forget` (the oldest exchanges of
a conversation that is longer than the context), all of which the page uses.
"""
import codecs
import json
import time
import uuid
from dataclasses import dataclass

import nanoeuler as ne

from .engine import Answer

MOST_CHOICES = 128           # answers to one request
MOST_LOGPROBS = 20
MOST_STOPS, LONGEST_STOP = 16, 256


class Refusal(Exception):
    """An error that the client is told, in OpenAI's shape."""

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


def parse(raw):
    """The object of a request's body"""
    def no_number(name):
        raise ValueError(f"{name} is no number of JSON")

    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=no_number)
        json.dumps(body, ensure_ascii=False).encode()    # no half of a surrogate pair anywhere
    except UnicodeDecodeError as e:
        raise Refusal(400, f"the body is not UTF-8 at byte {e.start}") from None
    except UnicodeEncodeError:
        raise Refusal(400, "the body holds half of a surrogate pair, which is no character"
                      ) from None
    except RecursionError:
        raise Refusal(400, "the body is nested too deeply") from None
    except ValueError as e:
        raise Refusal(400, f"the body is no JSON: {e}") from None
    refuse_unless(isinstance(body, dict), "the body is no JSON object")
    return body


# ---- parameters: a name, and what its value may be
def number(low, high, whole=False):
    def check(name, value):
        kinds = (int,) if whole else (int, float)
        refuse_unless(type(value) in kinds and low <= value <= high,
                      f"{name} is {shown(value)}, expected {'an integer' if whole else 'a number'} "
                      f"from {low} to {high}", name)
        return value
    return check


def flag(name, value):
    refuse_unless(type(value) is bool, f"{name} is {shown(value)}, expected true or false", name)
    return value


def text(name, value):
    refuse_unless(isinstance(value, str), f"{name} is {shown(value)}, expected a text", name)
    return value


def stops(name, value):
    value = [value] if isinstance(value, str) else value
    refuse_unless(isinstance(value, list) and len(value) <= MOST_STOPS and
                  all(isinstance(s, str) and 0 < len(s) <= LONGEST_STOP for s in value),
                  f"{name} is {shown(value)}, expected a text or up to {MOST_STOPS}, each of 1 to "
                  f"{LONGEST_STOP} characters", name)
    return value


def stream_options(name, value):
    refuse_unless(isinstance(value, dict), f"{name} is {shown(value)}, expected an object", name)
    for key in value:
        refuse_unless(key == "include_usage", f"{name}.{shown(key)} is not supported", name)
    return flag(f"{name}.include_usage", value.get("include_usage", False))


def only(*neutral):
    """A parameter of OpenAI's that is accepted where it asks for nothing that is not done."""
    def check(name, value):
        refuse_unless(any(type(value) is type(x) and value == x for x in neutral),
                      f"{name} is not supported", name, "unsupported_parameter")
    return check


def shown(value):
    said = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else repr(value)
    return said if len(said) <= 60 else f"{said[:57]}..."


WHOLE = 1 << 60
SAMPLED = {
    "temperature": number(0, 100), "top_p": number(0, 1), "min_p": number(0, 1),
    "top_k": number(0, 1 << 40, whole=True), "presence_penalty": number(-100, 100),
    "frequency_penalty": number(-100, 100)}
COMMON = {
    **SAMPLED, "model": text, "max_tokens": number(0, WHOLE, whole=True), "stop": stops,
    "n": number(1, MOST_CHOICES, whole=True), "seed": number(0, WHOLE, whole=True), "stream": flag,
    "stream_options": stream_options, "user": text, "return_tokens": flag, "logit_bias": only({})}
OF_COMPLETION = {
    **COMMON, "prompt": None, "echo": flag, "logprobs": number(0, MOST_LOGPROBS, whole=True),
    "best_of": only(1), "suffix": only("")}
OF_CHAT = {
    **COMMON, "messages": None, "max_completion_tokens": number(1, WHOLE, whole=True),
    "logprobs": flag, "top_logprobs": number(0, MOST_LOGPROBS, whole=True), "forget": flag,
    "tools": only([]), "functions": only([]), "tool_choice": only("none", "auto"),
    "function_call": only("none", "auto"), "parallel_tool_calls": only(True, False),
    "response_format": only({"type": "text"}), "modalities": only(["text"]), "store": only(False),
    "service_tier": only("auto", "default"), "metadata": only({}), "audio": only(),
    "prediction": only(), "reasoning_effort": only(), "verbosity": only(),
    "web_search_options": only()}


def checked(body, known):
    """Its parameters, without those that are null"""
    found = {}
    for name, value in body.items():
        refuse_unless(name in known, f"there is no parameter {shown(name)}", name[:100],
                      "unknown_parameter")
        if value is not None:
            found[name] = known[name](name, value) if known[name] else value
    return found


# ---- a request
@dataclass
class Asked:
    """What a request asks for, once it is understood."""
    chat: bool
    answers: list                            # of all prompts and n: `Answer`s
    stream: bool = False
    usage: bool = False                      # in a stream, too
    echo: bool = False
    logprobs: int | None = None              # so many beside that of the token itself
    tokens: bool = False                     # are ids wanted?
    forgotten: int = 0                       # messages


class Reader:
    """Understands requests to a model.
    speaker: nanoeuler.Speaker     length: of the context, tokens     most: tokens of an answer"""

    def __init__(self, name, speaker, length, most, seconds, speculate):
        self.name, self.speaker, self.length, self.most = name, speaker, length, most
        self.seconds, self.speculate = seconds, speculate
        self.vocab = speaker.tokenizer.vocab
        self.longest = max(map(len, self.vocab))         # bytes of a token

    def completion(self, body):
        said = checked(body, OF_COMPLETION)
        self.need_model(said)
        refuse_unless("prompt" in said, "there is no prompt", "prompt")
        prompts = self.prompts(said["prompt"])
        echo, logprobs = said.get("echo", False), said.get("logprobs")
        answers = self.answers(prompts, said, said.get("max_tokens", 16), logprobs,
                               echo and logprobs is not None)
        return Asked(False, answers, echo=echo, logprobs=logprobs, **self.how(said))

    def chat(self, body):
        said = checked(body, OF_CHAT)
        self.need_model(said)
        refuse_unless(self.speaker.answers, "this model continues texts and was not taught to "
                      "answer: use /v1/completions, or start with --template", "messages")
        refuse_unless("messages" in said, "there are no messages", "messages")
        ids, forgotten = self.conversation(said["messages"], said.get("forget", False))
        most = said.get("max_completion_tokens", said.get("max_tokens"))
        both = {"max_tokens", "max_completion_tokens"} <= {*said}
        refuse_unless(not both or said["max_tokens"] == most,
                      "max_tokens and max_completion_tokens differ", "max_tokens")
        refuse_unless(most != 0, "max_tokens is 0, expected 1 or more", "max_tokens")
        if most is None:
            most = min(self.most, max(1, self.length - len(ids)))
        top = said.get("top_logprobs")
        wanted = said.get("logprobs", False)
        refuse_unless(top is None or wanted, "top_logprobs needs logprobs: true", "top_logprobs")
        logprobs = (top or 0) if wanted else None
        answers = self.answers([ids], said, most, logprobs, False)
        return Asked(True, answers, logprobs=logprobs, forgotten=forgotten, **self.how(said))

    def need_model(self, said):
        if said.get("model", self.name) != self.name:
            raise Refusal(404, f"there is no model {shown(said['model'])}, but {self.name!r}",
                          "model", "model_not_found")

    def how(self, said):
        usage = said.get("stream_options", False)
        refuse_unless("stream_options" not in said or said.get("stream"),
                      "stream_options are for a stream", "stream_options")
        return dict(stream=said.get("stream", False), usage=usage,
                    tokens=said.get("return_tokens", False))

    def answers(self, prompts, said, most, logprobs, scored):
        """n for each prompt, with the random numbers of `generate --file` and that seed"""
        n = said.get("n", 1)
        refuse_unless(len(prompts) * n <= MOST_CHOICES, f"{len(prompts)} prompts with {n} answers "
                      f"each are more than {MOST_CHOICES}", "n")
        refuse_unless(most <= self.most, f"max_tokens is {most}, and this server writes at most "
                      f"{self.most} in one answer", "max_tokens")
        options = ne.Sampling(
            tokens=most, stop=said.get("stop", []), speculate=self.speculate,
            logprobs=0 if logprobs is None else max(1, logprobs),
            **{"temperature": 1.0} | {k: v for k, v in said.items() if k in SAMPLED}).check()
        seed = said.get("seed", uuid.uuid4().int % WHOLE)
        now = time.perf_counter()
        return [Answer(ids, options, ne.rng_of(seed, i, j), self.speaker.end, self.vocab, scored,
                       now + self.seconds, index=i * n + j)
                for i, ids in enumerate(prompts) for j in range(n)]

    # ---- prompts
    def prompts(self, prompt):
        """Ids of each: a text, ids, or a list of either"""
        wrong = "prompt is neither a text, nor a list of token ids, nor a list of either"
        if isinstance(prompt, str) or (prompt and isinstance(prompt, list) and
                                       all(type(x) is int for x in prompt)):
            prompt = [prompt]
        refuse_unless(isinstance(prompt, list), wrong, "prompt")
        refuse_unless(0 < len(prompt) <= MOST_CHOICES,
                      f"there are {len(prompt)} prompts, expected 1 to {MOST_CHOICES}", "prompt")
        return [self.ids_of(x, wrong) for x in prompt]

    def ids_of(self, prompt, wrong):
        if isinstance(prompt, str):
            self.need_room(prompt, "prompt")
            ids = self.speaker.tokenizer.encode(prompt).tolist()
        else:
            refuse_unless(isinstance(prompt, list) and all(type(x) is int for x in prompt), wrong,
                          "prompt")
            ids, V = prompt, len(self.vocab)
            refuse_unless(all(0 <= i < V for i in ids),
                          f"a token of prompt is none of 0 to {V - 1}", "prompt")
        return self.fitting(ids, "prompt")

    def need_room(self, said, name):
        """A text that must be too long is refused before it is cut into tokens."""
        if len(said) > self.length * self.longest:
            raise self.too_long(f"{len(said):,} characters are more", name)

    def too_long(self, what, name):
        return Refusal(400, f"{what} than the context of {self.length:,} tokens", name,
                       "context_length_exceeded")

    def fitting(self, ids, name):
        refuse_unless(ids, ne.NO_TOKEN, name)
        if len(ids) > self.length:
            raise self.too_long(f"{len(ids):,} tokens are more", name)
        return ids

    def conversation(self, messages, forget):
        """(ids, messages that were forgotten for them to fit): then a quarter of the context is
        left for the answer."""
        said = [self.message(i, m) for i, m in enumerate(self.list_of(messages))]
        refuse_unless(said[-1][0] == "user", "the last message is not the user's; an answer is "
                      "continued by /v1/completions, from its tokens", "messages")
        room = self.length - self.length // 4 if forget else self.length
        system = [m for m in said[:1] if m[0] == "system"]
        rest, forgotten = said[len(system):], 0
        while forget and len(rest) > 1 and sum(len(t) for _, t in rest) > room * self.longest:
            rest, forgotten = rest[1:], forgotten + 1
        for _, content in [*system, *rest]:
            self.need_room(content, "messages")
        while True:
            ids = self.ids_of_messages(system + rest)
            if len(ids) <= room or len(rest) < 3 or not forget:
                return self.fitting(ids, "messages"), forgotten
            gone = next((i for i, m in enumerate(rest[1:], 1) if m[0] == "user"), len(rest) - 1)
            rest, forgotten = rest[gone:], forgotten + gone

    def list_of(self, messages):
        refuse_unless(isinstance(messages, list) and messages,
                      "messages is no list of messages, or an empty one", "messages")
        return messages

    def message(self, i, m):
        """(role, text)"""
        place = f"messages[{i}]"
        refuse_unless(isinstance(m, dict), f"{place} is no object", "messages")
        for key, value in m.items():
            refuse_unless(key in ("role", "content") or value in (None, [], ""),
                          f"{place}.{shown(key)} is not supported", "messages",
                          "unsupported_parameter")
        role, content = m.get("role"), m.get("content")
        refuse_unless(role in ("system", "user", "assistant"), f"{place}.role is {shown(role)}, "
                      f"expected system, user or assistant", "messages")
        if isinstance(content, list):
            parts = [x.get("text") if isinstance(x, dict) and x.get("type") == "text" else None
                     for x in content]
            refuse_unless(all(isinstance(x, str) for x in parts),
                          f"{place}.content has a part that is no text", "messages")
            content = "".join(parts)
        refuse_unless(isinstance(content, str), f"{place}.content is {shown(content)}, expected a "
                      f"text", "messages")
        return role, content

    def ids_of_messages(self, messages):
        s = self.speaker
        try:
            return [int(i) for i in ne.chat_ids(s.template, messages, s.state, s.tokenizer)]
        except ne.UserError as e:
            raise Refusal(400, str(e), "messages") from None


# ---- what is said back
class Voice:
    """Turns the News of an answer into text: whole characters, and nothing that may yet become a
    stop text.  Log-probabilities and ids go with the piece in which their token begins."""

    def __init__(self, answer):
        self.answer = answer
        self.decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.drawn, self.starts, self.length, self.told = 0, [], 0, 0
        self.marks, self.finish = [], ""     # of a token: (id, was it guessed, drafts of its step)

    def take(self, news):
        """(the text that is new, places of its tokens among those drawn)"""
        for i, token in enumerate(news.tokens):
            drafted = news.drafted[i] if i < len(news.drafted) else None
            self.marks.append((token, drafted == token, news.drafted if i == 0 else []))
            self.starts.append(self.length)
            self.length += len(self.answer.vocab[token])
        self.finish = news.finish
        text = self.decode(news.said, bool(news.finish))
        self.told += len(news.said)
        places = []
        while self.drawn < len(self.starts) and self.starts[self.drawn] < self.told:
            places.append(self.drawn)
            self.drawn += 1
        return text, places


def token_text(vocab, token):
    return vocab[token].decode("utf-8", "backslashreplace")


class Writer:
    """The bodies of the answers to one request."""

    def __init__(self, asked, model):
        self.asked, self.model, self.created = asked, model, int(time.time())
        chat = asked.chat
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.vocab = asked.answers[0].vocab
        self.offsets = {}                    # of completions: characters that came before

    def head(self, stream):
        kind = ("chat.completion" + ".chunk" * stream) if self.asked.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def usage(self):
        answers = self.asked.answers
        prompts = {id(a.ids): a for a in answers}        # n answers share one
        prompt = sum(len(a.ids) for a in prompts.values())
        written = sum(len(a.reply.tokens) for a in answers if a.reply)
        cached = sum(a.cached for a in prompts.values())
        return {"prompt_tokens": prompt, "completion_tokens": written,
                "total_tokens": prompt + written,
                "prompt_tokens_details": {"cached_tokens": cached}}

    # ---- log-probabilities
    def pairs(self, answer, places):
        """(token, log-probability, likeliest) of drawn tokens"""
        return [(answer.reply.tokens[i], *answer.reply.logprobs[i]) for i in places]

    def of_prompt(self, answer):
        """The same of the prompt; nothing is known before its first token."""
        return [(answer.ids[0], None, None),
                *((token, *score) for token, score in zip(answer.ids[1:], answer.scores))]

    def chat_logprobs(self, pairs):
        def one(token, p):
            raw = self.vocab[token]
            return {"token": token_text(self.vocab, token), "logprob": p, "bytes": [*raw]}

        k = self.asked.logprobs
        return {"content": [{**one(token, p), "top_logprobs": [one(i, q) for i, q in top[:k]]}
                            for token, p, top in pairs], "refusal": None}

    def completion_logprobs(self, index, pairs):
        k, at = self.asked.logprobs, self.offsets.get(index, 0)
        found = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, p, top in pairs:
            said = token_text(self.vocab, token)
            found["tokens"].append(said)
            found["token_logprobs"].append(p)
            best = {}
            for i, q in (top or [])[:k]:
                best.setdefault(token_text(self.vocab, i), q)
            if top is not None:
                best.setdefault(said, p)     # OpenAI's has the token itself, too
            found["top_logprobs"].append(best if top is not None else None)
            found["text_offset"].append(at)
            at += len(said)
        self.offsets[index] = at
        return found

    # ---- choices
    def echoed(self, answer):
        return b"".join(self.vocab[i] for i in answer.ids).decode("utf-8", "replace")

    def choice(self, voice, text, places, first, stream):
        """places: of the tokens that go with this text, among those drawn"""
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
        if asked.logprobs is not None:
            pairs = self.pairs(answer, places)
            if asked.chat:
                body["logprobs"] = self.chat_logprobs(pairs)
            else:
                if first and asked.echo:
                    pairs = [*self.of_prompt(answer), *pairs]
                body["logprobs"] = self.completion_logprobs(answer.index, pairs)
        body["finish_reason"] = voice.finish or None
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

    def whole(self, choices):
        body = {**self.head(False), "choices": choices, "usage": self.usage()}
        if self.asked.forgotten:
            body["forgotten"] = self.asked.forgotten
        return body
