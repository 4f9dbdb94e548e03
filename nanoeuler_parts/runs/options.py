"""Settings of training runs."""
from dataclasses import dataclass, fields, replace

from nanoeuler import MUON_SETTINGS, PRECISIONS
from nanoeuler_parts.files.settings import need_setting, setting, Settings
from nanoeuler_parts.machine.cpu import DTYPE

FLOOR_HELP = "final learning rate, as a fraction of the peak; 0: decay to zero"
KEEP_BEST = "also save the model with the lowest validation loss, as NAME_best.bin beside NAME.bin"

TEXT_HELP = ("text to train on, in UTF-8: files, folders, or patterns such as 'books/*.txt'; also "
             ".gz, .xz, .bz2, .zst, .jsonl and .parquet")

@dataclass
class RunOptions(Settings):
    """Settings that all runs share; the subclasses below add their own.  A checkpoint stores them
    for --resume."""
    # Attributes without a type are not dataclass fields: they have no flag, and no file stores them
    dtypes = tuple(PRECISIONS)
    when_missing = {"dtype": "f32"}  # values of settings that older checkpoints do not store
    # Some subclasses make fields of these.  In all others, the values here apply.
    optimizer, mtp_until, mtp_from, cuts, keep_best = "adamw", 1.0, 1.0, 0.0, False
    cooldown = 0.0
    # In a setting of type int | None, `Settings` (1) turns the 0 of a flag or a file into None
    steps: int | None = setting(None, 0, 1 << 40, "number of training steps; 0: train for "
                                "--epochs instead")
    batch: int = setting(2048, 1, 1 << 24, "number of tokens per training step, rounded to whole "
                         "sequences")
    micro_batch: int | None = setting(None, 0, 65_535, "number of sequences per forward and "
                                      "backward pass; fewer take less memory; 0: up to 4 GiB of "
                                      "activations, on a GPU as many as fit")
    lr: float = setting(6e-3, 1e-9, 1, "base learning rate of AdamW; multiplied by 128 / n_embd")
    floor: float = setting(0.02, 0, 1, FLOOR_HELP)
    warmup: int = setting(50, 0, 1 << 40, "number of warm-up steps, in which the learning rate "
                          "rises linearly; 0: no warm-up")
    weight_decay: float = setting(0.1, 0, 10, "decoupled weight decay, applied to matrices only; "
                                  "0: none")
    beta1: float = setting(0.9, 0, 0.9999, "decay rate of AdamW's moving average of the gradient")
    beta2: float = setting(0.95, 0, 0.9999, "decay rate of AdamW's moving average of the squared "
                           "gradient")
    clip: float = setting(1.0, 1e-9, 1e9, "gradient-norm clipping: largest global norm of the "
                          "gradient")
    eval_every: int = setting(250, 1, 1 << 40, "number of steps between validations")
    save_every: int = setting(250, 1, 1 << 40, "number of steps between checkpoints")
    seed: int = setting(1, 0, 1 << 60, "random seed of the batches, and of the weights of a new "
                        "model")
    dtype: str = setting("", 0, 0, "precision: f32, or bf16 with matrix-product inputs stored in "
                         "bfloat16; empty: the faster one on this machine")
    log_to: str = setting("", 0, 0, "also log to tensorboard, wandb (Weights & Biases), or both: "
                          "tensorboard,wandb; empty: only to the log beside --out")
    data: str = setting("", 0, 0)            # the file to train on; subclasses have a default

    given = frozenset()        # names of the settings passed to `chosen`

    def __post_init__(self):
        super().__post_init__()
        self.dtype = self.dtype or DTYPE

    def check(self):
        need_setting(self.dtype in self.dtypes, lambda spell:
                     f"{spell('dtype')}: expected {' or '.join(self.dtypes)}, found {self.dtype}")
        super().check()
        need_setting("\0" not in self.data, lambda spell:
                     f"{spell('data')}: expected a file name without NUL, found {self.data!r}")
        return self

    @classmethod
    def chosen(cls, **settings):
        """Options with these settings, and with the defaults for all others."""
        options = cls(**settings).check()
        options.given = frozenset(settings)
        return options

    def changed(self, **settings):
        """Options with these settings, and with the present ones for all others.  A copy by
        `dataclasses.replace` would forget `given`."""
        options = replace(self, **settings).check()
        options.given = self.given | settings.keys()
        return options

@dataclass
class TextOptions(RunOptions):
    steps: int | None = setting(None, 0, 1 << 40, "number of training steps; 0: train for "
                                "--minutes instead")
    data: str = setting("data/shakespeare.txt", 0, 0, TEXT_HELP, several=True)
    field: str = setting("text", 0, 0, "name of the field or column that holds a document in "
                         ".jsonl and .parquet; several names with commas: the first one found")
    newlines: str = setting("", 0, 0, "unix: convert Windows line ends (CR LF) to LF and remove a "
                            "byte order mark; empty: keep the text as it is")
    minutes: float = setting(3.0, 0.01, 1e6, "minutes of training, over all resumed parts, "
                             "without the time to read data and compile kernels; used if the "
                             "number of steps is 0")
    holdout: float = setting(0.1, 0.0001, 0.9, "fraction of the text, at its end, held out for "
                             "validation")
    cooldown: float = setting(0.0, 0, 1, "last fraction of the run, in which the learning rate "
                              "falls linearly after a constant part; 0: cosine schedule")
    mtp_weight: float = setting(0.3, 0, 10, "weight of the mean loss of the auxiliary heads "
                                "(multi-token prediction); 0: train head 0 only")
    mtp_until: float = setting(1.0, 0, 1, "fraction of the run after which the auxiliary heads "
                               "are switched off; 1: never")
    mtp_from: float = setting(1.0, 0, 1, "fraction of the run after which auxiliary heads that "
                              "are off are switched on again; 1: never")
    weight_decay: float = setting(0.3, 0, 10, "decoupled weight decay, applied to matrices only; "
                                  "0: none")
    cuts: float = setting(0.0, 0, 0.5, "fraction of words split from their leading space, so that "
                          "the model learns their spelling; 0: none")
    keep_best: bool = setting(False, 0, 0, KEEP_BEST)
    row_len: int = setting(0, 0, 1 << 17)    # tokens per row with --init; 0: the model's context

    def check(self):
        need_setting(self.newlines in ("", "unix"), lambda spell:
                     f"{spell('newlines')}: expected unix, found {self.newlines}")
        return super().check()

@dataclass
class OptimizerOptions(TextOptions):
    """Settings of a run that may use Muon"""
    optimizer: str = setting("adamw", 0, 0, "adamw: AdamW only; muon: Muon for the layers' "
                             "matrices, else AdamW")
    muon_lr: float = setting(0.02, 1e-9, 10, "peak learning rate of Muon, at any width of the "
                             "model")
    momentum: float = setting(0.9, 0, 0.9999, "coefficient of Muon's Nesterov momentum")
    newton_schulz: int = setting(3, 1, 20, "number of Newton-Schulz iterations by which Muon "
                                 "orthogonalizes an update")
    embedding_lr: float = setting(4.0, 1e-3, 1e3, "learning rate of the embedding, as a multiple "
                                  "of AdamW's; with Muon only")
    # name of an optimizer -> defaults that differ from those of the fields
    defaults_with = {}

    def check(self):
        super().check()
        need_setting(self.optimizer in ("adamw", "muon"), lambda spell:
                     f"{spell('optimizer')}: expected adamw or muon, found {self.optimizer}")
        return self

    @classmethod
    def chosen(cls, **settings):
        optimizer = settings.get("optimizer", cls.optimizer)
        for name in MUON_SETTINGS:
            need_setting(optimizer != "adamw" or name not in settings, lambda spell, name=name:
                         f"{spell(name)} is a setting of Muon; drop it, or use "
                         f"{spell('optimizer')} muon")
        return super().chosen(**cls.defaults_with.get(optimizer, {}) | settings)

# The defaults of TextOptions were best for AdamW alone, and those of TrainOptions were best with
# Muon (bench/NOTES.md).  With --optimizer adamw, `train` uses ADAMW_DEFAULTS, and MUON_SETTINGS do
# not apply.
ADAMW_DEFAULTS = {f.name: f.default for f in fields(TextOptions)
                  if f.name in ("lr", "floor", "warmup", "weight_decay", "mtp_until")}
ADAMW_DEFAULTS_SHOWN = ", ".join(f"{name} {value}" for name, value in ADAMW_DEFAULTS.items())

@dataclass
class TrainOptions(OptimizerOptions):
    """Settings of `train` in this program.  The defaults are for Muon."""
    when_missing = {"dtype": "f32", "optimizer": "adamw", "mtp_until": 1.0, "mtp_from": 1.0,
              "newton_schulz": 5, "embedding_lr": 3.0}
    defaults_with = {"adamw": ADAMW_DEFAULTS}
    lr: float = setting(4e-3, 1e-9, 1, "base learning rate of AdamW; multiplied by 128 / n_embd")
    floor: float = setting(0.0, 0, 1, FLOOR_HELP)
    warmup: int = setting(25, 0, 1 << 40, "number of warm-up steps, in which the learning rate "
                          "rises linearly; 0: no warm-up")
    weight_decay: float = setting(0.1, 0, 10, "decoupled weight decay, applied to matrices only; "
                                  "0: none")
    optimizer: str = setting("muon", 0, 0, "muon: Muon for the layers' matrices, else AdamW; "
                             f"adamw: AdamW only, with defaults {ADAMW_DEFAULTS_SHOWN}")
    mtp_until: float = setting(0.3, 0, 1, "fraction of the run after which the auxiliary heads "
                               "are switched off; 1: never")
    mtp_from: float = setting(0.9, 0, 1, "fraction of the run after which auxiliary heads that "
                              "are off are switched on again; 1: never")
