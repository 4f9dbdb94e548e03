"""60,000 pairs of answers, a better and a worse one, into data/preferences.jsonl.

    python data/get_preferences.py

A line is {instruction, input, chosen, rejected}. UltraFeedback (Cui et al. 2023), binarized and
cleaned by Argilla: huggingface.co/datasets/argilla/ultrafeedback-binarized-preferences-cleaned,
MIT licence. Language models wrote the answers, GPT-4 rated them.
"""
import json
import sys

import download as dl

REPO = "argilla/ultrafeedback-binarized-preferences-cleaned"
FILE = "train-00000-of-00001.parquet"
COLUMNS = "prompt, chosen[-1].content, rejected[-1].content"    # a dialogue; the last is the answer

def read(path):
    """Usable pairs: complete, storable, two answers that differ, each once."""
    seen = set()
    for row in dl.read_parquet(path, COLUMNS):
        pair = tuple((x or "").strip() for x in row)
        prompt, chosen, rejected = pair
        usable = all(pair) and chosen != rejected and dl.storable("".join(pair))
        if usable and pair not in seen:
            seen.add(pair)
            yield dict(instruction=prompt, input="", chosen=chosen, rejected=rejected)

def check(path):
    if next(read(path), None) is None:
        raise ValueError("it has no pair of answers")

def main(argv=None):
    o = dl.fetch_parser(__doc__).parse_args(argv)
    raw = dl.obtain(f"preferences/{FILE}", dl.HubFile(REPO, f"data/{FILE}"), o, check)
    path = o.to / "preferences.jsonl"
    n = 0
    with dl.replacing(path) as f:
        for e in read(raw):
            f.write(json.dumps(e, ensure_ascii=False).encode() + b"\n")
            n += 1
    print(f"{path}: {n:,} pairs, {path.stat().st_size:,} bytes")

if __name__ == "__main__":
    sys.exit(dl.run(main))
