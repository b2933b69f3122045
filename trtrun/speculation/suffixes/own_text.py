"""Where a row's last tokens stood before in its own prompt and output.

Pure functions of tensors, without a read-back from the device. It does not know what is made of what is found.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from trtrun.speculation.suffixes.continuations import MOST_PLACES, Places
from trtrun.tensors import kept_range

_NOWHERE = -3
"""In place of a token before a row's start. Corpora have -1 and -2 in such places."""


def last_tokens(token_ids: Tensor, lengths: Tensor, most: int) -> Tensor:
    """[R, most] int32: the last tokens of rows, the newest last; before a row's start what stands nowhere else, and is
    less than all that does.

    Args:
        token_ids: [R, columns] int32: the rows' tokens; scratch behind a row's length.
        lengths: [R] int64.
        most: tokens of each.
    """
    places = lengths.unsqueeze(1) + kept_range(-most, 0, token_ids.device)
    return torch.where(places >= 0, token_ids.gather(1, places.clamp(min=0)), _NOWHERE)


def find_in_rows(token_ids: Tensor, lengths: Tensor, wanted: Tensor, draft_len: int) -> Places:
    """The places of longest match in each row, of equally long ones the latest.

    Args:
        token_ids: [R, columns] int32: the rows' tokens; scratch behind a row's length.
        lengths: [R] int64.
        wanted: [R, most] int32: their last tokens, as `last_tokens` has them.
        draft_len: K, tokens behind each.
    """
    columns, most, device = token_ids.shape[1], wanted.shape[1], token_ids.device
    last = lengths.unsqueeze(1) - 1
    before = pad(token_ids, (most - 1, 0), value=-1).unfold(1, columns, 1)
    # The nearer to the newest token, the more: what is most is where the first other token stands.
    nearness = kept_range(1, most + 1, device).to(torch.uint8).unsqueeze(1)
    nearest = ((before != wanted.unsqueeze(2)) * nearness).amax(dim=1)
    matched = most - nearest.to(torch.int32)
    places = torch.arange(columns, dtype=torch.int32, device=device)
    scores = torch.where(places < last, matched * columns + places, 0)
    best, end = scores.topk(min(MOST_PLACES, columns), dim=1)
    matched = best.to(torch.int64) // columns
    counts = (last - end).clamp(min=0, max=draft_len)
    behind = end.unsqueeze(2) + kept_range(1, draft_len + 1, device)
    tokens = token_ids.gather(1, behind.clamp(max=columns - 1).flatten(1)).to(torch.int64)
    # Behind a row's end stands scratch, -1 too, which must be some token: it is fed with the rest.
    return Places(matched, tokens.clamp(min=0).view(behind.shape), counts)
