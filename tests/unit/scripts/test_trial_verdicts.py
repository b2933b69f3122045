"""How the trials judge answers (scripts/soak): what is neither the right answer nor an error that may be is wrong."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.soak.judged_clients import Reply, Verdict
from scripts.soak.questions import Completion, Question

QUESTION = Question({}, (Completion("ab", (1, 2), "stop"), Completion("cde", (3, 4, 5), "length")))
WHOLE = Reply(
    200, {0: "ab", 1: "cde"}, {0: [1, 2], 1: [3, 4, 5]}, {0: "stop", 1: "length"}, is_whole=True, arrivals=[1.0, 2.0]
)
PART: dict[str, Any] = {"texts": {0: "a"}, "tokens": {0: [1]}, "reasons": {0: None}, "is_whole": False}
ERROR = {"message": "the server is ending"}


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, Verdict.EXACT),
        (PART | {"is_cut": True}, Verdict.CUT),
        (PART | {"broke": "ReadError"}, Verdict.BROKEN),
        (PART | {"errors": [ERROR]}, Verdict.ERROR),
        ({"status": 503, "texts": {}, "tokens": {}, "reasons": {}, "errors": [ERROR]}, Verdict.REFUSED),
        (PART, Verdict.WRONG),
        (PART | {"tokens": {0: [2]}, "is_cut": True}, Verdict.WRONG),
        (PART | {"texts": {0: "b"}, "is_cut": True}, Verdict.WRONG),
        (PART | {"errors": [ERROR, ERROR]}, Verdict.WRONG),
        (PART | {"errors": [{"message": "two\nlines"}]}, Verdict.WRONG),
        (PART | {"errors": [{"message": ""}]}, Verdict.WRONG),
        ({"tokens": {0: [1, 2], 1: [3, 4]}}, Verdict.WRONG),
        ({"texts": {0: "ab", 1: "cdf"}}, Verdict.WRONG),
        ({"reasons": {0: "stop", 1: "stop"}}, Verdict.WRONG),
        ({"texts": {0: "ab", 1: "cde", 2: ""}}, Verdict.WRONG),
    ],
)
def test_only_the_right_answer_is_exact(changes: dict[str, Any], verdict: Verdict) -> None:
    assert replace(WHOLE, **changes).judge(QUESTION)[0] is verdict


def test_pauses_are_between_tokens_and_begin_with_the_kill() -> None:
    reply = Reply(arrivals=[1.0, 2.0, 7.0, 8.5])
    assert reply.longest_pause_after(3.0) == 4.0
    assert reply.longest_pause_after(0.0) == 5.0
    assert reply.longest_pause_after(7.5) == 1.0
    assert reply.longest_pause_after(9.0) is None
