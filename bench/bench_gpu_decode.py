"""Generation on one NVIDIA GPU: ms a token, alone and in batches, and a prompt.

    python bench/bench_gpu_decode.py [--preset base | --file MODEL.bin] [--kernels]

NanoEuler with matrices in bfloat16 and, if PyTorch is there, the same model by torch.compile over a
static cache in one CUDA graph, with attention written out and by SDPA.  Greedy, whole contexts; a
figure is the median of three.  "host" is what a caller waits: the step, which chooses the likeliest
token, and the token back.  "device": the same graphs replayed without the host between them.
"drawn": the same for the host where tokens are drawn, at temperature 0.8 with top-p 0.9.
--kernels: us of each kernel, a graph of 200 in a row at a full context, with and without dependent
launch.
"""
import argparse
import contextlib
import functools
import pathlib
import statistics
import sys
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests")]
import nanoeuler as ne
import nanoeuler_cuda as nc
from common import shapes
from nanoeuler_parts.gpu.launches import overlapping
from nanoeuler_parts.decode import steps as rowsteps
from nanoeuler_parts.decode.attend import keys_per_split
from nanoeuler_parts.decode.prompts import BY_ROWS, power_of_two
from nanoeuler_parts.decode.steps import StepKind
from nanoeuler_parts.decode.table import AT_ONCE

def median_ms(call, n=3):
    """Median ms of call(), which waits for the device, after one that compiles or records."""
    call()
    times = []
    for _ in range(n):
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)

GREEDY, DRAWN = ne.SampleRequest(0.0, 0, 1.0, 0.0, 0.5), ne.SampleRequest(0.8, 0, 0.9, 0.0, 0.5)

def decode_ms(decoder, batch, T, draw=GREEDY):
    """ms a step, the host reading the tokens of each"""
    def context():
        for slot in range(batch):
            decoder.truncate(0, slot)
        tokens = [7 + slot for slot in range(batch)]
        decoder.read([ne.Part(slot, [tokens[slot]]) for slot in range(batch)])
        for _ in range(T - 1):
            parts = [ne.Part(slot, [tokens[slot]]) for slot in range(batch)]
            tokens = decoder.sample_on_device(parts, [draw] * batch, [draw] * batch)
    context()                                # each graph is recorded when it is first met again
    return median_ms(context) / T

def device_ms(decoder, batch, T):
    """ms a step on the device, mean over a context: graphs of each length, one after another"""
    steps, total = decoder.steps, 0.0
    unit = keys_per_split(decoder.cfg.head_dim)
    for end in range(unit, T + unit, unit):
        position = min(end, T) - 1
        for slot in range(batch):
            decoder.held_ids[slot] = [0] * position         # whatever is in the cache
        parts = [ne.Part(slot, [7]) for slot in range(batch)]
        for _ in range(3):
            decoder.sample_on_device(parts, [GREEDY] * batch)
            for slot in range(batch):
                decoder.truncate(position, slot)
        splits = steps.splits_bucket(position + 1)
        kind = StepKind(AT_ONCE, splits, AT_ONCE, whole_step=False, sampled=True)
        if batch <= AT_ONCE:
            rows = power_of_two(batch)
            kind = StepKind(rows, splits, rows, whole_step=True, sampled=True)
        replay = functools.partial(steps.graphs[kind], None)

        def many():
            for _ in range(100 * nc.cdiv(batch, AT_ONCE)):
                replay()
            nc.gpu.stream.synchronize()
        total += median_ms(many) / 100
    return total / len(range(unit, T + unit, unit))

def prompt_device_ms(decoder, T):
    """ms of the kernels of a prompt that was read, and of its logits"""
    steps = decoder.steps
    prompt = steps.prompts.graphs[T]
    logits = steps.graphs[StepKind(1, 0, 1, whole_step=True, from_prompt=True)]

    def many():
        for _ in range(20):
            prompt(None)
            logits(None)
        nc.gpu.stream.synchronize()
    return median_ms(many) / 20

def prompt_ms(decoder, T):
    ids = np.random.default_rng(1).integers(0, decoder.cfg.vocab_size, T).tolist()

    def read():
        decoder.truncate(0)
        decoder.read([ne.Part(0, ids)])
    read()
    return median_ms(read)

def kernel_us(decoder, batch):
    """{name: us} of each kernel, 200 in a row, the layers in turn, at a full context"""
    steps, size = decoder.steps, ne.dims_of(decoder.cfg)
    T = steps.T
    for slot in range(batch):
        decoder.held_ids[slot] = [0] * (T - 1)
    parts = [ne.Part(slot, [7]) for slot in range(batch)]
    decoder.sample_on_device(parts, [GREEDY] * batch)        # rows at T - 1
    launches, launch = {}, rowsteps.launch

    def keep(kernel, *args, **config):
        name = kernel.py_func.__name__
        if name == "add_product":
            name = "down" if args[1] is steps.y else "down of att"       # names of recorded files
        launches.setdefault(name, []).append((kernel, args, config))
    rowsteps.launch = keep
    try:
        lines = power_of_two(batch)
        steps.queue(StepKind(lines, steps.splits_bucket(T), lines, whole_step=False, sampled=True))
    finally:
        rowsteps.launch = launch
    out = {}
    for name, found in launches.items():
        if name == "take":
            continue
        for overlap in (contextlib.nullcontext, overlapping):
            def row(found=found, overlap=overlap):
                with overlap():
                    for i in range(200):
                        kernel, args, config = found[i % len(found)]
                        launch(kernel, *args, **config)
            graph = nc.Graph()
            graph(row)

            def replay(graph=graph, row=row):
                graph(row)
                nc.gpu.stream.synchronize()
            out[name, overlap is overlapping] = 1e3 * median_ms(replay, 5) / 200
    assert size.L > 1
    return out

# ---- PyTorch
def peer(cfg, flat):
    import bench_gpu
    torch, torch_peer = bench_gpu.torch, bench_gpu.torch_peer
    with torch.device(bench_gpu.DEVICE):
        model = torch_peer.Peer(torch_peer.peer_config(cfg), dtype=bench_gpu.BF16)
    model.load_numpy(ne.views(flat, ne.param_table(cfg))._asdict())
    return model.eval().requires_grad_(False)

def peer_graph(call):
    import bench_gpu
    with bench_gpu.torch.inference_mode():
        return bench_gpu.torch_peer.captured(call, bench_gpu.side_stream())

def peer_decode_ms(model, batch, sdpa):
    """(host, device): ms a step, the host reading the tokens of each, or waiting at the end"""
    import bench_gpu
    torch, T = bench_gpu.torch, model.cfg.seq_len
    for block in model.blocks:
        block.attn.sdpa = sdpa
    step = torch.compile(model.decode, fullgraph=True, dynamic=False)
    with torch.inference_mode():
        cache = model.new_cache(batch)
        idx = torch.zeros(batch, 1, dtype=torch.long, device=bench_gpu.DEVICE)
        at = torch.zeros(1, dtype=torch.long, device=bench_gpu.DEVICE)

        def advance():
            idx.copy_(step(idx, at, cache))
            at.add_(1).remainder_(T)
        replay = peer_graph(advance)

        def context(read):
            for _ in range(T):
                replay()
                if read:
                    idx.tolist()
            torch.cuda.synchronize()
        return [median_ms(functools.partial(context, read)) / T for read in (True, False)]

def peer_prompt_ms(model, T):
    import bench_gpu
    torch = bench_gpu.torch
    read = torch.compile(model.prompt, fullgraph=True, dynamic=False)
    with torch.inference_mode():
        cache = model.new_cache()
        host = torch.randint(0, model.cfg.vocab_size, (1, T)).pin_memory()
        idx = host.to(bench_gpu.DEVICE)
        replay = peer_graph(lambda: read(idx, cache))

        def prompt():
            idx.copy_(host, non_blocking=True)
            replay().tolist()

        def many():
            for _ in range(20):
                replay()
            torch.cuda.synchronize()
        return median_ms(prompt), median_ms(many) / 20

def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="base", choices=shapes())
    parser.add_argument("--file", help="a model, instead of a preset")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 64])
    parser.add_argument("--kernels", action="store_true", help="us of each kernel, too")
    parser.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    cfg, name = shapes()[args.preset], args.preset
    if args.file:
        found = ne.read_checkpoint(args.file, moments=False)
        cfg, flat, name = ne.replace(found.cfg, seq_len=min(512, found.cfg.seq_len)), found.flat, (
            args.file)
    else:
        flat = ne.init_params(cfg, 1)
    decoder = nc.make_decoder(cfg, flat, "bf16", slots=max(args.batches))
    T = cfg.seq_len
    print(f"{nc.cuda.get_current_device().name}, {name}, contexts of {T}", flush=True)
    for batch in args.batches:
        host, device = decode_ms(decoder, batch, T), device_ms(decoder, batch, T)
        print(f"  batch {batch}: {host:.3f} ms a step, host; {device:.3f} device; "
              f"{1e3 * batch / host:,.0f} tokens/s; drawn "
              f"{decode_ms(decoder, batch, T, DRAWN):.3f} ms, host", flush=True)
    whole = prompt_ms(decoder, T)
    print(f"  prompt of {T}: {whole:.2f} ms, host; {prompt_device_ms(decoder, T):.2f} device",
          flush=True)
    for n in (8, 32, BY_ROWS, BY_ROWS + 1, 256):
        way = "by rows" if n <= BY_ROWS else "at once"
        print(f"  prompt of {n}, {way}: {prompt_ms(decoder, n):.2f} ms, host", flush=True)
    if args.kernels:
        for batch in (1, 8):
            found = kernel_us(decoder, batch)
            names = dict.fromkeys(name for name, _ in found)
            print(f"  us a kernel, batch {batch}, plain / dependent launch: " + ", ".join(
                f"{name} {found[name, False]:.2f} / {found[name, True]:.2f}" for name in names),
                flush=True)
    if args.peer and cfg.window:
        print("  not compared with PyTorch: the peer does not have windows")
    elif args.peer:
        try:
            model = peer(cfg, flat)
        except ImportError as e:
            print(f"  no peer: {e}")
            return
        print("  torch.compile, one CUDA graph, static cache, bfloat16")
        for batch in args.batches:
            for sdpa in (False, True):
                (host, device), way = peer_decode_ms(model, batch, sdpa), (
                    "SDPA" if sdpa else "written out")
                print(f"  batch {batch}, {way}: {host:.3f} ms a step, host; {device:.3f} device; "
                      f"{1e3 * batch / host:,.0f} tokens/s", flush=True)
        host, device = peer_prompt_ms(model, T)
        print(f"  prompt of {T}: {host:.2f} ms, host; {device:.2f} device", flush=True)

if __name__ == "__main__":
    main()
