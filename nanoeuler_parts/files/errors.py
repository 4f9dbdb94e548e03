"""The text of an error that ends a program: its cause and a remedy, in one line."""
import re

from nanoeuler_parts.files.settings import flag_of, SettingError

# Optional packages and their versions, as in pyproject.toml: {module: argument of pip install}
PACKAGES = {"gguf": "gguf>=0.19,<0.20", "huggingface_hub": "huggingface_hub>=2.4,<3",
            "pyarrow": "pyarrow>=22", "jinja2": "jinja2>=3.1.6,<4",
            "markdown_it": "markdown-it-py>=3,<5", "starlette": "starlette>=1,<2",
            "uvicorn": "uvicorn>=0.38,<1", "tensorboardX": "tensorboardX>=2.6",
            "wandb": "wandb>=0.19"}

# 256 digits or more, also with commas.  A name of a file has at most 255 bytes.
LONG_INTEGER = re.compile("[0-9]{256,}|[0-9]{1,3}(?:,[0-9]{3}){85,}")
DIGITS_SHOWN = 20

def problem(e):
    """The cause of an error and its remedy, in one line.  Settings are named as flags, and long
    integers are cut."""
    return LONG_INTEGER.sub(shortened, whole_problem(e))

def shortened(found):
    """The first digits of a match of LONG_INTEGER, and their number"""
    digits = found[0].replace(",", "")
    return f"{digits[:DIGITS_SHOWN]}... ({len(digits):,} digits)"

def whole_problem(e):
    if isinstance(e, SettingError):
        return e.message(flag_of)
    if isinstance(e, ModuleNotFoundError):   # an optional package
        package = PACKAGES.get(e.name, e.name)
        return f"the package {e.name} is not installed; run: pip install '{package}'"
    if isinstance(e, MemoryError):
        return (f"out of memory ({e}); use --micro-batch 1 to train, or a smaller --seq-len, or "
                f"--weights int8 to generate")
    if isinstance(e, OSError):
        return f"{e.filename or 'a file'}: {e.strerror or e}; check the path and the disk"
    return str(e)
