"""Training steps beside PyTorch's, from the records in bench/results

The length of a bar is the time of a step, divided by the time of PyTorch's step."""
import json
import pathlib
import statistics
from typing import NamedTuple

from shapes import box, STYLE, text

RESULTS = pathlib.Path(__file__).resolve().parents[1] / "results"
WIDE, LEFT, FULL, TOP, STEP = 940, 310, 360, 92, 56
MORE = """
.page { fill: #fff; stroke: #ccc } .peer { fill: #b9b9b9 } .head { font-weight: 600 }
.hint { font-size: 12px; fill: #666 }
@media (prefers-color-scheme: dark) { .page { fill: #161b22; stroke: #444 } .peer { fill: #6b6b6b }
.hint { fill: #aaa } }
"""


class Row(NamedTuple):
    model: str
    machine: str
    numbers: str                             # the number format of NanoEuler; of PyTorch
    ours: float                              # ms
    peer: float                              # ms, of the fastest PyTorch measured


def measured(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def rows():
    found = []
    train = measured("cpu_amd-epyc-znver4")["train"]
    for preset, size in ("small", "1M"), ("big", "10M"):
        times = {name: 1e3 * row["median_s"] for name, row in train[preset]["rows"].items()}
        peers = {name: ms for name, ms in times.items() if "orch" in name}
        float32 = {name: ms for name, ms in peers.items() if "bf16" not in name}
        fastest = min(peers, key=peers.get)
        model, machine = f"{preset}, {size} parameters", "two Zen 4 cores"
        found += [Row(model, machine, "float32", times["NanoEuler"], min(float32.values())),
                  Row(model, machine, "bfloat16" if "bf16" in fastest else "bfloat16; float32",
                      times["NanoEuler, bfloat16"], peers[fastest])]
    times = measured("gpu_h200")["step"]["base, 64 x 512"]["times"]
    found.append(Row("base, 116M parameters", "one H200", "bfloat16", times["NanoEuler"]["ms"],
                     min(x["ms"] for name, x in times.items() if name != "NanoEuler")))
    entries = [(x["engine"] == "NanoEuler", 1e3 * statistics.median(x["rounds"]), x["dtype"])
               for x in measured("cores_intel-xeon_base")["presets"]["base"]]
    ours, peer = (min((ms, dtype) for mine, ms, dtype in entries if mine is side)
                  for side in (True, False))
    names = {"f32": "float32", "bf16": "bfloat16"}
    found.append(Row("base, 116M parameters", "16 Intel cores", f"{names[ours[1]]}; "
                     f"{names[peer[1]]}", ours[0], peer[0]))
    return found


def shown(ms):
    return f"{ms:,.0f} ms"


def picture():
    found = rows()
    tall = TOP + STEP * len(found)
    parts = [box(0.5, 0.5, WIDE - 1, tall - 1, "page", round=8),
             text(24, 34, "Time of one training step, shorter is better", "head", "start"),
             box(24, 50, 14, 14, "a", round=2), text(44, 62, "NanoEuler", "", "start"),
             box(140, 50, 14, 14, "peer", round=2),
             text(160, 62, "the fastest PyTorch in this number format", "", "start")]
    for i, row in enumerate(found):
        y = TOP + STEP * i
        numbers = row.numbers.replace("; ", "; PyTorch ")
        parts += [text(24, y + 13, row.model, "", "start"),
                  text(24, y + 31, f"{row.machine}, {numbers}", "hint", "start")]
        for j, (kind, ms) in enumerate((("a", row.ours), ("peer", row.peer))):
            width = FULL * ms / row.peer
            parts += [box(LEFT, y + 19 * j, width, 16, kind, round=2),
                      text(LEFT + width + 8, y + 13 + 19 * j, shown(ms), "", "start")]
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {tall}" role="img" '
            f'aria-label="Bars: the time of a training step of NanoEuler and of PyTorch">'
            f'<style>{STYLE}{MORE}</style>{"".join(parts)}</svg>\n')
