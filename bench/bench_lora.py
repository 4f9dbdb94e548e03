"""Seconds per step of LoRA on a CPU: NanoEuler beside PEFT with PyTorch, in turns.

    python bench/bench_lora.py [--tokens 256 512] [--rounds 8] [--threads 2] [--rank 16]
                               [--answers 1.0] [--only NAME ...] [--layers 30]

The shape is that of SmolLM2 135M: 30 layers, width 576, 9 heads, 3 key heads, 1,536 hidden, a
vocabulary of 49,152, tied.  The weights are random.  A step is forward, backward, clipping and
AdamW, for one row of tokens; A and B are those of all seven projections.  --answers is the share of
tokens that are targets, at the end of the row: the rest is a question.

Each engine has a process of its own, which is warm before the first round.  In a round, each one
makes --steps steps while the others wait.  A figure is the median over the rounds of a round's
median.  The ratio is the median over the rounds of PEFT's time divided by ours, in the same round,
with its lowest and highest value.
"""
import argparse
import json
import os
import statistics
import sys
import time

from bench_cpu import Worker
from common import cpu_model, out_folder, versions

SHAPE = dict(n_embd=576, n_head=9, n_kv_head=3, head_dim=64, n_layer=30, n_hidden=1536,
             seq_len=2048, vocab_size=49152, n_mtp=1, tie_embeddings=True)
OURS = "ours f32", "ours bf16", "ours bf16, int8 model"
PEFT = "PEFT f32", "PEFT bf16", "PEFT f32, compiled", "PEFT bf16, compiled"


def batch(tokens, answers):
    """(ids (1, tokens), targets (1, tokens) of the next token, -1 for the question)"""
    import numpy as np
    ids = np.random.default_rng(1).integers(0, SHAPE["vocab_size"], (1, tokens + 1))
    targets = ids[:, 1:].copy()
    targets[:, :tokens - round(answers * tokens)] = -1
    return ids[:, :-1].astype(np.int32), targets.astype(np.int32)


# ---- engines: functions that return a function that makes a step
def ours(name, args):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import numpy as np
    from numba import set_num_threads

    import nanoeuler as ne
    from nanoeuler_parts.kernels import compile_lora_kernels
    from nanoeuler_parts.lora.adapter import Lora
    from nanoeuler_parts.lora.base import random_base
    from nanoeuler_parts.lora.model import Adapted, LoraModel
    dtype = "bf16" if "bf16" in name else "f32"
    compile_lora_kernels(dtype)
    set_num_threads(args.threads)
    cfg = ne.Config(**{**SHAPE, "n_layer": args.layers}).check()
    base = random_base(cfg, "int8" if "int8" in name else dtype)
    model = LoraModel(cfg, Adapted(base, Lora(args.rank, 2.0 * args.rank), None),
                      dtype=ne.PRECISIONS[dtype])
    hyper = ne.hyper_at(1, lr=2e-3, beta1=0.9, beta2=0.95, weight_decay=0.0, clip=1.0)
    ids, targets = batch(args.tokens, args.answers)
    n = int((targets >= 0).sum())

    def step():
        model.gradient(ids, targets[None], np.full((1, 1), 1 / n))
        ce, _ = model.update(hyper)
        return float(ce[0]) / n
    return step


def peft(name, args):
    import torch
    import transformers
    from peft import get_peft_model, LoraConfig
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    dtype = torch.bfloat16 if "bf16" in name else torch.float32
    s = SHAPE
    cfg = transformers.LlamaConfig(
        hidden_size=s["n_embd"], num_attention_heads=s["n_head"],
        num_key_value_heads=s["n_kv_head"], head_dim=s["head_dim"], num_hidden_layers=args.layers,
        intermediate_size=s["n_hidden"], vocab_size=s["vocab_size"], tie_word_embeddings=True,
        max_position_embeddings=s["seq_len"], attn_implementation="sdpa", use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(cfg, dtype=dtype)
    model = get_peft_model(model, LoraConfig(
        r=args.rank, lora_alpha=2 * args.rank, lora_dropout=0.0, target_modules=[
            "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
        autocast_adapter_dtype=False)        # A and B in bfloat16, too
    model.train()
    run = torch.compile(model) if "compiled" in name else model
    learned = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=2e-3, weight_decay=0.0, fused=True)
    ids, targets = (torch.from_numpy(x).long() for x in batch(args.tokens, args.answers))
    kept = int((targets >= 0).sum())         # logits are computed for these alone

    def step():
        optimizer.zero_grad(set_to_none=True)
        logits = run(input_ids=ids, logits_to_keep=kept).logits
        loss = torch.nn.functional.cross_entropy(logits[0].float(), targets[0, -kept:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        return loss.item()
    return step


def work(name, args):
    """A worker: one line for each line that is read, see `Worker` of bench_cpu.py"""
    began = time.perf_counter()
    step = (ours if name in OURS else peft)(name, args)
    first = step()
    step()
    print(json.dumps({"first_s": time.perf_counter() - began, "loss": first}), flush=True)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        print(json.dumps(seconds), flush=True)


# ---- turns
def measured(tokens, args):
    """{engine: [median seconds of each round]} for rows of this length"""
    names = args.only or [*OURS, *PEFT]
    flags = ["--tokens", tokens, *(x for key in ("threads", "rank", "answers", "layers")
                                   for x in (f"--{key}", getattr(args, key)))]
    workers, found = {}, {name: [] for name in names}
    for name in names:
        command = [sys.executable, __file__, "--worker", name, *map(str, flags)]
        try:
            workers[name] = Worker(command, args.threads)
        except SystemExit as e:              # such as torch.compile without a C++ compiler
            print(f"{name}: {e}", file=sys.stderr)
            del found[name]
            continue
        print(f"    {name}: ready after {workers[name].first:.0f} s, loss of step 1 "
              f"{workers[name].ready['loss']:.4f}", flush=True)
    for _ in range(args.rounds):
        for name, worker in workers.items():
            found[name].append(statistics.median(worker.ask(args.steps)))
    for worker in workers.values():
        worker.close()
    return found


def table(tokens, found):
    lines = [f"rows of {tokens} tokens", f"{'':24}{'s per step':>12}{'lowest':>9}{'highest':>9}"]
    for name, seconds in found.items():
        lines.append(f"{name:24}{statistics.median(seconds):12.3f}{min(seconds):9.3f}"
                     f"{max(seconds):9.3f}")
    theirs = [name for name in found if name in PEFT]
    best = min(theirs, key=lambda name: statistics.median(found[name]), default=None)
    for name in found:
        if name in OURS and best:
            ratios = [a / b for a, b in zip(found[best], found[name])]
            lines.append(f"{best} / {name}: {statistics.median(ratios):.2f} "
                         f"({min(ratios):.2f} to {max(ratios):.2f})")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description="LoRA beside PEFT with PyTorch, on a CPU")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512], help="tokens of a row")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of turns")
    parser.add_argument("--steps", type=int, default=3, help="steps of an engine in a round")
    parser.add_argument("--threads", type=int, default=2, help="threads of an engine")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapter")
    parser.add_argument("--layers", type=int, default=30, help="number of layers")
    parser.add_argument("--answers", type=float, default=1.0, help="share of targets in a row")
    parser.add_argument("--only", nargs="+", choices=(*OURS, *PEFT), help="engines to measure")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        args.tokens = args.tokens[0]
        work(args.worker, args)
        return
    head = (f"{cpu_model().name}, {args.threads} threads, rank {args.rank}, {args.layers} layers, "
            f"targets: {args.answers:.0%} of a row; "
            f"{versions('numba', 'numpy', 'torch', 'peft', 'transformers')}\n")
    print(head, flush=True)
    said = [head]
    for tokens in args.tokens:
        said.append(table(tokens, measured(tokens, args)))
        print(said[-1], flush=True)
    (out_folder() / "lora_speed.txt").write_text("\n".join(said), encoding="utf-8")


if __name__ == "__main__":
    main()
