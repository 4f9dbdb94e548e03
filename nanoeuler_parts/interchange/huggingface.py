"""Writes and reads Hugging Face directories, and downloads models from the Hub, for the verbs
`export` and `import`."""
import json
import os
import pathlib
import re

import numpy as np

from bpe import need, reading, UserError
from nanoeuler import ALPACA, ends_of, from_bf16, named, refuse_overwrite, Sampling
from nanoeuler_parts.files.safetensors import (
    AGAIN, map_tensors, release_pages, write_tensors,
)
from nanoeuler_parts.files.writing import replacing
from nanoeuler_parts.interchange.llama import (
    entries_of, Found, json_of, llama_config, need_llama, need_regular, REMEDY,
)
from nanoeuler_parts.interchange.tokenizers import tokenizer_of_folder

WEIGHTS_OF_LLAMA = "model.safetensors", "mtp.safetensors"
FILES_OF_LLAMA = ("config.json", "tokenizer_config.json", "tokenizer.json", "tokenizer.model",
                  "chat_template.jinja", "generation_config.json")

def llama_of_folder(folder):
    """The model of a Hugging Face directory, as a `Found`.  It reads config.json, safetensors,
    tokenizer.json or tokenizer.model, tokenizer_config.json and, if there is one,
    chat_template.jinja."""
    at = pathlib.Path(folder)
    for name in FILES_OF_LLAMA:
        with reading(at / name, "name another directory"):
            need_regular(at / name)
    need_llama(json_of(at / "config.json"))  # other models may lack the files below
    tensors = {}
    for shard in at.glob("*.safetensors"):   # with the auxiliary heads of `export`
        with reading(shard, AGAIN):
            tensors |= map_tensors(shard)[1]
    config, words = (json_of(at / name) for name in FILES_OF_LLAMA[:2])
    template = words.get("chat_template") or ""
    if (own := at / "chat_template.jinja").exists():
        template = own.read_text(encoding="utf-8")

    def special(name):
        token = words.get(name) or ""        # a text, or an object with the text
        return token["content"] if isinstance(token, dict) else token

    def read(name, start, stop):
        x = tensors[name]
        need(x.dtype.kind != "i", f"{name} is {x.dtype}, expected a floating-point type")
        found = np.array(from_bf16(x[start:stop]), np.float32)       # a copy, as pages are released
        release_pages(x)
        return found

    cfg = llama_config(config, 1 + sum(name.startswith("mtp.") for name in tensors))
    tokenizer, eos = tokenizer_of_folder(at, words, cfg.vocab_size), special("eos_token")
    return Found(cfg, tokenizer, {name: x.shape for name, x in tensors.items()}, read, template,
                 special("bos_token"), eos, stops_in(at / GENERATION, tokenizer, eos))

GENERATION = "generation_config.json"

def stops_in(path, tokenizer, eos):
    """The names of the tokens besides eos at which transformers ends an answer"""
    if not path.exists():
        return []
    found, name_of = json_of(path).get("eos_token_id"), {
        k: name for name, k in tokenizer.specials.items()}
    ids = found if isinstance(found, list) else [] if found is None else [found]
    with reading(path, "correct it, or remove it"):
        need(all(type(k) is int for k in ids), f"eos_token_id is {found}, expected ids of tokens")
    names = dict.fromkeys(name_of[k] for k in ids if k in name_of)       # others are words
    return [name for name in names if name != eos]

def llama_files(c):
    """{file name: content as JSON} of the files that accompany the tensors of a Checkpoint"""
    s, specials, sampling = c.state, c.tokenizer.specials, Sampling()
    ends = {end: token for end, token in (("bos", s.bos), ("eos", s.eos)) if token in specials}
    tokens = {f"{end}_token": token for end, token in ends.items()}
    ids = {f"{end}_token_id": specials[token] for end, token in ends.items()}
    chat = {"chat_template": s.template or ALPACA} if s.kind == "chat" else {}
    all_ends = {"eos_token_id": list(ends_of(s, c.tokenizer))} if s.stops else {}
    return {
        "config.json": {
            **entries_of(c.cfg), "torch_dtype": "float32", **ids},
        "generation_config.json": {
            "do_sample": True, **ids, **all_ends,
            "temperature": sampling.temperature, "top_k": sampling.top_k,
            "top_p": sampling.top_p, "min_p": sampling.min_p},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", **tokens, **chat,
            "clean_up_tokenization_spaces": False, "model_max_length": c.cfg.seq_len},
        "tokenizer.json": json.loads(c.tokenizer.to_json())}

def holds_heads_alone(path):
    """Does the file contain only auxiliary heads, like the mtp.safetensors of `export`?"""
    with reading(path, "name another directory"):
        return all(name.startswith("mtp.") for name in map_tensors(path)[1])

def need_folder(c, folder, force):
    """Rejects a path that is not a directory, and a directory where `export` would overwrite files.
    Even with --force, `export` never deletes the mtp.safetensors of another program."""
    need(os.path.isdir(folder) or not os.path.exists(folder),
         f"{folder} is not a directory; name a directory")
    for name in (*llama_files(c), "model.safetensors", "mtp.safetensors"):
        refuse_overwrite(os.path.join(folder, name), force)
    of_heads = os.path.join(folder, "mtp.safetensors")
    if c.cfg.n_mtp == 1 and os.path.exists(of_heads):    # perhaps from an earlier export
        need(holds_heads_alone(of_heads),
             f"{of_heads} was written by another program; name another directory")

def export_folder(c, folder):
    """Writes a directory that transformers can load.  Auxiliary heads go into mtp.safetensors."""
    files = llama_files(c)
    heads, weights = {}, {}
    for name, x in named(c.cfg, c.flat).items():
        if name.startswith("mtp."):
            heads[name] = x
        else:
            weights[name] = x
    of_heads = os.path.join(folder, "mtp.safetensors")
    if not heads and os.path.exists(of_heads):           # from an earlier export
        os.remove(of_heads)
    os.makedirs(folder, exist_ok=True)
    if heads:
        write_tensors(of_heads, {"format": "pt"}, heads, REMEDY)
    write_tensors(os.path.join(folder, "model.safetensors"), {"format": "pt"}, weights, REMEDY)
    for name, content in files.items():
        with replacing(os.path.join(folder, name), REMEDY) as temporary:
            pathlib.Path(temporary).write_text(json.dumps(content, indent=1), encoding="utf-8")
    more = f"; auxiliary heads in mtp.safetensors: {len(heads)}" if heads else ""
    architecture, = files["config.json"]["architectures"]
    print(f"{folder}: {architecture} for transformers{more}")

# {name of an exception of huggingface_hub: a short message, instead of its own paragraph}
OF_HUB = {"RepositoryNotFoundError": "no public model has this name; set HF_TOKEN if it is private",
          "GatedRepoError": "access is restricted; request it on the Hub, then set HF_TOKEN",
          "RevisionNotFoundError": "the model does not have this revision",
          "LocalEntryNotFoundError": "the Hub is unreachable, and this model is not cached",
          "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set, and this model is not cached"}
IN_HUB = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")

def folder_of_hub(name):
    """Downloads ORG/NAME or ORG/NAME@REVISION once, and returns the directory.  It uses the
    optional package huggingface_hub, whose environment variables choose cache, mirror and token."""
    import huggingface_hub
    repository, _, revision = name.partition("@")
    print(f"fetching {name} from the Hugging Face Hub", flush=True)
    try:
        return huggingface_hub.snapshot_download(
            repository, revision=revision or None, ignore_patterns="*/*",
            allow_patterns=["*.safetensors", *FILES_OF_LLAMA])
    except Exception as e:                   # from the network, the Hub or its client
        kind = type(e).__name__
        said = " ".join(str(e).split()).partition(". ")[0]
        said = OF_HUB.get(kind, f"{kind}: {said:.100}")
        raise UserError(f"{name}: no such directory, and the download from the Hugging Face Hub "
                        f"failed: {said}") from None
