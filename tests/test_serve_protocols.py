"""The Responses API, Ollama's protocol, continued answers and the log of the server."""
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers import needs
from servers import CFG, chat_model, post, send, serving, until

import nanoeuler as ne
from nanoeuler_parts.serve import ollama
from nanoeuler_parts.serve.engine import Answer
from nanoeuler_parts.serve.protocol import Asked
from nanoeuler_parts.serve.verb import Serving

pytestmark = pytest.mark.cli
needs("starlette")
needs("uvicorn")
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def file(tmp_path_factory, tokenizer):
    return chat_model(tmp_path_factory.mktemp("served") / "little.bin", tokenizer)


@pytest.fixture(scope="module")
def there(file):
    with serving(file) as found:
        yield found


@pytest.fixture
def at(there):
    return there[0]


@pytest.fixture(scope="module")
def model(file):
    return ne.load(file)


@pytest.fixture
def client(at):
    openai = needs("openai")
    with openai.OpenAI(base_url=f"{at}/v1", api_key="none", max_retries=0) as client:
        yield client


def alone(model, ids, **sampling):
    """The Reply of the model without a server"""
    options = ne.Sampling(**{"temperature": 1.0, **sampling}).check()
    [(_, [reply])] = model.answers_to([ids], options, 1, ne.Pace())
    return reply


def test_the_offset_of_a_token_is_its_place_in_the_text(at):
    """Of a prompt of plain letters, whose tokens are what the text says"""
    for prompt in ("the sea and the sea", "a", "to be or not to be"):
        body = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 1}
        status, _, said = post(at, "/v1/completions", body)
        assert status == 200, said
        [choice] = said["choices"]
        found, start = choice["logprobs"], 0
        assert choice["text"] == prompt == "".join(found["tokens"])
        for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
            assert offset == start and prompt[offset:].startswith(token)
            start += len(token)


# ---- continued answers
@pytest.mark.parametrize("template", ["chatml", "alpaca"])
def test_the_last_message_of_the_assistant_is_continued(tmp_path, tokenizer, template):
    """The model reads what it had read after it had sampled this beginning."""
    file = chat_model(tmp_path / "long.bin", tokenizer, replace(CFG, seq_len=256))
    speaker = ne.load(file, template=template)
    with serving(file, template=template) as (at, server):
        ids = speaker.ids_of([("user", "Hello")])
        beginning = speaker.tokenizer.encode("Hi, I").tolist()
        want = alone(speaker, [*ids, *beginning], tokens=12, seed=4).answer
        messages = [*HELLO, {"role": "assistant", "content": "Hi, I"}]
        body = {"messages": messages, "max_tokens": 12, "seed": 4}
        status, _, said = post(at, "/v1/chat/completions", body)
        assert (status, said["choices"][0]["message"]["content"]) == (200, want)
        assert said["usage"]["prompt_tokens"] == len(ids) + len(beginning)


def test_a_template_of_its_own_is_continued_too(file, there, monkeypatch):
    needs("jinja2")
    reader = there[1].default.reader
    monkeypatch.setattr(reader.speaker, "template", "{% for m in messages %}[{{ m['role'] }}] "
                        "{{ m['content'] }};{% endfor %}[assistant] ")
    asked = reader.ids_of_messages([("user", "Hello")])
    continued = reader.ids_of_messages([("user", "Hello"), ("assistant", "Hi")])
    assert continued == [*asked, *reader.speaker.tokenizer.encode("Hi").tolist()]
    assert reader.speaker.tokenizer.decode(continued) == b"[user] Hello;[assistant] Hi"


@pytest.mark.parametrize("roles", [["assistant"], ["system", "assistant"], ["user", "assistant",
                                                                            "assistant"]])
def test_only_an_answer_to_a_user_is_continued(at, roles):
    messages = [{"role": role, "content": "x"} for role in roles]
    status, _, said = post(at, "/v1/chat/completions", {"messages": messages})
    assert status == 400 and "before an answer that is to be continued" in said["error"]["message"]


# ---- penalties
def test_repeat_penalties_are_those_of_generate(at, model):
    """Also where the beginning of the prompt is in the KV cache, as in the second request"""
    ids = model.tokenizer.encode("To be, or not to be").tolist()
    ids += alone(model, ids, tokens=30, temperature=0.0).tokens      # the model would repeat these
    asked = {"prompt": ids, "max_tokens": 30, "temperature": 0}
    plain = alone(model, ids, tokens=30, temperature=0.0).answer
    for more, n in (({"repeat_penalty": 1.7}, 64), ({"repeat_penalty": 1.7, "repeat_last_n": 5}, 5),
                    ({"repetition_penalty": 1.7}, -1)):
        want = alone(model, ids, tokens=30, temperature=0.0, repeat_penalty=1.7,
                     repeat_last_n=n).answer
        assert want != plain
        for _ in range(2):
            assert post(at, "/v1/completions", {**asked, **more})[2]["choices"][0]["text"] == want
    both = {"repeat_penalty": 1.1, "repetition_penalty": 1.1}
    assert "found both" in post(at, "/v1/completions", {**asked, **both})[2]["error"]["message"]


# ---- the Responses API
def test_a_response_is_that_of_a_chat(client, model):
    ids = model.ids_of([("system", "Be brief."), ("user", "Hello")])
    want = alone(model, ids, tokens=20, seed=7)
    said = dict(model="little", input="Hello", instructions="Be brief.", max_output_tokens=20,
                temperature=1, extra_body={"seed": 7})
    found = client.responses.create(**said)
    assert found.output_text == want.answer and found.status == "incomplete"
    assert found.incomplete_details.reason == "max_output_tokens" and found.store is False
    assert (found.usage.input_tokens, found.usage.output_tokens) == (len(ids), 20)
    events = [*client.responses.create(**said, stream=True)]
    assert events[-1].response.output_text == want.answer
    kinds = [e.type for e in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                         "response.content_part.added"]
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done",
                          "response.output_item.done", "response.incomplete"]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == want.answer
    assert [e.sequence_number for e in events] == [*range(len(events))]


def test_a_response_that_stops_is_completed(client):
    said = dict(model="little", input="Hello", temperature=0)
    text = client.responses.create(**said, max_output_tokens=20).output_text
    stop = {"stop": [text[5:7]]}
    found = client.responses.create(**said, extra_body=stop)
    assert found.status == "completed" and text.startswith(found.output_text)
    with client.responses.stream(**said, extra_body=stop) as stream:
        assert stream.get_final_response().output_text == found.output_text


def test_the_output_of_a_response_is_input_of_the_next(client, model):
    first = client.responses.create(model="little", input="Hello", max_output_tokens=5)
    given = [{"role": "user", "content": "Hello"}, *(x.model_dump() for x in first.output),
             {"role": "user", "content": [{"type": "input_text", "text": "Who?"}]}]
    second = client.responses.create(model="little", input=given, max_output_tokens=5)
    ids = model.ids_of([("user", "Hello"), ("assistant", first.output_text), ("user", "Who?")])
    assert second.usage.input_tokens == len(ids)


@pytest.mark.parametrize("body, words", [
    ({}, "input is missing"), ({"input": 5}, "a string or a list"), ({"input": []}, "1 to 2,048"),
    ({"input": ["a"]}, "input[0]: expected an object"),
    ({"input": [{"type": "function_call_output"}]}, "input[0]: expected the type message"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0]: expected a "),
    ({"input": [{"role": "boss", "content": "a"}]}, "input[0]: expected one of the roles"),
    ({"input": "a", "max_output_tokens": 5000}, "at most 4096 tokens"),
    ({"input": "a", "previous_response_id": "resp_1"}, "stores no responses"),
    ({"input": "a", "store": True}, "stores no responses"),
    ({"input": "a", "text": {"format": {"type": "grammar"}}}, "expected the type text"),
    ({"input": "a", "text": "json"}, "expected an object with a format"),
    ({"input": "a", "truncation": "all"}, "'auto' or 'disabled'"),
    ({"input": "word " * 200}, "do not fit"), ({"input": "a", "messages": []}, "'messages'")])
def test_a_wrong_request_for_a_response(at, body, words):
    status, _, said = post(at, "/v1/responses", body)
    assert status == 400 and words in said["error"]["message"], said


def test_an_error_within_a_response(file, monkeypatch):
    with serving(file) as (at, server):
        engine = server.default.engine
        monkeypatch.setattr(engine, "step", lambda: engine.fail("it broke") if engine.active
                            else engine.admit())
        said = post(at, "/v1/responses", {"input": "a", "stream": True})[2]
        last = json.loads(said.strip().splitlines()[-1].removeprefix("data: "))
        assert last["type"] == "response.failed"
        assert last["response"]["error"]["message"] == "it broke"
        lines = post(at, "/api/chat", {"messages": HELLO})[2].splitlines()
        assert json.loads(lines[-1]) == {"error": "it broke"}
        status, _, said = post(at, "/api/chat", {"messages": HELLO, "stream": False})
        assert (status, said) == (500, {"error": "it broke"})


# ---- Ollama's protocol
def lines_of(said):
    return [json.loads(line) for line in said.splitlines()]


@pytest.mark.parametrize("path, more", [
    ("chat", {"messages": [{"role": "system", "content": "Be brief."}, *HELLO]}),
    ("generate", {"prompt": "Hello", "system": "Be brief."})])
def test_ollama_gets_the_texts_of_chat(at, model, path, more):
    ids = model.ids_of([("system", "Be brief."), ("user", "Hello")])
    want = alone(model, ids, tokens=20, seed=7, temperature=0.9, top_k=5).answer
    options = {"seed": 7, "temperature": 0.9, "top_k": 5, "num_predict": 20}
    body = {"model": "any", "options": options, **more}
    _, headers, said = post(at, f"/api/{path}", body)
    assert headers["content-type"] == "application/x-ndjson"
    *parts, last = lines_of(said)
    whole = post(at, f"/api/{path}", {**body, "stream": False})[2]

    def text(line):
        return line["response"] if path == "generate" else line["message"]["content"]

    assert "".join(map(text, parts)) == want == text(whole) and text(last) == ""
    assert len(parts) > 3 and not any(line["done"] for line in parts)
    for line in (last, whole):
        assert line["done"] and line["done_reason"] == "length" and line["model"] == "any"
        assert (line["prompt_eval_count"], line["eval_count"]) == (len(ids), 20)
        assert line["total_duration"] == line["prompt_eval_duration"] + line["eval_duration"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]{15}Z", line["created_at"])


@pytest.mark.parametrize("response", [ollama.Chat, ollama.Generated])
def test_ollamas_durations_are_of_prompt_and_answer(response, monkeypatch):
    """In nanoseconds: from the request to the first token, and from there to the end"""
    answer = Answer([1, 2, 3], ne.Sampling(), None, (), [b"a"], arrived=100.0, first=107.0)
    answer.reply = SimpleNamespace(tokens=[0] * 5)
    monkeypatch.setattr(ollama.time, "perf_counter", lambda: 110.0)
    line = response(Asked(True, [answer]), "little").last("")
    assert (line["prompt_eval_count"], line["eval_count"]) == (3, 5)
    assert (line["prompt_eval_duration"], line["eval_duration"]) == (7 * 10**9, 3 * 10**9)
    assert line["total_duration"] == 10 * 10**9


def test_a_raw_prompt_of_ollama_has_no_template(at, model):
    ids = model.tokenizer.encode("Hello").tolist()
    want = alone(model, ids, tokens=96 - len(ids), seed=1, temperature=0.5).answer
    body = {"prompt": "Hello", "raw": True, "stream": False, "options": {"seed": 1}}
    said = post(at, "/api/generate", body)[2]
    assert said["response"] == want and said["prompt_eval_count"] == len(ids)


def test_ollama_forgets_the_oldest_messages(at):
    long = [m for _ in range(20) for m in ({"role": "user", "content": "Hello there"},
                                           {"role": "assistant", "content": "Hi"})]
    body = {"messages": [*long, *HELLO], "stream": False}
    status, _, said = post(at, "/api/chat", body)
    assert status == 200 and said["prompt_eval_count"] <= 72
    assert post(at, "/v1/chat/completions", {"messages": body["messages"]})[0] == 400


@pytest.mark.parametrize("path, body, words", [
    ("chat", {"options": {"temprature": 1}, "messages": HELLO}, "'temprature'"),
    ("chat", {"options": 5, "messages": HELLO}, "options is 5"),
    ("chat", {"options": {"num_predict": 5000}, "messages": HELLO}, "at most 4096 tokens"),
    ("generate", {"prompt": "a", "raw": True, "system": "b"}, "no system message"),
    ("generate", {"prompt": "a", "format": "yaml"}, "expected 'json' or a JSON schema"),
    ("generate", {"prompt": "a", "format": {"type": "what"}}, "what"),
    ("generate", {"prompt": "word " * 200}, "do not fit"),
    ("show", {"name": [1]}, "expected a string")])
def test_ollama_s_errors_have_its_format(at, path, body, words):
    status, _, said = post(at, f"/api/{path}", body)
    assert status in (400, 404) and words in said["error"], said


def test_ollama_knows_the_model(at, file):
    [tag] = send(at, "GET", "/api/tags")[2]["models"]
    assert tag["name"] == tag["model"] == "little:latest" and len(tag["digest"]) == 64
    found = post(at, "/api/show", {"model": tag["name"]})[2]
    assert found["capabilities"] == ["completion"]
    assert found["model_info"]["nanoeuler.context_length"] == 96


@pytest.mark.parametrize("seconds, said", [
    (1769860800.5, "2026-01-31T12:00:00.500000Z"), (0, "1970-01-01T00:00:00.000000Z"),
    (1e12, "9999-01-01T00:00:00.000000Z"), (2**62, "9999-01-01T00:00:00.000000Z"),
    (-1e12, "0001-01-01T00:00:00.000000Z")])
def test_every_file_time_can_be_shown(at, there, seconds, said, monkeypatch):
    """A file may have a time after the year 9999 or before the year 1."""
    from nanoeuler_parts.serve import ollama
    assert ollama.timestamp(seconds) == said
    monkeypatch.setitem(there[1].default.card, "modified", seconds)
    assert send(at, "GET", "/api/tags")[2]["models"][0]["modified_at"] == said
    assert post(at, "/api/show", {"model": "little"})[2]["modified_at"] == said


def test_line_ends_of_unicode_do_not_break_a_stream():
    """httpx splits the lines of a stream at them."""
    from nanoeuler_parts.serve.protocol import encoded
    body = {"text": "a\u2028b\u2029c\x85d\n"}
    raw = encoded(body).decode()
    assert len(raw.splitlines()) == 1 and json.loads(raw) == body


# ---- access and the log
def test_every_address_but_the_pages_needs_the_key(file):
    with serving(file, api_key="s3cret") as (at, _):
        asked = [*(("GET", path) for path in ("/models", "/v1", "/api/tags", "/models/little")),
                 *(("POST", path) for path in (
                     "/chat/completions", "/completions", "/responses", "/v1/responses",
                     "/api/chat", "/api/generate", "/api/show"))]
        for method, path in asked:
            assert send(at, method, path, {} if method == "POST" else None)[0] == 401, path
        status, _, said = post(at, "/api/chat", {"messages": HELLO})
        assert status == 401 and "API key is missing" in said["error"]
        assert send(at, "GET", "/")[0] == send(at, "GET", "/tour")[0] == 200


def test_foreign_pages_cannot_use_ollama_s_addresses(at):
    """Though these accept any type of body"""
    for more in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
        kind = {"content-type": "text/plain", **more}
        assert post(at, "/api/generate", {"prompt": "a"}, **kind)[0] == 403


def test_pages_that_are_allowed_may_send_the_headers_of_a_client(file):
    """OpenAI's client in a browser sends headers of its own."""
    with serving(file, origin=["https://friend.example"]) as (at, _):
        headers = {"origin": "https://friend.example",
                   "access-control-request-headers": "authorization,x-stainless-os"}
        allowed = send(at, "OPTIONS", "/v1/models", headers=headers)[1]
        assert "x-stainless-os" in allowed["access-control-allow-headers"]


def test_the_log_has_a_line_for_each_request(file, capsys):
    with serving(file, access_log=True) as (at, _):
        post(at, "/v1/chat/completions", {"messages": HELLO, "max_tokens": 5})
        post(at, "/api/generate", {"prompt": "a", "raw": True, "options": {"num_predict": 4}})
        send(at, "GET", "/v1/nothing?key=secret")
        send(at, "GET", "/%1b%5b31m")
    lines = [re.sub(r"\d+ ms$", "7 ms", line) for line in capsys.readouterr().err.splitlines()]
    n = int(lines[0].split()[4])
    assert lines == [f"POST /v1/chat/completions 200 little {n} + 5 tokens 7 ms",
                     "POST /api/generate 200 little 1 + 4 tokens 7 ms", "GET /v1/nothing 404 7 ms",
                     r"GET /\x1b[31m 404 7 ms"]
    with serving(file, access_log=False) as (at, server):
        send(at, "GET", "/health")
        until(lambda: server.requests.answered())
    assert capsys.readouterr().err == "" and Serving().access_log


@pytest.mark.parametrize("n", [12_345, 999_999, 1_250_000, 123_456_789, 7_300_000_000])
@pytest.mark.parametrize("weights, level", [
    ("f32", "F32"), ("bf16", "BF16"), ("int8", "INT8"), ("", "unknown")])
def test_ollama_is_told_the_size_and_the_format_of_a_model(n, weights, level):
    """The size in millions of parameters; a model that is not loaded may have no format yet."""
    from nanoeuler_parts.serve.ollama import details
    found = details({"parameters": n, "weights": weights})
    size, unit = found["parameter_size"][:-1], found["parameter_size"][-1]
    assert unit == "M" and abs(float(size) * 1e6 - n) <= 0.05e6 + 1
    assert found["quantization_level"] == level and found["parent_model"] == ""
