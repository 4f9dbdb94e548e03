"""The verb `plot`: draws the curves of logs, as a picture or in the terminal: losses, and of `rl`
rewards, lengths and the KL divergence."""
import os
import string
from typing import NamedTuple

import numpy as np

from bpe import note, printable, regular, UserError
from nanoeuler_parts.files.logs import read_log
from nanoeuler_parts.files.writing import need_another, refuse_overwrite, replacing
from nanoeuler_parts.flags import arg, FORCE, out

LETTERS = string.ascii_letters               # each stands for a curve in the terminal

def read_curve(path, key):
    """[(step, value)] of the records of a log whose value is a float of magnitude under 1e9."""
    values = [(r["step"], r.get(key)) for r in read_log(path)]
    return [(step, x) for step, x in values
            if 0 <= step < 1 << 53 and isinstance(x, float) and abs(x) < 1e9]

PICTURES = b"\x89PNG", b"<?xml", b"%PDF", b"%!PS"         # first bytes of a plot

def is_plot(path):
    """Did matplotlib write this file?  Its plots begin like a picture and name matplotlib in their
    first or last 4096 bytes.  An empty file counts as a plot."""
    with open(path, "rb", opener=regular) as f:
        size, first = os.fstat(f.fileno()).st_size, f.read(4096)
        f.seek(max(0, size - 4096))
        named = b"matplotlib" in (first + b" " + f.read()).lower()
    return not size or (first.startswith(PICTURES) and named)

def need_picture(out, logs, force):
    """Rejects an output file that would replace a log.  Without --force it also rejects one that
    would replace anything but a plot."""
    for path in logs:
        need_another(out, path)
    is_older_plot = os.path.isfile(out) and is_plot(out)
    refuse_overwrite(out, force or is_older_plot, "it is not a matplotlib plot; choose "
                     "another --out")

# (label of the axis, keys of its curves); of a log without rewards, only the first
PANELS = [("bits per byte", ("bits_per_byte", "val_bits_per_byte")),
          ("reward", ("reward", "val_reward")), ("tokens per answer", ("length", "val_length")),
          ("KL, nats per token", ("kl",)), ("share of groups with a signal", ("signal",))]

# The names of curves in a legend; others have that of their value in the log
CURVE_NAMES = {"bits_per_byte": "bits per byte", "val_bits_per_byte": "held-out bits per byte",
               "val_reward": "held-out reward", "length": "tokens per answer",
               "val_length": "held-out tokens per answer", "kl": "KL"}

def curve_name(path, key):
    return f"{path}: {CURVE_NAMES.get(key, key)}"

class Panel(NamedTuple):
    label: str
    curves: dict                             # (path, key) -> (n, 2): step, value
    low: float
    high: float

def panels_of(logs):
    """The Panels of these logs that have a curve"""
    learn_from_rewards = [path for path in logs if read_curve(path, "reward")]
    found = []
    for label, keys in PANELS:
        paths = logs if label == PANELS[0][0] else learn_from_rewards
        points = {(path, key): read_curve(path, key) for path in paths for key in keys}
        curves = {name: np.array(xy, float) for name, xy in points.items() if xy}
        if curves:
            y = np.concatenate(list(curves.values()))[:, 1]
            high = y.max()
            if label == PANELS[0][0]:        # the first losses would flatten all others
                high = min(high, y.min() + 3)
            found.append(Panel(label, curves, y.min(), high))
    return found

def plot(logs, out, force=False):
    """`plot`: draws the curves with matplotlib, or as letters in the terminal if it is missing."""
    panels = panels_of(logs)
    if not panels:
        raise UserError(f"found no losses in {', '.join(logs)}; name the log of a training run")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        note(f"{out} needs matplotlib (pip install matplotlib); drawing in the terminal "
             f"instead")
        for panel in panels:
            plot_terminal(panel, height=20 if len(panels) == 1 else 10)
        return
    need_picture(out, logs, force)
    short = {path: os.path.basename(path) for path in logs}       # a wide legend leaves less room
    shown = short if len({*short.values()}) == len(short) else {path: path for path in logs}
    figure = Figure(figsize=(8, 5 if len(panels) == 1 else 3 * len(panels)),
                    layout="constrained")
    for axes, panel in zip(figure.subplots(
            len(panels), squeeze=False, sharex=True)[:, 0], panels):
        for (path, key), xy in panel.curves.items():
            marker = "o" if key.startswith("val_") else None
            name = curve_name(shown[path], key)
            axes.plot(xy[:, 0], xy[:, 1], label=name, marker=marker, linewidth=1)
        axes.set(ylabel=panel.label)
        if panel.label == PANELS[0][0]:
            axes.set(ylim=(panel.low - 0.1, panel.high))
        # opaque, as PostScript cannot do transparency; above the axes, where no curve is
        axes.legend(framealpha=1, loc="lower left", bbox_to_anchor=(0, 1.01), borderaxespad=0)
    axes.set(xlabel="step")                  # of the lowest panel
    kind = os.path.splitext(out)[1][1:] or "png"         # as `savefig` chooses it
    out = out if os.path.splitext(out)[1] else f"{out}.png"
    try:
        with replacing(out, "free disk space, or choose another --out") as temporary:
            figure.savefig(temporary, format=kind, dpi=120, bbox_inches="tight")
    except (RuntimeError, ValueError) as e:  # an unknown format, or one that needs TeX
        raise e if isinstance(e, UserError) else UserError(f"{out}: {e}") from None
    print(f"wrote {printable(out)}")

def plot_terminal(panel, width=72, height=20):
    """Draws each curve with its own letter.  A column shows the mean of the steps it covers."""
    label, curves, low, high = panel
    last_step = max(xy[:, 0].max() for xy in curves.values())
    if len(curves) > len(LETTERS):
        raise UserError(f"expected at most {len(LETTERS)} curves in the terminal, found "
                        f"{len(curves)}; name fewer logs, or install matplotlib for a picture")
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
    print(f"{'bits/byte' if label == PANELS[0][0] else '':9} +{'-' * width}")
    first, last = "step 0", str(int(last_step))          # below the two ends of the line
    print(" " * len("bits/byte ") + first + last.rjust(width - len(first)))
    if label != PANELS[0][0]:
        print(f"    {label}")
    for letter, (path, key) in zip(LETTERS, curves):
        print(f"    {letter}  {printable(curve_name(path, key))}")

def plot_verb(add):
    add(plot, arg("logs", nargs="*", default=["nanoeuler.jsonl"], help="training logs to plot"),
        out("loss.png"), FORCE)
