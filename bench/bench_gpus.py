"""The training step on 1, 2, 4, ... GPUs of this machine, beside PyTorch's DDP and FSDP.

    python bench/bench_gpus.py [--presets base large] [--gpus 1 2] [--sequences 64] [--length 512]

A preset with so many sequences a GPU, in bfloat16: NanoEuler's step as `t --gpus N` does it, and
the same model in PyTorch (oracles/torch_peer.py in tests) from the same weights, compiled: with one
GPU alone; with several by DistributedDataParallel, compiled around it (DDP), so that sums overlap
with backward, or within it (DDP-inside), and by FSDP2 (bfloat16 in products, float32 sums).
One process a GPU; engines take turns, two turns each with their processes new, and a figure is the
median of the steps of both.  Scaling is against the same engine on the first number of GPUs.  The
parameters after five steps, hashed, must be the same in both turns.  Writes bench/out/gpus.json and
prints the table.
"""
import argparse
import hashlib
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve()
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests")]
ENGINES = "NanoEuler", "DDP", "DDP-inside", "FSDP"
LR, MTP = 1e-3, 0.3
FIRST, SECONDS = 5, 4.0                      # steps before the clock runs; how long it does


# ---- a worker: one rank of an engine
def batch(cfg, B, T):
    """tokens (B, T) and targets (P, B, T) of all ranks together"""
    import numpy as np
    ids = np.random.default_rng(1).integers(0, cfg.vocab_size, (B, T + cfg.n_mtp), dtype=np.int32)
    targets = np.stack([ids[:, k + 1:k + 1 + T] for k in range(cfg.n_mtp)])
    return np.ascontiguousarray(ids[:, :T]), targets


def ours(cfg, flat, tokens, targets, recompute):
    """(step, facts): facts() are of the run when its first steps are done"""
    import nanoeuler as ne
    import nanoeuler_cuda as nc
    from nanoeuler_parts.gpu import place
    from nanoeuler_parts.ranks.engine import Links, RankedModel
    from nanoeuler_parts.ranks.sockets import Ranks
    nc.open_device()
    engine = nc.Model
    if place.PLACE.size > 1:
        engine = RankedModel
        engine.ranks = Ranks(place.PLACE)
        engine.links = Links(engine.ranks)
    free = nc.free_bytes()
    model, count = engine(cfg, flat, dtype="bf16", recompute=recompute), [0]
    weight = ne.loss_weights(targets, MTP)

    def step():
        count[0] += 1
        model.gradient(tokens, targets, weight)
        ce, _ = model.update(ne.hyper_at(count[0], LR, beta1=0.9, beta2=0.95, weight_decay=0.1,
                                         clip=1.0))
        return float(ce @ weight)

    def facts():
        taken = free - nc.free_bytes()
        digest = hashlib.sha256()
        for x in model.buffers():            # which the first rank alone has
            if x is not None:
                digest.update(x)
        table = model.memory(len(tokens) // place.PLACE.size, tokens.shape[1])
        printed = sum(size for name, size in table if name != "samples")
        found = {"GiB": taken / 2**30, "bits": digest.hexdigest()[:16], "printed": printed / 2**30}
        if place.PLACE.size > 1:
            found["communication"] = communication(nc, model)
        return found
    return step, facts


def communication(nc, model, n=20):
    """ms of a step that the exchanges take by themselves"""
    def once():
        model.sum_gradients()
        model.gather_parameters()
        nc.gpu.stream.synchronize()
    once()
    began = time.perf_counter()
    for _ in range(n):
        once()
    return 1e3 * (time.perf_counter() - began) / n


def theirs(kind, rank, size, cfg, flat, tokens, targets):
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from oracles import torch_peer

    import nanoeuler as ne
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    torch.backends.cuda.matmul.allow_tf32 = True
    with torch.device("cuda"):
        model = torch_peer.Peer(torch_peer.peer_config(cfg))
    model.load_numpy(ne.views(flat, ne.param_table(cfg))._asdict())
    options, compiled = dict(bf16=True, lr=LR, attention="flash"), True
    if size > 1:
        dist.init_process_group("nccl")
        if kind == "DDP-inside":
            model, compiled = torch.compile(model, fullgraph=True, dynamic=False), False
        if kind != "FSDP":
            model = DistributedDataParallel(model, device_ids=[local], gradient_as_bucket_view=True)
        else:
            compiled = False
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            for block in model.blocks:
                block.compile(fullgraph=True, dynamic=False)
                fully_shard(block, mp_policy=policy)
            fully_shard(model, mp_policy=policy)
    step = torch_peer.make_step(model, compiled=compiled, **options)
    each = len(tokens) // size
    mine = slice(rank * each, (rank + 1) * each)
    idx, wanted = (torch.from_numpy(x).long().cuda() for x in (tokens[mine], targets[:, mine]))

    def facts():
        return {"GiB": torch.cuda.max_memory_reserved() / 2**30}
    return lambda: float(step(idx, wanted)), facts


def work(kind, preset, sequences, length, recompute):
    """What one rank does; the first one prints a line of JSON."""
    from dataclasses import replace
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if kind == "NanoEuler":
        from nanoeuler_parts.gpu.place import PLACE, take_own_gpu
        assert PLACE.size == size
        take_own_gpu()
    import nanoeuler as ne
    cfg = replace(ne.PRESETS[preset], seq_len=length)
    flat, data = ne.init_params(cfg, 1), batch(cfg, sequences * size, length)
    if kind == "NanoEuler":
        step, facts = ours(cfg, flat, *data, recompute)
    else:
        step, facts = theirs(kind, rank, size, cfg, flat, *data)
    losses = [step() for _ in range(FIRST)]
    found = facts()
    began = time.perf_counter()
    step()
    n = max(5, int(SECONDS / (time.perf_counter() - began)))
    if size > 1:                             # as many on all ranks
        n = agreed(kind, n)
    times = []
    for _ in range(n):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    if rank == 0:
        print(json.dumps({"ms": [1e3 * t for t in times], "losses": losses, **found}), flush=True)
    if kind == "NanoEuler" and size > 1:
        from nanoeuler_parts.ranks.engine import RankedModel
        RankedModel.ranks.all("", "the end")
        RankedModel.links.close()
        RankedModel.ranks.close()


def agreed(kind, n):
    if kind == "NanoEuler":
        from nanoeuler_parts.ranks.engine import RankedModel
        return RankedModel.ranks.agree(n, "steps to time")
    import torch
    import torch.distributed as dist
    t = torch.tensor([n], device="cuda")
    dist.broadcast(t, 0)
    return int(t)


# ---- the machine
def run(kind, preset, size, options):
    """A turn of an engine on so many GPUs: what its first rank says, or why there is nothing."""
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    command = [sys.executable, str(HERE), "--work", kind, "--presets", preset,
               "--sequences", str(options.sequences), "--length", str(options.length),
               *["--recompute"] * options.recompute]
    ranks = [subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size),
                 MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))) for rank in range(size)]
    try:
        ends = [(*p.communicate(timeout=options.patience), p.returncode) for p in ranks]
    except subprocess.TimeoutExpired:
        return {"failed": f"no end after {options.patience} s"}
    finally:
        for p in ranks:
            p.kill()
    if any(code for *_, code in ends):
        return {"failed": reason([err for _, err, code in ends if code])}
    return json.loads(ends[0][0].strip().splitlines()[-1])


def reason(said):
    """The last line of one that failed, of the first that does not only miss another"""
    lines = [[line for line in x.splitlines() if line.strip() and "Warning" not in line]
             for x in said]
    last = [x[-1][:300] for x in lines if x] or ["no reason"]
    return next((x for x in last if "is gone" not in x), last[0])


def shown(results):
    """The rows of a preset: {(engine, size): [turns]}"""
    print("| engine | GPUs | ms a step | lowest - highest tenth | of n times one | GiB a GPU | "
          "as printed | communication, ms | same bits twice |\n"
          "|---|---:|---:|---:|---:|---:|---:|---:|---|")
    one = {}
    for (kind, size), turns in results.items():
        good = [t for t in turns if "ms" in t]
        if not good:
            print(f"| {kind} | {size} | {turns[0]['failed']} |")
            continue
        times = sorted(x for t in good for x in t["ms"])
        ms, tenth = statistics.median(times), len(times) // 10
        engine = "NanoEuler" if kind == "NanoEuler" else "PyTorch"
        share = one.setdefault(engine, ms) / ms
        bits = {t["bits"] for t in good if "bits" in t}
        same = "" if not bits else "yes" if len(bits) == 1 and len(good) > 1 else "NO"
        talk, printed = good[0].get("communication"), good[0].get("printed")
        print(f"| {kind} | {size} | {ms:.2f} | {times[tenth]:.2f} - {times[-1 - tenth]:.2f} | "
              f"{share:.3f} | {good[0]['GiB']:.1f} | {f'{printed:.1f}' if printed else ''} | "
              f"{f'{talk:.2f}' if talk else ''} | {same} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["base"])
    parser.add_argument("--gpus", nargs="+", type=int, help="how many; default: 1, 2, 4, ... all")
    parser.add_argument("--sequences", type=int, default=64, help="a GPU")
    parser.add_argument("--length", type=int, default=512, help="of a sequence, tokens")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--recompute", action="store_true", help="as t does it: ours alone")
    parser.add_argument("--peer-turns", type=int, default=2, help="of PyTorch's, each")
    parser.add_argument("--patience", type=float, default=240, help="seconds for a turn")
    parser.add_argument("--out", help="file (default: bench/out/gpus.json)")
    parser.add_argument("--work", choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.work, options.presets[0], options.sequences, options.length,
                    options.recompute)
    from common import out_folder
    smi = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
                         capture_output=True, text=True)
    names = smi.stdout.split("\n")[:-1]
    gpus = options.gpus or [n for n in (1, 2, 4, 8) if n <= len(names)]
    everything = {}                          # written as it comes
    path = pathlib.Path(options.out or out_folder() / "gpus.json")
    for preset in options.presets:
        results = {}
        for i in range(2):
            for size in gpus:
                for kind in options.engines:
                    alone = kind in ("NanoEuler", "DDP")             # nothing to share or to shard
                    if size == 1 and not alone or i >= options.peer_turns and kind != "NanoEuler":
                        continue
                    turn = run(kind, preset, size, options)
                    results.setdefault((kind, size), []).append(turn)
                    print(f"{preset}, {kind}, {size}: " + (turn.get("failed") or
                          f"{statistics.median(turn['ms']):.2f} ms"), file=sys.stderr, flush=True)
                    everything[preset] = [{"engine": kind, "gpus": size, "turns": turns}
                                          for (kind, size), turns in results.items()]
                    path.write_text(json.dumps(
                        {"gpus": names, "sequences": options.sequences, "length": options.length,
                         "presets": everything}), encoding="utf-8")
        print(f"\n### {preset}, {options.sequences} x {options.length} a GPU, on {names[0]}\n")
        shown(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
