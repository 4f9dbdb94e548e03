"""The files of a release, of the bundled model or of another one, into dist/.

    python bench/release.py [MODEL] [--card MODEL.md] [--out dist]

    NAME.bin            the checkpoint as it is
    NAME-hf/            for transformers, with the card as its README.md
    NAME-f16.gguf       for llama.cpp; and NAME-q8_0.gguf, which is half as large
    MODEL.md            the card, by default the one beside the model
    SHA256SUMS          of all of these; `sha256sum --check SHA256SUMS` in dist/ compares

NAME is the model's file without .bin, or what --name says.  What a release had before is replaced;
SHA256SUMS goes first and comes last, so that a folder with it is complete.
"""
import argparse
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import nanoeuler as ne
from nanoeuler_parts.checkpoint.bundled import SHIPPED
from nanoeuler_parts.checkpoint.file import sha256_of
from nanoeuler_parts.files.errors import problem
from nanoeuler_parts.interchange.exporting import export

SUMS = "SHA256SUMS"
# What the Hub shows of a model, before its card
HUB = """---
license: mit
language: en
pipeline_tag: text-generation
library_name: transformers
---
"""


def make(model, card, out, name):
    """Writes the files, and returns their names, SHA256SUMS last."""
    ne.read_checkpoint(str(model), moments=False)        # before anything is replaced
    with ne.reading(card, "name the card of the model by --card"):
        text = card.read_text(encoding="utf-8")
    out.mkdir(parents=True, exist_ok=True)
    (out / SUMS).unlink(missing_ok=True)
    folder = out / f"{name}-hf"
    if folder.exists():
        shutil.rmtree(folder)
    shutil.copyfile(model, out / f"{name}.bin")
    export(str(model), str(folder), "", None, force=True)
    (folder / "README.md").write_text(HUB + text, encoding="utf-8")
    for matrices in "f16", "q8_0":
        export(str(model), None, str(out / f"{name}-{matrices}.gguf"), matrices, force=True)
    (out / "MODEL.md").write_text(text, encoding="utf-8")
    made = [f"{name}.bin", "MODEL.md", f"{name}-f16.gguf", f"{name}-q8_0.gguf",
            *sorted(f"{folder.name}/{path.name}" for path in folder.iterdir())]
    sums = "".join(f"{sha256_of(out / path)}  {path}\n" for path in made)
    (out / SUMS).write_text(sums, encoding="utf-8")
    return [*made, SUMS]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=ROOT / SHIPPED)
    parser.add_argument("--card", type=Path, help="default: MODEL.md beside the model")
    parser.add_argument("--out", type=Path, default=Path("dist"))
    parser.add_argument("--name", help="of the files (default: the model's)")
    args = parser.parse_args(argv)
    try:
        ne.need(args.model.parent.resolve() != args.out.resolve(),
                f"{args.out} holds the model itself; choose another --out")
        made = make(args.model, args.card or args.model.with_name("MODEL.md"), args.out,
                    args.name or args.model.stem)
    except (ne.UserError, ModuleNotFoundError, OSError) as e:
        sys.exit(f"release: {problem(e)}")
    for path in made:
        print(f"{os.path.getsize(args.out / path):>12,}  {args.out / path}")


if __name__ == "__main__":
    main()
