"""Which model speaks where none is named: the newest of the user's own, or the bundled one."""
import os
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT, copy_parts, needs, refused, replace_everywhere, run, told, with_kernels
from models import write

import bpe
import nanoeuler as ne
from nanoeuler_parts.chat.models import newest_model
from nanoeuler_parts.chat.terminal import Terminal
from nanoeuler_parts.checkpoint.bundled import SHIPPED
from nanoeuler_parts.checkpoint.file import begins_as_checkpoint, sha256_of
from nanoeuler_parts.files.errors import PACKAGES
from nanoeuler_parts.files.safetensors import write_tensors

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("one_thread")]
VERBS = [("generate", "to be", "--tokens", 3), ("lens", "to be"), ("chat", "--tokens", 3),
         ("info",)]
verbs = pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])


@pytest.fixture
def box(tmp_path, monkeypatch, checkpoint):
    """The path of a model that comes with the program, in int8; the working directory is empty."""
    run("quantize", checkpoint, tmp_path / "model.bin")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("nanoeuler_parts.checkpoint.bundled.SHIPPED", str(tmp_path / "model.bin"))
    replace_everywhere(monkeypatch, "nanoeuler_parts.chat.verbs.prompt_text",
                       lambda prompt: "" if prompt == "> " else prompt)
    monkeypatch.setattr(Terminal, "converse", lambda terminal: None)
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


def with_model(verb, model):
    """The verb's arguments with a checkpoint, which stands after the prompt."""
    place = 2 if verb[0] in ("generate", "lens") else 1
    return *verb[:place], model, *verb[place:]


def note_on_the_choice(verb, err):
    """The one line that says which model was taken; it says where another one is named."""
    [note] = err.splitlines()
    assert note.startswith("note: ") and "to use another, name it" in note
    assert ("after the prompt" in note) == (verb[0] in ("generate", "lens"))
    return note


@verbs
def test_without_a_model_of_ones_own_the_bundled_one_speaks(verb, box, capsys):
    out, err = spoken_by(capsys, verb)
    assert out and out == told(*with_model(verb, "bundled"))
    assert "the bundled model is used" in note_on_the_choice(verb, err)
    assert str(box) not in out + err         # a path that may lie deep in site-packages


@verbs
@pytest.mark.parametrize("names", [("nanoeuler.bin",), ("nanoeuler_chat.bin", "nanoeuler.bin"),
                                   ("nanoeuler.bin", "nanoeuler_dpo.bin", "mine.bin")])
def test_the_newest_of_ones_own_goes_first(verb, names, box, capsys):
    """Whatever its name is."""
    own(*names)
    out, err = spoken_by(capsys, verb)
    assert out == told(*with_model(verb, names[-1]))
    note = note_on_the_choice(verb, err)
    assert f"{names[-1]} is used, as the newest model in this folder" in note
    assert "file or bundled" in note


def test_what_is_no_model_is_not_the_newest(box, monkeypatch):
    """Nothing but the beginning of regular files is read, and of no more than a few."""
    own("mine.bin")
    late = [f"{i}.bin" for i in range(20)]
    for name in ("x.tokens", "mine.bin.17.tmp", ".hidden.bin", *late):
        shutil.copy("mine.bin", name)
    os.truncate("0.bin", 20)
    write_tensors("1.bin", {"format": "nanoeuler tokens"}, {}, "")
    for name in late[2:]:
        os.remove(name)
    os.mkdir("2.bin")
    os.mkfifo("3.bin")
    os.symlink("3.bin", "4.bin")
    os.symlink("none", "5.bin")
    os.symlink("/dev/zero", "6.bin")
    assert newest_model() == "mine.bin" and newest_model("2.bin") is None
    opened, begins = [], begins_as_checkpoint
    monkeypatch.setattr("nanoeuler_parts.checkpoint.file.begins_as_checkpoint",
                        lambda p: opened.append(p) or begins(p))
    monkeypatch.setattr("nanoeuler_parts.chat.models.MOST_MODELS", 1)
    monkeypatch.setattr("nanoeuler_parts.chat.models.MOST_FILES", 1)
    assert newest_model() is None and len(opened) == 1


def test_what_is_named_speaks(box, capsys):
    own("nanoeuler.bin", "mine.bin")
    for args in (("generate", "to be", "mine.bin", "--tokens", 3), ("lens", "to be", "mine.bin")):
        assert spoken_by(capsys, args).err == ""
    refused(capsys, "chat", "no.bin", words=["no.bin: No such file"])


@pytest.mark.parametrize("name", ["bundled", "box"])
def test_the_bundled_model_has_a_name(name, box, capsys):
    """A file of that name takes precedence."""
    own("nanoeuler.bin")
    with open("prompts.jsonl", "w", encoding="utf-8") as f:
        f.write('"to be"\n')
    out, err = spoken_by(capsys, ("generate", "to be", name, "--tokens", 3))
    assert (out, err) == (told("generate", "to be", box, "--tokens", 3), "")
    assert spoken_by(capsys, ("chat", name)).out.startswith("bundled: ")
    assert spoken_by(capsys, ("info", name)).out.startswith("bundled\n")
    run("generate", name, "--file", "prompts.jsonl", "--out", "a.jsonl", "--tokens", 3)
    run("quantize", name, "again.bin")
    assert ne.load(name).cfg.seq_len == 8
    os.rename("nanoeuler.bin", name)
    assert spoken_by(capsys, ("chat", name)).out.startswith(f"{name}: ") and ne.load(
        name).cfg.seq_len == 32


@verbs
def test_without_any_model_it_is_said_how_one_is_made(verb, box, capsys):
    box.unlink()
    refused(capsys, *verb, words=["expected a model in this folder, found none", "train"])


def test_a_file_of_prompts(box, capsys):
    with open("prompts.jsonl", "w", encoding="utf-8") as f:
        f.write('"to be"\n')
    run("generate", "--file", "prompts.jsonl", "--out", "a.jsonl", "--tokens", 3)
    assert "the bundled model is used" in capsys.readouterr().err and os.path.getsize("a.jsonl")
    run("generate", box, "--file", "prompts.jsonl", "--out", "b.jsonl", "--tokens", 3)
    with open("a.jsonl", encoding="utf-8") as a, open("b.jsonl", encoding="utf-8") as b:
        assert a.read() == b.read()
    refused(capsys, "generate", box, "no.bin", "--file", "prompts.jsonl", "--out", "c.jsonl",
            words=["name a checkpoint alone"])


def test_the_server_and_python_take_it_too(box, monkeypatch):
    asked = []
    monkeypatch.setattr("nanoeuler_parts.serve.server.run",
                        lambda files, folder, *_: asked.append((files, folder)))
    run("serve")
    own("nanoeuler_chat.bin")
    run("serve")
    run("serve", "mine.bin")
    run("serve", "mine.bin", "other.bin")
    assert asked == [([str(box)], "."), ([str(box)], "."),       # a base model is no default
                     (["mine.bin"], None), (["mine.bin", "other.bin"], None)]
    assert ne.load().cfg.seq_len == 32
    os.remove("nanoeuler_chat.bin")
    assert ne.load(weights="int8").cfg.seq_len == 8


def test_the_server_names_all_packages_that_are_missing(box, monkeypatch, capsys):
    for name in "starlette", "uvicorn":
        monkeypatch.setitem(sys.modules, name, None)
    line = refused(capsys, "serve", words=["serve needs starlette and uvicorn", "'.[serve]'"])
    assert PACKAGES["starlette"] in line and PACKAGES["uvicorn"] in line


def test_other_verbs_do_not(box, capsys):
    """export and what trains want a name, or a model of one's own; what trains says which."""
    assert "bundled" not in refused(capsys, "export")
    for verb, own, made_by in (("sft", "nanoeuler.bin", "train"),
                               ("dpo", "nanoeuler_chat.bin", "sft")):
        line = refused(capsys, verb)
        assert f"{own}: No such file; make it with " in line and f"{made_by}, or name" in line
        assert "such as bundled" in line


@pytest.fixture
def clone(tmp_path, checkpoint, compiled):
    """A folder as a clone is, whose data/ holds a model, with compiled kernels."""
    if shutil.which("make") is None:
        pytest.skip("there is no make on this machine")
    folder = tmp_path / "clone"
    (folder / "data").mkdir(parents=True)
    for name in ("Makefile", "nanoeuler.py", "bpe.py", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    copy_parts(folder)
    with_kernels(folder, compiled)
    run("quantize", checkpoint, folder / SHIPPED)
    return folder


def make(folder, *args, stdin=""):
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    result = subprocess.run(["make", f"PY={sys.executable}", *args], cwd=folder, timeout=240,
                            env=env, input=stdin, capture_output=True, encoding="utf-8")
    assert result.returncode == 0, result
    return result.stdout


def test_make_chat_right_after_a_clone(clone, checkpoint):
    said = make(clone, "chat", "ARGS=--tokens 3 --threads 1", stdin="to be\n/quit\n")
    assert "bundled: " in said and "context 8 tokens" in said and "MODEL=FILE" in said
    shutil.copy(checkpoint, clone / "nanoeuler.bin")
    said = make(clone, "chat", "ARGS=--tokens 3 --threads 1", stdin="to be\n/quit\n")
    assert "\nnanoeuler.bin: " in said and "bundled: " not in said
    said = make(clone, "chat", "MODEL=bundled", "ARGS=--threads 1", stdin="/quit\n")
    assert "\nbundled: " in said and "MODEL=FILE" not in said


@pytest.mark.parametrize("verb", ["chat", "serve"])
def test_what_make_talks_to(verb, clone):
    """The commands alone.  The program chooses, unless a model is named."""
    begin = f"nanoeuler.py {verb}"
    for name in "nanoeuler.bin", "nanoeuler_chat.bin":
        (clone / name).touch()
        assert f"{begin}  --x" in make(clone, "-n", verb, "ARGS=--x")
    for named in "MODEL=no.bin", "OUT=no.bin":
        assert f"{begin} no.bin --x" in make(clone, "-n", verb, named, "ARGS=--x")


def test_the_card_is_of_the_bundled_model():
    card = (ROOT / "data/MODEL.md").read_text(encoding="utf-8")
    path = ROOT / SHIPPED
    assert f"{path.stat().st_size:,} bytes, sha256 `{sha256_of(path)}`" in card
    c = ne.read_checkpoint(str(path))
    assert (c.matrices, c.state.kind) == ("int8", "chat")
    assert f"{ne.n_params(c.cfg):,} parameters" in card


def test_the_bundled_model_says_what_its_card_shows():
    """Answers that are plain: another processor sums in another order."""
    card = (ROOT / "data/MODEL.md").read_text(encoding="utf-8")
    model = ne.load(str(ROOT / SHIPPED), temperature=0.0)
    for asked in ("What is the capital of France?", "capital of japan", "what color is the sky",
                  "how many legs does a spider have??", "Name the days of the week."):
        model.forget()
        assert f"   - **{asked}**\n   - {model.say(asked)}\n" in card


def test_the_bundled_model_is_a_llama(tmp_path):
    """transformers answers with the same tokens."""
    torch, transformers = needs("torch"), needs("transformers")
    asked = "What is the capital of Norway?"
    run("export", ROOT / SHIPPED, tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    messages = [{"role": "user", "content": asked}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        out = theirs.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False)[0]
    answer = tokenizer.decode(out[len(ids):], skip_special_tokens=True)
    assert answer == ne.load(str(ROOT / SHIPPED), temperature=0.0).say(asked) != ""


def test_git_keeps_the_model_and_its_card():
    """By the rules for what it ignores, of which *.bin is one."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no clone of git")
    for name in (SHIPPED, "data/MODEL.md"):
        ignored = subprocess.run(["git", "check-ignore", "-q", "--no-index", name], cwd=ROOT)
        assert ignored.returncode == 1, name
