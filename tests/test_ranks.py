"""Several processes train like one: shares, order, agreement, and what happens when one is gone.

The engine is the CPU's, in float64 (tests/oracles/cpu_ranks.py); on GPUs NCCL takes the place of
its sockets."""
import contextlib
import importlib.util
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ROOT, TINY, may_stay_idle, warm_command
from servers import until
from hypothesis import given
from hypothesis import strategies as st

import nanoeuler as ne

if importlib.util.find_spec("numba_cuda") is None:
    pytest.skip("numba-cuda is not installed", allow_module_level=True)

import nanoeuler_cuda as nc
from nanoeuler_parts.files.logs import read_log
from nanoeuler_parts.gpu import place
from nanoeuler_parts.ranks import engine, processes, sockets
from nanoeuler_parts.tools import on_gpu
from oracles.cpu_ranks import Wide
from nanoeuler_parts.checkpoint.file import Checkpoint

pytestmark = pytest.mark.cli
PROGRAM = "tests/oracles/cpu_ranks.py"
STEPS = ["--optimizer", "adamw", "--dtype", "f32", "--steps", "6", "--batch", "240",
         "--seq-len", "16", "--n-layer", "1", "--n-embd", "16", "--n-head", "2",
         "--n-kv-head", "1", "--head-dim", "8", "--n-hidden", "24", "--vocab-size", "270",
         "--eval-every", "3", "--save-every", "2", "--warmup", "1", "--threads", "1",
         "--mtp-until", "0.5"]               # in the last three steps, head 0 alone


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "text.txt"
    path.write_bytes((ROOT / "data/shakespeare.txt").read_bytes()[:30_000])
    return path


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as s:
        return s.getsockname()[1]


def start(size, *args, cwd, **env):
    port = free_port()
    return [subprocess.Popen(
        warm_command(rank, size, port, *args, program=PROGRAM,
                     modules=("nanoeuler", "nanoeuler_cuda")), cwd=cwd,
        env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(size)]


def end(processes, timeout=240):
    """[(exit code, stdout, stderr)]"""
    try:
        return [(p.returncode, out, err) for p in processes
                for out, err in [p.communicate(timeout=timeout)]]
    finally:
        for p in processes:
            p.kill()


def losses_of(log):
    return [r["loss"] for r in read_log(str(log)) if "loss" in r]


def train(folder, text, size, *more):
    folder.mkdir(exist_ok=True)
    found = end(start(size, "train", "--data", text, "--out", "a.bin", *STEPS, *more, cwd=folder))
    assert [code for code, _, _ in found] == [0] * size, found
    assert not any(out for _, out, _ in found[1:]), "only the first one speaks"
    return ne.read_checkpoint(str(folder / "a.bin")), losses_of(folder / "a.jsonl"), found[0][1]


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory):
    return train(tmp_path_factory.mktemp("one"), text, 1)


@pytest.fixture(scope="module")
def two(text, tmp_path_factory):
    """The folder of a run of two ranks, which keeps its best model"""
    folder = tmp_path_factory.mktemp("two")
    train(folder, text, 2, "--keep-best")
    return folder


# ---- as one
@pytest.mark.parametrize("size", [2, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_several_ranks_train_like_one(size, alone, two, text, tmp_path):
    """Within the rounding of other sums: in float64 what is measured, in float32 what is kept.
    Fifteen sequences: no equal shares, and of eight ranks the last has one."""
    one, losses, _ = alone
    folder = two
    if size > 2:
        train(folder := tmp_path, text, size)
    several, found = ne.read_checkpoint(str(folder / "a.bin")), losses_of(folder / "a.jsonl")
    assert np.abs(np.array(found) / losses - 1).max() < 1e-12 and len(found) == 6
    assert several.state.step == 6
    for x, y in zip((several.flat, *several.moments), (one.flat, *one.moments)):
        assert np.abs(x - y).max() <= 2.0 ** -23 * np.abs(y).max()
    log = [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()]
    assert [r["val_bits_per_byte"] for r in log if "val_bits_per_byte" in r]


def test_several_ranks_keep_the_best_model(alone, two):
    """All agree which it is, and give what is theirs; the first one writes it."""
    kept = ne.read_checkpoint(str(two / "a_best.bin"))
    one, _, _ = alone                        # whose validations fall
    assert kept.state.best_step == kept.state.step == 6 and kept.moments == ()
    assert np.abs(kept.flat - one.flat).max() <= 2.0 ** -23 * np.abs(one.flat).max()


def test_two_runs_of_two_ranks_are_the_same_bytes(two, text, tmp_path):
    train(tmp_path, text, 2)
    a, b = (ne.read_checkpoint(str(folder / "a.bin")) for folder in (two, tmp_path))
    assert all(np.array_equal(x, y) for x, y in zip((a.flat, *a.moments), (b.flat, *b.moments)))


def test_a_run_goes_on_with_another_number_of_ranks(alone, text, tmp_path):
    one, losses, _ = alone
    train(tmp_path / "x", text, 2, "--steps", 4)
    processes = start(3, "train", "--resume", "--out", "a.bin", "--steps", 6, cwd=tmp_path / "x")
    assert [code for code, _, _ in end(processes)] == [0] * 3
    found = losses_of(tmp_path / "x/a.jsonl")
    assert len(found) == 6 and ne.read_checkpoint(str(tmp_path / "x/a.bin")).state.step == 6


def test_the_length_by_the_clock_is_the_first_ones(text, tmp_path):
    c, found, said = train(tmp_path / "x", text, 2, "--steps", 0, "--minutes", 0.05)
    assert "is complete" in said and len(found) == c.state.step >= 1


# ---- when one is gone
@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_is_killed_ends_the_run(who, text, tmp_path):
    processes = start(3, "train", "--data", text, "--out", "a.bin", *STEPS, cwd=tmp_path,
                      FAULT=f"3 {who} SIGKILL")
    found = end(processes)                   # though each sign of life may be an hour late
    for rank, (code, _, err) in enumerate(found):
        assert code == (-signal.SIGKILL if rank == who else 1) or (code == 2 and rank != who)
        if rank != who:
            assert f"rank {who} of 3 is gone" in err and "--resume" in err, (rank, err)
            assert "Traceback" not in err
    assert ne.read_checkpoint(str(tmp_path / "a.bin")).state.step == 2       # the last one saved


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_with_an_error_of_its_own_says_it_and_all_end(who, text, tmp_path):
    found = end(start(2, "train", "--data", text, "--out", "a.bin", *STEPS, cwd=tmp_path,
                      FAULT=f"3 {who} ENOSPC"))
    assert "No space left on device" in found[who][2] and found[who][0] == 2
    code, _, err = found[1 - who]
    assert code in (1, 2) and f"rank {who} of 2 is gone" in err
    assert ne.read_checkpoint(str(tmp_path / "a.bin")).state.step == 2


def test_a_rank_that_stands_still_ends_the_run(text, tmp_path):
    processes = start(2, "train", "--data", text, "--out", "a.bin", *STEPS, cwd=tmp_path,
                      FAULT="3 1 SIGSTOP")
    try:
        _, err = processes[0].communicate(timeout=240)
    finally:
        processes[1].kill()
        processes[1].communicate()
    assert processes[0].returncode == 1 and "rank 1 of 2 is gone" in err


def test_a_signal_to_one_stops_all_after_the_same_step(text, tmp_path):
    processes = start(2, "train", "--data", text, "--out", "a.bin", *STEPS, "--steps", 100_000,
                      cwd=tmp_path)
    while not (tmp_path / "a.bin").exists():
        assert all(p.poll() is None for p in processes)
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGTERM)
    found = end(processes)
    assert [code for code, _, _ in found] == [0, 0], found
    s = ne.read_checkpoint(str(tmp_path / "a.bin")).state
    assert f"stopped at step {s.step} of 100000, and saved" in found[0][1]
    assert len(losses_of(tmp_path / "a.jsonl")) == s.step


def test_a_rank_that_does_not_come_is_named():
    port = free_port()
    with pytest.raises(ne.UserError, match=f"rank 1 of 2 did not connect to 127.0.0.1:{port}"):
        sockets.Ranks(place.Place(0, 2, 0, ("127.0.0.1", port)), patience=0.3)
    with pytest.raises(ne.UserError, match="rank 0 does not answer .* MASTER_ADDR"):
        sockets.Ranks(place.Place(1, 2, 1, ("127.0.0.1", port)), patience=0.3)


# ---- sockets
def both(size=2):
    """Ranks of one process, in threads"""
    port, found = free_port(), [None] * size

    def come(rank):
        found[rank] = sockets.Ranks(place.Place(rank, size, rank, ("127.0.0.1", port)))
    threads = [threading.Thread(target=come, args=(rank,), daemon=True) for rank in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(200)
    return found


def in_threads(ranks, call):
    found = [None] * len(ranks)

    def work(i):
        try:
            found[i] = call(ranks[i])
        except ne.UserError as e:
            found[i] = str(e)
    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(ranks))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(200)
    return found


def test_values_come_in_the_order_of_ranks_and_to_the_last_bit():
    ranks = both(3)
    x = [0.1 * (r.rank + 1) / 3 for r in ranks]
    found = in_threads(ranks, lambda r: r.all((x[r.rank], None, "é" * r.rank), "x"))
    assert found == [[[x[0], None, ""], [x[1], None, "é"], [x[2], None, "éé"]]] * 3
    assert in_threads(ranks, lambda r: r.agree(r.rank + 7, "x")) == [7, 7, 7]
    for r in ranks:
        r.close()


def test_ranks_at_two_places_say_so():
    ranks = both()
    said = in_threads(ranks, lambda r: r.all(1, "a step" if r.rank else "a save"))
    assert said[0] == said[1] and "at different places, a save, a step" in said[0]
    for r in ranks:
        r.close()


def test_who_comes_late_is_waited_for(monkeypatch):
    """Longer than anybody may be silent later: nobody is missed before all are there."""
    monkeypatch.setattr(sockets, "SILENCE_SECONDS", 0.2)
    port, found, missed, all_begun = free_port(), [], [], threading.Event()

    @may_stay_idle
    def end_without(self, rank):
        missed.append((self.rank, rank, all_begun.is_set()))
        self.finished.add(rank)

    monkeypatch.setattr(sockets.Ranks, "end_without", end_without)

    def come(rank):
        found.append(sockets.Ranks(place.Place(rank, 3, rank, ("127.0.0.1", port))))
    threads = [threading.Thread(target=come, args=(rank,), daemon=True) for rank in range(3)]
    for t in threads[:2]:
        t.start()
    time.sleep(1.5)
    all_begun.set()
    threads[2].start()
    for t in threads:
        t.join(200)
    assert len(found) == 3 and not [x for x in missed if not x[2]]
    for r in found:
        r.close()


@pytest.mark.parametrize("said, gone, ended", [
    ([b".."], None, False), ([b".e"], None, True), ([b""], 1, False), ([b"g2;"], 2, False),
    ([b".g12;.e"], 12, False), ([b"g2;e"], 2, False), ([b".g1", b"2;."], 12, False),
    ([b"..g", b"1", b"2", b";"], 12, False), ([b"g1", b""], 1, False)])
def test_signs_are_read_whatever_comes_with_them(said, gone, ended, monkeypatch):
    """And in whatever pieces they come"""
    ranks, found = both(), []
    monkeypatch.setattr(sockets.Ranks, "end_without", lambda self, rank: found.append(rank))
    for r in ranks:
        r.close()
    ranks[0].finished.clear()
    pieces = iter(said)
    heard = type("Socket", (), {"recv": lambda self, n: next(pieces)})()
    for _ in said:
        assert not found
        ranks[0].read_heartbeats(1, heard)
    assert found == ([] if gone is None else [gone]) and (1 in ranks[0].finished) == ended
    ranks[0].finished.add(1)


def message(value):
    text = json.dumps(value).encode()
    return len(text).to_bytes(4, "big") + text


def test_who_knocks_and_is_no_rank_is_sent_away():
    port, found = free_port(), []
    first = threading.Thread(daemon=True, target=lambda: found.append(
        sockets.Ranks(place.Place(0, 2, 0, ("127.0.0.1", port)))))
    first.start()
    strangers = [message(x) for x in ({}, 5, "abcd", ["values", 1, 2], [sockets.HELLO, ["a"], 1, 2],
                                      [sockets.HELLO, "values", "1", 2])]
    for junk in (b"GET / HTTP/1.1\r\n\r\n", b"", b"\xff\xff\xff\xff", *strangers):
        for _ in range(1000):
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=60) as s:
                    s.sendall(junk)
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
    other = sockets.Ranks(place.Place(1, 2, 1, ("127.0.0.1", port)))
    first.join(200)
    assert in_threads([*found, other], lambda r: r.all(r.rank, "x")) == [[0, 1]] * 2
    for r in (*found, other):
        r.close()


@pytest.mark.parametrize("answers", [False, True])
def test_a_rank_that_says_hello_and_no_more_is_not_waited_for(answers):
    """Neither at rank 0, nor at a rank that rank 0 does not answer."""
    port = free_port()
    if answers:                              # a rank 0 that accepts, and says nothing
        with socket.create_server(("127.0.0.1", port)), pytest.raises(ne.UserError,
                                                                      match="rank 0 of 2 does not"):
            sockets.Ranks(place.Place(1, 2, 1, ("127.0.0.1", port)), patience=1)
    else:
        held = []

        def knock(kind):
            until(lambda: held.append(s) or True if (s := connected(port)) else False)
            held[-1].sendall(message([sockets.HELLO, kind, 1, 2]))

        others = [threading.Thread(target=knock, args=[kind], daemon=True)
                  for kind in ("values", "watched")]
        for other in others:
            other.start()
        with pytest.raises(ne.UserError, match="rank 1 of 2 does not answer"):
            sockets.Ranks(place.Place(0, 2, 0, ("127.0.0.1", port)), patience=3)
        for other in others:
            other.join(20)
        for s in held:
            s.close()


def connected(port):
    try:
        return socket.create_connection(("127.0.0.1", port), timeout=20)
    except ConnectionRefusedError:           # nobody listens yet
        return None


# ---- shares
@given(st.integers(0, 10_000), st.integers(1, 64))
def test_shares_are_all_there_is_once(n, size):
    for split, unit in (engine.share, 1), (engine.shard, 8):
        found = [split(n, rank, size) for rank in range(size)]
        assert [i for x in found for i in range(x.start, x.stop)] == list(range(n))
        sizes = [x.stop - x.start for x in found]
        assert sizes == sorted(sizes, reverse=True)      # the first one is the largest
        assert all(x.start % unit == 0 or x.start == n for x in found)


@pytest.mark.parametrize("env, expected", [
    ({}, place.Place()),
    (dict(RANK="3", WORLD_SIZE="8", LOCAL_RANK="1", MASTER_ADDR="node7", MASTER_PORT="1234"),
     place.Place(3, 8, 1, ("node7", 1235))),
    (dict(RANK="3", WORLD_SIZE="8"), place.Place()),
    (dict(OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_LOCAL_RANK="1"),
     place.Place(1, 2, 1, ("127.0.0.1", 29501))),
    (dict(SLURM_PROCID="5", SLURM_STEP_NUM_TASKS="6", SLURM_LOCALID="2", MASTER_ADDR="a"),
     place.Place(5, 6, 2, ("a", 29501))),
    # of a batch script, which is no step: one process
    (dict(SLURM_PROCID="0", SLURM_NTASKS="8", SLURM_LOCALID="0"), place.Place())])
def test_what_launchers_say(env, expected):
    assert place.place_of(env) == expected


@pytest.mark.parametrize("local, seen, own", [
    (0, None, "0"), (3, None, "3"), (1, "4,6", "6"), (1, "5", "5"), (1, "GPU-a,GPU-b", "GPU-b"),
    (0, "", ""), (2, "4,6", "4,6")])         # none for this one, which the run refuses
def test_a_process_sees_one_gpu(local, seen, own):
    env = {} if seen is None else {"CUDA_VISIBLE_DEVICES": seen}
    assert place.visible(place.Place(local, 8, local), env) == own


def test_an_import_changes_no_environment():
    """Also of one rank of several: a program takes its GPU when it starts."""
    code = ("import os; before = dict(os.environ); import nanoeuler_cuda\n"
            "assert dict(os.environ) == before, 'changed'\n"
            "from nanoeuler_parts.gpu.place import take_own_gpu; take_own_gpu()\n"
            "print(os.environ['CUDA_VISIBLE_DEVICES'])")
    env = dict(os.environ, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", CUDA_VISIBLE_DEVICES="4,6")
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True,
                            text=True, timeout=100)
    assert (result.stdout, result.returncode) == ("6\n", 0), result.stderr


def test_notes_of_other_ranks_are_not_repeated():
    import io
    out = io.StringIO()
    notes = processes.RankErrors(3, out)
    print("note: the same for all\nnanoeuler: what", "went wrong", file=notes)
    assert out.getvalue() == "rank 3: nanoeuler: what went wrong\n"


def test_gradients_of_shares_are_that_of_the_batch():
    """Weights of a batch do not depend on who has which row, nor losses."""
    cfg = replace(TINY, n_mtp=2)
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, cfg.vocab_size, (7, cfg.seq_len)).astype(np.int32)
    targets = rng.integers(-1, cfg.vocab_size, (2, 7, cfg.seq_len)).astype(np.int32)
    weight = rng.random((7, 2))
    model = Wide(cfg, ne.init_params(cfg, 1))
    model.gradient(tokens, targets, weight)
    want, total = model.g_flat.copy(), 0
    for rank in range(3):
        mine = engine.share(7, rank, 3)
        model.g_flat[:] = 0
        model.gradient(tokens[mine], targets[:, mine], weight[mine])
        total = total + model.g_flat
    assert np.abs(total - want).max() < 1e-13 * np.abs(want).max()


# ---- the GPU engine, on a device that computes nothing
@pytest.mark.usefixtures("old_objects_are_no_garbage")
@pytest.mark.parametrize("dtype, size, piece", [
    ("bf16", 2, engine.PIECE), ("bf16", 3, 1 << 10), ("bf16", 64, 1 << 10), ("f32", 3, 1 << 10),
    ("f64", 3, 1 << 10)])
def test_what_one_rank_sends_another_receives(dtype, size, piece, dry, monkeypatch):
    from dry_gpu import rank_of
    monkeypatch.setattr(engine, "PIECE", piece)
    cfg = replace(ne.PRESETS["small"], n_layer=1, vocab_size=300, seq_len=32)
    flat, n = np.zeros(ne.n_params(cfg), np.float32), ne.n_params(cfg)
    tokens = np.zeros((5, 32), np.int32)
    seen, owned = [], 0
    for rank in sorted({0, 1, size - 1}):
        model = rank_of(rank, size, cfg, flat, (flat, flat), dtype=dtype)
        own = model.owned(n)
        assert model.m.size == model.v.size == own.stop - own.start
        owned += own.stop - own.start
        model.gradient(tokens, np.zeros((cfg.n_mtp, *tokens.shape), np.int32), np.ones(cfg.n_mtp))
        ce, norm = model.update(ne.hyper_at(1, 1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1,
                                            clip=1.0))
        assert ce.shape == (cfg.n_mtp,)
        named = [x.name for x in dry.launches]
        assert named.count("add_in_order_kernel") == -(-(own.stop - own.start) // piece)
        dry.launches.clear()
        flats = model.buffers()
        assert all(x is None for x in flats) if rank else [x.size for x in flats] == [n] * 3
        seen.append((rank, model.links.sizes))
        assert model.micro_batch(6) % size == 0
    assert owned == n or size == 64          # of which not all were asked
    (_, first), *others = seen
    for rank, sizes in others:
        assert len(sizes) == len(first)
        for (sent0, received0), (sent, received) in zip(first, sizes):
            assert (sent0[rank], received0[rank]) == (received[0], sent[0])


def test_a_rank_without_sequences_has_zeros_to_add(dry):
    """All ranks' gradients are added, also those of a rank that has computed none."""
    from dry_gpu import rank_of
    cfg = replace(ne.PRESETS["small"], n_layer=1, vocab_size=300, seq_len=32)
    flat = np.zeros(ne.n_params(cfg), np.float32)
    for rank in range(2):
        model = rank_of(rank, 2, cfg, flat)
        model.gradient(np.zeros((1, 32), np.int32), np.zeros((cfg.n_mtp, 1, 32), np.int32),
                       np.ones(cfg.n_mtp))
        dry.cleared.clear()
        model.begin_update()
        g = model.g_flat.gpu_data
        assert dry.cleared == ([(g.address, g.size)] if rank else [])


def test_muon_needs_shards_that_were_made_for_it(dry):
    from dry_gpu import rank_of
    cfg = ne.PRESETS["small"]
    model = rank_of(0, 2, cfg, np.zeros(ne.n_params(cfg), np.float32))
    with pytest.raises(ne.UserError, match="cut Muon's matrices"):
        model.update(ne.Hyper(*np.ones(8), muon_lr=0.02, momentum=0.9, newton_schulz=2.0))


def test_muon_on_several_gpus_needs_sizes_of_whole_vectors():
    odd = replace(ne.PRESETS["small"], n_hidden=343, n_embd=129)
    for cfg, optimizer, fails in ((odd, "adamw", False), (ne.PRESETS["base"], "muon", False),
                                  (ne.PRESETS["small"], "muon", False), (odd, "muon", True)):
        with (pytest.raises(ne.UserError, match="multiples of 8.*--optimizer adamw") if fails
              else contextlib.nullcontext()):
            processes.need_whole_vectors(SimpleNamespace(optimizer=optimizer), cfg)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_muon_has_whole_matrices_on_every_rank(size, dry):
    from dry_gpu import MUON, rank_of
    cfg = replace(ne.PRESETS["small"], vocab_size=300, seq_len=32)
    n, starts = ne.n_params(cfg), ne.muon_matrices(cfg)[:, 0].tolist()
    options = SimpleNamespace(dtype="bf16", matmul="wgmma", recompute=False, optimizer="muon")
    ends, updated, exchanged = [0], 0, []
    for rank in range(size):
        model = rank_of(rank, size, cfg, np.zeros(n, np.float32), options=options)
        own = model.owned(n)
        assert own.start == ends[-1] and model.m.size == own.stop - own.start > 0
        ends.append(own.stop)
        dry.launches.clear()
        model.update(MUON)
        exchanged.append(model.links.sizes)
        named = [x for x in dry.launches if x.name == "nesterov_kernel_nesterov"]
        updated += sum(x.args[4].size for x in named)    # starts: matrices of a group
        assert all(x.args[2].size == own.stop - own.start for x in named)
    part = ne.muon_slice(cfg)
    assert ends[-1] == n and updated == len(starts)
    assert all(x in starts or not part.start < x < part.stop for x in ends)
    assert max(np.diff(ends)) < 2 * n / size             # nobody has much more than the others
    for rank, sizes in enumerate(exchanged):
        for (sent0, received0), (sent, received) in zip(exchanged[0], sizes, strict=True):
            assert (sent0[rank], received0[rank]) == (received[0], sent[0])


@pytest.mark.parametrize("before, noted", [({}, False), ({"lr": 1.0}, True), ({"gpus": 1}, True),
                                           ({"gpus": 4}, False)])
def test_a_run_that_had_other_gpus_says_so_and_looks_for_room_anew(before, noted, monkeypatch,
                                                                  capsys):
    class Parent:
        def __init__(self, out, start, options, engine):
            self.start = start

    monkeypatch.setattr(on_gpu, "PLACE", place.Place(0, 4))
    run = type("Run", (on_gpu.CountsGpus, Parent), {})
    start = Checkpoint(TINY, None, ne.State(options=before, micro_batch=8), None, ())
    options = on_gpu.Run.Options()
    made = run("a.bin", start, options, None)
    assert options.gpus == 4 and (made.start.state.micro_batch is None) == noted
    assert ("a.bin was trained on 1 GPU, and continues on 4" in capsys.readouterr().err) == noted


def test_gpus_starts_a_process_for_each(tmp_path, monkeypatch):
    script = tmp_path / "started.py"
    script.write_text("import os, sys\nrank = os.environ['RANK']\n"
                      "names = 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR'\n"
                      "words = [os.environ[x] for x in names]\n"
                      "open(f'{sys.argv[1]}/{rank}', 'w').write(' '.join(words))\n"
                      "sys.exit(3 if rank == sys.argv[2] else 0)\n", encoding="utf-8")
    for fails, code in ("1", 3), ("none", 0):
        monkeypatch.setattr(processes, "gpus_here", lambda: 3)
        monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path), fails])
        assert processes.start_ranks(3) == code
        assert [(tmp_path / str(r)).read_text() for r in range(3)] == [
            f"{r} 3 127.0.0.1" for r in range(3)]
    with pytest.raises(ne.UserError, match="--gpus is 4, but this machine has 3 GPUs"):
        processes.start_ranks(4)


def test_a_rank_of_another_number_of_ranks_is_named():
    port = free_port()

    def knock():
        until(lambda: try_to_send(port, [sockets.HELLO, "values", 1, 3]))

    other = threading.Thread(target=knock, daemon=True)
    other.start()
    with pytest.raises(ne.UserError, match="rank 1 was started as one of 3 ranks, expected 2"):
        sockets.Ranks(place.Place(0, 2, 0, ("127.0.0.1", port)))
    other.join(200)


def try_to_send(port, value):
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=200) as s:
            s.sendall(message(value))
        return True
    except ConnectionRefusedError:           # nobody listens yet
        return False


# a rank: it names its process, and then does what its number is told to
RANK = """
import os, pathlib, signal, sys, time
rank, folder = os.environ["RANK"], pathlib.Path(sys.argv[1])
for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
    signal.signal(number, lambda number, _: sys.exit(20 + number))
(folder / f"{rank}.tmp").write_text(str(os.getpid()))
(folder / f"{rank}.tmp").rename(folder / f"{rank}.pid")
if sys.argv[2 + int(rank)] == "fails":
    sys.exit(3)
time.sleep(60)
sys.exit(77)
"""


@pytest.fixture
def ranks_of_this_machine(tmp_path, monkeypatch):
    """start(does, ..., code=...): start_ranks of as many, each of which fails or waits; and pids()
    of them"""
    monkeypatch.setattr(processes, "gpus_here", lambda: 8)

    def pids():
        return [int(path.read_text()) for path in sorted(tmp_path.glob("*.pid"))]

    def kill(*_):                            # where a signal is not passed on
        for pid in pids():
            if os.path.exists(f"/proc/{pid}"):
                os.kill(pid, signal.SIGKILL)

    before = {n: signal.signal(n, kill) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def start(*does, code=RANK):
        (tmp_path / "rank.py").write_text(code, encoding="utf-8")
        monkeypatch.setattr(sys, "argv", [str(tmp_path / "rank.py"), str(tmp_path), *does])
        return processes.start_ranks(len(does))

    yield start, pids
    left = [pid for pid in pids() if os.path.exists(f"/proc/{pid}")]
    kill()
    kept = [signal.signal(number, handler) for number, handler in before.items()]
    assert not left, "some ranks are left"
    assert kept == [kill] * 3, "start_ranks left handlers of its own"


MEETING = """
import os, socket, sys
sys.path.insert(0, {root!r})
from nanoeuler_parts.gpu.place import PLACE
from nanoeuler_parts.ranks import processes
from nanoeuler_parts.ranks.sockets import LISTENER, Ranks
processes.gpus_here = lambda: 3
if processes.STARTED not in os.environ:
    sys.exit(processes.start_ranks(3))
assert (LISTENER in os.environ) == (PLACE.rank == 0)
if PLACE.rank == 0:
    try:
        socket.create_server(PLACE.address)
        sys.exit("the port is free for other programs")
    except OSError:
        pass
ranks = Ranks(PLACE)
assert LISTENER not in os.environ and ranks.all(PLACE.rank, "here") == [0, 1, 2]
ranks.close()
"""


def test_started_ranks_meet_at_a_port_that_is_theirs_from_the_start(tmp_path):
    program = tmp_path / "starter.py"
    program.write_text(MEETING.format(root=str(ROOT)), encoding="utf-8")
    run = subprocess.run([sys.executable, str(program)], capture_output=True, text=True,
                         timeout=200)
    assert run.returncode == 0, run.stderr


STARTER = """
import os, sys
sys.path.insert(0, {root!r})
from nanoeuler_parts.ranks import processes
processes.gpus_here = lambda: 2
if processes.STARTED in os.environ:          # one of the two
    processes.end_with_starter()
    import pathlib, time
    pathlib.Path({folder!r}, os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(300)
processes.start_ranks(2)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self"), reason="looks for processes in /proc")
def test_ranks_end_with_the_process_that_started_them(tmp_path):
    """Even if that one is killed, and can pass nothing on."""
    program, folder = tmp_path / "starter.py", tmp_path / "pids"
    folder.mkdir()
    program.write_text(STARTER.format(root=str(ROOT), folder=str(folder)), encoding="utf-8")
    starter = subprocess.Popen([sys.executable, str(program)])
    until(lambda: len([x for x in folder.glob("*") if x.read_text()]) == 2)
    starter.kill()
    starter.wait(20)
    pids = [x.read_text() for x in folder.glob("*")]
    until(lambda: not any(is_running(pid) for pid in pids))


def is_running(pid):
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"     # a zombie has ended


def test_where_one_rank_fails_the_others_are_killed_after_a_while(ranks_of_this_machine,
                                                                  monkeypatch):
    start, pids = ranks_of_this_machine
    monkeypatch.setattr(processes, "GRACE", 0.2)
    assert start("waits", "fails", "waits") in (3, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_to_all_ranks(number, ranks_of_this_machine):
    start, pids = ranks_of_this_machine

    def send():
        until(lambda: len(pids()) == 2)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    assert start("waits", "waits") == 20 + number
    sender.join(200)


def test_under_nohup_a_closed_terminal_ends_no_rank(ranks_of_this_machine, monkeypatch):
    """The starter and the ranks ignore SIGHUP; a later SIGTERM ends them."""
    start, pids = ranks_of_this_machine
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    handler = "for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:"
    assert handler in RANK                   # a rank of this test has none of its own for SIGHUP
    code = RANK.replace(handler, "for number in signal.SIGINT, signal.SIGTERM:")

    def send():
        until(lambda: len(pids()) == 2)
        for pid in (os.getpid(), *pids()):
            os.kill(pid, signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)             # which is passed on to each rank once

    sender = threading.Thread(target=send, daemon=True)
    try:
        sender.start()
        assert start("waits", "waits", code=code) == 20 + signal.SIGTERM
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        sender.join(200)
        signal.signal(signal.SIGHUP, before)


def test_where_one_rank_cannot_be_started_the_others_end(ranks_of_this_machine, monkeypatch):
    start, pids = ranks_of_this_machine
    started, popen = [], subprocess.Popen

    def limited(*args, **options):
        if len(started) == 2:
            until(lambda: len(pids()) == 2)
            raise OSError(11, "Resource temporarily unavailable")
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", limited)
    with pytest.raises(OSError, match="temporarily unavailable"):
        start("waits", "waits", "waits")
    assert [process.wait(200) for process in started] == [-signal.SIGKILL] * 2


class Ended(BaseException):
    """What os._exit raises in a test of launch_ranks; args[0] is the exit code."""


class FakeRanks:
    """The ranks and the NCCL communicator of launch_ranks: both write down how they are used."""

    def __init__(self, place):
        self.rank, self.calls = place.rank, []

    def all(self, value, where):
        self.calls.append(where)

    def close(self):
        self.calls.append("close")


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Runs launch_ranks as this rank of two: (exit code, what the ranks did, was there a lock).
    `run` stands in for the training run."""
    def exits(code):
        raise Ended(code)

    def launch_as(rank, run=lambda: None, devices=None):
        made, locks = [], []

        def ranks_of(place):
            made.append(FakeRanks(place))
            return made[-1]

        def fake_launch(of_run, model, *, lock, out):
            assert model is engine.RankedModel and of_run is made[0]
            with lock(out) as problem:
                locks.append((tmp_path / ".a.bin.lock").exists())
                assert problem == ""
                run()

        for name in "stdout", "stderr":      # launch_ranks replaces them
            monkeypatch.setattr(sys, name, getattr(sys, name))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(rank) if devices is None else devices)
        monkeypatch.setattr(processes, "PLACE", place.Place(rank, 2, rank))
        monkeypatch.setattr(processes, "Ranks", ranks_of)
        monkeypatch.setattr(processes, "Links", lambda ranks: ranks)
        monkeypatch.setattr(processes, "ranked_run", lambda run, ranks: ranks)
        monkeypatch.setattr(processes, "open_device", lambda: None)
        monkeypatch.setattr(engine.RankedModel, "ranks", None, raising=False)
        monkeypatch.setattr(engine.RankedModel, "links", None)
        monkeypatch.setattr("nanoeuler_parts.runs.start.launch", fake_launch)
        monkeypatch.setattr(os, "_exit", exits)
        try:
            code = processes.launch_ranks(None, {"out": str(tmp_path / "a.bin")})
        except Ended as end:
            [code] = end.args
        return code, made[0].calls if made else [], locks
    return launch_as


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_locks_the_checkpoint(rank, launched, capsys):
    """And only rank 0 prints."""
    code, calls, locks = launched(rank, lambda: print("step 1"))
    assert (code, locks) == (0, [rank == 0])
    assert calls == ["the end", "close", "close"]        # of the links and of the ranks
    assert capsys.readouterr().out == ("" if rank else "step 1\n")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("error, code, words", [
    (KeyboardInterrupt(), 130, []), (ne.UserError("no such data"), 2, ["nanoeuler: no such data"]),
    (MemoryError("2 GiB"), 2, ["nanoeuler: ", "2 GiB"]),
    (OSError(28, "No space left", "a.bin"), 2, ["nanoeuler: a.bin: No space left"]),
    (ZeroDivisionError("a bug"), 1, ["Traceback", "ZeroDivisionError: a bug"])])
def test_a_rank_that_fails_ends_at_once_with_an_exit_code(rank, error, code, words, launched,
                                                          capsys):
    """Without waiting for the others, which may never come to the same place."""
    def fails():
        print("note: of every rank", file=sys.stderr)
        raise error

    ended, calls, _ = launched(rank, fails)
    assert (ended, calls) == (code, [])
    said = capsys.readouterr().err
    assert all(word in said for word in words) and ("Traceback" in said) == (code == 1), said
    assert ("note: of every rank" in said) == (rank == 0)
    assert all(line.startswith("rank 1: ") for line in said.splitlines() if rank)


@pytest.mark.parametrize("devices", ["", "0,1"])
def test_a_rank_without_a_gpu_of_its_own_is_rejected(devices, launched, capsys):
    code, calls, _ = launched(1, devices=devices)
    assert (code, calls) == (2, [])
    assert "CUDA_VISIBLE_DEVICES" in capsys.readouterr().err


@pytest.mark.parametrize("size, gpus, want", [(2, 1, "rank"), (2, 2, "rank"), (1, 3, "start 3"),
                                              (1, 1, "alone")])
def test_a_run_starts_as_a_rank_or_starts_ranks_or_is_alone(size, gpus, want, monkeypatch):
    monkeypatch.setattr(on_gpu, "PLACE", place.Place(0, size))
    monkeypatch.setattr(processes, "launch_ranks", lambda run, flags: "rank")
    monkeypatch.setattr(processes, "start_ranks", lambda n: f"start {n}")
    monkeypatch.setattr(nc, "open_device", lambda: None)
    monkeypatch.setattr("nanoeuler_parts.runs.start.launch", lambda run, engine, **flags: "alone")
    start = on_gpu.training_verb(on_gpu.Run, on_gpu.T_OUT)
    assert start(gpus=gpus, out="no such run", resume=False) == want
    if want != "alone":
        with pytest.raises(ne.UserError, match="--lora runs on one GPU"):
            start(gpus=gpus, out="no such run", resume=False, lora=8)


def test_no_command_without_nccl_goes_on(monkeypatch):
    monkeypatch.setitem(sys.modules, "nccl", None)
    with pytest.raises(ne.UserError, match="several GPUs need NCCL .*nccl4py"):
        engine.Links(place.Place())
