"""Explains a token: its alternatives, the guesses of the other heads, the Euler trajectory, and the
attention weights of a layer.

app.py calls this module for /api/explain.  Its methods return generator functions, which the
engine's thread resumes between two steps.  At each `yield`, the answers take a step.
"""
import numpy as np

import nanoeuler as ne
from nanoeuler_parts.chat.templates import rewind_to
from nanoeuler_parts.checkpoint.file import read_checkpoint
from nanoeuler_parts.kernels import compile_passes
from nanoeuler_parts.lora.files import merge_into
from nanoeuler_parts.serve.engine import likeliest
from nanoeuler_parts.serve.protocol import refuse_unless, token_text
from nanoeuler_parts.tools.lens import attention_weights, euler_steps

RIVALS, PIECE = 10, 64
LONGEST_TRAJECTORY = 512     # tokens: the forward pass of training takes them in one call
MOST_PRODUCTS = 1 << 33      # products of that call, which the answers of others wait for
LONGEST_ATTENTION = 64       # tokens: each head has as many weights as the square of this


class Explainer:
    """Uses a decoder with its own KV cache, so that no explanation truncates the KV cache of an
    answer.  speaker: nanoeuler.Speaker     file: its checkpoint
    adapter: its AdapterFile, or None.  It is the one of the decoder, also if its folder changes"""

    def __init__(self, speaker, file, adapter=None):
        self.speaker, self.file, self.adapter = speaker, file, adapter
        self.decoder, self.model = None, None            # created on first use
        self.client = ""                     # whose tokens the decoder holds
        self.vocab = speaker.tokenizer.vocab

    def check(self, ids, most):
        V = len(self.vocab)
        refuse_unless(isinstance(ids, list) and 0 < len(ids) <= most and
                      all(type(i) is int and 0 <= i < V for i in ids),
                      f"expected 1 to {most:,} token ids from 0 to {V - 1}", "tokens")

    def named(self, token):
        return {"id": token, "text": token_text(self.vocab, token), "bytes": [*self.vocab[token]]}

    def rivals(self, length, ids, chosen, client=""):
        """The RIVALS most probable tokens after ids, the probability and rank of `chosen`, and the
        guesses of the other heads for the tokens after it.  length: tokens of the KV cache
        client: whose request it is, since the time shows which ids the KV cache held already"""
        def work():
            if self.decoder is None:
                self.decoder = self.speaker.decoder.with_slots(1, length)
            if client != self.client:
                self.decoder.truncate(0)
                self.client = client
            rest = rewind_to(self.decoder, ids)
            while len(rest) > PIECE:
                self.decoder.read([ne.Part(0, rest[:PIECE], 0)])
                rest = rest[PIECE:]
                yield
            logits = self.decoder.read([ne.Part(0, rest, 1)])[0]
            p = np.exp(ne.log_softmax(logits))
            found = {"rivals": [{**self.named(i), "p": q} for i, q in likeliest(p, RIVALS)],
                     "guesses": []}
            if chosen is not None:
                found["chosen"] = {**self.named(chosen), "p": float(p[chosen]),
                                   "rank": 1 + int(np.count_nonzero(p > p[chosen]))}
            if self.decoder.heads:
                for z in self.decoder.guesses(0):
                    q = np.exp(ne.log_softmax(z))
                    i = int(q.argmax())
                    found["guesses"].append({**self.named(i), "p": float(q[i])})
            return found
        return work

    def prepare(self, gone=None):
        """Compiles the kernels of `trajectory` in another process, unless they are in Numba's
        cache."""
        compile_passes("f32")

    def load(self, gone):
        """Reads the weights for `trajectory`, unless they are loaded.  Loading and compiling are
        slow, so a worker runs them and not the engine's thread.  Raises a Refusal if the file now
        holds another model, since its weights would explain nothing."""
        if self.model is None:
            self.prepare()
            c, mine = read_checkpoint(self.file, moments=False), self.speaker
            if self.adapter:
                c = merge_into(c, self.adapter)
            same = c.cfg == mine.cfg and c.state == mine.state and c.tokenizer.vocab == self.vocab
            refuse_unless(same, f"{self.file} has changed since the server started; restart the "
                          f"server to load it")
            self.model = ne.Model(c.cfg, c.flat)

    def in_one_call(self):
        """Tokens that the forward pass reads in MOST_PRODUCTS: one per parameter and token"""
        return max(1, MOST_PRODUCTS // ne.n_params(self.model.cfg))

    def trajectory(self, ids, chosen):
        """The Euler steps x[s + 1] = x[s] + f(x[s]) at the last of ids.  Each step has |f| / |x|,
        the angle between x[s] and x[s + 1] in degrees, and the top 3 tokens of head 0 if the
        integration stopped there.  The forward pass of training computes them in float32.
        `load` must have run before."""
        def work():
            yield
            seen = ids[-min(LONGEST_TRAJECTORY, self.model.cfg.seq_len, self.in_one_call()):]
            steps = []
            for name, ratio, angle, p in euler_steps(self.model, np.array(seen, np.int32)):
                step = {"name": name, "top": [{**self.named(i), "p": q}
                                              for i, q in likeliest(p, 3)]}
                if name != "embedding":
                    step |= {"ratio": ratio, "angle": angle}
                if chosen is not None:
                    step["p"] = float(p[chosen])
                steps.append(step)
                yield
            return {"steps": steps, "seen": len(seen)}
        return work

    def attention(self, ids, layer):
        """The attention weights of a layer, by head, for the last LONGEST_ATTENTION of ids.  Row t
        of a head holds the weights of positions 0 to t.  `load` must have run before."""
        def work():
            yield
            seen = ids[-min(LONGEST_ATTENTION, self.model.cfg.seq_len, self.in_one_call()):]
            weights = attention_weights(self.model, np.array(seen, np.int32), layer - 1)
            heads = [[[round(float(w), 4) for w in row[:t + 1]] for t, row in enumerate(head)]
                     for head in weights]
            return {"layer": layer, "layers": self.model.cfg.n_layer, "heads": heads,
                    "tokens": [self.named(i) for i in seen]}
        return work
