"""Keys of kernels' sources, by which Triton finds what it has compiled, made the same in every process.

Triton 3.6 leaves out of a function's key what the functions that it calls take from their modules, unless their own
keys were asked for before. So a kernel had one key where another kernel was launched first, and another where it was
not, and was compiled twice. It knows Triton's functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def settle_keys(module: Mapping[str, Any]) -> None:
    """Ask for the keys of a module's functions in the order in which they stand there: what they call comes first. At
    the end of each module whose functions take constants from it."""
    for value in list(module.values()):
        if hasattr(type(value), "cache_key"):
            _ = value.cache_key
