"""The two trajectories of a pass: states to the right, adjoints to the left, gradients between"""
from shapes import arrow, box, circle, line, svg, text

NAMES = ("attention", "SwiGLU", "attention", "SwiGLU")
FORWARD, BACKWARD, MIDDLE = 80, 240, 160


def picture():
    def x(i):
        return 80 + 132 * i

    parts = [text(20, 26, "forward: x[i+1] = x[i] + f(x[i])", "bold", "start"),
             text(20, BACKWARD + 58, "backward: d.x[i] = d.x[i+1] + the share of f", "bold",
                  "start"),
             box(680 - 25, FORWARD - 16, 60, 32, "box"), text(685, FORWARD + 5, "loss L"),
             arrow(x(4) + 18, FORWARD, 652, FORWARD, "ab"),
             line(685, FORWARD + 18, 685, BACKWARD, "cb"),
             arrow(685, BACKWARD, x(4) + 27, BACKWARD, "cb")]
    for i in range(5):
        parts += [circle(x(i), FORWARD, 17, "a"), circle(x(i), BACKWARD, 24, "c"),
                  text(x(i), FORWARD + 4, f"x[{i}]", "on small"),
                  text(x(i), BACKWARD + 4, f"d.x[{i}]", "on small")]
    for i, name in enumerate(NAMES):
        middle = x(i) + 66
        parts += [arrow(x(i) + 18, FORWARD, x(i + 1) - 20, FORWARD, "ab"),
                  text(middle, FORWARD - 10, name, "small"),
                  arrow(x(i + 1) - 25, BACKWARD, x(i) + 27, BACKWARD, "cb"),
                  text(middle, BACKWARD + 20, name, "small"),
                  box(middle - 42, MIDDLE - 20, 84, 40, "box"),
                  text(middle, MIDDLE - 4, "gradients of", "small"),
                  text(middle, MIDDLE + 11, "its parameters", "small"),
                  arrow(x(i) + 12, FORWARD + 14, middle - 20, MIDDLE - 23, "ab"),
                  arrow(x(i + 1) - 16, BACKWARD - 20, middle + 20, MIDDLE + 23, "cb")]
    return svg(BACKWARD + 72, "Above, arrows lead from x[0] through four steps to the loss. Below, "
               "arrows lead back from the loss through the same steps. Between them, each step "
               "gets the gradients of its parameters from its stored input and the gradient of "
               "its result.", *parts)
