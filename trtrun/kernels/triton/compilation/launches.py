"""Hooks on Triton's launches: counts the kernels that it makes ready, and tells which ones a piece of work launches
without compiling or launching any.

Within `collecting` Triton's kernels are skipped and named to the caller. What they would have written is zero, so that
whatever reads it goes on, and its results mean nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch.overrides import TorchFunctionMode
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


_UNWRITTEN = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
"""torch's functions and methods that make memory and leave it as it is."""


@dataclass(frozen=True)
class KernelRequest:
    """A kernel to compile.

    Attributes:
        module, name: where it is found.
        data: its arguments and options, as Triton writes them (JSON).
    """

    module: str
    name: str
    data: str


class _State:
    """State of the process; only the thread that starts engines collects."""

    is_on = False


def is_collecting() -> bool:
    """Whether kernels are skipped now, so that nothing can be learnt from results."""
    return _State.is_on


class _ZeroFilled(TorchFunctionMode):
    """New memory is zero. A mode of dispatch would see what operations make themselves, too, but they write it; and its
    first use imports torch's compiler, which takes seconds of a start."""

    def __torch_function__(
        self,
        function: Any,
        types: Sequence[Any],
        arguments: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        result = function(*arguments, **(named or {}))
        if getattr(function, "__name__", None) in _UNWRITTEN:
            result.zero_()
        return result


@contextmanager
def collecting(found: Callable[[KernelRequest], None]) -> Iterator[None]:
    """Skip the block's kernels, and call `found` with each that this process has not compiled, once."""
    seen: set[tuple[str, str]] = set()

    def skip(*, key: str, fn: Any, compile: Mapping[str, Any], **_: Any) -> bool:
        if (fn.name, key) not in seen:
            seen.add((fn.name, key))
            found(KernelRequest(fn.module, fn.name, str(compile["specialization_data"])))
        return True

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, skip
    _State.is_on = True
    try:
        with _ZeroFilled():
            yield
    finally:
        _State.is_on = False
        knobs.runtime.jit_cache_hook = before
