"""Numbers of rows for which a library is slow go as the next larger one that was tried; their bits are those that they
have anyway."""

from __future__ import annotations

import pytest
import torch
from gpus import needs_gpu

pytest.importorskip("triton")

from trtrun.kernels.library_speeds import Speeds
from trtrun.kernels.triton.matmul import dense as matmul
from trtrun.kernels.triton.matmul.dense import TritonMatmul

PLACES = range(len(matmul._ROWS))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The library is fast for all rows, and slow between 384 and 512, and between 1,024 and 2,048: of how many rows it
    was asked for products."""
    slow = tuple(matmul._ROWS[place] in (512, 2048) for place in PLACES)
    monkeypatch.setattr(matmul, "_compare", lambda weight: Speeds((True,) * len(PLACES), slow))
    linear, rows = matmul.functional.linear, list[int]()

    def count(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        rows.append(len(x))
        return linear(x, *weights)

    monkeypatch.setattr(matmul.functional, "linear", count)
    return rows


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_rows_that_a_library_is_slow_for_go_as_more(asked: list[int], has_bias: bool) -> None:
    weight, bias = torch.randn(24, 16, device=DEVICE), torch.randn(24, device=DEVICE) if has_bias else None
    product, x = TritonMatmul(weight, bias), torch.randn(2048, 16, device=DEVICE)
    for rows, computed in ((384, 384), (385, 512), (511, 512), (512, 512), (513, 513), (1024, 1024), (1025, 2048)):
        found = product(x[:rows])
        assert found.shape == (rows, 24) and found.is_contiguous()
        assert torch.allclose(found, torch.nn.functional.linear(x[:rows], weight, bias), atol=1e-4), rows
        assert asked.pop(0) == computed
        asked.clear()


def test_a_bias_is_added_where_the_product_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded where a library's product and the sum behind it are."""
    torch.manual_seed(1)
    never = Speeds((False,) * len(PLACES), (False,) * len(PLACES))
    monkeypatch.setattr(matmul, "_compare", lambda weight: never)
    weight, bias, x = (torch.randn(shape, device=DEVICE).half() for shape in ((70, 48), (70,), (5, 48)))
    plain = TritonMatmul(weight, None)(x)
    monkeypatch.setattr(torch.Tensor, "add_", None)
    monkeypatch.setattr(matmul, "add_bias", None)
    assert torch.equal(TritonMatmul(weight, bias)(x), plain + bias)


@needs_gpu
def test_padded_rows_have_the_same_bits() -> None:
    torch.manual_seed(0)
    weight = (torch.randn(6144, 4096, device="cuda") / 64).bfloat16()
    x = torch.randn(2048, 4096, device="cuda").bfloat16()
    found = TritonMatmul(weight, None)
    whole = found(x)
    padded = TritonMatmul(weight, None)
    padded._is_padded = (True,) * len(padded._is_padded)
    for rows in (17, 100, 300, 390, 448, 500, 700, 1500):
        assert torch.equal(padded(x[:rows]), whole[:rows]), rows
        assert torch.equal(found(x[:rows]), whole[:rows]), rows


def test_what_takes_longer_than_more_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rows half way between two numbers that are tried, where there are many."""
    seconds = {448: 8.7, 512: 5.1, 768: 7.6, 1024: 7.0, 320: 3.9, 384: 4.0, 224: 9.0, 256: 1.0}
    asked = list[int]()
    monkeypatch.setattr(matmul, "_seconds", lambda call: seconds[len(call())])
    monkeypatch.setattr(matmul.functional, "linear", lambda x, weight: asked.append(len(x)) or x)
    x = torch.zeros(1024, 1)
    slow = [matmul._is_slow_between(x[:more], x, fewer) for fewer, more in ((384, 512), (512, 1024), (256, 384))]
    assert slow == [True, False, False] and sorted(asked) == [320, 384, 448, 512, 768, 1024]
    assert (
        not matmul._is_slow_between(x[:256], x, 192) and len(asked) == 6
    )  # few rows go to the kernel where it is slow


@pytest.mark.parametrize(
    ("rows", "features", "is_fast"), [(256, 4096, False), (512, 4096, True), (512, 128, False), (2048, 2048, False)]
)
def test_many_rows_are_timed_where_features_are_few(
    monkeypatch: pytest.MonkeyPatch, rows: int, features: int, is_fast: bool
) -> None:
    """A router's are too few for all multiprocessors; of other weights the library is not asked to prove itself."""
    seconds = iter((71.0, 14.0))
    monkeypatch.setattr(matmul, "_seconds", lambda call: next(seconds))
    assert matmul._library_is_fast(torch.zeros(rows, 1), torch.zeros(features, 1)) is is_fast
    assert len(list(seconds)) == (2 if is_fast else 0)
