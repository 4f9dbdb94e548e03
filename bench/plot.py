"""Loss curves of the logs that train, sft and dpo write: python nanoeuler.py plot LOG..."""
import math

import numpy as np

import nanoeuler as ne


def plot(logs, out):
    """Loss curves of logs: a picture with matplotlib, without it characters in the terminal."""
    curves = {}
    for path in logs:
        for key in ("bits_per_byte", "val_bits_per_byte"):
            xy = [(r["step"], r[key]) for r in ne.read_log(path)
                  if type(r.get(key)) is float and math.isfinite(r[key])]
            if xy:
                curves[f"{path} {key}"] = np.array(xy, float)
    if not curves:
        raise ne.UserError(f"no losses in {', '.join(logs)}; name a log that train wrote")
    every = np.concatenate(list(curves.values()))
    (x1, high), low = every.max(0), every[:, 1].min()
    high = min(high, low + 3)                # the first steps would squeeze the rest into a line
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return plot_terminal(curves, x1, low, high)
    figure = Figure(figsize=(8, 5))
    axes = figure.subplots()
    for name, xy in curves.items():
        axes.plot(*xy.T, label=name, marker="o" if "val" in name else None, linewidth=1)
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(low - 0.1, high))
    axes.legend()
    try:
        figure.savefig(out, dpi=120, bbox_inches="tight")
    except ValueError as e:                  # a format that it does not know
        raise ne.UserError(f"{out}: {e}") from None
    print(f"wrote {out}")


def plot_terminal(curves, x1, low, high, width=72, height=20):
    """One letter a curve; a column shows the mean of its steps."""
    grid = np.full((height, width), " ")
    for letter, xy in zip("abcdefghijklmnopqrstuvwxyz", curves.values()):
        column = np.minimum(width - 1, xy[:, 0] / max(x1, 1) * width).astype(int)
        for c in np.unique(column):
            y = (high - xy[column == c, 1].mean()) / max(high - low, 1e-9) * (height - 1)
            grid[int(np.clip(y, 0, height - 1)), c] = letter
    for i, row in enumerate(grid):
        print(f"{high - (high - low) * i / (height - 1):8.3f} |{''.join(row)}")
    print(f"bits/byte +{'-' * width}\n{'step 0':>16}{int(x1):>{width - 6}}")
    for letter, name in zip("abcdefghijklmnopqrstuvwxyz", curves):
        print(f"    {letter}  {name}")
