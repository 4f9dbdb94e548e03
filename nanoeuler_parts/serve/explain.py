"""What stands behind a token: its rivals, what the heads guessed, and the Euler trajectory.

All of it is computed when somebody asks, in the engine's thread, between two steps of those who
speak.  Each function is a generator, which the engine goes on with: a `yield` lets others speak.
"""
import numpy as np

import nanoeuler as ne
from nanoeuler_parts.machine.kernels import fill_cache
from nanoeuler_parts.serve.engine import likeliest
from nanoeuler_parts.serve.protocol import refuse_unless, token_text
from nanoeuler_parts.tools.lens import euler_steps

RIVALS, PIECE = 10, 64
LONGEST_TRAJECTORY = 512     # tokens: the forward pass of training reads them at once


class Explainer:
    """A slot of its own, so that explanations take back nothing of what is being said."""

    def __init__(self, speaker, file):
        self.speaker, self.file = speaker, file
        self.decoder, self.model = None, None            # made when they are first needed
        self.vocab = speaker.tokenizer.vocab

    def check(self, ids, most):
        V = len(self.vocab)
        refuse_unless(isinstance(ids, list) and 0 < len(ids) <= most and
                      all(type(i) is int and 0 <= i < V for i in ids),
                      f"tokens is no list of 1 to {most:,} ids from 0 to {V - 1}", "tokens")

    def named(self, token):
        return {"id": token, "text": token_text(self.vocab, token), "bytes": [*self.vocab[token]]}

    def rivals(self, length, ids, chosen):
        """What could have stood where `chosen` does, after ids; and what the other heads guess of
        the tokens behind it."""
        def work():
            if self.decoder is None:
                self.decoder = self.speaker.decoder.with_slots(1, length)
            rest = ne.rewind_to(self.decoder, ids)
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
        """Compiles what `trajectory` runs, in another process, unless Numba's cache has it."""
        fill_cache(ne.gradient_kernels("f32"))

    def load(self, gone):
        """Reads the weights for `trajectory`, unless they are there.  This and compiling take a
        while, so both run beside the engine's thread.  The file may have been replaced since the
        server started: weights of another model would explain nothing."""
        if self.model is None:
            self.prepare()
            c, mine = ne.read_checkpoint(self.file, moments=False), self.speaker
            same = c.cfg == mine.cfg and c.state == mine.state and c.tokenizer.vocab == self.vocab
            refuse_unless(same, f"{self.file} has changed since the server started; restart the "
                          f"server to load it")
            self.model = ne.Model(c.cfg, c.flat)

    def trajectory(self, ids, chosen):
        """x[s + 1] = x[s] + f(x[s]) at the last of ids: |f| / |x|, the angle between both, and what
        head 0 would say if the integration stopped there.  In float32, by the forward pass of
        training.  `load` comes first."""
        def work():
            yield
            seen = ids[-min(LONGEST_TRAJECTORY, self.model.cfg.seq_len):]
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
