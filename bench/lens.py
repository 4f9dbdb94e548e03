"""The Euler steps of one prompt, made visible: python nanoeuler.py lens "To be or not"."""
import math

import numpy as np

import nanoeuler as ne


def lens(file, prompt):
    """The Euler view of a prompt's last token: x[i + 1] = x[i] + f_i(x[i]), i < 2L.

    For each step |f| / |x|, the angle between x before and after, and what head 0 would say if the
    integration stopped there: softmax(lm_head rmsnorm(x[i]))."""
    c = ne.read_checkpoint(file)
    tokens = c.tokenizer.encode(prompt)[-c.cfg.seq_len:]
    if len(tokens) == 0:
        raise ne.UserError("the prompt is empty; give at least one character")
    model = ne.Model(c.cfg, c.flat)
    model.logits(tokens[None])
    p = model.p
    head = p.wte if c.cfg.tie_embeddings else p.lm_head[0]
    text = lambda token: repr(c.tokenizer.vocab[token].decode("utf-8", "backslashreplace"))
    print(f"after {text(tokens[-1])}     |f|/|x|   angle   if the integration stopped here")
    for i, x in enumerate(model.a.x[0, :, -1].astype(np.float64)):
        z = head @ (p.final_norm * x / math.sqrt((x * x).mean() + c.cfg.norm_eps))
        q = np.exp(z - z.max())
        best = "  ".join(f"{text(t)} {q[t] / q.sum():.0%}" for t in np.argsort(-q)[:3])
        step = f"{'embedding':<14}{'':17}"
        if i:
            cosine = x @ old / np.linalg.norm(x) / np.linalg.norm(old)
            step = (f"{(i + 1) // 2:>3} {'attention' if i % 2 else 'swiglu':<10}"
                    f"{np.linalg.norm(x - old) / np.linalg.norm(old):>8.3f}"
                    f"{math.degrees(math.acos(min(1, max(-1, cosine)))):>8.1f}\u00b0")
        print(f"{step}   {best}")
        old = x
