"""The nouns that travel between layers and ranks: Request, RoundPlan, Draft, Step, Verdict.

Plain data with validation. This module knows no model, no rank and no transport; `wire/plans.py` gives the plan its
byte layout, `scheduling` makes plans, `engine` turns them into tensors, `speculation` makes drafts and verdicts.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from trtrun.core.sampling_params import SamplingParams
from trtrun.core.token_lists import NO_LISTS, TokenLists

if TYPE_CHECKING:  # processes that only read requests do without
    import torch


FIRST_WARM_UP_ROUND = 1 << 40
"""Index of the first round that is run before requests come: those of requests count from 0, and never come so far."""


class FinishReason(enum.StrEnum):
    """Why a request ended, in the words of the OpenAI API where it has one."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter that every target rank has in a slot.

    Attributes:
        name: that requests call it by.
        slot: from 1 on; the ranks know no other name.
        key: 32 bytes that tell this adapter, as it was loaded now, from all others: what it computed is not another's.
    """

    name: str
    slot: int
    key: bytes


@dataclass(frozen=True)
class Request:
    """One prompt to complete once (`n` completions are n requests, made by the caller of the scheduler).

    Attributes:
        request_id: unique in the orchestrator.
        prompt_token_ids: at least one token.
        sampling: with `seed` already drawn (not None).
        stop_ids: all tokens that end this request: end-of-sequence unless ignored, and stop_token_ids.
        lists: what engine ranks learn of the tokens that it names; the requests of one prompt share it.
        adapter: that the target computes it with; None for the base model.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    lists: TokenLists = NO_LISTS
    adapter: LoadedAdapter | None = None


@dataclass(frozen=True)
class RowAdmission:
    """What every engine rank learns when a request gets a row of the running batch.

    Attributes:
        row: index of the row, in [0, max_batch_size).
        request_id: for messages only.
        tokens: [length] int32: the prompt, and after a preemption the output so far behind it.
        num_prompt_tokens: how many of `tokens` are the prompt; penalties and min_tokens count from there.
        num_cached_tokens: leading tokens whose keys and values the target already holds (block reuse), and the draft,
            too, where it follows the row.
        has_draft_kv: whether the draft engine keeps keys and values of the row; False where there is none, where
            nothing is drafted for the row, and where it is longer than the draft's context.
        sampling: temperature 0 is greedy; `sampling.seed` is never None here. What it lists (logit_bias, bad_words,
            stop_token_ids) is in `lists`, and does not travel here.
        lists: the tokens that it names; several rows may share it.
        draft_tokens: [count] int32: the draft that came with the request for what follows its prompt, as long as the
            output in `tokens` is its start; empty where there is none.
        adapter_slot: of the adapter that the target computes the row with; 0 for the base model.
    """

    row: int
    request_id: int
    tokens: np.ndarray
    num_prompt_tokens: int
    num_cached_tokens: int
    has_draft_kv: bool
    sampling: SamplingParams
    lists: TokenLists = NO_LISTS
    draft_tokens: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    adapter_slot: int = 0


class ScoredPart(NamedTuple):
    """Positions [start, start + length) of a chunk behind each of which the log probability of the prompt's next token
    is reported, and those of so many `alternatives`."""

    start: int
    length: int
    alternatives: int


class LogitsPart(NamedTuple):
    """Positions [start, start + length) of a chunk whose logits are reported."""

    start: int
    length: int


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens [start, start + length) of a row's admission tokens, to be computed this round by the target, and by the
    draft engine where that keeps the row (`has_draft_kv`).

    The last chunk of a row (`is_last`) also samples the row's next token, at position start + length. Of its positions
    `scored` report log probabilities of the prompt, and those of `reported` their logits; None where none do.
    """

    row: int
    start: int
    length: int
    is_last: bool
    has_draft_kv: bool
    scored: ScoredPart | None = None
    reported: LogitsPart | None = None


@dataclass(frozen=True)
class RoundPlan:
    """Who runs in one round. It says nothing of where a row stands: ranks know that from verdicts, so that a plan may
    be sent one round ahead of the results.

    The order in which ranks apply it: dropped rows, admissions, block updates, then the forwards.

    Attributes:
        round_index: counts up by one.
        dropped_rows: rows whose request ended or was preempted.
        admissions: rows that got a request.
        block_updates: [updates, 3] int32 of (row, index in the row's block table, block).
        prefill: chunks to compute; a row is in `prefill` or in `decode_rows`, never in both.
        decode_rows: rows that draft and verify, [rows] int32.
        draft_lens: [rows] int32, beside decode_rows: tokens to draft and verify, 0 to draft_len, at most: the drafter
            may find fewer (Draft.draft_lens). -1 for a row that nothing is drafted for in any round.
        catch_up: [rows] int32, beside decode_rows: how many of the row's last tokens the draft engine feeds before it
            drafts, all of the row's where it has fewer: 2, or what the row may have gained where drafts are made in
            parallel; more after rounds that it sat out; 0 where it sits this one out or does not follow the row.
        max_context: upper bound of any row's length after this round, in tokens, for shapes of attention.
        num_guesses: verdicts of this round, over all rows, for which draft ranks of their own draft ahead, at most.
        redraft_threshold: where the verdicts of so many rows or more were not guessed, such draft ranks draft for them
            while the target waits; fewer rows take a plain step.
        predicted_output_rows: of decode_rows those whose output may still be the start of the predicted output that
            came with the request: what follows there is proposed first.
        timed_rows: of `sampled_rows` those in which min_tokens or a budget for thoughts may change a token of this
            round; in others these steps are left out.
        window_places: [changes, 2] int32 of (block, place), each block once: where layers with windows keep the blocks
            that rows have now got to; the null place for those that have lost theirs. Empty where no layer has places.
        snapshot_starts: (row, snapshot) of admissions that begin behind cached tokens, where layers keep states.
        snapshot_saves: (row, positions, snapshot): of the states of rows whose prompts are read, to be taken behind so
            many positions.
    """

    round_index: int
    dropped_rows: tuple[int, ...]
    admissions: tuple[RowAdmission, ...]
    block_updates: np.ndarray
    prefill: tuple[PrefillChunk, ...]
    decode_rows: np.ndarray
    draft_lens: np.ndarray
    catch_up: np.ndarray
    max_context: int
    num_guesses: int = 0
    redraft_threshold: int = 1
    predicted_output_rows: tuple[int, ...] = ()
    timed_rows: tuple[int, ...] = ()
    snapshot_starts: tuple[tuple[int, int], ...] = ()
    snapshot_saves: tuple[tuple[int, int, int], ...] = ()
    window_places: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int32))

    @cached_property
    def draft_len(self) -> int:
        """Tokens that are drafted this round, at most: the largest of `draft_lens`, at least 0."""
        return max(0, int(self.draft_lens.max())) if self.draft_lens.size else 0

    @property
    def is_warm_up(self) -> bool:
        """Whether its rows are made up, as at the start."""
        return not 0 <= self.round_index < FIRST_WARM_UP_ROUND

    @cached_property
    def sampled_rows(self) -> list[int]:
        """Rows that get tokens this round: decode rows in order, then rows whose last prefill chunk runs."""
        rows: list[int] = self.decode_rows.tolist()
        return rows + [chunk.row for chunk in self.prefill if chunk.is_last]


@dataclass
class Draft:
    """What the drafter proposes for `plan.decode_rows`: a chain of tokens for each, or a tree of several paths.

    Attributes:
        tokens: [rows, width] int64. Of a chain those behind a row's draft_lens are any token, and the width is the
            plan's draft_len. They are on the drafter's device, or on the host where drafts travel as messages; then the
            width may be less. Of a tree they are its nodes, in any order.
        draft_lens: [rows] int64 beside the tokens: how many of them follow one another, 0 to the plan's draft_lens. A
            tree is cut off there.
        draft_probs: [probability_rows, draft_len, vocab] float32 on the drafter's device for the rows that need them
            (sampled rows when use_logits is on), in the order of decode_rows, or None.
        cache_hits: [rows] int64 of 0 and 1 on the host: whether a row's draft was made before the verdict that it
            follows was known; None where none was.
        paths: [rows, paths, depth] int64 beside the tokens: of each path from the row's newest token to a leaf the
            nodes in order, as columns of `tokens`, then -1. Paths share nodes or hold the same token in several. The
            depth is the plan's draft_len. None for a chain.
        num_suffix_tokens: [rows] int64 beside the tokens: how many of a chain's first tokens were found in texts, where
            a model drafts the others; None where none can be.
    """

    tokens: torch.Tensor
    draft_lens: torch.Tensor
    draft_probs: torch.Tensor | None = None
    cache_hits: torch.Tensor | None = None
    paths: torch.Tensor | None = None
    num_suffix_tokens: torch.Tensor | None = None
    _path_lens: torch.Tensor | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def depth(self) -> int:
        """Tokens that may follow one another, at most."""
        return self.tokens.shape[1] if self.paths is None else self.paths.shape[2]

    def path_lens(self) -> torch.Tensor:
        """[rows, paths] int64: nodes of each path, cut off at the row's draft_lens."""
        assert self.paths is not None, "a chain has no paths"
        if self._path_lens is None:
            lens = (self.paths < 0).cumsum(dim=2).eq(0).sum(dim=2)
            self._path_lens = lens.minimum(self.draft_lens.clamp(min=0).unsqueeze(1))
        return self._path_lens


class FedPart(NamedTuple):
    """What heads are fed of some rows of a round, which are in no other part of it.

    Attributes:
        rows: [R] int64, on the device as all of it is.
        tokens: [R, Q] int64.
        positions: [R, Q] int64; -1 is padding.
        tapped: [R, Q, taps, hidden]: hidden states of the target.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    tapped: torch.Tensor


@dataclass(frozen=True)
class HiddenStates:
    """The residual stream at the tapped boundaries (models/decoder.py), equal on all ranks of the group.

    Attributes:
        decoded: [decode_rows, width + 1, boundaries, hidden] in the model's dtype: of each row's newest token and the
            tokens of its draft; behind a row's draft_lens it has no meaning. Valid until the engine's next forward.
        prompts: of each chunk of the plan's prefill [length, boundaries, hidden].
    """

    decoded: torch.Tensor
    prompts: list[torch.Tensor]


@dataclass(frozen=True)
class Step:
    """One verification.

    Attributes:
        logits: [sampled_rows, width + 1, vocab] float32: after each decode row's newest token and after each token of
            its draft; then rows whose last chunk ran (these repeat their one position). Empty when the round samples
            nothing, and on the rank of a head that is only told what was tapped.
        hidden: what was tapped; None where nothing is.
        prompt_logprobs: of the positions that the chunks of the plan have as `scored`, in order, [positions, 1 +
            alternatives], as many as any of them asks for; None where none are, and on ranks that read no logits.
        prompt_logits: [positions, vocab] float32 on the host of the positions that the chunks have as `reported`, in
            order: on a GPU they are there once it has done what it was given. None as of `prompt_logprobs`.
    """

    logits: torch.Tensor
    hidden: HiddenStates | None = None
    prompt_logprobs: VerdictLogprobs | None = None
    prompt_logits: torch.Tensor | None = None


WAITS, WAITS_ALONE = -1, -2
"""In place of the tokens that a row gains: none before what its guide goes on with is built beside the rounds; and that
is to share nothing with other rows (`GuideStart.is_alone`)."""


@dataclass
class Verdict:
    """What the target engine decided for `plan.sampled_rows`: on the engine's device, or on the host where it came as
    a message.

    Attributes:
        num_tokens: [sampled_rows] int64: tokens that the row gains: accepted + 1; 0 where the row has failed.
        tokens: [sampled_rows, draft_len + 1] int64: the tokens gained, then padding (-1).
        draft_lens: [sampled_rows] int64: draft tokens that were verified, -1 where the row is not drafted. This and
            what follows is None on ranks that only hear the verdict.
        logprobs: for rows that asked, in order; None when no row did.
        chosen_logits: [sampled_rows, draft_len + 1] float32: the tokens' raw logits, -inf where bans forbid every
            token; anything beside padding. Where one is not finite the row has failed; the orchestrator is told so.
        paths: [sampled_rows] int64: of each row's draft tree a path that begins with the draft tokens that it gains;
            None where drafts are chains.
        num_suffix_tokens: [decode_rows] int64: of the draft (Draft.num_suffix_tokens).
        reported_logits: of the rows that asked, by their places among the sampled ones, [draft_len + 1, vocab] float32:
            the raw logits that tokens were chosen from; anything beside padding. Valid until the engine's next forward.
        waiting: by places among the sampled rows, WAITS or WAITS_ALONE of those whose guide has to go on beside the
            rounds: the orchestrator is told that in place of what they gain, which is nobody's.
    """

    num_tokens: torch.Tensor
    tokens: torch.Tensor
    draft_lens: torch.Tensor | None = None
    logprobs: VerdictLogprobs | None = None
    chosen_logits: torch.Tensor | None = None
    paths: torch.Tensor | None = None
    num_suffix_tokens: torch.Tensor | None = None
    reported_logits: Mapping[int, torch.Tensor] = field(default_factory=dict)
    waiting: Mapping[int, int] = field(default_factory=dict)


@dataclass
class VerdictLogprobs:
    """Log probabilities under the target's raw distribution (before penalties and temperature), as vLLM reports them.

    Attributes:
        token_ids: [logprob_rows, draft_len + 1, 1 + alternatives] int64: the chosen token, then the most likely ones.
        values: same shape, float32.
    """

    token_ids: torch.Tensor
    values: torch.Tensor


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One position's log probabilities: those of the token that stands there, and of the most likely ones, best
    first."""

    token_id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...]
