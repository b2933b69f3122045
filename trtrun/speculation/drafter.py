"""What a drafting method is to a round, and the register of how each is made.

A method is one file in `drafters`, which registers a function here under its name, and an entry in
`trtrun.configuration.drafting.drafting_methods`, which says where it runs. This module knows no method.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trtrun.configuration.drafting.speculation_section import SpeculationSection
from trtrun.core.nouns import Draft, RoundPlan, Step, Verdict
from trtrun.guiding.row_guides import RowGuides
from trtrun.registry import Registry
from trtrun.speculation.ahead.policy import GuessSpace
from trtrun.speculation.protocols import DraftEngine, Rows, TargetEngine, TargetGroup
from trtrun.speculation.translated_rows import Translation


class Drafter(ABC):
    """Proposes tokens for the plan's decode rows, on each of the ranks where its method is placed. All of them do the
    same. Most of what a round asks has an answer here: a method writes what it does otherwise.

    Attributes:
        drafts_ahead: whether it drafts for the likely verdicts of a round while the target verifies it.
    """

    drafts_ahead = False

    @property
    @abstractmethod
    def rows(self) -> Rows:
        """Where the rows stand that it drafts for: a draft engine's own, or the target's."""

    @abstractmethod
    def propose(self, plan: RoundPlan, probability_rows: Sequence[int]) -> Draft:
        """Draft tokens for every decode row.

        It may find fewer for a row than the plan asks for, and says so in `Draft.draft_lens`; what stands behind is
        never verified. Where it shares devices with the target, all of it stays on the device.

        Args:
            plan: the round's; it may have no decode rows, or a draft_len of 0.
            probability_rows: indices into `plan.decode_rows` of the rows that need draft_probs, in order.
        """

    def warm_up(self) -> None:  # noqa: B027
        """First use of what rounds run beside the engine's own forwards."""

    def guide(self, guides: RowGuides) -> None:  # noqa: B027
        """Ask `guides` from now on what may follow rows that are guided, which take plans in before the drafter does.
        Nothing to do for one that proposes what the target will not take there."""

    def release_rows(self, plan: RoundPlan) -> None:  # noqa: B027
        """Look once more at rows that the plan drops: no engine has taken the plan in yet."""

    def begin_round(self, plan: RoundPlan) -> None:  # noqa: B027
        """Take in admissions, drops and blocks. Nothing to do for one that reads the target's rows."""

    def draft_ahead(self, plan: RoundPlan, *, guesses: bool) -> int:
        """Draft for the likely verdicts of this very round; asked where it drafts ahead, each round.

        Args:
            plan: the round's.
            guesses: False where the verdict is there already: prompts are fed alone.

        Returns:
            How many verdicts were guessed.
        """
        return 0

    def guesses(self) -> npt.NDArray[np.int64] | None:
        """What `draft_ahead` has drafted, and for which verdicts: [guesses, 3 + steps], of each a row, how many of its
        draft's tokens are accepted, the token that follows, and the draft behind it; None where that is nothing, and
        where the draft behind a verdict may be another one than what was drafted ahead."""
        return None

    def hit_chances(self) -> list[float]:
        """How likely a verdict on a whole draft is among one row's guesses, by their number from 1 on."""
        return []

    def observe(self, plan: RoundPlan, verdict: Verdict | None, step: Step | None) -> None:  # noqa: B027
        """Learn what the target decided for the plan's sampled rows. Nothing to do for one that reads its rows.

        Args:
            plan: the round's.
            verdict: None where the round samples nothing.
            step: what the target computed, on target ranks; its hidden states where the method taps them, which the
                rank of a head is told, too, unless it is far behind. To be read before this returns.
        """

    @property
    def num_graphs(self) -> int:
        """CUDA graphs that it holds, beside its engine's."""
        return 0

    def close(self) -> None:  # noqa: B027
        """Give back what must not outlive the communicators."""


@dataclass(frozen=True)
class DrafterContext:
    """What there is for a drafter on its rank.

    Attributes:
        section: of the configuration, the method's own.
        draft: the draft engine; None for a method without a draft model.
        target: the target engine, None on a rank that does not hold it.
        target_vocab_size: padding included.
        heads: what the method's heads compute, on a rank that has them; None for a method without heads.
        guess_space: what of the draft engine belongs to guesses, where it has devices of its own; else None.
        guess_steps: numbers of guesses that a round may have, ascending.
        corpus: texts that the method looks up, on a rank that holds the target; None without.
        group: the target's ranks, on one of them.
        translation: what a draft model with another tokenizer than the target's needs; None for one with the same.
        mask_token: of a draft model that drafts all tokens in one forward; None for one that does not.
    """

    section: SpeculationSection
    draft: DraftEngine[Any] | None
    target: TargetEngine | None
    target_vocab_size: int
    guess_space: GuessSpace | None = None
    guess_steps: Sequence[int] = ()
    mask_token: int | None = None
    heads: Any = None
    corpus: Any = None
    group: TargetGroup | None = None
    translation: Translation | None = None


DRAFTERS: Registry[Callable[[DrafterContext], Drafter]] = Registry("drafting method")
