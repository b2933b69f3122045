"""When a completion ends: stop strings, stop tokens and sequences of these, and length. The only place that knows.

It knows one completion and the limits; rows, blocks and plans are the scheduler's.
"""

from __future__ import annotations

from collections.abc import Sequence

from trtrun.core.nouns import FinishReason
from trtrun.scheduling.completion import Completion
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
        # A stop string that is whole too early ends nothing, in whichever round its tokens came; one that begins early
        # and is whole in time does.
        if count < sampling.min_tokens:
            text.pass_stops()
        elif text.cut_at_stop():
            return FinishReason.STOP
    return reason
