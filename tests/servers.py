"""A server in this process, for tests: a checkpoint of random weights, on a port that is free."""
import asyncio
import contextlib
import http.client
import json
import threading
from dataclasses import replace

import numpy as np
from children import until
from helpers import TINY, random_flat
from models import CHATML, write

import nanoeuler as ne
from nanoeuler_parts.serve.verb import Serving

CFG = replace(TINY, n_embd=32, n_head=4, n_kv_head=2, head_dim=8, n_hidden=48, seq_len=96,
              vocab_size=512, n_mtp=3)


def chat_model(path, tokenizer, cfg=CFG, **state):
    """A checkpoint that speaks ChatML, as a model that is taught nothing does.  It likes to repeat
    a token, so that some drafts are right, and knows of no end."""
    flat = random_flat(cfg, 3, np.float32, 0.2)
    p = ne.views(flat, ne.param_table(cfg))
    p.attn_proj[:] *= 0.3
    p.down[:] *= 0.3
    p.lm_head[0] = p.wte + 0.3 * p.lm_head[0]
    for head in p.lm_head[1:]:
        head[:] = 0.9 * p.lm_head[0] + 0.1 * head
    return str(write(path, cfg, tokenizer, flat,
                     **{"kind": "chat", "template": CHATML, "eos": "", **state}))


@contextlib.contextmanager
def serving(*files, decoder=ne.Decoder, folder=None, **options):
    """(its address, the Server).  folder: see models.Models"""
    from nanoeuler_parts.serve import server as serve
    from nanoeuler_parts.serve.models import Models
    options = Serving(**{"port": 0, "slots": 4, "access_log": False, **options}).check()
    with serve.listening(options) as s:
        server = serve.build(Models([*map(str, files)], decoder, options, folder), options)
        http = serve.Uvicorn(server)
        thread = threading.Thread(target=lambda: asyncio.run(http.serve(sockets=[s])), daemon=True)
        thread.start()
        try:
            until(lambda: http.started)
            yield f"http://127.0.0.1:{s.getsockname()[1]}", server
        finally:
            http.should_exit = True
            thread.join(200)
            server.models.close()
            assert server.models.ended(200) and not thread.is_alive()


def send(address, method, path, body=None, headers=None):
    """(status, headers, the object or the text that came)"""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=200)
    with contextlib.closing(connection):
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        kind = {"content-type": "application/json"} if raw is not None else {}
        connection.request(method, path, raw, {**kind, **(headers or {})})
        response = connection.getresponse()
        said = response.read().decode()
        if response.headers.get_content_type() == "application/json":
            said = json.loads(said)
        return response.status, response.headers, said


def post(address, path, body, **headers):
    return send(address, "POST", path, body, headers)
