"""Attention is dealt out to programs as its shapes ask for, and every way has the same bits."""

from __future__ import annotations

import pytest
import torch
from gpus import needs_gpu
from paged import check_tilings

from trtrun.kernels.triton.attention.attention_tiles import (
    LARGEST_TILE,
    MOST_SPLIT,
    Tiling,
    choose_tiling,
    tiling_of_codes,
)

H200 = 132
"""Multiprocessors."""

PROMPTS = Tiling(None)


@pytest.mark.parametrize(
    ("places", "lines", "shares", "expected"),
    [
        (4, 8, 1, Tiling(16)),  # a token of one row
        (4, 1024, 1, Tiling(16)),  # a token of many
        (88, 8, 1, Tiling(16)),  # 11 queries of one row, eight heads a KV head
        (88, 64, 1, Tiling(32)),
        (88, 256, 1, PROMPTS),
        (24, 256, 1, Tiling(32)),
        (128, 8, 1, Tiling(16)),  # a prompt of 32 tokens
        (128, 64, 1, Tiling(32)),  # of 256
        (4, 8, 8, Tiling(16, is_split=True)),
        (88, 8, 3, Tiling(64, is_split=True)),
        (88, 64, 8, PROMPTS),
        (24, 64, 8, Tiling(32, is_split=True)),
        (24, 256, 8, PROMPTS),
        (4, 256, 8, Tiling(16)),
        (128, 8, 32, Tiling(64, is_split=True)),  # the end of a long prompt
        (128, 512, 8, PROMPTS),
        (256, 1, 512, Tiling(64, is_split=True)),
        (257, 1, 512, PROMPTS),  # results of so many shares would take too much memory
    ],
)
def test_the_way_that_was_the_fastest_one(places: int, lines: int, shares: int, expected: Tiling) -> None:
    assert choose_tiling(places, lines, shares, H200, has_prompt_kernel=True) == expected


@pytest.mark.parametrize("places", [1, 4, 16, 17, 24, 64, 65, 128, 129, 5000])
@pytest.mark.parametrize("shares", [1, 2, 64])
def test_without_the_kernel_for_prompts(places: int, shares: int) -> None:
    """A tile is a power of two that the kernel takes, and no larger than its queries need."""
    for lines in (1, 8, 64, 1000):
        tile, is_split = choose_tiling(places, lines, shares, H200, has_prompt_kernel=False)
        assert tile in (16, 32, 64, LARGEST_TILE)
        assert tile == 16 or tile < 2 * places
        assert not is_split or (shares > 1 and tile <= MOST_SPLIT)


@pytest.mark.parametrize(
    ("places", "lines", "shares", "expected"),
    [
        (4, 8, 1, Tiling(16)),
        (128, 1024, 1, Tiling(64)),
        (4, 8, 32, Tiling(16, is_split=True)),
        (4, 256, 32, Tiling(16, is_split=True)),  # a token of 32 rows: two programs a multiprocessor are too few
        (4, 512, 32, Tiling(16, is_split=True)),
        (4, 1024, 32, Tiling(16)),
        (24, 256, 32, Tiling(16, is_split=True)),  # 6 queries of 32 rows
        (24, 512, 32, Tiling(16)),
        (88, 8, 32, Tiling(64, is_split=True)),
        (256, 1, 512, Tiling(64, is_split=True)),
        (257, 1, 512, Tiling(64)),  # results of so many shares would take too much memory
        (8192, 8, 32, Tiling(64)),
    ],
)
def test_widened_keys_and_values_are_dealt_out_to_more_programs(
    places: int, lines: int, shares: int, expected: Tiling
) -> None:
    assert tiling_of_codes(places, lines, shares, H200) == expected


@needs_gpu  # test_triton_interpreted.py does it without
@pytest.mark.parametrize("window", [1 << 30, 40])
@pytest.mark.parametrize("head_dim", [64, 128, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_way_has_the_same_bits(dtype: torch.dtype, head_dim: int, window: int) -> None:
    for heads in (4, 16):
        check_tilings(torch.device("cuda"), heads, head_dim, dtype, window)
