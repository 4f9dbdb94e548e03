"""The recipe of the model in the box, end to end at a size of seconds; and its card."""
import json
import lzma
import os
import signal
import re
import subprocess
import sys

import pytest
from helpers import ROOT, TEXT, after_each_step, run, told
from servers import until

import nanoeuler as ne
from nanoeuler_parts.checkpoint.file import sha256_of
from nanoeuler_parts.cli import parse, VERBS
from nanoeuler_parts.tools import on_gpu

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("one_thread")]
SMALL = ("--n-layer 1 --n-embd 32 --n-head 2 --n-kv-head 1 --head-dim 16 --n-hidden 48 --seq-len 96"
         " --vocab-size 300 --batch 192 --minutes 1 --steps 4 --cuts 0 --warmup 1 --holdout 0.1")
FEW = "--batch 512 --steps 2"


@pytest.fixture
def recipe(monkeypatch, tmp_path):
    """recipe(*args): the exit code of a stage whose verbs run in this process; in a new folder,
    with a short text, thirty instructions and pairs, and few questions."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import make_model
    import pipeline
    monkeypatch.setattr(make_model, "EVERYDAY_COUNT", 300)
    commands = []

    def in_this_process(command, seconds):
        assert command[:2] == [sys.executable, str(ROOT / "nanoeuler.py")]
        commands.append(command[2:])
        run(*command[2:])
        return 0

    monkeypatch.setattr(pipeline, "run_child", in_this_process)
    with lzma.open(tmp_path / "text.txt.xz", "wb") as f:
        f.write(TEXT.read_bytes()[:40_000])
    asked = [dict(instruction=f"Add {a} and 2.", input="", output=str(a + 2), source="sums")
             for a in range(150)]
    pairs = [{"instruction": e["instruction"], "chosen": e["output"], "rejected": "none"}
             for e in asked]
    for name, what in (("ask", asked), ("pairs", pairs)):
        (tmp_path / f"{name}.json").write_text(json.dumps(what), "utf-8")
    given = ["--folder", tmp_path / "made", "--text", tmp_path / "text.txt.xz",
             "--instructions", tmp_path / "ask.json", "--pairs", tmp_path / "pairs.json",
             "--made", 60, "--unseen", 12, "--commit", "abc1234",
             "--pretrain", SMALL, "--sft", f"{FEW} --cuts 0", "--dpo", FEW]

    def start(*args):
        try:
            make_model.main([*map(str, (*args, *given))])
        except SystemExit as e:
            return e.code
        return 0

    start.commands, start.folder, start.module = commands, tmp_path / "made", make_model
    return start


@pytest.mark.slow
def test_from_texts_to_a_model_and_its_card(recipe, capsys):
    assert recipe("all") == 0
    folder, card = recipe.folder, (recipe.folder / "MODEL.md").read_text("utf-8")
    c = ne.read_checkpoint(str(folder / "model.bin"))
    assert c.matrices == "int8" and c.state.kind == "chat" and c.cfg.n_mtp == 1
    assert (c.cfg.n_embd, c.cfg.n_layer, c.state.eos) == (32, 1, "<|im_end|>")
    assert "int8" in told("info", folder / "model.bin")
    told("generate", "hi", folder / "model.bin", "--tokens", 3)
    digest = sha256_of(folder / "model.bin")
    for word in (digest, "commit abc1234", "seed 1", f"{ne.n_params(c.cfg):,} parameters",
                 f"{os.path.getsize(folder / 'model.bin'):,} bytes", "MIT", "limits",
                 "| pretrain | 4 |", "| sft | 2 |", "| dpo | 2 |", "together, of 12 |",
                 "`text.txt` | 40,000 |", "`everyday.jsonl`", "`pairs.json`",
                 "make_model.py all --text text.txt --instructions ask.json --pairs pairs.json"):
        assert word in card, word
    # all everyday prompts, with an answer to each turn
    prompts = recipe.module.lines_of(recipe.module.PROMPTS)
    found = json.loads((folder / "evaluation.json").read_text("utf-8"))
    assert len(prompts) == 40 == len(found["everyday"]) and "40 conversations" in card
    for p, x in zip(prompts, found["everyday"]):
        assert p["turns"] == x["turns"] and len(x["answers"]) == len(p["turns"])
        assert f"{p['id']}. *{p['kind']}*" in card
    # int8 costs little, and both were measured on the same
    for what in "answers", "text":
        assert found["int8"][what] == pytest.approx(found["float32"][what], rel=0.01)
        assert found["int8"][what] != found["float32"][what]
    assert found["int8"]["skill"].keys() == found["float32"]["skill"].keys()
    assert found["float32"]["prefers"][1] == found["int8"]["prefers"][1] > 0
    # what was learned: questions of skill are a quarter of the tokens at most
    assert 0 < found["mixture"]["skill_share_of_tokens"] <= 0.25
    learned = recipe.module.lines_of(folder / "examples.json")
    assert len(learned) == found["mixture"]["examples"]
    asked = {(e["instruction"], e["input"]) for e in learned if "instruction" in e}
    import pipeline
    assert not asked & {(e["instruction"], e["input"]) for e in pipeline.unseen(12)}
    # it is not made twice, and the same again is the same
    before = {p.name: p.stat().st_mtime_ns for p in folder.glob("*.bin")}
    recipe.commands.clear()
    assert recipe("dpo") == 0 and not recipe.commands
    assert {p.name: p.stat().st_mtime_ns for p in folder.glob("*.bin")} == before
    (folder / "dpo.bin").unlink()
    assert recipe("dpo") == 0 and recipe("quantize") == 0
    assert sha256_of(folder / "model.bin") == digest
    (folder / "model.bin").write_bytes(b"another")
    assert "is of another model.bin" in recipe("card")


def test_a_stage_goes_on_where_its_time_was_up(recipe, monkeypatch, capsys):
    """Ctrl-C, as the clock sends it, after two of four steps."""
    after_each_step(monkeypatch, lambda run: (
        run.state.step == 2 and os.kill(os.getpid(), signal.SIGINT)))
    assert recipe("pretrain", "--limit", 0) == 3
    assert "the same command goes on" in capsys.readouterr().out
    base = recipe.folder / "base.bin"
    assert ne.read_checkpoint(str(base)).state.step == 2
    assert "base.bin is not complete; run pretrain first" in recipe("sft")
    assert recipe("pretrain", "--limit", 9) == 0
    assert ne.read_checkpoint(str(base)).state.step == 4
    assert "--resume" not in recipe.commands[0] and "--resume" in recipe.commands[1]
    recipe.commands.clear()
    assert recipe("pretrain") == 0 and not recipe.commands


def test_the_data_are_those_of_the_repository_by_default(monkeypatch, tmp_path):
    """All of them are there, but the text that make data-books builds."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import make_model
    args = make_model.parse(["all", "--folder", str(tmp_path)])
    assert args.text == str(ROOT / "data/books.txt") and not args.everyday
    for path in (args.instructions, args.pairs, make_model.EVERYDAY):
        assert os.path.exists(path)
    assert {os.path.basename(x) for x in (args.text, args.instructions, args.pairs)} < (
        make_model.OURS)
    monkeypatch.setattr(make_model, "TEXT", tmp_path / "books.txt")
    with pytest.raises(SystemExit, match="books.txt: No such file; build it with make data-books"):
        make_model.main(["pretrain", "--folder", str(tmp_path / "made")])
    with pytest.raises(SystemExit, match="mine.txt: No such file; name another --text"):
        make_model.main(["pretrain", "--folder", str(tmp_path / "made"), "--text", "mine.txt"])


def test_a_card_says_whether_the_model_can_be_rebuilt(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import make_model
    names = "books.txt", "everyday.jsonl", "instruct_open.json.xz", "prefs_open.jsonl.xz"
    figures = {"answers": 0.5, "text": 2.0, "prefers": [1, 2], "skill": {"sort": 3}}

    refused = {"refused": 41, "of": 50, "answerable_refused": 2, "answerable": 50}

    def card(*names, device="NVIDIA H200", wrong=(), same_at=None, options=None):
        data = [{"file": name, "bytes": 5, "sha256": "0" * 64, "what": "?"}
                for name in (*names, "examples.json")]
        config = ne.asdict(ne.PRESETS["small"])
        history = [{"stage": stage, "steps": 1, "tokens": 1, "seconds": 150, "bits_per_byte": 1.0,
                    "options": options or {}} for stage in ("pretrain", "sft")]
        return make_model.card_text({
            "commit": "abc1234", "seed": 1, "kind": "chat", "device": device, "history": history,
            "config": config, "parameters": 5, "sha256": "0" * 64, "bytes": 5, "data": data,
            "mixture": {"examples": 1, "of_skill": 1, "skill_share_of_tokens": 0.2},
            "held_out_answers": 1, "questions": 6, "float32": figures, "int8": figures,
            "everyday": [{"id": i, "kind": "fact", "turns": ["hi"], "answers": ["Hello!"],
                          "ended": True} for i in (1, 2)], "refusals": refused}, wrong, same_at)

    ours = card(*names)
    assert "**Made by**: `make model`, at commit abc1234" in ours
    assert "**Rebuild it** with `make data-books` and `make model`, at commit abc1234" in ours
    assert "takes 5 minutes on one GPU" in ours and "cannot rebuild" not in ours
    assert "41 of 50 questions about things that do not exist, and 2 of 50 answerable" in ours
    assert "**wrong**" not in ours and "are right" not in ours       # nobody has read them yet
    marked = card(*names, wrong=[2])
    assert "1 of these 2 conversations are right" in marked
    assert "1. *fact*\n" in marked and "2. *fact*, **wrong**\n" in marked
    assert "Two runs" not in ours            # unless somebody has compared them
    assert "Two runs on NVIDIA H200s, at commits 12345ab and abc1234, gave" in card(
        *names, same_at="12345ab")
    assert "lora" not in card(*names, options={"lora_targets": "q", "lora": 0})
    assert "lora_targets q" in card(*names, options={"lora_targets": "q", "lora": 8})
    assert " on one GPU" not in card(*names, device="2 threads")
    other = card("mine.txt", *names[1:])
    assert "**You cannot rebuild this file.** `mine.txt`: not distributed" in other
    assert "Rebuild it" not in other and "all --gpu --text mine.txt" in other


def test_a_command_whose_time_is_up_does_not_begin_to_measure(recipe, monkeypatch, capsys):
    """The next one has all of its time for that."""
    monkeypatch.setattr(recipe.module.pipeline, "complete", lambda path: True)
    monkeypatch.setattr(recipe.module, "write_int8", lambda *args, **more: None)
    assert recipe("quantize", "--limit", 9) == recipe("quantize") == 0
    monkeypatch.setattr(recipe.module.time, "monotonic", iter([0.0, 9 * 60 - 100.0]).__next__)
    assert recipe("quantize", "--limit", 9) == 3
    assert "the same command measures" in capsys.readouterr().out


def test_the_clock_ends_a_program_as_ctrl_c_does(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import pipeline
    code = ("import pathlib, signal, sys, time\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"    # a shell may ignore it
            "try:\n"
            "    pathlib.Path('begun').touch()\n"
            "    while True: time.sleep(0.1)\n"
            "except KeyboardInterrupt:\n"
            "    pathlib.Path('saved').touch(); sys.exit(7)\n")
    limits = []

    class Child(subprocess.Popen):
        """Its time is over as soon as it has begun."""

        def wait(self, timeout=None):
            if timeout is None:
                return super().wait()
            limits.append(timeout)
            until((tmp_path / "begun").exists)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.chdir(tmp_path)
    assert pipeline.run_child([sys.executable, "-c", "pass"]) == 0
    monkeypatch.setattr(subprocess, "Popen", Child)
    assert pipeline.run_child([sys.executable, "-c", code], 5) == 7
    assert limits == [5] and (tmp_path / "saved").exists()


def test_the_flags_of_the_recipe_are_flags_of_both_programs(monkeypatch):
    """Of the CPU's, and of the GPU's where its package is."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import make_model
    for name, stage in make_model.STAGES.items():
        begins_with = ["a.bin"] if stage.begins_with else []
        argv = [*begins_with, "--data", "x", "--seed", "1", *make_model.RECIPE[name], "--out", "y"]
        chosen = parse(VERBS, "", [stage.verb, *argv])
        assert chosen["out"] == "y" and chosen["resume"] is False
        assert parse(on_gpu.VERBS, "", [stage.gpu_verb, *argv])["out"] == "y"
    chosen = parse(VERBS, "", ["train", *make_model.RECIPE["pretrain"]])
    cfg = ne.replace(ne.PRESETS["small"], **{
        name: x for name, x in chosen.items() if hasattr(ne.PRESETS["small"], name)})
    n = ne.n_params(cfg.check())
    banks = (ROOT / "data" / "everyday_banks.py").read_text(encoding="utf-8")
    said = re.findall(r"(\d+) million parameters", banks)   # by the model, of itself
    assert n == 13_620_864 and set(said) == {f"{n / 1e6:.0f}"}


def test_help_names_the_stages():
    said = subprocess.run([sys.executable, str(ROOT / "bench" / "make_model.py"), "--help"],
                          capture_output=True, encoding="utf-8")
    assert said.returncode == 0
    for stage in ("pretrain", "sft", "dpo", "quantize", "evaluate", "card", "--limit"):
        assert stage in said.stdout
