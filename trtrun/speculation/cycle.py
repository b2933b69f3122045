"""THE CYCLE: one round of speculative decoding, in time order.

    draft_round    draft ranks        catch up, then draft_len steps without talking to anyone outside the group
    transfer       link               token ids always, draft probabilities for the rows that need them
    verify_round   target ranks       one forward over draft_len + 1 positions a row, then acceptance
    commit_round   orchestrator       append tokens, apply stop rules, share full verified blocks

Whichever rank runs them, these four functions are the whole of it; `roles` calls them, each rank the ones of its roles.
The round's plan says who runs. Every rank knows from the verdicts where each row stands, so plans carry no lengths and
may be sent one round ahead.

This module sees protocols only: it knows no model, no process and no transport. The method is speculative sampling
(Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318); acceptance itself is in `verify.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from trtrun.core import Draft, RoundPlan, Verdict
from trtrun.speculation.protocols import Drafter, DraftLink, Ledger, Sampling, TargetEngine
from trtrun.speculation.verify import verify
from trtrun.tensors import device_integers
from trtrun.wire import RoundReport


def draft_round(drafter: Drafter, plan: RoundPlan) -> Draft:
    """Propose `plan.draft_len` tokens for every decode row, after catching up with what was committed.

    Returns:
        tokens [decode_rows, draft_len] int64 and, where rows need them, their draft_probs, on the draft's device.
    """
    drafter.begin_round(plan)
    return drafter.propose(plan)


def transfer(
    link: DraftLink, plan: RoundPlan, draft: Draft | None, *, receives: bool, num_probability_rows: int, vocab: int
) -> Draft | None:
    """Hand the draft to the target ranks, device to device where both are devices.

    The packet's shape follows from the plan on both sides; nothing of it is read from the wire.

    Args:
        link: between the engines.
        plan: the round's plan.
        draft: on the draft leader what it proposed, elsewhere None.
        receives: whether this process holds a target rank.
        num_probability_rows: rows whose draft_probs travel.
        vocab: width of draft_probs.

    Returns:
        On target ranks the draft, on others None.
    """
    if plan.draft_len == 0:
        return None
    if draft is not None:
        link.send_draft(draft.tokens, draft.draft_probs)
    if not receives:
        return None
    return Draft(*link.receive_draft(len(plan.decode_rows), plan.draft_len, num_probability_rows, vocab))


def verify_round(
    engine: TargetEngine, link: DraftLink, plan: RoundPlan, draft: Draft | None, *, leads: bool, use_logits: bool
) -> Verdict | None:
    """One target forward over every position in question, then the verdict, which goes straight to all engine ranks.

    Args:
        engine: this target rank, which has taken in the plan.
        link: between the engines.
        plan: the round's plan.
        draft: from `transfer`; None when nothing was drafted.
        leads: whether this rank is the target leader, which decides.
        use_logits: acceptance by draft_probs for sampled rows.

    Returns:
        The verdict for `plan.sampled_rows`; None when the round samples nothing.
    """
    device, num_decode = engine.device, len(plan.decode_rows)
    tokens = draft.tokens if draft is not None else torch.zeros((num_decode, 0), dtype=torch.int64, device=device)
    draft_lens = device_integers(plan.draft_lens.tolist(), device)
    logits = engine.verify_forward(plan, tokens, draft_lens)
    sampled = plan.sampled_rows
    if not sampled:
        return None
    rows = device_integers(sampled, device)
    if leads:
        state, num_prefill = engine.rows, len(sampled) - num_decode
        verdict = verify(
            logits,
            state.sampling,
            sampled,
            state.lengths[rows],
            state.history,
            torch.cat((tokens, tokens.new_zeros((num_prefill, tokens.shape[1])))),
            torch.cat((draft_lens, draft_lens.new_zeros(num_prefill))),
            draft.draft_probs if draft is not None else None,
            probability_rows(plan, state.sampling, use_logits),
            plan.max_context,
        )
        link.send_verdict(verdict.num_tokens, verdict.tokens)
    else:
        verdict = Verdict(*link.receive_verdict(len(sampled), plan.draft_len + 1))
    engine.rows.advance(rows, verdict.num_tokens, verdict.tokens)
    return verdict


def commit_round(ledger: Ledger, plan: RoundPlan, report: RoundReport) -> list[Any]:
    """Enter the verdict in the books: tokens, stop rules, finished requests, blocks that may be shared.

    Args:
        ledger: the scheduler.
        plan: the plan that the report answers.
        report: the target leader's, on the host.

    Returns:
        One result for each row that gained tokens.
    """
    if report.round_index != plan.round_index:
        raise RuntimeError(f"a report of round {report.round_index} came for the plan of round {plan.round_index}")
    return ledger.commit(plan, report.num_tokens, report.tokens)


def probability_rows(plan: RoundPlan, sampling: Sampling, use_logits: bool) -> list[int]:
    """Indices into `plan.decode_rows` of the rows whose draft_probs travel: drafted ones that are not greedy.

    Both engines work it out from the plan and the rows' parameters, so that packets need no header.
    """
    if not use_logits:
        return []
    return [
        index
        for index, (row, draft_len) in enumerate(zip(plan.decode_rows.tolist(), plan.draft_lens.tolist(), strict=True))
        if draft_len > 0 and not sampling.is_greedy(row)
    ]
