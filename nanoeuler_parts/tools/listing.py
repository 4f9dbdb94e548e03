"""The verb `list`: the models and LoRA adapters in a folder."""
import contextlib
import json
import os
import time

from bpe import need, note, printable, reading, UserError
from nanoeuler import Config, Model, n_params
from nanoeuler_parts.chat.models import models_in, MOST_MODELS, newest_model
from nanoeuler_parts.checkpoint.bundled import BUNDLED, bundled_path, is_bundled
from nanoeuler_parts.checkpoint.file import ADAPTER_FILES, adapter_at, begins_as_checkpoint
from nanoeuler_parts.checkpoint.state import State
from nanoeuler_parts.files.printing import counted
from nanoeuler_parts.files.safetensors import read_meta
from nanoeuler_parts.flags import arg, file_name, typed

MATRICES = {"f32": "float32", "bf16": "bfloat16", "int8": "int8"}        # in a checkpoint
UNITS = {"year": 365 * 86_400, "day": 86_400, "hour": 3600, "minute": 60}        # in seconds

def age(seconds):
    """A span of time in its largest unit: 3 minutes, 2 days"""
    for unit, length in UNITS.items():
        if seconds >= length:
            return counted(int(seconds // length), unit)
    return counted(max(0, int(seconds)), "second")

def plain(path):
    """The path without ./ at its beginning, and without / at its end"""
    return path.removeprefix(os.path.join(os.curdir, "")).rstrip(os.sep) or path

def candidates(folders, recursive):
    """([(time of the last change, path)] of the files that may be checkpoints, [the same of the
    folders that hold a LoRA adapter]), the newest first.  A folder that is named twice is listed
    once."""
    found, adapters = {}, {}
    for folder in folders:
        need(os.path.exists(folder), f"{folder}: No such folder; name another one")
        need(os.path.isdir(folder), f"{folder}: expected a folder, found a file; `info` describes "
             f"one checkpoint")
        for place, inner, _ in os.walk(folder) if recursive else [(folder, [], [])]:
            inner[:] = [name for name in inner if not name.startswith(".")]
            here = os.path.realpath(place)
            for changed, name in models_in(place):
                if name != ADAPTER_FILES[0] or not adapter_at(place):
                    found[os.path.join(here, name)] = changed, plain(os.path.join(place, name))
            for path in [place, *(os.path.join(place, name) for name in folders_in(place))]:
                with contextlib.suppress(OSError):       # it was removed meanwhile
                    if adapter_at(path):
                        changed = os.path.getmtime(os.path.join(path, ADAPTER_FILES[1]))
                        adapters[os.path.realpath(path)] = changed, plain(path)
    return sorted(found.values(), reverse=True), sorted(adapters.values(), reverse=True)

def folders_in(folder):
    """Names of the folders in a folder that are not hidden"""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return [x.name for x in entries if not x.name.startswith(".") and x.is_dir()]
    return []

def described(path):
    """The fields of a checkpoint that its header contains.  The data is not read."""
    try:
        with reading(path, "copy it again"):
            meta = read_meta(path)
    except UserError:
        return {"problem": "incomplete"}
    try:
        with reading(path, "name another file"):
            cfg = Config(**json.loads(meta["config"])).check()
            state = State(**json.loads(meta["state"])).check()
            matrices = MATRICES[meta.get("matrices", "f32")]
    except UserError:                        # damaged, or written by a newer version
        return {"problem": "unreadable"}
    return {"kind": "chat" if state.kind == "chat" else "base", "parameters": n_params(cfg),
            "matrices": matrices, "bits_per_byte": state.bits_per_byte, "step": state.step,
            "n_steps": state.n_steps}

def entries_of(found):
    """A dict for each checkpoint among the files.  A file that cannot be opened may be one."""
    for changed, path in found:
        entry = {"file": path, "modified": changed}
        try:
            entry["bytes"] = os.path.getsize(path)
            if begins_as_checkpoint(path):
                yield entry | described(path)
        except FileNotFoundError:            # it was removed meanwhile
            continue
        except OSError:
            yield entry | {"problem": "unreadable"}

def adapter_entries(found):
    """A dict for each LoRA adapter among the folders"""
    if found:
        from nanoeuler_parts.lora.files import summary_of
    for changed, path in found:
        entry = {"file": path, "modified": changed, "kind": "adapter"}
        try:
            a = summary_of(path)
            s = a.state or State()           # PEFT writes no state
            yield entry | {
                "bytes": os.path.getsize(os.path.join(path, ADAPTER_FILES[1])), "model": a.base,
                "rank": a.lora.rank, "parameters": a.parameters,
                "bits_per_byte": s.bits_per_byte, "step": s.step, "n_steps": s.n_steps}
        except (OSError, UserError):
            yield entry | {"problem": "unreadable"}

HEAD = "file", "MB", "kind", "parameters", "matrices", "bits/byte", "steps", "age"
ADAPTER_HEAD = "adapter", "MB", "model", "parameters", "rank", "bits/byte", "steps", "age"
LEFT = "file", "kind", "adapter", "model"    # columns of text; numbers are flush right

def cells(entry, now):
    """The row of an entry, as text"""
    name, size = printable(entry["file"]), f"{entry.get('bytes', 0) / 1e6:,.1f}"
    old = age(now - entry["modified"]) if entry["file"] != BUNDLED else "-"
    if "problem" in entry:
        return [name, size, entry["problem"], "-", "-", "-", "-", old]
    is_adapter = entry["kind"] == "adapter"
    kind, matrices = ((printable(entry["model"]), f"{entry['rank']}") if is_adapter else
                      (entry["kind"], entry["matrices"]))
    bits, planned = entry["bits_per_byte"], entry["n_steps"]
    steps = f"{entry['step']:,}" + (f" of {planned:,}" if planned else "")
    return [name, size, kind, f"{entry['parameters']:,}", matrices,
            f"{bits:.4f}" if bits else "-", steps if entry["step"] or planned else "-", old]

def print_entries(entries, head=HEAD):
    """Prints a table.  A star marks the model that the other verbs use by default."""
    rows = [head, *(cells(entry, time.time()) for entry in entries)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row, used in zip(rows, [False, *(entry.get("default") for entry in entries)]):
        padded = [text.ljust(width) if name in LEFT else text.rjust(width)
                  for name, text, width in zip(head, row, widths)]
        print("*" if used else " ", "  ".join(padded).rstrip())

def entries_in(found):
    """The entries of these candidates, without the bundled model.  At most MOST_MODELS files are
    opened."""
    found = [x for x in found if not is_bundled(x[1])]
    if len(found) > MOST_MODELS:
        note(f"found {len(found):,} files that may be checkpoints; only the newest {MOST_MODELS:,} "
             f"are opened")
    return [*entries_of(found[:MOST_MODELS])]

def bundled_entries():
    """[the entry of the bundled model], or [] if it is not installed"""
    path = bundled_path()
    if not os.path.exists(path):
        return []
    return [entry | {"file": BUNDLED} for entry in entries_of([(os.path.getmtime(path), path)])]

def list_models(folders, recursive=False, as_json=False):
    """`list`: prints the checkpoints in folders, the bundled model, and the LoRA adapters."""
    (found, folders_of_adapters), newest = candidates(folders, recursive), newest_model()
    adapters = [*adapter_entries(folders_of_adapters)]
    own = entries_in(found)
    entries = own + bundled_entries()
    for entry in entries:                    # as in `model_to_use`
        name = entry["file"]
        entry["default"] = os.path.abspath(name) == os.path.abspath(newest) if newest else (
            name == BUNDLED)
    if as_json:
        for entry in entries + adapters:
            print(json.dumps(entry))
        return
    if entries:
        print_entries(entries)
    if adapters:
        print()
        print_entries(adapters, ADAPTER_HEAD)
    if any(entry["default"] for entry in entries):
        print("\n* chat, generate, lens, eval, serve and info use this model if none is named")
    if any("problem" in entry for entry in entries + adapters):
        print("\n`info FILE` reports what is wrong with an incomplete or unreadable file")
    if not own and not adapters and not any(is_bundled(path) for _, path in found):
        print(f"\nno checkpoint found here; train one with:\n    {typed(Model.program)} train")

def list_verb(add):
    add(list_models, arg("folders", nargs="*", type=file_name, default=[os.curdir],
                         metavar="folder", help="folders with checkpoints or LoRA adapters"),
        arg("--recursive", action="store_true", help="also list the folders inside"),
        arg("--json", dest="as_json", action="store_true",
            help="print one JSON object per model or adapter instead of tables"))
