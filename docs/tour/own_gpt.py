# A transformer in NumPy: forward, backward, training and sampling.  docs/tour/12_own_gpt.md shows
# all of this file and explains it.  It takes two to four minutes on one core:
#
#     OPENBLAS_NUM_THREADS=1 python docs/tour/own_gpt.py

import re
import numpy as np

text = open("data/shakespeare.txt", encoding="utf-8").read()
letters, ids = np.unique(list(text), return_inverse=True)
seen, held_out = np.split(ids, [len(ids) * 9 // 10])

V, C, F, L, H, T = len(letters), 128, 256, 3, 4, 64
SHAPES = {"wte": (V, C), "qkv": (L, 3 * C, C), "attn_proj": (L, C, C),
          "gate_up": (L, 2 * F, C), "down": (L, C, F), "lm_head": (V, C)}

def parameters(dtype):                           # each tensor, and zeros for its gradient
    rng = np.random.default_rng(1)
    return {name: np.array([rng.normal(0, shape[-1] ** -0.5, shape), np.zeros(shape)], dtype)
            for name, shape in SHAPES.items()}

def linear(x, w):                                # w[0]: the matrix, w[1]: its gradient
    def back(dy):
        w[1] += np.tensordot(dy, x, ([0, 1], [0, 1]))
        return dy @ w[0]
    return x @ w[0].T, back

def rmsnorm(x):                                  # without a gain
    rstd = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    u = x * rstd
    return u, lambda du: rstd * (du - u * (du * u).mean(-1, keepdims=True))

def swiglu(x, gate_up, down):
    rows, back_in = linear(x, gate_up)
    gate, up = np.split(rows, 2, axis=-1)
    s = 1 / (1 + np.exp(-gate))
    y, back_out = linear(gate * s * up, down)
    def back(dy):
        d = back_out(dy)
        dgate, dup = d * up * s * (1 + gate * (1 - s)), d * gate * s
        return back_in(np.concatenate([dgate, dup], -1))
    return y, back

def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)

def rope(x, sign=1):                             # sign -1: the rotation back
    angle = np.arange(x.shape[2])[:, None] * 10_000 ** (-np.arange(0, C // H, 2) / (C // H))
    cos, sin = np.cos(angle).astype(x.dtype), sign * np.sin(angle).astype(x.dtype)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

def attention(x, qkv, proj):
    B, t, D, scale = *x.shape[:2], C // H, (C // H) ** -0.5
    rows, back_in = linear(x, qkv)
    q, k, v = rows.reshape(B, t, 3, H, D).transpose(2, 0, 3, 1, 4)       # each (B, H, t, D)
    q, k = rope(q), rope(k)
    scores = np.where(np.tri(t, dtype=bool), q @ k.swapaxes(2, 3) * scale, -np.inf)
    P = softmax(scores)
    y, back_out = linear((P @ v).swapaxes(1, 2).reshape(B, t, C), proj)
    def back(dy):
        do = back_out(dy).reshape(B, t, H, D).swapaxes(1, 2)
        dP, dv = do @ v.swapaxes(2, 3), P.swapaxes(2, 3) @ do
        dS = P * (dP - (dP * P).sum(-1, keepdims=True)) * scale
        dq, dk = rope(dS @ k, -1), rope(dS.swapaxes(2, 3) @ q, -1)
        return back_in(np.stack([dq, dk, dv]).transpose(1, 3, 0, 2, 4).reshape(B, t, 3 * C))
    return y, back

def step(x, part, *weights):
    u, norm_back = rmsnorm(x)
    y, part_back = part(u, *weights)
    return x + y, lambda dx: dx + norm_back(part_back(dx))

def forward(p, tokens):                          # tokens (B, t), logits (B, t, V)
    x, backs = p["wte"][0, tokens], []
    for l in range(L):
        for part, *names in (attention, "qkv", "attn_proj"), (swiglu, "gate_up", "down"):
            x, back = step(x, part, *(p[name][:, l] for name in names))
            backs.append(back)
    u, norm_back = rmsnorm(x)
    logits, head_back = linear(u, p["lm_head"])
    def backward(d):                             # from the gradient of the logits to all others
        for back in [head_back, norm_back, *backs[::-1]]:
            d = back(d)
        np.add.at(p["wte"][1], tokens, d)
    return logits, backward

def loss_and_gradient(p, tokens, targets):
    for w in p.values():
        w[1] = 0
    logits, backward = forward(p, tokens)
    probs, truth = softmax(logits), np.eye(V, dtype=logits.dtype)[targets]
    backward((probs - truth) / targets.size)
    return -np.log((probs * truth).sum(-1)).mean()

def check(h=1e-6):
    p, rng = parameters(np.float64), np.random.default_rng(2)
    batch = ids[:24].reshape(2, 12), ids[1:25].reshape(2, 12)
    for name, w in p.items():
        direction = rng.normal(size=w[0].shape)
        loss_and_gradient(p, *batch)
        slope, losses, values = (w[1] * direction).sum(), [], w[0].copy()
        for s in h, -h:
            w[0] = values + s * direction
            losses.append(loss_and_gradient(p, *batch))
        w[0] = values
        print(f"{name:<9} {slope:9.6f} {(losses[0] - losses[1]) / (2 * h):9.6f}")

check()

def train(p, n_steps, B=16, lr=0.005):
    rng, moments = np.random.default_rng(1), [np.zeros_like(w) for w in p.values()]
    for t in range(1, n_steps + 1):
        at = rng.integers(0, len(seen) - T, B)[:, None] + np.arange(T)
        loss = loss_and_gradient(p, seen[at], seen[at + 1])
        rate = lr * min(t / 50, 1) * (1 - t / n_steps)
        for (W, dW), (m, v) in zip(p.values(), moments):
            m += 0.1 * (dW - m)
            v += 0.05 * (dW * dW - v)
            W -= rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
        yield t, loss

def write(p, n, temperature=0.7):
    rng, out = np.random.default_rng(1), [0]     # letter 0 is the end of a line
    for _ in range(n):
        logits, _ = forward(p, np.array([out[-T:]]))
        ends = softmax(logits[0, -1].astype(float) / temperature).cumsum()
        out.append(int(np.searchsorted(ends, rng.random() * ends[-1], side="right")))
    return "".join(letters[out[1:]])

def held_out_bits(p):                            # per letter
    windows = np.arange(0, len(held_out) - T, 4 * T)[:, None] + np.arange(T)
    losses = [loss_and_gradient(p, held_out[at], held_out[at + 1])
              for at in np.array_split(windows, 20)]
    return np.mean(losses) / np.log(2)

if __name__ == "__main__":
    model = parameters(np.float32)
    for t, loss in train(model, 2400):
        if t in (1, 100) or t % 400 == 0:
            print(f"step {t:4}: loss {loss:.2f}")
    print(f"{held_out_bits(model):.2f} bits per letter of held-out text")
    sample = write(model, 1000)
    words = re.findall("[A-Za-z']+", sample)
    known = np.isin(words, re.findall("[A-Za-z']+", text)).mean()
    print(f"{known:.0%} of the {len(words)} words in the sample occur in Shakespeare")
    print(sample[:400])
