"""Whether kernels in Triton's Gluon may take the place of the general ones.

Gluon is new, and changes with Triton's versions: where one of its kernels cannot be imported or compiled, or has other
bits than the general one, that does the work, too. It knows no kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch

_logger = logging.getLogger(__name__)


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether it is a GPU of compute capability 9.0, which those kernels are written for."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def has_same_bits(what: str, compare: Callable[[], bool]) -> bool:
    """Whether `compare` finds the bits of two kernels equal. Why not is logged.

    Args:
        what: the kernel computes, for the message.
        compare: imports and runs both.
    """
    try:
        if compare():
            return True
        reason = "its bits differ from those of the other kernel"
    except Exception as error:  # import, compiler, driver: whatever it is, there is another kernel
        reason = _reason(error)
    _logger.warning("The faster %s is not used here (%s)", what, reason)
    return False


def _reason(error: BaseException) -> str:
    """Why, in a line. Triton's compiler says of each function where it called the next one, and what is wrong behind
    the last."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[-1] if lines[0].startswith('at ') else lines[0]}"
