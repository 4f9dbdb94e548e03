"""The self-tests of the kernels of nanoeuler_cuda.py, op by op, and of the kernel of ranks/."""
import functools
import math
from dataclasses import replace

import numpy as np

import nanoeuler as ne
from nanoeuler_cuda import (
    adamw, add_bias, bias_gradient, cross_entropy, Decoder, DTYPES, embedding_backward,
    embedding_forward, Entries, GAIN_PARTS, head_norm_backward, head_norm_forward, kernel_path,
    make_ops, Muon, naive_matmul, new, NORM_PARTS, residual_rmsnorm_forward, rmsnorm_again,
    rmsnorm_backward, rope, Runs, runs_of, square_sums, swiglu_backward, swiglu_forward,
    tensor_core_matmul, to_device, to_host,
)
from nanoeuler_parts.gpu.launches import launch
from nanoeuler_parts.ranks.engine import add_in_order_kernel
from nanoeuler_parts.selftests.bounds import as_sum
from nanoeuler_parts.selftests.cases import nearest_bf16

def add_matmul_tests(ops):
    # The rungs of the ladder that no model uses
    for M, N, K in (1, 1, 2), (5, 7, 6), (64, 64, 64), (130, 70, 66), (300, 257, 200):
        x, w = ops.normal(M, K), ops.normal(N, K)
        ops.add(naive_matmul, [np.zeros((M, N))], [x, w], [x @ w.T])
        if kernel_path() != "portable":
            ops.add(tensor_core_matmul, [np.zeros((M, N))], [x, w], [x @ w.T], dtypes=("bf16",))
    # The last three are for tensor cores: edges of tiles; more tiles than blocks, with dW in
    # splits; a long sum
    for M, N, K in ((1, 1, 1), (5, 7, 3), (128, 128, 16), (129, 130, 17), (300, 257, 100),
                    (304, 264, 104), (17100, 8, 8), (1000, 1288, 2056)):
        if ops.quick and M * N * K > 1 << 24:
            continue
        x, w, dy, dw = ops.normal(M, K), ops.normal(N, K), ops.normal(M, N), ops.normal(N, K)
        ops.add_for_ops(matmul_test, [0 * dy], [x, w], [x @ w.T], "matmul")
        ops.add_for_ops(matmul_dx_test, [0 * x], [dy, w], [dy @ w], "matmul_dx")
        if M * N * K < 1 << 24:
            ops.add_for_ops(matmul_dx_added_test, [x], [dy, w], [x + dy @ w], "matmul_dx, added")
        ops.add_for_ops(matmul_dw_test, [as_sum(dw), np.ones(1, np.uint32)], [dy, x],
                        [dw + dy.T @ x, np.zeros(1, np.uint32)], "matmul_dw")
        ops.add_for_ops(functools.partial(matmul_dw_test, add=False),
                        [np.full_like(as_sum(dw), np.nan), np.ones(1, np.uint32)], [dy, x],
                        [dy.T @ x, np.zeros(1, np.uint32)], "matmul_dw, set")

def add_embedding_tests(ops):
    for BT, V, C in ((1, 1, 1), (70, 13, 10), (300, 512, 1030), (33, 5, 128)):
        tokens = ops.rng.integers(0, V, BT, dtype=np.int32)
        dx, dwte = ops.normal(BT, C), ops.normal(V, C)
        ops.add(embedding_forward, [0 * dx], [tokens, ops.normal(V, C)])
        expected = dwte.copy()
        ne.embedding_backward(expected, dx, tokens)
        ops.add(embedding_backward_test, [as_sum(dwte)], [dx, *runs_of(tokens, V)], [expected],
                "embedding_backward")

def embedding_backward_test(dwte, dx, *runs):
    embedding_backward(dwte, dx, Runs(*runs))

def add_rmsnorm_tests(ops):
    for BT, C in ((1, 5), (3, 10), (37, 320), (130, 768), (9, 2049)):
        x, w, dy = ops.normal(BT, C), ops.normal(C), ops.normal(BT, C)
        dnext, dw = ops.normal(BT, C), ops.normal(C)
        y, rstd, dx, dgain = 0 * x, np.zeros(BT), 0 * x, 0 * dw
        step = nearest_bf16(0.1 * ops.normal(BT, C))
        ne.rmsnorm_forward(y, rstd, x, w, 1e-5)
        ops.add(residual_rmsnorm_forward, [step, 0 * x, as_sum(0 * rstd), as_sum(x - step)],
                [as_sum(w), 1e-5], [y.copy(), x, rstd, x], "rmsnorm_forward")
        ops.add(rmsnorm_again, [0 * x], [x, as_sum(w), as_sum(rstd)], [y])
        ne.rmsnorm_backward(dx, dnext, dy, x, w, rstd)
        ne.gain_gradient(dgain, dy, x, rstd, 0)
        dgain += dw
        ops.add(rmsnorm_backward, [dnext, as_sum(dw), dy],
                [as_sum(np.zeros((GAIN_PARTS, C))), x, as_sum(w), as_sum(rstd)], [dx, dgain, y])

def add_rope_and_attention_tests(ops):
    # One window per shape, since kernels are compiled for each.  The last six shapes, and
    # (1, 449, .., 64), have several tiles on every path.  (2, 128, ..) have several sequences of
    # whole tiles, as in training
    for B, T, H, G, D, window in (
            (2, 128, 4, 2, 64, 40), (1, 449, 4, 2, 64, 70),
            (1, 1, 1, 1, 2, 0), (2, 65, 4, 2, 10, 9), (1, 64, 4, 4, 64, 1), (2, 130, 6, 1, 32, 64),
            (1, 200, 12, 4, 64, 150), (2, 33, 2, 1, 128, 9), (1, 63, 3, 3, 34, 0),
            (2, 321, 2, 1, 64, 64), (1, 330, 2, 2, 128, 150), (1, 385, 2, 1, 32, 0),
            (1, 321, 1, 1, 10, 64), (2, 128, 4, 2, 128, 70), (1, 449, 3, 1, 128, 0)):
        qkv, do = ops.normal(B * T, (H + 2 * G) * D), ops.normal(B * T, H * D)
        o, lse, dqkv, scratch = 0 * do, np.zeros((H, B * T)), 0 * qkv, np.zeros((H, B * T))
        cos, sin = ne.rope_table(replace(ne.PRESETS["small"], head_dim=D, seq_len=T), np.float64)
        angles = [as_sum(cos), as_sum(sin)]
        attention_twin(o, lse, dqkv, do, qkv, T, D)
        turned, every = qkv.copy(), [np.tile(x, (B, 1)) for x in (cos, sin)]
        ne.rope(turned, *every, H + G, 1.0)
        ops.add(rope, [qkv], [*angles, T, H + G, 1], [turned])
        turned_back = nearest_bf16(turned)
        ne.rope(turned_back, *every, H + G, -1.0)
        ops.add(rope, [nearest_bf16(turned)], [*angles, T, H + G, -1], [turned_back],
                "rope, backward")
        ops.add_for_ops(attention_forward_test, [0 * o, as_sum(scratch)], [qkv, T, D], [o, lse],
                        "attention_forward")
        ne.rope(dqkv, *every, H + G, -1.0)
        ops.add_for_ops(attention_backward_test, [0 * dqkv],
                        [as_sum(scratch), do, o, as_sum(lse), qkv, *angles, T, D], [dqkv],
                        "attention_backward")
        if window:
            o, lse, dqkv = 0 * do, 0 * scratch, 0 * qkv
            attention_twin(o, lse, dqkv, do, qkv, T, D, window)
            ne.rope(dqkv, *every, H + G, -1.0)
            ops.add_for_ops(attention_forward_test, [0 * o, as_sum(scratch)],
                            [qkv, T, D, window], [o, lse], "window, forward")
            ops.add_for_ops(attention_backward_test, [0 * dqkv],
                            [as_sum(scratch), do, o, as_sum(lse), qkv, *angles, T, D, window],
                            [dqkv], "window, backward")

def add_swiglu_tests(ops):
    for BT, F in ((1, 1), (7, 9), (65, 344), (3, 2048)):
        gate_up, dy = nearest_bf16(3 * ops.normal(BT, 2 * F)), ops.normal(BT, F)
        ops.add(swiglu_forward, [0 * dy], [gate_up])
        ops.add(swiglu_backward, [gate_up], [dy])

def add_cross_entropy_tests(ops):
    for BT, P, V in ((1, 1, 2), (5, 1, 13), (9, 4, 512), (3, 2, 4099)):
        logits, nll = nearest_bf16(3 * ops.normal(BT, P, V)), np.zeros((P, BT))
        weight = ops.rng.random((-(-BT // 2), P, 2))
        targets, expected = ops.rng.integers(-1, V, (P, BT), dtype=np.int32), logits.copy()
        for k in range(P):
            of_rows = weight[:, k].ravel()[:BT]
            ne.cross_entropy(nll[k], expected[:, k], targets[k], of_rows)
        ops.add(cross_entropy_test, [logits.reshape(BT, P * V), as_sum(0 * nll)],
                [targets, weight.tolist(), V], [expected.reshape(BT, P * V), nll], "cross_entropy")

def add_bias_and_head_norm_tests(ops):
    for BT, H, G, D in ((1, 1, 1, 4), (37, 4, 2, 10), (130, 6, 3, 64), (9, 2, 1, 130),
                        (33, 5, 2, 128), (70, 3, 1, 24)):
        heads, QKV = H + G, (H + 2 * G) * D
        qkv, dqkv, bias, dbias = (ops.normal(*shape) for shape in ((BT, QKV),) * 2 + ((QKV,),) * 2)
        ops.add(add_bias, [qkv], [as_sum(bias)])
        ops.add(bias_gradient, [as_sum(dbias)], [dqkv, as_sum(np.zeros((GAIN_PARTS, QKV)))],
                [dbias + dqkv.sum(0)])
        q_gain, k_gain, dq_gain, dk_gain, *found = (ops.normal(D) for _ in range(6))
        gains, qk = [as_sum(q_gain), as_sum(k_gain)], qkv[:, :heads * D].copy()
        y, dx, rstd = qkv.copy(), dqkv.copy(), np.zeros((BT, heads))
        ne.head_norm_forward(y, rstd, q_gain, k_gain, H, 1e-5)
        ops.add(head_norm_forward, [qkv, 0 * qk, as_sum(0 * rstd)], [*gains, 1e-5], [y, qk, rstd])
        ne.head_norm_backward(dx, qk, rstd, q_gain, k_gain, H)
        for dgain, first, last in zip(found, (0, H), (H, heads)):
            ne.head_gain_gradient(dgain, dqkv, qk, rstd, first, last, D, 0)
        ops.add(head_norm_backward, [dqkv, as_sum(dq_gain), as_sum(dk_gain)],
                [as_sum(np.zeros((GAIN_PARTS, 2 * D))), qk, as_sum(rstd), *gains],
                [dx, dq_gain + found[0], dk_gain + found[1]])

def add_adamw_tests(ops):
    hyper = [*ne.hyper_at(2, 1e-2, beta1=0.9, beta2=0.95, weight_decay=0.1, clip=1.0)]
    # The square of 2^70 overflows float32
    for N, size in ((1, 1), (1000, 1), (100003, 1), (1000, 2.0 ** 70)):
        p, m, v = ops.normal(N), ops.normal(N), ops.normal(N) ** 2
        g = size * ops.normal(N)
        expected = [x.copy() for x in (p, g, m, v)]
        norm = ne.adamw(*expected, N // 2, ne.Hyper(*hyper))
        expected[1] = g                      # which the next gradient sets
        ops.add(adamw_test, [p, g, m, v, np.zeros(1)], [N // 2, hyper], [*expected, [norm]],
                "adamw", ("f32", "f64"))
        ops.add(adamw_copies_test, [0 * p, *map(as_sum, (p, g, m, v))], [N // 2, hyper],
                [expected[0], *expected], "adamw, copies", ("bf16",))
        g = g + np.where(np.arange(N) == N // 2, math.nan, 0)        # then nothing may change
        ops.add(adamw_nan_test, [p, m, v], [g, np.zeros(1), N // 2, hyper], [p, m, v], "adamw, NaN",
                ("f32", "f64"))

def add_muon_tests(ops):
    """One step from parameters of 0: they become the update itself, which is not lost in them."""
    hyper = ne.hyper_at(2, 1e-2, beta1=0.9, beta2=0.95, weight_decay=0.1, clip=1.0, muon_lr=0.02,
                        momentum=0.9, newton_schulz=3, embedding_lr=4.0)
    for sizes in (dict(), dict(n_embd=37, n_head=3, n_kv_head=1, head_dim=14, n_hidden=75),
                  dict(n_embd=264, n_head=4, n_kv_head=2, head_dim=64, n_hidden=520)):
        cfg = replace(ne.PRESETS["small"], n_layer=2, vocab_size=16, **sizes)
        part = ne.muon_slice(cfg)
        n = part.stop - part.start
        outputs = [as_sum(x) for x in (np.zeros(n), ops.normal(n), 0.1 * ops.normal(n))]
        for name, dtypes in ("muon", ("f32", "f64")), ("muon, bf16", ("bf16",)):
            ops.add(muon_test, outputs, [ops.normal(8), cfg, hyper], muon_on_cpu, name, dtypes)

def muon_on_cpu(p, g, m, like, cfg, hyper):
    """nanoeuler.muon of these parts of the flat buffers"""
    part, scratch = ne.muon_slice(cfg), [ne.aligned(x, np.float64) for x in ne.muon_shapes(cfg, 1)]
    whole = [ne.aligned((part.stop,), np.float64) for _ in range(3)]
    for x, y in zip(whole, (p, g, m)):
        x[:part.start], x[part] = 0, y
    scale = ne.clipping(ne.gradient_norm(whole[1]), hyper)
    ne.muon(*whole, ne.muon_matrices(cfg), hyper, scale, ne.MuonScratch(*scratch))
    p[:], m[:] = whole[0][part], whole[2][part]

def muon_test(p, g, m, like, cfg, hyper):
    """like: an array in the type of matrix products"""
    partial = new(NORM_PARTS, np.float64)
    muon = Muon(cfg, like.dtype, ne.muon_slice(cfg), make_ops())
    square_sums(partial, g)
    muon.update(Entries(p, new(p.size, like.dtype), g, m, None), to_device(hyper, np.float64),
                int(hyper.newton_schulz), partial, new(1, np.float64))

def add_decode_tests(ops):
    for cfg in (replace(ne.PRESETS["small"], n_layer=2, seq_len=70, vocab_size=61),
                replace(ne.PRESETS["small"], n_layer=1, seq_len=9, tie_embeddings=True, n_mtp=1),
                replace(ne.PRESETS["small"], n_layer=2, seq_len=70, qkv_bias=True, qk_norm=True,
                        window=9, rope_scaling="yarn", rope_factor=4.0, rope_original=20)):
        flat = ne.init_params(cfg, 3, np.float64)
        if cfg.qkv_bias:
            vectors = ne.entries_where(cfg, lambda x: not x.decays)
            flat[vectors] += 0.5 * ops.normal(vectors.stop - vectors.start)
        tokens = ops.rng.integers(0, cfg.vocab_size, cfg.seq_len)
        expected = functools.partial(expected_logits, cfg, flat, tokens)
        decode = functools.partial(decode_test, cfg, flat, tokens)
        ops.add_case("decode", expected, decode, ("f32", "f64"))

def add_rank_tests(ops):
    """The kernel that adds the gradients of several GPUs"""
    def add_in_order_test(g, others, rank):
        launch(add_in_order_kernel, g, others, rank, grid=1024, block=256)

    for ranks, n in ((2, 1), (3, 300_001)):
        all_g = ops.normal(ranks, n)
        for rank in range(ranks):
            others = all_g.copy()
            others[rank] = np.nan            # a rank receives nothing from itself
            ops.add(add_in_order_test, [all_g[rank]], [others, rank], [all_g.sum(0)],
                    "add_in_order", ("f32", "f64"))

def expected_logits(cfg, flat, *texts):
    """[(T, V)] of each text: the logits after each token, from nanoeuler.py"""
    model = ne.Model(cfg, flat)
    return [model.logits(np.array([text], np.int32))[0, 0].copy() for text in texts]

def decode_test(cfg, flat, tokens, dtype):
    """[(T, V)]: the logits after each token"""
    decoder = Decoder(cfg, flat.astype(DTYPES[dtype]))
    return [np.array([decoder.step(token) for token in tokens.tolist()])]

def attention_twin(o, lse, dqkv, do, qkv, T, D, window=0):
    """Computes o, lse and dqkv of attention without RoPE, with the functions of nanoeuler.py, one
    sequence of T rows after another."""
    H = do.shape[1] // D
    heads = H, (qkv.shape[1] // D - H) // 2, D, window or T
    for b in range(0, len(qkv), T):
        s, one = slice(b, b + T), np.zeros((len(lse), T))
        ne.attention_forward(o[s], one, qkv[s], 0, *heads)
        ne.attention_backward(dqkv[s], do[s], o[s], one, qkv[s], *heads)
        lse[:, s] = one

def matmul_test(ops, *args):
    ops.matmul(*args)

def matmul_dx_test(ops, *args):
    ops.matmul_dx(*args)

def matmul_dx_added_test(ops, *args):
    ops.matmul_dx(*args, add=True)

def matmul_dw_test(ops, dw, left, dy, x, add=True):
    """left: becomes the number of semaphores that are not zero afterwards"""
    ops.matmul_dw(dw, dy, x, add)
    semaphores = to_host(ops.semaphores) if hasattr(ops, "semaphores") else np.zeros(1)
    left.copy_to_device(np.array([np.count_nonzero(semaphores)], np.uint32))

def attention_forward_test(ops, *args):
    ops.attention_forward(*args)

def attention_backward_test(ops, *args):
    ops.attention_backward(*args)

def cross_entropy_test(logits, nll, targets, weight, V):
    cross_entropy(nll, logits, targets, to_device(weight, np.float64), 0, V, 2)

def adamw_step(entries, n_decay, hyper):
    """A step of all parameters.  Returns [|g|]."""
    partial, results = new(NORM_PARTS, np.float64), to_device([0], np.float64)
    square_sums(partial, entries.g)
    adamw(entries, n_decay, to_device(hyper, np.float64), partial, results)
    return to_host(results)

def adamw_test(p, g, m, v, norm, n_decay, hyper):
    results = adamw_step(Entries(p, p, g, m, v), n_decay, hyper)
    norm.copy_to_device(results.astype(norm.dtype))

def adamw_copies_test(copies, p, g, m, v, n_decay, hyper):
    adamw_step(Entries(p, copies, g, m, v), n_decay, hyper)

def adamw_nan_test(p, m, v, g, norm, n_decay, hyper):
    """adamw_test with g as an input: only p, m and v are compared."""
    adamw_test(p, g, m, v, norm, n_decay, hyper)
