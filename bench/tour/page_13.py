"""Which tokens are learned from a conversation, and which are computed to answer"""
from shapes import box, line, svg, text

ROLES = (("<|im_start|>", ""), ("user", ""), ("What", ""), ("is", ""), ("the", ""), ("sea", ""),
         ("?", ""), ("<|im_end|>", ""), ("<|im_start|>", ""), ("assistant", ""),
         ("Salt", "b"), ("water", "b"), (".", "b"), ("<|im_end|>", "b"))
LETTER, GAP = 6.3, 3         # width of a letter of the small monospaced font
PROMPT, ANSWER = 6, 6        # tokens of the grids
CELL = 13


def conversation(y):
    parts, x, learned = [], 18, None
    for word, kind in ROLES:
        width = LETTER * len(word) + 8
        if kind and learned is None:
            learned = x
        parts.append(box(x, y, width, 22))
        if kind:
            parts.append(box(x, y, width, 22, kind, opacity=0.35))
        parts.append(text(x + width / 2, y + 15, word, "mono small"))
        x += width + GAP
    end = x - GAP
    for start, stop, kind, words in ((18, learned - GAP, "line", "given: read, but never a target"),
                                     (learned, end, "bb", "the answer: learned")):
        parts.append(line(start, y + 29, stop, y + 29, kind))
        parts.append(text((start + stop) / 2, y + 46, words))
    return parts


def grid(x, y, title, calls, caption):
    """calls: for each call (cached, computed, drafts), numbers of tokens"""
    parts = [text(x + CELL * (PROMPT + ANSWER) / 2, y - 12, title, "bold")]
    for row, (cached, computed, drafts) in enumerate(calls):
        for column in range(cached + computed + drafts):
            place = x + CELL * column, y + CELL * row, CELL - 2, CELL - 2
            if column < cached:
                parts.append(box(*place, round=2))
            else:
                parts.append(box(*place, "a" if column < cached + computed else "b", round=2))
    parts.append(text(x + CELL * (PROMPT + ANSWER) / 2, y + CELL * (ANSWER + 1) + 18, caption))
    return parts


def picture():
    n = PROMPT + ANSWER
    naive = [(0, i, 0) for i in range(PROMPT, n + 1)]
    cached = [(0, PROMPT, 0), *((i, 1, 0) for i in range(PROMPT, n))]
    guessed = [(0, PROMPT, 0), (PROMPT, 1, 3), (PROMPT + 4, 1, 0), (PROMPT + 5, 1, 0)]
    parts = conversation(30)
    for x, title, calls in ((42, "compute everything each time", naive),
                            (282, "keep keys and values", cached),
                            (522, "and guess tokens", guessed)):
        work = sum(computed + drafts for _, computed, drafts in calls)
        parts += grid(x, 130, title, calls, f"{len(calls)} calls, {work} tokens")
    y = 268
    for x, kind, words in ((180, "a", "computed"), (300, "b", "guessed and confirmed"),
                           (490, "box", "from the cache")):
        parts += [box(x, y - 10, CELL - 2, CELL - 2, kind, round=2),
                  text(x + 18, y, words, "small", "start")]
    parts.append(text(360, 20, "one box per word here; real tokens are shorter", "small"))
    return svg(284, "A conversation as a row of tokens; only the answer and its end token are "
               "learned. Below, an answer of six tokens is computed in three ways: 63 tokens in 7 "
               "calls, 12 in 7 calls, and 12 in 4 calls.", *parts)
