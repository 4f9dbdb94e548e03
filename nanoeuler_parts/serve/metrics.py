"""Counters and histograms in the text format of Prometheus (0.0.4).  The engine and app.py count;
app.py serves the text at /metrics."""
import bisect
import threading
from collections import Counter

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
COUNTERS = {
    "prompt_tokens": "Prompt tokens.",
    "cached_tokens": "Prompt tokens found in the KV cache and not computed again.",
    "tokens": "Generated tokens.",
    "drafts_offered": "Draft tokens of speculative decoding.",
    "drafts_accepted": "Draft tokens that were accepted."}
HISTOGRAMS = {
    "first": ("time_to_first_token_seconds", "Time from the request to the first token."),
    "token": ("time_per_token_seconds", "Mean time per token of an answer, after its first token.")}


class Histogram:
    def __init__(self):
        self.counts, self.sum = [0] * (len(SECONDS) + 1), 0.0

    def observe(self, seconds):
        self.counts[bisect.bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds


class Stats:
    """The counters and histograms of a model.  The engine's thread updates them while the event
    loop reads them, so there is a lock."""

    def __init__(self):
        self.lock = threading.Lock()
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.histograms = {name: Histogram() for name in HISTOGRAMS}

    def count(self, name, n=1):
        with self.lock:
            self.counters[name] += n

    def observe(self, name, seconds):
        with self.lock:
            self.histograms[name].observe(seconds)


class Requests:
    """The counters of the whole server.  Only the event loop uses them."""

    def __init__(self):
        self.statuses = Counter()            # (path, status)
        self.left = 0

    def answered(self):
        """Number of requests that have been answered"""
        return self.statuses.total()


def label(value):
    """The value of a label, in quotes.  A lone surrogate of a file name becomes its escape."""
    said = value.encode(errors="backslashreplace").decode()
    for plain, escape in ("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"):
        said = said.replace(plain, escape)
    return f'"{said}"'


def text(requests, stats, gauges):
    """All metrics as text.
    requests: Requests     stats: {a model's name: Stats}     gauges: {name: (help, {model: value})}
    """
    lines, labels = [], {model: f"model={label(model)}" for model in stats}

    def family(name, kind, said):
        lines.extend((f"# HELP nanoeuler_{name} {said}", f"# TYPE nanoeuler_{name} {kind}"))

    family("requests_total", "counter", "Requests, by path and status.")
    for (path, status), n in sorted(requests.statuses.items()):
        lines.append(f'nanoeuler_requests_total{{path="{path}",status="{status}"}} {n}')
    family("left_total", "counter", "Answers whose client left before they were complete.")
    lines.append(f"nanoeuler_left_total {requests.left}")
    for name, said in COUNTERS.items():
        family(f"{name}_total", "counter", said)
        for model, found in stats.items():
            lines.append(f"nanoeuler_{name}_total{{{labels[model]}}} {found.counters[name]}")
    for key, (name, said) in HISTOGRAMS.items():
        family(name, "histogram", said)
        for model, found in stats.items():
            histogram, total, own = found.histograms[key], 0, labels[model]
            with found.lock:
                for bound, n in zip((*SECONDS, "+Inf"), histogram.counts):
                    total += n
                    lines.append(f'nanoeuler_{name}_bucket{{{own},le="{bound}"}} {total}')
                lines.append(f"nanoeuler_{name}_sum{{{own}}} {histogram.sum:.9g}")
                lines.append(f"nanoeuler_{name}_count{{{own}}} {total}")
    for name, (said, values) in gauges.items():
        family(name, "gauge", said)
        lines.extend(f"nanoeuler_{name}{{{labels[model]}}} {n}" for model, n in values.items())
    return "\n".join(lines) + "\n"
