"""An OpenAI-compatible server for the models of nanoeuler.py, and two pages.

    engine.py      continuous batching: who is in which slot, and what is read in a step
    protocol.py    what a request may say, and the bodies of answers
    app.py         routes, streams, and who may ask
    explain.py     rivals of a token, guesses of the heads, the Euler trajectory
    runs.py        logs of training runs
    metrics.py     what Prometheus reads
    pages/         /, a chat, and /learn, which watches a run: no build step, nothing from elsewhere

It needs starlette and uvicorn, the extra `serve`; the engines know nothing of it but the verb."""
import asyncio
import os
import pathlib
import signal
import socket
import sys
from dataclasses import asdict

import nanoeuler as ne
import uvicorn
from numba import get_num_threads

from .app import LOOPBACK, Server
from .engine import CACHE_BYTES, Engine
from .explain import Explainer
from .metrics import Stats
from .protocol import Reader
from .runs import Runs


CONNECTIONS = 256            # of pages, beside those that wait for answers


def bytes_a_token(cfg, options):
    """Of the cache: keys and values of a token in each slot"""
    return 2 * cfg.n_layer * cfg.n_kv_head * cfg.head_dim * 4 * options.slots


def context_of(cfg, options):
    """Tokens of a slot: what is asked for, or as many as fit into CACHE_BYTES."""
    if options.context:
        return min(options.context, cfg.seq_len)
    return max(1, min(cfg.seq_len, CACHE_BYTES // bytes_a_token(cfg, options)))


def card_of(name, speaker, options, length):
    """What the page says of the model"""
    cfg, state = speaker.cfg, speaker.state
    template = speaker.template
    spoken = ("alpaca" if ne.is_alpaca(template) else "chatml" if ne.is_chatml(template)
              else "the model's own")
    return {"name": name, "parameters": ne.n_params(cfg), "config": asdict(cfg),
            "kind": state.kind, "step": state.step, "bits_per_byte": state.bits_per_byte,
            "tokens_seen": state.tokens_seen, "answers": speaker.answers,
            "template": spoken if speaker.answers else "",
            "remembers": speaker.answers and not ne.is_alpaca(template),
            "weights": speaker.decoder.kept_as, "context": length, "slots": options.slots,
            "cache_mib": length * bytes_a_token(cfg, options) / 2**20,
            "most_tokens": options.tokens, "heads": speaker.decoder.heads,
            "version": ne.__version__}


def build(file, decoder, options):
    """The Server of a checkpoint, whose engine runs."""
    speaker = ne.Speaker(file, decoder, ne.Sampling(weights=options.weights,
                                                    template=options.template).check())
    ne.Model.ready()                         # for trajectories: later it would hold up streams
    length = context_of(speaker.cfg, options)
    engine = Engine(lambda: speaker.decoder.with_slots(options.slots, length), Stats(),
                    options.queue, get_num_threads())
    engine.start()
    name = os.path.basename(file).removesuffix(".bin")
    reader = Reader(name, speaker, length, options.tokens, options.seconds, options.speculate)
    logs = [file.removesuffix(".bin") + ".jsonl", *options.log]
    return Server(options, engine, reader, Explainer(speaker, file),
                  Runs(pathlib.Path.cwd(), [p for p in logs if os.path.exists(p)]),
                  card_of(name, speaker, options, length))


def listening(options):
    """The socket, bound before anything is promised"""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    s = socket.socket(family, socket.SOCK_STREAM)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        s.bind((options.host, options.port))
        s.listen(1024)                       # who comes before all is ready waits
    except OSError as e:
        s.close()
        raise ne.UserError(f"{options.host}:{options.port}: {e.strerror}; choose another --port or "
                           f"--host") from None
    return s


class Uvicorn(uvicorn.Server):
    """Which tells the engine that the end has begun."""

    def __init__(self, server):
        self.engine = server.engine
        super().__init__(uvicorn.Config(
            server.application(), log_level="warning", access_log=False, server_header=False,
            timeout_graceful_shutdown=server.options.drain, timeout_keep_alive=30, backlog=1024,
            h11_max_incomplete_event_size=1 << 16, lifespan="on", ws="none", http="h11",
            limit_concurrency=CONNECTIONS + server.options.slots + server.options.queue))

    def handle_exit(self, sig, frame):
        self.engine.draining = True
        super().handle_exit(sig, frame)


def run(file, decoder, options):
    """The verb `serve`: until Ctrl-C or SIGTERM, when answers that run have --drain seconds left.
    options: nanoeuler.Serving"""
    key = options.api_key or os.environ.get("NANOEULER_API_KEY", "")
    options.api_key = key
    need_ascii(key)
    with listening(options) as s:
        server = build(file, decoder, options)
        address = f"[{options.host}]" if ":" in options.host else options.host
        port = s.getsockname()[1]
        print(f"{file}: {server.card['parameters']:,} parameters, {options.slots} slots of "
              f"{server.card['context']:,} tokens, {server.card['cache_mib']:,.0f} MiB\n"
              f"http://{address}:{port}/ to talk, "
              f"http://{address}:{port}/learn to watch a run; Ctrl-C ends it", flush=True)
        if options.host not in LOOPBACK:
            print(f"note: {options.host} lets other machines in, "
                  f"{'with the key' if key else 'and there is no --api-key: whoever reaches it'}"
                  f"{'' if key else ' may use it'}; nothing is encrypted", file=sys.stderr)
        signal.signal(signal.SIGTERM, lambda *_: None)   # uvicorn raises it again at its end
        try:
            asyncio.run(Uvicorn(server).serve(sockets=[s]))
        finally:
            server.engine.close()


def need_ascii(key):
    ne.need(key.isascii() and key.isprintable() and " " not in key,
            "the key of --api-key is not of letters, digits and signs of ASCII")
