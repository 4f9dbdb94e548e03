"""Joins corpora into data/pretrain.txt, validation documents last, and tokenizes it.

    python data/prepare.py                     # gutenberg.txt and web.txt
    python data/prepare.py FILE... --out NAME --holdout 0.02 --vocab-size 4096

A document ends with two blank lines. Duplicates (but for case and blanks) and what is no prose are
dropped. The rest is ordered by sha256: a shuffle that needs no seed, and a document stays on its
side of the split when others come or go. Token file and tokenizer are those of nanoeuler.py.
"""
import hashlib, mmap, re, shlex, sys
from pathlib import Path
import download as dl

sys.path.insert(0, str(dl.HERE.parent))
import bpe
from data import texts

CORPORA = "gutenberg.txt", "web.txt"
GAP = re.compile(rb"\n[ \t\r]*\n[ \t\r]*\n\s*")         # what separates documents in other texts
CONTROL = re.compile("[\0-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ufffd]")

def is_text(text):
    """Prose: no zero, hardly a control character, half letters, one in 20 characters a blank."""
    if "\0" in text or len(CONTROL.findall(text)) * 1000 > len(text):      # a run refuses a zero
        return False
    sample = text[::len(text) // 5000 + 1]              # enough to count characters
    letters, blanks = sum(map(str.isalpha, sample)), sum(map(str.isspace, sample))
    return 2 * letters >= len(sample) - blanks and 20 * blanks >= len(sample) > 0

def spans(text):
    """(start, end) of the documents of a text, as bytes."""
    start = 0
    for gap in GAP.finditer(text):
        yield start, gap.start()
        start = gap.end()
    yield start, len(text)

def read(text, start, end):
    return dl.clean(dl.decode(text[start:end]))

class Corpus:
    """Which documents of some files are kept, in their order, without their text."""

    def __init__(self, paths):
        self.texts, self.kept, seen = [], [], set()     # kept: (digest, file, start, end)
        self.duplicates = self.junk = 0
        for k, path in enumerate(paths):
            with open(path, "rb") as f:
                if not path.stat().st_size:
                    raise dl.DataError(f"{path} is empty; fetch it again")
                self.texts.append(text := mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
            bar = dl.tqdm(total=len(text), unit="B", unit_scale=True, disable=None, desc=path.name)
            for start, end in spans(text):
                bar.update(end - start)
                if not (document := read(text, start, end)):
                    continue
                same = hashlib.sha256(" ".join(document.casefold().split()).encode()).digest()
                if same in seen:
                    self.duplicates += 1
                elif not is_text(document):
                    self.junk += 1
                else:
                    seen.add(same)
                    self.kept.append((same, k, start, end))
            bar.close()
        self.kept.sort()

    def split(self, holdout):
        """Number of training documents: the digests of the others are in the last share."""
        first = int((1 - holdout) * (1 << 32)).to_bytes(4, "big")
        n = sum(same[:4] < first for same, *_ in self.kept)
        n = min(n, len(self.kept) - 1)                  # one to validate on, at least
        if n < 1:
            raise dl.DataError(f"{len(self.kept)} documents are too few to split; two blank lines "
                               f"end a document: add some, or use a smaller --holdout")
        return n

    def write(self, path, n):
        """All documents, cleaned; n is the first of validation.  Its gap: (start, end), bytes."""
        place, gap = 0, None
        with dl.replacing(path) as f:
            for i, (_, k, start, end) in enumerate(dl.tqdm(self.kept, disable=None, unit="doc",
                                                           desc=path.name)):
                between = dl.BETWEEN if i else b""
                gap = (place, place + len(between)) if i == n else gap
                place += f.write(between + read(self.texts[k], start, end).encode())
            f.write(b"\n")
        return gap

def share(size, gap):
    """The shortest decimal --holdout at which nanoeuler cuts `size` bytes in that gap."""
    if not 0.0001 <= 1 - gap[1] / size <= 0.9:           # what nanoeuler takes
        raise dl.DataError(f"{1 - gap[1] / size:.2%} of the text would be validation, expected "
                           f"0.01% to 90%; add documents")
    for digits in range(2, 18):
        text = f"{1 - (sum(gap) / 2 + 0.5) / size:.{digits}f}"
        if gap[0] <= int(size * (1 - float(text))) <= gap[1]:
            return text
    raise dl.DataError(f"no --holdout cuts {size} bytes at {gap[1]}; add a document")

def main(argv=None):
    p = dl.parser(__doc__)
    p.add_argument("files", nargs="*", type=Path, help="texts; none: " + " and ".join(CORPORA))
    p.add_argument("--out", default="pretrain.txt", help="file to write, in --to")
    p.add_argument("--holdout", type=dl.number(0.0002, 0.5), default=0.02,
                   help="share of the documents to validate on")
    p.add_argument("--vocab-size", type=int, default=4096, help="of the tokenizer; 0: no tokens")
    o = p.parse_args(argv)
    if o.vocab_size and not 257 <= o.vocab_size <= bpe.MAX_VOCAB:
        p.error(f"--vocab-size is {o.vocab_size}, expected 257 to {bpe.MAX_VOCAB}, or 0")
    files = o.files or [f for f in (o.to / name for name in CORPORA) if f.is_file()]
    if not files:
        raise dl.DataError(f"there is no {' and no '.join(CORPORA)} in {o.to}; run "
                           f"get_gutenberg.py and get_web.py first, or name texts")
    if (o.to / o.out).resolve() in [f.resolve() for f in files]:
        raise dl.DataError(f"{o.to / o.out} would replace what it is made of; choose another --out")
    corpus = Corpus(files)
    n, path = corpus.split(o.holdout), o.to / o.out
    gap = corpus.write(path, n)
    size = path.stat().st_size
    holdout = share(size, gap)
    print(f"{path}: {size:,} bytes, {n:,} documents to learn and {len(corpus.kept) - n:,} to "
          f"validate, from {', '.join(f.name for f in files)}; dropped {corpus.duplicates:,} "
          f"duplicates, {corpus.junk:,} that are not text")
    if o.vocab_size:
        text = texts.read_text(str(path))
        parts = texts.split_text(memoryview(text), float(holdout))
        if len(text) > texts.LARGE:             # as a run does it, which then finds the tokens
            tokenizer = bpe.train(texts.excerpt(parts[0]), o.vocab_size)
            digest = hashlib.sha256(text).hexdigest()
            n = sum(map(len, texts.tokenize(str(path), parts, tokenizer, digest)))
            print(f"{n:,} tokens of {len(text) / n:.2f} bytes; tokenizer {tokenizer.hash()[:12]}")
        else:
            print("short enough to be tokenized whenever a run starts")
    size = f" --vocab-size {o.vocab_size}" if o.vocab_size not in (0, 4096) else ""
    print(f"Learn it with:\n    python nanoeuler.py train base --data {shlex.quote(str(path))} "
          f"--holdout {holdout}{size}")

if __name__ == "__main__":
    sys.exit(dl.run(main))
