"""The training loop: steps over rows, shared out over ranks, saved as it goes.

Each step is a function of the settings, the data and the weights before it, so that a run that was killed comes to the
same weights as one that was not, and ranks change sums by rounding only. It does not know what is learned
(`DraftTraining`), where the rows come from, or the command line.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch

from parallel.communicator import Communicator
from parallel.watchdog.activity import Activity, Phase
from trtrun.errors import ConfigError, TrtrunError
from trtrun.tools.training.data import TrainingData, batch_indexes
from trtrun.tools.training.evaluation import Acceptance, measure
from trtrun.tools.training.methods.table import DraftTraining
from trtrun.tools.training.settings import TrainingSettings, option
from trtrun.tools.training.state import Optimizers, SavedState, StateFile, rate_factor

Tell = Callable[[dict[str, Any]], None]


class DivergedError(TrtrunError):
    """Numbers of a run are no longer finite: nothing good comes of it any more."""


class TrainingLoop:
    """One rank's part of a run.

    Args:
        training: the method with its drafter, the same on all ranks.
        data: the same on all ranks.
        settings: of the run.
        communicator: of all ranks.
        state_file: where rank 0 saves.
        identity: what must be the same when the run is resumed, beside the settings.
        activity: where this rank says what it does, for those who watch the ranks; None where nobody does.

    Attributes:
        steps: of the whole run; where it has a time instead, as many as it looks like so far.
        step: steps that are done.
    """

    def __init__(
        self,
        training: DraftTraining,
        data: TrainingData,
        settings: TrainingSettings,
        communicator: Communicator,
        state_file: StateFile,
        identity: dict[str, Any],
        activity: Activity | None = None,
    ) -> None:
        self._training, self._data, self._settings = training, data, settings
        self._communicator, self._state_file, self._identity = communicator, state_file, identity
        self._activity = activity or Activity()
        self._optimizers = Optimizers(training.model, settings)
        self._parameters = [value for value in training.model.parameters() if value.requires_grad]
        self.steps = num_steps(settings, len(data.rows))
        self.step = 0

    @property
    def has_heldout(self) -> bool:
        """Whether there is anything to measure on."""
        return bool(self._data.heldout)

    def resume(self) -> None:
        """Go on from what was saved, if anything was.

        Raises:
            ConfigError: it was saved by a run with other settings, data or models.
            CheckpointError: it is damaged.
        """
        saved = self._state_file.load()
        if saved is None:
            return
        check_same_run(saved.settings, self._settings, self._identity)
        self._training.model.load_state_dict(saved.model, strict=False)
        self._optimizers.load(saved.optimizers)
        self.step = saved.step

    def run(self, tell: Tell, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Train to the last step. Collective.

        Args:
            tell: called on rank 0 with each step's metrics.
            should_stop: asked on rank 0 before each step; a run that stops saves first.

        Returns:
            Whether all steps are done.

        Raises:
            DivergedError: on all ranks; what was saved last is finite.
        """
        settings, is_first = self._settings, self._communicator.rank == 0
        started = time.perf_counter()
        if is_first:
            kept = self._state_file.keep_metrics(self.step)
            started -= kept[-1]["seconds"] if kept else 0.0
        if settings.minutes and self.step:  # resumed: the first step has the rate that it would have had
            self._reckon_steps(started)
        self._training.model.train()
        while self.step < self.steps:
            self._activity.enter(self.step + 1, Phase.PREPARING)
            if self._agree(should_stop() if is_first else False):
                self._save()
                return False
            losses = self._train_step(self.step)
            self.step += 1
            if settings.minutes:
                self._reckon_steps(started)
            line: dict[str, Any] = {"step": self.step, "loss": losses}
            is_last = self.step == self.steps
            if self.has_heldout and (is_last or self.step % settings.evaluation_steps == 0):
                line |= describe(self.evaluate())
            line["seconds"] = round(time.perf_counter() - started, 3)
            if is_first:
                self._activity.enter(self.step, Phase.SAVING)
                self._state_file.add_metrics(line)
                tell(line)
            if is_last or self.step % settings.checkpoint_steps == 0:
                self._save()
        return True

    def _reckon_steps(self, started: float) -> None:
        """Reckon the number of steps from the time that they take. Collective."""
        seconds = time.perf_counter() - started
        self.steps = self._agree(steps_within(60 * self._settings.minutes, self.step, seconds))

    def evaluate(self) -> Acceptance:
        """Measure acceptance on the held-out rows. Collective."""
        self._activity.enter(self.step, Phase.MEASURING)
        self._training.model.eval()
        found = measure(
            self._training.matches,
            self._data.heldout,
            self._settings.micro_batch_size,
            self._training.num_depths,
            self._communicator,
            lambda: self._activity.enter(self.step, Phase.MEASURED),
        )
        self._training.model.train()
        return found

    def _train_step(self, step: int) -> list[float]:
        """One step; returns the mean loss by depth over all ranks' rows, before the step."""
        settings, communicator, training = self._settings, self._communicator, self._training
        indexes = batch_indexes(len(self._data.rows), settings.batch_size, step, settings.seed)
        own = list(enumerate(indexes))[communicator.rank :: communicator.size]
        parts = [
            own[first : first + settings.micro_batch_size] for first in range(0, len(own), settings.micro_batch_size)
        ]
        prepared = []
        counts = torch.zeros(training.num_depths, device=communicator.device)
        for part in parts:
            rows, places = [self._data.rows[index] for _, index in part], [place for place, _ in part]
            prepared.append(training.prepare(rows, step, places))
            counts += training.counts(prepared[-1])
            self._activity.advance()
        self._activity.enter(step + 1, Phase.TRAINING)
        counts = communicator.all_reduce(counts).clamp(min=1)
        decay = settings.depth_decay ** torch.arange(training.num_depths, device=communicator.device)
        weights = decay / decay.sum() / counts
        totals = torch.zeros(training.num_depths, device=communicator.device)
        for batch in prepared:
            losses = training.losses(batch)
            torch.autograd.backward((losses * weights).sum())
            totals += losses.detach()
            self._activity.advance()
        self._activity.enter(step + 1, Phase.SUMMING)
        totals = self._sum_gradients(totals)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, settings.clip_norm)
        if not bool((totals.sum() + norm).isfinite()):
            raise DivergedError(
                f"the run diverged: at step {step + 1} its loss or gradients are no finite numbers; start another, "
                "with a lower --learning-rate"
            )
        self._optimizers.step(rate_factor(step, self.steps, settings.warmup_steps))
        return [round(value, 5) for value in (totals / counts).tolist()]

    def _sum_gradients(self, totals: torch.Tensor) -> torch.Tensor:
        """Add up gradients and `totals` over the ranks, in their order; the same bits on all of them."""
        for value in self._parameters:
            if value.grad is None:
                value.grad = torch.zeros_like(value)
        if self._communicator.size == 1:
            return totals
        gradients = [value.grad for value in self._parameters if value.grad is not None]
        flat = self._communicator.all_reduce(torch.cat([totals, *(gradient.flatten() for gradient in gradients)]))
        summed = torch.split(flat[len(totals) :], [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, summed, strict=True):
            gradient.copy_(part.view_as(gradient))
        return flat[: len(totals)]

    def _agree(self, number: int) -> int:
        """Rank 0's number on all ranks."""
        note = torch.tensor([number], dtype=torch.int64, device=self._communicator.device)
        return int(self._communicator.broadcast(note, 0).item())

    def finish(self, result: dict[str, Any]) -> None:
        """On rank 0, once what was learned is in its place: keep the result."""
        self._state_file.finish(self._told, result)

    @property
    def _told(self) -> dict[str, Any]:
        """What tells this run from others."""
        return self._identity | {"settings": self._settings.to_json()}

    def _save(self) -> None:
        self._activity.enter(self.step, Phase.SAVING)
        if self._communicator.rank == 0:
            model = {name: value for name, value in self._training.model.named_parameters()}
            self._state_file.save(SavedState(self.step, self._told, model, self._optimizers.state()))
        self._communicator.barrier()


def num_steps(settings: TrainingSettings, num_rows: int) -> int:
    """Steps of a run; where it has a time, what it begins with."""
    if settings.minutes:
        return settings.warmup_steps + 1
    return settings.steps or max(1, round(settings.epochs * num_rows / settings.batch_size))


def steps_within(limit: float, step: int, seconds: float) -> int:
    """How many steps a run will have had when its time is over: `step` itself where none fits in any more.

    Args:
        limit: of the run, in seconds.
        step: steps that are done, one at least.
        seconds: that they took, with what was measured between them.
    """
    fitting = int(limit * step / max(seconds, 1e-9))
    return step if seconds >= limit else max(step, fitting)


def describe(found: Acceptance) -> dict[str, Any]:
    """An evaluation as metrics name it."""
    return {
        "tokens_per_round": found.tokens_per_round,
        "rounds": found.rounds,
        "acceptance_by_depth": found.by_depth,
    }


def check_same_run(saved: dict[str, Any], settings: TrainingSettings, identity: dict[str, Any]) -> None:
    """Raise ConfigError where a saved run differs from this one in what would change its outcome."""
    difference = settings.find_difference(json.loads(saved["settings"]))
    if difference is not None:
        raise ConfigError(
            f"--resume: the run in the output directory had another {option(difference)}; give the same, or another "
            "--output"
        )
    for name, value in identity.items():
        if saved.get(name) != value:
            raise ConfigError(f"--resume: the run in the output directory had another {name}; give another --output")
