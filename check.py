"""Compares every gradient of nanoeuler.py with central differences of the loss, in float64.

    python check.py [--plain] [--seed N] [--quick]

The models are small and have random weights.  They cover
  - grouped queries,
  - several output heads, whose targets run past the end,
  - masked targets (-1),
  - biases, norms of q and k, and a sliding window,
  - gradients accumulated over micro-batches of unequal masks.

The analytic gradient comes from the code that trains, `Model`, compiled for float64, on one thread.
With --plain it comes from `PlainModel` in Part I, which needs only nanoeuler.py and bpe.py.  The
cross-entropies come from the same code's forward pass.  Here they are combined into the loss by its
definition, over the whole batch at once:

    loss = CE_0 + 0.3 * mean_{k > 0} CE_k,    CE_k = mean of -log softmax over its targets

For preferences, with r = log pi - log ref of a whole response, it is the mean over pairs of

    loss = -log sigmoid(0.1 (r(chosen) - r(rejected))),    log pi = -CE_0, summed

For sampled answers, with r = pi / pi_old of a token, A the advantage of its answer, and
d = log ref - log pi, it is the mean over the tokens of all answers of

    loss = -min(r A, clip(r, 0.8, 1.2) A) + 0.3 (exp(d) - 1 - d)

A tensor is moved along a direction u by s = -2h, -h, h, 2h.  With f(s) the loss there,

    n = (8 (f(h) - f(-h)) - (f(2h) - f(-2h))) / 12h  =  df/ds + O(h^4)

The truncation error is h^4 f''''' / 30, the rounding error 1e-16 * 1.5 f / h.  They balance at
about 1e-12: near h = 1e-3 for the usual curvature, near 2e-4 for the sharpest of 280 random cases.
So h = 2e-4.  With two points they balance near h = 1e-5, at 1e-10, which is too large compared
with a gradient of 1e-4.

The error is |a - n| / (|a| + |n| + rms), where a = <g, u> is the analytic value and rms the root
mean square of the tensor's gradient g.  For values of the usual size and above, this is a relative
error.  Near zero it is the error in units of the usual value, because the noise of n does not
shrink with a.

Some directions u are single entries of the tensor: all entries, or ENTRIES random ones.  If not all
entries are tested, DIRECTIONS random unit vectors through the whole tensor follow, where an error
in any entry shows.  In both kinds of direction, <g, u> is of the size of an entry of g.

The exit code is 0 if the error of every tensor in every case is below 1e-6, else 1.
"""
import argparse
import math
import sys
import time
from collections import namedtuple
from dataclasses import replace

import numpy as np
from numba import set_num_threads

try:
    import nanoeuler as ne
except ValueError as e:          # a UserError about the environment
    print(f"check.py: {e}", file=sys.stderr)
    sys.exit(2)

TOLERANCE = 1e-6
STEP = 2e-4                                  # h
MTP_WEIGHT, BETA = 0.3, 0.1
CLIP, KL = 0.2, 0.3
ENTRIES, DIRECTIONS, SEEDS = 24, 4, 2

BASE = ne.Config(n_embd=10, n_head=4, n_kv_head=2, head_dim=4, n_layer=2, n_hidden=9, seq_len=7,
                 vocab_size=13, n_mtp=4)
# title     what is special about the case
# changes   the fields of Config that differ from BASE
# T         tokens per sequence
# sizes     number of sequences in each micro-batch
# kind      "pairs" of responses, sampled "answers", or "" for a text
Case = namedtuple("Case", "title changes T sizes kind", defaults=("",))
# Answers that a model pi_old sampled: log pi_old and log ref of their tokens, is_answer (B, T), and
# advantage (B,)
Samples = namedtuple("Samples", "old reference is_answer advantage")
CASES = [
    Case("two query heads per key/value head, four output heads", {}, 7, (2, 1, 1)),
    Case("one token: every head but the first has no target", {}, 1, (1, 3)),
    Case("one layer, one key/value head", dict(n_layer=1, n_kv_head=1), 6, (3,)),
    Case("as many key/value heads as query heads", dict(n_kv_head=4, head_dim=2), 5, (1, 2)),
    Case("one output head", dict(n_mtp=1), 7, (2, 2)),
    Case("biases of q, k and v", dict(qkv_bias=True), 7, (2, 1)),
    Case("norms of q and k", dict(qk_norm=True), 6, (1, 2)),
    Case("a window of three tokens, scaled RoPE", dict(
        window=3, rope_scaling="yarn", rope_original=4, rope_factor=2.0, rope_attention=1.2), 7,
        (2, 1)),
    Case("head 0 tied to the embedding", dict(tie_embeddings=True), 7, (2, 1)),
    Case("one output head, tied", dict(tie_embeddings=True, n_mtp=1, n_layer=1), 4, (2,)),
    Case(f"larger than one block: {ne.BR} query rows, {ne.KC} terms of a sum, {ne.NB} matrix "
         f"rows", dict(n_embd=33, n_head=3, n_kv_head=1, head_dim=34, n_hidden=70, seq_len=131,
                       vocab_size=150, n_mtp=2), 131, (1, 2)),
    Case("biases, norms, scaled RoPE, and a window that is shorter than a block", dict(
        n_embd=33, n_head=4, n_kv_head=2, head_dim=34, n_hidden=20, seq_len=131, vocab_size=20,
        n_mtp=1, qkv_bias=True, qk_norm=True, window=21, rope_scaling="llama3", rope_original=32,
        rope_factor=4.0), 131, (1, 1)),
    Case("preferences: two pairs, one split across micro-batches", {}, 7, (1, 3), "pairs"),
    Case("reinforcement learning: four answers", {}, 7, (1, 3), "answers"),
]


def random_params(cfg, rng):
    """A flat buffer of random weights: products have unit size, gains are around 1.  At this point
    no function of the model is nearly linear."""
    flat = ne.aligned((ne.n_params(cfg),), np.float64)
    table = ne.param_table(cfg)
    for view, x in zip(ne.views(flat, table), table):
        noise = rng.standard_normal(x.shape)
        fan_in = 1 if x.name == "wte" else x.shape[-1]
        if x.role == "matrix":
            view[...] = noise / math.sqrt(fan_in)
        else:
            view[...] = (x.role == "gain") + 0.3 * noise
    return flat


def random_batch(cfg, B, T, rng):
    """tokens (B, T), targets (P, B, T); each sequence has its own share of masked targets, -1."""
    stream = np.full((B, T + 1 + cfg.n_mtp), -1, np.int32)
    stream[:, :T + 1] = rng.integers(0, cfg.vocab_size, (B, T + 1))
    targets = np.stack([stream[:, k + 1:k + 1 + T] for k in range(cfg.n_mtp)])
    masked = rng.random((B, T)) < np.linspace(0.1, 0.9, B)[:, None]
    masked[0, 0] = False                     # at least one target
    return stream[:, :T].copy(), np.where(masked, np.int32(-1), targets)


def cross_entropies(model, tokens, targets):
    """(B, P) in nats, summed over the tokens of a sequence, by the forward pass"""
    if isinstance(model, ne.PlainModel):
        weight = np.zeros((len(tokens), len(targets)))
        return model.run(tokens, targets, weight, len(targets), with_gradient=False)
    return model.run(ne.LOSS, tokens, targets)


def loss_of(model, tokens, targets, reference):
    """The loss as defined above, from the cross-entropies.
    reference (B,): -log ref of each response of pairs, or Samples; None for a text"""
    if isinstance(reference, Samples):
        return loss_of_answers(-model.token_losses(tokens, targets[0]), reference)
    ce = cross_entropies(model, tokens, targets)
    if reference is not None:
        chosen, rejected = (reference - ce[:, 0]).reshape(-1, 2).T
        return np.log1p(np.exp(-BETA * (chosen - rejected))).mean()
    ce = ce.sum(0) / np.maximum(1, (targets >= 0).sum((1, 2)))
    return ce[0] + MTP_WEIGHT * (ce[1:].mean() if len(ce) > 1 else 0)


def loss_of_answers(logp, x):
    """The loss of sampled answers as defined above.     logp (B, T), x: Samples"""
    ratio, A, d = np.exp(logp - x.old), x.advantage[:, None], x.reference - logp
    loss = -np.minimum(ratio * A, np.clip(ratio, 1 - CLIP, 1 + CLIP) * A) + KL * (np.exp(d) - 1 - d)
    return loss[x.is_answer].mean()


def random_samples(model, tokens, targets, rng):
    """Samples whose ratios lie on both sides of both limits"""
    logp = -model.token_losses(tokens, targets[0])
    advantage = rng.choice([-1.0, 1.0], len(tokens)) * rng.uniform(0.5, 2, len(tokens))
    return Samples(rng.normal(logp, 0.4), rng.normal(logp, 0.5), targets[0] >= 0, advantage)


def gradient(model, tokens, targets, sizes, reference):
    """The analytic gradient of all parameters, accumulated over micro-batches."""
    weight = np.zeros((len(tokens), len(targets)))
    if reference is None:
        weight[:] = ne.loss_weights(targets, MTP_WEIGHT)
    elif isinstance(reference, Samples):
        from nanoeuler_parts.tuning.grpo import grpo_loss
        weight = np.zeros((*weight.shape, tokens.shape[1]))
        logp = -model.token_losses(tokens, targets[0])
        _, weight[:, 0] = grpo_loss(logp, *reference, CLIP, KL)
    else:
        from nanoeuler_parts.tuning.dpo import dpo_loss
        _, weight[:, 0] = dpo_loss(model.losses(tokens, targets[0]), reference, BETA)
    model.g_flat[:] = 0
    start = 0
    for n in sizes:
        part = slice(start, start + n)
        model.gradient(tokens[part], targets[:, part], weight[part])
        start += n
    return model.g_flat.copy()


def move(model, view, values):
    """Replaces the values of a tensor."""
    view[...] = values
    if isinstance(model, ne.Model):
        model.pack()                         # it has the matrices in packed panels, too


def derivative(model, view, u, *batch):
    """n above: d loss / ds at view + s * u, s = 0.  Afterwards the model is unchanged."""
    before = view.copy()

    def f(s):
        move(model, view, before + s * u)
        return loss_of(model, *batch)

    h = STEP
    far, near = f(2 * h) - f(-2 * h), f(h) - f(-h)
    move(model, view, before)
    return (8 * near - far) / (12 * h)


def directions(shape, rng):
    """Unit vectors u: all entries of a tensor, or ENTRIES of them and DIRECTIONS random ones."""
    size = math.prod(shape)
    units = []
    for i in rng.choice(size, min(ENTRIES, size), replace=False):
        u = np.zeros(size)
        u[i] = 1
        units.append(u.reshape(shape))
    if size > ENTRIES:
        units += [u / np.linalg.norm(u) for u in rng.standard_normal((DIRECTIONS, *shape))]
    return units


def check_case(case, seed, plain=False):
    """dict: tensor name -> the largest error of its gradient."""
    cfg = replace(BASE, **case.changes)
    rng = np.random.default_rng(seed)
    model = (ne.PlainModel if plain else ne.Model)(cfg, random_params(cfg, rng))
    tokens, targets = random_batch(cfg, sum(case.sizes), case.T, rng)
    reference = None
    if case.kind == "answers":
        reference = random_samples(model, tokens, targets, rng)
    if case.kind == "pairs":                 # margins of about 2: the sigmoid is not flat
        reference = rng.normal(model.losses(tokens, targets[0]), 2 / BETA)
    grads = ne.views(gradient(model, tokens, targets, case.sizes, reference), ne.param_table(cfg))
    errors = {}
    for (name, shape, *_), view, g in zip(ne.param_table(cfg), model.p, grads):
        if g.size == 0:                      # lm_head, if the only head is tied
            continue
        rms = math.sqrt((g * g).mean())
        worst = 0.0
        for u in directions(shape, rng):
            a = (g * u).sum()
            n = derivative(model, view, u, tokens, targets, reference)
            worst = np.maximum(worst, abs(a - n) / (abs(a) + abs(n) + rms + 1e-30))   # keeps NaN
        errors[name] = float(worst)
    if case.kind:                            # auxiliary heads: no gradient, so 0 is right
        errors["heads 1.."] = float(grads.lm_head[1:].any())
    return errors


def main(argv=None):
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter,
                                     description="compare gradients with central differences")
    parser.add_argument("--seed", type=int, default=1, help="random seed of the weights, "
                        "tokens and masks")
    parser.add_argument("--plain", action="store_true", help="check Part I of nanoeuler.py, which "
                        "also runs without nanoeuler_parts, instead of the code that trains")
    parser.add_argument("--quick", action="store_true", help="check only the first model, with one "
                        "seed")
    args = parser.parse_args(argv)
    began = time.perf_counter()
    if not args.plain:
        if not ne.nanoeuler_parts:
            print("check.py: expected the folder nanoeuler_parts beside nanoeuler.py, found none; "
                  "--plain checks Part I, which does not need it", file=sys.stderr)
            return 2
        set_num_threads(1)                   # a pass takes 50 us: too short for two
        from nanoeuler_parts.kernels import compile_passes
        compile_passes("f64")
    seeds = [args.seed] if args.quick else range(args.seed, args.seed + SEEDS)
    all_errors = []
    cases = [x for x in CASES if ne.nanoeuler_parts or not x.kind]       # these losses are there
    for case in cases[:1] if args.quick else cases:
        cfg = replace(BASE, **case.changes)
        print(f"\n{case.title}\n  ({cfg.n_layer} layers, {cfg.n_head}/{cfg.n_kv_head} heads, "
              f"T {case.T}, micro-batches of {', '.join(map(str, case.sizes))}, "
              f"seeds {', '.join(map(str, seeds))})")
        runs = [check_case(case, seed, args.plain) for seed in seeds]
        for name in runs[0]:
            errors = [r[name] for r in runs]
            all_errors += errors
            print(f"  {name:<10}: max rel err {np.max(errors):.2e}", flush=True)
    worst = np.max(all_errors)
    ok = worst < TOLERANCE                   # false if `worst` is NaN
    print(f"\nmax relative error: {worst:.2e}   ({len(all_errors)} gradients, "
          f"{time.perf_counter() - began:.0f} s)")
    verdict = "OK (error <" if ok else "WRONG (error not <"
    print(f">>> backward {verdict} {TOLERANCE:.0e})".replace("e-0", "e-"))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
