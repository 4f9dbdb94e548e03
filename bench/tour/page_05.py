"""A table of logits as the product of two thin matrices, and embeddings of two numbers"""
import pathlib
import re

import numpy as np
from shapes import box, circle, line, svg, text

LETTERS = " abcdefghijklmnopqrstuvwxyz"
TEXT = pathlib.Path(__file__).resolve().parent.parent.parent / "data/shakespeare.txt"


def embeddings(size, n_steps=2000, lr=3):
    """E (27, size) after the training of page 5"""
    read = TEXT.read_text(encoding="utf-8")[:1_000_000].lower()
    ids = np.array([LETTERS.index(x) for x in re.sub("[^a-z]+", " ", read)])
    share = np.zeros((27, 27))
    np.add.at(share, (ids[:-1], ids[1:]), 1 / (len(ids) - 1))
    rng = np.random.default_rng(0)
    E, H = rng.normal(0, 0.5, (27, size)), rng.normal(0, 0.5, (27, size))
    for _ in range(n_steps):
        p = np.exp(E @ H.T)
        dZ = share.sum(1, keepdims=True) * p / p.sum(1, keepdims=True) - share
        E, H = E - lr * dZ @ H, H - lr * dZ.T @ E
    return E


def tables():
    parts = [text(20, 24, "logits of all pairs", "bold", "start"),
             box(30, 60, 135, 135, "a", 0.25), text(97, 132, "Z"),
             text(97, 215, "27 × 27 = 729 numbers", "small"), text(190, 132, "=", "bold"),
             box(215, 60, 20, 135, "a", 0.7), text(225, 50, "E"),
             box(250, 60, 135, 20, "b", 0.7), text(400, 75, "Hᵀ", anchor="start"),
             text(300, 132, "27 · 4 + 27 · 4", "small"), text(300, 150, "= 216 numbers", "small")]
    return [*parts, box(30, 100, 135, 5, "a"), box(215, 100, 20, 5, "a"),
            text(20, 236, "a row of E is used for all letters that follow", "small", "start")]


def plane():
    E = embeddings(2)
    left, right, top, bottom = 460, 700, 40, 200
    low, high = E.min(0), E.max(0)
    at = (E - low) / (high - low) * (right - left, top - bottom) + (left, bottom)
    parts = [text(450, 24, "embeddings of two numbers", "bold", "start"),
             line(left, bottom + 12, right, bottom + 12)]
    for letter, (x, y) in zip(LETTERS, at):
        vowel = letter in "aeiou"
        parts += [circle(x, y, 8, "c") if vowel else "",
                  text(x, y + 4, letter.replace(" ", "␣"), "small on" if vowel else "small")]
    return [*parts, text(575, 232, "red: a, e, i, o, u", "small")]


def picture():
    return svg(244, "Left: a table of 27 times 27 logits is the product of a matrix E of 27 rows "
               "with four numbers each and a matrix H of the same shape. Right: the letters in the "
               "plane of two numbers. The vowels a, e, i, o and u lie close together.",
               *tables(), *plane())
