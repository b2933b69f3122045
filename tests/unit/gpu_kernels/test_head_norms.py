"""Norms of heads in the kernel that rotates and writes: the bits of the two kernels in its place, on a GPU where there
is one, else in Triton's interpreter, which has no bfloat16; and sums whose order no layout changes, as compiled."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from compiling import last_line
from family_checkpoints import write_family
from norms import difference
from paged import PagedModel

from trtrun.attention.backend import attend
from trtrun.kernels.arguments import AttentionCall, NormByHead
from trtrun.kernels.torch.operations import TorchOperations
from trtrun.kvcache.byte_codes import as_scales
from trtrun.kvcache.formats import PLAIN, ByteKV, KVFormat
from trtrun.kvcache.segments import AttentionBatch, AttentionSegment, Forks
from trtrun.kvcache.specs import like_layers
from trtrun.kvcache.store import KVStore
from trtrun.layers import decoder_layer

pytest.importorskip("triton", reason="needs triton: pip install triton")
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if HAS_GPU else "cpu")
HALF, BF16, WIDE = torch.float16, torch.bfloat16, torch.float32
FORMATS: dict[str, KVFormat] = {"plain": PLAIN, "fp8": ByteKV("fp8"), "int8": ByteKV("int8", True)}


class Case(NamedTuple):
    """Heads, their weight's dtype and theirs, tokens of a program, and how keys and values are kept."""

    heads: int
    kv_heads: int
    head_dim: int
    weight: torch.dtype
    dtype: torch.dtype
    at_once: int
    kept: str = "plain"


CASES = (
    [
        *(
            Case(*shape, weight, BF16, at_once)
            for shape in ((32, 4, 128), (16, 2, 256))
            for weight in (BF16, WIDE)
            for at_once in (1, 2, 4, 16)
        ),
        *(Case(5, 1, 64, HALF, HALF, at_once) for at_once in (1, 16)),
        *(Case(8, 8, 80, BF16, BF16, at_once) for at_once in (1, 16)),
        Case(3, 1, 24, WIDE, WIDE, 4),
        Case(32, 4, 128, BF16, BF16, 2, "fp8"),
        Case(32, 4, 128, BF16, BF16, 8, "int8"),
    ]
    if HAS_GPU
    else [
        Case(4, 2, 24, HALF, HALF, 1),
        Case(3, 1, 64, WIDE, HALF, 4),
        Case(9, 1, 10, WIDE, WIDE, 16),
        Case(4, 2, 24, HALF, HALF, 16, "fp8"),
        Case(4, 2, 24, WIDE, HALF, 2, "int8"),
    ]
)


def run(call: AttentionCall, kv_format: KVFormat, layer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is attended over a copy of the layer, and what this then has; the null block may hold anything."""
    from trtrun.kernels.triton.attention.paged_attention import PagedAttention

    own = layer.clone()
    return attend(PagedAttention(kv_format), call._replace(store_layer=own)), own[:, 1:]


def normalised(call: AttentionCall) -> AttentionCall:
    """The same with the kernel that only normalises."""
    from trtrun.kernels.triton.row_functions import normalise_heads

    assert call.head_norm is not None
    assert call.value_norm is not None
    query_key, value = normalise_heads(call.query_key, *call.head_norm), call.value
    if call.writes:
        value = normalise_heads(value, *call.value_norm)
    return call._replace(query_key=query_key, value=value, head_norm=None, value_norm=None)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def make_call(case: Case, batch: AttentionBatch, tokens: int, places: int) -> tuple[AttentionCall, torch.Tensor]:
    """Random tokens, heads in front of others, and a layer that is full of others."""
    heads, kv_heads, size, weight, dtype, _, kept = case
    kv_format = FORMATS[kept]
    fused = random(tokens, heads + 2 * kv_heads + 3, size, dtype=dtype) * 3
    fused[0, 1] = 0
    query_key, value = fused[:, : heads + kv_heads], fused[:, heads + kv_heads : heads + 2 * kv_heads]
    angles = random(places, 1, size, dtype=dtype), random(places, 1, size, dtype=dtype)
    scales = None
    if isinstance(kv_format, ByteKV) and kv_format.has_layer_scales:
        scales = as_scales(4.0 + torch.arange(2 * kv_heads, device=DEVICE).view(2, kv_heads), kv_format.kind)
    layer = KVStore(like_layers(1, kv_heads, size), 9, 16, dtype, DEVICE, kv_format).layer(0)
    numbers = random(2 * 9 * kv_heads * 16, size, dtype=dtype)
    kv_format.write(layer, torch.arange(len(numbers), device=DEVICE), numbers, scales)
    norm = NormByHead(random(heads + kv_heads, size, dtype=weight), 1e-5)
    of_values = NormByHead(random(kv_heads, size, dtype=WIDE), 1e-3)
    call = AttentionCall(query_key, value, angles, layer, batch, 0.2, None, scales, None, None, norm, of_values)
    return call, layer


@pytest.fixture
def set_tokens_at_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    from trtrun.kernels.triton.attention import paged_store

    return lambda count: monkeypatch.setattr(paged_store, "_tokens_at_once", lambda heads: count)


def numbers(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, device=DEVICE)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures(*([] if HAS_GPU else ["sums_without_order"]))
def test_a_norm_on_the_way_to_the_store_has_the_same_bits(
    case: Case, set_tokens_at_once: Callable[[int], None]
) -> None:
    """As normalising first, and near torch's; with two segments and padding."""
    set_tokens_at_once(case.at_once)
    torch.manual_seed(case.head_dim)
    segments = [
        AttentionSegment(0, 2, 2, numbers([1, 2], [3, 4]), numbers([17, 18], [0, -1])),
        AttentionSegment(4, 1, 19, numbers([5, 6]), numbers([*range(19)])),
    ]
    call, layer = make_call(case, AttentionBatch(segments, 16), 23, 23)
    found, expected = run(call, FORMATS[case.kept], layer), run(normalised(call), FORMATS[case.kept], layer)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert not torch.equal(found[1], layer[:, 1:])
    assert call.head_norm is not None
    by_torch = TorchOperations().normalise(call.query_key, *call.head_norm)
    assert difference(normalised(call).query_key, by_torch) < (1e-2 if case.dtype is BF16 else 2e-3)
    alone = call._replace(query_key=call.query_key[22:], value=call.value[22:], angles=(call.angles[0][22:],) * 2)
    in_company = call._replace(angles=(call.angles[0],) * 2)
    one = AttentionBatch([AttentionSegment(0, 1, 1, numbers([5, 6]), numbers([18]))], 16)
    written = run(in_company, FORMATS[case.kept], layer)[1]
    assert torch.equal(run(alone._replace(batch=one), FORMATS[case.kept], layer)[1][:, 5, :, 2], written[:, 5, :, 2])


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.usefixtures(*([] if HAS_GPU else ["sums_without_order"]))
def test_nodes_and_layers_that_write_nothing(at_once: int, set_tokens_at_once: Callable[[int], None]) -> None:
    """Each path normalises its nodes; a layer that attends in another's keys has queries alone."""
    set_tokens_at_once(at_once)
    torch.manual_seed(at_once)
    case = Case(6, 2, 16, HALF, HALF, at_once)
    nodes, places = numbers([0, 1, 2, 0, 3, 3, 4, 5, 6, 4, 7, 0])[0], numbers([0, 1, 2, 4, 6, 7, 8, 10])[0]
    positions = numbers([5, 6, 7], [5, 6, -1], [9, 10, 11], [9, 10, -1])
    segment = AttentionSegment(0, 4, 3, numbers([1], [2], [3], [4]), positions)
    call, layer = make_call(case, AttentionBatch([segment], 16, Forks(nodes, places)), 8, 12)
    assert call.head_norm is not None
    queries = call._replace(
        query_key=call.query_key[:, :6], value=call.value[:, :0],
        head_norm=call.head_norm._replace(weight=call.head_norm.weight[:6]),
    )  # fmt: skip
    for one in (call, queries):
        found, expected = run(one, PLAIN, layer), run(normalised(one), PLAIN, layer)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
        assert torch.equal(found[1], layer[:, 1:]) == (one is queries)


@pytest.mark.skipif(HAS_GPU, reason="needs a machine without a GPU")
@pytest.mark.usefixtures("sums_without_order")
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_text", "gemma4_text", "olmo2"])
def test_a_model_normalises_where_it_rotates(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for norms of all heads as one (OLMo 2), which stay in front of it."""
    from trtrun.kernels.triton import row_functions
    from trtrun.kernels.triton.attention.paged_attention import PagedAttention
    from trtrun.kernels.triton.operations import TritonOperations

    path, text = write_family(tmp_path, family), [5, 9, 77, 3, 8, 60]
    expected = PagedModel(path).forward([[(0, 0, text)]])
    kernels = TritonOperations()
    monkeypatch.setattr(decoder_layer, "operations_of", lambda device_type: kernels)
    asked, normalise = [], row_functions.normalise_heads
    monkeypatch.setattr(row_functions, "normalise_heads", lambda *x: (asked.append(x[0].shape), normalise(*x))[1])
    model = PagedModel(path)
    for layer in model.models[0]._layers:
        if isinstance(layer.attention, decoder_layer.Attention):
            layer.attention.backend = PagedAttention()
    assert difference(model.forward([[(0, 0, text)]]), expected) < 1e-4
    assert not asked


@pytest.mark.parametrize("size", [24, 700])
@pytest.mark.parametrize("dtype", [HALF, BF16 if HAS_GPU else WIDE], ids=str)
def test_gates_of_heads(dtype: torch.dtype, size: int) -> None:
    """The bits of gates beside what they are multiplied with; gates behind other heads."""
    from trtrun.kernels.triton.fused import activate_and_multiply
    from trtrun.kernels.triton.row_functions import gate_heads

    torch.manual_seed(size)
    gates, attended = random(5, 7, size, dtype=dtype)[:, 4:] * 3, random(5, 3, size, dtype=dtype)
    both = torch.cat((gates.flatten(1), attended.flatten(1)), dim=1)
    expected = activate_and_multiply(both, "sigmoid").view(attended.shape)
    assert difference(expected, TorchOperations().gate_heads(gates, attended)) < 1e-2
    assert torch.equal(gate_heads(gates, attended.clone()), expected)
    by_heads = attended.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(gate_heads(gates, by_heads), expected)
    assert gate_heads(gates[:0], attended[:0]).shape == (0, 3, size)


COMPILE = """
import json
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from trtrun.kernels.triton import row_functions
from trtrun.kernels.triton.attention import paged_store

def compiled(kernel, constants, num_warps):
    names = list(kernel.arg_names)
    kinds = dict.fromkeys(("positions", "tables", "nodes"), "*i64")
    kinds |= dict.fromkeys(("scales", "layer_scales", "value_weight"), "*fp32")
    kinds |= {"epsilon": "fp32", "value_epsilon": "fp32"}
    of_heads = "x", "output", "query_key", "value", "cosine", "sine", "store", "rotated", "weight"
    kinds |= dict.fromkeys(of_heads, "*bf16")
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    is_free = "places", "queries", "heads", "kv_heads", "epsilon", "value_epsilon"
    source = ASTSource(
        fn=kernel, signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in names if name not in (*constants, *is_free)},
    )
    code = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    reduced = [line for line in code.asm["ttgir"].splitlines() if line.strip().startswith("}) : (tensor<")]
    ptx = code.asm["ptx"]
    moves = code.asm["ttgir"].count("convert_layout")
    fetches = 0 < ptx.find("prefetch.") < ptx.find("griddepcontrol.wait")
    return [line.split("<")[1].split("xf32")[0] for line in reduced], moves, fetches

def alone(size, padded):
    sizes = {"HEADS": 36, "SIZE": size, "ROWS": 8, "PADDED": padded, "EARLY": True}
    return compiled(row_functions._normalise_heads_kernel, sizes, 4)

def rotating(size, padded, tokens):
    sizes = {"BLOCK_SIZE": 16, "HEAD": size, "PADDED": padded, "TOKENS": tokens, "HAS_NODES": False, "HAS_NORM": True}
    kept = {"NORM_LINES": 2, "HAS_VALUE_NORM": True, "CODES": 0, "HAS_LAYER_SCALES": False, "EARLY": True}
    return compiled(paged_store._rotate_and_write_kernel, sizes | kept, max(1, tokens // 4))

heads = (64, 64), (80, 128), (128, 128), (256, 256)
made = [[alone(*head), *(rotating(*head, tokens) for tokens in (1, 4, 16))] for head in heads]
print(json.dumps(made))
"""


def test_squares_are_added_in_one_order(tmp_path: Path) -> None:
    """As compiled for compute capability 9.0: only pairs are summed, which have one order in any layout. Layouts change
    three times at most (with Triton 3.6), and weights are asked for before the kernel before is waited for."""
    line = last_line(COMPILE, tmp_path)
    for kernels, sums in zip(json.loads(line), (6, 7, 7, 8), strict=True):
        (alone, _, _), *rotating = kernels
        assert len(alone) == sums
        assert [len(reduced) for reduced, _, _ in rotating] == [3 * sums] * 3  # queries, keys, values
        assert all(one.endswith("x2") for reduced, _, _ in kernels for one in reduced)
        assert all(moves <= 3 for _, moves, _ in kernels)
        assert all(fetches for _, _, fetches in rotating)
