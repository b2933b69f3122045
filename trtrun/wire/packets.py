"""Byte layouts of what target ranks and draft ranks of their own tell each other in a round.

A packet says what it carries: its round, and for each row how many tokens are valid. So the receiver can tell an old
one from the one that it waits for, and none of it has to be worked out from the plan. Layouts are arrays of int64, no
pickles. It knows the nouns of `core` and nothing of MPI: `parallel.mailbox` carries the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trtrun.core import HostDraft, HostVerdict

DRAFT_TAG, VERDICT_TAG, LATE_TAG = 1, 2, 3
"""Under which tags they travel; the last tells draft ranks of one engine that the target has gone on without them."""

_HEADER = 3


def encode_draft(draft: HostDraft) -> bytes:
    """The bytes of a draft: round, rows, width, then lengths, which are foreseen, and all tokens, padded."""
    return _encode(draft.round_index, draft.tokens, [int(foreseen) for foreseen in draft.foreseen])


def decode_draft(payload: bytes) -> HostDraft:
    """The draft that `encode_draft` wrote."""
    round_index, tokens, foreseen = _decode(payload)
    return HostDraft(round_index, tokens, [bool(value) for value in foreseen])


def encode_verdict(verdict: HostVerdict) -> bytes:
    """The bytes of a verdict."""
    return _encode(verdict.round_index, verdict.tokens, [0] * len(verdict.tokens))


def decode_verdict(payload: bytes) -> HostVerdict:
    """The verdict that `encode_verdict` wrote."""
    round_index, tokens, _ = _decode(payload)
    return HostVerdict(round_index, tokens)


def round_of(payload: bytes) -> int:
    """The round that a packet belongs to."""
    return int(np.frombuffer(payload, dtype=np.int64, count=1)[0])


def _encode(round_index: int, rows: Sequence[Sequence[int]], marks: Sequence[int]) -> bytes:
    width = max((len(row) for row in rows), default=0)
    numbers = [round_index, len(rows), width]
    for row, mark in zip(rows, marks, strict=True):
        numbers += [len(row), mark, *row, *[0] * (width - len(row))]
    return np.array(numbers, dtype=np.int64).tobytes()


def _decode(payload: bytes) -> tuple[int, list[list[int]], list[int]]:
    numbers = np.frombuffer(payload, dtype=np.int64).tolist()
    round_index, count, width = numbers[:_HEADER]
    rows, marks = [], []
    for row in range(count):
        start = _HEADER + row * (width + 2)
        length, mark = numbers[start : start + 2]
        rows.append(numbers[start + 2 : start + 2 + length])
        marks.append(mark)
    return round_index, rows, marks
