"""What a round sees of the way between draft and target ranks: drafts there, verdicts back; and the way from device to
device, where they share devices, or nobody drafts.

On that way shapes follow from the plan on both sides: nothing is read back, and nothing waits for the host. The other
way is message_exchange.py. It does not know what is drafted or verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from typing_extensions import override

from parallel.link import Link
from trtrun.core.nouns import Draft, HiddenStates, RoundPlan, Verdict
from trtrun.rounds.launched_round import LaunchedRound, VerdictRound


class Exchange(Protocol):
    """One process's end. All calls of a round come in the order in which they stand here."""

    def is_late(self, plan: RoundPlan) -> bool:
        """Whether the target has gone on without this round's draft, on ranks that draft. The answer is the same all
        round."""
        ...

    def transfer_draft(self, plan: RoundPlan, draft: Draft | None, probability_rows: Sequence[int]) -> Draft | None:
        """Send the draft from where it was made, and get it where it is verified.

        Args:
            plan: the round's plan.
            draft: on ranks that have drafted.
            probability_rows: indices into `plan.decode_rows` of the rows whose draft_probs travel.

        Returns:
            On target ranks the draft on their device, its draft_probs on the leader alone; None where there is none.
        """
        ...

    def publish_guesses(self, plan: RoundPlan, guesses: Callable[[], np.ndarray | None]) -> None:
        """Send drafts, on ranks that draft ahead, for likely verdicts of the round, as `guesses` has them for who asks
        (gated_drafts.py), where target ranks look for them. Nothing waits."""
        ...

    def send_verdict(self, plan: RoundPlan, verdict: Verdict) -> None:
        """Send the verdict, on the target leader, to the engine ranks whose devices take part in the round."""
        ...

    def is_verdict_here(self, plan: RoundPlan) -> bool:
        """Whether `receive_verdict` would not wait, on ranks that draft and hold no target."""
        ...

    def receive_verdict(self, plan: RoundPlan, width: int) -> Verdict:
        """Receive the verdict, on every other engine rank, where the round samples: `width` is what target ranks
        verified, and 1."""
        ...

    def send_hidden(
        self, plan: RoundPlan, draft: Draft | None, verdict: Verdict | None, hidden: HiddenStates | None
    ) -> None:
        """On the target leader: what was tapped, to a head on a rank of its own, where there is one. It may wait for
        `conclude`; `draft` is what was handed over, `verdict` None where the round samples nothing."""
        ...

    def receive_hidden(self, plan: RoundPlan, verdict: Verdict | None) -> HiddenStates | None:
        """On ranks that draft and hold no target: what `send_hidden` was given of what heads are fed; None where
        nothing came."""
        ...

    def conclude(self, plan: RoundPlan, decided: VerdictRound) -> LaunchedRound:
        """Do, on the target leader, what has to wait for the verdict on the host, if anything has."""
        ...

    def forget(self) -> None:
        """Drop what is left of a round that did not come to its end."""
        ...

    def close(self) -> None:
        """No round follows: end what a rank that is gone would have taken."""
        ...


class DeviceExchange(Exchange):
    """An exchange over a `parallel.link.Link`."""

    def __init__(
        self,
        link: Link,
        *,
        in_place: bool,
        leads_draft: bool,
        target_vocab_size: int | None,
        looks_texts_up: bool = False,
    ) -> None:
        """Exchange over `link`.

        Args:
            link: of this process.
            in_place: whether the drafter runs on the target ranks, which then all have proposed the same.
            leads_draft: whether this is the draft leader, which sends.
            target_vocab_size: width of draft_probs on a target rank; None on ranks that verify nothing.
            looks_texts_up: whether drafts say what of them was found in texts: in a column behind their tokens.
        """
        self._link = link
        self._in_place = in_place
        self._leads_draft = leads_draft
        self._target_vocab_size = target_vocab_size
        self._looks_texts_up = looks_texts_up

    @override
    def is_late(self, plan: RoundPlan) -> bool:
        """False: the target waits."""
        return False

    @override
    def transfer_draft(self, plan: RoundPlan, draft: Draft | None, probability_rows: Sequence[int]) -> Draft | None:
        if plan.draft_len == 0:
            return None
        if self._in_place:
            return draft
        if draft is not None and self._leads_draft:
            tokens = draft.tokens
            if self._looks_texts_up:
                found = draft.num_suffix_tokens
                found = torch.zeros_like(draft.draft_lens) if found is None else found
                tokens = torch.cat((tokens, found.unsqueeze(1)), dim=1)
            self._link.send_draft(tokens, draft.draft_lens, draft.draft_probs)
        if self._target_vocab_size is None:
            return None
        width = plan.draft_len + self._looks_texts_up
        shape = (len(plan.decode_rows), width, len(probability_rows), self._target_vocab_size)
        tokens, draft_lens, probs = self._link.receive_draft(*shape)
        if not self._looks_texts_up:
            return Draft(tokens, draft_lens, probs)
        return Draft(tokens[:, :-1], draft_lens, probs, num_suffix_tokens=tokens[:, -1])

    @override
    def publish_guesses(self, plan: RoundPlan, guesses: Callable[[], np.ndarray | None]) -> None:
        """Do nothing: nobody drafts ahead on devices that verify."""

    @override
    def send_verdict(self, plan: RoundPlan, verdict: Verdict) -> None:
        """Send the verdict, to draft ranks, too."""
        self._link.send_verdict(verdict.num_tokens, verdict.tokens)

    @override
    def is_verdict_here(self, plan: RoundPlan) -> bool:
        """True: the device waits for the verdict."""
        return True

    @override
    def receive_verdict(self, plan: RoundPlan, width: int) -> Verdict:
        return Verdict(*self._link.receive_verdict(len(plan.sampled_rows), width))

    @override
    def send_hidden(
        self, plan: RoundPlan, draft: Draft | None, verdict: Verdict | None, hidden: HiddenStates | None
    ) -> None:
        """Do nothing: heads are where the target is."""

    @override
    def receive_hidden(self, plan: RoundPlan, verdict: Verdict | None) -> HiddenStates | None:
        """None: hidden states are sent to nobody."""
        return None

    @override
    def conclude(self, plan: RoundPlan, decided: VerdictRound) -> LaunchedRound:
        """Do nothing: nothing waits for the verdict here."""
        return decided

    @override
    def forget(self) -> None:
        self._link.forget()

    @override
    def close(self) -> None:
        """Do nothing: no rank goes on alone."""
