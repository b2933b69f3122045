"""What `trtrun train-drafter` checks before any rank starts. Without torch and transformers, which take long to import.

It knows files and directories. It does not know how a drafter is trained.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from launch.train.job import TrainOptions
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.engine_directory import is_engine
from trtrun.configuration.model_paths import find_model
from trtrun.errors import CheckpointError, ConfigError, shorten_path, wrap_errors
from trtrun.models.config import read_model_config
from trtrun.start.job_spec import JobSpec
from trtrun.tokens.text import check_same_tokenizer, read_tokenizer
from trtrun.tools.training.data import TrainingData, read_data
from trtrun.tools.training.loop import check_same_run
from trtrun.tools.training.methods.table import find_method
from trtrun.tools.training.state import StateFile
from trtrun.weights.model_files import hash_model_samples
from trtrun.weights.written_files import check_place

LIBRARIES = ("transformers", "matplotlib")


def check_training(spec: JobSpec, options: TrainOptions) -> None:
    """Raise a TrtrunError for anything that the user got wrong, before ranks start."""
    config = spec.config
    check_extra()
    method = options.settings.method
    if options.start is not None and not find_method(method).starts_from_draft:
        raise ConfigError(
            f"--from: --method {method} makes a drafter for the target, and starts from no other: leave it out"
        )
    check_output(options)
    start = find_start(config, options)
    for model in (config.target.model, start):
        if model is not None and is_engine(model):
            raise ConfigError(
                f"{shorten_path(model)} is an engine, and training reads checkpoints: name the one it is of"
            )
    target_size = spec.target.vocab_size
    if start is not None:
        read_model_config(start)
        target, draft = read_tokenizer(config.tokenizer or config.target.model), read_tokenizer(start)
        if target is not None and draft is not None:
            check_same_tokenizer(target, draft)
    data = read_training_data(options, target_size)
    finished = StateFile(options.output).finished_settings()
    if options.resume and finished is not None:
        check_same_run(finished, options.settings, {"data": data.digest, **describe_models(config, start)})


def describe_models(config: RuntimeConfig, start: Path | None) -> dict[str, str]:
    """By what a run that goes on knows its target, and the drafter that it started from.

    Raises:
        CheckpointError: a file cannot be read.
    """
    models = {"target": config.target.model, "drafter to start from": start}
    found = {}
    for name, model in models.items():
        if model is not None:
            with wrap_errors(model, CheckpointError):
                found[name] = hash_model_samples(model)
    return found


def check_extra() -> None:
    """Raise ConfigError where a library is missing that the extra `train` installs."""
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"trtrun train-drafter needs the extra 'train', of which {', '.join(missing)} is missing: "
            "pip install 'trtrun[train]', or scripts/install.sh train"
        )


def check_output(options: TrainOptions) -> None:
    """Raise ConfigError for an output directory that would lose something, or cannot be made."""
    output = options.output
    where = shorten_path(output)
    try:
        check_place(output)
        if output.is_dir() and any(output.iterdir()):
            if not options.resume:
                raise ConfigError(f"--output {where}: it is not empty; go on with --resume, or name another directory")
            if not StateFile(output).folder.is_dir():
                raise ConfigError(f"--output {where}: it holds no training run to go on with; name another directory")
    except OSError as error:
        raise ConfigError(f"--output {where}: {error.strerror}") from None


def find_start(config: RuntimeConfig, options: TrainOptions) -> Path | None:
    """The checkpoint that the drafter starts from, if there is one.

    Raises:
        ConfigError: `--from` names none, or the method needs one and nothing does.
    """
    method = options.settings.method
    if not find_method(method).starts_from_draft:
        return None
    if options.start is not None:
        return find_model(options.start, None, "--from")
    if config.draft is None:
        raise ConfigError(f"--method {method} starts from a draft model: give a 'draft' section, or --from DIR")
    return config.draft.model


def read_training_data(options: TrainOptions, target_vocab_size: int) -> TrainingData:
    """The data of a run; see `read_data`."""
    settings = options.settings
    return read_data(options.data, settings.max_length, settings.heldout_rows, target_vocab_size, settings.seed)
