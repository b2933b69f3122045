"""Experts on the CPU as one work: what each expert's own products make, to the bit, whoever else chose it."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from native import each_processor

from trtrun.kernels.cpu.experts import NativeExperts, _share_out
from trtrun.kernels.cpu.matmul import BlockedMatmul
from trtrun.kernels.cpu.operations import CpuOperations
from trtrun.kernels.torch.experts import Choice, HostExperts, choose_experts

pytestmark = [each_processor, pytest.mark.usefixtures("each_number_of_threads", "processor")]

SHAPES = [(7, 20, 60, 3), (5, 96, 1100, 2), (33, 32, 2100, 8)]
"""Experts, features, hidden, chosen: with blocks that are not full, and more inputs than tiles go through together."""


def made(count: int, features: int, inputs: int, dtype: torch.dtype, *, with_bias: bool) -> list[BlockedMatmul]:
    """A product for each expert."""
    weights = torch.randn(count, features, inputs).mul_(inputs**-0.5).to(dtype)
    biases = torch.randn(count, features).to(dtype)
    return [BlockedMatmul(weight, bias if with_bias else None) for weight, bias in zip(weights, biases, strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_experts_make_what_each_makes_alone(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    count, features, hidden, chosen = shape
    torch.manual_seed(count)
    operations = CpuOperations()
    gate_up = made(count, 2 * features, hidden, dtype, with_bias=count == 5)
    down = made(count, hidden, features, dtype, with_bias=count == 5)
    activate = partial(operations.activate_and_multiply, activation="silu")
    experts, apart = operations.host_experts(gate_up, down, activate), HostExperts(gate_up, down, activate)
    assert isinstance(experts, NativeExperts)
    for tokens in (1, 2, 9, 130):
        x = torch.randn(tokens, hidden).to(dtype)
        choice = choose_experts(torch.randn(tokens, count), chosen, renormalises=True)
        assert torch.equal(experts(x, choice), apart(x, choice)), tokens
        # Of experts that this rank does not hold nothing is made, nor where it holds none of those that are chosen.
        for first in (count // 2, count):
            numbers = torch.where(choice.experts < first, -1, choice.experts)
            found, held = experts.make(x, Choice(numbers, choice.shares)), numbers >= 0
            assert torch.equal(found[held], apart.make(x, choice)[held]), (tokens, first)
    none = choose_experts(torch.randn(0, count), chosen, renormalises=True)
    assert experts(torch.randn(0, hidden).to(dtype), none).shape == (0, hidden)


def test_blocks_are_shared_out_by_what_they_cost() -> None:
    costs = np.array([1.0, 1.0, 10.0, 0.5])
    starts = _share_out(costs, 8, 4)
    assert (starts[0], starts[-1]) == (0, 32) and all(np.diff(starts) >= 0)
    taken = [sum(costs[number // 8] for number in range(*bounds)) for bounds in pairwise(starts)]
    assert max(taken) - min(taken) <= 2 * max(costs)
    assert list(_share_out(costs, 8, 1)) == [0, 32]
