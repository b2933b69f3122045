"""Triton's kernels in its interpreter, where there is no GPU: right results, and the same bits in any company.

The interpreter has no bfloat16. What the hardware's rounding does is seen on a GPU alone (test_cuda_bits.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from family_checkpoints import write_family
from native import leave_to_torch
from norms import difference
from paged import PagedModel, check_tilings, straight
from safetensors.torch import load_file
from torch.nn import functional

from trtrun.attention.backend import GatherAttention
from trtrun.attention.backend import attend as attend_places
from trtrun.kernels import chooser
from trtrun.kernels.arguments import AttentionCall
from trtrun.kernels.torch.operations import TorchOperations
from trtrun.kernels.triton import support
from trtrun.kvcache.segments import AttentionBatch, AttentionSegment, Forks
from trtrun.layers import decoder_layer
from trtrun.linear.quantization import quantizations

pytest.importorskip("triton", reason="needs triton: pip install triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU"),
    pytest.mark.usefixtures("sums_without_order"),
]
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3}
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=str)


@pytest.mark.parametrize(
    ("size", "rows", "has_bias"), [(32, 3, False), (64, 20, True), (128, 70, False), (128, 0, True)]
)
def test_the_product_with_codes_of_4_bits(size: int, rows: int, has_bias: bool) -> None:
    """That of the dense weight, which nobody rounds here; features fill no tile."""
    from trtrun.kernels.torch.integers import pack
    from trtrun.kernels.triton.matmul.int_matmul import chain_product

    torch.manual_seed(size + rows)
    groups = 640 // size
    codes, zero = torch.randint(0, 16, (100, 640)), torch.randint(0, 16, (100, groups))
    scale, bias = torch.rand(100, groups).half(), torch.randn(128).half() if has_bias else None
    weight = (codes - zero.repeat_interleave(size, 1)) * scale.double().repeat_interleave(size, 1)
    x = torch.randn(rows, 640).half()
    found = chain_product(x, **pack(codes, scale, zero), bias=bias)
    assert found.shape == (rows, 128)
    if rows:
        expected = x.double() @ weight.T + (0 if bias is None else bias[:100].double())
        assert difference(found[:, :100], expected) < BOUNDS[torch.float16]


@pytest.mark.parametrize("dtype", [torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "features", "inputs"), [(1, 70, 64), (17, 1130, 200), (70, 64, 128), (0, 8, 64)])
def test_the_product(rows: int, features: int, inputs: int, dtype: torch.dtype) -> None:
    from trtrun.kernels.triton.matmul.dense import chain_product
    from trtrun.kernels.triton.row_functions import add_bias

    torch.manual_seed(features)
    weight, x = torch.randn(features, inputs).to(dtype), torch.randn(rows, inputs).to(dtype)
    found = chain_product(x, weight)
    assert found.shape == (rows, features)
    if rows:
        assert difference(found, x.double() @ weight.double().T) < BOUNDS[dtype]
    bias = torch.randn(features).to(dtype) * 20
    with_bias = chain_product(x, weight, bias=bias)
    assert torch.equal(with_bias, found + bias)  # which rounds where a library's product and a sum behind it round
    assert torch.equal(add_bias(found, bias), with_bias)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8], ids=str)
def test_copies_within_the_store(dtype: torch.dtype) -> None:
    """Those of torch, of blocks and of tokens; a block that is copied to itself stays."""
    from trtrun.kernels.triton.attention import paged_store

    source, target, offset = torch.tensor([[1, 3, 5, 1], [2, 7, 5, 0], [0, 4, 4, 2]])
    parts = 1 if dtype is torch.float32 else 2  # latents, or keys and values
    store = torch.randint(-100, 100, (6, parts, 9, 2, 5, 12)).to(dtype)  # three layers, and three that nobody copies
    for copy in ("copy_blocks", "copy_tokens"):
        expected, found = store.clone(), store.clone()
        others = (offset,) if copy == "copy_tokens" else ()
        getattr(TorchOperations(), copy)(expected[:3], source, target, *others)
        getattr(paged_store, copy)(found[:3], source, target, *others)
        assert not expected.equal(store) and found.equal(expected)
        getattr(paged_store, copy)(found[:3], source[:0], target[:0], *(one[:0] for one in others))


@pytest.mark.parametrize(("queries", "first"), [(1, 290), (9, 250)])
def test_a_layer_attends_in_keys_and_values_of_another(queries: int, first: int) -> None:
    """It writes none, and has the same bits in a round, in a prompt and split into shares; with the largest heads that
    any model has."""
    from trtrun.kernels.triton.attention.paged_attention import PagedAttention

    torch.manual_seed(first)
    heads, blocks, head_dim = 8, -(-(first + queries) // 16), 512
    store, tables = torch.randn(2, blocks + 1, 1, 16, head_dim).half(), (torch.randperm(blocks) + 1).view(1, -1)
    positions, query = first + torch.arange(queries).view(1, -1), torch.randn(queries, heads, head_dim).half()
    angles = torch.rand(2, queries, 1, head_dim).half().unbind()

    def attend(backend: GatherAttention | PagedAttention, start: int = 0) -> torch.Tensor:
        batch = AttentionBatch([AttentionSegment(0, 1, queries - start, tables, positions[:, start:])], 16)
        own = angles[0][start:], angles[1][start:]
        call = AttentionCall(query[start:], query[start:, heads:], own, kept, batch, head_dim**-0.5, None)
        return backend.forward(call)

    kept = store.clone()
    found = attend(PagedAttention())
    assert difference(found, attend(GatherAttention())) < BOUNDS[torch.float16]
    assert torch.equal(attend(PagedAttention(), queries - 1), found[-1:])
    assert torch.equal(kept, store)


@pytest.mark.parametrize(
    ("queries", "first", "window", "dtype", "soft_cap"),
    [
        (1, 600, None, torch.float16, None),
        (5, 250, None, torch.float32, None),
        (3, 300, 30, torch.float16, None),
        (3, 1, 20, torch.float32, None),
        (18, 245, 60, torch.float32, None),
        (5, 250, None, torch.float32, 0.7),
        (18, 10, 20, torch.float16, 2.0),
    ],
)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_is_right_and_the_same_alone(
    queries: int, first: int, window: int | None, dtype: torch.dtype, soft_cap: float | None, has_sinks: bool
) -> None:
    """Over one share of keys and several, in a round, in a prompt, and with a wider block table."""
    from trtrun.kernels.triton.attention.paged_attention import PagedAttention

    torch.manual_seed(first)
    heads, kv_heads, head_dim, blocks = 4, 2, 24, -(-(first + queries) // 16)
    store = torch.randn(2, blocks + 1, kv_heads, 16, head_dim).to(dtype)
    tables = (torch.randperm(blocks) + 1).view(1, -1)
    positions = first + torch.arange(queries).view(1, -1)
    fused = torch.randn(queries, heads + 2 * kv_heads, head_dim).to(dtype)
    sinks = torch.tensor([4.0, -30.0, 0.3, 90.0]) if has_sinks else None

    def attend(backend: GatherAttention | PagedAttention, start: int, stop: int, tables: torch.Tensor) -> torch.Tensor:
        query_key, value = fused[start:stop].split([heads + kv_heads, kv_heads], dim=1)
        batch = AttentionBatch([AttentionSegment(0, 1, stop - start, tables, positions[:, start:stop])], 16)
        angles, scale = straight(value), head_dim**-0.5
        call = AttentionCall(query_key, value, angles, store, batch, scale, window, None, soft_cap, sinks)
        return backend.forward(call)

    expected = attend(GatherAttention(), 0, queries, tables)
    found = attend(PagedAttention(), 0, queries, tables)
    assert difference(found, expected) < BOUNDS[dtype]
    for start, stop in ((0, 1), (queries // 2, queries // 2 + 1), (max(0, queries - 6), queries)):
        alone = attend(PagedAttention(), start, stop, functional.pad(tables, (0, 40)))
        assert torch.equal(alone, found[start:stop]), (start, stop)


@pytest.mark.parametrize(("soft_cap", "sinks"), [(None, None), (2.0, None), (None, torch.zeros(4))])
def test_layers_with_soft_caps_leave_the_kernel_for_prompts_alone(
    soft_cap: float | None, sinks: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows sinks alone."""
    from trtrun.kernels.triton.attention import paged_attention

    asked, choose = [], paged_attention.choose_tiling

    def choose_tiling(places: int, lines: int, shares: int, multiprocessors: int, has_prompt_kernel: bool) -> Any:
        asked.append(has_prompt_kernel)
        return choose(places, lines, shares, multiprocessors, False)

    monkeypatch.setattr(paged_attention, "is_chosen", lambda *arguments: True)
    monkeypatch.setattr(paged_attention, "choose_tiling", choose_tiling)
    query_key, value = torch.randn(20, 8, 16).split([6, 2], dim=1)
    segment = AttentionSegment(0, 1, 20, torch.tensor([[1, 2]]), torch.arange(20).view(1, -1))
    store, batch = torch.zeros(2, 3, 2, 16, 16), AttentionBatch([segment], 16)
    call = AttentionCall(query_key, value, straight(value), store, batch, 0.25, None, None, soft_cap, sinks)
    assert paged_attention.PagedAttention().forward(call).isfinite().all()
    assert asked == [soft_cap is None]


def test_nodes_of_trees_are_found_where_they_are() -> None:
    """As if they were laid out at their places: two rows of two paths, one of which ends early."""
    from trtrun.kernels.triton.attention.paged_attention import PagedAttention

    torch.manual_seed(1)
    nodes = torch.tensor([0, 1, 2, 0, 3, 3, 4, 5, 6, 4, 7, 0])
    places = torch.tensor([0, 1, 2, 4, 6, 7, 8, 10])
    tables = torch.tensor([[1], [2], [3], [4]])
    positions = torch.tensor([[5, 6, 7], [5, 6, -1], [9, 10, 11], [9, 10, -1]])
    fused = torch.randn(8, 8, 16)
    query_key, value = fused.split([6, 2], dim=1)
    angles = torch.randn(2, 12, 1, 16).unbind()
    segment, stores = AttentionSegment(0, 4, 3, tables, positions), [torch.randn(2, 5, 2, 16, 16)] * 2
    stores[1] = stores[0].clone()
    expected = PagedAttention().forward(
        AttentionCall(query_key[nodes], value[nodes], angles, stores[0], AttentionBatch([segment], 16), 0.25, None)
    )
    batch = AttentionBatch([segment], 16, Forks(nodes, places))
    found = attend_places(PagedAttention(), AttentionCall(query_key, value, angles, stores[1], batch, 0.25, None))
    assert torch.equal(found, expected[places])
    assert torch.equal(stores[1][:, 1:], stores[0][:, 1:])  # what is nowhere is in the null block


@pytest.mark.parametrize("queries", [4, 17])
def test_queries_that_stand_at_one_place_see_the_same_keys(queries: int) -> None:
    """As of drafts whose tokens see each other (heads/dflash_head.py): each writes the same key and value there."""
    from trtrun.kernels.triton.attention.paged_attention import PagedAttention

    torch.manual_seed(queries)
    heads, kv_heads, head_dim = 4, 2, 24
    tables = torch.tensor([[3, 1, 4], [2, 5, 0]])
    positions = torch.tensor([[40], [21]]).repeat(1, queries)
    positions[1, 2:] = -1
    fused = torch.randn(2, queries, heads + 2 * kv_heads, head_dim)
    fused[:, :, heads:] = fused[:, :1, heads:]
    query_key, value = fused.flatten(0, 1).split([heads + kv_heads, kv_heads], dim=1)
    store = torch.randn(2, 6, kv_heads, 16, head_dim)
    found = []
    for backend in (GatherAttention(), PagedAttention()):
        kept, batch = store.clone(), AttentionBatch([AttentionSegment(0, 2, queries, tables, positions)], 16)
        output = backend.forward(AttentionCall(query_key, value, straight(value), kept, batch, head_dim**-0.5, None))
        found.append((output[positions.flatten() >= 0], kept[:, 1:]))
    assert difference(found[1][0], found[0][0]) < BOUNDS[torch.float32]
    assert torch.equal(found[1][1], found[0][1])
    row = found[0][1][:, tables[0] - 1].transpose(1, 2).flatten(2, 3)[:, :, :41]  # [2, KV heads, keys, head]
    expected = functional.scaled_dot_product_attention(
        query_key[:queries, :heads].transpose(0, 1), *row.repeat_interleave(heads // kv_heads, dim=1)
    )
    assert difference(found[1][0][:queries], expected.transpose(0, 1)) < BOUNDS[torch.float32]


def test_attention_has_the_same_bits_however_it_is_dealt_out() -> None:
    """Tiles of fewer queries than a row has, with programs for each share and without."""
    check_tilings(torch.device("cpu"), 6, 24, torch.float16, 200, [(16, True), (32, False)])


@DTYPES
def test_the_small_operations(dtype: torch.dtype) -> None:
    from trtrun.kernels.triton.fused import activate_and_multiply, add_and_normalise
    from trtrun.kernels.triton.row_functions import add_gated, normalise_heads, square_sums, xielu

    torch.manual_seed(0)
    heads = torch.randn(3, 15, 24).to(dtype)[:, :11]
    for factor in (torch.randn(11, 24).to(dtype), torch.randn(11, 24)):
        expected = TorchOperations().normalise(heads, factor, 1e-5)
        assert difference(normalise_heads(heads, factor, 1e-5), expected) < BOUNDS[dtype]
    hidden, delta, weight = (torch.randn(shape).to(dtype) for shape in ((3, 96), (3, 96), (96,)))
    total = hidden + delta
    found = add_and_normalise(hidden, delta, weight, 1e-5)
    assert torch.equal(hidden, total)
    assert difference(found, functional.rms_norm(total.float(), (96,), None, 1e-5) * weight) < BOUNDS[dtype]
    fused = torch.randn(3, 2 * 1100).to(dtype)
    gated = functional.silu(fused[:, :1100].float()) * fused[:, 1100:].float()
    assert difference(activate_and_multiply(fused), gated) < BOUNDS[dtype]
    sums = square_sums(fused[:, 3:1100])
    assert sums.dtype is torch.float32
    assert difference(sums, fused[:, 3:1100].double().square().sum(1)) < BOUNDS[torch.float32]
    small, numbers = fused[:, 3:1100] * 10.0 ** -torch.arange(3).unsqueeze(1), torch.tensor([0.75, 1.25, 0.5, -1e-6])
    bent = xielu(small.to(dtype), numbers)
    assert bent.dtype is dtype
    assert difference(bent, TorchOperations().xielu(small.to(dtype).float(), numbers)) < BOUNDS[dtype]
    halves = activate_and_multiply(fused, "sigmoid")
    assert difference(halves, fused[:, :1100].float().sigmoid() * fused[:, 1100:].float()) < BOUNDS[dtype]
    logits, whole = torch.randn(3, 1).to(dtype), fused[:, :1100].contiguous()
    expected = whole.float() + 2 * whole.float() * logits.float().sigmoid()
    assert difference(add_gated(whole.clone(), whole * 2, logits), expected) < 2 * BOUNDS[dtype]


@pytest.mark.parametrize(("dtype", "at_once"), [(torch.float32, 1), (torch.float16, 4), (torch.float32, 16)], ids=str)
def test_rotating_on_the_way_to_the_store_has_the_same_bits(
    dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two segments, padding, heads whose size is no power of two; and queries that lie apart from the values."""
    from trtrun.kernels.triton.attention import paged_store
    from trtrun.kernels.triton.attention.paged_attention import PagedAttention

    monkeypatch.setattr(paged_store, "_tokens_at_once", lambda heads: at_once)
    torch.manual_seed(2)
    heads, kv_heads, head_dim, tokens = 4, 2, 24, 7
    query_key, value = (torch.randn(tokens, count, head_dim).to(dtype) for count in (heads + kv_heads, kv_heads))
    cosine, sine = (torch.randn(tokens, 1, head_dim).to(dtype) for _ in range(2))
    tables, positions = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[17, 18], [0, -1]])
    segments = [
        AttentionSegment(0, 2, 2, tables, positions),
        AttentionSegment(4, 1, 3, torch.tensor([[5]]), torch.tensor([[0, 1, 2]])),
    ]
    rotated = (query_key * cosine).add_(torch.roll(query_key, head_dim // 2, 2).mul_(sine))
    stores = [
        torch.randn(2, 6, kv_heads, 16, head_dim, generator=torch.Generator().manual_seed(1)).to(dtype) for _ in "abc"
    ]
    backend, batch, scale = PagedAttention(), AttentionBatch(segments, 16), head_dim**-0.5
    expected = backend.forward(AttentionCall(rotated, value, straight(value), stores[0], batch, scale, None))
    found = backend.forward(AttentionCall(query_key, value, (cosine, sine), stores[1], batch, scale, None))
    GatherAttention().forward(AttentionCall(query_key, value, (cosine, sine), stores[2], batch, scale, None))
    assert all(torch.equal(stores[2][:, 1:], store[:, 1:]) for store in stores)  # the null block may hold anything
    assert torch.equal(found, expected)


def test_the_product_with_8_bits() -> None:
    from trtrun.kernels.torch.integers import quantize_int8
    from trtrun.kernels.triton.matmul.int_matmul import TritonInt8Matmul

    torch.manual_seed(1)
    tensors, x = quantize_int8(torch.randn(70, 130)), torch.randn(5, 130).to(torch.float16)
    dense = tensors["codes"].double() * tensors["scale"].double().unsqueeze(1)
    bias = torch.randn(70).to(torch.float16)
    found = TritonInt8Matmul(tensors["codes"], tensors["scale"], bias)(x)
    assert difference(found, x.double() @ dense.T + bias.double()) < BOUNDS[torch.float16]


@DTYPES
def test_activations_of_8_bits_are_rounded_as_on_other_devices(dtype: torch.dtype) -> None:
    from trtrun.kernels.torch.fp8 import round_activations as round_in_torch
    from trtrun.kernels.triton.fused import round_activations

    sizes = 10.0 ** (torch.arange(20) % 7 - 4)
    x = torch.randn(20, 300, generator=torch.Generator().manual_seed(1)) * sizes.unsqueeze(1)
    x[3] = 0
    wide = x.to(dtype)
    for inputs in (300, 64, 1):
        codes, scale, kind = round_activations(wide[:, :inputs])
        assert kind is dtype
        expected, own = round_in_torch(wide[:, :inputs])
        assert torch.equal(scale, own)
        assert torch.equal(codes[:, :inputs].float(), expected)


@DTYPES
def test_what_is_rounded_in_the_kernel_that_makes_it(dtype: torch.dtype) -> None:
    """Is what that kernel makes, rounded."""
    from trtrun.kernels.triton import fused
    from trtrun.kernels.triton.fused import round_activations

    torch.manual_seed(0)
    hidden, delta, weight = (torch.randn(shape).to(dtype) for shape in ((3, 100), (3, 100), (100,)))
    for added in (None, delta):
        own, other = hidden.clone(), hidden.clone()
        expected = round_activations(fused.add_and_normalise(own, added, weight, 1e-5))
        found = fused.add_and_normalise_rounded(other, added, weight, 1e-5)
        assert torch.equal(own, other)
        assert torch.equal(found.scale, expected.scale)
        assert torch.equal(found.codes[:, :100].float(), expected.codes[:, :100].float())
    gates = torch.randn(3, 2 * 1100).to(dtype)
    expected, found = round_activations(fused.activate_and_multiply(gates)), fused.activate_and_multiply_rounded(gates)
    assert torch.equal(found.scale, expected.scale)
    assert torch.equal(found.codes[:, :1100].float(), expected.codes[:, :1100].float())


def test_a_model_whose_norms_and_activations_round_is_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only what attention gathered is rounded by a kernel of its own."""
    from trtrun.kernels.triton.matmul import fp8_matmul
    from trtrun.kernels.triton.operations import TritonOperations

    path, batch = make_checkpoint(tmp_path), [[(0, 0, [5, 9, 77, 3]), (1, 0, [8, 3, 4, 100])]]
    # The interpreter has float16 and no bfloat16, in which alone the CPU's own kernels compute.
    monkeypatch.setattr(quantizations, "_DTYPES", {"cpu": ("float16",)})
    leave_to_torch(monkeypatch)
    expected = PagedModel(path, torch.float16, quantization="fp8").forward(batch)
    for module in (decoder_layer, chooser):
        monkeypatch.setattr(module, "operations_of", lambda device_type: TritonOperations())
    monkeypatch.setattr(support, "multiplies_fp8", lambda device: True)
    rounded, round_activations = [], fp8_matmul.round_activations
    monkeypatch.setattr(
        fp8_matmul, "round_activations", lambda x: (rounded.append(x.shape[0]), round_activations(x))[1]
    )
    model = PagedModel(path, torch.float16, quantization="fp8")
    assert difference(model.forward(batch), expected) < BOUNDS[torch.float16]
    assert rounded == [8] * model.models[0].config.num_layers


def test_biases_of_layers_are_added_in_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of queries, keys and values, of what attention makes, and of the router; with the bits of a sum behind them."""
    from trtrun.kernels.triton.matmul import dense
    from trtrun.kernels.triton.operations import TritonOperations
    from trtrun.weights import weight_reader

    path, batch = write_family(tmp_path, "gpt_oss", dtype=torch.float16), [[(0, 0, [5, 9])]]
    monkeypatch.setattr(quantizations, "_DTYPES", {"cpu": ("float16",)})
    leave_to_torch(monkeypatch)
    expected = PagedModel(path, torch.float16).forward(batch)
    for module in (decoder_layer, chooser, weight_reader):
        monkeypatch.setattr(module, "operations_of", lambda device_type: TritonOperations())
    found = PagedModel(path, torch.float16).forward(batch)
    assert difference(found[0], expected[0]) < BOUNDS[torch.float16]
    chain_product, added = dense.chain_product, []

    def product_and_sum(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        added.append(bias)
        made = chain_product(x, weight)
        return made if bias is None else made + bias

    monkeypatch.setattr(dense, "chain_product", product_and_sum)
    model = PagedModel(path, torch.float16)
    assert torch.equal(model.forward(batch), found)
    tensors = load_file(path / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.router"):
        for layer in range(model.models[0].config.num_layers):
            bias = tensors[f"model.layers.{layer}.{name}.bias"]
            assert any(one is not None and torch.equal(one, bias) for one in added), (name, layer)


@pytest.mark.parametrize(
    ("features", "inputs", "with_bias", "rounds"), [(70, 130, True, True), (70, 130, False, False), (3, 64, True, True)]
)
def test_the_product_with_e4m3(features: int, inputs: int, with_bias: bool, rounds: bool) -> None:
    from trtrun.kernels.torch.fp8 import TorchFp8Matmul, quantize
    from trtrun.kernels.triton.matmul.fp8_matmul import TritonFp8Matmul

    torch.manual_seed(features)
    weight, x = quantize(torch.randn(features, inputs)), torch.randn(70, inputs).to(torch.float16)
    arguments = weight["codes"], weight["scale"], torch.randn(features).to(torch.float16) if with_bias else None
    product = TritonFp8Matmul(*arguments, rounds_activations=rounds)
    found = product(x)
    assert difference(found, TorchFp8Matmul(*arguments, rounds_activations=rounds)(x)) < 1e-4
    for rows in (0, 1, 6, 17, 65):
        some = product(x[:rows])
        # The interpreter's sums are numpy's, whose order shows where the numbers are not all codes.
        assert torch.equal(some, found[:rows]) if rounds or not rows else difference(some, found[:rows]) < 1e-4


@pytest.mark.parametrize("width", [3, 2049, 5000])
def test_the_likeliest(width: int) -> None:
    from trtrun.kernels.triton.sampling.token_choice import likeliest

    numbers = torch.randn(2, width, generator=torch.Generator().manual_seed(width))
    numbers[1, 2] = numbers[1, 1] = 50.0
    assert torch.equal(likeliest(numbers, 3), numbers.sort(dim=-1, descending=True, stable=True).indices[:, :3])


@pytest.mark.parametrize("width", [1, 2048, 2049, 5000])
def test_the_largest(width: int) -> None:
    """The first of several, of some columns of wider rows; what is no number wins."""
    from trtrun.kernels.triton.sampling.token_choice import likeliest

    numbers = torch.randn(6, width + 50, generator=torch.Generator().manual_seed(width))
    numbers[:, width:] = 100.0
    numbers[1, [width // 2, width - 1]] = 50.0
    numbers[2] = float("-inf")
    numbers[3, width - 1] = float("nan")
    numbers[4, [width // 3, width - 1]] = float("inf")
    numbers[5] = float("nan")
    expected = numbers[:, :width].nan_to_num(nan=float("inf"), neginf=float("-inf"), posinf=float("inf")).argmax(dim=-1)
    assert torch.equal(likeliest(numbers[:, :width], 1)[:, 0], expected)
    assert likeliest(numbers[:0], 1).shape == (0, 1)


@pytest.mark.parametrize("draft_len", [0, 1, 4])
def test_tokens_of_rows(draft_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as torch's operations."""
    from trtrun.engine import rows as rows_room
    from trtrun.kernels.triton.operations import TritonOperations

    def made(with_kernels: bool) -> list[torch.Tensor]:
        operations = TritonOperations() if with_kernels else TorchOperations()
        monkeypatch.setattr(rows_room, "operations_of", lambda kind: operations)
        generator = torch.Generator().manual_seed(draft_len)
        state = rows_room.RowState(6, 40, 16, 5, 100, torch.device("cpu"))
        state.token_ids.copy_(torch.randint(0, 100, state.token_ids.shape, generator=generator))
        state.lengths.copy_(torch.tensor([3, 1, 9, 30, 8, 7]))
        rows, drafts = torch.tensor([4, 1, 3]), torch.randint(0, 100, (3, draft_len + 2), generator=generator)
        lens = torch.tensor([draft_len, -1, draft_len // 2])
        tokens, positions = state.with_drafts(rows, drafts[:, 1 : 1 + draft_len], lens)
        gained = torch.randint(0, 100, (draft_len + 1, 3), generator=generator).T
        state.advance(rows, torch.tensor([1, draft_len + 1, 1]), gained)
        return [tokens, positions, state.lengths, state.token_ids]

    for found, expected in zip(made(True), made(False), strict=True):
        assert found.shape == expected.shape and found.dtype == expected.dtype
        assert torch.equal(found, expected)
