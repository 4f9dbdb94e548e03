"""--log-to: TensorBoard and Weights & Biases get the records of the log, and never end a run."""
import html
import json
import os
import shutil
import struct
import sys
import types

import pytest
from helpers import FAST, needs, never, refused, run

import nanoeuler as ne
from nanoeuler_parts.files import sinks
from nanoeuler_parts.files.errors import PACKAGES
from nanoeuler_parts.files.logs import read_log
from nanoeuler_parts.files.sinks import curves_of
from nanoeuler_parts.runs.options import TrainOptions
from nanoeuler_parts.tuning.dpo import DpoOptions
from nanoeuler_parts.tuning.sft import SftOptions

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("one_thread")]


class Wandb(types.ModuleType):
    """Stands in for the package wandb, and keeps all that it is given."""

    class Error(Exception):
        pass

    def __init__(self):
        super().__init__("wandb")
        self.runs, self.logged, self.finished, self.mode = [], [], 0, "offline"

    def setup(self):
        return types.SimpleNamespace(settings=types.SimpleNamespace(mode=self.mode))

    def login(self):
        raise self.Error("No API key configured.")

    def init(self, **settings):
        self.runs.append(settings)
        return self

    def Settings(self, **settings):
        return settings

    def Html(self, text):
        return {"html": text}

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", Wandb())
    return sys.modules["wandb"]


def train(text, *more):
    run("train", "--data", text, *FAST, "--eval-every", 2, "--out", "a.bin", *more)


def expected():
    """[(step, curves)] of the records in the log that have curves"""
    records = read_log("a.jsonl")
    assert records and all(r["step"] for r in records)
    return [(r["step"], curves_of(r)) for r in records if curves_of(r)]


# ---- before the run
@pytest.mark.parametrize("service, package", [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_missing_package_is_reported_before_anything_is_compiled(service, package, text,
                                                                    elsewhere, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(ne.Model, "ready", never)
    refused(capsys, "train", "--data", text, *FAST, "--log-to", service,
            words=[f"the package {package} is not installed", "pip install", PACKAGES[package]])
    assert os.listdir() == []


@pytest.mark.parametrize("names", ["mlflow", "wandb,", "tensorboard wandb"])
def test_an_unknown_service_is_rejected(names, text, elsewhere, wandb, capsys):
    refused(capsys, "train", "--data", text, "--log-to", names,
            words=[f"--log-to is {names}, expected tensorboard, wandb, or both"])


def test_without_a_login_the_run_does_not_begin(text, elsewhere, wandb, monkeypatch, capsys):
    wandb.mode = "online"
    monkeypatch.setattr(ne.Model, "ready", never)
    refused(capsys, "train", "--data", text, *FAST, "--log-to", "wandb",
            words=["wandb: No API key configured, or set WANDB_MODE=offline"])
    assert os.listdir() == []


def test_all_runs_have_the_setting():
    for options in (TrainOptions, SftOptions, DpoOptions):
        assert options().log_to == ""


# ---- what is sent
def test_a_record_is_sent_as_curves():
    record = {"step": 3, "loss": 2.5, "heads": [2.5, 2.75], "n_steps": 9, "windows": None}
    assert curves_of(record) == {"loss": 2.5, "loss/head_0": 2.5, "loss/head_1": 2.75}
    assert curves_of({"step": 3, "val_bits_per_byte": 2, "windows": 64}) == {"val_bits_per_byte": 2}
    assert curves_of({"step": 3, "sample": "text"}) == {}


def test_wandb_gets_every_record(text, elsewhere, wandb, capsys):
    train(text, "--steps", 5, "--log-to", "wandb")
    [settings] = wandb.runs
    state = ne.read_checkpoint("a.bin").state
    assert settings["id"] == state.log_sha256[:12] and settings["resume"] == "allow"
    assert (settings["project"], settings["name"]) == ("nanoeuler", "a.bin")
    assert settings["config"]["n_layer"] == 2 and settings["config"]["steps"] == 5
    assert [(step, x) for step, x in wandb.logged if "sample" not in x] == expected()
    samples = [x["sample"]["html"] for _, x in wandb.logged if "sample" in x]
    logged = [r["sample"] for r in read_log("a.jsonl") if "sample" in r]
    assert samples == [f"<pre>{html.escape(x)}</pre>" for x in logged] and len(samples) == 2
    assert wandb.finished == 1 and "W&B " in capsys.readouterr().out


def test_a_resumed_run_continues_there_until_it_is_switched_off(text, elsewhere, wandb):
    train(text, "--steps", 2, "--log-to", "wandb")
    train(text, "--resume", "--steps", 4)
    first, second = wandb.runs
    assert first["id"] == second["id"] and max(step for step, _ in wandb.logged) == 4
    train(text, "--resume", "--steps", 6, "--log-to", "")
    assert len(wandb.runs) == 2 and wandb.finished == 2
    assert ne.read_checkpoint("a.bin").state.step == 6


def test_another_run_has_another_identity(text, elsewhere, wandb):
    train(text, "--steps", 1, "--log-to", "wandb")
    train(text, "--steps", 1, "--log-to", "wandb", "--force")
    first, second = wandb.runs
    assert first["id"] != second["id"]


@pytest.mark.parametrize("method", ["init", "log", "finish"])
def test_a_service_that_fails_does_not_end_the_run(method, text, elsewhere, wandb, capsys):
    def failing(*args, **options):
        raise OSError("no\nnetwork")

    setattr(wandb, method, failing)
    train(text, "--steps", 3, "--log-to", "wandb")
    notes = [x for x in capsys.readouterr().err.splitlines() if "no more records" in x]
    assert notes == ["note: no more records go to W&B: no network; the run and its log continue"]
    assert ne.read_checkpoint("a.bin").state.step == 3
    assert {r["step"] for r in read_log("a.jsonl")} == {1, 2, 3}


def test_a_run_without_services_sends_nothing(text, elsewhere, wandb):
    train(text, "--steps", 2)
    assert not wandb.runs and not wandb.finished
    assert json.loads((elsewhere / "a.jsonl").read_text().splitlines()[0])["step"] == 1


# ---- TensorBoard's files
def events():
    """The events of all files in order, by the protocol buffers of tensorboardX.  A file repeats:
    length (8 bytes), its checksum (4), an event, its checksum (4)."""
    from tensorboardX.proto.event_pb2 import Event
    [run_id] = os.listdir("a.events")
    assert run_id == ne.read_checkpoint("a.bin").state.log_sha256[:12]
    for name in sorted(os.listdir(f"a.events/{run_id}")):
        with open(f"a.events/{run_id}/{name}", "rb") as f:
            while size := f.read(8):
                f.read(4)
                yield Event.FromString(f.read(*struct.unpack("<Q", size)))
                f.read(4)


def curves(event):
    return {x.tag: x.simple_value for x in event.summary.value if not x.tensor.string_val}


def test_the_events_are_the_records_of_the_log(text, elsewhere):
    needs("tensorboardX")
    train(text, "--steps", 5, "--log-to", "tensorboard")
    found = [(x.step, curves(x)) for x in events() if curves(x)]
    assert found == [(step, pytest.approx(x, rel=1e-6)) for step, x in expected()]
    texts = [(x.step, value.tag, value.tensor.string_val[0].decode()) for x in events()
             for value in x.summary.value if value.tensor.string_val]
    assert texts == [(r["step"], "sample/text_summary",
                      "".join(f"    {line}\n" for line in r["sample"].splitlines()))
                     for r in read_log("a.jsonl") if "sample" in r]


def resumed_after_a_kill(text):
    """A run whose last save is that of step 2, although step 4 is logged, resumed to step 5"""
    train(text, "--steps", 2, "--log-to", "tensorboard")
    shutil.copy("a.bin", "saved.bin")
    train(text, "--resume", "--steps", 4)
    shutil.copy("saved.bin", "a.bin")
    train(text, "--resume", "--steps", 5)


def test_a_resumed_run_hides_the_steps_that_were_not_saved(text, elsewhere):
    needs("tensorboardX")
    resumed_after_a_kill(text)
    starts = [x.step for x in events() if x.HasField("session_log")]
    assert starts == [1, 3, 3]               # at each start, a reader drops events from this step


def test_the_reader_of_tensorboard_sees_each_step_once(text, elsewhere):
    needs("tensorboardX")
    pytest.importorskip("tensorboard", reason="tensorboard comes with pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    resumed_after_a_kill(text)
    [run_id] = os.listdir("a.events")
    reader = EventAccumulator(f"a.events/{run_id}")
    reader.Reload()
    for tag in ("loss", "loss/head_0", "val_bits_per_byte"):
        values = [(step, x[tag]) for step, x in expected() if tag in x]
        assert [(e.step, e.value) for e in reader.Scalars(tag)] == [
            (step, pytest.approx(x, rel=1e-6)) for step, x in values]
    assert "sample/text_summary" in reader.Tags()["tensors"]


def test_a_full_disk_does_not_end_the_run(text, elsewhere, monkeypatch, capsys):
    needs("tensorboardX")
    from tensorboardX.record_writer import RecordWriter

    def full(writer):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RecordWriter, "flush", full)
    monkeypatch.setattr(sinks, "FLUSH_AFTER", 0)
    train(text, "--steps", 3, "--log-to", "tensorboard")
    assert capsys.readouterr().err.count("no more records go to TensorBoard: [Errno 28]") == 1
    assert ne.read_checkpoint("a.bin").state.step == 3


# ---- the package itself
def test_wandb_writes_a_run_offline(text, elsewhere, monkeypatch):
    package = needs("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    train(text, "--steps", 3, "--log-to", "wandb")
    [folder] = (elsewhere / "wandb").glob("offline-run-*")
    run_id = ne.read_checkpoint("a.bin").state.log_sha256[:12]
    assert (folder / f"run-{run_id}.wandb").stat().st_size > 1000
    package.teardown()
