"""The text of an error that ends a program: its cause and a remedy, in one line."""
from nanoeuler_parts.files.settings import flag_of, SettingError

# Optional packages and their versions, as in pyproject.toml: {module: argument of pip install}
PACKAGES = {"gguf": "gguf>=0.19,<0.20", "huggingface_hub": "huggingface_hub>=2.4,<3",
            "pyarrow": "pyarrow>=22", "jinja2": "jinja2>=3.1.6,<4",
            "markdown_it": "markdown-it-py>=3,<5", "starlette": "starlette>=1,<2",
            "uvicorn": "uvicorn>=0.38,<1", "tensorboardX": "tensorboardX>=2.6",
            "wandb": "wandb>=0.19"}

def problem(e):
    """The cause of an error and its remedy, in one line.  Settings are named as flags."""
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
