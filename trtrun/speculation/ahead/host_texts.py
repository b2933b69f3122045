"""Rows' texts on the host of a draft rank that drafts ahead, where what followed their last tokens before is looked up
without a word to the device.

It knows tokens. It does not know drafts, engines or messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtrun.configuration.drafting.suffix_options import HybridOptions
from trtrun.core.nouns import RoundPlan
from trtrun.speculation.suffixes.search import SuffixSearch
from trtrun.tensors import inference


class _Texts:
    """See protocols.Texts; on the host."""

    def __init__(self, max_rows: int, columns: int) -> None:
        self.token_ids = torch.zeros((max_rows, columns), dtype=torch.int32)
        self.lengths = torch.zeros(max_rows, dtype=torch.int64)


class HostTexts:
    """The texts of all rows, and what is looked up for them. A row that outgrows the draft's context is forgotten."""

    def __init__(self, max_rows: int, columns: int, vocab_size: int, options: HybridOptions) -> None:
        """Keep up to `columns` tokens of each row; ids from `vocab_size` on are never proposed."""
        self._texts = _Texts(max_rows, columns)
        self._vocab_size = vocab_size
        self._min_match = options.suffix_decoding_min_match_len
        self._search = SuffixSearch.of_options(options, self._texts)

    def release_rows(self, plan: RoundPlan) -> None:
        """See Drafter."""
        self._search.release_rows(plan)

    @inference
    def begin_round(self, plan: RoundPlan) -> None:
        """Take in rows that come."""
        self._search.begin_round(plan)
        for admission in plan.admissions:
            self._texts.lengths[admission.row] = 0
            self._append(admission.row, 0, admission.tokens.tolist())

    @inference
    def learn(self, rows: Sequence[int], gained: Sequence[Sequence[int]]) -> None:
        """Rows gain tokens by a verdict."""
        lengths = self._texts.lengths.tolist()
        for row, tokens in zip(rows, gained, strict=True):
            if lengths[row]:
                self._append(row, lengths[row], tokens)

    def _append(self, row: int, length: int, tokens: Sequence[int]) -> None:
        end = length + len(tokens)
        if end > self._texts.token_ids.shape[1]:
            self._texts.lengths[row] = 0
            return
        self._texts.token_ids[row, length:end] = torch.tensor(tokens, dtype=torch.int32)
        self._texts.lengths[row] = end

    @inference
    def look_up(self, asked: dict[int, int]) -> dict[int, list[int]]:
        """What is likely to follow rows, as many tokens as is `asked` for each; no row of which nothing is found."""
        rows = torch.tensor(list(asked), dtype=torch.int64)
        if not len(rows):
            return {}
        columns, most = int(self._texts.lengths[rows].max()), max(asked.values())
        if not columns:
            return {}
        share = max(1, self._search.rows_at_a_time(columns, most))
        found: dict[int, list[int]] = {}
        for part in torch.split(rows, share):
            tokens, counts = self._search.look_up(part, most, columns, min_match=self._min_match)
            of_rows = zip(part.tolist(), tokens[:, 0].tolist(), counts[:, 0].tolist(), strict=True)
            for row, of_row, count in of_rows:
                usable = of_row[: min(count, asked[row])]
                foreign = next((place for place, token in enumerate(usable) if token >= self._vocab_size), len(usable))
                if foreign:
                    found[row] = usable[:foreign]
        return found
