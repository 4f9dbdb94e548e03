"""The CPU benchmarks without measuring: shares of the CPU, tables, where texts are cut."""
import os
import re
import types

import bench_cpu
import bench_llama
import common
import pytest
from helpers import TEXT, needs

pytestmark = pytest.mark.unit


def test_the_share_of_others_by_hand():
    """Of 100 ticks 40 were idle, 45 our own."""
    before = bench_cpu.Ticks(all=1000, busy=600, own=100)
    after = bench_cpu.Ticks(all=1100, busy=660, own=145)
    assert bench_cpu.foreign_share(before, after) == pytest.approx(0.15)


def test_what_was_not_measured_is_not_nothing(monkeypatch):
    """Where there is no /proc, a round counts, and its table says so."""
    ticks = bench_cpu.Ticks(1000, 600, 100)
    assert bench_cpu.foreign_share(None, ticks) is bench_cpu.foreign_share(ticks, ticks) is None
    monkeypatch.setattr(bench_cpu, "cpu_ticks", lambda pids: None)
    worker = types.SimpleNamespace(process=types.SimpleNamespace(pid=1), first=1.0,
                                   ask=lambda n: [0.5] * n)
    workers = {bench_cpu.BASE: worker}
    turns = bench_cpu.take_turns(workers, 3, types.SimpleNamespace(rounds=2, lock=None))
    result = bench_cpu.summary(turns, workers)
    assert result["others_share"] == [None, None] and result["repeated_rounds"] == 0
    assert "was not measured" in bench_cpu.train_table(result, 100)[-1]
    result["others_share"] = [0.01, 0.002]
    assert "at most 1.0 %" in bench_cpu.train_table(result, 100)[-1]


def test_ticks_by_hand(tmp_path, monkeypatch):
    """Of the machine: idle and waiting time is not busy.  Of processes: with their children, and
    whatever their names are."""
    monkeypatch.setattr(bench_cpu, "pathlib", types.SimpleNamespace(
        Path=lambda path: tmp_path / path.lstrip("/")))
    files = {"proc/stat": "cpu  1 20 300 4000 50000 600000 7000000 80000000 9 9\ncpu0 9 9 9 9\n",
             "proc/17/stat": f"17 (a) b ) S {'5 ' * 10}1 20 300 4000 {'7 ' * 20}\n",
             "proc/18/stat": f"18 (x) R {'5 ' * 10}10000 0 0 50000 {'7 ' * 20}\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert bench_cpu.cpu_ticks([17, 18]) == bench_cpu.Ticks(
        all=87_654_321, busy=87_600_321, own=64_321)
    assert bench_cpu.cpu_ticks([]).own == 0
    assert bench_cpu.cpu_ticks([19]) is None             # that process has ended


@pytest.mark.skipif(not bench_cpu.pathlib.Path("/proc/stat").exists(), reason="needs /proc")
def test_ticks_of_this_machine():
    """Its own /proc can be read, and this process has used some time."""
    ticks = bench_cpu.cpu_ticks([os.getpid()])
    used, _, of_children, _, _ = os.times()
    per_second = os.sysconf("SC_CLK_TCK")
    assert ticks.all >= ticks.busy > 0
    assert ticks.own >= (used + of_children) * per_second - 2 * per_second


def test_a_cut_is_where_a_character_starts():
    data = "a\u00e9\u4e2d\U0001f600b".encode()
    starts = {0, 1, 3, 6, 10, len(data)}
    for at in range(len(data) + 1):
        cut = common.character_start(data, at)
        assert cut == max(x for x in starts if x <= at)
        data[:cut].decode(), data[cut:].decode()


def test_training_is_timed_on_a_text_that_is_not_ascii(monkeypatch):
    """Its parts for `tokenizers` are whole characters and together the whole text, also where the
    number of bytes that are asked for ends within a character.  Both engines find the same merges,
    or the benchmark stops."""
    needs("tokenizers")
    import bench_bpe
    monkeypatch.setattr(bench_bpe, "MB", 100)
    data = ("caf\u00e9 \u4e2d\u6587 words and words\n" * 40).encode()
    inside = [k for k in range(400, len(data)) if data[k] & 0xC0 == 0x80]
    for size in inside[:3]:
        results, part = {}, bench_bpe.first_bytes(data, size)
        assert size - 4 < len(part) < size and data.startswith(part)
        parts = bench_bpe.parts_of(part)
        assert b"".join(parts) == part and len(parts) > 2
        assert all(len(x.decode()) > 0 for x in parts)
        bench_bpe.bench_train(results, part, 2)
        [result] = results.values()
        assert result["bytes"] == len(part) and {*result["rows"]} == {"bpe.py", "tokenizers"}
        for row in result["rows"].values():
            assert len(row["seconds"]) == 2 and min(row["mb_per_s"]) > 0


def test_other_merges_are_not_timed(monkeypatch):
    needs("tokenizers")
    import bpe

    import bench_bpe
    train = bpe.train
    monkeypatch.setattr(bpe, "train", lambda data, *args: train(data.upper(), *args))
    with pytest.raises(SystemExit, match="the merges differ"):
        bench_bpe.bench_train({}, b"words and words and other words\n" * 40, 1)


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """train(minutes) of bench/nanogpt_demo.py on a small text, and how often it evaluated."""
    needs("torch")
    import nanogpt_demo
    (tmp_path / "text.txt").write_bytes(TEXT.read_bytes()[:8000])
    evaluated = []
    tail_nats = nanogpt_demo.tail_nats
    monkeypatch.setattr(nanogpt_demo, "tail_nats", lambda *args: (
        evaluated.append(args), tail_nats(*args))[1])
    monkeypatch.setattr(nanogpt_demo, "ITERATIONS", 3)
    monkeypatch.setattr(nanogpt_demo, "WARMUP", 2)
    return lambda minutes: nanogpt_demo.train(tmp_path / "text.txt", minutes, 1), evaluated


def test_the_readme_row_evaluates_once_after_nanogpts_number_of_steps(demo):
    """nanoGPT ends after iteration number ITERATIONS, counted from 0."""
    train, evaluated = demo
    assert train(None)["iterations"] == 4 and len(evaluated) == 1


def test_minutes_that_leave_none_to_train_are_an_error(demo):
    train, _ = demo
    with pytest.raises(SystemExit, match="--minutes 1e-06: no time is left"):
        train(1e-6)


@pytest.fixture
def published(tmp_path, monkeypatch):
    """An empty bench/results/ and bench/out/, and a clean tree at commit abc1234."""
    import record
    out, results = tmp_path / "out", tmp_path / "results"
    out.mkdir()
    results.mkdir()
    monkeypatch.setattr(record, "RESULTS", results)
    monkeypatch.setattr(record, "MANIFEST", results / "MANIFEST.toml")
    monkeypatch.setattr(record, "out_folder", lambda: out)
    monkeypatch.setattr(record, "git", lambda *args: "abc1234" if args[0] == "rev-parse" else "")
    (out / "a.json").write_text("1", encoding="utf-8")
    return record


def test_a_recorded_result_has_what_made_it(published, capsys):
    published.main(["a \"quoted\" name", "a.json", "--command", "python bench/a.py --b 'c'"])
    [(name, entry)] = published.entries().items()
    assert name == 'a "quoted" name' and entry["files"] == ["a.json"]
    assert entry["commit"] == "abc1234" and "numba " in entry["versions"]
    assert published.complaints() == [] and (published.RESULTS / "a.json").exists()
    published.main([name, "a.json", "--command", "another"])             # replaces the entry
    assert published.entries()[name]["command"] == "another"
    with pytest.raises(SystemExit):
        published.main(["b", "none.json", "--command", "x"])
    assert "there is no " in capsys.readouterr().err


def test_what_is_measured_in_a_changed_tree_is_not_recorded(published, monkeypatch):
    monkeypatch.setattr(published, "git", lambda *args: " M nanoeuler.py")
    with pytest.raises(SystemExit):
        published.main(["a", "a.json", "--command", "x"])
    assert published.entries() == {} and published.complaints() == []


def test_gaps_of_the_manifest_are_seen(published):
    published.main(["a", "a.json", "--command", "x"])
    (published.RESULTS / "stray.txt").touch()
    assert published.complaints() == ["stray.txt has no entry"]
    (published.RESULTS / "stray.txt").unlink()
    (published.RESULTS / "a.json").unlink()
    assert published.complaints() == ["a.json is not in the folder"]
    (published.RESULTS / "a.json").touch()
    [entry] = published.entries().values()
    published.write({"a": entry, "b": {**entry, "commit": ""}})
    assert published.complaints() == ["b: commit is missing or empty", "a.json has two entries"]
    del entry["commit"]                      # nobody wrote it down before there was a manifest
    published.write({"a": entry})
    assert published.complaints() == ["a: commit is missing or empty"]
    published.write({"a": {**entry, "date": "stored 2026-11-25"}})
    assert published.complaints() == []
    published.write({"a": {**entry, "date": "stored 2026-11-25", "command": ""}})
    assert published.complaints() == ["a: command is missing or empty"]


def test_every_published_result_has_a_command_that_can_be_typed():
    import record
    for name, entry in record.entries().items():
        said = [text for key, text in entry.items() if "not recorded" in text]
        assert not said and re.search(r"\b(python|make) ", entry["command"]), name


def test_tables_beside_llama_cpp():
    """A token of int8 in 4 ms, where a plain sum reads 40 GB/s: 33.6 GB/s, 84 %"""
    def took(seconds):
        return {"median_s": seconds, "min_s": seconds, "max_s": seconds, "rounds_s": [seconds]}

    quiet = {"others_share": [0.0], "repeated_rounds": 0}
    token = {"NanoEuler, int8": (0.004, 1), bench_llama.BASE: (0.02, 4)}
    rows = {row: {**took(seconds), "bytes_per_weight": size, "bits_per_token": 4.8,
                  "same_text": True} for row, (seconds, size) in token.items()}
    m = {"gpu": None, "cpu": "A", "cpu_detail": "B", "cores": 2, "threads": 2,
         "load_average": (0.0, 0.0, 0.0), "date": "today", "llama.cpp": "AVX512 = 1",
         "versions": {"python": "3"}, "bytes_per_second": 40e9, "memory": took(0.0134),
         "rows": rows, "prompt": {row: took(0.25) for row in rows},
         "batch": {row: took(0.016) for row in rows},
         "others": dict.fromkeys(("token", "prompt", "batch"), quiet)}
    text = bench_llama.markdown(m)
    line = "| NanoEuler, int8 | 4.0 | 4.0 - 4.0 | 250.0 | 5.00x | 84% |"
    assert line in text and "llama.cpp says: AVX512 = 1" in text and "40.0 GB/s" in text
    assert "| NanoEuler, int8 | 250.0 | 250.0 - 250.0 | 1,024 | 1.00x |" in text
    assert "| NanoEuler, int8 | 16.0 | 16.0 - 16.0 | 500.0 | 2.00 | 1.00x |" in text
    alone = {key: value for key, value in m.items() if key not in ("prompt", "batch")}
    text = bench_llama.markdown({**alone, "gpu": "C", "bytes_per_second": None})
    assert "texts at once" not in text and "| 5.00x | - |" in text
