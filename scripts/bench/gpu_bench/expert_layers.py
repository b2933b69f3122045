"""Times layers of experts on one GPU, by what they are held in and by rows, in one process.

    python scripts/bench/gpu_bench/expert_layers.py [SHAPE,SHAPE] [FORM,FORM] [ROWS,ROWS]

A graph has layers whose tokens choose other experts each, so that weights come from memory. A line as soon as it is
known: microseconds a layer, and the bytes of the experts that are read by that time. The last line is a JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import trtrun  # noqa: F401, I001
import torch

from trtrun.kernels.torch import fp4, integers
from trtrun.kernels.torch.experts import Choice, ExpertCodes, ExpertWeights, choose_experts
from trtrun.kernels.triton.coded_experts.coded_experts import FourBitProduct
from trtrun.kernels.triton.coded_experts.suitability import random_weight, streams
from trtrun.kernels.triton.operations import TritonOperations


class _Shape(NamedTuple):
    """Of a layer."""

    experts: int
    hidden: int
    features: int
    chosen: int


SHAPES = {"30b-a3b": _Shape(128, 2048, 768, 8), "gpt-oss-120b": _Shape(128, 2880, 2880, 4)}
FORMS = ("bfloat16", "mxfp4", "fp8", "fp8_block", "nvfp4", "int4", "fp8_weight_only")
ROWS = (1, 8, 32, 128, 1024, 4096)
LAYERS, REPEATS = 12, 15


def make(form: str, experts: int, features: int, inputs: int) -> torch.Tensor | ExpertCodes | None:
    """One matrix of all experts, made up; None where a form cannot hold it."""
    generator = torch.Generator("cuda").manual_seed(features)
    if form == "bfloat16":
        return torch.randn(experts, features, inputs, device="cuda", dtype=torch.bfloat16).mul_(inputs**-0.5)
    if form.startswith("fp8"):
        bits = torch.randint(0, 0x70, (experts, features, inputs), device="cuda", dtype=torch.uint8)
        codes = bits.view(torch.float8_e4m3fn)
        blocks = (experts, -(-features // 128), -(-inputs // 128))
        name, shape = ("block_scale", blocks) if form == "fp8_block" else ("scale", (experts, features))
        scale = torch.full(shape, 1e-3, device="cuda")
        return ExpertCodes({"codes": codes, name: scale}, features, inputs, form == "fp8")
    if form == "int4" and inputs % integers.GROUP:
        return None
    size = {"int4": integers.GROUP, "mxfp4": fp4.MXFP4_BLOCK, "nvfp4": fp4.NVFP4_BLOCK}[form]
    one = random_weight(features, inputs, size, form != "int4", torch.bfloat16, generator)
    tensors = {name: it.expand(experts, *it.shape).contiguous() for name, it in one.items()}
    return ExpertCodes(tensors, features, inputs)


def bytes_of(weight: torch.Tensor | ExpertCodes) -> int:
    """Of all experts."""
    tensors = weight.tensors.values() if isinstance(weight, ExpertCodes) else [weight]
    return sum(it.numel() * it.itemsize for it in tensors)


def time_layers(layers: Sequence[Callable[[], object]]) -> float:
    """Microseconds of one of `layers`, from a graph of all of them, the median of some runs."""
    layers[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            layer()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = sorted(one.elapsed_time(other) for one, other in pairwise(events))
    return float(times[len(times) // 2]) * 1e3 / len(layers)


def measure(shape: _Shape, weights: ExpertWeights, rows: int) -> dict[str, Any]:
    """One number of rows."""
    experts = TritonOperations().experts(weights, "silu", 0.0)
    x = torch.randn(rows, shape.hidden, device="cuda").bfloat16()
    choices = [
        choose_experts(torch.randn(rows, shape.experts, device="cuda"), shape.chosen, renormalises=True)
        for _ in range(LAYERS)
    ]
    microseconds = time_layers([partial(experts, x, choice) for choice in choices])
    read = sum(_count(choice) for choice in choices) / LAYERS / shape.experts
    held = bytes_of(weights.gate_up) + bytes_of(weights.down)
    return {"rows": rows, "us": round(microseconds, 1), "TB/s": round(held * read / microseconds / 1e6, 2)}


def _count(choice: Choice) -> int:
    return int(choice.experts.unique().numel())


def main() -> None:
    """Entry of the program."""
    named = [argument.split(",") for argument in sys.argv[1:]] + [[]] * 3
    started, results = time.perf_counter(), []
    for form in named[1] or FORMS:
        for name in named[0] or SHAPES:
            shape = SHAPES[name]
            torch.cuda.empty_cache()
            gate_up = make(form, shape.experts, 2 * shape.features, shape.hidden)
            down = make(form, shape.experts, shape.hidden, shape.features)
            if gate_up is None or down is None:
                continue
            for rows in map(int, named[2] or ROWS):
                found = {"shape": name, "form": form, **measure(shape, ExpertWeights(gate_up, down), rows)}
                if isinstance(gate_up, ExpertCodes) and "words" in gate_up.tensors:
                    height = FourBitProduct(gate_up, None).tile_rows(rows * shape.chosen, torch.bfloat16)
                    found |= {"tile": height, "streams": streams(gate_up, torch.bfloat16, height, False)}
                results.append(found)
                print(f"{time.perf_counter() - started:6.1f} s {json.dumps(found)}", flush=True)
            del gate_up, down
    print(json.dumps({"results": results}), flush=True)


if __name__ == "__main__":
    main()
