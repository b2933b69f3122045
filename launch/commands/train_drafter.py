"""`trtrun train-drafter`: parse its command line and play this process's part."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from launch.commands.common import load, with_config
from launch.exit_codes import ExitCode, describe_exit_codes
from launch.jobs.mpi.drain import Drain, EndedAtStart, leave_starting_ranks
from launch.train.job import TrainingJob, TrainOptions, place_training_ranks, read_training_values
from trtrun.configuration.config import RuntimeConfig
from trtrun.tools.training.methods.table import METHODS, find_method
from trtrun.tools.training.settings import OPTIMIZERS, PRECISIONS, TrainingSettings, option

Command = TypeVar("Command", bound=Callable[..., Any])


def layers(text: str) -> tuple[int, ...]:
    """Numbers of layers between commas. The help shows the function's name."""
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise click.BadParameter("layers are numbers between commas, such as 1,15,28") from None


SETTINGS: tuple[tuple[str, Any, str], ...] = (
    ("num_tokens", int, "Tokens that the drafter is to propose in a round (medusa: heads; eagle3: steps)."),
    ("steps", int, "Optimizer steps; 0 takes --minutes or --epochs."),
    ("epochs", float, "Passes over the data."),
    ("minutes", float, "Time for the steps, from the first one on, in place of --epochs."),
    ("batch_size", int, "Rows of a step, over all ranks."),
    ("micro_batch_size", int, "Rows that a rank computes at once, at most."),
    ("max_length", int, "Tokens of a row, at most; what is longer is cut off."),
    ("learning_rate", float, "After the warm-up; falls to a tenth by a cosine."),
    ("warmup_steps", int, "Steps over which the learning rate rises."),
    ("weight_decay", float, "Of matrices."),
    ("clip_norm", float, "Most that the norm of all gradients may be."),
    ("optimizer", click.Choice(OPTIMIZERS), "Muon takes the layers' matrices, and AdamW the rest."),
    ("precision", click.Choice(PRECISIONS), "Of the arithmetic; weights and optimizer states are float32."),
    ("divergence", float, "Weight of the KL divergence from the target; 0 does not run the target."),
    ("cross_entropy", float, "Weight of the cross-entropy with the data's tokens."),
    ("depth_decay", float, "Factor by which each depth's loss counts less than the one before."),
    ("retention", float, "Share of a depth's places that the next one keeps (pard)."),
    ("least_retention", float, "Share of all places that each depth keeps at least (pard)."),
    ("pard_token", int, "Id of the mask token (pard).  [default: the draft's, or one that its tokenizer leaves free]"),
    ("medusa_layers", int, "Residual blocks of each head (medusa)."),
    (
        "draft_vocab_size",
        int,
        "Tokens that the head can propose, the commonest of the data (eagle3).  [default: all of the target]",
    ),
    (
        "eagle3_layers_to_capture",
        layers,
        "Layers of the target, from 0, whose output the head reads; -1 is the embedding (eagle3).  "
        "[default: 1,N//2-1,N-4 of N]",
    ),
    ("heldout_rows", int, "Rows kept out of training, to measure acceptance."),
    ("evaluation_steps", int, "Steps between two measurements."),
    ("checkpoint_steps", int, "Steps between two checkpoints."),
    ("seed", int, "Of the order of rows and of what is dropped."),
)
"""Settings as options: name, what it takes, help. Their defaults are TrainingSettings', or the method's own."""


def with_settings(command: Command) -> Command:
    """Add an option for each setting."""
    for name, kind, text in reversed(SETTINGS):
        default = TrainingSettings.__dataclass_fields__[name].default
        own = [f"{method} {entry.defaults[name]}" for method, entry in METHODS.items() if name in entry.defaults]
        if own:
            text, default = f"{text}  [default: {default}; {', '.join(own)}]", None
        command = click.option(
            option(name), name, type=kind, default=default, show_default=default is not None, help=text
        )(command)
    return command


@click.command("train-drafter", epilog=f"Exit status: {describe_exit_codes()}")
@with_config
@click.option("--method", default="pard", show_default=True, help="What is trained: pard, medusa or eagle3.")
@click.option(
    "--data",
    multiple=True,
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE.jsonl",
    help="Rows of trtrun generate-data. May be repeated.",
)
@click.option("--output", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Of the drafter.")
@click.option(
    "--from",
    "start",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Checkpoint to start from (pard).  [default: draft.model]",
)
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint in --output.")
@with_settings
def train_drafter(
    config_path: Path,
    overrides: tuple[str, ...],
    **values: Any,
) -> int:
    """Train a drafter for the configuration's target, which stays as it is.

    Each device of the configuration is a rank with both models whole; a step's rows are shared out over them. The last
    line is JSON: what was measured on held-out rows with the weights that were written.
    """
    options = train_options(values)
    drain = Drain()
    try:
        with drain.listening():
            config = load(config_path, overrides, False, place_training_ranks, read_training_values)
            status = _train(config, options, drain)
    except EndedAtStart:
        line = f"ended by {drain.cause} before the first step; the same command with --resume begins it"
        print(f"trtrun: {line}", file=sys.stderr, flush=True)
        status = ExitCode.DRAINED
    if drain.has_interrupted and status == ExitCode.DRAINED:
        leave_starting_ranks()
    return status


def train_options(values: Mapping[str, Any]) -> TrainOptions:
    """What the parameters of the command ask for.

    Raises:
        ConfigError: a setting is outside its range, or there is no such method.
    """
    known = TrainingSettings.__dataclass_fields__
    given = {name: value for name, value in values.items() if name in known and value is not None}
    settings = {**find_method(values["method"]).defaults, **given}
    return TrainOptions(
        values["data"], values["output"], values["start"], values["resume"], TrainingSettings(**settings)
    )


def _train(config: RuntimeConfig, options: TrainOptions, drain: Drain) -> int:
    """This process's part, once it hears the signals that may end it."""
    job = TrainingJob(config, sys.argv[1:], drains=True)

    def check() -> None:
        from launch.train.checks import check_training

        check_training(job.spec, options)

    status = job.enter(check)
    if status is not None:
        return status
    from launch.train.run import play_training

    return play_training(job.spec, options, drain)
