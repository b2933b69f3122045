"""Draws a run's loss and acceptance by depth as SVG: a small text file that every browser shows.

It needs nothing but Python, and knows lines of metrics alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 300, 56, 34, 84, 34
COLOURS = ("#2f6db5", "#2e8b57", "#d0752c", "#8e5ea2", "#c2517a", "#3aa6a6", "#b58900", "#6b6b47")
MOST_POINTS = 400
"""Of a curve: more are averaged."""

Point = tuple[float, float]


def draw_curves(metrics: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the picture of a run.

    Args:
        metrics: a mapping a step, with `step`, `loss` and on some steps `acceptance_by_depth`.
        path: of the SVG file.
    """
    losses = _by_depth(metrics, "loss")
    shares = _by_depth([line for line in metrics if "acceptance_by_depth" in line], "acceptance_by_depth")
    last = max((line["step"] for line in metrics), default=1)
    most = max((value for curve in losses for _, value in curve), default=1.0)
    parts = [
        _panel("loss by depth", [_thin(curve) for curve in losses], last, _round_up(most), 0),
        _panel("share accepted up to each depth, held-out rows", shares, last, 1.0, HEIGHT),
    ]
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {2 * HEIGHT}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="100%" height="100%" fill="#ffffff"/>\n{"".join(parts)}</svg>\n',
        encoding="utf-8",
    )


def _by_depth(metrics: Sequence[Mapping[str, Any]], key: str) -> list[list[Point]]:
    depths = max((len(line[key]) for line in metrics), default=0)
    return [[(line["step"], line[key][depth]) for line in metrics] for depth in range(depths)]


def _thin(curve: Sequence[Point]) -> list[Point]:
    """The means of neighbouring points, MOST_POINTS at most."""
    size = math.ceil(len(curve) / MOST_POINTS)
    groups = [curve[first : first + size] for first in range(0, len(curve), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def _round_up(value: float) -> float:
    """The next of 1, 2 and 5 times a power of ten."""
    if not value > 0 or not math.isfinite(value):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= value), 10 * power)


def _panel(title: str, curves: Sequence[Sequence[Point]], last: float, most: float, top: int) -> str:
    """One diagram: axes, a curve for each depth, and their names at the right."""
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x_of(step: float) -> float:
        return LEFT + width * step / max(1.0, last)

    def y_of(value: float) -> float:
        return top + TOP + height * (1 - min(max(value, 0.0), most) / most)

    lines = [f'<text x="{LEFT}" y="{top + 20}" font-weight="bold">{escape(title)}</text>\n']
    for index in range(6):
        value, y = most * index / 5, y_of(most * index / 5)
        lines.append(f'<path d="M{LEFT} {y:.1f}H{LEFT + width}" stroke="#e3e6ea"/>\n')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>\n')
        step, x = last * index / 5, x_of(last * index / 5)
        lines.append(f'<text x="{x:.1f}" y="{top + HEIGHT - 14}" text-anchor="middle">{step:.0f}</text>\n')
    for depth, curve in enumerate(curves):
        lines.append(_curve(curve, COLOURS[depth % len(COLOURS)], f"depth {depth + 1}", x_of, y_of))
        y = top + TOP + 14 + 18 * depth
        colour = COLOURS[depth % len(COLOURS)]
        lines.append(f'<text x="{LEFT + width + 10}" y="{y}" fill="{colour}">depth {depth + 1}</text>\n')
    return "".join(lines)


def _curve(
    curve: Sequence[Point],
    colour: str,
    name: str,
    x_of: Callable[[float], float],
    y_of: Callable[[float], float],
) -> str:
    points = " ".join(f"{x_of(step):.1f},{y_of(value):.1f}" for step, value in curve if math.isfinite(value))
    dots = f'<circle cx="{x_of(curve[0][0]):.1f}" cy="{y_of(curve[0][1]):.1f}" r="2" fill="{colour}"/>' if curve else ""
    return f'<g><title>{name}</title>{dots}<polyline points="{points}" fill="none" stroke="{colour}"/></g>\n'
