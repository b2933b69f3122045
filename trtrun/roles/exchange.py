"""What a round sees of the way between draft and target ranks: drafts there, verdicts back.

Two ways stand behind it: device_exchange.py and message_exchange.py. It does not know what is drafted or verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from trtrun.core.nouns import Draft, RoundPlan, Verdict
from trtrun.roles.launched_round import LaunchedRound


class Exchange(Protocol):
    """One process's end. All calls of a round come in the order in which they stand here."""

    def is_late(self, plan: RoundPlan) -> bool:
        """On ranks that draft: whether the target has gone on without this round's draft. The same all round."""
        ...

    def hand_over(self, plan: RoundPlan, draft: Draft | None, probability_rows: Sequence[int]) -> Draft | None:
        """Send the draft from where it was made, and get it where it is verified.

        Args:
            plan: the round's plan.
            draft: on ranks that have drafted.
            probability_rows: indices into `plan.decode_rows` of the rows whose draft_probs travel.

        Returns:
            On target ranks the draft on their device, its draft_probs on the leader alone; None where there is none.
        """
        ...

    def send_verdict(self, verdict: Verdict) -> None:
        """On the target leader: to the engine ranks whose devices take part in the round."""
        ...

    def receive_verdict(self, plan: RoundPlan, width: int) -> Verdict:
        """On every other engine rank, where the round samples: `width` is what target ranks verified, and 1."""
        ...

    def conclude(self, plan: RoundPlan, decided: LaunchedRound) -> LaunchedRound:
        """On the target leader: do what has to wait for the verdict on the host, if anything has."""
        ...

    def forget(self) -> None:
        """Drop what is left of a round that did not come to its end."""
        ...
