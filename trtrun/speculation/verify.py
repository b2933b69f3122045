"""Acceptance: which draft tokens the target keeps, and the one token that follows them.

Pure functions of tensors, without a read-back from the device: shapes are [R, K + 1] whatever is accepted, with -1
behind a row's tokens. Two ways of deciding, both lossless:

- by token: the target's own token, greedy or sampled, is chosen at every position; draft tokens are kept while they
  equal it, and the first that differs is replaced by it. The output is the target's own whatever the draft is.
- by probability: speculative sampling (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318).

This module knows no engine, no model and no rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtrun.core.nouns import Verdict, VerdictLogprobs
from trtrun.kernels.chooser import operations_of
from trtrun.kernels.torch.operations import count_accepted, gained
from trtrun.sampling.distributions import KernelDistributions, TorchDistributions, distributions_of
from trtrun.sampling.filters import pieces
from trtrun.sampling.random import Stream, gumbel_argmax, uniforms
from trtrun.sampling.row_sampling import RowSampling
from trtrun.sampling.row_steps import TokenMasks
from trtrun.tensors import cached_tensor, device_integers


def accept_by_token(target_tokens: Tensor, draft_tokens: Tensor, draft_lens: Tensor) -> tuple[Tensor, Tensor]:
    """Keep draft tokens while they equal the target's; the target's token at the first other place follows them.

    Args:
        target_tokens: [R, K + 1] int64: the target's choice after the row's tokens and draft tokens 0 .. i-1.
        draft_tokens: [R, K] int64; anything beyond a row's draft_lens.
        draft_lens: [R] int64, -1 to K; where it is 0 or less the row gains exactly one token.

    Returns:
        num_tokens: [R] int64, accepted + 1.
        tokens: [R, K + 1] int64, the tokens gained, then -1.
    """
    return operations_of(target_tokens.device.type).accept_by_token(target_tokens, draft_tokens, draft_lens)


def accept_forced(
    target_tokens: Tensor, draft_tokens: Tensor, draft_lens: Tensor, lengths: Tensor, acceptance: float
) -> tuple[Tensor, Tensor]:
    """Keep as many draft tokens as `acceptance` says, whatever the target chose: for benchmarks alone.

    Args:
        target_tokens, draft_tokens, draft_lens: as in accept_by_token.
        lengths: [R] int64: tokens in each row, from which it follows which rounds gain one token more than others.
        acceptance: tokens gained in a round on average, 1 or more; fewer where a draft is shorter.

    Returns:
        as accept_by_token.
    """
    if not draft_tokens.shape[1]:
        return accept_by_token(target_tokens, draft_tokens, draft_lens)
    whole = math.floor(acceptance)
    wanted = torch.full_like(lengths, whole - 1)
    if acceptance != whole:  # thirty operations, which other rounds do not have: without them where they can be spared
        wanted += uniforms(torch.zeros_like(lengths), lengths, Stream.ACCEPT) < acceptance - whole
    num_accepted = torch.minimum(wanted, draft_lens.clamp(min=0))
    return gained(draft_tokens, num_accepted, target_tokens.gather(1, num_accepted[:, None])[:, 0])


def accept_by_probability(
    target_probs: Tensor,
    draft_probs: Tensor,
    draft_tokens: Tensor,
    draft_lens: Tensor,
    seeds: Tensor,
    lengths: Tensor,
) -> tuple[Tensor, Tensor]:
    """Speculative sampling: accept draft token x with probability min(1, target_probs[x] / draft_probs[x]); replace the
    first rejected one by a sample of norm(max(target_probs - draft_probs, 0)); after full acceptance add a bonus token.

    A position's random numbers are fresh even if an earlier round, cut short by a rejection, looked at them: whether a
    position is reached depends on the numbers of earlier positions alone.

    Args:
        target_probs: [R, K + 1, V] float32, after the request's own parameters.
        draft_probs: [R, K, V] float32, the distributions that draft_tokens were sampled from, padded to V.
        draft_tokens: [R, K] int64; one outside [0, V), or without a probability of its own, is never accepted.
        draft_lens: [R] int64, -1 to K.
        seeds: [R] int64.
        lengths: [R] int64, the position that target_probs[:, 0] belongs to.

    Returns:
        as accept_by_token.
    """
    count, draft_len = draft_tokens.shape
    vocabulary = target_probs.shape[-1]
    possible = (draft_tokens >= 0) & (draft_tokens < vocabulary)
    index = draft_tokens.clamp(0, vocabulary - 1)[..., None]
    target_of_token = target_probs[:, :-1].gather(-1, index)[..., 0]
    draft_of_token = draft_probs.gather(-1, index)[..., 0]
    places = lengths[:, None] + torch.arange(draft_len, device=lengths.device)
    numbers = uniforms(seeds.repeat_interleave(draft_len), places.flatten(), Stream.ACCEPT).view(count, draft_len)
    # Where the draft's logits are not finite it has no distribution: its tokens are then nobody's, and the residual is
    # the target's own.
    possible &= draft_of_token > 0.0
    # u < target / draft, without the division; a token that the target rules out is never below 0.
    num_accepted = count_accepted((numbers * draft_of_token < target_of_token) & possible, draft_lens)

    at = num_accepted[:, None, None].expand(-1, 1, vocabulary)
    target_last = target_probs.gather(1, at)[:, 0]
    full = num_accepted >= draft_lens
    if draft_len:
        draft_last = draft_probs.gather(1, at.clamp(max=draft_len - 1))[:, 0]
        residual = (target_last - draft_last).clamp_(min=0.0)
        # All zero only where the two distributions are equal to the last bit (a rejection there is rounding).
        whole = full[:, None] | (residual.amax(dim=-1, keepdim=True) <= 0.0)
        last_probs = torch.where(whole, target_last, residual)
    else:
        last_probs = target_last
    streams = torch.where(full, int(Stream.TARGET), int(Stream.RECOVER))
    return gained(draft_tokens, num_accepted, gumbel_argmax(last_probs.log(), seeds, lengths + num_accepted, streams))


@dataclass(frozen=True)
class Verification:
    """What drafts are verified with: the target's logits of rows, and what is known of these.

    Attributes:
        logits: [R, K + 1, V] float32, raw; not altered. Of trees [R, nodes + 1, V]: after the row's newest token, then
            after each of its nodes.
        sampling: the rows' parameters.
        rows: the R rows.
        lengths: [R] int64, device: tokens in each row so far.
        token_ids: [max_rows, max_seq_len] int32, device, valid below lengths.
        max_context: upper bound of lengths, if the host knows one.
        forced_acceptance: see accept_forced; not where rows are accepted by probability.
        masks: tokens that may be chosen after each of `logits`, of rows that are guided; None where none is. What they
            forbid is forbidden before everything else: nothing that follows makes it possible again.
    """

    logits: Tensor
    sampling: RowSampling
    rows: Sequence[int]
    lengths: Tensor
    token_ids: Tensor
    max_context: int | None = None
    forced_acceptance: float | None = None
    masks: TokenMasks | None = None

    def allowed(self) -> Tensor:
        """The logits, -inf where masks forbid a token."""
        return self.logits if self.masks is None else self.masks.apply(self.logits)


def verify(
    verification: Verification,
    draft_tokens: Tensor,
    draft_lens: Tensor,
    draft_probs: Tensor | None = None,
    probability_rows: Sequence[int] = (),
) -> Verdict:
    """Decide what each row gains from the target's logits at K + 1 positions.

    Args:
        verification: the R rows and their logits.
        draft_tokens: [R, K] int64, device, each row contiguous; K may be 0; padding may hold any value.
        draft_lens: [R] int64, device, -1 to K.
        draft_probs: [S, K, V] float32, device, beside probability_rows; None when there are none.
        probability_rows: S indices into `rows` of the rows accepted by probability; the others are accepted by token.

    Returns:
        Verdict: num_tokens [R], tokens [R, K + 1], draft_lens [R] as given, logprobs for the rows that asked, in the
        order of `rows`, as wide as the widest of them asked, the raw logits of all tokens, and for the rows that asked
        all raw logits, as parts of `logits`. One that is not finite
        wins every argmax, and where none is finite token 0 is what remains: neither is an answer, which whoever reads
        the verdict has to see. A row whose bans and masks forbid every token ends before that position; where that is
        its first, it gains token 0 with a logit of -inf.

    Raises:
        ValueError: probability_rows without draft_probs of their number and width.
    """
    logits, sampling, rows = verification.logits, verification.sampling, verification.rows
    lengths, masks, forced_acceptance = verification.lengths, verification.masks, verification.forced_acceptance
    allowed = verification.allowed()
    found = distributions_of(
        sampling, allowed, rows, lengths, verification.token_ids, draft_tokens, verification.max_context
    )
    if probability_rows:
        shape = (len(probability_rows), draft_tokens.shape[1], logits.shape[-1])
        if draft_probs is None or tuple(draft_probs.shape) != shape:
            given = None if draft_probs is None else list(draft_probs.shape)
            raise ValueError(f"draft_probs must be {list(shape)} for the rows verified by probability, not {given}")
        num_tokens, tokens = _accept_both_ways(
            found, verification, draft_tokens, draft_lens, draft_probs, probability_rows
        )
    else:
        target_tokens = found.choose(Stream.TARGET)
        if forced_acceptance is None:
            num_tokens, tokens = accept_by_token(target_tokens, draft_tokens, draft_lens)
        else:
            lens = draft_lens if masks is None else _allowed_lens(allowed, draft_tokens, draft_lens)
            num_tokens, tokens = accept_forced(target_tokens, draft_tokens, lens, lengths, forced_acceptance)
    index = tokens.clamp(min=0) if draft_tokens.shape[1] else tokens  # padding stands behind drafts alone
    chosen_logits = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    if masks is not None or (forced_acceptance is None and sampling.may_forbid_all(rows)):
        num_tokens, tokens, chosen_logits = end_where_forbidden(num_tokens, tokens, chosen_logits, found.forbids(index))
    return Verdict(
        num_tokens,
        tokens,
        draft_lens,
        top_logprobs(logits, sampling, rows, tokens),
        chosen_logits,
        reported_logits={index: logits[index] for index in sampling.reported_indices(rows)},
    )


def _allowed_lens(allowed: Tensor, draft_tokens: Tensor, draft_lens: Tensor) -> Tensor:
    """[R] int64: of each row's draft the tokens before the first one that masks forbid."""
    if not draft_tokens.shape[1]:
        return draft_lens
    index = draft_tokens.clamp(0, allowed.shape[-1] - 1).unsqueeze(-1)
    may_stand = allowed[:, :-1].gather(-1, index).squeeze(-1) > -torch.inf
    return torch.minimum(draft_lens, may_stand.to(torch.int64).cumprod(dim=1).sum(dim=1))


def end_where_forbidden(
    num_tokens: Tensor, tokens: Tensor, chosen_logits: Tensor, forbidden: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What rows gain before the first token that is `forbidden` [R, P] bool; where it is the first, that one alone.

    So a row ends behind the same tokens whether they come one by one or several in a round.
    """
    gained = (~forbidden).to(torch.int64).cumprod(dim=1).sum(dim=1).clamp(min=1)
    num_tokens = torch.minimum(num_tokens, gained)
    steps = torch.arange(tokens.shape[1], device=tokens.device)
    tokens = torch.where(steps < num_tokens[:, None], tokens, -1)
    return num_tokens, tokens, chosen_logits.masked_fill(forbidden, -torch.inf)


def _accept_both_ways(
    found: TorchDistributions | KernelDistributions,
    verification: Verification,
    draft_tokens: Tensor,
    draft_lens: Tensor,
    draft_probs: Tensor,
    probability_rows: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """(num_tokens, tokens) of all rows; arguments as in `verify`."""
    sampling, rows, lengths = verification.sampling, verification.rows, verification.lengths
    device = lengths.device
    chosen = set(probability_rows)
    others = [place for place in range(len(rows)) if place not in chosen]
    if isinstance(found, KernelDistributions):
        from trtrun.kernels.triton.sampling.acceptance import accept_by_probability as accept_from_lines

        num_tokens = torch.empty_like(lengths)
        tokens = torch.empty((len(rows), draft_tokens.shape[1] + 1), dtype=torch.int64, device=device)
        if others:
            # Launching for all rows is cheaper than picking some; those by probability are overwritten.
            num_tokens, tokens = accept_by_token(found.choose(Stream.TARGET), draft_tokens, draft_lens)
        streams = (int(Stream.ACCEPT), int(Stream.TARGET), int(Stream.RECOVER))
        picks = cached_tensor(probability_rows, device)
        accept_from_lines(found.lines, picks, draft_probs, draft_tokens, draft_lens, streams, num_tokens, tokens)
        return num_tokens, tokens
    processed = found.processed
    num_tokens = torch.empty_like(lengths)
    tokens = torch.empty(processed.shape[:2], dtype=torch.int64, device=device)
    for part in pieces(len(probability_rows), processed[:1].numel()):
        index = device_integers(probability_rows[part], device)
        num_tokens[index], tokens[index] = accept_by_probability(
            sampling.probabilities(processed[index]),
            draft_probs[part],
            draft_tokens[index],
            draft_lens[index],
            sampling.seeds([rows[place] for place in probability_rows[part]]),
            lengths[index],
        )
    if others:
        index = device_integers(others, device)
        other_rows = [rows[place] for place in others]
        target_tokens = sampling.choose(processed[index], other_rows, lengths[index], Stream.TARGET)
        num_tokens[index], tokens[index] = accept_by_token(target_tokens, draft_tokens[index], draft_lens[index])
    return num_tokens, tokens


def top_logprobs(logits: Tensor, sampling: RowSampling, rows: Sequence[int], tokens: Tensor) -> VerdictLogprobs | None:
    """Log probabilities for the `rows` that asked for any, in their order: of `tokens` [R, P] int64 and the likeliest
    ones, by raw `logits` [R, P, V]; None where none did."""
    asked = sampling.wanted_logprobs(rows)
    if not asked:
        return None
    widest = max(wanted for _, wanted in asked)
    parts = []
    for part in pieces(len(asked), logits[:1].numel()):
        index = device_integers([place for place, _ in asked[part]], logits.device)
        parts.append(sampling.top_logprobs(logits[index], tokens[index], widest))
    if len(parts) == 1:
        return parts[0]
    return VerdictLogprobs(torch.cat([one.token_ids for one in parts]), torch.cat([one.values for one in parts]))
