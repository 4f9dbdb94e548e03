"""Kinds of requests, over all endpoints: each number at the extremes of its protocol, each value
that asks for nothing, each other name of a field, bodies that are nested, the chunks of each
stream, and clients that close their side."""
import contextlib
import json
import logging
import os
import socket

import pytest
from helpers import QUICK, needs
from servers import chat_model, post, send, serving, until

import nanoeuler as ne
from nanoeuler_parts.chat import templates

pytestmark = pytest.mark.cli
needs("starlette")
needs("uvicorn")
HELLO = [{"role": "user", "content": "Hello"}]
LAST = (1 << 63) - 1         # of the protocols' integers
# The least body of each endpoint that generates text, with few tokens
BODIES = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 4},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
    "/api/chat": {"messages": HELLO, "options": {"num_predict": 4}, "stream": False},
    "/api/generate": {"prompt": "Hello", "options": {"num_predict": 4}, "stream": False}}
ALL = [*BODIES]
EVERY = {**BODIES, "/api/show": {}, "/api/explain": {"tokens": [1, 2]}}


@pytest.fixture(scope="module")
def there(tmp_path_factory, tokenizer):
    file = chat_model(tmp_path_factory.mktemp("served") / "little.bin", tokenizer)
    with serving(file) as found:
        yield found


@pytest.fixture
def at(there):
    return there[0]


def with_field(path, name, value):
    """The least body of an endpoint with a field, in Ollama's protocol in its options, too"""
    body = dict(BODIES[path])
    if path.startswith("/api") and name in ("seed", "num_predict", "temperature", "top_p", "top_k",
                                            "min_p", "presence_penalty", "frequency_penalty",
                                            "repeat_penalty", "repeat_last_n"):
        return {**body, "options": {**body["options"], name: value}}
    return {**body, name: value}


def at_once(fields):
    """All values of {name: values} in objects of 8 fields, or one by one in `make test-all`"""
    size = 8 if QUICK in os.environ else 1
    for i in range(max(map(len, fields.values()))):
        names = [name for name, values in fields.items() if i < len(values)]
        for k in range(0, len(names), size):
            yield {name: fields[name][i] for name in names[k:k + size]}


def text_of(path, said):
    if path == "/v1/completions":
        return said["choices"][0]["text"]
    if path == "/v1/chat/completions":
        return said["choices"][0]["message"]["content"]
    if path == "/v1/responses":
        return said["output"][0]["content"][0]["text"]
    return said["message"]["content"] if path == "/api/chat" else said["response"]


def problem(said):
    error = said["error"]
    return error if isinstance(error, str) else error["message"]


# ---- numbers
@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize("name, accepted, rejected", [
    ("seed", [-LAST - 1, -2, -1, 0, 7.0, 1 << 61, LAST], [LAST + 1, -LAST - 2, 0.5, "1", True]),
    ("top_k", [-1, 0, LAST], [-2, LAST + 1, 1.5, True]),
    ("repeat_last_n", [-1, 0, LAST], [-2, LAST + 1]),
    ("temperature", [0, 2, 100], [-0.1, 101, "1", True]), ("top_p", [0, 1, 1.0], [-0.1, 1.1]),
    ("min_p", [0, 1], [-0.1, 1.1]), ("presence_penalty", [-2, 2], [101, "1"]),
    ("frequency_penalty", [-2, 2], [-101, True])])
def test_numbers_have_the_range_of_the_protocol(at, path, name, accepted, rejected):
    for value in accepted:
        status, _, said = post(at, path, with_field(path, name, value))
        assert status == 200, (value, said)
    for value in rejected:
        status, _, said = post(at, path, with_field(path, name, value))
        assert status == 400 and name in problem(said), (value, said)


@pytest.mark.parametrize("path, name", [
    ("/v1/completions", "max_tokens"), ("/v1/chat/completions", "max_tokens"),
    ("/v1/chat/completions", "max_completion_tokens"), ("/v1/responses", "max_output_tokens"),
    ("/api/chat", "num_predict"), ("/api/generate", "num_predict")])
def test_minus_one_token_means_as_many_as_fit(at, path, name):
    """The first error of a number of tokens names a limit that is accepted."""
    usage = {"/v1/responses": lambda s: s["usage"]["total_tokens"],
             "/api": lambda s: s["prompt_eval_count"] + s["eval_count"]}
    def body_of(value):
        return {key: x for key, x in with_field(path, name, value).items()
                if key == name or key != "max_tokens"}

    status, _, said = post(at, path, body_of(-1))
    assert status == 200, said
    count = usage.get(path, usage["/api"] if path.startswith("/api") else
                      lambda s: s["usage"]["total_tokens"])
    assert count(said) == 96
    for value in (-3, LAST + 1, 1.5, "4"):
        assert post(at, path, body_of(value))[0] == 400
    status, _, said = post(at, path, body_of(LAST))
    assert status == 400 and "at most 4096 tokens" in problem(said)


EACH = {"temperature": 0.5, "top_p": 0.6, "min_p": 0.1, "top_k": 7, "presence_penalty": 0.25,
        "frequency_penalty": 0.5, "repeat_last_n": 3}


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize("penalty", ["repeat_penalty", "repetition_penalty"])
def test_no_default_replaces_what_is_sent(there, path, penalty, monkeypatch):
    """All settings of sampling in one request: some have a default that another one changes."""
    from nanoeuler_parts.serve import protocol
    seen = []

    class Seen(ne.Sampling):
        def __init__(self, *values, **options):
            super().__init__(*values, **options)
            seen.append(options)

    monkeypatch.setattr(protocol, "Sampling", Seen)
    sent = {**EACH, penalty: 1.2}
    assert {*sent} | {"repeat_penalty", "repetition_penalty"} == {*protocol.SAMPLED}
    body = {**BODIES[path], **sent}
    if path.startswith("/api"):
        body = {**BODIES[path], "options": {**BODIES[path]["options"], **sent}}
    status, _, said = post(there[0], path, body)
    assert status == 200, said
    [found] = seen
    want = {**EACH, "repeat_penalty": 1.2}
    assert {name: found[name] for name in want} == want


def test_seeds(at):
    """Each is its own, negative ones, too; -1 gives another text each time."""
    body = {"prompt": "Hello", "max_tokens": 30}

    def text(seed):
        return post(at, "/v1/completions", {**body, "seed": seed})[2]["choices"][0]["text"]

    seeds = [0, 1, -2, -3, LAST, -LAST - 1, LAST - 1]
    texts = [text(seed) for seed in seeds]
    assert len({*texts}) == len(seeds) and texts == [text(seed) for seed in seeds]
    assert len({text(-1) for _ in range(3)}) == 3


# ---- values that ask for nothing
def test_each_value_that_asks_for_nothing_is_accepted_everywhere(at):
    """The same text as without it, on every endpoint"""
    from nanoeuler_parts.serve import values
    for path in ALL:
        plain = text_of(path, post(at, path, with_field(path, "seed", 5))[2])
        fields = {name: (None, "", [], {}, *neutral) for name, neutral in values.UNSUPPORTED.items()
                  if (path, name) != ("/api/generate", "raw")}
        for some_of_them in at_once(fields):
            status, _, said = post(at, path, {**with_field(path, "seed", 5), **some_of_them})
            assert status == 200, (path, some_of_them, said)
            assert text_of(path, said) == plain, (path, some_of_them)


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize("name, value, salt", [
    ("cache_salt", "a", "a"), ("cache_salt", "", ""), ("cache_prompt", True, ""),
    ("cache_prompt", False, None)])
def test_every_endpoint_separates_prompts_as_requested(there, monkeypatch, path, name, value, salt):
    """In Ollama's protocol also in the options, where other fields of llama.cpp are"""
    address, server = there
    seen, engine = [], server.default.engine
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda answers: seen.extend(answers) or submit(answers))
    body = BODIES[path]
    bodies = [{**body, name: value}]
    if path.startswith("/api"):
        bodies.append({**body, "options": {**body["options"], name: value}})
    for body in bodies:
        assert post(address, path, body)[0] == 200
    assert [(a.client, a.salt) for a in seen] == [("127.0.0.1", salt)] * len(bodies)
    for wrong in (1, ["a"], "a" * 257):
        status, _, said = post(address, path, {**bodies[0], name: wrong})
        assert status == 400 and name in problem(said)


@pytest.mark.parametrize("path", ALL)
def test_null_and_empty_values_of_known_fields(at, path):
    from nanoeuler_parts.serve import ollama, protocol, responses, values
    known = {"/v1/completions": protocol.OF_COMPLETION, "/v1/chat/completions": protocol.OF_CHAT,
             "/v1/responses": responses.PARAMETERS, "/api/chat": ollama.OF_CHAT,
             "/api/generate": ollama.OF_GENERATE}[path]
    asked = {**BODIES[path], "temperature": 0} if path.startswith("/v1") else BODIES[path]
    empty = (None, "", [], {})
    fields = {name: empty for name in sorted({*known} - values.REQUIRED) if name not in asked}
    for some_of_them in at_once({**fields, "an_unknown_name": [None]}):
        status, _, said = post(at, path, {**asked, **some_of_them})
        assert status == 200, (some_of_them, said)
    if path.startswith("/api"):
        for some_of_them in at_once(dict.fromkeys(ollama.OPTIONS, empty)):
            said = post(at, path, {**asked, "options": {"num_predict": 2, **some_of_them}})
            assert said[0] == 200, (some_of_them, said)


@pytest.mark.parametrize("path", ALL)
def test_what_asks_for_something_else_is_rejected_by_its_name(at, path):
    for name, value in {"tools": [{}], "logit_bias": {"1": 2}, "reasoning_effort": "high",
                        "reasoning": {"effort": "low"}, "mirostat": 2, "suffix": "b",
                        "typical_p": 0.5, "min_tokens": 3, "ignore_eos": True}.items():
        status, _, said = post(at, path, {**BODIES[path], name: value})
        assert status == 400 and f"{name} is not supported" in problem(said), said


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat", "/v1/responses"])
def test_thoughts_in_the_history_are_left_out(at, path, key):
    said = [*HELLO, {"role": "assistant", "content": "Hi."}, *HELLO]
    thought = [*HELLO, {"role": "assistant", "content": "Hi.", key: "Let me think."}, *HELLO]
    field = "input" if path == "/v1/responses" else "messages"
    if path == "/v1/responses" and key == "reasoning":
        thought = [*said[:1], {"type": "reasoning", "id": "r", "summary": []}, *said[1:]]
    texts = [post(at, path, {**with_field(path, "seed", 3), field: messages})[2]
             for messages in (said, thought)]
    assert text_of(path, texts[0]) == text_of(path, texts[1])
    wrong = [{**HELLO[0], "tool_calls": [{"id": "1"}]}]
    status, _, said = post(at, path, {**BODIES[path], field: wrong})
    assert status == 400 and "tool_calls" in problem(said)


def test_no_effort_switches_thoughts_off(there, monkeypatch):
    """On every endpoint that has messages, under each name"""
    at, server = there
    found, original = [], templates.chat_ids

    def chat_ids(template, messages, state, *args):
        found.append(state.thinking)
        return original(template, messages, state, *args)

    monkeypatch.setattr("nanoeuler_parts.chat.templates.chat_ids", chat_ids)
    for path in ("/v1/chat/completions", "/v1/responses", "/api/chat", "/api/generate"):
        for more in ({"reasoning_effort": "none"}, {"reasoning": {"effort": "none"}},
                     {"reasoning": {"effort": "none", "summary": None}}, {"think": False},
                     {"thinking": {"type": "disabled"}}, {"enable_thinking": False}):
            assert post(at, path, {**BODIES[path], **more})[0] == 200
            assert found.pop() == "off", more
        for more in ({}, {"reasoning": {"effort": None, "summary": None}}, {"think": None}):
            assert post(at, path, {**BODIES[path], **more})[0] == 200
            assert found.pop() == "", more


# ---- names of other projects
@pytest.mark.parametrize("path", ALL)
def test_other_names_of_a_field(at, path):
    """Accepted as the same field, or the error has the name and ours"""
    from nanoeuler_parts.serve import ollama, values
    from nanoeuler_parts.serve.protocol import SCHEMAS
    own = ("response_format" if path.endswith("completions") else "text.format" if
           path == "/v1/responses" else "format")
    samples = {"temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "stop": ["x"],
               "seed": 3, "max_tokens": 2, "repeat_penalty": 1.2, "repeat_last_n": 3}
    for names in values.SAME:
        for name in names:
            body = dict(BODIES[path])
            if path.startswith("/api"):
                body["options"] = {"num_predict": 4, name: samples[names[0]]}
                status, _, said = post(at, path, {**BODIES[path], name: samples[names[0]]})
                assert status == 400 and "in options" in problem(said), said
                if "num_predict" in names and name != "num_predict":
                    del body["options"]["num_predict"]
            else:
                if names[0] == "max_tokens":
                    body = {k: v for k, v in body.items() if "max" not in k}
                body[name] = samples[names[0]]
            status, _, said = post(at, path, body)
            assert status == 200, (name, said)
            if names[0] == "max_tokens":
                n = said.get("eval_count") or {**said["usage"], **{}}.get(
                    "completion_tokens", said["usage"].get("output_tokens"))
                assert n == 2, name
    known = SCHEMAS if own == "response_format" else ()
    for name in values.INSTEAD.keys() - known:
        status, _, said = post(at, path, {**BODIES[path], name: {"x": 1}})
        assert status == 400 and name in problem(said) and "use " in problem(said), said
        assert "JSON schema" not in problem(said) or f"use {own} with" in problem(said)
    for name in {"response_format", "text", "format"} - {own.split(".")[0]}:
        status, _, said = post(at, path, {**BODIES[path], name: {"type": "json_object"}})
        assert status == 400 and problem(said).endswith(f"use {own}"), said
    for name in ("draft_num_predict", *ollama.OF_MACHINE):
        if path.startswith("/api"):
            assert post(at, path, {**BODIES[path], "options": {name: 3, "num_predict": 1}}
                        )[0] == 200


def test_one_field_under_two_names(at):
    for more in ({"n_predict": 5}, {"n_predict": 4}):
        status, _, said = post(at, "/v1/completions", {**BODIES["/v1/completions"], **more})
        assert status == 400 and "n_predict and max_tokens are the same" in problem(said)


def test_a_field_of_another_endpoint_is_named_with_it(at):
    for path, name in (("/v1/completions", "messages"), ("/v1/chat/completions", "prompt"),
                       ("/v1/responses", "messages"), ("/v1/chat/completions", "input")):
        status, _, said = post(at, path, {**BODIES[path], name: HELLO})
        assert status == 400 and f"'{name}'; it is a parameter of /" in problem(said)


# ---- nested bodies
@pytest.mark.parametrize("path", EVERY)
def test_every_body_has_one_limit_of_nesting(at, path):
    """In a field that is ignored, one that is checked, one that is unknown, and one that is
    repeated in the response"""
    from nanoeuler_parts.serve.protocol import MOST_NESTED

    def raw(name, levels, opening, closing):
        body = json.dumps({**EVERY[path], "stream": path == "/v1/responses"})
        if path in ("/api/show", "/api/explain"):
            body = json.dumps(EVERY[path])
        comma = "," if body != "{}" else ""
        return (body[:-1] + f'{comma}"{name}":' + opening * levels + "1" + closing * levels +
                "}").encode()

    for name in ("metadata", "temperature", "stop", "what", "model", "options"):
        for opening, closing in (("[", "]"), ('{"a":', "}")):
            for levels in (MOST_NESTED, 300, 900, 960, 980, 990, 2000, 100_000):
                status, _, said = post(at, path, raw(name, levels, opening, closing))
                assert status == 400 and f"{MOST_NESTED} levels" in problem(said), (levels, said)
            status, _, said = post(at, path, raw(name, MOST_NESTED - 1, opening, closing))
            assert status == 200 or status == 400 and "levels" not in problem(said)


# ---- streams
def events_of(path, said):
    if path.startswith("/api"):
        return [json.loads(line) for line in said.splitlines()]
    return [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: {")]


OF_COMPLETIONS = {"n": 3}, {"return_tokens": True}         # fields that only some endpoints have
ECHO = {"echo": True, "logprobs": 2}


@pytest.mark.parametrize("path, more", [
    (path, more) for path in ALL
    for more in ({}, {"logprobs": True}, {"stop": ["e", "a", "\n"]},
                 *(OF_COMPLETIONS if path.endswith("completions") else ()),
                 *((ECHO,) if path == "/v1/completions" else ()))])
def test_the_end_and_the_role_have_chunks_of_their_own(at, path, more):
    """A client may read text while finish_reason is null, and the role before any text."""
    if path == "/v1/completions" and more.get("logprobs") is True:
        more = {"logprobs": 1}
    if path == "/v1/responses" and "logprobs" in more:
        more = {"include": ["message.output_text.logprobs"]}
    if path.startswith("/api") and "stop" in more:
        more = {"options": {"num_predict": 12, "seed": 4, **more}}
    body = {**with_field(path, "seed", 4), **more, "stream": True}
    whole = post(at, path, {**body, "stream": False})[2]
    events = events_of(path, post(at, path, body)[2])
    if path.startswith("/api"):
        *texts, last = events
        assert last["done"] and text_of(path, last) == "" and last["done_reason"]
        assert not any(event["done"] for event in texts)
        assert "".join(text_of(path, event) for event in texts) == text_of(path, whole)
        return
    if path == "/v1/responses":
        kinds = [event["type"] for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] in ("response.completed", "response.incomplete")
        [part] = whole["output"][0]["content"]
        deltas = [e for e in events if e["type"] == "response.output_text.delta"]
        assert "".join(e["delta"] for e in deltas) == part["text"]
        assert sum((e["logprobs"] for e in deltas), []) == part["logprobs"]
        last = {e["type"]: e for e in events}            # which repeat the whole answer
        text, of_part, item = (last[f"response.{kind}.done"] for kind in (
            "output_text", "content_part", "output_item"))
        assert (text["text"], text["logprobs"]) == (part["text"], part["logprobs"])
        assert of_part["part"] == part and item["item"]["content"] == [part]
        assert events[-1]["response"]["output"][0]["content"] == [part]
        assert bool(part["logprobs"]) == ("include" in more)
        return
    choices = [event["choices"][0] for event in events if event["choices"]]
    for choice in whole["choices"]:
        *parts, last = [c for c in choices if c["index"] == choice["index"]]
        assert last["finish_reason"] == choice["finish_reason"]
        assert all(part["finish_reason"] is None for part in parts)
        if path == "/v1/completions":
            assert last["text"] == "" and "".join(c["text"] for c in parts) == choice["text"]
            continue
        assert last["delta"] == {} and parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert all(part["delta"].keys() == {"content"} for part in parts[1:])
        assert "".join(c["delta"]["content"] for c in parts) == choice["message"]["content"]


@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("prompt", ["é😀 The sea", "a\u20acb", "plain", "\U0001f1fa\U0001f1f3 ü"])
def test_the_offsets_of_log_probabilities_fit_the_text(there, prompt, echo):
    """Whole and as a stream: the text from a token's offset on begins with the token, or with the
    character in which the token begins."""
    at, server = there
    body = {"prompt": prompt, "max_tokens": 25, "echo": echo, "logprobs": 1, "seed": 3}
    c = post(at, "/v1/completions", body)[2]["choices"][0]
    found, text = c["logprobs"], c["text"]
    chunks = events_of("/v1", post(at, "/v1/completions", {**body, "stream": True})[2])
    streamed = [x["choices"][0]["logprobs"] for x in chunks if x["choices"][0]["logprobs"]]
    assert sum((x["text_offset"] for x in streamed), []) == found["text_offset"]
    offsets = found["text_offset"]
    assert len(offsets) == len(found["tokens"]) and offsets[0] == 0 and offsets == sorted(offsets)
    assert offsets[-1] <= len(text)
    if echo:                                 # the prompt is valid UTF-8, so the offsets are exact
        ids = server.default.reader.speaker.tokenizer.encode(prompt).tolist()
        vocab, read = server.default.reader.vocab, b""
        for offset, token in zip(offsets, ids):
            assert offset == len(read.decode(errors="ignore"))
            read += vocab[token]
        assert offsets[len(ids)] == len(prompt)


def test_log_probabilities_are_the_same_in_every_protocol(at):
    """The numbers of /v1/chat/completions, in the forms that the other protocols' clients read"""
    asked = {"temperature": 1, "seed": 6}
    chat = post(at, "/v1/chat/completions", {**BODIES["/v1/chat/completions"], **asked,
                                             "logprobs": True, "top_logprobs": 2})[2]
    want = chat["choices"][0]["logprobs"]["content"]
    options = {"options": {"num_predict": 4, **asked}, "logprobs": True, "top_logprobs": 2}
    for path in ("/api/chat", "/api/generate"):
        assert post(at, path, {**BODIES[path], **options})[2]["logprobs"] == want
        lines = events_of(path, post(at, path, {**BODIES[path], **options, "stream": True})[2])
        assert sum((line.get("logprobs", []) for line in lines), []) == want
        assert "logprobs" not in post(at, path, BODIES[path])[2]
    body = {**BODIES["/v1/responses"], **asked, "include": ["message.output_text.logprobs"],
            "top_logprobs": 2}
    said = post(at, "/v1/responses", body)[2]
    assert said["output"][0]["content"][0]["logprobs"] == want
    events = events_of("/v1", post(at, "/v1/responses", {**body, "stream": True})[2])
    assert sum((e["logprobs"] for e in events if e["type"].endswith("text.delta")), []) == want


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_length_of_ollama_that_is_not_positive_is_none(at, path):
    """As in Ollama: -1 and 0 mean no limit, and -2 the rest of the context."""
    def replied(options):
        said = post(at, path, {**BODIES[path], "options": {"temperature": 2, "seed": 6, **options}})
        assert said[0] == 200, said
        return said[2]["eval_count"], said[2].get("response") or said[2]["message"]["content"]

    whole = replied({})
    assert whole[0] > 4 and all(replied({"num_predict": n}) == whole for n in (-2, -1, 0))
    for n in 1, 4:
        assert replied({"num_predict": n})[0] == n


@pytest.mark.parametrize("k", [0, 1, 2, 5])
def test_there_are_as_many_alternatives_as_are_requested(at, k):
    """0 asks for the sampled token alone.  The others are the first of a request for 20."""
    asked = {"temperature": 2, "seed": 6}
    path = "/v1/completions"
    for more in ({}, {"echo": True}):
        few, many = ([found["logprobs"] for found in post(at, path, {
            **BODIES[path], **asked, **more, "logprobs": n})[2]["choices"]] for n in (k, 20))
        for x, y in zip(few, many, strict=True):
            assert x["tokens"] == y["tokens"] and x["token_logprobs"] == y["token_logprobs"]
            for token, p, best, twenty in zip(x["tokens"], x["token_logprobs"], x["top_logprobs"],
                                              y["top_logprobs"], strict=True):
                assert best == (None if p is None else
                                dict([*twenty.items()][:k]) | {token: twenty[token]})
    path = "/v1/chat/completions"
    few, many = (post(at, path, {**BODIES[path], **asked, "logprobs": True, "top_logprobs": n})[2][
        "choices"][0]["logprobs"]["content"] for n in (k, 20))
    assert len(few) == 4 and all(len(x["top_logprobs"]) == k for x in few)
    assert few == [{**x, "top_logprobs": x["top_logprobs"][:k]} for x in many]


@pytest.mark.parametrize("path, more", [
    ("/api/chat", {}), ("/api/chat", {"stream": True}), ("/api/generate", {}),
    ("/api/generate", {"stream": True}), ("/api/generate", {"raw": True})])
def test_ollamas_addresses_read_their_common_fields_alike(at, path, more):
    """As in Ollama, top_logprobs has no effect without logprobs, at both addresses."""
    for fields in ({"top_logprobs": 2}, {"logprobs": False, "top_logprobs": 2}):
        status, _, said = post(at, path, {**BODIES[path], **more, **fields})
        assert status == 200 and "logprobs" not in str(said), said


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_repeats_the_request(at, stream):
    """langchain-openai parses the text of a response by its `text`, for example."""
    schema = {"type": "json_schema", "name": "a", "schema": {"enum": ["yes", "no"]}, "strict": True}
    fields = {
        "instructions": "Be brief.", "max_output_tokens": 9, "max_tool_calls": 2,
        "metadata": {"a": "b"}, "parallel_tool_calls": False, "prompt_cache_key": "k",
        "reasoning": {"effort": "none"}, "safety_identifier": "s", "text": {"format": schema},
        "tool_choice": "none", "top_logprobs": 2, "truncation": "auto", "user": "me",
        "temperature": 0.5, "top_p": 0.25, "store": False}
    nothing = {name: None for name in fields} | {"text": {"format": None}}
    neutral = {"tools": [], "text": {"format": {"type": "text"}}, "tool_choice": "auto",
               "reasoning": {"effort": None, "summary": None}, "max_output_tokens": None,
               "metadata": {}, "truncation": "disabled", "top_logprobs": 0}
    for sent, want in ((fields, fields), ({"max_tokens": 9}, {"max_output_tokens": 9}),
                       (nothing, neutral), ({}, neutral)):
        said = post(at, "/v1/responses", {"input": "Hello", "stream": stream, **sent})[2]
        found = [said]
        if stream:
            found = [e["response"] for e in events_of("/v1", said) if "response" in e]
            assert len(found) == 3           # created, in_progress, completed or incomplete
        for response in found:
            for name, value in want.items():
                is_part = isinstance(value, dict) and value.items() <= response[name].items()
                assert is_part or response[name] == value, name


# ---- a client that closes its side
def half_closed(at, raw):
    """All that comes after a client has sent `raw` and closed its side"""
    host, port = at.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as s:
        s.sendall(raw)
        s.shutdown(socket.SHUT_WR)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := s.recv(1 << 16):
                received += piece
        return received


def request_of(path, body, version="1.1"):
    raw = json.dumps(body).encode()
    return (b"POST %s HTTP/%s\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (path.encode(), version.encode(), len(raw), raw))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ALL)
def test_a_client_that_closes_its_side_gets_its_answer(at, monkeypatch, path, stream):
    """Also if the answer takes longer than the first look for a reset"""
    from nanoeuler_parts.serve import connections
    monkeypatch.setattr(connections, "PROBE_SECONDS", 0.001)
    body = {**with_field(path, "seed", 4), "stream": stream}
    for name in ("max_tokens", "max_output_tokens"):
        if name in body:
            body[name] = 80
    want = post(at, path, body)[2]
    for version in ("1.0", "1.1"):
        received = half_closed(at, request_of(path, body, version))
        received = received.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
        assert received.startswith(b"HTTP/1.1 200"), received
        if not stream:
            assert text_of(path, json.loads(received.partition(b"\r\n\r\n")[2])) == \
                text_of(path, want)
        else:
            assert (b"[DONE]" in received or b"response.incomplete" in received or
                    b'"done": true' in received), received


def test_http_clients_understand_the_probes(at, monkeypatch):
    """Chunks whose sizes begin with zeros, and a status 100 before the answer"""
    import http.client
    from nanoeuler_parts.serve import connections
    monkeypatch.setattr(connections, "PROBE_SECONDS", 0.001)
    for stream in (False, True):
        connection = http.client.HTTPConnection(at.removeprefix("http://"), timeout=60)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(
                {"prompt": "a", "max_tokens": 80, "seed": 1, "stream": stream}),
                {"content-type": "application/json"})
            connection.sock.shutdown(socket.SHUT_WR)
            response = connection.getresponse()
            said = response.read().decode()
        assert response.status == 200 and ("[DONE]" in said if stream else json.loads(said))


@pytest.mark.parametrize("path, raw, status", [
    ("a page", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", b"200"),
    ("a wrong body", request_of("/v1/completions", {}), b"400"),
    ("half a body", request_of("/v1/completions", {"prompt": "a"})[:-3], b"400"),
    ("half a head", b"GET /health HTTP/1.1\r\nhost: loc", b"400"),
    ("two requests", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 2, b"200")])
def test_whatever_a_client_sent_before_it_closed_its_side_is_answered(at, path, raw, status):
    received = half_closed(at, raw)
    n = 2 if path == "two requests" else 1
    assert received.count(b"HTTP/1.1 " + status) == n, received
    assert half_closed(at, b"") == b""


CHUNKED = b" HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" \
    b"transfer-encoding: chunked\r\n\r\n"
HALF = b" HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" \
    b"content-length: 10\r\n\r\nabc"
WHOLE = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture
def errors():
    """The messages of uvicorn and asyncio from the level error on: tracebacks"""
    said, handler = [], logging.Handler(logging.ERROR)
    handler.emit = said.append
    loggers = [logging.getLogger(name) for name in ("uvicorn.error", "asyncio")]
    for logger in loggers:
        logger.addHandler(handler)
    yield said
    for logger in loggers:
        logger.removeHandler(handler)


OK, WRONG, EITHER = {200}, {400}, {200, 400, 404}        # a GET may be answered without its body


HALVES = [
    *[(method + CHUNKED + b"zz\r\n", [WRONG]) for method in (
        b"POST /v1/completions", b"GET /v1/models", b"HEAD /health", b"CONNECT /api/run")],
    (b"POST /v1/completions" + CHUNKED + b"1\r\na\r\nzz\r\n", [WRONG]),
    *[(method + HALF, [EITHER]) for method in (b"HEAD /v1/models", b"GET /v1/models",
                                               b"HEAD /nope")],
    (b"POST /v1/chat/completions" + HALF, [WRONG]),
    (WHOLE + b"POST /v1/completions" + HALF, [OK, WRONG]), (WHOLE + WHOLE[:30], [OK, WRONG]),
    (WHOLE + b"HEAD /health" + HALF, [OK, EITHER]), (WHOLE + b"no head\r\n\r\n", [OK, WRONG]),
    (request_of("/v1/completions", {"prompt": "a"}) + b"POST /v1/completions" + HALF,
     [OK, WRONG])]


def is_wrong(raw):
    """Whether the last request is wrong by itself, and not only cut off"""
    return b"zz\r\n" in raw or b"no head" in raw


@pytest.mark.parametrize("raw, statuses, closes", [
    (*half, closes) for half in HALVES for closes in (True, False) if closes or is_wrong(half[0])])
def test_half_a_request_and_a_wrong_one_get_an_error(at, raw, statuses, closes, errors):
    """At once, and without a traceback in the log, also as the second request on a connection.
    A client that keeps its side open gets an error only for a request that is wrong."""
    host, port = at.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as s:       # BODY_SECONDS is 30
        s.sendall(raw)
        if closes:
            s.shutdown(socket.SHUT_WR)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := s.recv(1 << 16):
                received += piece
    received = received.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
    found = [int(x[:3]) for x in received.split(b"HTTP/1.1 ")[1:]]
    assert len(found) == len(statuses), received
    assert all(one in allowed for one, allowed in zip(found, statuses)), received
    assert send(at, "GET", "/health")[0] == 200 and not errors


def test_a_chunk_that_is_wrong_after_the_answer_began_ends_the_connection(at, errors):
    """The answer to a path without a route does not wait for the body."""
    host, port = at.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as s:
        s.sendall(b"POST /nope" + CHUNKED)
        assert s.recv(1 << 16).startswith(b"HTTP/1.1 404")
        s.sendall(b"zz\r\n")
        with contextlib.suppress(ConnectionResetError):
            while s.recv(1 << 16):
                pass
    assert send(at, "GET", "/health")[0] == 200 and not errors


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_noticed_before_it_would_be_answered(there, stream):
    at, server = there
    engine, left = server.default.engine, server.requests.left
    host, port = at.removeprefix("http://").split(":")
    with engine.turns:                       # no step is made meanwhile
        with socket.create_connection((host, int(port)), timeout=60) as s:
            s.sendall(request_of("/v1/completions", {"prompt": "a", "max_tokens": 90,
                                                     "stream": stream}))
            until(lambda: engine.waiting or engine.active)
        until(lambda: server.requests.left > left)
    until(lambda: not engine.active and not engine.waiting)


# ---- pages and addresses
def test_a_browser_gets_a_page_for_an_address_that_does_not_exist(at):
    page = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    status, headers, said = send(at, "GET", "/n<b>ope", headers=page)
    assert status == 404 and headers.get_content_type() == "text/html"
    assert 'href="/"' in said and "<b>" not in said.replace("<body>", "")
    for path, more in (("/nope", {}), ("/v1/nope", page), ("/api/nope", page)):
        status, headers, said = send(at, "GET", path, headers=more)
        assert status == 404 and headers.get_content_type() == "application/json"
    assert send(at, "POST", "/nope", {}, page)[1].get_content_type() == "application/json"


@pytest.mark.parametrize("path", ["/api/blobs/sha256:00", "/api/blobs", "/api/pull", "/api/new",
                                  "/api/chat/x"])
def test_every_address_of_ollama_has_its_errors(at, path):
    for method in ("GET", "POST"):
        status, _, said = send(at, method, path, {} if method == "POST" else None)
        assert status in (404, 405) and isinstance(said["error"], str)


def test_the_version_is_one_that_clients_of_ollama_accept(at):
    version = send(at, "GET", "/api/version")[2]["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)


def test_one_model_has_every_name(at):
    for method, path, body in (("GET", "/v1/models/gpt-4o", None),
                               ("POST", "/api/show", {"model": "llama3"}),
                               ("GET", "/api/model?model=gpt-4o", None),
                               ("POST", "/api/explain", {"model": "x", "tokens": [1]}),
                               *(("POST", path, {**BODIES[path], "model": "x"}) for path in ALL)):
        assert send(at, method, path, body)[0] == 200, path
