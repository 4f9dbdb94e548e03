"""Which model speaks where none is named: the newest of the user's own, or the one in the box."""
import importlib.util
import os
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT, needs, refused, run, told, with_kernels
from models import write

import bpe
import nanoeuler as ne

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("one_thread")]
VERBS = [("generate", "to be", "--tokens", 3), ("lens", "to be"), ("chat", "--tokens", 3)]
verbs = pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])


@pytest.fixture
def box(tmp_path, monkeypatch, checkpoint):
    """The path of a model that comes with the program, in int8; the working directory is empty."""
    run("quantize", checkpoint, tmp_path / "model.bin")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(ne, "SHIPPED", str(tmp_path / "model.bin"))
    monkeypatch.setattr(ne, "said_or_read", lambda prompt: "" if prompt == "> " else prompt)
    monkeypatch.setattr(ne.Speaker, "converse", lambda speaker: None)
    return tmp_path / "model.bin"


def own(*names):
    """Models in the working directory, each newer than the one before it."""
    cfg = ne.replace(ne.PRESETS["small"], vocab_size=262, n_layer=1, n_mtp=1, seq_len=32)
    tokenizer = bpe.train(b"to be or not to be, that is the question", cfg.vocab_size)
    for i, name in enumerate(names):
        write(name, cfg, tokenizer)
        os.utime(name, (1e9 + i, 1e9 + i))


def spoken_by(capsys, verb):
    """(what a verb says without a model's name, and on stderr)"""
    capsys.readouterr()
    run(*verb)
    return capsys.readouterr()


@verbs
def test_without_a_model_of_ones_own_the_one_in_the_box_speaks(verb, box, capsys):
    out, err = spoken_by(capsys, verb)
    assert out and out == told(verb[0], *verb[1:2] * (verb[0] != "chat"), box,
                               *verb[2 - (verb[0] == "chat"):])
    said = [line for line in (out + err).splitlines() if str(box) in line]
    assert len(said) == 1, (out, err)        # and says in a line that it does


@verbs
@pytest.mark.parametrize("names", [("nanoeuler.bin",), ("nanoeuler_chat.bin", "nanoeuler.bin"),
                                   ("nanoeuler.bin", "nanoeuler_chat.bin"),
                                   ("nanoeuler.bin", "nanoeuler_chat.bin", "nanoeuler_dpo.bin")])
def test_the_newest_of_ones_own_goes_first(verb, names, box, capsys):
    own(*names)
    out, err = spoken_by(capsys, verb)
    assert str(box) not in out + err
    if verb[0] == "chat":
        assert out.startswith(f"{names[-1]}: ")
    elif len(names) > 1:
        assert err.startswith(f"note: {names[-1]} is the newest model here")
    else:
        assert err == ""                     # there is no other that it could be


def test_what_is_named_speaks(box, capsys):
    own("nanoeuler.bin", "mine.bin")
    for args in (("generate", "to be", "mine.bin", "--tokens", 3), ("lens", "to be", "mine.bin")):
        assert spoken_by(capsys, args).err == ""
    refused(capsys, "chat", "no.bin", words=["no.bin: No such file"])


def test_the_one_in_the_box_has_a_name(box, capsys):
    """Of which a file goes first"""
    own("nanoeuler.bin")
    with open("prompts.jsonl", "w", encoding="utf-8") as f:
        f.write('"to be"\n')
    out, err = spoken_by(capsys, ("generate", "to be", "box", "--tokens", 3))
    assert (out, err) == (told("generate", "to be", box, "--tokens", 3), "")
    assert spoken_by(capsys, ("chat", "box")).out.startswith(f"{box}: ")
    assert spoken_by(capsys, ("info", "box")).out.startswith(f"{box}\n")
    run("generate", "box", "--file", "prompts.jsonl", "--out", "a.jsonl", "--tokens", 3)
    run("quantize", "box", "again.bin")
    assert ne.load("box").cfg.seq_len == 8
    os.rename("nanoeuler.bin", "box")
    assert spoken_by(capsys, ("chat", "box")).out.startswith("box: ") and ne.load(
        "box").cfg.seq_len == 32


@verbs
def test_without_any_model_it_is_said_how_one_is_made(verb, box, capsys):
    box.unlink()
    refused(capsys, *verb, words=["nanoeuler.bin: No such file", "train"])


def test_a_file_of_prompts(box, capsys):
    with open("prompts.jsonl", "w", encoding="utf-8") as f:
        f.write('"to be"\n')
    run("generate", "--file", "prompts.jsonl", "--out", "a.jsonl", "--tokens", 3)
    assert str(box) in capsys.readouterr().err and os.path.getsize("a.jsonl")
    run("generate", box, "--file", "prompts.jsonl", "--out", "b.jsonl", "--tokens", 3)
    with open("a.jsonl", encoding="utf-8") as a, open("b.jsonl", encoding="utf-8") as b:
        assert a.read() == b.read()
    refused(capsys, "generate", box, "no.bin", "--file", "prompts.jsonl", "--out", "c.jsonl",
            words=["name a checkpoint alone"])


def test_the_server_and_python_take_it_too(box, monkeypatch):
    asked = []
    for name in filter(importlib.util.find_spec, ("serve", "nanoeuler_serve")):      # which it is
        monkeypatch.setattr(importlib.import_module(name), "run",
                            lambda file, *_: asked.append(file))
    run("serve")
    own("nanoeuler_chat.bin")
    run("serve")
    run("serve", "mine.bin")
    assert asked == [str(box), "nanoeuler_chat.bin", "mine.bin"]
    assert ne.load().cfg.seq_len == 32
    os.remove("nanoeuler_chat.bin")
    assert ne.load(weights="int8").cfg.seq_len == 8


def test_other_verbs_do_not(box, capsys):
    """info, export and what trains want a name, or a model of one's own; what trains says which."""
    for verb in "info", "export":
        assert str(box) not in refused(capsys, verb)
    for verb, own in ("sft", "nanoeuler.bin"), ("dpo", "nanoeuler_chat.bin"):
        line = refused(capsys, verb)
        assert f"{own}: there is none here" in line and str(box) in line


@pytest.fixture
def clone(tmp_path, checkpoint, compiled):
    """A folder as a clone is, whose data/ holds a model, with compiled kernels."""
    if shutil.which("make") is None:
        pytest.skip("there is no make on this machine")
    folder = tmp_path / "clone"
    (folder / "data").mkdir(parents=True)
    for name in ("Makefile", "nanoeuler.py", "bpe.py", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    with_kernels(folder, compiled)
    run("quantize", checkpoint, folder / ne.SHIPPED)
    return folder


def make(folder, *args, stdin=""):
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    result = subprocess.run(["make", f"PY={sys.executable}", *args], cwd=folder, timeout=240,
                            env=env, input=stdin, capture_output=True, encoding="utf-8")
    assert result.returncode == 0, result
    return result.stdout


def test_make_chat_right_after_a_clone(clone, checkpoint):
    said = make(clone, "chat", "ARGS=--tokens 3 --threads 1", stdin="to be\n/quit\n")
    assert "data/model.bin: " in said and "context 8 tokens" in said
    shutil.copy(checkpoint, clone / "nanoeuler.bin")
    said = make(clone, "chat", "ARGS=--tokens 3 --threads 1", stdin="to be\n/quit\n")
    assert "\nnanoeuler.bin: " in said and "data/model.bin" not in said


@pytest.mark.parametrize("verb", ["chat", "serve"])
def test_what_make_talks_to(verb, clone):
    """The commands alone."""
    begin = f"nanoeuler.py {verb}"
    assert f"{begin}  --x" in make(clone, "-n", verb, "ARGS=--x")
    (clone / "nanoeuler.bin").touch()
    (clone / "mine.bin").touch()
    os.utime(clone / "nanoeuler.bin", (1e9, 1e9))
    assert f"{begin} nanoeuler.bin --x" in make(clone, "-n", verb, "ARGS=--x")
    assert f"{begin} mine.bin --x" in make(clone, "-n", verb, "CHAT=mine.bin", "ARGS=--x")
    for named in "MODEL=no.bin", "OUT=no.bin":
        assert f"{begin} no.bin --x" in make(clone, "-n", verb, named, "ARGS=--x")


def test_the_card_is_of_the_model_in_the_box():
    card = (ROOT / "data/MODEL.md").read_text(encoding="utf-8")
    path = ROOT / ne.SHIPPED
    assert f"{path.stat().st_size:,} bytes, sha256 `{ne.sha256_of(path)}`" in card
    c = ne.read_checkpoint(str(path))
    assert (c.matrices, c.state.kind) == ("int8", "chat")
    assert f"{ne.n_params(c.cfg):,} parameters" in card


def test_the_model_in_the_box_says_what_its_card_shows():
    """Answers that are plain: another processor sums in another order."""
    card = (ROOT / "data/MODEL.md").read_text(encoding="utf-8")
    model = ne.load(str(ROOT / ne.SHIPPED), temperature=0.0)
    for asked in ("What is the capital of France?", "capital of japan", "what color is the sky",
                  "how many legs does a spider have??", "Name the days of the week."):
        model.forget()
        assert f"   - **{asked}**\n   - {model.say(asked)}\n" in card


def test_the_model_in_the_box_is_a_llama(tmp_path):
    """transformers answers with the same tokens."""
    torch, transformers = needs("torch"), needs("transformers")
    asked = "What is the capital of Norway?"
    run("export", ROOT / ne.SHIPPED, tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    messages = [{"role": "user", "content": asked}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        out = theirs.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False)[0]
    answer = tokenizer.decode(out[len(ids):], skip_special_tokens=True)
    assert answer == ne.load(str(ROOT / ne.SHIPPED), temperature=0.0).say(asked) != ""


def test_git_keeps_the_model_and_its_card():
    """By the rules for what it ignores, of which *.bin is one."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no clone of git")
    for name in (ne.SHIPPED, "data/MODEL.md"):
        ignored = subprocess.run(["git", "check-ignore", "-q", "--no-index", name], cwd=ROOT)
        assert ignored.returncode == 1, name
