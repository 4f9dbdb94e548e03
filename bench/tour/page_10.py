"""Gradient descent and AdamW on the bowl of page 10, 50 p0² + p1² / 2"""
import math

import numpy as np
from shapes import circle, curve, line, svg, text

STEPS, SCALE, MIDDLE = 100, 165, 128
COLUMNS = (("gradient descent, rate 0.019", 70, "ab", "a"), ("AdamW, rate 0.02", 430, "bb", "b"))


def gradient(p):
    return np.array([100 * p[0], p[1]])


def descent():
    found = [np.ones(2)]
    for _ in range(STEPS):
        found.append(found[-1] - 0.019 * gradient(found[-1]))
    return found


def adamw():
    found, m, v = [np.ones(2)], 0.0, 0.0
    for t in range(1, STEPS + 1):
        g = gradient(found[-1])
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        step = m / (1 - 0.9 ** t) / (np.sqrt(v / (1 - 0.95 ** t)) + 1e-8)
        found.append(found[-1] - 0.02 * step)
    return found


def bowl(title, left, kind, dot, path):
    """The plane: p1 to the right from 0 to 1.1, p0 up from -1 to 1"""
    def at(p):
        return left + 210 * p[1], MIDDLE - 80 * p[0]

    parts = [text(left, 24, title, "bold", "start")]
    for loss in (0.05, 0.2, 0.5):            # lines of equal loss: ellipses
        wide, high = math.sqrt(2 * loss), math.sqrt(loss / 50)
        ring = [at((high * math.sin(a / 20 * math.pi), wide * math.cos(a / 20 * math.pi)))
                for a in range(-10, 11)]
        parts.append(curve(ring, "line"))
    parts += [line(*at((0, 0)), *at((0, 1.15)), dashed=True), curve([at(p) for p in path], kind)]
    parts += [circle(*at(p), 2.5, dot) for p in path[::5]]
    x, y = at(path[-1])
    return [*parts, circle(*at((0, 0)), 4, "c"), text(at((0, 0))[0] - 8, MIDDLE + 4, "0", "small",
                                                      "end"),
            text(at((1, 1))[0] + 8, at((1, 1))[1] + 4, "start", "small", "start"),
            text(x + 6, y + 24, f"after {STEPS}: {path[-1][1]:.2f}", "small", "start")]


def picture():
    paths = descent(), adamw()
    parts = [part for (title, left, kind, dot), path in zip(COLUMNS, paths)
             for part in bowl(title, left, kind, dot, path)]
    flat = [path[-1][1] for path in paths]
    return svg(240, "Two parameters begin at (1, 1) in a bowl that is steep in one direction and "
               "flat in the other; the minimum is at 0. Gradient descent jumps from side to side "
               f"and is at {flat[0]:.2f} in the flat direction after {STEPS} steps. AdamW goes "
               f"straight and is at {flat[1]:.2f}.", *parts)
