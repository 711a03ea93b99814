"""A bar chart as SVG of each measurement relative to its threshold. Right of the line is better."""

import math
from xml.sax.saxutils import escape

ROW, WIDTH, LEFT = 34, 760, 210
OCTAVES = 3  # the axis is from 1/8 of the threshold to 8 times the threshold


def x_of(score):
    """The position of a score on a logarithmic axis whose middle is the threshold."""
    octaves = max(-OCTAVES, min(OCTAVES, math.log2(score))) if score > 0 else -OCTAVES
    return LEFT + (octaves + OCTAVES) / (2 * OCTAVES) * (WIDTH - LEFT - 20)


def target_score(row):
    if row["target"] is None:
        return None
    return row["threshold"] / row["target"] if row["less_is_better"] else row["target"] / row["threshold"]


def render(rows):
    height = ROW * len(rows) + 90
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        '<text x="16" y="24" font-size="15">Terrace compared with bare UDP, relative to the threshold</text>',
    ]
    bottom = 44 + ROW * len(rows)
    for octave in range(-OCTAVES, OCTAVES + 1):
        x = x_of(2.0**octave)
        label = f"{2**octave}x" if octave >= 0 else f"1/{2**-octave}"
        parts.append(f'<line x1="{x:.1f}" y1="40" x2="{x:.1f}" y2="{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle" fill="#555">{label}</text>')
    for index, row in enumerate(rows):
        parts += _bar(44 + ROW * index, row)
    threshold_x = x_of(1)
    parts.append(f'<line x1="{threshold_x:.1f}" y1="36" x2="{threshold_x:.1f}" y2="{bottom}" stroke="black" stroke-width="1.5"/>')
    parts.append(f'<text x="{LEFT}" y="{bottom + 36}" fill="#555">black line: the threshold; dashes: the target</text>')
    return "\n".join([*parts, "</svg>", ""])


def _bar(y, row):
    start, end = x_of(2.0**-OCTAVES), x_of(row["score"])
    colour = "#2f7d4f" if row["meets_threshold"] else "#b3402e"
    text = f"{row['value']:.4g} {row['unit']}, {row['ratio']:.2f} of bare UDP"
    parts = [
        f'<text x="{LEFT - 10}" y="{y + 17}" text-anchor="end">{escape(row["name"])}</text>',
        f'<rect x="{start:.1f}" y="{y + 3}" width="{max(end - start, 1):.1f}" height="{ROW - 12}" fill="{colour}"/>',
        f'<text x="{start + 6:.1f}" y="{y + 18}" fill="white">{escape(text)}</text>',
    ]
    target = target_score(row)
    if target is not None:
        x = x_of(target)
        parts.append(f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + ROW - 6}" stroke="black" stroke-dasharray="3 2"/>')
    return parts
