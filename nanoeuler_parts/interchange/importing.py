"""The verb `import`: converts a Llama from Hugging Face or from a GGUF file to a checkpoint."""
import math
import os
import pathlib
import shlex

import numpy as np

from bpe import need, note, printable, regular
from nanoeuler import Model, n_params, to_bf16
from nanoeuler_parts.chat.jinja import need_short
from nanoeuler_parts.checkpoint.file import meta_of, need_no_adapter
from nanoeuler_parts.checkpoint.matrices import expected_types, in_int8
from nanoeuler_parts.checkpoint.state import State
from nanoeuler_parts.checkpoint.tensors import tensor_shapes
from nanoeuler_parts.files.logs import replacing_no_run
from nanoeuler_parts.files.safetensors import (
    BLOCK, Computed, need_finite, note_large, write_tensors,
)
from nanoeuler_parts.files.writing import need_another, refuse_overwrite
from nanoeuler_parts.flags import arg, file_name, FORCE, typed
from nanoeuler_parts.interchange.forms import reading_form
from nanoeuler_parts.interchange.gguf import llama_of_gguf, PART
from nanoeuler_parts.interchange.huggingface import (
    folder_of_hub, IN_HUB, llama_of_folder, WEIGHTS_OF_LLAMA,
)

GIVE_A_LLAMA = ("give a Llama with a BPE tokenizer: a GGUF file, or a directory with config.json, "
                "safetensors, tokenizer.json and tokenizer_config.json")

def need_gguf(path):
    """Rejects all other files than GGUF, and names their kind."""
    with open(path, "rb", opener=regular) as f:
        first = f.read(16)
    if first[:4] == b"GGUF":
        return
    name, advice = os.path.basename(path), ""
    kind = "not a GGUF file"
    if first[:2] == b"PK" or first[:1] == b"\x80":
        kind = "a file of PyTorch, which may contain programs"
        advice = "; save the model with safetensors"
    elif first[8:9] == b"{" and int.from_bytes(first[:8], "little") < os.path.getsize(path):
        kind = "a safetensors file"
        advice = ("; name its directory" if name in WEIGHTS_OF_LLAMA or "-of-" in name else
                  "; a checkpoint of this program needs no import")
    elif name.endswith(".json"):
        kind, advice = "a JSON file", "; name its directory"
    elif first and all(c in b"\t\n\r" or 32 <= c for c in first) and b"\0" not in first:
        kind = "a text"
    elif not first:
        kind = "empty"
    need(False, f"it is {kind}{advice}")

def tensors_to_write(f, source, matrices):
    """{name: Computed} of a checkpoint for the model f, a Found.  Each tensor is read and converted
    while it is written, so the model never is in memory as a whole."""
    def rows_of(name):
        def rows(start, stop):
            with reading_form(source, GIVE_A_LLAMA):
                x = np.asarray(f.read(name, start, stop), np.float32)
                need_finite(name, x, start)
            return x
        return rows

    def converted(rows, convert):
        return lambda start, stop: convert(rows(start, stop))

    found, shapes = {}, tensor_shapes(f.cfg)
    for name, (dtype, shape) in expected_types(f.cfg, matrices).items():
        of_model = name.removesuffix("_scale")
        rows, columns = rows_of(of_model), math.prod(shapes[of_model][1:])
        if name.endswith("_scale"):
            rows = converted(rows, lambda w: in_int8(w)[1])
        elif dtype == np.int8:
            rows = converted(rows, lambda w: in_int8(w)[0])
        elif dtype == np.uint16:
            rows = converted(rows, to_bf16)
        found[name] = Computed(dtype, shape, rows, max(1, BLOCK // (4 * columns)))
    return found

def files_beside(source):
    """The files that an import may read besides its source: those in a directory, or the parts of
    a split GGUF file"""
    at = pathlib.Path(source)
    if at.is_dir():
        return [*at.glob("*")]
    part = PART.fullmatch(at.name)
    return [at.with_name(f"{part[1]}{k:05}-of-{part[3]}.gguf")
            for k in range(1, int(part[3]) + 1)] if part else []

def import_llama(source, out, dtype, force):
    """`import`: converts a Llama in a directory, a GGUF file or the Hub to a checkpoint."""
    need(dtype in ("f32", "bf16", "int8"), f"--dtype is {dtype}, expected f32, bf16 or int8")
    need_another(out, source)
    refuse_overwrite(out, force)
    if not os.path.exists(source) and IN_HUB.fullmatch(source):
        source = folder_of_hub(source)
    for path in files_beside(source):
        need_another(out, path)
    if not os.path.isfile(os.path.join(source, "config.json")):
        need_no_adapter(source)
    with replacing_no_run(out):
        write_imported(source, out, dtype)

def write_imported(source, out, dtype):
    """Reads the Llama, and writes the checkpoint."""
    with reading_form(source, GIVE_A_LLAMA):
        if os.path.isdir(source):
            f = llama_of_folder(source)
        else:
            need_gguf(source)                # before a missing package is named
            f = llama_of_gguf(source)
        need_short(f.template)
        state = State(kind="chat" if f.template else "base", template=f.template, bos=f.bos,
                      eos=f.eos, stops=list(f.stops), weights="" if dtype == "f32" else dtype,
                      options={"data": source}).check()
        need(f.tokenizer.vocab_size == f.cfg.vocab_size,
             f"its tokenizer has {f.tokenizer.vocab_size} tokens, but its model has "
             f"{f.cfg.vocab_size}")
        for name in dict.fromkeys([f.eos, *f.stops]):
            if name and name not in f.tokenizer.specials:
                note(f"{source}: {name} ends an answer, but is no special token of the tokenizer, "
                     f"so answers do not end there")
        shapes = tensor_shapes(f.cfg)
        for name in sorted(f.shapes.keys() - {*shapes}):
            need(False, f"found the tensor {name}, which a Llama of this configuration does not "
                 f"have")
        for name, shape in shapes.items():
            of_file = f.shapes.get(name, "none")
            need(of_file == shape, f"expected {name} of shape {shape}, found {of_file}")
    tensors = tensors_to_write(f, source, dtype)
    note_large(f"writing {out}", sum(x.nbytes for x in tensors.values()))
    write_tensors(out, meta_of(f.cfg, f.tokenizer, state, dtype), tensors,
                  "free space or choose another name", "BF16")
    print(f"{printable(out)}: {n_params(f.cfg):,} parameters, context {f.cfg.seq_len} tokens.  "
          f"Talk to it with:\n    {typed(Model.program)} chat {printable(shlex.quote(out))}")

def import_verb(add):
    add(import_llama,
        arg("source", type=file_name,
            help="Llama model: a directory, a GGUF file, or ORG/NAME in the Hugging Face Hub"),
        arg("out", type=file_name, help="checkpoint to write"),
        arg("--dtype", default="f32", help="format of the matrices in the checkpoint and, while "
            "decoding, in memory: f32, bf16 (half the size) or int8 (a quarter)"), FORCE)
