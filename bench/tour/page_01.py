"""The loop of a language model: tokens, the model, probabilities of the next token, a pick"""
from shapes import arrow, box, curve, svg, text

# The prompt of page 1 and what the bundled model predicts after it, at temperature 1
PROMPT = ("T", "ell", "·me", "·a", "·j", "oke", ".")
NEXT = (("Why", 0.531), ("What", 0.405), ("W", 0.035), ("How", 0.023), ("2,044 others", 0.006))


def chip(x, y, word, kind="box"):
    """A token in its frame, and where the next one begins"""
    width = 14 + 8 * len(word)
    return box(x, y, width, 26, kind) + text(x + width / 2, y + 17, word, "mono"), x + width + 4


def picture():
    parts, x = [text(20, 28, "the text so far, in tokens", "bold", "start")], 20
    for word in PROMPT:
        drawn, x = chip(x, 42, word)
        parts.append(drawn)
    parts += [text(20, 99, "“·” is a space", "small", "start"),
              box(20, 122, 60, 26, "bb"), text(50, 139, "?", "bold"),
              text(90, 139, "the next token", "small", "start")]
    parts += [arrow(x + 4, 55, 304, 55), box(308, 32, 130, 48),
              text(373, 52, "language model", "bold"),
              text(373, 69, "13.6 million numbers", "small"),
              arrow(442, 55, 466, 55)]
    parts.append(text(470, 28, "probability of each next token", "bold", "start"))
    for i, (word, p) in enumerate(NEXT):
        y, kind = 42 + 23 * i, "b" if i == 1 else "a"
        parts += [text(556, y + 13, word, "mono" if i < 4 else "small", "end"),
                  box(562, y, 180 * p, 17, kind, round=2),
                  text(568 + 180 * p, y + 13, f"{p:.1%}".replace("%", " %"), "small", "start")]
    parts += [curve([(590, 156), (590, 182), (50, 182)], "bb"), arrow(50, 182, 50, 151, "bb"),
              text(330, 174, "pick one at random, here “What”, and append it"),
              text(330, 200, "then ask the model again", "small")]
    return svg(212, "A loop. The tokens of the prompt, Tell me a joke, go into the language model. "
               "It gives a probability to each possible next token: Why 53.1 %, What 40.5 %, W "
               "3.5 %, How 2.3 %, all 2,044 others together 0.6 %. One of them is picked, appended "
               "to the text, and the model is asked again.", *parts)
