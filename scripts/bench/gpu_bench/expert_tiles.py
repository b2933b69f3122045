"""Times what a layer of experts in bfloat16 takes by the tile that its programs compute: `expert_tiles.py [SHAPES]
[ROWS]`, both by commas.

The bits are the same with any tile. Gates and the product behind them have a tile each, of which one is changed at a
time. Layers in turn, so that weights come from memory, in a graph; GPUs alone. The last line is a JSON object: µs of a
layer as it is, and with the best tiles, each as features, inputs, warps, stages, µs.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import trtrun  # noqa: F401, I001
import torch

from scripts.bench.gpu_bench.expert_layers import time_layers
from trtrun.kernels.triton import experts as kernels
from trtrun.kernels.triton.expert_choice import choose_experts

SHAPES = {"30b-a3b": (128, 768, 2048, 8), "35b-a3b": (256, 512, 2048, 8), "gpt-oss-120b": (128, 2880, 2880, 4)}
"""Experts, features, hidden, and how many a token chooses."""

ROWS = (1, 8, 32, 2048, 8192)
LAYERS, NAMED = 4, 6
_SHARED_BYTES = 220_000
"""That a program of an H100 or H200 has, about."""


def random_weights(*shape: int) -> torch.Tensor:
    """Of all experts."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def candidates(rows: int) -> Iterator[kernels.Tile]:
    """Tiles to try, of so many rows."""
    features = (16, 32, 64) if rows == 16 else (64, 128, 256)
    inputs = (128, 256, 512) if rows == 16 else (32, 64, 128)
    for width, depth, warps, stages in itertools.product(features, inputs, (4, 8), (2, 3, 4)):
        if (width + rows) * depth * 2 * stages <= _SHARED_BYTES:
            yield kernels.Tile(width, depth, warps, stages)


def measure(name: str, rows: int, layers: list[kernels.TritonExperts]) -> dict[str, Any]:
    """One number of rows of a shape: one tile changes, the other stays as it is."""
    experts, _, hidden, chosen = SHAPES[name]
    x = torch.randn(rows, hidden, device="cuda").bfloat16()
    choices = [choose_experts(torch.randn(rows, experts, device="cuda"), chosen, renormalises=True) for _ in layers]
    calls = [partial(layer, x, choice) for layer, choice in zip(layers, choices, strict=True)]
    height = kernels.tile_rows(rows * chosen, experts)
    used = kernels.TILES[height]
    found: dict[str, Any] = {"shape": name, "rows": rows, "tile_rows": height}
    try:
        found["us"] = round(time_layers(calls), 2)
        for place, kind in enumerate(("gates", "product")):
            times = {}
            for tile in candidates(height):
                kernels.TILES[height] = (tile, used[1]) if place == 0 else (used[0], tile)
                try:
                    times[tile] = time_layers(calls)
                except Exception as error:  # more shared memory or registers than there are: the next one
                    print(f"{name} {rows} {kind} {tuple(tile)}: {type(error).__name__}", file=sys.stderr)
            best = sorted(times.items(), key=lambda one: one[1])[:NAMED]
            found[kind] = [[*tile, round(time, 2)] for tile, time in best]
            kernels.TILES[height] = used
    finally:
        kernels.TILES[height] = used
    return found


def main() -> None:
    """Entry of the program."""
    named = [argument.split(",") for argument in sys.argv[1:]] + [[]] * 2
    results = []
    for name in named[0] or SHAPES:
        experts, features, hidden, _ = SHAPES[name]
        torch.cuda.empty_cache()
        layers = [
            kernels.TritonExperts(
                (random_weights(experts, 2 * features, hidden), random_weights(experts, hidden, features)),
                (None, None),
                "silu",
                0.0,
            )
            for _ in range(LAYERS)
        ]
        for rows in map(int, named[1] or ROWS):
            results.append(measure(name, rows, layers))
            print(json.dumps(results[-1]), flush=True)
    print(json.dumps({"results": results}), flush=True)


if __name__ == "__main__":
    main()
