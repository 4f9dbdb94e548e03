"""The whole model as one line of fourteen steps, and what it would say after each of them"""
from euler import TEXT, trajectory
from shapes import arrow, box, circle, curve, line, svg, text

STREAM, TOP, ZERO, HIGH = 118, 50, 268, 80       # heights of the stream, the boxes and the curve


def picture():
    found, vocab = trajectory()
    steps = [p for _, _, p in found]
    last = int(steps[-1].argmax())

    def x(i):
        return 90 + 38 * i

    parts = [text(x(0) - 46, STREAM - 14, "start: row", "small"),
             text(x(0) - 46, STREAM - 1, "of “is” in the", "small"),
             text(x(0) - 46, STREAM + 12, "embedding", "small"),
             arrow(x(0) - 6, STREAM, x(14) + 20, STREAM, "cb"),
             text(x(14) + 44, STREAM - 8, "output", "small"),
             text(x(14) + 44, STREAM + 5, "head:", "small"),
             text(x(14) + 44, STREAM + 20, "“O”", "bold")]
    for i in range(14):
        middle, kind = x(i) + 19, "ab" if i % 2 == 0 else "bb"
        parts += [box(middle - 15, TOP, 30, 30, "a" if i % 2 == 0 else "b"),
                  line(middle - 10, STREAM, middle - 10, TOP + 30, kind),
                  arrow(middle + 10, TOP + 30, middle + 10, STREAM - 7, kind),
                  circle(middle + 10, STREAM, 7, "box"),
                  text(middle + 10, STREAM + 4.5, "+", "small bold")]
        if i % 2 == 0:
            parts.append(text(x(i + 1), TOP - 10, f"layer {i // 2 + 1}", "small"))
    parts += [box(90, 8, 12, 12, "a"), box(330, 8, 12, 12, "b"),
              text(107, 19, "attention: looks at other tokens", "", "start"),
              text(347, 19, "SwiGLU: works on one token", "", "start"),
              text(360, STREAM + 38, "If the model stopped here, it would say:", "bold")]
    for i, p in enumerate(steps):
        word = vocab[int(p.argmax())].decode()
        parts.append(text(x(i), STREAM + 58, word.strip() or "space", "small"))
    points = [(x(i), ZERO - HIGH * p[last]) for i, p in enumerate(steps)]
    parts += [line(x(0), ZERO, x(14), ZERO), curve(points, "cb"),
              *(circle(*point, 3, "c") for point in points),
              text(x(14) + 10, ZERO - HIGH * steps[-1][last] + 5, f"{steps[-1][last]:.0%}",
                   "bold", "start"),
              text(x(14) + 10, ZERO + 4, "0%", "", "start"),
              text(x(5), ZERO - 14, "probability of “O”, the beginning of “Oslo”"),
              text(360, ZERO + 26, TEXT, "mono")]
    return svg(ZERO + 36, "A line runs from the embedding through seven layers to the output head. "
               "Each layer adds an attention step and a SwiGLU step to it. The probability of the "
               "answer stays near zero until the last layer, and ends at "
               f"{steps[-1][last]:.0%}.", *parts)
