"""Experts by Triton's kernels, in its interpreter where there is no GPU: what plain torch makes, and a token's bits in
any company."""

from __future__ import annotations

import pytest
import torch
from norms import difference

from trtrun.kernels.routing import Routing
from trtrun.kernels.torch.experts import Choice, ExpertWeights, MaskedExperts, choose_experts
from trtrun.kernels.torch.mxfp4 import quantize_mxfp4
from trtrun.kernels.torch.operations import TorchOperations
from trtrun.linear.stored.byte_layouts import power_of_two
from trtrun.linear.stored.forms import Fp4Weight

pytest.importorskip("triton", reason="needs triton: pip install triton")
HAS_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if HAS_GPU else ("cpu", torch.float16)
BOUND = 1e-2 if HAS_GPU else 2e-3
pytestmark = [] if HAS_GPU else [pytest.mark.usefixtures("sums_without_order")]
SHAPES = [(7, 72, 40, 3), (4, 64, 96, 2), (9, 256, 64, 8)]
"""Experts, hidden, features, and how many a token chooses."""
if HAS_GPU:
    SHAPES += [(128, 2048, 768, 8), (8, 1024, 3584, 2)]


def made(shape: tuple[int, int, int, int], tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Choice]:
    """Weights of all experts, x, and what its tokens choose; the last expert is chosen by none."""
    torch.manual_seed(sum(shape))
    count, hidden, features, chosen = shape
    gate_up = torch.randn(count, 2 * features, hidden, device=DEVICE).mul_(hidden**-0.5).to(DTYPE)
    down = torch.randn(count, hidden, features, device=DEVICE).mul_(features**-0.5).to(DTYPE)
    x = torch.randn(tokens, hidden, device=DEVICE).to(DTYPE)
    logits = torch.randn(tokens, count, device=DEVICE)
    if count > chosen:
        logits[:, -1] = -100.0
    return gate_up, down, x, choose_experts(logits, chosen, renormalises=True)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_experts_make_what_plain_torch_does_in_any_company(shape: tuple[int, int, int, int], activation: str) -> None:
    """Those with a limit have biases, too."""
    from trtrun.kernels.triton.experts import TritonExperts

    tokens = 700 if HAS_GPU else 23
    gate_up, down, x, choice = made(shape, tokens)
    weights, limit = ExpertWeights(gate_up, down), 0.8
    if activation == "clamped_swiglu":
        biases = (torch.randn(shape[0], size, device=DEVICE).to(DTYPE) for size in (2 * shape[2], shape[1]))
        weights = ExpertWeights(gate_up, down, *biases)
    wide = MaskedExperts(
        ExpertWeights(*(None if tensor is None else tensor.double() for tensor in weights)),  # type: ignore[arg-type]
        lambda fused: TorchOperations().activate_and_multiply(fused, activation, limit),  # type: ignore[arg-type]
    )
    experts = TritonExperts(weights, activation, limit)  # type: ignore[arg-type]
    whole = experts(x, choice)
    assert difference(whole, wide(x.double(), choice)) < BOUND
    for first, last in ((0, 1), (5, 6), (tokens - 1, tokens), (2, 9), (0, tokens // 2)):
        part = Choice(choice.experts[first:last], choice.shares[first:last])
        assert torch.equal(experts(x[first:last], part), whole[first:last]), (first, last)
    assert experts(x[:0], Choice(choice.experts[:0], choice.shares[:0])).shape == (0, shape[1])


def test_experts_of_a_rank_make_what_all_together_do() -> None:
    """A rank holds the last three of five, for so many pairs that they are sorted, and so few that they are not."""
    from trtrun.kernels.triton.experts import TritonExperts

    gate_up, down, x, choice = made((5, 96, 40, 3), 30)
    whole = TritonExperts(ExpertWeights(gate_up, down), "silu", 1.0)
    part = TritonExperts(ExpertWeights(gate_up[2:].contiguous(), down[2:].contiguous()), "silu", 1.0)
    for tokens in (30, 4):
        experts = choice.experts[:tokens]
        own = Choice(torch.where(experts < 2, -1, experts - 2), choice.shares[:tokens])
        found = part.make(x[:tokens], own)[experts >= 2]
        assert torch.equal(found, whole.make(x[:tokens], Choice(experts, own.shares))[experts >= 2])


CODED_SHAPES = [(5, 96, 64, 2), (3, 160, 32, 3), *([(32, 2880, 2880, 4), (128, 2048, 768, 8)] if HAS_GPU else [])]


@pytest.mark.parametrize("shape", CODED_SHAPES, ids=str)
def test_experts_of_4_bits_are_those_of_the_numbers_that_these_stand_for(shape: tuple[int, int, int, int]) -> None:
    """To the bit, as each is a number of the dtype, in tiles of all sizes; the smallest and largest numbers, too."""
    from trtrun.kernels.triton.experts import TritonExperts

    gate_up, down, x, choice = made(shape, 700 if HAS_GPU else 40)
    gate_up[:, 0, :16] = torch.arange(-8, 8, device=DEVICE) / 2  # all codes; in others the last power is the largest
    coded = [[quantize_mxfp4(matrix) for matrix in weight] for weight in (gate_up, down)]
    plain = [
        torch.stack([Fp4Weight(one["codes"], power_of_two(one["scales"]), 32).dequantize() for one in of_weight])
        for of_weight in coded
    ]
    for weight, widened in zip((gate_up, down), plain, strict=True):
        assert (weight - widened).abs().max() < 0.3 * weight.abs().max()
    codes, scales = ([torch.stack([one[name] for one in part]) for part in coded] for name in ("codes", "scales"))
    biases = [torch.randn(shape[0], size, device=DEVICE).to(DTYPE) for size in (2 * shape[2], shape[1])]
    packed = TritonExperts(ExpertWeights(*codes, *biases, *scales), "clamped_swiglu", 7.0)  # type: ignore[arg-type]
    dense = TritonExperts(ExpertWeights(*(it.to(DTYPE) for it in plain), *biases), "clamped_swiglu", 7.0)  # type: ignore[arg-type]
    # Ranks may hold one of both dense.
    gates = TritonExperts(ExpertWeights(codes[0], plain[1].to(DTYPE), *biases, scales[0]), "clamped_swiglu", 7.0)
    for count in (1, 3, 40, len(x)):
        part = Choice(choice.experts[:count], choice.shares[:count])
        expected = dense(x[:count], part)
        assert torch.equal(packed(x[:count], part), expected), count
        assert torch.equal(gates(x[:count], part), expected), count


@pytest.mark.parametrize("renormalises", [True, False])
@pytest.mark.parametrize("count", [2, 7, 60, 128])
def test_the_choice_is_that_of_plain_torch_with_ties_by_number(count: int, renormalises: bool) -> None:
    from trtrun.kernels.triton import experts

    torch.manual_seed(count)
    logits = torch.randn(11, count, device=DEVICE).to(DTYPE)
    logits[3] = 0.5
    logits[4, : count // 2] = logits[4].max()
    logits[5, 0], logits[5, 1:] = 300.0, torch.arange(1, count, device=DEVICE)  # whose shares are 0 in float32
    for chosen in {1, 2, min(8, count)}:
        found = experts.choose_experts(logits, chosen, renormalises=renormalises)
        expected = choose_experts(logits, chosen, renormalises=renormalises)
        assert torch.equal(found.experts, expected.experts)
        assert (found.shares - expected.shares).abs().max() < 1e-6
    assert found.experts[3].tolist() == list(range(chosen))
    assert found.experts[5].tolist() == [0, *range(count - 1, 0, -1)][:chosen]


@pytest.mark.parametrize(
    "routing",
    [
        Routing("sigmoid", has_bias=True, factor=2.5),
        Routing("sigmoid", has_bias=True, groups=4, chosen_groups=2, summed=2),
        Routing("softmax", groups=8, chosen_groups=3, factor=16.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [24, 64])
def test_the_choice_of_other_routers_is_that_of_plain_torch(count: int, routing: Routing) -> None:
    """With groups that tie, too."""
    from trtrun.kernels.triton import experts

    torch.manual_seed(count)
    logits, bias = torch.randn(11, count, device=DEVICE), None
    logits[3] = 0.5
    if routing.has_bias:
        bias = torch.randn(count, device=DEVICE)
    for renormalises in (True, False):
        found, expected = (
            choose(logits, 5, renormalises=renormalises, routing=routing, bias=bias)
            for choose in (experts.choose_experts, choose_experts)
        )
        assert torch.equal(found.experts, expected.experts)
        assert (found.shares / expected.shares - 1).abs().max() < 1e-5
    groups = expected.experts // (count // routing.groups)
    assert max(len(set(row)) for row in groups.tolist()) <= (5 if routing.groups == 1 else routing.chosen_groups)


@pytest.mark.parametrize(
    ("tokens", "chosen", "count"), [(1, 2, 9), (40, 3, 9), (200, 1, 9), (90, 8, 128), (1400, 4, 31)]
)
def test_tiles_hold_each_pair_once_and_one_expert_each(tokens: int, chosen: int, count: int) -> None:
    from trtrun.kernels.triton.expert_tiles import lay_out

    torch.manual_seed(tokens)
    experts = torch.rand(tokens, count - 1).argsort(dim=1)[:, :chosen].contiguous().to(DEVICE)
    pairs, of_tile = lay_out(experts, count, 16)
    tiles, flat = pairs.view(-1, 16).tolist(), experts.flatten().tolist()
    found: dict[int, list[int]] = {}
    for tile, expert in zip(tiles, of_tile.tolist(), strict=True):
        if expert >= 0:
            found.setdefault(expert, []).extend(pair for pair in tile if pair >= 0)
            assert tile[0] >= 0, "no tile is read for nothing"
    assert found == {expert: [pair for pair, of in enumerate(flat) if of == expert] for expert in set(flat)}
