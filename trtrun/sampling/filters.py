"""Temperature, top_k, top_p and min_p: which tokens a sampled row may choose, and how likely each is; and the few
largest of many numbers, row by row.

Functions of [rows, positions, vocabulary] logits; each row has its own parameters. No value is read back from a device;
on the CPU, where reading costs nothing, the nucleus is searched among fewer candidates. Rows are ranked some at a time,
so that a large batch takes no more memory: every step of sampling treats rows independently, so the pieces give the
same bits.

Order: temperature, top_k, top_p over the distribution that top_k left, then min_p, as transformers orders them. min_p
compares with the most likely token, which every other filter keeps, so its place does not change what it removes.
Where tokens tie at a boundary the lower token ids stay, as after a stable descending sort.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trtrun.kernels.chooser import operations_of

MOST_ELEMENTS = 1 << 24
"""Logits whose temporaries exist at once: 64 MiB for each tensor of float32."""


def pieces(rows: int, elements_of_a_row: int, most_elements: int | None = None) -> list[slice]:
    """[0, rows) in slices of whole rows that hold `most_elements` at most (None: MOST_ELEMENTS), a row at least."""
    step = max(1, (MOST_ELEMENTS if most_elements is None else most_elements) // max(1, elements_of_a_row))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


# Elements ranked at a time on a CPU, in whole rows: larger temporaries are fresh memory each time, and its page faults
# cost more than the ranking (measured: 16 rows of 6 x 16384 took 2 to 3 times as long at once as one by one).
_CPU_CHUNK = 1 << 17

# Elements ranked at a time elsewhere: sorting 64 rows of 6 x 128k at once would take over 3 GB.
_DEVICE_CHUNK = 1 << 22

RANKING_BYTES = 80
"""Upper bound of what ranking takes for each element: keys, two sides of a radix sort with indices, sums in float64."""

_LOWEST = torch.finfo(torch.float32).min
_HIGHEST = torch.finfo(torch.float32).max


def most_ranked(device_type: str) -> int:
    """Elements that are ranked at a time, unless a row has more."""
    return _CPU_CHUNK if device_type == "cpu" else _DEVICE_CHUNK


def apply_temperature(logits: Tensor, temperatures: Tensor) -> Tensor:
    """(logits - max) / temperature, so that the most likely token is at 0 and no temperature can overflow.

    Args:
        logits: [n, P, V] float32; NaN counts as -inf. Not altered.
        temperatures: [n] float32 above 0.

    Returns:
        [n, P, V] float32, at most 0, without NaN; all -inf where every token is impossible.
    """
    scaled = torch.nan_to_num(logits, nan=-torch.inf, posinf=_HIGHEST, neginf=-torch.inf)
    scaled.sub_(scaled.amax(dim=-1, keepdim=True).clamp_(min=_LOWEST))
    # Adding 0 turns -0.0 (an underflow) into 0.0, for the order of bits in `largest`.
    return scaled.div_(temperatures[:, None, None]).add_(0.0)


def apply_min_p_(scaled: Tensor, log_min_p: Tensor) -> Tensor:
    """Mask, in place, tokens less than min_p times as likely as the most likely one.

    Args:
        scaled: [n, P, V] float32 whose maximum over V is 0 (see apply_temperature).
        log_min_p: [n] float32, -inf where off.
    """
    return scaled.masked_fill_(scaled < log_min_p[:, None, None], -torch.inf)


def largest(scaled: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values of the last dimension in descending order, and their ids; lower ids first at ties.
    NaN counts as larger than any number; -0.0 as smaller than 0.0.

    torch.topk leaves ties open, so it ranks unique int64 keys: the float's bits, made order-preserving, above the id
    counted from the end.
    """
    vocabulary = scaled.shape[-1]
    bits = scaled.view(torch.int32)
    ordered = bits ^ (bits >> 31).bitwise_and_(0x7FFFFFFF)
    reversed_ids = torch.arange(vocabulary - 1, -1, -1, device=scaled.device, dtype=torch.int64)
    keys = ordered.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(reversed_ids)
    best = torch.topk(keys, count).values if count < vocabulary else torch.sort(keys, descending=True).values
    ids = (vocabulary - 1) - best.bitwise_and_(0xFFFFFFFF)
    return scaled.gather(-1, ids), ids


def _keep_only(scaled: Tensor, ids: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    """A tensor like `scaled` with -inf everywhere but at the `ids` that `keep` marks."""
    keep[..., 0] = True
    values = values.masked_fill(~keep, -torch.inf)
    return torch.full_like(scaled, -torch.inf).scatter_(-1, ids, values)


def top_k_top_p(scaled: Tensor, top_k: Tensor, largest_top_k: int, top_p: Tensor | None) -> Tensor:
    """Keep each row's top_k tokens, and of their distribution the smallest set that reaches top_p.

    Args:
        scaled: [n, P, V] float32, at most 0.
        top_k: [n] int64, 1 to largest_top_k.
        largest_top_k: the largest of them, known on the host, at most V; nothing larger is ever ranked.
        top_p: [n] float32 in (0, 1], or None when no row has it.

    Returns:
        [n, P, V] float32, -inf where removed; a new tensor.
    """
    if top_p is None:
        return _by_rows(lambda part, limits: _top_k_top_p(part, limits, largest_top_k, None), scaled, top_k)
    return _by_rows(
        lambda part, limits, shares: _top_k_top_p(part, limits, largest_top_k, shares), scaled, top_k, top_p
    )


def _top_k_top_p(scaled: Tensor, top_k: Tensor, largest_top_k: int, top_p: Tensor | None) -> Tensor:
    values, ids = largest(scaled, largest_top_k)
    ranks = torch.arange(largest_top_k, device=scaled.device)
    keep = (ranks < top_k[:, None, None]).expand(values.shape).clone()
    if top_p is not None:
        weights = values.exp().to(torch.float64)
        reached = weights.cumsum(-1)
        # The running sum at the last kept rank, not a sum of the kept: it does not depend on the other rows' top_k.
        total = reached.gather(-1, (top_k - 1)[:, None, None].expand(*values.shape[:2], 1))
        keep &= _below_nucleus(reached - weights, total, top_p)
    return _keep_only(scaled, ids, values, keep)


def nucleus(scaled: Tensor, top_p: Tensor) -> Tensor:
    """Keep each row's smallest set of tokens whose probability reaches top_p (Holtzman et al. 2020, arXiv:1904.09751).

    Args:
        scaled: [n, P, V] float32, at most 0.
        top_p: [n] float32 in (0, 1].

    Returns:
        [n, P, V] float32, -inf where removed; a new tensor.
    """
    return _by_rows(_nucleus, scaled, top_p)


def _nucleus(scaled: Tensor, top_p: Tensor) -> Tensor:
    vocabulary = scaled.shape[-1]
    weights = scaled.exp()
    total = weights.sum(-1, keepdim=True, dtype=torch.float64)
    count = vocabulary
    if scaled.device.type == "cpu" and scaled.numel():
        # Tokens below (1 - top_p) / V together weigh less than 1 - top_p, so none of them can be in the nucleus. On a
        # GPU the whole sort is cheap and reading the count would stall it. Half the bound is room for rounding.
        bound = (1.0 - top_p[:, None, None]) * (total / (2 * vocabulary)).to(torch.float32)
        count = int((weights >= bound).sum(-1).max())
    values, ids = largest(scaled, count)
    candidates = values.exp().to(torch.float64)
    return _keep_only(scaled, ids, values, _below_nucleus(candidates.cumsum(-1) - candidates, total, top_p))


def _by_rows(change: Callable[..., Tensor], scaled: Tensor, *parameters: Tensor) -> Tensor:
    """change(scaled, *parameters), some rows at a time; it works on rows independently."""
    parts = pieces(scaled.shape[0], scaled[:1].numel(), most_ranked(scaled.device.type))
    if len(parts) < 2:
        return change(scaled, *parameters)
    changed = torch.empty_like(scaled)
    for part in parts:
        changed[part] = change(scaled[part], *(values[part] for values in parameters))
    return changed


def _below_nucleus(before: Tensor, total: Tensor, top_p: Tensor) -> Tensor:
    """Where the weight of all more likely tokens, `before`, has not yet reached top_p of `total`; all where top_p is 1
    (rounding of the sums must not cut a tail that nobody asked to cut)."""
    share = top_p[:, None, None]
    return (before < share * total) | (share >= 1.0)


def argmax(numbers: torch.Tensor) -> torch.Tensor:
    """Where the largest number of each row stands, the first one where several are.

    Args:
        numbers: [..., width] float32, any device. A number that is not finite, but for -inf, is the largest.

    Returns:
        [...] int64; 0 where all are -inf.
    """
    return operations_of(numbers.device.type).argmax(numbers)


def likeliest(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Where the `count` largest numbers of each row stand, the largest first.

    Args:
        numbers: [rows, width] float32, any device; without NaN.
        count: how many; all of a row that is shorter.

    Returns:
        [rows, count] int64. Of the largest the first one comes first, as `torch.argmax` has it: in bfloat16 the largest
        logit is often there twice. Elsewhere equal numbers have no order, and where fewer are above -inf, what
        follows them may come twice.
    """
    return operations_of(numbers.device.type).likeliest(numbers, min(count, numbers.shape[1]))


def likeliest_in_order(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Where the `count` largest numbers of each row stand, the largest first, and of equal ones the first ones first:
    those of a smaller count are the first of a larger one.

    Args:
        numbers: [..., width] float32, any device.
        count: how many, at least 1; all of a row that is shorter.

    Returns:
        [..., count] int64. Where fewer are above -inf, what follows them is any place.
    """
    width = numbers.shape[-1]
    count = min(count, width)
    lines = numbers.reshape(-1, width)
    at_once = operations_of(numbers.device.type).likeliest_in_order(lines, count)
    if at_once is not None:
        return at_once.reshape(*numbers.shape[:-1], count)
    found = torch.empty((len(lines), count), dtype=torch.int64, device=numbers.device)
    for part in pieces(len(lines), width, most_ranked(numbers.device.type)):
        found[part] = largest(lines[part], count)[1]
    return found.view(*numbers.shape[:-1], count)
