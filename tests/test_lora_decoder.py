"""Decoding with adapters: the logits of the model that is trained, and bits that know of no other.
"""
from dataclasses import replace

import numpy as np
import pytest
from helpers import EVERY_TENSOR, TINY

import nanoeuler as ne
from nanoeuler_parts.kernels import compile_lora_decoding_kernels, compile_lora_kernels
from nanoeuler_parts.lora.adapter import Lora, n_entries, targets_in, tensors_of
from nanoeuler_parts.lora.base import base_of_flat, random_base
from nanoeuler_parts.lora.decoder import LoraDecoder
from nanoeuler_parts.lora.model import Adapted, LoraModel

pytestmark = pytest.mark.unit
CFG = replace(TINY, n_embd=33, n_head=3, n_kv_head=1, head_dim=34, n_hidden=70, seq_len=64,
              vocab_size=150, n_mtp=1)
CASES = {"plain": CFG, "tied": replace(CFG, tie_embeddings=True),
         "every tensor, a window": replace(CFG, window=9, **EVERY_TENSOR)}
LORAS = Lora(3, 4.0), Lora(8, 8.0, targets_in("q,down")), Lora(1, 5.0)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    compile_lora_decoding_kernels()
    compile_lora_kernels("f32")


def adapter(cfg, lora, seed):
    flat = ne.aligned((n_entries(cfg, lora.rank),), np.float32)
    rng = np.random.default_rng(seed)
    for pair in tensors_of(cfg, lora, flat).values():
        for x in pair:
            x[...] = 0.3 * rng.standard_normal(x.shape)
    return lora, flat


def tokens_of(n, seed=1):
    return np.random.default_rng(seed).integers(0, CFG.vocab_size, n).astype(np.int32)


@pytest.mark.parametrize("stored", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_model_that_is_trained(name, stored):
    cfg, tokens = CASES[name], tokens_of(20)
    base, (lora, flat) = random_base(cfg, stored), adapter(CASES[name], LORAS[0], 1)
    model = LoraModel(cfg, Adapted(base, lora, flat))
    decoder = model.decoder()
    targets = np.full((1, 20), -1, np.int32)
    for t in range(20):
        logits = decoder.step(tokens[t])
        target = int(logits.argmin())
        targets[0, t] = target
        want = -model.losses(tokens[None, :t + 1], targets[:, :t + 1])[0]
        targets[0, t] = -1
        got = ne.log_softmax(logits)[target]
        # where the CPU multiplies bfloat16 or int8, x is rounded, too
        assert abs(got - want) < (1e-4 if stored == "f32" else 0.02), (t, got, want)
    plain = LoraDecoder(base, [(lora, flat)])
    plain.use(-1)
    assert np.abs(plain.step(*tokens) - decoder.step(tokens[0])).max() > 0.01
    assert decoder.kept_as == stored


@pytest.mark.parametrize("stored", ["f32", "bf16", "int8"])
def test_bits_do_not_depend_on_other_adapters(stored):
    """Each slot alone, with its adapter as the only one, and all slots in one batch"""
    base, tokens = random_base(CFG, stored), tokens_of(12)
    adapters = [adapter(CFG, lora, i) for i, lora in enumerate(LORAS)]
    together = LoraDecoder(base, adapters, slots=4)
    for slot, i in enumerate((2, -1, 0, 1)):
        together.use(i, slot)
    parts = [ne.Part(slot, tokens[slot:slot + 8].tolist(), 2) for slot in range(4)]
    both = together.read(parts).reshape(4, 2, -1).copy()
    for slot, i in enumerate((2, -1, 0, 1)):
        alone = LoraDecoder(base, [adapters[max(i, 0)]])
        alone.use(0 if i >= 0 else -1)
        alone = alone.read([ne.Part(0, tokens[slot:slot + 8].tolist(), 2)])
        assert np.array_equal(alone, both[slot]), slot
    one = together.with_slots(1)
    assert one.weights is together.weights and one.of_slot.tolist() == [0]
    assert len({x.tobytes() for x in both}) == 4


def test_without_an_adapter_it_is_the_plain_decoder():
    base, tokens = random_base(CFG, "f32"), tokens_of(9)
    decoder = LoraDecoder(base, [adapter(CFG, LORAS[0], 1)])
    decoder.use(-1)
    flat = ne.aligned((ne.n_params(CFG),), np.float32)
    p = ne.views(flat, ne.param_table(CFG))
    for name, x in p._asdict().items():
        if name in ("wte", "lm_head"):
            x[...] = base.matrix(name)
        elif name == "final_norm":
            x[...] = base.final_norm
        elif x.size:
            of_layers = ne.Params._fields[ne.OF_LAYERS]
            x[...] = [base.matrix(name, layer) if name in of_layers else
                      getattr(base.vectors[layer], name) for layer in range(CFG.n_layer)]
    plain = ne.Decoder(CFG, flat)
    assert np.array_equal(decoder.step(*tokens), plain.step(*tokens))


def test_what_is_refused():
    decoder = LoraDecoder(random_base(CFG, "f32"), [adapter(CFG, LORAS[0], 1)])
    with pytest.raises(ValueError, match="expected an adapter from -1 to 0, found 1"):
        decoder.use(1)
    decoder.step(1)
    with pytest.raises(ValueError, match="slot 0 holds tokens"):
        decoder.use(0)
    base = base_of_flat(CFG, ne.init_params(CFG, 1, np.float64))
    with pytest.raises(ne.UserError, match="float32, bfloat16 or int8, found float64"):
        LoraDecoder(base, [adapter(CFG, LORAS[0], 1)])
