"""The model in plain NumPy, float64, slow and literal: what the ops are held against.

Every function takes and returns arrays; nothing is done in place, blocked or fused.  Gradients are
written from the matrix calculus, with the whole T x T matrix and softmax's Jacobian in full.
"""
import math

import numpy as np


def rmsnorm(x, w, eps):
    return w * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def rmsnorm_backward(dy, x, w, eps):
    """dx, dw.   y_c = w_c x_c r,   dy_c / dx_j = w_c (r [c = j] - x_c x_j r^3 / C)"""
    dx, C = np.zeros_like(x), x.shape[-1]
    for t in range(len(x)):
        r = 1 / math.sqrt((x[t] * x[t]).mean() + eps)
        jacobian = w[:, None] * (r * np.eye(C) - np.outer(x[t], x[t]) * r ** 3 / C)
        dx[t] = dy[t] @ jacobian
    return dx, (dy * rmsnorm(x, np.ones(C), eps)).sum(0)


def rope(x, theta, sign=1):
    """x (T, heads, D): the pair (i, i + D/2) as a complex number, times e^(i angle)."""
    T, _, D = x.shape
    angle = np.arange(T)[:, None] * theta ** (-np.arange(0, D, 2) / D)
    z = (x[..., :D // 2] + 1j * x[..., D // 2:]) * np.exp(1j * sign * angle)[:, None]
    return np.concatenate([z.real, z.imag], -1)


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def split_heads(qkv, H, G, D):
    """q (T, H, D), k and v (T, G, D) of rows (T, (H + 2 G) D)."""
    T = len(qkv)
    return np.split(qkv.reshape(T, H + 2 * G, D), [H, H + G], axis=1)


def attention(qkv, H, G, D, window=1 << 20):
    """o (T, H D) and the probabilities (H, T, T).  Token t attends to the last `window` tokens."""
    q, k, v = split_heads(qkv, H, G, D)
    T, o, probs = len(qkv), np.zeros((len(qkv), H, D)), np.zeros((H, len(qkv), len(qkv)))
    seen = np.tril(np.ones((T, T), bool))
    seen &= ~np.tril(seen, -window)
    for h in range(H):
        g = h // (H // G)
        scores = q[:, h] @ k[:, g].T / math.sqrt(D)
        probs[h] = softmax(np.where(seen, scores, -np.inf))
        o[:, h] = probs[h] @ v[:, g]
    return o.reshape(T, H * D), probs


def attention_backward(do, qkv, H, G, D, window=1 << 20):
    """d qkv (T, (H + 2 G) D)."""
    q, k, v = split_heads(qkv, H, G, D)
    T, probs, do = len(qkv), attention(qkv, H, G, D, window)[1], do.reshape(len(qkv), H, D)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for h in range(H):
        g, ds = h // (H // G), np.zeros((T, T))
        for t in range(T):
            p = probs[h, t]
            ds[t] = (np.diag(p) - np.outer(p, p)) @ (v[:, g] @ do[t, h]) / math.sqrt(D)
        dq[:, h] = ds @ k[:, g]
        dk[:, g] += ds.T @ q[:, h]
        dv[:, g] += probs[h].T @ do[:, h]
    return np.concatenate([dq, dk, dv], 1).reshape(T, -1)


def silu(z):
    return z / (1 + np.exp(-z))


def swiglu(gate_up):
    gate, up = np.split(gate_up, 2, -1)
    return silu(gate) * up


def swiglu_backward(dy, gate_up):
    gate, up = np.split(gate_up, 2, -1)
    s = 1 / (1 + np.exp(-gate))
    return np.concatenate([dy * up * (s + gate * s * (1 - s)), dy * silu(gate)], -1)


def cross_entropy(logits, targets):
    """Summed loss in nats and its gradient; rows whose target is -1 count for nothing."""
    loss, grad = 0.0, np.zeros_like(logits)
    for t, y in enumerate(targets):
        if y >= 0:
            p = softmax(logits[t])
            loss -= math.log(p[y])
            grad[t] = p - np.eye(len(p))[y]
    return loss, grad


def forward(cfg, p, tokens, stored=lambda x: x):
    """tokens (T,) -> the residual stream after each of the 2L steps, and the logits (P, T, V).
    stored: what keeping them does to numbers between ops"""
    H, G, D, T = cfg.n_head, cfg.n_kv_head, cfg.head_dim, len(tokens)
    x = [p.wte[tokens].astype(float)]
    for l in range(cfg.n_layer):
        y = stored(rmsnorm(x[-1], p.attn_norm[l], cfg.norm_eps))
        qkv = stored(y @ p.qkv[l].T).reshape(T, -1, D)
        qkv[:, :H + G] = stored(rope(qkv[:, :H + G], cfg.rope_theta))
        att = stored(attention(qkv.reshape(T, -1), H, G, D)[0])
        x.append(x[-1] + stored(att @ p.attn_proj[l].T))
        y = stored(rmsnorm(x[-1], p.mlp_norm[l], cfg.norm_eps))
        y = stored(swiglu(stored(y @ p.gate_up[l].T)))
        x.append(x[-1] + stored(y @ p.down[l].T))
    heads = [*p.lm_head] if not cfg.tie_embeddings else [p.wte, *p.lm_head]
    y = rmsnorm(x[-1], p.final_norm, cfg.norm_eps)
    return np.array(x), np.array([y @ head.T for head in heads])


def adamw(p, g, m, v, decay, lr, beta1, beta2, eps, wd, t):
    """Loshchilov & Hutter 2019, algorithm 2; decay: which entries shrink.  New p, m, v."""
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    update = (m / (1 - beta1 ** t)) / (np.sqrt(v / (1 - beta2 ** t)) + eps)
    return p - lr * (update + wd * decay * p), m, v
