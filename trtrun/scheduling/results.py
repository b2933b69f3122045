"""What a round's result means for its rows: tokens, ends, counts, and blocks that others may reuse from then on.

The only place that knows when a completion ends: stop strings, stop tokens and sequences of these, and length. It knows
completions, the limits, and what was planned. It does not know who gets a row next, ranks or how drafts are verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trtrun.core.nouns import FinishReason
from trtrun.core.request_statistics import token_origins
from trtrun.scheduling.batch import PlannedRow, ScoredRow, Work
from trtrun.scheduling.completions import Completion, RowResult
from trtrun.scheduling.limits import SchedulerLimits


def append_tokens(
    completion: Completion, tokens: Sequence[int], limits: SchedulerLimits
) -> tuple[list[int], FinishReason | None]:
    """Append tokens until one ends the completion; return those appended and the reason, None when it goes on.

    Only a completion with stop strings needs its text here; that of the others is made when nobody waits for it.
    """
    if _none_ends(completion, tokens, limits):
        completion.token_ids += tokens
        return [*tokens], None
    appended: list[int] = []
    for token in tokens:
        completion.token_ids.append(token)
        appended.append(token)
        reason = _reason_to_end(completion, token, limits)
        if reason is not None:
            return appended, reason
    return appended, None


def _none_ends(completion: Completion, tokens: Sequence[int], limits: SchedulerLimits) -> bool:
    """Whether it is plain that the completion goes on behind all of the tokens, as it does in most rounds."""
    request, count = completion.request, len(tokens)
    sampling = request.sampling
    if sampling.stop or completion.stops is not None or len(completion.token_ids) + count >= limits.max_length:
        return False
    if completion.num_output_tokens + count >= sampling.max_tokens:
        return False
    return request.stop_ids.isdisjoint(tokens)


def _reason_to_end(completion: Completion, token: int, limits: SchedulerLimits) -> FinishReason | None:
    """Why the completion ends with `token`, its newest. A stop at the last allowed place is a stop, not "length"."""
    sampling, count = completion.request.sampling, completion.num_output_tokens
    reason = None
    if token in completion.request.stop_ids and count > sampling.min_tokens:
        reason = FinishReason.STOP
    elif count >= sampling.max_tokens or len(completion.token_ids) >= limits.max_length:
        reason = FinishReason.LENGTH
    if completion.stops is not None:
        completion.stop_state = completion.stops.step(completion.stop_state, token)
        if completion.stops.num_whole(completion.stop_state):
            reason = FinishReason.STOP
    text = completion.text
    if sampling.stop and text is not None:
        text.append(token)
        if reason is not None:
            text.end_tokens()
        if text.failure is not None:
            return FinishReason.ERROR
        # A stop string that is whole too early ends nothing, in whichever round its tokens came; one that begins early
        # and is whole in time does.
        if count < sampling.min_tokens:
            text.pass_stops()
        elif text.cut_at_stop():
            return FinishReason.STOP
    return reason


class PlannedRound(NamedTuple):
    """A plan that has no result yet.

    Attributes:
        round_index: of the plan.
        sampled: rows that get tokens, in the order of `RoundPlan.sampled_rows`.
        chunks: rows whose prefill goes on after this round.
        scored: rows whose prompt's log probabilities come with the result, in its order.
        reported: rows whose prompt's logits do.
    """

    round_index: int
    sampled: list[PlannedRow]
    chunks: list[PlannedRow]
    scored: list[ScoredRow]
    reported: list[ScoredRow]


def check_result(planned: PlannedRound | None, round_index: int, num_counts: int, num_lists: int) -> PlannedRound:
    """The round that is due, of which a result for `round_index` with so many counts and token lists must be.

    Raises:
        RuntimeError: it is of another round, or has another number of rows.
    """
    if planned is None or planned.round_index != round_index:
        due = planned.round_index if planned is not None else "none"
        raise RuntimeError(f"result of round {round_index} but the round due is {due}")
    if num_counts != len(planned.sampled) or num_lists != len(planned.sampled):
        raise RuntimeError(
            f"result of round {round_index} has {num_counts} counts and {num_lists} token lists "
            f"for {len(planned.sampled)} rows"
        )
    return planned


def commit_scores(scored: Sequence[ScoredRow], ids: np.ndarray, values: np.ndarray) -> None:
    """Hand the log probabilities of a round, [positions, 1 + alternatives] each, to the prompts whose they are."""
    start = 0
    for row in scored:
        end = start + row.num_positions
        completion = row.completion
        if completion.epoch == row.epoch and completion.scores is not None:
            completion.scores.take(ids[start:end], values[start:end])
        start = end


def commit_logits(reported: Sequence[ScoredRow], logits: np.ndarray) -> list[Completion]:
    """Hand the logits of a round, [positions, vocab], to the prompts whose they are; returns the completions."""
    start, found = 0, []
    for row in reported:
        end = start + row.num_positions
        completion = row.completion
        if completion.epoch == row.epoch and completion.logits is not None:
            completion.logits.take(logits[start:end])
            found.append(completion)
        start = end
    return found


def commit_chunk(planned: PlannedRow) -> None:
    """Offer for reuse what a prompt's chunk has written."""
    running = planned.completion
    running.table.commit(running.token_ids, planned.end, planned.has_draft_kv)


def count_draft(planned: PlannedRow, verified: int, num_tokens: int, found: int, is_hit: bool | None) -> None:
    """Count where a row's draft came from.

    Args:
        planned: the row's part in the plan.
        verified: draft tokens that were verified.
        num_tokens: tokens that it gained.
        found: of the draft's first tokens those that were found in texts.
        is_hit: whether it was made before the verdict that it follows; None where none are.
    """
    running = planned.completion
    # A draft that was found in texts is neither a cache hit nor waited for.
    if is_hit is not None and planned.draft_len > 0 and not found:
        running.statistics.foresight.record(running.last_accepted, is_hit, verified)
    if found and num_tokens:
        running.statistics.record_suffix(found, min(found, num_tokens - 1))


def commit_row(
    planned: PlannedRow,
    index: int,
    verified: int,
    num_tokens: int,
    tokens: Sequence[int],
    limits: SchedulerLimits,
    now: float,
) -> RowResult:
    """Append a sampled row's tokens, up to one that ends it, and offer its verified blocks for reuse.

    Args:
        planned: the row's part in the plan; its completion is still in that row.
        index: its place among the sampled rows.
        verified: draft tokens that were verified.
        num_tokens: tokens that it gained; 0 ends it with reason "error".
        tokens: at least that many token ids.
        limits: say when it is as long as it may be.
        now: seconds of `time.perf_counter`.

    Raises:
        RuntimeError: it gained more than it can have.
    """
    running, most_drafted = planned.completion, planned.draft_len
    if not 0 <= num_tokens <= verified + 1 <= most_drafted + 1 or len(tokens) < num_tokens:
        raise RuntimeError(
            f"request {running.request.request_id} got {num_tokens} tokens ({len(tokens)} listed) "
            f"from a round that verified {verified} of {most_drafted}"
        )
    running.num_pending_rounds -= 1
    running.num_pending_tokens -= most_drafted + 1
    if num_tokens == 0:
        running.finish(FinishReason.ERROR, now)
        return RowResult(running, [], index)
    running.last_accepted = num_tokens - 1
    if running.match is not None and most_drafted:
        running.match.note_draft(verified, num_tokens - 1)
    statistics = running.statistics
    if planned.work is Work.DECODE:
        statistics.record_round(verified, num_tokens - 1)
    if statistics.first_token is None:
        statistics.first_token = now
    if running.request.sampling.max_tokens == 0:  # the prompt alone was to be read
        running.finish(FinishReason.LENGTH, now)
        return RowResult(running, [], index)
    new_token_ids, reason = append_tokens(running, tokens[:num_tokens], limits)
    if running.match is not None:
        running.match.read(running.token_ids, len(running.request.prompt_token_ids))
    if running.predicted_output:
        running.compare_given_draft(len(new_token_ids))
    # The target has written all but the last token. The draft may lack more, and writes them at its next catch-up.
    lacking = planned.num_unfed if planned.has_draft_kv else 1
    running.table.commit(running.token_ids, len(running.token_ids) - lacking, planned.has_draft_kv)
    if reason is not None:
        running.finish(reason, now)
    return RowResult(running, new_token_ids, index, token_origins(verified, num_tokens)[: len(new_token_ids)])
