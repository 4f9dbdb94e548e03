"""The command line: the table of verbs, and how one of them is parsed and run.

A verb's module declares its arguments in NAME_verb(add), and is imported only if its verb runs.
"""
import argparse
import difflib
import importlib.util
import os
import re
import shlex
import sys
from functools import partial

import numba

from bpe import need, printable, UserError
from nanoeuler import __version__, replace_bad_characters
from nanoeuler_parts.files.errors import problem
from nanoeuler_parts.flags import (
    COMMON, EXAMPLES, flag, GROUP_OF, GROUPS, MOST_SHOWN, SELDOM, THREADS, typed,
)
from nanoeuler_parts.machine.threads import use_threads

# (name of a verb, the module that declares its arguments, help)
VERBS = [
    ("train", "nanoeuler_parts.runs.start",
     "pretrain a model on a text; writes a checkpoint and a log"),
    ("sft", "nanoeuler_parts.tuning.sft",
     "supervised fine-tuning: train a checkpoint to answer questions"),
    ("dpo", "nanoeuler_parts.tuning.dpo",
     "direct preference optimization: train a chat checkpoint on preferred answers"),
    ("rl", "nanoeuler_parts.tuning.rl",
     "reinforcement learning: train a chat checkpoint on rewards of its own answers"),
    ("chat", "nanoeuler_parts.chat.verbs",
     "talk to a model in the terminal; a base model continues the text"),
    ("generate", "nanoeuler_parts.chat.verbs",
     "continue or answer one prompt, or a file of prompts"),
    ("lens", "nanoeuler_parts.tools.lens",
     "show how each Euler step changes the prediction of the token after a prompt"),
    ("eval", "nanoeuler_parts.tools.evaluation",
     "measure a model: perplexity and bits per byte of texts, accuracy on questions"),
    ("serve", "nanoeuler_parts.serve.verb",
     "serve models over HTTP: web pages and an OpenAI-compatible API"),
    ("plot", "nanoeuler_parts.tools.plot", "plot the loss curves of training logs"),
    ("list", "nanoeuler_parts.tools.listing",
     "list the models and LoRA adapters in a folder, the newest first"),
    ("info", "nanoeuler_parts.tools.info", "print the contents of a checkpoint"),
    ("quantize", "nanoeuler_parts.interchange.quantize",
     "write a checkpoint with int8 matrices, a quarter of its size"),
    ("export", "nanoeuler_parts.interchange.exporting",
     "convert a checkpoint to a Hugging Face directory or a GGUF file for llama.cpp"),
    ("import", "nanoeuler_parts.interchange.importing",
     "convert a Llama model from Hugging Face or a GGUF file to a checkpoint"),
    ("compile", "nanoeuler_parts.kernels",
     "compile the kernels for training and chat into Numba's cache")]

# (argparse's error, as Python 3.11 to 3.14 word it; the text that replaces it)
PLAIN_ERRORS = [
    (r"\Aargument (\S+): invalid int value: (.*)", r"\1: expected a whole number, found \2"),
    (r"\Aargument (\S+): invalid float value: (.*)", r"\1: expected a number, found \2"),
    (r"\Aargument (\S+): invalid choice: (.*) \(choose from (.*)\)",
     r"\1: expected one of \3, found \2"),
    (r"\Aargument (\S+): expected one argument", r"\1: expected a value, found none"),
    (r"\Aargument (\S+): ignored explicit argument (.*)", r"\1: expected no value, found \2"),
    (r"\Aargument (\S+): ", r"\1: "),
    (r"\Athe following arguments are required: (.*)", r"missing required arguments: \1"),
    (r"\Aunrecognized arguments: (.*)", r"expected no more arguments, found \1"),
    (r"\Aambiguous option: (\S+) could match (.*)", r"\1 may mean \2; write it in full")]

class Parser(argparse.ArgumentParser):
    """A parser whose errors are UserErrors of one line, as everywhere in this program"""
    flags = ("--help",)                      # all flags of the verb
    common = None                            # the flags that --help shows; None: all

    def group(self, name):
        """The group of arguments that shows this flag"""
        title = GROUP_OF.get(name)
        found = [group for group in self._action_groups if group.title == title]
        return found[0] if found else self.add_argument_group(title) if title else self

    def format_help(self):
        """The help of all flags, or of the common ones"""
        hidden = []
        if self.common:
            hidden = [action for action in self._actions if action.option_strings
                      and not self.common & {*action.option_strings}]
        texts = [action.help for action in hidden]
        for action in hidden:
            action.help = argparse.SUPPRESS
        self._action_groups.sort(key=lambda group: TITLES.get(group.title, -1))
        said = super().format_help()
        for action, text in zip(hidden, texts):
            action.help = text
        return said

    def error(self, message):
        said = message
        for pattern, plain in PLAIN_ERRORS:
            said = re.sub(f"(?s){pattern}", plain, said, count=1)
        if message.startswith("argument preset: invalid choice"):
            [found] = re.findall(r"invalid choice: '(.*?)' \(", message) or [""]
            said += "; name a text file with --data"
            if os.path.exists(found):
                said = f"{found} is a file; did you mean --data {shlex.quote(found)}?"
        raise UserError(f"{said}; see {self.prog} --help")

    def instead_of_lora(self, name):
        """What to type instead of an unknown flag --lora..., such as one of other programs"""
        if "dropout" in name:
            return "LoRA has no dropout here; drop the flag"
        if "--lora" in self.flags:
            return "expected --lora R for the rank, --lora-alpha or --lora-targets"
        if "--adapter" in self.flags:
            return ("expected --adapter FOLDER, which uses an adapter; --lora trains one, with "
                    "train, sft, dpo and rl of nanoeuler.py")
        return (f"LoRA trains on the CPU, with train, sft, dpo and rl of nanoeuler.py, found "
                f"{self.prog}")

    def need_flags(self, argv):
        """Reports the first unknown flag.  argparse would report the word after the flag instead,
        because it takes that word for a positional argument."""
        for word in argv:
            if word == "--":                 # no word after it is a flag
                break
            name, _, value = word.partition("=")
            if not name.startswith("--") or " " in word:
                continue
            if value == "--":                # argparse removes it, and then finds no value
                self.error(f"{name}: expected a value, found --")
            if not any(flag.startswith(name) for flag in self.flags):    # a prefix will do
                if name.startswith("--lora"):
                    self.error(f"{name}: {self.instead_of_lora(name)}")
                near = difflib.get_close_matches(name, self.flags, n=1, cutoff=0.7)
                self.error(f"unknown flag {name}" + "".join(f" (did you mean {x}?)" for x in near))

TITLES = {title: i for i, (title, _) in enumerate(GROUPS)}

class Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Leaves the lines of an example as they are."""

    def _fill_text(self, text, width, indent):
        return text if text.startswith("example:") else super()._fill_text(text, width, indent)

class HelpAll(argparse.Action):
    """--help-all: prints the help of all flags, and exits."""

    def __call__(self, parser, values, chosen, name=None):
        parser.common = None
        parser.print_help()
        parser.exit()

def add_arguments(parser, call, *args, settings=(), shape=()):
    """Declares a verb, and returns its parser.  The verb calls `call` with its arguments and with
    the flags that are given.  settings: fields of a run; one without a help text gets no flag.
    shape: fields of Config"""
    parser.set_defaults(call=call)
    flags = [flag(f, f.default) for f in settings if f.metadata["help"]]
    flags += [flag(f, "of the model") for f in shape]
    for names, options in (*args, THREADS, *flags):
        names = parser.group(names[0]).add_argument(*names, **options).option_strings
        parser.flags = *parser.flags, *(name for name in names if name.startswith("--"))
    flags = [action for action in parser._actions if action.option_strings]
    if len(flags) > MOST_SHOWN:
        common = COMMON - SELDOM.get(parser.prog.rpartition(" ")[2], set())
        n = sum(not common & {*action.option_strings} for action in flags)
        parser.add_argument("--help-all", action=HelpAll, nargs=0, default=argparse.SUPPRESS,
                            help=f"show all flags, {n} more, and exit")
        parser.flags, parser.common = (*parser.flags, "--help-all"), common
        words = [{"?": "[{}]", "*": "[{} ...]"}.get(a.nargs, "{}").format(a.metavar or a.dest)
                 for a in parser._actions if not a.option_strings]
        parser.usage = " ".join(["%(prog)s", *words, "[flags]"])
    return parser

def add_verbs(parsers, verbs, chosen):
    """Adds rows of VERBS to argparse's list of parsers.  Only the modules of the verbs in `chosen`
    are imported.  A module's function NAME_verb(add) declares the arguments of the verb NAME: it
    calls `add`, which is `add_arguments` with the parser."""
    on_gpu = any(module.endswith(".on_gpu") for _, module, _ in verbs)
    program = "nanoeuler_cuda.py" if on_gpu else "nanoeuler.py"
    for name, module, text in verbs:
        parser = parsers.add_parser(name, help=text, description=text, formatter_class=Formatter)
        parser.epilog = f"example:\n  {typed(program)} {EXAMPLES[name]}"
        if name in chosen:
            declare = getattr(importlib.import_module(module), f"{name}_verb")
            declare(partial(add_arguments, parser))

def parse(verbs, text, argv):
    """{name: value} of the command line: the verb's function as `call`, and its arguments"""
    argv = argv or ["--help"]
    root = Parser(description=text)
    root.add_argument("--version", action="version", version=f"nanoeuler {__version__}")
    parsers = root.add_subparsers(required=True, metavar="VERB")
    add_verbs(parsers, verbs, chosen=argv[:1])
    verb = parsers.choices.get(argv[0])
    near = difflib.get_close_matches(argv[0], parsers.choices, n=1, cutoff=0.7)
    if not verb and any(argv[0] == name for name, *_ in VERBS):      # asked of nanoeuler_cuda.py
        root.error(f"{argv[0]} is a verb of nanoeuler.py")
    if near and not verb:
        root.error(f"unknown verb {argv[0]} (did you mean {near[0]}?)")
    if verb:
        verb.need_flags(argv[1:])
    if verb and "--" not in argv:
        return vars(verb.parse_intermixed_args(argv[1:]))        # files may follow flags
    return vars(root.parse_args(argv))       # it takes no word after -- for a flag

def run_verb(verbs, text, argv=None):
    """Runs the verb that argv names, from these rows of VERBS, and returns the exit code.
    0: success, or a run was stopped and saved.  1: a self-test failed.  2: an error that the user
    can fix, printed in one line.  130: Ctrl-C, with nothing to save."""
    replace_bad_characters()
    try:
        need(not numba.config.DISABLE_JIT, "NUMBA_DISABLE_JIT is set, but this program needs "
             "Numba's compiler; unset it")
        chosen = parse(verbs, text, sys.argv[1:] if argv is None else argv)
        call = chosen.pop("call")
        use_threads(chosen.pop("threads"))
        return call(**chosen) or 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:                  # the reader of the output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UserError, ModuleNotFoundError, MemoryError, OSError) as e:
        print(f"nanoeuler: {printable(problem(e))}", file=sys.stderr)
        return 2
