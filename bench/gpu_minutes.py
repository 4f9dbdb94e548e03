"""Trains the base preset for some minutes of one GPU: ours, and the same model in PyTorch.

    python bench/gpu_minutes.py --data mix.txt                      all rows, three seeds each
    python bench/gpu_minutes.py --data mix.txt --rows ours-muon peer-muon --seeds 1
    python bench/gpu_minutes.py --data mix.txt --steps 2500 --at-once 4       on four GPUs

ours-adamw    `nanoeuler_cuda.py t --optimizer adamw`
ours-muon     `nanoeuler_cuda.py t`
peer-adamw    tests/oracles/torch_peer.py, compiled, bfloat16 autocast, fused AdamW, cosine to zero
peer-muon     the same with Muon for the matrices of the layers, five Newton-Schulz steps, batched
              over matrices of one shape, momentum 0.95; a constant rate, and in the second half a
              linear decay to zero, which was better for it than cosine

All train on the same text but for its last 2 %, with the same tokenizer, and with 64 x 512 tokens
per step in the order of the row's seed.  The clock runs during the training steps: kernels are
compiled before, and the validation on the whole held-out tail comes after.  Ours takes as many
steps as fit into the minutes at the pace of a first run, and the table has the seconds that they
took.  With --steps, all rows take that number of steps.

Every row is a process of its own, on one GPU.  Writes bench/out/gpu_minutes.json and .md after each
row.  A row that is in the file already is not run again, so the sweep can be interrupted.
"""
import argparse
import concurrent.futures
import itertools
import json
import math
import os
import pathlib
import queue
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from common import out_folder, protocol, versions
from nanoeuler_parts.files.corpora import open_text

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
HOLDOUT = 0.02
WARMUP = 200                                 # steps, as the default of `t`
PACE = 200                                   # steps of a first run of ours, which show its pace
NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315
# kind -> (the rate of AdamW, the rate of Muon or 0)
KINDS = {"ours-adamw": (1e-3, 0), "ours-muon": (2e-3, 0.008), "peer-adamw": (1e-3, 0),
         "peer-muon": (2e-3, 0.006)}


# ---- rows, each in a process of its own
def ours(row, a):
    """`t`, from its log"""
    import nanoeuler as ne
    from nanoeuler_parts.files.logs import read_log
    width = ne.PRESETS[a.preset].n_embd
    chosen = ["--lr", row["lr"] * width / 128]           # `t` scales its rate by 128 / n_embd
    chosen += ["--n-mtp", row["heads"], "--vocab-size", row["vocab"], *shlex.split(row["flags"])]
    chosen += ["--optimizer", "muon", "--muon-lr", row["muon_lr"]] if row["muon_lr"] else [
        "--optimizer", "adamw"]
    with tempfile.TemporaryDirectory() as folder:
        def train(name, steps, *more):
            out = pathlib.Path(folder, name)
            command = [sys.executable, ROOT / "nanoeuler_cuda.py", "t", "--preset", a.preset,
                       "--data", a.data, "--batch", a.batch * ne.PRESETS[a.preset].seq_len,
                       "--holdout", HOLDOUT, "--seed", row["seed"], "--eval-every", 10**9,
                       *chosen, "--steps", steps, *more, "--out", out]
            subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)
            return read_log(str(out.with_suffix(".jsonl")))

        first = train("first.bin", PACE, "--warmup", 1)  # compiles all kernels
        pace = statistics.median(milliseconds(first)[PACE // 2:])
        log = train("row.bin", a.steps or round(60e3 * a.minutes / pace))
    ms = milliseconds(log)
    return dict(steps=log[-1]["step"], bits_per_byte=log[-1]["val_bits_per_byte"],
                ms=statistics.median(ms), seconds=sum(ms) / 1e3)


def milliseconds(log):
    """The time of each step in a log"""
    return [r["ms"] for r in log if "ms" in r]


def text(a, cfg, seed):
    """(batches, windows and targets of the tail, its bytes), as `t` has them"""
    import nanoeuler as ne
    text = open_text(a.data, "text", "", HOLDOUT)
    tokenizer = ne.bpe.train(text.excerpt(), cfg.vocab_size, ne.bpe.SPECIALS)
    text.encode(tokenizer, tokenizer.specials[ne.State.eos], 0.0, seed)
    batches = ne.Batches(text.train, cfg.seq_len, cfg.n_mtp, seed)
    x, targets = ne.windows(text.tail, range(0, len(text.tail) - 1, cfg.seq_len), cfg.seq_len, P=1)
    return batches, x, targets[0], text.tail_bytes


class BatchedMuon:
    """Muon (Jordan et al. 2024) for matrices, those of one shape together.

    matrices: [(parameter, first row, last row)]; q, k and v, and gate and up, are rows of one
    parameter, and orthogonalized each by itself"""

    def __init__(self, matrices, lr, momentum=0.95, weight_decay=0.1, steps=5, compiled=True):
        import torch
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.groups = {}
        for p, first, last in matrices:
            self.groups.setdefault((last - first, p.shape[1]), []).append((p, first, last))
        self.m = {shape: torch.zeros(len(found), *shape, device=found[0][0].device)
                  for shape, found in self.groups.items()}

        def orthogonalized(g, m):
            """(the update of all matrices, the new momentum)"""
            m = torch.lerp(g, m, momentum)
            x = torch.lerp(g, m, momentum).bfloat16()
            tall = x.shape[1] > x.shape[2]
            x = x.mT if tall else x
            x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
            a, b, c = NEWTON_SCHULZ
            for _ in range(steps):
                gram = x @ x.mT
                x = a * x + (b * gram + c * gram @ gram) @ x
            return (x.mT if tall else x).float(), m
        self.orthogonalized = orthogonalized
        if compiled:
            self.orthogonalized = torch.compile(orthogonalized, dynamic=False)

    def step(self):
        import torch
        with torch.no_grad():
            for (N, K), found in self.groups.items():
                g = torch.stack([p.grad[first:last] for p, first, last in found])
                update, self.m[N, K] = self.orthogonalized(g, self.m[N, K])
                rows = [p[first:last] for p, first, last in found]
                torch._foreach_mul_(rows, 1 - self.lr * self.weight_decay)
                torch._foreach_add_(rows, list(update.unbind()),
                                    alpha=-self.lr * math.sqrt(max(1, N / K)))


def matrices_of(model):
    """The matrices of the layers: [(parameter, first row, last row)]"""
    c, found = model.cfg, []
    for block in model.blocks:
        HD, GD, F = c.n_head * c.head_dim, c.n_kv_head * c.head_dim, c.n_hidden
        qkv, gate_up = block.attn.qkv.weight, block.mlp.gate_up.weight
        found += [(qkv, 0, HD), (qkv, HD, HD + GD), (qkv, HD + GD, HD + 2 * GD),
                  (gate_up, 0, F), (gate_up, F, 2 * F)]
        found += [(p, 0, len(p)) for p in (block.attn.proj.weight, block.mlp.down.weight)]
    return found


def rate_at(share, schedule):
    """The rate as a part of its peak, at this share of the training.  linear: constant in the first
    half, then linear to zero"""
    if schedule == "linear":
        return min(1.0, 2 * (1 - share))
    return 0.5 * (1 + math.cos(math.pi * share))


def peer(row, a):
    """The peer, until the minutes or the steps are over"""
    import numpy as np
    import torch
    from oracles import torch_peer

    import nanoeuler as ne
    torch.set_float32_matmul_precision("high")
    cfg = ne.replace(ne.PRESETS[a.preset], n_mtp=row["heads"], vocab_size=row["vocab"])
    B, device = a.batch, a.device
    batches, x, targets, n_bytes = text(a, cfg, row["seed"])
    with torch.device(device):
        model = torch_peer.Peer(torch_peer.peer_config(cfg), seed=row["seed"])
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss_of = torch.compile(model, fullgraph=True, dynamic=False)
    head0 = torch.compile(lambda idx: torch.nn.functional.linear(
        model.trunk(idx), model.lm_head.weight[:cfg.vocab_size]), dynamic=False)
    low = torch.autocast(device, torch.bfloat16)

    def to_device(array):
        found = torch.from_numpy(array).long()
        return found.pin_memory().to(device, non_blocking=True) if device == "cuda" else found

    def made():
        """New optimizers: (AdamW, Muon or None)"""
        matrices = matrices_of(model) if row["muon_lr"] else []
        of_muon = {id(p) for p, *_ in matrices}
        rest = [p for p in model.parameters() if id(p) not in of_muon]
        embedding, factor = model.wte.weight, row["embedding"]
        groups = [dict(params=[p for p in rest if p.dim() == 2 and p is not embedding],
                       weight_decay=0.1, factor=1.0),
                  dict(params=[p for p in rest if p.dim() < 2], weight_decay=0.0, factor=1.0),
                  # the same rate * decay as other matrices
                  dict(params=[embedding], weight_decay=0.1 / factor, factor=factor)]
        adamw = torch.optim.AdamW(groups, lr=row["lr"], betas=(0.9, 0.95), fused=True)
        return adamw, BatchedMuon(matrices, row["muon_lr"]) if matrices else None

    def step(i, adamw, muon):
        tokens, wanted = map(to_device, batches.take(i * B, B))
        with low:
            loss = loss_of(tokens, wanted)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        adamw.step()
        if muon:
            muon.step()
        model.zero_grad(set_to_none=True)
        return loss

    def nats(part, wanted):
        """The summed cross-entropy of head 0"""
        with torch.no_grad(), low:
            logits = head0(to_device(part)).float()
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), to_device(wanted).flatten(), ignore_index=-1,
            reduction="sum").item()

    adamw, muon = made()
    for i in range(3):                       # compiles
        step(i, adamw, muon).item()
    nats(np.zeros((B, cfg.seq_len), np.int32), np.zeros((B, cfg.seq_len), np.int32))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(start[name])
    adamw, _ = made()
    if muon:                                 # the one whose function is compiled
        for m in muon.m.values():
            m.zero_()

    i, limit, began, marks = 0, a.steps or 60 * a.minutes, time.perf_counter(), []
    while (now := i if a.steps else time.perf_counter() - began) < limit:
        share = rate_at(now / limit, row["schedule"]) * min(1.0, (i + 1) / WARMUP)
        for group in adamw.param_groups:
            group["lr"] = row["lr"] * group["factor"] * share
        if muon:
            muon.lr = row["muon_lr"] * share
        loss = step(i, adamw, muon)
        i += 1
        if i % 10 == 0:                      # the host is at most ten steps ahead
            loss.item()
            marks.append(time.perf_counter() - began)
    loss.item()
    seconds, total = time.perf_counter() - began, 0.0
    for b in range(0, len(x), B):
        part, wanted = x[b:b + B], targets[b:b + B]
        missing = B - len(part)              # one shape, compiled once
        total += nats(np.pad(part, ((0, missing), (0, 0))),
                      np.pad(wanted, ((0, missing), (0, 0)), constant_values=-1))
    ms = 1e3 * (statistics.median(np.diff(marks)) / 10 if len(marks) > 1 else seconds / i)
    return dict(steps=i, bits_per_byte=total / math.log(2) / n_bytes, ms=ms, seconds=seconds)


# ---- the table
def rows_of(a):
    """The rows that are asked for, each with its rates and its seed"""
    import nanoeuler as ne
    rows = []
    for kind in a.rows:
        lr, muon_lr = KINDS[kind]
        rates = (a.muon_lr or [muon_lr]) if muon_lr else [0]
        of_peer = dict(schedule=a.schedule or ("linear" if muon_lr else "cosine"),
                       embedding=a.embedding if muon_lr else 1.0)
        rows += [dict(kind=kind, lr=one, muon_lr=other, seed=seed,
                      heads=a.heads or ne.PRESETS[a.preset].n_mtp,
                      vocab=a.vocab or ne.PRESETS[a.preset].vocab_size,
                      **dict(flags=a.flags) if kind.startswith("ours") else of_peer)
                 for one, other, seed in itertools.product(a.lr or [lr], rates, a.seeds)]
    return rows


def markdown(results):
    """The rows as a table, and of each kind with its rates the mean and the spread of its seeds"""
    length = (f"{results['steps']:,} steps" if results["steps"] else
              f"{results['minutes']:g} minutes")
    lines = [f"# {length} of the preset {results['preset']}", "",
             f"{results['device']}; {results['versions']}; commit {results['commit']}.", "",
             "| run | steps | ms per step | seconds of training | held-out bits per byte |",
             "|---|---:|---:|---:|---:|"]
    found = {}
    for r in results["rows"]:
        rates = f"Muon {r['muon_lr']:g}, AdamW" if r["muon_lr"] else "AdamW"
        shape = f"{r['heads']} output head{'s' * (r['heads'] > 1)}, vocabulary of {r['vocab']:,}"
        name = " ".join([f"{r['kind']}, {rates} {r['lr']:g}, {shape}", *r["flags"].split()]
                        if "flags" in r else [f"{r['kind']}, {r['schedule']}, {rates} {r['lr']:g}, "
                                              f"embedding x {r['embedding']:g}, {shape}"])
        found.setdefault(name, []).append(r)
    for name, rows in found.items():
        lines += [f"| {name}, seed {r['seed']} | {r['steps']:,} | {r['ms']:.1f} | "
                  f"{r['seconds']:.1f} | {r['bits_per_byte']:.4f} |" for r in rows]
    lines.append("")
    for name, rows in found.items():
        bits = [r["bits_per_byte"] for r in rows]
        lines.append(f"{name}: mean {statistics.mean(bits):.4f}, from {min(bits):.4f} to "
                     f"{max(bits):.4f}.")
    return "\n".join(lines) + "\n"


def device_name(device):
    if device == "cpu":
        return "a CPU"
    query = "nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"
    said = subprocess.run(query, capture_output=True, text=True, check=True)
    return said.stdout.splitlines()[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", required=True, help="the text")
    parser.add_argument("--minutes", type=float, default=3.3, help="of training (default 3.3)")
    parser.add_argument("--steps", type=int, default=0, help="of training, instead of minutes")
    parser.add_argument("--rows", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="default 1 2 3")
    parser.add_argument("--muon-lr", nargs="+", type=float, help="rates of Muon to try")
    parser.add_argument("--lr", nargs="+", type=float, help="rates of AdamW to try")
    parser.add_argument("--heads", type=int, default=0, help="output heads (default: the preset's)")
    parser.add_argument("--vocab", type=int, default=0, help="tokens of the vocabulary (default: "
                        "the preset's)")
    parser.add_argument("--flags", default="", help="further flags of `t`, in one argument")
    parser.add_argument("--schedule", choices=("linear", "cosine"), help="of the peer's rates "
                        "(default: linear with Muon, cosine with AdamW)")
    parser.add_argument("--embedding", type=float, default=4.0, help="the peer's rate of the "
                        "embedding beside Muon, as a multiple of AdamW's (default 4, as in ours)")
    parser.add_argument("--at-once", type=int, default=1, help="rows at the same time, each on a "
                        "GPU of its own (default 1)")
    parser.add_argument("--preset", default="base", help="default base")
    parser.add_argument("--batch", type=int, default=64, help="sequences per step (default 64)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="of the peer")
    parser.add_argument("--out", default=str(out_folder() / "gpu_minutes"), help="without suffix")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.worker:
        say, row = protocol(), json.loads(a.worker)
        return say((ours if row["kind"].startswith("ours") else peer)(row, a))
    git = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True,
                         text=True)
    numbers = versions("numba", "numba-cuda", "numpy", "torch")
    results = dict(minutes=a.minutes, steps=a.steps, preset=a.preset, batch=a.batch,
                   device=device_name(a.device), commit=git.stdout.strip(), rows=[],
                   versions=", ".join(f"{name} {version}" for name, version in numbers.items()))
    path = pathlib.Path(a.out + ".json")
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        same = all(before.get(key) == results[key] for key in results.keys() - {"rows", "commit"})
        results["rows"] = before["rows"] if same else []
    missing = [row for row in rows_of(a)
               if not any(row.items() <= done.items() for done in results["rows"])]
    failed = threading.Event()               # then no further row begins
    writing = threading.Lock()
    gpus = queue.SimpleQueue()               # those that no row uses
    for i in range(a.at_once):
        gpus.put(i)

    def measure(row):
        """Runs one row in a process of its own, and writes its result"""
        gpu = gpus.get()
        try:
            if failed.is_set():
                return
            command = [sys.executable, __file__, "--worker", json.dumps(row), "--data", a.data,
                       "--minutes", str(a.minutes), "--steps", str(a.steps), "--preset", a.preset,
                       "--batch", str(a.batch), "--device", a.device]
            own = {"CUDA_VISIBLE_DEVICES": str(gpu)} if a.at_once > 1 else {}
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True,
                                  env={**os.environ, **own}).stdout
            with writing:
                results["rows"].append({**row, **json.loads(said)})
                for suffix, written in ((".json", json.dumps(results, indent=1) + "\n"),
                                        (".md", markdown(results))):
                    pathlib.Path(a.out + suffix).write_text(written, encoding="utf-8")
        except BaseException:
            failed.set()
            raise
        finally:
            gpus.put(gpu)

    with concurrent.futures.ThreadPoolExecutor(a.at_once) as pool:
        runs = [pool.submit(measure, row) for row in missing]
        try:
            concurrent.futures.wait(runs)    # rows that are running end, even if another one fails
        finally:
            failed.set()
    for run in runs:
        run.result()                         # raises the error of a row that failed
    print(markdown(results))


if __name__ == "__main__":
    main()
