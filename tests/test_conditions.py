"""Values that a check rejects, one for each operand of its condition. The program's own operands
decide which one was false (conditions.py)."""
import math
from dataclasses import replace

import conditions
import numpy as np
import pytest
from helpers import ROOT, TINY, random_flat

import bpe
import nanoeuler as ne
from nanoeuler_parts.chat.messages import messages_in
from nanoeuler_parts.chat.models import need_prompt_first
from nanoeuler_parts.chat.verbs import generate_text
from nanoeuler_parts.interchange import llama
from nanoeuler_parts.kernels import compile_kernels
from nanoeuler_parts.machine import cpu
from nanoeuler_parts.machine.threads import use_threads
from nanoeuler_parts.runs.guards import need_data
from nanoeuler_parts.runs.options import TrainOptions
from nanoeuler_parts.serve import explain, ollama, protocol, responses
from nanoeuler_parts.serve.names import host_in
from nanoeuler_parts.serve.server import need_ascii
from nanoeuler_parts.tools import evaluation

pytestmark = pytest.mark.unit
YARN = dict(rope_scaling="yarn", rope_original=8, rope_factor=2.0)
LLAMA = dict(model_type="llama", hidden_size=8, num_attention_heads=2, num_hidden_layers=2,
             intermediate_size=12, vocab_size=262, max_position_embeddings=16)
QWEN = {**LLAMA, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4,
        "max_window_layers": 0, "num_key_value_heads": 2}


def config(**changes):
    return lambda: replace(TINY, **changes).check()


def llama_of(entries, **changes):
    return lambda: llama.llama_config({**entries, **changes})


def scaled(**rope):
    return llama_of(LLAMA, rope_scaling=rope)


def step(*parts):
    return lambda: ne.Decoder.check(Checked, [ne.Part(*x) for x in parts])


class Checked:
    """As much of a Decoder as its check of parts reads"""
    cfg, held_ids = TINY, [[], []]


def run(tokens, **changes):
    def act():
        model = ne.Model(TINY, random_flat(TINY, 1, np.float32))
        model.run(ne.LOSS, np.array(tokens, np.int32), **changes)
    return act


def reply(ids, **settings):
    return lambda: ne.Reply(ids, ne.Sampling(**settings), np.random.default_rng(1))


def options(**changes):
    return lambda: TrainOptions(**changes).check()


def state(**changes):
    return lambda: ne.State(**changes).check()


def generated(*args, **options):
    return lambda: generate_text(*args, **options)


def saved(kind=bpe.Tokenizer, **settings):
    def act():
        ids = {c: i for i, c in enumerate([*bpe.CHAR_OF_ID, "</s>"])}
        kind(ids, [], ["</s>"], **settings).save("/dev/null/folder")
    return act


class Other(bpe.Tokenizer):
    """A tokenizer of a family in nanoeuler_parts/tokenizers"""


def checked(known, **body):
    return lambda: protocol.checked(body, known)


V, T = TINY.vocab_size, TINY.seq_len
CASES = {
    "Config.check": [
        config(rope_scaling="ntk"), config(**{**YARN, "rope_original": None}),
        config(rope_scaling="llama3", rope_factor=2.0),
        config(**YARN, rope_low=4.0, rope_high=4.0), config(**YARN, rope_low=5.0),
        config(**YARN, rope_theta=1.0), config(n_head=3, n_kv_head=2), config(head_dim=3)],
    "Decoder.begin": [lambda: ne.Decoder(TINY, None, slots=0)],
    "Decoder.check": [
        step(), step((0, [1], 1), (0, [1], 1)), step((-1, [1], 1)), step((2, [1], 1)),
        step((0, [], 0)), step((0, [1], -1)), step((0, [1], 2)), step((0, [-1], 1)),
        step((0, [V], 1))],
    "Model.__init__": [lambda: ne.Model(TINY, random_flat(TINY, 1), dtype=np.float32)],
    "Model.run": [run(np.zeros((1, 0))), run(np.zeros((1, T + 1)))],
    "check_ids": [run([[-1]]), run([[V]])],
    "check_shape": [lambda n=n: ne.Model(TINY, random_flat(TINY, 1)).losses(
        np.zeros((3, 5), np.int32), np.zeros((n, 5), np.int32)) for n in (1, 4)],
    "Reply.__init__": [reply([]), reply([1], stop=["a"])],
    "messages_in": [
        lambda: messages_in("x", "m"), lambda: messages_in([], "m"),
        lambda: messages_in([5], "m"), lambda: messages_in([("user", "x", "y")], "m"),
        lambda: messages_in([("user",)], "m")],
    "checked_message": [
        lambda: messages_in([(5, "x")], "m"), lambda: messages_in([("robot", "x")], "m")],
    "text_of": [
        lambda: messages_in([("user", [{"type": "image"}])], "m"),
        lambda: messages_in([("user", 5)], "m")],
    "need_thinking": [lambda: ne.Sampling(thinking="maybe").check()],
    "Sampling.check": [lambda: ne.Sampling(stop=[""]).check(),
                       lambda: ne.Sampling(stop=[5]).check()],
    "Settings.check": [options(seed="1"), options(batch=-1), options(lr=1e9)],
    "RunOptions.check": [options(dtype="f8"), options(newlines="dos"), options(optimizer="sgd"),
                         options(data="a\0")],
    "RunOptions.chosen": [lambda: TrainOptions.chosen(optimizer="adamw", muon_lr=0.1)],
    "State.check": [state(stops=[5]), state(template="\ud800"), state(learned=[5]),
                    state(own_answers=["abc"]), state(own_answers=[["a", "b"]]),
                    state(own_answers=[["a", "b", 3]]), state(old_right=[True]),
                    state(old_known=[-1]), state(rewards=[1.0]), state(rewards=[1, 2.0]),
                    state(rewards=[1.0, math.nan])],
    "converted": [lambda: ne.converted(np.ones((2, 2), np.float32), "f8")],
    "compile_kernels": [lambda: compile_kernels("f8")],
    "need_data": [lambda path=path: need_data(path, "a.bin")
                  for path in ("", "no such file", "/dev/null")],
    "need_prompt_first": [lambda: need_prompt_first(__file__, "no such file")],
    "generate_text": [generated(None), generated("a", out="a.jsonl"), generated("a", prompts="p"),
                      generated("a", "b", prompts="p", out="a.jsonl")],
    "need_no_tokenizer": [
        lambda: bpe.need_no_tokenizer("a.json", "./a.json", True),
        lambda: bpe.need_no_tokenizer(str(ROOT / "data" / "instructions.json"), "a.txt", False)],
    "Tokenizer.save": [saved(digits=True), saved(Other), saved(begins=(256,))],
    "use_threads": [lambda: use_threads(-1), lambda: use_threads(1 << 20)],
    "vector_bits": [lambda: cpu.vector_bits("7", {})],
    "need_ascii": [lambda key=key: need_ascii(key) for key in ("caf\u00e9", "a\n", "a b")],
    "host_in": [lambda: host_in("a/b")],
    "texts_in": [lambda: evaluation.texts_in([], "x"), lambda: evaluation.texts_in([5], "x")],
    "right_choice": [lambda answer=answer: evaluation.right_choice(answer, ["a", "b"])
                     for answer in ("c", -1, 2)],
    "need_llama": [llama_of(LLAMA, model_type=""), llama_of(LLAMA, model_type="gpt2")],
    "llama_config": [llama_of(LLAMA, hidden_act="gelu"), llama_of(LLAMA, attention_bias=True),
                     llama_of(LLAMA, quantization_config={"bits": 4})],
    "window_of": [
        lambda: llama.window_of({**QWEN, "sliding_window": -1}),
        llama_of(LLAMA, sliding_window=4), llama_of(QWEN, layer_types=[llama.FULL]),
        llama_of(QWEN, layer_types=[llama.FULL] * 3),
        llama_of(QWEN, layer_types=[llama.FULL, llama.SLIDING]),
        llama_of(QWEN, layer_types=[llama.FULL, "chunked"])],
    "rope_entries": [llama_of(LLAMA, rope_parameters={
        llama.FULL: {"rope_theta": 1e4}, llama.SLIDING: {"rope_theta": 1e5}}),
        llama_of(LLAMA, rope_parameters={llama.FULL: 5})],
    "number_in": [scaled(rope_type="linear"), scaled(rope_type="linear", factor="2"),
                  scaled(rope_type="linear", factor=math.inf)],
    "scaling_of": [scaled(rope_type="dynamic", factor=2.0),
                   scaled(rope_type="yarn", factor=2.0, truncate=False)],
    "train": [lambda: bpe.train(b"ab", 256), lambda: bpe.train(b"ab", bpe.MAX_VOCAB + 1)],
    "number.check": [
        checked(protocol.OF_CHAT, temperature="1"), checked(protocol.OF_CHAT, temperature=-0.1),
        checked(protocol.OF_CHAT, temperature=100.5)],
    "length.check": [checked(protocol.OF_CHAT, max_tokens="3"),
                     checked(protocol.OF_CHAT, max_tokens=-2),
                     checked(protocol.OF_CHAT, max_tokens=1 << 63)],
    "flag": [checked(protocol.OF_CHAT, stream=1)],
    "text": [checked(protocol.OF_CHAT, model=1)],
    "stops": [
        checked(protocol.OF_CHAT, stop=5), checked(protocol.OF_CHAT, stop=["x"] * 1000),
        checked(protocol.OF_CHAT, stop=[""])],
    "stream_options": [checked(protocol.OF_CHAT, stream_options=5),
                       checked(protocol.OF_CHAT, stream_options={"x": 1})],
    "response_format": [
        checked(protocol.OF_CHAT, response_format=5),
        checked(protocol.OF_CHAT, response_format={"type": "xml"}),
        checked(protocol.OF_CHAT, response_format={"type": "json_object", "schema": {}, "x": 1}),
        checked(protocol.OF_CHAT, response_format={"type": "text", "x": 1}),
        checked(protocol.OF_CHAT, response_format={"type": "json_schema"}),
        checked(protocol.OF_CHAT, response_format={"type": "json_schema",
                                                   "json_schema": {"schema": 5}}),
        checked(protocol.OF_CHAT, response_format={"type": "json_schema",
                                                   "json_schema": {"schema": {}, "x": 1}})],
    "schema_alone": [checked(protocol.OF_CHAT, guided_json=5)],
    "structured_outputs": [checked(protocol.OF_CHAT, structured_outputs=5),
                           lambda: protocol.structured_outputs("structured_outputs", {}),
                           checked(protocol.OF_CHAT,
                                   structured_outputs={"json": {}, "regex": "x"})],
    "format_of": [lambda: protocol.format_of({"guided_json": "{}", "json_schema": "{}"})],
    "thinking": [checked(protocol.OF_CHAT, chat_template_kwargs=5),
                 checked(protocol.OF_CHAT, chat_template_kwargs={"x": 1})],
    "checked": [checked(protocol.OF_CHAT, min_tokens=3),
                checked(protocol.OF_CHAT, temperature=1, temp=0.5)],
    "sampled": [lambda: protocol.sampled({"repeat_penalty": 1.1, "repetition_penalty": 1.1})],
    "parse": [lambda: protocol.parse(b"[]")],
    "options": [checked(ollama.OF_CHAT, options=5)],
    "reply_format": [checked(ollama.OF_CHAT, format="xml")],
    "not_stored": [checked(responses.PARAMETERS, store=True)],
    "truncation": [checked(responses.PARAMETERS, truncation="some")],
    "text_format": [checked(responses.PARAMETERS, text=5),
                    checked(responses.PARAMETERS, text={"x": 1})],
    "Explainer.check": [lambda ids=ids: explain.Explainer.check(Vocab, ids, 2)
                        for ids in (5, [], [1, 1, 1], [-1])],
}


class Vocab:
    vocab = [b"a", b"b"]


# Weaker operands that accept no more: a remainder is never negative, a set has no more members than
# its list, a lone surrogate is larger than the ? that replaces it, and both keys are there already.
NO_WEAKER = {
    "self.head_dim % 2 <= 0", "self.n_head % self.n_kv_head <= 0", "len({*slots}) >= len(slots)",
    "text <= text.encode(errors='replace').decode()", "value.keys() <= {'type', 'schema'}"}


@pytest.mark.parametrize("function", CASES)
def test_each_operand_rejects_a_value_of_its_own(function):
    """For each operand there is a value that only it rejects. A new operand needs a new value. And
    for each `weaker` operand there is a value that it would accept: a set with a member too many,
    for example."""
    found, accepted = [], set()
    for call in CASES[function]:
        with pytest.raises((ne.UserError, protocol.Refusal)) as e:
            call()
        found.append(conditions.of_error(e.value))
        accepted |= conditions.accepting(e.value)
    assert {key.split(": ")[0].split(" ")[1] for key in found} == {function}
    where = {key.split(": ")[0] for key in found}
    every = {key for key in conditions.all_operands() if key.split(": ")[0] in where}
    assert every <= {*found}, every - {*found}
    for key in every:
        untold = {*conditions.weaker(key)} - accepted - NO_WEAKER
        assert not untold, f"{key}: no value tells it from {untold}"
