"""The byte layout of what target ranks and draft ranks of their own tell each other: drafts, guesses and verdicts.

A packet says which round it belongs to and how large it is. So the receiver can tell an old one from the one that it
waits for, and none of it has to be worked out from the plan. A round's number and a table of int64, no pickles. It
knows nothing of MPI (`parallel.mailbox` carries the bytes), nor what the numbers mean.
"""

from __future__ import annotations

import numpy as np

DRAFT_TAG, VERDICT_TAG, LATE_TAG, HIDDEN_TAG, GUESS_TAG = 1, 2, 3, 4, 5
"""Under which tags they travel; the third tells draft ranks of one engine that the target has gone on without them, the
fourth says how many hidden states come beside a verdict, the last is of drafts for verdicts that are not known yet."""

_HEADER = 3


def encode_packet(round_index: int, table: np.ndarray) -> bytes:
    """The bytes of a round's table [rows, columns] int64."""
    return np.array([round_index, *table.shape], dtype=np.int64).tobytes() + table.astype(np.int64).tobytes()


def decode_packet(payload: bytes) -> tuple[int, np.ndarray]:
    """The round and the table that `encode_packet` was given.

    Raises:
        ValueError: the bytes are no packet.
    """
    numbers = np.frombuffer(payload, dtype=np.int64)
    round_index, rows, columns = numbers[:_HEADER].tolist()
    return round_index, numbers[_HEADER:].reshape(rows, columns).copy()
