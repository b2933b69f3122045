"""Draft trees by torch's operations: laid out for a forward, and the path of which the target keeps most.

Nodes are columns of a row's draft; a path names them in order, then -1. Column 0 of tokens and of what the target chose
is the row's newest token, and column i + 1 node i. It knows tensors. It does not know models or who drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from trtrun.tensors import cached_range


class ForkedRows(NamedTuple):
    """Rows with draft trees, as a forward reads them; see `lay_out`.

    Attributes:
        tokens: [R, nodes + 1] int64: each row's newest token, and its draft.
        positions: [R, paths, depth + 1] int64: of the newest token and of each node of a path; -1 behind its end.
        tables: [R, paths, blocks] int64: the block table of each path.
        nodes: [R, paths, depth + 1] int64: the column of `tokens` at each place; 0 behind a path's end.
        places: [R, nodes + 1] int64: of each column the first place in [paths * (depth + 1)]; 0 where there is none.
        shared: [R * (paths - 1)] int64: for each path but the first the block in which the row's newest token stands.
        copies: [R * (paths - 1)] int64: the path's own block in its place.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    tables: torch.Tensor
    nodes: torch.Tensor
    places: torch.Tensor
    shared: torch.Tensor
    copies: torch.Tensor


class AcceptedPaths(NamedTuple):
    """What rows gain of their draft trees; see `accept_paths`.

    Attributes:
        paths: [R] int64: of each row the path of which most is kept, the first of several.
        num_tokens: [R] int64: kept nodes, and one.
        tokens: [R, depth + 1] int64: the tokens gained, then -1.
        logits: [R, depth + 1] float32: raw, of each of them; behind them of token 0.
        longest: [R] int64: nodes of the row's deepest path, cut off where its draft is.
    """

    paths: torch.Tensor
    num_tokens: torch.Tensor
    tokens: torch.Tensor
    logits: torch.Tensor
    longest: torch.Tensor


def lay_out(
    token_ids: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    draft_tokens: torch.Tensor,
    paths: torch.Tensor,
    draft_lens: torch.Tensor,
    tables: torch.Tensor,
    own_blocks: torch.Tensor,
    block_size: int,
) -> ForkedRows:
    """Lay trees out for a forward.

    Args:
        token_ids: [max_rows, columns] int32.
        lengths: [max_rows] int64.
        rows: [R] int64.
        draft_tokens: [R, nodes] int64.
        paths: [R, paths, depth] int64.
        draft_lens: [R] int64: where each row's tree is cut off.
        tables: [R, blocks] int64: the rows' own block tables.
        own_blocks: [max_rows, most paths - 1, count] int64: blocks of the paths but the first.
        block_size: tokens of a block.
    """
    newest = lengths.index_select(0, rows) - 1
    first = token_ids[rows, newest].to(torch.int64).unsqueeze(1)
    steps = cached_range(0, paths.shape[2] + 1, rows.device)
    lens = path_lens(paths, draft_lens)
    is_there = steps <= lens.unsqueeze(2)
    nodes = torch.cat((torch.zeros_like(lens).unsqueeze(2), paths + 1), dim=2).masked_fill_(~is_there, 0)
    positions = torch.where(is_there, newest.view(-1, 1, 1) + steps, -1)
    tokens = torch.cat((first, draft_tokens), dim=1)
    num_others = paths.shape[1] - 1
    own = own_blocks[:, :num_others].index_select(0, rows)
    start = (newest // block_size).unsqueeze(1)
    shared = tables.gather(1, start).expand(-1, num_others)
    behind = (cached_range(0, tables.shape[1], rows.device) - start).unsqueeze(1).expand(-1, num_others, -1)
    is_own = (behind >= 0) & (behind < own.shape[2])
    replaced = own.gather(2, behind.clamp(0, own.shape[2] - 1))
    forked = torch.where(is_own, replaced, tables.unsqueeze(1))
    whole = torch.cat((tables.unsqueeze(1), forked), dim=1)
    copies = own[:, :, 0].reshape(-1)
    return ForkedRows(tokens, positions, whole, nodes, _places(nodes, tokens), shared.reshape(-1), copies)


def path_lens(paths: torch.Tensor, draft_lens: torch.Tensor) -> torch.Tensor:
    """[R, paths] int64: nodes of each path, cut off at the row's draft_lens."""
    lens = (paths < 0).cumsum(dim=2).eq(0).sum(dim=2)
    return lens.minimum(draft_lens.clamp(min=0).unsqueeze(1))


def _places(nodes: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The first place of each column of `tokens` in `nodes`; 0, where every row's newest token stands, for the rest."""
    flat = nodes.flatten(1)
    order = cached_range(0, flat.shape[1], nodes.device).expand_as(flat)
    missing = flat.shape[1]
    found = torch.full_like(tokens, missing).scatter_reduce_(1, flat, order, "amin")
    return found.masked_fill_(found == missing, 0)


def accept_paths(
    chosen: torch.Tensor,
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    paths: torch.Tensor,
    draft_lens: torch.Tensor,
) -> AcceptedPaths:
    """Keep of each row's tree the path that agrees longest with what the target chose.

    Args:
        chosen: [R, nodes + 1] int64: the target's choice after the newest token and after each node.
        logits: [R, nodes + 1, V] float32: what it was chosen from, raw.
        draft_tokens, paths, draft_lens: as in `lay_out`.
    """
    count, num_paths, depth = paths.shape
    lens = path_lens(paths, draft_lens)
    lines = torch.nn.functional.pad(paths.clamp(min=-1) + 1, (1, 0))
    drafted = draft_tokens.gather(1, paths.clamp(min=0).flatten(1)).view(paths.shape)
    along = chosen.gather(1, lines.flatten(1)).view(count, num_paths, depth + 1)
    steps = cached_range(0, depth + 1, paths.device)
    same = (along[:, :, :-1] == drafted) & (steps[:-1] < lens.unsqueeze(2))
    kept = same.to(torch.int64).cumprod(dim=2).sum(dim=2)
    best = kept.argmax(dim=1)
    num_kept = kept.gather(1, best.unsqueeze(1))
    line = lines.gather(1, best.view(-1, 1, 1).expand(-1, 1, depth + 1)).squeeze(1)
    tokens = torch.where(steps <= num_kept, chosen.gather(1, line), -1)
    places = cached_range(0, count, paths.device).unsqueeze(1)
    return AcceptedPaths(
        best, num_kept.squeeze(1) + 1, tokens, logits[places, line, tokens.clamp(min=0)], lens.amax(dim=1)
    )
