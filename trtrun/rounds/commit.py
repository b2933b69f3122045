"""The end of a round: its verdict enters the books of the scheduler, and of what drafts pay.

It knows plans and reports. It does not know ranks, clocks or texts.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np

from trtrun.core.nouns import RoundPlan, TokenLogprobs
from trtrun.scheduling.completions import RowResult
from trtrun.scheduling.scheduler import Scheduler
from trtrun.speculation.acceptance import AcceptanceWatch
from trtrun.speculation.ahead.ahead_costs import AheadRound
from trtrun.speculation.pacing import Pacer
from trtrun.wire.reports import RoundReport

logger = logging.getLogger(__name__)


class RowUpdate(NamedTuple):
    """What a round gave one completion, and the log probabilities of its verdict where the row asked for them: at
    least one entry a token, with as many alternatives as any row of the round asked for; and its logits, [tokens,
    vocab] float32, of at least as many."""

    result: RowResult
    logprobs: list[TokenLogprobs] | None
    logits: np.ndarray | None = None


def ahead_round(before: RoundPlan | None, plan: RoundPlan, report: RoundReport, seconds: float) -> AheadRound:
    """What a round says of drafting ahead. Its time is that of the guesses in `before`, the plan that came before it,
    unless either had something else to do."""
    num_rows = len(plan.decode_rows)
    draft_lens = report.draft_lens[:num_rows]
    hits = [length > 0 and hit for length, hit in zip(draft_lens, report.cache_hits, strict=False)]
    plans = (plan,) if before is None else (before, plan)
    follows = before is not None and before.round_index == plan.round_index - 1 and before.draft_len == plan.draft_len
    is_usual = follows and not any(one.prefill or one.predicted_output_rows for one in plans)
    return AheadRound(
        num_rows,
        plan.draft_len,
        before.num_guesses if is_usual and before is not None else None,
        sum(hits),
        any(length > 0 and not hit for length, hit in zip(draft_lens, hits, strict=True)),
        report.times.verifying,
        seconds,
        [max(0, count) for count in report.num_tokens[:num_rows]],
        draft_lens,
    )


def commit_round(
    scheduler: Scheduler,
    plan: RoundPlan,
    report: RoundReport,
    pacer: Pacer | None = None,
    seconds: float = 0.0,
    num_plain: int = 0,
    is_partial: bool = False,
    watch: AcceptanceWatch | None = None,
) -> list[RowResult]:
    """Enter the verdict in the books: the scheduler's, and those of what drafts pay.

    Args:
        scheduler: appends the tokens, applies stop rules, frees blocks and offers verified ones for reuse.
        plan: the plan that the report answers.
        report: the target leader's, on the host.
        pacer: chooses how much is drafted; None where draft_len is fixed.
        seconds: how long the round took.
        num_plain: decode rows that are as if nothing were drafted for them, when the plan was made.
        is_partial: whether only some of the others were to draft.
        watch: says so where drafts are not worth their time.

    Returns:
        One result for each row that gained tokens.
    """
    if report.round_index != plan.round_index:
        raise RuntimeError(f"a report of round {report.round_index} came for the plan of round {plan.round_index}")
    planned = plan.draft_lens.tolist()
    # A round in which nothing may be drafted for any row (speculation is off) says nothing about drafting.
    if (pacer is not None or watch is not None) and any(length >= 0 for length in planned):
        # A draft that was asked for and not found costs the round as much as one that is rejected at once. One that
        # came with a request says nothing about the drafter, and its row may have had more than the others.
        asked = zip(plan.decode_rows.tolist(), planned, report.num_tokens, strict=False)
        acceptances = [
            (length, max(0, count - 1))
            for row, length, count in asked
            if length > 0 and count >= 0 and row not in plan.predicted_output_rows
        ]
        is_usual = not (plan.prefill or plan.predicted_output_rows)
        if pacer is not None:
            took = seconds if is_usual else None
            pacer.record(len(planned), plan.draft_len, took, acceptances, num_plain, is_partial)
        if watch is not None:
            # As statistics and metrics count: of drafts that were not found nothing was verified.
            verified = zip(plan.decode_rows.tolist(), planned, report.draft_lens, report.num_tokens, strict=False)
            watch.record(
                [
                    (found, max(0, count - 1))
                    for row, length, found, count in verified
                    if length > 0 and found > 0 and row not in plan.predicted_output_rows
                ]
            )
            if (said := watch.complain(pacer.pays if pacer is not None else None)) is not None:
                logger.warning(said)
    cache_hits = report.cache_hits if plan.num_guesses else None
    found = report.num_suffix_tokens
    of_prompts = (report.prompt_ids, report.prompt_values) if len(report.prompt_ids) else None
    logits = report.prompt_logits if len(report.prompt_logits) else None
    return scheduler.commit(
        plan, report.num_tokens, report.tokens, report.draft_lens, cache_hits, found, of_prompts, logits
    )
