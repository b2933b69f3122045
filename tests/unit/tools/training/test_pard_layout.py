"""PARD's training sequences against what they stand for, written out place by place."""

from __future__ import annotations

import numpy
import pytest
import torch

from trtrun.tools.training.data import DataRow
from trtrun.tools.training.methods.pard import Layout, kept_places, lay_out

MASK = 99
ROWS = [
    DataRow(tuple(range(1, 13)), 4, True, 1),
    DataRow(tuple(range(20, 26)), 1, True, 2),
    DataRow(tuple(range(30, 47)), 9, True, 3),
]


def dropped(seed: int = 0, num_tokens: int = 4) -> Layout:
    generators = [numpy.random.default_rng([seed, index]) for index in range(len(ROWS))]
    return lay_out(ROWS, MASK, num_tokens, generators, retention=0.6, least=0.3)


def masks_of(layout: Layout, row: int) -> list[tuple[int, int]]:
    """Start and depth of a row's masks."""
    starts, depths = layout.starts[row], layout.depths[row]
    return [(int(start), int(depth)) for start, depth in zip(starts, depths, strict=True) if depth > 0]


def test_a_mask_sees_the_text_up_to_its_place_and_its_own_earlier_masks_alone() -> None:
    layout = dropped()
    visible = layout.visible()[:, 0]
    for row, item in enumerate(ROWS):
        entries = [("text", place, 0) for place in range(len(item.tokens))]
        padding = layout.text.shape[1] - len(entries)
        entries += [("padding", -1, -1)] * padding + [("mask", *mask) for mask in masks_of(layout, row)]
        for query, (kind, start, depth) in enumerate(entries):
            if kind == "padding":
                continue
            for key, (other_kind, other_start, other_depth) in enumerate(entries):
                if kind == "text":
                    wanted = other_kind == "text" and other_start <= start
                elif other_kind == "text":
                    wanted = other_start <= start
                else:
                    wanted = other_kind == "mask" and other_start == start and other_depth <= depth
                assert bool(visible[row, query, key]) == wanted, (row, query, key)
    # A softmax over nothing would be NaN.
    assert bool(visible.any(-1).all())


def test_every_mask_guesses_a_token_of_the_completion_from_its_true_position() -> None:
    layout = lay_out(ROWS, MASK, num_tokens=4)
    for row, item in enumerate(ROWS):
        first, length = item.prompt_length - 1, len(item.tokens)
        wanted = [
            (start, depth) for depth in (1, 2, 3) for start in range(first, length - 1) if start + depth + 1 < length
        ]
        assert masks_of(layout, row) == wanted
        is_mask = layout.depths[row] > 0
        assert layout.tokens[row][is_mask].tolist() == [MASK] * len(wanted)
        assert layout.positions[row][is_mask].tolist() == [start + depth for start, depth in wanted]
        texts = layout.predicts[row] & (layout.depths[row] == 0)
        assert layout.positions[row][texts].tolist() == list(range(first, length - 1))
    rows, places = layout.predicted()
    assert rows.tolist() == sorted(rows.tolist())
    assert all(int(place) + 1 < len(ROWS[int(row)].tokens) for row, place in zip(rows, places, strict=True))


def test_what_is_dropped_stays_dropped_at_greater_depths() -> None:
    layout = dropped(seed=3, num_tokens=6)
    for row, item in enumerate(ROWS):
        kept = set(masks_of(layout, row))
        assert all(depth == 1 or (start, depth - 1) in kept for start, depth in kept)
        counts = kept_places(len(item.tokens) - item.prompt_length, 5, 0.6, 0.3)
        for depth, count in enumerate(counts, start=1):
            assert len([mask for mask in kept if mask[1] == depth]) <= count


@pytest.mark.parametrize(
    ("retention", "least", "counts"),
    [(0.7, 0.2, [70, 49, 35, 25, 20, 20, 20]), (1.0, 1.0, [100] * 7), (0.5, 0.01, [50, 25, 13, 7, 4, 2, 1])],
)
def test_the_cost_of_depths_falls_to_the_least_share(retention: float, least: float, counts: list[int]) -> None:
    assert kept_places(100, 7, retention, least) == counts


def test_drops_differ_by_seed_and_are_the_same_for_one() -> None:
    assert torch.equal(dropped(1).starts, dropped(1).starts)
    assert masks_of(dropped(1), 2) != masks_of(dropped(2), 2)
