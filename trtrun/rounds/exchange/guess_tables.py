"""Drafts that were made for the likely verdicts of a round, told to the target before the verdict is known.

A rank that drafts ahead sends all of them at once: a table with a line for each verdict that it has guessed. The target
finds the verdict in it and goes on, and the draft rank, which hears of the verdict later, finds the same line: so both
have the same draft, and neither waited for the other. The two agree only as long as a line is looked up in one way; a
row that the target verified less of than its draft rank has proposed is a case that draft ranks know.

It knows tables and verdicts on the host. It does not know a device, or how tables travel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from parallel.transports.device_gate import KEY_NUMBERS
from trtrun.core.nouns import RoundPlan


@dataclass(frozen=True)
class KnownVerdict:
    """A verdict on the host.

    Attributes:
        plan: of its round.
        num_tokens: [sampled rows] int64: what each row gains.
        tokens: [sampled rows, width] int64.
    """

    plan: RoundPlan
    num_tokens: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]


def foreseen_rows(table: npt.NDArray[np.int64], plan: RoundPlan, before: KnownVerdict) -> tuple[int, ...] | None:
    """Which of a plan's decode rows have a draft in a table.

    Args:
        table: [guesses, KEY_NUMBERS + steps] of the verdict before the plan's round: a row of the batch, how many of
            its draft's tokens are accepted, the token that follows, and the draft behind that one. Of lines for the
            same verdict the first counts.
        plan: the round's.
        before: that verdict.

    Returns:
        0 or 1 for each row; None where so many have none that a draft is waited for which is made for them.
    """
    guessed = set(map(tuple, table[:, :KEY_NUMBERS].tolist()))
    gained = zip(before.plan.sampled_rows, before.num_tokens.tolist(), before.tokens.tolist(), strict=True)
    came_true = {row for row, count, tokens in gained if count and (row, count - 1, tokens[count - 1]) in guessed}
    lens = zip(plan.decode_rows.tolist(), plan.draft_lens.tolist(), strict=True)
    asked = [(row in came_true, most > 0) for row, most in lens]
    missing = sum(is_asked and not is_there for is_there, is_asked in asked)
    if missing and missing >= plan.redraft_from:
        return None
    return tuple(int(is_there and is_asked) for is_there, is_asked in asked)
