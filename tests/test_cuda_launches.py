"""Every launch of the GPU program, on memory that is only counted: shapes, blocks, what a graph
remembers, and in which order the host waits."""
import contextlib
import gc
import math
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from dry_gpu import (BIASED, KINDS, LLAMA, RUNS, SMALL, adapted, blank, constants, dry_run,
                     everything,
                     everything_of_a_rank, everything_of_an_adapter, extent, functions_of,
                     is_array, kernels_of, lowest_rungs, name_of, step, ways)
from helpers import ROOT, TINY, drawn, slow
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda

import nanoeuler as ne
import nanoeuler_cuda as nc
from nanoeuler_parts.selftests.run import all_cases
from nanoeuler_parts.decode import prompts as prompts_module, steps
from nanoeuler_parts.tensor_cores import matmul_wgmma, ptx
from nanoeuler_parts.tensor_cores.ops import SEMAPHORES
from nanoeuler_parts.decode.attend import heads_per_block, keys_per_split, MERGE_FROM
from nanoeuler_parts.decode.products import TURNS_AT_ONCE, whole_smem
from nanoeuler_parts.decode.prompts import Prompts
from nanoeuler_parts.gpu import launches
from nanoeuler_parts.lora.adapter import MATRICES

pytestmark = pytest.mark.usefixtures("old_objects_are_no_garbage")


@pytest.mark.parametrize("first", ["wgmma", "mma", "portable"])
def test_a_model_keeps_to_its_own_way_to_multiply(first, dry):
    """Whatever others are made meanwhile: a graph that is recorded later is of the same kernels."""
    def kernels_of_a_step(model):
        dry.launches.clear()
        step(model, 2, 64)
        model.losses(np.zeros((2, 64), np.int32), np.zeros((2, 64), np.int32))
        return {x.name for x in dry.launches}

    dry.gpu.compute_capability = (9, 0)
    cfg, alone = replace(SMALL, seq_len=64), {}
    flat = np.zeros(ne.n_params(cfg), np.float32)
    models = {}
    for way in (first, "wgmma", "portable", "mma"):
        options = SimpleNamespace(dtype="bf16", matmul=way, recompute=False)
        models.setdefault(way, nc.Model(cfg, flat, options=options))
        alone.setdefault(way, kernels_of_a_step(models[way]))
    assert len({frozenset(x) for x in alone.values()}) == 3
    for way, model in models.items():
        assert kernels_of_a_step(model) == alone[way]


def test_an_error_of_the_driver_is_none_of_the_users(dry, monkeypatch):
    """A chat goes on after a UserError; after this one every call fails."""
    monkeypatch.setattr(launches.driver, "cuGetErrorString", lambda error: (
        0, b"an illegal address"))
    with pytest.raises(nc.CudaAPIError, match="700"):
        launches.ok((launches.driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,))
    assert not issubclass(nc.CudaAPIError, ne.UserError)
    assert launches.ok((launches.driver.CUresult.CUDA_SUCCESS, 7)) == 7


# On each way to multiply without NaiveModel, and on all ways for two models
CASES = [(name, kind, naive) if name in ("small", "odd") or kind != "bf16" and not naive
         else slow(name, kind, naive) for name in RUNS for kind in KINDS for naive in (False, True)
         if kind != "f64" or name in ("small", "odd")]
CASES += [slow(name, "f64", naive) for name in RUNS if name not in ("small", "odd")
          for naive in (False, True)]


@pytest.mark.parametrize("name, kind, naive", CASES)
def test_every_launch_fits_its_arguments(name, kind, naive, dry):
    dtype, dry.gpu.compute_capability = KINDS[kind]
    everything(*RUNS[name], dtype, naive)
    assert naive == any(x.name == "softmax_kernel" for x in dry.launches)


@pytest.mark.parametrize("name", ["small", "tied", "head_dim 128"])
def test_a_decoder_of_bf16_matrices_takes_steps_of_rows(name, dry, capsys):
    cfg = RUNS[name][0]
    decoder = nc.make_decoder(cfg, np.zeros(ne.n_params(cfg), np.float32), "bf16")
    assert decoder.rows_are_cheap and decoder.heads == cfg.n_mtp - 1
    assert capsys.readouterr().err == ""
    assert decoder.decode(0, 0).shape == (cfg.vocab_size,)
    assert [x.name for x in dry.launches].count("product_kernels_qkv") == cfg.n_layer
    assert len(dry.launches) == 5 * cfg.n_layer + 2


def test_only_steps_of_rows_on_hopper_overlap(dry, monkeypatch):
    """And whoever launches later does so plainly, also after an error."""
    plain, overlapped = launches.dispatcher.LaunchConfig, []

    def seen(kernel, *args, **config):
        overlapped.append(launches.dispatcher.LaunchConfig is not plain)
    monkeypatch.setattr(steps, "launch", seen)
    for capability, overlaps in ((8, 9), False), ((9, 0), True):
        dry.gpu.compute_capability = capability
        decoder = nc.make_decoder(SMALL, np.zeros(ne.n_params(SMALL), np.float32), "bf16")
        overlapped.clear()
        decoder.decode(0, 0)
        assert overlapped == [False] + [overlaps] * (5 * SMALL.n_layer + 1)    # `take` is plain
        assert launches.dispatcher.LaunchConfig is plain
    with pytest.raises(ZeroDivisionError), launches.overlapping():
        assert launches.dispatcher.LaunchConfig(grid=1, block=1).programmatic_stream_serialization
        1 / 0
    assert launches.dispatcher.LaunchConfig is plain


@pytest.mark.parametrize("head_dim", [64, 32])
def test_kernels_of_a_prompt_that_overlap_wait_for_the_one_before(head_dim, dry, monkeypatch):
    """A kernel that starts early and does not wait would read what is not there yet.  Attention of
    heads of 32 is on path mma, which does not wait."""
    plain, found = launches.dispatcher.LaunchConfig, []

    def seen(kernel, *args, launch=launches.launch, **config):
        found.append((kernel, launches.dispatcher.LaunchConfig is not plain))
        launch(kernel, *args, **config)
    for module in nc, matmul_wgmma, prompts_module:
        monkeypatch.setattr(module, "launch", seen)
    dry.gpu.compute_capability = (9, 0)
    cfg = replace(SMALL, head_dim=head_dim, seq_len=128)
    decoder = nc.make_decoder(cfg, np.zeros(ne.n_params(cfg), np.float32), "bf16")
    found.clear()
    decoder.read([ne.Part(0, [0] * 100)])
    early = [name_of(kernel) for kernel, overlaps in found if overlaps]
    products = ["wgmma_kernel_kernel"] * 4
    attention = ["tensor_attention_forward_forward"] * (head_dim == 64)
    of_a_layer = [*products, *attention, "rotate_and_keep_kernel_rotate_and_keep"]
    assert sorted(early) == sorted(of_a_layer * cfg.n_layer + ["product_kernels_logits"])
    for kernel, overlaps in found:
        waits = ptx.after_previous.py_func in functions_of(kernel, set())
        assert waits or not overlaps, name_of(kernel)


@pytest.mark.parametrize("name, reason", [("head_dim 34", "head_dim is 34"), ("odd", "n_embd is")])
def test_a_decoder_of_bf16_matrices_of_another_shape(name, reason, dry, capsys):
    """They are read as they are; the vectors of the norms stay float32."""
    cfg = RUNS[name][0]
    decoder = nc.make_decoder(cfg, np.zeros(ne.n_params(cfg), np.float32), "bf16")
    assert reason in capsys.readouterr().err
    assert decoder.decode(0, 0).shape == (cfg.vocab_size,)
    products = [x.args for x in dry.launches if x.name == "matvec_kernel"]
    assert len(products) == 4 * cfg.n_layer + 1
    assert {w.dtype for _, w, _ in products} == {np.dtype(np.uint16)}
    assert {y.dtype for y, *_ in products} == {np.dtype(np.float32)}
    assert decoder.p.attn_norm.dtype == np.float32
    with pytest.raises(ne.UserError, match="f32 or bf16"):
        nc.make_decoder(cfg, np.zeros(ne.n_params(cfg), np.float32), "int8")


@pytest.mark.parametrize("name, capability, kept", [
    ("small", (8, 9), "bf16"), ("head_dim 34", (8, 9), "f32"), ("small", (7, 5), "f32")])
def test_weights_are_kept_as_is_best(name, capability, kept, dry, capsys):
    dry.gpu.compute_capability, cfg = capability, RUNS[name][0]
    decoder = nc.make_decoder(cfg, np.zeros(ne.n_params(cfg), np.float32), "")
    assert decoder.kept_as == decoder.with_slots(2).kept_as == kept
    assert decoder.rows_are_cheap == (kept == "bf16") and capsys.readouterr().err == ""
    plain = nc.Decoder(cfg, np.zeros(ne.n_params(cfg), np.float32), "bf16")
    assert type(plain) is type(plain.with_slots(2)) is nc.Decoder and plain.kept_as == "bf16"


@pytest.mark.parametrize("weights", ["f32", "bf16"])
@pytest.mark.parametrize("options", [
    {"qk_norm": True}, {"window": 20, "qkv_bias": True}, {"window": 40}, {"qkv_bias": True},
    {"window": 20, "qk_norm": True}, {"rope_scaling": "linear", "rope_factor": 4.0}])
def test_a_decoder_of_other_llamas(options, weights, dry, capsys):
    """Both decoders have norms of q and k, biases, and windows.  A window of the whole context is
    none."""
    cfg = replace(SMALL, seq_len=40, **options)
    flat = np.zeros(ne.n_params(cfg), np.float32)
    assert nc.make_decoder(cfg, flat, "").kept_as == "bf16"
    decoder = nc.make_decoder(cfg, flat, weights)
    assert decoder.rows_are_cheap == (weights == "bf16") and not capsys.readouterr().err
    dry.launches.clear()
    decoder.decode(0, 0)
    names, attends = [x.name for x in dry.launches], [
        x for x in dry.launches if x.name in ("attention_decode_kernel", "attend_kernel_attend")]
    biases = names.count("add_bias_kernel") + sum(
        x.name == "product_kernels_qkv" and constants(x.kernel)["biased"] for x in dry.launches)
    assert biases == cfg.n_layer * cfg.qkv_bias
    norms = names.count("head_norm_kernels_forward") + names.count(
        "norm_and_rotate_kernel_norm_and_rotate")
    assert norms == cfg.n_layer * cfg.qk_norm and len(attends) == cfg.n_layer
    windows = {x.args[6] if weights == "f32" else constants(constants(x.kernel)["first_key"])[
        "window"] for x in attends}
    assert windows == {20 if cfg.window == 20 else 40 if weights == "f32" else 0}


@pytest.mark.parametrize("window, length, splits", [
    (None, 1, 1), (None, 129, 2), (None, 300, 3), (100, 300, 1), (128, 300, 1), (129, 300, 2),
    (200, 130, 2), (290, 300, 3)])
def test_a_window_limits_the_splits_of_a_context(window, length, splits, dry):
    """There are 128 keys per split.  The number is that of the kernel, rounded up to a power of
    two, but not beyond the longest context or window."""
    cfg = replace(SMALL, n_layer=1, seq_len=300, window=window)
    assert keys_per_split(cfg.head_dim) == 128
    decoder = nc.make_decoder(cfg, np.zeros(ne.n_params(cfg), np.float32), "bf16")
    dry.launches.clear()
    decoder.decode(0, length - 1)
    assert [x.grid[1] for x in dry.launches if x.name == "attend_kernel_attend"] == [splits]


def test_slots_of_a_window_keep_all_tokens(dry):
    """The cache is no ring: what is taken back or copied is there."""
    flat = np.zeros(ne.n_params(LLAMA), np.float32)
    decoder = nc.Decoder(LLAMA, flat, slots=2)
    decoder.read([ne.Part(0, [0] * 39, 0)])
    assert decoder.copy(0, 1, 30) == 30 and decoder.truncate(1, 1) == 1
    assert decoder.truncate(3) == 3 and decoder.held_ids == [[0] * 3, [0]]


@pytest.mark.parametrize("weights", ["f32", "bf16"])
def test_a_prompt_of_several_steps(weights, dry):
    """No logits of the first of them are wanted."""
    cfg = replace(SMALL, seq_len=ne.MOST_ROWS + 20)
    decoder = nc.make_decoder(cfg, np.zeros(ne.n_params(cfg), np.float32), weights)
    assert decoder.read([ne.Part(0, [0] * (ne.MOST_ROWS + 9), 1)]).shape == (1, cfg.vocab_size)


def test_rows_of_a_step(dry):
    """64 rows at most, in blocks of eight, or of sixteen where there are more; three that are read
    are four for the graph."""
    cfg = replace(SMALL, n_layer=1, seq_len=2 * keys_per_split(SMALL.head_dim))
    decoder = nc.make_decoder(cfg, np.zeros(ne.n_params(cfg), np.float32), "bf16", slots=4)

    def grids(name, *parts):
        dry.launches.clear()
        decoder.read([ne.Part(*part) for part in parts])
        return [x.grid[1:] for x in dry.launches if x.name == name]

    assert grids("attend_kernel_attend", (3, [0] * 19, 2), (1, [0] * 2, 1)) == [(1, 32)]
    assert grids("product_kernels_gate_up", (3, [0] * 3, 2)) == [(1, 1)]
    assert grids("merge_kernel_merge", (3, [0] * (MERGE_FROM // 2), 1)) == []
    assert grids("merge_kernel_merge", (3, [0] * MERGE_FROM, 1)) == [(MERGE_FROM, 1)]
    assert grids("product_kernels_logits", (3, [0] * 11, 9), (1, [0] * 2, 2)) == [(1, 1)]
    assert decoder.held_ids[3] == [0] * (35 + MERGE_FROM)
    decoder.truncate(19, 3)
    found = grids("attend_kernel_attend", (3, [0] * (cfg.seq_len - 19), 1))
    assert found == [(1, 64), (2, 64), (2, 64), (2, 64)]
    decoder.truncate(19, 3)
    assert grids("product_kernels_qkv", (3, [0] * 65, 0)) == [(2, 1), (1, 1)]
    decoder.truncate(19, 3)
    assert grids("product_kernels_logits", (3, [0] * 75, 70)) == [(4, 1), (1, 1)]


# ---- prompts
def prompts_of(dry):
    """(T, rows of logits) of each prompt that was read, in their order; no more"""
    found = []
    for x in dry.launches:
        if x.name == "embedding_forward_kernel":
            found.append([len(x.args[0]), 0])
        if x.name == "take_kernel_take" and x.args[2].dtype == np.float32:
            found[-1][1] += x.grid[0]
    return found


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
def test_a_prompt_is_read_at_once(capability, dry):
    """All products of a layer by tensor cores, in the rows of training; its length is rounded up,
    at most to that of the slot, and one behind the other in a step."""
    dry.gpu.compute_capability = capability
    cfg = replace(SMALL, n_layer=2, seq_len=300)
    decoder = nc.make_decoder(cfg, np.zeros(ne.n_params(cfg), np.float32), "bf16", slots=5)
    parts = [ne.Part(0, [0] * 65, 1), ne.Part(1, [0] * 64, 1), ne.Part(2, [0] * 128, 128),
             ne.Part(3, [0] * 129, 3), ne.Part(4, [0] * 257, 1)]
    assert decoder.read(parts).shape == (134, cfg.vocab_size)
    assert decoder.held_ids == [[0] * n for n in (65, 64, 128, 129, 257)]
    assert prompts_of(dry) == [[96, 1], [128, 128], [192, 4], [300, 1]]
    names = [x.name for x in dry.launches]
    product = "wgmma_kernel_kernel" if capability == (9, 0) else "mma_kernel_kernel"
    assert names.count(product) == 4 * 4 * cfg.n_layer
    assert names.count("rotate_and_keep_kernel_rotate_and_keep") == 4 * cfg.n_layer
    assert "matmul_kernel" not in names
    assert names.count("product_kernels_qkv") == cfg.n_layer         # of slot 1
    dry.launches.clear()
    decoder.read([ne.Part(0, [0] * 100, 1)])             # it goes on: rows
    decoder.truncate(0)
    decoder.read([ne.Part(0, [0] * 300, 300)])           # more lines than a step has rows
    assert prompts_of(dry) == [[300, 256 + 64]]
    dry.launches.clear()
    decoder.read([ne.Part(0, [0], 1)])                   # it slides: half of it begins the slot
    assert prompts_of(dry) == [[192, 1]] and len(decoder.tokens) == 151


def test_a_prompt_that_fails_was_not_read(dry, monkeypatch):
    """Else the next one goes on with keys that nobody wrote."""
    cfg = replace(SMALL, n_layer=1, seq_len=300)
    decoder = nc.make_decoder(cfg, np.zeros(ne.n_params(cfg), np.float32), "bf16", slots=2)
    decoder.read([ne.Part(1, [0] * 9, 0)])

    def fails(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(decoder.steps, "read_prompt", fails)
        decoder.read([ne.Part(1, [0], 1), ne.Part(0, [0] * 100, 1)])
    assert decoder.held_ids[0] == [] and (1 in decoder.unread or decoder.held_ids[1] == [])
    assert decoder.read([ne.Part(0, [0] * 100, 1)]).shape == (1, cfg.vocab_size)


def test_the_memory_of_prompts_is_that_of_the_longest(dry):
    cfg = replace(SMALL, n_layer=1, seq_len=100_000)
    decoder = nc.make_decoder(cfg, np.zeros(ne.n_params(cfg), np.float32), "bf16")
    for n, T in (100, 128), (70, 128), (300, 384), (80, 384):
        decoder.truncate(0)
        decoder.read([ne.Part(0, [0] * n, 1)])
        assert len(decoder.steps.prompts.x) == T


def test_a_prompt_in_pieces_is_read_as_a_whole(dry):
    """A server cuts it by the clock, which must not be seen in the text."""
    cfg = replace(SMALL, n_layer=1, seq_len=300)
    decoder = nc.make_decoder(cfg, np.zeros(ne.n_params(cfg), np.float32), "bf16", slots=4)
    for n in (8, 100, 1):
        assert decoder.read([ne.Part(1, [0] * n, 0)]).shape == (0, cfg.vocab_size)
    decoder.copy(1, 2, 70)
    decoder.copy(1, 3, 20)
    assert not dry.launches and decoder.held_ids == [[], [0] * 109, [0] * 70, [0] * 20]
    assert decoder.read([ne.Part(2, [0], 1), ne.Part(3, [0], 1)]).shape == (2, cfg.vocab_size)
    assert prompts_of(dry) == [[96, 1]] and decoder.unread == {1}
    assert [x.name for x in dry.launches].count("product_kernels_qkv") == 1      # 21 rows of slot 3
    decoder.truncate(90, 1)
    dry.launches.clear()
    decoder.read([ne.Part(2, [0], 1), ne.Part(1, [0] * 9, 2), ne.Part(3, [0], 1)])
    assert prompts_of(dry) == [[128, 2]] and decoder.unread == set()
    assert decoder.held_ids == [[], [0] * 99, [0] * 72, [0] * 22]
    dry.launches.clear()
    decoder.read([ne.Part(slot, [0], 1) for slot in (2, 1, 3)])
    assert prompts_of(dry) == [] and len(decoder.held_ids[1]) == 100
    decoder.read([ne.Part(0, [0] * 50, 0)])
    decoder.truncate(0)                      # nothing of it was ever read
    assert decoder.read([ne.Part(0, [0], 1)]).shape == (1, cfg.vocab_size)
    decoder.read([ne.Part(0, [0] * 50, 0)])              # it goes on: rows
    assert prompts_of(dry) == [] and len(decoder.held_ids[0]) == 51


@given(st.data(), st.sampled_from(sorted(KINDS)), st.booleans(), st.integers(1, 5))
@drawn(60)
def test_launches_of_any_shape(data, kind, naive, B):
    draw = lambda low, high: data.draw(st.integers(low, high))
    unit = data.draw(st.sampled_from([1, 8]))            # tensor cores want multiples of 8
    G, T = draw(1, 4), draw(1, 300)
    cfg = ne.Config(n_embd=unit * draw(1, 1100 // unit), n_head=G * draw(1, 4), n_kv_head=G,
                    head_dim=2 * draw(1, 64), n_layer=draw(1, 2), n_hidden=unit * draw(1, 70),
                    seq_len=T + draw(0, 9), vocab_size=draw(1, 5000), n_mtp=draw(1, 4),
                    tie_embeddings=data.draw(st.booleans())).check()
    with dry_run() as device:
        dtype, device.gpu.compute_capability = KINDS[kind]
        everything(cfg, B, T, dtype, naive)


def test_a_block_has_fewer_rows_where_shared_memory_is_short(dry):
    """Two groups of them where four do not fit; a model for which one does not goes row by row."""
    dry.gpu.compute_capability = (9, 0)
    cfg = replace(SMALL, n_embd=1024, n_layer=1, seq_len=64)
    flat, size = np.zeros(ne.n_params(cfg), np.float32), ne.dims_of(cfg)
    need = [whole_smem(size, groups, hopper=True) for groups in TURNS_AT_ONCE]
    assert need == sorted({*need})
    for room, groups in ((need[2], 4), (need[2] - 1, 2), (need[1] - 1, 1)):
        dry.gpu.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = room
        decoder = nc.make_decoder(cfg, flat, "bf16")
        dry.launches.clear()
        decoder.read([ne.Part(0, [0] * 64, 1)])
        blocks = {x.grid[1] for x in dry.launches if x.name == "product_kernels_qkv"}
        assert decoder.steps.groups == groups and blocks == {8 // groups}
    dry.gpu.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = need[0] - 1
    assert "bytes of shared memory" in nc.rows_refused(cfg)
    assert not nc.make_decoder(cfg, flat, "bf16").rows_are_cheap


@pytest.mark.parametrize("late", [None, "p", "w", "g", "m", "v"])
def test_adamw_loads_neighbours_where_all_buffers_are_aligned(late, dry):
    """m and v of one of several GPUs begin where its part begins, the others at the first entry."""
    def part(name):
        kind = np.uint16 if name == "w" else np.float32
        return nc.view(dry.array((64,), kind), 1 if name == late else 4, (48,))
    entries = nc.Entries(*map(part, nc.Entries._fields))
    hyper, partial, results = (dry.array((n,), np.float64)
                               for n in (len(ne.Hyper._fields), nc.NORM_PARTS, 2))
    nc.adamw(entries, 48, hyper, partial, results)
    assert constants(dry.launches[-1].kernel)["W"] == (1 if late else 4)


@pytest.mark.parametrize("sizes, W", [({}, 4), ({"n_embd": 37, "n_hidden": 41, "head_dim": 2}, 1)])
def test_muon_loads_neighbours_where_matrices_begin_and_end_at_them(sizes, W, dry):
    """Also if it has one matrix, which begins at a multiple of four and does not end at one"""
    cfg = replace(SMALL, n_layer=1, **sizes)
    start, N, K = ne.muon_matrices(cfg).tolist()[0]
    muon = nc.Muon(cfg, np.dtype(np.float32), slice(start - start % 4, start + N * K), nc.Ops())
    assert muon.W == W and (W == 4 or N * K % 4)


def test_every_kernel_is_launched(dry):
    for naive in (False, True):
        everything(SMALL, 2, 64, naive=naive)
    everything(SMALL, 2, 64, "bf16")
    dry.gpu.compute_capability = (9, 0)
    everything(SMALL, 2, 64, "bf16")
    everything(replace(SMALL, tie_embeddings=True), 2, 64, "bf16")
    lowest_rungs()
    everything_of_a_rank(SMALL, 2, 64)
    everything_of_an_adapter(SMALL, 2, 64)
    everything(LLAMA, 2, 64)
    everything(LLAMA, 2, 64, "bf16")
    assert sorted({x.name for x in dry.launches}) == sorted(
        [name for file in launches.DEVICE_CODE for name in kernels_of(Path(file))]
        + kernels_of(ROOT / "tests/oracles/naive_attention.py"))


def test_an_update_of_an_adapter_ends_with_its_scaled_copy(dry):
    """The gradient outside of the blocks is set to zero before its norm is computed.  The next step
    multiplies by s A and s B^T of this update.  A run stores the arrays that AdamW has updated."""
    model = adapted(SMALL, "bf16")
    assert [x.name for x in dry.launches][-1] == "scale_kernel"          # of the first step
    model.prepare(2, 64)
    del dry.launches[:]
    model.update(ne.Hyper(*np.ones(8)))
    names = [x.name.removesuffix("_update") for x in dry.launches]
    kept = [x.args[0] for x in dry.launches if x.name == "keep_blocks_kernel"]
    assert names[:2] == ["keep_blocks_kernel"] * 2 and names[-1] == "scale_kernel"
    assert names[2:-1] == ["square_sums_kernel", "adamw_kernel"]
    assert [extent(x)[0] for x in kept] == [
        extent(x.b)[0] for x in (model.g.qkv[0], model.g.gate_up[0])]
    p, w, g, m, v, *_ = dry.launches[-2].args
    assert [extent(x) for x in (p, w, g)] == [
        extent(x) for x in (model.flat, model.copies, model.g_flat)]
    assert [extent(x) for x in dry.launches[-1].args[:2]] == [
        extent(x) for x in (model.scaled, model.flat)]
    read = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nc, "to_host", lambda x: read.append(extent(x)) or np.zeros(x.shape))
        model.buffers()
    assert read == [extent(x) for x in (p, m, v)] and len({*read}) == 3


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_each_product_of_an_adapter_is_scaled_once(dry, dtype):
    """Of x A^T B^T and of its decoder's B A, one factor has s and the other one has not."""
    model, products = adapted(SMALL, dtype), []
    first, end = extent(model.scaled)

    def is_scaled(x):
        a, b = extent(x)
        assert (first <= a and b <= end) != (
            extent(model.copies)[0] <= a and b <= extent(model.copies)[1])
        return first <= a

    for layers in (getattr(model.w, name) for name in MATRICES):
        assert len(layers) == SMALL.n_layer
        for x in layers:
            assert [is_scaled(y) for y in (x.a, x.a_scaled, x.b, x.b_scaled)] == [0, 1, 0, 1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nc, "transposed", lambda x: x)
        patch.setattr(nc, "batched_matmul", lambda out, x, y, add: products.append((x, y, add)))
        model.decoder()
    assert len(products) == 4 * SMALL.n_layer and all(add for *_, add in products)
    assert all(is_scaled(x) + is_scaled(y) == 1 for x, y, _ in products)


def test_each_frozen_matrix_comes_from_its_own(dry):
    """The copies to the device, by the numbers that they copy: each tensor has one of its own."""
    for cfg in SMALL, replace(LLAMA, n_layer=2):
        cfg, copied = replace(cfg, n_mtp=1), []
        flat = np.zeros(ne.n_params(cfg), np.float32)
        tensors = [part for x in ne.views(flat, ne.param_table(cfg)) if x.size
                   for part in ([x] if x.ndim == 1 or len(x) == cfg.vocab_size else x)]
        for i, x in enumerate(tensors):
            x[...] = i
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nc.DeviceNDArray, "copy_to_device", lambda to, x, stream=0:
                          copied.append((extent(to)[0], np.unique(x).tolist())))
            model = adapted(cfg, "f32", flat)
        copied = [x for x in copied if x[0] in {extent(y)[0] for y in parts_of(model)}]
        place = {extent(x)[0]: i for i, x in enumerate(parts_of(model))}
        assert len(place) == len(tensors) == len(copied)
        assert all(numbers == [place[at]] for at, numbers in copied), cfg


def parts_of(model):
    """The frozen tensors on the device, a layer at a time, in the order of the table"""
    V = model.cfg.vocab_size
    return [part for x in model.p if x.size
            for part in ([x] if x.ndim == 1 or len(x) == V else [x[i] for i in range(len(x))])]


def test_tensor_cores_multiply_all_matrices_of_the_presets(dry):
    dry.gpu.compute_capability = (9, 0)
    for cfg in ne.PRESETS.values():
        step(blank(replace(cfg, n_layer=1), "bf16"), 1, cfg.seq_len)
    names = {x.name for x in dry.launches}
    assert {"wgmma_kernel_kernel", "tensor_attention_dq_dq"} < names
    assert not {"matmul_kernel", "portable_attention_backward_run"} & names


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
def test_blocks_share_a_tile_where_each_has_a_turn(capability, dry):
    dry.gpu.compute_capability = capability
    dw, dy, x = dry.array((768, 2048), np.float32), *(
        dry.array((32_768, n), np.uint16) for n in (768, 2048))
    for turns, shared in ((SEMAPHORES, True), (1, False)):
        ops = nc.make_ops()
        ops.semaphores = dry.array(turns, np.uint32)
        ops.matmul_dw(dw, dy, x)
        assert (dry.launches[-1].args[-2] > 1) == shared


@pytest.mark.parametrize("name", ["small", "chunks of logits", "tied, in chunks"])
def test_chunks_of_logits_are_the_whole_batch(name, dry):
    cfg, B, T = RUNS[name]
    step(blank(cfg), B, T)
    at = [i for i, x in enumerate(dry.launches) if "entropy" in x.name]
    rows = [(x.args[4], x.args[1].shape[0]) for x in (dry.launches[i] for i in at)]
    assert [r for r, _ in rows] == list(np.cumsum([0] + [n for _, n in rows])[:-1])
    assert sum(n for _, n in rows) == B * T and (len(rows) > 1) == ("chunks" in name)
    assert max(n for _, n in rows) * cfg.n_mtp * cfg.vocab_size * 4 <= 384 << 20
    for x in ([dry.launches[i - 1].args[1] for i in at],           # a.y of logits = y w^T,
              [dry.launches[i + 1].args[0] for i in at]):          # d.y of dx = dy w
        first = [a.gpu_data.address - x[0].gpu_data.address for a in x]
        assert first == [4 * r * cfg.n_embd for r, _ in rows]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["small", "tied", "one head", "chunks of logits"])
def test_a_loss_takes_the_first_head_only(name, kind, dry):
    """The others are for training; of four heads they would be three quarters of the logits."""
    dtype, dry.gpu.compute_capability = KINDS[kind]
    (cfg, B, T), ids = RUNS[name], np.zeros((RUNS[name][1], RUNS[name][2]), np.int32)
    model = blank(cfg, dtype)
    model.losses(ids, ids)
    losses = [x for x in dry.launches if "entropy" in x.name]
    assert {x.args[1].shape[1] for x in losses} == {cfg.vocab_size} == {x.args[5] for x in losses}
    dry.launches.clear()
    step(model, B, T)
    assert {x.args[1].shape[1] for x in dry.launches if "entropy" in x.name} == {
        cfg.n_mtp * cfg.vocab_size}


def test_a_decoder_keeps_the_weights_of_its_moment(dry):
    model = blank(TINY)
    first, end = extent(model.flat)
    for decoder in (model.decoder(), model.decoder()):
        assert not any(first <= extent(x)[0] < end for x in decoder.p)


@pytest.mark.parametrize("each, fits", [(1, True), (0, False)])
def test_blocks_that_wait_for_each_other_must_be_there_together(each, fits, dry, monkeypatch):
    """Looked at once for each kernel and grid, and refused in a line."""
    asked, done, config = [], [], SimpleNamespace(griddim=(46, 1, 1), blockdim=(384, 1, 1),
                                                  sharedmem=1)
    library = SimpleNamespace(get_cufunc=lambda: SimpleNamespace(handle=7))
    compiled = type("Compiled", (), {"_codelibrary": library})()
    monkeypatch.setattr(launches, "driver", SimpleNamespace(
        CUfunction=int,
        cuOccupancyMaxActiveBlocksPerMultiprocessor=lambda *x: asked.append(x) or (0, each)))
    for _ in range(2):
        with contextlib.nullcontext() if fits else pytest.raises(ne.UserError, match="46 blocks"):
            try:
                launches.check_once(launches.need_resident)(compiled, config)
            except launches.CheckNeeded as first:
                first.check()
            done.append(1)
    assert asked == [(7, 384, 1)] * (1 if fits else 2) and len(done) == 2 * fits
    assert getattr(compiled, "cooperative", False) == fits           # launched all together


def test_less_shared_memory_takes_none_from_a_launch_before(dry, monkeypatch):
    """The driver keeps one number for each kernel, which a later launch must not lower.  Its 48 KB
    without asking are for the kernel's arrays, too."""
    names, device, arrays = launches.driver.CUfunction_attribute, SimpleNamespace(id=0), 10 << 10
    most, granted, asked = names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, {7: 38 << 10}, []
    library = SimpleNamespace(get_cufunc=lambda: SimpleNamespace(handle=7))
    compiled = SimpleNamespace(_codelibrary=library)
    monkeypatch.setattr(nc.cuda, "get_current_device", lambda: device)
    monkeypatch.setattr(launches, "driver", SimpleNamespace(
        CUkernel=int, CUdevice=int, CUfunction_attribute=names,
        cuKernelGetAttribute=lambda attribute, kernel, device: (
            0, granted[kernel] if attribute == most else arrays),
        cuKernelSetAttribute=lambda attribute, size, kernel, device: (
            asked.append(attribute) or granted.update({kernel: size}) or (0,))))
    for kb, expected in ((38, 38), (39, 39), (100, 100), (200, 200), (60, 200), (201, 201)):
        launches.allow_shared(compiled, SimpleNamespace(sharedmem=kb << 10))
        assert granted == {7: expected << 10}


def test_a_launch_asks_what_an_equal_one_before_it_did_not(monkeypatch):
    """numba-cuda has one config, with its checks, for all launches of a kernel that are alike."""
    monkeypatch.setattr(nc.gpu, "stream", None)

    class Config:
        pre_launch_callbacks = []

        def __call__(self, *args):
            pass

    kernel = {(132, 384, None, 60 << 10): Config()}
    for resident in (False, True, True, False):
        nc.launch(kernel, grid=132, block=384, smem=60 << 10, resident=resident)
    assert Config.pre_launch_callbacks == [launches.check_once(check) for check in (
        launches.allow_shared, launches.need_resident)]


def recorded(device, function):
    """What a CUDA graph of function() would remember: kernels, addresses, strides, scalars."""
    device.launches.clear()
    function()
    return [(x.name, x.grid, x.block, x.smem, x.types, *[
        (a.gpu_data.address, a.shape, a.strides) if is_array(a) else a for a in x.args])
        for x in device.launches]


@ways
@pytest.mark.parametrize("kind", KINDS)
def test_what_changes_between_steps_lies_in_device_memory(kind, naive, dry):
    """A replayed graph launches the first step again: scalars and addresses must not change."""
    dtype, dry.gpu.compute_capability = KINDS[kind]
    model, rng = blank(TINY, dtype, naive), np.random.default_rng(1)
    decoder = model.decoder()
    losses = lambda: model.losses(rng.integers(0, 9, (3, 8)), rng.integers(-1, 9, (3, 8)))
    gradient = lambda: model.gradient(rng.integers(0, 9, (3, 8), np.int32),
                                      rng.integers(-1, 9, (2, 3, 8), np.int32), rng.random(2))
    update = lambda: model.update(ne.Hyper(*rng.random(8)))
    decode = lambda: decoder.step(int(rng.integers(9)))
    first = [recorded(dry, f) for f in (gradient, losses, update, decode)]
    assert min(map(len, first)) > 1
    assert [recorded(dry, f) for f in (losses, gradient, update, decode)] == [
        first[i] for i in (1, 0, 2, 3)]      # an evaluation may come before or between


@pytest.fixture
def said(monkeypatch):
    """The calls of a driver that records graphs of nothing."""
    said = []
    call = lambda name, result=(0, "x"): lambda *_: said.append(name) or result
    names = ("cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiate", "cuGraphLaunch",
             "cuGraphExecDestroy", "cuGraphDestroy")
    monkeypatch.setattr(launches, "driver", SimpleNamespace(
        CUstream=int, CUstreamCaptureMode=SimpleNamespace(
            CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1), **{name: call(name) for name in names}))
    monkeypatch.setattr(nc.gpu, "stream", SimpleNamespace(handle=0))
    monkeypatch.setattr(cuda, "defer_cleanup", contextlib.nullcontext)
    return said


def test_a_recording_ends_whatever_happens(said):
    """A stream that is left recording refuses all that follows; what the garbage collector finds
    meanwhile may destroy the graph of a dead model, which is not allowed."""
    outcomes = iter([None, RuntimeError("a kernel"), None])

    def function():
        said.append(f"runs, collecting {gc.isenabled()}")
        if (outcome := next(outcomes)) is not None:
            raise outcome

    graph = nc.Graph()
    graph(function)
    with pytest.raises(RuntimeError, match="a kernel"):
        graph(function)
    assert said[1:] == ["cuStreamBeginCapture", "runs, collecting False", "cuStreamEndCapture"]
    assert gc.isenabled()
    graph(function)                          # it first destroys what was recorded until then
    assert said[4] == "cuGraphDestroy"
    assert said[5:] == ["cuStreamBeginCapture", "runs, collecting False", "cuStreamEndCapture",
                        "cuGraphInstantiate", "cuGraphLaunch"] and gc.isenabled()
    graph.graph = graph.recorded = None      # the driver of this test has made none


def test_only_a_function_that_has_run_is_recorded(said):
    """Recorded, a kernel that is not loaded yet would be an error."""
    outcomes = iter([MemoryError(), None, None])

    def function():
        if (outcome := next(outcomes)) is not None:
            raise outcome

    graph = nc.Graph()
    with pytest.raises(MemoryError):
        graph(function)
    graph(function)
    assert said == []
    graph(function)
    assert said[0] == "cuStreamBeginCapture" and said[-1] == "cuGraphLaunch"
    graph.graph = graph.recorded = None      # the driver of this test has made none


def test_a_recording_leaves_the_garbage_collector_as_it_was(said):
    graph = nc.Graph()
    gc.disable()
    try:
        graph(lambda: None)
        graph(lambda: None)
        assert "cuStreamEndCapture" in said and not gc.isenabled()
    finally:
        gc.enable()
    graph.graph = graph.recorded = None      # the driver of this test has made none


def test_a_full_context_slides(dry):
    decoder, seen = blank(TINY).decoder(), []
    decoder.decode = lambda token, position: (
        seen.append((token, position)) or np.zeros(TINY.vocab_size))
    for token in range(TINY.seq_len + 1):
        decoder.step(token)
    assert seen[TINY.seq_len:] == [(4, 0), (5, 1), (6, 2), (7, 3), (8, 4)]


@ways
@pytest.mark.parametrize("dtype", nc.DTYPES)
def test_a_bad_tensor_is_found_and_named(dtype, naive, dry):
    model = blank(TINY, dtype, naive)
    step(model, 2, 8)
    assert model.first_bad_tensor() == "the loss is not finite"
    for group, name, kind in (("a", "qkv", "activation"), ("d", "att", "gradient of activation"),
                              ("g", "down", "gradient of parameter"), ("p", "wte", "parameter")):
        dry.bad = {getattr(getattr(model, group), name).gpu_data.address}
        said = model.first_bad_tensor()
        assert said.startswith(f"{kind} {name}[") and said.endswith("is nan"), said


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_attention_keeps_its_inputs_until_the_kernels_are_queued(capability, dry, monkeypatch):
    """Tensor maps hold addresses: a matrix that nobody else has must not die before the launch."""
    dry.gpu.compute_capability, alive = capability, []
    T, H, G, D = 64, 2, 1, 64
    new = lambda *shape, dtype=np.uint16: nc.new(shape, dtype)
    monkeypatch.setattr(nc, "launch", lambda *_, **__: alive.append([ref() for ref in inputs]))
    o, lse, angles = new(T, H * D), new(H, T, dtype=np.float32), new(T, D // 2, dtype=np.float32)
    given = [new(T, (H + 2 * G) * D)]
    inputs = [weakref.ref(x) for x in given]
    ops = nc.make_ops()
    ops.attention_forward(o, lse, given.pop(), T, D)
    given = [new(T, H * D), new(T, H * D), new(T, (H + 2 * G) * D)]
    inputs = [weakref.ref(x) for x in given]
    ops.attention_backward(new(T, (H + 2 * G) * D), new(H, T, dtype=np.float32), given.pop(0),
                           given.pop(0), lse, given.pop(0), angles, angles, T, D)
    assert [len(x) for x in alive] == [1, 3, 3] and all(x is not None for y in alive for x in y)


def test_the_host_waits_for_what_it_reads(dry, monkeypatch):
    """A copy between the device and memory that is not pinned may come back before it is done."""
    read, said = nc.DeviceNDArray.copy_to_host, []
    monkeypatch.setattr(nc.gpu.stream, "synchronize", lambda: said.append("waits"))
    monkeypatch.setattr(nc.DeviceNDArray, "copy_to_host",
                        lambda x, **rest: said.append("reads") or read(x, **rest))
    model, ids = blank(TINY), np.zeros((2, 8), np.int32)
    for function in (lambda: step(model, 2, 8), lambda: model.losses(ids, ids), model.buffers,
                     model.first_bad_tensor, lambda: model.decoder().decode(0, 0)):
        said.clear()
        function()
        followed = [said[i + 1:i + 2] for i, what in enumerate(said) if what == "reads"]
        assert followed and all(x == ["waits"] for x in followed), said


def test_what_is_copied_lives_until_the_host_waits(dry, monkeypatch):
    """The driver may read it until then."""
    copy, sources = nc.DeviceNDArray.copy_to_device, []

    def copied(to, x, stream=0):
        sources.append(weakref.ref(x))
        copy(to, x, stream)

    def synchronize():
        assert all(source() is not None for source in sources)
        sources.clear()

    monkeypatch.setattr(nc.DeviceNDArray, "copy_to_device", copied)
    monkeypatch.setattr(nc.gpu.stream, "synchronize", synchronize)
    model = blank(TINY)
    decoder = model.decoder()
    step(model, 2, 8)
    assert len(sources) == 1                 # results, set to zero
    step(model, 2, 8)
    decoder.decode(0, 0)


@cuda.jit
def fill_kernel(x, number):
    x[cuda.grid(1)] = number


@pytest.mark.parametrize("fault", [
    lambda x, w, out: nc.matmul(x, x, w), lambda x, w, out: nc.matmul(out, w, w),
    lambda x, w, out: nc.matmul(out, x, nc.transposed(w)),
    lambda x, w, out: nc.launch(fill_kernel, x, np.float32(0), grid=(1, 65536), block=256),
    lambda x, w, out: nc.launch(fill_kernel, x, np.float32(0), grid=0, block=256),
    lambda x, w, out: nc.launch(fill_kernel, x, np.float32(0), grid=1, block=(256, 8)),
    lambda x, w, out: nc.launch(fill_kernel, nc.view(x, 1, (5, 7)), np.float32(0), grid=1,
                                block=256),
    lambda x, w, out: nc.view(x, 36, (1,)),
    lambda x, w, out: nc.swiglu_forward(out, x), lambda x, w, out: nc.matvec(x[0], w, x[0])])
def test_faulty_launches_are_caught(fault, dry):
    x, w, out = (nc.new(shape, np.float32) for shape in ((5, 7), (9, 7), (5, 9)))
    nc.matmul(out, x, w)
    nc.launch(fill_kernel, x, np.float32(0), grid=1, block=256)
    with pytest.raises(AssertionError):
        fault(x, w, out)


def test_heads_without_a_weight_are_left_out(dry):
    """Neither computed nor updated; a head between two others is computed."""
    V, P = SMALL.vocab_size, SMALL.n_mtp
    for weight, outputs in (((1, 0, 0, 0), 1), ((1, 0, 1, 0), 3), ((1, 1, 1, 1), 4)):
        model = blank(SMALL)
        dry.launches.clear()
        model.gradient(np.zeros((2, 64), np.int32), np.zeros((P, 2, 64), np.int32),
                       np.array(weight, float))
        [entropy] = [x for x in dry.launches if x.name == "cross_entropy_kernel_fused"]
        assert entropy.args[1].shape[1] == outputs * V
        dry.launches.clear()
        model.update(ne.Hyper(*np.ones(8)))
        updates = [x.args for x in dry.launches if x.name == "adamw_kernel_update"]
        lm_heads = sum(bool(w) for w in weight)
        off = (P - lm_heads) * V * SMALL.n_embd
        assert sum(p.size for p, *_ in updates) == ne.n_params(SMALL) - off
        assert all(0 <= args[5] <= args[0].size for args in updates)


def test_padding_is_no_token(dry):
    """Missing sequences have no rows in the gradient of the embedding."""
    model = blank(SMALL)
    model.prepare(3, 8)
    model.stage(np.ones((2, 8), np.int32), np.ones((SMALL.n_mtp, 2, 8), np.int32), 0.0)
    tokens = model.staged.reshape(-1, 3, 8)[0]
    assert (tokens[:2] == 1).all() and (tokens[2] == -1).all()


def set_by(launches, g):
    """The parts of g that products set, (first address, end)."""
    first, end = extent(g)
    return [extent(x.args[0]) for x in launches
            if x.name == "matmul_kernel" and not x.args[3] and first <= extent(x.args[0])[0] < end]


@pytest.mark.parametrize("name", ["small", "tied", "one head", "tied, in chunks"])
@pytest.mark.parametrize("hyper", [{}, dict(muon_lr=0.02, momentum=0.9, newton_schulz=2.0)])
def test_the_first_gradient_after_an_update_sets_all_of_it(hyper, name, dry, monkeypatch):
    """Also after a failed one, whose NaNs stay for first_bad_tensor until then.  Each number is
    set once, by a product or by zeros; the next micro-batch only adds."""
    cfg, B, T = RUNS[name]
    model, hyper = blank(cfg), ne.Hyper(*np.ones(8), **hyper)
    first, end = extent(model.g_flat)

    def update(norm):
        with monkeypatch.context() as patch:
            patch.setattr(nc, "to_host", lambda x: np.full(x.shape, norm))
            model.update(hyper)
    for norm, heads in ((1.0, cfg.n_mtp), (math.nan, 1), (1.0, cfg.n_mtp)):
        update(norm)
        weight = np.zeros(cfg.n_mtp)
        weight[:heads] = 1
        for micro_batch in range(2):
            dry.cleared.clear()
            dry.launches.clear()
            model.gradient(np.ones((B, T), np.int32), np.ones((cfg.n_mtp, B, T), np.int32), weight)
            cleared = [(x, x + n) for x, n in dry.cleared if first <= x < end]
            parts = sorted([*cleared, *set_by(dry.launches, model.g_flat)])
            if micro_batch:
                assert parts == []
            else:
                assert [x for x, _ in parts] + [end] == [first] + [x for _, x in parts]


def test_an_update_without_a_gradient_has_zeros(dry):
    model = blank(SMALL)
    for _ in range(2):
        dry.cleared.clear()
        model.update(ne.Hyper(*np.ones(8)))
        assert dry.cleared == [(model.g_flat.gpu_data.address, model.g_flat.nbytes)]


def test_the_host_waits_for_the_last_copy_of_tokens_only(dry, monkeypatch):
    """So it can prepare a micro-batch while the device computes the one before."""
    model, said = blank(SMALL), []
    model.prepare(2, 8)
    staged = lambda: model.stage(np.full((2, 8), 7, np.int32),
                                 np.ones((SMALL.n_mtp, 2, 8), np.int32), 0.0)
    monkeypatch.setattr(nc.gpu.stream, "synchronize", lambda: said.append("waits for all"))
    monkeypatch.setattr(nc.DeviceNDArray, "copy_to_device", lambda *_, **__: said.append("copy"))
    model.staged_read = SimpleNamespace(
        synchronize=lambda: said.append(f"waits, {(model.staged == 7).any()}"),
        record=lambda stream: said.append("records"))
    staged()
    assert said == ["waits, False", "copy", "copy", "records"]


def test_a_decoder_keeps_few_graphs(dry, monkeypatch):
    """Those that were used last."""
    monkeypatch.setattr(steps, "MOST_GRAPHS", 3)
    decoder = nc.make_decoder(SMALL, np.zeros(ne.n_params(SMALL), np.float32), "bf16", slots=16)
    for n in (1, 2, 4, 8, 1, 16, 1):
        decoder.steps.compute([0] * n, [*range(n)], [0] * n, [0])
        assert len(decoder.steps.graphs) <= 3
    assert {kind.rows for kind in decoder.steps.graphs} == {1, 8, 16}


def address(x):
    return x.gpu_data.address


# The ops that each kernel of a step of rows computes, and the weights that it is given for them
FUSED = {"product_kernels_qkv": lambda q, kc, vc, x, gain, w, bias, *_: [
             ("norm", address(gain)), ("matmul", address(w)), ("bias", address(bias))],
         "norm_and_rotate_kernel_norm_and_rotate": lambda q, kc, q_gain, k_gain, *_: [
             ("norms of heads", address(q_gain), address(k_gain))],
         "attend_kernel_attend": lambda o, ml, q, kc, vc, *_: [("attention", address(kc))],
         "product_kernels_proj": lambda x, o, ml, w, rows: [("matmul", address(w)), ("step",)],
         "merge_kernel_merge": lambda att, *_: [],
         "product_kernels_gate_up": lambda y, x, gain, w, *_: [
             ("norm", address(gain)), ("matmul", address(w)), ("swiglu",)],
         "add_product_kernel_add_product": lambda x, y, w, rows: [
             ("matmul", address(w)), ("step",)],
         "product_kernels_logits": lambda out, x, gain, *_: [("norm", address(gain))],
         "take_kernel_take": lambda *_: []}


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_kernels_of_rows_are_the_ops_of_the_layers(qk_norm, rows, dry, monkeypatch):
    """In the same order, with the same weights.  Prompts runs the layers op by op."""
    dry.gpu.compute_capability, T = (9, 0), BIASED.seq_len
    cfg = replace(BIASED, n_layer=2, qk_norm=qk_norm)
    decoder = nc.make_decoder(cfg, np.zeros(ne.n_params(cfg), np.float32), "bf16")
    steps_, done = decoder.steps, []
    dry.launches.clear()
    steps_.compute([0] * rows, [0] * rows, [*range(rows)], [0])
    fused = [op for x in dry.launches for op in FUSED[x.name](*x.args)]

    note = lambda *what: done.append(what)
    norm = lambda y, saved, rstd, x, gain, eps: note("norm", address(gain))
    for name, op in (("rmsnorm_forward", norm),
                     ("residual_rmsnorm_forward", lambda *args: (note("step"), norm(*args))),
                     ("add_bias", lambda qkv, bias: note("bias", address(bias))),
                     ("head_norm_forward", lambda qkv, qk, rstd, q_gain, k_gain, eps: note(
                         "norms of heads", address(q_gain), address(k_gain))),
                     ("swiglu_forward", lambda y, gate_up: note("swiglu"))):
        monkeypatch.setattr(nc, name, op)
    ops = SimpleNamespace(matmul=lambda out, x, w: note("matmul", address(w)))
    prompts = Prompts(steps_, T, ops)
    prompts.rotate_and_attend = lambda l, b: note("attention", address(steps_.kc[l]))
    prompts.queue(T)
    assert done == fused and len(done) == 2 * (11 + qk_norm) + 1


@pytest.mark.parametrize("H, G, heads", [(12, 4, 3), (8, 1, 4), (14, 2, 7), (5, 1, 5), (9, 9, 1),
                                         (22, 2, 1), (16, 2, 4)])
def test_heads_that_share_keys_share_a_block(H, G, heads):
    assert heads_per_block(H, G) == heads


# ---- without nanoeuler_parts/decode or tensor_cores
def test_the_program_runs_without_the_fast_decoder(dry, monkeypatch, capsys):
    """Products still take tensor cores, and the decoder is that of the program's own file."""
    monkeypatch.setitem(sys.modules, "nanoeuler_parts.decode", None)
    nc.fast_decoder.cache_clear()
    try:
        dry.gpu.compute_capability = (9, 0)
        everything(SMALL, 2, 64, "bf16")
        decoder = nc.make_decoder(SMALL, np.zeros(ne.n_params(SMALL), np.float32), "")
        assert decoder.kept_as == "f32" and not decoder.rows_are_cheap
        modules = {x.kernel.py_func.__module__.removeprefix("nanoeuler_parts.").split(".")[0]
                   for x in dry.launches}
        assert modules == {"nanoeuler_cuda", "tensor_cores"}
        assert {"one_tile_matmul"} == {*all_cases(quick=True)} & {"one_tile_matmul", "rows"}
        assert capsys.readouterr().err.count("decode is missing, so") == 1
    finally:
        nc.fast_decoder.cache_clear()


def test_the_program_runs_without_the_tensor_cores(dry, monkeypatch, capsys):
    """It then launches the kernels of its own file alone, and says so once."""
    monkeypatch.setitem(sys.modules, "nanoeuler_parts.tensor_cores", None)
    nc.tensor_cores.cache_clear()
    try:
        dry.gpu.compute_capability = (9, 0)
        everything(SMALL, 2, 64, "bf16")
        everything(LLAMA, 2, 64, "bf16")
        decoder = nc.make_decoder(SMALL, np.zeros(ne.n_params(SMALL), np.float32), "")
        assert decoder.kept_as == "f32" and not decoder.rows_are_cheap
        assert {x.kernel.py_func.__module__ for x in dry.launches} == {"nanoeuler_cuda"}
        assert all_cases(quick=True)
        assert capsys.readouterr().err.count("tensor_cores is missing, so") == 1
    finally:
        nc.tensor_cores.cache_clear()
