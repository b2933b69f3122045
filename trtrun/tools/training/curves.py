"""Draws a run's loss and acceptance by depth, as PNG or whatever else matplotlib writes.

It knows lines of metrics alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_POINTS = 400
"""Points of a curve: more are averaged."""


def draw_curves(metrics: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the picture of a run.

    Args:
        metrics: a mapping a step, with `step`, `loss` and on some steps `acceptance_by_depth`.
        path: of the file, whose end says of which kind it is.

    Raises:
        OSError: it cannot be written.
    """
    figure_of(metrics).savefig(path, dpi=150)


def figure_of(metrics: Sequence[Mapping[str, Any]]) -> Figure:
    """The picture: loss above, acceptance below, a curve for each depth. Arguments as of `draw_curves`."""
    from matplotlib.figure import Figure  # without pyplot, which looks for a display

    figure = Figure(figsize=(8, 7), layout="constrained")
    losses, shares = figure.subplots(2, 1, sharex=True)
    _draw(losses, [_thin(curve) for curve in _by_depth(metrics, "loss")])
    losses.set(ylabel="loss by depth", ylim=(0, None))
    _draw(shares, _by_depth([line for line in metrics if "acceptance_by_depth" in line], "acceptance_by_depth"), "o-")
    shares.set(ylabel="share accepted up to each depth, held-out rows", xlabel="step", ylim=(0, 1))
    return figure


def _by_depth(metrics: Sequence[Mapping[str, Any]], key: str) -> list[np.ndarray]:
    """A curve [points, 2] of steps and values for each depth."""
    depths = max((len(line[key]) for line in metrics), default=0)
    return [np.array([(line["step"], line[key][depth]) for line in metrics]) for depth in range(depths)]


def _thin(curve: np.ndarray) -> np.ndarray:
    """The means of neighbouring points at the last one's step, MOST_POINTS at most."""
    size = -(-len(curve) // MOST_POINTS)
    groups = [curve[first : first + size] for first in range(0, len(curve), size)]
    return np.array([(group[-1, 0], group[:, 1].mean()) for group in groups])


def _draw(axes: Axes, curves: Sequence[np.ndarray], form: str = "-") -> None:
    for depth, curve in enumerate(curves):
        axes.plot(curve[:, 0], curve[:, 1], form, markersize=3, linewidth=1, label=f"depth {depth + 1}")
    axes.grid(alpha=0.3)
    if curves:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
