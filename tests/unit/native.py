"""What tests of the CPU kernels share: where they run at all, and how models are made to do with less.

A processor computes with the kernels of one kind (`machine.KINDS`). One that has more is made to compute as one that
has less, so that every kind is tested on all that can be it. ARM's is one of its own.
"""

from __future__ import annotations

import pytest

from trtrun.environment import CPU_LIMIT
from trtrun.kernels.cpu import machine
from trtrun.kernels.cpu.machine import KINDS, MULTIPLIES_BFLOAT16, NEON, processor_kind

_BEST = processor_kind()
HAD = tuple(KINDS)[tuple(KINDS).index(_BEST) : -1] if _BEST not in (None, NEON) else (NEON,) if _BEST else ()
"""The kinds that this processor can be."""


def _needs(kind: str, what: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(kind not in HAD, reason=f"needs a processor with {what}, libgomp and llvmlite")


PROCESSORS = {
    MULTIPLIES_BFLOAT16: _needs(MULTIPLIES_BFLOAT16, "AVX-512 BF16"),
    "avx512": _needs("avx512", "AVX-512"),
    "avx2": _needs("avx2", "AVX2"),
} | ({NEON: _needs(NEON, "NEON")} if NEON in HAD else {})
"""The kinds, and where they can be had."""

PATHS = {kind: PROCESSORS[kind] for kind in (MULTIPLIES_BFLOAT16, "avx2")}
"""For tests of whole models: kinds whose code differs, with and without dot products of bfloat16."""

needs_bfloat16 = PROCESSORS[MULTIPLIES_BFLOAT16]
needs_kernels = PROCESSORS[NEON if NEON in HAD else "avx2"]
"""For tests of kernels that only processors have which multiply bfloat16, and of those that each kind has."""

each_processor = pytest.mark.parametrize(
    "processor", [pytest.param(kind, marks=needed) for kind, needed in PROCESSORS.items()], indirect=True
)
"""For tests with the fixture `processor`."""


def leave_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models that are loaded from now on run on torch's operations, as on processors without the kernels."""
    monkeypatch.setattr(machine, "processor_kind", lambda: None)


def compute_as(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is loaded from now on choose and compile kernels as on a processor of one of `PROCESSORS`."""
    if kind not in (MULTIPLIES_BFLOAT16, NEON):
        monkeypatch.setenv(CPU_LIMIT, kind)
    monkeypatch.setattr(machine, "processor_kind", lambda: kind)
