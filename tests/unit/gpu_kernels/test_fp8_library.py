"""Which numbers of rows FP8's products give to torch's library: those that had the kernel's bits. With stand-ins."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: pip install triton")

from trtrun.kernels.arguments import RoundedRows
from trtrun.kernels.triton.matmul import fp8_matmul


@pytest.mark.parametrize(
    ("rows", "calls"), [(5, [5]), (8, [-8]), (16, [-16]), (37, [-16, -16, 5]), (40, [-16, -16, -8])]
)
def test_the_library_gets_numbers_of_rows_that_were_tried(
    rows: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative where the library computes; all rows come back in their order."""
    found: list[int] = []

    def product(sign: int, x: RoundedRows) -> torch.Tensor:
        found.append(sign * len(x.codes))
        return x.scale.unsqueeze(1).clone()

    monkeypatch.setattr(fp8_matmul, "_LIBRARY_ROWS", 8)
    monkeypatch.setattr(fp8_matmul, "_agreeing_rows", lambda codes, scale: 16)
    monkeypatch.setattr(fp8_matmul, "_library_product", lambda x, codes, scale: product(-1, x))
    monkeypatch.setattr(fp8_matmul, "chain_product", lambda x, *_: product(1, x))
    codes = torch.zeros(3, 16, dtype=torch.float8_e4m3fn)
    multiply = fp8_matmul.TritonFp8Matmul(codes, torch.ones(3), None, rounds_activations=True)
    scale = torch.arange(rows).float()
    x = RoundedRows(torch.zeros(rows, 16, dtype=torch.float8_e4m3fn), scale, torch.bfloat16)
    assert torch.equal(multiply(x)[:, 0], scale) and found == calls


@pytest.mark.parametrize(("fails_at", "agreed"), [(None, 2048), (1500, 1024), (1024, 1000), (512, 0)])
@pytest.mark.parametrize("refuses", [False, True])
def test_the_library_gets_as_many_rows_as_agree_with_all_fewer_ones(
    fails_at: int | None, agreed: int, refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it has other bits, and where it refuses."""

    def product(x: RoundedRows, *_: object) -> torch.Tensor:
        if len(x.codes) == fails_at and refuses:
            raise RuntimeError
        return torch.tensor(float(len(x.codes) == fails_at))

    monkeypatch.setattr(fp8_matmul, "_library_product", product)
    monkeypatch.setattr(fp8_matmul, "chain_product", lambda *_: torch.tensor(0.0))
    monkeypatch.setattr(
        fp8_matmul,
        "round_activations",
        lambda x: RoundedRows(x.to(torch.float8_e4m3fn), torch.ones(len(x)), torch.bfloat16),
    )
    codes = torch.zeros(3, 16, dtype=torch.float8_e4m3fn)
    assert fp8_matmul._try_library(codes, torch.ones(3)) == agreed
