"""Sealed messages: whatever is changed on the way is found. The rest of the probe needs ranks (tests/ranks)."""

from __future__ import annotations

import pytest

from parallel.probe import SIZES, break_reason, seal


@pytest.mark.parametrize("size", [16, *SIZES])
def test_a_message_is_what_it_was(size: int) -> None:
    assert len(seal(3, 7, size)) == size
    assert break_reason(seal(3, 7, size), 3, 7, size) is None


@pytest.mark.parametrize("place", [0, 3, 4, 8, 12, 15, 16, 40, 63])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_flipped_bit_anywhere_is_found(place: int, bit: int) -> None:
    message = bytearray(seal(3, 7, 64))
    message[place] ^= 1 << bit
    assert "checksum is wrong" in str(break_reason(bytes(message), 3, 7, 64))


def test_another_message_does_not_pass() -> None:
    assert "it is message 6 of rank 3, not message 7 of rank 3" in str(break_reason(seal(3, 6, 64), 3, 7, 64))
    assert "it is message 7 of rank 2, not message 7 of rank 3" in str(break_reason(seal(2, 7, 64), 3, 7, 64))
    assert "63 bytes came where 64 were due" in str(break_reason(seal(3, 7, 63), 3, 7, 64))


def test_two_messages_differ() -> None:
    assert seal(3, 7, 64)[16:] != seal(3, 8, 64)[16:]
    assert seal(3, 7, 64)[16:] != seal(4, 7, 64)[16:]
