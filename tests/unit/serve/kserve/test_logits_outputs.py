"""Logits of several completions as one tensor."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from engine_messages import delta_of, run

from launch.serve.api.kserve import runs as logits
from launch.serve.api.kserve.row_requests import RowRequest
from launch.serve.api.kserve.runs import _Completion, first_positions, stack_logits
from launch.serve.api.kserve.tensors import MOST_WHOLE_BYTES, Tensor, write_bytes, write_parts
from trtrun.core.outputs import Logits
from trtrun.core.sampling_params import SamplingParams


def numbers(count: int, first: int = 1) -> np.ndarray:
    """[count, 2] float32, none of them 0."""
    return np.arange(2 * first, 2 * (first + count), dtype=np.float32).reshape(count, 2)


@pytest.mark.parametrize("at_once", [1, 4, 1 << 20])
def test_rows_are_stacked_from_parts_and_filled_up(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits, "_AT_ONCE", at_once)
    rows = [[numbers(2), numbers(3, 3)], [], [numbers(1, 9)]]

    async def check() -> None:
        found = await stack_logits(rows)
        assert found.shape == (3, 5, 2) and found.dtype == np.float32
        assert np.array_equal(found[0], numbers(5)) and not found[1].any()
        assert np.array_equal(found[2, :1], numbers(1, 9)) and not found[2, 1:].any()
        assert (await stack_logits([[]])).shape == (1, 0, 0)
        alone = await stack_logits([[numbers(4)]])
        assert np.array_equal(alone, numbers(4)[None])

    run(check())


def test_the_first_positions_of_parts() -> None:
    parts = [numbers(2), numbers(3, 3)]
    for count in range(6):
        found = first_positions(count, parts)
        assert np.array_equal(np.concatenate(found), numbers(5)[:count])


def test_a_token_that_is_left_out_has_no_logits() -> None:
    sampling = SamplingParams(stop_token_ids=(9,), return_generation_logits=True)
    completion = _Completion(
        RowRequest("x", sampling, frozenset({9}), 0, True, False, False, False), 0, 0, [1, 1], None
    )
    delta = msgspec.structs.replace(delta_of((5, 6, 9), "stop"), generation_logits=Logits(2, (numbers(3).tobytes(),)))
    update = completion.take(delta)
    assert update.tokens == [5, 6] and np.array_equal(np.concatenate(update.generation_logits), numbers(2))


@pytest.mark.parametrize("count", [0, 3, MOST_WHOLE_BYTES // 8 + 5])
def test_parts_are_the_bytes_of_a_tensor(count: int) -> None:
    for values in (numbers(count), numbers(count).T):
        tensor = Tensor("a", "FP32", values)
        assert b"".join(write_parts(tensor)) == write_bytes(tensor)
