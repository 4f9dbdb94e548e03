"""Stores a result that is to be published: the files, and an entry in bench/results/MANIFEST.toml.

    python bench/record.py NAME FILE... --command "python bench/bench_cpu.py"

Copies bench/out/FILE, or a FILE from elsewhere, to bench/results/, and writes entry NAME with the
command, today's commit, the machine and the versions; an older entry of that name is replaced.
--commit, --machine and --versions say it where a result comes from another machine.  Refuses a
working tree with changes, since no commit names what was measured.
"""
import argparse
import datetime
import json
import pathlib
import platform
import shutil
import subprocess
import tomllib

from common import BENCH, cpu_model, out_folder, versions

RESULTS = BENCH / "results"
MANIFEST = RESULTS / "MANIFEST.toml"
PACKAGES = "numba", "llvmlite", "numpy", "torch", "numba-cuda"
FIELDS = "files", "command", "commit", "machine", "versions", "date"
MAY_LACK = {"commit", "machine", "versions"}     # a result that is older than the manifest
HEAD = """\
# Every published result: its files, and what made them.  bench/record.py writes entries, and `make
# release-check` compares them with the folder.  Results that are "stored" on a date are older than
# this file: their entries have what the results, the pages and the history of the repository say.
"""


def entries():
    """name -> {files, command, commit, machine, versions, date}, of older results some"""
    if not MANIFEST.exists():
        return {}
    return tomllib.loads(MANIFEST.read_text(encoding="utf-8"))


def write(all_entries):
    text = HEAD
    for name in sorted(all_entries):
        lines = [f"{key} = {json.dumps(all_entries[name][key], ensure_ascii=False)}"
                 for key in FIELDS if key in all_entries[name]]
        text += "\n".join([f"\n[{json.dumps(name)}]", *lines, ""])
    MANIFEST.write_text(text, encoding="utf-8")


def git(*args):
    said = subprocess.run(["git", "-C", str(BENCH), *args], capture_output=True, text=True)
    return said.stdout.strip()


def installed():
    found = {"Python": platform.python_version(), **versions(*PACKAGES)}
    return ", ".join(f"{name} {version}" for name, version in found.items() if version)


def complaints():
    """What is wrong with the manifest, a line each."""
    said, listed = [], []
    for name, entry in entries().items():
        older = MAY_LACK if entry.get("date", "").startswith("stored ") else ()
        said += [f"{name}: {key} is missing or empty" for key in FIELDS
                 if not entry.get(key) and (key in entry or key not in older)]
        said += [f"{name}: {key} is no field" for key in entry if key not in FIELDS]
        listed += entry.get("files", [])
    there = {path.name for path in RESULTS.iterdir()} - {MANIFEST.name}
    said += [f"{file} has no entry" for file in sorted(there - set(listed))]
    said += [f"{file} is not in the folder" for file in sorted(set(listed) - there)]
    return said + [f"{file} has two entries" for file in sorted(set(listed))
                   if listed.count(file) > 1]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("name")
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--command", required=True, help="that makes the files")
    parser.add_argument("--commit", help="of what was measured (default: today's)")
    parser.add_argument("--machine", help="default: this one")
    parser.add_argument("--versions", help="default: those installed here")
    args = parser.parse_args(argv)
    if not args.commit and git("status", "--porcelain", "--untracked-files=no"):
        parser.error("the working tree has changes: commit them, or say --commit")
    sources = [path if path.exists() else out_folder() / path for path in args.files]
    missing = [str(path) for path in sources if not path.exists()]
    if missing:
        parser.error(f"there is no {', '.join(missing)}")
    all_entries = entries()
    all_entries[args.name] = dict(
        files=[path.name for path in sources], command=args.command,
        commit=args.commit or git("rev-parse", "--short", "HEAD"),
        machine=args.machine or f"{cpu_model().name}, {cpu_model().detail}",
        versions=args.versions or installed(), date=str(datetime.date.today()))
    for path in sources:
        if path.resolve().parent != RESULTS:
            shutil.copy(path, RESULTS)
    write(all_entries)


if __name__ == "__main__":
    main()
