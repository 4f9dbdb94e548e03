"""Habits that make the prose of README and docs hard to read: a few of each, at most."""
import re

import pytest
from helpers import ROOT

pytestmark = pytest.mark.unit
MOST = {"README": 10, "docs": 10, "tour": 20}          # the tour is as long as all of docs
HABITS = {
    "a sentence that begins with So": r"(?:^|[.:!?|] )So\b(?! far)",
    "a text, texts (text, file, document, reply)": r"\ba text\b|\btexts\b",
    "a trailing alone (only)": r"\balone(?=[.;,:)|])",
    ", too": r", too\b",
    "also (mostly to be deleted)": r"\b[Aa]lso\b",
    "beside (compared with)": r"\b[Bb]eside (?!X|it\b|the (?:last|data|model|weights)\b|each\b)",
    "further (more)": r"\b[Ff]urther\b",
    "says (prints, predicts, measures)": r"\bsa(?:ys|id|y so)\b",
    "a comma before and, between two verbs": r", and (?:is|are|has|writes|prints|reads|takes|makes|"
    r"saves|stops|shows|needs|gives|uses|keeps|ends|adds|computes|continues|warns|reports|ignores|"
    r"replaces|sends|starts|checks)\b",
    "the subject is what, who or those": r"(?:^|[.;:!?|] +)(?:What|Who|Whoever|Whatever|Those|"
    r"That of|Of (?:a|an|the|its|each|all|some|what))\b(?![^.?]*\?)",
    "so many": r"\bso many\b|\bso much of\b",
    "goes on with (resumes, continues)": r"\b(?:go|goes|going|gone|went) on\b",
    "is told, tells of (prints, reports)": r"\b(?:is|are|was|were|be) told\b|"
    r"\btells? of\b|\btold of\b",
    "a private word": r"\bby heart\b|\bin the box\b|\bstrangers?\b|\btwins?\b|\blikeliest\b|"
    r"\bthe control\b|\bmodel has become\b",
    "a rate without per": r"\b(?:ms|tokens?|bits|bytes|steps?) an? "
    r"(?:token|step|second|byte|layer|row)\b|\bsteps a minute\b",
    "behind (after)": r"\bbehind (?:it|them|those|that|the|its|a)\b",
    "a negated noun": r"\b(?:is|are|was|were|has|have) no \w+(?: \w+)?(?:[.;,]|$)|"
    r"\b(?:is|are) none\b",
    "refuse (reject)": r"\brefus(?:e|es|ed|al)\b",
    "of those that": r"\b(?:of|than|as|to) those (?:of|that|which|who)\b",
    "40 % (40%)": r"\d %",
    "British spelling": r"\b(?:colour|behaviour|favour|honour|neighbour|labour|centre|metre|fibre|"
    r"licence|defence|grey|catalogue|artefact|modell|labell|travell|cancell)\w*|"
    r"\b(?:optim|quant|token|normal|initial|real|organ|recogn|character|general|memor|summar|parallel|"
    r"synchron|vector|regular|minim|maxim)is(?:e|es|ed|ing|ation)\b|\btowards\b",
}


def prose(text):
    """The lines that a reader reads as sentences; those of code are empty, and X is inline code."""
    lines, fenced = [], False
    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        seen = "" if fence or fenced else re.sub(r"`[^`]*`", "X", line)
        lines.append(re.sub(r"\]\([^)]*\)", "]", seen))
    return lines


def found(habit, paths):
    return [f"{path.relative_to(ROOT)}:{n}: {line.strip()}" for path in paths
            for n, line in enumerate(prose(path.read_text(encoding="utf-8")), 1)
            for _ in re.finditer(HABITS[habit], line)]


GROUPS = {
    "README": [ROOT / "README.md"],
    # the reference is made from the help texts
    "docs": sorted({*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/evidence").glob("*.md")}
                   - {ROOT / "docs/reference.md"}),
    "tour": sorted((ROOT / "docs/tour").glob("*.md")),
}


@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("group", GROUPS)
def test_habits_are_rare(group, habit):
    places = found(habit, GROUPS[group])
    assert len(places) <= MOST[group], "\n".join([f"{habit}: at most {MOST[group]}", *places])


EXAMPLES = {
    "a sentence that begins with So": ("It is fast. So use it.", "So far, nothing."),
    "a text, texts (text, file, document, reply)": ("Read a text.", "Read the text."),
    "a trailing alone (only)": ("on a CPU alone.", "alone in a batch"),
    ", too": ("on GPUs, too.", "too long"),
    "also (mostly to be deleted)": ("It also runs.", "It runs."),
    "beside (compared with)": ("the speed beside PyTorch", "a file beside it"),
    "further (more)": ("further flags", "more flags"),
    "says (prints, predicts, measures)": ("a note says which", "a saying"),
    "a comma before and, between two verbs": ("It stops, and writes a file.", "red, and blue"),
    "the subject is what, who or those": ("It ends. What follows is read.", "What is it?"),
    "so many": ("so many tokens", "many tokens"),
    "goes on with (resumes, continues)": ("it goes on", "it goes"),
    "is told, tells of (prints, reports)": ("is told by", "it reports"),
    "a private word": ("learned by heart", "memorized"),
    "a rate without per": ("5 ms a token", "5 ms per token"),
    "behind (after)": ("behind the branch", "after the branch"),
    "a negated noun": ("it has no tokens.", "it lacks tokens."),
    "refuse (reject)": ("is refused", "is rejected"),
    "of those that": ("than those of PyTorch", "than PyTorch's"),
    "40 % (40%)": ("40 % of it", "40% of it"),
    "British spelling": ("its behaviour", "optimizer and precise"),
}


@pytest.mark.parametrize("habit", HABITS)
def test_each_habit_is_found(habit):
    bad, good = EXAMPLES[habit]
    assert [re.search(HABITS[habit], line) is not None for line in (bad, good)] == [True, False]


def test_code_is_not_prose():
    assert prose("a `b` [c](d)\n```\ne\n```\nf") == ["a X [c]", "", "", "", "f"]
