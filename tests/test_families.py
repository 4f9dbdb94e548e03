"""Llama, Mistral, Qwen2 and Qwen3 with scaled RoPE: transformers computes the same logits, from
directories of Hugging Face and from GGUF files.

The models are random.  Their weights are large enough that each feature changes the logits by more
than 100 times the tolerance; a test proves it.  The texts are longer than the window and than the
context that RoPE's scaling starts from."""
import math
from dataclasses import replace

import numpy as np
import pytest
from helpers import drawn, needs, present, refused, run
from hypothesis import assume, given
from hypothesis import strategies as st
from models import change, package

import nanoeuler as ne
from nanoeuler_parts.interchange.gguf import pairs_of_halves, rope_factors, scaled_by
from nanoeuler_parts.interchange.llama import FAMILIES, entries_of, kind_of, llama_config

pytestmark = pytest.mark.interop
T, TOLERANCE = 96, 1e-4

LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=24)
SHAPE = dict(vocab_size=512, hidden_size=48, intermediate_size=80, num_hidden_layers=3,
             num_attention_heads=6, num_key_value_heads=2, head_dim=16, max_position_embeddings=T,
             rms_norm_eps=3e-4)
WINDOW = dict(sliding_window=17)
OF_QWEN = dict(use_sliding_window=True, max_window_layers=0, **WINDOW)
MODELS = {                   # name: (model_type, entries of config.json, RoPE)
    "Llama, llama3": ("llama", {}, LLAMA3),
    "Llama, linear, tied": ("llama", dict(tie_word_embeddings=True),
                            dict(rope_type="linear", factor=3.0)),
    "Llama, yarn, odd heads": ("llama", dict(head_dim=10, num_key_value_heads=3), YARN),
    "Mistral": ("mistral", WINDOW, {}),
    "Mistral, without a window": ("mistral", dict(sliding_window=None), {}),
    "Qwen2": ("qwen2", dict(head_dim=8), {}),
    "Qwen2, a window, yarn": ("qwen2", dict(head_dim=8, **OF_QWEN), {
        **YARN, "attention_factor": 1.3, "beta_fast": 20.0, "beta_slow": 2.0}),
    "Qwen3, tied": ("qwen3", dict(tie_word_embeddings=True), {}),
    "Qwen3, a window, yarn": ("qwen3", OF_QWEN, {**YARN, "mscale": 1.5, "mscale_all_dim": 0.7}),
}
FEATURES = {                 # what is switched off: changes of the Config
    "window": dict(window=None), "rope_scaling": dict(rope_scaling=""),
    "rope_attention": dict(rope_attention=1.0)}


@pytest.fixture(scope="module")
def models(tmp_path_factory, tokenizer):
    """{name: (model of transformers, tokens (1, T), logits (T, V), folder)}"""
    torch, transformers = needs("torch"), needs("transformers")
    made = {}
    for seed, (name, (kind, entries, rope)) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        rope = {"rope_theta": 7e3, "rope_type": "default", **rope}
        config = transformers.AutoConfig.for_model(
            kind, **{**SHAPE, **entries, "rope_parameters": rope})
        config._attn_implementation = "eager"
        theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for weight in theirs.parameters():   # gains of norms around 1, all others around 0
            is_gain = weight.ndim == 1 and weight.mean() == 1
            torch.nn.init.normal_(weight, float(is_gain), 0.3 if weight.ndim == 1 else 0.2)
        tokens = torch.randint(0, 512, (1, T))
        with torch.no_grad():
            logits = theirs(tokens).logits[0].numpy()
        folder = tmp_path_factory.mktemp("model")
        theirs.save_pretrained(folder)
        tokenizer.save(folder / "tokenizer.json")
        (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}',
                                                      encoding="utf-8")
        made[name] = theirs, tokens.numpy().astype(np.int32), logits, folder
    return made


@pytest.fixture(params=MODELS)
def model(request, models, tmp_path):
    """(name, model of transformers, tokens, logits, folder, checkpoint imported from the folder)"""
    *rest, folder = models[request.param]
    run("import", folder, tmp_path / "a.bin")
    return request.param, *rest, folder, ne.read_checkpoint(str(tmp_path / "a.bin"))


def logits_of(c, tokens):
    return ne.Model(c.cfg, c.flat).logits(tokens)[0, 0].copy()


def test_logits_are_those_of_transformers(model):
    """The training code, the decoder with a whole prompt, and token by token"""
    name, _, tokens, want, _, c = model
    assert 1 < want.std() < 30, name
    assert np.abs(logits_of(c, tokens) - want).max() < TOLERANCE
    decoder = ne.Decoder(c.cfg, c.flat, slots=2)
    ids = tokens[0].tolist()
    assert np.abs(decoder.read([ne.Part(0, ids, T)]) - want).max() < TOLERANCE
    for t, token in enumerate(ids):
        got = decoder.read([ne.Part(1, [token], 1)])[0]
        assert np.abs(got - want[t]).max() < TOLERANCE, t


def test_each_feature_moves_the_logits(model):
    """Otherwise the comparison would prove nothing."""
    name, _, tokens, want, _, c = model
    off = {key: change for key, change in FEATURES.items()
           if getattr(c.cfg, key) not in (None, "", 1.0)}
    for key, change_ in off.items():
        moved = logits_of(c._replace(cfg=replace(c.cfg, **change_)), tokens)
        assert np.abs(moved - want).max() > 100 * TOLERANCE, key
    tensors = present(ne.views(c.flat, ne.param_table(c.cfg)))
    for key, neutral in ("qkv_bias", 0), ("q_norm", 1), ("k_norm", 1):
        if key in tensors:
            kept = tensors[key].copy()
            tensors[key][...] = neutral
            assert np.abs(logits_of(c, tokens) - want).max() > 100 * TOLERANCE, key
            tensors[key][...] = kept
            off[key] = neutral
    plain = {"Llama", "Mistral, without a window"}
    assert off or name in plain


TRAINED = ["Llama, llama3", "Mistral", "Qwen2, a window, yarn", "Qwen3, a window, yarn"]


@pytest.mark.parametrize("name", TRAINED)
def test_ten_training_steps_are_those_of_pytorch(name, models, tmp_path):
    """AdamW in float64: the losses of ten steps, and the weights after them"""
    torch = needs("torch")
    from oracles import torch_llama
    *_, folder = models[name]
    run("import", folder, tmp_path / "a.bin")
    c = ne.read_checkpoint(str(tmp_path / "a.bin"))
    flat = ne.aligned(c.flat.shape, np.float64)
    flat[:] = c.flat
    ours = ne.Model(c.cfg, flat)
    theirs = {key: torch.tensor(x, requires_grad=True) for key, x in present(ours.p).items()}
    cos, sin = map(torch.tensor, ne.rope_table(c.cfg, np.float64))
    groups = [dict(params=[theirs[x.name] for x in ne.param_table(c.cfg)
                           if x.name in theirs and x.decays == decays], weight_decay=0.1 * decays)
              for decays in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    rng = np.random.default_rng(1)
    for step in range(1, 11):
        tokens = rng.integers(0, 512, (3, T + 1), np.int32)
        inputs, targets = tokens[:, :-1].copy(), tokens[None, :, 1:].copy()
        logits = torch_llama.logits(c.cfg, theirs, torch.tensor(inputs, dtype=torch.int64), cos,
                                    sin)
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.tensor(targets.ravel(), dtype=torch.int64))
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*theirs.values()], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ours.gradient(inputs, targets, ne.loss_weights(targets, 0.0))
        losses, _ = ours.update(ne.hyper_at(step, 1e-2, beta1=0.9, beta2=0.95, weight_decay=0.1,
                                            clip=1.0))
        assert abs(losses[0] / targets.size - loss.item()) < 1e-5, step
    for key, x in present(ours.p).items():
        assert np.abs(x - theirs[key].detach().numpy()).max() < 1e-5, key


def test_gguf_and_directories_lead_there_and_back(model, tokenizer, tmp_path):
    """Both exports are read again to the same bits.  transformers computes the same logits, and
    generates the same text."""
    torch, transformers = needs("torch"), needs("transformers")
    package()
    _, _, tokens, want, _, c = model
    run("export", tmp_path / "a.bin", tmp_path / "hf", "--gguf", tmp_path / "a.gguf")
    for source in "hf", "a.gguf":
        run("import", tmp_path / source, tmp_path / "b.bin", "--force")
        again = ne.read_checkpoint(str(tmp_path / "b.bin"))
        assert np.array_equal(again.flat, c.flat), source
        rounded = {name for name in ("rope_attention",) if source == "a.gguf"}      # a float32
        assert replace(again.cfg, **{name: getattr(c.cfg, name) for name in rounded}) == c.cfg
        assert np.abs(logits_of(again, tokens) - want).max() < TOLERANCE
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, attn_implementation="eager")
    # Mistral without a window is a Llama
    assert type(loaded).__name__ == FAMILIES[kind_of(c.cfg)].architecture
    ids = torch.tensor(tokens, dtype=torch.int64)
    with torch.no_grad():
        assert np.abs(loaded(ids).logits[0].numpy() - want).max() < TOLERANCE
    text = loaded.generate(ids[:, :30], max_new_tokens=50, do_sample=False, eos_token_id=None,
                           pad_token_id=0, attention_mask=torch.ones(1, 30))[0, 30:]
    ours = ne.generate(ne.Decoder(c.cfg, c.flat), tokens[0, :30].tolist(), 50, None,
                       ne.Sampling(temperature=0.0))
    assert list(ours) == text.tolist()


def test_llama_cpp_says_the_same(model, tmp_path):
    """With a KV cache in float32; by default it is float16.  It has no sliding windows in these
    architectures."""
    llama_cpp = needs("llama_cpp")
    _, _, tokens, want, _, c = model
    if c.cfg.window:
        pytest.skip("llama.cpp ignores the window of these models")
    run("export", tmp_path / "a.bin", "--gguf", tmp_path / "a.gguf")
    llama = llama_cpp.Llama(str(tmp_path / "a.gguf"), n_ctx=128, n_threads=2, verbose=False,
                            logits_all=True, type_k=llama_cpp.GGML_TYPE_F32,
                            type_v=llama_cpp.GGML_TYPE_F32)
    llama.eval(tokens[0].tolist())
    assert np.abs(np.array(llama.scores[:T]) - want).max() < TOLERANCE
    llama.reset()
    prompt = tokens[0, :30].tolist()
    theirs = llama.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0)
    ours = list(ne.generate(ne.Decoder(c.cfg, c.flat), prompt, 64, None,
                            ne.Sampling(temperature=0.0)))
    assert len(ours) == 64 and [next(theirs) for _ in ours] == ours


def test_rows_of_q_and_k_are_reordered_for_llama_alone():
    w = np.arange(4 * 8 * 2.0).reshape(32, 2)
    llama = ne.Config(n_head=4, n_kv_head=4, head_dim=8)
    assert not np.array_equal(pairs_of_halves(w, "q_proj.weight", llama), w)
    for change_ in dict(qkv_bias=True), dict(qk_norm=True):
        cfg = replace(llama, **change_)
        assert np.array_equal(pairs_of_halves(w, "q_proj.weight", cfg), w)


def test_an_architecture_for_all_features_does_not_exist(tmp_path, capsys, tokenizer):
    cfg = ne.Config(vocab_size=512, qkv_bias=True, qk_norm=True, n_mtp=1)
    path = tmp_path / "a.bin"
    ne.write_checkpoint(str(path), cfg, tokenizer, ne.State(), ne.init_params(cfg, 1))
    for out in ([tmp_path / "hf"], ["--gguf", tmp_path / "a.gguf"]):
        refused(capsys, "export", path, *out, words=["biases", "norms", "expected one of them"])
    assert [x.name for x in tmp_path.iterdir()] == ["a.bin"]


# ---- RoPE
lengths = st.integers(8, 10**5)


@drawn(200)
@given(st.data())
def test_rope_tables_are_those_of_transformers(data):
    transformers = needs("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    draw, number = data.draw, lambda low, high: st.floats(low, high)
    kind = draw(st.sampled_from(["linear", "llama3", "yarn"]))
    rope = dict(rope_type=kind, rope_theta=draw(number(100, 1e7)), factor=draw(number(1, 64)))
    if kind != "linear":
        rope["original_max_position_embeddings"] = draw(lengths)
    if kind == "llama3":
        rope |= dict(low_freq_factor=draw(number(0.5, 3)), high_freq_factor=draw(number(3.5, 20)))
    if kind == "yarn":
        for name, values in (("attention_factor", number(0.5, 2)), ("mscale", number(0.5, 2)),
                             ("mscale_all_dim", number(0.5, 2)), ("beta_fast", number(8, 64)),
                             ("beta_slow", number(0.5, 4))):
            if draw(st.booleans()):
                rope[name] = draw(values)
    D = 2 * draw(st.integers(1, 64))
    entries = {**SHAPE, "head_dim": D, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**entries, rope_parameters=dict(rope))
    frequency, scale = ROPE_INIT_FUNCTIONS[kind](config)
    cfg = llama_config({**entries, "model_type": "llama", "rope_parameters": rope})
    angle = np.outer(np.arange(64), frequency.numpy().astype(np.float64))
    cos, sin = ne.rope_table(cfg, np.float64)
    limit = 1e-5 * 64 * scale                # their frequencies are float32, up to position 64
    assert np.abs(cos - scale * np.cos(angle)).max() < limit
    assert np.abs(sin - scale * np.sin(angle)).max() < limit
    assert llama_config({**entries_of(cfg)}) == cfg
    older = {**entries, "model_type": "llama", "rope_theta": rope.pop("rope_theta"),
             "rope_scaling": {**rope, "type": rope.pop("rope_type")}}
    assert llama_config(older) == cfg        # as transformers 4 writes it


@drawn(200)
@given(D=st.integers(1, 64), theta=st.floats(100, 1e7), factor=st.floats(1, 64), length=lengths)
def test_the_scaling_of_llama3_comes_back_from_its_factors(D, theta, factor, length):
    """GGUF has the factors, not the settings."""
    cfg = ne.Config(head_dim=2 * D, rope_theta=theta, seq_len=64)
    scaled = replace(cfg, rope_scaling="llama3", rope_factor=factor, rope_original=length)
    assume(ne.kept_of_frequency(scaled, ne.rope_frequency(scaled)).min() == 0)   # some are divided
    again = scaled_by(cfg, rope_factors(scaled))
    for got, want in zip(ne.rope_table(again, np.float64), ne.rope_table(scaled, np.float64)):
        assert np.abs(got - want).max() < 64 * 1e-4


def test_other_factors_are_refused():
    cfg = ne.Config(head_dim=8)
    for factors in ([1, 2, 3], [1, 0.5, 1, 1], [1, 1, math.nan, 1], [8, 1, 1, 1], [1, 3, 5, 2]):
        with pytest.raises(ne.UserError, match="rope_freqs.weight"):
            scaled_by(cfg, np.array(factors, np.float32))


# ---- what is refused
LLAMA = {"model_type": "llama", **SHAPE}
QWEN2 = {"model_type": "qwen2", **SHAPE}


@pytest.mark.parametrize("entries, words", [
    ({**LLAMA, "rope_scaling": dict(rope_type="dynamic", factor=2.0)}, "rope_type is dynamic"),
    ({**LLAMA, "rope_scaling": dict(rope_type="linear", factor=0)},
     "rope_factor: expected 0.001 to 1000000, found 0"),
    ({**LLAMA, "rope_scaling": dict(rope_type="linear", factor="2")}, "factor is '2'"),
    ({**LLAMA, "rope_scaling": dict(rope_type="linear")}, "factor is None"),
    ({**LLAMA, "rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "rope_low < rope_high"),
    ({**LLAMA, "rope_scaling": {**LLAMA3, "factor": math.inf}}, "factor is inf"),
    ({**LLAMA, "rope_scaling": {**YARN, "truncate": False}}, "truncate is false"),
    ({**LLAMA, "rope_scaling": {**YARN, "original_max_position_embeddings": -1}}, "rope_original"),
    ({**LLAMA, "sliding_window": 7}, "a Llama has none"),
    ({**LLAMA, "model_type": "mistral", "sliding_window": -1}, "sliding_window is -1"),
    ({**LLAMA, "model_type": "mistral", "sliding_window": "9"}, "sliding_window is '9'"),
    ({**QWEN2, **OF_QWEN, "max_window_layers": 1}, "layer_types are full_attention, sliding"),
    ({**QWEN2, **OF_QWEN, "layer_types": ["sliding_attention"]}, "1 entries, expected 3"),
    ({**QWEN2, "layer_types": ["linear_attention"] * 3}, "layer_types are linear_attention"),
    ({**QWEN2, "model_type": "qwen3", "attention_bias": True}, "attention_bias is True"),
    ({**LLAMA, "model_type": "gemma"}, "expected one of Llama, Mistral, Qwen2, Qwen3, found gemma"),
])
def test_a_model_that_would_compute_something_else_is_refused(entries, words):
    with pytest.raises(ne.UserError, match=words):
        llama_config(entries)


def test_defaults_are_those_of_transformers():
    """An entry that is missing or null means there what it means here."""
    transformers = needs("transformers")
    required = {"hidden_size": 256, "intermediate_size": 80, "num_hidden_layers": 2,
                "num_attention_heads": 64, "vocab_size": 512}
    for kind in FAMILIES:
        for more in {}, dict(num_key_value_heads=None), dict(sliding_window=None):
            if kind == "mistral" and "num_key_value_heads" in more:
                continue                     # transformers rejects it
            theirs = transformers.AutoConfig.for_model(kind, **required, **more)
            cfg = llama_config({"model_type": kind, **required, **more})
            assert cfg.n_kv_head == theirs.num_key_value_heads
            assert cfg.head_dim == getattr(theirs, "head_dim", None) or kind == "qwen2"
            assert cfg.seq_len == theirs.max_position_embeddings
            assert cfg.window == getattr(theirs, "sliding_window", None)
            assert cfg.norm_eps == theirs.rms_norm_eps
            assert cfg.tie_embeddings == theirs.tie_word_embeddings


def test_a_mixed_model_in_a_folder_is_one_line(models, tmp_path, capsys):
    """Like any other wrong entry of a config.json"""
    *_, folder = models["Qwen2, a window, yarn"]
    for name in "config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors":
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    change(tmp_path / "config.json", layer_types=["full_attention"] * 2 + ["sliding_attention"])
    refused(capsys, "import", tmp_path, tmp_path / "b.bin", words=["layer_types", "for all layers"])
    assert not (tmp_path / "b.bin").exists()
