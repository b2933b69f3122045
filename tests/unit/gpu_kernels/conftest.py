"""What kernels in Triton's interpreter need."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture
def sums_without_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix products in float64, rounded once: numpy adds float32 in an order that depends on shape and processor."""
    from triton.runtime import interpreter

    def widen(part: Any) -> Any:
        if part.dtype.primitive_bitwidth > 8:
            return part.data.astype("float64")
        return torch.from_numpy(part.data.view("uint8").copy()).view(torch.float8_e4m3fn).double().numpy()

    def create_dot(builder: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
        product = (widen(a) @ widen(b)).astype(total.data.dtype)
        return interpreter.TensorHandle(product + total.data, total.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
