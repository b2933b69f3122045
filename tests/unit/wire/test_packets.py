"""What draft and target tell each other survives its way as bytes."""

from __future__ import annotations

import numpy as np
import pytest

from trtrun.wire.messages import decode_packet, encode_packet


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (4, 0), (1, 1), (3, 6), (64, 34)])
@pytest.mark.parametrize("round_index", [0, 3, 2**40])
def test_a_table_comes_out_as_it_went_in(shape: tuple[int, int], round_index: int) -> None:
    table = np.random.default_rng(4).integers(-(2**40), 2**40, shape)
    found_round, found = decode_packet(encode_packet(round_index, table))
    assert found_round == round_index and found.dtype == np.int64
    np.testing.assert_array_equal(found, table)
    found[...] = 7  # its own memory, that torch may write to


def test_what_is_no_packet_is_refused() -> None:
    payload = encode_packet(1, np.zeros((2, 3), dtype=np.int32))
    for wrong in (b"", payload[:16], payload[:-8], payload[:-1], payload + bytes(8)):
        with pytest.raises(ValueError):
            decode_packet(wrong)
