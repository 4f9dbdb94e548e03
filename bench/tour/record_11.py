"""Thins the log of a real run for page 11 of docs/tour.

    python nanoeuler.py train --steps 3000 --eval-every 100 --out run.bin
    python bench/tour/record_11.py run.bin          writes docs/tour/11_log.json

The samples are those of the run: 40 tokens after a line end, at temperature 0.8.  The run does not
record samples at step 0 and after its last step, so they are sampled here in the same way.
"""
import json
import math
import pathlib
import re
import sys

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
import nanoeuler as ne  # noqa: E402
from nanoeuler_parts.files.logs import log_path
from nanoeuler_parts.runs.options import TrainOptions
from nanoeuler_parts.runs.schedule import initial_params

EVERY = 20           # steps per point of the curve


def sampled(cfg, flat, tokenizer, step):
    """As Run.validate does it"""
    ids = ne.generate(ne.Decoder(cfg, flat), tokenizer.encode("\n"), 40,
                      np.random.default_rng(step), ne.Sampling(0.8))
    return tokenizer.decode(list(ids)).decode("utf-8", "replace")


def record(out):
    c = ne.read_checkpoint(out, moments=False)
    log = [json.loads(line) for line in open(log_path(out, ""), encoding="utf-8")]
    steps = [r for r in log if "loss" in r]
    bits = np.array([r["bits_per_byte"] for r in steps])
    n = c.state.n_steps
    assert len(steps) == n and n % EVERY == 0
    options = TrainOptions(**c.state.options)
    samples = {r["step"]: r["sample"] for r in log if "sample" in r}
    samples[0] = sampled(c.cfg, initial_params(c.cfg, options), c.tokenizer, 0)
    samples[n] = sampled(c.cfg, c.flat, c.tokenizer, n)
    bytes_per_token = steps[0]["loss"] / math.log(2) / steps[0]["bits_per_byte"]
    return {"parameters": ne.n_params(c.cfg), "steps": n,
            "tokens_per_step": c.state.tokens_seen // n,
            "bytes_per_token": round(bytes_per_token, 3),
            "train": {"every": EVERY,        # means of the batches of so many steps
                      "bits_per_byte": bits.reshape(-1, EVERY).mean(1).round(3).tolist()},
            "first": round(bits[0], 3),      # before the first update
            "validation": {str(r["step"]): round(r["val_bits_per_byte"], 3) for r in log
                           if "val_bits_per_byte" in r and r["windows"]},
            "final": round(c.state.bits_per_byte, 4),        # on all held-out text
            "samples": {str(step): samples[step] for step in (0, 100, 1000, n)}}


if __name__ == "__main__":
    path = ROOT / "docs/tour/11_log.json"
    written = json.dumps(record(sys.argv[1]), indent=1, ensure_ascii=False)
    path.write_text(re.sub(r"(?<=[\d\[,])\n +(?=\d)", " ", written) + "\n", encoding="utf-8")
    print(path.relative_to(ROOT))
