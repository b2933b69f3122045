"""What may follow drafts while they are made: lines of bits, as each matcher alone would fill them."""

from __future__ import annotations

import random

import pytest
import torch
from llguidance import LLMatcher

from trtrun.core.guide import Guide
from trtrun.guiding.grammars import Grammars
from trtrun.guiding.masks import MaskMaker, Walk

VOCABULARY = 4096
ROWS = 9
GUIDED = (0, 2, 3, 4, 5, 8)
NONE_LEFT, REFUSED, BOUNDED = 1, 2, 3
"""Which of them has no matcher, is told a token that it does not allow, and passes a bound."""


def bits_of(matcher: LLMatcher) -> torch.Tensor:
    line = torch.zeros(VOCABULARY // 32, dtype=torch.int32)
    matcher.deep_copy().unsafe_compute_mask_ptr(line.data_ptr(), 4 * len(line))
    return line


def options(line: torch.Tensor) -> list[int]:
    spread = (line.unsqueeze(1) >> torch.arange(32)) & 1
    return spread.flatten().nonzero().flatten().tolist()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_each_step_has_the_bits_of_each_rows_own_matcher(grammars: Grammars, num_threads: int) -> None:
    """Rows beside that are not guided have no line; a row that is refused or ended is allowed nothing from then on, and
    the others go on."""
    choose = random.Random(num_threads)
    alone = [grammars.matcher(Guide("regex", f"[a-{end}]{{3,40}}( [0-9]+)*!")) for end in "fghijk"]
    forks: list[LLMatcher | None] = [matcher.deep_copy() for matcher in alone]
    forks[NONE_LEFT] = None
    walk = Walk(MaskMaker(VOCABULARY, num_threads), ROWS, GUIDED, forks, torch.device("cpu"))
    ended = {NONE_LEFT}
    for step in range(6):
        masks = walk.masks()
        assert masks.places[:, 0].tolist() == [0, -1, 1, 2, 3, 4, -1, -1, 5]
        expected = [
            torch.zeros_like(masks.bits[0]) if line in ended else bits_of(one) for line, one in enumerate(alone)
        ]
        assert torch.equal(masks.bits, torch.stack(expected))
        tokens = torch.zeros(ROWS, dtype=torch.int64)
        for line, matcher in enumerate(alone):
            token = choose.choice(options(bits_of(matcher)) or [0])
            if step == 2 and line == REFUSED:
                token = next(other for other in range(VOCABULARY) if other not in options(bits_of(matcher)))
                ended.add(line)
            elif line not in ended:
                assert matcher.consume_token(token)
            tokens[GUIDED[line]] = token
        if step == 3:
            bounded = forks[BOUNDED]
            assert bounded is not None and not bounded.rollback(1000) and bounded.is_error()
            ended.add(BOUNDED)
        walk.tell(tokens)


def test_masks_that_were_not_told_anything_since_are_left_alone(grammars: Grammars) -> None:
    """They may still be on their way to the device."""
    matcher = grammars.matcher(Guide("regex", "[a-c]+"))
    walk = Walk(MaskMaker(VOCABULARY, 1), 1, [0], [matcher.deep_copy()], torch.device("cpu"))
    first = walk.masks()
    assert walk.masks().bits.data_ptr() != first.bits.data_ptr()
