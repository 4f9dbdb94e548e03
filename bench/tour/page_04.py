"""Softmax minus one-hot for three tokens, and the loss of a table under gradient descent"""
import math

from shapes import arrow, box, circle, curve, line, svg, text

LOGITS, TRUE = (2.0, 1.0, 0.0), 1
# page 4: the loss after these steps of gradient descent, learning rate 50; and the counted table's
LOSSES = ((1, 3.000), (2, 2.826), (3, 2.723), (4, 2.655), (5, 2.608), (7, 2.545), (10, 2.487),
          (14, 2.442), (20, 2.406), (30, 2.376), (50, 2.351), (70, 2.339), (100, 2.330),
          (200, 2.318), (300, 2.314), (500, 2.311), (1000, 2.309))
COUNTED = 2.307


def prediction():
    total, parts = sum(map(math.exp, LOGITS)), [text(20, 24, "one prediction", "bold", "start")]
    base, unit = 170, 120
    parts.append(line(20, base, 320, base))
    for j, z in enumerate(LOGITS):
        p, x, truth = math.exp(z) / total, 50 + 95 * j, float(j == TRUE)
        at = 66 if truth else 40
        parts += [box(x, base - unit * p, 26, unit * p, "a", round=1),
                  text(x + 13, base - unit * p - 6, f"{p:.2f}", "small"),
                  box(x + 30, base - unit * truth, 26, unit * truth, "faint", 0.5, round=1)
                  if truth else "",
                  arrow(x + at, base - unit * p, x + at, base - unit * truth, "bb"),
                  text(x + 28, base + 19, f"{p - truth:+.2f}".replace("-", "−"), "mono")]
    parts += [text(20, base + 42, "blue: softmax. gray: the token that came.", "small", "start"),
              text(20, base + 58, "below: the gradient. arrows: where the steps lead", "small",
                   "start")]
    return parts


def descent():
    def x(step):
        return 410 + 90 * math.log10(step)

    def y(loss):
        return 170 - 160 * (loss - 2.2)

    points = [(x(step), y(loss)) for step, loss in LOSSES]
    parts = [text(390, 24, "loss of a table of 27 × 27 logits", "bold", "start"),
             line(400, 170, 690, 170), line(400, 36, 400, 170),
             line(400, y(COUNTED), 690, y(COUNTED), dashed=True), curve(points)]
    parts += [circle(px, py, 2.5) for px, py in points]
    parts += [text(x(step), 189, f"{step:,}", "small") for step in (1, 10, 100, 1000)]
    parts += [text(394, y(value) + 4, f"{value:.1f}", "small", "end") for value in (2.5, 3.0)]
    return [*parts, text(545, 212, "steps of gradient descent", "small"),
            text(406, y(COUNTED) + 13, "2.307, the counted table", "small", "start")]


def picture():
    return svg(238, "Left: softmax gives three tokens the probabilities 0.67, 0.24 and 0.09. The "
               "second one came. The gradient is 0.67, −0.76, 0.09: a step lowers the first and "
               "third and raises the second. Right: over 1,000 steps the loss falls from 3.0 to "
               "2.309; the counted table has 2.307.", *prediction(), *descent())
