"""Models that tests export, import and talk to, and how they are written to files."""
import json
from dataclasses import replace

import numpy as np
from helpers import TINY, needs, run

import nanoeuler as ne

SMALL = ne.PRESETS["small"]
CONFIGS = {
    "small": SMALL,
    "tied, other theta, eps and head size": replace(
        SMALL, tie_embeddings=True, rope_theta=123456.0, norm_eps=1e-3, head_dim=48, n_head=6,
        n_kv_head=3, n_embd=96, n_mtp=2),
    "one head, no grouping": replace(SMALL, n_head=2, n_kv_head=2, head_dim=64, n_mtp=1, n_layer=2,
                                     n_hidden=100, seq_len=65),
    "base, three layers of it": replace(ne.PRESETS["base"], vocab_size=512, n_layer=3)}
TINY_CONFIGS = {
    "grouped queries": TINY,
    "one head each, tied": replace(TINY, n_head=2, n_kv_head=2, tie_embeddings=True),
    "six heads on three, one output": replace(TINY, n_head=6, n_kv_head=3, n_mtp=1, head_dim=2),
    "longer than a block": replace(TINY, seq_len=45, head_dim=34, n_head=4, n_kv_head=1),
    "context of one": replace(TINY, seq_len=1),
    "odd context": replace(TINY, seq_len=7, tie_embeddings=True, n_mtp=1),
    "biases, norms of q and k, a window, scaled RoPE": replace(
        TINY, qkv_bias=True, qk_norm=True, window=3, rope_scaling="yarn", rope_original=4,
        rope_factor=2.0, rope_attention=1.2),
}
SPECIALS = ("</s>", "<|im_start|>", "<|im_end|>")
CHATML = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
          "message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
HELLO = [("user", "Hello  there"), ("assistant", "Hi."), ("user", "What is 12 + 345?\n")]


def tokens_of(cfg, n, seed=1):
    return np.random.default_rng(seed).integers(0, cfg.vocab_size, n).astype(np.int32)


def dicts(messages):
    return [dict(role=role, content=text) for role, text in messages]


def write(path, cfg, tokenizer, flat=None, **state):
    """A checkpoint of random weights whose logits are a few units apart."""
    if flat is None:
        flat = ne.init_params(cfg, 1)
        p = ne.views(flat, ne.param_table(cfg))
        for x in p[ne.OF_LAYERS]:
            x *= 2
        for gain in p[ne.VECTORS]:
            gain += 0.1 * np.random.default_rng(2).standard_normal(gain.shape, np.float32)
    ne.write_checkpoint(str(path), cfg, tokenizer, ne.State(**state), flat)
    return path


def as_folder(tmp_path, tokenizer, **config):
    """A good directory of Hugging Face with changes in its config.json."""
    path = write(tmp_path / "a.bin", replace(TINY, vocab_size=512, n_mtp=1), tokenizer)
    run("export", path, tmp_path / "hf", "--gguf", tmp_path / "a.gguf")
    change(tmp_path / "hf" / "config.json", **config)
    return tmp_path / "hf"


def change(path, **values):
    root = json.loads(path.read_text(encoding="utf-8"))
    root = {k: v for k, v in {**root, **values}.items() if v != "absent"}
    path.write_text(json.dumps(root), encoding="utf-8")


def greedy(c, prompt, n):
    ids = c.tokenizer.encode(prompt).tolist()
    return ids, list(ne.generate(ne.Decoder(c.cfg, c.flat), ids, n, None,
                                 ne.Sampling(temperature=0.0)))


def package():
    """The field's reader and writer of GGUF."""
    return needs("gguf")


def llama_cpp():
    """Compiled where it is installed, which takes some 15 minutes."""
    return needs("llama_cpp")


def same_in_llama_cpp(c, path, text, prompt, n=64):
    llama = llama_cpp().Llama(str(path), n_ctx=128, n_threads=2, verbose=False)
    has = {b for b in range(256) if c.tokenizer.encode(bytes([b])).size}     # it cuts at the others
    text = "".join(x for x in text.replace("\0", " ") if has.issuperset(x.encode()))
    assert llama.tokenize(text.encode(), add_bos=False) == c.tokenizer.encode(text).tolist()
    ids, want = greedy(c, prompt, n)
    got = llama.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0)
    assert [next(got) for _ in range(n)] == want
