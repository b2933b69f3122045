"""Layers of gated delta nets, whose rows are fed tokens in forwards of any cut: for what checks that bits do not depend
on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trtrun.kernels.chooser import operations_of
from trtrun.kernels.torch.delta_net import DeltaNet, DeltaNetWeights, TorchDeltaNet
from trtrun.kernels.torch.operations import TorchOperations
from trtrun.kvcache.row_states import RowStates, StateSpace
from trtrun.kvcache.segments import AttentionBatch, AttentionSegment
from trtrun.kvcache.specs import RecurrentState, StateDtype

KERNEL, ROWS, BLOCK, REFED = 4, 3, 4096, 5
Shape = tuple[int, int, int, int]
"""Heads of keys and of values, and numbers of both."""


def make_weights(shape: Shape, dtype: torch.dtype, device: torch.device) -> DeltaNetWeights:
    torch.manual_seed(sum(shape))
    keys, values, key_dim, value_dim = shape
    channels = 2 * keys * key_dim + values * value_dim
    key_of_value = torch.arange(values, device=device) * keys // values
    convolution = torch.randn(KERNEL, channels, device=device) / 2
    fading, bias = torch.rand(values, device=device) / 4, torch.randn(values, device=device)
    norm = (1 + torch.randn(value_dim, device=device) / 8).to(dtype)
    return DeltaNetWeights(*shape, key_of_value, convolution, fading, bias, norm, 1e-6)


@dataclass
class Fed:
    """Tokens of a row in a forward: their numbers [tokens, ...] and where the first one stands; padding around."""

    row: int
    first: int
    made: torch.Tensor
    rates: torch.Tensor
    before: int = 0
    behind: int = 0


class Rows:
    """A layer's states of some rows, which `net` carries on."""

    def __init__(
        self,
        net: DeltaNet,
        weights: DeltaNetWeights,
        refed: int = REFED,
        dtype: StateDtype = "float32",
    ) -> None:
        self._net, device = net, weights.convolution.device
        self._device = device
        parts = (KERNEL - 1, weights.channels), (weights.values, weights.key_dim, weights.value_dim)
        spec = RecurrentState(parts, ((weights.channels,), (weights.values,), (weights.values,)), num_narrow=1)
        space = StateSpace(ROWS, refed, True, num_snapshots=3, dtype=dtype)
        self.states = RowStates({0: spec}, space, 1 + ROWS, device, operations_of(device.type).states)
        of_rows = torch.arange(ROWS, device=device)
        self.states.announce(of_rows, 1 + of_rows)
        self.states.begin([(row, 0, 0) for row in range(ROWS)])

    def feed(self, *rows: Fed) -> list[torch.Tensor]:
        """One forward, in which rows of as many places are a segment; returns what tokens read, row by row."""
        segments, made, rates, start = [], [], [], 0
        for one in rows:
            places = [-1] * one.before + list(range(one.first, one.first + len(one.made))) + [-1] * one.behind
            for part, found in ((one.made, made), (one.rates, rates)):
                found.append(torch.cat((part[:1].expand(one.before, -1), part, part[:1].expand(one.behind, -1))))
            positions = torch.tensor([places], device=self._device)
            tables = torch.tensor([[1 + one.row]], device=self._device)
            last = segments[-1] if segments else None
            if last is not None and last.queries == len(places):
                last.positions, last.block_tables = (
                    torch.cat((last.positions, positions)),
                    torch.cat((last.block_tables, tables)),
                )
                last.rows += 1
            else:
                segments.append(AttentionSegment(start, 1, len(places), tables, positions))
            start += len(places)
        found_states = self.states.of_batch(AttentionBatch(segments, BLOCK))
        read = self._net(torch.cat(made), torch.cat(rates), self.states.layers[0], found_states)
        outputs = list(read.split([one.before + len(one.made) + one.behind for one in rows]))
        for one, output in zip(rows, outputs, strict=True):
            assert output[: one.before].float().abs().sum() == 0
            assert output[len(output) - one.behind :].float().abs().sum() == 0
        return [output[one.before : one.before + len(one.made)] for one, output in zip(rows, outputs, strict=True)]


def make_tokens(weights: DeltaNetWeights, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    widths = weights.channels + weights.values * weights.value_dim, 2 * weights.values
    made, rates = (torch.randn(count, width, generator=generator).to(weights.norm) for width in widths)
    return made, rates


def alone(
    net: DeltaNet,
    weights: DeltaNetWeights,
    tokens: tuple[torch.Tensor, torch.Tensor],
    dtype: StateDtype = "float32",
) -> torch.Tensor:
    """What tokens read that come one by one."""
    rows, (made, rates) = Rows(net, weights, dtype=dtype), tokens
    return torch.cat([rows.feed(Fed(0, at, made[at : at + 1], rates[at : at + 1]))[0] for at in range(len(made))])


def plainly(
    weights: DeltaNetWeights, made: torch.Tensor, rates: torch.Tensor, dtype: StateDtype = "float32"
) -> torch.Tensor:
    """What tokens of one forward read in plain torch, on the CPU."""
    moved = DeltaNetWeights(*(part.cpu() if isinstance(part, torch.Tensor) else part for part in weights))
    rows = Rows(TorchDeltaNet(moved, TorchOperations()), moved, dtype=dtype)
    return rows.feed(Fed(0, 0, made.cpu(), rates.cpu()))[0].to(made.device)


def part_of(row: int, tokens: Sequence[torch.Tensor], first: int, count: int) -> Fed:
    """Some of a row's tokens, with padding that differs from row to row."""
    made, rates = (part[first : first + count] for part in tokens)
    return Fed(row, first, made, rates, before=row % 2, behind=row // 2)


def check_rejections(net: DeltaNet, weights: DeltaNetWeights) -> None:
    """Three rows of different lengths verify drafts, of which none, some or all turn out right, and go on by one token
    between."""
    texts, wrong = [make_tokens(weights, 17 + row, 10 + row) for row in range(ROWS)], make_tokens(weights, REFED, 77)
    expected = [alone(net, weights, tokens) for tokens in texts]
    rows, at = Rows(net, weights), [5, 2, 7]
    found = [[part] for part in rows.feed(*(part_of(row, texts[row], 0, at[row]) for row in range(ROWS)))]
    for lengths in ((0, 3, 4), (2, 1, 0), (4, 4, 2)):
        fed = []
        for row, right in enumerate(lengths):
            true = part_of(row, texts[row], at[row], min(1 + right, len(texts[row][0]) - at[row]))
            rest = REFED - len(true.made)
            true.made, true.rates = torch.cat((true.made, wrong[0][:rest])), torch.cat((true.rates, wrong[1][:rest]))
            fed.append(true)
        for row, output in enumerate(rows.feed(*fed)):
            kept = min(1 + lengths[row], len(texts[row][0]) - at[row])
            found[row].append(output[:kept])
            at[row] += kept
        ones = [(row, *(part[at[row] : at[row] + 1] for part in texts[row])) for row in range(ROWS)]
        for row, output in enumerate(rows.feed(*(Fed(row, at[row], made, rates) for row, made, rates in ones))):
            found[row].append(output)
            at[row] += len(output)
    for row in range(ROWS):
        assert torch.equal(torch.cat(found[row]), expected[row][: at[row]]), row


def check_snapshots(net: DeltaNet, weights: DeltaNetWeights, saved_at: int, dtype: StateDtype = "float32") -> None:
    """A row, and another one from a snapshot behind so many of its 4 to 11 tokens, go on as one that was alone."""
    made, rates = make_tokens(weights, 15, 3)
    expected, rows = alone(net, weights, (made, rates), dtype), Rows(net, weights, dtype=dtype)
    rows.feed(Fed(0, 0, made[:4], rates[:4]))
    rows.states.save([(0, saved_at, 2)])
    rows.feed(Fed(0, 4, made[4:11], rates[4:11]))
    rows.states.save([])
    rows.states.begin([(1, saved_at, 2)])
    one, other = rows.feed(
        Fed(1, saved_at, made[saved_at:14], rates[saved_at:14]), Fed(0, 11, made[11:14], rates[11:14])
    )
    assert torch.equal(one, expected[saved_at:14])
    assert torch.equal(other, expected[11:14])
