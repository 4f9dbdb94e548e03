"""The run of `make speedrun`, by the CPU program at a size of seconds."""
import json
import signal
import sys
from types import SimpleNamespace

import pytest
from helpers import FAST, ROOT, TEXT, run

import nanoeuler as ne

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def speedrun(monkeypatch, tmp_path, capsys):
    """speedrun(*args): (exit code or message, printed text).  Its programs run in this process, and
    their flags are in speedrun.commands."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.chdir(tmp_path)
    import speedrun
    (tmp_path / "text.txt").write_bytes(TEXT.read_bytes()[:40_000])
    commands = []

    def in_this_process(command, **_):
        assert command[:2] == [sys.executable, str(ROOT / "nanoeuler.py")]
        commands.append(command[2:])
        if start.fails:
            return SimpleNamespace(returncode=3)
        run(*command[2:])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(speedrun, "run_child", lambda command: in_this_process(command).returncode)
    monkeypatch.setattr(speedrun.subprocess, "run", in_this_process)
    monkeypatch.setattr(speedrun, "PROGRAM", "nanoeuler.py")
    monkeypatch.setattr(speedrun, "VERB", "train")
    monkeypatch.setattr(speedrun, "RECIPE", [*FAST, "--optimizer", "adamw", "--eval-every", "4"])

    def start(*args):
        monkeypatch.setattr(sys, "argv", ["speedrun.py", "--data", "text.txt", *args])
        commands.clear()
        with pytest.raises(SystemExit) as e:
            speedrun.main()
        return e.value.code, capsys.readouterr().out

    start.commands, start.folder, start.module, start.fails = commands, tmp_path, speedrun, False
    return start


def test_a_speedrun_reports_minutes_tokens_and_the_loss(speedrun):
    code, said = speedrun("--steps", "8", "--target", "9")
    assert code == 0
    assert [command[0] for command in speedrun.commands] == ["train", "train", "plot"]
    assert (speedrun.folder / "speedrun.png").exists()
    text = (speedrun.folder / "speedrun.md").read_text("utf-8")
    assert text in said and "The target was 9: it was reached." in text
    log = [json.loads(x) for x in (speedrun.folder / "speedrun.jsonl").read_text().splitlines()]
    steps = [r for r in log if "ms" in r]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines()[-2:]]
    for n, (step, tokens, minutes, mean, _) in zip((4, 8), rows, strict=True):
        assert int(step) == n and int(tokens) == n * 64
        assert float(minutes) == pytest.approx(sum(r["ms"] for r in steps[:n]) / 60e3, abs=0.006)
        assert float(mean) == pytest.approx(
            sum(r["bits_per_byte"] for r in steps[n - 4:n]) / 4, abs=1e-4)
    assert f"{log[-1]['val_bits_per_byte']:.4f} bits per byte of held-out text" in text
    assert text.splitlines()[-1].endswith(f"| {log[-1]['val_bits_per_byte']:.4f} |")

    before = (speedrun.folder / "speedrun.bin").stat().st_mtime_ns
    code, said = speedrun("--target", "0.5")             # a complete run is only reported
    assert code == 1 and "The target was 0.5: it was not reached." in said
    assert [command[0] for command in speedrun.commands] == ["plot"]
    assert (speedrun.folder / "speedrun.bin").stat().st_mtime_ns == before


def test_an_interrupted_speedrun_is_resumed(speedrun, monkeypatch):
    run_child, update = speedrun.module.run_child, ne.Model.update

    def interrupted(command):
        """Starts the run that trains.  Ctrl-C is pressed in its first step."""
        def stop(model, hyper):
            signal.raise_signal(signal.SIGINT)
            monkeypatch.setattr(ne.Model, "update", update)
            return update(model, hyper)
        monkeypatch.setattr(ne.Model, "update", stop)
        monkeypatch.setattr(speedrun.module, "run_child", run_child)
        return run_child(command)

    monkeypatch.setattr(speedrun.module, "run_child", interrupted)
    code, _ = speedrun("--steps", "8")
    assert "the same command resumes it" in str(code)
    assert ne.read_checkpoint("speedrun.bin").state.step == 1
    code, said = speedrun("--steps", "8")
    assert code == 0 and "bits per byte of held-out text in the final validation." in said
    assert speedrun.commands[0][:2] == ["train", "--resume"]
    (speedrun.folder / "other.txt").write_text("Another text.", "utf-8")
    code, _ = speedrun("--data", "other.txt")
    assert "was trained on text.txt, not on other.txt" in code and not speedrun.commands


def test_what_a_speedrun_rejects(speedrun):
    speedrun.fails = True
    assert speedrun()[0] == 3 and len(speedrun.commands) == 1
    assert not (speedrun.folder / "speedrun.bin").exists()
    code, _ = speedrun("--data", "none.txt")
    assert "none.txt does not exist" in code and "make data" in code
