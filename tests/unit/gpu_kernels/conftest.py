"""What kernels in Triton's interpreter need."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture
def sums_without_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix products in float64, rounded behind each 16 inputs, so that it does not show how many of them are a step:
    numpy adds float32 in an order that depends on shape and processor."""
    from triton.runtime import interpreter

    def widen(part: Any) -> Any:
        if part.dtype.primitive_bitwidth > 8:
            return part.data.astype("float64")
        return torch.from_numpy(part.data.view("uint8").copy()).view(torch.float8_e4m3fn).double().numpy()

    def create_dot(builder: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
        left, right, result = widen(a), widen(b), total.data
        for start in range(0, left.shape[1], 16):
            product = left[:, start : start + 16] @ right[start : start + 16]
            result = result + product.astype(result.dtype)
        return interpreter.TensorHandle(result, total.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
