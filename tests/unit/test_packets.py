"""What draft and target tell each other survives its way as bytes."""

from __future__ import annotations

import random

import pytest

from trtrun.core import HostDraft, HostVerdict
from trtrun.wire.packets import decode_draft, decode_verdict, encode_draft, encode_verdict, round_of

ROWS: list[list[list[int]]] = [
    [],
    [[]],
    [[], [], []],
    [[7]],
    [[], [1, 2, 3], [], [0]],
    [[2**40, 0, 151_935], [5], [1, 2, 3, 4, 5, 6, 7, 8]],
]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("round_index", [0, 3, 2**40])
def test_a_draft_and_a_verdict_come_out_as_they_went_in(rows: list[list[int]], round_index: int) -> None:
    for first in (False, True):
        draft = HostDraft(round_index, rows, [(index % 2 == 0) == first for index in range(len(rows))])
        assert decode_draft(encode_draft(draft)) == draft
        assert round_of(encode_draft(draft)) == round_index
    verdict = HostVerdict(round_index, rows)
    assert decode_verdict(encode_verdict(verdict)) == verdict
    assert round_of(encode_verdict(verdict)) == round_index


def test_random_packets() -> None:
    generator = random.Random(4)
    for _ in range(200):
        rows = [
            [generator.randrange(2**31) for _ in range(generator.randrange(6))] for _ in range(generator.randrange(9))
        ]
        draft = HostDraft(generator.randrange(10**6), rows, [generator.random() < 0.5 for _ in rows])
        assert decode_draft(encode_draft(draft)) == draft


def test_lists_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shorter|longer"):
        encode_draft(HostDraft(1, [[1], [2]], [True]))
