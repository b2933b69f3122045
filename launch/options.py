"""What `trtrun run` was asked for, beside the configuration. Plain data, quick to import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class RunOptions:
    """Prompts, outputs and sampling.

    Attributes:
        prompts: texts, in order.
        prompts_file: JSON lines file whose rows follow.
        output: file for output rows, "-" for standard output, None for text.
        sampling: sampling parameters for all rows that do not name their own.
        resume: go on from the rows that an earlier run finished in `output`.
    """

    prompts: Sequence[str] = ()
    prompts_file: Path | None = None
    output: str | None = None
    sampling: Mapping[str, object] = field(default_factory=dict)
    resume: bool = False


@dataclass(frozen=True)
class BenchOptions:
    """What `trtrun bench` was asked for.

    Attributes:
        rows: numbers of prompts that run together.
        max_tokens: tokens to generate for each prompt.
        prompt_tokens: length of each random prompt.
        repeats: timed runs of each case; medians are reported.
        peer: "transformers", or None.
        seed: of the random prompts; None draws one.
        as_json: print the JSON line only.
    """

    rows: Sequence[int] = (1, 4, 16)
    max_tokens: int = 64
    prompt_tokens: int = 32
    repeats: int = 3
    peer: str | None = None
    seed: int | None = None
    as_json: bool = False
