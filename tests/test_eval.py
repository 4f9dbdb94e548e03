"""The verb `eval`: perplexity beside transformers, choices beside a plain sum, replies, errors."""
import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from helpers import TINY, needs, refused, run, told
from models import CHATML, dicts, write

import bpe
import nanoeuler as ne
from nanoeuler_parts.checkpoint.bundled import model_path
from nanoeuler_parts.checkpoint.file import open_checkpoint, sha256_of
from nanoeuler_parts.runs.evaluation import evaluate
from nanoeuler_parts.tools import evaluation as ev

cli, unit, interop = pytest.mark.cli, pytest.mark.unit, pytest.mark.interop
CFG = replace(TINY, n_embd=32, n_head=4, n_kv_head=2, head_dim=8, n_hidden=48, seq_len=64,
              vocab_size=512, n_mtp=2)
CHOICES = [
    dict(prompt="To be or not", choices=["to be", "to go", "sleep, or not"], answer=0, domain="a"),
    dict(question="To be  \n", choices=["be", " or not"], answer=" or not", domain="a"),
    dict(prompt="", choices=["To", "be"], answer=1, domain="b"),
    dict(prompt="To be or not to be, " * 20, choices=["that", "is the question"], answer=1)]


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer):
    """A checkpoint of random weights, whose text may end."""
    return write(tmp_path_factory.mktemp("eval") / "little.bin", CFG, tokenizer)


@pytest.fixture(scope="module")
def chat(tmp_path_factory, tokenizer):
    return write(tmp_path_factory.mktemp("eval") / "chat.bin", CFG, tokenizer, kind="chat",
                 template=CHATML, eos="<|im_end|>")


def write_lines(path, records):
    path.write_text("".join(json.dumps(x) + "\n" for x in records), encoding="utf-8")
    return path


def figures(folder, *args):
    """The JSON file of `eval` with these arguments"""
    run("eval", *args, "--json", folder / "out.json", "--force")
    return json.loads((folder / "out.json").read_text(encoding="utf-8"))


# ---- texts
def transformers_perplexity(folder, text, max_length, stride):
    """(perplexity, scored tokens) by Hugging Face's guide, "Perplexity of fixed-length models".
    The guide weighs the mean loss of a window by the number of its labels minus one; here the
    weight is the number of labels that are predicted."""
    torch, transformers = needs("torch"), needs("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt").input_ids
    seq_len, nll_sum, n_tokens, prev_end = ids.size(1), 0.0, 0, 0
    for begin in range(0, seq_len, stride):
        end = min(begin + max_length, seq_len)
        input_ids = ids[:, begin:end]
        target_ids = input_ids.clone()
        target_ids[:, :-(end - prev_end)] = -100
        with torch.no_grad():
            loss = theirs(input_ids, labels=target_ids).loss
        n = (target_ids[:, 1:] != -100).sum().item()
        nll_sum, n_tokens, prev_end = nll_sum + loss.item() * n, n_tokens + n, end
        if end == seq_len:
            break
    return math.exp(nll_sum / n_tokens), n_tokens


@interop
def test_perplexity_is_that_of_transformers(model, text, tmp_path):
    """The guide's window includes the last token that it predicts: it is longer by one."""
    (tmp_path / "a.txt").write_bytes(text.read_bytes()[:700])
    run("export", model, tmp_path / "hf")
    want, n = transformers_perplexity(tmp_path / "hf", (tmp_path / "a.txt").read_text("utf-8"), 33,
                                      12)
    got = figures(tmp_path, model, "--data", tmp_path / "a.txt", "--context", 32, "--stride", 12)
    assert got["texts"]["total"]["tokens"] == n > 300
    assert abs(got["texts"]["total"]["perplexity"] / want - 1) < 1e-5


@pytest.mark.slow
@pytest.mark.network
@interop
def test_perplexity_of_smollm_is_that_of_transformers(smollm, text, tmp_path):
    (tmp_path / "a.txt").write_bytes(text.read_bytes()[:8000])
    run("export", smollm[1], tmp_path / "hf")
    want, n = transformers_perplexity(tmp_path / "hf", (tmp_path / "a.txt").read_text("utf-8"), 256,
                                      128)
    got = figures(tmp_path, smollm[1], "--data", tmp_path / "a.txt", "--context", 255, "--stride",
                  128)["texts"]["total"]
    assert got["tokens"] == n > 2000
    assert abs(got["perplexity"] / want - 1) < 1e-4


@unit
def test_disjoint_windows_are_those_of_a_validation(model, text, one_thread):
    c, data = ne.read_checkpoint(str(model)), text.read_bytes()[:1500]
    tokens = c.tokenizer.encode(data)
    n_bytes = len(data) - len(c.tokenizer.vocab[tokens[0]])
    x, [y] = ne.windows(tokens, range(0, len(tokens) - 1, CFG.seq_len), CFG.seq_len, P=1)
    engine, T = ne.Model(c.cfg, c.flat), CFG.seq_len
    want = evaluate(engine, x, y, n_bytes)
    text = ev.Text("a", tokens, len(tokens) - 1, n_bytes, "")
    score = ev.score_text(engine, text, T, T, -1, ev.EvalOptions())
    assert abs(ev.figures_of([score])["bits_per_byte"] / want - 1) < 1e-12


@unit
def test_every_token_but_the_first_is_scored_once():
    """By the window that reads most before it"""
    for n in range(1, 14):
        tokens = np.arange(n + 1)
        for T in range(1, n + 1):
            for S in range(1, T + 1):
                starts = range(0, n - T + S, S)
                x, y = ev.scored_windows(tokens, starts, T, S, -1)
                assert x.shape == (len(starts), T)
                rows, places = np.nonzero(y >= 0)
                assert (x[rows, places] + 1 == y[rows, places]).all()
                assert sorted(y[rows, places]) == [*range(1, n + 1)]
                assert places[rows > 0].min(initial=T) >= T - S


@cli
def test_the_batch_changes_no_figure(model, text, tmp_path):
    """Of texts, choices and replies"""
    (tmp_path / "a.txt").write_bytes(text.read_bytes()[:1000])
    asked = write_lines(tmp_path / "q.jsonl", [*CHOICES, dict(prompt="To be", answer="or"),
                                               dict(prompt="or", answer="not")])
    args = model, "--data", tmp_path / "a.txt", "--questions", asked, "--tokens", 5, "--show-wrong"
    first, *others = [figures(tmp_path, *args, 0, *more) for more in (
        (), ("--batch", 1), ("--batch", 3))]
    for other in others:
        for kind in "texts", "questions":
            assert other[kind]["total"] == first[kind]["total"]
        assert other["questions"]["results"] == first["questions"]["results"]


@cli
def test_rows_of_several_texts(model, text, tmp_path):
    """A row per text, and their sum: of tokens, bytes and nats"""
    data = text.read_bytes()
    for name, part in (("a.txt", data[:300]), ("b.txt", data[300:1500]), ("c.txt", data[:40])):
        (tmp_path / name).write_bytes(part)
    a, b, c = (tmp_path / f"{name}.txt" for name in "abc")
    found = figures(tmp_path, model, "--data", a, b, "--data", c)
    texts, tokenizer = found["texts"], ne.read_checkpoint(str(model)).tokenizer
    assert [*texts["domains"]] == [str(a), str(b), str(c)]
    for path, x in zip((a, b, c), texts["domains"].values()):
        ids = tokenizer.encode(path.read_bytes())
        assert x["tokens"] == len(ids) - 1
        assert x["bytes"] == path.stat().st_size - len(tokenizer.vocab[ids[0]])
        assert x["perplexity"] == math.exp(x["nats"] / x["tokens"])
    for name in "tokens", "bytes", "nats":
        assert texts["total"][name] == sum(x[name] for x in texts["domains"].values())
    total = texts["total"]
    assert total["bits_per_byte"] == total["nats"] / math.log(2) / total["bytes"]
    assert (texts["context"], texts["stride"]) == (64, 32)
    assert found["sha256"] == sha256_of(str(model)) and found["model"] == str(model)
    shown = told("eval", model, "--data", a, b)
    assert f"{texts['domains'][str(a)]['perplexity']:,.4f}" in shown and "total" in shown


@cli
def test_the_newest_model_is_measured(model, text, elsewhere, capsys):
    (elsewhere / "new.bin").write_bytes(model.read_bytes())
    (elsewhere / "a.txt").write_bytes(text.read_bytes()[:100])
    assert "new.bin: " in told("eval", "--data", "a.txt")


@cli
def test_an_int8_checkpoint_is_measured_as_its_numbers(model, text, elsewhere):
    (elsewhere / "a.txt").write_bytes(text.read_bytes()[:300])
    run("quantize", model, "small.bin")
    c = ne.read_checkpoint("small.bin")
    ne.write_checkpoint("same.bin", c.cfg, c.tokenizer, c.state, c.flat)
    small, same = (figures(elsewhere, name, "--data", "a.txt")["texts"] for name in (
        "small.bin", "same.bin"))
    assert small["total"] == same["total"]


# ---- choices
@cli
def test_choices_by_a_plain_sum(model, tmp_path):
    """log p of each token of a choice, by the decoder; blanks before it belong to the choice, and
    a long prompt is cut from the left.  As lm_eval, see test_lm_eval.py"""
    c = ne.read_checkpoint(str(model))
    encode = lambda text: c.tokenizer.encode(text).tolist()
    found = figures(tmp_path, model, "--questions", write_lines(tmp_path / "q.jsonl", CHOICES))
    for q, x in zip(CHOICES, found["questions"]["results"], strict=True):
        prompt, want = q.get("prompt", q.get("question")), []
        for choice in q["choices"]:
            before, both = encode(prompt.rstrip()), encode(prompt + " " + choice)
            if not before:
                before, both = [c.tokenizer.specials["</s>"]], [-1, *both]
            after = both[len(before):]
            ids = [*before, *after][-CFG.seq_len - 1:]
            logits = ne.Model(c.cfg, c.flat).logits(np.array([ids[:-1]], np.int32))[0, 0]
            want.append(sum(ne.log_softmax(logits[i - 1])[ids[i]]
                            for i in range(len(ids) - len(after), len(ids))))
        assert np.abs(np.array(want) - x["log_likelihoods"]).max() < 1e-4
        right = q["answer"] if type(q["answer"]) is int else q["choices"].index(q["answer"])
        assert x["correct"] == (np.argmax(want) == right)
        assert x["reply"] == q["choices"][np.argmax(want)]
        lengths = [len(choice) for choice in q["choices"]]
        assert x["correct_norm"] == (np.argmax(np.array(want) / lengths) == right)
    assert len(encode(CHOICES[-1]["prompt"])) > CFG.seq_len
    total, results = found["questions"]["total"], found["questions"]["results"]
    assert total["n"] == 4 and total["accuracy"] == sum(x["correct"] for x in results) / 4
    assert total["acc_norm"] == sum(x["correct_norm"] for x in results) / 4
    assert {name: x["n"] for name, x in found["questions"]["domains"].items()} == {
        "a": 2, "b": 1, "": 1}


# ---- units: in ASCII, a byte is a character
WORDS = "\u6c34\u6c34\u6c34\u6c34", "abcdef"      # 4 characters and 12 bytes, 6 of each


@unit
def test_acc_norm_is_per_character(model, monkeypatch):
    """Per character, the second choice is the better one; as a whole, per byte and per token it is
    the first one."""
    c, nats = ne.read_checkpoint(str(model)), [-8.0, -9.0]
    sizes = {"one": [1, 1], "characters": [*map(len, WORDS)],
             "bytes": [len(text.encode()) for text in WORDS],
             "tokens": [len(c.tokenizer.encode(f" {text}")) for text in WORDS]}
    best = {unit: int(np.argmax(np.array(nats) / n)) for unit, n in sizes.items()}
    assert best == {"one": 0, "characters": 1, "bytes": 0, "tokens": 0}
    monkeypatch.setattr(ev, "log_likelihoods", lambda model, rows, options: nats)
    q = ev.Question("a", {}, "To be", [*WORDS], [1], "exact", "")
    [found] = ev.choose(None, [q], c, ev.EvalOptions())
    assert (found["correct"], found["correct_norm"]) == (False, True)


@unit
def test_each_figure_is_a_mean_over_the_results_that_have_it():
    """Of files with open questions, with choices, and with both, in one domain or two"""
    kinds = [dict(correct=False), dict(correct=True), dict(correct=False, correct_norm=True),
             dict(correct=True, correct_norm=True), dict(correct=True, correct_norm=False)]
    for results in itertools.product([{"reply": "To be", **x} for x in kinds], repeat=3):
        q = [ev.Question("a", {}, "To", ["To", "be"] if "correct_norm" in x else [], [0], "exact",
                         domain) for x, domain in zip(results, "aab")]
        found = ev.measure_answers(q, results, 0)
        for figures_of, part in ((found["total"], results), (found["domains"]["a"], results[:2]),
                                 (found["domains"]["b"], results[2:])):
            correct = [x["correct"] for x in part]
            normed = [x["correct_norm"] for x in part if "correct_norm" in x]
            assert (figures_of["n"], figures_of["correct"]) == (len(part), sum(correct))
            assert figures_of["accuracy"] == np.mean(correct)
            assert figures_of.get("acc_norm") == (np.mean(normed) if normed else None)


@cli
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_texts_are_measured_in_bytes(name, model, tmp_path):
    """Those of the text that is scored, also where it comes out of JSON"""
    text = "\u00e9\u4e2d\U0001f600 to be\n" * 9
    raw = text if name == "a.txt" else json.dumps({"text": text})
    (tmp_path / name).write_text(raw, encoding="utf-8")
    found = figures(tmp_path, model, "--data", tmp_path / name)["texts"]
    x, tokenizer = found["total"], ne.read_checkpoint(str(model)).tokenizer
    first = tokenizer.encode(text)[0]
    assert x["bytes"] == len(text.encode()) - len(tokenizer.vocab[first])
    assert x["tokens"] == len(tokenizer.encode(text)) - 1 < x["bytes"]
    assert found["tokens_per_second"] == pytest.approx(x["tokens"] / found["seconds"])
    assert x["nats_per_token"] == pytest.approx(x["nats"] / x["tokens"])
    assert x["bits_per_byte"] == pytest.approx(x["nats"] / math.log(2) / x["bytes"])


# ---- replies
@unit
@pytest.mark.parametrize("reply, answers, match, accepted", [
    (" Paris\n", ["paris"], "exact", True), ("Paris.", ["Paris"], "exact", False),
    ("STRASSE", ["Rom", "straße"], "exact", True), ("It is Oslo.", ["oslo"], "contains", True),
    ("It is O slo.", ["oslo"], "contains", False), ("is 42!", [r"\b42\b"], "regex", True),
    ("is 420", ["x", r"\b42\b"], "regex", False), ("oslo", ["Oslo"], "regex", False),
    ("oslo", ["(?i)Oslo"], "regex", True)])
def test_accepted_replies(reply, answers, match, accepted):
    record = dict(prompt="?", answer=answers, match=match)
    assert ev.is_accepted(reply, ev.question_in("here", record)) == accepted


@unit
def test_a_pattern_that_never_ends(monkeypatch):
    monkeypatch.setattr(ev, "PATIENCE", 0.1)
    q = ev.question_in("here", dict(prompt="?", answer="(a+)+$", match="regex"))
    assert ev.is_accepted("aaa", q)
    with pytest.raises(ne.UserError, match="here: the regular expression takes more than"):
        ev.is_accepted("a" * 40 + "b", q)


@unit
def test_wilson_intervals():
    """Of 8 in 10, as statsmodels computes it; and at the ends"""
    assert np.allclose(ev.wilson(8, 10), (0.490162, 0.943318), atol=1e-6)
    assert np.allclose(ev.wilson(0, 5), (0, 0.434482), atol=1e-6)
    assert np.allclose(ev.wilson(5, 5), (1 - 0.434482, 1), atol=1e-6)


@cli
def test_the_mean_reward_of_replies(chat, tmp_path, capsys):
    """In files of rl, with a reward that fails for one of three questions"""
    asked = write_lines(tmp_path / "q.jsonl", [
        dict(q="To be", input="or"), dict(q="Why?"), dict(q="Who?", output="x")])
    (tmp_path / "mine.py").write_text(
        "def reward(example, answer):\n"
        "    return {'To be': 1, 'Why?': 2}[example['instruction']]\n", encoding="utf-8")
    args = (chat, "--questions", asked, "--field", "instruction=q", "--tokens", 5, "--reward",
            tmp_path / "mine.py")
    found = figures(tmp_path, *args)["questions"]
    assert "mean reward 1.5000 on 2 of 3 questions, 1 reward failed" in capsys.readouterr().out
    assert (found["reward"]["mean"], found["reward"]["n"], found["reward"]["failed"]) == (1.5, 2, 1)
    assert [x["reward"] for x in found["results"]] == [1, 2, None]
    [want] = ne.load(str(chat), temperature=0.0, tokens=5).generate(["To be\n\nor"])
    assert found["results"][0]["reply"] == want.answer
    refused(capsys, "eval", chat, "--data", asked, "--reward", "exact", words=["--questions"])
    refused(capsys, "eval", *args[:5], "--reward", "exact", words=["output is missing"])


@cli
def test_replies_are_those_of_generate(chat, tmp_path, capsys, monkeypatch):
    """At temperature 0, in the chat template, in the order of the file, with choices between"""
    asked = ["To be", "or not", [("system", "Be brief."), ("user", "Why?")]]
    want = [reply.answer for reply in ne.load(str(chat), temperature=0.0, tokens=9).generate(asked)]
    records = [dict(prompt=asked[0], answer=want[0].upper()), CHOICES[0],
               dict(question=asked[1], answer=["no", "?"], domain="b"),
               dict(messages=dicts(asked[2]), answer="(?s)^.+$", match="regex", domain="b")]
    path = write_lines(tmp_path / "q.jsonl", records)
    found = figures(tmp_path, chat, "--questions", path, "--tokens", 9)["questions"]
    results = found["results"]
    assert [results[i]["reply"] for i in (0, 2, 3)] == want
    assert [results[i]["correct"] for i in (0, 2, 3)] == [True, False, True]
    assert [x["question"] for x in results] == records
    assert found["domains"]["b"]["accuracy"] == 0.5 and found["sha256"] == sha256_of(str(path))
    capsys.readouterr()
    shown = told("eval", chat, "--questions", path, "--tokens", 9)
    assert "or not" in shown and "'no' or '?'" in shown and repr(want[1])[:70] in shown
    assert "(no domain)" in shown and "total" in shown
    assert "wrong" not in told("eval", chat, "--questions", path, "--tokens", 9, "--show-wrong", 0)
    only = write_lines(tmp_path / "open.jsonl", [
        dict(question=text, answer="?!") for text in asked[:2]])
    read, opened = open_checkpoint, []
    monkeypatch.setattr("nanoeuler_parts.checkpoint.file.open_checkpoint",
                        lambda path: (opened.append(path), read(path))[1])
    shown = told("eval", chat, "--questions", only, "--tokens", 9, "--show-wrong", 1)
    assert shown.count("wrong: ") == 1 and len(opened) == 1
    assert shown.endswith("1 more wrong answer; to print all, add --show-wrong 2\n")


@cli
def test_a_long_prompt_is_cut_if_the_user_wants_it(model, tmp_path, capsys):
    path = write_lines(tmp_path / "q.jsonl", [dict(prompt="To be or " * 40, answer="x")])
    refused(capsys, "eval", model, "--questions", path, words=["q.jsonl, line 1", "--truncate"])
    run("eval", model, "--questions", path, "--truncate", "--tokens", 2)


# ---- errors
GOOD = dict(prompt="a", answer="b")


@cli
@pytest.mark.parametrize("line, words", [
    ('{"prompt"', ["delimiter"]), ("[]", ["expected an object, found list"]),
    ({"prompt": "a"}, ["answer is missing"]),
    ({"answer": "a"}, ["instruction is missing", "(question, answer)"]),
    (GOOD | {"answer": 3}, ["answer is 3"]), (GOOD | {"answer": []}, ["answer is []"]),
    (GOOD | {"match": "fuzzy"}, ["fuzzy", "exact, contains or regex"]),
    (GOOD | {"match": "regex", "answer": "("}, ["regular expression"]),
    (GOOD | {"domain": 3}, ["domain is 3"]), (GOOD | {"choices": "ab"}, ["two choices"]),
    (GOOD | {"choices": ["b", ""]}, ["choices is ['b', '']"]),
    (GOOD | {"choices": ["x", "y"]}, ["answer is 'b'"]),
    (GOOD | {"choices": ["x", "y"], "answer": 2}, ["answer is 2", "from 0 to 1"]),
    (GOOD | {"choices": ["x", "y"], "answer": -1}, ["answer is -1"]),
    (GOOD | {"choices": ["x", "y"], "answer": True}, ["answer is True"]),
    (GOOD | {"choices": ["b", "to be " * 99]}, ["choices of 1 to 64 tokens"]),
    ({"messages": dicts([("user", "a")]), "choices": ["b", "c"], "answer": 0}, ["messages"]),
    ({"messages": dicts([("user", "a")]), "answer": "b"}, ["a base model"])])
def test_a_question_that_is_refused(line, words, model, tmp_path, capsys):
    """By the number of its line"""
    line = line if isinstance(line, str) else json.dumps(line)
    (tmp_path / "q.jsonl").write_text(f"{json.dumps(GOOD)}\n\n{line}\n", encoding="utf-8")
    refused(capsys, "eval", model, "--questions", tmp_path / "q.jsonl",
            words=["q.jsonl, line 3", *words])


@cli
@pytest.mark.parametrize("args, words", [
    ((), ["--data or --questions"]),
    (("--data", "none.txt"), ["none.txt: No such file in ", "check the path"]),
    (("--data", "empty.txt"), ["empty.txt: the file is empty"]),
    (("--data", "a.txt", "one.txt"), ["one.txt: expected 2 tokens or more", "found 1"]),
    (("--data", "a.txt", "box"), ["bundled is a checkpoint", "before --data"]),
    (("--data", "a.txt", "--context", 65),
     ["--context: expected at most the model's context, 64, found 65"]),
    (("--data", "a.txt", "--context", 16, "--stride", 17),
     ["--stride: expected at most --context, 16, found 17"]),
    (("--data", "a.txt", "--stride", -1), ["--stride: expected 0 to", "found -1"]),
    (("--data", "a.txt", "--dtype", "f16"), ["--dtype: expected f32 or bf16, found f16"]),
    (("--data", "a.txt", "--json", "a.txt", "--force"), ["would replace its input"]),
    (("--data", "a.txt", "--json", "one.txt"), ["one.txt exists"]),
    (("--data", "a.txt", "--json", "no/out.json"), ["no/out.json", "no: No such folder"]),
    (("--questions", "empty.txt"), ["expected questions, found none"]),
    (("--questions", "none.jsonl"), ["none.jsonl: No such file"])])
def test_what_is_refused(args, words, model, elsewhere, capsys):
    for name, content in (("a.txt", "To be or not"), ("empty.txt", ""), ("one.txt", "a")):
        (elsewhere / name).write_text(content, encoding="utf-8")
    refused(capsys, "eval", model, *args, words=words)
    assert (elsewhere / "a.txt").read_text(encoding="utf-8") == "To be or not"


@cli
def test_a_window_larger_than_the_memory_is_refused(model, elsewhere, monkeypatch, capsys):
    (elsewhere / "a.txt").write_text("To be or not", encoding="utf-8")
    monkeypatch.setattr(ev, "act_shapes", lambda cfg, T: ((1 << 50,),))
    refused(capsys, "eval", model, "--data", "a.txt", words=["4,194,304.0 GiB", "--context"])


@cli
@pytest.mark.parametrize("kind", ["--data", "--questions"])
@pytest.mark.parametrize("value, code", [(math.nan, 2), (math.inf, 2), (None, 130)])
def test_a_failure_writes_no_figures(value, code, kind, model, elsewhere, monkeypatch):
    """Losses that are not finite, and Ctrl-C"""
    def losses(self, tokens, targets):
        if value is None:
            raise KeyboardInterrupt
        return np.full(len(tokens), value)

    write_lines(elsewhere / "a.txt", CHOICES)
    monkeypatch.setattr(ne.Model, "losses", losses)
    args = ["eval", str(model), kind, "a.txt", "--json", "out.json", "--threads", "1"]
    assert ne.main(args) == code and not (elsewhere / "out.json").exists()


@cli
def test_a_corpus_is_one_text_per_file_and_its_ends_are_not_scored(tmp_path, monkeypatch, capsys):
    """Documents of JSON lines, in a folder: a domain for each folder in it"""
    monkeypatch.chdir(tmp_path)
    c = ne.read_checkpoint(model_path("bundled"), moments=False)
    documents = [f"Document {i} begins here, and ends." for i in range(9)]
    (tmp_path / "books" / "a").mkdir(parents=True)
    lines = "".join(json.dumps({"body": x}) + "\n" for x in documents)
    (tmp_path / "books" / "a" / "x.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "books" / "a" / "y.txt").write_text(documents[0], encoding="utf-8")
    (tmp_path / "books" / "z.txt").write_text(documents[1], encoding="utf-8")
    body = "--field", "body", "--context", 64
    run("eval", "bundled", "--data", "books", *body, "--json", "out.json")
    found = json.loads((tmp_path / "out.json").read_text("utf-8"))["texts"]["domains"]
    assert found.keys() == {"books/a", "books/z.txt"}
    sizes = [len(c.tokenizer.encode(x)) for x in documents]
    assert found["books/a"]["tokens"] == sum(sizes) - 1 + sizes[0] - 1
    first = len(c.tokenizer.vocab[c.tokenizer.encode(documents[0])[0]])
    assert found["books/a"]["bytes"] == sum(map(len, documents)) + len(documents[0]) - 2 * first
    end = c.tokenizer.specials[c.state.eos]
    ids = np.concatenate([[*c.tokenizer.encode(x), end] for x in documents]).astype(np.int32)
    y = np.where(ids[1:] == end, -1, ids[1:])
    one = [c.tokenizer.encode(documents[0])]
    model = ne.Model(c.cfg, c.flat)
    nats = sum(model.losses(ids[None, i:i + 64][:, :len(y[i:i + 64])], y[None, i:i + 64])[0]
               for i in range(0, len(y), 64)) + model.losses(one[0][None, :-1], one[0][None, 1:])[0]
    capsys.readouterr()
    run("eval", "bundled", "--data", "books/a", *body, "--stride", 64, "--json", "b.json")
    total = json.loads((tmp_path / "b.json").read_text("utf-8"))["texts"]["total"]
    assert total["nats"] == pytest.approx(nats, rel=1e-6)


@cli
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
@pytest.mark.parametrize("begins", [False, True])
def test_the_token_that_begins_texts_is_not_scored(begins, kind, tokenizer, tmp_path):
    """It begins each document, as in training.  All tokens of the text are then scored."""
    root = json.loads(tokenizer.to_json())
    begin, end = tokenizer.specials["<|im_start|>"], tokenizer.specials["<|im_end|>"]
    root["post_processor"] = dict(
        type="TemplateProcessing", special_tokens={"<|im_start|>": dict(ids=[begin])},
        single=[dict(SpecialToken=dict(id="<|im_start|>")), dict(Sequence=dict(id="A"))])
    own = bpe.Tokenizer.from_json(json.dumps(root)) if begins else tokenizer
    assert [*own.begins] == [begin] * begins
    path, before = write(tmp_path / "a.bin", CFG, own, eos="<|im_end|>"), own.begins
    documents = ["To be, or not to be", "that is the question", "\u00e9 whether"]
    if kind == "txt":
        documents = documents[:1]
        (tmp_path / "a.txt").write_text(documents[0], encoding="utf-8")
    else:
        write_lines(tmp_path / "a.jsonl", [dict(text=text) for text in documents])
    after = [end] if kind == "jsonl" else []
    ids = np.array([k for text in documents for k in (*before, *own.encode(text), *after)], "i4")
    y = np.where(np.isin(ids[1:], (begin, end)), -1, ids[1:])
    found = figures(tmp_path, path, "--data", tmp_path / f"a.{kind}")["texts"]["total"]
    first = 0 if begins else len(own.vocab[ids[0]])      # it has no prediction
    assert found["tokens"] == np.count_nonzero(y >= 0) == sum(
        len(own.encode(text)) for text in documents) - (not begins)
    assert found["bytes"] == sum(len(text.encode()) for text in documents) - first
    c = ne.read_checkpoint(str(path))
    nats, = ne.Model(c.cfg, c.flat).losses(ids[None, :-1], y[None])
    assert found["nats"] == pytest.approx(nats, rel=1e-6)


@cli
def test_files_of_one_token_and_models_without_an_end(chat, tmp_path, monkeypatch, capsys):
    """In a folder, such a file is left out.  Without an end token, documents have no end."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("To be, or not to be", encoding="utf-8")
    (tmp_path / "books" / "b.txt").write_text("T", encoding="utf-8")
    assert figures(tmp_path, chat, "--data", "books")["texts"]["domains"].keys() == {"books/a.txt"}
    (tmp_path / "books" / "a.txt").write_text("T", encoding="utf-8")
    refused(capsys, "eval", chat, "--data", "books", words=["books", "2 tokens or more"])
    c = ne.read_checkpoint(str(chat))
    ne.write_checkpoint("no_end.bin", c.cfg, c.tokenizer, ne.State(eos=""), c.flat)
    refused(capsys, "eval", "no_end.bin", "--data", "books", words=["no end token"])


@pytest.mark.unit
def test_a_text_has_one_field():
    assert ev.EvalOptions(field=["body", "output=answer"]).check().text_field() == "body"
    with pytest.raises(ne.UserError, match="--field is given as body and text, expected one name"):
        ev.EvalOptions(field=["body", "text"]).check()
    with pytest.raises(ne.UserError, match="--newlines: expected unix, found dos"):
        ev.EvalOptions(newlines="dos").check()


@pytest.mark.unit
def test_an_empty_prompt_needs_a_token_in_its_place():
    with pytest.raises(ne.UserError, match="the prompt is empty, and the model has no token that"):
        ev.choice_ids(None, " \n", "a", None)
