"""Generation on one NVIDIA GPU: ms a token, alone and in batches, and a prompt.

    python bench/bench_gpu_decode.py [--preset base] [--kernels]

NanoEuler with matrices in bfloat16 and, if PyTorch is there, the same model by torch.compile over a
static cache in one CUDA graph, from the same weights.  Greedy, whole contexts; a figure is the
median of three.  "host" is what a caller waits: upload, the step, logits back, the likeliest token;
"device" the same graphs replayed without the host between them.  --kernels: us of each kernel, a
graph of 200 in a row at a full context, with and without dependent launch.
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

def median_ms(call, n=3):
    """Median ms of call(), which waits for the device, after one that compiles or records."""
    call()
    times = []
    for _ in range(n):
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)

def decode_ms(decoder, batch, T):
    """ms a step, the host reading the logits of each"""
    def context():
        for slot in range(batch):
            decoder.truncate(0, slot)
        tokens = [7 + slot for slot in range(batch)]
        for _ in range(T):
            logits = decoder.read([ne.Part(slot, [tokens[slot]]) for slot in range(batch)])
            tokens = logits.argmax(1).tolist()
    context()                                # each graph is recorded when it is first met again
    return median_ms(context) / T

def device_ms(decoder, batch, T):
    """ms a step on the device, mean over a context: graphs of each length, one after another"""
    steps, total = decoder.steps, 0.0
    unit = nc.keys_a_part(decoder.cfg.head_dim)
    for end in range(unit, T + unit, unit):
        position = min(end, T) - 1
        for slot in range(batch):
            decoder.texts[slot] = [0] * position         # whatever is in the cache
        parts = [ne.Part(slot, [7]) for slot in range(batch)]
        for _ in range(3):
            decoder.read(parts)
            for slot in range(batch):
                decoder.truncate(position, slot)
        key = 1 << (batch - 1).bit_length(), steps.parts_bucket(position + 1), True
        replay = functools.partial(steps.graphs[key], None)

        def many():
            for _ in range(100):
                replay()
            nc.stream.synchronize()
        total += median_ms(many) / 100
    return total / len(range(unit, T + unit, unit))

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
        decoder.texts[slot] = [0] * (T - 1)
    decoder.read([ne.Part(slot, [7]) for slot in range(batch)])      # leaves rows at T - 1
    launches, launch = {}, nc.launch

    def keep(kernel, *args, **config):
        name = kernel.py_func.__name__
        launches.setdefault(name, []).append((kernel, args, config))
    nc.launch = keep
    try:
        key = 1 << (batch - 1).bit_length(), steps.parts_bucket(T), True
        steps.queue(*key)
    finally:
        nc.launch = launch
    out = {}
    for name, found in launches.items():
        if name == "take_kernel":
            continue
        for overlap in (contextlib.nullcontext, nc.overlapping):
            def row(found=found, overlap=overlap):
                with overlap():
                    for i in range(200):
                        kernel, args, config = found[i % len(found)]
                        launch(kernel, *args, **config)
            graph = nc.Graph()
            graph(row)

            def replay(graph=graph, row=row):
                graph(row)
                nc.stream.synchronize()
            out[name, overlap is nc.overlapping] = 1e3 * median_ms(replay, 5) / 200
    assert size.L > 1
    return out

def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="base")
    parser.add_argument("--kernels", action="store_true", help="us of each kernel, too")
    parser.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    cfg, flat = ne.PRESETS[args.preset], ne.init_params(ne.PRESETS[args.preset], 1)
    decoder = nc.Decoder(cfg, flat, "bf16", slots=8)
    T = cfg.seq_len
    print(f"{nc.cuda.get_current_device().name}, {args.preset}, contexts of {T}", flush=True)
    for batch in (1, 4, 8):
        host, device = decode_ms(decoder, batch, T), device_ms(decoder, batch, T)
        print(f"  batch {batch}: {host:.3f} ms a step, host; {device:.3f} device; "
              f"{1e3 * batch / host:,.0f} tokens/s", flush=True)
    print(f"  prompt of {T}: {prompt_ms(decoder, T):.2f} ms", flush=True)
    if args.kernels:
        for batch in (1, 8):
            found = kernel_us(decoder, batch)
            names = dict.fromkeys(name for name, _ in found)
            print(f"  us a kernel, batch {batch}, plain / dependent launch: " + ", ".join(
                f"{name} {found[name, False]:.2f} / {found[name, True]:.2f}" for name in names),
                flush=True)
    if args.peer:
        try:
            import bench_gpu
        except ImportError as e:
            print(f"  no peer: {e}")
            return
        for name, ms in bench_gpu.peer_decode(args.preset)["times"].items():
            print(f"  batch 1, {name}: {ms['ms']:.3f} ms a token", flush=True)

if __name__ == "__main__":
    main()
