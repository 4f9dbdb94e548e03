"""The models of a server, by name.  server.py makes `Models`, and app.py asks it for the model that
a request names.

The first model is the default, and is loaded when the server starts.  Every other one is loaded by
its first request, and stays in memory from then on.  Each loaded model has an engine with its own
thread, slots and queue.  The engines compute in turns, see `engine.Turns`.

With --adapter, the first model has LoRA adapters.  Each is a model of its own name, which shares
the weights, the engine and the slots of the first one, see `AdaptedModel`.

With a folder, the list of models follows the checkpoints in it, see `Models.refresh`.
"""
import json
import os
import threading
import time
from dataclasses import asdict

from numba import get_num_threads, set_num_threads

import nanoeuler as ne
from nanoeuler_parts.chat.models import models_in, MOST_MODELS
from nanoeuler_parts.chat.sampling import ChatSampling, Sampling
from nanoeuler_parts.chat.speaker import Speaker
from nanoeuler_parts.chat.templates import is_alpaca, is_chatml
from nanoeuler_parts.checkpoint.bundled import BOX, BUNDLED, is_bundled
from nanoeuler_parts.checkpoint.file import begins_as_checkpoint, need_checkpoint, NOT_OURS
from nanoeuler_parts.checkpoint.state import State
from nanoeuler_parts.files.safetensors import read_meta
from nanoeuler_parts.lora.adapter import n_trained
from nanoeuler_parts.lora.decoder import LoraDecoder
from nanoeuler_parts.lora.files import adapter_for, state_with, WEIGHTS
from nanoeuler_parts.serve import values
from nanoeuler_parts.serve.engine import CACHE_BYTES, Engine, Turns
from nanoeuler_parts.serve.explain import Explainer
from nanoeuler_parts.serve.log import log
from nanoeuler_parts.serve.metrics import Stats
from nanoeuler_parts.serve.protocol import Reader, Refusal, shown, text

DEFAULT = "model"            # a name of the default model
SCAN_SECONDS = 1             # shortest time between two looks into the folder


def name_of(file):
    """The name of a model for clients"""
    return BUNDLED if is_bundled(file) else os.path.basename(file).removesuffix(".bin")


def bytes_a_token(cfg, options):
    """Bytes of the KV cache for one token in every slot: keys and values, 4 bytes per number"""
    return 2 * cfg.n_layer * cfg.n_kv_head * cfg.head_dim * 4 * options.slots


def context_of(cfg, options):
    """Tokens of a slot: --context, or as many as fit into CACHE_BYTES; at most seq_len."""
    if options.context:
        return min(options.context, cfg.seq_len)
    return max(1, min(cfg.seq_len, CACHE_BYTES // bytes_a_token(cfg, options)))


def card_of(file, cfg, state, options, decoder=None):
    """The description of a model for the page and for /v1/models.  decoder: None if the model is
    not loaded"""
    template = options.template or state.template
    answers = state.kind == "chat" or options.template != ""
    spoken = ("alpaca" if is_alpaca(template) else "chatml" if is_chatml(template)
              else "the model's own")
    length = context_of(cfg, options)
    return {"name": name_of(file), "parameters": ne.n_params(cfg), "config": asdict(cfg),
            "kind": state.kind, "step": state.step, "bits_per_byte": state.bits_per_byte,
            "tokens_seen": state.tokens_seen, "answers": answers,
            "template": spoken if answers else "",
            "remembers": answers and not is_alpaca(template),
            "loaded": decoder is not None,
            "weights": decoder.kept_as if decoder else options.weights,
            "context": length, "slots": options.slots, "bytes": os.path.getsize(file),
            "modified": os.path.getmtime(file),
            "cache_mib": length * bytes_a_token(cfg, options) / 2**20,
            "temperature": (ChatSampling if answers else Sampling).temperature,
            "most_tokens": options.tokens, "heads": decoder.heads if decoder else cfg.n_mtp - 1,
            "version": ne.__version__}


class InTurn:
    """A class of decoders.  Making one waits for its turn, because it computes: it packs or
    quantizes the weights."""

    def __init__(self, decoder, turns):
        self.decoder, self.turns = decoder, turns
        self.ready, self.formats = decoder.ready, decoder.formats

    def __call__(self, *args):
        with self.turns:
            return self.decoder(*args)


def named_folder(text):
    """(name, folder) of an adapter that is given as FOLDER or NAME=FOLDER"""
    if os.path.isdir(text) or "=" not in text:
        return os.path.basename(os.path.normpath(text)), text
    name, _, folder = text.partition("=")
    ne.need(name and folder, f"--adapter: expected FOLDER or NAME=FOLDER, found {text!r:.200}")
    return name, folder


class Served:
    """One model of the server.  `engine`, `reader` and `explainer` are None until it is loaded.
    file: its checkpoint     decoder: its class     options: verb.Serving
    adapters: [(name, folder)] of LoRA adapters, which become `adapted`, a list of AdaptedModel"""
    folder = adapter_file = None             # of its adapter

    def __init__(self, file, decoder, options, models, adapters=()):
        self.file, self.decoder, self.options, self.models = file, decoder, options, models
        self.name, self.stats, self.threads = name_of(file), Stats(), get_num_threads()
        self.engine = self.reader = self.explainer = None
        self.stamp = stamp_of(file)
        need_checkpoint(file)
        with ne.reading(file, NOT_OURS):
            meta = read_meta(file)
            cfg = ne.Config(**json.loads(meta["config"])).check()
            state = State(**json.loads(meta["state"])).check()
            self.card = card_of(file, cfg, state, options)
        self.log_file = file.removesuffix(".bin") + ".jsonl"
        ne.need(not adapters or decoder is ne.Decoder, "--adapter: expected a server on the CPU, "
                "python nanoeuler.py serve, found one on a GPU; for a GPU, merge the adapter with "
                "export --merge and serve the result")
        self.adapter = -1 if adapters else None          # for Answer.adapter
        self.adapted = [AdaptedModel(self, *named, i, cfg, state) for i, named in
                        enumerate(adapters)]

    def load(self, gone=None):
        """Reads the weights and starts the engine, unless this was done before.  One thread loads
        all models, one after another."""
        if self.engine:
            return
        o, models = self.options, self.models
        set_num_threads(self.threads)        # Numba's setting is per thread
        speaker = Speaker(self.file, InTurn(self.decoder, models.turns),
                             Sampling(weights=o.weights, template=o.template).check())
        length = context_of(speaker.cfg, o)
        if self.adapted:
            LoraDecoder.ready()
            adapters = [model.adapter_file[:2] for model in self.adapted]
            speaker.decoder = LoraDecoder.over(speaker.decoder, adapters)
        engine = Engine(lambda: speaker.decoder.with_slots(o.slots, length), self.stats, o.queue,
                        self.threads, models.turns)
        engine.tell = lambda news: models.tell(news)
        engine.start()
        self.card = card_of(self.file, speaker.cfg, speaker.state, o, speaker.decoder)
        for model in self.adapted:
            state = state_with(speaker.state, model.adapter_file)
            own = speaker.with_decoder(speaker.decoder.beginning_with(model.adapter), state)
            model.card = model.card_of(speaker.cfg, state, speaker.decoder)
            model.attend(own, length)
        self.attend(speaker, length)
        self.engine = engine                 # last, since other threads take it for loaded now
        if models.closing:
            engine.close()

    def attend(self, speaker, length):
        """Sets what checks requests and explains tokens.     length: tokens of the context"""
        o = self.options
        self.reader = Reader(self.name, speaker, length, o.tokens, o.seconds, o.speculate)
        self.reader.chat_models = self.models.chat_models
        self.explainer = Explainer(speaker, self.file, self.adapter_file)


class AdaptedModel(Served):
    """A model with a LoRA adapter.  The model without it, `base`, has the weights and the engine,
    whose slots serve all adapters.  Loading one loads all."""

    def __init__(self, base, name, folder, adapter, cfg, state):
        """adapter: its number in the decoder     cfg, state: those of the base"""
        self.base, self.name, self.folder, self.adapter = base, name, folder, adapter
        self.file, self.options, self.models = base.file, base.options, base.models
        self.reader = self.explainer = None
        self.adapted, self.stamp, self.stats = [], base.stamp, base.stats
        self.adapter_file = adapter_for(folder, cfg, base.file)
        self.card = self.card_of(cfg, state_with(state, self.adapter_file))
        self.log_file = os.path.join(folder, "run.jsonl")

    @property
    def engine(self):
        return self.base.engine

    def load(self, gone=None):
        self.base.load(gone)

    def card_of(self, cfg, state, decoder=None):
        """The description, as that of the base, with the name of the base as `parent`"""
        file, lora = os.path.join(self.folder, WEIGHTS), self.adapter_file.lora
        return {**card_of(self.file, cfg, state, self.options, decoder), "name": self.name,
                "parent": self.base.name, "bytes": os.path.getsize(file),
                "modified": os.path.getmtime(file), "adapter": {
                    "rank": lora.rank, "alpha": lora.alpha, "targets": [*lora.targets],
                    "parameters": n_trained(cfg, lora)}}


def note_not_served(e):
    log(f"note: {ne.printable(str(e))}; this file is not served until it changes")


def stamp_of(file):
    """Inode, size and time of a file: some of them change if the file is written anew"""
    s = os.stat(file)
    return s.st_ino, s.st_size, s.st_mtime_ns


class Models:
    """All models of the server.  The first file is the default.  Raises a UserError if a file is
    not a checkpoint, or if two have the same name.
    folder: the list follows the checkpoints in it; None: it remains as it is"""

    def __init__(self, files, decoder, options, folder=None):
        self.turns, self.tell = Turns(), lambda news: None
        self.decoder, self.options, self.folder = decoder, options, folder
        self.scanning, self.scanned, self.failed = threading.Lock(), float("-inf"), {}
        self.draining = self.closing = False
        self.by_name = {}
        adapters = [*map(named_folder, options.adapter)]
        ne.need(not adapters or folder is None, "--adapter: expected the file of its model before "
                "it, found none")
        for i, file in enumerate(files):
            served = Served(file, decoder, options, self, () if i else adapters)
            for model in served, *served.adapted:
                same = self.by_name.setdefault(model.name, model)
                ne.need(same is model, f"two models have the name {model.name}: "
                        f"{same.folder or same.file} and {model.folder or file}; rename one of "
                        f"the files, or name one of them only")
        self.default = next(iter(self))
        self.refresh()

    def __iter__(self):
        return iter(self.by_name.values())

    # ---- the folder
    def refresh(self, gone=None):
        """Follows the folder, at most once in SCAN_SECONDS: adds new checkpoints, newest first,
        reads the changed ones anew, and leaves out those that were deleted.  The models that are
        in memory, and the default, stay as they are."""
        if self.folder is None or not self.scanning.acquire(blocking=False):
            return
        try:
            if time.monotonic() >= self.scanned + SCAN_SECONDS:
                self.scanned = time.monotonic()
                self.by_name = self.found()
        finally:
            self.scanning.release()

    def found(self):
        """{name: Served}: the default, the models in the folder, and all that are in memory"""
        newest = sorted(models_in(self.folder), reverse=True)[:MOST_MODELS]
        files = [os.path.normpath(os.path.join(self.folder, name)) for _, name in newest]
        found = {self.default.name: self.default}
        for file in files:
            name = name_of(file)
            if name not in found and (model := self.at(file, self.by_name.get(name))):
                found[name] = model
        kept = {name: model for name, model in self.by_name.items()
                if model.engine or is_bundled(model.file)}
        return {**found, **{name: model for name, model in kept.items() if name not in found}}

    def at(self, file, known):
        """The model of a file: the known one if its file is the same, else one that is read now;
        None if the file is not a checkpoint.  A file that failed is tried again once it changes,
        and a note says once why it is not served."""
        try:
            stamp = stamp_of(file)
            if known and (known.engine or known.stamp == stamp and known.file == file):
                return known
            if self.failed.get(file) == stamp:
                return None
            seen_before, self.failed[file] = file in self.failed, stamp
            if not begins_as_checkpoint(file):
                return None
            model = Served(file, self.decoder, self.options, self)
            del self.failed[file]
            return model
        except ne.UserError as e:            # damaged, or not complete yet
            if not seen_before:
                note_not_served(e)
            return None
        except OSError:                      # deleted just now
            return None

    def chat_models(self):
        """The names of the models that answer messages, the default first"""
        return [model.name for model in self if model.card["answers"]]

    def without_adapters(self):
        """The models that have weights and an engine of their own"""
        return [model for model in self if not isinstance(model, AdaptedModel)]

    def loaded(self):
        return [model for model in self.without_adapters() if model.engine]

    # ---- names
    def find(self, name):
        """The model of this name, which may end with .bin, and after that with Ollama's :latest.
        The own name of a model takes precedence over `model`, `bundled` and `box`.  An empty name
        means the default.  If the server has only one model, every name means it, since many
        clients send a fixed name."""
        if name == "":
            return self.default
        if name not in self.by_name:
            self.refresh()
        by_name = self.by_name
        known = {DEFAULT: self.default, **by_name}
        if BUNDLED in by_name:
            known.setdefault(BOX, by_name[BUNDLED])
        tagless = name.removesuffix(":latest")
        for spelling in name, tagless, tagless.removesuffix(".bin"):
            if spelling in known:
                return known[spelling]
        if len(by_name) == 1:
            return self.default
        raise Refusal(404, f"model {shown(name)} not found; this server has "
                      f"{', '.join(map(repr, self.by_name))}", "model", "model_not_found")

    def of_request(self, body):
        """The model for a request"""
        name = body.get("model")
        return self.default if values.is_empty(name) else self.find(text("model", name))

    # ---- the engines of all loaded models
    def is_alive(self):
        return all(model.engine.thread.is_alive() for model in self.loaded())

    def unfinished(self):
        return sum(model.engine.unfinished() for model in self.loaded())

    def drain(self):
        """Accepts no more answers."""
        self.draining = True
        for model in self.loaded():
            model.engine.draining = True

    def close(self):
        """Ends all engines, also that of a model that is being loaded.  Returns at once."""
        self.draining = self.closing = True
        for model in self.loaded():
            model.engine.close()

    def ended(self, seconds):
        """Waits up to `seconds` for each engine, and returns whether all have ended."""
        return all(model.engine.ended(seconds) for model in self.loaded())
