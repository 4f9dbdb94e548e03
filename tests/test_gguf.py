"""Files of llama.cpp: its package reads ours, we run its models, damaged ones are refused."""
import json
import os
import sys
from dataclasses import replace

import numpy as np
import pytest
from helpers import TINY, needs, present, refused, run
from models import (CHATML, CONFIGS, HELLO, SMALL, SPECIALS, as_folder, package,
                    same_in_llama_cpp, write)
from texts import TORTURE

import bpe
import nanoeuler as ne
from nanoeuler_parts.chat.templates import ALPACA, chat_ids, ends_of
from nanoeuler_parts.checkpoint.tensors import named
from nanoeuler_parts.files.safetensors import MUCH
from nanoeuler_parts.interchange.gguf import entries_in, read_gguf, write_gguf
from nanoeuler_parts.interchange.llama import llama_config
from nanoeuler_parts.interchange.tokenizers import gguf_of_tokenizer, PRE, tokenizer_of_gguf
from nanoeuler_parts.tokenizers.words import PATTERNS, SHORT

pytestmark = pytest.mark.interop


def test_a_full_disk_is_named(tokenizer, tmp_path, monkeypatch, capsys):
    """NumPy's error of a short write has a text and no number of the system."""
    gguf = package()
    path = write(tmp_path / "a.bin", replace(TINY, vocab_size=512), tokenizer)

    def short(writer):
        raise OSError("1048576 requested and 0 written")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", short)
    line = refused(capsys, "export", path, "--gguf", tmp_path / "a.gguf",
                   words=["cannot write", "only part of it", "0 written", "free space"])
    assert "None" not in line and os.listdir(tmp_path) == ["a.bin"]


def test_each_wait_for_a_large_file_begins_with_a_line(tokenizer, tmp_path, monkeypatch, capsys):
    package()
    a, hf, f, b, c, q = (tmp_path / x for x in ("a.bin", "hf", "f", "b.bin", "c.bin", "q"))
    write(a, replace(TINY, vocab_size=512, n_mtp=1), tokenizer)
    (tmp_path / "p").write_text('"to be"\n', encoding="utf-8")
    verbs = {
        ("export", a, hf, "--gguf", f): [f"reading {a}", f"writing {f}", f"writing {hf}"],
        ("import", hf, b): [f"reading {hf / 'model.safetensors'}", f"writing {b}"],
        ("import", f, c): [f"reading {f}", f"writing {c}"],
        ("quantize", a, q): [f"reading {a}", f"rounding to int8 and writing {q}"],
        ("info", a): [f"reading {a}"],
        ("lens", "to be", a): [f"reading {a}"],
        ("generate", "--file", tmp_path / "p", a, "--out", tmp_path / "o", "--tokens", 1): [
            f"reading {a}", f"computing the checksum of {a}"]}
    for most, is_said in (0, True), (MUCH, False):
        monkeypatch.setattr("nanoeuler_parts.files.safetensors.MUCH", most)
        for verb, waits in verbs.items():
            run(*verb, *["--force"] * (verb[0] in ("export", "import", "quantize", "generate")))
            lines = capsys.readouterr().err.splitlines()
            said = [line.rpartition(": ")[0] for line in lines if line.endswith(" MB")]
            assert said == waits * is_said, verb


def test_what_an_export_leaves_out_is_named(tokenizer, tmp_path, capsys):
    """Auxiliary heads in GGUF, and a format that the other output does not have"""
    package()
    for heads in 1, 2:
        path = write(tmp_path / "a.bin", replace(TINY, vocab_size=512, n_mtp=heads), tokenizer)
        run("export", path, "--gguf", tmp_path / "a.gguf", "--force")
        assert ("auxiliary output heads" in capsys.readouterr().err) == (heads == 2)
    refused(capsys, "export", path, tmp_path / "hf", "--matrices", "f16",
            words=["--matrices is the format of a GGUF file", "add --gguf"])


@pytest.mark.parametrize("matrices", ["f32", "f16", "q8_0"])
def test_the_gguf_package_reads_what_is_written(matrices, tokenizer, tmp_path):
    gguf = package()
    cfg = replace(SMALL, n_layer=2, n_mtp=2, n_hidden=100)       # 100 is no multiple of 32
    path = write(tmp_path / "a.bin", cfg, tokenizer, kind="chat", bos="<|im_start|>")
    run("export", path, "--gguf", tmp_path / "a.gguf", "--matrices", matrices)
    f, c = gguf.GGUFReader(tmp_path / "a.gguf"), ne.read_checkpoint(str(path))
    value = lambda key: f.fields[key].contents()
    assert value("general.architecture") == "llama"
    assert value("llama.attention.head_count_kv") == 2 and value("llama.context_length") == 128
    assert value("llama.rope.freq_base") == 10000.0
    assert abs(value("llama.attention.layer_norm_rms_epsilon") - 1e-5) < 1e-11
    assert value("tokenizer.ggml.tokens")[-3:] == sorted(SPECIALS, key=c.tokenizer.specials.get)
    assert value("tokenizer.ggml.token_type")[-4:] == [1, 3, 3, 3]
    assert value("tokenizer.ggml.eos_token_id") == c.tokenizer.specials["</s>"]
    assert value("tokenizer.ggml.bos_token_id") == c.tokenizer.specials["<|im_start|>"]
    assert value("tokenizer.chat_template") == ALPACA
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, cfg.n_layer)
    theirs = {t.name: t for t in f.tensors}
    assert len(theirs) == 2 * 9 + 3
    limit = {"f32": 0, "f16": 2e-3, "q8_0": 5e-3}[matrices]
    for name, w in named(cfg, c.flat).items():
        if name.startswith("mtp."):
            continue
        t = theirs[names.get_name(name, (".weight",))]
        got = gguf.quants.dequantize(t.data, t.tensor_type).reshape(w.shape)
        heads = 4 if "q_proj" in name else 2 if "k_proj" in name else 0
        if heads:                            # row 2i of a head there is row i here, 2i + 1 i + D/2
            rows = np.arange(len(w)).reshape(heads, 16, 2)
            got, old = np.empty_like(w), got
            for h in range(heads):
                for i in range(16):
                    got[32 * h + i], got[32 * h + 16 + i] = old[rows[h, i, 0]], old[rows[h, i, 1]]
        assert np.abs(got - w).max() <= limit * np.abs(w).max()
        odd = matrices == "q8_0" and "down" in name
        kind = "f32" if w.ndim == 1 else "f16" if odd else matrices
        assert t.tensor_type.name == kind.upper(), name
    run("import", tmp_path / "a.gguf", tmp_path / "b.bin")
    again = ne.read_checkpoint(str(tmp_path / "b.bin"))
    assert again.cfg == replace(cfg, n_mtp=1) and again.tokenizer.hash() == c.tokenizer.hash()
    assert (again.state.template, again.state.bos) == (ALPACA, "<|im_start|>")
    kept = ne.views(c.flat, ne.param_table(cfg))
    found = present(ne.views(again.flat, ne.param_table(again.cfg)))
    for name, want in present(kept._replace(lm_head=kept.lm_head[:1])).items():
        assert np.abs(found[name] - want).max() <= limit * np.abs(want).max()


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q5_1"])
def test_models_of_every_type_come_in(name, tokenizer, tmp_path):
    """Each weight is the one that the gguf package takes from the stored one."""
    gguf, cfg = package(), replace(SMALL, n_layer=1, n_mtp=1, n_hidden=96)
    c = ne.read_checkpoint(str(write(tmp_path / "a.bin", cfg, tokenizer)))
    write_gguf(tmp_path / "a.gguf", c, name)
    run("import", tmp_path / "a.gguf", tmp_path / "b.bin")
    got, kind = ne.read_checkpoint(str(tmp_path / "b.bin")), gguf.GGMLQuantizationType[name]
    ours, of_file = (present(ne.views(x.flat, ne.param_table(cfg))) for x in (got, c))
    for x, w in zip(ours.values(), of_file.values(), strict=True):
        if w.ndim > 1 and w.shape[0] != cfg.n_layer or name == "F32":        # RoPE mixes no rows
            w = gguf.dequantize(gguf.quantize(w.reshape(-1, w.shape[-1]), kind), kind)
        elif w.ndim > 2:                     # a row of a layer's matrix is quantized by itself
            w = gguf.dequantize(gguf.quantize(w[0], kind), kind)
        assert np.array_equal(x.ravel(), w.ravel())


@pytest.mark.parametrize("scaling", ["NONE", "LINEAR"])
def test_a_tied_gguf_comes_in_and_a_stretched_one_does_not(scaling, tokenizer, tmp_path,
                                                           monkeypatch, capsys):
    gguf, cfg = package(), replace(TINY, vocab_size=512, n_mtp=1, tie_embeddings=True)
    path = write(tmp_path / "a.bin", cfg, tokenizer)

    class Writer(gguf.GGUFWriter):
        def write_header_to_file(self):
            self.add_rope_scaling_type(gguf.RopeScalingType[scaling])
            super().write_header_to_file()

    monkeypatch.setattr(gguf, "GGUFWriter", Writer)
    run("export", path, "--gguf", tmp_path / "a.gguf")
    if scaling == "LINEAR":
        assert "scaling.factor is missing" in refused(capsys, "import", tmp_path / "a.gguf",
                                                       tmp_path / "b.bin")
        return
    run("import", tmp_path / "a.gguf", tmp_path / "b.bin")
    a, b = (ne.read_checkpoint(str(tmp_path / name)) for name in ("a.bin", "b.bin"))
    assert b.cfg == cfg and np.array_equal(a.flat, b.flat) and b.state.kind == "base"


@pytest.mark.parametrize("state", [
    dict(eos="</s>"), dict(eos="<none>"), dict(eos="<none>", stops=["<|im_end|>", "</s>"] * 2),
    dict(eos="</s>", stops=["<|im_end|>"], bos="<|im_start|>")])
def test_no_token_is_invented(state, tokenizer, tmp_path, capsys):
    """A token that begins a text or ends an answer.  bos_token in a chat template stays empty."""
    package()
    state = dict(state, kind="chat", template="{{ bos_token }}" + CHATML)
    path = write(tmp_path / "a.bin", replace(TINY, vocab_size=512, n_mtp=1), tokenizer, **state)
    run("export", path, "--gguf", tmp_path / "a.gguf")
    is_noted = "GGUF has places for 1 to 3 tokens that end an answer, and this model has 0"
    assert (is_noted in capsys.readouterr().err) == (state["eos"] == "<none>" and
                                                     "stops" not in state)
    run("import", tmp_path / "a.gguf", tmp_path / "b.bin")
    a, b = (ne.read_checkpoint(str(tmp_path / name)) for name in ("a.bin", "b.bin"))
    ends = [dict.fromkeys(ends_of(x.state, tokenizer)) for x in (a, b)]
    assert b.state.bos == a.state.bos and list(ends[0]) == list(ends[1])
    ids = [chat_ids(x.state.template, HELLO, x.state, x.tokenizer) for x in (a, b)]
    assert list(ids[0]) == list(ids[1])


def with_begins(tokenizer, *names):
    """The tokenizer with these special tokens before each text"""
    root = json.loads(tokenizer.to_json())
    root["post_processor"] = dict(
        type="TemplateProcessing", special_tokens={
            name: dict(ids=[tokenizer.specials[name]]) for name in names},
        single=[*(dict(SpecialToken=dict(id=name)) for name in names),
                dict(Sequence=dict(id="A"))])
    return bpe.Tokenizer.from_json(json.dumps(root))


@pytest.mark.parametrize("bos", ["", "<none>", "</s>", "<|im_start|>"])
@pytest.mark.parametrize("begins", [(), ("</s>",), ("<|im_start|>", "</s>")])
def test_texts_and_templates_begin_alike(begins, bos, tokenizer, tmp_path, capsys):
    """Whatever the token that begins texts, and the bos_token of templates, which may be others"""
    package()
    own = with_begins(tokenizer, *begins)
    assert own.begins == tuple(tokenizer.specials[name] for name in begins)
    path = write(tmp_path / "a.bin", replace(TINY, vocab_size=512, n_mtp=1), own, kind="chat",
                 bos=bos, eos="<|im_end|>", template="{{ bos_token }}" + CHATML)
    run("export", path, "--gguf", tmp_path / "a.gguf")
    assert ("a place for 1 token that begins a text" in capsys.readouterr().err) == (
        len(begins) > 1)
    run("import", tmp_path / "a.gguf", tmp_path / "b.bin")
    a, b = (ne.read_checkpoint(str(tmp_path / name)) for name in ("a.bin", "b.bin"))
    assert b.tokenizer.begins == own.begins[:1]
    ids = [chat_ids(x.state.template, HELLO, x.state, x.tokenizer) for x in (a, b)]
    assert list(ids[0]) == list(ids[1])


def test_gguf_needs_its_package(tokenizer, tmp_path, monkeypatch, capsys):
    path = write(tmp_path / "a.bin", replace(TINY, vocab_size=512), tokenizer)
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "there.gguf").write_bytes(b"GGUF")       # one that is not is named first
    for args in (("export", path, "--gguf", tmp_path / "a.gguf"),
                 ("import", tmp_path / "there.gguf", tmp_path / "b.bin")):
        assert "pip install 'gguf" in refused(capsys, *args)


@pytest.mark.parametrize("name", ["small", "tied, other theta, eps and head size"])
def test_llama_cpp_says_the_same(name, tokenizer, tmp_path):
    path = write(tmp_path / "a.bin", CONFIGS[name], tokenizer)
    run("export", path, "--gguf", tmp_path / "a.gguf")
    same_in_llama_cpp(ne.read_checkpoint(str(path)), tmp_path / "a.gguf", TORTURE, "To be or")


# ---- what is refused
@pytest.mark.parametrize("edit", [
    lambda raw: b"", lambda raw: raw[:3], lambda raw: raw[:20], lambda raw: raw[:-500],
    lambda raw: b"GGML" + raw[4:], lambda raw: raw[:4] + b"\1" + raw[5:],
    lambda raw: raw[:8] + (1 << 62).to_bytes(8, "little") + raw[16:],
    lambda raw: raw[:16] + (1 << 62).to_bytes(8, "little") + raw[24:],
    lambda raw: raw[:24] + (1 << 63).to_bytes(8, "little") + raw[32:],
    lambda raw: raw.replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0mamba", 1),
    lambda raw: raw.replace(b"gpt-2", b"qwen9", 1), lambda raw: raw.replace(b"gpt2", b"bert", 1),
    lambda raw: raw.replace(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight"),
    lambda raw: raw.replace(b"rope.dimension_count\4\0\0\0\4", b"rope.dimension_count\4\0\0\0\2"),
    lambda raw: os.urandom(5000)])
def test_a_damaged_gguf_gives_one_line(edit, tokenizer, tmp_path, capsys):
    as_folder(tmp_path, tokenizer)
    path, raw = tmp_path / "b.gguf", (tmp_path / "a.gguf").read_bytes()
    path.write_bytes(edit(raw))
    assert path.read_bytes() != raw
    line = refused(capsys, "import", path, tmp_path / "b.bin")
    assert str(path) in line and "give a Llama" in line, line


@pytest.mark.parametrize("left", [0.02, 0.3, 0.7, 0.999])
def test_a_gguf_that_is_cut_short_is_called_that(left, tokenizer, tmp_path, capsys):
    """In its fields, its list of tensors and the tensors."""
    as_folder(tmp_path, tokenizer)
    path, raw = tmp_path / "b.gguf", (tmp_path / "a.gguf").read_bytes()
    path.write_bytes(raw[:int(left * len(raw))])
    refused(capsys, "import", path, tmp_path / "b.bin", words=[
        f"{path}: the file is incomplete", f"found {path.stat().st_size:,} of ",
        "download it again"])
    path.write_bytes(b"To be, or not to be")
    refused(capsys, "import", path, tmp_path / "b.bin", words=[f"{path}: it is a text; give"])


def test_tensors_that_share_their_bytes_are_refused(tokenizer, tmp_path, capsys):
    """A small file may not become a large model."""
    gguf, path = package(), as_folder(tmp_path, tokenizer).with_name("a.gguf")
    f = gguf.GGUFReader(path, "r+")
    for t in f.tensors:
        t.field.parts[-1][:] = 0             # where its bytes begin
    f.data.flush()
    os.truncate(path, f.data_offset + max(t.n_bytes for t in f.tensors))
    assert "overlap" in refused(capsys, "import", path, tmp_path / "b.bin")


LIMITS = {"F16": 65504, "Q8_0": 127 * 65504}


@pytest.mark.parametrize("matrices", ["f16", "q8_0"])
@pytest.mark.parametrize("tensor", ["wte", "qkv", "attn_proj", "gate_up", "down", "lm_head"])
def test_what_a_type_cannot_hold_is_not_written(tensor, matrices, tokenizer, tmp_path, capsys):
    """Of the type that a tensor gets: rows that are no whole blocks of Q8_0 become F16.  Half of
    the limit arrives as a number, and more than the limit is rejected."""
    gguf, path = package(), write(tmp_path / "a.bin", replace(SMALL, vocab_size=512, n_mtp=1),
                                  tokenizer)
    c = ne.read_checkpoint(str(path))
    row = getattr(ne.views(c.flat, ne.param_table(c.cfg)), tensor).reshape(-1)
    whole = getattr(ne.Params(*(x.shape[-1] for x in ne.param_table(c.cfg))), tensor) % 32 == 0
    kind = "Q8_0" if matrices == "q8_0" and whole else "F16"
    assert whole == (tensor != "down")
    args = path, "--gguf", tmp_path / "a.gguf", "--matrices", matrices
    row[0] = 1.5 * LIMITS[kind]
    ne.write_checkpoint(str(path), c.cfg, c.tokenizer, c.state, c.flat)
    refused(capsys, "export", *args, words=[f"but {kind} stores at most", "--matrices f32"])
    assert not (tmp_path / "a.gguf").exists()
    row[0] = 0.5 * LIMITS[kind]
    ne.write_checkpoint(str(path), c.cfg, c.tokenizer, c.state, c.flat)
    run("export", *args)
    found = [gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(
        tmp_path / "a.gguf").tensors]
    assert max(np.abs(x).max() for x in found) == pytest.approx(row[0], rel=0.01)


def test_types_that_nobody_quantizes_to_are_refused(tokenizer, tmp_path, capsys):
    gguf = package()
    as_folder(tmp_path, tokenizer)           # writes a.gguf, too
    reader = gguf.GGUFReader(tmp_path / "a.gguf", "r+")
    tensor = next(t for t in reader.tensors if t.name.endswith("ffn_down.weight"))
    tensor.field.parts[4][0] = gguf.GGMLQuantizationType.I32         # as wide as float32
    reader.data.flush()
    refused(capsys, "import", tmp_path / "a.gguf", tmp_path / "b.bin", words=[
        "a.gguf", "ffn_down.weight has the type I32, expected one"])


# ---- split files
def split_gguf(tmp_path, tokenizer, monkeypatch):
    """The paths of a model in several parts, as the package gguf writes them; and the model."""
    gguf, path = package(), write(tmp_path / "a.bin", replace(TINY, vocab_size=512, n_mtp=1),
                                  tokenizer)

    class Writer(gguf.GGUFWriter):
        def __init__(self, path, arch):
            super().__init__(path, arch, split_max_tensors=7)

    c = ne.read_checkpoint(str(path))
    with monkeypatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", Writer)
        write_gguf(tmp_path / "s.gguf", c, "F32")
    return sorted(tmp_path.glob("s-*.gguf")), c


@pytest.mark.parametrize("k", [0, 1, -1])
def test_all_parts_of_a_split_file_are_read(k, tokenizer, tmp_path, monkeypatch):
    """Any of them may be named."""
    parts, c = split_gguf(tmp_path, tokenizer, monkeypatch)
    assert len(parts) == 3 and parts[0].name == "s-00001-of-00003.gguf"
    run("import", parts[k], tmp_path / "b.bin")
    again = ne.read_checkpoint(str(tmp_path / "b.bin"))
    assert again.cfg == c.cfg and np.array_equal(again.flat, c.flat)
    assert again.tokenizer.hash() == c.tokenizer.hash()


def test_no_part_of_a_split_file_is_replaced(tokenizer, tmp_path, monkeypatch, capsys):
    parts, _ = split_gguf(tmp_path, tokenizer, monkeypatch)
    before = [path.read_bytes() for path in parts]
    for source in parts:
        for out in parts:
            refused(capsys, "import", source, out, "--force",
                    words=[f"{out} would replace its input {out}"])
    assert [path.read_bytes() for path in parts] == before
    other = parts[0].with_name("t-00001-of-00003.gguf")  # of another model
    other.touch()
    run("import", parts[0], other, "--force")
    assert ne.read_checkpoint(str(other)).cfg


def parts_name(k):
    return f"s-{k:05}-of-00003.gguf"


def number(k):
    """The metadata that give the number of a part"""
    return b"split.no" + (2).to_bytes(4, "little") + k.to_bytes(2, "little")


def count(n):
    return b"split.tensors.count" + (5).to_bytes(4, "little") + n.to_bytes(4, "little")


def parts_in_all(n):
    return b"split.count" + (2).to_bytes(4, "little") + n.to_bytes(2, "little")


WRONG_PARTS = {              # what happened to the parts, and words of the line
    "one is missing": (lambda parts: parts[1].unlink(), ["expected 3 parts", parts_name(2)]),
    "one is cut short": (lambda parts: os.truncate(parts[2], 300), [parts_name(3), "incomplete"]),
    "one comes twice": (lambda parts: parts[2].write_bytes(parts[1].read_bytes()),
                        ["part 3 of 3 belongs to another split file: it has split.no 1"]),
    "one has the tensors of another": (lambda parts: parts[2].write_bytes(
        parts[1].read_bytes().replace(number(1), number(2), 1)), ["two parts have the tensor"]),
    "the number of tensors is wrong": (lambda parts: parts[0].write_bytes(
        parts[0].read_bytes().replace(count(21), count(22), 1)),
        ["expected 22 tensors in all parts, found 21"]),
    "one is of a file with more parts": (lambda parts: parts[2].write_bytes(
        parts[2].read_bytes().replace(parts_in_all(3), parts_in_all(4), 1)),
        ["part 3 of 3 belongs to another split file", "split.count 4"]),
    "one has the name of another number": (
        lambda parts: parts[0].rename(parts[0].with_name("s-00001-of-00004.gguf")),
        ["its name must end in -00001-of-00003.gguf"]),
    "one is another file": (lambda parts: parts[1].write_bytes(b"GGML" + bytes(99)),
                            ["it is not a GGUF file"]),
    "one has another name": (lambda parts: parts[0].rename(parts[0].with_name("x.gguf")),
                             ["a part of a split GGUF file", "gguf-split"])}


@pytest.mark.parametrize("name", WRONG_PARTS)
def test_a_split_file_that_is_not_whole_is_called_that(name, tokenizer, tmp_path, monkeypatch,
                                                       capsys):
    parts, _ = split_gguf(tmp_path, tokenizer, monkeypatch)
    edit, words = WRONG_PARTS[name]
    edit(parts)
    [source] = {parts[0], tmp_path / "x.gguf", tmp_path / "s-00001-of-00004.gguf"}.intersection(
        tmp_path.iterdir())
    refused(capsys, "import", source, tmp_path / "b.bin", words=words)


# ---- metadata
def put(writer, key, value, kind):
    gguf = package()
    writer.kv_data[0][key] = gguf.GGUFValue(value, gguf.GGUFValueType[kind])


WRONG_META = {               # changes of the writer, and words of the line
    "parts": (lambda w: put(w, "split.count", "x", "STRING"), "split.count is 'x'"),
    "a template": (lambda w: put(w, "tokenizer.chat_template", 5, "UINT32"),
                   "tokenizer.chat_template is 5, expected a text"),
    "rotations": (lambda w: put(w, "llama.rope.dimension_count", 2, "UINT32"),
                  "RoPE rotates 2 of 4 dimensions"),
    "two scalings": (lambda w: (w.add_tensor("rope_freqs.weight", np.ones(2, np.float32)),
                                put(w, "llama.rope.scaling.type", "linear", "STRING"),
                                put(w, "llama.rope.scaling.factor", 2.0, "FLOAT32")),
                     "found both"),
    "a factor alone beside others": (
        lambda w: (w.add_tensor("rope_freqs.weight", np.ones(2, np.float32)),
                   put(w, "llama.rope.scale_linear", 2.0, "FLOAT32")), "found both"),
    "attention without yarn": (
        lambda w: (put(w, "llama.rope.scaling.factor", 4.0, "FLOAT32"),
                   put(w, "llama.rope.scaling.attn_factor", 0.5, "FLOAT32")),
        "rope.scaling.attn_factor is 0.5 without rope.scaling.type yarn, expected 1"),
    "attention alone": (lambda w: put(w, "llama.rope.scaling.attn_factor", 0.5, "FLOAT32"),
                        "rope.scaling.attn_factor is 0.5"),
    "yarn without a factor": (lambda w: put(w, "llama.rope.scaling.type", "yarn", "STRING"),
                              "rope.scaling.type is yarn, but rope.scaling.factor is missing"),
    "another kind": (lambda w: (put(w, "llama.rope.scaling.type", "longrope", "STRING"),
                                put(w, "llama.rope.scaling.factor", 4.0, "FLOAT32")),
                     "rope_type is longrope"),
    "an unknown scaling": (lambda w: put(w, "llama.rope.scaling.alpha", 2.0, "FLOAT32"),
                           "rope.scaling.alpha is not supported"),
    "no context": (lambda w: w.kv_data[0].pop("llama.context_length"),
                   "llama.context_length is missing"),
    "no epsilon": (lambda w: w.kv_data[0].pop("llama.attention.layer_norm_rms_epsilon"),
                   "llama.attention.layer_norm_rms_epsilon is missing"),
    "a size": (lambda w: put(w, "llama.embedding_length", "8", "STRING"), "hidden_size is '8'")}


SCALED = {                   # metadata of RoPE, and what llama.cpp computes: type and factor
    "nothing": ({}, "", 1.0),
    "a type and a factor": ({"scaling.type": "linear", "scaling.factor": 4.0}, "linear", 4.0),
    "a factor": ({"scaling.factor": 4.0}, "linear", 4.0),
    "a factor of 1": ({"scaling.factor": 1.0}, "", 1.0),
    "a factor of 0": ({"scaling.factor": 0.0}, "", 1.0),
    "none": ({"scaling.type": "none", "scaling.factor": 4.0}, "", 1.0),
    "an older factor": ({"scale_linear": 4.0}, "linear", 4.0),
    "both factors": ({"scale_linear": 4.0, "scaling.factor": 2.0}, "linear", 2.0),
    "an older factor of yarn": ({"scaling.type": "yarn", "scale_linear": 4.0}, "yarn", 4.0)}


@pytest.mark.parametrize("name", SCALED)
def test_rope_of_gguf_is_scaled_as_in_llama_cpp(name):
    """Defaults of load_hparams in llama-model.cpp"""
    scaling, kind, factor = SCALED[name]
    of_model = {"context_length": 64, "embedding_length": 32, "feed_forward_length": 48,
                "block_count": 2, "attention.head_count": 4, "vocab_size": 300,
                "attention.layer_norm_rms_epsilon": 1e-5,
                **{f"rope.{key}": value for key, value in scaling.items()}}
    cfg = llama_config({**entries_in("llama", of_model), "vocab_size": 300})
    assert (cfg.rope_scaling, cfg.rope_factor) == (kind, factor)
    assert cfg.head_dim == 8 and cfg.n_kv_head == 4


@pytest.mark.parametrize("name", WRONG_META)
def test_each_check_of_a_gguf_file_refuses(name, tokenizer, tmp_path, monkeypatch, capsys):
    gguf, (edit, words) = package(), WRONG_META[name]
    path = write(tmp_path / "a.bin", replace(TINY, vocab_size=512, n_mtp=1), tokenizer)

    class Writer(gguf.GGUFWriter):
        def write_header_to_file(self):
            edit(self)
            super().write_header_to_file()

    with monkeypatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", Writer)
        write_gguf(tmp_path / "a.gguf", ne.read_checkpoint(str(path)), "F32")
    refused(capsys, "import", tmp_path / "a.gguf", tmp_path / "b.bin", words=[words])


@pytest.mark.parametrize("count, words", [
    (-1, "split.count is -1"), (0, ""), (1, ""), ((1 << 16) - 1, "must end in -00001-of-65535"),
    (1 << 16, "split.count is 65536")])
def test_the_number_of_parts_has_its_range(count, words, tmp_path):
    gguf = package()
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    put(writer, "split.count", count, "INT32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    if not words:
        assert read_gguf(str(tmp_path / "a.gguf"))[0]["split.count"] == count
        return
    with pytest.raises(ne.UserError, match=words):
        read_gguf(str(tmp_path / "a.gguf"))


# Names with one of our patterns whose other settings llama.cpp does not say
NOT_OURS = {"jina-v5-nano", "f2llmv2"}
KEYS = {                     # changes of the tokenizer's metadata, and words of the line
    "no tokens": (dict(tokens=None), "tokenizer.ggml.tokens is missing"),
    "no model": (dict(model=None), "tokenizer.ggml.model is missing"),
    "another model": (dict(model="rwkv"), "found rwkv"),
    "tokens of another type": (dict(tokens=[1, 2]), "tokenizer.ggml.tokens[0] is 1, expected"),
    "tokens twice": (dict(tokens=["a", "a"], token_type=[1, 1], bos_token_id=0), "same name"),
    "too few types": (dict(token_type=[1]), "token_type has 1 entries, expected 512"),
    "too few scores": (dict(model="llama", scores=[0.5]), "scores has 1 entries, expected 512"),
    "no scores": (dict(model="llama"), "tokenizer.ggml.scores is missing"),
    "BOS beyond": (dict(bos_token_id=512), "bos_token_id is 512, expected 0 to 511"),
    "EOS beyond": (dict(eos_token_id=-1), "eos_token_id is -1, expected 0 to 511"),
    "no BOS": (dict(add_bos_token=True, bos_token_id=None), "bos_token_id is missing"),
    "an ordinary BOS": (dict(add_bos_token=True, bos_token_id=64), "begins with the ids [64]"),
    "EOS after texts": (dict(add_eos_token=True), "after every text"),
    "no blanks": (dict(model="llama", remove_extra_whitespaces=True), "removes blanks"),
    "a number as a flag": (dict(add_bos_token=3), "add_bos_token is 3, expected true or false"),
    "another pre-tokenizer": (dict(pre="deepseek-llm"), "found gpt2, deepseek-llm")}


@pytest.mark.parametrize("name", KEYS)
def test_each_check_of_the_metadata_refuses(name, tokenizer):
    changed, words = KEYS[name]
    meta = {key.removeprefix("tokenizer.ggml."): value
            for key, value in gguf_of_tokenizer(tokenizer).items()}
    meta = {key: value for key, value in {**meta, "bos_token_id": 511, **changed}.items()
            if value is not None}
    with pytest.raises(ne.UserError) as error:
        tokenizer_of_gguf(meta)
    assert words in str(error.value)


def test_names_of_pre_tokenizers_are_those_of_transformers():
    """For each name, the pattern that its table gives; and the names that llama.cpp gives GPT-2's
    pattern, with and without each digit by itself."""
    needs("transformers")
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    theirs = {name: pattern.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", SHORT)
              for name, pattern in GGUF_PRE_TOKENIZER_SPLITS.items()}
    ours = {name: pre.cutting["pretokenizers"][0]["pattern"]["Regex"] for name, pre in PRE.items()
            if pre.cutting.get("pretokenizers", [{}])[0].get("type") == "Split"}
    both = theirs.keys() & ours.keys()
    assert {name: ours[name] for name in both} == {name: theirs[name] for name in both}
    assert {"llama3", "deepseek-r1-qwen", "falcon3", "llama4", "tekken"} <= both
    assert all(theirs[name] not in PATTERNS for name in theirs.keys() - both - NOT_OURS)


def words_of_gpt2(pre):
    """The metadata of a small tokenizer, without the prefix of their names"""
    tokens = [*bpe.CHAR_OF_ID, "\u0120t", "12", "\u0120the", "he", "</s>"]
    return dict(model="gpt2", pre=pre, tokens=tokens, token_type=[1] * 260 + [3],
                merges=["\u0120 t", "1 2", "h e", "\u0120t he"], bos_token_id=260)


@pytest.mark.parametrize("name", PRE)
def test_each_name_of_a_pre_tokenizer_splits_as_its_first_name(name):
    first = next(other for other, pre in PRE.items() if pre.cutting == PRE[name].cutting)
    tokenizers = [tokenizer_of_gguf({**words_of_gpt2(pre), "add_bos_token": False})
                  for pre in (name, first)]
    text = "the theatre 1234 I'LL \u00e9\n\n  x"
    assert tokenizers[0].encode(text).tolist() == tokenizers[1].encode(text).tolist()
    assert gguf_of_tokenizer(tokenizers[0])["tokenizer.ggml.pre"] in (first, "llama-bpe")


# The pre-tokenizers for which llama.cpp sets add_bos (llama-vocab.cpp)
BEGIN = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
         "tekken"}


@pytest.mark.parametrize("name", PRE)
def test_texts_begin_as_in_llama_cpp_if_a_file_does_not_say_how(name):
    assert BEGIN <= PRE.keys()
    words, special = words_of_gpt2(name), (260,)
    for adds, begins in {None: special * (name in BEGIN), True: special, False: ()}.items():
        more = {} if adds is None else {"add_bos_token": adds}
        tokenizer = tokenizer_of_gguf({**words, **more})
        assert tokenizer.begins == begins, adds
        ids = tokenizer.encode("the").tolist()
        assert tokenizer.encode_whole("the").tolist() == [*begins, *ids]
        assert gguf_of_tokenizer(tokenizer)["tokenizer.ggml.add_bos_token"] is bool(begins)
