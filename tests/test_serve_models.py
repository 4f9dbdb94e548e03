"""Several models in one server: their names, their loading, their answers and the end."""
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from children import PATIENCE
from helpers import ROOT, needs, refused
from models import write
from servers import CFG, chat_model, post, send, serving, until

import nanoeuler as ne
from nanoeuler_parts.chat.sampling import ChatSampling
from nanoeuler_parts.checkpoint.file import open_checkpoint

pytestmark = pytest.mark.cli
needs("starlette")
needs("uvicorn")
TEXT, HELLO = "/v1/completions", [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def files(tmp_path_factory, tokenizer):
    """A chat model, and a base model of another shape"""
    folder = tmp_path_factory.mktemp("served")
    base = ne.replace(CFG, seq_len=64, n_layer=1)
    return [chat_model(folder / "first.bin", tokenizer),
            str(write(folder / "second.bin", base, tokenizer))]


@pytest.fixture(scope="module")
def alone(files):
    """What each model writes without a server, by its name"""
    models = {name: ne.load(file) for name, file in zip(("first", "second"), files)}

    def text(name, prompt, **sampling):
        model = models[name]
        options = ne.Sampling(**{"temperature": 1.0, **sampling}).check()
        [(_, [reply])] = model.answers_to([model.tokenizer.encode(prompt).tolist()], options, 1,
                                          ne.Pace())
        return reply.answer
    return text


@pytest.fixture(scope="module")
def there(files):
    with serving(*files) as found:
        yield found


def text_of(address, model, prompt="To be", **more):
    status, _, said = post(address, TEXT, {"model": model, "prompt": prompt, **more})
    assert status == 200, said
    return said["choices"][0]["text"]


def cards(address):
    return {card["id"]: card for card in send(address, "GET", "/v1/models")[2]["data"]}


# ---- answers
def test_each_model_gives_its_own_answers(there, alone):
    """One after another and at the same time, to the bit"""
    address, _ = there
    asked = [(("first", "second")[i % 2], "abcdefgh"[:1 + i % 7], 5 + i % 20, i) for i in range(48)]

    def one(case):
        name, prompt, tokens, seed = case
        return text_of(address, name, prompt, max_tokens=tokens, seed=seed)

    with ThreadPoolExecutor(16) as pool:
        at_once = [*pool.map(one, asked)]
    for case, found in zip(asked, at_once):
        name, prompt, tokens, seed = case
        assert found == alone(name, prompt, tokens=tokens, seed=seed)
    assert [one(case) for case in asked[:8]] == at_once[:8]
    assert alone("first", "abc", tokens=20) != alone("second", "abc", tokens=20)


def test_every_protocol_selects_a_model(there):
    """By the length of its context, which only the right model has"""
    address, _ = there
    ids = {"first": 90, "second": 60}
    for name, n in ids.items():
        body = {"model": name, "prompt": [5] * n, "max_tokens": 1}
        status, _, said = post(address, "/completions", body)
        assert (status, said["model"]) == (200, name)
    assert post(address, TEXT, {"model": "second", "prompt": [5] * 90})[0] == 400
    for path, body in (("/v1/chat/completions", {"messages": HELLO}), ("/v1/responses", {
            "input": "Hello"}), ("/api/chat", {"messages": HELLO, "stream": False})):
        assert post(address, path, {"model": "first", **body})[0] == 200
        assert "not a chat model" in str(post(address, path, {"model": "second", **body})[2])
    body = {"model": "second:latest", "prompt": "a", "stream": False, "options": {"seed": 1}}
    assert post(address, "/api/generate", body)[2]["model"] == "second:latest"


def test_turns_are_taken_in_the_order_of_arrival():
    """Also by a thread that asks again at once.  Each waits for the end of the turn before."""
    from nanoeuler_parts.serve.engine import Turns
    turns, order, entered = Turns(), [], threading.Event()

    def again_and_again():
        for _ in range(5):
            with turns:
                entered.set()
                until(lambda: len(turns.queue) == 2 or "b" in order)
                time.sleep(0.01)             # for the other thread, if it does not wait
                order.append("a")

    def once():
        assert entered.wait(PATIENCE)
        with turns:
            order.append("b")

    threads = [threading.Thread(target=target, daemon=True) for target in (again_and_again, once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert order[:2] == ["a", "b"] and not turns.queue


# ---- names
@pytest.mark.parametrize("name, found", [
    ("first", "first"), ("second", "second"), ("second.bin", "second"), ("model", "first"),
    ("", "first"), (None, "first"), ("second:latest", "second"), ("model:latest", "first")])
def test_names(there, name, found):
    body = {"model": name, "prompt": "a", "max_tokens": 1}
    assert post(there[0], TEXT, body)[2]["model"] == found
    if name:
        assert send(there[0], "GET", f"/v1/models/{name}")[2]["id"] == found


@pytest.mark.parametrize("name", ["gpt-4o-mini", "box", "third.bin", "First", "first/second"])
def test_an_unknown_name_is_answered_with_the_known_ones(there, name):
    for method, path, body in (("POST", TEXT, {"model": name, "prompt": "a"}),
                               ("POST", "/api/explain", {"model": name, "tokens": [1]}),
                               ("GET", f"/v1/models/{name}", None),
                               ("GET", f"/api/model?model={name}", None)):
        status, _, said = send(there[0], method, path, body)
        assert (status, said["error"]["code"]) == (404, "model_not_found")
        assert "this server has 'first', 'second'" in said["error"]["message"]
    for path, body in (("chat", {"messages": HELLO}), ("show", {})):
        status, _, said = post(there[0], f"/api/{path}", {"model": name, **body})
        assert status == 404 and "not found; this server has 'first'" in said["error"]
    status, _, said = post(there[0], TEXT, {"model": ["first"], "prompt": "a"})
    assert status == 400 and "expected a string" in said["error"]["message"]


def test_a_model_s_own_name_takes_precedence(tmp_path, tokenizer, monkeypatch):
    """`model` is then no name of the default model; no name still means that one."""
    from nanoeuler_parts.serve.models import Models
    from nanoeuler_parts.serve.verb import Serving
    made = {name: chat_model(tmp_path / f"{name}.bin", tokenizer)
            for name in ("mine", "model", "shipped", "box")}
    monkeypatch.setattr("nanoeuler_parts.checkpoint.bundled.SHIPPED", made["shipped"])
    models = Models([made["mine"], made["model"], made["shipped"]], ne.Decoder, Serving())
    assert [*models.by_name] == ["mine", "model", "bundled"]
    assert models.find("model").name == "model" and models.of_request({}).name == "mine"
    assert models.find("box").name == models.find("bundled").name == "bundled"
    models = Models([made["box"], made["shipped"]], ne.Decoder, Serving())
    assert models.find("box").name == "box"


def listed(address):
    """The names of the models, which all lists have in the same order"""
    names = [*cards(address)]
    tags = [tag["name"] for tag in send(address, "GET", "/api/tags")[2]["models"]]
    assert tags == [f"{name}:latest" for name in names]
    return names


def test_the_lists_follow_the_folder(tmp_path, tokenizer, monkeypatch):
    """New models, changed ones, deleted ones and files that are none; the default, and those in
    memory, stay."""
    from nanoeuler_parts.serve import models as module
    monkeypatch.setattr(module, "SCAN_SECONDS", 0)
    base = ne.replace(CFG, seq_len=64, n_layer=1)

    def put(name, cfg, age):
        path = tmp_path / name
        write(path, cfg, tokenizer)
        os.utime(path, (1e9 - age, 1e9 - age))

    chat = chat_model(tmp_path / "mine.bin", tokenizer)
    os.utime(chat, (1e9 - 50, 1e9 - 50))
    with serving(chat, folder=str(tmp_path)) as (address, server):
        assert listed(address) == ["mine"]
        put("old.bin", base, 9)
        put("new.bin", base, 5)
        (tmp_path / "notes.bin").write_text("not a model")
        (tmp_path / "broken.bin").write_bytes((tmp_path / "new.bin").read_bytes()[:300])
        assert listed(address) == ["mine", "new", "old"]
        assert cards(address)["old"]["context"] == 64
        put("old.bin", ne.replace(base, seq_len=32), 1)
        assert listed(address) == ["mine", "old", "new"]
        assert cards(address)["old"]["context"] == 32
        assert text_of(address, "old", "a", max_tokens=1)
        os.remove(tmp_path / "new.bin")
        os.remove(tmp_path / "old.bin")
        assert listed(address) == ["mine", "old"]
        put("late.bin", base, 0)             # found by its name, without a list before
        assert text_of(address, "late", "a", max_tokens=1)
        assert "unknown" not in cards(address) and server.models.default.name == "mine"


def test_the_folder_is_read_once_per_second(files, tmp_path, monkeypatch):
    from nanoeuler_parts.serve import models as module
    from nanoeuler_parts.serve.verb import Serving
    scans, clock = [], [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr("nanoeuler_parts.chat.models.models_in",
                        lambda folder: scans.append(folder) or [])
    models = module.Models(files[:1], ne.Decoder, Serving(), str(tmp_path))
    for now in (100.0, 100.5, 100.99, 101.0, 101.5, 102.0):
        clock[0] = now
        models.refresh()
        assert models.find("nothing") is models.default
    assert len(scans) == 3
    module.Models(files, ne.Decoder, Serving()).refresh()
    assert len(scans) == 3                   # models that were named stay as they are


def test_the_default_is_a_model_that_answers(tmp_path, tokenizer, monkeypatch, capsys):
    from nanoeuler_parts.serve import verb
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    shipped = chat_model(tmp_path / "elsewhere" / "shipped", tokenizer)
    monkeypatch.setattr("nanoeuler_parts.checkpoint.bundled.SHIPPED", shipped)
    assert verb.models_to_serve([]) == ([shipped], os.curdir)
    write(tmp_path / "base.bin", CFG, tokenizer)
    assert verb.models_to_serve([]) == ([shipped], os.curdir)
    assert "no chat model" in capsys.readouterr().err
    for name, age in (("a.bin", 9), ("b.bin", 5)):
        chat_model(tmp_path / name, tokenizer)
        os.utime(name, (1e9 - age, 1e9 - age))
    assert verb.models_to_serve([]) == (["b.bin", shipped], os.curdir)
    os.remove(shipped)
    assert verb.models_to_serve([]) == (["b.bin"], os.curdir)
    assert verb.models_to_serve(["base.bin"]) == (["base.bin"], None)


def test_a_model_of_dpo_is_served(tmp_path, tokenizer, monkeypatch):
    """Its checkpoint has a tensor of another type, the reference, which every reader accepts"""
    from nanoeuler_parts.serve import server, verb
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nanoeuler_parts.checkpoint.bundled.SHIPPED", "absent")
    chat_model("better.bin", tokenizer, reference=[1.5, 2.5])
    stopped = RuntimeError("all checks before the port have passed")

    def listening(options):
        raise stopped

    monkeypatch.setattr(server, "listening", listening)
    for files in (["better.bin"], []):
        with pytest.raises(RuntimeError) as error:
            verb.serve(files, port=0)
        assert error.value is stopped


def test_a_damaged_file_in_the_folder_is_skipped_with_a_note(tmp_path, tokenizer, monkeypatch,
                                                             capsys):
    """One whose data is damaged is not the default, and one whose header is, is not served"""
    from nanoeuler_parts.serve import verb
    from nanoeuler_parts.serve.models import Models
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nanoeuler_parts.checkpoint.bundled.SHIPPED", "absent")
    for name, age in (("good.bin", 9), ("bad.bin", 5), ("short.bin", 3)):
        raw = bytearray(open(chat_model(tmp_path / name, tokenizer), "rb").read())
        raw[-1] ^= name == "bad.bin"
        (tmp_path / name).write_bytes(raw[:len(raw) - 10 * (name == "short.bin")])
        os.utime(name, (1e9 - age, 1e9 - age))
    files, folder = verb.models_to_serve([])
    assert files == ["good.bin"]
    said = capsys.readouterr().err
    assert "note: bad.bin: the checksum does not match" in said and "is the default" in said
    models = Models(files, ne.Decoder, verb.Serving(), folder)
    assert "short" not in models.by_name and models.default.name == "good"
    said = capsys.readouterr().err
    assert said.count("note: ") == 1 and "short.bin" in said and "is not served" in said
    os.utime("short.bin", (1e9, 1e9))
    models.scanned = float("-inf")
    models.refresh()
    assert capsys.readouterr().err == ""     # it is said once
    with pytest.raises(ne.UserError, match="checksum"):
        verb.serve(["bad.bin"], port=0)      # a file that was named must be right


@pytest.mark.parametrize("path, instead", [
    ("/v1/chat/completions", "/v1/completions"), ("/v1/responses", "/v1/completions"),
    ("/api/chat", "/api/generate")])
def test_advice_comes_in_the_reader_s_order_and_works(there, path, instead):
    """A missing field first; then a model of this server that answers, and where texts continue"""
    field = "input" if path == "/v1/responses" else "messages"
    asked = {field: HELLO, "model": "second"}
    status, _, said = post(there[0], path, asked)
    message = said["error"] if path.startswith("/api") else said["error"]["message"]
    assert status == 400 and "the model second is not a chat model" in message
    assert f"at {instead}" in message and "use the model first for chats" in message
    assert post(there[0], path, {**asked, "model": "first", "stream": False})[0] == 200
    if path.startswith("/v1"):
        message = post(there[0], path, {"model": "second"})[2]["error"]["message"]
        assert message == f"the parameter {field} is missing; add it"


def test_the_lists_of_models(files):
    with serving(*files) as (address, _):
        first, second = cards(address).values()
        assert (first["id"], second["id"]) == ("first", "second")
        assert (first["loaded"], second["loaded"]) == (True, False)
        assert first["object"] == second["object"] == "model"
        assert (second["context"], second["kind"], second["answers"]) == (64, "base", False)
        assert second["temperature"] == ne.Sampling.temperature
        assert (first["kind"], first["temperature"]) == ("chat", ChatSampling.temperature)
        tags = send(address, "GET", "/api/tags")[2]["models"]
        assert [tag["name"] for tag in tags] == ["first:latest", "second:latest"]
        running = send(address, "GET", "/api/ps")[2]["models"]
        assert [tag["name"] for tag in running] == ["first:latest"]
        shown = post(address, "/api/show", {"model": "second"})[2]
        assert shown["model_info"]["nanoeuler.context_length"] == 64
        assert send(address, "GET", "/api/model")[2]["name"] == "first"
        about = send(address, "GET", "/api/model?model=second")[2]
        assert about["name"] == "second" and about.items() <= second.items()
        text_of(address, "second", max_tokens=1)
        now = cards(address)["second"]
        assert now == {**second, "loaded": True, "weights": "f32"}
        assert len(send(address, "GET", "/api/ps")[2]["models"]) == 2


# ---- loading
@contextlib.contextmanager
def slow_reading(monkeypatch):
    """Reading a checkpoint begins, and waits: (has begun, may go on, names)"""
    begun, go_on, names, original = threading.Event(), threading.Event(), [], open_checkpoint

    def slow(path, **more):
        names.append(os.path.basename(path))
        begun.set()
        assert go_on.wait(PATIENCE)
        return original(path, **more)

    with monkeypatch.context() as patch:
        patch.setattr("nanoeuler_parts.checkpoint.file.open_checkpoint", slow)
        try:
            yield begun, go_on, names
        finally:
            go_on.set()


def test_a_model_is_loaded_once_while_others_answer(files, monkeypatch, alone):
    with serving(*files) as (address, _), ThreadPoolExecutor(3) as pool, \
            slow_reading(monkeypatch) as (begun, go_on, names):
        waiting = [pool.submit(text_of, address, "second", "abc", max_tokens=9, seed=i)
                   for i in range(3)]
        assert begun.wait(PATIENCE)
        assert text_of(address, "first", "abc", max_tokens=9, seed=1) == alone(
            "first", "abc", tokens=9, seed=1)
        assert post(address, "/api/explain", {"tokens": [1, 2]})[0] == 200
        assert send(address, "GET", "/health")[0] == 200 and not cards(address)["second"]["loaded"]
        assert not any(future.done() for future in waiting)
        go_on.set()
        assert [future.result() for future in waiting] == [
            alone("second", "abc", tokens=9, seed=i) for i in range(3)]
        assert names == ["second.bin"]


def test_ollama_s_request_without_a_text_loads_the_model(files):
    with serving(*files) as (address, _):
        status, _, said = post(address, "/api/generate", {"model": "second", "stream": False})
        assert (status, said["done_reason"]) == (200, "load") and cards(address)["second"]["loaded"]


def test_a_client_that_leaves_does_not_stop_the_loading(files, monkeypatch, alone):
    """Its request is not answered, and the next one finds the model."""
    with serving(*files) as (address, server), slow_reading(monkeypatch) as (begun, go_on, names):
        raw = json.dumps({"model": "second", "prompt": "a"}).encode()
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as s:
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
                      b"application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(raw), raw))
            assert begun.wait(PATIENCE)
        until(lambda: server.requests.left == 1 and not server.loads)
        go_on.set()
        until(lambda: cards(address)["second"]["loaded"])
        assert text_of(address, "second", "ab", max_tokens=4, seed=2) == alone(
            "second", "ab", tokens=4, seed=2)
        assert names == ["second.bin"]


def test_a_model_that_cannot_be_loaded(files, tmp_path, tokenizer, alone):
    """Its clients get the reason, others their answers; a repaired file is loaded."""
    file = tmp_path / "second.bin"
    with open(files[1], "rb") as f:
        good = f.read()
    file.write_bytes(good)
    with serving(files[0], file) as (address, _):
        file.write_bytes(good[:-4] + b"\0\0\0\0")
        body = {"model": "second", "prompt": "a", "max_tokens": 3}
        for path, more in ((TEXT, {}), ("/api/explain", {"tokens": [1]})):
            given = {"model": "second", **more} if more else body
            status, _, said = post(address, path, given)
            assert (status, said["error"]["code"]) == (503, "model_not_loaded")
            assert "second cannot be loaded" in said["error"]["message"]
            assert "checksum" in said["error"]["message"]
        status, _, said = post(address, "/api/generate", {"model": "second", "prompt": "a"})
        assert status == 503 and "checksum" in said["error"]
        assert text_of(address, "first", "ab", max_tokens=4, seed=2) == alone(
            "first", "ab", tokens=4, seed=2)
        assert send(address, "GET", "/health")[0] == 200
        file.write_bytes(good)
        assert text_of(address, "second", "ab", max_tokens=4, seed=2) == alone(
            "second", "ab", tokens=4, seed=2)


def test_an_unexpected_failure_of_loading(files, monkeypatch, capsys):
    """As when a GPU has no memory for the KV cache: the engine's thread meets it."""
    with serving(*files) as (address, _):
        with monkeypatch.context() as patch:
            patch.setattr(ne.Decoder, "with_slots", lambda *args: 1 / 0)
            status, _, said = post(address, TEXT, {"model": "second", "prompt": "a"})
        assert status == 503 and "division by zero" in said["error"]["message"]
        assert text_of(address, "second", max_tokens=1) is not None
    assert "ZeroDivisionError" in capsys.readouterr().err


# ---- the pages' routes
def test_tokens_of_each_model_are_explained(there):
    address, _ = there
    for name, layers in (("first", CFG.n_layer), ("second", 1)):
        found = post(address, "/api/explain", {"model": name, "tokens": [1, 2], "attention": 1})[2]
        assert found["layers"] == layers
        asked = {"model": name, "tokens": [1, 2], "trajectory": True}
        assert len(post(address, "/api/explain", asked)[2]["steps"]) == 1 + 2 * layers
    rivals = [post(address, "/api/explain", {**more, "tokens": [1, 2]})[2]["rivals"]
              for more in ({}, {"model": "first"}, {"model": "second"})]
    assert rivals[0] == rivals[1] != rivals[2]


# ---- metrics and the log
def test_metrics_and_the_log_name_the_model(files, capsys):
    with serving(*files, access_log=True) as (address, _):
        text_of(address, "model", max_tokens=3, seed=1)
        before = send(address, "GET", "/metrics")[2].splitlines()
        for _ in range(2):
            text_of(address, "second", max_tokens=4, seed=1)
        after = send(address, "GET", "/metrics")[2].splitlines()
    for model, lines, tokens, loaded in (("first", before, 3, 1), ("second", before, 0, 0),
                                         ("first", after, 3, 1), ("second", after, 8, 1)):
        own = f'{{model="{model}"}}'
        assert f"nanoeuler_tokens_total{own} {tokens}" in lines
        assert f"nanoeuler_model_loaded{own} {loaded}" in lines
        assert (f"nanoeuler_slots{own} 4" in lines) == bool(loaded)
        assert f"nanoeuler_time_to_first_token_seconds_count{own} {tokens // 4 or loaded}" in lines
    assert 'nanoeuler_requests_total{path="/v1/completions",status="200"} 3' in after
    heads = [line for line in after if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))
    log = capsys.readouterr().err
    found = re.findall(r"POST /v1/completions 200 (\w+) \d+ \+ (\d) tokens", log)
    assert found == [("first", "3"), ("second", "4"), ("second", "4")]


def test_any_name_of_a_model_is_a_label():
    from nanoeuler_parts.serve.metrics import label
    assert label('a"b\\c\nd') == r'"a\"b\\c\nd"' and label("\udcff") == r'"\\udcff"'


# ---- the verb
def test_files_that_cannot_be_served_together(files, elsewhere, tokenizer, capsys):
    """Reported at the start, in one line: before the first model is loaded."""
    (elsewhere / "other").mkdir()
    same = chat_model(elsewhere / "other/first.bin", tokenizer)
    for other in same, files[0]:
        refused(capsys, "serve", files[0], other, "--port", 0,
                words=["two models have the name", files[0], other])
    with open(files[1], "rb") as f:
        half = f.read()[:-1000]
    (elsewhere / "half.bin").write_bytes(half)
    (elsewhere / "empty.bin").write_bytes(b"")
    (elsewhere / "text.bin").write_text("no checkpoint", encoding="utf-8")
    for name in "half.bin", "empty.bin", "text.bin", "none.bin":
        refused(capsys, "serve", files[0], name, "--port", 0, words=[name])


STARTS = """
import sys, threading
sys.path[:0] = [{root!r}]
import nanoeuler as ne
from nanoeuler_parts.chat import speaker
read = speaker.open_checkpoint
def slow(path, **more):
    if "second" in path:
        print("loading", flush=True)
        threading.Event().wait()
    return read(path, **more)
speaker.open_checkpoint = slow
sys.exit(ne.main(["serve", *{files!r}, "--port", "0", "--threads", "1", "--drain", "30"]))
"""


def test_sigterm_while_the_second_model_is_loaded(files, tmp_path, alone):
    """The client that waits gets an error, and the program ends long before --drain."""
    code = STARTS.format(root=str(ROOT), files=files)
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, encoding="utf-8")
    try:
        said = [process.stdout.readline() for _ in range(3)]
        assert "second.bin: " in said[1] and said[1].endswith("loaded at its first request\n")
        assert "for the chat" in said[2], process.communicate(timeout=60)
        address = said[2].split()[0].rstrip("/")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(post, address, TEXT, {"model": "second", "prompt": "a"})
            assert process.stdout.readline() == "loading\n"
            assert text_of(address, "first", "ab", max_tokens=4, seed=2) == alone(
                "first", "ab", tokens=4, seed=2)
            assert not waiting.done()
            os.kill(process.pid, signal.SIGTERM)
            status, _, said = waiting.result(60)
        assert (status, said["error"]["message"]) == (503, "the server is shutting down")
        assert process.wait(20) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()
