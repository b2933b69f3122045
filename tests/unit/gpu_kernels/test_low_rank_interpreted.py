"""What adapters add, by Triton's kernels in its interpreter, where there is no GPU; test_low_rank.py is for one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from norms import difference
from torch.nn import functional

from trtrun.kernels.torch.low_rank import StackedFactors

pytest.importorskip("triton", reason="needs triton: pip install triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU"),
    pytest.mark.usefixtures("sums_without_order"),
]
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3}


@pytest.mark.parametrize(
    ("outputs", "inputs", "most", "ranks", "dtype"),
    [((70, 32, 32), 200, 24, (3, 24), torch.float32), ((130,), 1100, 64, (64, 8), torch.float16)],
)
def test_what_adapters_add(
    monkeypatch: pytest.MonkeyPatch,
    outputs: tuple[int, ...],
    inputs: int,
    most: int,
    ranks: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    """The same as torch's operations, in any company; lines without an adapter, or with an empty slot, stay."""
    from trtrun.kernels.line_slots import LineSlots
    from trtrun.kernels.torch.low_rank import Factors, LowRankShape, TorchLowRank
    from trtrun.kernels.triton import low_rank as module

    torch.manual_seed(inputs)
    shape, device = LowRankShape(outputs, inputs, 3, most), torch.device("cpu")
    found, expected = module.TritonLowRank(shape, dtype, device), TorchLowRank(shape, dtype, device)
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
    with monkeypatch.context() as patched:  # one tile of features behind the other
        patched.setattr(module, "_MANY", 0)
        assert torch.equal(added(found, slice(None)), whole)
    result = y[:20].clone()  # a single row's slot, repeated: torch keeps one number for all
    found.add(result, x[:20], LineSlots(slots[1:2].expand(20)))
    of_lines = y[:20].clone()
    found.add(of_lines, x[:20], LineSlots(torch.ones(20, dtype=torch.int64)))
    assert torch.equal(result, of_lines)
    found.put(2, [None] * len(outputs))
    assert torch.equal(added(found, slice(None))[slots == 2], y[slots == 2])


@pytest.mark.parametrize(
    ("num_slots", "count"), [(1, 1), (16, 1), (3, 15), (1, 16), (3, 17), (16, 17), (16, 129), (3, 300)]
)
def test_tiles_have_the_lines_of_each_slot_in_their_order(num_slots: int, count: int) -> None:
    """Those of slots that lines have, and as many more as any lines could need."""
    from trtrun.kernels.line_slots import LineSlots
    from trtrun.kernels.triton.line_tiles import tiles_of

    torch.manual_seed(count)
    for slots in (
        torch.randint(0, num_slots + 1, (count,)),
        torch.full((count,), num_slots),
        torch.zeros(count).long(),
    ):
        lines = LineSlots(slots)
        tiles = tiles_of(lines, num_slots, 16)
        assert tiles_of(lines, num_slots, 16) is tiles, "they are found once"
        expected = []
        for slot in range(num_slots):
            theirs = (slots == slot + 1).nonzero()[:, 0].tolist()
            expected += [(slot, (theirs[at : at + 16] + [-1] * 16)[:16]) for at in range(0, len(theirs), 16)]
        expected += [(-1, [-1] * 16)] * (min(count, num_slots + count // 16) - len(expected))
        assert list(zip(tiles.slots.tolist(), tiles.lines.tolist(), strict=True)) == expected


@pytest.mark.parametrize("is_late", [False, True])
def test_what_runs_beside_the_product_needs_nothing_of_it(monkeypatch: pytest.MonkeyPatch, is_late: bool) -> None:
    """Before the product or behind it, the first kernel has the bits of one behind the other; the second waits."""
    from trtrun.kernels.line_slots import LineSlots
    from trtrun.kernels.torch.low_rank import Factors, LowRank, LowRankShape
    from trtrun.kernels.triton import low_rank as module

    done = []

    @contextmanager
    def beside(work: Callable[[], None], device: torch.device) -> Iterator[None]:
        if not is_late:
            work()
        yield
        done.append("product")
        if is_late:
            work()

    torch.manual_seed(0)
    weight, x = torch.randn(48, 64), torch.randn(64, 20).t()  # x has gaps in its lines
    low_rank = module.TritonLowRank(LowRankShape((16, 32), 64, 2, 8), torch.float32, torch.device("cpu"))
    low_rank.put(1, [Factors(torch.randn(8, 64), torch.randn(of, 8)) for of in (16, 32)])
    lines = LineSlots(torch.tensor([0, 1] * 10))
    product = partial(functional.linear, weight=weight)
    expected = low_rank.add_to(product, x, lines)
    assert not done, "a CPU has no streams"
    assert torch.equal(LowRank.add_to(low_rank, product, x.contiguous(), lines), expected)
    assert torch.equal(expected[::2], product(x)[::2]) and not torch.equal(expected, product(x))
    monkeypatch.setattr(module, "beside", beside)
    monkeypatch.setattr(module, "_branches", lambda x: True)
    assert torch.equal(low_rank.add_to(product, x, lines), expected)
    assert done == ["product"]
