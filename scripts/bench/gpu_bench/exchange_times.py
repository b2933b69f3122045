"""Times what ranks send each other for a layer of experts, and such layers cut both ways, by rows.

    python -m scripts.bench.gpu_bench.exchange_times CONFIG SHAPE ROWS,ROWS

It starts the ranks of the configuration, as `trtrun` does; those of the target take part. On GPUs calls lie in a CUDA
graph, each with tokens that choose other experts. The last line is a JSON object: µs a layer, of the slowest rank.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.jobs.mpi.job import Job
from scripts.bench.gpu_bench.models import SHAPES, Shape
from trtrun.configuration.config import load_config

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

    from parallel.communicator import Communicator
    from trtrun.kernels.torch.experts import Choice, Experts

Layer = Callable[[int], object]
"""Enqueues a layer's work by its number."""

LAYERS, REPEATS = 12, 9


def time_layers(layer: Layer, device: torch.device, world: MPI.Intracomm) -> float:
    """Microseconds of a layer on this rank, the median of some times LAYERS of them. Collective."""
    import torch

    layer(0)  # what is compiled or connected at first use cannot be captured
    if device.type == "cpu":
        return statistics.median(_time_once(layer, world) for _ in range(REPEATS)) / LAYERS
    torch.cuda.synchronize(device)
    graph, taken = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for number in range(LAYERS):
            layer(number)
    for _ in range(REPEATS):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        world.Barrier()
        started.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize(device)
        taken.append(1e3 * started.elapsed_time(ended))
    graph.reset()  # NCCL waits for ever for graphs that hold its operations when a communicator is destroyed
    return statistics.median(taken) / LAYERS


def _time_once(layer: Layer, world: MPI.Intracomm) -> float:
    world.Barrier()
    started = time.perf_counter()
    for number in range(LAYERS):
        layer(number)
    return 1e6 * (time.perf_counter() - started)


class CutLayers:
    """Layers of one shape's experts with made-up weights, as this rank holds them by either cut."""

    def __init__(self, shape: Shape, communicator: Communicator) -> None:
        import torch

        from trtrun.layers.experts import ExchangedExperts, SummedExperts

        assert shape.experts is not None
        self._shape, self._communicator = shape, communicator
        self._dtype = getattr(torch, shape.dtype)
        count, _, features = shape.experts
        size = communicator.size
        self.by_features = SummedExperts(self._make(count, features // size), communicator)
        self.by_experts = ExchangedExperts(self._make(count // size, features), count, communicator)

    def _make(self, count: int, features: int) -> Experts:
        from trtrun.kernels.chooser import operations_of
        from trtrun.kernels.torch.experts import ExpertWeights

        gate_up = self._random(count, 2 * features, self._shape.hidden)
        down = self._random(count, self._shape.hidden, features)
        operations = operations_of(self._communicator.device.type)
        return operations.experts(ExpertWeights(gate_up, down), "silu", 0.0)

    def _random(self, *size: int) -> torch.Tensor:
        import torch

        device = self._communicator.device
        return torch.randn(size, device=device, dtype=self._dtype).mul_(size[-1] ** -0.5)

    def _choose(self, rows: int, generator: torch.Generator) -> Choice:
        """What tokens of a layer choose, the same on all ranks."""
        import torch

        from trtrun.kernels.torch.experts import choose_experts

        assert self._shape.experts is not None
        count, chosen, _ = self._shape.experts
        logits = torch.randn(rows, count, generator=generator).to(self._communicator.device)
        return choose_experts(logits, chosen, renormalises=True)

    def cases(self, rows: int) -> dict[str, Layer]:
        """What is timed of so many rows, by name."""
        import torch

        assert self._shape.experts is not None
        size, hidden, chosen = self._communicator.size, self._shape.hidden, self._shape.experts.chosen
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, hidden, generator=generator).to(self._communicator.device, self._dtype)
        choices = [self._choose(rows, generator) for _ in range(LAYERS)]
        made, columns = self._random(size, rows * chosen, hidden // size), self._random(rows, hidden // size)
        summed = torch.zeros_like(x)
        return {
            "all-to-all": lambda _: self._communicator.all_to_all(made),
            "all-gather": lambda _: self._communicator.all_gather(columns),
            "all-reduce": lambda _: self._communicator.all_reduce(summed),
            "layer by features": lambda number: self.by_features(x, choices[number]),
            "layer by experts": lambda number: self.by_experts(x, choices[number]),
        }


def main() -> int:
    """Entry of the program: mpirun's parent, or a rank."""
    config = load_config(Path(sys.argv[1]))
    job = Job(config, sys.argv[1:], module="scripts.bench.gpu_bench.exchange_times")
    status = job.enter(lambda: None)
    if status is not None:
        return status
    import torch
    from mpi4py import MPI

    from launch.jobs.mpi.start_progress import DONE, StartProgress
    from parallel.groups import open_groups
    from trtrun.start.startup import device_of

    world = MPI.COMM_WORLD
    StartProgress().tell(DONE, "layers of experts")
    slot = job.topology.slot(world.Get_rank())
    device = torch.device("cpu") if slot is None else device_of(slot)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    groups = open_groups(world, job.topology, device)
    results: list[dict[str, Any]] = []
    if groups.target is not None:
        team = world.Split(0, world.Get_rank())
        layers = CutLayers(SHAPES[sys.argv[2]], groups.target)
        for rows in map(int, sys.argv[3].split(",")):
            own = {name: time_layers(layer, device, team) for name, layer in layers.cases(rows).items()}
            slowest = {name: team.allreduce(us, MPI.MAX) for name, us in own.items()}
            results.append({"rows": rows, "us": {name: round(us, 2) for name, us in slowest.items()}})
        if groups.target.rank == 0:
            print(json.dumps({"device": str(device), "results": results}), flush=True)
    else:
        world.Split(MPI.UNDEFINED, 0)
    groups.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
