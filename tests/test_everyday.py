"""The everyday conversations: right by other means, each once, worded in many ways."""
import collections
import json
import re
import subprocess
import sys

import pytest
from helpers import ROOT, command

from nanoeuler_parts.tuning.examples import answered_in, is_conversation, read_examples
from nanoeuler_parts.tuning.formats import words_of

sys.path.insert(0, str(ROOT / "data"))
import everyday
import everyday_banks as banks

pytestmark = pytest.mark.unit
COUNT = 6000


@pytest.fixture(scope="module")
def entries():
    return everyday.conversations(COUNT, seed=5)[0]


def asked(entry):
    return [m["content"] for m in entry["messages"] if m["role"] == "user"]


def answered(entry):
    return [m["content"] for m in entry["messages"] if m["role"] == "assistant"]


def of_kind(entries, *kinds):
    found = [e for e in entries if e["source"].removeprefix("everyday/") in kinds]
    assert found
    return found


def words_in(text):
    return re.findall(r"[a-z]+", text.lower())


def test_the_same_seed_gives_the_same_file(tmp_path):
    """In processes of their own, so that no order hangs on a hash of this one."""
    files = []
    for i, seed in enumerate((3, 3, 4)):
        files.append(tmp_path / f"{i}.jsonl")
        subprocess.run(command("--count", 600, "--seed", seed, "--out", files[-1],
                               program="data/everyday.py"), check=True, capture_output=True)
    one, again, other = (f.read_bytes() for f in files)
    assert one == again != other


def test_a_file_of_others_is_not_replaced_unasked(tmp_path, capsys):
    path = tmp_path / "mine.jsonl"
    path.write_text("mine", encoding="utf-8")
    assert everyday.main(["--out", str(path), "--count", "60"]) == 2
    assert path.read_text("utf-8") == "mine" and "--force" in capsys.readouterr().err
    assert everyday.main(["--out", str(path), "--count", "60", "--force"]) == 0
    assert path.read_bytes().startswith(b'{"')


def test_sft_reads_it(tmp_path, entries):
    path = tmp_path / "everyday.jsonl"
    path.write_text("".join(json.dumps(e) + "\n" for e in entries), encoding="utf-8")
    examples, _ = read_examples(path, "output")
    assert len(examples) == len(entries)
    for e, x in zip(entries, examples):
        assert is_conversation(x)
        assert words_of(answered_in(x, "output")) == answered(e)
        roles = [m["role"] for m in e["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


def test_every_kind_is_there_and_the_number_is_that_asked_for(entries):
    assert {e["source"] for e in entries} == {f"everyday/{name}" for name in everyday.KINDS}
    assert 0.97 * COUNT < len(entries) <= 1.01 * COUNT
    few, _ = everyday.conversations(len(everyday.KINDS), seed=1)
    assert {e["source"] for e in few} == {f"everyday/{name}" for name in everyday.KINDS}


def test_no_conversation_comes_twice(entries):
    texts = [json.dumps(e["messages"]) for e in entries]
    assert len(set(texts)) == len(texts)


def test_no_answer_is_more_than_a_hundredth(entries):
    counts = collections.Counter(x for e in entries for x in answered(e))
    assert counts.most_common(1)[0][1] <= 0.01 * len(entries)


def test_shares(entries):
    """Talks of several turns, and how much of all answers is work with words."""
    several = sum(len(e["messages"]) > 2 for e in entries)
    assert 0.10 <= several / len(entries) <= 0.35
    size = collections.Counter()
    for e in entries:
        size[e["source"].startswith("everyday/skill")] += sum(map(len, answered(e)))
    assert 0 < size[True] <= 0.25 * size.total()


def test_text_is_plain(entries):
    """No slot or bracket of a template, no mark of protection, and answers in ASCII alone."""
    for e in entries:
        for text in asked(e) + answered(e):
            assert text == text.strip() and text, e
            assert not re.search(r"[\0-\x09\x0b-\x1f{}\[\]|]", text), e
            assert "  " not in text, e
        for text in answered(e):
            assert text.isascii(), e
            assert not re.search(r"(?<!\.)\.\.(?!\.)| [.,?!](?!\.)|\?\.|,,|[a-z]\?[a-z]", text), e


@pytest.mark.parametrize("kind", [
    "greeting", "identity", "how_are_you", "ability", "capital", "sums", "stories", "verses",
    "thanks", "opposites", "animals", "beyond", "goodbye", "nonsense", "jokes", "advice",
    "skill_reverse"])
def test_a_question_has_at_least_thirty_wordings(entries, kind):
    """Without names and numbers, in small letters."""
    shapes = {re.sub(r"[^a-z ]", "", asked(e)[0].lower()) for e in of_kind(entries, kind)}
    assert len(shapes) >= 30


# ---- sums, computed again from what is asked ----

ONES = everyday.ONES


def number_of(text):
    """An int of digits or of words up to 99, or None."""
    if text.isdigit():
        return int(text)
    tens, _, ones = text.partition("-")
    if text in ONES:
        return ONES.index(text)
    if tens in everyday.TENS:
        return 10 * everyday.TENS.index(tens) + (ONES.index(ones) if ones in ONES else 0)
    return None


OPERATORS = [(r"plus|\+|sum|add|together|and\b.*\bmake|makes?\b", lambda x, y: x + y),
             (r"times|\*|\dx\d| x |product|multiply", lambda x, y: x * y),
             (r"divided?|/", lambda x, y: x // y), (r"minus|-|subtract|take", lambda x, y: x - y)]
WORD = "|".join(sorted(filter(str.isalpha, ONES + everyday.TENS), key=len, reverse=True))
NUMBER = re.compile(rf"\d+|\b(?:(?:{WORD})-(?:{WORD})|{WORD})\b")


def test_sums_are_right(entries):
    """Those of two numbers; where a slip of the fingers hides the sign there is nothing to see."""
    seen = 0
    for e in of_kind(entries, "sums"):
        question, answer = asked(e)[0].lower(), answered(e)[0]
        numbers = [number_of(x) for x in NUMBER.findall(question)]
        if re.search(r"half|halve|twice|double|square|have|has|had|left", question):
            continue
        masked = NUMBER.sub("9", question)
        does = [f for words, f in OPERATORS if re.search(words, masked)]
        if len(does) != 1 or len(numbers) != 2:
            continue
        x, y = numbers
        if re.search(r"subtract|take (?!away)", masked) and "from" in masked:
            x, y = y, x
        assert does[0](x, y) == int(re.findall(r"\d+", answer)[-1]), e
        seen += 1
    assert seen > 100


def test_sums_that_go_on_are_right(entries):
    for e in of_kind(entries, "follow_sum"):
        result = int(re.findall(r"\d+", answered(e)[0])[-1])
        for question, answer in zip(asked(e)[1:], answered(e)[1:]):
            n = int(re.findall(r"\d+", question)[0])
            sign = re.search(r"plus|minus|times|[+*-]", question.lower())[0]
            result = {"p": result + n, "+": result + n, "t": result * n, "*": result * n,
                      "m": result - n, "-": result - n}[sign[0]]
            assert int(re.findall(r"\d+", answer)[-1]) == result, e


def test_claims_are_judged_right(entries):
    for e in of_kind(entries, "claims"):
        answer = answered(e)[0]
        if found := re.search(r"(\d+) (plus|times) (\d+) is (\d+)", answer):
            x, y, z = (int(found[i]) for i in (1, 3, 4))
            assert z == (x + y if found[2] == "plus" else x * y), e
            says = int(re.findall(r"\d+", asked(e)[0])[-1])
            assert (says == z) == (answer.startswith(("Yes", "That is right:"))), e


# ---- work with words, done again ----

KNOWN = set(banks.WORDS)


@pytest.mark.parametrize("kind, work", [
    ("skill_reverse", lambda w: w[::-1]), ("skill_upper", str.upper), ("skill_lower", str.lower)])
def test_a_word_is_worked_on(entries, kind, work):
    for e in of_kind(entries, kind):
        answer = answered(e)[0]
        done = [w for w in KNOWN.intersection(words_in(asked(e)[0]))
                if re.search(rf"\b{work(w)}\b", answer)]
        assert done, e


def test_words_are_spelled_and_counted(entries):
    for e in of_kind(entries, "skill_spell"):
        letters = re.search(r"(\w-)+\w", answered(e)[0])[0]
        assert letters.lower().replace("-", "") in words_in(asked(e)[0]), e
    for e in of_kind(entries, "skill_count"):
        n = int(re.search(r"(\d+) letters", answered(e)[0])[1])
        assert n in {len(w) for w in KNOWN.intersection(words_in(asked(e)[0]))}, e
    for e in of_kind(entries, "skill_vowels"):
        n = int(re.search(r"(\d+) vowel", answered(e)[0])[1])
        assert n in {len(re.findall("[aeiou]", w)) for w in words_in(asked(e)[0])}, e
    for e in of_kind(entries, "skill_first", "skill_last"):
        i = 0 if e["source"].endswith("first") else -1
        letter = re.findall(r"\b[a-z]\b", answered(e)[0])[-1]
        assert letter in {w[i] for w in KNOWN.intersection(words_in(asked(e)[0]))}, e
    for e in of_kind(entries, "skill_count_one"):
        times, c, w = None, None, re.findall(r'"(\w+)"', answered(e)[0])[-1]
        if found := re.match(r"The letter (\w) is (\w+)", answered(e)[0]):
            c, times = found[1], {"once": 1, "twice": 2, "three": 3}[found[2]]
        else:
            found = re.match(r"There (?:is|are) (\d) (\w)", answered(e)[0])
            times, c = int(found[1]), found[2]
        assert w.count(c) == times and w in words_in(asked(e)[0]), e


def listed_in(text):
    """The words of the list at the end of a question, of which people leave out the commas."""
    return [w for w in words_in(text) if w in KNOWN]


def test_lists_are_worked_on(entries):
    for e in of_kind(entries, "skill_sort"):
        words = re.findall(r"[a-z]+", answered(e)[0].removeprefix("In order: "))
        assert words == sorted(words), e
        assert set(words) <= set(listed_in(asked(e)[0])), e
        assert len(words) > 1, e
    for e in of_kind(entries, "skill_reverse_list"):
        words = answered(e)[0].split(", ")
        assert ", ".join(words[::-1]) in asked(e)[0], e
    for e in of_kind(entries, "skill_sort_numbers"):
        numbers = [int(x) for x in answered(e)[0].split(", ")]
        down = numbers[0] > numbers[1]
        assert numbers == sorted(numbers, reverse=down), e
        assert sorted(numbers) == sorted(map(int, re.findall(r"\d+", asked(e)[0]))), e
    for e in of_kind(entries, "skill_extreme"):
        numbers = [int(x) for x in re.findall(r"\d+", asked(e)[0])]
        assert int(re.search(r"\d+", answered(e)[0])[0]) in (min(numbers), max(numbers)), e


# ---- facts say one thing ----

def test_a_country_has_one_capital(entries):
    """In the bank, and in all answers of the kinds that name one."""
    names = [row[0] for row in everyday.COUNTRIES]
    capitals = [everyday.CAPITAL_OF[x] for x in everyday.CITIES]
    assert len(names) == len(set(names)) > 180
    assert len(capitals) == len(set(capitals))
    found = collections.defaultdict(set)
    for e in entries:
        for answer in answered(e):
            for sentence in re.split(r"(?<=[a-z])\. ", answer.removesuffix(".")):
                sentence = re.sub("^(Yes, |No, |I said: |That is right: )", "", sentence)
                if m := re.fullmatch("[Tt]he capital of (.+?) is (.+)", sentence):
                    found[m[1]].add(m[2].split(",")[0])
                elif m := re.fullmatch("(.+) is the capital of (.+)", sentence):
                    found[m[2]].update({m[1].split(",")[0]} - {"It"})
    assert len(found) > 150
    assert all(len(capitals) < 2 for capitals in found.values()), {
        x: y for x, y in found.items() if len(y) > 1}


def test_rows_of_banks_are_whole():
    widths = dict(COUNTRIES=5, ANIMALS=7, PLANETS=3, UNITS=3, PLAYS=5, LINES=4, BOOKS=3, JOKES=2,
                  RIDDLES=2, SUBJECTS=3, COLOURS=2, SENTENCES=2, COMPARISONS=3, HEROES=3)
    for bank, width in widths.items():
        found = everyday.rows(getattr(banks, bank))
        assert len(found) >= 8
        assert {len(row) for row in found} == {width}, (bank, [x for x in found if len(x) != width])
    for bank in (banks.TALK, banks.MORE_TALK, banks.FACTS):
        for title, blocks in everyday.talks(bank).items():
            for turns in blocks:             # each with an answer, no mark inside a wording
                assert len(turns) % 2 == 0, (title, turns)
                marked = [x for turn in turns for x in turn if re.search("[a-z?] [=>#] ", x)]
                assert not marked, turns
    for bank in (banks.OPPOSITES, banks.PLURALS, banks.PASTS):
        assert all(len(x) == 2 for x in everyday.pairs(bank))


def test_verses_have_four_lines_in_couplets(entries):
    """Of couplets that stand in the bank, where each has two lines."""
    couplets = [c for _, cs in everyday.COUPLETS for c in cs]
    assert all(len(c) == 2 for c in couplets + everyday.ANY_COUPLETS)
    for e in of_kind(entries, "verses"):
        lines = answered(e)[0].split("\n")
        assert len(lines) == 4 and lines[:2] in couplets and lines[2:] in couplets, e


def test_stories_keep_to_their_subject(entries):
    """Who is asked for by name is in the story, which has 3 to 12 sentences."""
    heroes = {row[0] for row in everyday.HEROES}
    for e in of_kind(entries, "stories"):
        story = answered(e)[0]
        assert 3 <= len(re.findall(r'[.!?]"?(?= |$)', story)) <= 12, e
        question = re.sub(r"fairy t\w+|teacher asks", "", asked(e)[0].lower())
        about = [h for h in heroes if re.search(rf"\b{h}\b", question)]
        assert not about or any(h in story for h in about), e


def test_what_is_told_is_remembered(entries):
    for e in of_kind(entries, "remember"):
        if len(e["messages"]) > 2:
            told = asked(e)[0].lower()
            last = [w.strip(".,") for w in answered(e)[-1].lower().split()]
            frame = {"your", "you", "are", "is", "it", "i"}
            assert any(w in told for w in last if w not in frame), e


# ---- what is left out ----

def test_prompts_of_a_file_are_not_asked(tmp_path, entries):
    """Spelled in another way, too; but short ones, and others of the same kind, are."""
    long = [x for e in entries for x in asked(e) if len(x.split()) > 2][:40]
    path = tmp_path / "prompts.jsonl"
    user, assistant = ({"role": role, "content": "Hi"} for role in ("user", "assistant"))
    forms = [lambda x: {"prompt": x}, lambda x: {"messages": [{**user, "content": x}]}, lambda x: x,
             lambda x: {"messages": [user, assistant, {**user, "content": x.upper() + " !?"}]}]
    lines = [json.dumps(forms[i % 4](x)) for i, x in enumerate(long)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    out = tmp_path / "out.jsonl"
    flags = ["--exclude", str(path), "--out", str(out)]
    assert everyday.main([*flags, "--count", str(COUNT), "--seed", "5"]) == 0
    kept = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    left_out = {re.sub(r"[^a-z0-9]", "", x.lower()) for x in long}
    spelled = {re.sub(r"[^a-z0-9]", "", x.lower()) for e in kept for x in asked(e)}
    assert not left_out & spelled
    assert "hi" in spelled                                   # two words or fewer stay
    assert len(kept) > 0.95 * len(entries)


def test_a_file_without_prompts_is_refused(tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "who are you then"}\n{"answer": 3}\n', encoding="utf-8")
    out = tmp_path / "out.jsonl"
    assert everyday.main(["--exclude", str(path), "--out", str(out), "--count", "100"]) == 2
    assert "entry 2" in capsys.readouterr().err
    assert not out.exists()


def test_slips_spare_what_is_worked_on():
    d = everyday.Draw(1)
    for _ in range(2000):
        text = everyday.typed(d, "please " + everyday.keep("garden window") + " in reverse order")
        assert "garden window" in text
        assert "berlin" in everyday.typed(d, "the capital is " + everyday.name("Berlin")).lower()


# ---- things that do not exist ----
def of_refusals(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import refusals
    return refusals


NO_SUCH = ("no_such_thing", "no_such_country", "no_such_unit", "no_such_war", "no_such_book",
           "no_such_property", "no_numbers_of_people", "unknown_people", "no_capital")


def test_answers_about_things_that_do_not_exist_say_so(entries, monkeypatch):
    """All of them refuse, and nearly no answer about what exists does."""
    refuses = of_refusals(monkeypatch).refuses
    for e in of_kind(entries, *NO_SUCH, "unknown_words"):
        assert refuses(answered(e)[0]), e
    real = of_kind(entries, "such_things", "capital", "capital_of", "animals", "planets", "units",
                   "colours", "books", "plays", "sums", "language", "currency", "opposites")
    wrong = [e for e in real if refuses(answered(e)[0]) and "no legs" not in answered(e)[0]]
    assert not wrong


def test_a_reason_names_the_thing(entries):
    """Of which no name is real."""
    for e in of_kind(entries, "no_such_thing"):
        [question], [answer] = asked(e), answered(e)
        found = {w for w in re.findall(r"[a-z]{4,}", answer.lower()) if w in question.lower()}
        assert found - {"that", "there", "know", "such", "what"}, e
    d = everyday.Draw(7)
    names = [everyday.invented(d, "a e o us") for _ in range(3000)]
    assert not {*names} & everyday.REAL and len({*names}) > 2000
    assert {"paris", "france", "cow", "mars", "anna"} <= everyday.REAL
    assert len(of_kind(entries, "no_such_thing")) >= 0.01 * len(entries)


def test_there_are_as_many_answerable_questions_of_these_kinds(entries):
    kinds = ("such_things", "capital", "capital_of", "continent", "language", "currency", "animals",
             "planets", "units", "books", "plays")
    assert len(of_kind(entries, *kinds)) >= 2 * len(of_kind(entries, *NO_SUCH))


def test_no_question_of_the_measurement_is_learned(monkeypatch, tmp_path):
    """Nor a name of it."""
    refusals = of_refusals(monkeypatch)
    prompts, path = refusals.prompts(), tmp_path / "made.jsonl"
    assert [x["id"] for x in prompts] == [*range(1, 101)]
    assert sum(x["exists"] for x in prompts) == 50
    prompts_files = [ROOT / "bench" / f"{x}_prompts.jsonl" for x in ("everyday", "refusal")]
    assert everyday.main(["--out", str(path), "--count", "34000", *(
        x for file in prompts_files for x in ("--exclude", str(file)))]) == 0
    made = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
    questions = {everyday.letters_of(x) for e in made for x in asked(e)}
    assert not questions & {everyday.letters_of(x["turns"][0]) for x in prompts}
    learned = {w for e in made for x in asked(e) for w in words_in(x)}
    names = re.findall(r"(?<!^)\b[A-Z][a-z]{5,}", "\n".join(x["turns"][0] for x in prompts[:45]))
    assert len(names) > 25
    known = {"capital", "country", "mount", "norway", "brazil", "robots", "hamlet", "marble",
             "octopus", "shakespeare", "tailor", "emperor", "queen"}
    assert {x.lower() for x in names} & learned <= known


def test_refusals_are_counted(monkeypatch):
    """By hand, for a speaker of two sentences."""
    refusals = of_refusals(monkeypatch)

    class Speaker:
        def generate(self, asked, **settings):
            return [type("Reply", (), {"answer": "I know no such thing." if i % 2 else "Yes."})
                    for i in range(len(asked))]

    found = refusals.measure(Speaker())
    assert refusals.summary(found) == {"refused": 25, "of": 50, "answerable_refused": 25,
                                       "answerable": 50, "answerable_correct": 3}
    for answer in ("I do not know that.", "There is no country called X that I know of.",
                   "Days have no color.", "I have never heard of it.",
                   "Mars is a planet and has no capital."):
        assert refusals.refuses(answer)
    for answer in ("Yes, I know Rome.", "Oslo.", "A snake has no legs and no ears.", "No."):
        assert refusals.refuses(answer) == ("no legs" in answer)
    assert refusals.is_correct("It is Oslo.", ["oslo"]) and not refusals.is_correct("x", ["oslo"])
