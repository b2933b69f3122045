"""The kernel that streams weights of 4 bits on GPUs has the bits of the general one, and that is the product."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from gpus import needs_hopper

from trtrun.kernels.torch.integers import pack

pytest.importorskip("triton", reason="needs triton: pip install triton")

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
SHAPES = pytest.mark.parametrize(
    ("features", "inputs", "size"),
    [(64, 128, 128), (192, 640, 32), (64, 4224, 64), (3072, 2048, 128), (20032, 1024, 64), (8192, 14336, 128)],
)


def never(*arguments: object) -> torch.Tensor:
    raise AssertionError("nothing is to be multiplied")


def make_weight(features: int, inputs: int, size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    codes = torch.randint(0, 16, (features, inputs), device="cuda")
    scale = (torch.rand(features, inputs // size, device="cuda") / inputs**0.5).to(dtype)
    return pack(codes, scale, torch.randint(0, 16, scale.shape, device="cuda"))


def weight_of(held: dict[str, torch.Tensor], inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """[features, inputs] float64, which no dtype of activations has."""
    from trtrun.kernels.torch.integers import TILE, dequantize

    ones = held["scales"].bitwise_and(-65536) | int(torch.ones((), dtype=dtype).view(torch.int16))
    codes = dequantize(held["words"], ones, inputs, dtype).double()
    both = held["scales"].view(held["scales"].shape[0], -1, TILE).transpose(1, 2).flatten(0, 1)
    scale = (both & 0xFFFF).to(torch.int16).view(dtype).double()
    return codes * scale.repeat_interleave(held["words"].shape[1] * 512 // scale.shape[1], 1)[:, :inputs]


@needs_hopper
@DTYPES
@SHAPES
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_products(features: int, inputs: int, size: int, has_bias: bool, dtype: torch.dtype) -> None:
    """One tile and many more than there are programs; steps that the weight does not fill; groups of all sizes."""
    from trtrun.kernels.triton.int4_stream.product import StreamedProduct
    from trtrun.kernels.triton.int4_stream.tiles import height_of
    from trtrun.kernels.triton.matmul.int_matmul import TritonInt4Matmul, chain_product

    torch.manual_seed(features)
    held = make_weight(features, inputs, size, dtype)
    weight = weight_of(held, inputs, dtype)
    bias = torch.randn(features, device="cuda").to(dtype) if has_bias else None
    general, streamed = TritonInt4Matmul(**held, bias=bias), StreamedProduct(**held, bias=bias)
    together = torch.randn(700, inputs, device="cuda").to(dtype)
    expected = chain_product(together, **held, bias=bias)
    exact = together.double() @ weight.T + (0 if bias is None else bias.double())
    assert (expected.double() - exact).norm() / exact.norm() < (4e-3 if dtype is torch.bfloat16 else 5e-4)
    for rows in (1, 8, 9, 16, 17, 32, 48, 64, 65, 128, 129, 300, 700):
        x = together[700 - rows :]
        assert torch.equal(general(x), expected[700 - rows :]), f"{rows} rows"
        for height in (64, 128) if rows > 64 else [height_of(rows, len(held["words"]), 132)] * 3:
            assert torch.equal(streamed(x, height), expected[700 - rows :]), f"{rows} rows in tiles of {height}"


@needs_hopper
def test_a_graph_of_many_takes_it_and_has_the_bits_of_single_calls() -> None:
    """Kernels begin before those before them have ended: rows must be there, and shared memory."""
    from trtrun.kernels.triton.matmul.int_matmul import TritonInt4Matmul

    torch.manual_seed(1)
    shapes = [(3072, 2048), (2048, 2048), (8192, 2048), (2048, 8192)]
    layers = [TritonInt4Matmul(**make_weight(*shape, 128, torch.bfloat16), bias=None) for shape in shapes]

    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            queries, hidden = layers[0](x), layers[1](x)
            hidden = layers[3](layers[2](hidden).tanh()) + queries[:, :2048]
            x = hidden / hidden.norm(dim=1, keepdim=True)
        return x

    x = torch.randn(5, 2048, device="cuda").bfloat16()
    run(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(x)
    for _ in range(3):
        x.normal_()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            graph.replay()
        assert sum("_stream_kernel" in event.name for event in profiler.events()) == 40
        assert torch.equal(found, run(x))


@pytest.mark.parametrize("has_same_bits", [True, False])
def test_few_rows_are_for_the_kernel_that_streams(has_same_bits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs before a capture compares; a graph alone cannot, and goes the other way."""
    from trtrun.kernels.triton.int4_stream import suitability

    compared: list[tuple[int, ...]] = []
    capturing = [True]
    monkeypatch.setattr(suitability, "_chosen", {})
    monkeypatch.setattr(suitability, "is_hopper", lambda device: True)
    monkeypatch.setattr(suitability, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(suitability, "_compare", lambda *kind: compared.append(kind[2:5]) or has_same_bits)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    held = pack(torch.zeros(64, 128, dtype=torch.int32), torch.ones(64, 1).bfloat16(), 8)
    streamed = suitability.Streamed(held["words"], held["scales"], None, never)

    def takes(rows: int, width: int = 128) -> bool:
        return streamed.takes(torch.zeros(rows, width).bfloat16()[:, :128])

    assert not takes(1) and not compared
    capturing[0] = False
    assert not takes(0) and not takes(1, 129) and not compared
    kinds = [(8, 1, 1), (16, 1, 1), (64, 1, 1)]
    assert [takes(rows) for rows in (1, 8, 16, 128, 129)] == [has_same_bits] * 5 and compared == kinds
    finer = pack(torch.zeros(64, 128, dtype=torch.int32), torch.ones(64, 4).bfloat16(), 8)
    other = suitability.Streamed(finer["words"], finer["scales"], None, never)
    assert other.takes(torch.zeros(1, 128).bfloat16()) == has_same_bits and compared[-1] == (8, 4, 1)
    longer = pack(torch.zeros(64, 1024, dtype=torch.int32), torch.ones(64, 8).bfloat16(), 8)
    other = suitability.Streamed(longer["words"], longer["scales"], None, never)
    assert other.takes(torch.zeros(1, 1024).bfloat16()) == has_same_bits and compared[-1] == (8, 1, 2)
    monkeypatch.setattr(suitability, "is_collecting", lambda: True)
    assert takes(30) and compared[-1] == (32, 1, 1), "its kernels are asked for, whatever skipped ones say"
    monkeypatch.setattr(suitability, "is_collecting", lambda: False)
    assert takes(30) == has_same_bits
    capturing[0] = True
    assert [takes(rows) for rows in (0, 1, 9, 128, 900)] == [False, *[has_same_bits] * 4]


@pytest.mark.parametrize(
    ("rows", "tiles", "height"),
    [
        (1, 64, 8),
        (9, 64, 16),
        (64, 64, 64),
        (65, 64, 64),
        (128, 448, 128),
        (192, 64, 64),
        (192, 96, 128),
        (2048, 64, 128),
    ],
)
def test_tiles_leave_few_multiprocessors_idle(rows: int, tiles: int, height: int) -> None:
    from trtrun.kernels.triton.int4_stream.tiles import height_of

    assert height_of(rows, tiles, 132) == height


def test_there_is_room_for_steps_on_their_way() -> None:
    """While one is multiplied the next is waited for: with room for one alone nothing would ever end."""
    from trtrun.kernels.triton.int4_stream.tiles import HEIGHTS, Room, steps_at_once

    asked = set()
    for height, parts, steps in product(HEIGHTS, (1, 2, 4), (1, 2, 7, 8)):
        at_once = steps_at_once(height, parts, steps)
        asked.add(at_once)
        assert steps % at_once == 0 and Room.of(height, parts, at_once).stages >= 2
        assert Room.of(height, parts, at_once).slots >= 2
    assert asked == {1, 2}


def test_it_is_not_for_the_cpu() -> None:
    from trtrun.kernels.triton.int4_stream.suitability import Streamed

    held = pack(torch.zeros(64, 128, dtype=torch.int32), torch.ones(64, 1).bfloat16(), 8)
    assert not Streamed(held["words"], held["scales"], None, never).takes(torch.zeros(1, 128).bfloat16())
