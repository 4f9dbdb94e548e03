"""Sliding windows: the ring of a slot's KV cache, and what can be taken back or copied from it."""
from dataclasses import replace

import numpy as np
import pytest
from helpers import TINY, random_flat
from models import tokens_of

import nanoeuler as ne
from nanoeuler_parts.tools.lens import attention_weights

pytestmark = pytest.mark.unit

WINDOW, T = 5, 700
CFG = replace(TINY, seq_len=T, window=WINDOW)
ENTRIES = WINDOW + ne.MOST_ROWS              # of the ring
IDS = tokens_of(CFG, T)


@pytest.fixture(scope="module")
def flat():
    return random_flat(CFG, 2)


@pytest.fixture(scope="module")
def want(flat):
    """Logits of the whole text, (T, V), from the forward pass"""
    return ne.Model(CFG, flat).logits(IDS[None])[0, 0].copy()


def decoder_at(flat, n, **options):
    decoder = ne.Decoder(CFG, flat, **options)
    if n:
        decoder.read([ne.Part(0, IDS[:n].tolist(), 0)])
    return decoder


def close(got, want):
    assert np.abs(got - want).max() <= 1e-11


def test_the_window_matters(flat, want):
    without = ne.Model(replace(CFG, window=0), flat).logits(IDS[None])[0, 0]
    close(without[:WINDOW], want[:WINDOW])
    assert np.abs(without[WINDOW:] - want[WINDOW:]).max() > 0.1


@pytest.mark.parametrize("sizes", [(T,), (1,) * T, (255, 1, 256, 7, 181), (300, 1, 1, 398)])
def test_a_ring_gives_the_logits_of_the_forward_pass(sizes, flat, want):
    """Read in pieces that end before, at and after the end of the ring"""
    decoder, at = ne.Decoder(CFG, flat), 0
    assert decoder.cache.v.shape[3] == ENTRIES < T
    for n in sizes:
        close(decoder.read([ne.Part(0, IDS[at:at + n].tolist(), n)]), want[at:at + n])
        at += n
    assert at == T


def test_several_slots_in_one_step(flat, want):
    decoder, starts = ne.Decoder(CFG, flat, slots=3), (10, 262, 600)
    for slot, n in enumerate(starts):
        decoder.read([ne.Part(slot, IDS[:n].tolist(), 0)])
    for n in (1, 40, 3):
        got = decoder.read([ne.Part(s, IDS[len(text):len(text) + n].tolist(), 1)
                            for s, text in enumerate(decoder.held_ids)])
        close(got, want[[len(text) - 1 for text in decoder.held_ids]])


@pytest.mark.parametrize("n", [1, 4, 5, 6, 200, 260, 261, 262, 400, 640])
@pytest.mark.parametrize("back", [0, 1, 255, 256, 257, 262])
def test_tokens_are_taken_back_if_the_ring_still_holds_the_window(n, back, flat, want):
    """Otherwise nothing is kept, and the text is read again."""
    kept = max(0, n - back)
    decoder = decoder_at(flat, n)
    found = decoder.truncate(kept)
    overwritten = max(0, n - ENTRIES)        # these tokens' keys are gone
    assert found == (kept if max(0, kept - WINDOW) >= overwritten else 0)
    assert decoder.tokens == IDS[:found].tolist()
    rest = IDS[found:kept + 3].tolist()
    close(decoder.read([ne.Part(0, rest, 3)]), want[kept:kept + 3])


def test_what_was_overwritten_is_not_forgotten(flat, want):
    """Taken back in steps that are each short enough, the keys are as lost as in one step."""
    decoder = decoder_at(flat, 600)
    assert decoder.truncate(500) == 500
    assert decoder.truncate(344) == 344      # 600 - 256
    assert decoder.truncate(343) == 0
    assert decoder.truncate(0) == 0 and decoder.tokens == []
    close(decoder.read([ne.Part(0, IDS[:20].tolist(), 20)]), want[:20])
    assert decoder.truncate(3) == 3          # an emptied slot is a new one


@pytest.mark.parametrize("n, kept, found", [(20, 20, 20), (20, 7, 7), (261, 3, 3), (262, 3, 0),
                                            (600, 600, 600), (600, 344, 344), (600, 343, 0)])
def test_a_slot_copies_what_the_ring_holds(n, kept, found, flat, want):
    decoder = decoder_at(flat, n, slots=2)
    decoder.read([ne.Part(1, IDS[300:600].tolist(), 0)])     # other keys, that must not stay
    assert decoder.copy(0, 1, kept) == found
    assert decoder.held_ids == [IDS[:n].tolist(), IDS[:found].tolist()]
    close(decoder.read([ne.Part(1, IDS[found:kept + 3].tolist(), 3)]), want[kept:kept + 3])
    close(decoder.read([ne.Part(0, IDS[n:n + 3].tolist(), 3)]), want[n:n + 3])


def test_drafts_are_read_and_rejected_in_a_ring(flat):
    """Greedy text with draft tokens equals greedy text without them."""
    def spoken(drafts):
        decoder, pace = ne.Decoder(CFG, flat), ne.Pace()
        sampling = ne.Sampling(temperature=0, tokens=500, speculate=drafts)
        reply = ne.Reply(IDS[:40].tolist(), sampling, np.random.default_rng(0), None,
                         [b"x"] * CFG.vocab_size)
        while not reply.finish:
            ne.next_tokens(decoder, [reply], pace)
        return reply.tokens, sum(pace.offered), sum(pace.accepted)

    (drafted, offered, accepted), (plain, none, _) = spoken(3), spoken(0)
    assert drafted == plain and len(plain) == 500
    assert offered > accepted and not none


def test_attention_weights_end_at_the_window(flat):
    weights = attention_weights(ne.Model(CFG, flat), IDS[:20], 0)
    far = np.tril(np.ones((20, 20), bool), -WINDOW)
    assert not weights[:, far].any() and weights[:, ~far & np.tril(~far)].all()
    assert np.allclose(weights.sum(-1), 1)
