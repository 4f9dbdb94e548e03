"""A floor of quality: a short run learns what it should, and would not with a broken optimizer.

A formula that is wrong in the optimizer leaves every gradient right and every run finite; the loss
is just worse.  200 steps of 512 tokens on 400 kB of Shakespeare with seed 1 end at 3.1767 bits a
byte of text held out.  Six starts 1e-7 apart end within 5e-8 of it: another machine's rounding is
lost in the margin of 0.015.  (Six seeds end at 3.188 in the mean, with a spread of 0.011.  The seed
is fixed, for the mildest fault, a layer without a gradient, costs 0.034 with this one, and 0.015 to
0.054 with the others.)
"""

import numpy as np
import pytest
from helpers import TEXT, slow

import nanoeuler as ne
from nanoeuler_parts.checkpoint.file import Checkpoint
from nanoeuler_parts.checkpoint.tensors import named
from nanoeuler_parts.runs.evaluation import evaluate
from nanoeuler_parts.runs.options import TrainOptions
from nanoeuler_parts.runs.run import Run

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]
CFG = ne.replace(ne.PRESETS["small"], n_layer=2, n_embd=32, n_head=2, n_kv_head=1, head_dim=16,
                 n_hidden=64, seq_len=32, vocab_size=280, n_mtp=1)
SETTINGS = dict(steps=200, batch=512, dtype="f32", warmup=10, lr=4e-3, muon_lr=0.02)
# bits a byte at the end, measured: a decay of 1, and one so strong that its sign decides
ENDS = {1.0: 3.1767, 3.0: 3.4394}
MARGIN = 0.015


@pytest.fixture(scope="module")
def learn(tmp_path_factory):
    """learn(plant, weight_decay=1.0, **settings) -> bits a byte; plant(run) breaks the run."""
    folder = tmp_path_factory.mktemp("quality")
    (folder / "text.txt").write_bytes(TEXT.read_bytes()[:400_000])

    def bits_per_byte(plant=None, weight_decay=1.0, **settings):
        options = TrainOptions(data=str(folder / "text.txt"), weight_decay=weight_decay,
                                  **{**SETTINGS, **settings}).check()
        start = Checkpoint(CFG, None, ne.State(n_steps=options.steps), None, ())
        run = Run(str(folder / "run.bin"), start, options)
        if plant:
            plant(run)
        run.write = lambda **r: None         # there is no log
        run.start_clock()
        ne.train(run)
        return evaluate(run.model, *run.data.validation)

    return bits_per_byte


def rewarded_weights(run):
    """Weight decay with the wrong sign."""
    hyper = run.hyper

    def with_another_sign(step):
        right = hyper(step)
        return right._replace(weight_decay=-right.weight_decay)

    run.hyper = with_another_sign


def lost_layer(run):
    """The last layer gets no gradient."""
    model, update = run.model, run.model.update

    def update_without(hyper):
        for name, g in named(CFG, model.g_flat).items():
            if name.startswith(f"model.layers.{CFG.n_layer - 1}."):
                g[...] = 0
        return update(hyper)

    model.update = update_without


def orthogonalized(x, coefficients, steps):
    """Newton-Schulz as its formula says it, (N, K)"""
    a, b, c = coefficients
    y = x.T if len(x) < x.shape[1] else x
    y = y / (np.linalg.norm(y) + 1e-7)
    for _ in range(steps):
        gram = y.T @ y
        y = a * y + y @ (b * gram + c * gram @ gram)
    return y.T if len(x) < x.shape[1] else y


def newton_schulz_of(coefficients):
    """plant(run): after each update, the step that these coefficients would have made."""
    def plant(run):
        model, update = run.model, run.model.update
        momenta = named(CFG, model.m)

        def update_by(hyper):
            g = model.g_flat * np.float32(min(1, hyper.clip / np.linalg.norm(model.g_flat)))
            done = update(hyper)
            gradients, steps = named(CFG, g), int(hyper.newton_schulz)
            for name, p in named(CFG, model.flat).items():
                if name.startswith("model.layers.") and p.ndim == 2:
                    x = (1 - hyper.momentum) * gradients[name] + hyper.momentum * momenta[name]
                    size = hyper.muon_lr * max(1, len(p) / p.shape[1]) ** 0.5
                    p += size * (orthogonalized(x, ne.NEWTON_SCHULZ, steps)
                                 - orthogonalized(x, coefficients, steps))
            model.pack()
            return done

        model.update = update_by
    return plant


A, B, C = ne.NEWTON_SCHULZ
FAULTS = {
    "no momentum": dict(momentum=0.0),
    "a schedule that does not decay": dict(floor=1.0),
    "weight decay with the wrong sign": dict(plant=rewarded_weights, weight_decay=3.0),
    "a layer without a gradient": dict(plant=lost_layer),
    "Newton-Schulz, a": dict(plant=newton_schulz_of((A - 1, B, C))),
    "Newton-Schulz, b": dict(plant=newton_schulz_of((A, B + 1, C))),
    "Newton-Schulz, c": dict(plant=newton_schulz_of((A, B, C + 0.5))),
}


@pytest.mark.parametrize("weight_decay", ENDS)
def test_a_short_run_learns_as_much_as_it_should(weight_decay, learn):
    assert learn(weight_decay=weight_decay) < ENDS[weight_decay] + MARGIN


def test_the_plant_of_newton_schulz_changes_nothing_but_its_coefficients(learn):
    """Else the faults below would be found for another reason."""
    assert abs(learn(newton_schulz_of((A, B, C))) - ENDS[1.0]) < MARGIN / 5


# of the three coefficients, the last, whose fault weighs least
@pytest.mark.parametrize("name", [slow(name) if name.endswith((", a", ", b")) else name
                                  for name in FAULTS])
def test_a_broken_optimizer_misses_the_floor(name, learn):
    fault = FAULTS[name]
    assert learn(**fault) > ENDS[fault.get("weight_decay", 1.0)] + MARGIN
