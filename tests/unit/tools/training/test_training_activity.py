"""What a rank says of itself while it trains, for those who watch it."""

from __future__ import annotations

from pathlib import Path

from training_runs import make_loop, make_method, rows_of, run

from parallel.watchdog.activity import Activity, Phase
from trtrun.tools.training.models import load_model, tell_modules


class RecordedActivity(Activity):
    """Keeps every mark."""

    __slots__ = ("advances", "entered")

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[tuple[int, Phase]] = []
        self.advances: list[Phase] = []

    def enter(self, round_index: int, phase: Phase) -> None:
        super().enter(round_index, phase)
        self.entered.append((round_index, phase))

    def advance(self) -> None:
        super().advance()
        self.advances.append(self.entered[-1][1])


def test_each_step_goes_through_its_phases_and_each_micro_batch_counts(
    pair: tuple[Path, Path], data: Path, tmp_path: Path
) -> None:
    activity = RecordedActivity()
    _, loop = make_loop(*pair, data, tmp_path, activity, steps=2, evaluation_steps=2, checkpoint_steps=1)
    run(loop)
    step = [Phase.PREPARING, Phase.TRAINING, Phase.SUMMING]
    measured, saved = [Phase.MEASURING, Phase.MEASURED], [Phase.SAVING, Phase.SAVING]  # metrics, and the checkpoint
    first, second = [*step, *saved], [*step, *measured, *saved]
    assert activity.entered == [(1, phase) for phase in first] + [(2, phase) for phase in second]
    # Six rows, four at a time.
    assert (
        activity.advances == [Phase.PREPARING] * 2 + [Phase.TRAINING] * 2 + [Phase.PREPARING] * 2 + [Phase.TRAINING] * 2
    )


def test_modules_and_gradients_tell_that_a_micro_batch_gets_on(
    pair: tuple[Path, Path], data: Path, tmp_path: Path
) -> None:
    method = make_method(*pair)
    rows = rows_of(data)[:2]
    told: list[str] = []
    assert method._target is not None
    tell_modules(method.model, lambda: told.append("draft"))
    tell_modules(method._target.model, lambda: told.append("target"))
    loss = method.losses(method.prepare(rows, 0, [0, 1])).sum()
    layers = {"draft": method.model.config.num_hidden_layers, "target": 3}
    assert all(told.count(name) > number for name, number in layers.items())
    before = len(told)
    loss.backward()
    assert told[before:] == ["draft"] * sum(value.requires_grad for value in method.model.parameters())
    method.save(tmp_path)
    assert load_model(tmp_path, "auto").config.num_hidden_layers == layers["draft"]
