"""What tests of the CPU kernels share: where they run at all, and how a model is made to do without them."""

from __future__ import annotations

import pytest

from trtrun.attention import backend
from trtrun.kernels.cpu import fused
from trtrun.kernels.cpu.machine import has_attention_kernel, has_bfloat16_kernels
from trtrun.linear.quantization import dense, fp8, int8

needs_kernels = pytest.mark.skipif(
    not has_bfloat16_kernels(), reason="the kernels need AVX-512 BF16, libgomp and llvmlite"
)

needs_attention_kernel = pytest.mark.skipif(
    not has_attention_kernel(), reason="the kernel needs AVX2 or AVX-512 BF16, libgomp and llvmlite"
)


def leave_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models that are loaded from now on run on torch's operations, as on processors without the kernels."""
    for module in (dense, fp8, int8, fused):
        monkeypatch.setattr(module, "has_bfloat16_kernels", lambda: False)
    monkeypatch.setattr(backend, "has_attention_kernel", lambda: False)
