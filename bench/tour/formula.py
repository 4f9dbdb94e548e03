"""The derivative of RMSNorm: the formula, the lines of nanoeuler.py that compute it, and a check

The lines are read from nanoeuler.py.  The numbers are those of page 8 of the tour, which prints
them: the gradient by these lines, and the slopes that central differences measure."""
import inspect

import numpy as np

import nanoeuler as ne
from shapes import box, line, STYLE, text

WIDE, TALL = 946, 342
LEFT, CODE, TOP, STEP = 24, 346, 72, 19
MORE = """
.page { fill: #fff; stroke: #ccc } .code { font: 12px ui-monospace, monospace; white-space: pre }
.formula { font: italic 15px Georgia, serif } .head { font-weight: 600 }
.hint { font-size: 12px; fill: #666 } text.p { fill: #b3446c } text.q { fill: #2a6cad }
@media (prefers-color-scheme: dark) { .page { fill: #161b22; stroke: #444 } .hint { fill: #aaa }
text.p { fill: #ff8fb3 } text.q { fill: #7db8ef } }
"""


def code():
    """The lines of `rmsnorm_backward`, without its docstring and its comments"""
    source = inspect.getsource(ne.rmsnorm_backward.py_func)
    head, _, rest = source.partition('"""')
    lines = (head.rstrip() + rest.partition('"""')[2]).splitlines()
    return [x.split("  # ")[0].rstrip() for x in lines if x and not x.startswith("@")]


def numbers():
    """dx by the code and by central differences, for the vectors of page 8"""
    x, gain, dy = np.array([[3.0, -4.0]]), np.array([1.0, 2.0]), np.array([[0.5, -1.0]])
    y, rstd, dx, h, eps = np.zeros((1, 2)), np.zeros(1), np.zeros((1, 2)), 1e-6, 1e-5

    def loss(x):
        ne.rmsnorm_forward(y, rstd, x, gain, eps)
        return float((dy * y).sum())

    slopes = [(loss(x + h * step) - loss(x - h * step)) / (2 * h) for step in np.eye(2)]
    ne.rmsnorm_forward(y, rstd, x, gain, eps)
    ne.rmsnorm_backward(dx, np.zeros((1, 2)), dy, x, gain, rstd)
    return dx[0], np.array(slopes)


def picture():
    lines = code()
    colors = ["p" if "total +=" in x or "mean =" in x else "q" if "dx[t" in x else ""
              for x in lines]
    where = {color: [TOP + STEP * i for i, kind in enumerate(colors) if kind == color]
             for color in "pq"}
    parts = [box(0.5, 0.5, WIDE - 1, TALL - 1, "page", round=8),
             text(LEFT, 34, "The formula", "head", "start"),
             text(CODE, 34, "The code in nanoeuler.py, written by hand", "head", "start"),
             line(LEFT, 46, WIDE - LEFT, 46)]
    parts += [text(CODE, TOP + STEP * i, x, f"code {color}", "start")
              for i, (x, color) in enumerate(zip(lines, colors))]

    def beside(y, words, kind="", hint=""):
        parts.append(text(LEFT, y, words, f"formula {kind}", "start"))
        parts.append(text(LEFT, y - 22, hint, "hint", "start"))

    beside(TOP + 22, "y = gain \u00b7 x \u00b7 r", "", "RMSNorm, forward; r is rstd")
    beside(where["p"][0], "m = r\u00b2 \u00b7 mean(gain \u00b7 dy \u00b7 x)", "p",
           "backward: dy is the gradient of y")
    beside(where["q"][0], "dx = dnext + r \u00b7 (gain \u00b7 dy \u2212 x \u00b7 m)", "q",
           "dnext is the gradient of the other use of x")
    below = TOP + STEP * len(lines) + 22
    vectors = "for x = (3, \u22124), gain = (1, 2), dy = (0.5, \u22121), dnext = 0"
    parts += [text(LEFT, below, "The check", "head", "start"),
              text(CODE, below, vectors, "hint", "start"),
              line(LEFT, below + 12, WIDE - LEFT, below + 12)]
    for i, (name, values) in enumerate([("dx by the code above", numbers()[0]),
                                        ("dx by finite differences", numbers()[1])]):
        y = below + 38 + 24 * i
        parts.append(text(LEFT, y, name, "", "start"))
        parts += [text(CODE + 110 * j + 72, y, f"{v:.6f}".replace("-", "\u2212"), "code", "end")
                  for j, v in enumerate(values)]
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {TALL}" role="img" '
            f'aria-label="The derivative of RMSNorm as a formula, as code, and checked by central '
            f'differences"><style>{STYLE}{MORE}</style>{"".join(parts)}</svg>\n')
