"""What `trtrun run` was asked for, beside the configuration. Plain data, quick to import."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STANDARD_OUTPUT = "-"


def is_stream(output: str) -> bool:
    """Whether rows are written to standard output, a pipe or a device: places that keep nothing for --resume."""
    return output == STANDARD_OUTPUT or (os.path.exists(output) and not os.path.isfile(output))


@dataclass(frozen=True)
class Part:
    """The `number`-th, from 1, of `count` contiguous shares of the input rows, which differ by one row at most."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def of(self, num_rows: int) -> range:
        """The indexes of this share's rows; none where there are more shares than rows."""
        return range((self.number - 1) * num_rows // self.count, self.number * num_rows // self.count)


@dataclass(frozen=True)
class SampledShare:
    """Which rows of `trtrun generate-data` are sampled, each by a seed of its own; the others are greedy.

    Attributes:
        share: of the rows that are sampled, from 0 to 1, spread evenly over the input.
        temperature: of these.
        seed: of row 0; each row behind has the next.
    """

    share: float
    temperature: float
    seed: int

    def sampling_of(self, index: int) -> dict[str, object]:
        """The parameters of a row that does not name its own."""
        if math.floor((index + 1) * self.share) == math.floor(index * self.share):
            return {"temperature": 0.0}
        return {"temperature": self.temperature, "seed": self.seed + index}


@dataclass(frozen=True)
class RunOptions:
    """Prompts, outputs and sampling.

    Attributes:
        prompts: texts, in order.
        prompts_file: JSON lines file whose rows follow.
        output: file for output rows, "-" for standard output, None for text.
        sampling: sampling parameters for all rows that do not name their own.
        resume: go on from the rows that an earlier run finished in `output`.
        part: run this share of the rows only.
        sampled: of training data: which rows are sampled. Output rows then hold the prompt's tokens, too, and how they
            were sampled.
    """

    prompts: Sequence[str] = ()
    prompts_file: Path | None = None
    output: str | None = None
    sampling: Mapping[str, object] = field(default_factory=dict)
    resume: bool = False
    part: Part | None = None
    sampled: SampledShare | None = None

    @property
    def keeps_rows(self) -> bool:
        """Whether finished rows outlive the run, so that --resume can go on."""
        return self.output is not None and not is_stream(self.output)


@dataclass(frozen=True)
class Workload:
    """Prompts that `trtrun bench` runs together.

    Attributes:
        rows: number of prompts.
        prompt_tokens: length of each.
        temperature: 0 is greedy.
    """

    rows: int
    prompt_tokens: int
    temperature: float = 0.0

    def __str__(self) -> str:
        many = f"{self.rows} {'row' if self.rows == 1 else 'rows'} of {self.prompt_tokens} tokens"
        return f"{many} at temperature {self.temperature:g}" if self.temperature else many


@dataclass(frozen=True)
class BenchOptions:
    """What `trtrun bench` was asked for.

    Attributes:
        workloads: each is measured in both modes.
        max_tokens: tokens to generate for each prompt.
        top_p: of workloads that sample.
        repeats: timed runs of each case; medians are reported.
        cold: time every workload from its first run on, without a warm-up: that one and the next five.
        exact: count the texts that speculation leaves as they are, for each workload.
        peer: "transformers", "vllm" or None.
        peer_python: the interpreter that has the peer; None for this one.
        peer_options: fields of vLLM's speculative_config, beside those that the job decides.
        seed: of the random prompts and of sampling; None draws one.
        as_json: print the JSON line only.
        trace: file for a trace of the timed runs' rounds, or None.
    """

    workloads: Sequence[Workload]
    max_tokens: int = 64
    top_p: float = 1.0
    repeats: int = 3
    cold: bool = False
    exact: bool = False
    peer: str | None = None
    peer_python: str | None = None
    peer_options: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    as_json: bool = False
    trace: str | None = None
