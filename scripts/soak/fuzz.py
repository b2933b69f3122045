"""Sends odd requests and calls, counts how they are answered, and makes the first one that goes wrong as small as
possible.

It knows how often. It does not know what is odd (`odd_requests`, `odd_calls`), or who answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase
from hypothesis.errors import Flaky

from scripts.soak.odd_calls import OddCall, find_call_fault, make_call, odd_calls
from scripts.soak.odd_requests import Endpoint, OddRequest, exchange, find_fault, odd_requests

PATIENCE = 120.0
"""Seconds that an answer may take on a busy machine."""


class FaultError(AssertionError):
    """An answer that must not be."""


def try_endpoint(endpoint: Endpoint, url: str, count: int, number: int) -> tuple[Counter[str], str | None]:
    """Send requests to one endpoint.

    Args:
        endpoint, url: where to.
        count: how many.
        number: which ones: the same number sends the same requests.

    Returns:
        Answers by status, and the smallest request that went wrong, if one did.
    """

    def send(request: OddRequest) -> tuple[str, str | None]:
        answered = exchange(url, request, PATIENCE)
        return str(answered.status or "closed"), find_fault(request, answered)

    return _try(odd_requests(endpoint), send, lambda request: request.data, count, number)


def try_method(channel: grpc.Channel, method: str, count: int, number: int) -> tuple[Counter[str], str | None]:
    """Make calls of one method; as `try_endpoint`."""

    def call(odd: OddCall) -> tuple[str, str | None]:
        outcome = make_call(channel, odd, PATIENCE)
        return outcome.status.name, find_call_fault(odd, outcome)

    return _try(odd_calls(method), call, lambda odd: odd.messages, count, number)


def _try(
    examples: st.SearchStrategy[Any],
    attempt: Callable[[Any], tuple[str, str | None]],
    show: Callable[[Any], object],
    count: int,
    number: int,
) -> tuple[Counter[str], str | None]:
    statuses: Counter[str] = Counter()

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=InMemoryExampleDatabase(),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(example=examples)
    def send(example: Any) -> None:
        try:
            status, fault = attempt(example)
        except TimeoutError:
            status, fault = "none", f"no end within {PATIENCE:g} s"
        statuses[status] += 1
        if fault:
            raise FaultError(f"{fault}\nsent: {show(example)!r:.1500}")

    try:
        send()
    except (FaultError, Flaky) as fault:
        return statuses, str(fault)
    return statuses, None
