"""The verb `export`: writes a checkpoint as a Hugging Face directory or as a GGUF file."""
import os

from bpe import need, printable
from nanoeuler_parts.checkpoint.bundled import shown_name
from nanoeuler_parts.checkpoint.file import read_checkpoint
from nanoeuler_parts.files.safetensors import note_large
from nanoeuler_parts.files.writing import need_another, refuse_overwrite, replacing
from nanoeuler_parts.flags import arg, checkpoint, file_name, FORCE
from nanoeuler_parts.interchange.gguf import write_gguf
from nanoeuler_parts.interchange.huggingface import (
    export_folder, llama_files, need_folder, WEIGHTS_OF_LLAMA,
)
from nanoeuler_parts.interchange.llama import REMEDY
from nanoeuler_parts.lora.files import adapter_for, merge_into

def export(file, folder, gguf, matrices, force, merge=None):
    """`export`: writes a checkpoint as a Hugging Face directory, a GGUF file, or both.
    matrices: format of those in the GGUF file; None means f32
    merge: folder of a LoRA adapter, which becomes part of the weights"""
    need(folder or gguf, "expected an output, got none; name a directory, --gguf FILE, or both")
    need(matrices in (None, "f32", "f16", "q8_0"),
         f"--matrices is {matrices}, expected f32, f16 or q8_0")
    need(gguf or matrices is None, "--matrices is the format of a GGUF file; add --gguf FILE, or "
         "leave it out: a directory has float32")
    matrices = matrices or "f32"
    if gguf:
        need_another(gguf, file)
        refuse_overwrite(gguf, force)
    c = read_checkpoint(file, moments=False)
    if merge:
        c = merge_into(c, adapter_for(merge, c.cfg, file))
    if folder:
        for name in WEIGHTS_OF_LLAMA:
            need_another(os.path.join(folder, name), file)
        need_folder(c, folder, force)
        written = [os.path.join(folder, name) for name in (*llama_files(c), *WEIGHTS_OF_LLAMA)]
        need(not gguf or os.path.realpath(gguf) not in map(os.path.realpath, written),
             f"{gguf} is also an output file in {folder}; choose another name for --gguf")
    if gguf:
        note_large(f"writing {gguf}", c.flat.nbytes)
        with replacing(gguf, REMEDY) as temporary:
            write_gguf(temporary, c, matrices)
        print(f"{printable(gguf)}: GGUF for llama.cpp, {matrices} matrices")
    if folder:
        note_large(f"writing {folder}", c.flat.nbytes)
        export_folder(c, folder)
    if merge:
        print(f"merged the adapter {printable(merge)} into {printable(shown_name(file))}")

def export_verb(add):
    add(export, checkpoint("nanoeuler.bin"),
        arg("folder", nargs="?", type=file_name, help="Hugging Face directory to write; "
            "omitted: none"), FORCE,
        arg("--gguf", type=file_name, help="GGUF file to write; omitted: none"),
        arg("--merge", type=file_name, help="folder of a LoRA adapter to merge into the weights; "
            "omitted: none"),
        arg("--matrices",
            help="format of the matrices in the GGUF file: f32, f16 or q8_0; default f32"))
