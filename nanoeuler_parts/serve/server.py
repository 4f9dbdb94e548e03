"""The server: one model, one engine, and one listening socket.  verb.py calls `run`."""
import asyncio
import contextlib
import os
import pathlib
import signal
import socket
import sys
import threading
from dataclasses import asdict
from functools import partial

import uvicorn
from numba import get_num_threads

import nanoeuler as ne
from nanoeuler_parts.files.safetensors import map_tensors
from nanoeuler_parts.serve.app import Server
from nanoeuler_parts.serve.connections import Connection
from nanoeuler_parts.serve.engine import CACHE_BYTES, Engine
from nanoeuler_parts.serve.explain import Explainer
from nanoeuler_parts.serve.metrics import Stats
from nanoeuler_parts.serve.names import is_loopback, Names
from nanoeuler_parts.serve.protocol import Reader
from nanoeuler_parts.serve.runs import Runs

CONNECTIONS = 256            # for pages, in addition to one per slot and per place in the queue


def bytes_a_token(cfg, options):
    """Bytes of the KV cache for one token in every slot: keys and values, 4 bytes per number"""
    return 2 * cfg.n_layer * cfg.n_kv_head * cfg.head_dim * 4 * options.slots


def context_of(cfg, options):
    """Tokens of a slot: --context, or as many as fit into CACHE_BYTES; at most seq_len."""
    if options.context:
        return min(options.context, cfg.seq_len)
    return max(1, min(cfg.seq_len, CACHE_BYTES // bytes_a_token(cfg, options)))


def card_of(name, file, speaker, options, length):
    """The description of the model for the page"""
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
            "bytes": os.path.getsize(file),
            "cache_mib": length * bytes_a_token(cfg, options) / 2**20,
            "temperature": (ne.ChatSampling if speaker.answers else ne.Sampling).temperature,
            "most_tokens": options.tokens, "heads": speaker.decoder.heads,
            "version": ne.__version__}


def build(file, decoder, options):
    """Loads a checkpoint, starts an engine, and returns the Server."""
    speaker = ne.Speaker(file, decoder, ne.Sampling(weights=options.weights,
                                                    template=options.template).check())
    length = context_of(speaker.cfg, options)
    engine = Engine(lambda: speaker.decoder.with_slots(options.slots, length), Stats(),
                    options.queue, get_num_threads())
    engine.start()
    name = name_of(file)
    reader = Reader(name, speaker, length, options.tokens, options.seconds, options.speculate)
    logs = [file.removesuffix(".bin") + ".jsonl", *options.log]
    return Server(options, engine, reader, Explainer(speaker, file),
                  Runs(pathlib.Path.cwd(), logs), card_of(name, file, speaker, options, length))


def name_of(file):
    """The name of the model for clients"""
    return ne.BUNDLED if ne.is_bundled(file) else os.path.basename(file).removesuffix(".bin")


def listening(options):
    """The listening socket.  It is bound before the model is loaded, so that a port in use is
    reported at once."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with contextlib.ExitStack() as undo:
        try:
            s = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind((options.host, options.port))
            s.listen(1024)                   # connections wait until the model is loaded
        except (OSError, ValueError) as e:   # ValueError: an impossible host name
            said = getattr(e, "strerror", None) or "not a valid host name"
            raise ne.UserError(f"{ne.printable(options.host)}:{options.port}: {said}; choose "
                               f"another --port or --host") from None
        undo.pop_all()
    return s


class Uvicorn(uvicorn.Server):
    """uvicorn with this server's shutdown: answers have --drain seconds to finish.  Then the engine
    is closed, and one second later all remaining connections are closed."""

    def __init__(self, server):
        self.engine, self.drain = server.engine, server.options.drain
        most = CONNECTIONS + server.options.slots + server.options.queue
        super().__init__(uvicorn.Config(
            server.application(), log_level="warning", access_log=False, server_header=False,
            timeout_graceful_shutdown=self.drain + 2, backlog=1024, lifespan="on", ws="none",
            h11_max_incomplete_event_size=1 << 16, http=partial(Connection, most)))

    @contextlib.contextmanager
    def capture_signals(self):
        """SIGINT and SIGTERM start the shutdown.  uvicorn's own method would raise the signal again
        afterwards, and the signal would kill the program."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = signal.SIGINT, signal.SIGTERM
        before = [signal.signal(number, self.handle_exit) for number in signals]
        try:
            yield
        finally:
            for number, handler in zip(signals, before):
                signal.signal(number, handler)

    def handle_exit(self, number, frame):
        self.engine.draining = True
        super().handle_exit(number, frame)

    async def shutdown(self, sockets=None):
        if n := self.engine.unfinished():
            print(f"shutting down: waiting up to {self.drain} s for {ne.counted(n, 'answer')}; "
                  f"press Ctrl-C to stop now", flush=True)
        loop = asyncio.get_running_loop()
        timers = [loop.call_later(self.drain, self.engine.close),        # clients get an error
                  loop.call_later(self.drain + 1, self.cut_off)]
        await super().shutdown(sockets)
        for timer in timers:
            timer.cancel()

    def cut_off(self):
        for connection in [*self.server_state.connections]:
            connection.abort()


def run(file, decoder, options):
    """The verb `serve`: runs until Ctrl-C or SIGTERM.  Running answers then have --drain seconds to
    finish.  options: verb.Serving"""
    key = options.api_key or os.environ.get("NANOEULER_API_KEY", "")
    options.api_key = key
    need_ascii(key)
    need_checkpoint(file)
    Names(options)
    for path in options.log:
        if not os.path.exists(path):
            print(f"note: --log {ne.printable(path)} does not exist yet; the training page shows "
                  f"it as soon as it exists", file=sys.stderr)
    with listening(options) as s:
        server = build(file, decoder, options)
        address = f"[{options.host}]" if ":" in options.host else options.host
        port = s.getsockname()[1]
        print(f"{ne.shown_name(file)}: {server.card['parameters']:,} parameters, "
              f"{ne.counted(options.slots, 'slot')} of {server.card['context']:,} tokens, KV cache "
              f"of {server.card['cache_mib']:,.0f} MiB\n"
              f"http://{address}:{port}/ for the chat, "
              f"http://{address}:{port}/training for training runs; press Ctrl-C to stop",
              flush=True)
        if not is_loopback(options.host):
            print(f"note: {options.host} admits other machines "
                  f"{'with the API key' if key else 'without an API key (set it with --api-key)'}; "
                  f"connections are not encrypted", file=sys.stderr)
        try:
            asyncio.run(Uvicorn(server).serve(sockets=[s]))
        finally:
            server.engine.close()
    print(f"ended after {ne.counted(server.stats.answered(), 'request')}", flush=True)
    if not (server.engine.ended(1) and server.ended()):
        end_now()


def end_now():
    """Ends the process without waiting for threads that still compute or compile."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def need_checkpoint(file):
    """Checks the file before the port is bound, so that a missing file is always reported first."""
    with ne.reading(file, "name a checkpoint that train, sft, dpo or import wrote"):
        map_tensors(file)


def need_ascii(key):
    ne.need(key.isascii() and key.isprintable() and " " not in key,
            "--api-key: expected printable ASCII characters without spaces")
