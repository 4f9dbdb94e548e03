"""Every gradient of nanoeuler.py against central differences of its loss, in float64.

    python check.py [--seed N] [--quick]

Small models with random weights and everything on: grouped queries, several output heads whose
targets run past the end, masked targets (-1), gradients accumulated over micro-batches of unequal
masks.  The analytic gradient comes from the code that trains, compiled for float64; the loss is put
together here from its definition, over the whole batch at once:

    loss = CE_0 + 0.3 * mean_{k > 0} CE_k,    CE_k = mean of -log softmax over its targets

and for preferences, with r = log pi - log ref of a whole response, the mean over pairs of

    loss = -log sigmoid(0.1 (r(chosen) - r(rejected))),    log pi = -CE_0, summed

A tensor is moved along a direction u by s = -2h, -h, h, 2h; with f(s) the loss there,

    n = (8 (f(h) - f(-h)) - (f(2h) - f(-2h))) / 12h  =  df/ds + O(h^4)

Truncation, h^4 f''''' / 30, and rounding, 1e-16 * 1.5 f / h, balance where both are 1e-12 or so:
near h = 1e-3 for the usual curvature and 2e-4 for the sharpest of 280 random cases, so h = 2e-4.
With two points they balance near h = 1e-5, at 1e-10: too much beside a gradient of 1e-4.

The error is |a - n| / (|a| + |n| + rms), a = <g, u> the analytic value, rms the root mean square of
the tensor's gradient g.  For values of the usual size and above this is a relative error; near zero
it is the error in units of the usual value, because the noise of n does not shrink with a.  u are
all entries of a tensor, or ENTRIES random ones and DIRECTIONS random unit vectors through the whole
tensor (<g, u> is then as large as an entry of g), where an error in any entry shows.

Exit code 0 if every tensor of every case stays below 1e-6, else 1.
"""
import argparse
import math
import sys
import time
from dataclasses import replace

import numpy as np
from numba import set_num_threads

import nanoeuler as ne

TOLERANCE, H, MTP_WEIGHT, BETA = 1e-6, 2e-4, 0.3, 0.1
ENTRIES, DIRECTIONS, SEEDS = 24, 4, 2

# what is special, the fields of Config that differ from BASE, T, the sizes of the micro-batches
BASE = ne.Config(n_embd=10, n_head=4, n_kv_head=2, head_dim=4, n_layer=2, n_hidden=9, seq_len=7,
                 vocab_size=13, n_mtp=4)
CASES = [
    ("two query heads a key/value head, four output heads", {}, 7, (2, 1, 1)),
    ("one token: every head but the first has no target", {}, 1, (1, 3)),
    ("one layer, one key/value head", dict(n_layer=1, n_kv_head=1), 6, (3,)),
    ("as many key/value heads as query heads", dict(n_kv_head=4, head_dim=2), 5, (1, 2)),
    ("one output head", dict(n_mtp=1), 7, (2, 2)),
    ("head 0 tied to the embedding", dict(tie_embeddings=True), 7, (2, 1)),
    ("one output head, tied", dict(tie_embeddings=True, n_mtp=1, n_layer=1), 4, (2,)),
    ("past the blocks: 32 query rows, 128 positions of a sum, 128 rows of a matrix",
     dict(n_embd=33, n_head=3, n_kv_head=1, head_dim=34, n_hidden=70, seq_len=131, vocab_size=150,
          n_mtp=2), 131, (1, 2)),
    (DPO := "preferences: two pairs, one of them cut by a micro-batch", {}, 7, (1, 3)),
]


def random_params(cfg, rng):
    """A flat buffer at which nothing is nearly linear: products of unit size, gains around 1."""
    flat = ne.aligned((ne.n_params(cfg),), np.float64)
    for view, (name, shape, std) in zip(ne.views(flat, ne.param_table(cfg)), ne.param_table(cfg)):
        noise, fan_in = rng.standard_normal(shape), 1 if name == "wte" else shape[-1]
        view[...] = 1 + 0.3 * noise if std is None else noise / math.sqrt(fan_in)
    return flat


def random_batch(cfg, B, T, rng):
    """tokens (B, T), targets (P, B, T); each sequence has its own share of masked targets, -1."""
    stream = np.full((B, T + 1 + cfg.n_mtp), -1, np.int32)
    stream[:, :T + 1] = rng.integers(0, cfg.vocab_size, (B, T + 1))
    targets = np.stack([stream[:, k + 1:k + 1 + T] for k in range(cfg.n_mtp)])
    masked = rng.random((B, T)) < np.linspace(0.1, 0.9, B)[:, None]
    masked[0, 0] = False
    return stream[:, :T].copy(), np.where(masked, np.int32(-1), targets)


def loss_of(model, tokens, targets, reference):
    """The definitions above, from the summed cross-entropies (B, P) of the forward pass."""
    ce = model.run(ne.LOSS, tokens, targets)
    if reference is not None:
        chosen, rejected = (reference - ce[:, 0]).reshape(-1, 2).T
        return np.log1p(np.exp(-BETA * (chosen - rejected))).mean()
    ce = ce.sum(0) / np.maximum(1, (targets >= 0).sum((1, 2)))
    return ce[0] + MTP_WEIGHT * (ce[1:].mean() if len(ce) > 1 else 0)


def gradient(model, tokens, targets, sizes, reference):
    """The engine's gradient of all parameters, accumulated over micro-batches."""
    weight, start = np.zeros((len(tokens), len(targets))), 0
    if reference is None:
        weight[:] = ne.loss_weights(targets, MTP_WEIGHT)
    else:
        _, weight[:, 0] = ne.dpo_loss(model.losses(tokens, targets[0]), reference, BETA)
    model.g_flat[:] = 0
    for n in sizes:
        part = slice(start, start + n)
        model.run(ne.GRADIENT, tokens[part], targets[:, part], weight[part])
        start += n
    return model.g_flat.copy()


def derivative(model, view, u, *batch):
    """d loss / ds at view + s * u, s = 0."""
    before, f = view.copy(), {}
    for s in (-2, -1, 1, 2):
        view[...] = before + s * H * u
        model.pack()
        f[s] = loss_of(model, *batch)
    view[...] = before
    return (8 * (f[1] - f[-1]) - (f[2] - f[-2])) / (12 * H)


def check_case(cfg, T, sizes, seed, pairs):
    """Tensor name -> the largest error of its gradient."""
    rng, errors = np.random.default_rng(seed), {}
    model = ne.Model(cfg, random_params(cfg, rng))
    tokens, targets = random_batch(cfg, sum(sizes), T, rng)
    reference = rng.normal(model.losses(tokens, targets[0]), 2 / BETA) if pairs else None
    grads = ne.views(gradient(model, tokens, targets, sizes, reference), ne.param_table(cfg))
    for (name, shape, _), view, g in zip(ne.param_table(cfg), model.p, grads):
        if g.size == 0:                      # lm_head, if there is one head and it is tied
            continue
        chosen = rng.choice(g.size, min(ENTRIES, g.size), replace=False)
        units = [(np.arange(g.size) == i).reshape(shape).astype(float) for i in chosen]
        if g.size > ENTRIES:
            units += [u / np.linalg.norm(u) for u in rng.standard_normal((DIRECTIONS, *shape))]
        rms, worst = math.sqrt((g * g).mean()), 0.0
        for u in units:
            a, n = (g * u).sum(), derivative(model, view, u, tokens, targets, reference)
            worst = np.maximum(worst, abs(a - n) / (abs(a) + abs(n) + rms + 1e-30))   # keeps a NaN
        errors[name] = float(worst)
    if pairs:
        errors["heads 1.."] = float(grads.lm_head[1:].any())       # exactly 0, or it is wrong
    return errors


def main(argv=None):
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter,
                                     description="every gradient against central differences")
    parser.add_argument("--seed", type=int, default=1, help="of weights, tokens and masks")
    parser.add_argument("--quick", action="store_true", help="the first case and one seed only")
    args = parser.parse_args(argv)
    began, all_errors = time.perf_counter(), []
    set_num_threads(1)                       # a pass takes 50 us: no work for two
    print("the first start compiles the kernels for float64: about 20 seconds", flush=True)
    for title, changes, T, sizes in CASES[:1] if args.quick else CASES:
        cfg, seeds = replace(BASE, **changes), range(args.seed, args.seed + (args.quick or SEEDS))
        print(f"\n{title}\n  ({cfg.n_layer} layers, {cfg.n_head}/{cfg.n_kv_head} heads, T {T}, "
              f"micro-batches of {', '.join(map(str, sizes))}, seeds {', '.join(map(str, seeds))})")
        runs = [check_case(cfg, T, sizes, seed, title == DPO) for seed in seeds]
        for name in runs[0]:
            errors = [r[name] for r in runs]
            all_errors += errors
            print(f"  {name:<10}: max rel err {np.max(errors):.2e}", flush=True)
    worst = np.max(all_errors)
    ok = worst < TOLERANCE                   # false for a NaN
    print(f"\nmax relative error: {worst:.2e}   ({len(all_errors)} gradients, "
          f"{time.perf_counter() - began:.0f} s)")
    print(f">>> backward {'OK (error <' if ok else 'WRONG (error not <'} 1e-6)")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
