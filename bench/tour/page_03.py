"""Bits per byte of eight ways to predict the held-out tenth of Shakespeare"""
from shapes import box, line, svg, text

# page 3 computes all but the last three: kneser_ney.py, ppmd.py, the README's model on Zen 4 cores
WAYS = (("the file itself", 8, "faint"), ("all tokens equally probable", 4.71, "faint"),
        ("counts of single tokens", 3.95, "a"), ("zlib, a compressor", 3.22, "faint"),
        ("counts of pairs", 2.77, "a"), ("a good mixture of counts", 2.13, "a"),
        ("PPMd, which goes on counting", 2.03, "a"),
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
    x = LEFT + UNIT * 2.03
    parts += [line(x, 230, x, 270, dashed=True),
              text(x + 6, 268, "what a model must beat", "small", "start")]
    return svg(278, "Bars, bits per byte of unseen text. The file itself 8; all tokens equally "
               "probable 4.71; counts of single tokens 3.95; zlib 3.22; counts of pairs 2.77; "
               "a good mixture of counts 2.13; PPMd 2.03; a small model after three minutes 2.00.",
               *parts)
