"""Acceptance of draft trees: a row gains the path of which the target keeps most.

The target's token at a place depends on what stands before it and on the row's seed alone, so all paths that hold what
the target chose agree on it, and the text is plain decoding's whatever the tree is: with paths that share nodes, with
the same token at several, and with none. Rows whose drafts carry probabilities take this way too.

Where choices look at a row's tokens, as penalties do, the longest path is verified as the chain that it is. Elsewhere
each node is looked at once, however many paths go through it (kernels/torch/draft_trees.py).

Pure functions of tensors, without a read-back from the device. It knows no engine and no rank.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trtrun.core.nouns import Draft, Verdict
from trtrun.kernels.chooser import operations_of
from trtrun.sampling.distributions import distributions_of
from trtrun.sampling.filters import pieces
from trtrun.sampling.random import Stream
from trtrun.speculation.verify import Verification, accept_by_token, end_where_forbidden, top_logprobs, verify
from trtrun.tensors import cached_range


def verify_paths(verification: Verification, draft: Draft) -> Verdict:
    """Decide what each row gains from the target's logits after every node of its tree.

    Args:
        verification: the R rows and their logits, which are of the row's newest token and of each of `draft.tokens`.
        draft: of the R rows, with paths; its draft_probs are not looked at.

    Returns:
        As `verify`: tokens are [R, depth + 1], and draft_lens those of the deepest paths, cut off where the draft is.
    """
    if verification.forced_acceptance is None and not verification.sampling.needs_history(verification.rows):
        return _verify_nodes(verification, draft)
    lens, lines, tokens = draft.path_lens(), _lines(draft), path_tokens(draft)
    if verification.forced_acceptance is None:
        best = _longest_path(verification, draft, lines, tokens)
    else:
        best = lens.argmax(dim=1)
    along = _pick(lines, best)
    masks = None if verification.masks is None else verification.masks.picked(along)
    verdict = verify(
        replace(verification, logits=_gather(verification.logits, along), masks=masks),
        _pick(tokens, best),
        lens.gather(1, best.unsqueeze(1)).squeeze(1),
    )
    verdict.draft_lens = torch.where(draft.draft_lens < 0, draft.draft_lens, lens.amax(dim=1))
    verdict.paths = best
    return verdict


def _verify_nodes(verification: Verification, draft: Draft) -> Verdict:
    """`verify_paths` where no choice looks at a row's tokens: it depends on the node alone, so that each node is looked
    at once, however many paths go through it."""
    assert draft.paths is not None
    logits, sampling, rows = verification.logits, verification.sampling, verification.rows
    count, of_nodes = logits.shape[:2]
    places = verification.lengths.unsqueeze(1).expand(-1, of_nodes)
    if not sampling.passes(rows):
        steps = cached_range(1, draft.depth + 1, logits.device).expand_as(draft.paths)
        # Paths go through a node at one depth; what is behind a path's end counts for the newest token, and as nothing.
        depths = torch.zeros(logits.shape[:2], dtype=torch.int64, device=logits.device)
        depths.scatter_(1, (draft.paths + 1).flatten(1), steps.masked_fill(draft.paths < 0, 0).flatten(1))
        places = places + depths
    every = [row for row in rows for _ in range(of_nodes)]
    allowed, token_ids = verification.allowed(), verification.token_ids
    found = distributions_of(sampling, allowed.flatten(0, 1).unsqueeze(1), every, places.flatten(), token_ids)
    chosen = found.choose(Stream.TARGET).view(count, of_nodes)
    operations = operations_of(logits.device.type)
    kept = operations.accept_paths(chosen, allowed, draft.tokens, draft.paths, draft.draft_lens)
    num_tokens, tokens, chosen_logits = kept.num_tokens, kept.tokens, kept.logits
    if verification.masks is not None:
        forbidden = chosen_logits == -torch.inf
        num_tokens, tokens, chosen_logits = end_where_forbidden(num_tokens, tokens, chosen_logits, forbidden)
    logprobs = None
    if sampling.wanted_logprobs(rows):
        logprobs = top_logprobs(_gather(logits, _pick(_lines(draft), kept.paths)), sampling, rows, tokens)
    of_rows: dict[int, Tensor] = {}
    if reported := sampling.reported_indices(rows):
        along = _pick(_lines(draft), kept.paths)
        of_rows = {index: logits[index].index_select(0, along[index]) for index in reported}
    longest = torch.where(draft.draft_lens < 0, draft.draft_lens, kept.longest)
    return Verdict(num_tokens, tokens, longest, logprobs, chosen_logits, paths=kept.paths, reported_logits=of_rows)


def _longest_path(verification: Verification, draft: Draft, lines: Tensor, tokens: Tensor) -> Tensor:
    """[R] int64: of each row the path of which the target keeps most; `lines` of `_lines`, `tokens` of `path_tokens`,
    else as in `verify_paths`: with penalties and bans each path is looked at as the chain that it is, of some rows at a
    time."""
    assert draft.paths is not None
    logits, token_ids, max_context = verification.allowed(), verification.token_ids, verification.max_context
    count, num_paths, depth = draft.paths.shape
    vocabulary = logits.shape[-1]
    chosen = torch.empty((count, num_paths, depth + 1), dtype=torch.int64, device=logits.device)
    for part in pieces(count, num_paths * (depth + 1) * vocabulary):
        of_paths = _gather(logits[part], lines[part].flatten(1)).view(-1, depth + 1, vocabulary)
        every = [row for row in verification.rows[part] for _ in range(num_paths)]
        starts, before = verification.lengths[part].repeat_interleave(num_paths), tokens[part].flatten(0, 1)
        found = distributions_of(verification.sampling, of_paths, every, starts, token_ids, before, max_context)
        chosen[part] = found.choose(Stream.TARGET).view(-1, num_paths, depth + 1)
    kept, _ = accept_by_token(chosen.flatten(0, 1), tokens.flatten(0, 1), draft.path_lens().flatten())
    return kept.view(count, num_paths).argmax(dim=1)


def _lines(draft: Draft) -> Tensor:
    """[R, paths, depth + 1] int64: of the logits of a row's newest token and nodes those along each path; the first
    behind its end."""
    assert draft.paths is not None
    nodes = draft.paths.clamp(min=-1) + 1
    return torch.cat((torch.zeros_like(nodes[:, :, :1]), nodes), dim=2)


def _gather(logits: Tensor, lines: Tensor) -> Tensor:
    """[R, n, V]: the lines [R, n] of logits [R, nodes + 1, V]."""
    starts = torch.arange(len(logits), device=logits.device).unsqueeze(1) * logits.shape[1]
    return logits.flatten(0, 1).index_select(0, (lines + starts).flatten()).view(*lines.shape, -1)


def _pick(of_paths: Tensor, path: Tensor) -> Tensor:
    """[R, n]: of each row what one of its paths [R] has, of_paths [R, paths, n]."""
    return of_paths.gather(1, path.view(-1, 1, 1).expand(-1, 1, of_paths.shape[2])).squeeze(1)


def accepted_paths(draft: Draft, verdict: Verdict) -> Tensor:
    """[rows] int64: of each row of `draft` a path that begins with the tokens that the row has gained, but for the last
    of them. Every rank that holds the draft finds the same."""
    assert draft.paths is not None
    count = draft.paths.shape[0]
    if verdict.paths is not None:
        return verdict.paths[:count]
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
    path = _pick(draft.paths, accepted_paths(draft, verdict))
    nodes = path.gather(1, (kept - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    return torch.where(kept > 0, nodes + 1, 0)


def along_paths(draft: Draft, verdict: Verdict, of_nodes: Tensor) -> Tensor:
    """[rows, depth + 1, ...]: what rows have of their newest token and along the path that they have gained, of
    `of_nodes` [rows, nodes + 1, ...], which begins with the newest token's; any behind what is gained."""
    assert draft.paths is not None
    nodes = _pick(draft.paths, accepted_paths(draft, verdict)).clamp(min=-1) + 1
    columns = torch.cat((torch.zeros_like(nodes[:, :1]), nodes), dim=1)
    starts = torch.arange(len(of_nodes), device=nodes.device).unsqueeze(1) * of_nodes.shape[1]
    return (
        of_nodes.flatten(0, 1).index_select(0, (columns + starts).flatten()).view(*columns.shape, *of_nodes.shape[2:])
    )


def path_tokens(draft: Draft) -> Tensor:
    """[rows, paths, depth] int64: the tokens along each path of `draft`; any token behind its end."""
    assert draft.paths is not None
    paths = draft.paths.clamp(min=0).flatten(1)
    return draft.tokens.gather(1, paths).view(draft.paths.shape)
