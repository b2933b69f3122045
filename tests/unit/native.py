"""What tests of the CPU kernels share: where they run at all, and how models are made to do with less.

A processor computes with the kernels of one of three kinds (`PROCESSORS`). One that has more is made to compute as one
that has less, so that every kind is tested on all that can be it.
"""

from __future__ import annotations

import functools

import pytest

from trtrun.environment import CPU_LIMIT
from trtrun.kernels.cpu import attention, fused, machine
from trtrun.kernels.cpu.machine import has_attention_kernel, has_bfloat16_kernels

HAS_AVX512 = has_attention_kernel() and machine._has_features("avx512f")

needs_kernels = pytest.mark.skipif(
    not has_bfloat16_kernels(), reason="needs a processor with AVX-512 BF16, libgomp and llvmlite"
)
needs_avx512 = pytest.mark.skipif(not HAS_AVX512, reason="needs a processor with AVX-512, libgomp and llvmlite")
needs_attention_kernel = pytest.mark.skipif(
    not has_attention_kernel(), reason="needs a processor with AVX2, libgomp and llvmlite"
)

PROCESSORS = {"avx512_bf16": needs_kernels, "avx512": needs_avx512, "avx2": needs_attention_kernel}
"""The kinds, and where they can be had. Only the first has products of its own; its attention is another one, too."""

PATHS = {kind: PROCESSORS[kind] for kind in ("avx512_bf16", "avx2")}
"""Kinds that choose differently: with and without a bfloat16 kernel for everything."""

each_processor = pytest.mark.parametrize(
    "processor", [pytest.param(kind, marks=needed) for kind, needed in PROCESSORS.items()], indirect=True
)
"""For tests with the fixture `processor`."""

_COMPILE_ATTENTION = attention._kernel.__wrapped__
_ATTENTION = {kind: functools.cache(_COMPILE_ATTENTION) for kind in PROCESSORS}


def leave_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models that are loaded from now on run on torch's operations, as on processors without the kernels."""
    _leave_products_to_torch(monkeypatch)
    monkeypatch.setattr(machine, "has_attention_kernel", lambda: False)


def compute_as(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is loaded from now on choose and compile kernels as on a processor of one of `PROCESSORS`."""
    monkeypatch.setattr(attention, "_kernel", _ATTENTION[kind])
    if kind != "avx512_bf16":
        monkeypatch.setenv(CPU_LIMIT, kind)
        monkeypatch.setattr(attention, "has_bfloat16_kernels", lambda: False)
        _leave_products_to_torch(monkeypatch)


def _leave_products_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (machine, fused):
        monkeypatch.setattr(module, "has_bfloat16_kernels", lambda: False)
