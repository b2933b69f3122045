"""Where each row of the running batch stands, as tensors on the engine's device.

Every engine rank keeps its own copy: the plan says who runs, verdicts say how far each row got. Nothing here is copied
back to the host. It knows tokens, lengths, block tables and sampling parameters. It does not know requests, blocks'
owners or models.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trtrun.core.nouns import RoundPlan, RowAdmission
from trtrun.kernels.chooser import operations_of
from trtrun.kvcache.blocks import NULL_BLOCK
from trtrun.sampling.row_sampling import RowSampling
from trtrun.tensors import device_integers


class RowState:
    """Tokens, length, block table and sampling parameters of every row.

    Attributes:
        token_ids: [max_rows, max_seq_len + slack] int32: the row's tokens; entries from its length on are scratch,
            where the draft writes what it proposes.
        lengths: [max_rows] int64: tokens of the row, the newest one included (its keys are not in the store yet).
        block_tables: [max_rows, max_blocks] int64; 0 where no block is assigned.
        sampling: the rows' sampling parameters.
        new_blocks: the rows that the newest plan gives blocks, and which, [n] int64 each; None where it gives none.
        max_draft_len: most tokens drafted in a round.
        num_guesses: rows at the end that are for guesses.
    """

    def __init__(
        self,
        max_rows: int,
        max_seq_len: int,
        block_size: int,
        max_draft_len: int,
        vocab_size: int,
        device: torch.device,
        num_guesses: int = 0,
        *,
        ends_thoughts: bool = True,
    ) -> None:
        """Make `max_rows` rows, and behind them `num_guesses` more for guesses of a draft engine. Where nothing is
        decided, budgets for thoughts need not be followed: `ends_thoughts`."""
        max_rows += num_guesses
        self.num_guesses = num_guesses
        columns, max_blocks = row_columns(max_seq_len, block_size, max_draft_len)
        self.max_draft_len = max_draft_len
        self.device = device
        self.block_size = block_size
        self.token_ids = torch.zeros((max_rows, columns), dtype=torch.int32, device=device)
        self.lengths = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.block_tables = torch.zeros((max_rows, max_blocks), dtype=torch.int64, device=device)
        self.new_blocks: tuple[torch.Tensor, torch.Tensor] | None = None
        self.sampling = RowSampling(max_rows, vocab_size, device, ends_thoughts=ends_thoughts)

    def beside(self, vocab_size: int) -> RowState:
        """Make as many rows as long for drafts, of the same texts in another vocabulary of `vocab_size` tokens."""
        columns = self.token_ids.shape[1] - self.max_draft_len - 2
        rows = len(self.lengths) - self.num_guesses
        sizes = rows, columns, self.block_size, self.max_draft_len, vocab_size
        return RowState(*sizes, self.device, ends_thoughts=False)

    @staticmethod
    def num_bytes(max_rows: int, max_seq_len: int, block_size: int, max_draft_len: int) -> int:
        """Bytes of the tensors of so many rows, guesses among them."""
        columns, max_blocks = row_columns(max_seq_len, block_size, max_draft_len)
        of_row = columns * torch.int32.itemsize + (1 + max_blocks) * torch.int64.itemsize
        return max_rows * (of_row + RowSampling.BYTES_PER_ROW)

    def apply(self, plan: RoundPlan) -> None:
        """Take in what the plan changes: rows dropped, rows admitted, blocks assigned, in this order."""
        for row in plan.dropped_rows:
            self.sampling.drop(row)
        if plan.admissions:
            self._admit(plan.admissions)
        self.sampling.begin_round(plan.timed_rows)
        self.new_blocks = None
        if len(plan.block_updates):
            row, index, block = plan.block_updates.astype(np.int64).T
            places = np.stack((row * self.block_tables.shape[1] + index, row, block))
            where, rows, blocks = torch.from_numpy(places).to(self.device, non_blocking=True).unbind()
            self.block_tables.view(-1).index_copy_(0, where, blocks)
            self.new_blocks = rows, blocks

    def _admit(self, admissions: Sequence[RowAdmission]) -> None:
        """Give rows their tokens and parameters, all together: each copy and each launch takes microseconds in which a
        GPU has nothing to do."""
        self.sampling.admit(admissions)
        lengths = [len(item.tokens) for item in admissions]
        where, values = device_integers([[item.row for item in admissions], lengths], self.device)
        self.lengths.index_copy_(0, where, values)
        self.block_tables.index_fill_(0, where, 0)
        tokens = torch.from_numpy(np.concatenate([item.tokens for item in admissions]))
        tokens = tokens.to(self.device, non_blocking=True)
        places = [self.token_ids[item.row, :length] for item, length in zip(admissions, lengths, strict=True)]
        torch._foreach_copy_(places, list(torch.split(tokens, lengths)))

    def fresh_blocks(self, plan: RoundPlan) -> list[int]:
        """Blocks that rows get in a plan to write to, without those whose keys and values they share with others; and
        those that get a place in layers with windows, which may be in a later plan."""
        shared = {item.row: -(-item.num_cached_tokens // self.block_size) for item in plan.admissions}
        placed = [block for block, place in plan.window_places.tolist() if place != NULL_BLOCK]
        return placed + [block for row, index, block in plan.block_updates.tolist() if index >= shared.get(row, 0)]

    def advance(self, rows: torch.Tensor, num_tokens: torch.Tensor, tokens: torch.Tensor) -> None:
        """Append what a verdict gave.

        Args:
            rows: [rows] int64 on the device.
            num_tokens: [rows] int64: tokens gained.
            tokens: [rows, width] int64: the tokens, then padding, which lands in the scratch part of the token_ids.
        """
        operations_of(self.device.type).advance(self.token_ids, self.lengths, rows, num_tokens, tokens)

    def with_drafts(
        self, rows: torch.Tensor, draft_tokens: torch.Tensor, draft_lens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The newest token of each row, and its draft behind it.

        Args:
            rows: [rows] int64 on the device.
            draft_tokens: [rows, draft_len] int64; draft_len may be 0.
            draft_lens: [rows] int64; below 1 where a row has no draft.

        Returns:
            tokens and positions, [rows, draft_len + 1] int64 each; positions behind a row's draft are -1.
        """
        operations = operations_of(self.device.type)
        return operations.with_drafts(self.token_ids, self.lengths, rows, draft_tokens, draft_lens)

    def share_tokens(self, rows: Sequence[int], own: Sequence[int]) -> None:
        """Give each of the rows `own` the tokens of the row beside it in `rows`."""
        self.token_ids[device_integers(own, self.device)] = self.token_ids[device_integers(rows, self.device)]

    def write_tokens(self, rows: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Write tokens that the host knows.

        Args:
            rows: that get them.
            starts: of each row, the position of its first.
            tokens: of each row.
        """
        places = [
            (row, start + step, token)
            for row, start, of_row in zip(rows, starts, tokens, strict=True)
            for step, token in enumerate(of_row)
        ]
        if places:
            at, column, token = device_integers(places, self.device).unbind(1)
            self.token_ids[at, column] = token.to(torch.int32)

    def tables(self, rows: torch.Tensor, blocks: int) -> torch.Tensor:
        """[rows, blocks] int64: the rows' tables, cut to `blocks` columns or to what there is."""
        return self.block_tables[:, :blocks].index_select(0, rows)


def row_columns(max_seq_len: int, block_size: int, max_draft_len: int) -> tuple[int, int]:
    """Tokens and blocks of a row, with scratch for a draft and the tokens around it."""
    columns = max_seq_len + max_draft_len + 2
    return columns, -(-columns // block_size)
