"""Acceptance of draft trees: each path is verified as the chain that it is, and the longest one wins.

The target's token at a place depends on what stands before it and on the row's seed alone, so all paths that hold what
the target chose agree on it, and the text is plain decoding's whatever the tree is: with paths that share nodes, with
the same token at several, and with none. Rows whose drafts carry probabilities take this way too.

Pure functions of tensors, without a read-back from the device. It knows no engine and no rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trtrun.core.nouns import Draft, Verdict, VerdictLogprobs
from trtrun.sampling.row_sampling import RowSampling
from trtrun.speculation.verify import verify


def verify_paths(
    logits: Tensor,
    sampling: RowSampling,
    rows: Sequence[int],
    lengths: Tensor,
    token_ids: Tensor,
    draft: Draft,
    max_context: int | None = None,
    forced_acceptance: float | None = None,
) -> Verdict:
    """Decide what each row gains from the target's logits after every node of its tree.

    Args:
        logits: [R, nodes + 1, V] float32, raw: after the row's newest token, then after each of `draft.tokens`.
        draft: of the R rows, with paths; its draft_probs are not looked at.
        sampling, rows, lengths, token_ids, max_context, forced_acceptance: as in `verify`.

    Returns:
        As `verify`: tokens are [R, depth + 1], and draft_lens those of the deepest paths, cut off where the draft is.
    """
    assert draft.paths is not None
    count, num_paths, depth = draft.paths.shape
    lens = draft.path_lens()
    places = torch.cat((torch.zeros_like(lens).unsqueeze(2), draft.paths.clamp(min=-1) + 1), dim=2)
    starts = torch.arange(count, device=logits.device).view(-1, 1, 1) * logits.shape[1]
    of_paths = logits.flatten(0, 1).index_select(0, (places + starts).flatten())
    every = [row for row in rows for _ in range(num_paths)]
    verdict = verify(
        of_paths.view(count * num_paths, depth + 1, -1),
        sampling,
        every,
        lengths.repeat_interleave(num_paths),
        token_ids,
        path_tokens(draft).flatten(0, 1),
        lens.flatten(),
        max_context=max_context,
        forced_acceptance=forced_acceptance,
    )
    assert verdict.chosen_logits is not None
    best = verdict.num_tokens.view(count, num_paths).argmax(dim=1)
    picks = torch.arange(count, device=logits.device) * num_paths + best
    logprobs = verdict.logprobs
    if logprobs is not None:
        asked = [place for place, _ in sampling.wanted_logprobs(rows)]
        picked = torch.arange(len(asked), device=logits.device) * num_paths + best[asked]
        logprobs = VerdictLogprobs(logprobs.token_ids[picked], logprobs.values[picked])
    deepest = torch.where(draft.draft_lens < 0, draft.draft_lens, lens.amax(dim=1))
    of_best = (one.index_select(0, picks) for one in (verdict.num_tokens, verdict.tokens, verdict.chosen_logits))
    num_tokens, tokens, chosen_logits = of_best
    return Verdict(num_tokens, tokens, deepest, logprobs, chosen_logits)


def accepted_paths(draft: Draft, verdict: Verdict) -> Tensor:
    """[rows] int64: of each row of `draft` a path that begins with the tokens that the row has gained, but for the last
    of them. Every rank that holds the draft finds the same."""
    assert draft.paths is not None
    count = draft.paths.shape[0]
    gained = verdict.tokens[:count, : draft.depth].unsqueeze(1)
    is_gained = torch.arange(draft.depth, device=gained.device) < (verdict.num_tokens[:count] - 1).view(-1, 1, 1)
    same = (path_tokens(draft) == gained) & is_gained & (draft.paths >= 0)
    return same.to(torch.int64).cumprod(dim=2).sum(dim=2).argmax(dim=1)


def last_nodes(draft: Draft, verdict: Verdict) -> Tensor:
    """[rows] int64: of each row of `draft`, of its newest token and the tokens of its draft the one behind which the
    target chose the last token that the row has gained: 0 where nothing of the draft is kept."""
    kept = (verdict.num_tokens[: draft.tokens.shape[0]] - 1).clamp(min=0)
    if draft.paths is None:
        return kept
    best = accepted_paths(draft, verdict).view(-1, 1, 1).expand(-1, 1, draft.depth)
    nodes = draft.paths.gather(1, best).squeeze(1).gather(1, (kept - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    return torch.where(kept > 0, nodes + 1, 0)


def path_tokens(draft: Draft) -> Tensor:
    """[rows, paths, depth] int64: the tokens along each path of `draft`; any token behind its end."""
    assert draft.paths is not None
    paths = draft.paths.clamp(min=0).flatten(1)
    return draft.tokens.gather(1, paths).view(draft.paths.shape)
