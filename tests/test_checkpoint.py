"""Checkpoints: the format, all-or-nothing writing, and what reading makes of damaged files."""
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from helpers import (EVERY_TENSOR, PYTHON, ROOT, TINY, complains, full_table, nanoeuler, needs, ok,
                     places_in, put_together, random_flat, refused, replace_everywhere, replaced,
                     run, some, take_apart)

import bpe
import nanoeuler as ne
from nanoeuler_parts.checkpoint.tensors import named, named_moments
from nanoeuler_parts.files.safetensors import map_tensors, write_tensors
from nanoeuler_parts.files.writing import replacing
from nanoeuler_parts.runs.options import TrainOptions

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("one_thread")]


def tensors_of(c):
    """name -> view of what a checkpoint of AdamW holds"""
    return named(c.cfg, c.flat) | named_moments(c.cfg, "adamw", *c.moments)


def left_behind(path):
    """Temporary files of a path."""
    return sorted(path.parent.glob(f"{path.name}.*tmp"))


# ---- the format
def test_round_trip(checkpoint):
    c = ne.read_checkpoint(str(checkpoint))
    flat = random_flat(TINY, 1, np.float32)
    assert c.cfg == TINY and c.state.step == 3 and c.state.n_steps == 9
    assert np.array_equal(c.flat, flat) and c.flat.dtype == np.float32
    assert np.array_equal(c.moments[0], flat * np.float32(0.5))
    assert np.array_equal(c.moments[1], flat * flat)
    assert c.tokenizer.decode(c.tokenizer.encode("to be \u00e9")) == "to be \u00e9".encode()
    assert left_behind(checkpoint) == []


def test_a_file_says_zero_for_none():
    """Those of the first checkpoints do, which must go on being read."""
    names = "n_steps", "micro_batch", "bits_per_byte"
    written = ne.State().written()
    assert [repr(written[name]) for name in names] == ["0", "0", "0.0"]
    state = ne.State(**written)
    assert state == ne.State() and [getattr(state, name) for name in names] == [None] * 3
    options = TrainOptions(steps=0, micro_batch=0).check()
    assert options.steps is options.micro_batch is None
    assert (options.written()["steps"], options.written()["micro_batch"]) == (0, 0)
    with pytest.raises(ne.UserError, match="n_steps: expected a whole number, found False"):
        ne.State(n_steps=False).check()


@pytest.mark.parametrize("name", ["norm_eps", "rope_theta"])
def test_an_integer_in_place_of_a_float_compiles_no_kernel(name, checkpoint):
    """Numba compiles a kernel for each combination of types: an int64 would be a new one."""
    c = ne.read_checkpoint(str(checkpoint))
    ne.Decoder(c.cfg, c.flat).step(1)
    compiled = list(ne.decode_step.signatures)
    ne.write_checkpoint(str(checkpoint), ne.replace(c.cfg, **{name: 1}), *c[1:4])
    assert b'\\"%s\\": 1,' % name.encode() in checkpoint.read_bytes()
    cfg = ne.read_checkpoint(str(checkpoint)).cfg
    ne.Decoder(cfg, c.flat).step(1)
    assert type(getattr(cfg, name)) is float
    assert list(ne.decode_step.signatures) == compiled


def test_each_number_of_a_file_has_the_type_of_its_field():
    state = ne.State(elapsed=3, bits_per_byte=2, best=0).check()
    assert [repr(x) for x in (state.elapsed, state.bits_per_byte, state.best)] == [
        "3.0", "2.0", "None"]
    with pytest.raises(ne.UserError, match="n_layer: expected a whole number, found 1.0"):
        ne.Config(n_layer=1.0).check()


def test_without_moments_and_with_chat_state(checkpoint, tmp_path):
    c, path = ne.read_checkpoint(str(checkpoint)), tmp_path / "chat.bin"
    ne.write_checkpoint(str(path), c.cfg, c.tokenizer, ne.State(kind="chat"), c.flat)
    again = ne.read_checkpoint(str(path))
    assert len(again.moments) == 0 and again.state.kind == "chat"
    assert np.array_equal(again.flat, c.flat)


def test_a_reference_is_a_tensor_and_not_in_the_header(checkpoint, tmp_path, monkeypatch):
    """A header of the same length, but for one entry, however many pairs there are."""
    c, path = ne.read_checkpoint(str(checkpoint)), tmp_path / "dpo.bin"
    header, data = take_apart(checkpoint)
    reference = [math.sqrt(i) for i in range(1, 20_000)]
    state = ne.replace(c.state, reference=reference)
    most = len(json.dumps(header)) + 200
    monkeypatch.setattr("nanoeuler_parts.files.safetensors.MAX_HEADER", most)
    ne.write_checkpoint(str(path), c.cfg, c.tokenizer, state, c.flat, c.moments)
    again, more = take_apart(path)
    assert again["dpo.reference"]["dtype"] == "F64" and len(more) == len(data) + 8 * len(reference)
    assert "reference" not in json.loads(again["__metadata__"]["state"])
    assert ne.read_checkpoint(str(path)).state == state
    again["dpo.reference"]["shape"] = [1, len(reference)]
    put_together(path, again, more)
    with pytest.raises(ne.UserError, match="its tensors do not match"):
        ne.read_checkpoint(str(path))


def test_same_bytes_twice(checkpoint, tmp_path):
    c, path = ne.read_checkpoint(str(checkpoint)), tmp_path / "again.bin"
    ne.write_checkpoint(str(path), c.cfg, c.tokenizer, c.state, c.flat, c.moments)
    assert path.read_bytes() == checkpoint.read_bytes()


@pytest.mark.parametrize("tied", [False, True])
def test_safetensors_reads_llama_tensors(tied, tmp_path):
    """The library that everyone uses sees the names, shapes and values of a LlamaForCausalLM."""
    safetensors = needs("safetensors.numpy")
    from dataclasses import replace
    cfg = replace(TINY, tie_embeddings=tied, n_mtp=3, **EVERY_TENSOR)
    path = tmp_path / "a.bin"
    tokenizer = bpe.train(b"to be or not to be, that is the question", cfg.vocab_size)
    flat = random_flat(cfg, 2, np.float32)
    ne.write_checkpoint(str(path), cfg, tokenizer, ne.State(), flat, (flat, flat))
    p, want = ne.views(flat, full_table(cfg)), {}
    C, D, V, F = cfg.n_embd, cfg.head_dim, cfg.vocab_size, cfg.n_hidden
    q, kv = cfg.n_head * D, cfg.n_kv_head * D
    for l in range(cfg.n_layer):
        name = f"model.layers.{l}."
        want[name + "self_attn.q_proj.weight"] = p.qkv[l, :q]
        want[name + "self_attn.k_proj.weight"] = p.qkv[l, q:q + kv]
        want[name + "self_attn.v_proj.weight"] = p.qkv[l, q + kv:]
        want[name + "self_attn.o_proj.weight"] = p.attn_proj[l]
        want[name + "mlp.gate_proj.weight"] = p.gate_up[l, :F]
        want[name + "mlp.up_proj.weight"] = p.gate_up[l, F:]
        want[name + "mlp.down_proj.weight"] = p.down[l]
        want[name + "input_layernorm.weight"] = p.attn_norm[l]
        want[name + "post_attention_layernorm.weight"] = p.mlp_norm[l]
        want[name + "self_attn.q_proj.bias"] = p.qkv_bias[l, :q]
        want[name + "self_attn.k_proj.bias"] = p.qkv_bias[l, q:q + kv]
        want[name + "self_attn.v_proj.bias"] = p.qkv_bias[l, q + kv:]
        want[name + "self_attn.q_norm.weight"] = p.q_norm[l]
        want[name + "self_attn.k_norm.weight"] = p.k_norm[l]
    want["model.embed_tokens.weight"], want["model.norm.weight"] = p.wte, p.final_norm
    heads = (["lm_head.weight"] if not tied else []) + ["mtp.1.weight", "mtp.2.weight"]
    want.update(zip(heads, p.lm_head))
    want["adamw.m"] = want["adamw.v"] = flat
    got = safetensors.load_file(path)
    assert set(got) == set(want)
    for name, x in want.items():
        assert got[name].shape == x.shape and np.array_equal(got[name], x), name
    assert got["model.layers.0.self_attn.k_proj.weight"].shape == (kv, C)
    assert got["model.embed_tokens.weight"].shape == (V, C)


def test_metadata_is_strings_and_data_is_aligned(checkpoint):
    header, data = take_apart(checkpoint)
    meta = header.pop("__metadata__")
    assert all(isinstance(v, str) for v in meta.values())
    assert (checkpoint.stat().st_size - len(data)) % 64 == 0
    ends = sorted(tuple(t["data_offsets"]) for t in header.values())
    assert ends[0][0] == 0 and ends[-1][1] == len(data)
    assert all(a[1] == b[0] for a, b in zip(ends, ends[1:]))
    assert bpe.Tokenizer.from_json(meta["tokenizer"]).hash() == meta["tokenizer_sha256"]


# ---- reading what is not a good checkpoint
def damaged(kind, path):
    raw, (header, data) = path.read_bytes(), take_apart(path)
    meta = header["__metadata__"]
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "seven bytes":
        path.write_bytes(raw[:7])
    elif kind == "truncated":
        path.write_bytes(raw[:-1])
    elif kind == "half":
        path.write_bytes(raw[:len(raw) // 2])
    elif kind == "longer":
        path.write_bytes(raw + b"\0")
    elif kind == "bit flipped in the data":
        path.write_bytes(raw[:-1000] + bytes([raw[-1000] ^ 1]) + raw[-999:])
    elif kind == "bit flipped in the header":
        i = raw.index(b"n_steps") + 12
        path.write_bytes(raw[:i] + bytes([raw[i] ^ 1]) + raw[i + 1:])
    elif kind == "text":
        path.write_text("To be, or not to be\n" * 100, encoding="utf-8")
    elif kind == "zeros":
        path.write_bytes(bytes(100_000))
    elif kind == "a ZIP as PyTorch writes":
        path.write_bytes(b"PK\x03\x04" + np.random.default_rng(1).bytes(5000))
    elif kind == "another program's safetensors":
        meta["format"] = "pt"
        put_together(path, header, data)
    elif kind == "no metadata":
        del header["__metadata__"]
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    elif kind == "no checksum":
        del meta["sha256"]
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    elif kind == "float16":
        _, tensors = map_tensors(path)
        write_tensors(path, meta, {k: x.astype("<f2") for k, x in tensors.items()}, "")
    elif kind == "foreign tokenizer":
        meta["tokenizer"] = bpe.train(b"quite another text another", TINY.vocab_size).to_json()
        put_together(path, header, data)
    elif kind == "tokenizer of another size":
        other = bpe.train(b"to be or not to be", 260)
        meta.update(tokenizer=other.to_json(), tokenizer_sha256=other.hash())
        put_together(path, header, data)
    elif kind == "absurd size":
        config = json.loads(meta["config"])
        meta["config"] = json.dumps({**config, "n_embd": 60_000, "n_layer": 4000})
        put_together(path, header, data)
    elif kind == "a directory":
        path.unlink()
        path.mkdir()
    elif kind == "missing":
        path.unlink()


KINDS = ["empty", "seven bytes", "truncated", "half", "longer", "bit flipped in the data",
         "bit flipped in the header", "text", "zeros", "a ZIP as PyTorch writes",
         "another program's safetensors", "no metadata", "no checksum", "float16",
         "foreign tokenizer", "tokenizer of another size", "absurd size", "a directory", "missing"]


@pytest.mark.parametrize("kind", KINDS)
def test_bad_file_gives_one_line(kind, checkpoint, capsys):
    damaged(kind, checkpoint)
    for verb in ("info", "chat"):
        assert ne.main([verb, str(checkpoint), "--threads", "1"]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and str(checkpoint) in lines[0], lines
        assert any(word in lines[0] for word in ("name ", "train", "--")), lines     # the remedy


def test_a_header_of_another_form_is_rejected_in_words_of_its_own(checkpoint):
    """Each place of the header, of the configuration and of the state has a value of each type."""
    header, data = take_apart(checkpoint)
    meta, n = header["__metadata__"], 0
    cases = [replaced(header, at, value) for at in places_in(header) for value in ODD]
    for part in "config", "state":
        form = json.loads(meta[part])
        cases += [header | {"__metadata__": meta | {part: json.dumps(replaced(form, at, value))}}
                  for at in places_in(form) for value in ODD]
    for case in cases:
        if isinstance(case, dict) and isinstance(case.get("__metadata__"), dict):
            put_together(checkpoint, {**case, "__metadata__": {**case["__metadata__"]}}, data)
        else:
            text = json.dumps(case).encode()
            checkpoint.write_bytes(len(text).to_bytes(8, "little") + text + data)
        try:
            ne.read_checkpoint(str(checkpoint))
        except bpe.UserError as e:
            ours = "another type or size than expected" in str(e)
            assert ours or not any(words in str(e) for words in PYTHON), (e, case)
            assert str(checkpoint) in str(e)
            n += 1
    assert n > len(cases) / 2


ODD = None, 5, -1, 0.5, "x", [], [None], {}, {"x": 1}


@pytest.mark.parametrize("kind", ["truncated", "text", "bit flipped in the data"])
def test_a_bad_file_stays_as_it_is(kind, checkpoint, capsys):
    damaged(kind, checkpoint)
    before = checkpoint.read_bytes()
    for args in (["generate", "To be", checkpoint], ["lens", "To be", checkpoint],
                 ["train", "--resume", "--out", checkpoint]):
        refused(capsys, *args, words=[checkpoint])
    complains(nanoeuler("generate", "To be", checkpoint, cwd=checkpoint.parent), checkpoint)
    assert checkpoint.read_bytes() == before


FUZZ = '''
import contextlib, hashlib, io, json, math, pathlib, random, resource, signal, sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
import bpe, nanoeuler as ne
from helpers import put_together, take_apart
from nanoeuler_parts import kernels
from nanoeuler_parts.chat.verbs import generate_text
from nanoeuler_parts.checkpoint.tensors import moment_shapes, tensor_shapes
from nanoeuler_parts.runs.run import Run as TextRun
from nanoeuler_parts.runs.start import launch
from nanoeuler_parts.tools.info import info

good, work = pathlib.Path({path!r}), pathlib.Path({path!r} + ".fuzz")
rng, reached = random.Random(1), [0]
header, data = take_apart(good)
raw = good.read_bytes()
kernels.compile_kernels = lambda dtype: None

class Run(TextRun):                          # resuming got past every check
    def __init__(self, *args): reached[0] += 1
    def go(self): pass
NASTY = [-1, 0, 1, 3, 7, 1 << 16, 1 << 31, 10 ** 30, -10 ** 30, 1e308, float("nan"), float("inf"),
         0.5, "", "x", "\\0", "x" * 5000, "\\ud800", None, True, [], {{}}, [[]], [1, 2], {{"a": 1}}]

def nodes(tree, path=()):
    yield path
    is_list = isinstance(tree, list)
    for k, v in tree.items() if isinstance(tree, dict) else enumerate(tree if is_list else ()):
        yield from nodes(v, path + (k,))

def change(tree):
    """One random place of a JSON tree replaced, removed or doubled."""
    path = rng.choice(list(nodes(tree)))
    if not path:
        return rng.choice(NASTY)
    spot = tree
    for k in path[:-1]:
        spot = spot[k]
    action = rng.randrange(4)
    if action == 0:
        del spot[path[-1]]
    elif action == 1 and isinstance(spot, dict):
        spot[rng.choice(["", "x", "n_embd", "__metadata__"])] = spot[path[-1]]
    elif action == 2 and type(spot[path[-1]]) in (int, float):
        spot[path[-1]] = spot[path[-1]] * rng.choice([-1, 2, 1 << 10, 1 << 20, 1 << 40, 0.5])
    else:
        spot[path[-1]] = rng.choice(NASTY)
    return tree

def mutated(i):
    kind, h = i % 8, json.loads(json.dumps(header))
    meta = h["__metadata__"]
    if kind == 0:                            # bytes, mostly of the header
        b = bytearray(raw)
        for _ in range(rng.choice([1, 1, 3, 50])):
            end = len(raw) if rng.random() < 0.3 else len(raw) - len(data)
            b[rng.randrange(end)] = rng.randrange(256)
        return work.write_bytes(b)
    if kind == 1:
        return work.write_bytes(raw[:rng.randrange(len(raw))] + bytes(rng.choice([0, 0, 1, 999])))
    if kind == 2:                            # the length of the header
        n = rng.choice([rng.getrandbits(64), rng.randrange(1 << 20), (1 << 63) + 5])
        return work.write_bytes(n.to_bytes(8, "little") + raw[8:])
    if kind == 3:
        h = change(h)
    elif kind in (4, 5, 6):                  # a field of the settings or of the tokenizer
        key = ["config", "state", "tokenizer"][kind - 4]
        tree = json.loads(meta[key])
        for _ in range(rng.choice([1, 1, 2])):
            tree = change(tree)
            if not isinstance(tree, (dict, list)): break
        meta[key] = json.dumps(tree)
        if key == "tokenizer" and rng.random() < 0.7:
            with contextlib.suppress(bpe.UserError), bpe.reading("a tokenizer", "mend it"):
                meta["tokenizer_sha256"] = bpe.Tokenizer.from_json(meta[key]).hash()
    else:                                    # sizes that agree with each other, not with the file
        config = json.loads(meta["config"])
        sizes = ["n_embd", "n_layer", "n_hidden", "vocab_size", "n_mtp", "head_dim"]
        for key in rng.sample(sizes, 2):
            config[key] = rng.choice([1, 2, 16, 4000, 60000, 1 << 17])
        meta["config"] = json.dumps(config)
        with contextlib.suppress(Exception):
            if config["n_layer"] < 100 and config["n_mtp"] <= 16:
                cfg = ne.Config(**config)
                shapes = tensor_shapes(cfg)
                if "adamw.m" in h:
                    shapes |= moment_shapes(cfg, "adamw")
                h, end = {{"__metadata__": meta}}, 0
                for name, shape in shapes.items():
                    start, end = end, end + 4 * math.prod(shape)
                    h[name] = dict(dtype="F32", shape=list(shape), data_offsets=[start, end])
    if not isinstance(h, dict) or not isinstance(h.get("__metadata__"), dict):
        text = json.dumps(h).encode()
        return work.write_bytes(len(text).to_bytes(8, "little") + text + data)
    put_together(work, h, data)

ne.read_checkpoint(str(good))                # compiled before memory gets scarce
pages = int(open("/proc/self/statm", encoding="ascii").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (256 << 20),) * 2)
results = {{}}
for i in range({count}):
    mutated(i)
    signal.alarm(20)                         # a hang ends the process
    for what in (lambda: info(str(work)),
                 lambda: launch(Run, out=str(work), resume=True, force=False),
                 lambda: generate_text("A", str(work), tokens=0)):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                what()
            name = "read"
        except ne.UserError as e:
            name = "refused"
            assert "\\n" not in str(e) and str(work) in str(e), str(e)
        except BaseException:
            print("mutant", i, "of kind", i % 8, file=sys.stderr)
            raise
        results[name] = results.get(name, 0) + 1
    if i % 4 == 0:                           # the tokenizer's own file
        text = json.loads(header["__metadata__"]["tokenizer"])
        work.with_suffix(".json").write_text(json.dumps(change(text)), encoding="utf-8")
        with contextlib.suppress(bpe.UserError):
            bpe.Tokenizer.load(str(work.with_suffix(".json"))).encode("to be")
print(json.dumps({{**results, "resumed": reached[0]}}))
'''


def test_a_thousand_mutated_files(checkpoint):
    """Only UserError or the tokenizer's error; with 256 MB to spare, so no absurd allocation."""
    if sys.platform != "linux":
        pytest.skip("RLIMIT_AS and /proc are Linux's")
    n = some(1000)
    script = FUZZ.format(root=str(ROOT), path=str(checkpoint), count=n)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, encoding="utf-8",
                            timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    counts = json.loads(result.stdout.splitlines()[-1])
    assert counts["read"] + counts["refused"] == 3 * n
    assert counts["refused"] > 2 * n and counts["resumed"] > n // 100, counts    # the mutants bite


# ---- writing all or nothing
@pytest.mark.parametrize("left", [0.01, 0.5, 0.999])
def test_a_file_that_is_cut_short_is_called_that(left, checkpoint, capsys):
    """As a download that broke off leaves it: how much is there, and what to do."""
    raw = checkpoint.read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    n = header + int(left * (len(raw) - header))
    checkpoint.write_bytes(raw[:n])
    refused(capsys, "info", checkpoint, words=[
        f"{checkpoint}: the file is incomplete", f"found {n:,} of {len(raw):,} bytes",
        "download it again"])
    checkpoint.write_bytes(raw[:header])
    refused(capsys, "info", checkpoint, words=[f"found {header:,} of {len(raw):,} bytes"])
    checkpoint.write_bytes(raw[:header // 2])
    refused(capsys, "info", checkpoint, words=["another format or an incomplete file"])


def test_a_gguf_file_is_no_checkpoint_but_becomes_one(tmp_path, capsys):
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(99))
    refused(capsys, "chat", tmp_path / "a.gguf", words=["a GGUF file", "import"])


def test_a_file_takes_its_name_when_it_is_on_the_disk(checkpoint, monkeypatch):
    done, c = [], ne.read_checkpoint(str(checkpoint))
    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, lambda *args, name=name, call=getattr(os, name): (
            done.append(name), call(*args)))
    ne.write_checkpoint(str(checkpoint), c.cfg, c.tokenizer, c.state, c.flat)
    assert done == ["fsync", "replace", "fsync"]         # the file, and its folder


KILLED = '''
import json, os, signal, sys
sys.path.insert(0, {root!r})
import nanoeuler as ne
from nanoeuler_parts.files import safetensors
path, nth, passed, step = {path!r}, 0, 0, 100

def point(name):
    """The nth of these that a child passes is its end."""
    global passed
    passed += 1
    if passed == nth:
        os.write(report, name.encode())
        os.kill(os.getpid(), signal.SIGKILL)

class Halves:
    """A file into which each write comes in two."""
    def __init__(self, *args): self.file = open(*args)
    def __enter__(self): return self
    def __exit__(self, *args): self.file.close()
    def fileno(self): return self.file.fileno()
    def seek(self, at): self.file.seek(at)
    def write(self, data):
        data = memoryview(data).cast("B")
        for part in (data[:len(data) // 2], data[len(data) // 2:]):
            self.file.write(part)
            self.file.flush()
            point("write")

def announced(name, call):
    def called(*args):
        point("before " + name)
        call(*args)
        point("after " + name)
    return called

c, kills, status = ne.read_checkpoint(path), [], None
while status != 0:
    nth, step = nth + 1, step + 1
    read, report = os.pipe()
    child = os.fork()
    if child == 0:
        safetensors.open, os.fsync = Halves, announced("fsync", os.fsync)
        os.replace = announced("replace", os.replace)
        c.flat[:] = step
        ne.write_checkpoint(path, c.cfg, c.tokenizer, ne.State(step=step), c.flat, c.moments)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    now, temporary = ne.read_checkpoint(path), f"{{path}}.{{child}}.tmp"
    assert (now.flat == now.state.step).all(), "a mixture"
    if status:
        assert os.WTERMSIG(status) == signal.SIGKILL
        name, is_new = os.read(read, 99).decode(), now.state.step == step
        kills.append((name, is_new, os.path.exists(temporary)))
print(json.dumps(kills))
'''


def test_a_kill_at_any_moment_leaves_a_checkpoint(checkpoint):
    """The old one until the new one has its name; within each write, around fsync and replace."""
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    c = ne.read_checkpoint(str(checkpoint))
    c.flat[:] = c.state.step
    ne.write_checkpoint(str(checkpoint), c.cfg, c.tokenizer, c.state, c.flat, c.moments)
    script = KILLED.format(root=str(ROOT), path=str(checkpoint))
    kills = json.loads(ok(subprocess.run([sys.executable, "-c", script], capture_output=True,
                                         encoding="utf-8", timeout=240)))
    names, new, left = zip(*kills)
    writes = 2 * (2 + len(tensors_of(c)))                # two parts are the header
    after = "after replace", "before fsync", "after fsync"               # that of the folder
    assert names == ("write",) * writes + ("before fsync", "after fsync", "before replace", *after)
    n = len(kills) - len(after)
    assert new == (False,) * n + (True,) * len(after)
    assert left == (True,) * n + (False,) * len(after)   # the kills hit the middle


def test_two_processes_that_write_one_checkpoint_leave_one_of_both(checkpoint):
    """Each has a temporary file of its own: none is cut off by the other."""
    code = ("import sys; sys.path.insert(0, sys.argv[1])\n"
            "import nanoeuler as ne, numpy as np\n"
            "c = ne.read_checkpoint(sys.argv[2])\n"
            "step = int(sys.argv[3])\n"
            "flat = np.full(c.flat.size, step, np.float32)\n"
            "for _ in range(60):\n"
            "    ne.write_checkpoint(sys.argv[2], c.cfg, c.tokenizer, ne.State(step=step), flat)\n")
    writers = [subprocess.Popen([sys.executable, "-c", code, ROOT, checkpoint, str(step)],
                                stderr=subprocess.PIPE) for step in (7, 8)]
    for writer in writers:
        _, said = writer.communicate(timeout=120)
        assert writer.returncode == 0, said.decode()
    c = ne.read_checkpoint(str(checkpoint))
    assert c.state.step in (7, 8) and (c.flat == c.state.step).all()
    assert left_behind(checkpoint) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError(28, "No space left")])
def test_nothing_is_left_behind_by_what_breaks_off(error, checkpoint):
    before = checkpoint.read_bytes()
    with pytest.raises((KeyboardInterrupt, MemoryError, ne.UserError)):
        with replacing(str(checkpoint), "free space") as temporary:
            with open(temporary, "wb") as f:
                f.write(b"half of it")
            raise error
    assert checkpoint.read_bytes() == before and left_behind(checkpoint) == []


def test_what_a_killed_process_left_is_removed_in_time(checkpoint):
    c = ne.read_checkpoint(str(checkpoint))
    old, new, mine = (checkpoint.parent / f"{checkpoint.name}.{pid}.tmp" for pid in (1, 2, "best"))
    for path in (old, new, mine):
        path.write_bytes(b"half of it")
    for path in (old, mine):
        os.utime(path, (0, 0))
    ne.write_checkpoint(str(checkpoint), c.cfg, c.tokenizer, c.state, c.flat)
    assert mine.exists()                     # a user's own, by another kind of name
    mine.unlink()
    assert left_behind(checkpoint) == [new]  # which a living process may be writing


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name, at", [("model.layers.1.mlp.up_proj.weight", (3, 5)),
                                      ("model.norm.weight", (2,)), ("adamw.v", (100,))])
def test_the_tensor_that_is_not_finite_is_named(name, at, value, checkpoint, capsys):
    c = ne.read_checkpoint(str(checkpoint))
    tensors_of(c)[name][at] = value
    ne.write_checkpoint(str(checkpoint), c.cfg, c.tokenizer, c.state, c.flat, c.moments)
    refused(capsys, "info", checkpoint, words=[checkpoint, f"{name}{list(at)} is {value}"])


def test_large_weights_whose_sum_overflows_are_finite(checkpoint):
    c = ne.read_checkpoint(str(checkpoint))
    c.flat[:] = 3e38
    ne.write_checkpoint(str(checkpoint), c.cfg, c.tokenizer, c.state, c.flat)
    assert (ne.read_checkpoint(str(checkpoint)).flat == np.float32(3e38)).all()


def test_who_talks_to_a_model_does_without_its_moments(checkpoint, monkeypatch):
    """Twice its memory.  They are checked with the rest of the file all the same."""
    made, aligned = [], ne.aligned
    monkeypatch.setattr(ne, "aligned", lambda *args: made.append(args[0]) or aligned(*args))
    c = ne.read_checkpoint(str(checkpoint), moments=False)
    assert len(made) == 1 and list(c.moments) == []
    assert np.array_equal(c.flat, ne.read_checkpoint(str(checkpoint)).flat)
    for args in (("generate", "to be", checkpoint, "--tokens", 1), ("lens", "to be", checkpoint),
                 ("export", checkpoint, checkpoint.parent / "hf")):
        replace_everywhere(monkeypatch, "nanoeuler_parts.checkpoint.file.read_checkpoint",
                           lambda path, moments=True: pytest.fail(
                               f"{args[0]} reads the moments") if moments else c)
        run(*args)


# ---- what is well-formed and wrong
def rewritten(path, change):
    """The checkpoint after change(its header, its state), with a checksum that fits."""
    header, data = take_apart(path)
    state = json.loads(header["__metadata__"]["state"])
    change(header, state)
    header["__metadata__"]["state"] = json.dumps(state)
    put_together(path, header, data)


def test_tensors_that_overlap_and_leave_a_hole_are_refused(checkpoint, capsys):
    """As many bytes as there should be: two gains are the same one, and its neighbour's are no
    tensor's."""
    def overlap(header, state):
        gains = [name for name in header if "input_layernorm" in name]
        header[gains[0]]["data_offsets"] = header[gains[1]]["data_offsets"]

    rewritten(checkpoint, overlap)
    refused(capsys, "info", checkpoint, words=["expected a tensor from byte"])


def test_a_name_of_data_with_a_zero_byte_is_refused(checkpoint, capsys):
    rewritten(checkpoint, lambda header, state: state["options"].update(data="a\0b"))
    refused(capsys, "train", "--resume", "--out", checkpoint, "--steps", 9,
            words=["expected a file name without NUL"])


def test_no_token_from_outside_reads_beyond_the_table(checkpoint):
    c = ne.read_checkpoint(str(checkpoint))
    decoder = ne.Decoder(c.cfg, c.flat)
    for token in (-1, c.cfg.vocab_size, 1 << 40):
        with pytest.raises(ne.UserError, match=f"0 to {c.cfg.vocab_size - 1}, found {token}$"):
            decoder.step(token)
    assert decoder.tokens == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_pipes_and_devices_are_not_read(checkpoint, tmp_path, capsys):
    """They would be waited for, or read until memory is gone."""
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    (folder / "config.json").symlink_to("/dev/zero")
    (tmp_path / "x.jsonl").symlink_to("/dev/zero")
    for args in (("info", pipe), ("train", "--data", pipe), ("plot", pipe),
                 ("sft", checkpoint, "--data", pipe), ("import", folder, tmp_path / "y.bin"),
                 ("train", "--data", "/dev/zero"), ("train", "--out", tmp_path / "x.bin")):
        kind = "not a regular file"
        if args[0] in ("info", "plot"):
            kind = "expected a regular file, found a pipe, socket or device"
        refused(capsys, *args, words=[kind])
