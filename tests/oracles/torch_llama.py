"""The forward pass of a Llama with the parts of Mistral, Qwen2 and Qwen3, in PyTorch and float64,
slow and literal.  transformers computes norms, softmax and RoPE in float32, whatever its dtype."""
import math

import torch
import torch.nn.functional as F


def rmsnorm(x, gain, eps):
    return gain * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rotated(x, cos, sin):
    """x (B, heads, T, D), cos and sin (T, D / 2)"""
    low, high = x.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def logits(cfg, p, tokens, cos, sin):
    """(B, T, V) of head 0.     p: {name: tensor} of nanoeuler.Params, without empty ones"""
    B, T = tokens.shape
    H, G, D = cfg.n_head, cfg.n_kv_head, cfg.head_dim
    position = torch.arange(T)
    distance = position[:, None] - position
    hidden = (distance < 0) | (distance >= (cfg.window or T))
    x = p["wte"][tokens]
    for layer in range(cfg.n_layer):
        qkv = rmsnorm(x, p["attn_norm"][layer], cfg.norm_eps) @ p["qkv"][layer].T
        if cfg.qkv_bias:
            qkv = qkv + p["qkv_bias"][layer]
        q, k, v = qkv.view(B, T, H + 2 * G, D).transpose(1, 2).split([H, G, G], 1)
        if cfg.qk_norm:
            q = rmsnorm(q, p["q_norm"][layer], cfg.norm_eps)
            k = rmsnorm(k, p["k_norm"][layer], cfg.norm_eps)
        q, k = rotated(q, cos[:T], sin[:T]), rotated(k, cos[:T], sin[:T])
        k, v = (a.repeat_interleave(H // G, 1) for a in (k, v))
        scores = (q @ k.transpose(2, 3) / math.sqrt(D)).masked_fill(hidden, -math.inf)
        att = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, H * D)
        x = x + att @ p["attn_proj"][layer].T
        gate, up = (rmsnorm(x, p["mlp_norm"][layer], cfg.norm_eps) @ p["gate_up"][layer].T).chunk(
            2, -1)
        x = x + (F.silu(gate) * up) @ p["down"][layer].T
    head = p["wte"] if cfg.tie_embeddings else p["lm_head"][0]
    return rmsnorm(x, p["final_norm"], cfg.norm_eps) @ head.T
