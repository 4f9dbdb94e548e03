"""`list` shows the checkpoints in a folder, reads only their headers, and never fails because of a
file."""
import builtins
import json
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import TINY, put_together, random_flat, refused, run, take_apart, told

import bpe
import nanoeuler as ne
from nanoeuler_parts.chat.models import models_in, newest_model
from nanoeuler_parts.checkpoint import bundled
from nanoeuler_parts.checkpoint.bundled import BUNDLED
from nanoeuler_parts.files.safetensors import read_meta
from nanoeuler_parts.flags import typed
from nanoeuler_parts.lora.adapter import Lora, n_entries, tensors_of
from nanoeuler_parts.lora.files import write_adapter
from nanoeuler_parts.tools.listing import age

pytestmark = pytest.mark.cli
NOW = 2e9


def write(path, changed=0, **state):
    """A tiny checkpoint that was written so many seconds ago."""
    tokenizer = bpe.train(b"to be or not to be, that is the question", TINY.vocab_size)
    flat = random_flat(TINY, 1, "f4")
    ne.write_checkpoint(str(path), TINY, tokenizer, ne.State(**state), flat, (flat, flat * flat))
    os.utime(path, (NOW - changed, NOW - changed))
    return Path(path)


@pytest.fixture
def here(elsewhere, monkeypatch):
    """An empty working directory.  The bundled model is in another one; the time stands still."""
    (elsewhere / "data").mkdir()
    (elsewhere / "here").mkdir()
    monkeypatch.setattr("nanoeuler_parts.checkpoint.bundled.SHIPPED",
                        str(write(elsewhere / "data/model.bin", kind="chat")))
    monkeypatch.setattr(time, "time", lambda: NOW)
    monkeypatch.chdir(elsewhere / "here")
    return elsewhere / "here"


def listed(*args):
    return [json.loads(line) for line in told("list", "--json", *args).splitlines()]


def files(*args):
    return [x["file"] for x in listed(*args)]


def test_a_row_says_what_info_says(here):
    path = write("a.bin", 200, kind="chat", step=1200, n_steps=3000, bits_per_byte=1.98761)
    run("quantize", path, "small.bin")
    os.utime("small.bin", (NOW - 7200, NOW - 7200))
    rows = [line[2:].split("  ") for line in told("list").splitlines()[:4]]
    head, first, second, last = [[x.strip() for x in row if x.strip()] for row in rows]
    n = f"{ne.n_params(TINY):,}"
    assert head == ["file", "MB", "kind", "parameters", "matrices", "bits/byte", "steps", "age"]
    assert first == ["a.bin", "0.1", "chat", n, "float32", "1.9876", "1,200 of 3,000", "3 minutes"]
    assert second == ["small.bin", "0.0", "chat", n, "int8", "1.9876", "1,200 of 3,000", "2 hours"]
    assert last == ["bundled", "0.1", "chat", n, "float32", "-", "-", "-"]
    [entry, *_] = listed()
    assert entry == {"file": "a.bin", "modified": NOW - 200, "bytes": os.path.getsize("a.bin"),
                     "kind": "chat", "parameters": ne.n_params(TINY), "matrices": "float32",
                     "bits_per_byte": 1.98761, "step": 1200, "n_steps": 3000, "default": True}


@pytest.mark.parametrize("kind", ["f32", "bf16", "int8"])
def test_the_format_of_the_matrices_is_that_of_info(kind, here):
    tokenizer = bpe.train(b"to be or not to be, that is the question", TINY.vocab_size)
    ne.write_checkpoint("a.bin", TINY, tokenizer, ne.State(), random_flat(TINY, 1, "f4"),
                        matrices=kind)
    [row] = [line for line in told("info", "a.bin").splitlines() if "matrices" in line]
    want = re.match(r" +matrices +(\w+)", row)[1]
    assert want == {"f32": "float32", "bf16": "bfloat16", "int8": "int8"}[kind]
    assert listed()[0]["matrices"] == want and f"  {want} " in told("list").splitlines()[1]


def test_info_names_no_value_that_is_not_there(here):
    """A model that Python code wrote, or quantized from one, names no training text."""
    write("a.bin")
    run("quantize", "a.bin", "b.bin")
    for name in "a.bin", "b.bin":
        said = told("info", name)
        assert re.search(r"\n  text +unknown\n", said) and "None" not in said


def test_the_newest_comes_first_and_the_star_marks_the_choice_of_chat(here):
    for name, changed in (("b.bin", 5), ("a.bin", 9), ("c.bin", 7), (".hidden.bin", 1)):
        write(name, changed)
    assert files() == ["b.bin", "c.bin", "a.bin", "bundled"]
    assert told("list").splitlines()[1].startswith("* b.bin ") and newest_model() == "b.bin"
    assert [x["file"] for x in listed() if x["default"]] == ["b.bin"]


def test_a_folder_without_models_says_how_to_train_one(here):
    said = told("list")
    assert "* bundled" in said and "no checkpoint found here; train one with:" in said
    assert f"{typed('nanoeuler.py')} train" in said
    assert [(x["file"], x["default"]) for x in listed()] == [("bundled", True)]
    os.remove(bundled.SHIPPED)
    assert told("list").startswith("\nno checkpoint found here") and listed() == []


def adapter(folder, changed, **state):
    """Writes an adapter of rank 2 for the bundled model of these tests."""
    os.makedirs(folder)
    lora, s = Lora(2, 4.0), ne.State(source="bundled", **state)
    flat = np.zeros(n_entries(TINY, 2), np.float32)
    write_adapter(folder, TINY, lora, flat, s, "")
    os.utime(f"{folder}/adapter_model.safetensors", (NOW - changed, NOW - changed))


def test_adapters_have_a_table_of_their_own(here):
    adapter("mill", 120, step=12, n_steps=38, bits_per_byte=0.5)
    adapter("mill/best", 60, step=9)
    write("mill/run.bin")                    # --resume reads it; it is no model
    said = told("list")
    assert "no checkpoint found" not in said
    head, row = [[x.strip() for x in line[2:].split("  ") if x.strip()]
                 for line in said.split("\n\n")[1].splitlines()]
    n = sum(x.size for pair in tensors_of(TINY, Lora(2, 4.0), np.zeros(n_entries(TINY, 2)))
            .values() for x in pair)
    assert head == ["adapter", "MB", "model", "parameters", "rank", "bits/byte", "steps", "age"]
    assert row == ["mill", "0.0", "bundled", f"{n:,}", "2", "0.5000", "12 of 38", "2 minutes"]
    assert [x["file"] for x in listed("mill") if x["kind"] == "adapter"] == ["mill/best", "mill"]
    found = [x["file"] for x in listed("--recursive", ".", "mill")]
    assert found == ["bundled", "mill/best", "mill"]
    Path("mill/adapter_config.json").write_text("{}", encoding="utf-8")
    [entry] = [x for x in listed() if x["kind"] == "adapter"]
    assert entry["problem"] == "unreadable" and "unreadable" in told("list")


def test_folders_are_listed_once_and_inner_ones_on_request(here):
    for folder in ("one", "one/two", "one/.git"):
        (here / folder).mkdir()
        write(f"{folder}/x.bin", len(folder))
    write("own.bin", 99)
    assert files("one", "one", "./one/") == ["one/x.bin", "bundled"]
    assert files("one", "--recursive") == ["one/x.bin", "one/two/x.bin", "bundled"]
    assert files("--recursive") == ["one/x.bin", "one/two/x.bin", "own.bin", "bundled"]
    assert not any(x["default"] for x in listed("one"))      # the newest model is own.bin
    assert "use this model" not in told("list", "one")
    assert files(os.path.dirname(bundled.SHIPPED)) == ["bundled"]         # and not as a file, too


def test_a_name_that_is_no_folder_is_rejected(here, capsys):
    write("a.bin")
    refused(capsys, "list", "nowhere", words=["nowhere: No such folder"])
    refused(capsys, "list", "a.bin", words=["a.bin: expected a folder, found a file", "info"])
    refused(capsys, "list", "", words=["expected a name, found an empty one"])


@pytest.mark.parametrize("end", [64, 200, -1])
def test_an_incomplete_file_is_shown_as_such(end, here, capsys):
    whole = write("a.bin").read_bytes()
    (here / "a.bin").write_bytes(whole[:end])
    assert [x.get("problem") for x in listed()] == ["incomplete", None]
    said = told("list")
    assert "incomplete" in said and "`info FILE` reports what is wrong" in said
    refused(capsys, "info", "a.bin", words=["incomplete"])


@pytest.mark.parametrize("change", [
    {"config": "{}}"}, {"config": "[1]"}, {"state": '{"new": 1}'}, {"state": '{"step": -1}'},
    {"config": '{"n_layer": 0}'}, {"state": None}, {"matrices": "int4"}])
def test_a_header_that_is_damaged_or_newer_is_unreadable(change, here):
    header, data = take_apart(write(here / "a.bin"))
    meta = header["__metadata__"] | change
    header["__metadata__"] = {key: value for key, value in meta.items() if value is not None}
    text = json.dumps(header, separators=(",", ":")).encode()
    (here / "a.bin").write_bytes(len(text).to_bytes(8, "little") + text + data)
    assert [x.get("problem") for x in listed()] == ["unreadable", None]


def test_files_of_others_are_left_out(here):
    write("a.bin")
    (here / "foreign.bin").write_bytes(b"\x7fELF" + bytes(100))
    (here / "empty.bin").touch()
    (here / "folder.bin").mkdir()
    (here / "dangling.bin").symlink_to("nothing")
    (here / "loop.bin").symlink_to("loop.bin")
    os.mkfifo(here / "pipe.bin")             # opening it would wait for a writer
    (here / "link.bin").symlink_to("a.bin")
    assert sorted(files()) == ["a.bin", "bundled", "link.bin"]


def test_a_file_that_cannot_be_opened_is_shown(here, monkeypatch):
    """As root, who may open all files, in place of chmod 000"""
    write("a.bin")
    opened = builtins.open

    def not_allowed(path, *args, **options):
        if str(path) == "a.bin":
            raise PermissionError(13, "Permission denied", path)
        return opened(path, *args, **options)

    monkeypatch.setattr(builtins, "open", not_allowed)
    assert [x.get("problem") for x in listed()] == ["unreadable", None]


def test_names_do_not_control_the_terminal(here):
    write("a\n\x1b[31m.bin")
    said = told("list")
    assert r"a\n\x1b[31m.bin" in said and "\x1b" not in said
    assert files() == ["a\n\x1b[31m.bin", "bundled"]


def test_a_name_that_no_request_can_contain_is_left_out_with_a_note(here, monkeypatch, capsys):
    monkeypatch.setattr("nanoeuler_parts.chat.models.LEFT_OUT", set())
    write(os.fsdecode(b"\xff.bin"))
    write("a.bin", 9)
    for times in (1, 0):
        assert [name for _, name in models_in(".")] == ["a.bin"]
        assert capsys.readouterr().err.count(
            r"\udcff.bin is left out, as its name is not valid UTF-8; rename it") == times
    assert newest_model() == "a.bin"


def test_many_newer_files_of_others_hide_no_model(here, monkeypatch):
    """The limit counts checkpoints, and another one the files that are opened."""
    monkeypatch.setattr("nanoeuler_parts.chat.models.MOST_MODELS", 3)
    write("a.bin", 9)
    for i in range(6):
        (here / f"{i}.bin").write_bytes(b"x" * (2000 * (i % 2)))
        os.utime(f"{i}.bin", (NOW, NOW))
    assert newest_model() == "a.bin" and files() == ["a.bin", BUNDLED]
    monkeypatch.setattr("nanoeuler_parts.chat.models.MOST_FILES", 6)
    assert newest_model() is None


def test_few_files_are_opened_and_their_data_is_not_read(here, monkeypatch, capsys):
    """A flipped bit of the data does not show: only `info` verifies the checksum."""
    for i in range(4):
        write(f"{i}.bin", i)
    raw = bytearray((here / "0.bin").read_bytes())
    raw[-1] ^= 1
    (here / "0.bin").write_bytes(raw)
    os.utime("0.bin", (NOW, NOW))
    refused(capsys, "info", "0.bin", words=["checksum"])
    monkeypatch.setattr("nanoeuler_parts.tools.listing.MOST_MODELS", 2)
    assert files() == ["0.bin", "1.bin", "bundled"]
    said = capsys.readouterr().err
    assert "4 files that may be checkpoints; only the newest 2 are opened" in said


def test_the_header_is_checked_as_in_a_whole_read(here):
    """By the sizes of the file and of each tensor"""
    header, data = take_apart(write(here / "a.bin"))
    assert read_meta("a.bin")["format"] == "nanoeuler"
    *_, last = header
    header[last]["data_offsets"][0] -= 4
    put_together(here / "b.bin", header, data)
    with pytest.raises(bpe.UserError, match="expected a tensor from byte"):
        read_meta("b.bin")
    header[last]["data_offsets"][0] += 4
    put_together(here / "b.bin", header, data + b"more")
    with pytest.raises(bpe.UserError, match="bytes of data, found"):
        read_meta("b.bin")
    start = header[last]["data_offsets"][0]
    header[last]["data_offsets"][1] = start - 4
    put_together(here / "b.bin", header, data)
    with pytest.raises(bpe.UserError, match=f"from byte {start} on, found {start} to {start - 4}"):
        read_meta("b.bin")


@pytest.mark.parametrize("seconds, said", [
    (-5, "0 seconds"), (1, "1 second"), (59.9, "59 seconds"), (60, "1 minute"), (7199, "1 hour"),
    (86_400, "1 day"), (200_000, "2 days"), (400 * 86_400, "1 year")])
def test_an_age_has_one_unit(seconds, said):
    assert age(seconds) == said


@pytest.mark.parametrize("unit, length, below", [
    ("minute", 60, "59 seconds"), ("hour", 3600, "59 minutes"), ("day", 86_400, "23 hours"),
    ("year", 31_536_000, "364 days")])
def test_a_unit_of_an_age_begins_at_its_length(unit, length, below):
    assert (age(length), age(length - 1)) == (f"1 {unit}", below)
    assert age(2 * length) == f"2 {unit}s"


def test_a_model_of_any_name_is_found(here):
    """`train --out z1` writes z1."""
    write("z1", 5, step=9)
    write("lr0.006", 9)
    write("old.bin", 20)
    (here / "notes").write_text("x" * 5000, encoding="utf-8")
    (here / "run.jsonl").write_text("{}\n" * 5000, encoding="utf-8")
    write("z1.123.tmp", 1)                   # a save of another process that has not ended
    assert files() == ["z1", "lr0.006", "old.bin", BUNDLED]
    assert newest_model() == "z1"


def test_a_folder_with_the_bundled_model_alone_is_not_empty(here):
    assert "no checkpoint found here" in told("list")
    assert "no checkpoint found here" not in told("list", here.parent / "data")


def test_info_on_half_a_file_says_what_its_header_says(here, capsys):
    path = write("a.bin", kind="chat", step=3)
    path.write_bytes(path.read_bytes()[:-500])
    refused(capsys, "info", path, words=["the file is incomplete or damaged (found"])
    capsys.readouterr()
    ne.main(["info", str(path), "--threads", "1"])
    said = capsys.readouterr().out
    assert "chat" in said and f"{ne.n_params(TINY):,}" in said and "incomplete" in said
