"""Writes and reads Hugging Face directories, and downloads models from the Hub, for the verbs
`export` and `import`."""
import json
import math
import os
import pathlib
import re
from dataclasses import replace

import numpy as np

from bpe import need, note, printable, read_bytes, regular, UserError
from nanoeuler import from_bf16, rope_frequency
from nanoeuler_parts.chat.jinja import need_short
from nanoeuler_parts.chat.sampling import Sampling
from nanoeuler_parts.chat.templates import ALPACA, ends_of
from nanoeuler_parts.checkpoint.tensors import named
from nanoeuler_parts.files.safetensors import (
    AGAIN, BLOCK, map_tensors, OF_WEIGHTS, read_header, release_pages, write_tensors,
)
from nanoeuler_parts.files.writing import need_writable, refuse_overwrite, replacing
from nanoeuler_parts.interchange.forms import reading_form
from nanoeuler_parts.interchange.llama import (
    entries_of, Found, json_of, llama_config, need_llama, need_regular, REMEDY,
)
from nanoeuler_parts.interchange.tokenizers import tokenizer_of_json
from nanoeuler_parts.tokenizers.families import tokenizer_of_model
from nanoeuler_parts.tokenizers.sentencepiece import PieceTokenizer

WEIGHTS_OF_LLAMA = WEIGHTS, OF_HEADS = "model.safetensors", "mtp.safetensors"
INDEX = "model.safetensors.index.json"
FILES_OF_LLAMA = ("config.json", "tokenizer_config.json", "tokenizer.json", "tokenizer.model",
                  "special_tokens_map.json", "chat_template.jinja", "generation_config.json")

# ==== Which files hold the weights ====
def shards_in(index):
    """The names of the files that a model.safetensors.index.json lists"""
    found = index.get("weight_map")
    need(isinstance(found, dict) and found, "its weight_map is missing or empty")
    for name in found.values():
        need(isinstance(name, str) and name == os.path.basename(name) != "",
             f"its weight_map has {name!r:.80}, expected the name of a file in the same directory")
    return sorted({*found.values()})

def weight_files(at):
    """The names of the files with the tensors of the model in a directory.  These are
    model.safetensors, or else the shards that model.safetensors.index.json lists, as in
    transformers 5.  The mtp.safetensors of `export` is added.  Other files may belong to another
    model, for example to an earlier save with more shards.  Or they repeat this model, as the
    consolidated.safetensors of Mistral does."""
    if (at / WEIGHTS).exists():
        names = [WEIGHTS]
    else:
        others = sorted(x.name for x in at.iterdir() if x.suffix in (
            ".safetensors", ".bin", ".pt", ".pth", ".gguf"))
        need((at / INDEX).exists(), f"expected {WEIGHTS} or {INDEX}, found "
             f"{', '.join(others[:3]) or 'neither'}")
        with reading_form(at / INDEX, AGAIN):
            names = shards_in(json_of(at / INDEX))
    if (at / OF_HEADS).exists() and OF_HEADS not in names and holds_heads_alone(at / OF_HEADS):
        names.append(OF_HEADS)
    return names

def tensors_of_folder(at):
    """{name: memory-mapped tensor} of the model in a directory"""
    tensors, file_of = {}, {}
    for name in weight_files(at):
        with reading_form(at / name, AGAIN):
            found = map_tensors(at / name, OF_WEIGHTS)[1]
        twice = sorted(found.keys() & file_of.keys())
        need(not twice, f"{file_of.get(twice[0]) if twice else ''} and {name} both have the tensor "
             f"{twice[:1]}, expected it once; remove the file that belongs to another model")
        tensors |= found
        file_of |= dict.fromkeys(found, name)
    return tensors

# ==== Settings ====
# Defaults of a tokenizer class in transformers, for tokens that no file names
OF_LLAMA = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>")
OF_CLASS = {"LlamaTokenizer": OF_LLAMA, "LlamaTokenizerFast": OF_LLAMA}
# Tokens that a chat template may name, besides bos_token and eos_token
NAMED = "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"

class Settings:
    """The settings of a model in the directory `at`.  Each method is one setting, and reads its
    sources in the order of transformers 5.24."""

    def __init__(self, at):
        self.at = at
        self.config = self.read("config.json")
        need_llama(self.config)              # other models may lack the files below
        self.words = self.read("tokenizer_config.json")
        self.map = self.read("special_tokens_map.json", {})
        self.generation = self.read("generation_config.json", {})
        self.of_class = OF_CLASS.get(str(self.words.get("tokenizer_class")), {})

    def read(self, name, default=None):
        """The content of a JSON file; `default` if it does not exist and may be missing"""
        path = self.at / name
        if default is not None and not path.exists():
            return default
        content = json_of(path)
        with reading_form(path, AGAIN):
            need(isinstance(content, dict), f"expected an object, found {content!r:.40}")
        return content

    def token(self, name):
        """The special token of a name such as bos_token; "" if the model has none.
        special_tokens_map.json takes precedence over tokenizer_config.json unless the latter has
        added_tokens_decoder, as all newer files do.  A token that only one of them has is taken
        from there."""
        files = [("special_tokens_map.json", self.map), ("tokenizer_config.json", self.words)]
        if "added_tokens_decoder" in self.words:
            files.reverse()
        for file, content in [*files, ("", self.of_class)]:
            if name in content:
                token = content[name]
                token = token.get("content") if isinstance(token, dict) else token
                with reading_form(self.at / file, "correct it, or remove the entry"):
                    need(token is None or isinstance(token, str),
                         f"{name} is {content[name]!r:.40}, expected a text")
                return token or ""
        return ""

    def template(self):
        """The chat template; "" if the model has none.  chat_template.jinja takes precedence over
        tokenizer_config.json, where it may be a list of named templates.  pad_token and the like,
        if the template uses them, are set at its beginning."""
        path, found = self.at / "tokenizer_config.json", self.words.get("chat_template")
        if (self.at / "chat_template.jinja").exists():
            path = self.at / "chat_template.jinja"
            with reading_form(path, AGAIN):
                found = path.read_text(encoding="utf-8")
        with reading_form(path, "correct it, or remove it"):
            if isinstance(found, list):
                need(all(isinstance(x, dict) for x in found),
                     "chat_template is a list, expected objects with name and template in it")
                found = {x.get("name"): x.get("template") for x in found}
            if isinstance(found, dict):
                need("default" in found, f"chat_template has the templates "
                     f"{', '.join(map(str, found))}, expected one with the name default")
                found = found["default"]
            need(found is None or isinstance(found, str),
                 f"chat_template is {found!r:.40}, expected a text")
            need_short(found or "")
        tokens = {name: self.token(name) for name in NAMED
                  if found and re.search(rf"\b{name}\b", found)}
        return "".join(f"{{% set {name} = {json.dumps(token)} +%}}"
                       for name, token in tokens.items() if token) + (found or "")

    def tokenizer(self, vocab_size):
        """The tokenizer, for a model with vocab_size embeddings: tokenizer.json, or else
        tokenizer.model.  add_bos_token of tokenizer_config.json counts for the latter alone."""
        if not (self.at / "tokenizer.json").exists() and (self.at / "tokenizer.model").exists():
            with reading_form(self.at / "tokenizer_config.json", "expected none"):
                need(not self.words.get("add_eos_token"), "its tokenizer adds a token after every "
                     "text (add_eos_token)")
            adds = self.words.get("add_bos_token") in (None, True)
            begins = [self.token("bos_token") or OF_LLAMA["bos_token"]] if adds else []
            with reading_form(self.at / "tokenizer.model", AGAIN):
                return tokenizer_of_model(read_bytes(self.at / "tokenizer.model"), begins,
                                          vocab_size)
        with reading_form(self.at / "tokenizer.json", AGAIN):
            named = {self.token("bos_token"), self.token("eos_token"), *self.end_ids()[1]}
            tokenizer = tokenizer_of_json(read_bytes(self.at / "tokenizer.json"), vocab_size, named)
        if not isinstance(tokenizer, PieceTokenizer):    # transformers has no defaults for it
            self.of_class = {}
        return tokenizer

    def end_ids(self):
        """(file, ids) of the tokens at which transformers ends an answer: eos_token_id of
        generation_config.json, or else of config.json"""
        file, content = next(((file, content) for file, content in (
            ("generation_config.json", self.generation), ("config.json", self.config))
            if content.get("eos_token_id") is not None), ("config.json", {}))
        found = content.get("eos_token_id")
        ids = found if isinstance(found, list) else [] if found is None else [found]
        with reading_form(self.at / file, "correct it, or remove the entry"):
            need(all(type(k) is int for k in ids), f"eos_token_id is {found!r:.80}, expected ids "
                 f"of tokens")
        return file, ids

    def ends(self, tokenizer):
        """The names of the tokens of `end_ids`"""
        file, ids = self.end_ids()
        name_of = {k: name for name, k in tokenizer.specials.items()}
        for k in ids:
            if k not in name_of:
                what = (f"the ordinary token {bytes(tokenizer.vocab[k]).decode(errors='replace')!r}"
                        if 0 <= k < tokenizer.vocab_size else "no token of this tokenizer")
                note(f"{self.at / file}: eos_token_id {k} is {what}, so answers do not end there")
        return [*dict.fromkeys(name_of[k] for k in ids if k in name_of)]

def llama_of_folder(folder):
    """The model of a Hugging Face directory, as a `Found`.  It reads config.json, safetensors,
    tokenizer.json or tokenizer.model, tokenizer_config.json and, if they exist,
    special_tokens_map.json, generation_config.json and chat_template.jinja."""
    at = pathlib.Path(folder)
    for name in (*FILES_OF_LLAMA, INDEX):
        with reading_form(at / name, "name another directory"):
            need_regular(at / name)
    settings = Settings(at)
    tensors = tensors_of_folder(at)

    def read(name, start, stop):
        x = tensors[name]
        need(x.dtype.kind != "i", f"{name} is {x.dtype}, expected a floating-point type")
        found = np.array(from_bf16(x[start:stop]), np.float32)       # a copy, as pages are released
        release_pages(x)
        return found

    cfg = llama_config(settings.config, 1 + sum(map(is_head, tensors)))
    cfg = tied_as_stored(cfg, tensors)
    need_redundant(cfg, tensors, folder)
    if EMBEDDINGS in tensors:                # first, as unused ids get names
        shape = tensors[EMBEDDINGS].shape
        need(shape == (cfg.vocab_size, cfg.n_embd), f"expected {EMBEDDINGS} of shape "
             f"{(cfg.vocab_size, cfg.n_embd)}, found {shape}")
    tokenizer = settings.tokenizer(cfg.vocab_size)
    bos, eos = settings.token("bos_token"), settings.token("eos_token")
    return Found(cfg, tokenizer, {name: x.shape for name, x in tensors.items()}, read,
                 settings.template(), bos, eos,
                 [name for name in settings.ends(tokenizer) if name != eos])

# ==== Tensors that are left out ====
EMBEDDINGS, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"

def same_numbers(x, y):
    """Are two tensors equal?  They are compared a few rows at a time."""
    if x.shape != y.shape or x.ndim < 1:
        return False
    at_once = max(1, BLOCK // max(1, 4 * math.prod(x.shape[1:])))
    for start in range(0, len(x), at_once):
        rows = [from_bf16(z[start:start + at_once]) for z in (x, y)]
        if not np.array_equal(*rows):
            return False
        release_pages(x)
        release_pages(y)
    return True

def tied_as_stored(cfg, tensors):
    """The Config, and changes `tensors`, for a model whose config.json says tie_word_embeddings.
    As in transformers 5, a file with one of the two matrices gives it both places, two equal ones
    are tied, and two different ones are not."""
    if not cfg.tie_embeddings:
        return cfg
    if EMBEDDINGS not in tensors and OUTPUT in tensors:
        tensors[EMBEDDINGS] = tensors.pop(OUTPUT)
    if OUTPUT not in tensors:
        return cfg
    if EMBEDDINGS in tensors and same_numbers(tensors[EMBEDDINGS], tensors[OUTPUT]):
        del tensors[OUTPUT]
        return cfg
    note(f"config.json says tie_word_embeddings, but {OUTPUT} differs from {EMBEDDINGS}, so both "
         f"are imported, as in transformers")
    return replace(cfg, tie_embeddings=False)

def need_redundant(cfg, tensors, folder):
    """Removes the frequencies of RoPE that older files store for each layer.  As in transformers,
    config.json decides.  A note says if the stored ones are different."""
    stored = [name for name in tensors if name.endswith("rotary_emb.inv_freq")]
    want = rope_frequency(replace(cfg, rope_scaling="").check())
    for name in stored:
        x = np.array(from_bf16(tensors.pop(name)), np.float64)
        if x.shape != want.shape or not np.allclose(x, want, rtol=0.01, atol=0):
            note(f"{folder}: {name} differs from the frequencies of RoPE that config.json gives, "
                 f"which are used, as in transformers")
            break
    for name in stored:
        tensors.pop(name, None)

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

def is_head(name):
    """Is it the name of an auxiliary head in the files of `export`?"""
    return re.fullmatch(r"mtp\.\d+\.weight", name) is not None

def holds_heads_alone(path):
    """Does the file contain only auxiliary heads, like the mtp.safetensors of `export`?"""
    with reading_form(path, "name another directory"), open(path, "rb", opener=regular) as f:
        return all(map(is_head, read_header(f)[2]))

# Files that `export` does not write.  transformers would read them instead of those that it writes.
FIRST_READ = {"chat_template.jinja": "the template in it",
              "special_tokens_map.json": "the tokens in it",
              "adapter_config.json": "the model of the adapter"}

def need_folder(c, folder, force):
    """Rejects a path that is not a directory, and a directory where `export` would overwrite files,
    or where a file of FIRST_READ would replace a part of the model.
    Even with --force, `export` never deletes the mtp.safetensors of another program."""
    missing = os.path.abspath(folder)
    if not os.path.isdir(folder):
        while not os.path.isdir(os.path.dirname(missing)):       # `export` makes all of them
            missing = os.path.dirname(missing)
        need(not os.path.lexists(missing), f"cannot write {folder}: {missing} is not a directory; "
             f"name a directory")
        return need_writable(missing, "name another directory")
    for name in (*llama_files(c), "model.safetensors", "mtp.safetensors"):
        refuse_overwrite(os.path.join(folder, name), force)
    for name, part in FIRST_READ.items():
        need(not os.path.lexists(os.path.join(folder, name)), f"{folder} has {name}, so "
             f"transformers would use {part} instead of what `export` writes; name another "
             f"directory, or remove the file")
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
    print(f"{printable(folder)}: {architecture} for transformers{more}")

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
    try:
        import huggingface_hub
    except ModuleNotFoundError as e:
        if e.name != "huggingface_hub":
            raise                            # a package that it needs; `main` names it
        raise UserError(f"{name}: no such directory, so it is taken for a name on the Hugging Face "
                        f"Hub, which needs huggingface_hub: pip install huggingface_hub") from None
    repository, _, revision = name.partition("@")
    print(f"{printable(name)}: no such directory; fetching it from the Hugging Face Hub",
          flush=True)

    def folder_with(names, revision):
        """The directory of a revision, after these files of it have been downloaded"""
        return pathlib.Path(huggingface_hub.snapshot_download(
            repository, revision=revision or None, ignore_patterns="*/*", allow_patterns=names))

    try:
        at = folder_with([*FILES_OF_LLAMA, WEIGHTS, INDEX, OF_HEADS], revision)
        if not (at / WEIGHTS).exists() and (at / INDEX).exists():
            # the directory has the name of the commit, to which the shards must belong
            commit = at.name if re.fullmatch("[0-9a-f]{40}", at.name) else revision
            at = folder_with(weight_files(at), commit)
        return str(at)
    except UserError:
        raise
    except Exception as e:                   # from the network, the Hub or its client
        kind = type(e).__name__
        said = " ".join(str(e).split()).partition(". ")[0]
        said = OF_HUB.get(kind, f"{kind}: {said:.100}")
        raise UserError(f"{name}: no such directory, and the download from the Hugging Face Hub "
                        f"failed: {said}") from None
