"""Ollama's protocol: /api/chat and /api/generate, and the descriptions of the models.  `chat`
and `generate` translate a request into one of OpenAI's protocol."""
import datetime
import hashlib
import json
import time

from nanoeuler_parts.chat.sampling import ChatSampling, Sampling
from nanoeuler_parts.serve import values
from nanoeuler_parts.serve.protocol import (
    Asked, CACHE, checked, encoded, flag, MOST_LOGPROBS, number, refuse_unless, SAMPLED, seed,
    shown as quoted, stops, text, WHOLE, Work, Writer,
)

# The version of Ollama whose protocol this is.  Clients require a minimum: GitHub Copilot 0.6.4.
VERSION = "0.12.11"

# Options of the machine, which the flags of `serve` decide
OF_MACHINE = dict.fromkeys((
    "num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap",
    "use_mlock", "low_vram", "numa", "f16_kv", "logits_all", "vocab_only", "embedding_only",
    "num_gqa", "draft_num_predict"))
OPTIONS = {
    **SAMPLED, **CACHE, **values.IGNORED, **OF_MACHINE,
    "num_predict": number(-2, WHOLE, whole=True), "stop": stops, "seed": seed}


def options(name, value):
    refuse_unless(isinstance(value, dict), f"{name} is {quoted(value)}, expected an object", name)
    return checked(value, OPTIONS)


def reply_format(name, value):
    """The `json_schema` of nanoeuler.Sampling: for "json", for a JSON schema, or for no format"""
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    refuse_unless(value in ("", "json"), f"{name} is {quoted(value)}, expected 'json' or a JSON "
                  f"schema", name)
    return "object" if value else ""


COMMON = {
    **CACHE, **values.IGNORED, "model": text, "stream": flag, "options": options,
    "format": reply_format, "logprobs": flag, "top_logprobs": number(0, MOST_LOGPROBS, whole=True)}
OF_CHAT = {**COMMON, "messages": None}
OF_GENERATE = {**COMMON, "prompt": text, "system": text, "raw": flag}


def understood(body, known):
    """`checked`, with a hint for a parameter that belongs into the options"""
    for name, value in body.items():
        belongs = name not in known and (name in OPTIONS or values.own_name(name, OPTIONS))
        refuse_unless(value is None or not belongs, f"unknown parameter {quoted(name)}; send it as "
                      f"{name if name in OPTIONS else belongs} in options", name)
    return checked(body, known)


# ---- requests
def of_openai(reader, said):
    """The parameters of OpenAI's protocol that mean the same.  Temperature is that of `chat`."""
    chosen = said.get("options", {})
    sampling = ChatSampling if reader.speaker.answers else Sampling
    found = {"temperature": sampling.temperature, "stream": said.get("stream", True)}
    found |= {name: chosen[name] for name in (*SAMPLED, "stop") if name in chosen}
    found |= {name: both[name] for both in (chosen, said) for name in CACHE if name in both}
    found["response_format"] = said.get("format", "")
    if "seed" in chosen:
        found["seed"] = chosen["seed"]
    found["thoughts"] = said.get("thoughts", chosen.get("thoughts", ""))
    if chosen.get("num_predict", 0) > 0:
        found["max_tokens"] = chosen["num_predict"]
    return found


def scored(said):
    """The log-probabilities of a request, in the parameters of OpenAI's chats.  As in Ollama,
    `top_logprobs` has no effect without `logprobs`."""
    return {"logprobs": True, "top_logprobs": said.get("top_logprobs", 0)
            } if said.get("logprobs") else {}


def loaded(said):
    """A request without a text asks for the model to be loaded, which app.py has done already."""
    return Asked(True, [], said.get("stream", True), said=said)


def chat(reader, body, gone):
    """Checks the body of a request to /api/chat, and returns an Asked.  reader: protocol.Reader"""
    said = understood(body, OF_CHAT)
    if said.get("messages", []) == []:
        return loaded(said)
    asked = reader.conversed({**of_openai(reader, said), **scored(said), "forget": True,
                              "messages": said["messages"]}, gone, "/api/generate")
    asked.said = said
    return asked


def generate(reader, body, gone):
    """The same for /api/generate.  A chat model answers the prompt, unless `raw` is true."""
    said = understood(body, OF_GENERATE)
    if not said.get("prompt"):
        return loaded(said)
    same, scores = of_openai(reader, said), scored(said)
    if reader.speaker.answers and not said.get("raw"):
        messages = [{"role": "system", "content": said["system"]}] if said.get("system") else []
        messages.append({"role": "user", "content": said["prompt"]})
        asked = reader.conversed({**same, **scores, "messages": messages}, gone)
    else:
        refuse_unless(not said.get("system"), "expected no system message: the prompt is continued "
                      "as it is", "system")
        [ids] = reader.prompts(said["prompt"], Work(gone))
        scores = {"logprobs": scores["top_logprobs"]} if scores else {}
        asked = reader.continued({"max_tokens": reader.room_after(ids), **same, **scores,
                                  "prompt": ids}, gone)
    asked.said = said
    return asked


# ---- responses
FIRST, LAST = (datetime.datetime(year, 1, 1, tzinfo=datetime.UTC).timestamp() for year in (1, 9999))


def timestamp(seconds):
    """Seconds since 1970 as Ollama writes them: 2026-01-31T12:00:00.000000Z.  The time of a file
    may lie outside of the years that a date can have."""
    seconds = min(max(seconds, FIRST), LAST)
    said = datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="microseconds")
    return said.replace("+00:00", "Z")


class Chat:
    """The response to /api/chat, whole or as a stream of lines.  See protocol.Writer"""
    media = "application/x-ndjson"

    def __init__(self, asked, model):
        self.asked, self.model = asked, asked.said.get("model", model)
        self.finish = "load"
        self.openai = Writer(asked, model) if asked.logprobs is not None else None

    def words(self, text):
        return {"message": {"role": "assistant", "content": text}}

    def line(self, text, **more):
        return {"model": self.model, "created_at": timestamp(time.time()), **self.words(text),
                "done": "done_reason" in more, **more}

    def logprobs(self, voice, places):
        """The log-probabilities of the sampled tokens at these indices, if they are requested"""
        if self.openai is None:
            return {}
        pairs = self.openai.pairs(voice.answer, places)
        return {"logprobs": self.openai.chat_logprobs(pairs)["content"]}

    def begin(self):
        return b""

    def step(self, voice, text, places):
        self.finish = voice.finish
        if not (text or places and self.openai):
            return b""
        return encoded(self.line(text, **self.logprobs(voice, places))) + b"\n"

    def end(self):
        return encoded(self.last("")) + b"\n"

    def fault(self, refusal):
        return encoded({"error": str(refusal)}) + b"\n"

    def whole(self, voices, texts):
        for voice in voices:
            self.finish = voice.finish
        more = self.logprobs(voices[0], range(voices[0].drawn)) if voices else {}
        return self.last("".join(texts.values()), **more)

    def last(self, text, **more):
        """The last line.  Durations are in nanoseconds."""
        counts = {**more}
        for answer in self.asked.answers:
            prompt, _, written = self.asked.counts()
            spent = [int(1e9 * seconds) for seconds in
                     (answer.first - answer.arrived, time.perf_counter() - answer.first)]
            counts |= {"total_duration": sum(spent), "load_duration": 0,
                       "prompt_eval_count": prompt, "prompt_eval_duration": spent[0],
                       "eval_count": written, "eval_duration": spent[1]}
        return self.line(text, done_reason=self.finish, **counts)


class Generated(Chat):
    """The response to /api/generate"""

    def words(self, text):
        return {"response": text}


# ---- the models.  card: see models.card_of     began: when the server started, seconds since 1970
def details(card):
    return {"parent_model": card.get("parent", ""), "format": "safetensors", "family": "nanoeuler",
            "families": ["nanoeuler"], "parameter_size": f"{card['parameters'] / 1e6:.1f}M",
            "quantization_level": card["weights"].upper() or "unknown"}


def listed(card):
    name = f"{card['name']}:latest"
    return {"name": name, "model": name, "modified_at": timestamp(card["modified"]),
            "size": card["bytes"],
            "digest": hashlib.sha256(name.encode(errors="backslashreplace")).hexdigest(),
            "details": details(card)}


def tags(cards, began):
    return {"models": [listed(card) for card in cards]}


def running(cards, began):
    until = timestamp(began + 1e9)           # the server never unloads a model
    return {"models": [{**listed(card), "expires_at": until, "size_vram": card["bytes"],
                        "context_length": card["context"]} for card in cards if card["loaded"]]}


def version(cards, began):
    return {"version": VERSION}


DESCRIPTIONS = {"tags": tags, "ps": running, "version": version}
OURS = {"explain", "model", "runs", "run"}   # addresses of the pages


def is_path(path):
    """Whether an address belongs to Ollama's protocol.  Its errors then have Ollama's format."""
    return path.startswith("/api/") and path.split("/")[2] not in OURS


def shown(card):
    """The description of a model for /api/show"""
    c = card["config"]
    return {"modelfile": "", "parameters": f"temperature {card['temperature']:g}",
            "template": card["template"], "details": details(card), "capabilities": ["completion"],
            "modified_at": timestamp(card["modified"]), "model_info": {
                "general.architecture": "nanoeuler",
                "general.parameter_count": card["parameters"],
                "nanoeuler.context_length": card["context"],
                "nanoeuler.embedding_length": c["n_embd"],
                "nanoeuler.block_count": c["n_layer"],
                "nanoeuler.attention.head_count": c["n_head"]}}
