"""What a draft rank keeps of each row on the host: where it stands, the draft behind it, and what was guessed.

Verdicts reach a draft rank as messages, so that its host knows every row's length and newest tokens without asking the
device. A row's tokens and the draft behind them are its text; the row's blocks hold the keys and values of the text's
front, and the rest of it is still to be fed. What followed a row's last tokens before is looked up in these texts
without a word to the device. Pure bookkeeping: it knows no engine, no device and no message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trtrun.configuration.drafting.speculation_section import HybridOptions
from trtrun.core.nouns import RoundPlan
from trtrun.speculation.suffixes.search import SuffixSearch
from trtrun.tensors import inference


@dataclass(slots=True)
class RowText:
    """One row's tokens and the draft behind them.

    Attributes:
        length: tokens of the row.
        written: leading positions of the text whose keys and values are in the row's own blocks.
        unfed: the text's tokens from position `written` on; never empty once the row decodes.
        newest: the row's last token.
        draft: tokens proposed behind the row's.
        ranked: for each number of accepted draft tokens, the likeliest tokens to follow them, best first, without the
            draft token that was rejected there. The place behind the whole draft is missing until it was fed.
    """

    length: int
    written: int
    unfed: list[int] = field(default_factory=list)
    newest: int = 0
    draft: list[int] = field(default_factory=list)
    ranked: list[list[int]] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Tokens of the text."""
        return self.length + len(self.draft)

    def end_prompt(self, newest: int) -> None:
        """The prompt is written. Its last token is to be fed once more, for what follows it."""
        self.written, self.unfed, self.newest = self.length - 1, [newest], newest

    def extend(self, draft: list[int], ranked: list[list[int]], *, is_written: bool = True) -> None:
        """Put a draft behind the row, all of whose keys and values are written but those of its last token; or where it
        was made in parallel, none of whose are."""
        self.draft, self.ranked = draft, ranked
        self.written = self.end - 1 if is_written else self.length
        self.unfed = [draft[-1]] if is_written else [*draft]

    def cut(self, count: int) -> None:
        """Shorten the draft to its first `count` tokens."""
        surplus = max(0, len(self.draft) - count)
        self.draft, self.ranked = self.draft[:count], self.ranked[:count]
        if self.written >= self.end:
            self.written, self.unfed = self.end, []
        else:
            self.unfed = self.unfed[: len(self.unfed) - surplus]

    def propose(self, draft: list[int]) -> None:
        """Put a draft behind the row, in place of the one that is there, of which nothing is written and no candidates
        are known."""
        self._keep(self.length)
        self.draft, self.ranked, self.unfed = draft, [[] for _ in draft], [*self.unfed, *draft]

    def take_unfed(self) -> list[int]:
        """The tokens to feed so that the whole text is written, the last one again where nothing is left."""
        if not self.unfed:
            self.written, self.unfed = self.end - 1, [self.draft[-1] if self.draft else self.newest]
        fed, self.written, self.unfed = self.unfed, self.end, []
        return fed

    def advance(self, num_accepted: int, token: int) -> None:
        """Take a verdict in: so many of the draft's tokens, then `token`.

        Where the target verified less than was proposed, the rest of the draft may still be right: it stays.
        """
        goes_on = num_accepted < len(self.draft) and self.draft[num_accepted] == token
        if goes_on:
            self.length += num_accepted + 1
            self.draft = self.draft[num_accepted + 1 :]
            self.ranked = self.ranked[num_accepted + 1 :]
        else:
            self._keep(self.length + num_accepted)
            self.length += num_accepted + 1
            self.unfed = [*self.unfed, token]
        self.newest = token

    def _keep(self, count: int) -> None:
        """Cut the text to its first `count` tokens: the row's own, and as many of the draft's."""
        surplus = self.end - count
        if self.written > count:
            self.written, self.unfed = count, []
        elif surplus:
            self.unfed = self.unfed[: len(self.unfed) - surplus]
        self.length, self.draft, self.ranked = min(self.length, count), [], []


@dataclass(frozen=True, slots=True)
class Guess:
    """Draft tokens of a row that are accepted, and behind them a token that its draft does not have there.

    Attributes:
        row: of the running batch.
        num_accepted: draft tokens.
        start: the token's position in the row.
    """

    row: int
    num_accepted: int
    start: int


@dataclass(slots=True)
class Guesses:
    """The guesses of one round, and once they are settled the drafts that were made for them.

    Attributes:
        listed: in the order in which they were computed.
        drafts: of each guess, the draft behind its token.
        ranked: of each guess, the likeliest tokens at each place of that draft, its own among them.
        probs: of each guess, [steps, vocab] float32 on the device where it has draft_probs, else None.
        tokens: of the verdicts that were guessed.
    """

    listed: list[Guess] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    ranked: list[list[list[int]]] = field(default_factory=list)
    probs: list[Any] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    _places: dict[tuple[int, int, int], int] = field(default_factory=dict)

    def settle(self, tokens: list[int], drafts: list[list[int]], ranked: list[list[list[int]]]) -> None:
        """Make the guesses findable by the `tokens` of their verdicts; of two alike the first counts."""
        self.tokens, self.drafts, self.ranked, self.probs = tokens, drafts, ranked, [None] * len(tokens)
        for index, (guess, token) in enumerate(zip(self.listed, tokens, strict=True)):
            self._places.setdefault((guess.row, guess.num_accepted, token), index)

    def table(self) -> npt.NDArray[np.int64]:
        """[guesses, 3 + steps]: of each its row, its num_accepted, the token of its verdict, and its draft."""
        keys = [(guess.row, guess.num_accepted, token) for guess, token in zip(self.listed, self.tokens, strict=True)]
        return np.concatenate((np.array(keys, dtype=np.int64), np.array(self.drafts, dtype=np.int64)), axis=1)

    def find(self, row: int, num_accepted: int, token: int) -> int | None:
        """Index of the guess that this verdict was; None where it was not among them."""
        return self._places.get((row, num_accepted, token))


class _Texts:
    """Texts on the host (`protocols.Texts`)."""

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
        """Look once more at rows that the plan drops."""
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
