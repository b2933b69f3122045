"""Byte layouts of what ranks tell each other beside plans and reports: orders to read adapters and to build guides, and
the packets of drafts, guesses and verdicts between target ranks and draft ranks of their own.

Orders go the way of plans, which begin with their round, 0 or more: an order begins with a negative number of its own,
below those of traces (timing/tracing.py). Orders are numbered, so that an answer to one that was taken back is told
from that to a later one. One message has an adapter read beside the rounds, and a later one has it put into a slot
between two plans, or forgotten.

A packet says which round it belongs to and how large it is: so the receiver can tell an old one from the one that it
waits for, and works nothing out from the plan. It has a round's number and a table of int64, no pickles.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trtrun.core.guide import Guide, GuideStart

_ADAPTER = -16
_NUMBER = struct.Struct("=q")


class AdapterOrder(NamedTuple):
    """What a rank is to do with one adapter.

    Attributes:
        number: of the load, which the answer has.
        name: of the adapter, for people.
        path: of its directory, which is to be read; None where it was.
        slot: that it is to fill then; 0 has it forgotten.
    """

    number: int
    name: str = ""
    path: Path | None = None
    slot: int = 0


def encode_adapter_order(order: AdapterOrder) -> bytes:
    """The bytes of an order."""
    path = None if order.path is None else os.fspath(order.path)
    return _NUMBER.pack(_ADAPTER) + json.dumps([order.number, order.name, path, order.slot]).encode()


def decode_adapter_order(message: bytes) -> AdapterOrder | None:
    """The order; None where the message is something else."""
    if _NUMBER.unpack_from(message)[0] != _ADAPTER:
        return None
    number, name, path, slot = json.loads(message[_NUMBER.size :])
    return AdapterOrder(number, name, None if path is None else Path(path), slot)


def encode_read(number: int, problem: str) -> bytes:
    """The answer that an adapter is read, or why it cannot be."""
    return _NUMBER.pack(number) + problem.encode(errors="replace")


def decode_read(payload: bytes) -> tuple[int, str]:
    """The number of the load, and what is wrong; empty where nothing is."""
    return int(_NUMBER.unpack_from(payload)[0]), payload[_NUMBER.size :].decode()


_GUIDES = -4


class GuideMessage(NamedTuple):
    """What a rank is to do: forget the starts of these numbers, then begin to build others."""

    over: Sequence[int]
    begun: Mapping[int, GuideStart]


def encode_guide_orders(message: GuideMessage) -> bytes:
    """The bytes of orders."""
    # Many may go on with one guide, which may be long.
    guides = dict.fromkeys(start.guide for start in message.begun.values())
    places = {guide: place for place, guide in enumerate(guides)}
    begun = [[number, places[start.guide], *start[1:]] for number, start in message.begun.items()]
    return _NUMBER.pack(_GUIDES) + json.dumps([list(message.over), [*places], begun]).encode()


def are_guide_orders(payload: bytes) -> bool:
    """Whether a message that goes the way of plans is orders."""
    return bool(_NUMBER.unpack_from(payload)[0] == _GUIDES)


def decode_guide_orders(payload: bytes) -> GuideMessage | None:
    """Orders; None where the message is something else."""
    if not are_guide_orders(payload):
        return None
    over, listed, begun = json.loads(payload[_NUMBER.size :])
    guides = [Guide(kind, text) for kind, text in listed]
    starts = {number: GuideStart(guides[place], tuple(output), is_alone) for number, place, output, is_alone in begun}
    return GuideMessage(over, starts)


def encode_built(number: int) -> bytes:
    """The answer that a guide is built."""
    return _NUMBER.pack(number)


def decode_built(payload: bytes) -> int:
    """The number of the guide."""
    return int(_NUMBER.unpack(payload)[0])


DRAFT_TAG, VERDICT_TAG, LATE_TAG, HIDDEN_TAG, GUESS_TAG = 1, 2, 3, 4, 5
"""Under which tags they travel; the third tells draft ranks of one engine that the target has gone on without them, the
fourth says how many hidden states come beside a verdict, the last is of drafts for verdicts that are not known yet."""

_NUM_HEADER = 3


def encode_packet(round_index: int, table: np.ndarray) -> bytes:
    """The bytes of a round's table [rows, columns] int64."""
    return np.array([round_index, *table.shape], dtype=np.int64).tobytes() + table.astype(np.int64).tobytes()


def decode_packet(payload: bytes) -> tuple[int, np.ndarray]:
    """The round and the table that `encode_packet` was given.

    Raises:
        ValueError: the bytes are no packet.
    """
    numbers = np.frombuffer(payload, dtype=np.int64)
    round_index, rows, columns = numbers[:_NUM_HEADER].tolist()
    return round_index, numbers[_NUM_HEADER:].reshape(rows, columns).copy()
