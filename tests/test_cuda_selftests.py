"""What the self-tests of the GPU program would see: rounding is no fault, a lost row is one."""
import contextlib
import functools
import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest
from dry_gpu import dry_run
from helpers import ROOT, TINY
from hypothesis import given
from hypothesis import strategies as st

import nanoeuler as ne
import nanoeuler_cuda as nc
from nanoeuler_parts.selftests import bounds, cases, gradient, ladder, run


@pytest.fixture(scope="module")
def op_tests():
    with dry_run() as device:
        device.gpu.compute_capability = (9, 0)
        return run.all_cases(quick=False)


@pytest.fixture(scope="module")
def smaller(op_tests):
    """Without the largest products, which take seconds."""
    return {name: [case for case in cases if max(np.size(y) for y in case.expected()) < 1 << 18]
            for name, cases in op_tests.items()}


def self_tests_are(monkeypatch, tests):
    """The program's self-tests are these, in one group."""
    monkeypatch.setattr(run, "case_groups", lambda quick: {"all": None})
    monkeypatch.setattr(run, "group_cases", lambda quick, group, path: tests)


def outputs(op_tests):
    """(kernel, dtype, expected output, the type that it is stored in) of all self-tests."""
    for name, cases in op_tests.items():
        for case in cases:
            for dtype, y in itertools.product(case.dtypes, case.expected()):
                summed = dtype == "bf16" and isinstance(y, bounds.Sum)
                yield name, dtype, y, "f32" if summed else dtype


def as_stored(y, kind):
    """What a device's array of that type is on the host: y, rounded."""
    if kind == "bf16":
        return nc.from_bf16(nc.to_bf16(np.asarray(y))).astype(np.float64)
    return np.array(y, nc.DTYPES[kind]).astype(np.float64)


def test_what_is_expected_does_not_depend_on_when_it_is_computed(dry):
    """A case computes it when outputs are compared, when the loop that made the case has ended."""
    class Eager(cases.OpTests):
        def add_case(self, name, expected, run, dtypes):
            found = [np.array(x) for x in expected()]
            super().add_case(name, lambda: found, run, dtypes)

    dry.gpu.compute_capability = (9, 0)
    for add in run.case_groups(True).values():
        at_once, later = Eager(True), cases.OpTests(True)
        add(at_once), add(later)
        for name, of_kernel in later.tests.items():
            for case, eager in zip(of_kernel, at_once.tests[name], strict=True):
                found = case.expected()
                assert all(np.array_equal(x, y, equal_nan=True)
                           for x, y in zip(found, eager.expected(), strict=True)), name


def test_only_the_groups_that_are_asked_for_are_run(dry, monkeypatch, capsys):
    monkeypatch.setattr(run, "case_groups", lambda quick: dict.fromkeys(("one", "two", "three")))
    monkeypatch.setattr(run, "group_cases", lambda quick, group, path: {f"of {group}": []})
    for only, expected in ((), ["one", "two", "three"]), (["three", "one"], ["three", "one"]):
        assert run.self_tests(only=only) == 0
        assert re.findall(r"^of (\w+)", capsys.readouterr().out, re.M) == expected
    with pytest.raises(ne.UserError, match="--only: four is .* one, two, three"):
        run.self_tests(only=["one", "four"])


@pytest.mark.parametrize("capability, rungs", [
    ((7, 5), "naive tiled"), ((8, 0), "naive tiled one-tile-mma mma"),
    ((9, 0), "naive tiled one-tile-mma one-tile-wgmma mma wgmma"),
    ((12, 0), "naive tiled one-tile-mma mma")])
def test_a_gpu_climbs_as_far_as_it_can(capability, rungs, dry):
    dry.gpu.compute_capability = capability
    assert [name for name, rung in ladder.RUNGS.items() if not ladder.reason_against(rung)] == (
        rungs.split())


def test_a_rung_names_its_kernel_and_multiplies(dry):
    dry.gpu.compute_capability = (9, 0)
    for name, rung in ladder.RUNGS.items():
        file, kernel = rung.kernel.split(": ")
        folder = ROOT if file == "nanoeuler_cuda.py" else ROOT / "nanoeuler_parts"
        assert f"def {kernel}(" in (folder / file).read_text(encoding="utf-8")
        dry.launches.clear()
        rung.make()(*(nc.new((128, 128), np.uint16) for _ in range(3)))
        [launch] = dry.launches              # a maker's kernel is named after both
        assert launch.name in (kernel, f"{kernel}_kernel"), name


@pytest.mark.parametrize("asked, word", [({"rung": "wmma"}, "expected one of naive, tiled"),
                                         ({"size": 100}, "--size is 100"), ({"size": 0}, "--size")])
def test_a_ladder_that_is_none(asked, word, dry):
    with pytest.raises(ne.UserError, match=word):
        ladder.ladder(**asked)


def test_rounding_is_no_fault(smaller):
    """An output rounded once, and in what is summed an error of five roundoffs in each number."""
    rng, seen = np.random.default_rng(1), set()
    for name, dtype, y, kind in outputs(smaller):
        seen.add(kind)
        sums = 1 + (kind != "bf16") * 5 * bounds.ROUNDOFF[kind] * rng.standard_normal(np.shape(y))
        assert bounds.fault(name, dtype, as_stored(y * sums, kind), y) == ""
    assert seen == set(nc.DTYPES)


def test_one_wrong_entry_is_a_fault_of_any_kernel(smaller):
    """By a small part of the largest entry, wherever it is; or not a number."""
    rng, part = np.random.default_rng(1), {"bf16": 0.01, "f32": 2e-5, "f64": 1e-13}
    for name, dtype, y, kind in outputs(smaller):
        x = as_stored(y, kind)
        at = int(rng.integers(x.size))
        small = part[kind]
        if name.startswith("rows"):          # x in 17 bits
            small = 6e-5
        if name.startswith("prompt"):        # twenty roundings
            small = 0.025
        if name == "muon, bf16":             # ten, each of which the polynomial makes larger
            small = 0.04
        for wrong in (x.flat[at] + small * (np.abs(y).max() or 1), np.nan, np.inf):
            spoilt = x.copy()
            spoilt.flat[at] = wrong
            assert bounds.fault(name, dtype, spoilt, y), (name, dtype, at)


@pytest.mark.parametrize("rung", ["", ", mma"])
def test_a_lost_row_and_a_hole_are_faults(rung, op_tests):
    """At the end of the product with 17,100 rows; at corners and inside of the largest dW."""
    [tall] = max((case.expected() for case in op_tests["matmul" + rung]), key=lambda y: len(y[0]))
    dw, semaphores = max((case.expected() for case in op_tests["matmul_dw" + rung]),
                         key=lambda y: y[0].size)
    assert not semaphores.any()
    assert tall.shape == (17_100, 8) and dw.shape == (1288, 2056)
    assert isinstance(dw, bounds.Sum) and not isinstance(tall, bounds.Sum)
    for row in range(len(tall)):
        lost = np.abs(tall[row]).max() / np.abs(tall).max()
        assert lost > 2 * bounds.bounds("matmul" + rung, "bf16")[1], row
    x = as_stored(tall, "bf16")
    x[-1] = 0
    assert bounds.fault("matmul" + rung, "bf16", x, tall)
    for m, n in ((0, 0), (640, 1000), (1280, 2048)):
        x = as_stored(dw, "f32")
        x[m:m + 8, n:n + 8] = 0
        assert bounds.relative_error(x, dw) < 1e-2           # too little for one bound for all
        assert bounds.fault("matmul_dw" + rung, "bf16", x, dw)


def test_a_fault_of_one_output_fails_the_self_tests(op_tests, dry, monkeypatch, capsys):
    """self_tests() reports what fault() says, of the last output as of the first."""
    case = max(op_tests["rmsnorm_forward"], key=lambda case: case.expected()[0].size)
    expected = case.expected()

    def spoilt(i, dtype):
        out = [as_stored(y, "f32" if isinstance(y, bounds.Sum) and dtype == "bf16" else dtype)
               for y in expected]
        if i < len(out):
            out[i].flat[-1] += 0.05 * np.abs(out[i]).max()
        return out

    for i in range(len(expected) + 1):
        spoilt_case = case._replace(run=functools.partial(spoilt, i))
        self_tests_are(monkeypatch, {"rmsnorm_forward": [spoilt_case]})
        assert run.self_tests() == (1 if i < len(expected) else 0)
        said = capsys.readouterr().out
        assert ("FAILED" in said) == ("at most" in said) == (i < len(expected)), said


def test_each_type_of_a_case_is_run_by_itself(dry, monkeypatch, capsys):
    """Twice, one after the other: so several processes can share the types."""
    ran = []
    compute = lambda i, dtype: ran.append((i, dtype)) or [np.ones(2)]
    self_tests_are(monkeypatch, {"one": [
        cases.Case(lambda: [np.ones(2)], functools.partial(compute, i), ("f32", "f64"))
        for i in (0, 1)]})
    assert run.self_tests() == 0
    assert ran == [(i, dtype) for i in (0, 1) for dtype in ("f32", "f64") for _ in range(2)]


def test_what_is_expected_is_computed_while_other_processes_run(dry, monkeypatch, capsys):
    """All of it before the first result is waited for, and once"""
    events = []

    @contextlib.contextmanager
    def processes(jobs, start):
        yield lambda function, *args: SimpleNamespace(
            result=lambda: events.append("result") or [(np.ones(2), True)])

    monkeypatch.setattr(run, "processes", processes)
    ops = cases.OpTests()
    for i in range(3):
        ops.add_case("one", lambda i=i: events.append(i) or [np.ones(2)], None, ("f32", "f64"))
    self_tests_are(monkeypatch, ops.tests)
    assert run.self_tests(jobs=2) == 0
    assert events == [0, 1, 2] + 6 * ["result"]


def test_two_runs_that_differ_fail_the_self_tests(dry, monkeypatch, capsys):
    y, counter = np.ones(3), itertools.count()
    compute = lambda dtype: [y * (1 + 2.0 ** -52 * next(counter))]
    self_tests_are(monkeypatch, {"one": [cases.Case(lambda: [y], compute, ("f64",))]})
    assert run.self_tests() == 1
    assert "two runs differ" in capsys.readouterr().out


def test_a_gpu_that_computes_nonsense_fails_every_self_test(smaller, dry, monkeypatch, capsys):
    self_tests_are(monkeypatch, smaller)
    dry.gpu.compute_capability = (9, 0)
    for fill in (0.0, 1e9, np.nan):
        dry.fill = fill
        assert run.self_tests() == 1, fill
        lines = [line for line in capsys.readouterr().out.splitlines()[3:-1] if line[0] != " "]
        assert len(lines) == len(smaller) and [x for x in lines if "FAILED" not in x] == []


def test_a_gradient_of_nan_fails_the_check(dry, monkeypatch):
    """Where losses agree, and all gradients of the CPU are zero."""
    zeros = lambda self, until, tokens, *_: np.zeros((len(tokens), self.cfg.n_mtp))
    monkeypatch.setattr(ne.Model, "run", zeros)
    monkeypatch.setitem(ne.PRESETS, "tiny", TINY)
    assert gradient.gradient_check("tiny", 2) == 0
    spoil = lambda self, *_: dry.bad.add(self.g_flat.gpu_data.address)
    dry.bad = set()
    monkeypatch.setattr(nc.Model, "gradient", spoil)
    assert gradient.gradient_check("tiny", 2) == 1
    with pytest.raises(nc.UserError, match="--batch is 0, expected at least 1"):
        gradient.gradient_check("tiny", 0)


@given(st.floats(width=32, allow_nan=False))
def test_bfloat16_is_the_nearest(x):
    """Ties to even: the neighbour whose last bit is 0."""
    x = np.float32(x)
    [bits] = nc.to_bf16(np.array([x]))
    near = lambda b: abs(float(nc.from_bf16(np.array([b], np.uint16))[0]) - float(x))
    if np.isinf(x) or np.isinf(nc.from_bf16(np.array([bits]))[0]):
        return
    for other in (int(bits) + 1, int(bits) - 1):
        assert near(bits) <= near(other & 0xFFFF) or (other & 0x7FFF) >= 0x7F80
        assert near(bits) != near(other & 0xFFFF) or not bits & 1 or x == 0


def test_bfloat16_survives():
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    x = nc.from_bf16(bits)
    number = ~np.isnan(x)
    assert np.array_equal(nc.to_bf16(x[number]), bits[number]) and np.isinf(x).sum() == 2
    assert np.isnan(nc.from_bf16(nc.to_bf16(x[~number]))).all()


@pytest.mark.parametrize("old", [(7, 5), (8, 0)])
def test_bfloat16_is_left_out_where_there_is_none(old, dry, monkeypatch, capsys):
    dry.gpu.compute_capability, seen = old, set()
    self_tests_are(monkeypatch, {"one": [cases.Case(
        lambda: [np.ones(1)], lambda dtype: seen.add(dtype) or [np.ones(1)], tuple(nc.DTYPES))]})
    assert run.self_tests() == 0
    assert seen == {"f32", "f64"} | ({"bf16"} if old == (8, 0) else set())
    zeros = lambda self, until, tokens, *_: np.zeros((len(tokens), self.cfg.n_mtp))
    monkeypatch.setattr(ne.Model, "run", zeros)
    monkeypatch.setitem(ne.PRESETS, "tiny", TINY)
    assert gradient.gradient_check("tiny", 2) == 0
    assert ("bfloat16" in capsys.readouterr().out.split("tensor")[-1]) == (old == (8, 0))
