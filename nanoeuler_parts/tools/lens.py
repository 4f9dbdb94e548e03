"""The verb `lens`: shows the Euler steps of one prompt and the prediction after each step."""
import math

import numpy as np

from bpe import need
from nanoeuler import dims_of, DTYPE, Model, PRECISIONS
from nanoeuler_parts.chat.models import (
    AFTER_PROMPT, model_to_use, need_prompt_first, note_dropped,
)
from nanoeuler_parts.chat.templates import chat_ids
from nanoeuler_parts.chat.verbs import print_template_note, prompt_text
from nanoeuler_parts.checkpoint.file import read_checkpoint
from nanoeuler_parts.flags import arg, MODEL, TEXT

def euler_steps(model, tokens):
    """The Euler steps at a prompt's last token: x[i + 1] = x[i] + f_i(x[i]), i < 2L.

    Yields (name, |f| / |x|, the angle in degrees between x before and after, probabilities (V,))
    for the embedding and after each step.  Length and angle of the embedding are None.
    The probabilities are head 0's prediction if the integration stopped there:
    softmax(lm_head rmsnorm(x[i]))."""
    cfg, p = model.cfg, model.p
    model.logits(tokens[None])
    states = model.a.x[0, :, -1].astype(np.float64)      # (2L + 1, C)
    need(np.isfinite(states).all(), "the steps of this model are not finite; its weights are "
         "damaged or too large")
    lm_head = p.wte if cfg.tie_embeddings else p.lm_head[0]

    def said(x):
        z = lm_head @ (p.final_norm * x / math.sqrt((x * x).mean() + cfg.norm_eps))
        e = np.exp(z - z.max())
        return e / e.sum()

    yield "embedding", None, None, said(states[0])
    for i, (before, after) in enumerate(zip(states, states[1:])):
        norm = max(np.linalg.norm(before), 1e-300)       # x is 0 if all weights are
        length = np.linalg.norm(after - before) / norm
        cosine = before @ after / norm / max(np.linalg.norm(after), 1e-300)
        angle = math.degrees(np.arccos(np.clip(cosine, -1, 1)))          # rounding may exceed 1
        name = f"{i // 2 + 1:>3} {'swiglu' if i % 2 else 'attention'}"
        yield name, float(length), angle, said(after)

def attention_weights(model, tokens, l):
    """P (H, T, T) of layer l: row t of head h holds the weights with which position t mixes the
    values of positions 0 to t.  P = softmax(Q K^T / sqrt(D)), causal and in the model's window, as
    in `attention_forward`, from the queries and keys of one forward pass.     tokens (T,)"""
    size = dims_of(model.cfg)
    model.logits(tokens[None])
    rows = model.host(model.a.qkv[0, l]).astype(np.float64)          # q and k are rotated already
    T = len(rows)
    q = rows[:, :size.HD].reshape(T, size.H, size.D)
    k = rows[:, size.HD:size.HD + size.G * size.D].reshape(T, size.G, size.D)
    k = k.repeat(size.H // size.G, axis=1)   # each key serves H / G query heads
    scores = np.einsum("thd,shd->hts", q, k) / math.sqrt(size.D)
    distance = np.arange(T)[:, None] - np.arange(T)          # of a query's position from a key's
    scores[:, (distance < 0) | (distance >= (model.cfg.window or T))] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)

def lens(prompt, file=None, plain=False):
    """`lens`: prints the Euler steps at the prompt's last token.  A chat model's prompt is encoded
    in its template, so that the last token is the one before the answer, unless it is `plain`."""
    need_prompt_first(prompt, file)
    file = model_to_use(file, AFTER_PROMPT)
    prompt = prompt_text(prompt)
    c = read_checkpoint(file, moments=False)
    tokens = c.tokenizer.encode_whole(prompt)
    need(len(tokens), "the prompt is empty; give at least one character")
    if c.state.kind == "chat" and not plain:
        print_template_note(c.state.template)
        asked = chat_ids(c.state.template, [("user", prompt)], c.state, c.tokenizer)
        tokens = np.array(asked, np.int32)
    note_dropped(len(tokens), c.cfg.seq_len)
    tokens = tokens[-c.cfg.seq_len:]
    Model.ready()
    model = Model(c.cfg, c.flat, dtype=PRECISIONS[DTYPE])

    def text(token):
        return repr(c.tokenizer.vocab[token].decode("utf-8", "backslashreplace"))

    print(f"after {text(tokens[-1])}     |f|/|x|   angle   if the integration stopped here")
    for name, length, angle, said in euler_steps(model, tokens):
        likeliest = "  ".join(f"{text(t)} {said[t]:.0%}" for t in np.argsort(-said)[:3])
        numbers = " " * 17 if length is None else f"{length:>8.3f}{angle:>8.1f}\u00b0"
        print(f"{name:<14}{numbers}   {likeliest}")

def lens_verb(add):
    add(lens, TEXT, MODEL, arg("--plain", action="store_true",
        help="read the prompt as a text to continue, also if the model is a chat model, whose chat "
             "template would make it a question"))
