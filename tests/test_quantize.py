"""Checkpoints whose matrices are int8: what they hold, who reads them, and what is refused."""
import json
import os
from dataclasses import fields, replace

import numpy as np
import pytest
from examples import ADD
from helpers import (TINY, needs, outcome, put_together, random_flat, refused, run, take_apart,
                     told)

import bpe
import nanoeuler as ne
from nanoeuler_parts.checkpoint.file import sha256_of
from nanoeuler_parts.checkpoint.matrices import from_int8, in_int8
from nanoeuler_parts.checkpoint.tensors import named
from nanoeuler_parts.files.logs import alone
from nanoeuler_parts.files.safetensors import map_tensors, write_tensors

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def small(checkpoint, tmp_path):
    """The path of `checkpoint` in int8."""
    run("quantize", checkpoint, tmp_path / "small.bin")
    return tmp_path / "small.bin"


def read(path):
    return ne.read_checkpoint(str(path))


# ---- the format
@pytest.mark.parametrize("tied", [False, True])
def test_what_the_file_holds(tied, tmp_path):
    """Read by safetensors: int8 of the names and shapes of a Llama, a scale a row, float32 gains,
    each as far off as half a step of its row at most."""
    safetensors = needs("safetensors.numpy")
    cfg, path = replace(TINY, tie_embeddings=tied, n_mtp=3), tmp_path / "a.bin"
    tokenizer = bpe.train(b"to be or not to be, that is the question", cfg.vocab_size)
    flat = random_flat(cfg, 2, np.float32)
    ne.write_checkpoint(str(path), cfg, tokenizer, ne.State(), flat, (flat, flat * flat))
    run("quantize", path, tmp_path / "b.bin")
    got, want = safetensors.load_file(tmp_path / "b.bin"), named(cfg, flat)
    assert set(got) == {*want, *(f"{name}_scale" for name, x in want.items() if x.ndim > 1)}
    for name, x in want.items():
        if x.ndim == 1:
            assert got[name].dtype == np.float32 and np.array_equal(got[name], x), name
            continue
        q, scale = got[name], got[f"{name}_scale"]
        assert q.dtype == np.int8 and q.shape == x.shape and scale.shape == (len(x), 1)
        assert (np.abs(q.astype(int)).max(1) == 127).all()
        assert (np.abs(q * scale - x) <= scale * (0.5 + 127 * 2 ** -16)).all(), name
    c = read(tmp_path / "b.bin")
    assert c.cfg == cfg and c.matrices == "int8" and c.moments == ()
    for name, x in named(cfg, c.flat).items():
        whole = got[name] if x.ndim == 1 else got[name].astype(float) * got[f"{name}_scale"]
        assert np.array_equal(x, whole), name            # q * scale has no rounding of its own


ROWS = {"ordinary": 1.0, "tiny": 1e-20, "nearly nothing": 1e-32, "nothing": 0.0, "huge": 1e37}


@pytest.mark.parametrize("size", ROWS.values(), ids=ROWS)
def test_a_decoder_with_int8_finds_what_was_stored(size):
    """It rounds the dequantized rows again: to the same integers and the same scales."""
    rng = np.random.default_rng(3)
    w = (size * rng.standard_normal((3000, 48))).astype(np.float32)
    q, scale = in_int8(w)
    again, scale_again = ne.converted(from_int8("w", q, scale), "int8")
    assert np.array_equal(again, q)
    if size > 1e-30:
        assert np.array_equal(scale_again, scale[:, 0])
        assert (np.abs(q.astype(int)).max(1) == 127).all()
    q_again, of_again = in_int8(from_int8("w", q, scale))
    assert np.array_equal(q_again, q) and np.array_equal(of_again, scale)


def test_the_decoders_panels_are_those_of_the_file(small):
    """All of its int8 and scales, through `Weights`, are the file's."""
    c, (_, tensors) = read(small), map_tensors(str(small))
    decoder = ne.Weights(c.cfg, c.flat, "int8")
    V = c.cfg.vocab_size
    scales = tensors["model.embed_tokens.weight_scale"][:, 0]
    assert np.array_equal(decoder.scales.wte[:V], scales)
    panels, width = decoder.p.wte, decoder.p.wte.shape[2]
    if panels.dtype == np.uint32:            # four numbers each, plus 128
        panels = panels.transpose(0, 2, 1).copy().view(np.uint8) ^ 128
        panels = panels.view(np.int8).transpose(0, 2, 1)
    rows = panels.transpose(0, 2, 1).reshape(len(panels) * width, -1)[:V, :c.cfg.n_embd]
    assert np.array_equal(rows, tensors["model.embed_tokens.weight"])


def test_twice_rounded_is_once_rounded(small, tmp_path, capsys):
    run("quantize", small, tmp_path / "again.bin")
    assert f"note: the matrices of {small} are already int8" in capsys.readouterr().err
    assert (tmp_path / "again.bin").read_bytes() == small.read_bytes()


def test_it_is_a_quarter_and_forgets_what_only_a_run_needs(tmp_path):
    cfg = replace(TINY, n_embd=64, n_hidden=256, n_layer=4)
    tokenizer = bpe.train(b"to be or not to be, that is the question", cfg.vocab_size)
    state = ne.State(kind="chat", step=3, reference=[0.5] * 5000, bits_per_byte=1.5, elapsed=2.5,
                     options=dict(data="/home/me/secret/a.json", lr=0.1),
                     source="/home/me/secret/chat.bin", source_sha256="ab" * 32,
                     text_sha256="cd" * 32, micro_batch=3)
    ne.write_checkpoint(str(tmp_path / "a.bin"), cfg, tokenizer, state, random_flat(cfg, 1, "f4"))
    shown = told("quantize", tmp_path / "a.bin", tmp_path / "b.bin")
    size = (tmp_path / "b.bin").stat().st_size
    assert ne.n_params(cfg) < size < 1.15 * ne.n_params(cfg) and f"{size:,} bytes" in shown
    assert read(tmp_path / "b.bin").state == ne.State(
        kind="chat", step=3, bits_per_byte=1.5, text_sha256="cd" * 32, source="chat.bin",
        options=dict(data="a.json"))
    assert b"secret" not in (tmp_path / "b.bin").read_bytes()


# Fields of State: those that only the run itself needs, and those that stay
OF_RUN = {"options": {}, "elapsed": 0.0, "source_sha256": "", "log_sha256": "", "micro_batch": None,
          "reference": [], "rehearsed_sha256": "", "own_answers": [], "old_right": [],
          "old_known": []}
KEPT = dict(kind="chat", template="chatml", bos="<|b|>", eos="<|e|>", stops=["<|s|>"],
            thinking="off", weights="f32", step=3, n_steps=5, tokens_seen=7, vocab_size=300,
            bits_per_byte=1.5, best=1.25, best_step=2, rewards=[0.25, 0.5], reward_sha256="ab",
            mtp_phase=1, text_sha256="cd", source="a.bin", learned=["ef"])


def test_each_field_of_a_state_is_kept_or_of_the_run_alone(tmp_path):
    """The answers of a run are texts of its examples, which may be private, and may be many."""
    state = ne.State(**KEPT, options={"lr": 0.1}, elapsed=2.5, source_sha256="ab", log_sha256="cd",
                     micro_batch=3, reference=[0.5], rehearsed_sha256="ef", old_right=[1],
                     own_answers=[["secret", "", "answer"]], old_known=[2])
    plain = ne.State()
    assert all(getattr(state, f.name) != getattr(plain, f.name) for f in fields(state))
    assert {f.name for f in fields(state)} == OF_RUN.keys() | KEPT.keys()
    tokenizer = bpe.train(b"to be or not to be, that is the question", TINY.vocab_size)
    ne.write_checkpoint(str(tmp_path / "a.bin"), TINY, tokenizer, state, random_flat(TINY, 1, "f4"))
    run("quantize", tmp_path / "a.bin", tmp_path / "b.bin")
    assert read(tmp_path / "b.bin").state == ne.State(**KEPT, **OF_RUN)


@pytest.mark.parametrize("tied", [False, True])
def test_heads_may_be_left_out(tied, tmp_path, capsys):
    cfg = replace(TINY, tie_embeddings=tied, n_mtp=3)
    tokenizer = bpe.train(b"to be or not to be, that is the question", cfg.vocab_size)
    flat = random_flat(cfg, 2, np.float32)
    ne.write_checkpoint(str(tmp_path / "a.bin"), cfg, tokenizer, ne.State(), flat)
    run("quantize", tmp_path / "a.bin", tmp_path / "whole.bin")
    run("quantize", tmp_path / "a.bin", tmp_path / "one.bin", "--n-mtp", 1)
    whole, one = read(tmp_path / "whole.bin"), read(tmp_path / "one.bin")
    assert one.cfg == replace(cfg, n_mtp=1)
    given, kept = named(cfg, whole.flat), named(one.cfg, one.flat)
    assert given.keys() - kept.keys() == {"mtp.1.weight", "mtp.2.weight"}
    assert all(np.array_equal(x, given[name]) for name, x in kept.items())
    tokens = np.arange(6, dtype=np.int32)[None]
    logits = [ne.Model(c.cfg, c.flat).logits(tokens)[0, 0] for c in (whole, one)]
    assert np.array_equal(*logits)
    for n, word in ((4, "--n-mtp: expected at most 3 heads"), (0, "expected 1 to 16, found 0"),
                    (17, "found 17")):
        refused(capsys, "quantize", tmp_path / "a.bin", tmp_path / "c.bin", "--n-mtp", n,
                words=[word])
    assert not (tmp_path / "c.bin").exists()


# ---- who reads it
def test_info_says_what_it_is(small, checkpoint):
    shown = told("info", small)
    assert "int8" in shown and f"{os.path.getsize(small):,} bytes" in shown
    assert "int8" not in told("info", checkpoint) and "float32" in told("info", checkpoint)


def test_verbs_take_it_as_they_take_its_numbers_in_float32(small, tmp_path, monkeypatch, capsys):
    """What they make of it is, to the byte, what they make of the same numbers in float32."""
    monkeypatch.chdir(tmp_path)
    c = read(small)
    ne.write_checkpoint("same.bin", c.cfg, c.tokenizer, c.state, c.flat)
    for args in (["generate", "to be", "--tokens", 5], ["lens", "to be"],
                 ["generate", "to be", "--tokens", 5, "--weights", "int8"]):
        said = [told(*args[:2], name, *args[2:]) for name in (small, "same.bin")]
        assert said[0] == said[1] and said[0]
    run("export", small, "a")
    run("export", "same.bin", "b")
    assert sorted(os.listdir("a")) == sorted(os.listdir("b"))
    for name in os.listdir("a"):
        with open(f"a/{name}", "rb") as one, open(f"b/{name}", "rb") as other:
            assert one.read() == other.read(), name
    needs("gguf")
    for name in small, "same.bin":
        run("export", name, "--gguf", f"{os.path.basename(name)}.gguf", "--matrices", "q8_0")
    assert (tmp_path / "small.bin.gguf").read_bytes() == (tmp_path / "same.bin.gguf").read_bytes()


def test_runs_begin_with_it(base, tmp_path, monkeypatch):
    """sft and dpo start from its numbers, as from the same in float32, and learn in float32."""
    monkeypatch.chdir(tmp_path)
    run("quantize", base / "nanoeuler.bin", "small.bin")
    c = read("small.bin")
    ne.write_checkpoint("same.bin", c.cfg, c.tokenizer, c.state, c.flat)
    (tmp_path / "pairs.json").write_text(json.dumps(
        [dict(instruction=e["instruction"], chosen="1", rejected="2") for e in ADD]), "utf-8")
    flags = ["--steps", 2, "--batch", 320]
    for start in "small", "same":
        run("sft", f"{start}.bin", "--data", base / "add.json", "--out", f"{start}_chat.bin",
            *flags)
        run("dpo", f"{start}.bin", "--data", "pairs.json", "--out", f"{start}_dpo.bin", *flags)
    for made in "chat", "dpo":
        assert outcome(tmp_path, f"small_{made}") == outcome(tmp_path, f"same_{made}")
    made = read("small_chat.bin")
    assert made.matrices == "f32" and made.moments
    assert made.state.source_sha256 == sha256_of("small.bin")
    run("sft", "small.bin", "--resume", "--steps", 3, "--out", "small_chat.bin")
    assert read("small_chat.bin").state.step == 3


# ---- what is refused
def test_no_run_goes_on_with_it(small, capsys):
    before = small.read_bytes()
    for verb in "train", "sft", "dpo":
        refused(capsys, verb, "--resume", "--out", small, words=[small, "int8", "--out NAME"])
    assert small.read_bytes() == before


def test_nothing_is_replaced_unasked(small, checkpoint, tmp_path, capsys):
    refused(capsys, "quantize", checkpoint, small, words=["exists", "--force"])
    for verb, *to in ("quantize", ""), ("import", ""), ("export", "--gguf"):
        refused(capsys, verb, checkpoint, *filter(None, to), checkpoint, "--force",
                words=["would replace"])
    refused(capsys, "quantize", tmp_path / "none.bin", tmp_path / "b.bin", words=["none.bin"])
    refused(capsys, "quantize", checkpoint, words=["out"])
    run("quantize", checkpoint, small, "--force")
    assert read(checkpoint).moments


NAME = "model.layers.1.mlp.down_proj.weight"
SPOILT = {
    "a scale that is no number": (f"{NAME}_scale", np.nan, "positive"),
    "an infinite scale": (f"{NAME}_scale", np.inf, "positive"),
    "a negative scale": (f"{NAME}_scale", -1.0, "positive"),
    "a scale of nothing": (f"{NAME}_scale", 0.0, "positive"),
    "a scale out of range": (f"{NAME}_scale", 3e38, f"{NAME}["),
    "a gain that is no number": ("model.norm.weight", np.nan, "model.norm.weight[2]")}


@pytest.mark.parametrize("kind", SPOILT)
def test_numbers_that_are_none(kind, small, capsys):
    name, value, word = SPOILT[kind]
    meta, tensors = map_tensors(str(small))
    x = tensors[name].copy()
    x.flat[2] = value
    write_tensors(str(small), meta, {**tensors, name: x}, "")
    for verb in "info", "chat", "sft":
        refused(capsys, verb, small, words=[small, word])


CHANGED = {
    "no scale": lambda t: t.pop(f"{NAME}_scale"),
    "a scale too few": lambda t: t.update({f"{NAME}_scale": t[f"{NAME}_scale"][1:]}),
    "scales of a column": lambda t: t.update({f"{NAME}_scale": t[f"{NAME}_scale"][:, 0]}),
    "scales of another type": lambda t: t.update(
        {f"{NAME}_scale": t[f"{NAME}_scale"].astype("<f2")}),
    "another shape": lambda t: t.update({NAME: np.ascontiguousarray(t[NAME].T)}),
    "a matrix in float32": lambda t: t.update({NAME: t[NAME].astype("<f4")}),
    "a gain in int8": lambda t: t.update({"model.norm.weight": np.ones(8, np.int8)}),
    "a tensor too many": lambda t: t.update(more=np.ones(3, "<f4")),
    "moments": lambda t: t.update({"adamw.m": np.ones(9, "<f4"), "adamw.v": np.ones(9, "<f4")})}


@pytest.mark.parametrize("kind", CHANGED)
def test_tensors_that_are_not_those_of_the_configuration(kind, small, capsys):
    meta, tensors = map_tensors(str(small))
    tensors = {name: x.copy() for name, x in tensors.items()}
    CHANGED[kind](tensors)
    write_tensors(str(small), meta, tensors, "")
    for verb in "info", "chat", "sft":
        refused(capsys, verb, small, words=[small, "do not match its configuration"])


@pytest.mark.parametrize("said, word", [("int4", "int4"), ("f32", "configuration"),
                                        (None, "configuration"),
                                        ("", "expected f32, bf16 or int8")])
def test_what_it_says_of_its_matrices(said, word, small, capsys):
    header, data = take_apart(small)
    header["__metadata__"].pop("matrices")
    if said is not None:
        header["__metadata__"]["matrices"] = said
    put_together(small, header, data)
    refused(capsys, "info", small, words=[small, word])


@pytest.mark.parametrize("left", [0.3, 0.9, 0.999])
def test_what_is_cut_short_or_flipped(left, small, capsys):
    raw = small.read_bytes()
    small.write_bytes(raw[:int(left * len(raw))])
    refused(capsys, "info", small, words=[small])
    i = int(left * len(raw))
    small.write_bytes(raw[:i] + bytes([raw[i] ^ 1]) + raw[i + 1:])
    refused(capsys, "info", small, words=[small])


def test_float32_files_cannot_pass_as_int8(checkpoint, capsys):
    header, data = take_apart(checkpoint)
    header["__metadata__"]["matrices"] = "int8"
    put_together(checkpoint, header, data)
    refused(capsys, "info", checkpoint, words=["configuration"])


def test_a_folder_of_int8_is_no_llama(small, checkpoint, tmp_path, capsys):
    """Neither as other programs quantize one."""
    run("export", checkpoint, tmp_path / "hf")
    meta, tensors = map_tensors(str(small))
    write_tensors(str(tmp_path / "hf" / "model.safetensors"), {"format": "pt"}, {
        name: x for name, x in tensors.items() if not name.startswith("mtp.")}, "")
    refused(capsys, "import", tmp_path / "hf", tmp_path / "b.bin", words=["hf"])
    assert not (tmp_path / "b.bin").exists()


@pytest.mark.parametrize("verb", ["quantize", "import"])
def test_the_file_of_a_run_is_not_replaced(verb, checkpoint, tmp_path, capsys):
    """The next save of the run would replace the model, although the verb has said that it is
    there."""
    out, source = tmp_path / "run.bin", checkpoint
    out.write_bytes(checkpoint.read_bytes())
    if verb == "import":
        source = tmp_path / "llama"
        run("export", checkpoint, source)
    link = tmp_path / "link.bin"
    link.symlink_to(out)
    before = out.read_bytes()
    with alone(str(out)):
        for name in out, link:
            refused(capsys, verb, source, name, "--force",
                    words=["another run is writing", "let it end, or choose another name"])
    (tmp_path / ".run.bin.lock").mkdir()     # a run could not save there either
    refused(capsys, verb, source, out, "--force",
            words=[f"cannot write {out}: ", ".lock: Is a directory; choose another name"])
    (tmp_path / ".run.bin.lock").rmdir()
    assert out.read_bytes() == before
    run(verb, source, out, "--force")
    assert out.read_bytes() != before and not [*tmp_path.glob(".*")]
