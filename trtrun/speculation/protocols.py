"""What the cycle and its drafters see of engines and of what is between them.

Engines must not be known here: one small protocol for each side stands for `engine.runner.Engine`, whose rows are
`engine.rows.RowState`.

What lies where speculation may look and has one implementation is used by its own name: sampling parameters, the
scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch

from trtrun.core import PrefillChunk, RoundPlan
from trtrun.sampling.row_sampling import RowSampling

Step = TypeVar("Step")
"""What an engine prepares for one of several steps; only the engine looks into it."""


class Rows(Protocol):
    """Where every row stands, on the device."""

    @property
    def token_ids(self) -> torch.Tensor:
        """[max_rows, columns] int32: each row's tokens; scratch from its length on."""
        ...

    @property
    def lengths(self) -> torch.Tensor:
        """[max_rows] int64."""
        ...

    @property
    def sampling(self) -> RowSampling:
        """The rows' sampling parameters."""
        ...

    def advance(self, rows: torch.Tensor, num_tokens: torch.Tensor, tokens: torch.Tensor) -> None:
        """Append what a verdict gave to `rows` [rows] int64."""
        ...


class RoundEngine(Protocol):
    """What both engines offer."""

    @property
    def rows(self) -> Rows:
        """The state of every row."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the engine computes."""
        ...

    @property
    def vocab_size(self) -> int:
        """Of the model, padding included."""
        ...

    def begin_round(self, plan: RoundPlan) -> None:
        """Take in admissions, drops and blocks."""
        ...

    def close(self) -> None:
        """Give back what must not outlive the communicators."""
        ...


class DraftEngine(RoundEngine, Protocol[Step]):
    """The forwards that a draft model needs."""

    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        """Compute the chunks' keys and values."""
        ...

    def catch_up(self, rows: torch.Tensor, counts: Sequence[int], context: int) -> torch.Tensor:
        """Feed each row's last `counts` tokens; [rows, vocab] float32 after the last."""
        ...

    def prepare_steps(self, rows: torch.Tensor, positions: torch.Tensor, context: int) -> Sequence[Step]:
        """What `decode` needs for each step that feeds `rows` at `positions` [rows, steps]; -1 takes no part."""
        ...

    def decode(self, step: Step, tokens: torch.Tensor) -> torch.Tensor:
        """Feed one token a row, tokens [rows]; [rows, vocab] float32."""
        ...


class TargetEngine(RoundEngine, Protocol):
    """The forward that verification needs."""

    def verify_forward(self, plan: RoundPlan, draft_tokens: torch.Tensor, draft_lens: torch.Tensor) -> torch.Tensor:
        """[sampled_rows, draft_len + 1, vocab] float32."""
        ...


class DraftLink(Protocol):
    """Draft → target packets and target → draft verdicts: `parallel.link.Link`, and in the rehearsal of the largest
    round (`roles.largest_round`) one that carries nothing."""

    def send_draft(self, tokens: torch.Tensor, draft_lens: torch.Tensor, draft_probs: torch.Tensor | None) -> None:
        """On the draft leader."""
        ...

    def receive_draft(
        self, rows: int, draft_len: int, probability_rows: int, vocab: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """On every target rank: tokens, draft_lens, draft_probs; the last reach the target leader alone."""
        ...

    def send_verdict(self, num_tokens: torch.Tensor, tokens: torch.Tensor) -> None:
        """On the target leader."""
        ...

    def receive_verdict(self, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """On every other engine rank."""
        ...
