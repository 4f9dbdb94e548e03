"""The pictures of README, docs and the tour: one script draws them, and their numbers are those of
the pages that show them."""
import re

import pytest
from helpers import ROOT

pytestmark = pytest.mark.unit
TOUR = ROOT / "docs/tour"


@pytest.fixture(autouse=True)
def drawing(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.syspath_prepend(str(ROOT / "bench/tour"))


def page(number):
    [path] = TOUR.glob(f"{number:02d}_*.md")
    return path.read_text(encoding="utf-8")


def picture(number):
    [path] = TOUR.glob(f"{number:02d}_*.svg")
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.svg")), ids=lambda path: path.stem)
def test_each_picture_has_a_script_and_a_page(path):
    """And the page, or README, names the command that draws it."""
    number = re.match(r"\d\d", path.name)
    script = f"page_{number[0]}" if number else path.stem
    assert (ROOT / f"bench/tour/{script}.py").exists()
    owner = path.with_suffix(".md") if number else ROOT / "README.md"
    assert f"({path.relative_to(owner.parent)})" in owner.read_text(encoding="utf-8")


def test_the_numbers_that_are_printed_are_those_of_the_picture():
    import make_pictures
    assert make_pictures.numbers('<text x="1">5 &lt; 6</text><text y="2">a</text>') == ["5 < 6"]


def test_page_1():
    """The probabilities that its snippet prints"""
    import page_01
    [printed] = re.findall(r"(?m)^\[([\d. ]+)\] sum of all: 1\.0$", page(1))
    shown = [p for _, p in page_01.NEXT[:-1]]
    assert [float(x) for x in printed.split()][:len(shown)] == shown
    assert sum(p for _, p in page_01.NEXT) == pytest.approx(1, abs=0.0015)


def test_page_3():
    """The bits per byte that its snippets print, and what its text says of the rest"""
    import page_03
    text = page(3)
    for _, bits, _ in page_03.WAYS[1:]:
        assert f"{bits:.2f}" in text and f">{bits:.2f}<" in picture(3)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [last] = re.findall(r"validation (\d\.\d+) bits/byte", readme)
    assert float(last) == pytest.approx(page_03.WAYS[-1][1], abs=0.005)


def test_page_4():
    import page_04
    losses = dict(page_04.LOSSES)
    printed = {int(n): float(x) for n, x in re.findall(r"after +(\d+) steps: (\d\.\d+)", page(4))}
    same = losses.keys() & printed.keys()
    assert len(same) >= 3
    assert all(losses[n] == pytest.approx(printed[n], abs=0.0006) for n in same)
    [counted] = re.findall(r"(?m)^ +counted: (\d\.\d+)$", page(4))
    assert float(counted) == pytest.approx(page_04.COUNTED, abs=0.0005)


def test_page_12():
    import page_03
    import page_12
    assert page_12.PAIRS == dict((name, bits) for name, bits, _ in page_03.WAYS)["counts of pairs"]
    [held_out] = re.findall(r">held-out text: (\d\.\d\d)<", picture(12))
    assert f"held-out text costs {held_out}" in page(12)
