"""The curves of `plot` are the numbers of the log."""
import json
import math
import string
import shutil
import sys

import numpy as np
import pytest
from helpers import needs, refused, run

from nanoeuler_parts.tools.plot import read_curve

pytestmark = pytest.mark.cli
STEPS = range(1, 101)


def loss(step):
    return 5 - 0.02 * step


@pytest.fixture
def log(tmp_path):
    """Losses that fall on a line, validations below them, and a step whose loss is no number."""
    records = [{"step": step, "bits_per_byte": loss(step)} for step in STEPS]
    records += [{"step": step, "val_bits_per_byte": loss(step) - 1} for step in (50, 100)]
    records.insert(10, {"step": 10, "bits_per_byte": math.nan})
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def test_the_picture_shows_the_numbers_of_the_log(log, tmp_path, monkeypatch):
    needs("matplotlib")
    from matplotlib.figure import Figure
    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: saved.append((figure, path)))
    run("plot", log, "--out", tmp_path / "a.png")
    (figure, path), = saved
    curves = {line.get_label(): line.get_xydata() for line in figure.axes[0].lines}
    assert path.startswith(str(tmp_path / "a.png"))      # a temporary file, which is renamed
    assert figure.axes[0].get_ylabel() == "bits per byte"
    assert np.array_equal(curves[f"{log.name}: bits per byte"], [(x, loss(x)) for x in STEPS])
    assert np.array_equal(curves[f"{log.name}: held-out bits per byte"],
                          [(x, loss(x) - 1) for x in (50, 100)])
    low, high = figure.axes[0].get_ylim()
    assert low <= loss(100) - 1 and high >= loss(1)


def test_characters_lie_where_the_numbers_are(log, monkeypatch, capsys):
    """Row i of the grid stands for the number printed before it."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run("plot", log)
    lines = [s.split("|", 1) for s in capsys.readouterr().out.splitlines() if s[8:10] == " |"]
    numbers, grid = [float(number) for number, _ in lines], [row for _, row in lines]
    gap = numbers[0] - numbers[1]
    columns = len(grid[0])
    for i, row in enumerate(grid):
        for column, letter in enumerate(row):
            if letter == "a":                # the mean of the steps of a column
                step = (column + 0.5) / columns * STEPS[-1]
                assert numbers[i] == pytest.approx(loss(step), abs=0.51 * gap + 0.02 * 2)
    assert sum("a" in row for row in grid) >= 10 and any("b" in row for row in grid)


def test_only_validation_has_marks_whatever_the_path_says(log, tmp_path, monkeypatch):
    needs("matplotlib")
    from matplotlib.figure import Figure
    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: saved.append(figure))
    log = log.rename(tmp_path / "interval.jsonl")
    run("plot", log, "--out", tmp_path / "a.png")
    marks = {line.get_label(): line.get_marker() for line in saved[0].axes[0].lines}
    assert marks == {f"{log.name}: bits per byte": "None",
                     f"{log.name}: held-out bits per byte": "o"}


@pytest.mark.parametrize("names, shown", [
    (["a/run.jsonl", "b/run.jsonl"], ["a/run.jsonl", "b/run.jsonl"]),
    (["a/one.jsonl", "b/two.jsonl"], ["one.jsonl", "two.jsonl"]),
    (["a/run.jsonl", "b/run.jsonl", "b/two.jsonl"], ["a/run.jsonl", "b/run.jsonl", "b/two.jsonl"])])
def test_the_names_of_curves_differ(names, shown, log, elsewhere, monkeypatch):
    """Folders are named where two logs have the same name."""
    needs("matplotlib")
    from matplotlib.figure import Figure
    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: saved.append(figure))
    for name in names:
        (elsewhere / name).parent.mkdir(exist_ok=True)
        shutil.copy(log, elsewhere / name)
    run("plot", *names, "--out", "a.png")
    labels = [line.get_label() for line in saved[0].axes[0].lines]
    assert labels == [f"{name}: {kind}" for name in shown for kind in (
        "bits per byte", "held-out bits per byte")]


def test_every_curve_has_a_letter_of_its_own(log, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    logs = []
    for k in range(27):                      # two curves each
        logs.append(tmp_path / f"{k}.jsonl")
        logs[-1].write_bytes(log.read_bytes())
    run("plot", *logs[:26])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-52:]] == list(string.ascii_letters)
    refused(capsys, "plot", *logs, words=("at most 52 curves", "found 54", "matplotlib"))


def test_a_picture_is_a_png(log, tmp_path):
    """As its reader sees it: a white page with a curve that reaches from one side to the other."""
    needs("matplotlib")
    from matplotlib.image import imread
    run("plot", log, "--out", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    picture = imread(tmp_path / "a.png")[..., :3]
    height, width, _ = picture.shape
    blue = (picture[..., 2] - picture[..., 0] > 0.3).any(0)          # columns with the first curve
    assert min(height, width) > 300 and (picture == 1).mean() > 0.5
    assert np.flatnonzero(blue)[0] < 0.2 * width and np.flatnonzero(blue)[-1] > 0.8 * width


@pytest.mark.parametrize("link", [False, True])
def test_a_plot_replaces_no_log(link, log, capsys):
    needs("matplotlib")
    before, out = log.read_bytes(), log
    if link:
        out = log.with_name("loss.png")
        out.symlink_to(log.name)
    for force in ([], ["--force"]):
        refused(capsys, "plot", log, "--out", out, *force, words=["would replace its input", log])
    assert log.read_bytes() == before


@pytest.mark.parametrize("content", [
    b"my notes", b"import matplotlib", b"\x89PNG\r\n\x1a\n of a camera", b"\xff\xd8\xff"])
def test_a_plot_replaces_only_plots_unasked(content, log, tmp_path, capsys):
    needs("matplotlib")
    out = tmp_path / "loss.png"
    out.write_bytes(content)
    line = refused(capsys, "plot", log, "--out", out,
                   words=["not a matplotlib plot", "--out", "--force"])
    assert str(out) in line and out.read_bytes() == content
    run("plot", log, "--out", out, "--force")
    assert out.read_bytes().startswith(b"\x89PNG\r\n\x1a\n\0")


@pytest.mark.parametrize("ending", ["png", "svg", "pdf", "ps", "eps"])
def test_a_plot_replaces_an_older_plot(ending, log, tmp_path):
    needs("matplotlib")
    out = tmp_path / f"loss.{ending}"
    out.touch()                              # of an empty file nothing is lost
    for _ in range(2):
        run("plot", log, "--out", out)
        assert out.stat().st_size


@pytest.mark.parametrize("step", [-360, -1 << 63, 10 ** 400, 1 << 60])
def test_steps_that_no_run_has_are_left_out(step, tmp_path, monkeypatch, capsys):
    path, records = tmp_path / "x.jsonl", [(step, 2.0), (1, 3.0), (2, 1e300), (3, 2.0)]
    path.write_text("".join(json.dumps({"step": step, "bits_per_byte": x}) + "\n"
                            for step, x in records), encoding="utf-8")
    assert read_curve(path, "bits_per_byte") == [(1, 3.0), (3, 2.0)]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run("plot", path)
    assert "step 0" in capsys.readouterr().out


def test_nothing_to_draw_and_a_single_point(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    log = tmp_path / "a.jsonl"
    log.write_text(json.dumps({"step": 1, "bits_per_byte": 3.0}) + "\n", encoding="utf-8")
    run("plot", log)
    assert capsys.readouterr().out.count("a") >= 1
    log.write_text(json.dumps({"step": 0, "bits_per_byte": math.nan}) + "\n", encoding="utf-8")
    refused(capsys, "plot", log, words=("no losses", "a.jsonl", "log of a training run"))


@pytest.fixture
def log_of_rewards(tmp_path):
    names = "reward length kl signal loss".split()
    records = [{"step": 0, "val_reward": 0.25, "val_length": 7.0}]
    records += [{"step": step, **{name: step + float(i) for i, name in enumerate(names)}}
                for step in STEPS]
    path = tmp_path / "rl.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def test_a_log_of_rewards_has_an_axis_for_each_measure(log, log_of_rewards, tmp_path, monkeypatch):
    needs("matplotlib")
    from matplotlib.figure import Figure
    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: saved.append(figure))
    run("plot", log_of_rewards, "--out", tmp_path / "a.png")
    run("plot", log, log_of_rewards, "--out", tmp_path / "b.png")
    labels = ["reward", "tokens per answer", "KL, nats per token", "share of groups with a signal"]
    assert [axes.get_ylabel() for axes in saved[0].axes] == labels
    assert [axes.get_ylabel() for axes in saved[1].axes] == ["bits per byte", *labels]
    curves = {line.get_label(): line.get_xydata() for axes in saved[0].axes for line in axes.lines}
    assert set(curves) == {f"{log_of_rewards.name}: {name}" for name in (
        "reward", "held-out reward", "tokens per answer", "held-out tokens per answer", "KL",
        "signal")}
    assert np.array_equal(curves[f"{log_of_rewards.name}: KL"], [(x, x + 2) for x in STEPS])
    assert np.array_equal(curves[f"{log_of_rewards.name}: held-out reward"], [(0, 0.25)])
    *upper, lowest = saved[0].axes
    assert lowest.get_xlabel() == "step" and not any(axes.get_xlabel() for axes in upper)
    for axes in saved[0].axes:               # the legend covers no curve
        assert axes.get_legend().get_window_extent().y0 > axes.get_window_extent().y1


def test_rewards_in_the_terminal(log_of_rewards, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run("plot", log_of_rewards)
    said = capsys.readouterr().out
    for words in ("reward", "tokens per answer", "KL, nats per token", "groups with a signal"):
        assert f"    {words}" in said or words in said
    assert said.count("step 0") == 4 and "bits/byte" not in said
