"""An OpenAI-compatible server for the models of nanoeuler.py, and two pages.

    verb.py        the flags of `serve`
    server.py      makes the parts below work together, from start to shutdown
    engine.py      continuous batching: who is in which slot, and what is read in a step
    protocol.py    what a request may say, and the bodies of answers
    app.py         routes, streams, and who may ask
    names.py       the hosts and origins that are allowed
    connections.py time limits of connections, and how many there may be
    workers.py     threads for work that would hold up the event loop
    explain.py     rivals of a token, guesses of the heads, the Euler trajectory
    runs.py        logs of training runs
    metrics.py     what Prometheus reads
    pages/         /, a chat, and /training, which shows training runs; no build step and no
                   files from other servers

It needs starlette and uvicorn, the extra `serve`; the engines are independent of it."""
