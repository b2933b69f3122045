"""The end of a round, on the orchestrator: the verdict enters the books.

It knows the scheduler, reports and what drafts pay. It does not know who computed what.
"""

from __future__ import annotations

from trtrun.core.nouns import RoundPlan
from trtrun.scheduling.completion import RowResult
from trtrun.scheduling.scheduler import Scheduler
from trtrun.speculation.pacing import Pacer
from trtrun.wire.reports import RoundReport


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
