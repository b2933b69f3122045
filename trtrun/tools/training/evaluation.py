"""How many draft tokens of held-out rows would be accepted. It knows tables of matches, not who drafted them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from parallel.communicator import Communicator
from trtrun.tools.training.data import DataRow

Matches = Callable[[Sequence[DataRow]], list[torch.Tensor]]


@dataclass(frozen=True)
class Acceptance:
    """What was measured on held-out rows.

    Attributes:
        tokens_per_round: accepted + 1, of rounds on greedy rows; None where there is no such round.
        rounds: how many these were.
        by_depth: share of all places, of sampled rows too, whose drafts match up to a depth and at it.
    """

    tokens_per_round: float | None
    rounds: int
    by_depth: list[float]


def walk(matches: torch.Tensor) -> tuple[int, int]:
    """Tokens and rounds of greedy speculative decoding along a row whose completion is the target's own choice.

    A round that could reach beyond the row's end is not counted, nor what comes after it.

    Args:
        matches: [places, depths] bool; see `DraftTraining.matches`.
    """
    num_places, num_depths = matches.shape
    accepted = matches.long().cumprod(1).sum(1).tolist()
    place = rounds = 0
    while place + num_depths < num_places:
        place += accepted[place] + 1
        rounds += 1
    return place, rounds


@torch.no_grad()
def measure(
    find_matches: Matches,
    rows: Sequence[DataRow],
    batch_size: int,
    num_depths: int,
    communicator: Communicator,
    on_share_done: Callable[[], None] = lambda: None,
) -> Acceptance:
    """Measure on all rows, each rank on its share. Collective.

    Args:
        find_matches: of some rows.
        rows: the same on all ranks.
        batch_size: rows at once.
        num_depths: draft tokens of a round.
        communicator: of all ranks.
        on_share_done: called once this rank's share is done, before it waits for the others'.
    """
    own = rows[communicator.rank :: communicator.size]
    totals = torch.zeros(2 + 2 * num_depths, dtype=torch.int64)
    for start in range(0, len(own), batch_size):
        batch = own[start : start + batch_size]
        for row, matches in zip(batch, find_matches(batch), strict=True):
            if row.is_greedy:
                totals[:2] += torch.tensor(walk(matches))
            for depth in range(min(num_depths, len(matches))):
                reached = matches[: len(matches) - depth, : depth + 1]
                totals[2 + depth] += int(reached.all(1).sum())
                totals[2 + num_depths + depth] += len(reached)
    on_share_done()
    tokens, rounds, *rest = communicator.all_reduce(totals.to(communicator.device)).tolist()
    by_depth = [
        round(good / max(1, every), 4) for good, every in zip(rest[:num_depths], rest[num_depths:], strict=True)
    ]
    return Acceptance(round(tokens / rounds, 4) if rounds else None, rounds, by_depth)
