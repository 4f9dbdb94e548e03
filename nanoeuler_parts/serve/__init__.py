"""A server for the models of nanoeuler.py with the protocols of OpenAI and Ollama, and two pages.

    verb.py        the flags of `serve`
    server.py      starts the modules below, connects them, and shuts them down
    models.py      which model a request means; loads a model at its first request
    engine.py      continuous batching: which answer is in which slot, and what each step reads
    protocol.py    parameters of requests, and bodies of responses
    responses.py   OpenAI's Responses API, translated into the protocol above
    ollama.py      the same for Ollama's protocol
    app.py         routes, streams, access control, and the log
    log.py         lines of the log, which may fail without harm
    names.py       allowed hosts and origins
    connections.py time limits for connections, and a limit on their number
    workers.py     threads for work that would block the event loop
    explain.py     alternatives to a token, guesses of the heads, the Euler trajectory
    runs.py        logs of training runs
    metrics.py     metrics for Prometheus
    pages/         the chat at / and the training runs at /training.  The pages need no build step
                   and load no files from other servers.

The server needs starlette and uvicorn, which the extra `serve` installs.  The CPU and GPU engines
are independent of the server."""
