"""What a drafting method is to the cycle, and the register of how each is made.

A method is one file in `drafters`, which registers a function here under its name, and an entry in
`trtrun.drafting_methods`, which says where it runs. This module knows no method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trtrun.core import Draft, RoundPlan
from trtrun.drafting_methods import SpeculationSection
from trtrun.registry import Registry
from trtrun.speculation.protocols import DraftEngine, Rows, TargetEngine


class Drafter(Protocol):
    """Proposes tokens for the plan's decode rows, on each of the ranks where its method is placed."""

    @property
    def rows(self) -> Rows:
        """Where the rows stand that it drafts for: a draft engine's own, or the target's."""
        ...

    def begin_round(self, plan: RoundPlan) -> None:
        """Take in admissions, drops and blocks. Nothing to do for one that reads the target's rows."""
        ...

    def propose(self, plan: RoundPlan, probability_rows: Sequence[int]) -> Draft:
        """Draft tokens for every decode row.

        It may find fewer for a row than the plan asks for, and says so in `Draft.draft_lens`; what stands behind is
        never verified. All of it stays on the device.

        Args:
            plan: the round's; it may have no decode rows, or a draft_len of 0.
            probability_rows: indices into `plan.decode_rows` of the rows that need draft_probs, in order.
        """
        ...

    def advance(self, plan: RoundPlan, num_tokens: torch.Tensor, tokens: torch.Tensor) -> None:
        """Learn what the target decided for the plan's sampled rows. Nothing to do for one that reads its rows."""
        ...

    def close(self) -> None:
        """Give back what must not outlive the communicators."""
        ...


@dataclass(frozen=True)
class Workplace:
    """What there is for a drafter on its rank.

    Attributes:
        section: of the configuration, the method's own.
        draft: the draft engine; None for a method without a draft model.
        target: the target engine, None on a rank that does not hold it.
        target_vocab_size: padding included.
    """

    section: SpeculationSection
    draft: DraftEngine[Any] | None
    target: TargetEngine | None
    target_vocab_size: int


DRAFTERS: Registry[Callable[[Workplace], Drafter]] = Registry("drafting method")
