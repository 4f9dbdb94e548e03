"""The settings of training runs, one row each: OPTIONS, for the verbs of both programs.

`options_class("train")` makes a dataclass of the rows that name `train`.  A field that such a row
declares is a flag of the verb, if it has a help text, and is stored in the checkpoint for --resume.
A new setting is a new row.
"""
from dataclasses import field, make_dataclass, replace
from typing import NamedTuple

from nanoeuler import MUON_SETTINGS
from nanoeuler_parts.files.settings import need_setting, setting, Settings
from nanoeuler_parts.machine.cpu import DTYPE

# Verbs, with blanks between them; t, s, d and r are those of nanoeuler_cuda.py
ALL, ON_CPU, ON_GPU = "train sft dpo rl t s d r", "train sft dpo rl", "t s d r"
TEXTS, TUNING, RL = "train t", "sft dpo s d", "rl r"

class Option(NamedTuple):
    """A setting, as some verbs have it"""
    name: str
    type: object
    range: tuple               # of a number, both ends included
    defaults: dict             # {verbs: default}
    help: str = ""             # without one, the setting has no flag
    one_of: tuple = ()         # the texts that it may be
    adamw: dict = {}           # {verbs: default with --optimizer adamw}, where it differs
    several: bool = False      # does the flag take several values?
    metavar: str = "NAME"      # of a list, whose flag may be given several times

STEPS, ANY = (0, 1 << 40), (0, 0)

# The learning rates and schedules of `train` and `t` were best with Muon, and those in the column
# `adamw` with AdamW alone (bench/NOTES.md)
OPTIONS = [
    Option("steps", int | None, STEPS, {"train": None, "t": 10_000},
           "number of training steps; 0: train for --minutes instead"),
    Option("steps", int | None, STEPS, {TUNING: None},
           "number of training steps; 0: train for --epochs instead"),
    Option("steps", int | None, STEPS, {RL: None},
           "number of updates of the model; 0: train for --minutes instead"),
    Option("batch", int, (1, 1 << 20), {RL: 64},
           "number of answers that are sampled per batch, rounded to whole groups"),
    Option("batch", int, (1, 1 << 24), {"train sft dpo s d": 2048},
           "number of tokens per training step, rounded to whole sequences"),
    Option("batch", int, (1, 1 << 40), {"t": 32_768},
           "number of tokens per training step, rounded to whole sequences"),
    Option("micro_batch", int | None, (0, 65_535), {ALL: None},
           "number of sequences per forward and backward pass; fewer take less memory; 0: up to "
           "4 GiB of activations, on a GPU as many as fit"),
    Option("lr", float, (1e-9, 1), {"train": 4e-3, "t": 0.012, "sft s": 2e-3, "dpo d": 3e-5,
                                   RL: 3e-5},
           "base learning rate of AdamW; multiplied by 128 / n_embd", adamw={TEXTS: 6e-3}),
    Option("floor", float, (0, 1), {TEXTS: 0.0, TUNING: 0.02, RL: 0.1},
           "final learning rate, as a fraction of the peak; 0: decay to zero", adamw={TEXTS: 0.02}),
    Option("warmup", int, STEPS, {"train": 25, "t": 200, TUNING: 50, RL: 5},
           "number of warm-up steps, in which the learning rate rises linearly; 0: no warm-up",
           adamw={"train": 50}),
    Option("weight_decay", float, (0, 10), {f"{TEXTS} {TUNING}": 0.1, RL: 0.0},
           "decoupled weight decay, applied to matrices only; 0: none",
           adamw={"train": 0.3, "t": 1.0}),
    Option("beta1", float, (0, 0.9999), {ALL: 0.9},
           "decay rate of AdamW's moving average of the gradient"),
    Option("beta2", float, (0, 0.9999), {ALL: 0.95},
           "decay rate of AdamW's moving average of the squared gradient"),
    Option("clip", float, (1e-9, 1e9), {ALL: 1.0},
           "gradient-norm clipping: largest global norm of the gradient"),
    Option("eval_every", int, (1, 1 << 40), {f"{TEXTS} {TUNING}": 250, RL: 50},
           "number of steps between validations"),
    Option("save_every", int, (1, 1 << 40), {f"{ON_CPU} r": 250, "t s d": 5000},
           "number of steps between checkpoints"),
    Option("seed", int, (0, 1 << 60), {ALL: 1},
           "random seed of the batches, and of the weights of a new model"),
    Option("dtype", str, ANY, {ON_CPU: ""},
           "precision: f32, or bf16 with matrix-product inputs stored in bfloat16; empty: the "
           "faster one on this machine", one_of=("f32", "bf16")),
    Option("dtype", str, ANY, {ON_GPU: "bf16"},
           "precision: bf16 (activations and the inputs of products in bfloat16), f32 or f64",
           one_of=("bf16", "f32", "f64")),
    Option("log_to", str, ANY, {ALL: ""},
           "also log to tensorboard, wandb (Weights & Biases), or both: tensorboard,wandb; empty: "
           "only to the log beside --out"),
    Option("data", str, ANY, {"train": "data/shakespeare.txt"},
           "text to train on, in UTF-8: files, folders, or patterns such as 'books/*.txt'; also "
           ".gz, .xz, .bz2, .zst, .jsonl and .parquet", several=True),
    Option("data", str, ANY, {"t": "data/shakespeare.txt"},
           "text to train on, in UTF-8: files, folders, or patterns such as 'books/*.txt'; also "
           ".gz, .xz, .bz2, .zst, .jsonl and .parquet; if data/pretrain.txt exists, it replaces "
           "the default", several=True),
    Option("data", str, ANY, {"sft s": "data/instructions.json"},
           "examples to train on: JSON, JSON lines, CSV or Parquet, also compressed (.gz, .xz, "
           ".bz2, .zst); if data/alpaca.json exists, it replaces the default"),
    Option("data", str, ANY, {"dpo d": "data/preferences_sample.jsonl"},
           "pairs to train on: JSON, JSON lines, CSV or Parquet, also compressed (.gz, .xz, .bz2, "
           ".zst); if data/preferences.jsonl exists, it replaces the default"),
    Option("data", str, ANY, {RL: "data/instructions.json"},
           "questions to train on, with their answers if the reward reads them: JSON, JSON lines, "
           "CSV or Parquet, also compressed (.gz, .xz, .bz2, .zst)"),
    Option("reward", str, ANY, {RL: "exact"},
           "reward of an answer: exact (1 if it is `output`, else 0), contains (1 if it contains "
           "`output`), regex (1 if the pattern in `output` matches a part of it), length (its "
           "number of words), or a Python file with the function reward(example, answer)"),

    # Data: texts
    Option("field", str, ANY, {TEXTS: "text"},
           "name of the field or column that holds a document in .jsonl and .parquet; several "
           "names with commas: the first one found"),
    Option("newlines", str, ANY, {TEXTS: ""},
           "unix: convert Windows line ends (CR LF) to LF and remove a byte order mark; empty: "
           "keep the text as it is", one_of=("", "unix")),
    Option("minutes", float, (0.01, 1e6), {"train": 3.0},
           "minutes of training, over all resumed parts, without the time to read data and "
           "compile kernels; used if the number of steps is 0"),
    Option("minutes", float, (0.01, 1e6), {RL: 10.0},
           "minutes of training, over all resumed parts, without the time to read data and "
           "compile kernels; used if the number of steps is 0"),
    Option("minutes", float, (0.01, 1e6), {"t": 3.0},
           "minutes of training, over all resumed parts, with the time in which kernels are "
           "compiled; used if the number of steps is 0"),
    Option("holdout", float, (0.0001, 0.9), {"train": 0.1, "t": 0.02},
           "fraction of the text, at its end, held out for validation"),

    # Data: examples and pairs
    Option("holdout", float, (0, 0.5), {RL: 0.05},
           "fraction of the questions held out for validation; unless this flag is given, fewer "
           "than 600 questions have about 30 held out, but at most a fifth, and fewer than 30 "
           "have none; 0: none, validate on the training questions"),
    Option("holdout", float, (0, 0.5), {TUNING: 0.02},
           "fraction of the questions held out for validation; of fewer than 30 examples, none are "
           "held out unless this flag is given; 0: none, validate on the default examples"),
    Option("row_len", int, (0, 1 << 17), {TUNING: 0},
           "longest training example, in tokens; 0: --seq-len if given, else as the examples "
           "need, up to 2048"),
    Option("truncate", bool, ANY, {TUNING: False},
           "shorten conversations that are longer than a row, or than the model's context: their "
           "oldest exchanges are dropped; otherwise they are left out"),
    Option("ignore", list, ANY, {f"{TUNING} {RL}": []},
           "name of a field of the examples or of their messages to ignore, although it may "
           "change what is learned; may be given several times"),
    Option("field", list, ANY, {f"{TUNING} {RL}": []},
           "NAME=COLUMN: the column of the file that holds a field, as in instruction=question; "
           "may be given several times", metavar="NAME=COLUMN"),
    Option("epochs", float, (0.001, 1e6), {"sft s": 3.0},
           "number of passes over the training examples; used if the number of steps is 0"),
    Option("epochs", float, (0.001, 1e6), {"dpo d": 1.0},
           "number of passes over the training pairs; used if the number of steps is 0"),
    Option("rehearse", float, (0, 0.9), {"sft s": 0.5},
           "fraction of the rows of each step that are examples which the model learned before and "
           "answers right, so that it forgets fewer of them; --lr is then 6e-05 by default; 0: "
           "none. The default applies to models trained on examples in data/, such as the bundled "
           "one; others rehearse only if the flag is given: their own answers, sampled before the "
           "first step"),
    Option("rehearse", float, (0, 0.9), {"dpo d": 0.5},
           "fraction of the rows of each step that are examples which the model learned before and "
           "answers right, trained with the weight --nll; 0: none. The default applies to models "
           "trained on examples in data/, such as the bundled one, if --nll is not 0; others "
           "rehearse only if the flag is given: their own answers, sampled before the first step"),

    # LoRA
    Option("lora", int, (0, 1024), {ALL: 0},
           "rank of LoRA: train two matrices of this rank beside each matrix of the layers; --out "
           "is then a folder in PEFT's format, by default nanoeuler_lora; 0: train all weights"),
    Option("lora_alpha", float, (0, 1e6), {ALL: 0.0},
           "scale of LoRA: the product of its two matrices is multiplied by alpha / rank; 0: "
           "twice the rank"),
    Option("lora_targets", str, ANY, {ALL: "q,k,v,o,gate,up,down"},
           "projections that LoRA adapts, with commas between them"),

    # The loss and the schedule
    Option("cooldown", float, (0, 1), {TEXTS: 0.0},
           "last fraction of the run, in which the learning rate falls linearly after a constant "
           "part; 0: cosine schedule"),
    Option("mtp_weight", float, (0, 10), {"train sft t s": 0.3},
           "weight of the mean loss of the auxiliary heads (multi-token prediction); 0: train "
           "head 0 only"),
    Option("mtp_until", float, (0, 1), {"train": 0.3, "t": 1.0},
           "fraction of the run after which the auxiliary heads are switched off; 1: never",
           adamw={"train": 1.0}),
    Option("mtp_from", float, (0, 1), {"train": 0.9, "t": 1.0},
           "fraction of the run after which auxiliary heads that are off are switched on again; "
           "1: never"),
    Option("cuts", float, (0, 0.5), {TEXTS: 0.0},
           "fraction of words split from their leading space, so that the model learns their "
           "spelling; 0: none"),
    Option("cuts", float, (0, 0.5), {"sft s": 0.0},
           "fraction of words split from their leading space, so that the model learns their "
           "spelling; each of the first 16 epochs splits other words; 0: none"),
    Option("template", str, ANY, {"sft s": ""},
           "chat template: alpaca or chatml; empty: a chat model keeps its own, and a base model "
           "gets chatml for messages and alpaca for single questions",
           one_of=("", "alpaca", "chatml")),
    Option("group", int, (2, 1 << 16), {RL: 8},
           "number of answers that are sampled for a question; the advantage of an answer is its "
           "reward minus the mean of its group"),
    Option("tokens", int, (1, 1 << 17), {RL: 64}, "largest number of tokens in a sampled answer"),
    Option("temperature", float, (0.01, 100), {RL: 1.0},
           "temperature at which answers are sampled, a divisor of the logits"),
    Option("updates", int, (1, 1 << 16), {RL: 1}, "number of updates on each batch of answers"),
    Option("scale_rewards", bool, ANY, {RL: True},
           "divide the advantages of a group by the standard deviation of its rewards, so that "
           "each group with a signal has the same weight"),
    Option("clip_ratio", float, (1e-9, 1e9), {RL: 0.2},
           "clip range of the importance ratio: a token whose probability has changed by more than "
           "this fraction in the direction of its advantage has no gradient; only with several "
           "--updates"),
    Option("kl", float, (0, 1e3), {RL: 0.0},
           "weight of the KL divergence to the model at step 0, per token (estimator k3); 0: none"),
    Option("keep_best", bool, ANY, {RL: False},
           "also save the model with the highest held-out reward, as NAME_best.bin beside "
           "NAME.bin; with --lora, its adapter, in the folder NAME/best"),
    Option("keep_best", bool, ANY, {"train sft t s": False},
           "also save the model with the lowest validation loss, as NAME_best.bin beside NAME.bin; "
           "with --lora, its adapter, in the folder NAME/best"),
    Option("beta", float, (1e-9, 1e9), {"dpo d": 0.1},
           "strength of the pull towards the reference, the model at step 0; larger: stays closer"),
    Option("nll", float, (0, 1e3), {"dpo d": 0.0},
           "weight of -log pi(chosen) per token, added to the loss but not to the loss shown; 0: "
           "none"),
    Option("row_len", int, (0, 1 << 17), {TEXTS: 0}),    # with --init, it is that of --seq-len

    # Muon
    Option("optimizer", str, ANY, {"train": "muon"},
           "muon: Muon for the layers' matrices, else AdamW; adamw: AdamW only, with defaults lr "
           "0.006, floor 0.02, warmup 50, weight_decay 0.3, mtp_until 1.0",
           one_of=("adamw", "muon")),
    Option("optimizer", str, ANY, {"t": "muon"},
           "muon: Muon for the layers' matrices, else AdamW; adamw: AdamW only, with defaults lr "
           "0.006, weight_decay 1, floor 0.02", one_of=("adamw", "muon")),
    Option("muon_lr", float, (1e-9, 10), {"train": 0.02},
           "peak learning rate of Muon, at any width of the model"),
    Option("muon_lr", float, (1e-9, 10), {"t": 0.008}, "peak learning rate of Muon"),
    Option("momentum", float, (0, 0.9999), {"train": 0.9, "t": 0.95},
           "coefficient of Muon's Nesterov momentum"),
    Option("newton_schulz", int, (1, 20), {"train": 3, "t": 5},
           "number of Newton-Schulz iterations by which Muon orthogonalizes an update"),
    Option("embedding_lr", float, (1e-3, 1e3), {TEXTS: 4.0},
           "learning rate of the embedding, as a multiple of AdamW's; with Muon only"),

    # The GPU
    Option("matmul", str, ANY, {ON_GPU: "wgmma"},
           "fastest kernel path that may be used: wgmma (Hopper's tensor cores), mma (tensor "
           "cores) or portable (plain Numba); a GPU that does not support a path uses the next "
           "one"),
    Option("recompute", bool, ANY, {ON_GPU: False},
           "activation checkpointing: keep only the input of each layer, and recompute the rest "
           "in the backward pass; slower, with less memory"),
    Option("gpus", int, (1, 1024), {"t s d": 1},
           "number of GPUs of this machine to train on, with one process each; ignored under a "
           "launcher such as torchrun"),
]

# {setting: its value in runs whose verb lacks it}
WITHOUT = {"optimizer": "adamw", "mtp_until": 1.0, "mtp_from": 1.0, "cuts": 0.0, "keep_best": False,
           "cooldown": 0.0}
# {setting: its value in runs that began before it existed}
BEFORE = {"dtype": "f32", "optimizer": "adamw", "mtp_until": 1.0, "mtp_from": 1.0,
          "newton_schulz": 5, "embedding_lr": 3.0, "rehearse": 0.0}

def value_for(verb, values):
    """(value,) of a verb in {verbs: value}, () if it has none"""
    return tuple(value for verbs, value in values.items() if verb in verbs.split())

def options_of(verb):
    """{name: Option} of a verb, in the order of its flags"""
    found = [x for x in OPTIONS if value_for(verb, x.defaults)]
    assert len({x.name for x in found}) == len(found), f"{verb} has a setting in two rows"
    return {x.name: x for x in found}

class RunOptions(Settings):
    """The base of the classes that `options_class` makes.     options: {name: Option}
    with_adamw: {name: default with --optimizer adamw, where it differs}
    when_missing: {name: value if a checkpoint does not store the setting}"""
    given = frozenset()        # names of the settings passed to `chosen`

    def __post_init__(self):
        super().__post_init__()
        self.dtype = self.dtype or DTYPE

    def check(self):
        for name, x in self.options.items():
            value = getattr(self, name)
            need_setting(not x.one_of or value in x.one_of, name,
                         f"expected {' or '.join(filter(None, x.one_of))}, found {value}")
        super().check()
        need_setting("\0" not in self.data, "data",
                     f"expected a file name without NUL, found {self.data!r}")
        return self

    @classmethod
    def chosen(cls, **settings):
        """Options with these settings, and with the defaults for all others."""
        with_adamw = {}
        if settings.get("optimizer", cls.optimizer) == "adamw":
            with_adamw = cls.with_adamw
            for name in settings.keys() & set(MUON_SETTINGS):
                need_setting(False, name, "this is a setting of Muon; drop it, or use "
                             "{optimizer} muon")
        options = cls(**with_adamw | settings).check()
        options.given = frozenset(settings)
        return options

    def changed(self, **settings):
        """Options with these settings, and with the present ones for all others"""
        options = self.derived(**settings).check()
        options.given = self.given | settings.keys()
        return options

    def derived(self, **settings):
        """The same, for settings that follow from others and are not `given` by the user"""
        options = replace(self, **settings)
        options.given = self.given           # `replace` copies fields only
        return options

def field_of(option, verb):
    """The field of a dataclass for an Option"""
    [default] = value_for(verb, option.defaults)
    if option.type is list:
        return field(default_factory=list, metadata={"help": option.help,
                                                     "metavar": option.metavar})
    made = setting(default, *option.range, option.help, option.several)
    return field(default=default, metadata={**made.metadata, "one_of": option.one_of})

def options_class(verb, *bases):
    """The dataclass of a verb's settings.     bases: classes that add checks"""
    options = options_of(verb)
    fields = [(name, x.type, field_of(x, verb)) for name, x in options.items()]
    with_adamw = {name: value for name, x in options.items() for value in value_for(verb, x.adamw)}
    others = {
        "__module__": __name__,
        **{name: value for name, value in WITHOUT.items() if name not in options},
        "options": options, "with_adamw": with_adamw,
        "when_missing": {name: value for name, value in BEFORE.items() if name in options}}
    return make_dataclass(f"{verb.capitalize()}Options", fields, bases=(*bases, RunOptions),
                          namespace=others)

TrainOptions = options_class("train")
