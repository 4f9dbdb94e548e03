"""Shapes for the pictures of docs/tour: SVG that follows the reader's light or dark setting."""
from xml.sax.saxutils import escape

WIDE = 720
# classes: a, b, c fill with the three colors; ab, bb, cb draw lines in them; faint is gray
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #333 } .small { font-size: 11px }
.mono { font-family: ui-monospace, monospace } .bold { font-weight: 600 }
.a { fill: #3b7dbf } .b { fill: #d98a1f } .c { fill: #b3446c } .faint { fill: #999 }
.ab, .bb, .cb, .line { fill: none; stroke-width: 2 } .ab { stroke: #3b7dbf } .bb { stroke: #d98a1f }
.cb { stroke: #b3446c } .line { stroke: #999; stroke-width: 1 } .box { fill: #f3f3f3; stroke: #bbb }
.on { fill: #fff }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .a { fill: #7db8ef } .b { fill: #f0b860 }
.c { fill: #ff8fb3 } .faint { fill: #888 } .ab { stroke: #7db8ef } .bb { stroke: #f0b860 }
.cb { stroke: #ff8fb3 } .line { stroke: #777 } .box { fill: #2a2a2a; stroke: #666 }
.on { fill: #111 } }
"""


def svg(height, label, *parts):
    """A picture of this height, 720 wide.  label: what it shows, for readers who cannot see it"""
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {height}" role="img" '
            f'aria-label="{escape(label, {chr(34): "&quot;"})}"><style>{STYLE}</style>'
            f'{"".join(parts)}</svg>\n')


def text(x, y, words, kind="", anchor="middle"):
    return (f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
            f'{escape(str(words))}</text>')


def box(x, y, width, height, kind="box", opacity=1.0, round=4):
    shade = f' opacity="{opacity:.2f}"' if opacity < 1 else ""
    return (f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}" rx="{round}"{shade}/>')


def line(x1, y1, x2, y2, kind="line", dashed=False):
    dash = ' stroke-dasharray="3 5"' if dashed else ""
    return (f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"{dash}/>')


def arrow(x1, y1, x2, y2, kind="line"):
    """A line with a head at its end"""
    length = max(1e-9, ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5)
    ux, uy = (x2 - x1) / length, (y2 - y1) / length
    left, right = ((x2 - 8 * ux + s * 4 * uy, y2 - 8 * uy - s * 4 * ux) for s in (1, -1))
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (left, (x2, y2), right))
    return line(x1, y1, x2, y2, kind) + f'<polyline class="{kind}" points="{points}"/>'


def curve(points, kind="ab"):
    return (f'<polyline class="{kind}" points="'
            + " ".join(f"{x:.1f},{y:.1f}" for x, y in points) + '"/>')


def circle(x, y, r, kind="a"):
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{r:.1f}"/>'
