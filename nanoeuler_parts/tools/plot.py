"""The verb `plot`: draws the loss curves of logs, as a picture or in the terminal."""
import os
import string

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

def plot(logs, out, force=False):
    """`plot`: draws the curves with matplotlib, or as letters in the terminal if it is missing."""
    curves = {}                              # (path, key) -> (n, 2): step, bits per byte
    for path in logs:
        for key in ("bits_per_byte", "val_bits_per_byte"):
            points = read_curve(path, key)
            if points:
                curves[path, key] = np.array(points, float)
    if not curves:
        raise UserError(f"found no losses in {', '.join(logs)}; name the log of a training run")
    points = np.concatenate(list(curves.values()))
    last_step = points[:, 0].max()
    low = points[:, 1].min()
    high = min(points[:, 1].max(), low + 3)  # the first losses would flatten all others
    try:
        from matplotlib.figure import Figure
    except ImportError:
        note(f"{out} needs matplotlib (pip install matplotlib); drawing in the terminal "
             f"instead")
        return plot_terminal(curves, last_step, low, high)
    need_picture(out, logs, force)
    figure = Figure(figsize=(8, 5))
    axes = figure.subplots()
    for (path, key), xy in curves.items():
        marker = "o" if key.startswith("val_") else None
        axes.plot(xy[:, 0], xy[:, 1], label=f"{path} {key}", marker=marker, linewidth=1)
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(low - 0.1, high))
    axes.legend(framealpha=1)                # opaque, as PostScript cannot do transparency
    kind = os.path.splitext(out)[1][1:] or "png"         # as `savefig` chooses it
    out = out if os.path.splitext(out)[1] else f"{out}.png"
    try:
        with replacing(out, "free disk space, or choose another --out") as temporary:
            figure.savefig(temporary, format=kind, dpi=120, bbox_inches="tight")
    except (RuntimeError, ValueError) as e:  # an unknown format, or one that needs TeX
        raise e if isinstance(e, UserError) else UserError(f"{out}: {e}") from None
    print(f"wrote {printable(out)}")

def plot_terminal(curves, last_step, low, high, width=72, height=20):
    """Draws each curve with its own letter.  A column shows the mean of the steps it covers."""
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
    print(f"bits/byte +{'-' * width}")
    first, last = "step 0", str(int(last_step))          # below the two ends of the line
    print(" " * len("bits/byte ") + first + last.rjust(width - len(first)))
    for letter, (path, key) in zip(LETTERS, curves):
        print(f"    {letter}  {printable(path)} {key}")

def plot_verb(add):
    add(plot, arg("logs", nargs="*", default=["nanoeuler.jsonl"], help="training logs to plot"),
        out("loss.png"), FORCE)
