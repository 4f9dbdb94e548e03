"""Adapters as files, and beside PEFT: the same losses, the same logits both ways, what is none."""
import json
import os
from dataclasses import fields, replace

import numpy as np
import pytest
from helpers import TINY, needs, run, take_apart
from models import CONFIGS, change, greedy, write

import bpe
import nanoeuler as ne
from nanoeuler_parts.checkpoint.file import open_checkpoint
from nanoeuler_parts.files.safetensors import map_tensors, write_tensors
from nanoeuler_parts.kernels import compile_lora_kernels
from nanoeuler_parts.lora.adapter import Lora, n_entries, PROJECTIONS, targets_in, tensors_of
from nanoeuler_parts.lora.base import base_of_file
from nanoeuler_parts.lora.files import (
    adapted_params, checksum_of, COMPUTED, CONFIG, merge_into, peft_name, peft_tensors,
    read_adapter, read_run, summary_of, WEIGHTS, write_adapter, write_run,
)
from nanoeuler_parts.lora.model import Adapted, LoraModel

pytestmark = pytest.mark.interop
SMALL = replace(CONFIGS["small"], n_mtp=1, n_layer=2, vocab_size=512)
# A Llama, a Qwen2 and a Qwen3, and the formula's every part: a rank that is no power of two
CASES = {"llama": (SMALL, Lora(8, 16.0)),
         "qwen2": (replace(SMALL, qkv_bias=True, tie_embeddings=True), Lora(5, 4.0)),
         "qwen3": (replace(SMALL, qk_norm=True, head_dim=48), Lora(16, 16.0, targets_in("q,v,up")))}


@pytest.fixture(scope="module", autouse=True)
def kernels():
    compile_lora_kernels("f32")


def random_adapter(cfg, lora, seed=1, scale=0.05):
    flat = ne.aligned((n_entries(cfg, lora.rank),), np.float32)
    rng = np.random.default_rng(seed)
    for pair in tensors_of(cfg, lora, flat).values():
        for x in pair:
            x[...] = scale * rng.standard_normal(x.shape)
    return flat


@pytest.fixture
def made(request, tokenizer, tmp_path):
    """(path of a checkpoint, the same model in transformers, Lora, flat buffer of an adapter)"""
    torch, transformers = needs("torch"), needs("transformers")
    cfg, lora = CASES[request.param]
    path = write(tmp_path / "a.bin", cfg, tokenizer)
    run("export", path, tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, attn_implementation="eager")
    return path, theirs, lora, random_adapter(cfg, lora)


ALL = [name.split(".")[1] for _, name in PROJECTIONS.values()]
every_case = pytest.mark.parametrize("made", CASES, indirect=True)


def ours_of(path, lora, flat):
    c = open_checkpoint(str(path))
    return LoraModel(c.cfg, Adapted(base_of_file(c), lora, flat.copy()))


def tokens_of(n, T, seed=3):
    return np.random.default_rng(seed).integers(0, 512, (n, T)).astype(np.int32)


@every_case
def test_100_steps_have_the_losses_of_peft(made):
    """From the same A and B, with AdamW, its weight decay, and clipping that has an effect"""
    torch, peft = needs("torch"), needs("peft")
    path, theirs, lora, flat = made
    ours = ours_of(path, lora, flat)
    modules = [peft_name(0, x, "A").split(".")[-3] for x in lora.targets]
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=modules, lora_dropout=0.0))
    learned = {name.replace(".default", ""): p for name, p in theirs.named_parameters()
               if p.requires_grad}
    start = peft_tensors(ours.cfg, lora, flat)
    assert learned.keys() == start.keys()
    with torch.no_grad():
        for name, p in learned.items():
            p.copy_(torch.tensor(start[name]))
    lr, clip, wd = 1e-3, 0.5, 0.1
    adamw = torch.optim.AdamW(learned.values(), lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=wd)
    tokens, losses, norms = tokens_of(100, 33), [], []
    for step in range(100):
        rows = tokens[2 * (step % 7):2 * (step % 7) + 2]
        targets = rows[:, 1:].copy()
        targets[0, :9] = -1                  # a question
        n = (targets >= 0).sum()
        ours.gradient(rows[:, :-1].copy(), targets[None], np.array([1 / n]))
        ce, norm = ours.update(ne.hyper_at(step + 1, lr, beta1=0.9, beta2=0.95, weight_decay=wd,
                                           clip=clip))
        logits = theirs(torch.tensor(rows[:, :-1], dtype=torch.int64)).logits
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, 512), torch.tensor(targets.reshape(-1), dtype=torch.int64),
            ignore_index=-1)
        adamw.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(learned.values(), clip)))
        adamw.step()
        losses.append((ce[0] / n, float(loss.detach())))
        assert abs(norm - norms[-1]) < 1e-3 * norms[-1]
    got, want = np.array(losses).T
    assert np.abs(got / want - 1).max() < 1e-4, np.abs(got / want - 1)
    assert want[-1] < want[0] - 0.1 and max(norms) > clip


@every_case
def test_peft_reads_ours(made, tmp_path):
    """The same logits, and after `export` of the merged model the same greedy text."""
    torch, peft, transformers = needs("torch"), needs("peft"), needs("transformers")
    path, theirs, lora, flat = made
    c = ne.read_checkpoint(str(path))
    folder = tmp_path / "adapter"
    folder.mkdir()
    write_adapter(str(folder), c.cfg, lora, flat, c.state, checksum_of(str(path)))
    loaded = peft.PeftModel.from_pretrained(theirs, folder)
    tokens = tokens_of(1, 40)
    with torch.no_grad():
        want = loaded(torch.tensor(tokens, dtype=torch.int64)).logits[0].numpy()
    merged = merge_into(c, read_adapter(str(folder), c.cfg))
    got = ne.Model(merged.cfg, merged.flat).logits(tokens)[0, 0]
    assert np.abs(got - want).max() < 1e-4 and want.std() > 0.5
    before = ne.Model(c.cfg, ne.read_checkpoint(str(path)).flat).logits(tokens)[0, 0]
    assert np.abs(got - before).max() > 0.05             # the adapter has an effect
    decoder = ne.Decoder(c.cfg, adapted_params(open_checkpoint(str(path)),
                                               read_adapter(str(folder), c.cfg)))
    assert np.abs(decoder.step(*tokens[0]) - want[-1]).max() < 1e-4
    run("export", path, tmp_path / "merged", "--merge", folder)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged",
                                                              dtype=torch.float32)
    prompt, text = greedy(merged, "To be, or not to", 30)
    found = again.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False,
                           eos_token_id=None, pad_token_id=0)[0, len(prompt):]
    assert text == found.tolist()


@every_case
def test_we_read_pefts(made, tmp_path):
    """As `save_pretrained` writes it, in float32 and in bfloat16, and with use_rslora"""
    torch, peft = needs("torch"), needs("peft")
    path, theirs, lora, flat = made
    modules = [peft_name(0, x, "A").split(".")[-3] for x in lora.targets]
    adapted = peft.get_peft_model(theirs, peft.LoraConfig(
        r=lora.rank, lora_alpha=3, target_modules=modules, use_rslora=True,
        init_lora_weights=False))            # B is not zero
    tokens = tokens_of(1, 40)
    with torch.no_grad():
        want = adapted(torch.tensor(tokens, dtype=torch.int64)).logits[0].numpy()
    adapted.save_pretrained(tmp_path / "theirs")
    c = ne.read_checkpoint(str(path))
    found = read_adapter(str(tmp_path / "theirs"), c.cfg)
    assert found.lora.rank == lora.rank and found.lora.targets == lora.targets
    assert found.state is None and found.base_sha256 == ""
    merged = merge_into(c, found)
    got = ne.Model(merged.cfg, merged.flat).logits(tokens)[0, 0]
    assert np.abs(got - want).max() < 1e-4
    adapted.to(torch.bfloat16).save_pretrained(tmp_path / "low")
    low = read_adapter(str(tmp_path / "low"), c.cfg)
    assert 0 < np.abs(low.flat - found.flat).max() < 1e-2


# ---- files that are none
@pytest.fixture
def folder(tokenizer, tmp_path):
    """(path of a checkpoint, folder of a good adapter)"""
    path = write(tmp_path / "a.bin", replace(TINY, vocab_size=512), tokenizer)
    c, lora = ne.read_checkpoint(str(path)), Lora(2, 4.0)
    (tmp_path / "adapter").mkdir()
    write_adapter(str(tmp_path / "adapter"), c.cfg, lora, random_adapter(c.cfg, lora), c.state, "")
    return path, tmp_path / "adapter"


def rejected(path, folder, *words):
    with pytest.raises(bpe.UserError) as error:
        read_adapter(str(folder), ne.read_checkpoint(str(path)).cfg)
    said = str(error.value)
    assert "\n" not in said and all(word in said for word in words), said
    assert "name the folder" not in said or "expected a folder with" in said
    return said


def test_a_good_folder_is_read(folder):
    path, adapter = folder
    c = ne.read_checkpoint(str(path))
    found = read_adapter(str(adapter), c.cfg)
    assert found.lora == Lora(2, 4.0)
    assert np.array_equal(found.flat, random_adapter(c.cfg, Lora(2, 4.0)))
    assert found.state == c.state


# Of a State: the fields that an adapter brings.  All others are those of the model.
BROUGHT = dict(kind="chat", template="{{ messages[0]['content'] }}", bos="<a>", eos="<b>",
               stops=["<c>", "</s>"], thinking="on")
OTHERS = dict(weights="bf16", step=7, n_steps=9, source="other.bin", source_sha256="1" * 64,
              text_sha256="2" * 64, learned=["3" * 64], options={"batch": 1})


def test_an_adapter_brings_how_its_training_asked_and_ended_answers(folder):
    """Its base may be in another format, whose file names other tokens"""
    path, adapter = folder
    c, lora = ne.read_checkpoint(str(path)), Lora(2, 4.0)
    trained = replace(c.state, **BROUGHT, **OTHERS)
    same = [name for name in BROUGHT | OTHERS if getattr(trained, name) == getattr(c.state, name)]
    assert not same
    write_adapter(str(adapter), c.cfg, lora, random_adapter(c.cfg, lora), trained, "")
    want = replace(c.state, **BROUGHT)
    assert merge_into(c, read_adapter(str(adapter), c.cfg)).state == want
    speaker = ne.load(str(path), adapter=str(adapter))
    assert speaker.state == want and speaker.template == want.template and speaker.answers
    assert speaker.ends == (c.tokenizer.specials["</s>"],)


@pytest.mark.parametrize("values, words", [
    (dict(r=0), ["its r is 0", "1 to 1024"]), (dict(r=True), ["its r is True"]),
    (dict(r="8"), ["its r is '8'"]), (dict(r="absent"), ["its r is None"]),
    (dict(r=10**9), ["its r is 1000000000"]), (dict(r=3), ["has the shape", "expected (3, 8)"]),
    (dict(lora_alpha=float("nan")), ["its lora_alpha is nan"]),
    (dict(lora_alpha=0), ["its lora_alpha is 0"]), (dict(lora_alpha=[1]), ["its lora_alpha"]),
    (dict(use_dora=True), ["its use_dora is True, expected False"]),
    (dict(bias="all"), ["its bias is 'all', expected 'none'"]),
    (dict(peft_type="IA3"), ["its peft_type is 'IA3', expected 'LORA'"]),
    (dict(rank_pattern={"q_proj": 4}), ["its rank_pattern"]),
    (dict(modules_to_save=["lm_head"]), ["its modules_to_save is ['lm_head']"]),
    (dict(use_rslora="yes"), ["its use_rslora is 'yes'"]),
    (dict(layer_replication=[[0, 1]]), ["its layer_replication"]),
    *((dict(init_lora_weights=x), [f"its init_lora_weights is '{x}', expected True"])
      for x in ("pissa", "pissa_niter_4", "olora", "corda", "lora_ga", "loftq")),
    (dict(alora_invocation_tokens=[1, 2]), ["its alora_invocation_tokens is [1, 2]"]),
    (dict(use_qalora=True), ["its use_qalora is True, expected False"]),
    (dict(use_bdlora={"nblocks": 2}), ["its use_bdlora"]), (dict(kasa_config={}), ["its kasa_"]),
    (dict(arrow_config={}), ["its arrow_"]), (dict(monteclora_config={}), ["its monteclora_"])])
def test_settings_that_are_not_computed_are_rejected(folder, values, words):
    path, adapter = folder
    change(adapter / CONFIG, **values)
    rejected(path, adapter, *words, str(adapter))


# Settings of PEFT that do not change what a trained adapter computes, or that its tensors show
WITHOUT_EFFECT = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "target_modules", "exclude_modules", "lora_dropout", "layers_to_transform",
    "layers_pattern", "megatron_config", "megatron_core", "loftq_config", "eva_config",
    "corda_config", "lora_ga_config", "velora_config", "qalora_group_size", "runtime_config",
    "ensure_weight_tying"}


def test_every_setting_of_peft_is_known():
    """One that a newer PEFT adds may be another formula: it belongs to COMPUTED or to these."""
    peft = needs("peft")
    names = {field.name for field in fields(peft.LoraConfig)}
    ours = {*COMPUTED, "r", "lora_alpha", "use_rslora"}
    assert names <= ours | WITHOUT_EFFECT and not ours & WITHOUT_EFFECT
    values = peft.LoraConfig(task_type="CAUSAL_LM").to_dict()
    assert {values[name] in COMPUTED[name] for name in COMPUTED if name in values} == {True}


def test_a_merge_that_is_not_finite_is_an_error(folder):
    """Finite numbers whose product is infinite: merged at once, and layer by layer for a decoder"""
    path, adapter = folder
    c, lora = ne.read_checkpoint(str(path)), Lora(2, 4.0)
    flat = random_adapter(c.cfg, lora)
    a, b = tensors_of(c.cfg, lora, flat)["up"]
    a[1, 0, 3], b[1, -1, 0] = 1e30, 1e30
    write_adapter(str(adapter), c.cfg, lora, flat, c.state, "")
    found = read_adapter(str(adapter), c.cfg)
    with pytest.raises(bpe.UserError, match="layer 1, up with its adapter: .*expected a finite"):
        merge_into(c, found)
    params = adapted_params(open_checkpoint(str(path)), found)
    assert np.isfinite(params.gate_up[0]).all()
    with pytest.raises(bpe.UserError, match="layer 1, gate_up with its adapter: .* a finite"):
        params.gate_up[1]


@pytest.mark.parametrize("targets, fits", [
    (["q_proj"], False), (["proj"], False), ([], False), ([3, None], False),
    ("q_proj|v_proj", True), (None, True),   # a regular expression, or PEFT's default
    (["model.layers.0.self_attn.q_proj"], False), ([*ALL, "more"], True),
    ([f"{part}.{name}" for part in ("self_attn", "mlp") for name in ALL], True)])
def test_target_modules_include_every_tensor(folder, targets, fits):
    """PEFT would leave out the others without a word."""
    path, adapter = folder
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"target_modules": targets}),
                                                 encoding="utf-8")
    if fits:
        read_adapter(str(adapter), ne.read_checkpoint(str(path)).cfg)
    else:
        rejected(path, adapter, "its target_modules do not include model.layers.0.", "changes")
        with pytest.raises(bpe.UserError, match="do not include"):
            summary_of(str(adapter))


@pytest.mark.parametrize("text", ["", "[]", "3", "{", "\ufeff{}", "{" * 5000, '{"r": 1e999}'])
def test_a_config_that_is_none(folder, text):
    path, adapter = folder
    (adapter / CONFIG).write_text(text, encoding="utf-8")
    rejected(path, adapter, str(adapter / CONFIG))


def test_a_folder_without_files(folder, tmp_path):
    path, adapter = folder
    rejected(path, tmp_path / "none", "expected a folder with adapter_config.json, found none")
    for name in WEIGHTS, CONFIG:
        os.rename(adapter / name, tmp_path / name)
        rejected(path, adapter, name, "missing" if name == WEIGHTS else "found none")
        (adapter / name).mkdir()
        rejected(path, adapter, name)
        (adapter / name).rmdir()
        os.rename(tmp_path / name, adapter / name)
    read_adapter(str(adapter), ne.read_checkpoint(str(path)).cfg)


def test_a_model_with_another_number_of_layers_is_rejected(folder):
    path, adapter = folder
    cfg = ne.read_checkpoint(str(path)).cfg
    change(adapter / CONFIG, base_model_name_or_path="their.bin")
    for n in 1, 3:
        with pytest.raises(bpe.UserError, match=f"was made for a model with 2 layers, their.bin, "
                                                f"this model has {n}; use the model"):
            read_adapter(str(adapter), replace(cfg, n_layer=n))


A, B = peft_name(0, "q", "A"), peft_name(0, "q", "B")


@pytest.mark.parametrize("act, words", [
    (lambda t: t.pop(A), [f"it has {B}, but no {A}"]),
    (lambda t: t.pop(B), [f"it has {A}, but no {B}"]),
    (lambda t: t.clear(), ["it has no tensors"]),
    (lambda t: t.update({"base_model.model.lm_head.lora_A.weight": t[A]}),
     ["base_model.model.lm_head.lora_A.weight, which is none of A and B"]),
    (lambda t: t.update({peft_name(2, "q", "A"): t[A]}), ["at least 3 layers, this model has 2"]),
    (lambda t: t.update({A: t[A].T.copy()}), [f"{A} has the shape (8, 2), expected (2, 8)"]),
    (lambda t: t.update({A: t[A][None]}), [f"{A} has the shape (1, 2, 8)"]),
    (lambda t: t.update({A: t[A].astype(np.int8)}), [f"{A} has type I8, expected F32, F16, BF16"]),
    (lambda t: t.update({A: t[A] * np.inf}), [f"{A}[", "expected a finite number"]),
    (lambda t: t.update({B: t[B] + np.float32(np.nan)}), [f"{B}[0, 0] is nan"])])
def test_tensors_that_are_no_adapter(folder, act, words):
    path, adapter = folder
    meta, tensors = map_tensors(str(adapter / WEIGHTS))
    tensors = {name: np.array(x) for name, x in tensors.items()}
    with np.errstate(invalid="ignore"):
        act(tensors)
    write_tensors(str(adapter / WEIGHTS), {"format": "pt"}, tensors, "")
    rejected(path, adapter, *words, str(adapter / WEIGHTS))


@pytest.mark.parametrize("state", ["{", "[]", '{"kind": 3}', '{"unknown": 1}', '{"stops": [1]}'])
def test_a_state_that_is_none(folder, state):
    path, adapter = folder
    meta, tensors = map_tensors(str(adapter / WEIGHTS))
    tensors = {name: np.array(x) for name, x in tensors.items()}
    write_tensors(str(adapter / WEIGHTS), {**meta, "state": state}, tensors, "")
    rejected(path, adapter, str(adapter / WEIGHTS))


def test_a_damaged_file_is_rejected(folder):
    path, adapter = folder
    data = (adapter / WEIGHTS).read_bytes()
    (adapter / WEIGHTS).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    rejected(path, adapter, "the checksum does not match")
    (adapter / WEIGHTS).write_bytes(data[:-100])
    rejected(path, adapter, "the file is incomplete or damaged")


NAMES = ("model.embed_tokens.weight", "model.layers.0.self_attn.v_proj.weight",
         "model.layers.1.mlp.down_proj.weight", "lm_head.weight")


@pytest.mark.parametrize("stored", ["f32", "bf16", "int8"])
def test_a_model_that_is_not_finite_is_not_adapted(stored, folder, tmp_path):
    """The last entry of each kind of matrix, or its scale, and of a gain.  The largest finite
    number, and the smallest one, are read."""
    path, low = folder[0], tmp_path / "low.bin"
    c = ne.read_checkpoint(str(path))
    ne.write_checkpoint(str(low), c.cfg, c.tokenizer, c.state, c.flat, (), stored)
    meta, tensors = map_tensors(str(low))
    tensors = {name: np.array(x) for name, x in tensors.items()}
    kinds = {"f32": np.float32, "bf16": np.uint16, "int8": np.int8}
    assert tensors[NAMES[1]].dtype == kinds[stored]
    # as the upper half of a float32: the largest number, the smallest one, infinities, and NaNs
    largest, smallest, *bad = 0x7F7F, 0x8001, 0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F81

    def base_with(name, bits):
        x = tensors[name]
        value = np.array([bits], np.uint16) if x.dtype == np.uint16 else np.array(
            [bits << 16], np.uint32).view(np.float32)
        before, x[(-1,) * x.ndim] = x[(-1,) * x.ndim], value[0]
        write_tensors(str(low), {k: v for k, v in meta.items() if k != "sha256"}, tensors, "",
                      "BF16")
        x[(-1,) * x.ndim] = before
        return base_of_file(open_checkpoint(str(low)))

    for name in (*NAMES, "model.layers.1.input_layernorm.weight", "model.norm.weight"):
        if stored == "int8" and name in NAMES:
            name = f"{name}_scale"
        for bits in bad:
            with pytest.raises(bpe.UserError, match=f"{name}.* expected a (finite|positive)"):
                base_with(name, bits)
        for bits in (0x3F80,) if name.endswith("_scale") else (largest, smallest):
            base_with(name, bits)


@pytest.mark.parametrize("act, words", [
    (lambda meta, t: meta.update(format="pt"), "expected a run with LoRA; name the folder of"),
    (lambda meta, t: meta.pop("sha256"), "it has no checksum; the file is damaged; name"),
    (lambda meta, t: t.pop("adamw.m"), "expected 464 numbers in adamw.m; the file is damaged"),
    (lambda meta, t: t.update({"adamw.v": t["adamw.v"][1:]}), "expected 464 numbers in adamw.v; "),
    (lambda meta, t: t.update(lora=np.zeros(465, np.float32)), "expected 464 numbers in lora; ")])
def test_a_run_that_is_none(folder, tmp_path, act, words):
    path, run = folder[0], tmp_path / "run.bin"
    c, lora = ne.read_checkpoint(str(path)), Lora(2, 4.0)
    flat = random_adapter(c.cfg, lora)
    write_run(str(run), c.cfg, lora, c.state, flat, (flat, flat), "")
    assert np.array_equal(read_run(str(run)).flat, flat)
    meta, tensors = map_tensors(str(run))
    meta, tensors = {**meta}, {name: np.array(x) for name, x in tensors.items()}
    act(meta, tensors)
    write_tensors(str(run), meta, tensors, "")
    if "sha256" not in meta:
        header, data = take_apart(run)
        del header["__metadata__"]["sha256"]
        text = json.dumps(header).encode()
        run.write_bytes(len(text).to_bytes(8, "little") + text + data)
    with pytest.raises(bpe.UserError) as error:
        read_run(str(run))
    assert str(error.value).startswith(f"{run}: {words}")


def test_layers_that_an_adapter_leaves_out_stay_as_they_are(folder):
    path, adapter = folder
    meta, tensors = map_tensors(str(adapter / WEIGHTS))
    kept = {name: np.array(x) for name, x in tensors.items() if ".layers.1." in name}
    write_tensors(str(adapter / WEIGHTS), {"format": "pt"}, kept, "")
    c = ne.read_checkpoint(str(path))
    pairs = tensors_of(c.cfg, *read_adapter(str(adapter), c.cfg)[:2])
    assert all(not a[0].any() and a[1].any() for a, _ in pairs.values())
