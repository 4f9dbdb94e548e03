"""The verb `serve`: the flags of the server, and the function that starts it."""
import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import sys
from dataclasses import dataclass, field, fields

import nanoeuler as ne
from bpe import need
from nanoeuler import Decoder, setting, Settings
from nanoeuler_parts.chat.models import model_to_use, models_in, MOST_MODELS
from nanoeuler_parts.checkpoint.bundled import (
    BUNDLED, bundled_path, is_bundled, model_path, shown_name,
)
from nanoeuler_parts.checkpoint.file import begins_as_checkpoint, open_checkpoint
from nanoeuler_parts.files.errors import PACKAGES
from nanoeuler_parts.files.safetensors import read_meta
from nanoeuler_parts.flags import arg, model_name

@dataclass
class Serving(Settings):
    """Addresses, access and limits of the server: the flags of `serve`."""
    host: str = setting("127.0.0.1", 0, 0, "address to listen on; 127.0.0.1 admits this machine "
                        "only")
    port: int = setting(8000, 0, 65_535, "TCP port to listen on; 0: any free port")
    api_key: str = setting("", 0, 0, "API key that clients must send; empty: $NANOEULER_API_KEY, "
                           "or no key if that is unset")
    origin: list = field(default_factory=list, metadata={
        "help": "web site whose pages may send requests (CORS), such as https://example.org; may "
                "be given several times"})
    allow_host: list = field(default_factory=list, metadata={
        "help": "additional host name that requests may use, such as mybox.example.org; not "
                "needed with an API key; may be given several times"})
    log: list = field(default_factory=list, metadata={
        "help": "training log to show at /training besides those in this folder; may be given "
                "several times"})
    access_log: bool = setting(True, 0, 0, "write a line to standard error for each request: "
                               "method, path, status, tokens of prompt and reply, and time")
    slots: int = setting(8, 1, 1 << 12, "number of replies generated at once; each has a slot in "
                         "the KV cache")
    context: int = setting(0, 0, 1 << 17, "context of a slot, in tokens; 0: the model's, or less "
                           "if the KV cache would be too large")
    queue: int = setting(256, 0, 1 << 20, "number of replies of one client that may wait for a "
                         "slot; those of all clients may be four times as many; 0: reject "
                         "requests while all slots are busy")
    tokens: int = setting(4096, 1, 1 << 40, "largest number of tokens that a request may ask for "
                          "in a reply")
    body: int = setting(1 << 20, 1, 1 << 30, "largest size of a request, in bytes")
    seconds: int = setting(600, 1, 1 << 30, "time limit of a request, in seconds, including its "
                           "time in the queue")
    drain: int = setting(30, 0, 1 << 30, "time for running replies when the server stops, in "
                         "seconds; 0: end them at once")
    speculate: int = setting(-1, -1, 15, "speculative decoding: number of draft tokens per step, "
                             "same text; 0: off; -1: as many as save time")
    weights: str = setting("", 0, 0, "format of the weights in memory: f32, bf16, or on the CPU "
                           "int8; empty: f32, on a GPU bf16 if supported")
    adapter: list = field(default_factory=list, metadata={
        "metavar": "[NAME=]FOLDER", "help": "folder of a LoRA adapter for the first file, served "
        "under this name or that of the folder; CPU only; may be given several "
        "times"})
    template: str = setting("", 0, 0, "chat template: alpaca or chatml; empty: the model's own")

def need_packages(verb, names, more=()):
    """Raises a UserError that names all missing packages of a verb.  more: packages that some parts
    of it need; the command to run installs them, too"""
    def missing(names):
        return [name for name in names if not importlib.util.find_spec(name)]

    need(not missing(names), f"{verb} needs {' and '.join(missing(names))}, not installed for this "
         f"Python; run pip install "
         f"{' '.join(shlex.quote(PACKAGES[name]) for name in missing((*names, *more)))}, or in a "
         f"clone pip install -e '.[{verb}]'")

SERVED = arg("files", nargs="*", type=model_name, default=argparse.SUPPRESS, metavar="file",
                help=f"checkpoints to serve, the default one first; {BUNDLED}: the bundled "
                     f"model (default: all models in this folder, also later ones, and "
                     f"{BUNDLED})")

def models_to_serve(files):
    """(checkpoints, folder) for models.Models.  Without names: the models in this folder and the
    bundled one.  The default is then the newest chat model, or else the bundled one, since a base
    model does not answer."""
    if files:
        return [model_path(file) for file in files], None
    newest, bundled = newest_chat_model(os.curdir), bundled_path()
    has_bundled = os.path.exists(bundled)
    default = newest or (bundled if has_bundled else model_to_use(place=""))
    if not newest:
        print(f"note: {ne.printable(shown_name(default))} is the default model, as this folder "
              f"has no chat model; requests may name another one", file=sys.stderr)
    others = [bundled] if has_bundled and newest and not is_named_bundled(newest) else []
    return [default, *others], os.curdir

def is_named_bundled(file):
    return is_bundled(file) or os.path.basename(file) == f"{BUNDLED}.bin"

def newest_chat_model(folder):
    """The newest chat model among the undamaged checkpoints in a folder; None if there is none.
    A note names each newer one that is damaged."""
    for _, name in sorted(models_in(folder), reverse=True)[:MOST_MODELS]:
        path = os.path.normpath(os.path.join(folder, name))
        if not is_chat_model(path):
            continue
        try:
            open_checkpoint(path)
            return name
        except (OSError, ne.UserError) as e:
            print(f"note: {ne.printable(str(e))}; another model is the default", file=sys.stderr)
    return None

def is_chat_model(path):
    """Is this file a chat model, by its header?"""
    with contextlib.suppress(OSError, ne.UserError, KeyError, ValueError):
        return begins_as_checkpoint(path) and json.loads(read_meta(path)["state"]).get(
            "kind") == "chat"
    return False

def serve(files=(), decoder=Decoder, **chosen):
    """`serve`: an HTTP server and its pages."""
    options = Serving(**chosen).check()
    need_packages("serve", ("starlette", "uvicorn"), ("markdown_it",))
    from nanoeuler_parts.serve import server
    return server.run(*models_to_serve(files), decoder, options)

def serve_verb(add):
    add(serve, SERVED, settings=fields(Serving))
