"""Draws the pictures of docs/tour, and docs/euler.svg.

    python bench/make_tour.py [PAGE ...]        writes docs/tour/NN_*.svg; default: all pages

Each picture is made by the function `picture` of bench/tour/page_NN.py.  Page 7 and docs/euler.svg
show the same steps of the same model, by bench/tour/euler.py.
"""
import argparse
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
    if not pages or 7 in pages:
        found.append((ROOT / "docs/euler.svg", importlib.import_module("euler").picture()))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=int, nargs="*", help="number of a page; default: all")
    for path, drawn in pictures(parser.parse_args().page):
        path.write_text(drawn, encoding="utf-8")
        print(path.relative_to(ROOT))
