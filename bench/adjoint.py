"""How much of the error of a gradient in bfloat16 comes from storing d.x in bfloat16?

    python bench/adjoint.py          on a GPU of capability 8.0 or newer

While the backward pass walks down a model, the gradient of the trajectory, d.x, is rounded after
each of the 2 L Euler steps.  The rounding errors of all steps reach the gradient of the embedding,
wte.  This measures, for models of L layers,

    all         the error of wte's gradient, if everything is bfloat16
    d.x         the same, if everything is float32, and only d.x is rounded after each step

both as |g - g64| / |g64|, where g64 is the gradient in float64.  If the errors are independent, a
d.x in float32 would lower the error to sqrt(all^2 - d.x^2), the last column.  The models have their
initial weights, rounded to bfloat16, so that all engines have the same ones."""
import math
import os
import sys

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import nanoeuler as ne
import nanoeuler_cuda as nc
from nanoeuler_parts.files.printing import print_table
from nanoeuler_parts.gpu.launches import cuda_kernel
from nanoeuler_parts.machine.numbers import from_bf16, to_bf16
from numba import cuda

LAYERS = 2, 6, 12, 24, 48
T, SEQUENCES = 256, 4

@cuda_kernel
def round_kernel(x, low):
    """x = x rounded to bfloat16     low: bfloat16, scratch"""
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        r, c = i // x.shape[1], i % x.shape[1]
        low[r, c] = nc.stored(low, x[r, c])
        x[r, c] = nc.value(low[r, c])

def gradient_of_wte(cfg, flat, dtype, rounds=False):
    """Returns the gradient of wte as float64.     rounds: round d.x after each step"""
    model = nc.Model(cfg, flat.astype(nc.DTYPES["f64"] if dtype == "f64" else np.float32),
                     dtype=dtype)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, cfg.vocab_size, (SEQUENCES, T + 1), np.int32)
    targets = np.full((cfg.n_mtp, SEQUENCES, T), -1, np.int32)
    targets[0] = tokens[:, 1:]
    plain = nc.rmsnorm_backward
    low = nc.new((SEQUENCES * T, cfg.n_embd), np.uint16) if rounds else None

    def and_round(dx, *others):
        y = plain(dx, *others)
        if rounds:
            nc.launch(round_kernel, dx, low, grid=256, block=256)
        return y
    try:
        nc.rmsnorm_backward = and_round
        model.gradient(tokens[:, :-1], targets, np.array([1 / (SEQUENCES * T)]))
        return nc.to_host(model.g.wte).astype(np.float64)
    finally:
        nc.rmsnorm_backward = plain

def main():
    rows = []
    for L in LAYERS:
        cfg = ne.Config(n_embd=256, n_head=4, n_kv_head=2, head_dim=64, n_layer=L, n_hidden=688,
                        seq_len=T, vocab_size=512, n_mtp=1)
        flat = from_bf16(to_bf16(ne.init_params(cfg, 1)))
        exact = gradient_of_wte(cfg, flat, "f64")

        def error(g):
            return np.linalg.norm(g - exact) / np.linalg.norm(exact)
        whole = error(gradient_of_wte(cfg, flat, "bf16"))
        of_dx = error(gradient_of_wte(cfg, flat, "f32", rounds=True))
        plain = error(gradient_of_wte(cfg, flat, "f32"))
        left = math.sqrt(max(0, whole ** 2 - of_dx ** 2))
        rows.append((f"L = {L}", f"all {whole:.2e}   d.x {of_dx:.2e}   float32 {plain:.1e}   "
                     f"all but d.x {left:.2e}"))
    print_table(f"error of wte's gradient on {cuda.get_current_device().name}", rows)

if __name__ == "__main__":
    nc.open_device()
    main()
