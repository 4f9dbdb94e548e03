"""The verb `import`: converts a Llama from Hugging Face or from a GGUF file to a checkpoint."""
import os
import pathlib
import shlex

import numpy as np

from bpe import need, reading
from nanoeuler import (
    aligned, arg, file_name, FORCE, Model, n_params, named, refuse_overwrite, State, tensor_shapes,
    typed, write_checkpoint,
)
from nanoeuler_parts.files.safetensors import need_finite, note_large
from nanoeuler_parts.files.writing import need_another
from nanoeuler_parts.interchange.gguf import llama_of_gguf
from nanoeuler_parts.interchange.huggingface import folder_of_hub, IN_HUB, llama_of_folder

def import_llama(source, out, force):
    """`import`: converts a Llama in a directory, a GGUF file or the Hub to a checkpoint."""
    need_another(out, source)
    refuse_overwrite(out, force)
    if not os.path.exists(source) and IN_HUB.fullmatch(source):
        source = folder_of_hub(source)
    for path in pathlib.Path(source).glob("*") if os.path.isdir(source) else ():
        need_another(out, path)
    with reading(source, "give a Llama with a BPE tokenizer: a GGUF file, or a "
                         "directory with config.json, safetensors, tokenizer.json and "
                         "tokenizer_config.json"):
        os.stat(source)                      # report a missing file before a missing package
        f = llama_of_folder(source) if os.path.isdir(source) else llama_of_gguf(source)
        state = State(kind="chat" if f.template else "base", template=f.template, bos=f.bos,
                      eos=f.eos, options={"data": source}).check()
        need(f.tokenizer.vocab_size == f.cfg.vocab_size,
             f"its tokenizer has {f.tokenizer.vocab_size} tokens, but its model has "
             f"{f.cfg.vocab_size}")
        shapes = tensor_shapes(f.cfg)
        for name in f.shapes.keys() - {*shapes, "lm_head.weight"}:
            need(name.endswith("inv_freq"),
                 f"found the tensor {name}, which a Llama of this configuration does not have")
        for name, shape in shapes.items():
            of_file = f.shapes.get(name, "none")
            need(of_file == shape, f"expected {name} of shape {shape}, found {of_file}")
        flat = aligned((n_params(f.cfg),), np.float32)
        for name, x in named(f.cfg, flat).items():
            x[...] = f.read(name)
            need_finite(name, x)
    note_large(f"writing {out}", flat.nbytes)
    write_checkpoint(out, f.cfg, f.tokenizer, state, flat)
    print(f"{out}: {flat.size:,} parameters, context {f.cfg.seq_len} tokens.  Talk to it with:\n"
          f"    {typed(Model.program)} chat {shlex.quote(out)}")

def import_verb(add):
    add(import_llama,
        arg("source", type=file_name,
            help="Llama model: a directory, a GGUF file, or ORG/NAME in the Hugging Face Hub"),
        arg("out", type=file_name, help="checkpoint to write"), FORCE)
