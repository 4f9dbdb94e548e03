"""The tables of what bench_gpu.py measured.

    python bench/gpu_report.py bench/results/gpu_h200.json
"""
import json
import math
import pathlib
import sys

TITLES = {"NanoEuler": "NanoEuler", "eager": "PyTorch eager", "compile": "torch.compile",
          "graph": "torch.compile, the step in one CUDA graph",
          "cudnn": "torch.compile, cuDNN attention",
          "bf16-residual": "torch.compile, bfloat16 residual stream",
          "reduce-overhead": "torch.compile, reduce-overhead",
          "max-autotune": "torch.compile, max-autotune-no-cudagraphs"}


def ms(x):
    """Median (lowest - highest), with as many digits as a short time needs."""
    digits = 1
    if x["ms"] < 10:
        digits = 3
    if x["ms"] < 0.1:
        digits = 4
    return f"{x['ms']:.{digits}f} ({x['low']:.{digits}f} - {x['high']:.{digits}f})"

def gib(size):
    return f"{size / 2**30:.1f}"

def good(rows):
    """The rows that were measured."""
    return {name: r for name, r in rows.items() if "failed" not in r and "skipped" not in r}

def bad(rows):
    """A line for each of the others."""
    return [f"- {name}: {kind}: {r[kind]}" for name, r in rows.items()
            for kind in ("failed", "skipped") if kind in r]

def noted(rows):
    """Notes, each once, with the rows that have it."""
    found = {}                               # (what, text) -> names of rows
    for name, r in rows.items():
        for what, text in r.get("notes", {}).items():
            found.setdefault((what, text), []).append(name)
    lines = []
    for (what, text), names in found.items():
        where = "all" if len(names) == len(rows) else ", ".join(names)
        lines.append(f"- {what}: {text} ({where})")
    return lines

def plain(times):
    """The peer's time for the product alone."""
    return times["cuBLAS"]["ms"]

def equal_work(times):
    """The peer's time for the work that ours does.  Ours adds dW to a float32 sum as it goes: of
    cuBLAS's ways to do that the faster one counts; other products have no sum."""
    sums = [v["ms"] for name, v in times.items() if name.startswith("cuBLAS, ")]
    return min(sums) if sums else plain(times)

def weighted(rows, side, peer):
    """Time of all products of a step, the peer's over the side's; None if there is none.

    peer: plain or equal_work"""
    rows = [r for r in rows.values() if r["count"] and side in r["times"]]
    if not rows:
        return None
    mine = sum(r["count"] * r["times"][side]["ms"] for r in rows)
    theirs = sum(r["count"] * peer(r["times"]) for r in rows)
    return theirs / mine

def matmul_table(rows):
    out = ["| product, times a step | M x N x K | NanoEuler, ms | TFLOP/s | cuBLAS, ms | TFLOP/s "
           "| speed against it | with the float32 sum | mma.sync | difference |",
           "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"]

    def tera(r, side):
        return f"{r['flop'] / r['times'][side]['ms'] / 1e9:.0f}"

    for name, r in good(rows).items():
        t = r["times"]
        count = f", {r['count']:g}" if r["count"] else ""
        sums = f"{equal_work(t) / t['ours']['ms']:.2f}" if r["kind"] == "dW" else ""
        mma = f"{t['cuBLAS']['ms'] / t['mma']['ms']:.2f}" if "mma" in t else ""
        out.append(f"| {name}{count} | {' x '.join(map(str, r['shape']))} | {ms(t['ours'])} | "
                   f"{tera(r, 'ours')} | {ms(t['cuBLAS'])} | {tera(r, 'cuBLAS')} | "
                   f"{t['cuBLAS']['ms'] / t['ours']['ms']:.2f} | {sums} | {mma} | "
                   f"{r['difference']:.1e}{'' if r['difference'] < 1e-2 else ' **wrong**'} |")
    missing = [name for name, r in rows.items() if name not in good(rows)]
    for side, name in (("ours", "NanoEuler"), ("mma", "mma.sync")):
        product, with_sum = (weighted(good(rows), side, peer) for peer in (plain, equal_work))
        if product:
            out += ["", f"All products of a step, each as often as it occurs: {name} runs at "
                    f"{product:.3f} of cuBLAS's speed where cuBLAS leaves dW a bfloat16 product, "
                    f"at {with_sum:.3f} where it sums dW into float32 too, its faster way"
                    + (f"; without {', '.join(missing)}" if missing else "") + "."]
    return out + ["", "Difference: |ours - cuBLAS| / |cuBLAS|."]

def attention_table(rows):
    names = {"ours": "NanoEuler", "flash": "FlashAttention-2", "cudnn": "cuDNN"}
    out = ["| batch x T, pass | " + " | ".join(f"{n}, ms | TFLOP/s" for n in names.values())
           + " | speed against FA-2 | against cuDNN |", "|---|" + "---:|" * 8]
    for name, r in good(rows).items():
        forward, backward = r["forward"], r["backward"]
        both = {side: {"ms": forward[side]["ms"] + backward[side]["ms"]}
                for side in forward if side in backward}
        # flop of a pass, in units of the forward's
        for what, times, factor in (("forward", forward, 1), ("backward", backward, 2.5),
                                    ("both", both, 3.5)):
            cells = []
            for side in names:
                if side not in times:
                    cells.append("- | -")
                    continue
                t = times[side]
                shown = ms(t) if "low" in t else f"{t['ms']:.3f}"
                cells.append(f"{shown} | {factor * r['flop'] / t['ms'] / 1e9:.0f}")
            for side in ("flash", "cudnn"):
                ratio = "-"
                if side in times:
                    ratio = f"{times[side]['ms'] / times['ours']['ms']:.2f}"
                cells.append(ratio)
            out.append(f"| {name} {what} | " + " | ".join(cells) + " |")
    return out + ["", "12 query heads, 4 key and value heads of size 64, causal.  2 B H T^2 D flop "
                  "forward, 2.5 times that backward.  Differences: |ours - theirs| / |theirs| of "
                  "the output, of the gradients."]

def kernel_table(rows, ceiling):
    copy = good(ceiling).get("copy")
    rate = copy["bytes"] / copy["ms"] / 1e6 if copy else math.nan
    out = ["| kernel | MB a call | ms | GB/s | of the copy's rate |", "|---|---:|---:|---:|---:|"]
    for name, r in good(rows).items():
        speed = r["bytes"] / r["ms"] / 1e6
        out.append(f"| {name} | {r['bytes'] / 1e6:.1f} | {ms(r)} | {speed:,.0f} | "
                   f"{speed / rate:.0%} |")
    return out

def step_table(r, results):
    peak = results["machine"]["peak_flops"]
    square = good(results["ceiling"]).get("matmul")      # 8192^3
    top = square["flop"] / square["ms"] * 1e3 if square else math.nan
    out = ["| | ms a step | tokens/s | model TFLOP/s | MFU | of 8192^3 | peak memory, GiB | ready "
           "after, s |", "|---|---:|---:|---:|---:|---:|---:|---:|"]
    for name, t in r["times"].items():
        speed = r["flop"] / t["ms"] * 1e3    # flop/s
        f = r["facts"][name]
        memory = f["driver"] if name == "NanoEuler" else f["allocated"]
        mfu = f"{speed / peak:.1%}" if peak else "-"
        out.append(f"| {TITLES.get(name, name)} | {ms(t)} | {1e3 * r['tokens'] / t['ms']:,.0f} | "
                   f"{speed / 1e12:.0f} | {mfu} | {speed / top:.1%} | {gib(memory)} | "
                   f"{f['first_s']:.1f} |")
    peers = {name: t["ms"] for name, t in r["times"].items() if name != "NanoEuler"}
    if peers and "NanoEuler" in r["times"]:
        best = min(peers, key=peers.get)
        # the graph uses the parameters and moments of the row before it: its memory is without them
        whole = "compile" if best == "graph" and "compile" in r["facts"] else best
        mine, their = r["facts"]["NanoEuler"], r["facts"][whole]
        # the graph goes on where another one ended: it has no first step of its own
        others = [f for name, f in r["facts"].items() if name not in ("NanoEuler", "graph")]
        gaps = [abs(mine["losses"][0] / f["losses"][0] - 1) for f in others]
        out += ["", f"Against the best of them, {TITLES.get(best, best)}: "
                f"**{peers[best] / r['times']['NanoEuler']['ms']:.2f}** of its speed, "
                f"{mine['driver'] / (their['allocated'] or math.nan):.2f} of "
                f"{'its memory' if whole == best else f'the memory of {TITLES[whole]}'}.  "
                f"NanoEuler's buffers add up to {gib(r['buffers'])} GiB, the driver misses "
                f"{gib(mine['driver'])} GiB; torch allocated {gib(their['allocated'])} GiB at "
                f"most, and reserved {gib(their['reserved'])} GiB.  The loss of the first "
                f"step is within {max(gaps, default=math.nan):.1e} of theirs."]
    return out

def ablation_table(rows, results):
    measured = good(rows)
    base = measured.get("as it is", {}).get("ms", math.nan)
    step = good(results.get("step", {})).get("base, 64 x 512", {"times": {}})
    peers = [t["ms"] for name, t in step["times"].items() if name not in ("NanoEuler", "eager")]
    out = ["| base preset, bfloat16 | ms a step | tokens/s | against the first row | against "
           "torch.compile | GiB, buffers | GiB, driver |", "|---|---:|---:|---:|---:|---:|---:|"]
    for name, r in measured.items():
        peer = ""
        if peers and " x " not in name:      # a row with another B x T has no peer
            peer = f"{min(peers) / r['ms']:.2f}"
        out.append(f"| {name} | {ms(r)} | {1e3 * r['tokens'] / r['ms']:,.0f} | "
                   f"{base / r['ms']:.2f} | {peer} | {gib(r['buffers'])} | "
                   f"{gib(r['driver'])} |")
    return out + ["", "64 x 512 unless a row says otherwise; all have 32,768 tokens a step.  The T "
                  "x T matrices of naive attention are multiplied by the portable kernels; "
                  "gpu_proof.md compares it in float32, where all products are."]

def decode_table(rows):
    out = ["| | ms a token | tokens/s |", "|---|---:|---:|"]
    return out + [f"| {name} | {ms(t)} | {1e3 / t['ms']:,.0f} |" for r in good(rows).values()
                  for name, t in r["times"].items()]

def markdown(results):
    m = results["machine"]
    results = {"ceiling": {}, **results}
    ceiling = good(results["ceiling"])
    peak = m["peak_flops"]
    how = "Medians, in brackets the lowest and the highest of the rounds"
    if peak:
        how += (f"; the sides take turns.  MFU is against {peak / 1e12:.0f} TFLOP/s, dense "
                f"bfloat16 by data sheet")
    out = [f"## {m['device']}, driver {m['driver']}", "",
           f"{', '.join(f'{k} {v}' for k, v in m['versions'].items())}; commit {m['commit']}; "
           f"{m['date']}.", "",
           f"{how}."]
    if "copy" in ceiling:
        r = ceiling["copy"]
        out += ["", f"- memory: {r['bytes'] / r['ms'] / 1e6:,.0f} GB/s, read and "
                f"written together"]
    if "matmul" in ceiling:
        r = ceiling["matmul"]
        out += [f"- cuBLAS, 8192^3, bfloat16, back to back: {r['flop'] / r['ms'] / 1e9:.0f} "
                f"TFLOP/s"]
    out += bad(results["ceiling"])

    def add(group, title, table, *more):
        rows = results.get(group)
        if rows:
            out.extend(["", f"### {title}", "", *table(rows, *more), *tail(rows)])

    add("matmul", "Matrix products of a base step, 64 x 512", matmul_table)
    add("attention", "Attention", attention_table)
    add("kernels", "Kernels that wait for memory, base step, 64 x 512", kernel_table, ceiling)
    for name, r in results.get("step", {}).items():
        out += ["", f"### Training step, {name}", ""]
        if good({name: r}):
            out += step_table(r, results)
        out += tail({name: r})
    add("ablation", "Without one of its parts", ablation_table, results)
    add("decode", "Decoding, batch 1, base preset, whole contexts", decode_table)
    return "\n".join(out) + "\n"

def tail(rows):
    lines = bad(rows) + noted(good(rows))
    return ["", *lines] if lines else []

if __name__ == "__main__":
    print(markdown(json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))), end="")
