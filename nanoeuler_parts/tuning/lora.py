"""Runs of `train --init`, `sft`, `dpo` and `rl` with --lora: they train an adapter, and leave the
model as it is.

The output is a folder: the adapter in PEFT's format, run.bin to resume from, and the log.
"""
import os
import shlex
from dataclasses import replace

from bpe import need, reading
from nanoeuler import most_memory, n_params, need_setting
from nanoeuler_parts.checkpoint.bundled import model_path
from nanoeuler_parts.checkpoint.file import Checkpoint, open_checkpoint, sha256_of
from nanoeuler_parts.files.printing import counted
from nanoeuler_parts.files.safetensors import read_meta
from nanoeuler_parts.files.writing import refuse_overwrite
from nanoeuler_parts.lora.adapter import Lora, n_trained, targets_in
from nanoeuler_parts.lora.base import base_of_file
from nanoeuler_parts.lora.files import (
    checksum_of, CONFIG, is_run, need_plain_files, read_run, RUN, state_in, WEIGHTS, write_adapter,
    write_run,
)
from nanoeuler_parts.lora.model import Adapted, LoraModel
from nanoeuler_parts.runs.run import Run
from nanoeuler_parts.runs.start import launch
from nanoeuler_parts.tuning.dpo import DpoRun
from nanoeuler_parts.tuning.rl import RlRun
from nanoeuler_parts.tuning.sft import SftRun

SFT_LR, DPO_LR, RL_LR = 2e-3, 1e-4, 3e-4     # default --lr with --lora
FOLDER = "nanoeuler_lora"    # default --out with --lora
BEST = "best"                # folder of --keep-best in that of the run

def loaded(file):
    """(open checkpoint, its Base) of a model that LoRA adapts"""
    c = open_checkpoint(file)
    return c, base_of_file(c, checksum_of(file))

class Adapting:
    """What the runs with LoRA have in common.  Their checkpoints are a run.bin and an adapter.
    `start.flat` is an Adapted, whose adapter is None in a fresh run."""
    default_lr, product = SFT_LR, "adapter"

    def __init__(self, out, start, options, engine=LoraModel):
        self.base, self.lora, flat = start.flat
        if self.lora is None:
            alpha = options.lora_alpha or 2.0 * options.lora
            self.lora = Lora(options.lora, alpha, targets_in(options.lora_targets))
            chosen = {} if "lr" in options.given else {"lr": self.default_lr}
            if hasattr(options, "mtp_weight"):           # auxiliary heads stay as they are
                chosen["mtp_weight"] = 0.0
            options = options.derived(**chosen)
        start = start._replace(flat=Adapted(self.base, self.lora, flat))
        super().__init__(out, start, options, engine)

    @property
    def rehearsing_lr(self):
        return self.default_lr

    def load(self, cfg, tokenizer):
        data, lora = super().load(cfg, tokenizer), self.lora
        n = counted(n_trained(cfg, lora), "parameter")
        data.table.append(("LoRA", f"rank {lora.rank}, alpha {lora.alpha:g}, on "
                           f"{', '.join(lora.targets)}: {n} to train"))
        return data

    # ---- files
    def tensor_at(self, at):
        return "the adapter"

    def write_tensors(self, path, flat, moments):
        """Writes run.bin first: it alone holds all that a resumed run needs."""
        cfg, s, sha256 = self.model.cfg, self.state, self.base.sha256
        if path != self.best_path(self.out):
            write_run(path, cfg, self.lora, s, flat, moments, sha256)
        write_adapter(os.path.dirname(path), cfg, self.lora, flat, s, sha256)

    @staticmethod
    def best_path(out):
        """The weights of --keep-best, in a folder that is an adapter, too     out: the run.bin"""
        return os.path.join(os.path.dirname(out), BEST, WEIGHTS)

    @staticmethod
    def prepare_best(path):
        folder = os.path.dirname(path)
        need(not os.path.islink(folder), f"{folder} is a link, so nothing is written there; remove "
             f"it, or choose another --out")
        os.makedirs(folder, exist_ok=True)
        need_plain_files(folder)

    @staticmethod
    def state_of_best(path):
        with reading(path, "choose another --out"):
            return state_in(read_meta(path))

    @staticmethod
    def read_own(out, file):
        found = read_run(out)
        s, file = found.state, file or model_path(found.state.source)
        need(os.path.isfile(file), f"{file}: No such file; {out} adapts this model; name its file "
             f"before --resume")
        need(sha256_of(file) == s.source_sha256, f"{file} is not the model that {out} adapts; name "
             f"that file before --resume")
        c, base = loaded(file)
        adapted = Adapted(base, found.lora, found.flat)
        return Checkpoint(found.cfg, c.tokenizer, s, adapted, found.moments)

    @staticmethod
    def read_source(file):
        c, base = loaded(file)
        return Checkpoint(c.cfg, c.tokenizer, c.state, Adapted(base, None, None), ())

    @staticmethod
    def need_memory(cfg):
        """Rejects a model whose weights do not fit into memory, even as int8."""
        n, there = n_params(replace(cfg, n_mtp=1)), most_memory()
        need(n <= there, f"{n:,} parameters need {n / 2**30:,.1f} GiB of memory, this machine or "
             f"container has {there / 2**30:,.1f} GiB; use a smaller model")

    @staticmethod
    def shown(out):
        """The folder of a run.bin, or of the adapter of --keep-best"""
        return os.path.dirname(out)

    @classmethod
    def names_to_talk(cls, out, state):
        folder = shlex.quote(cls.shown(cls.kept_best(out, state) or out))
        return f"{shlex.quote(state.source)} --adapter {folder}"

class SftLora(Adapting, SftRun):
    """`sft --lora`"""

class DpoLora(Adapting, DpoRun):
    """`dpo --lora`.  B is zero at first, so the reference, the model at step 0, is the model
    without its adapter."""
    default_lr = DPO_LR

class RlLora(Adapting, RlRun):
    """`rl --lora`.  The model at step 0 is the model without its adapter."""
    default_lr = RL_LR

    def make_reference(self):
        return self.engine(self.model.cfg, Adapted(self.base, self.lora, None), (), self.options)

class TrainLora(Adapting, Run):
    """`train --init FILE --lora`"""

RUNS = {Run: TrainLora, SftRun: SftLora, DpoRun: DpoLora, RlRun: RlLora}

def with_lora(run):
    """The class of the same runs with LoRA.     run: one of RUNS, or one of the GPU, which inherits
    from one of them"""
    kind = next(x for x in run.__mro__ if x in RUNS)
    return RUNS[kind] if run is kind else type(f"{run.__name__}Lora", (RUNS[kind], run), {})

def folder_of(out, default):
    """The folder of a run with LoRA.     out: --out, and its default, that of a run without LoRA"""
    folder = FOLDER if out == default and not is_run_with_lora(out) else out
    if os.path.basename(folder) == RUN and os.path.isfile(folder):
        folder = os.path.dirname(folder) or os.curdir
    need(not os.path.exists(folder) or os.path.isdir(folder), f"{folder} is a file, but --lora "
         f"writes a folder; choose another --out")
    return folder

def launch_with_lora(run, default, engine=None, *, out, resume, force, **chosen):
    """Starts or resumes a run with LoRA, by default on the CPU.  A folder that is made for it is
    removed again if the run is rejected."""
    folder = folder_of(out, default)
    targets_in(chosen.get("lora_targets", "q"))          # rejects other names
    run = with_lora(run)
    if issubclass(run, TrainLora):
        need_setting(resume or "file" in chosen, "lora", "expected a model to adapt, found none; "
                     "name it with --init")
        chosen.setdefault("optimizer", "adamw")
        need(chosen["optimizer"] == "adamw", "--optimizer: LoRA learns with AdamW; drop the flag")
    need_plain_files(folder)
    is_new = not os.path.isdir(folder)
    if not resume:
        os.makedirs(folder, exist_ok=True)
        for name in (RUN, CONFIG, WEIGHTS):  # perhaps an adapter of another program
            refuse_overwrite(os.path.join(folder, name), force, "continue it with --resume, choose "
                             "another --out" if name == RUN else "choose another --out")
    try:
        launch(run, engine or LoraModel, out=os.path.join(folder, RUN), resume=resume, force=force,
               **chosen)
    finally:
        for made in (os.path.join(folder, BEST), *([folder] if is_new else [])):
            if os.path.isdir(made) and not os.path.islink(made) and not os.listdir(made):
                os.rmdir(made)

def is_run_with_lora(out):
    """Does --out name a run with LoRA, to resume?"""
    return is_run(os.path.join(out, RUN)) or is_run(out)
