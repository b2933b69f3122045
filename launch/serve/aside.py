"""Work that would hold up every stream if the event loop did it: where it is long, another thread does it.

It knows how long is too long. It does not know what the work is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

SHORT_BODY = 1 << 16
"""Bytes whose JSON is read in less time than a stream would notice."""

SHORT_TEXT = 1 << 12
"""Characters that become tokens in less time than a stream would notice."""


async def aside(is_long: bool, work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Do work: at once, or where it is long, beside the streams."""
    if not is_long:
        return work(*arguments, **options)
    return await asyncio.to_thread(work, *arguments, **options)
