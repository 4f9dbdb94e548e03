"""One engine in one process: builds it, warms it up, then times batches of steps on request.

Spoken over stdin and stdout, one JSON value a line.  Tasks train and decode: {"ready": engine,
"first_s": seconds until the first step was done} comes first; then each request is a number of
repetitions, each answer a list of seconds (one a training step, or one a decoded token).  Tasks
versions and kernel: one value, and the process ends.
Run by bench_cpu.py:  python bench/workers.py ENGINE TASK PRESET THREADS
"""
import contextlib
import pathlib
import platform
import sys
import time

import common
import numpy as np
from nanoeuler_parts.runs.options import TrainOptions

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
BATCH = {"small": 16, "big": 8}              # sequences a training step


def random_batch(preset, cfg):
    """tokens (B, T) and the targets (P, B, T) of all heads, the same for every engine."""
    stream = np.random.default_rng(1).integers(
        0, cfg.vocab_size, (BATCH[preset], cfg.seq_len + cfg.n_mtp), dtype=np.int32)
    T = cfg.seq_len
    targets = np.stack([stream[:, k + 1:k + 1 + T] for k in range(cfg.n_mtp)])
    return np.ascontiguousarray(stream[:, :T]), targets


def timed(call, n):
    """n calls, seconds each."""
    seconds = []
    for _ in range(n):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def contexts(step, seq_len, n):
    """n whole contexts decoded greedily: step(token, pos) -> next token; seconds a token."""
    seconds = []
    for _ in range(n):
        token = 0
        for pos in range(seq_len):
            start = time.perf_counter()
            token = step(token, pos)
            seconds.append(time.perf_counter() - start)
    return seconds


# ---- PyTorch
def torch_train(engine, preset):
    import torch
    from oracles import torch_peer as peer
    cfg = peer.PRESETS[preset]
    idx, targets = (torch.from_numpy(x).long() for x in random_batch(preset, cfg))
    step = peer.make_step(peer.Peer(cfg), compiled="eager" not in engine, bf16="bf16" in engine)

    def run(n):
        return timed(lambda: step(idx, targets), n)

    return run


def torch_decode(engine, preset):
    import torch
    from oracles import torch_peer as peer
    cfg = peer.PRESETS[preset]
    if "tuned" in engine:                    # what its tuning guide offers beyond the default
        import torch._inductor.config as inductor
        inductor.freezing = inductor.cpp_wrapper = inductor.max_autotune = True
    model = peer.Peer(cfg).eval().requires_grad_(False)
    decode = peer.make_decoder(model, compiled="eager" not in engine)
    # Made where decode makes its tokens: one that is no inference tensor would compile once more.
    with torch.inference_mode():
        positions = [torch.tensor([t]) for t in range(cfg.seq_len)]
        first = torch.zeros(1, 1, dtype=torch.long)
    torch._dynamo.config.error_on_recompile = True

    def step(token, pos):
        return decode(first if pos == 0 else token, positions[pos])

    return lambda n: contexts(step, cfg.seq_len, n)


# ---- NanoEuler
def nanoeuler_train(engine, preset):
    import nanoeuler as ne
    cfg = ne.PRESETS[preset]
    o = TrainOptions.chosen(optimizer="adamw")
    tokens, targets = random_batch(preset, cfg)
    dtype = ne.BF16 if "bf16" in engine else None
    model = ne.Model(cfg, ne.init_params(cfg, 0), dtype=dtype)
    hyper = ne.Hyper(lr=3e-3, beta1=o.beta1, beta2=o.beta2, eps=1e-8, weight_decay=0.1, clip=1.0,
                     correct1=1.0, correct2=1.0)

    def step():
        model.gradient(tokens, targets, ne.loss_weights(targets, 0.3))
        model.update(hyper)

    return lambda n: timed(step, n)


def nanoeuler_decode(engine, preset):
    import nanoeuler as ne
    cfg = ne.PRESETS[preset]
    decoder = ne.Decoder(cfg, ne.init_params(cfg, 0))

    def step(token, pos):
        if pos == 0:
            decoder.truncate(0)              # a new context in the same cache
        return int(decoder.step(token).argmax())

    return lambda n: contexts(step, cfg.seq_len, n)


# ---- the micro-kernel against the core's peak
def fma_peak(dtype, bits):
    """rate() -> flop/s of FMAs on one core with vectors of `bits` bits: a = a * x + y on 12
    independent sums a, which stay in registers, as many as hide the latency of an FMA."""
    from llvmlite import ir
    from numba import njit, types
    from numba.core import cgutils
    from numba.extending import intrinsic
    width = np.dtype(dtype).itemsize * 8
    lanes = bits // width
    sums = 12

    @intrinsic
    def fma_loop(typingctx, n, x, y):
        def codegen(context, builder, sig, args):
            n, x, y = args
            vector = ir.VectorType(x.type, lanes)
            name = f"llvm.fma.v{lanes}f{width}"
            fma = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(vector, [vector] * 3), name)

            def lane(i):
                return ir.Constant(ir.IntType(32), i)

            xs = ys = ir.Constant(vector, ir.Undefined)
            for i in range(lanes):
                xs = builder.insert_element(xs, x, lane(i))
                ys = builder.insert_element(ys, y, lane(i))
            # LLVM turns these stack slots into registers
            acc = [cgutils.alloca_once_value(builder, ys) for _ in range(sums)]
            with cgutils.for_range(builder, n):
                for a in acc:
                    builder.store(builder.call(fma, [builder.load(a), xs, ys]), a)
            total = builder.load(acc[0])     # every sum is used, or LLVM would drop it
            for a in acc[1:]:
                total = builder.fadd(total, builder.load(a))
            return builder.extract_element(total, lane(0))
        return x(types.intp, x, x), codegen

    @njit
    def run(n, x, y):
        return fma_loop(n, x, y)

    n = 1_000_000
    x, y = np.dtype(dtype).type(0.999), np.dtype(dtype).type(1e-3)
    run(1, x, y)

    def rate():
        (seconds,) = timed(lambda: run(n, x, y), 1)
        return 2 * lanes * sums * n / seconds

    return rate


def kernel_rates(preset, dtype, rounds):
    """One core, flop/s: the FMA peak of each vector width, and matmul on the forward's shapes.

    W is packed beforehand, only matmul is timed; peak and shapes take turns in every round.
    "step": the rows of all sequences and the weights of all layers are walked as a step walks them,
    through L2 and L3.  "hot": one sequence, one layer, again and again: the kernel alone."""
    import nanoeuler as ne
    from numba import njit
    cfg, B = ne.PRESETS[preset], BATCH[preset]
    T, C, F, V, L, P = (cfg.seq_len, cfg.n_embd, cfg.n_hidden, cfg.vocab_size, cfg.n_layer,
                        cfg.n_mtp)
    HD, QKV = cfg.n_head * cfg.head_dim, (cfg.n_head + 2 * cfg.n_kv_head) * cfg.head_dim
    matmul = ne.tiled_matmul

    @njit(nogil=True)
    def sweep(out, x, w, repeats):
        for _ in range(repeats):
            for layer in range(w.shape[0]):
                for b in range(x.shape[0]):
                    matmul(out[b], x[b], w[layer])

    def job(rates, flop, *sweep_arguments):
        """measure(), which appends a rate to `rates`."""
        def measure():
            (seconds,) = timed(lambda: sweep(*sweep_arguments), 1)
            rates.append(flop / seconds)

        sweep(*sweep_arguments)              # compiles
        return measure

    rng = np.random.default_rng(0)
    panel = ne.tile_width(dtype)
    peaks = {bits: fma_peak(dtype, bits) for bits in (128, 256, 512) if bits <= host_bits()}
    rates = {"peak": {bits: [] for bits in peaks}, "step": {}, "hot": {}, "flop": {}}
    jobs = []
    shapes = dict(qkv=(L, QKV, C), attn_proj=(L, C, HD), gate_up=(L, 2 * F, C), down=(L, C, F),
                  lm_head=(P, V, C))
    for name, (count, N, K) in shapes.items():
        x, out = ne.aligned((B, T, K), dtype), ne.aligned((B, T, N), dtype)
        w = ne.aligned((count, -(-N // panel), K, panel), dtype)
        x[:], w[:] = rng.standard_normal(x.shape), rng.standard_normal(w.shape)
        flop = 2.0 * count * B * T * N * K
        rates["flop"][name] = flop
        rates["step"][name] = []
        rates["hot"][name] = []
        jobs.append(job(rates["step"][name], flop, out, x, w, 1))
        jobs.append(job(rates["hot"][name], flop, out[:1], x[:1], w[:1], count * B))
    for _ in range(rounds):
        for bits, rate in peaks.items():
            rates["peak"][bits].append(rate())
        for measure in jobs:
            measure()
    return rates


# ---- facts
def host_bits():
    """The widest vectors this CPU has, whatever NANOEULER_BITS says."""
    import llvmlite.binding as llvm
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return 512
    return 256 if features.get("avx2") else 128


def versions():
    import llvmlite.binding as llvm
    import torch
    build = torch.__config__.show().splitlines()
    keep = [s.strip(" -") for s in build
            if any(w in s for w in ("Math Kernel", "MKL-DNN", "OpenMP", "CPU capability"))]
    return {"python": platform.python_version(),
            **common.versions("numpy", "numba", "llvmlite", "torch"), "torch_build": keep,
            "llvm_cpu": llvm.get_host_cpu_name(), "vector_bits": host_bits()}


def main():
    engine, task, preset, threads = sys.argv[1:5]
    say = common.protocol()
    sys.path.insert(0, str(ROOT))
    if task == "versions":
        return say(versions())
    if task == "kernel":
        return say({d: kernel_rates(preset, d, rounds=15) for d in ("float32", "float64")})
    if engine.startswith("torch"):
        import torch
        torch.set_num_threads(int(threads))
        build = {"train": torch_train, "decode": torch_decode}[task]
    else:
        build = {"train": nanoeuler_train, "decode": nanoeuler_decode}[task]
    start = time.perf_counter()
    run = build(engine, preset)
    run(1)
    first = time.perf_counter() - start
    run(3 if task == "train" else 1)
    say({"ready": engine, "first_s": first})
    with contextlib.suppress(KeyboardInterrupt):
        for line in sys.stdin:
            run(1)                           # threads awake, caches warm
            say(run(int(line)))


if __name__ == "__main__":
    main()
