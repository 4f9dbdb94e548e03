"""The command line: flags, verbs, and how they end."""
import os
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
from helpers import FAST, ROOT, TINY, nanoeuler, never, ok, random_flat, refused, run, told
from numba import config, get_num_threads, set_num_threads

import nanoeuler as ne
from nanoeuler_parts.chat.sampling import ChatSampling
from nanoeuler_parts.cli import add_verbs, Parser, VERBS
from nanoeuler_parts.files.errors import problem
from nanoeuler_parts.files.printing import counted
from nanoeuler_parts.flags import EXAMPLES, GROUP_OF, MOST_SHOWN
from nanoeuler_parts.machine.threads import use_threads
from nanoeuler_parts.runs.options import OPTIONS, options_class, TrainOptions
from nanoeuler_parts.runs.run import Run
from nanoeuler_parts.runs.start import as_typed
from nanoeuler_parts.tools.evaluation import EvalOptions
from nanoeuler_parts.tuning.dpo import DpoOptions
from nanoeuler_parts.tuning.rl import RlOptions
from nanoeuler_parts.tuning.sft import SftOptions
from dataclasses import fields
from nanoeuler_parts.checkpoint.bundled import beside_program
from nanoeuler_parts.files.settings import flag_of, type_of

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("one_thread")]


# ---- flags
ABSURD = {
    "steps": ["-1"], "batch": ["0", "-3", "9999999999"], "micro-batch": ["-1"],
    "lr": ["nan", "0", "-1", "inf", "1e300"], "warmup": ["-1"], "floor": ["2"], "beta1": ["1"],
    "cooldown": ["2", "nan"],
    "beta2": ["nan"], "clip": ["0", "-1"], "mtp-weight": ["-1"], "weight-decay": ["nan"],
    "holdout": ["0", "1", "nan"], "eval-every": ["0"], "save-every": ["0"],
    "minutes": ["0", "nan", "-1"],
    "seed": ["-1"], "seq-len": ["0", "-5", "999999999"], "vocab-size": ["0", "100", "99999999"],
    "n-mtp": ["0", "17"], "threads": ["-1", "9999"], "n-layer": ["0", "-1", "5000"],
    "n-embd": ["0", "70000"], "n-head": ["0", "5", "9999"], "n-kv-head": ["0", "3", "8"],
    "head-dim": ["0", "1", "33", "9999"], "n-hidden": ["0", "-344", "300000"]}


@pytest.mark.parametrize("flags", [[f"--{k}", v] for k in ABSURD for v in ABSURD[k]], ids="=".join)
def test_absurd_flags(flags, text, elsewhere, capsys):
    name = flags[0][2:].replace("-", "_")
    code = ne.main(["train", "--data", str(text), "--steps", "1", *flags])
    lines = capsys.readouterr().err.splitlines()
    assert code == 2 and len(lines) == 1, (code, lines)
    assert name in lines[0] or flags[0] in lines[0], lines
    assert os.listdir() == []


@pytest.mark.parametrize("flags", [["--steps", "x"], ["--steps", "1e3"], ["--lr", "fast"],
                                   ["--nonsense"], ["huge"]])
def test_flags_that_are_no_numbers(flags, elsewhere, capsys):
    refused(capsys, "train", *flags)


@pytest.mark.parametrize("flags, words", [
    (["--lr", "0.5"], ["lr", "0.5"]), (["--batch", "128"], ["batch", "128", "64"]),
    (["--seq-len", "32"], ["--seq-len", "32", "16"]), (["--n-mtp", "1"], ["--n-mtp"]),
    (["--vocab-size", "300"], ["--vocab-size"]), (["--seed", "7"], ["seed", "7"]),
    (["--n-layer", "4"], ["--n-layer 2, not 4"]), (["--n-embd", "64"], ["--n-embd 32, not 64"]),
    (["--n-head", "4"], ["--n-head 2, not 4"]), (["--n-kv-head", "2"], ["--n-kv-head 1, not 2"]),
    (["--head-dim", "32"], ["--head-dim 16, not 32"]),
    (["--n-hidden", "8"], ["--n-hidden 64, not 8"]),
    (["--tie-embeddings"], ["--no-tie-embeddings, not --tie-embeddings"])])
def test_changed_flags_on_resume(flags, words, copy, monkeypatch, capsys):
    monkeypatch.chdir(copy)
    before = (copy / "nanoeuler.bin").read_bytes()
    refused(capsys, "train", "--resume", "--steps", 30, *flags, words=[*words, "--out"])
    assert (copy / "nanoeuler.bin").read_bytes() == before


def test_a_model_of_any_shape(text, elsewhere, capsys):
    """Flags choose it, over the preset; a run goes on with them and without."""
    shape = dict(n_layer=1, n_embd=24, n_head=3, n_kv_head=1, head_dim=6, n_hidden=20)
    flags = [x for name, n in shape.items() for x in (f"--{name.replace('_', '-')}", n)]
    run("train", "big", "--data", text, "--steps", 2, *FAST, *flags, "--tie-embeddings")
    made = ne.read_checkpoint("nanoeuler.bin").cfg
    assert made == ne.replace(ne.PRESETS["big"], **shape, tie_embeddings=True, seq_len=16,
                              vocab_size=280)
    for more in flags, ["--n-layer", 1, "--tie-embeddings"], []:
        run("train", "--resume", *more, "--steps", 2 + bool(more))
    run("train", "big", "--resume", *flags, "--tie-embeddings", "--steps", 4)
    assert ne.read_checkpoint("nanoeuler.bin").state.step == 4
    for more, word in ((["--no-tie-embeddings"], "--tie-embeddings, not --no-tie-embeddings"),
                       (["--n-embd", 32], "--n-embd 24, not 32")):
        refused(capsys, "train", "--resume", *more, words=[word, "--out NAME"])


@pytest.mark.parametrize("flags, word", [
    (["--n-embd", 65536, "--n-layer", 4096], "choose a smaller --n-layer"),
    (["--tie-embeddings", 3], "3"), (["--n-layers", 3], "did you mean --n-layer?"),
    (["--n-head", 6, "--n-kv-head", 4],
     "--n-head: expected a multiple of --n-kv-head, 4, found 6")])
def test_a_shape_that_no_model_has(flags, word, text, elsewhere, capsys):
    refused(capsys, "train", "--data", text, "--steps", 1, *flags, words=[word])
    assert os.listdir() == []


def test_same_flags_on_resume_are_fine(copy, monkeypatch):
    monkeypatch.chdir(copy)
    cfg, preset = ne.read_checkpoint("nanoeuler.bin").cfg, ne.PRESETS["small"]
    monkeypatch.setitem(ne.PRESETS, "small", ne.replace(
        cfg, seq_len=preset.seq_len, vocab_size=preset.vocab_size))
    run("train", "small", "--resume", "--steps", 21, "--batch", 64)
    assert ne.read_checkpoint("nanoeuler.bin").state.step == 21


def test_what_no_flag_changes_or_replaces(trained, text, elsewhere, capsys):
    shutil.copy(trained / "nanoeuler.bin", elsewhere)
    (elsewhere / "folder").mkdir()
    refused(capsys, "train", "big", "--resume", words=["--n-embd 32, not 320", "--out"])
    refused(capsys, "train", "--data", text, "--out", "folder", "--force",
            words=["folder exists and is a directory"])


def test_files_may_stand_behind_flags(copy, monkeypatch, capsys):
    monkeypatch.chdir(copy)
    (copy / "nanoeuler.bin").rename(copy / "mine.bin")
    flags = ("--tokens", 3, "--threads", 1)
    said = {told("generate", *args) for args in (
        ("To", *flags, "mine.bin"), (*flags, "To", "mine.bin"), ("To", "mine.bin", *flags))}
    assert len(said) == 1
    assert told("generate", "To", *flags) in said        # the only model here
    (copy / "text.txt").write_bytes(b"a b a b")
    for args in (("train", "--vocab-size", 260, "text.txt"), ("encode", "--tokenizer",
                                                              "tokenizer.json", "text.txt")):
        assert ok(nanoeuler(*args, cwd=copy, program="bpe.py"))


@pytest.mark.parametrize("verb", ["generate", "lens"])
@pytest.mark.parametrize("name", ["nanoeuler.bin", "box"])
def test_a_checkpoint_before_the_prompt_is_told(name, verb, copy, monkeypatch, capsys):
    monkeypatch.chdir(copy)
    refused(capsys, verb, name, "ROMEO:", words=[
        "ROMEO:: No such file", "the prompt comes first", name])


def test_a_prompt_may_look_like_a_flag(copy, monkeypatch, capsys):
    monkeypatch.chdir(copy)
    args = ["generate", "--tokens", "0", "--threads", "1", "--", "--help", "nanoeuler.bin"]
    assert ne.main(args) == 0 and capsys.readouterr().out == "--help\n"


# ---- files that lie beside the program, and not here
ELSEWHERE = [
    ("train", "--data", "README.md"), ("train", "--data", "data/instructions.json"),
    ("train", "--data", "shakespeare.txt"), ("train", "--init", "data/model.bin"),
    ("sft", "--data", "data/shakespeare.txt"), ("sft", "--data", "README.md"),
    ("sft", "--data", "data/preferences_sample.jsonl"), ("sft", "data/model.bin"),
    ("dpo", "--data", "data/instructions.json"), ("dpo", "--data", "README.md"),
    ("dpo", "data/model.bin"), ("chat", "data/model.bin"), ("serve", "data/model.bin"),
    ("generate", "A", "data/model.bin"), ("generate", "--file", "README.md", "--out", "a.jsonl"),
    ("lens", "A", "data/model.bin"), ("eval", "--data", "data/shakespeare.txt"),
    ("eval", "--questions", "data/instructions.json"), ("info", "data/model.bin"),
    ("export", "data/model.bin", "folder"), ("quantize", "data/model.bin", "a.bin"),
    ("import", "data", "a.bin"), ("import", "data/model.bin", "a.bin"), ("plot", "README.md")]


@pytest.mark.parametrize("args", ELSEWHERE, ids=" ".join)
def test_a_file_beside_the_program_is_not_one_here(args, elsewhere, capsys):
    """Only the default of a flag is also looked for there."""
    name = next(x for x in reversed(args) if (ROOT / x).exists() or x == "shakespeare.txt")
    short = ("--steps", 1) if args[0] in ("train", "sft", "dpo") else ()     # if it is accepted
    refused(capsys, *args, *short, words=[name])
    assert os.listdir() == []


# ---- what is said of wrong ones
@pytest.mark.parametrize("args, said", [
    (("train", "--stpes", "5"), "unknown flag --stpes (did you mean --steps?); see "),
    (("chat", "--temprature=0.5"), "unknown flag --temprature (did you mean --temperature?); see "),
    (("train", "--nonsense", "5"), "unknown flag --nonsense; see "),
    (("lens", "--lora", "4"), "--lora: LoRA trains on the CPU, with train, sft, dpo and rl of "),
    (("chat", "--lora", "a"), "--lora: expected --adapter FOLDER, which uses an adapter; "),
    (("sft", "--lora-rank", "4"), "--lora-rank: expected --lora R for the rank, "),
    (("sft", "--lora-dropout=0"), "--lora-dropout: LoRA has no dropout here; drop the flag"),
    (("chat", "--adapter", "a", "--adapter", "b"), "--adapter: expected it once, found it again, "),
    (("train", "mine.txt"), "preset: expected one of "),
    (("trian", "--steps", "5"), "unknown verb trian (did you mean train?); see "),
    (("teach",), "VERB: expected one of "),
    (("train", "--steps", "many"), "--steps: expected a whole number, found 'many'; see "),
    (("chat", "--temperature", "hot"), "--temperature: expected a number, found 'hot'; see "),
    (("train", "--steps"), "--steps: expected a value, found none; see "),
    (("train", "--force=1"), "--force: expected no value, found '1'; see "),
    (("import", "a"), "missing required arguments: out; see "),
    (("import", "a", "b", "c"), "expected no more arguments, found c; see "),
    (("chat", "--te", "1"), "--te may mean --temperature, --template; write it in full; see "),
    (("export", "a.bin", "-"), "folder: expected the name of a file, found -: "),
    (("generate", "--tokns", "5", "--", "--help"),
     "unknown flag --tokns (did you mean --tokens?); ")])
def test_an_unknown_flag_is_named_first(args, said, elsewhere, capsys):
    """argparse would take the 5 for a preset."""
    assert refused(capsys, *args).startswith(f"nanoeuler: {said}")


def test_a_flag_may_be_cut_short_and_a_prompt_begin_like_one(copy, monkeypatch, capsys):
    monkeypatch.chdir(copy)
    assert told("generate", "--tok", 0, "--to be or not") == "--to be or not\n"


def test_whole_numbers_are_printed_whole(elsewhere, capsys):
    refused(capsys, "generate", "To", "--tokens", -3,
            words=["--tokens: expected 0 or more, found -3"])
    refused(capsys, "generate", "To", "--tokens", 1 << 41, words=[f"0 to {1 << 40}"])
    refused(capsys, "train", "--lr", 2, words=["--lr: expected 1e-09 to 1, found 2"])


@pytest.mark.parametrize("args", [
    ("sft", ""), ("chat", ""), ("info", ""), ("train", "--out", ""), ("import", "", "a.bin"),
    ("import", "a", ""), ("generate", "To", ""), ("train", "--data", "")])
def test_an_empty_name_is_said_to_be_one(args, elsewhere, capsys):
    """As of a variable of the shell that is not set."""
    refused(capsys, *args, words=["empty"])
    assert os.listdir() == []


@pytest.mark.parametrize("args, words", [
    (("train", "--threads=--"), ["--threads: expected a value, found --"]),
    (("export", "x.bin", "y/" * 3000), ["a name of at most 4,096 characters, found 6,000"]),
    (("train", "--batch", 1 << 30), ["--batch: expected 1 to 16777216, found 1073741824"]),
    (("train", "--steps", "7" * 5000), ["found '77777777777777777777... (5,000 digits)'"]),
    (("train", "--steps", "7" * 4000), ["found 77777777777777777777... (4,000 digits)"])])
def test_absurd_values(args, words, elsewhere, capsys):
    refused(capsys, *args, words=words)


@pytest.mark.parametrize("text, cut", [
    ("7" * 256, "77777777777777777777... (256 digits)"), ("7" * 255, "7" * 255),
    (f"a {10 ** 299:,} b", "a 10000000000000000000... (300 digits) b"), ("x" * 900, "x" * 900)])
def test_a_long_integer_in_a_message_is_cut(text, cut):
    assert problem(ne.UserError(text)) == cut


@pytest.mark.parametrize("args, shown", [
    (("info", "a\nb\x1b[31m.bin"), r"a\nb\x1b[31m.bin: No such file"),
    (("train", "--data", "a\rb"), r"a\rb: No such file"),
    (("train", "--out", "a\n/b.bin"), r"cannot write a\n/b.bin"),
    (("train", "a\nb"), r"found 'a\nb'; name a text file with --data")])
def test_a_name_with_a_line_end_is_one_line(args, shown, elsewhere, capsys):
    assert shown in refused(capsys, *args)


def test_a_file_that_is_missing_is_named_before_a_package(elsewhere, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(capsys, "import", "nofile", "x.bin", words=["nofile: No such file"])


def test_what_is_no_checkpoint_is_said_to_be_none(elsewhere, capsys):
    (elsewhere / "README.md").write_text("# A title, and some words\n", encoding="utf-8")
    line = refused(capsys, "info", "README.md", words=["README.md: expected a checkpoint", "train"])
    assert not re.search("[0-9]{5}", line)


def test_one_of_a_kind():
    assert counted(1, "thread") == "1 thread" and counted(0, "step") == "0 steps"
    assert counted(2000, "step") == "2,000 steps"
    model = ne.Model(TINY, random_flat(TINY, 1, np.float32))
    assert model.device().startswith("1 thread, ")


@pytest.mark.parametrize("flags, word", [
    (["--lr", "nan"], "lr"), (["--dtype", "fp16"], "fp16"), (["--out", "no/a.bin"], "no/a.bin"),
    (["--data", "none.txt"], "none.txt: No such file in /"),
    (["--data", "empty.txt"], "empty.txt: the file is empty"),
    (["--data", "zero.txt"], "zero byte at position 3"), (["--data", "."], "would lie in"),
    (["--data", "short.txt"], "short.txt, 2 bytes: expected 256 training"),
    (["--data", "short.txt", "--seq-len", 1], "token")])
def test_what_can_be_refused_is_before_anything_is_compiled(flags, word, elsewhere, monkeypatch,
                                                            capsys):
    for name, content in (("empty.txt", b""), ("zero.txt", b"abc\0"), ("short.txt", b"ab")):
        (elsewhere / name).write_bytes(content)
    before = sorted(os.listdir())
    monkeypatch.setattr("nanoeuler_parts.machine.kernels.fill_cache", never)
    assert ne.main(["train", "--vocab-size", "259", *map(str, flags)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1 and word in said.err, said
    assert "--seq-len 1" not in said.err and "--seq-len 0" not in said.err
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("name, value, typed", [
    ("lr", 0.002, "--lr 0.002"), ("batch", 2048, "--batch 2048"), ("epochs", 2.0, "--epochs 2"),
    ("truncate", True, "--truncate"), ("keep_best", False, "--no-keep-best"),
    ("steps", None, "no --steps"), ("template", "", "no --template"), ("ignore", [], "no --ignore"),
    ("field", ["prompt=a b", "x=y"], "--field 'prompt=a b' --field x=y")])
def test_a_setting_is_printed_as_the_user_types_it(name, value, typed):
    assert as_typed(name, value) == typed


def test_an_example_file_is_read_before_anything_is_compiled(copy, monkeypatch, capsys):
    monkeypatch.chdir(copy)
    monkeypatch.setattr("nanoeuler_parts.machine.kernels.fill_cache", never)
    (copy / "bad.json").write_text("nonsense", encoding="utf-8")
    for data, word in (("bad.json", "JSON"), ("none.json", "No such file")):
        assert ne.main(["sft", "--data", data]) == 2
        said = capsys.readouterr()
        assert said.out == "" and data in said.err and word in said.err


def test_a_run_that_ends_in_its_warm_up_says_so(text, elsewhere, capsys):
    start = ("train", "--data", text, *FAST[:-2], "--force")
    for steps, warmup, noted in ((2, 50, True), (2, 2, False), (3, 2, False)):
        run(*start, "--steps", steps, "--warmup", warmup)
        said = capsys.readouterr().err
        assert (f"ends after {steps} steps, within its warm-up of {warmup}" in said) == noted, said


# ---- verbs
def test_version(capsys):
    for args in (["--version"], ["--version", "train"]):
        with pytest.raises(SystemExit) as ended:
            ne.main(args)
        assert ended.value.code == 0
        assert capsys.readouterr().out == f"nanoeuler {ne.__version__}\n"


@pytest.mark.parametrize("error, code, line", [
    (KeyboardInterrupt(), 130, ""), (MemoryError("9 GiB"), 2, "out of memory (9 GiB); use --micro"),
    (OSError(5, "Input/output error", "a.bin"), 2, "a.bin: Input/output error; check the path")])
def test_how_a_verb_ends(error, code, line, monkeypatch, capsys):
    def fail(*args, **flags):
        raise error

    monkeypatch.setattr("nanoeuler_parts.chat.verbs.chat", fail)
    assert ne.main(["chat", "--threads", "1"]) == code
    said = capsys.readouterr().err
    assert line in said and len(said.splitlines()) == bool(line)


def test_compile_is_told_for_which_runs(capsys, monkeypatch):
    asked = []
    monkeypatch.setattr("nanoeuler_parts.machine.kernels.fill_cache",
                        lambda parts: asked.append(list(parts)[0]))
    for dtype in "f32", "bf16":
        assert ne.main(["compile", "--dtype", dtype]) == 0
    assert asked == ["compile_gradient('f32')", "compile_gradient('bf16')"]
    assert ne.main(["compile", "--dtype", "f16"]) == 2
    assert "--dtype: expected f32 or bf16, found f16" in capsys.readouterr().err


def test_threads_are_as_many_as_asked_for(capsys, monkeypatch):
    most, counts = config.NUMBA_NUM_THREADS, []
    monkeypatch.setattr("nanoeuler_parts.kernels.compile_kernels",
                        lambda dtype: counts.append(get_num_threads()))
    monkeypatch.setattr("nanoeuler_parts.machine.threads.physical_cores", lambda: most)
    for flags in (["--threads", "1"], []):
        set_num_threads(most)
        assert ne.main(["compile", *flags]) == 0
    assert counts == [1, most]
    assert ne.main(["compile", "--threads", f"{most + 1}"]) == 2 and len(counts) == 2
    assert f"--threads: expected 0 to {most}, found {most + 1}" in capsys.readouterr().err


def test_a_help_text_names_only_flags_of_its_verb():
    """Of this verb, or of none: "0: by --epochs" is no help to a verb that has no --epochs."""
    named, parsers = {}, Parser().add_subparsers()
    add_verbs(parsers, VERBS, chosen=[name for name, *_ in VERBS])
    for name, parser in parsers.choices.items():
        helps = " ".join(str(action.help) for action in parser._actions)
        named[name] = {*re.findall(r"--[a-z][a-z-]*", helps)}
        assert named[name] <= {*parser.flags}, name
    lengths = [named[verb] & {"--minutes", "--epochs"} for verb in ("train", "sft", "dpo", "rl")]
    assert lengths == [{"--minutes"}, {"--epochs"}, {"--epochs"}, {"--minutes"}]


def test_every_verb_has_help(capsys):
    def text(*args, flag="--help"):
        with pytest.raises(SystemExit) as e:
            ne.main([*args, flag])
        assert e.value.code == 0
        return " ".join(capsys.readouterr().out.split())

    verbs = ("train", "sft", "dpo", "rl", "chat", "generate", "lens", "eval", "plot", "info",
             "compile")
    assert all(f" {verb} " in text() and "--threads" in text(verb) for verb in verbs)
    for verb, settings in (("train", TrainOptions), ("sft", SftOptions),
                           ("dpo", DpoOptions), ("rl", RlOptions), ("chat", ChatSampling),
                           ("generate", ne.Sampling), ("eval", EvalOptions)):
        whole = text(verb, flag="--help-all").partition(" example: ")[0]
        value = r"(?:[A-Z_0-9=]+|\{\S+\})"
        parts = dict(re.findall(rf" (--\S+) {value} (.*?)(?= --\S+ {value} |$)", whole))
        for name, f in settings.__dataclass_fields__.items():
            if not f.metadata["help"]:       # no flag of this verb
                assert "--" + name not in parts
                continue
            if f.type is bool:               # which has a flag for no, too
                assert f"--no-{name.replace('_', '-')} {f.metadata['help']}" in whole
                continue
            default = "none" if f.type is list else 0 if f.default is None else f.default
            default = "empty" if default == "" else default
            assert f"(default: {default})" in parts["--" + name.replace("_", "-")], (verb, name)


def test_no_more_threads_than_may_be_kept_busy(monkeypatch):
    """A control group's quota counts for what nobody asked for, too."""
    monkeypatch.setattr("nanoeuler_parts.machine.threads.most_threads", lambda: 1)
    monkeypatch.setattr("nanoeuler_parts.machine.threads.physical_cores", lambda: 2)
    use_threads(0)
    assert get_num_threads() == 1


@pytest.mark.parametrize("argv, line", [
    (["generate", "a", "--top-p", 2], "--top-p: expected 0 to 1, found 2"),
    (["generate", "a", "--temperature", 1e6], "--temperature: expected 0 to 100, found 1000000"),
    (["generate", "a", "--repeat-last-n", -2], "--repeat-last-n: expected -1 or more, found -2"),
    (["train", "--steps", -5], "--steps: expected 0 or more, found -5"),
    (["train", "--minutes", 1e7], "--minutes: expected 0.01 to 1000000, found 10000000"),
    (["train", "--head-dim", 7], "--head-dim: expected an even number, found 7"),
    (["train", "--newlines", "dos"], "--newlines: expected unix, found dos")])
def test_a_setting_is_named_as_it_is_typed(argv, line, capsys):
    assert refused(capsys, *argv) == f"nanoeuler: {line}"


def test_python_names_a_setting_as_its_field():
    with pytest.raises(ne.UserError, match=r"^top_p: expected 0 to 1, found 2$"):
        ne.Sampling(top_p=2.0).check()


def test_every_setting_of_every_verb_is_named_by_its_flag(capsys):
    """Each number field of the settings, below its range"""
    for verb, options in (("train", TrainOptions), ("chat", ChatSampling),
                          ("generate", ne.Sampling)):
        for f in fields(options):
            if f.metadata.get("help") and type_of(f) in (int, float):
                low, _ = f.metadata["range"]
                below = low - 1 if type_of(f) is int else low - abs(low) - 1
                prompt = ["a"] if verb == "generate" else []
                line = refused(capsys, verb, *prompt, f"{flag_of(f.name)}={below}")
                assert line.startswith(f"nanoeuler: {flag_of(f.name)}: expected "), line
                assert "e+" not in line


def test_a_text_in_place_of_a_preset(text, elsewhere, capsys):
    (elsewhere / "s t.txt").write_bytes(text.read_bytes())
    refused(capsys, "train", "s t.txt", words=["did you mean --data 's t.txt'?"])
    refused(capsys, "train", "huge", words=["expected one of", "name a text file with --data"])


def test_a_row_of_settings_names_verbs_that_exist():
    """A mistyped verb would lack the setting.  Only a verb of the row can have another default."""
    known = {"train", "sft", "dpo", "rl", "t", "s", "d", "r"}
    for x in OPTIONS:
        verbs = {verb for listed in x.defaults for verb in listed.split()}
        assert verbs and verbs <= known, x.name
        assert {verb for listed in x.adamw for verb in listed.split()} <= verbs, x.name


@pytest.mark.parametrize("verb", ["train", "t"])
def test_the_help_of_the_optimizer_names_the_defaults_that_adamw_has(verb):
    options = options_class(verb)
    _, _, named = options.options["optimizer"].help.partition("with defaults ")
    stated = dict(part.split() for part in named.split(", "))
    assert {name: float(value) for name, value in stated.items()} == options.with_adamw


def test_a_preset_may_be_a_flag(monkeypatch, capsys):
    found = []
    monkeypatch.setattr("nanoeuler_parts.runs.start.launch",
                        lambda run, engine, preset, **chosen: found.append(preset))
    for argv in (["big"], ["--preset", "big"], []):
        assert ne.main(["train", *argv, "--threads", "1"]) == 0
    assert found == ["big", "big", None]
    refused(capsys, "train", "big", "--preset", "small", words=["expected one preset, found big"])


def test_a_name_with_a_line_end_is_no_two_names(elsewhere, capsys):
    (elsewhere / "a").write_text("to be", encoding="utf-8")
    (elsewhere / "b").write_text("or not", encoding="utf-8")
    refused(capsys, "train", "--data", "a\nb", words=["without line ends", "'a\\nb'"])


def test_a_resumed_run_knows_what_was_given():
    old = TrainOptions.chosen(warmup=3, steps=5)
    new = old.changed(minutes=2.0)
    assert new.given == {"warmup", "steps", "minutes"} and (new.warmup, new.minutes) == (3, 2.0)


def test_a_default_beside_the_program_is_no_file_of_this_folder(elsewhere, capsys):
    """Only the default --data may lie beside the program."""
    assert (ROOT / "data/everyday.py").exists()
    refused(capsys, "train", "--data", "data/everyday.py", words=["data/everyday.py: No such file"])
    of = Run.data_path                    # also of a run that is resumed
    assert of(TrainOptions(data="data/everyday.py")) == "data/everyday.py"
    assert of(TrainOptions()) == str(ROOT / "data/shakespeare.txt")
    (elsewhere / "data").mkdir()
    (elsewhere / "data/shakespeare.txt").write_text("mine", encoding="utf-8")
    assert of(TrainOptions()) == "data/shakespeare.txt"
    assert beside_program("none.txt") == "none.txt"


@pytest.mark.parametrize("program", sorted(
    str(path.relative_to(ROOT)) for path in ROOT.glob("data/get_*.py")) + [
        "bench/make_pictures.py"])
def test_help_needs_no_package(program):
    code = ("import runpy, sys; sys.modules.update(dict.fromkeys(['duckdb', 'pooch', 'tqdm', "
            "'huggingface_hub'])); sys.path.insert(0, 'data'); sys.argv[:] = sys.argv[1:]; "
            "runpy.run_path(sys.argv[0], run_name='__main__')")
    result = subprocess.run([sys.executable, "-c", code, program, "--help"], cwd=ROOT,
                            capture_output=True, encoding="utf-8")
    assert result.returncode == 0 and result.stdout.startswith("usage:"), result.stderr


def parsers_of(verbs):
    parsers = Parser().add_subparsers()
    add_verbs(parsers, verbs, chosen=[name for name, *_ in verbs])
    return parsers.choices


def test_help_shows_the_common_flags_on_one_screen_and_help_all_the_others():
    """Each flag of a long help has a group, or says what a verb reads and writes."""
    ungrouped = {"--preset", "--init", "--out", "--resume", "--force", "--file", "--seed",
                 "--adapter", "--template", "--json", "--help", "--help-all", "--batch",
                 "--truncate", "--drafts"}
    for name, parser in parsers_of(VERBS).items():
        short, common = parser.format_help(), parser.common
        shown = {*re.findall(r"^  (?:-h, )?(--[a-z0-9-]+)", short, re.M)}
        assert len(short.split("\n")) <= 60, name
        assert f"example:\n  python nanoeuler.py {name}" in short
        if common:
            assert shown == {*parser.flags} & common and "--help-all" in shown
            parser.common = None
            rest = {*re.findall(r"^  (?:-h, )?(--[a-z0-9-]+)", parser.format_help(), re.M)}
            assert rest == {x for x in parser.flags if not x.startswith("--no-")} > shown
            assert {x for x in rest if not GROUP_OF.get(x)} <= ungrouped, name
        else:
            assert len(shown) <= MOST_SHOWN


def test_an_example_of_help_is_a_command_that_its_verb_takes():
    for name, parser in parsers_of(VERBS).items():
        words = shlex.split(EXAMPLES[name])
        assert words[0] == name
        parser.need_flags(words[1:])
        parser.parse_intermixed_args(words[1:])
    known = {flag for flags in (parser.flags for parser in parsers_of(VERBS).values())
             for flag in flags}
    assert {x for x in GROUP_OF if x not in known} <= {"--gpus", "--matmul", "--recompute"}
