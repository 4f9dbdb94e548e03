"""The server: OpenAI's client and the texts it gets, many at once, what is refused, who may ask."""
import contextlib
import copy
import datetime
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ROOT, needs, refused, slow, some, warm_command
from models import write
from oracles import naive
from servers import CFG, chat_model, post, send, serving, until

import nanoeuler as ne

pytestmark = pytest.mark.cli
needs("starlette")
needs("uvicorn")
PROMPT, WORDS = "To be, or not to be", "abcdefgh, the quick brown fox"


@pytest.fixture(scope="module")
def file(tmp_path_factory, tokenizer):
    return chat_model(tmp_path_factory.mktemp("served") / "little.bin", tokenizer)


@pytest.fixture(scope="module")
def there(file):
    """A server that many tests use, and its address"""
    with serving(file) as found:
        yield found


@pytest.fixture
def at(there):
    address, server = there
    until(lambda: not server.default.engine.active and not server.default.engine.waiting)
    return address


@pytest.fixture(scope="module")
def alone(file):
    """What `generate` writes to a prompt of ids by itself: (text, tokens, why it ends)"""
    model = ne.load(file)

    def text(ids, **sampling):
        options = ne.Sampling(**{"temperature": 1.0, **sampling}).check()
        [(_, [reply])] = model.answers_to([ids], options, 1, ne.Pace())
        return reply.answer, reply.tokens, reply.finish
    text.model = model
    return text


@pytest.fixture
def client(at):
    openai = needs("openai")
    with openai.OpenAI(base_url=f"{at}/v1", api_key="none", max_retries=0) as client:
        yield client


def ids_of(alone, text=PROMPT):
    return alone.model.tokenizer.encode(text).tolist()


# ---- OpenAI's client
def test_the_client_of_openai_finds_the_model(client):
    assert [m.id for m in client.models.list()] == ["little"]
    assert client.models.retrieve("little").object == "model"


@pytest.mark.parametrize("more", [
    {}, {"temperature": 0}, {"top_p": 0.7, "presence_penalty": 1, "frequency_penalty": 0.5},
    {"stop": ["e", "zz"]}])
def test_completions_are_what_generate_writes(client, alone, more):
    """At once and as a stream: the text of `generate` with the same seed, to the byte."""
    said = dict(more)
    if isinstance(said.get("stop"), str):
        said["stop"] = [said["stop"]]
    want, tokens, finish = alone(ids_of(alone), tokens=40, seed=5, **said)
    asked = dict(model="little", prompt=PROMPT, max_tokens=40, seed=5, **more)
    found = client.completions.create(**asked)
    assert (found.choices[0].text, found.choices[0].finish_reason) == (want, finish)
    assert found.usage.completion_tokens == len(tokens)
    assert found.usage.prompt_tokens == len(ids_of(alone))
    chunks = [*client.completions.create(**asked, stream=True,
                                         stream_options={"include_usage": True})]
    assert "".join(c.choices[0].text for c in chunks[:-1]) == want
    assert len(chunks) > 3 or "stop" in more
    assert chunks[-2].choices[0].finish_reason == finish
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == len(tokens)


def test_chat_is_what_generate_writes(client, alone):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A?"},
                {"role": "assistant", "content": "B."}, {"role": "user", "content": "What?"}]
    ids = alone.model.ids_of([(m["role"], m["content"]) for m in messages])
    want, _, finish = alone(ids, tokens=20, seed=2)
    asked = dict(model="little", messages=messages, max_tokens=20, seed=2)
    found = client.chat.completions.create(**asked)
    assert found.choices[0].message.content == want
    assert found.choices[0].message.role == "assistant"
    assert found.choices[0].finish_reason == finish
    stream = client.chat.completions.create(**asked, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == want


def test_several_prompts_and_answers(client, alone):
    """Texts or ids; the j-th answer to the i-th prompt is that of `generate --file`."""
    prompts = [PROMPT, "Nothing", "a"]
    asked = dict(model="little", max_tokens=12, n=2, seed=9)
    by_text = client.completions.create(prompt=prompts, **asked)
    by_ids = client.completions.create(prompt=[ids_of(alone, p) for p in prompts], **asked)
    assert [c.text for c in by_text.choices] == [c.text for c in by_ids.choices]
    options = ne.Sampling(tokens=12, seed=9, n=2, temperature=1.0)
    found = dict(alone.model.answers_to([ids_of(alone, p) for p in prompts], options, 4, ne.Pace()))
    want = [reply.answer for i in range(3) for reply in found[i]]
    assert [c.text for c in by_text.choices] == want
    assert [c.index for c in by_text.choices] == list(range(6))


def test_log_probabilities_are_those_of_the_forward_pass(client, alone):
    """Also of the prompt, with echo: what an evaluation harness reads."""
    ids = ids_of(alone, "To be, or not to be, that is the question")
    c = client.completions.create(model="little", prompt=ids, max_tokens=4, echo=True, logprobs=3,
                                  temperature=0)
    found = c.choices[0].logprobs
    checkpoint = ne.read_checkpoint(alone.model_file, moments=False)
    tokens, _ = alone(ids, tokens=4, temperature=0)[1:]
    whole = [*ids, *tokens]
    logits = ne.Model(checkpoint.cfg, checkpoint.flat).logits(np.array([whole], np.int32))[0, 0]
    want = [ne.log_softmax(z)[token] for z, token in zip(logits, whole[1:])]
    assert found.token_logprobs[0] is None and len(found.tokens) == len(whole)
    assert np.abs(np.array(found.token_logprobs[1:]) - want).max() < 1e-4
    assert c.choices[0].text.startswith("To be, or not")
    for z, top in zip(logits, found.top_logprobs[1:]):
        assert max(top.values()) == pytest.approx(ne.log_softmax(z).max(), abs=1e-4)
    none = client.completions.create(model="little", prompt=ids, max_tokens=0, echo=True,
                                     logprobs=1)
    assert none.choices[0].logprobs.token_logprobs == found.token_logprobs[:len(ids)]


@pytest.fixture(autouse=True, scope="module")
def named(alone, file):
    alone.model_file = file


def test_log_probabilities_of_a_chat(client, alone):
    c = client.chat.completions.create(
        model="little", messages=[{"role": "user", "content": "So?"}], max_tokens=5, seed=1,
        logprobs=True, top_logprobs=2)
    content = c.choices[0].logprobs.content
    assert len(content) == c.usage.completion_tokens and len(content[0].top_logprobs) == 2
    joined = b"".join(bytes(x.bytes) for x in content)
    assert joined.decode("utf-8", "replace") == c.choices[0].message.content


def test_the_clients_errors_are_its_own(client):
    openai = needs("openai")
    with pytest.raises(openai.NotFoundError, match="no embeddings"):
        client.embeddings.create(model="little", input="a")
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        client.completions.create(model="little", prompt="a", logit_bias={"5": 3})


# ---- many at once
def asked(i):
    return {"prompt": f"{WORDS[:i % 19 + 1]} {i % 5}", "seed": i, "max_tokens": 20 + i % 30,
            "temperature": 0.9, "stream": i % 2 == 0}


def text_in(said):
    if not isinstance(said, str):
        return said["choices"][0]["text"]
    events = [json.loads(e[6:]) for e in said.split("\n\n") if e.startswith("data: {")]
    return "".join(e["choices"][0]["text"] for e in events)


def test_64_clients_get_the_texts_of_one(at, alone):
    """The bits of the same request by itself, for a model whose contexts slide, too."""
    def one(i):
        status, _, said = post(at, "/v1/completions", asked(i))
        assert status == 200, said
        return text_in(said)

    with ThreadPoolExecutor(64) as pool:
        got = [*pool.map(one, range(128))]
    for i, text in enumerate(got):
        body = asked(i)
        assert text == alone(ids_of(alone, body["prompt"]), tokens=body["max_tokens"], seed=i,
                             temperature=0.9)[0]


def leave_open(address, body):
    """A connection on which a request was sent"""
    host, port = address.removeprefix("http://").split(":")
    raw, s = json.dumps(body).encode(), socket.create_connection((host, int(port)))
    s.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
              b"application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(raw), raw))
    return s


def leave(address, body):
    """Asks, reads the first bytes of the answer, and is gone."""
    with leave_open(address, body) as s:
        if body["stream"]:
            assert s.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(there, at, stream):
    _, server = there
    engine, before, n = server.default.engine, server.requests.left, 128     # minutes of work
    steps = engine.pace.steps
    with leave_open(at, {"prompt": "a", "max_tokens": 4000, "n": n, "stream": stream}):
        until(lambda: engine.active)         # before, it would leave the tokenizer's queue
    until(lambda: server.requests.left > before and not engine.active)
    assert n / 2 < server.requests.left - before <= n    # each that has not ended
    assert engine.pace.steps - steps < n / 4 * 4000      # not written to their end
    assert len(engine.free) == len(engine.used)
    assert post(at, "/v1/completions", {"prompt": "a", "max_tokens": 3})[0] == 200


def test_half_of_the_clients_leave(there, at, alone):
    _, server = there

    def one(i):
        if i % 2:
            leave(at, {"prompt": WORDS[:1 + i % 9], "max_tokens": 3000, "stream": i % 4 == 1})
            return None
        return text_in(post(at, "/v1/completions", asked(i))[2])

    with ThreadPoolExecutor(32) as pool:
        got = [*pool.map(one, range(64))]
    for i in range(0, 64, 2):
        body = asked(i)
        want = alone(ids_of(alone, body["prompt"]), tokens=body["max_tokens"], seed=i,
                     temperature=0.9)[0]
        assert got[i] == want
    until(lambda: not server.default.engine.active and not server.default.engine.waiting)
    assert len(server.default.engine.free) == 4


# ---- the engine
def engine_of(file, slots=2, **options):
    from nanoeuler_parts.serve.engine import Engine
    from nanoeuler_parts.serve.metrics import Stats
    decoder = ne.load(file).decoder
    engine = Engine(lambda: decoder.with_slots(slots), Stats(), threads=1, **options)
    engine.reader = engine.make()
    engine.free, engine.used = list(range(slots)), dict.fromkeys(range(slots), -1)
    return engine


def answer(ids, tokens=5, seed=1, **more):
    from nanoeuler_parts.serve.engine import Answer
    return Answer(ids, ne.Sampling(tokens=tokens, speculate=0), ne.rng_of(seed), None,
                  [b"x"] * CFG.vocab_size, **more)


def test_a_long_prompt_does_not_stall_a_stream(file):
    """While it is read in pieces, the other one gets a token each step."""
    engine, came = engine_of(file), []
    engine.rows = 8
    engine.tell = came.extend
    short, long = answer([1, 2], tokens=60), answer([i % 300 for i in range(90)], tokens=3)
    engine.submit([short])
    engine.step()
    engine.step()
    engine.submit([long])
    engine.rows = 8
    steps = 0
    while not long.first:
        before = len(short.reply.tokens)
        engine.step()
        engine.rows, steps = 8, steps + 1
        assert len(short.reply.tokens) == before + 1
    assert steps >= 90 // 8


@pytest.mark.parametrize("speaking", [1, 16])
def test_pieces_of_prompts_take_the_time_that_they_may(file, speaking):
    """However many speak beside them: a step of n rows that takes 10 ms and 0.9 ms a row"""
    from nanoeuler_parts.serve.engine import PIECE_SECONDS
    engine = engine_of(file)

    def step(reading):
        seconds = 0.01 + 0.0009 * (reading + speaking)
        engine.suit(reading, seconds, speaking)
        return seconds
    step(0)
    for _ in range(30):
        took = step(engine.rows)
    rows = engine.rows
    of_prompts = took * rows / (rows + speaking)         # the rest is the speakers' own
    assert of_prompts == pytest.approx(PIECE_SECONDS, rel=0.05)
    step(1)                                  # the end of a prompt
    assert engine.rows == rows


def test_what_a_slot_holds_is_not_read_again(file):
    engine = engine_of(file)
    ids = [i % 300 for i in range(40)]
    first, second, other = answer(ids), answer([*ids[:30], 7, 8]), answer([9, 9, 9])
    for one in (first, other, second):
        engine.submit([one])
        while not (one.reply and one.reply.finish):
            engine.step()
    assert (first.cached, other.cached, second.cached) == (0, 0, 30)
    assert second.reply.slot == first.reply.slot != other.reply.slot
    clean = engine_of(file)
    again = answer(second.ids)
    clean.submit([again])
    while not (again.reply and again.reply.finish):
        clean.step()
    assert again.reply.tokens == second.reply.tokens


OWNERS = [("a", ""), ("b", ""), ("a", "s"), ("b", "s"), ("a", None), ("", "a")]


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("runs", [True, False])
def test_prompts_of_other_owners_are_not_in_the_cache(owner, runs, file):
    """Of another address or cache_salt, or with cache_prompt false: neither from a slot in use nor
    from a free one.  The number of cached tokens would tell how much of a prompt was guessed."""
    engine, ids = engine_of(file, slots=len(OWNERS) + 2), [i % 300 for i in range(30)]
    tokens = 200 if runs else 2
    for client, salt in OWNERS:
        if (client, salt) != owner:
            engine.submit([answer(ids, tokens=tokens, client=client, salt=salt)])
    while len(engine.active) < len(OWNERS) - 1 or any(
            len(a.reply.pending) > 1 for a in engine.active.values()):
        engine.step()
        if not runs and not engine.active:
            break
    client, salt = owner
    for cached in (0, 0 if salt is None else 29):
        one = finished(engine, answer(ids, tokens=1, client=client, salt=salt))
        assert one.cached == cached


def test_a_client_is_its_address_and_its_salt(file):
    """Behind a proxy on this machine, the address is the client's."""
    with serving(file) as (at, _):
        def cached(path="/v1/completions", address="", **more):
            body = {"prompt": "To be, or not to be", "max_tokens": 1, **more}
            headers = {"x-forwarded-for": address} if address else {}
            return post(at, path, body, **headers)[2]["usage"]["prompt_tokens_details"][
                "cached_tokens"]

        others = [{}, {"address": "10.1.2.3"}, {"address": "10.1.2.4"}, {"cache_salt": "x"}]
        assert not any(cached(**more) for more in others)
        assert all(cached(**more) for more in others)
        assert not any(cached(**more, cache_prompt=False) for more in others)


def test_an_explanation_reads_all_tokens_of_another_client(file):
    """Otherwise its time would tell which ids another client had explained."""
    from nanoeuler_parts.serve.explain import Explainer
    explainer, ids = Explainer(ne.load(file), file), [i % 300 for i in range(90)]
    for client, pieces in ("a", 1), ("a", 0), ("b", 1), ("b", 0), ("a", 1):
        assert len([*explainer.rivals(CFG.seq_len, ids, None, client)()]) == pieces


def test_what_another_slot_holds_is_copied(file):
    """Also from one that is being written, or read; the answer is that of a slot that read all."""
    engine, ids = engine_of(file, slots=3), [i % 300 for i in range(60)]
    first = answer(ids, tokens=30)
    engine.submit([first])
    while not first.first:
        engine.step()
    second, third = answer([*ids[:41], 7, 8], tokens=9, seed=2), answer(ids, tokens=9, seed=3)
    engine.submit([second, third])
    while not third.reply or not second.reply.finish or not third.reply.finish:
        engine.step()
    assert (second.cached, third.cached) == (41, 59) and not first.reply.finish
    assert len({a.reply.slot for a in (first, second, third)}) == 3
    for found in (second, third):
        clean = engine_of(file)
        again = answer(found.ids, tokens=9, seed=2 if found is second else 3)
        clean.submit([again])
        while not (again.reply and again.reply.finish):
            clean.step()
        assert again.cached == 0 and again.reply.tokens == found.reply.tokens
        n = len(found.ids) + 8               # the last token was drawn, and not read
        (k, v), (k2, v2) = engine.reader.cache, clean.reader.cache
        slot, slot2, full = found.reply.slot, again.reply.slot, n // k.shape[5]
        assert v[:, slot, :, :n].tobytes() == v2[:, slot2, :, :n].tobytes()
        assert k[:, slot, :, :full].tobytes() == k2[:, slot2, :, :full].tobytes()


def test_the_queue_has_a_limit_and_requests_a_time(file):
    from nanoeuler_parts.serve.engine import Busy
    engine, came = engine_of(file, queue=1), []
    engine.tell = came.extend
    engine.submit([answer([1]) for _ in range(3)])       # two slots and one that waits
    with pytest.raises(Busy, match="no room for 1 answer: 3 are waiting"):
        engine.submit([answer([1])])
    engine = engine_of(file)
    engine.tell = came.extend
    late = answer([1], tokens=9)
    engine.submit([late])
    engine.step()
    assert came[-1][0] is late and not came[-1][1].finish
    late.deadline = time.perf_counter()
    engine.step()
    assert came[-1][0] is late and came[-1][1].finish == "timeout"
    assert sorted(engine.free) == [0, 1]


def test_a_client_cannot_fill_the_queue_of_the_others(file):
    from nanoeuler_parts.serve.engine import Busy, CLIENTS
    engine = engine_of(file, queue=2)
    for i in range(CLIENTS):
        engine.submit([answer([1], client=f"{i}") for _ in range(2)])
        engine.submit([answer([1], client=f"{i}") for _ in range(2 if i == 0 else 0)])
        with pytest.raises(Busy, match="the limit is 2 of one client"):
            engine.submit([answer([1], client=f"{i}") for _ in range(3)])
    with pytest.raises(Busy, match="10 are waiting, the limit is 8 of all clients"):
        engine.submit([answer([1], client="new")])


@pytest.mark.parametrize("slots", [2, 3])
def test_one_client_cannot_keep_all_slots(slots, file):
    """Another client's answer begins after some steps, and so does a third one's.  An answer that
    was preempted for them is bit-identical to the same one alone, also if its text slides."""
    from nanoeuler_parts.serve.engine import PATIENCE
    engine = engine_of(file, slots=slots)
    ids = [[i, *range(20)] for i in range(4)]
    many = [answer(x, tokens=150, seed=i, client="a") for i, x in enumerate(ids)]
    engine.submit(many)
    for _ in range(100):                     # beyond the context of 96 tokens
        engine.step()
    assert len(engine.active) == slots
    others = [answer([7], tokens=1000, client="b"), answer([8], tokens=1000, client="c")]
    for other in others[:slots - 1]:
        engine.submit([other])
        for _ in range(PATIENCE + 2):
            engine.step()
        assert len(other.reply.tokens) > 0
    assert engine.running() == {"a": 1, "b": 1, **({"c": 1} if slots == 3 else {})}
    engine.cancel(others)
    while engine.unfinished():
        engine.step()
    for i, one in enumerate(many):
        alone = finished(engine_of(file), answer(ids[i], tokens=150, seed=i))
        assert one.reply.tokens == alone.reply.tokens and one.reply.finish == "length"
        assert one.cached == 0 and engine.stats.counters["prompt_tokens"] < 4 * 21 + 3


@pytest.mark.parametrize("scored", [(True, True), (True, False), (False, True)])
def test_a_prompt_that_is_scored_keeps_its_slot(scored, file, monkeypatch):
    """Another client waits for a slot while prompts are scored.  Each token has one score, and
    scores and answers are those of the same answers alone."""
    from nanoeuler_parts.serve import engine as module
    monkeypatch.setattr(module, "SCORED_ROWS", 1)        # so that scoring takes many steps
    engine = engine_of(file)
    ids = [[i, *range(2 * module.PATIENCE)] for i in range(3)]
    own = [answer(x, tokens=9, scored=is_scored, client="a") for x, is_scored in zip(ids, scored)]
    engine.submit(own)
    engine.step()
    other = answer(ids[2], tokens=9, client="b")
    engine.submit([other])
    while engine.unfinished():
        engine.step()
    for one, x, is_scored in zip([*own, other], ids, (*scored, False)):
        alone = finished(engine_of(file), answer(x, tokens=9, scored=is_scored))
        assert one.scores == alone.scores and len(one.scores) == (len(x) - 1) * is_scored
        assert one.reply.tokens == alone.reply.tokens and len(one.reply.tokens) == 9


def test_clients_get_the_slots_in_turns(file):
    """With one slot, whoever has had none for the longest time gets it, and then the earliest."""
    engine, order = engine_of(file, slots=1), []
    engine.tell = lambda news: order.extend(a.client for a, n in news if n.finish)
    for client in "aaaabbc":
        engine.submit([answer([1], tokens=1, client=client)])
    while engine.unfinished():
        engine.step()
    assert "".join(order) == "abcabaa"


def test_clients_have_their_explanations_in_turns(file):
    from nanoeuler_parts.serve.engine import Busy, MOST_JOBS
    engine, order = engine_of(file), []

    def job(name):
        def work():
            yield
            order.append(name)
        return work

    for name in "a" * MOST_JOBS:
        engine.later(job(name), name)
    with pytest.raises(Busy):
        engine.later(job("a"), "a")
    for name in "bbc":
        engine.later(job(name), name)
    while engine.jobs:
        engine.step()
    assert "".join(order) == "abcab" + "a" * (MOST_JOBS - 2)


def test_whatever_changes_wakes_the_engine(file, monkeypatch):
    """Its thread waits without a time limit: one notification that is lost would stop it."""
    engine, woken = engine_of(file), []
    monkeypatch.setattr(engine.changed, "notify", lambda n=1: woken.append("one"))
    monkeypatch.setattr(engine.changed, "notify_all", lambda: woken.append("all"))
    one = answer([1])
    for change in (lambda: engine.submit([one]), lambda: engine.cancel([one]),
                   lambda: engine.later(lambda: iter(())), engine.close):
        woken.clear()
        change()
        assert woken


def test_the_engine_waits_while_there_is_nothing_to_do(file, monkeypatch):
    """And for each of: an answer that waits, one that is written, an explanation, the end."""
    engine, waited = engine_of(file), []

    def wait(timeout=None):
        waited.append(timeout)
        engine.waiting.append(None)          # as if somebody had submitted

    monkeypatch.setattr(engine.changed, "wait", wait)
    assert engine.wait() and waited == [None]
    for name, busy in ("waiting", [1]), ("active", {0: 1}), ("jobs", [1]), ("closing", True):
        engine.waiting, engine.active, engine.jobs, engine.closing = [], {}, [], False
        setattr(engine, name, busy)
        assert engine.wait() == (name != "closing")
    assert len(waited) == 1


def finished(engine, one):
    """Submits an answer and steps to its end."""
    engine.submit([one])
    while not (one.reply and one.reply.finish):
        engine.step()
    return one


def test_what_a_failed_step_has_read_is_not_cached(file, monkeypatch):
    """Its slot may hold keys and values of only some layers."""
    engine = engine_of(file)
    ids = [i % 300 for i in range(40)]
    assert finished(engine, answer(ids)).cached == 0
    engine.submit([answer([*ids, 5, 6])])
    with monkeypatch.context() as patch:
        patch.setattr(ne, "next_tokens", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    engine.fail("planted")
    assert finished(engine, answer(ids)).cached == 0


def test_explanations_that_wait_have_a_limit(file):
    from nanoeuler_parts.serve.engine import MOST_JOBS, Busy
    engine = engine_of(file)
    jobs = [engine.later(lambda: iter(())) for _ in range(MOST_JOBS)]
    with pytest.raises(Busy, match="explanations"):
        engine.later(lambda: iter(()))
    engine.step()                            # one is done
    assert jobs[0].done() and not jobs[1].done()
    engine.later(lambda: iter(()))


def test_a_failed_step_ends_answers_and_not_the_server(file, monkeypatch, capsys):
    with serving(file) as (at, server):
        def fail(*args):
            raise ZeroDivisionError("planted")
        monkeypatch.setattr(ne, "next_tokens", fail)
        status, _, said = post(at, "/v1/completions", {"prompt": "a"})
        assert status == 500 and "planted" not in json.dumps(said)
        monkeypatch.undo()
        assert post(at, "/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
    assert "planted" in capsys.readouterr().err


def test_what_a_step_had_to_say_before_its_fault_is_said(file, monkeypatch):
    """Who had no time left learns it, though that step fails for others; and a fault on taking a
    slot is told to who should have got it."""
    engine, came = engine_of(file), []
    engine.tell = came.extend
    late, other = answer([1], tokens=9, deadline=time.perf_counter()), answer([2], tokens=9)
    engine.submit([late, other])

    def fail(*args):
        raise ne.UserError("planted")
    with monkeypatch.context() as patch:
        patch.setattr(ne, "next_tokens", fail)
        with pytest.raises(ne.UserError):
            engine.step()
    engine.fail("planted")
    assert {(id(a), n.finish) for a, n in came} == {(id(late), "timeout"), (id(other), "error")}
    again = answer([3])
    engine.submit([again])
    with monkeypatch.context() as patch:
        patch.setattr(ne, "Reply", fail)
        with pytest.raises(ne.UserError):
            engine.step()
    engine.fail("planted")
    assert came[-1][0] is again and came[-1][1].finish == "error"
    assert sorted(engine.free) == [0, 1] and not engine.active


def test_an_explanation_that_is_given_up_disturbs_nobody(file):
    """Cancelled while it is computed: others' answers go on."""
    engine, came = engine_of(file), []
    engine.tell = came.extend

    def job():
        yield
        future.cancel()
    future = engine.later(job)
    one = answer([1], tokens=5)
    engine.submit([one])
    while not (one.reply and one.reply.finish):
        engine.step()
    assert not engine.jobs and [n.finish for _, n in came][-1] == "length"


def test_hundreds_of_clients_come_and_go(there, at):
    """Each asks, leaves early, late or never, and the next one always gets its first token."""
    _, server = there

    def one(i):
        rng = random.Random(i)
        body = {"prompt": WORDS[:rng.randint(1, 20)], "stream": rng.random() < 0.7,
                "max_tokens": rng.choice((1, 5, 3000)), "seed": i}
        if rng.random() < 0.6:
            with leave_open(at, body) as s:
                s.settimeout(200)
                if rng.random() < 0.7 and (body["stream"] or body["max_tokens"] < 3000):
                    assert s.recv(rng.randint(1, 2000)).startswith(b"H")
        else:
            status, _, said = post(at, "/v1/completions", {**body, "max_tokens": 5})
            assert status == 200, said

    with ThreadPoolExecutor(24) as pool:
        assert len([*pool.map(one, range(some(400)))]) == some(400)
    until(lambda: not server.default.engine.active and not server.default.engine.waiting)
    assert sorted(server.default.engine.free) == [0, 1, 2, 3]
    assert post(at, "/v1/completions", {"prompt": "a", "max_tokens": 3})[0] == 200


@pytest.mark.parametrize("seconds", [2, slow(10)])
def test_some_seconds_of_64_clients_half_of_whom_leave(seconds, file, tmp_path):
    """In a process of its own: texts, slots, and memory, as the minute of bench/serve_load.py."""
    said = subprocess.run([sys.executable, str(ROOT / "bench/serve_load.py"), file, "--seconds",
                           str(seconds), "--out", str(tmp_path / "load.txt")], cwd=tmp_path,
                          timeout=250, capture_output=True, encoding="utf-8")
    assert said.returncode == 0, said.stdout + said.stderr


# ---- what is refused
@pytest.mark.parametrize("path, body, words", [
    ("completions", {}, "prompt is missing"), ("completions", {"prompt": ""}, "no token"),
    ("completions", {"prompt": []}, "expected 1 to 128 prompts, got 0"),
    ("completions", {"prompt": [[]]}, "no token"),
    ("completions", {"prompt": [1, "a"]}, "a list of token ids"),
    ("completions", {"prompt": 5}, "a list of token ids"),
    ("completions", {"prompt": [["a"]]}, "a list of token ids"),
    ("completions", {"prompt": [512]}, "0 to 511"), ("completions", {"prompt": [-1]}, "0 to 511"),
    ("completions", {"prompt": [True]}, "a list of token ids"),
    ("completions", {"prompt": [1 << 80]}, "0 to 511"),
    ("completions", {"prompt": "a", "temperature": "hot"}, "temperature"),
    ("completions", {"prompt": "a", "temperature": True}, "temperature"),
    ("completions", {"prompt": "a", "top_p": 1.5}, "top_p"),
    ("completions", {"prompt": "a", "max_tokens": 5000}, "4096"),
    ("completions", {"prompt": "a", "max_tokens": 1.5}, "a number of tokens from 0"),
    ("completions", {"prompt": "a", "n": 1000}, "n is 1000"),
    ("completions", {"prompt": ["a"] * 100, "n": 2}, "at most 128 answers per request"),
    ("completions", {"prompt": "a", "stop": [""]}, "stop"),
    ("completions", {"prompt": "a", "stop": ["a"] * 17}, "stop"),
    ("completions", {"prompt": "a", "stream": 1}, "stream"),
    ("completions", {"prompt": "a", "stream_options": {"include_usage": True}}, "needs stream"),
    ("completions", {"prompt": "a", "best_of": 3}, "best_of is not supported"),
    ("responses", {"input": "a", "include": "usage"}, "include is 'usage', expected a list"),
    ("responses", {"input": "a", "include": ["usage"]}, "expected a list of message.output_text"),
    ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "think": False,
                          "chat_template_kwargs": {"enable_thinking": True}},
     "another parameter switches thoughts off"),
    ("completions", {"prompt": "a", "suffix": "b"}, "suffix is not supported"),
    ("completions", {"prompt": "a", "logit_bias": {"1": 2}}, "logit_bias is not supported"),
    ("completions", {"prompt": "a", "temprature": 1}, "'temprature'"),
    ("completions", {"prompt": "a", "seed": 1 << 63}, "seed"),
    ("completions", {"prompt": "a", "logprobs": True}, "logprobs"),
    ("completions", {"prompt": "word " * 300}, "context of 96"),
    ("completions", {"prompt": "x" * 900_000}, "context of 96"),
    ("completions", {"prompt": [5] * 97}, "97 tokens"),
    ("chat/completions", {}, "messages is missing"),
    ("chat/completions", {"messages": []}, "1 to 2,048"),
    ("chat/completions", {"messages": "hi"}, "expected a list"),
    ("chat/completions", {"messages": [{"role": "user", "content": ""}] * 2049}, "1 to 2,048"),
    ("chat/completions", {"messages": ["hi"]}, "messages[0]: expected an object"),
    ("chat/completions", {"messages": [{"role": "user\n", "content": "x"}]},
     "messages[0]: expected one of the roles system, user, assistant, tool, found 'user\\n'"),
    ("chat/completions", {"messages": [{"role": "user"}]}, "content"),
    ("chat/completions", {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "x"}}]}]}, "expected a text as its content"),
    ("chat/completions", {"messages": [{"role": "assistant", "content": "x"}]}, "last message"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "tools"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2},
     "needs logprobs"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1,
                          "max_completion_tokens": 2}, "max_completion_tokens differ; send one"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x y " * 99}]}, "context")])
def test_a_wrong_request_is_refused_with_a_reason(at, path, body, words):
    status, _, said = post(at, f"/v1/{path}", body)
    assert status == 400 and words in said["error"]["message"], said
    assert {*said["error"]} == {"message", "type", "param", "code"}


def test_what_asks_for_nothing_that_is_not_done_is_accepted(at):
    body = {"prompt": "a", "max_tokens": 1, "best_of": 1, "logit_bias": {}, "suffix": None,
            "user": "me", "stop": None, "n": None}
    assert post(at, "/v1/completions", body)[0] == 200


@pytest.mark.parametrize("path, name, accepted, rejected", [
    ("completions", "stop", ["x" * 256], ["x" * 257]), ("completions", "stop", ["x"] * 16,
                                                        ["x"] * 17),
    ("completions", "n", 128, 129), ("completions", "prompt", ["a"] * 128, ["a"] * 129),
    ("completions", "logprobs", 20, 21), ("chat/completions", "top_logprobs", 20, 21),
    ("completions", "temperature", 100, 100.5), ("completions", "top_p", 1, 1.01),
    ("completions", "min_p", 1, 1.01), ("completions", "presence_penalty", -100, -101),
    ("completions", "max_tokens", 0, -2), ("chat/completions", "max_tokens", 1, 0)])
def test_limits_of_parameters(path, name, accepted, rejected, at):
    """The last value that is accepted, and the first one that is not"""
    body = {"prompt": "a", "max_tokens": 1}
    if path == "chat/completions":
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "logprobs": True}
    assert post(at, f"/v1/{path}", {**body, name: accepted})[0] == 200
    assert post(at, f"/v1/{path}", {**body, name: rejected})[0] == 400


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_may_be_as_long_as_the_limit(chunked, file):
    raw = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    with serving(file, body=200) as (at, _):
        for size, status in ((200, 200), (201, 413)):
            body = raw + b" " * (size - len(raw))
            connection = http.client.HTTPConnection(at.removeprefix("http://"), timeout=200)
            with contextlib.closing(connection):
                connection.request("POST", "/v1/completions", iter([body]) if chunked else body,
                                   {"content-type": "application/json"}, encode_chunked=chunked)
                assert connection.getresponse().status == status


def test_the_usage_of_a_stream_is_in_its_last_event(at):
    """In the others it is null; it is in none of them where it was not asked for."""
    body = {"prompt": "a", "max_tokens": 3, "stream": True}
    for more, keys in (({}, [False]), ({"stream_options": {"include_usage": True}}, [False, True])):
        said = post(at, "/v1/completions", {**body, **more})[2]
        events = [json.loads(e[6:]) for e in said.split("\n\n") if e.startswith("data: {")]
        assert {"usage" in e for e in events} == {bool(more)}
        assert sorted({bool(e.get("usage")) for e in events}) == keys
        assert not more or events[-1]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("raw, status, words", [
    (b'{"seed": %s}' % (b"7" * 5000), 400, "expected integers of at most 4,300 digits"),
    (b'{"seed": %s}' % (b"7" * 4000), 400, "7..., expected an integer"),
    (b"", 400, "not JSON"), (b"[1]", 400, "expected a JSON object"), (b"{", 400, "not JSON"),
    (b'{"prompt": "\\ud800"}', 400, "surrogate"), (b"\xff\xfe", 400, "UTF-8"),
    (b'{"prompt": "a", "temperature": NaN}', 400, "NaN"), (b"[" * 200_000, 400, "deeply"),
    (b'{"prompt": "a", "max_tokens": 1e999}', 400, "up to 1.8e+308"),
    (b'{"prompt": "' + b"a" * (1 << 20) + b'"}', 413, "1,048,576")])
def test_a_wrong_body(at, raw, status, words):
    found, _, said = post(at, "/v1/completions", raw)
    assert found == status and words in said["error"]["message"], said


def test_wrong_addresses_methods_and_types(at):
    assert send(at, "GET", "/v1/completions")[0] == 405
    assert send(at, "GET", "/v1/nothing")[2]["error"]["message"] == (
        "/v1/nothing does not exist on this server")
    assert send(at, "GET", "/../../etc/passwd")[0] == 404
    assert send(at, "GET", "/api/run?name=../secret.jsonl")[0] == 404
    for start in "-1", "%C2%B2", "1" * 16:   # a superscript 2 is a digit
        status, _, said = send(at, "GET", f"/api/run?name=x&from={start}")
        assert status == 400 and "expected a position in bytes" in said["error"]["message"]
    assert send(at, "GET", "/v1/models/other")[2]["id"] == "little"      # the only model
    status, _, said = post(at, "/v1/completions", {"prompt": "a"}, **{"content-type": "text/plain"})
    assert status == 415 and "application/json" in said["error"]["message"]


def mutated(rng):
    """A request that was good, with something wrong in it, mostly"""
    said = {"role": "user", "content": "a"}
    good, paths = rng.choice([
        ({"prompt": "a", "max_tokens": 1, "n": 1, "stop": ["x"], "temperature": 1, "seed": 1},
         ["/v1/completions", "/v1/chat/completions"]),
        ({"messages": [said], "max_tokens": 1, "logprobs": True},
         ["/v1/completions", "/v1/chat/completions"]),
        ({"input": [said], "max_output_tokens": 1, "instructions": "b", "truncation": "auto"},
         ["/v1/responses"]),
        ({"messages": [said], "prompt": "a", "options": {"num_predict": 1, "stop": ["x"]},
          "stream": False}, ["/api/chat", "/api/generate", "/api/show"])])
    odd = [None, True, -1, 0, 1.5, 1 << 70, "", "x", [], {}, [[]], [None], {"a": 1}, "\0", 1e308,
           [{"role": "user"}], "word " * 500]
    body = copy.deepcopy(good)
    for _ in range(rng.randint(1, 3)):
        key = rng.choice([*body, "top_p", "stream", "best_of", "user", "echo", "model", "top_k"])
        place = rng.choice([body, *(x for x in body.values() if isinstance(x, dict))])
        place[key] = copy.deepcopy(rng.choice(odd))
    raw = json.dumps(body).encode()
    if rng.random() < 0.3:
        place = rng.randrange(len(raw))
        raw = raw[:place] + bytes(rng.randrange(256) for _ in range(rng.randint(0, 3))) + \
            raw[place + rng.randint(0, 4):]
    return rng.choice(paths), raw


def test_two_thousand_malformed_requests(at):
    rng, found = random.Random(1), {}
    cases = [mutated(rng) for _ in range(some(2000))]
    with ThreadPoolExecutor(8) as pool:
        for status, _, said in pool.map(lambda case: post(at, *case), cases):
            found[status] = found.get(status, 0) + 1
            assert status == 200 or (400 <= status < 500 and said["error"]), said
    assert found[400] > 0.6 * len(cases) and set(found) <= {200, 400, 404}
    assert post(at, "/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200


# ---- who may ask
def test_other_origins_and_names_are_refused(file):
    with serving(file, origin=["https://friend.example"]) as (at, _):
        body, path = {"prompt": "a", "max_tokens": 1}, "/v1/completions"
        assert post(at, path, body, origin=at)[0] == 200
        status, headers, _ = post(at, path, body, origin="https://evil.example")
        assert status == 403 and "access-control-allow-origin" not in headers
        assert post(at, path, body, origin="null")[0] == 403
        assert send(at, "GET", "/api/model", headers={"sec-fetch-site": "cross-site"})[0] == 403
        assert post(at, path, body, host="evil.example:80")[0] == 403
        status, headers, _ = post(at, path, body, origin="https://friend.example")
        assert status == 200
        assert headers["access-control-allow-origin"] == "https://friend.example"
        status, headers, _ = send(at, "OPTIONS", path, headers={"origin": "https://friend.example"})
        assert status == 204 and "authorization" in headers["access-control-allow-headers"]


def test_a_key(file):
    with serving(file, api_key="s3cret") as (at, _):
        for path in ("/v1/models", "/metrics", "/api/model", "/api/runs"):
            status, headers, _ = send(at, "GET", path)
            assert status == 401 and headers["www-authenticate"] == "Bearer"     # RFC 9110, 11.6.1
            assert send(at, "GET", path, headers={"authorization": "Bearer s3cre"})[0] == 401
            assert send(at, "GET", path, headers={"authorization": "Bearer s3cret"})[0] == 200
        assert send(at, "GET", "/health")[0] == send(at, "GET", "/")[0] == 200


def test_pages_carry_a_policy_that_runs_nothing_of_others(at):
    for path in ("/", "/training", "/chat.js", "/style.css", "/tour.js"):
        status, headers, said = send(at, "GET", path)
        assert status == 200 and "script-src 'self';" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert "http://" not in said.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in said and "innerHTML" not in said and "style=" not in said


def test_the_former_address_of_the_training_page(at):
    """The location is relative: it leads to the page behind a prefix, too."""
    status, headers, _ = send(at, "GET", "/learn")
    assert (status, headers["location"]) == (308, "training")


@pytest.mark.parametrize("headers, status", [
    ({"transfer-encoding": "chunked", "content-length": "4"}, 400),
    ({"transfer-encoding": "chunked"}, 200)])
def test_two_lengths_of_a_body_are_refused(at, headers, status):
    """And the connection is closed, as a proxy may have counted by the other one: RFC 9112, 6.1"""
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    lines = [f"{name}: {value}" for name, value in headers.items()]
    host, port = at.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 60) as s:
        s.sendall("\r\n".join(["POST /v1/completions HTTP/1.1", f"Host: {host}",
                               "Content-Type: application/json", *lines, "", ""]).encode())
        s.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        s.settimeout(60 if status == 400 else 5)
        said = s.recv(1 << 16)
        with contextlib.suppress(ConnectionResetError):  # it closes with bytes that it never read
            while status == 400 and (more := s.recv(1 << 16)):
                said += more
    assert said.startswith(f"HTTP/1.1 {status} ".encode())
    assert (b"found both" in said) == (status == 400)


def test_an_error_repeats_little_of_a_long_address(at):
    for headers in ({}, {"accept": "text/html"}):
        status, _, said = send(at, "GET", "/" + "a" * 30_000, headers=headers)
        assert status == 404 and f"/{'a' * 99}... does not exist" in str(said)
        assert len(str(said)) < 600


def test_a_browser_gets_a_page_for_each_refusal(at):
    """Also where the name in the address is unknown"""
    for path in ("/", "/tour", "/nothing"):
        status, headers, said = send(at, "GET", path, headers={
            "accept": "text/html", "host": "evil.example"})
        assert status == 403 and "--allow-host" in said and "<h1>403</h1>" in said


@pytest.mark.parametrize("host, here, other", [
    ("0.0.0.0", "127.0.0.1:80", True), ("::", "[::1]:80", True), ("::1", "[::1]:80", False),
    ("mybox", "mybox:80", False)])
def test_the_printed_address_can_be_opened(host, here, other):
    from nanoeuler_parts.serve.server import addresses
    assert addresses(host, 80) == (here, f"{socket.gethostname()}:80" if other else "")


@pytest.mark.parametrize("seq_len, chosen, said", [
    (64, {}, ""), (64, {"context": 32}, ""), (64, {"context": 64}, ""),
    (64, {"context": 65}, "64 tokens, so --context 65 has no effect"),
    (1 << 17, {}, "a slot has 65,536 tokens, and the model's context 131,072"),
    (1 << 17, {"slots": 4}, "")])
def test_a_context_other_than_the_models_is_told(seq_len, chosen, said):
    from nanoeuler_parts.serve.models import context_of
    from nanoeuler_parts.serve.server import other_context
    from nanoeuler_parts.serve.verb import Serving
    cfg = ne.Config(n_layer=4, n_embd=128, n_head=4, n_kv_head=2, head_dim=32, seq_len=seq_len)
    options = Serving(**chosen)
    card = {"config": {"seq_len": seq_len}, "context": context_of(cfg, options)}
    found = other_context(card, options)
    assert said in found and bool(said) == bool(found)


@pytest.mark.parametrize("absent, said", [
    (["uvicorn"], ["needs uvicorn,", "'uvicorn>="]), (["markdown_it"], []),
    (["uvicorn", "markdown_it"], ["needs uvicorn,", "'uvicorn>=", "'markdown-it-py>="])])
def test_one_command_installs_all_packages_of_a_verb(absent, said, monkeypatch):
    from nanoeuler_parts.serve import verb
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name not in absent)
    found = ""
    try:
        verb.need_packages("serve", ("starlette", "uvicorn"), ("markdown_it",))
    except ne.UserError as e:
        found = str(e)
    assert bool(found) == bool(said) and all(words in found for words in said)
    assert "starlette" not in found


def test_ollama_gets_the_time_of_a_models_file(file, at):
    wanted = f"{datetime.datetime.fromtimestamp(os.path.getmtime(file), datetime.UTC):%FT%T.%fZ}"
    [tag] = send(at, "GET", "/api/tags")[2]["models"]
    assert tag["modified_at"] == wanted
    assert post(at, "/api/show", {"model": tag["name"]})[2]["modified_at"] == wanted


# ---- what stands behind a token
def test_rivals_guesses_and_trajectory(at, alone):
    ids = ids_of(alone)
    status, _, found = post(at, "/api/explain", {"tokens": ids, "chosen": 7})
    decoder = ne.Decoder(alone.model.cfg, ne.read_checkpoint(alone.model_file).flat)
    p = np.exp(ne.log_softmax(decoder.read([ne.Part(0, ids)])[0]))
    assert status == 200 and [r["id"] for r in found["rivals"]] == np.argsort(-p)[:10].tolist()
    assert found["chosen"]["p"] == pytest.approx(p[7])
    assert found["chosen"]["rank"] == 1 + (p > p[7]).sum()
    assert [g["id"] for g in found["guesses"]] == decoder.guesses(0).argmax(1).tolist()
    status, _, found = post(at, "/api/explain", {"tokens": ids, "chosen": 7, "trajectory": True})
    assert status == 200 and len(found["steps"]) == 1 + 2 * CFG.n_layer
    assert found["steps"][-1]["p"] == pytest.approx(p[7], rel=1e-3)
    assert found["steps"][0].keys() == {"name", "top", "p"}
    for body in ({}, {"tokens": [999]}, {"tokens": [1], "chosen": -1}, {"tokens": [1], "more": 1},
                 {"tokens": [1], "trajectory": "yes"}, {"tokens": [1] * 9000}):
        assert post(at, "/api/explain", body)[0] == 400


def test_attention_weights(at, alone, file):
    """Of a layer, by head, against plain NumPy; the tokens that they belong to"""
    ids = ids_of(alone)[:20]
    c = ne.read_checkpoint(file)
    for layer in range(1, CFG.n_layer + 1):
        status, _, found = post(at, "/api/explain", {"tokens": ids, "attention": layer})
        assert status == 200 and [token["id"] for token in found["tokens"]] == ids
        model = ne.Model(c.cfg, c.flat)
        model.logits(np.array([ids], np.int32))
        rows = model.a.qkv[0, layer - 1].astype(np.float64)
        want = naive.attention(rows, CFG.n_head, CFG.n_kv_head, CFG.head_dim)[1]
        assert (found["layer"], found["layers"], len(found["heads"])) == (
            layer, CFG.n_layer, CFG.n_head)
        for head, p in zip(found["heads"], want, strict=True):
            for t, row in enumerate(head):
                assert len(row) == t + 1 and np.allclose(row, p[t, :t + 1], atol=6e-5)
    status, _, found = post(at, "/api/explain", {"tokens": [1] * 200, "attention": 1})
    assert status == 200 and len(found["tokens"]) == min(64, CFG.seq_len)
    for body in ({"tokens": ids, "attention": 0}, {"tokens": ids, "attention": CFG.n_layer + 1},
                 {"tokens": ids, "attention": True}, {"tokens": ids, "attention": "1"},
                 {"tokens": ids, "attention": 1, "trajectory": True}, {"attention": 1}):
        assert post(at, "/api/explain", body)[0] == 400


# ---- the tour
def test_every_page_of_the_tour_is_served(at):
    needs("markdown_it")
    status, headers, index = send(at, "GET", "/tour")
    assert status == 200 and "script-src 'self';" in headers["content-security-policy"]
    pages = re.findall(r'href="(tour/\d\d_\w+)"', index)
    assert len(pages) == 15 and "<script" not in index
    for i, page in enumerate([*pages, "tour/glossary"], 1):
        status, _, said = send(at, "GET", f"/{page}")
        assert status == 200 and "<!--" not in said and page in index
        title = "Appendix" if page in pages[13:] else i
        assert (f"<h1>{title}. " in said) == (page in pages)
        assert ("tour.js" in said) == (i in (1, 6, 7)) == ('id="live"' in said)
        for link in re.findall(r'(?:href|src)="([^"]+)"', said):
            if not link.startswith(("http:", "https:", "#")):
                address = urllib.parse.urljoin(f"/{page}", link)
                assert send(at, "GET", address)[0] == 200, (page, link)
    assert send(at, "GET", "/tour.html")[0] == send(at, "GET", "/tour/nothing")[0] == 404


def test_the_tour_without_its_package(at, monkeypatch):
    monkeypatch.setitem(sys.modules, "markdown_it", None)
    status, _, said = send(at, "GET", "/tour")
    words = said["error"]["message"]
    assert status == 501 and "markdown-it-py" in words and "docs/tour" in words
    status, headers, said = send(at, "GET", "/tour", headers={"Accept": "text/html"})
    assert status == 501 and headers["content-type"].startswith("text/html")
    assert "<h1>501</h1>" in said and "markdown-it-py" in said


def test_tokens_and_drafts_that_the_page_shows(file):
    """Accepted drafts are marked, and texts with and without drafts are the same."""
    bodies = [{"prompt": "abc", "max_tokens": 60, "temperature": 0, "return_tokens": True}] * 2
    found = []
    for body, speculate in zip(bodies, (2, 0)):
        with serving(file, speculate=speculate) as (at, server):
            found.append(post(at, "/v1/completions", body)[2]["choices"][0])
            assert (server.default.stats.counters["drafts_accepted"] > 0) == (speculate > 0)
    drafted, plain = found
    assert [t["id"] for t in drafted["tokens"]] == [t["id"] for t in plain["tokens"]]
    assert drafted["text"] == plain["text"]
    assert any(t["accepted"] for t in drafted["tokens"])
    assert not any(t["accepted"] or "drafts" in t for t in plain["tokens"])


def conversation(n):
    """n messages, the first and the last from the user"""
    roles = ["user", "assistant"] * (n // 2) + ["user"]
    return [{"role": role, "content": f"{i} of them, and more words"}
            for i, role in enumerate(roles)]


def ids_of_messages(alone, messages):
    return alone.model.ids_of([(m["role"], m["content"]) for m in messages])


ROOM = CFG.seq_len - CFG.seq_len // 4        # a quarter of the context is left for the answer


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_a_conversation_that_is_too_long_may_forget(system, at, alone):
    """The fewest of the oldest exchanges, for the rest to fit; never the system message."""
    messages = conversation(17)
    body = {"messages": [*system, *messages], "max_tokens": 2}
    assert post(at, "/v1/chat/completions", body)[2]["error"]["code"] == "context_length_exceeded"
    status, _, said = post(at, "/v1/chat/completions",
                           {**body, "forget": True, "return_tokens": True})
    lengths = {n: len(ids_of_messages(alone, [*system, *messages[n:]])) for n in range(0, 17, 2)}
    fewest = min(n for n, length in lengths.items() if length <= ROOM)
    assert status == 200 and said["forgotten"] == fewest > 0
    assert said["choices"][0]["prompt_tokens"] == ids_of_messages(
        alone, [*system, *messages[fewest:]])


@pytest.mark.parametrize("more, forgotten", [(0, None), (1, 2)])
def test_a_conversation_that_just_fits_forgets_nothing(more, forgotten, at, alone):
    messages = [{"role": role, "content": "A?"} for role in ("user", "assistant", "user")]
    while (length := len(ids_of_messages(alone, messages))) < ROOM + more:
        messages[0]["content"] += "?"
    assert length == ROOM + more
    body = {"messages": messages, "max_tokens": 1, "forget": True}
    status, _, said = post(at, "/v1/chat/completions", body)
    assert status == 200 and said.get("forgotten") == forgotten
    assert (said["usage"]["prompt_tokens"] == ROOM) == (forgotten is None)


def test_a_prompt_as_long_as_the_context_is_accepted(at):
    for n, status in ((CFG.seq_len, 200), (CFG.seq_len + 1, 400)):
        body = {"prompt": [5] * n, "max_tokens": 2}
        assert post(at, "/v1/completions", body)[0] == status


@pytest.mark.parametrize("slots", [2, 4])
def test_several_answers_to_a_prompt_count_its_cached_tokens_once(slots, file, alone):
    """n = 4 is billed as n = 1 is, also where later answers find the prompt in a slot."""
    ids = ids_of(alone, "To be, or not to be, that is the question")
    with serving(file, slots=slots) as (at, _):
        found = []
        for n in (4, 1, 4, 1):
            body = {"prompt": ids, "max_tokens": 3, "seed": 1, "n": n}
            usage = post(at, "/v1/completions", body)[2]["usage"]
            assert usage["prompt_tokens"] == len(ids) and usage["completion_tokens"] == 3 * n
            assert usage["total_tokens"] == len(ids) + 3 * n
            found.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert found == [0, len(ids) - 1, len(ids) - 1, len(ids) - 1]
        body = {"prompt": [ids, [*ids[:10], 1]], "max_tokens": 1, "n": 2}
        usage = post(at, "/v1/completions", body)[2]["usage"]
        assert usage["prompt_tokens"] == len(ids) + 11
        assert usage["prompt_tokens_details"]["cached_tokens"] == len(ids) - 1 + 10


@contextlib.contextmanager
def watching(file, folder, monkeypatch):
    """A server in this folder, as a function that asks it for the records of a log"""
    monkeypatch.chdir(folder)
    with serving(file) as (at, _):
        yield lambda name, start=0: send(at, "GET", f"/api/run?name={name}&from={start}")[2]


def test_runs_are_followed(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "a run.jsonl"
    log.write_text('{"step": 1, "loss": 5.0, "norm": NaN}\n{"step": 2, "lo', encoding="utf-8")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}\n', encoding="utf-8")
    with serving(file) as (at, _):
        found = send(at, "GET", "/api/runs")[2]
        assert [r["name"] for r in found["runs"]] == ["a run.jsonl"]
        assert found["folder"] == os.path.basename(os.getcwd())
        found = send(at, "GET", "/api/run?name=a%20run.jsonl&from=0")[2]
        assert found["records"] == [{"step": 1, "loss": 5.0, "norm": None}]
        with open(log, "a", encoding="utf-8") as f:
            f.write('ss": 4.0}\n')
        more = send(at, "GET", f"/api/run?name=a%20run.jsonl&from={found['next']}")[2]
        assert more["records"] == [{"step": 2, "loss": 4.0}]
        log.write_text('{"step": 1, "loss": 9.0}\n', encoding="utf-8")
        anew = send(at, "GET", f"/api/run?name=a%20run.jsonl&from={more['next']}")[2]
        assert anew["anew"] and anew["records"] == [{"step": 1, "loss": 9.0}]


def test_a_poll_at_the_end_of_a_log_brings_nothing(file, tmp_path, monkeypatch):
    """And the next one brings what was written meanwhile, once."""
    log = tmp_path / "a.jsonl"
    log.write_text('{"step": 1, "loss": 5.0}\n', encoding="utf-8")
    with watching(file, tmp_path, monkeypatch) as read:
        found = read("a.jsonl")
        assert (len(found["records"]), found["next"]) == (1, log.stat().st_size)
        for _ in range(2):
            found = read("a.jsonl", found["next"])
            assert (found["records"], found["next"]) == ([], log.stat().st_size)
            assert not found["anew"] and not found["more"]
        with open(log, "a", encoding="utf-8") as f:
            f.write('{"step": 2, "loss": 4.0}\n')
        found = read("a.jsonl", found["next"])
        assert [r["step"] for r in found["records"]] == [2] and not found["anew"]


def test_a_long_log_comes_in_pieces(file, tmp_path, monkeypatch):
    """`more` asks for the next one at once; all records come, in order and once."""
    log, n = tmp_path / "a.jsonl", 30_000
    log.write_text("".join(f'{{"step": {i}, "loss": 1.5, "heads": [1.5, 2.5]}}\n'
                           for i in range(1, n + 1)), encoding="utf-8")
    assert log.stat().st_size > 1 << 20
    with watching(file, tmp_path, monkeypatch) as read:
        pieces = [read("a.jsonl")]
        while pieces[-1]["more"]:
            pieces.append(read("a.jsonl", pieces[-1]["next"]))
    assert len(pieces) > 1 and not any(piece["anew"] for piece in pieces)
    assert [r["step"] for piece in pieces for r in piece["records"]] == [*range(1, n + 1)]


def test_the_newest_log_is_listed_first(file, tmp_path, monkeypatch):
    for name, changed in ("b", 2000), ("c", 3000), ("a", 1000):
        (tmp_path / f"{name}.jsonl").write_text('{"step": 1, "loss": 5.0}\n', encoding="utf-8")
        os.utime(tmp_path / f"{name}.jsonl", (changed, changed))
    monkeypatch.chdir(tmp_path)
    with serving(file) as (at, _):
        names = [run["name"] for run in send(at, "GET", "/api/runs")[2]["runs"]]
    assert names == ["c.jsonl", "b.jsonl", "a.jsonl"]


def test_the_list_says_the_latest_step_of_a_log(file, tmp_path, monkeypatch):
    """The page tells from it whether a run trains; the lines after that step may be a sample, a
    validation and half a line."""
    log = tmp_path / "a.jsonl"
    log.write_text("".join(f'{{"step": {i}, "loss": 5.0, "ms": 40.0, "n_steps": 9000}}\n'
                           for i in range(1, 9001)), encoding="utf-8")
    with open(log, "a", encoding="utf-8") as f:
        f.write(json.dumps({"step": 9000, "sample": "x" * 60_000}) + "\n")
        f.write('{"step": 9000, "val_bits_per_byte": 2.5}\n{"step": 9001, "lo')
    (tmp_path / "b.jsonl").write_text('{"step": 1, "loss": 1, "n_steps": 1e999, "ms": NaN}\n' +
                                      "x" * (1 << 18), encoding="utf-8")
    changed = log.stat().st_mtime
    monkeypatch.chdir(tmp_path)
    with serving(file) as (at, _):
        found = {run["name"]: run for run in send(at, "GET", "/api/runs")[2]["runs"]}
    assert {"step": 9000, "n_steps": 9000, "ms": 40.0}.items() <= found["a.jsonl"].items()
    assert found["a.jsonl"]["changed"] == changed and -5 < found["a.jsonl"]["age"] < 100
    assert "step" not in found["b.jsonl"]


@pytest.mark.parametrize("planned", [None, 0, 900])
@pytest.mark.parametrize("at_end", [None, {"stopped": True}, {"stopped": False}])
def test_the_end_of_a_log_says_how_long_the_run_was(planned, at_end, tmp_path):
    """A run by minutes plans again while it trains; it was as long as its last record says."""
    from nanoeuler_parts.serve.runs import latest_step
    last = {"step": 40, "loss": 5.0, "ms": 9.0, "n_steps": planned}
    records = [last | {"step": 39, "n_steps": 7}, last, {"step": 40, "val_bits_per_byte": 2.5},
               *([{"step": 40, "n_steps": 41, **at_end}] if at_end else [])]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    with open(path, "rb") as f:
        found = latest_step(f, path.stat().st_size)
    assert found == {"step": 40, "ms": 9.0, "n_steps": 41 if at_end else planned} | (
        {"stopped": True} if at_end == {"stopped": True} else {})


@pytest.mark.parametrize("record", [
    {"step": 10, "val_bits_per_byte": 2.5, "windows": 64},
    {"step": 0, "val_reward": 0.25, "questions": 9, "val_failed": 0, "val_length": 7.5}])
def test_a_log_that_begins_with_a_validation_is_listed(record, file, tmp_path, monkeypatch):
    """As one of rl, or one whose first lines were cut off"""
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    with watching(file, tmp_path, monkeypatch) as read:
        assert read("a.jsonl")["records"] == [record]


def metrics(at):
    """{a name with its labels: the value}"""
    text = send(at, "GET", "/metrics")[2]
    rows = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name.removeprefix("nanoeuler_"): float(value) for name, value in rows}


def of_little(values):
    """The metrics of the model, without its label, and those of the server"""
    return {name.replace('{model="little"}', "").replace('model="little",', ""): value
            for name, value in values.items()}


def test_health_and_metrics(file, alone):
    """What one request changes, of a server of its own."""
    ids = ids_of(alone, "To be, or not to be, that is the question")
    with serving(file, speculate=0) as (at, _):
        assert send(at, "GET", "/health")[::2] == (200, {"status": "ok"})
        for n in (3, 1):                     # the second prompt is the first one's: it is cached
            assert post(at, "/v1/completions", {"prompt": ids, "max_tokens": n})[0] == 200
        assert post(at, "/v1/completions", {"prompt": ""})[0] == 400
        assert send(at, "GET", "/no/such/path")[0] == 404
        values = of_little(metrics(at))
    want = {"left_total": 0, "slots": 4, "model_loaded": 1,
            "prompt_tokens_total": 2 * len(ids), "cached_tokens_total": len(ids) - 1,
            "tokens_total": 4, "drafts_offered_total": 0, "drafts_accepted_total": 0,
            "requests_waiting": 0, "requests_running": 0,
            "time_to_first_token_seconds_count": 2, "time_per_token_seconds_count": 1,
            'requests_total{path="/v1/completions",status="200"}': 2,
            'requests_total{path="/v1/completions",status="400"}': 1,
            'requests_total{path="/health",status="200"}': 1,
            'requests_total{path="other",status="404"}': 1}
    assert {name: values[name] for name in want} == want
    for name in "time_to_first_token_seconds", "time_per_token_seconds":
        buckets = [v for k, v in values.items() if k.startswith(f"{name}_bucket")]
        assert buckets == sorted(buckets) and len(buckets) == 16
        assert buckets[-1] == values[f"{name}_count"] and values[f"{name}_sum"] > 0


def test_the_times_in_the_metrics_are_per_token(file, monkeypatch):
    """With a clock that each step advances by 3 s: the first token of an answer takes 3 s, and so
    does each later one, also on average."""
    clock, next_tokens = SimpleNamespace(now=100.0), ne.next_tokens

    def timed(*args):
        found = next_tokens(*args)
        clock.now += 3.0
        return found

    with serving(file, speculate=0) as (at, _):
        monkeypatch.setattr("nanoeuler.next_tokens", timed)
        monkeypatch.setattr("nanoeuler_parts.serve.engine.time", SimpleNamespace(
            perf_counter=lambda: clock.now))
        for n in (5, 1, 2):
            body = {"prompt": "To be", "max_tokens": n}
            assert post(at, "/v1/completions", body)[2]["usage"]["completion_tokens"] == n
        values = of_little(metrics(at))
    for name, n in ("time_to_first_token_seconds", 3), ("time_per_token_seconds", 2):
        assert (values[f"{name}_count"], values[f"{name}_sum"]) == (n, 3 * n), name


def test_a_histogram_counts_each_time_in_its_bucket():
    """Of each bucket the times up to its bound, that included; of the last one all."""
    from nanoeuler_parts.serve.metrics import SECONDS, Requests, Stats, text
    stats = Stats()
    for seconds in (0.0005, 0.001, 0.0011, 60.0, 61.0):
        stats.observe("first", seconds)
    lines = text(Requests(), {"a": stats}, {}).splitlines()
    rows = dict(line.replace('model="a"', "").replace("{}", "").replace("{,", "{").rsplit(" ", 1)
                for line in lines if line[0] != "#")
    name = "nanoeuler_time_to_first_token_seconds"
    found = [int(rows[f'{name}_bucket{{le="{bound}"}}']) for bound in (*SECONDS, "+Inf")]
    assert found == [2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 4, 5]
    assert float(rows[f"{name}_sum"]) == pytest.approx(121.0026) and rows[f"{name}_count"] == "5"


# ---- the verb
@contextlib.contextmanager
def started(file, *args, cwd):
    process = subprocess.Popen(warm_command("serve", file, "--port", 0, "--threads", 1, *args),
                               cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               encoding="utf-8")
    try:
        said = [process.stdout.readline(), process.stdout.readline()]
        assert "for the chat" in said[1], process.communicate(timeout=200)
        yield process, said[1].split()[0].rstrip("/")
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def streaming(address, body):
    """The response to a request, whose head has come"""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=200)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body).encode(),
                           {"content-type": "application/json"})
        yield connection.getresponse()


def test_sigterm_lets_an_answer_finish(file, tmp_path, alone):
    """The stream that runs comes to its end, and then the program ends, well."""
    want = alone(ids_of(alone), tokens=2000, seed=3)[0]
    body = {"prompt": PROMPT, "max_tokens": 2000, "seed": 3, "stream": True}
    with started(file, "--drain", 200, cwd=tmp_path) as (process, at):
        with streaming(at, body) as response:
            said = response.readline()       # it has begun
            os.kill(process.pid, signal.SIGTERM)
            said = (said + response.read()).decode()
        assert process.wait(200) == 0
        assert text_in(said) == want and said.endswith("data: [DONE]\n\n")
        line = f"POST /v1/completions 200 little {len(ids_of(alone))} \\+ 2000 tokens [0-9]+ ms\n"
        assert re.fullmatch(line, process.stderr.read())


def test_sigterm_ends_what_takes_longer(file, tmp_path):
    with started(file, "--drain", 1, "--tokens", 10_000_000, cwd=tmp_path) as (process, at):
        with leave_open(at, {"prompt": "a", "max_tokens": 9_000_000, "stream": False}):
            until(lambda: 'requests_running{model="little"} 1' in send(at, "GET", "/metrics")[2])
            os.kill(process.pid, signal.SIGTERM)
            assert process.wait(200) == 0    # the answer would take half an hour


def test_what_the_verb_refuses(file, elsewhere, capsys):
    """What is wrong with the checkpoint comes first, whether the port is free or not."""
    (elsewhere / "text.bin").write_text("no checkpoint", encoding="utf-8")
    refused(capsys, "serve", file, "--port", 99999,
            words=["--port: expected 0 to 65535, found 99999"])
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
        refused(capsys, "serve", file, "--port", port, words=[port, "--port"])
        for name in "none.bin", "text.bin":
            said = refused(capsys, "serve", name, "--port", port, words=[name])
            assert f"{port}" not in said


def test_a_model_that_continues_does_not_chat(tmp_path, tokenizer):
    file = write(tmp_path / "base.bin", CFG, tokenizer)
    with serving(str(file)) as (at, _):
        said = post(at, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})[2]
        assert "/v1/completions" in said["error"]["message"]
        assert post(at, "/v1/completions", {"prompt": "a"})[0] == 200


def test_the_examples_of_the_documentation(at):
    """Each curl command of the guide and of the reference, sent here"""
    examples = [x for name in ("serving", "serving-api") for x in re.findall(
        r"(?m)^\$ curl (.+)$", (ROOT / f"docs/{name}.md").read_text(encoding="utf-8"))]
    assert len(examples) >= 5
    for example in examples:
        line = example.replace("127.0.0.1:8000", at.removeprefix("http://"))
        said = subprocess.run(f"curl -s --fail-with-body {line}", shell=True, timeout=60,
                              capture_output=True, encoding="utf-8")
        assert said.returncode == 0, (line, said.stdout, said.stderr)
