"""Printed text: tables, numbers with their nouns, and progress."""
import time

from bpe import printable

def names_in(data):
    """The names of files in a setting `data`, as text.  Line ends separate them."""
    return ", ".join(data.split("\n"))

def counted(n, noun):
    """A number and its noun: 1 thread, 2,000 threads, 3 replies."""
    many = noun[:-1] + "ies" if noun.endswith("y") and noun[-2] not in "aeiou" else noun + "s"
    return f"{n:,} {noun if n == 1 else many}"

def print_table(title, rows):
    """Prints a title and rows of (name, value).  `printable` keeps untrusted text, for example from
    a checkpoint, from adding rows and from controlling the terminal."""
    print(printable(title))
    for name, value in rows:
        print(f"  {name:<16} {printable(str(value))}")
    print(flush=True)

MOST_SILENT = 10     # seconds between printed lines, unless a step takes longer

def with_progress(parts, what, n=None, noun="part"):
    """Yields the parts, and about every MOST_SILENT seconds prints how many are done.
    n: how many there are, if they have no length     noun: what a part is called"""
    n = len(parts) if n is None else n
    printed = time.perf_counter()            # when the last line was printed
    for i, part in enumerate(parts):
        if time.perf_counter() - printed > MOST_SILENT:
            printed = time.perf_counter()
            print(f"{printable(what)}: {i:,} of {counted(n, noun)}", flush=True)
        yield part
