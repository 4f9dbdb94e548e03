"""The verb `info`: describes a checkpoint or a LoRA adapter."""
import contextlib
import json
import os
from dataclasses import asdict

from bpe import reading, UserError
from nanoeuler import Config, n_params
from nanoeuler_parts.chat.models import model_to_use
from nanoeuler_parts.checkpoint.bundled import model_path, shown_name
from nanoeuler_parts.checkpoint.file import (
    ADAPTER_CONFIG, ADAPTER_FILES, adapter_at, read_checkpoint,
)
from nanoeuler_parts.checkpoint.state import State
from nanoeuler_parts.files.printing import names_in, print_table
from nanoeuler_parts.files.safetensors import read_meta
from nanoeuler_parts.flags import MODEL, SHAPE

ALWAYS = [f.name for f in SHAPE] + ["rope_theta", "norm_eps"]       # the others: if RoPE is scaled

MATRICES = {"f32": "float32", "bf16": "bfloat16", "int8": "int8, one float32 scale per row"}

def info(file=None):
    """`info`: prints a checkpoint's configuration, progress and training text.  Reading the file
    verifies its checksum."""
    file = model_to_use(file, place="")
    if folder := adapter_at(file):
        print_adapter(folder)
        return
    try:
        c = read_checkpoint(file)
    except UserError:
        print_header(file)
        raise
    s = c.state
    print_table(shown_name(file), [
        *rows_of(c.cfg, s), ("text", text_of(s)),
        *([("starts from", s.source)] if s.source else []),
        ("matrices", MATRICES[c.matrices]),
        ("moments", "yes" if c.moments else "no"), ("size", f"{os.path.getsize(file):,} bytes"),
        ("tokenizer", f"sha256 {c.tokenizer.hash()}"), ("checksum", "matches")])

def rows_of(cfg, s):
    """The rows of a Config and a State"""
    shape = [(name, value) for name, value in asdict(cfg).items()
             if value not in (None, "") and (name in ALWAYS or cfg.rope_scaling)]
    return [("parameters", f"{n_params(cfg):,}"), *shape, *progress_of(s)]

def text_of(s):
    """The names of the training data of a State, and the beginning of their checksum"""
    text = names_in(str(s.options.get("data") or "unknown"))
    # without a checksum for an imported model
    return f"{text}, sha256 {s.text_sha256[:12]}" if s.text_sha256 else text

def progress_of(s):
    """The rows of a State"""
    return [("kind", s.kind), ("step", f"{s.step:,} of {s.n_steps or 0:,}"),
            ("tokens seen", f"{s.tokens_seen:,}"),
            ("validation", f"{s.bits_per_byte:.4f} bits/byte" if s.bits_per_byte else "none yet")]

def print_adapter(folder):
    """Prints what the files of an adapter say.  Its model is not read."""
    from nanoeuler_parts.lora.files import summary_of
    found = summary_of(folder)
    lora, base, s = found.lora, shown_name(model_path(found.base)), found.state
    if found.base_sha256:
        base += f", checksum {found.base_sha256[:12]}"
    size = sum(os.path.getsize(os.path.join(folder, name))
               for name in (ADAPTER_CONFIG, ADAPTER_FILES[1]))
    print_table(f"{folder}, a LoRA adapter", [
        ("model", base or "not named"), ("rank", f"{lora.rank}"), ("alpha", f"{lora.alpha:g}"),
        ("targets", ", ".join(lora.targets)), ("layers", f"{found.layers}"),
        ("parameters", f"{found.parameters:,}"),
        *([*progress_of(s), ("text", text_of(s))] if s else []), ("size", f"{size:,} bytes"),
        ("checksum", "matches" if found.has_checksum else "none")])

def print_header(file):
    """Prints what the header of a damaged checkpoint says.  Without a readable header, nothing."""
    with contextlib.suppress(UserError), reading(file, "copy it again"):
        meta = read_meta(file, whole=False)
        cfg, state = Config(**json.loads(meta["config"])), State(**json.loads(meta["state"]))
        print_table(shown_name(file), [*rows_of(cfg.check(), state.check()),
                                       ("size", f"{os.path.getsize(file):,} bytes"),
                                       ("checksum", "the file is incomplete or damaged")])

def info_verb(add):
    add(info, MODEL)
