"""The data scripts against a server on this machine that is slow, busy, broken or wrong."""
import gzip
import hashlib
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from children import PATIENCE
from helpers import FAST, ROOT, TEXT, complains, few, nanoeuler, needs, ok

for package in ("duckdb", "huggingface_hub", "pooch", "tqdm"):
    needs(package)

sys.path.insert(0, str(ROOT / "data"))
import download as dl
import duckdb
import get_alpaca
import get_gutenberg
import get_preferences
import get_web
import huggingface_hub.constants
import huggingface_hub.file_download
import huggingface_hub.utils._http
import nanoeuler as ne
from nanoeuler_parts.files.texts import split_text
from nanoeuler_parts.tuning.examples import held_out, read_examples
import pooch.core
import prepare

pytestmark = pytest.mark.unit
ALPACA = json.dumps([{"instruction": f"Count to {i}.", "input": "", "output": "1 " * (i + 1)}
                     for i in range(600)]).encode()
PIECE = 1 << 16                              # bytes that huggingface_hub writes at once, here
assert len(ALPACA) > 5 * PIECE


def sha256(data):
    return hashlib.sha256(data).hexdigest()


class Server(ThreadingHTTPServer):
    """What a web server has, `files` by path, and what the Hub has, `commits` by revision.

    As the Hub does, it answers HEAD with the commit, the sha256 and the size of a file, and with
    its address on another server, "localhost" here.  `moods` are spent one a GET, `head_moods` one
    a HEAD; the last stays for all that follow."""
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.commits, self.main = {}, {}, None
        self.moods, self.head_moods = ["ok"], ["ok"]
        self.requests, self.ranges, self.keys = [], [], []
        self.halfway, self.go_on = threading.Event(), threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.cdn = f"http://localhost:{self.server_port}/cdn/"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, request, address):
        """A client that hangs up is part of the tests."""

    def publish(self, repo, **files):
        """A commit of a data set; files of it that are not named stay as they are."""
        before = self.commits.get(self.main, {})
        self.main = hashlib.sha1(str(len(self.commits)).encode()).hexdigest()
        new = {f"/datasets/{repo}/{name}": data for name, data in files.items()}
        self.commits[self.main] = {**before, **new}

    def file(self, path):
        """What a GET is answered with: a web server's file, or the Hub's by its digest."""
        name = path.removeprefix("/cdn/")
        stored = [x for files in self.commits.values() for x in files.values() if sha256(x) == name]
        return stored[0] if stored else self.files.get(path)


class Handler(BaseHTTPRequestHandler):
    def answer(self, status, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": "0", **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def spend(self, moods):
        self.server.requests.append((self.command, self.path))
        self.server.keys.append(self.headers.get("Authorization"))
        return moods.pop(0) if len(moods) > 1 else moods[0]

    def do_HEAD(self):
        server, mood = self.server, self.spend(self.server.head_moods)
        if mood.isdigit():
            return self.answer(int(mood), **({"Retry_After": "7"} if mood == "429" else {}))
        if mood == "portal":                 # a network that wants to be logged into
            return self.answer(200, Content_Type="text/html", ETag='"portal"')
        repo, _, rest = self.path.partition("/resolve/")
        revision, _, name = rest.partition("/")
        commit = server.main if revision == "main" else revision
        data = server.commits.get(commit, {}).get(f"{repo}/{name}")
        if data is None:
            return self.answer(404, X_Error_Code="EntryNotFound")
        tag = {"promise": "0" * 64, "git": "1" * 40}.get(mood, sha256(data))
        self.answer(302, X_Repo_Commit=commit, X_Linked_Size=len(data), X_Linked_ETag=f'"{tag}"',
                    Location=server.cdn + sha256(data))

    def do_GET(self):
        if self.path.startswith("/api/"):    # what huggingface_hub asks besides
            return self.answer(404)
        server, mood = self.server, self.spend(self.server.moods)
        server.ranges.append(self.headers.get("Range"))
        data = server.file(self.path)
        if mood.isdigit() or data is None:
            return self.answer(int(mood) if mood.isdigit() else 404,
                               **({"Retry_After": "7"} if mood == "429" else {}))
        if "wrong" in mood:
            data = b"<html>Please log in to this network</html>" * 3000
        if "other" in mood:                  # of the same length
            data = data.replace(b"Count", b"Shout")
        asked = self.headers.get("Range") if "norange" not in mood else None
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if start >= len(data):
            return self.answer(416, Content_Range=f"bytes */{len(data)}")
        if "shifted" in mood and asked:      # a proxy that answers with another range
            start -= 1
        self.send_response(206 if asked else 200)
        if "gzip" in mood:                   # whatever the client accepts
            data = gzip.compress(data)
            self.send_header("Content-Encoding", "gzip")
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        if "nolength" not in mood:
            self.send_header("Content-Length", str(len(data) - start + 9 * ("lie" in mood)))
        self.end_headers()
        data = data[start:]
        self.wfile.write(data[:len(data) // 2])
        if "silent" in mood:                 # until the test is over
            server.halfway.set()
            server.go_on.wait(PATIENCE)
        if "drop" in mood:                   # rudely, in the middle
            self.close_connection = True
        else:
            self.wfile.write(data[len(data) // 2:])

    def log_message(self, *args):
        pass


@pytest.fixture
def waits(monkeypatch):
    """Seconds that the libraries want to wait, each time; here they do not."""
    waits = []
    clock = SimpleNamespace(**{**vars(time), "sleep": waits.append})
    for module in (huggingface_hub.utils._http, huggingface_hub.file_download, pooch.core):
        monkeypatch.setattr(module, "time", clock)
    return waits


@pytest.fixture
def server(monkeypatch, waits, tmp_path_factory):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", PIECE)
    monkeypatch.setattr(get_gutenberg, "PAUSE", 0)
    huggingface_hub.close_session()          # of another test, with its environment
    with Server() as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE",
                            server.url + "/{repo_id}/resolve/{revision}/{filename}")
        server.publish(get_alpaca.REPO, **{get_alpaca.FILE: ALPACA})
        yield server
        server.go_on.set()
        server.shutdown()


def alpaca(tmp_path, *args):
    return dl.run(get_alpaca.main, ["--to", str(tmp_path), *args])


def learned(tmp_path):
    return json.loads((tmp_path / "alpaca.json").read_text(encoding="utf-8"))


def manifest(tmp_path):
    return json.loads((tmp_path / "manifest.json").read_text(encoding="utf-8"))


RAW = f"alpaca/{get_alpaca.FILE}"


def one_line(capsys, *words):
    """Everything on stderr: one line that holds the words."""
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    for word in words:
        assert str(word) in lines[0], lines[0]


def leftovers(tmp_path):
    return [p.name for p in tmp_path.rglob("*") if p.is_file()
            and (p.suffix in (".incomplete", ".tmp") or p.parent.name == "incoming")]


# ---- Data sets of the Hub ----
@pytest.mark.parametrize("moods, gets", [
    ("ok", 1), ("drop drop ok", 3), ("drop drop drop drop drop drop drop ok", 8), ("429 ok", 2),
    ("408 ok", 2), ("norange+drop norange", 2), ("drop norange+drop ok", 3), ("nolength", 1),
    ("norange+gzip", 1), ("drop 429 drop ok", 4), ("lie ok", 2)])
def test_a_bad_server_gives_the_right_bytes(server, tmp_path, waits, moods, gets):
    server.moods = moods.split()
    assert alpaca(tmp_path) == 0
    assert learned(tmp_path) == [{k: v.strip() for k, v in e.items()} for e in json.loads(ALPACA)]
    assert len(server.ranges) == gets
    assert "429" not in moods or max(waits) >= 7         # as long as it was asked
    assert (tmp_path / "raw" / RAW).read_bytes() == ALPACA
    entry = manifest(tmp_path)[RAW]
    assert entry["url"] == f"{server.url}/datasets/{get_alpaca.REPO}/resolve/{server.main}/" \
        f"{get_alpaca.FILE}"
    assert entry["commit"] == server.main
    assert (entry["bytes"], entry["sha256"]) == (len(ALPACA), sha256(ALPACA))
    assert leftovers(tmp_path) == []
    server.requests.clear()
    assert alpaca(tmp_path) == 0 and server.requests == []           # verified, not fetched


def test_the_rest_is_asked_for_where_the_connection_broke(server, tmp_path):
    server.moods = ["drop", "ok"]
    assert alpaca(tmp_path) == 0
    start = int(server.ranges[1].removeprefix("bytes=").rstrip("-"))
    assert server.ranges[0] is None and len(ALPACA) // 2 - PIECE < start <= len(ALPACA) // 2


@pytest.mark.parametrize("moods", ["503 ok", "429 429 ok", "500 502 504 ok"])
def test_a_busy_hub_is_asked_again(server, tmp_path, waits, moods):
    server.head_moods = moods.split()
    assert alpaca(tmp_path) == 0 and len(learned(tmp_path)) == 600
    assert len(waits) == len(moods.split()) - 1
    assert "429" not in moods or min(waits) >= 7


@pytest.mark.parametrize("head_moods, moods, words", [
    ("404", "ok", ["404", "HF_ENDPOINT"]), ("503", "ok", ["503", "HF_ENDPOINT"]),
    ("401", "ok", ["401"]), ("portal", "ok", ["not a server of the Hugging Face Hub"]),
    ("ok", "503", ["503"]), ("ok", "404", ["404"]),
    ("ok", "wrong", ["Consistency check failed"]), ("ok", "other", ["arrived damaged"]),
    ("ok", "drop other", ["arrived damaged"]), ("ok", "drop wrong", ["416"]),
    ("ok", "drop shifted", ["Consistency check failed"]),
    ("ok", "nolength+drop", ["Consistency check failed"]),
    ("promise", "ok", ["arrived damaged", "expected 000000000000"]),
    ("git", "nolength+wrong", ["Consistency check failed"])])
def test_a_hopeless_server_is_one_line_and_the_next_run_finishes(server, tmp_path, capsys,
                                                                 head_moods, moods, words):
    server.head_moods, server.moods = head_moods.split(), moods.split()
    assert alpaca(tmp_path) == 2
    one_line(capsys, "get_alpaca.py: ", server.url, *words)
    assert not (tmp_path / "alpaca.json").exists()
    assert not (tmp_path / "manifest.json").exists()
    assert leftovers(tmp_path) == []
    server.head_moods, server.moods = ["ok"], ["ok"]
    assert alpaca(tmp_path) == 0 and len(learned(tmp_path)) == 600


def test_a_file_without_a_promised_hash_is_judged_by_its_content(server, tmp_path, capsys):
    """What git keeps itself is known by another hash than its sha256."""
    server.head_moods = ["git"]
    server.publish(get_alpaca.REPO, **{get_alpaca.FILE: bytes(len(ALPACA))})
    assert alpaca(tmp_path) == 2
    one_line(capsys, "is not what it should be")
    assert leftovers(tmp_path) == []
    server.publish(get_alpaca.REPO, **{get_alpaca.FILE: ALPACA})
    assert alpaca(tmp_path) == 0 and len(learned(tmp_path)) == 600


def test_no_server(server, tmp_path, capsys, waits):
    server.shutdown()
    server.server_close()
    assert alpaca(tmp_path) == 2
    one_line(capsys, server.url, "Connection refused", "HF_ENDPOINT")
    assert sum(waits) < 60                   # tried again, but not for ever


def test_a_silent_server_is_not_waited_for(server, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    server.moods = ["silent"]
    assert alpaca(tmp_path) == 2
    one_line(capsys, server.url, "timed out", "HF_ENDPOINT")
    assert leftovers(tmp_path) == []


def test_offline_by_decree(server, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert alpaca(tmp_path) == 2
    one_line(capsys, "offline mode", "HF_HUB_OFFLINE")
    assert server.requests == []


def test_files_of_one_data_set_are_of_one_commit(server, tmp_path):
    """A new edition at the Hub is not mixed with what is here; without a manifest it is taken."""
    assert alpaca(tmp_path) == 0
    first = server.main
    server.publish(get_alpaca.REPO, **{get_alpaca.FILE: ALPACA.replace(b"Count", b"Shout")})
    (tmp_path / "raw" / RAW).unlink()
    assert alpaca(tmp_path) == 0
    assert (tmp_path / "raw" / RAW).read_bytes() == ALPACA
    assert manifest(tmp_path)[RAW]["commit"] == first != server.main
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "raw" / RAW).unlink()
    assert alpaca(tmp_path) == 0
    assert learned(tmp_path)[0]["instruction"] == "Shout to 0."
    assert manifest(tmp_path)[RAW]["commit"] == server.main


def test_an_error_of_the_network_is_no_error_of_this_machine():
    """Both are OSError with a number; only one of them is cured by --to."""
    for e in (socket.gaierror(-2, "Name or service not known"), TimeoutError(110, "timed out"),
              ConnectionResetError(104, "Connection reset by peer")):
        with pytest.raises(dl.DataError, match=f"http://a: .*{e.strerror}; try again"):
            with dl.fetching("http://a", "try again"):
                raise e
    for e in (OSError(28, "No space left on device"), PermissionError(13, "denied", "/raw")):
        with pytest.raises(OSError) as raised, dl.fetching("http://a", "try again"):
            raise e
        assert raised.value is e


def test_the_innermost_error_is_shown():
    inner = ConnectionError("it hung up")
    with pytest.raises(dl.DataError, match="http://a: it hung up; try again"):
        with dl.fetching("http://a", "try again"):
            raise RuntimeError(RuntimeError(inner))


def test_an_error_without_words_has_some(capsys):
    def main(argv):
        raise OSError("disk on fire")

    assert dl.run(main) == 2
    one_line(capsys, "a file: disk on fire")


def test_clean_by_hand():
    for text, expected in ((" a \t\r\nb  \rc\n\n\n\nd \n \n\ufeff", "a\nb\nc\n\nd"),
                           ("a\n \t\n \n\n b\u00a0\n", "a\n\n b\u00a0"), (" \n\t", "")):
        assert dl.clean(text) == expected


def test_a_bad_file_in_raw_is_removed_not_looked_for_elsewhere(server, tmp_path, capsys):
    """It has no entry in the manifest, so it was put there: --from would name another folder."""
    raw = tmp_path / "raw" / RAW
    raw.parent.mkdir(parents=True)
    for content in (b"[]", b'["a"]', b"{}"):
        raw.write_bytes(content)
        assert alpaca(tmp_path) == 2
        one_line(capsys, raw, "is not what it should be", "; remove it")
        assert alpaca(tmp_path / "to", "--from", str(raw.parent)) == 2
        one_line(capsys, raw, "is not what it should be", "--from")
    raw.unlink()
    assert alpaca(tmp_path) == 0


def test_a_file_takes_its_name_when_it_is_on_the_disk(tmp_path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, lambda *args, name=name, call=getattr(os, name): (
            done.append(name), call(*args)))
    with dl.replacing(tmp_path / "a") as f:
        f.write(b"a")
    assert done == ["fsync", "replace"] and (tmp_path / "a").read_bytes() == b"a"


def test_a_crash_before_the_last_rename_costs_no_download(server, tmp_path, monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(dl, "accept", stop)
        assert alpaca(tmp_path) == 130
    assert alpaca(tmp_path) == 0 and len(learned(tmp_path)) == 600
    assert len(server.ranges) == 1 and leftovers(tmp_path) == []


def test_the_manifest_guards_the_file(server, tmp_path, capsys):
    assert alpaca(tmp_path) == 0
    raw = tmp_path / "raw" / RAW
    raw.write_bytes(ALPACA[:-9])
    assert alpaca(tmp_path) == 0                         # damaged here: fetched once more
    assert raw.read_bytes() == ALPACA
    one_line(capsys, "damaged")
    raw.unlink()
    other = ALPACA.replace(b"Count", b"Shout")           # a mirror's idea of the same commit
    server.commits[server.main][f"/datasets/{get_alpaca.REPO}/{get_alpaca.FILE}"] = other
    assert alpaca(tmp_path) == 2
    one_line(capsys, server.url, "not the file of before", "manifest.json")
    assert not raw.exists() and leftovers(tmp_path) == []
    (tmp_path / "manifest.json").write_text("{", encoding="utf-8")
    assert alpaca(tmp_path) == 2
    one_line(capsys, "manifest.json is damaged", "remove it")


def test_files_of_earlier_versions_are_kept(server, tmp_path):
    """Their entries name no commit; a lost file is compared with the entry all the same."""
    assert alpaca(tmp_path) == 0
    entries = manifest(tmp_path)
    del entries[RAW]["commit"]
    (tmp_path / "manifest.json").write_text(json.dumps(entries), encoding="utf-8")
    server.requests.clear()
    assert alpaca(tmp_path) == 0 and server.requests == []
    (tmp_path / "raw" / RAW).unlink()
    assert alpaca(tmp_path) == 0 and manifest(tmp_path)[RAW]["commit"] == server.main


def test_files_on_disk_need_no_network(server, tmp_path, capsys):
    (tmp_path / get_alpaca.FILE).write_bytes(ALPACA)
    out = tmp_path / "out"
    assert alpaca(out, "--from", str(tmp_path)) == 0
    assert len(learned(out)) == 600 and server.requests == [] and not (out / "raw").exists()
    assert alpaca(out, "--from", str(tmp_path)) == 0
    assert alpaca(tmp_path / "raw's") == 0
    assert alpaca(tmp_path / "again", "--from", str(tmp_path / "raw's" / "raw")) == 0
    (tmp_path / get_alpaca.FILE).write_bytes(ALPACA.replace(b"Count", b"Sum"))
    assert alpaca(out, "--from", str(tmp_path)) == 2
    capsys.readouterr()
    assert alpaca(out, "--from", str(out)) == 2
    one_line(capsys, f"{get_alpaca.FILE} is not in", server.url)


# What a shell does before it starts a program; a background job may be deaf to Ctrl-C.
SHELL = """
import resource, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
size = {most_bytes} or resource.RLIM_INFINITY
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
sys.path.insert(0, {folder!r})
sys.argv = ["get_alpaca.py", "--to", {to!r}]
runpy.run_path({program!r}, run_name="__main__")
"""


def start(server, tmp_path, most_bytes=0):
    """get_alpaca.py as a process of its own, which takes the server from its environment."""
    code = SHELL.format(most_bytes=most_bytes, folder=str(ROOT / "data"), to=str(tmp_path),
                        program=str(ROOT / "data" / "get_alpaca.py"))
    environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_TOKEN": "hf_secret",
                   "HF_HOME": str(tmp_path / "home")}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, encoding="utf-8",
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


posix = pytest.mark.skipif(sys.platform == "win32", reason="signals and limits of POSIX")


@posix
@pytest.mark.parametrize("sent, status", [(signal.SIGINT, 130), (signal.SIGTERM, -15),
                                          (getattr(signal, "SIGKILL", 9), -9)])
def test_after_a_stopped_run_the_next_one_finishes(server, tmp_path, sent, status):
    server.moods = ["silent", "ok"]
    process = start(server, tmp_path)
    assert server.halfway.wait(PATIENCE)
    process.send_signal(sent)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status
    assert errors.count("\n") == (2 if sent == signal.SIGINT else 0), errors    # after "^C"
    assert ("the same command" in errors) == (sent == signal.SIGINT)
    assert not (tmp_path / "alpaca.json").exists() and not (tmp_path / "raw" / RAW).exists()
    assert sent != signal.SIGINT or leftovers(tmp_path) == []
    assert alpaca(tmp_path) == 0 and len(learned(tmp_path)) == 600


@posix
def test_a_full_disk_is_one_line_and_the_next_run_finishes(server, tmp_path):
    process = start(server, tmp_path, most_bytes=len(ALPACA) // 2)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and len(errors.splitlines()) == 1, errors
    assert "File too large" in errors and "--to" in errors
    assert leftovers(tmp_path) == []
    assert alpaca(tmp_path) == 0 and len(learned(tmp_path)) == 600


@posix
def test_the_token_is_for_the_hub_alone(server, tmp_path):
    process = start(server, tmp_path)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "600 examples" in output, errors
    keys = {(method, key) for (method, _), key in zip(server.requests, server.keys, strict=True)}
    assert keys == {("HEAD", "Bearer hf_secret"), ("GET", None)}


# ---- Usage ----
@pytest.mark.parametrize("module, args", [
    (get_web, ["--gb", "0"]), (get_web, ["--gb", "much"]), (get_web, ["--gb", "nan"]),
    (get_alpaca, ["--too", "x"]), (get_gutenberg, ["more"]), (get_gutenberg, ["--base-url"]),
    (get_preferences, ["--from"]), (prepare, ["--holdout", "0.9"])])
def test_wrong_usage_is_one_line(module, args, capsys):
    with pytest.raises(SystemExit) as e:
        dl.run(module.main, args)
    assert e.value.code == 2
    one_line(capsys, args[0], "--help")


@pytest.mark.parametrize("missing", ["duckdb", "huggingface_hub", "pooch", "tqdm"])
@pytest.mark.parametrize("name", few(sorted(
    p.stem for p in (ROOT / "data").glob("*.py")
    if not p.stem.startswith(("everyday", "books_"))), 2))
def test_without_the_extra(name, missing):
    """One line that says how to install it."""
    code = (f"import runpy, sys; sys.modules['{missing}'] = None; sys.path.insert(0, '.'); "
            f"sys.argv = ['{name}.py']; runpy.run_path(sys.argv[0], run_name='__main__')")
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "data", capture_output=True,
                            encoding="utf-8")
    complains(result, f"{name}.py: {missing} is not installed", "pip install -e .[data]")


def test_help_names_the_defaults():
    def words(name):
        return "".join(ok(nanoeuler("--help", program=f"data/{name}.py", cwd=ROOT)).split())

    assert get_gutenberg.BASE_URL in words("get_gutenberg")
    assert "HF_ENDPOINT" in words("get_web") and "default:1.0" in words("get_web")


# ---- Gutenberg ----
WORK = "CHAPTER I\n\nIt was a dark night, \u201csaid\u201d Zo\u00eb.\n\n" + "The rain fell. " * 90
NEW = ("The Project Gutenberg eBook of Rain\n\nTitle: Rain\n\nRelease date: May, 2008 [eBook #7]\n"
       "\n*** START OF THE PROJECT GUTENBERG EBOOK RAIN ***\n\n\n\n\nProduced by A Reader\n\n\n\n"
       "WORK\n\n\n*** END OF THE PROJECT GUTENBERG EBOOK RAIN ***\n\nFULL LICENSE\n")
MIDDLE = ("Release Date: May, 2001 [EBook #7]\n\n***START OF THIS PROJECT GUTENBERG EBOOK THE "
          "LONG AND\nRAINY NIGHT***\n\n\nE-text prepared by Someone\n\n\nWORK\n\nEnd of Project "
          "Gutenberg's Rain, by A. Reader\n\n***END OF THIS PROJECT GUTENBERG EBOOK RAIN***\n")
OLD = ("**The Project Gutenberg Etext of Rain**\n\nMay, 1994 [Etext #7]\n\n***START**THE SMALL "
       "PRINT!**FOR PUBLIC DOMAIN ETEXTS**START***\nlawyers\n*END*THE SMALL PRINT! FOR PUBLIC "
       "DOMAIN ETEXTS*Ver.04.29.93*END*\n\n\nWORK\n\n\nEnd of The Project Gutenberg Etext\n")
BOTH = NEW.replace("Produced by A Reader", "lawyers\n*END*THE SMALL PRINT! FOR ETEXTS*END*")
forms = pytest.mark.parametrize("form", [NEW, MIDDLE, OLD, BOTH], ids="new middle old both".split())


@forms
@pytest.mark.parametrize("line", ["\n", "\r\n"], ids=["unix", "dos"])
def test_the_markers_of_every_age(form, line):
    work, header = get_gutenberg.work_and_header(form.replace("WORK", WORK).replace("\n", line))
    assert work == WORK.strip() and "#7]" in header


@forms
def test_a_missing_marker_is_said(form):
    head, _, tail = form.partition("WORK")
    for text, word in ((head + WORK, "END"), (WORK + tail, "START")):
        with pytest.raises(ValueError, match=word):
            get_gutenberg.work_and_header(text)


def test_a_marker_that_the_work_quotes_is_part_of_it():
    work = WORK.strip() + "\nrain" * 5000 + "\n\n*END*THE SMALL PRINT!*END*\n\nThe end."
    assert get_gutenberg.work_and_header(NEW.replace("WORK", work))[0] == work


def gutenberg(server, tmp_path, *args):
    return dl.run(get_gutenberg.main, ["--base-url", server.url, "--to", str(tmp_path), *args])


@pytest.fixture
def shelf(server, monkeypatch):
    """Three books of three ages, in three encodings."""
    monkeypatch.setattr(get_gutenberg, "BOOKS", {7: "Rain", 8: "More Rain", 9: "Sun"})
    for n, form, code in ((7, NEW, "utf-8-sig"), (8, MIDDLE, "cp1252"), (9, OLD, "utf-8")):
        text = form.replace("WORK", WORK + str(n)).replace("#7]", f"#{n}]")
        server.files[f"/{n}/pg{n}.txt"] = text.replace("\n", "\r\n").encode(code)
    return server


def test_books_are_joined_in_utf8(shelf, tmp_path, capsys, monkeypatch):
    sleep, pauses = time.sleep, []
    monkeypatch.setattr(get_gutenberg, "PAUSE", 1 / 1024)
    monkeypatch.setattr(time, "sleep", lambda s: pauses.append(s) if s == 1 / 1024 else sleep(s))
    assert gutenberg(shelf, tmp_path) == 0 and len(pauses) == 3
    text = (tmp_path / "gutenberg.txt").read_text(encoding="utf-8")
    assert text == "\n\n\n".join(WORK + str(n) for n in (7, 8, 9)) + "\n"
    assert "3 books" in capsys.readouterr().out
    count = len(shelf.ranges)
    assert gutenberg(shelf, tmp_path) == 0 and len(shelf.ranges) == count == 3
    assert len(pauses) == 3                  # not for books that are here


@pytest.mark.parametrize("moods", ["drop ok", "503 503 ok", "429 ok", "gzip", "lie ok",
                                   "nolength", "drop 500 drop ok"])
def test_books_from_a_bad_server(shelf, tmp_path, moods):
    shelf.moods = moods.split()
    assert gutenberg(shelf, tmp_path) == 0
    text = (tmp_path / "gutenberg.txt").read_text(encoding="utf-8")
    assert text == "\n\n\n".join(WORK + str(n) for n in (7, 8, 9)) + "\n"
    assert len(shelf.ranges) == 2 + len(moods.split()) and leftovers(tmp_path) == []


@pytest.mark.parametrize("moods, words", [
    ("503", ["503"]), ("wrong", ["no START marker"]), ("nolength+drop", ["no END marker"]),
    ("drop", ["/7/pg7.txt"])])
def test_a_hopeless_shelf_is_one_line_and_the_next_run_finishes(shelf, tmp_path, capsys, moods,
                                                                words):
    shelf.moods = [moods]
    assert gutenberg(shelf, tmp_path) == 2
    one_line(capsys, "get_gutenberg.py: 0 of 3 books are here", shelf.url, *words)
    assert leftovers(tmp_path) == [] and not (tmp_path / "gutenberg.txt").exists()
    shelf.moods = ["ok"]
    assert gutenberg(shelf, tmp_path) == 0


def test_no_shelf(shelf, tmp_path, capsys, waits):
    shelf.shutdown()
    shelf.server_close()
    assert gutenberg(shelf, tmp_path) == 2
    one_line(capsys, shelf.url, "Connection refused", "--base-url")
    assert waits == 3 * [1, 2, 3]            # three books, then it gives up


def test_a_book_that_has_changed_is_not_taken_silently(shelf, tmp_path, capsys):
    assert gutenberg(shelf, tmp_path) == 0
    raw = tmp_path / "raw" / "gutenberg" / "pg8.txt"
    raw.write_bytes(raw.read_bytes()[:-9])
    assert gutenberg(shelf, tmp_path) == 0               # damaged here: fetched once more
    one_line(capsys, "pg8.txt is damaged")
    raw.unlink()
    shelf.files["/8/pg8.txt"] = shelf.files["/8/pg8.txt"].replace(b"night", b"knight")
    assert gutenberg(shelf, tmp_path) == 2
    one_line(capsys, f"{shelf.url}/8/pg8.txt", "does not match", "manifest.json")
    assert not raw.exists() and leftovers(tmp_path) == []
    entries = manifest(tmp_path)
    del entries["gutenberg/pg8.txt"]
    (tmp_path / "manifest.json").write_text(json.dumps(entries), encoding="utf-8")
    assert gutenberg(shelf, tmp_path) == 0 and b"knight" in raw.read_bytes()


def test_a_missing_or_wrong_book(shelf, tmp_path, capsys):
    """The others are fetched first, then one line; the next run has one book to fetch."""
    book = shelf.files.pop("/8/pg8.txt")
    assert gutenberg(shelf, tmp_path) == 2
    one_line(capsys, f"{shelf.url}/8/pg8.txt", "404", "2 of 3 books", "--base-url")
    shelf.files["/8/pg8.txt"] = shelf.files["/7/pg7.txt"]
    assert gutenberg(shelf, tmp_path) == 2
    one_line(capsys, "it is book 7, expected 8")
    shelf.files["/8/pg8.txt"] = book[:len(book) // 2]
    assert gutenberg(shelf, tmp_path) == 2
    one_line(capsys, "no END marker")
    assert not (tmp_path / "gutenberg.txt").exists()
    shelf.files["/8/pg8.txt"] = book
    shelf.ranges.clear()
    assert gutenberg(shelf, tmp_path) == 0 and len(shelf.ranges) == 1


def test_books_that_are_no_works(shelf, tmp_path, capsys):
    """Hardly a text between the markers; after three bad books no more are asked for."""
    for n in (7, 8, 9):
        shelf.files[f"/{n}/pg{n}.txt"] = NEW.replace("WORK", "Rain.").encode()
    get_gutenberg.BOOKS[10] = "The Sun Also Sets"
    assert gutenberg(shelf, tmp_path) == 2
    one_line(capsys, "0 of 4 books", "5 characters between the markers")
    assert len(shelf.ranges) == 3


def test_the_shelf():
    assert 90 <= len(get_gutenberg.BOOKS) <= 100
    assert len(set(get_gutenberg.BOOKS.values())) == len(get_gutenberg.BOOKS)


# ---- Parquet ----
def write_parquet(path, query):
    path.parent.mkdir(exist_ok=True, parents=True)
    with duckdb.connect() as db:
        db.execute(f"copy ({query}) to '{path}' (format parquet, row_group_size 2048)")
    return path.read_bytes()


@pytest.fixture
def web(server, tmp_path):
    """Two files of 3,000 pages; every tenth has trailing blanks, DOS lines, a hole."""
    for k in range(2):
        data = write_parquet(
            tmp_path / "source" / f"00{k}_00000.parquet",
            f"select i as id, case when i % 10 = 0 then 'page {k}-' || i || '  \r\n\n\n\nend \n' "
            f"when i = 1 then null else 'page {k}-' || i end as text from range(3000) t(i)")
        server.publish(get_web.REPO, **{f"sample/10BT/00{k}_00000.parquet": data})
    return server


def pages(k):
    return [f"page {k}-{i}" + "\n\nend" * (i % 10 == 0) for i in range(3000) if i != 1]


def web_text(tmp_path, gb, *args):
    return dl.run(get_web.main, ["--to", str(tmp_path), "--gb", str(gb), *args])


def test_web_takes_a_slice(web, tmp_path):
    web.moods = ["drop", "drop", "ok"]
    assert web_text(tmp_path, 2e-5) == 0
    text = (tmp_path / "web.txt").read_text(encoding="utf-8")
    assert 20_000 <= len(text) < 20_100
    found = text.removesuffix("\n").split("\n\n\n")
    assert found == pages(0)[:len(found)]
    assert not (tmp_path / "raw" / "web" / "001_00000.parquet").exists()
    size = len("\n\n\n".join(pages(0)))
    assert web_text(tmp_path, size / 1e9) == 0
    text = (tmp_path / "web.txt").read_text(encoding="utf-8")
    assert text == "\n\n\n".join(pages(0)) + "\n"
    size += 1                                # a byte more: the second file is needed
    assert web_text(tmp_path, size / 1e9) == 0
    text = (tmp_path / "web.txt").read_text(encoding="utf-8")
    assert text == "\n\n\n".join(pages(0) + pages(1)[:1]) + "\n"


def test_web_says_when_there_is_no_more(web, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(get_web, "FILES", get_web.FILES[:2])
    for gb, more in ((2e-5, True), (1, False)):
        assert web_text(tmp_path, gb) == 0
        assert ("all there is" in capsys.readouterr().out) != more
    text = (tmp_path / "web.txt").read_text(encoding="utf-8")
    assert text == "\n\n\n".join(pages(0) + pages(1)) + "\n"


def test_web_from_disk_and_a_damaged_file(web, tmp_path, capsys):
    out, source = tmp_path / "out", tmp_path / "source"
    assert web_text(out, 2e-5, "--from", str(source)) == 0 and web.requests == []
    whole = (source / "000_00000.parquet").read_bytes()
    for damaged in (b"", b"<html>", whole[:-100]):
        (source / "000_00000.parquet").write_bytes(damaged)
        capsys.readouterr()
        assert web_text(tmp_path / "other", 2e-5, "--from", str(source)) == 2
        one_line(capsys, "000_00000.parquet is not what it should be", "--from")
    write_parquet(source / "000_00000.parquet", "select 1 as other")
    assert web_text(tmp_path / "other", 2e-5, "--from", str(source)) == 2
    one_line(capsys, "text")


def test_preferences(server, tmp_path, capsys):
    say = ("[{{'content': 'Hello', 'role': 'user'}}, {{'content': 'Hi', 'role': 'assistant'}}, "
           "{{'content': p, 'role': 'user'}}, {{'content': {}, 'role': 'assistant'}}]").format
    data = write_parquet(
        tmp_path / "x.parquet",
        f"select p as prompt, {say('a')} as chosen, {say('b')} as rejected from (values "
        f"('Say A', 'A', 'B'), ('Say A', 'A', 'B'), ('Same', 'C', 'C'), ('', 'A', 'B'), "
        f"('Zo\u00eb?', ' Yes ', 'No'), (null, 'A', 'B')) t(p, a, b)")
    server.publish(get_preferences.REPO, **{f"data/{get_preferences.FILE}": data})
    assert dl.run(get_preferences.main, ["--to", str(tmp_path)]) == 0
    lines = (tmp_path / "preferences.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(s) for s in lines] == [
        {"instruction": "Say A", "input": "", "chosen": "A", "rejected": "B"},
        {"instruction": "Zo\u00eb?", "input": "", "chosen": "Yes", "rejected": "No"}]


def test_alpaca_drops_what_cannot_be_learned(server, tmp_path, capsys):
    good = {"instruction": "Name a colour.", "input": "", "output": "Red"}
    server.publish(get_alpaca.REPO, **{get_alpaca.FILE: json.dumps([
        good, good, {**good, "output": ""}, {**good, "instruction": None},
        {**good, "output": "\ud83d"}, "no example",
        {"instruction": "Zo\u00eb?", "output": "Yes"}]).encode()})
    assert alpaca(tmp_path) == 0
    assert learned(tmp_path) == [good, {"instruction": "Zo\u00eb?", "input": "", "output": "Yes"}]
    examples, _ = read_examples(str(tmp_path / "alpaca.json"), "output")
    assert examples == learned(tmp_path)


# ---- prepare.py ----
def prose(seed, n=900):
    words = TEXT.read_bytes()[:400_000].decode().split()
    start = random.Random(seed).randrange(len(words) - n)
    return f"Document {seed}. " + " ".join(words[start:start + n])


def make(folder, name, documents):
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"\n\n\n".join(
        d if isinstance(d, bytes) else d.encode() for d in documents) + b"\n")


def prepared(folder, *args):
    assert dl.run(prepare.main, ["--to", str(folder), *map(str, args)]) == 0
    return (folder / "pretrain.txt").read_bytes()


def documents(text):
    return bytes(text).decode().strip("\n").split("\n\n\n")


def flag(capsys):
    """The --holdout that was printed."""
    return float(capsys.readouterr().out.split("--holdout ")[1])


@pytest.mark.parametrize("text, prose", [
    ("word " * 200, True), ("word " * 199 + "wor\1 ", True), ("word " * 199 + "wo\1\1 ", False),
    ("a1 " * 99, True), ("a1b2 3c " * 99 + "1", False), ("", False),
    (("a" * 19 + " ") * 99, True), (("a" * 20 + " ") * 99, False)])
def test_prose_by_hand(text, prose):
    """One control character in 1,000, half letters, a blank in 20, and no more or less."""
    assert prepare.is_text(text) == prose


def test_two_blank_lines_may_hold_blanks():
    text = b"a\n\nb\r\n\r\n \t\r\n  c\n \n\n\n\nd"
    found = [text[start:end].strip() for start, end in prepare.spans(text)]
    assert found == [b"a\n\nb", b"c", b"d"]


def test_junk_and_duplicates_are_dropped(tmp_path, capsys):
    noise, prose_b = random.Random(1).randbytes(4000), prose(2).encode()
    again = prose(0).upper().replace(" ", "\n")
    make(tmp_path, "gutenberg.txt", [prose(0), prose(1), again, noise])
    make(tmp_path, "web.txt", [
        prose(1), "\u00fc" * 3000, "0123 4567 " * 300, "A" * 5000, prose_b + b" caf\xe9 \x93so\x94",
        prose(3) + "\ufffd" * 99, "", prose(4) + "  \r\nA last line.", prose(5) + "\0 and on."])
    text = prepared(tmp_path, "--holdout", "0.3")
    assert sorted(documents(text)) == sorted([
        prose(0), prose(1), prose(2) + " caf\u00e9 \u201cso\u201d", prose(4) + "\nA last line."])
    out = capsys.readouterr().out
    assert "dropped 2 duplicates" in out and "from gutenberg.txt, web.txt" in out


def test_the_split_is_between_documents_and_stays(tmp_path, capsys):
    make(tmp_path, "web.txt", [prose(i) for i in range(150)])
    text = prepared(tmp_path, "--holdout", "0.1")
    train, val = map(documents, split_text(text, flag(capsys)))
    assert sorted(train + val) == sorted(prose(i) for i in range(150))
    assert 5 < len(val) < 30
    assert text == prepared(tmp_path, "--holdout", "0.1")
    capsys.readouterr()
    make(tmp_path, "gutenberg.txt", [prose(i) for i in range(150, 300)])
    text = prepared(tmp_path, "--holdout", "0.1")
    train_2, val_2 = map(documents, split_text(text, flag(capsys)))
    assert set(train) < set(train_2) and set(val) < set(val_2)
    assert train_2 != sorted(train_2)                    # shuffled


def test_every_gap_has_its_holdout():
    rng = random.Random(1)
    for _ in range(2000):
        size = int(10 ** rng.uniform(3, 11))
        start = int(size * rng.uniform(0.2, 0.999))
        text = prepare.share(size, (start, start + 3))
        assert start <= int(size * (1 - float(text))) <= start + 3
        assert 0.0001 <= float(text) <= 0.9


def test_the_command_that_is_printed_learns_the_text(tmp_path, capsys):
    """The run takes the text and the --holdout, which cuts between two documents."""
    make(tmp_path, "web.txt", [prose(i, 600) for i in range(30)])
    text = prepared(tmp_path, "--holdout", "0.1")
    python, *words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    program, verb, preset, *flags = words
    assert [python, program, verb, preset] == ["python", "nanoeuler.py", "train", "base"]
    out = ok(nanoeuler(verb, *flags, *FAST, "--steps", "1", cwd=tmp_path))
    assert f"{tmp_path / 'pretrain.txt'}, {len(text):,} bytes" in out
    holdout = ne.read_checkpoint(str(tmp_path / "nanoeuler.bin")).state.options["holdout"]
    train, val = map(documents, split_text(text, holdout))
    assert sorted(train + val) == sorted(prose(i, 600) for i in range(30))


def test_one_document_at_least_is_to_validate_on(tmp_path, capsys):
    make(tmp_path, "web.txt", [prose(1), prose(2)])
    text = prepared(tmp_path, "--holdout", "0.0002")
    assert [len(documents(part)) for part in split_text(text, flag(capsys))] == [1, 1]


def test_prepare_replaces_nothing_that_it_reads(tmp_path, capsys, monkeypatch):
    make(tmp_path, "web.txt", [prose(i) for i in range(9)])
    before = (tmp_path / "web.txt").read_bytes()
    monkeypatch.chdir(tmp_path)
    for argv in (["--to", str(tmp_path)], ["--to", str(tmp_path), "web.txt"], ["--to", "."]):
        assert dl.run(prepare.main, [*argv, "--out", "web.txt"]) == 2
        one_line(capsys, "web.txt would replace what it is made of", "--out")
    assert (tmp_path / "web.txt").read_bytes() == before


def test_prepare_replaces_only_its_own_file_unasked(tmp_path, capsys):
    make(tmp_path, "web.txt", [prose(i) for i in range(9)])
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    start = ["--to", str(tmp_path), "--holdout", "0.3"]
    assert dl.run(prepare.main, [*start, "--out", "notes.txt"]) == 2
    one_line(capsys, "notes.txt exists", "--out", "--force")
    assert (tmp_path / "notes.txt").read_text("utf-8") == "mine"
    for more in ([], [], ["--out", "notes.txt", "--force"]):
        assert dl.run(prepare.main, [*start, *more]) == 0
    assert (tmp_path / "notes.txt").read_bytes() == (tmp_path / "pretrain.txt").read_bytes()


def test_prepare_says_what_is_missing(tmp_path, capsys):
    for argv, words in (
            ([], ["get_gutenberg.py", "get_web.py"]), (["nowhere.txt"], ["nowhere.txt"])):
        assert dl.run(prepare.main, ["--to", str(tmp_path), *argv]) == 2
        one_line(capsys, "prepare.py", *words)
    for path in (tmp_path / "nowhere.txt", tmp_path):    # --to is no remedy
        assert dl.run(prepare.main, ["--to", str(tmp_path), str(path)]) == 2
        one_line(capsys, f"prepare.py: {path}: ", "name texts that can be read")
    make(tmp_path, "web.txt", [prose(1)])
    assert dl.run(prepare.main, ["--to", str(tmp_path)]) == 2
    one_line(capsys, "too few to split")
    make(tmp_path, "web.txt", [prose(1), prose(2, 20_000)])
    (tmp_path / "gutenberg.txt").write_bytes(b"")
    assert dl.run(prepare.main, ["--to", str(tmp_path)]) == 2
    one_line(capsys, "gutenberg.txt is empty")


# ---- What ships ----
def test_the_preference_sample():
    """Pairs about the questions of instructions.json: both are held out by the same hash."""
    questions = {(e["instruction"], e["input"]) for e in read_examples(
        str(ROOT / "data" / "instructions.json"), "output")[0]}
    lines = (ROOT / "data" / "preferences_sample.jsonl").read_text(encoding="utf-8").splitlines()
    pairs = [json.loads(s) for s in lines]
    assert len(pairs) == len(set(lines)) == 4000
    assert {e["source"] for e in pairs} == {"wordnet", "skill", "factbook", "shakespeare", "stdlib"}
    for e in pairs:
        assert (e["instruction"], e["input"]) in questions
        assert e["chosen"] != e["rejected"] and e["chosen"] and e["rejected"]
    assert sum(map(held_out, pairs)) == 85


def test_the_full_sets_hold_the_samples_and_are_small():
    data = ROOT / "data"
    asked, digest = read_examples(data / "instruct_open.json.xz", "output")
    pairs, digest_of_pairs = read_examples(data / "prefs_open.jsonl.xz", "chosen", "rejected")
    assert sum(path.stat().st_size for path in data.glob("*.xz")) < 4e6
    readme = (data / "README.md").read_text(encoding="utf-8")
    assert digest in readme and digest_of_pairs in readme
    answers = {(e["instruction"], e["input"]): e["output"] for e in asked}
    assert len(answers) == len(asked) == 16_884 and len(pairs) == 15_803
    for e in read_examples(data / "instructions.json", "output")[0]:
        assert answers[e["instruction"], e["input"]] == e["output"]
    for e in pairs:
        assert answers[e["instruction"], e["input"]] == e["chosen"] != e["rejected"]
    whole = {json.dumps(e, sort_keys=True) for e in pairs}
    sample, _ = read_examples(data / "preferences_sample.jsonl", "chosen", "rejected")
    assert whole.issuperset(json.dumps(e, sort_keys=True) for e in sample)
