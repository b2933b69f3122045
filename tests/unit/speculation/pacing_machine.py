"""A machine for tests of pacing: its costs and acceptance are written down, with noise, so that the best is known."""

from __future__ import annotations

import random
from collections import deque
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

    def cost(self, num_rows: int, draft_len: int, num_drafting: int | None = None) -> float:
        """Milliseconds of a round, without noise; of all rows draft `num_drafting`, or all."""
        if num_drafting is None:
            num_drafting = num_rows
        drafting = self.draft_ms * (draft_len + 1) * (1 + num_drafting / 16)
        return drafting + max(self.weights_ms, self.position_ms * (num_rows + num_drafting * draft_len))

    def goodput(self, num_rows: int, draft_len: int) -> float:
        """Tokens a millisecond that a row may expect."""
        return sum(self.acceptance**count for count in range(draft_len + 1)) / self.cost(num_rows, draft_len)

    def share_of_good(self, num_rows: int, chosen: list[int]) -> float:
        """How many of these choices have a goodput within a tenth of the best."""
        goodputs = [self.goodput(num_rows, draft_len) for draft_len in range(MOST + 1)]
        return sum(goodputs[draft_len] >= 0.9 * max(goodputs) for draft_len in chosen) / len(chosen)

    def run(self, pacer: Pacer, num_rows: int, rounds: int) -> list[int]:
        """Run rounds as the pacer wants them; returns the draft_len of each."""
        return [self._round(pacer, num_rows)[0] for _ in range(rounds)]

    def speed(self, pacer: Pacer, num_rows: int, tokens: int) -> float:
        """Tokens a millisecond and row over rounds as the pacer wants them, until a row has so many."""
        gained = took = 0.0
        while gained < tokens:
            _, accepted, cost = self._round(pacer, num_rows)
            gained, took = gained + 1 + accepted / num_rows, took + cost
        return gained / took

    def text(self, pacer: Pacer, num_rows: int, tokens: int, plans_ahead: int = 1) -> float:
        """Milliseconds until each of some rows has gained so many tokens, where `plans_ahead` plans are out before the
        verdict that they follow, as on GPUs."""
        left, took = [tokens] * num_rows, 0.0
        out = deque[tuple[list[int], int, int, bool]]()
        while any(count > 0 for count in left):
            rows = [row for row, count in enumerate(left) if count > len(out)]
            while rows and len(out) <= plans_ahead:
                draft_len, most = pacer.choose(len(rows)), pacer.most_drafting(len(rows))
                num_drafting = min(len(rows), most or len(rows)) if draft_len else 0
                pacer.note_plan(len(rows), 0, draft_len, num_drafting)
                out.append((rows, draft_len, num_drafting, most is not None and draft_len > 0))
                rows = [row for row, count in enumerate(left) if count > len(out)]
            rows, draft_len, num_drafting, is_partial = out.popleft()
            cost = self.cost(len(rows), draft_len, num_drafting) * self._noise()
            accepted = [self._accept(draft_len) for _ in range(num_drafting)]
            for place, row in enumerate(rows):
                left[row] -= 1 + (accepted[place] if place < num_drafting else 0)
            pairs = [(draft_len, count) for count in accepted]
            pacer.record(len(rows), draft_len, cost / 1e3, pairs, is_partial=is_partial)
            took += cost
        return took

    def fixed_text(self, num_rows: int, tokens: int, draft_len: int) -> float:
        """The same where each round drafts so many, the mean of many texts."""
        per_round = sum(self.acceptance**count for count in range(draft_len + 1))
        return tokens / per_round * self.cost(num_rows, draft_len)

    def _round(self, pacer: Pacer, num_rows: int) -> tuple[int, int, float]:
        """draft_len, accepted tokens of all rows, and milliseconds."""
        draft_len, most = pacer.choose(num_rows), pacer.most_drafting(num_rows)
        num_drafting = num_rows if most is None else min(most, num_rows)
        pacer.note_plan(num_rows, 0, draft_len, num_drafting if draft_len else 0)
        pairs = [(draft_len, self._accept(draft_len)) for _ in range(num_drafting)] if draft_len else []
        cost = self.cost(num_rows, draft_len, num_drafting) * self._noise()
        pacer.record(num_rows, draft_len, cost / 1e3, pairs, is_partial=most is not None and draft_len > 0)
        return draft_len, sum(count for _, count in pairs), cost

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
