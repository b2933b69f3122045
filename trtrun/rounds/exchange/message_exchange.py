"""Drafts and verdicts as messages of the host, where the draft has devices of its own.

The target looks for the draft's packet and does not depend on it: what is not there in time is not verified, and the
rows take a plain step. No communicator that target ranks wait in has a draft rank in it, but for draft_probs, which are
fetched once a packet says that they are there. A draft rank that finds the verdict before it has proposed knows that
the target has gone on without it. On GPUs rounds are with the device before their drafts are there (gated_drafts.py).
It does not know how drafts are made or verified.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from typing_extensions import override

from parallel.communicator import Communicator
from parallel.errors import LinkError
from parallel.mailbox import Mailbox
from trtrun.core.nouns import Draft, HiddenStates, RoundPlan, Verdict
from trtrun.rounds.exchange.exchange import Exchange
from trtrun.rounds.exchange.gated_drafts import DraftTable, GatedDrafts, GatedRound, KnownVerdict, Origins
from trtrun.rounds.exchange.hidden_link import HiddenLink, feeds, settled
from trtrun.rounds.launched_round import DoneRound, LaunchedRound, VerdictRound
from trtrun.speculation.trees import along_paths
from trtrun.wire.messages import DRAFT_TAG, GUESS_TAG, LATE_TAG, VERDICT_TAG, decode_packet, encode_packet
from trtrun.wire.reports import ReportArrays

SHORTEST_PATIENCE = 0.1
"""Seconds that a packet is waited for at least: first rounds on a GPU compile kernels."""

_ROUNDS_OF_PATIENCE = 4
_KEPT_TIMES = 16


@dataclass
class MessageExchange(Exchange):
    """One end of an exchange by messages, of a draft rank or of a target rank.

    Attributes:
        mail: messages on the host.
        rank: this one.
        draft_ranks: world ranks of the draft engine, the leader first.
        target_ranks: of the target engine, the leader first.
        peers: all workers, for draft_probs.
        draft_peer, target_peer: the leaders' places there.
        group: on a target rank its tensor-parallel group, for verdicts; else None.
        target_vocab_size: width of draft_probs.
        use_logits: acceptance mode of sampled rows.
        draft_is_lost: whether no packet will come any more.
        hidden: the way of hidden states, on the target leader and on the rank of a head; None elsewhere, and without.
        gated: on target ranks that launch rounds before their drafts are there: chains, without draft_probs or hidden
            states; None elsewhere.
        tells_guesses: whether draft ranks tell what they have drafted ahead, as target ranks look for it.
    """

    mail: Mailbox
    rank: int
    draft_ranks: tuple[int, ...]
    target_ranks: tuple[int, ...]
    peers: Communicator
    draft_peer: int
    target_peer: int
    group: Communicator | None
    target_vocab_size: int
    use_logits: bool
    draft_is_lost: Callable[[], bool] = lambda: False
    hidden: HiddenLink | None = None
    gated: GatedDrafts | None = None
    tells_guesses: bool = False
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_TIMES))
    _late_round: tuple[int, bool] = (-1, False)
    _early: bytes | None = None
    _origins: Origins = field(default_factory=Origins)
    _tapped: tuple[Draft | None, Verdict | None, HiddenStates] | None = None
    _open: GatedRound | None = None
    _brought: Origins | None = None
    _known: KnownVerdict | None = None

    @override
    def is_late(self, plan: RoundPlan) -> bool:
        """The leader's answer, the same on all draft ranks."""
        round_index, is_late = self._late_round
        if round_index != plan.round_index:
            self._early = self.mail.take(self.target_ranks[0], VERDICT_TAG) if plan.sampled_rows else None
            is_late = self._agree_on_late(self._early is not None)
            self._late_round = plan.round_index, is_late
        return is_late

    @override
    def transfer_draft(self, plan: RoundPlan, draft: Draft | None, probability_rows: Sequence[int]) -> Draft | None:
        """Send the packet first, then draft_probs where rows need them. On draft ranks nothing waits."""
        if self.gated is not None:
            return self._expect_draft(self.gated, plan)
        if self.group is not None:
            return self._receive_draft(plan, probability_rows)
        if draft is None or plan.draft_len == 0 or self.rank != self.draft_ranks[0]:
            return None
        self.mail.post(self.target_ranks[0], DRAFT_TAG, encode_packet(plan.round_index, DraftTable.of(draft).numbers))
        if draft.draft_probs is not None:
            self.peers.send(draft.draft_probs, self.target_peer)
        return None

    @override
    def publish_guesses(self, plan: RoundPlan, guesses: Callable[[], np.ndarray | None]) -> None:
        """Send guesses from the draft leader to the target leader."""
        if self.tells_guesses and self.rank == self.draft_ranks[0] and (table := guesses()) is not None:
            self.mail.post(self.target_ranks[0], GUESS_TAG, encode_packet(plan.round_index, table))

    @override
    def send_verdict(self, plan: RoundPlan, verdict: Verdict) -> None:
        """Send the verdict to the other target ranks, on the device."""
        assert self.group is not None
        if self.gated is not None:
            self.gated.decide(plan, verdict)
        if self.group.size > 1:
            self.group.broadcast(torch.cat((verdict.num_tokens.unsqueeze(1), verdict.tokens), dim=1), 0)

    @override
    def is_verdict_here(self, plan: RoundPlan) -> bool:
        if plan.sampled_rows and self._early is None:
            self._early = self.mail.take(self.target_ranks[0], VERDICT_TAG)
        return not plan.sampled_rows or self._early is not None

    @override
    def receive_verdict(self, plan: RoundPlan, width: int) -> Verdict:
        """Receive the verdict; on draft ranks it comes as a message, and is on the host."""
        if self.group is not None:
            shape = (len(plan.sampled_rows), width + 1)
            packet = torch.empty(shape, dtype=torch.int64, device=self.group.device)
            self.group.broadcast(packet, 0)
            return Verdict(packet[:, 0], packet[:, 1:])
        payload, self._early = self._early or self.mail.wait(self.target_ranks[0], VERDICT_TAG), None
        assert payload is not None
        round_index, table = decode_packet(payload)
        if round_index != plan.round_index:
            raise LinkError(f"a verdict of round {round_index} came in round {plan.round_index}")
        told = torch.from_numpy(table)
        return Verdict(told[:, 0], told[:, 1:])

    @override
    def send_hidden(
        self, plan: RoundPlan, draft: Draft | None, verdict: Verdict | None, hidden: HiddenStates | None
    ) -> None:
        """Send hidden states behind the verdict, which says how much of them counts."""
        self._tapped = None
        if self.hidden is not None and hidden is not None and feeds(plan):
            self._tapped = draft, verdict, hidden

    @override
    def receive_hidden(self, plan: RoundPlan, verdict: Verdict | None) -> HiddenStates | None:
        """Receive hidden states, which a message announces."""
        if self.hidden is None or not feeds(plan):
            return None
        return self.hidden.receive(plan, [] if verdict is None else verdict.num_tokens.tolist())

    @override
    def conclude(self, plan: RoundPlan, decided: VerdictRound) -> LaunchedRound:
        """Send the verdict to the draft ranks once it is on the host, and hidden states behind it."""
        if self.gated is not None:
            self._open = GatedRound(
                plan, decided, self._bring_draft, self._tell, self._take_guesses, self._account, self._brought
            )
            return self._open
        report = decided.finish()
        assert report is not None and report.num_tokens is not None
        gained = report.num_tokens.clip(min=0)  # nothing, where a row waits for its guide
        counts = gained.tolist()
        self._tell(plan, gained, report.tokens)
        self._post_hidden(plan, counts)
        return DoneRound(self._account(report, self._origins))

    def _tell(self, plan: RoundPlan, num_tokens: np.ndarray, tokens: np.ndarray) -> None:
        """Send a verdict to the draft ranks."""
        self._known = KnownVerdict(plan, num_tokens, tokens)
        if plan.sampled_rows and not self.draft_is_lost():
            payload = encode_packet(plan.round_index, np.column_stack((num_tokens, tokens)))
            for rank in self.draft_ranks:
                self.mail.post(rank, VERDICT_TAG, payload)

    def _account(self, report: ReportArrays, origins: Origins) -> ReportArrays:
        """The report with its draft's origins; how long the round took says how long drafts are waited for."""
        self._seconds.append(report.times.verifying)
        return origins.added_to(report)

    def _expect_draft(self, gated: GatedDrafts, plan: RoundPlan) -> Draft | None:
        """Get, on target ranks, the draft that the device will wait for; where it is needed first, it is waited for
        here."""
        self._brought = None
        if not plan.draft_len:
            return None
        draft = gated.expect(plan, self._patience or 0.0)
        if gated.gate is not None and gated.needs_draft(plan):
            if self._open is not None:
                self._open.finish()
            self._brought = self._bring_draft(plan)
        return draft

    def _bring_draft(self, plan: RoundPlan) -> Origins:
        """Wait, on the target leader, for a packet, and let the device go on with what is in it, if anything is; or
        until the device has found its draft among guesses."""
        gated = self.gated
        assert gated is not None
        if not plan.draft_len:
            gated.settle(plan)
            return Origins()
        packet = self._look_for_packet(plan.round_index, lambda: self._find_cache_hits(gated, plan) is not None)
        cache_hits = self._find_cache_hits(gated, plan)
        if cache_hits is not None:
            while self.mail.take(self.draft_ranks[0], DRAFT_TAG) is not None:
                pass  # none is of a later round, for which the verdict would have to be known
            origins = Origins(cache_hits)
        elif not packet:
            nothing = np.zeros((len(plan.decode_rows), 1), dtype=np.int64)
            gated.give(plan, nothing[:, :0], nothing[:, 0])
            origins = Origins()
        else:
            table = DraftTable(decode_packet(packet)[1])
            gated.give(plan, table.tokens, table.draft_lens)
            origins = table.origins
        gated.settle(plan)
        return origins

    def _find_cache_hits(self, gated: GatedDrafts, plan: RoundPlan) -> tuple[int, ...] | None:
        self._take_guesses()
        return gated.cache_hits(plan, self._known)

    def _take_guesses(self) -> None:
        """Give the device, on the target leader, what was drafted ahead, as soon as it is there."""
        while (packet := self.mail.take(self.draft_ranks[0], GUESS_TAG)) is not None:
            assert self.gated is not None
            self.gated.guess(*decode_packet(packet))

    @override
    def forget(self) -> None:
        """Do nothing: a job of several ranks ends with a round that fails."""

    @override
    def close(self) -> None:
        if self.hidden is not None and self.draft_is_lost():
            self.hidden.give_up()

    def _post_hidden(self, plan: RoundPlan, num_tokens: list[int]) -> None:
        """Send on what was tapped in the round; nobody waits for it."""
        tapped, self._tapped = self._tapped, None
        if self.hidden is None or tapped is None:
            return
        if self.draft_is_lost():
            self.hidden.give_up()
            return
        draft, verdict, hidden = tapped
        if draft is not None and draft.paths is not None and verdict is not None:
            hidden = replace(hidden, decoded=along_paths(draft, verdict, hidden.decoded))
        self.hidden.post(plan.round_index, settled(plan, num_tokens, hidden))

    def _agree_on_late(self, is_late: bool) -> bool:
        if len(self.draft_ranks) == 1:
            return is_late
        if self.rank != self.draft_ranks[0]:
            return self.mail.wait(self.draft_ranks[0], LATE_TAG) == b"late"
        for rank in self.draft_ranks[1:]:
            self.mail.post(rank, LATE_TAG, b"late" if is_late else b"")
        return is_late

    def _receive_draft(self, plan: RoundPlan, probability_rows: Sequence[int]) -> Draft | None:
        """Get, on target ranks, the packet on the device, and on the leader the draft_probs that follow it."""
        assert self.group is not None
        self._origins = Origins()
        packet = self._await_packet(plan.round_index) if plan.draft_len else None
        if not packet:
            return None
        table = DraftTable(decode_packet(packet)[1])
        self._origins, probs = table.origins, None
        if probability_rows and self.rank == self.target_ranks[0]:
            shape = (len(probability_rows), plan.draft_len, self.target_vocab_size)
            probs = self.peers.recv(torch.empty(shape, device=self.group.device), self.draft_peer)[:, : table.width]
        return table.on(self.group.device, probs) if table.width else None

    def _await_packet(self, round_index: int) -> bytes | None:
        """This round's: found by the leader, which hands it to the others; nothing where it is not there in time."""
        leader, *others = self.target_ranks
        if self.rank != leader:
            return self.mail.wait(leader, DRAFT_TAG)
        packet = self._look_for_packet(round_index)
        for rank in others:
            self.mail.post(rank, DRAFT_TAG, packet or b"")
        return packet

    def _look_for_packet(self, round_index: int, until: Callable[[], bool] = lambda: False) -> bytes | None:
        while True:
            packet = self.mail.wait(
                self.draft_ranks[0], DRAFT_TAG, self._patience, lambda: self.draft_is_lost() or until()
            )
            if packet is None or decode_packet(packet)[0] == round_index:
                return packet
            # One of a round that the target did not wait for any longer.

    @property
    def _patience(self) -> float | None:
        """Seconds to wait for a packet. With draft_probs the tokens of a seed depend on drafts, and so must not depend
        on times."""
        if self.use_logits:
            return None
        usual = sorted(self._seconds)[len(self._seconds) // 2] if self._seconds else 0.0
        return max(SHORTEST_PATIENCE, _ROUNDS_OF_PATIENCE * usual)
