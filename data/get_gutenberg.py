"""Public-domain classics of Project Gutenberg, joined into data/gutenberg.txt.

    python data/get_gutenberg.py
    python data/get_gutenberg.py --base-url https://www.gutenberg.org/cache/epub

Header, licence and footer are cut off, so that the text is the work alone. The licence on the name
"Project Gutenberg" does not bind what does not carry it; the works are in the public domain in the
United States, elsewhere look up the author.
"""
import re
import sys
import time

import download as dl

BASE_URL = "https://gutenberg.pglaf.org/cache/epub"     # Gutenberg's own mirror for programs
PAUSE = 1.0                                             # seconds between two books
BOOKS = {
    105: "Persuasion", 121: "Northanger Abbey", 141: "Mansfield Park", 158: "Emma",
    161: "Sense and Sensibility", 1342: "Pride and Prejudice", 46: "A Christmas Carol",
    98: "A Tale of Two Cities", 580: "The Pickwick Papers", 730: "Oliver Twist",
    766: "David Copperfield", 786: "Hard Times", 883: "Our Mutual Friend", 963: "Little Dorrit",
    1023: "Bleak House", 1400: "Great Expectations", 768: "Wuthering Heights", 1260: "Jane Eyre",
    969: "The Tenant of Wildfell Hall", 9182: "Villette", 145: "Middlemarch", 507: "Adam Bede",
    550: "Silas Marner", 6688: "The Mill on the Floss", 107: "Far from the Madding Crowd",
    110: "Tess of the d'Urbervilles", 122: "The Return of the Native",
    143: "The Mayor of Casterbridge", 153: "Jude the Obscure", 155: "The Moonstone",
    583: "The Woman in White", 599: "Vanity Fair", 3409: "Barchester Towers",
    4276: "North and South", 394: "Cranford", 43: "Dr Jekyll and Mr Hyde", 120: "Treasure Island",
    421: "Kidnapped", 174: "The Picture of Dorian Gray", 844: "The Importance of Being Earnest",
    11: "Alice in Wonderland", 12: "Through the Looking-Glass", 16: "Peter Pan",
    289: "The Wind in the Willows", 236: "The Jungle Book", 2226: "Kim", 113: "The Secret Garden",
    45: "Anne of Green Gables", 55: "The Wonderful Wizard of Oz", 84: "Frankenstein",
    345: "Dracula", 35: "The Time Machine", 36: "The War of the Worlds",
    159: "The Island of Doctor Moreau", 5230: "The Invisible Man", 244: "A Study in Scarlet",
    834: "The Memoirs of Sherlock Holmes", 1661: "The Adventures of Sherlock Holmes",
    2097: "The Sign of the Four", 2852: "The Hound of the Baskervilles",
    103: "Around the World in Eighty Days", 164: "Twenty Thousand Leagues under the Sea",
    219: "Heart of Darkness", 974: "The Secret Agent", 5658: "Lord Jim", 521: "Robinson Crusoe",
    829: "Gulliver's Travels", 6593: "Tom Jones", 2701: "Moby Dick", 74: "Tom Sawyer",
    76: "Huckleberry Finn", 86: "A Connecticut Yankee", 25344: "The Scarlet Letter",
    77: "The House of the Seven Gables", 205: "Walden", 514: "Little Women",
    209: "The Turn of the Screw", 160: "The Awakening", 541: "The Age of Innocence",
    215: "The Call of the Wild", 910: "White Fang", 23: "Narrative of Frederick Douglass",
    2600: "War and Peace", 1399: "Anna Karenina", 2554: "Crime and Punishment",
    28054: "The Brothers Karamazov", 1081: "Dead Souls", 1184: "The Count of Monte Cristo",
    1257: "The Three Musketeers", 135: "Les Miserables", 2413: "Madame Bovary", 996: "Don Quixote",
    1727: "The Odyssey", 1497: "The Republic", 1228: "On the Origin of Species",
    2591: "Grimms' Fairy Tales",
}

# since about 2004: "*** START OF THIS PROJECT GUTENBERG EBOOK TITLE ***", which may wrap
START = re.compile(r"^[ \t]*\*\*\* ?START OF TH(?:E|IS) PROJECT GUTENBERG[^*]{0,300}\*\*\*", re.M)
# before: a header that ends with "*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*"
SMALL_PRINT = re.compile(r"^\*END ?\*? ?THE SMALL PRINT!.*$", re.M)
# "*** END OF THE PROJECT GUTENBERG EBOOK TITLE ***", or "End of the Project Gutenberg EBook of ..."
END = re.compile(r"^[ \t]*(?:\*\*\* ?END OF TH(?:E|IS) PROJECT GUTENBERG|"
                 r"(?:\*+ ?)?End of (?:the |this )?Project Gutenberg)", re.M | re.I)
# "[EBook #1342]"
NUMBER = re.compile(r"\[(?:e-?book|etext) ?#(\d+)\]", re.I)
# paragraphs before the work: "Produced by Jane Doe and the Online Distributed Proofreading Team"
CREDITS = re.compile(r"\s*(?:(?:E-text |This e-?text was |This e-?book was )?(?:Produced|Prepared|"
                     r"Transcribed) (?:by|from) .*?\n\s*\n\s*)+", re.I | re.S)

def work_and_header(text):
    """(the work, Gutenberg's header before it); ValueError where a marker is missing."""
    text = text.replace("\r\n", "\n")
    first = START.search(text) or SMALL_PRINT.search(text)
    if not first:
        raise ValueError("it has no START marker of Project Gutenberg")
    begin = first.end()
    small_print = SMALL_PRINT.search(text, begin, begin + 20_000)    # some files have both
    if small_print:
        begin = small_print.end()
    last = END.search(text, begin)
    if not last:
        raise ValueError("it has no END marker of Project Gutenberg")
    work = text[begin:last.start()]
    produced_by = CREDITS.match(work)
    if produced_by:
        work = work[produced_by.end():]
    return dl.clean(work), text[:begin]

def read(path):
    return work_and_header(dl.decode(path.read_bytes()))

def checker(number):
    """The check(path) of `obtain` for the book of this number."""
    def check(path):
        work, header = read(path)
        found = NUMBER.search(header)
        if found and int(found[1]) != number:
            raise ValueError(f"it is book {found[1]}, expected {number}")
        if len(work) < 1000:
            raise ValueError(f"there are {len(work)} characters between the markers")
    return check

def main(argv=None):
    parser = dl.fetch_parser(__doc__, hub=False)
    parser.add_argument("--base-url", default=BASE_URL, metavar="URL",
                        help="the server or a mirror")
    o = parser.parse_args(argv)
    failed = []
    books = []                               # paths
    for number in dl.tqdm(BOOKS, unit="book", disable=None):
        name = f"gutenberg/pg{number}.txt"
        origin = dl.WebFile(f"{o.base_url}/{number}/pg{number}.txt")
        asks_server = not o.from_folder and not (o.to / "raw" / name).exists()
        try:
            books.append(dl.obtain(name, origin, o, checker(number)))
        except dl.DataError as e:            # the others first: the next run has less to do
            failed.append(e)
            if len(failed) == 3:
                break
        if asks_server:
            time.sleep(PAUSE)
    if failed:
        raise dl.DataError(f"{len(books)} of {len(BOOKS)} books are here; {failed[0]}")
    path = o.to / "gutenberg.txt"
    works = [read(book)[0].encode() for book in books]
    with dl.replacing(path) as f:
        f.write(dl.BETWEEN.join(works) + b"\n")
    print(f"{path}: {len(books)} books, {path.stat().st_size:,} bytes")

if __name__ == "__main__":
    sys.exit(dl.run(main))
