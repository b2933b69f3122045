"""What the cycle and its drafters see of engines and of what is between them.

Engines must not be known here: one small protocol for each side stands for `engine.runner.Engine`, whose rows are
`engine.rows.RowState`.

What lies where speculation may look and has one implementation is used by its own name: sampling parameters, the
scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch

from trtrun.core import PrefillChunk, RoundPlan
from trtrun.sampling.keyed_ranks import KeyedRanks
from trtrun.sampling.row_sampling import RowSampling

Step = TypeVar("Step")
"""What an engine prepares for one of several steps; only the engine looks into it."""


class Rows(Protocol):
    """Where every row stands, on the device."""

    @property
    def token_ids(self) -> torch.Tensor:
        """[max_rows, columns] int32: each row's tokens; scratch from its length on."""
        ...

    @property
    def lengths(self) -> torch.Tensor:
        """[max_rows] int64."""
        ...

    @property
    def sampling(self) -> RowSampling:
        """The rows' sampling parameters."""
        ...

    def advance(self, rows: torch.Tensor, num_tokens: torch.Tensor, tokens: torch.Tensor) -> None:
        """Append what a verdict gave to `rows` [rows] int64."""
        ...


class RoundEngine(Protocol):
    """What both engines offer."""

    @property
    def rows(self) -> Rows:
        """The state of every row."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the engine computes."""
        ...

    @property
    def vocab_size(self) -> int:
        """Of the model, padding included."""
        ...

    def begin_round(self, plan: RoundPlan) -> None:
        """Take in admissions, drops and blocks."""
        ...

    def close(self) -> None:
        """Give back what must not outlive the communicators."""
        ...


class ChainEngine(Protocol):
    """Chains of steps that run as one."""

    def rank_steps(
        self,
        first: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        vocab_size: int,
        num_ranked: int,
        keyed: KeyedRanks | None = None,
    ) -> torch.Tensor | None:
        """All steps of rows that choose from the first `vocab_size` ids, as one piece of work, from tokens `first`
        [rows] at positions [rows, steps]: the likeliest, or what `keyed` says. [rows, steps, num_ranked] int64, what
        each step would choose, best first, valid until the next call. None where steps have to be run one by one."""
        ...


class DraftEngine(RoundEngine, ChainEngine, Protocol[Step]):
    """The forwards that a draft model needs."""

    @property
    def has_graphs(self) -> bool:
        """Whether `rank_steps` runs all steps."""
        ...

    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        """Compute the chunks' keys and values."""
        ...

    def catch_up(self, rows: torch.Tensor, counts: Sequence[int], context: int) -> torch.Tensor:
        """Feed each row's last `counts` tokens; [rows, vocab] float32 after the last."""
        ...

    def tables(self, rows: torch.Tensor, context: int) -> torch.Tensor:
        """[rows, blocks] int64: the block tables of `rows` [rows] int64, wide enough for `context` tokens."""
        ...

    def prepare_steps(self, tables: torch.Tensor, positions: torch.Tensor) -> Sequence[Step]:
        """What `decode` needs for each step that feeds rows with `tables` [rows, blocks] at `positions` [rows, steps];
        -1 takes no part."""
        ...

    def decode(self, step: Step, tokens: torch.Tensor) -> torch.Tensor:
        """Feed one token a row, tokens [rows]; [rows, vocab] float32."""
        ...


class AheadRows(Rows, Protocol):
    """Rows behind which there are others for guesses."""

    @property
    def block_tables(self) -> torch.Tensor:
        """[rows, blocks] int64."""
        ...

    def share_tokens(self, rows: Sequence[int], own: Sequence[int]) -> None:
        """Give each of the rows `own` the token ids of the row beside it in `rows`."""
        ...

    def write_tokens(self, rows: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Write tokens that the host knows, from each row's position in `starts` on."""
        ...


class AheadEngine(ChainEngine, Protocol[Step]):
    """What drafting ahead asks of a draft engine: forwards over block tables that are handed in, and copies of keys
    and values."""

    @property
    def rows(self) -> AheadRows:
        """The state of every row, and of every guess behind them."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the engine computes."""
        ...

    @property
    def vocab_size(self) -> int:
        """Of the model, padding included."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        ...

    @property
    def most_positions(self) -> int:
        """Positions that a row may have."""
        ...

    def begin_round(self, plan: RoundPlan) -> None:
        """Take in admissions, drops and blocks."""
        ...

    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        """Compute the chunks' keys and values."""
        ...

    def tables(self, rows: torch.Tensor, context: int) -> torch.Tensor:
        """[rows, blocks] int64: the block tables of `rows` [rows] int64, wide enough for `context` tokens."""
        ...

    def feed(self, tokens: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        """Feed tokens [rows, width] at positions [rows, width], -1 for none; [rows, vocab] float32 after the last."""
        ...

    def prepare_steps(self, tables: torch.Tensor, positions: torch.Tensor) -> Sequence[Step]:
        """See DraftEngine."""
        ...

    def decode(self, step: Step, tokens: torch.Tensor) -> torch.Tensor:
        """Feed one token a row, tokens [rows]; [rows, vocab] float32."""
        ...

    def copy_tokens(self, source: torch.Tensor, target: torch.Tensor, offset: torch.Tensor) -> None:
        """Copy keys and values at `offset` of blocks `source` to the same place of blocks `target`; all [n] int64."""
        ...

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy keys and values of blocks `source` to blocks `target`, both [n] int64."""
        ...

    def close(self) -> None:
        """Give back what must not outlive the communicators."""
        ...


class TargetEngine(RoundEngine, Protocol):
    """The forward that verification needs."""

    def verify_forward(self, plan: RoundPlan, draft_tokens: torch.Tensor, draft_lens: torch.Tensor) -> torch.Tensor:
        """[sampled_rows, draft_len + 1, vocab] float32."""
        ...


class VerdictLink(Protocol):
    """Verdicts of the target leader to other engine ranks."""

    def send_verdict(self, num_tokens: torch.Tensor, tokens: torch.Tensor) -> None:
        """On the target leader."""
        ...

    def receive_verdict(self, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """On every other engine rank."""
        ...


class DraftLink(VerdictLink, Protocol):
    """Draft → target packets and target → draft verdicts: `parallel.link.Link`, and in the rehearsal of the largest
    round (`roles.largest_round`) one that carries nothing."""

    def send_draft(self, tokens: torch.Tensor, draft_lens: torch.Tensor, draft_probs: torch.Tensor | None) -> None:
        """On the draft leader."""
        ...

    def receive_draft(
        self, rows: int, draft_len: int, probability_rows: int, vocab: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """On every target rank: tokens, draft_lens, draft_probs; the last reach the target leader alone."""
        ...
