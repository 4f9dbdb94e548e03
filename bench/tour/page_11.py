"""The loss of a recorded run, its learning rate, and what the model writes on the way"""
import json
import pathlib

import nanoeuler as ne
from shapes import circle, curve, line, svg, text

LOG = pathlib.Path(__file__).resolve().parent.parent.parent / "docs/tour/11_log.json"
LEFT, RIGHT, TOP, BOTTOM = 52, 370, 40, 226      # of the plot
HIGH, LOW = 5.0, 1.5                             # bits per byte
RATE = 296, 34                                   # its zero line, and its height
LETTERS, LINES = 44, 3                           # of a sample


def lines_of(sample):
    """The first lines of a sample, unprintable characters as dots"""
    found = []
    for row in sample.strip("\n").split("\n"):
        row = "".join(c if c.isprintable() and c != "\ufffd" else "·" for c in row)
        while row:
            cut = len(row) if len(row) <= LETTERS else row.rfind(" ", 10, LETTERS) + 1 or LETTERS
            found.append(row[:cut].strip())
            row = row[cut:]
    return found[:LINES]


def picture():
    log = json.loads(LOG.read_text(encoding="utf-8"))
    steps, every = log["steps"], log["train"]["every"]

    def x(step):
        return LEFT + (RIGHT - LEFT) * step / steps

    def y(bits):
        return BOTTOM - (BOTTOM - TOP) * (bits - LOW) / (HIGH - LOW)

    parts = [text(LEFT, 20, "bits per byte", "small", "start")]
    for bits in (2, 3, 4, 5):
        parts += [line(LEFT, y(bits), RIGHT, y(bits), dashed=True),
                  text(LEFT - 8, y(bits) + 4, bits, "small", "end")]
    parts.append(line(LEFT, BOTTOM, RIGHT, BOTTOM))
    for step in (0, 1000, 2000, 3000):
        parts.append(text(x(step), BOTTOM + 16, f"{step:,}", "small"))
    train = [(0, log["first"]), *((every * (i + 0.5), bits) for i, bits in
                                  enumerate(log["train"]["bits_per_byte"]))]
    parts.append(curve([(x(step), y(bits)) for step, bits in train]))
    held_out = sorted((int(step), bits) for step, bits in log["validation"].items())
    parts += [circle(x(step), y(bits), 2, "b") for step, bits in held_out[1::2]]
    parts += [text(300, 170, "held-out text", "small b"), text(230, 221, "batches", "small a")]

    zero, height = RATE
    rates = [(step, ne.lr_at(step, steps, 1.0, 25, 0.0)) for step in (*range(0, 25, 4), 25,
                                                                     *range(60, steps + 1, 60))]
    parts += [line(LEFT, zero, RIGHT, zero), text((LEFT + RIGHT) / 2, zero + 16, "step", "small"),
              curve([(x(step), zero - height * rate) for step, rate in rates], "bb"),
              text(RIGHT, zero - height + 6, "learning rate", "small", "end")]

    first, *others = sorted(map(int, log["samples"]))
    for i, step in enumerate((first, *others)):
        near = min(train, key=lambda point: abs(point[0] - step))[1] if step else log["first"]
        parts += [circle(x(step), y(near), 8, "c"), text(x(step), y(near) + 4, i + 1, "small on")]
        top = 24 + 74 * i
        parts += [circle(400, top - 4, 8, "c"), text(400, top, i + 1, "small on"),
                  text(416, top, f"step {step:,}", "bold", "start")]
        parts += [text(416, top + 17 + 15 * j, row, "mono small", "start")
                  for j, row in enumerate(lines_of(log["samples"][str(step)]))]
    batches, held_out = log["train"]["bits_per_byte"][-1], log["final"]
    return svg(324, f"The loss of a run of {steps:,} steps. On the batches it falls from "
               f"{log['first']:.1f} to about {batches:.1f} bits per byte, on held-out text to "
               f"about {held_out:.1f}. The samples begin as random characters, and become "
               "words, then lines of a play.", *parts)
