"""Joins corpora into data/pretrain.txt, validation documents last.

    python data/prepare.py                     # gutenberg.txt and web.txt
    python data/prepare.py FILE... --out NAME --holdout 0.02

A document ends with two blank lines. Duplicates (but for case and blanks) and what is no prose are
dropped. The rest is ordered by sha256: a shuffle that needs no seed, and a document stays on its
side of the split when others come or go. The run that learns the text trains the tokenizer, and
keeps the tokens of a long one beside it: a second run has them at once.
"""
import hashlib
import mmap
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import download as dl

CORPORA = "gutenberg.txt", "web.txt"
PREPARED = "pretrain.txt"                    # what is made of them, anew at each start
GAP = re.compile(rb"\n[ \t\r]*\n[ \t\r]*\n\s*")         # what separates documents in other texts
CONTROL = re.compile("[\0-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ufffd]")

def is_text(text):
    """Prose: no zero, at most one control character in 1,000, at least half letters but for blanks,
    and a blank in 20 characters. Letters and blanks are counted in some 5,000 of them."""
    if "\0" in text:                         # a run refuses a text with one
        return False
    if len(CONTROL.findall(text)) * 1000 > len(text):
        return False
    sample = text[::len(text) // 5000 + 1]
    letters = sum(map(str.isalpha, sample))
    blanks = sum(map(str.isspace, sample))
    return 2 * letters >= len(sample) - blanks and 20 * blanks >= len(sample) > 0

def spans(text):
    """(start, end) of the documents of a text, as bytes."""
    start = 0
    for gap in GAP.finditer(text):
        yield start, gap.start()
        start = gap.end()
    yield start, len(text)

def read(text, start, end):
    """A document of a text in bytes, as clean str; empty if there is nothing but blanks."""
    return dl.clean(dl.decode(text[start:end]))

class Document(NamedTuple):
    """Where a document is, and what tells it from others. In the order of keys: a shuffle."""
    key: bytes                               # sha256 of its words in lower case
    file: int                                # in Corpus.texts
    start: int                               # bytes
    end: int

class Corpus:
    """Which documents of some files are kept, without their text."""

    def __init__(self, paths):
        self.texts = []                      # the files, mapped into memory
        self.kept = []
        self.seen = set()                    # keys
        self.duplicates = 0
        self.junk = 0
        for path in paths:
            self.add(path)
        self.kept.sort()

    def add(self, path):
        try:
            with open(path, "rb") as f:
                if not path.stat().st_size:
                    raise dl.DataError(f"{path} is empty; fetch it again")
                text = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as e:
            raise dl.DataError(f"{path}: {e.strerror or e}; name texts that can be read") from None
        self.texts.append(text)
        bar = dl.tqdm(total=len(text), unit="B", unit_scale=True, disable=None, desc=path.name)
        for start, end in spans(text):
            bar.update(end - start)
            document = read(text, start, end)
            if not document:
                continue
            key = hashlib.sha256(" ".join(document.casefold().split()).encode()).digest()
            if key in self.seen:
                self.duplicates += 1
            elif not is_text(document):
                self.junk += 1
            else:
                self.seen.add(key)
                self.kept.append(Document(key, len(self.texts) - 1, start, end))
        bar.close()

    def split(self, holdout):
        """Number of training documents. Keys are as good as random numbers: those in the last
        share of all keys, as their first 4 bytes say, are to validate on."""
        first = int((1 - holdout) * (1 << 32)).to_bytes(4, "big")
        n = sum(document.key[:4] < first for document in self.kept)
        n = min(n, len(self.kept) - 1)                  # one to validate on, at least
        if n < 1:
            raise dl.DataError(f"{len(self.kept)} documents are too few to split; two blank lines "
                               f"end a document: add some, or use a smaller --holdout")
        return n

    def write(self, path, n):
        """Writes all documents, cleaned. Returns the gap before document n, the first to validate
        on: (start, end), bytes."""
        place = 0
        with dl.replacing(path) as f:
            bar = dl.tqdm(self.kept, disable=None, unit="doc", desc=path.name)
            for i, document in enumerate(bar):
                between = dl.BETWEEN if i else b""
                if i == n:
                    gap = place, place + len(between)
                text = read(self.texts[document.file], document.start, document.end)
                place += f.write(between + text.encode())
            f.write(b"\n")
        return gap

def share(size, gap):
    """The shortest decimal --holdout at which nanoeuler cuts `size` bytes in that gap: at byte
    int(size * (1 - holdout)), see split_text there."""
    start, end = gap
    if not 0.0001 <= 1 - end / size <= 0.9:             # what nanoeuler takes
        raise dl.DataError(f"{1 - end / size:.2%} of the text would be validation, expected "
                           f"0.01% to 90%; add documents")
    middle = (start + end) / 2 + 0.5                    # of a byte, as int() rounds down
    for digits in range(2, 18):
        text = f"{1 - middle / size:.{digits}f}"
        if start <= int(size * (1 - float(text))) <= end:
            return text
    raise dl.DataError(f"no --holdout cuts {size} bytes at {end}; add a document")

def main(argv=None):
    parser = dl.parser(__doc__)
    parser.add_argument("files", nargs="*", type=Path,
                        help="texts; none: " + " and ".join(CORPORA))
    parser.add_argument("--out", default=PREPARED, help="file to write, in --to")
    parser.add_argument("--force", action="store_true", help=f"replace a file that is there; "
                        f"{PREPARED} is replaced without it")
    parser.add_argument("--holdout", type=dl.number(0.0002, 0.5), default=0.02,
                        help="share of the documents to validate on")
    o = parser.parse_args(argv)
    files = o.files
    if not files:
        usual = [o.to / name for name in CORPORA]
        files = [f for f in usual if f.is_file()]
    if not files:
        raise dl.DataError(f"there is no {' and no '.join(CORPORA)} in {o.to}; run "
                           f"get_gutenberg.py and get_web.py first, or name texts")
    path = o.to / o.out
    if path.resolve() in [f.resolve() for f in files]:
        raise dl.DataError(f"{path} would replace what it is made of; choose another --out")
    if path.exists() and path.resolve() != (o.to / PREPARED).resolve() and not o.force:
        raise dl.DataError(f"{path} exists; another --out keeps it, --force replaces it")
    corpus = Corpus(files)
    n = corpus.split(o.holdout)
    gap = corpus.write(path, n)
    size = path.stat().st_size
    holdout = share(size, gap)
    print(f"{path}: {size:,} bytes, {n:,} documents to learn and {len(corpus.kept) - n:,} to "
          f"validate, from {', '.join(f.name for f in files)}; dropped {corpus.duplicates:,} "
          f"duplicates, {corpus.junk:,} that are not text")
    print(f"Learn it with the next line, which tokenizes it; of a long text it keeps the tokens:\n"
          f"    python nanoeuler.py train base --data {shlex.quote(str(path))} --holdout {holdout}")

if __name__ == "__main__":
    sys.exit(dl.run(main))
