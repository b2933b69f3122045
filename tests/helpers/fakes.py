"""Engines without a model: a rule instead of weights, a store of token ids instead of keys and values.

The store is the point: a context that has a hole, or a token that the row does not have, raises. So the cycle's
promises (catch up fills the bonus hole, rejected tails are overwritten) are checked at every read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from parallel.link import Link
from parallel.topology import Topology
from trtrun.core.nouns import Draft, PrefillChunk, RoundPlan, Step
from trtrun.engine.rows import RowState

Rule = Callable[[Sequence[int]], int]
"""The token that follows a sequence."""


class FakeEngine:
    """A draft or target engine whose "model" is a rule on token ids.

    Attributes:
        forwards: how many forwards ran.
    """

    def __init__(self, rule: Rule, vocab_size: int, max_rows: int = 4, max_seq_len: int = 256) -> None:
        self.device = torch.device("cpu")
        self.vocab_size = vocab_size
        self.rows = RowState(max_rows, max_seq_len, 16, 8, vocab_size, self.device)
        self.forwards = 0
        self._rule = rule
        self._stored: list[dict[int, int]] = [{} for _ in range(max_rows)]

    def begin_round(self, plan: RoundPlan) -> None:
        self.rows.apply(plan)
        for admission in plan.admissions:
            self._stored[admission.row] = {}

    def _feed(self, row: int, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Store tokens and return the logits after each: [tokens, vocab]."""
        logits = torch.zeros((len(tokens), self.vocab_size))
        stored = self._stored[row]
        for index, (token, position) in enumerate(zip(tokens, positions, strict=True)):
            if position < 0:
                continue
            stored[position] = token
            context = [stored[place] for place in range(position + 1)]  # KeyError: a hole
            known = self.rows.token_ids[row, : min(position + 1, int(self.rows.lengths[row]))].tolist()
            assert context[: len(known)] == known, f"row {row} attends to tokens that it does not have"
            logits[index, self._rule(context)] = 1.0
        return logits

    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        self.forwards += bool(chunks)
        for chunk in chunks:
            span = range(chunk.start, chunk.start + chunk.length)
            self._feed(chunk.row, self.rows.token_ids[chunk.row, chunk.start : span.stop].tolist(), span)

    def catch_up(self, rows: torch.Tensor, counts: Sequence[int], context: int) -> torch.Tensor:
        self.forwards += 1
        outputs = []
        for row, count in zip(rows.tolist(), counts, strict=True):
            length = int(self.rows.lengths[row])
            assert 2 <= count <= length <= context
            tokens = self.rows.token_ids[row, length - count : length].tolist()
            outputs.append(self._feed(row, tokens, range(length - count, length))[-1])
        return torch.stack(outputs)

    def tables(self, rows: torch.Tensor, context: int) -> torch.Tensor:
        """The rows themselves: there are no blocks."""
        self._context = context
        return rows.unsqueeze(1)

    def prepare_steps(self, tables: torch.Tensor, positions: torch.Tensor) -> list[tuple[list[int], list[int]]]:
        assert int(positions.max()) < self._context
        return [(tables[:, 0].tolist(), positions[:, step].tolist()) for step in range(positions.shape[1])]

    def decode(self, step: tuple[list[int], list[int]], tokens: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        fed = zip(step[0], tokens.tolist(), step[1], strict=True)
        return torch.cat([self._feed(row, [token], [position]) for row, token, position in fed])

    def feed(self, tokens: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        fed = zip(tables[:, 0].tolist(), tokens.tolist(), positions.tolist(), strict=True)
        return torch.stack([self._feed(row, of_row, at)[-1] for row, of_row, at in fed])

    has_graphs = False

    def rank_steps(self, *steps: object) -> None:
        """Steps are run one by one, so that each is checked."""

    def verify_forward(self, plan: RoundPlan, draft: Draft) -> Step:
        assert draft.paths is None
        self.forwards += 1
        queries = draft.tokens.shape[1] + 1
        outputs = []
        drafts = zip(plan.decode_rows.tolist(), draft.tokens, draft.draft_lens.tolist(), strict=True)
        for row, drafted, length in drafts:
            newest = int(self.rows.lengths[row]) - 1
            positions = [newest + step if step <= max(0, length) else -1 for step in range(queries)]
            outputs.append(self._feed(row, [int(self.rows.token_ids[row, newest]), *drafted.tolist()], positions))
        for chunk in plan.prefill:
            span = range(chunk.start, chunk.start + chunk.length)
            logits = self._feed(chunk.row, self.rows.token_ids[chunk.row, chunk.start : span.stop].tolist(), span)
            if chunk.is_last:
                outputs.append(logits[-1:].expand(queries, -1))
        return Step(torch.stack(outputs) if outputs else torch.empty((0, queries, self.vocab_size)))


def own_link() -> Link:
    """The link of a process that holds both engines: what is sent is there to be received."""
    return Link(Topology.from_devices(["cpu:0"], ["cpu:0"]), 0, None)
