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
    "drafts_accepted": "Draft tokens that were accepted.",
    "left": "Answers whose client left before they were complete."}
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
    """All counters and histograms.  Two threads update them, the engine's and the event loop's, so
    there is a lock."""

    def __init__(self):
        self.lock = threading.Lock()
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.requests = Counter()            # (path, status)
        self.histograms = {name: Histogram() for name in HISTOGRAMS}

    def count(self, name, n=1):
        with self.lock:
            self.counters[name] += n

    def observe(self, name, seconds):
        with self.lock:
            self.histograms[name].observe(seconds)

    def request(self, path, status):
        with self.lock:
            self.requests[path, status] += 1

    def answered(self):
        """Number of requests that have been answered"""
        with self.lock:
            return self.requests.total()

    def text(self, gauges):
        """All metrics as text.  gauges: {name: (help, current value)}"""
        lines = []

        def family(name, kind, text):
            lines.extend((f"# HELP nanoeuler_{name} {text}", f"# TYPE nanoeuler_{name} {kind}"))

        with self.lock:
            family("requests_total", "counter", "Requests, by path and status.")
            for (path, status), n in sorted(self.requests.items()):
                lines.append(f'nanoeuler_requests_total{{path="{path}",status="{status}"}} {n}')
            for name, text in COUNTERS.items():
                family(f"{name}_total", "counter", text)
                lines.append(f"nanoeuler_{name}_total {self.counters[name]}")
            for key, (name, text) in HISTOGRAMS.items():
                family(name, "histogram", text)
                histogram, total = self.histograms[key], 0
                for bound, n in zip((*SECONDS, "+Inf"), histogram.counts):
                    total += n
                    lines.append(f'nanoeuler_{name}_bucket{{le="{bound}"}} {total}')
                lines.append(f"nanoeuler_{name}_sum {histogram.sum:.9g}")
                lines.append(f"nanoeuler_{name}_count {total}")
        for name, (text, value) in gauges.items():
            family(name, "gauge", text)
            lines.append(f"nanoeuler_{name} {value}")
        return "\n".join(lines) + "\n"
