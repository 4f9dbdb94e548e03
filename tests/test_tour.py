"""The pages of docs/tour: every snippet runs, prints what the page shows, and terms are defined.

A page is a sequence of ```python blocks that share one session, in the folder of the clone.  A
```text block after one is what it prints.  A comment before a block says how it is compared:

    <!-- sampled -->           the output is not compared: it is sampled, or it takes the time
    <!-- tolerance 0.02 -->    words are compared exactly, and numbers within this distance
    <!-- slow -->              the block and all later ones run in `make test-all` only
"""
import codeop
import contextlib
import functools
import hashlib
import io
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT, told

TOUR = ROOT / "docs/tour"
PAGES = sorted(TOUR.glob("[01][0-9]_*.md"))
[OWN] = TOUR.glob("[01][0-9]_own_gpt.md")    # the page that shows all of own_gpt.py
APPENDICES = 13                              # the number of the last page before them
each = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
BLOCK = re.compile(r"^(?:<!-- (?P<mark>[a-z0-9. ]+) -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```$",
                   re.M | re.S)
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d*)?(?:e[-+]?\d+)?")
pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]


def blocks(path):
    """[(mark, kind, text, line)] of a page"""
    text = path.read_text(encoding="utf-8")
    return [(x["mark"] or "", x["kind"], x["text"], text.count("\n", 0, x.start()) + 1)
            for x in BLOCK.finditer(text)]


def snippets(path):
    """[(mark, code, expected output or None, line)]"""
    found, all_blocks = [], blocks(path)
    for i, (mark, kind, text, line) in enumerate(all_blocks):
        if kind == "python":
            after = all_blocks[i + 1] if i + 1 < len(all_blocks) else ("", "", "", 0)
            found.append((mark, text, after[2] if after[1] == "text" else None, line))
    return found


def compare(mark, got, want, where):
    got, want = ("\n".join(line.rstrip() for line in text.strip().splitlines())
                 for text in (got, want))
    if mark.startswith("tolerance"):
        distance = float(mark.split()[1])
        assert NUMBER.sub("#", got) == NUMBER.sub("#", want), where
        x, y = (np.array([float(n) for n in NUMBER.findall(text)]) for text in (got, want))
        assert np.all(np.abs(x - y) <= distance), (where, got)
    else:
        assert got == want, where


def run(path, with_slow):
    """The variables of the session in which the snippets ran"""
    session = {"__name__": "__main__"}
    for mark, code, want, line in snippets(path):
        if mark == "slow" and not with_slow:
            break
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(code, f"{path.name}, line {line}", "exec"), session)
        if mark not in ("sampled", "slow"):
            compare(mark, said.getvalue(), want or "", f"{path.name}, line {line}")
    return session


@each
def test_snippets_print_what_the_page_shows(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    run(path, with_slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in PAGES if path != OWN and any(
    mark == "slow" for mark, *_ in snippets(path))], ids=lambda path: path.stem)
def test_slow_snippets_run(path, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TOUR", str(tmp_path))            # the folder that these snippets write to
    run(path, with_slow=True)


def test_a_wrong_output_is_found(tmp_path):
    for page in ("```python\nprint(1)\n```\n```text\n2\n```\n",
                 "<!-- tolerance 0.1 -->\n```python\nprint(1.0)\n```\n```text\n1.2\n```\n",
                 "<!-- tolerance 0.1 -->\n```python\nprint('a')\n```\n```text\nb\n```\n",
                 "```python\nprint(1)\n```\n"):
        path = tmp_path / "01_page.md"
        path.write_text(page, encoding="utf-8")
        with pytest.raises(AssertionError):
            run(path, True)
    path.write_text("<!-- tolerance 0.1 -->\n```python\nprint(1.0)\n```\n```text\n1.09\n```\n",
                    encoding="utf-8")
    run(path, True)


@each
def test_snippets_can_be_pasted_into_a_prompt(path):
    """Python's prompt ends an indented block at an empty line, and only there."""
    for _, code, _, line in snippets(path):
        pending = []
        for row in [*code.rstrip("\n").split("\n"), ""]:
            pending.append(row)
            where = f"{path.name}, the snippet at line {line}: {row}"
            try:
                complete = codeop.compile_command("\n".join(pending), symbol="single")
            except SyntaxError:
                raise AssertionError(where) from None
            if complete:
                pending = []
        assert not any(row.strip() for row in pending), where


# ---- the form of a page
def prose(path):
    """The text of a page without its code"""
    return BLOCK.sub("", path.read_text(encoding="utf-8"))


@each
def test_the_size_of_a_page(path):
    codes = [text.rstrip("\n").split("\n") for _, kind, text, _ in blocks(path) if kind == "python"]
    assert codes and all(len(lines) <= 20 for lines in codes)
    most = 150 if path == OWN else 90        # lines of code, without empty ones
    assert sum(bool(line) for lines in codes for line in lines) <= most
    assert 800 <= len(re.findall(r"\w[\w'-]*", prose(path))) <= 1800


@each
def test_a_page_has_what_all_have(path):
    text = path.read_text(encoding="utf-8")
    number = int(path.name[:2])
    assert text.startswith("# Appendix. " if number > APPENDICES else f"# {number}. ")
    assert (TOUR / f"{path.stem}.svg").exists() and f"]({path.stem}.svg)" in text
    assert "## Exercise" in text and "<details><summary>Answer</summary>" in text
    [own] = re.findall(r"^## On your own\n\n(.*?)\n\nNext: ", text, re.M | re.S)
    assert len(own.split()) >= 20 and "<details>" not in own         # an exercise without an answer
    assert "## What you should remember" in text and "nanoeuler.py" in text
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (TOUR / target).exists(), target


def test_pages_are_linked_in_order():
    names = [path.name for path in PAGES]
    index = (TOUR / "README.md").read_text(encoding="utf-8")
    assert [n for n in re.findall(r"\]\((\d\d_\w+\.md)\)", index)] == names
    for name in names:                       # the list has the questions of the titles
        title = (TOUR / name).read_text(encoding="utf-8").splitlines()[0]
        [question] = re.findall(r"# (?:\d+|Appendix)\. (.*?\?)", title)
        assert f"[{question}]({name})" in index
    for path, after in zip(PAGES, names[1:]):
        assert f"]({after})" in path.read_text(encoding="utf-8").splitlines()[-1]


def glossary():
    """[(term, number of the page that defines it)] of glossary.md"""
    text = (TOUR / "glossary.md").read_text(encoding="utf-8")
    return [(term, int(page)) for term, page in re.findall(
        r"^\| ([^|]+?) \|[^|]+\| \[(?:\d+|appendix)\]\((\d+)", text, re.M)]


def test_every_term_is_defined_at_its_first_use():
    """The first use on all pages is bold, on the page that the glossary names."""
    terms = glossary()
    assert len(terms) >= 40 and terms == sorted(terms, key=lambda x: x[0].lower())
    pages = {int(path.name[:2]): prose(path) for path in PAGES}
    for term, defined in terms:
        pattern = re.compile(rf"(\*\*)?(?<![\w-]){re.escape(term)}(?:s|es)?(?![\w-])(\*\*)?", re.I)
        uses = [(number, use) for number, text in sorted(pages.items())
                for use in pattern.finditer(text)]
        assert uses, f"{term} is used nowhere"
        number, first = uses[0]
        assert first[1] and first[2], f"{term}: page {number} uses it before it is defined"
        assert number == defined, f"{term} is defined on page {number}"


def test_bold_words_are_in_the_glossary():
    terms = {term.lower() for term, _ in glossary()}
    for path in PAGES:
        for bold in re.findall(r"\*\*([^*]+)\*\*", prose(path)):
            assert bold.lower() in terms or bold.lower().rstrip("s") in terms, (path.name, bold)


# ---- the reader's own model
SOURCE = (TOUR / "own_gpt.py").read_text(encoding="utf-8")


@functools.cache
def own_gpt(path=TOUR / "own_gpt.py"):
    """(its functions, the rows that its check prints: [(name, computed, measured)])"""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.chdir(ROOT):
        program = runpy.run_path(str(path), run_name="own_gpt")
    return program, [(name, float(computed), float(measured)) for name, computed, measured in
                     map(str.split, said.getvalue().splitlines())]


def test_the_page_shows_all_of_own_gpt():
    shown = [code.strip("\n") for _, code, *_ in snippets(OWN) if code.strip("\n") in SOURCE]
    header = "".join(re.findall(r"^#.*\n", SOURCE.split("import", 1)[0], re.M))
    assert header + "\n" + "\n\n".join(shown) + "\n" == SOURCE


def test_the_gradient_of_own_gpt():
    program, rows = own_gpt()
    assert [name for name, *_ in rows] == [*program["SHAPES"]]
    for name, computed, measured in rows:
        assert abs(computed - measured) <= 1e-5 * abs(computed), name


@pytest.mark.parametrize("right, wrong, tensor", [
    ("* (1 + gate * (1 - s)),", ",", "gate_up"),
    ("(dP - (dP * P).sum(-1, keepdims=True))", "dP", "qkv"),
    ("rope(dS @ k, -1)", "rope(dS @ k)", "qkv"),
    ("rstd * (du - u * (du * u).mean(-1, keepdims=True))", "rstd * du", "wte"),
    ("lambda dx: dx + norm_back", "lambda dx: norm_back", "wte")])
def test_the_check_of_own_gpt_finds_errors(right, wrong, tensor, tmp_path):
    assert SOURCE.count(right) == 1
    path = tmp_path / "own_gpt.py"
    short = SOURCE.replace(".read()", ".read()[:50_000]")
    path.write_text(short.replace(right, wrong), encoding="utf-8")
    found = {name: abs(computed - measured) / abs(measured)
             for name, computed, measured in own_gpt(path)[1]}
    assert found[tensor] > 1e-3


def test_own_gpt_learns_in_a_few_steps():
    program, _ = own_gpt()
    losses = [loss for _, loss in program["train"](program["parameters"](np.float32), 30)]
    assert losses[-1] < 3.4 < np.log(program["V"]) < losses[0]


@pytest.mark.slow
def test_own_gpt_writes_words(monkeypatch):
    """At least 70% of the words in a sample of 1,000 letters occur in the text."""
    monkeypatch.chdir(ROOT)
    session = run(OWN, with_slow=True)
    known = set(re.findall("[A-Za-z']+", session["text"]))
    words = re.findall("[A-Za-z']+", session["sample"])
    assert len(session["sample"]) == 1000 and len(words) > 150
    assert sum(word in known for word in words) >= 0.7 * len(words)
    [stated] = re.findall(r"^(\d\.\d\d) bits per letter", OWN.read_text(encoding="utf-8"), re.M)
    assert abs(session["held_out_bits"](session["model"]) - float(stated)) < 0.05


# ---- claims
def test_both_pictures_of_the_steps_show_what_lens_prints(monkeypatch):
    """README's picture, that of page 7 and the table of page 7 are of one text, without a chat
    template, and so is the command that both pages name."""
    monkeypatch.syspath_prepend(str(ROOT / "bench/tour"))
    import euler
    command = f'lens "{euler.TEXT}" bundled --plain`'
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in
             ("README.md", "docs/tour/07_euler.md")]
    assert all(command in page for page in pages)
    said = told("lens", euler.TEXT, "bundled", "--plain")
    rows = re.findall(r"^ +(\d \w+) +(\d\.\d+) +[\d.]+° +'(.*?)' (\d+)%", said, re.M)
    table = re.findall(r"^(\d (?:attention|swiglu)) +(\d\.\d+) +(\d+)% '(.*?)'$", pages[1], re.M)
    assert [row[0] for row in rows] == [row[0] for row in table] and len(rows) == 14
    ratios, shares = (np.array([float(row[i]) for row in rows]) for i in (1, 3))
    assert np.abs(ratios - [float(row[1]) for row in table]).max() < 0.02
    assert np.abs(shares - [float(row[2]) for row in table]).max() <= 2
    picture = (ROOT / "docs/euler.svg").read_text(encoding="utf-8")
    assert euler.TEXT in picture
    heights = np.array([float(h) for h in re.findall(
        r'<rect class="(?:attention|swiglu)" [^>]*? height="([\d.]+)" rx="2"', picture)])
    assert np.abs(heights / heights.max() - ratios / ratios.max()).max() < 0.02
    last = (ROOT / "docs/tour/07_euler.svg").read_text(encoding="utf-8")
    assert euler.TEXT in last
    for drawn in last, picture:              # the last step is the surest; 0% and 100% are the axis
        found = {*map(int, re.findall(r">(\d+)%<", drawn))} - {0, 100}
        assert abs(max(found) - shares[-1]) <= 2


@pytest.mark.slow
def test_what_the_bundled_model_has_met_before(tmp_path):
    """Page 1, README and the card count in the conversations that the card names, made by the
    script of the commit that the card names."""
    path, card = tmp_path / "everyday.jsonl", (ROOT / "data/MODEL.md").read_text(encoding="utf-8")
    [commit] = {*re.findall(r"at commit (\w+)", card)}
    about = (ROOT / "data/README.md").read_text(encoding="utf-8")
    [words] = re.findall(r"(?m)^\$ python data/everyday\.py (--count .*)$", about)
    for name in "everyday.py", "everyday_banks.py":
        shown = subprocess.run(["git", "show", f"{commit}:data/{name}"], cwd=ROOT,
                               capture_output=True)
        if shown.returncode:
            pytest.skip(f"this copy has no commit {commit}")
        (tmp_path / name).write_bytes(shown.stdout)
    subprocess.run([sys.executable, str(tmp_path / "everyday.py"), *words.split(), "--out",
                    str(path)], cwd=ROOT, check=True)
    raw = path.read_bytes()
    digest = hashlib.sha256(raw).hexdigest()[:16]
    assert f"`everyday.jsonl` | {len(raw):,} | `{digest}`" in card and f"commit {commit}" in about
    found = raw.decode().splitlines()
    count = {text: sum(text in line for line in found) for text in (
        "capital of Norway", "Purr-ple", "broken spine", "sleeping bull", "labracadabrador",
        "Atlantis", "Mordor", "Glumtide")}
    assert [*count.values()] == [72, 13, 13, 13, 13, 10, 5, 0]
    assert sum("capital of" in line for line in found) > 4000
    readme, page = ((ROOT / name).read_text(encoding="utf-8")
                    for name in ("README.md", "docs/tour/01_talk.md"))
    assert f"{len(found):,} conversations" in page and '72 contain "capital of Norway"' in page
    assert "Atlantis occurs in ten conversations and Mordor in five" in page
    assert '72 of the 34,001 conversations' in readme and "13 contain this joke" in readme
