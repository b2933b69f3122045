"""What adapters add, by Triton's kernels in its interpreter, where there is no GPU; test_low_rank.py is for one."""

from __future__ import annotations

import pytest
import torch
from norms import difference

from trtrun.kernels.torch.low_rank import StackedFactors

pytest.importorskip("triton", reason="needs triton: pip install triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU"),
    pytest.mark.usefixtures("sums_without_order"),
]
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("outputs", "inputs", "most", "ranks"), [((70, 32, 32), 200, 24, (3, 24)), ((130,), 1100, 64, (64, 8))]
)
def test_what_adapters_add(
    outputs: tuple[int, ...], inputs: int, most: int, ranks: tuple[int, ...], dtype: torch.dtype
) -> None:
    """The same as torch's operations, in any company; lines without an adapter, or with an empty slot, stay."""
    from trtrun.kernels.line_slots import LineSlots
    from trtrun.kernels.torch.low_rank import Factors, LowRankShape, TorchLowRank
    from trtrun.kernels.triton.low_rank import TritonLowRank

    torch.manual_seed(inputs)
    shape, device = LowRankShape(outputs, inputs, 3, most), torch.device("cpu")
    found, expected = TritonLowRank(shape, dtype, device), TorchLowRank(shape, dtype, device)
    for slot, rank in enumerate(ranks, start=1):
        factors = [
            None
            if place == slot
            else Factors((torch.randn(rank, inputs) / inputs**0.5).to(dtype), torch.randn(of, rank).to(dtype))
            for place, of in enumerate(outputs)
        ]  # fmt: skip
        for one in (found, expected):
            one.put(slot, factors)
    x, y = torch.randn(39, inputs).to(dtype), torch.randn(39, sum(outputs)).to(dtype)
    slots = torch.tensor([0, 1, 1, 2, 3] * 7 + [2] * 4)

    def added(low_rank: StackedFactors, lines: slice) -> torch.Tensor:
        result = y[lines].clone()
        low_rank.add(result, x[lines], LineSlots(slots[lines]))
        return result

    whole = added(found, slice(None))
    assert difference(whole, added(expected, slice(None))) < BOUNDS[dtype]
    assert torch.equal(whole[(slots == 0) | (slots == 3)], y[(slots == 0) | (slots == 3)])
    for lines in (slice(1, 2), slice(20), slice(17, 39), slice(0)):
        assert torch.equal(added(found, lines), whole[lines]), lines
    result = y[:20].clone()  # a single row's slot, repeated: torch keeps one number for all
    found.add(result, x[:20], LineSlots(slots[1:2].expand(20)))
    of_lines = y[:20].clone()
    found.add(of_lines, x[:20], LineSlots(torch.ones(20, dtype=torch.int64)))
    assert torch.equal(result, of_lines)
    found.put(2, [None] * len(outputs))
    assert torch.equal(added(found, slice(None))[slots == 2], y[slots == 2])
