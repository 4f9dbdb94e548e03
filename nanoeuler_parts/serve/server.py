"""The server: its models, its listening socket, and its end.  verb.py calls `run`."""
import asyncio
import contextlib
import os
import pathlib
import signal
import socket
import sys
import threading
from functools import partial

import uvicorn

import nanoeuler as ne
from bpe import note
from nanoeuler_parts.checkpoint.bundled import shown_name
from nanoeuler_parts.checkpoint.file import open_checkpoint
from nanoeuler_parts.files.printing import counted
from nanoeuler_parts.serve.app import Server
from nanoeuler_parts.serve.connections import Connection
from nanoeuler_parts.serve.engine import CACHE_BYTES
from nanoeuler_parts.serve.log import log
from nanoeuler_parts.serve.models import Models
from nanoeuler_parts.serve.names import is_loopback, Names
from nanoeuler_parts.serve.runs import Runs

CONNECTIONS = 256            # for pages, in addition to one per slot and per place in the queue


def build(models, options):
    """Loads the default model, and returns the Server.  models: models.Models"""
    models.default.load()
    logs = [model.log_file for model in models]
    return Server(options, models, Runs(pathlib.Path.cwd(), [*logs, *options.log]))


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
    """uvicorn with this server's shutdown: answers have --drain seconds to finish, and requests
    that wait for a model to be loaded end at once.  Then the engines are closed, and one second
    later all remaining connections are closed."""

    def __init__(self, server):
        self.server, self.models, self.drain = server, server.models, server.options.drain
        answers = server.options.slots + server.options.queue
        most = CONNECTIONS + answers * len(self.models.by_name)
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
        self.models.drain()
        super().handle_exit(number, frame)

    async def shutdown(self, sockets=None):
        self.server.stop_loads()
        if n := self.models.unfinished():
            log(f"shutting down: waiting up to {self.drain} s for {counted(n, 'answer')}; "
                f"press Ctrl-C to stop now", sys.stdout)
        loop = asyncio.get_running_loop()
        timers = [loop.call_later(self.drain, self.models.close),        # clients get an error
                  loop.call_later(self.drain + 1, self.cut_off)]
        await super().shutdown(sockets)
        for timer in timers:
            timer.cancel()

    def cut_off(self):
        for connection in [*self.server_state.connections]:
            connection.abort()


def print_models(models, options):
    for model in models:
        card = model.card
        if "parent" in card:
            print(f"{ne.printable(model.name)}: adapter of rank {card['adapter']['rank']} for "
                  f"{ne.printable(card['parent'])}, {card['adapter']['parameters']:,} parameters, "
                  f"in the same slots")
            continue
        use = ("loaded at its first request" if not card["loaded"] else
               f"{counted(options.slots, 'slot')} of {card['context']:,} tokens, KV cache of "
               f"{card['cache_mib']:,.0f} MiB")
        print(f"{ne.printable(shown_name(model.file))}: {card['parameters']:,} parameters, "
              f"{use}")
        if said := other_context(card, options):
            note(f"{shown_name(model.file)}: {said}")


def other_context(card, options):
    """A text if the slots of a model have another context than the model, or than --context; "" if
    not"""
    whole, context = card["config"]["seq_len"], card["context"]
    if options.context > whole:
        return f"its context is {whole:,} tokens, so --context {options.context} has no effect"
    if options.context or context == whole:
        return ""
    most = CACHE_BYTES >> 20
    return (f"a slot has {context:,} tokens, and the model's context {whole:,}, because the KV "
            f"cache takes up to {most:,} MiB; for a longer context, use fewer --slots, or set "
            f"--context and use more memory")


def addresses(host, port):
    """(host and port for a browser on this machine, and for one on other machines).  The second is
    "" unless the server listens on all addresses: a browser cannot open 0.0.0.0."""
    every = host in ("0.0.0.0", "::")
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    here = f"[{here}]" if ":" in here else here
    return f"{here}:{port}", f"{socket.gethostname()}:{port}" if every else ""


def run(files, folder, decoder, options):
    """The verb `serve`: runs until Ctrl-C or SIGTERM.  Running answers then have --drain seconds to
    finish.  folder: see Models     options: verb.Serving"""
    key = options.api_key or os.environ.get("NANOEULER_API_KEY", "")
    options.api_key = key
    need_ascii(key)
    models = Models(files, decoder, options, folder)
    open_checkpoint(models.default.file)              # a damaged file is reported first
    Names(options)
    for path in options.log:
        if not os.path.exists(path):
            note(f"--log {path} does not exist yet; the training page shows it as soon as it "
                 f"exists")
    with listening(options) as s:
        server = build(models, options)
        here, there = addresses(options.host, s.getsockname()[1])
        print_models(models, options)
        print(f"http://{here}/ for the chat, http://{here}/training for training runs"
              f"{f', and http://{there}/ from other machines' if there else ''}; press Ctrl-C to "
              f"stop", flush=True)
        if not is_loopback(options.host):
            note(f"{options.host} admits other machines "
                 f"{'with the API key' if key else 'without an API key (set it with --api-key)'}; "
                 f"connections are not encrypted")
        try:
            asyncio.run(Uvicorn(server).serve(sockets=[s]))
        finally:
            models.close()
    log(f"ended after {counted(server.requests.answered(), 'request')}", sys.stdout)
    if not (models.ended(1) and server.ended()):
        end_now()


def end_now():
    """Ends the process without waiting for threads that still compute or compile."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


def need_ascii(key):
    ne.need(key.isascii() and key.isprintable() and " " not in key,
            "--api-key: expected printable ASCII characters without spaces")
