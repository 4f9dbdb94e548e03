"""A slice of FineWeb-Edu, web pages chosen for what they teach, into data/web.txt.

    python data/get_web.py --gb 1
    python data/get_web.py --from DIR          # DIR/000_00000.parquet, ...: no network

The sample of 10 billion tokens is 14 parquet files of 2.2 GB, with about 3 GB of text each. The
slice is its beginning. Licence of the collection: ODC-By 1.0; the pages are their authors'.
Penedo et al. 2024, huggingface.co/datasets/HuggingFaceFW/fineweb-edu.
"""
import sys

import download as dl

REPO = "HuggingFaceFW/fineweb-edu"
FILES = [f"{i:03d}_00000.parquet" for i in range(14)]

def check(path):
    if next(dl.read_parquet(path, "text"), None) is None:
        raise ValueError("it has no rows")

def documents(o):
    """Text of the pages, file by file: the next one is fetched when it is needed."""
    for name in FILES:
        path = dl.obtain(f"web/{name}", dl.HubFile(REPO, f"sample/10BT/{name}"), o, check)
        for (text,) in dl.read_parquet(path, "text"):
            if text and dl.storable(text):
                text = dl.clean(text)
                if text:
                    yield text.encode()

def main(argv=None):
    p = dl.fetch_parser(__doc__)
    p.add_argument("--gb", type=dl.number(1e-6, 45), default=1.0, help="10^9 bytes of text")
    o = p.parse_args(argv)
    path = o.to / "web.txt"
    want = int(o.gb * 1e9)
    size = 0                                 # bytes written
    n = 0                                    # pages
    bar = dl.tqdm(total=want, unit="B", unit_scale=True, disable=None, desc="web.txt")
    with dl.replacing(path) as f, bar:
        for text in documents(o):
            if n > 0:
                text = dl.BETWEEN + text
            f.write(text)
            bar.update(len(text))
            size += len(text)
            n += 1
            if size >= want:
                break
        f.write(b"\n")
    rest = "" if size >= want else ", all there is"
    print(f"{path}: {n:,} pages, {size + 1:,} bytes{rest}")

if __name__ == "__main__":
    sys.exit(dl.run(main))
