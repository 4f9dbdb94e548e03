"""Every number that a user may set: its first and last value are accepted, their neighbors, NaN and
infinity are not."""
import dataclasses
import math
import typing

import bpe
import numba
import pytest
from helpers import modules

import nanoeuler as ne
from nanoeuler_parts.cli import add_verbs, Parser, VERBS
from nanoeuler_parts.machine import threads
from nanoeuler_parts.serve import ollama, protocol, responses

pytestmark = pytest.mark.unit


def settings_classes():
    """All kinds of settings: of a model, of sampling, of runs, of each verb"""
    modules()
    found, new = [], [ne.Settings]
    while new:
        new = [sub for cls in new for sub in cls.__subclasses__() if sub not in found]
        found += [cls for cls in new if cls.__module__.split(".")[0].startswith("nanoeuler")]
    return found


def kind_of(f):
    """int or float, also of a field that may be None; None for all others"""
    kinds = [kind for kind in (f.type, *typing.get_args(f.type)) if kind in (int, float)]
    return kinds[0] if kinds else None


FIELDS = [(cls, f) for cls in settings_classes() for f in dataclasses.fields(cls) if kind_of(f)]


def neighbors(kind, low, high):
    """(the first and last value, the values just outside)"""
    if kind is int:
        return (low, high), (low - 1, high + 1)
    outside = math.nextafter(low, -math.inf), math.nextafter(high, math.inf)
    return (float(low), float(high)), (*outside, math.nan, math.inf, -math.inf)


def with_value(cls, name, value):
    settings = cls()
    object.__setattr__(settings, name, value)            # as a file or a flag sets it
    return settings


def test_there_are_settings_of_each_kind():
    names = {cls.__name__ for cls, _ in FIELDS}
    assert names >= {"Config", "Sampling", "State", "TrainOptions", "SftOptions", "DpoOptions",
                     "EvalOptions", "Serving"}
    assert len(FIELDS) > 150


@pytest.mark.parametrize("cls", dict.fromkeys(cls for cls, _ in FIELDS), ids=lambda c: c.__name__)
def test_a_setting_has_its_first_and_last_value_and_no_neighbor(cls):
    for f in (f for owner, f in FIELDS if owner is cls):
        inside, outside = neighbors(kind_of(f), *f.metadata.get("range", (0, 1 << 62)))
        for value in inside:                 # what other settings say of it is another question
            ne.Settings.check(with_value(cls, f.name, value))
        for value in outside:
            with pytest.raises(ne.UserError) as e:
                with_value(cls, f.name, value).check()
            assert f.name in str(e.value).replace("-", "_"), (f.name, value)


@pytest.mark.parametrize("cls", dict.fromkeys(cls for cls, _ in FIELDS), ids=lambda c: c.__name__)
def test_a_setting_has_its_type(cls):
    """A whole number may stand for any other, and nothing else for a whole one, not even True."""
    for f in (f for owner, f in FIELDS if owner is cls):
        for value in ("1", True, [1], *((1.0,) if kind_of(f) is int else ())):
            with pytest.raises(ne.UserError, match="expected"):
                with_value(cls, f.name, value).check()


def test_each_number_among_the_flags_is_a_setting():
    """So that the tests above try the limits of all flags. The threads are a case of their own."""
    parsers = Parser().add_subparsers()
    add_verbs(parsers, VERBS, chosen=[name for name, *_ in VERBS])
    names = {f.name for _, f in FIELDS} | {"threads"}
    numbers = {(verb, action.dest) for verb, parser in parsers.choices.items()
               for action in parser._actions if action.type in (int, float)}
    assert len(numbers) > 100 and not {(verb, name) for verb, name in numbers if name not in names}


# ---- parameters of requests
BODIES = {"completions": protocol.OF_COMPLETION, "chat": protocol.OF_CHAT,
          "ollama's options": ollama.OPTIONS, "responses": responses.PARAMETERS}
NUMBERS = [(kind, name) for kind, known in BODIES.items() for name, check in known.items()
           if getattr(check, "__qualname__", "").startswith("number.")]


def limits(check):
    """(low, high, whole) of protocol.number"""
    inside = dict(zip(check.__code__.co_freevars, (c.cell_contents for c in check.__closure__)))
    return inside["low"], inside["high"], inside["whole"]


@pytest.mark.parametrize("kind, name", NUMBERS, ids=str)
def test_a_parameter_has_its_first_and_last_value_and_no_neighbor(kind, name):
    known = BODIES[kind]
    low, high, whole = limits(known[name])
    inside, outside = neighbors(int if whole else float, low, high)
    for value in inside:
        assert protocol.checked({name: value}, known) == {name: value}
    for value in (*outside, "1", True, [1], *((1.5,) if whole else ())):
        with pytest.raises(protocol.Refusal, match=name) as e:
            protocol.checked({name: value}, known)
        assert e.value.status == 400


def test_the_parameters_are_numbers_of_each_protocol():
    assert len(NUMBERS) > 25 and len({kind for kind, _ in NUMBERS}) >= 3
    assert ("chat", "temperature") in NUMBERS and ("responses", "top_p") in NUMBERS


def test_top_k_is_a_count_or_minus_1():
    checked = lambda k: protocol.checked({"top_k": k}, protocol.OF_CHAT)["top_k"]
    assert [checked(k) for k in (-1, 0, 1, 1 << 40)] == [0, 0, 1, 1 << 40]
    assert checked((1 << 63) - 1) == 1 << 40             # it means all tokens, too
    for k in (-2, 1 << 63, 0.5, "1"):
        with pytest.raises(protocol.Refusal):
            checked(k)


@pytest.mark.parametrize("n, length, ok", [(1, 1, True), (protocol.MOST_STOPS, 1, True),
                                           (protocol.MOST_STOPS + 1, 1, False),
                                           (1, protocol.LONGEST_STOP, True), (0, 1, True),
                                           (1, protocol.LONGEST_STOP + 1, False), (1, 0, False)])
def test_stops_have_a_number_and_a_length(n, length, ok):
    said = ["x" * length] * n
    if ok:
        assert protocol.checked({"stop": said}, protocol.OF_CHAT) == ({"stop": said} if n else {})
        return
    with pytest.raises(protocol.Refusal, match="stop"):
        protocol.checked({"stop": said}, protocol.OF_CHAT)


# ---- token ids
class Vocab:
    """As much of a Speaker as the checks of ids read"""
    class tokenizer:
        vocab = [b"a", b"b", b"c"]


def test_ids_to_explain_are_of_the_vocabulary_and_as_many_as_allowed():
    from nanoeuler_parts.serve.explain import Explainer
    explainer = Explainer(Vocab, "")
    for ids in ([0], [2], [0, 1, 2, 2]):
        explainer.check(ids, 4)
    for ids in ([], [0] * 5, [-1], [3], [0, 3], [True], ["0"], [1.0], None, 1):
        with pytest.raises(protocol.Refusal, match="expected 1 to 4 token ids from 0 to 2"):
            explainer.check(ids, 4)


def test_a_prompt_of_ids_is_of_the_vocabulary():
    import threading
    reader = protocol.Reader("m", Vocab, length=4, most=4, seconds=1, speculate=0)
    work = protocol.Work(threading.Event())
    assert reader.prompts([0, 2], work) == [[0, 2]]
    assert reader.prompts([[0, 1, 2, 2]], work) == [[0, 1, 2, 2]]       # as long as the context
    for prompt in ([-1], [3], [[0, 3]], [[]], [], [[0] * 5], [True], [None], {}):
        with pytest.raises(protocol.Refusal):
            reader.prompts(prompt, work)
    most = protocol.MOST_CHOICES
    assert len(reader.prompts([[1]] * most, work)) == most
    with pytest.raises(protocol.Refusal, match=f"expected 1 to {most} prompts, got {most + 1}"):
        reader.prompts([[1]] * (most + 1), work)


# ---- threads, vocabulary
def test_threads_have_their_range(monkeypatch):
    most = threads.most_threads()
    before = numba.get_num_threads()
    for n in (0, 1, most):
        threads.use_threads(n)
        assert n in (0, numba.get_num_threads())
    numba.set_num_threads(before)
    for n in (-1, most + 1):
        with pytest.raises(ne.UserError, match=f"--threads: expected 0 to {most}, found {n}"):
            threads.use_threads(n)


def test_a_vocabulary_has_its_range():
    assert bpe.train(b"ab" * 50, 257).vocab_size == 257      # all bytes, and </s>
    for n in (256, bpe.MAX_VOCAB + 1):
        with pytest.raises(ne.UserError, match="vocab"):
            bpe.train(b"ab" * 50, n)
