"""What the data scripts share: where files come from, the manifest, clean text.

Data sets come by huggingface_hub, other files by pooch.  A file waits in raw/*/incoming until it
is complete and is what it should be; then it takes its name in raw/.  manifest.json remembers its
address, bytes, sha256 and date: later runs verify the file and fetch nothing.
"""
import argparse
import contextlib
import datetime
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import sys
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

try:
    import duckdb
    import huggingface_hub
    import pooch
    from tqdm import tqdm
    MISSING = ""                             # name of the first package that is not installed
except ImportError as e:
    MISSING = e.name

HERE = Path(__file__).resolve().parent
USER = "nanoeuler-data"                      # servers want to know which program asks
RETRIES = 3                                  # of pooch, after 1, 2 and 3 s
TIMEOUT = 60                                 # seconds without a byte

class DataError(Exception):
    """What went wrong and the remedy, in one line."""

# ---- Sources ----
# a file that has come: from where, the sha256 and the commit that the server names, if any
Arrival = namedtuple("Arrival", "file url sha256 commit", defaults=(None, None))

# Both kinds of files have fetch(folder, manifest, known) -> Arrival. HubFile takes the commit from
# the manifest, that of all files here; WebFile compares with `known`, this file's entry or None.

def of_this_machine(e):
    """No space, no permission and the like, as opposed to the many errors of a network."""
    full = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EMFILE
    return isinstance(e, OSError) and (e.filename is not None or e.errno in full)

def cause(e):
    """What requests and urllib3 have wrapped, maybe several times."""
    inner = getattr(e, "reason", None) or (e.args[0] if e.args else None)
    return cause(inner) if isinstance(inner, Exception) else e

@contextlib.contextmanager
def fetching(url, remedy):
    """Whatever a library complains of becomes one line with the remedy."""
    try:
        yield
    except Exception as e:                   # their errors have no ancestor in common
        if of_this_machine(e):
            raise
        why = " ".join(str(cause(e)).split())[:250]
        if url not in why:
            why = f"{url}: {why}"
        raise DataError(f"{why}; {remedy}") from None

@dataclass
class HubFile:
    """A file of a data set on the Hugging Face Hub, by huggingface_hub."""
    repo: str
    name: str

    def url(self, revision="main"):
        return huggingface_hub.hf_hub_url(self.repo, self.name, repo_type="dataset",
                                          revision=revision)

    def revision(self, manifest):
        """The commit that files of this data set came from, if some are here: all of them shall
        be of one edition. Else the newest."""
        for entry in manifest.values():
            if f"/datasets/{self.repo}/resolve/" in entry["url"] and "commit" in entry:
                return entry["commit"]
        return "main"

    def fetch(self, folder, manifest, known):
        url = self.url(self.revision(manifest))
        with fetching(url, "the same command tries again; HF_ENDPOINT names a mirror"):
            about = huggingface_hub.get_hf_file_metadata(url, library_name=USER,
                                                         retry_on_errors=True)
            if not about.commit_hash:
                raise DataError("this is not a server of the Hugging Face Hub")
            file = huggingface_hub.hf_hub_download(
                self.repo, self.name, repo_type="dataset", revision=about.commit_hash,
                local_dir=folder, library_name=USER)
        # the tag of a large file is its sha256, that of a small one is git's
        sha256 = about.etag if re.fullmatch("[0-9a-f]{64}", about.etag or "") else None
        return Arrival(Path(file), self.url(about.commit_hash), sha256, about.commit_hash)

@dataclass
class WebFile:
    """A file at an address, by pooch."""
    address: str
    remedy: str = "the same command tries again; --base-url names a mirror"

    def url(self):
        return self.address

    def fetch(self, folder, manifest, known):
        name = self.address.rpartition("/")[2]
        expected = known["sha256"] if known else None
        files = pooch.create(folder, base_url="", urls={name: self.address},
                             registry={name: expected}, retry_if_failed=RETRIES)
        downloader = pooch.HTTPDownloader(timeout=TIMEOUT, headers={"User-Agent": USER})
        remedy = self.remedy
        if known:
            remedy += "; without its entry in manifest.json another file is accepted"
        with fetching(self.address, remedy):
            return Arrival(Path(files.fetch(name, downloader=downloader)), self.address)

# ---- The manifest ----
def sha256_of(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()

@contextlib.contextmanager
def replacing(path):
    """A file to write bytes to that takes the place of `path` when all is well.  A file that is
    replaced keeps its mode."""
    temporary = Path(f"{path}.tmp")
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None

    def opener(name, flags):
        return os.open(name, flags, 0o666 if mode is None else mode & 0o777 | 0o600)

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb", opener=opener) as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        if mode is not None:
            os.chmod(temporary, mode)
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

def record(folder, name, arrival, digest):
    entry = {"url": arrival.url, "bytes": arrival.file.stat().st_size, "sha256": digest,
             "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    if arrival.commit:
        entry["commit"] = arrival.commit
    entries = {**read_manifest(folder), name: entry}
    with replacing(folder / "manifest.json") as f:
        f.write(json.dumps(entries, indent=1, sort_keys=True).encode() + b"\n")

def obtain(name, origin, o, check):
    """Path of the raw file `name`: in --from, here from an earlier run, or else fetched from
    origin, a HubFile or WebFile.

    check(path) raises ValueError if the content is not what it should be."""
    known = read_manifest(o.to).get(name)    # its entry, if it was here before
    path = o.to / "raw" / name
    if o.from_folder:
        path = in_folder(o.from_folder, name, origin)
    if path.is_file():
        digest = sha256_of(path)
        if not known:
            remedy = "name another folder with --from" if o.from_folder else "remove it"
            accept(path, path, check, remedy)
            record(o.to, name, Arrival(path, path.resolve().as_uri()), digest)
            return path
        if digest == known["sha256"]:
            return path
        if o.from_folder:
            raise DataError(f"{path} is not the file of before: "
                            f"{sha_mismatch(digest, known['sha256'])}")
        print(f"{path} is damaged: once more", file=sys.stderr)
    download(path, name, origin, o.to, check)
    return path

def in_folder(folder, name, origin):
    """Path of the file `name`, web/x.parquet or the like, that a user has put into a folder."""
    for path in (folder / name, folder / Path(name).name):
        if path.is_file():
            return path
    raise DataError(f"{path.name} is not in {folder}; fetch it from {origin.url()}")

def download(path, name, origin, to, check):
    """Fetches the file `name` and gives it its place `path`, if it is what it should be."""
    manifest = read_manifest(to)
    known = manifest.get(name)
    arrival = origin.fetch(path.parent / "incoming", manifest, known)
    digest = sha256_of(arrival.file)
    try:
        if arrival.sha256 not in (None, digest):
            raise DataError(f"{arrival.url} arrived damaged: "
                            f"{sha_mismatch(digest, arrival.sha256)}")
        if known and digest != known["sha256"]:
            raise DataError(f"{arrival.url} is not the file of before: "
                            f"{sha_mismatch(digest, known['sha256'])}")
        accept(arrival.file, arrival.url, check, "name another place with --from")
    except DataError:
        arrival.file.unlink()
        raise
    # The entry first: after a crash in between, the next run finds the complete file in incoming.
    # A file without an entry would be taken for one that a user has put there.
    record(to, name, arrival, digest)
    if path.exists():
        shutil.copymode(path, arrival.file)
    os.replace(arrival.file, path)

def sha_mismatch(digest, expected):
    return (f"sha256 {digest[:12]}, expected {expected[:12]}; run the same command again, or "
            f"remove its entry from manifest.json to accept another file")

def accept(path, shown, check, remedy):
    """DataError if check refuses the file; `shown` is what the user knows it by."""
    try:
        check(path)
    except (AttributeError, KeyError, TypeError, ValueError, duckdb.Error) as e:
        message = " ".join(str(e).split())[:200]
        raise DataError(f"{shown} is not what it should be: {message}; {remedy}") from None

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
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    text = "\n".join(line.rstrip(" \t") for line in lines)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n \t\ufeff")

def storable(text):
    """Whether UTF-8 can hold a text: half a surrogate pair, which JSON can spell, it cannot."""
    return not re.search("[\ud800-\udfff]", text)

def read_parquet(path, columns):
    """Rows of a parquet file, in its order, without holding all of them."""
    with duckdb.connect() as db:
        db.execute(f"select {columns} from read_parquet(?)", [str(path)])
        while rows := db.fetchmany(1000):
            yield from rows

# ---- Command line ----
class Parser(argparse.ArgumentParser):
    """--help works without the packages of the extra `data`; everything else needs them."""

    def parse_args(self, *args, **named):
        chosen = super().parse_args(*args, **named)
        if MISSING:
            self.exit(2, f"{self.prog}: {MISSING} is not installed; pip install -e .[data]\n")
        return chosen

    def error(self, message):
        self.exit(2, f"{self.prog}: {message}; see --help\n")

def parser(doc):
    p = Parser(description=doc.partition("\n")[0],
               formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--to", type=Path, default=HERE, metavar="DIR", help="folder to write to")
    return p

def fetch_parser(doc, hub=True):
    """Of a script that fetches files, from the Hub or elsewhere."""
    p = parser(doc)
    p.add_argument("--from", dest="from_folder", type=Path, metavar="DIR",
                   help="use the files there, no network")
    if hub:
        p.epilog = "HF_ENDPOINT in the environment names a mirror of the Hugging Face Hub."
    return p

def number(low, high):
    """An argparse type: a finite number in [low, high]."""
    def parse(text):
        if not low <= (x := float(text)) <= high:
            raise argparse.ArgumentTypeError(f"{text} is not in {low:g} to {high:g}")
        return x
    parse.__name__ = "number"                # argparse says: invalid number value
    return parse

def run(main, argv=None):
    """Exit status of a script: what can go wrong is one line on stderr."""
    if MISSING:
        return main(argv)                    # it prints its help, or which package is missing
    program = Path(sys.modules[main.__module__].__file__).name
    if not (sys.stderr.isatty() or "HF_HUB_VERBOSITY" in os.environ):
        # nobody waits for a word on each new try: the last error says it all
        huggingface_hub.logging.set_verbosity_error()
    pooch.get_logger().setLevel("ERROR")
    try:
        main(argv)
        return 0
    except KeyboardInterrupt:
        print(f"\n{program}: stopped; the same command keeps the files that are complete",
              file=sys.stderr)
        return 130
    except DataError as e:                   # it may quote a source, which controls no terminal
        said = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(e))
        print(f"{program}: {said}", file=sys.stderr)
    except duckdb.Error as e:
        print(f"{program}: {' '.join(str(e).split())[:200]}; remove the file", file=sys.stderr)
    except OSError as e:
        print(f"{program}: {e.filename or 'a file'}: {e.strerror or e}; see --to", file=sys.stderr)
    return 2

if __name__ == "__main__":
    parser(__doc__).parse_args()             # a library: the scripts get_*.py use it
