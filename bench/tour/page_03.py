"""Bits per byte of seven ways to predict the held-out tenth of Shakespeare"""
from shapes import box, line, svg, text

# page 3 computes all but the last two: kneser_ney.py, and the README's model after three minutes
WAYS = (("the file itself", 8, "faint"), ("all tokens equally probable", 4.71, "faint"),
        ("counts of single tokens", 3.95, "a"), ("zlib, a compressor", 3.22, "faint"),
        ("counts of pairs", 2.77, "a"), ("the best mixture of counts", 2.13, "a"),
        ("a small model, after 3 minutes", 2.00, "b"))
LEFT, UNIT = 224, 56


def picture():
    parts = [text(LEFT, 24, "bits that each byte of unseen text needs (fewer is better)", "bold",
                  "start")]
    for i, (name, bits, kind) in enumerate(WAYS):
        y = 38 + 28 * i
        parts += [text(LEFT - 12, y + 15, name, "", "end"), box(LEFT, y, UNIT * bits, 20, kind,
                                                                round=2),
                  text(LEFT + UNIT * bits + 6, y + 15, f"{bits:.2f}", "mono", "start")]
    x = LEFT + UNIT * 2.13
    parts += [line(x, 202, x, 242, dashed=True),
              text(x + 6, 240, "what a model must beat", "small", "start")]
    return svg(250, "Bars, bits per byte of unseen text. The file itself 8; all tokens equally "
               "probable 4.71; counts of single tokens 3.95; zlib 3.22; counts of pairs 2.77; "
               "the best mixture of counts 2.13; a small model after three minutes 2.00.", *parts)
