"""bench/recipe.py trains as nanoeuler.py does, each of its runs for itself."""
import importlib
import json
import math
import sys

import numpy as np
import pytest
from helpers import ROOT, needs

import nanoeuler as ne

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS, B = 4, 2


@pytest.fixture
def recipe(monkeypatch):
    torch = needs("torch")
    torch.set_num_threads(1)
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.setitem(sys.modules, "recipe", importlib.import_module("recipe"))
    return sys.modules["recipe"]


@pytest.fixture
def data(recipe):
    tokens = np.random.default_rng(1).integers(0, 512, 4000).astype(np.int32)
    part = ne.windows(tokens, range(0, 1280, 128), 128, P=2)
    return recipe.Texts(tokens, (*part, 2500), (*part, 2500))


def trained(data, r):
    """The losses of each step, and the model behind the last, of nanoeuler.py"""
    cfg = ne.PRESETS["small"]
    flat = ne.init_params(cfg, r.seed)
    ne.views(flat, ne.param_table(cfg)).wte[:] *= np.float32(r.init_wte)
    model, batches = ne.Model(cfg, flat), ne.Batches(data.tokens, 128, cfg.n_mtp, r.seed)
    losses = []
    for step in range(STEPS):
        tokens, targets = batches.take(step * B, B)
        model.gradient(tokens, targets, ne.loss_weights(targets, r.mtp))
        share, decay = ne.lr_at(step, STEPS, 1.0, r.warmup, r.floor), r.decay_adamw
        of_muon = {}
        if r.optimizer == "muon":
            of_muon = dict(muon_lr=r.lr * share, momentum=r.momentum,
                           newton_schulz=r.ns_steps, embedding_lr=r.lr_wte)
        ce, _ = model.update(ne.hyper_at(step + 1, r.lr_adamw * share, beta1=r.beta1,
                                         beta2=r.beta2, weight_decay=decay, clip=1.0, **of_muon))
        losses.append(ce[0] / (B * 128))
    return losses, model


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_runs_are_those_of_nanoeuler(optimizer, recipe, data):
    """Two at once that differ in all that may; float32, four steps, the last bits grow."""
    common = dict(optimizer=optimizer, steps=STEPS, batch=B, shape="cosine", decay=1.0, warmup=1,
                  ns_steps=3)
    if optimizer == "muon":
        common["lr_wte"] = 4.0
    recipes = [recipe.Recipe(**common, init_wte=0.3, momentum=0.9),
               recipe.Recipe(**common, seed=2, lr=0.03, lr_adamw=3e-3, weight_decay=0.2,
                             decay_adamw=0.2, floor=0.1, mtp=0.6)]
    runs = recipe.Runs(recipes, data, "cpu", low=False)
    losses = []
    for _ in range(STEPS):
        runs.step()
        losses.append(runs.losses.tolist())
    for e, r in enumerate(recipes):
        want, model = trained(data, r)
        assert np.allclose([x[e] for x in losses], want, rtol=2e-5)
        for name, x in model.p._asdict().items():
            got = runs.p[name][e].detach().numpy()
            assert np.linalg.norm(got - x) < 1e-3 * np.linalg.norm(x), name
    for bits in (runs.bits_per_byte(*data.unseen), runs.bits_per_byte(*data.seen)):
        assert math.isclose(bits[1], ne.evaluate(model, data.unseen[0], data.unseen[1][0], 2500),
                            rel_tol=1e-4)


def test_schedules(recipe):
    r = recipe.Recipe(steps=100, warmup=10, decay=0.5)
    assert [r.share(step) for step in (0, 9, 30, 54)] == pytest.approx([0.1, 1, 1, 1])
    assert r.share(100) == 0 and 0.4 < r.share(77) < 0.6
    r = recipe.Recipe(steps=10, mtp=0.4, mtp_end=0.0, mtp_from=0.2, mtp_to=0.8, mtp_every=2)
    assert [r.mtp_at(step) for step in range(10)] == pytest.approx(
        [0, 0, 0, 0.24, 0, 0.16, 0, 0.08, 0, 0])


def test_plans_are_sets_of_recipes(recipe):
    for name, plan in recipe.PLANS.items():
        recipes = plan()
        assert len(set(recipes)) == len(recipes) > 10, name
        assert len({r.group() for r in recipes}) < 25, name


def test_a_search_goes_on_where_it_was(recipe, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recipe, "texts", lambda path, vocab, cuts: data)
    few = [recipe.Recipe(steps=1, batch=1, seed=seed) for seed in (1, 2)]
    out = str(tmp_path / "found.jsonl")
    recipe.work(few[:1], "", out, 9, "cpu")
    recipe.work(few, "", out, 9, "cpu")
    first, second = map(json.loads, open(out, encoding="utf-8"))
    assert (first["recipe"]["seed"], second["recipe"]["seed"]) == (1, 2)
    assert capsys.readouterr().out.count("1 runs of 1 steps") == 2
    assert "| 2 | " in recipe.table(out) and "batch 1, steps 1" in recipe.table(out)
