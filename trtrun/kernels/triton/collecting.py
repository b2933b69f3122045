"""Which kernels a piece of work launches, told without compiling or launching any.

Within `collecting` Triton's kernels are skipped and named to the caller. What they would have written is zero, so that
whatever reads it goes on, and its results mean nothing. It knows Triton's hook and torch's dispatch. It does not know
what work that is, or who compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

_aten = torch.ops.aten
_UNWRITTEN = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}


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
    """Of the process; only the thread that starts engines collects."""

    is_on = False


def is_collecting() -> bool:
    """Whether kernels are skipped now, so that nothing can be learnt from results."""
    return _State.is_on


class _ZeroFilled(TorchDispatchMode):
    """New memory is zero."""

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[Any],
        arguments: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        result = function(*arguments, **(named or {}))
        if function.overloadpacket in _UNWRITTEN:
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
