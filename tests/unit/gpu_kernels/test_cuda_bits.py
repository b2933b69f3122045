"""On a GPU in half precision a row's bits do not depend on its company: speculative texts are plain ones, bit for bit.

Random small weights are the worst case: logits lie close together, and any other rounding flips a text. All need a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ARCHITECTURES, make_checkpoint
from family_checkpoints import write_family
from gpus import needs_fp8, needs_gpu
from paged import PagedModel, straight
from pipelines import configuration, noisy_copy, prompt_of, run_alone, tokens_of
from torch.nn import functional

from trtrun import LLM, SamplingParams
from trtrun.kernels.arguments import AttentionCall, LatentCall
from trtrun.kvcache.segments import AttentionBatch, AttentionSegment

pytestmark = needs_gpu
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
LENGTH = 40


@HALVES
@pytest.mark.parametrize(
    ("features", "inputs"),
    [(6144, 4096), (4096, 14336), (28672, 4096), (3072, 4096), (2048, 8192), (1000, 700), (3, 64)],
)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_a_row_of_a_product_has_the_same_bits_in_any_company(
    features: int, inputs: int, has_bias: bool, dtype: torch.dtype
) -> None:
    from trtrun.kernels.triton.matmul.dense import TritonMatmul

    torch.manual_seed(features)
    weight = (torch.randn(features, inputs, device="cuda") / inputs**0.5).to(dtype)
    bias = torch.randn(features, device="cuda").to(dtype) if has_bias else None
    x = torch.randn(2500, inputs, device="cuda").to(dtype)
    product = TritonMatmul(weight, bias)
    whole = product(x)
    exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    assert ((whole - exact).norm() / exact.norm()).item() < (4e-3 if dtype is torch.bfloat16 else 5e-4)
    for rows in (1, 2, 5, 6, 16, 17, 24, 31, 32, 33, 48, 64, 65, 66, 96, 192, 300, 1100, 2100):
        assert torch.equal(product(x[:rows]), whole[:rows]), f"{rows} rows"
        assert torch.equal(product(x[-rows:]), whole[-rows:]), f"the last {rows} rows"
    assert product(x[:0]).shape == (0, features)


@needs_fp8
@HALVES
@pytest.mark.parametrize("rounds", [True, False], ids=["fp8", "weight only"])
@pytest.mark.parametrize(
    ("features", "inputs"), [(6144, 4096), (4096, 14336), (8192, 28672), (2048, 8192), (1000, 700), (3, 64), (70, 33)]
)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_a_row_of_a_product_with_8_bits_has_the_same_bits_in_any_company(
    features: int, inputs: int, has_bias: bool, rounds: bool, dtype: torch.dtype
) -> None:
    from trtrun.kernels.torch.fp8 import quantize
    from trtrun.kernels.triton.matmul.fp8_matmul import TritonFp8Matmul

    torch.manual_seed(features)
    held = quantize((torch.randn(features, inputs, device="cuda") / inputs**0.5).to(dtype))
    bias = torch.randn(features, device="cuda").to(dtype) if has_bias else None
    x = torch.randn(1100, inputs, device="cuda").to(dtype)
    product = TritonFp8Matmul(held["codes"], held["scale"], bias, rounds_activations=rounds)
    whole = product(x)
    for rows in (1, 2, 5, 6, 11, 16, 17, 24, 31, 32, 33, 48, 64, 65, 66, 96, 128, 129, 192, 300, 1000):
        assert torch.equal(product(x[:rows]), whole[:rows]), f"{rows} rows"
        assert torch.equal(product(x[-rows:]), whole[-rows:]), f"the last {rows} rows"
    assert product(x[:0]).shape == (0, features)


@needs_fp8
@pytest.mark.parametrize("rounds", [True, False], ids=["fp8", "weight only"])
def test_tiles_of_a_product_with_8_bits_cannot_be_seen_in_it(rounds: bool) -> None:
    from trtrun.kernels.torch.fp8 import quantize
    from trtrun.kernels.triton.fused import round_activations
    from trtrun.kernels.triton.matmul.fp8_matmul import Tile, chain_product

    torch.manual_seed(1)
    held = quantize(torch.randn(1000, 4096, device="cuda").bfloat16())
    x = torch.randn(40, 4096, device="cuda").bfloat16()
    values = round_activations(x) if rounds else x
    tiles = [
        Tile(16, 64, 256, 3), Tile(16, 64, 128, 4), Tile(16, 128, 128, 3), Tile(32, 64, 256, 2), Tile(64, 64, 128, 3),
        Tile(64, 128, 128, 2, 8), Tile(128, 128, 128, 2, 8),
    ]  # fmt: skip
    found = [chain_product(values, held["codes"], held["scale"], None, tile) for tile in tiles]
    for tile, other in zip(tiles, found, strict=True):
        assert torch.equal(other, found[0]), tile


def test_a_library_that_splits_sums_is_found_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from trtrun.kernels.triton.matmul import dense as matmul

    weight = torch.randn(4096, 14336, device="cuda", dtype=torch.bfloat16)

    def split(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        half = x.shape[1] // 2
        parts = [x[:, part].float() @ weight[:, part].float().T for part in (slice(half), slice(half, None))]
        return (parts[0] + parts[1]).to(x.dtype)

    monkeypatch.setattr(matmul, "_compared", {})
    monkeypatch.setattr(functional, "linear", split)
    assert not any(matmul._compare(weight).is_fast)
    x = torch.randn(100, 14336, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(matmul.TritonMatmul(weight, None)(x), matmul.chain_product(x, weight))


@HALVES
@pytest.mark.parametrize(
    ("window", "soft_cap", "has_sinks"),
    [(None, None, False), (500, None, False), (500, 2.0, False), (None, None, True), (128, None, True)],
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(32, 8, 128), (8, 8, 64), (64, 8, 128), (6, 2, 80), (8, 4, 256)]
)
@pytest.mark.parametrize(("context", "queries"), [(0, 300), (1000, 700), (5000, 40), (100, 6)])
def test_a_query_has_the_same_bits_alone_in_a_round_and_in_a_prompt(
    heads: int,
    kv_heads: int,
    head_dim: int,
    context: int,
    queries: int,
    window: int | None,
    soft_cap: float | None,
    has_sinks: bool,
    dtype: torch.dtype,
) -> None:
    from trtrun.kernels.triton.attention.paged_attention import PagedAttention

    torch.manual_seed(context + queries)
    blocks = -(-(context + queries) // 16)
    store = torch.randn(2, 2 * blocks + 1, kv_heads, 16, head_dim, device="cuda").to(dtype)
    tables = (torch.randperm(2 * blocks, device="cuda") + 1)[:blocks].view(1, -1)
    wider = functional.pad(tables, (0, 100))
    positions = (context + torch.arange(queries, device="cuda")).view(1, -1)
    fused = torch.randn(queries, heads + 2 * kv_heads, head_dim, device="cuda").to(dtype)
    sinks = torch.randn(heads, device="cuda") * 3 if has_sinks else None

    def attend(first: int, stop: int, tables: torch.Tensor) -> torch.Tensor:
        segment = AttentionSegment(0, 1, stop - first, tables, positions[:, first:stop])
        query_key, value = fused[first:stop].split([heads + kv_heads, kv_heads], dim=1)
        batch, angles = AttentionBatch([segment], 16), straight(value)
        call = AttentionCall(query_key, value, angles, store, batch, head_dim**-0.5, window, None, soft_cap, sinks)
        return PagedAttention().forward(call)

    whole = attend(0, queries, tables)
    for first in {0, 1, queries // 3, queries // 2, queries - 6, queries - 1}:
        for count in (1, 6, 17):
            stop = min(first + count, queries)
            assert torch.equal(attend(first, stop, tables), whole[first:stop]), (first, count)
            assert torch.equal(attend(first, stop, wider), whole[first:stop]), (first, count)


@HALVES
@pytest.mark.parametrize("heads", [16, 5, 128])
@pytest.mark.parametrize(("context", "queries"), [(0, 300), (1000, 400), (5000, 40), (100, 6)])
def test_a_query_over_latents_has_the_same_bits_alone_in_a_round_and_in_a_prompt(
    heads: int, context: int, queries: int, dtype: torch.dtype
) -> None:
    from trtrun.attention.latents import GatherLatents
    from trtrun.kernels.triton.attention.latent_attention import PagedLatents

    torch.manual_seed(context + queries)
    rank, turned, blocks = 512, 64, -(-(context + queries) // 16)
    store = torch.randn(1, 2 * blocks + 1, 1, 16, rank + turned, device="cuda").to(dtype)
    tables = (torch.randperm(2 * blocks, device="cuda") + 1)[:blocks].view(1, -1)
    wider = functional.pad(tables, (0, 100))
    positions = (context + torch.arange(queries, device="cuda")).view(1, -1)
    query = torch.randn(queries, heads, rank + turned, device="cuda").to(dtype)
    own = torch.randn(queries, rank + turned, device="cuda").to(dtype)

    def attend(backend: GatherLatents | PagedLatents, first: int, stop: int, tables: torch.Tensor) -> torch.Tensor:
        segment = AttentionSegment(0, 1, stop - first, tables, positions[:, first:stop])
        of_query, of_token = query[first:stop], own[first:stop]
        call = LatentCall(
            of_query[..., :rank].contiguous(), of_query[..., rank:], of_token[:, :rank], of_token[:, rank:],
            straight(of_query[..., rank:]), True, store, AttentionBatch([segment], 16), 192**-0.5,
        )  # fmt: skip
        return backend.forward(call)

    whole, expected = (attend(backend, 0, queries, tables) for backend in (PagedLatents(), GatherLatents()))
    assert ((whole.float() - expected.float()).norm() / expected.float().norm()).item() < 1e-2
    for first in {0, 1, queries // 3, queries // 2, queries - 6, queries - 1}:
        for count in (1, 6, 17):
            stop = min(first + count, queries)
            assert torch.equal(attend(PagedLatents(), first, stop, tables), whole[first:stop]), (first, count)
            assert torch.equal(attend(PagedLatents(), first, stop, wider), whole[first:stop]), (first, count)


@HALVES
@pytest.mark.parametrize(("heads", "outputs", "inputs"), [(16, 512, 128), (16, 128, 512), (1, 256, 7168), (3, 70, 44)])
def test_products_of_heads_have_the_same_bits_in_any_company(
    heads: int, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    from trtrun.kernels.triton.matmul.heads import multiply_heads

    torch.manual_seed(inputs)
    weight = (torch.randn(heads, outputs, inputs, device="cuda") / inputs**0.5).to(dtype)
    x = torch.randn(300, heads, inputs, device="cuda").to(dtype)
    exact = torch.einsum("rhi,hoi->rho", x.double(), weight.double())
    for made, bound in ((dtype, 4e-3 if dtype is torch.bfloat16 else 5e-4), (torch.float32, 1e-5)):
        whole = multiply_heads(x, weight, made)
        assert ((whole - exact).norm() / exact.norm()).item() < bound
        for rows in (1, 5, 16, 17, 33, 64, 65, 200):
            assert torch.equal(multiply_heads(x[:rows], weight, made), whole[:rows]), f"{rows} rows"
            assert torch.equal(multiply_heads(x[-rows:], weight, made), whole[-rows:]), f"the last {rows} rows"


SHAPES: dict[str, dict[str, Any]] = {
    "odd": {"hidden_size": 60, "intermediate_size": 118, "head_dim": 10, "num_attention_heads": 6},
    "wide": {"hidden_size": 512, "intermediate_size": 1376, "head_dim": 64, "num_attention_heads": 8},
}


@HALVES
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("quantization", ["none", "fp8", "fp8_block"])
def test_logits_do_not_depend_on_the_batch(
    tmp_path: Path, quantization: str, architecture: str, shape: str, dtype: torch.dtype
) -> None:
    check_batches(make_checkpoint(tmp_path, architecture, dtype=dtype, **SHAPES[shape]), dtype, quantization)


@HALVES
@pytest.mark.parametrize(
    ("family", "kv_format"),
    [
        *((name, "auto") for name in ("apertus", "gemma4_small", "gemma4_text", "olmo2", "olmo3", "phi3")),
        *((name, kept) for name in ("deepseek_v2", "deepseek_v3") for kept in ("auto", "fp8", "int8")),
    ],
)
def test_logits_of_families_do_not_depend_on_the_batch(
    tmp_path: Path, family: str, kv_format: str, dtype: torch.dtype
) -> None:
    check_batches(write_family(tmp_path, family, dtype=dtype), dtype, kv_format=kv_format)


def check_batches(path: Path, dtype: torch.dtype, quantization: str = "none", kv_format: str = "auto") -> None:
    """A text's logits are the same token by token, in chunks, with wider block tables, beside others, and alone."""
    texts = {row: prompt_of(LENGTH, row) for row in range(70)}
    cuda = torch.device("cuda")
    model = PagedModel(
        path, dtype, block_size=16, num_blocks=800, device=cuda, quantization=quantization, kv_format=kv_format
    )
    singles = torch.cat([model.forward([[(0, at, texts[0][at : at + 1])]]) for at in range(LENGTH)])
    for row, chunk in ((100, 2), (200, 6), (300, LENGTH)):
        parts = [model.forward([[(row, at, texts[0][at : at + chunk])]]) for at in range(0, LENGTH, chunk)]
        assert torch.equal(torch.cat(parts), singles), f"chunks of {chunk}"
    parts = [model.forward([[(400, at, texts[0][at : at + 1])]], spare_blocks=90) for at in range(LENGTH)]
    assert torch.equal(torch.cat(parts), singles), "wider block tables"
    both = model.forward([[(500, 0, texts[0])], [(row, 0, texts[row]) for row in range(1, 70)]])
    assert torch.equal(both[:LENGTH], singles), "beside 69 rows"
    few = model.forward([[(600, 0, texts[0])], [(601, 0, texts[1])]], wanted=[2, LENGTH - 1])
    assert torch.equal(few, singles[[2, LENGTH - 1]]), "where no other token is asked for"


@HALVES
@pytest.mark.parametrize("quantization", ["none", "fp8", "fp8_block", "fp8_weight_only"])
def test_speculative_texts_are_plain_ones(tmp_path: Path, dtype: torch.dtype, quantization: str) -> None:
    """Greedy and by seed, beside prompts in chunks, after preemption, over blocks that were used before."""
    target = make_checkpoint(tmp_path / "target", dtype=dtype, **SHAPES["wide"])
    draft = noisy_copy(tmp_path / "draft", target, 0.3)
    prompts = [prompt_of(5 + 17 * (number % 9), number % 20) for number in range(64)]
    sampling = [
        SamplingParams(
            max_tokens=40, temperature=(0.0, 0.8, 1.3)[number % 3], top_p=(1.0, 0.9)[number % 2], seed=number
        )
        for number in range(64)
    ]
    sections: dict[str, Any] = {
        "kv_cache": {"max_tokens": 1200},
        "scheduler": {"max_num_tokens": 192, "max_batch_size": 24},
    }
    devices = (("cuda:0",), ("cuda:0",))
    texts, preempted = {}, 0
    for draft_len in (1, 4, 7):
        config = configuration(target, draft, devices=devices, speculation={"draft_len": draft_len}, **sections)
        models = {
            role: section.model_copy(update={"quantization": quantization})
            for role, section in (("target", config.target), ("draft", config.draft))
        }
        with LLM(config=config.model_copy(update=models)) as llm:
            outputs = llm.generate(prompts, sampling)
            texts[draft_len] = tokens_of(outputs)
            preempted += sum(output.completions[0].statistics.num_preemptions for output in outputs)
            assert llm.statistics()["num_accepted_draft_tokens"] > 0
            llm.set_speculation(False)
            assert tokens_of(llm.generate(prompts, sampling)) == texts[draft_len], "plain, in company"
            assert run_alone(llm, prompts[:9], sampling[:9]) == texts[draft_len][:9], "plain, alone"
    assert texts[1] == texts[4] == texts[7] and preempted > 0
