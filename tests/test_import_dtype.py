"""`import --dtype`: matrices in float32, bfloat16 or int8, converted a few rows at a time."""
import re
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from helpers import TINY, refused, run, told
from models import package, write

import nanoeuler as ne
from nanoeuler_parts.checkpoint.file import Checkpoint, open_checkpoint, params_in
from nanoeuler_parts.checkpoint.matrices import in_int8
from nanoeuler_parts.checkpoint.tensors import named
from nanoeuler_parts.interchange import importing

pytestmark = pytest.mark.interop
CFG = replace(TINY, vocab_size=512, n_mtp=1, n_embd=64, n_head=4, n_kv_head=2, head_dim=16,
              n_hidden=192, n_layer=3)


@pytest.fixture(scope="module")
def sources(tmp_path_factory, tokenizer):
    """(a checkpoint, {name: its export})"""
    package()
    folder = tmp_path_factory.mktemp("sources")
    path = write(folder / "a.bin", CFG, tokenizer, kind="chat")
    run("export", path, folder / "hf", "--gguf", folder / "a.gguf")
    return ne.read_checkpoint(str(path)), {"folder": folder / "hf", "GGUF": folder / "a.gguf"}


def rounded(c, dtype):
    """{name: tensor} of a checkpoint with its matrices rounded to a type"""
    tensors = named(c.cfg, c.flat)
    if dtype == "bf16":
        return {name: ne.from_bf16(ne.to_bf16(x)) if x.ndim > 1 else x
                for name, x in tensors.items()}
    if dtype == "int8":
        return {name: np.multiply(*in_int8(x), dtype=np.float32) if x.ndim > 1 else x
                for name, x in tensors.items()}
    return tensors


@pytest.mark.parametrize("source", ["folder", "GGUF"])
@pytest.mark.parametrize("dtype, bytes_each", [("f32", 4), ("bf16", 2), ("int8", 1)])
def test_matrices_are_stored_in_a_type(dtype, bytes_each, source, sources, tmp_path, monkeypatch):
    """Read a few rows at a time, they have the values and the file of all rows at once."""
    c, paths = sources
    for name, block in ("a.bin", importing.BLOCK), ("b.bin", 5000):
        monkeypatch.setattr(importing, "BLOCK", block)
        run("import", paths[source], tmp_path / name, "--dtype", dtype)
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()
    again = ne.read_checkpoint(str(tmp_path / "a.bin"))
    assert (again.cfg, again.matrices) == (c.cfg, dtype)
    for name, want in rounded(c, dtype).items():
        assert np.array_equal(named(again.cfg, again.flat)[name], want), name
    assert (tmp_path / "a.bin").stat().st_size - bytes_each * c.flat.size < 60_000
    ne.write_checkpoint(str(tmp_path / "c.bin"), again.cfg, again.tokenizer, again.state,
                        again.flat, matrices=dtype)
    assert (tmp_path / "c.bin").read_bytes() == (tmp_path / "a.bin").read_bytes()


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
def test_the_type_is_the_default_while_decoding(dtype, sources, tmp_path):
    """Packed from the file, weights have the bits of weights packed from all parameters."""
    _, paths = sources
    path = str(tmp_path / "a.bin")
    run("import", paths["folder"], path, "--dtype", dtype)
    whole, c = ne.read_checkpoint(path), open_checkpoint(path)
    assert ne.load(path).decoder.kept_as == dtype
    assert ne.load(path, weights="f32").decoder.kept_as == "f32"
    for weights in ne.Decoder.formats:
        want = ne.Decoder(whole.cfg, whole.flat, weights).weights
        got = ne.Decoder(c.cfg, params_in(c), weights).weights
        assert all(map(np.array_equal, got.p, want.p))
        assert all(map(np.array_equal, got.scales, want.scales))
        assert got.input_dtype == want.input_dtype
    assert np.array_equal(ne.flat_of(c.cfg, params_in(c)), whole.flat)
    names = {"f32": "float32", "bf16": "bfloat16", "int8": "int8"}
    assert re.search(f"matrices +{names[dtype]}", told("info", path))


def test_the_whole_model_is_never_in_memory(sources, tmp_path, monkeypatch):
    """NumPy's allocations: an import takes blocks, a decoder its panels and one matrix."""
    c, paths = sources
    path = str(tmp_path / "a.bin")
    monkeypatch.setattr(importing, "BLOCK", 4096)
    f = importing.llama_of_folder(paths["folder"])
    tensors = importing.tensors_to_write(f, "", "int8")
    largest = 4 * max(x.size for x in named(c.cfg, c.flat).values())
    assert 4 * c.flat.size > 6 * largest

    def peak(work):
        tracemalloc.start()
        result = work()
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used, result

    def convert():
        for x in tensors.values():
            for start in range(0, x.shape[0], x.at_once):
                x.rows(start, min(start + x.at_once, x.shape[0]))

    used, _ = peak(convert)
    assert used < 4 * c.flat.size / 8
    run("import", paths["folder"], path, "--dtype", "int8")
    opened = open_checkpoint(path)
    used, weights = peak(lambda: ne.Weights(c.cfg, params_in(opened), "int8"))
    panels = sum(x.nbytes for x in (*weights.p, *weights.scales))
    assert c.flat.size < panels and used < panels + 4 * largest


def test_a_bad_value_in_a_later_block_is_named(sources, tmp_path, monkeypatch, capsys, tokenizer):
    flat = sources[0].flat.copy()
    named(CFG, flat)["model.layers.1.mlp.up_proj.weight"][150, 7] = np.inf
    path = tmp_path / "bad.bin"
    ne.write_checkpoint(str(path), CFG, tokenizer, ne.State(), flat)
    monkeypatch.setattr("nanoeuler_parts.interchange.exporting.read_checkpoint",
                        lambda *_, **__: Checkpoint(CFG, tokenizer, ne.State(), flat, ()))
    run("export", path, tmp_path / "hf")
    monkeypatch.setattr(importing, "BLOCK", 4096)
    refused(capsys, "import", tmp_path / "hf", tmp_path / "b.bin", "--dtype", "int8",
            words=["model.layers.1.mlp.up_proj.weight[150, 7] is inf", str(tmp_path / "hf")])
    assert not (tmp_path / "b.bin").exists()
    with pytest.raises(ne.UserError, match=r"bad.bin: .*up_proj.weight\[150, 7\] is inf"):
        ne.load(str(path))


def test_other_types_are_refused(sources, tmp_path, capsys):
    refused(capsys, "import", sources[1]["folder"], tmp_path / "b.bin", "--dtype", "int4",
            words=["--dtype is int4, expected f32, bf16 or int8"])
