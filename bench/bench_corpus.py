"""Memory and resumption of a large corpus: a generated folder of several GB, tokenized twice.

    python bench/bench_corpus.py FOLDER [--gb 5]

Writes files of text, .gz, .xz, .zst, .jsonl, .jsonl.gz and .parquet to FOLDER/corpus, then trains
one step on them in two processes of their own, which write to FOLDER/a and FOLDER/b.  The second
one is killed (SIGKILL) in the middle of tokenizing and started again.  Prints the largest
memory of each process (VmHWM and, without pages of files, the largest RssAnon), the time, and
whether the two token files are equal.  It needs about 3 times the size of the corpus on disk.
"""
import argparse
import gzip
import hashlib
import json
import lzma
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
FORMATS = ".txt", ".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".txt.xz", ".txt.zst", ".parquet"
FILE = 64_000_000            # bytes of text in a file


def documents(words, seed, size):
    """Random texts of 200 to 20,000 bytes, together about `size` bytes"""
    rng, n = random.Random(seed), 0
    while n < size:
        text = " ".join(rng.choices(words, k=rng.randrange(40, 4000))) + ".\n"
        n += len(text)
        yield text


def write(path, texts):
    import pyarrow
    import pyarrow.parquet
    name = str(path)
    if name.endswith(".parquet"):
        with pyarrow.parquet.ParquetWriter(path, pyarrow.schema([("text", pyarrow.string())])) as f:
            texts = list(texts)
            for i in range(0, len(texts), 5000):
                f.write_table(pyarrow.table({"text": texts[i:i + 5000]}))
        return
    lines = (json.dumps({"text": text}) + "\n" if ".jsonl" in name else text for text in texts)
    open_file = {".gz": lambda: gzip.open(path, "wb", 1),
                 ".xz": lambda: lzma.open(path, "wb", preset=0),
                 ".zst": lambda: pyarrow.output_stream(name, compression="zstd")}
    with open_file.get(path.suffix, lambda: open(path, "wb"))() as f:
        for line in lines:
            f.write(line.encode())


def make(folder, gb):
    words = (ROOT / "data" / "shakespeare.txt").read_text("utf-8").split()
    for i in range(round(gb * 1e9 / FILE)):
        path = folder / f"part{i % 7}" / f"{i:04d}{FORMATS[i % len(FORMATS)]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write(path, documents(words, i, FILE))


def memory(pid):
    """(VmHWM, RssAnon) of a process, in bytes"""
    found = {}
    for line in pathlib.Path(f"/proc/{pid}/status").read_text("utf-8").splitlines():
        key, _, value = line.partition(":")
        if key in ("VmHWM", "RssAnon"):
            found[key] = int(value.split()[0]) * 1024
    return found.get("VmHWM", 0), found.get("RssAnon", 0)


def train(folder, corpus, kill_at=None):
    """(seconds, memory) of a run of one step in `folder`.  Kills it when the file of its tokens has
    more than kill_at bytes."""
    command = [sys.executable, str(ROOT / "nanoeuler.py"), "train", "--data", str(corpus),
               "--steps", "1", "--out", str(folder / "model.bin"), "--vocab-size", "4096",
               "--holdout", "0.0001"]
    began, most = time.perf_counter(), (0, 0)
    with open(folder / "said.txt", "ab") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
        while process.poll() is None:
            with_parts = [*corpus.parent.glob("*.tokens.part")]
            most = tuple(map(max, most, memory(process.pid)))
            if kill_at and with_parts and with_parts[0].stat().st_size > kill_at:
                process.send_signal(signal.SIGKILL)
                process.wait()
                return time.perf_counter() - began, most
            time.sleep(0.05)
    assert process.returncode == 0, (folder / "said.txt").read_text("utf-8")[-2000:]
    return time.perf_counter() - began, most


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--gb", type=float, default=5)
    args = parser.parse_args()
    corpus = args.folder / "corpus"
    make(corpus, args.gb)
    files = [path for path in corpus.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    print(f"{len(files)} files, {size / 1e9:.2f} GB on disk", flush=True)
    digests = []
    for name, kill_at in (("a", None), ("b", args.gb * 1e9 / 8)):
        folder = args.folder / name
        folder.mkdir(exist_ok=True)
        for old in args.folder.glob("*.tokens*"):
            os.remove(old)
        (folder / "model.bin").unlink(missing_ok=True)
        if kill_at:
            seconds, (peak, anonymous) = train(folder, corpus, kill_at)
            print(f"{name}: killed after {seconds:.0f} s, memory {peak / 1e9:.3f} GB, without "
                  f"files {anonymous / 1e9:.3f} GB", flush=True)
        seconds, (peak, anonymous) = train(folder, corpus)
        [tokens] = args.folder.glob("*.tokens")
        with open(tokens, "rb") as f:
            digests.append(hashlib.file_digest(f, "sha256").hexdigest())
        print(f"{name}: {seconds:.0f} s, memory {peak / 1e9:.3f} GB, without files "
              f"{anonymous / 1e9:.3f} GB; {tokens.stat().st_size / 1e9:.2f} GB of tokens, sha256 "
              f"{digests[-1][:12]}", flush=True)
    print("equal tokens" if digests[0] == digests[1] else "DIFFERENT TOKENS")
    return digests[0] != digests[1]


if __name__ == "__main__":
    sys.exit(main())
