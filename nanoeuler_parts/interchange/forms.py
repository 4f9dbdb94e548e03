"""The form of files that other programs wrote: every error says what a file contains and what was
expected, never how Python failed on it."""
import contextlib

from bpe import need, reading, UserError

NAMES = {str: "a text", int: "a whole number", bool: "true or false", type(None): "null",
         float: "a number", list: "a list", dict: "an object"}

def kinds_of(form):
    """The types that a form allows"""
    forms = form if isinstance(form, tuple) else (form,)
    return [type(f) if isinstance(f, list | dict) else f for f in forms]

def need_form(value, form, name):
    """Checks the form of a value of JSON.     name: of the value, for an error message
    A form is a type, or a list [form of each item], or a dict {name: form}, where a name that ends
    in ? may be missing, or a dict {str: form of each value}, or a tuple of alternatives, each of
    another type."""
    kinds = kinds_of(form)
    is_right = type(value) in kinds or type(value) is int and float in kinds
    need(is_right, f"{name or 'it'} is {value!r:.40}, expected "
         f"{' or '.join(NAMES[kind] for kind in kinds)}")
    inner = next((f for f, kind in zip(form if isinstance(form, tuple) else (form,), kinds)
                  if kind is type(value)), None)
    if isinstance(inner, list):
        for i, item in enumerate(value):
            need_form(item, inner[0], f"{name}[{i}]")
    elif isinstance(inner, dict):
        below = f"{name}." if name else ""
        if str in inner:
            for key, item in value.items():
                need_form(item, inner[str], f"{below}{key}")
            return
        for key, of_key in inner.items():
            key, may_be_missing = key.removesuffix("?"), key.endswith("?")
            need(may_be_missing or key in value, f"{below}{key} is missing")
            if key in value:
                need_form(value[key], of_key, f"{below}{key}")

# Words of Python and NumPy in a ValueError, for which the reader of a message has no use
OF_PYTHON = ("to unpack", "zip()", "invalid literal", "could not convert", "cannot reshape",
             "codec can't", "buffer", "broadcast", "not in list", "base 10", "must be", "iterable")

@contextlib.contextmanager
def reading_form(source, remedy):
    """As `reading`, but an error of Python's own, about types or sizes of a value that no check
    covers, becomes a sentence about the file."""
    with reading(source, remedy):
        try:
            yield
        except UserError:
            raise
        except UnicodeDecodeError as e:
            raise ValueError(f"it is not valid UTF-8 at byte {e.start}") from None
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        except (TypeError, AttributeError, IndexError, ArithmeticError, NotImplementedError):
            raise ValueError("an entry has another type or size than such a file has") from None
        except ValueError as e:
            if any(words in str(e) for words in OF_PYTHON):
                raise ValueError("an entry has another form than such a file has") from None
            raise
