"""The models of a server, by name.  server.py makes `Models`, and app.py asks it for the model that
a request names.

The first model is the default, and is loaded when the server starts.  Every other one is loaded by
its first request, and stays in memory from then on.  Each loaded model has an engine with its own
thread, slots and queue.  The engines compute in turns, see `engine.Turns`.
"""
import json
import os
from dataclasses import asdict

from numba import get_num_threads, set_num_threads

import nanoeuler as ne
from nanoeuler_parts.files.safetensors import read_meta
from nanoeuler_parts.serve.engine import CACHE_BYTES, Engine, Turns
from nanoeuler_parts.serve.explain import Explainer
from nanoeuler_parts.serve.metrics import Stats
from nanoeuler_parts.serve.protocol import Reader, Refusal, shown, text

DEFAULT = "model"            # a name of the default model
NO_CHECKPOINT = "name a checkpoint that train, sft, dpo or import wrote"


def name_of(file):
    """The name of a model for clients"""
    return ne.BUNDLED if ne.is_bundled(file) else os.path.basename(file).removesuffix(".bin")


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
    spoken = ("alpaca" if ne.is_alpaca(template) else "chatml" if ne.is_chatml(template)
              else "the model's own")
    length = context_of(cfg, options)
    return {"name": name_of(file), "parameters": ne.n_params(cfg), "config": asdict(cfg),
            "kind": state.kind, "step": state.step, "bits_per_byte": state.bits_per_byte,
            "tokens_seen": state.tokens_seen, "answers": answers,
            "template": spoken if answers else "",
            "remembers": answers and not ne.is_alpaca(template),
            "loaded": decoder is not None,
            "weights": decoder.kept_as if decoder else options.weights,
            "context": length, "slots": options.slots, "bytes": os.path.getsize(file),
            "cache_mib": length * bytes_a_token(cfg, options) / 2**20,
            "temperature": (ne.ChatSampling if answers else ne.Sampling).temperature,
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


class Served:
    """One model of the server.  `engine`, `reader` and `explainer` are None until it is loaded.
    file: its checkpoint     decoder: its class     options: verb.Serving"""

    def __init__(self, file, decoder, options, models):
        self.file, self.decoder, self.options, self.models = file, decoder, options, models
        self.name, self.stats, self.threads = name_of(file), Stats(), get_num_threads()
        self.engine = self.reader = self.explainer = None
        with ne.reading(file, NO_CHECKPOINT):
            meta = read_meta(file)
            cfg = ne.Config(**json.loads(meta["config"])).check()
            state = ne.State(**json.loads(meta["state"])).check()
            self.card = card_of(file, cfg, state, options)

    def load(self, gone=None):
        """Reads the weights and starts the engine, unless this was done before.  One thread loads
        all models, one after another."""
        if self.engine:
            return
        o, models = self.options, self.models
        set_num_threads(self.threads)        # Numba's setting is per thread
        speaker = ne.Speaker(self.file, InTurn(self.decoder, models.turns),
                             ne.Sampling(weights=o.weights, template=o.template).check())
        length = context_of(speaker.cfg, o)
        engine = Engine(lambda: speaker.decoder.with_slots(o.slots, length), self.stats, o.queue,
                        self.threads, models.turns)
        engine.tell = lambda news: models.tell(news)
        engine.start()
        self.reader = Reader(self.name, speaker, length, o.tokens, o.seconds, o.speculate)
        self.explainer = Explainer(speaker, self.file)
        self.card = card_of(self.file, speaker.cfg, speaker.state, o, speaker.decoder)
        self.engine = engine                 # last, since other threads take it for loaded now
        if models.closing:
            engine.close()


class Models:
    """All models of the server.  The first file is the default.  Raises a UserError if a file is
    not a checkpoint, or if two have the same name."""

    def __init__(self, files, decoder, options):
        self.turns, self.tell = Turns(), lambda news: None
        self.draining = self.closing = False
        self.by_name = {}
        for file in files:
            model = Served(file, decoder, options, self)
            same = self.by_name.setdefault(model.name, model)
            ne.need(same is model, f"two models have the name {model.name}: {same.file} and "
                    f"{file}; rename one of the files, or name one of them only")
        self.default = next(iter(self))

    def __iter__(self):
        return iter(self.by_name.values())

    def loaded(self):
        return [model for model in self if model.engine]

    # ---- names
    def find(self, name):
        """The model of this name, which may end with .bin, and after that with Ollama's :latest.
        The own name of a model takes precedence over `model`, `bundled` and `box`."""
        known = {DEFAULT: self.default, **self.by_name}
        if ne.BUNDLED in self.by_name:
            known.setdefault(ne.BOX, self.by_name[ne.BUNDLED])
        tagless = name.removesuffix(":latest")
        for spelling in name, tagless, tagless.removesuffix(".bin"):
            if spelling in known:
                return known[spelling]
        raise Refusal(404, f"model {shown(name)} not found; this server has "
                      f"{', '.join(map(repr, self.by_name))}", "model", "model_not_found")

    def of_request(self, body):
        """The model for a request.  If the server has only one, every name means it, since many
        clients send a fixed name."""
        name = body.get("model")
        if name is None or text("model", name) == "" or len(self.by_name) == 1:
            return self.default
        return self.find(name)

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
