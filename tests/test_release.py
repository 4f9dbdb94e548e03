"""What a release holds, each file loaded back by the program that it is for."""
import hashlib
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from helpers import ROOT, needs, run
from models import SMALL, package, same_in_llama_cpp, tokens_of, write
from texts import TORTURE

import nanoeuler as ne
from nanoeuler_parts.chat.templates import chat_ids
from nanoeuler_parts.checkpoint import tensors
from nanoeuler_parts.interchange.gguf import gguf_names, pairs_of_halves

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("one_thread")]
CARD = "# A model\n\nIt can do little.\n"


@pytest.fixture(scope="module")
def release():
    sys.path.insert(0, str(ROOT / "bench"))
    import release
    return release


@pytest.fixture(scope="module")
def dist(release, tokenizer, tmp_path_factory):
    """dist/ of a small chat model in int8."""
    package()
    folder = tmp_path_factory.mktemp("release")
    write(folder / "a.bin", replace(SMALL, n_layer=2, n_mtp=1), tokenizer, kind="chat")
    run("quantize", folder / "a.bin", folder / "tiny.bin")
    (folder / "MODEL.md").write_text(CARD, encoding="utf-8")
    release.main([str(folder / "tiny.bin"), "--out", str(folder / "dist")])
    return folder / "dist"


def test_the_checksums_are_of_all_that_is_there(dist):
    rows = [line.split("  ") for line in (dist / "SHA256SUMS").read_text().splitlines()]
    there = {str(path.relative_to(dist)) for path in dist.rglob("*") if path.is_file()}
    assert {name for _, name in rows} == there - {"SHA256SUMS"} and len(rows) > 8
    for digest, name in rows:
        assert hashlib.sha256((dist / name).read_bytes()).hexdigest() == digest, name
    assert {"tiny.bin", "MODEL.md", "tiny-f16.gguf", "tiny-q8_0.gguf", "tiny-hf/README.md",
            "tiny-hf/model.safetensors", "tiny-hf/config.json", "tiny-hf/tokenizer.json"} < there


def test_the_checkpoint_is_the_one_that_was_given(dist):
    assert (dist / "tiny.bin").read_bytes() == (dist.parent / "tiny.bin").read_bytes()
    assert ne.load(str(dist / "tiny.bin"), tokens=3).say("hi") is not None
    assert (dist / "MODEL.md").read_text() == CARD
    card = (dist / "tiny-hf" / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n") and card.endswith(CARD)


def test_transformers_loads_the_folder(dist, tokenizer):
    torch, transformers = needs("torch"), needs("transformers")
    c = ne.read_checkpoint(str(dist / "tiny.bin"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(dist / "tiny-hf")
    tokens = tokens_of(c.cfg, 40)[None]
    with torch.no_grad():
        want = theirs(torch.tensor(tokens, dtype=torch.int64)).logits[0].numpy()
    assert np.abs(ne.Model(c.cfg, c.flat).logits(tokens)[0, 0] - want).max() < 1e-4 * want.std()
    read = transformers.AutoTokenizer.from_pretrained(dist / "tiny-hf")
    asked = [("user", "What is 12 + 345?")]
    ids = read.apply_chat_template([dict(role="user", content=asked[0][1])],
                                   add_generation_prompt=True)["input_ids"]
    assert ids == chat_ids("", asked, c.state, c.tokenizer)


@pytest.mark.parametrize("matrices, limit", [("f16", 2e-3), ("q8_0", 5e-3)])
def test_the_gguf_package_loads_the_files(matrices, limit, dist, tmp_path):
    gguf = package()
    c, path = ne.read_checkpoint(str(dist / "tiny.bin")), dist / f"tiny-{matrices}.gguf"
    theirs = {t.name: t for t in gguf.GGUFReader(path).tensors}
    names = gguf_names(c.cfg)
    assert theirs.keys() == {*names.values()}
    for name, w in tensors.named(c.cfg, c.flat).items():
        t = theirs[names[name]]
        assert t.tensor_type.name in (("F32",) if w.ndim == 1 else (matrices.upper(), "F16")), name
        got = gguf.dequantize(t.data, t.tensor_type).reshape(w.shape)
        want = pairs_of_halves(w, name, c.cfg) if w.ndim > 1 else w
        assert np.abs(got - want).max() <= limit * np.abs(w).max(), name
    run("import", path, tmp_path / "back.bin")           # and so does our own
    assert ne.read_checkpoint(str(tmp_path / "back.bin")).cfg == c.cfg


@pytest.mark.parametrize("matrices", ["f16", "q8_0"])
def test_llama_cpp_loads_the_files(matrices, dist, tmp_path):
    """It says what our program says of the same rounded weights."""
    path = dist / f"tiny-{matrices}.gguf"
    run("import", path, tmp_path / "back.bin")
    same_in_llama_cpp(ne.read_checkpoint(str(tmp_path / "back.bin")), path, TORTURE, "To be or",
                      n=8)


def test_a_second_release_replaces_the_first(release, dist):
    (dist / "tiny-hf" / "mtp.safetensors").write_bytes(b"of a release before")
    before = {name: (dist / name).read_bytes() for name in ("SHA256SUMS", "tiny-q8_0.gguf")}
    release.main([str(dist.parent / "tiny.bin"), "--out", str(dist)])
    assert not (dist / "tiny-hf" / "mtp.safetensors").exists()
    assert all((dist / name).read_bytes() == data for name, data in before.items())


def test_what_no_release_is_made_of(release, dist, tmp_path, monkeypatch):
    for args, words in ((["no.bin"], "no.bin: No such file"),
                        ([str(dist / "MODEL.md")], "expected a checkpoint"),
                        ([str(dist / "tiny.bin"), "--card", "no.md"], "no.md: No such file"),
                        ([str(dist / "tiny.bin"), "--out", str(dist)], "holds the model itself")):
        with pytest.raises(SystemExit) as e:
            release.main(["--out", str(tmp_path / "dist"), *args])
        assert words in str(e.value.code) and str(e.value.code).startswith("release: ")
    assert not (tmp_path / "dist").exists()


def test_make_release_takes_the_model_that_is_named(release):
    """And no other: the newest that somebody made here is not what is released."""
    env = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    env.pop("ARGS", None)                    # of the `make` that runs these tests
    try:
        said = [subprocess.run(["make", "-n", f"PY={sys.executable}", "release", *named], cwd=ROOT,
                               env=env, capture_output=True, encoding="utf-8").stdout.split()
                for named in (["MODEL=my.bin"], ["OUT=my.bin"], [])]
    except FileNotFoundError:
        pytest.skip("there is no make on this machine")
    assert [x[x.index("bench/release.py") + 1:] for x in said] == [["my.bin"], [], []]
    assert "dist/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
