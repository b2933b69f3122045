"""What has come of all requests of a server, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from trtrun.core.outputs import CompletionDelta
from trtrun.core.request_statistics import RequestStatistics

_NOTHING = RequestStatistics()


@dataclass
class FrontTotals:
    """Since the server's start.

    Attributes:
        num_prompt_tokens: of requests that were let in, each prompt once.
        num_looked_up_tokens: of these, once for each completion: what was looked up in the KV store.
        num_cached_tokens: of these, those whose keys and values were there.
        num_tokens: generated.
        num_row_rounds: rounds summed over the rows that verified in them.
        num_drafts: row rounds that verified a draft.
        num_draft_tokens, num_accepted_draft_tokens: verified in these, and kept.
        acceptance_histogram: how many row rounds kept 0, 1, … draft tokens.
        num_preemptions: rows that gave their blocks to others, and were computed again.
        num_restarts: of the engine.
    """

    num_prompt_tokens: int = 0
    num_looked_up_tokens: int = 0
    num_cached_tokens: int = 0
    num_tokens: int = 0
    num_row_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    num_restarts: int = 0

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens that a round yields a row; None before the first."""
        return 1 + self.num_accepted_draft_tokens / self.num_row_rounds if self.num_row_rounds else None

    def add(self, delta: CompletionDelta, before: RequestStatistics | None) -> None:
        """Add what a piece brought, whose statistics go on from those `before`."""
        before, now = before or _NOTHING, delta.statistics
        self.num_tokens += len(delta.token_ids)
        self.num_cached_tokens += now.num_cached_prompt_tokens - before.num_cached_prompt_tokens
        self.num_row_rounds += now.num_rounds - before.num_rounds
        self.num_drafts += now.num_drafts - before.num_drafts
        self.num_draft_tokens += now.num_draft_tokens - before.num_draft_tokens
        self.num_accepted_draft_tokens += now.num_accepted_draft_tokens - before.num_accepted_draft_tokens
        self.num_preemptions += now.num_preemptions - before.num_preemptions
        counts, earlier = self.acceptance_histogram, before.acceptance_histogram
        counts += [0] * (len(now.acceptance_histogram) - len(counts))
        for accepted, number in enumerate(now.acceptance_histogram):
            counts[accepted] += number - (earlier[accepted] if accepted < len(earlier) else 0)
