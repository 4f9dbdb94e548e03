"""Matrices as the decoder keeps them: bfloat16 and int8 beside float32."""
from dataclasses import replace

import numba
import numpy as np
import pytest
from helpers import TINY, needs, refused, run
from models import SMALL, write

import nanoeuler as ne
from nanoeuler_parts.machine.numbers import from_bf16

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("weights", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("tied", [False, True])
def test_stored_weights_are_the_rounded_ones(weights, tied, tokenizer, monkeypatch):
    """Decoding from bf16 or int8 is decoding from float32 that was rounded before, where the
    processor does not multiply these itself."""
    monkeypatch.setattr(ne, "QUADS", False)
    cfg = replace(SMALL, tie_embeddings=tied, n_embd=72, n_hidden=500)
    flat = ne.init_params(cfg, 5) * 3
    rounded = flat.copy()
    p = ne.views(rounded, ne.param_table(cfg))
    for x in p[ne.MATRICES]:
        w, scale = ne.converted(x.copy(), weights)
        assert w.dtype == {"f32": np.float32, "bf16": np.uint16, "int8": np.int8}[weights]
        x[...] = (from_bf16(w) if weights == "bf16" else w.astype(np.float32)) * scale[..., None]
    assert np.array_equal(flat, rounded) == (weights == "f32")
    a, b = ne.Decoder(cfg, flat, weights), ne.Decoder(cfg, rounded)
    a.weights.input_dtype = flat.dtype
    a.allocate()
    for token in (3, 1, 4, 1, 5):
        got, want = a.step(token), b.step(token)
        assert np.abs(got - want).max() < 1e-5 * max(1, np.abs(want).max())


def test_rounding_is_to_the_nearest():
    x = np.random.default_rng(1).standard_normal((50, 40)).astype(np.float32)
    w, _ = ne.converted(x, "bf16")
    assert np.all(np.abs(from_bf16(w) - x) <= np.abs(x) * 2.0 ** -8)
    torch = needs("torch")
    assert np.array_equal(from_bf16(w), torch.tensor(x).bfloat16().float().numpy())
    w, scale = ne.converted(x, "int8")
    assert np.all(np.abs(w * scale[:, None] - x) <= 0.5001 * scale[:, None])
    assert np.all(np.abs(w).max(1) == 127)
    assert not ne.converted(np.zeros((2, 3), np.float32), "int8")[0].any()


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one core")
@pytest.mark.parametrize("weights", ["f32", "bf16", "int8"])
def test_threads_do_not_change_a_bit(weights):
    """Large matrices are shared by the threads, in whole rows."""
    cfg = replace(SMALL, n_embd=130, n_hidden=1500, vocab_size=3001, n_layer=2)
    flat, logits = ne.init_params(cfg, 5), []
    x = np.ascontiguousarray(flat[:3 * 130].reshape(3, 130) * 9)
    panels, scales = ne.in_panels(ne.views(flat, ne.param_table(cfg)).wte[None], weights)
    for shared, threads in ((False, 1), (True, 1), (True, numba.config.NUMBA_NUM_THREADS)):
        numba.set_num_threads(threads)
        y = ne.aligned((3, 3001), np.float32)
        if shared:
            ne.product_parallel(y, x, panels[0], scales[0], 0)
        else:
            for n in range(len(panels[0])):
                ne.panel_product(y, x, panels[0], scales[0], n, 0)
        decoder = ne.Decoder(cfg, flat, weights)
        logits.append([y, *(decoder.step(t).copy() for t in (1, 2, 3))])
    assert cfg.vocab_size * cfg.n_embd > ne.SMALL_PRODUCT
    for other in logits[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(logits[0], other))


def test_weights_and_templates_that_are_none(tokenizer, tmp_path, capsys):
    path = write(tmp_path / "a.bin", replace(TINY, vocab_size=512), tokenizer)
    assert "f32, bf16 or int8" in refused(capsys, "generate", "x", path, "--weights", "int4")
    assert "alpaca or chatml" in refused(capsys, "generate", "x", path, "--template", "llama")
    for weights in ("bf16", "int8"):
        run("generate", "x", path, "--weights", weights, "--tokens", 2)
