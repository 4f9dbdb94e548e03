"""Three vectors before and after RMSNorm"""
import math

from shapes import arrow, circle, line, svg, text

VECTORS = ((1.0, 0.5, "a"), (0.3, 2.2, "b"), (-2.0, 0.9, "c"))


def axes(x, y, caption):
    return (line(x - 120, y, x + 120, y) + line(x, y - 110, x, y + 30)
            + text(x, y + 55, caption))


def picture():
    parts = [axes(190, 140, "before: any length"),
             axes(530, 140, "after: length √2, same direction"),
             arrow(330, 90, 390, 90), text(360, 80, "RMSNorm", "bold")]
    unit = 45
    ring = [(530 + unit * math.sqrt(2) * math.cos(i / 50 * math.pi),
             140 - unit * math.sqrt(2) * math.sin(i / 50 * math.pi)) for i in range(51)]
    parts.append('<polyline class="line" stroke-dasharray="3 5" points="'
                 + " ".join(f"{x:.1f},{y:.1f}" for x, y in ring) + '"/>')
    for x, y, kind in VECTORS:
        rms = math.sqrt((x * x + y * y) / 2)
        parts.append(arrow(190, 140, 190 + unit * x, 140 - unit * y, f"{kind}b"))
        parts.append(arrow(530, 140, 530 + unit * x / rms, 140 - unit * y / rms, f"{kind}b"))
        parts.append(circle(530 + unit * x / rms, 140 - unit * y / rms, 2.5, kind))
    return svg(210, "Three vectors of different lengths point in three directions. After RMSNorm "
               "they have the same length and the same directions.", *parts)
