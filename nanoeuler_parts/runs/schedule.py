"""What the optimizer does at each step: its learning rates, and which output heads learn.

`Schedule.hyper` calls `lr_at` and `hyper_at` of nanoeuler.py with the settings of a run.  Section
16 of nanoeuler.py explains Muon, and why a run with Muon begins with other parameters.
"""
import math

import numpy as np

from nanoeuler import (
    EMBEDDING_INIT, hyper_at, init_params, lr_at, MUON_SETTINGS, param_table, views,
)
from nanoeuler_parts.files.printing import counted

ON, OFF, ON_AGAIN = 0, 1, 2  # phases of the auxiliary heads

class Schedule:
    """The settings of the optimizer in each step of a run.     lr: peak learning rate of AdamW,
    at this width of the model"""

    def __init__(self, options, n_embd):
        self.options, self.width, self.lr = options, n_embd, options.lr * 128 / n_embd

    def hyper(self, step, n_steps):
        """The Hyper of the step after `step` others.  n_steps: of the run; infinite: not planned"""
        o = self.options

        def rate(highest):
            return lr_at(step, n_steps, highest, o.warmup, o.floor, o.cooldown)

        muon_settings = {}
        if o.optimizer == "muon":
            muon_settings = {name: getattr(o, name) for name in MUON_SETTINGS}
            muon_settings["muon_lr"] = rate(o.muon_lr)
        return hyper_at(step + 1, rate(self.lr), beta1=o.beta1, beta2=o.beta2, clip=o.clip,
                        weight_decay=o.weight_decay, **muon_settings)

    def phase(self, step, n_steps, before):
        """The phase of the auxiliary heads 1.. in the step after `step` others: ON, OFF or
        ON_AGAIN.  They help at the beginning.  A final tenth of the run (mtp_from = 0.9) lets them
        catch up with the finished model.  before: the phase of the last step.  A phase that has
        begun never ends earlier when the run becomes longer."""
        if math.isinf(n_steps):
            return before
        o, share = self.options, (step + 1) / n_steps
        return max(before, ON if share <= o.mtp_until else OFF if share <= o.mtp_from else ON_AGAIN)

    def rows(self):
        """The optimizer's rows of the printed table"""
        o, of_adamw = self.options, f"lr {self.lr:.2g}"
        of_adamw += f" (--lr {o.lr:g} x 128 / width {self.width})" if self.width != 128 else ""
        decay = f"linear in the last {100 * o.cooldown:g} %" if o.cooldown else "cosine"
        of_both = (f"warm-up {counted(o.warmup, 'step')}, {decay} to {o.floor:g} of the peak, "
                   f"weight decay {o.weight_decay:g}, clip {o.clip:g}, seed {o.seed}")
        if o.optimizer == "adamw":
            return [("AdamW", f"{of_adamw}, {of_both}")]
        return [("Muon", f"lr {o.muon_lr:.2g}, momentum {o.momentum:g}, for the layers' matrices"),
                ("AdamW", f"{of_adamw}, embedding lr {self.lr * o.embedding_lr:.2g}, for all other "
                          f"parameters"),
                ("both", of_both)]

def initial_params(cfg, options):
    """Parameters (N,) float32 before the first step, with the changes for Muon"""
    flat = init_params(cfg, options.seed)
    if options.optimizer == "muon":
        p = views(flat, param_table(cfg))
        p.wte[:] *= np.float32(EMBEDDING_INIT)
        for written in (p.attn_proj, p.down, p.lm_head):
            written[:] = 0
    return flat
