"""Counts the kernels that Triton makes ready, whether it compiles them or finds them on disk, and logs for debugging
which they are.

It knows Triton's hook. It does not know kernels.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from triton import knobs

from trtrun.warmup_misses import count_compilation

_logger = logging.getLogger(__name__)


@cache
def watch_compilations() -> None:
    """Count from now on. Another's hook is still called."""
    others = knobs.runtime.jit_post_compile_hook

    def counted(*arguments: Any, **named: Any) -> Any:
        count_compilation()
        _logger.debug("ready: %s", named.get("repr"))
        return others(*arguments, **named) if others is not None else None

    knobs.runtime.jit_post_compile_hook = counted
