"""Generation: drafts change no text, batches change no text, what an answer may hold, files."""
import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import numba
import numpy as np
import pytest
from helpers import TINY, nanoeuler, never, ok, random_flat, refused, run, sampled, some
from models import write
from oracles import naive
from servers import chat_model

import nanoeuler as ne
from nanoeuler_parts.chat.verbs import chat

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("one_thread")]

CFG = replace(TINY, n_embd=16, n_head=4, n_kv_head=2, n_hidden=24, seq_len=40, n_mtp=4)
PLAIN = dict(speculate=0)


def repetitive(cfg=CFG, seed=2):
    """A model that repeats itself, so that some drafts are right: its heads are much alike."""
    flat = random_flat(cfg, seed, np.float32, 0.25)
    p = ne.views(flat, ne.param_table(cfg))
    for head in p.lm_head[1:]:
        head[:] = 0.9 * p.lm_head[0] + 0.1 * head
    return flat


def written(reader, prompts, sampling, **more):
    """(tokens, why each ends) of replies to prompts in turn, and the Pace."""
    pace = ne.Pace()
    replies = [ne.Reply(ids, sampling, ne.rng_of(sampling.seed, i), **more)
               for i, ids in enumerate(prompts)]
    done = dict(ne.generate_many(reader, replies, pace))
    assert sorted(done) == list(range(len(prompts)))
    return [(done[i].tokens, done[i].finish) for i in range(len(prompts))], pace


def prompts_of(n, most=30, seed=1):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, CFG.vocab_size, rng.integers(1, most)).tolist() for _ in range(n)]


class Drawing(ne.Decoder):
    """A decoder that samples tokens, as one on a device does, from numbers that it knows ahead."""
    samples_itself = True

    def sample_on_device(self, parts, requests, later=()):
        if any(not self.held_ids[slot] for slot, *_ in parts):
            return None
        logits = self.read(parts)
        assert len(requests) == len(logits) and len(later) in (0, len(parts))
        self.drawn = getattr(self, "drawn", 0) + 1
        return [ne.sample(z, SimpleNamespace(random=lambda u=d.uniform: u), d)
                for z, d in zip(logits, requests)]


@pytest.mark.parametrize("o", [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}, {
    "temperature": 0.7, "logprobs": 2}, {"frequency_penalty": 1.0}, {"repeat_penalty": 1.3}],
    ids=str)
@pytest.mark.parametrize("speculate", [0, 3])
def test_a_reader_that_draws_writes_the_same_texts(o, speculate):
    """A draft that is refused leaves random numbers that were seen and not used: they are the next
    ones.  Logits that are changed or told are asked for."""
    prompts, sampling = prompts_of(60), ne.Sampling(tokens=18, speculate=speculate, **o)
    want, _ = written(ne.Decoder(CFG, repetitive(), slots=16), prompts, sampling, end=7)
    drawing = Drawing(CFG, repetitive(), slots=16)
    got, pace = written(drawing, prompts, sampling, end=7)
    assert got == want and any(pace.offered) == bool(speculate)
    on_host = {"logprobs", "frequency_penalty", "repeat_penalty"}        # the host samples
    assert hasattr(drawing, "drawn") != bool(on_host & {*o})


def test_replies_of_one_stream_of_numbers_go_on_where_the_last_ended():
    """As those of a chat do, whatever drafts have seen ahead."""
    found = []
    for kind, speculate in ((ne.Decoder, 0), (Drawing, 0), (Drawing, 3)):
        decoder, rng, tokens = kind(CFG, repetitive()), ne.rng_of(5), []
        for ids in prompts_of(4, 9):
            reply, pace = ne.Reply(ids, ne.Sampling(tokens=9, speculate=speculate), rng), ne.Pace()
            while not reply.finish:
                ne.next_tokens(decoder, [reply], pace)
            tokens += reply.tokens
        found.append(tokens)
    assert found[0] == found[1] == found[2]


# ---- a text does not depend on what it is computed beside, nor on drafts
@pytest.fixture
def all_threads(one_thread):
    numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("n_mtp", [1, 4])
def test_a_thousand_prompts_with_and_without_drafts(temperature, n_mtp, request):
    """In batches of 16, from prompts shorter and longer than what slides; one has a stop token."""
    if temperature and n_mtp > 1:
        request.getfixturevalue("all_threads")
    cfg = replace(CFG, n_mtp=n_mtp)
    decoder, prompts = ne.Decoder(cfg, repetitive(cfg), slots=16), prompts_of(some(500))
    sampling = ne.Sampling(temperature=temperature, tokens=18)
    want, plain = written(decoder, prompts, replace(sampling, speculate=0), end=7)
    got, pace = written(decoder, prompts, replace(sampling, speculate=3), end=7)
    assert got == want
    assert sum(plain.offered) == 0 < sum(pace.accepted) < sum(pace.offered)
    assert pace.steps < plain.steps or temperature
    lengths = {len(tokens) for tokens, _ in want}
    assert max(lengths) == 18 and {finish for _, finish in want} <= {"stop", "length"}


@pytest.mark.parametrize("speculate", [0, 1, 5, -1])
def test_alone_and_in_a_batch(speculate, all_threads):
    """Long enough that contexts slide, with drafts before them."""
    flat, prompts = repetitive(), prompts_of(9, 45)
    o = ne.Sampling(temperature=0.7, tokens=70, top_p=0.9, presence_penalty=0.3,
                    frequency_penalty=0.2, speculate=speculate)
    want = []
    for i, ids in enumerate(prompts):
        rng = ne.rng_of(o.seed, i)
        want.append(sampled(ne.Decoder(CFG, flat), ids, 70, rng, replace(o, **PLAIN)))
    for slots in (1, 4, 9):
        got, _ = written(ne.Decoder(CFG, flat, slots=slots), prompts, o)
        assert [tokens for tokens, _ in got] == want


@pytest.mark.parametrize("chosen", [dict(), dict(temperature=0.0), dict(top_k=5), dict(top_p=0.7),
                                    dict(min_p=0.1, speculate=3)], ids=str)
def test_ten_lines_generate_what_a_reply_does(chosen):
    """Also where the context slides"""
    flat, prompt, o = repetitive(), [5, 6, 7], ne.Sampling(**chosen)
    plain = ne.generate(ne.Decoder(CFG, flat), prompt, 90, ne.rng_of(2), o)
    assert [*plain] == sampled(ne.Decoder(CFG, flat), prompt, 90, ne.rng_of(2), o)


def test_greedy_drafts_against_the_plain_model():
    """The likeliest token each time, by a forward pass in NumPy."""
    flat, text = repetitive(), [5, 6, 7]
    p = ne.views(flat, ne.param_table(CFG))
    got = sampled(ne.Decoder(CFG, flat), text, 12, None, ne.Sampling(temperature=0.0, speculate=3))
    for token in got:
        logits = naive.forward(CFG, p, np.array(text))[1][0, -1]
        assert logits[token] >= logits.max() - 1e-4
        text = [*text, token]


def test_drafts_are_those_of_the_heads():
    """The i-th guesses the i-th token behind the one that was drawn."""
    flat = repetitive()
    decoder, model = ne.Decoder(CFG, flat), ne.Model(CFG, flat)
    reply = ne.Reply([1, 2, 3], ne.Sampling(temperature=0.0, speculate=2), None)
    ne.next_tokens(decoder, [reply], ne.Pace())
    want = model.logits(np.array([[1, 2, 3]], np.int32))[0, 1:3, -1].argmax(1)
    assert reply.drafts == want.tolist()


def test_a_part_is_computed_in_these_pieces():
    """The example of `Decoder.pieces`"""
    decoder = ne.Decoder(replace(CFG, seq_len=8), repetitive(replace(CFG, seq_len=8)))
    decoder.read([ne.Part(0, range(7))])
    assert decoder.pieces(ne.Part(0, [7, 8, 9], 1)) == [(0, 0, [4, 5, 6, 7, 8, 9], 1)]
    assert decoder.pieces(ne.Part(0, [7, 8, 9], 3)) == [(0, 7, [7], 1),
                                                        (0, 0, [4, 5, 6, 7, 8, 9], 2)]


@pytest.mark.parametrize("tokens, k, want", [
    ([1, 2, 3, 9, 1, 2, 3], 2, [9, 1]), ([1, 2, 3, 9, 1, 2, 3], 9, [9, 1, 2, 3]),
    ([5, 3, 8, 1, 3], 2, [8, 1]), ([1, 2, 4, 7, 2, 5, 1, 2], 1, [4]), ([1, 2, 3], 4, []),
    ([1], 4, []), ([4, 4, 4], 3, [4]), ([1, 2, 8, 1, 2, 9, 1, 2], 1, [9])])
def test_look_up(tokens, k, want):
    """The longest match goes first, then the latest."""
    assert ne.prompt_lookup(tokens, k) == want


def test_drafts_that_do_not_pay_are_left_out():
    """By the clock: of asking for drafts and not asking, the cheaper a token."""
    reader, o = ne.Decoder(CFG, repetitive()), ne.Sampling()
    pace = ne.Pace()
    pace.steps = 12                          # a trial has ended
    for slow in (9, 9, 1, 1, 1, 1, 1):       # some steps had to wait
        pace.count(1, slow * 1.0, False, False, reading=False)
        pace.count(3, slow * 2.0, True, True, reading=False)         # 0.67 s a token
        pace.count(1, slow * 1.0, True, False, reading=False)        # in vain, which costs nothing
    pace.count(1, 99.0, False, False, reading=True)                  # which says nothing
    assert pace.plan(reader, o) == 3
    for _ in range(16):
        pace.count(1, 2.0, True, True, reading=False)
    assert pace.plan(reader, o) == 0
    pace.count(9, 1.0, True, True, reading=False)
    assert pace.plan(reader, o) == 0         # until the next trial
    assert pace.plan(reader, replace(o, speculate=2)) == 2
    tried = []                               # they never pay: trials become rare
    for pace.steps in range(64, 4000):
        if pace.plan(reader, o):
            tried.append(pace.steps)
    assert tried[::4] == [64, 64 + 128, 64 + 384, 64 + 896, 64 + 1920, 64 + 2944]
    reader.rows_are_cheap = False
    assert pace.plan(reader, replace(o, speculate=2)) == 0


def test_the_pace_is_that_of_all_steps_and_of_the_first(monkeypatch):
    """Also of a first step that reads a prompt"""
    now = [100.0]
    monkeypatch.setattr(ne.time, "perf_counter", lambda: now[0])
    pace = ne.Pace(began=now[0])
    for seconds, tokens in (2.0, 1), (0.5, 3), (1.5, 6):
        now[0] += seconds
        pace.count(tokens, seconds, False, False, reading=seconds == 2.0)
    assert (pace.first, pace.seconds, pace.tokens, pace.steps) == (2.0, 4.0, 10, 3)
    assert str(pace) == "10 tokens, 2.5 per second, the first after 2.00 s"


def test_what_is_asked_in_vain_can_cost_too():
    """As on a GPU, which waits for the answer."""
    reader, pace = ne.Decoder(CFG, repetitive()), ne.Pace()
    pace.steps = 12
    for waited in (9, 9, 0, 0, 0):           # behind drafts nothing is queued
        pace.count(1, 1.0 + waited, False, False, reading=False)
    for _ in range(4):
        pace.count(2, 2.0, True, True, reading=False)
        pace.count(1, 1.9, True, False, reading=False)
    assert pace.seconds_per_token(False) == 1.0
    assert pace.seconds_per_token(True) == pytest.approx(1.3)
    assert pace.plan(reader, ne.Sampling()) == 0


@pytest.mark.parametrize("n, seconds, pays", [
    (4, 1.25, True), (4, 1.35, False), (16, 1.1, True), (16, 1.25, False)])
def test_a_few_steps_say_less_than_many(n, seconds, pays):
    reader, pace = ne.Decoder(CFG, repetitive()), ne.Pace()
    pace.steps = 12
    for _ in range(n):
        pace.count(1, 1.0, False, False, reading=False)
        pace.count(1, seconds, True, True, reading=False)
    assert bool(pace.plan(reader, ne.Sampling())) == pays


def test_a_step_without_a_draft_is_counted_by_what_was_asked_for(monkeypatch):
    """Asked for behind the first four steps, of which one reads the prompt, and never found: four
    steps say what that costs, and four what one costs without asking."""
    monkeypatch.setattr(ne, "draft", lambda *_: [])
    _, pace = written(ne.Decoder(CFG, repetitive()), [[5, 6]], ne.Sampling(tokens=9))
    assert not any(pace.offered) and pace.steps == 9
    assert [len(pace.lately[way]) for way in (False, True)] == [4, 4]


# ---- the distribution
def test_sampled_frequencies_with_drafts():
    """Three tokens after a prompt, 20,000 times, against the model's probabilities: Pearson's
    chi-square of the likeliest 40 triples and the rest.  With 40 degrees of freedom it exceeds 90
    for one seed in 100,000.  A draft is of the second, and the third follows where it was right."""
    flat, n = repetitive(), 20_000
    o = ne.Sampling(temperature=0.3, tokens=3, speculate=1)
    got, pace = written(ne.Decoder(CFG, flat, slots=64), [[5, 6]] * n, o)
    assert n / 20 < pace.accepted[0] < n
    model, found = ne.Model(CFG, flat), {(): 1.0}
    for _ in range(3):                       # the likeliest 40 ways to go on, each time
        longer = {}
        for said, share in found.items():
            z = model.logits(np.array([[5, 6, *said]], np.int32))[0, 0, -1].astype(float) / 0.3
            p = naive.softmax(z)
            for token in np.argsort(-p)[:40]:
                longer[*said, int(token)] = share * p[token]
        found = {said: longer[said] for said in sorted(longer, key=longer.get)[-40:]}
    counts = dict.fromkeys(found, 0)
    for tokens, _ in got:
        if tuple(tokens) in counts:
            counts[tuple(tokens)] += 1
    observed, expected = np.array([*counts.values()]), n * np.array([*found.values()])
    observed, expected = (np.append(x, n - x.sum()) for x in (observed, expected))
    assert expected.min() > 5 and ((observed - expected) ** 2 / expected).sum() < 90


# ---- what a reply holds
def reply_to(logits, tokens, vocab=None, **options):
    """A Reply that drew so many tokens, always from these logits."""
    reply = ne.Reply([0], ne.Sampling(tokens=tokens, **options), np.random.default_rng(1), None,
                     vocab)
    while not reply.finish:
        reply.sample(np.array(logits, np.float32))
    return reply


def test_penalties():
    """Off the logit of what was said: once, and each time that it was."""
    logits = [3.0, 2.5, 2.2, -9.0]
    said = lambda **o: reply_to(logits, 7, temperature=0.0, **o).tokens
    assert said() == [0] * 7
    assert said(presence_penalty=1.0) == [0, 1, 2, 0, 0, 0, 0]
    assert said(frequency_penalty=1.0) == [0, 1, 2, 0, 1, 2, 0]
    assert said(presence_penalty=-1.0) == [0] * 7
    assert said(presence_penalty=0.25, frequency_penalty=0.35) == [0, 1, 0, 2, 0, 1, 0]


def test_the_repeat_penalty_affects_recent_tokens():
    """Of the prompt and of the reply, once each; [0] is the prompt."""
    said = lambda logits, **o: reply_to(logits, 5, temperature=0.0, **o).tokens
    assert said([3.0, 2.5, 2.2, -9.0], repeat_penalty=1.3) == [1, 0, 0, 0, 0]
    assert said([3.0, 2.5, 2.2, -9.0], repeat_penalty=1.3, repeat_last_n=1) == [1, 0, 1, 0, 1]
    assert said([3.0, 2.5, 2.2, -9.0], repeat_penalty=1.3, repeat_last_n=0) == [0] * 5
    assert said([3.0, 2.5, 2.2, -9.0], repeat_penalty=5.0, repeat_last_n=-1) == [1, 2, 0, 0, 0]
    assert said([-1.0, -1.2, -9.0], repeat_penalty=1.3) == [1, 0, 0, 0, 0]
    held = ne.Reply([0], ne.Sampling(temperature=0.0, repeat_penalty=1.3), None, held=[1, 2])
    assert held.sample(np.array([3.0, 2.5, 2.2, 2.4], np.float32)) == 3


def test_the_repeat_penalty_of_a_chat_knows_the_conversation(tmp_path, tokenizer):
    model = ne.load(chat_model(tmp_path / "chat.bin", tokenizer), tokens=5, repeat_penalty=1.1)
    for question in "one", "two":
        model.say(question)
        reply = model.last
        assert [*reply.recent] == [*model.decoder.tokens, *reply.pending][-64:]


def test_log_probabilities_are_the_model_s():
    """Whatever temperature and penalties make of them."""
    logits = np.log([0.1, 0.4, 0.2, 0.25, 0.05])
    reply = reply_to(logits, 20, temperature=2.0, presence_penalty=0.5, logprobs=2)
    assert len(reply.logprobs) == 20
    for token, (p, top) in zip(reply.tokens, reply.logprobs):
        assert abs(p - logits[token]) < 1e-6
        assert [i for i, _ in top] == [1, 3] and abs(top[0][1] - math_log(0.4)) < 1e-6


def math_log(x):
    return float(np.log(x))


LETTERS = {b: bytes([b]) for b in range(256)}


@pytest.mark.parametrize("stops, text, want, finish", [
    (["cd"], "abcdef", "ab", "stop"), (["x"], "abcdef", "abcdef", "length"),
    (["cde", "b"], "abcdef", "a", "stop"), (["def"], "abcdef", "abc", "stop"),
    (["aab"], "aaaab", "aa", "stop"), (["a"], "abc", "", "stop"),
    (["\u00e9"], "n\u00e9e", "n", "stop")])
def test_stop_texts(stops, text, want, finish):
    """What is told on the way is never taken back, and the whole is told at the end."""
    sampling = ne.Sampling(tokens=len(text.encode()), temperature=0.0, stop=stops)
    reply, told = ne.Reply([0], sampling, None, None, LETTERS), b""
    for byte in text.encode():
        reply.sample((np.arange(256) == byte).astype(np.float32))
        told += reply.news()
        assert want.encode().startswith(told)
        if reply.finish:
            break
    assert (reply.answer, told, reply.finish) == (want, want.encode(), finish)


@pytest.mark.parametrize("seed", range(20))
def test_the_first_of_several_stop_texts_ends_a_reply(seed):
    """Tokens of several bytes complete several stop texts at once; the order of these is free."""
    rng = np.random.default_rng(seed)

    def texts(n):
        return ["".join(rng.choice([*"ab\u00e9"], rng.integers(1, 5))) for _ in range(n)]

    vocab = [text.encode() for text in texts(8)]
    for _ in range(30):
        stops, tokens = texts(3), rng.integers(8, size=6).tolist()
        want, finish = "", "length"
        for token in tokens:
            want += vocab[token].decode()
            if any(stop in want for stop in stops):
                want, finish = want[:min(want.find(x) for x in stops if x in want)], "stop"
                break
        for order in itertools.permutations(stops):
            reply = ne.Reply([0], ne.Sampling(tokens=6, stop=[*order]), None, None, vocab)
            told = b""
            while not reply.finish:
                reply.append_token(tokens[len(reply.tokens)])
                told += reply.news()
                assert want.encode().startswith(told)
            assert (reply.answer, told, reply.finish) == (want, want.encode(), finish)


def test_stop_texts_that_are_none():
    for stop in ([""], [3]):
        with pytest.raises(ne.UserError, match="stop: expected non-empty texts"):
            ne.Sampling(stop=stop).check()


@pytest.mark.parametrize("p, n, want", [
    ([1, 3, 2], 2, [1, 2]), ([2, 2, 2, 2], 3, [0, 1, 2]), ([1, 2, 1, 2, 1], 3, [0, 1, 3]),
    ([5.0], 1, [0])])
def test_of_equal_ones_the_first_are_the_largest(p, n, want):
    assert np.flatnonzero(ne.largest_mask(np.array(p), n)).tolist() == want


def test_seeds_of_answers():
    """The first answer to the first prompt has the numbers of a prompt alone."""
    first = lambda *args: ne.rng_of(*args).random()
    assert first(5) == first(5, 0, 0) == np.random.default_rng(5).random()
    assert len({first(5, i, j) for i in range(4) for j in range(4)} | {first(6)}) == 17


# ---- from Python
@pytest.fixture
def path(tmp_path, tokenizer):
    cfg = replace(CFG, vocab_size=tokenizer.vocab_size)
    return write(tmp_path / "a.bin", cfg, tokenizer, flat=repetitive(cfg))


def test_the_lines_of_the_documentation(path, capsys):
    model = ne.load(str(path), tokens=12)
    replies = model.generate(["To be", "or not"], seed=3)
    assert [len(r.tokens) for r in replies] == [12, 12]
    alone = "".join(model.stream("To be", seed=3))
    assert alone == replies[0].answer
    first = model.say("Hello")
    assert isinstance(first, str) and model.last.finish == "length"
    assert capsys.readouterr() == ("", "")


def test_a_text_goes_on_behind_all_of_what_was_said(path):
    """The last token of a reply is drawn, and read only with what comes next."""
    model = ne.load(str(path), tokens=3, temperature=0.0)
    model.say("To be")
    said = [*model.ids_of("To be"), *model.last.tokens, *model.ids_of(" or")]
    model.say(" or")
    assert model.decoder.held_ids[0][:len(said)] == said
    model.forget()
    model.say("To be")
    assert model.decoder.held_ids[0][:2] == said[:2]


def test_a_stream_is_no_part_of_what_is_said(path):
    model, other = (ne.load(str(path), tokens=5) for _ in range(2))
    said = []
    for speaker in (model, other):
        said.append([speaker.say("To be")])
    "".join(model.stream("or not"))
    for speaker, texts in zip((model, other), said):
        texts.append(speaker.say("to be"))
    assert said[0] == said[1] and model.decoder.tokens == other.decoder.tokens


def test_replies_of_a_step_have_one_number_of_drafts(path):
    model = ne.load(str(path))
    replies = [ne.Reply([1, 2], ne.Sampling(tokens=4, speculate=n), ne.rng_of(1)) for n in (0, 3)]
    with pytest.raises(ne.UserError, match="the same speculate, found {0, 3}"):
        list(ne.generate_many(model.decoder.with_slots(2), replies))


def test_several_answers(path):
    model = ne.load(str(path))
    some = model.generate(["To be", "or not"], n=3, tokens=6, batch=2)
    assert [len(replies) for replies in some] == [3, 3]
    assert len({reply.answer for replies in some for reply in replies}) > 3
    assert [r.answer for r in model.generate(["To be"], n=1, tokens=6)] == [some[0][0].answer]
    assert model.generate([]) == []
    with pytest.raises(ne.UserError, match="expected a list of prompts"):
        model.generate("To be")              # a text is a list of characters, too


def test_what_load_has_chosen_no_call_chooses_anew(path):
    model = ne.load(str(path))
    for chosen in dict(weights="int8"), dict(template="chatml"):
        with pytest.raises(ne.UserError, match=f"{[*chosen][0]}: set once for all calls"):
            model.generate(["To be"], **chosen)
        with pytest.raises(ne.UserError, match="nanoeuler.load"):
            next(model.stream("To be", **chosen))


def test_a_chat_refuses_what_it_has_not(path, capsys):
    for name in "n", "logprobs":
        refused(capsys, "chat", path, f"--{name}", 2, words=[f"unknown flag --{name}"])
        with pytest.raises(ne.UserError, match=f"{name}: expected .*, found 2"):
            chat(str(path), **{name: 2})
    with pytest.raises(SystemExit):
        ne.main(["chat", "--help-all"])
    said = capsys.readouterr().out
    assert "--speculate" in said and "--logprobs" not in said and "--n " not in said


def test_messages_are_for_a_chat_model(path):
    with pytest.raises(ne.UserError, match="chat model"):
        ne.load(str(path)).generate([[("user", "Hello")]])


# ---- files
def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def file_of(folder, *records):
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def test_a_file_of_prompts(path, tmp_path, capsys):
    """Answers in order, with what each line held; the first is that of the prompt alone."""
    prompts = file_of(tmp_path, "To be", *({"prompt": f"line {i}", "id": i} for i in range(20)))
    out = tmp_path / "answers.jsonl"
    run("generate", "--file", prompts, path, "--out", out, "--batch", 4, "--tokens", 9)
    said = capsys.readouterr()
    answers = lines_of(out)
    n = sum(a["answers"][0]["tokens"] for a in answers)
    assert said.out == "" and f"21 answers in {out}; {n} tokens, " in said.err and n > 100
    assert [a.get("id") for a in answers] == [None, *range(20)]
    assert {a["answers"][0]["finish"] for a in answers} <= {"stop", "length"}
    run("generate", "To be", path, "--tokens", 9)
    assert capsys.readouterr().out == f"To be{answers[0]['answers'][0]['text']}\n"
    before = out.read_bytes()
    run("generate", "--file", prompts, path, "--out", out, "--batch", 4, "--tokens", 9)
    assert out.read_bytes() == before and "21 of 21 answers" in capsys.readouterr().err


def test_an_answer_is_in_the_file_before_the_next_one_is_awaited(path, tmp_path, monkeypatch):
    """So a run that is killed keeps all complete answers: the system has them, whatever happens to
    the process."""
    prompts, out = file_of(tmp_path, *(f"line {i}" for i in range(5))), tmp_path / "a"
    answers_to, seen = ne.Speaker.answers_to, []

    def watched(speaker, *args, **options):
        for answer in answers_to(speaker, *args, **options):
            yield answer
            seen.append(out.read_bytes().count(b"\n"))

    monkeypatch.setattr(ne.Speaker, "answers_to", watched)
    run("generate", "--file", prompts, path, "--out", out, "--batch", 1, "--tokens", 4)
    assert seen == [1, 2, 3, 4, 5] and len(lines_of(out)) == 5


def test_an_answer_that_is_ready_early_waits_for_those_before_it(path, tmp_path, monkeypatch):
    """A killed run then has the answers to the first prompts: what a second start needs."""
    prompts, out = file_of(tmp_path, *(f"line {i}" for i in range(4))), tmp_path / "a"
    answers_to, seen = ne.Speaker.answers_to, []

    def backwards(speaker, *args, **options):
        for answer in [*answers_to(speaker, *args, **options)][::-1]:
            yield answer
            seen.append(len(lines_of(out)))

    monkeypatch.setattr(ne.Speaker, "answers_to", backwards)
    args = ("generate", "--file", prompts, path, "--tokens", 4, "--out")
    run(*args, out)
    assert seen == [0, 0, 0, 4]
    monkeypatch.undo()
    run(*args, tmp_path / "b")
    assert out.read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("an_answer, due", [(1, []), (6, [2, 4, 6, 8]), (11, [*range(1, 10)])])
def test_answers_are_counted_when_ten_seconds_have_passed(an_answer, due, path, tmp_path,
                                                          monkeypatch, capsys):
    prompts, out = file_of(tmp_path, *(f"line {i}" for i in range(9))), tmp_path / "a"
    now, answers_to = [1000.0], ne.Speaker.answers_to

    def slowly(*args, **options):
        for answer in answers_to(*args, **options):
            now[0] += an_answer
            yield answer

    monkeypatch.setattr(ne.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(ne.Speaker, "answers_to", slowly)
    run("generate", "--file", prompts, path, "--out", out, "--batch", 1, "--tokens", 2)
    *lines, last = capsys.readouterr().err.splitlines()
    assert [line.split(", ")[0] for line in lines] == [f"{i} of 9 answers" for i in due]
    assert last.startswith(f"note: 9 answers in {out}; 18 tokens, ")


def test_a_separator_within_a_text_ends_no_line(path, tmp_path):
    """JSON may hold U+2028 and U+0085 as they are, and `generate` itself writes them so."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('"To be\u2028or not"\r\n{"prompt": "To\u0085be"}\n', encoding="utf-8")
    run("generate", "--file", prompts, path, "--out", out, "--tokens", 3)
    assert len(out.read_bytes().splitlines()) == 2


@pytest.mark.parametrize("text", ['"To be"\n\n', '\n"To be"\n \t\n"or not"', '"To be"\r\n\r\n'])
def test_blank_lines_of_a_file_are_skipped(text, path, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text(text, encoding="utf-8", newline="")
    run("generate", "--file", prompts, path, "--out", out, "--tokens", 3)
    assert [a["prompt"] for a in lines_of(out)] == ["To be", "or not"][:text.count('"') // 2]


def test_a_file_of_blank_lines_has_no_prompt(path, tmp_path, capsys):
    (tmp_path / "p").write_text("\n \n", encoding="utf-8")
    refused(capsys, "generate", "--file", tmp_path / "p", path, "--out", tmp_path / "a",
            words=("expected one prompt per line",))


def test_two_checkpoints_for_a_file_of_prompts(path, tmp_path, capsys):
    refused(capsys, "generate", "--file", file_of(tmp_path, "a"), path, "other.bin", "--out",
            tmp_path / "b", words=("checkpoint alone", "other.bin"))


@pytest.mark.parametrize("kept", [0, 40, 200, 900])
def test_a_second_start_goes_on(kept, path, tmp_path, capsys):
    """Whatever was written, up to the middle of a line, the whole file is the same at the end."""
    prompts = file_of(tmp_path, *(f"line {i}" for i in range(9)))
    args = ("generate", "--file", prompts, path, "--out", tmp_path / "a", "--tokens", 7, "--n", 2)
    run(*args)
    whole = (tmp_path / "a").read_bytes()
    assert len(whole) > 900
    (tmp_path / "a").write_bytes(whole[:kept])
    run(*args, "--batch", 3, "--speculate", 2)
    assert (tmp_path / "a").read_bytes() == whole


@pytest.mark.parametrize("change", [("--seed", 2), ("--temperature", 0)])
def test_answers_of_other_settings_are_kept(change, path, tmp_path, capsys):
    prompts, out = file_of(tmp_path, "one", "two"), tmp_path / "a"
    args = ("generate", "--file", prompts, path, "--out", out, "--tokens", 5)
    run(*args)
    before = out.read_bytes()
    refused(capsys, *args, *change, words=("line 1", "--force"))
    assert out.read_bytes() == before
    run(*args, *change, "--force")
    assert len(lines_of(out)) == 2 and out.read_bytes() != before


@pytest.mark.parametrize("text", [
    "# Notes\n", "no end of the line", '{"a": 1}', '{"a": 1}\n', "{\n}\n", "[1]\n", "\n",
    "{% for m in messages %}hello", '{"step": 1, "loss": 2.', '{"prompt": "one"}',
    '{"prompt": "one", "b'])
def test_a_file_that_holds_no_answers_is_left_alone(text, path, tmp_path, capsys):
    out = tmp_path / "notes"
    out.write_text(text, encoding="utf-8")
    refused(capsys, "generate", "--file", file_of(tmp_path, "one"), path, "--out", out,
            words=("line 1", "--force"))
    assert out.read_text(encoding="utf-8") == text


def test_after_an_answer_only_the_beginning_of_the_next_one_is_cut(path, tmp_path, capsys):
    prompts, out = file_of(tmp_path, {"id": 7, "prompt": "\u00e9"}, {"key": 1, "prompt": "b"}), (
        tmp_path / "a")
    args = "generate", "--file", prompts, path, "--out", out, "--tokens", 2
    run(*args)
    whole = out.read_bytes()
    first = whole.index(b"\n") + 1
    for end in (2, first - 1, first + 3, len(whole) - 1):
        out.write_bytes(whole[:end])
        run(*args)
        assert out.read_bytes() == whole
    for start, text in ((first, b'{"a note": "'), (len(whole), b'{"key"'), (0, b'{"prompt": "')):
        out.write_bytes(whole[:start] + text)
        refused(capsys, *args, words=("is not this model's answer to prompt", "--force"))
        assert out.read_bytes() == whole[:start] + text


def test_a_file_that_another_run_writes_is_left_alone(path, tmp_path, capsys):
    """With --force, too: it is emptied when it is ours."""
    fcntl = pytest.importorskip("fcntl", reason="locks of POSIX")
    out = tmp_path / "a"
    out.write_text("x", encoding="utf-8")
    with open(out, "ab") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        refused(capsys, "generate", "--file", file_of(tmp_path, "one"), path, "--out", out,
                "--force", words=("another run is writing",))
    assert out.read_text(encoding="utf-8") == "x"


@pytest.mark.parametrize("line, words", [
    ('{"prompt": "x"', "line 2"), ('{"text": "x"}', "field 'prompt' is missing"),
    ("17", "expected a JSON string or object, found int"),
    ('{"prompt": 4}', "expected a string as its prompt, found 4"), ('""', "no token"),
    ('{"messages": [{"role": "user"}]}', "messages[0]: expected a text"),
    ('{"messages": [{"role": "user</s>", "content": "Hi"}]}', "found 'user</s>'"),
    ('{"prompt": "' + "x " * 60 + '"}', "the context 40")])
def test_bad_lines_are_named_before_anything_is_computed(line, words, path, tmp_path, capsys,
                                                         monkeypatch):
    monkeypatch.setattr(ne.Decoder, "compute", never)
    (tmp_path / "p").write_text(f'"fine"\n{line}\n"fine"\n', encoding="utf-8")
    refused(capsys, "generate", "--file", tmp_path / "p", path, "--out", tmp_path / "a",
            words=(f"{tmp_path / 'p'}, line 2", words))
    assert not (tmp_path / "a").exists()


def test_a_long_prompt_may_be_cut_from_the_left(path, tmp_path):
    (tmp_path / "p").write_text(json.dumps("x " * 60 + "the end"), encoding="utf-8")
    run("generate", "--file", tmp_path / "p", path, "--out", tmp_path / "a", "--tokens", 6,
        "--truncate")
    model = ne.load(str(path))
    tail = model.tokenizer.encode("x " * 60 + "the end")[-(CFG.seq_len - 6):].tolist()
    want = ne.generate(ne.Decoder(model.cfg, repetitive(model.cfg)), tail, 6, ne.rng_of(1),
                       ne.Sampling())
    assert lines_of(tmp_path / "a")[0]["answers"][0]["text"] == model.tokenizer.decode(
        list(want)).decode("utf-8", "replace")


@pytest.mark.parametrize("n, kept", [
    (CFG.seq_len, CFG.seq_len), (CFG.seq_len + 1, CFG.seq_len - 6)])
def test_a_prompt_as_long_as_the_context_is_not_cut(n, kept, path):
    speaker = ne.load(str(path), tokens=6)
    ids = [*range(n)]
    assert speaker.shortened(ids, truncate=True) == ids[n - kept:]
    if n == kept:
        assert speaker.shortened(ids, truncate=False) == ids


@pytest.mark.parametrize("args, words", [
    (["--file", "p"], "--out"), (["x", "--out", "a"], "--file"), ([], "name a prompt"),
    (["--file", "none", "--out", "a"], "none"),
    (["--file", "p", "--out", "p"], "p would replace an input file"),
    (["--file", "p", "--out", "a", "--batch", "0"], "--batch"),
    (["--file", "p", "--out", "-"], "--out: expected the name of a file, found -"),
    (["x", "--n", "0"], "--n: expected 1 to 65536, found 0")])
def test_what_generate_refuses(args, words, path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nanoeuler.bin").write_bytes(path.read_bytes())
    (tmp_path / "p").write_text('"x"\n', encoding="utf-8")
    refused(capsys, "generate", *args, words=[words])


def test_flags_of_one_text(path, tmp_path):
    said = nanoeuler("generate", "To be", path, "--tokens", 4, "--n", 2, "--logprobs", 2, "--stop",
                     "qq", "--stop", "z\udcff", cwd=tmp_path)       # which is no valid UTF-8
    assert ok(said).count("To be") == 2
    assert [line for line in said.stdout.splitlines() if line.startswith("---")] == [
        "--- 1 of 2", "--- 2 of 2"]
    rows = said.stderr.splitlines()
    assert len(rows) == 8 and all(len(row.split("  ")) >= 4 for row in rows), said.stderr
