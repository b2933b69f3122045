"""States of rows: how a forward's tokens go through them, one after the other, in plain torch.

This is the form that says what is right: every token goes through in its turn, from a state that is kept behind it
(`RowStates`), so that bits depend neither on the cut of a prompt into chunks, nor on drafts, nor on other rows. It
reads positions, so that it runs on CPUs alone and is no graph. It knows states, inputs and positions. It does not know
what a token does to a state: that is its step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trtrun.kvcache.row_states import LayerStates, SegmentStates

Step = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], tuple[Sequence[torch.Tensor], torch.Tensor]]
"""The parts of states, [rows, *shape] each, and what a token of each row brings, [rows, *shape] float32 each → the
states behind it, in the dtypes that they came in, and what comes out [rows, features]. A row's bits do not depend on
the others."""


def go_through(
    step: Step,
    inputs: Sequence[torch.Tensor],
    states: LayerStates,
    segments: Sequence[SegmentStates],
    features: int,
) -> torch.Tensor:
    """Have the tokens of a forward go through their rows' states.

    Args:
        step: what a token does.
        inputs: what the tokens bring, [tokens, *shape] float32 each, as the layer's spec has them.
        states: of the layer.
        segments: where the states of the forward's rows stand.
        features: numbers that come out of a token.

    Returns:
        [tokens, features] float32; zeros for padding.
    """
    found = inputs[0].new_zeros((len(inputs[0]), features))
    for segment in segments:
        _go_through_segment(step, inputs, states, segment, found)
    return found


def leading_rows(states: SegmentStates) -> SegmentStates:
    """A segment's rows without those that go on where the one before ends."""
    leading = states.leaders == torch.arange(states.segment.rows)
    rows = SegmentStates.of_numbers(states.segment, states.numbers[:, leading])
    if bool((rows.first < rows.kept).any()):
        raise RuntimeError("tokens are fed again that a state has seen: it was moved up too far")
    return rows


def _go_through_segment(
    step: Step, inputs: Sequence[torch.Tensor], kept: LayerStates, rows: SegmentStates, found: torch.Tensor
) -> None:
    """`go_through` of one segment's rows, into their places in `found`; all rows take their next token together."""
    rows = leading_rows(rows)
    slots, capacity = rows.slots, kept.inputs[0].shape[1]
    state = [part.index_select(0, slots) for part in kept.states]
    # Of all tokens at once, [tokens, rows] each: what most tokens do nothing of is not asked for at every one.
    positions = rows.kept + torch.arange(int((rows.end - rows.kept).max()) + 1).unsqueeze(1)
    settled = positions == rows.settled
    saved = (positions == rows.saved_at) & (positions <= rows.end)
    lives, fed = positions < rows.end, positions >= rows.first
    counted = fed & lives
    places, turns = (rows.places + positions).clamp(0, len(found) - 1), positions % capacity
    stops, counts = (settled | saved).any(1).tolist(), counted.any(1).tolist()
    for passed in range(len(positions)):
        if stops[passed]:
            here, there = settled[passed], saved[passed]
            for part, states, snapshots in zip(state, kept.states, kept.snapshots, strict=True):
                states[slots[here]] = part[here]
                snapshots[rows.snapshots[there]] = part[there]
        if passed == len(positions) - 1:  # behind the last token
            break
        place, turn, written = places[passed], turns[passed], counted[passed]
        brought = []
        for given, stored in zip(inputs, kept.inputs, strict=True):
            told = given.index_select(0, place)
            brought.append(torch.where(_beside(fed[passed], told), told, stored[slots, turn]))
            if counts[passed]:
                stored[slots[written], turn[written]] = told[written]
        new, out = step(state, brought)
        alive = lives[passed]
        state = [torch.where(_beside(alive, part), part, old) for part, old in zip(new, state, strict=True)]
        if counts[passed]:
            found[place[written]] = out[written]


def _beside(rows: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """[rows] with as many dimensions as `part`."""
    return rows.view(-1, *[1] * (part.dim() - 1))
