"""Draws the pictures of docs/tour.

    python bench/make_tour.py [PAGE ...]        writes docs/tour/NN_*.svg; default: all pages

Each picture is made by the function `picture` of bench/tour/page_NN.py.
"""
import importlib
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "bench/tour")]


def pictures(pages):
    """[(path, its text)] of the pages with these numbers; all if there are none"""
    found = []
    for script in sorted((ROOT / "bench/tour").glob("page_*.py")):
        number = script.stem.removeprefix("page_")
        [page] = (ROOT / "docs/tour").glob(f"{number}_*.md")
        if not pages or int(number) in pages:
            found.append((page.with_suffix(".svg"), importlib.import_module(script.stem).picture()))
    return found


if __name__ == "__main__":
    for path, drawn in pictures([int(number) for number in sys.argv[1:]]):
        path.write_text(drawn, encoding="utf-8")
        print(path.relative_to(ROOT))
