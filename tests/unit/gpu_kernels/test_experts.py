"""Experts by Triton's kernels, in its interpreter where there is no GPU: what plain torch makes, and a token's bits in
any company."""

from __future__ import annotations

import pytest
import torch
from gpus import needs_hopper
from norms import difference

from trtrun.kernels.routing import Routing
from trtrun.kernels.torch import fp4, fp8, integers
from trtrun.kernels.torch.experts import Choice, ExpertCodes, Experts, ExpertWeights, choose_experts
from trtrun.kernels.torch.operations import TorchOperations

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
    biases, limit = [None, None], 0.8
    if activation == "clamped_swiglu":
        biases = [torch.randn(shape[0], size, device=DEVICE).to(DTYPE) for size in (2 * shape[2], shape[1])]
    doubles = (None if tensor is None else tensor.double() for tensor in (gate_up, down, *biases))
    wide = TorchOperations().experts(ExpertWeights(*doubles), activation, limit)  # type: ignore[arg-type]
    experts = TritonExperts((gate_up, down), tuple(biases), activation, limit)  # type: ignore[arg-type]
    whole = experts(x, choice)
    assert difference(whole, wide(x.double(), choice)) < BOUND
    for first, last in ((0, 1), (5, 6), (tokens - 1, tokens), (2, 9), (0, tokens // 2)):
        part = Choice(choice.experts[first:last], choice.shares[first:last])
        assert torch.equal(experts(x[first:last], part), whole[first:last]), (first, last)
    assert experts(x[:0], Choice(choice.experts[:0], choice.shares[:0])).shape == (0, shape[1])


def codes_of(form: str, weight: torch.Tensor) -> ExpertCodes:
    """All experts' codes of weight [experts, out, in]."""

    def one(matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        if form.startswith("fp8"):
            return fp8.quantize_blocks(matrix) if form == "fp8 in blocks" else fp8.quantize(matrix)
        if form == "int8":
            return integers.quantize_int8(matrix)
        if form == "mxfp4":
            made = fp4.quantize_mxfp4(matrix)
            return fp4.pack(made["codes"], made["scales"], 1.0, 32)
        if form == "nvfp4":
            made = fp4.quantize_nvfp4(matrix)
            return fp4.pack(made["codes"], made["scales"], made["whole"], 16)
        return integers.quantize_int4(matrix, int(form.removeprefix("int4 by ")), integers.GROUP)

    held = [one(matrix) for matrix in weight]
    tensors = {name: torch.stack([it[name] for it in held]) for name in held[0]}
    return ExpertCodes(tensors, *weight.shape[1:], rounds_activations=form == "fp8")


@pytest.mark.parametrize("form", [None, "fp8", "fp8 in blocks"])
@pytest.mark.parametrize("tokens", [160, 161, 193])
def test_tiles_of_a_prompt_that_are_not_full(tokens: int, form: str | None) -> None:
    """Two experts have so many pairs each: the last tile of each has 32, 33 or 65 of 128."""
    from trtrun.kernels.triton.coded_experts.coded_experts import CodedExperts
    from trtrun.kernels.triton.experts import TritonExperts, tile_rows

    assert tile_rows(2 * tokens, 3) == 128
    gate_up, down, x, choice = made((3, 128, 64, 2), tokens)
    assert choice.experts.unique().tolist() == [0, 1]
    weights = ExpertWeights(*(weight if form is None else codes_of(form, weight) for weight in (gate_up, down)))
    if form is None:
        experts: Experts = TritonExperts((gate_up, down), (None, None), "silu", 0.0)
    else:
        experts = CodedExperts(weights, "silu", 0.0)
    whole, expected = experts(x, choice), TorchOperations().experts(weights, "silu", 0.0)(x, choice)
    assert difference(whole, expected.double()) < 2 * BOUND
    part = Choice(choice.experts[-9:], choice.shares[-9:])
    assert not HAS_GPU or torch.equal(experts(x[-9:], part), whole[-9:]), "in tiles of 16"


@pytest.mark.parametrize("form", [None, "fp8", "fp8 in blocks", "mxfp4"])
def test_experts_of_a_rank_make_what_all_together_do(form: str | None) -> None:
    """A rank holds the last three of five, for so many pairs that they are sorted, and so few that they are not."""
    from trtrun.kernels.triton.coded_experts.coded_experts import CodedExperts
    from trtrun.kernels.triton.experts import TritonExperts

    gate_up, down, x, choice = made((5, 96, 64, 3), 30)

    def experts_from(first: int) -> Experts:
        weights = gate_up[first:].contiguous(), down[first:].contiguous()
        if form is None:
            return TritonExperts(weights, (None, None), "silu", 1.0)
        return CodedExperts(ExpertWeights(*(codes_of(form, weight) for weight in weights)), "silu", 1.0)

    whole, part = experts_from(0), experts_from(2)
    part.num_holders = 2
    for tokens in (30, 4):
        experts = choice.experts[:tokens]
        own = Choice(torch.where(experts < 2, -1, experts - 2), choice.shares[:tokens])
        found = part.make(x[:tokens], own)[experts >= 2]
        assert torch.equal(found, whole.make(x[:tokens], Choice(experts, own.shares))[experts >= 2])


FORMS = ["fp8", "fp8 as they are", "fp8 in blocks", "int8", "int4 by 128", "int4 by 32", "mxfp4", "nvfp4"]
CODED = [(form, (3, 256 if form[:4] == "int4" else 128, 64, 2)) for form in FORMS] + [
    ("mxfp4", (3, 160, 32, 2)),
    ("fp8 in blocks", (3, 136, 72, 2)),
]
if HAS_GPU:
    CODED += [(form, shape) for form in FORMS for shape in ((32, 2944, 2944, 4), (128, 2048, 768, 8))]


@pytest.mark.parametrize(("form", "shape"), CODED, ids=str)
def test_experts_in_codes_make_what_plain_torch_does_in_any_company(
    form: str, shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With biases, in tiles of all sizes, and where ranks hold one matrix of both dense."""
    from trtrun.kernels.triton import expert_tiles
    from trtrun.kernels.triton.coded_experts import coded_experts, four_bits

    if not HAS_GPU:
        monkeypatch.setattr(expert_tiles, "FEW_PAIRS", 4)
        monkeypatch.setattr(four_bits, "FEW_PAIRS", 4)
    tokens = 700 if HAS_GPU else 9
    gate_up, down, x, choice = made(shape, tokens)
    gate_up[:, 0, :16] = torch.arange(-8, 8, device=DEVICE) / 2  # all codes of 4 bits
    biases = [torch.randn(shape[0], size, device=DEVICE).to(DTYPE) for size in (2 * shape[2], shape[1])]
    coded = [codes_of(form, weight) if weight.shape[2] % 128 == 0 or form[:4] != "int4" else weight
             for weight in (gate_up, down)]  # fmt: skip
    mixed = [ExpertWeights(coded[0], down, *biases)] if form in ("fp8", "mxfp4") else []
    for weights in (ExpertWeights(*coded, *biases), *mixed):
        activation = "clamped_swiglu" if form == "mxfp4" else "silu"
        experts = coded_experts.CodedExperts(weights, activation, 7.0)  # type: ignore[arg-type]
        whole = experts(x, choice)
        expected = TorchOperations().experts(weights, activation, 7.0)(x, choice)  # type: ignore[arg-type]
        assert difference(whole, expected.double()) < 2 * BOUND
        for first, last in ((5, 6), (2, 9), *(((0, 1), (0, 8), (0, 40), (0, tokens // 2)) if HAS_GPU else ())):
            part = Choice(choice.experts[first:last], choice.shares[first:last])
            assert torch.equal(experts(x[first:last], part), whole[first:last]), (first, last)


def test_the_kernel_in_gluon_is_asked_for_where_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bits are compared before a graph is captured, once for each kind; E2M1 is for bfloat16."""
    from trtrun.kernels.triton.coded_experts import suitability
    from trtrun.kernels.triton.coded_experts.four_bits import Gate, tile_rows

    compared, capturing, is_equal = [], [True], [True]
    monkeypatch.setattr(suitability, "_chosen", {})
    monkeypatch.setattr(suitability, "is_hopper", lambda device: True)
    monkeypatch.setattr(suitability, "_compare", lambda *kind: compared.append(kind[2:5] + kind[6:]) or is_equal[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    weights = torch.ones(1, 64, 256, device=DEVICE).bfloat16()
    whole, numbers = codes_of("int4 by 64", weights), codes_of("mxfp4", weights)
    assert not suitability.streams(numbers, torch.bfloat16, 8, False) and not compared
    capturing[0] = False
    assert suitability.streams(numbers, torch.bfloat16, 8, False) and suitability.streams(
        whole, torch.float16, 8, False
    )
    assert not suitability.streams(numbers, torch.float16, 8, False)
    assert not suitability.streams(whole, torch.bfloat16, 128, False), "of groups of 64, whose sums are two"
    gate, odd = Gate("silu", 0.0), codes_of("mxfp4", weights[:, :40])
    assert suitability.streams(numbers, torch.bfloat16, 8, False, gate)
    assert not suitability.streams(odd, torch.bfloat16, 8, False, gate)
    assert compared == [(8, 32, True, None), (8, 64, False, None), (8, 32, True, gate)]
    is_equal[0], capturing[0] = False, True
    assert suitability.streams(numbers, torch.bfloat16, 8, False)
    capturing[0] = False
    assert not suitability.streams(numbers, torch.bfloat16, 128, False)
    assert [tile_rows(pairs, 128) for pairs in (4, 384, 385, 2000, 8000, 20000)] == [8, 8, 16, 32, 64, 128]


@needs_hopper
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("form", ["int4 by 128", "int4 by 64", "int4 by 32", "mxfp4", "nvfp4"])
def test_the_kernel_in_gluon_has_the_bits_of_the_general_one(form: str, has_bias: bool) -> None:
    """In tiles of all heights, full ones and others, and through many programs at once; it is the one that is taken."""
    from trtrun.kernels.triton.coded_experts.four_bits import FEWEST_ROWS, Gate, general_product
    from trtrun.kernels.triton.coded_experts.four_bits_stream import streamed_product
    from trtrun.kernels.triton.coded_experts.suitability import streams
    from trtrun.kernels.triton.expert_tiles import lay_out
    from trtrun.kernels.triton.fused import activate_and_multiply

    torch.manual_seed(1)
    inputs = 2944 if form.startswith("int4") else 2880
    weight = codes_of(form, torch.randn(9, 1000, inputs, device="cuda").to(DTYPE))
    gates = codes_of(form, torch.randn(9, 992, inputs, device="cuda").mul_(inputs**-0.5).to(DTYPE))
    bias = torch.randn(9, 1000, device="cuda").to(DTYPE) if has_bias else None
    of_gates = None if bias is None else bias[:, :992].contiguous()
    x, experts = torch.randn(150, inputs, device="cuda").to(DTYPE), torch.randint(0, 9, (150, 2), device="cuda")
    experts[:, 0], experts[:100, 1] = 0, 5
    general = general_product(x, weight, bias, lay_out(experts, 9, FEWEST_ROWS), 300, 2)
    for rows in (8, 16, 32, 64, *(() if form in ("int4 by 64", "int4 by 32") else (128,))):
        assert streams(weight, DTYPE, rows, has_bias), rows
        for _ in range(3):
            assert torch.equal(streamed_product(x, weight, bias, lay_out(experts, 9, rows), 300, 2), general), rows
        for gate in (Gate("clamped_swiglu", 0.9), Gate("silu", 0.0)):
            assert streams(gates, DTYPE, rows, has_bias, gate), (rows, gate)
            product = general_product(x, gates, of_gates, lay_out(experts, 9, FEWEST_ROWS), 300, 2)
            found = streamed_product(x, gates, of_gates, lay_out(experts, 9, rows), 300, 2, gate)
            assert torch.equal(found, activate_and_multiply(product, *gate)), (rows, gate)


@pytest.mark.parametrize("renormalises", [True, False])
@pytest.mark.parametrize("count", [2, 7, 60, 128])
def test_the_choice_is_that_of_plain_torch_with_ties_by_number(count: int, renormalises: bool) -> None:
    from trtrun.kernels.triton import expert_choice

    torch.manual_seed(count)
    logits = torch.randn(11, count, device=DEVICE).to(DTYPE)
    logits[3] = 0.5
    logits[4, : count // 2] = logits[4].max()
    logits[5, 0], logits[5, 1:] = 300.0, torch.arange(1, count, device=DEVICE)  # whose shares are 0 in float32
    for chosen in {1, 2, min(8, count)}:
        found = expert_choice.choose_experts(logits, chosen, renormalises=renormalises)
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
        Routing("sigmoid", has_bias=True, factor=2.5, num_shared=2),
        Routing("softmax", num_shared=1, is_gated=True),
    ],
    ids=str,
)
@pytest.mark.parametrize(("count", "dtype"), [(24, torch.float32), (64, torch.float32), (24, DTYPE)])
def test_the_choice_of_other_routers_is_that_of_plain_torch(count: int, dtype: torch.dtype, routing: Routing) -> None:
    """With groups that tie, too."""
    from trtrun.kernels.triton import expert_choice

    torch.manual_seed(count)
    logits, bias = torch.randn(11, count + routing.is_gated, device=DEVICE).to(dtype), None
    logits[3] = 0.5
    if routing.has_bias:
        bias = torch.randn(count, device=DEVICE)
    for renormalises in (True, False):
        found, expected = (
            choose(logits, 5, renormalises=renormalises, routing=routing, bias=bias)
            for choose in (expert_choice.choose_experts, choose_experts)
        )
        assert torch.equal(found.experts, expected.experts)
        assert (found.shares / expected.shares - 1).abs().max() < 1e-5
    assert expected.experts[:, 5:].tolist() == [list(range(count, count + routing.num_shared))] * 11
    groups = expected.experts[:, :5] // (count // routing.groups)
    assert max(len(set(row)) for row in groups.tolist()) <= (5 if routing.groups == 1 else routing.chosen_groups)


@pytest.mark.parametrize("routing", [Routing("softmax"), Routing("softmax", num_shared=1, is_gated=True)], ids=str)
def test_padding_chooses_no_expert(routing: Routing) -> None:
    """Not that of all tokens, either; others choose as they do beside it."""
    from trtrun.kernels.triton import expert_choice
    from trtrun.kernels.triton.experts import TritonExperts

    torch.manual_seed(4)
    logits = torch.randn(9, 6 + routing.is_gated, device=DEVICE).to(DTYPE)
    positions = torch.tensor([4, -1, 0, 7, -1, -1, 1, 2, -1], device=DEVICE)
    kinds = {"renormalises": True, "routing": routing}
    whole, found, expected = (
        choose(logits, 3, positions=places, **kinds)  # type: ignore[operator]
        for choose, places in (
            (expert_choice.choose_experts, None), (expert_choice.choose_experts, positions), (choose_experts, positions)
        )
    )  # fmt: skip
    real = positions >= 0
    assert torch.equal(found.experts, expected.experts) and (found.experts[~real] == -1).all()
    assert torch.equal(found.experts[real], whole.experts[real]) and torch.equal(found.shares[real], whole.shares[real])
    assert not found.shares[~real].any() and not expected.shares[~real].any()
    gate_up, down, x, _ = made((7, 48, 32, 3), 9)
    experts = TritonExperts((gate_up, down), (None, None), "silu", 1.0)
    assert torch.equal(experts(x, found)[real], experts(x, whole)[real]) and not experts(x, found)[~real].any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("dtype", [DTYPE, torch.float32], ids=str)
@pytest.mark.parametrize(("count", "chosen"), [(128, 8), (40, 6), (256, 8)])
def test_the_choice_among_odd_numbers_and_its_shares(count: int, chosen: int, dtype: torch.dtype) -> None:
    """What is no number is chosen first, nothing twice, and no expert that there is not. Shares that sum to 1 are those
    of the others, divided by their sum in the order of places, and the same in any company."""
    from trtrun.kernels.triton.expert_choice import choose_experts

    logits = torch.randn(9, count, generator=torch.Generator().manual_seed(count)).to(DEVICE, dtype)
    logits[0, [7, 3]], logits[0, 5] = float("nan"), float("inf")
    logits[1] = -float("inf")
    logits[1, [9, 2]] = 1.0
    logits[2] = float("nan")
    logits[3], logits[3, ::2] = -0.0, 0.0
    logits[4, [1, 2]] = torch.tensor([float("inf"), -float("nan")]).to(DEVICE, dtype)
    found = choose_experts(logits, chosen, renormalises=False).experts.tolist()
    assert found[0][:3] == [3, 7, 5] and found[4][:2] == [2, 1]
    assert found[1] == [2, 9, *(it for it in range(count) if it not in (2, 9))][:chosen]
    assert found[2] == found[3] == list(range(chosen))
    assert all(len(set(row)) == chosen and max(row) < count for row in found)

    usual = logits[5:]
    whole, plain = (choose_experts(usual, chosen, renormalises=it) for it in (True, False))
    total = torch.zeros(len(usual), device=DEVICE)
    for place in range(chosen):
        total = total + plain.shares[:, place]
    assert torch.equal(whole.experts, plain.experts)
    assert (whole.shares * total.unsqueeze(1) / plain.shares - 1).abs().max() < 1e-6
    if not HAS_GPU:  # whose division by a number is not quite torch's
        assert torch.equal(whole.shares, plain.shares / total.unsqueeze(1))
    alone = choose_experts(usual[-1:].clone(), chosen, renormalises=True)
    assert torch.equal(alone.shares, whole.shares[-1:]) and torch.equal(alone.experts, whole.experts[-1:])


@pytest.mark.parametrize(
    ("tokens", "chosen", "count"), [(1, 2, 9), (40, 3, 9), (200, 1, 9), (90, 8, 128), (1400, 4, 31), (70_000, 1, 9)]
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
