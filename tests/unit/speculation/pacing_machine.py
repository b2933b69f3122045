"""A machine for tests of pacing: its costs and acceptance are written down, with noise, so that the best is known."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from trtrun.speculation.pacing import Pacer
from trtrun.speculation.round_costs import RoundCosts

MOST = 5


@dataclass
class Machine:
    """Rounds of a known cost in milliseconds: drafting by token, verifying by what waits longest, memory or arithmetic.

    Attributes:
        acceptance: chance of each draft token, once those before it were accepted.
        noise: deviation of the times, as a share of them.
    """

    acceptance: float
    draft_ms: float = 2.5
    weights_ms: float = 18.0
    position_ms: float = 0.9
    noise: float = 0.03
    generator: random.Random = field(default_factory=lambda: random.Random(5))

    def cost(self, num_rows: int, draft_len: int) -> float:
        """Milliseconds of a round, without noise."""
        drafting = self.draft_ms * (draft_len + 1) * (1 + num_rows / 16)
        return drafting + max(self.weights_ms, self.position_ms * num_rows * (draft_len + 1))

    def goodput(self, num_rows: int, draft_len: int) -> float:
        """Tokens a millisecond that a row may expect."""
        return sum(self.acceptance**count for count in range(draft_len + 1)) / self.cost(num_rows, draft_len)

    def share_of_good(self, num_rows: int, chosen: list[int]) -> float:
        """How many of these choices have a goodput within a tenth of the best."""
        goodputs = [self.goodput(num_rows, draft_len) for draft_len in range(MOST + 1)]
        return sum(goodputs[draft_len] >= 0.9 * max(goodputs) for draft_len in chosen) / len(chosen)

    def run(self, pacer: Pacer, num_rows: int, rounds: int) -> list[int]:
        """Run rounds as the pacer wants them; returns the draft_len of each."""
        chosen = []
        for _ in range(rounds):
            draft_len = pacer.choose(num_rows)
            chosen.append(draft_len)
            accepted = [self._accept(draft_len) for _ in range(num_rows)]
            pairs = [(draft_len, count) for count in accepted] if draft_len else []
            pacer.record(num_rows, draft_len, self.cost(num_rows, draft_len) * self._noise() / 1e3, pairs)
        return chosen

    def speed(self, pacer: Pacer, num_rows: int, tokens: int) -> float:
        """Tokens a millisecond and row over rounds as the pacer wants them, until a row has so many."""
        gained = took = 0.0
        while gained < tokens:
            draft_len = pacer.choose(num_rows)
            accepted = [self._accept(draft_len) for _ in range(num_rows)]
            cost = self.cost(num_rows, draft_len) * self._noise()
            pacer.record(num_rows, draft_len, cost / 1e3, [(draft_len, count) for count in accepted if draft_len])
            gained, took = gained + 1 + sum(accepted) / num_rows, took + cost
        return gained / took

    def costs(self) -> RoundCosts:
        """What a start on this machine measures."""
        lens = (0, 1, MOST // 2, MOST)
        return RoundCosts(
            {rows: {n: self.cost(rows, n) * self._noise() / 1e3 for n in lens} for rows in (1, 4, 16, 64)}
        )

    def _accept(self, draft_len: int) -> int:
        count = 0
        while count < draft_len and self.generator.random() < self.acceptance:
            count += 1
        return count

    def _noise(self) -> float:
        return max(0.5, self.generator.gauss(1.0, self.noise))
