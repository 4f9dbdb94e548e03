"""Examples and pairs that a run of seconds learns from."""
import json

import nanoeuler as ne

ADD = [dict(instruction=f"Add {a} and {b}.", input="", output=f"{a} plus {b} is {a + b}.")
       for a in range(12) for b in range(12)]
LITTLE = ne.replace(ne.PRESETS["small"], n_layer=2, n_embd=64, n_head=2, n_kv_head=1, n_hidden=128)
FLAGS = ("--batch", "256", "--warmup", "2", "--threads", "1")
PAIRS = [dict(instruction=e["instruction"], input="", chosen=e["output"],
              rejected=e["output"].replace("plus", "minus")) for e in ADD]


def copy_of(base, folder):
    for name in ("nanoeuler.bin", "add.json"):
        (folder / name).write_bytes((base / name).read_bytes())
    return folder


def write_pairs(folder, examples=PAIRS, name="pairs.jsonl"):
    (folder / name).write_text("".join(json.dumps(e) + "\n" for e in examples), encoding="utf-8")
    return folder
