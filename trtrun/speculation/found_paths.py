"""Drafts made of continuations that were found somewhere, and of what came with requests.

It knows no method, and not where anything is found.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trtrun.core.nouns import Draft, RoundPlan
from trtrun.tensors import kept_integers, kept_range


class Continuations(NamedTuple):
    """What may follow each of a plan's decode rows, the best first.

    Attributes:
        tokens: [decode_rows, paths, draft_len] int64.
        counts: [decode_rows, paths] int64: how many of them there are; 0 where there is no such path.
    """

    tokens: Tensor
    counts: Tensor


def no_draft(plan: RoundPlan, device: torch.device) -> Draft:
    """The draft of a round without drafts."""
    rows = len(plan.decode_rows)
    empty = torch.zeros((rows, 0), dtype=torch.int64, device=device)
    return Draft(empty, torch.zeros(rows, dtype=torch.int64, device=device))


def draft_of_paths(plan: RoundPlan, found: Continuations, given: tuple[Tensor, Tensor] | None) -> Draft:
    """The continuations as a chain, or with several paths as a draft tree.

    Args:
        plan: the round's.
        found: of its decode rows; where a draft was given it takes the place of the first path.
        given: what `GivenDrafts.propose` says.
    """
    tokens, counts = found
    device, max_paths = tokens.device, tokens.shape[1]
    most = kept_integers(plan.draft_lens.clip(min=0).tolist(), device)
    if given is not None:
        num_given = given[1].sum(dim=1)
        is_given = num_given > 0
        tokens[:, 0] = torch.where(is_given.unsqueeze(1), given[0], tokens[:, 0])
        counts[:, 0] = torch.where(is_given, num_given, counts[:, 0])
    if max_paths == 1:
        return Draft(tokens[:, 0], torch.minimum(counts[:, 0], most))
    nodes = kept_range(0, max_paths * plan.draft_len, device).view(1, max_paths, -1)
    steps = kept_range(0, plan.draft_len, device)
    paths = torch.where(steps < counts.unsqueeze(2), nodes, -1)
    return Draft(tokens.flatten(1), torch.minimum(counts.amax(dim=1), most), paths=paths)
