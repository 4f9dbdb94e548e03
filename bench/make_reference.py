"""Writes docs/reference.md: every verb and flag of the three programs, from their own parsers.

    python bench/make_reference.py              prints the page
    python bench/make_reference.py --write      writes it to docs/reference.md

No GPU is needed: the verbs of nanoeuler_cuda.py are declared without one.
"""
import argparse
import importlib
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from nanoeuler_parts.cli import add_verbs, Parser

PAGE = ROOT / "docs" / "reference.md"
MACHINE = "depends on the machine"
START = """# Reference: every verb and flag

This page is generated from the programs by `python bench/make_reference.py --write`. The same text
is printed by `--help` of each verb. Where a verb has many flags, `--help` shows the common ones,
and `--help-all` all of them.

A flag may be shortened as long as it stays unique. Files may stand before or after flags. `-` as a
prompt reads standard input. `--` ends the flags. Exit codes: 0 done, 1 a self-test failed, 2 an
error that the user can correct, 130 interrupted with nothing to save.
"""


def verbs_of(module):
    """{name of a verb: its parser}, of the module with the table VERBS of a program"""
    parsers = Parser().add_subparsers()
    add_verbs(parsers, module.VERBS, chosen=[name for name, *_ in module.VERBS])
    return parsers.choices


def depends_on_the_machine(program, verb, name):
    if name == "--dtype":
        return program == "nanoeuler.py" and verb != "eval"
    return name in ("--threads", "--weights")


def cell(text):
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;").replace("%%", "%")


def default_of(action, text):
    """(help without its default, the default in words)"""
    said = re.search(r" ?\(default: (.*)\)$", text)
    if said:
        words = {"True": "on", "False": "off", "empty": ""}
        return text[:said.start()], words.get(said[1], said[1].strip())
    if action.required or action.default in (None, argparse.SUPPRESS):
        return text, ""
    if isinstance(action.default, bool):
        return text, "on" if action.default else "off"
    if isinstance(action.default, list):
        return text, " ".join(action.default)
    return text, str(action.default)


def row(program, verb, action):
    flags = [name for name in action.option_strings if name.startswith("--")]
    name = ", ".join(f"`{flag}`" for flag in flags) or f"`{(action.metavar or action.dest)}`"
    text, default = default_of(action, action.help or "")
    if flags and depends_on_the_machine(program, verb, flags[0]):
        default = MACHINE
    if action.choices:
        text += f" (one of {', '.join(action.choices)})"
    if default and " " not in default and default not in ("on", "off"):
        default = f"`{default}`"
    return f"| {name} | {cell(text)} | {cell(default)} |"


def table(program, verb, parser):
    """Arguments first, then flags, each in the order of `--help`."""
    actions = [a for a in parser._actions if not {"-h", "--help-all"} & {*a.option_strings}]
    actions.sort(key=lambda a: bool(a.option_strings))
    head = ["| | effect | default |", "|---|---|---|"]
    return [*head, *(row(program, verb, action) for action in actions)]


def usage(program, verb, parser):
    words = [f"{name} " for name in (program, verb) if name]
    for a in parser._actions:
        if not a.option_strings:
            name = a.metavar or a.dest
            words.append(f"[{name}] " if a.nargs in ("?", "*") else f"{name} ")
    return f"    python {''.join(words)}[flags]"


def section(program, verb, parser):
    return [f"### {program} {verb}".rstrip(), "", usage(program, verb, parser), "",
            f"{cell(parser.description)}", "", *table(program, verb, parser), ""]


def page():
    """The text of docs/reference.md"""
    lines = START.splitlines() + [""]
    for name, module in (("nanoeuler", "nanoeuler_parts.cli"),
                         ("nanoeuler_cuda", "nanoeuler_parts.tools.on_gpu")):
        lines += [f"## {name}.py", ""]
        for verb, parser in verbs_of(importlib.import_module(module)).items():
            lines += section(f"{name}.py", verb, parser)
    import bpe
    lines += ["## bpe.py", "", *section("bpe.py", "", bpe.parser())]
    return "\n".join(lines).rstrip() + "\n"


def main():
    ours = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    ours.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    if ours.parse_args().write:
        PAGE.write_text(page(), encoding="utf-8")
        print(f"{PAGE.relative_to(ROOT)} is written")
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
