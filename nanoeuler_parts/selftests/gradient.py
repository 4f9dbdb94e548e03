"""Compares the gradient of a whole model with the CPU's."""
import numpy as np

import nanoeuler as ne
from bpe import need
from nanoeuler_cuda import DTYPES, has, Model, NAMES, to_host
from nanoeuler_parts.selftests.bounds import errors

# Bounds of both errors() of a tensor's gradient.  The base preset has 4.6, 69 and 71 roundoffs of
# the type.
GRADIENT_BOUNDS = {"bf16": 5e-2, "f32": 5e-6, "f64": 1e-13}

def gradient_check(preset="base", batch=1):
    """Compares the gradient of a whole model with the CPU's in float64, tensor by tensor.  Returns
    the exit code."""
    need(batch > 0, f"--batch is {batch}, expected at least 1")
    cfg, B, rng = ne.PRESETS[preset], batch, np.random.default_rng(1)
    T, flat = cfg.seq_len, ne.init_params(cfg, 1, np.float64)
    tokens = rng.integers(0, cfg.vocab_size, (B, T), dtype=np.int32)
    targets = rng.integers(-1, cfg.vocab_size, (cfg.n_mtp, B, T), dtype=np.int32)
    weight = ne.loss_weights(targets, 0.3)
    cpu = ne.Model(cfg, flat)
    expected = cpu.run(ne.GRADIENT, tokens, targets, weight).sum(0)
    dtypes = [dtype for dtype in GRADIENT_BOUNDS if has(dtype)]
    print(f"gradient of {ne.n_params(cfg):,} parameters, {B} x {T} tokens, against the CPU in "
          f"float64:\n|gpu - cpu| / |cpu| of a tensor, and of its largest entries\n\n"
          "tensor      " + "".join(f"{NAMES[DTYPES[d]]:>14}{'':5}" for d in dtypes).rstrip())
    wanted = {**cpu.g._asdict(), "loss": expected}
    rows = {name: [] for name, y in wanted.items() if y.size}        # tensors that the model has
    for dtype in dtypes:
        model = Model(cfg, flat, dtype=dtype)
        model.gradient(tokens, targets, weight)
        grads = ne.views(to_host(model.g_flat), model.table)._asdict()
        grads["loss"], _ = model.update(ne.Hyper(*np.ones(8)))
        for name, row in rows.items():
            row.append(errors(grads[name], wanted[name]))
        del model                            # frees its memory for the next one
    rows["worst"] = np.max([*rows.values()], axis=0)     # NaN, if one of them is
    for name, row in rows.items():
        print(f"{name:<12}" + "".join(f"   {norm:.1e} {largest:.1e} " for norm, largest in row))
    most = [GRADIENT_BOUNDS[dtype] for dtype in dtypes]
    good = all(error < bound for pair, bound in zip(rows["worst"], most) for error in pair)
    print(f">>> gradient {'OK' if good else 'FAILED'} (< "
          + ", < ".join(f"{bound:.0e}" for bound in most) + ")")
    return 0 if good else 1
