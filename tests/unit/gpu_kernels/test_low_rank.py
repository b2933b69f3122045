"""Adapters on a GPU: lines have the same bits in any company, inside of graphs too, and texts are those of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import make_adapter
from checkpoints import make_checkpoint
from gpus import needs_fp8, needs_gpu
from pipelines import make_llm, noisy_copy, prompt_of, run_alone, tokens_of

from trtrun import SamplingParams
from trtrun.kernels.arguments import LineSlots
from trtrun.kernels.torch.low_rank import Factors, LowRankShape

pytestmark = needs_gpu
COUNT = 700
"""Lines with which programs of the second kernel have several tiles of a wide layer, one after the other."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("outputs", "inputs", "rank"),
    [((4096, 1024, 1024), 4096, 16), ((14336, 14336), 4096, 64), ((4096,), 14336, 256), ((70, 33), 100, 5)],
)
def test_a_line_has_the_same_bits_in_any_company(
    outputs: tuple[int, ...], inputs: int, rank: int, dtype: torch.dtype
) -> None:
    from trtrun.kernels.triton.matmul.low_rank import TritonLowRank

    torch.manual_seed(rank)
    device = torch.device("cuda")
    low_rank = TritonLowRank(LowRankShape(outputs, inputs, 4, rank), dtype, device)
    factors = {}
    for slot in (1, 2, 4):
        factors[slot] = [
            Factors(
                (torch.randn(rank, inputs, device=device) / inputs**0.5).to(dtype),
                torch.randn(of, rank, device=device).to(dtype),
            )
            for of in outputs
        ]
        low_rank.put(slot, factors[slot])
    x = torch.randn(COUNT, inputs, device=device).to(dtype)
    y = torch.randn(COUNT, sum(outputs), device=device).to(dtype)
    slots = torch.randint(0, 5, (COUNT,), device=device)

    def added(lines: slice) -> torch.Tensor:
        result = y[lines].clone()
        low_rank.add(result, x[lines], LineSlots(slots[lines]))
        return result

    whole = added(slice(None))
    exact = y.double()
    for slot, of_slot in factors.items():
        parts = [x.double() @ one.down.double().T @ one.up.double().T for one in of_slot]
        exact = torch.where((slots == slot).unsqueeze(1), y.double() + torch.cat(parts, dim=1), exact)
    bound = {torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.float32: 2e-6}[dtype]
    assert ((whole - exact).norm() / exact.norm()).item() < bound
    for lines in (1, 2, 5, 16, 17, 33, 64, 300):
        assert torch.equal(added(slice(lines)), whole[:lines])
        assert torch.equal(added(slice(COUNT - lines, COUNT)), whole[-lines:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 32, 160, 300])
def test_beside_the_products_the_bits_are_those_of_one_behind_the_other(
    monkeypatch: pytest.MonkeyPatch, rows: int, dtype: torch.dtype
) -> None:
    """Three layers, as a model has them: short and long products, memory that is used again, a stream of states that is
    added to. With and without a graph, whose replays meet other numbers and other slots each time."""
    from trtrun.kernels.torch.cuda import capturing
    from trtrun.kernels.torch.low_rank import LowRank
    from trtrun.kernels.triton.fused import activate_and_multiply, add_and_normalise
    from trtrun.kernels.triton.matmul import low_rank as module
    from trtrun.kernels.triton.matmul.dense import TritonMatmul

    branches, beside_others = [], module.beside

    def counted(work: Callable[[], None], device: torch.device) -> AbstractContextManager[None]:
        branches.append(device)
        return beside_others(work, device)

    monkeypatch.setattr(module, "beside", counted)
    torch.manual_seed(rows)
    device, hidden, inner, num_slots, rank = torch.device("cuda"), 1024, 4096, 16, 16

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device=device) / shape[-1] ** 0.5).to(dtype)

    layers = []
    for outputs, width in (((hidden,), hidden), ((inner, inner), hidden), ((hidden,), inner)):
        low_rank = module.TritonLowRank(LowRankShape(outputs, width, num_slots, rank), dtype, device)
        for slot in range(1, num_slots):  # the last is empty
            low_rank.put(slot, [Factors(random(rank, width), random(of, rank)) for of in outputs])
        layers.append((low_rank, TritonMatmul(random(sum(outputs), width), None)))
    norm = torch.ones(hidden, dtype=dtype, device=device)
    inputs = torch.randn(50, rows, hidden, device=device).to(dtype)
    slots = torch.randint(0, num_slots + 1, (50, rows), device=device)

    def forward(states: torch.Tensor, of_lines: torch.Tensor, *, beside: bool) -> torch.Tensor:
        lines = LineSlots(of_lines)

        def layer(number: int, x: torch.Tensor) -> torch.Tensor:
            low_rank, product = layers[number]
            return low_rank.add_to(product, x, lines) if beside else LowRank.add_to(low_rank, product, x, lines)

        for _ in range(4):
            normed = add_and_normalise(states, None, norm, 1e-5)
            delta = layer(0, normed)
            normed = add_and_normalise(states, delta, norm, 1e-5)
            states.add_(layer(2, activate_and_multiply(layer(1, normed))))
        return states

    expected = [forward(inputs[turn].clone(), slots[turn], beside=False) for turn in range(len(inputs))]
    assert not any(torch.equal(expected[turn], expected[0]) for turn in range(1, len(inputs)))
    for turn in range(len(inputs)):
        assert torch.equal(forward(inputs[turn].clone(), slots[turn], beside=True), expected[turn]), turn

    states, of_lines = inputs[0].clone(), slots[0].clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    branches.clear()
    with capturing(graph):
        result = forward(states, of_lines, beside=True)
    assert len(branches) == 4 * len(layers)
    for turn in range(len(inputs)):
        states.copy_(inputs[turn])
        of_lines.copy_(slots[turn])
        graph.replay()
        assert torch.equal(result, expected[turn]), turn
    results = []  # and without anybody who waits between two of them
    for turn in range(len(inputs)):
        states.copy_(inputs[turn])
        of_lines.copy_(slots[turn])
        graph.replay()
        results.append(result.clone())
    assert all(torch.equal(found, one) for found, one in zip(results, expected, strict=True))


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [("bfloat16", "none"), ("float16", "none"), pytest.param("bfloat16", "fp8", marks=needs_fp8)],
)
def test_texts_with_adapters_are_plain_ones_through_graphs(tmp_path: Path, dtype: str, quantization: str) -> None:
    """Alone, together, and drafted for."""
    target = make_checkpoint(tmp_path / "target", head_dim=64, dtype=getattr(torch, dtype))
    draft = noisy_copy(tmp_path / "draft", target, 0.05)
    adapters = {
        name: str(make_adapter(tmp_path / name, target, rank=rank, seed=rank)) for name, rank in (("a", 4), ("b", 16))
    }
    settings: dict[str, Any] = {
        "devices": (("cuda:0",), ("cuda:0",)), "adapters": adapters, "adapter_slots": {"max_rank": 16},
        "target_quantization": quantization,
    }  # fmt: skip
    names = (None, "a", "b") * 4
    prompts = [prompt_of(3 + 17 * place, seed=place) for place in range(len(names))]
    sampling = [
        SamplingParams(max_tokens=32, seed=place, temperature=0.8 * (place % 2), lora_name=name)
        for place, name in enumerate(names)
    ]
    with make_llm(target, **settings) as llm:
        expected = run_alone(llm, prompts, sampling)
        assert tokens_of(llm.generate(prompts, sampling)) == expected
    for speculation in ({"draft_len": 3}, {"draft_len": 4, "method": "token_recycling"}):
        drafts = None if "method" in speculation else draft
        with make_llm(target, drafts, speculation=speculation, **settings) as llm:
            assert tokens_of(llm.generate(prompts, sampling)) == expected
            assert llm.statistics()["num_captures"] == 0


def test_texts_are_those_of_the_cpu(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target")
    adapters = {"a": str(make_adapter(tmp_path / "a", target))}
    prompts, found = [prompt_of(20, seed=place) for place in range(4)], []
    for device in ("cpu:0", "cuda:0"):
        with make_llm(target, devices=((device,), (device,)), dtype="float32", adapters=adapters) as llm:
            found.append(tokens_of(llm.generate(prompts, SamplingParams(max_tokens=24, lora_name="a"))))
    assert found[0] == found[1]
