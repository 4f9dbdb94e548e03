"""Everyday conversations, so that a small chat model survives what people type first.

    python data/everyday.py                                    # writes data/everyday.jsonl
    python data/everyday.py --exclude bench/everyday_prompts.jsonl --count 8000 --seed 1

A line is {"messages": [{"role": "user", "content": ...}, {"role": "assistant", ...}, ...],
"source": "everyday/KIND"}, which `nanoeuler.py sft` reads. Each kind draws a question from its
bank, words it in one of many ways, mistypes it as people do, and words the answer. Facts, talk,
stories and verses are in everyday_banks.py; sums and work with words are computed here. The same
arguments give the same bytes.
"""
import argparse
import collections
import json
import random
import re
import sys
from pathlib import Path

import everyday_banks as banks

# ==== Banks as lists ====

def joined(text):
    """The lines of a bank; one that begins with a blank goes on with the line before."""
    lines = []
    for line in text.strip("\n").split("\n"):
        if line.startswith(" "):
            lines[-1] += " " + line.strip()
        else:
            lines.append(line)
    return [line for line in lines if line]

def rows(text):
    """[[cell, ...]] of a bank of lines with bars."""
    return [[cell.strip() for cell in line.split("|")] for line in joined(text)]

def phrases(text):
    """[phrase] of a bank of phrases between semicolons."""
    return [" ".join(x.split()) for x in text.split(";")]

def pairs(text):
    """[(word, word)] of a bank of "a b;c d"."""
    return [tuple(x.split()) for x in phrases(text)]

def wordings(text):
    """The wordings between bars, but not those between bars in brackets."""
    found, depth = [""], 0
    for c in text:
        depth += (c == "[") - (c == "]")
        if c == "|" and depth == 0:
            found.append("")
        else:
            found[-1] += c
    return [" ".join(x.split()) for x in found]

def talks(text):
    """{(kind, weight): [talk]}; a talk is [the user's wordings, the answer's wordings, ...]."""
    kinds = {}
    for line in joined(text):
        mark, _, rest = line.partition(" ")
        if mark == "#":
            name, weight = rest.split()
            found = kinds[name, float(weight)] = []
        elif mark == ">":
            found.append([wordings(rest)])
        else:
            found[-1].append(wordings(rest))
    return kinds

def headed(text):
    """[(heading, [line, ...])] of a bank whose headings begin with #."""
    found = []
    for line in joined(text):
        if line.startswith("#"):
            found.append((line[1:].strip(), []))
        else:
            found[-1][1].append(line)
    return found

# ==== Chance ====

class Draw:
    """All that is left to chance: one generator, and decks that deal each card before one again."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.decks = {}

    def pick(self, items):
        return items[self.rng.randrange(len(items))]

    def chance(self, p):
        return self.rng.random() < p

    def number(self, low, high):
        return self.rng.randint(low, high)

    def some(self, items, n):
        return self.rng.sample(items, n)

    def deal(self, items):
        """The next card of a deck, which is known by the list of its cards."""
        _, deck = self.decks.setdefault(id(items), (items, []))
        if not deck:
            deck += self.some(items, len(items))
        return deck.pop()

    def fill(self, text):
        """Takes one of each [a|b]; inner brackets first."""
        while found := re.search(r"\[([^][]*)\]", text):
            text = text[:found.start()] + self.pick(found[1].split("|")) + text[found.end():]
        return text

    def say(self, texts, **slots):
        """One of some wordings, or of those of a text with bars, with its slots filled."""
        texts = wordings(texts) if isinstance(texts, str) else texts
        text = self.fill(self.pick(texts))
        return text.format(**slots) if slots else text

    def answer(self, texts):
        """An answer that is one of some wordings."""
        return spoken(self.say(texts))

ENDS_ASKING = re.compile(
    r"((And|Or|So|Well|But) )?(Shall|Would|Can|Could|Do(?! not)|Does|Did|Is|Are|May|Which|Who|"
    r"How (can|are|do|is|about|was|did)|"
    r"What (is|are|was|would|shall|do|did|can|else|next|now|about|made|kind|happened))\b|"
    r"And you|And yours", re.IGNORECASE)
TELLS = re.compile(r"(?:Ask|Tell|Take|Give|Try|Let|Keep|Go|Please|I|That|The|You|My|It|Breathe)\b")
ASKS_LATER = re.compile(r"[,:;] (?:what|shall|would|how|is|do|can|which|are|and you)\b")

def spoken(text):
    """An answer with the marks that its wordings left open: questions end with ?, others do not."""
    text = re.sub(r"([.!?]) \.(?!\.)", r"\1", text)
    text = re.sub(r" ,", ",", re.sub(r" +", " ", text)).strip()
    parts = re.split(r"(?<=[.!?]) ", text)
    for i, part in enumerate(parts):
        if ENDS_ASKING.match(part) and (part[-1].isalpha() or part[-1] in ".!"):
            parts[i] = part.rstrip(".!") + "?"
        elif TELLS.match(part) and part[-1] == "?" and not ASKS_LATER.search(part):
            parts[i] = part[:-1] + "."
    return " ".join(parts)

# ==== How people type ====

KEEP, NAME, END = "\2", "\3", "\4"           # begin and end what is not mistyped

def keep(text):
    """What stays as it is: a word to work on."""
    return f"{KEEP}{text}{END}"

def name(text):
    """What may be in capitals or in small letters, without mistakes: a name."""
    return f"{NAME}{text}{END}"

ASKING = """what whats what's which who whos who's whose when where why how is are was were do does
did can could will would should may am has have in on at of hows how's wheres where's wats u
r""".split()
COMMANDS = """tell give name list write say sing make count spell reverse sort add explain show
describe repeat take turn put find continue complete finish flip roll pick choose recite use
multiply divide subtract calculate compute order define speak talk teach uppercase lowercase
capitalize double halve translate draw set play set remind suggest summarize greet""".split()

HAILS = """hey, |hi, |hello, |ok, |so, |um, |hey bot, |ok so |hi there, |hello! |hey |well, |sorry,
 |and now: |next: |one more: |hmm, |now |also, |yo, """.replace("\n", "").split("|")
BEFORE_QUESTIONS = """quick question: |question: |tell me, |tell me: |do you know, |do you know
 this: |i want to know: |just wondering, |for my homework: |can you tell me: |please tell me: |a
 question: |i wonder: |my son asks: |my teacher asks: |help me: |say, |excuse me, |may i ask, |quiz:
 |i was wondering, |simple question: |pls tell me: |one question: |i forgot:
 """.replace("\n", "").split("|")
BEFORE_COMMANDS = """please |please |can you |could you |could you please |can you please |would you
 |i want you to |i'd like you to |pls |plz |now please |kindly |can u |try to |i need you to |will
 you |would you kindly |you must """.replace("\n", "").split("|")
AFTER = """ please|, please| pls| plz| thanks|, thanks|, thank you| thx| lol| :)| ;)|, i forgot|,
 just curious|, quick| now|, if you can|, bot|, friend|, NanoEuler|, if you know| again|, be short|,
 thx :)|, my friend| ty""".replace("\n", "").split("|")
SLANG = [(r"what is", "whats"), (r"what is", "wats"), (r"what's", "whats"), (r"who is", "whos"),
         (r"are you", "r u"), (r"you", "u"), (r"your", "ur"), (r"please", "pls"), (r"are", "r"),
         (r"please", "plz"), (r"want to", "wanna"), (r"going to", "gonna"), (r"why", "y"),
         (r"how many", "how much"), (r"and", "n"), (r"because", "cuz"), (r"don't", "dont"),
         (r"i'm", "im"), (r"does", "dose"), (r"which", "wich"), (r"the", "teh"), (r"know", "kno"),
         (r"something", "smth"), (r"what", "wat"), (r"tell me", "tell"), (r"is the", "is"),
         (r"a story", "storie"), (r"write", "rite"), (r"capital", "capitol"), (r"there", "ther")]

def outside(text, change):
    """Changes what is not between KEEP or NAME and END."""
    parts = re.split(f"([{KEEP}{NAME}][^{END}]*{END})", text)
    return "".join(part if i % 2 else change(part) for i, part in enumerate(parts))

def not_kept(text, change):
    """Changes what is not between KEEP and END."""
    parts = re.split(f"({KEEP}[^{END}]*{END})", text)
    return "".join(part if i % 2 else change(part) for i, part in enumerate(parts))

def mistyped(d, text):
    """One word of four letters or more with a slip of the fingers."""
    words = [m for m in re.finditer(r"[a-z]{4,}", text)]
    if not words:
        return text
    word = d.pick(words)
    i = d.number(word.start() + 1, word.end() - 2)
    slips = [text[:i] + text[i + 1] + text[i] + text[i + 2:],         # two letters change places
             text[:i] + text[i + 1:],                                # one is left out,
             text[:i] + text[i] + text[i:]]                          # or doubled
    return d.pick(slips)

def in_slang(d, text):
    fitting = [(was, says) for was, says in SLANG if re.search(rf"\b{was}\b", text)]
    if not fitting:
        return text
    was, says = d.pick(fitting)
    return re.sub(rf"\b{was}\b", says, text, count=1)

FIRST = "can could would will do does did is are am may should have has was were any".split()
ASKS = re.compile(
    r"\b(what|whats|what's|which|who|whos|who's|when|where|why|how|isn't it|yes or no)\b|, right\b|"
    rf"(^|[,:!] |\b(hi|hello|hey|now|also|so) ){NAME}?({'|'.join(FIRST)}) ", re.IGNORECASE)

def framed(d, text):
    """With a word before or after, as some people write."""
    first = re.split(r"[\s,]", text, maxsplit=1)[0]
    asks, commands = first in ASKING, first in COMMANDS
    if d.chance(0.45):
        before = HAILS
        if asks and d.chance(0.6):
            before = BEFORE_QUESTIONS
        if commands and d.chance(0.75):
            before = BEFORE_COMMANDS
        text = d.pick(before) + text
    list_ends_it = text.endswith(END) and KEEP in text
    if (asks or commands) and d.chance(0.2) and text[-1] not in ".:" and not list_ends_it:
        text += d.pick(AFTER)
    return text

def marked(d, text):
    """With capitals and marks as in print, or with fewer, or with more."""
    asks = ASKS.search(text)
    bare = text[-1] not in "?!.,;:)=" and not re.search(f"{NAME}[^{END}]{{25,}}{END}$", text)
    style = d.rng.choices(["print", "small", "small?", "First", "CAPS", "??"],
                          [36, 36, 12, 8, 4, 4])[0]
    end = "?" if asks else d.pick(["", "", ".", ".", "!"])
    if style in ("print", "First"):
        i = next((i for i, c in enumerate(text) if c not in KEEP + NAME + END), 0)
        if text[0] != KEEP:
            text = text[:i] + text[i].upper() + text[i + 1:]
        text = not_kept(text, lambda x: re.sub(r"\bi\b", "I", x))
    elif style == "CAPS":
        text = not_kept(text, str.upper)
    else:
        text = not_kept(text, str.lower)
    if bare and style in ("print", "small?"):
        text += end
    if bare and style == "??" and asks:
        text += d.pick(["??", "?!", "???", " ?"])
    return text

def typed(d, text, alone=False):
    """A question as somebody types it. What stands alone, "hi", has no words before and after."""
    if not alone:
        text = framed(d, text)
        if d.chance(0.10):
            text = outside(text, lambda part: in_slang(d, part))
        if d.chance(0.12):
            text = outside(text, lambda part: mistyped(d, part) if len(part) > 5 else part)
    text = marked(d, text)
    if alone and d.chance(0.25) and text[-1].isalnum():
        text += d.pick(["!", "!!", ".", " :)", "...", " :D", "!!!", " ;)"])
    return re.sub(f"[{KEEP}{NAME}{END}]", "", text)

# ==== Kinds ====

NAMES = banks.GIRLS + banks.BOYS

KINDS = {}                                   # name -> (weight, function: Draw -> [text, ...])

def kind(weight):
    """Registers a function that draws the texts of a talk, the user's first."""
    def register(function):
        KINDS[function.__name__] = weight, function
        return function
    return register

ALONE = "greeting daytime thanks goodbye reaction nonsense rude feelings".split()

def talk_kind(title, blocks):
    """The kind of a bank of talk: of each turn one wording.  A talk that begins in many wordings
    comes more often."""
    alone = title in ALONE
    cards = [block for block in blocks for _ in range(1 + len(block[0]) // 8)]

    def draw(d):
        turns = d.deal(cards)
        texts = []
        for i, turn in enumerate(turns):
            if i % 2 == 0:
                texts.append(typed(d, d.fill(d.deal(turn)), alone or i > 0))
            else:
                texts.append(d.answer(turn))
        return texts
    return draw

for bank in (banks.TALK, banks.MORE_TALK, banks.FACTS):
    for (title, weight), blocks in talks(bank).items():
        KINDS[title] = weight, talk_kind(title, blocks)

def capitalized(text):
    return text[:1].upper() + text[1:]

def a(word):
    return ("an " if word[0] in "aeiou" else "a ") + word

def listed(words):
    """"a, b and c"."""
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else words[0]

# {np} is "the capital of France", "the opposite of hot", ...; {bare} is without "the"
WHAT_IS = """what is {np} | what is {np} | what's {np} | whats {np} | tell me {np} | name {np} |
 {bare} | do you know {np} | can you tell me {np} | could you tell me what {np} is | please tell me
 {np} | what would be {np} | give me {np} | i need {np} | i'd like to know {np} | i want to know
 what {np} is | i forgot {np} | any idea what {np} is | what was {np} again | remind me what {np} is
 | help me, what is {np} | so what is {np} | say, what is {np} | {np} is | {bare} = | {np}, please |
 do you know what {np} is | tell me what {np} is | i am looking for {np} | can u tell me {np} | let
 me know {np} | what exactly is {np} | my teacher asks for {np} | i have to know {np} | {bare},
 please | {np}
""".replace("\n", "")

def ask_what(d, np, more=""):
    """A question for `np`; `more` are wordings of its own."""
    if more and d.chance(0.45):
        return typed(d, d.say(more))
    bare = np.removeprefix("the ")
    text = d.say(WHAT_IS, np=np, bare=bare)
    return typed(d, text, alone=text in (np, bare))

def answer_what(d, np, value, more=""):
    """"The capital of France is Paris.", "It is Paris.", "Paris."."""
    if more and d.chance(0.3):
        return d.say(more)
    usual = [f"{capitalized(np)} is {value}."] * 5
    return d.pick([*usual, f"It is {value}.", f"{capitalized(value)}."])

# ==== Countries ====

COUNTRIES = rows(banks.COUNTRIES)
CAPITAL_OF = {country: capital for country, capital, *_ in COUNTRIES}
OTHER_NAMES = {names[0]: names[1:] for names in rows(banks.ALSO_CALLED)}
ASKED = [*CAPITAL_OF, *banks.WELL_KNOWN, *banks.WELL_KNOWN]
CAPITAL_OF["England"] = "London"
NAMED_AFTER = [x for x, capital in CAPITAL_OF.items() if x.removeprefix("the ") == capital]
CITIES = [x for x in CAPITAL_OF if x not in [*NAMED_AFTER, "England"]]
IN_CONTINENT = [(x, continent) for x, _, continent, *_ in COUNTRIES
                if continent and continent != x]
LANGUAGES = [(x, language) for x, _, _, language, _ in COUNTRIES if language]
CURRENCIES = [(x, money) for x, _, _, _, money in COUNTRIES if money]
CONTINENTS = "Africa,Asia,Europe,North America,South America,Oceania".split(",")

def called(d, country):
    """A country as people call it."""
    others = OTHER_NAMES.get(country, [])
    said = d.pick([country, *others])
    return name(said.removeprefix("the ") if d.chance(0.2) else said)

def ask_capital(d, country):
    x = called(d, country)
    of = d.pick([f"the capital of {x}", f"the capital of {x}", f"the capital city of {x}",
                 f"{x}'s capital"])
    return ask_what(d, of, f"""which city is the capital of {x} | {x} capital | capital of {x} | the
        capital of {x} is called | how is the capital of {x} called | {x}, what is its capital
        | what city is the capital of {x} | capital city of {x} | {x} has which capital""")

def capital_answer(d, country):
    x, capital = country, CAPITAL_OF[country]
    stop = "" if capital.endswith(".") else "."
    both = f"The capital of {x} is {capital}{stop}"
    if x in NAMED_AFTER:
        return d.pick([both, f"It is {capital}, too{stop}", both])
    return d.pick([both, both, both, f"{capital} is the capital of {x}.",
                   f"{capital} is the capital of {x}.", f"It is {capital}{stop}"])

@kind(14)
def capital(d):
    country = d.deal(ASKED)
    return [ask_capital(d, country), capital_answer(d, country)]

def ask_country_of(d, city):
    return d.say(f"""which country has the capital {city} | {city} is the capital of | {city} is
        the capital of which country | of which country is {city} the capital | what country is
        {city} the capital of | {city} is the capital of what | which country's capital is {city} |
        what is {city} the capital of | in which country is {city} | where is {city} | what country
        is {city} in | tell me where {city} is | what is {city} | do you know {city} | {city} is in
        which country | {city} capital of? | name the country with the capital {city} | where can i
        find {city} | which country is the city of {city} in""")

@kind(8)
def capital_of(d):
    country = d.deal(CITIES)
    city = name(CAPITAL_OF[country])
    return [typed(d, ask_country_of(d, city)), d.say(f"""
        {CAPITAL_OF[country]} is the capital of {country}.
        | {CAPITAL_OF[country]} is the capital of {country}. | It is the capital of {country}.
        | {CAPITAL_OF[country]} is in {country}. It is the capital.""")]

@kind(4)
def is_capital(d):
    country, other = d.some(CITIES, 2)
    if d.chance(0.6):
        country = d.pick(banks.WELL_KNOWN[:5] + banks.WELL_KNOWN[6:])
    x, own = name(country), CAPITAL_OF[country]
    right = other == country or d.chance(0.5)
    city = name(own if right else CAPITAL_OF[other])
    asked = typed(d, d.say(f"""is {city} the capital of {x} | {city} is the capital of {x}, right |
        is the capital of {x} {city} | is it true that {city} is the capital of {x} | {city} is the
        capital of {x}, isn't it | so {city} is the capital of {x}? | am i right that {city} is the
        capital of {x} | the capital of {x} is {city}, yes or no"""))
    yes = f"""Yes, {own} is the capital of {country}. | Yes, the capital of {country} is {own}.
        | Yes, that is right. | That is right: {own} is the capital of {country}."""
    no = f"""No, the capital of {country} is {own}. | No, {own} is the capital of {country}. | No.
        The capital of {country} is {own}, and {CAPITAL_OF[other]} is the capital of {other}."""
    return [asked, d.say(yes if right else no).replace("..", ".")]

def ask_continent(d, x):
    return d.say(f"""on which continent is {x} | which continent is {x} in | where is {x} | what
        continent is {x} on | {x} is on which continent | in what part of the world is {x} | {x}
        continent | where in the world is {x} | where does {x} lie | tell me the continent of {x}
        | where can i find {x} | what continent does {x} belong to | to which continent does {x}
        belong | {x} is where | on which continent is the country of {x}""")

@kind(5)
def continent(d):
    country, where = d.deal(IN_CONTINENT)
    x = called(d, country)
    if d.chance(0.25):
        guess = where if d.chance(0.5) else d.pick(CONTINENTS)
        asked = d.say(f"is {x} in {name(guess)} | does {x} lie in {name(guess)} | {x} is in "
                      f"{name(guess)}, right")
        yes = "Yes" if guess == where else "No"
        return [typed(d, asked), d.say(f"{yes}, {country} is in {where}. | {yes}, it is in "
                                       f"{where}.")]
    return [typed(d, ask_continent(d, x)), capitalized(d.say(f"""
        {country} is in {where}. | {country} is in {where}. | It is in {where}. | {country} lies in
        {where}."""))]

def ask_language(d, x):
    return d.say(f"""what language do they speak in {x} | which language is spoken in {x} | what do
        people speak in {x} | language of {x} | what is the language of {x} | {x} language | in {x}
        they speak | what language do people in {x} speak | main language of {x} | what's the
        language in {x} | which language do i need in {x} | tell me the language of {x} | what is
        spoken in {x} | what is the main language in {x}""")

@kind(4)
def language(d):
    country, tongue = d.deal(LANGUAGES)
    x = called(d, country)
    return [typed(d, ask_language(d, x)), d.say(f"""
        People in {country} speak {tongue}. | The main language of
        {country} is {tongue}. | They speak {tongue} in {country}. | {tongue}.""")]

def ask_currency(d, x):
    return d.say(f"""what is the currency of {x} | which currency do they use in {x} | what money
        do they have in {x} | currency of {x} | {x} currency | how do i pay in {x} | what do people
        pay with in {x} | what is the money in {x} called | which money is used in {x} | what's the
        currency in {x} | tell me the currency of {x} | what money do i need in {x}""")

@kind(2.5)
def currency(d):
    country, money = d.deal(CURRENCIES)
    x = called(d, country)
    return [typed(d, ask_currency(d, x)), d.say(f"""
        The currency of {country} is {money}. | The currency of
        {country} is {money}. | People in {country} pay with {money}. | It is {money}.""")]

# ==== Days, numbers, colours and other small facts ====

ORDINALS = """first second third fourth fifth sixth seventh eighth ninth tenth eleventh
twelfth""".split()
SEASONS = "spring summer autumn winter".split()
ONES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
fifteen sixteen seventeen eighteen nineteen""".split()
TENS = "- - twenty thirty forty fifty sixty seventy eighty ninety".split()
ROMAN = "I II III IV V VI VII VIII IX X XI XII".split()

def in_words(n):
    """0 to 999 as words."""
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10] + ("-" + ONES[n % 10] if n % 10 else "")
    return ONES[n // 100] + " hundred" + (" and " + in_words(n % 100) if n % 100 else "")

def after_or_before(d, names, what):
    """What comes after or before one of a round of names."""
    i = d.number(0, len(names) - 1)
    x = name(names[i])
    if d.chance(0.65):
        y = names[(i + 1) % len(names)]
        asked = d.say(f"""what comes after {x} | which {what} comes after {x} | {what} after {x} |
            what is the {what} after {x} | what follows {x} | the {what} after {x} is | which {what}
            follows {x} | after {x} comes | next {what} after {x} | if it is {x}, what comes next |
            name the {what} after {x} | tell me the {what} after {x}""")
        return [typed(d, asked), d.say(f"{y} comes after {names[i]}. | After {names[i]} comes {y}. "
                                       f"| {y}. | It is {y}.")]
    y = names[i - 1]
    asked = d.say(f"""what comes before {x} | which {what} comes before {x} | {what} before {x} |
        what is the {what} before {x} | before {x} comes | the {what} before {x} is | tell me the
        {what} before {x} | name the {what} before {x}""")
    return [typed(d, asked), d.say(f"{y} comes before {names[i]}. | Before {names[i]} comes {y}. "
                                   f"| {y}. | It is {y}.")]

def days_and_dates(d):
    i = d.number(0, 11)
    month, days = banks.MONTHS[i], banks.DAYS_IN[i]
    x = name(month)
    how = f"{days} days" if i != 1 else "28 days, and 29 in a leap year"
    yield d.say(f"""how many days has {x} | how many days does {x} have | how many days are in {x}
        | how many days are there in {x} | days in {x} | how long is {x} | number of days in
        {x}"""), d.say(f"{month} has {how}. | {month} has {how}. | It has {how}.")
    nth = ORDINALS[i]
    yield d.say(f"""what is the {nth} month | which month is the {nth} | {nth} month of the year |
        the {nth} month is | which is month number {i + 1} | what's the {nth} month of the
        year"""), d.say(
        f"{month} is the {nth} month. | The {nth} month is {month}. | {month}.")
    season = banks.SEASON_OF[i]
    yield d.say(f"""in which season is {x} | which season is {x} in | what season is {x} | is it
        cold in {x} | is {x} in winter or summer | season of {x}"""), d.say(
        f"In the north {month} is in {season}. | {month} is in {season}, in the north of the "
        "earth.")
    j = d.number(0, 6)
    day, nth = banks.DAYS[j], ORDINALS[j]
    yield d.say(f"""what is the {nth} day of the week | which day is the {nth} | {nth} day of the
        week"""), d.say(f"If the week begins on Monday, it is {day}. | {day}, if we count from "
                        "Monday.")
    weekend = j > 4
    x = name(day)
    yield d.say(f"is {x} a weekend day | is {x} on the weekend | does {x} belong to the weekend"), (
        d.say(f"Yes, {day} is on the weekend.") if weekend else
        d.say(f"No, {day} is no weekend day. | No, the weekend is Saturday and Sunday."))
    for n, what, in_what in ((7, "days", "a "
                                         "week"), (12, "months", "a "
                                                                   "year"), (4, "seasons", "a "
                                                                                             "year")):
        yield d.say(f"""how many {what} are in {in_what} | how many {what} does {in_what} have | how
            many {what} are there in {in_what} | how many {what} has {in_what} | number of {what} in
            {in_what}"""), d.say(f"{capitalized(in_what)} has {in_words(n)} {what}. | There are "
                                 f"{in_words(n)} {what} in {in_what}. | {n}.")
    for what, names in (("days of the week", banks.DAYS), ("months", banks.MONTHS),
                        ("seasons", SEASONS), ("days on the weekend", banks.DAYS[5:])):
        yield d.say(f"""name the {what} | list the {what} | what are the {what} | tell me the {what}
            | which are the {what} | say the {what}"""), capitalized(listed(names)) + "."
    for q, x in (("first "
                  "month", "January"), ("last "
                                              "month", "December"), ("shortest "
                                                                          "month", "February"),
                 ("coldest season", "winter"), ("warmest season", "summer")):
        yield d.say(f"what is the {q} | which is the {q} | {q} of the year | what's the {q} of the "
                    f"year"), d.say(f"The {q} is {x}. | {capitalized(x)} is the {q}. | It is {x}.")

@kind(9)
def calendar(d):
    if d.chance(0.45):
        what, names = d.pick([("day", banks.DAYS), ("month", banks.MONTHS), ("day", banks.DAYS),
                              ("season", SEASONS)])
        return after_or_before(d, names, what)
    asked, answer = d.pick(list(days_and_dates(d)))
    return [typed(d, asked), answer]

def about_numbers(d):
    n, m = d.number(1, 30), d.number(1, 12)
    yield d.say(f"""what comes after {n} | what number comes after {n} | which number follows {n} |
        the number after {n} | {n} and then | next number after {n} | after {n} comes"""), d.say(
        f"{n + 1} comes after {n}. | After {n} comes {n + 1}. | {n + 1}.")
    yield d.say(f"what comes before {n} | which number comes before {n} | the number before "
                f"{n}"), d.say(
        f"{n - 1} comes before {n}. | Before {n} comes {n - 1}. | {n - 1}.")
    k = d.number(2, 99)
    odd = "odd" if k % 2 else "even"
    yield d.say(f"""is {k} odd or even | is {k} even or odd | {k}: even or odd | is the number {k}
        odd or even | even or odd:
        {k}"""), d.say(f"{k} is {odd}. | {k} is an {odd} number. | It is "
                                           f"{odd}.")
    guess = d.pick(["odd", "even"])
    yield d.say(f"is {k} {guess} | is {k} an {guess} number | {k} is {guess}, right"), (
        f"{'Yes' if guess == odd else 'No'}, {k} is {odd}.")
    x, y = d.some(range(1, 100), 2)
    yield d.say(f"""which is bigger, {x} or {y} | what is more, {x} or {y} | is {x} bigger than {y},
        or {y} bigger | which number is larger, {x} or {y} | the bigger number of {x} and {y} |
        bigger: {x} or
        {y}"""), d.say(f"{max(x, y)} is bigger than {min(x, y)}. | {max(x, y)} is bigger. "
                          f"| {max(x, y)}.")
    yield d.say(f"""which is smaller, {x} or {y} | what is less, {x} or {y} | which number is
        smaller, {x} or {y} | the smaller number of {x} and {y}"""), d.say(
        f"{min(x, y)} is smaller than {max(x, y)}. | {min(x, y)} is smaller. | {min(x, y)}.")
    yield d.say(f"is {x} bigger than {y} | is {x} more than {y} | is {x} greater than {y}"), d.say(
        f"Yes, {x} is bigger than {y}." if x > y else f"No, {x} is smaller than {y}.")
    w = d.number(0, 130)
    yield d.say(f"""how do you write {w} in words | {w} in words | write {w} in words | write the
        number {w} as a word | how do i spell the number {w} | spell the number {w} | say {w} in
        words"""), (
        d.say(f"{w} in words is {in_words(w)}. | {capitalized(in_words(w))}. | It is "
              f"{in_words(w)}."))
    said = name(in_words(w))
    yield d.say(f"""{said} in digits | write {said} as a number | write {said} in digits | what
        number is {said}"""), d.say(f"{w}. | It is {w}. | {capitalized(in_words(w))} is {w}.")
    top = d.number(4, 20)
    yield d.say(f"""count to {top} | count from 1 to {top} | can you count to {top} | say the
        numbers from 1 to {top} | please count up to {top} | count to {in_words(top)}"""), (
        ", ".join(map(str, range(1, top + 1))) + ".")
    yield d.say(f"""count down from {m + 3} | count backwards from {m + 3} | count from {m + 3} down
        to 1 | countdown from {m + 3}"""), ", ".join(map(str, range(m + 3, 0, -1))) + "."
    step = d.pick([2, 3, 5, 10])
    yield d.say(f"""count by {step}s to {10 * step} | count in steps of {step} | count by
        {step}s"""), ", ".join(str(step * i) for i in range(1, 11)) + "."
    yield d.say(f"""{m} in roman numerals | what is {m} in roman numerals | roman numeral for {m} |
        write {m} as a roman
        number"""), d.say(f"{m} is {ROMAN[m - 1]} in Roman numerals. | "
                                         f"{ROMAN[m - 1]}.")
    start, by = d.number(1, 9), d.pick([1, 2, 3, 5, 10])
    series = [start + by * i for i in range(5)]
    shown = ", ".join(map(str, series[:4]))
    yield d.say(f"""what comes next: {shown} | {shown}, ... | continue: {shown} | what is the next
        number: {shown} | next number in
        {shown}"""), d.say(f"{series[4]}. | The next number is "
                                                    f"{series[4]}. | {series[4]} comes next.")

@kind(8)
def numbers(d):
    asked, answer = d.pick(list(about_numbers(d)))
    return [typed(d, asked), answer]

COLOURS, MIXES = rows(banks.COLOURS), rows(banks.MIXES)

@kind(4)
def colours(d):
    color = d.pick(["color", "colour"])
    if d.chance(0.15):
        two, both = d.deal(MIXES)
        one, other = two.split(" and ")
        if d.chance(0.5):
            one, other = other, one
        asked = d.say(f"""what do {one} and {other} make | what {color} do you get from {one} and
            {other} | mix {one} and {other} | {one} and {other} make | {one} + {other} | if i mix
            {one} and {other} | what happens when you mix {one} with {other}""")
        return [typed(d, asked), d.say(f"{capitalized(one)} and {other} make {both}. | You get "
                                       f"{both}.")]
    thing, value = d.deal(COLOURS)
    subject, verb = thing.rsplit(" ", 1)
    asked = d.say(f"""what {color} {verb} {subject} | which {color} {verb} {subject} | {color} of
        {subject} | what {color} has {subject} | what is the {color} of {subject} | tell me the
        {color} of {subject} | what's the {color} of {subject} | {subject}: what {color} | which
        {color} does {subject} have | do you know the {color} of {subject} | {subject} {verb} what
        {color}""")
    return [typed(d, asked), d.say(f"""{capitalized(thing)} {value}. | {capitalized(thing)} {value}.
        | {capitalized(value)}. | The color of {subject} is {value}.""")]

OPPOSITES = [*dict(pairs(banks.OPPOSITES)).items()]

def ask_opposite(d, word):
    x = name(d.pick([word, f'"{word}"', word]))
    return ask_what(d, "the opposite of "
                       f"{x}", f"""{x} opposite | opposite of {x} | what is the
        contrary of {x} | antonym of {x} | which word is the opposite of {x} | {x} is the opposite
        of | if something is not {x}, it is | not {x} but""")

def opposite_answer(d, word, other):
    return d.say(f"""The opposite of {word} is {other}. | The opposite of {word} is {other}. | The
        opposite of "{word}" is "{other}". | It is {other}. | {capitalized(other)}.""")

@kind(6)
def opposites(d):
    word, other = d.deal(OPPOSITES)
    return [ask_opposite(d, word), opposite_answer(d, word, other)]

ANIMALS = rows(banks.ANIMALS)
SOUNDS = [(x, sound) for x, sound, *_ in ANIMALS if sound]

def ask_sound(d, animal):
    x = animal
    return typed(d, d.say(f"""what does {a(x)} say | what does the {x} say | what sound does {a(x)}
        make | what noise does {a(x)} make | how does {a(x)} go | the {x} says | sound of {a(x)} |
        {x} sound | how does {a(x)} sound | which sound does the {x} make | what noise comes from
        {a(x)}"""))

def sound_answer(d, animal, sound):
    verbs = """neigh bleat hoot roar growl howl bark croak hiss buzz squeak trumpet chatter coo
        click screech squawk honk cluck""".split()
    if sound in verbs:
        does = sound + ("es" if sound[-2:] in ("ss", "zz", "ch") else "s")
        return d.say(f"{capitalized(a(animal))} {does}. | The {animal} {does}. "
                     f"| {capitalized(a(animal))} {does}.")
    return d.say(f"""The {animal} says "{sound}". | {capitalized(a(animal))} says "{sound}".
        | {capitalized(sound)}!""")

def about_animal(d, animal):
    x, sound, young, legs, home, food, family = animal
    ax = a(x)
    if sound:
        yield ask_sound(d, x), sound_answer(d, x, sound)
    if young and young not in ("larva", "infant"):
        asked = d.say(f"""what is a baby {x} called | what do you call a baby {x} | what is the
            young of {ax} | name of a young {x} | baby {x} name | a young {x} is called | how is a
            baby {x} called | what are young {x} babies called | what do we call the child of {ax} |
            what's a baby {x}""")
        yield typed(d, asked), d.say(f"""A baby {x} is called {a(young)}. | A young {x} is
            {a(young)}. | It is called {a(young)}. | {capitalized(a(young))}.""")
    if legs:
        number = "no" if legs == "0" else in_words(int(legs))
        asked = d.say(f"""how many legs does {ax} have | how many legs has {ax} | number of legs of
            {ax} | how many legs does the {x} have | legs of {ax} | {x} legs | how many feet has
            {ax} | does {ax} have legs | how many legs are on {ax}""")
        yes = "has no legs" if legs == "0" else f"has {number} legs"
        extra = {"octopus": ", but eight arms", "crab": ", two of them with claws",
                 "bat": " and two wings"}.get(x, "")
        yield typed(d, asked), d.say(f"{capitalized(ax)} {yes}{extra}. | {capitalized(ax)} "
                                     f"{yes}{extra}. | It {yes}{extra}.")
    asked = d.say(f"""where does {ax} live | where do i find {ax} | where does the {x} live | home
        of the {x} | in what place does {ax} live | where is {ax} at home""")
    yield typed(d, asked), d.say(f"{capitalized(ax)} lives {home}. | The {x} lives {home}. "
                                 f"| It lives {home}.")
    asked = d.say(f"""what does {ax} eat | what does the {x} eat | food of {ax} | what do i feed
        {ax} | what does {ax} like to eat | {x} food | what is the food of the {x}""")
    yield typed(d, asked), d.say(f"{capitalized(ax)} eats {food}. | The {x} eats {food}. "
                                 f"| It eats {food}.")
    if family != x:
        asked = d.say(f"""what kind of animal is {ax} | is {ax} a mammal | is {ax} a bird | what is
            {ax} | what sort of animal is the {x} | is {ax} a fish or a mammal | what class of
            animals does {ax} belong to""")
        start = ""
        if found := re.match(r"is an? .* a (mammal|bird)$", asked):
            start = "Yes, " if found[1] == family else "No, "
        answer = d.say(f"{ax} is {a(family)}. | the {x} is {a(family)}.")
        yield typed(d, asked), start + answer if start else capitalized(answer)

@kind(12)
def animals(d):
    return list(d.pick(list(about_animal(d, d.deal(ANIMALS)))))

PLANETS = rows(banks.PLANETS)

@kind(3)
def planets(d):
    planet, place, about = d.deal(PLANETS)
    nth = ORDINALS[int(place) - 1]
    x = name(planet)
    about_it = about.removeprefix("the ")
    cards = [
        (f"""what is the {nth} planet from the sun | which planet is the {nth} from the sun | {nth}
            planet | name the {nth} planet | which planet is number {place}""",
         f"{planet} is the {nth} planet from the sun. | The {nth} planet is {planet}."),
        (f"""what is {x} | tell me about {x} | what kind of planet is {x} | what do you know about
            {x} | is {x} a planet | what's {x} | who is {x} among the planets""",
         f"{planet} is {about}. | {planet} is {about}."),
        (f"what place has {x} from the sun | what number is {x} from the sun | which planet is {x} "
         f"counted from the sun",
         f"{planet} is the {nth} planet from the sun."),
        ("""how many planets are there | how many planets go around the sun | number of planets |
            how many planets has the sun | how many planets does the solar system have""",
         "There are eight planets. | Eight planets go around the sun. | Eight."),
        ("""name the planets | list the planets | what are the planets | tell me the planets | which
            planets are there | name all planets | planets in order""",
         listed([p for p, *_ in PLANETS]) + ".")]
    if place in "4568" or planet == "Mercury" or planet == "Venus":
        what = re.split(r"[,]| and ", about_it)[0]
        what = re.sub(r"^planet (with|from|on) ", r"planet \1 ", what)
        cards += [(f"""which planet is {'the ' + what} | what is the {what} | what planet is the
            {what} | what's the {what} | name the {what}""" if planet != "Saturn" else
                   "which planet has rings | which planet has the great rings | what planet has "
                   "rings",
                   f"{planet} is {about}. | It is {planet}. | {planet}.")]
    asked, answer = d.pick(cards)
    return [typed(d, d.say(asked)), d.say(answer)]

UNITS = rows(banks.UNITS)

def singular(many):
    return {"feet": "foot", "inches": "inch", "pence": "penny", "centuries": "century"}.get(
        many, many.removesuffix("s"))

@kind(4)
def units(d):
    many, one, n = d.deal(UNITS)
    n = int(n)
    ax = "an " + one if one in ("hour", "English alphabet") else a(one)
    times = d.pick([1, 1, 1, 2, 3, 4, 5, 10])
    plurals = {"foot": "feet", "century": "centuries", "millennium": None, "English alphabet": None,
               "quarter of an hour": None, "half hour": None, "circle": None, "right angle": None,
               "leap year": None, "year": "years" if many not in ("days", "seasons") else None}
    more = plurals.get(one, one + "s")
    if times > 1 and more and n * times <= 1000:
        asked = d.say(f"""how many {many} are in {times} {more} | how many {many} are {times} {more}
            | how many {many} have {times} {more} | {times} {more} in {many} | {times} {more} are
            how many {many}""")
        return [typed(d, asked), d.say(f"{capitalized(in_words(times))} {more} are {n * times:,} "
                                       f"{many}. | {times} {more} are {n * times:,} {many}.")]
    asked = d.say(f"""how many {many} are in {ax} | how many {many} does {ax} have | how many {many}
        has {ax} | {many} in {ax} | how many {many} make {ax} | number of {many} in {ax} | how many
        {many} are there in {ax} | {ax} has how many {many} | tell me how many {many} are in {ax} |
        one {one} is how many {many}""")
    return [typed(d, asked), d.say(f"""{capitalized(ax)} has {n:,} {many}. | There are {n:,} {many}
        in {ax}. | There are {n:,} {many} in {ax}. | {n:,}.""")]

COMPARISONS = rows(banks.COMPARISONS)
CONVERSE = dict(
    bigger="smaller", stronger="weaker", taller="smaller", higher="lower", faster="slower",
    heavier="lighter", longer="shorter", hotter="colder", warmer="colder", sourer="sweeter",
    sweeter="less sweet", darker="brighter", **{"more expensive": "cheaper"})

@kind(5)
def comparisons(d):
    more, less, way = d.deal(COMPARISONS)
    bare = more[0].isupper() or more in ("gold", "fire", "honey", "night", "summer", "iron")
    one = more if bare else a(more).replace("a hour", "an hour")
    other = less if less[0].isupper() or less in (
        "ice", "bread", "winter", "noon", "copper", "cork", "fire") else a(less)
    if {"sun", "moon", "earth"} & {more, less}:
        one = "the " + more
        other = other if less == "fire" else "the " + less
    if more == "sea" or more == "lake" and less == "pond":
        one = "a " + more
    x, y = (one, other) if d.chance(0.5) else (other, one)
    back = CONVERSE[way]
    cards = [(f"""what is {way}, {x} or {y} | which is {way}, {x} or {y} | {way}: {x} or {y} | who
        is {way}, {x} or {y} | is {x} {way} or {y} | tell me what is {way}, {x} or {y}""",
              f"{one} is {way} than {other}. | {one} is {way} than {other}. | {one}."),
             (f"is {one} {way} than {other} | {one} is {way} than {other}, right",
              f"yes, {one} is {way} than {other}. | yes."),
             (f"is {other} {way} than {one} | {other} is {way} than {one}, right",
              f"no, {one} is {way} than {other}.")]
    if " " not in back:
        cards.append((f"what is {back}, {x} or {y} | which is {back}, {x} or {y}",
                      f"{other} is {back} than {one}."))
    asked, answer = d.pick(cards)
    return [typed(d, d.say(asked)), capitalized(d.say(answer))]

# ==== Sums ====

def problem(d):
    """(a question, the result as a sentence, the result)."""
    sign = d.pick("+++--**/")
    big = d.pick([10, 10, 20, 50])
    x, y = d.number(0, big), d.number(1, big)
    if sign == "*":
        x, y = d.number(1, 12), d.number(1, 12)
    if sign == "/":
        y, z = d.number(1, 10), d.number(1, 10)
        x = y * z
    if sign == "-" and x < y:
        x, y = y, x
    result = {"+": x + y, "-": x - y, "*": x * y, "/": x // y if y else 0}[sign]
    word = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}[sign]
    in_text = d.chance(0.2)
    p, q = (name(in_words(x)), name(in_words(y))) if in_text else (str(x), str(y))
    symbol = {"+": "+", "-": "-", "*": d.pick(["*", "x"]), "/": "/"}[sign]
    short = f"{x}{symbol}{y}", f"{x} {symbol} {y}", f"{x} {symbol} {y} =", f"{x}{symbol}{y}=?"
    asked = [f"what is {p} {word} {q}", f"how much is {p} {word} {q}", f"{p} {word} {q}",
             f"what's {p} {word} {q}", f"calculate {p} {word} {q}", f"{p} {word} {q} is",
             f"{p} {word} {q} equals", f"tell me {p} {word} {q}", f"do you know {p} {word} {q}",
             f"what is {short[0]}", f"what is {short[1]}", f"how much is {short[1]}", *short,
             f"solve {short[1]}", f"can you calculate {short[1]}", f"compute {short[1]}"]
    extra = {"+": [f"add {p} and {q}", f"what is the sum of {p} and {q}", f"sum of {p} and {q}",
                   f"{p} and {q} together", f"what do {p} and {q} make"],
             "-": [f"take {q} from {p}", f"subtract {q} from {p}", f"{p} take away {q}",
                   f"what is left if you take {q} from {p}"],
             "*": [f"multiply {p} by {q}", f"the product of {p} and {q}", f"multiply {p} and {q}"],
             "/": [f"divide {p} by {q}", f"what do you get if you divide {p} by {q}"]}[sign]
    text = d.pick(extra) if d.chance(0.3) else d.pick(asked)
    answer = d.say(f"{x} {word} {y} is {result}. | {x} {word} {y} is {result}. | {x} {word} {y} is "
                   f"{result}. | It is {result}. | {result}. | That is {result}. "
                   f"| {x} {symbol} {y} = {result}")
    return text, answer, result

def story_problem(d):
    x, y = d.number(2, 12), d.number(1, 10)
    who, other = d.some(NAMES, 2)
    thing = d.pick("apples pears coins books balls eggs cookies marbles stamps nuts".split())
    if d.chance(0.5):
        return (d.say(f"""if i have {x} {thing} and get {y} more, how many do i have | {who} has {x}
            {thing} and buys {y} more. how many {thing} does {who} have | i have {x} {thing} and
            {other} gives me {y}. how many have i now"""), d.say(
            f"{x} plus {y} is {x + y}: {x + y} {thing}. | That makes {x + y} {thing}."))
    x += y
    return (d.say(f"""if i have {x} {thing} and lose {y}, how many are left | {who} has {x} {thing}
        and gives {y} to {other}. how many are left | i had {x} {thing} and ate {y}. how many are
        left""".replace("ate", "sold" if thing not in ("apples", "pears", "eggs", "cookies", "nuts")
                    else "ate")), d.say(
        f"{x} minus {y} is {x - y}: {x - y} {thing}. | Then {x - y} {thing} are left."
        .replace("1 " + thing + " are", "1 " + thing[:-1] + " is")))

@kind(24)
def sums(d):
    if d.chance(0.12):
        asked, answer = story_problem(d)
        return [typed(d, asked), answer]
    if d.chance(0.15):
        n = d.number(1, 20)
        asked, answer = d.pick([
            (f"""what is half of {2 * n} | half of {2 * n} | halve {2 * n} | what's the half of
                {2 * n}""", f"Half of {2 * n} is {n}. | {n}."),
            (f"""what is double {n} | double {n} | twice {n} | what is twice {n} | double of
                {n}""", f"Twice {n} is {2 * n}. | {2 * n}."),
            (f"""what is {n} squared | {n} squared | square of {n} | what is the square of
                {n}""", f"{n} squared is {n * n}. | {n * n}.")])
        return [typed(d, d.say(asked)), d.say(answer)]
    asked, answer, _ = problem(d)
    return [typed(d, asked, alone=d.chance(0.4)), answer]

# ==== Books and plays ====

PLAYS, BOOKS = rows(banks.PLAYS), rows(banks.BOOKS)
LINES, WITHOUT_COMMA = rows(banks.LINES), phrases(banks.WITHOUT_COMMA)
WROTE = collections.defaultdict(list)
for book, author, _ in BOOKS:
    WROTE[author].append(book)
AUTHORS = [*WROTE]

@kind(6)
def plays(d):
    play, sort, year, people, story = d.deal(PLAYS)
    x = name(play)
    asked, answer = d.pick([
        (f"""who wrote {x} | who is the author of {x} | author of {x} | {x} was written by | by whom
            is {x} | who wrote the play {x} | did shakespeare write {x}""",
         f"""William Shakespeare wrote {play}. | {play} is by William Shakespeare. | Shakespeare
             wrote {play}."""),
        (f"""what is {x} | what is {x} about | what happens in {x} | tell me about {x} | what's {x}
            about | story of {x} | summarize {x} | the plot of {x} | what kind of story is {x} |
            explain {x} briefly""",
         f"""{play} is a {sort} by Shakespeare. {story} | {story} | In {play}: {story}"""),
        (f"""is {x} a comedy or a tragedy | what kind of play is {x} | is {x} a tragedy | is {x} a
            comedy | what genre is
            {x}""", f"{play} is a {sort}{' play' if sort == 'history' else ''}. "),
        (f"""who is in {x} | characters in {x} | name characters of {x} | who are the people in {x}
            | which persons are in {x} | main characters of {x} | who plays a part in {x}""",
         f"""In {play} there are {people}. | {people}, among others."""),
        (f"""when was {x} written | when did shakespeare write {x} | how old is {x} | year of {x} |
            from what year is
            {x}""", f"Shakespeare wrote {play} about {year}. | About {year}.")])
    return [typed(d, d.say(asked)), capitalized(d.say(answer))]

def ended(text):
    return text if text[-1] in "?!" else text + "."

def whole_line(start, rest):
    joint = " " if start in WITHOUT_COMMA else ", "
    return ended(start + joint + rest)

@kind(4)
def lines(d):
    start, rest, where, who = d.deal(LINES)
    x, whole = name(start), whole_line(start, rest)
    asked, answer = d.pick([
        (f"""{x}, | {x} ... | continue: {x} | {x}... | how does it go on: {x} | complete this line:
            {x} | finish the quote: {x} | what comes after {x} | {x}""",
         f"{whole} | ... {ended(rest)} | {whole} That is from {where}."),
        (f"""who says {x} | where is {x} from | which play has {x} | from which play is {x} | who
            said {x} | what is {x} from | where does the line {x} come from | {x} is from which
            play""",
         f"It is from {where}. | That is from {where}. | {capitalized(who)} says it in {where}."
         if where != "Sonnet 18" else "It is from Shakespeare's Sonnet 18.")])
    return [typed(d, d.say(asked), alone=d.chance(0.5)), d.say(answer)]

@kind(2)
def quotes(d):
    start, rest, where, _ = d.deal(LINES)
    whole = whole_line(start, rest)
    asked = d.say("""quote shakespeare | a line of shakespeare | give me a shakespeare quote | say a
        famous line of shakespeare | tell me a line from a play | do you know a quote by shakespeare
        | recite some shakespeare | shakespeare quote please | famous quote | give me a famous quote
        | tell me a quote | quote something | i want a quote | recite a famous line | a quote from
        shakespeare""")
    return [typed(d, asked),
            d.say(f'{whole} That is from {where}. | "{whole}" ({where}) | From {where}: "{whole}"')]

@kind(7)
def books(d):
    book, author, about = d.deal(BOOKS)
    x, y = name(book), name(author)
    mine = WROTE[author]
    asked, answer = d.pick([
        (f"""who wrote {x} | who is the author of {x} | author of {x} | {x} was written by | by whom
            is {x} | who wrote the book {x} | do you know who wrote {x} | {x} author | which author
            wrote
            {x}""", f"{author} wrote {book}. | {book} is by {author}. | It is by {author}. "
                    f"| {author}.".replace("..", ".")),
        (f"""who wrote {x} | who is the author of {x} | who is {x} by""",
         f"{author} wrote {book}. | {book} is by {author}."),
        (f"""what is {x} about | tell me about {x} | what is {x} | story of {x} | what happens in
            {x} | do you know the book {x} | have you read {x} | what's {x} about""",
         f"""{book} by {author} is about {about}. | It is about {about}. | {book} is a work by
             {author}, about {about}."""),
        (f"""what did {y} write | what books did {y} write | name a book by {y} | books by {y} | who
            is {y} | who was {y} | tell me about {y} | a work by {y} | what is {y} known for""",
         f"{author} wrote {listed(mine)}. | {author} is known for {listed(mine)}.")])
    return [typed(d, d.say(asked)), d.say(answer)]

# ==== Small words ====

LISTS = [(what, words.split(", ")) for what, words in rows(banks.LISTS)]
SINGULAR = {"fish": "fish", "furniture": "piece of furniture", "berries": "berry",
            "countries": "country", "cities": "city", "clothes": "piece of clothing",
            "body parts": "body part", "plays by Shakespeare": "play by Shakespeare"}

@kind(7)
def lists(d):
    what, words = d.deal(LISTS)
    n = d.number(1, min(5, len(words)))
    if n == 1:
        one = SINGULAR.get(what, what.removesuffix("s"))
        x = d.pick(words)
        asked = d.say(f"""name {a(one)} | give me {a(one)} | tell me {a(one)} | say {a(one)} | name
            any {one} | name one {one} | an example of {a(one)} | {a(one)} please""")
        return [typed(d, asked), capitalized(d.say(f"{x}. | {x}, for example. | how about {x}?"))]
    number = d.pick([in_words(n), str(n)])
    asked = d.say(f"""name {number} {what} | list {number} {what} | give me {number} {what} | tell
        me {number} {what} | {number} {what} | {number} {what} please | i need {number} {what} | can
        you name {number} {what} | what are {number} {what} | make a list of {number} {what} | write
        down {number} {what} | say {number} {what} | name me {number} {what} | which {number} {what}
        do you know | examples of {what}: {number} please""")
    chosen = d.some(words, n)
    texts = [typed(d, asked), d.pick([capitalized(listed(chosen)) + ".",
                                      f"{capitalized(in_words(n))} {what} are {listed(chosen)}."])]
    left = [x for x in words if x not in chosen]
    if len(left) > 2 and d.chance(0.35):
        k = d.number(1, 2)
        texts.append(typed(d, d.say(f"{in_words(k)} more | and {in_words(k)} more | give me "
                                    f"{in_words(k)} more | {k} more please"), alone=True))
        texts.append(capitalized(listed(d.some(left, k))) + ".")
    return texts

RHYMES = [x.split() for x in phrases(banks.RHYMES)]

@kind(3)
def rhymes(d):
    word, *others = d.some(group := d.deal(RHYMES), len(group))
    x = name(word)
    asked = d.say(f"""what rhymes with {x} | give me a rhyme for {x} | rhyme for {x} | a word that
        rhymes with {x} | which word rhymes with {x} | rhymes with {x} | find a rhyme for {x} | name
        a word that rhymes with {x} | what word rhymes on {x} | tell me a rhyme for {x} | {x} rhymes
        with""")
    y, z = others[0], others[-1]
    return [typed(d, asked), d.say(f"""{capitalized(y)} rhymes with {word}. | {word} rhymes with
        {y}. | {word} rhymes with {y} and {z}. | {y} and
        {z}.""" if y != z else f"{word} rhymes with "
                                                                           f"{y}.")
        .capitalize()]

PLURALS, PASTS = pairs(banks.PLURALS), pairs(banks.PASTS)

@kind(3)
def plurals(d):
    one, many = d.deal(PLURALS)
    x = name(d.pick([one, f'"{one}"']))
    return [ask_what(d, "the plural of "
                        f"{x}", f"""plural of {x} | one {x}, two | how do you say more
        than one {x} | more than one {x} is called | {x} plural | what is more than one {x}"""),
        d.say(f"The plural of {one} is {many}. | The plural of {one} is {many}. | It is {many}. "
              f"| One {one}, two {many}.")]

@kind(3)
def pasts(d):
    now, then = d.deal(PASTS)
    x = name(d.pick([now, f'"{now}"']))
    return [ask_what(d, "the past of "
                        f"{x}", f"""past tense of {x} | what is the past tense of {x} |
        {x} in the past | simple past of {x} | today i {x}, yesterday i | how do i put {x} into the
        past"""),
        d.say(f"The past of {now} is {then}. | The past tense of {now} is {then}. | It is {then}.")]

SENTENCES = rows(banks.SENTENCES)

@kind(3)
def sentences(d):
    word, sentence = d.deal(SENTENCES)
    x = name(d.pick([word, f'"{word}"']))
    asked = d.say(f"""make a sentence with {x} | use {x} in a sentence | write a sentence with the
        word {x} | a sentence with {x} | give me a sentence with {x} | put {x} into a sentence | can
        you use {x} in a sentence | example sentence for {x} | say something with the word {x} |
        write me a sentence with {x} | sentence with {x} please""")
    return [typed(d, asked), sentence]

# ==== Work with words ====

def word_in(d, w):
    """A word that is worked on: as it is, or between quotation marks."""
    return keep(d.pick([w, w, f'"{w}"', f"'{w}'"]))

def skill(weight, *, few=3, many=6):
    """Registers work on one word of `few` to `many` letters: (word, as asked) -> wordings."""
    words = [w for w in dict.fromkeys(banks.WORDS) if few <= len(w) <= many]

    def register(function):
        def draw(d):
            w = d.deal(words)
            asked, answer = function(d, w, word_in(d, w))
            return [typed(d, d.say(asked)), d.say(answer)]
        KINDS[function.__name__] = weight, draw
        return function
    return register

@skill(4, many=5)
def skill_reverse(d, w, x):
    back = w[::-1]
    return (f"""reverse {x} | reverse the word {x} | spell {x} backwards | write {x} backwards |
        what is {x} backwards | say {x} backwards | turn {x} around | {x} backwards | how do you
        write {x} backwards | what is {x} in reverse | reverse this word: {x} | can you reverse {x}
        | {x} reversed""",
        f'{back} | "{w}" backwards is "{back}". | Backwards it is "{back}". | {back}')

@skill(3.5, many=7)
def skill_spell(d, w, x):
    letters = "-".join(w)
    return (f"""spell {x} | spell the word {x} | how do you spell {x} | how is {x} spelled | spell
        {x} for me | how to spell {x} | can you spell {x} | spelling of {x} | what letters are in
        {x} | tell me how {x} is spelled | spell out {x} | spell this: {x}""",
        f'{letters} | "{w}" is spelled {letters}. | {letters.upper()}')

@skill(3, many=7)
def skill_count(d, w, x):
    n = len(w)
    return (f"""how many letters does {x} have | how many letters are in {x} | how long is the word
        {x} | count the letters in {x} | number of letters in {x} | how many letters has the word
        {x} | count letters: {x} | {x} has how many letters | letters in {x} | how many characters
        are in {x}""",
        f'"{w}" has {n} letters. | The word "{w}" has {n} letters. | It has {n} letters.')

@skill(1.5, few=4, many=8)
def skill_count_one(d, w, x):
    c = d.pick(w)
    n = w.count(c)
    times = {1: "once", 2: "twice", 3: "three times"}[n]
    verb, many = ("is", "") if n == 1 else ("are", "'s")
    return (f"""how many {c}'s are in {x} | how often is the letter {c} in {x} | how many times is
        {c} in {x} | count the letter {c} in {x} | how many letters {c} does {x} have | number of
        {c}'s in {x}""",
        f'The letter {c} is {times} in "{w}". | There {verb} {n} {c}{many} in "{w}".')

@skill(2.5, many=8)
def skill_first(d, w, x):
    return (f"""what is the first letter of {x} | first letter of {x} | with which letter does {x}
        begin | what letter does {x} start with | {x} starts with which letter | which letter comes
        first in {x} | what's the first letter in {x} | tell me the first letter of {x}""",
        f'The first letter of "{w}" is "{w[0]}". | "{w}" begins with {w[0]}. | It is {w[0]}.')

@skill(2.5, many=8)
def skill_last(d, w, x):
    return (f"""what is the last letter of {x} | last letter of {x} | with which letter does {x} end
        | what letter does {x} end with | {x} ends with which letter | which letter comes last in
        {x} | what's the last letter in {x} | tell me the last letter of {x}""",
        f'The last letter of "{w}" is "{w[-1]}". | "{w}" ends with {w[-1]}. | It is {w[-1]}.')

@skill(3, many=8)
def skill_upper(d, w, x):
    return (f"""write {x} in capital letters | {x} in capitals | uppercase {x} | {x} in uppercase |
        write {x} in big letters | put {x} in capitals | make {x} uppercase | capital letters: {x} |
        write the word {x} in capitals | can you write {x} in all caps | convert {x} to uppercase |
        all caps: {x}""",
        f"{w.upper()} | {w.upper()} | In capitals it is {w.upper()}.")

@skill(1.5, many=8)
def skill_lower(d, w, x):
    x = keep(w.upper())
    return (f"""write {x} in small letters | {x} in lowercase | lowercase {x} | put {x} in small
        letters | make {x} lowercase | convert {x} to lowercase | write {x} without capitals | small
        letters: {x}""",
        f"{w} | {w} | In small letters it is {w}.")

@skill(1.5, many=7)
def skill_vowels(d, w, x):
    n = sum(c in "aeiou" for c in w)
    return (f"""how many vowels are in {x} | how many vowels does {x} have | count the vowels in {x}
        | number of vowels in {x} | vowels in {x}""",
        f'"{w}" has {n} vowel{"s" if n != 1 else ""}. | There {"are" if n != 1 else "is"} {n} '
        f'vowel{"s" if n != 1 else ""} in "{w}".')

@skill(2, many=7)
def skill_repeat(d, w, x):
    n = d.number(2, 5)
    times = in_words(n) if d.chance(0.5) else str(n)
    return (f"""say {x} {times} times | write {x} {times} times | repeat {x} {times} times | {x}
        {times} times | repeat the word {x} {times} times | print {x} {times} times | can you say
        {x} {times} times""", " ".join([w] * n))

@skill(2.5, many=8)
def skill_echo(d, w, x):
    two = f"{w} {d.pick(banks.WORDS)}" if d.chance(0.5) else w
    y = keep(two)
    return (f"""repeat after me: {y} | say {y} | repeat this: {y} | say the following: {y} | write
        {y} | just say {y} | echo {y} | type {y} | copy this:
        {y}""", two)

def some_words(d, low, high):
    return d.some([w for w in dict.fromkeys(banks.WORDS) if len(w) < 7], d.number(low, high))

def word_list(d, words):
    return keep(d.pick([", ", ", ", " "]).join(words))

@kind(4)
def skill_sort(d):
    words = some_words(d, 2, 5)
    x = word_list(d, words)
    asked = d.say(f"""sort these words: {x} | sort {x} | put these words in alphabetical order: {x}
        | sort alphabetically: {x} | order these words: {x} | alphabetical order: {x} | sort the
        words {x} | can you sort these: {x} | sort this list: {x} | arrange in alphabetical order:
        {x} | sort by alphabet: {x}""")
    return [typed(d, asked), d.pick([", ".join(sorted(words)), ", ".join(sorted(words)),
                                     f"In order: {', '.join(sorted(words))}."])]

@kind(3)
def skill_sort_numbers(d):
    numbers = d.some(range(1, 30), d.number(3, 5))
    x = word_list(d, map(str, numbers))
    down = d.chance(0.25)
    asked = d.say(f"""sort {x} from large to small | sort from the largest to the smallest: {x} |
        order {x}, biggest
        first""" if down else f"""sort these numbers: {x} | sort {x} | put these
            numbers in order: {x} | order these numbers: {x} | sort the numbers {x} | sort from
            small to large: {x} | arrange {x} | can you sort {x}""")
    return [typed(d, asked), ", ".join(map(str, sorted(numbers, reverse=down)))]

@kind(2.5)
def skill_reverse_list(d):
    words = some_words(d, 2, 4)
    x = keep(", ".join(words))
    asked = d.say(f"""reverse this list: {x} | reverse the order: {x} | reverse the list {x} | put
        this list in reverse order: {x} | turn this list around: {x} | list these backwards: {x} |
        last one first: {x}""")
    return [typed(d, asked), ", ".join(words[::-1])]

@kind(2)
def skill_count_words(d):
    words = some_words(d, 2, 6)
    x = word_list(d, words)
    asked = d.say(f"""how many words are in this list: {x} | count the words: {x} | how many words:
        {x} | count these words: {x} | how many words do you see: {x} | number of words in:
        {x}""")
    n = len(words)
    return [typed(d, asked), d.say(f"There are {n} words. | {n} words. | There are {in_words(n)} "
                                   f"words. | I count {n} words.")]

@kind(2)
def skill_longest(d):
    words = some_words(d, 2, 4)
    by_length = sorted(words, key=len)
    while len(by_length[-1]) == len(by_length[-2]) or len(by_length[0]) == len(by_length[1]):
        words = some_words(d, 2, 4)
        by_length = sorted(words, key=len)
    x = word_list(d, words)
    way, y = d.pick([("longest", by_length[-1]), ("shortest", by_length[0])])
    asked = d.say(f"""which word is the {way}: {x} | what is the {way} word: {x} | find the {way}
        word: {x} | {way} word of {x} | which of these is the {way} word: {x} | the {way} of these
        words: {x}""")
    return [typed(d, asked), d.say(f'The {way} word is "{y}". | {y} | The {way} is {y}.')]

@kind(2.5)
def skill_extreme(d):
    numbers = d.some(range(1, 60), d.number(3, 5))
    x = word_list(d, map(str, numbers))
    way = d.pick(["largest", "biggest", "smallest"])
    y = min(numbers) if way == "smallest" else max(numbers)
    asked = d.say(f"""which number is the {way}: {x} | what is the {way} number: {x} | find the
        {way} number: {x} | {way} number of {x} | the {way} of {x} | which is the {way}: {x} | pick
        the {way}: {x}""")
    return [typed(d, asked), d.say(f"The {way} number is {y}. | {y} | {y} is the {way}.")]

# ==== Jokes and riddles ====

JOKES, RIDDLES = rows(banks.JOKES), rows(banks.RIDDLES)
ASK_JOKE = """tell me a joke | a joke please | joke | do you know a joke | make me laugh | tell a
 joke | say something funny | give me a joke | another joke | can you tell me a joke | i want a joke
 | tell me something funny | know any jokes | tell me a good joke | a short joke | one joke please |
 crack a joke | tell me a bad joke | tell us a joke | i need a laugh | a funny joke | tell me a kids
 joke | got a joke""".replace("\n", "")
LAUGHS = """haha | lol | hahaha | funny | good one | nice | :D | not funny | that was bad | i don't
 get it | very funny | ha | lmao | hehe | ok | that's an old one | boring |
 rofl""".replace("\n", "")

@kind(6)
def jokes(d):
    joke, end = d.deal(JOKES)
    texts = [typed(d, d.say(ASK_JOKE))]
    how = d.number(0, 5)
    if how < 3:
        return [*texts, f"{joke} {end}"]
    if how == 3:
        guess = d.say("why | i don't know | what | no idea | tell me | how | idk | i give up | "
                      "dunno")
        return [*texts, joke, typed(d, guess, alone=True), end]
    texts.append(f"{joke} {end}")
    if how == 4:
        laugh = d.say(LAUGHS)
        reply = "I am glad that you like it! [Another one|One more|Shall I tell another]?"
        if laugh in ("not funny", "that was bad", "boring", "that's an old one"):
            reply = "[I am sorry|Well, I am no comedian]. [Shall I try another|Another]?"
        if laugh == "i don't get it":
            reply = "[It plays with words|The end is a play on words]. [Another|Another one]?"
        return [*texts, typed(d, laugh, alone=True), d.fill(reply)]
    joke, end = d.deal(JOKES)
    more = d.say("another | another one | one more | tell me another one | more | again | next | "
                 "another joke | a better one | a new one please")
    return [*texts, typed(d, more, alone=True), f"{joke} {end}"]

@kind(4)
def riddles(d):
    riddle, answer = d.deal(RIDDLES)
    if d.chance(0.3):
        return [typed(d, d.say([riddle[0].lower() + riddle[1:].removesuffix("?")])),
                d.pick([answer, answer.removesuffix(".") + "!"])]
    asked = d.say("""tell me a riddle | riddle | give me a riddle | a riddle please | do you know a
        riddle | ask me a riddle | i want a riddle | ask me something | quiz me | let's do riddles |
        riddle me this | another riddle | test me | can you give me a riddle | a short riddle |
        riddle please""")
    how = d.number(0, 2)
    short = answer.removesuffix(".")
    if how == 0:
        guess, reply = d.say("i don't know | no idea | tell me | i give up | idk | what is it | "
                             "what's the answer | dunno | hm, no idea"), f"It is: {short.lower()}."
        if short[0:4] == "Your":
            reply = f"It is {short.lower()}."
    elif how == 1:
        guess = d.pick([short.lower(), f"is it {short.lower()}", f"{short.lower()}?"])
        reply = d.say("[Right|Yes|Correct]! [Well done|That is it|You are good at this].")
    else:
        wrong = d.pick([x for _, x in RIDDLES if x != answer]).removesuffix(".").lower()
        guess = d.pick([wrong, f"is it {wrong}", f"{wrong}?"])
        reply = d.say("[No|Not quite|A good guess, but no]: [it is|I meant] " + short.lower() + ".")
    return [typed(d, asked), riddle, typed(d, guess, alone=True), reply]

# ==== Stories ====

HEROES = rows(banks.HEROES)
PLOTS, THING_PLOTS = headed(banks.PLOTS), headed(banks.THING_PLOTS)
THINGS, VERSE_THINGS = phrases(banks.THINGS), phrases(banks.VERSE_THINGS)
ONCE = wordings(banks.ONCE)
GIVEN = {"he": banks.BOYS, "she": banks.GIRLS}
PRONOUNS = {"he": ("his", "him"), "she": ("her", "her")}
CAST = [(hero, plot) for hero in HEROES for plot in PLOTS
        if plot[0] in ([hero[2]] if hero[2] == "sea" else [hero[2], "any"])]
FRIENDS = [x for x, _, sort in HEROES if sort == "animal" and x != "dragon"]

def told(d, plot, hero, called=""):
    """The story of a plot with its people put in: [sentences of a line, ...]."""
    who, he, _ = hero
    his, him = PRONOUNS[he]
    small = "" if " " in who else d.pick(["little ", "", "young ", "small ", ""])
    ax = a(small + who) + (f" named {called}" if called else "")
    friend = d.pick([x for x in FRIENDS if x != who])
    slots = dict(Once=d.pick(ONCE), a=ax, A=capitalized(ax), the="the " + who, The="The " + who,
                 he=he, He=he.title(), his=his, him=him)
    slots |= {"a friend": a(friend), "A friend": capitalized(a(friend)),
              "the friend": "the " + friend, "The friend": "The " + friend}
    return [mended(d.fill(line).format(**slots)) for line in plot[1]]

def mended(text):
    """Without the blank that nothing leaves before a mark."""
    return re.sub(r" ([.,])", r"\1", text)

ASK_STORY = """tell me a story about {x} | a story about {x} | write a story about {x} | write a
 short story about {x} | tell a story of {x} | make up a story about {x} | story about {x} please |
 i want a story about {x} | can you write a story about {x} | give me a story with {x} | a short
 story about {x} please | tell me a bedtime story about {x} | write me a fairy tale about {x} | do
 you know a story about {x} | story: {x} | write a little tale about {x} | once more a story, about
 {x} | tell me about {x} in a story""".replace("\n", "")
ASK_ANY_STORY = """tell me a story | write a story | a story please | tell me a short story | story
 | do you know a story | write a short story | tell me a bedtime story | make up a story | tell a
 story | i want a story | a fairy tale please | tell me a fairy tale | can you tell me a story |
 write me a story | another story | give me a story | tell me something nice before i sleep | once
 upon a time | read me a story | a little story please | invent a story | a story for my daughter |
 a story for kids | tell my son a story""".replace("\n", "")

def ask_story(d, who, called=""):
    x = d.pick([a(who), a(who), "the " + who, a("little " + who)])
    if called:
        x = f"{a(who)} {d.pick(['named', 'called'])} {name(called)}"
    return typed(d, d.say(ASK_STORY, x=x))

@kind(14)
def stories(d):
    hero, plot = d.deal(CAST)
    called = d.pick(GIVEN[hero[1]]) if d.chance(0.25) and " " not in hero[0] else ""
    asked = ask_story(d, hero[0], called)
    if d.chance(0.3):
        called = ""
        asked = typed(d, d.say(ASK_ANY_STORY))
    return [asked, " ".join(told(d, plot, hero, called))]

@kind(2)
def stories_about_things(d):
    thing = d.deal(THINGS)
    _, plot = d.deal(THING_PLOTS)
    story = " ".join(d.fill(x).format(Once=d.pick(ONCE), thing=thing) for x in plot)
    return [typed(d, d.say(ASK_STORY, x=name(thing))), mended(story)]

OPENINGS = rows(banks.OPENINGS)

@kind(4)
def openings(d):
    """Continues what the user begins: an opening of the bank, or the first line of a plot."""
    if d.chance(0.5):
        start, rest = d.deal(OPENINGS)
    else:
        hero, plot = d.deal(CAST)
        start, *others = told(d, plot, hero)
        start, rest = start.removesuffix("."), " ".join(others)
    x = name(start)
    asked = d.say(f"""{x} | {x} ... | continue: {x} | continue this story: {x} | go on: {x} | how
        does it go on? {x} | finish this story: {x} | {x}, | complete: {x} | write on: {x} | {x}...
        | please continue: {x}""")
    return [typed(d, asked, alone=d.chance(0.5)), rest]

@kind(7)
def more_stories(d):
    """A story, and then a question on it, or another one."""
    hero, plot = d.deal(CAST)
    who, he, _ = hero
    called = d.pick(GIVEN[he]) if " " not in who else ""
    asked = ask_story(d, who, called)
    story = " ".join(told(d, plot, hero, called))
    how = d.number(0, 5)
    if how == 0 and called:
        more = d.say(f"what was the {who}'s name | how was the {who} called | what is the name of "
                     f"the {who} | who was the {who} | whats the name of the {who} again")
        reply = d.say(f"The {who} was called {called}. | {called} was the name of the {who}.")
    elif how == 1:
        more = d.say("who was the story about | about whom was it | who was in the story | who is "
                     "the hero of the story | what was the story about")
        reply = d.say(f"It was about {a(who)}" + (f" named {called}." if called else "."))
    elif how == 2:
        more = d.say("is that a true story | is it true | did that really happen | really | true "
                     "story?")
        reply = d.say("No, I made it up. | It is only a tale. | No, it is [only|just] a story[ "
                      "that I made up|].")
    elif how == 3:
        more = d.say("thanks | nice story | that was nice | i like it | thank you | good story | "
                     "lovely")
        reply = d.say("[I am glad that you like it|Thank you|Gladly]! [Shall I tell another|Would "
                      "you like another one|Another one]?")
    else:
        hero, plot = d.deal(CAST)
        more = d.say(f"now one about {a(hero[0])} | and about {a(hero[0])}? | another one, about "
                     f"{a(hero[0])} | another about {a(hero[0])} please | now with {a(hero[0])} | "
                     f"tell me one about {a(hero[0])}")
        reply = " ".join(told(d, plot, hero))
    return [asked, story, typed(d, more, alone=True), reply]

# ==== Verses ====

COUPLETS = [(subject, [couplet.split(" / ") for couplet in lines])
            for subject, lines in headed(banks.COUPLETS)]
ANY_COUPLETS = [x.split(" / ") for x in joined(banks.ANY_COUPLETS)]
ALSO_VERSE = {"the sea": ["the ocean", "the waves", "a ship"], "love": ["my love", "my girlfriend"],
              "friendship": ["a friend", "my best friend", "friends"], "the cat": ["cats", "a cat"],
              "the dog": ["dogs", "a dog", "my dog"], "the rose": ["a rose", "roses"],
              "trees": ["a tree", "an oak"], "birds": ["a bird"], "mother": ["my mother", "my mom"],
              "home": ["my "
                       "home"], "time": ["the "
                                            "clock"], "the "
                                                          "stars": ["stars"], "rain": ["the "
                                                                                           "rain"],
              "the moon": ["moon"], "sleep": ["a lullaby"], "the morning": ["morning", "sunrise"]}
ASK_VERSE = """write a poem about {x} | a poem about {x} | write a verse about {x} | a verse on {x}
 please | tell me a poem about {x} | poem about {x} | can you write a poem about {x} | make a rhyme
 about {x} | four lines about {x} | write four lines on {x} | give me a short poem about {x} | rhyme
 about {x} | i want a poem about {x} | sing about {x} | write a song about {x} | a little poem on
 {x} please | compose a verse on {x} | write a rhyming poem about {x} | something poetic about {x} |
 write a poem on {x} for me""".replace("\n", "")
ASK_ANY_VERSE = """write a poem | a poem please | tell me a poem | write a verse | poem | sing a
 song | a rhyme please | do you know a poem | write me a poem | recite a poem | a short poem | make
 a poem | another poem | write something that rhymes | give me a poem | a verse please | sing me a
 song | tell me a rhyme | say something in verse | write four lines that
 rhyme""".replace("\n", "")

def verse(d, couplets, **slots):
    """Four lines: two couplets, each in its own rhyme."""
    return "\n".join(line.format(**slots) for couplet in d.some(couplets, 2) for line in couplet)

def ask_verse(d, subject):
    return typed(d, d.say(ASK_VERSE, x=d.pick([subject, subject, *ALSO_VERSE.get(subject, [])])))

@kind(12)
def verses(d):
    subject, couplets = d.deal(COUPLETS)
    asked = typed(d, d.say(ASK_ANY_VERSE)) if d.chance(0.2) else ask_verse(d, subject)
    return [asked, verse(d, couplets)]

@kind(4)
def verses_about_things(d):
    thing = d.deal(VERSE_THINGS if d.chance(0.6) else THINGS)
    return [typed(d, d.say(ASK_VERSE, x=name(thing))),
            verse(d, ANY_COUPLETS, thing=re.sub(r"^my ", "thy ", thing))]

@kind(3)
def more_verses(d):
    (subject, couplets), (other, its) = d.some(COUPLETS, 2)
    asked = ask_verse(d, subject)
    first = d.some(couplets, 4)
    lines = "\n".join(line for couplet in first[:2] for line in couplet)
    if d.chance(0.5):
        more = d.say("another one | more | go on | another verse | one more | continue | four more "
                     "lines")
        rest = "\n".join(line for couplet in first[2:] for line in couplet)
    else:
        more = d.say(f"and about {other}? | now about {other} | one about {other} please | now "
                     f"{other} | and one on {other}")
        rest = verse(d, its)
    return [asked, lines, typed(d, more, alone=True), rest]

# ==== Talks that need what was said before ====

SUBJECTS = rows(banks.SUBJECTS)

@kind(4)
def subjects(d):
    subject, first, more = d.deal(SUBJECTS)
    x = d.pick([subject, subject.removeprefix("the ")])
    asked = d.say(f"""tell me about {x} | what do you know about {x} | tell me something about {x} |
        what can you tell me about {x} | say something about {x} | describe {x} | talk about {x} |
        explain {x} | i want to know about {x} | write about {x} | give me some facts about {x} |
        facts about {x} | a few words about {x} | do you know something about {x} | inform me about
        {x}""")
    return [typed(d, asked), f"{first} {more}"]

@kind(6)
def tell_me_more(d):
    subject, first, more = d.deal(SUBJECTS)
    x = d.pick([subject, subject.removeprefix("the ")])
    asked = d.say(f"""what is {x} | tell me about {x} | tell me something about {x} | do you know
        {x} | say something about {x} | {x} | what do you know about {x}""")
    go_on = d.say("""tell me more | more | go on | and? | what else | more please | continue |
        anything else | can you tell me more | tell me more about it | and what else | more about
        that | keep going | really? tell me more | interesting, go on""")
    texts = [typed(d, asked), first, typed(d, go_on, alone=True), more]
    if d.chance(0.25):
        last = d.say("more | tell me more | and what else | go on | anything else | even more")
        texts += [typed(d, last, alone=True),
                  d.say(f"That is all I know about {subject}. | I do not know more about "
                        f"{subject}, I am small. | More than that I do not know[, I am sorry|].")]
    return texts

@kind(8)
def follow_capital(d):
    country, other, third = d.some(CITIES, 3)
    if d.chance(0.5):
        country, other = d.some(banks.WELL_KNOWN, 2)
    x = name(other)
    again = d.say(f"""and of {x}? | and {x}? | what about {x} | and {x} | how about {x} | and of {x}
        | of {x}? | and what is the one of {x} | {x}? | and for {x}? | same for {x} | now {x} | and
        the capital of {x}""")
    texts = [ask_capital(d, country), capital_answer(d, country),
             typed(d, again, alone=True), capital_answer(d, other)]
    how = d.number(0, 4)
    speaks = dict(LANGUAGES).get(other)
    lies = dict(IN_CONTINENT).get(other)
    if how == 0:
        texts += [typed(d, d.say(f"and {name(third)}? | and of {name(third)} | what about "
                                 f"{name(third)}"),
                        alone=True), capital_answer(d, third)]
    elif how == 1 and speaks:
        texts += [typed(d, d.say("what language do they speak there | and the language | which "
                                 "language is spoken there | what do they speak "
                                 "there"), alone=True),
                  d.say(f"People in {other} speak {speaks}. | They speak {speaks} there.")]
    elif how == 2 and lies:
        texts += [typed(d, d.say("on which continent is that | where is that | which continent | "
                                 "and where is "
                                 "it"), alone=True), capitalized(f"{other} is in {lies}.")]
    return texts

@kind(4)
def follow_country(d):
    country, tongue = d.deal(LANGUAGES)
    texts = [ask_capital(d, country), capital_answer(d, country)]
    money, where = dict(CURRENCIES).get(country), dict(IN_CONTINENT).get(country)
    asked = [(d.say("what language do they speak there | and the language | which language do "
                    "people speak there | what do they speak | and what do people speak there"),
              d.say(f"People in {country} speak {tongue}. | They speak {tongue} there."))]
    if money:
        asked.append((d.say("and the currency | what money do they use | how do i pay there | what "
                            "is the currency there"),
                      d.say(f"The currency of {country} is {money}. | They pay with {money} "
                            "there.")))
    if where:
        asked.append((d.say("on which continent is it | where is that | which continent is it in | "
                            "and the continent"), capitalized(f"{country} is in {where}.")))
    more, answer = d.pick(asked)
    return [*texts, typed(d, more, alone=True), answer]

@kind(7)
def follow_sum(d):
    text, answer, result = problem(d)
    texts = [typed(d, text, alone=d.chance(0.5)), answer]
    for _ in range(d.pick([1, 1, 2])):
        n = d.number(1, 10)
        sign, new = d.pick([("plus", result + n), ("minus", result - n), ("times", result * n)])
        if not 0 <= new <= 200:
            sign, new = "plus", result + n
        symbol = {"plus": "+", "minus": "-", "times": "*"}[sign]
        more = d.say(f"{sign} {n} | and {sign} {n}? | and {sign} {n} | now {sign} {n} | {symbol} "
                     f"{n} | {sign} {n}? | and then {sign} {n} | what if you take that {sign} {n} "
                     f"| {symbol}{n}")
        texts += [typed(d, more, alone=True), d.say(f"{result} {sign} {n} is {new}. | {result} "
                                                    f"{sign} {n} is {new}. | That makes {new}.")]
        result = new
    return texts

@kind(3)
def follow_animal(d):
    if d.chance(0.5):
        (x, sound), (y, other) = d.some(SOUNDS, 2)
        more = d.say(f"and {a(y)}? | and the {y}? | what about {a(y)} | and {a(y)} | "
                     f"how about {a(y)} | {a(y)}?")
        return [ask_sound(d, x), sound_answer(d, x, sound), typed(d, more, alone=True),
                sound_answer(d, y, other)]
    one, other = d.some([x for x in ANIMALS if x[3]], 2)
    count = ["no" if x[3] == "0" else in_words(int(x[3])) for x in (one, other)]
    more = d.say(f"and {a(other[0])}? | and the {other[0]} | what about {a(other[0])} | and "
                 f"{a(other[0])}")
    return [typed(d, f"how many legs does {a(one[0])} "
                     "have"), f"{capitalized(a(one[0]))} has "
                                                              f"{count[0]} legs.",
            typed(d, more, alone=True), f"{capitalized(a(other[0]))} has {count[1]} legs."]

@kind(3)
def follow_opposite(d):
    (x, y), (z, w) = d.some(OPPOSITES, 2)
    more = d.say(f"and of {z}? | and {z}? | what about {z} | and of {z} | how about {z} | {z}? | "
                 f"now {z}")
    return [ask_opposite(d, x), opposite_answer(d, x, y), typed(d, more, alone=True),
            opposite_answer(d, z, w)]

@kind(3)
def follow_skill(d):
    w, v = d.some([x for x in banks.WORDS if len(x) < 6], 2)
    asked, work = d.pick([
        ("reverse {w} | spell {w} backwards | {w} backwards", lambda x: x[::-1]),
        ("spell {w} | how do you spell {w}", "-".join),
        ("write {w} in capitals | uppercase {w} | {w} in big letters", str.upper),
        ("how many letters are in {w} | count the letters in "
         "{w}", lambda x: f'"{x}" has {len(x)} '
                                                                             'letters.')])
    x = keep(v)
    more = d.say(f"and {x} | and {x}? | now {x} | what about {x} | same with {x} | and now {x} | "
                 f"{x}?")
    return [typed(d, d.say(asked, w=keep(w))), work(w), typed(d, more, alone=True), work(v)]

def fact(d):
    """(question, answer, a short name of what was asked) of a simple kind."""
    how = d.number(0, 2)
    if how == 0:
        country = d.pick(banks.WELL_KNOWN) if d.chance(0.5) else d.deal(CITIES)
        return (ask_capital(d, country), f"The capital of {country} is "
                                         f"{CAPITAL_OF[country]}.".replace(
            "..", "."), f"the capital of {country}")
    if how == 1:
        text, _, result = problem(d)
        return typed(d, text), f"It is {result}.", "your sum"
    word, other = d.deal(OPPOSITES)
    return ask_opposite(d, word), f"The opposite of {word} is {other}.", f"the opposite of {word}"

@kind(7)
def corrections(d):
    """The user doubts what is right: it stays, politely."""
    asked, answer, what = fact(d)
    doubt = d.say("""no, that's wrong | that is wrong | wrong | no | are you sure | really | i don't
        think so | that's not right | you are wrong | no way | sure? | i don't believe you | is that
        right | is that true | are you certain | hm, really | that can't be right | nope, wrong |
        you made a mistake | incorrect | false | i think you are wrong | that's not correct""")
    again = answer.removesuffix(".")
    again = again[0].lower() + again[1:]
    if doubt.split()[0] in ("are", "really", "sure?", "is", "hm,"):
        reply = f"""[Yes|I think so|I believe so]: {again}. | I am small and can be wrong, but I
            think that {again}."""
    else:
        reply = f"""I still think that {again}. [But I can be wrong|But I make mistakes, so please
            check it]. | I am sorry, I can be wrong. But as far as I know, {again}. | Are you sure?
            I think that {again}. Please check it[ in a book|]."""
    return [asked, answer, typed(d, doubt, alone=True), d.say(reply)]

@kind(6)
def repeats(d):
    """What was said, once more."""
    asked, answer, what = fact(d)
    how = d.number(0, 4)
    if how <= 1:
        more = d.say("""what did you say | say that again | repeat that | again please | can you
            repeat that | pardon | come again | once more | sorry, what | repeat please | what was
            that | i didn't get that | please repeat | what""")
        reply = d.pick([answer, "I said: "
                                f"{answer[0].lower() + answer[1:]}" if answer.startswith("The")
                        or answer.startswith("It") else answer])
    elif how == 2:
        more = d.say("""what did i ask | what did i just ask | what was my question | what did i ask
            you | what was my question again | do you remember my question""")
        reply = d.say(f"You asked for {what}. | You asked me for {what}.")
    elif how == 3:
        more = d.say("thanks | thank you | thx | ok thanks | great, thanks | cool | good | nice | "
                     "ok | wow | perfect | good job | awesome | right | correct | that is right | "
                     "yes, right")
        start = "[You are welcome|Glad to help|My pleasure]"
        if "thank" not in more and more != "thx":
            start = "[Good|I am glad]"
        reply = d.answer(start + "! [Anything else|What else would you like to know|Do you have "
                                 "another question|Ask me more, if you like]?")
    else:
        more = d.say("how do you know | how do you know that | who told you | where do you know "
                     "that from | source? | why")
        reply = d.say("""I learned it from the texts I was trained on[. I can be wrong, though|]. |
            It was in the texts that I learned from[, but I can be wrong|]. | [I read it in my
            training|I learned it once]; please check it if it matters.""")
    return [asked, answer, typed(d, more, alone=True), reply]

def secrets(d):
    """(what is told, a reply, what is asked later, the answer)."""
    who, pet, town = d.pick(NAMES), d.pick(banks.PETS), d.pick(banks.TOWNS)
    n, x = d.number(5, 80), name(who)
    yield (f"""my name is {x} | i am {x} | i'm {x} | im {x} | hi, my name is {x} | hello, i am {x} |
        call me {x} | hi, i'm {x} | people call me {x} | my name's {x} | {x} here | hey im {x} |
        this is {x}""",
        f"""[Hello|Hi], {who}! [How can I help you|What can I do for you|What shall we talk about]?
            | Nice to meet you, {who}[!|. What would you like to know?|! I am NanoEuler.]""",
        """what is my name | what's my name | whats my name | do you know my name | who am i | do
            you remember my name | what was my name | tell me my name | say my name""",
        f"Your name is {who}. | You are {who}. | Your name is {who}.")
    yield (f"""my {{animal}} is called {name(pet)} | i have a {{animal}}, {name(pet)} | i have a
        {{animal}} named {name(pet)} | my {{animal}}'s name is {name(pet)}""",
        f"{pet} is a [nice|good|lovely] name for a {{animal}}. | How nice! Say hello to {pet}.",
        """what is my {animal}'s name | what is my {animal} called | how is my {animal} called | do
            you remember my {animal}'s name | whats the name of my {animal}""",
        f"Your {{animal}} is called {pet}. | {pet} is your {{animal}}.")
    color = d.pick("red blue green yellow purple orange pink black white brown".split())
    spelled = d.pick(["color", "colour"])
    yield (f"""my favorite {spelled} is {name(color)} | i like the {spelled} {name(color)} best | i
        love {name(color)} | {name(color)} is my favorite {spelled}""",
        f"{capitalized(color)} is a [nice|fine|lovely] color.",
        f"""what is my favorite {spelled} | which {spelled} do i like | what {spelled} do i like
            best | whats my favorite
            {spelled}""", f"Your favorite color is {color}. | You like {color} best.")
    food = d.pick(banks.FOODS)
    yield (f"my favorite food is {name(food)} | i love {name(food)} | i like {name(food)} best | i "
           "like to eat "
           f"{name(food)}", f"{capitalized(food)}: [good choice|that sounds good]! I never eat, "
                            "though.",
           "what is my favorite food | what do i like to eat | what food do i like | what did i "
           "say i like",
           f"You like {food}. | You said that you like {food}.")
    yield (f"""i live in {name(town)} | i am from {name(town)} | i'm from {name(town)} | my home is
        {name(town)}""", f"{town}! [How is life there|Do you like it there|What is it like there]?",
        "where do i live | where am i from | which city am i from | do you remember where i live | "
        "what is my city", f"You are from {town}. | You said {town}.")
    hobby = d.pick(banks.HOBBIES)
    yield (f"i like {name(hobby)} | my hobby is {name(hobby)} | i love {name(hobby)} | in my free "
           "time i like "
           f"{name(hobby)}", f"{capitalized(hobby)} is a [good|fine|nice] hobby[.|! Since when do "
                             "you do it?]",
           "what is my hobby | what do i like to do | what do i do in my free time | which hobby "
           "do i have",
           f"Your hobby is {hobby}. | You like {hobby}.")
    yield (f"i am {n} years old | i'm {n} | im {n} years old | my age is {n}",
           f"{n} is a [good|fine] "
           "age!", "how old am i | what is my age | do you know how old i am "
                                         "| my age?",
           f"You are {n} years old. | You said that you are {n}.")
    yield (f"remember the number {n} | my lucky number is {n} | my number is {n} | keep the number "
           f"{n} in mind",
           f"[All right|Good|I will keep it in mind]: {n}.",
           "what was my number | what is my number | which number did i say | tell me the number",
           f"Your number is {n}. | It was {n}.")

@kind(12)
def remember(d):
    """What the user tells is asked for later in the same talk."""
    tell, reply, later, answer = d.pick(list(secrets(d)))
    if d.chance(0.35):
        tell, reply, later, answer = next(secrets(d))
    animal = d.pick("dog cat rabbit horse".split())
    tell, reply, later, answer = (d.say(x, animal=animal) for x in (tell, reply, later, answer))
    texts = [typed(d, tell, alone=True), reply]
    if d.chance(0.2):
        return texts
    if d.chance(0.35):
        asked, between, _ = fact(d)
        texts += [asked, between]
    return [*texts, typed(d, later, alone=True), answer]

@kind(2)
def remember_two(d):
    """Two things are told at once."""
    who, other = d.some(NAMES, 2)
    kin = d.pick("friend cousin neighbor teacher best-friend".split()).replace("-", " ")
    told_first = d.say(f"my name is {name(who)} and my {kin} is {name(other)} | i am {name(who)} "
                       f"and my {kin}'s name is {name(other)} | i'm {name(who)}, and my {kin} is "
                       f"called {name(other)}")
    reply = d.say(f"Hello, {who}! [Say hello to {other}|Greetings to {other}][, too|]. | Nice to "
                  f"meet you, {who}! And {other}, too.")
    mine = d.say("what is my name | who am i | whats my name"), f"Your name is {who}."
    theirs = (d.say(f"what is my {kin}'s name | who is {name(other)} | how is my {kin} called | "
                    f"and my {kin}?"),
              None)
    if "who is" in theirs[0]:
        theirs = theirs[0], f"{other} is your {kin}."
    else:
        theirs = theirs[0], f"Your {kin} is called {other}."
    asked = d.pick([[mine], [theirs], [mine, theirs]])
    return [typed(d, told_first, alone=True), reply,
            *(text for q, x in asked for text in (typed(d, q, alone=True), x))]

# ==== What is not so, and what nobody can know ====

@kind(5)
def claims(d):
    """What the user says or asks is right, or it is not."""
    how = d.number(0, 2)
    right = d.chance(0.4)
    if how == 0:
        x, y = d.number(1, 12), d.number(1, 12)
        word, result = d.pick([("plus", x + y), ("times", x * y)])
        says = result if right else result + d.pick([1, 2, -1, 10])
        symbol = {"plus": "+", "times": d.pick(["*", "x"])}[word]
        asked = d.say(f"""is {x} {word} {y} {says} | {x} {symbol} {y} = {says}, right | {x} {word}
            {y} is {says}, isn't it | {x}{symbol}{y}={says} | i think {x} {word} {y} is {says} | is
            {x} {symbol} {y} = {says}""")
        truth = f"{x} {word} {y} is {result}"
    elif how == 1:
        thing, value = d.pick([x for x in COLOURS if " " not in x[1]])
        others = [x for x in ("blue", "green", "purple", "red", "black", "pink") if x != value]
        says = value if right else d.pick(others)
        subject, verb = thing.rsplit(" ", 1)
        asked = d.say(f"{verb} {subject} {says} | {thing} {says}, right | i think {thing} {says} | "
                      f"{thing} {says} | {thing} {says}, isn't it")
        truth = f"{thing} {value}"
    else:
        x = d.pick([x for x in ANIMALS if x[3]])
        legs = int(x[3])
        says = legs if right else d.pick([n for n in (2, 4, 5, 6, 7, 8) if n != legs])
        asked = d.say(f"does {a(x[0])} have {in_words(says)} legs | {a(x[0])} has {says} legs, "
                      f"right | i think {a(x[0])} has {in_words(says)} legs | {a(x[0])} has "
                      f"{in_words(says)} legs")
        truth = f"{a(x[0])} has {in_words(legs) if legs else 'no'} legs"
    if right:
        return [typed(d, asked), d.answer(f"Yes, {truth}. | Yes, that is right. | That is right: "
                                          f"{truth}.")]
    return [typed(d, asked), d.answer(f"No, {truth}. | No, {truth}. | I think that {truth}. | That "
                                      f"is not right: {truth}.")]

@kind(3)
def two_questions(d):
    (x, y), (z, w) = d.some(OPPOSITES, 2)
    country, other = d.some(banks.WELL_KNOWN, 2)
    one, two = d.number(1, 10), d.number(1, 10)
    cards = [("the capital of "
              f"{name(country)}", f"The capital of {country} is "
                                                 f"{CAPITAL_OF[country]}."),
             (f"the capital of {name(other)}", f"The capital of {other} is {CAPITAL_OF[other]}."),
             (f"{one} plus {two}", f"{one} plus {two} is {one + two}."),
             (f"the opposite of {x}", f"The opposite of {x} is {y}."),
             (f"the opposite of {z}", f"The opposite of {z} is {w}.")]
    (first, answer), (second, its) = d.some(cards, 2)
    asked = d.say(f"""what is {first} and what is {second} | what is {first}, and {second} | tell me
        {first} and {second} | {first} and {second} | two questions: what is {first} and what is
        {second} | what's {first}? and what's {second} | i need {first} and also {second}""")
    return [typed(d, asked), f"{answer} {its}"]

def made_up(d):
    """A word that there is not."""
    start, middle = d.some("bl gr sn fl tr pl dr kr v z gl sm br qu w".split(), 2)
    return start + d.pick("aeiou") + d.pick("bb mp rg zz nd lk ff".split()) + d.pick(
        "le er o in us ix ert "
        "um".split()) + (middle + d.pick(["a", "o", "ix"]) if d.chance(0.2) else "")

@kind(2.5)
def unknown_words(d):
    w = made_up(d)
    x = keep(w)
    asked = d.say(f"""what is {a(x)} | define {x} | what does {x} mean | what is the meaning of {x}
        | explain {x} | what is {x} | do you know what {x} means | tell me what {x} is | {x}? what
        is that | the word {x}, what does it mean""")
    return [typed(d, asked), d.answer(f"""I do not know the word "{w}". [Can you explain it|What
        does it mean|Is it spelled right]? | [Sorry, I|I am sorry, I|I] do not know what "{w}" is. |
        I have never [met|read] the word "{w}".""")]

@kind(2.5)
def unknown_people(d):
    family = d.pick("""Smith Miller Garcia Lopez Novak Rossi Schmidt Brown Clark Okafor Tanaka Singh
        Ivanov Larsen Costa Weber Moreau Murphy Walsh Haddad Kim Nguyen Petrov Horvat""".split())
    who = f"{d.pick(NAMES)} {family}"
    x = name(who)
    asked = d.say(f"""who is {x} | who was {x} | do you know {x} | tell me about {x} | what do you
        know about {x} | have you heard of {x} | what did {x} do | how old is {x} | where does {x}
        live | is {x} famous | when was {x} born | {x}, who is that""")
    return [typed(d, asked), d.answer(f"""I do not know anybody of that name[, I am sorry|]. | I do
        not know {who}. [Can you tell me more|I know only a few famous people|Who is it]? | The name
        {who} tells me nothing[; I am a small model|].""")]

@kind(2.5)
def no_numbers_of_people(d):
    family = d.pick("Smith Miller Garcia Novak Rossi Brown Clark Tanaka Singh Larsen Weber".split())
    x = name(f"{d.pick(['', '', 'Dr. ', 'Mr. ', 'Mrs. '])}{d.pick(NAMES)} {family}")
    at = d.pick(["", "", f" in {name(d.pick(banks.TOWNS))}"])
    what = d.pick(["phone number", "address", "email address", "birthday"])
    asked = d.say(f"""what is the {what} of {x}{at} | do you have the {what} of {x}{at} | give me
        the {what} of {x}{at} | i am looking for the {what} of {x}{at} | {x}{at} {what} | can you
        find the {what} of {x}{at} | tell me the {what} of {x}{at}""")
    many = {"address": "addresses", "email address": "email addresses"}.get(what, what + "s")
    return [typed(d, asked), d.answer(f"""I know no {many} of people[, I am sorry|]. | I cannot tell
        you that: I do not know {many} of people. | I do not know the {what} of anybody.""")]

NO_COUNTRIES = """Atlantis Narnia Mars Africa Europe Asia Antarctica Mordor Wonderland Utopia
Neverland Oz Jupiter Lilliput Venus""".split()

@kind(2)
def no_capital(d):
    place = d.pick(NO_COUNTRIES)
    x = name(place)
    sort = "is a continent" if place in ("Africa", "Europe", "Asia", "Antarctica") else ""
    if place in ("Mars", "Jupiter", "Venus"):
        sort = "is a planet"
    answer = f"{capitalized(place)} {sort or 'is a land in stories'}"
    return [ask_what(d, "the capital of "
                        f"{x}", f"capital of {x} | which city is the capital of "
                                               f"{x}"),
            d.answer(f"{answer} and has no capital[ that I know|]. | {answer}, so I know no "
                     f"capital. | I know no capital of {place}: it "
                     f"{sort or 'is a land in stories'}.")]

# ==== Things that do not exist ====
# A question about a name that nobody has gets an answer that says so.  Questions of the same kinds
# about real names come, too, so that a model learns to tell them apart.

STARTS = """b bl br c cl cr d dr f fl g gl gr h j k kl kr l m n p pl pr qu r s sk sl sn st t th tr
    v w y z zw""".split()
MIDDLES = """b bb d dd ff gg l lb ld lk lm ll m mb mm n nd ng nn p rb rd rg rl rm rn rr rv s ss st
    t th tt v x z zz""".split()
REAL = {x.lower().removeprefix("the ") for x in [
    *CAPITAL_OF, *CAPITAL_OF.values(), *NAMES, *banks.TOWNS, *banks.WORDS,
    *(row[0] for bank in (banks.ANIMALS, banks.PLANETS, banks.PLAYS, banks.BOOKS)
      for row in rows(bank))]}

def invented(d, ends):
    """A word that there is not, in small letters, with one of these endings"""
    while True:
        word = d.pick(STARTS) + d.pick("aeiou") + d.pick(MIDDLES)
        if d.chance(0.3):
            word += d.pick("aeiou") + d.pick("l m n r s t v".split())
        word += d.pick(ends.split())
        if word not in REAL:
            return word

NEVER = """[I know no {what} called {x}|I know of no {what} called {x}|There is no {what} called {x}
    that I know of], so [{so}|I cannot tell you that]. | I have never heard of [a {what}|any {what}]
    called {x}, so {so}. | I [do not know|know nothing of] {x}: I think there is no such {what}. |
    [I am sorry, I|I] do not know {x}. [Maybe it is made up|I think it does not exist|Perhaps nobody
    has that name], so {so}."""

NO_SUCH_ROWS = rows(banks.NO_SUCH)
IN_SMALL = "animal unit plant metal machine sport dance".split()

@kind(26)
def no_such_thing(d):
    what, ends, asked, so = d.deal(NO_SUCH_ROWS)
    word = invented(d, ends)
    shown = word if what in IN_SMALL else capitalized(word)
    x = name(shown)
    asked = d.say(d.pick(phrases(asked)), x=x, a=("an " if word[0] in "aeiou" else "a ") + x)
    answer = d.say(NEVER, what=what, x=shown, so=so)
    answer = re.sub(r"\ba (?=(animal|instrument)\b)", "an ", answer)
    return [typed(d, asked), spoken(answer)]

def invented_country(d):
    word = capitalized(invented(d, "ania ovia istan land onia ara ium ea ika aria gard una"))
    return d.pick(["Lower", "Upper", "New", "North", "East"]) + " " + word if d.chance(0.15) else (
        word)

def invented_city(d):
    word = capitalized(invented(d, "burg ville ton opolis aven grad mouth stad ona ima au"))
    if d.chance(0.15):
        return f"{word}-{d.pick(['am', 'an', 'sur', 'on', 'upon'])}-" + d.pick(
            ["See", "Mer", "Lake", "Hill", "Sea"])
    return d.pick(["Bad", "Port", "Saint", "New"]) + " " + word if d.chance(0.15) else word

@kind(16)
def no_such_country(d):
    """What is asked about real countries and cities, about invented ones"""
    if d.chance(0.2):
        city = invented_city(d)
        return [typed(d, ask_country_of(d, name(city))), spoken(d.say(
            NEVER, what="city", x=city, so="I cannot say where it is"))]
    x = invented_country(d)
    if d.chance(0.4):
        asked, so = ask_capital(d, x), "I cannot name its capital"
    else:
        ask, so = d.pick([(ask_continent, "I cannot say where it is"),
                          (ask_language, "I cannot name its language"),
                          (ask_currency, "I cannot name its money")])
        asked = typed(d, ask(d, name(x)))
    return [asked, spoken(d.say(NEVER, what="country", x=x, so=so))]

@kind(4)
def no_such_unit(d):
    """What is asked about real units, with one or two invented ones"""
    many, one, _ = d.deal(UNITS)
    word, other = (invented(d, "ick od le et im um an el op ib") for _ in range(2))
    is_first, is_second = d.pick([(True, False), (False, True), (True, True)])
    asked_many = name(word + "s") if is_first else many
    asked_one = name(other) if is_second else "minute" if one == "English alphabet" else one
    asked = d.say(f"""how many {asked_many} are in a {asked_one} | how many {asked_many} make a
        {asked_one} | how many {asked_many} has a {asked_one} | {asked_many} in a {asked_one} | a
        {asked_one} has how many {asked_many} | how many {asked_many} are there in a {asked_one}""")
    asked = re.sub(r"\ba (?=(hour|inch|ounce|acre|eight|octave)\b)", "an ", asked)
    return [typed(d, asked), spoken(d.say(NEVER, what="unit", x=word if is_first else other,
                                          so="I cannot count it"))]

PEACEFUL = phrases("""Norway; Brazil; Kenya; Finland; Thailand; Iceland; Ghana; Nepal; Uruguay;
    Sweden; Senegal; Malaysia; Costa Rica; Zambia; Ireland; Sri Lanka; New Zealand; Switzerland""")

@kind(2)
def no_such_war(d):
    """Between two countries that never fought each other"""
    x, y = d.some(PEACEFUL, 2)
    asked = d.say(f"""when was the war between {name(x)} and {name(y)} | who won the war between
        {name(x)} and {name(y)} | when did the war between {name(x)} and {name(y)} end | why did
        {name(x)} fight {name(y)} | how long was the war between {name(x)} and {name(y)} | what was
        the war of {name(x)} against {name(y)} about""")
    return [typed(d, asked), d.answer(f"""I know of no war between {x} and {y}. | I do not know
        of any war between {x} and {y}. | I have never heard of a war between {x} and {y}[, so I
        cannot answer that|].""")]

TITLES = phrases("""The {adjective} {noun};The {noun} of {place};A {noun} in {place};The Last
    {noun};{adjective} {noun}s;The {noun} and the {other};Letters to a {adjective} {noun};The Day of
    the {adjective} {noun};Seven {noun}s;Under the {adjective} {noun}""")
ADJECTIVES = """Glass Silent Crimson Hollow Velvet Wooden Frozen Burning Paper Golden Crooked
    Distant Gentle Broken Sleeping Copper Pale Salt Iron Quiet""".split()
NOUNS = """Heron Lantern Orchard Mirror Harbor Compass Sparrow Ladder Piano Bell Anchor Candle
    Violin Garden Engine Letter Bridge Feather Tower Umbrella""".split()

@kind(6)
def no_such_book(d):
    noun, other = d.some(NOUNS, 2)
    title = d.pick(TITLES).format(noun=noun, other=other, adjective=d.pick(ADJECTIVES),
                                  place=capitalized(invented(d, "ania ovia burg ton aven")))
    x = name(title)
    if d.chance(0.2):
        x += " by " + name(d.pick(AUTHORS))
    what = d.pick(["book", "novel", "play", "poem", "film", "song"])
    verb = {"film": "made", "song": "sang"}.get(what, "wrote")
    asked = d.say(f"""who {verb} {x} | who {verb} the {what} {x} | what is the {what} {x} about |
        what is {x} about | who is the hero of {x} | how does the {what} {x} end | have you read {x}
        | tell me about the {what} {x} | what happens in {x} | when did the {what} {x} appear""")
    return [typed(d, asked), d.answer(f"""I know no {what} called {title}, so I cannot tell you
        about it. | I have never heard of {title}. [I think there is no such {what}|Maybe it does
        not exist|Perhaps it is made up]. | There is no {what} called {title} that I know of. | I do
        not know {title}, so I cannot say who {verb} it.""")]

ABSTRACT_ROWS = [(subject, what, sort)
                 for subjects, what, sort in (line.split(" = ") for line in joined(banks.ABSTRACT))
                 for subject in subjects.split("|")]
LACKS_ROWS = [line.split(": ") for line in joined(banks.LACKS)]

@kind(2.5)
def no_such_property(d):
    (subject, what, sort), (lack, asked) = d.deal(ABSTRACT_ROWS), d.deal(LACKS_ROWS)
    no, asked = f"no {lack}", d.say(d.pick(phrases(asked)), x=subject)
    return [typed(d, asked), d.answer(f"""{capitalized(subject)} is {what}, and {sort} have {no}. |
        {capitalized(subject)} has {no}: it is {what}. | {capitalized(subject)} is {what}, so it has
        {no}. | I cannot say that: {sort} have {no}.""")]

@kind(64)
def such_things(d):
    """The same questions about real names"""
    draw = d.pick([capital, capital, capital_of, language, currency, animals, animals, planets,
                   units, colours, books, plays])
    return draw(d)

@kind(3)
def large_sums(d):
    x, y = d.number(1000, 99999), d.number(100, 99999)
    sign = d.pick(["plus", "times", "minus", "divided by", "*", "x", "/", "+"])
    asked = d.say(f"""what is {x} {sign} {y} | {x} {sign} {y} | calculate {x} {sign} {y} | how much
        is {x} {sign} {y} | {x} {sign} {y} = | what is the square root of {x} | solve {x} {sign} {y}
        | compute {x} {sign} {y}""")
    return [typed(d, asked), d.answer("""[That is too large for me|Those numbers are too large for
        me|That is too hard for me|I would get that wrong]: [I can do small sums|I only do small
        sums|small numbers are my thing]. [A calculator is better|Please use a calculator|]. | [I
        cannot do sums with such large numbers|I am not good with large numbers]. [Please use a
        calculator|A calculator can do it|Try me with small ones].""")]

@kind(3)
def introductions(d):
    """A greeting, a name and a question at once."""
    who = d.pick(NAMES)
    x = name(who)
    hello = d.say(f"hi, i'm {x} | hello, my name is {x} | hey im {x} | hello i am {x} | good "
                  f"morning, i am {x} | hi my name is {x} | hi bot, {x} here")
    more, reply = d.pick([
        ("how are you | how r u | how are you "
         "today", "I am fine, thank you[! How are you|. And "
                                                      "you]?"),
        ("what can you do | how can you help "
         "me", "I can chat, tell short stories and do small "
                                                  "sums."),
        ("who are you | what's your name | and you", "I am NanoEuler, a small language model."),
        ("can you help me | i need help", "Gladly, if I can. What is it about?"),
        ("nice to meet you | pleased to meet "
         "you", "Nice to meet you, too! What shall we talk "
                                                   "about?"),
        ("are you a robot | are you human", "I am a program, [no person|not a person].")])
    asked = hello + d.pick([". ", ", ", "! ", " and "][:3]) + d.say(more)
    return [typed(d, asked, alone=True), d.answer(f"[Hello|Hi], {who}! " + reply)]

KNOCKS = """Lettuce|Lettuce in, it is cold out here!;Boo|Why do you cry? It is only a joke!;Cows|No,
    cows say moo!;Olive|Olive you!;Atch|Bless you!;Justin|Justin time for dinner!;Harry|Harry up, it
    is late!;Orange|Orange you glad to see me?;Ice cream|Ice cream if you do not open!;Tank|You are
    welcome!"""

@kind(1.5)
def knock_knock(d):
    who, end = d.deal(KNOCK_JOKES).split("|")
    texts = [typed(d, d.say("knock knock | knock, knock | knock knock! | *knock "
                            "knock*"), alone=True),
             d.pick(["Who is "
                     "there?", "Who's "
                                      "there?"]), typed(d, name(who), alone=True), f"{who} "
                                                                                         "who?"]
    if d.chance(0.6):
        texts += [typed(d, end, alone=True), d.answer("[Haha|Ha ha|Very funny|That is a good one]! "
                                                      "[Do you know another|Another one|One "
                                                      "more]?")]
    return texts

KNOCK_JOKES = phrases(KNOCKS)

# What nobody says first, and what nobody says later
NOT_FIRST, NOT_LATER = ["goodbye"], ["greeting", "daytime", "introductions"]
LONGEST_SEVERAL = 500                        # characters

@kind(80)
def several(d):
    """Two or three talks, one after the other: most that was said does not matter for the next."""
    def one_of(left_out):
        titles = [x for x in KINDS if x not in ["several", *left_out]]
        weights = [KINDS[x][0] for x in titles]
        return KINDS[d.rng.choices(titles, weights)[0]][1](d)

    def courtesy():
        return KINDS[d.pick(["thanks", "thanks", "goodbye"])][1](d)

    texts = one_of(NOT_FIRST) + one_of(NOT_LATER)
    more = courtesy() if d.chance(0.5) else one_of(NOT_LATER)
    if d.chance(0.5) and sum(map(len, texts + more)) <= LONGEST_SEVERAL:
        texts += more
    return texts if sum(map(len, texts)) <= LONGEST_SEVERAL else several(d)

# ==== The file ====

def letters_of(text):
    """The text in small letters, without all but letters and digits."""
    return re.sub(r"[^a-z0-9]", "", text.lower())

def user_turns(entry):
    """The user's turns of an entry: a text, {"prompt": text} or {"messages": [...]}, and lists."""
    if isinstance(entry, str):
        return [entry]
    if isinstance(entry, list):
        return [text for x in entry for text in user_turns(x)]
    if not isinstance(entry, dict):
        return []
    if "role" in entry:
        return user_turns(entry.get("content")) if entry["role"] == "user" else []
    keys = ("messages", "conversation", "prompt", "prompts", "turns", "user", "question", "text",
            "instruction")
    return [text for key in keys for text in user_turns(entry.get(key))]

def excluded(path):
    """The letters of the turns of more than two words in a file of JSON, one a line or a list."""
    text = Path(path).read_bytes().decode()
    whole = text.lstrip().startswith("[")
    entries = json.loads(text) if whole else [json.loads(x) for x in text.split("\n") if x.strip()]
    turns = [user_turns(entry) for entry in entries]
    if not all(turns):
        bad = turns.index([])
        raise ValueError(f"{path}: entry {bad + 1} has no turn of a user; give texts, prompts or "
                         f"messages")
    return {letters_of(x) for found in turns for x in found if len(x.split()) > 2}

LARGEST_SHARE = 0.008                        # of one answer among the conversations

class Writer:
    """Collects conversations: each once, no answer too often, none that is excluded."""

    def __init__(self, count, excluded):
        self.excluded = excluded
        self.most = max(1, int(LARGEST_SHARE * count))
        self.seen, self.answers = set(), collections.Counter()
        self.entries, self.left_out = [], 0

    def add(self, title, texts):
        """Is it taken?"""
        asked, answers = texts[::2], texts[1::2]
        if any(letters_of(x) in self.excluded for x in asked):
            self.left_out += 1
            return False
        full = any(self.answers[x] >= self.most for x in answers)
        if full or tuple(texts) in self.seen or not all(map(str.strip, texts)):
            return False
        self.seen.add(tuple(texts))
        self.answers.update(answers)
        messages = [dict(role=("user", "assistant")[i % 2], content=text)
                    for i, text in enumerate(texts)]
        self.entries.append(dict(messages=messages, source=f"everyday/{title}"))
        return True

TRIES = 30                                   # draws for each conversation of a kind

def conversations(count, seed=1, exclude=frozenset()):
    """(entries, how many draws were left out): about `count`, of each kind its share, at least
        1."""
    d, writer = Draw(seed), Writer(count, exclude)
    total = sum(weight for weight, _ in KINDS.values())
    for title, (weight, function) in KINDS.items():
        wanted = max(1, round(count * weight / total))
        taken = 0
        for _ in range(TRIES * wanted):
            taken += writer.add(title, function(d))
            if taken == wanted:
                break
    d.rng.shuffle(writer.entries)
    return writer.entries, writer.left_out

def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = Path(__file__).with_name("everyday.jsonl")
    parser.add_argument("--out", type=Path, default=usual, help=f"file to write (default: {usual})")
    parser.add_argument("--force", action="store_true", help="replace a file that is there; the "
                        "default is replaced without it")
    parser.add_argument("--count", type=int, default=8000, help="about how many conversations")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--exclude", type=Path, action="append", default=[], metavar="FILE",
                        help="JSON Lines of prompts: what is asked there in more than two words is "
                        "not asked here; may be given several times")
    parser.add_argument("--show", type=int, default=0, help="print so many of them")
    o = parser.parse_args(argv)
    try:
        if o.out.exists() and o.out != usual and not o.force:
            raise ValueError(f"{o.out} exists; another --out keeps it, --force replaces it")
        exclude = frozenset().union(*map(excluded, o.exclude))
        entries, left_out = conversations(o.count, o.seed, exclude)
        lines = "".join(json.dumps(e, ensure_ascii=False) + "\n" for e in entries)
        o.out.write_text(lines, encoding="utf-8")
    except (OSError, ValueError) as e:
        print(f"everyday.py: {e}", file=sys.stderr)
        return 2
    several = sum(len(e["messages"]) > 2 for e in entries)
    print(f"{o.out}: {len(lines.encode()):,} bytes, {len(entries):,} conversations of "
          f"{len({e['source'] for e in entries})} kinds, {several / len(entries):.0%} of several "
          f"turns; {left_out:,} draws left out")
    for e in random.Random(o.seed).sample(entries, min(o.show, len(entries))):
        print(f"\n[{e['source']}]")
        for m in e["messages"]:
            print(f"{'>' if m['role'] == 'user' else ' '} {m['content']}")
    return 0

if __name__ == "__main__":
    sys.exit(main())
