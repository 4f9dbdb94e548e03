"""The logs of training runs, for the page /learn: those of a folder, and those that are named."""
import json
import os
import pathlib

import nanoeuler as ne

MOST_BYTES = 1 << 20         # of a log, at a time
LONGEST_HEADER = 1 << 26


class Runs:
    """The logs that may be read: a name that is not in the list opens no file."""

    def __init__(self, folder, named=()):
        self.folder = pathlib.Path(folder)
        self.named = [pathlib.Path(path) for path in named]

    def paths(self):
        """{name: path}, the newest first"""
        found = [*self.named, *self.folder.glob("*.jsonl")]
        dated = {}
        for path in found:
            try:
                if path.is_file() and self.is_log(path):
                    here = path.resolve().parent == self.folder.resolve()
                    dated[path.name if here else str(path)] = path.stat().st_mtime, path
            except OSError:                  # it went away
                continue
        newest = sorted(dated.items(), key=lambda item: -item[1][0])
        return {name: path for name, (_, path) in newest}

    def is_log(self, path):
        """Is its first line the record of a step?  A file of prompts has the same ending."""
        with open(path, "rb") as f:
            record = ne.parse_record(f.readline(1 << 16).decode("utf-8", "replace"))
        return record is not None and bool({"loss", "val_bits_per_byte"} & {*record})

    def listed(self):
        return [{"name": name, "bytes": path.stat().st_size, "changed": path.stat().st_mtime,
                 **self.plan(path)} for name, path in self.paths().items()]

    def plan(self, path):
        """What the checkpoint beside a log says of the run: how long it is to be."""
        try:
            with open(path.with_suffix(".bin"), "rb") as f:
                n = int.from_bytes(f.read(8), "little")
                if n > LONGEST_HEADER:
                    return {}
                state = json.loads(json.loads(f.read(n))["__metadata__"]["state"])
            return {"n_steps": int(state["n_steps"]), "kind": str(state["kind"])}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return {}

    def read(self, name, start):
        """Records from a byte on, and where the next begin; None: there is no such log.  A log that
        has become shorter was begun anew, and is read from its start."""
        path = self.paths().get(name)
        if path is None:
            return None
        size = os.path.getsize(path)
        anew = start > size
        with open(path, "rb") as f:
            f.seek(0 if anew else start)
            raw = f.read(MOST_BYTES)
        whole = raw[:raw.rfind(b"\n") + 1]   # the last line may be half written
        lines = whole.decode("utf-8", "replace").splitlines()
        end = (0 if anew else start) + len(whole)
        return {"records": [clean(r) for r in map(ne.parse_record, lines) if r], "next": end,
                "anew": anew, "more": end < size and bool(whole), **self.plan(path)}


def clean(record):
    """JSON has no NaN: what is no number becomes null."""
    return json.loads(json.dumps(record), parse_constant=lambda name: None)
