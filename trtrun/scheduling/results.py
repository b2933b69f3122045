"""What a round's tokens mean for one request: append, ask the stop rules, cut at the first reason to end.

It knows one request and the limits; rows, blocks and plans are the scheduler's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from trtrun.core import FinishReason
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.scheduling.running import RunningRequest

AcceptToken = Callable[[RunningRequest, int], FinishReason | None]
"""Called after each appended token; says whether it ends the request (stop ids, stop strings)."""


def append_tokens(
    running: RunningRequest, tokens: Iterable[int], limits: SchedulerLimits, accept_token: AcceptToken
) -> tuple[list[int], FinishReason | None]:
    """Append tokens until one ends the request; return those appended and the reason, None when it goes on.

    A reason of `accept_token` comes before "length": a stop token at the last allowed place is a stop.
    """
    max_tokens = running.request.sampling.max_tokens
    appended: list[int] = []
    for token in tokens:
        running.token_ids.append(token)
        running.output_token_ids.append(token)
        appended.append(token)
        reason = accept_token(running, token)
        if reason is not None:
            return appended, reason
        if len(running.output_token_ids) >= max_tokens or len(running.token_ids) >= limits.max_length:
            return appended, FinishReason.LENGTH
    return appended, None
