"""The input rows of a run: prompts of the command line, then the rows of a JSON lines file, read again whenever wanted.

Rows are never held: whoever reads gets one after another, and a file of any length takes the memory of one row. It
knows files and lines. What a line means, rows.py knows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import IO

from launch.batch.options import Part, SampledShare
from launch.batch.rows import LONGEST_LINE, PromptRow, is_blank, read_line, read_prompt
from trtrun.core.sampling_params import SamplingParams
from trtrun.errors import ConfigError
from trtrun.files import describe_foreign, read_lines


class InputRows:
    """All rows of an input, or a part of them.

    Making one reads the input to its first row only, and looks whether the defaults are right.

    Args:
        prompts: of the command line; they come first.
        prompts_file: JSON lines file whose rows follow.
        defaults: sampling parameters for rows that do not name them.
        part: the share of the rows to read, under the indexes of the whole.
        sampled: of training data: which rows are sampled; what it says comes before the defaults.
        of_model: sampling parameters of the model's own, for what neither rows nor defaults say.

    Raises:
        ConfigError: there is no row at all, or the file cannot be read more than once.
        InvalidRequestError: a default is outside its range.
    """

    def __init__(
        self,
        prompts: Sequence[str] = (),
        prompts_file: Path | None = None,
        defaults: Mapping[str, object] | None = None,
        part: Part | None = None,
        sampled: SampledShare | None = None,
        of_model: Mapping[str, object] | None = None,
    ) -> None:
        self._prompts = prompts
        self._file = prompts_file
        self._defaults = defaults or {}
        self._part = part
        self._sampled = sampled
        self._of_model = of_model or {}
        self._sampling = SamplingParams.from_mapping({**self._of_model, **self._defaults})
        if prompts_file is not None:
            self._check_file(prompts_file)
        elif not prompts:
            raise ConfigError("nothing to do: give --prompt TEXT or --prompts FILE.jsonl")

    def __len__(self) -> int:
        return len(self.indexes)

    @property
    def indexes(self) -> range:
        """The indexes of the rows, as they were when they were first asked for: lines are counted for it."""
        return range(self._total) if self._part is None else self._part.of(self._total)

    @cached_property
    def _total(self) -> int:
        """Rows of the whole input."""
        if self._file is None:
            return len(self._prompts)
        with self._open(self._file) as file:
            return len(self._prompts) + sum(not is_blank(line) for line in read_lines(file, LONGEST_LINE))

    def of_part(self, part: Part | None) -> InputRows:
        """This input, read in another part."""
        rows = copy(self)
        rows._part = part
        return rows

    def read(self, is_wanted: Callable[[int], bool] = lambda index: True) -> Iterator[PromptRow]:
        """The rows whose index is wanted, in order; the others are passed over and not looked at.

        Raises:
            ConfigError: the file cannot be read any more, or has fewer rows than before.
        """
        num_input_rows = None if self._part is None else self._total
        is_data = self._sampled is not None
        for row in self._read(is_wanted):
            if is_data and row.batch_row is not None:
                error = "training data is made of prompts or messages, not of rows of a batch"
                row = replace(row, prompt=None, sampling=None, error=error)
            if num_input_rows is None and not is_data:
                yield row
            else:
                yield replace(row, num_input_rows=num_input_rows, is_data=is_data)

    def _read(self, is_wanted: Callable[[int], bool]) -> Iterator[PromptRow]:
        indexes = self.indexes
        for index, prompt in enumerate(self._prompts[: indexes.stop]):
            if index in indexes and is_wanted(index):
                yield read_prompt(index, prompt, *self._defaults_of(index))
        if self._file is None or indexes.stop <= max(indexes.start, len(self._prompts)):
            return
        index = len(self._prompts)
        with self._open(self._file) as file:
            for number, line in enumerate(read_lines(file, LONGEST_LINE), start=1):
                if is_blank(line):
                    continue
                if index in indexes and is_wanted(index):
                    yield read_line(index, number, line, self._defaults_of(index)[0], self._of_model)
                index += 1
                if index == indexes.stop:
                    return
        raise ConfigError(f"the prompts file {self._file} has fewer rows than when the run began: leave it as it was")

    def _defaults_of(self, index: int) -> tuple[Mapping[str, object], SamplingParams | None]:
        """What a row takes that names nothing, and the parameters that this makes where they are known already."""
        if self._sampled is None:
            return self._defaults, self._sampling
        return {**self._defaults, **self._sampled.sampling_of(index)}, None

    def _check_file(self, path: Path) -> None:
        with self._open(path) as file:
            problem = describe_foreign(file.read(8))
            if problem is not None:
                raise ConfigError(f"the prompts file {path} {problem}")
            file.seek(0)
            if all(is_blank(line) for line in read_lines(file, LONGEST_LINE)):
                raise ConfigError(f'the prompts file {path} has no rows: write one {{"prompt": "…"}} a line')

    @contextmanager
    def _open(self, path: Path) -> Iterator[IO[bytes]]:
        """The file. Only b"\\n" ends a line of it: other line ends may stand inside a JSON string or between values."""
        try:
            if os.path.exists(path) and not os.path.isfile(path):
                raise ConfigError(
                    f"the prompts file {path} is not a file: it is read more than once, "
                    "so write the rows to a file first"
                )
            with open(path, "rb", buffering=1 << 20) as file:
                yield file
        except OSError as error:
            raise ConfigError(f"cannot read the prompts file {path}: {error.strerror}") from None
