"""Run: one training run, on a text.  `train` of nanoeuler.py is its loop.

A run has a Schedule (schedule.py), a Plan (plan.py), a RunLog (log.py), a DataSet (data.py) and a
model, which is any Engine (engine.py).  tuning/ has the runs of `sft` and `dpo`.
"""
import contextlib
import math
import os
import re
import shlex
import textwrap
import time
from dataclasses import replace

import numpy as np

import bpe
from bpe import need, note, printable, UserError
from nanoeuler import for_terminal, generate, loss_weights, Model, n_params, param_table, train
from nanoeuler_parts.chat.sampling import Sampling
from nanoeuler_parts.checkpoint.bundled import beside_program
from nanoeuler_parts.checkpoint.file import read_checkpoint, write_checkpoint
from nanoeuler_parts.files.corpora import files_in, open_text
from nanoeuler_parts.files.printing import counted, MOST_SILENT, names_in, print_table
from nanoeuler_parts.files.writing import output_may_fail, WriteError
from nanoeuler_parts.flags import typed
from nanoeuler_parts.runs.data import DataSet, Prefetched, TextBatches, Validation, Windows
from nanoeuler_parts.runs.evaluation import evaluate
from nanoeuler_parts.runs.guards import best_path, need_data, need_memory, NEW_RUN, state_of_model
from nanoeuler_parts.runs.log import RunLog
from nanoeuler_parts.runs.options import TrainOptions
from nanoeuler_parts.runs.plan import Plan, Progress
from nanoeuler_parts.runs.schedule import initial_params, OFF, Schedule
from nanoeuler_parts.runs.signals import signals_caught

ESTIMATE = 64        # held-out rows of a validation during the run, always the same rows
FEWEST = 8           # rows; a validation on fewer rows says little
FEWEST_STEPS = 10    # a shorter run whose length was not given in steps gets a note
WORSE = 1.01         # times the best validation; a worse one means that the model overfits

class Run:
    """One training run: model, data, clock, log and checkpoints.  `train` of nanoeuler.py calls the
    methods under "the loop", and `go` calls `train`.  Subclasses have other data and losses."""
    verb = "train"                           # on the command line
    product = "model"                        # what a run writes
    kind = ""                                # of the trained model: "chat", or that of --init
    Options = TrainOptions                   # the settings that flags set
    preset = "small"                         # the default preset
    begins_with, made_by = None, ""          # the default checkpoint to begin with, and its verb
    needs_chat = False                       # should that model answer already?  In DPO, yes
    only_teaches = ""                        # why it should
    keeps_template = False                   # of any chat model, also one that cannot be trained
    larger_data = ""                         # used instead of Options.data if it exists
    length_flag = "--minutes"                # sets the length if --steps does not
    R = 1                                    # rows that stay together in a batch; 2 in DPO
    line = "loss {loss:.3f}  {bits_per_byte:.3f} bits/byte"          # filled from a log record
    scope = "the whole held-out tail"        # of the final validation
    most_final = 1 << 19                     # held-out tokens of the final validation of a text
    # the end of the note that the model overfits
    against_overfitting = "fewer --steps or --minutes, or more text"
    is_updating = False                      # True while an update changes the parameters
    last_loss = math.inf                     # of the latest step, in nats
    caught = ()                              # the signals so far that ask the run to stop

    def __init__(self, out, start, options, engine=Model):
        """Prepares everything before the first step.  start: a Checkpoint of a run to resume, of a
        model to begin with, or of a shape alone (flat is None); engine: the class of the model"""
        self.out, self.options, self.engine = out, options, engine
        self.is_resumed = bool(start.state.options)      # `fresh` leaves options empty
        self.has_saved = self.is_resumed
        self.state = s = replace(start.state, options=options.written())
        self.validates_first = s.source_sha256 != "" and not self.kind       # with --init
        self.log = RunLog(out, self.data_file().split("\n"), options.log_to)

        # The data: a batch has B rows of T tokens, and the data may determine T
        self.read_data(start)
        self.T, self.old_context = self.row_length(start), start.cfg.seq_len
        self.B = self.rows_per_step()
        cfg = replace(start.cfg, seq_len=max(start.cfg.seq_len, self.T))
        self.data = self.load(cfg, start.tokenizer)      # compares text_sha256 with the data's
        self.tokenizer = self.data.tokenizer
        if self.tokenizer.vocab_size < cfg.vocab_size:   # a short text has fewer merges
            s.vocab_size = cfg.vocab_size
            cfg = replace(cfg, vocab_size=self.tokenizer.vocab_size)
        s.text_sha256 = self.data.sha256

        # The length and the optimizer
        self.schedule = Schedule(options, cfg.n_embd)
        self.plan = Plan(self.data.steps, getattr(options, "minutes", None), self.B,
                         self.data.validation.tokens.shape, self.most_final)
        if self.data.steps:                  # else `plan` sets the number
            s.n_steps = max(s.step, self.data.steps)

        # The model: nothing is compiled until everything above has been checked
        engine.ready(options)
        flat = self.initial(cfg) if start.flat is None else start.flat
        self.model = engine(cfg, flat, start.moments, options)
        self.batches = self.make_batches()
        self.print_settings()
        # One size for all passes: on a GPU the order of sums depends on the largest micro-batch
        s.micro_batch = self.model.micro_batch(self.B, options.micro_batch or s.micro_batch, self.T)

    def initial(self, cfg):
        """The parameters of a new model"""
        return initial_params(cfg, self.options)

    def make_batches(self):
        """The batches of the loop, the first of which is made here"""
        batches = Prefetched(self.data.batches)
        batches.prepare(self.step * self.B, self.B)
        return batches

    def set_option(self, name, value):
        """Changes a setting that follows from the data, and stores it for --resume."""
        setattr(self.options, name, value)
        self.state.options[name] = value

    def print_settings(self):
        cfg, o, T, steps = self.model.cfg, self.options, self.T, self.data.steps
        print_table(f"NanoEuler: {n_params(cfg):,} parameters, {self.model.device()}", [
            ("model", f"{counted(cfg.n_layer, 'layer')}, width {cfg.n_embd}, "
                      f"{cfg.n_head} query and {cfg.n_kv_head} key/value heads, "
                      f"SwiGLU {cfg.n_hidden}, "
                      f"{counted(cfg.n_mtp, 'output head')}"),
            *([("starts from", self.state.source)] if self.state.source else []),
            *([("context", f"{cfg.seq_len:,} tokens instead of {self.old_context:,}")]
              if self.state.source and cfg.seq_len > self.old_context else []),
            *self.data.table, ("batch", f"{self.B} x {T} = {self.B * T:,} tokens"),
            *self.schedule.rows(),
            ("length", counted(steps, "step") if steps else
                       f"{o.minutes:g} minute{'' if o.minutes == 1 else 's'}"),
            ("writes", f"{self.out} and {self.log.path}; Ctrl-C saves and stops"),
            *([("best model", self.shown(self.best_path(self.out)))] if o.keep_best else []),
            *self.log.sinks.rows])
        if steps and steps < o.warmup:
            note(f"the run ends after {counted(steps, 'step')}, within its warm-up of "
                 f"{o.warmup}, so the learning rate never falls; set a shorter one, for example "
                 f"--warmup {steps // 10}")

    # ---- the data
    def data_file(self):
        return self.data_path(self.options)

    @classmethod
    def data_path(cls, options):
        """The path of --data.  The default files may also lie beside the program."""
        shipped = options.data in (cls.larger_data, cls.Options.data)
        return beside_program(options.data) if shipped else options.data

    @classmethod
    def need_data(cls, data, out):
        """Rejects names that stand for no file, before anything is compiled."""
        for name in data.split("\n"):
            if os.path.isdir(name) or (re.search(r"[*?[]", name) and not os.path.exists(name)):
                files_in(name)               # a folder or a pattern
            else:
                need_data(name, out)

    @classmethod
    def digest_of(cls, data, options):
        """SHA-256 of the data of these names, as State.text_sha256"""
        return open_text(data, options.field, options.newlines, options.holdout).sha256

    def read_data(self, start):
        """Reads data that determine a batch's shape.  A text does not, so nothing is read here."""

    def row_length(self, start):
        """T, tokens per row of a batch: the length of the context, unless --init and --seq-len set
        a shorter row"""
        return self.options.row_len or start.cfg.seq_len

    def rows_per_step(self):
        """B, rows of a batch"""
        return self.R * max(1, round(self.options.batch / self.T / self.R))

    def load(self, cfg, tokenizer):
        """The DataSet of a text.  If `tokenizer` is None, a new one is trained on this text."""
        o, T, path = self.options, self.T, self.data_file()
        text = open_text(path, o.field, o.newlines, o.holdout)
        self.same_data(text.sha256)
        tokenizer = tokenizer or bpe.train(text.excerpt(), cfg.vocab_size, bpe.SPECIALS)
        end = tokenizer.specials.get(self.state.eos, -1)         # ends a document of a corpus
        text.encode(tokenizer, end, o.cuts, o.seed)
        try:
            batches = TextBatches(text.train, T, cfg.n_mtp, o.seed)
        except UserError as e:               # too few tokens
            raise UserError(f"{text.described()}: {e}") from None
        held_out = Validation(Windows(text.tail, T), Windows(text.tail, T, 1, -1, end),
                              text.tail_bytes)
        need(held_out.targets.n_valid > 0, f"{names_in(path)}: the held-out last "
             f"{o.holdout:.0%} has no token to predict; name a longer text with --data, or raise "
             f"--holdout")
        bytes_per_token = text.train_bytes / len(text.train)
        fewer = ""
        if tokenizer.vocab_size < cfg.vocab_size:
            fewer = f" instead of {cfg.vocab_size:,} (the text has no more pairs to merge)"
        table = [("text", f"{text.described()}, the last {o.holdout:.0%} held out"),
                 ("tokenizer", f"{tokenizer.vocab_size:,} tokens{fewer}, {bytes_per_token:.2f} "
                               f"bytes per token")]
        return DataSet(path=path, sha256=text.sha256, tokenizer=tokenizer, batches=batches,
                       validation=held_out, bytes_per_token=bytes_per_token, steps=o.steps,
                       table=table)

    def same_data(self, digest):
        """Returns the digest, after a check that a resumed run has the data it was started with.
        A fresh run has no text_sha256 yet, and accepts any data."""
        old = self.state.text_sha256 or digest
        need(digest == old, f"{names_in(self.data_file())} has changed: its sha256 is "
             f"{digest[:12]}, expected {old[:12]}; restore it, or {NEW_RUN}")
        return digest

    # ---- the loop: what `train` of nanoeuler.py calls
    @property
    def step(self):
        return self.state.step

    @step.setter
    def step(self, step):
        self.state.step = step

    @property
    def n_steps(self):
        return self.state.n_steps or math.inf            # infinite: not planned yet

    @property
    def micro_batch(self):
        return self.state.micro_batch

    def weights(self, tokens, targets):
        """d loss / d (summed CE of head k of sequence b), (B, P)"""
        weight, self.measures = self.ce_weights(tokens, targets)
        self.trained = weight.any(0)         # (P,): heads with a weight
        return weight

    def ce_weights(self, tokens, targets):
        """The `weights` of a batch, and more values for the log: DPO has its own loss"""
        s = self.state
        s.mtp_phase = self.schedule.phase(s.step, self.n_steps, s.mtp_phase)
        mtp_weight = 0.0 if s.mtp_phase == OFF else self.options.mtp_weight
        return np.tile(loss_weights(targets, mtp_weight), (self.B, 1)), {}

    def hyper(self, step):
        """The Hyper of the next step"""
        return self.schedule.hyper(step, self.n_steps)

    @contextlib.contextmanager
    def updating(self):
        """Within it, parameters may be those of the next step already: after an error, the run is
        not saved.  A GPU may still compute the gradient, so the next batch is made first."""
        self.batches.prepare((self.step + 1) * self.B, self.B)
        self.is_updating = True
        yield
        self.is_updating = False             # only without an error

    def record(self, losses, norm, hyper, seconds):
        """Writes the log of the step that has just ended.  Every 20 steps, or after 10 seconds,
        also prints a line.     losses (P,): mean cross-entropy of each head"""
        s, progress = self.state, self.progress
        self.need_finite(losses, norm)
        s.tokens_seen = s.step * self.B * self.T
        r = self.log_entry(losses, norm, hyper, seconds) | self.measures     # DPO has its loss
        self.write(**r)
        self.last_loss = r["loss"]
        progress.count_step(seconds, self.elapsed())
        if self.plan.is_open(s.step, s.n_steps, progress):
            s.n_steps = self.planned()
        due = progress.is_due(s.step) or s.step == s.n_steps
        if due or self.elapsed() - progress.printed > MOST_SILENT:
            progress.printed = self.elapsed()
            self.report(r, progress.step_time)

    def due(self, what):
        """Is it time to "validate", or to "save"?  After the last step, `go` does both."""
        every = {"validate": self.options.eval_every, "save": self.options.save_every}[what]
        return self.step != self.n_steps and self.step % every == 0

    def validate(self):
        """Estimates the loss of held-out text, samples a text, and prints and records both."""
        s, began = self.state, self.elapsed()
        estimate, sample = self.measure(ESTIMATE), self.sample_text(40)
        self.progress.count_validation(self.elapsed() - began)
        self.write(step=s.step, sample=sample)
        said = textwrap.indent(for_terminal(sample.strip("\n")), "    ")
        is_part = len(self.data.validation.tokens) > ESTIMATE
        print(f"step {s.step:>5}  validation {estimate}{' (estimate)' if is_part else ''}",
              *filter(None, [said]), sep="\n", flush=True)
        self.compare(s.bits_per_byte)

    def save(self, best=False):
        """Saves during the run.  If the file cannot be written, for example because the disk is
        full, the run continues until the next save.  With several GPUs, an error of another rank is
        not a WriteError and ends the run.  Returns whether it was saved."""
        s = self.state
        try:
            self.checkpoint(best)
        except WriteError as e:
            later = "when a validation is better than that of the file" if best else (
                f"in {counted(self.options.save_every, 'step')}")
            note(f"step {s.step} is not saved: {e}; the run continues and saves again {later}")
            return False
        return True

    # ---- what these methods use
    def need_finite(self, losses, norm):
        """Ends the run if a loss or the norm of the gradient is not finite."""
        if not (math.isfinite(norm) and np.isfinite(losses).all()):
            raise UserError(f"step {self.step}: {self.model.first_bad_tensor()}; the run stops "
                            f"here, {self.out} is unchanged; start again with a lower --lr and "
                            f"another --out")

    def need_finite_numbers(self, flat, moments):
        """Ends the run before it writes a checkpoint that every reader would reject.  A bad number
        need not show in the loss: the embedding of a token that the text lacks is never read."""
        for kind, x in zip(("", " of the first moments", " of the second moments"),
                           (flat, *moments)):
            if not math.isfinite(x.sum(dtype=np.float64)):           # which cannot overflow
                at = int(np.flatnonzero(~np.isfinite(x))[0])
                raise UserError(f"step {self.step}: a number of {self.tensor_at(at)}{kind} is "
                                f"{x[at]}; the run stops here, {self.out} is unchanged; start "
                                f"again with a lower --lr and another --out")

    def tensor_at(self, at):
        """The name of the tensor that holds this entry of the parameters"""
        return next(t.name for t in param_table(self.model.cfg) if at < t.end)

    def log_entry(self, losses, norm, hyper, seconds):
        """The log record of the step that has just ended"""
        s, data = self.state, self.data
        n_read = data.batches.n_read((s.step - 1) * self.B, self.B)      # without padding
        return {"step": s.step, "loss": losses[0], "heads": losses[self.trained].tolist(),
                "lr": hyper.lr, "norm": norm,
                "bits_per_byte": losses[0] / math.log(2) / data.bytes_per_token,
                "ms": 1e3 * seconds, "tokens_per_s": n_read / seconds, "n_steps": s.n_steps}

    def write(self, **values):
        """Appends a record to the log."""
        self.log.write(values, self.state, self.model.cfg)

    def planned(self):
        """The number of steps of a run by minutes"""
        s = self.state
        return self.plan.n_steps(s.step, s.n_steps, self.elapsed(), self.progress)

    def measures_in(self, r):
        """The measures of a step, in words; r: its log record"""
        return self.line.format(**r)

    def report(self, r, step_time):
        """Prints the line of a step; r: its log record."""
        s = self.state
        left = int((s.n_steps - s.step) * step_time) if s.n_steps else 0
        print(f"step {s.step:>5}/{s.n_steps or '?'}  {self.measures_in(r)}  lr {r['lr']:.1e}"
              f"  |g| {r['norm']:.2f}  {r['ms']:.0f} ms  {r['tokens_per_s'] / 1e3:.1f}k tok/s  "
              f"ETA {left // 60}:{left % 60:02d}", flush=True)

    def elapsed(self):
        """Seconds of training, over all resumed parts.  Only steps, validations and saves count,
        and not the time in which data are read or kernels are compiled before the first step."""
        return time.perf_counter() - self.began

    def measure(self, rows=None):
        """Measures held-out text; rows: how many of its rows, None: all.  Returns the
        result as text."""
        s = self.state
        measured = evaluate(self.model, *self.data.validation, rows, s.micro_batch)
        need(math.isfinite(measured),
             f"step {s.step}: the validation loss is {measured} bits/byte; {self.out} is "
             f"unchanged; start again with a lower --lr and another --out")
        s.bits_per_byte = measured
        self.write(step=s.step, val_bits_per_byte=s.bits_per_byte, windows=rows)
        return f"{s.bits_per_byte:.4f} bits/byte"

    def compare(self, estimate):
        """Keeps the best estimate so far.  With --keep-best, it also saves that model, and if this
        fails, the estimate of the model in the file stays the best one.  All estimates use the same
        rows, so they are comparable."""
        s = self.state
        if s.best is None or estimate < s.best:
            before = s.best, s.best_step
            s.best, s.best_step = estimate, s.step
            if self.options.keep_best and not self.save(best=True):
                s.best, s.best_step = before

    def compare_last(self):
        """Runs after the final validation.  Returns a note if an earlier model was clearly better,
        else ""."""
        s, held_out = self.state, self.data.validation
        n, estimate = len(held_out.tokens), s.bits_per_byte
        if n > ESTIMATE:                     # the last validation took all rows: not comparable
            estimate = evaluate(self.model, *held_out, ESTIMATE, s.micro_batch)
        self.compare(estimate)
        return self.note_of_end(n, estimate) if s.best is not None else ""

    def note_of_end(self, n, estimate):
        """A note if the model overfits, else "".  estimate: the last one, of n held-out rows"""
        s = self.state
        if n < FEWEST or estimate <= WORSE * s.best:
            return ""
        return (f"the best validation was {s.best:.4f} bits/byte, at step {s.best_step:,}; the "
                f"same rows now have {estimate:.4f}: the model overfits; use "
                f"{self.against_overfitting}")

    def where_best_is(self):
        """The end of a note that an earlier model was better"""
        path = self.best_path(self.out)
        best = self.shown(path)
        if self.options.keep_best and os.path.exists(path):
            return f"; {best} is the model of that step"
        return f"; --keep-best keeps the model of that step, in {best}"

    def checkpoint(self, best=False):
        """Writes the checkpoint; with best=True, the model without moments in NAME_best.bin.
        The first save of a new run always writes the checkpoint, too.  Otherwise a new best model
        would lie beside the checkpoint of an older run, or beside none that --resume can use."""
        s = self.state
        s.elapsed = self.elapsed()
        flat, *moments = self.model.buffers()
        if not (best and self.has_saved):
            self.write_file(self.out, flat, moments)
            self.has_saved = True
            self.log.replace_older(s)
        if best:
            self.write_file(self.best_path(self.out), flat)

    # The file of --keep-best, and the State in it
    best_path, state_of_best = staticmethod(best_path), staticmethod(state_of_model)

    @staticmethod
    def prepare_best(path):
        """Called before a file of --keep-best is locked and checked"""

    def write_file(self, path, flat, moments=()):
        self.need_finite_numbers(flat, moments)
        try:
            self.write_tensors(path, flat, moments)
        except MemoryError as e:             # for copies of the moments, or a long reference
            raise WriteError(f"cannot write {path}: out of memory ({e}); "
                             f"close other programs") from e

    def write_tensors(self, path, flat, moments):
        write_checkpoint(path, self.model.cfg, self.tokenizer, self.state, flat, moments)

    def continuation(self, n, prompt, temperature=Sampling.temperature):
        """The text sampled after a prompt's ids: up to n tokens, or up to the end token"""
        rng = np.random.default_rng(self.state.step)
        end = self.tokenizer.specials.get(self.state.eos)
        ids = generate(self.model.decoder(), prompt, n, rng, Sampling(temperature), end)
        return self.tokenizer.decode(list(ids)).decode("utf-8", "replace")

    def sample_text(self, n):
        """Up to n tokens of text, sampled after a line end as the only prompt.  An imported
        tokenizer may have no token for a line end: then there is no sample."""
        prompt = self.tokenizer.encode_whole("\n")
        return self.continuation(n, prompt) if len(prompt) else ""

    def begin(self):
        """What a new run does before its first step.  Returns whether it was done: False if a
        signal has ended it, so that a resumed run begins again."""
        if self.validates_first:
            self.validate()
        return True

    # ---- from the first step to the last
    def go(self):
        """Trains from the current step to the last one or Ctrl-C, saves, and prints a summary."""
        s = self.state
        with output_may_fail(), contextlib.closing(self.log), signals_caught() as caught:
            self.caught = caught
            self.log.begin(s, self.is_resumed)
            self.start_clock()
            try:
                if s.step > 0 or self.begin():
                    train(self, self.stopping(caught))
                complete = self.step >= self.n_steps
                final = self.final_validation() if complete else ""
                overdone = self.compare_last() if complete else ""
                self.checkpoint()
                if not (complete and self.data.steps):   # steps of a run by minutes: planned late
                    self.log.write_end(s, complete)
            except (OSError, MemoryError):   # a closed pipe, a file cut short: save, then report it
                if not self.is_updating:
                    self.checkpoint()
                raise
            finally:
                self.log.file.end()
            self.summarize(complete, final, overdone)

    def start_clock(self):
        """Starts or continues the time of training."""
        self.began = time.perf_counter() - self.state.elapsed
        self.progress = Progress(self.elapsed())

    def stopping(self, caught):
        """The signals so far, a list.  The training loop ends after the step in which one came."""
        return caught

    def final_validation(self):
        """The final validation, in words"""
        (n, T), rows = self.data.validation.tokens.shape, self.plan.final_rows(self.state.n_steps)
        if rows == n:
            return f"{self.measure()} on {self.scope}"
        return (f"{self.measure(rows)} on {rows:,} of {n:,} held-out windows of {T:,} tokens, "
                f"spread evenly")

    def summarize(self, complete, final, overdone):
        """Prints how the run has ended, and what to do next."""
        s = self.state
        if complete:
            print(f"\n{for_terminal(self.sample_text(160))}\n\nvalidation {final}, "
                  f"after {self.elapsed() / 60:.1f} minutes", flush=True)
            if overdone:
                note(f"{overdone}{self.where_best_is()}")
            if s.step < FEWEST_STEPS and not self.options.steps and not overdone:
                note(f"{counted(s.step, 'step')} of training cannot teach a model much; use more "
                     f"{self.length_flag}, or a smaller --batch")
            self.print_done(self.out, s, self.model)
        else:
            print(f"\nstopped at step {s.step} of {s.n_steps or '?'}, and saved.  Resume it with:"
                  f"\n    {typed(self.model.program)} {self.verb} --resume --out "
                  f"{printable(shlex.quote(self.shown(self.out)))}")

    # ---- what a start and an end have to know of the files; LoRA has others
    @staticmethod
    def read_own(out, file):
        """The Checkpoint of the run `out`, to resume.     file: the source that the user names"""
        return read_checkpoint(out)

    @staticmethod
    def read_source(file):
        """The Checkpoint of a model that a new run begins with"""
        return read_checkpoint(file, moments=False)

    @staticmethod
    def need_memory(cfg):
        need_memory(cfg)

    @staticmethod
    def shown(out):
        """The run `out` as the user names it"""
        return out

    @classmethod
    def kept_best(cls, out, state):
        """The weights of --keep-best, "" if the run keeps none"""
        best = cls.best_path(out)
        return best if state.options.get("keep_best") and os.path.exists(best) else ""

    @staticmethod
    def names_to_talk(out, state):
        """The arguments of `chat` for the model of a run, as the user types them"""
        return shlex.quote(out)

    @classmethod
    def print_done(cls, out, s, engine):
        advice = f"{typed(engine.program)} {engine.talk} {cls.names_to_talk(out, s)}"
        print(f"{printable(cls.shown(out))} is complete: {s.step:,} of "
              f"{counted(s.n_steps or s.step, 'step')}.  Talk to it with:\n    {printable(advice)}")
        if best := cls.kept_best(out, s):
            print(printable(f"{cls.shown(best)} is the {cls.product} of the best validation, at "
                            f"step {s.best_step:,}; {cls.shown(out)} is that of the last step."))
