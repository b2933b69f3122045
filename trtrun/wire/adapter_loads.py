"""The byte layout of what rank 0 asks of engine ranks when an adapter is to be loaded while they serve, and of answers.

It goes the way of plans: one message has an adapter read beside the rounds, and a later one has it put into a slot
between two plans, or forgotten. A plan begins with its round, 0 or more; this with a number below those of traces
(timing/tracing.py). It knows bytes. It does not know who loads.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import NamedTuple

_KIND = -16
_HEAD = struct.Struct("=q")


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


def encode_order(order: AdapterOrder) -> bytes:
    """The bytes of an order."""
    path = None if order.path is None else os.fspath(order.path)
    return _HEAD.pack(_KIND) + json.dumps([order.number, order.name, path, order.slot]).encode()


def decode_order(message: bytes) -> AdapterOrder | None:
    """The order; None where the message is something else."""
    if _HEAD.unpack_from(message)[0] != _KIND:
        return None
    number, name, path, slot = json.loads(message[_HEAD.size :])
    return AdapterOrder(number, name, None if path is None else Path(path), slot)


def encode_read(number: int, problem: str) -> bytes:
    """The answer that an adapter is read, or why it cannot be."""
    return _HEAD.pack(number) + problem.encode(errors="replace")


def decode_read(payload: bytes) -> tuple[int, str]:
    """The number of the load, and what is wrong; empty where nothing is."""
    return int(_HEAD.unpack_from(payload)[0]), payload[_HEAD.size :].decode()
