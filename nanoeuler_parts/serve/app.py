"""The HTTP side, written with Starlette: routes, streams, and access control.  server.py runs the
application of `Server`; `Engine` generates the answers."""
import asyncio
import contextlib
import hmac
import html
import pathlib
import sys
import time
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

import nanoeuler as ne
from nanoeuler_parts.files import errors
from nanoeuler_parts.serve import metrics, ollama, responses
from nanoeuler_parts.serve.connections import WRITE_SECONDS
from nanoeuler_parts.serve.engine import Busy, ENDING
from nanoeuler_parts.serve.log import log, log_fault
from nanoeuler_parts.serve.names import Names
from nanoeuler_parts.serve.protocol import (
    encoded, Gone, parse, Reader, Refusal, refuse_unless, text, Voice, Writer,
)
from nanoeuler_parts.serve.tour import Tour
from nanoeuler_parts.serve.workers import address_of, disconnected, until_gone, Worker

PAGES = pathlib.Path(__file__).parent / "pages"
TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8",
         ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
# Pages load nothing from other sites and run no inline code: a model's text cannot become a script.
POLICY = ("default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
          "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
          "require-trusted-types-for 'script'")
HEADERS = {"content-security-policy": POLICY, "x-content-type-options": "nosniff",
           "referrer-policy": "no-referrer", "cross-origin-resource-policy": "same-origin",
           "x-frame-options": "DENY"}
BODY_SECONDS = 30            # time limit for receiving a body
# Seconds after which a thread gives Python's lock (the GIL) to another one that waits for it.  The
# event loop takes the lock some 20 times per request, and workers may hold it.  Python has 0.005.
SWITCH_SECONDS = 0.001
LONGEST_PATH = 100           # characters of an address in an error
# A shorter body takes little work, so it is not made to wait for the preparation of a longer one.
SHORT_BODY = 1 << 13         # bytes
# Parts of addresses that clients of OpenAI and Ollama may try, and what they want
ABSENT = {"embeddings": "embeddings", "embed": "embeddings", "audio": "audio", "images": "images",
          "moderations": "moderation", "files": "file storage", "responses": "stored responses",
          "assistants": "assistants", "threads": "assistants", "fine_tuning": "fine-tuning",
          "batches": "batch jobs", "uploads": "file storage", "vector_stores": "vector stores",
          "conversations": "stored conversations", "input_tokens": "token counts",
          "compact": "compaction", **dict.fromkeys(
              ("pull", "push", "create", "copy", "delete", "blobs"), "model management")}
NO_PAGE = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>NanoEuler</title><link rel="icon" href="data:,">
<h1>{status}</h1><p>{said}.</p><p><a href="/">Go to the chat</a></p></html>
"""


def as_json(body, status=200, headers=None):
    return Response(encoded(body), status, headers, media_type="application/json")


def wants_page(scope, headers):
    """Whether a browser asks for a page, and not a client for an object"""
    return (scope["method"] in ("GET", "HEAD") and "text/html" in headers.get("accept", "")
            and not scope["path"].startswith(("/v1/", "/api/")))


def refused(problem, scope, headers):
    """The response to a request that was rejected: a page for a browser, otherwise an object in the
    format of Ollama or of OpenAI"""
    if wants_page(scope, headers):
        page = NO_PAGE.format(status=problem.status, said=html.escape(ne.printable(str(problem))))
        return Response(page, problem.status, problem.headers, media_type=TYPES[".html"])
    body = {"error": str(problem)} if ollama.is_path(scope["path"]) else problem.body()
    return as_json(body, problem.status, problem.headers)


class Guard:
    """Checks each request before the application: its Host header, its origin and its API key.
    `Guard` also adds security headers to the response, counts the request and logs it.

    app: an ASGI application     options: verb.Serving     requests: metrics.Requests
    paths: the paths that are counted by name     open_paths: those that need no API key"""

    def __init__(self, app, options, requests, paths, open_paths):
        self.app, self.options, self.requests, self.paths = app, options, requests, paths
        self.open = open_paths
        self.names = Names(options)

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path, status, began = scope["path"], [], time.perf_counter()
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        allowed = self.names.allowed_origin(headers.get("origin", ""))

        async def send_guarded(message):
            if message["type"] == "http.response.start":
                status.append(message["status"])
                more = dict(HEADERS)
                if allowed:
                    more["access-control-allow-origin"] = allowed
                    more["cross-origin-resource-policy"] = "cross-origin"
                more["vary"] = "Origin"
                message["headers"] = [*message.get("headers", ()),
                                      *((k.encode(), v.encode()) for k, v in more.items())]
            await send(message)

        try:
            problem = self.problem(scope, path, headers, allowed)
            if problem is not None:
                await refused(problem, scope, headers)(scope, receive, send_guarded)
            elif allowed and scope["method"] == "OPTIONS":
                wanted = headers.get("access-control-request-headers")       # OpenAI's has its own
                await Response(status_code=204, headers={
                    "access-control-allow-methods": "GET, POST",
                    "access-control-allow-headers": wanted or "authorization, content-type",
                    "access-control-max-age": "600"})(scope, receive, send_guarded)
            else:
                await self.app(scope, receive, send_guarded)
        finally:
            code = status[0] if status else 499
            self.requests.statuses[path if path in self.paths else "other", code] += 1
            if self.options.access_log:
                log(log_line(scope, code, time.perf_counter() - began))

    def problem(self, scope, path, headers, allowed):
        """A Refusal if the request must be rejected, otherwise None"""
        if {"content-length", "transfer-encoding"} <= headers.keys():
            # A proxy may take the other header for the body's length, and so be tricked to let a
            # hidden request pass.  RFC 9112, 6.1
            return Refusal(400, "expected Content-Length or Transfer-Encoding, found both; send "
                           "one of them", headers={"connection": "close"})
        host = headers.get("host", "")
        if not self.names.allows_host(host):
            return Refusal(403, f"expected a name of this machine in the Host header, found "
                           f"{ne.printable(host)[:200]!r}; to allow this name, start the server "
                           f"with --allow-host")
        origin = headers.get("origin")
        own = origin is None or bool(host) and urlsplit_netloc(origin) == host
        if not (own or allowed):
            return Refusal(403, f"requests from pages of {ne.printable(origin)[:200]} are not "
                           f"allowed; to allow them, start the server with --origin")
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not allowed and not (
                headers.get("sec-fetch-mode") == "navigate" and scope["method"] == "GET"):
            return Refusal(403, "requests from pages of other sites are not allowed; to allow "
                           "them, start the server with --origin")
        if scope["method"] == "OPTIONS" and allowed:     # browsers send no key with it
            return None
        key = self.options.api_key
        if key and path not in self.open:
            said = headers.get("authorization", "")
            wanted = f"Bearer {key}".encode()
            if not hmac.compare_digest(said.encode("latin-1", "replace"), wanted):
                found = "the API key is wrong" if said else "the API key is missing"
                return Refusal(401, f"{found}; expected the header Authorization: Bearer KEY",
                               code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return None


def log_line(scope, status, seconds):
    """One request for the log: its method and path, and status, model, tokens and time of the
    response"""
    asked, model = scope["state"].get("asked"), scope["state"].get("model")
    name, tokens = f" {ne.printable(model)}" if model else "", ""
    if asked:
        prompt, _, written = asked.counts()
        tokens = f" {prompt} + {written} tokens"
    return (f"{scope['method']} {ne.printable(scope['path'])[:200]} {status}{name}{tokens} "
            f"{1000 * seconds:.0f} ms")


def urlsplit_netloc(origin):
    with contextlib.suppress(ValueError):
        return urlsplit(origin).netloc
    return ""


class Talk(Response):
    """The response to one request: its answers as a stream, or whole when all are complete.  If the
    client leaves, its slots are free again within one step."""

    def __init__(self, server, engine, asked, news, writer):
        self.server, self.engine, self.asked = server, engine, asked
        self.news, self.writer = news, writer
        self.voices = [Voice(answer) for answer in asked.answers]
        self.background = None

    async def __call__(self, scope, receive, send):
        scope["state"]["asked"] = self.asked             # for the log
        speak = self.stream if self.asked.stream else self.at_once
        tasks = [asyncio.ensure_future(disconnected(receive)),
                 asyncio.ensure_future(speak(send, scope))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED,
                                         timeout=self.server.options.seconds + WRITE_SECONDS)
            if tasks[1].done():
                tasks[1].result()
            elif not done:                   # the client reads too slowly to receive an error
                scope["state"]["abort"]()
                await tasks[0]
        except OSError:                      # the client left during a write
            pass
        finally:
            for task in tasks:
                task.cancel()
            left = [v.answer for v in self.voices if not v.finish]
            if left:
                self.engine.cancel(left)
                self.server.requests.left += len(left)

    async def each(self):
        """Yields (voice, text, places) until all answers have ended.  Raises a Refusal if one has
        failed or timed out."""
        open_voices = len(self.voices)
        while open_voices:
            answer, news = await self.news.get()
            voice = self.voices[answer.index]
            text, places = voice.take(news)
            if news.finish in ("timeout", "error"):
                raise self.problem(news)
            open_voices -= bool(voice.finish)
            yield voice, text, places

    def problem(self, news):
        if news.finish == "timeout":
            most = self.server.options.seconds
            return Refusal(504, f"the request took more than {most} s, the server's --seconds; ask "
                           f"for fewer tokens", code="timeout")
        return Refusal(500, news.problem, code="generation_failed")

    async def at_once(self, send, scope):
        texts = {v.answer.index: "" for v in self.voices}
        async for voice, text, _ in self.each():
            texts[voice.answer.index] += text
        # Log-probabilities of long prompts make a large body.  A thread encodes it, so that other
        # streams continue meanwhile.
        raw = await asyncio.to_thread(lambda: encoded(self.writer.whole(self.voices, texts)))
        await send({"type": "http.response.start", "status": 200, "headers": [
            (b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]})
        await send({"type": "http.response.body", "body": raw})

    async def stream(self, send, scope):
        await send({"type": "http.response.start", "status": 200, "headers": [
            (b"content-type", self.writer.media.encode()),
            (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]})

        async def piece(large, make, *args):
            """Sends make(*args), made by a thread if it may be large, as in `at_once`"""
            body = await asyncio.to_thread(make, *args) if large else make(*args)
            if body:
                await send({"type": "http.response.body", "more_body": True, "body": body})

        asked, writer, begun = self.asked, self.writer, set()
        repeats = bool(asked.said)           # fields of the request, and the reply at its end
        try:
            scope["state"]["streams"] = True             # for connections.py
            await piece(repeats, writer.begin)
            async for voice, text, places in self.each():
                first = voice.answer.index not in begun
                begun.add(voice.answer.index)
                await piece(first and (asked.echo or asked.tokens),      # the prompt, with scores
                            writer.step, voice, text, places)
                if not self.news.empty():    # let `disconnected` run, though news is queued
                    await asyncio.sleep(0)
            await piece(repeats, writer.end)
        except Refusal as e:
            await piece(repeats, writer.fault, e)
        await send({"type": "http.response.body", "body": b""})


class Server:
    """The application.  Its default model is loaded.
    options: verb.Serving     models: models.Models     runs: runs.Runs"""

    def __init__(self, options, models, runs):
        self.options, self.models, self.default, self.runs = options, models, models.default, runs
        self.requests, self.began = metrics.Requests(), int(time.time())
        # One thread for each kind of work, so that no kind waits for another
        self.tokenizer, self.long_texts, self.schemas, self.disk, self.weights, self.loader = map(
            Worker, ("tokenizer", "long-texts", "schema compiler", "disk", "weights", "loader"))
        self.loads = set()                   # tasks that wait for a model to be loaded
        self.weights.begin(self.default.explainer.prepare)
        self.files = {f"/{p.name}": p for p in PAGES.iterdir() if p.suffix in TYPES}
        self.files |= {"/": PAGES / "chat.html", "/training": PAGES / "training.html"}
        del self.files["/tour.html"]         # a template
        self.tour_pages = Tour()
        self.files |= self.tour_pages.pictures

    def workers(self):
        return (self.tokenizer, self.long_texts, self.schemas, self.disk, self.weights,
                self.loader)

    def preparing(self, raw):
        """The worker that prepares the answer to a body"""
        return self.tokenizer if len(raw) <= SHORT_BODY else self.long_texts

    def ended(self):
        """Whether all workers have finished"""
        return not any(worker.busy for worker in self.workers())

    def application(self):
        post, get = [("/api/explain", self.explain)], [("/v1", self.list_models)]
        for base in "/v1", "":               # some clients add /v1 themselves, and some do not
            post += [(f"{base}/completions", self.talk(Reader.completion)),
                     (f"{base}/chat/completions", self.talk(Reader.chat)),
                     (f"{base}/responses", self.talk(responses.understand, responses.Writer))]
            get += [(f"{base}/models", self.list_models),
                    (f"{base}/models/{{name:path}}", self.model)]
        post += [("/api/chat", self.talk(ollama.chat, ollama.Chat)),
                 ("/api/generate", self.talk(ollama.generate, ollama.Generated)),
                 ("/api/show", self.show)]
        get += [(f"/api/{name}", self.ollama) for name in ollama.DESCRIPTIONS]
        get += [("/metrics", self.metrics), ("/api/model", self.about),
                ("/api/runs", self.list_runs), ("/api/run", self.run)]
        pages = [("/health", self.health), ("/learn", self.moved), ("/tour", self.tour),
                 *((path, self.page) for path in self.files),
                 *((f"/tour/{name}", self.tour) for name in self.tour_pages.pages)]
        get += pages
        routes = [Route(path, call, methods=["POST"]) for path, call in post]
        routes += [Route(path, call, methods=["GET"]) for path, call in get]
        app = Starlette(routes=routes, lifespan=self.lifespan, exception_handlers={
            HTTPException: self.http_error, Refusal: self.refusal, Busy: self.busy,
            Gone: self.gone, ne.UserError: self.user_error, Exception: self.fault})
        paths = {path for path, _ in (*post, *get) if "{" not in path}
        return Guard(app, self.options, self.requests, paths, {path for path, _ in pages})

    @contextlib.asynccontextmanager
    async def lifespan(self, app):
        loop = asyncio.get_running_loop()

        def deliver(news):
            for answer, what in news:
                answer.owner.put_nowait((answer, what))

        def tell(news):
            with contextlib.suppress(RuntimeError):      # the loop has ended
                loop.call_soon_threadsafe(deliver, news)

        self.models.tell = tell
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        yield
        sys.setswitchinterval(before)
        self.models.close()
        for worker in self.workers():
            worker.close()

    # ---- errors
    async def http_error(self, request, e):
        path = request.url.path
        named = path if len(path) <= LONGEST_PATH else f"{path[:LONGEST_PATH]}..."
        said = {404: f"{named} does not exist on this server",
                405: f"{named} does not accept the method {request.method[:LONGEST_PATH]}"
                }.get(e.status_code, str(e.detail))
        if e.status_code == 404 and (found := [*filter(ABSENT.get, path.split("/"))]):
            said += f", which has no {ABSENT[found[-1]]}"
        return await self.refusal(request, Refusal(e.status_code, said, headers=e.headers))

    async def refusal(self, request, e):
        return refused(e, request.scope, request.headers)

    async def user_error(self, request, e):
        return await self.refusal(request, Refusal(400, str(e)))

    async def busy(self, request, e):
        return await self.refusal(request, Refusal(503, str(e), code="overloaded",
                                                   headers={"retry-after": "1"}))

    async def gone(self, request, e):
        return Response(status_code=499)     # nobody receives this

    async def fault(self, request, e):
        return await self.refusal(request, Refusal(500, "internal error; see the server's log"))

    # ---- loading
    async def load(self, request, model):
        """Waits until a model is loaded.  Raises a Refusal if that fails; the next request then
        tries again."""
        if model.engine:
            return
        if self.models.draining:
            raise Busy(ENDING)
        task = asyncio.ensure_future(self.loader.call(request, model.load))
        self.loads.add(task)
        try:
            await task
        except asyncio.CancelledError:       # by `stop_loads`
            raise Busy(ENDING) from None
        except (Busy, Gone):
            raise
        except Exception as e:               # such as the GPU's lack of memory
            if not isinstance(e, ne.UserError | OSError | MemoryError):
                log_fault()
            raise Refusal(503, f"the model {model.name} cannot be loaded: {errors.problem(e)}",
                          code="model_not_loaded") from None
        finally:
            self.loads.discard(task)

    def stop_loads(self):
        """Ends the requests that wait for a model to be loaded."""
        for task in self.loads:
            task.cancel()

    def chosen(self, request, body):
        """The model that a request names.  The log shows it."""
        model = self.models.of_request(body)
        request.scope["state"]["model"] = model.name
        return model

    # ---- OpenAI's routes
    async def body(self, request):
        """The bytes of the request's body.  Raises a Refusal if they are too many or too late.
        Pages of other sites cannot send JSON without asking first, in addition to the checks of
        `Guard`.  Ollama's clients and examples send JSON with another type or with none."""
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json" and not ollama.is_path(request.url.path):
            raise Refusal(415, f"expected the header Content-Type: application/json, found "
                          f"{kind[:100] or 'none'}; add it to the request")
        most, raw = self.options.body, bytearray()
        too_large = Refusal(413, f"expected a body of at most {most:,} bytes, the server's --body; "
                            f"shorten it")
        if (said := request.headers.get("content-length", "")).isdigit() and int(said) > most:
            raise too_large
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for piece in request.stream():
                    raw += piece
                    if len(raw) > most:
                        raise too_large
        except TimeoutError:
            raise Refusal(408, f"the body did not arrive within {BODY_SECONDS} s; send the request "
                          f"again") from None
        except ClientDisconnect:
            raise Refusal(400, "the connection was closed before the body was complete") from None
        return bytes(raw)

    async def parsed(self, request):
        """The JSON object in the request's body"""
        raw = await self.body(request)
        return await self.preparing(raw).call(request, lambda gone: parse(raw))

    def talk(self, understand, writer=Writer):
        """A route that generates text.
        understand: function(reader, body, gone) that returns a protocol.Asked     writer: a class
        """
        async def respond(request):
            raw = await self.body(request)

            def work(gone):
                body = parse(raw)
                model = self.chosen(request, body)
                return model, model.engine and understand(model.reader, body, gone)

            worker = self.preparing(raw)
            try:
                model, asked = await worker.call(request, work)
                if asked is None:            # the model is not loaded yet
                    await self.load(request, model)
                    model, asked = await worker.call(request, work)
                if asked.needs_schema():
                    await self.schemas.call(request, model.reader.prepare_schema, asked,
                                            model.engine.turns)
            except Gone:
                self.requests.left += 1
                raise
            news = asyncio.Queue()
            for answer in asked.answers:
                answer.owner, answer.client = news, address_of(request)
                answer.adapter = model.adapter
            model.engine.submit(asked.answers)
            return Talk(self, model.engine, asked, news, writer(asked, model.name))
        return respond

    def described(self, model):
        """OpenAI's description of a model, and the one for the page"""
        return {"id": model.name, "object": "model", "created": self.began,
                "owned_by": "nanoeuler", **model.card}

    async def list_models(self, request):
        await self.disk.call(request, self.models.refresh)
        return as_json({"object": "list", "data": [*map(self.described, self.models)]})

    async def model(self, request):
        model = await self.found(request, request.path_params["name"])
        return as_json(self.described(model))

    async def found(self, request, name):
        """The model of this name.  An unknown name is looked for in the folder."""
        return await self.disk.call(request, lambda gone: self.models.find(name))

    async def health(self, request):
        ok = self.models.is_alive() and not self.models.draining
        return as_json({"status": "ok" if ok else "ending"}, 200 if ok else 503)

    async def metrics(self, request):
        def of_loaded(count):
            return {model.name: count(model.engine) for model in self.models.loaded()}

        gauges = {
            "model_loaded": ("Is the model in memory?", {m.name: int(m.card["loaded"])
                                                         for m in self.models.without_adapters()}),
            "requests_waiting": ("Answers that wait for a slot.",
                                 of_loaded(lambda engine: len(engine.waiting))),
            "requests_running": ("Answers that are being generated.",
                                 of_loaded(lambda engine: len(engine.active))),
            "slots": ("Answers that can be generated at once.",
                      of_loaded(lambda engine: len(engine.used)))}
        stats = {model.name: model.stats for model in self.models.without_adapters()}
        return PlainTextResponse(metrics.text(self.requests, stats, gauges),
                                 media_type="text/plain; version=0.0.4; charset=utf-8")

    # ---- Ollama's routes, besides those that generate text
    async def ollama(self, request):
        describe = ollama.DESCRIPTIONS[request.url.path.rsplit("/")[-1]]
        await self.disk.call(request, self.models.refresh)
        return as_json(describe([model.card for model in self.models], self.began))

    async def show(self, request):
        said = await self.parsed(request)
        name = text("model", said.get("model") or said.get("name") or "")
        return as_json(ollama.shown((await self.found(request, name)).card))

    # ---- the routes of the pages
    async def page(self, request):
        path = self.files[request.url.path]
        return Response(path.read_bytes(), media_type=TYPES[path.suffix],
                        headers={"cache-control": "no-cache"})

    async def tour(self, request):
        """A page of the guided tour, or its table of contents"""
        name = request.url.path.removeprefix("/tour").removeprefix("/")
        try:
            said = await self.disk.call(request, lambda gone: self.tour_pages.page(name))
        except ModuleNotFoundError as e:
            raise Refusal(501, f"the tour cannot be shown: {errors.problem(e)}; docs/tour has the "
                          f"same pages") from None
        return Response(said, media_type=TYPES[".html"], headers={"cache-control": "no-cache"})

    async def moved(self, request):
        """/learn is the former address of /training.  The redirect is relative, so that it also
        works if a proxy adds a prefix to all paths."""
        return RedirectResponse("training", 308)

    async def about(self, request):
        """The card of the default model, or of the one that ?model= names"""
        name = request.query_params.get("model", self.default.name)
        return as_json((await self.found(request, name)).card)

    async def explain(self, request):
        """Explains a token.  The body is {"tokens": ids, "chosen": the id after them, "trajectory":
        true for the Euler trajectory instead of the alternatives, "attention": a layer, from 1 on,
        for its attention weights instead, "model": its name}."""
        body = await self.parsed(request)
        for name in body:
            refuse_unless(name in ("tokens", "chosen", "trajectory", "attention", "model"),
                          f"unknown parameter {name[:60]!r}, expected tokens, chosen, trajectory, "
                          f"attention or model", name[:100])
        model = await self.disk.call(request, lambda gone: self.chosen(request, body))
        await self.load(request, model)
        reader, explainer = model.reader, model.explainer
        ids, chosen = body.get("tokens"), body.get("chosen")
        explainer.check(ids, reader.length + reader.most)
        if chosen is not None:
            explainer.check([chosen], 1)
        wanted = body.get("trajectory", False)
        refuse_unless(type(wanted) is bool, "trajectory: expected true or false", "trajectory")
        layer, L = body.get("attention"), explainer.speaker.cfg.n_layer
        refuse_unless(layer is None or type(layer) is int and 1 <= layer <= L,
                      f"attention: expected a layer from 1 to {L}", "attention")
        refuse_unless(not wanted or layer is None, "expected trajectory or attention, found both",
                      "attention")
        if wanted or layer:
            await self.weights.call(request, explainer.load)
        if layer:
            work = explainer.attention(ids, layer)
        elif wanted:
            work = explainer.trajectory(ids, chosen)
        else:
            work = explainer.rivals(reader.length, ids, chosen, address_of(request))
        job = model.engine.later(work, address_of(request))
        return as_json(await until_gone(request, job))

    async def list_runs(self, request):
        return as_json({"runs": await self.disk.call(request, self.runs.listed),
                        "folder": self.runs.folder_name})

    async def run(self, request):
        """The records of the log `name`, starting at byte `from`"""
        start = request.query_params.get("from", "0")
        refuse_unless(start.isascii() and start.isdigit() and len(start) < 16,
                      f"from is {start[:40]!r}, expected a position in bytes", "from")
        name = request.query_params.get("name", "")
        found = await self.disk.call(request, self.runs.read, name, int(start))
        if found is None:
            raise Refusal(404, "unknown log; /api/runs lists the names of all logs")
        return as_json(found)
