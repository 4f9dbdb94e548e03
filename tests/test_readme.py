"""What README and docs/ tell people to type is there, and where their links lead."""
import re
import shlex

import pytest

from helpers import ROOT, needs
from nanoeuler_parts.cli import parse, VERBS
from nanoeuler_parts.files.errors import PACKAGES

pytestmark = pytest.mark.cli
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "data/README.md",
         *sorted((ROOT / "docs").rglob("*.md"))]
pages = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def commands(path):
    """The lines of a page that begin with a prompt, without their comments."""
    lines = re.findall(r"(?m)^\$ (.+)$", path.read_text(encoding="utf-8"))
    return [shlex.split(line, comments=True) for line in lines]


@pages
def test_every_command_is_understood(path):
    """Up to where it would begin to work."""
    targets = re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"))
    for words in commands(path):
        if words[0] == "make":
            assert set(word for word in words[1:] if "=" not in word) <= {*targets}, words
        elif words[:2] == ["python", "nanoeuler.py"]:
            assert callable(parse(VERBS, "", words[2:])["call"]), words
        elif words[:2] == ["python", "nanoeuler_cuda.py"]:
            needs("numba_cuda")
            from nanoeuler_parts.tools import on_gpu
            assert callable(parse(on_gpu.VERBS, "", words[2:] or ["test"])["call"]), words
        elif words[0] == "curl":             # which tests/test_serve.py sends
            assert path.name in ("serving.md", "serving-api.md")
        else:
            assert words[:2] in (["pip", "install"], ["python", "tests/attack.py"],
                                 ["python", "data/everyday.py"], ["git", "clone"],
                                 ["cd", "nanoeuler"]), words


def test_the_readme_knows_how_long_the_files_are():
    """To a tenth, so that an edit does not change the page"""
    said = re.findall(r"`([\w/.]+)`[^(`]*\(about ([\d,]+)(?: of ([\d,]+))? lines\)",
                      PAGES[0].read_text(encoding="utf-8"))
    assert len(said) == 6
    for name, part, whole in said:
        paths = [*(ROOT / name).glob("*.py")] or [ROOT / name]
        texts = [path.read_text(encoding="utf-8") for path in paths]
        n = sum(text.count("\n") for text in texts)
        if whole:                            # Part I, of all
            assert n == pytest.approx(int(whole.replace(",", "")), rel=0.1)
            begin, end = (texts[0].index(f"\n# ======== Part {title}") for title in ("I:", "II:"))
            n = texts[0].count("\n", begin, end)
        assert n == pytest.approx(int(part.replace(",", "")), rel=0.1), name


README = PAGES[0].read_text(encoding="utf-8")


@pytest.fixture
def drawing(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench/tour"))


def test_the_table_of_speeds_is_the_picture_of_speeds(drawing):
    """README's table, docs/speed.svg and the records have the same numbers."""
    import speed
    table = re.findall(r"(?m)^\| (\w+, \d+M parameters) \| ([^|]*) \| ([^|]*) \| ([^|]*) \| "
                       r"([^|]*) \|$", README)
    expected = [(*row[:3], f"{row.ours:,.0f}", f"{row.peer:,.0f}") for row in speed.rows()]
    assert [(model, machine, numbers.replace("; PyTorch ", "; "), ours.strip("*"), peer.strip("*"))
            for model, machine, numbers, ours, peer in table] == expected
    for row, (*_, ours, peer) in zip(expected, table, strict=True):
        faster = min(row[3:], key=lambda ms: float(ms.replace(",", "")))
        assert [x for x in (ours, peer) if x.startswith("**")] == [f"**{faster}**"]
    picture = (ROOT / "docs/speed.svg").read_text(encoding="utf-8")
    assert re.findall(r">([\d,]+) ms<", picture) == [ms for row in expected for ms in row[3:]]


def test_the_picture_of_a_derivative_shows_code_and_numbers_that_are_there(drawing):
    """Its lines are those of nanoeuler.py, and its numbers those that page 8 prints."""
    import html

    import formula
    picture = html.unescape((ROOT / "docs/formula.svg").read_text(encoding="utf-8"))
    source = (ROOT / "nanoeuler.py").read_text(encoding="utf-8")
    assert len(formula.code()) == 9
    for line in formula.code():
        assert f">{line}<" in picture and line in source
    page = (ROOT / "docs/tour/08_rmsnorm.md").read_text(encoding="utf-8")
    for values in formula.numbers():
        numbers = [f"{x:.6f}" for x in values]
        assert f"[{' '.join(numbers)}]" in page
        assert all(picture.count(x.replace("-", "\N{MINUS SIGN}")) == 2 for x in numbers)


def test_the_bundled_model_is_the_one_on_its_card():
    """The figures of README's section are those of data/MODEL.md."""
    section = README.split("## The bundled model")[1].split("\n## ")[0]
    section = " ".join(section.split())
    card = (ROOT / "data/MODEL.md").read_text(encoding="utf-8")
    [parameters] = re.findall(r"chat model of ([\d,]+) parameters in int8, ([\d.]+) MB", card)
    millions, size = int(parameters[0].replace(",", "")) / 1e6, float(parameters[1])
    assert f"{millions:.1f} million parameters, stored in {size:.0f} MB" in section
    [(right, shown)] = re.findall(r"(\d+) of these (\d+) conversations are right", card)
    assert (f"{shown} conversations that nobody selected, {right} of them without a wrong answer"
            in section)
    [examples] = re.findall(r"Fine-tuning used ([\d,]+) examples", card)
    assert f"{examples} examples" in section
    minutes = [float(x) for x in re.findall(
        r"(?m)^\| (?:pretrain|sft|dpo) \|[^|]*\|[^|]*\| ([\d.]+) \|", card)]
    assert len(minutes) == 3 and f"in {sum(minutes):.0f} minutes on one GPU" in section
    [size, *_] = re.findall(r"(?m)^\| `[\w.]+` \| ([\d,]+) \| `[0-9a-f]{16}` \|", card)
    assert f"first read {int(size.replace(',', '')) / 1e6:.0f} MB of" in section


def test_the_readme_names_what_a_newcomer_does():
    assert verbs_in([PAGES[0]]) >= {"train", "sft", "chat", "generate", "lens"}


def verbs_in(paths):
    lines = [words for path in paths for words in commands(path)]
    return {words[2] for words in lines if words[:2] == ["python", "nanoeuler.py"]}


def test_each_verb_has_an_example_in_a_guide():
    guides = [path for path in PAGES if path.parent in (ROOT, ROOT / "docs")]
    assert {name for name, *_ in VERBS} <= verbs_in(guides)


def test_guides_that_make_a_model_name_the_smaller_file():
    """Whoever reads how a model is made, or changed, finds what becomes of its file."""
    makers = [path for path in PAGES if path.parent == ROOT / "docs" and path.name != "reference.md"
              and verbs_in([path]) & {"train", "sft", "dpo", "import"}]
    assert {"train.md", "fine-tune.md", "llamas.md"} <= {path.name for path in makers}
    lacking = [path.name for path in makers if "quantize" not in verbs_in([path])]
    assert not lacking


def test_text_sizes_are_those_of_the_record():
    """The rows of the guide that were measured on a CPU"""
    import json
    record = (ROOT / "bench/results/text_sizes.json").read_text(encoding="utf-8")
    expected = []
    for row in json.loads(record)["rows"]:
        step, best = min(row["held_out"], key=lambda found: found[1])
        n = row["bytes"]
        size = f"{n / 1e6:.0f} MB" if n >= 1e6 else f"{n / 1e3:.0f} KB"
        expected.append((size, row["preset"], f"{row['cpu_minutes'] / 2:.1f}", f"{best:.2f}",
                         f"{step:,} of {row['steps']:,}"))
    guide = (ROOT / "docs/train.md").read_text(encoding="utf-8")
    assert re.findall(r"(?m)^\| ([^|]+) \| (\w+) \| two CPU cores \| ([^|]+) \| ([^|]+) \| "
                      r"([^|]+) \|", guide) == expected


def test_guides_use_one_name_for_each_kind_of_file():
    """The files that commands read are those of the table in docs/README.md, and the sets in data/.
    A guide about many files, or about a table in CSV, needs others."""
    table = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    known = {name for row in re.findall(r"(?m)^\| (`[\w.]+`(?:, `[\w.]+`)*) \|", table)
             for name in re.findall(r"`([\w.]+)`", row)}
    assert {"mine.txt", "questions.jsonl", "pairs.jsonl", "prompts.jsonl"} <= known
    read = {word for path in PAGES if path.parent in (ROOT, ROOT / "docs")
            for words in commands(path) for flag, word in zip(words, words[1:])
            if flag in ("--data", "--questions", "--file")}
    many = {"books", "shards/*.jsonl.gz", "a.txt", "questions.csv"}
    assert {name for name in read if not name.startswith("tests/golden/")} <= known | many


def test_the_reference_is_what_the_programs_declare():
    needs("numba_cuda")
    import make_reference
    assert make_reference.PAGE.read_text(encoding="utf-8") == make_reference.page(), (
        "docs/reference.md is older than the flags: python bench/make_reference.py --write")


def test_the_index_of_the_documentation_names_every_page():
    indices = [ROOT / "docs/README.md", ROOT / "docs/tour/README.md"]
    linked = {(index.parent / link).resolve() for index in indices
              for link in re.findall(r"\]\(([^)#]+)", index.read_text(encoding="utf-8"))}
    assert linked >= {*(ROOT / "docs").rglob("*.md")} - {indices[0]}


@pages
def test_links_and_files_are_there(path):
    text = path.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert link.startswith("https://") or (path.parent / link).exists(), link
    for name in re.findall(r"`((?:bench|tests|docs|data)/[\w/.-]+\.(?:py|md|txt|json|png))`", text):
        made = name.startswith("bench/out/") or name in FETCHED
        assert made or (ROOT / name).exists(), name


def anchors(path):
    """Those of the headings of a page, as GitHub makes them"""
    text = re.sub(r"(?ms)^```.*?^```", "", path.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
            for title in re.findall(r"(?m)^#+ (.+)$", text)}


@pages
def test_links_lead_to_headings(path):
    for link, anchor in re.findall(r"\]\(([^)#: ]*)#([^)]+)\)", path.read_text(encoding="utf-8")):
        page = (path.parent / link).resolve() if link else path
        assert page.suffix != ".md" or anchor in anchors(page), f"{link}#{anchor}"


# What the scripts of data/ write
FETCHED = {f"data/{name}" for name in ("gutenberg.txt", "web.txt", "pretrain.txt", "books.txt",
                                       "alpaca.json", "manifest.json")}


def test_what_pip_is_said_to_install_is_what_the_extras_are():
    import tomllib
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    assert {*PACKAGES.values()} <= {package for extra in extras.values() for package in extra}


@pages
def test_extras_are_those_of_the_package(path):
    import tomllib
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extras in re.findall(r"\.\[([\w,-]+)\]", path.read_text(encoding="utf-8")):
        assert set(extras.split(",")) <= set(project["optional-dependencies"]), extras
