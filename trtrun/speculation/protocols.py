"""What drafters and the round see of engines.

Engines must not be known here: a protocol for each side stands for `engine.runner.Engine`, whose rows are
`engine.rows.RowState`; tests have engines without a model.

What lies where speculation may look and has one implementation is used by its own name: sampling parameters, the
scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from trtrun.core.nouns import Draft, FedPart, PrefillChunk, RoundPlan, Step
from trtrun.sampling.distributions import KeyedRanks
from trtrun.sampling.row_sampling import RowSampling

PreparedStep = TypeVar("PreparedStep")
"""What an engine prepares for one of several steps; only the engine looks into it."""

GrowTree = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Feeds the next nodes of R rows' trees: takes `parents` [R, F] int64, of each node the place of its parent among those
that were fed before, 0 at first; tokens [R, F] int64; and hidden [R, before, hidden_size], the states behind those that
were fed before. Returns the states behind the nodes, [R, F, hidden_size]. Collective."""


DrawTree = Callable[[torch.Tensor, torch.Tensor, GrowTree], torch.Tensor]
"""Draws up the trees of R rows: takes `lens` [R] int64, how deep each needs to be, and hidden [R, hidden_size], the
states behind which the first nodes are chosen, and what feeds the others. Returns [R, width] int64."""


class Texts(Protocol):
    """What rows say."""

    @property
    def token_ids(self) -> torch.Tensor:
        """[max_rows, columns] int32: each row's tokens; scratch from its length on."""
        ...

    @property
    def lengths(self) -> torch.Tensor:
        """[max_rows] int64."""
        ...


class Rows(Texts, Protocol):
    """Where every row stands, on the device; behind the real rows those of a draft engine's guesses."""

    @property
    def block_tables(self) -> torch.Tensor:
        """[max_rows, blocks] int64."""
        ...

    @property
    def sampling(self) -> RowSampling:
        """The rows' sampling parameters."""
        ...

    def advance(self, rows: torch.Tensor, num_tokens: torch.Tensor, tokens: torch.Tensor) -> None:
        """Append what a verdict gave to `rows` [rows] int64."""
        ...

    def share_tokens(self, rows: Sequence[int], own: Sequence[int]) -> None:
        """Give each of the rows `own` the token ids of the row beside it in `rows`."""
        ...

    def write_tokens(self, rows: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Write tokens that the host knows, from each row's position in `starts` on."""
        ...


class KeptRows(Rows, Protocol):
    """Rows that whoever has them keeps by plans and verdicts."""

    def apply(self, plan: RoundPlan) -> None:
        """Take in what the plan changes."""
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
        """The model's vocabulary size, padding included."""
        ...

    def begin_round(self, plan: RoundPlan) -> None:
        """Take in admissions, drops and blocks."""
        ...

    def read_adapter(self, path: Path, on_progress: Callable[[], None]) -> Callable[[int], None]:
        """Read an adapter, beside forwards, and say when a part of it is there; what comes back fills a slot that no
        row has. Raises CheckpointError, and nothing changes, where that fails."""
        ...

    def empty_slot(self, slot: int) -> None:
        """Empty a slot of adapters that no row has."""
        ...

    def close(self) -> None:
        """Give back what must not outlive the communicators."""
        ...


class DraftEngine(RoundEngine, Protocol[PreparedStep]):
    """The forwards that a draft model needs: over the rows' own block tables, or over tables that are handed in, as
    those of guesses; and copies of keys and values."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        ...

    @property
    def most_positions(self) -> int:
        """Positions that a row may have."""
        ...

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

    def look_ahead(
        self, rows: torch.Tensor, counts: Sequence[int], most: Sequence[int], mask_token: int, context: int
    ) -> torch.Tensor:
        """Feed each row's last `counts` tokens, and behind them mask tokens for `most` places; [rows, places, vocab]
        float32, after the newest token and after the masks."""
        ...

    def tables(self, rows: torch.Tensor, context: int) -> torch.Tensor:
        """[rows, blocks] int64: the block tables of `rows` [rows] int64, wide enough for `context` tokens."""
        ...

    def feed(
        self, tokens: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor, num_last: int = 1
    ) -> torch.Tensor:
        """Feed tokens [rows, width] at positions [rows, width], -1 for none; [rows * num_last, vocab] float32 after the
        last ones of each row."""
        ...

    def prepare_steps(self, tables: torch.Tensor, positions: torch.Tensor) -> Sequence[PreparedStep]:
        """What `decode` needs for each step that feeds rows with `tables` [rows, blocks] at `positions` [rows, steps];
        -1 takes no part."""
        ...

    def decode(self, step: PreparedStep, tokens: torch.Tensor) -> torch.Tensor:
        """Feed one token a row, tokens [rows]; [rows, vocab] float32."""
        ...

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

    def copy_tokens(self, source: torch.Tensor, target: torch.Tensor, offset: torch.Tensor) -> None:
        """Copy keys and values at `offset` of blocks `source` to the same place of blocks `target`; all [n] int64."""
        ...

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy keys and values of blocks `source` to blocks `target`, both [n] int64."""
        ...

    def share_states(self, rows: Sequence[int], own: Sequence[int]) -> None:
        """Have each of the rows `own` go on from where the row beside it in `rows` stands, in layers that keep states
        of rows."""
        ...


class PositionHeads(Protocol):
    """Heads on the target ranks of which each proposes for one place, from one hidden state of a row.

    Attributes:
        num_heads: head h is for what stands h + 1 places behind the token that was chosen from the state.
        hidden_size, dtype: of states.
    """

    num_heads: int
    hidden_size: int
    dtype: torch.dtype

    def logits(self, hidden: torch.Tensor, count: int) -> torch.Tensor | None:
        """[rows, count, vocab] float32 of the first `count` heads, for hidden [rows, hidden_size] behind the target's
        final norm; None on ranks of the group that do not decide. Collective."""
        ...

    def share(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the rank that decides has in `tokens`, on all ranks. Collective."""
        ...


class RunningHeads(Protocol[PreparedStep]):
    """Heads that draft step by step from hidden states.

    Attributes:
        hidden_size, dtype: of states.
    """

    hidden_size: int
    dtype: torch.dtype

    @property
    def rows(self) -> Rows:
        """The target's, or their own."""
        ...

    @property
    def num_graphs(self) -> int:
        """CUDA graphs that they hold."""
        ...

    def warm_up(self) -> None:
        """Make the graphs of what is fed and drafted in rounds, where there are any. Collective."""
        ...

    def close(self) -> None:
        """Give back what must not outlive the communicators."""
        ...

    def tables(self, rows: torch.Tensor, context: int) -> torch.Tensor:
        """[rows, blocks] int64: the block tables of `rows` [rows] int64, wide enough for `context` tokens."""
        ...

    def prepare_steps(self, tables: torch.Tensor, positions: torch.Tensor) -> Sequence[PreparedStep]:
        """What `step` needs to feed rows with `tables` [R, blocks] at positions [R, steps]; -1 takes no part."""
        ...

    def step(self, batch: PreparedStep, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Feed tokens [R] with hidden [R, hidden_size], which is overwritten; the states [R, hidden_size] behind them.
        Collective."""
        ...

    def logits(self, state: torch.Tensor) -> torch.Tensor | None:
        """[n, vocab] float32 of states [n, hidden_size]; None on ranks of the group that do not decide. Collective."""
        ...

    def share(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the rank that decides has in `tokens`, on all ranks. Collective."""
        ...


class FeatureHeads(RunningHeads[PreparedStep], Protocol[PreparedStep]):
    """Heads that keep keys and values of every token: on the target ranks, or on a rank of their own.

    Attributes:
        tapped_shape: hidden states of the target that are read of a token, and numbers of each.
    """

    tapped_shape: tuple[int, int]

    def begin_round(self, plan: RoundPlan) -> None:
        """Take in admissions, drops and blocks, after the target has where the rows are its own."""
        ...

    def feed(self, parts: Sequence[FedPart], context: int) -> torch.Tensor:
        """Feed rows some tokens each, beside the target's hidden states; the states [tokens, hidden_size] behind them,
        in order, valid until the next call. `context` is an upper bound of positions, plus one. Collective."""
        ...

    def draft(
        self,
        rows: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        context: int,
        keyed: KeyedRanks | None,
    ) -> torch.Tensor | None:
        """Choose a token behind each state of hidden [R, hidden_size], feed it, and so on, as one piece of work, for
        `rows` [R] int64, at positions [R, steps] int64, -1 for none: the likeliest, or what `keyed` says, whose
        lengths are the first token's places. [R, steps + 1] int64, equal on all ranks; None where steps have to be run
        one by one. Collective."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        ...

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy keys and values of blocks `source` to blocks `target`, both [n] int64."""
        ...

    def begin_tree(self, rows: torch.Tensor, positions: torch.Tensor, context: int) -> GrowTree:
        """What feeds trees of `rows` [R] depth by depth, at positions [R, steps]; -1 takes no part."""
        ...

    def tree_contexts(self, rows: int, depth: int) -> Sequence[int]:
        """For which contexts trees of so many rows, so deep, are drawn up by `draw_tree`; none where they are not."""
        ...

    def draw_tree(
        self,
        draw: DrawTree,
        rows: torch.Tensor,
        positions: torch.Tensor,
        lens: torch.Tensor,
        hidden: torch.Tensor,
        context: int,
        width: int,
    ) -> torch.Tensor:
        """What `draw` returns, always the same one for a depth: [R, width] int64, valid until the next call, for rows
        as in `begin_tree`. It is one piece of work, which does not look at the host. Collective."""
        ...


class MaskedHeads(FeatureHeads[PreparedStep], Protocol[PreparedStep]):
    """Heads on the target ranks that keep keys and values of every token, and draft all tokens of a row in one forward.

    Attributes:
        looks_back: whether what they say of a place depends on the token before.
    """

    looks_back: bool

    def guess(self, rows: torch.Tensor, asked: list[int], draft_len: int, context: int) -> torch.Tensor:
        """Run a draft of each of `rows` [R] int64, which need as many tokens as `asked` says, `draft_len` at most; what
        says the first token, the second, and so on: [R, draft_len, hidden]. Collective."""
        ...

    def logits_behind(self, state: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor | None:
        """[n, vocab] float32 of states [n, hidden], behind tokens `before` [n] where they look back; None on ranks of
        the group that do not decide. Collective."""
        ...

    def warm_up_rows(self, count: int, draft_len: int) -> None:
        """Feed and draft as rounds of so many rows do. Collective."""
        ...


class ReadingHeads(RunningHeads[PreparedStep], Protocol[PreparedStep]):
    """Heads on the target ranks that attend in what the target keeps of rows, and keep nothing."""

    def warm_up_rows(self, count: int) -> None:
        """Run a step as rounds of so many rows do. Collective."""
        ...

    def begin(self, tapped: torch.Tensor) -> torch.Tensor:
        """The target's hidden states [n, taps, its hidden] → [n, hidden_size], which are fed beside a token."""
        ...

    def newest(self, rows: torch.Tensor) -> torch.Tensor:
        """[R] int64: the newest token of each of `rows` [R] int64."""
        ...

    def follow(
        self,
        rows: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        context: int,
        keyed: KeyedRanks | None,
    ) -> torch.Tensor | None:
        """Feed the newest tokens of `rows` [R] int64 with hidden [R, hidden_size], choose those that follow, feed them,
        and so on, as one piece of work, at positions [R, steps] int64, -1 for none: the likeliest, or what `keyed`
        says, whose lengths are the first chosen token's places. [R, steps] int64, equal on all ranks; None where steps
        have to be run one by one. Collective."""
        ...


class TargetEngine(RoundEngine, Protocol):
    """The forward that verification needs."""

    def verify_forward(self, plan: RoundPlan, draft: Draft) -> Step:
        """Logits of the round's rows, and what is tapped."""
        ...

    def keep_path(self, plan: RoundPlan, accepted: torch.Tensor) -> None:
        """Have the plan's decode rows go on from the path `accepted` [decode_rows] int64 of their trees."""
        ...


class TargetGroup(Protocol):
    """The ranks of the target, on one of them."""

    @property
    def decides(self) -> bool:
        """Whether this is the rank that decides, which alone has the target's logits."""
        ...

    def share(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the rank that decides has in `tokens`, on all ranks; it may be overwritten. Collective."""
        ...
