"""Where two heads of the bundled model look, as grids: a row looks, and a column is looked at"""
import numpy as np
from shapes import box, svg, text

import nanoeuler as ne
from nanoeuler_parts.checkpoint.bundled import beside_program, SHIPPED

TEXT = "What is the capital of Norway? The capital of Norway is"
HEADS = ((3, 3, "layer 4, head 4: mostly the token before"),
         (6, 0, "layer 7, head 1: “is” looks at “way”"))
CELL, TOP = 14, 92


def weights_of(model, n, layer, h):
    """The weights (n, n) of one head, from the queries and keys that the model keeps"""
    size = ne.dims_of(model.cfg)
    rows = model.a.qkv[0, layer].reshape(n, -1, size.D).astype(float)
    scores = rows[:, h] @ rows[:, size.H + h * size.G // size.H].T / np.sqrt(size.D)
    scores[np.triu_indices(n, 1)] = -np.inf
    e = np.exp(scores - scores.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def grid(x, weights, words, caption):
    n = len(words)
    parts = [text(x + CELL * n / 2, 18, caption, "bold")]
    for i, word in enumerate(words):
        middle = x + CELL * (i + 0.5)
        parts.append(text(x - 6, TOP + CELL * i + 12, word, "small", "end"))
        parts.append(f'<g transform="translate({middle + 4:.1f} {TOP - 6}) rotate(-90)">'
                     + text(0, 0, word, "small", "start") + "</g>")
        for j in range(i + 1):
            left, top = x + CELL * j, TOP + CELL * i
            parts.append(box(left, top, CELL - 1, CELL - 1, "box", round=1))
            if weights[i, j] >= 0.02:
                parts.append(box(left, top, CELL - 1, CELL - 1, "a", weights[i, j], round=1))
    return "".join(parts)


def picture():
    c = ne.read_checkpoint(str(beside_program(SHIPPED)), moments=False)
    ids = c.tokenizer.encode(TEXT)
    words = [c.tokenizer.vocab[i].decode().strip() for i in ids]
    model = ne.Model(c.cfg, c.flat)
    model.logits(ids[None])
    grids = [grid(x, weights_of(model, len(ids), layer, h), words, caption)
             for x, (layer, h, caption) in zip((62, 432), HEADS)]
    bottom = TOP + CELL * len(ids) + 24
    return svg(bottom + 12, "Two grids of weights. In the first, the dark cells lie next to the "
               "diagonal: each token looks at the one before. In the second, the last row is "
               "dark in the columns of way, the ends of the two Norways.", *grids,
               text(360, bottom, "A row is a token that looks. A column is a token that it looks "
                    "at. Stronger color: more weight. Above the diagonal: the future.", "small"))
