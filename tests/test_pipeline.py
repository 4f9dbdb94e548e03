"""The whole life in one command, at a size of seconds."""
import json
import os
import signal
import subprocess
import sys
import types

import pytest
from children import until
from helpers import FAST, ROOT, TEXT, run

import bpe
import nanoeuler as ne
from nanoeuler_parts.tuning.examples import prompt_of

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("one_thread")]
CODE = """
import sys; sys.path[:0] = [{bench!r}]
import numba; numba.set_num_threads(1)
import pipeline
pipeline.STAGES = [stage._replace(flags=own) for stage, own in zip(pipeline.STAGES, {flags})]
sys.argv[1:] = {args}
pipeline.main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    asked = [dict(instruction=f"Add {a}.", input="", output="1", source="skill") for a in range(99)]
    pairs = [dict(instruction=e["instruction"], input="", chosen="1", rejected="2") for e in asked]
    for name, what in (("ask", asked), ("pairs", pairs), ("others", pairs[:98])):
        (folder / f"{name}.json").write_text(json.dumps(what), "utf-8")
    (folder / "text.txt").write_bytes(TEXT.read_bytes()[:40_000])
    return folder


def flags(steps):
    """The flags of each stage."""
    one = ["--threads", "1", "--batch", "320", "--steps", "2"]
    return [["--data", "text.txt", *FAST, "--steps", steps], ["--seq-len", "160", *one], one]


FILES = ["--instructions", "ask.json", "--pairs", "pairs.json"]


def start(folder, *args, steps="3"):
    code = CODE.format(bench=str(ROOT / "bench"), flags=flags(steps), args=[*FILES, *args])
    return subprocess.Popen([sys.executable, "-c", code], cwd=folder, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, start_new_session=True)


def finish(process):
    out, _ = process.communicate(timeout=240)
    assert "Traceback" not in out, out
    return process.returncode, out


@pytest.fixture
def inside(folder, monkeypatch, capsys):
    """inside(*args): (exit code, what is printed); the verbs run in this process, too."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.chdir(folder)
    import pipeline
    stages, before = pipeline.STAGES, signal.getsignal(signal.SIGTERM)

    def in_this_process(command):
        assert command[:2] == [sys.executable, str(ROOT / "nanoeuler.py")]
        run(*command[2:])
        return types.SimpleNamespace(returncode=0, wait=lambda seconds: 0)

    def main(*args, steps="3"):
        monkeypatch.setattr(pipeline, "STAGES", [
            stage._replace(flags=own) for stage, own in zip(stages, flags(steps))])
        monkeypatch.setattr(sys, "argv", ["pipeline.py", *FILES, *args])
        capsys.readouterr()
        try:
            pipeline.main()
            code = 0
        except SystemExit as e:
            code = e.code
        assert signal.getsignal(signal.SIGTERM) == before    # kill ends what follows a stage
        return code, capsys.readouterr().out + str(code)

    monkeypatch.setattr(pipeline, "subprocess", types.SimpleNamespace(
        Popen=in_this_process, TimeoutExpired=subprocess.TimeoutExpired))
    yield main
    signal.signal(signal.SIGTERM, before)    # of the tests that follow, whatever happened


def times(folder):
    return {p.name: p.stat().st_mtime_ns for p in folder.glob("pipeline*.bin")}


@pytest.mark.slow
def test_the_pipeline_runs_once_and_begins_anew_where_its_origin_is_gone(folder, inside):
    code, out = finish(start(folder, "--unseen", "12"))
    assert code == 0, out
    report = (folder / "pipeline.md").read_text("utf-8")
    assert all(f"| {stage} |" in report for stage in ("pretrained", "fine-tuned", "preferences"))
    [head, *rows] = [line for line in report.splitlines() if line.count("|") == 10 and "of" in line
                     or "| count |" in line]
    assert len(rows) == 3 and all(row.count(" of 2 |") == 6 for row in rows)     # two of each kind
    # as it was started, whatever the table of the stages says later
    assert all(f in report for f in ("train --steps 3 ", "--batch 64 ", "--data pairs.json"))
    assert [line.partition("--seq-len")[2].split() for line in report.splitlines()
            if "    nanoeuler.py" in line] == [["16", "--vocab-size", "280"], ["160"], []]
    made = times(folder)
    code, out = inside(steps="4")
    assert "train --steps 3 " in (folder / "pipeline.md").read_text("utf-8")
    assert "| count |" not in (folder / "pipeline.md").read_text("utf-8")
    assert code == 0 and times(folder) == made and len(made) == 3
    code, out = inside("--pairs", "others.json")
    assert code and "pairs.json" in out and "--force" in out and times(folder) == made
    (folder / "pipeline.bin").unlink()
    code, out = inside()
    assert code == 0 and all(times(folder)[name] > made[name] for name in made)


def test_a_reply_is_right_however_it_is_spelled(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import pipeline
    tokenizer = bpe.train(b"association " * 50, 280)
    one_by_one = [int(tokenizer.encode(bytes([b]))[0]) for b in b"association"]

    def generate_many(slots, replies):
        for i, reply in enumerate(replies):
            reply.tokens = one_by_one[:reply.sampling.tokens]
            yield i, reply

    monkeypatch.setattr(ne, "generate_many", generate_many)
    asked = dict(instruction="Which?", input="", output="association")
    assert len(tokenizer.encode("association")) < len(one_by_one)
    decoder = types.SimpleNamespace(rows_are_cheap=True, with_slots=lambda n: None)
    assert pipeline.exact(decoder, tokenizer, [
        asked, {**asked, "output": "associations"}]) == [True, False]


def test_no_answer_depends_on_the_questions_beside_it(monkeypatch):
    """More at once than there are slots, and each as it is by itself"""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import pipeline
    cfg, tokenizer = ne.replace(ne.PRESETS["small"], vocab_size=257), bpe.train(b"a b", 257)
    decoder = ne.Decoder(cfg, 20 * ne.init_params(cfg, 1))
    asked = [dict(instruction=f"Add {i}.", input="", output="1") for i in range(3)]
    monkeypatch.setattr(pipeline, "AT_ONCE", 2)
    longest, end = [20, 5, 12], tokenizer.specials["</s>"]
    answers = pipeline.answers(decoder, tokenizer, asked, longest)
    assert len(set(answers)) > 1             # a model that listens to its prompt
    for e, n, said in zip(asked, longest, answers):
        alone = ne.generate(ne.Decoder(cfg, 20 * ne.init_params(cfg, 1)),
                            tokenizer.encode(prompt_of(e)), n, None,
                            ne.Sampling(temperature=0.0), end)
        assert tokenizer.decode(list(alone)).decode("utf-8", "replace") == said


def test_questions_that_run_out_are_an_error_before_any_training(inside):
    """Of "capitals" there are 124, the fifth of six kinds: 124 * 6 + 4 questions."""
    code, out = inside("--unseen", "749")
    assert "--unseen 749" in out and "capitals" in out and "at most 748" in out, out
    assert code and "step" not in out


def test_a_stage_that_is_interrupted_saves(folder):
    (folder / "pipeline.bin").unlink(missing_ok=True)
    process, log = start(folder, steps="100000"), folder / "pipeline.jsonl"
    log.unlink(missing_ok=True)
    until(lambda: process.poll() is not None or
          log.exists() and log.read_text("utf-8").count("\n") > 3)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)    # as a terminal does
    code, out = finish(process)
    assert code and "the same command goes on" in out and (folder / "pipeline.bin").exists(), out


def test_what_cannot_work_is_said_before_any_training(inside, tmp_path):
    for name, text, word in (("none.json", None, "none.json"), ("few.json", "[]", "few.json")):
        if text:
            (tmp_path / name).write_text(text, "utf-8")
        code, out = inside("--pairs", str(tmp_path / name))
        assert code and word in out and "step" not in out, out
