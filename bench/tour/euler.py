"""The steps of the bundled model: how long each one is, and how probable it makes the next token

Bars: |f| / |x|, how long each Euler step is compared with the state from which it starts.
Line: the probability of the token that the model says in the end, if it stopped after this step.
README and page 7 show the same steps, those of `python nanoeuler.py lens TEXT bundled --plain`."""
import numpy as np

import nanoeuler as ne
from nanoeuler_parts.checkpoint.bundled import beside_program, SHIPPED
from nanoeuler_parts.tools.lens import euler_steps

TEXT = "What is the capital of Norway? The capital of Norway is"
WIDE, TALL, LEFT, RIGHT, TOP, BOTTOM = 720, 260, 60, 60, 36, 46
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #444 } .attention { fill: #6b9bd1 }
.swiglu { fill: #e0a458 } .curve { fill: none; stroke: #b3446c; stroke-width: 2 }
.knot { fill: #b3446c } .axis { stroke: #999; stroke-width: 1 } .p { fill: #b3446c }
@media (prefers-color-scheme: dark) { text { fill: #ccc } .axis { stroke: #777 }
.curve { stroke: #ff8fb3 } .knot, .p { fill: #ff8fb3 } }
.page { fill: #fff; stroke: #ccc } @media (prefers-color-scheme: dark) { .page { fill: #161b22;
stroke: #444 } }
"""


def trajectory():
    """[(name, |f| / |x| or None, probabilities (V,))] after 0 to 14 steps, and the vocabulary"""
    c = ne.read_checkpoint(str(beside_program(SHIPPED)), moments=False)
    ids = np.array(c.tokenizer.encode(TEXT), np.int32)
    steps = euler_steps(ne.Model(c.cfg, c.flat), ids)
    return [(name.strip(), ratio, p) for name, ratio, _, p in steps], c.tokenizer.vocab


def picture():
    steps, vocab = trajectory()
    token = int(steps[-1][2].argmax())
    shown = [(name, ratio, float(p[token])) for name, ratio, p in steps]
    return drawn(shown, vocab[token].decode("utf-8", "replace"))


def drawn(steps, text):
    most = max(ratio for _, ratio, _ in steps[1:])
    end = steps[-1][2]
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
             f'<text class="p" x="{WIDE - RIGHT + 8}" y="{y(1) + 4}">100%</text>',
             f'<text class="p" x="{WIDE - RIGHT + 8}" y="{y(0) + 4}">0%</text>',
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
              f'<text x="{LEFT + 18}" y="18">attention step, relative length</text>',
              f'<rect class="swiglu" x="{LEFT + 190}" y="8" width="12" height="12"/>',
              f'<text x="{LEFT + 208}" y="18">SwiGLU step, relative length</text>',
              f'<text class="p" x="{LEFT + 380}" y="18">probability of "{text.strip()}", the next '
              f'token</text>',
              f'<text x="{WIDE / 2}" y="{TALL - 8}" text-anchor="middle">'
              f'{TEXT} \u2026</text>',
              f'<text class="p" x="{x(len(steps) - 1):.0f}" y="{y(end) - 8:.1f}" '
              f'text-anchor="end">{end:.0%}</text>']
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {TALL}" role="img" '
            f'aria-label="Length of each Euler step, and the probability of the reply, by layer">'
            f'<style>{STYLE}</style><rect class="page" x="0.5" y="0.5" width="{WIDE - 1}" '
            f'height="{TALL - 1}" rx="8"/>{"".join(parts)}</svg>\n')
