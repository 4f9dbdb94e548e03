"""What clients of OpenAI and Ollama send: each habit gets an answer, or a 4xx that says why not.
`pytest -s tests/test_clients.py` prints the table."""
import json

import pytest
from helpers import needs, ROOT
from servers import chat_model, send, serving

pytestmark = pytest.mark.cli
needs("starlette")
needs("uvicorn")

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hel"},
                                      {"type": "text", "text": "lo"}]}]
EXCHANGE = [{"role": "system", "content": "Be brief."}, *HELLO,
            {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Who?"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
ITEM = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [
    {"type": "output_text", "text": "Hi.", "annotations": [], "logprobs": []}]}
INPUT = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
OPTIONS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "num_predict": 8, "num_ctx": 2048,
           "repeat_penalty": 1.1, "repeat_last_n": 64, "stop": ["###"], "seed": 42, "mirostat": 0}


def few(body):
    return {"max_tokens": 8, **body}


# (client, habit, method, address, body, text that a 4xx says, or "" for an answer).  The requests
# of LangChain, LiteLLM and Ollama are those that langchain-openai 1.7, langchain-ollama 1.1,
# litellm 1.110 and ollama 0.6 sent.
HABITS = [
    ("curl", "chat", "POST", CHAT, few({"messages": HELLO}), ""),
    ("curl", "no model's name", "POST", TEXT, {"prompt": "Hello"}, ""),
    ("curl", "address without /v1", "POST", "/chat/completions", few({"messages": HELLO}), ""),
    ("curl", "prompt without /v1", "POST", "/completions", {"prompt": "Hello"}, ""),
    ("curl", "models", "GET", "/v1/models", None, ""),
    ("curl", "models without /v1", "GET", "/models", None, ""),
    ("curl", "the address itself", "GET", "/v1", None, ""),
    ("curl", "embeddings", "POST", "/v1/embeddings", {"input": "a"}, "no embeddings"),
    ("curl", "speech", "POST", "/v1/audio/speech", {"input": "a"}, "no audio"),
    ("curl", "transcription", "POST", "/v1/audio/transcriptions", {}, "no audio"),
    ("curl", "a picture", "POST", "/v1/images/generations", {"prompt": "a"}, "no images"),
    ("curl", "moderation", "POST", "/v1/moderations", {"input": "a"}, "no moderation"),
    ("LM Studio", "-1 tokens", "POST", CHAT, {"messages": HELLO, "max_tokens": -1}, ""),
    ("OpenAI", "all that is ignored", "POST", CHAT, few({
        "messages": HELLO, "user": "me", "store": True, "metadata": {"a": "b"},
        "service_tier": "priority", "safety_identifier": "x", "prompt_cache_key": "y",
        "prompt_cache_retention": "24h"}), ""),
    ("OpenAI", "role developer", "POST", CHAT, few({"messages": [
        {"role": "developer", "content": "Be brief."}, *HELLO]}), ""),
    ("OpenAI", "name of a speaker", "POST", CHAT, few({"messages": [
        {"role": "user", "name": "Ann", "content": "Hello"}]}), ""),
    ("OpenAI", "content in parts", "POST", CHAT, few({"messages": PARTS}), ""),
    ("OpenAI", "a message of its own", "POST", CHAT, few({"messages": [*HELLO, {
        "role": "assistant", "content": "Hi.", "refusal": None, "annotations": [], "audio": None,
        "function_call": None, "tool_calls": None}, *HELLO]}), ""),
    ("OpenAI", "neutral values", "POST", CHAT, few({
        "messages": HELLO, "n": 1, "logit_bias": None, "response_format": {"type": "text"},
        "tools": [], "tool_choice": "none", "parallel_tool_calls": True, "modalities": ["text"],
        "reasoning_effort": "none"}), ""),
    ("OpenAI", "usage of a stream", "POST", CHAT, few({
        "messages": HELLO, "stream": True,
        "stream_options": {"include_usage": True, "include_obfuscation": False}}), ""),
    ("OpenAI", "a picture to look at", "POST", CHAT, {"messages": [
        {"role": "user", "content": [IMAGE]}]}, "expected a text"),
    ("OpenAI", "tools", "POST", CHAT, {"messages": HELLO, "tools": [TOOL]}, "tools"),
    ("OpenAI", "result of a tool", "POST", CHAT, {"messages": [*HELLO, {
        "role": "tool", "tool_call_id": "1", "content": "4"}]}, "tool_call_id"),
    ("OpenAI", "sound", "POST", CHAT, {"messages": HELLO, "modalities": ["text", "audio"]},
     "modalities"),
    ("OpenAI", "response", "POST", RESPONSES, {"model": "x", "input": "Hello"}, ""),
    ("OpenAI", "response in parts", "POST", RESPONSES, {"input": [INPUT]}, ""),
    ("OpenAI", "response to a conversation", "POST", RESPONSES, {
        "input": [INPUT, ITEM, INPUT], "instructions": "Be brief.", "store": False,
        "max_output_tokens": 8, "truncation": "auto"}, ""),
    ("OpenAI", "stored response", "POST", RESPONSES, {
        "input": "Hello", "previous_response_id": "resp_1"}, "stores no responses"),
    ("OpenAI", "response to be stored", "POST", RESPONSES, {"input": "Hello", "store": True},
     "store: false"),
    ("OpenAI", "a response by its id", "GET", "/v1/responses/resp_1", None, "stored responses"),
    ("OpenAI", "a built-in tool", "POST", RESPONSES, {
        "input": "Hello", "tools": [{"type": "web_search"}]}, "tools"),
    ("vLLM", "restricted sampling", "POST", CHAT, few({
        "messages": HELLO, "top_k": -1, "min_p": 0.05, "repetition_penalty": 1.1,
        "skip_special_tokens": True, "ignore_eos": False, "min_tokens": 0, "stop_token_ids": [],
        "use_beam_search": False, "spaces_between_special_tokens": True}), ""),
    ("vLLM", "continued answer", "POST", CHAT, few({
        "messages": [*HELLO, {"role": "assistant", "content": "Hi, I am"}],
        "continue_final_message": True, "add_generation_prompt": False}), ""),
    ("vLLM", "nothing to continue", "POST", CHAT, few({
        "messages": HELLO, "continue_final_message": True}), "expected false"),
    ("llama.cpp", "sampling", "POST", CHAT, few({
        "messages": HELLO, "repeat_penalty": 1.1, "repeat_last_n": 64, "cache_prompt": True,
        "typical_p": 1.0, "mirostat": 0}), ""),
    ("llama.cpp", "continued answer", "POST", CHAT, few({
        "messages": [*HELLO, {"role": "assistant", "content": "Hi, I am"}]}), ""),
    ("llama.cpp", "mirostat", "POST", TEXT, {"prompt": "a", "mirostat": 2}, "mirostat"),
    ("Open WebUI", "chat", "POST", "/chat/completions", {
        "stream": True, "model": "little", "messages": HELLO,
        "stream_options": {"include_usage": True}}, ""),
    ("Open WebUI", "title of a chat", "POST", CHAT, {
        "model": "little", "messages": HELLO, "stream": False, "max_completion_tokens": 60}, ""),
    ("Open WebUI", "chat with Ollama", "POST", "/api/chat", {
        "model": "little:latest", "messages": HELLO, "options": {}, "stream": True,
        "keep_alive": "5m"}, ""),
    ("LangChain", "messages", "POST", CHAT, {
        "model": "x", "stream": False, "messages": EXCHANGE}, ""),
    ("LangChain", "completion", "POST", TEXT, {
        "model": "x", "stream": True, "prompt": "A cat is", "frequency_penalty": 0,
        "logprobs": None, "max_tokens": 256, "n": 1, "presence_penalty": 0, "seed": None,
        "temperature": 0.7, "top_p": 1}, ""),
    ("LangChain", "log-probabilities", "POST", CHAT, {
        "model": "x", "messages": HELLO, "logprobs": True, "top_logprobs": 2}, ""),
    ("LangChain", "response", "POST", RESPONSES, {"model": "x", "stream": True, "input": [
        {"content": "Hello", "role": "user", "type": "message"}]}, ""),
    ("LangChain", "embeddings", "POST", "/v1/embeddings", {
        "model": "text-embedding-ada-002", "input": ["a"], "encoding_format": "base64"},
     "no embeddings"),
    ("LangChain", "chat with Ollama", "POST", "/api/chat", {
        "model": "little", "stream": True, "options": {"num_predict": 8, "temperature": 0.0},
        "messages": HELLO, "tools": []}, ""),
    ("LangChain", "prompt for Ollama", "POST", "/api/generate", {
        "model": "little", "stream": True, "options": {}, "format": "", "prompt": "Hello"}, ""),
    ("LiteLLM", "chat with Ollama", "POST", "/api/chat", json.dumps({
        "model": "little", "messages": [{**HELLO[0], "images": []}], "options": {},
        "stream": False}).encode(), ""),
    ("LiteLLM", "prompt for Ollama", "POST", "/api/generate", json.dumps({
        "model": "little", "prompt": "### User:\nHello\n\n", "options": {}, "stream": False,
        "images": []}).encode(), ""),
    ("Ollama", "is there a server?", "HEAD", "/", None, ""),
    ("Ollama", "version", "GET", "/api/version", None, ""),
    ("Ollama", "list", "GET", "/api/tags", None, ""),
    ("Ollama", "ps", "GET", "/api/ps", None, ""),
    ("Ollama", "show", "POST", "/api/show", {"model": "little"}, ""),
    ("Ollama", "show another model", "POST", "/api/show", {"name": "llama3"}, ""),
    ("Ollama", "load", "POST", "/api/generate", {"model": "little"}, ""),
    ("Ollama", "chat", "POST", "/api/chat", {
        "model": "little", "stream": False, "options": OPTIONS, "messages": EXCHANGE,
        "tools": []}, ""),
    ("Ollama", "prompt", "POST", "/api/generate", {
        "model": "little", "prompt": "Hello", "system": "Be brief.", "options": OPTIONS}, ""),
    ("Ollama", "raw prompt", "POST", "/api/generate", {
        "model": "little", "prompt": "Hello", "raw": True, "stream": False}, ""),
    ("Ollama", "curl -d", "POST", "/api/generate", b'{"model": "little", "prompt": "Hello"}', ""),
    ("Ollama", "JSON mode", "POST", "/api/chat", {
        "messages": HELLO, "format": {"enum": ["yes", "no"]}, "stream": False}, ""),
    ("OpenAI", "structured output", "POST", "/v1/chat/completions", {
        "messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {
            "name": "a", "schema": {"enum": ["yes", "no"]}}}}, ""),
    ("OpenAI", "structured response", "POST", "/v1/responses", {"input": "Hello", "text": {
        "format": {"type": "json_schema", "name": "a", "schema": {"enum": ["yes", "no"]}}}}, ""),
    ("Ollama", "tools", "POST", "/api/chat", {"messages": HELLO, "tools": [TOOL]}, "tools"),
    ("Ollama", "a picture", "POST", "/api/generate", {"prompt": "a", "images": ["AA=="]},
     "images"),
    ("Ollama", "thoughts", "POST", "/api/chat", {"messages": HELLO, "think": True}, "think"),
    ("Ollama", "embeddings", "POST", "/api/embed", {"model": "little", "input": "a"},
     "no embeddings"),
    ("Ollama", "pull", "POST", "/api/pull", {"model": "llama3"}, "no model management"),
    ("Ollama", "delete", "DELETE", "/api/delete", {"model": "little"}, "no model management"),
    ("Ollama", "copy", "POST", "/api/copy", {"source": "little", "destination": "b"},
     "no model management"),
    ("Ollama", "create a blob", "POST", "/api/blobs/sha256:00", {}, "no model management"),
    ("OpenAI", "tokens of an input", "POST", "/v1/responses/input_tokens", {"input": "Hello"},
     "no token counts"),
    ("OpenAI", "a conversation", "POST", "/v1/conversations", {}, "no stored conversations"),
    ("OpenAI", "delete a model", "DELETE", "/v1/models/little", None, "the method DELETE"),
    ("OpenAI", "most calls of tools", "POST", RESPONSES, {
        "input": "Hello", "max_output_tokens": 8, "max_tool_calls": 2}, ""),
]


@pytest.fixture(scope="module")
def at(tmp_path_factory, tokenizer):
    file = chat_model(tmp_path_factory.mktemp("served") / "little.bin", tokenizer)
    with serving(file) as (address, _):
        yield address


@pytest.fixture(scope="module")
def table():
    rows = []
    yield rows
    print()
    for client, habit, status, said in rows:
        print(f"{client:<11} {habit:<28} {status}  {said[:90]}")


def words(said):
    """The text of a response of any kind, whole, as events or as lines"""
    if isinstance(said, str):
        lines = [line.removeprefix("data: ") for line in said.splitlines()]
        return "".join(words(json.loads(line)) for line in lines if line.startswith("{"))
    if "choices" in said:
        return "".join(c["text"] if "text" in c else
                       (c.get("message") or c["delta"]).get("content", "")
                       for c in said["choices"])
    if said.get("object") == "response":
        return said["output"][0]["content"][0]["text"]
    if said.get("type", "").startswith("response."):
        return said["delta"] if said["type"] == "response.output_text.delta" else ""
    return said.get("response") or said.get("message", {}).get("content", "")


@pytest.mark.parametrize("client, habit, method, path, body, reason", HABITS,
                         ids=[f"{row[0]}: {row[1]}" for row in HABITS])
def test_habit(at, table, client, habit, method, path, body, reason):
    kind = {"content-type": "application/x-www-form-urlencoded"} if type(body) is bytes else {}
    status, headers, said = send(at, method, path, body, kind)
    if reason:
        message = said["error"] if path.startswith("/api") else said["error"]["message"]
        assert 400 <= status < 500 and reason in message, said
        assert path.startswith("/api") or said["error"]["type"] == "invalid_request_error"
        table.append((client, habit, status, message))
        return
    table.append((client, habit, status, words(said).replace("\n", " ") if method == "POST" else
                  str(said)[:60].replace("\n", " ")))
    assert status == 200, said
    is_text = method == "POST" and habit not in ("load", "show", "show another model")
    assert bool(words(said)) == is_text or method != "POST"


def test_the_client_of_ollama(at):
    """Its objects are built from each response, and its refusals are those that the docs list."""
    ollama = needs("ollama")
    client, few = ollama.Client(host=at), {"num_predict": 6, "seed": 3}
    assert [m.model for m in client.list().models] == ["little:latest"]
    assert client.ps().models[0].context_length == 96
    assert client.show("little").modelinfo["nanoeuler.block_count"]
    said = client.chat("little", HELLO, options=few, logprobs=True, top_logprobs=2)
    assert said.done_reason == "length" and len(said.logprobs) == said.eval_count == 6
    parts = [*client.chat("little", HELLO, options=few, stream=True, think=False)]
    assert "".join(part.message.content for part in parts) == said.message.content
    history = [*HELLO, ollama.Message(role="assistant", content="Hi", thinking="Hm."), *HELLO]
    assert client.chat("little", history, options=few).message.content
    said = client.generate("little", "Hello", options=few, logprobs=True)
    assert len(said.logprobs) == 6 and said.response
    assert client.generate("little", "Hello", options={"num_predict": 6, "draft_num_predict": 2})
    schema = {"enum": ["yes", "no"]}
    assert json.loads(client.chat("little", HELLO, format=schema).message.content) in ("yes", "no")
    docs = (ROOT / "docs/serving-api.md").read_text()
    for name, call in (
            ("think", lambda: client.chat("little", HELLO, think=True)),
            ("tools", lambda: client.chat("little", HELLO, tools=[TOOL])),
            ("tool_calls", lambda: client.chat("little", [{
                **HELLO[0], "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}])),
            ("images", lambda: client.generate("little", "a", images=["AA=="])),
            ("suffix", lambda: client.generate("little", "a", suffix="b")),
            ("template", lambda: client.generate("little", "a", template="b")),
            ("context", lambda: client.generate("little", "a", context=[1])),
            ("width", lambda: client.generate("little", "a", width=8)),
            ("mirostat", lambda: client.chat("little", HELLO, options={"mirostat": 1})),
            ("typical_p", lambda: client.chat("little", HELLO, options={"typical_p": 0.5})),
            ("/api/embed", lambda: client.embed("little", "a")),
            ("/api/embeddings", lambda: client.embeddings("little", "a")),
            ("/api/pull", lambda: client.pull("llama3")),
            ("/api/push", lambda: client.push("llama3")),
            ("/api/create", lambda: client.create("new", from_="little")),
            ("/api/copy", lambda: client.copy("little", "b")),
            ("/api/delete", lambda: client.delete("little")),
            ("/api/blobs/", lambda: client.create_blob(__file__))):
        with pytest.raises(ollama.ResponseError) as refused:
            call()
        said = refused.value
        assert said.status_code == (404 if name.startswith("/") else 400) and name in said.error
        assert f"`{name}" in docs


def test_there_are_as_many_habits_as_promised():
    assert len(HABITS) >= 40 and len({row[:2] for row in HABITS}) == len(HABITS)


def test_what_is_ignored_does_not_change_a_reply(at):
    from nanoeuler_parts.serve.values import IGNORED
    body = {"messages": HELLO, "max_tokens": 20, "seed": 3}
    plain = words(send(at, "POST", CHAT, body)[2])
    for name in IGNORED:
        assert words(send(at, "POST", CHAT, {**body, name: True})[2]) == plain
    named = [{**HELLO[0], "name": "Ann"}]
    assert words(send(at, "POST", CHAT, {**body, "messages": named})[2]) == plain
