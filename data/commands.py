"""The command line: settings that are checked, their flags, one line for what went wrong."""
import argparse
import contextlib
import importlib
import os
import pathlib
import sys
from dataclasses import field, fields
from functools import partial

from numba import get_num_threads, set_num_threads

from bpe import UserError, need

class Settings:
    """A dataclass whose fields are checked: their type, and the range given as metadata."""

    def check(self):
        for f in fields(self):
            value, (low, high) = getattr(self, f.name), f.metadata.get("range", (0, 1 << 62))
            need(type(value) is f.type or f.type is float and type(value) is int,
                 f"{f.name} is {value!r}, expected {f.type.__name__}")
            need(f.type not in (int, float) or low <= value <= high,
                 f"{f.name} is {value}, expected {low:g} to {high:g}")
        return self

def setting(default, low, high, text=""):
    return field(default=default, metadata={"range": (low, high), "help": text})

def physical_cores():
    """Hyper-threads count once: they share the multipliers."""
    siblings = pathlib.Path("/sys/devices/system/cpu").glob("cpu*/topology/thread_siblings_list")
    return len({path.read_text(encoding="ascii") for path in siblings}) or os.cpu_count() or 1

arg = lambda *names, **options: (names, options)         # for add_argument
FILE = arg("file", nargs="?", default="nanoeuler.bin", help="checkpoint")
CHAT = arg("file", nargs="?", default="nanoeuler_chat.bin", help="checkpoint")
TEXT = arg("prompt", help="text to begin with")
FORCE = arg("--force", action="store_true", help="replace what is there")
RUN = arg("--resume", action="store_true", help="go on with --out"), FORCE
THREADS = arg("--threads", type=int, default=0, help="0: one a physical core")

def out(default):
    return arg("--out", default=default, help="file to write")

def bench(script, name):
    """What few runs need: a function of bench/script.py."""
    return lambda *args, **flags: getattr(importlib.import_module(f"bench.{script}"), name)(
        *args, **flags)

def add_verb(verbs, name, call, text, *args, settings=(), shape=()):
    """A verb that calls `call` with its arguments, and with those settings, of the run and of the
    model's shape, that are given: --resume compares them."""
    v = verbs.add_parser(name, help=text, description=text,
                         formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    v.set_defaults(call=call)
    for names, options in (*args, THREADS):
        v.add_argument(*names, **options)
    for f in (*settings, *shape):
        v.add_argument("--" + f.name.replace("_", "-"), type=f.type, default=argparse.SUPPRESS,
                       help=f"{f.metadata['help']} "
                            f"(default: {'of the model' if f in shape else f.default})")
    return v

def run_verb(add_verbs, text, argv=None):
    """Runs the verb that argv names, of those that add_verbs adds.  Returns the exit code."""
    root = argparse.ArgumentParser(description=text)
    verbs = root.add_subparsers(required=True, metavar="VERB")
    add_verbs(partial(add_verb, verbs))
    for stream in sys.stdin, sys.stdout, sys.stderr:     # a terminal may know ASCII only
        with contextlib.suppress(AttributeError):        # None, or a notebook's
            stream.reconfigure(errors="replace")
    argv = sys.argv[1:] if argv is None else argv
    v = verbs.choices.get(argv[0]) if argv else None     # its files may stand behind its flags
    a = vars(v.parse_intermixed_args(argv[1:]) if v and "--" not in argv else root.parse_args(argv))
    most = get_num_threads()
    call, threads = a.pop("call"), a.pop("threads")
    try:
        need(0 <= threads <= most, f"--threads is {threads}, expected 0 to {most}")
        set_num_threads(threads or min(physical_cores(), most))
        return call(**a)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:                  # the reader of our output is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except UserError as e:
        problem = e
    except ModuleNotFoundError as e:         # an extra
        problem = f"{e}; if it is a package: pip install {e.name}"
    except MemoryError as e:
        problem = f"out of memory ({e}); use a smaller --batch or --seq-len, or --weights int8"
    except OSError as e:
        problem = f"{e.filename or 'a file'}: {e.strerror}; see --out"
    print(f"nanoeuler: {problem}", file=sys.stderr)
    return 2
