"""Rewards of the verb `rl`: a function (example, answer) -> number for each answer.

Built in are exact, contains, regex and length.  A user's own is `reward` of a Python file.
"""
import contextlib
import hashlib
import inspect
import math
import numbers
import os
import re
import runpy
import signal
import threading
import time
import traceback

import numpy as np

from bpe import need, note, printable, UserError
from nanoeuler_parts.files.printing import counted
from nanoeuler_parts.tuning.examples import answered_in, read_file
from nanoeuler_parts.tuning.formats import words_of

SLOWEST = 1.0                # seconds of one reward
SHOWN = 200                  # characters of an example and of an answer in a message

# ---- built in
def expected_in(example):
    """The text in the field `output`"""
    return "\n".join(words_of(answered_in(example, "output"))).strip()

def exact(example, answer):
    """1 if the answer is `output`, apart from blanks at both ends, else 0"""
    return float(answer.strip() == expected_in(example))

def contains(example, answer):
    """1 if the answer contains `output`, else 0"""
    return float(expected_in(example) in answer)

def regex(example, answer):
    """1 if the regular expression in `output` matches a part of the answer, else 0"""
    return float(bool(re.search(expected_in(example), answer)))

def need_text(example):
    """Rejects an example whose field `output` is empty: every answer contains an empty text."""
    need(expected_in(example), "output is empty, expected the text of an answer")

def need_pattern(example):
    """Rejects an example whose field `output` is no regular expression."""
    need_text(example)
    pattern = expected_in(example)
    try:
        re.compile(pattern)
    except re.error as e:
        raise UserError(f"output is {pattern!r:.60}, expected a regular expression "
                        f"({e})") from None

def length(example, answer):
    """The number of words in the answer"""
    return float(len(answer.split()))

BUILT_IN = {f.__name__: f for f in (exact, contains, regex, length)}
WITHOUT_OUTPUT = {"length"}  # these do not read `output`
CHECKS = {"exact": need_text, "contains": need_text, "regex": need_pattern}    # of an example

def need_reward(name):
    """Rejects a setting --reward that names neither a built-in reward nor a Python file."""
    need(name in BUILT_IN or name.endswith(".py"), f"--reward: expected "
         f"{', '.join(BUILT_IN)}, or a Python file with the function reward(example, answer), "
         f"found {name!r:.80}")

def read_for(name, path, field, ignore):
    """The ExampleFile of questions for this reward.  Those for a reward of the user's own, and for
    `length`, need no `output`.     field, ignore: as in `read_file`"""
    needs_output = name in BUILT_IN and name not in WITHOUT_OUTPUT
    return read_file(path, ["output"], field, ignore, optional=not needs_output,
                     check=CHECKS.get(name))

# ---- a Python file
EXPECTED = "def reward(example, answer): return 1.0 if answer == example[\"output\"] else 0.0"

def function_of(name):
    """(the function (example, answer) -> number, the SHA-256 of its file, or "")"""
    if name in BUILT_IN:
        return BUILT_IN[name], ""
    need(os.path.isfile(name), f"--reward {name}: No such file; write a Python file with the "
         f"function reward, such as {EXPECTED}")
    with open(name, "rb") as f:
        digest = hashlib.sha256(f.read()).hexdigest()
    try:
        found = runpy.run_path(name).get("reward")
    except (Exception, SystemExit) as e:
        fault = said_by(e, name)
        raise UserError(f"{name}: it cannot be run: {fault}; correct the file") from None
    fault = "" if callable(found) else shown(found) if found is not None else "none"
    fault = fault or other_signature(found)
    need(not fault, f"{name}: expected the function reward(example, answer), found {fault}; write "
         f"it, such as {EXPECTED}")
    return found, digest

def other_signature(function):
    """The signature of a function that cannot be called as reward(example, answer).  Of others, an
    empty text."""
    try:
        signature = inspect.signature(function)
    except ValueError:                       # some functions in C have none: try it
        return ""
    try:
        signature.bind(None, None)
    except TypeError:
        return f"reward{signature}"
    return ""

def said_by(e, name):
    """An exception in words, with the last line of the file `name` that it passed"""
    if isinstance(e, SyntaxError) and e.filename == name:
        return printable(f"{type(e).__name__}: {e.msg}, line {e.lineno}, "
                         f"{(e.text or '').strip()!r}"[:SHOWN])
    lines = [frame.lineno for frame in traceback.extract_tb(e.__traceback__)
             if frame.filename == name]
    where = f", line {lines[-1]}" if lines else ""
    try:
        said = f"{type(e).__name__}: {e}"
    except Exception:                        # of its own __str__
        said = type(e).__name__
    return printable(said[:SHOWN]) + where

class TooSlow(Exception):
    """A reward took longer than SLOWEST."""

@contextlib.contextmanager
def limited(seconds):
    """Raises TooSlow within it after these seconds.  Only the main thread can be interrupted, and
    not on Windows.  There, `Rewards` notices it afterwards."""
    can = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if not can:
        yield
        return

    def stop(number, frame):
        raise TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

class Rewards:
    """The reward of answers.  One that fails is NaN: it raises an exception, returns no finite
    number, or takes longer than SLOWEST.  The first failure of each kind is reported."""

    def __init__(self, name):
        need_reward(name)
        self.name = name
        self.function, self.sha256 = function_of(name)
        self.reported = set()

    def __call__(self, example, answer):
        """The reward of one answer, a float; NaN if it fails"""
        began, kind, fault, found = time.perf_counter(), "", "", math.nan
        try:
            with limited(SLOWEST):
                found = self.function(example, answer)
        except TooSlow:
            pass
        except (Exception, SystemExit) as e:
            kind, fault = "exception", f"raised {said_by(e, self.name)}"
        if not kind and time.perf_counter() - began > SLOWEST:
            kind, fault = "slow", f"took more than {SLOWEST:g} second"
        if not kind and not is_number(found):
            kind, fault = "number", f"returned {shown(found)}, expected a finite number"
        if not kind:
            return float(found)
        if kind not in self.reported:
            self.reported.add(kind)
            self.report(fault, example, answer)
        return math.nan

    def report(self, fault, example, answer):
        asked = f"{example['instruction']} {example['input']}".strip()
        note(f"the reward {printable(self.name)} {fault}, for the question "
             f"{asked[:SHOWN]!r} and the answer {answer[:SHOWN]!r}; such an answer has no "
             f"reward, and nothing is learned from it; more of this kind are counted, but not "
             f"reported")

    def of(self, examples, answers):
        """The rewards of these answers, a list.  Rejects a function that fails for all of them."""
        found = [self(e, answer) for e, answer in zip(examples, answers)]
        self.need_one(found)
        return found

    def need_one(self, found):
        """Ends the run if the reward failed for all of these answers."""
        need(not all(map(math.isnan, found)), f"the reward {self.name} failed for all of "
             f"{counted(len(found), 'answer')}; correct it")

def is_number(x):
    try:
        return isinstance(x, numbers.Real | np.bool_) and math.isfinite(x)
    except OverflowError:                    # a whole number or a fraction beyond any float
        return False

def shown(x):
    """An object of the user's file in at most 60 characters"""
    try:
        return printable(f"{x!r:.60}")
    except Exception:                        # such as a whole number of more than 4,300 digits
        return f"an object of type {type(x).__name__}"
