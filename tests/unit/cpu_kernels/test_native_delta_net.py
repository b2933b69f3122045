"""The recurrence of gated delta nets by a kernel on the CPU: what plain torch makes of the same forwards, and the same
bits whatever the cut of a prompt, the drafts that were rejected, the rows beside it and threads."""

from __future__ import annotations

import pytest
import torch
from delta_nets import Fed, Rows, Shape, alone, check_rejections, check_snapshots, make_tokens, make_weights, plainly
from native import each_processor

from trtrun.kernels.chooser import operations_of
from trtrun.kernels.cpu import machine
from trtrun.kernels.cpu.delta_net import net as delta_net
from trtrun.kernels.torch.delta_net import DeltaNet, DeltaNetWeights
from trtrun.kvcache.specs import StateDtype

pytestmark = [each_processor, pytest.mark.usefixtures("each_number_of_threads", "processor")]
SHAPE: Shape = (2, 4, 32, 128)
CASES: list[tuple[Shape, StateDtype, torch.dtype]] = [
    (SHAPE, "float32", torch.float32),
    (SHAPE, "bfloat16", torch.bfloat16),
    ((1, 3, 24, 32), "float16", torch.bfloat16),
    ((2, 2, 16, 16), "bfloat16", torch.float32),
    ((1, 2, 20, 47), "float32", torch.bfloat16),
]
"""Whole blocks of registers and fewer, and columns that are no multiple of a register; states, and activations."""


def net_of(shape: Shape, dtype: torch.dtype) -> tuple[DeltaNet, DeltaNetWeights]:
    weights = make_weights(shape, dtype, torch.device("cpu"))
    net = operations_of("cpu").delta_net(weights)
    assert isinstance(net, delta_net.NativeDeltaNet)
    return net, weights


@pytest.mark.parametrize(("shape", "state", "dtype"), CASES, ids=str)
def test_a_token_reads_the_same_bits_whatever_the_cut(shape: Shape, state: StateDtype, dtype: torch.dtype) -> None:
    net, weights = net_of(shape, dtype)
    tokens = made, rates = make_tokens(weights, 21, 1)
    whole = alone(net, weights, tokens, state)
    expected = plainly(weights, made, rates, state)
    difference = (whole - expected).float().norm() / expected.float().norm()
    assert difference < (1e-5 if dtype is torch.float32 and state == "float32" else 2e-2)
    for cuts in ((21,), (12, 1, 8), (2, 3, 16)):
        rows, found, at = Rows(net, weights, dtype=state), [], 0
        for size in cuts:
            part = slice(at, at + size)
            found += rows.feed(Fed(1, at, made[part], rates[part], before=size % 2), Fed(2, 0, made[:2], rates[:2]))[:1]
            at += size
        assert torch.equal(torch.cat(found), whole), cuts


def test_rejected_tokens_and_other_rows_leave_no_trace() -> None:
    check_rejections(*net_of(SHAPE, torch.bfloat16))


@pytest.mark.parametrize("saved_at", [4, 6, 11])
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_rows_go_on_from_snapshots(saved_at: int, state: StateDtype) -> None:
    """Taken in front of what was fed before, within it, and at the end of a chunk."""
    check_snapshots(*net_of(SHAPE, torch.bfloat16), saved_at, state)


def test_blocks_of_registers_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors with fewer registers go through fewer columns together."""
    net, weights = net_of(SHAPE, torch.float32)
    tokens = make_tokens(weights, 9, 5)
    expected = alone(net, weights, tokens)
    for registers in (1, 2):
        form = delta_net.Form(registers, True, "float32", machine.processor_kind() or "")
        monkeypatch.setattr(delta_net, "_form", lambda *_, form=form: form)
        assert torch.equal(alone(net, weights, tokens), expected)
