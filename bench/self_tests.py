"""What proves the GPU program: each kernel, and the whole gradient, against the CPU in float64.

    python nanoeuler_cuda.py [test]           self_tests
    python nanoeuler_cuda.py g                gradient_check
"""
import functools
import math
from dataclasses import replace

import numpy as np

import nanoeuler as ne
import nanoeuler_cuda as nc
from bench.naive_attention import naive_backward, naive_forward
from nanoeuler import from_bf16, need, to_bf16

TOLERANCE = {"bf16": 1e-2, "f32": 5e-6, "f64": 1e-12}    # |gpu - cpu| / |cpu|; the CPU is float64


def relative_error(x, y):
    """|x - y| / |y|; the error itself where y is zero."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return float(np.linalg.norm(x - y) / (np.linalg.norm(y) or 1.0))


def self_tests(quick=False):
    """Every kernel against its twin in nanoeuler.py, over shapes that bite; each run twice, to the
    bit.  One line a kernel: the worst error of all its shapes.  Returns the exit code."""
    print("kernel               shapes  bfloat16   float32   float64   (|gpu - cpu| / |cpu|)")
    failed = []
    for name, cases in op_tests(quick).items():
        worst, same = {}, True
        for expected, run, dtypes in cases:
            for dtype in filter(nc.has, dtypes):
                first, second = run(dtype), run(dtype)
                same &= all(np.array_equal(x, y, equal_nan=True) for x, y in zip(first, second))
                worst[dtype] = np.max([worst.get(dtype, 0), *(           # a NaN stays a NaN
                    relative_error(x, y) for x, y in zip(first, expected, strict=True))])
        good = same and all(error <= TOLERANCE[dtype] for dtype, error in worst.items())
        failed += [] if good else [name]
        errors = "".join(f"{worst[d]:10.1e}" if d in worst else " " * 10 for d in TOLERANCE)
        print(f"{name:<20} {len(cases):>6}{errors}   {'ok' if good else 'FAILED'}"
              f"{'' if same else ', two runs differ'}", flush=True)
    print(f">>> {len(failed)} kernels FAILED: {', '.join(failed)}" if failed else
          ">>> kernels OK (every run twice, with equal bits)")
    return 1 if failed else 0


class Sum(np.ndarray):
    """A test's array that is never stored as bfloat16: sums, gains, gradients of weights."""


def exact(x):
    return x.view(Sum)


def on_device(function, outputs, inputs, top, dtype):
    """What function(*outputs, *inputs) makes of the outputs on the device, floating arrays in the
    type of the run, `top` the highest rung of tensor cores."""
    def put(x):
        if not isinstance(x, np.ndarray):
            return x
        if dtype == "bf16" and x.dtype == np.float64 and not isinstance(x, Sum):
            x = to_bf16(x)
        return nc.to_device(x, nc.computing(nc.DTYPES[dtype]) if x.dtype == np.float64 else None)
    arrays, before, nc.highest = [put(x) for x in (*outputs, *inputs)], nc.highest, top
    try:
        function(*arrays)                    # which queues kernels: the arrays must live on
        return [from_bf16(nc.to_host(x)) for x in arrays[:len(outputs)]]
    finally:
        nc.highest = before


def op_tests(quick):
    """name -> [(expected arrays, float64; function of a dtype that returns the device's arrays; the
    dtypes)]     The numbers are such that bfloat16 holds: its errors are those of the kernels."""
    rng, tests = np.random.default_rng(1), {}
    normal = lambda *shape: from_bf16(to_bf16(rng.standard_normal(shape))).astype(np.float64)

    def test(function, outputs, inputs, twin=None, name=None, dtypes=tuple(nc.DTYPES)):
        """function(*outputs, *inputs) should make of the outputs what its twin does, by default the
        function of its name in nanoeuler.py, or the arrays given.  Where wgmma is, `mma` below it
        as well."""
        name, expected = name or function.__name__, twin
        if not isinstance(twin, list):
            expected = [np.array(x) for x in outputs]
            (twin or getattr(ne, name))(*expected, *[np.asarray(x) if isinstance(x, Sum) else x
                                                     for x in inputs])
        runs = [(name, nc.highest, dtypes)]
        if nc.rung() == "wgmma" and name.startswith(("matmul", "attention")):
            runs.append((name + ", mma", "mma", ("bf16",)))
        for name, top, dtypes in runs:
            run = functools.partial(on_device, function, outputs, inputs, top)
            tests.setdefault(name, []).append((expected, run, dtypes))

    # the last three for tensor cores: edges; more tiles than blocks, and dW in parts; depth
    for M, N, K in ((1, 1, 1), (5, 7, 3), (128, 128, 16), (129, 130, 17), (300, 257, 100),
                    (304, 264, 104), (17100, 8, 8), (1000, 1288, 2056)):
        if quick and M * N * K > 1 << 24:
            continue
        x, w, dy, dw = normal(M, K), normal(N, K), normal(M, N), normal(N, K)
        test(nc.matmul, [0 * dy], [x, w], [x @ w.T])
        test(nc.matmul_dx, [0 * x], [dy, w], [dy @ w])
        test(nc.matmul_dw, [exact(dw)], [dy, x, np.zeros(nc.TURNS, np.uint32)], [dw + dy.T @ x])
    for BT, V, C in ((1, 1, 1), (70, 13, 10), (300, 512, 1030), (33, 5, 128)):
        tokens, dx, dwte = rng.integers(0, V, BT, dtype=np.int32), normal(BT, C), normal(V, C)
        test(nc.embedding_forward, [0 * dx], [tokens, normal(V, C)])
        test(nc.embedding_backward, [exact(dwte)], [dx, tokens],
             lambda dwte, dx, tokens: ne.embedding_backward(dwte, dx[None], tokens[None]))
    for BT, C in ((1, 5), (3, 10), (37, 320), (130, 768), (9, 2049)):
        x, w, dy, dnext, dw = normal(BT, C), normal(C), normal(BT, C), normal(BT, C), normal(C)
        y, rstd, dx, dgain, step = 0 * x, np.zeros(BT), 0 * x, dw.copy(), 0.1 * normal(BT, C)
        ne.rmsnorm_forward(y, rstd, x, w, 1e-5)
        test(nc.rmsnorm_forward, [step, 0 * x, exact(0 * rstd), exact(x - step)], [exact(w), 1e-5],
             [y.copy(), x, rstd, x])
        ne.rmsnorm_backward(dx, dnext, dgain, dy, x, w, rstd)
        test(nc.rmsnorm_backward, [dnext, exact(dw), dy],
             [exact(np.zeros((nc.PARTS, C))), x, exact(w), exact(rstd)], [dx, dgain, y])
    for B, T, H, G, D in ((1, 1, 1, 1, 2), (2, 65, 4, 2, 10), (1, 64, 4, 4, 64), (2, 130, 6, 1, 32),
                          (1, 200, 12, 4, 64), (2, 33, 2, 1, 128), (1, 63, 3, 3, 34)):
        qkv, do = normal(B * T, (H + 2 * G) * D), normal(B * T, H * D)
        o, lse, dqkv, scratch = 0 * do, np.zeros((H, B * T)), 0 * qkv, np.zeros((H, B * T))
        probs = np.zeros((B, H, T, T))
        cos, sin = ne.rope_table(replace(ne.PRESETS["small"], head_dim=D, seq_len=T), np.float64)
        angles = [exact(cos), exact(sin)]
        attention_twin(o, lse, dqkv, do, qkv, T, D)
        turned, every = qkv.copy(), [np.tile(x, (B, 1)) for x in (cos, sin)]
        ne.rope(turned, *every, H + G, 1.0)
        test(nc.rope, [qkv], [*angles, T, H + G, 1], [turned])
        test(nc.rope, [turned], [*angles, T, H + G, -1], [qkv], "rope, backward")
        test(nc.attention_forward, [0 * o, exact(scratch)], [qkv, T, D], [o, lse])
        ne.rope(dqkv, *every, H + G, -1.0)
        test(naive_both, [0 * o, 0 * dqkv], [probs, probs, do, qkv, *angles, T, D], [o, dqkv],
             "naive attention")
        test(nc.attention_backward, [0 * dqkv],
             [exact(scratch), do, o, exact(lse), qkv, *angles, T, D], [dqkv])
    for BT, F in ((1, 1), (7, 9), (65, 344), (3, 2048)):
        gate_up, dy = 3 * normal(BT, 2 * F), normal(BT, F)
        test(nc.swiglu_forward, [0 * dy], [gate_up])
        test(nc.swiglu_backward, [gate_up], [dy])
    for BT, P, V in ((1, 1, 2), (5, 1, 13), (9, 4, 512), (3, 2, 4099)):
        logits, nll, weight = 3 * normal(BT, P, V), np.zeros((P, BT)), rng.random((-(-BT // 2), P))
        targets, expected = rng.integers(-1, V, (P, BT), dtype=np.int32), logits.copy()
        for k in range(P):
            for t in range(BT):
                nll[k, t] = ne.cross_entropy(expected[t, k:k + 1], targets[k, t:t + 1],
                                             weight[t // 2, k])
        test(cross_entropy_test, [logits.reshape(BT, P * V), exact(0 * nll)],
             [targets, weight.tolist(), V], [expected.reshape(BT, P * V), nll], "cross_entropy")
    hyper = [1e-2, 0.9, 0.95, 1e-8, 0.1, 1.0, 0.19, 0.0975]
    for N in (1, 1000, 100003):
        p, g, m, v = normal(N), normal(N), normal(N), normal(N) ** 2
        expected = [x.copy() for x in (p, g, m, v)]
        norm = ne.adamw(*expected, N // 2, np.array(hyper))
        test(adamw_test, [p, g, m, v, np.zeros(1)], [N // 2, hyper], [*expected, [norm]], "adamw",
             ("f32", "f64"))
        g = g + np.where(np.arange(N) == N // 2, math.nan, 0)        # then nothing may be touched
        test(lambda p, m, v, g, *rest: adamw_test(p, g, m, v, *rest), [p, m, v],
             [g, np.zeros(1), N // 2, hyper], [p, m, v], "adamw, NaN", ("f32", "f64"))
    for cfg in (replace(ne.PRESETS["small"], n_layer=2, seq_len=70, vocab_size=61),
                replace(ne.PRESETS["small"], n_layer=1, seq_len=9, tie_embeddings=True, n_mtp=1)):
        flat = ne.init_params(cfg, 3, np.float64)
        tokens = rng.integers(0, cfg.vocab_size, cfg.seq_len)
        expected = ne.Model(cfg, flat).logits(tokens[None].astype(np.int32))[0, 0]
        decode = lambda dtype, cfg=cfg, flat=flat, tokens=tokens: [
            np.array([*map(nc.Decoder(cfg, flat.astype(nc.DTYPES[dtype])).step, tokens.tolist())])]
        tests.setdefault("decode", []).append(([expected.copy()], decode, ("f32", "f64")))
    return tests


def attention_twin(o, lse, dqkv, do, qkv, T, D):
    """Attention of every sequence, forward and backward"""
    W = ne.tile_width(np.float64)
    scores, dscores = np.zeros((2, ne.BR, T))
    kt, vt = np.zeros((2, -(-T // W), D, W))
    for b in range(0, len(qkv), T):
        s, one = slice(b, b + T), np.zeros((len(lse), T))
        ne.attention_forward(o[s], one, qkv[s], D, scores, kt)
        ne.attention_backward(dqkv[s], do[s], o[s], one, qkv[s], D, scores, dscores, kt, vt)
        lse[:, s] = one


def naive_both(o, dqkv, probs, dprobs, do, qkv, cos, sin, T, D):
    naive_forward(o, probs, qkv, T, D)
    naive_backward(dqkv, dprobs, do, o, probs, qkv, cos, sin, T, D)


def cross_entropy_test(logits, nll, targets, weight, V):
    nc.cross_entropy(nll, logits, targets, nc.to_device(weight, np.float64), 0, V, 2)


def adamw_test(p, g, m, v, norm, n_decay, hyper):
    hyper, results = nc.to_device(hyper, np.float64), nc.to_device([0], np.float64)
    nc.adamw(p, p, g, m, v, n_decay, hyper, nc.new(nc.SUMS, np.float64), results)
    norm.copy_to_device(nc.to_host(results).astype(norm.dtype))


def gradient_check(preset="base", batch=1):
    """The gradient of the whole model, tensor by tensor, against the CPU's in float64."""
    need(batch > 0, f"--batch is {batch}, expected at least 1")
    cfg, B, rng = ne.PRESETS[preset], batch, np.random.default_rng(1)
    T, flat = cfg.seq_len, ne.init_params(cfg, 1, np.float64)
    tokens = rng.integers(0, cfg.vocab_size, (B, T), dtype=np.int32)
    targets = rng.integers(-1, cfg.vocab_size, (cfg.n_mtp, B, T), dtype=np.int32)
    weight = ne.loss_weights(targets, 0.3)
    cpu = ne.Model(cfg, flat)
    expected = cpu.run(ne.GRADIENT, tokens, targets, weight).sum(0)
    bars = {d: bar for d, bar in dict(bf16="5e-2", f32="5e-6", f64="1e-10").items() if nc.has(d)}
    print(f"gradient of {ne.n_params(cfg):,} parameters, {B} x {T} tokens, against the CPU in "
          f"float64:\n|gpu - cpu| / |cpu| of a tensor, and of its largest elements\n\n"
          "tensor      " + "".join(f"{nc.NAMES[nc.DTYPES[d]]:>14}{'':5}" for d in bars).rstrip())
    errors = {name: [] for name in (*cpu.g._fields, "loss")}
    for dtype in bars:
        gpu = nc.Model(cfg, flat, dtype=dtype)
        gpu.gradient(tokens, targets, weight)
        grads = nc.to_host(gpu.g_flat)
        losses, _ = gpu.update(np.ones(8))
        for name, x, y in zip(errors, (*ne.views(grads, gpu.table), losses), (*cpu.g, expected)):
            element = float(np.abs(x - y).max() / (np.abs(y).max() or 1))
            errors[name].append((relative_error(x, y), element))
        del gpu                              # before the next takes its memory
    for name, row in errors.items():
        print(f"{name:<12}" + "".join(f"   {norm:.1e} {element:.1e} " for norm, element in row))
    worst = [np.max([norm for norm, _ in column]) for column in zip(*errors.values())]
    good = all(error < float(bar) for error, bar in zip(worst, bars.values()))
    print("worst       " + "".join(f"   {error:.1e}         " for error in worst)
          + f"\n>>> gradient {'OK' if good else 'FAILED'} (< {', < '.join(bars.values())})")
    return 0 if good else 1
