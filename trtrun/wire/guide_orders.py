"""The bytes of orders about guides, which go the way of plans, and of the answer that one is built.

Orders number what they are of, so that an answer to one that was taken back is told from that to a later one.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trtrun.core.guide import Guide, GuideStart

_KIND = struct.Struct("=q")  # as a plan begins with its round, which is not negative; traces have the first three
_GUIDES = -4


class GuideMessage(NamedTuple):
    """What a rank is to do: forget the starts of these numbers, then begin to build others."""

    over: Sequence[int]
    begun: Mapping[int, GuideStart]


def encode_orders(message: GuideMessage) -> bytes:
    """The bytes of orders."""
    # Many may go on with one guide, which may be long.
    guides = dict.fromkeys(start.guide for start in message.begun.values())
    places = {guide: place for place, guide in enumerate(guides)}
    begun = [[number, places[start.guide], *start[1:]] for number, start in message.begun.items()]
    return _KIND.pack(_GUIDES) + json.dumps([list(message.over), [*places], begun]).encode()


def are_orders(payload: bytes) -> bool:
    """Whether a message that goes the way of plans is orders."""
    return bool(_KIND.unpack_from(payload)[0] == _GUIDES)


def decode_orders(payload: bytes) -> GuideMessage | None:
    """Orders; None where the message is something else."""
    if not are_orders(payload):
        return None
    over, listed, begun = json.loads(payload[_KIND.size :])
    guides = [Guide(kind, text) for kind, text in listed]
    starts = {number: GuideStart(guides[place], tuple(output), is_alone) for number, place, output, is_alone in begun}
    return GuideMessage(over, starts)


def encode_built(number: int) -> bytes:
    """The answer that a guide is built."""
    return _KIND.pack(number)


def decode_built(payload: bytes) -> int:
    """The number of the guide."""
    return int(_KIND.unpack(payload)[0])
