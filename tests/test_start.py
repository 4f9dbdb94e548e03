"""How the programs start: alone in a folder, the first time, on few processors, wrongly called."""
import contextlib
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numba
import pytest
from children import until
from helpers import (ROOT, SMALL, complains, copy_parts, nanoeuler, needs, never, ok, refused,
                     slow, with_kernels)
from numba import complex64, float32
from numba.core import caching

import nanoeuler as ne
from nanoeuler_parts import cli
from nanoeuler_parts.chat.verbs import generate_text
from nanoeuler_parts.kernels import training_kernels
from nanoeuler_parts.machine.cpu import cpu_features, DTYPE
from nanoeuler_parts.machine.kernels import Compiled, in_cache, wait_for
from nanoeuler_parts.machine.threads import cpu_quota, most_memory, most_threads, physical_cores
from nanoeuler_parts.runs.guards import need_memory
from nanoeuler_parts.tuning.examples import prompt_of
from nanoeuler_parts.tuning.lora import SftLora

pytestmark = pytest.mark.cli
PROGRAMS = ("bpe.py", "nanoeuler.py", "nanoeuler_cuda.py")
# Nothing of the repository may be read, but an interpreter that stands in it.
GUARD = f"""
import os, sys
PREFIX, BASE = (os.path.realpath(x) + os.sep for x in (sys.prefix, sys.base_prefix))
def guard(event, args):
    if event == "open" and isinstance(args[0], str):
        path, ours = os.path.realpath(args[0]), {str(ROOT) + os.sep!r}
        if path.startswith(ours) and not path.startswith((PREFIX, BASE)):
            raise RuntimeError(f"{{path}} of the repository is opened")
sys.addaudithook(guard)
"""


@pytest.fixture
def alone(compiled, tmp_path):
    """A folder with the programs, nanoeuler_parts and compiled kernels, and nothing else."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    for name in PROGRAMS:
        shutil.copy2(ROOT / name, folder)
    copy_parts(folder)
    with_kernels(folder, compiled)
    return folder


@pytest.fixture
def env(tmp_path):
    """Of an interpreter that cannot see the repository, and no GPU."""
    (tmp_path / "guard").mkdir()
    (tmp_path / "guard/sitecustomize.py").write_text(GUARD, encoding="utf-8")
    out = dict(os.environ, PYTHONPATH=str(tmp_path / "guard"), CUDA_VISIBLE_DEVICES="")
    out.pop("NUMBA_CACHE_DIR", None)
    return out


def program(folder, *args, cwd=None, name="nanoeuler.py", stdin="", **options):
    return subprocess.run([sys.executable, str(folder / name), *map(str, args)], input=stdin,
                          cwd=cwd or folder.parent, capture_output=True, encoding="utf-8",
                          timeout=300, **options)


# ---- alone in a folder
def examples(folder):
    """A text, instructions and preferences, in files with blanks in their names."""
    answers = [{"instruction": f"Say {i}.", "input": "", "output": f"It is {i}."}
               for i in range(150)]
    pairs = [{"instruction": f"Say {i}.", "chosen": f"It is {i}.", "rejected": f"It is {i + 1}."}
             for i in range(150)]
    texts = [prompt_of(x) + x["output"] for x in answers]
    (folder / "any text.txt").write_text("\n".join(texts), encoding="utf-8")
    (folder / "my answers.json").write_text(json.dumps(answers), encoding="utf-8")
    (folder / "my pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")


LEARN = ("--batch", 256, "--steps", 2, "--warmup", 1)
TINY = (*SMALL[:-4], "--vocab-size", 300, "--seq-len", 128, *LEARN)
VERBS = [
    ("train", "--data", "any text.txt", *TINY, "--out", "a b.bin"),
    ("generate", "Say", "a b.bin", "--tokens", 3),
    ("generate", "Say", "a b.bin", "--tokens", 3, "--weights", "bf16"),
    ("generate", "Say", "a b.bin", "--tokens", 3, "--weights", "int8"),
    ("chat", "a b.bin", "--tokens", 3),
    ("lens", "Say", "a b.bin"),
    ("info", "a b.bin"),
    ("sft", "a b.bin", "--data", "my answers.json", *LEARN, "--out", "c d.bin"),
    ("dpo", "c d.bin", "--data", "my pairs.jsonl", *LEARN, "--out", "e f.bin"),
    ("chat", "e f.bin", "--tokens", 3),
    ("quantize", "e f.bin", "small one.bin", "--n-mtp", 1),
    ("chat", "small one.bin", "--tokens", 3, "--weights", "int8"),
    ("export", "e f.bin", "a model"),
    ("import", "a model", "g h.bin"),
    ("compile",),
]
GGUF = [("export", "e f.bin", "--gguf", "a model.gguf"), ("import", "a model.gguf", "i j.bin")]


def verbs_in_one_process(folder, verbs, module="nanoeuler"):
    """Prints the exit codes as the last line; each verb's input is one question."""
    code = (f"import io, json, sys; sys.path[0] = {str(folder)!r}\n"
            f"import {module} as program\n"
            f"assert program.__file__ == {str(folder / module) + '.py'!r}, program.__file__\n"
            "codes = []\n"
            f"for verb in {[list(map(str, verb)) for verb in verbs]!r}:\n"
            "    sys.stdin = io.StringIO('Say 7.\\n')\n"
            "    codes.append(program.main(verb))\n"
            "print(json.dumps(codes))\n")
    return [sys.executable, "-c", code]


def test_a_program_is_itself_and_no_other_copy(alone, env):
    """Also where Python does not look beside the program, and another one is installed."""
    path = alone / "nanoeuler.py"
    for path in path, alone / "nanoeuler_parts/__init__.py":
        text = path.read_text(encoding="utf-8").replace(f'"{ne.__version__}"', '"0.0.77"')
        path.write_text(text, encoding="utf-8")
    path = alone / "nanoeuler.py"
    said = subprocess.run([sys.executable, "-P", path, "--version"], env=env, capture_output=True,
                          text=True, cwd=alone.parent)
    assert said.stdout == "nanoeuler 0.0.77\n", said.stderr


def test_two_files_and_a_folder_are_a_whole_program(alone, env, tmp_path):
    """Every verb; and `compile` has compiled all that they need."""
    (alone / "nanoeuler_cuda.py").unlink()
    work = tmp_path / "some work"
    work.mkdir()
    examples(work)
    verbs = VERBS + (GGUF if importlib.util.find_spec("gguf") else [])
    files = {path: path.stat().st_mtime_ns for path in alone.rglob("*.nb?")}
    result = subprocess.run(verbs_in_one_process(alone, verbs), cwd=work, env=env, timeout=300,
                            capture_output=True, encoding="utf-8")
    assert json.loads(ok(result).splitlines()[-1]) == [0] * len(verbs), result.stderr
    assert "compil" not in result.stdout + result.stderr
    assert files == {path: path.stat().st_mtime_ns for path in alone.rglob("*.nb?")}
    assert {"a b.bin", "c d.bin", "e f.bin", "g h.bin", "a model"} <= set(os.listdir(work))
    assert sorted(p.name for p in alone.iterdir()) == [
        "__pycache__", "bpe.py", "nanoeuler.py", "nanoeuler_parts"]


def test_a_package_of_another_version_is_rejected(alone, env):
    path = alone / "nanoeuler_parts/__init__.py"
    path.write_text(path.read_text(encoding="utf-8").replace(ne.__version__, "0.0.76"),
                    encoding="utf-8")
    said = complains(program(alone, "--version", env=env), ne.__version__, "0.0.76")
    assert "nanoeuler_parts of this version beside nanoeuler.py" in said


def test_the_first_command_of_a_user(alone, env):
    examples(alone)
    result = program(alone, "train", "--data", "any text.txt", *TINY, cwd=alone, env=env)
    assert "Talk to it with" in ok(result) and result.stderr == ""
    assert (alone / "nanoeuler.bin").exists()
    ok(program(alone, "plot", cwd=alone, env=env))


def test_three_files_are_the_gpu_program(alone, env, tmp_path):
    """Every verb, up to the point where a GPU is missed."""
    needs("numba_cuda")
    verbs = [(), ("test",), ("g",), ("ladder",), ("t",), ("tr",), ("i", "It was"), ("s",), ("d",),
             ("r",), ("c",), ("eval", "--data", "any text.txt"), ("serve",), ("doctor",)]
    names = set(re.findall(r"^    python nanoeuler_cuda\.py (\w+)", (
        alone / "nanoeuler_cuda.py").read_text(encoding="utf-8"), re.M))
    assert {verb[0] for verb in verbs if verb} >= names
    result = subprocess.run(verbs_in_one_process(alone, verbs, "nanoeuler_cuda"), cwd=tmp_path,
                            env=env, timeout=300, capture_output=True, encoding="utf-8")
    assert json.loads(ok(result).splitlines()[-1]) == [2] * len(verbs), result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == len(verbs) - 1, lines           # doctor speaks on stdout
    assert all("GPU" in line and "driver" in line for line in lines)
    assert "\nbroken: " in result.stdout and "Traceback" not in result.stdout


# ---- the first start, and the next
@pytest.mark.parametrize("args", [("chat",), ("generate", "To"), ("lens", "To"),
                                  ("generate", "To", "--weights", "int8"), ("compile",),
                                  ("train", "--resume", "--steps", 99)])
def test_no_verb_compiles_without_a_word(args, copy, monkeypatch, capsys):
    def announce(parts):
        raise ne.UserError("the kernels would be compiled here")

    monkeypatch.chdir(copy)
    monkeypatch.setattr("nanoeuler_parts.machine.kernels.fill_cache", announce)
    refused(capsys, *args, words=["would be compiled here"])


def test_a_gpu_compiles_no_kernel_of_the_cpu(copy, monkeypatch):
    class Engine(ne.Decoder):
        ready = staticmethod(lambda: None)

    monkeypatch.setattr("nanoeuler_parts.machine.kernels.fill_cache", never)
    generate_text("To", str(copy / "nanoeuler.bin"), decoder=Engine, tokens=1)


def test_a_second_start_says_nothing_of_compiling(compiled, tmp_path):
    result = nanoeuler("compile", cwd=tmp_path, cold=True)
    assert ok(result) == "" and result.stderr == ""


def test_it_says_nothing_either_where_numba_was_there_before(compiled, tmp_path):
    """The level of optimization is that of our functions alone."""
    code = (f"import sys; sys.path[0] = {str(ROOT)!r}\nimport numba\nimport nanoeuler as ne\n"
            "print(int(numba.config.OPT), ne.main(['compile']))")
    env = {name: value for name, value in os.environ.items() if name != "NUMBA_OPT"}
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, timeout=200,
                            capture_output=True, text=True)
    assert ok(result) == "3 0\n" and result.stderr == ""


USERS = """
import numba

levels = []

def level(x):
    pass

@numba.extending.overload(level)
def _level(x):
    levels.append(int(numba.config.OPT))     # while a caller is compiled
    return lambda x: None

@numba.njit(cache=True)
def twice(x):
    level(x)
    return 2 * x
"""
HOST = """
import users
from numba.core import caching, codegen

def numbas():
    cache, owners = users.twice._cache, (caching.Cache, caching.IndexDataCacheFile,
                                         codegen.CPUCodeLibrary, codegen.JITCodeLibrary)
    library = users.twice.targetctx.codegen()._library_class
    methods = [library, *(dict(vars(owner)) for owner in owners)]
    return (methods, type(cache), type(cache._cache_file), cache._cache_file._load_index(),
            cache._index_key((), users.twice.targetctx.codegen()), users.numba.config.OPT,
            users.numba.config.THREADING_LAYER)

users.numba.config.THREADING_LAYER = "workqueue"
users.twice(1)
before = numbas()
import nanoeuler as ne
own = ne.bpe.jit()(lambda x: users.level(x))
own(ne.np.zeros(1))
assert numbas() == before
ne.gradient_norm(ne.np.zeros(9, ne.np.float32))
users.twice(2.0)
print(users.levels, users.numba.threading_layer())
"""


def test_functions_of_others_are_compiled_as_without_us(compiled, tmp_path):
    """In a process that imports us: the level of their optimization, their keys and files in the
    cache, and the threading layer that was chosen are Numba's.  Numba alone loads them again."""
    (tmp_path / "users.py").write_text(USERS, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    env.pop("NUMBA_OPT", None)
    for code, said in ((HOST, "[3, 1, 3] workqueue\n"),
                       ("import users; users.twice(1); users.twice(2.0); print(users.levels)",
                        "[]\n")):
        result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, timeout=200,
                                capture_output=True, text=True)
        assert ok(result) == said


def test_a_process_that_imports_us_first_keeps_the_level_of_numba(tmp_path):
    """NUMBA_OPT is not in the environment of its children, either.  A level that is set is ours,
    too."""
    code = ("import nanoeuler as ne, os; config = ne.numba.config\n"
            "print(int(config.OPT), int(ne.bpe.Compiling.level), os.environ.get('NUMBA_OPT'))")
    found = []
    for more in ({}, {"NUMBA_OPT": "2"}):
        env = {name: value for name, value in os.environ.items() if name != "NUMBA_OPT"}
        env |= {"PYTHONPATH": str(ROOT), **more}
        found.append(ok(subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env,
                                       timeout=200, capture_output=True, text=True)))
    assert found == ["3 1 None\n", "2 2 2\n"]


def test_kernels_of_other_types_are_not_taken_for_ours(compiled):
    """check.py may leave those of float64."""
    parts = training_kernels(DTYPE).values()
    assert all(in_cache(*entry) for part in parts for entry in part)
    for kernel, argument in ((ne.run_batch, "w.qkv"), (ne.decode_step, "p.wte")):
        assert not in_cache(kernel, argument, complex64)


def test_a_damaged_kernel_is_not_in_the_cache(compiled, tmp_path, monkeypatch):
    """`fill_cache` then compiles it in another process, and says so."""
    entry = Compiled(ne.decode_step, "p.wte", float32)
    file = entry.kernel._cache._cache_file
    for path in compiled:
        if path.name.startswith("nanoeuler.decode_step-"):
            shutil.copy(path, tmp_path)
    monkeypatch.setattr(file, "_cache_path", str(tmp_path))
    assert in_cache(*entry)
    for path in tmp_path.glob("*.nbc"):
        path.write_bytes(path.read_bytes()[:-1])
    assert not in_cache(*entry)
    for path in tmp_path.glob("*.nbc"):
        path.unlink()
    assert not in_cache(*entry)


def test_a_damaged_index_of_the_cache_ends_no_start(alone, env, copy):
    """Of what chat needs, for which other processes compile it."""
    damaged = sorted((alone / "__pycache__").glob("bpe.encode_range-*.nbi"))
    assert damaged
    for path in damaged:
        path.write_bytes(b"\x80\x04junk")
    args = ("generate", "To", "--tokens", 3)
    result = program(alone, *args, cwd=copy, env=env)
    assert ok(result).startswith("To") and "note: compiled in" in result.stderr
    again = program(alone, *args, cwd=copy, env=env)
    assert again.stdout == result.stdout and "compil" not in again.stderr


def children(pid):
    """Processes whose parent is pid, from /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            if int(path.read_text(encoding="utf-8").rsplit(")", 1)[1].split()[1]) == pid:
                found.append(int(path.parent.name))
    return found


def compiles(pid):
    """Has a child become Python, which imports and compiles?"""
    with contextlib.suppress(OSError):
        return b"; kernels.compile_" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def alive(pid):
    with contextlib.suppress(OSError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        return stat.rsplit(")", 1)[1].split()[0] not in "ZX"
    return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found in /proc")
@pytest.mark.parametrize("terminal", [True, False])
def test_ctrl_c_ends_all_that_compile(terminal, tmp_path):
    """A terminal sends it to the processes of its foreground, `kill -INT` to one."""
    code = ("import signal, sys\n"          # a background job ignores it
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            f"sys.path[0] = {str(ROOT)!r}\n"
            "import nanoeuler\n"
            "sys.exit(nanoeuler.main(['compile']))\n")
    with open(tmp_path / "said", "wb") as said:
        process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=said,
                                   stderr=said, start_new_session=True,
                                   env=dict(os.environ, NUMBA_CACHE_DIR=str(tmp_path / "cache")))
    parts = []

    def two_compile():                       # not while they start
        assert process.poll() is None
        parts[:] = children(process.pid)
        return len([pid for pid in parts if compiles(pid)]) >= 2

    try:
        until(two_compile)
        time.sleep(0.5)                      # nor before `wait_for` waits for the last one
        (os.killpg if terminal else os.kill)(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert not any(map(alive, parts))
        text = (tmp_path / "said").read_text(encoding="utf-8")
        compiling, *_, stopped = text.splitlines()
        assert re.fullmatch(r"note: compiling kernels: 0 of \d+", compiling)
        assert stopped.startswith("note: stopped while compiling the kernels")
    finally:
        for pid in filter(alive, [*parts, process.pid]):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("fault, words", [
    ("raise RuntimeError('no such instruction')", "RuntimeError: no such instruction"),
    ("os.kill(os.getpid(), 9)", "signal 9")])
def test_a_part_that_does_not_compile(fault, words, alone, env):
    path = alone / "nanoeuler_parts/kernels.py"
    source = path.read_text(encoding="utf-8")
    line = 'def compile_gradient(dtype="f32"):\n'
    assert source.count(line) == 1
    path.write_text(source.replace(line, f"{line}    import os\n    {fault}\n"), encoding="utf-8")
    with open(alone / "nanoeuler.py", "a", encoding="utf-8") as f:
        f.write("# edited, so that its kernels are compiled again\n")
    result = program(alone, "compile", env=env)
    said = complains(result, "the kernels failed to compile", words, "compile_gradient(")
    assert "compiled in" not in result.stdout + result.stderr
    again = program(alone, "compile", env=env)           # it was not taken for done
    complains(again, words)
    command = said.split("to see the full error, run: ")[1]
    whole = subprocess.run(command, shell=True, env=env, capture_output=True, text=True)
    assert whole.returncode != 0 and (words in whole.stderr or whole.returncode in (-9, 137))


# ---- where compiled kernels are kept
def test_a_relative_cache_folder_is_one_folder(alone, env, tmp_path):
    """The processes that compile work in another directory."""
    path = alone / "nanoeuler_parts/kernels.py"
    source = path.read_text(encoding="utf-8")
    for line in ('def compile_gradient(dtype="f32"):\n', 'def compile_updates(dtype="f32"):\n'):
        assert source.count(line) == 1
        source = source.replace(line, f"{line}    return\n")
    path.write_text(source, encoding="utf-8")
    (tmp_path / "work").mkdir()
    result = program(alone, "compile", cwd=tmp_path / "work",
                     env=dict(env, NUMBA_CACHE_DIR="kernels"))
    ok(result)
    assert "compiled in" in result.stderr and (tmp_path / "work/kernels").is_dir()
    assert sorted(p.name for p in alone.iterdir()) == sorted(
        (*PROGRAMS, "__pycache__", "nanoeuler_parts"))


@pytest.fixture
def unwritable(alone, env, tmp_path):
    """The environment in which neither the folder nor the user's cache can be written."""
    shutil.rmtree(alone / "__pycache__")
    (alone / "__pycache__").write_text("a file", encoding="utf-8")
    return dict(env, XDG_CACHE_HOME="/proc/nowhere", TMPDIR=str(tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="the user's cache folder is elsewhere")
def test_kernels_go_to_a_private_folder(unwritable, alone, compiled, copy, tmp_path):
    folder = tmp_path / f"nanoeuler-cache-{os.geteuid()}"
    kept = folder / caching._CacheLocator.get_suitable_cache_subpath(str(alone / "bpe.py"))
    kept.mkdir(parents=True)
    folder.chmod(0o700)
    for path in compiled:
        shutil.copy(path, kept)
    result = program(alone, "generate", "To", "nanoeuler.bin", "--tokens", 3, cwd=copy,
                     env=unwritable)
    assert ok(result).startswith("To")
    [note] = result.stderr.splitlines()
    assert note.startswith("note: ") and str(folder) in note


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the user's cache folder is elsewhere")
def test_kernels_that_cannot_be_kept(unwritable, alone, copy, tmp_path):
    """Every start compiles them anew; a note says so, once."""
    with open(tmp_path / "guard/sitecustomize.py", "a", encoding="utf-8") as f:
        f.write("import tempfile\ntempfile.tempdir = '/proc/nowhere'\n")
    result = program(alone, "generate", "To", "nanoeuler.bin", "--tokens", 3, cwd=copy,
                     env=unwritable)
    assert ok(result).startswith("To")
    [note] = result.stderr.splitlines()
    assert note.startswith("note: ") and "NUMBA_CACHE_DIR" in note


# ---- processors
def fake(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return root


@pytest.mark.parametrize("files, quota", [
    ({}, math.inf),
    ({"proc/self/cgroup": "0::/\n"}, math.inf),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, math.inf),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
    ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
      "sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, 1.5),
    ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "50000 100000\n",
      "sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, 0.5),
    ({"proc/self/cgroup": "0::/docker/abc\n", "sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3),
    ({"proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n",
      "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000\n",
      "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 4),
    ({"proc/self/cgroup": "2:cpuset:/\n1:cpu:/a\n0::/\n",
      "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1\n",
      "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n"}, math.inf),
    ({"proc/self/cgroup": "1:cpu:/a\n0::/a\n", "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "70000\n",
      "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "10000\n",
      "sys/fs/cgroup/unified/a/cpu.max": "600000 100000\n"}, 6),
    ({"proc/self/cgroup": "a riddle\n0::/\n", "sys/fs/cgroup/cpu.max": "a riddle\n"}, math.inf),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "0 0\n"}, math.inf)])
def test_quota_of_control_groups(files, quota, tmp_path, monkeypatch):
    """cgroup v1 and v2, parents, containers; as `docker --cpus` and systemd's CPUQuota set it."""
    root = fake(tmp_path, files)
    assert cpu_quota(root) == quota
    monkeypatch.setattr(numba.config, "NUMBA_NUM_THREADS", 8)
    monkeypatch.setattr("nanoeuler_parts.machine.threads.cpus", lambda: list(range(16)))
    assert most_threads(root) == max(1, math.floor(min(8, quota)))
    monkeypatch.setattr("nanoeuler_parts.machine.threads.cpus", lambda: [5])
    assert most_threads(root) == 1


@pytest.mark.parametrize("files, limit", [
    ({}, math.inf), ({"proc/self/cgroup": "0::/\n"}, math.inf),
    ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}, math.inf),
    ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n",
      "sys/fs/cgroup/a/memory.max": "8192\n"}, 8192),
    ({"proc/self/cgroup": "0::/docker/abc\n", "sys/fs/cgroup/memory.max": "4096\n"}, 4096),
    ({"proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/abc\n",
      "sys/fs/cgroup/memory/memory.limit_in_bytes": "1024\n"}, 1024),
    ({"proc/self/cgroup": "4:memory:/a\n",
      "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712\n"},
     9223372036854771712),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "a riddle\n"}, math.inf)])
def test_memory_of_control_groups(files, limit, tmp_path, monkeypatch):
    """As `docker --memory` and systemd's MemoryMax set it, below the memory of the machine"""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert most_memory(fake(tmp_path, files)) == min(pages, limit)


def test_a_small_container_gets_small_batches_and_models(monkeypatch):
    cfg = ne.replace(ne.PRESETS["small"], vocab_size=300)
    model = ne.Model(cfg, ne.init_params(cfg, 0))
    usual = model.micro_batch(16)
    monkeypatch.setattr(ne, "most_memory", lambda: 64e6)
    assert 1 <= model.micro_batch(16) < usual and model.micro_batch(16, asked=9) == 9
    need_memory(cfg)
    SftLora.need_memory(cfg)
    monkeypatch.setattr(ne, "most_memory", lambda: 5e5)
    with pytest.raises(ne.UserError, match="container has 0.0 GiB; choose a smaller --n-layer"):
        need_memory(cfg)
    with pytest.raises(ne.UserError, match="container has 0.0 GiB; use a smaller model"):
        SftLora.need_memory(cfg)


def test_numba_without_its_compiler_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    refused(capsys, "list", words=["NUMBA_DISABLE_JIT is set, but", "compiler; unset it"])


def test_load_uses_no_more_threads_than_it_may(checkpoint, monkeypatch):
    """Also without the command line, whose --threads does it there.  Fewer remain as they are."""
    monkeypatch.setattr("nanoeuler_parts.machine.threads.cpus", lambda: [0])
    most = numba.config.NUMBA_NUM_THREADS
    numba.set_num_threads(most)
    ne.load(str(checkpoint))
    assert numba.get_num_threads() == 1
    monkeypatch.setattr("nanoeuler_parts.machine.threads.cpus", lambda: [*range(most)])
    ne.load(str(checkpoint))
    assert numba.get_num_threads() == 1


def test_hyper_threads_count_once_among_those_allowed(tmp_path, monkeypatch):
    """Four cores of two threads each, as two vendors number them."""
    far, near = (lambda i: f"{i % 4},{i % 4 + 4}\n"), (lambda i: f"{i // 2 * 2}-{i // 2 * 2 + 1}\n")
    for siblings in (far, near):
        root = fake(tmp_path, {f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list":
                               siblings(i) for i in range(8)})
        for allowed in ([*range(8)], [0], [0, 4], [0, 1], [2, 3, 6, 7], [1, 2, 3]):
            monkeypatch.setattr("nanoeuler_parts.machine.threads.cpus", lambda: allowed)
            assert physical_cores(root) == len({siblings(i) for i in allowed})
    monkeypatch.setattr("nanoeuler_parts.machine.threads.cpus", lambda: [0, 1, 2])
    assert physical_cores(tmp_path / "nothing here") == 3


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux")
def test_no_more_threads_than_processors(tmp_path):
    """Also if Numba has started more, before `taskset` left one."""
    code = ("import os, numba, nanoeuler as ne\n"
            "from nanoeuler_parts.machine.threads import physical_cores\n"
            "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
            "print(ne.main(['compile', '--threads', '2']), ne.main(['compile']))\n"
            "print(numba.get_num_threads(), physical_cores())\n")
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                            env=dict(os.environ, NUMBA_NUM_THREADS="2"), timeout=300)
    assert ok(result).split() == ["2", "0", "1", "1"], result.stderr
    assert "--threads: expected 0 to 1, found 2" in result.stderr


# ---- wrongly called
@pytest.mark.parametrize("args, words", [
    (("dance",), "'train'"), (("train", "--speed=9"), "--speed"),
    (("train", "--threads", "99999"), "99999"), (("train", "--threads", "two"), "two"),
    (("generate",), "prompt"), (("info", "a", "b"), "b"), (("info", "no such file.bin"), "no such"),
    (("train", "huge"), "'small'"), (("--threads", "1"), "VERB")])
def test_what_cannot_be_understood_is_one_line(args, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert ne.main(list(args)) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1 and words in said.err, said.err
    assert said.err.startswith("nanoeuler: ") and os.listdir() == []


def test_one_thread_by_the_environment(tmp_path):
    one = dict(os.environ, NUMBA_NUM_THREADS="1")
    complains(nanoeuler("info", "--threads", 2, cwd=tmp_path, env=one),
              "--threads: expected 0 to 1, found 2")
    complains(nanoeuler("info", "no.bin", cwd=tmp_path, env=one), "no.bin", "No such file")


def test_verbs_are_those_of_the_docstring_and_have_help(capsys):
    listed = re.findall(r"^    python nanoeuler\.py (\w+) ", ne.__doc__, re.M)
    assert listed == [name for name, *_ in cli.VERBS]
    for verb in listed:
        with pytest.raises(SystemExit) as e:
            ne.main([verb, "--help"])
        said = capsys.readouterr()
        assert e.value.code == 0 and "--threads" in said.out and said.err == ""


@pytest.mark.parametrize("verb", ["compile", slow("--help")])
@pytest.mark.parametrize("lacks", ["caching.IndexDataCacheFile", "caching.Cache", "cgutils"])
def test_another_numba_is_refused(verb, lacks, tmp_path):
    """Its cache may work otherwise, and its private parts be others: one line at the start."""
    code = (f"import numba.core, numba.core.caching, numba.core.cgutils, runpy, sys\n"
            f"sys.path[0] = {str(ROOT)!r}\ndel numba.core.{lacks}\n"
            f"numba.__version__, sys.argv[1:] = '0.69.1', [{verb!r}]\n"
            f"runpy.run_path({str(ROOT / 'nanoeuler.py')!r}, run_name='__main__')\n")
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True,
                            text=True, timeout=100)
    complains(result, "0.69.1", "0.68", "pip install")


@pytest.mark.parametrize("verb", ["compile", slow("--help")])
@pytest.mark.parametrize("missing", ["bpe", "numba", "numpy"])
def test_what_is_not_installed_is_named(missing, verb, alone, env, tmp_path):
    if missing == "bpe":
        (alone / "bpe.py").unlink()
    with open(tmp_path / "guard/sitecustomize.py", "a", encoding="utf-8") as f:
        f.write(f"sys.modules[{missing!r}] = None\n")   # bpe may be installed with the repository
    said = complains(program(alone, verb, env=env), missing)
    assert ("put bpe.py into the folder of nanoeuler.py" in said) == (missing == "bpe")
    assert (f"pip install 'numba=={ne.NUMBA}.*'" in said) == (missing != "bpe")
    (alone / ".venv" / "bin").mkdir(parents=True)
    (alone / ".venv" / "bin" / "python").touch()
    said = complains(program(alone, verb, env=env), missing)
    advice = f"run nanoeuler.py with {alone / '.venv' / 'bin' / 'python'}"
    assert (advice in said) == (missing != "bpe")


@pytest.mark.parametrize("name, value, words", [
    ("NUMBA_DISABLE_JIT", "1", ["NUMBA_DISABLE_JIT", "unset it"]),
    ("NUMBA_THREADING_LAYER", "tbb", ["NUMBA_THREADING_LAYER is tbb", "TBB", "unset it"]),
    ("NUMBA_THREADING_LAYER", "none", ["NUMBA_THREADING_LAYER is none", "unset it"])])
def test_an_environment_in_which_nothing_can_run(name, value, words, trained):
    if value == "tbb" and importlib.util.find_spec("tbb"):
        pytest.skip("TBB is installed here")
    for args in (("compile",), ("generate", "To", "--tokens", 1)):
        complains(nanoeuler(*args, cwd=trained, env=dict(os.environ, **{name: value})), *words)


GENERIC = """
import sys
sys.path[:0] = [{root!r}]
import numpy as np, nanoeuler as ne
from nanoeuler_parts.machine.cpu import BITS, vector_widths
assert not ne.HAS_BF16 and BITS == vector_widths(dict())[-1], BITS
x, w = np.ones((2, 6), np.float32), np.ones((6, 8), np.float32)
out = np.zeros((2, 8), np.float32)
ne.tiled_matmul(out, ne.to_bf16(x), ne.to_bf16(w))
assert (out == 6).all(), out
"""


def test_vectors_are_those_of_the_cpu_that_numba_compiles_for(tmp_path):
    """LLVM ends the process where an instruction is asked for which that CPU does not have."""
    env = dict(os.environ, NUMBA_CPU_NAME="generic", NUMBA_CACHE_DIR=str(tmp_path))
    ok(subprocess.run([sys.executable, "-c", GENERIC.format(root=str(ROOT))], cwd=tmp_path, env=env,
                      capture_output=True, text=True, timeout=200))
    assert cpu_features("+avx2,-fma") == {"avx2": True, "fma": False}


def test_a_process_that_dies_without_a_word():
    process = subprocess.Popen([sys.executable, "-c", "import os, sys; print(file=sys.stderr, "
                                "flush=True); os.abort()"], stderr=subprocess.PIPE, text=True)
    with pytest.raises(ne.UserError, match="failed to compile: signal 6 ended the process"):
        wait_for(process)


def test_a_setting_that_numba_refuses(tmp_path):
    result = nanoeuler("compile", cwd=tmp_path, env=dict(os.environ, NUMBA_NUM_THREADS="-1"))
    complains(result, "Number of threads")
