"""A token's result is bit-equal alone, beside other queries and in chunks, in bfloat16 and, by trtrun's own kernels, in
float32: lossless greedy rests on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from family_checkpoints import write_family
from native import PATHS, PROCESSORS, compute_as, leave_to_torch
from paged import PagedModel, straight
from pipelines import make_llm
from torch.nn import functional

from trtrun.attention.backend import GatherAttention, weigh
from trtrun.kernels.arguments import Activations, AttentionCall
from trtrun.kernels.torch.soft_cap import soft_cap
from trtrun.kvcache.segments import AttentionBatch, AttentionSegment
from trtrun.kvcache.specs import like_layers
from trtrun.kvcache.store import KVStore
from trtrun.layers.decoder_layer import GatedMLP, RMSNorm
from trtrun.layers.rope import RopeConfig
from trtrun.layers.rotary import RotaryEmbedding

LENGTH = 40


@pytest.fixture(params=[*(pytest.param(kind, marks=needed) for kind, needed in PATHS.items()), "torch"])
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models run on the kernels that each kind of processor chooses, and as on processors that have none."""
    choose_kernels(request.param, monkeypatch)


@pytest.fixture(
    params=[
        *(pytest.param((kind, torch.bfloat16), marks=needed) for kind, needed in PATHS.items()),
        ("torch", torch.bfloat16),
        *(pytest.param((kind, torch.float32), marks=PROCESSORS[kind]) for kind in ("avx512", "avx2")),
    ],
    ids=lambda given: f"{given[0]}-{given[1]}",
)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """In which models compute on which kernels: float32 needs trtrun's own."""
    kind, dtype = request.param
    choose_kernels(kind, monkeypatch)
    return dtype


def choose_kernels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a kind of processor, or torch's operations."""
    if kind == "torch":
        leave_to_torch(monkeypatch)
    else:
        compute_as(kind, monkeypatch)


SHAPES: dict[str, dict[str, Any]] = {
    # Sizes that are no multiples of a vector register, so that vectorised loops have scalar tails.
    "odd": {"hidden_size": 60, "intermediate_size": 118, "head_dim": 10, "num_attention_heads": 6},
    # Sums so long that oneDNN adds a single row up in another order.
    "wide": {"hidden_size": 512, "intermediate_size": 1376, "head_dim": 64, "num_attention_heads": 8},
    "with windows": {"sliding_window": 7},
}


def tokens_of(seed: int) -> list[int]:
    """Random token ids, LENGTH of them."""
    return torch.randint(199, (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(
    ("architecture", "shape"),
    [
        ("LlamaForCausalLM", "odd"),
        ("LlamaForCausalLM", "wide"),
        ("MistralForCausalLM", "with windows"),
        ("Qwen2ForCausalLM", "wide"),
        ("Qwen3ForCausalLM", "odd"),
    ],
)
def test_logits_do_not_depend_on_the_batch(tmp_path: Path, architecture: str, shape: str, dtype: torch.dtype) -> None:
    path = make_checkpoint(tmp_path, architecture, dtype=dtype, **SHAPES[shape])
    check_chunks(PagedModel(path, dtype, block_size=16))


@pytest.mark.parametrize(("shape", "kv_format"), [("odd", "fp8"), ("wide", "int8")])
def test_logits_over_codes_of_8_bits_do_not_depend_on_the_batch(
    tmp_path: Path, shape: str, kv_format: str, dtype: torch.dtype
) -> None:
    """In blocks that are no whole tiles, too: one other last bit would make another code."""
    path = make_checkpoint(tmp_path, dtype=dtype, **SHAPES[shape])
    check_chunks(PagedModel(path, dtype, block_size=16 if shape == "wide" else 6, kv_format=kv_format))


def check_chunks(model: PagedModel) -> None:
    """A text's logits are the same token by token, in chunks, and with wider block tables."""
    tokens = tokens_of(0)
    singles = torch.cat([model.forward([[(0, at, tokens[at : at + 1])]]) for at in range(LENGTH)])
    for row, chunk in ((1, 2), (2, 6), (3, LENGTH)):
        parts = [model.forward([[(row, at, tokens[at : at + chunk])]]) for at in range(0, LENGTH, chunk)]
        assert torch.equal(torch.cat(parts), singles), f"chunks of {chunk}"
    parts = [model.forward([[(4, at, tokens[at : at + 1])]], spare_blocks=9) for at in range(LENGTH)]
    assert torch.equal(torch.cat(parts), singles), "wider block tables"


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(
    ("architecture", "tp_size"), [("LlamaForCausalLM", 1), ("Qwen2ForCausalLM", 2), ("Qwen3ForCausalLM", 1)]
)
def test_tokens_that_nobody_asks_for_end_in_the_last_layer(
    tmp_path: Path, architecture: str, tp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are asked for keep their bits, and so does what comes after either."""
    path = make_checkpoint(tmp_path, architecture, dtype=torch.bfloat16, **SHAPES["wide"])
    model = PagedModel(path, torch.bfloat16, tp_size, block_size=16)
    batch = [[(row, 0, tokens_of(row)[:-1]) for row in (0, 1)]]
    following = [[(row, LENGTH - 1, tokens_of(row)[-1:]) for row in (0, 1)]]
    every, after = model.forward(batch), model.forward(following)

    fed: dict[GatedMLP, int] = {}
    original = GatedMLP._gated

    def count(self: GatedMLP, x: Activations) -> Activations:
        fed[self] = len(x)
        return original(self, x)

    monkeypatch.setattr(GatedMLP, "_gated", count)
    for wanted in ([5, LENGTH - 2, LENGTH + 9], []):
        for store in model.stores:
            next(store.parts())[0].zero_()
        fed.clear()
        assert torch.equal(model.forward(batch, wanted=wanted), every[wanted])
        for rank in model.models:
            *others, last = [fed.get(layer.mlp, 0) for layer in rank._layers]
            assert last == len(wanted)
            assert others == [2 * (LENGTH - 1)] * (len(rank._layers) - 1)
        assert torch.equal(model.forward(following), after)


@pytest.mark.usefixtures("_kernels")
def test_the_target_of_a_job_keeps_a_single_row_equal_to_the_same_row_among_others(tmp_path: Path) -> None:
    """Its draft need not: plain decoding computes one row where verification computes several."""
    path = make_checkpoint(tmp_path, dtype=torch.bfloat16, **SHAPES["wide"])
    inputs = torch.randn((6, 1376), generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    with make_llm(path, path) as llm:
        layer = llm.engine.orchestrator._ranks._worker.target._model._layers[0]
        for linear in (layer.attention.qkv, layer.attention.output, layer.mlp._gate_up, layer.mlp._down):
            part = inputs[:, : 1376 if linear is layer.mlp._down else 512].contiguous()
            together = linear(part)
            for row in range(6):
                assert torch.equal(linear(part[row : row + 1]), together[row : row + 1])


def test_logits_do_not_depend_on_other_rows(tmp_path: Path, dtype: torch.dtype) -> None:
    check_company(make_checkpoint(tmp_path, dtype=dtype), dtype)


@pytest.mark.parametrize(("family", "head_dim"), [("gemma2", 24), ("gemma2", 32), ("gemma3", 32), ("gpt_oss", 32)])
def test_logits_of_families_depend_on_neither(tmp_path: Path, family: str, head_dim: int, dtype: torch.dtype) -> None:
    """Heads of 32 numbers have kernels that read the store in place; contexts of others are gathered."""
    path = write_family(tmp_path, family, dtype=dtype, head_dim=head_dim)
    check_chunks(PagedModel(path, dtype, block_size=16))
    check_company(path, dtype)


def check_company(path: Path, dtype: torch.dtype) -> None:
    """A text's logits are the same alone and among rows that decode, verify drafts and read prompts."""
    texts = {row: tokens_of(row) for row in range(5)}
    alone = PagedModel(path, dtype)
    expected = {row: alone.forward([[(row, 0, tokens)]]) for row, tokens in texts.items()}
    model = PagedModel(path, dtype)
    model.forward([[(row, 0, texts[row][:30]) for row in range(4)]])
    logits = model.forward(
        [
            [(row, 30, texts[row][30:31]) for row in (0, 1)],
            [(row, 30, texts[row][30:36]) for row in (2, 3)],
            [(4, 0, texts[4])],
        ]
    )
    wanted = [expected[0][30:31], expected[1][30:31], expected[2][30:36], expected[3][30:36], expected[4]]
    assert torch.equal(logits, torch.cat(wanted))


def test_attention_over_few_small_heads_does_not_depend_on_the_queries() -> None:
    """Below 16**3 multiplications torch's bmm takes another kernel, whose rounding differs now and then."""
    generator = torch.Generator().manual_seed(0)
    attention, block_tables = GatherAttention(), torch.tensor([[2, 1]])
    store = KVStore(like_layers(1, 2, 32), 3, 16, torch.bfloat16, torch.device("cpu"))

    def attend(first: int, query_key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(first, first + len(value)).view(1, -1)
        batch = AttentionBatch([AttentionSegment(0, 1, len(value), block_tables, positions)], 16)
        return attention.forward(AttentionCall(query_key, value, straight(value), store.layer(0), batch, 0.2, None))

    for _ in range(400):
        query_key, value = torch.randn(32, 8, 32, generator=generator).bfloat16().split((6, 2), dim=1)
        together = attend(0, query_key, value)
        for at in range(26, 32):
            one = slice(at, at + 1)
            assert torch.equal(attend(at, query_key[one], value[one]), together[one])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_silu_is_one_function_of_every_value(dtype: torch.dtype) -> None:
    """Vectorised loops and scalar tails agree on all 65536 values, so no split over rows or threads can show."""
    values = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values[values.isfinite()]
    strided = torch.stack((values, values), dim=1)[:, 0]  # a strided input takes the scalar loop
    assert torch.equal(functional.silu(values), functional.silu(strided))


def test_weights_beside_sinks_do_not_depend_on_masked_keys_behind() -> None:
    generator = torch.Generator().manual_seed(0)
    scores, sinks = torch.randn(2, 2, 3, 4, 70, generator=generator) * 3, torch.randn(6, generator=generator) * 3
    for keys in range(16, 70):  # whole registers of torch, as blocks of most stores are
        found = weigh(scores[..., :keys], sinks)
        wider = weigh(functional.pad(scores[..., :keys], (0, 31), value=float("-inf")), sinks)
        assert torch.equal(wider[..., :keys], found), keys
        total = scores[..., :keys].double().exp().sum(-1) + sinks.double().exp().view(2, 3, 1)
        assert torch.allclose(found.double(), scores[..., :keys].double().exp() / total.unsqueeze(-1), rtol=1e-5)


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_soft_caps_are_one_function_of_every_value(cap: float) -> None:
    """Near 0, where they bend and far beyond; a value has the same bits alone, among others and with gaps."""
    generator = torch.Generator().manual_seed(0)
    values = torch.cat([torch.randn(33333, generator=generator) * size * cap for size in (1e-4, 0.7, 3.0, 1e4)])
    found, exact = soft_cap(values, cap), cap * (values.double() / cap).tanh()
    assert (found - exact).abs().max() < 1e-6 * cap and (found - exact).div(exact).abs().max() < 1e-6
    assert torch.equal(soft_cap(torch.stack((values, values), dim=1)[:, 0], cap), found)
    assert torch.equal(torch.cat([soft_cap(values[at : at + 1], cap) for at in range(0, 4000)]), found[:4000])


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("size", [300, 304])
def test_norm_rounds_as_the_models_own_code(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(33, size, generator=generator) * 3).bfloat16()
    weight = torch.randn(size, generator=generator).bfloat16()
    wide = x.float()
    expected = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).bfloat16()
    norm = RMSNorm(weight, 1e-5)
    assert torch.equal(norm(x), expected)
    assert torch.equal(torch.cat([norm(x[at : at + 1]) for at in range(33)]), expected)


def test_rotary_tables_do_not_depend_on_how_they_grew() -> None:
    def tables(*reserved: int) -> tuple[torch.Tensor, torch.Tensor]:
        rotary = RotaryEmbedding(RopeConfig(), 10, torch.float32, torch.device("cpu"))
        for positions in reserved:
            rotary.reserve(positions)
        return rotary.lookup(torch.arange(6000))

    for once, grown in zip(tables(6000), tables(3, 2049, 2050, 5999, 6000), strict=True):
        assert torch.equal(once, grown)
