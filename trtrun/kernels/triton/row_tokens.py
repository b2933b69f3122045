"""What rounds read from rows' tokens and write to them, each in one Triton kernel for CUDA: draft trees, too, which are
laid out for a forward, and the path of which the target keeps most (kernels/torch/draft_trees.py).

A round of a small model takes a millisecond, and every kernel between its forwards two or three microseconds. Torch's
operations for a tree are thirty and forty kernels of a few numbers each, a tenth of the time of a small tree's round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trtrun.kernels.torch.draft_trees import AcceptedPaths, ForkedRows


@triton.jit(
    do_not_specialize=["ids_stride", "token_stride", "width"],
    do_not_specialize_on_alignment=["rows", "num_tokens", "tokens"],
)
def _advance_kernel(
    token_ids, ids_stride, lengths, rows, num_tokens, tokens, token_stride, width, PADDED: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    length = tl.load(lengths + row)
    step = tl.arange(0, PADDED)
    token = tl.load(tokens + place * token_stride + step, mask=step < width)
    tl.store(token_ids + row * ids_stride + length + step, token.to(token_ids.dtype.element_ty), mask=step < width)
    tl.store(lengths + row, length + tl.load(num_tokens + place))


def advance(
    token_ids: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, num_tokens: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Append tokens to rows, in place.

    Args:
        token_ids: [max_rows, max_seq_len] int32.
        lengths: [max_rows] int64.
        rows: [R] int64, each row once.
        num_tokens: [R] int64: by how much the rows become longer.
        tokens: [R, width] int64: what is written behind each row, all of it.
    """
    width = tokens.shape[1]
    if len(rows) and width:
        tokens = tokens if tokens.stride(1) == 1 else tokens.contiguous()
        _advance_kernel[(len(rows),)](
            token_ids, token_ids.stride(0), lengths, rows, num_tokens.contiguous(), tokens, tokens.stride(0), width,
            PADDED=triton.next_power_of_2(width), num_warps=1,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["ids_stride", "draft_stride", "queries"],
    do_not_specialize_on_alignment=["rows", "draft_tokens", "draft_lens", "tokens", "positions"],
)
def _with_drafts_kernel(
    token_ids, ids_stride, lengths, rows, draft_tokens, draft_stride, draft_lens, tokens, positions, queries,
    PADDED: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    newest = tl.load(lengths + row) - 1
    step = tl.arange(0, PADDED)
    inside = step < queries
    first = tl.load(token_ids + row * ids_stride + newest).to(tl.int64)
    draft = tl.load(draft_tokens + place * draft_stride + step - 1, mask=inside & (step > 0), other=0)
    most = tl.maximum(tl.load(draft_lens + place), 0)
    tl.store(tokens + place * queries + step, tl.where(step == 0, first, draft), mask=inside)
    tl.store(positions + place * queries + step, tl.where(step <= most, newest + step, -1), mask=inside)


def with_drafts(
    token_ids: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_lens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The newest token of each row, and its draft behind it.

    Args:
        token_ids: [max_rows, max_seq_len] int32.
        lengths: [max_rows] int64, at least 1.
        rows: [R] int64.
        draft_tokens: [R, K] int64; K may be 0.
        draft_lens: [R] int64; below 1 where a row has no draft.

    Returns:
        tokens and positions, [R, K + 1] int64 each; positions behind a row's draft are -1.
    """
    count, draft_len = draft_tokens.shape
    tokens, positions = rows.new_empty((2, count, draft_len + 1)).unbind()
    if count:
        draft_tokens = draft_tokens if draft_tokens.stride(1) == 1 else draft_tokens.contiguous()
        _with_drafts_kernel[(count,)](
            token_ids, token_ids.stride(0), lengths, rows, draft_tokens, draft_tokens.stride(0),
            draft_lens.contiguous(), tokens, positions, draft_len + 1,
            PADDED=triton.next_power_of_2(draft_len + 1), num_warps=1,
        )  # fmt: skip
    return tokens, positions


_PATHS, _STEPS = 64, 16
"""Paths of a tree and steps of a path, padding counted, unless it has more: few sizes make few kernels."""

_COLUMNS, _PLACES, _BLOCKS = 32, 128, 128
"""Columns of tokens whose places a program finds, places that it looks at together, and columns of a block table."""

_SIZES = ["num_paths", "depth", "num_nodes", "blocks", "own_paths", "own_count"]
_STRIDES = ["ids_stride", "draft_stride", "table_stride"]
_SMALL = ["rows", "draft_tokens", "paths", "draft_lens", "tables", "tokens", "positions", "nodes", "places", "forked"]


@triton.jit
def _reaches(paths, line, step, depth, is_real):
    """Whether none of a path's nodes before place `step` is missing; paths [.., depth] begin at `line`."""
    goes_on = step >= 0
    for before in range(depth):
        node = tl.load(paths + line + before + step * 0, mask=is_real, other=-1)
        goes_on = goes_on & ((node >= 0) | (before >= step))
    return goes_on


@triton.jit(do_not_specialize=[*_SIZES, *_STRIDES], do_not_specialize_on_alignment=[*_SMALL, "shared", "copies"])
def _lay_out_kernel(
    token_ids, ids_stride, lengths, rows, draft_tokens, draft_stride, paths, draft_lens, tables, table_stride,
    own_blocks, own_paths, own_count, tokens, positions, nodes, forked, places, shared, copies,
    num_paths, depth, num_nodes, blocks,
    BLOCK_SIZE: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr, PLACES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """A path of a row; or behind these some columns of its tokens."""
    place, path = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + place)
    newest = tl.load(lengths + row) - 1
    draft_len = tl.maximum(tl.load(draft_lens + place), 0)
    of_row = place * num_paths * depth
    if path < num_paths:
        step = tl.arange(0, STEPS)
        is_step = step <= depth
        line = of_row + path * depth
        is_there = is_step & (step <= draft_len) & _reaches(paths, line, step, depth, is_step)
        node = tl.load(paths + line + step - 1, mask=is_there & (step > 0), other=-1)
        at = (place * num_paths + path) * (depth + 1) + step
        tl.store(nodes + at, tl.where(is_there, node + 1, 0), mask=is_step)
        tl.store(positions + at, tl.where(is_there, newest + step, -1), mask=is_step)
        start = newest // BLOCK_SIZE
        own = own_blocks + (row * own_paths + path - 1) * own_count
        for first in range(0, blocks, BLOCKS):
            column = first + tl.arange(0, BLOCKS)
            block = tl.load(tables + place * table_stride + column, mask=column < blocks)
            behind = column - start
            is_own = (column * 0 + path > 0) & (behind >= 0) & (behind < own_count) & (column < blocks)
            block = tl.where(is_own, tl.load(own + behind, mask=is_own, other=0), block)
            tl.store(forked + (place * num_paths + path) * blocks + column, block, mask=column < blocks)
        if path > 0:
            other = place * (num_paths - 1) + path - 1
            tl.store(shared + other, tl.load(tables + place * table_stride + start))
            tl.store(copies + other, tl.load(own))
    else:
        column = (path - num_paths) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = column <= num_nodes
        token = tl.load(draft_tokens + place * draft_stride + column - 1, mask=is_column & (column > 0), other=0)
        first_token = tl.load(token_ids + row * ids_stride + newest).to(tl.int64)
        tl.store(tokens + place * (num_nodes + 1) + column, tl.where(column == 0, first_token, token), mask=is_column)
        missing = num_paths * (depth + 1)
        found = tl.full((COLUMNS,), missing, tl.int32)
        for begin in range(0, missing, PLACES):
            where = begin + tl.arange(0, PLACES)
            of_path, step = where // (depth + 1), where % (depth + 1)
            line = of_row + of_path * depth
            is_real = where < missing
            is_there = is_real & (step <= draft_len) & _reaches(paths, line, step, depth, is_real)
            node = tl.load(paths + line + step - 1, mask=is_there & (step > 0), other=-1)
            is_same = is_there[None, :] & ((node + 1)[None, :] == column[:, None])
            found = tl.minimum(found, tl.min(tl.where(is_same, where[None, :], missing), axis=1))
        tl.store(
            places + place * (num_nodes + 1) + column, tl.where(found == missing, 0, found).to(tl.int64), mask=is_column
        )


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
    """Lay trees out as kernels/torch/draft_trees.py does; `own_blocks` is contiguous."""
    (count, num_paths, depth), num_nodes, blocks = paths.shape, draft_tokens.shape[1], tables.shape[1]
    paths, draft_lens = paths.contiguous(), draft_lens.contiguous()
    draft_tokens = draft_tokens if draft_tokens.stride(1) == 1 else draft_tokens.contiguous()
    tables = tables if tables.stride(1) == 1 else tables.contiguous()
    made = ForkedRows(
        rows.new_empty((count, num_nodes + 1)),
        rows.new_empty((count, num_paths, depth + 1)),
        rows.new_empty((count, num_paths, blocks)),
        rows.new_empty((count, num_paths, depth + 1)),
        rows.new_empty((count, num_nodes + 1)),
        rows.new_empty(count * (num_paths - 1)),
        rows.new_empty(count * (num_paths - 1)),
    )
    if count:
        _lay_out_kernel[(count, num_paths + triton.cdiv(num_nodes + 1, _COLUMNS))](
            token_ids, token_ids.stride(0), lengths, rows, draft_tokens, draft_tokens.stride(0), paths, draft_lens,
            tables, tables.stride(0), own_blocks, own_blocks.shape[1], own_blocks.shape[2],
            made.tokens, made.positions, made.nodes, made.tables, made.places, made.shared, made.copies,
            num_paths, depth, num_nodes, blocks, BLOCK_SIZE=block_size,
            STEPS=max(_STEPS, triton.next_power_of_2(depth + 1)), COLUMNS=_COLUMNS, PLACES=_PLACES, BLOCKS=_BLOCKS,
        )  # fmt: skip
    return made


@triton.jit(
    do_not_specialize=["line_stride", "draft_stride", "num_paths", "depth", "num_nodes"],
    do_not_specialize_on_alignment=[
        "chosen",
        "draft_tokens",
        "paths",
        "draft_lens",
        "best",
        "num_tokens",
        "gained",
        "of_gained",
        "longest",
    ],
)
def _accept_paths_kernel(
    chosen, logits, line_stride, draft_tokens, draft_stride, paths, draft_lens,
    best, num_tokens, gained, of_gained, longest, num_paths, depth, num_nodes,
    PATHS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """A row: every path in a line of PATHS x STEPS."""
    place = tl.program_id(0).to(tl.int64)
    path, step = tl.arange(0, PATHS), tl.arange(0, STEPS)
    is_real = (path < num_paths)[:, None] & (step < depth)[None, :]
    at = place * num_paths * depth + path[:, None] * depth + step[None, :]
    node = tl.load(paths + at, mask=is_real, other=-1)
    before = tl.load(paths + at - 1, mask=is_real & (step > 0)[None, :], other=-1)
    draft_len = tl.maximum(tl.load(draft_lens + place), 0).to(tl.int32)
    lens = tl.minimum(tl.min(tl.where(node < 0, step[None, :], STEPS), axis=1), draft_len)
    tl.store(longest + place, tl.max(lens).to(tl.int64))
    choices = chosen + place * (num_nodes + 1)
    is_there = is_real & (step[None, :] < lens[:, None])
    token = tl.load(draft_tokens + place * draft_stride + node, mask=is_there, other=-1)
    wanted = tl.load(choices + tl.maximum(before, -1) + 1, mask=is_there, other=-2)
    kept = tl.min(tl.where(is_there & (token == wanted), STEPS, step[None, :]), axis=1)
    # The first of those of which most is kept.
    score = tl.max(tl.where(path < num_paths, kept * PATHS + PATHS - 1 - path, -1))
    found, num_kept = PATHS - 1 - score % PATHS, score // PATHS
    tl.store(best + place, found.to(tl.int64))
    tl.store(num_tokens + place, (num_kept + 1).to(tl.int64))
    is_line = step <= depth
    along = paths + (place * num_paths + found) * depth
    line = tl.maximum(tl.load(along + step - 1, mask=is_line & (step > 0), other=-1), -1) + 1
    gains = tl.load(choices + line, mask=step <= num_kept, other=-1)
    tl.store(gained + place * (depth + 1) + step, gains, mask=is_line)
    value = tl.load(logits + (place * (num_nodes + 1) + line) * line_stride + tl.maximum(gains, 0), mask=is_line)
    tl.store(of_gained + place * (depth + 1) + step, value, mask=is_line)


def accept_paths(
    chosen: torch.Tensor,
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    paths: torch.Tensor,
    draft_lens: torch.Tensor,
) -> AcceptedPaths:
    """Accept paths as kernels/torch/draft_trees.py does; each line of `logits` is contiguous."""
    (count, num_paths, depth), num_nodes = paths.shape, draft_tokens.shape[1]
    paths, draft_lens = paths.contiguous(), draft_lens.contiguous()
    draft_tokens = draft_tokens if draft_tokens.stride(1) == 1 else draft_tokens.contiguous()
    lines = logits.flatten(0, 1)  # a head of a shared-out vocabulary gives what is cut off wider lines
    numbers = chosen.new_empty((3, count))
    tokens = chosen.new_empty((count, depth + 1))
    made = AcceptedPaths(numbers[0], numbers[1], tokens, logits.new_empty(tokens.shape), numbers[2])
    if count:
        _accept_paths_kernel[(count,)](
            chosen.contiguous(), lines, lines.stride(0), draft_tokens, draft_tokens.stride(0), paths, draft_lens,
            *made, num_paths, depth, num_nodes,
            PATHS=max(_PATHS, triton.next_power_of_2(num_paths)), STEPS=max(_STEPS, triton.next_power_of_2(depth + 1)),
        )  # fmt: skip
    return made
