"""docs/api.md: each name is there with its parameters, and the examples run."""
import ast
import inspect
import re

import numpy as np
import pytest
from helpers import ROOT

import bpe
import nanoeuler as ne
from nanoeuler_parts.checkpoint.bundled import SHIPPED

pytestmark = pytest.mark.unit
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
DOCUMENTED = re.findall(r"(?m)^### `([\w.]+)(\(.*\))`$", PAGE)
CLASSES = {"Speaker": ne.Speaker, "Model": ne.Model, "Decoder": ne.Decoder,
           "Tokenizer": bpe.Tokenizer, "nanoeuler": ne, "bpe": bpe}


def documented(parameters):
    """{name: its default as Python, "" if there is none} of "(a, b=1, *, c, **d)" """
    a = ast.parse(f"def f{parameters}: pass").body[0].args
    names = [x.arg for x in a.posonlyargs + a.args] + ([f"*{a.vararg.arg}"] if a.vararg else [])
    defaults = [""] * (len(names) - len(a.defaults)) + [ast.unparse(x) for x in a.defaults]
    found = dict(zip(names, defaults, strict=True))
    for x, default in zip(a.kwonlyargs, a.kw_defaults, strict=True):
        found[x.arg] = ast.unparse(default) if default else ""
    return found | ({f"**{a.kwarg.arg}": ""} if a.kwarg else {})


def actual(call):
    found = {}
    for p in inspect.signature(call).parameters.values():
        if p.name == "self":
            continue
        factory = p.default.__class__.__name__ == "_HAS_DEFAULT_FACTORY_CLASS"
        default = "[]" if factory else getattr(p.default, "__name__", repr(p.default))
        stars = {p.VAR_KEYWORD: "**", p.VAR_POSITIONAL: "*"}.get(p.kind, "")
        name = stars + p.name
        found[name] = "" if p.default is p.empty else default
    return found


@pytest.mark.parametrize("name, parameters", DOCUMENTED, ids=[name for name, _ in DOCUMENTED])
def test_a_documented_name_has_these_parameters(name, parameters):
    owner, _, attribute = name.rpartition(".")
    assert documented(parameters) == actual(getattr(CLASSES[owner], attribute))


def test_the_page_documents_what_users_need():
    names = {name for name, _ in DOCUMENTED}
    assert names >= {"nanoeuler.load", "Speaker.generate", "Speaker.stream", "Speaker.say",
                     "nanoeuler.Model", "nanoeuler.Decoder", "nanoeuler.Part",
                     "nanoeuler.read_checkpoint", "nanoeuler.write_checkpoint", "bpe.train",
                     "bpe.Tokenizer"}


def test_the_examples_run(tmp_path, monkeypatch):
    """In order, each with the names of those before, as a reader would type them"""
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    names = {}
    for example in re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE):
        exec(compile(example, "docs/api.md", "exec"), names)
    assert names["replies"] and isinstance(names["logits"], np.ndarray)


def test_errors_are_what_the_page_says(tmp_path):
    assert bpe.UserError is ne.UserError and issubclass(ne.UserError, ValueError)
    model = ne.load(str(ROOT / SHIPPED), weights="int8")
    c = ne.read_checkpoint(str(ROOT / SHIPPED), moments=False)
    decoder = ne.Decoder(ne.Config(), ne.init_params(ne.Config(), 1))
    trained = ne.Model(ne.Config(), ne.init_params(ne.Config(), 1))
    for wrong in (lambda: ne.load(str(tmp_path / "none.bin")),
                  lambda: model.generate(["a " * 2000]),
                  lambda: model.generate(["a"], weights="f32"),
                  lambda: [*model.stream("a", n=2)],
                  lambda: trained.losses(np.zeros((3, 5), np.int32), np.zeros((1, 5), np.int32)),
                  lambda: ne.Sampling(top_p=2.0).check(),
                  lambda: ne.Config(head_dim=3).check(),
                  lambda: decoder.read([ne.Part(1, [0])]),
                  lambda: decoder.read([ne.Part(0, [512])]),
                  lambda: trained.logits(np.full((1, 1), 512, np.int32)),
                  lambda: trained.logits(np.zeros((1, 129), np.int32)),
                  lambda: bpe.train("a", 256),
                  lambda: c.tokenizer.decode([c.cfg.vocab_size])):
        with pytest.raises(ne.UserError):
            wrong()
