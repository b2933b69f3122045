"""Adapters on a GPU: lines have the same bits in any company, inside of graphs too, and texts are those of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import make_adapter
from checkpoints import make_checkpoint
from gpus import needs_fp8, needs_gpu
from pipelines import make_llm, noisy_copy, prompt_of, run_alone, tokens_of

from trtrun import SamplingParams
from trtrun.kernels.line_slots import LineSlots
from trtrun.kernels.torch.low_rank import Factors, LowRankShape

pytestmark = needs_gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("outputs", "inputs", "rank"),
    [((4096, 1024, 1024), 4096, 16), ((14336, 14336), 4096, 64), ((4096,), 14336, 256), ((70, 33), 100, 5)],
)
def test_a_line_has_the_same_bits_in_any_company(
    outputs: tuple[int, ...], inputs: int, rank: int, dtype: torch.dtype
) -> None:
    from trtrun.kernels.triton.low_rank import TritonLowRank

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
    x = torch.randn(300, inputs, device=device).to(dtype)
    y = torch.randn(300, sum(outputs), device=device).to(dtype)
    slots = torch.randint(0, 5, (300,), device=device)

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
    for lines in (1, 2, 5, 16, 17, 33, 64, 200):
        assert torch.equal(added(slice(lines)), whole[:lines])
        assert torch.equal(added(slice(300 - lines, 300)), whole[-lines:])


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
