"""Several tokens that end an answer, and templates that can switch thinking on and off."""
import json
from dataclasses import replace

import numpy as np
import pytest
from helpers import TINY, needs, refused, run
from models import SPECIALS, change, package, write
from servers import chat_model, post, serving

import nanoeuler as ne

pytestmark = pytest.mark.interop
STATE = dict(kind="chat", eos=SPECIALS[0], stops=list(SPECIALS[1:]))
# As Qwen3's: an empty thought is written before the answer if thinking is off
THINKING = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + "
            "'<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
            "{% if enable_thinking is defined and enable_thinking is false %}"
            "{{ '<think>\n\n</think>\n\n' }}{% endif %}")
EMPTY = "<think>\n\n</think>\n\n"


# ---- stop tokens
@pytest.mark.parametrize("end", [5, (5,), (9, 5), [5, 7, 9]])
def test_each_of_several_tokens_ends_a_reply(end):
    class Likes5:
        """A reader whose most probable token is always 5"""
        held_ids, length, heads, rows_are_cheap, samples_itself = [[]], 100, 0, False, False

        def read(self, parts):
            return np.eye(TINY.vocab_size, dtype=np.float32)[[5] * sum(x.wanted for x in parts)]

        def truncate(self, n, slot=0):
            return n

    reply = ne.Reply([1], ne.Sampling(temperature=0, logprobs=1, tokens=9),
                     np.random.default_rng(1), end)
    assert ne.next_tokens(Likes5(), [reply], ne.Pace()) == [[]]
    assert (reply.finish, reply.tokens, reply.logprobs) == ("stop", [], [])


def test_stop_tokens_travel_with_a_model(tokenizer, tmp_path):
    """Through both exports, to transformers, and into a model that is tuned further"""
    transformers = needs("transformers")
    package()
    path = write(tmp_path / "a.bin", replace(TINY, vocab_size=512, n_mtp=1, seq_len=64), tokenizer,
                 **STATE)
    run("export", path, tmp_path / "hf", "--gguf", tmp_path / "a.gguf")
    ids = [tokenizer.specials[name] for name in SPECIALS]
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "hf").eos_token_id == ids
    for source in "hf", "a.gguf":
        run("import", tmp_path / source, tmp_path / "b.bin", "--force")
        state = ne.read_checkpoint(str(tmp_path / "b.bin")).state
        assert (state.eos, state.stops) == (SPECIALS[0], list(SPECIALS[1:]))
        assert sorted(ne.load(str(tmp_path / "b.bin")).ends) == sorted(ids)
    (tmp_path / "q.json").write_text(json.dumps([{"instruction": "a", "output": "b"}] * 20),
                                     encoding="utf-8")
    run("sft", tmp_path / "b.bin", "--data", tmp_path / "q.json", "--steps", 1, "--out",
        tmp_path / "c.bin")
    assert ne.read_checkpoint(str(tmp_path / "c.bin")).state.stops == list(SPECIALS[1:])


def test_a_stop_token_that_the_tokenizer_lacks_is_left_out(tokenizer, tmp_path):
    package()
    path = write(tmp_path / "a.bin", replace(TINY, vocab_size=512, n_mtp=1), tokenizer,
                 **{**STATE, "stops": ["<|none|>", "", SPECIALS[1]]})
    run("export", path, tmp_path / "hf", "--gguf", tmp_path / "a.gguf")
    for source in "hf", "a.gguf":
        run("import", tmp_path / source, tmp_path / "b.bin", "--force")
        assert ne.read_checkpoint(str(tmp_path / "b.bin")).state.stops == [SPECIALS[1]]


def test_words_do_not_end_an_answer(tokenizer, tmp_path):
    """transformers writes 2 where nobody has chosen a token."""
    path = write(tmp_path / "a.bin", replace(TINY, vocab_size=512, n_mtp=1), tokenizer, **STATE)
    run("export", path, tmp_path / "hf")
    ids = [2, tokenizer.specials[SPECIALS[1]]]
    change(tmp_path / "hf/generation_config.json", eos_token_id=ids)
    run("import", tmp_path / "hf", tmp_path / "b.bin")
    assert ne.read_checkpoint(str(tmp_path / "b.bin")).state.stops == [SPECIALS[1]]


@pytest.mark.parametrize("ids, words", [
    ("7", "eos_token_id is '7'"), ([0, "x"], "eos_token_id is [0"), ([[1]], "expected ids"),
    ({"a": 1}, "expected ids")])
def test_other_ids_are_refused(ids, words, tokenizer, tmp_path, capsys):
    path = write(tmp_path / "a.bin", replace(TINY, vocab_size=512, n_mtp=1), tokenizer, **STATE)
    run("export", path, tmp_path / "hf")
    change(tmp_path / "hf/generation_config.json", eos_token_id=ids)
    refused(capsys, "import", tmp_path / "hf", tmp_path / "b.bin",
            words=[words, "generation_config.json"])


def test_one_stop_token_needs_no_file(tokenizer, tmp_path):
    path = write(tmp_path / "a.bin", replace(TINY, vocab_size=512, n_mtp=1), tokenizer)
    run("export", path, tmp_path / "hf")
    (tmp_path / "hf/generation_config.json").unlink()
    run("import", tmp_path / "hf", tmp_path / "b.bin")
    assert ne.read_checkpoint(str(tmp_path / "b.bin")).state.stops == []


# ---- thinking
@pytest.fixture(scope="module")
def thinker(tmp_path_factory, tokenizer):
    needs("jinja2")
    return chat_model(tmp_path_factory.mktemp("thinker") / "a.bin", tokenizer, template=THINKING)


@pytest.mark.parametrize("thinking, end", [("", ""), ("on", ""), ("off", EMPTY)])
def test_a_template_knows_whether_to_think(thinking, end, thinker):
    speaker = ne.load(str(thinker), thinking=thinking)
    asked = speaker.tokenizer.decode(speaker.ids_to_read("Hi")).decode()
    assert asked.endswith(f"<|im_start|>assistant\n{end}")
    speaker.options = replace(speaker.options, thinking="off")           # as /set thinking off
    assert speaker.tokenizer.decode(speaker.ids_of("Hi")).decode().endswith(EMPTY)


def test_requests_switch_thinking_off(thinker):
    with serving(thinker) as (at, _):
        def prompt(path="/v1/chat/completions", **more):
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, **more}
            status, _, said = post(at, path, {**body, "return_tokens": True})
            assert status == 200, said
            return b"".join(bytes(speaker.tokenizer.vocab[k])
                            for k in said["choices"][0]["prompt_tokens"]).decode()

        speaker = ne.load(str(thinker))
        off, on = ({"enable_thinking": value} for value in (False, True))
        assert prompt(chat_template_kwargs=off).endswith(EMPTY)
        for more in dict(chat_template_kwargs=on), dict(chat_template_kwargs={}), {}:
            assert prompt(**more).endswith("assistant\n")
        for wrong in {"enable_thinking": "maybe"}, {"other": 1}, "off", [1]:
            status, _, said = post(at, "/v1/chat/completions", {
                "messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": wrong})
            assert status == 400 and "thinking" in said["error"]["message"]
        for think, longer in (False, True), (None, False):
            body = {"model": "m", "stream": False, "options": {"num_predict": 1, "temperature": 0},
                    "messages": [{"role": "user", "content": "Hi"}], "think": think}
            status, _, said = post(at, "/api/chat", body)
            n = len(speaker.ids_of("Hi")) + longer * len(speaker.tokenizer.encode(EMPTY))
            assert status == 200 and said["prompt_eval_count"] == n


def test_other_values_are_refused(thinker, capsys):
    refused(capsys, "generate", "Hi", thinker, "--thinking", "maybe",
            words=["--thinking: expected on or off, found maybe"])
    with pytest.raises(ne.UserError, match="thinking: expected on or off, found 1"):
        ne.State(thinking="1").check()
    with pytest.raises(ne.UserError, match="stops: expected"):
        ne.State(stops=[1]).check()
