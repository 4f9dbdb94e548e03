"""The guided tour in the browser: the Markdown pages of docs/tour as HTML.

The pages are our own files, so their HTML is trusted.  markdown-it-py renders them.  Links between
pages stay in the browser; links to other files of the project become plain text.
"""
import pathlib
import re

from nanoeuler_parts.checkpoint.bundled import beside_program

TEMPLATE = pathlib.Path(__file__).parent / "pages/tour.html"
LIVE = {"01": "tokens", "06": "attention", "07": "trajectory"}       # pages that ask the model
PACKAGE = "markdown_it"
# On a phone, a picture is wider than the page, so that its texts can be read, and scrolls.
PICTURE = '<div class="scroll picture" tabindex="0" role="region" aria-label="Picture">'


class Tour:
    """{path: file} of the pictures as `pictures`, and the names of the pages as `pages`"""

    def __init__(self):
        folder = pathlib.Path(beside_program("docs/tour"))
        self.pages = {path.stem: path for path in sorted(folder.glob("[01][0-9]_*.md"))}
        self.pages["glossary"] = folder / "glossary.md"
        self.index = folder / "README.md"
        self.pictures = {f"/tour/{path.name}": path for path in folder.glob("*.svg")}

    def page(self, name):
        """The HTML of a page, or of the index if `name` is empty.  Raises ModuleNotFoundError if
        markdown-it-py is not installed."""
        source = (self.pages[name] if name else self.index).read_text(encoding="utf-8")
        live = LIVE.get(name[:2])
        body = html(source, "" if name else "tour/", live)
        title = re.match(r"# (.*)", source)[1]
        filled = {"TITLE": title, "UP": "../" if name else "", "BODY": body,
                  "SCRIPT": f'<script type="module" src="{"../" if name else ""}tour.js"></script>'
                  if live else ""}
        return re.sub(r"@([A-Z]+)@", lambda place: filled[place[1]],
                      TEMPLATE.read_text(encoding="utf-8"))


def html(source, folder, live):
    """Markdown as HTML.  folder: precedes links to other pages.  live: the name of the live part,
    which follows the first picture; None: there is none"""
    from markdown_it import MarkdownIt
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    tokens = parser.parse(source)
    for token in tokens:
        if token.children:
            token.children = [*linked(token.children, folder)]
    said = parser.renderer.render(tokens, parser.options, {})
    said = re.sub(r"<!--.*?-->\n?", "", said, flags=re.S)            # marks of the test
    said = re.sub(r"<p>(<img [^>]*>)</p>", rf"{PICTURE}\1</div>", said)
    if live:
        part = f'<section id="live" data-part="{live}" aria-label="Try it"></section>'
        said = re.sub(rf"({PICTURE}.*?</div>)", rf"\1{part}", said, count=1)
    return said


def linked(tokens, folder):
    """The tokens of a line, with the addresses of this server"""
    is_plain = False
    for token in tokens:
        if token.type == "image":
            token.attrs["src"] = folder + token.attrs["src"]
        if token.type == "link_open":
            address = token.attrs["href"]
            if address.startswith("../"):    # a file of the project, which the server does not have
                is_plain = True
                continue
            if not address.startswith(("http:", "https:")):
                token.attrs["href"] = folder + address.replace(".md", "")
        if token.type == "link_close" and is_plain:
            is_plain = False
            continue
        yield token
