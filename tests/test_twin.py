"""The PyTorch twin: the same gradients and updates in float64, its greedy decoder, whole stages."""
import json
import os
import re
import signal
import subprocess

import numpy as np
import pytest
from examples import ADD, LITTLE, PAIRS, copy_of
from helpers import ROOT, TINY, before_each_step, needs, random_flat
from numba import set_num_threads

torch = needs("torch")

import twin
import twin_report
from oracles.torch_engine import Twin, replies

import nanoeuler as ne
from nanoeuler_parts.files.logs import read_log
from nanoeuler_parts.runs.run import Run
from nanoeuler_parts.tuning.examples import held_out, read_examples
from nanoeuler_parts.tuning.sft import SftOptions

pytestmark = pytest.mark.interop
HYPER = dict(lr=0.02, beta1=0.9, beta2=0.95, weight_decay=0.1)


@pytest.mark.parametrize("clip, rel", [(1e9, 1e-11), (1.0, 1e-6)])       # torch adds 1e-6 to |g|
def test_the_twin_takes_the_same_steps_in_float64(clip, rel):
    """Losses, norms, weights and moments of 20 steps; each sequence and head has its own weight.
    In some steps the last head has none."""
    ours, theirs = (engine(TINY, random_flat(TINY, 4)) for engine in (ne.Model, Twin))
    rng, (B, T, P) = np.random.default_rng(1), (3, TINY.seq_len, TINY.n_mtp)
    for t in range(1, 21):
        tokens = rng.integers(0, TINY.vocab_size, (B, T), dtype=np.int32)
        targets = rng.integers(-1, TINY.vocab_size, (P, B, T), dtype=np.int32)
        for b in (slice(0, 2), slice(2, 3)):             # two micro-batches
            weight = rng.normal(size=(B, P))[b] if t % 2 else rng.random(P)
            if t % 3 == 1:
                weight[..., -1] = 0
            for model in (ours, theirs):
                model.gradient(tokens[b], targets[:, b], weight)
        hyper = ne.hyper_at(t, **HYPER, clip=clip)
        (ce, norm), (twin_ce, twin_norm) = ours.update(hyper), theirs.update(hyper)
        heads = slice(0, P - (t % 3 == 1))   # ours does not compute the others
        assert twin_ce[heads] == pytest.approx(ce[heads], rel=rel)
        assert twin_norm == pytest.approx(norm, rel=rel)
        assert theirs.losses(tokens, targets[0]) == pytest.approx(
            ours.losses(tokens, targets[0]), rel=rel)
    for mine, other in zip(ours.buffers(), theirs.buffers()):
        assert np.allclose(mine, other, rtol=0, atol=rel * np.abs(mine).max())


@pytest.mark.parametrize("t", [2, 5000])
def test_a_resumed_twin_takes_the_next_step(t):
    """From the weights and moments of step t - 1, as ours does; late, 1 - beta2^t is 1."""
    rng, n = np.random.default_rng(1), ne.n_params(TINY)
    moments = [0.1 * rng.normal(size=n), rng.random(n)]
    models = [engine(TINY, random_flat(TINY, 4), tuple(x.copy() for x in moments))
              for engine in (ne.Model, Twin)]
    for step in (t, t + 1):
        tokens = rng.integers(0, TINY.vocab_size, (2, TINY.seq_len), dtype=np.int32)
        for model in models:
            model.gradient(tokens, np.stack([tokens, tokens]), np.ones(2))
            model.update(ne.hyper_at(step, **HYPER, clip=1e9))
    for mine, other in zip(*(model.buffers() for model in models)):
        assert np.allclose(mine, other, rtol=0, atol=1e-11)


def test_a_resumed_twin_that_is_stopped_at_once_keeps_its_moments():
    rng, n = np.random.default_rng(1), ne.n_params(TINY)
    flat, moments = random_flat(TINY, 4), (0.1 * rng.normal(size=n), rng.random(n))
    saved = Twin(TINY, flat.copy(), moments).buffers()
    assert len(saved) == 3
    assert all(np.array_equal(a, b) for a, b in zip(saved, (flat, *moments)))


def test_the_twin_stops_before_a_bad_update():
    model = Twin(TINY, random_flat(TINY, 4))
    before = model.buffers()[0]
    model.gradient(np.zeros((1, 8), np.int32), np.ones((2, 1, 8), np.int32), np.array([1, np.inf]))
    _, norm = model.update(ne.hyper_at(1, **HYPER, clip=1))
    assert not np.isfinite(norm) and np.array_equal(model.buffers()[0], before)
    assert "gradient" in model.first_bad_tensor() and "not finite" in model.first_bad_tensor()


def test_all_replies_at_once_are_those_one_at_a_time():
    cfg = ne.replace(TINY, seq_len=24)
    flat, rng = random_flat(cfg, 6), np.random.default_rng(2)
    prompts = [rng.integers(0, cfg.vocab_size, n) for n in (1, 5, 2, 9, 23, 5, 24)]
    net = Twin(cfg, flat).net
    free = replies(net, prompts, cfg.vocab_size)                # no token ends it
    assert [len(r) for r in free] == [25 - len(p) for p in prompts]
    for stop in (cfg.vocab_size, free[0][6]):
        for prompt, reply in zip(prompts, replies(net, prompts, stop)):
            alone = list(ne.generate(ne.Decoder(cfg, flat), prompt, 25 - len(prompt), None,
                                     ne.Sampling(temperature=0.0), stop))
            assert [i for i in reply if i != stop] == alone
            assert (reply[-1] == stop) == (len(alone) < 25 - len(prompt))


@pytest.fixture
def bench(base, monkeypatch, capsys):
    """bench(*args): twin.py as it is started in the folder of the base, here on one thread and with
    all sides in this process: each child would import PyTorch again, for 5 seconds."""
    def main(*args):
        twin.main([str(x) for x in args])
        return capsys.readouterr().out

    monkeypatch.chdir(base)
    monkeypatch.setattr(twin, "start_side", lambda side, argv: twin.main([*argv, "--half", side]))
    monkeypatch.setattr(twin, "use_threads", lambda n: set_num_threads(1))   # a side wants all
    return main


@pytest.fixture(scope="module")
def base(base, tmp_path_factory):
    """In place of that of other modules: with examples and pairs that count as skill."""
    folder = copy_of(base, tmp_path_factory.mktemp("twin"))
    for name, rows in ("add", ADD), ("pairs", PAIRS):
        (folder / f"{name}.json").write_text(json.dumps([{**e, "source": "skill"} for e in rows]),
                                             encoding="utf-8")
    return folder


def result_of(folder, name):
    r = json.loads((folder / f"{name}.json").read_text("utf-8"))
    assert list(r["curves"])[0] == "ours" and len(r["curves"]["ours"]) == r["steps"]
    assert f"{r['steps']} steps" in (folder / f"{name}.md").read_text("utf-8")
    return r, r["sides"]["twin"]


def test_a_side_is_a_process_of_its_own(monkeypatch):
    started = []
    monkeypatch.setattr(subprocess, "run", lambda command: started.append(command) or
                        subprocess.CompletedProcess(command, 3))
    with pytest.raises(SystemExit) as stopped:
        twin.start_side("control", ["--stage", "sft"])
    assert stopped.value.code == 3
    assert started[0][1:] == [twin.__file__, "--stage", "sft", "--half", "control"]


@pytest.mark.slow
def test_a_whole_sft_with_control(base, bench):
    out = bench("--stage", "sft", "--base", "nanoeuler.bin", "--data", "add.json", "--steps",
                6, "--batch", 320, "--sides", "ours", "twin", "control", "lockstep", "--out",
                "out_sft")
    r, v = result_of(base, "out_sft")
    assert list(r["sides"]) == ["ours", "twin", "control", "lockstep"] and r["steps"] == 6
    apart = r["sides"]["lockstep"]
    assert apart["same"] and apart["checked"] == 1
    largest = {k: x["largest"] for k, x in apart["apart"].items()}
    assert set(largest) == {"loss", "norm", "update"}
    assert max(largest["loss"], largest["norm"]) < 1e-4
    assert largest["update"] < 1e-3          # it divides by sqrt(v): where g is near zero, rounding
    assert v["largest"] < 1e-4 and r["sides"]["control"]["largest"] < 1e-4
    asked = sum(map(held_out, ADD))
    assert v["held_out"]["exact, skill, add.json"][1] == asked
    assert v["same_replies"]["add.json"] == [asked, asked]
    assert v["held_out"]["our own decoder replies the same, add.json"] == [asked, asked]
    assert out.count("- held: ") == 3 and "missed" not in out


@pytest.mark.slow
def test_a_whole_dpo_by_halves(base, bench):
    args = ("--stage", "dpo", "--base", "nanoeuler.bin", "--data", "pairs.json", "--steps", 4,
            "--batch", 640, "--test", "add.json", "--unseen", 12, "--out", "out_dpo")
    for side in ("ours", "twin"):
        bench(*args, "--half", side)
    bench("--stage", "dpo", "--compare", "--out", "out_dpo")
    r, v = result_of(base, "out_dpo")
    ours = r["sides"]["ours"]["held_out"]
    assert v["largest"] < 1e-5 and v["held_out"]["prefers"] == ours["prefers"]
    assert v["held_out"]["val_kl"] == pytest.approx(ours["val_kl"], abs=1e-5)
    assert {"exact, skill, add.json", "exact, skill, pairs.json", "exact, skill, unseen",
            "prefers, skill, before", "gap, unseen"} < set(ours)
    assert ours["prefers"] == ours["prefers, skill"]     # all of them are marked as skill
    assert v["held_out"]["gap, unseen"] == pytest.approx(ours["gap, unseen"], abs=1e-3)

    (base / "other").mkdir()                 # a run that knew no answer, of both sides
    for side in ("ours", "twin"):
        log = (base / f"twin_dpo/{side}.jsonl").read_text("utf-8")
        changed = log.replace('"reply": "', '"reply": "no ')
        (base / f"other/{side}.jsonl").write_text(changed, "utf-8")
    out = bench("--stage", "dpo", "--compare", "--folder", "twin_dpo", "other", "--out",
                "out_both")
    r, _ = result_of(base, "out_both")
    (k, n), (a, b) = ours["exact, skill, unseen"], r["runs"]["exact, skill, unseen"]
    assert a[0] == 100 * k / n and b == [0, 0] and "2 runs of each side" in out
    assert r["runs"]["prefers"][0] == r["runs"]["prefers"][1]
    assert "exact, skill, unseen, mean of 2 runs: within 3 points" in out

    for side in ("ours", "twin"):
        log = read_log(base / f"twin_dpo/{side}.jsonl")   # now none of a file is of skill
        for record in log[-1]["end"]["answers"]["add.json"]:
            record["skill"] = False
        write_log(base / f"other/{side}.jsonl", log)
    assert twin_report.repeated([base / "other"])["exact, skill, add.json"] == [(0, 0)]
    with pytest.raises(SystemExit, match="other and twin_dpo were not asked the same"):
        bench("--stage", "dpo", "--compare", "--folder", "twin_dpo", "other")

    del log[-1]["end"]["answers"]["add.json"]            # another --test
    log[-1]["end"]["pairs"]["unseen"].pop()              # another --unseen
    write_log(base / "other/twin.jsonl", log)
    with pytest.raises(SystemExit, match=r"other: twin and ours were not asked the same of "
                       r"add.json \(answers\), unseen \(pairs\); run --half twin"):
        bench("--stage", "dpo", "--compare", "--folder", "other")
    os.remove(base / "other/twin.jsonl")
    with pytest.raises(SystemExit, match="other has no twin.jsonl"):
        bench("--stage", "dpo", "--compare", "--folder", "twin_dpo", "other")


def write_log(path, log):
    path.write_text("".join(json.dumps(record) + "\n" for record in log), encoding="utf-8")


def test_too_many_questions_are_an_error_before_any_training(base, bench):
    with pytest.raises(SystemExit, match="at most 748"):
        bench("--stage", "sft", "--base", "none.bin", "--unseen", 749, "--half", "ours")


def test_more_questions_of_skill_are_held_out_and_right():
    shipped, _ = read_examples(ROOT / SftOptions.data, "output")
    seen, made = {(e["instruction"], e["input"]) for e in shipped}, twin.unseen(60)
    assert made == twin.unseen(60) and all(map(held_out, made))
    assert not seen & {(e["instruction"], e["input"]) for e in made}
    assert len({(e["instruction"], e["input"]) for e in made}) == 60
    form = lambda e: re.sub(r"\d+|\".*?\"", "", e["instruction"])
    forms = {form(e) for e in shipped if e["source"] == "skill"}
    for e in made:                           # each answer worked out again
        text, words = e["instruction"], e["input"].split(", ")
        number, quoted = [int(x) for x in re.findall(r"\d+", text)], re.findall('"(.*)"', text)
        key = (f"{number[0]} plus {number[1]} is {sum(number)}." if number else
               quoted[0].upper() if "capital" in text else
               f'The first letter of "{quoted[0]}" is "{quoted[0][0]}".' if quoted else
               ", ".join(sorted(words)) if "Sort" in text else
               ", ".join(reversed(words)) if "Reverse" in text else
               f"There are {len(words)} words in the list.")
        assert e["output"] == e["chosen"] == key != e["rejected"]
        assert form(e) in forms


def test_the_twin_follows_a_schedule_planned_by_minutes(base, bench, text, monkeypatch):
    monkeypatch.setitem(ne.PRESETS, "small", LITTLE)
    monkeypatch.setattr(Run, "elapsed", lambda run: 0.1 * run.state.step)
    bench("--stage", "pretrain", "--preset", "small", "--data", text, "--minutes", 0.05,
          "--seq-len", 16, "--vocab-size", 280, "--batch", 64, "--out", "out_pretrain")
    r, v = result_of(base, "out_pretrain")
    log, half = base / "twin_pretrain/twin.jsonl", ("--stage", "pretrain", "--half", "twin")
    os.remove(log)
    with monkeypatch.context() as patch:     # Ctrl-C in its third step
        before_each_step(patch, lambda run: (
            run.state.step == 2 and signal.raise_signal(signal.SIGINT)))
        bench(*half, "--preset", "small", "--data", text, "--seq-len", 16, "--vocab-size", 280,
              "--batch", 64)
    assert read_log(log)[-1]["step"] == 3
    bench(*half, "--resume")
    bench("--stage", "pretrain", "--compare", "--out", "out_resumed")
    assert result_of(base, "out_resumed")[0]["curves"] == r["curves"]
    logs = [read_log(base / f"twin_pretrain/{side}.jsonl") for side in ("ours", "twin")]
    lrs = [[x["lr"] for x in log if "lr" in x and "loss" in x] for log in logs]
    assert lrs[0] == lrs[1] and len(lrs[0]) == r["steps"] > 5
    assert v["first_50"] < 1e-3              # further on, rounding grows with the steps it had
