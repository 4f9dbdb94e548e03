"""What the GPU program takes of a GPU's memory, on one where it is only counted."""
import contextlib
import gc
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from dry_gpu import BIG, Device, ONE, SMALL, blank, dry_run, step, ways
from helpers import TINY, drawn
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda

import nanoeuler as ne
import nanoeuler_cuda as nc
from nanoeuler_parts import gpu_memory
from oracles.naive_attention import NaiveModel

pytestmark = pytest.mark.usefixtures("old_objects_are_no_garbage")


@ways
@pytest.mark.parametrize("dtype", nc.DTYPES)
def test_memory_is_free_as_soon_as_nobody_has_it(dtype, naive, dry):
    """Not when Python next looks for garbage: a training run makes a decoder for each sample."""
    before, ids = dry.used, np.zeros((2, 8), np.int32)
    gc.disable()
    try:
        model = blank(TINY, dtype, naive)
        step(model, 2, 8)
        model.losses(ids, ids)
        dry.launches.clear()                 # they hold their arguments
        alone, decoder = dry.used, model.decoder()
        decoder.decode(0, 0)
        del decoder
        dry.launches.clear()
        assert dry.used == alone
        del model
        assert dry.used == before
    finally:
        gc.enable()


def memory_table(cfg, B, T, dtype, naive, kept=None):
    Model = NaiveModel if naive else nc.Model
    return gpu_memory.memory_table(cfg, B, T, nc.DTYPES[dtype], Model.buffer_table, kept)


def needed(cfg, B, T, dtype="f32", naive=False, samples=True):
    """Bytes of a model and its batch, with or without those of a sample."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "get_current_device", lambda: Device(0).gpu)
        table = dict(memory_table(cfg, B, T, dtype, naive))
    return sum(table.values()) - (0 if samples else table["samples"])


@pytest.mark.parametrize("name, B, T", [("small", 16, 128), ("big", 4, 256), ("base", 1, 512),
                                        ("base", 64, 512), ("large", 8, 1024),
                                        ("small, with options", 16, 128)])
@pytest.mark.parametrize("dtype", nc.DTYPES)
@ways
def test_memory_table_is_what_a_model_takes(name, B, T, dtype, naive, dry):
    cfg = {**ne.PRESETS, "small, with options": replace(
        ne.PRESETS["small"], qkv_bias=True, qk_norm=True, window=20)}[name]
    model = blank(cfg, dtype, naive)
    model.prepare(B, T)
    assert dry.peak == dry.used == pytest.approx(
        needed(cfg, B, T, dtype, naive, samples=False), rel=0.005)
    table = dict(memory_table(cfg, B, T, dtype, naive))
    group = lambda buffers: sum(x.size * x.dtype.itemsize for x in buffers)
    assert table["activations"] + table["logits"] == group(model.a)
    assert table["their gradients"] == group(model.d)
    assert table["tokens"] == group([model.ids, model.runs])
    assert table["AdamW moments"] == group([model.m, model.v]) == 2 * group([model.flat])
    assert table["parameters"] == table["gradients"] == group([model.g_flat])
    assert table["bfloat16 copies"] == (group([model.copies]) if dtype == "bf16" else 0)
    before, decoder = dry.used, model.decoder()
    if decoder.rows_are_cheap:                         # a prompt takes its memory when it comes
        decoder.read([ne.Part(0, [0] * cfg.seq_len)])
    # beside angles, and the activations and logits of a few rows
    assert dry.used - before == pytest.approx(table["samples"], rel=0.01, abs=1 << 20)
    assert dry.peak == dry.used              # nothing for a moment beside it
    del decoder


@pytest.mark.parametrize("dtype", nc.DTYPES)
def test_a_model_allocates_the_memory_of_muon_before_its_first_update(dtype, dry):
    """Later there may be none left: a micro-batch is as large as fits."""
    cfg, hyper = ne.PRESETS["small"], ne.Hyper(*np.ones(len(ne.Hyper._fields)))
    options = SimpleNamespace(dtype=dtype, recompute=False, matmul="wgmma", optimizer="muon")
    plain = blank(cfg, dtype)
    before, model = dry.used, blank(cfg, dtype, options=options)
    used = dry.used
    assert used - before == pytest.approx(model.held, abs=1 << 18)       # semaphores, sums
    assert model.held > 1.1 * plain.held     # by the working memory of Muon
    assert hyper.muon_lr
    model.update(hyper)
    assert dry.used == used


@ways
@pytest.mark.parametrize("name", ["big", "large", "xl"])
def test_what_is_made_again_takes_no_memory(name, naive, dry):
    cfg = ne.replace(ne.PRESETS[name], n_layer=6)
    whole, model = blank(cfg, "bf16", naive), blank(cfg, "bf16", naive, recompute=True)
    for x in whole, model:
        x.prepare(1, cfg.seq_len)
    tables = [dict(x.memory(1, cfg.seq_len)) for x in (whole, model)]
    taken = [sum(x.size * x.dtype.itemsize for x in m.a) for m in (whole, model)]
    assert taken == [x["activations"] + x["logits"] for x in tables]
    kept = {"x", "state", "y", "nll", "attn_rstd", "mlp_rstd", "final_rstd", "logits"}
    for field, before, after in zip(model.a._fields, whole.a, model.a, strict=True):
        assert before.size == (1 if field in kept else cfg.n_layer) * after.size, field
    assert taken[1] < 0.6 * taken[0]


def test_another_shape_frees_the_old_memory_first(dry):
    model = blank(SMALL)
    for B, T in ((16, 128), (32, 64), (17, 128)):
        dry.peak = 0
        model.prepare(B, T)
        assert dry.used == pytest.approx(needed(SMALL, B, T, samples=False), rel=0.005)
        assert dry.peak <= 1.01 * needed(SMALL, max(B, 17), 128, samples=False)
    model.prepare(2, 128)                    # fewer sequences of that length fit as they are
    assert dry.used == pytest.approx(needed(SMALL, 17, 128, samples=False), rel=0.005)


@given(st.sampled_from(["small", "big"]), st.integers(0, 1 << 40), st.sampled_from([1, 60, 512]),
       st.sampled_from(sorted(nc.DTYPES)), st.booleans())
@drawn(30)
def test_what_fits_is_the_most_that_does(name, free, T, dtype, naive):
    cfg = ne.PRESETS[name]
    with dry_run(needed(cfg, 1, 1, dtype, naive) + free + (8 << 20)) as device:
        model = blank(cfg, dtype, naive)
        B, room = model.fitting(T), 0.9 * (device.total - device.used) + model.held
    assert B == 0 or needed(cfg, B, T, dtype, naive) <= room
    assert B < 1 << 16                       # what a grid may have along z
    assert B + 1 == 1 << 16 or needed(cfg, B + 1, T, dtype, naive) > room


@given(st.integers(1, 300), st.integers(60 << 20, 4 << 30))
@drawn(30)
def test_micro_batches_are_equal_parts_that_fit(B, total):
    with dry_run(total) as device:
        model = blank(BIG) if total > needed(BIG, 1, BIG.seq_len) else blank(SMALL)
        T, cfg = model.cfg.seq_len, model.cfg
        b = model.micro_batch(B)
        if needed(cfg, 1, T) < 0.9 * total:
            model.prepare(b, T)
        parts = math.ceil(B / b)             # the last one lacks one sequence at most a part
        assert 0 <= parts * b - B < parts
        fewer = math.ceil(B / (parts - 1)) if parts > 1 else 0
        assert not fewer or needed(cfg, fewer, T) > 0.89 * total
        assert device.used <= total


def test_what_fits_does_not_depend_on_what_was_there():
    """Preferences begin with a reading of 16 rows at a time, whose memory the first step takes."""
    with dry_run(needed(BIG, 20, 256)):
        model = blank(BIG)
        fits = model.fitting(256)
        assert fits in (17, 18)
        for B in (1, 16):
            model.prepare(B, 256)
            assert model.fitting(256) == fits
        assert model.micro_batch(34) == 17


@pytest.mark.parametrize("B", [40, 200, 5000])
def test_without_room_a_batch_that_fits_is_named(B):
    total = needed(BIG, 32, 256) + (1 << 20)
    with dry_run(total):
        model = blank(BIG)
        with pytest.raises(nc.UserError) as e:
            model.prepare(B, 256)
        said = str(e.value)
        assert str(B) in said and "\n" not in said
        fits = int(re.search(r"--micro-batch (\d+)", said)[1])
        assert 27 <= fits <= 32, said
        model.prepare(fits, 256)             # and the model is none the worse


def test_without_room_for_one_sequence_other_remedies_are_named():
    with dry_run(needed(BIG, 1, 64, samples=False) + (1 << 20)):
        model = blank(BIG)
        with pytest.raises(nc.UserError, match="--seq-len") as e:
            model.prepare(1, 256)
        assert "--micro-batch" not in str(e.value)


def test_without_room_for_the_weights_a_smaller_preset_is_named():
    size = 4 * 4 * ne.n_params(BIG)          # parameters, gradients, two moments; float32
    for total, room in ((size - 1, False), (size + (1 << 20), True)):
        with dry_run(total), contextlib.nullcontext() if room else pytest.raises(
                nc.UserError, match="--preset"):
            blank(BIG)


def test_what_is_asked_for_is_taken_and_said(dry, capsys):
    model = blank(SMALL)
    assert model.micro_batch(40, 7) == 7 and model.micro_batch(40, 7) == 7
    said = capsys.readouterr().out
    assert said.count("memory for 7 sequences of 128 tokens at a time") == 1 and "together" in said
    assert model.micro_batch(4, 9) == 4      # no more than there are


def test_each_number_that_is_asked_for_is_taken(dry):
    model = blank(SMALL)
    assert [model.micro_batch(64, asked) for asked in (8, 16, 0, 8)] == [8, 16, 64, 8]


def test_what_a_dropped_model_had_is_free_for_the_next():
    """One that the reference counts do not free: only the garbage collector finds it."""
    with dry_run(needed(BIG, 1, 64)) as device:
        gc.disable()
        try:
            model = blank(BIG)
            model.myself = model
            taken = device.used
            del model
            assert device.used == taken      # two do not fit
            blank(BIG)
        finally:
            gc.enable()


def test_no_room_for_the_staged_tokens_is_said_as_any_other(dry, monkeypatch):
    """They are the last that is allocated; the model is none the worse."""
    def full(*_, **__):
        raise nc.CudaAPIError(2, "Call to cuMemHostAlloc results in CUDA_ERROR_OUT_OF_MEMORY")

    model = blank(SMALL)
    before = dry.used
    with monkeypatch.context() as patch, pytest.raises(nc.UserError, match="--micro-batch"):
        patch.setattr(cuda, "pinned_array", full)
        model.prepare(2, 128)
    assert dry.used == before
    step(model, 2, 128)


def test_what_is_no_lack_of_memory_is_not_called_so(dry, monkeypatch):
    def ill(*_, **__):
        raise nc.CudaAPIError(700, "Call to cuMemAlloc results in CUDA_ERROR_ILLEGAL_ADDRESS")

    model = blank(SMALL)
    monkeypatch.setattr(nc, "new", ill)
    with pytest.raises(nc.CudaAPIError, match="ILLEGAL_ADDRESS"):
        model.prepare(2, 128)


@pytest.mark.parametrize("rows, columns", [(8, 9 << 20), (9 << 20, 8)])
def test_a_portable_product_has_as_many_tiles_as_it_needs(rows, columns, dry):
    """More than 65,535 of them, along either side: the limit of a grid's y"""
    out, x, w = nc.new((rows, columns), np.float32), nc.new((rows, 4), np.float32), nc.new(
        (columns, 4), np.float32)
    nc.matmul(out, x, w)
    assert dry.launches[-1].grid == (9 << 13, 1, 1)


def test_no_more_sequences_than_a_grid_has_blocks(dry):
    """A hundred thousand short ones would fit into memory."""
    cfg = replace(ONE, n_embd=8, n_hidden=8, n_head=2, n_kv_head=1, head_dim=2, vocab_size=8)
    model = blank(cfg)
    assert model.fitting(2) == 65535
    step(model, 65535, 2)


def test_the_rows_that_are_trained_on_are_what_counts(dry, capsys):
    """Fine-tuning takes rows that are shorter than the context."""
    cfg = replace(BIG, seq_len=2048)
    with dry_run(needed(cfg, 6, 2048)):
        model = blank(cfg)
        assert model.micro_batch(32, 0, 256) == 32 and model.micro_batch(32) < 6
    said = capsys.readouterr().out
    assert "memory for 32 sequences of 256 tokens" in said
    assert "sequences of 2048 tokens" in said


def test_a_loss_of_other_rows_than_were_prepared(dry):
    """As many as fit, not as many as there were; more than the context are refused."""
    with dry_run(needed(BIG, 40, 16)):
        model, ids = blank(BIG), np.zeros((32, 256), np.int32)
        model.prepare(32, 16)
        assert model.losses(ids, ids).shape == (32,) and model.shape[0] < 32
        long = np.zeros((1, 257), np.int32)
        for _ in range(2):
            with pytest.raises(nc.UserError, match="expected 1 to 256 tokens, got 257"):
                model.losses(long, long)
        assert model.losses(ids, ids).shape == (32,)


def test_garbage_is_looked_for_only_before_memory_is_taken(dry, monkeypatch):
    """It takes a fifth of a second, and preferences are read in hundreds of parts."""
    model, ids, looked = blank(SMALL), np.zeros((4, 16), np.int32), []
    monkeypatch.setattr(nc, "release_garbage", lambda: looked.append(1))
    model.losses(ids, ids)
    assert looked == [1]
    for _ in range(3):
        model.losses(ids, ids)
    assert looked == [1]
    model.losses(ids[:, :8], ids[:, :8])     # other rows
    assert looked == [1, 1]


@pytest.mark.parametrize("bad", [-1, BIG.vocab_size])
def test_a_token_that_the_model_has_not_is_refused(bad, dry):
    model, ids = blank(BIG), np.zeros((1, 16), np.int32)
    wrong = ids + bad
    with pytest.raises(nc.UserError, match="expected token ids"):
        model.losses(wrong, ids)


def test_tensor_maps_go_with_the_memory_that_they_tell_of(dry):
    """They are as many after a hundred changes of shape as after the first."""
    dry.gpu.compute_capability, seen = (9, 0), []
    model = blank(SMALL, "bf16")
    for T in (64, 32, 64, 32, 64):
        step(model, 2, T)
        dry.launches.clear()
        seen.append((dry.used, len(model.ops.maps)))
    assert seen[0] == seen[2] == seen[4] and seen[1] == seen[3] and seen[0][1] > 10
