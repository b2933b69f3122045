"""A machine for tests of drafting ahead: what its draft and target take is written down, with noise, and the clock is
made up, so that it is known what drafting ahead of verdicts and behind them give."""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from trtrun.speculation.ahead.ahead_costs import FEWEST_SAMPLES, AheadCosts, AheadRound
from trtrun.speculation.ahead.policy import AheadPolicy

DRAFT_LEN = 5
STEPS = (8, 32, 128)
"""Numbers of guesses that rounds may have on GPUs, where 32 rows may run."""

_ROUNDS_BETWEEN_CHANCES = 8


@dataclass
class AheadMachine:
    """A draft and a target on a device each. Times are milliseconds.

    Attributes:
        rows: that decode, all the time.
        verifying: of a round.
        drafting: of a fresh draft, with the way of the verdict and of the draft.
        anticipating: of drafting ahead, by the number of guesses, with the way of these.
        hits: how often a row's verdict is among so many guesses.
        acceptance: chance of each draft token, once those before it were accepted.
        noise: deviation of the times, as a share of them.
    """

    rows: int
    verifying: float
    drafting: float
    anticipating: Mapping[int, float]
    hits: Mapping[int, float]
    acceptance: float = 0.82
    noise: float = 0.05
    generator: random.Random = field(default_factory=lambda: random.Random(7))

    def costs(self) -> AheadCosts:
        """What a start on this machine measures, in seconds: medians of a few rounds."""
        ahead = {count: self._median(max(self.verifying, took)) for count, took in self.anticipating.items()}
        return AheadCosts(self.verifying / 1e3, self._median(self.drafting + self.verifying), ahead)

    def _median(self, milliseconds: float) -> float:
        return statistics.median(milliseconds / 1e3 * self._noise() for _ in range(FEWEST_SAMPLES))

    def speed(self, policy: AheadPolicy, tokens: int) -> float:
        """Tokens a millisecond and row, until rows have so many on average."""
        gained = took = 0.0
        for milliseconds, of_round in self.play(policy):
            gained, took = gained + of_round / self.rows, took + milliseconds
            if gained >= tokens:
                break
        return gained / took

    def play(self, policy: AheadPolicy) -> Iterator[tuple[float, int]]:
        """Rounds as the policy wants them, without end: milliseconds, and tokens of all rows. A plan goes out before
        the verdict of the round before is known."""
        plans = deque(self._decide(policy) for _ in range(2))
        drafted, verdict, guessed, number = 0.0, 0.0, 0, 0
        while True:
            guesses, threshold = plans.popleft()
            began = max(drafted, verdict)
            hits = [bool(guessed) and self.generator.random() < self.hits[guessed] for _ in range(self.rows)]
            is_redrafted = not all(hits) and hits.count(False) >= threshold
            drafting = self.drafting * self._noise() if is_redrafted else 0.0
            before, verdict = verdict, began + drafting + self.verifying * self._noise()
            drafted = began + drafting + (self.anticipating[guesses] * self._noise() if guesses else 0.0)
            lens = [DRAFT_LEN if hit or is_redrafted else 0 for hit in hits]
            gained, took = [1 + self._accept(length) for length in lens], verdict - before
            number += 1
            if number % _ROUNDS_BETWEEN_CHANCES == 0:
                policy.record_chances(self._chances())
            verifying = self.verifying / 1e3
            of_draft = (guessed, sum(hits), is_redrafted)
            policy.record_round(AheadRound(self.rows, DRAFT_LEN, *of_draft, verifying, took / 1e3, gained, lens))
            yield took, sum(gained)
            guessed = guesses
            plans.append(self._decide(policy))

    def _decide(self, policy: AheadPolicy) -> tuple[int, int]:
        """Guesses of a plan, and its redraft_threshold."""
        return policy.num_guesses(self.rows, DRAFT_LEN), policy.redraft_threshold(self.rows, DRAFT_LEN)

    def _chances(self) -> list[float]:
        """How likely a row's verdict is among 1, 2, … guesses for it."""
        counts = sorted(count for count in self.hits if count >= self.rows)
        return [self.hits[max((c for c in counts if c <= n * self.rows), default=counts[0])] for n in range(1, 49)]

    def _accept(self, draft_len: int) -> int:
        count = 0
        while count < draft_len and self.generator.random() < self.acceptance:
            count += 1
        return count

    def _noise(self) -> float:
        return max(0.5, self.generator.gauss(1.0, self.noise))


H200 = {
    1: AheadMachine(1, 4.2, 4.5, {8: 5.5, 32: 7.2, 128: 12.0}, {8: 0.82, 32: 0.97, 128: 0.97}),
    8: AheadMachine(8, 4.95, 5.0, {8: 5.8, 32: 6.8, 128: 8.4}, {8: 0.5, 32: 0.75, 128: 0.93}),
    32: AheadMachine(32, 6.7, 6.1, {8: 6.0, 32: 7.0, 128: 8.8}, {8: 0.1, 32: 0.45, 128: 0.72}),
}
"""An 8B target with a heavy draft on two H200, by number of rows (30 November 2026)."""
