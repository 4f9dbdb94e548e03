"""Finding models: the checkpoints in a folder, and the one to use if none is named."""
import contextlib
import os

from bpe import need, note, UserError
from nanoeuler import Model
from nanoeuler_parts.checkpoint.bundled import BUNDLED, bundled_path, model_path
from nanoeuler_parts.checkpoint.file import begins_as_checkpoint
from nanoeuler_parts.files.safetensors import read_meta
from nanoeuler_parts.flags import as_text, typed

MOST_MODELS = 1000           # checkpoints in a folder that are considered, the newest ones
MOST_FILES = 10 * MOST_MODELS                # files opened at most to find these

# --out accepts any name, but files of these kinds are never searched for checkpoints: logs, token
# caches, texts and programs.  A .tmp file is still being written.
OTHER_FILES = (".jsonl", ".tokens", ".part", ".tmp", ".txt", ".json", ".md", ".py", ".csv", ".png",
               ".svg", ".html", ".gz", ".safetensors", ".gguf", ".parquet")
LEAST_BYTES = 1024           # every checkpoint is larger

def models_in(folder):
    """[(time of the last change, name)] of the files in a folder that may be checkpoints.
    Every file named *.bin is one of them.  Files of other names are opened, the newest MOST_MODELS,
    and must begin as a checkpoint, and so are those named *.bin if they are more than MOST_MODELS.
    Hidden files and OTHER_FILES are left out, and so are names that no request could contain."""
    found, others = [], []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.name.endswith(OTHER_FILES):
                continue
            with contextlib.suppress(OSError):
                if entry.is_file() and is_utf8(folder, entry.name):
                    info = entry.stat()
                    place = found if entry.name.endswith(".bin") else others
                    if place is found or info.st_size > LEAST_BYTES:
                        place.append((info.st_mtime, entry.name))
    if len(found) > MOST_MODELS:             # such as shards of a data set
        found = checkpoints_among(folder, found, MOST_FILES)
    return found + checkpoints_among(folder, others, MOST_MODELS)

def checkpoints_among(folder, found, most):
    """Those of the newest `most` files (time, name) that begin as checkpoints"""
    kept = []
    for changed, name in sorted(found, reverse=True)[:most]:
        with contextlib.suppress(OSError):   # it cannot be read, or was removed meanwhile
            if begins_as_checkpoint(os.path.join(folder, name)):
                kept.append((changed, name))
    return kept

LEFT_OUT = set()             # paths that `is_utf8` has reported

def is_utf8(folder, name):
    """Is the name of this file valid UTF-8?  A note says once if it is not."""
    path, is_valid = os.path.join(folder, name), as_text(name) == name
    if not is_valid and path not in LEFT_OUT:
        LEFT_OUT.add(path)
        note(f"{path} is left out, as its name is not valid UTF-8; rename it to use it as a model")
    return is_valid

def newest_model(folder=os.curdir):
    """The name of the newest checkpoint in a folder, by modification time; None if there is none.
    Files are opened from the newest on."""
    for _, name in sorted(models_in(folder), reverse=True)[:MOST_MODELS]:
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):
            if begins_as_checkpoint(path):
                try:
                    read_meta(path)
                    return name
                except UserError:            # an older one is used instead
                    note(f"{name} is incomplete or damaged")
    return None

def model_to_use(file=None, place=None):
    """The checkpoint that is named, else the newest one in this folder, else the bundled one.
    place: where on the command line to name a checkpoint, for the note that prints the choice.
    If place is None, no note is printed."""
    if file is not None:
        return model_path(file)
    newest, bundled = newest_model(), bundled_path()
    need(newest or os.path.exists(bundled), f"expected a model in this folder, found none; name "
         f"a checkpoint, or train one: {typed(Model.program)} train")
    said = (f"the {BUNDLED} model is used, as this folder has no model; to use another, name its "
            f"file{place}")
    if newest:
        said = (f"{newest} is used, as the newest model in this folder; to use another, name its "
                f"file or {BUNDLED}{place}")
    if place is not None:
        note(said)
    return newest or bundled

def note_dropped(n, T):
    """Says that the beginning of a prompt of n tokens is dropped, if the context of T is shorter.
    """
    if n > T:
        note(f"the beginning of the prompt is dropped: its {n} tokens exceed the context of {T}")

AFTER_PROMPT = " after the prompt"

def need_prompt_first(prompt, file):
    need(file is None or os.path.exists(file) or not os.path.isfile(model_path(prompt)),
         f"{file}: No such file; the prompt comes first, the checkpoint {prompt} after it")
