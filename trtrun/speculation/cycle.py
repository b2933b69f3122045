"""THE CYCLE: one round of speculative decoding, in time order.

    begin_round    draft, target      rows come and go; which rows are accepted by probability
    draft_round    where the drafter  propose tokens: with a draft model catch up, then draft_len steps without talking
                   runs               to anyone outside the group
    transfer       link               token ids always, draft probabilities for the rows that need them
    verify_round   target ranks       one forward over draft_len + 1 positions a row, then acceptance
    learn_verdict  draft ranks        the verdict's way back: the draft's rows move on
    commit_round   orchestrator       append tokens, apply stop rules, share full verified blocks, note what drafts pay

Draft ranks with devices of their own work while the target verifies, and the packets between the two are messages on
the host:

    propose_round      draft ranks    what was foreseen, a fresh draft, or nothing
    anticipate_round   draft ranks    beside verify_round: draft for the likely verdicts of this very round
    learn_host_verdict draft ranks    rows move on; was the verdict among the guesses?

Whichever rank runs them, these functions are the whole of it; `roles` calls them, each rank the ones of its roles.
The round's plan says who runs. Every rank knows from the verdicts where each row stands, so plans carry no lengths and
may be sent one round ahead.

This module sees engines and drafters by protocol: it knows no model, no process and no transport. The method is
speculative sampling (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318); acceptance itself
is in `verify.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trtrun.core import Draft, HostDraft, HostVerdict, RoundPlan, Verdict
from trtrun.sampling.row_sampling import RowSampling
from trtrun.scheduling.completion import RowResult
from trtrun.scheduling.scheduler import Scheduler
from trtrun.speculation.ahead.drafter import AheadDrafter
from trtrun.speculation.drafter import Drafter
from trtrun.speculation.pacing import Pacer
from trtrun.speculation.protocols import DraftLink, TargetEngine, VerdictLink
from trtrun.speculation.verify import verify
from trtrun.tensors import kept_integers
from trtrun.wire.reports import RoundReport


def begin_round(
    plan: RoundPlan, drafter: Drafter | None, target: TargetEngine | None, *, use_logits: bool
) -> list[int]:
    """Take in what the plan changes, wherever rows are kept.

    Args:
        plan: the round's plan.
        drafter: where this process drafts.
        target: where it holds a target rank.
        use_logits: acceptance by draft_probs for sampled rows.

    Returns:
        Indices into `plan.decode_rows` of the rows that are accepted by probability, so that their draft_probs travel.
        Every rank works them out from the plan and the rows' own parameters, so that packets need no header.
    """
    if target is not None:
        target.begin_round(plan)
    if drafter is not None:
        drafter.begin_round(plan)
    keeper = target or drafter
    if not use_logits or keeper is None:
        return []
    return probability_rows(plan, keeper.rows.sampling)


def probability_rows(plan: RoundPlan, sampling: RowSampling) -> list[int]:
    """Indices into `plan.decode_rows` of the rows that are drafted and not greedy."""
    lens = plan.draft_lens.tolist()
    return [index for index in sampling.sampled_indices(plan.decode_rows.tolist()) if lens[index] > 0]


def draft_round(drafter: Drafter, plan: RoundPlan, probability_rows: Sequence[int]) -> Draft:
    """Propose up to `plan.draft_len` tokens for every decode row; see `Drafter.propose`.

    Returns:
        tokens [decode_rows, draft_len] int64, how many of each row's are proposals, and the draft_probs of
        `probability_rows`, on the drafter's device.
    """
    return drafter.propose(plan, probability_rows)


def transfer(
    link: DraftLink,
    plan: RoundPlan,
    draft: Draft | None,
    *,
    in_place: bool,
    receives: bool,
    num_probability_rows: int,
    vocab: int,
) -> Draft | None:
    """Hand the draft to the target ranks, device to device where both are devices.

    The packet's shape follows from the plan on both sides; nothing of it is read from the wire.

    Args:
        link: between the engines.
        plan: the round's plan.
        draft: what was proposed: on the draft leader, or with `in_place` on every target rank; elsewhere None.
        in_place: whether the drafter runs on the target ranks, which then all have proposed the same.
        receives: whether this process holds a target rank.
        num_probability_rows: rows whose draft_probs travel.
        vocab: width of draft_probs.

    Returns:
        On target ranks the draft, on others None.
    """
    if plan.draft_len == 0:
        return None
    if in_place:
        return draft
    if draft is not None:
        link.send_draft(draft.tokens, draft.draft_lens, draft.draft_probs)
    if not receives:
        return None
    return Draft(*link.receive_draft(len(plan.decode_rows), plan.draft_len, num_probability_rows, vocab))


def verify_round(
    engine: TargetEngine,
    link: VerdictLink,
    plan: RoundPlan,
    draft: Draft | None,
    probability_rows: Sequence[int],
    *,
    leads: bool,
    forced_acceptance: float | None = None,
) -> Verdict | None:
    """One target forward over every position in question, then the verdict, which goes straight to all engine ranks.

    Args:
        engine: this target rank, which has taken in the plan.
        link: to the other engine ranks.
        plan: the round's plan.
        draft: from `transfer`, or from a packet; None when nothing was drafted.
        probability_rows: indices into `plan.decode_rows` of the rows accepted by draft_probs.
        leads: whether this rank is the target leader, which decides.
        forced_acceptance: for benchmarks, see `accept_forced`.

    Returns:
        The verdict for `plan.sampled_rows`; None when the round samples nothing.
    """
    device, num_decode = engine.device, len(plan.decode_rows)
    if draft is None:
        nothing = kept_integers([0] * num_decode, device)
        draft = Draft(nothing.view(num_decode, 1)[:, :0], nothing)
    logits = engine.verify_forward(plan, draft.tokens, draft.draft_lens)
    sampled = plan.sampled_rows
    if not sampled:
        return None
    rows = kept_integers(sampled, device)
    if leads:
        state = engine.rows
        proposed = _with_prefill_rows(draft, len(sampled) - num_decode)
        verdict = verify(
            logits,
            state.sampling,
            sampled,
            state.lengths.index_select(0, rows),
            state.token_ids,
            proposed.tokens,
            proposed.draft_lens,
            draft.draft_probs,
            probability_rows,
            plan.max_context,
            forced_acceptance,
        )
        link.send_verdict(verdict.num_tokens, verdict.tokens)
    else:
        verdict = Verdict(*link.receive_verdict(len(sampled), draft.tokens.shape[1] + 1))
    engine.rows.advance(rows, verdict.num_tokens, verdict.tokens)
    return verdict


def _with_prefill_rows(draft: Draft, num_rows: int) -> Draft:
    """The draft, and behind it rows whose prefill ends in this round, for which nothing is proposed."""
    if not num_rows:
        return draft
    tokens, lens = draft.tokens, draft.draft_lens
    return Draft(
        torch.cat((tokens, tokens.new_zeros((num_rows, tokens.shape[1])))), torch.cat((lens, lens.new_zeros(num_rows)))
    )


def learn_verdict(drafter: Drafter, link: DraftLink, plan: RoundPlan, verdict: Verdict | None) -> None:
    """The verdict's way back to where drafts are made.

    Args:
        drafter: of this process.
        link: between the engines.
        plan: the round's plan.
        verdict: where this process holds a target rank, from `verify_round`; else None: it comes over the link.
    """
    if not plan.sampled_rows:
        return
    if verdict is None:
        verdict = Verdict(*link.receive_verdict(len(plan.sampled_rows), plan.draft_len + 1))
    drafter.advance(plan, verdict.num_tokens, verdict.tokens)


def propose_round(drafter: AheadDrafter[Any], plan: RoundPlan) -> HostDraft:
    """What draft ranks of their own propose; see `AheadDrafter.propose`."""
    return drafter.propose(plan)


def anticipate_round(drafter: AheadDrafter[Any], plan: RoundPlan, *, guesses: bool) -> int:
    """Draft for the likely verdicts of a round that the target is verifying.

    Args:
        drafter: of this draft rank.
        plan: the round's plan.
        guesses: False where the verdict is there already: the prompts are fed alone.

    Returns:
        How many verdicts were guessed.
    """
    return drafter.anticipate(plan, guesses=guesses)


def learn_host_verdict(drafter: AheadDrafter[Any], plan: RoundPlan, verdict: HostVerdict) -> None:
    """The verdict's way back to draft ranks of their own."""
    drafter.learn(plan, verdict)


def commit_round(
    scheduler: Scheduler,
    plan: RoundPlan,
    report: RoundReport,
    pacer: Pacer | None = None,
    seconds: float = 0.0,
    num_plain: int = 0,
) -> list[RowResult]:
    """Enter the verdict in the books: the scheduler's, and those of what drafts pay.

    Args:
        scheduler: appends the tokens, applies stop rules, frees blocks and offers verified ones for reuse.
        plan: the plan that the report answers.
        report: the target leader's, on the host.
        pacer: chooses how much is drafted; None where draft_len is fixed.
        seconds: how long the round took.
        num_plain: decode rows that are as if nothing were drafted for them, when the plan was made.

    Returns:
        One result for each row that gained tokens.
    """
    if report.round_index != plan.round_index:
        raise RuntimeError(f"a report of round {report.round_index} came for the plan of round {plan.round_index}")
    planned = plan.draft_lens.tolist()
    # A round in which nothing may be drafted for any row (speculation is off) says nothing about drafting.
    if pacer is not None and any(length >= 0 for length in planned):
        # A draft that was asked for and not found costs the round as much as one that is rejected at once. One that
        # came with a request says nothing about the drafter, and its row may have had more than the others.
        asked = zip(plan.decode_rows.tolist(), planned, report.num_tokens, strict=False)
        acceptances = [
            (length, max(0, count - 1)) for row, length, count in asked if length > 0 and row not in plan.given_rows
        ]
        is_usual = not (plan.prefill or plan.given_rows)
        pacer.record(len(planned), plan.draft_len, seconds if is_usual else None, acceptances, num_plain)
    foreseen = report.foreseen if plan.num_guesses else None
    return scheduler.commit(plan, report.num_tokens, report.tokens, report.draft_lens, foreseen)
