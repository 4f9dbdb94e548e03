"""The verb `info`: describes a checkpoint."""
import os
from dataclasses import asdict

from nanoeuler import (
    MODEL, model_to_use, n_params, print_table, read_checkpoint, SHAPE, shown_name,
)

ALWAYS = [f.name for f in SHAPE] + ["rope_theta", "norm_eps"]       # the others: if RoPE is scaled

MATRICES = {"f32": "float32", "bf16": "bfloat16", "int8": "int8, one float32 scale per row"}

def info(file=None):
    """`info`: prints a checkpoint's configuration, progress and training text.  Reading the file
    verifies its checksum."""
    file = model_to_use(file, place="")
    c = read_checkpoint(file)
    s = c.state
    text = ", ".join(str(s.options.get("data")).split("\n"))
    if s.text_sha256:                        # unknown for an imported model
        text += f", sha256 {s.text_sha256[:12]}"
    shape = [(name, value) for name, value in asdict(c.cfg).items()
             if value not in (None, "") and (name in ALWAYS or c.cfg.rope_scaling)]
    print_table(shown_name(file), [
        ("parameters", f"{n_params(c.cfg):,}"), *shape, ("kind", s.kind),
        ("step", f"{s.step:,} of {s.n_steps or 0:,}"), ("tokens seen", f"{s.tokens_seen:,}"),
        ("validation", f"{s.bits_per_byte:.4f} bits/byte" if s.bits_per_byte else "none yet"),
        ("text", text), *([("starts from", s.source)] if s.source else []),
        ("matrices", MATRICES[c.matrices]),
        ("moments", "yes" if c.moments else "no"), ("size", f"{os.path.getsize(file):,} bytes"),
        ("tokenizer", f"sha256 {c.tokenizer.hash()}"), ("checksum", "matches")])

def info_verb(add):
    add(info, MODEL)
