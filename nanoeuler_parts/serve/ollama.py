"""Ollama's protocol: /api/chat and /api/generate, and the descriptions of the models.  `chat`
and `generate` translate a request into one of OpenAI's protocol."""
import datetime
import hashlib
import json
import time

import nanoeuler as ne
from nanoeuler_parts.serve.protocol import (
    Asked, checked, encoded, flag, number, only, refuse_unless, SAMPLED, shown as quoted, stops,
    text, WHOLE,
)

# Options of the machine, which the flags of `serve` decide
OF_MACHINE = dict.fromkeys((
    "num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap",
    "use_mlock", "low_vram", "numa", "f16_kv", "logits_all", "vocab_only", "embedding_only"))
OPTIONS = {
    **SAMPLED, **OF_MACHINE, "num_predict": number(-2, WHOLE, whole=True), "stop": stops,
    "seed": number(-1, WHOLE, whole=True), "mirostat": only(0), "mirostat_tau": None,
    "mirostat_eta": None, "tfs_z": only(1, 1.0), "typical_p": only(1, 1.0),
    "penalize_newline": only(True)}


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


def no_thinking(name, value):
    """`thinking` of protocol.py.  Ollama would return a thought in a field of its own."""
    only(False)(name, value)
    return "off"


COMMON = {
    "model": text, "stream": flag, "options": options, "format": reply_format, "keep_alive": None,
    "think": no_thinking, "logprobs": only(False), "top_logprobs": only(0), "truncate": None,
    "shift": None}
OF_CHAT = {**COMMON, "messages": None, "tools": only([])}
OF_GENERATE = {
    **COMMON, "prompt": text, "system": text, "raw": flag, "images": only([]), "suffix": only(""),
    "template": only(""), "context": only([])}


# ---- requests
def of_openai(reader, said):
    """The parameters of OpenAI's protocol that mean the same.  Temperature is that of `chat`."""
    chosen = said.get("options", {})
    sampling = ne.ChatSampling if reader.speaker.answers else ne.Sampling
    found = {"temperature": sampling.temperature, "stream": said.get("stream", True)}
    found |= {name: chosen[name] for name in (*SAMPLED, "stop") if name in chosen}
    found["response_format"] = said.get("format", "")
    if chosen.get("seed", -1) >= 0:
        found["seed"] = chosen["seed"]
    if chosen.get("num_predict", 0) > 0:
        found["max_tokens"] = chosen["num_predict"]
    return found


def loaded(said):
    """A request without a text asks for the model to be loaded, which app.py has done already."""
    return Asked(True, [], said.get("stream", True), said=said)


def chat(reader, body, gone):
    """Checks the body of a request to /api/chat, and returns an Asked.  reader: protocol.Reader"""
    said = checked(body, OF_CHAT)
    if said.get("messages", []) == []:
        return loaded(said)
    thinking = {"chat_template_kwargs": said["think"]} if "think" in said else {}
    asked = reader.conversed({**of_openai(reader, said), "messages": said["messages"],
                              "forget": True, **thinking}, gone)
    asked.said = said
    return asked


def generate(reader, body, gone):
    """The same for /api/generate.  A chat model answers the prompt, unless `raw` is true."""
    said = checked(body, OF_GENERATE)
    if not said.get("prompt"):
        return loaded(said)
    same = of_openai(reader, said)
    if reader.speaker.answers and not said.get("raw"):
        messages = [{"role": "system", "content": said["system"]}] if said.get("system") else []
        messages.append({"role": "user", "content": said["prompt"]})
        asked = reader.conversed({**same, "messages": messages}, gone)
    else:
        refuse_unless(not said.get("system"), "expected no system message: the prompt is continued "
                      "as it is", "system")
        [ids] = reader.prompts(said["prompt"], gone)
        asked = reader.continued({"max_tokens": reader.room_after(ids), **same, "prompt": ids},
                                 gone)
    asked.said = said
    return asked


# ---- responses
def timestamp(seconds):
    """Seconds since 1970 as Ollama writes them: 2026-01-31T12:00:00.000000Z"""
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%dT%H:%M:%S.%fZ}"


class Chat:
    """The response to /api/chat, whole or as a stream of lines.  See protocol.Writer"""
    media = "application/x-ndjson"

    def __init__(self, asked, model):
        self.asked, self.model = asked, asked.said.get("model", model)
        self.finish = "load"

    def words(self, text):
        return {"message": {"role": "assistant", "content": text}}

    def line(self, text, **more):
        return {"model": self.model, "created_at": timestamp(time.time()), **self.words(text),
                "done": bool(more), **more}

    def begin(self):
        return b""

    def step(self, voice, text, places):
        self.finish = voice.finish
        return encoded(self.line(text)) + b"\n" if text else b""

    def end(self):
        return encoded(self.last("")) + b"\n"

    def fault(self, refusal):
        return encoded({"error": str(refusal)}) + b"\n"

    def whole(self, voices, texts):
        for voice in voices:
            self.finish = voice.finish
        return self.last("".join(texts.values()))

    def last(self, text):
        """The last line.  Durations are in nanoseconds."""
        counts = {}
        for answer in self.asked.answers:
            prompt, _, written = self.asked.counts()
            spent = [int(1e9 * seconds) for seconds in
                     (answer.first - answer.arrived, time.perf_counter() - answer.first)]
            counts = {"total_duration": sum(spent), "load_duration": 0,
                      "prompt_eval_count": prompt, "prompt_eval_duration": spent[0],
                      "eval_count": written, "eval_duration": spent[1]}
        return self.line(text, done_reason=self.finish, **counts)


class Generated(Chat):
    """The response to /api/generate"""

    def words(self, text):
        return {"response": text}


# ---- the models.  card: see models.card_of     began: when the server started, seconds since 1970
def details(card):
    return {"parent_model": "", "format": "safetensors", "family": "nanoeuler",
            "families": ["nanoeuler"], "parameter_size": f"{card['parameters'] / 1e6:.1f}M",
            "quantization_level": card["weights"].upper() or "unknown"}


def listed(card, began):
    name = f"{card['name']}:latest"
    return {"name": name, "model": name, "modified_at": timestamp(began), "size": card["bytes"],
            "digest": hashlib.sha256(name.encode(errors="backslashreplace")).hexdigest(),
            "details": details(card)}


def tags(cards, began):
    return {"models": [listed(card, began) for card in cards]}


def running(cards, began):
    until = timestamp(began + 1e9)           # the server never unloads a model
    return {"models": [{**listed(card, began), "expires_at": until, "size_vram": card["bytes"],
                        "context_length": card["context"]} for card in cards if card["loaded"]]}


def version(cards, began):
    return {"version": cards[0]["version"]}


DESCRIPTIONS = {"tags": tags, "ps": running, "version": version}
# Addresses whose errors have Ollama's format
PATHS = {f"/api/{name}" for name in (
    "chat", "generate", "show", *DESCRIPTIONS, "embed", "embeddings", "pull", "push", "create",
    "copy", "delete")}


def shown(card, began):
    """The description of a model for /api/show"""
    c = card["config"]
    return {"modelfile": "", "parameters": f"temperature {card['temperature']:g}",
            "template": card["template"], "details": details(card), "capabilities": ["completion"],
            "modified_at": timestamp(began), "model_info": {
                "general.architecture": "nanoeuler",
                "general.parameter_count": card["parameters"],
                "nanoeuler.context_length": card["context"],
                "nanoeuler.embedding_length": c["n_embd"],
                "nanoeuler.block_count": c["n_layer"],
                "nanoeuler.attention.head_count": c["n_head"]}}
