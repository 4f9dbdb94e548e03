"""Loss curves of the logs that train, sft and dpo write: python nanoeuler.py plot LOG..."""
import string

import numpy as np

import nanoeuler as ne

LETTERS = string.ascii_letters               # a curve in the terminal


def read_curve(path, key):
    """[(step, value)] of the records of a log whose value is a number that can be drawn."""
    values = [(r["step"], r.get(key)) for r in ne.read_log(path)]
    return [(step, x) for step, x in values
            if 0 <= step < 1 << 53 and isinstance(x, float) and abs(x) < 1e9]


def plot(logs, out):
    """Loss curves of logs: a picture with matplotlib, without it characters in the terminal."""
    curves = {}                              # (path, key) -> (n, 2): step, bits per byte
    for path in logs:
        for key in ("bits_per_byte", "val_bits_per_byte"):
            points = read_curve(path, key)
            if points:
                curves[path, key] = np.array(points, float)
    if not curves:
        raise ne.UserError(f"no losses in {', '.join(logs)}; name a log that train wrote")
    points = np.concatenate(list(curves.values()))
    last_step = points[:, 0].max()
    low = points[:, 1].min()
    high = min(points[:, 1].max(), low + 3)  # the first steps would squeeze the rest into a line
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return plot_terminal(curves, last_step, low, high)
    figure = Figure(figsize=(8, 5))
    axes = figure.subplots()
    for (path, key), xy in curves.items():
        marker = "o" if key.startswith("val_") else None
        axes.plot(xy[:, 0], xy[:, 1], label=f"{path} {key}", marker=marker, linewidth=1)
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(low - 0.1, high))
    axes.legend(framealpha=1)                # PostScript has no transparency
    try:
        figure.savefig(out, dpi=120, bbox_inches="tight")
    except (ValueError, RuntimeError) as e:  # a format that it does not know, or not without TeX
        raise ne.UserError(f"{out}: {e}") from None
    print(f"wrote {out}")


def plot_terminal(curves, last_step, low, high, width=72, height=20):
    """One letter a curve; a column shows the mean of its steps."""
    if len(curves) > len(LETTERS):
        raise ne.UserError(f"{len(curves)} curves, over {len(LETTERS)} letters; name fewer logs, "
                           f"or install matplotlib for a picture")
    grid = np.full((height, width), " ")
    for letter, xy in zip(LETTERS, curves.values()):
        column = np.minimum(width - 1, xy[:, 0] / max(last_step, 1) * width).astype(int)
        for c in np.unique(column):
            mean = xy[column == c, 1].mean()
            row = (high - mean) / max(high - low, 1e-9) * (height - 1)
            grid[int(np.clip(np.rint(row), 0, height - 1)), c] = letter
    for i, row in enumerate(grid):
        value = high - (high - low) * i / (height - 1)
        print(f"{value:8.3f} |{''.join(row)}")
    print(f"bits/byte +{'-' * width}")
    first, last = "step 0", str(int(last_step))          # below the two ends of the line
    print(" " * len("bits/byte ") + first + last.rjust(width - len(first)))
    for letter, (path, key) in zip(LETTERS, curves):
        print(f"    {letter}  {path} {key}")
