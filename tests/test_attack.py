"""A few of the hostile inputs of attack.py, and proof that it sees what it looks for."""
import random
import time

import attack
import pytest
from helpers import needs, replace_everywhere, some
from models import package

import nanoeuler as ne
from nanoeuler_parts.chat.templates import unmarked
from nanoeuler_parts.chat.jinja import conversation_text, render

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def prepared():
    needs("jinja2")
    package()
    with attack.prepared():
        yield


@pytest.mark.parametrize("name", attack.CLASSES)
def test_hostile_input_is_refused_in_one_line(name, prepared):
    n = 200 if name == "templates" else 30
    result = attack.attack(name, n, seed=49)
    assert not result.findings, "\n".join(attack.table({name: result}, seed=49))
    assert result.counts["accepted"] > n // 10 and result.counts["refused"] > n // 10


@pytest.mark.parametrize("name", [name for name in attack.CLASSES if name != "templates"])
def test_good_input_is_accepted(name, prepared):
    attack.warm_up([name], some(40))


# ---- the attack bites
def plainly(template, messages, state, tokenizer, sampled=None):
    """The ids of the rendered text, in which each special name is taken for the token."""
    special = tokenizer.specials
    names = "|".join(map(ne.re.escape, sorted(special, key=len, reverse=True)))
    said = [(role, unmarked(text)) for role, text in messages]
    ids = []
    for piece in ne.re.split(f"({names})", render(template, said, state)):
        ids += [special[piece]] if piece in special else tokenizer.encode(piece).tolist()
    return ids


def test_tokens_made_of_what_is_said_are_forged(prepared, monkeypatch):
    monkeypatch.setattr("nanoeuler_parts.chat.templates.chat_ids", plainly)
    result = attack.attack("templates", 200, seed=1)
    assert result.counts["forged"] > 40
    seed = next(iter(result.findings.values()))[0]
    assert attack.attack("templates", 1, seed).counts == {"forged": 1}


@pytest.mark.parametrize("without", ["SAID", "frame", "with_other_letters"])
def test_each_guard_of_the_ids_is_needed(without, prepared, monkeypatch):
    """The twin tells what each of them keeps away."""
    if without == "SAID":                    # marks are taken off before names are looked for
        text_of = conversation_text
        monkeypatch.setattr("nanoeuler_parts.chat.jinja.conversation_text",
                            lambda *args: (unmarked(text_of(*args)[0]), []))
    elif without == "frame":                 # special names are not compared
        monkeypatch.setattr("nanoeuler_parts.chat.jinja.frame",
                            lambda text, special: ([], []))
    else:                                    # other letters are the same
        monkeypatch.setattr("nanoeuler_parts.chat.jinja.with_other_letters",
                            lambda messages: messages)
    assert any(attack.attack("templates", 50, seed).counts["forged"] for seed in range(1, 1500, 50))


def test_an_error_that_is_none_of_the_users_is_a_crash(prepared, monkeypatch):
    def broken(*args, **options):
        raise ValueError("of no use to anybody")

    for reader in "read_checkpoint", "open_checkpoint":
        replace_everywhere(monkeypatch, f"nanoeuler_parts.checkpoint.file.{reader}", broken)
    result = attack.attack("checkpoints", 10, seed=1)
    assert result.counts["crashed"] == 10
    assert all("ValueError: of no use" in what for what in result.findings)


@pytest.mark.parametrize("call", [
    lambda: attack.runs("info", "no.bin") or print("x", file=attack.sys.stderr),
    lambda: attack.reads(ne.need, False, "refused")])
def test_one_line_is_a_refusal(call):
    assert attack.verdict(call) == ("refused", "")


@pytest.mark.parametrize("lines", [["x"], ["nanoeuler: a", "nanoeuler: b"],
                                   ["nanoeuler: \x1b"], []])
def test_another_line_is_a_crash(lines, monkeypatch):
    def main(argv):
        for line in lines:
            print(line, file=attack.sys.stderr)
        return 2

    monkeypatch.setattr(ne, "main", main)
    assert attack.verdict(lambda: attack.runs("info"))[0] == "crashed"


def test_what_takes_too_long_hangs():
    assert attack.verdict(lambda: time.sleep(9), limit=0.1)[0] == "hung"
    assert attack.verdict(lambda: True) == ("accepted", "")


def test_what_is_found_is_told_with_its_seed(capsys, monkeypatch, prepared):
    def broken(rng, spoil=True):
        if spoil and rng.random() < 0.5:
            raise OSError("found")
        return True

    monkeypatch.setitem(attack.CLASSES, "data", broken)
    assert attack.main(["--only", "data", "--n", "20", "--seed", "7"]) == 1
    said = capsys.readouterr().out
    bad = [seed for seed in range(7, 27) if random.Random(f"data {seed}").random() < 0.5]
    assert f"data --seed {bad[0]}, {bad[1]}" in said and "crashed: OSError: found" in said
    assert attack.main(["--only", "data", "--n", "1", "--seed", str(bad[0])]) == 1
