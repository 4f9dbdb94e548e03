"""What no client can do to the server: hold its threads, its connections, its memory or its end, be
taken for another site, or make it open or send what it should not."""
import asyncio
import contextlib
import errno
import http.client
import json
import math
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from children import PATIENCE
from helpers import ROOT, needs, never, refused
from models import write
from servers import CFG, chat_model, post, send, serving, until

import nanoeuler as ne
from nanoeuler_parts.chat import templates
from nanoeuler_parts.chat.json_schema import MOST_STEPS, PIECE
from nanoeuler_parts.chat.templates import ALPACA
from nanoeuler_parts.checkpoint.bundled import beside_program, BUNDLED, SHIPPED
from nanoeuler_parts.serve import protocol, workers
from nanoeuler_parts.serve.engine import Busy, LONGEST_PAUSE, Pieces, Turns
from nanoeuler_parts.serve.verb import Serving
from nanoeuler_parts.serve.workers import Worker

pytestmark = pytest.mark.cli
needs("starlette")
needs("uvicorn")
CHAT, TEXT, HELLO = "/v1/chat/completions", "/v1/completions", [{"role": "user", "content": "Hi"}]
LONGER = [{"role": "user", "content": "a b " * 10}]


@pytest.fixture(scope="module")
def file(tmp_path_factory, tokenizer):
    return chat_model(tmp_path_factory.mktemp("served") / "little.bin", tokenizer)


@pytest.fixture(scope="module")
def there(file):
    with serving(file) as found:
        yield found


def connected(address):
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def request_of(path, body):
    raw = json.dumps(body).encode()
    return (b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (path.encode(), len(raw), raw))


def is_closed(s):
    """Whether the server has closed a connection on which nothing is left to read"""
    ready, _, _ = select.select([s], [], [], 0)
    if not ready:
        return False
    with contextlib.suppress(ConnectionResetError):
        return s.recv(1) == b""
    return True


# ---- the work of one request
class Rendered:
    """Counts the conversations, and their messages, that are made into ids."""

    def __init__(self, monkeypatch):
        self.conversations, self.messages, self.original = 0, 0, templates.chat_ids
        monkeypatch.setattr(protocol, "chat_ids", self.chat_ids)

    def chat_ids(self, template, messages, *args):
        self.conversations += 1
        self.messages += len(messages)
        return self.original(template, messages, *args)


def alternating(n, text):
    """A conversation of n messages, of which the user says the last"""
    return [{"role": ("assistant", "user")[(n - i) % 2], "content": text(i)} for i in range(n)]


@pytest.mark.parametrize("text", ["", "word ", "x" * 20])
def test_forgetting_takes_little_work(there, monkeypatch, text):
    """Two thousand messages: not a text for each cut."""
    rendered = Rendered(monkeypatch)
    body = {"messages": alternating(2000, lambda i: text), "max_tokens": 1, "forget": True}
    status, _, said = post(there[0], CHAT, body)
    assert status == 200 and said["forgotten"] > 1900, said
    assert 1 <= rendered.conversations <= 2 * 11 and rendered.messages <= 3 * 2000


def test_as_little_as_possible_is_forgotten(there):
    """The longest end of the conversation that begins with a message of the user and leaves a
    quarter of the context, whatever the lengths are"""
    reader, rng, seen = there[1].default.reader, random.Random(5), set()
    room = reader.length - reader.length // 4
    for _ in range(200):
        said = [("system", "Be brief.")] * rng.randrange(2) + [
            (rng.choice(("user", "assistant")), "word " * int(rng.paretovariate(0.7)))
            for _ in range(rng.randrange(40))] + [("user", "so?")]
        said = [(role, content[:400]) for role, content in said]
        first = said[0][0] == "system"
        starts = [i for i in range(first, len(said)) if i == first or said[i][0] == "user"]
        kept = [said[:first] + said[i:] for i in starts]
        sizes = [len(reader.ids_of_messages(k)) for k in kept]
        want = next(i for i, n in zip(starts, sizes) if n <= room or i == starts[-1])
        ids, forgotten = reader.conversation(said, True, threading.Event())
        assert forgotten == want - first
        assert ids == reader.ids_of_messages(said[:first] + said[want:])
        seen.add(forgotten)
    assert len(seen) > 10


LONGEST = 10                 # characters of the longest token, xxxxxxxxxx


class ByLength(protocol.Reader):
    """A reader whose texts have few tokens for their characters, or many. Its estimates count
    characters, and what decides is the number of tokens."""

    def __init__(self, template=""):
        self.length, self.longest, self.speaker = 40, LONGEST, SimpleNamespace(
            template=template, tokenizer=SimpleNamespace(encode_whole=self.encoded))

    @staticmethod
    def encoded(text):
        return np.array(re.findall(f"x{{1,{LONGEST}}}|.", text))

    def ids_of_messages(self, messages, state=None):
        if self.speaker.template:            # Alpaca's has the last question alone
            messages = messages[max(i for i, m in enumerate(messages) if m[0] == "user"):]
        return [x for _, text in messages for x in self.encoded(text).tolist()]


def whole_or_refused(reader, ids):
    """The ids if they fit into the context, as decided without an estimate"""
    return ids if len(ids) <= reader.length else "context_length_exceeded"


def answered(function, *args):
    try:
        return function(*args)
    except protocol.Refusal as e:
        return e.code


def test_an_estimate_by_characters_decides_nothing():
    """The texts are about as long as the context, or three quarters of it. With long tokens they
    fit, with short ones they do not, and the estimate cannot tell."""
    gone, rng, seen = threading.Event(), random.Random(7), Counter()
    word = lambda: rng.choice(("x" * LONGEST, "x", "y")) * rng.choice((1, 1, 2, 5, 25, 30, 35, 40))
    for _ in range(3000):
        reader = ByLength(rng.choice(("", ALPACA)) if rng.random() < 0.3 else "")
        said = [("system", word())] * rng.randrange(2) + [
            (rng.choice(("user", "assistant")), word()) for _ in range(rng.randrange(4))]
        said += [("user", word())] + [("assistant", word())] * (rng.random() < 0.2)
        want = whole_or_refused(reader, reader.ids_of_messages(said))
        found = answered(reader.conversation, said, False, gone)
        assert found == ((want, 0) if isinstance(want, list) else want), said
        prompt = "".join(text for _, text in said)
        want = whole_or_refused(reader, reader.encoded(prompt).tolist())
        assert answered(reader.ids_of, prompt, "", protocol.Work(gone)) == want, said

        reader.speaker.template = ""
        first = said[0][0] == "system"
        starts = [i for i in range(first, len(said)) if i == first or said[i][0] == "user"]
        kept = [reader.ids_of_messages(said[:first] + said[i:]) for i in starts]
        k = next((k for k, ids in enumerate(kept) if len(ids) <= 30), len(kept) - 1)
        want = whole_or_refused(reader, kept[k])
        found = answered(reader.conversation, said, True, gone)
        assert found == ((want, starts[k] - first) if isinstance(want, list) else want), said
        seen[type(want).__name__, len(kept[k]) > 30, k > 0] += 1
    assert len(seen) >= 5 and min(seen.values()) > 20, seen


def test_a_client_that_leaves_frees_the_tokenizer(there, monkeypatch):
    """What it waits for is not begun; what was begun stops at its next text."""
    address, server = there
    queue = server.long_texts                # that of bodies above SHORT_BODY
    begun, go_on, texts, original = threading.Event(), threading.Event(), [], templates.chat_ids

    def slow(template, messages, *args):
        texts.append(len(messages))
        begun.set()
        assert go_on.wait(PATIENCE)
        return original(template, messages, *args)

    monkeypatch.setattr("nanoeuler_parts.chat.templates.chat_ids", slow)
    long = {"messages": alternating(400, lambda i: "w"), "forget": True, "max_tokens": 1}
    left = server.requests.left
    running, waiting = connected(address), connected(address)
    running.sendall(request_of(CHAT, long))
    assert begun.wait(PATIENCE)
    waiting.sendall(request_of(CHAT, long))
    until(lambda: queue.waiting == 2)
    waiting.close()
    until(lambda: queue.waiting == 1)
    running.close()
    until(lambda: queue.waiting == 0 and server.requests.left == left + 2)
    go_on.set()
    assert post(address, CHAT, {"messages": alternating(5, str), "max_tokens": 1})[0] == 200
    assert texts == [400, 5]


def test_the_preparation_of_a_schema_ends_when_its_client_leaves(there):
    """`is_set` is asked between pieces of the work.  A client that leaves at any of them ends it,
    and a later client with the same schema gets its answer."""
    reader = there[1].default.reader
    body = {"prompt": "a", "max_tokens": 1, "guided_json": {"pattern": "^.{0,200}$"}}

    class Leaving:
        """An event that is set when it is asked for the n-th time"""

        def __init__(self, n):
            self.n, self.asked = n, 0

        def is_set(self):
            self.asked += 1
            return self.asked >= self.n

    def prepare(body, gone):
        asked = reader.completion(body, gone)
        assert asked.needs_schema()          # it takes longer than QUICK_PIECES
        reader.prepare_schema(asked, Turns(), gone)
        assert not asked.needs_schema() and asked.answers[0].constraint is not None

    stays = Leaving(math.inf)
    prepare({**body, "guided_json": {"pattern": "^.{0,201}$"}}, stays)
    assert stays.asked > 6
    for n in range(1, stays.asked):
        with pytest.raises(protocol.Gone):
            prepare(body, Leaving(n))
    prepare(body, stays)
    assert not reader.completion(body, stays).needs_schema()         # it is stored now


class Forwarded:
    """Requests of clients with these addresses, as a proxy on this machine forwards them"""

    def __init__(self, address):
        self.address = address

    def post(self, client, **body):
        return post(self.address, TEXT, {"prompt": "a", "max_tokens": 1, **body},
                    **{"x-forwarded-for": client})[0]


def test_requests_do_not_wait_for_the_schemas_of_others(there, monkeypatch):
    """24 requests with schemas that take long to reject, of one client.  One is prepared at a time,
    and requests without a schema, or with a short one, do not wait for it.  The next long schema of
    another client waits for this one only."""
    at, server = Forwarded(there[0]), there[1]
    running, most, begun, go_on, order = set(), [], threading.Event(), threading.Event(), []
    original = protocol.Reader.prepare_schema

    def prepare(reader, asked, *args):
        running.add(id(asked))
        most.append(len(running))
        order.append(asked.answers[0].ids)
        begun.set()
        assert go_on.wait(PATIENCE)
        try:
            return original(reader, asked, *args)
        finally:
            running.remove(id(asked))

    monkeypatch.setattr(protocol.Reader, "prepare_schema", prepare)
    slow = lambda i: {"pattern": f".*a.{{14}}{i}"}
    with ThreadPoolExecutor(25) as pool:
        attack = [pool.submit(at.post, "192.0.2.1", guided_json=slow(i)) for i in range(24)]
        assert begun.wait(PATIENCE)
        until(lambda: server.schemas.waiting == 24)
        assert at.post("192.0.2.2") == 200
        assert at.post("192.0.2.2", guided_json={"maxLength": 5}) == 200
        assert at.post("192.0.2.1", guided_json={"enum": ["yes", "no"]}) == 200
        last = pool.submit(at.post, "192.0.2.2", guided_json={"pattern": "^.{0,202}$"}, prompt="b")
        until(lambda: server.schemas.waiting == 25)
        assert server.tokenizer.waiting == 0 and len(order) == 1
        go_on.set()
        assert last.result() == 200 and {a.result() for a in attack} == {400}
    assert {*most} == {1}
    assert [ids == order[0] for ids in order] == [True, False] + 23 * [True]


def test_a_schema_that_takes_long_restricts_every_answer_of_its_request(there, monkeypatch):
    """Each of n answers to each prompt is the one to the same schema prepared with its request."""
    prepared, original = [], protocol.Reader.prepare_schema

    def prepare(reader, asked, *args):
        prepared.append(len(asked.answers))
        return original(reader, asked, *args)

    def texts(path, body, title):            # another title is another schema: none is stored
        schema = {"title": title, "type": "string", "pattern": "^[ab]{20,300}$"}
        status, _, said = post(there[0], path, {**body, "guided_json": schema})
        assert status == 200
        return [c["text"] if "text" in c else c["message"]["content"] for c in said["choices"]]

    monkeypatch.setattr(protocol.Reader, "prepare_schema", prepare)
    for i, (path, body) in enumerate([(TEXT, {"prompt": "a"}), (CHAT, {"messages": HELLO, "n": 3}),
                                      (TEXT, {"prompt": ["a", "b"], "n": 2})]):
        body |= {"max_tokens": 9, "seed": 3, "temperature": 1}
        first = texts(path, body, f"slow {i}")
        with monkeypatch.context() as changed:
            changed.setattr(protocol, "QUICK_PIECES", 1 << 30)
            assert first == texts(path, body, f"quick {i}")
        assert first == texts(path, body, f"slow {i}")   # it is stored now
        assert all(re.fullmatch('"[ab]+', text) for text in first), first
    assert prepared == [1, 3, 4]


def test_a_long_preparation_takes_turns_with_the_steps_of_a_model(there, monkeypatch):
    """Each piece of its work, json_schema.PIECE steps, takes a turn of its own.  The last piece of
    a rejected schema is not complete."""
    engine, pieces = there[1].default.engine, []
    take = engine.turns.take

    def counted(seconds=None):
        if seconds is not None:
            pieces.append(seconds)
        return take(seconds)

    monkeypatch.setattr(engine.turns, "take", counted)
    at = Forwarded(there[0])
    assert at.post("192.0.2.1", guided_json={"pattern": ".*a.{14}x"}) == 400
    assert 0.8 * MOST_STEPS / PIECE < len(pieces) <= MOST_STEPS / PIECE
    assert {*pieces} == {LONGEST_PAUSE}
    before = len(pieces)
    assert at.post("192.0.2.1", guided_json={"maxLength": 6}) == 200
    assert len(pieces) == before
    until(lambda: not engine.turns.queue)                # the step that ended the answer goes on


def test_a_step_that_waits_comes_before_the_next_piece(monkeypatch):
    monkeypatch.setattr("nanoeuler_parts.serve.engine.LONGEST_PAUSE", PATIENCE)
    turns, steps, end = Turns(), [], threading.Event()

    def engine():
        while not end.is_set():
            with turns:
                steps.append(1)

    with Pieces(turns) as pieces:
        thread = threading.Thread(target=engine, daemon=True)
        thread.start()
        for _ in range(50):
            until(lambda: len(turns.queue) == 2)         # the engine waits for the piece's end
            before = len(steps)
            pieces.next()
            assert len(steps) > before and pieces.has_turn
        end.set()
    thread.join(PATIENCE)
    assert not thread.is_alive() and not turns.queue


def test_a_piece_does_not_wait_for_a_long_step(monkeypatch):
    """It runs beside the step then, and leaves the step's turn alone."""
    monkeypatch.setattr("nanoeuler_parts.serve.engine.LONGEST_PAUSE", 0.01)
    turns = Turns()
    with turns:
        with Pieces(turns) as pieces:
            pieces.next()
            assert not pieces.has_turn and len(turns.queue) == 1
        assert len(turns.queue) == 1
    assert not turns.queue
    with Pieces(turns) as pieces:
        assert pieces.has_turn


def test_threads_of_a_server_switch_often(file):
    before = sys.getswitchinterval()
    with serving(file):
        assert sys.getswitchinterval() <= min(0.001, before)
    assert sys.getswitchinterval() == before


def test_the_queue_of_the_tokenizer_has_an_end(there, monkeypatch):
    address, server = there
    monkeypatch.setattr(workers, "MOST_WAITING", 2)
    go_on, original = threading.Event(), templates.chat_ids

    def slow(*args):
        assert go_on.wait(PATIENCE)
        return original(*args)

    monkeypatch.setattr("nanoeuler_parts.chat.templates.chat_ids", slow)
    body = {"messages": HELLO, "max_tokens": 1}
    with ThreadPoolExecutor(2) as pool:
        first = [pool.submit(post, address, CHAT, body) for _ in range(2)]
        until(lambda: server.tokenizer.waiting == 2)
        status, headers, said = post(address, CHAT, body)
        assert (status, said["error"]["code"], headers["retry-after"]) == (503, "overloaded", "1")
        assert send(address, "GET", "/api/runs")[0] == send(address, "GET", "/health")[0] == 200
        go_on.set()
        assert [f.result()[0] for f in first] == [200, 200]


def test_clients_have_their_requests_prepared_in_turns():
    """By address, beginning with those of other clients than the running one's.  A request of a
    client that has left is not begun."""
    worker, begun, go_on, done = Worker("tokenizer"), threading.Event(), threading.Event(), []
    first = worker.add("a", lambda: begun.set() or go_on.wait(PATIENCE))
    assert begun.wait(PATIENCE)
    waiting = [worker.add(name[0], done.append, name)
               for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1", "a5")]
    waiting[1].cancel()
    go_on.set()
    for future in (first, *waiting[:1], *waiting[2:]):
        future.result(PATIENCE)
    assert done == ["b1", "c1", "a1", "b2", "a3", "a4", "a5"]
    worker.close()


def test_one_client_cannot_fill_the_queue_of_the_others(monkeypatch):
    """Each address may have two requests here, and all together three."""
    monkeypatch.setattr(workers, "MOST_WAITING", 2)
    monkeypatch.setattr(workers, "MOST_IN_ALL", 3)

    async def stays():
        await asyncio.Event().wait()

    async def ask():
        worker, go_on = Worker("tokenizer"), threading.Event()
        call = lambda host: worker.call(SimpleNamespace(
            client=SimpleNamespace(host=host), receive=stays), lambda gone: go_on.wait(PATIENCE))
        tasks = [asyncio.ensure_future(call(host)) for host in "aab"]
        await asyncio.sleep(0)
        for host in "ac":
            with pytest.raises(Busy, match="3 requests are waiting for the tokenizer already"):
                await call(host)
        go_on.set()
        assert await asyncio.gather(*tasks) == [True] * 3
        assert worker.waiting == 0 and not worker.of_client
        worker.close()

    asyncio.run(ask())


@pytest.mark.parametrize("path, body, name", [
    (TEXT, {"prompt": ["word "] * 21}, "prompt"), (TEXT, {"prompt": [[5] * 9] * 12}, "prompt"),
    (CHAT, {"messages": LONGER}, "messages"), ("/api/chat", {"messages": LONGER}, "messages"),
    ("/v1/responses", {"input": LONGER}, "messages"), ("/api/generate", {
        "prompt": "a" * 40, "system": "b" * 20}, "messages")])
def test_the_preparation_of_a_request_has_a_limit(there, monkeypatch, path, body, name):
    """Counted in characters, so that it is the same on every machine"""
    from nanoeuler_parts.serve import protocol
    monkeypatch.setattr(protocol, "MOST_WORK", 100)
    status, _, said = post(there[0], path, {**body, "stream": False})
    message = said["error"] if path.startswith("/api") else said["error"]["message"]
    assert status == 400 and "at most 100 characters" in message and f"the {name} of" in message
    monkeypatch.setattr(protocol, "MOST_WORK", 1000)
    assert post(there[0], path, {**body, "stream": False})[0] == 200


def test_forgetting_stays_within_the_work_of_a_request(there, monkeypatch):
    """It forgets more, but it does not fail, while the last exchange alone is allowed."""
    from nanoeuler_parts.serve import protocol
    body = {"messages": alternating(60, lambda i: "a b"), "max_tokens": 1, "forget": True}
    most = post(there[0], CHAT, body)[2]["forgotten"]
    found = []
    for work in (10_000, 1000, 400, 70):
        monkeypatch.setattr(protocol, "MOST_WORK", work)
        rendered = Rendered(monkeypatch)
        status, _, said = post(there[0], CHAT, body)
        assert status == 200 and 67 * rendered.messages <= work + 67
        found.append(said["forgotten"])
    assert found[0] == most and found == sorted(found) and found[-1] == 59
    monkeypatch.setattr(protocol, "MOST_WORK", 60)
    assert post(there[0], CHAT, body)[0] == 400


def test_a_third_party_template_counts_more(there, monkeypatch):
    reader = there[1].default.reader
    plain = reader.work_of([("user", "Hello")])
    monkeypatch.setattr(reader.speaker, "template", "{{ messages[0]['content'] }}")
    assert reader.work_of([("user", "Hello")]) > 10 * plain


def test_short_requests_do_not_wait_for_the_preparation_of_long_ones(there, monkeypatch):
    """At every address that takes a body"""
    address, server = there
    begun, go_on, original = threading.Event(), threading.Event(), templates.chat_ids

    def slow(template, messages, *args):
        if len(messages) > 100:
            begun.set()
            assert go_on.wait(60)
        return original(template, messages, *args)

    monkeypatch.setattr("nanoeuler_parts.chat.templates.chat_ids", slow)
    long = {"messages": alternating(401, lambda i: ""), "max_tokens": 1}
    assert len(json.dumps(long)) > 1 << 13
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, address, CHAT, long)
        assert begun.wait(60)
        for path, body in ((TEXT, {"prompt": "a", "max_tokens": 1}),
                           (CHAT, {"messages": HELLO, "max_tokens": 1}), ("/api/show", {}),
                           ("/v1/responses", {"input": "a", "max_output_tokens": 1}),
                           ("/api/explain", {"tokens": [1]})):
            assert post(address, path, body)[0] == 200, path
        assert not first.done()
        go_on.set()
        assert first.result()[0] in (200, 400)


def test_an_explanation_takes_a_bounded_number_of_products(there, monkeypatch):
    from nanoeuler_parts.serve import explain
    explainer = there[1].default.explainer
    asked = {"tokens": [5] * 60, "trajectory": True}
    assert post(there[0], "/api/explain", asked)[2]["seen"] == 60
    monkeypatch.setattr(explain, "MOST_PRODUCTS", 7 * ne.n_params(explainer.model.cfg) + 1)
    assert post(there[0], "/api/explain", asked)[2]["seen"] == 7
    said = post(there[0], "/api/explain", {"tokens": [5] * 60, "attention": 1})[2]
    assert len(said["tokens"]) == 7


def test_log_probabilities_have_a_limit(there, monkeypatch):
    """Of the prompt, of the answer, of all answers"""
    from nanoeuler_parts.serve import protocol
    monkeypatch.setattr(protocol, "MOST_SCORES", 100)
    ids = [5] * 40
    scored = {"prompt": ids, "echo": True, "max_tokens": 10, "logprobs": 1}
    assert post(there[0], TEXT, scored)[0] == 200
    for more in ({"max_tokens": 11}, {"logprobs": 2}, {"n": 2}, {"prompt": [ids, ids]}):
        status, _, said = post(there[0], TEXT, {**scored, **more})
        assert status == 400 and "at most 100 log-probabilities" in said["error"]["message"]
    assert post(there[0], TEXT, {**scored, "echo": False, "max_tokens": 50})[0] == 200


class Dumped(list):
    """Records (the thread, number of characters) of each JSON text that is encoded."""

    def __init__(self, monkeypatch):
        self.dumps = json.dumps
        monkeypatch.setattr(json, "dumps", self.counted)

    def counted(self, *args, **options):
        text = self.dumps(*args, **options)
        self.append((threading.current_thread().name, len(text)))
        return text

    def need_workers(self, least):
        """No text of at least `least` characters was encoded by the event loop."""
        names = [name for name, n in self if n >= least]
        assert names and all(name.startswith(("asyncio", "tokenizer", "long-texts"))
                             for name in names), names


def test_a_streamed_response_encodes_its_large_parts_once(there, monkeypatch):
    """Five events repeat the fields of the request, or all log-probabilities."""
    body = {"input": "a", "stream": True, "max_output_tokens": 60, "top_logprobs": 20, "seed": 1,
            "temperature": 50, "metadata": {"a": "x" * 60_000}}
    raw = json.dumps(body).encode()
    made = Dumped(monkeypatch)
    status, _, said = send(there[0], "POST", "/v1/responses", raw)
    assert status == 200, said
    n = sum(n for _, n in made)
    made.need_workers(9000)
    events = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: {")]
    scores = sum((e["logprobs"] for e in events if e["type"].endswith("text.delta")), [])
    last = events[-1]["response"]
    assert len(scores) > 30 and last["metadata"] == body["metadata"]
    for found in (events[-4], events[-3]["part"], events[-2]["item"]["content"][0],
                  last["output"][0]["content"][0]):
        assert found["logprobs"] == scores and found["text"]
    parts = len(json.dumps(scores)), len(json.dumps(body["metadata"]))
    assert n < len(raw) + 1.3 * sum(parts) + 20_000, (n, len(raw), parts)


@pytest.mark.parametrize("more", [{"echo": True, "logprobs": 20}, {"return_tokens": True}])
def test_the_prompt_in_a_stream_is_encoded_by_a_thread(there, monkeypatch, more):
    raw = json.dumps({"prompt": "a b c d " * 10, "max_tokens": 1, "stream": True, **more}).encode()
    made = Dumped(monkeypatch)
    status, _, said = send(there[0], "POST", TEXT, raw)
    assert status == 200 and "[DONE]" in said
    made.need_workers(max(n for _, n in made))


@pytest.mark.parametrize("number", ["1e999", "-1e999"])
@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/responses", "/api/chat", "/api/generate"])
def test_a_number_that_python_reads_as_infinity_is_refused(there, path, number):
    raw = f'{{"metadata": {{"a": [{number}]}}}}'.encode()
    status, _, said = send(there[0], "POST", path, raw)
    assert status == 400 and "a number that is too large, expected numbers up to 1.8e+308" in str(
        said)


def test_nobody_waits_while_the_trajectory_is_compiled(file, monkeypatch):
    """It is compiled and its weights are read beside the engine; others get their texts."""
    begun, go_on, threads = threading.Event(), threading.Event(), []

    def compile_slowly(dtype):
        threads.append(threading.current_thread().name)
        begun.set()
        assert go_on.wait(PATIENCE)

    monkeypatch.setattr("nanoeuler_parts.serve.explain.compile_passes", lambda dtype: None)
    with serving(file) as (address, _), ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr("nanoeuler_parts.serve.explain.compile_passes", compile_slowly)
        body = {"tokens": [1, 2, 3], "chosen": 7, "trajectory": True}
        asked = pool.submit(post, address, "/api/explain", body)
        assert begun.wait(PATIENCE)
        assert post(address, TEXT, {"prompt": "a", "max_tokens": 30})[0] == 200
        assert post(address, "/api/explain", {**body, "trajectory": False})[0] == 200
        assert not asked.done()
        go_on.set()
        assert asked.result()[0] == 200
    assert all(name.startswith("weights") for name in threads)


# ---- connections
def test_idle_connections_keep_nobody_out(file, monkeypatch):
    """More of them than there may be: the oldest are closed, and an answer is not."""
    from nanoeuler_parts.serve import server as serve
    from nanoeuler_parts.serve import connections
    monkeypatch.setattr(serve, "CONNECTIONS", 4)
    monkeypatch.setattr(connections, "GRACE_SECONDS", 0)
    with serving(file, queue=4, tokens=100_000) as (address, server), contextlib.ExitStack() as end:
        def opened(raw=b""):
            s = end.enter_context(connected(address))
            s.sendall(raw)
            return s

        stream = opened(request_of(TEXT, {"prompt": "a", "max_tokens": 90_000, "stream": True}))
        assert stream.recv(12) == b"HTTP/1.1 200"
        unfinished = request_of(TEXT, {"prompt": "a"})
        waiting = [opened(unfinished[:i % len(unfinished)]) for i in range(60)]
        assert send(address, "GET", "/health")[0] == 200
        until(lambda: sum(map(is_closed, waiting)) >= 60 - 12)
        assert post(address, TEXT, {"prompt": "a", "max_tokens": 2})[0] == 200
        assert server.default.engine.unfinished() == 1 and stream.recv(1)


def test_answers_are_never_cut_off_for_others(file, monkeypatch):
    """If all connections are answering, further ones are closed."""
    from nanoeuler_parts.serve import server as serve
    from nanoeuler_parts.serve import connections
    monkeypatch.setattr(serve, "CONNECTIONS", 0)
    monkeypatch.setattr(connections, "HEAD_SECONDS", 1000)
    with serving(file, slots=2, queue=0, tokens=100_000) as (address, server):
        body = {"prompt": "a", "max_tokens": 90_000, "stream": True}
        with connected(address) as first, connected(address) as second:
            for s in (first, second):
                s.sendall(request_of(TEXT, body))
                assert s.recv(12) == b"HTTP/1.1 200"
            with connected(address) as third, connected(address) as fourth:
                until(lambda: is_closed(third) or is_closed(fourth))
            assert first.recv(1) and second.recv(1) and server.default.engine.unfinished() == 2


@pytest.mark.parametrize("limit, sent", [
    ("HEAD_SECONDS", b""), ("HEAD_SECONDS", b"GET / HTTP/1.1\r\nhost: loc"),
    ("BODY_SECONDS", request_of(TEXT, {})[:-1]),
    ("IDLE_SECONDS", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")])
def test_a_connection_without_a_request_ends(file, monkeypatch, limit, sent):
    """Nothing, half a head, half a body, or nothing after a first answer.  Only one limit is short:
    a busy machine may take longer to send what comes before."""
    from nanoeuler_parts.serve import app, connections
    for module, name in ((connections, "HEAD_SECONDS"), (connections, "IDLE_SECONDS"),
                         (app, "BODY_SECONDS")):
        monkeypatch.setattr(module, name, 0.2 if name == limit else 10 * PATIENCE)
    with serving(file) as (address, _), connected(address) as s:
        s.sendall(sent)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := s.recv(1 << 16):
                received += piece
        wanted = {b"": b"", b"G": b"", b"P": b"HTTP/1.1 408"}.get(sent[:1], b"")
        if b"health" in sent:
            wanted = b"HTTP/1.1 200"
        assert received.startswith(wanted) and bool(received) == bool(wanted)


@pytest.mark.parametrize("leave", [lambda s: s.shutdown(socket.SHUT_WR), lambda s: s.close()])
@pytest.mark.parametrize("path", [TEXT, CHAT, "/api/generate"])
def test_a_part_of_a_body_is_not_taken_for_all_of_it(there, monkeypatch, path, leave):
    """Also where it is JSON already.  The request counts as a fault of the client."""
    from nanoeuler_parts.serve import app
    monkeypatch.setattr(app, "parse", never)
    statuses, raw = there[1].requests.statuses, request_of(path, {"prompt": "a", "max_tokens": 2})
    head, _, body = raw.partition(b"\r\n\r\n")
    before = Counter(statuses)
    with connected(there[0]) as s:
        s.sendall(head.replace(b"length: %d" % len(body), b"length: %d" % (len(body) + 1)))
        s.sendall(b"\r\n\r\n" + body)
        leave(s)
        found = lambda: [x for x in Counter(statuses) - before if x[0] == path]
        until(found)
        assert found() == [(path, 400)]


def test_the_head_of_a_further_request_has_a_time_limit(file, monkeypatch):
    """Also if a part of it came, which ends uvicorn's own limit"""
    from nanoeuler_parts.serve import connections
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.3)
    with serving(file) as (address, _), connected(address) as s:
        s.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        received = b""
        while not received.endswith(b'"ok"}'):
            received += s.recv(1 << 16)
        s.sendall(b"GET /hea")
        until(lambda: is_closed(s))


def test_a_client_that_does_not_read_is_left(file, monkeypatch):
    """Its slots are free again, and nothing of its answer stays in memory."""
    from nanoeuler_parts.serve import server as serve
    from nanoeuler_parts.serve import connections
    listening = serve.listening

    def with_small_buffers(options):
        s = listening(options)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)      # its connections inherit it
        return s

    monkeypatch.setattr(serve, "listening", with_small_buffers)
    monkeypatch.setattr(connections, "WRITE_SECONDS", 0.3)
    with serving(file, tokens=100_000) as (address, server):
        s = socket.socket()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = address.removeprefix("http://").split(":")
        with contextlib.closing(s):
            s.connect((host, int(port)))
            s.sendall(request_of(TEXT, {"prompt": "a", "max_tokens": 50_000, "stream": True,
                                        "return_tokens": True}))
            until(lambda: server.default.engine.active)
            until(lambda: server.requests.left == 1 and not server.default.engine.active)
        assert server.default.stats.counters["tokens"] < 50_000


def test_a_slow_reader_does_not_outlast_the_time_limit(file, monkeypatch):
    """It reads enough not to be left at once, and yet its answer would take an hour.  The time is
    over when it has read the first byte, however busy the machine is."""
    from nanoeuler_parts.serve import server as serve
    from nanoeuler_parts.serve import app, connections
    listening, wait, limits = serve.listening, asyncio.wait, []
    over, noticed = threading.Event(), threading.Event()
    abort, aborted = connections.Connection.abort, []

    def with_small_buffers(options):
        s = listening(options)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return s

    async def wait_until_over(tasks, *, timeout=None, **how):
        limits.append(timeout)
        done = set()
        while not done and not (timeout and over.is_set()):
            done, left = await wait(tasks, timeout=timeout and 0.01, **how)
        if timeout:
            noticed.set()
        return done, left

    monkeypatch.setattr(serve, "listening", with_small_buffers)
    monkeypatch.setattr(asyncio, "wait", wait_until_over)
    monkeypatch.setattr(connections, "WRITE_SECONDS", 10 * PATIENCE)
    monkeypatch.setattr(connections.Connection, "abort",
                        lambda connection: (aborted.append(connection), abort(connection)))
    body = {"prompt": ["a b c"] * 64, "max_tokens": 60, "logprobs": 20, "stream": True}
    with serving(file) as (address, server), connected(address) as s:
        s.sendall(request_of(TEXT, body))
        found = s.recv(1)
        assert server.options.seconds + app.WRITE_SECONDS in limits
        over.set()
        assert noticed.wait(PATIENCE)
        until(lambda: aborted)               # not at the end of what waits to be sent
        with contextlib.suppress(ConnectionResetError):
            while b"[DONE]" not in found and (piece := s.recv(1 << 16)):
                found += piece
        assert found.startswith(b"HTTP/1.1 200") and b"[DONE]" not in found
        until(lambda: not server.default.engine.active)


# ---- who may ask
@pytest.mark.parametrize("name, is_it", [
    ("127.0.0.1", True), ("127.0.0.2", True), ("localhost", True), ("LOCALHOST", True),
    ("localhost.", True), ("a.localhost", True), ("::1", True), ("::ffff:127.0.0.1", True),
    ("0.0.0.0", False), ("10.0.0.1", False), ("::ffff:10.0.0.1", False), ("mybox", False),
    ("localhost.evil.example", False), ("127.0.0.1.evil.example", False), ("", False)])
def test_what_is_this_machine_alone(name, is_it):
    from nanoeuler_parts.serve.names import is_loopback
    assert is_loopback(name) is is_it


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_name_that_another_leads_here_is_refused(file, host):
    """DNS rebinding: the page of evil.example, whose name leads here, asks as if it were ours."""
    body = {"prompt": "a", "max_tokens": 1}

    def status(address, name, **more):
        port = address.rsplit(":", 1)[1]
        return post(address, TEXT, body, host=f"{name}:{port}", origin=f"http://{name}:{port}",
                    **more)[0]

    ours = socket.gethostname()
    with serving(file, host=host, allow_host=["Friend.example"]) as (address, _):
        assert status(address, "evil.example") == 403
        assert status(address, "127.0.0.1.evil.example") == 403
        assert status(address, "[") == 403
        for name in ("127.0.0.1", "LOCALHOST", "10.1.2.3", "[::1]", "friend.example", ours):
            assert status(address, name) == 200, name
        said = send(address, "GET", "/health", headers={"host": "evil.example"})[2]
        assert "--allow-host" in said["error"]["message"]
    with serving(file, host=host, api_key="s3cret") as (address, _):
        assert status(address, "mybox.example") == 401
        assert status(address, "mybox.example", authorization="Bearer s3cret") == 200


@pytest.mark.parametrize("form", ["{}", "{}.", "{}:8000", "{}.:8000"])
@pytest.mark.parametrize("option", ["host", "allow_host", "origin", ""])
def test_each_option_with_a_name_allows_that_name(option, form, monkeypatch):
    """And no other name.  Upper case and a final dot make no difference, in the option neither."""
    from nanoeuler_parts.serve.names import Names
    from nanoeuler_parts.serve.verb import Serving
    monkeypatch.setattr(socket, "gethostname", lambda: "Own")
    for name in "Box.example", "box.example.":
        value = {"host": name, "allow_host": [name], "origin": [f"https://{name}:8443"]}
        given = {option: value[option]} if option else {}
        names = Names(Serving(**given).check())
        for asked in "box.example", "BOX.example":
            assert names.allows_host(form.format(asked)) == (option != "")
        for asked in "own", "OWN.local", "localhost", "a.localhost":
            assert names.allows_host(form.format(asked))
        for asked in "example", "x.box.example", "box.example.com", "own.example", "local":
            assert not names.allows_host(form.format(asked)), asked


@pytest.mark.parametrize("text, want", [
    ("https://Example.org", "https://example.org"), ("http://a.b:80/", "http://a.b"),
    ("https://a.b:8443", "https://a.b:8443"), ("http://[::1]:81", "http://[::1]:81"),
    ("chrome-extension://abcdef", "chrome-extension://abcdef")])
def test_origins_are_compared_as_browsers_send_them(text, want):
    from nanoeuler_parts.serve.names import Names
    names = Names(Serving(origin=[text]))
    assert names.allowed_origin(want) == want and names.allowed_origin(f"{want}x") is None


@pytest.mark.parametrize("text", ["null", "*", "", "example.org", "https://", "https://a.b/path",
                                  "https://u@a.b", "https://a.b:x", "https://[", "https://a b",
                                  "https://a.b?c", "https://\u00e4.example"])
def test_an_origin_that_no_browser_sends_is_an_error(text):
    from nanoeuler_parts.serve.names import Names
    with pytest.raises(ne.UserError, match="--origin is"):
        Names(Serving(origin=[text]))


@pytest.mark.parametrize("flags, word", [
    (("--host", "a" * 70 + ".example"), "--host"), (("--host", "..",), "--host"),
    (("--host", "not a host"), "--host"), (("--origin", "null"), "--origin"),
    (("--allow-host", "http://x"), "--allow-host"), (("--api-key", "a b"), "--api-key")])
def test_malformed_flags_are_told_in_a_line(file, capsys, flags, word):
    refused(capsys, "serve", file, "--port", 0, *flags, words=[word])


# ---- files of the folder
def test_only_regular_files_are_opened(file, tmp_path, monkeypatch):
    """A pipe beside a log, as a log, or behind a link, holds nobody up."""
    monkeypatch.chdir(tmp_path)
    record = '{"step": 1, "loss": 5.0}\n'
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.jsonl").write_text(record, encoding="utf-8")
    os.mkfifo(tmp_path / "a.bin")
    os.symlink("a.bin", tmp_path / "b.bin")
    os.symlink("/dev/zero", tmp_path / "c.bin")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    os.symlink("nowhere", tmp_path / "gone.jsonl")
    with serving(file) as (address, _):
        found = send(address, "GET", "/api/runs")[2]["runs"]
        assert {r["name"] for r in found} == {"a.jsonl", "b.jsonl", "c.jsonl"}
        for name in ("a", "b", "c"):
            said = send(address, "GET", f"/api/run?name={name}.jsonl")[2]
            assert said["records"] == [json.loads(record)]
        assert send(address, "GET", "/api/run?name=pipe.jsonl")[0] == 404


@pytest.mark.parametrize("line, want", [
    ('{"step": 2, "loss": 1e999}', {"step": 2, "loss": None}),
    ('{"step": 2, "loss": 1, "sample": "\\ud800"}', {"step": 2, "loss": 1, "sample": "\ud800"}),
    ('{"step": 2, "deep": ' + "[" * 900 + "]" * 900 + "}", {"step": 2}),
    ('{"step": 2, "heads": {"length": 1e9}, "a": [[1]]}', {"step": 2}),
    ('{"step": 2, "heads": [' + "1," * 1000 + '1]}', {"step": 2}),
    ('{"step": 1e300}', None), ('{"step": -1}', None), ("[1]", None), ('{"step": "x"}', None)])
def test_any_log_can_be_sent(file, tmp_path, monkeypatch, line, want):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_text(f'{{"step": 1, "loss": 5.0}}\n{line}\n', encoding="utf-8")
    with serving(file) as (address, _):
        status, _, said = send(address, "GET", "/api/run?name=x.jsonl")
        assert status == 200 and said["records"] == [{"step": 1, "loss": 5.0}] + [want] * bool(want)


def test_any_name_can_be_sent(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open(b"\xff.jsonl", "wb") as f:     # not UTF-8
        f.write(b'{"step": 1, "loss": 5.0}\n')
    with serving(file) as (address, _):
        assert [r["name"] for r in send(address, "GET", "/api/runs")[2]["runs"]] == ["\\xff.jsonl"]
        assert send(address, "GET", "/api/run?name=%5Cxff.jsonl")[2]["records"] == [
            {"step": 1, "loss": 5.0}]


def test_the_list_of_runs_reads_little(file, tmp_path, monkeypatch):
    """The first and the last record of each log, once, and nothing of the files beside them,
    whatever they are"""
    from nanoeuler_parts.serve import runs
    monkeypatch.chdir(tmp_path)
    for i in range(3):
        (tmp_path / f"{i}.jsonl").write_text('{"step": 1, "loss": 5.0}\n' * 9, encoding="utf-8")
        (tmp_path / f"{i}.bin").write_bytes((1 << 26).to_bytes(8, "little") + b'{"a":[{},{},')
    read, opened, record_in = [], runs.opened, runs.record_in
    monkeypatch.setattr(runs, "record_in", lambda line: read.append(line) or record_in(line))
    names = []
    monkeypatch.setattr(runs, "opened", lambda path: names.append(path.name) or opened(path))
    found = runs.Runs(tmp_path)
    for _ in range(3):
        assert {r["name"] for r in found.listed()} == {"0.jsonl", "1.jsonl", "2.jsonl"}
    assert len(read) == 6 and {*names} == {"0.jsonl", "1.jsonl", "2.jsonl"}
    with open(tmp_path / "1.jsonl", "a", encoding="utf-8") as f:
        f.write('{"step": 2, "loss": 4.0}\n')
    assert len(found.listed()) == 3 and len(read) == 8


def test_a_folder_of_many_logs_costs_little(tmp_path, monkeypatch):
    """Of 1,200 logs the newest 500 are opened, once; then a poll opens what has changed, and a
    folder with more than that is searched once per second, however many pages ask."""
    from nanoeuler_parts.serve import runs
    for i in range(1200):
        (tmp_path / f"{i}.jsonl").write_text('{"step": 1, "loss": 5.0}\n', encoding="utf-8")
        os.utime(tmp_path / f"{i}.jsonl", (i, i))
    opened, searched, clock = [], [], [100.0]
    keep, search = runs.opened, os.scandir
    monkeypatch.setattr(runs, "opened", lambda path: opened.append(path.name) or keep(path))
    monkeypatch.setattr(runs.os, "scandir", lambda path: searched.append(path) or search(path))
    monkeypatch.setattr(runs.time, "monotonic", lambda: clock[0])
    found = runs.Runs(tmp_path)
    names = [f"{i}.jsonl" for i in range(1199, 699, -1)]
    for _ in range(3):
        assert [r["name"] for r in found.listed()] == names
        assert found.read("1199.jsonl", 0)["records"] == [{"step": 1, "loss": 5.0}]
    assert found.read("nowhere", 0) is None and found.read("3.jsonl", 0) is None
    assert sorted(opened) == sorted([*names, *["1199.jsonl"] * 3]) and len(searched) == 1
    (tmp_path / "3.jsonl").write_text('{"step": 2, "loss": 4.0}\n', encoding="utf-8")
    clock[0] += 1
    assert [r["name"] for r in found.listed()] == ["3.jsonl", *names[:-1]] and len(searched) == 2
    assert opened[-1] == "3.jsonl" and len(opened) == 504
    (tmp_path / "1199.jsonl").write_text('{"prompt": "no log any more"}\n', encoding="utf-8")
    assert found.read("1199.jsonl", 0) is None


def test_a_checkpoint_that_was_replaced_explains_nothing(tmp_path, tokenizer):
    """The trajectory reads weights later: another model's would be told as this one's."""
    from texts import TORTURE

    import bpe
    file = chat_model(tmp_path / "little.bin", tokenizer)
    with serving(file) as (address, _):
        other = bpe.train(TORTURE.encode(), 400)
        write(tmp_path / "little.bin", ne.replace(CFG, vocab_size=400), other)
        body = {"tokens": [1, 2], "trajectory": True}
        status, _, said = post(address, "/api/explain", body)
        assert status == 400 and "has changed" in said["error"]["message"]
        os.remove(tmp_path / "little.bin")
        os.mkfifo(tmp_path / "little.bin")
        assert post(address, "/api/explain", body)[0] == 400
        assert post(address, TEXT, {"prompt": "a", "max_tokens": 1})[0] == 200


# ---- the end
STARTS = """
import sys, threading, time
sys.path[:0] = [{root!r}]
import nanoeuler as ne, asyncio
never = threading.Event()
{planted}
sys.exit(ne.main(["serve", {file!r}, "--port", "0", "--threads", "1", "--drain", "0",
                  "--no-access-log"]))
"""


@contextlib.contextmanager
def started(file, planted, cwd):
    code = STARTS.format(root=str(ROOT), planted=planted, file=file)
    process = subprocess.Popen([sys.executable, "-c", code], cwd=cwd, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, encoding="utf-8")
    try:
        said = [process.stdout.readline(), process.stdout.readline()]
        assert "for the chat" in said[1], process.communicate(timeout=60)
        yield process, said[1].split()[0].rstrip("/")
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("planted, path, body", [
    ("from nanoeuler_parts.serve import protocol\n"
     "protocol.chat_ids = lambda *args: never.wait()", CHAT, {"messages": HELLO}),
    ("ne.next_tokens = lambda *args: never.wait()", TEXT, {"prompt": "a"}),
    ("from nanoeuler_parts.serve import explain\n"
     "explain.compile_passes = lambda dtype: never.wait()",
     "/api/explain", {"tokens": [1], "trajectory": True})],
    ids=["tokenizer", "engine", "compilation"])
def test_sigterm_ends_a_server_whose_thread_never_returns(file, tmp_path, planted, path, body):
    with started(file, planted, tmp_path) as (process, address), connected(address) as s:
        s.sendall(request_of(path, body))
        time.sleep(0.3)                      # it may be sent at any moment: this is a likely one
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert "ended after 1 request" in process.stdout.read()
        assert "Traceback" not in process.stderr.read()


def test_sigterm_before_the_first_request_is_heard(file, tmp_path):
    """Between the line that tells the address and the loop that answers"""
    planted = "run = asyncio.run\nasyncio.run = lambda x: (time.sleep(30), run(x))"
    with started(file, planted, tmp_path) as (process, _):
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(25) in (0, -signal.SIGTERM)


def test_the_end_is_told(file, tmp_path):
    """To the terminal and to clients whose answers are not complete"""
    with started(file, "", tmp_path) as (process, address), connected(address) as s:
        s.sendall(request_of(TEXT, {"prompt": "a", "max_tokens": 4000, "stream": True}))
        assert s.recv(12) == b"HTTP/1.1 200"
        os.kill(process.pid, signal.SIGINT)
        received = b""
        while piece := s.recv(1 << 16):
            received += piece
        assert process.wait(PATIENCE) == 0
        if b"[DONE]" not in received:
            assert b"the server ended before this answer was complete" in received
        assert "ended after 1 request" in process.stdout.read()
        assert process.stderr.read() == ""


class Full:
    """A stream on a disk without space"""

    def __init__(self):
        self.tried = 0

    def write(self, text):
        self.tried += 1
        raise OSError(errno.ENOSPC, "No space left on device")

    flush = write


def test_a_log_that_cannot_be_written_harms_no_answer(there, monkeypatch):
    """The connection stays open, and the thread of the engine survives a fault."""
    address, server = there
    engine, full = server.default.engine, Full()
    monkeypatch.setattr(server.options, "access_log", True)
    monkeypatch.setattr(sys, "stderr", full)
    steps, step = iter([ZeroDivisionError]), engine.step

    def failing():
        step()
        for error in steps:
            raise error

    monkeypatch.setattr(engine, "step", failing)
    with contextlib.closing(http.client.HTTPConnection(address.removeprefix("http://"),
                                                       timeout=PATIENCE)) as connection:
        body = json.dumps({"prompt": "a", "max_tokens": 30})
        connection.connect()
        s = connection.sock
        for status in 500, 200, 200:
            connection.request("POST", TEXT, body, {"content-type": "application/json"})
            response = connection.getresponse()
            assert response.status == status and response.read() and connection.sock is s
    assert full.tried >= 4


# ---- what clients may say
def test_any_name_of_a_model_is_accepted(there):
    """There is one model, and clients are set up for others."""
    body = {"model": "gpt-4o-mini", "prompt": "a", "max_tokens": 1}
    assert post(there[0], TEXT, body)[2]["model"] == "little"


def test_a_missing_content_type_is_named(there):
    status, _, said = post(there[0], TEXT, {}, **{"content-type": ""})
    assert status == 415 and "Content-Type: application/json" in said["error"]["message"]


def test_the_bundled_model_has_its_name():
    from nanoeuler_parts.serve.models import name_of
    assert name_of(beside_program(SHIPPED)) == BUNDLED
    assert name_of("/somewhere/mine.bin") == "mine"
