"""60,000 pairs of answers, a better and a worse one, into data/preferences.jsonl.

    python data/get_preferences.py

A line is {instruction, input, chosen, rejected}. UltraFeedback (Cui et al. 2023), binarized and
cleaned by Argilla: huggingface.co/datasets/argilla/ultrafeedback-binarized-preferences-cleaned,
MIT licence. Language models wrote the answers, GPT-4 rated them.
"""
import json, sys
import download as dl

BASE_URL = ("https://huggingface.co/datasets/argilla/ultrafeedback-binarized-preferences-cleaned"
            "/resolve/main/data")
FILE = "train-00000-of-00001.parquet"
COLUMNS = "prompt, chosen[-1].content, rejected[-1].content"    # a dialogue; the last is the answer

def read(path):
    """Usable pairs: complete, storable, two answers that differ, each once."""
    seen = set()
    for row in dl.read_parquet(path, COLUMNS):
        row = prompt, chosen, rejected = tuple((x or "").strip() for x in row)
        if all(row) and chosen != rejected and dl.storable("".join(row)) and row not in seen:
            seen.add(row)
            yield dict(instruction=prompt, input="", chosen=chosen, rejected=rejected)

def check(path):
    if next(read(path), None) is None:
        raise ValueError("it has no pair of answers")

def main(argv=None):
    o = dl.parser(__doc__, BASE_URL).parse_args(argv)
    source = dl.obtain(f"preferences/{FILE}", f"{o.base_url}/{FILE}", o, check)
    path, n = o.to / "preferences.jsonl", 0
    with dl.replacing(path) as f:
        for n, e in enumerate(read(source), 1):
            f.write(json.dumps(e, ensure_ascii=False).encode() + b"\n")
    print(f"{path}: {n:,} pairs, {path.stat().st_size:,} bytes")

if __name__ == "__main__":
    sys.exit(dl.run(main))
