"""SmolLM2-135M-Instruct, a model that nobody here made."""
from dataclasses import replace

import numpy as np
import pytest
from helpers import needs, run, slow
from models import llama_cpp, package, same_in_llama_cpp
from texts import TORTURE

import nanoeuler as ne
from nanoeuler_parts.chat.templates import chat_ids
from nanoeuler_parts.chat.jinja import render

QUESTION = "What is the capital of France?"


@pytest.mark.parametrize("weights", ["f32", slow("bf16"), "int8"])
def test_smollm_says_paris(weights, smollm, capsys):
    capsys.readouterr()
    run("generate", QUESTION, smollm[1], "--temperature", 0, "--weights", weights)
    assert capsys.readouterr().out == "The capital of France is Paris.\n"


@pytest.mark.slow
def test_smollm_agrees_with_transformers_and_tokenizers(smollm):
    """Weights by the gguf package, rows turned here, run by transformers; ids by tokenizers."""
    gguf, torch = package(), needs("torch")
    transformers, tokenizers = (needs(x) for x in ("transformers", "tokenizers"))
    f = gguf.GGUFReader(smollm[0])
    value = lambda key: f.fields[f"tokenizer.ggml.{key}"].contents()
    tokens = value("tokens")
    peer = tokenizers.Tokenizer(tokenizers.models.BPE(
        {t: k for k, t in enumerate(tokens)}, [tuple(m.split(" ")) for m in value("merges")]))
    steps = tokenizers.pre_tokenizers
    peer.pre_tokenizer = steps.Sequence([steps.Digits(True), steps.ByteLevel(False)])
    c = ne.read_checkpoint(str(smollm[1]))
    assert c.tokenizer.encode(TORTURE).tolist() == peer.encode(TORTURE).ids
    peer.add_special_tokens([t for t, k in zip(tokens, value("token_type")) if k != 1])
    asked = [("user", QUESTION)]
    ids = chat_ids(c.state.template, asked, c.state, c.tokenizer)
    text = render(c.state.template, asked, c.state)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert peer.encode(text).ids == ids
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
        rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=100000.0))
    there = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
             "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
             "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
             "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    weights = {}
    for t in f.tensors:
        w = gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32)
        w = torch.tensor(w.reshape(*t.shape.tolist()[::-1]))
        _, l, kind, *_ = [*t.name.split("."), "", ""]
        if kind in ("attn_q", "attn_k"):     # rows 2i, 2i + 1 become i, i + D/2
            w = torch.cat([h[half::2] for h in w.split(64) for half in (0, 1)])
        weights[f"model.layers.{l}.{there[kind]}.weight" if kind in there else {
            "token_embd.weight": "model.embed_tokens.weight",
            "output_norm.weight": "model.norm.weight"}[t.name]] = w
    theirs = transformers.LlamaForCausalLM(config)
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert missing in ([], ["lm_head.weight"]) and not unexpected
    theirs.tie_weights()
    ids += c.tokenizer.encode("The capital of France is Paris. It lies on the Seine.").tolist()
    with torch.no_grad():
        want = theirs(torch.tensor([ids])).logits[0].numpy()
    decoder = ne.Decoder(c.cfg, c.flat)
    got = np.array([decoder.step(t).copy() for t in ids])
    assert want.std() > 1 and np.abs(got - want).max() < 1e-3
    many = ne.Model(replace(c.cfg, seq_len=len(ids)), c.flat).logits(np.array([ids], np.int32))
    assert np.abs(many[0, 0] - want).max() < 1e-3


def test_smollm_in_llama_cpp(smollm, tmp_path):
    llama_cpp()
    run("export", smollm[1], "--gguf", tmp_path / "a.gguf")
    same_in_llama_cpp(ne.read_checkpoint(str(smollm[1])), tmp_path / "a.gguf", TORTURE,
                      "Once upon a time")
