"""Decoding against the full forward pass, the sampler, and the verbs that only read a model."""
import inspect
import io
import math
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from helpers import (FAST, ROOT, STARTED, TINY, command, complains, drawn, nanoeuler, needs, ok,
                     random_flat, refused, run)
from hypothesis import given
from hypothesis import strategies as st
from models import TINY_CONFIGS, tokens_of
from oracles import naive

import bpe
import nanoeuler as ne
from nanoeuler_parts.chat.templates import rewind_to
from nanoeuler_parts.chat.verbs import chat
from nanoeuler_parts.machine.cpu import DTYPE


@pytest.mark.slow
def test_a_cached_decoder_finds_its_threads(tmp_path):
    """Three processes fill a cache: the threads' part, the decoder that calls it, nothing new."""
    begin = (f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
             "import numpy as np, nanoeuler as ne\nfrom helpers import TINY, random_flat\n")
    part = ("x, w, scale = (np.ones(n, 'f4') for n in ((1, 3), (1, 3, ne.tile_width('f4')), 64))\n"
            "ne.product_parallel(np.zeros((1, 3), 'f4'), x, w, scale, 0)\n")
    whole = "print(ne.Decoder(TINY, random_flat(TINY, 1, np.float32)).step(1))\n"
    runs = [subprocess.run([sys.executable, "-c", begin + code], capture_output=True, text=True,
                           env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)})
            for code in (part, whole, whole)]
    assert [r.returncode for r in runs] == [0, 0, 0], [r.stderr for r in runs]
    assert runs[1].stdout == runs[2].stdout


# ---- KV cache
@pytest.mark.parametrize("name", TINY_CONFIGS)
@pytest.mark.parametrize("dtype, limit", [(np.float64, 1e-12), (np.float32, 1e-4)])
def test_cached_logits_equal_the_forward_pass(name, dtype, limit):
    """At every position, and after the context has slid: three contexts' worth of tokens."""
    cfg = TINY_CONFIGS[name]
    model = ne.Model(cfg, random_flat(cfg, 2, dtype))
    decoder, seen, tokens = ne.Decoder(cfg, model.flat), [], tokens_of(cfg, 3 * cfg.seq_len + 2)
    for token in tokens:
        if len(seen) == cfg.seq_len:
            seen = seen[cfg.seq_len - cfg.seq_len // 2:]         # the later half stays
        seen.append(token)
        got = decoder.step(token)
        assert list(decoder.tokens) == seen and len(seen) <= cfg.seq_len
        want = model.logits(np.array([seen], np.int32))[0, 0, -1]
        assert np.abs(got - want).max() <= limit * max(1, np.abs(want).max())


@pytest.mark.parametrize("G", [1, 2, 3])
def test_a_long_conversation_is_shared_by_the_threads(G):
    """Positions on both sides of the one from which attention takes several threads."""
    cfg = ne.replace(TINY, n_head=6, n_kv_head=G, head_dim=128, seq_len=160)
    assert 6 * 128 * 160 > ne.SMALL_PRODUCT
    model, tokens = ne.Model(cfg, random_flat(cfg, 3)), tokens_of(cfg, cfg.seq_len)
    decoder, want = ne.Decoder(cfg, model.flat), model.logits(tokens[None])[0, 0]
    for t, token in enumerate(tokens):
        assert np.abs(decoder.step(token) - want[t]).max() <= 1e-12 * max(1, np.abs(want[t]).max())


@pytest.mark.parametrize("kept", range(5))
def test_tokens_that_are_taken_back_leave_no_trace(kept):
    flat = random_flat(TINY, 2)
    used, fresh = ne.Decoder(TINY, flat), ne.Decoder(TINY, flat)
    for token in (5, 6, 7, 8):
        used.step(token)
    used.truncate(kept)
    for token in (5, 6, 7, 8)[:kept]:
        fresh.step(token)
    for token in (9, 3):
        assert np.array_equal(used.step(token), fresh.step(token))
    assert used.tokens == fresh.tokens


@pytest.mark.parametrize("ids, read", [([1, 2, 3, 9], 1), ([1, 2, 3], 1), ([1, 2], 1), ([7], 1),
                                       ([1, 5, 3, 4], 3), ([5, 2, 3], 3)])
def test_only_what_differs_is_read_again(ids, read):
    decoder = ne.Decoder(TINY, random_flat(TINY, 2))
    for token in (1, 2, 3):
        decoder.step(token)
    assert len(rest := rewind_to(decoder, ids)) == read
    assert decoder.tokens + rest == ids


def test_every_decoder_keeps_the_contract():
    """What `Reader` names, with its arguments; those of the GPU compute in their own way."""
    import nanoeuler_cuda as nc
    for decoder in ne.Decoder, nc.Decoder, nc.fast_decoder().RowsDecoder:
        for name in ("ready", "__init__", "with_slots", "read", "guesses", "step", "truncate"):
            want, found = (list(inspect.signature(getattr(x, name)).parameters.values())
                           for x in (ne.Reader, decoder))
            more = found[len(want):]         # the GPU's has more that need not be given
            assert found[:len(want)] == want, (decoder, name)
            assert all(x.default is not x.empty for x in more), (decoder, name)
    of_class = [*inspect.signature(nc.Decoder.__init__).parameters.values()][1:]     # but self
    assert [*inspect.signature(nc.make_decoder).parameters.values()] == of_class
    assert nc.make_decoder.ready is nc.Decoder.ready
    assert nc.make_decoder.formats == nc.Decoder.formats == nc.fast_decoder().RowsDecoder.formats


def test_generate_is_greedy_at_temperature_zero():
    model = ne.Model(TINY, random_flat(TINY, 3))
    prompt, out = [1, 2, 3], []
    for token in ne.generate(ne.Decoder(TINY, model.flat), prompt, 5, np.random.default_rng(0),
                             ne.Sampling(temperature=0.0)):
        want = naive.forward(TINY, model.p, np.array(prompt + out))[1][0, -1].argmax()
        assert token == want
        out.append(token)
    assert len(out) == 5


def test_a_prompt_without_tokens_is_refused():
    decoder = ne.Decoder(TINY, random_flat(TINY, 2))
    with pytest.raises(ne.UserError, match="no token"):
        next(ne.generate(decoder, [], 3, None, ne.Sampling(temperature=0.0)))


def test_generate_ends_at_the_token_that_ends_a_text():
    model = ne.Model(TINY, random_flat(TINY, 3))

    def text(n, **end):
        rng, decoder = np.random.default_rng(0), ne.Decoder(TINY, model.flat)
        return list(ne.generate(decoder, [1, 2, 3], n, rng, ne.Sampling(temperature=1.0), **end))

    free = text(30)
    assert len(free) == 30 and text(30, end=free[4]) == free[:free.index(free[4])]
    assert text(0) == []


# ---- sampler
def draw(logits, n=1, seed=0, **o):
    rng = np.random.default_rng(seed)
    options = ne.Sampling(**o).check()
    return [ne.sample(np.asarray(logits, np.float32), rng, options) for _ in range(n)]


LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.25, 0.05]))


@pytest.mark.parametrize("options, allowed", [
    (dict(temperature=0.0), {1}),
    (dict(temperature=1.0), {0, 1, 2, 3, 4}),
    (dict(temperature=1.0, top_k=1), {1}),
    (dict(temperature=1.0, top_k=3), {1, 2, 3}),
    (dict(temperature=1.0, top_k=5), {0, 1, 2, 3, 4}),
    (dict(temperature=1.0, top_k=10 ** 6), {0, 1, 2, 3, 4}),
    (dict(temperature=1.0, top_k=0), {0, 1, 2, 3, 4}),
    (dict(temperature=1.0, top_p=0.0), {1}),
    (dict(temperature=1.0, top_p=0.39), {1}),
    (dict(temperature=1.0, top_p=0.41), {1, 3}),
    (dict(temperature=1.0, top_p=0.66), {1, 2, 3}),
    (dict(temperature=1.0, top_p=1.0), {0, 1, 2, 3, 4}),
    (dict(temperature=1.0, min_p=0.0), {0, 1, 2, 3, 4}),
    (dict(temperature=1.0, min_p=0.2), {0, 1, 2, 3}),
    (dict(temperature=1.0, min_p=0.6), {1, 3}),
    (dict(temperature=1.0, min_p=1.0), {1}),
    (dict(temperature=1.0, top_k=4, top_p=0.8, min_p=0.6), {1, 3}),
    (dict(temperature=100.0), {0, 1, 2, 3, 4}),
    (dict(temperature=1e-3), {1}),
    (dict(temperature=1e-300), {1}),
])
def test_which_tokens_can_come(options, allowed):
    assert set(draw(LOGITS, 400, **options)) == allowed


class Chosen:
    """In place of a generator: the numbers that lie in the middle of each token's share."""

    def __init__(self, p):
        self.numbers = iter(np.cumsum(p) / p.sum() - p / p.sum() / 2)

    def random(self):
        return next(self.numbers)


@pytest.mark.parametrize("tail", [0, 8, 20])
def test_top_p_one_keeps_all_of_a_long_tail(tail):
    """Rounding of the cumulative sum must not cut the last tokens off."""
    logits = -np.linspace(0, tail, 512, dtype=np.float32)       # the likeliest has the number 0
    rng, options = Chosen(np.exp(logits.astype(float))), ne.Sampling(temperature=1.0, top_p=1.0)
    assert [ne.sample(logits, rng, options) for _ in range(512)] == list(range(512))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_that_are_not_finite_are_refused(bad, temperature):
    logits = np.full(5, -np.inf, np.float32)             # -inf alone is a token that cannot come
    logits[3] = bad
    fault = f"token [03] is {bad}.*another checkpoint"
    with pytest.raises(ne.UserError, match="JSON mode" if bad == -np.inf else fault):
        draw(logits, temperature=temperature)


@pytest.mark.parametrize("options", [{}, dict(top_p=0.5), dict(top_k=7), dict(min_p=1.0),
                                     dict(temperature=0.0)])
def test_all_equal_logits(options):
    got = draw(np.full(20, 3.5), 2000, **{"temperature": 1.0, **options})
    count = {0.5: 10, 7: 7, 1.0: 20, 0.0: 1}[next(iter(options.values()))] if options else 20
    assert len(set(got)) == count


@pytest.mark.parametrize("logits",
                         [[0.0], [1e30, -1e30], [-1e38, -1e38, 3e38], [-np.inf, 0.0, -np.inf]])
def test_extreme_logits(logits):
    assert set(draw(logits, 50, temperature=1.0)) == {int(np.argmax(logits))}
    cut = draw(logits, 50, temperature=1.0, top_p=0.9, min_p=0.1, top_k=2)
    assert set(cut) == {int(np.argmax(logits))}


@drawn(60)
@given(st.lists(st.floats(-30, 30), min_size=1, max_size=40), st.floats(0, 5), st.integers(0, 50),
       st.floats(0, 1), st.floats(0, 1), st.integers(0, 5))
def test_a_sample_is_always_a_token(logits, temperature, top_k, top_p, min_p, seed):
    token = draw(logits, seed=seed, temperature=temperature, top_k=top_k, top_p=top_p,
                 min_p=min_p)[0]
    assert isinstance(token, int) and 0 <= token < len(logits)
    likelier = np.sum(np.float32(logits) > np.float32(logits[token]))
    assert not top_k or likelier < top_k


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_sampled_distribution(temperature):
    """Pearson's chi-square, 4 degrees of freedom: it exceeds 25 for one seed in 20,000."""
    p = np.exp(LOGITS / temperature)
    expected = 20_000 * p / p.sum()
    counts = np.bincount(draw(LOGITS, 20_000, seed=3, temperature=temperature), minlength=5)
    assert ((counts - expected) ** 2 / expected).sum() < 25


def test_restricted_distribution():
    """Top-k cuts, then the rest is normalised again."""
    counts = np.bincount(draw(LOGITS, 20_000, seed=4, temperature=1.0, top_k=3), minlength=5)
    expected = 20_000 * np.array([0, 0.4, 0.2, 0.25, 0]) / 0.85
    kept = expected > 0
    assert not counts[~kept].any()
    assert ((counts - expected)[kept] ** 2 / expected[kept]).sum() < 25


# ---- the verbs
@pytest.fixture
def said(trained, monkeypatch, capsys):
    """said(verb, ...): what a verb prints, in the trained directory; nothing on stderr."""
    monkeypatch.chdir(trained)

    def said(*args):
        run(*args)
        printed = capsys.readouterr()
        assert printed.err == ""
        return printed.out

    return said


def test_same_seed_same_text(said):
    texts = [said("generate", "KING", "nanoeuler.bin", "--tokens", 30, "--seed", seed)
             for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]


def test_generate(trained):
    result = nanoeuler("generate", "ROMEO:", "nanoeuler.bin", "--tokens", 40, "--temperature", 0.5,
                       cwd=trained, cold=True)
    assert ok(result).startswith("ROMEO:") and len(result.stdout) > 40 and result.stderr == ""


def test_a_prompt_that_is_no_text(trained):
    """Bytes that are no UTF-8, as a shell passes them on: shown and read as U+FFFD."""
    process = subprocess.run([*command("generate"), b"caf\xe9", "--tokens", "3"], cwd=trained,
                             capture_output=True, timeout=240)
    assert process.returncode == 0, process.stderr
    assert process.stdout.decode("utf-8").startswith("caf\ufffd")


def test_chat_through_a_pipe(trained):
    """Lines in, continuations out; /reset makes the second answer the first one again."""
    args = ("nanoeuler.bin", "--tokens", 20, "--temperature", 0, "--threads", 1)
    result = nanoeuler("chat", *args, cwd=trained,
                       stdin="ROMEO:\n \nROMEO:\n/reset\nROMEO:\n/quit\nnever read\n")
    assert ok(result) and result.stderr == ""
    head, *replies = result.stdout.split("\n> ")
    assert "nanoeuler.bin" in head and "continues what you type" in head and "/quit" in head
    said = [r for r in replies if r.strip()]
    assert len(said) == 3 and said[0] == said[2] and "never read" not in result.stdout
    c = ne.read_checkpoint(str(trained / "nanoeuler.bin"))
    decoder = ne.Decoder(c.cfg, c.flat)
    ids = ne.generate(decoder, c.tokenizer.encode("ROMEO:"), 20, None, ne.Sampling(temperature=0.0),
                      None)
    want = c.tokenizer.decode(list(ids)).decode("utf-8", "replace")
    assert said[0].rstrip("\n") == want.rstrip("\n")
    end = nanoeuler("chat", "nanoeuler.bin", cwd=trained, stdin="")                # Ctrl-D
    assert ok(end) and end.stderr == ""


def test_chat_takes_any_text(trained):
    result = nanoeuler("chat", "nanoeuler.bin", "--tokens", 5, cwd=trained, cold=True,
                       stdin="na\u00efve \U0001f600 </s>\n" + "x" * 3000 + "\n")
    assert ok(result) and result.stderr == ""


def spoken(tmp_path, text, kind="base"):
    """A checkpoint that says this text, whatever the prompt, then </s>; a token is a byte."""
    tokenizer = bpe.train(b"ab", 257)                             # bytes and </s>
    ids = [*tokenizer.encode(text), tokenizer.specials["</s>"]]
    V, path = tokenizer.vocab_size, tmp_path / "spoken.bin"
    assert len(set(ids)) == len(ids), "each byte once: the model knows what follows a byte, no more"
    cfg = replace(TINY, n_embd=V, n_head=1, n_kv_head=1, n_layer=1, n_hidden=1, n_mtp=1,
                  seq_len=300,
                  vocab_size=V)
    p = ne.views(flat := np.zeros(ne.n_params(cfg), np.float32), ne.param_table(cfg))
    p.wte[:], p.final_norm[:] = np.eye(V), 1
    p.lm_head[0, ids[0]] = 1                 # anything is followed by the first
    for this, following in zip(ids, ids[1:]):
        p.lm_head[0, following, this] = 3
    ne.write_checkpoint(str(path), cfg, tokenizer, ne.State(kind=kind), flat)
    return path


def test_streaming_keeps_characters_whole(tmp_path):
    """A character of four bytes is four tokens: nothing is printed before the last of them."""
    text = "\u00e9\u4e2d\U0001f600"
    path = spoken(tmp_path, text)
    process = subprocess.Popen(command("generate", "a", path, "--temperature", 0),
                               stdout=subprocess.PIPE)
    pieces = b""
    while piece := process.stdout.read1(3):
        pieces += piece
    assert process.wait() == 0 and pieces.decode("utf-8") == "a" + text + "\n"


@pytest.mark.parametrize("weights", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_model_that_overflows_says_so(weights, temperature, tmp_path, capsys):
    """Its weights are finite, what it computes from them is not."""
    path = spoken(tmp_path, "abc")
    c = ne.read_checkpoint(str(path))
    p = ne.views(c.flat, ne.param_table(c.cfg))
    p.final_norm[:] = 3e38                   # times an entry of 16: an infinity
    p.lm_head[:] *= 1e30
    ne.write_checkpoint(str(path), c.cfg, c.tokenizer, c.state, c.flat)
    refused(capsys, "generate", "a", path, "--temperature", temperature, "--weights", weights,
            words=("logit of token", "weights", "another checkpoint"))


def test_a_prompt_is_shown_before_it_is_read(tmp_path, monkeypatch):
    """A long one takes a while."""
    class Terminal(io.StringIO):
        shown = ""

        def flush(self):
            self.shown = self.getvalue()

    out, seen, rewind = Terminal(), [], rewind_to
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr("nanoeuler_parts.chat.templates.rewind_to",
                        lambda *args: (seen.append(out.shown), rewind(*args))[1])
    run("generate", "Two", spoken(tmp_path, "Yes!"), "--temperature", 0)
    assert seen == ["Two"] and out.getvalue() == "TwoYes!\n"


def test_half_a_character_at_the_end_is_shown(tmp_path):
    path = spoken(tmp_path, b"\xe4\xb8")
    assert ok(nanoeuler("generate", "a", path, "--temperature", 0, cwd=tmp_path)) == "a\ufffd\n"


def test_ctrl_c_stops_a_reply_and_not_the_chat(tmp_path, monkeypatch, capsys):
    path, stops, lines = spoken(tmp_path, "Yes!", "chat"), [1], iter(["Well?", "Really?"])
    last, = ne.read_checkpoint(str(path)).tokenizer.encode("s")

    class Decoder(ne.Decoder):
        def read(self, parts):
            if last == parts[0].ids[0] and stops:        # drafts may follow
                stops.pop()
                raise KeyboardInterrupt
            return super().read(parts)

    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, "/quit"))
    chat(str(path), decoder=Decoder, temperature=0.0)
    assert capsys.readouterr().out.endswith("stops a reply.\nYesYes!\n\n")


@pytest.mark.parametrize("at", ["the prompt", "a token", "a sample"])
def test_ctrl_c_in_a_continuation_reads_nothing_twice(at, tmp_path, monkeypatch):
    """In the middle of a long prompt, of which some is read; before a token, and behind it."""
    speaker = ne.Speaker(str(spoken(tmp_path, "Yes!")), ne.Decoder,
                         ne.Sampling(temperature=0.0, speculate=0).check())
    stops = {"the prompt": 2, "a token": 3, "a sample": 2}[at]
    owner, name = (ne.Reply, "sample") if at == "a sample" else (ne.Decoder, "compute")
    call, calls = getattr(owner, name), []

    def stopping(self, *args):
        calls.append(args)
        if len(calls) == stops:
            raise KeyboardInterrupt
        return call(self, *args)

    first, more = "x" * 280, "Well"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, stopping)
        speaker.say(first)
    drawn = speaker.last.tokens
    assert len(drawn) == (0 if at == "the prompt" else 1)
    encode = speaker.tokenizer.encode
    assert [*speaker.decoder.tokens, *speaker.ids_to_read(more)] == [
        *encode(first), *drawn, *encode(more)]
    assert speaker.say(more) == "Yes!"


@pytest.mark.parametrize("typed, answers, told", [
    (["Well?", KeyboardInterrupt, "Really?", KeyboardInterrupt, KeyboardInterrupt, "No?"], 2, 2),
    ([KeyboardInterrupt, KeyboardInterrupt, "No?"], 0, 1),
    ([KeyboardInterrupt, "", KeyboardInterrupt, "Yes?", "/quit", "No?"], 1, 2),
    ([KeyboardInterrupt, EOFError, "No?"], 0, 1)])
def test_ctrl_c_at_the_prompt(typed, answers, told, tmp_path, monkeypatch, capsys):
    """The first clears the line and says how to leave, the second in a row leaves."""
    path, lines = spoken(tmp_path, "Yes!", "chat"), iter(typed)

    def type_next(prompt):
        line = next(lines)
        if not isinstance(line, str):
            raise line
        return line

    monkeypatch.setattr("builtins.input", type_next)
    run("chat", path, "--temperature", 0)
    said = capsys.readouterr().out
    assert said.count("Yes!") == answers and said.count("to leave: Ctrl-C again") == told
    assert said.count("Ctrl-D, or /quit") == told


def test_a_prompt_of_standard_input(tmp_path):
    path = spoken(tmp_path, "Yes!")
    args = ("generate", "-", path, "--temperature", 0, "--tokens", 4)
    for given, shown in (("Well?\n", "Well?"), ("Two\nrow", "Two\nrow"), ("a\n\n", "a\n")):
        result = nanoeuler(*args, cwd=tmp_path, stdin=given)
        assert ok(result) == f"{shown}Yes!\n" and result.stderr == ""
    complains(nanoeuler(*args, cwd=tmp_path, stdin=""), "prompt", "empty")


def test_fewer_tokens_than_asked_have_a_reason(tmp_path, capsys):
    """What goes on a text ends where it would go on with </s>; an answer ends there by nature."""
    for kind, tokens, noted in (("base", 5, True), ("base", 4, False), ("chat", 5, False)):
        run("generate", "a", spoken(tmp_path, "Yes!", kind), "--temperature", 0, "--tokens", tokens)
        notes = capsys.readouterr().err.splitlines()
        reason = "note: the model ended the text with </s> after 4 of 5 tokens" in notes
        assert reason == noted and len(notes) == noted + (kind == "chat")


@pytest.mark.parametrize("text", ["\U0001f600", "a \u2603!", "\U0001f980\u00e9"])
def test_a_character_of_several_tokens_comes_whole(text, tmp_path):
    """Each byte is a token; none of them is shown before the character is complete."""
    model = ne.load(str(spoken(tmp_path, text, "chat")), temperature=0.0)
    assert model.say("b") == text and len(model.last.tokens) == len(text.encode())
    assert list(model.stream("b")) == list(text)
    [reply] = model.generate(["b"])
    assert reply.answer == text and reply.finish == "stop"


def test_a_chat_model_answers(tmp_path):
    """The template goes in and is not shown, </s> ends the answer, each question stands alone."""
    path = spoken(tmp_path, "Yes!", "chat")
    shown = ok(nanoeuler("chat", path, "--temperature", 0, cwd=tmp_path,
                         stdin="Well?\nWell?\nNo?\n"))
    assert "answers what you type" in shown
    assert [s.strip() for s in shown.split("\n> ")[1:4]] == ["Yes!", "Yes!", "Yes!"]
    once = ok(nanoeuler("generate", "Well?", path, "--temperature", 0, cwd=tmp_path))
    assert once.strip() == "Yes!" and "Instruction" not in once


def test_a_base_model_answers_with_a_template(tmp_path, capsys):
    """By nature it goes on."""
    path = spoken(tmp_path, "Yes!")
    for flags, shown in (((), "Well?Yes!\n"), (("--template", "alpaca"), "Yes!\n")):
        run("generate", "Well?", path, "--temperature", 0, *flags)
        assert capsys.readouterr().out == shown


def test_the_template_is_alpacas():
    assert ne.PROMPT.format(instruction="Sing.").startswith(
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\nSing.\n\n### Response:")


@pytest.mark.parametrize("tied", [False, True])
def test_lens_shows_numbers_of_the_model(tied, trained, tmp_path, capsys):
    path, prompt = trained / "nanoeuler.bin", "ROMEO: what"
    c = ne.read_checkpoint(str(path))
    cfg, flat = c.cfg, c.flat
    if tied:
        path, cfg = tmp_path / "tied.bin", replace(cfg, tie_embeddings=True)
        flat = random_flat(cfg, 4, np.float32)
        ne.write_checkpoint(str(path), cfg, c.tokenizer, ne.State(), flat)
    run("lens", prompt, path)
    p, tokens = ne.views(flat, ne.param_table(cfg)), c.tokenizer.encode(prompt)
    x, logits = naive.forward(cfg, p, tokens[-cfg.seq_len:])
    x = x[:, -1]
    rows = capsys.readouterr().out.splitlines()[1:]
    assert len(rows) == 1 + 2 * cfg.n_layer and rows[0].startswith("embedding")
    for i in range(1, len(rows)):
        step = np.linalg.norm(x[i] - x[i - 1]) / np.linalg.norm(x[i - 1])
        cosine = x[i] @ x[i - 1] / np.linalg.norm(x[i]) / np.linalg.norm(x[i - 1])
        number, name, length, angle = re.match(r" *(\d+) (\w+) +([\d.]+) +([\d.]+)\u00b0",
                                               rows[i]).groups()
        assert int(number) == (i + 1) // 2 and name == ("attention" if i % 2 else "swiglu")
        limit, limit_angle = 2e-3, 0.2
        if DTYPE == "bf16":               # rounded by 2**-9: what enters each of two products in
            limit = 4 * 2 ** -9 * max(1, step)           # a half layer, and the weights of both
            limit_angle = math.degrees(4 * 2 ** -9)
        assert abs(float(length) - step) < limit
        assert abs(float(angle) - math.degrees(math.acos(cosine))) < limit_angle
    best = c.tokenizer.vocab[logits[0, -1].argmax()].decode("utf-8", "backslashreplace")
    assert repr(best) in rows[-1]
    share = naive.softmax(logits[0, -1]).max()
    shown = float(re.search(r"' (\d+)%", rows[-1])[1]) / 100
    wrong = 4 * 2 ** -9 * np.abs(logits[0, -1]).max() if DTYPE == "bf16" else 0.0
    assert abs(shown - share) <= 0.0051 + wrong * share * (1 - share)        # d softmax / d logit


def test_a_long_prompt_is_cut_with_a_note(checkpoint, capsys):
    T = ne.read_checkpoint(str(checkpoint)).cfg.seq_len
    for verb, *flags in ("lens",), ("generate", "--tokens", "1", "--n", "2"):
        for n in 1, 3 * T:
            run(verb, "word " * n, checkpoint, *flags)
            notes = capsys.readouterr().err.count("the beginning of the prompt is dropped")
            assert notes == (n > 1)          # once, also for two replies


def test_lens_rejects_weights_that_make_infinite_numbers(checkpoint, capsys):
    c = ne.read_checkpoint(str(checkpoint))
    for gain in ne.views(c.flat, ne.param_table(c.cfg))[ne.VECTORS]:
        gain[:] = 3e38
    ne.write_checkpoint(str(checkpoint), c.cfg, c.tokenizer, c.state, c.flat)
    refused(capsys, "lens", "to be", checkpoint, words=["finite", "too large"])


def test_info(trained, said):
    shown = said("info", "nanoeuler.bin")
    c = ne.read_checkpoint(str(trained / "nanoeuler.bin"))
    for word in (f"{ne.n_params(c.cfg):,}", "20 of 20", f"{c.state.tokens_seen:,}",
                 c.tokenizer.hash(), "matches",
                 "n_embd", f"{c.cfg.n_embd}", f"{c.state.bits_per_byte:.4f}"):
        assert word in shown, word


def test_info_shows_texts_of_others_in_their_row(tmp_path, capsys):
    """A checkpoint of a stranger cannot add a row, or command the terminal."""
    c = ne.read_checkpoint(str(spoken(tmp_path, "Yes!")))
    state = replace(c.state, kind="base\n  checksum         is whatever", options={
        "data": "\x1b[2Ja.txt\r\u202e"})
    ne.write_checkpoint(str(tmp_path / "a.bin"), c.cfg, c.tokenizer, state, c.flat)
    run("info", tmp_path / "a.bin")
    said = capsys.readouterr().out
    assert len(re.findall("^  checksum ", said, re.M)) == 1 and r"base\n  checksum" in said
    assert r"\x1b[2Ja.txt\r\u202e" in said and all(c.isprintable() or c == "\n" for c in said)


@pytest.mark.parametrize("args, words", [
    (["generate", "x", "none.bin"], ["none.bin", "train"]),
    (["chat", "none.bin"], ["none.bin", "train, sft, dpo or import"]),
    (["lens", "x", "none.bin"], ["none.bin", "train"]),
    (["info", "none.bin"], ["none.bin", "train"]),
    (["plot", "none.jsonl"], ["none.jsonl"]),
    (["generate", ""], ["prompt"]),
    (["lens", ""], ["prompt"]),
    (["generate", "x", "--temperature", "-1"], ["temperature", "-1"]),
    (["generate", "x", "--temperature", "nan"], ["temperature", "nan"]),
    (["generate", "x", "--top-p", "1.5"], ["--top-p", "1.5"]),
    (["generate", "x", "--min-p", "-0.5"], ["--min-p", "-0.5"]),
    (["generate", "x", "--top-k", "-2"], ["--top-k", "-2"]),
    (["generate", "x", "--tokens", "-2"], ["tokens"]),
    (["chat", "--seed", "-2"], ["seed"]),
    (["plot", "nanoeuler.jsonl", "--out", "none/a.png"], ["none/a.png"]),
    (["plot", "nanoeuler.bin"], ["nanoeuler.bin"]),
])
def test_what_the_verbs_refuse(args, words, copy, monkeypatch, capsys):
    if "a.png" in args[-1]:
        needs("matplotlib")
    monkeypatch.chdir(copy)
    refused(capsys, *args, words=words)


def test_a_closed_pipe_is_no_error(trained):
    """nanoeuler.py ... | head -1"""
    process = subprocess.Popen(command("generate", "A", "nanoeuler.bin", "--tokens", 3000,
                                       "--threads", 1), cwd=trained,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(5)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 0


def test_a_closed_input_is_one_line(trained):
    shell = f"exec {shlex.join(command('chat', '--threads', 1))} <&-"
    result = subprocess.run(["sh", "-c", shell], cwd=trained, capture_output=True, text=True,
                            check=False)
    complains(result, "standard input")


def test_a_name_with_blanks_is_quoted_in_what_to_type_next(text, tmp_path):
    """The commands that the program prints work as they stand."""
    train = ("train", "--data", text, "--out", "my model.bin", *FAST)
    line = ok(nanoeuler(*train, "--steps", 2, cwd=tmp_path)).splitlines()[-1]
    assert line.strip() == f"{STARTED} chat 'my model.bin'"


def test_the_program_is_found_from_anywhere(trained, tmp_path):
    complains(nanoeuler("info", "nanoeuler.bin", cwd=tmp_path), "nanoeuler.bin")
    ok(nanoeuler("info", trained / "nanoeuler.bin", cwd=tmp_path, cold=True))


@pytest.mark.parametrize("weights", ["f32", "bf16", "int8"])
def test_a_decoder_lets_the_large_ones_go(weights):
    cfg = ne.PRESETS["small"]
    flat = ne.init_params(cfg, 1)
    assert not any(np.shares_memory(x, flat) for x in ne.Decoder(cfg, flat, weights).weights.p)


def test_a_model_does_not_command_the_terminal(tmp_path, monkeypatch, capsys):
    said = "\x1b]0;mine\x07\tb\rc\u202ed"
    path = spoken(tmp_path, said.encode())
    run("generate", "a", path, "--temperature", 0)
    assert capsys.readouterr().out == f"a{said}\n"         # into a file as it is
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    run("generate", "a", path, "--temperature", 0)
    assert capsys.readouterr().out == "a\ufffd]0;mine\ufffd\tbc\ufffdd\n"
