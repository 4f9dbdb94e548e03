"""What the sides of bench/twin.py say, one beside the other: read, measured, judged and told."""
import json
import math
import pathlib
import re

import numpy as np

import nanoeuler as ne
from nanoeuler_parts.files.logs import read_log
from pipeline import KINDS

LOSS_BAR = 5e-3                              # nats
POINTS_BAR = 3                               # points
END_BAR = 0.5                                # percent


def difference(ours, theirs):
    """Of two curves: how far apart they are, and where they end (means of the last tenth)."""
    x = np.array([r["loss"] for r in ours])
    y = np.array([r["loss"] for r in theirs])
    d = np.abs(x - y)
    last = max(1, len(x) // 10)
    n = min(50, len(x))
    return dict(first_50=d[:50].max(), largest=d.max(), at_step=int(d.argmax()) + 1,
                mean=d.mean(), above=int((d > LOSS_BAR).sum()),
                smooth=np.abs(np.convolve(y - x, np.ones(n) / n, "valid")).max(),
                tenths=[float(part.max()) for part in np.array_split(d, 10) if len(part)],
                end=y[-last:].mean(), end_percent=100 * (y[-last:].mean() / x[-last:].mean() - 1),
                norm=max(abs(b["norm"] / a["norm"] - 1) for a, b in zip(ours, theirs)))


def pair_measures(name, pairs):
    """Of pairs [is it skill, gap before training, gap after]; none of an empty list."""
    out = {}
    for column, when in ((1, ", before"), (2, "")):
        if pairs:
            gap = [pair[column] for pair in pairs]
            out[f"prefers{name}{when}"] = [sum(x > 0 for x in gap), len(gap)]
            out[f"gap{name}{when}"] = sum(gap) / len(gap)
    return out


def answer_measures(path, records):
    def exact(part):
        return [sum(r["reply"] == r["key"] for r in part), len(part)]

    skill = [r for r in records if r["skill"]]
    out = {f"exact, skill, {path}": exact(skill)}
    for kind in KINDS:
        of_kind = [r for r in skill if r["kind"] == kind]
        if of_kind:
            out[f"exact, {kind}, {path}"] = exact(of_kind)
    out[f"replies that end, {path}"] = [sum(r["ended"] for r in records), len(records)]
    asked_twice = [r for r in skill if "own" in r]
    if asked_twice:
        out[f"our own decoder replies the same, {path}"] = [
            sum(r["own"] == r["reply"] for r in asked_twice), len(asked_twice)]
    return out


def measures(log):
    """name -> a number, or [k, n] for k of n, of what is held out."""
    out = {}
    for record in log:
        for name, value in record.items():
            if name.startswith("val_"):
                out[name] = value            # the last of each stays
    end = log[-1]["end"]
    for path, pairs in end.get("pairs", {}).items():
        if path == "unseen":                 # all of them are of skill
            out |= pair_measures(", unseen", pairs)
        else:
            out |= pair_measures("", pairs)
            out |= pair_measures(", skill", [pair for pair in pairs if pair[0]])
    for path, records in end.get("answers", {}).items():
        out |= answer_measures(path, records)
    return out


def same_replies(a, b):
    """path -> [replies that are the same, all], of what two sides end with"""
    out = {}
    for path, records in a.get("answers", {}).items():
        pairs = list(zip(records, b["answers"][path]))
        out[path] = [sum(x["reply"] == y["reply"] for x, y in pairs), len(pairs)]
    return out


def asked(log):
    """(pairs or answers, path) -> how many there are, of what a side ends with"""
    return {(what, path): len(rows) for what, sets in log[-1]["end"].items()
            for path, rows in sets.items()}


def read_sides(folder):
    """side -> its log, which ends with a record of its own; ours first, then the twin."""
    order = {"ours": 0, "twin": 1}
    sides = {}
    for path in sorted(folder.glob("*.jsonl"), key=lambda p: (order.get(p.stem, 2), p.stem)):
        log = read_log(path)
        ne.need(log and "end" in log[-1],
                f"{path} is not complete; run --half {path.stem} again")
        sides[path.stem] = log
    ne.need("ours" in sides, f"{folder} has no ours.jsonl; run --half ours first")
    for side, log in sides.items():
        if side != "lockstep":               # which is asked nothing
            differ = asked(log).items() ^ asked(sides["ours"]).items()
            names = sorted({f"{path} ({what})" for (what, path), _ in differ})
            ne.need(not names, f"{folder}: {side} and ours were not asked the same of "
                    f"{', '.join(names)}; run --half {side} with ours' --data, --test and --unseen")
    return sides


def percent(counted):
    k, n = counted
    return 100 * k / max(1, n)               # no such question: no point lost


def is_counted(name):
    """Whether a measure is [k, n], of what a side can do after training."""
    return name.startswith(("exact", "prefers")) and "before" not in name


def repeated(folders):
    """name -> [(ours, the twin's) of each folder, in points], of what is counted at the end."""
    out = {}
    for folder in folders:
        sides = read_sides(folder)
        ne.need("twin" in sides, f"{folder} has no twin.jsonl; run --half twin first")
        ours = {name: x for name, x in measures(sides["ours"]).items() if is_counted(name)}
        twin = measures(sides["twin"])
        ne.need(not out or ours.keys() == out.keys(), f"{folder} and {folders[0]} were not asked "
                f"the same; run both with the same --data, --test and --unseen")
        for name, x in ours.items():
            out.setdefault(name, []).append((percent(x), percent(twin[name])))
    return out


def lockstep_figures(ours, steps):
    """Of the steps that the twin took as well: how far apart one step takes them."""
    apart = [record["apart"] for record in steps if record["apart"]]
    return dict(same=[r["loss"] for r in steps] == [r["loss"] for r in ours], checked=len(apart),
                apart={name: dict(largest=max(x[name] for x in apart),
                                  mean=np.mean([x[name] for x in apart]))
                       for name in apart[0]})


def compare(args):
    sides = read_sides(args.folder[0])
    ends = {name: log[-1] for name, log in sides.items()}
    steps = {name: [r for r in log if "loss" in r] for name, log in sides.items()}
    ours = steps["ours"]
    for name, log in steps.items():
        same = [(r["step"], r["lr"]) for r in log] == [(r["step"], r["lr"]) for r in ours]
        ne.need(same, f"{name} has another schedule than ours: {len(log)} and {len(ours)} steps; "
                f"run --half {name} again")
    about = {k: ends["ours"][k] for k in ("parameters", "B", "T", "lr", "data", "start",
                                          "machine", "cores", "versions", "commit")}
    r = dict(stage=args.stage, steps=len(ours), about=about, sides={},
             loss_end=difference(ours, ours)["end"])
    curves = {"ours": [round(x["loss"], 6) for x in ours]}
    for name, end in ends.items():
        side = dict(device=end["device"], minutes=end["minutes"], commit=end["commit"],
                    command=end["command"], held_out=measures(sides[name]))
        if name == "lockstep":
            side |= lockstep_figures(ours, steps[name])
        elif name != "ours":
            side |= difference(ours, steps[name])
            side["same_replies"] = same_replies(ends["ours"]["end"], end["end"])
            curves[f"{name} - ours"] = [float(f"{y['loss'] - x['loss']:.2g}")
                                        for x, y in zip(ours, steps[name])]
        r["sides"][name] = side
    if len(args.folder) > 1:
        r["runs"] = repeated(args.folder)
    r["curves"] = curves
    text = re.sub(r"\n {3,}", " ", json.dumps(r, indent=1))     # deeper levels on one line
    pathlib.Path(f"{args.out}.json").write_text(text + "\n", "utf-8")
    pathlib.Path(f"{args.out}.md").write_text(table(r), "utf-8")
    print(table(r))


def cell(x):
    return f"{x[0]} of {x[1]}" if isinstance(x, list) else f"{x:.5f}"


def table(r):
    a = r["about"]
    sides = {k: v for k, v in r["sides"].items() if k != "lockstep"}
    others = {k: v for k, v in sides.items() if k != "ours"}
    out = [f"## {r['stage']}: the engine beside its PyTorch twin", "",
           f"{a['parameters']:,} parameters, {r['steps']:,} steps of {a['B']} x {a['T']} tokens, "
           f"lr {a['lr']:.2g}, {a['data']}, from {a['start']}.",
           f"{a['machine']}, {a['cores']} cores; {a['versions']}; commit {a['commit']}.", ""]
    out += [f"- {name}: {v['device']}; `{v['command']}`" for name, v in r["sides"].items()]
    out += ["", "| loss, difference from ours | first 50 steps | all | at step | mean | "
            f"steps above {LOSS_BAR:g} | means of 50 steps | gradient norm, relative |",
            "|---|" + "---:|" * 7]
    for name, v in others.items():
        out.append(f"| {name} | {v['first_50']:.1e} | {v['largest']:.1e} | {v['at_step']} | "
                   f"{v['mean']:.1e} | {v['above']} | {v['smooth']:.1e} | {v['norm']:.1e} |")
    out += ["", "Largest difference in each tenth of the steps:", ""]
    out += [f"- {name}: " + ", ".join(f"{x:.0e}" for x in v["tenths"])
            for name, v in others.items()]
    out += ["", f"Loss over the last tenth of the steps: ours {r['loss_end']:.4f}; " + ", ".join(
        f"{name} {v['end']:.4f} ({v['end_percent']:+.3f} %)" for name, v in others.items()) + "."]
    v = r["sides"].get("lockstep")
    if v:
        run = "ours, bit for bit" if v["same"] else "a run that is not ours"
        out += ["", f"One step of the twin from the weights and moments of {run}, {v['checked']} "
                "times; differences relative to ours, largest and mean:", ""]
        out += [f"- {k}: {x['largest']:.1e}, {x['mean']:.1e}" for k, x in v["apart"].items()]
    out += ["", "| held out | " + " | ".join(sides) + " |", "|---|" + "---:|" * len(sides)]
    for name in r["sides"]["ours"]["held_out"]:
        row = [v["held_out"].get(name) for v in sides.values()]
        out.append(f"| {name.removeprefix('val_').replace('_', ' ')} | " + " | ".join(
            "" if x is None else cell(x) for x in row) + " |")
    for name, v in others.items():
        for path, same in v["same_replies"].items():
            out += ["", f"{name} gives the reply that ours gives to {cell(same)} questions of "
                    f"{path}."]
    runs = r.get("runs")
    if runs:
        out += ["", f"{len(next(iter(runs.values())))} runs of each side, the first of them above, "
                "from the same weights; each pair has a seed, which orders the examples, and cuts, "
                "of its own.  Points, means with their standard errors:", "",
                "| held out | ours | twin | difference |", "|---|---:|---:|---:|"]
        for name, pairs in runs.items():
            ours, twin = np.array(pairs).T
            apart = ours - twin
            out.append(f"| {name.replace('_', ' ')} | "
                       f"{ours.mean():.1f} ± {standard_error(ours):.1f} | "
                       f"{twin.mean():.1f} ± {standard_error(twin):.1f} | "
                       f"{apart.mean():+.1f} ± {standard_error(apart):.1f} |")
    return "\n".join(out + [""] + verdicts(r)) + "\n"


def standard_error(x):
    """Of the mean."""
    return np.std(x, ddof=1) / math.sqrt(len(x))


def verdicts(r):
    """The bars of the twin, one a line."""
    twin = r["sides"].get("twin")
    if not twin:
        return []
    bf16 = "bf16" in twin["device"]          # each side rounds in its own way
    bars = []                                # (what, is it held?)
    if not bf16:
        bars.append((f"every step within {LOSS_BAR:g} of the twin's loss", twin["above"] == 0))
    if not bf16 or r["stage"] == "pretrain":
        bars.append((f"the loss of the last tenth within {END_BAR:g} % of the twin's",
                     abs(twin["end_percent"]) <= END_BAR))
    points = {}                              # name -> [(ours, the twin's)] of each run
    of = ""
    if r.get("runs"):
        points = r["runs"]
        of = f", mean of {len(next(iter(points.values())))} runs"
    else:
        for name, x in r["sides"]["ours"]["held_out"].items():
            if is_counted(name) and name.startswith(("prefers", "exact, skill")):
                points[name] = [(percent(x), percent(twin["held_out"][name]))]
    for name, pairs in points.items():
        apart = np.mean([ours - twins for ours, twins in pairs])
        bars.append((f"{name}{of}: within {POINTS_BAR} points, {apart:+.1f}",
                     abs(apart) <= POINTS_BAR))
    return [f"- {'held' if held else 'missed'}: {what}" for what, held in bars]
