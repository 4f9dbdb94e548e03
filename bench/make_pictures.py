"""Draws every picture of README, docs and the tour, except the photographs of web pages.

    python bench/make_pictures.py [NAME ...]    NAME: a page of the tour, or euler, formula, speed

Without a name it draws all of them.  It prints the labels of each picture that contain a number.  A
picture is made by the function `picture` of a module in bench/tour: page_NN.py draws
docs/tour/NN_*.svg, and the others draw docs/NAME.svg.  Page 7 and docs/euler.svg show the same
steps of the same model, by euler.py.  bench/photograph.py takes the pictures of the chat page and
of the training page.
"""
import argparse
import html
import importlib
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "bench/tour")]
OTHERS = "euler", "formula", "speed"         # of README


def pictures(names):
    """[(path, its text)] of the pictures with these names; all if there are none"""
    places = {}
    for script in sorted((ROOT / "bench/tour").glob("page_*.py")):
        number = script.stem.removeprefix("page_")
        [page] = (ROOT / "docs/tour").glob(f"{number}_*.md")
        places[str(int(number))] = script.stem, page.with_suffix(".svg")
    for name in OTHERS:
        places[name] = name, ROOT / f"docs/{name}.svg"
    chosen = names or places
    if "7" in names and "euler" not in names:
        chosen = [*names, "euler"]
    return [(places[name][1], importlib.import_module(places[name][0]).picture())
            for name in chosen]


def numbers(drawn):
    """The labels of a picture that contain a digit"""
    labels = [html.unescape(x) for x in re.findall(r"<text [^>]*>([^<]*)</text>", drawn)]
    return [x for x in labels if re.search(r"\d", x)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="*", help="page of the tour, euler, formula or speed; "
                                                "default: all")
    for path, drawn in pictures(parser.parse_args().name):
        path.write_text(drawn, encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'; '.join(numbers(drawn))}")
