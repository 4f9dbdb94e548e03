"""Directories of Hugging Face: transformers reads ours, we run theirs, what is none is refused."""
import copy
import inspect
import itertools
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from helpers import (PYTHON, ROOT, TINY, drawn, needs, places_in, refused, replace_everywhere,
                     replaced, run, some, told)
from hypothesis import given
from hypothesis import strategies as st
from models import (CHATML, CONFIGS, HELLO, SPECIALS, as_folder, change, dicts, greedy,
                    write)
from texts import TORTURE

import bpe
import nanoeuler as ne
from nanoeuler_parts.chat.jinja import render, TEMPLATE_BYTES
from nanoeuler_parts.chat.templates import chat_ids
from nanoeuler_parts.checkpoint.tensors import named
from nanoeuler_parts.files.safetensors import map_tensors, write_tensors
from nanoeuler_parts.interchange import huggingface
from nanoeuler_parts.interchange.forms import reading_form
from nanoeuler_parts.interchange.huggingface import (
    FILES_OF_LLAMA, INDEX, llama_of_folder, OF_HUB, Settings,
)
from nanoeuler_parts.interchange.llama import LLAMA, llama_config

pytestmark = pytest.mark.interop


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_computes_the_same_logits(name, tokenizer, tmp_path):
    """At every position of a full context; nothing but the directory goes from here to there."""
    torch, transformers = needs("torch"), needs("transformers")
    cfg = CONFIGS[name]
    path = write(tmp_path / "a.bin", replace(cfg, vocab_size=512), tokenizer)
    run("export", path, tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, attn_implementation="eager")
    tokens = np.random.default_rng(3).integers(0, 512, (1, cfg.seq_len)).astype(np.int32)
    with torch.no_grad():
        want = theirs(torch.tensor(tokens, dtype=torch.int64)).logits[0].numpy()
    c = ne.read_checkpoint(str(path))
    got = ne.Model(c.cfg, c.flat).logits(tokens)[0, 0]
    assert got.shape == want.shape and want.std() > 0.5
    assert np.abs(got - want).max() < 1e-4
    decoder = ne.Decoder(c.cfg, c.flat)
    for t in range(40):
        assert np.abs(decoder.step(tokens[0, t]) - want[t]).max() < 1e-4
    prompt, ours = greedy(c, "To be, or not to", 50)
    text = theirs.generate(torch.tensor([prompt]), max_new_tokens=50, do_sample=False,
                           eos_token_id=None, pad_token_id=0)[0, len(prompt):]
    assert ours == text.tolist()


def test_transformers_reads_tokenizer_and_template(tokenizer, tmp_path):
    transformers = needs("transformers")
    path = write(tmp_path / "a.bin", replace(TINY, vocab_size=512), tokenizer, kind="chat")
    run("export", path, tmp_path / "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs.eos_token == "</s>" and theirs.model_max_length == TINY.seq_len
    assert not theirs.clean_up_tokenization_spaces       # else " ." would be decoded to "."
    for config in (transformers.GenerationConfig, transformers.AutoConfig):
        assert config.from_pretrained(tmp_path / "hf").eos_token_id == tokenizer.specials["</s>"]
    ours = ne.read_checkpoint(str(path))
    asked = [("user", "What is 12 + 345?")]
    want = theirs.apply_chat_template(dicts(asked), add_generation_prompt=True)["input_ids"]
    assert chat_ids("", asked, ours.state, ours.tokenizer) == want
    long = theirs.apply_chat_template(dicts(HELLO), tokenize=False)
    assert long.count("### Instruction:") == 2 and "Hi.</s>" in long
    fast = theirs.backend_tokenizer
    fast.encode_special_tokens = True
    assert fast.encode(TORTURE).ids == ours.tokenizer.encode(TORTURE).tolist()


def test_heads_travel_beside_the_llama(tokenizer, tmp_path):
    """safetensors opens both files; import gives the same model back, moments apart."""
    safetensors = needs("safetensors.numpy")
    cfg = replace(TINY, n_mtp=3, vocab_size=512, tie_embeddings=True, rope_theta=5e5)
    path = write(tmp_path / "a.bin", cfg, tokenizer, kind="chat", template="hi", bos="<|im_start|>")
    run("export", path, tmp_path / "hf")
    c = ne.read_checkpoint(str(path))
    heads = safetensors.load_file(tmp_path / "hf" / "mtp.safetensors")
    p = ne.views(c.flat, ne.param_table(cfg))
    assert sorted(heads) == ["mtp.1.weight", "mtp.2.weight"]
    assert np.array_equal(heads["mtp.2.weight"], p.lm_head[1])
    assert "lm_head.weight" not in safetensors.load_file(tmp_path / "hf" / "model.safetensors")
    assert safetensors.load_file(path)["mtp.2.weight"].shape == (512, cfg.n_embd)
    run("import", tmp_path / "hf", tmp_path / "b.bin")
    again = ne.read_checkpoint(str(tmp_path / "b.bin"))
    assert again.cfg == cfg and np.array_equal(again.flat, c.flat)
    assert again.tokenizer.hash() == c.tokenizer.hash()
    assert (again.state.template, again.state.bos, again.state.eos, again.state.kind) == (
        "hi", "<|im_start|>", "</s>", "chat")
    write(path, replace(cfg, n_mtp=1), tokenizer)        # whose folder has no heads, even of others
    run("export", path, tmp_path / "hf", "--force")
    run("import", tmp_path / "hf", tmp_path / "c.bin")
    assert ne.read_checkpoint(str(tmp_path / "c.bin")).cfg.n_mtp == 1


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_sharded_model_of_transformers_runs_here(dtype, tokenizer, tmp_path):
    """Written by save_pretrained alone, in any of its types, several files."""
    torch, transformers = needs("torch"), needs("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=48, intermediate_size=80, num_hidden_layers=3, head_dim=20,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=60, rms_norm_eps=3e-4,
        initializer_range=0.2, rope_parameters=dict(rope_type="default", rope_theta=7e4))
    theirs = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype))
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="60KB")
    tokenizer.save(tmp_path / "hf" / "tokenizer.json")
    (tmp_path / "hf" / "tokenizer_config.json").write_text(
        '{"eos_token": {"content": "<|im_end|>"}}', encoding="utf-8")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    run("import", tmp_path / "hf", tmp_path / "a.bin")
    c = ne.read_checkpoint(str(tmp_path / "a.bin"))
    assert c.cfg.rope_theta == 7e4 and c.cfg.norm_eps == 3e-4 and c.cfg.head_dim == 20
    assert c.state.kind == "base" and c.state.eos == "<|im_end|>"
    tokens = np.random.default_rng(3).integers(0, 512, (1, 60)).astype(np.int32)
    with torch.no_grad():
        theirs = theirs.from_pretrained(tmp_path / "hf", dtype=torch.float32)
        want = theirs(torch.tensor(tokens, dtype=torch.int64)).logits[0].numpy()
    assert np.abs(ne.Model(c.cfg, c.flat).logits(tokens)[0, 0] - want).max() < 1e-4 * want.std()


@pytest.mark.parametrize("state", [
    dict(kind="base"), dict(kind="chat", template=CHATML, eos="<|im_end|>", bos="<|im_start|>")],
    ids=lambda state: state["kind"])
def test_a_model_comes_back_from_transformers(state, tokenizer, tmp_path):
    """Exported, loaded and saved there by save_pretrained, and imported again."""
    transformers = needs("transformers")
    cfg = replace(TINY, vocab_size=512, n_mtp=1, tie_embeddings=True, rope_theta=5e5)
    path = write(tmp_path / "a.bin", cfg, tokenizer, **state)
    run("export", path, tmp_path / "hf")
    for kind in transformers.AutoModelForCausalLM, transformers.AutoTokenizer:
        kind.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "tokenizer.json").read_text(encoding="utf-8"))
    assert saved["post_processor"]["type"] == "TemplateProcessing"       # which adds no token
    run("import", tmp_path / "again", tmp_path / "b.bin")
    before, after = (ne.read_checkpoint(str(tmp_path / name)) for name in ("a.bin", "b.bin"))
    assert after.cfg == before.cfg and np.array_equal(after.flat, before.flat)
    assert after.tokenizer.hash() == before.tokenizer.hash()
    for name in "kind", "template", "bos", "eos":
        assert getattr(after.state, name) == getattr(before.state, name)


def test_what_a_config_leaves_out_is_as_in_transformers():
    """Keys that are missing or null: transformers says what they are then."""
    transformers = needs("transformers")
    bare = dict(model_type="llama", vocab_size=512, hidden_size=48, intermediate_size=80,
                num_hidden_layers=3, num_attention_heads=6)
    want = transformers.LlamaConfig(**bare)
    for c in (bare, {**{key: None for _, key, _ in LLAMA}, **bare}):
        got = llama_config(c)
        for ours, theirs, _ in LLAMA:
            value = (want.rope_parameters if theirs == "rope_theta" else vars(want))[theirs]
            assert getattr(got, ours) == value, ours


def test_other_shapes_of_a_directory(tokenizer, tmp_path):
    """A template in a file of its own, no eos, tensors that follow from others: old or new."""
    cfg = replace(TINY, vocab_size=512, n_mtp=1, tie_embeddings=True)
    path, folder = write(tmp_path / "a.bin", cfg, tokenizer), tmp_path / "hf"
    run("export", path, folder)
    change(folder / "config.json", rope_theta=10000)     # an int is a float, too
    words = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    assert "chat_template" not in words and words["eos_token"] == "</s>"
    change(folder / "tokenizer_config.json", chat_template="old", eos_token=None)
    (folder / "chat_template.jinja").write_text("new", encoding="utf-8")
    _, tensors = map_tensors(folder / "model.safetensors")
    tensors = {name: x.copy() for name, x in tensors.items()}
    more = {"lm_head.weight": tensors["model.embed_tokens.weight"],
            "model.layers.0.self_attn.rotary_emb.inv_freq": np.array([1, 0.01], np.float32)}
    write_tensors(folder / "model.safetensors", {"format": "pt"}, {**tensors, **more}, "")
    run("import", folder, tmp_path / "b.bin")
    a, b = (ne.read_checkpoint(str(tmp_path / name)) for name in ("a.bin", "b.bin"))
    assert b.cfg == cfg and np.array_equal(a.flat, b.flat)
    assert (b.state.kind, b.state.template, b.state.eos) == ("chat", "new", "")


# ---- digits
def test_words_around_digits_are_those_of_tokenizers():
    tokenizers = needs("tokenizers")
    plain = bpe.train(TORTURE.encode(), 2000, SPECIALS)
    ours = bpe.Tokenizer(plain._ids, plain._lines, SPECIALS, digits=True)
    peer = tokenizers.Tokenizer.from_str(ours.to_json())
    peer.encode_special_tokens = True
    assert ours.encode(TORTURE).tolist() == peer.encode(TORTURE).ids
    again = bpe.Tokenizer.from_json(ours.to_json())
    assert again.digits and again.hash() == ours.hash() != plain.hash()
    assert not bpe.Tokenizer.from_json(plain.to_json()).digits

    @drawn(200)
    @given(st.text(st.sampled_from("a b  1\u00bd\u0663'\ns\u00e9.\U00011de3"), max_size=40))
    def any_text(text):
        assert ours.encode(text).tolist() == peer.encode(text).ids

    any_text()


def test_digits_need_a_file_that_says_so(tokenizer, tmp_path):
    ours = bpe.Tokenizer(tokenizer._ids, tokenizer._lines, SPECIALS, digits=True)
    with pytest.raises(bpe.UserError, match="json"):
        ours.save(tmp_path / "folder")


def test_a_byte_without_an_id_is_left_out():
    tokenizers = needs("tokenizers")
    names = [c for c in bpe.CHAR_OF_ID if c not in "bq"] + ["ac"]
    ours = bpe.Tokenizer({s: k for k, s in enumerate(names)}, ["a c"])
    peer = tokenizers.Tokenizer.from_str(ours.to_json())
    for text in ("abc", "bq", "qab cab bc", "b" * 300 + "ac"):
        assert ours.encode(text).tolist() == peer.encode(text).ids
    root = json.loads(ours.to_json())
    root["model"]["unk_token"] = "ac"
    with pytest.raises(bpe.UserError, match="unk_token"):
        bpe.Tokenizer.from_json(json.dumps(root))


# ---- what was imported
def test_an_imported_model_is_fine_tuned(tokenizer, tmp_path):
    """Its template and the token that ends a response stay."""
    path = write(tmp_path / "a.bin", replace(TINY, seq_len=300, vocab_size=512, n_mtp=1), tokenizer,
                 kind="chat", template=CHATML, eos="<|im_end|>")
    run("export", path, tmp_path / "hf")
    run("import", tmp_path / "hf", tmp_path / "b.bin")
    data = [dict(instruction=f"Add {a} and 1.", output=str(a + 1)) for a in range(150)]
    (tmp_path / "data.json").write_text(json.dumps(data), encoding="utf-8")
    run("sft", tmp_path / "b.bin", "--data", tmp_path / "data.json", "--steps", 2, "--batch", 600,
        "--out", tmp_path / "c.bin")
    state = ne.read_checkpoint(str(tmp_path / "c.bin")).state
    assert (state.kind, state.template, state.eos, state.step) == (
        "chat", CHATML, "<|im_end|>", 2)


# ---- what is refused
@pytest.mark.parametrize("config, word", [
    (dict(model_type="gemma", architectures=None), "Qwen3, found gemma"),
    (dict(model_type="absent"), "model_type"),
    (dict(attention_bias=True), "attention_bias"), (dict(mlp_bias=True), "mlp_bias"),
    (dict(hidden_act="gelu"), "gelu"), (dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
    (dict(rope_scaling=dict(type="dynamic", factor=2.0)), "dynamic"),
    (dict(rope_scaling=dict(rope_type="llama3", factor=8.0)), "low_freq_factor"),
    (dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4)), "factor is None"),
    (dict(hidden_size=10 ** 6), "n_embd"), (dict(hidden_size="absent"), "hidden_size"),
    (dict(vocab_size=10 ** 9), "vocab_size"), (dict(vocab_size=511), "511"),
    (dict(num_hidden_layers=4000, hidden_size=60000), "60000"),
    (dict(num_hidden_layers=3), "model.layers.2"), (dict(num_hidden_layers=1), "model.layers.1"),
    (dict(num_key_value_heads=3), "n_kv_head"), (dict(head_dim=6), "q_proj"),
    (dict(num_attention_heads=0), "hf"), (dict(num_attention_heads="2"), "hf"),
    (dict(rms_norm_eps=[1]), "norm_eps"), (dict(rope_scaling="x"), "hf"),
    (dict(intermediate_size=None), "intermediate_size")])
def test_a_model_that_is_none_of_ours(config, word, tokenizer, tmp_path, capsys):
    folder = as_folder(tmp_path, tokenizer, **config)
    line = refused(capsys, "import", folder, tmp_path / "b.bin")
    assert word in line and str(folder) in line and "give a Llama" in line, line
    assert not (tmp_path / "b.bin").exists()


def cut(path, n):
    path.write_bytes(path.read_bytes()[:n])


def tensors_of(folder):
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    return path, json.loads(raw[8:8 + n]), raw[8 + n:]


def rewrite(folder, edit):
    """model.safetensors with another header."""
    path, header, data = tensors_of(folder)
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def longer(path):
    """No checksum of ours tells it."""
    rewrite(path.parent, lambda header: header["__metadata__"].pop("sha256"))
    path.write_bytes(path.read_bytes() + b"\0")


def keep_shard(folder, part):
    """Some of the tensors of model.safetensors, in a file of another name, and an index."""
    _, tensors = map_tensors(folder / "model.safetensors")
    os.remove(folder / "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(
        tensors, "model-2-of-2.safetensors")}), encoding="utf-8")
    write_tensors(folder / "model-2-of-2.safetensors", {"format": "pt"},
                     dict(list(tensors.items())[part]), "")


NORM = "model.norm.weight"
DAMAGED = {
    "no directory": lambda f: os.rename(f, f.with_name("elsewhere")),
    "no config": lambda f: os.remove(f / "config.json"),
    "no weights": lambda f: os.remove(f / "model.safetensors"),
    "no tokenizer": lambda f: os.remove(f / "tokenizer.json"),
    "no tokenizer_config": lambda f: os.remove(f / "tokenizer_config.json"),
    "config is a list": lambda f: (f / "config.json").write_text("[1]", encoding="utf-8"),
    "config is no JSON": lambda f: (f / "config.json").write_text("{", encoding="utf-8"),
    "weights cut": lambda f: cut(f / "model.safetensors", -7),
    "weights a byte longer": lambda f: longer(f / "model.safetensors"),
    "weights empty": lambda f: cut(f / "model.safetensors", 0),
    "weights a header long": lambda f: cut(f / "model.safetensors", 9),
    "header of 2^60 bytes": lambda f: (f / "model.safetensors").write_bytes(
        (1 << 60).to_bytes(8, "little") + b"{}"),
    "a shard missing": lambda f: keep_shard(f, slice(4, None)),
    "a bias": lambda f: rewrite(f, lambda h: h.update(
        {"model.layers.0.self_attn.q_proj.bias": h[NORM]})),
    "a tensor missing": lambda f: rewrite(f, lambda h: h.pop(NORM)),
    "another shape": lambda f: rewrite(f, lambda h: h[NORM].update(shape=[2, 4])),
    "a shape of 2^50": lambda f: rewrite(f, lambda h: h[NORM].update(shape=[1 << 50])),
    "offsets beyond": lambda f: rewrite(f, lambda h: h[NORM].update(data_offsets=[0, 1 << 60])),
    "another type": lambda f: rewrite(f, lambda h: h[NORM].update(dtype="F64")),
    "all the same bytes": lambda f: rewrite(f, lambda h: [
        h.update({f"x{i}": h["model.embed_tokens.weight"]}) for i in range(9)]),
    "offsets missing": lambda f: rewrite(f, lambda h: h[NORM].pop("data_offsets")),
    "tokenizer of another size": lambda f: bpe.train(TORTURE.encode(), 600).save(
        f / "tokenizer.json"),
    "tokenizer of WordPiece": lambda f: change(f / "tokenizer.json", pre_tokenizer=dict(
        type="Whitespace")),
    "a token before every text, by template": lambda f: change(
        f / "tokenizer.json", post_processor=dict(type="TemplateProcessing")),
    "a template that is a list": lambda f: change(f / "tokenizer_config.json", chat_template=[1]),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_directory_gives_one_line(name, tokenizer, tmp_path, capsys):
    folder = as_folder(tmp_path, tokenizer)
    DAMAGED[name](folder)
    line = refused(capsys, "import", folder, tmp_path / "b.bin")
    assert str(folder) in line and "give a Llama" in line, line
    assert name != "no config" or str(folder / "config.json") in line
    assert not (tmp_path / "b.bin").exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors"])
def test_the_file_of_a_directory_that_is_cut_short_is_named(name, tokenizer, tmp_path, capsys):
    path = as_folder(tmp_path, tokenizer) / name
    path.write_bytes(path.read_bytes()[:-9])
    refused(capsys, "import", path.parent, tmp_path / "b.bin",
            words=[path, "download it again"])


def test_a_folder_of_gpt2_is_no_llama(tmp_path, capsys):
    """Nothing of what a Llama has and GPT-2 lacks is asked for."""
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps({
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_head": 12}), "utf-8")
    refused(capsys, "import", tmp_path / "gpt2", tmp_path / "b.bin",
            words=["expected one of Llama, Mistral, Qwen2, Qwen3, found GPT2LMHeadModel"])


def test_a_file_of_others_stays(tokenizer, tmp_path, capsys):
    """Heads 1.. of ours are in mtp.safetensors; this one is somebody else's."""
    folder = as_folder(tmp_path, tokenizer)
    for path in folder.iterdir():
        path.unlink()
    theirs = folder / "mtp.safetensors"
    write_tensors(theirs, {"format": "pt"}, {"draft.weight": np.ones(3, np.float32)}, "")
    before = theirs.read_bytes()
    for force in ([], ["--force"]):
        refused(capsys, "export", tmp_path / "a.bin", folder, *force, words=["mtp.safetensors"])
        assert theirs.read_bytes() == before and os.listdir(folder) == ["mtp.safetensors"]


STRAYS = {"chat_template.jinja": "theirs", "special_tokens_map.json": '{"eos_token": "<|im_end|>"}',
          "adapter_config.json": "{}"}


@pytest.mark.parametrize("name", STRAYS)
def test_a_folder_with_a_file_that_is_read_first_is_rejected(name, tokenizer, tmp_path, capsys):
    folder = as_folder(tmp_path, tokenizer)
    (folder / name).write_text(STRAYS[name], encoding="utf-8")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    refused(capsys, "export", tmp_path / "a.bin", folder, "--force", words=[name, "remove"])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (folder / name).unlink()
    run("export", tmp_path / "a.bin", folder, "--force")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("source", ["hf", "a.gguf"])
def test_the_tensor_that_is_not_finite_is_named(source, bad, tokenizer, tmp_path, capsys,
                                                monkeypatch):
    read = ne.read_checkpoint

    def spoilt(path, moments=True):
        c = read(path, moments)
        named(c.cfg, c.flat)["model.layers.1.mlp.up_proj.weight"][3, 5] = bad
        return c
    replace_everywhere(monkeypatch, "nanoeuler_parts.checkpoint.file.read_checkpoint", spoilt)
    as_folder(tmp_path, tokenizer)           # exports it
    refused(capsys, "import", tmp_path / source, tmp_path / "b.bin",
            words=[source, f"model.layers.1.mlp.up_proj.weight[3, 5] is {bad}"])
    assert not (tmp_path / "b.bin").exists()


def test_info_of_an_imported_model(tokenizer, tmp_path):
    """What is not known is not there: no validation of 0 bits, no hash of a text."""
    folder = as_folder(tmp_path, tokenizer)
    run("import", folder, tmp_path / "b.bin")
    rows = dict(line.split(maxsplit=1) for line in told("info", tmp_path / "b.bin").splitlines()
                if line.startswith("  "))
    assert rows["text"] == str(folder) and rows["validation"] == "none yet"
    assert rows["checksum"] == "matches"


def test_what_exists_is_not_replaced(tokenizer, tmp_path, capsys):
    folder = as_folder(tmp_path, tokenizer)
    for args in (("import", folder, tmp_path / "a.bin"), ("export", tmp_path / "a.bin", folder),
                 ("export", tmp_path / "a.bin", "--gguf", tmp_path / "a.gguf")):
        assert "--force" in refused(capsys, *args)
        run(*args, "--force")
    assert "--gguf" in refused(capsys, "export", tmp_path / "a.bin")
    line = refused(capsys, "export", tmp_path / "a.bin", tmp_path / "x", "--matrices", "q4")
    assert "q8_0" in line
    assert "No such file" in refused(capsys, "export", tmp_path / "none.bin", tmp_path / "x")
    assert "cannot write" in refused(capsys, "import", folder, tmp_path / "none" / "b.bin")
    (tmp_path / "x").write_text("a file", encoding="utf-8")
    assert "is not a directory" in refused(capsys, "export", tmp_path / "a.bin", tmp_path / "x")
    os.remove(folder / "config.json")
    for name in sorted(x.name for x in folder.iterdir()):        # any of them alone
        alone = tmp_path / f"alone {name}"
        alone.mkdir()
        (alone / name).write_text("mine", encoding="utf-8")
        assert name in refused(capsys, "export", tmp_path / "a.bin", alone)
        assert (alone / name).read_text("utf-8") == "mine"


FUZZ = '''
import contextlib, io, json, pathlib, random, resource, signal, sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
import bpe, nanoeuler as ne
from nanoeuler_parts.interchange.importing import import_llama
folder, good = pathlib.Path({folder!r}), pathlib.Path({gguf!r})
bad, out, rng = good.with_name("bad.gguf"), good.with_name("fuzz.bin"), random.Random(1)
raw, weights = good.read_bytes(), (folder / "model.safetensors").read_bytes()
texts = {{name: (folder / name).read_text(encoding="utf-8")
         for name in ("config.json", "tokenizer_config.json")}}
NASTY = [-1, 0, 1, 1 << 31, 10 ** 30, 1e308, "", "x", None, True, [], {{}}, [[1]]]
import_llama(str(good), str(out), "f32", True)
pages = int(open("/proc/self/statm", encoding="ascii").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (256 << 20),) * 2)
counts = dict(read=0, refused=0)
header = len(raw) - {data}
for i in range({count}):
    signal.alarm(20)                         # a hang ends the process
    source = bad if i % 2 else folder
    if i % 2:                                # bytes of GGUF's head, or its end
        b = bytearray(raw if rng.random() < 0.8 else raw[:rng.randrange(len(raw))])
        for _ in range(rng.choice([1, 1, 3, 30])):
            place = rng.choice([rng.randrange(700), rng.randrange(header)])
            b[place % max(1, len(b)):][:1] = bytes([rng.randrange(256)])
            if len(b):
                b[place % len(b)] = rng.choice([0, 1, 255, rng.randrange(256)])
        bad.write_bytes(b)
    elif i % 4:                              # a byte of the safetensors header
        b = bytearray(weights)
        for _ in range(rng.choice([1, 2, 9])):
            b[rng.randrange(3000)] = rng.choice(b"0123456789,[]xF\\0\\xff")
        (folder / "model.safetensors").write_bytes(b)
    else:                                    # a value of the settings
        name = rng.choice(list(texts))
        root = json.loads(texts[name])
        key = rng.choice([*root, "rope_scaling", "chat_template", "eos_token"])
        root[key] = rng.choice([*NASTY, root.get(key)])
        (folder / name).write_text(json.dumps(root), encoding="utf-8")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            import_llama(str(source), str(out), "f32", True)
        counts["read"] += 1
        ne.read_checkpoint(str(out))
    except ne.UserError as e:
        counts["refused"] += 1
        assert "\\n" not in str(e) and str(source) in str(e), str(e)
    except BaseException:
        print("mutant", i, file=sys.stderr)
        raise
    if source is folder:
        (folder / "model.safetensors").write_bytes(weights)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
print(json.dumps(counts))
'''


def test_hundreds_of_mutated_models(tokenizer, tmp_path):
    """One line each; with 256 MB to spare, so no size is believed before it is checked."""
    if sys.platform != "linux":
        pytest.skip("RLIMIT_AS and /proc are Linux's")
    folder = as_folder(tmp_path, tokenizer)
    data, n = 4 * ne.n_params(replace(TINY, vocab_size=512, n_mtp=1)), some(600)
    script = FUZZ.format(root=str(ROOT), folder=str(folder), gguf=str(tmp_path / "a.gguf"),
                         count=n, data=data)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, encoding="utf-8",
                            timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    counts = json.loads(result.stdout.splitlines()[-1])
    assert counts["refused"] > n // 3 and counts["read"] > n // 60, counts


@pytest.mark.parametrize("entries, words", [
    (dict(quantization_config={"bits": 4}), "quantization_config"),
    (dict(layer_types=["full_attention", "sliding_attention"]), "layer_types"),
    (dict(sliding_window=16, max_position_embeddings=64), "sliding_window is 16")])
def test_a_config_that_would_compute_something_else_is_refused(entries, words):
    """A window as long as the context changes nothing."""
    config = {"model_type": "llama", "num_attention_heads": 2, "hidden_size": 8,
              "intermediate_size": 12, "num_hidden_layers": 2, "vocab_size": 262}
    llama_config({**config, "sliding_window": 64, "max_position_embeddings": 64,
                     "layer_types": ["full_attention"] * 2})
    with pytest.raises(ne.UserError, match=words):
        llama_config({**config, **entries})


# ---- the Hub
class Hub:
    """What huggingface_hub is to `import`, without a network: it copies the files of `folder` that
    a call allows to an empty cache."""
    asked = []

    def __init__(self, folder, error=None):
        self.folder, self.error, self.at = folder, error, folder and folder.with_name("0" * 40)
        self.revisions = []

    def snapshot_download(self, repo_id, *, revision, allow_patterns, ignore_patterns):
        self.asked.append((repo_id, revision))
        self.revisions.append(revision)
        if self.error:
            raise self.error
        assert ignore_patterns == "*/*"
        for path in self.folder.iterdir():
            if path.name in allow_patterns:
                self.at.mkdir(exist_ok=True)
                shutil.copy(path, self.at)
        return str(self.at)


def test_a_model_of_the_hub(tokenizer, tmp_path, monkeypatch, capsys):
    folder = as_folder(tmp_path, tokenizer)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub(folder))
    for name, want in (("org/na.me-1", ("org/na.me-1", None)),
                       ("org/name@v1.0", ("org/name", "v1.0"))):
        assert f"{name}: no such directory; fetching it" in told("import", name, "out.bin",
                                                                 "--force")
        assert Hub.asked.pop() == want
    assert ne.read_checkpoint("out.bin").cfg.n_embd == TINY.n_embd
    error = ConnectionError("Cannot connect.  (Request ID: 1)\nPlease make sure that " + "x" * 999)
    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub(None, error))
    said = refused(capsys, "import", "org/name", "new.bin", words=[
        "org/name: no such directory", "Hub", "ConnectionError: Cannot connect"])
    assert len(said) < 160
    refused(capsys, "import", "name", "new.bin", words=["name: No such file"])
    refused(capsys, "import", "a/b/c", "new.bin", words=["a/b/c: No such file"])
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name").mkdir()      # what is there is not looked for elsewhere
    refused(capsys, "import", "org/name", "new.bin", words=["org/name", "config.json"])
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused(capsys, "import", "org/other", "new.bin", words=["huggingface_hub", "pip install"])


@pytest.mark.parametrize("name", OF_HUB)
def test_errors_of_the_hub_are_said_in_a_line(name, tmp_path, monkeypatch, capsys):
    """Those of its client, whose own words are a paragraph with an address in it."""
    errors = pytest.importorskip("huggingface_hub.errors", reason="huggingface_hub comes with hub")
    kind = getattr(errors, name)
    error = kind.__new__(kind)
    error.args = "401 Client Error. (Request ID: Root=1)\n\nRepository Not Found for url: ...",
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub(None, error))
    said = refused(capsys, "import", "org/name", "new.bin", words=[OF_HUB[name]])
    assert "401" not in said and len(said) < 200


def test_the_hubs_client_has_that_function():
    hub = needs("huggingface_hub")
    inspect.signature(hub.snapshot_download).bind("org/name", revision=None, allow_patterns=[],
                                                  ignore_patterns="*/*")
    from huggingface_hub.utils import filter_repo_objects
    names = ["config.json", "model.safetensors", "onnx/config.json", "original/x.safetensors"]
    kept = filter_repo_objects(names, allow_patterns=["*.safetensors", *FILES_OF_LLAMA],
                               ignore_patterns="*/*")
    assert list(kept) == names[:2]


def sharded(folder, n=2):
    """The weights of a directory in n shards and an index, as save_pretrained writes them."""
    _, tensors = map_tensors(folder / "model.safetensors")
    tensors = {name: x.copy() for name, x in tensors.items()}
    os.remove(folder / "model.safetensors")
    index = {}
    for k in range(n):
        name = f"model-{k + 1:05}-of-{n:05}.safetensors"
        part = dict([*tensors.items()][k::n])
        write_tensors(folder / name, {"format": "pt"}, part, "")
        index |= dict.fromkeys(part, name)
    (folder / INDEX).write_text(json.dumps({
        "metadata": {"total_size": 0}, "weight_map": index}), encoding="utf-8")
    return index


def noise(shape=(512, 8)):
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


OTHERS = {                   # files beside the model: (name, tensors)
    "a shard of an older save": ("model-00001-of-00003.safetensors",
                                 {"model.embed_tokens.weight": noise()}),
    "the weights in another form": ("consolidated.safetensors", {"tok_embeddings.weight": noise()}),
    "an adapter": ("adapter_model.safetensors", {"lm_head.weight": noise()}),
    "heads of another program": ("mtp.safetensors", {"mtp.1.weight": noise(), "draft": noise()})}


@pytest.mark.parametrize("shards", [0, 2])
def test_only_the_files_of_the_model_are_read(shards, tokenizer, tmp_path):
    """What lies beside them belongs to another model, or repeats this one: the rule of
    transformers, which computes with the same weights."""
    transformers = needs("transformers")
    folder = as_folder(tmp_path, tokenizer)
    _, want = map_tensors(folder / "model.safetensors")
    want = {name: x.copy() for name, x in want.items()}
    if shards:
        sharded(folder, shards)
    for name, tensors in OTHERS.values():
        write_tensors(folder / name, {"format": "pt"}, tensors, "")
    found = llama_of_folder(folder)
    assert found.shapes == {name: x.shape for name, x in want.items()}
    for name, x in want.items():
        assert np.array_equal(found.read(name, 0, len(x)), x), name
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(np.array_equal(theirs[name].numpy(), x) for name, x in want.items())


def wrong_index(folder, edit):
    index = edit(sharded(folder))
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


def repeated(folder):
    sharded(folder)
    path = folder / "model-00002-of-00002.safetensors"
    tensors = {name: x.copy() for name, x in map_tensors(path)[1].items()}
    write_tensors(path, {"format": "pt"}, {**tensors, "model.embed_tokens.weight": noise()}, "")


WRONG_FILES = {
    "a tensor twice": (repeated, ["model-00001-of-00002.safetensors and model-00002-of-00002",
                                  "model.embed_tokens.weight", "expected it once"]),
    "no shards": (lambda f: wrong_index(f, lambda i: {"weight_map": {}}), [INDEX, "weight_map"]),
    "no map": (lambda f: wrong_index(f, lambda i: {"weight_map": [1]}), [INDEX, "weight_map"]),
    "a path": (lambda f: wrong_index(f, lambda i: {"weight_map": {"a": "../model.safetensors"}}),
               [INDEX, "'../model.safetensors'", "same directory"]),
    "a number": (lambda f: wrong_index(f, lambda i: {"weight_map": {"a": 1}}), [INDEX, "has 1,"]),
    "a shard too few": (lambda f: (sharded(f), os.remove(f / "model-00002-of-00002.safetensors")),
                        ["model-00002-of-00002.safetensors: No such file"]),
    "another name": (lambda f: os.rename(f / "model.safetensors", f / "weights.safetensors"),
                     ["expected model.safetensors or", "found weights.safetensors"])}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_files_that_do_not_fit_are_named(name, tokenizer, tmp_path, capsys):
    edit, words = WRONG_FILES[name]
    folder = as_folder(tmp_path, tokenizer)
    edit(folder)
    refused(capsys, "import", folder, tmp_path / "b.bin", words=[folder, *words])


def test_the_hub_gives_the_files_of_the_model_alone(tokenizer, tmp_path, monkeypatch):
    """All of one commit: its name is the revision of the second call."""
    folder = as_folder(tmp_path, tokenizer)
    index = sharded(folder)
    for name, tensors in OTHERS.values():
        write_tensors(folder / name, {"format": "pt"}, tensors, "")
    monkeypatch.chdir(tmp_path)
    hub = Hub(folder)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    run("import", "org/name@main", "out.bin")
    assert hub.revisions == ["main", "0" * 40]
    assert {x.name for x in hub.at.glob("*.safetensors")} == {*index.values(), "mtp.safetensors"}


# ---- tied embeddings
def with_tensors(folder, change_):
    path = folder / "model.safetensors"
    tensors = {name: x.copy() for name, x in map_tensors(path)[1].items()}
    change_(tensors)
    write_tensors(path, {"format": "pt"}, tensors, "")


TIED = {                     # changes of the tensors: (change, is the output tied)
    "embeddings alone": (lambda t: t.pop("lm_head.weight"), True),
    "the output alone": (lambda t: t.pop("model.embed_tokens.weight"), True),
    "twice the same": (lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}),
                       True),
    "two matrices": (lambda t: t.update({"lm_head.weight": noise()}), False),
    "the last row differs": (lambda t: t.update({"lm_head.weight": np.where(
        np.arange(512)[:, None] < 511, t["model.embed_tokens.weight"], 0.5).astype(np.float32)}),
        False),
    "one number differs": (lambda t: t.update({"lm_head.weight": np.where(
        np.arange(8) < 7, t["model.embed_tokens.weight"], 0.5).astype(np.float32)}), False)}


@pytest.mark.parametrize("block", [1, 5 * 32, huggingface.BLOCK])          # one row, 5 rows, all
@pytest.mark.parametrize("name", TIED)
def test_tied_embeddings_are_those_of_transformers(name, block, tokenizer, tmp_path, capsys,
                                                   monkeypatch):
    """Also if the two matrices are compared in several blocks"""
    transformers = needs("transformers")
    monkeypatch.setattr(huggingface, "BLOCK", block)
    change_, tied = TIED[name]
    folder = as_folder(tmp_path, tokenizer, tie_word_embeddings=True)
    with_tensors(folder, change_)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    capsys.readouterr()
    found = llama_of_folder(folder)
    assert found.cfg.tie_embeddings == tied
    assert ("tie_word_embeddings, but" in capsys.readouterr().err) == (not tied)
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    for ours, weight in (("model.embed_tokens.weight", theirs.model.embed_tokens.weight),
                         (head, theirs.lm_head.weight)):
        assert np.array_equal(found.read(ours, 0, 512), weight.detach().numpy())
    assert ("lm_head.weight" in found.shapes) == (not tied)


@pytest.mark.parametrize("stored, differs", [([1, 0.01], False), ([1, 0.0100098], False),
                                             ([1, 0.02], True), ([1, 0.01, 1], True)])
def test_frequencies_of_older_files_are_compared(stored, differs, tokenizer, tmp_path, capsys):
    """As in transformers, config.json decides; here a note says if the file has others."""
    folder = as_folder(tmp_path, tokenizer)
    name = "model.layers.{}.self_attn.rotary_emb.inv_freq"
    with_tensors(folder, lambda t: t.update(
        {name.format(k): np.array(stored, np.float32) for k in range(2)}))
    run("import", folder, tmp_path / "b.bin")
    err = capsys.readouterr().err
    assert err.count("differs from the frequencies of RoPE") == differs


# ---- settings, in the order of transformers
@pytest.mark.parametrize("generation, config", [
    ("absent", [1, 2]), ([3], [1, 2]), (3, 1), ("absent", 1), ("absent", "absent")])
def test_the_ends_of_answers_are_those_of_transformers(generation, config, tokenizer, tmp_path):
    """generation_config.json if it is there, else config.json"""
    transformers = needs("transformers")
    folder = as_folder(tmp_path, tokenizer, eos_token_id=config)
    first = min(tokenizer.specials.values()) - 1

    def moved(ids):          # 1, 2, 3: the special tokens
        return [first + k for k in ids] if isinstance(ids, list) else ids and first + ids

    change(folder / "config.json", eos_token_id=config if config == "absent" else moved(config))
    os.remove(folder / "generation_config.json")
    if generation != "absent":
        (folder / "generation_config.json").write_text(json.dumps({
            "eos_token_id": moved(generation)}), encoding="utf-8")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).generation_config
    want = theirs.eos_token_id
    want = want if isinstance(want, list) else [] if want is None else [want]
    found = Settings(folder).ends(tokenizer)
    assert [tokenizer.specials[name] for name in found] == want


def test_an_end_that_is_no_special_token_is_noted(tokenizer, tmp_path, capsys):
    folder = as_folder(tmp_path, tokenizer)
    change(folder / "generation_config.json", eos_token_id=[64, 10 ** 6])
    change(folder / "tokenizer_config.json", eos_token="<|gone|>")
    run("import", folder, tmp_path / "b.bin")
    err = capsys.readouterr().err
    assert "eos_token_id 64 is the ordinary token 'a'" in err
    assert "eos_token_id 1000000 is no token" in err and "<|gone|> ends an answer, but" in err


TOKENS = "bos_token", "eos_token", "pad_token", "unk_token"
SOURCES = [                  # (tokenizer_config.json, special_tokens_map.json)
    (dict(eos_token="</s>"), dict(bos_token="<|im_start|>")),
    (dict(eos_token="</s>", bos_token=None), dict(bos_token="<|im_start|>")),
    (dict(eos_token="</s>"), dict(eos_token={"content": "<|im_end|>"}, pad_token="</s>")),
    (dict(eos_token="</s>", added_tokens_decoder={}), dict(eos_token="<|im_end|>")),
    (dict(eos_token={"content": "</s>", "__type": "AddedToken"}), None),
    (dict(tokenizer_class="LlamaTokenizer"), None), ({}, None)]


@pytest.mark.parametrize("words, mapped", SOURCES)
def test_special_tokens_are_those_of_transformers(words, mapped, tokenizer, tmp_path):
    transformers = needs("transformers")
    folder = as_folder(tmp_path, tokenizer)
    words = {"tokenizer_class": "PreTrainedTokenizerFast", **words}
    (folder / "tokenizer_config.json").write_text(json.dumps(words), encoding="utf-8")
    if mapped is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(mapped), encoding="utf-8")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    settings_ = Settings(folder)
    settings_.tokenizer(512)
    for name in TOKENS:
        assert settings_.token(name) == (getattr(theirs, name) or ""), name


def test_a_token_that_one_file_alone_names_is_taken_from_there(tokenizer, tmp_path):
    """Also where transformers would not look for it, as added_tokens_decoder is there."""
    folder = as_folder(tmp_path, tokenizer)
    change(folder / "tokenizer_config.json", added_tokens_decoder={}, bos_token="absent")
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<|im_start|>"}', "utf-8")
    assert llama_of_folder(folder).bos == "<|im_start|>"


@pytest.mark.parametrize("in_config, in_file, want", [
    ("one", None, "one"), ("one", "two", "two"), (None, "two", "two"), (None, None, ""),
    ([{"name": "default", "template": "one"}, {"name": "tool_use", "template": "x"}], None, "one"),
    ({"default": "one", "x": "y"}, None, "one")])
def test_the_template_is_that_of_transformers(in_config, in_file, want, tokenizer, tmp_path):
    transformers = needs("transformers")
    folder = as_folder(tmp_path, tokenizer)
    change(folder / "tokenizer_config.json", chat_template=in_config)
    if in_file:
        (folder / "chat_template.jinja").write_text(in_file, encoding="utf-8")
    assert llama_of_folder(folder).template == want
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert (theirs.get_chat_template() if want else theirs.chat_template or "") == want


def test_a_template_gets_the_tokens_that_it_names(tokenizer, tmp_path):
    """pad_token and others, which a checkpoint has no place for; transformers writes the same."""
    transformers = needs("transformers")
    needs("jinja2")
    folder = as_folder(tmp_path, tokenizer)
    written = "\n\n{{ pad_token }}{{ unk_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    change(folder / "tokenizer_config.json", chat_template=written, pad_token="<|im_end|>")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    want = theirs.apply_chat_template(dicts(HELLO), tokenize=False, add_generation_prompt=True)
    found = llama_of_folder(folder)
    assert render(found.template, HELLO, ne.State(eos="</s>")) == want
    assert want.startswith("\n\n<|im_end|>")


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("adds", [None, False, True])
@pytest.mark.parametrize("bos", [None, "<|im_start|>"])
def test_the_beginning_of_texts_is_that_of_transformers(begins, adds, bos, tmp_path, tokenizer):
    """tokenizer.json says it; transformers 5 ignores add_bos_token beside it."""
    transformers = needs("transformers")
    folder = as_folder(tmp_path, tokenizer)
    if begins:
        k = tokenizer.specials["<|im_start|>"]
        change(folder / "tokenizer.json", post_processor=dict(
            type="TemplateProcessing",
            single=[dict(SpecialToken=dict(id="<|im_start|>", type_id=0)),
                    dict(Sequence=dict(id="A", type_id=0))],
            pair=[dict(Sequence=dict(id="A", type_id=0)), dict(Sequence=dict(id="B", type_id=1))],
            special_tokens={"<|im_start|>": dict(id="<|im_start|>", ids=[k],
                                                 tokens=["<|im_start|>"])}))
    change(folder / "tokenizer_config.json", add_bos_token=adds, bos_token=bos)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)("to be")["input_ids"]
    assert llama_of_folder(folder).tokenizer.encode_whole("to be").tolist() == theirs


@pytest.mark.parametrize("entries", [
    dict(rope_scaling=dict(rope_type="linear", factor=2.0),
         rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=500.0)),
    dict(rope_theta=700.0, rope_parameters=dict(rope_type="default", rope_theta=500.0)),
    dict(rope_theta=700.0, rope_scaling=dict(type="linear", factor=2.0)),
    dict(original_max_position_embeddings=4, max_position_embeddings=64, rope_parameters=dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=500.0)),
    dict(max_position_embeddings=64, rope_parameters=dict(
        rope_type="yarn", factor=None, original_max_position_embeddings=16, beta_fast=0)),
    dict(max_position_embeddings=64, rope_scaling=dict(rope_type="llama3", factor=8.0,
                                                       low_freq_factor=1.0, high_freq_factor=4.0))])
def test_the_settings_of_rope_are_those_of_transformers(entries, tmp_path):
    """Each may stand in rope_scaling, rope_parameters, or beside them."""
    transformers = needs("transformers")
    config = dict(model_type="llama", vocab_size=512, hidden_size=48, intermediate_size=80,
                  num_hidden_layers=1, num_attention_heads=6, **entries)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(tmp_path))
    rope = theirs.model.rotary_emb
    angle = np.outer(np.arange(8), rope.inv_freq.numpy().astype(np.float64))
    cos, sin = ne.rope_table(llama_config(config), np.float64)
    assert np.abs(cos[:8] - rope.attention_scaling * np.cos(angle)).max() < 1e-5
    assert np.abs(sin[:8] - rope.attention_scaling * np.sin(angle)).max() < 1e-5


@pytest.mark.parametrize("kind", [
    dict(rope_type="yarn", factor=4.0),
    dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)])
@pytest.mark.parametrize("inside", [None, 64, 1024])
@pytest.mark.parametrize("beside", [None, 256, 4096])
def test_the_original_context_is_that_of_transformers(beside, inside, kind):
    """Each of these lengths gives other frequencies: heads have many."""
    transformers = needs("transformers")
    found = []

    def config_of(beside, inside):
        rope = kind if inside is None else {**kind, "original_max_position_embeddings": inside}
        more = {} if beside is None else {"original_max_position_embeddings": beside}
        return dict(model_type="llama", vocab_size=64, hidden_size=64, intermediate_size=8,
                    num_hidden_layers=1, num_attention_heads=1, max_position_embeddings=16384,
                    rope_scaling=rope, rope_theta=10000.0, **more)

    for n in (64, 256, 1024, 4096, 16384):
        found.append(ne.rope_table(llama_config(config_of(None, n)), np.float64)[1][:9])
    assert all(np.abs(x - y).max() > 1e-3 for x, y in itertools.combinations(found, 2))
    config = config_of(beside, inside)
    rope = transformers.AutoModelForCausalLM.from_config(        # it changes the dicts in it
        transformers.LlamaConfig(**copy.deepcopy(config))).model.rotary_emb
    angle = np.outer(np.arange(9), rope.inv_freq.numpy().astype(np.float64))
    want = rope.attention_scaling * np.sin(angle)
    assert np.abs(ne.rope_table(llama_config(config), np.float64)[1][:9] - want).max() < 1e-5


# ---- reasons
NASTY = [None, -1, 0, 1 << 40, 1.5, "", "x", True, [], {}, [[1]], [None], {"type": 1}]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json",
                                  "generation_config.json", "special_tokens_map.json", INDEX])
def test_no_reason_is_an_error_of_python(name, tokenizer, tmp_path):
    """Each value of each file in turn becomes one of another type or size."""
    folder, rng = as_folder(tmp_path, tokenizer), random.Random(name)
    sharded(folder)
    change(folder / "tokenizer_config.json", chat_template=[{"name": "default", "template": "a"}])
    change(folder / "generation_config.json", eos_token_id=[1, 2])
    (folder / "special_tokens_map.json").write_text('{"bos_token": {"content": "</s>"}}', "utf-8")
    root = json.loads((folder / name).read_text("utf-8"))
    if name == "config.json":
        root |= dict(rope_scaling=dict(rope_type="yarn", factor=2.0, beta_fast=32, mscale=1.0),
                     layer_types=["full_attention"] * 2)
    if name == "tokenizer.json":
        root["pre_tokenizer"] = dict(type="Sequence", pretokenizers=[
            dict(type="Digits", individual_digits=True), root["pre_tokenizer"]])
        root["post_processor"] = tokenizer_template(tokenizer)
    refusals = 0
    for at in places_in(root):
        for value in rng.sample(NASTY, 5):
            (folder / name).write_text(json.dumps(replaced(root, at, value)), encoding="utf-8")
            try:
                with reading_form(folder, "give a Llama"):           # as import_llama does
                    llama_of_folder(folder)
            except ne.UserError as e:
                refusals += 1
                assert not any(words in str(e) for words in PYTHON), (at, value, str(e))
    assert refusals > 4


def tokenizer_template(tokenizer):
    begins = bpe.Tokenizer(tokenizer._ids, tokenizer._lines, SPECIALS,
                           begins=(tokenizer.specials["</s>"],))
    return json.loads(begins.to_json())["post_processor"]


WHAT = {                     # what a file is: (name, first bytes, words)
    "a text": ("s.txt", b"To be, or not to be, that is", "it is a text"),
    "a short text": ("s", b"hi\n", "it is a text"),
    "JSON": ("config.json", b'{"model_type": "llama"}', "a JSON file; name its directory"),
    "weights": ("model.safetensors", (2).to_bytes(8, "little") + b"{}    ", "name its directory"),
    "a checkpoint": ("a.bin", (2).to_bytes(8, "little") + b"{}    ", "needs no import"),
    "PyTorch": ("pytorch_model.bin", b"PK\3\4" + bytes(20), "a file of PyTorch"),
    "nothing": ("x.gguf", b"", "it is empty"), "noise": ("x", b"\0\1\2" * 9, "not a GGUF file")}


@pytest.mark.parametrize("name", WHAT)
def test_a_file_of_another_kind_is_called_what_it_is(name, tmp_path, monkeypatch, capsys):
    """Before any package is missed"""
    file, content, words = WHAT[name]
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / file).write_bytes(content)
    line = refused(capsys, "import", tmp_path / file, tmp_path / "b.bin", words=[file, words])
    assert "pip" not in line


def test_a_name_that_could_be_both_is_first_called_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    line = refused(capsys, "import", "nothere/model", "x.bin")
    assert line.index("no such directory") < line.index("Hugging Face Hub") < line.index("pip")
    assert pathlib.Path("x.bin").exists() is False


def test_a_long_template_is_refused(tokenizer, tmp_path, capsys):
    folder = as_folder(tmp_path, tokenizer)
    for size, words in ((TEMPLATE_BYTES, None), (TEMPLATE_BYTES + 2, f"{TEMPLATE_BYTES + 2:,}")):
        (folder / "chat_template.jinja").write_text("\u00e9" * (size // 2), encoding="utf-8")
        if words:
            refused(capsys, "import", folder, tmp_path / "c.bin", words=[words, "shorten"])
        else:
            run("import", folder, tmp_path / "b.bin")


WRONG_SETTINGS = {           # (file, its content or changes of it, words of the line)
    "a list": ("special_tokens_map.json", [1], "expected an object, found [1]"),
    "a token": ("tokenizer_config.json", dict(bos_token=3), "bos_token is 3, expected a text"),
    "templates": ("tokenizer_config.json", dict(chat_template=[1]),
                  "chat_template is a list, expected objects"),
    "no default": ("tokenizer_config.json", dict(chat_template=[
        dict(name="rag", template="x")]), "has the templates rag, expected one with the name"),
    "a template": ("tokenizer_config.json", dict(chat_template=5),
                   "chat_template is 5, expected a text"),
    "an end": ("generation_config.json", dict(eos_token_id="x"), "eos_token_id is 'x', expected"),
    "ends": ("generation_config.json", dict(eos_token_id=[1, None]), "eos_token_id is [1, None]"),
    "a size": ("config.json", dict(hidden_size="8"), "hidden_size is '8', expected a whole number"),
    "a flag": ("config.json", dict(tie_word_embeddings=3), "expected true or false or null"),
    "a kind": ("config.json", dict(model_type=[1]), "found LlamaForCausalLM"),
    "RoPE": ("config.json", dict(rope_parameters=dict(full_attention=3)),
             "RoPE parameters are 3, expected an object"),
    "RoPE by layer": ("config.json", dict(rope_parameters=dict(
        full_attention=dict(rope_theta=1.0), sliding_attention=dict(rope_theta=2.0))),
        "different RoPE parameters"),
    "no object": ("tokenizer.json", [1], "expected an object")}


@pytest.mark.parametrize("name", WRONG_SETTINGS)
def test_each_check_of_the_settings_refuses(name, tokenizer, tmp_path, capsys):
    folder = as_folder(tmp_path, tokenizer)
    file, content, words = WRONG_SETTINGS[name]
    if isinstance(content, dict):
        change(folder / file, **content)
    else:
        (folder / file).write_text(json.dumps(content), encoding="utf-8")
    refused(capsys, "import", folder, tmp_path / "b.bin", words=[folder, words])


def test_integers_are_no_weights(tokenizer, tmp_path, capsys):
    folder = as_folder(tmp_path, tokenizer)
    with_tensors(folder, lambda t: t.update({NORM: np.ones(8, np.int8)}))
    refused(capsys, "import", folder, tmp_path / "b.bin", words=[NORM, "int8", "floating-point"])


def test_another_missing_package_is_named(tmp_path, monkeypatch, capsys):
    """Not huggingface_hub itself, but one that it imports"""
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "huggingface_hub":
                raise ModuleNotFoundError("No module named 'httpx'", name="httpx")

    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "huggingface_hub", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    refused(capsys, "import", "org/name", "x.bin", words=["httpx"])
