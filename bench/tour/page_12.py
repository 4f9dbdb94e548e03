"""The loss of a recorded run of own_gpt.py, and what the model writes on the way"""
import json
import pathlib

from page_11 import lines_of
from shapes import circle, curve, line, svg, text

LOG = pathlib.Path(__file__).resolve().parent.parent.parent / "docs/tour/12_log.json"
LEFT, RIGHT, TOP, BOTTOM = 52, 370, 40, 262      # of the plot
HIGH, LOW = 7.5, 1.5                             # bits per letter
PAIRS = 2.77                                     # page 3: a table of pairs, held-out text


def picture():
    log = json.loads(LOG.read_text(encoding="utf-8"))
    steps, every = log["steps"], log["every"]

    def x(step):
        return LEFT + (RIGHT - LEFT) * step / steps

    def y(bits):
        return BOTTOM - (BOTTOM - TOP) * (bits - LOW) / (HIGH - LOW)

    parts = [text(LEFT, 20, "bits per letter", "small", "start")]
    for bits in range(2, 8):
        parts += [line(LEFT, y(bits), RIGHT, y(bits), dashed=True),
                  text(LEFT - 10, y(bits) + 4, bits, "small", "end")]
    parts += [line(LEFT, BOTTOM, RIGHT, BOTTOM),
              text((LEFT + RIGHT) / 2, BOTTOM + 34, "step", "small")]
    for step in range(0, steps + 1, 600):
        parts.append(text(x(step), BOTTOM + 16, f"{step:,}", "small"))
    train = [(0, log["first"]), *((every * (i + 0.5), bits)
                                  for i, bits in enumerate(log["bits_per_letter"]))]
    parts += [line(LEFT, y(PAIRS), RIGHT, y(PAIRS), "cb"),
              text(RIGHT, y(3.2), f"table of pairs, page 3: {PAIRS}", "small c", "end"),
              curve([(x(step), y(bits)) for step, bits in train]),
              circle(x(steps), y(log["held_out"]), 4, "b"),
              text(RIGHT, y(1.75), f"held-out text: {log['held_out']:.2f}", "small b", "end")]
    for i, step in enumerate(sorted(map(int, log["samples"]))):
        near, bits = min(train, key=lambda point: abs(point[0] - min(step, steps - 120)))
        top = 24 + 74 * i
        parts += [circle(x(near), y(bits), 8), text(x(near), y(bits) + 4, i + 1, "small on"),
                  circle(400, top - 4, 8), text(400, top, i + 1, "small on"),
                  text(416, top, f"after {step:,} steps", "bold", "start")]
        parts += [text(416, top + 17 + 15 * j, row, "mono small", "start")
                  for j, row in enumerate(lines_of(log["samples"][str(step)]))]
    return svg(324, f"In {steps:,} steps, the loss of the batches falls from {log['first']:.1f} to "
               f"about {log['bits_per_letter'][-1]:.1f} bits per letter. The samples begin as "
               "random letters and end as words.", *parts)
