"""Times what a layer of experts takes by the tile that its programs compute, or by how far they read ahead:
`expert_tiles.py [SHAPES] [ROWS] [--seconds S]`, the first two by commas.

Shapes are held as their checkpoints have them: in bfloat16, or in MXFP4. The bits are the same with any tile. Gates and
the product behind them have one each, of which one is changed at a time; in MXFP4 both where there are more programs
than find room at once. Layers in turn, so that weights come from memory, in a graph; GPUs alone. All candidates are
compiled first, side by side. Each number of rows of a shape is a line of JSON as soon as it is known: µs of a layer as
it is, and with the best candidates. After so many seconds nothing more is tried. The last line has all of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import trtrun  # noqa: F401, I001
import torch

from scripts.bench.gpu_bench.expert_layers import make, time_layers
from trtrun.kernels.torch.experts import Choice, Experts, ExpertWeights
from trtrun.kernels.triton import experts as plain
from trtrun.kernels.triton.coded_experts import four_bits
from trtrun.kernels.triton.compilation.compile_processes import CompileProcesses
from trtrun.kernels.triton.compilation.launches import KernelRequest, collecting
from trtrun.kernels.triton.expert_choice import choose_experts
from trtrun.kernels.triton.operations import TritonOperations
from trtrun.kernels.triton.support import shared_bytes
from trtrun.start.kernels_ahead import count_processes


class Shape(NamedTuple):
    """Of a layer; `chosen` experts are a token's."""

    experts: int
    features: int
    hidden: int
    chosen: int
    form: str = "bfloat16"


SHAPES = {
    "30b-a3b": Shape(128, 768, 2048, 8),
    "35b-a3b": Shape(256, 512, 2048, 8),
    "gpt-oss-120b": Shape(128, 2880, 2880, 4, "mxfp4"),
}
ROWS = (1, 8, 32)
LAYERS, NAMED, SECONDS = 4, 6, 60.0


class Change(NamedTuple):
    """What is tried: candidates for what a table has in one place.

    Attributes:
        kind: what it changes.
        table, key: the place.
        candidates: for it.
    """

    kind: str
    table: MutableMapping[Any, Any]
    key: Any
    candidates: list[Any]


def tiles_of(rows: int, shared: int) -> Iterator[plain.Tile]:
    """Tiles of bfloat16 to try, of so many rows, for so much shared memory."""
    features, inputs = ((16, 32, 64), (128, 256, 512)) if rows == 16 else ((64, 128, 256), (64, 128))
    for width, depth, stages in itertools.product(features, inputs, (2, 3, 4)):
        if (width + rows) * depth * 2 * stages <= shared:
            yield plain.Tile(width, depth, 8 if rows > 64 else 4, stages)


def changes_of(shape: Shape, rows: int) -> list[Change]:
    """What is tried for so many rows of a shape."""
    num_pairs, shared = rows * shape.chosen, shared_bytes(torch.device("cuda"))
    if shape.form == "bfloat16":
        height = plain.tile_rows(num_pairs, shape.experts)
        used, tried = plain.TILES[height], list(tiles_of(height, shared))
        kinds = {"gates": [(it, used[1]) for it in tried], "product": [(used[0], it) for it in tried]}
        return [Change(kind, plain.TILES, height, candidates) for kind, candidates in kinds.items()]
    from trtrun.kernels.triton.coded_experts.four_bits_stream import DEPTHS, FEW_PROGRAMS, Depth, depth_key

    height = four_bits.tile_rows(num_pairs, shape.experts)
    if height > 32:
        from trtrun.kernels.triton.coded_experts.four_bits_prompts import PROGRAMS, Program

        tried = [Program(*it) for it in ((1, 4, 3), (1, 5, 3), (1, 8, 6), (2, 5, 4), (2, 8, 4), (2, 8, 5))]
        return [Change("both", PROGRAMS, four_bits.MANY_ROWS, tried)]
    group = 4096 + 256 + height * 256
    depths = [Depth(*it) for it in itertools.product((1, 2, 4), (3, 4, 5, 7)) if it[0] * it[1] * group <= shared]
    tiles = num_pairs if num_pairs <= four_bits.FEW_PAIRS else num_pairs + shape.experts
    device, kinds = torch.device("cuda"), dict[int | None, str]()
    for kind, features in (("gates", 2 * shape.features), ("product", shape.hidden)):
        kinds[depth_key(height, tiles * -(-features // 64), device)] = kind
    if len(kinds) == 1:
        kinds = dict.fromkeys(kinds, "both")
    return [
        Change(kind, *((DEPTHS, height) if key is None else (FEW_PROGRAMS, key)), depths) for key, kind in kinds.items()
    ]


def trying(change: Change, seen: Callable[[Any], None]) -> None:
    """Call `seen` with each candidate while it is in its place."""
    used = change.table[change.key]
    try:
        for candidate in change.candidates:
            change.table[change.key] = candidate
            seen(candidate)
    finally:
        change.table[change.key] = used


def compile_all(changes: list[Change], call: Callable[[], object]) -> None:
    """Compile what `call` launches with each candidate, side by side."""
    major, minor = torch.cuda.get_device_capability()
    target = {"backend": "cuda", "arch": 10 * major + minor, "warp_size": 32}
    processes = CompileProcesses(count_processes(1))

    def ask(request: KernelRequest) -> None:
        processes.submit({**asdict(request), "target": target})

    try:
        with collecting(ask):
            for change in changes:
                # Of those that this process has compiled before, some do not fit the device: `measure` leaves them out.
                trying(change, lambda _: _ask(call))
        processes.wait()
    finally:
        processes.close()


def _ask(call: Callable[[], object]) -> None:
    with suppress(Exception):
        call()


def measure(name: str, rows: int, layers: list[Experts], deadline: float) -> dict[str, Any]:
    """One number of rows of a shape: one thing changes, the others stay as they are."""
    shape = SHAPES[name]
    x = torch.randn(rows, shape.hidden, device="cuda").bfloat16()
    logits = [torch.randn(rows, shape.experts, device="cuda") for _ in layers]
    choices: list[Choice] = [choose_experts(it, shape.chosen, renormalises=True) for it in logits]
    calls = [partial(layer, x, choice) for layer, choice in zip(layers, choices, strict=True)]
    changes = changes_of(shape, rows)
    found: dict[str, Any] = {"shape": name, "rows": rows, "us": round(time_layers(calls), 2), "left_out": 0}
    compile_all(changes, calls[0])
    for change in changes:
        times: dict[Any, float] = {}

        def see(candidate: Any, times: dict[Any, float] = times) -> None:
            if time.monotonic() > deadline:
                found["left_out"] += 1
                return
            try:
                times[candidate] = time_layers(calls)
            except Exception:  # more shared memory or registers than there are
                found["left_out"] += 1

        trying(change, see)
        best = sorted(times.items(), key=lambda one: one[1])[:NAMED]
        found[change.kind] = [[_written(change.kind, it), round(took, 2)] for it, took in best]
    return found


def _written(kind: str, candidate: Any) -> str:
    """Of bfloat16 features, inputs, warps and stages of the tile that is changed; else groups and steps."""
    tile = candidate[kind == "product"] if isinstance(candidate[0], tuple) else candidate
    return " x ".join(map(str, tile))


def main() -> None:
    """Entry of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="?", default=",".join(SHAPES))
    parser.add_argument("rows", nargs="?", default=",".join(map(str, ROWS)))
    parser.add_argument("--seconds", type=float, default=SECONDS)
    asked = parser.parse_args()
    deadline, results = time.monotonic() + asked.seconds, []
    for name in asked.shapes.split(","):
        shape = SHAPES[name]
        torch.cuda.empty_cache()
        layers = [_make_layer(shape) for _ in range(LAYERS)]
        for rows in map(int, asked.rows.split(",")):
            if time.monotonic() > deadline:
                break
            results.append(measure(name, rows, layers, deadline))
            print(json.dumps(results[-1]), flush=True)
    print(json.dumps({"results": results}), flush=True)


def _make_layer(shape: Shape) -> Experts:
    weights = (
        make(shape.form, shape.experts, 2 * shape.features, shape.hidden),
        make(shape.form, shape.experts, shape.hidden, shape.features),
    )
    gate_up, down = weights
    assert gate_up is not None and down is not None, "all of these shapes can be held so"
    return TritonOperations().experts(ExpertWeights(gate_up, down), "silu", 0.0)


if __name__ == "__main__":
    main()
