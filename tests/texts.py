"""Texts of all sorts of characters, which no tokenizer may change."""
import random

# every class, every blank, contractions, marks, scripts, unassigned code points, a literal </s>
BLANKS = [chr(c) for c in (9, 10, 11, 12, 13, 32, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B),
                           0x2028, 0x2029, 0x202F, 0x205F, 0x3000)]
PIECES = BLANKS + [
    "a", "Z", "é", "ß", "ǅ", "ʰ", "ª", "中", "文字", "ひ", "한", "א", "ب", "ก", "क्षि", "𐍈", "𝒳",
    "0", "42", "²", "Ⅷ", "½", "٣", "৪", "𝟘", "〇", "e\u0301", "\u0301", "\u20dd", "\u200b",
    "\u200d", "\ufeff", "\ufe0f", "👩\u200d👩\u200d👧", "🇺🇳", "😀", ".", "!?", "…", "—", "€", "<",
    "</s>", "<|endoftext|>", "\0", "\x1c", "\x1d", "\x1e", "\x1f", "\x7f", "\u0378", "\u0557",
    "\u088f", "\U000323af", "\U000e0001", "\U0010ffff", "\ue000", "\ufffd", "\uffff", "'s", "'t",
    "'re", "'ve", "'m", "'ll", "'d", "'S", "'", "''s", " 's", "'lll", "don't", "we'll", "l'été",
    "  ", "   x", "\n\n", "\r\n", " \t ", "1st"]


def torture(n, seed=0):
    rnd = random.Random(seed)
    return "".join(rnd.choice(PIECES) if rnd.random() < 0.9 else chr(rnd.choice(
        [rnd.randrange(0x3100), rnd.randrange(0xE000, 0x110000)])) for _ in range(n))


TORTURE = "".join(a + b for a in PIECES for b in PIECES) + torture(20_000)
