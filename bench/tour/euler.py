"""Draws docs/euler.svg: the state of one token after each half layer of the bundled model.

    python bench/euler_picture.py          writes docs/euler.svg

Bars: |f| / |x|, how long each Euler step is compared with the state from which it starts.
Line: the probability of the token that the model says in the end, if it stopped after this step.
The picture follows the reader's light or dark setting."""
import pathlib
import sys

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import nanoeuler as ne
from nanoeuler_parts.tools.lens import euler_steps

QUESTION, BEGUN = "What is the capital of Norway?", "The capital of Norway is"
WIDE, TALL, LEFT, RIGHT, TOP, BOTTOM = 720, 260, 60, 60, 36, 46
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #444 } .attention { fill: #6b9bd1 }
.swiglu { fill: #e0a458 } .curve { fill: none; stroke: #b3446c; stroke-width: 2 }
.knot { fill: #b3446c } .axis { stroke: #999; stroke-width: 1 } .p { fill: #b3446c }
@media (prefers-color-scheme: dark) { text { fill: #ccc } .axis { stroke: #777 }
.curve { stroke: #ff8fb3 } .knot, .p { fill: #ff8fb3 } }
"""


def trajectory():
    """([(name, |f| / |x| or None, probability of the final token)], that token's text)"""
    c = ne.read_checkpoint(str(ROOT / ne.SHIPPED), moments=False)
    ids = ne.chat_ids(c.state.template, [("user", QUESTION)], c.state, c.tokenizer)
    ids += c.tokenizer.encode(BEGUN).tolist()
    steps = [*euler_steps(ne.Model(c.cfg, c.flat), np.array(ids, np.int32))]
    token = int(steps[-1][3].argmax())
    text = c.tokenizer.vocab[token].decode("utf-8", "replace")
    return [(name.strip(), ratio, float(p[token])) for name, ratio, _, p in steps], text


def drawn(steps, text):
    most = max(ratio for _, ratio, _ in steps[1:])
    width = (WIDE - LEFT - RIGHT) / len(steps)

    def x(i):
        return LEFT + width * (i + 0.5)

    def y(share):
        return TALL - BOTTOM - (TALL - TOP - BOTTOM) * share

    parts = [f'<line class="axis" x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{y(0)}" y2="{y(0)}"/>',
             f'<line class="axis" x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{y(1 / most):.1f}" '
             f'y2="{y(1 / most):.1f}" stroke-dasharray="3 5"/>',
             f'<text x="{LEFT - 8}" y="{y(1 / most) + 4:.1f}" text-anchor="end">1</text>',
             f'<text x="{LEFT - 8}" y="{y(0) + 4}" text-anchor="end">0</text>',
             f'<text class="p" x="{WIDE - RIGHT + 8}" y="{y(1) + 4}">100 %</text>',
             f'<text class="p" x="{WIDE - RIGHT + 8}" y="{y(0) + 4}">0 %</text>',
             f'<text x="{x(0):.0f}" y="{TALL - BOTTOM + 18}" text-anchor="middle">start</text>']
    for i, (name, ratio, _) in enumerate(steps):
        if ratio is None:
            continue
        layer, kind = name.split()
        top = y(ratio / most)
        parts.append(f'<rect class="{kind}" x="{x(i) - width * 0.36:.1f}" y="{top:.1f}" '
                     f'width="{width * 0.72:.1f}" height="{y(0) - top:.1f}" rx="2"/>')
        if kind == "attention":
            parts.append(f'<text x="{x(i + 0.5):.0f}" y="{TALL - BOTTOM + 18}" '
                         f'text-anchor="middle">layer {layer}</text>')
    points = " ".join(f"{x(i):.1f},{y(p):.1f}" for i, (_, _, p) in enumerate(steps))
    parts.append(f'<polyline class="curve" points="{points}"/>')
    parts += [f'<circle class="knot" cx="{x(i):.1f}" cy="{y(p):.1f}" r="3"/>'
              for i, (_, _, p) in enumerate(steps)]
    parts += [f'<rect class="attention" x="{LEFT}" y="8" width="12" height="12"/>',
              f'<text x="{LEFT + 18}" y="18">length of the attention step</text>',
              f'<rect class="swiglu" x="{LEFT + 190}" y="8" width="12" height="12"/>',
              f'<text x="{LEFT + 208}" y="18">length of the SwiGLU step</text>',
              f'<text class="p" x="{LEFT + 380}" y="18">probability of "{text.strip()}", the next '
              f'token</text>',
              f'<text x="{WIDE / 2}" y="{TALL - 8}" text-anchor="middle">'
              f'{QUESTION} {BEGUN} \u2026</text>']
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {TALL}" role="img" '
            f'aria-label="Length of each Euler step, and the probability of the reply, by layer">'
            f'<style>{STYLE}</style>{"".join(parts)}</svg>\n')


if __name__ == "__main__":
    (ROOT / "docs/euler.svg").write_text(drawn(*trajectory()), encoding="utf-8")
