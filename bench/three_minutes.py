"""What three minutes of two cores teach the small preset: ours, and the same model in PyTorch.

    python bench/three_minutes.py                all rows, one after the other, about 50 minutes
    python bench/three_minutes.py --rows ours nanogpt --minutes 1

ours      `nanoeuler.py train` as the README has it, one row a seed
old       `nanoeuler.py train --optimizer adamw --dtype f32`
adamw     tests/oracles/torch_peer.py, compiled, in float32 or bfloat16 autocast, whichever its
          first steps show to be faster; fused AdamW, warm-up of 50 steps, a cosine to 2 % of the
          rate over the minutes, decay 0.1; one row for each of four learning rates
muon      the same with torch.optim.Muon for the matrices of the layers, cosine to zero; four rates.
          Where bfloat16 is emulated, its products are in float32: they take a sixth of the time
start     the best of either once more, from the weights that `train` begins with
nanogpt   nanoGPT's CPU demo (nanogpt_demo.py), its schedule stretched to the minutes

All read data/shakespeare.txt, and all but nanoGPT's demo, which has characters, its 512 tokens in
the same batches.  The clock runs from the text to the end of the validation on the whole held-out
tail; compilation, ours and PyTorch's, is done before.  Every row is a process of its own.  On an
AMD CPU with AVX-512, where MKL would not use it, a preloaded stub says that the CPU is Intel's.
"""
import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from bench_cpu import build_stub, cpu_ticks, foreign_share
from common import cpu_model, out_folder, protocol, versions
from nanoeuler_parts.kernels import compile_kernels
from nanoeuler_parts.runs.options import TrainOptions
from nanoeuler_parts.runs.schedule import initial_params

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
ADAMW_RATES = 2e-3, 4e-3, 6e-3, 1e-2
MUON_RATES = 0.01, 0.02, 0.03, 0.05
ADAMW_BESIDE_MUON = 6e-3
KINDS = "ours", "old", "adamw", "muon", "start", "nanogpt"


# ---- rows, each in a process of its own
def ours(row, minutes):
    """`train`, from its log"""
    import nanoeuler as ne
    from nanoeuler_parts.files.logs import read_log
    old = ("--optimizer", "adamw", "--dtype", "f32") if row["kind"] == "old" else ()
    program = [sys.executable, str(ROOT / "nanoeuler.py"), "train", *old]
    compile_kernels("f32" if old else ne.DTYPE)
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "row.bin")
        subprocess.run([*program, "--seed", str(row["seed"]), "--minutes", str(minutes), "--out",
                        str(out)], check=True, stdout=sys.stderr)
        log = read_log(str(out.with_suffix(".jsonl")))
    ms = [r["ms"] for r in log if "ms" in r]
    return dict(steps=log[-1]["step"], bits_per_byte=log[-1]["val_bits_per_byte"],
                ms=statistics.median(ms))


def nanogpt(row, minutes):
    import nanogpt_demo
    import torch
    torch.set_num_threads(os.cpu_count())
    r = nanogpt_demo.train(str(ROOT / "data/shakespeare.txt"), minutes, 1337)
    return dict(steps=r["iterations"], bits_per_byte=r["val_bits_per_byte"])


def optimizers(model, row):
    """[(optimizer, its highest rate)]"""
    import torch
    layers = [p for p in model.blocks.parameters() if p.dim() == 2] if row["muon_lr"] else []
    of_muon = set(map(id, layers))
    rest = [p for p in model.parameters() if id(p) not in of_muon]
    groups = [dict(params=[p for p in rest if p.dim() == 2], weight_decay=0.1),
              dict(params=[p for p in rest if p.dim() < 2], weight_decay=0.0)]
    adamw = torch.optim.AdamW(groups, lr=row["lr"], betas=(0.9, 0.95), fused=True)
    if not layers:
        return [(adamw, row["lr"])]
    muon = torch.optim.Muon(layers, lr=row["muon_lr"], weight_decay=0.1, momentum=0.95)
    return [(adamw, row["lr"]), (muon, row["muon_lr"])]


def text():
    """(batches, windows and targets of the tail, its bytes), as `train` has them"""
    import nanoeuler as ne
    from nanoeuler_parts.files.texts import read_text, split_text
    cfg = ne.PRESETS["small"]
    train, val = split_text(read_text(str(ROOT / "data/shakespeare.txt")), 0.1)
    tokenizer = ne.bpe.train(bytes(train), cfg.vocab_size)
    tokens, tail = tokenizer.encode(train), tokenizer.encode(val)
    batches = ne.Batches(tokens, cfg.seq_len, cfg.n_mtp, 1)
    tail = ne.np.append(tokens[-1:], tail)
    x, targets = ne.windows(tail, range(0, len(tail) - 1, cfg.seq_len), cfg.seq_len, P=1)
    return batches, x, targets[0], len(val)


def peer(row, minutes, B=16):
    """The peer from its own start, or from that of `train`, until the minutes are over."""
    import torch
    from oracles import torch_peer

    import nanoeuler as ne
    torch.set_num_threads(os.cpu_count())
    cfg = ne.PRESETS["small"]
    batches, *_ = text()

    def made():
        model = torch_peer.Peer(torch_peer.peer_config(cfg), seed=1)
        if row["our_start"]:
            options = TrainOptions.chosen(
                optimizer="muon" if row["muon_lr"] else "adamw", dtype="f32")
            table = ne.param_table(cfg)
            model.load_numpy(ne.views(initial_params(cfg, options), table)._asdict())
        return model

    model = made()
    loss_of = torch.compile(model, fullgraph=True, dynamic=False)
    params = list(model.parameters())

    def step(i, opts, low):
        tokens, targets = (torch.from_numpy(x).long() for x in batches.take(i * B, B))
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = loss_of(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        return loss

    def nats(x, targets, low):
        """Summed CE of head 0, by the compiled trunk; x (n, T)"""
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=low):
            logits = head0(torch.from_numpy(x).long()).float()
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.from_numpy(targets).long().flatten(), ignore_index=-1,
            reduction="sum").item()

    head0 = torch.compile(lambda idx: torch.nn.functional.linear(
        model.trunk(idx), model.head0()), dynamic=False)
    pace = {}
    for low in (False, True):                # compiles, and shows which is faster
        opts = [opt for opt, _ in optimizers(model, row)][:1]
        for i in range(3):
            step(i, opts, low)
        times = []
        for i in range(10):
            began = time.perf_counter()
            step(i, opts, low)
            times.append(time.perf_counter() - began)
        pace[low] = statistics.median(times)
    low = pace[True] < pace[False]
    if not low:                              # of Muon's products, too
        torch.Tensor.bfloat16 = torch.Tensor.clone
    nats(ne.np.zeros((256, cfg.seq_len), ne.np.int32), ne.np.zeros((256, cfg.seq_len)), low)
    with torch.no_grad():
        for to, first in zip(params, made().parameters(), strict=True):
            to.copy_(first)

    times = []
    start = time.perf_counter()
    batches, x, targets, n_bytes = text()
    began = time.perf_counter()
    nats(x[:256], targets[:256], low)
    left_for_the_end = 1.1 * (time.perf_counter() - began) * len(x) / 256
    limit = 60 * minutes - left_for_the_end
    pairs, i, floor = optimizers(model, row), 0, 0.0 if row["muon_lr"] else 0.02
    opts = [opt for opt, _ in pairs]
    while (now := time.perf_counter() - start) < limit:
        share = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * now / limit))
        for opt, highest in pairs:
            for group in opt.param_groups:
                group["lr"] = highest * share * min(1.0, (i + 1) / 50)
        step(i, opts, low)
        times.append(time.perf_counter() - start - now)
        i += 1
    total = 0.0
    for b in range(0, len(x), 256):
        part, wanted = x[b:b + 256], targets[b:b + 256]
        missing = 256 - len(part)            # one shape, compiled once
        total += nats(ne.np.pad(part, ((0, missing), (0, 0))),
                      ne.np.pad(wanted, ((0, missing), (0, 0)), constant_values=-1), low)
    return dict(steps=i, bits_per_byte=total / math.log(2) / n_bytes,
                ms=1e3 * statistics.median(times), dtype="bfloat16" if low else "float32",
                minutes=(time.perf_counter() - start) / 60)


# ---- the table
def rows_of(kinds, seeds, adamw_rates, muon_rates):
    """The rows that do not depend on others."""
    rows = []
    for kind in kinds:
        if kind in ("ours", "old"):
            rows += [dict(kind=kind, seed=seed) for seed in (seeds if kind == "ours" else [1])]
        elif kind == "adamw":
            rows += [dict(kind=kind, lr=lr, muon_lr=0, our_start=False) for lr in adamw_rates]
        elif kind == "muon":
            rows += [dict(kind=kind, lr=ADAMW_BESIDE_MUON, muon_lr=x, our_start=False)
                     for x in muon_rates]
        elif kind == "nanogpt":
            rows.append(dict(kind=kind))
    return rows


def measured(row, minutes, environment):
    """The row with what came of it; how much of the CPU others took meanwhile, None if unknown."""
    before, began = cpu_ticks([os.getpid()]), time.perf_counter()
    command = [sys.executable, __file__, "--worker", json.dumps(row), "--minutes", str(minutes)]
    said = subprocess.run(command, env={**os.environ, **environment}, check=True,
                          stdout=subprocess.PIPE, text=True).stdout
    result = {**row, **json.loads(said), "wall": time.perf_counter() - began}
    result["others_share"] = foreign_share(before, cpu_ticks([os.getpid()]))
    print(name_of(result), result, file=sys.stderr, flush=True)
    return result


def name_of(r):
    if r["kind"] == "ours":
        return f"`nanoeuler.py train`, seed {r['seed']}"
    if r["kind"] == "old":
        return "`nanoeuler.py train --optimizer adamw --dtype f32`"
    if r["kind"] == "nanogpt":
        return "nanoGPT's CPU demo, schedule stretched"
    rates = f"torch.optim.Muon {r['muon_lr']:g}, AdamW" if r["muon_lr"] else "AdamW"
    return f"PyTorch, {rates} {r['lr']:g}" + (", from our start" if r["our_start"] else "")


def markdown(results):
    m = results["machine"]
    lines = [f"# {results['minutes']:g} minutes of the small preset", "",
             f"{m['cpu']} ({m['detail']}), {m['threads']} threads; "
             + ", ".join(f"{k} {v}" for k, v in m["versions"].items()) + f"; commit {m['commit']}.",
             "", "| run | steps | ms a step | held-out bits per byte |", "|---|---:|---:|---:|"]
    for r in results["rows"]:
        ms = f"{r['ms']:.0f}" if "ms" in r else ""
        note = f", {r['dtype']}" if "dtype" in r else ""
        lines.append(f"| {name_of(r)}{note} | {r['steps']:,} | {ms} | {r['bits_per_byte']:.4f} |")
    best = [r["bits_per_byte"] for r in results["rows"] if r["kind"] == "ours"]
    if best:
        lines += ["", f"Mean of ours: {statistics.mean(best):.4f}."]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=3.0, help="default 3")
    parser.add_argument("--rows", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="default 1 2 3")
    for name, rates in (("--adamw-rates", ADAMW_RATES), ("--muon-rates", MUON_RATES)):
        parser.add_argument(name, nargs="+", type=float, default=rates, help="default %(default)s")
    parser.add_argument("--out", default=str(out_folder() / "three_minutes"), help="without suffix")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        say, row = protocol(), json.loads(args.worker)
        run = dict(ours=ours, old=ours, nanogpt=nanogpt).get(row["kind"], peer)
        return say(run(row, args.minutes))
    git = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True,
                         text=True)
    cpu = cpu_model()
    results = dict(machine=dict(
        cpu=cpu.name, detail=cpu.detail, threads=os.cpu_count(), commit=git.stdout.strip(),
        versions=versions("numba", "llvmlite", "numpy", "torch")), minutes=args.minutes, rows=[])
    with tempfile.TemporaryDirectory() as folder:
        stub = build_stub(folder, cpu.facts)

        def add(row):
            preload = {"LD_PRELOAD": stub} if stub and "lr" in row else {}
            results["rows"].append(measured(row, args.minutes, preload))
            for suffix, said in ((".json", json.dumps(results, indent=1) + "\n"),
                                 (".md", markdown(results))):
                pathlib.Path(args.out + suffix).write_text(said, encoding="utf-8")

        for row in rows_of(args.rows, args.seeds, args.adamw_rates, args.muon_rates):
            add(row)
        if "start" in args.rows:
            for kind in ("adamw", "muon"):
                tried = [r for r in results["rows"] if r["kind"] == kind]
                if tried:
                    best = min(tried, key=lambda r: r["bits_per_byte"])
                    add(dict(kind="start", lr=best["lr"], muon_lr=best["muon_lr"], our_start=True))
    print(markdown(results))


if __name__ == "__main__":
    main()
