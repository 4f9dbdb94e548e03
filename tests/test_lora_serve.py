"""Several adapters in one server: their names, their answers to the bit, and what is refused."""
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from helpers import needs, refused
from servers import CFG as SHORT
from servers import chat_model, post, send, serving

import nanoeuler as ne
from nanoeuler_parts.kernels import compile_lora_decoding_kernels
from nanoeuler_parts.lora.adapter import init_adapter, Lora, targets_in, tensors_of
from nanoeuler_parts.lora.decoder import LoraDecoder
from nanoeuler_parts.lora.files import (
    adapter_for, checksum_of, read_adapter, state_with, write_adapter,
)
from nanoeuler_parts.serve.engine import Answer, Engine
from nanoeuler_parts.serve.metrics import Stats
from nanoeuler_parts.serve.models import Models, Served
from nanoeuler_parts.serve.verb import Serving

pytestmark = pytest.mark.cli
needs("starlette")
needs("uvicorn")
TEXT = "/v1/completions"
CFG = replace(SHORT, seq_len=192)
LORAS = {"pirate": Lora(4, 8.0), "poet": Lora(2, 8.0, targets_in("q,v,down"))}


@pytest.fixture(scope="module")
def file(tmp_path_factory, tokenizer):
    """A model, with the folders of its adapters beside it"""
    compile_lora_decoding_kernels()
    path = tmp_path_factory.mktemp("adapted") / "first.bin"
    chat_model(path, tokenizer, CFG)
    state = ne.load(str(path)).state
    for i, (name, lora) in enumerate(LORAS.items()):
        rng, flat = np.random.default_rng(i), init_adapter(CFG, lora, i)
        for _, b in tensors_of(CFG, lora, flat).values():
            b[...] = 0.3 * rng.standard_normal(b.shape)
        (path.parent / name).mkdir()
        write_adapter(str(path.parent / name), CFG, lora, flat,
                      replace(state, template="alpaca") if name == "poet" else state,
                      checksum_of(str(path)))
    return str(path)


def folder(file, name):
    return os.path.join(os.path.dirname(file), name)


@pytest.fixture(scope="module")
def there(file):
    adapters = [folder(file, "pirate"), f"bard={folder(file, 'poet')}"]
    with serving(file, adapter=adapters) as found:
        yield found


@pytest.fixture(scope="module")
def alone(file):
    """What each model writes without a server, and with no other adapter in its decoder"""
    plain = ne.load(file)
    speakers = {"first": plain}
    for name, of in (("pirate", "pirate"), ("bard", "poet")):
        found = adapter_for(folder(file, of), plain.cfg, file)
        decoder = LoraDecoder.over(plain.decoder, [found[:2]]).beginning_with(0)
        speakers[name] = plain.with_decoder(decoder, state_with(plain.state, found))

    def text(name, prompt, **sampling):
        model = speakers[name]
        options = ne.Sampling(**{"temperature": 1.0, **sampling}).check()
        [(_, [reply])] = model.answers_to([model.tokenizer.encode(prompt).tolist()], options, 1,
                                          ne.Pace())
        return reply.answer
    return text


def text_of(address, model, prompt="To be", **more):
    status, _, said = post(address, TEXT, {"model": model, "prompt": prompt, **more})
    assert status == 200 and said["model"] == model, said
    return said["choices"][0]["text"]


def test_each_adapter_gives_its_own_answers(there, alone):
    """In one batch, with the same prompts, so that a slot could take the keys of another adapter"""
    address, names = there[0], ("first", "pirate", "bard")
    asked = [(names[i % 3], "abcdefgh"[:1 + i // 3 % 7], 5 + i % 20, i // 3) for i in range(72)]

    def one(case):
        name, prompt, tokens, seed = case
        return text_of(address, name, prompt, max_tokens=tokens, seed=seed)

    with ThreadPoolExecutor(16) as pool:
        at_once = [*pool.map(one, asked)]
    for case, found in zip(asked, at_once):
        name, prompt, tokens, seed = case
        assert found == alone(name, prompt, tokens=tokens, seed=seed), case
    assert [one(case) for case in asked[:9]] == at_once[:9]
    assert len({alone(name, "abc", tokens=20) for name in names}) == 3


def test_the_beginning_of_a_prompt_is_reused_within_an_adapter(there):
    address = there[0]

    def cached(model):
        body = {"model": model, "prompt": "The same prompt, again and again", "max_tokens": 1}
        usage = post(address, TEXT, body)[2]["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached("pirate"), cached("bard"), cached("first")] == [0, 0, 0]
    assert min(cached("pirate"), cached("bard"), cached("first")) > 5


@pytest.mark.parametrize("adapter", [-1, 0, 1])
def test_a_preempted_answer_keeps_its_adapter(adapter, file):
    """It continues in the slot of an answer with another adapter, whose keys are of no use."""
    plain = ne.load(file)
    adapters = [adapter_for(folder(file, name), plain.cfg, file)[:2] for name in LORAS]
    decoder = LoraDecoder.over(plain.decoder, adapters)

    def engine_of():
        engine = Engine(lambda: decoder.with_slots(2), Stats(), threads=1)
        engine.reader = engine.make()
        engine.free, engine.used = [0, 1], {0: -1, 1: -1}
        return engine

    def answer(client, ids, adapter, tokens):
        return Answer(ids, ne.Sampling(tokens=tokens, speculate=0), ne.rng_of(1), None,
                      [b"x"] * CFG.vocab_size, client=client, adapter=adapter)

    def finished(*answers):
        engine = engine_of()
        engine.submit(answers)
        while engine.unfinished():
            engine.step()
        return [a.reply.tokens for a in answers]

    ids = [3, 1, 4, 1, 5]
    own, beside = answer("a", ids, adapter, 60), answer("a", [*ids, *ids], 1, 60)
    engine, other = engine_of(), answer("b", ids, (adapter + 2) % 3 - 1, 20)
    engine.submit([own, beside])
    engine.step()
    engine.submit([other])
    slots, was_preempted = set(), False
    while engine.unfinished():
        engine.step()
        was_preempted |= own in engine.waiting
        slots |= {slot for slot, a in engine.active.items() if a in (own, other)}
    assert was_preempted and len(slots) == 1
    assert [own.reply.tokens] == finished(answer("a", ids, adapter, 60))
    assert [other.reply.tokens] == finished(answer("b", ids, other.adapter, 20))
    assert own.reply.tokens[:20] != other.reply.tokens


def test_an_adapter_is_loaded_last(file, monkeypatch):
    """A request that finds the engine uses the reader of its model: all have one by then."""
    seen, attend = [], Served.attend

    def attended(model, *args):
        seen.append((model.name, model.engine))
        attend(model, *args)

    monkeypatch.setattr(Served, "attend", attended)
    models = Models([file], ne.Decoder, Serving(adapter=[folder(file, x) for x in LORAS]).check())
    models.default.load()
    models.close()
    assert sorted(seen) == [("first", None), ("pirate", None), ("poet", None)]
    assert models.ended(200) and all(model.reader and model.explainer for model in models)


def test_the_lists_of_models(there, file):
    address, server = there
    cards = {card["id"]: card for card in send(address, "GET", "/v1/models")[2]["data"]}
    assert [*cards] == ["first", "pirate", "bard"] and "parent" not in cards["first"]
    assert cards["pirate"]["parent"] == cards["bard"]["parent"] == "first"
    assert cards["bard"]["adapter"]["targets"] == ["q", "v", "down"]
    assert cards["bard"]["adapter"]["parameters"] == CFG.n_layer * 2 * (
        32 + 32 + 32 + 16 + 48 + 32)
    assert all(card["loaded"] and card["answers"] for card in cards.values())
    assert cards["bard"]["template"] == "alpaca" != cards["pirate"]["template"]
    tags = send(address, "GET", "/api/tags")[2]["models"]
    assert [tag["name"] for tag in tags] == ["first:latest", "pirate:latest", "bard:latest"]
    assert [tag["details"]["parent_model"] for tag in tags] == ["", "first", "first"]
    assert tags[1]["size"] == os.path.getsize(
        os.path.join(folder(file, "pirate"), "adapter_model.safetensors"))
    shown = post(address, "/api/show", {"model": "bard"})[2]
    assert shown["details"]["parent_model"] == "first" and shown["template"] == "alpaca"
    lines = send(address, "GET", "/metrics")[2].splitlines()
    assert 'nanoeuler_slots{model="first"} 4' in lines
    assert not any("pirate" in line for line in lines)
    assert server.models.default.name == "first" and len(server.models.loaded()) == 1
    weights = {id(model.reader.speaker.decoder.weights) for model in server.models}
    assert len(weights) == 1 and server.default.engine.reader.weights.p is (
        server.default.reader.speaker.decoder.weights.p)


def test_every_protocol_selects_an_adapter(there):
    address, hello = there[0], [{"role": "user", "content": "Hello"}]
    found = {}
    for name in "first", "pirate", "bard":
        body = {"model": name, "messages": hello, "max_tokens": 12, "temperature": 0}
        said = post(address, "/v1/chat/completions", body)[2]
        body = {"model": name, "messages": hello, "stream": False,
                "options": {"num_predict": 12, "temperature": 0}}
        again = post(address, "/api/chat", body)[2]
        assert said["model"] == again["model"] == name
        found[name] = said["choices"][0]["message"]["content"]
        assert found[name] == again["message"]["content"]
    assert len({*found.values()}) == 3
    status, _, said = post(address, TEXT, {"model": "poet", "prompt": "a"})
    assert status == 404 and "'first', 'pirate', 'bard'" in said["error"]["message"]


def test_tokens_of_an_adapter_are_explained(there):
    """The trajectory, from merged weights, ends with the probabilities of the decoder."""
    address, last = there[0], {}
    for name in "first", "pirate", "bard":
        asked = {"model": name, "tokens": [1, 2, 3], "chosen": 5}
        p = post(address, "/api/explain", asked)[2]["chosen"]["p"]
        steps = post(address, "/api/explain", {**asked, "trajectory": True})[2]["steps"]
        assert steps[-1]["p"] == pytest.approx(p, rel=1e-3)
        last[name] = p
    assert len({*last.values()}) == 3


def test_an_explanation_is_that_of_the_adapter_that_answers(file, tmp_path):
    """Also if its folder has another adapter by then, as after another training"""
    shutil.copytree(folder(file, "pirate"), tmp_path / "pirate")
    asked = {"model": "pirate", "tokens": [1, 2, 3], "chosen": 5}
    with serving(file, adapter=[str(tmp_path / "pirate")]) as (address, _):
        p = post(address, "/api/explain", asked)[2]["chosen"]["p"]
        flat = 3 * read_adapter(folder(file, "pirate"), CFG).flat
        write_adapter(str(tmp_path / "pirate"), CFG, LORAS["pirate"], flat, ne.load(file).state,
                      checksum_of(file))
        steps = post(address, "/api/explain", {**asked, "trajectory": True})[2]["steps"]
    assert steps[-1]["p"] == pytest.approx(p, rel=1e-3)


def test_a_base_model_answers_with_an_adapter(file, tmp_path, tokenizer):
    base = chat_model(tmp_path / "base.bin", tokenizer, CFG, kind="base", template="")
    hello = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    with serving(base, adapter=[folder(file, "pirate")]) as (address, _):
        status, _, said = post(address, "/v1/chat/completions", hello)
        assert status == 400 and "use the model pirate for chats" in said["error"]["message"]
        assert post(address, "/v1/chat/completions", {**hello, "model": "pirate"})[0] == 200


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_the_weights_may_have_any_format(file, weights):
    plain = ne.load(file, weights=weights)
    decoder = LoraDecoder.over(plain.decoder, [read_adapter(folder(file, "pirate"), CFG)[:2]])
    assert decoder.kept_as == weights
    assert np.array_equal(decoder.step(1, 2, 3), plain.decoder.step(1, 2, 3))
    with serving(file, adapter=[folder(file, "pirate")], weights=weights) as (address, _):
        assert text_of(address, "first", max_tokens=9, temperature=0) != text_of(
            address, "pirate", max_tokens=9, temperature=0)


def test_what_is_refused(file, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pirate = folder(file, "pirate")
    shutil.copytree(pirate, "first")
    for adapters, words in (
            ((file,), ["expected a folder with adapter_config.json, found a model"]),
            (("none",), ["none", "adapter_config.json"]),
            ((f"={pirate}",), ["expected FOLDER or NAME=FOLDER"]),
            (("a=",), ["--adapter: expected FOLDER or NAME=FOLDER, found 'a='"]),
            ((pirate, pirate), ["two models have the name pirate", pirate]),
            (("first",), ["two models have the name first", file])):
        flags = [x for adapter in adapters for x in ("--adapter", adapter)]
        refused(capsys, "serve", file, *flags, "--port", 0, words=words)
    refused(capsys, "serve", pirate, "--port", 0, words=[pirate, "--adapter"])
    with pytest.raises(ne.UserError, match="before it, found none"):
        Models([file], ne.Decoder, Serving(adapter=[pirate]), ".")
    with pytest.raises(ne.UserError, match="found one on a GPU"):
        Models([file], object, Serving(adapter=[pirate]))
