"""Records a run of docs/tour/own_gpt.py for page 12 of the tour.

    OPENBLAS_NUM_THREADS=1 python bench/tour/record_12.py        writes docs/tour/12_log.json
"""
import json
import pathlib
import re
import sys

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "docs/tour"))
import own_gpt  # noqa: E402

STEPS, EVERY = 2400, 20      # EVERY: steps per point of the curve
SAMPLED = (0, 100, 600, STEPS)


def record():
    p = own_gpt.parameters(np.float32)
    losses, samples = [], {"0": own_gpt.write(p, 120)}
    for t, loss in own_gpt.train(p, STEPS):
        losses.append(loss)
        if t in SAMPLED:
            samples[str(t)] = own_gpt.write(p, 120)
    bits = np.array(losses) / np.log(2)
    return {"steps": STEPS, "every": EVERY,              # means of the batches of EVERY steps
            "bits_per_letter": bits.reshape(-1, EVERY).mean(1).round(3).tolist(),
            "first": round(float(bits[0]), 3),           # before the first update
            "held_out": round(float(own_gpt.held_out_bits(p)), 2), "samples": samples}


if __name__ == "__main__":
    path = ROOT / "docs/tour/12_log.json"
    written = json.dumps(record(), indent=1, ensure_ascii=False)
    path.write_text(re.sub(r"(?<=[\d\[,])\n +(?=\d)", " ", written) + "\n", encoding="utf-8")
    print(path.relative_to(ROOT))
