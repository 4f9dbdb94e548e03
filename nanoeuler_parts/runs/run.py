"""Run: the data, the log and the checkpoints of a training run."""
import contextlib
import hashlib
import json
import os
import re
import shlex
import time
from dataclasses import replace

import numpy as np

import bpe
from bpe import need, note, printable, UserError
from nanoeuler import for_terminal, generate, Model, n_params
from nanoeuler_parts.chat.sampling import Sampling
from nanoeuler_parts.checkpoint.bundled import beside_program
from nanoeuler_parts.checkpoint.file import write_checkpoint
from nanoeuler_parts.files.corpora import files_in, open_text
from nanoeuler_parts.files.logs import (
    free_log, keep_aside, log_identity, log_path, open_log, restore_log, STOPPED,
)
from nanoeuler_parts.files.printing import counted, print_table
from nanoeuler_parts.files.sinks import Sinks
from nanoeuler_parts.files.writing import output_may_fail, WriteError
from nanoeuler_parts.flags import typed
from nanoeuler_parts.runs.data import DataSet, TextBatches, Validation, Windows
from nanoeuler_parts.runs.guards import best_path, need_data, NEW_RUN
from nanoeuler_parts.runs.loop import FEWEST_STEPS, TrainingLoop
from nanoeuler_parts.runs.options import TrainOptions
from nanoeuler_parts.runs.signals import signals_caught

class Run(TrainingLoop):
    """One training run: model, data, clock and log, fresh or from a checkpoint."""
    verb = "train"                           # on the command line
    kind = ""                                # of the trained model: "chat", or that of --init
    Options = TrainOptions                   # the settings that flags set
    preset = "small"                         # the default preset
    begins_with, made_by = None, ""          # the default checkpoint to begin with, and its verb
    larger_data = ""                         # used instead of Options.data if it exists
    length_flag = "--minutes"                # sets the length if --steps does not
    scope = "the whole held-out tail"        # of the final validation
    # the end of the note that the model overfits
    against_overfitting = "fewer --steps or --minutes, or more text"
    updating = False                         # True while an update changes the parameters
    pending_log = None                       # name of a log that is yet to replace an older one
    log_file = None

    def __init__(self, out, start, options, engine=Model):
        """Prepares everything before the first step.  start: a Checkpoint of a run to resume, of a
        model to begin with, or of a shape alone (flat is None); engine: the class of the model"""
        self.out, self.options = out, options
        self.is_resumed = bool(start.state.options)      # `fresh` leaves options empty
        self.state = s = replace(start.state, options=options.written())
        self.validates_first = s.source_sha256 != "" and not self.kind
        for name in self.data_file().split("\n"):
            self.log = log_path(out, name)   # the same for all names, after its checks
        self.sinks = Sinks(options.log_to, out)
        self.lr = options.lr * 128 / start.cfg.n_embd

        # The data: a batch has B rows of T tokens, and the data may determine T
        self.read_data(start)
        self.T, self.old_context = self.row_length(start), start.cfg.seq_len
        self.B = self.R * max(1, round(options.batch / self.T / self.R))
        cfg = replace(start.cfg, seq_len=max(start.cfg.seq_len, self.T))
        self.data = self.load(cfg, start.tokenizer)      # compares text_sha256 with the data's
        self.tokenizer = self.data.tokenizer
        cfg = replace(cfg, vocab_size=self.tokenizer.vocab_size)     # a short text has fewer merges
        s.text_sha256 = self.data.sha256
        if self.data.steps:                  # else `plan` sets the number
            s.n_steps = max(s.step, self.data.steps)

        # The model: nothing is compiled until everything above has been checked
        engine.ready(options)
        flat = self.initial(cfg) if start.flat is None else start.flat
        self.model = engine(cfg, flat, start.moments, options)
        self.next = self.data.batches.take(s.step * self.B, self.B)
        self.print_settings()
        # One size for all passes: on a GPU the order of sums depends on the largest micro-batch
        s.micro_batch = self.model.micro_batch(self.B, options.micro_batch or s.micro_batch, self.T)

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
            *self.rows_of_optimizer(),
            ("length", counted(steps, "step") if steps else
                       f"{o.minutes:g} minute{'' if o.minutes == 1 else 's'}"),
            ("writes", f"{self.out} and {self.log}; Ctrl-C saves and stops"),
            *([("best model", best_path(self.out))] if o.keep_best else []), *self.sinks.rows])
        if steps and steps < o.warmup:
            note(f"the run ends after {counted(steps, 'step')}, within its warm-up of "
                 f"{o.warmup}, so the learning rate never falls; set a shorter one, for example "
                 f"--warmup {steps // 10}")

    def rows_of_optimizer(self):
        """The optimizer's rows of the printed table"""
        o, width, of_adamw = self.options, self.model.cfg.n_embd, f"lr {self.lr:.2g}"
        of_adamw += f" (--lr {o.lr:g} x 128 / width {width})" if width != 128 else ""
        decay = f"linear in the last {100 * o.cooldown:g} %" if o.cooldown else "cosine"
        of_both = (f"warm-up {counted(o.warmup, 'step')}, {decay} to {o.floor:g} of the peak, "
                   f"weight decay {o.weight_decay:g}, clip {o.clip:g}, seed {o.seed}")
        if o.optimizer == "adamw":
            return [("AdamW", f"{of_adamw}, {of_both}")]
        return [("Muon", f"lr {o.muon_lr:.2g}, momentum {o.momentum:g}, for the layers' matrices"),
                ("AdamW", f"{of_adamw}, embedding lr {self.lr * o.embedding_lr:.2g}, for all other "
                          f"parameters"),
                ("both", of_both)]

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
        need(held_out.targets.n_valid > 0, f"{path}: the held-out last {o.holdout:.0%} has no "
             f"token to predict; name a longer text with --data, or raise --holdout")
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
        need(digest == old, f"{self.data_file()} has changed: its sha256 is {digest[:12]}, "
             f"expected {old[:12]}; restore it, or {NEW_RUN}")
        return digest

    def save(self, best=False):
        """Writes the checkpoint; with best=True, the model without moments in NAME_best.bin.
        With --force, the first save always writes the checkpoint, too.  Otherwise a new best model
        would lie beside the checkpoint of the older run."""
        self.state.elapsed = self.elapsed()
        flat, *moments = self.model.buffers()
        if not best or self.pending_log:
            self.write(self.out, flat, moments)
            self.replace_log()
        if best:
            self.write(best_path(self.out), flat)

    def write(self, path, flat, moments=()):
        try:
            write_checkpoint(path, self.model.cfg, self.tokenizer, self.state, flat, moments)
        except MemoryError as e:             # for copies of the moments, or a long reference
            raise WriteError(f"cannot write {path}: out of memory ({e}); "
                             f"close other programs") from e

    def save_if_possible(self, best=False):
        """Saves during the run.  If the file cannot be written, for example because the disk is
        full, the run continues until the next save.  With several GPUs, an error of another rank is
        not a WriteError and ends the run."""
        try:
            self.save(best)
        except WriteError as e:
            note(f"step {self.state.step} is not saved: {e}; the run "
                 f"continues and saves again in {counted(self.options.save_every, 'step')}")

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

    def record(self, **values):
        line = json.dumps(values).encode() + b"\n"
        self.log_file.write(line)            # it keeps what it cannot write, see `Log`
        if not self.state.log_sha256:        # the same value as `log_identity`
            self.state.log_sha256 = hashlib.sha256(line).hexdigest()
        self.sinks.write(values, self)

    def choose_log(self):
        """The name of the file to log to.
        With --force, an older checkpoint and its log stay until the first save of this run, so this
        run begins its log under another name.  If a fresh run finds a log but no checkpoint, the
        old log is renamed and kept."""
        if self.is_resumed:
            restore_log(self.log, self.state.log_sha256)
        elif os.path.exists(self.out):
            self.pending_log = free_log(self.log)
            if os.path.exists(self.log):
                note(f"the log is {self.pending_log}; it replaces {self.log} when the first "
                     f"checkpoint is saved")
        else:
            keep_aside(self.log)
        return self.pending_log or self.log

    def open_log(self, path):
        """Opens the log, also after a rename: some systems cannot rename an open file.  Records
        that could not be written yet move to the log that is opened."""
        kept = self.log_file.kept if self.log_file else ()
        self.log_file = self.closing_log.enter_context(open_log(path, self.state.step, kept))
        if not kept:                         # else its first line may be one that was kept
            self.state.log_sha256 = log_identity(path)

    def replace_log(self):
        """After the first save of this run, gives its log the final name, and so replaces the older
        log.  If the run is interrupted in between, or the rename fails, --resume does it."""
        if self.pending_log:
            self.closing_log.close()
            with contextlib.suppress(OSError):
                os.replace(self.pending_log, self.log)
                self.pending_log = None
            self.open_log(self.pending_log or self.log)

    def where_best_is(self):
        """The end of a note that an earlier model was better"""
        best = best_path(self.out)
        if self.options.keep_best and os.path.exists(best):
            return f"; {best} is the model of that step"
        return f"; --keep-best keeps the model of that step, in {best}"

    def validate_all(self):
        """The final validation, in words"""
        (n, T), rows = self.data.validation.tokens.shape, self.final_rows()
        if rows == n:
            return f"{self.validate()} on {self.scope}"
        return (f"{self.validate(rows)} on {rows:,} of {n:,} held-out windows of {T:,} tokens, "
                f"spread evenly")

    def go(self):
        """Trains from the current step to the last one or Ctrl-C, saves, and prints a summary."""
        s = self.state
        with (output_may_fail(), contextlib.closing(self.sinks),
              contextlib.ExitStack() as self.closing_log, signals_caught() as caught):
            self.open_log(self.choose_log())
            self.began = time.perf_counter() - s.elapsed         # --resume continues the clock
            try:
                self.train(caught)
                complete = s.n_steps is not None and s.step >= s.n_steps
                final = self.validate_all() if complete else ""
                overdone = self.compare_last() if complete else ""
                self.save()
                if not (complete and self.data.steps):   # steps of a run by minutes: planned late
                    end = {"step": s.step, "n_steps": s.n_steps, STOPPED: not complete}
                    self.log_file.write(json.dumps(end).encode() + b"\n")
            except (OSError, MemoryError):   # a closed pipe, a file cut short: save, then report it
                if not self.updating:
                    self.save()
                raise
            finally:
                self.log_file.end()
            self.summarize(complete, final, overdone)

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
            print_done(self.out, s, self.model)
        else:
            print(f"\nstopped at step {s.step} of {s.n_steps or '?'}, and saved.  Resume it with:"
                  f"\n    {typed(self.model.program)} {self.verb} --resume --out "
                  f"{printable(shlex.quote(self.out))}")

# ---- start and resume
def print_done(out, s, engine):
    advice = printable(f"{typed(engine.program)} {engine.talk} {shlex.quote(out)}")
    print(f"{printable(out)} is complete: {s.step:,} of {counted(s.n_steps or s.step, 'step')}.  "
          f"Talk to it with:\n    {advice}")
