"""THE ROUND: what one process does in a round of speculative decoding, in time order, whichever ranks it holds.

    begin         all engine ranks   rows come and go
    propose       ranks that draft   tokens for the rows that decode: what was predicted, a fresh draft, or nothing
    transfer      draft → target     token ids always, draft probabilities for the rows that need them
    draft ahead   draft ranks with devices of their own: draft for the likely verdicts of this very round, beside
                  verification (asynchronous drafting)
    verify        target ranks       one forward over draft_len + 1 positions a row, then acceptance: the verdict
    send back     target → draft     the verdict, and hidden states behind it to a head on a rank of its own
    observe       ranks that draft   their rows move on
    report        leaders            times, and the target leader's verdict to the orchestrator, which commits it

The round's plan says who runs. Every rank knows from the verdicts where each row stands, so plans carry no lengths and
may be sent one round ahead. How a draft and a verdict travel is the exchange's business: on the device where ranks
share devices (exchange.py), as messages where the draft has devices of its own, so that the target never waits
for a draft that is late or lost (message_exchange.py).

It does not know where plans come from (served_rank.py), how a drafter drafts (speculation/drafters), nor how engines
were made (start/startup.py). The method is speculative sampling (Leviathan et al. 2023, arXiv:2211.17192; Chen et al.
2023, arXiv:2302.01318); acceptance itself is in speculation/verify.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from parallel.watchdog.activity import Activity, Phase
from trtrun.core.nouns import Draft, RoundPlan, Step, Verdict
from trtrun.guiding.host_copies import HostDraft
from trtrun.guiding.row_guides import RowGuides
from trtrun.rounds.exchange.exchange import Exchange
from trtrun.rounds.launched_round import AwaitedRound, DecidedRound, DoneRound, LaunchedRound, VerdictCopy
from trtrun.sampling.row_sampling import RowSampling
from trtrun.speculation.ahead.policy import NEVER
from trtrun.speculation.drafter import Drafter
from trtrun.speculation.protocols import RoundEngine, TargetEngine
from trtrun.speculation.trees import accepted_paths, verify_paths
from trtrun.speculation.verify import Verification, verify
from trtrun.tensors import cached_tensor
from trtrun.timing.phase_clock import HostPhases, PhaseClock
from trtrun.warmup_misses import WarmupMissWatch
from trtrun.wire.reports import ReportArrays, RoundTimes

_ROUNDS_BETWEEN_CHANCES = 8
"""How often a draft leader tells how likely guesses are: chances move with some fifty verdicts."""


@dataclass
class Worker:
    """One process's engine ranks: a draft rank, a target rank or, where both list its device, both.

    Attributes:
        exchange: this process's end of the way between draft and target ranks.
        drafter: set where the process drafts.
        target: set where it holds a target rank.
        draft: set where it holds a rank of a draft model.
        adapter_seconds: that it may take to get on with an adapter.
        leads_draft: whether it is the first of the ranks that draft.
        leads_target: whether its target rank is the target leader, which decides.
        use_logits: acceptance mode of sampled rows.
        device: of its engines.
        activity: where the process says what it is doing.
        phases: times the phases of rounds; only leaders take its times.
        warmup_misses: what is captured and compiled from now on, in rounds.
        forced_acceptance: for benchmarks, see `speculation.verify`.
        guides: of the rows that are guided, on the target leader, and where a drafter asks them; None elsewhere.
    """

    exchange: Exchange
    drafter: Drafter | None
    target: TargetEngine | None
    leads_draft: bool
    leads_target: bool
    use_logits: bool
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    activity: Activity = field(default_factory=Activity)
    phases: PhaseClock = field(default_factory=HostPhases)
    warmup_misses: WarmupMissWatch = field(default_factory=WarmupMissWatch)
    forced_acceptance: float | None = None
    guides: RowGuides | None = None
    draft: RoundEngine | None = None
    adapter_seconds: float = 300.0

    @torch.inference_mode()
    def launch_round(self, plan: RoundPlan) -> LaunchedRound:
        """Run one round, but for what a GPU has still to do when this returns, and what a rank that drafts does behind
        the verdict. Nothing waits for a GPU here, unless a draft has to be on the host first (message_exchange.py)."""
        self.phases.start(plan.round_index)
        by_probability = self._begin(plan)
        draft = self._propose(plan, by_probability)
        handed = self._transfer_draft(plan, draft, by_probability)
        num_guesses = self._draft_ahead(plan)

        def end() -> LaunchedRound:
            step, verdict = self._verify(plan, handed, by_probability)
            self._observe(plan, handed, verdict, step)
            return self._report(plan, draft, num_guesses, verdict, step)

        if self.target is None and not self.exchange.is_verdict_here(plan):
            self.activity.enter(plan.round_index, Phase.AWAITING_VERDICT)
            return AwaitedRound(lambda: self.exchange.is_verdict_here(plan), torch.inference_mode()(end))
        return end()

    def _begin(self, plan: RoundPlan) -> list[int]:
        """Take in what the plan changes, wherever rows are kept.

        Returns:
            Indices into `plan.decode_rows` of the rows that are accepted by probability, so that their draft_probs
            travel. Every rank works them out from the plan and the rows' own parameters: nothing says it on the way.
        """
        self.activity.enter(plan.round_index, Phase.AWAITING_DRAFT if self.drafter is None else Phase.DRAFTING)
        if self.drafter is not None:
            self.drafter.release_rows(plan)
        if self.target is not None:
            self.target.begin_round(plan)
        if self.guides is not None:
            self.guides.begin_round(plan)
        if self.drafter is not None:
            self.drafter.begin_round(plan)
        keeper = self.target or self.drafter
        if not self.use_logits or keeper is None:
            return []
        return probability_rows(plan, keeper.rows.sampling)

    def _propose(self, plan: RoundPlan, by_probability: Sequence[int]) -> Draft | None:
        """The draft, where the process drafts; None too where the target has gone on without this round's, and nothing
        was drafted ahead."""
        if self.drafter is None:
            return None
        if not self.exchange.is_late(plan):
            draft = self.drafter.propose(plan, by_probability)
        elif self.drafter.guesses() is not None:
            # The target may have found a cache hit among the guesses that it was sent; it waits for no more.
            draft = self.drafter.propose(replace(plan, redraft_threshold=NEVER), by_probability)
        else:
            draft = None
        self.phases.end("drafting")
        return draft

    def _transfer_draft(self, plan: RoundPlan, draft: Draft | None, by_probability: Sequence[int]) -> Draft | None:
        """The draft on its way to the target ranks; what they verify is returned there."""
        if self.drafter is not None:
            self.activity.enter(plan.round_index, Phase.TRANSFERRING)
        handed = self.exchange.transfer_draft(plan, draft, by_probability)
        if self.target is not None:
            self.phases.end("transferring")
        return handed

    def _draft_ahead(self, plan: RoundPlan) -> int:
        """Draft ahead, where the drafter does; returns how many verdicts were guessed."""
        if self.drafter is None or not self.drafter.drafts_ahead:
            return 0
        self.activity.enter(plan.round_index, Phase.ANTICIPATING)
        num_guesses = self.drafter.draft_ahead(plan, guesses=not self.exchange.is_late(plan))
        self.exchange.publish_guesses(plan, self.drafter.guesses)
        self.phases.end("anticipating")
        return num_guesses

    def _verify(
        self, plan: RoundPlan, draft: Draft | None, by_probability: Sequence[int]
    ) -> tuple[Step | None, Verdict | None]:
        """One target forward over every position in question, then the verdict, which goes straight to the other engine
        ranks; on draft ranks the wait for it.

        Args:
            plan: the round's plan.
            draft: what came; None where nothing did.
            by_probability: indices into `plan.decode_rows` of the rows accepted by draft_probs, where these came.

        Returns:
            What the target computed, on its ranks; and the verdict for `plan.sampled_rows`, None when the round samples
            nothing.
        """
        sampled, num_decode = plan.sampled_rows, len(plan.decode_rows)
        if self.target is None:
            self.activity.enter(plan.round_index, Phase.AWAITING_VERDICT)
            return None, self.exchange.receive_verdict(plan, plan.draft_len + 1) if sampled else None
        self.activity.enter(plan.round_index, Phase.VERIFYING)
        device, state = self.target.device, self.target.rows
        if draft is None:
            nothing = cached_tensor([0] * num_decode, device)
            draft = Draft(nothing.view(num_decode, 1)[:, :0], nothing)
        host_draft = self._copy_to_host(plan, draft)
        step = self.target.verify_forward(plan, draft)
        if not sampled:
            return step, None
        rows = cached_tensor(sampled, device)
        if not self.leads_target:
            verdict = self.exchange.receive_verdict(plan, draft.depth + 1)
        else:
            verdict = self._decide(plan, step.logits, rows, draft, by_probability, host_draft)
            verdict.num_suffix_tokens = draft.num_suffix_tokens
            verdict.waiting = self.guides.waiting(sampled) if self.guides is not None else {}
            self.exchange.send_verdict(plan, verdict)
        if draft.paths is not None:
            self.target.keep_path(plan, accepted_paths(draft, verdict))
        state.advance(rows, verdict.num_tokens, verdict.tokens)
        return step, verdict

    def _copy_to_host(self, plan: RoundPlan, draft: Draft) -> HostDraft | None:
        """The draft on its way to the host, where rows are guided: before the forward is launched, so that masks are
        made while it runs."""
        if self.guides is None or not draft.tokens.shape[1] or not self.guides.guided(plan.decode_rows.tolist()):
            return None
        return HostDraft(draft)

    def _decide(
        self,
        plan: RoundPlan,
        logits: torch.Tensor,
        rows: torch.Tensor,
        draft: Draft,
        by_probability: Sequence[int],
        host_draft: HostDraft | None,
    ) -> Verdict:
        """The verdict, on the target leader, for `plan.sampled_rows`, which are `rows` [rows] int64 on the device;
        `host_draft` is the draft on the host, where rows are guided."""
        assert self.target is not None
        sampled, state = plan.sampled_rows, self.target.rows
        proposed = _with_prefill_rows(draft, len(sampled) - len(plan.decode_rows))
        lengths = state.lengths.index_select(0, rows)
        width = draft.tokens.shape[1]
        masks = None if self.guides is None else self.guides.masks(sampled, width, host_draft)
        token_ids, context, forced = state.token_ids, plan.max_context, self.forced_acceptance
        verification = Verification(logits, state.sampling, sampled, lengths, token_ids, context, forced, masks)
        if draft.paths is not None:
            return verify_paths(verification, proposed)
        by_probability = by_probability if draft.draft_probs is not None else ()
        return verify(verification, proposed.tokens, proposed.draft_lens, draft.draft_probs, by_probability)

    def _observe(self, plan: RoundPlan, draft: Draft | None, verdict: Verdict | None, step: Step | None) -> None:
        """The rows that the process drafts for move on; a head elsewhere is told what it reads of the step."""
        if self.leads_target and step is not None:
            self.exchange.send_hidden(plan, draft, verdict, step.hidden)
        if self.drafter is not None and self.target is None:
            hidden = self.exchange.receive_hidden(plan, verdict)
            step = None if hidden is None else Step(torch.empty((0, 1, 0), device=self.device), hidden)
        if self.guides is not None and verdict is not None:
            self.guides.note_verdict(plan.sampled_rows, verdict)
        if self.drafter is not None:
            self.drafter.observe(plan, verdict, step)
        self.phases.end("verifying" if self.target is not None else "waiting")

    def _report(
        self, plan: RoundPlan, draft: Draft | None, num_guesses: int, verdict: Verdict | None, step: Step | None
    ) -> LaunchedRound:
        """What the process's leaders tell the orchestrator of the round."""
        self.activity.enter(plan.round_index, Phase.REPORTING)
        if self.leads_target:
            copied = VerdictCopy(plan, verdict, step)
            return self.exchange.conclude(plan, DecidedRound(copied, self._take_times))
        if not self.leads_draft:
            return DoneRound(None)
        tells_chances = plan.draft_len > 0 and plan.round_index % _ROUNDS_BETWEEN_CHANCES == 0
        chances = self.drafter.hit_chances() if tells_chances and self.drafter is not None else []
        report = ReportArrays(
            plan.round_index,
            self._take_times(),
            num_guesses=num_guesses,
            hit_chances=np.asarray(chances, dtype=np.float32),
        )
        return DoneRound(report)

    def _take_times(self) -> RoundTimes:
        """What the phases took that this process leads: on a GPU those of rounds that are known to be over."""
        seconds = self.phases.take()
        return RoundTimes(
            drafting=seconds.get("drafting", 0.0) if self.leads_draft else 0.0,
            anticipating=seconds.get("anticipating", 0.0) if self.leads_draft else 0.0,
            transferring=seconds.get("transferring", 0.0) if self.leads_target else 0.0,
            verifying=seconds.get("verifying", 0.0) if self.leads_target else 0.0,
            guiding=self.guides.take_seconds() if self.leads_target and self.guides is not None else 0.0,
            warmup_misses=self.warmup_misses.take(),
        )

    def read_adapter(self, name: str, path: Path) -> Callable[[int], None]:
        """Read an adapter beside the rounds, where the process holds a target rank.

        Returns:
            What fills a slot with it, for `install_adapter`.

        Raises:
            CheckpointError: it cannot be read, or does not fit the model.
        """
        if self.target is None:
            return lambda slot: None
        with self.activity.beside("adapters", f"loading adapter {name!r}", self.adapter_seconds) as work:
            return self.target.read_adapter(path, work.advance)

    def install_adapter(self, name: str, slot: int, fill: Callable[[int], None]) -> None:
        """Fill a slot that no row has with what was read, and empty the draft's. Between two rounds."""
        with self.activity.between(Phase.ADAPTERS, f"in installing adapter {name!r}"):
            fill(slot)
            if self.draft is not None:
                self.draft.empty_slot(slot)

    def reset(self) -> None:
        """Forget a round that did not come to its end. For a job of one process: other ranks would not know of it."""
        self.exchange.forget()

    def close(self) -> None:
        """Give back what must not outlive the communicators. No round follows."""
        self.exchange.close()
        if self.guides is not None:
            self.guides.close()
        if self.target is not None:
            self.target.close()
        if self.drafter is not None:
            self.drafter.close()


def probability_rows(plan: RoundPlan, sampling: RowSampling) -> list[int]:
    """Indices into `plan.decode_rows` of the rows that are drafted and not greedy."""
    lens = plan.draft_lens.tolist()
    return [index for index in sampling.sampled_indices(plan.decode_rows.tolist()) if lens[index] > 0]


def _with_prefill_rows(draft: Draft, num_rows: int) -> Draft:
    """The draft, and behind it rows whose prefill ends in this round, for which nothing is proposed."""
    if not num_rows:
        return draft

    def extended(of_rows: torch.Tensor, value: int) -> torch.Tensor:
        return torch.cat((of_rows, of_rows.new_full((num_rows, *of_rows.shape[1:]), value)))

    paths = extended(draft.paths, -1) if draft.paths is not None else None
    return Draft(extended(draft.tokens, 0), extended(draft.draft_lens, 0), paths=paths)
