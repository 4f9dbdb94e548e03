"""Reinforcement learning: advantages and the loss by hand and by PyTorch, rewards, the run."""
import contextlib
import functools
import inspect
import json
import math
import os
import re
import signal
from types import SimpleNamespace

import numpy as np
import pytest
from examples import ADD, copy_of
from helpers import (
    TINY, needs, outcome, random_flat, refused, run, signalled, told,
)

import nanoeuler as ne
from nanoeuler_parts.files.logs import read_log
from nanoeuler_parts.lora.files import read_run
from nanoeuler_parts.tools import on_gpu
from nanoeuler_parts.tuning import rewards, rl
from nanoeuler_parts.tuning.grpo import advantages, grpo_loss, SMALL
from nanoeuler_parts.tuning.rewards import Rewards
from nanoeuler_parts.tuning.rl import Answered, Question, RlOptions, RlRun

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]
RUN = ("rl", "nanoeuler.bin", "--data", "add.json", "--reward", "length", "--steps", 8,
       "--updates", 2, "--group", 4, "--batch", 8, "--tokens", 8, "--kl", 0.1, "--eval-every", 4,
       "--save-every", 4, "--lr", 3e-4)


# ---- advantages
def test_advantages_by_hand():
    rewards = np.array([[1.0, 0, 0, 1], [3, 1, 1, 1], [2, 2, 2, 2]])
    assert advantages(rewards, False).tolist() == [
        [0.5, -0.5, -0.5, 0.5], [1.5, -0.5, -0.5, -0.5], [0, 0, 0, 0]]
    scaled = advantages(rewards, True)
    assert scaled[0] == pytest.approx(np.array([1, -1, -1, 1]) * 0.5 / (0.5 + SMALL))
    assert scaled[1] == pytest.approx(np.array([3, -1, -1, -1]) * 0.5 / (math.sqrt(0.75) + SMALL))
    assert not scaled[2].any()


def test_equal_rewards_have_no_advantage_in_spite_of_rounding():
    rewards = np.full((1, 3), 0.1)
    assert (rewards - rewards.mean(1, keepdims=True)).any()
    for divides in False, True:
        assert not advantages(rewards, divides).any()


def test_an_unknown_reward_has_no_part_in_its_group():
    rewards = np.array([[1.0, np.nan, 0, 0.5], [np.nan] * 4, [np.nan, 3, np.nan, np.nan]])
    assert advantages(rewards, False).tolist() == [[0.5, 0, -0.5, 0], [0] * 4, [0] * 4]


# ---- the loss
def test_the_loss_by_hand():
    """Ratios 1.5 and 0.5 of a good answer and of a bad one, with a clip ratio of 0.2: the good one
    is clipped above, the bad one below."""
    logp = np.log([[0.3, 0.1, 0.9], [0.3, 0.1, 0.9]])
    old = np.log([[0.2, 0.2, 0.9], [0.2, 0.2, 0.9]])
    reference = np.log([[0.3, 0.2, 0.9], [0.3, 0.1, 0.9]])
    is_answer = np.array([[True, True, False]] * 2)
    advantage = np.array([2.0, -1.0])
    measures, weight = grpo_loss(logp, old, reference, is_answer, advantage, 0.2, 0.5)
    k3 = 2 - 1 - math.log(2)                 # of the second token of the first answer
    gains = 1.2 * 2, 0.5 * 2, 1.5 * -1, 0.8 * -1
    assert measures == pytest.approx(dict(loss=-sum(gains) / 4 + 0.5 * k3 / 4, kl=k3 / 4,
                                          clipped=2 / 4))
    slopes = [[0, 0.5 * 2 + 0.5 * (2 - 1), 0], [1.5 * -1, 0, 0]]
    assert weight == pytest.approx(np.array(slopes) / 4)


def test_the_first_update_is_a_weighted_log_likelihood():
    """The model is the one that sampled and the reference: d loss / d CE = A / N."""
    logp = np.random.default_rng(1).normal(size=(2, 5))
    is_answer = np.arange(5) >= [[1], [3]]
    measures, weight = grpo_loss(logp, logp, logp, is_answer, np.array([1.0, -2.0]), 0.2, 0.3)
    assert np.array_equal(weight, np.where(is_answer, [[1.0], [-2.0]], 0) / 6)
    assert measures == dict(loss=pytest.approx(-(4 - 4) / 6), kl=0, clipped=0)


ROWS = [([3, 1], [4, 2, 5], 1.3), ([3, 1], [4, 6], -0.7), ([2, 7, 1], [6, 6, 2, 4], -1.1),
        ([2, 7, 1], [5], 0.5)]
N = sum(len(answer) for _, answer, _ in ROWS)
CLIP, KL = 0.2, 0.3


def learner(seed):
    """What RlRun.as_samples and RlRun.ce_weights need of a run, in float64"""
    model = ne.Model(TINY, random_flat(TINY, seed))
    reference = ne.Model(TINY, model.flat.copy())
    for view in ne.views(reference.flat, ne.param_table(TINY)):
        view += 0.1 * np.random.default_rng(seed).standard_normal(view.shape)
    reference.pack()
    options = RlOptions(updates=20, clip_ratio=CLIP, kl=KL)
    found = SimpleNamespace(options=options, model=model, reference=reference, step=0,
                            state=SimpleNamespace(micro_batch=3), row_unit=RlRun.row_unit)
    found.log_probabilities = lambda *args: RlRun.log_probabilities(found, *args)
    return found


def torch_model(model):
    import torch
    from oracles import torch_peer
    peer = torch_peer.Peer(torch_peer.peer_config(TINY), dtype=torch.float64)
    peer.load_numpy(model.p._asdict())
    return peer


def torch_log_probabilities(peer):
    """log pi of the tokens of each answer of ROWS, one text at a time"""
    import torch
    found = []
    for asked, answer, _ in ROWS:
        logp = peer.logits(torch.tensor([asked + answer]))[0, :, 0].log_softmax(-1)
        found.append(torch.stack([logp[len(asked) + i - 1, y] for i, y in enumerate(answer)]))
    return found


def torch_loss(peer, old, reference):
    """The loss as the papers define it, token by token"""
    import torch
    total = 0
    for (_, _, A), logp, o, ref in zip(ROWS, torch_log_probabilities(peer), old, reference):
        ratio = torch.exp(logp - o)
        gain = torch.minimum(ratio * A, torch.clamp(ratio, 1 - CLIP, 1 + CLIP) * A)
        r = torch.exp(ref - logp)
        total = total - (gain - KL * (r - 1 - torch.log(r))).sum()
    return total / N


def compare_with_torch(as_samples):
    """20 updates on the same samples, each by both programs: losses and gradients"""
    torch = needs("torch")
    ours = learner(4)
    ours.batches = SimpleNamespace(samples=as_samples(ours, ROWS, {}))
    x = ours.batches.samples
    peer, other = torch_model(ours.model), torch_model(ours.reference)
    with torch.no_grad():
        old, reference = map(torch_log_probabilities, (peer, other))
    adam = torch.optim.AdamW(peer.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-8,
                             weight_decay=0.0)
    clipped = []
    for ours.step in range(20):
        want = torch_loss(peer, old, reference)
        adam.zero_grad()
        want.backward()
        weight, measures = RlRun.ce_weights(ours, x.tokens, x.targets)
        assert math.isclose(measures["loss"], want.item(), rel_tol=1e-9, abs_tol=1e-12)
        for b in range(0, len(x.tokens), 3):
            rows = slice(b, b + 3)
            ours.model.gradient(x.tokens[rows], x.targets[:, rows], weight[rows])
        for name, grad in peer.numpy_grads().items():
            got = getattr(ours.model.g, name)
            assert np.abs(got - grad).max() <= 1e-9 * max(1e-3, np.abs(grad).max()), name
        clipped.append(measures["clipped"])
        adam.step()
        ours.model.update(ne.hyper_at(ours.step + 1, 0.01, beta1=0.9, beta2=0.95, weight_decay=0.0,
                                      clip=1e9))
    assert clipped[0] == 0 and max(clipped) > 0.3


def test_losses_and_gradients_equal_pytorchs_over_20_updates():
    compare_with_torch(RlRun.as_samples)


# {error: (function, text, its replacement)}
PLANTED = {
    "the mask of the next token": (RlRun.as_samples, "len(asked) - 1:len(whole) - 1] = answer",
                                   "len(asked):len(whole)] = answer"),
    "the first token of an answer is left out": (
        RlRun.as_samples, "len(asked) - 1:len(whole) - 1] = answer",
        "len(asked):len(whole) - 1] = answer[1:]"),
    "sign of the advantage": (grpo_loss, "advantage[:, None]", "-advantage[:, None]"),
    "clipped above only": (grpo_loss, "ratio < 1 - clip)", "ratio < 0)"),
    "KL the other way round": (grpo_loss, "d = reference - logp", "d = logp - reference"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_found(name, monkeypatch):
    function, old, new = PLANTED[name]
    source = inspect.cleandoc("\n" + inspect.getsource(function))
    assert source.count(old) == 1
    found = dict(vars(rl))
    exec(compile(source.replace(old, new), "planted.py", "exec"), found)
    changed = found[function.__name__]
    if function is grpo_loss:
        monkeypatch.setattr(rl, "grpo_loss", changed)
    with pytest.raises((AssertionError, ValueError)):
        compare_with_torch(changed if function is RlRun.as_samples else RlRun.as_samples)


def test_the_token_that_ends_an_answer_is_learned():
    """An answer without one, which was cut at its largest length, has its sampled tokens alone."""
    for tokens, finish in (([4, 5, 9], "stop"), ([9], "stop"), ([4, 5, 6], "length"),
                           ([4, 9], "stop")):
        reply = Answered([1, 2], ne.Sampling(tokens=3, temperature=0.0), ne.rng_of(1), (9,),
                         [b"x"] * 10)
        for token in tokens:
            assert not reply.finish
            reply.append_token(token)
        assert reply.finish == finish and reply.ids == tokens


@pytest.mark.parametrize("unit, seq_len, T", [(1, 512, 69), (64, 512, 128), (64, 100, 100)])
def test_rows_have_whole_units_within_the_context(unit, seq_len, T):
    """On a GPU, attention takes tiles of 64 tokens.  What is added to a row has no target."""
    assert RlRun.row_unit == 1 and on_gpu.RlRun.row_unit == 64
    run = SimpleNamespace(options=RlOptions(), row_unit=unit, reference=None,
                          model=SimpleNamespace(cfg=ne.Config(seq_len=seq_len, n_mtp=1)),
                          log_probabilities=lambda model, tokens, targets: np.zeros(tokens.shape))
    rows = [([1] * 60, [2] * 10, 0.5), ([3, 4], [5, 6, 7], -0.5)]
    found = RlRun.as_samples(run, rows, {})
    assert found.tokens.shape == (2, T) and found.targets.shape == (1, 2, T)
    assert found.tokens[0, :5].tolist() == [3, 4, 5, 6, 0] and not found.tokens[:, 69:].any()
    assert found.targets[0, 0, :6].tolist() == [-1, 5, 6, 7, -1, -1]
    assert np.flatnonzero(found.targets[0, 1] >= 0).tolist() == [*range(59, 69)]


def sampler(n_questions, updates=1):
    """What RlRun.sample_batch needs of a run: 3 groups of 2 answers"""
    found = SimpleNamespace(options=RlOptions(group=2, updates=updates, seed=5), B=6, seen=[],
                            data=SimpleNamespace(batches=ne.Epochs(n_questions, 1, 5)))
    found.learned = [Question({"i": i}, [i]) for i in range(n_questions)]
    found.asked, found.drawn = [], []

    def answers_to(prompts, rngs, temperature):
        assert temperature == found.options.temperature
        found.asked += [ids for [ids] in prompts]
        found.drawn += [rng.random() for rng in rngs]
        return [SimpleNamespace(tokens=[1], ids=[1], answer="") for _ in prompts]

    found.answers_to = answers_to
    found.rewards = SimpleNamespace(of=lambda examples, answers: [e["i"] for e in examples])
    found.count_signal = lambda signal, rewards: None
    found.as_samples = lambda rows, measures: (rows, measures)
    return found


def test_each_answer_has_random_numbers_and_each_epoch_has_all_questions():
    """They follow from the number of the batch, whether batches before it were sampled or not."""
    whole = sampler(12)
    for number in range(8):                  # two epochs
        rows, measures = RlRun.sample_batch(whole, number)
        assert [q for [q], *_ in rows] == whole.asked[-6:]
        assert measures["reward"] == np.mean(whole.asked[-6:])
    assert whole.asked[::2] == whole.asked[1::2]         # a group has one question
    assert sorted(whole.asked[:24:2]) == sorted(whole.asked[24::2]) == [*range(12)]
    assert whole.asked[:24] != whole.asked[24:] and len({*whole.drawn}) == 48
    resumed = sampler(12)
    for number in 5, 6, 7:
        RlRun.sample_batch(resumed, number)
    assert resumed.asked == whole.asked[30:] and resumed.drawn == whole.drawn[30:]


@pytest.mark.parametrize("updates", [1, 2, 3, 5])
def test_validations_and_saves_wait_for_the_end_of_a_batch(updates):
    """None is left out: it follows the batch in which its step lies."""
    for every in range(1, 9):
        options = RlOptions(updates=updates, eval_every=every, save_every=every + 1)
        found = SimpleNamespace(options=options, n_steps=90)
        found.ends_batch = lambda found=found: RlRun.ends_batch(found)
        for what, n in (("validate", every), ("save", every + 1)):
            for found.step in range(1, 91):
                ends = found.step % updates == 0 and found.step < 90
                lies_in = any(step % n == 0
                              for step in range(found.step - updates + 1, found.step + 1))
                assert RlRun.due(found, what) == (ends and lies_in), (found.step, n)


def test_on_a_gpu_every_batch_uses_buffers_of_one_size():
    """Their size decides the order of sums, so it must not be that of the batch before."""
    sizes = []

    def losses(tokens, targets):
        assert sizes and sizes[-1] == (4, 64) and len(tokens) <= 4
        return np.zeros(tokens.shape)

    model = SimpleNamespace(prepare=lambda *size: sizes.append(size), token_losses=losses)
    found = object.__new__(on_gpu.RlRun)
    found.B, found.state = 16, SimpleNamespace(micro_batch=4)
    for n in 7, 1, 4:
        del sizes[:]
        assert found.log_probabilities(model, *np.zeros((2, n, 64), np.int32)).shape == (n, 64)
    found.B = 3                              # fewer than a micro-batch
    model.token_losses = lambda tokens, targets: np.zeros(tokens.shape)
    found.log_probabilities(model, *np.zeros((2, 1, 64), np.int32))
    assert sizes[-1] == (3, 64)


@pytest.mark.parametrize("kl, n", [(0.3, 3), (0.0, 2)])
def test_rows_without_an_advantage_are_left_out(kl, n):
    """Without a KL penalty, their gradient is zero.  The mean is over the tokens of all."""
    ours = learner(4)
    ours.options.kl = kl
    rows = [ROWS[0], (*ROWS[1][:2], 0.0), ROWS[2]]
    x = RlRun.as_samples(ours, rows, {})
    assert len(x.tokens) == len(x.advantage) == n and x.measures["n_tokens"] == 9
    ours.batches = SimpleNamespace(samples=x)
    weight, measures = RlRun.ce_weights(ours, x.tokens, x.targets)
    assert measures["loss"] == pytest.approx(
        -(3 * 1.3 - 4 * 1.1) / 9 + kl * measures["kl"], rel=1e-9)
    assert weight[weight > 0].sum() == pytest.approx(3 * 1.3 / 9) or kl
    ours.row_unit = 5                        # longer rows, the same tokens
    longer, T = RlRun.as_samples(ours, rows, {}), x.tokens.shape[1]
    assert longer.tokens.shape[1] == min(-(-T // 5) * 5, TINY.seq_len) and T % 5
    assert np.array_equal(longer.targets[:, :, :T], x.targets)
    assert (longer.targets[:, :, T:] == -1).all() and (longer.old[:, T:] == 0).all()
    none = RlRun.as_samples(ours, [(*row[:2], 0.0) for row in rows], {})
    assert len(none.tokens) == (3 if kl else 1)


# ---- rewards
EXAMPLE = dict(instruction="Add 1 and 2.", input="", output="3")


@pytest.mark.parametrize("name, output, answer, want", [
    ("exact", "3", " 3\n", 1), ("exact", "3", "33", 0), ("exact", " a b", "a b", 1),
    ("contains", "3", "It is 3.", 1), ("contains", "3", "three", 0),
    ("regex", r"^\d+$", "12", 1), ("regex", r"^\d+$", "a 12", 0), ("regex", "[ab]", "xbx", 1),
    ("length", "3", "one two  three", 3), ("length", "3", "", 0)])
def test_built_in_rewards(name, output, answer, want):
    assert Rewards(name)({**EXAMPLE, "output": output}, answer) == want


def test_exact_of_messages():
    e = dict(instruction="", input="", asked=[("user", "Hi.")], output=[("assistant", "Yo. ")])
    assert Rewards("exact")(e, "Yo.") == 1


def reward_file(folder, text, name="mine.py"):
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def test_a_reward_of_ones_own(tmp_path):
    mine = Rewards(reward_file(tmp_path, "def reward(example, answer):\n"
                                         "    return len(answer) == int(example['output'])\n"))
    assert mine(EXAMPLE, "abc") == 1 and mine(EXAMPLE, "ab") == 0 and len(mine.sha256) == 64


@pytest.mark.parametrize("body, words", [
    ("raise KeyError('x')", ["raised KeyError: 'x', line 2"]),
    ("import json; json.loads(answer)", ["raised JSONDecodeError", "line 2,"]),
    ("raise SystemExit(3)", ["raised SystemExit: 3"]),
    ("return float('nan')", ["returned nan, expected a finite number"]),
    ("return 1e999", ["returned inf"]),
    ("return None", ["returned None"]),
    ("return '1'", ["returned '1'"]), ("return 10**400", ["returned 1000"]),
    ("return -10**5000", ["returned an object of type int, expected a finite number"]),
    ("return type('X', (), dict(__repr__=lambda x: 1 / 0))()", ["returned an object of type X"]),
    ("raise type('X', (Exception,), dict(__str__=lambda x: 1 / 0))", ["raised X, line 2"]),
    ("while True: pass", ["took more than 1 second"])])
def test_a_reward_that_fails_is_reported_once(body, words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rewards, "SLOWEST", 0.2 if "while" in body else 60.0)
    mine = Rewards(reward_file(tmp_path, f"def reward(example, answer):\n    {body}\n"))
    words = [w.replace("1 second", "0.2 second") for w in words]
    assert math.isnan(mine(EXAMPLE, "abc")) and math.isnan(mine(EXAMPLE, "de"))
    said = capsys.readouterr().err
    assert said.count("note:") == 1 and "de" not in re.findall(r"answer '(.*?)'", said)
    for word in [*words, "mine.py", "'Add 1 and 2.'", "the answer 'abc'", "nothing is learned"]:
        assert word in said
    if "while" not in body:                  # all of them fail
        with pytest.raises(ne.UserError, match="failed for all of 2 answers"):
            mine.of([EXAMPLE] * 2, ["a", "b"])


def test_a_run_shows_how_many_rewards_fail(base, tmp_path, monkeypatch):
    monkeypatch.chdir(copy_of(base, tmp_path))
    mine = reward_file(tmp_path, "def reward(example, answer):\n"
                                 "    return 1.0 if len(example['instruction']) % 2 else None\n")
    said = told(*RUN, "--reward", mine, "--steps", 2, "--updates", 1, "--holdout", 0.4)
    assert "(no reward)" in said and "(reward nan)" not in said
    steps = [r["failed"] for r in read_log("nanoeuler_rl.jsonl") if "reward" in r]
    [last] = re.findall(r"^step +2/2  .* of groups  (\d) of 8 rewards failed", said, re.M)
    held = next(r for r in read_log("nanoeuler_rl.jsonl") if "val_reward" in r)
    n, failed = held["questions"], held["val_failed"]
    assert steps[-1] == int(last) == 4 and 0 < failed < n
    assert (f"validation reward 1.000 on {n - failed} of {n} held-out questions, {failed} rewards "
            f"failed\n") in said


def test_a_slow_reward_is_noticed_where_nothing_can_interrupt_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rewards, "SLOWEST", 0.01)
    monkeypatch.setattr(rewards, "limited", lambda seconds: contextlib.nullcontext())
    mine = Rewards(reward_file(tmp_path, "import time\ndef reward(example, answer):\n"
                                         "    time.sleep(0.05)\n    return 1.0\n"))
    assert math.isnan(mine(EXAMPLE, "abc")) and "took more than" in capsys.readouterr().err


def test_the_alarm_of_a_reward_ends_with_it(tmp_path):
    before = signal.getsignal(signal.SIGALRM)
    with rewards.limited(30):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 1
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert signal.getsignal(signal.SIGALRM) is before


@pytest.mark.parametrize("body, words", [
    (None, ["mine.py: No such file", "def reward"]),
    ("x = 1\n", ["expected the function reward"]),
    ("reward = 3\n", ["expected the function reward", "found 3;"]),
    ("def reward(answer):\n    return 1.0\n", ["reward(example, answer), found reward(answer);"]),
    ("\ndef reward(:\n", ["cannot be run", "SyntaxError", "line 2, 'def reward(:'"]),
    ("import nothing_here\n", ["cannot be run", "ModuleNotFoundError"])])
def test_a_reward_file_that_is_rejected(body, words, base, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(copy_of(base, tmp_path))
    if body is not None:
        reward_file(tmp_path, body)
    refused(capsys, *RUN, "--reward", "mine.py", words=words)
    assert "nanoeuler_rl.bin" not in os.listdir()


@pytest.mark.parametrize("flags", [(), ("--force",)])
def test_a_run_that_ends_before_its_first_record_leaves_no_log(flags, base, tmp_path, monkeypatch,
                                                               capsys):
    monkeypatch.chdir(copy_of(base, tmp_path))
    if flags:                                # an older run, whose log this one would replace
        run(*RUN, "--steps", 2)
    before = sorted(os.listdir())
    mine = reward_file(tmp_path, "def reward(example, answer):\n    return None\n")
    refused(capsys, *RUN, "--reward", mine, *flags, words=["failed for all of"])
    assert sorted(set(os.listdir()) - {"mine.py"}) == before


def test_an_unknown_reward_is_rejected(base, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(copy_of(base, tmp_path))
    refused(capsys, *RUN, "--reward", "exakt", words=["--reward", "exact, contains", "'exakt'"])


def test_all_patterns_are_checked_before_the_run(base, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(copy_of(base, tmp_path))
    (tmp_path / "asked.jsonl").write_text("".join(
        json.dumps({**ADD[0], "output": output}) + "\n" for output in (r"\d+", "(3", "4")), "utf-8")
    refused(capsys, *RUN, "--data", "asked.jsonl", "--reward", "regex",
            words=["asked.jsonl, line 2", "output is '(3', expected a regular expression"])


# ---- the run
@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    folder = copy_of(base, tmp_path_factory.mktemp("rl"))
    with contextlib.chdir(folder):
        (folder / "stdout.txt").write_text(told(*RUN), encoding="utf-8")
    return folder


def test_what_a_run_prints_and_writes(tuned):
    said, ended = (tuned / "stdout.txt").read_text("utf-8"), outcome(tuned, "nanoeuler_rl")
    assert (ended.kind, ended.step) == ("chat", 8)
    for words in ("reward           length", "2 groups of 4 per batch, of up to 8 tokens",
                  "nanoeuler.py chat nanoeuler_rl.bin", "held out", "clip ratio 0.2, KL 0.1"):
        assert words in said
    assert re.search(r"^step +8/8  reward \S+  \S+ tokens  KL \S+  signal in \d+% of groups", said,
                     re.M)
    assert re.search(r"^validation reward \S+ on \d+ held-out questions, after", said, re.M)
    assert said.count("(reward ") >= 4       # two samples at each validation
    steps = [r for r in ended.log if "reward" in r]
    held = [r for r in ended.log if "val_reward" in r]
    assert [r["step"] for r in steps] == [*range(1, 9)]
    assert [r["step"] for r in held] == [0, 4, 8]
    names = {"loss", "kl", "clipped", "length", "signal", "failed", "n_tokens", "lr", "norm"}
    assert all(names <= r.keys() for r in steps)
    assert steps[0]["kl"] == 0 and steps[0]["clipped"] == 0 and steps[7]["kl"] > 0
    assert all(a["reward"] == b["reward"] for a, b in zip(steps[::2], steps[1::2]))


@pytest.mark.parametrize("change", [(), ("--threads", 2), ("--micro-batch", 3)], ids=str)
def test_another_run_has_the_same_bits(change, base, tuned, tmp_path, monkeypatch):
    monkeypatch.chdir(copy_of(base, tmp_path))
    threads = change[1] if "--threads" in change else 1
    run(*RUN, *(change if "--threads" not in change else ()), threads=threads)
    found, want = (outcome(x, "nanoeuler_rl") for x in (tmp_path, tuned))
    assert found.arrays == want.arrays and found.log == want.log


def test_a_killed_run_resumes_with_the_same_bits(base, tuned, tmp_path, monkeypatch):
    monkeypatch.chdir(copy_of(base, tmp_path))
    killed = signalled(signal.SIGKILL, 7, *RUN, "--threads", 1, cwd=tmp_path, after="record")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert ne.read_checkpoint("nanoeuler_rl.bin").state.step == 4
    run("rl", "--resume")
    found, want = (outcome(x, "nanoeuler_rl") for x in (tmp_path, tuned))
    assert found.arrays == want.arrays and found.log == want.log


def test_ctrl_c_ends_a_run_after_the_last_update_of_a_batch(base, tuned, tmp_path, monkeypatch):
    monkeypatch.chdir(copy_of(base, tmp_path))
    stopped = signalled(signal.SIGINT, 5, *RUN, "--threads", 1, cwd=tmp_path, after="record")
    assert stopped.returncode == 0 and "stopped at step 6 of 8" in stopped.stdout, stopped
    run("rl", "--resume")
    assert outcome(tmp_path, "nanoeuler_rl").arrays == outcome(tuned, "nanoeuler_rl").arrays


def test_the_reward_rises(base, tmp_path, monkeypatch):
    """A model of three steps learns to write more words."""
    monkeypatch.chdir(copy_of(base, tmp_path))
    run(*RUN, "--steps", 60, "--kl", 0, "--updates", 1, "--batch", 32, "--group", 8,
        "--eval-every", 60)
    held = [r["val_reward"] for r in read_log("nanoeuler_rl.jsonl") if "val_reward" in r]
    steps = [r["reward"] for r in read_log("nanoeuler_rl.jsonl") if "reward" in r]
    assert np.mean(steps[-10:]) > 1.2 * np.mean(steps[:10]) and held[-1] > held[0], (held, steps)


def test_a_changed_source_or_reward_is_noticed_on_resume(base, tuned, tmp_path, monkeypatch,
                                                         capsys):
    monkeypatch.chdir(copy_of(base, tmp_path))
    mine = reward_file(tmp_path, "def reward(example, answer):\n    return len(answer)\n")
    run(*RUN, "--reward", mine, "--steps", 2)
    reward_file(tmp_path, "def reward(example, answer):\n    return 1 + len(answer)\n")
    refused(capsys, "rl", "--resume", "--steps", 4, words=["mine.py has changed", "--out"])
    reward_file(tmp_path, "def reward(example, answer):\n    return len(answer)\n")
    os.rename("nanoeuler.bin", "other.bin")
    refused(capsys, "rl", "--resume", "--steps", 4, words=["nanoeuler.bin: No such file"])
    run("rl", "other.bin", "--resume", "--steps", 4)
    assert ne.read_checkpoint("nanoeuler_rl.bin").state.step == 4


def test_keep_best_keeps_the_highest_reward(base, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(copy_of(base, tmp_path))
    values = iter([0.25, 0.75, 0.5, 0.5])

    def measure(self, rows=None):
        self.held_reward = next(values)
        return f"reward {self.held_reward}"

    monkeypatch.setattr(RlRun, "measure", measure)
    run(*RUN, "--keep-best", "--eval-every", 2, "--steps", 6, "--holdout", 0.2)
    best = ne.read_checkpoint("nanoeuler_rl_best.bin")
    assert best.state.step == 2 and best.state.rewards == [0.25, 0.75]
    said = capsys.readouterr()
    assert "the highest reward was 0.750, at step 2; the same questions now have 0.500" in said.err


def test_a_run_that_learns_nothing_says_so(base, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(copy_of(base, tmp_path))
    mine = reward_file(tmp_path, "def reward(example, answer):\n    return 0.5\n")
    run(*RUN, "--reward", mine, "--steps", 22, "--updates", 1, "--group", 2, "--batch", 2,
        "--eval-every", 11, "--kl", 0)
    said = capsys.readouterr().err
    assert said.count("in 10 batches in a row, all answers of a group had the same reward, such "
                      "as 0.5") == 1
    assert "all sampled answers had the same reward, 0.5, so nothing was learned" in said
    before, after = (ne.read_checkpoint(x, moments=False).flat
                     for x in ("nanoeuler.bin", "nanoeuler_rl.bin"))
    assert np.array_equal(before, after)


@pytest.mark.parametrize("name, flags", [
    ("instruction", ()), ("question", ("--field", "instruction=question"))])
def test_questions_without_answers(name, flags, base, tmp_path, monkeypatch, capsys):
    """A reward that does not read `output` needs none, also if some questions have it; exact
    does."""
    monkeypatch.chdir(copy_of(base, tmp_path))
    asked = [{name: e["instruction"]} for e in ADD]
    (tmp_path / "asked.json").write_text(json.dumps([{**asked[0], "output": "3"}, *asked[1:]]),
                                         encoding="utf-8")
    run(*RUN, "--data", "asked.json", "--steps", 2, *flags)
    refused(capsys, *RUN, "--data", "asked.json", "--reward", "exact", "--force", *flags,
            words=["output is missing"])


def test_an_output_that_is_empty(base, tmp_path, monkeypatch, capsys):
    """Every answer contains an empty text, so the reward would have no meaning."""
    monkeypatch.chdir(copy_of(base, tmp_path))
    (tmp_path / "asked.json").write_text(json.dumps([{**ADD[0], "output": " "}]), encoding="utf-8")
    for name in sorted(rewards.BUILT_IN):
        read = functools.partial(rewards.read_for, name, "asked.json", (), ())
        if name == "length":
            assert len(read().examples) == 1
        else:
            with pytest.raises(ne.UserError, match="asked.json, .*output is empty, expected the"):
                read()
    refused(capsys, *RUN, "--data", "asked.json", "--reward", "contains", "--force",
            words=["output is empty"])


@pytest.mark.parametrize("content", ["[]", '[{"topic": "sums"}]', "[3]"])
def test_messages_name_the_fields_of_questions(content, base, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(copy_of(base, tmp_path))
    (tmp_path / "asked.json").write_text(content, encoding="utf-8")
    refused(capsys, *RUN, "--data", "asked.json",
            words=["(instruction, input, output)", "where output may be missing"])


def test_questions_that_are_too_long(base, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(copy_of(base, tmp_path))
    long = [{**ADD[0], "input": "x" * 900}]
    (tmp_path / "long.json").write_text(json.dumps([*long, *ADD]), encoding="utf-8")
    said = told(*RUN, "--data", "long.json", "--steps", 2)
    assert re.search(r"left out +1 question longer than \d+ tokens", said)
    (tmp_path / "long.json").write_text(json.dumps(long), encoding="utf-8")
    refused(capsys, *RUN, "--data", "long.json", "--force",
            words=["none of 1 question", "--tokens"])


def test_steps_and_answers_are_rounded_to_whole_batches(base, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(copy_of(base, tmp_path))
    run(*RUN, "--steps", 3, "--batch", 4, "--group", 8)
    assert "note: --batch 4 becomes 8, because" in capsys.readouterr().err
    assert ne.read_checkpoint("nanoeuler_rl.bin").state.step == 4


def test_a_run_with_lora(base, tmp_path, monkeypatch):
    monkeypatch.chdir(copy_of(base, tmp_path))
    run(*RUN, "--lora", 4, "--out", "adapter", "--steps", 4)
    whole = [r for r in read_log("adapter/run.jsonl") if "reward" in r]
    assert whole[0]["kl"] == 0 and whole[-1]["kl"] > 0
    run("rl", "--resume", "--out", "adapter", "--steps", 6)
    assert len([r for r in read_log("adapter/run.jsonl") if "reward" in r]) == 6


def test_a_run_with_lora_resumes_with_the_same_bits(base, tmp_path, monkeypatch):
    """Its reference is the model without its adapter, also after the adapter has learned."""
    monkeypatch.chdir(copy_of(base, tmp_path))
    start = *RUN, "--lora", 4, "--lr", 0.02
    run(*start, "--out", "whole")
    stopped = signalled(signal.SIGINT, 5, *start, "--out", "parts", "--threads", 1, cwd=tmp_path,
                        after="record")
    assert stopped.returncode == 0 and "stopped at step 6 of 8" in stopped.stdout, stopped
    run("rl", "--resume", "--out", "parts")
    whole, parts = (read_run(f"{name}/run.bin") for name in ("whole", "parts"))
    assert whole.flat.tobytes() == parts.flat.tobytes()
    kl = [[r["kl"] for r in read_log(f"{name}/run.jsonl") if "kl" in r]
          for name in ("whole", "parts")]
    assert kl[0] == kl[1] and kl[0][-1] > 1e-3


def test_the_bundled_model_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "add.json").write_text(json.dumps(ADD), encoding="utf-8")
    said = told("rl", "bundled", *RUN[2:], "--steps", 2, "--group", 2, "--batch", 2)
    assert "starts from      bundled" in said and "nanoeuler_rl.bin is complete" in said


@pytest.mark.parametrize("found", [[1.0], [1.0, "x"], [1.0, math.nan], [1, 2, 3]])
def test_a_checkpoint_with_other_rewards_is_rejected(found):
    with pytest.raises(ne.UserError, match="rewards: expected none or two numbers"):
        ne.State(rewards=found).check()
    ne.State(rewards=[-1.0, 2.5]).check()


def test_keep_best_needs_held_out_questions(base, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(copy_of(base, tmp_path))
    refused(capsys, *RUN, "--keep-best", "--holdout", 0,
            words=["--keep-best: expected held-out questions", "--holdout 0.2"])


def test_a_file_of_few_questions_holds_none_out(base, tmp_path, monkeypatch):
    """Then the training questions show the reward.  With --holdout, at least one is held out."""
    monkeypatch.chdir(copy_of(base, tmp_path))
    (tmp_path / "few.json").write_text(json.dumps(ADD[:9]), encoding="utf-8")
    said = told(*RUN, "--data", "few.json", "--steps", 2)
    assert "9 for training, none held out" in said and "on 9 training questions" in said
    said = told(*RUN, "--data", "few.json", "--steps", 2, "--holdout", 0.01, "--force")
    assert "8 for training, 1 held out" in said


@pytest.mark.parametrize("n, about", [(29, 0), (60, 12), (150, 30), (400, 30), (3000, 150)])
def test_enough_questions_are_held_out(n, about):
    """About 30, a fifth of few questions, and 5% of many"""
    asked = [Question(dict(instruction=f"Add {i} and 1.", input=""), []) for i in range(n)]
    found = SimpleNamespace(options=RlOptions(), state=ne.State(), questions=asked)
    found.set_option = lambda name, value: setattr(found.options, name, value)
    learned, tested = RlRun.split(found)
    if not about:
        assert tested is learned and not found.holds_out
    else:
        assert abs(len(tested) - about) < 3 * math.sqrt(about) and len(learned) + len(tested) == n


def test_minutes_set_the_length(base, tmp_path, monkeypatch):
    monkeypatch.chdir(copy_of(base, tmp_path))
    run(*RUN[:5], "length", "--minutes", 0.05, *RUN[8:])
    s = ne.read_checkpoint("nanoeuler_rl.bin").state
    assert s.n_steps == s.step > 2 and s.step % 2 == 0


def test_what_rl_rejects(base, tuned, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(copy_of(base, tmp_path))
    (tmp_path / "rl.bin").write_bytes((tuned / "nanoeuler_rl.bin").read_bytes())
    for flag, value in (("group", 1), ("tokens", 0), ("kl", -1), ("temperature", 0), ("updates", 0),
                        ("clip-ratio", 0), ("batch", 0)):
        refused(capsys, *RUN, f"--{flag}", value, words=[f"--{flag}: expected"])
    refused(capsys, "sft", "--resume", "--out", "rl.bin", words=["not made by sft"])
    refused(capsys, "rl", "--resume", "--out", "rl.bin", "--kl", 0.2, words=["kl", "0.1"])


OWN = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant] "


@pytest.mark.parametrize("template, asked", [
    ("", "### Instruction:\nAdd 3 and 4.\n"), (OWN, "[user] Add 3 and 4.\n[assistant] ")])
def test_a_chat_model_keeps_its_template(template, asked, base, tmp_path, monkeypatch, capsys):
    """Also that of an imported model, in which `sft` does not train"""
    needs("jinja2")
    monkeypatch.chdir(copy_of(base, tmp_path))
    c = ne.read_checkpoint("nanoeuler.bin", moments=False)
    ne.write_checkpoint("chat.bin", c.cfg, c.tokenizer,
                        ne.State(kind="chat", template=template, eos=c.state.eos), c.flat)
    seen, sample = [], RlRun.answers_to

    def answers_to(self, prompts, *args):
        seen.extend(self.tokenizer.decode(ids).decode() for ids in prompts)
        return sample(self, prompts, *args)

    monkeypatch.setattr(RlRun, "answers_to", answers_to)
    (tmp_path / "one.json").write_text(json.dumps([{**ADD[0], "instruction": "Add 3 and 4."}]))
    run("rl", "chat.bin", *RUN[2:], "--data", "one.json", "--steps", 2)
    assert {asked in text for text in seen} == {True}
    assert ne.read_checkpoint("nanoeuler_rl.bin").state.template == template
    assert "is a base model" not in capsys.readouterr().err
