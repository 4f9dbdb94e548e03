"""One hash for each computation, to compare two versions bit by bit.

    python bench/bits.py [--only NAME ...] [--out FILE]      the CPU program
    python bench/bits.py --gpus 2 [--root FOLDER]            the GPU program, on two GPUs

--root names the checkout of another version: the same script then prints the hashes of both.

Every case runs the command line in a process of its own, so the script does not depend on the
names or files of the code.  A hash covers the tensors of the checkpoint that a run wrote, or the
text that a verb printed.  Times, paths and versions do not enter it.  The hashes depend on the CPU
type and on the versions of Numba and NumPy, which the first lines of the output name.

train     300 steps: float32 and bfloat16, AdamW and Muon, one and two threads; all defaults
resume    150 steps, then 150 more in a second process
sft, dpo  fine-tuning of that model, and of the bundled one
generate  float32, bfloat16 and int8 weights; with and without draft tokens; top-k, top-p, penalties
batch     the prompts of a file, three at a time; a chat
files     quantize, export, import, GGUF, lens, and the gradient check

With --gpus, the cases are others:

train     8 steps of base on N GPUs, AdamW and Muon, each twice; 8 steps of small in float32
resume    4 steps, then 4 more in a second process
sft, i    fine-tuning and generation, on one GPU

Without --out the lines are only printed.
"""
import argparse
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
from common import cpu_model, versions

SHAPE = ["--n-embd", "64", "--n-head", "4", "--n-kv-head", "2", "--head-dim", "16", "--n-layer",
         "2", "--n-hidden", "172", "--seq-len", "64"]
BUNDLED = str(ROOT / "data" / "model.bin")
PLACE = SimpleNamespace(root=ROOT)           # the checkout whose programs run
CHAT = [*(f"--{x}" for x in ("steps=8", "batch=512", "seed=3"))]


def run(folder, program, *args, stdin=None):
    """The standard output of `python program args`, which must succeed."""
    done = subprocess.run([sys.executable, str(PLACE.root / program), *map(str, args)], cwd=folder,
                          capture_output=True, input=stdin)
    if done.returncode:
        raise SystemExit(f"{program} {' '.join(map(str, args))}: exit code {done.returncode}\n"
                         f"{done.stderr.decode(errors='replace')[-2000:]}")
    return done.stdout


def tensors(path):
    """What a safetensors file holds besides its metadata: the table of tensors and their bytes."""
    data = pathlib.Path(path).read_bytes()
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8:8 + length])
    table.pop("__metadata__")
    return json.dumps(table, sort_keys=True).encode() + data[8 + length:]


def train(folder, out, *args):
    run(folder, "nanoeuler.py", "train", "--steps", 300, "--batch", 512, *SHAPE, "--out", out,
        "--force", "--eval-every", 100, "--seed", 1, *args)
    return tensors(folder / out)


def defaults(folder):
    """`train` as a newcomer runs it: the small preset, bfloat16 where the CPU has it, Muon"""
    run(folder, "nanoeuler.py", "train", "--steps", 300, "--out", "defaults.bin", "--force")
    return tensors(folder / "defaults.bin")


def resume(folder):
    run(folder, "nanoeuler.py", "train", "--steps", 150, "--batch", 512, *SHAPE, "--out", "r.bin",
        "--force", "--dtype", "f32", "--threads", 2)
    run(folder, "nanoeuler.py", "train", "--resume", "--steps", 300, "--out", "r.bin",
        "--threads", 1)
    return tensors(folder / "r.bin")


def tune(folder, verb, begin, data, dtype):
    """On the first 40 examples of a file, JSON or JSON lines"""
    out, text = f"{verb}_{dtype}.bin", (ROOT / data).read_text(encoding="utf-8")
    examples = json.loads(text) if text[0] == "[" else map(json.loads, text.splitlines())
    (folder / "examples.json").write_text(json.dumps([*examples][:40]), encoding="utf-8")
    run(folder, "nanoeuler.py", verb, begin, "--out", out, "--force", "--data", "examples.json",
        "--dtype", dtype, *CHAT)
    return tensors(folder / out)


def generate(folder, file, *args, prompt="ROMEO:"):
    return run(folder, "nanoeuler.py", "generate", prompt, file, "--tokens", 60, "--logprobs", 2,
               *args)


def batch(folder, file, *args):
    prompts = [{"prompt": text} for text in ("ROMEO:", "To be", "The king", "My lord, I", "O")]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)) + "\n",
                                          encoding="utf-8")
    run(folder, "nanoeuler.py", "generate", file, "--file", "prompts.jsonl", "--out",
        "answers.jsonl", "--force", "--batch", 3, "--tokens", 40, "--n", 2, *args)
    answers = map(json.loads, (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines())
    # without the keys, in which the time that training took enters through the checkpoint's hash
    return json.dumps([{**answer, "key": ""} for answer in answers]).encode()


def chat(folder):
    said = run(folder, "nanoeuler.py", "chat", BUNDLED, "--tokens", 40, "--seed", 5,
               stdin=b"What is a residual connection?\nAnd why?\n")
    return said.partition(b"\n")[2]          # the first line names the file in the words of --root


def quantize(folder):
    run(folder, "nanoeuler.py", "quantize", "f32 adamw.bin", "q.bin", "--force")
    return tensors(folder / "q.bin")


def export(folder):
    run(folder, "nanoeuler.py", "export", "f32 adamw.bin", "hf", "--force")
    found = b"".join(x.read_bytes() for x in sorted((folder / "hf").iterdir())
                     if x.suffix != ".safetensors")
    return found + tensors(folder / "hf" / "model.safetensors")


def import_again(folder):
    run(folder, "nanoeuler.py", "import", "hf", "i.bin", "--force")
    return tensors(folder / "i.bin")


def gguf(folder):
    run(folder, "nanoeuler.py", "export", BUNDLED, "--gguf", "m.gguf", "--matrices", "q8_0",
        "--force")
    run(folder, "nanoeuler.py", "import", "m.gguf", "g.bin", "--force")
    return (folder / "m.gguf").read_bytes() + tensors(folder / "g.bin")


def cases(folder):
    """{name: function that returns bytes}, in an order in which each finds the files it needs"""
    found = {}
    for dtype in ("f32", "bf16"):
        for optimizer in ("adamw", "muon"):
            for threads in (1, 2):
                def work(dtype=dtype, optimizer=optimizer, threads=threads):
                    return train(folder, f"{dtype} {optimizer}.bin", "--dtype", dtype,
                                 "--optimizer", optimizer, "--threads", threads)
                found[f"train {dtype} {optimizer} {threads}"] = work
    found["train defaults"] = lambda: defaults(folder)
    found["resume"] = lambda: resume(folder)
    base, talking = "f32 adamw.bin", BUNDLED
    for dtype in ("f32", "bf16"):
        found[f"sft {dtype}"] = lambda dtype=dtype: tune(
            folder, "sft", base, "data/instructions.json", dtype)
        found[f"dpo {dtype}"] = lambda dtype=dtype: tune(
            folder, "dpo", talking, "data/preferences_sample.jsonl", dtype)
    for weights in ("f32", "bf16", "int8"):
        for drafts in (0, 3, -1):
            found[f"generate {weights} {drafts}"] = lambda weights=weights, drafts=drafts: generate(
                folder, base, "--weights", weights, "--speculate", drafts)
    found["generate top-k"] = lambda: generate(folder, base, "--top-k", 20, "--seed", 2)
    found["generate top-p"] = lambda: generate(folder, base, "--top-p", 0.9, "--min-p", 0.02)
    found["generate penalties"] = lambda: generate(
        folder, base, "--presence-penalty", 0.5, "--frequency-penalty", 0.2)
    found["generate bundled"] = lambda: generate(folder, talking, prompt="Who wrote Hamlet?")
    found["batch"] = lambda: batch(folder, base)
    found["batch bundled"] = lambda: batch(folder, talking, "--weights", "int8")
    found["chat"] = lambda: chat(folder)
    found["quantize"] = lambda: quantize(folder)
    found["export"] = lambda: export(folder)
    found["import"] = lambda: import_again(folder)
    found["gguf"] = lambda: gguf(folder)
    found["lens"] = lambda: run(folder, "nanoeuler.py", "lens", "To be or not to be", base)
    found["check"] = lambda: re.sub(rb"\d+ s\)", b"", run(folder, "check.py"))
    return found


def on_gpu(folder, out, *args):
    """The tensors of a pretraining run, which is new unless args has --resume"""
    new = [] if "--resume" in args else ["--force", "--data", ROOT / "data" / "shakespeare.txt"]
    run(folder, "nanoeuler_cuda.py", "t", *new, "--seed", 1, "--out", out, *args)
    return tensors(folder / out)


def gpu_cases(folder, gpus):
    """The cases of the GPU program, as `cases`"""
    n, steps = ["--gpus", gpus], ["--steps", 8, "--warmup", 2]
    base = ["--preset", "base", "--batch", 64 * 512, *steps, *n]
    adamw, muon = ["--optimizer", "adamw"], ["--optimizer", "muon"]
    found = {f"train {name}{again}": lambda out=f"{name}.bin", more=more: on_gpu(
                 folder, out, *base, *more)
             for name, more in (("adamw", adamw), ("muon", muon))
             for again in ("", ", again")}
    found["train f32"] = lambda: on_gpu(
        folder, "f32.bin", "--preset", "small", "--dtype", "f32", *adamw, *steps, *n)

    def halves(optimizer):
        on_gpu(folder, "half.bin", *base, *optimizer, "--steps", 4)
        return on_gpu(folder, "half.bin", "--resume", "--steps", 8, *n)

    def sft():
        run(folder, "nanoeuler_cuda.py", "s", "adamw.bin", "--out", "s.bin", "--force", "--data",
            ROOT / "data" / "instructions.json", *CHAT)
        return tensors(folder / "s.bin")

    found["resume adamw"], found["resume muon"] = lambda: halves(adamw), lambda: halves(muon)
    found["sft"] = sft
    found["i"] = lambda: run(folder, "nanoeuler_cuda.py", "i", "ROMEO:", "adamw.bin", "--tokens",
                             60, "--seed", 2)
    return found


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--gpus", type=int, metavar="N", help="cases of the GPU program, on N GPUs")
    p.add_argument("--root", type=pathlib.Path, default=ROOT, help="the checkout whose programs "
                   "run (default: this one)")
    p.add_argument("--only", nargs="+", metavar="NAME", help="run only cases whose names begin so; "
                   "they may need files of earlier cases")
    p.add_argument("--out", help="file to write, such as bench/results/bits_znver4.txt")
    a = p.parse_args()
    os.environ["PYTHONPATH"], PLACE.root = "", a.root.resolve()
    installed = ", ".join(f"{name} {x}" for name, x in versions("numba", "numpy").items())
    lines = [f"{cpu_model().name}, {cpu_model().detail}", installed]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for name, work in (gpu_cases(folder, a.gpus) if a.gpus else cases(folder)).items():
            if a.only and not name.startswith(tuple(a.only)):
                continue
            began = time.perf_counter()
            lines.append(f"{name:<22} {hashlib.sha256(work()).hexdigest()[:32]}")
            print(f"{lines[-1]}  {time.perf_counter() - began:5.1f} s", flush=True)
    if a.out:
        pathlib.Path(a.out).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
