"""The picture of the appendix: how three rungs read and compute, and how copies overlap"""
from shapes import box, svg, text

N, CELL = 8, 9               # rows, columns and k of the small matrices; size of an entry
SIDE = N * CELL
TOP, GAP = 66, 10
LANE_WIDE, LANE_HIGH = 44, 19
SLICES, SLICE = 6, 40 # of a timeline: how many, and the width of one
TIMES = TOP + 2 * SIDE + GAP + 78


def grid(x, y, kind, rows, columns):
    """A matrix (N, N) whose entries in these rows and columns have this color"""
    return [box(x + CELL * j, y + CELL * i, CELL - 1, CELL - 1,
                kind if i in rows and j in columns else "box", round=1)
            for i in range(N) for j in range(N)]


def product(x, title, rows, columns, caption):
    """out = x w^T: x is left of out, and w^T is above it."""
    right, low, everything = x + SIDE + GAP, TOP + SIDE + GAP, range(N)
    return [text(x + SIDE + GAP / 2, 24, title, "bold"),
            *grid(x, low, "a", rows, everything), *grid(right, TOP, "b", everything, columns),
            *grid(right, low, "c", rows, columns),
            text(x + SIDE / 2, low - 8, "x", "mono"),
            text(right + SIDE / 2, TOP - 8, "wᵀ", "mono"),
            text(right + SIDE / 2, low + SIDE + 16, "out", "mono"),
            text(x + SIDE + GAP / 2, low + SIDE + 38, caption, "small")]


def lanes(x):
    """The lanes of a warp that hold the sums of rows 0 to 7; lane 5 has a color."""
    middle = x + 2 * LANE_WIDE
    parts = [text(middle, 24, "a warp: its lanes' sums", "bold"),
             text(middle, TOP + SIDE * 2 + GAP + 38, "rows 8 to 15: the same lanes",
                  "small")]
    for pair in range(4):
        parts.append(text(x + LANE_WIDE * (pair + 0.5), TOP - 8, f"{2 * pair}, {2 * pair + 1}",
                          "small"))
    parts.append(text(x - 8, TOP - 8, "columns", "small", "end"))
    for row in range(8):
        parts.append(text(x - 8, TOP + LANE_HIGH * row + 13, f"row {row}", "small", "end"))
        for pair in range(4):
            lane = 4 * row + pair
            parts += [box(x + LANE_WIDE * pair, TOP + LANE_HIGH * row, LANE_WIDE - 2,
                          LANE_HIGH - 2, "c" if lane == 5 else "box", round=2),
                      text(x + LANE_WIDE * (pair + 0.5) - 1, TOP + LANE_HIGH * row + 12,
                           "lane 5" if lane == 5 else lane, "on small" if lane == 5 else "small")]
    return parts


def timeline(y, words, copies, products):
    """copies, products: when those of each slice begin, in widths of a slice"""
    parts = [text(20, y + 28, words, "bold", "start")]
    for row, name, kind, begins in ((0, "copies", "a", copies), (1, "products", "c", products)):
        parts.append(text(212, y + 22 * row + 15, name, "small", "end"))
        for i, begin in enumerate(begins):
            left = 222 + SLICE * begin
            parts += [box(left, y + 22 * row, SLICE - 2, 20, kind, round=2),
                      text(left + SLICE / 2 - 1, y + 22 * row + 14, i, "on small")]
    return parts


def picture():
    count = range(SLICES)
    return svg(TIMES + 124, "Three small products. In the first, a row of x and a column of w "
               "transposed give one number. In the second, four rows and four columns give a "
               "square of sixteen. In the third, each row of sums is shared by four lanes of a "
               "warp. Below, six copies and six products in turns take twelve units of time; "
               "at the same time, they take seven.",
               *product(20, "one thread: one number", {2}, {4}, "each number read is used once"),
               *product(260, "a block: a square", {0, 1, 2, 3}, {4, 5, 6, 7},
                        "each number read is used 4 times"),
               *lanes(522),
               *timeline(TIMES, "in turns", [2 * i for i in count], [2 * i + 1 for i in count]),
               *timeline(TIMES + 62, "at the same time", count, [i + 1 for i in count]),
               text(222, TIMES + 118, "time →", "small", "start"))
