"""What the cycle asks of engines, links and the scheduler. Only shapes of calls, so that the cycle runs with fakes.

It knows no implementation: engines live in `engine`, links in `parallel.link`, the ledger in `scheduling`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from trtrun.core import Draft, PrefillChunk, RoundPlan
from trtrun.speculation.verify import TokenSampler


class Sampling(TokenSampler, Protocol):
    """The rows' sampling parameters (`RowSampling` of trtrun.sampling)."""

    def is_greedy(self, row: int) -> bool:
        """Whether the row takes the most likely token."""
        ...


class Rows(Protocol):
    """Where every row stands (engine.rows.RowState)."""

    @property
    def history(self) -> torch.Tensor:
        """[max_rows, columns] int32."""
        ...

    @property
    def lengths(self) -> torch.Tensor:
        """[max_rows] int64."""
        ...

    @property
    def sampling(self) -> Sampling:
        """The rows' sampling parameters."""
        ...

    def advance(self, rows: torch.Tensor, num_tokens: torch.Tensor, tokens: torch.Tensor) -> None:
        """Append what a verdict gave to `rows` [rows] int64."""
        ...


class RoundEngine(Protocol):
    """What both engines offer (engine.runner.Engine)."""

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
        """Width of the logits."""
        ...

    def begin_round(self, plan: RoundPlan) -> None:
        """Take in admissions, drops and blocks."""
        ...

    def close(self) -> None:
        """Give back what must not outlive the communicators."""
        ...


class DraftEngine(RoundEngine, Protocol):
    """The forwards that a draft model needs."""

    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        """Compute the chunks' keys and values."""
        ...

    def catch_up(self, rows: torch.Tensor, counts: Sequence[int], context: int) -> torch.Tensor:
        """Feed each row's last `counts` tokens; [rows, vocab] float32 after the last."""
        ...

    def prepare_steps(self, rows: torch.Tensor, positions: torch.Tensor, context: int) -> Sequence[Any]:
        """What `decode` needs for each step that feeds `rows` at `positions` [rows, steps]; -1 takes no part."""
        ...

    def decode(self, step: Any, tokens: torch.Tensor) -> torch.Tensor:
        """Feed one token a row, tokens [rows]; [rows, vocab] float32."""
        ...


class TargetEngine(RoundEngine, Protocol):
    """The forward that verification needs."""

    def verify_forward(self, plan: RoundPlan, draft_tokens: torch.Tensor, draft_lens: torch.Tensor) -> torch.Tensor:
        """[sampled_rows, draft_len + 1, vocab] float32."""
        ...


class Drafter(Protocol):
    """A drafting method: proposes tokens for the plan's decode rows."""

    placement: str
    """Where it runs: 'draft', 'target' or 'orchestrator' ranks."""

    def begin_round(self, plan: RoundPlan) -> None:
        """Take in admissions, drops and blocks."""
        ...

    def propose(self, plan: RoundPlan) -> Draft:
        """Draft tokens for every decode row; rows that are not drafted get zeros."""
        ...

    def close(self) -> None:
        """Give back what must not outlive the communicators."""
        ...

    def advance(self, plan: RoundPlan, num_tokens: torch.Tensor, tokens: torch.Tensor) -> None:
        """Learn what the target decided for the plan's sampled rows."""
        ...


class DraftLink(Protocol):
    """Draft → target packets and target → draft verdicts (parallel.link.Link)."""

    def send_draft(self, tokens: torch.Tensor, draft_probs: torch.Tensor | None) -> None:
        """On the draft leader."""
        ...

    def receive_draft(
        self, rows: int, draft_len: int, probability_rows: int, vocab: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """On every target rank; probabilities reach the target leader alone."""
        ...

    def forget(self) -> None:
        """Drop what this process sent itself and never received."""
        ...

    def send_verdict(self, num_tokens: torch.Tensor, tokens: torch.Tensor) -> None:
        """On the target leader."""
        ...

    def receive_verdict(self, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """On every other engine rank."""
        ...


class Ledger(Protocol):
    """The orchestrator's account of requests (scheduling.scheduler.Scheduler)."""

    def commit(
        self,
        plan: RoundPlan,
        num_tokens: list[int],
        tokens: list[list[int]],
    ) -> list[Any]:
        """Append tokens, apply stop rules, free and share blocks."""
        ...
