"""How a row's logits become its next token: the sampling parameters of every row of the running batch, on the device.

The same class serves draft and target ranks, so that both apply a request's parameters alike. Which steps a row takes
is known on the host from its admission: no code path depends on a value that a device holds, and a batch of greedy rows
without penalties passes through untouched. The order, for the distribution of a position:

    logit_bias → repetition, presence and frequency penalties → bad_words, min_tokens → thinking_token_budget
    → and for rows with a temperature: temperature → top_k → top_p → min_p

This module knows no model, no plan and no speculation; `penalties`, `filters` and `random` hold the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from trtrun.core.nouns import RowAdmission, VerdictLogprobs
from trtrun.kernels.triton.sampling import columns
from trtrun.sampling import filters, penalties
from trtrun.sampling.filters import argmax, likeliest, likeliest_in_order, pieces
from trtrun.sampling.random import Stream, gumbel, gumbel_argmax, gumbel_of
from trtrun.sampling.row_steps import RowSteps, SharedTables
from trtrun.sampling.thoughts import force_marks_, groups_of
from trtrun.tensors import cached_tensor, device_integers


class RowSampling:
    """Sampling parameters of the rows of one engine rank.

    Attributes:
        numbers: [max_rows, 6] float32, and integers [max_rows, 4] int64, on the device: what rows were admitted with,
            see kernels/triton/sampling/columns.py.

    Args:
        max_rows: rows of the running batch.
        vocab_size: V, width of this engine's logits. Token ids of an admission that lie outside it are ignored: the
            draft's vocabulary may be narrower than the target's, and requests are checked where they come in.
        device: where logits live.
        ends_thoughts: whether budgets for thoughts are followed, as they have to be where tokens are decided. A draft
            proposes one token less where one ends, and has no work with it elsewhere.
    """

    BYTES_PER_ROW = columns.NUM_NUMBERS * torch.float32.itemsize + columns.NUM_INTEGERS * torch.int64.itemsize

    def __init__(
        self, max_rows: int, vocab_size: int, device: torch.device | str, *, ends_thoughts: bool = True
    ) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.numbers = torch.zeros((max_rows, columns.NUM_NUMBERS), dtype=torch.float32, device=self.device)
        self.integers = torch.zeros((max_rows, columns.NUM_INTEGERS), dtype=torch.int64, device=self.device)
        self._steps: dict[int, RowSteps] = {}
        self._tables = SharedTables(vocab_size, self.device, ends_thoughts=ends_thoughts)
        # Of these: rows that do not take the likeliest token, that have timed steps, and of those where these may
        # change something now, whose logits change before, to which tokens are forbidden, that report log
        # probabilities. Most batches have none, which every round asks several times.
        self._sampled: set[int] = set()
        self._timed: set[int] = set()
        self._timely: set[int] = set()
        self._changed: set[int] = set()
        self._banning: set[int] = set()
        self._reporting: set[int] = set()
        self._with_logits: set[int] = set()

    def admit(self, admissions: Sequence[RowAdmission]) -> None:
        """Take over the parameters of the requests that got rows; a row is there once at most.

        Raises:
            ValueError: a seed was not drawn.
        """
        if not admissions:
            return
        integers, numbers = [], []
        for admission in admissions:
            sampling = admission.sampling
            if sampling.seed is None:
                raise ValueError(f"request {admission.request_id} has no seed: draw one before it gets a row")
            steps = RowSteps.of(admission, self.vocab_size, self._tables)
            first_stop = admission.num_prompt_tokens + sampling.min_tokens
            integers.append((admission.row, sampling.seed, steps.top_k, admission.num_prompt_tokens, first_stop))
            log_min_p = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
            penalty = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
            numbers.append((sampling.temperature, sampling.top_p, log_min_p, *penalty))
            self._take(admission.row, steps)
        # One copy for all rows: each takes ten microseconds, in which a GPU has nothing to do.
        table = device_integers(integers, self.device)
        rows = table[:, 0]
        self.integers.index_copy_(0, rows, table[:, 1:])
        values = torch.tensor(numbers, dtype=torch.float32)
        self.numbers.index_copy_(0, rows, values.to(self.device, non_blocking=True))

    def drop(self, row: int) -> None:
        """Forget a row whose request ended or was preempted; nothing if there is none."""
        self._steps.pop(row, None)
        for members in (self._sampled, self._timed, self._reporting, self._with_logits):
            members.discard(row)
        for members in (self._timely, self._changed, self._banning):
            members.discard(row)

    def begin_round(self, timed_rows: Iterable[int]) -> None:
        """Have these rows alone, of those with steps that depend on how long their output is, take such steps from now
        on: in others they would change nothing. Until a round begins, all that were admitted take them."""
        if self._timed:
            timely = set(timed_rows)
            for row in self._timed:
                self._enter_changes(row, is_timely=row in timely)

    def _take(self, row: int, steps: RowSteps, *, is_timely: bool = True) -> None:
        """Enter the steps of a row."""
        self.drop(row)
        self._steps[row] = steps
        if not steps.greedy:
            self._sampled.add(row)
        if steps.is_timed:
            self._timed.add(row)
        self._enter_changes(row, is_timely=is_timely)
        if steps.logprobs is not None:
            self._reporting.add(row)
        if steps.reports_logits:
            self._with_logits.add(row)

    def _enter_changes(self, row: int, *, is_timely: bool) -> None:
        """Enter whether a row's logits change, and by bans."""
        steps, tables = self._steps[row], self._steps[row].tables
        is_timely = is_timely and steps.is_timed
        bans = tables.bad_words is not None or (is_timely and steps.holds_stops)
        changes = is_timely or bans or steps.penalties or tables.bias is not None
        for members, belongs in ((self._timely, is_timely), (self._banning, bans), (self._changed, changes)):
            (members.add if belongs else members.discard)(row)

    def share(self, rows: Sequence[int], own: Sequence[int]) -> None:
        """Give each of the rows `own` the parameters of the row beside it in `rows`."""
        for row, guest in zip(rows, own, strict=True):
            self._take(guest, self._steps[row], is_timely=row in self._timely)
        if not self.passes(rows):
            source, target = self._index(rows), self._index(own)
            self.integers[target] = self.integers[source]
            self.numbers[target] = self.numbers[source]

    def needs_history(self, rows: Sequence[int]) -> bool:
        """Whether any of the rows has penalties, biases or bans, most of which look at its tokens so far. Host-side."""
        return bool(self._changed) and not self._changed.isdisjoint(rows)

    def may_forbid_all(self, rows: Sequence[int]) -> bool:
        """Whether any of the rows has bans, which may leave it no token at some position. Host-side."""
        return bool(self._banning) and not self._banning.isdisjoint(rows)

    def passes(self, rows: Sequence[int]) -> bool:
        """Whether all of the rows take the likeliest token of what the model gives. Host-side."""
        return not (self._sampled and not self._sampled.isdisjoint(rows)) and not self.needs_history(rows)

    def steps(self, rows: Sequence[int]) -> list[RowSteps]:
        """Which steps each of the rows takes. Host-side."""
        return [self._steps[row] for row in rows]

    def wanted_logprobs(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Indices within `rows` of those that report log probabilities, each with how many alternatives at each
        position (0: the chosen token alone). Host-side."""
        if not self._reporting:
            return []
        wanted = ((index, self._steps[row].logprobs) for index, row in enumerate(rows))
        return [(index, count) for index, count in wanted if count is not None]

    def reported_indices(self, rows: Sequence[int]) -> list[int]:
        """Indices within `rows` of the rows whose logits are reported. Host-side."""
        return [index for index, row in enumerate(rows) if row in self._with_logits] if self._with_logits else []

    def sampled_indices(self, rows: Sequence[int]) -> list[int]:
        """Indices within `rows` of the rows that are not greedy. Host-side."""
        return [index for index, row in enumerate(rows) if row in self._sampled] if self._sampled else []

    def seeds(self, rows: Sequence[int]) -> Tensor:
        """[R] int64 on the device."""
        return self.integers[self._index(rows), columns.SEED]

    def process(
        self,
        logits: Tensor,
        rows: Sequence[int],
        lengths: Tensor,
        token_ids: Tensor,
        draft_tokens: Tensor | None = None,
        max_context: int | None = None,
    ) -> Tensor:
        """Logits after every row's own parameters. At position i, draft tokens 0 .. i-1 count as output.

        Greedy rows keep their scale; a sampled row comes out divided by its temperature and shifted, with -inf where a
        token is filtered out, without NaN, and with one token left at least (unless biases and bans forbid all).

        Args:
            logits: [R, P, V] float32. Never altered; returned as it is when no row takes a step.
            rows: the R rows.
            lengths: [R] int64, device: tokens in each row so far, that is the position that logits[:, 0] chooses.
            token_ids: [max_rows, max_seq_len] int32, device: each row's tokens, valid below its length.
            draft_tokens: [R, P - 1] int64, device; None when P is 1. Padding may hold any value.
            max_context: upper bound of `lengths`, known on the host, to look at less of `token_ids` for penalties.

        Returns:
            [R, P, V] float32.
        """
        if self.passes(rows):
            return logits
        steps = self.steps(rows)
        width = token_ids.shape[1] if max_context is None else min(max_context, token_ids.shape[1])
        seen = width if any(of_row.penalties for of_row in steps) else 0
        parts = pieces(len(rows), max(logits[:1].numel(), seen))
        if len(parts) < 2:
            return self._process(logits, rows, lengths, token_ids, draft_tokens, width)
        out = torch.empty_like(logits)
        for part in parts:
            drafts = None if draft_tokens is None else draft_tokens[part]
            out[part] = self._process(logits[part], rows[part], lengths[part], token_ids, drafts, width)
        return out

    def _process(
        self,
        logits: Tensor,
        rows: Sequence[int],
        lengths: Tensor,
        token_ids: Tensor,
        draft_tokens: Tensor | None,
        width: int,
    ) -> Tensor:
        """`process` for rows whose temporaries may exist at once; `width` columns of `token_ids` may be valid."""
        steps = [self._steps[row] for row in rows]
        sampled = [index for index, of_row in enumerate(steps) if not of_row.greedy]
        penalised = [index for index, of_row in enumerate(steps) if of_row.penalties]
        tables = [index for index, of_row in enumerate(steps) if of_row.own_tables]
        out = logits
        if penalised or tables:
            out = logits.clone()
            for index in tables:
                bias = steps[index].tables.bias
                if bias is not None:
                    penalties.add_logit_bias_(out[index], *bias)
            if penalised:
                arguments = (rows, penalised, lengths, token_ids[:, :width], draft_tokens)
                out = self._on(penalised, out, lambda part: self._penalise(part, *arguments))
            for index in tables:
                drafts = None if draft_tokens is None else draft_tokens[index]
                self.ban_(out[index], rows[index], lengths[index], token_ids, drafts)
            self.end_thoughts_(out, rows, lengths, token_ids, draft_tokens)
        if sampled:
            sampled_rows = [rows[index] for index in sampled]
            out = self._on(sampled, out, lambda part: self._filter(part, sampled_rows), owned=out is not logits)
        return out

    def _on(self, members: list[int], logits: Tensor, change: Callable[[Tensor], Tensor], owned: bool = True) -> Tensor:
        """Replace logits[members] by change(logits[members]); in place when `owned`."""
        if len(members) == logits.shape[0]:
            return change(logits)
        index = self._index(members)
        changed = change(logits.index_select(0, index))
        return logits.index_copy_(0, index, changed) if owned else logits.index_copy(0, index, changed)

    def _penalise(
        self,
        logits: Tensor,
        rows: Sequence[int],
        members: list[int],
        lengths: Tensor,
        token_ids: Tensor,
        draft_tokens: Tensor | None,
    ) -> Tensor:
        """Penalties on logits [n, P, V] of rows[members]; lengths and draft_tokens are of all rows."""
        member_rows = [rows[index] for index in members]
        steps = [self._steps[row] for row in member_rows]
        member_index, row_index = self._index(members), self._index(member_rows)
        tokens, lengths = token_ids[row_index], lengths[member_index]
        drafts = None if draft_tokens is None else draft_tokens[member_index]
        numbers, prompts = self.numbers[row_index], self.integers[row_index, columns.NUM_PROMPT]
        positions, vocabulary = logits.shape[1], logits.shape[2]
        if any(of_row.repetition for of_row in steps):
            counts = penalties.count_tokens(tokens, None, lengths, drafts, positions, vocabulary)
            logits = penalties.apply_repetition_penalty(logits, counts, numbers[:, columns.REPETITION])
        if any(of_row.output_penalties for of_row in steps):
            counts = penalties.count_tokens(tokens, prompts, lengths, drafts, positions, vocabulary)
            presence, frequency = numbers[:, columns.PRESENCE], numbers[:, columns.FREQUENCY]
            penalties.apply_output_penalties_(logits, counts, presence, frequency)
        return logits

    def ban_(self, logits: Tensor, row: int, length: Tensor, token_ids: Tensor, drafts: Tensor | None) -> None:
        """Mask, in place, what bad words and min_tokens forbid a row: logits [P, V], length [], drafts [P - 1]."""
        steps = self._steps[row]
        tables = steps.tables
        if tables.bad_words is not None:
            tables.bad_words.ban_(logits, token_ids[row], length, drafts)
        if steps.holds_stops and tables.stop_ids is not None and row in self._timely:
            penalties.ban_stop_tokens_(logits, tables.stop_ids, length, self.integers[row, columns.FIRST_STOP])

    def end_thoughts_(
        self, logits: Tensor, rows: Sequence[int], lengths: Tensor, token_ids: Tensor, draft_tokens: Tensor | None
    ) -> None:
        """Force, in place, the mark that ends thoughts in rows whose budget says so, behind all bans; arguments as of
        `process`."""
        if self._timely.isdisjoint(rows):
            return
        budgets = [self._steps[row].tables.thinking if row in self._timely else None for row in rows]
        for group in groups_of(budgets):
            members, places = self._index(group), self._index([rows[index] for index in group])
            force_marks_(
                [budget for index in group if (budget := budgets[index]) is not None],
                logits,
                members,
                token_ids[places],
                self.integers[places, columns.NUM_PROMPT],
                lengths[members],
                None if draft_tokens is None else draft_tokens[members],
            )

    def _filter(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """Temperature and filters on logits [n, P, V] of `rows`, all sampled; a new tensor."""
        steps = [self._steps[row] for row in rows]
        numbers = self.numbers[self._index(rows)]
        scaled = filters.apply_temperature(logits, numbers[:, columns.TEMPERATURE])
        ranked = [index for index, of_row in enumerate(steps) if of_row.top_k]
        if ranked:
            scaled = self._on(ranked, scaled, lambda part: self._rank(part, [rows[index] for index in ranked]))
        nucleus = [index for index, of_row in enumerate(steps) if of_row.top_p and not of_row.top_k]
        if nucleus:
            share = numbers[self._index(nucleus), columns.TOP_P]
            scaled = self._on(nucleus, scaled, lambda part: filters.nucleus(part, share))
        if any(of_row.min_p for of_row in steps):
            filters.apply_min_p_(scaled, numbers[:, columns.LOG_MIN_P])
        return scaled

    def _rank(self, scaled: Tensor, rows: Sequence[int]) -> Tensor:
        """top_k, and top_p after it, on rows that all have top_k."""
        steps = [self._steps[row] for row in rows]
        index = self._index(rows)
        share = self.numbers[index, columns.TOP_P] if any(of_row.top_p for of_row in steps) else None
        return filters.top_k_top_p(
            scaled, self.integers[index, columns.TOP_K], max(of_row.top_k for of_row in steps), share
        )

    def choose(self, processed: Tensor, rows: Sequence[int], lengths: Tensor, stream: Stream) -> Tensor:
        """One token for each row and position: the most likely one for greedy rows (the first where several tie), a
        sample of softmax(processed) for the others, keyed by (seed of the row, lengths + position, stream).

        Args:
            processed: [R, P, V] float32 from `process`.
            rows: the R rows.
            lengths: [R] int64, device.
            stream: what the tokens are for.

        Returns:
            [R, P] int64, device.
        """
        sampled = self.sampled_indices(rows)
        if not sampled:
            return argmax(processed)
        if len(sampled) == len(rows):
            return self._sample(processed, rows, lengths, stream)
        greedy = self._index([index for index, row in enumerate(rows) if self._steps[row].greedy])
        index = self._index(sampled)
        tokens = torch.empty(processed.shape[:2], dtype=torch.int64, device=processed.device)
        tokens.index_copy_(0, greedy, argmax(processed.index_select(0, greedy)))
        sampled_rows = [rows[index] for index in sampled]
        return tokens.index_copy_(
            0, index, self._sample(processed.index_select(0, index), sampled_rows, lengths[index], stream)
        )

    def _sample(self, processed: Tensor, rows: Sequence[int], lengths: Tensor, stream: Stream) -> Tensor:
        count, positions, vocabulary = processed.shape
        places = (lengths[:, None] + torch.arange(positions, device=processed.device)).flatten()
        seeds = self.seeds(rows).repeat_interleave(positions)
        return gumbel_argmax(processed.reshape(-1, vocabulary), seeds, places, stream).view(count, positions)

    def rank(self, processed: Tensor, rows: Sequence[int], lengths: Tensor | None, count: int) -> Tensor:
        """The tokens that `choose` would take for Stream.TARGET, one after the other: its choice first, then what it
        would have chosen without that, and so on (Gumbel-top-k: Kool et al. 2019, arXiv:1903.06059).

        Args:
            processed: [R, V] float32 from `process`.
            rows: the R rows.
            lengths: [R] int64, device: the positions; None where no row is sampled.
            count: how many tokens.

        Returns:
            [R, count] int64, device.
        """
        return likeliest(self.scores(processed, rows, lengths), count)

    def scores(self, processed: Tensor, rows: Sequence[int], lengths: Tensor | None) -> Tensor:
        """[R, V] float32 of which `choose` takes the largest for Stream.TARGET; arguments as of `rank`."""
        sampled = self.sampled_indices(rows)
        if not sampled:
            return processed
        assert lengths is not None
        index = self._index(sampled)
        noise = gumbel(
            self.seeds([rows[place] for place in sampled]), lengths[index], Stream.TARGET, processed.shape[-1]
        )
        return processed.index_copy(0, index, processed.index_select(0, index) + noise)

    def rank_few(self, tokens: Tensor, logits: Tensor, rows: Sequence[int], places: Tensor) -> Tensor:
        """The order in which `rank` would take a few tokens of which the raw logits are known, whatever others there
        are: with the temperature of each row and its numbers of the place, without filters and penalties.

        Args:
            tokens: [R, n, k] int64; those below 0 count as any.
            logits: [R, n, k] float32 beside them, the largest first.
            rows: the R rows.
            places: [R] int64, device: the positions.

        Returns:
            [R, n, k] int64: the tokens, the best first; of greedy rows as they came.
        """
        if not self.sampled_indices(rows):
            return tokens
        width = tokens.shape[1]
        temperature = self.numbers[self._index(rows), columns.TEMPERATURE].view(-1, 1, 1)
        seeds, positions = (one.repeat_interleave(width) for one in (self.seeds(rows), places))
        noise = gumbel_of(seeds, positions, Stream.TARGET, tokens.flatten(0, 1)).view(tokens.shape)
        scores = torch.where(temperature > 0, logits / temperature + noise, logits)
        return tokens.gather(2, scores.sort(dim=2, descending=True, stable=True).indices)

    @staticmethod
    def probabilities(processed: Tensor) -> Tensor:
        """softmax of [S, P, V] float32 over V; all 0 where biases and bans forbid every token."""
        return torch.softmax(processed, dim=-1).nan_to_num_(nan=0.0)

    @staticmethod
    def top_logprobs(raw_logits: Tensor, tokens: Tensor, alternatives: int) -> VerdictLogprobs:
        """Log probabilities of the chosen tokens and the most likely ones under the raw distribution.

        Args:
            raw_logits: [R, P, V] float32, before `process`.
            tokens: [R, P] int64; where -1 (padding) the values mean nothing.
            alternatives: how many of the most likely tokens, at most V.

        Returns:
            token_ids and values [R, P, 1 + alternatives]: the chosen token, then the most likely ones, best first and
            of equally likely ones the lower ids: fewer alternatives are the first of more.
        """
        named = tokens[..., None]
        if alternatives:
            named = torch.cat([named, likeliest_in_order(raw_logits, alternatives)], dim=-1)
        logprobs = torch.log_softmax(raw_logits, dim=-1)
        return VerdictLogprobs(token_ids=named, values=logprobs.gather(-1, named.clamp(min=0)))

    def _index(self, values: Sequence[int]) -> Tensor:
        """[n] int64 on the device."""
        return cached_tensor(values, self.device)
