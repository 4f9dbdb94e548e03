"""Every number that a user may set: its first and last value are accepted, their neighbors, NaN and
infinity are not."""
import ast
import dataclasses
import json
import math
import typing
from types import SimpleNamespace

import bpe
import numba
import numpy as np
import pytest
from conditions import ON_GPU
from helpers import ROOT, TINY, modules

import nanoeuler as ne
from nanoeuler_parts.chat import json_schema, prompts
from nanoeuler_parts.cli import add_verbs, Parser, VERBS
from nanoeuler_parts.files import texts
from nanoeuler_parts.interchange import gguf, huggingface, tokenizers
from nanoeuler_parts.lora import files as adapters
from nanoeuler_parts.lora.adapter import MOST_RANK
from nanoeuler_parts.lora.decoder import LoraDecoder
from nanoeuler_parts.lora.model import LoraModel
from nanoeuler_parts.machine import threads
from nanoeuler_parts.serve import ollama, protocol, responses, runs
from nanoeuler_parts.tokenizers import added
from nanoeuler_parts.tools import evaluation, plot

pytestmark = pytest.mark.unit


def settings_classes():
    """All kinds of settings: of a model, of sampling, of runs, of each verb"""
    modules()
    found, new = [], [ne.Settings]
    while new:
        new = [sub for cls in new for sub in cls.__subclasses__() if sub not in found]
        found += [cls for cls in new if dataclasses.is_dataclass(cls) and (
            cls.__module__.split(".")[0].startswith("nanoeuler"))]
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


# ---- all other ranges of the programs
class Accepted(Exception):
    """The value is inside the range. Its later use is another question."""


def accept(*args, **options):
    raise Accepted


def plain_pass(T):
    model = SimpleNamespace(cfg=TINY, constants=None, flat=np.zeros(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ne, "check_ids", accept)
        ne.PlainModel.run(model, np.zeros((1, T), np.int32), None, None, 1, False)


def fast_pass(T):
    model = SimpleNamespace(cfg=TINY, prepare=accept)
    ne.Model.run(model, ne.LOSS, np.zeros((1, T), np.int32))


def part(slot=0, ids=(0, 0), wanted=1):
    ne.Decoder.check(SimpleNamespace(cfg=TINY, held_ids=[[], []]), [ne.Part(slot, [*ids], wanted)])


def messages(n):
    protocol.Reader.list_of(None, [{}] * n)


def tokens_asked(low):
    """-1 is a number of its own: as many as fit."""
    return lambda n: protocol.length(low)("x", n)


def in_log(step, tmp_path):
    assert runs.record_in(f'{{"step": {step}, "loss": 0.5}}')


def on_plot(step, tmp_path):
    log = tmp_path / "a.jsonl"
    log.write_text(f'{{"step": {step}, "loss": 0.5}}', encoding="utf-8")
    assert plot.read_curve(log, "loss")


def wrong_ones(most, capsys):
    """Of three wrong answers: are they fewer than all, so that a line counts the rest?"""
    q = SimpleNamespace(prompt="a", choices=[], answers=["b"])
    evaluation.print_wrong([q] * 3, [{"reply": "c", "correct": False}] * 3, most)
    assert "more wrong" in capsys.readouterr().out


def choice(n):
    """A choice of n tokens, after one, in a context of 3"""
    tokenizer = SimpleNamespace(specials={}, encode_whole=lambda text: np.zeros(
        1 + n * text.endswith("x"), np.int32))
    c = SimpleNamespace(tokenizer=tokenizer, state=ne.State(), cfg=SimpleNamespace(seq_len=3))
    evaluation.choice_rows([SimpleNamespace(prompt="a", choices=["x"], place="here")], c)


def replies_at_once(batch):
    with pytest.raises(ne.UserError, match="would replace an input file"):       # the next check
        prompts.generate_file("a", "b", "a", None, batch, False, False, None)


def id_of_file(k):
    """0 and the largest id leave a gap, which is another fault."""
    with pytest.raises(ne.UserError, match="expected token ids below"):
        added.fill({"model": {"vocab": {"a": 5000, "b": k}}})


def end_of_gguf(k):
    tokenizers.need_words({"model": "gpt2", "tokens": ["a", "b"], "eos_token_id": k})


def end_of_answers(k, tmp_path, capsys):
    """An ordinary token, and not one that the tokenizer lacks"""
    settings = SimpleNamespace(at=tmp_path, end_ids=lambda: ("generation_config.json", [k]))
    vocab = SimpleNamespace(specials={}, vocab=[b"a", b"b"], vocab_size=2)
    huggingface.Settings.ends(settings, vocab)
    assert "the ordinary token" in capsys.readouterr().err


def kinds(n):
    assert json_schema.is_types(["string"] * n)


def within(n):
    assert json_schema.within(n, {"minItems": 2, "maxItems": 3}, "Items")


def fits_limits(n):
    assert json_schema.Compiler.fits_limits(None, n, {"minimum": 2, "maximum": 3}, "here")


def ends_in_gguf(n, capsys):
    """Tokens that end an answer: others than 1 to 3 get a note."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gguf.GGUFWriter", accept)
        patch.setattr(gguf, "different_ends", lambda c: range(n))
        with pytest.raises(Accepted):
            gguf.write_gguf("a.gguf", SimpleNamespace(
                cfg=TINY, tokenizer=SimpleNamespace(begins=())), "f32")
    assert "GGUF has places" not in capsys.readouterr().err


def lora_pass(n):
    model = SimpleNamespace(cfg=TINY, prepare=accept)
    rows = np.zeros((1, n), np.int32)
    LoraModel.run(model, None, rows, rows)


def adapter_of_slot(k):
    """Of two adapters; -1: none"""
    LoraDecoder.use(SimpleNamespace(held_ids=[[]], stack=SimpleNamespace(scale=[1, 1]),
                                    of_slot=[0]), k)


def peft_config(tmp_path, **values):
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **values}
    (tmp_path / adapters.CONFIG).write_text(json.dumps(config), encoding="utf-8")
    adapters.settings_in(str(tmp_path), adapters.config_in(str(tmp_path)))


def rank_of_peft(r, tmp_path):
    peft_config(tmp_path, r=r)


def alpha_of_peft(alpha, tmp_path):
    peft_config(tmp_path, lora_alpha=alpha)


BYTES = bpe.Tokenizer({c: i for i, c in enumerate(bpe.CHAR_OF_ID)}, [])
V, T = TINY.vocab_size, TINY.seq_len
# {function with ranges: for each of its ranges, a call that fails outside, and the two ends}
RANGES = {
    "PlainModel.run": [(plain_pass, 1, T)], "Model.run": [(fast_pass, 1, T)],
    "Decoder.check": [
        (lambda slot: part(slot=slot), 0, 1), (lambda n: part(wanted=n), 0, 2),
        (lambda k: part(ids=[k]), 0, V - 1)],
    "train": [(lambda n: bpe.train(b"ab" * 50, n), 257, bpe.MAX_VOCAB)],
    "Tokenizer.decode": [(lambda k: BYTES.decode([k]), 0, 255)],
    "fill": [(id_of_file, 0, bpe.MAX_VOCAB - 1)],
    "length.check": [(tokens_asked(0), 0, protocol.WHOLE), (tokens_asked(1), 1, protocol.WHOLE)],
    "Reader.list_of": [(messages, 1, protocol.MOST_MESSAGES)],
    "record_in": [(in_log, 0, (1 << 53) - 1)], "read_curve": [(on_plot, 0, (1 << 53) - 1)],
    "checked_ids": [(lambda k: texts.checked_ids(np.array([1, k, 1]), 3), 0, 2)],
    "print_wrong": [(wrong_ones, 1, 2)], "choice_rows": [(choice, 1, 3)],
    "right_choice": [(lambda k: evaluation.right_choice(k, ["a", "b", "c"]), 0, 2)],
    "generate_file": [(replies_at_once, 1, 1 << 16)],
    "need_words": [(end_of_gguf, 0, 1)], "Settings.ends": [(end_of_answers, 0, 1)],
    "is_types": [(kinds, 1, len(json_schema.TYPES))], "within": [(within, 2, 3)],
    "Compiler.fits_limits": [(fits_limits, 2, 3)],
    "write_gguf": [(ends_in_gguf, 1, len(gguf.ENDS))],
    "LoraModel.run": [(lora_pass, 1, T)], "LoraDecoder.use": [(adapter_of_slot, -1, 1)],
    "settings_in": [(rank_of_peft, 1, MOST_RANK), (alpha_of_peft, 1, 10**6)],
}
# {function with ranges: file and name of a test that tries their ends}
ELSEWHERE = {
    "Settings.check": ("test_ranges.py", "test_a_setting_has_its_first_and_last_value"),
    "number.check": ("test_ranges.py", "test_a_parameter_has_its_first_and_last_value"),
    "stops": ("test_ranges.py", "test_stops_have_a_number_and_a_length"),
    "Explainer.check": ("test_ranges.py", "test_ids_to_explain_are_of_the_vocabulary"),
    "Reader.prompts": ("test_ranges.py", "test_a_prompt_of_ids_is_of_the_vocabulary"),
    "Reader.ids_of": ("test_ranges.py", "test_a_prompt_of_ids_is_of_the_vocabulary"),
    "plain_main": ("test_plain.py", "test_wrong_arguments_are_rejected_before_the_work"),
    "use_threads": ("test_ranges.py", "test_threads_have_their_range"),
    "Server.explain": ("test_serve.py", "test_attention_weights"),
    "read_gguf": ("test_gguf.py", "test_the_number_of_parts_has_its_range"),
    "Trie.mask_of_texts": ("test_json_mode.py", "test_masks_are_what_the_automaton_reads"),
    "Digits.ends": ("test_json_mode.py", "test_what_other_schemas_accept"),
    "Reader.newest_exchanges": ("test_serve_limits.py", "test_an_estimate_by_characters_decides"),
}


def functions_with_ranges():
    """{function: number of its comparisons such as low <= x <= high}"""
    found = {}

    def visit(node, function):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".removeprefix(".")
        if isinstance(node, ast.Compare) and len(node.ops) > 1 and all(
                isinstance(op, ast.Lt | ast.LtE) for op in node.ops):
            found[function] = found.get(function, 0) + 1
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    for path in [ROOT / "bpe.py", ROOT / "nanoeuler.py", *ROOT.glob("nanoeuler_parts/**/*.py")]:
        if not str(path.relative_to(ROOT)).startswith(ON_GPU):
            visit(ast.parse(path.read_bytes()), "")
    return found


def test_the_ends_of_each_range_are_tried():
    found = functions_with_ranges()
    assert found.keys() == RANGES.keys() | ELSEWHERE.keys(), "try the ends of a new range"
    for function, ranges in RANGES.items():
        assert len(ranges) >= found[function], f"{function} has {found[function]} ranges"
    for file, test in ELSEWHERE.values():
        assert f"def {test}" in (ROOT / "tests" / file).read_text(encoding="utf-8"), test


def is_inside(call, value, **fixtures):
    known = call.__code__.co_varnames[1:call.__code__.co_argcount]
    try:
        call(value, **{name: fixtures[name] for name in known if name in fixtures})
    except Accepted:
        return True
    except (ne.UserError, protocol.Refusal, AssertionError):
        return False
    return True


@pytest.mark.parametrize("function", RANGES)
def test_a_range_has_its_first_and_last_value_and_no_neighbor(function, tmp_path, capsys):
    for call, low, high in RANGES[function]:
        tried = (low - 1, low, high, high + 1)
        if (function, low) == ("length.check", 0):
            tried = (low - 2, *tried[1:])    # -1 has a meaning of its own
        assert [is_inside(call, n, tmp_path=tmp_path, capsys=capsys) for n in tried] == [
            False, True, True, False], (function, tried)
