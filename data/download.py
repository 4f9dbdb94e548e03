"""What the data scripts share: downloads, the manifest, clean text.

A download survives slow, busy and broken servers by retries with back-off and HTTP ranges. Its
bytes wait in FILE.part: after Ctrl-C or a failure the next run asks for the rest. A file takes its
name only when it is complete and is what it should be. manifest.json then remembers its address,
bytes, sha256 and date, and later runs verify the file and skip it.
"""
import argparse, contextlib, datetime, hashlib, json, os, re, sys, time
from pathlib import Path

try:
    import duckdb, requests
    from requests.adapters import HTTPAdapter
    from tqdm import tqdm
    from urllib3.util.retry import Retry
except ImportError as e:
    print(f"{Path(sys.argv[0]).name}: {e.name} is not installed; pip install -e .[data]",
          file=sys.stderr)
    raise SystemExit(2) from None

HERE = Path(__file__).resolve().parent
TRIES, BACKOFF, LONGEST_WAIT = 6, 1.0, 300      # back-off: 0, 2, 4, 8 ... s, and LONGEST_WAIT
TIMEOUT = 15, 60                                # seconds: to connect, between two pieces
PIECE = 1 << 16                                 # bytes; a broken connection loses less than one
AGAIN = "the same command goes on later, or name a mirror with --base-url"

class DataError(Exception):
    """What went wrong and the remedy, in one line."""

# ---- Downloads ----
class Patient(Retry):
    """urllib3's retries; a server may ask for some patience (Retry-After), not for a day."""

    def get_retry_after(self, response):
        wait = super().get_retry_after(response)
        return wait and min(wait, LONGEST_WAIT)

    def sleep(self, response=None):
        if sys.stderr.isatty():
            print("the server is busy or away: waiting", file=sys.stderr)
        super().sleep(response)

def connect():
    retries = Patient(TRIES, connect=2, backoff_factor=BACKOFF, backoff_max=LONGEST_WAIT,
                      status_forcelist=(408, 429, 500, 502, 503, 504))
    client = requests.Session()
    client.mount("http://", HTTPAdapter(max_retries=retries))
    client.mount("https://", HTTPAdapter(max_retries=retries))
    # as it is: a range of compressed bytes is not a range of the file
    client.headers.update({"Accept-Encoding": "identity", "User-Agent": "nanoeuler-data/0.1"})
    return client

def reason(e):
    """The innermost cause that requests and urllib3 have wrapped, without their addresses."""
    while True:
        inner = getattr(e, "reason", None) or (e.args[0] if e.args else None)
        if not isinstance(inner, BaseException):
            return " ".join(str(e).rpartition(": ")[2].split()) or type(e).__name__
        e = inner

def size_of(path):
    return path.stat().st_size if path.exists() else 0

def whole(response):
    """Bytes of the whole file, as far as the server tells."""
    h = response.headers
    number = h.get("Content-Range", "").rpartition("/")[2] or h.get("Content-Length", "")
    return int(number) if number.isdigit() and "Content-Encoding" not in h else None

class Download:
    """`url` on its way to PATH.part; PATH.part.json says of which version of the file they are."""

    def __init__(self, url, path):
        self.url, self.part, self.promised = url, Path(f"{path}.part"), None
        self.about = Path(f"{self.part}.json")

    def origin(self):
        """{url, validator, total} of the bytes in the part; a part of unknown origin is no use."""
        with contextlib.suppress(OSError, ValueError):
            origin = json.loads(self.about.read_text(encoding="utf-8"))
            if origin["url"] == self.url:
                return origin
        self.discard()
        return {}

    def discard(self):
        self.part.unlink(missing_ok=True)
        self.about.unlink(missing_ok=True)

    def attempt(self, client):
        """One request for what is missing.  True if the file is then complete."""
        origin, have, headers = self.origin(), size_of(self.part), {}
        if have:
            headers = {"Range": f"bytes={have}-"}
            if origin["validator"]:          # a file that has changed is then sent whole
                headers["If-Range"] = origin["validator"]
        try:
            r = client.get(self.url, headers=headers, stream=True, timeout=TIMEOUT)
        except requests.RequestException as e:           # urllib3 has tried TRIES times
            raise DataError(f"{self.url}: {reason(e)}; {AGAIN}") from None
        with r:
            if r.status_code == 416:         # there is nothing after our bytes
                if whole(r) == have:
                    return True
                self.discard()
                return False
            if r.status_code not in (200, 206):
                raise DataError(f"{self.url}: {r.status_code} {r.reason}; correct the address at "
                                f"the top of the script, or name a mirror with --base-url")
            for step in (*r.history, r):     # Hugging Face: the sha256 of a large file
                tag = step.headers.get("X-Linked-Etag", "").strip('"')
                self.promised = tag if re.fullmatch("[0-9a-f]{64}", tag) else self.promised
            more = r.headers.get("Content-Range", "").startswith(f"bytes {have}-")
            if r.status_code == 206 and not (more and whole(r) == origin.get("total")):
                self.discard()               # other bytes than asked for, or of another file
                return False
            tag = r.headers.get("ETag", "")
            tag = r.headers.get("Last-Modified", "") if tag[:2] in ("", "W/") else tag
            start, total = have if r.status_code == 206 else 0, whole(r)
            if not start:                    # old bytes must never stand under the new tag
                self.discard()
            self.about.write_text(json.dumps(dict(url=self.url, validator=tag, total=total)),
                                  encoding="utf-8")
            self.receive(r, start, total)
        return total in (None, size_of(self.part))

    def receive(self, response, start, total):
        """Writes at explicit places: the same file fetched twice at once is still the file."""
        self.part.touch()
        with open(self.part, "r+b") as f, tqdm(total=total, initial=start, unit="B", leave=False,
                                               unit_scale=True, disable=None,
                                               desc=self.part.stem) as bar:
            f.seek(start)
            f.truncate()
            for piece in response.iter_content(PIECE):
                f.write(piece)
                bar.update(len(piece))

    def run(self):
        """Until complete, or until TRIES attempts in a row bring nothing."""
        self.part.parent.mkdir(parents=True, exist_ok=True)
        best, failures, why = size_of(self.part), 0, "the connection broke"
        with connect() as client:
            while failures < TRIES:
                try:
                    if self.attempt(client):
                        return self.part
                except requests.RequestException as e:       # while the body was read
                    why = reason(e)
                failures = 0 if size_of(self.part) > best else failures + 1
                best = max(best, size_of(self.part))
                time.sleep(BACKOFF * failures)
        raise DataError(f"{self.url}: {why} at byte {size_of(self.part)}; {AGAIN}")

# ---- The manifest ----
def sha256_of(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()

@contextlib.contextmanager
def replacing(path):
    """A file to write bytes to that takes the place of `path` when all is well."""
    temporary = Path(f"{path}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)

def read_manifest(folder):
    try:
        return json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as e:
        raise DataError(f"{folder / 'manifest.json'} is damaged: {e}; remove it") from None

def record(folder, name, url, path, digest):
    entry = {"url": url, "bytes": size_of(path), "sha256": digest,
             "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    entries = {**read_manifest(folder), name: entry}
    with replacing(folder / "manifest.json") as f:
        f.write(json.dumps(entries, indent=1, sort_keys=True).encode() + b"\n")

def obtain(name, url, o, check):
    """Path of the raw file `name`: in --from, here from an earlier run, or else downloaded.

    check(path) raises ValueError if the content is not what it should be."""
    known, path = read_manifest(o.to).get(name), o.to / "raw" / name
    if o.source:
        path = o.source / name
        path = path if path.is_file() else o.source / path.name
        if not path.is_file():
            raise DataError(f"{path.name} is not in {o.source}; fetch it from {url}")
    if path.is_file():
        digest = sha256_of(path)
        if known and digest == known["sha256"]:
            return path
        if not known:
            accept(path, path, check)
            record(o.to, name, path.resolve().as_uri(), path, digest)
            return path
        if o.source:
            raise DataError(f"{path} is not the file of before: {differs(digest, known)}")
        print(f"{path} is damaged: once more", file=sys.stderr)
    download = Download(url, path)
    part = download.run()
    digest = sha256_of(part)
    try:
        if digest != (download.promised or digest):
            raise DataError(f"{url} arrived damaged: sha256 {digest[:12]}, the server promised "
                            f"{download.promised[:12]}; run the same command again")
        if known and digest != known["sha256"]:
            raise DataError(f"{url} is not the file of before: {differs(digest, known)}")
        accept(part, url, check)
    except DataError:
        download.discard()                   # nothing to go on with
        raise
    record(o.to, name, url, part, digest)    # first: with a crash in between, the part is complete
    os.replace(part, path)
    download.discard()
    return path

def differs(digest, known):
    return (f"sha256 {digest[:12]}, expected {known['sha256'][:12]}; name a mirror with "
            f"--base-url, or remove its entry from manifest.json to accept this one")

def accept(path, source, check):
    try:
        check(path)
    except (ValueError, KeyError, TypeError, duckdb.Error) as e:
        message = " ".join(str(e).split())[:200]
        raise DataError(f"{source} is not what it should be: {message}; name another place with "
                        f"--base-url or --from") from None

# ---- Text ----
BETWEEN = b"\n\n\n"                          # two blank lines separate documents

def decode(data):
    """UTF-8, or else what old files are in: Latin-1 with Windows' quotes and dashes."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("cp1252", "replace")

def clean(text):
    """Unix line ends, no trailing blanks, one blank line at most: two end a document."""
    text = re.sub(r"[ \t]+(?=\n)", "", text.replace("\r\n", "\n").replace("\r", "\n"))
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n \t\ufeff")

def storable(text):
    """Half a surrogate pair, which JSON can spell, has no UTF-8."""
    return not re.search("[\ud800-\udfff]", text)

def read_parquet(path, columns):
    """Rows of a parquet file, in its order, without holding all of them."""
    with duckdb.connect() as db:
        db.execute(f"select {columns} from read_parquet(?)", [str(path)])
        while rows := db.fetchmany(1000):
            yield from rows

# ---- Command line ----
class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message}; see --help\n")

def parser(doc, base_url=None):
    p = Parser(description=doc.partition("\n")[0],
               formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--to", type=Path, default=HERE, metavar="DIR", help="folder to write to")
    if base_url:
        p.add_argument("--base-url", default=base_url, metavar="URL", help="the server or a mirror")
        p.add_argument("--from", dest="source", type=Path, metavar="DIR",
                       help="use the files there, no network")
    return p

def number(low, high):
    """An argparse type: a finite number in [low, high]."""
    def parse(text):
        if not low <= (x := float(text)) <= high:
            raise argparse.ArgumentTypeError(f"{text} is not in {low:g} to {high:g}")
        return x
    parse.__name__ = "number"
    return parse

def run(main, argv=None):
    """Exit status of a script: what can go wrong is one line on stderr."""
    program = Path(sys.modules[main.__module__].__file__).name
    try:
        main(argv)
        return 0
    except KeyboardInterrupt:
        print(f"\n{program}: stopped; the same command goes on", file=sys.stderr)
        return 130
    except DataError as e:
        print(f"{program}: {e}", file=sys.stderr)
    except duckdb.Error as e:
        print(f"{program}: {' '.join(str(e).split())[:200]}; remove the file", file=sys.stderr)
    except OSError as e:
        print(f"{program}: {e.filename or 'a file'}: {e.strerror}; see --to", file=sys.stderr)
    return 2
