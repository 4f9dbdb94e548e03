"""The verb `dpo`: direct preference optimization on pairs of answers (Rafailov et al. 2023)."""
from dataclasses import fields
from functools import partial

import numpy as np

from bpe import need, note
from nanoeuler_parts.chat.templates import is_chatml
from nanoeuler_parts.files.printing import counted, with_progress
from nanoeuler_parts.flags import out, RUN
from nanoeuler_parts.runs.guards import NEW_RUN
from nanoeuler_parts.runs.options import options_class
from nanoeuler_parts.runs.start import launch_any
from nanoeuler_parts.tuning.sft import (
    ChecksColumns, CONTEXT, has_chatml, SftRun, start_argument,
)

def dpo_loss(ce, reference, beta):
    """loss = -log sigmoid(m),   m = beta (log pi(y)/ref(y) - log pi(y')/ref(y'))
    d loss / d CE(y) = beta sigmoid(-m) = -d loss / d CE(y')      Rafailov et al. 2023, eq. 7
    pi is the policy, ref the model at step 0;  y is the chosen response, y' the rejected one
    ce (2n,): -log pi, reference (2n,): -log ref, of y and y' in turn, summed over their tokens
    -> measures, means over the n pairs, and d loss / d CE (2n,)
    accuracy    the share of pairs with m > 0; a tie counts half
    chosen      the mean of log pi(y)/ref(y), nats per response.  If it is below 0, the chosen
                responses have become less probable"""
    with np.errstate(invalid="ignore"):      # for a NaN in ce; `train` then reports the step
        log_ratio = (reference - ce).reshape(-1, 2)      # log pi/ref of each y, y'
        margin = beta * (log_ratio[:, 0] - log_ratio[:, 1])
        slope = beta * np.exp(-np.logaddexp(0, margin)) / len(margin)
        measures = dict(loss=np.logaddexp(0, -margin).mean(),
                        accuracy=(np.sign(margin) + 1).mean() / 2,
                        margin=margin.mean(),
                        chosen=log_ratio[:, 0].mean())
    return measures, np.stack((slope, -slope), 1).ravel()

class ChecksPairs(ChecksColumns):
    answers = ["chosen", "rejected"]

DpoOptions = options_class("dpo", ChecksPairs)

class DpoRun(SftRun):
    """Direct preference optimization: the loop of `SftRun` on pairs of responses, with `dpo_loss`.
    The reference is the model at step 0.  It never changes.  So its cross-entropies are computed
    once, at step 0, and stored in the checkpoint.  No second model is needed."""
    verb = "dpo"
    Options = DpoOptions
    begins_with, made_by = "nanoeuler_chat.bin", "sft"
    larger_data = "data/preferences.jsonl"
    held_scope = "all held-out pairs"
    minimizes_bits = False
    overdone = "has learned the preferences of the training pairs", "how to write answers"
    answers = DpoOptions.answers
    R, needs_chat, rehearsing_lr = 2, True, DpoOptions.lr
    only_teaches = "dpo only teaches which of two answers is better"
    line = "loss {loss:.3f}  accuracy {accuracy:.0%}  margin {margin:.3f}  chosen {chosen:+.2f}"

    def read_data(self, start):
        o = self.options
        need(o.nll or "rehearse" not in o.given or not o.rehearse, "--rehearse: expected --nll "
             "above 0, the weight of old answers, found 0; add --nll 1, or use --rehearse 0")
        super().read_data(start)
        alike = [i for i, (e, _) in enumerate(self.encoded, 1) if e["chosen"] == e["rejected"]]
        n = len(self.encoded)
        need(len(alike) < n, f"{self.path}: chosen and rejected are the same in {n:,} of "
             f"{counted(n, 'pair')}, expected different answers; name other pairs with --data")
        if alike:
            note(f"{self.path}: chosen and rejected are the same in {len(alike):,} of "
                 f"{counted(n, 'pair')}, the first is pair {alike[0]:,}; these pairs show no "
                 f"preference")

    def template_for(self, examples, tokenizer):
        """The template in which the model learned to answer: its own if it is ChatML, else "",
        Alpaca's."""
        own = self.state.template
        return own if has_chatml(tokenizer) and is_chatml(own) else ""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        learned, tested = self.new_examples, self.data.responses
        if not self.state.reference:
            print("computing the log-probabilities of all pairs under the reference, once\n",
                  flush=True)
            ce = np.concatenate((self.all_losses(learned), self.all_losses(tested)))
            self.state.reference = ce.tolist()
        n = len(learned.rows)
        reference = np.array(self.state.reference, object)
        wanted = n + len(tested.rows)
        need(len(reference) == wanted and all(type(x) is float for x in reference),
             f"{self.out}: expected the reference of {wanted:,} responses, those of {self.path} "
             f"and of the validation, found {len(reference):,}; a version of NanoEuler that chose "
             f"other pairs may have begun this run; {NEW_RUN}")
        # -log ref of each row
        self.learned_reference = np.array(self.state.reference[:n])
        self.tested_reference = np.array(self.state.reference[n:])

    def losses(self, examples, rows):
        """-log pi of the responses in these rows, (B,), computed one micro-batch at a time."""
        ce, micro = [], self.state.micro_batch
        for b in with_progress(range(0, len(rows), micro), "reading pairs"):
            tokens, targets = examples.batch(rows[b:b + micro])
            ce.append(self.model.losses(tokens, targets[0]))
        return np.concatenate(ce)

    def all_losses(self, examples):
        return self.losses(examples, range(len(examples.rows)))

    def ce_weights(self, tokens, targets):
        """Runs an extra forward pass, because the weight of a row depends on both responses of its
        pair.  The option nll adds nll * mean(CE(y) / tokens of y) to the loss.  The mean is over
        the chosen responses and the answers of the old examples, which come last in a step."""
        o, learned, batches = self.options, self.new_examples, self.data.batches
        rows = batches.pick(self.step * self.B, self.B)
        if o.rehearse:
            rows, _ = rows
        n = len(rows)
        ce = self.losses(learned, rows)
        weight = np.zeros((self.B, len(targets)))        # heads 1.. get no weight
        measures, weight[:n, 0] = dpo_loss(ce, self.learned_reference[rows], o.beta)
        answers = [*range(0, n, 2), *range(n, self.B)]
        weight[answers, 0] += o.nll / len(answers) / (targets[0, answers] >= 0).sum(1)
        return weight, measures

    def rehearses(self, sets):
        return bool(sets) and self.options.nll > 0

    def against_forgetting(self):
        nll = self.options.nll
        return (f"{self.shorter()}, more pairs, or "
                f"{f'a larger --nll than {nll:g}' if nll else '--nll 1'}")

    def measure(self, rows=None):
        """Reports bits per byte of the chosen responses, and the loss of all held-out pairs."""
        text = super().measure(rows)
        ce = self.all_losses(self.data.responses)
        measures, _ = dpo_loss(ce, self.tested_reference, self.options.beta)
        self.write(step=self.state.step, **{f"val_{k}": v for k, v in measures.items()})
        return f"{self.line.format(**measures)}  {text} of the chosen answers"

def dpo_verb(add):
    default = "nanoeuler_dpo.bin"
    add(partial(launch_any, DpoRun, default), start_argument(DpoRun), out(default), *RUN,
        settings=fields(DpoOptions), shape=CONTEXT)
