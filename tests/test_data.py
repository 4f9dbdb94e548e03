"""The data scripts against a server on this machine that is slow, busy, broken or wrong."""
import gzip
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from conftest import ROOT, TEXT, command, complains, nanoeuler, needs

for package in ("duckdb", "requests", "tqdm"):
    needs(package)

sys.path.insert(0, str(ROOT / "data"))
import download as dl
import duckdb
import get_alpaca
import get_gutenberg
import get_preferences
import get_web
import nanoeuler as ne
import prepare
from data import texts

ALPACA = json.dumps([{"instruction": f"Count to {i}.", "input": "", "output": "1 " * (i + 1)}
                     for i in range(600)]).encode()
assert len(ALPACA) > 5 * dl.PIECE


class Server(ThreadingHTTPServer):
    """`files` by path; `moods` are spent one a request, the last stays for all that follow."""
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.moods, self.ranges = {}, ["ok"], []
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, request, address):
        """A client that hangs up is part of the tests."""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        mood = server.moods.pop(0) if len(server.moods) > 1 else server.moods[0]
        server.ranges.append(self.headers.get("Range"))
        if self.path.startswith("/moved"):   # as Hugging Face does it, which promises a sha256
            self.send_response(302)
            self.send_header("X-Linked-Etag", '"' + "0" * 64 + '"')
            self.send_header("Location", self.path.removeprefix("/moved"))
            self.send_header("Content-Length", "0")
            return self.end_headers()
        data = server.files.get(self.path)
        if mood.isdigit() or data is None:
            self.send_response(int(mood) if mood.isdigit() else 404)
            if mood == "429":
                self.send_header("Retry-After", "1")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        if "wrong" in mood:
            data = b"<html>Please log in to this network</html>" * 3000
        tag = f'"{hashlib.sha256(data).hexdigest()[:8]}"'
        asked = self.headers.get("Range") if "norange" not in mood else None
        if self.headers.get("If-Range", tag) != tag:
            asked = None
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if start >= len(data):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(data)}")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        if "shifted" in mood and asked:      # a proxy that answers with another range
            start -= 1
        self.send_response(206 if asked else 200)
        if "gzip" in mood:                   # whatever the client accepts
            data = gzip.compress(data)
            self.send_header("Content-Encoding", "gzip")
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        if "notag" not in mood:
            self.send_header("ETag", f"W/{tag}" if "weak" in mood else tag)
            self.send_header("Last-Modified", "Sat, 01 Jan 2022 00:00:00 GMT")
        if "promise" in mood:
            self.send_header("X-Linked-Etag", '"' + "0" * 64 + '"')
        if "nolength" not in mood:
            self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        data = data[start:]
        if "drop" in mood:                   # rudely, in the middle
            self.wfile.write(data[:len(data) // 2])
            self.close_connection = True
        elif "slow" in mood:
            for i in range(0, len(data), 1 << 14):
                self.wfile.write(data[i:i + (1 << 14)])
                time.sleep(0.02)
        else:
            self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(dl, "BACKOFF", 0.01)
    monkeypatch.setattr(dl, "TIMEOUT", (2, 2))
    monkeypatch.setattr(get_gutenberg, "PAUSE", 0)
    with Server() as server:
        server.files["/alpaca_data_cleaned.json"] = ALPACA
        yield server
        server.shutdown()


def alpaca(server, tmp_path, *args):
    return dl.run(get_alpaca.main, ["--base-url", server.url, "--to", str(tmp_path), *args])


def learned(tmp_path):
    return json.loads((tmp_path / "alpaca.json").read_text(encoding="utf-8"))


def one_line(capsys, *words):
    """Everything on stderr: one line that holds the words."""
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    for word in words:
        assert str(word) in lines[0], lines[0]


def leftovers(tmp_path):
    return [p.name for p in tmp_path.rglob("*") if p.suffix in (".part", ".tmp")
            or p.name.endswith(".part.json")]


# ---- Downloads ----
@pytest.mark.parametrize("moods", [
    "ok", "slow", "drop drop ok", "drop drop drop drop drop drop drop ok", "429 ok", "503 503 ok",
    "drop 503 drop ok", "norange+drop norange", "notag+drop notag", "drop norange+drop ok",
    "drop shifted ok", "drop wrong ok ok", "nolength", "wrong+drop ok", "norange+gzip",
    "408 500 502 504 ok"])
def test_a_bad_server_gives_the_right_bytes(server, tmp_path, moods):
    server.moods = moods.split()
    began = time.perf_counter()
    status = alpaca(server, tmp_path)
    if "wrong ok" in moods:                  # another file: refused, right on the second run
        assert status == 2
        status = alpaca(server, tmp_path)
    assert status == 0
    assert learned(tmp_path) == [{k: v.strip() for k, v in e.items()} for e in json.loads(ALPACA)]
    assert "429" not in moods or time.perf_counter() - began > 1     # as long as it was asked
    raw = tmp_path / "raw" / "alpaca" / "alpaca_data_cleaned.json"
    entry = json.loads((tmp_path / "manifest.json").read_text(encoding="utf-8"))[
        "alpaca/alpaca_data_cleaned.json"]
    assert raw.read_bytes() == ALPACA
    assert entry["url"] == server.url + "/alpaca_data_cleaned.json"
    assert (entry["bytes"], entry["sha256"]) == (len(ALPACA), hashlib.sha256(ALPACA).hexdigest())
    assert leftovers(tmp_path) == []
    server.ranges.clear()
    assert alpaca(server, tmp_path) == 0 and server.ranges == []     # verified, not fetched


@pytest.mark.parametrize("moods, words", [
    ("404", ["404", "top of the script"]), ("503", ["503"]), ("wrong", ["not what it should be"]),
    ("norange+drop", ["at byte"]), ("nolength+drop", ["not what it should be"]),
    ("promise", ["promised"]), ("drop wrong", ["not what it should be"])])
def test_a_hopeless_server_is_one_line_and_the_next_run_finishes(server, tmp_path, capsys, moods,
                                                                 words):
    server.moods = moods.split()
    assert alpaca(server, tmp_path) == 2
    one_line(capsys, f"get_alpaca.py: {server.url}/alpaca_data_cleaned.json", *words)
    assert not (tmp_path / "alpaca.json").exists()
    assert not (tmp_path / "manifest.json").exists()
    server.moods = ["ok"]
    assert alpaca(server, tmp_path) == 0 and len(learned(tmp_path)) == 600


def test_no_server(server, tmp_path, capsys):
    server.shutdown()
    server.server_close()
    assert alpaca(server, tmp_path) == 2
    one_line(capsys, server.url, "Connection refused", "--base-url")


def test_a_silent_server_is_not_waited_for(server, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(dl, "TIMEOUT", (0.2, 0.2))
    monkeypatch.setattr(dl, "TRIES", 2)
    monkeypatch.setattr(Handler, "do_GET", lambda self: time.sleep(1))
    assert alpaca(server, tmp_path) == 2
    one_line(capsys, server.url, "timed out", "--base-url")


def test_a_long_retry_after_is_cut(server):
    class Answer:
        headers = {"Retry-After": "86400"}
    assert dl.Patient(1).get_retry_after(Answer) == dl.LONGEST_WAIT


def test_the_second_run_asks_for_the_rest(server, tmp_path, capsys):
    server.moods = ["drop", "503"]
    assert alpaca(server, tmp_path) == 2
    part = next((tmp_path / "raw").rglob("*.part"))
    have = part.stat().st_size
    assert part.read_bytes() == ALPACA[:have] and have > len(ALPACA) // 3
    server.ranges.clear()
    server.moods = ["ok"]
    assert alpaca(server, tmp_path) == 0
    assert server.ranges == [f"bytes={have}-"]


def test_halves_of_two_files_are_not_joined(server, tmp_path):
    """The file changes between two runs, and the server has no tags to tell."""
    server.moods = ["notag+drop", "503"]
    assert alpaca(server, tmp_path) == 2
    server.moods = ["notag"]
    server.files["/alpaca_data_cleaned.json"] = other = ALPACA.replace(b"Count", b"Sum")
    assert alpaca(server, tmp_path) == 0
    assert next((tmp_path / "raw").rglob("*.json")).read_bytes() == other


@pytest.mark.parametrize("mood, place", [("drop", ""), ("notag+drop", "/mirror")])
def test_halves_of_two_files_of_one_size_are_not_joined(server, tmp_path, mood, place):
    """The tag tells that the file has changed, the address that it may be another."""
    server.moods = [mood, "503"]
    assert alpaca(server, tmp_path) == 2
    server.moods = [mood.replace("drop", "ok")]
    other = server.files[f"{place}/alpaca_data_cleaned.json"] = ALPACA.replace(b"Count", b"Shout")
    assert alpaca(server, tmp_path, "--base-url", server.url + place) == 0
    assert next((tmp_path / "raw").rglob("*.json")).read_bytes() == other


def test_a_stop_before_the_first_byte_of_another_file(server, tmp_path, monkeypatch):
    """What is kept of the old file goes before the tag of the new one comes."""
    def stop(*args):
        raise KeyboardInterrupt

    server.moods = ["drop", "503"]
    assert alpaca(server, tmp_path) == 2
    server.moods = ["ok"]
    other = server.files["/alpaca_data_cleaned.json"] = ALPACA.replace(b"Count", b"Shout")
    with monkeypatch.context() as patch:
        patch.setattr(dl.Download, "receive", stop)
        assert alpaca(server, tmp_path) == 130
    assert alpaca(server, tmp_path) == 0
    assert next((tmp_path / "raw").rglob("*.json")).read_bytes() == other


def test_a_weak_tag_is_no_validator(server, tmp_path):
    """RFC 9110, 13.1.5: If-Range takes a strong one or a date."""
    server.moods = ["weak+drop", "503"]
    assert alpaca(server, tmp_path) == 2
    about = json.loads(next(tmp_path.rglob("*.part.json")).read_text(encoding="utf-8"))
    assert about["validator"] == "Sat, 01 Jan 2022 00:00:00 GMT"


def test_a_file_takes_its_name_when_it_is_on_the_disk(tmp_path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, lambda *args, name=name, call=getattr(os, name): (
            done.append(name), call(*args)))
    with dl.replacing(tmp_path / "a") as f:
        f.write(b"a")
    assert done == ["fsync", "replace"] and (tmp_path / "a").read_bytes() == b"a"


def test_a_file_that_is_shorter_now_is_fetched_anew(server, tmp_path):
    server.moods = ["notag+drop", "503"]
    assert alpaca(server, tmp_path) == 2
    server.moods = ["notag"]
    server.files["/alpaca_data_cleaned.json"] = json.dumps(json.loads(ALPACA)[:9]).encode()
    assert alpaca(server, tmp_path) == 0 and len(learned(tmp_path)) == 9


def test_a_wrong_file_of_the_right_size_is_not_kept(server, tmp_path):
    server.moods = ["notag"]
    server.files["/alpaca_data_cleaned.json"] = bytes(len(ALPACA))
    assert alpaca(server, tmp_path) == 2
    server.files["/alpaca_data_cleaned.json"] = ALPACA
    assert alpaca(server, tmp_path) == 0 and len(learned(tmp_path)) == 600


def test_a_promise_made_where_the_file_was_before(server, tmp_path, capsys):
    assert alpaca(server, tmp_path, "--base-url", server.url + "/moved") == 2
    one_line(capsys, "promised 000000000000")


def test_an_end_that_no_library_reports(server, tmp_path, monkeypatch):
    """Old urllib3 takes a short body for a whole one."""
    pieces, calls = dl.requests.Response.iter_content, []

    def short(self, size):
        calls.append(1)
        yield from list(pieces(self, size))[:2 if len(calls) == 1 else None]

    monkeypatch.setattr(dl.requests.Response, "iter_content", short)
    assert alpaca(server, tmp_path) == 0 and len(learned(tmp_path)) == 600
    assert server.ranges == [None, f"bytes={2 * dl.PIECE}-"]


def test_a_crash_before_the_last_rename_costs_no_download(server, tmp_path):
    url = server.url + "/alpaca_data_cleaned.json"
    download = dl.Download(url, tmp_path / "raw" / "alpaca" / "alpaca_data_cleaned.json")
    download.run()
    dl.record(tmp_path, "alpaca/alpaca_data_cleaned.json", url, download.part,
              dl.sha256_of(download.part))
    server.ranges.clear()
    assert alpaca(server, tmp_path) == 0 and len(learned(tmp_path)) == 600
    assert server.ranges == [f"bytes={len(ALPACA)}-"]    # answered by 416


def test_the_manifest_guards_the_file(server, tmp_path, capsys):
    assert alpaca(server, tmp_path) == 0
    raw = next((tmp_path / "raw").rglob("*.json"))
    raw.write_bytes(ALPACA[:-9])
    assert alpaca(server, tmp_path) == 0                 # damaged here: fetched once more
    assert raw.read_bytes() == ALPACA
    one_line(capsys, "damaged")
    raw.unlink()
    server.files["/alpaca_data_cleaned.json"] = ALPACA.replace(b"Count", b"Sum")
    assert alpaca(server, tmp_path) == 2                 # changed there: not taken silently
    one_line(capsys, server.url, "not the file of before", "manifest.json")
    (tmp_path / "manifest.json").write_text("{", encoding="utf-8")
    assert alpaca(server, tmp_path) == 2
    one_line(capsys, "manifest.json is damaged", "remove it")


def test_files_on_disk_need_no_network(server, tmp_path, capsys):
    (tmp_path / "alpaca_data_cleaned.json").write_bytes(ALPACA)
    out = tmp_path / "out"
    assert alpaca(server, out, "--from", str(tmp_path)) == 0
    assert len(learned(out)) == 600 and server.ranges == [] and not (out / "raw").exists()
    assert alpaca(server, out, "--from", str(tmp_path)) == 0
    assert alpaca(server, tmp_path / "raw's", "--base-url", server.url) == 0
    assert alpaca(server, tmp_path / "again", "--from", str(tmp_path / "raw's" / "raw")) == 0
    (tmp_path / "alpaca_data_cleaned.json").write_bytes(ALPACA.replace(b"Count", b"Sum"))
    assert alpaca(server, out, "--from", str(tmp_path)) == 2
    capsys.readouterr()
    assert alpaca(server, out, "--from", str(out)) == 2
    one_line(capsys, "alpaca_data_cleaned.json is not in", server.url)


def start(server, tmp_path, before):
    """get_alpaca.py as a process of its own that calls before() first."""
    return subprocess.Popen(command("--base-url", server.url, "--to", tmp_path,
                                    program="data/get_alpaca.py"),
                            stderr=subprocess.PIPE, encoding="utf-8", preexec_fn=before)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("sent, status", [(signal.SIGINT, 130), (signal.SIGTERM, -15),
                                          (getattr(signal, "SIGKILL", 9), -9)])
def test_a_stopped_run_leaves_what_the_next_one_needs(server, tmp_path, sent, status):
    server.moods = ["slow"]
    process = start(server, tmp_path,        # a background job may be deaf to Ctrl-C
                    lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    part = tmp_path / "raw" / "alpaca" / "alpaca_data_cleaned.json.part"
    until = time.monotonic() + 20
    while not (part.exists() and part.stat().st_size) and time.monotonic() < until:
        time.sleep(0.005)
    process.send_signal(sent)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == status
    assert ("the same command goes on" in errors) == (sent == signal.SIGINT)
    assert "Traceback" not in errors and not (tmp_path / "alpaca.json").exists()
    have = part.stat().st_size
    assert 0 < have < len(ALPACA) and part.read_bytes() == ALPACA[:have]
    assert alpaca(server, tmp_path) == 0 and len(learned(tmp_path)) == 600
    assert server.ranges[1:] == [f"bytes={have}-"]


@pytest.mark.skipif(sys.platform == "win32", reason="limits of POSIX")
def test_a_full_disk_is_one_line_and_the_next_run_finishes(server, tmp_path):
    import resource
    limit = len(ALPACA) // 2
    process = start(server, tmp_path,
                    lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 2 and len(errors.splitlines()) == 1, errors
    assert "File too large" in errors and "--to" in errors
    part = next((tmp_path / "raw").rglob("*.part"))
    have = part.stat().st_size
    assert 0 < have <= limit and part.read_bytes() == ALPACA[:have]
    assert alpaca(server, tmp_path) == 0 and len(learned(tmp_path)) == 600
    assert server.ranges[1:] == [f"bytes={have}-"]


# ---- Usage ----
@pytest.mark.parametrize("module, args", [
    (get_web, ["--gb", "0"]), (get_web, ["--gb", "much"]), (get_web, ["--gb", "nan"]),
    (get_alpaca, ["--too", "x"]), (get_gutenberg, ["more"]), (get_preferences, ["--base-url"]),
    (prepare, ["--holdout", "0.9"]), (prepare, ["--vocab-size", "x"]),
    (prepare, ["--vocab-size", "10"])])
def test_wrong_usage_is_one_line(module, args, capsys):
    with pytest.raises(SystemExit) as e:
        dl.run(module.main, args)
    assert e.value.code == 2
    one_line(capsys, args[0], "--help")


# the programs', which need no extra
MODULES = {"__init__", "chats", "commands", "kernels", "tensors", "texts"}


@pytest.mark.parametrize("name", sorted({p.stem for p in (ROOT / "data").glob("*.py")} - MODULES))
def test_without_the_extra(name, tmp_path):
    """One line that says how to install it."""
    code = (f"import runpy, sys; sys.modules['requests'] = None; sys.path.insert(0, '.'); "
            f"sys.argv = ['{name}.py']; runpy.run_path(sys.argv[0], run_name='__main__')")
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "data", capture_output=True,
                            encoding="utf-8")
    complains(result, f"{name}.py", "pip install -e .[data]")


def test_help_names_the_defaults():
    result = nanoeuler("--help", program="data/get_web.py", cwd=ROOT)
    assert result.returncode == 0 and get_web.BASE_URL in "".join(result.stdout.split())


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
    work, header = get_gutenberg.strip(form.replace("WORK", WORK).replace("\n", line))
    assert work == WORK.strip() and "#7]" in header


@forms
def test_a_missing_marker_is_said(form):
    head, _, tail = form.partition("WORK")
    for text, word in ((head + WORK, "END"), (WORK + tail, "START")):
        with pytest.raises(ValueError, match=word):
            get_gutenberg.strip(text)


def test_a_marker_that_the_work_quotes_is_part_of_it():
    work = WORK.strip() + "\nrain" * 5000 + "\n\n*END*THE SMALL PRINT!*END*\n\nThe end."
    assert get_gutenberg.strip(NEW.replace("WORK", work))[0] == work


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


def test_a_missing_or_wrong_book(shelf, tmp_path, capsys):
    """The others are fetched first, then one line; the next run has one book to fetch."""
    book = shelf.files.pop("/8/pg8.txt")
    assert gutenberg(shelf, tmp_path) == 2
    one_line(capsys, f"{shelf.url}/8/pg8.txt", "404", "2 of 3 books")
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
        server.files[f"/00{k}_00000.parquet"] = write_parquet(
            tmp_path / "source" / f"00{k}_00000.parquet",
            f"select i as id, case when i % 10 = 0 then 'page {k}-' || i || '  \r\n\n\n\nend \n' "
            f"when i = 1 then null else 'page {k}-' || i end as text from range(3000) t(i)")
    return server


def pages(k):
    return [f"page {k}-{i}" + "\n\nend" * (i % 10 == 0) for i in range(3000) if i != 1]


def web_text(server, tmp_path, gb, *args):
    argv = ["--base-url", server.url, "--to", str(tmp_path), "--gb", str(gb), *args]
    return dl.run(get_web.main, argv)


def test_web_takes_a_slice(web, tmp_path):
    web.moods = ["drop", "drop", "ok"]
    assert web_text(web, tmp_path, 2e-5) == 0
    text = (tmp_path / "web.txt").read_text(encoding="utf-8")
    assert 20_000 <= len(text) < 20_100
    found = text.removesuffix("\n").split("\n\n\n")
    assert found == pages(0)[:len(found)]
    assert not (tmp_path / "raw" / "web" / "001_00000.parquet").exists()
    size = len("\n\n\n".join(pages(0)))
    assert web_text(web, tmp_path, size / 1e9) == 0
    text = (tmp_path / "web.txt").read_text(encoding="utf-8")
    assert text == "\n\n\n".join(pages(0)) + "\n"
    size += 1                                # a byte more: the second file is needed
    assert web_text(web, tmp_path, size / 1e9) == 0
    text = (tmp_path / "web.txt").read_text(encoding="utf-8")
    assert text == "\n\n\n".join(pages(0) + pages(1)[:1]) + "\n"


def test_web_says_when_there_is_no_more(web, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(get_web, "FILES", get_web.FILES[:2])
    for gb, more in ((2e-5, True), (1, False)):
        assert web_text(web, tmp_path, gb) == 0
        assert ("all there is" in capsys.readouterr().out) != more
    text = (tmp_path / "web.txt").read_text(encoding="utf-8")
    assert text == "\n\n\n".join(pages(0) + pages(1)) + "\n"


def test_web_from_disk_and_a_damaged_file(web, tmp_path, capsys):
    out, source = tmp_path / "out", tmp_path / "source"
    assert web_text(web, out, 2e-5, "--from", str(source)) == 0 and web.ranges == []
    for damaged in (b"", b"<html>", web.files["/000_00000.parquet"][:-100]):
        (source / "000_00000.parquet").write_bytes(damaged)
        capsys.readouterr()
        assert web_text(web, tmp_path / "other", 2e-5, "--from", str(source)) == 2
        one_line(capsys, "000_00000.parquet is not what it should be", "--from")
    write_parquet(source / "000_00000.parquet", "select 1 as other")
    assert web_text(web, tmp_path / "other", 2e-5, "--from", str(source)) == 2
    one_line(capsys, "text")


def test_preferences(server, tmp_path, capsys):
    say = ("[{{'content': 'Hello', 'role': 'user'}}, {{'content': 'Hi', 'role': 'assistant'}}, "
           "{{'content': p, 'role': 'user'}}, {{'content': {}, 'role': 'assistant'}}]").format
    server.files[f"/{get_preferences.FILE}"] = write_parquet(
        tmp_path / "x.parquet",
        f"select p as prompt, {say('a')} as chosen, {say('b')} as rejected from (values "
        f"('Say A', 'A', 'B'), ('Say A', 'A', 'B'), ('Same', 'C', 'C'), ('', 'A', 'B'), "
        f"('Zo\u00eb?', ' Yes ', 'No'), (null, 'A', 'B')) t(p, a, b)")
    argv = ["--base-url", server.url, "--to", str(tmp_path)]
    assert dl.run(get_preferences.main, argv) == 0
    lines = (tmp_path / "preferences.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(s) for s in lines] == [
        {"instruction": "Say A", "input": "", "chosen": "A", "rejected": "B"},
        {"instruction": "Zo\u00eb?", "input": "", "chosen": "Yes", "rejected": "No"}]


def test_alpaca_drops_what_cannot_be_learned(server, tmp_path, capsys):
    good = {"instruction": "Name a colour.", "input": "", "output": "Red"}
    server.files["/alpaca_data_cleaned.json"] = json.dumps([
        good, good, {**good, "output": ""}, {**good, "instruction": None},
        {**good, "output": "\ud83d"}, {"instruction": "Zo\u00eb?", "output": "Yes"}]).encode()
    assert alpaca(server, tmp_path) == 0
    assert learned(tmp_path) == [good, {"instruction": "Zo\u00eb?", "input": "", "output": "Yes"}]
    examples, _ = ne.read_examples(str(tmp_path / "alpaca.json"), "output")
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
    text = prepared(tmp_path, "--vocab-size", "0", "--holdout", "0.1")
    train, val = map(documents, ne.split_text(text, flag(capsys)))
    assert sorted(train + val) == sorted(prose(i) for i in range(150))
    assert 5 < len(val) < 30
    assert text == prepared(tmp_path, "--vocab-size", "0", "--holdout", "0.1")
    capsys.readouterr()
    make(tmp_path, "gutenberg.txt", [prose(i) for i in range(150, 300)])
    text = prepared(tmp_path, "--vocab-size", "0", "--holdout", "0.1")
    train_2, val_2 = map(documents, ne.split_text(text, flag(capsys)))
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


def test_a_run_finds_the_tokens(tmp_path, capsys, monkeypatch):
    """The tokenizer and the token file are those a training run would make."""
    monkeypatch.setattr(texts, "LARGE", 100_000)
    make(tmp_path, "web.txt", [prose(i, 600) for i in range(100)])
    prepared(tmp_path, "--vocab-size", "300", "--holdout", "0.05")
    out = capsys.readouterr().out
    flags = out.split("--holdout ")[1].split()
    assert flags[1:] == ["--vocab-size", "300"]
    holdout, file = float(flags[0]), tmp_path / "pretrain.txt"
    cache, = tmp_path.glob("pretrain.txt.*.tokens")
    cfg = ne.Config(n_embd=8, n_head=2, n_kv_head=1, head_dim=4, n_layer=1, n_hidden=12, seq_len=16,
                    vocab_size=300, n_mtp=2)
    text = ne.read_text(str(file))
    parts = ne.split_text(memoryview(text), holdout)
    tokenizer = ne.bpe.train(ne.excerpt(parts[0]), cfg.vocab_size)
    assert tokenizer.hash()[:12] in out
    tokens = ne.tokenize(str(file), parts, tokenizer, hashlib.sha256(text).hexdigest())
    assert "tokenizing" not in capsys.readouterr().out
    assert [cache] == list(tmp_path.glob("*.tokens"))
    for part, ids in zip(parts, tokens):
        assert tokenizer.decode(ids) == bytes(part)


def test_one_document_at_least_is_to_validate_on(tmp_path, capsys):
    make(tmp_path, "web.txt", [prose(1), prose(2)])
    text = prepared(tmp_path, "--holdout", "0.0002")
    out = capsys.readouterr().out
    assert "short enough" in out and "--vocab-size" not in out
    holdout = float(out.split("--holdout ")[1])
    assert [len(documents(part)) for part in ne.split_text(text, holdout)] == [1, 1]


def test_prepare_replaces_nothing_that_it_reads(tmp_path, capsys, monkeypatch):
    make(tmp_path, "web.txt", [prose(i) for i in range(9)])
    before = (tmp_path / "web.txt").read_bytes()
    monkeypatch.chdir(tmp_path)
    for argv in (["--to", str(tmp_path)], ["--to", str(tmp_path), "web.txt"], ["--to", "."]):
        assert dl.run(prepare.main, [*argv, "--out", "web.txt"]) == 2
        one_line(capsys, "web.txt would replace what it is made of", "--out")
    assert (tmp_path / "web.txt").read_bytes() == before


def test_prepare_says_what_is_missing(tmp_path, capsys):
    for argv, words in (
            ([], ["get_gutenberg.py", "get_web.py"]), (["nowhere.txt"], ["nowhere.txt"])):
        assert dl.run(prepare.main, ["--to", str(tmp_path), *argv]) == 2
        one_line(capsys, "prepare.py", *words)
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
    questions = {(e["instruction"], e["input"]) for e in ne.read_examples(
        str(ROOT / "data" / "instructions.json"), "output")[0]}
    lines = (ROOT / "data" / "preferences_sample.jsonl").read_text(encoding="utf-8").splitlines()
    pairs = [json.loads(s) for s in lines]
    assert len(pairs) == len(set(lines)) == 4000
    assert {e["source"] for e in pairs} == {"wordnet", "skill", "factbook", "shakespeare", "stdlib"}
    for e in pairs:
        assert (e["instruction"], e["input"]) in questions
        assert e["chosen"] != e["rejected"] and e["chosen"] and e["rejected"]
    assert sum(map(ne.held_out, pairs)) == 85
