"""52,000 instructions: Stanford Alpaca, in the edition alpaca-cleaned, into data/alpaca.json.

    python data/get_alpaca.py

A JSON list of {instruction, input, output}. Taori et al. 2023; the edition at
huggingface.co/datasets/yahma/alpaca-cleaned is under CC BY 4.0, Stanford's own data under
CC BY-NC 4.0: a language model wrote them, for research.
"""
import json, sys
import download as dl

BASE_URL = "https://huggingface.co/datasets/yahma/alpaca-cleaned/resolve/main"
FILE = "alpaca_data_cleaned.json"
KEYS = "instruction", "input", "output"

def read(path):
    """Usable examples: complete, storable, each once."""
    seen, examples = set(), json.loads(dl.decode(path.read_bytes()))
    if not isinstance(examples, list):
        raise ValueError(f"it is a {type(examples).__name__}, expected a list")
    for e in examples:
        values = tuple(str(e.get(k) or "").strip() for k in KEYS)
        if values[0] and values[2] and dl.storable("".join(values)) and values not in seen:
            seen.add(values)
            yield dict(zip(KEYS, values))

def check(path):
    if not any(True for _ in read(path)):
        raise ValueError(f"it has no entry with {' and '.join(KEYS[::2])}")

def main(argv=None):
    o = dl.parser(__doc__, BASE_URL).parse_args(argv)
    source = dl.obtain(f"alpaca/{FILE}", f"{o.base_url}/{FILE}", o, check)
    path, lines = o.to / "alpaca.json", [json.dumps(e, ensure_ascii=False) for e in read(source)]
    with dl.replacing(path) as f:
        f.write(("[\n" + ",\n".join(lines) + "\n]\n").encode())
    print(f"{path}: {len(lines):,} examples, {path.stat().st_size:,} bytes")

if __name__ == "__main__":
    sys.exit(dl.run(main))
