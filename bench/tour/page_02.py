"""Four merges of byte-pair encoding on one sentence"""
from collections import Counter

from shapes import box, svg, text

SENTENCE, MERGES, CELL, LEFT = "the cat sat on the mat", 4, 24, 176


def merged(tokens, pair):
    out = []
    for token in tokens:
        if out and (out[-1], token) == pair:
            out[-1] += token
        else:
            out.append(token)
    return out


def row(y, tokens, new):
    parts, x = [], LEFT
    for token in tokens:
        width = CELL * len(token)
        parts.append(box(x + 1, y, width - 2, 24, "b" if token == new else "box",
                         0.35 if token == new else 1))
        parts += [text(x + CELL * (i + 0.5), y + 16, "·" if letter == " " else letter, "mono")
                  for i, letter in enumerate(token)]
        x += width
    return parts


def picture():
    tokens, parts = list(SENTENCE), []
    parts += [text(20, 36, "22 bytes", "bold", "start"), *row(20, tokens, None)]
    for i in range(MERGES):
        pairs = Counter(zip(tokens, tokens[1:]))
        pair = max(pairs, key=pairs.get)
        tokens, y = merged(tokens, pair), 56 + 36 * i
        left, right = (part.replace(" ", "·") for part in pair)
        parts += [text(20, y + 16, f"{left} + {right}", "mono", "start"),
                  text(112, y + 16, f"{pairs[pair]} times", "small", "start"),
                  *row(y, tokens, pair[0] + pair[1])]
    parts += [text(LEFT, 216, f"{len(tokens)} tokens are left. “·” is a space, a shaded token is "
                   "new.", "small", "start")]
    return svg(228, "The sentence the cat sat on the mat as 22 single bytes. Four merges follow: a "
               "and t become at, three times; t and h become th, twice; th and e become the; the "
               f"and the space become one token. {len(tokens)} tokens are left.", *parts)
