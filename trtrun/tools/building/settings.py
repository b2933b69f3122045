"""What an engine is to be, and the directory that it is built to.

It imports no torch: the command checks both before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from trtrun.configuration.engine_directory import ENGINE_FILE, Limits, was_built
from trtrun.configuration.engine_sections import MOST_ROWS, MOST_TOKENS
from trtrun.errors import ConfigError, nearest, shorten_path
from trtrun.weights.written_files import BESIDE, FOLDERS, MARKER

DTYPES = ("auto", "bfloat16", "float16", "float32")
DEVICES = ("cuda", "cpu")

_LEAST_SEQ_LEN = 2


@dataclass(frozen=True)
class BuildSettings:
    """What an engine is to be.

    Attributes:
        tp_size: ranks.
        dtype: of activations; "auto" takes the checkpoint's.
        quantization: as in the YAML file.
        device: type of the devices that it is for; None for GPUs where there is one here, else CPUs.
        limits: of jobs that run it.
    """

    tp_size: int = 1
    dtype: str = "auto"
    quantization: str = "none"
    device: str | None = None
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        """Raise ConfigError for a value that there is not, or outside its range."""
        if self.tp_size < 1:
            raise ConfigError(f"--tp is {self.tp_size}: it must be 1 or more")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype: unknown value '{self.dtype}'{nearest(self.dtype, DTYPES)}")
        if self.device is not None and self.device not in DEVICES:
            raise ConfigError(f"--device: unknown value '{self.device}'{nearest(self.device, DEVICES)}")
        for name in self.limits.__struct_fields__:
            value = getattr(self.limits, name)
            least = _LEAST_SEQ_LEN if name == "max_seq_len" else 1
            if value is not None and value < least:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}: it must be {least} or more")
            most = MOST_ROWS if name == "max_batch_size" else MOST_TOKENS
            if value is not None and value > most:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}: it must be {most} or less")
        rows, tokens = self.limits.max_batch_size, self.limits.max_num_tokens
        width = 1 + (self.limits.max_draft_len or 0)
        if rows is not None and tokens is not None and tokens < rows * width:
            raise ConfigError(
                f"--max-num-tokens is {tokens}, too small to verify {width} tokens of each of {rows} rows: make it "
                f"{rows * width} or more, or --max-batch-size smaller"
            )

    def check_context(self, context: int) -> None:
        """Raise ConfigError where texts may be longer than the model's context."""
        if self.limits.max_seq_len is not None and self.limits.max_seq_len > context:
            raise ConfigError(
                f"--max-seq-len is {self.limits.max_seq_len}, but the model's context is {context} tokens"
            )


FOLDER = FOLDERS["build"]
SHARDS = "rank*.safetensors"
CACHE = "cache"
"""What starts leave."""

_KNOWN = (ENGINE_FILE, SHARDS, "config.json", *BESIDE)
"""What a build puts in place."""


def check_output(output: Path, checkpoint: Path, is_forced: bool) -> None:
    """Check that nothing is lost that nobody gave up. What a killed build left is written over.

    Raises:
        ConfigError: something would be lost, or the directory cannot be made.
    """
    from trtrun.tools.conversion import staged_output  # which reads checkpoints: commands import this module early

    staged_output.check_output(output, checkpoint, is_forced, _check_files)


def _check_files(output: Path, is_forced: bool) -> None:
    from trtrun.tools.conversion.staged_output import is_unfinished

    where, folder = shorten_path(output), output / FOLDER
    others = sorted(file for file in output.iterdir() if file != folder or not is_unfinished(folder))
    if not others or _was_killed(folder, others, is_forced):
        return
    if not was_built(output):
        raise ConfigError(f"--output {where}: it is not empty, and trtrun build has not made it: name another one")
    in_the_way = [one.name for one in others if one == folder or (_is_known(one.name) and _is_folder(one))]
    if in_the_way:
        raise ConfigError(f"--output {where}: trtrun build has not made its {in_the_way[0]}: name another directory")
    if not is_forced:
        raise ConfigError(f"--output {where}: an engine is there; --force builds it anew")


def _was_killed(folder: Path, others: Sequence[Path], is_forced: bool) -> bool:
    """Whether what is there was left by a build that was killed as it put files in place: before config.json is there
    nothing is taken for an engine. Files of others stay beside, if somebody says so."""
    if folder in others or not (folder / MARKER).is_file():
        return False
    known = all(file.name == CACHE or (_is_known(file.name) and not _is_folder(file)) for file in others)
    return (known or is_forced) and all(file.name != "config.json" for file in others)


def _is_known(name: str) -> bool:
    return any(fnmatch(name, known) for known in _KNOWN)


def _is_folder(file: Path) -> bool:
    """Whether it is a directory itself."""
    return file.is_dir() and not file.is_symlink()


@contextmanager
def building(output: Path, check: Callable[[], None]) -> Iterator[Path]:
    """A folder to write an engine to; see `staged`."""
    from trtrun.tools.conversion.staged_output import staged

    with staged(output, check, FOLDER, (ENGINE_FILE, SHARDS)) as folder:
        yield folder
