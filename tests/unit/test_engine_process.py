"""The engine's side of the socket when a rank has failed."""

from __future__ import annotations

import asyncio
from typing import Any

from launch.serve.engine_process import _Served
from trtrun.errors import RankFailedError


def test_a_failure_that_comes_when_the_event_loop_is_over_stops_no_thread() -> None:
    """Each request is told of it, in the engine's thread; the first of them ends the loop."""
    nothing: Any = None

    async def work() -> _Served:
        return _Served(nothing, nothing)

    asyncio.run(work())._hear_failure(RankFailedError("target rank 2 failed"))
