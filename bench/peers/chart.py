"""Line charts over sizes on logarithmic axes, as SVG."""

import math
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 980, 520, 80, 290, 50, 50
COLOURS = ("#1b6e3c", "#4fae6f", "#0f4c81", "#5b9bd5", "#b3402e", "#e8836f", "#7a4b9e", "#b58fd1", "#8a6d1d", "#d8b64a", "#444444", "#999999",
           "#00838f", "#4dd0e1", "#ad1457", "#f06292", "#33691e", "#9ccc65", "#5d4037")


def render(title, series, y_label):
    """`series`: name to [(size, value), ...]; values are positive."""
    series = {name: sorted(points) for name, points in series.items() if points}
    points = [point for line in series.values() for point in line]
    if not points:
        return None
    x_range = _range([x for x, _ in points], 2)
    y_range = _range([y for _, y in points], 10)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="16" y="26" font-size="15">{escape(title)}</text>',
        f'<text x="16" y="42" fill="#555">{escape(y_label)}</text>',
        *_grid(sorted({x for x, _ in points}), x_range, y_range),
    ]
    for index, (name, line) in enumerate(series.items()):
        parts += _line(index, name, line, x_range, y_range)
    return "\n".join([*parts, "</svg>", ""])


def _range(values, base):
    low, high = math.log(min(values)), math.log(max(values))
    pad = math.log(base) / 4
    return low - pad, high + pad


def _x(value, x_range):
    return LEFT + (math.log(value) - x_range[0]) / (x_range[1] - x_range[0]) * (WIDTH - LEFT - RIGHT)


def _y(value, y_range):
    return HEIGHT - BOTTOM - (math.log(value) - y_range[0]) / (y_range[1] - y_range[0]) * (HEIGHT - TOP - BOTTOM)


def _grid(sizes, x_range, y_range):
    parts = []
    for size in sizes:
        x = _x(size, x_range)
        text = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB" if size >= 1024 else f"{size} B"
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#eee"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" fill="#555">{text}</text>')
    for exponent in range(math.ceil(y_range[0] / math.log(10)), math.floor(y_range[1] / math.log(10)) + 1):
        y = _y(10.0**exponent, y_range)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{10.0**exponent:g}</text>')
    return parts


def _line(index, name, line, x_range, y_range):
    colour = COLOURS[index % len(COLOURS)]
    dash = ' stroke-dasharray="5 3"' if index % 2 else ""
    path = " ".join(f"{_x(x, x_range):.1f},{_y(y, y_range):.1f}" for x, y in line)
    y = TOP + 12 + 22 * index
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>']
    parts += [f'<circle cx="{_x(x, x_range):.1f}" cy="{_y(value, y_range):.1f}" r="3" fill="{colour}"/>' for x, value in line]
    parts.append(f'<line x1="{WIDTH - RIGHT + 16}" y1="{y}" x2="{WIDTH - RIGHT + 40}" y2="{y}" stroke="{colour}" stroke-width="2"{dash}/>')
    parts.append(f'<text x="{WIDTH - RIGHT + 46}" y="{y + 4}">{escape(name)}</text>')
    return parts
