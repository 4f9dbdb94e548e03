"""The log of a run: one JSON object per line in a file beside the checkpoint, and --log-to.

files/logs.py reads, names and renames such files.
"""
import contextlib
import hashlib
import json
import os
import stat

from bpe import note
from nanoeuler_parts.files.logs import (
    free_log, keep_aside, log_identity, log_path, open_log, restore_log, STOPPED,
)
from nanoeuler_parts.files.sinks import Sinks

def is_empty(fd):
    """Is it an open regular file without content?"""
    found = os.fstat(fd)
    return stat.S_ISREG(found.st_mode) and not found.st_size

class RunLog:
    """The log of one run.     path: its name     pending: its name until the first save, if it is
    yet to replace an older log, else None     file: the open file"""

    def __init__(self, out, names, services):
        """out: the checkpoint.  names: of the data, which the log may not replace.  services: the
        setting log_to"""
        for name in names:
            self.path = log_path(out, name)  # the same for all names, after its checks
        self.sinks, self.out = Sinks(services, out), out
        self.pending, self.file, self.closing = None, None, contextlib.ExitStack()

    def begin(self, state, is_resumed):
        """Opens the log of a run.  With --force, an older checkpoint and its log stay until the
        first save of this run, so this run begins its log under another name.  If a fresh run finds
        a log but no checkpoint, the old log is renamed and kept."""
        if is_resumed:
            restore_log(self.path, state.log_sha256)
        elif os.path.exists(self.out):
            self.pending = free_log(self.path)
            if os.path.exists(self.path):
                note(f"the log is {self.pending}; it replaces {self.path} when the first "
                     f"checkpoint is saved")
        else:
            keep_aside(self.path)
        self.open(state)

    def open(self, state):
        """Opens the file, also after a rename: some systems cannot rename an open file.  Records
        that could not be written yet move to the file that is opened."""
        path, kept = self.pending or self.path, self.file.kept if self.file else ()
        self.file = self.closing.enter_context(open_log(path, state.step, kept))
        if not kept:                         # else its first line may be one that was kept
            state.log_sha256 = log_identity(path)

    def write(self, values, state, cfg):
        """Appends a record, {name: value}."""
        line = json.dumps(values).encode() + b"\n"
        self.file.write(line)                # it keeps what it cannot write, see `Log`
        if not state.log_sha256:             # the same value as `log_identity`
            state.log_sha256 = hashlib.sha256(line).hexdigest()
        self.sinks.write(values, state, cfg)

    def replace_older(self, state):
        """After the first save of this run, gives its log the final name, and so replaces the older
        log.  If the run is interrupted in between, or the rename fails, --resume does it."""
        if self.pending:
            self.closing.close()
            with contextlib.suppress(OSError):
                os.replace(self.pending, self.path)
                self.pending = None
            self.open(state)

    def write_end(self, state, is_complete):
        """The last record of a run that was stopped, or that trained for minutes"""
        end = {"step": state.step, "n_steps": state.n_steps, STOPPED: not is_complete}
        self.file.write(json.dumps(end).encode() + b"\n")

    def remove_empty(self):
        """Removes the log of a run that ends before its first record.  It is still locked, so it
        is not the log of another run."""
        if self.file and is_empty(self.file.file.fileno()):
            with contextlib.suppress(OSError):           # some systems cannot remove an open file
                os.remove(self.file.path)

    def close(self):
        try:
            self.remove_empty()
            self.closing.close()
        finally:
            self.sinks.close()
