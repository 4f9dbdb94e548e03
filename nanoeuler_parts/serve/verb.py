"""`serve`: the flags of the server, and how it is started."""
import importlib.util
import shlex
from dataclasses import dataclass, field, fields

from bpe import need
from nanoeuler import Decoder, MODEL, model_to_use, PACKAGES, setting, Settings

@dataclass
class Serving(Settings):
    """How `serve` listens, and how much it does at once."""
    host: str = setting("127.0.0.1", 0, 0, "address to listen on; by default this machine alone")
    port: int = setting(8000, 0, 65_535, "0: one that is free")
    api_key: str = setting("", 0, 0, "what clients must know, also as NANOEULER_API_KEY")
    origin: list = field(default_factory=list, metadata={
        "help": "a site whose pages may ask, as https://example.org; may be given several times"})
    allow_host: list = field(default_factory=list, metadata={
        "help": "another name by which the server may be called, as mybox.example.org; needed only "
                "without an API key; may be given several times"})
    log: list = field(default_factory=list, metadata={
        "help": "a log for /training beside those in this folder; may be given several times"})
    slots: int = setting(8, 1, 1 << 12, "answers written at a time")
    context: int = setting(0, 0, 1 << 17, "tokens of a slot; 0: the model's, if memory allows")
    queue: int = setting(256, 0, 1 << 20, "answers that may wait for a slot")
    tokens: int = setting(4096, 1, 1 << 40, "longest answer that may be asked for")
    body: int = setting(1 << 20, 1, 1 << 30, "largest request, bytes")
    seconds: int = setting(600, 1, 1 << 30, "most that a request may take")
    drain: int = setting(30, 0, 1 << 30, "seconds to finish in at the end")
    speculate: int = setting(-1, -1, 15, "drafts a step, which change no text; -1: as many as pay")
    weights: str = setting("", 0, 0, "in memory: f32, bf16, or on the CPU int8; empty: f32, on a "
                           "GPU bf16 if it can")
    template: str = setting("", 0, 0, "of a chat: alpaca or chatml; empty: the model's own")

def need_packages(verb, names):
    """Names all packages that a verb lacks at once."""
    missing = [name for name in names if not importlib.util.find_spec(name)]
    need(not missing, f"{verb} needs {' and '.join(missing)}, not installed for this Python: pip "
         f"install {' '.join(shlex.quote(PACKAGES[name]) for name in missing)}, or in a clone "
         f"pip install -e '.[{verb}]'")

def serve(file=None, decoder=Decoder, **chosen):
    """`serve`: an HTTP server and its pages."""
    options = Serving(**chosen).check()
    need_packages("serve", ("starlette", "uvicorn"))
    from nanoeuler_parts.serve import server
    return server.run(model_to_use(file, place=""), decoder, options)

def serve_verb(add):
    add(serve, MODEL, settings=fields(Serving))
