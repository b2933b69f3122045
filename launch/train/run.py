"""A training run: models, data and loop put together on each rank, and what the user sees of it: lines, and curves of
loss and acceptance by depth.

It knows how a run goes and how it ends. The arithmetic is `trtrun.tools.training`'s.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from launch.exit_codes import ExitCode, FailedError
from launch.jobs.mpi.drain import Drain
from launch.jobs.mpi.job import finish_mpi
from launch.jobs.mpi.start_progress import DONE, StartProgress
from launch.jobs.terminal import Bar
from launch.train.checks import describe_models, find_start, read_training_data
from launch.train.job import TrainOptions, place_training_ranks
from launch.train.watch import TrainingWatch
from parallel.communicator import Communicator
from parallel.mpi_rank import find_mpi_rank
from parallel.transports import open_communicator
from parallel.watchdog.activity import Activity, Phase
from parallel.watchdog.fault_attribution import FIRST_STEP
from trtrun.files import put_in_place
from trtrun.start.job_spec import JobSpec
from trtrun.tokens.text import hash_tokenizer_files
from trtrun.tools.training.loop import DivergedError, TrainingLoop, describe
from trtrun.tools.training.methods.table import DraftTraining, MethodContext, find_method
from trtrun.tools.training.models import Target, tell_modules
from trtrun.tools.training.state import StateFile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES = "curves.png"

MOST_POINTS = 400
"""Points of a curve: more are averaged."""


def play_training(spec: JobSpec, options: TrainOptions, drain: Drain) -> int:
    """This rank's part of a run. Collective.

    Raises:
        TrtrunError: the models or the data are wrong.
        FailedError: the run cannot go on; the last checkpoint stays.
    """
    config, place = spec.config, find_mpi_rank()
    rank = place.rank if place is not None else 0
    state_file = StateFile(options.output)
    if options.resume and state_file.result_path.exists():
        if rank == 0:
            tell("nothing left to train")
            print(state_file.result_path.read_text(encoding="utf-8").strip(), flush=True)
        return ExitCode.DONE
    topology = place_training_ranks(config)
    slot = topology.slots[rank]
    device = torch.device(slot.device if slot.device.startswith("cuda") else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world = None
    if place is not None and place.size > 1:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
    with TrainingWatch(config.launch, topology, world) as watch:
        with StartProgress() as teller:  # the parent ends a job whose ranks do not tell that they are done with this
            teller.tell(FIRST_STEP + 1, "joining the other ranks")
            watch.join()
            teller.tell(FIRST_STEP + 2, "loading models and data")
            communicator = open_communicator(device, world, "training")
            with Bar("loading models and data"):
                run = _prepare(spec, options, device, communicator, state_file, watch.activity)
            watch.finish_start()
            teller.tell(DONE, "the start")
        drain.start_running()
        status = _play(run, options, drain, communicator)
        communicator.close()
    finish_mpi()
    return status


def _play(run: Run, options: TrainOptions, drain: Drain, communicator: Communicator) -> ExitCode:
    """The steps, to the last one or an order to end, and what follows. Collective.

    Raises:
        FailedError: the run cannot go on; the last checkpoint stays.
    """
    try:
        with Bar("steps") as bar:
            bar.update(run.loop.step, run.loop.steps)
            is_done = run.loop.run(Progress(run.loop, bar).tell, lambda: drain.cause is not None)
    except DivergedError as error:
        raise FailedError(str(error)) from None
    except OSError as error:
        if communicator.rank != 0:  # which writes nothing
            raise
        raise FailedError(f"cannot write below {options.output}: {error.strerror}; --resume goes on") from error
    if not is_done:
        if communicator.rank == 0:
            tell(f"{drain.cause}: {run.loop.step} of {run.loop.steps} steps are done; --resume does the rest")
        return ExitCode.DRAINED
    with Bar("measuring and writing the drafter"):
        _finish(run, options, communicator)
    return ExitCode.DONE


@dataclass
class Run:
    """What a rank has loaded, and where it says what it does."""

    training: DraftTraining
    loop: TrainingLoop
    state_file: StateFile
    activity: Activity


def _prepare(
    spec: JobSpec,
    options: TrainOptions,
    device: torch.device,
    communicator: Communicator,
    state_file: StateFile,
    activity: Activity,
) -> Run:
    """Load models, data and what an earlier run saved."""
    config = spec.config
    settings, method = options.settings, find_method(options.settings.method)
    target_size = spec.target.vocab_size
    data = read_training_data(options, target_size)
    target = Target(config.target.model, device) if method.needs_target(settings) else None
    start = find_start(config, options)
    context = MethodContext(settings, device, target, config.target.model, target_size, start, data.rows)
    training = method.make(context)
    training.check(data.rows)
    training.check(data.heldout)
    identity = {
        "data": data.digest,
        "tokenizer": hash_tokenizer_files(config.target.model),
        "number of ranks": communicator.size,
        **describe_models(config, start),
    }
    loop = TrainingLoop(training, data, settings, communicator, state_file, identity, activity)
    if communicator.size > 1:  # else nobody waits for this rank
        for model in (training.model, *([] if target is None else [target.model])):
            tell_modules(model, activity.advance)
    if options.resume:
        loop.resume()
    if communicator.rank == 0:
        whole = f"{settings.minutes:g} minutes" if settings.minutes else f"{loop.steps} steps"
        begun = f"goes on behind step {loop.step} of {whole}" if loop.step else f"begins {whole}"
        ranks = "1 rank" if communicator.size == 1 else f"{communicator.size} ranks"
        tell(f"{settings.method}: {begun}, with {len(data.rows)} rows on {ranks}")
        if data.num_left_out:
            were = "1 row was" if data.num_left_out == 1 else f"{data.num_left_out} rows were"
            tell(
                f"{were} left out: refused, or without a completion within --max-length {settings.max_length}, to "
                "which longer rows are cut"
            )
    return Run(training, loop, state_file, activity)


def _finish(run: Run, options: TrainOptions, communicator: Communicator) -> None:
    """Write the drafter, measure what was written, and say so in one line of JSON. Collective."""
    activity = run.activity
    activity.enter(run.loop.step, Phase.MEASURING)
    run.training.finish()
    if not all(bool(value.isfinite().all()) for value in run.training.model.parameters()):
        raise FailedError(
            "the run diverged: some weights are no finite numbers; start another, with a lower --learning-rate"
        )
    result: dict[str, Any] = {
        "method": options.settings.method,
        "output": str(options.output),
        "num_tokens": run.training.num_depths,
        "steps": run.loop.steps,
        **(describe(run.loop.evaluate()) if run.loop.has_heldout else {}),
    }
    activity.enter(run.loop.step, Phase.FINISHING)
    if communicator.rank == 0:
        metrics = run.state_file.read_metrics()
        result |= {"loss_by_depth": metrics[-1]["loss"], "seconds": metrics[-1]["seconds"]}
        try:
            write_drafter(run.training, options.output, activity)
            activity.advance()
            draw_curves(metrics, run.state_file.folder / CURVES)
            activity.advance()
            run.loop.finish(result)
        except OSError as error:
            raise FailedError(f"cannot write the drafter to {options.output}: {error.strerror}") from error
        print(json.dumps(result), flush=True)
    communicator.barrier()


def write_drafter(training: DraftTraining, output: Path, activity: Activity) -> None:
    """Put the drafter's files in place, config.json last: where that is, all are. `activity` hears of each."""
    incoming = StateFile(output).folder / "incoming"
    shutil.rmtree(incoming, ignore_errors=True)
    incoming.mkdir(parents=True)
    training.save(incoming)
    for path in sorted(incoming.iterdir(), key=lambda path: path.name == "config.json"):
        activity.advance()
        path.chmod(0o644)
        put_in_place(path, output / path.name)
    incoming.rmdir()


def draw_curves(metrics: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the picture of a run, as PNG or whatever else matplotlib writes.

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


@dataclass
class Progress:
    """What the user sees while a run trains: a bar on a terminal, and a line for each measurement.

    Attributes:
        loop: knows how many steps there are.
        bar: on a terminal.
    """

    loop: TrainingLoop
    bar: Bar

    def tell(self, line: dict[str, Any]) -> None:
        """Show one step's metrics."""
        self.bar.update(line["step"], self.loop.steps)
        if "acceptance_by_depth" not in line:
            return
        self.bar.close()
        losses = " ".join(f"{value:.3f}" for value in line["loss"])
        shares = " ".join(f"{value:.3f}" for value in line["acceptance_by_depth"])
        tokens = "" if line["tokens_per_round"] is None else f", {line['tokens_per_round']:.3f} tokens a round"
        tell(f"step {line['step']} of {self.loop.steps}: loss {losses}, accepted {shares}{tokens}")


def tell(text: str) -> None:
    """Say something to the user, beside the result."""
    print(f"trtrun: {text}", file=sys.stderr, flush=True)
