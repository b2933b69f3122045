"""The matcher of a row that has tokens already, as one that was preempted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from guided_rows import EOS, PLAN, VOCABULARY, tokens_of
from llguidance import LLParserLimits

from trtrun import SamplingParams
from trtrun.configuration.model_paths import ASSETS
from trtrun.core.guide import Guide, GuideStart
from trtrun.core.nouns import RowAdmission
from trtrun.guiding import grammars as grammars_module
from trtrun.guiding.grammars import Grammars, Spelling
from trtrun.guiding.row_guide import GuideBuilds, RowGuide, go_on
from trtrun.guiding.row_guides import RowGuides
from trtrun.tokens.text import read_tokenizer

LENGTH = 400


@pytest.fixture
def grammars(monkeypatch: pytest.MonkeyPatch) -> Grammars:
    """Those of which a lexer may take little from one mask to the next: enough for some 50 letters."""
    little = LLParserLimits(step_lexer_fuel=200, verbose_errors=False)
    monkeypatch.setattr(grammars_module, "limits", lambda: little)
    tokenizer = read_tokenizer(ASSETS / "target")
    return Grammars(Spelling.of(tokenizer, VOCABULARY, (EOS,)).read())


@pytest.fixture
def letter() -> int:
    tokenizer = read_tokenizer(ASSETS / "target")
    assert tokenizer is not None
    return tokenizer.encode("a", add_special_tokens=False)[0]


def test_a_row_goes_on_behind_a_long_text(grammars: Grammars, letter: int) -> None:
    """And rows of the same guide with it, which share what the lexer may take."""
    guide = Guide("regex", f"[a-z]{{{LENGTH}}}")
    guides = RowGuides(lambda: grammars, VOCABULARY, torch.device("cpu"))
    admissions = []
    for row, num_tokens in enumerate((0, LENGTH - 1)):
        tokens = np.array([1, *[letter] * num_tokens], dtype=np.int32)
        admissions.append(RowAdmission(row, row, tokens, 1, 0, False, SamplingParams(guided=guide)))
    for admission in admissions:
        guides.begin_round(replace(PLAN, admissions=(admission,)))
        rows = [*range(admission.row + 1)]
        masks = guides.masks(rows, 0)
        assert masks is not None and all(letter in tokens_of(masks.bits[row]) for row in rows)


def test_a_matcher_that_is_made_anew_follows_a_long_text(grammars: Grammars, letter: int) -> None:
    start = GuideStart(Guide("regex", f"[a-z]{{{LENGTH}}}"), (letter,) * (LENGTH - 1))
    builds = GuideBuilds(lambda: grammars, 1)
    row = RowGuide(builds.submit(start), LENGTH - 1)
    assert row.matcher is not None and not row.matcher.is_accepting()
    row.follow([letter])
    assert row.matcher is not None and row.matcher.is_accepting()
    builds.close()


def test_following_a_text_takes_no_more_than_masks_on_the_way_do(grammars: Grammars, letter: int) -> None:
    """Nor of those that share a lexer."""
    matchers = [grammars.matcher(Guide("regex", f"[a-z]{{{LENGTH}}}")) for _ in range(2)]
    assert all(go_on(matcher, [letter] * (LENGTH - 1)) and not matcher.is_error() for matcher in matchers)
