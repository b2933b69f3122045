"""Draws a few rounds of a trace of `trtrun bench --trace` as SVG: small text files for documents.

    python scripts/bench/draw_trace.py trace.json rounds.svg [--run 1] [--first 3] [--rounds 4]

A row for each rank, a box for each span; boxes say their round where there is room, and phase and milliseconds when
pointed at. It needs nothing but Python, and knows the file alone.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, MARGIN, LABELS = 960, 12, 220
ROW, BOX, LEGEND, AXIS = 34, 24, 34, 40
COLOURS = {
    "planning": "#b58900", "committing": "#d0752c", "drafting": "#2e8b57", "anticipating": "#7fc29b",
    "transferring": "#9aa5b1", "verifying": "#2f6db5", "waiting": "#e3e6ea",
}  # fmt: skip
OTHER_COLOURS = ("#8e5ea2", "#c2517a", "#3aa6a6", "#6b6b47")
DARK = {"planning", "committing", "drafting", "verifying", *OTHER_COLOURS}
"""Phases and colours on which words are white."""


@dataclass(frozen=True)
class Box:
    """A span: microseconds."""

    name: str
    round_index: int
    start: float
    end: float


@dataclass(frozen=True)
class Picture:
    """What is drawn: rows from the top down, each with its name, and the microseconds from left to right."""

    title: str
    rows: list[tuple[str, list[Box]]]
    start: float
    end: float


def read_picture(trace: dict[str, Any], run: int | None, first: int, rounds: int) -> Picture:
    """Choose `rounds` rounds of a run, from its `first` on, counted from 0; of the last run where none is named.

    Raises:
        ValueError: there is no such run or round.
    """
    events = trace["traceEvents"]
    labels = {event["args"]["run"]: event["name"] for event in events if event.get("cat") == "run"}
    run = max(labels, default=0) if run is None else run
    if run not in labels:
        raise ValueError(f"there is no run {run}: the trace has {len(labels)}")
    spans = [event for event in events if event["ph"] == "X" and event["cat"] != "run" and event["args"]["run"] == run]
    numbers = sorted({event["args"]["round"] for event in spans})
    if first >= len(numbers):
        raise ValueError(f"run {run} has {len(numbers)} rounds, so none with number {first}")
    wanted = set(numbers[first : first + rounds])
    chosen = [event for event in spans if event["args"]["round"] in wanted]
    start, end = min(event["ts"] for event in chosen), max(event["ts"] + event["dur"] for event in chosen)
    rows: dict[tuple[int, int], list[Box]] = {}
    for event in sorted(spans, key=lambda event: (event["pid"], event["tid"], event["ts"])):
        boxes = rows.setdefault((event["pid"], event["tid"]), [])
        left, right = max(start, event["ts"]), min(end, event["ts"] + event["dur"])
        if left < right:
            boxes.append(Box(event["name"], event["args"]["round"], left, right))
    names = _row_names(events, list(rows))
    return Picture(labels[run], [(names[place], boxes) for place, boxes in rows.items()], start, end)


def _row_names(events: list[dict[str, Any]], places: list[tuple[int, int]]) -> dict[tuple[int, int], str]:
    """The name of each row: its process's, or where a process has several rows the thread's."""
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    several = {process for process, _ in places if sum(place[0] == process for place in places) > 1}
    return {place: threads[place] if place[0] in several else processes[place[0]] for place in places}


def draw(picture: Picture) -> str:
    """The picture as SVG."""
    height = 2 * MARGIN + LEGEND + ROW * len(picture.rows) + AXIS
    scale = (WIDTH - LABELS - 2 * MARGIN) / (picture.end - picture.start)
    left, top = MARGIN + LABELS, MARGIN + LEGEND
    names = list(dict.fromkeys(box.name for _, boxes in picture.rows for box in boxes))
    colours = _colours(names)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12"><title>{escape(picture.title)}</title><rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    ]
    parts += _legend(names, colours)
    for index, (name, boxes) in enumerate(picture.rows):
        y = top + ROW * index
        parts.append(f'<text x="{MARGIN}" y="{y + 16}">{escape(name)}</text>')
        parts.append(f'<path d="M{left} {y + BOX}H{WIDTH - MARGIN}" stroke="#ccc"/>')
        for box in boxes:
            x, width = left + (box.start - picture.start) * scale, (box.end - box.start) * scale
            parts += _box(box, colours[box.name], x, y, width)
    parts += _axis(picture, left, top + ROW * len(picture.rows), scale)
    return "\n".join([*parts, "</svg>\n"])


def _colours(names: list[str]) -> dict[str, str]:
    unknown = [name for name in names if name not in COLOURS]
    return COLOURS | {name: OTHER_COLOURS[index % len(OTHER_COLOURS)] for index, name in enumerate(unknown)}


def _legend(names: list[str], colours: dict[str, str]) -> list[str]:
    parts = []
    for index, name in enumerate(names):
        x = MARGIN + LABELS + 104 * index
        parts.append(f'<rect x="{x}" y="{MARGIN}" width="12" height="12" fill="{colours[name]}"/>')
        parts.append(f'<text x="{x + 17}" y="{MARGIN + 11}">{escape(name)}</text>')
    return parts


def _box(box: Box, colour: str, x: float, y: int, width: float) -> list[str]:
    """A span; one that nobody could see is left out."""
    if width < 0.15:
        return []
    says = f"{escape(box.name)}, round {box.round_index}, {(box.end - box.start) / 1e3:.3f} ms"
    place = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BOX}"'
    parts = [f'<rect {place} fill="{colour}"><title>{says}</title></rect>']
    if width > 9 * len(str(box.round_index)):
        ink = "#fff" if box.name in DARK or colour in DARK else "#333"
        parts.append(
            f'<text x="{x + width / 2:.1f}" y="{y + 16}" text-anchor="middle" font-size="11" fill="{ink}" '
            f'pointer-events="none">{box.round_index}</text>'
        )
    return parts


def _axis(picture: Picture, left: int, y: int, scale: float) -> list[str]:
    """Milliseconds from the first span on, in steps of 1, 2 or 5."""
    elapsed = (picture.end - picture.start) / 1e3
    power = 10 ** math.floor(math.log10(elapsed / 5))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= elapsed / 10)
    parts = []
    for index in range(math.floor(elapsed / step) + 1):
        x = left + index * step * 1e3 * scale
        parts.append(f'<path d="M{x:.1f} {y - 4}v6" stroke="#888"/>')
        unit = " ms" if index == 0 else ""
        parts.append(f'<text x="{x:.1f}" y="{y + 16}" text-anchor="middle">{index * step:g}{unit}</text>')
    return parts


def main() -> int:
    """Read the command line and draw."""
    parser = argparse.ArgumentParser(description="Draw a few rounds of a trace as SVG.")
    parser.add_argument("trace", type=Path, help="file of trtrun bench --trace")
    parser.add_argument("picture", type=Path, help="SVG file to write")
    parser.add_argument("--run", type=int, help="number of the timed run; default the last")
    parser.add_argument(
        "--first", type=int, default=3, help="first round of the run to draw, counted from 0; default 3"
    )
    parser.add_argument("--rounds", type=int, default=4, help="rounds to draw; default 4")
    options = parser.parse_args()
    if options.first < 0 or options.rounds < 1:
        parser.error("--first is at least 0, --rounds at least 1")
    try:
        trace = json.loads(options.trace.read_text(encoding="utf-8"))
        picture = draw(read_picture(trace, options.run, options.first, options.rounds))
        options.picture.write_text(picture, encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"draw_trace.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
