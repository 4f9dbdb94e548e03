"""The verb `info`: describes a checkpoint."""
import os
from dataclasses import asdict

from nanoeuler import MODEL, model_to_use, n_params, print_table, read_checkpoint, shown_name

def info(file=None):
    """`info`: prints a checkpoint's configuration, progress and training text.  Reading the file
    verifies its checksum."""
    file = model_to_use(file, place="")
    c = read_checkpoint(file)
    s = c.state
    text = ", ".join(str(s.options.get("data")).split("\n"))
    if s.text_sha256:                        # unknown for an imported model
        text += f", sha256 {s.text_sha256[:12]}"
    print_table(shown_name(file), [
        ("parameters", f"{n_params(c.cfg):,}"), *asdict(c.cfg).items(), ("kind", s.kind),
        ("step", f"{s.step:,} of {s.n_steps or 0:,}"), ("tokens seen", f"{s.tokens_seen:,}"),
        ("validation", f"{s.bits_per_byte:.4f} bits/byte" if s.bits_per_byte else "none yet"),
        ("text", text), *([("starts from", s.source)] if s.source else []),
        ("matrices", "int8, one float32 scale per row" if c.matrices == "int8" else "float32"),
        ("moments", "yes" if c.moments else "no"), ("size", f"{os.path.getsize(file):,} bytes"),
        ("tokenizer", f"sha256 {c.tokenizer.hash()}"), ("checksum", "matches")])

def info_verb(add):
    add(info, MODEL)
