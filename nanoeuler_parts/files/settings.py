"""Settings: dataclasses whose values are checked, as flags and files give them."""
import math
import re
from dataclasses import asdict, field, fields
from typing import get_args

from bpe import UserError

class SettingError(UserError):
    """An invalid setting.     message(spell): the text, where spell(name) is how the user writes
    the name of a field.  In str(e) it is the field's own name, as in files and in Python.
    `run_verb` writes the flag instead, and a chat writes /set NAME."""

    def __init__(self, message):
        super().__init__(message(str))
        self.message = message

def need_setting(ok, name, text):
    """Raises a SettingError unless ok: the name of the setting, a colon and the text.  The text may
    name further settings, in braces."""
    if not ok:
        raise SettingError(lambda spell: f"{spell(name)}: " + re.sub(
            r"\{(\w+)\}", lambda found: spell(found[1]), text))

def flag_of(name):
    """The flag of a field: --top-p for top_p"""
    return f"--{name.replace('_', '-')}"

def digits_of(x):
    """A number as the user would type it: 1000000 instead of 1e+06, and 2 instead of 2.0"""
    is_whole = isinstance(x, float) and math.isfinite(x) and x == int(x) and abs(x) < 1e16
    return str(int(x) if is_whole else x)

def limits_of(f, value=-math.inf):
    """The range of a number field in words: 0 to 1; without an upper limit, 1 or more.
    value: the number that lies outside of it"""
    low, high = f.metadata.get("range", (0, 1 << 62))
    if type_of(f) is int and high >= 1 << 40 and value < low:        # no limit in practice
        return f"{low} or more"
    return f"{digits_of(low)} to {digits_of(high)}"

class Settings:
    """A dataclass whose fields are checked: their type, and the range in their metadata.
    A field of type int | None or float | None is None if it is not set.  Flags and files write 0
    for "not set", and older files null, so `__post_init__` turns a 0 in such a field into None."""

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            if type(None) in get_args(f.type) and type(value) in (int, float) and value == 0:
                object.__setattr__(self, f.name, None)   # Config is frozen

    def check(self):
        for f in fields(self):
            value, kind = getattr(self, f.name), type_of(f)
            if value is None and kind is not f.type:
                continue
            allowed = (int, float) if kind is float else (kind,)
            need_setting(type(value) in allowed, f.name,
                         f"expected {KINDS[kind]}, found {value!r:.40}")
            if kind in (int, float):
                low, high = f.metadata.get("range", (0, 1 << 62))
                need_setting(low <= value <= high, f.name, f"expected {limits_of(f, value)}, found "
                             f"{digits_of(value)}")
            if kind is float:                # Numba would compile each kernel again for an int
                object.__setattr__(self, f.name, float(value))
        return self

    def written(self):
        """{name: value} as files store it, with 0 for None"""
        values = asdict(self)
        return {f.name: type_of(f)() if values[f.name] is None else values[f.name]
                for f in fields(self)}

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text",
         list: "a list", dict: "an object"}

def type_of(f):
    """The type of a field's value if it is set: int for int | None"""
    kind, *_ = get_args(f.type) or [f.type]
    return kind

def setting(default, low, high, text="", several=False):
    """A field with the range of its value, low to high, and the help text of its flag.
    Only numbers have a range.  If a field may be None, 0 means "not set" (see Settings).
    several: the flag takes several values, and the field holds one per line"""
    metadata = {"range": (low, high), "help": text, "several": several}
    return field(default=default, metadata=metadata)
