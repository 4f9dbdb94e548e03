"""The training loop."""
import math
import textwrap
import time

import numpy as np

from bpe import need, UserError
from nanoeuler import (
    EMBEDDING_INIT, for_terminal, hyper_at, init_params, loss_weights, lr_at, MUON_SETTINGS,
    param_table, views,
)
from nanoeuler_parts.checkpoint.state import State
from nanoeuler_parts.files.printing import MOST_SILENT
from nanoeuler_parts.runs.data import DataSet
from nanoeuler_parts.runs.engine import Engine
from nanoeuler_parts.runs.evaluation import evaluate
from nanoeuler_parts.runs.options import RunOptions

# ---- the training loop
ESTIMATE = 64        # held-out rows of a validation during the run, always the same rows
PLANNED_FROM = 5     # the step of a process after which the length of a run by minutes is planned
FEWEST = 8           # rows; a validation on fewer rows says little
ON, OFF, ON_AGAIN = 0, 1, 2  # phases of the auxiliary heads
FEWEST_STEPS = 10    # a shorter run whose length was not given in steps gets a note
WORSE = 1.01         # times the best validation; a worse one means that the model overfits

class Progress:
    """Measures the steps of a run in this process.  now: seconds, see `TrainingLoop.elapsed`
    step_time: mean seconds per step, including the log and later validations.  Step 1 and the first
    validation may include compilation.  Step 1 therefore counts only until step 2 is done, and the
    first validation does not count at all."""

    def __init__(self, now):
        self.steps, self.has_validated = 0, False
        self.printed = now                   # when the last line was printed

    def count_step(self, seconds, now):
        self.steps += 1
        if self.steps == 1:
            self.step_time, self.timed_from = seconds, now
        else:
            self.step_time = (now - self.timed_from) / (self.steps - 1)

    def count_validation(self, seconds):
        if self.steps and not self.has_validated:
            self.timed_from += seconds
            self.has_validated = True

    def is_due(self, step):
        """Is it time to plan the run again, and to print a line?  After step 5 of this process, and
        then after every step whose number is divisible by 20."""
        return self.steps == PLANNED_FROM or (self.steps > PLANNED_FROM and step % 20 == 0)

class TrainingLoop:
    """The steps of a training run.  The subclass `Run` (23) prepares the run.  `Run` also has
    three methods that are called here: `record` writes to the log, `sample_text` generates a
    sample, `save_if_possible` writes a checkpoint.  `Run` sets these attributes:"""
    model: Engine
    data: DataSet
    options: RunOptions      # `train` uses TrainOptions
    state: State
    B: int                   # rows of a batch, and T tokens per row
    T: int
    next: tuple              # the next batch: tokens (B, T), targets (P, B, T)
    lr: float                # peak learning rate of AdamW, at this width of the model
    out: str                 # name of the checkpoint
    began: float             # see `elapsed`
    updating: bool           # True while an update changes the parameters
    against_overfitting: str # advice for the note about overfitting

    line = "loss {loss:.3f}  {bits_per_byte:.3f} bits/byte"          # filled from a log record
    validates_first = False                  # before step 1?  With --init, yes
    R = 1                                    # rows that stay together in a batch; 2 in DPO
    needs_chat = False                       # should the model answer already?  In DPO, yes
    most_final = 1 << 19                     # held-out tokens of the final validation of a text

    def train(self, caught):
        """The training loop.  It ends after the last step, or after a step in which a signal came.
        caught: a list of the signals so far"""
        s, o, model, batches = self.state, self.options, self.model, self.data.batches
        self.progress = progress = Progress(self.elapsed())
        if s.step == 0 and self.validates_first:
            self.validate_midway()
        while s.step < (s.n_steps or math.inf) and not caught:
            began = time.perf_counter()
            tokens, targets = self.next                  # (B, T), (P, B, T)

            # The gradient of the loss: a forward and a backward pass for each micro-batch
            weight, measures = self.ce_weights(tokens, targets)          # (B, P)
            for b in range(0, self.B, s.micro_batch):
                rows = slice(b, b + s.micro_batch)
                model.gradient(tokens[rows], targets[:, rows], weight[rows])
            self.next = batches.take((s.step + 1) * self.B, self.B)      # a GPU computes meanwhile

            # The update: clip the gradient, then AdamW or Muon
            hyper = self.hyper()
            self.updating = True             # from here on, parameters may be those of step + 1
            losses, norm = model.update(hyper)
            ce = losses / np.maximum(1, (targets >= 0).sum((1, 2)))      # (P,)
            self.stop_if_not_finite(ce, norm)
            s.step, self.updating = s.step + 1, False    # step and parameters agree again
            s.tokens_seen = s.step * tokens.size

            # The log; every 20 steps, or after 10 seconds, a printed line
            seconds = time.perf_counter() - began
            r = self.log_entry(ce, norm, hyper, weight, seconds) | measures      # DPO has its loss
            self.record(**r)
            progress.count_step(seconds, self.elapsed())
            if progress.is_due(s.step) or progress.steps < PLANNED_FROM:
                self.plan_if_open(progress.step_time)
            due = progress.is_due(s.step) or s.step == s.n_steps
            if due or self.elapsed() - progress.printed > MOST_SILENT:
                progress.printed = self.elapsed()
                self.report(r, progress.step_time)

            # Validation and checkpoints; after the last step, `Run.go` makes both
            if s.step != s.n_steps:
                if s.step % o.eval_every == 0:
                    self.validate_midway()
                if s.step % o.save_every == 0:
                    self.save_if_possible()

    def stop_if_not_finite(self, ce, norm):
        """Ends the run if a loss or the norm of the gradient is not finite."""
        if not (math.isfinite(norm) and np.isfinite(ce).all()):
            raise UserError(f"step {self.state.step + 1}: {self.model.first_bad_tensor()}; the run "
                            f"stops here, {self.out} is unchanged; start again with a lower --lr "
                            f"and another --out")

    def log_entry(self, ce, norm, hyper, weight, seconds):
        """The log record of the step that has just ended.
        ce (P,): mean loss of each head; weight (B, P), from `ce_weights`"""
        s, data = self.state, self.data
        n_read = data.batches.n_read((s.step - 1) * self.B, self.B)      # without padding
        trained = weight.any(0)              # (P,): heads with a weight
        return {"step": s.step, "loss": ce[0], "heads": ce[trained].tolist(), "lr": hyper.lr,
                "norm": norm, "bits_per_byte": ce[0] / math.log(2) / data.bytes_per_token,
                "ms": 1e3 * seconds, "tokens_per_s": n_read / seconds, "n_steps": s.n_steps}

    def plan_if_open(self, step_time):
        """Plans the length of a run that trains for minutes, until its last tenth begins."""
        s = self.state
        in_last_tenth = s.n_steps and s.step > 0.9 * s.n_steps
        if not self.data.steps and not in_last_tenth:
            self.plan(step_time)

    def validate_midway(self):
        """Estimates the loss of held-out text, samples a text, and prints and records both."""
        s, began = self.state, self.elapsed()
        estimate, sample = self.validate(ESTIMATE), self.sample_text(40)
        self.progress.count_validation(self.elapsed() - began)
        self.record(step=s.step, sample=sample)
        said = textwrap.indent(for_terminal(sample.strip("\n")), "    ")
        print(f"step {s.step:>5}  validation {estimate} (estimate)", *filter(None, [said]),
              sep="\n", flush=True)
        self.compare(s.bits_per_byte)

    def hyper(self):
        """The Hyper of the next step."""
        o, s = self.options, self.state

        def rate(highest):
            n_steps = s.n_steps or math.inf  # not planned yet
            return lr_at(s.step, n_steps, highest, o.warmup, o.floor, o.cooldown)

        muon_settings = {}
        if o.optimizer == "muon":
            muon_settings = {name: getattr(o, name) for name in MUON_SETTINGS}
            muon_settings["muon_lr"] = rate(o.muon_lr)
        return hyper_at(s.step + 1, rate(self.lr), beta1=o.beta1, beta2=o.beta2, clip=o.clip,
                        weight_decay=o.weight_decay, **muon_settings)

    def ce_weights(self, tokens, targets):
        """d loss / d (summed CE of head k of sequence b), (B, P), and more values for the log."""
        mtp_weight = 0.0 if self.heads_are_off() else self.options.mtp_weight
        return np.tile(loss_weights(targets, mtp_weight), (self.B, 1)), {}

    def heads_are_off(self):
        """Are the auxiliary heads 1.. switched off in the next step?  They help at the beginning.
        A final tenth of the run (mtp_from = 0.9) lets them catch up with the finished model.
        A phase that has begun never ends earlier when `plan` finds that the run becomes longer."""
        o, s = self.options, self.state
        if s.n_steps is not None:
            share = (s.step + 1) / s.n_steps
            phase = ON if share <= o.mtp_until else OFF if share <= o.mtp_from else ON_AGAIN
            s.mtp_phase = max(s.mtp_phase, phase)
        return s.mtp_phase == OFF

    def validate(self, rows=None):
        """Measures held-out text; rows: how many of its rows, None: all.  Returns the
        result as text."""
        s = self.state
        measured = evaluate(self.model, *self.data.validation, rows, s.micro_batch)
        need(math.isfinite(measured),
             f"step {s.step}: the validation loss is {measured} bits/byte; {self.out} is "
             f"unchanged; start again with a lower --lr and another --out")
        s.bits_per_byte = measured
        self.record(step=s.step, val_bits_per_byte=s.bits_per_byte, windows=rows)
        return f"{s.bits_per_byte:.4f} bits/byte"

    def compare(self, estimate):
        """Records the best estimate so far; with --keep-best, it also saves that model.  All
        estimates use the same rows, so they are comparable."""
        s = self.state
        if s.best is None or estimate < s.best:
            s.best, s.best_step = estimate, s.step
            if self.options.keep_best:
                self.save_if_possible(best=True)

    def compare_last(self):
        """Runs after the last `validate`.  Returns a note if an earlier model was clearly better,
        else ""."""
        s, held_out = self.state, self.data.validation
        n, estimate = len(held_out.tokens), s.bits_per_byte
        if n > ESTIMATE:                     # the last validation took all rows: not comparable
            estimate = evaluate(self.model, *held_out, ESTIMATE, s.micro_batch)
        self.compare(estimate)
        return self.note_of_end(n, estimate)

    def note_of_end(self, n, estimate):
        """A note if the model overfits, else "".  estimate: the last one, of n held-out rows"""
        s = self.state
        if n < FEWEST or estimate <= WORSE * s.best:
            return ""
        return (f"the best validation was {s.best:.4f} bits/byte, at step {s.best_step:,}; the "
                f"same rows now have {estimate:.4f}: the model overfits; use "
                f"{self.against_overfitting}")

    def plan(self, step_time):
        """Sets n_steps to as many steps as fit into the remaining minutes; step_time: seconds per
        step.  The last validation takes part of that time, see `final_rows`.  Before PLANNED_FROM
        steps are measured, this only ends a run whose minutes are over."""
        s = self.state
        left = (60 * self.options.minutes - self.elapsed()) / step_time      # in steps
        if self.progress.steps >= PLANNED_FROM:
            check = self.most_rows() / (3 * self.B)      # in steps: forward is a third of a step
            in_part = (3 * left - s.step) / 4            # solves n + (s.step + n) / 3 = left
            s.n_steps = s.step + max(0, int(max(left - check, in_part)))
        elif left <= 0:
            s.n_steps = s.step

    def most_rows(self):
        """The largest number of held-out rows of the final validation: all, or rows of `most_final`
        tokens in all, spread evenly over a larger part"""
        n, T = self.data.validation.tokens.shape
        return min(n, max(1, self.most_final // T))

    def final_rows(self):
        """The number of held-out rows of the final validation: `most_rows`, but in a run by minutes
        at most as many as were trained on.  A forward pass takes a third of a step, so the
        validation then takes at most a quarter of the minutes, also on a slow machine."""
        most = self.most_rows()
        return most if self.data.steps else max(1, min(most, self.state.n_steps * self.B))

    def report(self, r, step_time):
        """Prints the line of a step; r: its log record."""
        s = self.state
        left = int((s.n_steps - s.step) * step_time) if s.n_steps else 0
        print(f"step {s.step:>5}/{s.n_steps or '?'}  {self.line.format(**r)}  lr {r['lr']:.1e}"
              f"  |g| {r['norm']:.2f}  {r['ms']:.0f} ms  {r['tokens_per_s'] / 1e3:.1f}k tok/s  "
              f"ETA {left // 60}:{left % 60:02d}", flush=True)

    def elapsed(self):
        """Seconds of training, over all resumed parts.  Only steps, validations and saves count,
        and not the time in which data are read or kernels are compiled before the first step."""
        return time.perf_counter() - self.began

    def initial(self, cfg):
        """Initial parameters, with the changes for Muon that section 16 describes."""
        flat = init_params(cfg, self.options.seed)
        if self.options.optimizer == "muon":
            p = views(flat, param_table(cfg))
            p.wte[:] *= np.float32(EMBEDDING_INIT)
            for written in (p.attn_proj, p.down, p.lm_head):
                written[:] = 0
        return flat
