"""52,000 instructions: Stanford Alpaca, in the edition alpaca-cleaned, into data/alpaca.json.

    python data/get_alpaca.py

A JSON list of {instruction, input, output}. Taori et al. 2023; the edition at
huggingface.co/datasets/yahma/alpaca-cleaned is under CC BY 4.0, Stanford's own data under
CC BY-NC 4.0: a language model wrote them, for research.
"""
import json
import sys

import download as dl

REPO = "yahma/alpaca-cleaned"
FILE = "alpaca_data_cleaned.json"
KEYS = "instruction", "input", "output"

def read(path):
    """Usable examples: complete, storable, each once."""
    examples = json.loads(dl.decode(path.read_bytes()))
    if not isinstance(examples, list):
        raise ValueError(f"it is a {type(examples).__name__}, expected a list")
    seen = set()
    for e in examples:
        if not isinstance(e, dict):
            continue
        values = tuple(str(e.get(k) or "").strip() for k in KEYS)
        instruction, _, output = values
        usable = instruction and output and dl.storable("".join(values))
        if usable and values not in seen:
            seen.add(values)
            yield dict(zip(KEYS, values))

def check(path):
    if next(read(path), None) is None:
        raise ValueError("it has no entry with instruction and output")

def main(argv=None):
    o = dl.fetch_parser(__doc__).parse_args(argv)
    raw = dl.obtain(f"alpaca/{FILE}", dl.HubFile(REPO, FILE), o, check)
    path = o.to / "alpaca.json"
    lines = [json.dumps(e, ensure_ascii=False) for e in read(raw)]
    with dl.replacing(path) as f:
        f.write(("[\n" + ",\n".join(lines) + "\n]\n").encode())
    print(f"{path}: {len(lines):,} examples, {path.stat().st_size:,} bytes")

if __name__ == "__main__":
    sys.exit(dl.run(main))
