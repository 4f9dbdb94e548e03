"""Part I of nanoeuler.py: it agrees with the code that trains, and it runs alone."""
import io
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import types
from dataclasses import replace

import numba
import numpy as np
import pytest
from helpers import ROOT, few, ok, random_flat

import bpe
import check
import nanoeuler as ne
from nanoeuler_parts.chat.templates import chat_ids

pytestmark = pytest.mark.unit
SOURCE = (ROOT / "nanoeuler.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def python():
    """nanoeuler.py as plain Python, for tiny models: compiling Part I takes 20 seconds."""
    program = types.ModuleType("nanoeuler_in_python")
    program.__file__ = str(ROOT / "nanoeuler.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numba.config, "DISABLE_JIT", 1)
        patch.setitem(sys.modules, "nanoeuler_parts", None)
        patch.setitem(sys.modules, program.__name__, program)
        exec(compile(SOURCE, program.__file__, "exec"), vars(program))
    return program


# ---- the same numbers as `Model`
TINY = dict(n_embd=6, n_head=2, n_kv_head=1, head_dim=4, n_layer=2, n_hidden=5, seq_len=6,
            vocab_size=9)
OPTIONS = {"plain": {}, "biases": {"qkv_bias": True}, "norms": {"qk_norm": True},
           "window": {"window": 3}, "one key per query": {"n_kv_head": 2},
           "scaled RoPE": {"rope_scaling": "llama3", "rope_original": 4, "rope_factor": 2.0},
           "all": {"qkv_bias": True, "qk_norm": True, "window": 2, "rope_scaling": "linear",
                   "rope_factor": 3.0}}
CASES = [dict(n_mtp=P, tie_embeddings=tied, **more)
         for P in (1, 4) for tied in (False, True) for more in OPTIONS.values()]


def agreement(plain, cfg, B, T, seed):
    """Compares losses and the gradient of every tensor, in float64: the two sum in other orders, so
    a number differs by some 1e-16 of the terms of its sum."""
    rng = np.random.default_rng(seed)
    flat = check.random_params(cfg, rng)
    tokens, targets = check.random_batch(cfg, B, T, rng)
    weight = rng.random((B, cfg.n_mtp))
    fast, slow = ne.Model(cfg, flat), plain(cfg, flat.copy())
    expected = fast.run(ne.GRADIENT, tokens, targets, weight)
    found = slow.run(tokens, targets, weight, cfg.n_mtp, with_gradient=True)
    assert np.abs(found - expected).max() <= 1e-12 * np.abs(expected).max()
    assert np.allclose(slow.losses(tokens, targets[0]), expected[:, 0], rtol=1e-12, atol=0)
    for name, x, y in zip(ne.Params._fields, slow.g, fast.g):
        if x.size:
            assert np.abs(x - y).max() <= 1e-12 * np.abs(y).max(), name
    return fast, slow, tokens, targets, weight


@pytest.mark.parametrize("changes", few(CASES, 12))
def test_losses_and_gradients_are_those_of_the_code_that_trains(python, monkeypatch, changes):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    agreement(python.PlainModel, ne.Config(**TINY | changes), 2, 6, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("case", check.CASES[:-1], ids=lambda case: case.title)
def test_compiled_losses_and_gradients_agree(case):
    agreement(ne.PlainModel, replace(check.BASE, **case.changes), sum(case.sizes), case.T, seed=5)


@pytest.mark.slow
def test_a_step_of_the_optimizer_is_the_same():
    cfg = ne.Config(**TINY, n_mtp=2)
    fast, slow, tokens, targets, weight = agreement(ne.PlainModel, cfg, 3, 6, seed=1)
    for t in 1, 2, 3:
        hyper = ne.hyper_at(t, 1e-2, beta1=0.9, beta2=0.95, weight_decay=0.1, clip=0.5)
        for model in fast, slow:
            model.g_flat[:] = 0
            model.gradient(tokens, targets, weight)
        (ce, norm), (other_ce, other_norm) = fast.update(hyper), slow.update(hyper)
        assert np.allclose(ce, other_ce, rtol=1e-12) and math_close(norm, other_norm)
        assert np.abs(fast.flat - slow.flat).max() <= 1e-11


def math_close(x, y):
    return abs(x - y) <= 1e-12 * abs(x)


def need_equal_gradient_in_another_thread(kind):
    cfg = ne.Config(**TINY, n_mtp=2)
    rng, gradients = np.random.default_rng(1), []
    flat = check.random_params(cfg, rng)
    tokens, targets = check.random_batch(cfg, 2, 6, rng)

    def work():
        model = kind(cfg, flat)
        model.gradient(tokens, targets, np.ones((2, 2)))
        gradients.append(model.g_flat.copy())

    work()
    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join()
    assert np.array_equal(*gradients) and gradients[0].any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ne.PlainModel, ne.Model])
def test_a_gradient_in_another_thread_is_the_same(kind):
    need_equal_gradient_in_another_thread(kind)


def test_a_gradient_in_another_thread_is_the_same_without_the_package(python, monkeypatch):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    need_equal_gradient_in_another_thread(python.PlainModel)


PROMPTS = ("What is the capital of France?", "Who wrote Hamlet?", "Sort these words: b a c",
           "What is 3 + 4?", "Hello", "ROMEO:", "Add 12 and 30.", "Write in capitals: word",
           "Why?", "The")


@pytest.mark.slow
def test_greedy_replies_of_the_bundled_model_are_the_same():
    """Token by token with a KV cache, and as one text: 64 tokens each"""
    file = str(ROOT / "data" / "model.bin")
    cfg, tokenizer, state, flat = ne.read_model(file)
    c = ne.read_checkpoint(file)
    assert cfg == c.cfg and np.array_equal(flat, c.flat)
    for prompt in PROMPTS:
        ids, end = ne.prompt_ids(prompt, state, tokenizer)
        assert ids.tolist() == chat_ids(c.state.template, [("user", prompt)], c.state, tokenizer)
        replies = [[*ne.generate(decoder, ids, 64, None, ne.Choice(0.0), end)]
                   for decoder in (ne.PlainDecoder(cfg, flat), ne.Decoder(cfg, flat))]
        assert replies[0] == replies[1] != []


def test_a_template_that_part_one_lacks_is_rejected():
    with pytest.raises(bpe.UserError, match="template needs the folder nanoeuler_parts; put it"):
        ne.prompt_ids("a", {"kind": "chat", "template": "{{ messages }}"},
                      bpe.train(b"", 259, bpe.SPECIALS))


def test_a_decoder_with_auxiliary_heads_reads_head_0(python, monkeypatch):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    for tied in False, True:
        cfg = ne.Config(**TINY, n_mtp=3, tie_embeddings=tied)
        flat = check.random_params(cfg, np.random.default_rng(2))
        ids = [3, 1, 4, 1, 5, 2]
        whole = ne.Model(cfg, flat).logits(np.array([ids], np.int32))[0, 0]
        for cuts in ([6], [1] * 6, [2, 3, 1]):
            decoder, at = python.PlainDecoder(cfg, flat), 0
            for n in cuts:
                logits = decoder.step(*ids[at:at + n])
                at += n
                assert np.allclose(logits, whole[at - 1], rtol=1e-10, atol=1e-10)
        for wrong in (9,), (-1,), (0,) * 7:
            with pytest.raises(bpe.UserError):
                python.PlainDecoder(cfg, flat).step(*wrong)


# ---- its file
@pytest.mark.parametrize("matrices", ["f32", "bf16", "int8"])
def test_it_reads_what_the_whole_program_writes(tmp_path, matrices):
    cfg = ne.Config(**TINY | {"vocab_size": 260}, n_mtp=2, qkv_bias=True)
    tokenizer = bpe.train(b"abab", 260, bpe.SPECIALS)
    flat, file = random_flat(cfg, 1, np.float32), str(tmp_path / "x.bin")
    ne.write_checkpoint(file, cfg, tokenizer, ne.State(), flat, matrices=matrices)
    found = ne.read_model(file)
    assert found[0] == cfg and found[1].to_json() == tokenizer.to_json()
    assert np.array_equal(found[3], ne.read_checkpoint(file).flat)


def test_the_whole_program_reads_what_it_writes(tmp_path):
    """Its checksum is that of `nanoeuler_parts`, which rejects another one."""
    cfg = ne.Config(**TINY | {"vocab_size": 260}, n_mtp=2)
    tokenizer = bpe.train(b"abab", 260, bpe.SPECIALS)
    flat, file = random_flat(cfg, 1, np.float32), str(tmp_path / "x.bin")
    ne.write_model(file, cfg, tokenizer, {"kind": "base", "eos": "</s>", "step": 4}, flat)
    c = ne.read_checkpoint(file)
    assert c.cfg == cfg and np.array_equal(c.flat, flat) and c.state.step == 4
    assert os.listdir(tmp_path) == ["x.bin"]


@pytest.mark.parametrize("content", [b"", b"\x01", b"a text, no model" * 9, b"\x02" + bytes(7) +
                                     b"{}", b"\xff" * 64])
def test_another_file_is_rejected(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(bpe.UserError, match="x: .*name a checkpoint"):
        ne.read_model(str(tmp_path / "x"))


@pytest.mark.parametrize("shape", [[1, 1], [6, 260]])
def test_a_tensor_of_another_shape_is_rejected(tmp_path, shape):
    """One number would fill the whole embedding, and a transposed one would mix its entries."""
    cfg, file = ne.Config(**TINY | {"vocab_size": 260}), str(tmp_path / "x.bin")
    ne.write_model(file, cfg, bpe.train(b"abab", 260, bpe.SPECIALS), {}, ne.init_params(cfg, 1))
    content = (tmp_path / "x.bin").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8:8 + length])
    entry = header["model.embed_tokens.weight"]
    entry |= {"shape": shape, "data_offsets": [0, 4 * math.prod(shape)]}
    text = json.dumps(header).encode()
    (tmp_path / "x.bin").write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length:])
    with pytest.raises(bpe.UserError, match=r"embed_tokens.weight: expected shape \(260, 6\)"):
        ne.read_model(file)


# ---- validation
@pytest.mark.parametrize("n", range(150, 190))
def test_bits_per_byte_are_those_of_the_whole_held_out_text(n, capsys):
    """The targets spell the text, each byte once, also if the last window is not full."""
    text = "to be or not to be, thät is the quéstion; ".encode()
    text = (text * 9)[:n].decode(errors="ignore").encode()
    run = ne.PlainRun(ne.Config(**TINY | dict(seq_len=8, vocab_size=262, n_mtp=2)), text, "", 1)
    targets = run.targets[run.targets >= 0]
    held_out = run.tokenizer.decode(targets)
    assert text.endswith(held_out) and 0 <= len(held_out) - len(text) / 10 < 4
    assert (run.targets[:, :-1] == run.tokens[:, 1:])[run.targets[:, 1:] >= 0].all()
    run.model = types.SimpleNamespace(losses=lambda tokens, targets: (targets >= 0).sum(1) * 2.0)
    run.validate()
    bits = 2 * len(targets) / np.log(2) / len(held_out)
    assert f"validation {bits:.4f} bits/byte" in capsys.readouterr().out


# ---- it runs alone
ALONE = """
import io, sys
sys.modules["nanoeuler_parts"] = None        # as where it is not installed
sys.path[0] = {folder!r}
import bpe, numba
numba.config.DISABLE_JIT = {as_python}
import nanoeuler as ne
numba.config.DISABLE_JIT = 0
ne.PRESETS["small"] = ne.Config(n_embd=4, n_head=2, n_kv_head=1, head_dim=2, n_layer=1, n_hidden=4,
                                seq_len=8, vocab_size=260, n_mtp=2)
ne.PlainRun.B = ne.PlainRun.micro_batch = 2

def run(*args, stdin=""):
    sys.stdin = io.StringIO(stdin)
    return ne.main([*map(str, args)])

print([run("train", "--data", "text.txt", "--steps", 3), run("generate", "to", "--tokens", 2),
       run("chat", "--tokens", 2, stdin="be\\n\\nor\\n"), run("generate", "", "--tokens", 2),
       run("generate", "to", "text.txt"), run("train", "--data", "no text.txt"),
       run("train", "--data", "text.txt", "--steps", 0, "--out", "b.bin"),
       run("train", "--data", "text.txt", "--steps", 3),
       run("generate", "to", "--temperature", "nan"),
       run("train", "--data", "text.txt", "--out", "none/b.bin"),
       run("chat", "--tokens", 2, stdin="to be " * 99 + "\\nbe\\n")])
"""


def alone(folder, work, as_python, env=None):
    for path in folder, work:
        path.mkdir(exist_ok=True)
    for name in "bpe.py", "nanoeuler.py", "check.py":
        shutil.copy2(ROOT / name, folder)
    (work / "text.txt").write_text("to be or not to be, " * 20, encoding="utf-8")
    code = ALONE.format(folder=str(folder), as_python=int(as_python))
    result = subprocess.run([sys.executable, "-c", code], cwd=work, timeout=600, env=env,
                            capture_output=True, encoding="utf-8")
    assert ok(result).splitlines()[-1] == "[0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 0]", result.stderr
    assert "Traceback" not in result.stderr and "step     3/3  loss" in result.stdout
    errors = [line for line in result.stderr.splitlines() if line.startswith("nanoeuler: ")]
    assert len(errors) == 8 and "nanoeuler.bin exists" in errors[4]
    assert "--temperature" in errors[5] and "none" in errors[6] and "shorten it" in errors[7]
    c = ne.read_checkpoint(str(work / "nanoeuler.bin"))
    assert c.state.step == 3 and c.cfg.n_mtp == 2
    return c


@pytest.mark.parametrize("losses, norm", [([1.0], math.nan), ([math.nan], 1.0)])
def test_a_run_ends_where_the_loss_or_the_gradient_is_not_finite(losses, norm):
    with pytest.raises(ne.UserError, match="step 7: the loss or its gradient is not finite"):
        ne.PlainRun.record(types.SimpleNamespace(step=7), np.array(losses), norm, None, 0.1)


def test_wrong_arguments_are_rejected_before_the_work(tmp_path, capsys):
    assert ne.plain_main(["train", "--data", str(ROOT / "data/shakespeare.txt"), "--steps",
                          "0"]) == 2
    assert "--steps: expected 1 or more, found 0" in capsys.readouterr().err
    assert ne.plain_main(["train", "--steps", "1", "--data", str(ROOT / "bpe.py"), "--out",
                          __file__]) == 2
    assert f"{__file__} exists; name another file with --out, or" in capsys.readouterr().err
    for flag, value, word in (("--temperature", "-0.1", "--temperature"),
                              ("--temperature", "inf", "--temperature"),
                              ("--temperature", "0", "no.bin"),
                              ("--tokens", "-1", "--tokens: expected 0 or more, found -1"),
                              ("--tokens", "0", "no.bin")):
        assert ne.plain_main(["generate", "a", str(tmp_path / "no.bin"), flag, value]) == 2
        assert word in capsys.readouterr().err
    cfg = replace(ne.PRESETS["small"], seq_len=8)
    with pytest.raises(ne.UserError, match="the prompt has 9 tokens, .* up to 8; shorten it"):
        ne.write_reply("a" * 9, (cfg, bpe.train(b"", 259, bpe.SPECIALS), {}, None), ne.Choice(), 5)


def test_part_one_replaces_characters_that_the_streams_do_not_have(monkeypatch):
    """Standard input that is not UTF-8, and a terminal without the letters of the reply"""
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\nb\n"), "utf-8"))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(ne, "read_model", lambda path: None)
    monkeypatch.setattr(ne, "write_reply", lambda prompt, *_: print(f"{prompt} \xe9"))
    assert ne.plain_main(["chat"]) == 0
    out.flush()
    assert out.buffer.getvalue() == b"> a? ?\n> b ?\n> \n"


def test_part_one_trains_generates_and_chats_alone_in_python(tmp_path):
    alone(tmp_path / "program", tmp_path / "work", as_python=True)


@pytest.mark.slow
def test_part_one_runs_alone_and_beside_the_package(tmp_path):
    """Cold and from the cache, with and without the package in turn, in one folder: a kernel that
    one kind of run compiled must not be loaded by the other."""
    folder, env = tmp_path / "program", {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    env.pop("NUMBA_CACHE_DIR", None)
    first = alone(folder, tmp_path / "a", as_python=False, env=env)
    again = alone(folder, tmp_path / "b", as_python=False, env=env)
    assert np.array_equal(first.flat, again.flat)
    shutil.copytree(ROOT / "nanoeuler_parts", folder / "nanoeuler_parts",
                    ignore=shutil.ignore_patterns("__pycache__"))
    code = """
import json, sys
sys.path[0] = sys.argv[1]
import nanoeuler as ne, numpy as np, hashlib
cfg = ne.Config(n_embd=8, n_head=2, n_kv_head=1, head_dim=4, n_layer=1, n_hidden=8, seq_len=8,
                vocab_size=16, n_mtp=2)
rng = np.random.default_rng(1)
tokens, flat = rng.integers(0, 16, (2, 8), dtype=np.int32), ne.init_params(cfg, 1)
targets = np.stack([tokens, tokens])
found = {}
for name in sys.argv[2].split():
    model = getattr(ne, name)(cfg, flat)
    model.gradient(tokens, targets, np.ones((2, 2)))
    found[name] = hashlib.sha256(model.g_flat.tobytes()).hexdigest()
print(json.dumps(found))
"""
    found = {}
    for order in "PlainModel Model", "Model PlainModel", "PlainModel", "Model":
        result = subprocess.run([sys.executable, "-c", code, str(folder), order], timeout=600,
                                env=env, capture_output=True, encoding="utf-8")
        for name, digest in json.loads(ok(result).splitlines()[-1]).items():
            assert found.setdefault(name, digest) == digest, (order, name)
    shutil.rmtree(folder / "nanoeuler_parts")
    assert np.array_equal(alone(folder, tmp_path / "c", as_python=False, env=env).flat, first.flat)
    said = subprocess.run([sys.executable, str(folder / "check.py"), "--plain", "--quick"],
                          cwd=folder, timeout=600, capture_output=True, encoding="utf-8",
                          env={**env, "PYTHONPATH": str(folder)})
    assert ">>> backward OK" in ok(said)
