"""Eight answers and their advantages; a run with a good reward, and one whose reward is hacked"""
from shapes import box, curve, line, svg, text

WRONG = "black, division, screen, early, early, lift"
GOOD = "black, division, round, screen, early, lift"
ANSWERS = [(GOOD if right else WRONG, right) for right in (0, 0, 0, 1, 0, 1, 1, 0)]
# (step, held-out reward) in the logs of the two runs of the page
RIGHT = [(0, 0.125), (16, 0.938), (32, 0.984), (48, 0.974)]
WORDS = [(0, 5.98), (20, 18.547), (40, 24.329)]


def answers(x, y):
    mean = sum(reward for _, reward in ANSWERS) / len(ANSWERS)
    parts = [text(x, y, "eight answers to one question", "bold", "start"),
             text(x + 330, y, "reward", "bold"), text(x + 500, y, "reward - mean", "bold")]
    zero = x + 470
    parts.append(line(zero, y + 8, zero, y + 8 + 19 * len(ANSWERS)))
    for i, (words, reward) in enumerate(ANSWERS):
        top, advantage = y + 10 + 19 * i, reward - mean
        parts.append(text(x, top + 13, words, "mono small", "start"))
        parts.append(text(x + 330, top + 13, reward, "mono"))
        width = 110 * abs(advantage)
        left = zero if advantage > 0 else zero - width
        parts.append(box(left, top + 3, width, 12, "a" if advantage > 0 else "c", round=2))
        parts.append(text(zero + (width + 26 if advantage > 0 else 26), top + 13,
                          f"{advantage:+.2f}", "small"))
    return parts


def plot(x, y, title, points, most, shown, kind):
    """The held-out reward over the steps.     shown: a reward as text"""
    width, height, last = 270, 110, points[-1][0]
    parts = [text(x + width / 2, y - 12, title, "bold"), line(x, y, x, y + height),
             line(x, y + height, x + width, y + height)]
    places = [(x + width * step / last, y + height * (1 - value / most)) for step, value in points]
    parts.append(curve(places, kind))
    for (px, py), (step, value) in zip(places, points):
        parts.append(text(px, py - 7, shown(value), "small"))
        parts.append(text(px, y + height + 16, step, "small"))
    parts.append(text(x + width / 2, y + height + 32, "step", "small"))
    return parts


def picture():
    parts = answers(40, 24)
    parts += plot(50, 240, "reward: is the answer right?", RIGHT, 1.1,
                  lambda value: f"{100 * value:.0f}%", "ab")
    parts += plot(400, 240, "reward: the number of words", WORDS, 1.1 * max(y for _, y in WORDS),
                  lambda value: f"{value:.1f}", "cb")
    return svg(392, "Above, eight answers of which three are right: their rewards, and their "
               "advantages of 0.62 and -0.38. Below, two runs: the share of right answers rises "
               "in one, and the number of words in the other.", *parts)
