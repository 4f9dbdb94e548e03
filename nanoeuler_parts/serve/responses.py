"""OpenAI's Responses API, /v1/responses: text in, text out.  Nothing is stored, so a conversation
is sent whole each time.  `understand` translates a request into one of /v1/chat/completions."""
import time
import uuid

import nanoeuler as ne
from nanoeuler_parts.chat.messages import checked_message
from nanoeuler_parts.serve import protocol, values
from nanoeuler_parts.serve.protocol import (
    CACHE, checked, encoded, flag, length, MOST_LOGPROBS, need_known_keys, number, Refusal,
    refuse_unless, response_format, SAMPLED, seed, shown, stops, text,
)

LOGPROBS = "message.output_text.logprobs"


def not_stored(name, value):
    refuse_unless(value is False, f"{name}: this server stores no responses; send store: false, "
                  f"and the whole conversation as input", name, "unsupported_parameter")


def truncation(name, value):
    refuse_unless(value in ("auto", "disabled"), f"{name} is {shown(value)}, expected 'auto' or "
                  f"'disabled'", name)
    return value


def text_format(name, value):
    """The `json_schema` of nanoeuler.Sampling for text.format.  Unlike response_format, it has the
    fields of json_schema beside the type."""
    refuse_unless(isinstance(value, dict) and value.keys() <= {"format", "verbosity"},
                  f"{name} is {shown(value)}, expected an object with a format", name)
    chosen = value.get("format") or {"type": "text"}
    if isinstance(chosen, dict) and chosen.get("type") == "json_schema":
        chosen = {"type": "json_schema", "json_schema": {k: chosen[k] for k in chosen.keys()
                                                         - {"type"}}}
    return response_format(f"{name}.format", chosen)


def included(name, value):
    """Parts of a response that are sent on request: log-probabilities.  The other known one asks
    for thoughts, which this server does not have."""
    known = LOGPROBS, "reasoning.encrypted_content"
    refuse_unless(isinstance(value, list) and all(x in known for x in value), f"{name} is "
                  f"{shown(value)}, expected a list of {' and '.join(known)}", name)
    return value


PARAMETERS = {
    **SAMPLED, **CACHE, **values.IGNORED, "model": text, "input": None, "instructions": text,
    "stream": flag, "max_output_tokens": length(1), "truncation": truncation, "seed": seed,
    "stop": stops, "stream_options": None, "store": not_stored, "previous_response_id": not_stored,
    "conversation": not_stored, "text": text_format, "parallel_tool_calls": flag,
    "include": included, "top_logprobs": number(0, MOST_LOGPROBS, whole=True)}

# Fields of a request that its response repeats, for clients that read from the response how to
# parse it, and their values if the request leaves them out
REPEATED = {
    "instructions": None, "max_output_tokens": None, "max_tool_calls": None, "metadata": {},
    "parallel_tool_calls": True, "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None}, "safety_identifier": None,
    "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_logprobs": 0,
    "truncation": "disabled", "user": None}


def repeated(body, said):
    """The fields in REPEATED as the client sent them.  body: the request     said: its checked
    parameters"""
    found = {}
    for name, default in REPEATED.items():
        value = body.get(name)
        if values.is_empty(value):
            value = default
        elif isinstance(value, dict) and isinstance(default, dict):
            value = {**default, **{key: x for key, x in value.items() if x is not None}}
        found[name] = value
    most = said.get("max_output_tokens")     # perhaps sent under another name
    return {**found, "max_output_tokens": None if most == -1 else most}


def message(place, item):
    """One item of the input as a message of /v1/chat/completions"""
    refuse_unless(isinstance(item, dict), f"{place}: expected an object, found {shown(item)}",
                  "input")
    kind = item.get("type", "message")
    refuse_unless(kind == "message", f"{place}: expected the type message, found {shown(kind)}",
                  "input")
    need_known_keys(place, item, "input")
    content = item.get("content")
    if isinstance(content, list):
        content = [{**part, "type": "text"} if isinstance(part, dict) and part.get("type") in
                   ("input_text", "output_text") else part for part in content]
    role = item.get("role")
    try:
        checked_message("system" if role == "developer" else role, content, place)
    except ne.UserError as e:
        raise Refusal(400, str(e), "input") from None
    return {"role": role, "content": content}


def understand(reader, body, gone):
    """Checks the body of a request to /v1/responses, and returns an Asked.
    reader: protocol.Reader"""
    said = checked(body, PARAMETERS)
    refuse_unless("input" in said, "the parameter input is missing; add it", "input")
    given = said["input"]
    given = [{"role": "user", "content": given}] if isinstance(given, str) else given
    refuse_unless(isinstance(given, list), f"input is {shown(given)}, expected a string or a list "
                  f"of messages", "input")
    # Thoughts of earlier answers, which chat templates leave out
    messages = [message(f"input[{i}]", item) for i, item in enumerate(given)
                if not (isinstance(item, dict) and item.get("type") == "reasoning")]
    if "instructions" in said:
        messages.insert(0, {"role": "system", "content": said["instructions"]})
    same = {name: said[name] for name in (*SAMPLED, *CACHE, "seed", "stop", "stream", "thoughts")
            if name in said}
    top = said.get("top_logprobs", 0)
    if top or LOGPROBS in said.get("include", []):
        same |= {"logprobs": True, "top_logprobs": top}
    same["response_format"] = said.get("text", "")
    if "max_output_tokens" in said:
        same["max_tokens"] = said["max_output_tokens"]
    asked = reader.conversed({**same, "messages": messages,
                              "forget": said.get("truncation") == "auto"}, gone)
    asked.said = repeated(body, said)
    return asked


class Writer:
    """The response to a request, whole or as a stream of events.  See protocol.Writer"""
    media = "text/event-stream; charset=utf-8"

    def __init__(self, asked, model):
        self.asked, self.model, self.created = asked, model, int(time.time())
        self.id, self.item_id = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self.n_events, self.text, self.finish = 0, "", ""
        self.openai, self.said, self.scores = protocol.Writer(asked, model), asked.said, []
        # Several events of a stream repeat the fields of the request, and all log-probabilities.
        # Each of them is encoded once, and replaces this mark, which no client can know.
        self.mark = uuid.uuid4().hex
        if asked.stream:
            self.said, self.scores = {self.mark: ""}, self.mark
        self.encoded_said, self.encoded_scores = b"", []

    # ---- the stream
    def event(self, kind, scores=b"", **body):
        """scores: the log-probabilities of this event, encoded, without the brackets of the list"""
        raw = encoded({"type": kind, "sequence_number": self.n_events, **body})
        self.n_events += 1
        mark = encoded(self.mark)
        raw = raw.replace(mark + b': ""', self.encoded_said).replace(mark, b"[" + scores + b"]")
        return b"event: " + kind.encode() + b"\ndata: " + raw + b"\n\n"

    def of_item(self, kind, **body):
        return self.event(kind, output_index=0, **body)

    def of_part(self, kind, **body):
        return self.of_item(kind, item_id=self.item_id, content_index=0, **body)

    def begin(self):
        self.encoded_said = encoded(self.asked.said)[1:-1]
        response = self.response("in_progress")
        return (self.event("response.created", response=response) +
                self.event("response.in_progress", response=response) +
                self.of_item("response.output_item.added", item=self.item("in_progress")) +
                self.of_part("response.content_part.added", part=self.part()))

    def step(self, voice, text, places):
        self.text, self.finish = self.text + text, voice.finish
        scores = encoded(self.logprobs(voice, places))[1:-1]
        if scores:
            self.encoded_scores.append(scores)
        if not (text or scores):
            return b""
        return self.of_part("response.output_text.delta", delta=text, logprobs=self.mark,
                            scores=scores)

    def logprobs(self, voice, places):
        """The log-probabilities of the sampled tokens at these indices, if they are requested"""
        if self.asked.logprobs is None:
            return []
        return self.openai.chat_logprobs(self.openai.pairs(voice.answer, places))["content"]

    def end(self):
        status, scores = self.status(), b", ".join(self.encoded_scores)
        return (self.of_part("response.output_text.done", scores=scores, text=self.text,
                             logprobs=self.scores) +
                self.of_part("response.content_part.done", scores=scores, part=self.part()) +
                self.of_item("response.output_item.done", scores=scores, item=self.item(status)) +
                self.event(f"response.{status}", scores, response=self.response(status)))

    def fault(self, refusal):
        error = {"code": "server_error", "message": str(refusal)}
        return self.event("response.failed", response={**self.response("failed"), "error": error})

    # ---- objects
    def whole(self, voices, texts):
        self.text, self.finish = texts[0], voices[0].finish
        self.scores = self.logprobs(voices[0], range(voices[0].drawn))
        return self.response(self.status())

    def status(self):
        return "incomplete" if self.finish == "length" else "completed"

    def part(self):
        return {"type": "output_text", "text": self.text, "annotations": [],
                "logprobs": self.scores}

    def item(self, status):
        content = [] if status == "in_progress" else [self.part()]
        return {"id": self.item_id, "type": "message", "role": "assistant", "status": status,
                "content": content}

    def response(self, status):
        sampling, ended = self.asked.answers[0].sampling, status in ("completed", "incomplete")
        return {
            **self.said, "id": self.id, "object": "response", "created_at": self.created,
            "status": status, "model": self.model, "output": [self.item(status)] if ended else [],
            "usage": self.usage() if ended else None, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete"
            else None, "background": False, "temperature": sampling.temperature,
            "top_p": sampling.top_p, "store": False, "previous_response_id": None}

    def usage(self):
        prompt, cached, written = self.asked.counts()
        return {"input_tokens": prompt, "output_tokens": written, "total_tokens": prompt + written,
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
                "output_tokens_details": {"reasoning_tokens": 0}}
