"""Flags and arguments that several verbs share, and settings as flags.

A module NAME_verb(add) calls `add` with these.  cli.py reads the command line.
"""
import argparse
import os
import re
import shlex
import sys
from collections import namedtuple
from dataclasses import fields

from nanoeuler import Config
from nanoeuler_parts.checkpoint.bundled import BUNDLED, model_path
from nanoeuler_parts.files.settings import flag_of, type_of

# An argument is declared as data: a name, or a flag, and what argparse's add_argument takes.  The
# table VERBS in cli.py names the module of each verb, which declares its arguments.
Argument = namedtuple("Argument", "names options")       # of argparse's add_argument

def arg(*names, **options):
    return Argument(names, options)

def as_text(argument):
    """An argument as text.  Python turns invalid bytes of an argument into lone surrogates.  Here
    they become U+FFFD, like invalid bytes in a file or on standard input."""
    return re.sub("[\ud800-\udfff]", "\ufffd", argument)

LONGEST_NAME = 4096          # the longest path on Linux

def file_name(argument):
    """The name of a file or a folder, checked before the program does any work."""
    if not argument:
        raise argparse.ArgumentTypeError("expected a name, found an empty one; is a shell "
                                         "variable unset?")
    if argument == "-":
        raise argparse.ArgumentTypeError("expected the name of a file, found -: standard input "
                                         "and output are not supported here")
    if len(argument) > LONGEST_NAME:
        raise argparse.ArgumentTypeError(f"expected a name of at most {LONGEST_NAME:,} characters, "
                                         f"found {len(argument):,}")
    return argument

def model_name(argument):
    """The checked path of a checkpoint to read"""
    return model_path(file_name(argument))

def checkpoint(default):
    return arg("file", nargs="?", type=model_name, default=default,
               help=f"checkpoint to read; {BUNDLED}: the bundled model")

MODEL = arg("file", nargs="?", type=model_name, default=argparse.SUPPRESS,
            help=f"checkpoint to use; {BUNDLED}: the bundled model (default: the newest model in "
                 f"this folder, or else {BUNDLED})")
class Once(argparse.Action):
    """A flag that may be given once"""

    def __call__(self, parser, namespace, values, option_string=None):
        if getattr(namespace, self.dest, None) is not None:
            raise argparse.ArgumentError(self, f"expected it once, found it again, with {values}; "
                                               f"drop one")
        setattr(namespace, self.dest, values)

ADAPTER = arg("--adapter", type=file_name, metavar="FOLDER", action=Once, help="folder of a LoRA "
              "adapter in PEFT's format, made for this model; on a GPU it is merged into the "
              "weights while they are read; omitted: none")
TEXT = arg("prompt", type=as_text, help="text of the prompt; -: read it from standard input")
FORCE = arg("--force", action="store_true", help="overwrite existing output files")
RESUME = arg("--resume", action="store_true", help="continue the run saved in --out")
RUN = RESUME, FORCE
THREADS = arg("--threads", type=int, default=0, metavar="N",
              help="number of CPU threads; 0: one per physical core")

def out(default):
    return arg("--out", type=file_name, default=default, metavar="FILE",
               help="output file to write")

def flag(f, default):
    """A setting as a flag.  A flag that is not given is absent from the result, because --resume
    compares only the settings that are given."""
    name, text = flag_of(f.name), f.metadata["help"]
    if f.type is list:
        return arg(name, type=as_text, action="append", metavar=f.metadata.get("metavar", "TEXT"),
                   default=argparse.SUPPRESS,
                   help=f"{text} (default: none)")
    if f.type is bool:
        return arg(name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS,
                   help=f"{text} (default: {default})")
    default = 0 if default is None else "empty" if default == "" else default
    metavar = {int: "N", float: "X"}.get(type_of(f), "TEXT")
    if choices := [x for x in f.metadata.get("one_of", ()) if x]:
        metavar = f"{{{','.join(choices)}}}"
    several = {}
    if f.metadata.get("several"):
        several, metavar = dict(nargs="+", action="extend"), f.name.upper()
    return arg(name, type=type_of(f), default=argparse.SUPPRESS, metavar=metavar,
               help=f"{text} (default: {default})", **several)

SHAPE = [f for f in fields(Config) if f.metadata["help"]]

def typed(program):
    """The command that starts `program` of this folder, in the form that the user typed: pip's
    command, or python with the path of the file"""
    command = program.removesuffix(".py").replace("_", "-")
    folder, started = os.path.split(sys.argv[0])
    if started.removesuffix(".exe") == command:
        return command
    ours = started in ("nanoeuler.py", "nanoeuler_cuda.py")
    return f"python {shlex.quote(os.path.join(folder, program) if ours else program)}"

# ---- how --help shows the flags of a verb
# `--help` shows COMMON and counts the others, `--help-all` shows all.
# (title, flags in this group).  A flag that is in no group comes first, as what a verb reads and
# writes.
GROUPS = [
    ("data", "--data --field --newlines --holdout --row-len --truncate --ignore --cuts "
             "--questions --context --stride --show-wrong"),
    ("length of a run", "--minutes --steps --epochs --eval-every --save-every --keep-best "
                        "--log-to"),
    ("optimizer", "--batch --lr --floor --warmup --cooldown --weight-decay --beta1 --beta2 --clip "
                  "--optimizer --muon-lr --momentum --newton-schulz --embedding-lr"),
    ("loss", "--mtp-weight --mtp-until --mtp-from --rehearse --beta --nll"),
    ("reinforcement learning", "--reward --group --updates --scale-rewards --clip-ratio --kl"),
    ("LoRA", "--lora --lora-alpha --lora-targets"),
    ("shape of a new model", "--n-embd --n-head --n-kv-head --head-dim --n-layer --n-hidden "
                             "--seq-len --vocab-size --n-mtp --tie-embeddings --qkv-bias --qk-norm "
                             "--window"),
    ("sampling", "--tokens --temperature --top-k --top-p --min-p --presence-penalty "
                 "--frequency-penalty --repeat-penalty --repeat-last-n --stop --logprobs "
                 "--speculate --n --json-schema --thinking"),
    ("server", "--host --port --slots --queue --drain --body --seconds --log --access-log "
               "--api-key --origin --allow-host"),
    ("machine", "--threads --dtype --weights --micro-batch --matmul --recompute --gpus")]
GROUP_OF = {flag: title for title, flags in GROUPS for flag in flags.split()}

MOST_SHOWN = 14              # flags; of a verb with more, --help shows COMMON
COMMON = frozenset(
    "--help --help-all --data --init --out --resume --force --minutes --steps --epochs --batch "
    "--lr --lora --rehearse --reward --seq-len --vocab-size --tokens --temperature --top-p "
    "--stop --n --system --file --adapter --questions --json --host --port --gpus "
    "--threads".split())
SELDOM = {"train": {"--lora"}}               # {verb: flags that are common in others only}

# {verb of either program: what to type after the program}
EXAMPLES = {
    "train": "train --data mine.txt --minutes 10 --out mine.bin",
    "sft": "sft mine.bin --data questions.jsonl --out chat.bin --epochs 60",
    "dpo": "dpo chat.bin --data pairs.jsonl --out better.bin --epochs 60 --nll 1",
    "rl": "rl bundled --data questions.jsonl --reward exact --minutes 10 --out better.bin",
    "chat": "chat bundled --temperature 0",
    "generate": 'generate "Once upon a time" mine.bin --tokens 100 --n 3',
    "lens": 'lens "To be, or not to" mine.bin',
    "eval": "eval mine.bin --data other.txt",
    "serve": "serve bundled --port 8000",
    "plot": "plot mine.jsonl other.jsonl",
    "list": "list",
    "info": "info mine.bin",
    "quantize": "quantize chat.bin small.bin",
    "export": "export chat.bin --gguf chat.gguf",
    "import": "import Qwen/Qwen3-0.6B qwen.bin",
    "compile": "compile",
    "t": "t --data mine.txt --minutes 10 --out mine.bin",
    "tr": "tr --out mine.bin",
    "s": "s mine.bin --data questions.jsonl --out chat.bin --epochs 60",
    "d": "d chat.bin --data pairs.jsonl --out better.bin --epochs 60 --nll 1",
    "r": "r bundled --data questions.jsonl --reward exact --minutes 10 --out better.bin",
    "c": "c chat.bin",
    "i": 'i "Once upon a time" mine.bin --tokens 100 --n 3',
    "g": "g",
    "test": "test --only matmul",
    "ladder": "ladder",
    "doctor": "doctor"}
